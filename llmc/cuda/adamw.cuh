/*
AdamW (arXiv 1711.05101) over all parameters in one launch:

    g = stats->grad_scale times the gradient
    m = beta1 m + (1 - beta1) g,    mhat = m / (1 - beta1^step)
    v = beta2 v + (1 - beta2) g^2,  vhat = v / (1 - beta2^step)
    w = w - lr (mhat / (sqrt(vhat) + eps) + weight_decay w)

Master weights, gradients and moments are float; the model computes with a bf16 copy of the weights, which is
written here as well. The gradients that were used are zeroed for the next step. 34 bytes a parameter: reads
weight, gradient and both moments, writes all four and the copy.
*/
#pragma once

#include <math.h>
#include "../model/shapes.h"
#include "global_norm.cuh"

// The flat buffers, indexed by the chunks' offsets and aligned to 16 bytes. A rank that holds m and v of its
// shard alone passes them minus the shard's begin, a multiple of 4.
typedef struct {
    bf16* weights; // copy of params
    float *params, *grads, *m, *v;
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

__device__ static inline void store_bf16x4(bf16* p, const Pack4& x) {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
    uint2 bits;
    memcpy(&bits, pairs, sizeof bits);
    *(uint2*)p = bits; // p is aligned to 8 bytes
}

__global__ static void __launch_bounds__(256)
    adamw_kernel(const __grid_constant__ AdamWTensors t, const ParamChunk* chunks, const StepStats* stats,
                 const __grid_constant__ AdamWFactors a) {
    if (!stats->finite) return;
    ParamChunk chunk = chunks[blockIdx.x];
    if (!chunk.trainable) return;
    float keep = a.keep[chunk.decays], grad_scale = stats->grad_scale;
    for_chunk(
        chunk,
        [&](int64_t i) {
            Pack4 w = load16(t.params + i), g = load16(t.grads + i), m = load16(t.m + i), v = load16(t.v + i);
            for (int j = 0; j < 4; j++) adamw_element(a, keep, g[j] * grad_scale, w[j], m[j], v[j]);
            store16(t.params + i, w);
            store16(t.m + i, m);
            store16(t.v + i, v);
            store_bf16x4(t.weights + i, w);
            store16(t.grads + i, Pack4{});
        },
        [&](int64_t i) {
            adamw_element(a, keep, t.grads[i] * grad_scale, t.params[i], t.m[i], t.v[i]);
            t.weights[i] = __float2bfloat16(t.params[i]);
            t.grads[i] = 0;
        });
}

// One step on the trainable chunks. Nothing changes, not even the gradients, where stats say that the step is
// not finite.
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
}

// ----------------------------------------------------------------------------
// the bf16 copy where no update has written it: after initialisation or loading

__global__ static void __launch_bounds__(256) weights_copy_kernel(bf16* copy, const float* w, int64_t n) {
    int64_t i = 4 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 4 <= n)
        store_bf16x4(copy + i, load16(w + i));
    else
        for (; i < n; i++) copy[i] = __float2bfloat16(w[i]);
}

// copy = w rounded to bf16, n elements
static inline void weights_copy(bf16* copy, const float* w, int64_t n, cudaStream_t stream) {
    CUDA_LAUNCH(weights_copy_kernel, ceil_div<int64_t>(n, 4 * 256), 256, stream, copy, w, n);
}
