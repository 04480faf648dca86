/*
What leaves the device of a row's logits: the most likely token, and the log-probability of the target
(RowScore of llmc/inference/extension.h).

    in    logits [rows, row_stride] float, the first V columns of a row, row_stride a multiple of 4; targets
    out   scores [steps, outputs]

SCORE_PARTITIONS thread blocks a row, each over a partition of the columns. Invariants of their reduction:

1. A block writes its ScorePartial before it increments num_done (__threadfence between them).
2. The block that increments num_done last has all partials (__threadfence after atomicAdd), and combines them
   in a fixed order: the result does not depend on which block that is.
3. num_done is 0 between launches: the last block resets it (scores_combine).

Called by the GPU trainer after lm_head.
*/
#pragma once

#include "../../layers/classifier.cuh"
#include "pass.cuh"

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
