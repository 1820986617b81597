"""nanoserve.py: the model, the engine, the HTTP endpoint and the command line.

What it does.  Loads a GPT-2 (`load_weights`), runs it over a ragged batch (`GPT2`), and turns the crank:
`Engine.step` asks the scheduler who computes what, makes one forward pass, turns logits into tokens and tokens into
text. `python nanoserve.py` does it before your eyes, `python nanoserve.py serve` for clients of OpenAI's API.

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
  - Every step with unfinished requests computes at least one token or hands out the end of at least one request.

Policies.  One thread, one step at a time: the order of events is the order of the code. Rejected: preparing step n + 1
while step n computes, as production engines do; it hides some Python time and all of the clarity.

Limits.  GPT-2's architecture only, one device, no quantisation.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import queue
import re
import select
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)        # until main(): Ctrl-C while torch loads is no reason for a traceback

import numpy as np
import torch
import torch.nn.functional as F

from kvcache import ATTENTION, Batch, BlockAllocator, DecodeGraphs, KVCache, has_kernels, invariant
from scheduler import Request, Scheduler, Stats
from spec import (FLAG, Acceptance, Checked, Detokenizer, ModelDrafter, NgramDrafter, NoDrafter, SamplingParams, at_least,
                  choose_drafts, fit_line, is_a, one_of, option, reading, require, target_probs, verify)
from weights.inflate import inflate
from weights.safetensors import DTYPES, read_safetensors
from weights.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parent / "weights"

# Dimensions: T tokens in the step, S rows that are sampled, V vocabulary, E embedding width, H heads, D head_dim (E = H D).


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
        """Read a config.json. ValueError names the file and what is wrong: no GPT-2, or one that would run here and compute
        something else."""
        with reading(path):
            c = json.loads(path.read_text("utf-8"))
            sizes = {key: c[key] for key in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")}
            for key, size in sizes.items():
                require(type(size) is int and size > 0, f"{key} is {size!r}, it must be a positive integer")
            require(c["n_embd"] % c["n_head"] == 0, f"n_embd {c['n_embd']} is not a multiple of n_head {c['n_head']}")
            epsilon = c.get("layer_norm_epsilon", 1e-5)
            require(0 < epsilon < 1, f"layer_norm_epsilon is {epsilon!r}, it must be between 0 and 1")
            # What would change the model's function without changing a shape has to be refused here.
            for key, expected in (("model_type", "gpt2"), ("activation_function", "gelu_new"), ("tie_word_embeddings", True),
                                  ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
                require(c.get(key, expected) == expected, f"{key} is {c.get(key)!r}, only {expected!r} is supported")
        return cls(*sizes.values(), epsilon)

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
    """name -> torch tensor, names as in the checkpoint without "transformer."; `config` is the shape.

    wte, wpe            embeddings of tokens and of positions; the head that makes logits is wte once more (tied)
    h.3.ln_1, ln_2      LayerNorms before attention and before the MLP of layer 3
    h.3.attn.c_attn     x -> q, k, v side by side, [E, 3 E]
    h.3.attn.c_proj     what the heads found -> back to the residual stream
    h.3.mlp.c_fc        E -> 4 E, then GELU, then
    h.3.mlp.c_proj      4 E -> E
    ln_f                the last LayerNorm, before the head
    """

    def __init__(self, config, tensors):
        super().__init__(tensors)
        self.config = config


def load_weights(folder):
    """Read config.json and model.safetensors of a GPT-2 folder -> Weights. ValueError names the file and what is wrong with it.

    The tensors are windows into the mapped file: nothing is read before it is used, and two processes share one copy.

    >>> weights = load_weights(EMBEDDED / "tiny")
    >>> weights.config.num_layers, list(weights["h.0.attn.c_attn.weight"].shape)
    (4, [128, 384])
    """
    folder = Path(folder)
    require(folder.is_dir(), f"{str(folder)!r}: no such folder; a model is 'tiny', 'gpt2' or a folder with GPT-2's files")
    config, path = ModelConfig.load(folder / "config.json"), folder / "model.safetensors"
    with reading(path):
        found = {name.removeprefix("transformer."): tensor for name, tensor in read_safetensors(path).items()}
        for name, shape in config.shapes().items():
            require(name in found, f"tensor {name} is missing")
            kind = found[name] if isinstance(found[name], str) else None        # a type that torch has no use for here
            require(not kind, f"tensor {name} has type {kind}, supported are {', '.join(DTYPES)}")
            actual = list(found[name].shape)
            require(actual == list(shape), f"tensor {name}: expected shape {list(shape)}, found {actual}")
    return Weights(config, {name: found[name] for name in config.shapes()})


def load_model(model, dtype):
    """EngineConfig.model -> (Weights, Tokenizer). "gpt2" is built from tiny and has its tokenizer: of the tokens beyond
    tiny's none can be written, and none is ever likely."""
    folder = EMBEDDED / "tiny" if model in ("tiny", "gpt2") else Path(model)
    weights, tokenizer = load_weights(folder), Tokenizer.load(folder)
    last, size = max(tokenizer.bytes), weights.config.vocab_size
    require(last < size, f"{folder / 'vocab.json'}: id {last} is beyond the model's vocab_size of {size}")
    return inflate(weights, dtype) if model == "gpt2" else weights, tokenizer


# ----------------------------------------------------------------------------------------------
# the model


def gpt2_reference(weights, tokens):
    """GPT-2 (Radford et al. 2019) as one reads it: no cache, one sequence, NumPy, float64. tokens: T ids -> logits [T, V].

    Row t says what may come after token t. To generate, one would append a token and compute everything again; that is what a
    KV cache saves. Everything faster in this project is compared with these lines.

    >>> gpt2_reference(load_weights(EMBEDDED / "tiny"), [503, 12, 7]).shape
    (3, 1024)
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


def multiply_by(matrix, bias=None):
    """-> the function x [T, in] -> x @ matrix + bias [T, out], as fast as this machine has it; matrix [in, out].

    A CPU reads a large matrix in a layout of its own, and the plain multiply makes that layout anew in every call; here it is
    made once. The operators for that are private to torch: where they are missing, or don't know the type, the plain multiply
    has to do. A 16-bit matrix that is not packed is kept in float32, since a CPU's plain multiply takes many times as long in 16
    bits; the results are rounded.
    """
    if matrix.device.type == "cpu":
        if matrix.numel() >= 2**18 and torch.backends.mkldnn.is_available():        # a small one stays in the CPU's cache
            with contextlib.suppress(AttributeError, RuntimeError):
                packed = torch.ops.mkldnn._reorder_linear_weight(matrix.T.contiguous(), 16)
                return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        if matrix.dtype.itemsize == 2:
            in_float32 = multiply_by(matrix.float(), None if bias is None else bias.float())
            return lambda x: in_float32(x.float()).to(x.dtype)
    return lambda x: F.linear(x, matrix.T, bias)


class GPT2:
    """The function of gpt2_reference in torch, for many sequences at once, with K and V in the paged cache.

    The T rows of a pass are the tokens of all its requests, end to end: a decode is one row, a chunk of a prompt a hundred.
    Embedding, LayerNorm, linear layers and MLP treat every row alike and by itself, so they need not know whose it is; that is
    why requests can share a pass at all. Only attention looks from one row at others: `cache.attend` finds them in `batch`.
    """

    def __init__(self, weights, dtype, device):
        """Moves the weights to `device`, in `dtype`: linear layers become functions (`multiply`), others stay tensors."""
        self.config, self.device = weights.config, device
        self.weights = w = {name: tensor.to(device, dtype) for name, tensor in weights.items()}     # no copy if it is so already
        self.multiply = {"head": multiply_by(w["wte.weight"].T)}
        for name in [name.removesuffix(".weight") for name in w if ".c_" in name and name.endswith(".weight")]:
            self.multiply[name] = multiply_by(w.pop(f"{name}.weight"), w.pop(f"{name}.bias"))

    @torch.inference_mode()
    def forward(self, batch, cache):
        """Compute batch.tokens [T], writing their K and V into `cache` -> logits [S, V] of batch.logit_rows.

        Tokens and positions go to the device here; everything after that is `compute`, which a CUDA graph can record.
        """
        on_device = [torch.from_numpy(array).to(self.device) for array in (batch.tokens, batch.positions, batch.logit_rows)]
        return self.compute(*on_device, batch, cache)

    def compute(self, tokens, positions, logit_rows, batch, cache):
        """The model: tokens, positions [T] and logit_rows [S] are on the device -> logits [S, V]. Compare gpt2_reference."""
        w, config = self.weights, self.config

        def layer_norm(x, name):
            return F.layer_norm(x, (config.width,), w[f"{name}.weight"], w[f"{name}.bias"], config.epsilon)

        def linear(x, name):
            return self.multiply[name](x)                                           # x @ its weight + its bias

        x = w["wte.weight"][tokens] + w["wpe.weight"][positions]                    # [T, E]
        for i in range(config.num_layers):
            qkv = linear(layer_norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")        # [T, E] -> [T, 3 E]
            q, k, v = qkv.view(len(x), 3, config.num_heads, -1).unbind(1)           # -> 3 x [T, H, D]
            attended = cache.attend(i, q, k, v, batch)                              # scales by 1 / sqrt(D), masks the future
            x = x + linear(attended.flatten(1), f"h.{i}.attn.c_proj")
            hidden = F.gelu(linear(layer_norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
            x = x + linear(hidden, f"h.{i}.mlp.c_proj")
        # LayerNorm and head look at one row at a time, and the head is the largest matrix of all: only the rows that somebody
        # samples go through them.
        return linear(layer_norm(x[logit_rows], "ln_f"), "head")                    # [S, E] @ [E, V] -> [S, V]


def to_numpy(logits):
    """Logits on any device, in any type -> float32 or float64 in NumPy, which has no bfloat16; and float16 is too coarse to sample
    from."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu().numpy()


# ----------------------------------------------------------------------------------------------
# configuration and outputs


@dataclass(frozen=True)
class EngineConfig(Checked):
    """Everything that can be set; the command line has a flag for each field. A bad value raises ValueError.

    model                   tiny (embedded), gpt2 (tiny's function in GPT-2's 124M shape) or a folder of GPT-2 files
    device                  cpu or cuda; default: cuda where there is one
    dtype                   of weights and K/V (in 16 bits a CPU keeps K/V and a draft model in float32); default: float32 on a
                            CPU, float16 on a GPU
    attention               numpy (the slow reference), torch or cuda (kernels.cu); default: cuda on a GPU with CuPy where
                            kernels.cu can do it, else torch
    threads                 CPU threads; default: 1 for a model as small as tiny, else torch's choice
    block_size              tokens per block of the KV pool. Larger: shorter block tables, fewer hash look-ups; but whole blocks
                            are shared, and up to block_size - 1 slots of each request stay empty
    num_blocks              blocks in the KV pool. More: more requests at once, more prefixes still to be found, fewer
                            preemptions
    max_num_seqs            most requests that run at once. More of them share one reading of the weights, and each waits for a
                            larger pass
    max_num_batched_tokens  token budget of a step. Larger: prompts are done sooner; smaller: streams are smoother
    max_prefill_chunk       most tokens of one request in one step: what a long prompt may take of a pass that streams wait for;
                            default: the budget alone
    enable_prefix_caching   find computed prefixes again
    batching                continuous, or static: admit only when the whole last batch has finished, as it used to be done
    kv_reservation          paged, or reserved: take a request's worst case of blocks up front, as it used to be done
    drafter                 guess ahead: ngram, model (the embedded draft) or a folder; default: no guesses
    num_draft_tokens        guesses per request and step, or auto: as many as pay. More tokens from a pass when they are right,
                            more rows for nothing when not
    seed                    of requests that bring no seed of their own

    >>> EngineConfig(block_size=0)
    Traceback (most recent call last):
    ValueError: block_size=0: it must be an integer of at least 1 (tokens)
    """

    model: str = option("tiny", lambda v: isinstance(v, str) and v, "'tiny', 'gpt2' or a folder")
    device: str | None = option(None, *one_of("cpu", "cuda"))
    dtype: str | None = option(None, *one_of("float32", "float64", "bfloat16", "float16"))
    attention: str | None = option(None, *one_of(*ATTENTION))
    threads: int | None = option(None, lambda v: is_a(Integral, v) and 1 <= v <= 1024, "an integer from 1 to 1024")
    block_size: int = option(16, *at_least(1, " (tokens)"))
    num_blocks: int = option(256, *at_least(1, " (blocks)"))
    max_num_seqs: int = option(16, *at_least(1, " (requests)"))
    max_num_batched_tokens: int = option(256, *at_least(1, " (tokens)"))
    max_prefill_chunk: int | None = option(None, *at_least(1, " (tokens; None: the budget alone)"))
    enable_prefix_caching: bool = option(True, *FLAG)
    batching: str = option("continuous", *one_of("continuous", "static"))
    kv_reservation: str = option("paged", *one_of("paged", "reserved"))
    drafter: str | None = option(None, lambda v: isinstance(v, str) and v, "'ngram', 'model' or a folder")
    num_draft_tokens: int | str = option(4, lambda v: v == "auto" or is_a(Integral, v) and v > 0, "at least 1, or 'auto'")
    seed: int = option(0, *at_least(0, " (any)"))


@dataclass
class StepOutput:
    """What one step brought one request. The texts of a request's outputs concatenate to its Completion.text.

    Tokens and text need not come together: a token that ends within a character, or with what may become a stop string,
    has its text in a later output.
    """

    request_id: str
    token_ids: list
    text: str
    finish_reason: str | None = None        # "stop" | "length" | "abort" | "error"; None: there is more to come
    error: str | None = None                # with "error": what happened


@dataclass
class Completion:
    """A finished request.

    token_ids holds all that was generated, the tokens of a stop string and <|endoftext|> included; text does not.
    finish_reason: "stop" (a stop string, or <|endoftext|>), "length" (max_tokens, or the context length), "abort", "error".
    num_cached_tokens counts prompt tokens that were found in the prefix cache when the request was first admitted.
    num_preemptions counts how often it lost its blocks and had to be computed again; its tokens are the same for that.
    """

    request_id: str
    prompt_token_ids: list
    token_ids: list = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


# ----------------------------------------------------------------------------------------------
# the engine


@dataclass(eq=False)
class ServedRequest(Request):
    """A Request with what the scheduler does not need to know: how to sample it, and its text."""

    params: SamplingParams = None
    seed: int = 0
    draft_probs: np.ndarray | None = None       # [k, V] what each of `drafts` was drawn from
    acceptance: Acceptance = None               # of its guesses
    detokenizer: Detokenizer = None
    completion: Completion = None               # what was handed out so far


class Engine:
    """Serves requests on one model. Engine(EngineConfig(...)), or its fields directly: Engine(model="tiny").

    It owns nothing that the others decide: `scheduler` knows who runs, `pool` which block is whose, `cache` holds the K and V,
    `drafter` guesses. The engine carries requests between them. `clock` is the only source of time: replace it, and every
    latency, and what "auto" learns, is measured with another clock.

    >>> engine = Engine(model="tiny")
    >>> [answer] = engine.generate("Q: What day comes after Friday?\\nA:", SamplingParams(temperature=0, stop="\\n"))
    >>> answer.text, answer.finish_reason
    (' Saturday comes after Friday.', 'stop')
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, config=None, **fields):
        """ValueError for a bad field, a device that is not there, files that are no GPT-2, a pool that memory can't hold."""
        self.config = config = dataclasses.replace(config or EngineConfig(), **fields)
        self.model, self.tokenizer, self.cache = self.load(config)
        self.drafter = self.load_drafter()
        # (rows, seconds) of the last passes, and (depth, seconds) of the drafter's: what "auto" learns the costs from.
        self.passes, self.draft_passes = deque(maxlen=100), deque(maxlen=100)
        self.acceptance = Acceptance()
        self.pool = BlockAllocator(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_num_batched_tokens, config.max_prefill_chunk,
                                   config.batching, config.kv_reservation)
        self.stats = Stats(self.scheduler)
        self.requests = {}          # request_id -> request, while it lives
        self.last_batch = []        # (request, position of the first token, tokens, of these guesses) of the last step
        self.last_step = (0.0, 0.0)                                     # when it began and when it ended
        self.watchers = []          # called with the outputs of each step, before they are handed out; they only look
        self._outbox = []           # outputs that the next step() will hand out
        self._num_requests = 0

    def load(self, config):
        """-> (model, tokenizer, cache). A subclass can serve another model."""
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        require(device == "cpu" or torch.cuda.is_available(), "device='cuda': torch sees no CUDA GPU here; use device='cpu'")
        require(device == "cpu" or config.attention != "numpy",
                "attention='numpy': the reference runs on the CPU; use device='cpu' or attention='torch'")
        dtype = getattr(torch, config.dtype or ("float16" if device == "cuda" else "float32"))
        model, tokenizer, cache = self._load(config.model, dtype, device)
        # Handing half of a tiny matrix to another thread takes longer than computing it, and many times as long if that
        # thread's core is busy with something else.
        if config.threads or model.config.width < 512:
            torch.set_num_threads(config.threads or 1)
        return model, tokenizer, cache

    def _load(self, name, dtype, device):
        """One model, target or draft, with a cache of its own."""
        config = self.config
        weights, tokenizer = load_model(name, dtype)
        shape, head_dim = weights.config, weights.config.width // weights.config.num_heads
        cupy = importlib.util.find_spec("cupy")             # asks whether it is there, without importing it
        kernels = device == "cuda" and cupy and has_kernels(dtype, head_dim, config.block_size)
        attention = config.attention or ("cuda" if kernels else "torch")
        # A CPU's attention is several times slower in 16 bits than in float32, in which K and V are the better, too.
        cache_dtype = torch.float32 if device == "cpu" and dtype.itemsize == 2 else dtype
        cache = KVCache(shape.num_layers, config.num_blocks, config.block_size, shape.num_heads, head_dim, cache_dtype, device,
                        attention)
        model = GPT2(weights, dtype, device)
        return DecodeGraphs(model) if device == attention == "cuda" else model, tokenizer, cache

    def load_drafter(self):
        """-> the drafter that EngineConfig.drafter names.

        A draft model gets a cache of its own with as many blocks as the target's: block 7 of a block table means block 7 of
        both, so one allocator serves two models.
        """
        name = self.config.drafter
        if name in (None, "ngram"):
            return NgramDrafter(self.model.config.vocab_size) if name else NoDrafter()
        model, tokenizer, cache = self._load(EMBEDDED / "draft" if name == "model" else name, self.cache.k.dtype,
                                             self.cache.k.device.type)
        require(tokenizer.ids == self.tokenizer.ids,
                f"drafter={name!r}: it has another vocabulary than model={self.config.model!r}; use drafter='ngram'")

        # No self in the closure: an engine in a cycle of references would outlive its use.
        block_size, last_id = self.config.block_size, model.config.vocab_size - 1

        def forward(sequences):
            # The target may know more ids (an embedding padded to a round number): the draft takes them for its last one.
            sequences = [(np.minimum(tokens, last_id), *rest) for tokens, *rest in sequences]
            return to_numpy(model.forward(Batch.build(sequences, block_size), cache))

        return ModelDrafter(model, forward, self.model.config.vocab_size)

    # --- requests in ---

    def add_request(self, prompt, params=None, request_id=None):
        """Check a request and queue it. -> its id. prompt: text or token ids. Raises ValueError, changing nothing.

        Call it between two steps, from the thread that calls step(); abort() likewise.

        >>> engine = Engine(model="tiny", num_blocks=32)
        >>> engine.add_request("Once upon a time", SamplingParams(max_tokens=30, temperature=0), request_id="tale")
        'tale'
        >>> engine.step()           # one pass over the four tokens of the prompt: the first token is there
        [StepOutput(request_id='tale', token_ids=[11], text=',', finish_reason=None, error=None)]
        >>> engine.step()           # one pass over one token: a decode
        [StepOutput(request_id='tale', token_ids=[803], text=' there', finish_reason=None, error=None)]
        >>> engine.add_request([5000])
        Traceback (most recent call last):
        ValueError: token id 5000 is not in the vocabulary: ids are 0 to 1023
        """
        return self.add_requests([prompt], params, [request_id])[0]

    def add_requests(self, prompts, params=None, request_ids=None):
        """All or none: each is checked before the first is queued. params: one for all, or a list, one each. -> ids."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        require(len(each) == len(prompts), f"{len(prompts)} prompts, but {len(each)} params: give one for all, or one each")
        requests = [self._make_request(prompt, one, request_id, self._num_requests + i)
                    for i, (prompt, one, request_id) in enumerate(zip(prompts, each, request_ids or [None] * len(prompts)))]
        require(len({request.request_id for request in requests}) == len(requests), "two of the request_ids are the same")
        for request in requests:
            self.requests[request.request_id] = request
            self.scheduler.add(request)
            self._num_requests += 1
        return [request.request_id for request in requests]

    def _make_request(self, prompt, params, request_id, number):
        """Check everything that can be checked before a request runs, and build it. number: how many requests came before.

        What is let in can be served to its end: its prompt leaves a token to generate, and all of it fits the pool even if it
        has to be alone there. So no step ever meets a request that can't advance.
        """
        params = SamplingParams() if params is None else params
        require(isinstance(params, SamplingParams), f"params must be SamplingParams, not {type(params).__name__}")
        context, vocabulary = self.model.config.context_length, self.model.config.vocab_size
        tokens = self.encode(prompt)
        require(tokens, "the prompt is empty: it must have at least one token")
        require(len(tokens) < context, f"the prompt has {len(tokens)} tokens, but the context length is {context} and one token "
                f"must be left to generate: shorten it to {context - 1}")
        unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
        require(unknown is None, f"token id {unknown} is not in the vocabulary: ids are 0 to {vocabulary - 1}")
        max_len = min(len(tokens) + params.max_tokens, context)
        slots = self.pool.num_blocks * self.pool.block_size
        require(max_len <= slots, f"prompt and max_tokens come to {max_len} tokens, but the KV pool holds {slots} "
                f"({self.pool.num_blocks} blocks of {self.pool.block_size}): lower max_tokens or raise num_blocks")
        alive = {*self.requests, *(output.request_id for output in self._outbox)} if self._outbox else self.requests
        if request_id is None:
            request_id = f"request-{number}"
            while request_id in alive:
                request_id += "'"
        require(isinstance(request_id, str), f"request_id must be a string, not {type(request_id).__name__}")
        require(request_id not in alive,
                f"request_id {request_id!r} is alive: choose another, or abort it and take its last output first")
        seed = params.seed
        if seed is None:            # a function of the engine's seed and of how many came before
            seed = int(np.random.SeedSequence([self.config.seed, number]).generate_state(1, np.uint64)[0])
        return ServedRequest(request_id, tokens, len(tokens), max_len, params=params, seed=seed, arrival_time=self.clock(),
                             acceptance=Acceptance(self.acceptance), detokenizer=Detokenizer(params.stop),
                             completion=Completion(request_id, tokens[:]))

    def encode(self, prompt):
        """A prompt, text or token ids -> token ids. Changes nothing, so any thread may call it."""
        if isinstance(prompt, str):
            context = self.model.config.context_length
            most = context * self.tokenizer.longest             # a longer text can't fit, and is not worth the time to encode it
            require(len(prompt) <= most, f"the prompt has {len(prompt)} characters, the context length of {context} tokens holds "
                    f"at most {most}: shorten it")
            return self.tokenizer.encode(prompt)
        require(isinstance(prompt, (list, tuple)) and all(is_a(Integral, token) for token in prompt),
                "the prompt must be a string or a list of token ids")
        return [int(token) for token in prompt]

    def abort(self, request_id):
        """End a request in any state, between two steps. True if it was alive. Its blocks are free at once; its last output
        comes with the next step().

        >>> engine = Engine(model="tiny", num_blocks=32)
        >>> request_id = engine.add_request("Once upon a time")
        >>> engine.abort(request_id), engine.abort(request_id), engine.has_unfinished()
        (True, False, True)
        >>> engine.step()[0].finish_reason, engine.has_unfinished()
        ('abort', False)
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._emit(request, [], "", "abort")
        return True

    def fail(self, error):
        """End the requests of a step that raised `error`; all who run are in every step. -> their outputs. Whoever watches may
        be what broke, and does so no more."""
        self.watchers.clear()
        for request in self.scheduler.running[:] or [*self.scheduler.waiting.values()]:
            self._emit(request, [], "", "error", f"the step failed: {error!r}")
        return self._take_outbox()

    def has_unfinished(self):
        """True while a request lives, or an output waits to be handed out by step()."""
        return bool(self.requests or self._outbox)

    # --- one step ---

    def step(self):
        """One forward pass. -> list of StepOutput: of the requests that got tokens, and of those that were aborted or failed.

        Outputs go through self._outbox, so that an exception in mid-step (Ctrl-C in a notebook) loses none of them.
        """
        started = self.clock()

        # 1) Who computes what. The scheduler takes the blocks, and may preempt and admit. A stream may ask for guesses.
        self.config.drafter and self._ask_for_guesses()
        asked = self.clock()
        scheduled = self.scheduler.schedule()
        self.last_batch = [(request, request.num_computed_tokens, n, len(request.drafts)) for request, n in scheduled]
        if not scheduled:
            return self._take_outbox()
        before = self.clock()
        self.drafter.fill([request for request, _ in scheduled if request.drafts])
        drafted = self.clock() - before
        self.draft_passes.append((max(len(request.drafts) for request, _ in scheduled), drafted))

        # 2) All their tokens end to end. Who reaches its last token has something to sample from: a row for that token,
        #    and one for each guess behind it.
        sequences = []
        for request, start, n, guesses in self.last_batch:
            rows = 1 + guesses if n == request.num_missing + guesses else 0
            sequences.append((request.tokens[start:start + n] + request.drafts, start, request.block_table, rows))
        batch = Batch.build(sequences, self.config.block_size)

        # 3) One forward pass: writes K and V of every token, and reads the weights once for all of them.
        before = self.clock()
        self.stats.count_step(scheduled, before)
        logits = to_numpy(self.model.forward(batch, self.cache))        # [S, V]
        after = self.clock()
        self.passes.append((len(batch.tokens), after - before))
        self.drafter.follow(sequences)
        self.stats.draft_seconds += asked - started + drafted + self.clock() - after

        # 4) Logits to tokens to text, request by request; the rest of a prompt only moves on.
        first = 0
        for (request, n), (*_, rows) in zip(scheduled, sequences):
            if rows:
                self._sample(request, n, logits[first:first + rows], after)
            else:
                self.scheduler.advance(request, n)
            first += rows
        self.last_step = started, self.clock()
        self.stats.count_time(started, after - before, self.last_step[1])
        return self._take_outbox()

    def _ask_for_guesses(self):
        """Before scheduling: how many guesses each stream would like to have checked. Only requests that stream: a prompt's next
        token is known."""
        streams = [request for request in self.scheduler.running if request.num_missing == 1]
        wanted = [self.config.num_draft_tokens] * len(streams)
        if self.config.num_draft_tokens == "auto":
            others = sum(min(request.num_missing, self.scheduler.chunk) for request in self.scheduler.running) - len(streams)
            others = min(others, self.config.max_num_batched_tokens - len(streams))
            rates = [request.acceptance.rate() for request in streams]
            wanted = choose_drafts(rates, others, fit_line(self.passes), draft_seconds=fit_line(self.draft_passes)[1])
        for request, k in zip(streams, wanted):
            room = request.max_len - len(request.tokens) - 1            # the bonus token needs a place, too
            request.drafts = self.drafter.guess(request, min(k, room))

    def _take_outbox(self):
        """Show the outputs to those who watch, then hand them out. In this order: if a watcher raises, the outputs are still
        there for the next step to hand out."""
        for watch in self.watchers:
            watch(self._outbox)
        outputs, self._outbox = self._outbox, []
        return outputs

    def _sample(self, request, n, logits, now):
        """The request is computed up to its last token, and k guesses beyond: draw 1 to k + 1 tokens from logits [k + 1, V], and
        see if one ends it."""
        guesses, request.drafts = request.drafts, []
        finite = np.isfinite(logits).all(axis=1)
        usable = len(finite) if finite.all() else int(finite.argmin())      # rows behind a broken one may never be asked for
        if not usable:
            return self._emit(request, [], "", "error", "the model produced logits that are not finite numbers")
        drafts, logits = guesses[:usable - 1], logits[:usable]
        tokens = verify([target_probs(row, request.params) for row in logits], drafts, request.draft_probs, request.seed,
                        position=len(request.tokens))
        self.stats.count_run(len(guesses), len(tokens) - 1)
        for acceptance in (request.acceptance, self.acceptance):
            acceptance.add(len(tokens) - 1, min(len(tokens), len(drafts)))      # guesses behind a wrong one were not judged
        new, text, reason = [], "", None
        for token in tokens:
            request.tokens.append(token)
            new.append(token)
            text += request.detokenizer.add(self.tokenizer.decode_bytes([token]))
            if request.detokenizer.stopped or (token == self.tokenizer.eos_id and not request.params.ignore_eos):
                reason = "stop"
            elif len(request.tokens) == request.max_len:
                reason = "length"
            if reason:
                break               # what was accepted beyond a stop is not part of the answer
        self.stats.count_tokens(request, len(new), now)
        # Before _emit() gives the blocks away: of the n computed positions, those of accepted and kept tokens are published.
        self.scheduler.advance(request, n - len(guesses) + min(len(tokens) - 1, len(new)))
        self._emit(request, new, text, reason)

    def _emit(self, request, new, text, reason=None, error=None):
        """Hand out what is new of a request; with a reason, that was all of it, and its text is flushed."""
        if reason:
            self.scheduler.finish(request)
            del self.requests[request.request_id]
            self.stats.count_end(request, reason, self.clock())
            text += request.detokenizer.add(b"", final=True)
        done = request.completion
        done.token_ids += new
        done.text += text
        done.finish_reason, done.error = reason, error
        done.num_cached_tokens, done.num_preemptions = request.num_cached_tokens, request.num_preemptions
        self._outbox.append(StepOutput(request.request_id, new, text, reason, error))

    # --- whole completions ---

    def generate(self, prompts, params=None):
        """Serve prompts to the end. -> list of Completion, in their order. params: one for all, or a list, one each.

        A prompt that is refused raises ValueError before any of them starts.

        >>> questions = ["Q: What is 3 + 4?\\nA:", "Q: What day comes after Friday?\\nA:"]
        >>> for completion in Engine(model="tiny").generate(questions, SamplingParams(temperature=0, stop="\\n")):
        ...     print(completion.text)
         3 + 4 is 7.
         Saturday comes after Friday.
        """
        mine = {request_id: self.requests[request_id] for request_id in self.add_requests(prompts, params)}
        others = []                     # outputs of requests that were added before: kept for their owner
        try:
            while not mine.keys().isdisjoint(self.requests):
                others += [output for output in self.step() if output.request_id not in mine]
        finally:
            for request_id in mine:
                self.abort(request_id)  # none is alive, unless we were interrupted
            self._outbox = others + [output for output in self._outbox if output.request_id not in mine]
        return [request.completion for request in mine.values()]

    def check(self):
        """Raise RuntimeError if an invariant of scheduler or pool is broken."""
        self.scheduler.check()
        alive = {*self.scheduler.waiting, *(request.request_id for request in self.scheduler.running)}
        invariant(alive == set(self.requests), f"engine and scheduler disagree about who lives: {alive ^ set(self.requests)}")
        invariant(alive or not self.pool.num_used, f"idle, but {self.pool.num_used} blocks are in use")


# ----------------------------------------------------------------------------------------------
# watching it: called after every step (engine.watchers). They only look; nothing in the engine knows of them


def bar(share, width):
    """
    >>> bar(0.5, 8)
    '████░░░░'
    """
    full = round(min(max(share, 0), 1) * width)
    return "█" * full + "░" * (width - full)


def events(engine, outputs):
    """What the last step did to whom, besides computing tokens. -> (sign, request, words), ...

    - preempted, + admitted, = finished. Of the latter only those who were in the step: one who was aborted while waiting left
    without having been seen.
    """
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    for request, n in engine.scheduler.preempted.items():
        yield "-", request, f"preempted: it gave up {n} tokens of K/V"
    for request, position, _, _ in engine.last_batch:
        if request in engine.scheduler.admitted:
            yield "+", request, f"admitted{' again' * bool(request.num_preemptions)}, {position} tokens found in the cache"
        if request.request_id in ends:
            yield "=", request, f"finished: {ends[request.request_id]}"


class View:
    """Draws batch, pool and gauges after each step; every request is a letter. In a pipe: a line per step."""

    COLOURS = (161, 28, 27, 130, 133, 30, 196, 64, 99, 31, 65, 164)         # as legible on black as on white

    def __init__(self, engine, delay=0.0, every=0.0):
        """delay: seconds to wait after each picture; every: seconds between two pictures, steps between them are not drawn.
        The time that drawing and waiting take is taken off the engine's clock."""
        self.engine, self.delay, self.every = engine, delay, every
        self.past = deque([(0, 0, 0.0, 0.0)], maxlen=21)        # counters over the last 20 steps, for the gauges
        self.recent = deque([""] * 4, maxlen=4)                 # the last events
        self.height, self.drawn, self.seconds_shown = 0, 0.0, 0.0       # lines on the screen; when drawn; spent on that
        engine.watchers.append(self)
        engine.clock = lambda: time.perf_counter() - self.seconds_shown

    def __call__(self, outputs):
        """After a step: draw the picture over the last one, or print a line."""
        started, engine = time.perf_counter(), self.engine
        if not engine.last_batch or (started < self.drawn + self.every and engine.requests):
            return
        news = [f"   {sign} {self.letter(r)} {r.request_id} {words}" for sign, r, words in events(engine, outputs)]
        (busy, goodput), (columns, rows) = self.gauges(), shutil.get_terminal_size()
        if sys.stdout.isatty() and columns >= 80:
            self.recent.extend(news)
            lines = self.picture(busy, goodput)[:rows - 1]
            print(f"\x1b[{self.height}F" * bool(self.height) + "".join(f"\x1b[2K{line}\n" for line in lines), end="", flush=True)
            self.height = len(lines)
            time.sleep(self.delay)
        else:
            batch = " ".join(f"{self.letter(request)}{n}" for request, _, n, _ in engine.last_batch)
            if engine.stats.steps == 1:
                print("step [KV pool: a symbol per block] goodput, tokens computed per request")
            print(*news, f"{engine.stats.steps:4} [{''.join(self.pool())}] {goodput:4.0%}  {batch}", sep="\n")
        self.drawn = time.perf_counter()
        self.seconds_shown += self.drawn - started

    @staticmethod
    def letter(request):
        """A, B, C, ... in the order of arrival; the 27th is an A again."""
        return chr(ord("A") + (request.arrival - 1) % 26)

    def paint(self, symbol, times=1):
        """The symbol in its request's colour, grey if it is nobody's."""
        colour = self.COLOURS[(ord(symbol) - ord("A")) % len(self.COLOURS)] if symbol.isalpha() else 243
        return f"\x1b[1;38;5;{colour}m{symbol * times}\x1b[0m"

    def pool(self):
        """A symbol for each block: the letter of its owner, * if it has several, ~ free but findable, . free."""
        pool = self.engine.pool
        symbols = dict.fromkeys(range(pool.num_blocks), ".") | dict.fromkeys(pool.by_hash.values(), "~")
        for request in self.engine.scheduler.running:
            for block in request.block_table:
                symbols[block] = self.letter(request) if pool.ref_count[block] == 1 else "*"
        return list(symbols.values())

    def gauges(self):
        """(busy, goodput) over the last 20 steps: differences of the same counters that Stats divides since the start."""
        stats = self.engine.stats
        self.past.append((stats.delivered_tokens, stats.scheduled_tokens + stats.idle_seats, stats.model_seconds, stats.seconds))
        delivered, paid, busy, total = (now - then for now, then in zip(self.past[-1], self.past[0]))
        return busy / max(total, 1e-9), delivered / max(paid, 1)

    def picture(self, busy, goodput):
        """Coloured lines of 80 columns: gauges, pool, batch, what happened last, the waiting and the running."""
        stats, config, scheduler = self.engine.stats, self.engine.config, self.engine.scheduler
        symbols, unit = [f" {self.paint(symbol)}" for symbol in self.pool()], math.ceil(config.max_num_batched_tokens / 60)
        per_line = math.ceil(len(symbols) / math.ceil(len(symbols) / 39))
        queue = "".join(f" {self.paint(self.letter(r))}" for r in itertools.islice(scheduler.waiting.values(), 30))
        return [f"step {stats.steps:4}   {stats.running} running, {stats.waiting} waiting, "
                f"{sum(stats.finished.values())} finished, {stats.preemptions} preemptions",
                f"busy     {bar(busy, 30)} {busy:4.0%}  time in a pass, last 20 steps",
                f"goodput  {bar(goodput, 30)} {goodput:4.0%}  tokens per position, last 20 steps", "",
                f"KV pool: {stats.kv_used} of {config.num_blocks} blocks in use    * shared   ~ free, still findable   . free",
                *("".join(symbols[i:i + per_line]) for i in range(0, len(symbols), per_line)), "",
                f"batch: {sum(n for _, _, n, _ in self.engine.last_batch)} of {config.max_num_batched_tokens} tokens    "
                "one letter: a decode, several: a prompt or guesses",
                " " + "".join(self.paint(self.letter(r), math.ceil(n / unit)) for r, _, n, _ in self.engine.last_batch),
                "", f"waiting:{queue or ' nobody'}", *(f"{event:.79}" for event in self.recent),
                *map(self.row, scheduler.running), *[""] * (config.max_num_seqs - stats.running)]

    def row(self, request):
        """A running request: how far its prefill is, or the end of its text."""
        text = self.engine.tokenizer.decode(request.tokens[-30:])
        text = "".join(char if char.isprintable() else " " for char in text)        # a model can say any control code
        prefill = f"prefill, {request.num_computed_tokens} of {len(request.tokens)} tokens computed"
        state = prefill if request.num_missing > 1 else f"{request.num_output_tokens:3} tokens  …{text[-46:]}"
        return f" {self.paint(self.letter(request))} {request.request_id:12.12} {state}"


# ----------------------------------------------------------------------------------------------
# serving over HTTP: one thread for the engine, one for each connection
#
#     connection's thread                                       engine's thread
#     parse, check, encode the prompt
#     call(submit)                     --- calls --->           between two steps: add_requests
#     wait for an output, send it      <-- outputs ---          after each step: put what is new into the requests' queues
#     call(abort), if the client left  --- calls --->           between two steps: blocks are free at once
#
# Nothing is locked, since nothing is shared: the engine belongs to its thread, a socket to its connection's.


class Refusal(Exception):
    """What a client is told: Refusal(status, sentence, headers). A ValueError is one of status 400."""


class EngineThread(threading.Thread):
    """Steps the engine, and is the only thread that touches it. Who wants something of it leaves a call, made between two steps.
    Outputs go into a queue for each connection: nobody waits for a slow reader, and max_tokens bounds what can pile up there."""

    def __init__(self, engine, max_queue):
        """max_queue: most requests that may wait; more are refused (429), which tells a client more than a long silence."""
        super().__init__(daemon=True)
        self.engine, self.max_queue, self.stopping = engine, max_queue, False
        self.calls, self.streams = queue.SimpleQueue(), {}          # streams: request_id -> the queue of its connection

    def call(self, function, *arguments):
        """Have function(*arguments) called between two steps; wait for what it returns or raises."""
        if not self.is_alive():
            raise Refusal(503, "the engine has stopped")
        future = Future()
        self.calls.put((future, function, arguments))
        return future.result()

    def run(self):
        """For ever: the calls that wait now, then a step. A call waits for one step, and no number of calls stops the steps."""
        while True:
            waiting = self.calls.qsize()
            while waiting > 0 or not self.engine.has_unfinished():          # nothing to do: sleep until somebody calls
                future, function, arguments = self.calls.get()
                waiting -= 1
                try:
                    future.set_result(function(*arguments))
                except Exception as error:
                    future.set_exception(error)
            try:
                outputs = self.engine.step()
            except Exception as error:              # a fault ends the requests of its step, not the server
                outputs = self.engine.fail(error)
            for output in outputs:
                (self.streams.pop if output.finish_reason else self.streams.get)(output.request_id).put(output)

    def submit(self, prompts, params, echo):
        """-> (requests, the queue of their outputs). With echo, the prompts are the first outputs."""
        room = self.max_queue - len(self.engine.scheduler.waiting)
        if self.stopping:
            raise Refusal(503, "the server is stopping")
        if len(prompts) > room:
            raise Refusal(429, f"{len(prompts)} more requests, the queue of {self.max_queue} has room for {room}: try again later",
                          {"Retry-After": "1"})
        outputs, requests = queue.SimpleQueue(), [self.engine.requests[i] for i in self.engine.add_requests(prompts, params)]
        for request in requests:
            self.streams[request.request_id] = outputs
            if echo:
                outputs.put(StepOutput(request.request_id, [], self.engine.tokenizer.decode(request.tokens)))
        return requests, outputs

    def abort(self, requests):
        """Nobody waits for it, and the dead do not mind. `requests` is looked at then: engine.requests.values() is fine."""
        self.calls.put((Future(), lambda: [self.engine.abort(request.request_id) for request in [*requests]], ()))


# What a completion can be asked for besides SamplingParams; and OpenAI's parameters that are not here, with the values of theirs
# that ask for nothing.
ASKED = {"model": None, "prompt": "", "n": 1, "stream": False, "stream_options": {}, "echo": False, "user": ""}
NEUTRAL = {"best_of": 1, "suffix": "", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}


def parse_completion(body, served):
    """The body of POST /v1/completions -> (prompts, SamplingParams, what else was asked for). ValueError says what is wrong."""
    with reading("the body"):
        body = json.loads(body.decode("utf-8"))
    require(isinstance(body, dict), "the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None and (name, value) not in NEUTRAL.items()}
    unknown = body.keys() - ASKED - {f.name for f in dataclasses.fields(SamplingParams)}
    require(not unknown, f"{', '.join(sorted(unknown)):.99}: not supported here, leave it out")
    asked = SimpleNamespace(**{name: body.pop(name, default) for name, default in ASKED.items()})
    for name, kind, words in (("prompt", (str, list), "a string, token ids, or a list of these"), ("stream", bool, "true or false"),
                              ("echo", bool, "true or false"), ("user", str, "a string"), ("stream_options", dict, "an object")):
        require(isinstance(getattr(asked, name), kind), f"{name} must be {words}")
    asked.usage = asked.stream_options.get("include_usage", False)
    require(isinstance(asked.usage, bool) and asked.stream_options.keys() <= {"include_usage"},
            "stream_options knows include_usage, true or false, and nothing else")
    require(asked.model in (None, served), f"model {asked.model!r:.99} is not served here, {served!r} is")
    require(is_a(int, asked.n) and 1 <= asked.n <= 128, f"n={asked.n!r:.99}: it must be an integer from 1 to 128")
    several = isinstance(asked.prompt, list) and not all(is_a(int, token) for token in asked.prompt)
    return (asked.prompt if several else [asked.prompt]), SamplingParams(**body), asked


class Handler(BaseHTTPRequestHandler):
    """One connection. http.server parses; this class knows the routes, OpenAI's shapes, and when the client is gone."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "nanoserve", ""
    timeout = 30                            # seconds for any one read or write: a client that stalls for longer is gone
    disable_nagle_algorithm = True          # a token is a small packet, and should leave at once
    MAX_BODY = 2**20

    def route(self):
        """Read the whole request, then answer it. http.server calls it for every request of a connection, one after the other:
        the connection stays open unless an answer says otherwise."""
        server, path = self.server, self.path.partition("?")[0]
        model = {"id": server.model, "object": "model", "created": server.started, "owned_by": "nanoserve"}
        routes = {"/v1/completions": ("POST", self.completions),
                  "/v1/models": ("GET", lambda _: self.reply(200, {"object": "list", "data": [model]})),
                  f"/v1/models/{server.model}": ("GET", lambda _: self.reply(200, model)),
                  "/health": ("GET", lambda _: self.reply(200 if server.worker.is_alive() else 503, {})),
                  "/metrics": ("GET", lambda _: self.reply(200, server.worker.call(server.worker.engine.stats.prometheus)))}
        method, answer = routes.get(path, (None, None))
        try:
            body = self.read_body()
            if not method:
                raise Refusal(404, f"there is no {path!r}, there are {', '.join(routes)}")
            if {"HEAD": "GET"}.get(self.command, self.command) != method:
                raise Refusal(405, f"{path} takes {method}", {"Allow": method})
            answer(body)
        except Refusal as refusal:
            self.refuse(*refusal.args)
        except ValueError as error:
            self.refuse(400, str(error))
        except OSError:                     # the client is gone, or too slow
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = route

    def read_body(self):
        """All of it, or the next request on this connection would begin in the middle of this one. A length that is a lie ends
        in JSON that is cut off, or in the timeout."""
        length = ",".join(self.headers.get_all("Content-Length", [] if self.command == "POST" else ["0"]))
        if not length or "Transfer-Encoding" in self.headers:
            raise Refusal(411, "send the body in one piece, with a Content-Length")
        require(re.fullmatch("[0-9]{1,18}", length), f"Content-Length {length!r:.99} is not a number of bytes")
        if int(length) > self.MAX_BODY:
            self.refuse(413, f"the body has {length} bytes, the limit is {self.MAX_BODY}")
            self.rfile.read(min(int(length), 2**24))        # a client that is still sending would not hear the answer
            raise ConnectionAbortedError
        return self.rfile.read(int(length))

    def start(self, status, kind, headers):
        """Status line and headers; a body may follow."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status, content, headers={}):
        """A string is Prometheus text, anything else becomes JSON."""
        text = isinstance(content, str)
        data = (content if text else json.dumps(content)).encode()
        kind = "text/plain; version=0.0.4" if text else "application/json"
        self.start(status, kind, {"Content-Length": str(len(data)), **headers})
        self.wfile.write(data if self.command != "HEAD" else b"")

    def refuse(self, status, message, headers={}):
        """OpenAI's error object. The connection ends: who knows what of the request is still to be read."""
        self.reply(status, self.error(message, status), {"Connection": "close", **headers})

    @staticmethod
    def error(message, status=500):
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def send_error(self, code, message=None, explain=None):         # what http.server itself finds wrong
        self.refuse(code, message or self.responses[code][0])

    def log_message(self, *_):
        """Nothing of a request goes to a log."""

    def completions(self, body):
        """From the body to the requests. Whatever happens on the way, they do not outlive this call."""
        worker, requests = self.server.worker, []
        prompts, params, asked = parse_completion(body, self.server.model)
        wanted = len(prompts) * asked.n
        require(wanted <= worker.max_queue, f"{wanted} completions: the queue has {worker.max_queue} places, ask for less")
        # Encoded here and not in the engine's thread, where a long text would hold up the streams. Choice i is request i: n of
        # each prompt, in order. With one seed they would be n times the same.
        prompts = [tokens for prompt in prompts for tokens in [worker.engine.encode(prompt)] * asked.n]
        each = [dataclasses.replace(params, seed=None if params.seed is None else params.seed + i) for i in range(asked.n)]
        self.server.active.add(self)
        try:
            requests, outputs = worker.call(worker.submit, prompts, each * (len(prompts) // asked.n), asked.echo)
            self.answer(asked, requests, outputs)
        finally:
            self.server.active.discard(self)
            worker.abort(requests)          # none is alive, unless the client is gone

    def answer(self, asked, requests, outputs):
        """Send what comes out of `outputs`: as it comes, or all in the end. A stream has begun with status 200 before anything can
        go wrong with it, so an error in it is an event."""
        head = {"id": f"cmpl-{requests[0].request_id}", "object": "text_completion", "created": int(time.time()),
                "model": self.server.model} | ({"usage": None} if asked.usage else {})      # null, but in the last event
        choices = {r.request_id: {"text": "", "index": i, "logprobs": None, "finish_reason": None} for i, r in enumerate(requests)}
        if asked.stream:
            self.start(200, "text/event-stream", {"Connection": "close"})       # the connection ends with the stream
        while any(choice["finish_reason"] is None for choice in choices.values()):
            output = self.next_output(outputs)
            choice = choices[output.request_id]
            choice |= {"text": choice["text"] * (not asked.stream) + output.text, "finish_reason": output.finish_reason}
            error = output.error or ("aborted: the server is stopping" if output.finish_reason == "abort" else None)
            if asked.stream:
                self.event(self.error(error) if error else {**head, "choices": [choice]})
            elif error:
                raise Refusal(500 if output.error else 503, error)
        firsts = requests[::asked.n]                        # a prompt counts once, however many completions it has
        prompt, said = sum(r.num_prompt_tokens for r in firsts), sum(r.num_output_tokens for r in requests)
        usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said,
                 "prompt_tokens_details": {"cached_tokens": sum(r.num_cached_tokens for r in firsts)}}
        if not asked.stream:
            return self.reply(200, {**head, "choices": [*choices.values()], "usage": usage})
        if "usage" in head:
            self.event({**head, "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content):
        """One of a stream's server-sent events: a line that begins with data:, and an empty one."""
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def next_output(self, outputs):
        """Wait for an output, and look every now and then if the client is still there. A socket that can be read, but has nothing
        to give, was closed by the other side. (A client that closes only its own half counts as gone, too.)"""
        poll, hung_up = select.poll(), getattr(select, "POLLRDHUP", 0)      # Linux sees it even behind bytes that wait to be read
        poll.register(self.connection, select.POLLIN | hung_up)
        while True:
            seen = dict(poll.poll(0)).get(self.connection.fileno(), 0)
            if seen & hung_up or seen and not self.connection.recv(1, socket.MSG_PEEK) or not self.server.worker.is_alive():
                raise ConnectionAbortedError
            with contextlib.suppress(queue.Empty):
                return outputs.get(timeout=0.05)


class Server(ThreadingHTTPServer):
    """Listens from the moment it is made. `worker` has the engine; `active` holds the connections that are being served a
    completion, for whom a stop waits."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, engine, host, port, max_queue):
        super().__init__((host, port), Handler)
        self.worker, self.active, self.started = EngineThread(engine, max_queue), set(), int(time.time())
        self.model = Path(os.path.abspath(engine.config.model)).name
        self.worker.start()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """What a client sent is not printed, whatever went wrong with it."""

    def stop(self, grace):
        """Accept nobody, give those who are served `grace` seconds to finish, abort the others."""
        self.worker.stopping = True
        self.shutdown()
        self.server_close()
        for seconds in (grace, 1.0):                        # to finish; then, for those who did not, to hear of it
            deadline = time.monotonic() + seconds
            while self.active and time.monotonic() < deadline:
                time.sleep(0.02)
            self.worker.abort(self.worker.engine.requests.values())


# ----------------------------------------------------------------------------------------------
# the command line


def play(engine, jobs):
    """Serve jobs, (step before which it arrives, prompt, SamplingParams, name), to their ends. -> requests, as they arrived.

    Arrival is counted in steps and not in seconds, so that the same job meets the same batch on every machine.
    """
    for number, (_, prompt, params, name) in enumerate(jobs):
        engine._make_request(prompt, params, name, number)                  # refuse what does not fit before anything starts
    arrivals, requests = deque(sorted(jobs, key=lambda job: job[0])), []
    for tick in itertools.count():
        while arrivals and arrivals[0][0] <= tick:
            requests.append(engine.requests[engine.add_request(*arrivals.popleft()[1:])])
        if not (arrivals or engine.has_unfinished()):
            return requests
        engine.step()


def given(args, config):
    """The flags of a config class that were given."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(config) if hasattr(args, f.name)}


def make_engine(args, **defaults):
    """The engine of a command: what was given, over the command's own defaults."""
    engine = Engine(**defaults | given(args, EngineConfig))
    args.recorder and args.recorder.attach(engine)
    return engine


def tool(name):
    """A module of tests/: these measure the product, and are no part of it."""
    sys.modules.setdefault("nanoserve", sys.modules[__name__])      # or they would load this file, __main__, once more
    sys.path.insert(0, str(Path(__file__).parent / "tests"))
    return importlib.import_module(name)


def __getattr__(name):
    """For experiments of your own: from nanoserve import job, run, compare. They stand in tests/labs.py."""
    if name in ("job", "run", "compare"):
        return getattr(tool("labs"), name)
    raise AttributeError(f"nanoserve has no {name}")


def main_job(args):
    """Serve the built-in prompts as they arrive, before the reader's eyes, then sum up."""
    require(0 <= args.delay <= 60, f"delay={args.delay}: it must be a number of seconds from 0 to 60")
    script = json.loads((EMBEDDED / "prompts.json").read_text("utf-8"))
    jobs = [(r["arrives"], script["prefixes"].get(r.get("prefix"), "") + r["prompt"], SamplingParams(**r["params"]), r["name"])
            for r in script["requests"]]
    # A pool and a budget so small that sharing, chunking and a preemption really happen.
    engine = make_engine(args, num_blocks=48, max_num_seqs=6, max_num_batched_tokens=48, max_prefill_chunk=32)
    args.json or View(engine, args.delay)
    requests = play(engine, jobs)
    if args.json:
        print(json.dumps({"requests": [vars(r.completion) for r in requests], "stats": engine.stats.as_dict()}))
    else:
        print_summary(engine, requests)


def print_summary(engine, requests):
    """All texts, a line of times per request, and the run as a whole. To be read with the picture in mind: who waited long for
    its first token (TTFT) stood in the queue or had a long prompt; the longest gap is a preemption, or somebody's chunk."""
    stats = engine.stats
    print("\nThe texts; » marks where the model took over:\n")
    for r in requests:
        prompt = engine.tokenizer.decode(r.completion.prompt_token_ids)
        lines = f"{prompt if len(prompt) < 120 else '…' + prompt[-120:]}»{r.completion.text}".rstrip("\n").split("\n")
        wrapped = (textwrap.fill(line, 76, initial_indent="    ", subsequent_indent="    ") for line in lines)
        print(f"{r.request_id} ({r.completion.finish_reason})", *wrapped, "", sep="\n")
    print("request       prompt  cached  output  preempted  TTFT ms  ITL ms  longest gap ms")
    for r in requests:
        first = r.first_token_time or r.arrival_time            # a request that failed has no times
        itl = ((r.last_token_time or first) - first) / max(r.num_output_tokens - 1, 1)
        times = f"{(first - r.arrival_time) * 1e3:8.1f} {itl * 1e3:7.1f} {r.longest_gap * 1e3:15.1f}"
        print(f"{r.request_id:12} {r.num_prompt_tokens:7} {r.num_cached_tokens:7} {r.num_output_tokens:7} {r.num_preemptions:10} "
              f"{r.completion.error or times}")
    print(f"\n{stats.steps} steps in {stats.seconds:.2f} s delivered {stats.delivered_tokens} tokens: "
          f"{stats.delivered_tokens / stats.seconds:,.0f} tokens/s")
    for name in ("busy", "occupancy", "budget_fill", "goodput"):
        print(f"{name.replace('_', ' '):11} {getattr(stats, name):5.0%}   {getattr(Stats, name).__doc__.partition('.')[0].lower()}")
    print(f"KV peak     {stats.kv_peak / engine.config.num_blocks:5.0%}   of {engine.config.num_blocks} blocks were in use at once")
    cached, prompts = stats.cached_tokens, stats.cached_tokens + stats.prefill_tokens
    print(f"prefix hits {cached / prompts:5.0%}   of the prompt tokens were in the cache: {cached} of {prompts}")
    print(f"preemptions {stats.preemptions:5}   which cost {stats.recomputed_tokens} tokens computed again")
    if stats.draft_tokens:
        print(f"guesses     {sum(stats.accepted_tokens) / stats.draft_tokens:5.0%}   were right: {sum(stats.accepted_tokens)} of "
              f"{stats.draft_tokens}, so a pass gave a request {stats.tokens_per_pass:.2f} tokens")


def generate(args):
    """Stream completions. Several prompts run in one batch; their texts come out one after the other: the first streams, and the
    others have got on with theirs when it is their turn."""
    engine = make_engine(args)
    params = SamplingParams(**{name: value for name, value in given(args, SamplingParams).items() if name != "seed"})
    prompts = [sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n") if prompt == "-" else prompt
               for prompt in args.prompts]
    if args.json:
        return print(json.dumps([vars(completion) for completion in engine.generate(prompts, params)]))
    requests = [engine.requests[request_id] for request_id in engine.add_requests(prompts, params)]
    for prompt, request in zip(prompts, requests):
        print(f"--- {prompt}\n" * (len(prompts) > 1), end="")
        completion, shown = request.completion, 0
        while True:
            print(completion.text[shown:], end="", flush=True)
            shown = len(completion.text)
            if completion.finish_reason:
                break
            engine.step()
        print()
        require(not completion.error, f"{completion.request_id}: {completion.error}")


def serve(args):
    """Serve OpenAI's API until Ctrl-C or SIGTERM."""
    require(args.max_queue >= 1, f"max-queue={args.max_queue}: it must be at least 1")
    require(0 <= args.grace <= 3600, f"grace={args.grace}: it must be a number of seconds from 0 to 3600")
    engine, signals = make_engine(args), queue.SimpleQueue()        # a queue, since an Event can't be set while it is waited for
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: signals.put("stop"))
    server = Server(engine, args.host, args.port, args.max_queue)
    print(f"Serving {server.model} at http://{args.host}:{server.server_port}/v1/completions; Ctrl-C ends it", flush=True)
    sys.stdout.isatty() and View(engine, every=0.1)
    signals.get()
    server.stop(args.grace)


def lab(args):
    """Run an experiment of walkthrough.md, or all of them, or FILE.md#NAME."""
    require(not given(args, EngineConfig), f"{', '.join(given(args, EngineConfig))}: an experiment sets up its engines itself")
    results = tool("labs").run_labs(args.name, args.gpu, args.recorder, quiet=args.json)
    args.json and print(json.dumps(results, default=float))


def bench(args):
    """Throughput of a fixed workload, or with --kernels of kernels.cu alone."""
    module = tool("bench")
    module.run_kernels(args.json) if args.kernels else module.run_bench(args.json, given(args, EngineConfig))


def add_flags(parser, config, skip=()):
    """A flag for every field of a config class. A flag that is not given leaves no trace (SUPPRESS): the class has the
    defaults, and a command's parser does not overwrite with them what stood before the command."""
    for f in dataclasses.fields(config):
        if f.name not in skip:
            text = config.help()[f.name] + ("" if f.default in (None, ()) else f" (default: {f.default})")
            types = {*getattr(f.type, "__args__", [f.type])}
            how = ({"action": argparse.BooleanOptionalAction} if bool in types else {"action": "append"} if tuple in types else
                   # A number, or a word such as auto: which word, the config says.
                   {"type": lambda text: int(text) if text.lstrip("-").isdigit() else text} if {int, str} <= types else
                   {"type": next(t for t in (int, float, str) if t in types)})
            parser.add_argument(f"--{f.name.replace('_', '-')}", dest=f.name, default=argparse.SUPPRESS, help=text, **how)


def build_parser():
    """The main job has no command of its own; flags can stand before or behind a command. The engine's flags are the fields of
    EngineConfig, and the sentences behind them are its docstring's: a new field needs no line here."""
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    common.add_argument("--trace", metavar="FILE", help="write the schedule as Chrome trace JSON, for ui.perfetto.dev")
    add_flags(common.add_argument_group("engine"), EngineConfig)
    parser = argparse.ArgumentParser(prog="nanoserve.py", parents=[common], description="A small LLM serving engine. "
                                     "Without a command: serve the built-in prompts with a live view, on 48 blocks, 6 seats, a "
                                     "budget of 48 tokens and chunks of 32.")
    parser.add_argument("--delay", type=float, default=0.06, help="seconds between the steps of the live view (default: 0.06)")
    parser.set_defaults(run=main_job)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(run, help):
        sub = commands.add_parser(run.__name__, parents=[common], help=help, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(run=run)
        return sub

    sub = command(generate, "stream completions of prompts to the terminal")
    sub.add_argument("prompts", nargs="+", metavar="prompt", help="text, or - for standard input (a final newline is dropped)")
    add_flags(sub.add_argument_group("sampling"), SamplingParams, skip=("seed",))
    sub = command(serve, "serve OpenAI's API over HTTP")
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on")
    sub.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    sub.add_argument("--max-queue", type=int, default=256, help="most requests that wait; more are refused with 429")
    sub.add_argument("--grace", type=float, default=10.0, help="seconds to finish in, after Ctrl-C or SIGTERM")
    sub = command(lab, "an idea switched off and on, side by side")
    sub.add_argument("name", help="of a lab in walkthrough.md, FILE.md#NAME, or all")
    sub.add_argument("--gpu", default="h100", help="whose roofline clock to go by: h100, a100, this")
    sub = command(bench, "throughput of a fixed workload; the last line is JSON")
    sub.add_argument("--kernels", action="store_true", help="on a GPU: decode attention in GB/s, beside a plain copy")
    return parser


def main(argv=None):
    """-> the exit status: 0, also if the reader of our output left; 2 after a user's mistake, said in one sentence on standard
    error; 130 after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = build_parser().parse_args(argv)
    args.json, args.recorder = hasattr(args, "json"), None
    sys.stdout = sys.stdout or open(os.devnull, "w")    # None if it was closed
    sys.stdout.reconfigure(errors="replace")            # a terminal that can't show a character is no reason to stop
    try:
        args.recorder = tool("labs").Trace(args.trace) if hasattr(args, "trace") else None
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:                             # the reader of our pipe has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, OverflowError) as error:           # OverflowError: a port beyond all ports
        print(f"nanoserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        args.recorder and args.recorder.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
