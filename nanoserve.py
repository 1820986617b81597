"""nanoserve.py: the model, the engine and the command line.

What it does.  Loads a GPT-2 (`load_weights`), runs it over a ragged batch (`GPT2`), and turns the crank:
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
  - Every step with unfinished requests computes at least one token or hands out the end of at least one request.

Policies.  One thread, one step at a time: the order of events is the order of the code. Rejected: preparing step n + 1
while step n computes, as production engines do; it hides some Python time and all of the clarity.

Limits.  GPT-2's architecture only, one device, no quantisation.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import mmap
import os
import shutil
import sys
import textwrap
import time
import typing
from collections import deque
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from kvcache import ATTENTION, Batch, BlockAllocator, DecodeGraphs, KVCache, has_kernels, invariant
from scheduler import Request, Scheduler, Stats
from spec import (FLAG, Acceptance, Checked, Detokenizer, ModelDrafter, NgramDrafter, PassCost, SamplingParams, Tokenizer, at_least,
                  choose_drafts, is_a, option, reading, require, target_probs, verify)

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


SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path):
    """name -> tensor, each a window into the memory-mapped file: pages are read when used, and not copied.
    A tensor of a type that torch has no use for here is given as the type's name.

    The format: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the numbers.
    The header may lie (a download that broke off), so every claim is checked against the file.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""    # COPY: torch wants it writable
    start = 8 + int.from_bytes(data[:8], "little")
    require(start <= size, f"its header should end at byte {start}, the file has {size}: truncated?")
    try:
        header, tensors = json.loads(data[8:start]), {}
    except ValueError as error:
        raise ValueError(f"its header, bytes 8 to {start}, is not JSON: {error}") from None
    header.pop("__metadata__", None)
    for name, claim in header.items():
        dtype, shape, (begin, end) = claim["dtype"], claim["shape"], claim["data_offsets"]
        require(all(type(n) is int for n in (*shape, begin, end)) and min(shape, default=0) >= 0 and isinstance(dtype, str),
                f"the header's entry for tensor {name} makes no sense: {claim}")
        if dtype not in SAFETENSORS_DTYPES:
            tensors[name] = dtype           # GPT-2's own checkpoints carry causal masks as bytes: nobody needs them
            continue
        count, itemsize = math.prod(shape), SAFETENSORS_DTYPES[dtype].itemsize
        require(0 <= begin <= end <= size - start and count * itemsize == end - begin,
                f"tensor {name} of shape {shape} needs {count * itemsize} bytes, the header gives it [{begin}, {end}) of the "
                f"{size - start} bytes that are there")
        where = {"dtype": SAFETENSORS_DTYPES[dtype], "count": count, "offset": start + begin}
        tensors[name] = torch.frombuffer(data, **where).view(shape) if count else torch.empty(shape)
    return tensors


def load_weights(folder):
    """Read config.json and model.safetensors of a GPT-2 folder -> Weights. The output head is the embedding (tied)."""
    folder = Path(folder)
    require(folder.is_dir(), f"{str(folder)!r}: no such folder; a model is 'tiny', 'gpt2' or a folder with GPT-2's files")
    config = ModelConfig.load(folder / "config.json")
    path = folder / "model.safetensors"
    with reading(path):
        found = {name.removeprefix("transformer."): tensor for name, tensor in read_safetensors(path).items()}
        for name, shape in config.shapes().items():
            require(name in found, f"tensor {name} is missing")
            tensor = found[name]
            require(not isinstance(tensor, str), f"tensor {name} has type {tensor}, supported are {', '.join(SAFETENSORS_DTYPES)}")
            require(tensor.shape == shape, f"tensor {name}: expected shape {list(shape)}, found {list(tensor.shape)}")
    return Weights(config, {name: found[name] for name in config.shapes()})


def load_model(model, dtype):
    """EngineConfig.model -> (Weights, Tokenizer)."""
    folder = EMBEDDED / "tiny" if model in ("tiny", "gpt2") else Path(model)
    weights, tokenizer = load_weights(folder), Tokenizer.load(folder)
    last, size = max(tokenizer.bytes), weights.config.vocab_size
    require(last < size, f"{folder / 'vocab.json'}: id {last} is beyond the model's vocab_size of {size}")
    if model == "gpt2":
        from weights.inflate import inflate         # how to make a model larger is no part of serving it
        weights = inflate(weights, dtype)
    return weights, tokenizer


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


def pack(matrix, bias=None):
    """x -> x @ matrix + bias, with the matrix [in, out] reordered once into the layout that the CPU's multiply reads in.

    torch.addmm finds a layout anew in every call. These operators of torch are private: where they are missing, or the type
    is not theirs, the answer is None, and addmm it is.
    """
    operators = torch.ops.mkldnn
    wanted = matrix.numel() >= 2**18 and matrix.dtype in (torch.float32, torch.bfloat16)     # a small one fits the cache as it is
    if not (wanted and matrix.device.type == "cpu" and torch.backends.mkldnn.is_available()):
        return None
    try:
        packed = operators._reorder_linear_weight(matrix.T.contiguous(), 16)
        return lambda x: operators._linear_pointwise(x, packed, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return None


class GPT2:
    """The same function over a ragged batch, in torch, with K and V in the paged cache."""

    def __init__(self, weights, dtype, device):
        self.config, self.device = weights.config, device
        self.weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}     # no copy if it is so already
        self.packed = {"head": pack(self.weights["wte.weight"].T)}
        for name in (name.removesuffix(".weight") for name in weights if ".c_" in name and name.endswith(".weight")):
            self.packed[name] = pack(self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
            if self.packed[name]:
                self.weights[f"{name}.weight"] = weights[f"{name}.weight"]      # the mapped file's again, not one more copy

    @torch.inference_mode()
    def forward(self, batch, cache):
        """Compute batch.tokens [T], writing their K and V into `cache` -> logits [S, V] of batch.logit_rows."""
        on_device = [torch.from_numpy(array).to(self.device) for array in (batch.tokens, batch.positions, batch.logit_rows)]
        return self.compute(*on_device, batch, cache)

    def compute(self, tokens, positions, logit_rows, batch, cache):
        w, config = self.weights, self.config

        def layer_norm(x, name):
            return F.layer_norm(x, (config.width,), w[f"{name}.weight"], w[f"{name}.bias"], config.epsilon)

        def linear(x, name):
            return self.packed[name](x) if self.packed[name] else torch.addmm(w[f"{name}.bias"], x, w[f"{name}.weight"])

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
        x = layer_norm(x[logit_rows], "ln_f")                                       # [S, E] @ [E, V] -> [S, V]
        return self.packed["head"](x) if self.packed["head"] else x @ w["wte.weight"].T


def to_numpy(logits):
    """NumPy has no bfloat16, and float16 is too coarse to sample from."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu().numpy()


# ----------------------------------------------------------------------------------------------
# configuration and outputs


def one_of(*allowed):
    """-> what `option` wants to know of a choice: its test, and what a value must be."""
    return lambda value: value in allowed, "one of " + ", ".join(repr(value) for value in allowed)


def size(least, unit):
    return at_least(least), f"an integer of at least {least} ({unit})"


@dataclass(frozen=True)
class EngineConfig(Checked):
    """Everything that can be set; the command line has a flag for each field. A bad value raises ValueError.

    What the sizes do, each on its own:

    num_blocks              memory. More: more requests at once, more prefixes still to be found, fewer preemptions.
    block_size              larger: shorter block tables, fewer hash look-ups; but whole blocks are shared, and up to
                            block_size - 1 slots of each request stay empty.
    max_num_seqs            seats. More of them share one reading of the weights, and each waits for a larger pass.
    max_num_batched_tokens  the longest a pass may get. Larger: prompts are done sooner; smaller: streams are smoother.
    max_prefill_chunk       the same for one request: what a long prompt may take of a pass that streams are waiting for.
    num_draft_tokens        more guesses: more tokens from a pass when they are right, more rows for nothing when not.

    batching="static" and kv_reservation="reserved" are how it used to be done. They are here to be measured.

    >>> EngineConfig(block_size=0)
    Traceback (most recent call last):
    ValueError: block_size=0: it must be an integer of at least 1 (tokens)
    """

    model: str = option("tiny", lambda v: isinstance(v, str) and v, "'tiny', 'gpt2' or a folder",
                        "tiny (embedded), gpt2 (tiny's function in GPT-2's 124M shape) or a folder of GPT-2 files")
    device: str | None = option(None, *one_of("cpu", "cuda"), "cpu or cuda; default: cuda where there is one")
    dtype: str | None = option(None, *one_of("float32", "float64", "bfloat16", "float16"), "of weights and K/V (bfloat16 on a CPU: "
                               "of weights only); default: float32 on the CPU, float16 on a GPU")
    attention: str | None = option(None, *one_of(*ATTENTION), "numpy (the slow reference), torch or cuda (kernels.cu); "
                                   "default: cuda on a GPU with CuPy where kernels.cu can do it, else torch")
    threads: int | None = option(None, lambda v: at_least(1)(v) and v <= 1024, "an integer from 1 to 1024",
                                 "CPU threads; default: 1 for a model as small as tiny, else torch's choice")
    block_size: int = option(16, *size(1, "tokens"), "tokens per block of the KV pool")
    num_blocks: int = option(256, *size(1, "blocks"), "blocks in the KV pool")
    max_num_seqs: int = option(16, *size(1, "requests"), "most requests that run at once")
    max_num_batched_tokens: int = option(256, *size(1, "tokens"), "token budget of a step")
    max_prefill_chunk: int | None = option(None, *size(1, "tokens; None: the budget alone"),
                                           "most tokens of one request in one step; default: the budget alone")
    enable_prefix_caching: bool = option(True, *FLAG, "find computed prefixes again")
    batching: str = option("continuous", *one_of("continuous", "static"),
                           "static admits only when the whole last batch has finished")
    kv_reservation: str = option("paged", *one_of("paged", "reserved"), "reserved takes a request's worst case of blocks up front")
    drafter: str | None = option(None, lambda v: isinstance(v, str) and v, "'ngram', 'model' or a folder",
                                 "guess ahead: ngram, model (the embedded draft) or a folder; default: no guesses")
    num_draft_tokens: int | str = option(4, lambda v: v == "auto" or at_least(1)(v), "an integer of at least 1, or 'auto'",
                                         "guesses per request and step, or auto: as many as pay")
    seed: int = option(0, *size(0, "any"), "of requests that bring no seed of their own")


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
    error: str | None = None


@dataclass
class Completion:
    """A finished request.

    token_ids holds all that was generated, the tokens of a stop string and <|endoftext|> included; text does not.
    num_cached_tokens counts prompt tokens that were found in the prefix cache when the request was first admitted.
    """

    request_id: str
    prompt_token_ids: list
    token_ids: list = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None

    def add(self, output, request):
        self.token_ids += output.token_ids
        self.text += output.text
        self.finish_reason, self.error = output.finish_reason, output.error
        self.num_cached_tokens, self.num_preemptions = request.num_cached_tokens, request.num_preemptions


# ----------------------------------------------------------------------------------------------
# the engine


@dataclass(eq=False)
class ServedRequest(Request):
    """A Request with what the scheduler does not need to know: how to sample it, and its text."""

    params: SamplingParams = None
    seed: int = 0
    draft_probs: np.ndarray | None = None       # [k, V] what each of `drafts` was drawn from
    acceptance: Acceptance = None               # of its guesses
    text: Detokenizer = None


MOST_DRAFTS = 5                         # with num_draft_tokens="auto": what a longer run adds rarely pays for being tried


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
        self.config = config = dataclasses.replace(config or EngineConfig(), **fields)
        self.model, self.tokenizer, self.cache = self.load(config)
        self.drafter = self.load_drafter()
        self.pass_cost, self.draft_cost = PassCost(), PassCost()        # of the target, by rows; of the drafter, by depth
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
        gpu = torch.cuda.is_available()
        device = config.device or ("cuda" if gpu else "cpu")
        require(gpu or device == "cpu", "device='cuda': torch sees no CUDA GPU here; use device='cpu' or leave it out")
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
        config = self.config
        weights, tokenizer = load_model(name, dtype)
        shape, head_dim = weights.config, weights.config.width // weights.config.num_heads
        cupy = importlib.util.find_spec("cupy")             # asks whether it is there, without importing it
        kernels = device == "cuda" and cupy and has_kernels(dtype, head_dim, config.block_size)
        attention = config.attention or ("cuda" if kernels else "torch")
        # A CPU's attention is several times slower in bfloat16 than in float32, in which K and V are the better, too.
        cache_dtype = torch.float32 if (device, dtype) == ("cpu", torch.bfloat16) else dtype
        cache = KVCache(shape.num_layers, config.num_blocks, config.block_size, shape.num_heads, head_dim, cache_dtype, device,
                        attention)
        model = GPT2(weights, dtype, device)
        return DecodeGraphs(model) if device == attention == "cuda" else model, tokenizer, cache

    def load_drafter(self):
        """-> the drafter that EngineConfig.drafter names, or None.

        A draft model gets a cache of its own with as many blocks as the target's: block 7 of a block table means block 7 of
        both, so one allocator serves two models.
        """
        name = self.config.drafter
        if name in (None, "ngram"):
            return name and NgramDrafter(self.model.config.vocab_size)
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

        return ModelDrafter(forward, model.config.context_length, self.model.config.vocab_size)

    # --- requests in ---

    def add_request(self, prompt, params=None, request_id=None):
        """Check a request and queue it. -> its id. prompt: text or token ids. Raises ValueError, changing nothing.

        Call it between two steps, from the thread that calls step(); abort() likewise.
        """
        return self.add_requests([prompt], params, [request_id])[0]

    def add_requests(self, prompts, params=None, request_ids=None):
        """All or none. params: one for all, or a list, one each. -> ids."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        require(len(each) == len(prompts), f"{len(prompts)} prompts, but {len(each)} params: give one for all, or one each")
        requests = [self._make_request(prompt, one, request_id, self._num_requests + i)
                    for i, (prompt, one, request_id) in enumerate(zip(prompts, each, request_ids or [None] * len(prompts)))]
        for request in requests:
            self.requests[request.request_id] = request
            self.scheduler.add(request)
            self._num_requests += 1
        return [request.request_id for request in requests]

    def _make_request(self, prompt, params, request_id, number):
        """number: how many requests came before."""
        params = SamplingParams() if params is None else params
        require(isinstance(params, SamplingParams), f"params must be SamplingParams, not {type(params).__name__}")
        context, vocabulary = self.model.config.context_length, self.model.config.vocab_size
        require(isinstance(prompt, str) or isinstance(prompt, (list, tuple)) and all(is_a(Integral, token) for token in prompt),
                "the prompt must be a string or a list of token ids")
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        require(tokens, "the prompt is empty: it must have at least one token")
        for token in tokens:
            require(0 <= token < vocabulary, f"token id {token} is not in the vocabulary: ids are 0 to {vocabulary - 1}")
        require(len(tokens) < context, f"the prompt has {len(tokens)} tokens, but the context length is {context} and one token "
                f"must be left to generate: shorten it to {context - 1}")
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
        return ServedRequest(request_id, tokens, len(tokens), max_len, params=params, seed=seed,
                             text=Detokenizer(params.stop), acceptance=Acceptance(self.acceptance), arrival_time=self.clock())

    def abort(self, request_id):
        """End a request in any state, between two steps. True if it was alive. Its blocks are free at once; its last output
        comes with the next step()."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._outbox.append(self._finish(request, [], "", "abort"))
        return True

    def fail(self, error):
        """End the requests of a step that raised `error`; all who run are in every step. Their outputs come with the next one."""
        for request in self.scheduler.running[:] or [*self.scheduler.waiting.values()]:
            self._outbox.append(self._finish(request, [], "", "error", f"the step failed: {error!r}"))

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
        draft_seconds = 0.0
        if self.drafter:
            self._ask_for_guesses()
            draft_seconds = self.clock() - started
        scheduled = self.scheduler.schedule()
        self.last_batch = [(request, request.num_computed_tokens, n, len(request.drafts)) for request, n in scheduled]
        if not scheduled:
            return self._take_outbox()
        if self.drafter:
            before = self.clock()
            self.drafter.fill([request for request, _ in scheduled if request.drafts])
            self.draft_cost.add(max(len(request.drafts) for request, _ in scheduled), self.clock() - before)
            draft_seconds += self.clock() - before

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
        self.pass_cost.add(len(batch.tokens), after - before)
        if self.drafter:
            self.drafter.follow(sequences)
            self.stats.draft_seconds += draft_seconds + self.clock() - after

        # 4) Logits to tokens to text, request by request; the rest of a prompt only moves on.
        first = 0
        for (request, n), (*_, rows) in zip(scheduled, sequences):
            if rows:
                self._outbox.append(self._sample(request, n, logits[first:first + rows], after))
            else:
                self.scheduler.advance(request, n)
            first += rows
        self.last_step = started, self.clock()
        self.stats.count_time(started, after - before, self.last_step[1])
        return self._take_outbox()

    def _ask_for_guesses(self):
        """Before scheduling: how many guesses each stream would like to have checked."""
        streams = [request for request in self.scheduler.running if request.num_missing == 1]
        wanted = [self.config.num_draft_tokens] * len(streams)
        if self.config.num_draft_tokens == "auto":
            others = sum(min(request.num_missing, self.scheduler.chunk) for request in self.scheduler.running) - len(streams)
            others = min(others, self.config.max_num_batched_tokens - len(streams))
            wanted = choose_drafts([request.acceptance.rate() for request in streams], others, self.pass_cost.line(),
                                   self.draft_cost.line()[1], MOST_DRAFTS)
        for request, k in zip(streams, wanted):
            room = request.max_len - len(request.tokens) - 1            # the bonus token needs a place, too
            request.drafts = self.drafter.guess(request, min(k, room))

    def _take_outbox(self):
        for watch in self.watchers:
            watch(self._outbox)
        outputs, self._outbox = self._outbox, []
        return outputs

    def _sample(self, request, n, logits, now):
        """The request is computed up to its last token, and k guesses beyond: draw 1 to k + 1 tokens, see if one ends it.

        logits [k + 1, V] -> StepOutput.
        """
        guesses, request.drafts = request.drafts, []
        finite = np.isfinite(logits).all(axis=1)
        usable = len(finite) if finite.all() else int(finite.argmin())      # rows behind a broken one may never be asked for
        if not usable:
            return self._finish(request, [], "", "error", "the model produced logits that are not finite numbers")
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
            text += request.text.add(self.tokenizer.decode_bytes([token]))
            if request.text.stopped or (token == self.tokenizer.eos_id and not request.params.ignore_eos):
                reason = "stop"
            elif len(request.tokens) == request.max_len:
                reason = "length"
            if reason:
                break               # what was accepted beyond a stop is not part of the answer
        self.stats.count_tokens(request, len(new), now)
        # Before finish() gives the blocks away: of the n computed positions, those of accepted and kept tokens are published.
        self.scheduler.advance(request, n - len(guesses) + min(len(tokens) - 1, len(new)))
        return self._finish(request, new, text, reason) if reason else StepOutput(request.request_id, new, text)

    def _finish(self, request, new, text, reason, error=None):
        """Remove the request, flush its text -> its terminal output."""
        self.scheduler.finish(request)
        del self.requests[request.request_id]
        text += request.text.add(b"", final=True)
        self.stats.count_end(request, reason, self.clock())
        return StepOutput(request.request_id, new, text, reason, error)

    # --- whole completions ---

    def generate(self, prompts, params=None):
        """Serve prompts to the end. -> list of Completion, in their order. params: one for all, or a list, one each.

        A prompt that is refused raises ValueError before any of them starts.
        """
        requests = {request_id: self.requests[request_id] for request_id in self.add_requests(prompts, params)}
        done = {request_id: Completion(request_id, request.tokens[:]) for request_id, request in requests.items()}
        others = []                     # outputs of requests that were added before: kept for their owner
        try:
            while any(completion.finish_reason is None for completion in done.values()):
                for output in self.step():
                    if output.request_id in done:
                        done[output.request_id].add(output, requests[output.request_id])
                    else:
                        others.append(output)
        finally:
            for request_id in done:
                self.abort(request_id)  # none is alive, unless we were interrupted
            self._outbox = others + [output for output in self._outbox if output.request_id not in done]
        return list(done.values())

    def check(self):
        """Raise RuntimeError if an invariant of scheduler or pool is broken."""
        self.scheduler.check()
        alive = {*self.scheduler.waiting, *(request.request_id for request in self.scheduler.running)}
        invariant(alive == set(self.requests), f"engine and scheduler disagree about who lives: {alive ^ set(self.requests)}")
        invariant(alive or not self.pool.num_used, f"idle, but {self.pool.num_used} blocks are in use")


# ----------------------------------------------------------------------------------------------
# watching it: the engine drawn after every step


def bar(share, width):
    """
    >>> bar(0.5, 8)
    '████░░░░'
    """
    full = round(min(max(share, 0), 1) * width)
    return "█" * full + "░" * (width - full)


class View:
    """Draws batch, pool and gauges after each step; every request is a letter.

    It only looks: at the engine's last batch, at block tables, at the counters. Nothing in the engine knows of it, and the
    time it takes is taken off the engine's clock.
    """

    COLOURS = (161, 28, 27, 130, 133, 30, 196, 64, 99, 31, 65, 164)         # as legible on black as on white

    def __init__(self, engine):
        self.engine = engine
        self.letters = {}                                       # request_id -> letter
        self.past = deque([(0, 0, 0.0, 0.0)], maxlen=21)        # counters over the last 20 steps, for the gauges
        self.height = 0                                         # of the picture on the screen
        self.recent = deque(maxlen=3)                           # the last events
        self.seconds_shown = 0.0                                # spent on drawing and waiting

    def letter(self, request_id):
        return self.letters.setdefault(request_id, chr(ord("A") + len(self.letters) % 26))

    def paint(self, symbol, times=1):
        colour = self.COLOURS[(ord(symbol) - ord("A")) % len(self.COLOURS)] if symbol.isalpha() else 243
        return f"\x1b[1;38;5;{colour}m{symbol * times}\x1b[0m"

    def pool(self):
        """A symbol for each block: the letter of its owner, * if it has several, ~ free but findable, . free."""
        pool, symbols = self.engine.pool, {}
        for request in self.engine.scheduler.running:
            for block in request.block_table:
                symbols[block] = "*" if block in symbols else self.letter(request.request_id)
        findable = set(pool.by_hash.values())
        return [symbols.get(block, "~" if block in findable else ".") for block in range(pool.num_blocks)]

    def gauges(self):
        """(busy, goodput) over the last 20 steps."""
        stats = self.engine.stats
        self.past.append((stats.delivered_tokens, stats.scheduled_tokens + stats.idle_seats, stats.model_seconds, stats.seconds))
        delivered, paid, busy, total = (now - then for now, then in zip(self.past[-1], self.past[0]))
        return busy / max(total, 1e-9), delivered / max(paid, 1)

    def show(self, outputs, pause):
        """Draw the step just made: in a terminal over the last picture, then wait; in a pipe as lines."""
        started = time.perf_counter()
        gauges, events = self.gauges(), self.events(outputs)
        columns, rows = shutil.get_terminal_size()
        self.recent.extend(events)
        if sys.stdout.isatty() and columns >= 80:
            lines = self.picture(*gauges)[:rows - 1]
            print(f"\x1b[{self.height}F" * bool(self.height) + "".join(f"\x1b[2K{line}\n" for line in lines), end="", flush=True)
            self.height = len(lines)
            time.sleep(pause)
        else:
            batch = " ".join(f"{self.letter(request.request_id)}{n}" for request, _, n in self.engine.last_batch)
            if self.engine.stats.steps == 1:
                print("step [KV pool: a symbol per block] goodput, tokens computed per request")
            print(*events, f"{self.engine.stats.steps:4} [{''.join(self.pool())}] {gauges[1]:4.0%}  {batch}", sep="\n")
        self.seconds_shown += time.perf_counter() - started

    def events(self, outputs):
        """What this step did to whom, besides computing tokens, in words."""
        scheduler, name = self.engine.scheduler, lambda rid: f"{self.letter(rid)} {rid}"
        events = [f"   - {name(r.request_id)} preempted: it gave up {n} tokens of K/V" for r, n in scheduler.preempted.items()]
        events += [f"   + {name(r.request_id)} admitted{' again' * bool(r.num_preemptions)}, {start} tokens found in the cache"
                   for r, start, _ in self.engine.last_batch if r in scheduler.admitted]
        return events + [f"   = {name(o.request_id)} finished: {o.finish_reason}" for o in outputs if o.finish_reason]

    def picture(self, busy, goodput):
        """Coloured lines of 80 columns: gauges, pool, batch, what happened last, the waiting and the running."""
        stats, config, scheduler = self.engine.stats, self.engine.config, self.engine.scheduler
        symbols, unit = self.pool(), math.ceil(config.max_num_batched_tokens / 60)
        queue = "".join(f" {self.paint(self.letter(rid))}" for rid in list(scheduler.waiting)[:30])
        lines = [f"step {stats.steps:4}   {stats.running} running, {stats.waiting} waiting, "
                 f"{sum(stats.finished.values())} finished, {stats.preemptions} preemptions",
                 f"busy     {bar(busy, 40)} {busy:4.0%}  a forward pass runs",
                 f"goodput  {bar(goodput, 40)} {goodput:4.0%}  tokens per paid position", "",
                 f"KV pool: {stats.kv_used} of {config.num_blocks} blocks in use    * shared   ~ free, still findable   . free"]
        per_line = math.ceil(len(symbols) / math.ceil(len(symbols) / 39))
        symbols = [f" {self.paint(symbol)}" for symbol in symbols]
        lines += ["".join(symbols[i:i + per_line]) for i in range(0, len(symbols), per_line)]
        lines += ["", f"batch: {sum(n for _, _, n in self.engine.last_batch)} of {config.max_num_batched_tokens} tokens    "
                  "one letter: a decode, several: a prompt or guesses",
                  " " + "".join(self.paint(self.letter(r.request_id), math.ceil(n / unit)) for r, _, n in self.engine.last_batch),
                  "", f"waiting:{queue or ' nobody'}", *(f"{event:.79}" for event in self.recent), *[""] * (4 - len(self.recent))]
        return lines + [self.row(request) for request in scheduler.running] + [""] * (config.max_num_seqs - stats.running)

    def row(self, request):
        """A running request: how far its prefill is, or the end of its text."""
        if request.num_missing > 1:
            state = f"prefill, {request.num_computed_tokens} of {len(request.tokens)} tokens computed"
        else:
            text = self.engine.tokenizer.decode(request.tokens[-30:])
            text = "".join(char if char.isprintable() else " " for char in text)        # a model can say any control code
            state = f"{request.num_output_tokens:3} tokens  …{text[-46:]}"
        return f" {self.paint(self.letter(request.request_id))} {request.request_id:12} {state}"


# ----------------------------------------------------------------------------------------------
# the command line


def main_job(args):
    """Serve the built-in prompts as they arrive, before the reader's eyes, then sum up."""
    if not 0 <= args.delay <= 60:
        raise ValueError(f"delay={args.delay}: it must be a number of seconds from 0 to 60")
    script = json.loads((EMBEDDED / "prompts.json").read_text("utf-8"))
    # A pool and a budget so small that sharing, chunking and a preemption really happen.
    engine = Engine(**{"num_blocks": 48, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_prefill_chunk": 32} | args.engine)
    view = View(engine)
    engine.clock = lambda: time.perf_counter() - view.seconds_shown       # drawing is not serving
    arrivals, requests, answers, tick = deque(), {}, {}, 0
    for entry in script["requests"]:
        prompt, params = script["prefixes"].get(entry.get("prefix"), "") + entry["prompt"], SamplingParams(**entry["params"])
        engine._make_request(prompt, params, entry["name"], 0)          # refuse what does not fit before anything starts
        arrivals.append((entry["arrives"], prompt, params, entry["name"]))
    while arrivals or engine.has_unfinished():
        while arrivals and arrivals[0][0] <= tick:
            name = engine.add_request(*arrivals.popleft()[1:])
            requests[name], answers[name] = engine.requests[name], Completion(name, engine.requests[name].tokens[:])
        outputs = engine.step()
        tick += 1
        for output in outputs:
            answers[output.request_id].add(output)
        if not args.json and engine.last_batch:
            view.show(outputs, args.delay)
    if args.json:
        print(json.dumps({"requests": [vars(answer) for answer in answers.values()], "stats": engine.stats.as_dict()}))
    else:
        print_summary(engine, requests, answers)


def print_summary(engine, requests, answers):
    """All texts, a line of times per request, and the run as a whole. To be read with the picture in mind: who waited long for
    its first token (TTFT) stood in the queue or had a long prompt; the longest gap is a preemption, or somebody's chunk."""
    stats, config = engine.stats, engine.config
    print("\nThe texts; » marks where the model took over:\n")
    for name, answer in answers.items():
        prompt = engine.tokenizer.decode(answer.prompt_token_ids)
        prompt = prompt if len(prompt) < 120 else "…" + prompt[-120:]
        lines = f"{prompt}»{answer.text}".rstrip("\n").split("\n")
        print(f"{name} ({answer.finish_reason})")
        for line in lines:
            print(textwrap.fill(line, 76, initial_indent="    ", subsequent_indent="    "))
        print()
    print("request       prompt  cached  output  preempted  TTFT ms  ITL ms  longest gap ms")
    for name, r in requests.items():
        if r.first_token_time is None:
            print(f"{name:12} {r.num_prompt_tokens:7}  {answers[name].error or answers[name].finish_reason}")
            continue
        itl = (r.last_token_time - r.first_token_time) / max(r.num_output_tokens - 1, 1)
        print(f"{name:12} {r.num_prompt_tokens:7} {r.num_cached_tokens:7} {r.num_output_tokens:7} {r.num_preemptions:10} "
              f"{(r.first_token_time - r.arrival_time) * 1e3:8.1f} {itl * 1e3:7.1f} {r.longest_gap * 1e3:15.1f}")
    prompts, rate = stats.cached_tokens + stats.prefill_tokens, stats.delivered_tokens / stats.seconds
    print(f"""
{stats.steps} steps in {stats.seconds:.2f} s delivered {stats.delivered_tokens} tokens: {rate:,.0f} tokens/s
busy        {stats.busy:5.0%}   of the time a forward pass was running
occupancy   {stats.occupancy:5.0%}   of the {config.max_num_seqs} seats were taken
budget fill {stats.budget_fill:5.0%}   of {config.max_num_batched_tokens} tokens a step
goodput     {stats.goodput:5.0%}   tokens delivered per token position paid for
KV peak     {stats.kv_peak / config.num_blocks:5.0%}   of {config.num_blocks} blocks
prefix hits {stats.cached_tokens / prompts:5.0%}   of the prompt tokens were in the cache: {stats.cached_tokens} of {prompts}
preemptions {stats.preemptions:5}   which cost {stats.recomputed_tokens} tokens computed again""")
    if stats.draft_tokens:
        right = sum(stats.accepted_tokens)
        print(f"guesses     {right / stats.draft_tokens:5.0%}   were right: {right} of {stats.draft_tokens}, so a pass gave a "
              f"request {stats.tokens_per_pass:.2f} tokens")


def generate(args):
    """Stream completions. Several prompts run in one batch; their texts come out one after the other."""
    engine, params = Engine(**args.engine), SamplingParams(**args.sampling)
    prompts = [sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n") if prompt == "-" else prompt
               for prompt in args.prompts]
    if args.json:
        print(json.dumps([vars(completion) for completion in engine.generate(prompts, params)]))
        return
    ids, ended = engine.add_requests(prompts, params), {}
    ready = dict.fromkeys(ids, "")                                          # text that waits for its turn on the screen
    for prompt, request_id in zip(prompts, ids):
        if len(prompts) > 1:
            print(f"--- {prompt}")
        while request_id not in ended or ready[request_id]:
            print(ready[request_id], end="", flush=True)
            ready[request_id] = ""
            for output in engine.step() if request_id not in ended else ():
                ready[output.request_id] += output.text
                if output.finish_reason:
                    ended[output.request_id] = output
        print()
        if ended[request_id].error:
            raise ValueError(f"{request_id}: {ended[request_id].error}")


def bench(args):
    """Run tests/bench.py: it measures the product, and is no part of it."""
    sys.path.insert(0, str(Path(__file__).parent / "tests"))
    from bench import run_bench, run_kernels
    if args.kernels:
        run_kernels(args.json)
    else:
        run_bench(args.json, args.engine)


def int_or_word(text):
    """For flags that take a number or a word, such as auto: what the word may be is for the config to say."""
    return int(text) if text.lstrip("-").isdigit() else text


def add_flags(parser, config, skip=()):
    """A flag for every field of a config class. A flag that is not given leaves no trace (SUPPRESS): the class has the
    defaults, and a command's parser does not overwrite with them what stood before the command."""
    for f in dataclasses.fields(config):
        if f.name in skip:
            continue
        text = f.metadata["help"] + ("" if f.default in (None, ()) else f" (default: {f.default})")
        kind = next(t for t in (bool, int, float, str, tuple) if t in (f.type, *typing.get_args(f.type)))
        if str in typing.get_args(f.type) and kind is int:
            kind = int_or_word
        how = {bool: {"action": argparse.BooleanOptionalAction}, tuple: {"action": "append"}}.get(kind, {"type": kind})
        parser.add_argument(f"--{f.name.replace('_', '-')}", dest=f.name, default=argparse.SUPPRESS, help=text, **how)


def build_parser():
    """The main job has no command of its own; flags can stand before or behind a command."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON value instead of text")
    add_flags(common.add_argument_group("engine"), EngineConfig)
    parser = argparse.ArgumentParser(prog="nanoserve.py", parents=[common], description="A small LLM serving engine. "
                                     "Without a command: serve the built-in prompts with a live view, on 48 blocks, 6 seats, a "
                                     "budget of 48 tokens and chunks of 32.")
    parser.add_argument("--delay", type=float, default=0.06, help="seconds between the steps of the live view (default: 0.06)")
    parser.set_defaults(run=main_job)
    commands = parser.add_subparsers(title="commands", metavar="")
    command = commands.add_parser("generate", parents=[common], help="stream completions of prompts to the terminal")
    command.add_argument("prompts", nargs="+", metavar="prompt",
                         help="text, or - for standard input (a final newline is dropped)")
    add_flags(command.add_argument_group("sampling"), SamplingParams, skip=("seed",))
    command.set_defaults(run=generate)
    command = commands.add_parser("bench", parents=[common], help="throughput of a fixed workload; the last line is JSON")
    command.add_argument("--kernels", action="store_true", help="on a GPU: decode attention in GB/s, beside a plain copy")
    command.set_defaults(run=bench)
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    given = vars(args)
    args.json = given.get("json", False)
    args.engine = {f.name: given[f.name] for f in dataclasses.fields(EngineConfig) if f.name in given}
    args.sampling = {f.name: given[f.name] for f in dataclasses.fields(SamplingParams) if f.name in given and f.name != "seed"}
    sys.stdout = sys.stdout or open(os.devnull, "w")    # None if it was closed
    sys.stdout.reconfigure(errors="replace")            # a terminal that can't show a character is no reason to stop
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:                             # the reader of our pipe has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"nanoserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
