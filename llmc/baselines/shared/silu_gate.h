/*
The output gate of Gated DeltaNet's and Mamba-2's mixers on the CPU, out = x silu(gate). Gates are columns of
the fused projection, with `stride` elements from row to row; x and out [rows, n] are contiguous.
*/
#pragma once

#include "../../cpu/layer.h"

static inline void silu_gate_forward(real* out, const real* x, const real* gate, int64_t rows, int64_t n,
                                     int64_t stride) {
#pragma omp parallel for schedule(static) if (rows * n > 8192)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < n; c++) out[i * n + c] = x[i * n + c] * silu(gate[i * stride + c]);
}

// Writes dx, which may be dout, and dgate, with the stride of the gate.
static inline void silu_gate_backward(real* dx, real* dgate, const real* dout, const real* x,
                                      const real* gate, int64_t rows, int64_t n, int64_t stride) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < n; c++) {
            const real z = gate[i * stride + c], d = dout[i * n + c];
            dgate[i * stride + c] = d * x[i * n + c] * silu_slope(z);
            dx[i * n + c] = d * silu(z);
        }
}
