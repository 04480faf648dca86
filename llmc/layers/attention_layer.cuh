/*
Attention as a layer of the model: its shape, its projections and its norms, from the parameter table. For the
trainer's passes and those of inference (llmc/inference/cuda/layers.cuh).
*/
#pragma once

#include "layer.cuh"
#include "output_gate.cuh"

// Of the tokens of the rank and all heads: around attention.
static inline HeadShape attention_token_shape(const Layer* layer) {
    int64_t dh = config_head_size(layer->config), R = layer->table->proj.rows, NH = layer->config->num_heads;
    return {.B = layer->B,
            .T = layer->T,
            .NH = NH,
            .dh = dh,
            .columns = R,
            .row_stride = matmul_padded(R),
            .weight_stride = layer->config->qk_norm_share ? 0 : dh,
            .window = layer->config->window_size,
            .doc_start = layer->doc_start};
}

// Of the heads of the rank and all tokens: attention itself. The same, unless ranks share sequences.
static inline HeadShape attention_shape_of(const Layer* layer) {
    HeadShape shape = attention_token_shape(layer);
    if (!layer->heads) return shape;
    shape.T *= layer->heads->group.size;
    shape.NH = layer->heads->o.heads;
    shape.columns = layer->heads->proj.columns;
    shape.row_stride = layer->heads->proj.stride;
    return shape;
}

// The first column of a tensor's heads in head_proj; -1 where the model has none.
static inline int64_t attention_column(const Layer* layer, ParamKind kind) {
    int64_t column = params_column(layer->table, kind);
    return layer->heads && column >= 0 ? head_columns_local(&layer->heads->proj, column) : column;
}

// Describes how q, k and v get from proj to attention, but for the tensors of a pass.
static inline void attention_paths(const Layer* layer, HeadPath paths[3]) {
    const RankHeads* heads = layer->config->qk_norm ? layer->heads : NULL;
    memset(paths, 0, 3 * sizeof paths[0]);
    HeadPath *q = &paths[0], *k = &paths[1], *v = &paths[2];
    q->column = attention_column(layer, P_Q_PROJ);
    k->column = attention_column(layer, P_K_PROJ);
    v->column = attention_column(layer, P_V_PROJ);
    q->shift = -1;
    k->shift = attention_column(layer, P_K_SHIFT);
    v->shift = attention_column(layer, P_V_SHIFT);
    q->weight = layer_param(layer, layer->weights, P_Q_NORM);
    q->dweight = layer_param(layer, layer->grads, P_Q_NORM);
    k->weight = layer_param(layer, layer->weights, P_K_NORM);
    k->dweight = layer_param(layer, layer->grads, P_K_NORM);
    for (int p = 0; p < 2 && heads && !layer->config->qk_norm_share; p++) {
        paths[p].weight = heads->norms[p];
        paths[p].dweight = heads->dnorms[p];
    }
    q->eps = k->eps = QK_NORM_EPS;
    q->rope = k->rope = layer->config->use_rope;
}

// The columns of a tensor in proj or dproj; NULL where the model has no such tensor, or the pass no dproj.
static inline bf16* proj_column(const Layer* layer, bf16* proj, ParamKind kind) {
    int64_t column = params_column(layer->table, kind);
    return proj && column >= 0 ? proj + column : NULL;
}

// The same of head_proj or head_dproj.
static inline bf16* head_proj_column(const Layer* layer, bf16* head_proj, ParamKind kind) {
    int64_t column = attention_column(layer, kind);
    return head_proj && column >= 0 ? head_proj + column : NULL;
}

// The gate's bias of the rank's heads, and its gradient; NULL where the model has no gate.
static inline const float* head_gate_bias(const Layer* layer) {
    const float* all = layer_param_fp32(layer, P_FGATE_BIAS);
    return all && layer->heads ? layer->heads->bias : all;
}
static inline float* head_gate_dbias(const Layer* layer) {
    float* all = layer_param(layer, layer->grads, P_FGATE_BIAS);
    return all && layer->heads ? layer->heads->dbias : all;
}

// The columns of q, k and v in dproj's FP8 tensor, where qkv_backward writes them: it has all of a token's heads.
static inline Fp8Tensor attention_dqkv8(const Layer* layer) {
    return layer->heads ? Fp8Tensor{} : layer_in_proj(layer).fp8.dout;
}

// The columns of the output gate in it.
static inline Fp8Tensor attention_dgate8(const Layer* layer) {
    Fp8Tensor columns = layer_in_proj(layer).fp8.dout;
    if (params_column(layer->table, P_OGATE_PROJ) < 0) return Fp8Tensor{};
    if (columns.data) columns.data += params_column(layer->table, P_OGATE_PROJ);
    return columns;
}

static inline OutputGate attention_output_gate(const Layer* layer, float* rstd, bf16* proj, bf16* dproj,
                                               float* delta) {
    const bf16* weight = layer_weight(layer, P_OUTPUT_NORM);
    float* dweight = layer_gradient(layer, P_OUTPUT_NORM);
    bf16 *gate = proj_column(layer, proj, P_OGATE_PROJ), *dgate = proj_column(layer, dproj, P_OGATE_PROJ);
    return {.weight = weight,
            .dweight = dweight,
            .rstd = rstd,
            .gate = gate,
            .dgate = dgate,
            .delta = delta,
            .eps = layer->config->norm_eps,
            .y8 = layer_linear(layer, P_O_PROJ).fp8.x,
            .dgate8 = attention_dgate8(layer)};
}
