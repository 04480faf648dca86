/*
RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over a row's channels or over each head's.

Over a row, which one block takes, a thread having eight channels: everything is read once and waits in
registers for the sum. The residual sum before a norm is taken on the way. Over heads (QK norm, output norm) a
head's channels lie in neighbouring lanes of a warp; those kernels are in qkv.cuh and output_gate.cuh, their
arithmetic is here.

The gradient of a norm's weight is a sum over all tokens. The grid is as large as the GPU runs at once; each
block goes through its share of the tokens, the next one's data on their way while it computes, adds up in
registers and leaves one row of partial sums; a second kernel adds the rows. Every order is fixed: a GPU gives
the same bits in every run.

Pointers to bf16 are aligned to 16 bytes.
*/
#ifndef LLMC_RMSNORM_CUH
#define LLMC_RMSNORM_CUH

#include "cuda_common.cuh"

// ----------------------------------------------------------------------------
// sums over tokens

// How many blocks of a kernel the GPU runs at once.
template <class Kernel> static inline int64_t resident_blocks(Kernel kernel, int threads) {
    int device, multiprocessors, blocks;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0));
    return (int64_t)multiprocessors * blocks;
}

// Bytes of the scratch `partial` of every backward pass with norm weights: eight floats for each thread that
// the GPU can hold, whatever the shape.
static inline size_t norm_partial_bytes(void) {
    int device, multiprocessors, threads;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device));
    return (size_t)multiprocessors * (size_t)threads * 8 * sizeof(float);
}

// A block takes 16 columns, its 64 rows of threads every 64th row of partial.
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
    unsigned column = threadIdx.y / 2; // a warp sums up a column
    c = 16 * (int64_t)blockIdx.x + column;
    if (column >= 16 || c >= n) return;
    sum = warp_sum(sums[column][lane] + sums[column][lane + 32]);
    if (lane == 0) out[c] = add ? out[c] + sum : sum;
}

// out[n] = the sum of partial[rows, n] over its rows, added to what out held if `add`. out may be partial's
// first row.
static inline void sum_rows(float* out, const float* partial, int64_t rows, int64_t n, bool add,
                            cudaStream_t stream) {
    sum_rows_kernel<<<(unsigned)ceil_div<int64_t>(n, 16), dim3(16, 64), 0, stream>>>(out, partial, rows, n,
                                                                                     add);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// over rows

// Sum over the block; every thread gets it. `sums` is shared; a caller that comes again must take another
// one, as slow warps may still be reading.
__device__ static inline float sum_of_block(float x, float sums[32]) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x = warp_sum(x);
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? sums[lane] : 0);
}

__global__ static void __launch_bounds__(1024)
    rmsnorm_forward_kernel(bf16* y, float* rstd, bf16* x_out, const bf16* x, const bf16* branch,
                           const bf16* weight, int d, float eps) {
    __shared__ float sums[32];
    int c = 8 * threadIdx.x;
    int64_t at = (int64_t)blockIdx.x * d + c;
    float v[8] = {}, w[8] = {}, sum = 0;
    if (c < d) {
        Raw8 in = load_raw8_once(x + at), weights = load_raw8(weight + c);
        if (branch) {
            float other[8];
            unpack8(other, load_raw8_once(branch + at));
            unpack8(v, in);
            for (int i = 0; i < 8; i++) v[i] += other[i];
            Raw8 out = pack8(v); // the norm is of the stream as it is stored
            store16_once(x_out + at, out);
            unpack8(v, out);
        } else {
            unpack8(v, in);
        }
        unpack8(w, weights);
        for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    }
    float r = rsqrtf(__fdividef(sum_of_block(sum, sums), (float)d) + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    if (c >= d) return;
    for (int i = 0; i < 8; i++) v[i] *= r * w[i];
    store16_once(y + at, pack8(v));
}

// What a block's thread reads of one row.
struct NormRow {
    Raw8 dy, x, residual;
    float rstd;
};

__global__ static void __launch_bounds__(1024)
    rmsnorm_backward_kernel(bf16* dx, float* partial, bf16* y, const bf16* residual, const bf16* dy,
                            const bf16* x, const bf16* weight, const float* rstd, int64_t rows, int d) {
    __shared__ float sums[2][32];
    int c = 8 * threadIdx.x;
    bool active = c < d;
    auto load = [=](int64_t row) {
        NormRow r = {};
        int64_t at = row * d + c;
        if (active) {
            r.dy = load_raw8_once(dy + at);
            r.x = load_raw8_once(x + at);
        }
        if (active && residual) r.residual = load_raw8_once(residual + at);
        r.rstd = rstd[row];
        return r;
    };
    float w[8] = {}, dw[8] = {};
    if (active) unpack8(w, load16(weight + c));
    int turn = 0;
    NormRow next = load(blockIdx.x);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        NormRow now = next;
        if (row + gridDim.x < rows) next = load(row + gridDim.x); // on its way while this row is summed up
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
        float mean = __fdividef(sum_of_block(gx, sums[turn]), (float)d) * now.rstd * now.rstd;
        float out[8];
        unpack8(out, now.residual);
        for (int i = 0; i < 8; i++) out[i] += now.rstd * (g[i] - v[i] * mean);
        if (active) store16_once(dx + row * d + c, pack8(out));
    }
    if (active) store8(partial + (int64_t)blockIdx.x * d + c, dw);
}

static inline int rmsnorm_threads(int64_t d) {
    if (d < 8 || d > 8192 || d % 8)
        die("RMSNorm on the GPU takes 8 to 8192 channels, a multiple of 8, not %lld", (long long)d);
    return (int)(32 * ceil_div<int64_t>(d, 256));
}

// y [rows, d] = RMSNorm(x) and rstd [rows], which the backward pass takes back. With a branch, x_out = x +
// branch comes first, and the norm is x_out's; x_out may be x. Without, branch and x_out are NULL.
static inline void rmsnorm_forward(bf16* y, float* rstd, bf16* x_out, const bf16* x, const bf16* branch,
                                   const bf16* weight, int64_t rows, int64_t d, double eps,
                                   cudaStream_t stream) {
    int threads = rmsnorm_threads(d);
    if (rows == 0) return;
    rmsnorm_forward_kernel<<<(unsigned)rows, threads, 0, stream>>>(y, rstd, x_out, x, branch, weight, (int)d,
                                                                   (float)eps);
    CUDA_CHECK_LAUNCH();
}

// dx = residual + the gradient of x, where residual [rows, d], what the stream past the norm gave, may be
// dx itself, or NULL for none. dweight [d] += its gradient. y, unless it is NULL, comes once more, as the
// forward pass gave it: made in passing, it need not be kept. partial is scratch of norm_partial_bytes.
static inline void rmsnorm_backward(bf16* dx, float* dweight, bf16* y, const bf16* residual, const bf16* dy,
                                    const bf16* x, const bf16* weight, const float* rstd, float* partial,
                                    int64_t rows, int64_t d, cudaStream_t stream) {
    int threads = rmsnorm_threads(d);
    if (rows == 0) return;
    int64_t blocks = resident_blocks(rmsnorm_backward_kernel, threads);
    if (blocks > rows) blocks = rows;
    rmsnorm_backward_kernel<<<(unsigned)blocks, threads, 0, stream>>>(dx, partial, y, residual, dy, x, weight,
                                                                      rstd, rows, (int)d);
    CUDA_CHECK_LAUNCH();
    sum_rows(dweight, partial, blocks, d, true, stream);
}

// ----------------------------------------------------------------------------
// over heads

// What a thread does in the kernels over heads: eight channels of one head, of one token after another. A
// head has as many lanes as the next power of two, and the last ones idle where dh / 8 is none.
struct HeadThread {
    int head;
    int channel; // its first, of dh
    int lanes, dh;
    float mean; // 1 / dh
    bool active;
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
    int log_lanes = 32 - __clz(dh / 8 - 1); // no division by a variable: these are slow
    me.lanes = 1 << log_lanes;
    me.dh = dh;
    me.mean = __fdividef(1, (float)dh);
    me.head = i >> log_lanes;
    me.channel = 8 * (i & (me.lanes - 1));
    me.active = me.head < NH && me.channel < dh;
    return me;
}

// Sum over the lanes of a head; each of them gets it. Heads of 64 and 128 channels have their steps laid out.
__device__ static inline float head_sum(float x, const HeadThread& me) {
    auto add = [&](int lane) { x += __shfl_xor_sync(~0u, x, lane); };
    for (int lane = me.lanes / 2; lane >= 8; lane /= 2) add(lane);
    if (me.lanes >= 8)
        add(4), add(2), add(1);
    else
        for (int lane = me.lanes / 2; lane > 0; lane /= 2) add(lane);
    return x;
}

// The norm of a head, in place; returns rstd. Idle lanes bring zeros.
__device__ static inline float head_norm_forward(float x[8], const Raw8& w, float eps, const HeadThread& me) {
    float sum = 0, weight[8];
    unpack8(weight, w);
    for (int i = 0; i < 8; i++) sum += x[i] * x[i];
    float rstd = rsqrtf(head_sum(sum, me) * me.mean + eps);
    for (int i = 0; i < 8; i++) x[i] *= rstd * weight[i];
    return rstd;
}

// dx is the gradient of the normed head and becomes that of x; if `count`, dw += the weight's.
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

#endif // LLMC_RMSNORM_CUH
