"""Speculative decoding inside the engine: the same tokens when greedy, the same distribution when sampled."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import GHOST_VOCABULARY, Ghost, GhostEngine, assert_close, ghost_text, greedy, poison, reference_greedy
from kvcache import Batch, KVCache
from nanoserve import Engine, ModelConfig, SamplingParams
from labs import Roofline, on_roofline
from spec import ModelDrafter, NgramDrafter, choose_drafts, fit_line, target_probs
from test_engine import GHOST_WORK, SWITCHES, configuration, serve, tiny_engine


# ----------------------------------------------------------------------------------------------
# drafters


def test_ngram_drafter():
    """The longest suffix wins, then the latest occurrence; it never finds itself, and goes round where it runs into itself."""
    guess = lambda tokens, k=4: NgramDrafter(100).guess(SimpleNamespace(tokens=tokens), k)
    assert guess([1, 2, 3, 7, 8, 9, 3, 5, 5, 1, 2, 3], 2) == [7, 8]             # three tokens before one
    assert guess([3, 7, 3, 8, 3], 1) == [8]                                     # the latest
    assert guess([1, 2, 3]) == [] and guess([5]) == []
    assert guess([5, 5], 3) == [5, 5, 5] and guess([1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]
    assert guess([1, 2, 1], 0) == []


def naive_guess(tokens, k):
    for n in range(min(3, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - 1 - n, -1, -1):
            if tokens[start:start + n] == tokens[-n:]:
                out = list(tokens)
                for i in range(k):
                    out.append(out[start + n + i])
                return out[len(tokens):]
    return []


def test_ngram_drafter_against_the_naive_one():
    """On random texts of few different tokens."""
    r = np.random.default_rng(0)
    for _ in range(500):
        tokens = r.integers(0, 4, size=r.integers(1, 30)).tolist()
        assert NgramDrafter(4).guess(SimpleNamespace(tokens=tokens), 5) == naive_guess(tokens, 5)


class GhostDraft(Ghost):
    """A ghost that is wrong about every third token. It reads its own K/V through the target's block tables, and fails if
    a position of any sequence is missing there."""

    def forward(self, batch, cache):
        logits = super().forward(batch, cache)
        right = logits.argmax(-1)
        wrong = torch.where(right % 3 == 0, (right + 1) % GHOST_VOCABULARY, right)
        return torch.nn.functional.one_hot(wrong, GHOST_VOCABULARY).double() if len(wrong) else logits


class SpeculatingGhost(GhostEngine):
    def load_drafter(self):
        if self.config.drafter != "model":
            return super().load_drafter()
        model, cache = GhostDraft(self.context_length), KVCache(1, self.config.num_blocks, self.config.block_size, 1, 1,
                                                                torch.float64, "cpu", "numpy")
        self.draft_cache = cache
        return ModelDrafter(model, lambda sequences: model.forward(Batch.build(sequences, self.config.block_size), cache).numpy(),
                            GHOST_VOCABULARY)

    def __init__(self, **fields):
        super().__init__(**fields)
        if self.config.drafter == "model":
            poison(self.pool, self.draft_cache)


REPEATING = [(0, [7, 8, 9] * 6, 9), (1, [7, 8, 9] * 5 + [7], 8)]


@pytest.mark.parametrize("drafter", ("ngram", "model"))
def test_ghost_matrix_with_speculation(drafter):
    """Every combination of the switches with guesses, some of them wrong: the ghost's own text, in both caches."""
    work = GHOST_WORK + REPEATING
    expected = [ghost_text(prompt, n) for _, prompt, n in work]
    longest = max(len(prompt) + n for _, prompt, n in work)
    seen = dict.fromkeys(("preemptions", "cached_tokens", "draft_tokens"), 0)
    accepted = 0
    for i, switches in enumerate(SWITCHES):
        engine = SpeculatingGhost(drafter=drafter, num_draft_tokens=1 + i % 6, **configuration(switches, longest))
        results = serve(engine, [(at, prompt, greedy(n)) for at, prompt, n in work])
        assert [tokens for tokens, _, _ in results] == expected, switches
        stats = engine.stats
        assert stats.scheduled_tokens == stats.prefill_tokens + stats.decode_tokens + stats.recomputed_tokens + stats.draft_tokens
        for name in seen:
            seen[name] += getattr(stats, name)
        accepted += sum(stats.accepted_tokens)
    assert all(seen.values()), f"the matrix did not reach what it is for: {seen}"
    assert accepted or drafter == "ngram"           # the ghost's text does not repeat itself


@pytest.fixture(scope="module")
def answers(tiny):
    weights, tokenizer = tiny
    prompts = [tokenizer.encode(p) for p in ("Q: What is 2 + 3?\nA:", "[{\"id\": 1, \"name\": \"Mia\", \"age\": 41}, {\"id\": 2,", "def add_",
                                             "Once upon a time, there was a")]
    return prompts, [reference_greedy(weights, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("drafter", ("ngram", "model"))
@pytest.mark.parametrize("k", range(1, 7))
def test_greedy_is_token_for_token_the_reference(answers, drafter, k):
    """The real models in float64, on a pool that forces preemptions: NumPy's tokens, whatever is guessed."""
    prompts, expected = answers
    engine = tiny_engine(drafter=drafter, num_draft_tokens=k, block_size=4, num_blocks=18, max_num_seqs=3, max_num_batched_tokens=17)
    completions = engine.generate(prompts, greedy(20))
    assert [c.token_ids for c in completions] == expected
    engine.check()
    assert engine.stats.draft_tokens and sum(engine.stats.accepted_tokens) and engine.stats.preemptions


def test_fewer_passes():
    """What it is for: the same text in fewer passes of the target."""
    steps = {}
    for drafter in (None, "ngram", "model"):
        engine = Engine(drafter=drafter)
        [completion] = engine.generate("class Price:\n    def __init__(self, user, item, count):", greedy(60))
        steps[drafter] = (engine.stats.steps, completion.text)
    assert steps["model"][1] == steps["ngram"][1] == steps[None][1]
    assert steps["model"][0] < steps["ngram"][0] < steps[None][0]


@pytest.mark.parametrize("drafter", ("ngram", "model"))
def test_limits_hold_in_the_middle_of_a_run(drafter):
    """max_tokens and the context length are not overshot, whatever was accepted; stop strings cut where they cut without."""
    for max_tokens in range(1, 9):
        plain = Engine().generate("def add_", SamplingParams(max_tokens=max_tokens, temperature=0))
        spec = Engine(drafter=drafter, num_draft_tokens=6).generate("def add_", SamplingParams(max_tokens=max_tokens, temperature=0))
        assert (spec[0].token_ids, spec[0].text, spec[0].finish_reason) == (plain[0].token_ids, plain[0].text, plain[0].finish_reason)
    engine = SpeculatingGhost(drafter=drafter, num_blocks=8)
    [completion] = engine.generate([[7, 8, 9] * 18], greedy(1000))
    assert completion.token_ids == ghost_text([7, 8, 9] * 18, 10) and completion.finish_reason == "length"
    [plain] = Engine().generate("def add_", SamplingParams(max_tokens=60, temperature=0, stop="return"))
    [spec] = Engine(drafter=drafter).generate("def add_", SamplingParams(max_tokens=60, temperature=0, stop="return"))
    assert (spec.token_ids, spec.text, spec.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)


def test_accepted_per_position_adds_up():
    """accepted_tokens[i] counts runs whose first i + 1 guesses were right, so it falls, and the sum explains the saving."""
    engine = Engine(drafter="model", num_draft_tokens=4)
    [completion] = engine.generate("def add_", greedy(60))
    accepted, stats = engine.stats.accepted_tokens, engine.stats
    assert accepted == sorted(accepted, reverse=True) and len(accepted) <= 4
    assert stats.delivered_tokens == stats.steps + sum(accepted)        # each pass gives one token, and one per accepted guess
    assert stats.tokens_per_pass == stats.delivered_tokens / stats.runs and stats.runs == stats.steps
    assert sum(stats.proposed_tokens) == stats.draft_tokens and all(a <= p for a, p in zip(accepted, stats.proposed_tokens))
    assert 0 < stats.draft_seconds < stats.seconds


def test_a_broken_draft_only_guesses_badly():
    """NaN from the drafter, and ids that it does not know: the text is the target's all the same."""
    plain = Engine().generate("def add_", greedy(20))[0].token_ids
    engine = Engine(drafter="model")
    forward = engine.drafter.forward
    engine.drafter.forward = lambda sequences: forward(sequences) * np.nan
    assert engine.generate("def add_", greedy(20))[0].token_ids == plain
    sampled = [e.generate("Once", SamplingParams(max_tokens=40, seed=1))[0].token_ids for e in (Engine(), engine)]
    assert sampled[1].count(1023) == sampled[0].count(1023)
    [completion] = Engine(model="gpt2", drafter="model", num_blocks=8).generate([[40000, 5]], greedy(3))
    assert len(completion.token_ids) == 3


def test_nan_behind_a_refused_guess_is_nobodys_error():
    """A pass without guesses would never have computed that row."""
    engine = SpeculatingGhost(drafter="ngram", num_blocks=16)
    forward = engine.model.forward

    def broken(batch, cache):
        logits = forward(batch, cache)
        for first, last in zip(batch.query_start, batch.query_start[1:]):
            if last - first > 1 and len(logits) == last - first:
                logits[1:] = float("nan")                       # every row behind the first guess
        return logits

    engine.model.forward = broken
    [completion] = engine.generate([[7, 8, 9] * 6], greedy(9))
    assert completion.token_ids == ghost_text([7, 8, 9] * 6, 9) and engine.stats.draft_tokens


def test_the_cost_of_a_pass_is_never_zero():
    """Times that fall with the size of the pass, or a clock that stands still, must not divide by it."""
    line = fit_line([(1, 1.0), (4, 4.4), (2, 2.1)])
    assert line[0] > 0 and choose_drafts([], 0, line, 0.0, 5) == []
    engine = SpeculatingGhost(drafter="model", num_draft_tokens="auto", num_blocks=16)
    engine.clock = lambda: 0.0
    assert engine.generate([[1, 2]], greedy(20))[0].token_ids == ghost_text([1, 2], 20)


def test_a_drafter_with_another_vocabulary_is_refused(tmp_path, tiny):
    """One sentence, before anything is served."""
    import json, shutil
    from nanoserve import EMBEDDED
    shutil.copytree(EMBEDDED / "draft", tmp_path / "other")
    path = tmp_path / "other" / "vocab.json"
    vocab = json.loads(path.read_text("utf-8"))
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(vocab), "utf-8")
    with pytest.raises(ValueError, match="another vocabulary"):
        Engine(drafter=str(tmp_path / "other"))


# ----------------------------------------------------------------------------------------------
# as many guesses as pay


def test_auto_over_the_mix_of_texts():
    """On the roofline clock, eight streams at a time: close to the best fixed number of guesses for each kind of text, none
    at all included, and ahead of every single number over all kinds. The margin of 10 % is what learning costs on texts of
    60 tokens."""
    from bench_speculation import KINDS, serve, speed
    speeds = {k: [speed(serve(prompts, 8, 0.0, 60, roofline=True, **({"drafter": "model", "num_draft_tokens": k} if k else {})))
                  for prompts in KINDS.values()] for k in (None, 1, 2, 4, 6, "auto")}
    overall = {k: np.exp(np.mean(np.log(values))) for k, values in speeds.items()}
    best = np.max([values for k, values in speeds.items() if k != "auto"], axis=0)
    assert (np.array(speeds["auto"]) >= 0.9 * best).all(), speeds
    assert all(overall["auto"] > value for k, value in overall.items() if k != "auto"), overall


def test_auto_without_a_drafter_is_plain_decoding():
    """As many as pay, of none: nothing is asked for, in any step."""
    engine = GhostEngine(num_draft_tokens="auto", num_blocks=16)
    assert engine.generate([[1, 2]], greedy(20))[0].token_ids == ghost_text([1, 2], 20) and engine.stats.draft_tokens == 0


def test_auto_gives_up_where_guessing_loses():
    """A drafter as dear as the target, and never right: after a few tries there are almost no guesses, and the text is right."""
    engine = SpeculatingGhost(drafter="model", num_draft_tokens="auto", num_blocks=64)
    wrong = engine.drafter.forward
    engine.drafter.forward = lambda sequences: np.roll(wrong(sequences), 1, axis=1)
    on_roofline(engine, *[Roofline("h100", 12, 768, 50257)] * 2)
    completions = engine.generate([[i] for i in range(8)], greedy(60))
    assert [c.token_ids for c in completions] == [ghost_text([i], 60) for i in range(8)]
    assert engine.stats.draft_tokens < 0.2 * engine.stats.delivered_tokens and sum(engine.stats.accepted_tokens) < 5


def test_choosing_is_optimal_for_small_cases():
    """Against trying every combination of numbers of guesses."""
    r = np.random.default_rng(1)
    for _ in range(60):
        rates = r.uniform(0.05, 0.95, size=r.integers(1, 4)).tolist()
        line, draft_seconds, others = (1.0, float(r.uniform(0, 0.5))), float(r.uniform(0, 0.4)), int(r.integers(0, 5))

        def value(counts):
            tokens = sum(sum(rate ** i for i in range(k + 1)) for rate, k in zip(rates, counts))
            return tokens / (line[0] + line[1] * (others + len(rates) + sum(counts)) + draft_seconds * max(counts))

        best = max(value(counts) for counts in itertools.product(range(5), repeat=len(rates)))
        assert value(choose_drafts(rates, others, line, draft_seconds, most=4)) == pytest.approx(best, rel=1e-12)


# ----------------------------------------------------------------------------------------------
# sampled: the distribution, through the whole engine


V = 4


class Markov:
    """A target whose next token depends on the last one only."""

    def __init__(self, table):
        self.config, self.table = ModelConfig(V, 64, 1, 1, 1), torch.tensor(table).log()

    def forward(self, batch, cache):
        return self.table[torch.from_numpy(batch.tokens[batch.logit_rows])]


class MarkovEngine(Engine):
    def __init__(self, target, draft, **fields):
        self.target, self.draft = target, draft
        super().__init__(**fields)

    def load(self, config):
        return Markov(self.target), SimpleNamespace(eos_id=-1, decode_bytes=lambda ids: b""), KVCache(
            1, config.num_blocks, config.block_size, 1, 1, torch.float64, "cpu", "numpy")

    def load_drafter(self):
        model = Markov(self.draft)
        return ModelDrafter(model, lambda sequences: model.forward(Batch.build(sequences, 4), None).numpy(), V)


TARGET = [[0.5, 0.3, 0.2, 1e-9], [0.1, 0.1, 0.7, 0.1], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]]
DRAFTS = {"good": [[0.45, 0.35, 0.15, 0.05], [0.1, 0.2, 0.6, 0.1], [0.3, 0.2, 0.3, 0.2], [0.9, 0.05, 0.03, 0.02]],
          "adversarial": [[1e-9, 0.2, 0.1, 0.7], [0.7, 0.1, 0.1, 0.1], [0.97, 0.01, 0.01, 0.01], [0.01, 0.01, 0.97, 0.01]]}


def test_a_guess_is_judged_by_the_distribution_it_came_from():
    """Row i of draft_probs belongs to guess i, which stands on guess i - 1. Another row would accept too much or too little."""
    model, table = Markov(DRAFTS["good"]), DRAFTS["good"]
    drafter = ModelDrafter(model, lambda sequences: model.forward(Batch.build(sequences, 4), None).numpy(), V)
    for seed in range(20):
        request = SimpleNamespace(tokens=[seed % V], drafts=[0] * 4, block_table=[0, 1], params=SamplingParams(), seed=seed)
        drafter.fill([request])
        for last, probs in zip([seed % V, *request.drafts], request.draft_probs):
            assert_close(probs, table[last], 1e-6, "logits in float32, numbers up to 1")


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 3)])
def test_the_distribution_of_whole_runs(draft, temperature, top_k):
    """8,000 seeded runs of four tokens, up to two guesses at once, against the exact probabilities of all 256 outcomes:
    chi-square over those with an expectation of at least 5. For the right distribution it exceeds degrees of freedom + 6
    sigma in fewer than one case in 100,000, and the seeds are fixed."""
    params = [SamplingParams(max_tokens=4, temperature=temperature, top_k=top_k, seed=i, ignore_eos=True) for i in range(8000)]
    engine = MarkovEngine(TARGET, DRAFTS[draft], block_size=4, num_blocks=512, max_num_seqs=128, max_num_batched_tokens=512,
                          drafter="model", num_draft_tokens=2)
    counts = np.zeros((V, V, V, V))
    for completion in engine.generate([[0]] * len(params), params):
        counts[tuple(completion.token_ids)] += 1
    step = np.array([target_probs(np.log(row), params[0]) for row in TARGET])
    exact = np.einsum("a,ab,bc,cd->abcd", step[0], step, step, step)
    assert_close(exact.sum(), 1, 1e-12, "float64")
    expected = exact * len(params)
    often = expected >= 5
    chi_square = ((counts - expected)[often] ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    assert counts[exact < 1e-12].sum() == 0
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom), (chi_square, freedom)
    assert len(engine.stats.accepted_tokens) == 2 and engine.stats.draft_tokens > sum(engine.stats.accepted_tokens)
