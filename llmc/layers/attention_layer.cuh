/*
Attention as a layer of the model: its shape, its projections and its norms, from the parameter table. For the
trainer's passes and those of inference (llmc/inference/cuda/layers.cuh).
*/
#pragma once

#include "layer.cuh"
#include "output_gate.cuh"

static inline HeadShape attention_shape_of(const Layer* layer) {
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

// Describes how q, k and v get from proj to attention, but for the tensors of a pass.
static inline void attention_paths(const Layer* layer, HeadPath paths[3]) {
    const ParamTable* table = layer->table;
    memset(paths, 0, 3 * sizeof paths[0]);
    HeadPath *q = &paths[0], *k = &paths[1], *v = &paths[2];
    q->column = params_column(table, P_Q_PROJ);
    k->column = params_column(table, P_K_PROJ);
    v->column = params_column(table, P_V_PROJ);
    q->shift = -1;
    k->shift = params_column(table, P_K_SHIFT);
    v->shift = params_column(table, P_V_SHIFT);
    q->weight = layer_param(layer, layer->weights, P_Q_NORM);
    q->dweight = layer_param(layer, layer->grads, P_Q_NORM);
    k->weight = layer_param(layer, layer->weights, P_K_NORM);
    k->dweight = layer_param(layer, layer->grads, P_K_NORM);
    q->eps = k->eps = QK_NORM_EPS;
    q->rope = k->rope = layer->config->use_rope;
}

// The columns of a tensor in proj or dproj; NULL where the model has no such tensor, or the pass no dproj.
static inline bf16* proj_column(const Layer* layer, bf16* proj, ParamKind kind) {
    int64_t column = params_column(layer->table, kind);
    return proj && column >= 0 ? proj + column : NULL;
}

static inline OutputGate attention_output_gate(const Layer* layer, float* rstd, bf16* proj, bf16* dproj,
                                               float* delta) {
    const bf16* weight = layer_param(layer, layer->weights, P_OUTPUT_NORM);
    float* dweight = layer_param(layer, layer->grads, P_OUTPUT_NORM);
    bf16 *gate = proj_column(layer, proj, P_OGATE_PROJ), *dgate = proj_column(layer, dproj, P_OGATE_PROJ);
    return {.weight = weight,
            .dweight = dweight,
            .rstd = rstd,
            .gate = gate,
            .dgate = dgate,
            .delta = delta,
            .eps = layer->config->norm_eps};
}
