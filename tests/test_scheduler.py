"""The scheduler by itself: tokens are integers, nobody computes anything."""

import random

import numpy as np
import pytest

from kvcache import BlockAllocator
from scheduler import Histogram, Request, Scheduler, share_budget_reference


def make(num_blocks=1000, block_size=4, seqs=8, budget=16, caching=False, **fields):
    return Scheduler(BlockAllocator(num_blocks, block_size, caching), seqs, budget, **fields)


def add(scheduler, length, max_tokens=50, name=None, first=0):
    name = name or f"r{scheduler.num_added}"
    request = Request(name, list(range(first, first + length)), length, length + max_tokens)
    scheduler.add(request)
    return request


def step(scheduler):
    """Schedule, "compute", and give a token to whoever is up to date. -> {request_id: n}"""
    scheduled = scheduler.schedule()
    for request, n in scheduled:
        scheduler.advance(request, n)
        if request.num_missing == 0:
            request.tokens.append(0)
            if len(request.tokens) == request.max_len:
                scheduler.finish(request)
    scheduler.check()
    return {request.request_id: n for request, n in scheduled}


def test_order_running_then_waiting_streams_first():
    """A decode comes before a chunk, a chunk before a newcomer, whoever arrived first."""
    scheduler = make(budget=8)
    add(scheduler, 20, name="long")
    assert step(scheduler) == {"long": 8}
    add(scheduler, 2, name="short")
    assert step(scheduler) == {"long": 8}                                   # the budget is spent before the newcomer's turn
    assert step(scheduler) == {"long": 4, "short": 2}
    add(scheduler, 30, name="late")
    scheduled = list(step(scheduler).items())
    assert scheduled == [("long", 1), ("short", 1), ("late", 6)]
    scheduler = make(budget=16, max_prefill_chunk=5)
    add(scheduler, 20, name="long"), add(scheduler, 2, name="short")
    assert step(scheduler) == {"long": 5, "short": 2}
    assert list(step(scheduler).items()) == [("short", 1), ("long", 5)]


def test_chunk_cap_leaves_room_for_others():
    """max_prefill_chunk caps one request, not the step."""
    scheduler = make(budget=12, max_prefill_chunk=5)
    for _ in range(3):
        add(scheduler, 20)
    assert step(scheduler) == {"r0": 5, "r1": 5, "r2": 2}


def test_every_running_request_gets_a_token():
    """Budget 4, four requests in mid-prompt: one token each, not four for the first."""
    scheduler = make(budget=4, seqs=8)
    for _ in range(6):
        add(scheduler, 3)
    while len(scheduler.running) < 4:
        step(scheduler)
    for _ in range(3):
        scheduled = step(scheduler)
        assert len(scheduled) == 4 and sum(scheduled.values()) == 4        # never more run than the budget has tokens


@pytest.mark.parametrize("seed", range(60))
def test_running_requests_against_the_reference(seed):
    """With memory to spare, what the scheduler gives to the running ones is the reference's formula."""
    r = random.Random(seed)
    budget, chunk = r.randint(1, 40), r.choice((None, r.randint(1, 20)))
    scheduler = make(budget=budget, seqs=r.randint(1, 12), max_prefill_chunk=chunk)
    for _ in range(40):
        if r.random() < 0.4:
            add(scheduler, r.randint(1, 60), max_tokens=r.randint(1, 20))
        running = list(scheduler.running)
        expected = share_budget_reference([q.num_missing for q in running], budget, chunk).tolist() if running else []
        scheduled = step(scheduler)
        assert [scheduled[q.request_id] for q in running] == expected


def test_the_newest_is_preempted_and_returns_first():
    """A dry pool: the newest gives everything back, keeps its tokens, and stands at the head of the queue."""
    scheduler = make(num_blocks=6, block_size=4)
    old, young = add(scheduler, 8), add(scheduler, 8)
    add(scheduler, 8, name="behind")
    for _ in range(6):
        step(scheduler)
        if young.num_preemptions:
            break
    assert list(scheduler.preempted) == [young] and young.block_table == [] and young.num_computed_tokens == 0
    assert len(young.tokens) > 8 and list(scheduler.waiting) == ["r1", "behind"]
    assert old in scheduler.running


def test_guesses_are_dropped_before_anybody_is_preempted():
    """Guesses that need a block when the pool is dry go first: nobody loses K/V over them."""
    scheduler = make(num_blocks=4, block_size=4)
    add(scheduler, 6), add(scheduler, 6)
    step(scheduler)
    old, young = scheduler.running
    young.drafts, old.drafts = [1, 2], [1]                                  # position 8 needs a fifth block, 7 does not
    assert [(r.request_id, n) for r, n in scheduler.schedule()] == [("r0", 2), ("r1", 2)]
    assert (old.drafts, young.drafts) == ([1], [1]) and not scheduler.preempted


def test_guesses_share_the_budget():
    """Guesses take what budget is left when streams, prompts and newcomers have theirs; the rest of them is cut off."""
    scheduler = make(budget=8)
    for _ in range(3):
        add(scheduler, 2)
    step(scheduler), step(scheduler)
    for request in scheduler.running:
        request.drafts = [7, 7, 7]
    assert {r.request_id: n for r, n in scheduler.schedule()} == {"r0": 4, "r1": 3, "r2": 1}
    assert [len(r.drafts) for r in scheduler.running] == [3, 2, 0]
    add(scheduler, 20, name="prompt")
    for request in scheduler.running:
        request.drafts = [7, 7, 7]
    assert {r.request_id: n for r, n in scheduler.schedule()} == {"r0": 1, "r1": 1, "r2": 1, "prompt": 5}


def test_a_guess_preempts_nobody():
    """A stream's guesses fit into the block that its neighbour is about to need: the neighbour gets it."""
    scheduler = make(num_blocks=4, block_size=4)
    first, _ = add(scheduler, 4), add(scheduler, 4)
    step(scheduler)
    first.drafts = [5] * 4
    assert [(r.request_id, n) for r, n in scheduler.schedule()] == [("r0", 4), ("r1", 1)] and not scheduler.preempted


def test_a_victim_that_was_already_scheduled_gives_its_tokens_back():
    """The newest, a stream, is served first; then an older prompt needs its blocks. It must not be in the step."""
    scheduler = make(num_blocks=5, block_size=1, budget=4)
    old = add(scheduler, 2, name="old")
    step(scheduler)
    young = add(scheduler, 1, name="young")
    step(scheduler)
    assert scheduler.pool.num_used == 4
    old.tokens += [0]                                                       # the older one lacks two tokens: it comes second
    scheduled = step(scheduler)
    assert scheduled == {"old": 2} and scheduler.preempted == {young: 1} and young not in dict(scheduler.scheduled)


def test_head_of_the_line_holds_the_queue():
    """A large request that does not fit now is not overtaken by a small one that would."""
    scheduler = make(num_blocks=4, block_size=4)
    add(scheduler, 8, name="runs")
    step(scheduler)
    add(scheduler, 12, name="large"), add(scheduler, 1, name="small")
    assert step(scheduler) == {"runs": 1}


def test_admission_needs_room_for_the_whole_sequence():
    """Not only for the first chunk."""
    scheduler = make(num_blocks=3, block_size=4, budget=2)
    add(scheduler, 13)
    assert step(scheduler) == {}
    scheduler = make(num_blocks=3, block_size=4, budget=2)
    add(scheduler, 12)
    assert step(scheduler) == {"r0": 2}


def test_static_batching_admits_only_into_an_empty_engine():
    """The second batch starts when the last of the first is done."""
    scheduler = make(batching="static", seqs=2, budget=16)
    add(scheduler, 2, max_tokens=1), add(scheduler, 2, max_tokens=4), add(scheduler, 2, max_tokens=1)
    steps = [step(scheduler) for _ in range(5)]
    assert [list(s) for s in steps] == [["r0", "r1"], ["r1"], ["r1"], ["r1"], ["r2"]]


def test_static_batching_gathers_its_batch_over_several_steps():
    """The budget of one step must not cap the batch: it stays open until somebody has a token."""
    scheduler = make(batching="static", seqs=3, budget=8)
    for _ in range(4):
        add(scheduler, 20, max_tokens=2)
    ran = set()
    while scheduler.running or scheduler.waiting:
        ran.add(tuple(step(scheduler)))
    assert max(map(len, ran)) >= 2 and ("r3",) in ran


def test_reserved_takes_the_worst_case_up_front():
    """kv_reservation="reserved": blocks for prompt + max_tokens at admission, so fewer fit, and none is ever preempted."""
    scheduler = make(num_blocks=8, block_size=4, kv_reservation="reserved")
    for _ in range(3):
        add(scheduler, 4, max_tokens=12)
    assert list(step(scheduler)) == ["r0", "r1"] and scheduler.pool.num_used == 8
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert scheduler.num_preemptions == 0


def test_cached_tokens_are_counted_once():
    """A hit at the first admission is a saving; what a preempted request finds again is its own work."""
    scheduler = make(caching=True)
    first = add(scheduler, 9)
    step(scheduler)
    second = add(scheduler, 12)
    step(scheduler)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    scheduler._preempt(second)
    step(scheduler)
    assert second.num_cached_tokens == 8 and second.num_preemptions == 1


def test_the_queue_behind_costs_nothing():
    """A step looks at the requests that run and at the head of the queue, however many wait: counted, not timed."""
    looked = []
    for waiting in (10, 1000):
        scheduler = make(seqs=4, budget=8)
        for _ in range(waiting):
            add(scheduler, 4)
        step(scheduler)
        lookups = 0
        original = scheduler.pool.find_prefix

        def counted(tokens):
            nonlocal lookups
            lookups += 1
            return original(tokens)

        scheduler.pool.find_prefix = counted
        for _ in range(20):
            scheduler.schedule()
        looked.append(lookups)
    assert looked[0] == looked[1]


def broken(change):
    scheduler = make(num_blocks=20, seqs=2, budget=8)
    requests = [add(scheduler, 6) for _ in range(3)]
    step(scheduler)
    step(scheduler)
    change(scheduler, *requests)
    return scheduler


CORRUPTIONS = {
    "tokens scheduled, budget 8": lambda s, a, b, c: s.scheduled.append((b, 20)),
    "requests run, limit 2": lambda s, a, b, c: (s.running.append(c), s.waiting.clear(), s.scheduled.append((c, 1))),
    "step that preempted": lambda s, a, b, c: (s.admitted.append(a), s.preempted.update({c: 1})),
    "order of arrival": lambda s, a, b, c: s.running.reverse(),
    "computed nothing": lambda s, a, b, c: s.scheduled.clear(),
    "holds blocks": lambda s, a, b, c: s.pool.allocate(c.block_table, 1),
    "than its blocks hold": lambda s, a, b, c: (a.tokens.extend([0] * 30), setattr(a, "num_computed_tokens", 9)),
    "out of range": lambda s, a, b, c: a.tokens.pop(),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_check_sees_each_corruption(message):
    """Each clause of check(), broken on purpose."""
    broken(lambda *_: None).check()
    with pytest.raises(RuntimeError, match=message):
        broken(CORRUPTIONS[message]).check()


def test_histogram_buckets():
    """A duration falls into the first bucket whose bound it does not exceed."""
    histogram = Histogram()
    for seconds in (0.0005, 0.001, 0.0011, 0.5, 1000.0):
        histogram.observe(seconds)
    buckets = histogram.as_dict()["buckets"]
    assert (buckets[0.001], buckets[0.002], buckets[0.5], buckets["+Inf"]) == (2, 1, 1, 1)
    assert histogram.as_dict()["count"] == 5 and np.isclose(histogram.sum, 1000.5026)
