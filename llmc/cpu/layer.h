/*
The layer context: what a mixer or an MLP of the CPU trainer sees of the model.

A pass over B x T tokens reads weights, adds to gradients and keeps its activations in tables of its own
(llmc/model/activations.h). A pass that extends sequences (llmc/model/extension.h) has B = 1, its rows as
T, and no gradients.

Made by the trainer for each layer; read by its mixers, those in llmc/baselines/, and llmc/inference/cpu.
RMSNorm is here because all of them call it.
*/
#pragma once

#include "../model/activations.h"
#include "../model/documents.h"
#include "../model/extension.h"
#include "../model/params.h"
#include "matmul.h"

enum { NUM_PIECES = 32 }; // that sums over rows are taken in, whatever the number of threads

typedef struct {
    const Config* config; // as this layer's mixer sees it
    const ParamTable* table;
    int64_t l, number, B, T; // number: among the layers of its mixer, whose activations are one table
    const real* params;      // the flat buffers of the parameter table
    real* grads;             // NULL without a backward pass
    const Activations* mixer;
    const Activations* mlp;
    const int32_t* doc_start; // [B,T] of the pass (llmc/model/documents.h); NULL without document_reset
    real* partial;            // scratch [NUM_PIECES * d + 3 B d]: pieces of sums over rows
} Layer;

// What takes a block's normed residual stream back to it: attention or what may take its place, or the MLP.
typedef struct {
    // adds the tensors of a pass over the layer's [B, T] tokens; `train` is false in inference
    void (*activations)(Activations*, const Layer*, bool train);
    void (*init)(const Layer*); // once after their allocation, of its first layer; NULL: nothing to do
    // out = residual + mixer(in)
    void (*forward)(const Layer*, real* out, const real* in, const real* residual);
    // writes din, the gradient of `in`, and adds to the weights' gradients
    void (*backward)(const Layer*, real* din, const real* dout, const real* in);

    // Inference of a mixer. recurrent: in inference its tensors are the states of a slot and scratch of a
    // pass, and `forward` goes on from the states. Else: out = in + mixer(norm(in)) of the rows of the
    // cache's pass.
    bool recurrent;
    void (*extend)(const Layer*, Cache*, real* out, const real* in);
} Mixer;

// Makes the layer's config, l and number those of layer l.
static inline void layer_move(Layer* layer, int64_t l) {
    layer->config = &layer->table->by_layer[l].config;
    layer->l = l;
    layer->number = layer->table->by_layer[l].number;
}

// Layer l of a pass over [B, T] tokens, without tensors.
static inline Layer layer_of(const ParamTable* table, int64_t l, int64_t B, int64_t T) {
    Layer layer = {.table = table, .B = B, .T = T};
    layer_move(&layer, l);
    return layer;
}

// Defines `Acts name(const Layer*)`: the layer's tensors in its mixer's table of activations.
#define MIXER_ACTS(Acts, name)                                                                               \
    static inline Acts name(const Layer* layer) {                                                            \
        Acts acts;                                                                                           \
        activations_layer(layer->mixer, layer->number, &acts, sizeof acts);                                  \
        return acts;                                                                                         \
    }

// Rows of logits in memory at once: all [B, T, V] would be more than all else for a large vocabulary.
static inline int64_t layer_logit_rows(const Config* c, int64_t rows) {
    int64_t most = ((int64_t)1 << 22) / c->vocab_size;
    return min64(rows, most < 64 ? 64 : most);
}

// A parameter of the layer, and its gradient; NULL where the model has none.
static inline const real* layer_param(const Layer* layer, ParamKind kind) {
    const Param* p = params_find(layer->table, kind, layer->l);
    return p ? layer->params + p->offset : NULL;
}
static inline real* layer_grad(const Layer* layer, ParamKind kind) {
    const Param* p = params_find(layer->table, kind, layer->l);
    return p && layer->grads ? layer->grads + p->offset : NULL;
}

// The linear layer of a weight [N, K], over the rows of the pass.
static inline Linear layer_linear(const Layer* layer, ParamKind kind) {
    const Param* p = params_find(layer->table, kind, layer->l);
    Linear linear = {layer_param(layer, kind), layer_grad(layer, kind), layer->B * layer->T, p->shape[0],
                     p->shape[1]};
    return linear;
}

static inline Projection layer_proj(const Layer* layer) { return layer->table->by_layer[layer->l].proj; }

// The fused projection [R, d] of all that the mixer reads of its input.
static inline Linear layer_in_proj(const Layer* layer) {
    Linear linear = layer_linear(layer, layer_proj(layer).first);
    linear.N = layer_proj(layer).rows;
    return linear;
}

// The MLP's input projection [2I, d], of one tensor or two.
static inline Linear layer_gate_up_proj(const Layer* layer) {
    Linear linear = layer_linear(layer, P_GATE_PROJ);
    linear.N = 2 * config_mlp_size(layer->config);
    return linear;
}

// An RMSNorm over rows of d channels: y = x / sqrt(mean(x^2) + eps) * weight.
typedef struct {
    const real* weight; // [d]
    real* dweight;      // [d]
    real* rstd;         // [rows]: written by the forward pass, read by the backward pass
    int64_t rows, d;
    double eps;
} Norm;

static inline Norm layer_norm(const Layer* layer, ParamKind kind, real* rstd) {
    const Param* p = params_find(layer->table, kind, layer->l);
    Norm norm = {.weight = layer_param(layer, kind),
                 .dweight = layer_grad(layer, kind),
                 .rstd = rstd,
                 .rows = layer->B * layer->T,
                 .d = p->count,
                 .eps = p->eps};
    return norm;
}

// y [rows, d] from x; y may be x.
static inline void rmsnorm_forward(real* y, const real* x, const Norm* norm) {
    int64_t d = norm->d;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < norm->rows; t++)
        norm->rstd[t] = norm_forward(y + t * d, x + t * d, norm->weight, d, norm->eps);
}

// dx += the gradient of x, and norm->dweight += the weight's; partial [NUM_PIECES, d] is scratch.
static inline void rmsnorm_backward(real* dx, const real* dy, const real* x, const Norm* norm,
                                    real* partial) {
    int64_t rows = norm->rows, d = norm->d;
    memset(partial, 0, (size_t)(NUM_PIECES * d) * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES; piece++)
        for (int64_t t = rows * piece / NUM_PIECES; t < rows * (piece + 1) / NUM_PIECES; t++)
            norm_backward(dx + t * d, partial + piece * d, dy + t * d, x + t * d, norm->weight, norm->rstd[t],
                          d, true);
    for (int64_t piece = 0; piece < NUM_PIECES; piece++)
        for (int64_t c = 0; c < d; c++) norm->dweight[c] += partial[piece * d + c];
}
