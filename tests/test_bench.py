"""The arithmetic of the benchmarks. Nothing here asserts a speed."""

import json
import sys

import pytest
import torch

from bench import PARTS, PartsClock, Sizes, better, break_down, floor_of, floor_of_part, greedy, record_steps, run_bench
from bench_queue import by_context, by_tokens, fit
from kvcache import Batch
from nanoserve import Engine
from labs import Roofline

SMALL = Sizes(prefill=40, decode=6, mixed=3, every=2, repeat=1, memory=2**23)


def test_floor():
    """By hand, for one layer of width 2 and 3 tokens: 48 parameters in the layer, 6 in the head, 4 numbers of K/V a token.

    A decode of 1 token with a context of 1: 2 * (48 + 6 + 4 * 1) FLOPs at 100/s; 48 + 6 + 4 * (1 + 1) numbers of 2 bytes at 10/s.
    A chunk of 100 from the start, no logits: 2 * (4,800 + 4 * 5,050) FLOPs; 48 + 4 * (100 + 100) numbers.
    """
    roofline = Roofline((100, 10), num_layers=1, width=2, vocab_size=3, itemsize=2)
    decode, chunk = ([1], [1], 1), ([100], [100], 0)
    assert floor_of(roofline, [decode]) == pytest.approx((12.4, 1.16, 12.4))            # memory bounds it
    assert floor_of(roofline, [chunk]) == pytest.approx((500, 500, 169.6))              # computing bounds it
    assert floor_of(roofline, [decode, chunk]) == pytest.approx((512.4, 501.16, 182.0))
    parts = {part: floor_of_part(roofline, [decode, chunk], part) for part in ("linear", "head", "kv")}
    assert parts == pytest.approx({"linear": 9.6 + 96, "head": 1.2, "kv": 1.6 + 404})
    assert roofline.linear == 48 and roofline.head == 6 and roofline.kv == 4            # it is left as it was


def test_the_better_of_two_measurements():
    one, other = (10, {1: 4, 16: 8}, 8), (8, {1: 5, 16: 6}, 6)
    assert better(one, other) == ((10, {1: 5, 16: 8}, 8), 0.75)


def test_recorded_steps_are_what_the_model_computed():
    engine = Engine(model="tiny", max_num_batched_tokens=8)
    steps = record_steps(engine)
    engine.generate([[1, 2, 3], [4] * 9], [greedy(2), greedy(1)])
    assert steps == [([3, 5], [3, 5], 1), ([1, 4], [4, 9], 2)]


def test_clock_books_every_moment_to_the_innermost_call():
    now = [0.0]

    def work(seconds, inner=None):
        now[0] += seconds
        if inner:
            inner()
        now[0] += seconds

    clock = PartsClock("outside", now=lambda: now[0])
    inner = clock.around(lambda: work(1), "inner")
    clock.around(lambda: work(10, inner), "outer")()
    now[0] += 100
    with pytest.raises(ZeroDivisionError):
        clock.around(lambda: 1 / 0, "outer")()
    clock.switch("outside")
    assert clock.seconds == {"outside": 100, "outer": 20, "inner": 2}


@pytest.mark.parametrize("drafter", (None, "ngram"))
def test_break_down_leaves_the_engine_as_it_was(drafter):
    """Under the clocks it says the same, and afterwards they are gone."""
    engine, said = Engine(model="tiny", drafter=drafter), []
    multiply, layer_norm = dict(engine.model.multiply), torch.nn.functional.layer_norm

    def say():
        said.append(engine.generate("Once upon a time", greedy(8))[0].token_ids)

    say()
    parts = break_down(engine, say)
    assert said[0] == said[1]
    assert [part for part in PARTS if part in parts] == list(parts) and min(parts.values()) > 0
    assert engine.model.multiply == multiply and torch.nn.functional.layer_norm is layer_norm
    assert isinstance(vars(Batch)["build"], classmethod) and "attend" not in vars(engine.cache)


def test_bench_prints_a_table_and_ends_in_json(capsys):
    run_bench(False, None, {"tiny": SMALL})
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)["tiny"]
    assert table[0] == "tiny, float32, 1 thread(s)" and result["dtype"] == "float32"
    assert result["memory_GB_per_s"] > 0 and list(result["multiply_GFLOP_per_s"]) == ["1", "16", "256"]
    assert result["best_GFLOP_per_s"] == max(result["multiply_GFLOP_per_s"].values())
    for work in ("prefill", "decode", "mixed"):
        f = result[work]
        assert f["share_of_floor"] == pytest.approx(f["floor_seconds"] / f["seconds"])
        assert f["floor_seconds"] >= max(f["seconds_to_move"], f["seconds_to_compute"]) * (1 - 1e-9) > 0
    breakdown = result["breakdown"]
    assert breakdown["steps_computed"] == -(-result["mixed"]["steps"] // SMALL.every)
    assert sum(part["share"] for part in breakdown["parts"].values()) == pytest.approx(1)
    assert sum(part["ms_per_step"] for part in breakdown["parts"].values()) == pytest.approx(breakdown["ms_per_step"])


def test_bench_takes_fields_and_json_is_one_line(capsys, monkeypatch):
    """bfloat16 on a machine that multiplies it slowly: the floor has float32's rate."""
    rates = {torch.bfloat16: (8e9, {1: 1e9, 16: 2e9}), torch.float32: (9e9, {1: 4e9, 16: 5e9})}
    monkeypatch.setattr("bench.measure_machine", lambda device, dtype, memory: rates[dtype])
    threads, fields = torch.get_num_threads(), {"dtype": "bfloat16", "max_num_seqs": 2, "enable_prefix_caching": True}
    run_bench(True, fields, {"tiny": SMALL})
    result = json.loads(capsys.readouterr().out)["tiny"]
    assert (result["dtype"], result["memory_GB_per_s"], result["best_GFLOP_per_s"]) == ("bfloat16", 8, 5)
    assert result["multiply_GFLOP_per_s"] == {"1": 1, "16": 2} and torch.get_num_threads() == threads


def test_batches_of_the_queue_benchmark():
    """Rows and contexts are what the tables say, each over a 16-fold range."""
    tables = [list(range(64 * i, 64 * (i + 1))) for i in range(16)]
    rows, contexts = by_tokens(tables), by_context(tables)
    for x, sequences in rows.items():
        assert len(Batch.build(sequences, 16).tokens) == x
    for x, sequences in contexts.items():
        batch = Batch.build(sequences, 16)
        assert set(batch.context_len) == {x} and len(batch.tokens) == 16
    assert max(rows) == 16 * min(rows) and max(contexts) == 16 * min(contexts)
    a, b = fit({x: 3 + 2 * x for x in (1, 5, 20)})
    assert (a, b) == pytest.approx((3, 2))


def test_peers_say_what_is_missing(monkeypatch, capsys):
    """Without transformers the comparison ends with a sentence."""
    import bench_peers
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--seats", "32"])
    bench_peers.main()
    assert "transformers is not installed" in capsys.readouterr().out
