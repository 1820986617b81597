"""The block allocator, the ragged batch, and attention over block tables."""

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch

import kvcache
from common import assert_close
from kvcache import Batch, BlockAllocator, KVCache, Prefix, attention_numpy


def pool_of(num_blocks=8, block_size=4, **fields):
    return BlockAllocator(num_blocks, block_size, **fields)


def serve(pool, tokens):
    """One sequence from admission to its last block published. -> its table, still held."""
    table, hits = [], pool.find_prefix(tokens)
    assert pool.allocate(table, len(tokens), hits)
    pool.publish(table, tokens, len(hits) * pool.block_size, len(tokens))
    return table


# ----------------------------------------------------------------------------------------------
# the allocator


def test_refused_allocation_changes_nothing():
    """All or nothing, with and without hits: table, free list and counts are untouched by a refusal."""
    pool = pool_of()
    pool.release(serve(pool, list(range(12))))
    held = serve(pool, list(range(100, 116)))
    hits = pool.find_prefix(list(range(9)))
    assert len(hits) == 2
    before = (list(pool.free), list(pool.ref_count), dict(pool.by_hash))
    for table, tokens, found in (([], 17, []), ([], 20, hits), (list(held), 33, [])):
        unchanged = list(table)
        assert not pool.allocate(table, tokens, found)
        assert table == unchanged and before == (list(pool.free), list(pool.ref_count), dict(pool.by_hash))


def test_hits_count_as_taken_when_they_were_free():
    """A hit on a free block is one free block less: 4 free, 2 of them hits, so 2 fresh ones fit and 3 do not."""
    pool = pool_of(num_blocks=4)
    pool.release(serve(pool, list(range(16))))
    hits = pool.find_prefix(list(range(8)) + [9])
    assert len(hits) == 2
    assert not pool.allocate([], 17, hits) and pool.allocate([], 16, hits)


def test_hits_are_not_evicted_by_their_own_request():
    """The two hits are the first in line for reuse; taking fresh blocks must not hand them out again."""
    pool = pool_of(num_blocks=4)
    pool.release(serve(pool, list(range(8)) + [99]))
    table = []
    assert pool.allocate(table, 16, pool.find_prefix(list(range(9))))
    assert len(set(table)) == 4
    pool.check([table])


def test_sharing_and_release():
    """ref_count follows the tables; a shared block returns with its last owner; a second release is refused."""
    pool = pool_of()
    first, second = serve(pool, list(range(9))), serve(pool, list(range(10)))
    assert first[:2] == second[:2] and pool.ref_count[first[0]] == 2
    pool.check([first, second])
    stale = list(first)
    pool.release(first)
    pool.check([second])
    assert pool.num_used == 3 and first == []
    pool.release(second)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release(stale)


def test_reuse_order_is_least_recently_freed_and_tail_first():
    """What nobody can find goes first, then whole sequences by age, each from its tail."""
    pool = pool_of(num_blocks=6)
    old, young = serve(pool, [1] * 8), serve(pool, [2] * 8 + [3])
    expected = [young[2], old[1], old[0], young[1], young[0]]
    pool.release(old)
    pool.release(young)
    order = list(pool.free)
    assert [block for block in order if block in expected] == expected


def test_eviction_forgets_the_content():
    """A block that is taken again can't be found by what it held before."""
    pool = pool_of(num_blocks=2)
    pool.release(serve(pool, [1] * 8))
    assert len(pool.find_prefix([1] * 9)) == 2
    table = serve(pool, [2] * 8)
    assert pool.find_prefix([1] * 9) == [] and pool.prefix.count(None) == 0
    pool.check([table])


def test_a_hole_in_the_chain_ends_the_match():
    """Without its head, a cached tail is of no use."""
    pool = pool_of(num_blocks=3, block_size=2)
    table = serve(pool, [1, 2, 3, 4, 5, 6])
    del pool.by_hash[pool.prefix[table[0]]]
    assert pool.find_prefix([1, 2, 3, 4, 5, 6, 7]) == []


@pytest.mark.parametrize("length, hits", [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)])
def test_a_match_leaves_one_token(length, hits):
    """Whole blocks, at most len - 1 tokens."""
    pool = pool_of()
    pool.release(serve(pool, list(range(12))))
    assert len(pool.find_prefix(list(range(length)))) == hits


def test_nothing_is_found_before_it_is_published_or_with_caching_off():
    """Blocks are findable after `publish` only, block by block, and never with the cache switched off."""
    pool, tokens, table = pool_of(), list(range(12)), []
    pool.allocate(table, 12)
    assert pool.find_prefix(tokens) == []
    pool.publish(table, tokens, 0, 7)
    assert pool.find_prefix(tokens + [0]) == table[:1]
    pool.publish(table, tokens, 7, 12)
    assert pool.find_prefix(tokens + [0]) == table
    off = pool_of(enable_prefix_caching=False)
    serve(off, tokens)
    assert off.find_prefix(tokens + [0]) == [] and not off.by_hash


def test_a_hash_collision_is_no_hit(monkeypatch):
    """With a hash that always collides, only equal chains of tokens are found."""
    monkeypatch.setattr(Prefix, "__hash__", lambda self: 0)
    pool = pool_of(block_size=2)
    table = serve(pool, [1, 2, 3])
    assert pool.find_prefix([1, 2, 9]) == table[:1] and pool.find_prefix([1, 3, 9]) == []


def test_a_collision_of_parents_is_no_hit(monkeypatch):
    """[1 2][5 6] is cached; [3 4] has the hash of [1 2]. After [1 2] is gone, [3 4][5 6] must not find the old tail."""
    monkeypatch.setattr(Prefix, "__hash__", lambda self: hash((self.parent, sum(self.tokens) > 8)))
    pool = pool_of(block_size=2)
    tail = serve(pool, [1, 2, 5, 6, 0])
    del pool.by_hash[pool.prefix[tail[0]]]                          # as if the head had been evicted alone
    pool.prefix[tail[0]] = None
    head = serve(pool, [3, 4, 0])
    assert pool.find_prefix([3, 4, 5, 6, 0]) == head[:1]


def test_the_same_content_twice():
    """Two sequences that compute the same prefix at once keep a copy each; the second copy is reused first."""
    pool, tokens = pool_of(), list(range(4))
    tables = [[], []]
    for table in tables:
        pool.allocate(table, 4)
    for table in tables:
        pool.publish(table, tokens, 0, 4)
    assert pool.find_prefix(tokens + [0]) == tables[0]
    second = tables[1][0]
    pool.check(tables)
    for table in tables:
        pool.release(table)
    assert next(iter(pool.free)) == second and len(pool.find_prefix(tokens + [0])) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_walk_against_a_naive_model(seed):
    """Random admissions, growth and releases; a dict of what every block holds says which hits are right."""
    r = random.Random(seed)
    block_size = r.choice((1, 2, 3))
    pool = BlockAllocator(r.randint(3, 12), block_size)
    content, live = {}, []                                          # block -> all tokens up to its end; (table, tokens)
    for _ in range(300):
        action = r.random()
        if action < 0.5:
            tokens = [r.randrange(2) for _ in range(r.randint(1, 10))]
            hits = pool.find_prefix(tokens)
            for i, block in enumerate(hits):
                assert content[block] == tuple(tokens[:(i + 1) * block_size]), "a hit that holds something else"
            table = []
            if pool.allocate(table, len(tokens), hits):
                for block in table[len(hits):]:
                    content.pop(block, None)
                pool.publish(table, tokens, len(hits) * block_size, len(tokens))
                for i in range(len(tokens) // block_size):
                    content[table[i]] = tuple(tokens[:(i + 1) * block_size])
                live.append((table, tokens))
        elif action < 0.75 and live:
            table, tokens = r.choice(live)
            had = len(table)
            if pool.allocate(table, len(tokens) + 1):
                tokens.append(r.randrange(2))
                for block in table[had:]:
                    content.pop(block, None)
                pool.publish(table, tokens, len(tokens) - 1, len(tokens))
                if len(tokens) % block_size == 0:
                    content[table[len(tokens) // block_size - 1]] = tuple(tokens)
        elif live:
            pool.release(live.pop(r.randrange(len(live)))[0])
        pool.check([table for table, _ in live])
    for table, _ in live:
        pool.release(table)
    pool.check([])
    assert pool.num_used == 0


CORRUPTIONS = {
    "ref_count": lambda pool, table: pool.ref_count.__setitem__(table[0], 2),
    "owners, in the free list": lambda pool, table: pool.free.__setitem__(table[0], None),
    "0 owners, in the free list": lambda pool, table: pool.free.popitem(),
    "hash map": lambda pool, table: pool.prefix.__setitem__(table[0], None),
    "add up": lambda pool, table: pool.free.__setitem__(99, None),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_check_sees_each_corruption(message):
    """Each clause of check(), broken on purpose."""
    pool = pool_of()
    table = serve(pool, list(range(9)))
    pool.check([table])
    CORRUPTIONS[message](pool, table)
    with pytest.raises(RuntimeError, match=message):
        pool.check([table])


# ----------------------------------------------------------------------------------------------
# the batch and attention


def random_batch(r, block_size, num_blocks, shapes):
    """shapes: (tokens already in the cache, new tokens) of each sequence. -> Batch, with tables in shuffled blocks."""
    free = list(range(num_blocks))
    r.shuffle(free)
    sequences = []
    for computed, new in shapes:
        table = [free.pop() for _ in range(-(-(computed + new) // block_size))]
        sequences.append(([r.randrange(50) for _ in range(new)], computed, table, r.choice((0, 1, min(new, 3)))))
    return Batch.build(sequences, block_size), sequences


@pytest.mark.parametrize("block_size", (1, 3, 16))
def test_batch_against_plain_loops(block_size):
    """Every array of the batch, recomputed token by token."""
    shapes = [(5, 1), (0, 7), (16, 1), (3, 4), (0, 1), (31, 2)]
    batch, sequences = random_batch(random.Random(1), block_size, 90, shapes)
    row = 0
    logit_rows = []
    for r, (tokens, start, table, logits) in enumerate(sequences):
        assert batch.query_start[r] == row and batch.context_len[r] == start + len(tokens)
        for i, token in enumerate(tokens):
            position = start + i
            assert (batch.tokens[row], batch.positions[row]) == (token, position)
            assert batch.slots[row] == table[position // block_size] * block_size + position % block_size
            if i >= len(tokens) - logits:
                logit_rows.append(row)
            row += 1
    assert batch.query_start[-1] == row == len(batch.tokens) and batch.logit_rows.tolist() == logit_rows


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("block_size", (1, 4, 16))
@pytest.mark.parametrize("shapes", [[(0, 1)], [(7, 1), (0, 9), (15, 1), (16, 1)], [(3, 5), (12, 4), (0, 4)], [(40, 1), (1, 1), (0, 33)],
                                    [(20, 1), (25, 1), (31, 1)]])
@pytest.mark.parametrize("pairs_in_place", (0, kvcache.MAX_PAIRS_IN_PLACE, 10**6))
@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_torch_attention_equals_the_reference(dtype, pairs_in_place, heads, kv_heads, block_size, shapes):
    """On ragged batches and grouped heads, in a pool where every slot that is not theirs is NaN; each shape in both ways of
    reading, and in the mixture that is served."""
    with patch.object(kvcache, "MAX_PAIRS_IN_PLACE", pairs_in_place):
        check_torch_attention(getattr(torch, dtype), heads, kv_heads, block_size, shapes)


def check_torch_attention(dtype, heads, kv_heads, block_size, shapes):
    batch, sequences = random_batch(random.Random(2), block_size, 120, shapes)
    generator = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)
    T, D = len(batch.tokens), 8
    caches = {}
    q, k, v = normal(T, heads, D), normal(T, kv_heads, D), normal(T, kv_heads, D)
    past = normal(2, 120 * block_size, kv_heads, D)
    for name in ("numpy", "torch"):
        cache = caches[name] = KVCache(1, 120, block_size, kv_heads, D, dtype, "cpu", name)
        for tensor, values in ((cache.k, past[0]), (cache.v, past[1])):
            flat = tensor.fill_(float("nan")).view(-1, kv_heads, D)
            for _, start, table, _ in sequences:
                for p in range(start):
                    slot = table[p // block_size] * block_size + p % block_size
                    flat[slot] = values[slot]
        caches[name] = cache.attend(0, q, k, v, batch)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(caches["torch"], caches["numpy"], tolerance, "sums of at most 41 terms of size 1, in another order")


def test_a_layer_without_a_finite_score_does_not_reach_the_next():
    """The step's layers share the memory of their scores. What overflowed in one is gone in the next."""
    batch = Batch.build([([1], 2, [1, 0], 1), ([2], 0, [2], 1)], block_size=2)
    cache = KVCache(2, 3, 2, 1, 4, torch.float32, "cpu", "torch")
    cache.k[0] = -float("inf")
    q, k, v = torch.ones(2, 1, 4), torch.zeros(2, 1, 4), torch.ones(2, 1, 4)
    cache.attend(0, q, k, v, batch)
    assert cache.attend(1, q, k, v, batch)[1].tolist() == [[1.0] * 4]
    assert_close(cache.attend(1, q, k, v, batch), attention_numpy(q, cache.k[1], cache.v[1], batch), 1e-6, "float32, sums of 3 terms")


def test_reference_attention_by_hand():
    """Two positions, equal scores: the mean of their values; one position: its value."""
    batch = Batch.build([([1, 2], 0, [1], 1)], block_size=2)
    k, v = torch.zeros(2, 2, 1, 2), torch.full((2, 2, 1, 2), float("nan"))
    v[1, :, 0] = torch.tensor([[2.0, 4.0], [6.0, 0.0]])
    out = attention_numpy(torch.ones(2, 1, 2), k, v, batch)
    assert out[:, 0].tolist() == [[2.0, 4.0], [4.0, 2.0]]


def test_a_pool_too_large_for_the_machine_is_one_sentence():
    """Memory that can't be had is a user's mistake, said with the size and the remedy."""
    with pytest.raises(ValueError, match="num_blocks=1000000000000.*GiB.*lower num_blocks"):
        KVCache(4, 10**12, 16, 4, 32, torch.float32, "cpu", "torch")


def test_the_comparer_fails_on_nan_and_on_shapes():
    """assert_close is what most of these tests stand on."""
    for actual, expected in (([1.0, float("nan")], [1.0, 2.0]), ([1.0], [float("nan")]), ([float("inf")], [1.0]), ([1.0, 2.0], [1.0]),
                             ([1.0], [1.1])):
        with pytest.raises(AssertionError):
            assert_close(np.array(actual), np.array(expected), 0.01, "a test of the comparer")
    assert_close([1.0], [1.005], 0.01, "a test of the comparer")
