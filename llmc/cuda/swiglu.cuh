/*
SwiGLU: s = silu(g) u, with g and u the two halves of gu [rows, 2I]. One thread has eight channels of a row.

Pointers are aligned to 16 bytes, I is a multiple of 8.
*/
#ifndef LLMC_SWIGLU_CUH
#define LLMC_SWIGLU_CUH

#include "cuda_common.cuh"

__global__ static void __launch_bounds__(512) swiglu_forward_kernel(bf16* s, const bf16* gu, int64_t I) {
    int64_t row = blockIdx.x, i = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= I) return;
    float g[8], u[8];
    const bf16* in = gu + row * 2 * I + i;
    Raw8 g_in = load_raw8_once(in), u_in = load_raw8_once(in + I);
    unpack8(g, g_in);
    unpack8(u, u_in);
    for (int j = 0; j < 8; j++) u[j] *= g[j] * sigmoidf(g[j]);
    store16_once(s + row * I + i, pack8(u));
}

__global__ static void __launch_bounds__(512)
    swiglu_backward_kernel(bf16* dgu, bf16* s, const bf16* ds, const bf16* gu, int64_t I) {
    int64_t row = blockIdx.x, i = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= I) return;
    float g[8], u[8], d[8], out_s[8];
    const bf16* in = gu + row * 2 * I + i;
    Raw8 g_in = load_raw8_once(in), u_in = load_raw8_once(in + I), d_in = load_raw8_once(ds + row * I + i);
    unpack8(g, g_in);
    unpack8(u, u_in);
    unpack8(d, d_in);
    for (int j = 0; j < 8; j++) {
        float open = sigmoidf(g[j]), du = d[j] * g[j] * open;
        out_s[j] = u[j] * (g[j] * open);
        g[j] = d[j] * u[j] * open * (1 + g[j] * (1 - open));
        u[j] = du;
    }
    bf16* out = dgu + row * 2 * I + i;
    store16_once(out, pack8(g));
    store16_once(out + I, pack8(u));
    store16_once(s + row * I + i, pack8(out_s));
}

// The grid over rows and parts of a row, and the threads of a block.
static inline dim3 swiglu_grid(int64_t rows, int64_t I, int* threads) {
    assert(rows <= INT32_MAX && I > 0 && I % 8 == 0);
    int64_t parts = ceil_div<int64_t>(I, 8 * 512);
    *threads = (int)(32 * ceil_div<int64_t>(I, 8 * 32 * parts));
    return dim3((unsigned)rows, (unsigned)parts);
}

// s [rows, I] from gu [rows, 2I]
static inline void swiglu_forward(bf16* s, const bf16* gu, int64_t rows, int64_t I, cudaStream_t stream) {
    int threads;
    dim3 grid = swiglu_grid(rows, I, &threads);
    if (rows == 0) return;
    swiglu_forward_kernel<<<grid, threads, 0, stream>>>(s, gu, I);
    CUDA_CHECK_LAUNCH();
}

// dgu [rows, 2I] from ds [rows, I], and s once more, as the forward pass gave it: made in passing, it need
// not be kept. dgu may be gu, and s may be ds.
static inline void swiglu_backward(bf16* dgu, bf16* s, const bf16* ds, const bf16* gu, int64_t rows,
                                   int64_t I, cudaStream_t stream) {
    int threads;
    dim3 grid = swiglu_grid(rows, I, &threads);
    if (rows == 0) return;
    swiglu_backward_kernel<<<grid, threads, 0, stream>>>(dgu, s, ds, gu, I);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_SWIGLU_CUH
