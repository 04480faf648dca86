/*
Reduces a row's logits, after lm_head, to what the host needs of them (RowScore of llmc/model/extension.h):

    row_scores   the most likely token, and the log-probability of the target
    row_draws    the next token, by the rules and random numbers of the CPU's sampler (sampler.h)

    in    logits [rows, row_stride] float, the first V columns of a row, row_stride a multiple of 4; targets;
          draws
    out   scores [steps, outputs]; the pass's next tokens and positions (pass_advance), by the last of the two

row_scores has SCORE_PARTITIONS thread blocks a row, each over a partition of the columns. Invariants of their
reduction:

1. A block writes its ScorePartial before it increments num_done (__threadfence between them).
2. The block that increments num_done last has all partials (__threadfence after atomicAdd), and combines them
   in a fixed order: the result does not depend on which block that is.
3. num_done is 0 between launches: the last block resets it (scores_combine).

row_draws has one thread block a row. Tokens are ordered by sampler_key. Top-k and top-p are found by
bisection over the keys: each iteration sums a measure (count or weight) over all tokens up to a key. Measures
are integers, so no sum depends on an order.

Called by extension.cuh.
*/
#pragma once

#include "../../layers/classifier.cuh"
#include "pass.cuh"

// ----------------------------------------------------------------------------
// scores

enum { SCORE_PARTITIONS = 8, SCORE_THREADS = 512 };

typedef struct __align__(8) {
    uint64_t key; // scores_key of the most likely token
    ExpSum sum;
    int nan;
}
ScorePartial;

// Arguments of row_scores besides logits
typedef struct {
    PassOutputs outputs;
    const int32_t* targets; // [outputs] tokens below V; -1: none, logprob is 0
    ScorePartial* partials; // [outputs, SCORE_PARTITIONS]
    unsigned* num_done;     // [outputs] partitions whose partial is written
} Scores;

// Orders (logit, token): a larger logit has the larger key, of equal logits the lower token.
__device__ static inline uint64_t scores_key(float logit, int token) {
    uint32_t bits = __float_as_uint(logit + 0.0f); // -0 becomes 0
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)token);
}

__device__ static inline uint64_t max_key(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ static inline uint64_t scores_warp_max(uint64_t x) {
    for (int step = 16; step > 0; step /= 2) x = max_key(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// By one thread: the score of an output from its partials.
__device__ static inline void scores_combine(const Scores& s, const float* row, int output) {
    ScorePartial all = s.partials[output * SCORE_PARTITIONS];
    for (int i = 1; i < SCORE_PARTITIONS; i++) {
        ScorePartial next = s.partials[output * SCORE_PARTITIONS + i];
        all = {max_key(all.key, next.key), exp_sum_join(all.sum, next.sum), all.nan | next.nan};
    }
    int best = (int)(0xffffffffu - (uint32_t)all.key), target = s.targets[output];
    double logprob = 0;
    if (target >= 0) logprob = (double)row[target] - (double)all.sum.max - log((double)all.sum.sum);
    if (all.nan || isinf(row[best])) best = -1;
    s.num_done[output] = 0;
    *pass_score(s.outputs, output) = {logprob, best, best};
    if (!s.outputs.draws) pass_advance(s.outputs, output, best);
}

// Block (partition, row)
__global__ static void __launch_bounds__(SCORE_THREADS)
    scores_kernel(const __grid_constant__ Scores scores, const float* logits, int first, int V,
                  int64_t row_stride) {
    __shared__ uint64_t keys[32];
    kernel_wait();
    const float* row = logits + blockIdx.y * row_stride;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, output = first + (int)blockIdx.y;
    uint64_t key = 0;
    bool nan = false;
    ExpSum s = {-FLT_MAX, 0};
    for (int i = 4 * ((int)blockIdx.x * SCORE_THREADS + (int)threadIdx.x); i < V;
         i += 4 * SCORE_PARTITIONS * SCORE_THREADS) {
        Pack4 x = load16(row + i);
        float max = s.max, sum = 0;
        for (int j = 0; j < 4; j++) {
            if (i + j >= V) x[j] = -INFINITY;
            nan |= isnan(x[j]);
            if (i + j < V) key = max_key(key, scores_key(x[j], i + j));
            max = fmaxf(max, x[j]);
        }
        for (int j = 0; j < 4; j++) sum += expf(x[j] - max);
        s = {max, s.sum * expf(s.max - max) + sum};
    }
    key = scores_warp_max(key);
    if (lane == 0) keys[warp] = key;
    nan = __syncthreads_or(nan);
    s = block_exp_sum(s);
    if (warp != 0) return;
    key = scores_warp_max(lane < SCORE_THREADS / 32 ? keys[lane] : 0);
    if (lane != 0) return;
    scores.partials[output * SCORE_PARTITIONS + blockIdx.x] = {key, s, nan};
    __threadfence();
    if (atomicAdd(&scores.num_done[output], 1) < SCORE_PARTITIONS - 1) return;
    __threadfence();
    scores_combine(scores, row, output);
}

// Computes the scores of outputs first, first + 1, .. from rows 0, 1, .. of logits.
static inline void row_scores(const Scores* scores, const float* logits, int64_t first,
                              const LogitShape* shape, cudaStream_t stream) {
    Range range("lm_head and loss", RANGE_FORWARD, stream);
    assert(shape->row_stride % 4 == 0);
    launch_after(scores_kernel, dim3(SCORE_PARTITIONS, (unsigned)shape->rows), SCORE_THREADS, 0, stream,
                 *scores, logits, (int)first, (int)shape->V, shape->row_stride);
}

// ----------------------------------------------------------------------------
// draws

enum { DRAW_THREADS = 1024 };

// Sum over the thread block, returned to all threads
__device__ static inline uint64_t draw_sum(uint64_t x) {
    __shared__ uint64_t warp_sums[DRAW_THREADS / 32];
    auto lane_sum = [](uint64_t y) {
        for (int step = 16; step > 0; step /= 2) y += __shfl_xor_sync(~0u, y, step);
        return y;
    };
    x = lane_sum(x);
    __syncthreads(); // the sums of an earlier call have been read
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    return lane_sum(warp_sums[threadIdx.x % 32]);
}

struct DrawRow {
    const float* logits;
    int V;
    float best;
    SamplerSettings settings;

    __device__ uint64_t key(int i) const { return sampler_key(logits[i], i); }
    __device__ uint64_t weight(int i) const { return sampler_weight(logits[i], best, settings.temperature); }

    // Sum of measure(i) over the tokens whose key is at most `last`
    template <class Measure> __device__ uint64_t sum(uint64_t last, const Measure& measure) const {
        uint64_t mine = 0;
        for (int i = (int)threadIdx.x; i < V; i += DRAW_THREADS)
            if (key(i) <= last) mine += measure(i);
        return draw_sum(mine);
    }

    // Smallest key whose sum is `enough`; the sum over all tokens is.
    template <class Measure, class Enough>
    __device__ uint64_t select(const Measure& measure, const Enough& enough) const {
        uint64_t logit = search_first(
            0u, UINT32_MAX, [&](uint32_t x) { return enough(sum((uint64_t)x << 32 | UINT32_MAX, measure)); });
        uint64_t end = logit << 32 | UINT32_MAX;
        if (sum(end, [&](int i) { return (uint64_t)(key(i) >> 32 == logit); }) == 1) return end;
        return logit << 32 | search_first(0u, UINT32_MAX >> __clz(V), [&](uint32_t x) { // of equal logits
                   return enough(sum(logit << 32 | x, measure));
               });
    }

    // Key of the last token within top-k and top-p, as sampler_cut
    __device__ uint64_t cut() const {
        auto one = [](int) { return (uint64_t)1; };
        auto weight_of = [this](int i) { return weight(i); };
        uint64_t last = UINT64_MAX;
        if (settings.top_k > 0 && settings.top_k < V)
            last = select(one, [this](uint64_t n) { return n >= (uint64_t)settings.top_k; });
        if (settings.top_p < 1) {
            double threshold = settings.top_p * (double)sum(last, weight_of);
            // at least one token is kept
            last = min(last, select(weight_of, [&](uint64_t n) { return n > 0 && (double)n >= threshold; }));
        }
        return last;
    }

    // Can a token be drawn?
    __device__ bool kept(int i, uint64_t last) const {
        return key(i) <= last && (double)weight(i) >= settings.min_p * SAMPLER_ONE;
    }

    // Inverse of the cumulative weight at the target; a thread has `share` adjacent tokens.
    __device__ int draw(uint64_t counter) const {
        __shared__ uint64_t sums[DRAW_THREADS];
        __shared__ int token;
        uint64_t last = cut(), mine = 0, before = 0, total;
        int share = (V + DRAW_THREADS - 1) / DRAW_THREADS, begin = (int)threadIdx.x * share;
        int end = min(begin + share, V);
        for (int i = begin; i < end; i++) mine += kept(i, last) ? weight(i) : 0;
        sums[threadIdx.x] = mine;
        total = draw_sum(mine);
        uint64_t target = sampler_target(&settings, counter, total);
        for (int i = 0; i < (int)threadIdx.x; i++) before += sums[i];
        if (before <= target && target < before + mine)
            for (int i = begin; i < end; i++) {
                if (!kept(i, last)) continue;
                before += weight(i);
                if (before > target) {
                    token = i;
                    break;
                }
            }
        __syncthreads();
        return token;
    }
};

// One thread block an output
__global__ static void __launch_bounds__(DRAW_THREADS)
    draw_kernel(const __grid_constant__ PassOutputs o, const float* logits, int first, int V,
                int64_t row_stride) {
    kernel_wait();
    int output = first + (int)blockIdx.x;
    RowScore* score = pass_score(o, output);
    Draw draw = o.draws[output];
    int token = score->best;
    DrawRow row = {logits + blockIdx.x * row_stride, V, 0, draw.settings};
    if (token >= 0 && draw.settings.temperature != 0) {
        row.best = row.logits[token];
        token = row.draw(draw.counter);
    }
    __syncthreads(); // pass_advance and the stores below overwrite what all threads have now read
    if (threadIdx.x > 0) return;
    score->drawn = token;
    o.draws[output].counter++;
    pass_advance(o, output, token);
}

// Draws the tokens of outputs first, first + 1, .. from rows 0, 1, .. of logits.
static inline void row_draws(const PassOutputs* outputs, const float* logits, int64_t first,
                             const LogitShape* shape, cudaStream_t stream) {
    Range range("lm_head and loss", RANGE_FORWARD, stream);
    launch_after(draw_kernel, dim3((unsigned)shape->rows), DRAW_THREADS, 0, stream, *outputs, logits,
                 (int)first, (int)shape->V, shape->row_stride);
}
