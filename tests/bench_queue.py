"""What a step of the scheduler costs: python tests/bench_queue.py

It must not grow with the queue, and taking or freeing a block must not grow with the pool.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvcache import BlockAllocator
from scheduler import Request, Scheduler


def step_cost(waiting):
    """Median microseconds of schedule + advance with 16 streams running and `waiting` requests behind them."""
    scheduler = Scheduler(BlockAllocator(100_000, 16), max_num_seqs=16, max_num_batched_tokens=256)
    for i in range(16 + waiting):
        scheduler.add(Request(str(i), list(range(12)), 12, 10_000))
    times = []
    for _ in range(400):
        started = time.perf_counter()
        for request, n in scheduler.schedule():
            scheduler.advance(request, n)
            if request.num_missing == 0:
                request.tokens.append(0)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def block_cost(num_blocks):
    """Median microseconds to take and free one block, half of the pool in use."""
    pool, held, times = BlockAllocator(num_blocks, 16), [], []
    pool.allocate(held, num_blocks // 2 * 16)
    for _ in range(2000):
        table = []
        started = time.perf_counter()
        pool.allocate(table, 16)
        pool.release(table)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    print("waiting requests   scheduler, us per step")
    for waiting in (100, 1_000, 10_000):
        print(f"{waiting:16,} {step_cost(waiting):24.1f}")
    print("\nblocks in the pool   take and free one, us")
    for num_blocks in (100, 10_000, 1_000_000):
        print(f"{num_blocks:18,} {block_cost(num_blocks):23.2f}")
