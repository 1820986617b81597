"""kernels.cu without a GPU: compiled with g++ through cuda_on_cpu.h, called as `cupy.RawModule`'s kernels are.

    module = CpuModule(code, ["reshape_and_cache", "paged_attention<half, 64, 1>"], seed=1)
    kernel = module.get_function("paged_attention<half, 64, 1>")
    kernel((heads, tiles, splits), (128,), (out.data_ptr(), ..., np.float32(scale), np.int32(num_heads)))

So one launcher serves both: pointers are plain ints (CPU tensors here, CUDA tensors there), a Python int arrives as 64
bits, a Python float as a double, a NumPy scalar as what it is. One thing is stricter here. A GPU reads as many bytes as
the parameter has, whatever was passed; here a number of another kind or size is an error that names the argument.

`run_sanitized` runs a Python program in which every CpuModule is built with a sanitizer.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
HEADER = HERE / "cuda_on_cpu.h"
BUILD = HERE / "build"
COMPILER = "g++"
# Half precision is compiled to the processor's own conversions where it needs to be asked for them (x86-64 since 2012).
F16C = ("-mf16c",) if platform.machine() == "x86_64" else ()
SANITIZE = "CUDA_ON_CPU_SANITIZE"  # environment variable that run_sanitized sets: "address" or "thread"
OPTIONS = {
    "": ("-O2",),
    "address": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
}
ALWAYS = (
    "-std=c++17", "-shared", "-fPIC", *F16C,
    "-fno-strict-aliasing",  # kernels read 16 bytes of any type as uint4; nvcc allows that
    "-fvisibility=hidden", "-fno-gnu-unique",  # libraries in one process share nothing, not even statics of templates
)


@functools.cache
def unavailable_reason():
    """Why kernels can't be compiled here, or "" if they can."""
    if not shutil.which(COMPILER):
        return f"{COMPILER} is not installed"
    command = [COMPILER, *ALWAYS, "-fsyntax-only", "-x", "c++", "-"]
    source = f'#include "{HEADER}"\n'
    probe = subprocess.run(command, input=source, text=True, capture_output=True, env=plain_environment())
    if probe.returncode == 0:
        return ""
    first_error = next((line for line in probe.stderr.splitlines() if "error" in line), probe.stderr.strip())
    return f"{COMPILER} can't compile cuda_on_cpu.h: {first_error}"


def available():
    return not unavailable_reason()


class CpuModule:
    """Kernels of `code`, one per name in `name_expressions` (templates with their arguments, as RawModule has them).

    seed 0 runs threads and blocks in order, any other number in an order of its own; see cuda_on_cpu.h. `options` are
    g++'s; None picks optimised code, or what run_sanitized asks for. Builds are kept in tests/build, by content.
    """

    def __init__(self, code, name_expressions, options=None, seed=0):
        self.seed = seed
        self.symbols = {name: f"kernel_{i}" for i, name in enumerate(name_expressions)}
        options = OPTIONS[os.environ.get(SANITIZE, "")] if options is None else tuple(options)
        self._library = ctypes.CDLL(str(build(translation_unit(code, self.symbols), options)))

    def get_function(self, name):
        if name not in self.symbols:
            raise KeyError(f"kernel {name!r} is not among this module's name_expressions: {', '.join(self.symbols)}")
        return CpuKernel(self._library, name, self.symbols[name], self.seed)


class CpuKernel:
    class Launch(ctypes.Structure):  # cpu::Launch
        _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                    ("shared_bytes", ctypes.c_uint), ("seed", ctypes.c_uint)]

    one_at_a_time = threading.Lock()  # the header's state is global, and ctypes lets other threads run during a call

    def __init__(self, library, name, symbol, seed):
        self.name, self.seed = name, seed
        self._run = library[symbol]
        self._run.argtypes, self._run.restype = (ctypes.POINTER(self.Launch), ctypes.c_void_p), ctypes.c_char_p
        signature = library[f"{symbol}_signature"]
        signature.restype = ctypes.c_char_p
        self.parameters = signature().decode().split()  # such as ["p8", "f4", "i4"]

    def __call__(self, grid, block, args, *, shared_mem=0):
        how = self.Launch(three(grid), three(block), shared_mem, self.seed)
        self._check_shape(how)
        values = [as_cupy_passes(a) for a in args]
        self._check_types(values)
        pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
        with self.one_at_a_time:
            error = self._run(how, pointers)
        if error:
            raise RuntimeError(f"kernel {self.name}: {error.decode()}")

    def _check_shape(self, how):
        """What cuLaunchKernel refuses, so that it does not first show on a GPU."""
        grid, block = list(how.grid), list(how.block)
        if min(grid + block) < 1:
            raise ValueError(f"kernel {self.name}: grid {grid} or block {block} is empty; a GPU refuses such a launch")
        if max(grid[1:]) > 65535 or grid[0] >= 2**31:
            raise ValueError(f"kernel {self.name}: grid {grid} is above a GPU's limit of (2**31 - 1, 65535, 65535)")
        if np.prod(block) > 1024 or block[2] > 64:
            raise ValueError(f"kernel {self.name}: block {block} is above a GPU's limit of 1024 threads, 64 in z")

    def _check_types(self, values):
        if len(values) != len(self.parameters):
            counts = f"{len(self.parameters)} parameters, but got {len(values)} arguments"
            raise TypeError(f"kernel {self.name} has {counts}")
        for i, (value, parameter) in enumerate(zip(values, self.parameters)):
            kind, size = parameter[0], int(parameter[1:])
            kinds = {"p": "iu", "i": "iub", "f": "f", "s": value.dtype.kind}[kind]
            if value.dtype.kind not in kinds or value.dtype.itemsize != size:
                what = {"p": "pointer", "i": "integer", "f": "float", "s": "struct"}[kind]
                raise TypeError(
                    f"kernel {self.name}, argument {i}: a {size}-byte {what} is expected, but {value.dtype} was "
                    "passed; a Python int goes as int64, a Python float as double: use np.int32(n), np.float32(x)"
                )


def three(shape):
    """A grid or block as CuPy takes it, filled up to three dimensions.

    >>> list(three((2, 3)))
    [2, 3, 1]
    """
    return (ctypes.c_uint * 3)(*shape, *(1,) * (3 - len(shape)))


def as_cupy_passes(value):
    """The argument's bytes, as a 0-d array."""
    if isinstance(value, (bool, int, float, np.generic)):
        kind = np.bool_ if isinstance(value, bool) else {int: np.int64, float: np.float64}.get(type(value))
        return np.array(value, dtype=kind)
    raise TypeError(f"a kernel takes numbers and NumPy scalars, not {type(value).__name__}: pass tensor.data_ptr()")


def translation_unit(code, symbols):
    """The C++ file to compile: header, the kernels as they are, one entry point for each.

    * The unnamed namespace makes all of it private to the file. Without it the shared arrays of templates would be
      emitted in another way than those of plain kernels, and could not lie in one section with them.
    * `#line` makes every message point into kernels.cu.
    * `extern __shared__ T name[]` is the one thing no macro can turn into C++: here it becomes a pointer to the memory
      that the launch asked for, still on its line.
    """
    dynamic = re.compile(r"extern\s+__shared__\s+(?:alignas\(\d+\)\s+)?([\w:]+)\s+(\w+)\s*\[\s*\]\s*;")
    code = dynamic.sub(r"\1* const \2 = reinterpret_cast<\1*>(cpu::dynamic_shared.get());", code)
    entries = "".join(f"KERNEL({symbol}, {name})\n" for name, symbol in symbols.items())
    return (f'#include "{HEADER.name}"\nnamespace {{\n#line 1 "kernels.cu"\n{code}\n}}\n'
            f'#line 1 "name_expressions"\n{entries}')


def build(source, options):
    """The compiled library's path. Safe against other test runs: each builds a file of its own, then renames it."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, env=plain_environment()).stdout
    content = "\n".join([source, HEADER.read_text(), version, *ALWAYS, *options])
    library = BUILD / f"kernels-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    BUILD.mkdir(exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=BUILD, suffix=".so.tmp")
    os.close(handle)
    try:
        command = [COMPILER, *ALWAYS, *options, "-I", str(HERE), "-x", "c++", "-", "-o", unfinished]
        done = subprocess.run(command, input=source, text=True, capture_output=True, env=plain_environment())
        if done.returncode != 0:
            raise RuntimeError(f"{COMPILER} could not compile the kernels:\n{done.stderr.strip()}")
        os.replace(unfinished, library)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return library


def plain_environment():
    """The environment without a sanitizer preloaded: the compiler itself needs none, and is slow under it."""
    return {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}


# ----------------------------------------------------------------------------------------------
# sanitizers
#
# The kernels are a library that Python loads, but a sanitizer's runtime has to be in the process from its start: it
# replaces malloc, so that every array made later (NumPy's and torch's CPU tensors too) has fenced ends. Hence a new
# process with LD_PRELOAD. "address": AddressSanitizer and UBSan. "thread": ThreadSanitizer.

RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}


def run_sanitized(program, kind, *arguments, timeout=300):
    """Runs a Python program (its text) in which every CpuModule without explicit `options` is built with a sanitizer.

    Returns the CompletedProcess. A finding makes returncode other than 0 and stderr say where in kernels.cu.
    The program can import what stands in tests/ and in the repository's root, and finds `arguments` in sys.argv[1:].
    """
    environment = dict(
        plain_environment(),
        **{SANITIZE: kind},
        LD_PRELOAD=" ".join(runtime_path(name) for name in RUNTIMES[kind]),
        ASAN_OPTIONS="detect_leaks=0",  # Python and torch keep memory until they exit
        PYTHONPATH=f"{HERE}{os.pathsep}{HERE.parent}",
        OMP_NUM_THREADS="1",
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment, cwd=HERE.parent, capture_output=True, text=True, timeout=timeout,
    )


@functools.cache
def sanitizer_unavailable_reason(kind):
    """Why run_sanitized can't work here, or "" if it can."""
    if not available():
        return unavailable_reason()
    for name in RUNTIMES[kind]:
        if not os.path.isabs(runtime_path(name)):
            return f"{COMPILER} has no {name}"
    probe = run_sanitized("pass", kind)  # ThreadSanitizer refuses some systems' memory layout, for one
    return "" if probe.returncode == 0 else f"Python does not start with {kind} sanitizer: {probe.stderr.strip()[:200]}"


@functools.cache
def runtime_path(name):
    """Where the compiler keeps one of its runtime libraries; the bare name if it has none."""
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True)
    return os.path.realpath(found.stdout.strip()) if "/" in found.stdout else name
