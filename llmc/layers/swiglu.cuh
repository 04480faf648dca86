/*
SwiGLU: act = silu(gate) up, where gate and up are the two halves of each row of gate_up.

gate_up is bf16 [rows, 2I], act [rows, I], and so are their gradients; pointers are aligned to 16 bytes, I is
a multiple of 8. The trainer calls it between the two GEMMs of the MLP. A thread has eight channels of a row.
With --fp8 act and dgate_up are written in FP8 too (act8, dgate_up8).
*/
#pragma once

#include "../cuda/fp8.cuh"
#include "../cuda/launch.cuh"

// Eight channels
__device__ static inline Raw8 swiglu8(const Raw8& gate, const Raw8& up) {
    float g[8], u[8];
    unpack8(g, gate);
    unpack8(u, up);
    for (int j = 0; j < 8; j++) u[j] *= g[j] * sigmoidf(g[j]);
    return pack8(u);
}

template <Fp8Format F>
__global__ static void __launch_bounds__(512)
    swiglu_forward_kernel(bf16* act, const bf16* gate_up, int64_t I, const __grid_constant__ Fp8Tensor act8) {
    kernel_wait();
    Fp8Writer<F> quantized(act8);
    int64_t row = block_from_end(), i = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= I) return;
    const bf16* in = gate_up + row * 2 * I + i;
    Raw8 g_in = load_raw8_once(in), u_in = load_raw8_once(in + I);
    const Raw8 out = swiglu8(g_in, u_in);
    if (!quantized.alone()) store16_once(act + row * I + i, out);
    quantized.store(row * I + i, out);
    quantized.finish();
}

template <Fp8Format F>
__global__ static void __launch_bounds__(512)
    swiglu_backward_kernel(bf16* dgate_up, bf16* act, const bf16* dact, const bf16* gate_up, int64_t I,
                           const __grid_constant__ Fp8Tensor dgate_up8) {
    kernel_wait();
    Fp8Writer<F> quantized(dgate_up8);
    int64_t row = block_from_end(), i = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= I) return;
    float g[8], u[8], d[8], recomputed[8];
    const bf16* in = gate_up + row * 2 * I + i;
    Raw8 g_in = load_raw8_once(in), u_in = load_raw8_once(in + I), d_in = load_raw8_once(dact + row * I + i);
    unpack8(g, g_in);
    unpack8(u, u_in);
    unpack8(d, d_in);
    for (int j = 0; j < 8; j++) {
        float sig = sigmoidf(g[j]), du = d[j] * g[j] * sig;
        recomputed[j] = u[j] * (g[j] * sig);
        g[j] = d[j] * u[j] * sig * (1 + g[j] * (1 - sig));
        u[j] = du;
    }
    bf16* out = dgate_up + row * 2 * I + i;
    store16_once(out, pack8(g));
    store16_once(out + I, pack8(u));
    if (act) store16_once(act + row * I + i, pack8(recomputed));
    quantized.store(row * 2 * I + i, pack8(g));
    quantized.store(row * 2 * I + i + I, pack8(u));
    quantized.finish();
}

// act [rows, I] from gate_up [rows, 2I]
static inline void swiglu_forward(bf16* act, const bf16* gate_up, int64_t rows, int64_t I,
                                  const Fp8Tensor& act8, cudaStream_t stream) {
    Range range("SwiGLU", RANGE_FORWARD, stream);
    RowGrid grid = row_grid(rows, I);
    auto kernel = act8.data ? swiglu_forward_kernel<FP8_E4M3> : swiglu_forward_kernel<FP8_NONE>;
    launch_after(kernel, grid.blocks, grid.threads, 0, stream, act, gate_up, I, act8);
}

// dgate_up [rows, 2I] from dact [rows, I]. Unless it is NULL, act is recomputed, with the bits of the forward
// pass, so that it need not be kept. dgate_up may be gate_up, and act may be dact.
static inline void swiglu_backward(bf16* dgate_up, bf16* act, const bf16* dact, const bf16* gate_up,
                                   int64_t rows, int64_t I, const Fp8Tensor& dgate_up8, cudaStream_t stream) {
    Range range("SwiGLU", RANGE_BACKWARD, stream);
    RowGrid grid = row_grid(rows, I);
    auto kernel = dgate_up8.data ? swiglu_backward_kernel<FP8_E5M2> : swiglu_backward_kernel<FP8_NONE>;
    launch_after(kernel, grid.blocks, grid.threads, 0, stream, dgate_up, act, dact, gate_up, I, dgate_up8);
}
