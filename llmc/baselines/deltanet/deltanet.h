/*
The DeltaNet mixer on the CPU (arXiv 2406.06484): out = residual + Wo RMSNorm(o), the norm over each head's dh
channels with one weight for all heads, and

    q~, k~, v = silu(conv4(W in))                     three matrices and convolutions, one fused projection
    q = q~ / |q~|, k = k~ / |k~|                      each head, |x| = sqrt(sum x^2 + 1e-6)
    beta = sigmoid(Wb in)                             one number a head
    o = the recurrence with the delta rule, scale dh^-1/2

One table of tensors serves a training pass and an extension: tensors that one of them lacks have no elements.
The forward pass is one function for both.

A row of the CPU trainer's mixers.
*/
#pragma once

#include "../shared/conv.h"
#include "params.h"

// clang-format off
// type, name, kept for every layer, elements of a layer; train and extend are 1 or 0
#define DELTANET_ACTS(X) \
    X(real, proj, train, BT * R)               /* [L,B,T,R] W in and Wb in */ \
    X(real, qkv, train, BT * 3 * d)            /* [L,B,T,3d] after convolution and SiLU */ \
    X(real, qk, train, 2 * BT * d)             /* [L,2,B,T,NH,dh] q, then k */ \
    X(real, scales, train, 2 * BT * NH)        /* [L,2,B,T,NH] 1 / |q~|, then 1 / |k~| */ \
    X(real, beta, train, BT * NH)              /* [L,B,T,NH] */ \
    X(real, o, train, BT * d)                  /* [L,B,T,NH,dh] */ \
    X(real, o_rstd, train, BT * NH)            /* [L,B,T,NH] */ \
    X(real, y, train, BT * d)                  /* [L,B,T,d] normed o */ \
    X(real, checkpoints, train, train * B * scan_segments(T) * d * dh) /* [L,B,NH,segments,dh,dh] */ \
    X(real, dproj, false, train * BT * R)      /* [B,T,R] */ \
    X(real, dqkv, false, train * BT * 3 * d)   /* [B,T,3d] */ \
    X(real, dout, false, train * BT * d)       /* [B,T,d] gradient of o */ \
    X(real, dqk_parts, false, train * 2 * BT * pieces * d)  /* [2,B,T,NH,pieces,dh] */ \
    X(real, dbeta_parts, false, train * BT * NH * pieces)   /* [B,T,NH,pieces] */ \
    X(real, partial, false, train * NUM_PIECES * dh) /* pieces of the norm's weight gradient */ \
    X(real, history, true, extend * B * CONV_HISTORY * 3 * d) /* [L,B,3,3d] the convolutions' last inputs */ \
    X(real, state, true, extend * B * d * dh)  /* [L,B,NH,dh,dh] */
// clang-format on

typedef struct {
    DELTANET_ACTS(ACTIVATION_FIELD)
} DeltaNetActs;

static inline void deltanet_activations(Activations* rows, const Layer* layer, bool train) {
    const Config* config = layer->config;
    const int64_t B = layer->B, T = layer->T;
    int64_t BT = B * T, d = config->hidden_size, NH = config->num_heads, dh = config_head_size(config);
    int64_t R = layer_proj(layer).rows, pieces = scan_pieces(dh), extend = !train;
    DELTANET_ACTS(ACTIVATION_ROW)
}

#undef DELTANET_ACTS

static inline DeltaNetActs deltanet_acts(const Layer* layer) {
    DeltaNetActs a;
    activations_layer(layer->mixer, layer->number, &a, sizeof a);
    return a;
}

static inline Conv deltanet_conv(const Layer* layer, const DeltaNetActs* a) {
    Conv conv = {.B = layer->B,
                 .T = layer->T,
                 .C = 3 * layer->config->hidden_size,
                 .row_stride = layer_proj(layer).rows,
                 .weight = layer_param(layer, P_DELTANET_Q_CONV),
                 .dweight = layer_grad(layer, P_DELTANET_Q_CONV),
                 .history = a->history,
                 .doc_start = layer->doc_start};
    return conv;
}

static inline ScanShape deltanet_scan_shape(const Layer* layer) {
    int64_t NH = layer->config->num_heads, dh = config_head_size(layer->config);
    ScanShape s = {.B = layer->B,
                   .T = layer->T,
                   .NH = NH,
                   .K = dh,
                   .V = dh,
                   .key_row = NH * dh,
                   .key_head = dh,
                   .value_row = 3 * NH * dh,
                   .scale = (real)(1 / sqrt((double)dh)),
                   .doc_start = layer->doc_start};
    return s;
}

// d channels; n = B T d.
static inline Scan deltanet_scan(const DeltaNetActs* a, int64_t d, int64_t n) {
    Scan r = {.q = a->qk,
              .k = a->qk + n,
              .v = a->qkv + 2 * d,
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

// qkv [B,T,3d] and proj -> q, k, beta as the recurrence reads them; v it reads in qkv.
static inline void deltanet_heads_forward(const DeltaNetActs* a, const ScanShape* s, int64_t R) {
    int64_t dh = s->K, d = s->NH * dh, rows = s->B * s->T;
#pragma omp parallel for schedule(static) if (rows * d > 8192)
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t h = 0; h < 2 * s->NH; h++) {
            const real* x = a->qkv + i * 3 * d + h * dh;
            int64_t to = (h / s->NH * rows + i) * s->NH + h % s->NH; // q, then k
            real scale = (real)(1 / sqrt((double)dot(x, x, dh) + L2_NORM_EPS));
            a->scales[to] = scale > 0 ? scale : NAN; // where the sum overflows, as norm_forward
            for (int64_t c = 0; c < dh; c++) a->qk[to * dh + c] = x[c] * a->scales[to];
        }
        for (int64_t h = 0; h < s->NH; h++) a->beta[i * s->NH + h] = sigmoid(a->proj[i * R + 3 * d + h]);
    }
}

// Writes q's and k's columns of dqkv and beta's of dproj from the recurrence's gradients. With y = x scale:
// dx = scale (dy - y (y . dy)).
static inline void deltanet_heads_backward(const DeltaNetActs* a, const ScanShape* s, int64_t R) {
    int64_t dh = s->K, d = s->NH * dh, rows = s->B * s->T, pieces = scan_pieces(dh);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t h = 0; h < 2 * s->NH; h++) {
            int64_t from = (h / s->NH * rows + i) * s->NH + h % s->NH;
            real* dx = a->dqkv + i * 3 * d + h * dh;
            const real *y = a->qk + from * dh, *parts = a->dqk_parts + from * pieces * dh;
            scan_sum(dx, parts, pieces, dh);
            real along = dot(y, dx, dh);
            for (int64_t c = 0; c < dh; c++) dx[c] = a->scales[from] * (dx[c] - along * y[c]);
        }
        for (int64_t h = 0; h < s->NH; h++) {
            real beta = a->beta[i * s->NH + h], dbeta;
            scan_sum(&dbeta, a->dbeta_parts + (i * s->NH + h) * pieces, pieces, 1);
            a->dproj[i * R + 3 * d + h] = dbeta * beta * (1 - beta);
        }
    }
}

// Also extends: where the layer has states it starts from them and updates them.
static inline void deltanet_forward(const Layer* layer, real* out, const real* in, const real* residual) {
    DeltaNetActs a = deltanet_acts(layer);
    ScanShape shape = deltanet_scan_shape(layer);
    int64_t d = layer->config->hidden_size;
    Scan scan = deltanet_scan(&a, d, layer->B * layer->T * d);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);
    Conv conv = deltanet_conv(layer, &a);
    Norm norm = deltanet_norm(layer, a.o_rstd);

    linear_forward(a.proj, in, NULL, &in_proj);
    conv_forward(a.qkv, a.proj, &conv);
    deltanet_heads_forward(&a, &shape, in_proj.N);
    scan_forward(a.o, &scan, &shape);
    rmsnorm_forward(a.y, a.o, &norm);
    linear_forward(out, a.y, residual, &o_proj);
}

// Writes din, the gradient of `in`; din first holds the gradient of y.
static inline void deltanet_backward(const Layer* layer, real* din, const real* dout, const real* in) {
    DeltaNetActs a = deltanet_acts(layer);
    ScanShape shape = deltanet_scan_shape(layer);
    int64_t d = layer->config->hidden_size, n = layer->B * layer->T * d, pieces = scan_pieces(shape.V);
    Scan scan = deltanet_scan(&a, d, n);
    ScanBackward gradients = {.dq_parts = a.dqk_parts,
                              .dk_parts = a.dqk_parts + n * pieces,
                              .dbeta_parts = a.dbeta_parts,
                              .dv = a.dqkv + 2 * d,
                              .dout = a.dout};
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);
    Conv conv = deltanet_conv(layer, &a);
    Norm norm = deltanet_norm(layer, a.o_rstd);

    linear_backward(din, dout, a.y, &o_proj);
    memset(a.dout, 0, (size_t)n * sizeof(real));
    rmsnorm_backward(a.dout, din, a.o, &norm, a.partial);
    scan_backward(&gradients, &scan, &shape);
    deltanet_heads_backward(&a, &shape, in_proj.N);
    conv_backward(a.dproj, a.dqkv, a.proj, &conv);
    linear_backward(din, a.dproj, in, &in_proj);
}

static const Mixer deltanet_mixer = {
    .activations = deltanet_activations,
    .forward = deltanet_forward,
    .backward = deltanet_backward,
    .recurrent = true,
};
