"""kernels.cu as the GPU's compiler sees it, without a GPU: it compiles for A100 and H100, and not into something slow.

See sass.py for what is measured and why. The limits are stated for one compiler version, the one in VERSION; others
place registers and loads a little differently, so there only the compiling is tested.
"""

import re
import shutil

import pytest

import sass
from conftest import ROOT

CODE = (ROOT / "kernels.cu").read_text("utf-8")
NAMES = sass.all_names()
VERSION = "13.0"
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")


def needs_nvdisasm():
    if not sass.nvdisasm():
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")


def needs_version():
    if sass.nvcc_version() != VERSION:
        pytest.skip(f"the limits are those of nvcc {VERSION}, this is {sass.nvcc_version()}")


def limits(name, architecture):
    """(most registers, most bytes spilled, fewest wide loads in flight) of an instance.

    An SM has 65,536 registers. 102 per thread leave room for 5 thread blocks of 128 threads, 204 for 2 (and a bit). A
    spill is allowed outside of the loop only. Of 8 loads in flight, 4 are K and 4 are V.
    """
    kernel, *arguments = re.findall(r"\w+", name)
    if kernel == "reshape_and_cache":
        return 32, 0, 2
    if kernel == "merge_splits":
        return 40, 0, 0
    if kernel == "paged_attention_simple":
        return 102, 0, 0
    dtype, head_dim, rows = arguments
    in_flight = 8
    if head_dim == "32" and dtype != "float":
        in_flight = 4  # one load of a warp fetches 8 keys, so a cache block is 2 loads of K and 2 of V
    elif (dtype, rows, architecture) == ("float", "1", "sm_90"):
        in_flight = 5  # ptxas is content with fewer registers: 9 thread blocks fit an SM, each with 5 loads
    return {"1": (102, 4, in_flight), "4": (204, 0, in_flight)}[rows]


def problems(code, names, architecture):
    """What is wrong with the compiled code: a list of sentences."""
    cubin, log = sass.compile_with_nvcc(code, names, architecture)
    used, kernels = sass.resources(log), sass.disassemble(cubin)
    found = []
    for name in names:
        registers, spilled, in_flight = limits(name, architecture)
        loop = sass.hot_loop(kernels[name])
        opcodes = [instruction.opcode for instruction in loop]
        narrow = [o for o in opcodes if o.startswith("LDG") and not o.startswith("LDG.E.128")]
        loads = sass.wide_loads_in_flight(loop)
        if used[name].registers > registers:
            found.append(f"{name} uses {used[name].registers} registers, not at most {registers}")
        if used[name].spilled > spilled:
            found.append(f"{name} spills {used[name].spilled} bytes, not at most {spilled}")
        if any(o.startswith(("LDL", "STL")) for o in opcodes):
            found.append(f"{name} spills registers inside of its loop")
        if loads < in_flight:
            found.append(f"{name} has {loads} wide loads in flight, not at least {in_flight}")
        if in_flight and len(narrow) > 1:  # one is allowed: the next entry of the block table
            found.append(f"{name} has {len(narrow)} loads of less than 16 bytes in its loop: {narrow}")
    return found


@needs_nvcc
@pytest.mark.parametrize("architecture", sass.ARCHITECTURES)
def test_every_instance_compiles(architecture):
    _, log = sass.compile_with_nvcc(CODE, NAMES, architecture)
    assert sorted(sass.resources(log)) == sorted(NAMES)
    assert "warning" not in log


@needs_nvcc
@pytest.mark.parametrize("architecture", sass.ARCHITECTURES)
def test_registers_spills_and_loads_in_flight(architecture):
    needs_nvdisasm()
    needs_version()
    assert problems(CODE, NAMES, architecture) == []


@needs_nvcc
def test_the_table_in_the_header_is_what_this_compiler_says():
    """`python tests/sass.py` prints it anew."""
    needs_nvdisasm()
    needs_version()
    quoted = re.findall(r"^// ((?:\w+<.*>|reshape_and_cache) +[\d -]+)$", CODE, re.M)
    assert len(quoted) >= 5 and set(quoted) <= {line.strip() for line in sass.table(CODE, NAMES)}



K, V = (f"            {x}[s] = load16({x}_cache + at + s * KEYS * slot_size);\n" for x in "kv")
SLOW = [  # right results, and slow: (name, old, new, what is said about it)
    ("branch-around-the-loads", K + V, f"            if (key + s * KEYS < context) {{\n{K}{V}            }}\n",
     "registers, not at most 102"),
    ("one-key-at-a-time", "STEPS = BLOCK_SIZE / KEYS < 4 ? BLOCK_SIZE / KEYS : 4", "STEPS = 1",
     "has 2 wide loads in flight, not at least 8"),
    ("element-by-element", K,
     "            for (int i = 0; i < N; i++) k[s].x[i] = k_cache[at + s * KEYS * slot_size + i];\n",
     "loads of less than 16 bytes"),
    ("too-few-registers", "__launch_bounds__(32 * WARPS)", "__launch_bounds__(32 * WARPS, 10)", "inside of its loop"),
]


@needs_nvcc
@pytest.mark.parametrize("name, old, new, said", SLOW, ids=[name for name, *_ in SLOW])
def test_a_slow_variant_is_noticed(name, old, new, said):
    needs_nvdisasm()
    needs_version()
    assert CODE.count(old) == 1, f"{name}: its place occurs {CODE.count(old)} times"
    found = problems(CODE.replace(old, new), ["paged_attention<half, 64, 1>"], "sm_90")
    assert any(said in sentence for sentence in found), found


@pytest.mark.parametrize("architecture", sass.ARCHITECTURES)
def test_nvrtc_compiles_every_instance(architecture):
    """The compiler that CuPy uses, through CuPy. It has fewer headers than nvcc (no <cmath>, no INFINITY)."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy.cuda import nvrtc
    try:
        nvrtc.getVersion()
        from cuda.pathfinder import find_nvidia_header_directory
        headers = find_nvidia_header_directory("cudart")
    except Exception as error:  # CuPy and cuda.pathfinder have exceptions of their own for a library that is missing
        pytest.skip(f"NVRTC can't be loaded: {str(error).splitlines()[0]}")
    if not headers:
        pytest.skip("NVRTC has no cuda_fp16.h (pip install nvidia-cuda-runtime)")
    program = nvrtc.createProgram(CODE, "kernels.cu", (), ())
    for name in NAMES:
        nvrtc.addNameExpression(program, name)
    options = (f"-arch={architecture}", "-std=c++17", "-ftz=true", "--ptxas-options=-v", f"-I{headers}")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert sorted(sass.instance_of(nvrtc.getLoweredName(program, name)) for name in NAMES) == sorted(NAMES)
    assert len(nvrtc.getCUBIN(program)) > 0
    for name, used in sass.resources(nvrtc.getProgramLog(program)).items():
        assert used.spilled <= limits(name, architecture)[1], name
