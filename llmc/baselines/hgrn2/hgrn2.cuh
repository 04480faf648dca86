/*
The HGRN2 mixer on the GPU (arXiv 2404.07904), as hgrn2.h has it on the CPU: out = residual + Wo RMSNorm(o),
the norm over all d channels, and

    q~, f~, v = W in                                               one projection
    o = the scan with a decay per channel, scale dh^-1/2           gla.cuh, from rows of proj
    bound [d] = 0, or with use_lower_bound the sum over layers 1..l of the softmax over layers of
                lower_bounds [L, d]

lower_bounds is read in fp32; the backward passes of all layers add to its gradient.

A row of the GPU trainer's mixers.
*/
#pragma once

#include "gla.cuh"
#include "gla_step.cuh"
#include "../shared/extend.cuh"
#include "params.h"

// clang-format off
// type, name, kept, elements of a layer; BT: rows (recurrent_rows)
#define HGRN2_ACTS(X) \
    X(bf16, proj, UP_TO_QKV, training * BT * 3 * d)             /* [L,B,T,3d] q and f before their functions, and v */ \
    X(char, saved, UP_TO_FUSED, saved_bytes)          /* [L] of a scan */ \
    X(bf16, o, UP_TO_QKV, BT * d)                    /* [L,B,T,NH,dh] */ \
    X(float, o_rstd, UP_TO_QKV, BT)                  /* [L,B,T] */ \
    X(bf16, y, UP_TO_NONE, training * BT * d)                   /* [L,B,T,d] normed o */ \
    X(float, bound, SHARED, bounded * d)        /* [d] of the layer in progress */ \
    X(bf16, dproj, SHARED, backward * BT * 3 * d)   /* [B,T,3d] */ \
    X(float, dbound, SHARED, backward * bounded * d) /* [d] */ \
    X(float, state, KEPT_ALWAYS, inference * d * dh) /* [L,slots,NH,dh,dh] */ \
    X(char, scratch, SHARED, inference * scratch_bytes) /* of a scan; in training the layer's */
// clang-format on

typedef struct {
    HGRN2_ACTS(ACTIVATION_FIELD)
} Hgrn2Acts;

static inline GlaShape hgrn2_shape(const Config* c, int64_t B, int64_t T) {
    return {B, T, c->num_heads, 3 * c->hidden_size, (float)(1 / sqrt((double)config_head_size(c)))};
}

static inline void hgrn2_activations(Activations* rows, const Layer* layer, Recompute recompute) {
    const Config* config = layer->config;
    const int64_t BT = recurrent_rows(layer), d = config->hidden_size, dh = config_head_size(config);
    const GlaShape shape = hgrn2_shape(config, layer->B, layer->T);
    const int64_t saved_bytes = (int64_t)gla_saved_bytes(&shape);
    const int64_t scratch_bytes = (int64_t)gla_scratch_bytes(&shape, false);
    const int64_t training = !layer->cache, inference = !training, backward = recompute != FORWARD_ONLY;
    const int64_t bounded = config->use_lower_bound;
    HGRN2_ACTS(KEPT_ROW)
}

#undef HGRN2_ACTS

static inline void hgrn2_check(const Config* c, int64_t B, int64_t T) {
    (void)T;
    if (config_head_size(c) != GLA_HEAD)
        die("HGRN2's kernels on the GPU have heads of %d channels, not %lld: set %snum_heads=%lld", GLA_HEAD,
            (long long)config_head_size(c), config_is_stack(c) ? "hgrn2_" : "",
            (long long)ceil_div<int64_t>(c->hidden_size, GLA_HEAD));
    if (B * c->num_heads > UINT16_MAX) // gridDim.y
        die("HGRN2's kernels on the GPU take at most %d heads of all sequences of a micro-batch, not %lld: "
            "lower --micro-batch",
            UINT16_MAX, (long long)(B * c->num_heads));
}

static inline size_t hgrn2_scratch_bytes(const Layer* layer) {
    GlaShape shape = hgrn2_shape(layer->config, layer->B, layer->T);
    return gla_scratch_bytes(&shape, !layer->forward_only);
}

// ----------------------------------------------------------------------------
// lower bounds

// A thread per channel of lower_bounds [L, d]. dbounds NULL: writes bound. Else adds to dbounds [L, d]: with
// p the softmax, dbounds_i += p_i dbound ([1 <= i <= l] - bound).
__global__ static void __launch_bounds__(128)
    hgrn2_bound_kernel(float* bound, float* dbounds, const float* dbound, const float* bounds, int d,
                       int2 layers) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x), l = layers.x, L = layers.y;
    if (c >= d) return;
    float highest = -INFINITY, sum = 0, below = 0;
    for (int i = 0; i < L; i++) highest = fmaxf(highest, bounds[i * d + c]);
    for (int i = 0; i < L; i++) {
        float part = expf(bounds[i * d + c] - highest);
        sum += part;
        below += i >= 1 && i <= l ? part : 0;
    }
    below /= sum;
    if (!dbounds) bound[c] = below;
    for (int i = 0; dbounds && i < L; i++)
        dbounds[i * d + c] +=
            expf(bounds[i * d + c] - highest) / sum * dbound[c] * ((i >= 1 && i <= l) - below);
}

// bound [d] of the layer, unless that is NULL; with dbounds its gradient
static inline void hgrn2_bound(const Layer* layer, float* bound, float* dbounds, const float* dbound) {
    if (!bound) return;
    Range range("scan", dbounds ? RANGE_BACKWARD : RANGE_FORWARD, layer->stream);
    const Param* p = params_find(layer->table, P_HGRN2_LOWER_BOUNDS, 0);
    int d = (int)layer->config->hidden_size;
    CUDA_LAUNCH(hgrn2_bound_kernel, ceil_div(d, 128), 128, layer->stream, bound, dbounds, dbound,
                layer->weights_fp32 + p->fp32, d, make_int2((int)layer->number, (int)p->shape[0]));
}

// ----------------------------------------------------------------------------
// the mixer

static inline Gla hgrn2_gla(const bf16* proj, const float* bound, int64_t d, void* saved, void* scratch) {
    return {.q = proj, .f = proj + d, .v = proj + 2 * d, .bound = bound, .saved = saved, .scratch = scratch};
}

static inline void hgrn2_forward(const Layer* layer, bf16* out, const bf16* in, const bf16* residual) {
    Hgrn2Acts a = mixer_acts<Hgrn2Acts>(layer);
    GlaShape shape = hgrn2_shape(layer->config, layer->B, layer->T);
    Gla gla = hgrn2_gla(a.proj, a.bound, layer->config->hidden_size, a.saved, layer->scratch);
    gla.doc_start = layer->doc_start;
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_HGRN2_O_PROJ);
    Norm norm = layer_norm(layer, P_HGRN2_G_NORM, a.o_rstd);

    hgrn2_bound(layer, a.bound, NULL, NULL);
    linear_forward(a.proj, in, NULL, &in_proj, layer->matmul);
    gla_forward(a.o, &gla, &shape, layer->stream);
    rmsnorm_forward(a.y, a.o, &norm, layer->stream);
    linear_forward(out, a.y, residual, &o_proj, layer->matmul);
}

// Writes din, the gradient of the mixer's input; din first holds the gradients of y, then of o.
static inline DeferredWeight hgrn2_backward(const Layer* layer, bf16* din, const bf16* dout) {
    Hgrn2Acts a = mixer_acts<Hgrn2Acts>(layer);
    GlaShape shape = hgrn2_shape(layer->config, layer->B, layer->T);
    int64_t d = layer->config->hidden_size;
    Gla gla = hgrn2_gla(a.proj, a.bound, d, a.saved, layer->scratch);
    gla.doc_start = layer->doc_start;
    GlaBackward gradients = {.dq = a.dproj,
                             .df = a.dproj + d,
                             .dv = a.dproj + 2 * d,
                             .dbound = a.dbound,
                             .dout = din,
                             .recomputes = layer->recompute_qkv};
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_HGRN2_O_PROJ);
    Norm norm = layer_norm(layer, P_HGRN2_G_NORM, a.o_rstd);

    hgrn2_bound(layer, a.bound, NULL, NULL);
    linear_backward_input(din, dout, &o_proj, layer->matmul);
    rmsnorm_backward(din, layer->recompute_outputs ? a.y : NULL, din, a.o, false, &norm, layer->partial[1],
                     layer->stream);
    weight_gradient(layer->weight_stream, dout, a.y, &o_proj);
    gla_backward(&gradients, &gla, &shape, layer->stream);
    if (a.bound)
        hgrn2_bound(layer, a.bound, layer->grads + params_find(layer->table, P_HGRN2_LOWER_BOUNDS, 0)->offset,
                    a.dbound);
    linear_backward_input(din, a.dproj, &in_proj, layer->matmul);
    return {in_proj, a.dproj};
}

// out = in + mixer(norm(in)) of the rows of an extension
static inline void hgrn2_extend(const Layer* layer, Cache* cache, bf16* out, const bf16* in) {
    const ExtendActs* e = &cache->acts;
    const PassArrays* pass = &cache->device.pass;
    Hgrn2Acts a = mixer_acts<Hgrn2Acts>(layer);
    int64_t d = layer->config->hidden_size, dh = config_head_size(layer->config);
    GlaShape shape = hgrn2_shape(layer->config, 1, layer->T);
    Norm norm = layer_norm(layer, P_HGRN2_G_NORM, a.o_rstd);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_HGRN2_O_PROJ);
    MatvecInput normed = extend_normed(layer, e, in, P_MIXER_NORM), y = {.x = e->y};

    hgrn2_bound(layer, a.bound, NULL, NULL);
    linear_rows(e->proj, &normed, NULL, &in_proj, layer->matmul);
    int steps = for_long_sequences(cache, [&](const PassRows* sequence) {
        int64_t begin = sequence->begin;
        Gla gla = hgrn2_gla(e->proj + begin * 3 * d, a.bound, d, a.saved, a.scratch);
        GlaShape one = shape;
        one.T = sequence->end - begin;
        gla.state = slot_state(a.state, d * dh, sequence, layer->stream);
        gla_forward(a.o + begin * d, &gla, &one, layer->stream);
    });
    GlaStep step = {.q = e->proj,
                    .f = e->proj + d,
                    .v = e->proj + 2 * d,
                    .bound = a.bound,
                    .states = a.state,
                    .row_stride = 3 * d,
                    .NH = (int)shape.NH,
                    .scale = shape.scale};
    gla_step(a.o, &step, pass->sequences, steps ? pass->num_sequences : 0, layer->stream);
    rmsnorm_forward(e->y, a.o, &norm, layer->stream);
    linear_rows(out, &y, in, &o_proj, layer->matmul);
}

static const Mixer hgrn2_mixer = {
    .recurrent = true,
    .check = hgrn2_check,
    .activations = hgrn2_activations,
    .scratch_bytes = hgrn2_scratch_bytes,
    .forward = hgrn2_forward,
    .backward = hgrn2_backward,
    .extend = hgrn2_extend,
};
