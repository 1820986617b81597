"""The tests' own CUDA (cuda_on_cpu.h) and its driver (cpu_module.py): does it compute right, and does it notice?

A test of kernels.cu that passes on the CPU is worth as much as this file: each kind of mistake that the header claims
to catch is made here on purpose, beside the same kernel without the mistake.
"""

import os
import subprocess

import numpy as np
import pytest
import torch

import cpu_module
from cpu_module import CpuModule, run_sanitized, sanitizer_unavailable_reason

pytestmark = pytest.mark.skipif(not cpu_module.available(), reason=cpu_module.unavailable_reason())

CODE = r"""
// --- kernels that are right ---

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) sum_rows(T* out, const T* in, int n) {
    __shared__ float of_warp[THREADS / 32];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) sum += float(in[blockIdx.x * n + i]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < THREADS / 32; w++) sum += of_warp[w];
    out[blockIdx.x] = T(sum);
}

template <typename T> __global__ void shuffles(T* broadcast, T* flipped, T* shifted, const T* in) {
    const int i = threadIdx.x;
    broadcast[i] = __shfl_sync(0xffffffff, in[i], 5);
    flipped[i] = __shfl_xor_sync(0xffffffff, in[i], 31);
    shifted[i] = __shfl_down_sync(0xffffffff, in[i], 3);
}

extern "C" __global__ void copy_scalars(long long* integers, double* floats, int a, long long b, unsigned char c,
                                        bool d, float e, double f, int2 g) {
    integers[0] = a, integers[1] = b, integers[2] = c, integers[3] = d, integers[4] = g.x, integers[5] = g.y;
    floats[0] = e, floats[1] = f;
}

__global__ void where_am_i(int* out) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int* mine = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 6;
    mine[0] = blockIdx.x, mine[1] = blockIdx.y, mine[2] = blockIdx.z;
    mine[3] = threadIdx.x, mine[4] = threadIdx.y, mine[5] = threadIdx.z;
}

__global__ void who_runs_first(int* turn, int* next) {
    turn[blockIdx.x * blockDim.x + threadIdx.x] = next[0]++;
}

__global__ void half_of_them_return(int* out) {  // the barrier opens for those that are left
    __shared__ int sum[64];
    const int i = threadIdx.x;
    if (i % 2) return;
    sum[i] = i;
    __syncthreads();
    const int right = __shfl_sync(0xffffffff, i, 30);
    out[i / 2] = sum[(i + 2) % 64] + right;
}

__global__ void dynamic_shared(float* out) {
    extern __shared__ float reversed[];
    out[threadIdx.x] = reversed[threadIdx.x];
    __syncthreads();
    reversed[blockDim.x - 1 - threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[blockDim.x + threadIdx.x] = reversed[threadIdx.x];
}

template <typename T>
__global__ void round_trip(float* wide, T* narrow, const float* from, const T* narrow_from, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) narrow[i] = T(from[i]), wide[i] = float(narrow_from[i]);
}

__global__ void functions(float* out, float x, int a, int b) {
    out[0] = exp2f(x), out[1] = __expf(x), out[2] = fmaxf(x, 1.f), out[3] = min(a, b), out[4] = max(a, b);
}

// --- kernels with a mistake, or the same without it ---

template <bool BARRIER> __global__ void left_neighbour(int* out, const int* in) {
    __shared__ int copy[128];
    const int i = threadIdx.x;
    copy[i] = in[i];
    if (BARRIER) __syncthreads();
    out[i] = i > 0 ? copy[i - 1] : 0;
}

template <int THREADS_AT_BARRIER> __global__ void barrier_for_some(int* out) {
    if (threadIdx.x < THREADS_AT_BARRIER) __syncthreads();
    out[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1, 1);
    __syncthreads();
}

template <int LANES> __global__ void shuffle_for_some(int* out) {
    if (threadIdx.x < LANES)
        out[threadIdx.x] = __shfl_xor_sync(0xffffffff, threadIdx.x, 1);
    __syncthreads();
}

__global__ void two_barriers(int* out) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void from_a_lane_that_left(int* out) {
    if (threadIdx.x == 7) return;
    out[threadIdx.x] = __shfl_sync(0xffffffff, 1, 7);
}

__global__ void part_of_a_warp(int* out) { out[threadIdx.x] = __shfl_xor_sync(0xffff, 1, 1); }

template <typename T> __global__ void read_before_write(T* out) {
    __shared__ T left_behind[4];
    out[threadIdx.x] = left_behind[threadIdx.x];
    left_behind[threadIdx.x] = T(1.f);
}

__global__ void store(float* out, int n) { out[n - 1] = 1.f; }

template <int SIZE> __global__ void shared_index(float* out, int i) {
    __shared__ float values[SIZE];
    values[i] = 1.f;
    out[0] = values[0];
}

template <int SIZE> __global__ void local_index(float* out, int i) {
    float values[SIZE] = {};
    values[i] = 1.f;
    for (float v : values) out[0] += v;
}

__global__ void wide_load(float* out, int i) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(out + i);
    out[0] = loaded.x;
}
"""
NAMES = [
    *(f"sum_rows<{t}, {n}>" for t in ("float", "half", "bf16") for n in (32, 128)),
    *(f"shuffles<{t}>" for t in ("int", "float", "double")),
    "copy_scalars", "where_am_i", "who_runs_first", "half_of_them_return", "dynamic_shared", "round_trip<bf16>",
    "round_trip<half>", "functions",
    "left_neighbour<true>", "left_neighbour<false>", "barrier_for_some<64>", "barrier_for_some<16>",
    "shuffle_for_some<32>", "shuffle_for_some<16>", "two_barriers", "from_a_lane_that_left", "part_of_a_warp",
    *(f"read_before_write<{t}>" for t in ("float", "half", "int")),
]
SEEDS = (0, 1, 2, 3)


def line_of(text):
    """The line of CODE (from 1) on which `text` stands, as reports name it."""
    assert CODE.count(text) == 1
    return CODE[: CODE.index(text)].count("\n") + 1


@pytest.fixture(scope="module")
def launch():
    """launch(name, grid, block, *args, seed=0): tensors and arrays become pointers, the rest is passed on."""
    modules = {}

    def launch(name, grid, block, *args, seed=0, **more):
        if seed not in modules:
            modules[seed] = CpuModule(CODE, NAMES, seed=seed)  # compiled once: the seed is an argument of each launch
        pointers = {torch.Tensor: lambda t: t.data_ptr(), np.ndarray: lambda a: a.ctypes.data}
        args = [pointers.get(type(a), lambda x: x)(a) for a in args]
        modules[seed].get_function(name)(grid, block, args, **more)

    return launch


# ----------------------------------------------------------------------------------------------
# what is right comes out right


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threads", (32, 128))
@pytest.mark.parametrize("name, dtype", (("float", torch.float32), ("half", torch.float16), ("bf16", torch.bfloat16)))
def test_a_block_sums_through_shared_memory_and_shuffles(launch, name, dtype, threads, seed):
    rows = torch.randint(-3, 4, (5, 200), dtype=torch.int32)  # small integers: exact in every type and order
    values, out = rows.to(dtype), torch.full((5,), float("nan"), dtype=dtype)
    launch(f"sum_rows<{name}, {threads}>", (5,), (threads,), out, values, np.int32(200), seed=seed)
    assert out.tolist() == rows.sum(1).tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name, dtype", (("int", torch.int32), ("float", torch.float32), ("double", torch.float64)))
def test_shuffles_give_each_lane_the_right_lane(launch, name, dtype, seed):
    values = torch.arange(100, 164).to(dtype)  # two warps, which must not see each other
    broadcast, flipped, shifted = (torch.zeros_like(values) for _ in range(3))
    launch(f"shuffles<{name}>", (1,), (64,), broadcast, flipped, shifted, values, seed=seed)
    warps = values.reshape(2, 32)
    assert broadcast.reshape(2, 32).tolist() == warps[:, 5:6].expand(2, 32).tolist()
    assert flipped.reshape(2, 32).tolist() == warps.flip(1).tolist()
    assert shifted.reshape(2, 32)[:, :29].tolist() == warps[:, 3:].tolist()
    assert shifted.reshape(2, 32)[:, 29:].tolist() == warps[:, 29:].tolist()  # past the last lane: one's own


def test_scalars_arrive(launch):
    integers, floats = np.zeros(6, np.int64), np.zeros(2)
    pair = np.array((-7, 8), dtype=[("x", np.int32), ("y", np.int32)])[()]
    args = (np.int32(-5), -(2**40), np.uint8(200), True, np.float32(0.1), 0.1, pair)
    launch("copy_scalars", (1,), (1,), integers, floats, *args)
    assert integers.tolist() == [-5, -(2**40), 200, 1, -7, 8]
    assert floats.tolist() == [float(np.float32(0.1)), 0.1]


@pytest.mark.parametrize("position, wrong, message", (
    (5, 5, "argument 5: a 4-byte integer is expected, but int64 was passed"),
    (2, np.float32(5), "argument 2: a 4-byte integer is expected, but float32 was passed"),
    (6, 0.1, "argument 6: a 4-byte float is expected, but float64 was passed"),
    (6, np.int32(1), "argument 6: a 4-byte float is expected, but int32 was passed"),
    (0, np.int32(1), "argument 0: a 8-byte pointer is expected, but int32 was passed"),
    (0, torch.zeros(1), "not Tensor: pass tensor.data_ptr()"),
    (None, None, "has 9 parameters, but got 8 arguments"),
))
def test_a_wrong_argument_is_named(position, wrong, message):
    args = [0, 0, np.int32(1), 1, np.uint8(1), True, np.float32(1), 1.0, np.zeros((), "i4,i4")[()]]
    if position == 5:
        message = message.replace("4-byte", "1-byte")
    if position is None:
        del args[3]
    else:
        args[position] = wrong
    with pytest.raises(TypeError) as caught:
        CpuModule(CODE, NAMES).get_function("copy_scalars")((1,), (1,), args)
    assert message in str(caught.value)


@pytest.mark.parametrize("seed", (0, 1))
def test_grids_and_blocks_have_three_dimensions(launch, seed):
    grid, block = (2, 3, 4), (5, 2, 3)
    out = np.full((4, 3, 2, 3, 2, 5, 6), -1, np.int32)  # [bz, by, bx, tz, ty, tx, 6]
    launch("where_am_i", grid, block, out, seed=seed)
    bz, by, bx, tz, ty, tx = np.indices(out.shape[:-1])
    assert (out == np.stack([bx, by, bz, tx, ty, tz], axis=-1)).all()


def test_the_seed_decides_the_order_of_threads_and_blocks(launch):
    def turns(seed):
        turn, following = np.full((6, 64), -1, np.int32), np.zeros(1, np.int32)
        launch("who_runs_first", (6,), (64,), turn, following, seed=seed)
        assert sorted(turn.ravel()) == list(range(6 * 64))  # everyone, once
        return turn

    assert (turns(0).ravel() == np.arange(6 * 64)).all()
    assert (turns(1) == turns(1)).all() and (turns(1) != turns(2)).any()
    shuffled = turns(1)
    assert (np.diff(shuffled.min(axis=1)) < 0).any()  # blocks not in order
    assert (np.argsort(shuffled[0]) != np.argsort(shuffled[1])).any()  # and not two blocks alike


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_return_leave_their_barriers(launch, seed):
    out = np.zeros(32, np.int32)
    launch("half_of_them_return", (1,), (64,), out, seed=seed)
    i = np.arange(0, 64, 2)
    assert out.tolist() == ((i + 2) % 64 + i // 32 * 32 + 30).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_shared_memory(launch, seed):
    out = np.zeros((2, 40), np.float32)
    for _ in range(2):  # the second launch must not find what the first one left
        launch("dynamic_shared", (1,), (40,), out, seed=seed, shared_mem=160)
        assert np.isnan(out[0]).all() and out[1].tolist() == list(range(39, -1, -1))


def test_functions(launch):
    out = np.zeros(5, np.float32)
    launch("functions", (1,), (1,), out, np.float32(0.5), np.int32(-3), np.int32(4))
    assert np.allclose(out, [2**0.5, np.exp(0.5), 1, -3, 4])


@pytest.mark.parametrize("name, dtype", (("bf16", torch.bfloat16), ("half", torch.float16)))
def test_narrow_floats_round_as_torch_does(launch, name, dtype):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = patterns.float().numpy().view(np.uint32)
    steps = np.array([0, 1, -1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001]).astype(np.uint32)  # to a tie and around
    anything = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits = np.concatenate([anything, *(exact + step for step in steps)])
    values = torch.from_numpy(bits.view(np.float32))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-45, 65519.9, 65520.0])
    values = torch.cat([values, special])
    n = max(len(values), len(patterns))
    narrow_from = patterns.repeat(n // len(patterns) + 1)[:n].contiguous()
    wide, narrow = torch.zeros(n), torch.zeros(n, dtype=dtype)
    launch(f"round_trip<{name}>", (1,), (32,), wide, narrow, values, narrow_from, np.int32(n))
    for got, want, bits in ((wide, narrow_from.float(), torch.int32), (narrow, values.to(dtype), torch.int16)):
        number = ~want.isnan()  # NaN has many patterns; all else has to be equal bit by bit
        assert torch.equal(~got.isnan(), number)
        assert torch.equal(got[number].view(bits), want[number].view(bits))


# ----------------------------------------------------------------------------------------------
# what is wrong is noticed


def test_a_missing_barrier_gives_a_wrong_result_in_some_order(launch):
    values, want = np.arange(1, 129, dtype=np.int32), np.arange(128)

    def seeds_with_a_wrong_result(name):
        out = {seed: np.zeros(128, np.int32) for seed in range(6)}
        for seed in out:
            launch(name, (1,), (128,), out[seed], values, seed=seed)
        return [seed for seed in out if (out[seed] != want).any()]

    assert seeds_with_a_wrong_result("left_neighbour<true>") == []
    assert seeds_with_a_wrong_result("left_neighbour<false>") == [1, 2, 3, 4, 5]  # in order, luck hides it


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_that_some_never_reach_is_reported(launch, seed):
    out = np.zeros(64, np.int32)
    launch("barrier_for_some<64>", (1,), (64,), out, seed=seed)
    with pytest.raises(RuntimeError) as caught:  # 16 lanes wait for the block, their 16 mates for the warp
        launch("barrier_for_some<16>", (1,), (64,), out, seed=seed)
    message = str(caught.value)
    barrier, shuffle = line_of("_AT_BARRIER) __sync"), line_of("1, 1);\n    __sync")
    assert "kernel barrier_for_some<16>: " in message
    # Either nothing moves any more, or warp 1 got past its shuffle and met the first 16 at another barrier than theirs.
    assert f"16 of 32 threads of warp 0 wait at the shuffle or __syncwarp in line {shuffle}" in message or (
        "every thread has to reach the same barrier" in message and f"line {barrier}" in message
    )
    launch("barrier_for_some<64>", (1,), (64,), out, seed=seed)  # and the next launch finds a clean place
    assert (out == 1).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shuffle_without_half_of_the_warp_is_a_deadlock(launch, seed):
    out = np.zeros(64, np.int32)
    launch("shuffle_for_some<32>", (1,), (32,), out, seed=seed)
    report = r"deadlock in block \(0, 0, 0\): .*16 of 32 threads of warp 0 wait at the shuffle"
    with pytest.raises(RuntimeError, match=report):
        launch("shuffle_for_some<16>", (1,), (32,), out, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_barriers_are_not_one(launch, seed):
    line = line_of("    else\n        __sync") + 1
    with pytest.raises(RuntimeError, match=rf"line ({line}|{line - 2}).*every thread has to reach the same barrier"):
        launch("two_barriers", (1,), (64,), np.zeros(64, np.int32), seed=seed)


def test_shuffles_that_cuda_leaves_undefined_are_refused(launch):
    out = np.zeros(32, np.int32)
    with pytest.raises(RuntimeError, match="a shuffle reads lane 7, which does not take part"):
        launch("from_a_lane_that_left", (1,), (32,), out)
    with pytest.raises(RuntimeError, match="a shuffle reads lane 5, which does not take part"):
        launch("shuffles<int>", (1,), (4,), out, out, out, out)
    with pytest.raises(RuntimeError, match="whole warps only, not mask 0xffff"):
        launch("part_of_a_warp", (1,), (32,), out)


@pytest.mark.parametrize("name, dtype, poison", (
    ("float", np.float32, np.nan), ("half", np.float16, np.nan), ("int", np.int32, -1)))
def test_shared_memory_starts_poisoned_in_every_block(launch, name, dtype, poison):
    out = np.zeros(4, dtype)
    launch(f"read_before_write<{name}>", (3,), (4,), out)  # the second block must not see the first one's values
    assert np.array_equal(out, np.full(4, poison, dtype), equal_nan=name != "int")


@pytest.mark.parametrize("grid, block, message", (
    ((0,), (32,), "is empty"),
    ((1, 65536), (32,), "above a GPU's limit"),
    ((1,), (32, 33), "limit of 1024 threads"),
))
def test_launches_that_a_gpu_refuses(launch, grid, block, message):
    with pytest.raises(ValueError, match=message):
        launch("where_am_i", grid, block, np.zeros(1, np.int32))


# ----------------------------------------------------------------------------------------------
# the driver


def test_a_compile_error_names_the_line_and_leaves_nothing_behind(monkeypatch, tmp_path):
    code = "__global__ void broken(int* out) {\n    out[0] = undefined_name;\n}\n"
    monkeypatch.setattr(cpu_module, "BUILD", tmp_path)
    message = r"g\+\+ could not compile the kernels:(.|\n)*kernels\.cu:2:.*undefined_name"
    with pytest.raises(RuntimeError, match=message):
        CpuModule(code, ["broken"])
    assert set(tmp_path.iterdir()) == set()


def test_an_unknown_kernel_is_named():
    with pytest.raises(KeyError, match="kernel 'nothing' is not among"):
        CpuModule(CODE, NAMES).get_function("nothing")


def test_builds_are_kept_and_depend_on_code_header_and_options(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_module, "BUILD", tmp_path)
    compiled = []

    def compiler(command, **more):
        if "-o" in command:
            compiled.append(command)
            assert os.path.dirname(command[-1]) == str(tmp_path)  # on the same disk: the rename is then atomic
            assert not command[-1].endswith(".so")  # half a library is never found under a finished one's name
        return subprocess.CompletedProcess(command, 0, stdout="g++ 1.0", stderr="")

    monkeypatch.setattr(cpu_module.subprocess, "run", compiler)
    first = cpu_module.build("code", ("-O2",))
    assert cpu_module.build("code", ("-O2",)) == first and len(compiled) == 1
    assert cpu_module.build("other code", ("-O2",)) != first
    assert cpu_module.build("code", ("-O1",)) != first
    header = tmp_path / "cuda_on_cpu.h"
    header.write_text("another header")
    monkeypatch.setattr(cpu_module, "HEADER", header)
    assert cpu_module.build("code", ("-O2",)) != first
    assert len(compiled) == 4 and sorted(p.suffix for p in tmp_path.iterdir()) == [".h"] + 4 * [".so"]


def test_the_portable_context_switch_computes_the_same():
    code = CODE[: CODE.index("template <typename T> __global__ void shuffles")]
    module = CpuModule(code, ["sum_rows<float, 128>"], options=("-O1", "-DCUDA_ON_CPU_UCONTEXT"), seed=1)
    values, out = torch.ones(3, 200), torch.zeros(3)
    module.get_function("sum_rows<float, 128>")((3,), (128,), (out.data_ptr(), values.data_ptr(), np.int32(200)))
    assert out.tolist() == [200] * 3


# ----------------------------------------------------------------------------------------------
# sanitizers

SANITIZED = """
import sys
import numpy as np
from cpu_module import CpuModule
code, names, name, threads, argument = sys.argv[1:]
module = CpuModule(code, names.split(";"), seed=0)
values, numbers = np.zeros(1000, np.float32), np.arange(1, 129, dtype=np.int32)
second = numbers.ctypes.data if argument == "pointer" else np.int32(argument)
module.get_function(name)((1,), (int(threads),), (values.ctypes.data, second))
assert argument != "pointer" or values.view(np.int32)[:128].tolist() == list(range(128))
"""
ADDRESS_NAMES = ["store", "shared_index<32>", "local_index<32>", "wide_load"]
THREAD_NAMES = ["left_neighbour<true>", "left_neighbour<false>"]


def needs(kind):
    if reason := sanitizer_unavailable_reason(kind):
        pytest.skip(reason)


@pytest.mark.parametrize("name, good, bad, line, message", (
    ("store", 1000, 1001, "out[n - 1] = 1.f", "AddressSanitizer: heap-buffer-overflow"),
    ("shared_index<32>", 31, 32, "values[i] = 1.f;\n    out[0]", "index 32 out of bounds for type 'float [32]'"),
    ("local_index<32>", 31, 32, "values[i] = 1.f;\n    for", "index 32 out of bounds for type 'float [32]'"),
    ("wide_load", 4, 1, "loaded = *", "misaligned address"),
))
def test_address_sanitizer_finds(name, good, bad, line, message):
    needs("address")
    names = ";".join(ADDRESS_NAMES)
    right, wrong = (run_sanitized(SANITIZED, "address", CODE, names, name, "1", str(n)) for n in (good, bad))
    assert (right.returncode, right.stderr) == (0, "")
    assert wrong.returncode != 0
    assert message in wrong.stderr and f"kernels.cu:{line_of(line)}" in wrong.stderr


def test_thread_sanitizer_finds_a_missing_barrier_even_where_the_result_is_right():
    needs("thread")
    names = ";".join(THREAD_NAMES)
    right, wrong = (run_sanitized(SANITIZED, "thread", CODE, names, name, "128", "pointer") for name in THREAD_NAMES)
    assert (right.returncode, right.stderr) == (0, "")
    assert wrong.returncode != 0 and "AssertionError" not in wrong.stderr
    assert "WARNING: ThreadSanitizer: data race" in wrong.stderr
    for access in ("copy[i - 1]", "copy[i] = in[i]"):
        assert f"kernels.cu:{line_of(access)} " in wrong.stderr
