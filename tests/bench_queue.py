"""What a step costs, and what its cost grows with: python tests/bench_queue.py

Linear, on the 124M shape in float32: in the tokens that a step computes, and in the context that it reads. Beside each
measurement stands the line a + b * x, fitted by least squares of the relative deviations.

Flat: the scheduler's part of a step, and taking and freeing a block, in the requests that wait and in the size of the pool.
"""

import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvcache import Batch, BlockAllocator
from nanoserve import Engine
from scheduler import Request, Scheduler

SEATS, BLOCK_SIZE = 16, 16


def forward_costs(engine, batches, rounds=5):
    """Median seconds of a forward pass over each batch. A round runs each once, so that a disturbance meets all of them."""
    times = {x: [] for x in batches}
    for i in range(rounds + 1):
        for x, sequences in batches.items():
            started = time.perf_counter()
            engine.model.forward(Batch.build(sequences, BLOCK_SIZE), engine.cache)
            if i:                                       # the first round only warms up
                times[x].append(time.perf_counter() - started)
    return {x: statistics.median(values) for x, values in times.items()}


def by_tokens(tables):
    """{rows in the step: its sequences}: 16 prompts of 1 to 16 tokens, so that context is next to nothing, and logits are 16."""
    return {SEATS * n: [([7] * n, 0, table, 1) for table in tables] for n in (1, 2, 4, 8, 12, 16)}


def by_context(tables):
    """{context of each stream: the step's sequences}: 16 streams that decode a token each."""
    return {context: [([7], context - 1, table, 1) for table in tables] for context in (64, 128, 256, 512, 768, 1024)}


def fit(points):
    """{x: y} -> (a, b) of the line a + b * x with the least squares of the relative deviations.

    >>> [round(x, 6) for x in fit({1: 5.0, 2: 7.0, 4: 11.0})]
    [3.0, 2.0]
    """
    x, y = np.array(list(points)), np.array(list(points.values()))
    b, a = np.polyfit(x, y, 1, w=1 / y)
    return a, b


def print_line(name, points):
    a, b = fit(points)
    print(f"{name}\n{'':20} measured, ms   a + b * x, ms   deviation")
    deviations = {x: y / (a + b * x) - 1 for x, y in points.items()}
    for x, y in points.items():
        print(f"{x:20,} {y * 1e3:14.1f} {(a + b * x) * 1e3:15.1f} {deviations[x]:+11.1%}")
    print(f"a = {a * 1e3:.1f} ms, b = {b * 1e3:.3f} ms; largest deviation {max(map(abs, deviations.values())):.1%}\n", flush=True)


def step_cost(waiting, num_blocks, steps=600):
    """Median microseconds of the scheduler's part of a step: 16 requests run and `waiting` are behind them. In every step
    one arrives, one is admitted, one ends; so each lives for 16 steps, and the pool is asked for blocks in every one."""
    scheduler = Scheduler(BlockAllocator(num_blocks, BLOCK_SIZE), max_num_seqs=SEATS, max_num_batched_tokens=256)
    times = []
    for i in range(SEATS + waiting + steps):
        request = Request(str(i), list(range(i, i + 12)), 12, 10_000)
        if i < SEATS + waiting:
            scheduler.add(request)
            continue
        started = time.perf_counter()
        scheduler.add(request)
        for running, n in scheduler.schedule():
            scheduler.advance(running, n)
            if running.num_missing == 0:
                running.tokens.append(0)
        scheduler.finish(scheduler.running[0])
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def block_cost(num_blocks):
    """Median microseconds to take and free one block, half of the pool in use."""
    pool, held, times = BlockAllocator(num_blocks, BLOCK_SIZE), [], []
    pool.allocate(held, num_blocks // 2 * BLOCK_SIZE)
    for _ in range(2000):
        table = []
        started = time.perf_counter()
        pool.allocate(table, BLOCK_SIZE)
        pool.release(table)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main():
    engine = Engine(model="gpt2", device="cpu", dtype="float32", num_blocks=SEATS * 1024 // BLOCK_SIZE, block_size=BLOCK_SIZE)
    engine.cache.k.normal_()            # not the zeros of a new pool: all of it is to be read from memory
    engine.cache.v.normal_()
    blocks = list(range(engine.config.num_blocks))
    random.Random(0).shuffle(blocks)    # as a pool that has served for a while hands them out
    tables = [blocks[i::SEATS] for i in range(SEATS)]
    print(f"a forward pass of the 124M shape, float32, {torch.get_num_threads()} thread(s)\n")
    print_line("tokens in the step", forward_costs(engine, by_tokens(tables)))
    print_line(f"context read by each of {SEATS} streams", forward_costs(engine, by_context(tables)))
    print("waiting requests   scheduler, us per step (100,000 blocks)")
    for waiting in (100, 1_000, 10_000):
        print(f"{waiting:16,} {step_cost(waiting, 100_000):24.1f}")
    print("\nblocks in the pool   scheduler, us per step (100 waiting)   take and free one, us")
    for num_blocks in (100, 10_000, 1_000_000):
        print(f"{num_blocks:18,} {step_cost(100, num_blocks):38.1f} {block_cost(num_blocks):23.2f}")


if __name__ == "__main__":
    main()
