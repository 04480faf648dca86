/*
The mixers of DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464) on the CPU:
out = residual + Wo y, and

    q~, k~, v = silu(conv4(W in))                     three matrices and convolutions, one fused projection
    q = q~ / |q~|, k = k~ / |k~|                      each head, |x| = sqrt(sum x^2 + 1e-6)
    beta = sigmoid(Wb in)                             one number a head
    o = the recurrence with the delta rule, scale dh^-1/2
    y = RMSNorm(o)                                    each head, one weight for all

Gated DeltaNet's heads have dh channels of keys and dv of values, and

    alpha = exp(-softplus(Wa in + dt_bias) e^A_log)   decay of the recurrence, one number a head
    y = RMSNorm(o) silu(Wg in)

One table of tensors serves a training pass and an extension: tensors that one of them lacks have no elements.
The forward pass is one function for both.

A row of the CPU trainer's mixers.
*/
#pragma once

#include "../shared/conv.h"
#include "../shared/silu_gate.h"
#include "params.h"

// clang-format off
// type, name, kept for every layer, elements of a layer; train, gated and extend are 1 or 0; kd = NH dh,
// vd = NH dv, C = 2 kd + vd
#define DELTANET_ACTS(X) \
    X(real, proj, train, BT * R)               /* [L,B,T,R] W in, Wg in, Wb in and Wa in */ \
    X(real, qkv, train, BT * C)                /* [L,B,T,C] after convolution and SiLU */ \
    X(real, qk, train, 2 * BT * kd)            /* [L,2,B,T,NH,dh] q, then k */ \
    X(real, scales, train, 2 * BT * NH)        /* [L,2,B,T,NH] 1 / |q~|, then 1 / |k~| */ \
    X(real, beta, train, BT * NH)              /* [L,B,T,NH] */ \
    X(real, decay, train, gated * BT * NH)     /* [L,B,T,NH] alpha */ \
    X(real, o, train, BT * vd)                 /* [L,B,T,NH,dv] */ \
    X(real, o_rstd, train, BT * NH)            /* [L,B,T,NH] */ \
    X(real, normed, train, gated * BT * vd)    /* [L,B,T,vd] normed o, which without gate is y */ \
    X(real, y, train, BT * vd)                 /* [L,B,T,vd] */ \
    X(real, checkpoints, train, train * B * scan_segments(T) * vd * dh) /* [L,B,NH,segments,dh,dv] */ \
    X(real, dproj, false, train * BT * R)      /* [B,T,R] */ \
    X(real, dqkv, false, train * BT * C)       /* [B,T,C] */ \
    X(real, dy, false, train * BT * vd)        /* [B,T,vd] gradient of y, then of the normed o */ \
    X(real, dout, false, train * BT * vd)      /* [B,T,vd] gradient of o */ \
    X(real, dqk_parts, false, train * 2 * BT * pieces * kd) /* [2,B,T,NH,pieces,dh] */ \
    X(real, dbeta_parts, false, train * BT * NH * pieces)   /* [B,T,NH,pieces] */ \
    X(real, ddecay_parts, false, train * gated * BT * NH * pieces) /* [B,T,NH,pieces] */ \
    X(real, dheads, false, train * gated * 2 * BT * NH) /* [2,B,T,NH] terms of the gradients of A_log, dt_bias */ \
    X(real, partial, false, train * NUM_PIECES * vd / NH) /* pieces of the norm's weight gradient */ \
    X(real, history, true, extend * B * CONV_HISTORY * C) /* [L,B,3,C] the convolutions' last inputs */ \
    X(real, state, true, extend * B * vd * dh) /* [L,B,NH,dh,dv] */
// clang-format on

typedef struct {
    DELTANET_ACTS(ACTIVATION_FIELD)
} DeltaNetActs;

static inline void deltanet_activations(Activations* rows, const Layer* layer, bool train) {
    const Config* config = layer->config;
    const int64_t B = layer->B, T = layer->T;
    int64_t BT = B * T, NH = config->num_heads, dh = config_head_size(config), kd = NH * dh;
    int64_t vd = config_inner_size(config), C = deltanet_channels(config), R = layer_proj(layer).rows;
    int64_t pieces = scan_pieces(vd / NH), extend = !train, gated = deltanet_is_gated(config);
    DELTANET_ACTS(ACTIVATION_ROW)
}

#undef DELTANET_ACTS

MIXER_ACTS(DeltaNetActs, deltanet_acts)

static inline ScanShape deltanet_scan_shape(const Layer* layer) {
    return scan_shape(layer, deltanet_is_gated(layer->config), deltanet_channels(layer->config));
}

static inline Scan deltanet_scan(const DeltaNetActs* a, const ScanShape* s) {
    Scan r = {.q = a->qk,
              .k = a->qk + s->B * s->T * s->key_row,
              .v = a->qkv + 2 * s->key_row,
              .decay = a->decay,
              .beta = a->beta,
              .checkpoints = a->checkpoints,
              .state = a->state};
    return r;
}

// RMSNorm of o: a row is a head of a token.
static inline Norm deltanet_norm(const Layer* layer, real* rstd) {
    Norm norm = layer_norm(layer, P_DELTANET_O_NORM, rstd);
    norm.rows *= layer->config->num_heads;
    return norm;
}

// What the functions for each head read of the layer.
typedef struct {
    ScanShape s;
    int64_t R, C;                // of a row of proj: elements, and columns before the output gate's
    int64_t beta, steps;         // columns of Wb in and Wa in
    const real *A_log, *dt_bias; // NULL without decay
} DeltaNetHeads;

static inline DeltaNetHeads deltanet_heads(const Layer* layer) {
    const ScanShape s = deltanet_scan_shape(layer);
    DeltaNetHeads h = {.s = s,
                       .R = layer_proj(layer).rows,
                       .C = s.value_row,
                       .beta = s.value_row + s.decay_width * s.NH * s.V,
                       .A_log = layer_param(layer, P_DELTANET_A_LOG),
                       .dt_bias = layer_param(layer, P_DELTANET_DT_BIAS)};
    h.steps = h.beta + s.NH;
    return h;
}

// qkv [B,T,C] and proj -> q, k, beta and the decay as the recurrence reads them; v it reads in qkv.
static inline void deltanet_heads_forward(const DeltaNetActs* a, const DeltaNetHeads* p) {
    const ScanShape* s = &p->s;
    int64_t dh = s->K, rows = s->B * s->T;
#pragma omp parallel for schedule(static) if (rows * s->key_row > 8192)
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t h = 0; h < 2 * s->NH; h++) {
            const real* x = a->qkv + i * p->C + h * dh;
            int64_t to = (h / s->NH * rows + i) * s->NH + h % s->NH; // q, then k
            real scale = (real)(1 / sqrt((double)dot(x, x, dh) + L2_NORM_EPS));
            a->scales[to] = scale > 0 ? scale : NAN; // where the sum overflows, as norm_forward
            for (int64_t c = 0; c < dh; c++) a->qk[to * dh + c] = x[c] * a->scales[to];
        }
        for (int64_t h = 0; h < s->NH; h++) {
            a->beta[i * s->NH + h] = sigmoid(a->proj[i * p->R + p->beta + h]);
            if (!a->decay) continue;
            real step = -log_sigmoid(-(a->proj[i * p->R + p->steps + h] + p->dt_bias[h])); // softplus
            a->decay[i * s->NH + h] = exp_real(-step * exp_real(p->A_log[h]));
        }
    }
}

// Writes a step's column of dproj, and the terms of the gradients of A_log and dt_bias.
static inline void deltanet_steps_backward(const DeltaNetActs* a, const DeltaNetHeads* p, int64_t i,
                                           int64_t h) {
    const ScanShape* s = &p->s;
    int64_t at = i * s->NH + h, pieces = scan_pieces(s->V);
    real logit = a->proj[i * p->R + p->steps + h] + p->dt_bias[h], rate = exp_real(p->A_log[h]), ddecay;
    scan_sum(&ddecay, a->ddecay_parts + at * pieces, pieces, 1);
    real dexponent = ddecay * a->decay[at]; // of -step rate
    real dlogit = -dexponent * rate * sigmoid(logit);
    a->dproj[i * p->R + p->steps + h] = dlogit;
    a->dheads[at] = dexponent * log_sigmoid(-logit) * rate;
    a->dheads[s->B * s->T * s->NH + at] = dlogit;
}

// Writes q's and k's columns of dqkv and beta's and the steps' of dproj from the recurrence's gradients. With
// y = x scale: dx = scale (dy - y (y . dy)).
static inline void deltanet_heads_backward(const DeltaNetActs* a, const DeltaNetHeads* p) {
    const ScanShape* s = &p->s;
    int64_t dh = s->K, rows = s->B * s->T, pieces = scan_pieces(s->V);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t h = 0; h < 2 * s->NH; h++) {
            int64_t from = (h / s->NH * rows + i) * s->NH + h % s->NH;
            real* dx = a->dqkv + i * p->C + h * dh;
            const real *y = a->qk + from * dh, *parts = a->dqk_parts + from * pieces * dh;
            scan_sum(dx, parts, pieces, dh);
            real along = dot(y, dx, dh);
            for (int64_t c = 0; c < dh; c++) dx[c] = a->scales[from] * (dx[c] - along * y[c]);
        }
        for (int64_t h = 0; h < s->NH; h++) {
            real beta = a->beta[i * s->NH + h], dbeta;
            scan_sum(&dbeta, a->dbeta_parts + (i * s->NH + h) * pieces, pieces, 1);
            a->dproj[i * p->R + p->beta + h] = dbeta * beta * (1 - beta);
            if (a->decay) deltanet_steps_backward(a, p, i, h);
        }
    }
}

// Also extends: where the layer has states it starts from them and updates them.
static inline void deltanet_forward(const Layer* layer, real* out, const real* in, const real* residual) {
    DeltaNetActs a = deltanet_acts(layer);
    const DeltaNetHeads heads = deltanet_heads(layer);
    int64_t rows = layer->B * layer->T, values = heads.s.NH * heads.s.V;
    Scan scan = deltanet_scan(&a, &heads.s);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);
    Conv conv = conv_layer(layer, heads.C, P_DELTANET_Q_CONV, a.history);
    Norm norm = deltanet_norm(layer, a.o_rstd);

    linear_forward(a.proj, in, NULL, &in_proj);
    conv_forward(a.qkv, a.proj, &conv);
    deltanet_heads_forward(&a, &heads);
    scan_forward(a.o, &scan, &heads.s);
    rmsnorm_forward(a.normed ? a.normed : a.y, a.o, &norm);
    if (a.normed) silu_gate_forward(a.y, a.normed, a.proj + heads.C, rows, values, heads.R);
    linear_forward(out, a.y, residual, &o_proj);
}

// Writes din, the gradient of `in`.
static inline void deltanet_backward(const Layer* layer, real* din, const real* dout, const real* in) {
    DeltaNetActs a = deltanet_acts(layer);
    const DeltaNetHeads heads = deltanet_heads(layer);
    const ScanShape* shape = &heads.s;
    int64_t rows = layer->B * layer->T, values = shape->NH * shape->V;
    Scan scan = deltanet_scan(&a, shape);
    ScanBackward gradients = {.dq_parts = a.dqk_parts,
                              .dk_parts = a.dqk_parts + rows * shape->key_row * scan_pieces(shape->V),
                              .ddecay_parts = a.ddecay_parts,
                              .dbeta_parts = a.dbeta_parts,
                              .dv = a.dqkv + 2 * shape->key_row,
                              .dout = a.dout};
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);
    Conv conv = conv_layer(layer, heads.C, P_DELTANET_Q_CONV, a.history);
    Norm norm = deltanet_norm(layer, a.o_rstd);

    linear_backward(a.dy, dout, a.y, &o_proj);
    if (a.normed)
        silu_gate_backward(a.dy, a.dproj + heads.C, a.dy, a.normed, a.proj + heads.C, rows, values, heads.R);
    memset(a.dout, 0, (size_t)(rows * values) * sizeof(real));
    rmsnorm_backward(a.dout, a.dy, a.o, &norm, a.partial);
    scan_backward(&gradients, &scan, shape);
    deltanet_heads_backward(&a, &heads);
    for (int i = 0; i < 2 && a.decay; i++)
        scan_add_heads(layer, i ? P_DELTANET_DT_BIAS : P_DELTANET_A_LOG, a.dheads + i * rows * shape->NH);
    conv_backward(a.dproj, a.dqkv, a.proj, &conv);
    linear_backward(din, a.dproj, in, &in_proj);
}

static const Mixer deltanet_mixer = {
    .activations = deltanet_activations,
    .forward = deltanet_forward,
    .backward = deltanet_backward,
    .recurrent = true,
};
