"""Train the two models that come with nanoserve: weights/tiny, and weights/draft to speculate for it.

    python weights/train.py                  # everything, in order; continues where it was stopped
    python weights/train.py --report         # measure the models that are in the folders now
    python weights/train.py --sample "Q: What is 2 + 3?"$'\\n'"A:"

The order is corpus (see grammar.py), vocabulary, target, draft (distilled from the target), report.
Training is by steps, from fixed seeds; intermediate files are kept in weights/build/.
"""
import argparse
import collections
import json
import math
import os
import pathlib
import struct
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
BUILD = HERE / "build"
sys.path[:0] = [str(HERE), str(HERE.parent)]

from grammar import Grammar
from nanoserve import load_weights
from weights.tokenizer import BYTE_TO_CHAR, Tokenizer, pretokenize

VOCABULARY, CONTEXT = 1024, 512
SHAPES = {"tiny": dict(n_layer=4, n_embd=128, n_head=4), "draft": dict(n_layer=1, n_embd=64, n_head=2)}
CORPUS_TOKENS = 24_000_000
TOKENS_PER_STEP = 4096
WINDOWS = [(256, 16), (128, 32), (256, 16), (512, 8)]   # length and number. Short windows train faster, but
                                                        # positions that are never seen are never learnt
ADAM_RATE, MUON_RATE = 4e-3, 0.02


# 1. Vocabulary ---------------------------------------------------------------------------------

def learn_merges(texts, count):
    """Byte-pair encoding: joins the most frequent pair of neighbours, again and again."""
    pieces = collections.Counter(piece for text in texts for piece in pretokenize(text))
    words = [[BYTE_TO_CHAR[byte] for byte in piece.encode()] for piece in pieces]
    frequency = list(pieces.values())
    pairs, places = collections.Counter(), collections.defaultdict(set)

    def add(index, sign):
        for pair in zip(words[index], words[index][1:]):
            pairs[pair] += sign * frequency[index]
            places[pair].add(index)

    for index in range(len(words)):
        add(index, 1)
    merges = []
    for _ in range(count):
        best = max(pairs, key=lambda pair: (pairs[pair], pair))   # ties: by the alphabet, to be repeatable
        merges.append(best)
        for index in places.pop(best):   # only words that hold the pair change
            add(index, -1)
            words[index] = join(words[index], best)
            add(index, 1)
    return merges


def join(word, pair):
    """["a", "b", "c"] and ("a", "b") -> ["ab", "c"]."""
    out = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] = "".join(pair)
        else:
            out.append(part)
    return out


def write_vocabulary(folder, merges):
    """GPT-2's two files. Its order of the bytes is that of the characters they are written as."""
    tokens = sorted(BYTE_TO_CHAR) + ["".join(pair) for pair in merges] + ["<|endoftext|>"]
    assert len(set(tokens)) == VOCABULARY
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = json.dumps({token: i for i, token in enumerate(tokens)}, ensure_ascii=False)
    (folder / "vocab.json").write_text(vocabulary, "utf-8")
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    (folder / "merges.txt").write_text("#version: 0.2\n" + lines, "utf-8")


# 2. Corpus -------------------------------------------------------------------------------------

def build_corpus():
    """Writes the vocabulary and build/corpus.npz once. Training text is seed 0, held-out text seed 1."""
    path = BUILD / "corpus.npz"
    if not path.exists():
        grammar = Grammar(0)
        merges = learn_merges([grammar.document() for _ in range(8000)], VOCABULARY - 257)
        for folder in SHAPES:
            write_vocabulary(HERE / folder, merges)
        tokenizer = Tokenizer.load(HERE / "tiny")
        train, starts, _ = encode_documents(tokenizer, Grammar(0), CORPUS_TOKENS)
        held, held_starts, nats = encode_documents(tokenizer, Grammar(1), 100_000)
        BUILD.mkdir(exist_ok=True)
        np.savez(path, train=train, starts=starts, held=held, held_starts=held_starts, nats=nats)
    return dict(np.load(path)), Tokenizer.load(HERE / "tiny")


def encode_documents(tokenizer, grammar, tokens):
    """Documents one after the other, each behind an <|endoftext|>, with their starts and entropies."""
    ids, starts, nats = [], [], []
    while len(ids) < tokens:
        before = grammar.dice.nats
        starts.append(len(ids))
        ids += [tokenizer.eos_id] + tokenizer.encode(grammar.document())
        nats.append(grammar.dice.nats - before)
    return np.array(ids + [tokenizer.eos_id], np.uint16), np.array(starts), np.array(nats)


def batch(corpus, step):
    """Windows that begin at a document, or just behind its <|endoftext|> so that a prompt works without
    one. Depends on the step alone, so a run that was stopped continues as if it had not been."""
    length, count = WINDOWS[step % len(WINDOWS)]
    random = np.random.default_rng([2, step])
    usable = corpus["starts"][:-100]   # a window from the last ones might run over the end
    at = random.choice(usable, count) + random.integers(0, 2, count)
    x = torch.from_numpy(np.stack([corpus["train"][i:i + length + 1] for i in at]).astype(np.int64))
    return x[:, :-1], x[:, 1:]


# 3. Model --------------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(width, 3 * width), c_proj=nn.Linear(width, width)))
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(width, 4 * width), c_proj=nn.Linear(4 * width, width)))

    def forward(self, x, mask):
        x = x + self.attend(self.ln_1(x), mask)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))

    def attend(self, x, mask):
        """Written out: at this size it trains faster on a CPU than the fused attention of torch."""
        rows, length, width = x.shape
        qkv = self.attn["c_attn"](x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + mask[:length, :length].to(q.dtype)
        mixed = torch.softmax(scores, -1).to(v.dtype) @ v
        return self.attn["c_proj"](mixed.transpose(1, 2).reshape(rows, length, width))


class GPT2(nn.Module):
    """Names of parameters are those of GPT-2's checkpoint, so exporting is little more than writing."""
    def __init__(self, n_layer, n_embd, n_head):
        super().__init__()
        self.shape = dict(n_layer=n_layer, n_embd=n_embd, n_head=n_head)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, n_embd), nn.Embedding(CONTEXT, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:   # as GPT-2: what is added to the residual stream starts smaller
                small = math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, 0, 0.02 / small)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for block in self.h:
            x = block(x, self.mask)
        return F.linear(self.ln_f(x), self.wte.weight)   # the head is tied to the embedding


def logits_of(model, ids):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(ids).float()


# 4. Optimiser ----------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, so that every direction of a matrix learns at the same
    pace. For the matrices of the blocks; it needs far fewer steps than AdamW does."""
    def __init__(self, parameters, lr):
        super().__init__(parameters, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.05)
                update = weight.grad.lerp(momentum, 0.95)   # Nesterov
                weight.mul_(1 - 0.1 * group["lr"])
                parts = 3 if len(weight) == 3 * weight.shape[1] else 1   # q, k and v are three matrices
                for w, u in zip(weight.chunk(parts), update.chunk(parts)):
                    scale = max(1, w.shape[0] / w.shape[1]) ** 0.5
                    w.add_(orthogonal(u), alpha=-group["lr"] * scale)


def orthogonal(matrix):
    """About the nearest orthogonal matrix: five Newton-Schulz steps push all singular values towards 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if tall else x).float()


def optimisers_for(model):
    blocks = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("h.")]
    tables = [model.wte.weight, model.wpe.weight]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW([dict(params=tables, weight_decay=0.01), dict(params=vectors, weight_decay=0.0)],
                             ADAM_RATE, betas=(0.9, 0.98), fused=True)
    return [adam, Muon(blocks, MUON_RATE)]


def set_rate(optimisers, step, steps):
    """Warm-up over 2 % of the steps, constant to the half, then linear to almost 0."""
    factor = min((step + 1) / (0.02 * steps), 1, max(0.01, (steps - step) / (0.5 * steps)))
    for optimiser, rate in zip(optimisers, (ADAM_RATE, MUON_RATE)):
        for group in optimiser.param_groups:
            group["lr"] = rate * factor


# 5. Training -----------------------------------------------------------------------------------

def train(name, corpus, tokenizer, steps, teacher=None):
    """Trains (or goes on training) a model; with a teacher, towards its probabilities instead of the text."""
    torch.manual_seed(0)
    model, path = GPT2(**SHAPES[name]), BUILD / f"{name}.ckpt"
    optimisers, first, seconds = optimisers_for(model), 0, 0.0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        for optimiser, state in zip(optimisers, saved["optimisers"]):
            optimiser.load_state_dict(state)
        first, seconds = saved["step"], saved["seconds"]
    clock = time.time() - seconds
    every = max(1, min(500, steps // 10))   # how often to save, export and look
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, steps {first} to {steps}")
    for step in range(first, steps):
        set_rate(optimisers, step, steps)
        loss = train_step(model, optimisers, *batch(corpus, step), teacher)
        done = step + 1
        if done % every == 0 or done == steps or done in (20, 100):
            seconds = time.time() - clock
            state = dict(model=model.state_dict(), step=done, seconds=seconds,
                         optimisers=[optimiser.state_dict() for optimiser in optimisers])
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
            export(model, HERE / name, tokenizer.eos_id)
            held, floor = evaluate(model, corpus)
            print(f"{name} step {done}/{steps} {done * TOKENS_PER_STEP / 1e6:.2f}M tokens, train {loss:.4f}, "
                  f"held-out {held:.4f}, floor {floor:.4f} nats/token, {seconds:.0f} s, "
                  f"{done * TOKENS_PER_STEP / seconds:.0f} tokens/s")
            show_samples(model, tokenizer)
    return model


def train_step(model, optimisers, x, y, teacher):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x).float()
    if teacher is None:
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    else:   # every next token at once, with its probability: more to learn from each position than one token
        wanted = torch.softmax(logits_of(teacher, x), -1)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
    for optimiser in optimisers:
        optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    return loss.item()


def evaluate(model, corpus):
    """Held-out loss beside the floor, both in nats a token, over the same whole documents."""
    ids, starts, nats = corpus["held"].astype(np.int64), corpus["held_starts"], corpus["nats"]
    ends = np.append(starts[1:], len(ids) - 1)
    order = np.argsort(ends - starts)
    order = order[(ends - starts)[order] <= CONTEXT]   # the few that are too long for one window are left out
    loss = tokens = 0
    for group in np.array_split(order, len(order) // 16):
        longest = (ends - starts)[group].max()
        rows = np.full((len(group), longest + 1), -100)   # -100 is no target: padding counts for nothing
        for row, document in zip(rows, group):
            row[:ends[document] - starts[document] + 1] = ids[starts[document]:ends[document] + 1]
        rows = torch.from_numpy(rows)
        logits, targets = logits_of(model, rows[:, :-1].clamp(min=0)), rows[:, 1:]
        loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        tokens += (targets != -100).sum().item()
    return loss / tokens, nats[order].sum() / tokens


def generate(model, tokenizer, prompts, tokens=80, temperature=0.0, seed=0):
    """Continues all prompts at once, without a cache: slow and plain. Returns a list of lists of ids."""
    random = torch.Generator().manual_seed(seed)
    texts = [tokenizer.encode(prompt) for prompt in prompts]
    new, live = [[] for _ in texts], list(range(len(texts)))
    for _ in range(tokens):
        live = [i for i in live if new[i][-1:] != [tokenizer.eos_id] and len(texts[i] + new[i]) < CONTEXT]
        if not live:
            break
        rows = [texts[i] + new[i] for i in live]
        padded = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        logits = logits_of(model, padded)[range(len(rows)), [len(row) - 1 for row in rows]]
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=random)[:, 0]
        for i, token in zip(live, chosen.tolist()):
            new[i].append(token)
    return new


def show_samples(model, tokenizer):
    prompts = ["Once upon a time", "Q: What is 7 + 8?\nA:",
               "User: Make JSON for Tevobar, age 7, from Paris.\nBot:"]
    for prompt, new in zip(prompts, generate(model, tokenizer, prompts, 60, temperature=0.8)):
        print("    " + (prompt + "[]" + tokenizer.decode(new)).replace("\n", "\n    "))
    sys.stdout.flush()


# 6. Files --------------------------------------------------------------------------------------

def export(model, folder, eos):
    """A GPT-2 folder as Hugging Face writes it, in fp16: reading it takes the path a real model takes."""
    config = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=VOCABULARY,
                  n_positions=CONTEXT, n_ctx=CONTEXT, **model.shape, layer_norm_epsilon=1e-5,
                  activation_function="gelu_new", bos_token_id=eos, eos_token_id=eos,
                  tie_word_embeddings=True, torch_dtype="float16")
    write(folder / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    tensors = {}
    for name, tensor in model.state_dict().items():
        matrix = name.startswith("h.") and tensor.dim() == 2
        tensor = tensor.T if matrix else tensor   # GPT-2's Conv1D keeps its matrices as [in, out]
        tensors["transformer." + name] = tensor.contiguous().to(torch.float16).numpy()
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        header[name] = dict(dtype="F16", shape=array.shape, data_offsets=[offset, offset + array.nbytes])
        offset += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)   # so that the numbers begin at a multiple of 8
    body = b"".join(array.tobytes() for array in tensors.values())
    write(folder / "model.safetensors", struct.pack("<Q", len(head)) + head + body)


def write(path, data):
    """Writes beside it and renames, so that a reader never sees half a file."""
    path.with_suffix(".tmp").write_bytes(data)
    os.replace(path.with_suffix(".tmp"), path)


def load(folder):
    """The model in a folder that export() wrote."""
    weights = load_weights(folder)
    shape = weights.config
    model = GPT2(shape.num_layers, shape.width, shape.num_heads)
    model.load_state_dict({name: tensor.float().T if name.startswith("h.") and tensor.dim() == 2 else tensor.float()
                           for name, tensor in weights.items()})
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12000, help="training steps of the target")
    parser.add_argument("--draft-steps", type=int, default=5000, help="training steps of the draft")
    parser.add_argument("--report", action="store_true", help="only measure the models in the folders")
    parser.add_argument("--sample", metavar="PROMPT", help="only continue this prompt, greedily and at T=0.8")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.sample:
        model, tokenizer = load(HERE / "tiny"), Tokenizer.load(HERE / "tiny")
        for temperature in (0, 0.8):
            new, = generate(model, tokenizer, [arguments.sample], 200, temperature)
            print(f"[T={temperature}] {arguments.sample}|{tokenizer.decode(new)}")
        return
    corpus, tokenizer = build_corpus()
    if not arguments.report:
        target = train("tiny", corpus, tokenizer, arguments.steps)
        train("draft", corpus, tokenizer, arguments.draft_steps, teacher=target)
    from report import report   # report.py in turn uses the functions of this file
    report(corpus, tokenizer)


if __name__ == "__main__":
    main()
