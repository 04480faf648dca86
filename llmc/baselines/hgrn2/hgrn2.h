/*
The HGRN2 mixer on the CPU (arXiv 2404.07904): out = residual + Wo RMSNorm(o), the norm over all d channels,
and

    q = silu(Wq in)    f = bound + (1 - bound) sigmoid(Wf in)    k = 1 - f    v = Wi in
    o = the recurrence that decays each channel of K by f, scale dh^-1/2

bound [d] is 0, or with use_lower_bound, as in flash-linear-attention, the sum over layers 1..l of
softmax(lower_bounds [L, d]) over the layers, in a stack HGRN2's: layer 0 may forget everything, the last
nearly nothing.

One table of tensors and one forward function serve a training pass and an extension, as in deltanet.h. A row
of the CPU trainer's mixers.
*/
#pragma once

#include "../shared/scan.h"
#include "params.h"

// clang-format off
// type, name, kept for every layer, elements of a layer; train and extend are 1 or 0
#define HGRN2_ACTS(X) \
    X(real, proj, train, BT * 3 * d)           /* [L,B,T,3d] q, f before their functions, and v */ \
    X(real, q, train, BT * d)                  /* [L,B,T,NH,dh] */ \
    X(real, k, train, BT * d)                  /* [L,B,T,NH,dh] */ \
    X(real, f, train, BT * d)                  /* [L,B,T,NH,dh] */ \
    X(real, o, train, BT * d)                  /* [L,B,T,NH,dh] */ \
    X(real, o_rstd, train, BT)                 /* [L,B,T] */ \
    X(real, y, train, BT * d)                  /* [L,B,T,d] normed o */ \
    X(real, bound, false, d)                   /* [d] of the layer in progress */ \
    X(real, checkpoints, train, train * B * scan_segments(T) * d * dh) /* [L,B,NH,segments,dh,dh] */ \
    X(real, dproj, false, train * BT * 3 * d)  /* [B,T,3d] */ \
    X(real, dout, false, train * BT * d)       /* [B,T,d] gradient of o */ \
    X(real, parts, false, train * 3 * BT * pieces * d) /* [3,B,T,NH,pieces,dh] gradients of q, k, f */ \
    X(real, state, true, extend * B * d * dh)  /* [L,B,NH,dh,dh] */
// clang-format on

typedef struct {
    HGRN2_ACTS(ACTIVATION_FIELD)
} Hgrn2Acts;

static inline void hgrn2_activations(Activations* rows, const Layer* layer, bool train) {
    const Config* config = layer->config;
    const int64_t B = layer->B, T = layer->T;
    int64_t BT = B * T, d = config->hidden_size, dh = config_head_size(config);
    int64_t pieces = scan_pieces(dh), extend = !train;
    HGRN2_ACTS(ACTIVATION_ROW)
}

#undef HGRN2_ACTS

MIXER_ACTS(Hgrn2Acts, hgrn2_acts)

static inline ScanShape hgrn2_shape(const Layer* layer) {
    return scan_shape(layer, config_head_size(layer->config), 3 * layer->config->hidden_size);
}

static inline Scan hgrn2_scan(const Hgrn2Acts* a, int64_t d) {
    Scan r = {.q = a->q,
              .k = a->k,
              .v = a->proj + 2 * d,
              .decay = a->f,
              .checkpoints = a->checkpoints,
              .state = a->state};
    return r;
}

// ----------------------------------------------------------------------------
// lower bounds

// The softmax over the layers of channel c of lower_bounds [L, d].
typedef struct {
    const real* bounds; // [L, d]
    int64_t L, d, c;
    double highest, sum;
} BoundSoftmax;

static inline BoundSoftmax bound_softmax(const Layer* layer, int64_t c) {
    const Param* p = params_find(layer->table, P_HGRN2_LOWER_BOUNDS, 0);
    BoundSoftmax s = {.bounds = layer->params + p->offset,
                      .L = p->shape[0],
                      .d = p->shape[1],
                      .c = c,
                      .highest = -INFINITY,
                      .sum = 0};
    for (int64_t i = 0; i < s.L; i++) { // not fmax: gcc 12.2 for aarch64 cannot compile such a loop
        const double bound = (double)s.bounds[i * s.d + c];
        if (bound > s.highest) s.highest = bound;
    }
    for (int64_t i = 0; i < s.L; i++) s.sum += exp((double)s.bounds[i * s.d + c] - s.highest);
    return s;
}

static inline double bound_part(const BoundSoftmax* s, int64_t i) {
    return exp((double)s->bounds[i * s->d + s->c] - s->highest) / s->sum;
}

// bound [d] of the layer.
static inline void hgrn2_bound(real* bound, const Layer* layer) {
    int64_t d = layer->config->hidden_size;
    for (int64_t c = 0; c < d; c++) {
        double sum = 0;
        if (layer->config->use_lower_bound) {
            const BoundSoftmax s = bound_softmax(layer, c);
            for (int64_t i = 1; i <= layer->number; i++) sum += bound_part(&s, i);
        }
        bound[c] = (real)sum;
    }
}

// Adds to the gradient of lower_bounds, from that of this layer's bound in `partial` [NUM_PIECES, d]. With p
// the softmax: dlower_bounds_i = p_i dbound ([1 <= i <= l] - bound).
static inline void hgrn2_bound_backward(const Layer* layer, const real* bound, const real* partial) {
    int64_t d = layer->config->hidden_size;
    real* dbounds = layer->grads + params_find(layer->table, P_HGRN2_LOWER_BOUNDS, 0)->offset;
    for (int64_t c = 0; c < d; c++) {
        const BoundSoftmax s = bound_softmax(layer, c);
        double dbound = 0;
        for (int64_t piece = 0; piece < NUM_PIECES; piece++) dbound += (double)partial[piece * d + c];
        for (int64_t i = 0; i < s.L; i++)
            dbounds[i * d + c] +=
                (real)(bound_part(&s, i) * dbound * ((i >= 1 && i <= layer->number) - (double)bound[c]));
    }
}

// ----------------------------------------------------------------------------
// the mixer

// proj [B,T,3d] -> q, k, f. 1 - f is computed without cancellation.
static inline void hgrn2_heads_forward(const Hgrn2Acts* a, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static) if (rows * d > 8192)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < d; c++) {
            real z = a->proj[i * 3 * d + d + c], range = 1 - a->bound[c];
            a->q[i * d + c] = silu(a->proj[i * 3 * d + c]);
            a->f[i * d + c] = a->bound[c] + range * sigmoid(z);
            a->k[i * d + c] = range * sigmoid(-z);
        }
}

// Writes q's and f's columns of dproj, and partial [NUM_PIECES, d], the gradient of bound in pieces of rows.
static inline void hgrn2_heads_backward(const Hgrn2Acts* a, real* partial, const ScanShape* s) {
    int64_t rows = s->B * s->T, d = s->NH * s->K, pieces = scan_pieces(s->V), n = rows * d * pieces;
    memset(partial, 0, (size_t)(NUM_PIECES * d) * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES; piece++)
        for (int64_t i = rows * piece / NUM_PIECES; i < rows * (piece + 1) / NUM_PIECES; i++) {
            const real* z = a->proj + i * 3 * d;
            real *dq = a->dproj + i * 3 * d, *df = dq + d, *sum = a->dout + i * d; // no longer needed
            for (int64_t h = 0; h < s->NH; h++) {
                int64_t at = h * s->K, part = (i * s->NH + h) * pieces * s->K;
                scan_sum(dq + at, a->parts + part, pieces, s->K);
                scan_sum(sum + at, a->parts + n + part, pieces, s->K);
                scan_sum(df + at, a->parts + 2 * n + part, pieces, s->K);
            }
            for (int64_t c = 0; c < d; c++) {
                real gradient = df[c] - sum[c], open = sigmoid(z[d + c]), shut = sigmoid(-z[d + c]);
                dq[c] *= silu_slope(z[c]);
                df[c] = gradient * (1 - a->bound[c]) * open * shut;
                partial[piece * d + c] += gradient * shut;
            }
        }
}

// Also extends: where the layer has states it starts from them and updates them.
static inline void hgrn2_forward(const Layer* layer, real* out, const real* in, const real* residual) {
    Hgrn2Acts a = hgrn2_acts(layer);
    ScanShape shape = hgrn2_shape(layer);
    int64_t d = layer->config->hidden_size;
    Scan scan = hgrn2_scan(&a, d);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_HGRN2_O_PROJ);
    Norm norm = layer_norm(layer, P_HGRN2_G_NORM, a.o_rstd);

    hgrn2_bound(a.bound, layer);
    linear_forward(a.proj, in, NULL, &in_proj);
    hgrn2_heads_forward(&a, layer->B * layer->T, d);
    scan_forward(a.o, &scan, &shape);
    rmsnorm_forward(a.y, a.o, &norm);
    linear_forward(out, a.y, residual, &o_proj);
}

// Writes din, the gradient of `in`; din first holds the gradient of y.
static inline void hgrn2_backward(const Layer* layer, real* din, const real* dout, const real* in) {
    Hgrn2Acts a = hgrn2_acts(layer);
    ScanShape shape = hgrn2_shape(layer);
    int64_t d = layer->config->hidden_size, n = layer->B * layer->T * d, parts = n * scan_pieces(shape.V);
    Scan scan = hgrn2_scan(&a, d);
    ScanBackward gradients = {.dq_parts = a.parts,
                              .dk_parts = a.parts + parts,
                              .ddecay_parts = a.parts + 2 * parts,
                              .dv = a.dproj + 2 * d,
                              .dout = a.dout};
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_HGRN2_O_PROJ);
    Norm norm = layer_norm(layer, P_HGRN2_G_NORM, a.o_rstd);

    hgrn2_bound(a.bound, layer);
    linear_backward(din, dout, a.y, &o_proj);
    memset(a.dout, 0, (size_t)n * sizeof(real));
    rmsnorm_backward(a.dout, din, a.o, &norm, layer->partial);
    scan_backward(&gradients, &scan, &shape);
    hgrn2_heads_backward(&a, layer->partial, &shape);
    if (layer->config->use_lower_bound) hgrn2_bound_backward(layer, a.bound, layer->partial);
    linear_backward(din, a.dproj, in, &in_proj);
}

static const Mixer hgrn2_mixer = {
    .activations = hgrn2_activations,
    .forward = hgrn2_forward,
    .backward = hgrn2_backward,
    .recurrent = true,
};
