/*
The Mamba-2 mixer on the GPU (arXiv 2405.21060), as mamba2.h has it on the CPU, with one group of B and C: out
= residual + Wo RMSNorm(o silu(z)), the norm over all di = 2 d channels, and

    z, x~, B~, C~, dt = W in                           one projection
    x, B, C = silu(conv4(x~, B~, C~) + bias)           conv.cuh, which multiplies x by the steps
    step = softplus(dt + dt_bias)                      gated_norm.cuh
    o = D x + the recurrence with q = C, k = B, v = step x, log decay -step e^A_log    ssd_*.cuh

x is never stored: v / step is as precise, and D x is (D / step) v. Rows of proj have S elements, those of its
GEMM, of which the first R are in use; the gradient of the padding is 0. A row of the GPU trainer's mixers.
*/
#pragma once

#include "ssd_backward.cuh"
#include "../shared/conv_backward.cuh"
#include "../shared/extend.cuh"
#include "gated_norm.cuh"
#include "params.h"

// clang-format off
// type, name, kept, elements of a layer; BT: rows (recurrent_rows); C = di + 2 N, R = di + C + NH
#define MAMBA2_ACTS(X) \
    X(bf16, proj, UP_TO_QKV, training * BT * S)                 /* [L,B,T,S] z, x~, B~, C~, dt */ \
    X(bf16, vbc, UP_TO_FUSED, BT * C)                 /* [L,B,T,C] v, B, C as the recurrence reads them */ \
    X(float, steps, UP_TO_QKV, BT * NH)              /* [L,B,T,NH] */ \
    X(float, log_decay, UP_TO_QKV, BT * NH)          /* [L,B,T,NH] */ \
    X(float, skip, SHARED, BT * NH)             /* [B,T,NH] D / step */ \
    X(char, saved, UP_TO_FUSED, saved_bytes)          /* [L] of a scan */ \
    X(bf16, o, UP_TO_QKV, BT * di)                   /* [L,B,T,NH,P] */ \
    X(float, rstd, UP_TO_QKV, BT)                    /* [L,B,T] */ \
    X(bf16, y, UP_TO_FUSED, training * BT * di)                  /* [L,B,T,di] */ \
    X(bf16, dproj, SHARED, backward * BT * S)   /* [B,T,S] */ \
    X(bf16, dvbc, SHARED, backward * BT * C)    /* [B,T,C] */ \
    X(bf16, dy, SHARED, backward * BT * di)     /* [B,T,di] gradient of y, then of o */ \
    X(float, dlog_decay, SHARED, backward * BT * NH) /* [B,T,NH] */ \
    X(bf16, history, KEPT_ALWAYS, inference * CONV_HISTORY * C) /* [L,slots,3,C] the convolution's last inputs */ \
    X(float, state, KEPT_ALWAYS, inference * N * di) /* [L,slots,NH,N,P] */ \
    X(char, scratch, SHARED, inference * scratch_bytes) /* of a scan; in training the layer's */
// clang-format on

typedef struct {
    MAMBA2_ACTS(ACTIVATION_FIELD)
} Mamba2Acts;

static inline ScanShape mamba2_scan_shape(const Layer* layer) {
    const Config* c = layer->config;
    int64_t C = config_inner_size(c) + 2 * c->state_size;
    return {.B = layer->B,
            .T = layer->T,
            .NH = (int)c->num_heads,
            .K = (int)c->state_size,
            .V = (int)config_head_size(c),
            .key_row = C,
            .value_row = C,
            .scale = 1};
}

static inline void mamba2_activations(Activations* rows, const Layer* layer, Recompute recompute) {
    const Config* config = layer->config;
    const int64_t BT = recurrent_rows(layer), di = config_inner_size(config), NH = config->num_heads;
    const int64_t N = config->state_size, C = di + 2 * N, S = matmul_padded(layer_proj(layer).rows);
    const ScanShape shape = mamba2_scan_shape(layer);
    const int64_t saved_bytes = (int64_t)ssd_saved_bytes(&shape);
    const int64_t scratch_bytes = (int64_t)ssd_scratch_bytes(&shape, false);
    const int64_t training = !layer->cache, inference = !training, backward = recompute != FORWARD_ONLY;
    MAMBA2_ACTS(KEPT_ROW)
}

#undef MAMBA2_ACTS

static inline void mamba2_check(const Config* c, int64_t B, int64_t T) {
    (void)B, (void)T;
    if (config_head_size(c) != 64 || c->state_size != 128)
        die("Mamba-2's kernels on the GPU have heads of 64 channels and state_size 128, not %lld and %lld",
            (long long)config_head_size(c), (long long)c->state_size);
    if (config_inner_size(c) > GATED_NORM_MOST)
        die("Mamba-2's kernels on the GPU take a hidden_size of at most %d, not %lld", GATED_NORM_MOST / 2,
            (long long)c->hidden_size);
}

static inline size_t mamba2_scratch_bytes(const Layer* layer) {
    ScanShape shape = mamba2_scan_shape(layer);
    return ssd_scratch_bytes(&shape, !layer->forward_only);
}

// ----------------------------------------------------------------------------
// the mixer

// The convolution, with the steps of a pass.
static inline Conv mamba2_conv(const Layer* layer, bf16* proj, const Mamba2Acts& a) {
    const Config* c = layer->config;
    int64_t di = config_inner_size(c), R = layer_proj(layer).rows;
    return {.B = layer->B,
            .T = layer->T,
            .C = di + 2 * c->state_size,
            .row_stride = matmul_padded(R),
            .weight = layer_param(layer, layer->weights, P_MAMBA2_CONV),
            .bias = layer_param(layer, layer->weights, P_MAMBA2_CONV_BIAS),
            .dweight = layer_param(layer, layer->grads, P_MAMBA2_CONV),
            .dbias = layer_param(layer, layer->grads, P_MAMBA2_CONV_BIAS),
            .dh = config_head_size(c),
            .steps = {.NH = c->num_heads,
                      .steps = a.steps,
                      .log_decay = a.log_decay,
                      .skip = a.skip,
                      .dt = proj + R - c->num_heads,
                      .dt_bias = layer_param_fp32(layer, P_MAMBA2_DT_BIAS),
                      .A_log = layer_param_fp32(layer, P_MAMBA2_A_LOG),
                      .D = layer_param_fp32(layer, P_MAMBA2_D),
                      .ddt_bias = layer_param(layer, layer->grads, P_MAMBA2_DT_BIAS),
                      .dA_log = layer_param(layer, layer->grads, P_MAMBA2_A_LOG),
                      .dD = layer_param(layer, layer->grads, P_MAMBA2_D)},
            .doc_start = layer->doc_start};
}

static inline Scan mamba2_scan(const bf16* vbc, const Conv* conv, const ScanShape* s, void* saved,
                               void* scratch) {
    const bf16* B = vbc + s->NH * s->V;
    return {.q = B + s->K,
            .k = B,
            .v = vbc,
            .log_decay = conv->steps.log_decay,
            .skip = conv->steps.skip,
            .saved = saved,
            .scratch = scratch};
}

// Gate and norm over o.
static inline GatedNorm mamba2_gate(const Layer* layer, const bf16* o, const bf16* proj, const Conv* conv,
                                    float* rstd) {
    const Norm norm = layer_norm(layer, P_MAMBA2_NORM, rstd);
    return {.o = o, .z = proj, .row_stride = conv->row_stride, .norm = norm};
}

static inline void mamba2_forward(const Layer* layer, bf16* out, const bf16* in, const bf16* residual) {
    Mamba2Acts a = mixer_acts<Mamba2Acts>(layer);
    ScanShape shape = mamba2_scan_shape(layer);
    Conv conv = mamba2_conv(layer, a.proj, a);
    Scan scan = mamba2_scan(a.vbc, &conv, &shape, a.saved, layer->scratch);
    GatedNorm gate = mamba2_gate(layer, a.o, a.proj, &conv, a.rstd);
    Linear in_proj = layer_in_proj(layer), out_proj = layer_linear(layer, P_MAMBA2_OUT_PROJ);

    linear_forward(a.proj, in, NULL, &in_proj, layer->matmul);
    head_steps_forward(&conv, layer->stream);
    conv_forward(a.vbc, a.proj + gate.norm.d, &conv, layer->stream);
    ssd_forward(a.o, &scan, &shape, layer->stream);
    gated_norm_forward(a.y, &gate, layer->stream);
    linear_forward(out, a.y, residual, &out_proj, layer->matmul);
}

// Writes din, the gradient of the mixer's input.
static inline DeferredWeight mamba2_backward(const Layer* layer, bf16* din, const bf16* dout) {
    Mamba2Acts a = mixer_acts<Mamba2Acts>(layer);
    ScanShape shape = mamba2_scan_shape(layer);
    Conv conv = mamba2_conv(layer, a.proj, a);
    Scan scan = mamba2_scan(a.vbc, &conv, &shape, a.saved, layer->scratch);
    GatedNorm gate = mamba2_gate(layer, a.o, a.proj, &conv, a.rstd);
    Linear in_proj = layer_in_proj(layer), out_proj = layer_linear(layer, P_MAMBA2_OUT_PROJ);
    int64_t di = gate.norm.d, R = layer_proj(layer).rows;
    bf16* dB = a.dvbc + di;
    ScanBackward gradients = {.dq = dB + shape.K,
                              .dk = dB,
                              .dv = a.dvbc,
                              .dlog_decay = a.dlog_decay,
                              .dout = a.dy,
                              .recomputes = layer->recompute_qkv};
    gate.dz = a.dproj;
    gate.end = a.dproj + R;
    gate.padding = conv.row_stride - R;
    conv.steps.ddt = a.dproj + R - shape.NH;
    conv.steps.dlog_decay = a.dlog_decay;
    conv.steps.dout = a.dy;

    linear_backward_input(a.dy, dout, &out_proj, layer->matmul);
    if (layer->recompute_qkv) conv_forward(a.vbc, a.proj + di, &conv, layer->stream);
    gated_norm_backward(a.dy, layer->recompute_qkv ? a.y : NULL, a.dy, &gate, layer->partial[1].sums,
                        layer->stream);
    weight_gradient(layer->weight_stream, dout, a.y, &out_proj);
    ssd_backward(&gradients, &scan, &shape, layer->stream);
    conv_backward(a.dproj + di, a.dvbc, a.proj + di, &conv, layer->partial[1].sums, layer->stream);
    linear_backward_input(din, a.dproj, &in_proj, layer->matmul);
    return {in_proj, a.dproj};
}

// out = in + mixer(norm(in)) of the rows of an extension
static inline void mamba2_extend(const Layer* layer, Cache* cache, bf16* out, const bf16* in) {
    const ExtendActs* e = &cache->acts;
    Mamba2Acts a = mixer_acts<Mamba2Acts>(layer);
    ScanShape shape = mamba2_scan_shape(layer);
    Conv conv = mamba2_conv(layer, e->proj, a);
    Scan scan = mamba2_scan(a.vbc, &conv, &shape, a.saved, a.scratch);
    GatedNorm gate = mamba2_gate(layer, a.o, e->proj, &conv, a.rstd);
    Linear in_proj = layer_in_proj(layer), out_proj = layer_linear(layer, P_MAMBA2_OUT_PROJ);
    MatvecInput normed = extend_normed(layer, e, in, P_MIXER_NORM), y = {.x = e->y};

    linear_rows(e->proj, &normed, NULL, &in_proj, layer->matmul);
    head_steps_forward(&conv, layer->stream);
    conv_extend(a.vbc, e->proj + gate.norm.d, a.history, &conv, cache, layer->stream);
    scan_extend(a.o, a.state, &scan, &shape, ssd_forward, cache, layer->stream);
    gated_norm_forward(e->y, &gate, layer->stream);
    linear_rows(out, &y, in, &out_proj, layer->matmul);
}

static const Mixer mamba2_mixer = {
    .recurrent = true,
    .check = mamba2_check,
    .activations = mamba2_activations,
    .scratch_bytes = mamba2_scratch_bytes,
    .forward = mamba2_forward,
    .backward = mamba2_backward,
    .extend = mamba2_extend,
};
