"""GPT-2 folders, honest and lying; the model against two references; `inflate`."""

import builtins
import dataclasses
import io
import json
import math
import struct
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import assert_close
from kvcache import Batch, KVCache
from nanoserve import (
    GPT2, Engine, ModelConfig, SamplingParams, Tokenizer, Weights, gpt2_reference, load_model,
    load_weights, multiply_by)
from weights.inflate import GPT2_124M, inflate
from weights.tokenizer import BYTE_TO_CHAR

CONFIG = {"model_type": "gpt2", "vocab_size": 260, "n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 8,
          "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True}
SHAPE = ModelConfig(vocab_size=260, context_length=16, num_layers=2, num_heads=2, width=8)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
          "I64": torch.int64}
MERGES = [("a", "b"), ("Ġ", "t"), ("ab", "ab")]


def random_weights(shape=SHAPE, seed=0, dtype=torch.float64):
    """Large enough that every tensor matters: with GPT-2's own 0.02 attention would be all but uniform."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.shapes().items():
        gain = 1.0 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) else 0.0
        tensors[name] = (gain + torch.randn(size, generator=generator, dtype=torch.float64) * 0.5).to(dtype)
    return Weights(shape, tensors)


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write_safetensors(path, tensors, metadata=None, change=lambda header: header, pad=0):
    """tensors: name -> tensor, laid out in this order. `change` may turn the header into a lie."""
    code = {dtype: name for name, dtype in DTYPES.items()}
    header, data = ({} if metadata is None else {"__metadata__": metadata}), b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": code[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + tensor.numel() * tensor.element_size()]}
        data += raw(tensor)
    header = change(header)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def vocabulary():
    """260 tokens: the 256 bytes, three merges and the end of text."""
    tokens = [*BYTE_TO_CHAR, *(left + right for left, right in MERGES), "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}


def write_folder(folder, tensors=None, config=CONFIG, **how):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", random_weights(dtype=torch.float32) if tensors is None else tensors, **how)
    (folder / "vocab.json").write_text(json.dumps(vocabulary()), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES), "utf-8")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "gpt")


def refusal(load, *parts):
    """The sentence with which load() refuses, less the paths: a ValueError (else the user sees a traceback) of one line."""
    with pytest.raises(ValueError) as caught:
        load()
    sentence, text = str(caught.value), str(caught.value)
    for path in parts:
        if isinstance(path, Path):
            assert str(path) in sentence, f"{path} not in: {sentence}"
            text = text.replace(str(path), "")          # pytest names folders after tests: "missing" must not be found there
    absent = [part for part in parts if not isinstance(part, Path) and part not in text]
    assert not absent and "\n" not in sentence, f"{absent} not in: {sentence}"
    return text


# ----------------------------------------------------------------------------------------------
# honest folders


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_load_what_was_written(tmp_path, dtype, prefix):
    """Hugging Face writes GPT-2 both with and without "transformer.", in any of these types."""
    written = random_weights(dtype=DTYPES[dtype])
    weights = load_weights(write_folder(tmp_path, {prefix + name: tensor for name, tensor in written.items()}))
    assert weights.config == SHAPE
    assert set(weights) == set(written)
    for name, tensor in written.items():
        assert weights[name].dtype == DTYPES[dtype] and torch.equal(weights[name], tensor), name


def test_order_metadata_and_padding_do_not_matter(tmp_path):
    """The header may name tensors in any order, carry __metadata__ and end at an odd byte."""
    written = random_weights(dtype=torch.float32)
    for pad in range(4):
        write_folder(tmp_path, dict(reversed(written.items())), metadata={"format": "pt", "shape": "no tensor"}, pad=pad)
        loaded = load_weights(tmp_path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    write_folder(tmp_path, written, change=lambda header: dict(sorted(header.items())))     # other order than the data
    assert all(torch.equal(load_weights(tmp_path)[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 16, 16).tril(), torch.ones(1, 1, 16, 16, dtype=torch.uint8).tril(),
                                  torch.tensor([[1, 2], [3, 4]]), torch.zeros(0), torch.tensor(-10000.0)],
                         ids=["F32", "U8", "I64", "empty", "scalar"])
def test_extra_tensors_are_ignored(tmp_path, mask):
    """GPT-2's own files carry causal masks (h.0.attn.bias), and some an lm_head: neither is a weight of this model."""
    written = random_weights(dtype=torch.float32)
    extras = {"h.0.attn.bias": mask, "h.0.attn.masked_bias": mask, "lm_head.weight": written["wte.weight"] + 1}
    weights = load_weights(write_folder(tmp_path, extras | written))
    assert set(weights) == set(written)
    assert torch.equal(weights["wte.weight"], written["wte.weight"])


def test_a_float_mask_is_not_a_bias(tmp_path):
    """h.0.attn.bias (a mask) and h.0.attn.c_attn.bias (a weight) are easily taken for each other."""
    written = random_weights(dtype=torch.float32)
    extras = {f"h.{i}.attn.bias": torch.full((1, 1, 16, 16), 7.0) for i in range(2)}
    weights = load_weights(write_folder(tmp_path, extras | written))
    assert "h.0.attn.bias" not in weights
    assert torch.equal(weights["h.0.attn.c_attn.bias"], written["h.0.attn.c_attn.bias"])


def test_config_defaults(tmp_path):
    """Old config.json files lack the newer keys; GPT-2's values are meant."""
    config = {key: CONFIG[key] for key in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")}
    assert load_weights(write_folder(tmp_path, config=config)).config == SHAPE
    write_folder(tmp_path, config=config | {"layer_norm_epsilon": 0.125, "n_ctx": 99, "resid_pdrop": 0.1})
    assert load_weights(tmp_path).config.epsilon == 0.125


def test_weights_are_windows_into_the_file(folder):
    """A copy doubles the memory and the time to start. All tensors lie in one mapping, at the file's own distances."""
    path, written = folder / "model.safetensors", random_weights(dtype=torch.float32)
    weights = load_weights(folder)
    first = min(tensor.data_ptr() for tensor in weights.values())
    position = 0
    for name, tensor in written.items():
        assert weights[name].data_ptr() - first == position, name
        position += tensor.numel() * 4
    if sys.platform == "linux":
        with open("/proc/self/maps") as maps:
            mapped = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(path))]
        assert any(int(begin, 16) <= first < int(end, 16) for begin, end in mapped), "the tensors are not in the mapped file"


def test_writing_to_a_tensor_does_not_reach_the_file(folder):
    """The mapping is private: an experiment in memory must not ruin the weights on disk."""
    before = (folder / "model.safetensors").read_bytes()
    weights = load_weights(folder)
    for tensor in weights.values():
        tensor.fill_(1.0)
    assert (folder / "model.safetensors").read_bytes() == before


def test_model_does_not_copy_weights(folder):
    """In the file's own type on the CPU, the model runs on the mapped file itself."""
    weights = load_weights(folder)
    model = GPT2(weights, torch.float32, "cpu")
    for tensor in weights.values():
        tensor.fill_(1.0)               # who has a copy does not see it
    assert all(bool((tensor == 1).all()) for tensor in model.weights.values())
    for name, multiply in model.multiply.items():
        width = weights[f"{name}.weight"].shape[0] if name != "head" else model.config.width
        product = multiply(torch.ones(1, width))
        assert bool((product == width + (name != "head")).all()), name                          # + the bias of 1


def test_embedded_model_loads(tiny):
    """`python nanoserve.py` has nothing to serve without it."""
    weights, _ = tiny
    assert all(torch.isfinite(tensor.float()).all() for tensor in weights.values())


# ----------------------------------------------------------------------------------------------
# folders that are not


def test_missing_folder(tmp_path):
    """A wrong path is the commonest mistake: say which, and what would do."""
    refusal(lambda: load_weights(tmp_path / "nowhere"), tmp_path / "nowhere", "no such folder", "tiny", "gpt2")
    (tmp_path / "file").write_text("")
    refusal(lambda: load_weights(tmp_path / "file"), tmp_path / "file")


FILES = ["config.json", "model.safetensors", "vocab.json", "merges.txt"]


def load_folder(folder):
    return load_model(str(folder), torch.float32)


@pytest.mark.parametrize("name", FILES)
def test_missing_file(folder, name):
    """A download that stopped between two files: name the file that is not there."""
    (folder / name).unlink()
    refusal(lambda: load_folder(folder), folder / name, "missing")


@pytest.mark.parametrize("name", FILES)
def test_empty_file(folder, name):
    """A download that stopped at byte 0. Without its merges a tokenizer works, and tells the model nonsense."""
    (folder / name).write_bytes(b"")
    refusal(lambda: load_folder(folder), folder / name)


@pytest.mark.parametrize("name", FILES)
def test_directory_in_place_of_a_file(folder, name):
    """`git clone` and `mkdir -p` make such things."""
    (folder / name).unlink()
    (folder / name).mkdir()
    refusal(lambda: load_folder(folder), folder / name)


@pytest.mark.parametrize("name", FILES)
def test_binary_garbage(folder, name):
    """A file that is something else, say an error page or an LFS pointer in a strange encoding."""
    (folder / name).write_bytes(b"\xff\xfe\x00\xd8version https://git-lfs\n" * 3)
    refusal(lambda: load_folder(folder), folder / name)


@pytest.mark.parametrize("name", FILES)
def test_unreadable_file(folder, name, monkeypatch):
    """No permission to read: the tests may run as root, who may read all, so the refusal is played."""
    really = io.open

    def refuse(path, *args, **kwargs):
        if not isinstance(path, int) and str(path) == str(folder / name):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    refusal(lambda: load_folder(folder), folder / name, "Permission denied")


def without(key):
    return {k: v for k, v in CONFIG.items() if k != key}


@pytest.mark.parametrize("config, parts", [
    *((without(key), [key]) for key in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")),
    (CONFIG | {"n_layer": None}, ["n_layer"]),
    (CONFIG | {"n_embd": "wide"}, ["n_embd"]),
    (CONFIG | {"n_embd": [8]}, ["n_embd"]),
    (CONFIG | {"n_layer": 1e400}, ["n_layer"]),                     # json writes Infinity
    (CONFIG | {"n_layer": 2.5}, ["n_layer", "2.5"]),
    (CONFIG | {"n_head": 3}, ["n_embd", "multiple", "n_head"]),
    (CONFIG | {"n_head": 0}, ["positive"]),
    (CONFIG | {"n_layer": 0}, ["positive"]),
    (CONFIG | {"vocab_size": -300}, ["positive"]),
    (CONFIG | {"layer_norm_epsilon": 0}, ["layer_norm_epsilon"]),
    (CONFIG | {"layer_norm_epsilon": math.nan}, ["layer_norm_epsilon"]),
    (CONFIG | {"model_type": "llama"}, ["model_type", "'llama'", "'gpt2'"]),
    (CONFIG | {"activation_function": "relu"}, ["activation_function", "'relu'", "'gelu_new'"]),
    (CONFIG | {"tie_word_embeddings": False}, ["tie_word_embeddings", "False"]),
    (CONFIG | {"scale_attn_weights": False}, ["scale_attn_weights", "False"]),
    (CONFIG | {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "True"]),
    ([1, 2], []), ("gpt2", []), (None, []), (7, []), ({}, ["vocab_size"]),
], ids=lambda value: str(value).replace(str(CONFIG)[1:-1], "")[-50:] if isinstance(value, list) else "")
def test_bad_config(folder, config, parts):
    """A wrong size, or an option that changes the function without changing a shape, would give quietly wrong text."""
    (folder / "config.json").write_text(json.dumps(config))
    refusal(lambda: load_weights(folder), folder / "config.json", *parts)


def test_config_is_not_json(folder):
    """A half-written config.json."""
    for text in ("{", "{'n_layer': 2}", '{"n_layer": 2,}', "not json", "\x00"):
        (folder / "config.json").write_text(text)
        refusal(lambda: load_weights(folder), folder / "config.json")


def test_truncated_anywhere(folder):
    """A broken download, cut at any byte: before, within and after the header. Never a traceback, never a short tensor."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    for size in [*range(0, 20), header_end - 1, header_end, header_end + 1, len(data) - 4, len(data) - 1]:
        path.write_bytes(data[:size])
        sentence = refusal(lambda: load_weights(folder), path)
        if 8 <= size < header_end:
            assert str(header_end) in sentence and str(size) in sentence, sentence
        if size >= header_end:
            assert "tensor" in sentence and "bytes" in sentence, sentence


@pytest.mark.parametrize("length", [0, 1, 10, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_header_length_lies(folder, length):
    """The first 8 bytes decide how much is read: too little, too much, or negative to a careless reader."""
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refusal(lambda: load_weights(folder), path, "header")


ENTRY = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}


@pytest.mark.parametrize("header", [
    b"", b"null", b"[]", b"[1, 2]", b"7", b'"text"', b"true", b"{", b'{"a": }', b"\xff\xfe", b"not json", b"NaN", b"[" * 100_000,
    {"ln_f.bias": None}, {"ln_f.bias": []}, {"ln_f.bias": [1, 2, 3]}, {"ln_f.bias": "F32"}, {"ln_f.bias": 7}, {"ln_f.bias": {}},
    *({"ln_f.bias": {k: v for k, v in ENTRY.items() if k != key}} for key in ENTRY),
    *({"ln_f.bias": ENTRY | {"shape": shape}} for shape in (None, 8, "8", ["8"], [None], [[8]], {}, [8.0], [-8], [-2, -4],
                                                            [True] * 3, [float("inf")], [10**400], [0])),
    *({"ln_f.bias": ENTRY | {"data_offsets": offsets}} for offsets in (
        None, 0, [], [0], [0, 32, 64], ["0", "32"], [None, 32], [0.0, 32.0], [[0], [32]], {"a": 0, "b": 32}, "ab")),
    *({"ln_f.bias": ENTRY | {"dtype": dtype}} for dtype in (None, 7, ["F32"], {"F32": 1}, "F31", "I32", "f32", "")),
], ids=lambda header: str(header)[:70])
def test_header_of_the_wrong_form(folder, header):
    """JSON of any shape can stand there. One sentence with the file's name; never the parser's own exception."""
    path = folder / "model.safetensors"
    weights = random_weights(dtype=torch.float32)
    del weights["ln_f.bias"]
    change = (lambda honest: header) if isinstance(header, bytes) else (lambda honest: honest | header)
    write_safetensors(path, weights, change=change)
    refusal(lambda: load_weights(folder), path)


@pytest.mark.parametrize("offsets", [[10**9, 10**9 + 32], [-32, 0], [-8, 24], [0, 28], [0, 36], [0, 0], [32, 0], [0, 10**30],
                                     ["end", 32], ["end", 0]], ids=str)
def test_offsets_lie(folder, offsets):
    """A tensor beyond the file, before it, or of another size than its shape needs: name tensor, need and claim."""
    path = folder / "model.safetensors"
    weights = random_weights(dtype=torch.float32)
    total = sum(tensor.numel() * 4 for tensor in weights.values())
    if offsets[0] == "end":                                         # just past the last byte, and the last 32 bytes less one
        offsets = [total - 31, total + 1] if offsets[1] else [total, total + 32]

    def lie(header):
        header["ln_f.bias"]["data_offsets"] = offsets
        return header

    write_safetensors(path, weights, change=lie)
    refusal(lambda: load_weights(folder), path, "ln_f.bias", "[8]", "32 bytes", f"[{offsets[0]}, {offsets[1]})", f"{total} bytes")


@pytest.mark.parametrize("name", ["wte.weight", "wpe.weight", "h.1.mlp.c_proj.bias", "ln_f.weight"])
def test_missing_tensor(folder, name):
    """A checkpoint of fewer layers, or of another architecture."""
    weights = random_weights(dtype=torch.float32)
    del weights[name]
    write_safetensors(folder / "model.safetensors", weights)
    refusal(lambda: load_weights(folder), folder / "model.safetensors", name, "missing")


def test_tensor_of_an_unsupported_type(folder):
    """A quantised checkpoint (I8) has all tensors: "missing" would send its owner looking for the wrong thing."""
    weights = random_weights(dtype=torch.float32)
    weights["h.0.mlp.c_fc.weight"] = torch.zeros(8, 32, dtype=torch.uint8)
    write_safetensors(folder / "model.safetensors", weights)
    sentence = refusal(lambda: load_weights(folder), folder / "model.safetensors", "h.0.mlp.c_fc.weight", "U8")
    assert "missing" not in sentence


@pytest.mark.parametrize("name, found", [("wte.weight", (299, 8)), ("wpe.weight", (17, 8)), ("h.0.attn.c_attn.weight", (24, 8)),
                                         ("h.1.mlp.c_fc.bias", (8,)), ("ln_f.bias", (1, 8)), ("h.0.ln_1.weight", ())])
def test_wrong_shape(folder, name, found):
    """A transposed linear layer or another size: some of these broadcast, and would run."""
    weights = random_weights(dtype=torch.float32)
    weights[name] = torch.zeros(found)
    write_safetensors(folder / "model.safetensors", weights)
    refusal(lambda: load_weights(folder), folder / "model.safetensors", name, f"expected shape {list(SHAPE.shapes()[name])}",
            f"found {list(found)}")


def changed(**change):
    """The vocabulary with other ids; None takes a token out."""
    return {token: i for token, i in (vocabulary() | change).items() if i is not None}


@pytest.mark.parametrize("vocab, parts", [
    ("{", []), ("[]", []), ("null", []), ("7", []), ('"text"', []), ("not json", []), ("{}", []),
    (changed(**{"<|endoftext|>": None}), ["<|endoftext|>"]),
    (changed(a=None), []),                                          # the byte "a" could not be encoded
    (changed(ab=None), ["ab"]),                                     # merges.txt makes it
    (changed(abab="258"), []), (changed(abab=-1), []), (changed(abab=1.5), []), (changed(abab=[1]), []),
    (changed(abab=260), ["260"]),                                   # the model has no such row: IndexError in the first step
    (changed(abab=0), []),                                          # two tokens, one id: it decodes to one of them only
    (changed(**{"日": 258, "abab": None}), []),                     # not in the alphabet of bytes
], ids=["cut", "list", "null", "number", "string", "text", "no tokens", "no end of text", "no a", "no ab", "string id", "negative id",
        "float id", "list id", "id too large", "id twice", "strange character"])
def test_bad_vocabulary(folder, vocab, parts):
    """vocab.json broken, or of another model: found when loading, not when some text needs the token."""
    (folder / "vocab.json").write_text(vocab if isinstance(vocab, str) else json.dumps(vocab), "utf-8")
    refusal(lambda: load_folder(folder), *parts, *([] if "260" in parts else [folder]))


@pytest.mark.parametrize("line", ["a", "a b ab", "a  b", " a", "a ", "日 本", "a z", "abab ab", "zz a"], ids=repr)
def test_bad_merges(folder, line):
    """merges.txt broken, or of another model: a merge with no id is a KeyError in the first prompt that needs it."""
    with open(folder / "merges.txt", "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    refusal(lambda: load_folder(folder), folder / "merges.txt", line.strip())


def test_truncated_merges(folder):
    """A download cut at any byte: what is left is a tokenizer that splits words as the model never saw them."""
    data = (folder / "merges.txt").read_bytes()
    for size in range(len(data) - 1):                               # the last newline alone is no loss
        (folder / "merges.txt").write_bytes(data[:size])
        refusal(lambda: load_folder(folder), folder / "merges.txt")


@pytest.mark.parametrize("text", ["#version: 0.2\r\na b\r\nĠ t\r\nab ab\r\n", "a b\nĠ t\nab ab", "#version: 0.2\na b\nĠ t\nab ab\n\n"],
                         ids=["crlf", "no version, no newline at the end", "blank line at the end"])
def test_merges_as_found_in_the_wild(folder, text):
    """Git on Windows turns \\n into \\r\\n; some tools drop the first line or the last newline."""
    (folder / "merges.txt").write_bytes(text.encode())
    assert Tokenizer.load(folder).rank == {(b"a", b"b"): 0, (b" ", b"t"): 1, (b"ab", b"ab"): 2}


def test_ids_without_a_text(tmp_path):
    """Many GPT-2s pad their embedding (50,257 -> 50,304), and "gpt2" here pads tiny's: drawing such an id must not crash the step."""
    shape = ModelConfig(vocab_size=300, context_length=16, num_layers=2, num_heads=2, width=8)
    weights = random_weights(shape, dtype=torch.float32)
    weights["wte.weight"][260:] *= 10                               # drawn soon
    engine = Engine(model=str(write_folder(tmp_path, weights, CONFIG | {"vocab_size": 300})), num_blocks=8)
    assert engine.tokenizer.encode("abab") == [258]
    [completion] = engine.generate(["abab"], SamplingParams(max_tokens=10, seed=0, ignore_eos=True))
    assert completion.finish_reason in ("length", "error") and isinstance(completion.text, str)


# ----------------------------------------------------------------------------------------------
# the model


def independent_gpt2(weights, tokens):
    """GPT-2 from torch's own parts, in float64: LayerNorm, Linear, GELU and attention as torch defines them."""
    c, w = weights.config, {name: tensor.double() for name, tensor in weights.items()}
    x = F.embedding(torch.tensor(tokens), w["wte.weight"]) + w["wpe.weight"][:len(tokens)]
    for i in range(c.num_layers):
        at = {name[len(f"h.{i}."):]: tensor for name, tensor in w.items() if name.startswith(f"h.{i}.")}
        y = F.layer_norm(x, [c.width], at["ln_1.weight"], at["ln_1.bias"], c.epsilon)
        qkv = F.linear(y, at["attn.c_attn.weight"].T, at["attn.c_attn.bias"])
        q, k, v = (third.reshape(len(tokens), c.num_heads, -1).movedim(1, 0) for third in qkv.split(c.width, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).movedim(0, 1).reshape(len(tokens), c.width)
        x = x + F.linear(y, at["attn.c_proj.weight"].T, at["attn.c_proj.bias"])
        y = F.layer_norm(x, [c.width], at["ln_2.weight"], at["ln_2.bias"], c.epsilon)
        y = F.gelu(F.linear(y, at["mlp.c_fc.weight"].T, at["mlp.c_fc.bias"]), approximate="tanh")
        x = x + F.linear(y, at["mlp.c_proj.weight"].T, at["mlp.c_proj.bias"])
    return F.linear(F.layer_norm(x, [c.width], w["ln_f.weight"], w["ln_f.bias"], c.epsilon), w["wte.weight"]).numpy()


SHAPES = [SHAPE, ModelConfig(50, 24, 3, 1, 12, epsilon=0.1), ModelConfig(31, 40, 1, 6, 30)]


@pytest.mark.parametrize("shape", SHAPES, ids=["2 heads", "1 head, large epsilon", "6 heads"])
@pytest.mark.parametrize("length", [1, 2, 16])
def test_reference_is_gpt2(shape, length):
    """Everything else is compared with gpt2_reference: if it is not GPT-2, nothing is."""
    weights = random_weights(shape, seed=1)
    tokens = np.random.default_rng(2).integers(shape.vocab_size, size=length).tolist()
    assert_close(gpt2_reference(weights, tokens), independent_gpt2(weights, tokens), 1e-11,
                 "float64: 1e-16 per operation, some thousand operations on numbers up to 10")


# Sequence -> its chunks: number of tokens, and how many of the last rows want logits. One list per step.
SCHEDULE = [
    {"a": (5, 0), "b": (1, 1)},                             # a's prompt begins, b is a prompt of one token
    {"a": (6, 1), "b": (1, 1), "c": (7, 7)},                # a's prompt ends; b decodes; c wants every row, as drafts do
    {"c": (1, 1), "a": (1, 1), "b": (1, 1), "d": (4, 0)},   # three decodes of unlike length, another order of rows
    {"d": (4, 2), "a": (2, 2), "b": (4, 0)},                # three chunks, two of them of one size
    {"d": (1, 0), "b": (1, 0), "a": (2, 1), "c": (2, 2)},
]


# The tolerance is a multiple of the rounding error of the type, relative to the largest logit: the residual stream is
# rounded a dozen times on its way, and errors of roundings add up like random steps. A wrong mask, position, slot or head moves
# logits by a good part of their size (see test_tolerance_tells_right_from_wrong).
ROUNDINGS = 16


@pytest.mark.parametrize("attention", ["numpy", "torch"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ragged_batch_is_the_reference(attention, block_size, dtype):
    """Chunks, decodes and neighbours must not change what a sequence gets; unwritten slots are NaN, so reading one shows."""
    check_schedule(attention, block_size, dtype)


def check_schedule(attention, block_size, dtype, ahead=0):
    """ahead: compare with the logits of that many positions earlier, which is wrong unless it is 0."""
    shape = ModelConfig(vocab_size=40, context_length=16, num_layers=2, num_heads=2, width=16, epsilon=0.1)
    weights = random_weights(shape, seed=3, dtype=dtype)
    model = GPT2(weights, dtype, "cpu")
    rng = np.random.default_rng(4)
    tokens = {name: rng.integers(40, size=16).tolist() for name in "abcd"}
    expected = {name: gpt2_reference(weights, sequence) for name, sequence in tokens.items()}
    num_blocks = 4 * (16 // block_size) + 3
    blocks = iter(rng.permutation(num_blocks).tolist())         # tables are in no order, and interleave
    tables, done = {name: [] for name in "abcd"}, dict.fromkeys("abcd", 0)
    cache = KVCache(2, num_blocks, block_size, 2, 8, dtype, "cpu", attention)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    compared = 0
    for step in SCHEDULE:
        for name, (n, _) in step.items():
            while len(tables[name]) * block_size < done[name] + n:
                tables[name].append(next(blocks))
        batch = Batch.build([(tokens[name][done[name]:done[name] + n], done[name], tables[name], wanted)
                             for name, (n, wanted) in step.items()], block_size)
        logits = model.forward(batch, cache)
        assert logits.dtype == dtype and logits.shape == (sum(wanted for _, wanted in step.values()), 40)
        rows = []
        for name, (n, wanted) in step.items():
            done[name] += n
            rows += [expected[name][position - ahead] for position in range(done[name] - wanted, done[name])]
        if rows:
            scale = max(np.abs(logits).max() for logits in expected.values())
            assert_close(logits.double().numpy(), np.array(rows), ROUNDINGS * torch.finfo(dtype).eps * scale,
                         f"{ROUNDINGS} roundings of {dtype} at {scale:.1f}")
        compared += len(rows)
    assert compared == sum(wanted for step in SCHEDULE for _, wanted in step.values())


def test_tolerance_tells_right_from_wrong():
    """A tolerance that a wrong answer passes is no test: the neighbouring position's logits must fail even in bfloat16."""
    with pytest.raises(AssertionError, match="tolerance"):
        check_schedule("torch", 4, torch.bfloat16, ahead=1)


@pytest.mark.parametrize("attention", ["numpy", "torch"])
def test_a_shared_prefix_is_read_not_computed(attention):
    """A prefix-cache hit starts in the middle: the rest attends to blocks that another sequence wrote."""
    weights = random_weights(SHAPE, seed=5)
    model, cache = GPT2(weights, torch.float64, "cpu"), KVCache(2, 6, 4, 2, 4, torch.float64, "cpu", attention)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    prefix, ends = [5, 250, 7, 99, 0, 259, 8, 8], ([1, 2, 3], [4, 5])
    model.forward(Batch.build([(prefix + ends[0], 0, [3, 5, 0], 1)], 4), cache)
    logits = model.forward(Batch.build([(ends[1], 8, [3, 5, 2], 2)], 4), cache)
    assert_close(logits, gpt2_reference(weights, prefix + ends[1])[8:], 1e-11, "float64")


# ----------------------------------------------------------------------------------------------
# inflate


BIGGER = [
    ModelConfig(vocab_size=310, context_length=20, num_layers=3, num_heads=4, width=32),        # heads x2, dims x2
    ModelConfig(vocab_size=261, context_length=16, num_layers=2, num_heads=6, width=24),        # heads only
    ModelConfig(vocab_size=290, context_length=16, num_layers=5, num_heads=2, width=24),        # dims only
]


@pytest.mark.parametrize("big", BIGGER, ids=["heads and dims", "heads", "dims"])
@pytest.mark.parametrize("seed", [0, 1])
def test_inflate_keeps_the_function(big, seed):
    """The labs on "gpt2" claim tiny's text at GPT-2's cost. Also: no new token may ever be drawn."""
    small = random_weights(SHAPE, seed=seed)
    tokens = np.random.default_rng(seed).integers(260, size=16).tolist()
    inflated = inflate(small, torch.float64, vars(big))
    assert inflated.config == big
    assert {name: tuple(tensor.shape) for name, tensor in inflated.items()} == big.shapes()
    logits = gpt2_reference(inflated, tokens)
    assert_close(logits[:, :260], gpt2_reference(small, tokens), 1e-10, "float64: the same sums in another order")
    assert_close(logits[:, 260:], np.full((16, big.vocab_size - 260), -100.0), 1e-10, "float64: 1 times -100, and zeros")


def test_inflate_uses_every_copy():
    """Zeros in the new part would be the same function for a fraction of the work: then "real cost" would be false."""
    inflated = inflate(random_weights(), torch.float64, vars(BIGGER[0]))
    for name, tensor in inflated.items():
        adds_nothing = name.startswith("h.2.") and "c_proj" in name         # the layer that small does not have
        outside = name == "wte.weight" and 260 or name == "wpe.weight" and 16 or len(tensor)
        assert (tensor[:outside] == 0).all() == adds_nothing, name
        if not adds_nothing and name not in ("ln_f.weight", "ln_f.bias"):
            assert (tensor[:outside] != 0).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inflate_in_the_type_asked_for(dtype):
    """The engine asks for its own type; a wrong one costs a second copy of 124M numbers."""
    inflated = inflate(random_weights(), dtype, vars(BIGGER[0]))
    assert {tensor.dtype for tensor in inflated.values()} == {dtype}


@pytest.mark.parametrize("change", [{"width": 24}, {"num_heads": 3, "width": 24}, {"width": 20}, {"width": 4},
                                    {"num_heads": 2, "width": 8}, {"vocab_size": 259}, {"context_length": 15}, {"num_layers": 1}],
                         ids=str)
def test_inflate_refuses_what_it_can_not_do(change):
    """A shape that is no multiple, or smaller: one sentence, and not a broken model (or one layer less without a word)."""
    big = dataclasses.replace(ModelConfig(vocab_size=300, context_length=16, num_layers=2, num_heads=4, width=16), **change)
    refusal(lambda: inflate(random_weights(), torch.float64, vars(big)), "inflate")


def test_inflate_to_gpt2(tiny):
    """model="gpt2" is sold as exactly GPT-2 124M, and as tiny's function."""
    weights, _ = tiny
    big = inflate(weights, torch.float64)
    assert vars(big.config).items() >= GPT2_124M.items()
    assert sum(tensor.numel() for tensor in big.values()) == 124_439_808
    assert big["h.11.mlp.c_fc.weight"].shape == (768, 3072) and big["wte.weight"].shape == (50257, 768)
    tokens = [1, 500, 1022, 7]
    logits = gpt2_reference(big, tokens)
    V = weights.config.vocab_size
    assert_close(logits[:, :V], gpt2_reference(weights, tokens), 1e-9, "float64: sums of 768 instead of 128 terms")
    assert_close(logits[:, V:], np.full((4, 50257 - V), -100.0), 1e-9, "float64")


# ----------------------------------------------------------------------------------------------
# linear layers: packed where the CPU can, in float32 where it has no instructions for the type


def without_packing(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def without_the_operator(monkeypatch):
    def reorder(matrix, rows):
        raise RuntimeError("no such instructions")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", reorder)


@pytest.mark.parametrize("lack", [lambda monkeypatch: None, without_packing, without_the_operator], ids=["all", "plain", "operator"])
@pytest.mark.parametrize("shape", [(768, 2304), (48, 32)], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_linear_layer_is_right_to_the_last_bits_of_its_type(dtype, shape, with_bias, lack, monkeypatch):
    """Against float64, in units of the type's precision. The result is rounded once: half a unit of itself. Before that, n products
    are added up in the type, or in float32 if it has 16 bits: n roundings, each of at most half a unit of the sum of the products'
    sizes. They go either way, so they add up like sqrt(n), not n."""
    lack(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x, matrix, bias = (torch.randn(*size, generator=generator).clamp(-4, 4).to(dtype) for size in ((5, shape[0]), shape, shape[1:]))
    check_linear(multiply_by(matrix, bias if with_bias else None), x, matrix, bias * with_bias)


def check_linear(multiply, x, matrix, bias):
    dtype, shape, product = x.dtype, matrix.shape, multiply(x)
    assert product.dtype == dtype and product.shape == (5, shape[1])
    exact = x.double() @ matrix.double() + bias.double()
    sizes = x.double().abs() @ matrix.double().abs() + bias.double().abs()
    sums = torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype)
    bound = torch.finfo(dtype).eps * exact.abs() + shape[0] ** 0.5 * sums.eps * sizes
    off = (product.double() - exact).abs()
    assert bool((off <= bound).all()), f"off by {(off / bound).max():.2f} times the bound"


def test_that_check_fails_for_a_coarser_product():
    """11 bits, as some GPUs multiply float32 if they are let."""
    generator = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(*size, generator=generator) for size in ((5, 768), (768, 2304)))
    coarse = matrix.half().float()
    with pytest.raises(AssertionError, match="times the bound"):
        check_linear(lambda x: x.half().float() @ coarse, x, matrix, torch.zeros(2304))


@pytest.fixture
def plain_multiplies(monkeypatch):
    """The type of each plain multiply from here on."""
    seen, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(x.dtype) or linear(x, *rest))
    return seen


def test_a_type_that_the_cpu_does_not_know_is_multiplied_in_float32(monkeypatch, plain_multiplies):
    """The plain multiply in such a type is slow beyond use; what is called has to be float32's."""
    without_packing(monkeypatch)
    for dtype in (torch.bfloat16, torch.float16):
        matrix, x = torch.ones(512, 1024, dtype=dtype), torch.ones(2, 512, dtype=dtype)
        multiply, alive = multiply_by(matrix), weakref.ref(matrix)
        assert multiply(x).dtype == dtype
        del matrix
        assert not alive()              # it is not kept beside its float32 copy
    assert plain_multiplies == [torch.float32] * 2


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_without_packing_the_text_is_the_same(monkeypatch, plain_multiplies):
    """Machines without oneDNN take the plain multiply, others never do: the same greedy tokens on the 124M shape."""
    params = SamplingParams(max_tokens=8, temperature=0)
    [packed] = Engine(model="gpt2", num_blocks=8).generate("Once upon a time", params)
    assert not plain_multiplies
    without_packing(monkeypatch)
    engine = Engine(model="gpt2", num_blocks=8)
    assert engine.generate("Once upon a time", params)[0].token_ids == packed.token_ids
    assert plain_multiplies
