/*
Adaptive computation pruning (ACP, arXiv 2504.06949): finds the blocks of keys that a block of queries can
skip because the forget gates leave them a negligible attention weight.

    cum_logf         double [B, NH, T], never rising (forget_gate.cuh); c below
    q, k             bf16   [B, T, NH, dh], aligned to 16 bytes
    blocks           ceil(T / ATTENTION_BLOCK), of queries or of keys; ATTENTION_BLOCK = 128
    results          first_key_block, last_query_block, head_order (AttentionBounds in shape.cuh)

The trainer calls pruning_bounds before attention_forward, and pruning_backward_bounds before
attention_backward.

The rule. Let U bound |q_i k_j| / sqrt(dh) over all pairs of a head. Then p_ij <= exp(U + c_i - c_j - lse_i).
If row i skips the keys up to J and

    U + c_i - lse_i + ln sum_j exp(-c_j) < ln eps,    j <= J

it loses less than eps of its weight, and its lse falls by at most -ln(1 - eps). A block of queries m skips
the blocks of keys up to n if this holds for all its rows. As c never rises, a sufficient condition is

    reach_m - past_n < ln eps - U
    reach_m = c[first of m] - min lse of m
    past_n  = c[last of n] - ln sum_j exp(c[last of n] - c_j),    j <= last of n

 - past_n bounds its sum by blocks: keys of block b contribute at most 128 exp(c[last of n] - c[last of b]).
 - The backward pass knows lse. The forward pass uses a lower bound, -U + ln sum_j exp(c_i - c_j), j <= i: the
   longer a head remembers, the less one key can weigh. It counts 1 for the query itself and, for the up to
   PRUNING_BLOCKS blocks n before m, the least that their keys can contribute, 128 exp(c[last of m] -
   c[first of n]).

The result is a staircase. A block of keys that one block of queries needs is kept by the blocks of queries
before it too (pruning_suffix_max). So whatever m skips, all later blocks of queries skip, and two numbers
describe it all: the first block of keys of each block of queries, and the last block of queries of each block
of keys. Binary search finds both. A block always attends to itself.

Band heads. A head is a band head if every 64 queries (ATTENTION_BAND) may skip all keys but their own 64 and
the 64 before. It needs no bounds: sm90_band.cuh computes it. The rule is the same, with the least lse of the
block of 128 queries, and with the last 16 skipped keys (PRUNING_KEYS) summed one by one. At initialization
nearly all heads are band heads. head_order has them last. Only heads of size 64 without a window can be band
heads.

`acp` selects the rule of ACP's paper instead, with the same guarantee but looser bounds, to compare shares
with the literature. In both passes block m skips block n if

    c[first of m] - c[last of n] < -(2 U + ln T) + ln eps

which bounds each of T keys by eps / T of a row's weight, and lse by -U. In the terms above, reach_m = c[first
of m] + U + ln T and past_n = c[last of n]. It names no band heads.

Window of W keys (HeadShape): the rule holds unchanged, since the same terms are missing from a row's weight
and from what it skips, whose share can only fall. The lower bound of lse counts keys of the window alone. A
block of queries also skips the blocks that the window hides from all of it.

Packed documents (HeadShape's doc_start): a log gate of WALL_LOGF at a document's first token separates it
from the one before. The rule counts nothing across that wall, but it does not guarantee to skip the blocks
behind it, as U has no limit without QK norm. So a block of queries explicitly skips the blocks before its
first token's document. doc_start never falls, so this is a staircase too. Without pruning (score_limits NULL)
the bounds are those of documents alone.

U is the lesser of two bounds:

 - by norms: |q| |k| / sqrt(dh) for the largest norms of the head's queries and keys. qkv.cuh measures them as
   it writes q and k; where it does not and there is no QK norm, pruning_squares reads q and k.
 - by QK norm's weights a and b: sqrt(dh) max |a_c b_c|, whatever the tokens, as q and k have length sqrt(dh)
   before these weights. With RoPE, which rotates the pairs (c, c + dh/2), the larger weight of each pair
   counts, and YaRN's gain (llmc/model/rotation.h) squared multiplies U.

`acp` takes U of ACP's paper: sqrt(dh) max |a_c| max |b_c|, or without QK norm the measured norms. Without
RoPE a and b have the same gradients up to rounding (a_c da_c and b_c db_c sum the same terms), so they stay
equal if they begin so: the weights then give what the paper's U does, and the norms decide.
*/
#pragma once

#include "attention.cuh"

// Share of pairs of blocks that is skipped
static inline double pruning_share(const PruningCount* count) {
    return count->all ? 1 - (double)count->kept / (double)count->all : 0;
}

// Writes (all, kept) of each layer to counts [layers, 2] on the host, from the device.
static inline void pruning_counts_download(double* counts, const PruningCount* device, int64_t layers) {
    PruningCount* host = (PruningCount*)xcalloc((size_t)layers, sizeof *host);
    CUDA_CHECK(cudaMemcpy(host, device, (size_t)layers * sizeof *host, cudaMemcpyDeviceToHost));
    for (int64_t l = 0; l < layers; l++)
        counts[2 * l] = (double)host[l].all, counts[2 * l + 1] = (double)host[l].kept;
    free(host);
}

typedef struct {
    AttentionBounds bounds; // written
    double* score_limits;   // [B NH], U of each head: written by the forward pass, read by the backward pass;
                            // NULL: nothing is pruned, and what follows is not read but for scratch
    PruningCount* count;    // added to; NULL: not counted
    unsigned long long* head_kept; // [NH] added to: count->kept of each head; NULL: not counted
    const double* cum_logf;
    const float* squares;            // of qkv_forward; NULL: not measured
    const bf16 *q, *k;               // read only without QK norm and squares
    const bf16 *q_weight, *k_weight; // of QK norm, shape->weight_stride from head to head; NULL without
    const float* lse;                // [B, NH, T] of attention_forward, for the backward pass
    double log_tolerance;            // ln eps, <= 0
    double rope_gain;                // |q k| by RoPE behind their norm: config_rope_gain; 0: no RoPE
    bool acp;                        // use the rule of ACP's paper
    void* scratch;                   // pruning_scratch_bytes
    // First query of q; the bounds of earlier ones are not valid. B is 1 unless it is 0.
    int64_t first_query;
    // The queries whose blocks are counted, with all keys before them; 0 where there is a window.
    HeadPart part;
} Pruning;

#define PRUNING_BAND INT64_MAX // subtracted from a band head's work: negative, and still sorted by work

// Layout of Pruning.scratch
struct PruningScratch {
    double *reach, *past; // [B NH, blocks] each
    int64_t* head_work;   // [B NH], pairs of blocks that are kept; for band heads minus PRUNING_BAND
    unsigned* squares;    // [2, B NH], see pruning_squares_kernel
    int blocks;

    PruningScratch(void* scratch, const HeadShape* s) : blocks((int)head_blocks(s)) {
        int64_t heads = s->B * s->NH;
        reach = (double*)scratch;
        past = reach + heads * blocks;
        head_work = (int64_t*)(past + heads * blocks);
        squares = (unsigned*)(head_work + heads);
    }
};
static inline size_t pruning_scratch_bytes(const HeadShape* s) {
    int64_t blocks = head_blocks(s);
    return (size_t)(s->B * s->NH) *
           (2 * (size_t)blocks * sizeof(double) + sizeof(int64_t) + 2 * sizeof(unsigned));
}

// ----------------------------------------------------------------------------
// the largest norms of q and k

#define PRUNING_LOADS 8 // in flight per thread

template <int DH> struct PruningRows {
    static constexpr int THREADS = 256, LANES = DH / 8; // LANES per row
    static constexpr int STEP = THREADS / LANES, TOKENS = STEP * PRUNING_LOADS;
};

// The head of keys that query head h reads, without divisions where each has its own
__device__ static inline int pruning_key_head(const HeadShape& s, int h) {
    return s.KVH && s.KVH != s.NH ? h / ((int)s.NH / (int)s.KVH) : h;
}

// squares [2, B NH]: the largest sum of squares of a row of q (blockIdx.y 0) and of k (1). Thread block
// slice B NH + head reads TOKENS tokens of one head. Floats >= 0 compare like their bits, so atomicMax on
// unsigned works, and a maximum does not depend on their order.
template <int DH>
__global__ static void __launch_bounds__(PruningRows<DH>::THREADS)
    pruning_squares_kernel(unsigned* __restrict__ squares, const bf16* __restrict__ q,
                           const bf16* __restrict__ k, const __grid_constant__ HeadShape s,
                           int64_t first_query) {
    typedef PruningRows<DH> R;
    int NH = (int)s.NH, heads = (int)s.B * NH, head = (int)(blockIdx.x % (unsigned)heads);
    bool keys = blockIdx.y; // heads of a group find the same of k
    int64_t first = (int64_t)(blockIdx.x / (unsigned)heads) * R::TOKENS + threadIdx.x / R::LANES, T = s.T;
    int64_t row_stride = (keys && s.KVH ? s.KVH : s.NH) * DH, least = keys ? 0 : first_query;
    const bf16* x = (keys ? k : q) + (head / NH * T + first - least) * row_stride +
                    (keys ? pruning_key_head(s, head % NH) : head % NH) * DH;
    x += threadIdx.x % R::LANES * 8;
    Raw8 raw[PRUNING_LOADS] = {};
#pragma unroll
    for (int i = 0; i < PRUNING_LOADS; i++)
        if (first + i * R::STEP < T && first + i * R::STEP >= least)
            raw[i] = load_raw8(x + i * R::STEP * row_stride);
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
static inline void pruning_squares(unsigned* squares, const Pruning* p, const HeadShape* s,
                                   cudaStream_t stream) {
    int64_t heads = s->B * s->NH;
    CUDA_CHECK(cudaMemsetAsync(squares, 0, (size_t)(2 * heads) * sizeof *squares, stream));
    dim3 grid((unsigned)(heads * ceil_div<int64_t>(s->T, PruningRows<DH>::TOKENS)), 2);
    CUDA_LAUNCH(pruning_squares_kernel<DH>, grid, PruningRows<DH>::THREADS, stream, squares, p->q, p->k, *s,
                p->first_query);
}

#define PRUNING_THREADS 512

// The results of QK norm are rounded to bf16, each by up to 2^-8; sums of squares are in float.
#define PRUNING_ROUNDING (1 + 1.0 / 128)

// U of head h by QK norm's weights, in every lane of a warp
__device__ static inline double pruning_weight_limit(const Pruning& p, const HeadShape& s, int h) {
    int dh = (int)s.dh, half = p.rope_gain > 0 ? dh / 2 : dh;
    const bf16* q = p.q_weight + h * s.weight_stride;
    const bf16* k = p.k_weight + pruning_key_head(s, h) * s.weight_stride;
    float q_max = 0, k_max = 0, product = 0;
    for (int pair = (int)threadIdx.x % 32; pair < half; pair += 32) { // without RoPE a pair is one channel
        float a = 0, b = 0;
        for (int channel = pair; channel < dh; channel += half) {
            a = fmaxf(a, fabsf(__bfloat162float(q[channel])));
            b = fmaxf(b, fabsf(__bfloat162float(k[channel])));
        }
        q_max = fmaxf(q_max, a), k_max = fmaxf(k_max, b), product = fmaxf(product, a * b); // exact
    }
    double gain = p.rope_gain > 0 ? p.rope_gain : 1;
    return (p.acp ? warp_max(q_max) * warp_max(k_max) : warp_max(product)) * gain * sqrt((double)dh) *
           PRUNING_ROUNDING;
}

// U of head b NH + h by the norms that were measured, in every thread
__device__ static inline double pruning_norm_limit(const Pruning& p, const HeadShape& s,
                                                   const PruningScratch& scratch, int head) {
    __shared__ unsigned squares[2]; // bits of floats
    int NH = (int)s.NH, heads = (int)s.B * NH;
    if (threadIdx.x < 2) squares[threadIdx.x] = p.squares ? 0 : scratch.squares[threadIdx.x * heads + head];
    __syncthreads();
    if (p.squares) {
        int64_t groups = ceil_div<int64_t>(s.B * s.T, NORM_TOKENS), first = head / NH * s.T / NORM_TOKENS;
        int count = (int)(ceil_div<int64_t>((head / NH + 1) * s.T, NORM_TOKENS) - first);
        const float* q = p.squares + head % NH * groups + first;
        const float* k = p.squares + (NH + pruning_key_head(s, head % NH)) * groups + first;
        float q_max = 0, k_max = 0;
#pragma unroll 8
        for (int group = (int)threadIdx.x; group < count; group += PRUNING_THREADS)
            q_max = fmaxf(q_max, __ldg(&q[group])), k_max = fmaxf(k_max, __ldg(&k[group]));
        q_max = warp_max(q_max), k_max = warp_max(k_max);
        if (threadIdx.x % 32 == 0) atomicMax(&squares[0], __float_as_uint(q_max));
        if (threadIdx.x % 32 == 0) atomicMax(&squares[1], __float_as_uint(k_max));
        __syncthreads();
    }
    double square = (double)__uint_as_float(squares[0]) * (double)__uint_as_float(squares[1]);
    return sqrt(square / (double)s.dh) * PRUNING_ROUNDING;
}

// U of head b NH + h, in every thread
__device__ static inline double pruning_score_limit(const Pruning& p, const HeadShape& s,
                                                    const PruningScratch& scratch, int head) {
    double limit = p.q_weight ? pruning_weight_limit(p, s, head % (int)s.NH) : INFINITY;
    bool measured = !p.q_weight || (p.squares && !p.acp);
    return measured ? fmin(pruning_norm_limit(p, s, scratch, head), limit) : limit;
}

// ----------------------------------------------------------------------------
// the bounds of one head, by one thread block

// x [n]: each element becomes the maximum of itself and all later ones, NaN ignored. So where gates are NaN
// from some token on, later blocks may skip older ones, but each still attends to itself, which makes its
// results NaN. Called by every thread.
__device__ static inline void pruning_suffix_max(double* x, int n) {
    constexpr int WARPS = PRUNING_THREADS / 32;
    __shared__ double warp_results[WARPS];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    double later = -INFINITY;
    for (int end = n; end > 0; end -= PRUNING_THREADS) {
        int at = end - 1 - (int)threadIdx.x;
        double greatest = at >= 0 ? x[at] : -INFINITY;
        for (int step = 1; step < 32; step *= 2) {
            double other = __shfl_up_sync(0xffffffffu, greatest, step);
            if (lane >= step) greatest = fmax(greatest, other);
        }
        if (lane == 31) warp_results[warp] = greatest;
        __syncthreads();
        double all = later;
        for (int i = 0; i < WARPS; i++) {
            if (i == warp) greatest = fmax(greatest, all);
            all = fmax(all, warp_results[i]);
        }
        if (at >= 0) x[at] = greatest;
        later = all;
        __syncthreads(); // warp_results has been read, and x written
    }
}

// Number of blocks that a sum includes one by one. Each block further back counts 0 in a lower bound, and as
// much as the nearest of them in an upper bound.
#define PRUNING_BLOCKS 32

// sum_n exp(cum_logf[at] - cum_logf[token(n)]) over blocks n from low to high, at most PRUNING_BLOCKS. Four
// adjacent threads share a sum; called by all threads of a warp.
template <class Token>
__device__ static inline float pruning_sum(const double* __restrict__ cum_logf, int64_t at, int low, int high,
                                           const Token& token) {
    double now = __ldg(&cum_logf[at]), before[PRUNING_BLOCKS / 4]; // all loads are in flight at once
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PRUNING_BLOCKS / 4; i++)
        before[i] = __ldg(&cum_logf[token(max(min(low + 4 * i + (int)threadIdx.x % 4, high), 0))]);
#pragma unroll
    for (int i = 0; i < PRUNING_BLOCKS / 4; i++)
        if (low + 4 * i + (int)threadIdx.x % 4 <= high) sum += expf((float)(now - before[i]));
    return quad_sum(sum);
}

// Calls run(block) in four adjacent threads per block; for the last block possibly more than once.
template <class Run> __device__ static inline void pruning_for_each_block(int blocks, const Run& run) {
    for (int first = 0; first < blocks; first += PRUNING_THREADS / 4)
        run(min(first + (int)threadIdx.x / 4, blocks - 1));
}

// The most blocks of keys that a block of queries can see through the window, at most `blocks`
__host__ __device__ static inline int pruning_span(const HeadShape& s, int blocks) {
    int64_t seen = s.window ? (s.window + ATTENTION_BLOCK - 2) / ATTENTION_BLOCK + 1 : blocks;
    return (int)(seen < blocks ? seen : blocks);
}

// Blocks that are visible to a block before pruning: limited by the window and, with DOCS, by documents
template <bool DOCS> struct PruningSight {
    const int32_t* doc_start; // of the sequence
    int blocks, span;

    __device__ PruningSight(const HeadShape& s, int blocks)
        : doc_start(DOCS ? s.doc_start + blockIdx.x / (unsigned)s.NH * s.T : NULL), blocks(blocks),
          span(pruning_span(s, blocks)) {}
    // The block of keys in which the document of query block m's first token begins
    __device__ int document(int m) const {
        return __ldg(&doc_start[(int64_t)m * ATTENTION_BLOCK]) / ATTENTION_BLOCK;
    }
    __device__ int first_key_block(int m) const {
        int first = max(m - span + 1, 0);
        return DOCS ? max(first, document(m)) : first;
    }
    __device__ int last_query_block(int n) const {
        int last = min(n + span, blocks) - 1;
        return DOCS ? search_first(n, last, [&](int m) { return document(m + 1) > n; }) : last;
    }
};

// Keys that pruning_is_band's sums include one by one; a multiple of 4, up to ATTENTION_BAND
#define PRUNING_KEYS 16

// Returns, in every thread, whether the thread block's head is a band head. reach is the rule's above, not
// ACP's.
__device__ static inline bool pruning_is_band(const Pruning& p, const HeadShape& s, const double* reach,
                                              double limit) {
    const double* cum_logf = p.cum_logf + blockIdx.x * s.T;
    const int blocks = (int)ceil_div<int64_t>(s.T, ATTENTION_BAND);
    bool band = true;
    // four adjacent threads per block m of queries, which may skip the keys up to `skipped`
    for (int first = 2; first < blocks; first += PRUNING_THREADS / 4) {
        int m = min(first + (int)threadIdx.x / 4, blocks - 1), pair = m * ATTENTION_BAND / ATTENTION_BLOCK;
        const double* at = cum_logf + (int64_t)m * ATTENTION_BAND;
        const double *skipped = at - ATTENTION_BAND - 1, *older = skipped - PRUNING_KEYS;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < PRUNING_KEYS; j += 4)
            sum += expf((float)(__ldg(skipped) - __ldg(skipped - j - threadIdx.x % 4)));
        sum = quad_sum(sum) + (float)(older - cum_logf + 1) * expf((float)(__ldg(skipped) - __ldg(older)));
        double least_lse = __ldg(&cum_logf[(int64_t)pair * ATTENTION_BLOCK]) - reach[pair];
        band &= __ldg(at) - __ldg(skipped) + logf(sum) - least_lse < p.log_tolerance - limit;
    }
    return __syncthreads_and(band);
}

// Writes the bounds of the thread block's head, where block m of queries skips block n if pruned(m, n), and
// the head's work under them. Adds the work `times` times to p.count and p.head_kept.
template <bool DOCS, class Pruned>
__device__ static inline void pruning_write(const Pruning& p, const HeadShape& s,
                                            const PruningScratch& scratch, const PruningSight<DOCS>& sight,
                                            unsigned times, bool band, const Pruned& pruned) {
    int blocks = scratch.blocks, span = sight.span;
    int64_t first_block = (int64_t)blockIdx.x * blocks, work = 0, seen = 0;
    for (int i = (int)threadIdx.x; i < blocks; i += PRUNING_THREADS) {
        int first_seen = sight.first_key_block(i);
        int first_key = search_first(first_seen, i, [&](int n) { return !pruned(i, n); });
        p.bounds.first_key_block[first_block + i] = first_key;
        p.bounds.last_query_block[first_block + i] =
            search_first(i, sight.last_query_block(i), [&](int m) { return pruned(m + 1, i); });
        if (i >= p.part.halo) work += i - first_key + 1;
        if (DOCS) seen += i - first_seen + 1;
    }
    work = block_sum(work);
    if (DOCS) {
        __syncthreads(); // block_sum's shared memory has been read
        seen = block_sum(seen);
    }
    if (threadIdx.x > 0) return;
    scratch.head_work[blockIdx.x] = work - (band ? PRUNING_BAND : 0);
    if (p.head_kept) atomicAdd(&p.head_kept[blockIdx.x % (unsigned)s.NH], (unsigned long long)work * times);
    if (p.count) {
        unsigned long long all =
            (unsigned long long)span * (unsigned)(2 * blocks - span + 1) / 2; // the first blocks see fewer
        if (DOCS) all = (unsigned long long)seen;
        all += (unsigned long long)((blocks - p.part.halo) * p.part.before -
                                    p.part.halo * (p.part.halo + 1) / 2);
        atomicAdd(&p.count->all, all * times);
        atomicAdd(&p.count->kept, (unsigned long long)work * times);
    }
}

// Thread block b NH + h computes reach and past of head h, its bounds, and its work under them, which the
// backward pass counts twice.
template <bool BACKWARD, bool DOCS>
__global__ static void __launch_bounds__(PRUNING_THREADS, 1)
    pruning_bounds_kernel(const __grid_constant__ Pruning p, const __grid_constant__ HeadShape s,
                          const __grid_constant__ PruningScratch scratch) {
    int blocks = scratch.blocks;
    int64_t first_block = (int64_t)blockIdx.x * blocks; // of the head
    double *reach = scratch.reach + first_block, *past = scratch.past + first_block;
    const double* cum_logf = p.cum_logf + blockIdx.x * s.T;
    auto first = [](int n) { return (int64_t)n * ATTENTION_BLOCK; }; // tokens of block n
    auto last = [&](int n) { return min((int64_t)(n + 1) * ATTENTION_BLOCK, s.T) - 1; };
    double limit =
        BACKWARD ? p.score_limits[blockIdx.x] : pruning_score_limit(p, s, scratch, (int)blockIdx.x);
    if (!BACKWARD && threadIdx.x == 0) p.score_limits[blockIdx.x] = limit;
    if (p.acp) {
        pruning_for_each_block(
            blocks, [&](int m) { reach[m] = __ldg(&cum_logf[first(m)]) + limit + log((double)s.T); });
    } else if (BACKWARD) {
        const float* lse = p.lse + blockIdx.x * s.T;
        constexpr int WARPS = PRUNING_THREADS / 32,
                      GROUP = 4; // blocks of a warp, all loads in flight at once
        int lane = (int)threadIdx.x % 32;
        for (int from = (int)threadIdx.x / 32; from < blocks; from += GROUP * WARPS) {
            float least[GROUP];
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                int m = min(from + g * WARPS, blocks - 1); // the last one more than once
                least[g] = INFINITY;
#pragma unroll
                for (int i = 0; i < ATTENTION_BLOCK; i += 32)
                    least[g] = fminf(least[g], __ldg(&lse[min(first(m) + i + lane, last(m))]));
            }
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                int m = min(from + g * WARPS, blocks - 1);
                float x = -warp_max(-least[g]);
                if (lane == 0) reach[m] = __ldg(&cum_logf[first(m)]) - x;
            }
        }
    } else {
        pruning_for_each_block(blocks, [&](int m) {
            int64_t hidden = s.window ? max(last(m) + 1 - s.window, (int64_t)0) : 0; // from the last query
            int from = (int)ceil_div<int64_t>(hidden, ATTENTION_BLOCK); // all queries see all of its keys
            float sum = pruning_sum(cum_logf, last(m), max(m - PRUNING_BLOCKS, from), m - 1, first);
            reach[m] = __ldg(&cum_logf[first(m)]) - (log1pf(ATTENTION_BLOCK * sum) - limit);
        });
    }
    pruning_for_each_block(blocks, [&](int n) {
        int from = max(n - PRUNING_BLOCKS + 1, 0);
        float sum = pruning_sum(cum_logf, last(n), from, n, last);
        if (from > 0) // all older blocks
            sum += (float)from * expf((float)(__ldg(&cum_logf[last(n)]) - __ldg(&cum_logf[last(from - 1)])));
        past[n] = __ldg(&cum_logf[last(n)]) - (p.acp ? 0 : logf(ATTENTION_BLOCK * sum));
    });
    __syncthreads();
    const bool band = !p.acp && s.dh == 64 && !s.window && pruning_is_band(p, s, reach, limit);
    pruning_suffix_max(reach, blocks);
    pruning_suffix_max(past, blocks); // falls but for rounding: whoever skips a block skips all earlier ones
    auto pruned = [&](int m, int n) { return reach[m] - past[n] < p.log_tolerance - limit; };
    pruning_write(p, s, scratch, PruningSight<DOCS>(s, blocks), BACKWARD ? 2 : 1, band, pruned);
}

// Packed documents without pruning: thread block b NH + h writes the bounds of documents alone.
__global__ static void __launch_bounds__(PRUNING_THREADS)
    pruning_documents_kernel(const __grid_constant__ Pruning p, const __grid_constant__ HeadShape s,
                             const __grid_constant__ PruningScratch scratch, unsigned times) {
    PruningSight<true> sight(s, scratch.blocks);
    pruning_write(p, s, scratch, sight, times, false, [](int, int) { return false; });
}

// ----------------------------------------------------------------------------
// launches

// Writes head_order: a head's position is the number of heads with more work. A band head's work is negative.
__global__ static void __launch_bounds__(PRUNING_THREADS)
    pruning_order_kernel(int* __restrict__ head_order, const int64_t* __restrict__ head_work, int heads) {
    int head = (int)(blockIdx.x * PRUNING_THREADS + threadIdx.x), position = 0, others = 0;
    if (head >= heads) return;
    int64_t work = head_work[head];
#pragma unroll 8
    for (int other = 0; other < heads; other++) {
        int64_t x = head_work[other];
        position += x > work || (x == work && other < head);
        others += x >= 0; // no band heads
    }
    head_order[position] = head;
    if (head == 0) head_order[heads] = others;
}

template <bool BACKWARD>
static inline void pruning_launch(const Pruning* p, const HeadShape* s, cudaStream_t stream) {
    int64_t heads = s->B * s->NH;
    PruningScratch scratch(p->scratch, s);
    auto kernel =
        s->doc_start ? pruning_bounds_kernel<BACKWARD, true> : pruning_bounds_kernel<BACKWARD, false>;
    assert(p->score_limits || s->doc_start);
    if (p->score_limits)
        CUDA_LAUNCH(kernel, heads, PRUNING_THREADS, stream, *p, *s, scratch);
    else
        CUDA_LAUNCH(pruning_documents_kernel, heads, PRUNING_THREADS, stream, *p, *s, scratch,
                    BACKWARD ? 2u : 1u);
    CUDA_LAUNCH(pruning_order_kernel, ceil_div<int64_t>(heads, PRUNING_THREADS), PRUNING_THREADS, stream,
                p->bounds.head_order, scratch.head_work, (int)heads);
}

// Writes p->bounds such that the skipped keys hold at most eps = exp(log_tolerance) of each row's attention
// weight, and p->score_limits.
static inline void pruning_bounds(const Pruning* p, const HeadShape* s, cudaStream_t stream) {
    Range range("pruning bounds", RANGE_FORWARD, stream);
    attention_check(s);
    assert(!p->score_limits || (p->log_tolerance <= 0 && !p->q_weight == !p->k_weight));
    PruningScratch scratch(p->scratch, s);
    if (!p->score_limits) return pruning_launch<false>(p, s, stream);
    const bool measures = !p->q_weight && !p->squares;
    if (measures && s->dh == 64) pruning_squares<64>(scratch.squares, p, s, stream);
    if (measures && s->dh == 128) pruning_squares<128>(scratch.squares, p, s, stream);
    pruning_launch<false>(p, s, stream);
}

// Writes the bounds of the backward pass, from score_limits and lse. They keep no more blocks than those of
// pruning_bounds, with the same guarantee, and may overwrite them.
static inline void pruning_backward_bounds(const Pruning* p, const HeadShape* s, cudaStream_t stream) {
    Range range("pruning bounds", RANGE_BACKWARD, stream);
    pruning_launch<true>(p, s, stream);
}
