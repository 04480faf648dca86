/*
Attention as a layer of the model: its shape, its projections and its norms, from the parameter table. For the
trainer's passes and those of inference (llmc/inference/cuda/layers.cuh).
*/
#pragma once

#include "../model/gpu_acts.h"
#include "layer.cuh"
#include "output_gate.cuh"

// Shape of all heads over the layer's tokens
static inline HeadShape attention_shape_of(const Layer* layer) {
    HeadShape shape = gpu_head_shape(layer->config, layer_proj(layer).rows, layer->B, layer->T);
    shape.doc_start = layer->doc_start;
    return shape;
}

// Sets which of shift, QK norm and RoPE q, k and v have between proj and attention; the caller sets the
// pass's tensors.
static inline void attention_paths(const Layer* layer, HeadPath paths[3]) {
    memset(paths, 0, 3 * sizeof paths[0]);
    HeadPath *q = &paths[0], *k = &paths[1], *v = &paths[2];
    q->column = params_column(layer->table, P_Q_PROJ, layer->l);
    k->column = params_column(layer->table, P_K_PROJ, layer->l);
    v->column = params_column(layer->table, P_V_PROJ, layer->l);
    q->shift = -1;
    k->shift = params_column(layer->table, P_K_SHIFT, layer->l);
    v->shift = params_column(layer->table, P_V_SHIFT, layer->l);
    q->weight = layer_param(layer, layer->weights, P_Q_NORM);
    q->dweight = layer_param(layer, layer->grads, P_Q_NORM);
    k->weight = layer_param(layer, layer->weights, P_K_NORM);
    k->dweight = layer_param(layer, layer->grads, P_K_NORM);
    q->eps = k->eps = QK_NORM_EPS;
    q->rope = k->rope = layer->config->use_rope;
}

// Does the layer compute cum_logf and bounds? Without gates they depend on documents and the window alone:
// the first layer's serve all layers, but in a stack, whose windows may differ.
static inline bool attention_computes_bounds(const Layer* layer) {
    return layer->number == 0 || config_has_gate(layer->config) || config_is_stack(layer->config);
}

// A tensor's first column in proj or dproj; NULL where the model has no such tensor, or the pass no dproj.
static inline bf16* proj_column(const Layer* layer, bf16* proj, ParamKind kind) {
    int64_t column = params_column(layer->table, kind, layer->l);
    return proj && column >= 0 ? proj + column : NULL;
}

// The output gate's columns in dproj's FP8 tensor
static inline Fp8Tensor attention_dgate8(const Layer* layer) {
    Fp8Tensor columns = layer_in_proj(layer).fp8.dout;
    if (params_column(layer->table, P_OGATE_PROJ, layer->l) < 0) return Fp8Tensor{};
    if (columns.data) columns.data += params_column(layer->table, P_OGATE_PROJ, layer->l);
    return columns;
}

static inline OutputGate attention_output_gate(const Layer* layer, float* rstd, bf16* proj, bf16* dproj,
                                               float* delta) {
    return {.weight = layer_param(layer, layer->weights, P_OUTPUT_NORM),
            .dweight = layer_param(layer, layer->grads, P_OUTPUT_NORM),
            .rstd = rstd,
            .gate = proj_column(layer, proj, P_OGATE_PROJ),
            .dgate = proj_column(layer, dproj, P_OGATE_PROJ),
            .delta = delta,
            .eps = layer->config->norm_eps,
            .y8 = layer_linear(layer, P_O_PROJ).fp8.x,
            .dgate8 = attention_dgate8(layer)};
}

// ----------------------------------------------------------------------------
// the heads' part: what is computed per head over whole sequences, or over the span of a halo
// (llmc/sequence/halo.cuh): shift, QK norm, RoPE, gate, bounds, attention

// Some heads of the layer and their weights: all, or with shared sequences the rank's
typedef struct {
    HeadShape shape;          // row_stride is that of the heads' rows of proj
    HeadPath paths[3];        // q, k and v, without the pass's tensors
    int64_t gate;             // column of the forget gate's logits in proj; -1: there are none
    const float* gate_bias;   // [NH]; NULL: no gate
    float* gate_dbias;        // its gradient
    unsigned long long* kept; // [NH] as Pruning's head_kept
    HeadPart part;            // as Pruning's
    Fp8Tensor dqkv8;          // as qkv_backward's
    SideStream* gate_stream;  // the gate's gradient beside that of q, k, v; NULL: the main stream
} AttentionHeads;

// All heads of the layer
static inline AttentionHeads attention_heads(const Layer* layer) {
    AttentionHeads heads = {.shape = attention_shape_of(layer),
                            .gate = params_column(layer->table, P_FGATE_PROJ, layer->l),
                            .gate_bias = layer_param_fp32(layer, P_FGATE_BIAS),
                            .gate_dbias = layer_param(layer, layer->grads, P_FGATE_BIAS),
                            .dqkv8 = layer_in_proj(layer).fp8.dout,
                            .gate_stream = &layer->weight_stream->side};
    attention_paths(layer, heads.paths);
    return heads;
}

// The trainer's functions of the heads' part (train_fox.cu)
typedef struct {
    size_t (*scratch_bytes)(const Layer*);        // of all heads over the layer's tokens
    void (*init)(const Layer*, const HeadShape*); // once after their allocation
    // o [B,T,NH,dh] from proj, the heads' rows of the fused projection
    void (*forward)(const Layer*, const AttentionHeads*, bf16* o, const bf16* proj);
    // dproj from dout, the gradient of o; o is read where delta is NULL
    void (*backward)(const Layer*, const AttentionHeads*, bf16* dproj, const bf16* proj, const bf16* dout,
                     const bf16* o, const float* delta);
} AttentionFunctions;
