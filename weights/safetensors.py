"""safetensors.py: the file in which Hugging Face keeps tensors, read without copying it.

The format: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the numbers. The header may lie (a
download that broke off), so every claim is checked against the file.
"""

import json
import math
import mmap
import os

import torch

from spec import reading, require

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path):
    """name -> tensor, each a window into the memory-mapped file: pages are read when used, and not copied.
    A tensor of a type that torch has no use for here is given as the type's name.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""    # COPY: torch wants it writable
    start = 8 + int.from_bytes(data[:8], "little")
    require(start <= size, f"its header should end at byte {start}, the file has {size}: truncated?")
    with reading(f"its header, bytes 8 to {start}"):
        header, tensors = json.loads(data[8:start]), {}
    header.pop("__metadata__", None)
    for name, claim in header.items():
        dtype, shape, (begin, end) = claim["dtype"], claim["shape"], claim["data_offsets"]
        require(all(type(n) is int for n in (*shape, begin, end)) and min(shape, default=0) >= 0 and isinstance(dtype, str),
                f"the header's entry for tensor {name} makes no sense: {claim}")
        if dtype not in DTYPES:
            tensors[name] = dtype           # GPT-2's own checkpoints carry causal masks as bytes: nobody needs them
            continue
        count, itemsize = math.prod(shape), DTYPES[dtype].itemsize
        require(0 <= begin <= end <= size - start and count * itemsize == end - begin,
                f"tensor {name} of shape {shape} needs {count * itemsize} bytes, the header gives it [{begin}, {end}) of the "
                f"{size - start} bytes that are there")
        where = {"dtype": DTYPES[dtype], "count": count, "offset": start + begin}
        tensors[name] = torch.frombuffer(data, **where).view(shape) if count else torch.empty(shape)
    return tensors
