"""nanoserve.py: the model, the engine and the command line.

What it does.  Loads a GPT-2 (`load_weights`) and its tokenizer, runs it over a ragged batch (`GPT2`), and turns the crank:
`Engine.step` asks the scheduler who computes what, makes one forward pass, turns logits into tokens and tokens into
text. `python nanoserve.py` does it before your eyes.

What it does not know.  Which block is free (kvcache.py), whose turn it is (scheduler.py), how a token is drawn (spec.py).

The idea.  One request alone leaves the machine idle: to make one token, a pass reads every weight once, and it could
serve dozens of tokens for the same reading. So many requests share each pass, and everything else here follows from
that: they come and go at any step, they need memory that grows with every token, and they start with prompts of any
length. The life of a request, step by step:

    add_request -> waiting -> [schedule -> forward pass -> sample -> append, stream] repeated -> finished

Invariants (`Engine.check`, and the tests).
  - A request's tokens depend on its prompt, its parameters and its seed; not on its batch mates, the budget, the pool, the
    block size, prefix caching or preemptions. Exactly so in float64. In float32 a sum taken in another order can
    differ in its last digits, so two tokens that the model likes equally well can change places.
  - Every accepted request ends in exactly one output with a finish_reason. A refused one changes nothing.
  - Every step with unfinished requests computes at least one token or ends at least one request.

Policies.  One thread, one step at a time: the order of events is the order of the code. Rejected: preparing step n + 1
while step n computes, as production engines do; it hides some Python time and all of the clarity.

Limits.  GPT-2's architecture only, one device, no quantisation.
"""

import argparse
import codecs
import dataclasses
import functools
import heapq
import json
import math
import mmap
import os
import random
import re
import sys
import time
import unicodedata
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from kvcache import ATTENTION, Batch, BlockAllocator, KVCache
from scheduler import Request, Scheduler
from spec import Detokenizer, SamplingParams, target_probs, verify

EMBEDDED = Path(__file__).parent / "weights"

# Dimensions: T tokens in the step, S rows that are sampled, V vocabulary, E embedding width, H heads, D head_dim (E = H D).


# ----------------------------------------------------------------------------------------------
# tokenizer: byte-level BPE, identical to GPT-2's


def _byte_alphabet():
    """GPT-2's printable stand-in for each of the 256 bytes: itself where printable, else 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [stand_in[b] for b in range(256)]


BYTE_TO_CHAR = _byte_alphabet()


class _CharClass(dict):
    """For str.translate: every non-ASCII character becomes an ASCII one of its kind, so that the pattern
    below needs no Unicode tables: a letter "a", a number "0", a blank a newline, anything else "!"."""

    def __missing__(self, code):
        char = chr(code)
        kind = unicodedata.category(char)[0]
        if code < 128:
            stand_in = "!" if 0x1C <= code <= 0x1F else char     # str.isspace calls these four blanks, Unicode does not
        else:
            stand_in = {"L": "a", "N": "0"}.get(kind, "\n" if char.isspace() else "!")
        self[code] = stand_in
        return stand_in


_CHAR_CLASS = _CharClass()
_PIECE = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+", re.ASCII)


def pretokenize(text):
    """Split text where GPT-2 does, before any merge: a merge never crosses the edge of a piece.

    >>> pretokenize("I'll take 12  eggs!")
    ['I', "'ll", ' take', ' 12', ' ', ' eggs', '!']
    """
    return [text[m.start():m.end()] for m in _PIECE.finditer(text.translate(_CHAR_CLASS))]


class Tokenizer:
    """Byte-level BPE with GPT-2's files. Text to ids and back; any bytes have ids, so nothing is ever unknown.

    `<|endoftext|>` written in a text is encoded as the ordinary characters it is made of: only the engine
    deals in the id `eos_id`, so no prompt can forge the end of a text.
    """

    def __init__(self, vocab, merges):
        """vocab: dict of token string -> id; merges: list of (left, right) in order of rank."""
        char_to_byte = {c: b for b, c in enumerate(BYTE_TO_CHAR)}
        self.eos_id = vocab["<|endoftext|>"]
        self.ids = {bytes(char_to_byte[c] for c in token): i for token, i in vocab.items() if i != self.eos_id}
        self.bytes = {i: token for token, i in self.ids.items()} | {self.eos_id: b""}
        self.rank = {tuple(bytes(char_to_byte[c] for c in part) for part in pair): r for r, pair in enumerate(merges)}
        self.piece = functools.lru_cache(maxsize=65536)(self._merge)    # texts repeat their words

    @classmethod
    def load(cls, folder):
        vocab = json.loads((Path(folder) / "vocab.json").read_text("utf-8"))
        lines = (Path(folder) / "merges.txt").read_text("utf-8").split("\n")
        return cls(vocab, [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")])

    def _merge(self, piece):
        """The ids of one piece: join the neighbours whose merge was learnt first, until no pair is known.

        A heap of candidate pairs and a linked list of parts keep it O(n log n) on a piece of any length.
        """
        parts = [bytes([b]) for b in piece]
        after, before = list(range(1, len(parts) + 1)), list(range(-1, len(parts) - 1))
        heap = []

        def offer(i):
            if i >= 0 and after[i] < len(parts):
                pair = parts[i], parts[after[i]]
                if pair in self.rank:
                    heapq.heappush(heap, (self.rank[pair], i, pair))

        for i in range(len(parts) - 1):
            offer(i)
        while heap:
            _, i, pair = heapq.heappop(heap)
            j = after[i]
            if j >= len(parts) or (parts[i], parts[j]) != pair:
                continue                                 # one of the two was merged away since it was offered
            parts[i], parts[j] = pair[0] + pair[1], b""
            after[i] = after[j]
            if after[i] < len(parts):
                before[after[i]] = i
            offer(before[i])
            offer(i)
        return [self.ids[part] for part in parts if part]

    def encode(self, text):
        """str -> list of ids. Bytes are taken too, valid UTF-8 or not; a lone surrogate becomes U+FFFD."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        else:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return [i for piece in pretokenize(text) for i in self.piece(piece.encode("utf-8", "surrogateescape"))]

    def decode_bytes(self, ids):
        return b"".join(self.bytes[i] for i in ids)

    def decode(self, ids):
        """ids -> str; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------
# weights: an ordinary Hugging Face GPT-2 folder


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2."""

    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    width: int
    epsilon: float = 1e-5

    @classmethod
    def load(cls, path):
        c = _read_json(path)
        try:
            config = cls(*(int(c[key]) for key in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")),
                         float(c.get("layer_norm_epsilon", 1e-5)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not the configuration of a GPT-2: {error!r} is missing or no number") from None
        # What would change the function of the model without changing a single shape has to be refused here.
        for key, expected in (("model_type", "gpt2"), ("activation_function", "gelu_new"), ("tie_word_embeddings", True),
                              ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
            if c.get(key, expected) != expected:
                raise ValueError(f"{path}: {key} is {c[key]!r}, only {expected!r} is supported")
        if min(dataclasses.astuple(config)) <= 0 or config.width % config.num_heads:
            raise ValueError(f"{path}: sizes must be positive and n_embd a multiple of n_head")
        return config

    def shapes(self):
        """The tensors of the checkpoint: name -> shape. Linear layers are stored [in, out], as in GPT-2."""
        E = self.width
        shapes = {"wte.weight": (self.vocab_size, E), "wpe.weight": (self.context_length, E)}
        norms, linears = ("ln_f",), {}
        for i in range(self.num_layers):
            norms += (f"h.{i}.ln_1", f"h.{i}.ln_2")
            linears |= {f"h.{i}.attn.c_attn": (E, 3 * E), f"h.{i}.attn.c_proj": (E, E),
                        f"h.{i}.mlp.c_fc": (E, 4 * E), f"h.{i}.mlp.c_proj": (4 * E, E)}
        for name, (fan_in, fan_out) in linears.items():
            shapes |= {f"{name}.weight": (fan_in, fan_out), f"{name}.bias": (fan_out,)}
        for name in norms:
            shapes |= {f"{name}.weight": (E,), f"{name}.bias": (E,)}
        return shapes


class Weights(dict):
    """name -> torch tensor, names as in the checkpoint without "transformer."; `config` is the shape."""

    def __init__(self, config, tensors):
        super().__init__(tensors)
        self.config = config


def _read_json(path):
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a model folder holds config.json, model.safetensors, vocab.json and "
                         "merges.txt") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None


SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path):
    """name -> tensor, each a window into the memory-mapped file: pages are read when used, and not copied.

    The format: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the numbers.
    The header may lie (a download that broke off), so every claim is checked against the file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""    # COPY: torch wants it writable
    start = 8 + int.from_bytes(data[:8], "little")
    if size < 8 or start > size:
        raise ValueError(f"{path}: its header should end at byte {start}, the file has {size}: truncated?")
    try:
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        claims = [(name, c["dtype"], tuple(c["shape"]), *c["data_offsets"]) for name, c in header.items()]
        lengths = [(math.prod(shape), end - begin) for _, _, shape, begin, end in claims]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path}: its header is not that of a safetensors file") from None
    tensors = {}
    for (name, dtype, shape, begin, end), (count, length) in zip(claims, lengths):
        if dtype not in SAFETENSORS_DTYPES:
            continue                        # GPT-2's checkpoints carry their causal masks, as bytes: nobody needs them
        dtype = SAFETENSORS_DTYPES[dtype]
        if not 0 <= begin <= end <= size - start or count * dtype.itemsize != length:
            raise ValueError(f"{path}: tensor {name} of shape {list(shape)} needs {count * dtype.itemsize} bytes, the header "
                             f"gives it [{begin}, {end}) of the {size - start} bytes that are there")
        tensors[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).view(shape)
    return tensors


def load_weights(folder):
    """Read config.json and model.safetensors of a GPT-2 folder -> Weights. The output head is the embedding (tied)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model={str(folder)!r}: no such folder; use 'tiny', 'gpt2' or a folder with GPT-2's files")
    config = ModelConfig.load(folder / "config.json")
    path = folder / "model.safetensors"
    found = {name.removeprefix("transformer."): tensor for name, tensor in read_safetensors(path).items()}
    for name, shape in config.shapes().items():
        if name not in found:
            raise ValueError(f"{path}: tensor {name} is missing")
        if found[name].shape != shape:
            raise ValueError(f"{path}: tensor {name}: expected shape {list(shape)}, found {list(found[name].shape)}")
    return Weights(config, {name: found[name] for name in config.shapes()})


GPT2_124M = ModelConfig(vocab_size=50257, context_length=1024, num_layers=12, num_heads=12, width=768)


def inflate(weights, dtype=torch.float32, big=GPT2_124M):
    """The same function in a bigger shape: real work, real lengths, and the small model's text. -> Weights.

    Width: the residual stream is repeated r times. Mean and variance of a vector repeated are the vector's, so LayerNorm
    is exact; a matrix that reads a repeated vector is tiled and divided by r. Depth: the new layers compute everything
    and add zero. Vocabulary: the new tokens have to lose always, but the head has no bias; so the last LayerNorm puts the
    constant 1 into the first repeated dimension, where the new tokens' embedding is -100 (logit -100), and takes 1 off
    dimension 0, which every old token holds twice.
    """
    small = weights.config
    r = big.width // small.width
    old_D, new_D = small.width // small.num_heads, big.width // big.num_heads
    head_copies, dim_copies = big.num_heads // small.num_heads, new_D // old_D
    if (r * small.width, head_copies * small.num_heads, dim_copies * old_D) != (big.width, big.num_heads, new_D):
        raise ValueError(f"can't inflate {small} to {big}: width, heads and head_dim must be whole multiples")

    def heads(x):                           # [..., E] -> [..., r E]: repeat the heads, and the dims within each head
        x = x.reshape(*x.shape[:-1], small.num_heads, old_D)
        return x.repeat(*[1] * (x.dim() - 2), head_copies, dim_copies).flatten(-2)

    def repeat(x):                          # a vector of the residual stream, or of the MLP
        return x.repeat(*[1] * (x.dim() - 1), r)

    def read(x):                            # [in, out] -> [r in, out]: the input comes r times, so each copy counts 1/r
        return x.repeat(r, 1) / r

    old = {name: tensor.double() for name, tensor in weights.items()}
    new = {name: torch.zeros(shape, dtype=dtype) for name, shape in big.shapes().items()}
    for name in ("wte.weight", "wpe.weight"):
        new[name][:len(old[name])] = repeat(old[name])
    for i in range(big.num_layers):
        source = f"h.{min(i, small.num_layers - 1)}."           # a layer beyond the last repeats its work ...
        qkv_scale = torch.tensor([(new_D / old_D) ** 0.5 / dim_copies, 1, 1], dtype=torch.float64).repeat_interleave(small.width)
        for part, make in (("attn.c_attn", lambda x: torch.cat([heads(third) for third in (x * qkv_scale).chunk(3, -1)], -1)),
                           ("attn.c_proj", repeat), ("mlp.c_fc", repeat), ("mlp.c_proj", repeat)):
            matrix, bias = old[f"{source}{part}.weight"], old[f"{source}{part}.bias"]
            matrix = heads(matrix.T).T / r if part == "attn.c_proj" else read(matrix)
            unheard = i >= small.num_layers and part.endswith("c_proj")
            if not unheard:                                     # ... and adds nothing
                new[f"h.{i}.{part}.weight"][:], new[f"h.{i}.{part}.bias"][:] = make(matrix), make(bias)
        for norm in ("ln_1", "ln_2"):
            for kind in ("weight", "bias"):
                new[f"h.{i}.{norm}.{kind}"][:] = repeat(old[f"{source}{norm}.{kind}"])
    E = small.width
    new["ln_f.weight"][:E], new["ln_f.bias"][:E] = old["ln_f.weight"], old["ln_f.bias"]
    new["ln_f.bias"][E], new["wte.weight"][small.vocab_size:, E] = 1.0, -100.0
    new["ln_f.bias"][0] -= 1.0
    return Weights(big, new)


def load_model(model, dtype):
    """EngineConfig.model -> (Weights, Tokenizer)."""
    folder = EMBEDDED / "tiny" if model in ("tiny", "gpt2") else Path(model)
    weights = load_weights(folder)
    tokenizer = Tokenizer.load(folder)
    return (inflate(weights, dtype) if model == "gpt2" else weights), tokenizer


# ----------------------------------------------------------------------------------------------
# the model


def gpt2_reference(weights, tokens):
    """GPT-2 (Radford et al. 2019) as one reads it: no cache, one sequence, NumPy, float64. -> logits [T, V].

    Everything faster in this project is compared with these lines.
    """
    config = weights.config
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    T, H, D = len(tokens), config.num_heads, config.width // config.num_heads

    def layer_norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred ** 2).mean(-1, keepdims=True) + config.epsilon)
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):                                                            # GPT-2's tanh approximation
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))

    future = np.triu(np.full((T, T), -np.inf), k=1)                         # row t must not look past column t
    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]                       # [T, E]
    for i in range(config.num_layers):
        qkv = linear(layer_norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")    # [T, E] -> [T, 3 E]
        q, k, v = qkv.reshape(T, 3, H, D).transpose(1, 2, 0, 3)             # -> 3 x [H, T, D]
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(D) + future           # [H, T, T]
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = scores / scores.sum(-1, keepdims=True) @ v               # [H, T, D]
        x = x + linear(attended.transpose(1, 0, 2).reshape(T, -1), f"h.{i}.attn.c_proj")
        x = x + linear(gelu(linear(layer_norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return layer_norm(x, "ln_f") @ w["wte.weight"].T                        # [T, E] @ [E, V] -> [T, V]


class GPT2:
    """The same function over a ragged batch, in torch, with K and V in the paged cache."""

    def __init__(self, weights, dtype, device):
        self.config = weights.config
        self.weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}     # no copy if it is so already
        self.device = device

    @torch.inference_mode()
    def forward(self, batch, cache):
        """Compute batch.tokens [T], writing their K and V into `cache` -> logits [S, V] of batch.logit_rows."""
        w, config = self.weights, self.config

        def layer_norm(x, name):
            return F.layer_norm(x, (config.width,), w[f"{name}.weight"], w[f"{name}.bias"], config.epsilon)

        def linear(x, name):
            return torch.addmm(w[f"{name}.bias"], x, w[f"{name}.weight"])

        tokens, positions, logit_rows = (torch.from_numpy(array).to(self.device)
                                         for array in (batch.tokens, batch.positions, batch.logit_rows))
        x = w["wte.weight"][tokens] + w["wpe.weight"][positions]                    # [T, E]
        for i in range(config.num_layers):
            qkv = linear(layer_norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")        # [T, E] -> [T, 3 E]
            q, k, v = qkv.view(len(x), 3, config.num_heads, -1).unbind(1)           # -> 3 x [T, H, D]
            x = x + linear(cache.attend(i, q, k, v, batch).flatten(1), f"h.{i}.attn.c_proj")
            hidden = F.gelu(linear(layer_norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
            x = x + linear(hidden, f"h.{i}.mlp.c_proj")
        # The head is the largest matrix of all: only the rows that somebody samples go through it.
        return layer_norm(x[logit_rows], "ln_f") @ w["wte.weight"].T                # [S, E] @ [E, V] -> [S, V]


# ----------------------------------------------------------------------------------------------
# configuration, outputs, statistics


def _choice(*allowed):
    return lambda v: v in allowed, "one of " + ", ".join(repr(v) for v in allowed)


def _at_least(least, unit):
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least, f"an integer of at least {least} ({unit})"


def _option(default, rule, help):
    """A field of EngineConfig: its default, (test, what it must be) and the sentence for -h."""
    return field(default=default, metadata={"rule": rule, "help": help})


@dataclass(frozen=True)
class EngineConfig:
    """Everything that can be set; the command line has a flag for each field.

    >>> EngineConfig(block_size=0)
    Traceback (most recent call last):
    ValueError: block_size=0: it must be an integer of at least 1 (tokens)
    """

    model: str = _option("tiny", (lambda v: isinstance(v, str) and v, "'tiny', 'gpt2' or a folder"),
                         "'tiny' (embedded), 'gpt2' (tiny's function in GPT-2's 124M shape) or a folder of GPT-2 files")
    device: str | None = _option(None, _choice(None, "cpu", "cuda"), "cpu or cuda; default: cuda where there is one")
    dtype: str | None = _option(None, _choice(None, "float32", "float64", "bfloat16", "float16"),
                                "of weights and K/V; default: float32 on the CPU, float16 on a GPU")
    attention: str | None = _option(None, _choice(None, *ATTENTION), "numpy is the slow reference; default: torch")
    block_size: int = _option(16, _at_least(1, "tokens"), "tokens per block of the KV pool")
    num_blocks: int = _option(256, _at_least(1, "blocks"), "blocks in the KV pool")
    max_num_seqs: int = _option(16, _at_least(1, "requests"), "most requests that run at once")
    max_num_batched_tokens: int = _option(256, _at_least(1, "tokens"), "token budget of a step")
    max_prefill_chunk: int | None = _option(None, (lambda v: v is None or _at_least(1, "")[0](v),
                                                   "an integer of at least 1 (tokens), or None for the budget alone"),
                                            "most tokens of one request in one step; default: the budget alone")
    enable_prefix_caching: bool = _option(True, _choice(True, False), "find computed prefixes again")
    batching: str = _option("continuous", _choice("continuous", "static"),
                            "static admits only when the whole last batch has finished")
    kv_reservation: str = _option("paged", _choice("paged", "reserved"),
                                  "reserved takes a request's worst case of blocks up front")
    seed: int = _option(0, _at_least(0, "any"), "of requests that bring no seed of their own")

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, (allowed, remedy) = getattr(self, f.name), f.metadata["rule"]
            if not allowed(value):
                raise ValueError(f"{f.name}={value!r}: it must be {remedy}")


@dataclass
class StepOutput:
    """What one step brought one request. The texts of a request's outputs concatenate to its Completion.text."""

    request_id: str
    token_ids: list
    text: str
    finish_reason: str | None = None        # "stop" | "length" | "abort" | "error"; None: there is more to come
    error: str | None = None


@dataclass
class Completion:
    """A finished request."""

    request_id: str
    prompt_token_ids: list
    token_ids: list = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


class Histogram:
    """Counts of durations in buckets of 1, 2, 5, 10, ... ms: memory does not grow with the number of requests."""

    BOUNDS = [round(mantissa * 10.0 ** power, 6) for power in range(-3, 2) for mantissa in (1, 2, 5)]      # seconds

    def __init__(self):
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def observe(self, seconds):
        self.counts[sum(seconds > bound for bound in self.BOUNDS)] += 1
        self.sum += seconds

    def as_dict(self):
        return {"count": sum(self.counts), "sum": self.sum, "buckets": dict(zip([*self.BOUNDS, "inf"], self.counts))}


class Stats:
    """Counters since the engine was made; the gauges are ratios of them, so any two moments can be compared.

    scheduled_tokens = prefill_tokens + decode_tokens + recomputed_tokens: each token position that went through a pass
    was a prompt token for the first time, a sampled token, or one whose K/V a preemption had destroyed.
    """

    def __init__(self, engine):
        self._engine = engine
        self.steps = self.prefill_tokens = self.decode_tokens = self.recomputed_tokens = self.cached_tokens = 0
        self.preemptions = self.delivered_tokens = self.scheduled_tokens = self.scheduled_seqs = self.idle_seats = 0
        self.kv_peak = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.model_seconds = self.step_seconds = 0.0        # in the forward pass; in step() as a whole
        self.first_step = self.last_step = None             # times: start of the first step, end of the last
        # TTFT: arrival to first token. Queue time: arrival to first admission. End to end: arrival to last token.
        # ITL: time between a request's tokens. A step that brings m tokens at once counts as one gap since the last
        # step and m - 1 gaps of zero: what a reader sees, and the longest silence stays in the histogram.
        self.ttft, self.itl, self.queue_time, self.e2e = Histogram(), Histogram(), Histogram(), Histogram()

    running = property(lambda self: len(self._engine.scheduler.running))
    waiting = property(lambda self: len(self._engine.scheduler.waiting))
    kv_used = property(lambda self: self._engine.pool.num_used)
    kv_cached = property(lambda self: len(self._engine.pool.by_hash), doc="blocks findable by prefix, in use or free")

    @property
    def busy(self):
        """Share of the time since the first step in which a forward pass was running: what a dashboard calls GPU use."""
        elapsed = self.last_step - self.first_step if self.steps else 0.0
        return self.model_seconds / elapsed if elapsed else 0.0

    @property
    def occupancy(self):
        """Requests per step / max_num_seqs."""
        return self.scheduled_seqs / max(self.scheduled_seqs + self.idle_seats, 1)

    @property
    def budget_fill(self):
        """Tokens per step / token budget."""
        return self.scheduled_tokens / max(self.steps * self._engine.config.max_num_batched_tokens, 1)

    @property
    def goodput(self):
        """Tokens delivered / token positions paid for: those computed, and one for every seat that a step left empty."""
        return self.delivered_tokens / max(self.scheduled_tokens + self.idle_seats, 1)

    def as_dict(self):
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        gauges = {name: getattr(self, name) for name, value in vars(type(self)).items() if isinstance(value, property)}
        return {name: value.as_dict() if isinstance(value, Histogram) else value for name, value in (values | gauges).items()
                if name not in ("first_step", "last_step")}


# ----------------------------------------------------------------------------------------------
# the engine


@dataclass(eq=False)
class ServedRequest(Request):
    """A Request with what the scheduler does not need to know: how to sample it, its text, its times."""

    params: SamplingParams = None
    seed: int = 0
    text: Detokenizer = None
    arrival_time: float = 0.0
    admission_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    longest_gap: float = 0.0


class Engine:
    """Serves requests on one model. Engine(EngineConfig(...)), or its fields directly: Engine(model="tiny").

    >>> engine = Engine(model="tiny")
    >>> [answer] = engine.generate("Q: What day comes after Friday?\\nA:", SamplingParams(temperature=0, stop="\\n"))
    >>> answer.text, answer.finish_reason
    (' Saturday comes after Friday.', 'stop')
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, config=None, **fields):
        self.config = config = dataclasses.replace(config or EngineConfig(), **fields)
        self.model, self.tokenizer, self.cache = self.load(config)
        self.pool = BlockAllocator(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_num_batched_tokens, config.max_prefill_chunk,
                                   config.batching, config.kv_reservation)
        self.stats = Stats(self)
        self.requests = {}          # request_id -> request, while it lives
        self.last_batch = []        # (request, position of the first token, number of tokens) of the last step
        self._outbox = []           # outputs that the next step() will hand out
        self._num_requests = 0

    @staticmethod
    def load(config):
        """-> (model, tokenizer, cache). A subclass can serve another model."""
        gpu = torch.cuda.is_available()
        if config.device == "cuda" and not gpu:
            raise ValueError("device='cuda': torch sees no CUDA GPU here; use device='cpu' or leave it out")
        device = config.device or ("cuda" if gpu else "cpu")
        dtype = getattr(torch, config.dtype or ("float16" if device == "cuda" else "float32"))
        if config.attention == "numpy" and device == "cuda":
            raise ValueError("attention='numpy': the reference runs on the CPU; use device='cpu' or attention='torch'")
        weights, tokenizer = load_model(config.model, dtype)
        shape = weights.config
        cache = KVCache(shape.num_layers, config.num_blocks, config.block_size, shape.num_heads,
                        shape.width // shape.num_heads, dtype, device, config.attention or "torch")
        return GPT2(weights, dtype, device), tokenizer, cache

    # --- requests in ---

    def add_request(self, prompt, params=None, request_id=None):
        """Check a request and queue it. -> its id. prompt: text or token ids. Raises ValueError, changing nothing."""
        request = self._make_request(prompt, params, request_id)
        self._num_requests += 1
        self.requests[request.request_id] = request
        self.scheduler.add(request)
        return request.request_id

    def _make_request(self, prompt, params=None, request_id=None):
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
        context, vocabulary = self.model.config.context_length, self.model.config.vocab_size
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)) and all(isinstance(t, (int, np.integer)) and not isinstance(t, bool) for t in prompt):
            tokens = [int(token) for token in prompt]
        else:
            raise ValueError("the prompt must be a string or a list of token ids")
        if not tokens:
            raise ValueError("the prompt is empty: it must have at least one token")
        unknown = [token for token in tokens if not 0 <= token < vocabulary]
        if unknown:
            raise ValueError(f"token id {unknown[0]} is not in the vocabulary: ids are 0 to {vocabulary - 1}")
        if len(tokens) + 1 > context:
            raise ValueError(f"the prompt has {len(tokens)} tokens, but the context length is {context} and one token must be "
                             f"left to generate: shorten it to {context - 1}")
        max_len = min(len(tokens) + params.max_tokens, context)
        if self.pool.blocks_needed(max_len) > self.pool.num_blocks:
            slots = self.pool.num_blocks * self.pool.block_size
            raise ValueError(f"prompt and max_tokens come to {max_len} tokens, but the KV pool holds {slots} "
                             f"({self.pool.num_blocks} blocks of {self.pool.block_size}): lower max_tokens or raise num_blocks")
        if request_id is None:
            numbers = iter(range(self._num_requests, sys.maxsize))
            request_id = next(name for name in (f"request-{n}" for n in numbers) if name not in self.requests)
        if request_id in self.requests:
            raise ValueError(f"request_id {request_id!r} is alive: choose another, or abort it first")
        seed = params.seed
        if seed is None:            # a function of the engine's seed and of how many came before
            seed = int(np.random.SeedSequence([self.config.seed, self._num_requests]).generate_state(1, np.uint64)[0])
        return ServedRequest(request_id, tokens, len(tokens), max_len, params=params, seed=seed,
                             text=Detokenizer(params.stop), arrival_time=self.clock())

    def abort(self, request_id):
        """End a request in any state. True if it was alive. Its blocks are free at once; its last output comes with the
        next step()."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._outbox.append(self._finish(request, [], "", "abort"))
        return True

    def has_unfinished(self):
        return bool(self.requests or self._outbox)

    # --- one step ---

    def step(self):
        """One forward pass. -> list of StepOutput: of the requests that got tokens, and of those that were aborted."""
        outputs, self._outbox = self._outbox, []
        started = self.clock()
        scheduled = self.scheduler.schedule()
        self.last_batch = [(request, request.num_computed_tokens, n) for request, n in scheduled]
        if not scheduled:
            return outputs
        batch = Batch.build([self._work(*item) for item in self.last_batch], self.config.block_size)
        before = self.clock()
        logits = self.model.forward(batch, self.cache)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu().numpy()      # [S, V]; NumPy has no bfloat16
        after = self.clock()
        self._count(before)
        row = 0
        for request, n in scheduled:
            rows = 1 if n == request.num_missing else 0         # an unfinished prompt has nothing to sample from yet
            if rows:
                outputs.append(self._sample(request, n, logits[row], after))
            else:
                self.scheduler.advance(request, n)
            row += rows
        now = self.clock()
        stats = self.stats
        stats.model_seconds += after - before
        stats.step_seconds += now - started
        stats.first_step, stats.last_step = started if stats.steps == 1 else stats.first_step, now
        return outputs

    @staticmethod
    def _work(request, start, n):
        """A request's part of the batch: (new token ids, position of the first, block table, rows to sample)."""
        return request.tokens[start:start + n], start, request.block_table, int(n == request.num_missing)

    def _sample(self, request, n, logits, now):
        """The request is computed up to its last token: draw the next one, and see if that ends it. -> StepOutput."""
        if not np.isfinite(logits).all():
            return self._finish(request, [], "", "error", "the model produced logits that are not finite numbers")
        new, text, reason = [], "", None
        for token in verify([target_probs(logits, request.params)], [], [], request.seed, position=len(request.tokens)):
            request.tokens.append(token)
            new.append(token)
            text += request.text.add(self.tokenizer.decode_bytes([token]))
            if request.text.stopped or (token == self.tokenizer.eos_id and not request.params.ignore_eos):
                reason = "stop"
            elif len(request.tokens) == request.max_len:
                reason = "length"
            if reason:
                break               # what was accepted beyond a stop is not part of the answer
        self._time_tokens(request, len(new), now)
        self.scheduler.advance(request, n)      # publish before finish() gives the blocks away
        return self._finish(request, new, text, reason) if reason else StepOutput(request.request_id, new, text)

    def _finish(self, request, new, text, reason, error=None):
        """Remove the request, flush its text -> its terminal output."""
        self.scheduler.finish(request)
        del self.requests[request.request_id]
        text += request.text.add(b"", final=True)
        self.stats.finished[reason] += 1
        self.stats.e2e.observe(self.clock() - request.arrival_time)
        return StepOutput(request.request_id, new, text, reason, error)

    def _count(self, now):
        """Book the step that is about to run."""
        stats = self.stats
        stats.steps += 1
        for request, start, n in self.last_batch:
            again = max(0, min(start + n, request.high_water) - start)
            prompt = max(0, min(start + n, request.num_prompt_tokens) - max(start, request.high_water))
            stats.recomputed_tokens += again
            stats.prefill_tokens += prompt
            stats.decode_tokens += n - again - prompt
            stats.scheduled_tokens += n
            if request.admission_time is None:
                request.admission_time = now
                stats.cached_tokens += request.num_cached_tokens
                stats.queue_time.observe(now - request.arrival_time)
        stats.scheduled_seqs += len(self.last_batch)
        stats.idle_seats += self.config.max_num_seqs - len(self.last_batch)
        stats.preemptions = self.scheduler.num_preemptions
        stats.kv_peak = max(stats.kv_peak, self.pool.num_used)

    def _time_tokens(self, request, count, now):
        self.stats.delivered_tokens += count
        if request.first_token_time is None:
            request.first_token_time = now
            self.stats.ttft.observe(now - request.arrival_time)
        else:
            gap = now - request.last_token_time
            request.longest_gap = max(request.longest_gap, gap)
            self.stats.itl.observe(gap)
        for _ in range(count - 1):
            self.stats.itl.observe(0.0)
        request.last_token_time = now

    # --- whole completions ---

    def generate(self, prompts, params=None):
        """Serve prompts to the end. -> list of Completion, in their order. params: one for all, or a list, one each.

        A prompt that is refused raises ValueError before any of them starts.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} params: give one for all, or one each")
        for prompt, one in zip(prompts, each):
            self._make_request(prompt, one)             # only to see that it could be made
        requests = [self.requests[self.add_request(prompt, one)] for prompt, one in zip(prompts, each)]
        done = {r.request_id: Completion(r.request_id, r.tokens[:r.num_prompt_tokens]) for r in requests}
        others = []
        while any(completion.finish_reason is None for completion in done.values()):
            for output in self.step():
                completion = done.get(output.request_id)
                if completion is None:
                    others.append(output)               # of a request that was added before: keep it for its owner
                    continue
                completion.token_ids += output.token_ids
                completion.text += output.text
                completion.finish_reason, completion.error = output.finish_reason, output.error
        for request in requests:
            completion = done[request.request_id]
            completion.num_cached_tokens, completion.num_preemptions = request.num_cached_tokens, request.num_preemptions
        self._outbox += others
        return list(done.values())

    def check(self):
        """Raise RuntimeError if an invariant of scheduler or pool is broken."""
        self.scheduler.check()
        alive = {*self.scheduler.waiting, *(request.request_id for request in self.scheduler.running)}
        if alive != set(self.requests):
            raise RuntimeError(f"engine and scheduler disagree about who lives: {alive ^ set(self.requests)}")
        if not alive and self.pool.num_used:
            raise RuntimeError(f"idle, but {self.pool.num_used} blocks are in use")
