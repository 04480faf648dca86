/*
Causal depthwise convolution and SiLU, before DeltaNet's and Mamba-2's recurrence on the CPU:

    y_t = silu(z_t)    z_t = bias + w_0 x_{t-3} + w_1 x_{t-2} + w_2 x_{t-1} + w_3 x_t    each channel alone

x is columns of the fused projection, y is contiguous. Inputs before a document's first token are zeros, or
in an extension those of the tokens before (`history`). z is not kept: the backward pass computes it again.

Called by the recurrent mixers.
*/
#pragma once

#include "scan.h"

enum { CONV_HISTORY = CONV_WIDTH - 1 }; // inputs of earlier tokens that a token reads

typedef struct {
    int64_t B, T, C;
    int64_t row_stride; // elements from one row of x to the next
    const real* weight; // [C, 4]
    const real* bias;   // [C], NULL without
    real *dweight, *dbias;
    real* history; // [B, 3, C] inputs of the tokens before, oldest first; NULL: the sequences begin here
    const int32_t* doc_start; // [B, T], as Layer's; NULL: a sequence is one document
} Conv;

// The convolution of C columns of a layer's projection, without bias.
static inline Conv conv_layer(const Layer* layer, int64_t C, ParamKind weight, real* history) {
    Conv conv = {.B = layer->B,
                 .T = layer->T,
                 .C = C,
                 .row_stride = layer_proj(layer).rows,
                 .weight = layer_param(layer, weight),
                 .dweight = layer_grad(layer, weight),
                 .history = history,
                 .doc_start = layer->doc_start};
    return conv;
}

// The input of token t >= -3 of sequence b, or NULL where it is zero.
static inline const real* conv_input(const Conv* s, const real* x, int64_t b, int64_t t) {
    if (t >= 0) return x + (b * s->T + t) * s->row_stride;
    return s->history ? s->history + (b * CONV_HISTORY + CONV_HISTORY + t) * s->C : NULL;
}

// The input of token t's tap, or NULL where it is zero: before its document.
static inline const real* conv_tap(const Conv* s, const real* x, int64_t b, int64_t t, int64_t tap) {
    int64_t from = t - CONV_HISTORY + tap;
    return s->doc_start && from < s->doc_start[b * s->T + t] ? NULL : conv_input(s, x, b, from);
}

// z of channels [first, last) of one token.
static inline void conv_row(real* z, const real* x, const Conv* s, int64_t b, int64_t t, int64_t first,
                            int64_t last) {
    for (int64_t c = first; c < last; c++) z[c] = s->bias ? s->bias[c] : 0;
    for (int64_t tap = 0; tap < CONV_WIDTH; tap++) {
        const real* row = conv_tap(s, x, b, t, tap);
        for (int64_t c = first; row && c < last; c++) z[c] += s->weight[c * CONV_WIDTH + tap] * row[c];
    }
}

// y [B, T, C] from x; then the history is that of the tokens to come.
static inline void conv_forward(real* y, const real* x, const Conv* s) {
#pragma omp parallel for schedule(static) if (s->B * s->T * s->C > 8192)
    for (int64_t i = 0; i < s->B * s->T; i++) {
        real* row = y + i * s->C;
        conv_row(row, x, s, i / s->T, i % s->T, 0, s->C);
        for (int64_t c = 0; c < s->C; c++) row[c] = silu(row[c]);
    }
    for (int64_t b = 0; s->history && b < s->B; b++)
        for (int64_t j = 0; j < CONV_HISTORY; j++) // ascending: a row moves to a lower place
            memmove(s->history + (b * CONV_HISTORY + j) * s->C, conv_input(s, x, b, s->T - CONV_HISTORY + j),
                    (size_t)s->C * sizeof(real));
}

// Writes dx, with the row stride of x, and adds to the gradients of weight and bias. dy is overwritten by the
// gradient of z. Each piece is a range of channels.
static inline void conv_backward(real* dx, real* dy, const real* x, const Conv* s) {
    int64_t T = s->T, C = s->C;
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES * s->B; piece++) {
        int64_t b = piece / NUM_PIECES, first = C * (piece % NUM_PIECES) / NUM_PIECES,
                last = C * (piece % NUM_PIECES + 1) / NUM_PIECES;
        for (int64_t t = 0; t < T; t++) {
            real *z = dx + (b * T + t) * s->row_stride, *dz = dy + (b * T + t) * C;
            conv_row(z, x, s, b, t, first, last); // dx is not needed yet
            for (int64_t c = first; c < last; c++) dz[c] *= silu_slope(z[c]);
        }
        for (int64_t t = 0; t < T; t++) {
            real* row = dx + (b * T + t) * s->row_stride;
            for (int64_t c = first; c < last; c++) row[c] = 0;
            for (int64_t tap = 0; tap < CONV_WIDTH && t + CONV_HISTORY - tap >= 0; tap++) {
                int64_t later = t + CONV_HISTORY - tap;
                const real* dz = dy + (b * T + later) * C;
                if (later >= T || (s->doc_start && s->doc_start[b * T + later] > t)) continue;
                for (int64_t c = first; c < last; c++) row[c] += s->weight[c * CONV_WIDTH + tap] * dz[c];
            }
        }
    }
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES; piece++) {
        int64_t first = C * piece / NUM_PIECES, last = C * (piece + 1) / NUM_PIECES;
        for (int64_t i = 0; i < s->B * T; i++) {
            const real* dz = dy + i * C;
            for (int64_t c = first; s->bias && c < last; c++) s->dbias[c] += dz[c];
            for (int64_t tap = 0; tap < CONV_WIDTH; tap++) {
                const real* row = conv_tap(s, x, i / T, i % T, tap);
                for (int64_t c = first; row && c < last; c++)
                    s->dweight[c * CONV_WIDTH + tap] += dz[c] * row[c];
            }
        }
    }
}
