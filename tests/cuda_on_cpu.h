// cuda_on_cpu.h: just enough of CUDA, in C++17, to compile kernels.cu with g++ and to run it without a GPU.
//
// How it works
//   A kernel is an ordinary function once __global__ and its like are macros that expand to nothing. What a
//   GPU adds is *many threads that wait for each other*. Here every CUDA thread of a block is a fiber: a stack
//   of its own and a place to go on from, but no thread of the operating system. One fiber runs at a time. It
//   keeps the processor until it returns or has to wait (at __syncthreads, __syncwarp or a shuffle); then it
//   goes back to run_block, the scheduler, which picks the next one. The blocks of a grid run one after another.
//
//   The scheduler may pick in any order, since CUDA promises none. Seed 0: threads and blocks in order. Any
//   other seed: blocks in a random order, and in each block its threads in a random order. A kernel that
//   lacks a barrier then reads something that is not written yet, or not any more, in one order or another.
//
//   Shared memory is one copy per array: one block runs at a time. Before each block all of it is filled with 0xFF
//   bytes (NaN as float, half and bf16; -1 as int), so that no kernel lives on zeros, or on what the last block
//   left: after a launch with the same data that is just what a missing barrier would fail to fetch.
//
// What a run shows
//   Indexing, masks, strides, guards, types, and the arithmetic up to rounding; missing barriers (in some
//   seed; with ThreadSanitizer in every one, with file and line); barriers that part of a block does not
//   reach or that different threads reach in different lines (reported, not hung); with AddressSanitizer and
//   UBSan accesses outside an array, and 16-byte accesses that are not aligned.
//
// What it can't show
//   * Lockstep. On a GPU the 32 lanes of a warp mostly advance together; here each goes alone. Code that
//     relies on lockstep without saying so (no __syncwarp) is wrong on both, but may pass on a GPU.
//   * The last bits. A GPU contracts a*b+c into one rounding (FMA) and has its own exp2f.
//   * Speed, registers, memory coalescing, bank conflicts: test_kernels_compile.py looks at some of them.
//   * The memory model: stores seen late or in another order by other threads. Nor races between blocks: here
//     one block ends before the next begins. Only the order is random, so a result that depends on it shows.
//   * Whatever kernels.cu does not use: masks of part of a warp, atomics, texture, streams, tensor cores.
#pragma once
#include <link.h>
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// ---------------------------------------------------------------------------------------------------------
// The language: keywords that a CPU has no use for, and where shared memory lives
// ---------------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define __shared__ static thread_local  // thread_local makes all of them lie side by side, see shared_memory()

// ---------------------------------------------------------------------------------------------------------
// Types and functions that every CUDA kernel finds predefined
// ---------------------------------------------------------------------------------------------------------

struct alignas(8) int2 { int x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;  // set by the scheduler before it lets a fiber run

using half = _Float16;

// The upper 16 bits of a float. Conversions are explicit: sums and products belong in float, on a GPU as well.
struct bf16 {
    uint16_t bits;
    bf16() = default;
    explicit bf16(float value) {
        uint32_t u;
        memcpy(&u, &value, sizeof u);
        // Adding just under half of the last kept bit rounds to nearest; adding that bit sends ties to even.
        // It carries into the exponent where it has to (up to infinity), but would make some NaNs infinite.
        bits = std::isnan(value) ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        const uint32_t u = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &u, sizeof value);
        return value;
    }
};

using std::max, std::min;
inline float __expf(float x) { return expf(x); }

// ---------------------------------------------------------------------------------------------------------
// ThreadSanitizer: told that fibers are threads, and that nothing but barriers orders what they do
// ---------------------------------------------------------------------------------------------------------
//
// UNWATCHED marks the functions that it shall not look at: the bookkeeping below is shared by all fibers on
// purpose. "release" publishes all that a thread has done so far, "acquire" takes over what was published.

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
}
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline))
namespace tsan {
UNWATCHED static void release(void* tag) { __tsan_release(tag); }
UNWATCHED static void acquire(void* tag) { __tsan_acquire(tag); }
UNWATCHED static void* this_fiber() { return __tsan_get_current_fiber(); }
UNWATCHED static void* new_fiber() { return __tsan_create_fiber(0); }
UNWATCHED static void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: this orders nothing
}
#else
#define UNWATCHED
namespace tsan {
inline void release(void*) {}
inline void acquire(void*) {}
inline void* this_fiber() { return nullptr; }
inline void* new_fiber() { return nullptr; }
inline void switch_to(void*) {}
}
#endif

namespace cpu {

// ---------------------------------------------------------------------------------------------------------
// Fibers: leaving one stack in the middle of a function, and going on with another one
// ---------------------------------------------------------------------------------------------------------

constexpr size_t STACK_BYTES = 256 * 1024;
UNWATCHED static void fiber_main();

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)

using Context = void*;  // a stack pointer; all else that has to survive the switch lies on the stack it points to

// To its caller this is a function that takes its time: the calling convention (System V) lets it lose all
// registers but these six and the stack pointer. The `ret` returns on the *new* stack, to whoever left it.
extern "C" void cpu_switch_stack(void** from, void** to);
asm(R"(
    .text
    .type cpu_switch_stack, @function
cpu_switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov  %rsp, (%rdi)
    mov  (%rsi), %rsp
    pop  %r15
    pop  %r14
    pop  %r13
    pop  %r12
    pop  %rbx
    pop  %rbp
    ret
    .size cpu_switch_stack, .-cpu_switch_stack
)");
inline void switch_context(Context& from, Context& to) { cpu_switch_stack(&from, &to); }

// A stack that looks as if fiber_main had been about to start when it was left.
UNWATCHED static void prepare(Context& context, char* stack) {
    void** top = reinterpret_cast<void**>(uintptr_t(stack + STACK_BYTES) & ~uintptr_t(15));
    top[-1] = nullptr;                                // fiber_main's "caller": the end of every stack trace
    top[-2] = reinterpret_cast<void*>(&fiber_main);   // where the first switch returns to
    context = top - 2 - 6;                            // six registers, of any value
}

#else  // any other machine: the same by the C library, about eight times slower (a system call per switch)
}  // namespace cpu
#include <ucontext.h>
namespace cpu {
using Context = ucontext_t;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
UNWATCHED static void prepare(Context& context, char* stack) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, fiber_main, 0);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// The state of the block that is running
// ---------------------------------------------------------------------------------------------------------

struct Memory {
    char* start = nullptr;
    size_t bytes = 0;
};

struct Barrier {
    int members = 0;  // threads that have not returned: the barrier opens when all of these have arrived
    int arrived = 0;  // how many wait now
    int line = 0;     // the line of kernels.cu in which they wait
    int round = 0;    // how often it has opened
    char tags[2];     // what ThreadSanitizer knows it by, in even and odd rounds: some may be one round ahead
    UNWATCHED void open_if_complete() {
        if (arrived == members) arrived = 0, round++;
    }
};

struct Offer {
    uint64_t value;
    int number;  // which of its lane's shuffles this value was offered for
};

struct Warp : Barrier {
    Offer offers[2][32];  // by lane, for even and odd shuffles: a slow lane may still have to read the last one
};

struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    dim3 thread;
    unsigned lane;
    Warp* warp;
    Barrier* barrier;  // where it waits or waited last, and since which round: it may go on in the next one
    int round;
    int shuffles;
    bool done;
    void* tsan;
    UNWATCHED bool must_wait() const { return barrier && barrier->round == round; }
};

static std::vector<Fiber> fibers;  // the threads of a block; their stacks are kept for the next one
static std::vector<Warp> warps;
static Barrier whole_block;
static Fiber* running;
static Context scheduler;  // where run_block goes on when a fiber stops
static void* tsan_scheduler;        // and what ThreadSanitizer knows it by
static char block_starts, block_ends;  // tags
static std::function<void()> call_kernel;
static Memory static_shared;
static std::unique_ptr<char[]> dynamic_shared;  // `extern __shared__`, see cpu_module.py
static char error[1000];

UNWATCHED static void back_to_scheduler() {
    tsan::switch_to(tsan_scheduler);
    switch_context(running->context, scheduler);
}

// Ends the launch with a message. The fibers stay where they are and are thrown away.
__attribute__((format(printf, 1, 2))) UNWATCHED static void fail(const char* format, ...) {
    const int n = snprintf(error, sizeof error, "thread (%u, %u, %u) of block (%u, %u, %u): ", threadIdx.x, threadIdx.y,
                           threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    va_list args;
    va_start(args, format);
    vsnprintf(error + n, sizeof error - n, format, args);
    va_end(args);
    back_to_scheduler();
}

UNWATCHED static void wait(Barrier& b, bool orders_memory, int line) {
    if (b.arrived && b.line != line)
        fail("waits in line %d, but others of its %s wait in line %d: every thread has to reach the same barrier", line,
             &b == &whole_block ? "block" : "warp", b.line);
    const int round = b.round;
    if (orders_memory) tsan::release(&b.tags[round % 2]);
    b.line = line;
    b.arrived++;
    b.open_if_complete();
    running->barrier = &b;
    running->round = round;
    if (running->must_wait()) back_to_scheduler();
    if (orders_memory) tsan::acquire(&b.tags[round % 2]);
}

// Every lane of the warp offers a value and takes the one of lane `from`. As CUDA says, this is no memory barrier.
template <class T> UNWATCHED T shuffle(unsigned mask, T value, unsigned from, int line) {
    static_assert(sizeof(T) <= sizeof(Offer::value), "a shuffle moves at most 8 bytes");
    if (mask != ~0u) fail("line %d: cuda_on_cpu.h knows shuffles of whole warps only, not mask %#x", line, mask);
    const int number = ++running->shuffles;
    Offer* offers = running->warp->offers[number % 2];
    Offer& mine = offers[running->lane];
    __builtin_memcpy(&mine.value, &value, sizeof value);
    mine.number = number;
    wait(*running->warp, false, line);
    if (offers[from].number != number)
        fail("line %d: a shuffle reads lane %u, which does not take part (it has returned, or was never started)", line,
             from);
    __builtin_memcpy(&value, &offers[from].value, sizeof value);
    return value;
}

// A thread's life. It never returns: the next block starts it afresh.
UNWATCHED static void fiber_main() {
    tsan::acquire(&block_starts);
    call_kernel();
    running->done = true;
    for (Barrier* b : {&whole_block, static_cast<Barrier*>(running->warp)}) {  // as on a GPU, nobody waits for it now
        tsan::release(&b->tags[b->round % 2]);
        b->members--;
        b->open_if_complete();
    }
    back_to_scheduler();
}

// ---------------------------------------------------------------------------------------------------------
// The scheduler: one block, then a whole grid
// ---------------------------------------------------------------------------------------------------------

UNWATCHED static void report_deadlock() {
    int n = snprintf(error, sizeof error, "deadlock in block (%u, %u, %u):", blockIdx.x, blockIdx.y, blockIdx.z);
    if (whole_block.arrived)
        n += snprintf(error + n, sizeof error - n, " %d of %d threads wait at the __syncthreads in line %d;",
                      whole_block.arrived, whole_block.members, whole_block.line);
    for (size_t w = 0; w < warps.size() && n < int(sizeof error) - 200; w++)
        if (warps[w].arrived)
            n += snprintf(error + n, sizeof error - n,
                          " %d of %d threads of warp %zu wait at the shuffle or __syncwarp in line %d;",
                          warps[w].arrived, warps[w].members, w, warps[w].line);
    snprintf(error + n, sizeof error - n, " the others never come");
}

// Start every thread of the block anew, on the stack it had before.
UNWATCHED static void prepare_block(size_t dynamic_bytes) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    fibers.resize(threads);
    warps.assign((threads + 31) / 32, Warp{});
    whole_block = Barrier{};
    whole_block.members = threads;
    for (unsigned i = 0; i < threads; i++) {
        Fiber& f = fibers[i];
        if (!f.stack) {
            f.stack.reset(new char[STACK_BYTES]);
            f.tsan = tsan::new_fiber();
        }
        f.thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        f.lane = i % 32;
        f.warp = &warps[i / 32];
        f.warp->members++;
        f.barrier = nullptr;
        f.shuffles = 0;
        f.done = false;
        prepare(f.context, f.stack.get());
    }
    memset(static_shared.start, 0xff, static_shared.bytes);
    if (dynamic_bytes) memset(dynamic_shared.get(), 0xff, dynamic_bytes);
}

// Turns for all, in the given order, until all have returned. Leaves `error` empty, or a message.
UNWATCHED static void run_block(const std::vector<unsigned>& order, size_t dynamic_bytes) {
    prepare_block(dynamic_bytes);
    tsan_scheduler = tsan::this_fiber();
    tsan::release(&block_starts);
    size_t alive = order.size();
    while (alive && !error[0]) {
        bool someone_ran = false;
        for (unsigned i : order) {
            Fiber& f = fibers[i];
            if (f.done || f.must_wait()) continue;
            someone_ran = true;
            running = &f;
            threadIdx = f.thread;
            tsan::switch_to(f.tsan);
            switch_context(scheduler, f.context);
            if (error[0]) break;
            if (f.done) alive--;
        }
        if (!someone_ran) report_deadlock();
    }
    for (Fiber& f : fibers) {  // all that they did comes before whatever is done next, even if they got stuck
        tsan::switch_to(f.tsan);
        tsan::release(&block_ends);
        tsan::switch_to(tsan_scheduler);
    }
    tsan::acquire(&block_ends);
}

// Where the kernels' __shared__ arrays are. They are the only thread_local variables of this library (but for one
// byte), so they lie side by side in its TLS segment, and the dynamic linker knows where that is: search its list of
// loaded libraries for the one with this very function in it. (A section attribute would need one line for the same,
// but gcc ignores it in templates.)
static Memory shared_memory() {
    static thread_local volatile char touched;
    touched = 1;  // the segment is made when it is first used
    Memory found;
    auto search = [](dl_phdr_info* library, size_t, void* result) -> int {
        bool ours = false;
        for (int i = 0; i < library->dlpi_phnum; i++) {
            const auto& segment = library->dlpi_phdr[i];
            const uintptr_t start = library->dlpi_addr + segment.p_vaddr;
            if (segment.p_type == PT_LOAD)  // unsigned: an address below the start gives a huge difference
                ours |= reinterpret_cast<uintptr_t>(&shared_memory) - start < segment.p_memsz;
            if (segment.p_type == PT_TLS)
                *static_cast<Memory*>(result) = {static_cast<char*>(library->dlpi_tls_data), segment.p_memsz};
        }
        return ours;  // true ends the search
    };
    dl_iterate_phdr(search, &found);
    return found;
}

struct Launch {  // what stands between <<< and >>>, and the seed; cpu_module.py fills it in
    unsigned grid[3], block[3];
    unsigned shared_bytes, seed;
};

template <class T> T read_argument(const void* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

// Runs kernel<<<how>>>(args...) to its end. The arguments come as cuLaunchKernel takes them: an array of
// pointers to their values, the types of which only the kernel knows. Returns nullptr, or what went wrong.
template <class... Params> const char* launch(void (*kernel)(Params...), const Launch& how, const void* const* args) {
    const std::tuple<Params...> values{read_argument<Params>(*args++)...};
    call_kernel = [&] { std::apply(kernel, values); };
    gridDim = {how.grid[0], how.grid[1], how.grid[2]};
    blockDim = {how.block[0], how.block[1], how.block[2]};
    static_shared = shared_memory();
    dynamic_shared.reset(how.shared_bytes ? new char[how.shared_bytes] : nullptr);
    error[0] = 0;

    std::vector<unsigned> blocks(gridDim.x * gridDim.y * gridDim.z), threads(blockDim.x * blockDim.y * blockDim.z);
    for (unsigned i = 0; i < blocks.size(); i++) blocks[i] = i;
    for (unsigned i = 0; i < threads.size(); i++) threads[i] = i;
    std::mt19937 random(how.seed);
    if (how.seed) std::shuffle(blocks.begin(), blocks.end(), random);
    for (unsigned b : blocks) {
        blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
        if (how.seed) std::shuffle(threads.begin(), threads.end(), random);
        run_block(threads, how.shared_bytes);
        if (error[0]) {
            fibers.clear();  // some stopped in the middle of a function: not even their stacks are clean
            return error;
        }
    }
    return nullptr;
}

// Kind and size of a parameter, such as "p8 ": pointer, float, integer, or s for a struct.
template <class T> std::string describe() {
    const char kind = std::is_pointer_v<T>          ? 'p'
                      : std::is_floating_point_v<T> ? 'f'
                      : std::is_integral_v<T>       ? 'i'
                                                    : 's';
    return kind + std::to_string(sizeof(T)) + ' ';
}

// All parameters of a kernel, so that the caller can check what it passes.
template <class... Params> const char* signature(void (*)(Params...)) {
    static const std::string text = (std::string() + ... + describe<Params>());
    return text.c_str();
}

}  // namespace cpu

// ---------------------------------------------------------------------------------------------------------
// What kernels call to wait for each other. The line is the caller's: default arguments are evaluated there.
// ---------------------------------------------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) { cpu::wait(cpu::whole_block, true, line); }
UNWATCHED static void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    if (mask != ~0u) cpu::fail("line %d: cuda_on_cpu.h knows __syncwarp of whole warps only, not mask %#x", line, mask);
    cpu::wait(*cpu::running->warp, true, line);
}
template <class T> UNWATCHED T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
    return cpu::shuffle(mask, value, unsigned(lane) % 32, line);
}
template <class T> UNWATCHED T __shfl_xor_sync(unsigned mask, T value, int bits, int line = __builtin_LINE()) {
    return cpu::shuffle(mask, value, (cpu::running->lane ^ unsigned(bits)) % 32, line);
}
template <class T> UNWATCHED T __shfl_down_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
    const unsigned lane = cpu::running->lane;
    return cpu::shuffle(mask, value, lane + delta < 32 ? lane + delta : lane, line);  // past the end: one's own
}

// KERNEL(some_symbol, kernel<half, 64, 1>) instantiates a kernel and makes it callable from outside.
#define KERNEL(symbol, ...)                                                                                     \
    extern "C" __attribute__((visibility("default"))) const char* symbol(const cpu::Launch* how,                \
                                                                         const void* const* args) {            \
        return cpu::launch(__VA_ARGS__, *how, args);                                                            \
    }                                                                                                           \
    extern "C" __attribute__((visibility("default"))) const char* symbol##_signature() {                        \
        return cpu::signature(__VA_ARGS__);                                                                     \
    }
