/*
The forget gate: logf_t = logsigmoid(z_t + bias), c_t = logf_0 + ... + logf_t, and back.

A gate is computed in float and added up in double: after 65536 tokens c may stand at -1e5, and its
differences over a few tokens still matter. On the way back dlogf_t = dc_t + ... + dc_{T-1}, whose terms
nearly cancel: in double too. dc itself comes in float, which keeps far more digits of it than the bf16
products it is made from.

    z, dz   bf16  [B, T, stride], pointing at the gate's column of the fused projection; NULL where the gate
                  has only a bias
    bias    float [NH]
    c       double [B, NH, T]
    dc      float [B, NH, T]
*/
#ifndef LLMC_FORGET_GATE_CUH
#define LLMC_FORGET_GATE_CUH

#include "cuda_common.cuh"

// One thread block scans a head, 4096 tokens at a time, each thread 8 in a row.
#define FORGET_GATE_THREADS 512
#define FORGET_GATE_ITEMS   8
#define FORGET_GATE_TILE    (FORGET_GATE_THREADS * FORGET_GATE_ITEMS)

// Returns the sum of x over all threads before this one, and adds the sum over all to *total. Every thread
// calls it.
__device__ static inline double forget_gate_scan(double x, double* total) {
    constexpr int WARPS = FORGET_GATE_THREADS / 32;
    __shared__ double warps[WARPS];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    double sum = x;
    for (int step = 1; step < 32; step *= 2) {
        double before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
    }
    __syncthreads(); // the last call's sums have been read
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    double earlier = 0, all = 0;
    for (int i = 0; i < WARPS; i++) {
        if (i == warp) earlier = all;
        all += warps[i];
    }
    *total += all;
    return earlier + (sum - x);
}

__device__ static inline float forget_gate_logit(const bf16* z, int64_t at, float bias) {
    return (z ? (float)z[at] : 0) + bias;
}

// Block b NH + h.
__global__ static void __launch_bounds__(FORGET_GATE_THREADS)
    forget_gate_forward_kernel(double* __restrict__ c, const bf16* __restrict__ z,
                               const float* __restrict__ bias, int64_t T, int64_t NH, int64_t stride) {
    int64_t head = blockIdx.x, b = head / NH, h = head % NH;
    double before = 0;
    for (int64_t start = 0; start < T; start += FORGET_GATE_TILE) {
        int64_t first = start + threadIdx.x * FORGET_GATE_ITEMS;
        float logf[FORGET_GATE_ITEMS];
        double sum = 0;
#pragma unroll
        for (int i = 0; i < FORGET_GATE_ITEMS; i++) {
            float x = first + i < T ? forget_gate_logit(z, (b * T + first + i) * stride + h, bias[h]) : 0;
            logf[i] = first + i < T ? fminf(x, 0) - log1pf(expf(-fabsf(x))) : 0;
            sum += logf[i];
        }
        double total = before, running = before + forget_gate_scan(sum, &total);
        before = total;
#pragma unroll
        for (int i = 0; i < FORGET_GATE_ITEMS; i++) {
            running += logf[i];
            if (first + i < T) c[head * T + first + i] = running;
        }
    }
}

// Block h, which takes the sequences one by one: dbias is a sum over all of them, and this way always in one
// order.
__global__ static void __launch_bounds__(FORGET_GATE_THREADS)
    forget_gate_backward_kernel(bf16* __restrict__ dz, float* __restrict__ dbias,
                                const float* __restrict__ dc, const bf16* __restrict__ z,
                                const float* __restrict__ bias, int64_t B, int64_t T, int64_t NH,
                                int64_t stride) {
    int64_t h = blockIdx.x;
    double dlogit_sum = 0;
    for (int64_t b = 0; b < B; b++) {
        double after = 0;
        for (int64_t start = 0; start < T; start += FORGET_GATE_TILE) {
            int64_t last = T - 1 - start - threadIdx.x * FORGET_GATE_ITEMS; // from the end
            float d[FORGET_GATE_ITEMS];
            double sum = 0;
#pragma unroll
            for (int i = 0; i < FORGET_GATE_ITEMS; i++) {
                d[i] = last >= i ? dc[(b * NH + h) * T + last - i] : 0;
                sum += d[i];
            }
            double total = after, dlogf = after + forget_gate_scan(sum, &total);
            after = total;
#pragma unroll
            for (int i = 0; i < FORGET_GATE_ITEMS; i++) {
                dlogf += d[i];
                if (last < i) continue;
                int64_t at = (b * T + last - i) * stride + h;
                float dlogit = (float)dlogf / (1 + expf(forget_gate_logit(z, at, bias[h])));
                if (z) dz[at] = (bf16)dlogit;
                dlogit_sum += dlogit;
            }
        }
    }
    double total = 0;
    forget_gate_scan(dlogit_sum, &total);
    if (threadIdx.x == 0) dbias[h] += (float)total;
}

static inline void forget_gate_forward(double* c, const bf16* z, const float* bias, int64_t B, int64_t T,
                                       int64_t NH, int64_t stride, cudaStream_t stream) {
    forget_gate_forward_kernel<<<(unsigned)(B * NH), FORGET_GATE_THREADS, 0, stream>>>(c, z, bias, T, NH,
                                                                                       stride);
    CUDA_CHECK_LAUNCH();
}

// Writes dz = dlogf sigmoid(-logit), rounded to bf16, and adds its sum to dbias. NULL for z means NULL for
// dz.
static inline void forget_gate_backward(bf16* dz, float* dbias, const float* dc, const bf16* z,
                                        const float* bias, int64_t B, int64_t T, int64_t NH, int64_t stride,
                                        cudaStream_t stream) {
    forget_gate_backward_kernel<<<(unsigned)NH, FORGET_GATE_THREADS, 0, stream>>>(dz, dbias, dc, z, bias, B,
                                                                                  T, NH, stride);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_FORGET_GATE_CUH
