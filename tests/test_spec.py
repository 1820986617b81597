"""From logits to tokens to text."""

import itertools
import math
import random

import numpy as np
import pytest

import spec
from common import assert_close
from spec import ACCEPT, BONUS, RESIDUAL, Detokenizer, SamplingParams, draw, sample, target_probs, verify


# ----------------------------------------------------------------------------------------------
# parameters


@pytest.mark.parametrize("field, value", [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", None),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"), ("temperature", None),
    ("top_p", 0), ("top_p", -1), ("top_p", 1.01), ("top_p", math.nan), ("top_k", -1), ("top_k", 2.0),
    ("seed", 1.0), ("seed", "x"), ("stop", ""), ("stop", ("a", "")), ("stop", (1,)), ("stop", 5), ("ignore_eos", 1)])
def test_bad_parameters(field, value):
    """Each is refused, with the field, the value and what it must be."""
    with pytest.raises(ValueError, match=f"{field}=.*it must be"):
        SamplingParams(**{field: value})


def test_good_parameters():
    """The edges that are allowed, and the forms of stop."""
    SamplingParams(max_tokens=1, temperature=0, top_k=10**9, top_p=1e-9, seed=-5)
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams(stop=None).stop == ()
    for params in (SamplingParams(temperature=np.float32(0.5), max_tokens=np.uint8(200), seed=np.int64(5), top_k=np.int8(3)),
                   SamplingParams(temperature=10**400, max_tokens=2**70)):
        assert type(params.max_tokens) is type(params.top_k) is int and type(params.temperature) is type(params.top_p) is float
        assert target_probs(np.zeros(4), params).sum() == 1 and params.max_tokens + 2**62 > 2**62


# ----------------------------------------------------------------------------------------------
# distributions


def naive_probs(logits, params):
    """target_probs as one would explain it, a token at a time."""
    V = len(logits)
    if params.temperature == 0:
        best = max(range(V), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(V)]
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    if params.top_k:
        kth = sorted(logits, reverse=True)[min(params.top_k, V) - 1]
        weights = [w if x >= kth else 0.0 for w, x in zip(weights, logits)]
    probs = [w / sum(weights) for w in weights]
    if params.top_p < 1:
        kept, mass = set(), 0.0
        for i in sorted(range(V), key=lambda i: (-probs[i], i)):
            if mass >= params.top_p:
                break
            kept.add(i)
            mass += probs[i]
        probs = [p if i in kept else 0.0 for i, p in enumerate(probs)]
        probs = [p / sum(probs) for p in probs]
    return probs


@pytest.mark.parametrize("seed", range(30))
def test_target_probs_against_the_naive_version(seed):
    """Random logits, every combination of temperature, top-k and top-p."""
    logits = np.random.default_rng(seed).normal(size=11) * 3
    for temperature, top_k, top_p in itertools.product((0, 0.3, 1.0, 4.0), (0, 1, 3, 11, 50), (1.0, 0.9, 0.5, 1e-6)):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        assert_close(target_probs(logits, params), naive_probs(logits, params), 1e-12, "float64, sums of 11 terms")


def test_extremes():
    """Too cold to divide by is greedy; huge logits do not overflow; float32 input is not rounded on the way."""
    logits = np.array([1.0, 3.0, 3.0, 2.0])
    for temperature in (0, 1e-320, 5e-324):
        assert target_probs(logits, SamplingParams(temperature=temperature)).tolist() == [0, 1, 0, 0]
    assert_close(target_probs(logits * 1e300, SamplingParams()), [0, 0.5, 0.5, 0], 0, "equal logits share")
    assert target_probs(np.float32(logits), SamplingParams()).dtype == np.float64
    assert target_probs(logits, SamplingParams(top_p=1e-9)).tolist() == [0, 1, 0, 0]      # the best is always kept


# ----------------------------------------------------------------------------------------------
# draws


def test_draws_are_functions_of_seed_position_and_purpose():
    """Equal arguments, equal draws; any other argument, another draw."""
    cases = list(itertools.product((0, 1, -1, 2**70), (0, 1, 511), (BONUS, ACCEPT, RESIDUAL)))
    values = [draw(*case) for case in cases]
    assert values == [draw(*case) for case in cases] and len(set(values)) == len(cases)
    assert all(0 <= value < 1 for value in values)


def test_draws_are_uniform():
    """20,000 draws in 20 bins: chi-square below 60. With 19 degrees of freedom, false alarms are about 4 in a million, and
    the seeds are fixed."""
    counts = np.histogram([draw(7, position, BONUS) for position in range(20_000)], bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 60


def test_sample_is_the_inverse_of_the_cumulative_sum():
    """Each token owns an interval of u as long as its probability; zero-probability tokens own none, not even at the ends."""
    probs = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    us = (np.arange(1000) + 0.5) / 1000
    counts = np.bincount([sample(probs, u) for u in us], minlength=6)
    assert counts.tolist() == [0, 200, 0, 500, 300, 0]
    assert sample(probs, 0.0) == 1 and sample(probs, np.nextafter(1, 0)) == 4
    assert sample(np.array([0.1] * 3 + [0.0]), np.nextafter(1, 0)) == 2


# ----------------------------------------------------------------------------------------------
# verification: exact in distribution


def enumerate_verify(target, draft_probs, monkeypatch, grid):
    """The distribution of the first token that `verify` really emits, by running it on a grid of draws."""
    V = len(draft_probs)
    out = np.zeros(V)
    for x in range(V):
        if draft_probs[x] == 0:
            continue
        for ua in grid:
            for ur in grid:
                monkeypatch.setattr(spec, "draw", lambda seed, position, purpose: {ACCEPT: ua, RESIDUAL: ur, BONUS: ur}[purpose])
                token = verify(target, [x], [draft_probs], 0, 0)[0]
                out[token] += draft_probs[x] / len(grid) ** 2
    return out


@pytest.mark.parametrize("target, draft", [
    ([0.5, 0.25, 0.25, 0], [0.25, 0.5, 0, 0.25]), ([0, 0, 1, 0], [0.25, 0.25, 0.25, 0.25]), ([1, 0, 0, 0], [0, 0, 0, 1]),
    ([0.25, 0.25, 0.25, 0.25], [0, 1, 0, 0]), ([0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]), ([0.125, 0.375, 0.5, 0], [0.5, 0.25, 0.25, 0])])
def test_one_step_of_verification_is_exact(target, draft, monkeypatch):
    """Whatever the draft: the first token is distributed as the target. In these cases every edge at which a draw changes
    the outcome is a multiple of 1/24, so running `verify` on 24 x 24 midpoints enumerates all outcomes exactly."""
    target, draft = np.array([target, [0.25] * 4]), np.array(draft, float)
    grid = (np.arange(24) + 0.5) / 24
    assert_close(enumerate_verify(target, draft, monkeypatch, grid), target[0], 1e-12, "float64, 24 * 24 * 4 terms")


def test_verify_emits_between_one_and_k_plus_one():
    """Greedy: the accepted prefix and a correction, or everything and the bonus."""
    one_hot = np.eye(6)
    target = one_hot[[1, 2, 3, 4]]
    for wrong in range(4):
        drafts = [1, 2, 3]
        if wrong < 3:
            drafts[wrong] = 5
        tokens = verify(target, drafts, one_hot[drafts], seed=3, position=0)
        assert tokens == [1, 2, 3, 4][:wrong + 1]
    assert verify(target[:1], [], [], seed=3, position=0) == [1]


def test_verify_uses_separate_draws():
    """Accepting, the residual and the bonus each look at their own draw, once per position."""
    seen = []
    original, spec.draw = spec.draw, lambda *args: seen.append(args) or original(*args)
    try:
        uniform = np.full(4, 0.25)
        verify([uniform] * 3, [0, 1], [uniform] * 2, seed=5, position=10)
        verify([np.eye(4)[3], uniform], [0], [uniform], seed=5, position=10)
    finally:
        spec.draw = original
    assert seen == [(5, 10, ACCEPT), (5, 11, ACCEPT), (5, 12, BONUS), (5, 10, ACCEPT), (5, 10, RESIDUAL)]


# ----------------------------------------------------------------------------------------------
# text


@pytest.mark.parametrize("seed", range(200))
def test_deltas_concatenate_to_the_text(seed):
    """Random bytes in random pieces: the deltas are the decoded whole, no replacement character comes early, and nothing
    that a stop string could begin with is let out."""
    r = random.Random(seed)
    alphabet = ["a", "b", "ab", "é", "日本", "🙂", "\n", "END"]
    data = b"".join(r.choice([r.choice(alphabet).encode(), bytes([r.randrange(256)])] if seed % 2 else [r.choice(alphabet).encode()])
                    for _ in range(r.randint(0, 25)))
    stop = tuple(r.choice(["ab", "aab", "END", "é日", "b\n"]) for _ in range(r.randint(0, 2)))
    text, out, position = Detokenizer(stop), "", 0
    while position < len(data) and not text.stopped:
        size = r.randint(1, 4)
        out += text.add(data[position:position + size])
        position += size
        if seed % 2 == 0:
            assert "�" not in out
        for s in () if text.stopped else stop:
            seen = out + text._held
            assert s not in seen and not any(seen.endswith(s[:n]) for n in range(len(text._held) + 1, len(s)))
    out += text.add(b"", final=True)
    whole = data.decode("utf-8", "replace")
    if not text.stopped:
        assert out == whole and not any(s in whole for s in stop)
    else:
        assert whole.startswith(out) and any(whole[len(out):].startswith(s) for s in stop)


def test_stop_across_tokens_and_false_alarms():
    """Held back while it may be a stop, let out when it is not."""
    text = Detokenizer(("\nUser:",))
    assert [text.add(piece) for piece in (b"Hi\n", b"Us", b"ers!\n", b"User", b": me")] == ["Hi", "", "\nUsers!", "", ""]
    assert text.stopped and text.add(b"more") == "" and text.add(b"", final=True) == ""
    text = Detokenizer(("aab",))
    assert [text.add(b"a"), text.add(b"a"), text.add(b"a"), text.add(b"b")] == ["", "", "a", ""] and text.stopped


def test_the_earliest_stop_wins():
    """Two stop strings in one piece: the text ends before the first."""
    text = Detokenizer(("dd", "bb"))
    assert text.add(b"aabbccdd") == "aa" and text.stopped


def test_half_a_character_at_the_end():
    """An incomplete character comes out as U+FFFD when the request ends, and not before."""
    text = Detokenizer()
    assert text.add("é".encode()[:1]) == "" and text.add(b"", final=True) == "�"
