/*
AdamW over all parameters in one launch.

The master weights are float; the model computes with their bf16 copy, which lies at the same offsets and is
written here as they change. The gradient can be zeroed on the way, which saves the next step a pass over it.
34 bytes a parameter: reads weight, gradient and two moments, writes all four and the copy.
*/
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include <math.h>
#include "global_norm.cuh"
#include "../run/options.h"

struct AdamW {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    float rate;    // lr / (1 - beta1^step)
    float root;    // 1 / sqrt(1 - beta2^step)
    float keep[2]; // what weight decay leaves: [0] of a tensor without it, [1] with it
    bool zero_grads;
};

__device__ static inline void adamw_element(const AdamW& a, float keep, float grad_scale, float& w, float& g,
                                            float& m, float& v) {
    float gradient = g * grad_scale;
    m = a.beta1 * m + a.one_minus_beta1 * gradient;
    v = a.beta2 * v + a.one_minus_beta2 * gradient * gradient;
    w = keep * w - a.rate * m / (sqrtf(v) * a.root + a.eps);
    g = 0;
}

__device__ static inline void store_bf16x4(bf16* p, const Pack4& x) {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
    uint2 bits;
    memcpy(&bits, pairs, sizeof bits);
    *(uint2*)p = bits; // p is aligned to 8 bytes
}

__global__ static void __launch_bounds__(256)
    adamw_kernel(bf16* copy, float* w, float* g, float* m, float* v, const ParamChunk* chunks,
                 const StepStats* stats, AdamW a) {
    if (!stats->finite) return;
    ParamChunk chunk = chunks[blockIdx.x];
    if (!chunk.trainable) return;
    float keep = a.keep[chunk.decays], grad_scale = stats->grad_scale;
    for_chunk(
        chunk,
        [&](int64_t i) {
            Pack4 wi = load16(w + i), gi = load16(g + i), mi = load16(m + i), vi = load16(v + i);
            for (int j = 0; j < 4; j++) adamw_element(a, keep, grad_scale, wi[j], gi[j], mi[j], vi[j]);
            store16(w + i, wi);
            store16(m + i, mi);
            store16(v + i, vi);
            store_bf16x4(copy + i, wi);
            if (a.zero_grads) store16(g + i, gi);
        },
        [&](int64_t i) {
            float gi = g[i];
            adamw_element(a, keep, grad_scale, w[i], gi, m[i], v[i]);
            copy[i] = __float2bfloat16(w[i]);
            if (a.zero_grads) g[i] = gi;
        });
}

// w -= lr (mhat / (sqrt(vhat) + eps) + decay w), with the gradient first scaled by stats->grad_scale; step
// counts from 1. Nothing at all changes where stats say that the step is not finite, and in chunks that are
// not trainable. copy, w, g, m and v are indexed by the chunks' offsets; they are aligned to 16 bytes. A rank
// that holds m and v of its shard alone passes them minus the shard's beginning, a multiple of 4.
static inline void adamw_update(bf16* copy, float* w, float* g, float* m, float* v, const ParamChunk* chunks,
                                int64_t num_chunks, const StepStats* stats, double lr, int64_t step,
                                bool zero_grads, const Options* o, cudaStream_t stream) {
    AdamW a;
    a.beta1 = (float)o->beta1, a.one_minus_beta1 = (float)(1 - o->beta1);
    a.beta2 = (float)o->beta2, a.one_minus_beta2 = (float)(1 - o->beta2);
    a.eps = (float)o->adam_eps;
    a.rate = (float)(lr / (1 - pow(o->beta1, (double)step)));
    a.root = (float)(1 / sqrt(1 - pow(o->beta2, (double)step)));
    a.keep[0] = 1, a.keep[1] = (float)(1 - lr * o->weight_decay);
    a.zero_grads = zero_grads;
    if (num_chunks == 0) return;
    adamw_kernel<<<(unsigned)num_chunks, 256, 0, stream>>>(copy, w, g, m, v, chunks, stats, a);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// the copy, where no update has made it: after initialisation or loading

__global__ static void __launch_bounds__(256) weights_copy_kernel(bf16* copy, const float* w, int64_t n) {
    int64_t i = 4 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 4 <= n)
        store_bf16x4(copy + i, load16(w + i));
    else
        for (; i < n; i++) copy[i] = __float2bfloat16(w[i]);
}

// copy = w rounded to bf16, all n elements
static inline void weights_copy(bf16* copy, const float* w, int64_t n, cudaStream_t stream) {
    if (n == 0) return;
    weights_copy_kernel<<<(unsigned)ceil_div<int64_t>(n, 4 * 256), 256, 0, stream>>>(copy, w, n);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_ADAMW_CUH
