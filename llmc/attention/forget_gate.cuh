/*
The forget gate: logf_t = logsigmoid(z_t + bias), c_t = logf_0 + ... + logf_t, and back.

A gate is computed in float and added up in double: after 65536 tokens c may stand at -1e5, and its
differences over a few tokens still matter. On the way back dlogf_t = dc_t + ... + dc_{T-1}, whose terms
nearly cancel: in double too. dc itself comes in float, which keeps far more digits of it than the bf16
products it is made from.

Both sums run over time, but not one token after another: a thread block adds up a chunk of tokens, each
thread having one, and what the chunks before (or after) it come to is added afterwards. So a few heads fill
the GPU, and every order is fixed.

    z, dz   bf16  [B, T, stride], pointing at the gate's column of the fused projection; NULL where the gate
                  has only a bias
    bias    float [NH]
    c       double [B, NH, T]
    dc      float [B, NH, T]
*/
#ifndef LLMC_FORGET_GATE_CUH
#define LLMC_FORGET_GATE_CUH

#include "../cuda/cuda_common.cuh"

#define FORGET_GATE_CHUNK 256 // tokens, and threads of a block

// What a thread block has: chunk `index` of the `count` that a head's T tokens make.
struct GateChunk {
    int64_t head, b, h;
    int index, count;
    int64_t first, end; // its tokens

    // Block head * count + index.
    __device__ GateChunk(int64_t T, int64_t NH) {
        count = (int)ceil_div<int64_t>(T, FORGET_GATE_CHUNK);
        head = blockIdx.x / (unsigned)count, index = (int)(blockIdx.x % (unsigned)count);
        b = head / NH, h = head % NH;
        first = (int64_t)index * FORGET_GATE_CHUNK, end = min(first + FORGET_GATE_CHUNK, T);
    }
};

static inline int64_t forget_gate_chunks(int64_t B, int64_t T, int64_t NH) {
    return B * NH * ceil_div<int64_t>(T, FORGET_GATE_CHUNK);
}

// Bytes of the scratch of both passes: two sums a chunk.
static inline size_t forget_gate_scratch_bytes(int64_t B, int64_t T, int64_t NH) {
    return (size_t)(2 * forget_gate_chunks(B, T, NH)) * sizeof(double);
}

// x summed over the threads of the block up to and with this one. Every thread calls it.
__device__ static inline double forget_gate_scan(double x) {
    constexpr int WARPS = FORGET_GATE_CHUNK / 32;
    __shared__ double warps[WARPS];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        double before = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += before;
    }
    __syncthreads(); // the last call's sums have been read
    if (lane == 31) warps[warp] = x;
    __syncthreads();
    double earlier = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        if (i < warp) earlier += warps[i];
    return earlier + x;
}

// x[0] + ... + x[n - 1], by a warp for each of its lanes
__device__ static inline double forget_gate_sum(const double* x, int64_t n) {
    double sum = 0;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32) sum += x[i];
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    return sum;
}

__device__ static inline float forget_gate_logit(const bf16* z, int64_t at, float bias) {
    return (z ? (float)z[at] : 0) + bias;
}

// ----------------------------------------------------------------------------
// forward

// c of each chunk as if it were the first, and totals [B, NH, chunks]
__global__ static void __launch_bounds__(FORGET_GATE_CHUNK)
    forget_gate_scan_kernel(double* __restrict__ c, double* __restrict__ totals, const bf16* __restrict__ z,
                            const float* __restrict__ bias, int64_t T, int64_t NH, int64_t stride) {
    GateChunk chunk(T, NH);
    int64_t t = chunk.first + threadIdx.x;
    float logf = 0;
    if (t < T) {
        float logit = forget_gate_logit(z, (chunk.b * T + t) * stride + chunk.h, bias[chunk.h]);
        logf = fminf(logit, 0) - log1pf(expf(-fabsf(logit)));
    }
    double sum = forget_gate_scan(logf);
    if (t < T) c[chunk.head * T + t] = sum;
    if (threadIdx.x == FORGET_GATE_CHUNK - 1) totals[blockIdx.x] = sum;
}

// c += the totals of the chunks before
__global__ static void __launch_bounds__(FORGET_GATE_CHUNK)
    forget_gate_carry_kernel(double* __restrict__ c, const double* __restrict__ totals, int64_t T,
                             int64_t NH) {
    GateChunk chunk(T, NH);
    int64_t t = chunk.first + threadIdx.x;
    if (chunk.index == 0) return;
    double own = t < T ? c[chunk.head * T + t] : 0;
    double before = forget_gate_sum(totals + chunk.head * chunk.count, chunk.index);
    if (t < T) c[chunk.head * T + t] = before + own;
}

// Writes c. scratch has forget_gate_scratch_bytes.
static inline void forget_gate_forward(double* c, const bf16* z, const float* bias, void* scratch, int64_t B,
                                       int64_t T, int64_t NH, int64_t stride, cudaStream_t stream) {
    unsigned chunks = (unsigned)forget_gate_chunks(B, T, NH);
    double* totals = (double*)scratch;
    forget_gate_scan_kernel<<<chunks, FORGET_GATE_CHUNK, 0, stream>>>(c, totals, z, bias, T, NH, stride);
    CUDA_CHECK_LAUNCH();
    if (T <= FORGET_GATE_CHUNK) return;
    forget_gate_carry_kernel<<<chunks, FORGET_GATE_CHUNK, 0, stream>>>(c, totals, T, NH);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// backward

// totals [B, NH, chunks] of dc
__global__ static void __launch_bounds__(FORGET_GATE_CHUNK)
    forget_gate_totals_kernel(double* __restrict__ totals, const float* __restrict__ dc, int64_t T,
                              int64_t NH) {
    GateChunk chunk(T, NH);
    int64_t t = chunk.first + threadIdx.x;
    double sum = forget_gate_scan(t < T ? dc[chunk.head * T + t] : 0);
    if (threadIdx.x == FORGET_GATE_CHUNK - 1) totals[blockIdx.x] = sum;
}

// dz, and dlogit_sums [NH, B, chunks]. Threads take a chunk from its end.
__global__ static void __launch_bounds__(FORGET_GATE_CHUNK)
    forget_gate_backward_kernel(bf16* __restrict__ dz, double* __restrict__ dlogit_sums,
                                const double* __restrict__ totals, const float* __restrict__ dc,
                                const bf16* __restrict__ z, const float* __restrict__ bias, int64_t B,
                                int64_t T, int64_t NH, int64_t stride) {
    GateChunk chunk(T, NH);
    int64_t t = chunk.end - 1 - threadIdx.x, at = (chunk.b * T + t) * stride + chunk.h;
    float d = 0, logit = 0, dlogit = 0;
    if (t >= chunk.first) {
        d = dc[chunk.head * T + t];
        logit = forget_gate_logit(z, at, bias[chunk.h]);
    }
    double after = forget_gate_sum(totals + blockIdx.x + 1, chunk.count - 1 - chunk.index);
    double dlogf = after + forget_gate_scan(d);
    if (t >= chunk.first) {
        dlogit = (float)dlogf / (1 + expf(logit));
        if (z) dz[at] = (bf16)dlogit;
    }
    double sum = forget_gate_scan(dlogit);
    if (threadIdx.x == FORGET_GATE_CHUNK - 1)
        dlogit_sums[(chunk.h * B + chunk.b) * chunk.count + chunk.index] = sum;
}

// Block h, one warp: dbias[h] += the sum of its n dlogit_sums
__global__ static void __launch_bounds__(32)
    forget_gate_dbias_kernel(float* __restrict__ dbias, const double* __restrict__ dlogit_sums, int64_t n) {
    double sum = forget_gate_sum(dlogit_sums + blockIdx.x * n, n);
    if (threadIdx.x == 0) dbias[blockIdx.x] += (float)sum;
}

// Writes dz = dlogf sigmoid(-logit), rounded to bf16, and adds its sum to dbias. NULL for z means NULL for
// dz. scratch has forget_gate_scratch_bytes.
static inline void forget_gate_backward(bf16* dz, float* dbias, const float* dc, const bf16* z,
                                        const float* bias, void* scratch, int64_t B, int64_t T, int64_t NH,
                                        int64_t stride, cudaStream_t stream) {
    unsigned chunks = (unsigned)forget_gate_chunks(B, T, NH);
    double *totals = (double*)scratch, *dlogit_sums = totals + chunks;
    forget_gate_totals_kernel<<<chunks, FORGET_GATE_CHUNK, 0, stream>>>(totals, dc, T, NH);
    CUDA_CHECK_LAUNCH();
    forget_gate_backward_kernel<<<chunks, FORGET_GATE_CHUNK, 0, stream>>>(dz, dlogit_sums, totals, dc, z,
                                                                          bias, B, T, NH, stride);
    CUDA_CHECK_LAUNCH();
    forget_gate_dbias_kernel<<<(unsigned)NH, 32, 0, stream>>>(dbias, dlogit_sums, chunks / NH);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_FORGET_GATE_CUH
