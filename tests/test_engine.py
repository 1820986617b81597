"""The engine as a whole: a request's tokens depend on nothing but the request."""

import itertools
import random

import numpy as np
import pytest

from common import GHOST_VOCABULARY, GhostEngine, ghost_text, greedy, poison, reference_greedy
from nanoserve import Engine, EngineConfig, SamplingParams, gpt2_reference
from spec import target_probs, verify

BLOCKS, BUDGETS = (1, 4, 16), (3, 17, 256)
SWITCHES = list(itertools.product(BLOCKS, BUDGETS, (True, False), (True, False), ("continuous", "static"),
                                  ("paged", "reserved")))       # block size, budget, ample pool, caching, ...


def serve(engine, arrivals):
    """Serve [(step of arrival, prompt, params)], checking every invariant after every step.
    -> [(token ids, text, reason)] in that order."""
    arrivals = sorted(enumerate(arrivals), key=lambda item: item[1][0])
    ids, results, step = {}, {}, 0
    while arrivals or engine.has_unfinished():
        while arrivals and arrivals[0][1][0] <= step:
            i, (_, prompt, params) = arrivals.pop(0)
            ids[engine.add_request(prompt, params)] = i
            results[i] = [[], "", None]
        computed_before = engine.stats.scheduled_tokens
        unfinished = engine.has_unfinished()
        outputs = engine.step()
        engine.check()
        assert not unfinished or outputs or engine.stats.scheduled_tokens > computed_before, "a step without progress"
        for output in outputs:
            result = results[ids[output.request_id]]
            assert result[2] is None, "an output after the terminal one"
            result[0] += output.token_ids
            result[1] += output.text
            result[2] = output.finish_reason
        step += 1
    assert engine.pool.num_used == 0
    return [tuple(results[i]) for i in range(len(results))]


def configuration(switches, longest):
    """The EngineConfig fields of one point of the matrix; the small pool just holds the longest request."""
    block_size, budget, ample, caching, batching, reservation = switches
    return dict(block_size=block_size, max_num_batched_tokens=budget, num_blocks=-(-longest // block_size) * (8 if ample else 1),
                enable_prefix_caching=caching, batching=batching, kv_reservation=reservation, max_num_seqs=4)


# ----------------------------------------------------------------------------------------------
# same tokens, whatever the switches


GHOST_PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
GHOST_WORK = [(0, GHOST_PREFIX + [8], 7), (0, [1], 5), (1, GHOST_PREFIX + [8, 4, 6], 6), (2, GHOST_PREFIX[:16], 6),
              (5, GHOST_PREFIX + [2, 6, 4, 3, 3, 8, 3], 8), (9, GHOST_PREFIX[:8], 9)]


@pytest.mark.parametrize("chunk", (None, 2))
def test_ghost_matrix(chunk):
    """Every combination of the switches: a slip in sharing, chunking, eviction or position changes the ghost's text."""
    expected = [ghost_text(prompt, n) for _, prompt, n in GHOST_WORK]
    longest = max(len(prompt) + n for _, prompt, n in GHOST_WORK)
    seen = {"preemptions": 0, "cached_tokens": 0}
    for switches in SWITCHES:
        engine = GhostEngine(max_prefill_chunk=chunk, **configuration(switches, longest))
        results = serve(engine, [(at, prompt, greedy(n)) for at, prompt, n in GHOST_WORK])
        assert [tokens for tokens, _, _ in results] == expected, switches
        for name in seen:
            seen[name] += getattr(engine.stats, name)
    assert all(seen.values()), f"the matrix did not reach what it is for: {seen}"


@pytest.fixture(scope="module")
def tiny_work(tiny):
    """Six prompts with common beginnings, and what greedy decoding says in the reference that recomputes everything."""
    weights, tokenizer = tiny
    story = tokenizer.encode("Once upon a time, there was a kind fox named Mia. She had")
    prompts = [story, story[:16], story[:1], story + tokenizer.encode(" a red"), tokenizer.encode("Q: What is 2 + 3?\nA:"), story]
    expected = [reference_greedy(weights, prompt, 8) for prompt in prompts]
    return [(2 * i, prompt) for i, prompt in enumerate(prompts)], expected, max(map(len, prompts)) + 8


def tiny_engine(**fields):
    engine = Engine(model="tiny", dtype="float64", **fields)
    poison(engine.pool, engine.cache)
    return engine


def test_tiny_matrix_greedy(tiny_work):
    """The real model in float64, in every combination: the reference's tokens."""
    work, expected, longest = tiny_work
    for switches in SWITCHES:
        engine = tiny_engine(**configuration(switches, longest))
        results = serve(engine, [(at, prompt, greedy(8)) for at, prompt in work])
        assert [tokens for tokens, _, _ in results] == expected, switches


def test_tiny_alone_and_with_the_numpy_attention(tiny_work):
    """A crowd changes nothing, nor does the attention backend."""
    work, expected, longest = tiny_work
    for attention in ("torch", "numpy"):
        for (_, prompt), tokens in zip(work, expected):
            [completion] = tiny_engine(attention=attention, num_blocks=8).generate([prompt], greedy(8))
            assert completion.token_ids == tokens


def test_tiny_matrix_sampled(tiny, tiny_work):
    """The same seed gives the same tokens in every combination, and they are those of sampling the reference."""
    work, _, longest = tiny_work
    params = [SamplingParams(max_tokens=8, temperature=1.3, top_k=(0, 40)[i % 2], top_p=(1.0, 0.9)[i // 3], seed=i,
                             ignore_eos=True) for i in range(len(work))]
    expected = []
    for (_, prompt), one in zip(work, params):
        tokens = list(prompt)
        for _ in range(8):
            row = gpt2_reference(tiny[0], tokens)[-1]
            tokens += verify([target_probs(row, one)], [], [], one.seed, len(tokens))
        expected.append(tokens[len(prompt):])
    for switches in SWITCHES[::5] + SWITCHES[1::7]:
        engine = tiny_engine(**configuration(switches, longest))
        results = serve(engine, [(at, prompt, one) for (at, prompt), one in zip(work, params)])
        assert [tokens for tokens, _, _ in results] == expected, switches


def test_sampling_does_not_see_the_crowd():
    """A seed gives the same tokens alone, among others, and with chunks and preemptions."""
    params = SamplingParams(max_tokens=20, temperature=0.3, seed=11, ignore_eos=True)
    [alone] = GhostEngine(num_blocks=8).generate([[4, 2]], params)
    crowd = GhostEngine(block_size=4, num_blocks=10, max_num_batched_tokens=5).generate([[9, 9, 1], [4, 2], [4]], params)
    assert crowd[1].token_ids == alone.token_ids != ghost_text([4, 2], 20)


def test_float32_and_bfloat16_serve():
    """Lower precision may choose other tokens at near-ties, but serves to the end, and the same in every run."""
    for dtype in ("float32", "bfloat16"):
        runs = [Engine(dtype=dtype, num_blocks=12, max_num_seqs=3).generate(["Once upon a time"] * 4, greedy(20)) for _ in range(2)]
        assert [c.token_ids for c in runs[0]] == [c.token_ids for c in runs[1]]
        assert all(len(c.token_ids) == 20 for c in runs[0])


# ----------------------------------------------------------------------------------------------
# random schedules


@pytest.mark.parametrize("seed", range(150))
def test_soak(seed):
    """Random switches, tiny pools, shared prefixes, stops and aborts at random moments: right tokens or a prefix of them,
    one terminal output each, every invariant after every step, an empty pool at the end."""
    r = random.Random(seed)
    block_size, longest = r.choice((1, 2, 3, 4, 8)), r.randint(12, 40)
    engine = GhostEngine(block_size=block_size, num_blocks=-(-longest // block_size) + r.choice((0, 0, 1, 3, 20)),
                         max_num_seqs=r.randint(1, 6), max_num_batched_tokens=r.choice((1, 2, 3, 5, 9, 64)),
                         max_prefill_chunk=r.choice((None, None, 1, 4)), enable_prefix_caching=r.random() < 0.7,
                         batching=r.choice(("continuous", "continuous", "static")),
                         kv_reservation=r.choice(("paged", "paged", "reserved")))
    stem = [r.randrange(GHOST_VOCABULARY) for _ in range(longest)]
    live, got, reasons, asked = set(), {}, {}, {}
    for step in range(10_000):
        while step < 60 and r.random() < 0.25 and len(asked) < 25:
            max_tokens = r.randint(1, longest - 1)
            prompt = stem[:r.randint(1, longest - max_tokens)]
            prompt = prompt[:r.randint(1, len(prompt))] + [r.randrange(GHOST_VOCABULARY) for _ in range(r.choice((0, 0, 1)))]
            prompt = prompt[:longest - max_tokens]
            rid = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=r.random() < 0.7))
            live.add(rid)
            asked[rid], got[rid] = (prompt, max_tokens, engine.requests[rid].params.ignore_eos), []
        if live and r.random() < 0.05:
            victim = r.choice(sorted(live))
            assert engine.abort(victim) and not engine.abort(victim)
            assert engine.has_unfinished()
            engine.check()
        for output in engine.step():
            assert output.request_id in live, "an output after the terminal one"
            got[output.request_id] += output.token_ids
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
                live.remove(output.request_id)
        engine.check()
        if step >= 60 and not engine.has_unfinished():
            break
    assert not live and engine.pool.num_used == 0
    for rid, (prompt, max_tokens, ignore_eos) in asked.items():
        expected = ghost_text(prompt, max_tokens)
        if not ignore_eos and engine.tokenizer.eos_id in expected:
            expected = expected[:expected.index(engine.tokenizer.eos_id) + 1]
            complete = "stop"
        else:
            complete = "length"
        assert got[rid] == expected[:len(got[rid])]
        assert reasons[rid] == "abort" or (reasons[rid], got[rid]) == (complete, expected)


# ----------------------------------------------------------------------------------------------
# the corners


@pytest.mark.parametrize("block_size", (1, 4))
def test_a_prompt_cached_to_its_last_block_computes_one_block_again(block_size):
    """A prompt of an exact multiple, fully cached: all but the last block is found, because its last token needs logits."""
    engine, prompt = GhostEngine(block_size=block_size, num_blocks=64), list(range(12))
    engine.generate([prompt], greedy(1))
    [again] = engine.generate([prompt], greedy(3))
    assert again.num_cached_tokens == 12 - block_size
    assert again.token_ids == ghost_text(prompt, 3)


def test_the_shortest_and_the_longest_prompt():
    """One token; and context length - 1, which leaves room for exactly one."""
    engine = GhostEngine(num_blocks=8)
    shortest, longest = engine.generate([[5], list(range(63))], greedy(40))
    assert shortest.token_ids == ghost_text([5], 40)
    assert (longest.token_ids, longest.finish_reason) == (ghost_text(list(range(63)), 1), "length")


def test_max_tokens_beyond_the_context_ends_with_length():
    """The context length cuts max_tokens silently, and says "length"."""
    [completion] = GhostEngine(num_blocks=8).generate([[1, 2, 3]], greedy(1000))
    assert (len(completion.token_ids), completion.finish_reason) == (61, "length")


def test_arrivals_while_others_are_mid_chunk():
    """A newcomer shares the step of a prompt that is half computed, and takes over what is already published."""
    engine, prompt = GhostEngine(block_size=4, max_num_batched_tokens=8, max_prefill_chunk=6), list(range(40))
    first = engine.add_request(prompt, greedy(4))
    engine.step(), engine.step()
    assert engine.requests[first].num_computed_tokens == 12
    second = engine.add_request(prompt[:20], greedy(4))
    outputs = {first: [], second: []}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
        engine.check()
    assert outputs == {first: ghost_text(prompt, 4), second: ghost_text(prompt[:20], 4)}
    assert engine.stats.cached_tokens == 12


def test_streams_keep_their_beat_while_a_long_prompt_is_computed():
    """Every running stream gets its token in every step, however long the prompt beside it."""
    engine = GhostEngine(num_blocks=16, max_num_batched_tokens=8)
    streams = [engine.add_request([i], greedy(30)) for i in range(3)]
    engine.step()
    engine.add_request(list(range(60)), greedy(2))
    for _ in range(11):
        assert {output.request_id for output in engine.step()} >= set(streams)


def test_abort_in_each_state():
    """Waiting, mid-prompt, streaming, preempted, finished: blocks come back at once, one terminal output, no twice."""
    engine = GhostEngine(block_size=4, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=6)
    old, young = engine.add_request(list(range(8)), greedy(22)), engine.add_request(list(range(20, 28)), greedy(20))
    waiting = engine.add_request([9], greedy(3))
    engine.step()
    assert engine.requests[old].num_computed_tokens == 6                   # mid-prompt
    assert engine.abort(waiting) and not engine.abort(waiting)              # waiting
    while not engine.requests[young].num_preemptions:
        outputs = engine.step()
    assert engine.abort(young)                                              # preempted
    held = len(engine.requests[old].block_table)
    assert engine.pool.num_used == held and engine.abort(old) and engine.pool.num_used == 0     # streaming
    assert engine.has_unfinished()
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [(young, "abort"), (old, "abort")]
    assert not engine.has_unfinished() and not engine.abort("nobody")
    mid = engine.add_request(list(range(20)), greedy(3))
    engine.step()
    assert engine.abort(mid) and engine.pool.num_used == 0                  # mid-prompt
    assert [o.finish_reason for o in engine.step()] == ["abort"]


def test_the_pool_runs_dry_with_one_request_alone():
    """It can't: a request that could never fit is refused at the door, and the largest that is accepted fits exactly."""
    engine = GhostEngine(block_size=4, num_blocks=4)
    with pytest.raises(ValueError, match=r"prompt and max_tokens come to 17 tokens, but the KV pool holds 16 \(4 blocks of 4\)"):
        engine.add_request(list(range(10)), greedy(7))
    [completion] = engine.generate([list(range(10))], greedy(6))
    assert completion.token_ids == ghost_text(list(range(10)), 6)


def test_preemption_keeps_tokens_and_counts_them_as_recomputed():
    """A preempted request goes on where it was; its old work is counted as recomputed, not as a hit, and not as prefill."""
    engine = GhostEngine(block_size=4, num_blocks=8, max_num_seqs=2, enable_prefix_caching=False)
    prompts = [list(range(8)), list(range(30, 38))]
    completions = engine.generate(prompts, greedy(16))
    assert [c.token_ids for c in completions] == [ghost_text(p, 16) for p in prompts]
    stats = engine.stats
    assert completions[1].num_preemptions >= 1 and stats.preemptions >= 1
    assert stats.prefill_tokens == 16 and stats.cached_tokens == 0 and stats.recomputed_tokens > 0
    assert stats.decode_tokens == 2 * 15                    # the last token of a request is never fed back
    assert stats.scheduled_tokens == stats.prefill_tokens + stats.decode_tokens + stats.recomputed_tokens


def test_nan_logits_end_that_request_only():
    """NaN or infinite logits are an error of one request; its batch mates go on."""
    engine = GhostEngine(num_blocks=8)
    bad, good = engine.add_request([1, 2], greedy(5)), engine.add_request([3, 4], greedy(5))
    forward = engine.model.forward

    def broken(batch, cache):
        logits = forward(batch, cache)
        if engine.stats.steps == 3:
            logits[0, 5] = float("nan")
        return logits

    engine.model.forward = broken
    got = {bad: [], good: []}
    ends = {}
    while engine.has_unfinished():
        for output in engine.step():
            got[output.request_id] += output.token_ids
            ends[output.request_id] = (output.finish_reason, output.error)
        engine.check()
    assert ends == {bad: ("error", "the model produced logits that are not finite numbers"), good: ("length", None)}
    assert got == {bad: ghost_text([1, 2], 2), good: ghost_text([3, 4], 5)}


def test_stop_strings_end_of_text_and_the_deltas(tiny):
    """Text is cut before a stop string, <|endoftext|> adds no text, and the deltas concatenate to the text."""
    weights, tokenizer = tiny
    engine = Engine()
    [free] = engine.generate("Q: What is 2 + 3?\nA:", greedy(40))
    stop = free.text[7:10]
    for stops in (stop, (stop, "never"), ("\x00", stop)):
        engine.add_request("Q: What is 2 + 3?\nA:", SamplingParams(max_tokens=40, temperature=0, stop=stops))
        text = ""
        while engine.has_unfinished():
            for output in engine.step():
                text += output.text
                reason = output.finish_reason
        assert text == free.text[:free.text.index(stop)] and (reason == "stop" or tokenizer.eos_id in free.token_ids)
        assert "�" not in text
    ends = [c for c in engine.generate(["Q: What is 2 + 3?\nA:"] * 8, SamplingParams(max_tokens=300)) if c.finish_reason == "stop"]
    for completion in ends:
        assert completion.token_ids[-1] == tokenizer.eos_id and completion.text == tokenizer.decode(completion.token_ids)


def test_stop_wins_over_length_on_the_same_token():
    """<|endoftext|> as the very last permitted token is a stop."""
    prompt = next([i, j] for i in range(90) for j in range(90) if ghost_next_is_eos([i, j]))
    [completion] = GhostEngine(num_blocks=4).generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    assert completion.finish_reason == "stop"
    [completion] = GhostEngine(num_blocks=4).generate([prompt], greedy(1))
    assert completion.finish_reason == "length"


def ghost_next_is_eos(prompt):
    return ghost_text(prompt, 1) == [GHOST_VOCABULARY - 1]


# ----------------------------------------------------------------------------------------------
# bad input: refused with a sentence, and nothing else disturbed


BAD_REQUESTS = [
    (dict(prompt=[]), "the prompt is empty"),
    (dict(prompt=""), "the prompt is empty"),
    (dict(prompt=list(range(64))), "the prompt has 64 tokens, but the context length is 64"),
    (dict(prompt=[1, 97]), "token id 97 is not in the vocabulary: ids are 0 to 96"),
    (dict(prompt=[-1]), "token id -1 is not in the vocabulary"),
    (dict(prompt=[1.0]), "the prompt must be a string or a list of token ids"),
    (dict(prompt=[True]), "the prompt must be a string or a list of token ids"),
    (dict(prompt=None), "the prompt must be a string or a list of token ids"),
    (dict(prompt=7), "the prompt must be a string or a list of token ids"),
    (dict(prompt=b"text"), "the prompt must be a string or a list of token ids"),
    (dict(prompt=[1] * 40, params=greedy(30)), "come to 64 tokens, but the KV pool holds 60"),
    (dict(prompt=[1], request_id="alive"), "request_id 'alive' is alive"),
    (dict(prompt=[1], params={"max_tokens": 3}), "params must be SamplingParams, not dict"),
    (dict(prompt=[1], request_id=7), "request_id must be a string"),
]


@pytest.mark.parametrize("bad, message", BAD_REQUESTS)
def test_bad_requests(bad, message):
    """Each is refused with its sentence; the engine and the others do not notice."""
    engine = GhostEngine(block_size=4, num_blocks=15)
    engine.tokenizer.encode = lambda text: []
    engine.add_request([1, 2, 3], greedy(6), request_id="alive")
    engine.step()
    before = (dict(engine.requests), engine.stats.as_dict(), engine._num_requests)
    with pytest.raises(ValueError) as caught:
        engine.add_request(**{"params": greedy(3), **bad})
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert before == (dict(engine.requests), engine.stats.as_dict(), engine._num_requests)
    tokens = []
    while engine.has_unfinished():
        tokens += [t for output in engine.step() for t in output.token_ids]
    assert tokens == ghost_text([1, 2, 3], 6)[1:]


def test_generate_refuses_all_or_none():
    """One bad prompt among several: none of them starts."""
    engine = GhostEngine(num_blocks=8)
    with pytest.raises(ValueError, match="empty"):
        engine.generate([[1], []], greedy(2))
    with pytest.raises(ValueError, match="2 prompts, but 1 params"):
        engine.generate([[1], [2]], [greedy(2)])
    assert not engine.has_unfinished() and not engine.requests


def test_generate_beside_other_requests_loses_nothing():
    """What generate() sees of requests that it did not start comes out of the next step()."""
    engine = GhostEngine(num_blocks=16)
    other = engine.add_request([7, 7], greedy(3))
    engine.generate([[1, 2]], greedy(9))
    assert [t for output in engine.step() if output.request_id == other for t in output.token_ids] == ghost_text([7, 7], 3)
    assert not engine.has_unfinished()


def test_an_interrupt_in_mid_step_loses_no_output():
    """Ctrl-C while the second request is being sampled: the first one's token comes with the next step."""
    engine = GhostEngine(num_blocks=8)
    first, second = engine.add_request([1], greedy(3)), engine.add_request([2], greedy(3))
    sample, calls = engine._sample, []

    def interrupted(request, *arguments):
        calls.append(request.request_id)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(request, *arguments)

    engine._sample = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    got = {first: [], second: []}
    while engine.has_unfinished():
        for output in engine.step():
            got[output.request_id] += output.token_ids
    assert got == {first: ghost_text([1], 3), second: ghost_text([2], 3)}


def test_an_interrupted_generate_leaves_nothing_behind():
    """Its requests are gone, and the output of another request is still handed out."""
    engine = GhostEngine(num_blocks=16)
    other = engine.add_request([7, 7], greedy(4))
    step, calls = engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2], [3]], greedy(30))
    assert set(engine.requests) == {other}
    tokens = []
    while engine.has_unfinished():
        outputs = engine.step()
        assert {output.request_id for output in outputs} == {other}
        tokens += [t for output in outputs for t in output.token_ids]
    assert tokens == ghost_text([7, 7], 4) and engine.pool.num_used == 0


def test_an_id_is_taken_until_its_last_output_is_handed_out():
    """Otherwise the end of the old request would be taken for that of the new one."""
    engine = GhostEngine(num_blocks=8)
    engine.add_request([1], greedy(5), "request-1")
    engine.step()
    engine.abort("request-1")
    with pytest.raises(ValueError, match="'request-1' is alive"):
        engine.add_request([2], greedy(1), "request-1")
    [completion] = engine.generate([[2]], greedy(2))
    assert completion.token_ids == ghost_text([2], 2) and completion.request_id != "request-1"
    assert [(o.request_id, o.finish_reason) for o in engine.step()] == [("request-1", "abort")]
    engine.add_request([2], greedy(1), "request-1")


def test_numpy_numbers_as_parameters():
    """They overflow where Python's do not; they are converted at the door."""
    params = SamplingParams(max_tokens=np.uint8(100), temperature=np.float16(0.5), seed=np.int64(-5), ignore_eos=True)
    [completion] = GhostEngine(num_blocks=8).generate([list(range(30))], params)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 34


def test_params_one_each_and_the_order_given():
    """generate() returns completions in the order of the prompts, each with its own parameters."""
    prompts = [[i, i + 1] for i in range(6)]
    completions = GhostEngine(num_blocks=16, max_num_seqs=2).generate(prompts, [greedy(i + 1) for i in range(6)])
    assert [c.token_ids for c in completions] == [ghost_text(p, i + 1) for i, p in enumerate(prompts)]
    assert [c.prompt_token_ids for c in completions] == prompts


def test_requests_without_a_seed_differ_and_repeat():
    """Without seeds, equal prompts get different texts, and a second engine with the same seed the same ones."""
    params = SamplingParams(max_tokens=12, temperature=1.5)
    first, second = (Engine(seed=4).generate(["Once"] * 3, params) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({tuple(c.token_ids) for c in first}) == 3
    assert [c.token_ids for c in Engine(seed=5).generate(["Once"] * 3, params)] != [c.token_ids for c in first]


@pytest.mark.parametrize("field, value, message", [
    ("block_size", 0, "block_size=0: it must be an integer of at least 1 (tokens)"),
    ("block_size", 2.5, "block_size=2.5: "), ("block_size", True, "block_size=True: "), ("num_blocks", -3, "num_blocks=-3: "),
    ("max_num_seqs", 0, "max_num_seqs=0: "), ("max_num_batched_tokens", "many", "max_num_batched_tokens='many': "),
    ("max_prefill_chunk", 0, "max_prefill_chunk=0: "), ("enable_prefix_caching", "yes", "enable_prefix_caching='yes': "),
    ("batching", "dynamic", "batching='dynamic': it must be one of 'continuous', 'static'"),
    ("kv_reservation", None, "kv_reservation=None: "), ("device", "tpu", "device='tpu': it must be one of 'cpu', 'cuda'"),
    ("dtype", "int8", "dtype='int8': "), ("attention", "flash", "attention='flash': "), ("seed", -1, "seed=-1: "),
    ("model", "", "model='': "), ("model", 3, "model=3: "),
])
def test_bad_configuration(field, value, message):
    """A bad field is named, with its value and the remedy."""
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{field: value})
    assert message in str(caught.value)


# ----------------------------------------------------------------------------------------------
# statistics


def test_counters_of_a_hand_computed_run():
    """Two requests, six seats: every counter and gauge computed by hand."""
    engine = GhostEngine(block_size=4, num_blocks=8, max_num_seqs=6, max_num_batched_tokens=10)
    engine.generate([[1, 2, 3, 4, 5], [6]], greedy(3))
    stats = engine.stats
    # step 1: 5 + 1 prompt tokens, two tokens out; steps 2 and 3: one decode each, two tokens out
    assert (stats.steps, stats.prefill_tokens, stats.decode_tokens, stats.delivered_tokens) == (3, 6, 4, 6)
    assert (stats.occupancy, stats.budget_fill, stats.goodput) == (6 / 18, 10 / 30, 6 / (10 + 12))
    assert (stats.kv_used, stats.kv_cached, stats.kv_peak) == (0, 1, 3)      # [1..4] is full and computed
    assert stats.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    as_dict = stats.as_dict()
    assert as_dict["ttft"]["count"] == 2 and as_dict["itl"]["count"] == 4 and as_dict["e2e"]["count"] == 2
    assert as_dict["goodput"] == stats.goodput and "running" in as_dict


def test_times_on_a_clock_of_our_own():
    """TTFT, queue time, ITL and e2e, with a clock that ticks once per look."""
    engine = GhostEngine(num_blocks=8, max_num_seqs=1)
    now = [0.0]
    engine.clock = lambda: now[0]
    forward = engine.model.forward

    def slow(batch, cache):
        now[0] += 2.0
        return forward(batch, cache)

    engine.model.forward = slow
    engine.generate([[1], [2]], greedy(3))
    stats = engine.stats
    assert stats.ttft.sum == 2 + 8 and stats.queue_time.sum == 0 + 6 and stats.itl.sum == 4 * 2 and stats.e2e.sum == 6 + 12
    assert stats.busy == 1.0 and stats.model_seconds == 12.0


def test_fail_ends_a_step_and_nothing_else():
    """Those who ran end with an error; who waited goes on, unless nobody ran: then the fault is theirs."""
    engine = GhostEngine(max_num_seqs=1, num_blocks=64)
    ids = engine.add_requests([[1], [2]], greedy(3))
    engine.step()
    outputs = engine.fail(RuntimeError("broken"))
    assert [(o.request_id, o.finish_reason) for o in outputs] == [(ids[0], "error")] and "broken" in outputs[0].error
    engine.check()
    assert [(o.request_id, o.finish_reason) for o in engine.fail(ValueError("again"))] == [(ids[1], "error")]
    assert not engine.has_unfinished() and engine.pool.num_used == 0


def test_a_watcher_that_raises_loses_no_output():
    """It is called before the outputs are handed out, and they are handed out by the next step."""
    engine = GhostEngine(num_blocks=64)
    engine.add_request([1], greedy(3))

    def angry(outputs):
        engine.watchers.clear()
        raise RuntimeError("no")

    engine.watchers.append(angry)
    with pytest.raises(RuntimeError):
        engine.step()
    tokens = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == ghost_text([1], 3)


def test_ids_of_one_call_must_differ():
    """Two requests of one name, given at once: one of them would never end."""
    engine = GhostEngine(num_blocks=64)
    for ids in (["x", "x"], ["request-1", None]):
        with pytest.raises(ValueError, match="the same"):
            engine.add_requests([[1], [2]], greedy(3), ids)
    assert not engine.has_unfinished()
