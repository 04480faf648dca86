/*
The mixers of DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464) on the GPU, as deltanet.h has
them on the CPU: out = residual + Wo y, and

    q~, k~, v = silu(conv4(W in)), q = q~ / |q~|, k = k~ / |k~|    one projection, one kernel (conv.cuh)
    beta = sigmoid(Wb in), and the decays from Wa in               numbers a head (gates.cuh)
    o = the recurrence with the delta rule, scale dh^-1/2          delta_rule_*.cuh
    y = RMSNorm(o), times silu(Wg in) where gated                  each head, one weight for all (output_gate.cuh)

A row of the GPU trainer's mixers. Rows of proj have S elements, those of its GEMM, of which the first R are
in use; the gradient of the padding is 0.
*/
#pragma once

#include "../../layers/output_gate.cuh"
#include "delta_rule_backward.cuh"
#include "gates.cuh"
#include "../shared/conv_backward.cuh"
#include "../shared/extend.cuh"
#include "params.h"

// clang-format off
// type, name, kept, elements of a layer; BT: rows (recurrent_rows); gated is 1 or 0, vd = NH dv,
// C = 2 NH dh + vd
#define DELTANET_ACTS(X) \
    X(bf16, proj, UP_TO_QKV, training * BT * S)      /* [L,B,T,S] q, k, v before the conv, gates' logits */ \
    X(bf16, qkv, UP_TO_FUSED, BT * C)                 /* [L,B,T,C] q, k, v as the recurrence reads them */ \
    X(float, beta, UP_TO_QKV, BT * NH)               /* [L,B,T,NH] */ \
    X(float, log_decay, UP_TO_QKV, gated * BT * NH)  /* [L,B,T,NH] */ \
    X(char, saved, UP_TO_FUSED, saved_bytes)          /* [L] of a scan */ \
    X(bf16, o, UP_TO_QKV, BT * vd)                   /* [L,B,T,NH,dv] */ \
    X(float, o_rstd, UP_TO_QKV, BT * NH)             /* [L,B,T,NH] */ \
    X(bf16, y, UP_TO_NONE, training * BT * vd)                  /* [L,B,T,vd] */ \
    X(bf16, dproj, SHARED, backward * BT * S)   /* [B,T,S] */ \
    X(bf16, dqkv, SHARED, backward * BT * C)    /* [B,T,C] */ \
    X(bf16, dy, SHARED, backward * gated * BT * vd) /* [B,T,vd] of y, then of o; ungated: din's memory */ \
    X(float, dbeta, SHARED, backward * BT * NH) /* [B,T,NH] */ \
    X(float, dlog_decay, SHARED, backward * gated * BT * NH) /* [B,T,NH] */ \
    X(bf16, history, KEPT_ALWAYS, inference * CONV_HISTORY * C) /* [L,slots,3,C] the convolution's last inputs */ \
    X(float, state, KEPT_ALWAYS, inference * vd * dh) /* [L,slots,NH,dh,dv] */ \
    X(char, scratch, SHARED, inference * scratch_bytes) /* of a scan; in training the layer's */
// clang-format on

typedef struct {
    DELTANET_ACTS(ACTIVATION_FIELD)
} DeltaNetActs;

// Rows of q, k and v together.
static inline ScanShape deltanet_scan_shape(const Layer* layer) {
    const Config* c = layer->config;
    int64_t dh = config_head_size(c), C = deltanet_channels(c);
    return {.B = layer->B,
            .T = layer->T,
            .NH = (int)c->num_heads,
            .K = (int)dh,
            .V = (int)(config_inner_size(c) / c->num_heads),
            .key_row = C,
            .key_head = dh,
            .value_row = C,
            .scale = (float)(1 / sqrt((double)dh)),
            .doc_start = layer->doc_start,
            .decays = deltanet_is_gated(c)};
}

static inline void deltanet_activations(Activations* rows, const Layer* layer, Recompute recompute) {
    const Config* config = layer->config;
    const int64_t BT = recurrent_rows(layer), dh = config_head_size(config),
                  gated = deltanet_is_gated(config);
    const int64_t vd = config_inner_size(config), C = deltanet_channels(config);
    const int64_t NH = config->num_heads, S = matmul_padded(layer_proj(layer).rows);
    const ScanShape shape = deltanet_scan_shape(layer);
    const int64_t saved_bytes = (int64_t)delta_rule_saved_bytes(&shape);
    const int64_t scratch_bytes = (int64_t)delta_rule_scratch_bytes(&shape, false);
    const int64_t training = !layer->cache, inference = !training, backward = recompute != FORWARD_ONLY;
    DELTANET_ACTS(KEPT_ROW)
}

#undef DELTANET_ACTS

static inline void deltanet_check(const Config* c, int64_t B, int64_t T) {
    (void)B, (void)T;
    if (config_head_size(c) != 128 && deltanet_is_gated(c))
        die("Gated DeltaNet's kernels on the GPU have heads of 128 keys, not %lld: use ./train_fox",
            (long long)config_head_size(c));
    if (config_inner_size(c) / c->num_heads > 256)
        die("Gated DeltaNet's kernels on the GPU have heads of 128 or 256 values, not %lld: use ./train_fox",
            (long long)(config_inner_size(c) / c->num_heads));
    if (config_head_size(c) != 128)
        die("DeltaNet's kernels on the GPU have heads of 128 channels, not %lld: set %snum_heads=%lld",
            (long long)config_head_size(c), config_is_stack(c) ? "deltanet_" : "",
            (long long)ceil_div<int64_t>(c->hidden_size, 128));
}

static inline size_t deltanet_scratch_bytes(const Layer* layer) {
    ScanShape shape = deltanet_scan_shape(layer);
    return delta_rule_scratch_bytes(&shape, !layer->forward_only);
}

// ----------------------------------------------------------------------------
// the mixer

// The heads of o.
static inline HeadShape deltanet_shape(const Layer* layer) {
    int64_t R = layer_proj(layer).rows, NH = layer->config->num_heads;
    int64_t dv = config_inner_size(layer->config) / NH;
    return {.B = layer->B, .T = layer->T, .NH = NH, .dh = dv, .columns = R, .row_stride = matmul_padded(R)};
}

// The output norm, whose weight all heads share, and gate. dproj: NULL in a forward pass
static inline OutputGate deltanet_norm(const Layer* layer, float* rstd, const bf16* proj, bf16* dproj) {
    Norm norm = layer_norm(layer, P_DELTANET_O_NORM, rstd);
    const bool gated = deltanet_is_gated(layer->config);
    const int64_t C = deltanet_channels(layer->config);
    return {.weight = norm.weight,
            .dweight = norm.dweight,
            .rstd = rstd,
            .gate = gated ? proj + C : NULL,
            .dgate = gated && dproj ? dproj + C : NULL,
            .eps = norm.eps,
            .shared = true,
            .silu = gated};
}

// Beta's first column of proj; that of the decays' is NH further on.
static inline int64_t deltanet_beta(const Config* c) {
    return deltanet_channels(c) + (deltanet_is_gated(c) ? config_inner_size(c) : 0);
}

static inline DeltaDecays deltanet_decays(const Layer* layer, const DeltaNetActs& a, const bf16* proj) {
    const Config* c = layer->config;
    const int64_t NH = c->num_heads, column = deltanet_beta(c) + NH;
    return {.rows = layer->B * layer->T,
            .NH = NH,
            .row_stride = matmul_padded(layer_proj(layer).rows),
            .logits = proj + column,
            .A_log = layer_param_fp32(layer, P_DELTANET_A_LOG),
            .dt_bias = layer_param_fp32(layer, P_DELTANET_DT_BIAS),
            .log_decay = a.log_decay,
            .dlogits = a.dproj ? a.dproj + column : NULL,
            .dlog_decay = a.dlog_decay,
            .dA_log = layer_param(layer, layer->grads, P_DELTANET_A_LOG),
            .ddt_bias = layer_param(layer, layer->grads, P_DELTANET_DT_BIAS)};
}

static inline Conv deltanet_conv(const Layer* layer) {
    const int64_t dh = config_head_size(layer->config);
    return {.B = layer->B,
            .T = layer->T,
            .C = deltanet_channels(layer->config),
            .row_stride = matmul_padded(layer_proj(layer).rows),
            .weight = layer_param(layer, layer->weights, P_DELTANET_Q_CONV),
            .dweight = layer_param(layer, layer->grads, P_DELTANET_Q_CONV),
            .dh = dh,
            .normed = 2 * layer->config->num_heads * dh,
            .doc_start = layer->doc_start};
}

// kd: channels of q, and of k. log_decay is NULL where the model has none.
static inline Scan deltanet_scan(const DeltaNetActs& a, int64_t kd, void* scratch) {
    return {.q = a.qkv,
            .k = a.qkv + kd,
            .v = a.qkv + 2 * kd,
            .log_decay = a.log_decay,
            .beta = a.beta,
            .saved = a.saved,
            .scratch = scratch};
}

static inline void deltanet_forward(const Layer* layer, bf16* out, const bf16* in, const bf16* residual) {
    DeltaNetActs a = mixer_acts<DeltaNetActs>(layer);
    HeadShape shape = deltanet_shape(layer);
    ScanShape scan_shape = deltanet_scan_shape(layer);
    int64_t kd = scan_shape.NH * scan_shape.K, rows = layer->B * layer->T;
    Conv conv = deltanet_conv(layer);
    Scan scan = deltanet_scan(a, kd, layer->scratch);
    OutputGate norm = deltanet_norm(layer, a.o_rstd, a.proj, NULL);
    DeltaDecays decays = deltanet_decays(layer, a, a.proj);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);

    linear_forward(a.proj, in, NULL, &in_proj, layer->matmul);
    conv_forward(a.qkv, a.proj, &conv, layer->stream);
    beta_forward(a.beta, a.proj + deltanet_beta(layer->config), rows, shape.NH, shape.row_stride,
                 layer->stream);
    if (a.log_decay) delta_decays_forward(&decays, layer->stream);
    delta_rule_forward(a.o, &scan, &scan_shape, layer->stream);
    output_gate_forward(a.y, a.o, &norm, &shape, layer->stream);
    linear_forward(out, a.y, residual, &o_proj, layer->matmul);
}

// Writes din, the gradient of the mixer's input; without gate din first holds the gradients of y, then of o.
static inline DeferredWeight deltanet_backward(const Layer* layer, bf16* din, const bf16* dout) {
    DeltaNetActs a = mixer_acts<DeltaNetActs>(layer);
    HeadShape shape = deltanet_shape(layer);
    ScanShape scan_shape = deltanet_scan_shape(layer);
    int64_t kd = scan_shape.NH * scan_shape.K, beta = deltanet_beta(layer->config);
    bf16* dy = a.dy ? a.dy : din;
    Conv conv = deltanet_conv(layer);
    Scan scan = deltanet_scan(a, kd, layer->scratch);
    ScanBackward gradients = {.dq = a.dqkv,
                              .dk = a.dqkv + kd,
                              .dv = a.dqkv + 2 * kd,
                              .dlog_decay = a.dlog_decay,
                              .dbeta = a.dbeta,
                              .dout = dy,
                              .recomputes = layer->recompute_qkv};
    OutputGate norm = deltanet_norm(layer, a.o_rstd, a.proj, a.dproj);
    DeltaDecays decays = deltanet_decays(layer, a, a.proj);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);

    linear_backward_input(dy, dout, &o_proj, layer->matmul);
    output_gate_backward(dy, layer->recompute_outputs ? a.y : NULL, dy, a.o, &norm, layer->partial[1], &shape,
                         layer->stream);
    weight_gradient(layer->weight_stream, dout, a.y, &o_proj);
    if (layer->recompute_qkv) conv_forward(a.qkv, a.proj, &conv, layer->stream);
    delta_rule_backward(&gradients, &scan, &scan_shape, layer->stream);
    beta_backward(a.dproj + beta, a.dbeta, a.beta, &shape, shape.row_stride - beta, layer->stream);
    if (a.log_decay) delta_decays_backward(&decays, layer->partial[2].sums, layer->stream);
    conv_backward(a.dproj, a.dqkv, a.proj, &conv, layer->partial[2].sums, layer->stream);
    linear_backward_input(din, a.dproj, &in_proj, layer->matmul);
    return {in_proj, a.dproj};
}

// out = in + mixer(norm(in)) of the rows of an extension
static inline void deltanet_extend(const Layer* layer, Cache* cache, bf16* out, const bf16* in) {
    const ExtendActs* e = &cache->acts;
    DeltaNetActs a = mixer_acts<DeltaNetActs>(layer);
    HeadShape shape = deltanet_shape(layer);
    ScanShape scan_shape = deltanet_scan_shape(layer);
    Conv conv = deltanet_conv(layer);
    Scan scan = deltanet_scan(a, scan_shape.NH * scan_shape.K, a.scratch);
    OutputGate norm = deltanet_norm(layer, a.o_rstd, e->proj, NULL);
    DeltaDecays decays = deltanet_decays(layer, a, e->proj);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);
    MatvecInput normed = extend_normed(layer, e, in, P_MIXER_NORM), y = {.x = e->y};

    linear_rows(e->proj, &normed, NULL, &in_proj, layer->matmul);
    conv_extend(a.qkv, e->proj, a.history, &conv, cache, layer->stream);
    beta_forward(a.beta, e->proj + deltanet_beta(layer->config), layer->T, shape.NH, shape.row_stride,
                 layer->stream);
    if (a.log_decay) delta_decays_forward(&decays, layer->stream);
    scan_extend(a.o, a.state, &scan, &scan_shape, delta_rule_forward, cache, layer->stream);
    output_gate_forward(e->y, a.o, &norm, &shape, layer->stream);
    linear_rows(out, &y, in, &o_proj, layer->matmul);
}

static const Mixer deltanet_mixer = {
    .recurrent = true,
    .check = deltanet_check,
    .activations = deltanet_activations,
    .scratch_bytes = deltanet_scratch_bytes,
    .forward = deltanet_forward,
    .backward = deltanet_backward,
    .extend = deltanet_extend,
};
