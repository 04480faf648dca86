/*
The Mamba-2 mixer on the CPU (arXiv 2405.21060), with one group of B and C:
out = residual + Wo RMSNorm(o silu(z)), the gate before the norm and the norm over all di = 2 d channels, and

    z, x~, B~, C~, dt = W in                          one projection
    x, B, C = silu(conv4(x~, B~, C~) + bias)
    step = softplus(dt + dt_bias)                     one number a head, not clamped
    S_t = exp(-step_t e^A_log) S_{t-1} + B_t (step_t x_t)^T    [N, P] a head
    o_t = S_t^T C_t + D x_t

The recurrence has q = C and k = B, which all heads share, and v = step x. One table of tensors and one
forward function serve a training pass and an extension, as in deltanet.h. A row of the CPU trainer's mixers.
*/
#pragma once

#include "../shared/conv.h"
#include "../shared/silu_gate.h"
#include "params.h"

// clang-format off
// type, name, kept for every layer, elements of a layer; train and extend are 1 or 0; C = di + 2 N,
// R = di + C + NH
#define MAMBA2_ACTS(X) \
    X(real, proj, train, BT * R)               /* [L,B,T,R] z, x~, B~, C~, dt */ \
    X(real, xbc, train, BT * C)                /* [L,B,T,C] x, B, C */ \
    X(real, steps, train, BT * NH)             /* [L,B,T,NH] */ \
    X(real, decay, train, BT * NH)             /* [L,B,T,NH] */ \
    X(real, v, train, BT * di)                 /* [L,B,T,NH,P] step x */ \
    X(real, o, train, BT * di)                 /* [L,B,T,NH,P] with D x */ \
    X(real, gated, train, BT * di)             /* [L,B,T,di] o silu(z) */ \
    X(real, rstd, train, BT)                   /* [L,B,T] */ \
    X(real, y, train, BT * di)                 /* [L,B,T,di] normed */ \
    X(real, checkpoints, train, train * B * scan_segments(T) * N * di) /* [L,B,NH,segments,N,P] */ \
    X(real, dproj, false, train * BT * R)      /* [B,T,R] */ \
    X(real, dxbc, false, train * BT * C)       /* [B,T,C] */ \
    X(real, dy, false, train * BT * di)        /* [B,T,di] gradient of y, then of o */ \
    X(real, dgated, false, train * BT * di)    /* [B,T,di] */ \
    X(real, dv, false, train * BT * di)        /* [B,T,NH,P] */ \
    X(real, parts, false, train * 2 * BT * NH * pieces * N)    /* [2,B,T,NH,pieces,N] gradients of C, B */ \
    X(real, ddecay_parts, false, train * BT * NH * pieces)     /* [B,T,NH,pieces] */ \
    X(real, dheads, false, train * 3 * BT * NH) /* [3,B,T,NH] terms of the gradients of dt_bias, A_log, D */ \
    X(real, partial, false, train * NUM_PIECES * di) /* pieces of the norm's weight gradient */ \
    X(real, history, true, extend * B * CONV_HISTORY * C) /* [L,B,3,C] the convolution's last inputs */ \
    X(real, state, true, extend * B * N * di)  /* [L,B,NH,N,P] */
// clang-format on

typedef struct {
    MAMBA2_ACTS(ACTIVATION_FIELD)
} Mamba2Acts;

static inline void mamba2_activations(Activations* rows, const Layer* layer, bool train) {
    const Config* config = layer->config;
    const int64_t B = layer->B, T = layer->T;
    int64_t BT = B * T, di = config_inner_size(config), NH = config->num_heads, N = config->state_size;
    int64_t C = di + 2 * N, R = di + C + NH, pieces = scan_pieces(di / NH), extend = !train;
    MAMBA2_ACTS(ACTIVATION_ROW)
}

#undef MAMBA2_ACTS

MIXER_ACTS(Mamba2Acts, mamba2_acts)

// Channels of the convolution: x, B and C.
static inline int64_t mamba2_channels(const Config* c) { return config_inner_size(c) + 2 * c->state_size; }

static inline Conv mamba2_conv(const Layer* layer, const Mamba2Acts* a) {
    Conv conv = conv_layer(layer, mamba2_channels(layer->config), P_MAMBA2_CONV, a->history);
    conv.bias = layer_param(layer, P_MAMBA2_CONV_BIAS);
    conv.dbias = layer_grad(layer, P_MAMBA2_CONV_BIAS);
    return conv;
}

// All heads share q and k.
static inline ScanShape mamba2_scan_shape(const Layer* layer) {
    ScanShape s = scan_shape(layer, 1, config_inner_size(layer->config));
    s.K = layer->config->state_size;
    s.key_row = mamba2_channels(layer->config), s.key_head = 0;
    s.scale = 1;
    return s;
}

static inline Scan mamba2_scan(const Mamba2Acts* a, const ScanShape* s) {
    const real* B = a->xbc + s->value_row;
    Scan r = {.q = B + s->K,
              .k = B,
              .v = a->v,
              .decay = a->decay,
              .checkpoints = a->checkpoints,
              .state = a->state};
    return r;
}

// The steps' decays and the recurrence's v from dt and x.
static inline void mamba2_steps_forward(const Layer* layer, const Mamba2Acts* a, const ScanShape* s) {
    const real *dt_bias = layer_param(layer, P_MAMBA2_DT_BIAS), *A_log = layer_param(layer, P_MAMBA2_A_LOG);
    int64_t P = s->V, R = layer_proj(layer).rows;
#pragma omp parallel for schedule(static) if (s->B * s->T * s->value_row > 8192)
    for (int64_t i = 0; i < s->B * s->T; i++)
        for (int64_t h = 0; h < s->NH; h++) {
            const real *x = a->xbc + i * s->key_row + h * P, dt = a->proj[i * R + R - s->NH + h] + dt_bias[h];
            real *v = a->v + (i * s->NH + h) * P, step = -log_sigmoid(-dt); // softplus
            a->steps[i * s->NH + h] = step;
            a->decay[i * s->NH + h] = exp_real(-step * exp_real(A_log[h]));
            for (int64_t c = 0; c < P; c++) v[c] = step * x[c];
        }
}

// Writes x's, B's and C's columns of dxbc, dt's of dproj, and the terms of the heads' gradients, from the
// recurrence's gradients and do (a->dy).
static inline void mamba2_steps_backward(const Layer* layer, const Mamba2Acts* a, const ScanShape* s) {
    const real *dt_bias = layer_param(layer, P_MAMBA2_DT_BIAS), *A_log = layer_param(layer, P_MAMBA2_A_LOG),
               *D = layer_param(layer, P_MAMBA2_D);
    int64_t P = s->V, N = s->K, NH = s->NH, di = s->value_row, R = layer_proj(layer).rows, rows = s->B * s->T;
    int64_t pieces = scan_pieces(P), parts = NH * pieces;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        real* dx = a->dxbc + i * s->key_row;
        scan_sum(dx + di + N, a->parts + i * parts * N, parts, N);      // C
        scan_sum(dx + di, a->parts + (rows + i) * parts * N, parts, N); // B
        for (int64_t h = 0; h < NH; h++) {
            int64_t at = i * NH + h;
            const real *x = a->xbc + i * s->key_row + h * P, *dv = a->dv + at * P, *dout = a->dy + at * P;
            real step = a->steps[at], rate = exp_real(A_log[h]), ddecay;
            scan_sum(&ddecay, a->ddecay_parts + at * pieces, pieces, 1);
            real dexponent = ddecay * a->decay[at]; // of -step rate
            real ddt = (dot(x, dv, P) - dexponent * rate) * sigmoid(a->proj[i * R + R - NH + h] + dt_bias[h]);
            for (int64_t c = 0; c < P; c++) dx[h * P + c] = step * dv[c] + D[h] * dout[c];
            a->dproj[i * R + R - NH + h] = ddt;
            a->dheads[at] = ddt;
            a->dheads[rows * NH + at] = -dexponent * step * rate;
            a->dheads[2 * rows * NH + at] = dot(x, dout, P);
        }
    }
}

// o += D x
static inline void mamba2_skip_forward(const Layer* layer, const Mamba2Acts* a, const ScanShape* s) {
    const real* D = layer_param(layer, P_MAMBA2_D);
    int64_t di = s->value_row;
#pragma omp parallel for schedule(static) if (s->B * s->T * di > 8192)
    for (int64_t i = 0; i < s->B * s->T; i++)
        for (int64_t c = 0; c < di; c++) a->o[i * di + c] += D[c / s->V] * a->xbc[i * s->key_row + c];
}

// Also extends: where the layer has states it starts from them and updates them.
static inline void mamba2_forward(const Layer* layer, real* out, const real* in, const real* residual) {
    Mamba2Acts a = mamba2_acts(layer);
    ScanShape shape = mamba2_scan_shape(layer);
    Scan scan = mamba2_scan(&a, &shape);
    Linear in_proj = layer_in_proj(layer), out_proj = layer_linear(layer, P_MAMBA2_OUT_PROJ);
    Conv conv = mamba2_conv(layer, &a);
    Norm norm = layer_norm(layer, P_MAMBA2_NORM, a.rstd);

    linear_forward(a.proj, in, NULL, &in_proj);
    conv_forward(a.xbc, a.proj + shape.value_row, &conv);
    mamba2_steps_forward(layer, &a, &shape);
    scan_forward(a.o, &scan, &shape);
    mamba2_skip_forward(layer, &a, &shape);
    silu_gate_forward(a.gated, a.o, a.proj, norm.rows, norm.d, in_proj.N);
    rmsnorm_forward(a.y, a.gated, &norm);
    linear_forward(out, a.y, residual, &out_proj);
}

// Writes din, the gradient of `in`.
static inline void mamba2_backward(const Layer* layer, real* din, const real* dout, const real* in) {
    Mamba2Acts a = mamba2_acts(layer);
    ScanShape shape = mamba2_scan_shape(layer);
    Scan scan = mamba2_scan(&a, &shape);
    Linear in_proj = layer_in_proj(layer), out_proj = layer_linear(layer, P_MAMBA2_OUT_PROJ);
    int64_t rows = layer->B * layer->T, di = shape.value_row;
    const ParamKind kinds[3] = {P_MAMBA2_DT_BIAS, P_MAMBA2_A_LOG, P_MAMBA2_D};
    ScanBackward gradients = {.dq_parts = a.parts,
                              .dk_parts = a.parts + rows * shape.NH * scan_pieces(shape.V) * shape.K,
                              .ddecay_parts = a.ddecay_parts,
                              .dv = a.dv,
                              .dout = a.dy};
    Conv conv = mamba2_conv(layer, &a);
    Norm norm = layer_norm(layer, P_MAMBA2_NORM, a.rstd);

    linear_backward(a.dy, dout, a.y, &out_proj);
    memset(a.dgated, 0, (size_t)(rows * di) * sizeof(real));
    rmsnorm_backward(a.dgated, a.dy, a.gated, &norm, a.partial);
    silu_gate_backward(a.dy, a.dproj, a.dgated, a.o, a.proj, rows, di, in_proj.N);
    scan_backward(&gradients, &scan, &shape);
    mamba2_steps_backward(layer, &a, &shape);
    for (int i = 0; i < 3; i++) scan_add_heads(layer, kinds[i], a.dheads + i * rows * shape.NH);
    conv_backward(a.dproj + di, a.dxbc, a.proj + di, &conv);
    linear_backward(din, a.dproj, in, &in_proj);
}

static const Mixer mamba2_mixer = {
    .activations = mamba2_activations,
    .forward = mamba2_forward,
    .backward = mamba2_backward,
    .recurrent = true,
};
