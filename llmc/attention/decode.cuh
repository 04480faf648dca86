/*
Generation's own kernels: one query against the keys and values of the past.

A step of generation reads every weight once, and beside that the cache; it is bound by memory. So these
kernels are simple: a block a head, and each of its warps takes every eighth key with a softmax of its own;
the eight are joined at the end.

Layouts: q, o [NH,dh]; k, v [capacity,NH,dh]; c [capacity,NH] double, the running sum of log forget gates. dh
is a multiple of 32, at most 256.
*/
#ifndef LLMC_DECODE_CUH
#define LLMC_DECODE_CUH

#include "../cuda/cuda_common.cuh"

#define DECODE_WARPS 8

// ----------------------------------------------------------------------------
// forget gate: c_t = c_{t-1} + logsigmoid(z + bias)

__global__ static void forget_gate_decode_kernel(double* c, const bf16* z, const float* bias, int64_t t,
                                                 int NH) {
    for (int h = threadIdx.x; h < NH; h += blockDim.x) {
        float logit = (z ? __bfloat162float(z[h]) : 0.0f) + bias[h];
        double logf = logit < 0 ? logit - log1p(exp((double)logit)) : -log1p(exp(-(double)logit));
        c[t * NH + h] = (t > 0 ? c[(t - 1) * NH + h] : 0.0) + logf;
    }
}

// Appends entry t to c; z is NULL where the gate has only a bias.
static inline void forget_gate_decode(double* c, const bf16* z, const float* bias, int64_t t, int64_t NH,
                                      cudaStream_t stream) {
    forget_gate_decode_kernel<<<1, 128, 0, stream>>>(c, z, bias, t, (int)NH);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// attention of the last of `length` tokens over all of them

template <int PER_LANE> // channels of a lane: dh / 32
__global__ static void __launch_bounds__(32 * DECODE_WARPS)
    attention_decode_kernel(bf16* o, const bf16* q, const bf16* k, const bf16* v, const double* c,
                            int64_t length, int NH) {
    constexpr int DH = 32 * PER_LANE;
    __shared__ float tops[DECODE_WARPS], sums[DECODE_WARPS], outs[DECODE_WARPS][DH];
    int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = rsqrtf((float)DH);
    float query[PER_LANE], out[PER_LANE] = {}, top = -INFINITY, sum = 0;
    for (int i = 0; i < PER_LANE; i++) query[i] = scale * __bfloat162float(q[h * DH + lane * PER_LANE + i]);
    for (int64_t j = warp; j < length; j += DECODE_WARPS) {
        int64_t at = (j * NH + h) * DH + lane * PER_LANE;
        float score = 0;
        for (int i = 0; i < PER_LANE; i++) score += query[i] * __bfloat162float(k[at + i]);
        score = warp_sum(score);
        if (c) score += (float)(c[(length - 1) * NH + h] - c[j * NH + h]);
        float higher = fmaxf(top, score), rescale = __expf(top - higher), p = __expf(score - higher);
        for (int i = 0; i < PER_LANE; i++) out[i] = out[i] * rescale + p * __bfloat162float(v[at + i]);
        sum = sum * rescale + p;
        top = higher;
    }
    for (int i = 0; i < PER_LANE; i++) outs[warp][lane * PER_LANE + i] = out[i];
    if (lane == 0) tops[warp] = top, sums[warp] = sum;
    __syncthreads();
    for (int x = threadIdx.x; x < DH; x += blockDim.x) {
        float highest = tops[0], total = 0, value = 0; // warp 0 always has a key
        for (int w = 1; w < DECODE_WARPS; w++) highest = fmaxf(highest, tops[w]);
        for (int w = 0; w < DECODE_WARPS; w++) {
            float weight = __expf(tops[w] - highest); // 0 for a warp without keys
            total += weight * sums[w];
            value += weight * outs[w][x];
        }
        o[h * DH + x] = __float2bfloat16(value / total);
    }
}

// c is NULL without gate.
static inline void attention_decode(bf16* o, const bf16* q, const bf16* k, const bf16* v, const double* c,
                                    int64_t length, int64_t NH, int64_t dh, cudaStream_t stream) {
    auto kernel = dh == 64 ? attention_decode_kernel<2> : dh == 128 ? attention_decode_kernel<4> : NULL;
    if (!kernel) die("generation on the GPU has kernels for head sizes 64 and 128, not %lld", (long long)dh);
    kernel<<<(unsigned)NH, 32 * DECODE_WARPS, 0, stream>>>(o, q, k, v, c, length, (int)NH);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_DECODE_CUH
