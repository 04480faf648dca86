/*
Adaptive computation pruning (ACP, arXiv 2504.06949): which blocks of keys a block of queries need not look
at, because the forget gates leave them next to no attention weight.

With |q_i.k_j| / sqrt(dh) <= U for all pairs of a head, p_ij <= exp(U + c_i - c_j - lse_i). A row that leaves
out its first keys, up to J, where

    U + c_i - lse_i + ln sum_j exp(-c_j) < ln eps,    j <= J

keeps all but eps of its weight, and its lse falls by at most -ln(1 - eps). A block of queries m leaves out
the blocks of keys up to n when this holds for all its rows. As c never rises, it does when

    reach_m - past_n < ln eps - U
    reach_m = c[first of m] - min lse of m,    past_n = c[last of n] - ln sum_j exp(c[last of n] - c_j)

The sum in past_n, over j up to the last of n, is known by blocks: the keys of block b give at most
128 exp(c[last of n] - c[last of b]). The backward pass knows lse. The forward pass knows that it is at least
-U + ln sum_j exp(c_i - c_j), j <= i: the longer a head remembers, the less one key can weigh. Of that sum it
counts 1 for the query itself and, for some blocks n before, 128 exp(c[last of m] - c[first of n]), the least
that their keys can give.

Where a later block of queries looks back further than an earlier one, the earlier one is let look as far.
Then what is skipped by m is skipped by the queries after m too, and two numbers say it all: for each block of
queries the first block of keys that it looks at, for each block of keys the last block of queries that looks
at it. Both come by binary search. A block always looks at itself. Documents packed in a row, with a log gate
of -1000 at each one's first token, are kept apart by the same rule.

U is |q| |k| / sqrt(dh), with the largest norms of the head. After QK norm these are at most max |weight|
sqrt(dh), whatever the tokens; else a pass over q and k finds them. RoPE, a rotation, keeps them.

    c                double [B, NH, T], never rising (forget_gate.cuh)
    q, k             bf16   [B, T, NH, dh], aligned to 16 bytes
    blocks           ceil(T / ATTENTION_BLOCK), of queries or of keys
*/
#ifndef LLMC_PRUNING_CUH
#define LLMC_PRUNING_CUH

#include "attention.cuh"

// Pairs of a block of queries and a block of keys that causal attention has, and those that are left. Those
// of the backward pass count double, as in the model's FLOPs.
typedef struct {
    unsigned long long all, kept;
} PruningCount;

// The share that is skipped.
static inline double pruning_share(const PruningCount* count) {
    return count->all ? 1 - (double)count->kept / (double)count->all : 0;
}

// Scratch of pruning_bounds and pruning_backward_bounds.
struct PruningScratch {
    double *reach, *past; // [B NH, blocks] each
    int64_t* head_work;   // [B NH] pairs of blocks that are left
    unsigned* squares;    // [2, B NH]

    PruningScratch(void* scratch, int64_t heads, int64_t blocks) {
        reach = (double*)scratch;
        past = reach + heads * blocks;
        head_work = (int64_t*)(past + heads * blocks);
        squares = (unsigned*)(head_work + heads);
    }
};
static inline size_t pruning_scratch_bytes(int64_t B, int64_t T, int64_t NH) {
    int64_t blocks = ceil_div<int64_t>(T, ATTENTION_BLOCK);
    return (size_t)(B * NH) * (2 * (size_t)blocks * sizeof(double) + sizeof(int64_t) + 2 * sizeof(unsigned));
}

// ----------------------------------------------------------------------------
// the largest norms of q and k

#define PRUNING_LOADS 8 // that a thread has on their way

template <int DH> struct PruningRows {
    static constexpr int THREADS = 256, LANES = DH / 8; // of a row
    static constexpr int STEP = THREADS / LANES, TOKENS = STEP * PRUNING_LOADS;
};

// squares [2, B NH]: the largest sum of squares of a row of q (blockIdx.y 0), of k (1). Block slice B NH +
// head takes TOKENS tokens of one head. Floats that are not negative compare like their bits, and a maximum
// does not depend on the order.
template <int DH>
__global__ static void __launch_bounds__(PruningRows<DH>::THREADS)
    pruning_squares_kernel(unsigned* __restrict__ squares, const bf16* __restrict__ q,
                           const bf16* __restrict__ k, int64_t T, int heads, int NH) {
    typedef PruningRows<DH> R;
    int head = (int)(blockIdx.x % (unsigned)heads);
    int64_t first = (int64_t)(blockIdx.x / (unsigned)heads) * R::TOKENS + threadIdx.x / R::LANES;
    int64_t row = (int64_t)NH * DH;
    const bf16* x = (blockIdx.y ? k : q) + (head / NH * T + first) * row + head % NH * DH;
    x += threadIdx.x % R::LANES * 8;
    Raw8 raw[PRUNING_LOADS] = {};
#pragma unroll
    for (int i = 0; i < PRUNING_LOADS; i++)
        if (first + i * R::STEP < T) raw[i] = load_raw8(x + i * R::STEP * row);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < PRUNING_LOADS; i++) {
        float v[8], sum = 0;
        unpack8(v, raw[i]);
        for (int j = 0; j < 8; j++) sum += v[j] * v[j];
        for (int lane = R::LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
        largest = fmaxf(largest, sum);
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) atomicMax(&squares[blockIdx.y * heads + head], __float_as_uint(largest));
}

template <int DH>
static inline void pruning_squares(unsigned* squares, const bf16* q, const bf16* k, int64_t B, int64_t T,
                                   int64_t NH, cudaStream_t stream) {
    CUDA_CHECK(cudaMemsetAsync(squares, 0, (size_t)(2 * B * NH) * sizeof *squares, stream));
    dim3 grid((unsigned)(B * NH * ceil_div<int64_t>(T, PruningRows<DH>::TOKENS)), 2);
    pruning_squares_kernel<DH>
        <<<grid, PruningRows<DH>::THREADS, 0, stream>>>(squares, q, k, T, (int)(B * NH), (int)NH);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// the bounds

#define PRUNING_THREADS 512

// The least x in low..high for which holds(x), which is true from there on, and in any case at high.
template <class Holds> __device__ static inline int pruning_search(int low, int high, const Holds& holds) {
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (holds(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// The last token of block n
__device__ static inline int64_t pruning_last(int n, int64_t T) {
    return min((int64_t)(n + 1) * ATTENTION_BLOCK, T) - 1;
}

// x [n]: each becomes the greatest of those from it on. Every thread calls it.
__device__ static inline void pruning_suffix_max(double* x, int n) {
    constexpr int WARPS = PRUNING_THREADS / 32;
    __shared__ double of_warp[WARPS];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    double behind = -INFINITY;
    for (int end = n; end > 0; end -= PRUNING_THREADS) {
        int at = end - 1 - (int)threadIdx.x;
        double greatest = at >= 0 ? x[at] : -INFINITY;
        for (int step = 1; step < 32; step *= 2) {
            double other = __shfl_up_sync(0xffffffffu, greatest, step);
            if (lane >= step) greatest = fmax(greatest, other);
        }
        if (lane == 31) of_warp[warp] = greatest;
        __syncthreads();
        double all = behind;
        for (int i = 0; i < WARPS; i++) {
            if (i == warp) greatest = fmax(greatest, all);
            all = fmax(all, of_warp[i]);
        }
        if (at >= 0) x[at] = greatest;
        behind = all;
        __syncthreads(); // of_warp has been read, and x written
    }
}

// Blocks that a sum looks at one by one. Those further back count nothing where the least is asked for, and
// as much as the nearest of them where the most is.
#define PRUNING_BLOCKS 32

// sum_n exp(c[at] - c[token(n)]) over blocks n from low to high. Four threads in a row share one; all of a
// warp call it.
template <class Token>
__device__ static inline float pruning_sum(const double* __restrict__ c, int64_t at, int low, int high,
                                           const Token& token) {
    float sum = 0;
#pragma unroll 4
    for (int n = low + (int)threadIdx.x % 4; n <= high; n += 4) sum += expf((float)(c[at] - c[token(n)]));
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Calls run(block) in four threads in a row each; the last block more often.
template <class Run> __device__ static inline void pruning_each_block(int blocks, const Run& run) {
    for (int first = 0; first < blocks; first += PRUNING_THREADS / 4)
        run(min(first + (int)threadIdx.x / 4, blocks - 1));
}

// Writes a head's bounds and what work they leave, and counts that `times` over. Every thread calls it when
// it has written its part of reach [blocks]. past [blocks] is scratch, limit U.
__device__ static inline void pruning_write_bounds(const AttentionBounds& bounds, int64_t* head_work,
                                                   PruningCount* count, int times, double* reach,
                                                   double* past, const double* __restrict__ c, double limit,
                                                   double log_tolerance, int64_t T, int blocks) {
    constexpr int WARPS = PRUNING_THREADS / 32;
    __shared__ int64_t of_warp[WARPS];
    int *first_key_block = bounds.first_key_block + (int64_t)blockIdx.x * blocks,
        *last_query_block = bounds.last_query_block + (int64_t)blockIdx.x * blocks;
    auto last = [&](int n) { return pruning_last(n, T); };
    pruning_each_block(blocks, [&](int n) {
        int from = max(n - PRUNING_BLOCKS + 1, 0);
        float sum = pruning_sum(c, last(n), from, n, last);
        if (from > 0) sum += (float)from * expf((float)(c[last(n)] - c[last(from - 1)])); // all older ones
        past[n] = c[last(n)] - logf(ATTENTION_BLOCK * sum);
    });
    __syncthreads();
    pruning_suffix_max(reach, blocks);
    pruning_suffix_max(past, blocks); // falls but for rounding: who skips a block skips all before
    auto pruned = [&](int m, int n) { return reach[m] - past[n] < log_tolerance - limit; };
    int64_t work = 0;
    for (int i = (int)threadIdx.x; i < blocks; i += PRUNING_THREADS) {
        int first = pruning_search(0, i, [&](int n) { return !pruned(i, n); });
        first_key_block[i] = first;
        last_query_block[i] = pruning_search(i, blocks - 1, [&](int m) { return pruned(m + 1, i); });
        work += i - first + 1;
    }
    for (int lane = 16; lane > 0; lane /= 2) work += __shfl_xor_sync(0xffffffffu, work, lane);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = work;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < WARPS; warp++) work += of_warp[warp];
    head_work[blockIdx.x] = work;
    if (count) {
        unsigned long long all = (unsigned long long)blocks * (unsigned)(blocks + 1) / 2;
        atomicAdd(&count->all, all * (unsigned)times);
        atomicAdd(&count->kept, (unsigned long long)work * (unsigned)times);
    }
}

// What the bound of a head's scores is made from.
struct PruningLimits {
    const bf16 *q_weight, *k_weight; // of QK norm, NULL without
    const unsigned* squares;         // without it: [2, heads]
    int weight_step;                 // from one head's weights to the next
    int heads, NH, dh;

    // U, in every thread
    __device__ double score_limit(int head) const {
        double square = 1; // of |q| |k|
        for (int i = 0; i < 2; i++) {
            if (!q_weight) {
                square *= (double)__uint_as_float(squares[i * heads + head]);
                continue;
            }
            const bf16* weight = (i ? k_weight : q_weight) + head % NH * weight_step;
            float largest = 0;
            for (int channel = (int)threadIdx.x % 32; channel < dh; channel += 32)
                largest = fmaxf(largest, fabsf(__bfloat162float(weight[channel])));
            largest = warp_max(largest);
            square *= (double)largest * (double)largest * dh;
        }
        // QK norm's results are rounded to bf16, each by up to 2^-8; sums of squares are in float.
        return sqrt(square / dh) * (1 + 1.0 / 128);
    }
};

// Block b NH + h, like the next one.
__global__ static void __launch_bounds__(PRUNING_THREADS)
    pruning_bounds_kernel(AttentionBounds bounds, double* __restrict__ score_limits, PruningScratch scratch,
                          PruningCount* count, const double* __restrict__ c,
                          const __grid_constant__ PruningLimits limits, double log_tolerance, int64_t T,
                          int blocks) {
    double limit = limits.score_limit((int)blockIdx.x);
    double *reach = scratch.reach + (int64_t)blockIdx.x * blocks,
           *past = scratch.past + (int64_t)blockIdx.x * blocks;
    if (threadIdx.x == 0) score_limits[blockIdx.x] = limit;
    c += blockIdx.x * T;
    auto first = [](int n) { return (int64_t)n * ATTENTION_BLOCK; };
    pruning_each_block(blocks, [&](int m) {
        float sum = pruning_sum(c, pruning_last(m, T), max(m - PRUNING_BLOCKS, 0), m - 1, first);
        reach[m] = c[first(m)] - (log1pf(ATTENTION_BLOCK * sum) - limit);
    });
    pruning_write_bounds(bounds, scratch.head_work, count, 1, reach, past, c, limit, log_tolerance, T,
                         blocks);
}

__global__ static void __launch_bounds__(PRUNING_THREADS)
    pruning_backward_bounds_kernel(AttentionBounds bounds, PruningScratch scratch, PruningCount* count,
                                   const double* __restrict__ c, const float* __restrict__ lse,
                                   const double* __restrict__ score_limits, double log_tolerance, int64_t T,
                                   int blocks) {
    double *reach = scratch.reach + (int64_t)blockIdx.x * blocks,
           *past = scratch.past + (int64_t)blockIdx.x * blocks;
    c += blockIdx.x * T;
    lse += blockIdx.x * T;
    int lane = (int)threadIdx.x % 32;
    for (int m = (int)threadIdx.x / 32; m < blocks; m += PRUNING_THREADS / 32) {
        float least = INFINITY;
        for (int64_t i = (int64_t)m * ATTENTION_BLOCK + lane; i <= pruning_last(m, T); i += 32)
            least = fminf(least, lse[i]);
        least = -warp_max(-least);
        if (lane == 0) reach[m] = c[(int64_t)m * ATTENTION_BLOCK] - least;
    }
    pruning_write_bounds(bounds, scratch.head_work, count, 2, reach, past, c, score_limits[blockIdx.x],
                         log_tolerance, T, blocks);
}

// A head's place is the number of heads that come before it.
__global__ static void __launch_bounds__(PRUNING_THREADS)
    pruning_order_kernel(int* __restrict__ head_order, const int64_t* __restrict__ head_work, int heads) {
    int head = (int)(blockIdx.x * PRUNING_THREADS + threadIdx.x), place = 0;
    if (head >= heads) return;
    int64_t work = head_work[head];
#pragma unroll 8
    for (int other = 0; other < heads; other++) {
        int64_t x = head_work[other];
        place += x > work || (x == work && other < head);
    }
    head_order[place] = head;
}

static inline void pruning_order(const AttentionBounds* bounds, const int64_t* head_work, int64_t heads,
                                 cudaStream_t stream) {
    unsigned grid = (unsigned)ceil_div<int64_t>(heads, PRUNING_THREADS);
    pruning_order_kernel<<<grid, PRUNING_THREADS, 0, stream>>>(bounds->head_order, head_work, (int)heads);
    CUDA_CHECK_LAUNCH();
}

// Writes bounds such that what is skipped holds at most eps = exp(log_tolerance) of each row's attention
// weight; log_tolerance <= 0. Writes score_limits [B NH] too, the U of each head. With QK norm q_weight and
// k_weight are its weights, weight_step apart from one head to the next (dh, or 0 where heads share them);
// without it they are NULL, and q and k are read. Adds to *count unless it is NULL. scratch has
// pruning_scratch_bytes.
static inline void pruning_bounds(const AttentionBounds* bounds, double* score_limits, PruningCount* count,
                                  const double* c, const bf16* q, const bf16* k, const bf16* q_weight,
                                  const bf16* k_weight, int64_t weight_step, double log_tolerance,
                                  void* scratch, int64_t B, int64_t T, int64_t NH, int64_t dh,
                                  cudaStream_t stream) {
    attention_check(B, T, NH, dh);
    assert(log_tolerance <= 0 && !q_weight == !k_weight);
    int64_t blocks = ceil_div<int64_t>(T, ATTENTION_BLOCK);
    PruningScratch parts(scratch, B * NH, blocks);
    if (!q_weight && dh == 64) pruning_squares<64>(parts.squares, q, k, B, T, NH, stream);
    if (!q_weight && dh == 128) pruning_squares<128>(parts.squares, q, k, B, T, NH, stream);
    PruningLimits limits;
    limits.q_weight = q_weight, limits.k_weight = k_weight, limits.squares = parts.squares;
    limits.weight_step = (int)weight_step;
    limits.heads = (int)(B * NH), limits.NH = (int)NH, limits.dh = (int)dh;
    pruning_bounds_kernel<<<(unsigned)(B * NH), PRUNING_THREADS, 0, stream>>>(
        *bounds, score_limits, parts, count, c, limits, log_tolerance, T, (int)blocks);
    CUDA_CHECK_LAUNCH();
    pruning_order(bounds, parts.head_work, B * NH, stream);
}

// Writes the backward pass's bounds, which leave no more than pruning_bounds' and keep the same promise, from
// what that and attention_forward gave: score_limits and lse [B, NH, T]. They may take the place of the
// forward pass's. Counts double in *count unless it is NULL. scratch has pruning_scratch_bytes.
static inline void pruning_backward_bounds(const AttentionBounds* bounds, PruningCount* count,
                                           const double* c, const float* lse, const double* score_limits,
                                           double log_tolerance, void* scratch, int64_t B, int64_t T,
                                           int64_t NH, cudaStream_t stream) {
    int64_t blocks = ceil_div<int64_t>(T, ATTENTION_BLOCK);
    PruningScratch parts(scratch, B * NH, blocks);
    pruning_backward_bounds_kernel<<<(unsigned)(B * NH), PRUNING_THREADS, 0, stream>>>(
        *bounds, parts, count, c, lse, score_limits, log_tolerance, T, (int)blocks);
    CUDA_CHECK_LAUNCH();
    pruning_order(bounds, parts.head_work, B * NH, stream);
}

#endif // LLMC_PRUNING_CUH
