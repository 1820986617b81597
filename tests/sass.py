"""What the compiler made of kernels.cu: registers, spills, and how many wide loads are under way at once.

    python tests/sass.py            # the table of kernels.cu's header, for the compiler of this machine

A kernel that waits for memory is as fast as the number of bytes it has asked for while it waits. No test of results can
see that number, and small changes of the source halve it: a branch around a load, another order of the uses. It can be
read from the machine code (SASS), though, as the count of 16-byte loads issued before the first of them is used.

The compiler is nvcc; what it reports about registers comes from ptxas, the machine code from nvdisasm (part of the CUDA
toolkit; also `pip install nvidia-cuda-nvdisasm`, 5 MB). None of them needs a GPU.
"""

import functools
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "tests" / "build"
ARCHITECTURES = ("sm_80", "sm_90")  # A100; H100 and H200
TYPES = {"f": "float", "6__half": "half", "13__nv_bfloat16": "bf16"}  # as a mangled name spells them
NVCC_OPTIONS = ("-std=c++17", "-ftz=true", "-Xptxas", "-v", "-cubin")  # -ftz=true: as CuPy's RawModule does


class Resources(NamedTuple):
    registers: int  # per thread
    spilled: int    # bytes per thread that did not fit into registers and live in memory


class Instruction(NamedTuple):
    opcode: str    # such as "LDG.E.128"; or a label such as ".L_x_3", which is where branches go
    operands: str  # such as "R4, desc[UR6][R2.64]"


def nvdisasm():
    """The disassembler's path: from the PATH, beside nvcc, or from NVIDIA's wheel. None if there is none."""
    beside_nvcc = Path(shutil.which("nvcc") or "/nowhere").resolve().parent / "nvdisasm"
    from_wheel = sorted(p for folder in sys.path for p in Path(folder or ".").glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next((str(p) for p in [beside_nvcc, *from_wheel] if p.is_file()), None)


@functools.cache
def nvcc_version():
    """Such as "13.0"."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    return re.search(r"release (\d+\.\d+)", text)[1]


def compile_with_nvcc(code, names, architecture):
    """The instances `names` of kernels in `code` -> (path of the cubin, ptxas's log). Kept in tests/build, by content.

    nvcc compiles a template only where it is used, so the file that it gets ends with a use of each.
    """
    source = f"{code}\nconst void* instances[] = {{{', '.join(f'(const void*){name}' for name in names)}}};\n"
    key = hashlib.sha256(" ".join([source, architecture, nvcc_version(), *NVCC_OPTIONS]).encode()).hexdigest()[:16]
    cubin, log = BUILD / f"kernels-{key}.cubin", BUILD / f"kernels-{key}.log"
    if not cubin.exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            file = Path(folder) / "kernels.cu"
            file.write_text(source)
            command = ["nvcc", *NVCC_OPTIONS, f"-arch={architecture}", str(file), "-o", f"{folder}/cubin"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"nvcc could not compile the kernels for {architecture}:\n{done.stderr}")
            (Path(folder) / "log").write_text(done.stderr)
            (Path(folder) / "log").replace(log)
            (Path(folder) / "cubin").replace(cubin)  # last: whoever finds it finds the log too
    return cubin, log.read_text()


def instance_of(symbol):
    """A mangled name as the source spells it.

    >>> instance_of("_Z15paged_attentionI6__halfLi64ELi1EEvPT_Pf")
    'paged_attention<half, 64, 1>'
    >>> instance_of("reshape_and_cache")
    'reshape_and_cache'
    """
    if not (start := re.match(r"_Z(\d+)", symbol)):
        return symbol
    name, rest = symbol[start.end():][: int(start[1])], symbol[start.end() + int(start[1]):]
    template = re.match(rf"I({'|'.join(TYPES)})((?:Li\d+E)*)E", rest)
    if not template:
        return name
    arguments = [TYPES[template[1]], *re.findall(r"Li(\d+)E", template[2])]
    return f"{name}<{', '.join(arguments)}>"


def resources(log):
    """ptxas's log -> {instance: Resources}."""
    pattern = (r"Compiling entry function '(\S+)' for 'sm_\d+'\n(?:.*\n)??.*?"
               r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used (\d+) registers")
    return {instance_of(symbol): Resources(int(registers), max(int(stores), int(loads)))
            for symbol, stores, loads, registers in re.findall(pattern, log)}


def disassemble(cubin):
    """{instance: its Instructions, in order}."""
    text = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    kernels, code = {}, []
    for line in text.splitlines():
        if start := re.match(r"\.text\.(\S+):", line):
            code = kernels[instance_of(start[1])] = []
        elif label := re.match(r"(\.L\w+):", line):
            code.append(Instruction(label[1], ""))
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            code.append(Instruction(found[1], found[2]))
    return kernels


def hot_loop(code):
    """The instructions of the shortest loop with 16-byte loads in it: K and V are read there. [] if there is none."""
    labels = {instruction.opcode: i for i, instruction in enumerate(code)}
    loops = []
    for i, (opcode, operands) in enumerate(code):
        target = re.search(r"\((\.L\w+)\)", operands)
        if opcode.startswith("BRA") and target and labels.get(target[1], i) < i:  # backwards
            loop = [x for x in code[labels[target[1]]: i + 1] if not x.opcode.startswith(".L")]
            if any(x.opcode.startswith("LDG.E.128") for x in loop):
                loops.append(loop)
    return min(loops, key=len, default=[])


def wide_loads_in_flight(loop):
    """How many 16-byte loads are under way when the loop first waits for one of them.

    It waits at the first instruction that touches a register of a load. If it then asks for more and waits again, the
    smaller number counts: it is there that memory stands idle. Two rounds are looked at, as a load may be for the next.

    >>> load = lambda register: Instruction("LDG.E.128", f"R{register}, desc[UR4][R2.64]")
    >>> use = lambda register: Instruction("FADD", f"R0, R0, R{register}")
    >>> wide_loads_in_flight([load(4), load(8), load(12), use(4), use(8), use(12)])
    3
    >>> wide_loads_in_flight([load(4), load(8), use(7), load(12), use(8), use(12)])     # the third is late
    2
    >>> wide_loads_in_flight([use(4), use(8), load(4), load(8)])                        # asked for a round ahead
    2
    """
    waiting, fewest, asked = [], None, False  # the registers of each load; whether one was issued since the last wait
    for opcode, operands in loop + loop:
        touched = set(map(int, re.findall(r"\bR(\d+)", operands)))
        arrived = [registers for registers in waiting if registers & touched]
        if arrived and asked:
            fewest = min(len(waiting), fewest or len(waiting))
            asked = False
        waiting = [registers for registers in waiting if registers not in arrived]
        if opcode.startswith("LDG.E.128"):
            first = int(re.match(r"R(\d+)", operands)[1])
            waiting.append(set(range(first, first + 4)))
            asked = True
    return fewest or 0


def all_names():
    """Every instance that the engine can ask for, each once."""
    sys.path[:0] = [str(ROOT)]
    import kvcache
    names = [kvcache.kernel_names(dtype, dim) for dtype in kvcache.KERNEL_TYPES for dim in kvcache.KERNEL_HEAD_DIMS]
    return list(dict.fromkeys(sum(names, [])))


def table(code, names):
    """The lines of the table that stands in kernels.cu's header."""
    compiled = [compile_with_nvcc(code, names, architecture) for architecture in ARCHITECTURES]
    measured = [(resources(log), disassemble(cubin)) for cubin, log in compiled]
    columns = " ".join(f"{title:>9}" for title in ("registers", "spilled", "in flight", "loop"))
    lines = [
        f"{'nvcc ' + nvcc_version():34}" + "".join(f"{architecture:^42}" for architecture in ARCHITECTURES).rstrip(),
        f"{'':34}" + "   ".join(columns for _ in ARCHITECTURES),
    ]
    for name in names:
        cells = []
        for used, kernels in measured:
            loop = hot_loop(kernels[name])
            numbers = [*used[name], wide_loads_in_flight(loop) or "-", len(loop) or "-"]
            cells.append(" ".join(f"{number:>9}" for number in numbers))
        lines.append(f"{name:34}" + "   ".join(cells))
    return lines


if __name__ == "__main__":
    print("\n".join(table((ROOT / "kernels.cu").read_text(), all_names())))
