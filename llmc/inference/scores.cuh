/*
What leaves the device of a row's logits: the most likely token, and the log-probability of the target
(RowScore of llmc/model/extension.h).

logits are float [rows, row_stride], of which the first V columns count; row_stride is a multiple of 4. One
thread block a row. Called by the GPU trainer after lm_head.
*/
#pragma once

#include "../cuda/classifier.cuh"
#include "../model/extension.h"
#include "launch.cuh"

// A logit and its token as one number: larger for the larger logit, of equal ones for the lower token.
__device__ static inline uint64_t scores_key(float logit, int token) {
    uint32_t bits = __float_as_uint(logit + 0.0f); // -0 becomes 0
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)token);
}

__device__ static inline uint64_t max_key(uint64_t a, uint64_t b) { return a > b ? a : b; }

__global__ static void __launch_bounds__(1024)
    scores_kernel(RowScore* scores, const float* logits, const int32_t* targets, int V, int64_t row_stride) {
    __shared__ uint64_t keys[32];
    kernel_wait();
    const float* row = logits + blockIdx.x * row_stride;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint64_t key = 0;
    bool nan = false;
    ExpSum s = {-FLT_MAX, 0};
    for (int i = 4 * (int)threadIdx.x; i < V; i += 4 * (int)blockDim.x) {
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
    auto of_lanes = [](uint64_t x) {
        for (int step = 16; step > 0; step /= 2) x = max_key(x, __shfl_xor_sync(~0u, x, step));
        return x;
    };
    key = of_lanes(key);
    if (lane == 0) keys[warp] = key;
    nan = __syncthreads_or(nan);
    s = block_exp_sum(s);
    if (warp != 0) return;
    key = of_lanes(lane < (int)blockDim.x / 32 ? keys[lane] : 0);
    if (lane != 0) return;
    int best = (int)(0xffffffffu - (uint32_t)key), target = targets[blockIdx.x];
    double logprob = 0;
    if (target >= 0) logprob = (double)row[target] - (double)s.max - log((double)s.sum);
    scores[blockIdx.x] = {logprob, nan || isinf(row[best]) ? -1 : best};
}

// scores [rows]; targets [rows] are tokens below V, or -1: logprob is 0.
static inline void row_scores(RowScore* scores, const float* logits, const int32_t* targets,
                              const LogitShape* shape, cudaStream_t stream) {
    Range range("lm_head and loss", RANGE_FORWARD, stream);
    assert(shape->row_stride % 4 == 0);
    launch_after(scores_kernel, dim3((unsigned)shape->rows), 1024, 0, stream, scores, logits, targets,
                 (int)shape->V, shape->row_stride);
}
