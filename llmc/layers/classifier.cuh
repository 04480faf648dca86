/*
The loss: cross entropy of softmax(logits), forward and backward in one kernel.

logits are bf16 [rows, V] with row stride LogitShape.row_stride; training overwrites them with their gradient,
or with --fp8 writes it to a tensor of its own.
targets [rows] are token ids, or TARGET_NONE, which has no loss and no gradient. losses [rows] are float.
Without `train` the sign of a loss says whether the target is the likeliest token, the first one of several:

    loss < 0, or -0    it is          loss > 0    it is not; at least ln 2          +0    TARGET_NONE

A block has one row. It reads the logits twice: once for their maximum and the sum of their exponentials
(online softmax), and again, from shared memory or the L2 cache unless the row is huge, to write the gradient
over them. So the largest tensor of the model moves through memory once each way, and the probabilities are
never stored.
*/
#pragma once

#include <float.h>
#include "../cuda/device.cuh"
#include "../cuda/fp8.cuh"
#include "../cuda/launch.cuh"

// ----------------------------------------------------------------------------
// online softmax: a sum of exponentials relative to the largest exponent so far

struct ExpSum {
    float max, sum; // of exponents, of exp(exponent - max)
};

// max starts at the least finite float, so that a difference is never inf - inf. A NaN ends up in sum.
__device__ static inline ExpSum exp_sum_join(ExpSum a, ExpSum b) {
    float max = fmaxf(a.max, b.max);
    return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

// Over the thread block: the same bits in every thread, and in every run.
__device__ static inline ExpSum block_exp_sum(ExpSum x) {
    __shared__ ExpSum of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    auto of_lanes = [](ExpSum s) {
        for (int step = 16; step > 0; step /= 2)
            s = exp_sum_join(s, {__shfl_xor_sync(~0u, s.max, step), __shfl_xor_sync(~0u, s.sum, step)});
        // a join is not symmetric in its last bit, so that lanes may differ
        return ExpSum{__shfl_sync(~0u, s.max, 0), __shfl_sync(~0u, s.sum, 0)};
    };
    x = of_lanes(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return of_lanes(lane < warps ? of_warp[lane] : ExpSum{-FLT_MAX, 0});
}

// ----------------------------------------------------------------------------

// Columns from V on are padding with any content: as -inf they have neither probability nor gradient.
__device__ static inline void mask_padding(Pack8& x, int column, int V) {
    if (column + 8 <= V) return;
    for (int j = 0; j < 8; j++)
        if (column + j >= V) x[j] = __float2bfloat16(-INFINITY);
}

// CACHED: the second read of the logits is from shared memory. The branches for TARGET_NONE are behind the
// first read, which therefore need not wait for the target.
template <bool TRAIN, bool CACHED, Fp8Format F>
__global__ static void __launch_bounds__(1024)
    classifier_kernel(float* losses, bf16* logits, const int32_t* targets, int V, int row_stride, float dloss,
                      const __grid_constant__ Fp8Tensor dlogits8) {
    kernel_wait();
    Fp8Writer<F> quantized(dlogits8);
    extern __shared__ __align__(16) unsigned char shared[];
    const unsigned row_index = block_from_end();
    bf16 *row = logits + (int64_t)row_index * row_stride, *cache = (bf16*)shared;
    int target = targets[row_index], first = threadIdx.x * 8, step = blockDim.x * 8;
    bool known = target >= 0 && target < V;
    bool none = target == TARGET_NONE, beaten = false; // beaten: another token is likelier
    float target_logit = known ? __bfloat162float(row[target]) : NAN;

    ExpSum s = {-FLT_MAX, 0};
    for (int i = first; i < row_stride; i += step) {
        Pack8 x = CACHED ? load16_once(row + i) : load16(row + i);
        mask_padding(x, i, V);
        if (CACHED) store16(cache + i, x);
        float f[8], max = s.max, sum = 0;
        unpack8(f, x);
        for (int j = 0; j < 8; j++) max = fmaxf(max, f[j]);
        for (int j = 0; j < 8; j++) sum += __expf(f[j] - max);
        for (int j = 0; j < 8 && !TRAIN; j++)
            beaten |= f[j] > target_logit || (f[j] == target_logit && i + j < target);
        s = {max, s.sum * __expf(s.max - max) + sum};
    }
    s = block_exp_sum(s); // after its barrier the target's logit may be overwritten
    float loss = none ? 0 : logf(s.sum) - (target_logit - s.max);
    if (!TRAIN && !__syncthreads_or(beaten) && !none) loss = -loss;
    if (threadIdx.x == 0) losses[row_index] = loss;
    if (!TRAIN) return;

    // from the end, as what was read last is most likely still in L2
    float scale = none ? 0 : dloss / s.sum;
    int packs = (row_stride - first + step - 1) / step;
    for (int i = first + (packs - 1) * step; i >= 0; i -= step) {
        Pack8 x = CACHED ? load16(cache + i) : load16_once(row + i);
        float f[8];
        if (!CACHED) mask_padding(x, i, V);
        unpack8(f, x);
        for (int j = 0; j < 8; j++) f[j] = __expf(f[j] - s.max) * scale;
        if (F == FP8_NONE) store16_once(row + i, pack8(f));
        quantized.store(row_index * dlogits8.stride + i, pack8(f));
    }
    if (!known || threadIdx.x != target / 8 % blockDim.x) return; // this thread has just written there
    const bf16 of_target = __float2bfloat16(__expf(target_logit - s.max) * scale - dloss);
    if (F == FP8_NONE) row[target] = of_target;
    quantized.store_one(row_index * dlogits8.stride + target, of_target);
}

typedef struct {
    int64_t rows, V;
    int64_t row_stride; // elements from one row of logits to the next: V, padded to a multiple of 8
} LogitShape;

// losses[t] = -log softmax(logits_t)[targets[t]] of each row, with a sign as above. With `train`, logits
// become the gradient of losses[t] times dloss, and their padding columns zeros. logits are aligned to 16
// bytes. Any other target outside 0..V-1 makes its loss NaN, which stops the update (global_norm.cuh).
// If dlogits8 has memory, the gradient is written there instead, in E5M2, and logits stay.
static inline void classifier(float* losses, bf16* logits, const int32_t* targets, const LogitShape* shape,
                              float dloss, bool train, cudaStream_t stream, const Fp8Tensor& dlogits8 = {}) {
    Range range("loss", RANGE_FORWARD, stream);
    int64_t rows = shape->rows, V = shape->V, row_stride = shape->row_stride;
    assert(row_stride >= V && row_stride % 8 == 0 && row_stride <= INT32_MAX / 2 && rows <= INT32_MAX);
    if (rows == 0) return;
    int64_t threads = 32 * ceil_div<int64_t>(row_stride, 32 * 8);
    if (threads > 1024) threads = 1024;
    int bytes = train ? (int)(row_stride * (int64_t)sizeof(bf16)) : 0;
    int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    bool cached = train && bytes + 1024 <= most; // 1024: block_exp_sum's, rounded up
    if (!cached) bytes = 0;
    const bool in_fp8 = train && dlogits8.data;
    auto kernel = cached && in_fp8 ? classifier_kernel<true, true, FP8_E5M2>
                  : cached         ? classifier_kernel<true, true, FP8_NONE>
                  : in_fp8         ? classifier_kernel<true, false, FP8_E5M2>
                  : train          ? classifier_kernel<true, false, FP8_NONE>
                                   : classifier_kernel<false, false, FP8_NONE>;
    launch_after(kernel, (unsigned)rows, threads, bytes, stream, losses, logits, targets, (int)V,
                 (int)row_stride, dloss, dlogits8);
}

// Copies the rows of logits to the host, without their padding.
static inline void logits_download(float* host, const bf16* logits, const LogitShape* shape,
                                   cudaStream_t stream) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
    float* copy = device_download_bf16(logits, shape->rows * shape->row_stride);
    for (int64_t i = 0; i < shape->rows; i++)
        memcpy(host + i * shape->V, copy + i * shape->row_stride, (size_t)shape->V * sizeof(float));
    free(copy);
}
