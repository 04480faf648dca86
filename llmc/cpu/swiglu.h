/*
SwiGLU, act = silu(g) u with g and u the two halves of gate_up, of the CPU trainer, as llmc/layers/swiglu.cuh of the
GPU trainer.

    act, dact [rows, I]    gate_up, dgate_up [rows, 2 I]

Called by train_fox.c.
*/
#pragma once

#include "vector.h"

static inline void swiglu_forward(real* act, const real* gate_up, int64_t rows, int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
#pragma omp simd
        for (int64_t i = 0; i < I; i++) {
            real g = gate_up[t * 2 * I + i], u = gate_up[t * 2 * I + I + i];
            act[t * I + i] = g * sigmoid(g) * u;
        }
}

static inline void swiglu_backward(real* dgate_up, const real* dact, const real* gate_up, int64_t rows,
                                   int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
#pragma omp simd
        for (int64_t i = 0; i < I; i++) {
            real g = gate_up[t * 2 * I + i], u = gate_up[t * 2 * I + I + i], open = sigmoid(g);
            dgate_up[t * 2 * I + i] = dact[t * I + i] * u * open * (1 + g * (1 - open));
            dgate_up[t * 2 * I + I + i] = dact[t * I + i] * g * open;
        }
}
