/*
SwiGLU: act = silu(gate) up, where gate and up are the two halves of each row of gate_up.

gate_up is bf16 [rows, 2I], act [rows, I], and so are their gradients; pointers are aligned to 16 bytes, I is
a multiple of 8. The trainer calls it between the two GEMMs of the MLP. A thread has eight channels of a row.

With --fp8, from the second step on, act and dgate_up are in FP8 alone: row-major for the GEMMs of
activations, and transposed for those of weights. A thread block then has a tile of rows and channels, so that
the transposed copies are written in whole cache lines.
*/
#pragma once

#include "../cuda/fp8.cuh"
#include "../cuda/launch.cuh"
#include "layer.cuh"

// Eight channels
__device__ static inline Raw8 swiglu8(const Raw8& gate, const Raw8& up) {
    float g[8], u[8];
    unpack8(g, gate);
    unpack8(u, up);
    for (int j = 0; j < 8; j++) u[j] *= g[j] * sigmoidf(g[j]);
    return pack8(u);
}

// The gradients of gate and up, in their place, from dact. Returns act, with the bits of the forward pass.
__device__ static inline Raw8 swiglu_backward8(Raw8& gate, Raw8& up, const Raw8& dact) {
    float g[8], u[8], d[8], act[8];
    unpack8(g, gate);
    unpack8(u, up);
    unpack8(d, dact);
    for (int j = 0; j < 8; j++) {
        float sig = sigmoidf(g[j]), du = d[j] * g[j] * sig;
        act[j] = u[j] * (g[j] * sig);
        g[j] = d[j] * u[j] * sig * (1 + g[j] * (1 - sig));
        u[j] = du;
    }
    gate = pack8(g), up = pack8(u);
    return pack8(act);
}

__global__ static void __launch_bounds__(512)
    swiglu_forward_kernel(bf16* act, const bf16* gate_up, int64_t I) {
    kernel_wait();
    int64_t row = block_from_end(), i = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= I) return;
    const bf16* in = gate_up + row * 2 * I + i;
    Raw8 g_in = load_raw8_once(in), u_in = load_raw8_once(in + I);
    store16_once(act + row * I + i, swiglu8(g_in, u_in));
}

__global__ static void __launch_bounds__(512)
    swiglu_backward_kernel(bf16* dgate_up, bf16* act, const bf16* dact, const bf16* gate_up, int64_t I) {
    kernel_wait();
    int64_t row = block_from_end(), i = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= I) return;
    const bf16* in = gate_up + row * 2 * I + i;
    Raw8 g = load_raw8_once(in), u = load_raw8_once(in + I), d = load_raw8_once(dact + row * I + i);
    const Raw8 recomputed = swiglu_backward8(g, u, d);
    bf16* out = dgate_up + row * 2 * I + i;
    store16_once(out, g);
    store16_once(out + I, u);
    if (act) store16_once(act + row * I + i, recomputed);
}

// act [rows, I] from gate_up [rows, 2I]
static inline void swiglu_forward(bf16* act, const bf16* gate_up, int64_t rows, int64_t I,
                                  cudaStream_t stream) {
    Range range("SwiGLU", RANGE_FORWARD, stream);
    RowGrid grid = row_grid(rows, I);
    launch_after(swiglu_forward_kernel, grid.blocks, grid.threads, 0, stream, act, gate_up, I);
}

// dgate_up [rows, 2I] from dact [rows, I]. Unless it is NULL, act is recomputed, with the bits of the forward
// pass, so that it need not be kept. dgate_up may be gate_up, and act may be dact.
static inline void swiglu_backward(bf16* dgate_up, bf16* act, const bf16* dact, const bf16* gate_up,
                                   int64_t rows, int64_t I, cudaStream_t stream) {
    Range range("SwiGLU", RANGE_BACKWARD, stream);
    RowGrid grid = row_grid(rows, I);
    launch_after(swiglu_backward_kernel, grid.blocks, grid.threads, 0, stream, dgate_up, act, dact, gate_up,
                 I);
}

// ----------------------------------------------------------------------------
// in FP8

enum { SWIGLU_FORWARD_ROWS = 4, SWIGLU_BACKWARD_ROWS = 2 }; // of a thread, all loads in flight at once

__global__ static void __launch_bounds__(256)
    swiglu_forward_fp8_kernel(const bf16* gate_up, int rows, int I, const __grid_constant__ Fp8Tensor act8) {
    __shared__ Fp8Transposed transposed;
    kernel_wait();
    Fp8Writer<FP8_E4M3> quantized(act8);
    const Fp8Tile tile(I);
#pragma unroll 1
    for (int first = 0; first < FP8_TILE_ROWS; first += SWIGLU_FORWARD_ROWS) {
        Raw8 gate[SWIGLU_FORWARD_ROWS] = {}, up[SWIGLU_FORWARD_ROWS] = {};
        const int row = tile.row + FP8_TILE_STEP * first;
        const bf16* in = gate_up + (int64_t)row * 2 * I + tile.column;
#pragma unroll
        for (int i = 0; i < SWIGLU_FORWARD_ROWS; i++)
            if (tile.column < I && row + FP8_TILE_STEP * i < rows) {
                gate[i] = load_raw8_once(in + (int64_t)i * FP8_TILE_STEP * 2 * I);
                up[i] = load_raw8_once(in + (int64_t)i * FP8_TILE_STEP * 2 * I + I);
            }
#pragma unroll
        for (int i = 0; i < SWIGLU_FORWARD_ROWS; i++) {
            if (tile.column >= I || row + FP8_TILE_STEP * i >= rows) break;
            const int64_t at = (int64_t)(row + FP8_TILE_STEP * i) * I + tile.column;
            transposed.put(tile, first + i, quantized.store(at, swiglu8(gate[i], up[i])));
        }
    }
    quantized.finish();
    if (!act8.transposed) return;
    __syncthreads();
    transposed.store(act8.transposed, tile, rows, I);
}

// ACT: act8's transposed copy is written, of the recomputed act.
template <bool ACT>
__global__ static void __launch_bounds__(256)
    swiglu_backward_fp8_kernel(const bf16* dact, const bf16* gate_up, int rows, int I,
                               const __grid_constant__ Fp8Tensor dgate_up8,
                               const __grid_constant__ Fp8Tensor act8) {
    __shared__ Fp8Transposed transposed[ACT ? 3 : 2]; // gate, up, act
    kernel_wait();
    Fp8Writer<FP8_E5M2> quantized(dgate_up8);
    const float act_scale = ACT ? act8.scale->scale : 0;
    const Fp8Tile tile(I);
#pragma unroll 1
    for (int first = 0; first < FP8_TILE_ROWS; first += SWIGLU_BACKWARD_ROWS) {
        Raw8 gate[SWIGLU_BACKWARD_ROWS] = {}, up[SWIGLU_BACKWARD_ROWS] = {}, d[SWIGLU_BACKWARD_ROWS] = {};
        const int row = tile.row + FP8_TILE_STEP * first;
        const int64_t at = (int64_t)row * I + tile.column;
#pragma unroll
        for (int i = 0; i < SWIGLU_BACKWARD_ROWS; i++)
            if (tile.column < I && row + FP8_TILE_STEP * i < rows) {
                const int64_t ahead = (int64_t)i * FP8_TILE_STEP * I;
                gate[i] = load_raw8_once(gate_up + 2 * (at + ahead) - tile.column);
                up[i] = load_raw8_once(gate_up + 2 * (at + ahead) - tile.column + I);
                d[i] = load_raw8_once(dact + at + ahead);
            }
#pragma unroll
        for (int i = 0; i < SWIGLU_BACKWARD_ROWS; i++) {
            if (tile.column >= I || row + FP8_TILE_STEP * i >= rows) break;
            const int64_t out = 2 * (at + (int64_t)i * FP8_TILE_STEP * I) - tile.column; // of gate
            const Raw8 act = swiglu_backward8(gate[i], up[i], d[i]);
            transposed[0].put(tile, first + i, quantized.store(out, gate[i]));
            transposed[1].put(tile, first + i, quantized.store(out + I, up[i]));
            if (ACT) transposed[2].put(tile, first + i, fp8_bytes<FP8_E4M3>(act, act_scale));
        }
    }
    quantized.finish();
    __syncthreads();
    transposed[0].store(dgate_up8.transposed, tile, rows, I);
    transposed[1].store(dgate_up8.transposed + (int64_t)I * rows, tile, rows, I);
    if (ACT) transposed[2].store(act8.transposed, tile, rows, I);
}

// act8 [rows, I], and transposed unless there is no place for it. rows is a multiple of 4.
static inline void swiglu_forward_fp8(const Fp8Tensor& act8, const bf16* gate_up, int64_t rows, int64_t I,
                                      cudaStream_t stream) {
    Range range("SwiGLU", RANGE_FORWARD, stream);
    launch_after(swiglu_forward_fp8_kernel, (unsigned)fp8_tiles(rows, I), 256, 0, stream, gate_up, (int)rows,
                 (int)I, act8);
}

// dgate_up8 [rows, 2I], and transposed. act8 is recomputed, transposed alone, unless there is no place for
// it.
static inline void swiglu_backward_fp8(const Fp8Tensor& dgate_up8, const Fp8Tensor& act8, const bf16* dact,
                                       const bf16* gate_up, int64_t rows, int64_t I, cudaStream_t stream) {
    Range range("SwiGLU", RANGE_BACKWARD, stream);
    auto kernel = act8.transposed ? swiglu_backward_fp8_kernel<true> : swiglu_backward_fp8_kernel<false>;
    launch_after(kernel, (unsigned)fp8_tiles(rows, I), 256, 0, stream, dact, gate_up, (int)rows, (int)I,
                 dgate_up8, act8);
}

// Returns whether act and dgate_up are in FP8, and then gives them memory: act's transposed copy has that of
// act in bf16, dgate_up, row-major and transposed, that of dgate_up in bf16.
static inline bool swiglu_place_fp8(bf16* act, bf16* dgate_up, Linear* gate_up_proj, Linear* down_proj) {
    if (!down_proj->fp8.x.data) return false;
    down_proj->fp8.x.transposed = (fp8*)act;
    gate_up_proj->fp8.dout.data = (fp8*)dgate_up;
    gate_up_proj->fp8.dout.transposed = (fp8*)dgate_up + gate_up_proj->rows * gate_up_proj->N;
    return true;
}

// act, whose transposed copy one of the passes writes: the forward pass where all layers keep it.
static inline Fp8Tensor swiglu_act8(const Layer* layer, const Linear* down_proj, bool forward) {
    Fp8Tensor act8 = down_proj->fp8.x;
    if (forward == layer->recompute_outputs) act8.transposed = NULL;
    return act8;
}
