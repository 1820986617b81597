// kernels.cu: write new K and V into the paged cache, and attend over it through block tables.
//
// The versions, in reading order:
//
//   reshape_and_cache       copies K and V of the new tokens into their slots, 16 bytes at a time.
//                           Bound: memory. Nothing to win: a copy is a copy.
//   paged_attention_simple  one thread block per (token, head), one cache block of keys at a time. To be read first.
//                           Bound: latency. Sixteen threads compute scores while the others wait, then everybody waits for
//                           memory; K and V are read again for every token of a chunk. Correct, and many times too slow.
//   paged_attention         many loads in flight, rows that share them, no barrier in the loop, the context split over
//                           several thread blocks. One kernel for decode, draft verification and prefill chunks.
//                           Bound: memory for decode, as it should be: each K and V is read once per tile of rows.
//   merge_splits            adds up the parts that the splits of paged_attention left behind.
//
// What the compiler makes of them, for GPT-2's head_dim in half precision (python tests/sass.py prints all instances). In flight:
// the 16-byte loads under way when the first is waited for; loop: instructions of the innermost loop over keys.
//
// nvcc 13.0                                           sm_80                                     sm_90
//                                   registers   spilled in flight      loop   registers   spilled in flight      loop
// reshape_and_cache                        20         0         2        24          20         0         2        24
// merge_splits<half, 64>                   32         0         -         -          32         0         -         -
// paged_attention_simple<half, 64>         95         0         -         -          96         0         -         -
// paged_attention<half, 64, 1>             80         4         8       287          85         0         8       279
// paged_attention<half, 64, 4>            168         0         8       697         180         0         8       664
//
// The cache of one layer is two arrays k_cache and v_cache: [num_blocks][BLOCK_SIZE][kv_heads][HEAD_DIM]. The key at
// position p of a sequence is in block table[p / BLOCK_SIZE], at offset p % BLOCK_SIZE.
//
// Grouped-query heads: `group` = heads / kv_heads query heads share a K/V head; GPT-2 has group 1.
//
// `#pragma unroll`: an array can live in registers if the compiler knows every index. Loops of a constant length and one
// statement it unrolls unasked.
//
// Past the end of a context a block may hold anything, even NaN. It is loaded (a branch around a load costs more than
// the load) but never used: its score is MASKED, and its V is set to 0, because 0 * NaN is NaN.

#ifdef __CUDACC__  // nvcc and NVRTC. The tests' CPU build brings its own half and bf16.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using bf16 = __nv_bfloat16;
#endif

constexpr int BLOCK_SIZE = 16;
constexpr float LOG2_E = 1.44269504f;  // exp(x) = exp2(x * LOG2_E), and the hardware has exp2
constexpr float LOWEST = -1e30f;       // the largest score of no keys: finite, so that LOWEST - LOWEST is 0 and not NaN
constexpr float MASKED = -3e38f;       // the score of a key that must not be seen: exp2(MASKED - LOWEST) is 0

// ---------------------------------------------------------------------------------------------
// Writing. One thread block per new token.

// A row of K is `width` pieces of 16 bytes; rows of the source are `stride` pieces apart, as K and V are slices of the
// QKV product. A slot of -1 is padding. Bytes are bytes: this kernel does not care about the type of the numbers.
extern "C" __global__ void reshape_and_cache(uint4* k_cache, uint4* v_cache, const uint4* k, const uint4* v,
                                             const int* slots, int width, int stride) {
    const long long token = blockIdx.x, slot = slots[token];
    if (slot < 0) return;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const uint4 key = k[token * stride + i], value = v[token * stride + i];  // both under way before either is stored
        k_cache[slot * width + i] = key;
        v_cache[slot * width + i] = value;
    }
}

// ---------------------------------------------------------------------------------------------
// The softmax of scores that come bit by bit.

// Attention over some set of keys, in a form that can be extended key by key, and merged with attention over other keys
// (online softmax, Milakov and Gimelshein 2018). The result is sum / weight. Over no keys at all it is the state below:
// weight 0, sum 0, and merging it changes nothing.
template <int N>  // dimensions of V that this thread looks after
struct Attended {
    float top = LOWEST;  // the largest score so far, in units of log 2
    float weight = 0;    // sum of exp2(score - top)
    float sum[N] = {};   // sum of exp2(score - top) * V

    // Make `score` fit: everything so far was relative to the old top.
    __device__ void raise(float score) {
        const float higher = fmaxf(top, score), shrink = exp2f(top - higher);
        top = higher;
        weight *= shrink;
        for (int i = 0; i < N; i++) sum[i] *= shrink;
    }
    // Add what was attended over other keys.
    __device__ void merge(float other_top, float other_weight, const float* other_sum) {
        raise(other_top);
        const float shrink = exp2f(other_top - top);
        weight += other_weight * shrink;
        for (int i = 0; i < N; i++) sum[i] += other_sum[i] * shrink;
    }
};

// ---------------------------------------------------------------------------------------------
// Attention, simple. grid (heads, tokens), block (HEAD_DIM): a thread for each dimension of the output.

// out is [tokens][heads][HEAD_DIM]; q has such rows too, but q_stride apart. block_tables is [sequences][table_width].
// Each token has a sequence, where -1 is padding, and a position: it sees the keys 0 .. position of its sequence.
template <typename T, int HEAD_DIM>
__global__ void paged_attention_simple(T* out, const T* q, int q_stride, const T* k_cache, const T* v_cache,
                                       const int* block_tables, int table_width, const int* sequences,
                                       const int* positions, float scale, int group) {
    const int head = blockIdx.x, heads = gridDim.x, token = blockIdx.y, d = threadIdx.x;
    const int kv_head = head / group, kv_heads = heads / group;
    if (sequences[token] < 0) return;
    const int* table = block_tables + (long long)sequences[token] * table_width;
    const int context = positions[token] + 1;
    const T* query = q + (long long)token * q_stride + head * HEAD_DIM;

    __shared__ float scores[BLOCK_SIZE];
    Attended<1> state;
    for (int first = 0; first < context; first += BLOCK_SIZE) {
        const long long block = table[first / BLOCK_SIZE];  // <- the page table walk: the whole of PagedAttention
        const int keys = min(BLOCK_SIZE, context - first);

        // 1) A score for each key of the block, one thread each.
        for (int i = d; i < keys; i += HEAD_DIM) {
            const T* key = k_cache + ((block * BLOCK_SIZE + i) * kv_heads + kv_head) * HEAD_DIM;
            float dot = 0;
            for (int j = 0; j < HEAD_DIM; j++) dot += float(query[j]) * float(key[j]);
            scores[i] = dot * scale * LOG2_E;
        }
        __syncthreads();  // all scores are there

        // 2) Each thread adds its dimension of the block's values.
        for (int i = 0; i < keys; i++) {
            const float value = float(v_cache[((block * BLOCK_SIZE + i) * kv_heads + kv_head) * HEAD_DIM + d]);
            state.merge(scores[i], 1.0f, &value);  // one key: weight exp2(0), sum 1 * V
        }
        __syncthreads();  // all have read them: the next block may overwrite
    }
    out[((long long)token * heads + head) * HEAD_DIM + d] = T(state.sum[0] / state.weight);
}

// ---------------------------------------------------------------------------------------------
// Attention, fast.

// 16 bytes of T: the widest load a thread can make, and the only one this kernel makes of q, K and V.
template <typename T>
struct alignas(16) Vec {
    static constexpr int N = 16 / sizeof(T);
    T x[N];
};

template <typename T>
__device__ Vec<T> load16(const T* p) {
    Vec<T> v;
    *reinterpret_cast<uint4*>(&v) = *reinterpret_cast<const uint4*>(p);
    return v;
}

constexpr int WARPS = 4;  // in a thread block

// grid (kv_heads, tiles, splits), block (32 * WARPS).
//
// Rows and tiles.  A row is one query vector: a token and a head. The rows of a sequence that read the same K/V head are
// numbered token * group + head in group, its tokens counted from query_start[sequence]. A tile is up to ROWS of them,
// tiles[t] = (sequence, first row), and shares every load of K and V: 1 row for a decode, 4 for chunks, verification and
// grouped heads. Sequence -1 is padding.
//
// Who reads what.  LANES threads hold one key, 16 bytes each, so one load of a warp fetches KEYS keys, and STEPS loads of K
// and of V are in flight before the first is used: a CHUNK of keys. The chunks of a split go to its warps in turn. Each
// group of LANES threads keeps an `Attended` of its own for its keys. Nothing is exchanged until the loop is over.
//
// Splits.  One decode has heads thread blocks for a whole GPU. With a long context, `splits` thread blocks share it; each
// leaves (sum, top, weight) in `partial`, and merge_splits adds them up.
template <typename T, int HEAD_DIM, int ROWS>
__global__ void __launch_bounds__(32 * WARPS)
    paged_attention(T* out, float* partial, const T* q, int q_stride, const T* k_cache, const T* v_cache,
                    const int* block_tables, int table_width, const int* query_start, const int* positions,
                    const int2* tiles, float scale, int group) {
    constexpr int N = Vec<T>::N, LANES = HEAD_DIM / N, KEYS = 32 / LANES;
    constexpr int STEPS = BLOCK_SIZE / KEYS < 4 ? BLOCK_SIZE / KEYS : 4, CHUNK = KEYS * STEPS;
    static_assert(LANES <= 32 && BLOCK_SIZE % CHUNK == 0, "a chunk of keys must lie in one cache block");
    const int kv_head = blockIdx.x, kv_heads = gridDim.x, split = blockIdx.z, splits = gridDim.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_of_lane = lane / LANES, piece = lane % LANES;

    const int sequence = tiles[blockIdx.y].x, first_row = tiles[blockIdx.y].y;
    if (sequence < 0) return;
    const int start = query_start[sequence], rows = min(ROWS, (query_start[sequence + 1] - start) * group - first_row);

    float query[ROWS][N];
    int last[ROWS];  // the last position each row may see
    Attended<N> state[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = first_row + min(r, rows - 1);  // a tile that is not full repeats its last row, and drops it at the end
        const int token = start + row / group, head = kv_head * group + row % group;
        last[r] = positions[token];
        const Vec<T> v = load16(q + (long long)token * q_stride + head * HEAD_DIM + piece * N);
        for (int i = 0; i < N; i++) query[r][i] = float(v.x[i]) * (scale * LOG2_E);
    }

    const int context = last[ROWS - 1] + 1, chunks = (context + CHUNK - 1) / CHUNK;
    const int per_split = (chunks + splits - 1) / splits, end = min((split + 1) * per_split, chunks);
    const int* table = block_tables + (long long)sequence * table_width;
    const int slot_size = kv_heads * HEAD_DIM;  // elements between one key and the next

    int chunk = split * per_split + warp;
    int block = chunk < end ? table[chunk * CHUNK / BLOCK_SIZE] : 0;
    for (; chunk < end; chunk += WARPS) {
        const int key = chunk * CHUNK + key_of_lane;  // the first of this thread's keys; the others follow KEYS apart
        const long long at = ((long long)block * BLOCK_SIZE + key % BLOCK_SIZE) * slot_size + kv_head * HEAD_DIM + piece * N;
        if (chunk + WARPS < end) block = table[(chunk + WARPS) * CHUNK / BLOCK_SIZE];  // known before it is needed

        // One base address and constant strides, no branch: all loads are under way before the first is waited for.
        Vec<T> k[STEPS], v[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            k[s] = load16(k_cache + at + s * KEYS * slot_size);
            v[s] = load16(v_cache + at + s * KEYS * slot_size);
        }
        for (int s = 0; s < STEPS; s++)
            if (key + s * KEYS >= context) v[s] = Vec<T>{};

#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float score[STEPS], top = LOWEST;
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                float dot = 0;
                for (int i = 0; i < N; i++) dot += query[r][i] * float(k[s].x[i]);
                for (int other = LANES / 2; other > 0; other /= 2) dot += __shfl_xor_sync(0xffffffff, dot, other);
                score[s] = key + s * KEYS <= last[r] ? dot : MASKED;
                top = fmaxf(top, score[s]);
            }
            state[r].raise(top);  // once per round, not once per key
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const float p = exp2f(score[s] - state[r].top);
                state[r].weight += p;
                for (int i = 0; i < N; i++) state[r].sum[i] += p * float(v[s].x[i]);
            }
        }
    }

    // Merge the key groups of a warp by shuffles, then the warps through shared memory.
    __shared__ float warp_sum[WARPS][ROWS][HEAD_DIM], warp_top[WARPS][ROWS], warp_weight[WARPS][ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int other = LANES; other < 32; other *= 2) {
            float sum[N];
            for (int i = 0; i < N; i++) sum[i] = __shfl_xor_sync(0xffffffff, state[r].sum[i], other);
            const float top = __shfl_xor_sync(0xffffffff, state[r].top, other);
            const float weight = __shfl_xor_sync(0xffffffff, state[r].weight, other);
            state[r].merge(top, weight, sum);
        }
        if (key_of_lane == 0)
            for (int i = 0; i < N; i++) warp_sum[warp][r][piece * N + i] = state[r].sum[i];
        if (lane == 0) warp_top[warp][r] = state[r].top, warp_weight[warp][r] = state[r].weight;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * HEAD_DIM; i += blockDim.x) {
        const int r = i / HEAD_DIM, d = i % HEAD_DIM, row = first_row + r;
        Attended<1> all;
        for (int w = 0; w < WARPS; w++) all.merge(warp_top[w][r], warp_weight[w][r], &warp_sum[w][r][d]);
        const long long o = (long long)(start + row / group) * kv_heads * group + kv_head * group + row % group;
        if (splits == 1) {
            out[o * HEAD_DIM + d] = T(all.sum[0] / all.weight);
        } else {
            float* p = partial + (o * splits + split) * (HEAD_DIM + 2);
            p[d] = all.sum[0];
            if (d == 0) p[HEAD_DIM] = all.top, p[HEAD_DIM + 1] = all.weight;
        }
    }
}

// grid (heads, tokens), block (HEAD_DIM). partial: [tokens][heads][splits][HEAD_DIM + 2], the sums, then top and weight.
template <typename T, int HEAD_DIM>
__global__ void merge_splits(T* out, const float* partial, const int* sequences, int splits) {
    if (sequences[blockIdx.y] < 0) return;
    const long long o = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    Attended<1> all;
    for (int s = 0; s < splits; s++) {
        const float* p = partial + (o * splits + s) * (HEAD_DIM + 2);
        all.merge(p[HEAD_DIM], p[HEAD_DIM + 1], p + threadIdx.x);
    }
    out[o * HEAD_DIM + threadIdx.x] = T(all.sum[0] / all.weight);
}
