/*
AdamW (arXiv 1711.05101) over all parameters in one launch:

    g = stats->grad_scale times the gradient
    m = beta1 m + (1 - beta1) g,    mhat = m / (1 - beta1^step)
    v = beta2 v + (1 - beta2) g^2,  vhat = v / (1 - beta2^step)
    w = w - lr (mhat / (sqrt(vhat) + eps) + weight_decay w)

Master weights, gradients and moments are float; the model computes with a copy of the weights in bf16, of a
few small tensors also in fp32, which is written here as well. The gradients that were used are zeroed for the
next step. 34 bytes a parameter: reads weight, gradient and both moments, writes all four and the copy.

A rank holds masters and moments of its shard alone (llmc/model/shard.h), but gradients and copies of
everything.
*/
#pragma once

#include <math.h>
#include "../model/shapes.h"
#include "global_norm.cuh"

// Aligned to 16 bytes.
typedef struct {
    bf16* weights;         // flat buffer: copy of the masters
    float* weights_fp32;   // the same, of the tensors that kernels read in fp32
    float* grads;          // flat buffer
    float *params, *m, *v; // the rank's shard
} AdamWTensors;

struct AdamWFactors {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    float rate;    // lr / (1 - beta1^step)
    float root;    // 1 / sqrt(1 - beta2^step)
    float keep[2]; // 1 - lr weight_decay: [0] of tensors without decay, [1] with it
};

__device__ static inline void adamw_element(const AdamWFactors& a, float keep, float gradient, float& w,
                                            float& m, float& v) {
    m = a.beta1 * m + a.one_minus_beta1 * gradient;
    v = a.beta2 * v + a.one_minus_beta2 * gradient * gradient;
    w = keep * w - a.rate * m / (sqrtf(v) * a.root + a.eps);
}

// Writes the copies of element i of the flat buffer, and of the three behind it.
__device__ static inline void store_weight(const AdamWTensors& t, const ParamChunk& chunk, int64_t i,
                                           float w) {
    t.weights[i] = __float2bfloat16(w);
    if (chunk.fp32 >= 0) t.weights_fp32[chunk.fp32 + i - chunk.begin] = w;
}
__device__ static inline void store_weights(const AdamWTensors& t, const ParamChunk& chunk, int64_t i,
                                            const Pack4& w) {
    store_bf16x4(t.weights + i, w);
    for (int j = 0; chunk.fp32 >= 0 && j < 4; j++) t.weights_fp32[chunk.fp32 + i - chunk.begin + j] = w[j];
}

__device__ static inline void copy_chunk(const AdamWTensors& t, const ParamChunk& chunk) {
    int64_t shift = chunk.local - chunk.begin; // a multiple of 4
    for_chunk(
        chunk, [&](int64_t i) { store_weights(t, chunk, i, load16(t.params + i + shift)); },
        [&](int64_t i) { store_weight(t, chunk, i, t.params[i + shift]); });
}

__global__ static void __launch_bounds__(256)
    adamw_kernel(const __grid_constant__ AdamWTensors t, const ParamChunk* chunks, const StepStats* stats,
                 const __grid_constant__ AdamWFactors a) {
    if (!stats->finite) return;
    ParamChunk chunk = chunks[blockIdx.x];
    if (!chunk.trainable) return copy_chunk(t, chunk); // exchange_begin_update has zeroed its copy in fp32
    float keep = a.keep[chunk.decays], grad_scale = stats->grad_scale;
    int64_t shift = chunk.local - chunk.begin; // a multiple of 4
    for_chunk(
        chunk,
        [&](int64_t i) {
            int64_t k = i + shift;
            Pack4 w = load16(t.params + k), g = load16(t.grads + i), m = load16(t.m + k), v = load16(t.v + k);
            for (int j = 0; j < 4; j++) adamw_element(a, keep, g[j] * grad_scale, w[j], m[j], v[j]);
            store16(t.params + k, w);
            store16(t.m + k, m);
            store16(t.v + k, v);
            store_weights(t, chunk, i, w);
            store16(t.grads + i, Pack4{});
        },
        [&](int64_t i) {
            int64_t k = i + shift;
            adamw_element(a, keep, t.grads[i] * grad_scale, t.params[k], t.m[k], t.v[k]);
            store_weight(t, chunk, i, t.params[k]);
            t.grads[i] = 0;
        });
}

// In place of adamw_kernel where the step is left out: a kernel of its own, whose registers that one does not
// need.
__global__ static void __launch_bounds__(256)
    skip_kernel(const __grid_constant__ AdamWTensors t, const ParamChunk* chunks, const StepStats* stats) {
    if (!stats->skipped) return;
    ParamChunk chunk = chunks[blockIdx.x];
    copy_chunk(t, chunk);
    if (chunk.trainable)
        for_chunk(
            chunk, [&](int64_t i) { store16(t.grads + i, Pack4{}); }, [&](int64_t i) { t.grads[i] = 0; });
}

// One step on the trainable chunks. Nothing changes, not even the gradients, where stats say that the step is
// not finite; of a step that is left out gradients are zeroed alone.
static inline void adamw_update(const AdamWTensors* tensors, const ParamChunks* chunks,
                                const StepStats* stats, const AdamWParams* p, cudaStream_t stream) {
    Range range("norm and AdamW", RANGE_BACKWARD, stream);
    AdamWFactors a;
    a.beta1 = (float)p->beta1, a.one_minus_beta1 = (float)(1 - p->beta1);
    a.beta2 = (float)p->beta2, a.one_minus_beta2 = (float)(1 - p->beta2);
    a.eps = (float)p->eps;
    a.rate = (float)(p->lr / (1 - pow(p->beta1, (double)p->step)));
    a.root = (float)(1 / sqrt(1 - pow(p->beta2, (double)p->step)));
    a.keep[0] = 1, a.keep[1] = (float)(1 - p->lr * p->weight_decay);
    CUDA_LAUNCH(adamw_kernel, chunks->count, 256, stream, *tensors, chunks->chunks, stats, a);
    if (p->spike_norm > 0)
        CUDA_LAUNCH(skip_kernel, chunks->count, 256, stream, *tensors, chunks->chunks, stats);
}

// ----------------------------------------------------------------------------
// the copies where no update has written them: after initialisation or loading

__global__ static void __launch_bounds__(256)
    weights_copy_kernel(const __grid_constant__ AdamWTensors t, const ParamChunk* chunks) {
    copy_chunk(t, chunks[blockIdx.x]);
}

// The copies of the chunks' masters.
static inline void weights_copy(const AdamWTensors* tensors, const ParamChunks* chunks, cudaStream_t stream) {
    CUDA_LAUNCH(weights_copy_kernel, chunks->count, 256, stream, *tensors, chunks->chunks);
}
