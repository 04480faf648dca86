/*
The DeltaNet mixer on the GPU (arXiv 2406.06484), as deltanet.h has it on the CPU: out = residual + Wo
RMSNorm(o), the norm over each head's dh channels with one weight for all heads, and

    q~, k~, v = silu(conv4(W in)), q = q~ / |q~|, k = k~ / |k~|    one projection, one kernel (conv.cuh)
    beta = sigmoid(Wb in)                                          one number a head
    o = the recurrence with the delta rule, scale dh^-1/2          delta_rule_*.cuh

A row of the GPU trainer's mixers. Rows of proj have S elements, those of its GEMM, of which the first R are
in use; the gradient of the padding is 0.
*/
#pragma once

#include "../../layers/output_gate.cuh"
#include "delta_rule_backward.cuh"
#include "../shared/conv_backward.cuh"
#include "../shared/extend.cuh"
#include "params.h"

// clang-format off
// type, name, kept, elements of a layer; BT: rows (recurrent_rows)
#define DELTANET_ACTS(X) \
    X(bf16, proj, UP_TO_QKV, training * BT * S)                 /* [L,B,T,S] q, k, v before the conv, beta's logits */ \
    X(bf16, qkv, UP_TO_FUSED, BT * 3 * d)             /* [L,B,T,3d] q, k, v as the recurrence reads them */ \
    X(float, beta, UP_TO_QKV, BT * NH)               /* [L,B,T,NH] */ \
    X(char, saved, UP_TO_FUSED, saved_bytes)          /* [L] of a scan */ \
    X(bf16, o, UP_TO_QKV, BT * d)                    /* [L,B,T,NH,dh] */ \
    X(float, o_rstd, UP_TO_QKV, BT * NH)             /* [L,B,T,NH] */ \
    X(bf16, y, UP_TO_NONE, training * BT * d)                   /* [L,B,T,d] normed o */ \
    X(bf16, dproj, SHARED, backward * BT * S)   /* [B,T,S] */ \
    X(bf16, dqkv, SHARED, backward * BT * 3 * d) /* [B,T,3d] */ \
    X(float, dbeta, SHARED, backward * BT * NH) /* [B,T,NH] */ \
    X(bf16, history, KEPT_ALWAYS, inference * CONV_HISTORY * 3 * d) /* [L,slots,3,3d] the convolution's last inputs */ \
    X(float, state, KEPT_ALWAYS, inference * d * dh) /* [L,slots,NH,dh,dh] */ \
    X(char, scratch, SHARED, inference * scratch_bytes) /* of a scan; in training the layer's */
// clang-format on

typedef struct {
    DELTANET_ACTS(ACTIVATION_FIELD)
} DeltaNetActs;

// Rows of q, k and v together.
static inline ScanShape deltanet_scan_shape(const Config* c, int64_t B, int64_t T) {
    int64_t d = c->hidden_size, dh = config_head_size(c);
    return {.B = B,
            .T = T,
            .NH = (int)c->num_heads,
            .K = (int)dh,
            .V = (int)dh,
            .key_row = 3 * d,
            .key_head = dh,
            .value_row = 3 * d,
            .scale = (float)(1 / sqrt((double)dh))};
}

static inline void deltanet_activations(Activations* rows, const Layer* layer, Recompute recompute) {
    const Config* config = layer->config;
    const int64_t BT = recurrent_rows(layer), d = config->hidden_size, dh = config_head_size(config);
    const int64_t NH = config->num_heads, S = matmul_padded(layer_proj(layer).rows);
    const ScanShape shape = deltanet_scan_shape(config, layer->B, layer->T);
    const int64_t saved_bytes = (int64_t)delta_rule_saved_bytes(&shape);
    const int64_t scratch_bytes = (int64_t)delta_rule_scratch_bytes(&shape, false);
    const int64_t training = !layer->cache, inference = !training, backward = recompute != FORWARD_ONLY;
    DELTANET_ACTS(KEPT_ROW)
}

#undef DELTANET_ACTS

static inline void deltanet_check(const Config* c, int64_t B, int64_t T) {
    (void)B, (void)T;
    if (config_head_size(c) != 128)
        die("DeltaNet's kernels on the GPU have heads of 128 channels, not %lld: set num_heads=%lld",
            (long long)config_head_size(c), (long long)ceil_div<int64_t>(c->hidden_size, 128));
}

static inline size_t deltanet_scratch_bytes(const Layer* layer) {
    ScanShape shape = deltanet_scan_shape(layer->config, layer->B, layer->T);
    return delta_rule_scratch_bytes(&shape, !layer->forward_only);
}

// ----------------------------------------------------------------------------
// beta

__global__ static void __launch_bounds__(256)
    beta_forward_kernel(float* beta, const bf16* logits, int64_t count, int64_t NH, int64_t row_stride) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) beta[i] = sigmoidf(__bfloat162float(logits[i / NH * row_stride + i % NH]));
}

// beta [rows, NH] from columns of proj
static inline void beta_forward(float* beta, const bf16* logits, int64_t rows, int64_t NH, int64_t row_stride,
                                cudaStream_t stream) {
    Range range("beta", RANGE_FORWARD, stream);
    CUDA_LAUNCH(beta_forward_kernel, (unsigned)ceil_div<int64_t>(rows * NH, 256), 256, stream, beta, logits,
                rows * NH, NH, row_stride);
}

// A thread per row of proj and column behind q, k and v
__global__ static void __launch_bounds__(256)
    beta_backward_kernel(bf16* dlogits, const float* dbeta, const float* beta, int64_t rows, int NH,
                         int columns, int64_t row_stride) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / columns, h = i % columns;
    if (row >= rows) return;
    float gradient = 0;
    if (h < NH) gradient = dbeta[row * NH + h] * beta[row * NH + h] * (1 - beta[row * NH + h]);
    dlogits[row * row_stride + h] = __float2bfloat16(gradient);
}

// Writes beta's columns of dproj, the first NH of `columns` up to the end of a row, and zeros the others.
static inline void beta_backward(bf16* dlogits, const float* dbeta, const float* beta, const HeadShape* s,
                                 int64_t columns, cudaStream_t stream) {
    Range range("beta", RANGE_BACKWARD, stream);
    int64_t rows = s->B * s->T;
    CUDA_LAUNCH(beta_backward_kernel, (unsigned)ceil_div<int64_t>(rows * columns, 256), 256, stream, dlogits,
                dbeta, beta, rows, (int)s->NH, (int)columns, s->row_stride);
}

// ----------------------------------------------------------------------------
// the mixer

static inline HeadShape deltanet_shape(const Layer* layer) {
    int64_t R = layer_proj(layer).rows, NH = layer->config->num_heads, dh = config_head_size(layer->config);
    return {.B = layer->B, .T = layer->T, .NH = NH, .dh = dh, .columns = R, .row_stride = matmul_padded(R)};
}

// The output norm, whose weight all heads share.
static inline OutputGate deltanet_norm(const Layer* layer, float* rstd) {
    Norm norm = layer_norm(layer, P_DELTANET_O_NORM, rstd);
    return {.weight = norm.weight, .dweight = norm.dweight, .rstd = rstd, .eps = norm.eps, .shared = true};
}

static inline Conv deltanet_conv(const Layer* layer) {
    int64_t d = layer->config->hidden_size;
    Conv conv = {};
    conv.B = layer->B;
    conv.T = layer->T;
    conv.C = 3 * d;
    conv.row_stride = matmul_padded(layer_proj(layer).rows);
    conv.weight = layer_param(layer, layer->weights, P_DELTANET_Q_CONV);
    conv.dweight = layer_param(layer, layer->grads, P_DELTANET_Q_CONV);
    conv.dh = config_head_size(layer->config);
    conv.doc_start = layer->doc_start;
    conv.normed = 2 * d;
    return conv;
}

static inline Scan deltanet_scan(const bf16* qkv, const float* beta, int64_t d, void* saved, void* scratch) {
    return {.q = qkv, .k = qkv + d, .v = qkv + 2 * d, .beta = beta, .saved = saved, .scratch = scratch};
}

static inline void deltanet_forward(const Layer* layer, bf16* out, const bf16* in, const bf16* residual) {
    DeltaNetActs a = mixer_acts<DeltaNetActs>(layer);
    HeadShape shape = deltanet_shape(layer);
    ScanShape scan_shape = deltanet_scan_shape(layer->config, layer->B, layer->T);
    scan_shape.doc_start = layer->doc_start;
    int64_t d = layer->config->hidden_size, rows = layer->B * layer->T;
    Conv conv = deltanet_conv(layer);
    Scan scan = deltanet_scan(a.qkv, a.beta, d, a.saved, layer->scratch);
    OutputGate norm = deltanet_norm(layer, a.o_rstd);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);

    linear_forward(a.proj, in, NULL, &in_proj, layer->matmul);
    conv_forward(a.qkv, a.proj, &conv, layer->stream);
    beta_forward(a.beta, a.proj + 3 * d, rows, shape.NH, shape.row_stride, layer->stream);
    delta_rule_forward(a.o, &scan, &scan_shape, layer->stream);
    output_gate_forward(a.y, a.o, &norm, &shape, layer->stream);
    linear_forward(out, a.y, residual, &o_proj, layer->matmul);
}

// Writes din, the gradient of the mixer's input; din first holds the gradients of y, then of o.
static inline DeferredWeight deltanet_backward(const Layer* layer, bf16* din, const bf16* dout) {
    DeltaNetActs a = mixer_acts<DeltaNetActs>(layer);
    HeadShape shape = deltanet_shape(layer);
    ScanShape scan_shape = deltanet_scan_shape(layer->config, layer->B, layer->T);
    scan_shape.doc_start = layer->doc_start;
    int64_t d = layer->config->hidden_size;
    Conv conv = deltanet_conv(layer);
    Scan scan = deltanet_scan(a.qkv, a.beta, d, a.saved, layer->scratch);
    ScanBackward gradients = {.dq = a.dqkv,
                              .dk = a.dqkv + d,
                              .dv = a.dqkv + 2 * d,
                              .dbeta = a.dbeta,
                              .dout = din,
                              .recomputes = layer->recompute_qkv};
    OutputGate norm = deltanet_norm(layer, a.o_rstd);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);

    linear_backward_input(din, dout, &o_proj, layer->matmul);
    output_gate_backward(din, layer->recompute_outputs ? a.y : NULL, din, a.o, &norm, layer->partial[1],
                         &shape, layer->stream);
    weight_gradient(layer->weight_stream, dout, a.y, &o_proj);
    if (layer->recompute_qkv) conv_forward(a.qkv, a.proj, &conv, layer->stream);
    delta_rule_backward(&gradients, &scan, &scan_shape, layer->stream);
    beta_backward(a.dproj + 3 * d, a.dbeta, a.beta, &shape, shape.row_stride - 3 * d, layer->stream);
    conv_backward(a.dproj, a.dqkv, a.proj, &conv, layer->partial[2].sums, layer->stream);
    linear_backward_input(din, a.dproj, &in_proj, layer->matmul);
    return {in_proj, a.dproj};
}

// out = in + mixer(norm(in)) of the rows of an extension
static inline void deltanet_extend(const Layer* layer, Cache* cache, bf16* out, const bf16* in) {
    const ExtendActs* e = &cache->acts;
    DeltaNetActs a = mixer_acts<DeltaNetActs>(layer);
    HeadShape shape = deltanet_shape(layer);
    ScanShape scan_shape = deltanet_scan_shape(layer->config, layer->B, layer->T);
    int64_t d = layer->config->hidden_size;
    Conv conv = deltanet_conv(layer);
    Scan scan = deltanet_scan(a.qkv, a.beta, d, a.saved, a.scratch);
    OutputGate norm = deltanet_norm(layer, a.o_rstd);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_DELTANET_O_PROJ);
    MatvecInput normed = extend_normed(layer, e, in, P_MIXER_NORM), y = {};
    y.x = e->y;

    linear_rows(e->proj, &normed, NULL, &in_proj, layer->matmul);
    conv_extend(a.qkv, e->proj, a.history, &conv, cache, layer->stream);
    beta_forward(a.beta, e->proj + 3 * d, layer->T, shape.NH, shape.row_stride, layer->stream);
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
