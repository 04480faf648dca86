/*
The loss: cross entropy of softmax(logits), forward and backward in one kernel, in place.

A block takes a row. It reads the logits twice: once for their highest and the sum of their exponentials, kept
together as it goes, and once more, out of the L2 cache if the row is not huge, to write their gradient over
them. So the largest tensor of the whole model moves through memory once each way, and its softmax is never
stored.
*/
#ifndef LLMC_CLASSIFIER_CUH
#define LLMC_CLASSIFIER_CUH

#include <float.h>
#include "cuda_common.cuh"

// ----------------------------------------------------------------------------
// a sum of exponentials, relative to the highest exponent seen

struct ExpSum {
    float highest, sum; // stands for exp(highest) * sum
};

// Differences of highest are never inf - inf: it starts at the least finite float. A NaN ends up in sum.
__device__ static inline ExpSum exp_sum_join(ExpSum a, ExpSum b) {
    float highest = fmaxf(a.highest, b.highest);
    return {highest, a.sum * __expf(a.highest - highest) + b.sum * __expf(b.highest - highest)};
}

// Over the block; every thread gets the same bits, in every run.
__device__ static inline ExpSum exp_sum_of_block(ExpSum x) {
    __shared__ ExpSum of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    auto of_lanes = [](ExpSum s) {
        for (int step = 16; step > 0; step /= 2)
            s = exp_sum_join(s, {__shfl_xor_sync(~0u, s.highest, step), __shfl_xor_sync(~0u, s.sum, step)});
        // a join is not quite symmetric in its last bit, so that lanes may differ
        return ExpSum{__shfl_sync(~0u, s.highest, 0), __shfl_sync(~0u, s.sum, 0)};
    };
    x = of_lanes(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return of_lanes(lane < warps ? of_warp[lane] : ExpSum{-FLT_MAX, 0});
}

// ----------------------------------------------------------------------------

// Columns from V on only pad the row, whatever is in them: as -inf they have no probability and no gradient.
__device__ static inline void mask_padding(Pack8& x, int column, int V) {
    if (column + 8 <= V) return;
    for (int j = 0; j < 8; j++)
        if (column + j >= V) x[j] = __float2bfloat16(-INFINITY);
}

// The second look at the logits is from shared memory if CACHED, or else from L2, if they are there still.
template <bool CACHED>
__global__ static void __launch_bounds__(1024)
    classifier_kernel(float* losses, bf16* logits, const int32_t* targets, int V, int stride, float dloss,
                      bool train) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *row = logits + (int64_t)blockIdx.x * stride, *cache = (bf16*)shared;
    int target = targets[blockIdx.x], first = threadIdx.x * 8, step = blockDim.x * 8;
    bool known = target >= 0 && target < V;
    float target_logit = known ? __bfloat162float(row[target]) : NAN;

    ExpSum s = {-FLT_MAX, 0};
    for (int i = first; i < stride; i += step) {
        Pack8 x = CACHED ? load16_once(row + i) : load16(row + i);
        mask_padding(x, i, V);
        if (CACHED) store16(cache + i, x);
        float f[8], highest = s.highest, sum = 0;
        unpack8(f, x);
        for (int j = 0; j < 8; j++) highest = fmaxf(highest, f[j]);
        for (int j = 0; j < 8; j++) sum += __expf(f[j] - highest);
        s = {highest, s.sum * __expf(s.highest - highest) + sum};
    }
    s = exp_sum_of_block(s); // past its barrier nobody needs the logit of the target any more
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(s.sum) - (target_logit - s.highest);
    if (!train) return;

    // from the end: what was read last is the likeliest to be in L2 still
    float scale = dloss / s.sum;
    int packs = (stride - first + step - 1) / step;
    for (int i = first + (packs - 1) * step; i >= 0; i -= step) {
        Pack8 x = CACHED ? load16(cache + i) : load16_once(row + i);
        float f[8];
        if (!CACHED) mask_padding(x, i, V);
        unpack8(f, x);
        for (int j = 0; j < 8; j++) f[j] = __expf(f[j] - s.highest) * scale;
        store16_once(row + i, pack8(f));
    }
    if (known && threadIdx.x == target / 8 % blockDim.x) // who has just written there
        row[target] = __float2bfloat16(__expf(target_logit - s.highest) * scale - dloss);
}

// losses[t] = -log softmax(logits_t)[targets[t]] of each row; with `train`, logits [rows, stride] become
// their own gradient times dloss, their padding columns V..stride-1 zeros. stride is a multiple of 8 and
// logits aligned to 16 bytes. A target that is not in 0..V-1 makes a loss of NaN, which stops the update (see
// global_norm.cuh).
static inline void classifier(float* losses, bf16* logits, const int32_t* targets, int64_t rows, int64_t V,
                              int64_t stride, float dloss, bool train, cudaStream_t stream) {
    assert(stride >= V && stride % 8 == 0 && stride <= INT32_MAX / 2 && rows <= INT32_MAX);
    if (rows == 0) return;
    int64_t threads = 32 * ceil_div<int64_t>(stride, 32 * 8);
    if (threads > 1024) threads = 1024;
    int device, most, bytes = train ? (int)(stride * (int64_t)sizeof(bf16)) : 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    bool cached = train && bytes + 1024 <= most; // beside what the sum over the block takes
    if (!cached) bytes = 0;
    auto kernel = cached ? classifier_kernel<true> : classifier_kernel<false>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<(unsigned)rows, (unsigned)threads, (size_t)bytes, stream>>>(losses, logits, targets, (int)V,
                                                                         (int)stride, dloss, train);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_CLASSIFIER_CUH
