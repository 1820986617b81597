"""kvcache.py: where the keys and values of every token live, and how attention finds them again.

What it does.  Hands out the blocks of one memory pool (`BlockAllocator`), lays the tokens of a step end to end
(`Batch`), attends over block tables (`attention_*`), keeps the K/V tensors (`KVCache`). The second half, to be read when
the rest is clear, is for GPUs: it launches kernels.cu, and replays decode steps from CUDA graphs.

What it does not know.  Requests, budgets, sampling, text. It imports no other module of the project.

The idea (PagedAttention, Kwon et al. 2023).  Memory is cut into blocks of `block_size` slots; one slot holds the K
and V of one token, in every layer. A sequence owns a list of block ids, its *block table*, in order of position:

    position p of a sequence  ->  slot  block_table[p // block_size] * block_size + p % block_size

So a sequence grows one block at a time, wherever a block is free, and at most block_size - 1 slots are wasted. Two
sequences that start with the same tokens can name the same block. A block that is full, computed and committed gets
a *chained hash*: of its own tokens and of everything before them, since K and V depend on all of that. A newcomer
walks its prompt block by block through those hashes and starts after the last hit.

Who owns the slots of a running sequence of n tokens (half-open ranges of positions):

    [0, num_cached)               found in the prefix cache, perhaps shared; read only
    [num_cached, num_computed)    written by this sequence; full blocks of it are published, and read only from then
    [num_computed, n)             reserved: this sequence will write it, nobody reads it yet
    [n, end of the last block)    not written, never read

Invariants (`BlockAllocator.check` tests them).
  - Free blocks and blocks in use partition the pool; ref_count is the number of block tables that name the block.
  - A refused allocation changes nothing. Taking and freeing a block cost the same however large the pool is.
  - Only full, computed, committed blocks can be found. A hit compares the tokens of the whole chain, not just hashes.

Policies.  A freed block that can be found stays so until its memory is wanted; the one freed longest ago goes first, and
of one sequence the tail before the head (a tail without its head could not be found). Rejected: a radix tree (SGLang), which
also shares within a block's length, but needs a tree where one dict does.

Limits.  A prefix is looked up once, at admission. Two sequences that compute the same prefix at the same time each keep a
copy, and only the first copy can be found, until it is reused.
"""

import math
import warnings
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

# Dimensions: T tokens in the step, R sequences in the step, C context length, H query heads, G key/value heads
# (H is a multiple of G; GPT-2 has G = H), D head_dim, N blocks, B block_size, W widest block table.


# ----------------------------------------------------------------------------------------------
# the block allocator


def invariant(holds, sentence):
    """For the check() methods: what is broken there is a bug of ours, not a user's mistake."""
    if not holds:
        raise RuntimeError(sentence)


class Prefix:
    """What a published block holds: its tokens, and through `parent` all tokens before them.

    As the key of a dict it finds the block. Its hash is chained, of its tokens and of the hash of its parent. Python's hash
    of integers is easy to collide on purpose, so a hash only finds candidates; being equal means to spell the same tokens
    from the very start.

    >>> root = Prefix(None, [1, 2])
    >>> Prefix(root, [3, 4]) == Prefix(Prefix(None, [1, 2]), [3, 4])
    True
    >>> Prefix(root, [3, 4]) == Prefix(Prefix(None, [9, 9]), [3, 4])
    False
    """

    def __init__(self, parent, tokens):
        self.parent, self.tokens = parent, tuple(tokens)
        self.hash = hash((parent, self.tokens))

    def __hash__(self):
        return self.hash

    def __eq__(self, other):
        a, b = self, other
        while a is not b:               # chains usually share their parents, so the walk ends early
            if a is None or b is None or a.tokens != b.tokens:
                return False
            a, b = a.parent, b.parent
        return True


class BlockAllocator:
    """The pool of blocks: who uses which, and which full blocks can be found by their content.

    >>> pool = BlockAllocator(num_blocks=4, block_size=2)
    >>> table = []
    >>> pool.allocate(table, num_tokens=5), table       # five tokens need three blocks of two
    (True, [0, 1, 2])
    >>> pool.publish(table, [7, 7, 8, 8, 9], 0, 5)      # two of them are full
    >>> pool.release(table)
    >>> pool.find_prefix([7, 7, 8, 8, 9])
    [0, 1]
    >>> pool.find_prefix([7, 7, 8, 8])                  # one token must be left to compute
    [0]
    """

    def __init__(self, num_blocks, block_size, enable_prefix_caching=True):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_count = [0] * num_blocks
        self.prefix = [None] * num_blocks                       # block -> the Prefix it holds, once published
        self.by_hash = {}                                       # Prefix -> the block it finds; empty with caching off
        self.free = OrderedDict.fromkeys(range(num_blocks))     # ids with ref_count 0, next to be taken first

    def blocks_needed(self, num_tokens):
        """Blocks that hold num_tokens.

        >>> BlockAllocator(8, 16).blocks_needed(17)
        2
        """
        return math.ceil(num_tokens / self.block_size)

    def find_prefix(self, tokens):
        """The blocks of the longest cached prefix of `tokens`. Changes nothing: `allocate` takes them.

        Whole blocks only, and at most len(tokens) - 1 tokens: the last token has to go through the model, or
        there would be no logits to sample from.
        """
        hits, parent = [], None
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block = self.by_hash.get(Prefix(parent, tokens[start:start + self.block_size]))
            if block is None:
                break                       # what comes after a miss depends on what is missing: useless
            hits.append(block)
            parent = self.prefix[block]
        return hits

    def allocate(self, table, num_tokens, hits=()):
        """Extend `table`, first by the blocks found in the cache, until it holds num_tokens. False: no room.

        All or nothing: a refusal leaves table and pool as they were.
        """
        fresh = self.blocks_needed(num_tokens) - len(table) - len(hits)
        revived = sum(self.ref_count[block] == 0 for block in hits)     # free until now, and no longer takeable
        if fresh > len(self.free) - revived:
            return False
        for block in hits:                  # before anything is taken, or we might take our own hits
            self.free.pop(block, None)
            self.ref_count[block] += 1
        table += [*hits, *(self._take() for _ in range(fresh))]
        return True

    def _take(self):
        """The free block that has waited longest. From here on its old content can't be found."""
        block, _ = self.free.popitem(last=False)
        if self._findable(block):
            del self.by_hash[self.prefix[block]]
        self.prefix[block] = None
        self.ref_count[block] = 1
        return block

    def _findable(self, block):
        """A second copy of the same content has an equal Prefix, but it leads to the first copy."""
        return self.by_hash.get(self.prefix[block]) == block

    def publish(self, table, tokens, start, end):
        """Make the blocks findable that became full when positions [start, end) of `tokens` were computed.

        Call it after the forward pass that wrote them, and never with positions that may still be taken
        back (drafts): whoever finds a block reads it without asking.
        """
        if not self.enable_prefix_caching:
            return
        for i in range(start // self.block_size, end // self.block_size):
            parent = self.prefix[table[i - 1]] if i else None
            prefix = Prefix(parent, tokens[i * self.block_size:(i + 1) * self.block_size])
            self.prefix[table[i]] = prefix
            self.by_hash.setdefault(prefix, table[i])

    def release(self, table):
        """Give up every block of `table` and empty it. A block goes back to the pool with its last owner."""
        for block in reversed(table):       # tail first, so that it is reused before the head it depends on
            invariant(self.ref_count[block] > 0, f"block {block} was freed twice")
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.free[block] = None
                if not self._findable(block):
                    self.free.move_to_end(block, last=False)    # of no use to anybody: reuse it first
        table.clear()

    @property
    def num_used(self):
        return self.num_blocks - len(self.free)

    def check(self, tables):
        """Raise RuntimeError if an invariant is broken; tables: the block tables of all live sequences."""
        owners = Counter(block for table in tables for block in table)
        for block, n in enumerate(self.ref_count):
            invariant(n == owners[block], f"block {block}: ref_count {n}, but {owners[block]} owners")
            invariant((block in self.free) == (n == 0), f"block {block}: {n} owners, in the free list: {block in self.free}")
        invariant(len(self.free) + len(owners) == self.num_blocks, "free and used blocks do not add up to the pool")
        for prefix, block in self.by_hash.items():
            invariant(self.prefix[block] == prefix and len(prefix.tokens) == self.block_size,
                      f"block {block}: the hash map and the block disagree")


# ----------------------------------------------------------------------------------------------
# the batch: the tokens of one step, of all its sequences, laid end to end


@dataclass
class Batch:
    """One step's input. There is no padding: a sequence that computes one token has one row, one that
    computes a chunk of 100 has 100.

    >>> batch = Batch.build([([5], 6, [3, 1], 1), ([7, 8, 9], 0, [2], 0)], block_size=4)
    >>> batch.positions.tolist(), batch.slots.tolist()
    ([6, 0, 1, 2], [6, 8, 9, 10])
    >>> batch.query_start.tolist(), batch.context_len.tolist(), batch.logit_rows.tolist()
    ([0, 1, 4], [7, 3], [0])
    """

    tokens: np.ndarray          # [T] ids
    positions: np.ndarray       # [T] position of each token in its own sequence
    sequences: np.ndarray       # [T] which of the R sequences it belongs to
    query_start: np.ndarray     # [R + 1] sequence r owns the rows [query_start[r], query_start[r + 1])
    context_len: np.ndarray     # [R] tokens of it in the cache once this step's are written: its last row attends to all
    block_tables: np.ndarray    # [R, W] block ids, padded with -1
    logit_rows: np.ndarray      # rows whose logits somebody will sample from
    block_size: int
    # Made by the first layer of a model, used by all its layers: how attention_torch reads K and V, and how kernels.cu does.
    reading: list | None = None
    launch_plan: "LaunchPlan | None" = None

    @classmethod
    def build(cls, sequences, block_size):
        """sequences: list of (new token ids, position of the first, block table, how many last rows need logits)."""
        ids, starts, tables, wanted = zip(*sequences)
        counts = np.array([len(new) for new in ids])
        block_tables = np.full((len(tables), max(map(len, tables))), -1)
        for r, table in enumerate(tables):
            block_tables[r, :len(table)] = table
        query_start = np.concatenate([[0], np.cumsum(counts)])
        owner = np.repeat(np.arange(len(counts)), counts)                               # [T] row -> sequence
        positions = np.arange(len(owner)) + (starts - query_start[:-1])[owner]          # [T]
        context_len = starts + counts
        logit_rows = np.flatnonzero(positions >= (context_len - wanted)[owner])
        return cls(np.concatenate(ids), positions, owner, query_start, context_len, block_tables, logit_rows, block_size)

    @cached_property
    def slots(self):
        """[T] where K and V of each token go (vLLM's slot_mapping)."""
        return self.slots_of(self.sequences, self.positions)

    def slots_of(self, sequences, positions):
        """Where K and V of these positions live: the paging itself. sequences, positions: integers, or arrays that broadcast."""
        return self.block_tables[sequences, positions // self.block_size] * self.block_size + positions % self.block_size


# ----------------------------------------------------------------------------------------------
# attention over the block tables

MAX_PAIRS_IN_PLACE = 1000       # new rows of a sequence * its context: beyond that, copying its keys once pays

with warnings.catch_warnings():
    warnings.simplefilter("ignore")         # with the first sparse matrix of a process, torch says that they are new
    torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1))


def attention_numpy(q, k_cache, v_cache, batch):
    """The reference: every row attends to positions 0 .. its own, row by row and head by head, in float64.

    q [T, H, D], caches [N, B, G, D] of one layer, torch tensors on the CPU -> [T, H, D].
    Query head h reads key/value head h // (H / G).
    """
    (_, H, D), G = q.shape, k_cache.shape[2]
    queries = q.double().numpy()
    keys, values = (cache.double().numpy().reshape(-1, G, D) for cache in (k_cache, v_cache))       # -> [slots, G, D]
    out = np.zeros(queries.shape)
    for row, r in enumerate(batch.sequences):
        position = np.arange(batch.positions[row] + 1)                              # causal: itself and before
        slots = batch.slots_of(r, position)
        for h in range(H):
            g = h * G // H
            scores = keys[slots, g] @ queries[row, h] / math.sqrt(D)                # [C, D] @ [D] -> [C]
            weights = np.exp(scores - scores.max())
            out[row, h] = weights / weights.sum() @ values[slots, g]                # [C] @ [C, D] -> [D]
    return torch.from_numpy(out).to(q.dtype)


def attention_torch(q, k_cache, v_cache, batch):
    """The same in torch. On a CPU decodes and short chunks are read InPlace, longer chunks Gathered; on a GPU, or in 16 bits, all
    are Gathered. Shapes as in attention_numpy; H is a multiple of G."""
    if batch.reading is None:
        rows, sparse = np.diff(batch.query_start), q.device.type == "cpu" and q.dtype.itemsize > 2      # torch has no 16-bit ones
        short = ((rows == 1) | (rows * batch.context_len <= MAX_PAIRS_IN_PLACE)) & sparse
        batch.reading = [Gathered(batch, r, k_cache) for r in np.flatnonzero(~short)]
        batch.reading += [InPlace(batch, np.flatnonzero(short[batch.sequences]), q.shape[1], k_cache)] if short.any() else []
    out = torch.empty_like(q)
    for part in batch.reading:
        out[part.rows] = part.attend(q[part.rows], k_cache, v_cache)
    return out


class Gathered:
    """One sequence, as a rule a chunk of a prompt: many rows that look at the same keys and values. These are copied out of their
    slots, once for all rows, and from there on it is dense matrices."""

    def __init__(self, batch, r, cache):
        rows, column = np.arange(*batch.query_start[r:r + 2]), np.arange(batch.context_len[r])
        # Causal by position, no plain triangle: a chunk can start in the middle of its sequence, and sees all before it.
        mask = np.where(column <= batch.positions[rows, None], np.float32(0), np.float32(-np.inf))      # added to the scores
        self.rows, self.slots = (torch.from_numpy(array).to(cache.device) for array in (rows, batch.slots_of(r, column)))
        self.mask = torch.from_numpy(mask).to(cache.device, cache.dtype)            # [n, C]
        self.room = cache.new_empty((2, len(column), *cache.shape[2:]))     # once for all layers: new memory is slow

    def attend(self, q, k_cache, v_cache):
        for cache, gathered in zip((k_cache, v_cache), self.room):
            torch.index_select(cache.flatten(0, 1), 0, self.slots, out=gathered)                        # [slots, G, D] -> [C, G, D]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, *self.room))                # [n, H, D] -> [1, H, n, D], k and v likewise
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1])
        return attended[0].transpose(0, 1)                                          # -> [n, H, D]


class InPlace:
    """Decodes and short chunks, of all sequences together. A single row would use a copy of its keys and values only once, so they
    are read where they are: the block tables become the pattern of a sparse matrix. It has a line for each query head of each row,
    a column for each key/value head of each slot in the pool, and an entry for each key that the line attends to.

    With one head, blocks of 2, and two decodes, at position 2 (0 and 1 in block 3: slots 6 and 7; 2 in block 1: slot 2) and at
    position 0 (in block 2: slot 4):

    >>> batch = Batch.build([([5], 2, [3, 1], 1), ([7], 0, [2], 1)], block_size=2)
    >>> reading = InPlace(batch, rows=np.array([0, 1]), H=1, cache=torch.zeros(4, 2, 1, 8))
    >>> reading.starts.tolist(), reading.columns.tolist()       # line 0 has the entries 0, 1 and 2, line 1 has entry 3
    ([0, 3, 4], [6, 7, 2, 4])
    """

    def __init__(self, batch, rows, H, cache):
        N, B, G, _ = cache.shape
        lengths = np.repeat(batch.positions[rows] + 1, H)                           # of the lines; causal: itself and before
        seen = np.arange(lengths.max()) < lengths[:, None]                          # [lines, C]
        line, position = np.nonzero(seen)                                           # of each entry
        columns = batch.slots_of(batch.sequences[rows[line // H]], position) * G + line % H * G // H
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self.rows, self.starts, self.columns, self.places = map(torch.from_numpy, (rows, starts, columns, np.flatnonzero(seen)))
        # [lines, longest]: a place for each entry, and behind a line's end -inf, which softmax gives no weight.
        self.scores = cache.new_full(seen.shape, -math.inf)
        # The format wants ascending columns, these are in order of position. What is used below takes any order: no check.
        self.table = torch.sparse_csr_tensor(self.starts, self.columns, cache.new_zeros(len(columns)), (len(lengths), N * B * G),
                                             check_invariants=False)

    def attend(self, q, k_cache, v_cache):
        keys, values = (cache.flatten(0, 2) for cache in (k_cache, v_cache))        # [slots * G, D]
        # The scores: q @ keys.T, only at the table's entries. It is added to 0 times the old entries, and 0 times an infinite score
        # that the layer before has left would not be 0: so they are cleared.
        self.table.values().zero_()
        torch.sparse.sampled_addmm(self.table, q.flatten(0, 1), keys.T, beta=0, alpha=q.shape[-1] ** -0.5, out=self.table)
        self.scores.view(-1)[self.places] = self.table.values()
        weights = torch.softmax(self.scores, dim=-1).view(-1)[self.places]
        # For each line, the sum of the values that it looks at (torch calls them a bag), times their weights.
        attended = F.embedding_bag(self.columns, values, self.starts, mode="sum", per_sample_weights=weights,
                                   include_last_offset=True)
        return attended.view(q.shape)                                               # [lines, D] -> [rows, H, D]


# ----------------------------------------------------------------------------------------------
# the cache

class KVCache:
    """The K and V of every slot of the pool, in every layer. Which slot belongs to whom is the allocator's business."""

    def __init__(self, num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, device, attention):
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        try:
            self.k, self.v = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError):       # TypeError: more than 64 bits
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise ValueError(f"num_blocks={num_blocks}: a pool of {size:,.1f} GiB is more memory than can be had: lower "
                             "num_blocks or block_size") from None
        self.attention = ATTENTION[attention]
        if attention == "cuda":
            load_kernels(dtype, head_dim, block_size, self.k.device)        # compile before anything is served

    def attend(self, layer, q, k, v, batch):
        """Write the new k, v [T, G, D] into their slots, then attend with q [T, H, D] -> [T, H, D].

        All K and V of the step are written first: a row of a chunk attends to the rows before it in the same chunk. The
        later ones are in the cache, too; the causal mask hides them.
        """
        k_cache, v_cache = self.k[layer], self.v[layer]                             # [N, B, G, D]
        dtype, (q, k, v) = q.dtype, (x.to(k_cache.dtype) for x in (q, k, v))        # as they are, unless the cache is finer
        if self.attention is attention_cuda:
            batch.launch_plan = batch.launch_plan or LaunchPlan.make(batch, q.shape[1], *k.shape[1:], q.device)
            write_cuda(k_cache, v_cache, k, v, batch.launch_plan)
        else:
            slots = torch.from_numpy(batch.slots).to(q.device)
            k_cache.flatten(0, 1).index_copy_(0, slots, k)
            v_cache.flatten(0, 1).index_copy_(0, slots, v)
        return self.attention(q, k_cache, v_cache, batch).to(dtype)


# ----------------------------------------------------------------------------------------------
# attention by kernels.cu

KERNEL_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bf16"}
KERNEL_HEAD_DIMS = (32, 64, 128)
KERNEL_BLOCK_SIZE = 16
TILE_ROWS = (1, 4)              # query rows that share the loads of K and V: 1 for a single row, 4 for more
MIN_KEYS_PER_SPLIT = 256        # below that, merging the splits costs more than they save


def kernel_names(dtype, head_dim):
    """The instances of kernels.cu for one type and head_dim, spelled as the compiler wants them.

    >>> kernel_names(torch.float16, 64)[:3]
    ['reshape_and_cache', 'merge_splits<half, 64>', 'paged_attention_simple<half, 64>']
    """
    instance = f"<{KERNEL_TYPES[dtype]}, {head_dim}"
    return ["reshape_and_cache", f"merge_splits{instance}>", f"paged_attention_simple{instance}>",
            *(f"paged_attention{instance}, {rows}>" for rows in TILE_ROWS)]


def compile_kernels(code, names, device):
    """Compile and load kernels -> {name: function(grid, block, arguments)}. CuPy is imported here and nowhere else."""
    if torch.device(device).type != "cuda":
        raise ValueError("attention='cuda' needs device='cuda', a GPU; use attention='torch' or leave it out")
    try:
        import cupy
    except ImportError:
        raise ValueError("attention='cuda' needs CuPy: pip install cupy-cuda13x, or use attention='torch'") from None
    module = cupy.RawModule(code=code, options=("-std=c++17",), name_expressions=names)
    module.compile()            # now: nothing can be compiled or loaded while a CUDA graph is being captured

    def launch_on_torchs_stream(kernel, grid, block, arguments):
        # Asked anew at every launch: during a capture, torch's current stream is another one.
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            kernel(grid, block, arguments)

    return {name: partial(launch_on_torchs_stream, module.get_function(name)) for name in names}


def has_kernels(dtype, head_dim, block_size):
    """True if kernels.cu has instances for this kind of cache."""
    return dtype in KERNEL_TYPES and head_dim in KERNEL_HEAD_DIMS and block_size == KERNEL_BLOCK_SIZE


@lru_cache(maxsize=None)
def load_kernels(dtype, head_dim, block_size, device):
    """All kernels for one kind of cache, compiled once. ValueError for a kind that kernels.cu has no instance of."""
    if not has_kernels(dtype, head_dim, block_size):
        raise ValueError(f"attention='cuda' can't do {dtype}, head_dim {head_dim}, block_size {block_size}: kernels.cu has "
                         f"float32, float16 and bfloat16, head_dim {KERNEL_HEAD_DIMS}, block_size {KERNEL_BLOCK_SIZE}; use "
                         "attention='torch'")
    code = Path(__file__).with_name("kernels.cu").read_text("utf-8")
    return compile_kernels(code, kernel_names(dtype, head_dim), device)


def launch(kernel, grid, block, *arguments):
    """Tensors go as addresses, NumPy scalars as they are. A Python int or float would arrive as 8 bytes, whatever the
    kernel expects, so there must be none."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and (argument.data_ptr() % 16 or argument.stride(-1) != 1):
            raise ValueError(f"a kernel needs rows of dense, 16-byte aligned numbers: address {argument.data_ptr()}, "
                             f"strides {argument.stride()}")
    kernel(grid, block, tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))


@dataclass
class LaunchPlan:
    """What the kernels read besides q and the cache, on the device. Made once per step, for all layers."""

    slots: torch.Tensor         # [T], all int32; -1 is padding here and below
    sequences: torch.Tensor     # [T]
    positions: torch.Tensor     # [T]
    query_start: torch.Tensor   # [R + 1]
    block_tables: torch.Tensor  # [R, W]
    tiles: dict                 # rows -> [tiles, 2]: (sequence, first row), the rows numbered token * group + head
    splits: int                 # thread blocks that share a context
    partial: torch.Tensor       # [T, H, splits, D + 2] float32, what the splits leave to merge_splits

    @classmethod
    def make(cls, batch, H, G, D, device):
        arrays = [torch.from_numpy(array.astype(np.int32)).to(device)
                  for array in (batch.slots, batch.sequences, batch.positions, batch.query_start, batch.block_tables)]
        rows_of = np.diff(batch.query_start) * (H // G)                                     # [R]
        tiles = {rows: [(r, first) for r, n in enumerate(rows_of) if (n > 1) == (rows > 1) for first in range(0, n, rows)]
                 for rows in TILE_ROWS}
        # Thread blocks enough to fill every processor four times over, but no shorter runs of keys than pay.
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
        splits = min(4 * processors // (G * sum(map(len, tiles.values()))), batch.context_len.max() // MIN_KEYS_PER_SPLIT)
        splits = max(1, int(splits))
        partial = torch.empty((len(batch.tokens), H, splits, D + 2) if splits > 1 else 1, dtype=torch.float32, device=device)
        tiles = {rows: torch.tensor(t, dtype=torch.int32, device=device) for rows, t in tiles.items() if t}
        return cls(*arrays, tiles, splits, partial)


def write_cuda(k_cache, v_cache, k, v, plan):
    """Copy k, v [T, G, D], slices of one QKV product, into their slots of the caches [N, B, G, D]."""
    if not k.dtype == v.dtype == k_cache.dtype == v_cache.dtype or k.stride() != v.stride() or not k_cache.is_contiguous():
        raise ValueError(f"k and v must be alike, and of the cache's type: {k.dtype} {k.stride()}, {v.dtype} {v.stride()}, "
                         f"cache {k_cache.dtype} {k_cache.stride()}")
    kernels, (T, G, D) = load_kernels(k.dtype, k.shape[2], k_cache.shape[1], k.device), k.shape
    per_piece = 16 // k.element_size()
    launch(kernels["reshape_and_cache"], (T, 1, 1), (64, 1, 1), k_cache, v_cache, k, v, plan.slots,
           np.int32(G * D // per_piece), np.int32(k.stride(0) // per_piece))


def attention_cuda(q, k_cache, v_cache, batch):
    """The same by kernels.cu: a launch for the decodes, one for everything longer. Shapes as in attention_numpy."""
    (T, H, D), G, plan = q.shape, k_cache.shape[2], batch.launch_plan
    kernels, instance = load_kernels(k_cache.dtype, D, k_cache.shape[1], q.device), f"<{KERNEL_TYPES[k_cache.dtype]}, {D}"
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    for rows, tiles in plan.tiles.items():
        launch(kernels[f"paged_attention{instance}, {rows}>"], (G, len(tiles), plan.splits), (128, 1, 1),
               out, plan.partial, q, np.int32(q.stride(0)), k_cache, v_cache,
               plan.block_tables, np.int32(plan.block_tables.shape[1]), plan.query_start, plan.positions, tiles,
               np.float32(D ** -0.5), np.int32(H // G))
    if plan.splits > 1:
        launch(kernels[f"merge_splits{instance}>"], (H, T, 1), (D, 1, 1),
               out, plan.partial, plan.sequences, np.int32(plan.splits))
    return out


ATTENTION = {"numpy": attention_numpy, "torch": attention_torch, "cuda": attention_cuda}


# ----------------------------------------------------------------------------------------------
# decode steps as CUDA graphs


class DecodeGraphs:
    """A model whose decode steps are replayed from CUDA graphs. For a GPU and attention="cuda".

    A decode of a small model is a hundred and more launches, and on a fast GPU launching takes longer than running. A graph
    is launched once. The price: it freezes addresses, shapes and grids. So each batch size has a graph of its own, rounded
    up to a power of two; the inputs are copied into tensors that stay where they are; and whoever is missing is padding:
    tiles, slots and sequences of -1, which write and read nothing.
    """

    def __init__(self, model, capture=True):
        """capture=False runs what a graph would replay, padding and all: for tests without a GPU."""
        self.model, self.config = model, model.config
        # A stream of its own: all graphs captured on a stream lose their cuBLAS workspace when one of them is destroyed.
        self.stream = torch.cuda.Stream() if capture else None
        self.graphs = {}                    # (size, address of the cache) -> (tokens [size], plan, replay, logits [size, V])

    @torch.inference_mode()
    def forward(self, batch, cache):
        """As GPT2.forward. A step that is not all decodes goes the ordinary way."""
        R = len(batch.context_len)
        if len(batch.tokens) > R:
            return self.model.forward(batch, cache)
        size = 1 << (R - 1).bit_length()
        key = size, cache.k.data_ptr()
        if key not in self.graphs:
            self.graphs[key] = self._record(size, cache)
        tokens, plan, replay, logits = self.graphs[key]
        # The batch into the first places, padding into the others.
        for frozen, values, padding in ((tokens, batch.tokens, 0), (plan.positions, batch.positions, 0),
                                        (plan.slots, batch.slots, -1), (plan.sequences, batch.sequences, -1)):
            frozen[:R], frozen[R:] = torch.from_numpy(values), padding
        # A frozen table is as long as the longest; what lies behind a sequence's end is never read. A draft may have the
        # shorter context, and then the target's tables are longer still.
        width = min(batch.block_tables.shape[1], plan.block_tables.shape[1])
        plan.block_tables[:R, :width] = torch.from_numpy(batch.block_tables[:, :width])
        replay()
        if len(batch.logit_rows) == R:          # unless one of them is a prompt whose chunk is a single token
            return logits[:R].clone()
        return logits[torch.from_numpy(batch.logit_rows).to(logits.device)]

    def _record(self, size, cache):
        """Run the model on nothing but padding, so that all is compiled, loaded and allocated, and once more to record it.
        -> (tokens and LaunchPlan, to be filled in; replay; its logits)"""
        (block_size, G, D), device, longest = cache.k.shape[2:], cache.k.device, self.config.context_length
        table = [0] * math.ceil(longest / block_size)
        batch = Batch.build([([0], longest - 1, table, 1)] * size, block_size)      # the largest that can come ...
        batch.launch_plan = plan = LaunchPlan.make(batch, self.config.num_heads, G, D, device)
        plan.slots[:], plan.sequences[:] = -1, -1                                   # ... and none of it is there
        tokens = torch.from_numpy(batch.tokens).to(device)

        def run():
            for tiles in plan.tiles.values():   # a decode is its own sequence, or -1
                tiles[:, 0] = plan.sequences.repeat_interleave(len(tiles) // size)
            return self.model.compute(tokens, plan.positions.long(), slice(None), batch, cache)

        if self.stream is None:
            logits = run()
            return tokens, plan, lambda: logits.copy_(run()), logits
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):       # which synchronizes once more
            logits = run()
        return tokens, plan, graph.replay, logits
