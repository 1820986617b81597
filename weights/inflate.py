"""inflate.py: a small GPT-2 in a bigger GPT-2's shape, without changing what it says.

EngineConfig(model="gpt2") is tiny, inflated: sensible texts, lengths and stops at the cost of 124M parameters, with nothing to
download. It says nothing about GPT-2's quality.
"""

import dataclasses

import torch

# Dimensions: E embedding width of the small model, r how often it is repeated.

GPT2_124M = {"vocab_size": 50257, "context_length": 1024, "num_layers": 12, "num_heads": 12, "width": 768}


def inflate(weights, dtype=torch.float32, shape=GPT2_124M):
    """The same function in a bigger shape: real work, real lengths, and the small model's text. -> Weights.

    Width: the residual stream is repeated r times. Mean and variance of a vector repeated are the vector's, so LayerNorm
    is exact; a matrix that reads a repeated vector is tiled and divided by r. Depth: the new layers compute everything
    and add zero. Vocabulary: the new tokens have to lose always, but the head has no bias; so the last LayerNorm puts the
    constant 1 into the first repeated dimension, where the new tokens' embedding is -100 (logit -100), and takes 1 off
    dimension 0, which every old token holds twice.
    """
    small = weights.config
    big = dataclasses.replace(small, **shape)
    old_D, new_D = small.width // small.num_heads, big.width // big.num_heads
    (r, *remainders), (head_copies, rest), (dim_copies, last) = (
        divmod(large, little) for large, little in ((big.width, small.width), (big.num_heads, small.num_heads), (new_D, old_D)))
    if any((*remainders, rest, last)) or r < 2 or min(
            big.vocab_size - small.vocab_size, big.context_length - small.context_length, big.num_layers - small.num_layers) < 0:
        raise ValueError(f"can't inflate {small} to {big}: width, heads and head_dim must be multiples, and nothing smaller")

    def repeat(x):                          # [..., E] -> [..., r E]: what writes to the residual stream, or to the MLP
        return x.repeat(*[1] * (x.dim() - 1), r)

    def read(x):                            # [in, out] -> [r in, out]: the input comes r times, so each copy counts 1/r
        return x.repeat(r, 1) / r

    def heads(x):                           # [..., E] -> [..., r E]: repeat the heads, and the dims within each head
        x = x.unflatten(-1, (small.num_heads, old_D))
        return x.repeat(*[1] * (x.dim() - 2), head_copies, dim_copies).flatten(-2)

    def qkv(x):                             # [..., 3 E] -> [..., 3 r E]; q.k is a sum over dim_copies times the dims ...
        q, k, v = x.chunk(3, -1)
        q = q * (new_D / old_D) ** 0.5 / dim_copies         # ... and is divided by the root of another head_dim
        return torch.cat([heads(q), heads(k), heads(v)], -1)

    old = {name: tensor.double() for name, tensor in weights.items()}
    new = {name: torch.zeros(shape, dtype=dtype) for name, shape in big.shapes().items()}
    for name in ("wte.weight", "wpe.weight"):
        new[name][:len(old[name])] = repeat(old[name])
    for i in range(big.num_layers):
        parts = {"ln_1": (repeat, repeat), "attn.c_attn": (lambda x: qkv(read(x)), qkv),
                 "ln_2": (repeat, repeat), "mlp.c_fc": (lambda x: repeat(read(x)), repeat)}
        if i < small.num_layers:            # a layer beyond the last does all the work of the last, and its outputs stay 0
            parts |= {"attn.c_proj": (lambda x: repeat(heads(x.T).T / r), repeat),
                      "mlp.c_proj": (lambda x: repeat(read(x)), repeat)}
        for part, (matrix, bias) in parts.items():
            source = f"h.{min(i, small.num_layers - 1)}.{part}"
            new[f"h.{i}.{part}.weight"][:] = matrix(old[f"{source}.weight"])
            new[f"h.{i}.{part}.bias"][:] = bias(old[f"{source}.bias"])
    E = small.width
    new["ln_f.weight"][:E], new["ln_f.bias"][:E] = old["ln_f.weight"], old["ln_f.bias"]
    new["ln_f.bias"][E], new["wte.weight"][small.vocab_size:, E] = 1.0, -100.0
    new["ln_f.bias"][0] -= 1.0
    return type(weights)(big, new)
