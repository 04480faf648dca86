/*
RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over the channels of a row or of a head.

    over rows    x, y [rows, d], weight [d], rstd [rows]: one thread block a row, eight channels a thread.
                 A row is read once and stays in registers while its sum is computed.
    over heads   the channels of a head are in neighbouring lanes of a warp. QK norm (qkv.cuh) and the output
                 norm (output_gate.cuh) are fused into other kernels; the arithmetic they share is here.

The trainer calls the norm over rows before attention, before the MLP and before lm_head.

The gradient of the weight is a sum over all tokens. The grid is as large as the GPU runs at once. Each block
loops over its share of the tokens, prefetching the next one, accumulates in registers, and writes one row of
partial sums; a second kernel adds the rows. Every order of sums is fixed, so that a GPU computes the same
bits in every run.

Pointers to bf16 are aligned to 16 bytes.
*/
#pragma once

#include "../cuda/fp8.cuh"
#include "../cuda/launch.cuh"
#include "../model/shapes.h"

// ----------------------------------------------------------------------------
// sums over tokens

// Number of groups of `size` blocks of a kernel that the GPU runs at once: at least 1, at most `most`
template <class Kernel>
static inline int64_t resident_groups(Kernel kernel, int threads, int64_t size, int64_t most) {
    int blocks;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0));
    int64_t groups = (int64_t)device_attribute(cudaDevAttrMultiProcessorCount) * blocks / size;
    return groups < 1 ? 1 : groups > most ? most : groups;
}

// Bytes of the scratch `partial` of every backward pass with norm weights: eight floats for each thread that
// the GPU can hold, whatever the shape.
static inline size_t norm_partial_bytes(void) {
    return (size_t)device_attribute(cudaDevAttrMultiProcessorCount) *
           (size_t)device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor) * 8 * sizeof(float);
}

// That scratch, and the stream on which the partial sums are added to the gradient. Until side_join what
// follows on the main stream may neither write to `sums` nor read or write the gradient.
struct NormPartial {
    float* sums;
    SideStream* beside; // NULL: the stream of the kernel that writes them

    // That stream, which waits for what is queued on `own`
    cudaStream_t fork(cudaStream_t own) const { return beside ? side_fork(beside) : own; }
};

// One for the norms of a block, two for its mixer: all may be in flight at once.
enum { NUM_NORM_PARTIALS = 3 };

// sums: NUM_NORM_PARTIALS times norm_partial_bytes; NULL without a backward pass
static inline void norm_partials(NormPartial partials[NUM_NORM_PARTIALS], float* sums, SideStream* beside) {
    for (size_t i = 0; sums && i < NUM_NORM_PARTIALS; i++)
        partials[i] = {sums + i * (norm_partial_bytes() / sizeof(float)), beside};
}

// A block sums 16 columns; each of its 64 rows of threads takes every 64th row of partial.
__global__ static void __launch_bounds__(1024)
    sum_rows_kernel(float* out, const float* partial, int64_t rows, int64_t n, bool add) {
    __shared__ float sums[16][65];
    int64_t c = 16 * (int64_t)blockIdx.x + threadIdx.x;
    float sum = 0;
    if (c < n) {
#pragma unroll 8
        for (int64_t r = threadIdx.y; r < rows; r += 64) sum += partial[r * n + c];
    }
    sums[threadIdx.x][threadIdx.y] = sum;
    __syncthreads();
    unsigned lane = (16 * threadIdx.y + threadIdx.x) % 32;
    unsigned column = threadIdx.y / 2; // one for each warp from here on
    c = 16 * (int64_t)blockIdx.x + column;
    if (column >= 16 || c >= n) return;
    sum = warp_sum(sums[column][lane] + sums[column][lane + 32]);
    if (lane == 0) out[c] = add ? out[c] + sum : sum;
}

// out[n] = (add ? out : 0) + sum of partial [rows, n] over its rows. out may be the first row of partial.
static inline void sum_rows(float* out, const float* partial, int64_t rows, int64_t n, bool add,
                            cudaStream_t stream) {
    CUDA_LAUNCH(sum_rows_kernel, ceil_div<int64_t>(n, 16), dim3(16, 64), stream, out, partial, rows, n, add);
}

// 1 / sqrt(mean_square + eps). Where the sum of squares has overflowed this would be 0, as would all of y,
// and training would go on with a wrong loss: NaN makes the step not finite.
__device__ static inline float norm_rstd(float mean_square, float eps) {
    float rstd = rsqrtf(mean_square + eps);
    return rstd == 0 ? NAN : rstd;
}

// ----------------------------------------------------------------------------
// over rows

typedef struct {
    const bf16* weight; // [d]
    float* dweight;     // [d], NULL for inference
    float* rstd; // [rows] 1 / sqrt(mean(x^2) + eps): written by the forward pass, read by the backward pass
    int64_t rows, d;
    double eps;
    Fp8Tensor y8, dx8; // y of the forward pass in E4M3, and dx in E5M2
} Norm;

template <Fp8Format F>
__global__ static void __launch_bounds__(1024)
    rmsnorm_forward_kernel(bf16* y, float* rstd, const bf16* x, const bf16* weight, int d, float eps,
                           const __grid_constant__ Fp8Tensor y8) {
    __shared__ float sums[32];
    Fp8Writer<F> quantized(y8);
    int c = 8 * threadIdx.x;
    int64_t row = block_from_end(), at = row * d + c;
    float v[8] = {}, w[8] = {}, sum = 0;
    if (c < d) {
        Raw8 in = load_raw8_once(x + at), weights = load_raw8(weight + c);
        unpack8(v, in);
        unpack8(w, weights);
        for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    }
    float r = norm_rstd(__fdividef(block_sum_all(sum, sums), (float)d), eps);
    if (threadIdx.x == 0) rstd[row] = r;
    if (c >= d) return;
    for (int i = 0; i < 8; i++) v[i] *= r * w[i];
    if (!quantized.alone()) store16_once(y + at, pack8(v));
    quantized.store(at, pack8(v));
    quantized.finish();
}

// What a thread reads of one row.
struct NormRow {
    Raw8 dy, x, residual;
    float rstd;
};

template <Fp8Format F>
__global__ static void __launch_bounds__(1024)
    rmsnorm_backward_kernel(bf16* dx, bf16* y, const bf16* dy, const bf16* x, const bf16* residual,
                            const __grid_constant__ Norm norm, float* partial) {
    __shared__ float sums[2][32];
    Fp8Writer<F> quantized(norm.dx8);
    int d = (int)norm.d, c = 8 * threadIdx.x;
    bool active = c < d;
    auto load = [&](int64_t row) {
        NormRow r = {};
        int64_t at = row * d + c;
        if (active) r.dy = load_raw8_once(dy + at);
        if (active) r.x = load_raw8_once(x + at);
        if (active && residual) r.residual = load_raw8_once(residual + at);
        r.rstd = norm.rstd[row];
        return r;
    };
    float w[8] = {}, dw[8] = {};
    if (active) unpack8(w, load16(norm.weight + c));
    int buffer = 0;
    int64_t row = norm.rows - 1 - blockIdx.x; // from the end, as block_from_end
    NormRow next = load(row);
    for (; row >= 0; row -= gridDim.x, buffer ^= 1) {
        NormRow now = next;
        if (row >= gridDim.x) next = load(row - gridDim.x); // in flight during this row's sum
        float g[8], v[8], gx = 0;
        unpack8(g, now.dy);
        unpack8(v, now.x);
        for (int i = 0; i < 8; i++) {
            dw[i] += g[i] * v[i] * now.rstd;
            g[i] *= w[i];
            gx += g[i] * v[i];
        }
        if (y && active) {
            float normed[8];
            for (int i = 0; i < 8; i++) normed[i] = v[i] * (now.rstd * w[i]);
            store16_once(y + row * d + c, pack8(normed));
        }
        float mean = __fdividef(block_sum_all(gx, sums[buffer]), (float)d) * now.rstd * now.rstd;
        float out[8];
        unpack8(out, now.residual);
        for (int i = 0; i < 8; i++) out[i] += now.rstd * (g[i] - v[i] * mean);
        if (active) store16_once(dx + row * d + c, pack8(out));
        if (active) quantized.store(row * d + c, pack8(out));
    }
    quantized.finish();
    if (active) store8(partial + (int64_t)blockIdx.x * d + c, dw);
}

static inline int rmsnorm_threads(int64_t d) {
    if (d < 8 || d > GPU_MAX_CHANNELS || d % 8)
        die("RMSNorm on the GPU takes 8 to %d channels, a multiple of 8, not %lld", GPU_MAX_CHANNELS,
            (long long)d);
    return (int)(32 * ceil_div<int64_t>(d, 256));
}

// y [rows, d] = RMSNorm(x), and norm->y8, also transposed where that has a place
static inline void rmsnorm_forward(bf16* y, const bf16* x, const Norm* norm, cudaStream_t stream) {
    Range range("RMSNorm", RANGE_FORWARD, stream);
    auto kernel = norm->y8.data ? rmsnorm_forward_kernel<FP8_E4M3> : rmsnorm_forward_kernel<FP8_NONE>;
    CUDA_LAUNCH(kernel, norm->rows, rmsnorm_threads(norm->d), stream, y, norm->rstd, x, norm->weight,
                (int)norm->d, (float)norm->eps, norm->y8);
    fp8_turn<FP8_E4M3>(&norm->y8, norm->rows, norm->d, stream);
}

// dx [rows, d] = (add ? dx : 0) + gradient of x, and norm->dx8; norm->dweight += its gradient. Unless y is
// NULL, it is recomputed, with the bits of the forward pass, so that it need not be kept.
static inline void rmsnorm_backward(bf16* dx, bf16* y, const bf16* dy, const bf16* x, bool add,
                                    const Norm* norm, const NormPartial& partial, cudaStream_t stream) {
    Range range("RMSNorm", RANGE_BACKWARD, stream);
    int threads = rmsnorm_threads(norm->d);
    if (norm->rows == 0) return;
    auto kernel = norm->dx8.data ? rmsnorm_backward_kernel<FP8_E5M2> : rmsnorm_backward_kernel<FP8_NONE>;
    int64_t blocks = resident_groups(kernel, threads, 1, norm->rows);
    CUDA_LAUNCH(kernel, blocks, threads, stream, dx, y, dy, x, add ? dx : NULL, *norm, partial.sums);
    sum_rows(norm->dweight, partial.sums, blocks, norm->d, true, partial.fork(stream));
}

// ----------------------------------------------------------------------------
// over heads

// A thread of the kernels over heads. It has eight channels of one head, of one token after another. The
// number of lanes of a head is dh / 8 rounded up to a power of two; the last ones are idle.
struct HeadThread {
    int head;
    int channel; // first of the eight
    int lanes, dh;
    float mean;  // 1 / dh
    bool active; // not an idle lane
};

// The grid that covers the heads of a token: `blocks` blocks of `threads` threads.
struct HeadGrid {
    int blocks, threads;
};

static inline HeadGrid head_grid(int64_t NH, int64_t dh) {
    if (dh < 8 || dh > 256 || dh % 8)
        die("heads on the GPU have 8 to 256 channels, a multiple of 8, not %lld", (long long)dh);
    int64_t lanes = 1;
    while (8 * lanes < dh) lanes *= 2;
    int64_t blocks = ceil_div<int64_t>(NH * lanes, 256);
    return {(int)blocks, (int)(32 * ceil_div<int64_t>(NH * lanes, 32 * blocks))};
}

// `block` is the block's index in the HeadGrid.
__device__ static inline HeadThread head_thread(int NH, int dh, int block) {
    HeadThread me;
    int i = block * (int)blockDim.x + (int)threadIdx.x;
    int log_lanes = 32 - __clz(dh / 8 - 1); // a division by a variable would be slow
    me.lanes = 1 << log_lanes;
    me.dh = dh;
    me.mean = __fdividef(1, (float)dh);
    me.head = i >> log_lanes;
    me.channel = 8 * (i & (me.lanes - 1));
    me.active = me.head < NH && me.channel < dh;
    return me;
}

// Sum over the lanes of a head, in each of them. Unrolled for heads of 64 and 128 channels.
__device__ static inline float head_sum(float x, const HeadThread& me) {
    auto add = [&](int lane) { x += __shfl_xor_sync(~0u, x, lane); };
    for (int lane = me.lanes / 2; lane >= 8; lane /= 2) add(lane);
    if (me.lanes >= 8)
        add(4), add(2), add(1);
    else
        for (int lane = me.lanes / 2; lane > 0; lane /= 2) add(lane);
    return x;
}

// The norm of a head, in place; returns rstd. x is zero in idle lanes.
__device__ static inline float head_norm_forward(float x[8], const Raw8& w, float eps, const HeadThread& me) {
    float sum = 0, weight[8];
    unpack8(weight, w);
    for (int i = 0; i < 8; i++) sum += x[i] * x[i];
    float rstd = norm_rstd(head_sum(sum, me) * me.mean, eps);
    for (int i = 0; i < 8; i++) x[i] *= rstd * weight[i];
    return rstd;
}

// dx: from the gradient of the normed head to that of x. dw += the weight's gradient, if `count`.
__device__ static inline void head_norm_backward(float dx[8], float dw[8], const float x[8], const Raw8& w,
                                                 float rstd, bool count, const HeadThread& me) {
    float gx = 0, weight[8];
    unpack8(weight, w);
    for (int i = 0; i < 8; i++) dx[i] *= rstd;
    if (count)
        for (int i = 0; i < 8; i++) dw[i] += dx[i] * x[i];
    for (int i = 0; i < 8; i++) {
        dx[i] *= weight[i];
        gx += dx[i] * x[i];
    }
    float mean = head_sum(gx, me) * me.mean * rstd * rstd;
    for (int i = 0; i < 8; i++) dx[i] -= x[i] * mean;
}
