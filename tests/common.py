"""What several test files use: the comparer of arrays, the ghost model, pools whose unused slots are poison."""

import numpy as np
import torch

from kvcache import KERNEL_TYPES, KVCache, launch, load_kernels
from nanoserve import Engine, ModelConfig, SamplingParams, gpt2_reference


def assert_close(actual, expected, tolerance, why):
    """Compare arrays so that a NaN fails. `why` says where the tolerance comes from."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    difference = np.abs(actual - expected)
    if not (difference <= tolerance).all():                     # "not <=" and not ">": a NaN is neither
        worst = np.unravel_index(np.argmax(np.where(np.isnan(difference), np.inf, difference)), difference.shape)
        raise AssertionError(f"at {tuple(map(int, worst))}: {actual[worst]!r}, expected {expected[worst]!r}; "
                             f"tolerance {tolerance} ({why})")


# ----------------------------------------------------------------------------------------------
# the ghost model


GHOST_VOCABULARY = 97


def ghost_next(tokens):
    """The ghost's next token: a function of every token so far and of its position."""
    state = 0
    for position, token in enumerate(tokens):
        state = (state * 31 + (token + 1) * (position + 7)) % 1_000_003
    return state % GHOST_VOCABULARY


def ghost_text(prompt, max_tokens):
    """What the ghost says after `prompt`, by plain recursion: the reference for any schedule."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(ghost_next(tokens))
    return tokens[len(prompt):]


class Ghost:
    """A model whose K is the token id and whose V is its position. It knows a sequence only by what it reads back
    through the block table, so a slip in sharing, eviction, chunking, rollback or position changes what it says."""

    def __init__(self, context_length):
        self.config = ModelConfig(GHOST_VOCABULARY, context_length, num_layers=1, num_heads=1, width=1)

    def forward(self, batch, cache):
        keys, values = cache.k[0].view(-1), cache.v[0].view(-1)
        slots = torch.from_numpy(batch.slots)
        keys[slots] = torch.from_numpy(batch.tokens).double()
        values[slots] = torch.from_numpy(batch.positions).double()
        logits = np.zeros((len(batch.logit_rows), GHOST_VOCABULARY))
        for i, row in enumerate(batch.logit_rows):
            r = np.searchsorted(batch.query_start, row, side="right") - 1
            position = np.arange(batch.positions[row] + 1)
            slots = batch.block_tables[r][position // batch.block_size] * batch.block_size + position % batch.block_size
            seen, at = keys[slots].tolist(), values[slots].tolist()
            assert seen == seen and all(token == token for token in seen), f"row {row} read a slot that was never written for it"
            assert at == position.tolist(), f"row {row} read K/V of other positions: {at}"
            logits[i, ghost_next([int(token) for token in seen])] = 1.0
        return torch.from_numpy(logits)


def poison(pool, cache):
    """Fill the cache with NaN now, and every block again at the moment its content is given up."""
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    take, release = pool._take, pool.release

    def poisoned_take():
        block = take()
        cache.k[:, block] = cache.v[:, block] = float("nan")
        return block

    def poisoned_release(table):
        blocks = list(table)
        release(table)
        for block in blocks:
            if pool.ref_count[block] == 0 and not pool._findable(block):
                cache.k[:, block] = cache.v[:, block] = float("nan")

    pool._take, pool.release = poisoned_take, poisoned_release


class GhostTokenizer:
    eos_id, longest = GHOST_VOCABULARY - 1, 1

    def decode_bytes(self, ids):
        return b"".join(b"%d " % i for i in ids)


class GhostEngine(Engine):
    """The real engine around the ghost. Token ids only; the pool is poisoned."""

    context_length = 64

    def __init__(self, **fields):
        super().__init__(**fields)
        poison(self.pool, self.cache)

    def load(self, config):
        cache = KVCache(1, config.num_blocks, config.block_size, 1, 1, torch.float64, "cpu", "numpy")
        return Ghost(self.context_length), GhostTokenizer(), cache


def reference_greedy(weights, prompt, max_tokens):
    """What greedy decoding says in the NumPy reference, which recomputes everything for every token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(gpt2_reference(weights, tokens)[-1].argmax()))
    return tokens[len(prompt):]


def greedy(max_tokens, **fields):
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **fields)


# ----------------------------------------------------------------------------------------------
# the simple kernel: the engine does not use it


def attention_cuda_simple(q, k_cache, v_cache, batch):
    """kvcache.attention_cuda by the kernel that is there to be read first."""
    (T, H, D), G, plan = q.shape, k_cache.shape[2], batch.launch_plan
    kernels, instance = load_kernels(k_cache.dtype, D, k_cache.shape[1], q.device), f"<{KERNEL_TYPES[k_cache.dtype]}, {D}"
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    launch(kernels[f"paged_attention_simple{instance}>"], (H, T, 1), (D, 1, 1), out, q, np.int32(q.stride(0)), k_cache, v_cache,
           plan.block_tables, np.int32(plan.block_tables.shape[1]), plan.sequences, plan.positions, np.float32(D ** -0.5),
           np.int32(H // G))
    return out
