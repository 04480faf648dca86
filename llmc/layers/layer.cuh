/*
The layer context: what a mixer or an MLP of the GPU trainer sees of the model, and the stream of weight
gradients.

A pass over B x T tokens reads bf16 weights, adds to fp32 gradients and keeps its activations in tables of its
own (llmc/model/activations.h). In a pass of the inference engine B is 1 and T is the number of its rows.

Unless all layers keep it (--recompute none), the backward pass of a norm recomputes the norm's output, which
is the input of a mixer's or MLP's first projection. So the weight gradient of that projection is computed
last, by the block: mixers and MLPs return it as a DeferredWeight.

Made by the trainer for each layer; read by its mixers and those in llmc/baselines/.
*/
#pragma once

#include "../model/extension.h"
#include "../model/activations.h"
#include "../model/documents.h"
#include "fp8_state.cuh"
#include "rmsnorm.cuh"

// GEMMs of weight gradients, sums over tokens of those of norms, and the forget gate's backward pass, on a
// stream of their own.
typedef struct {
    SideStream side;
    Matmul matmul; // its stream is side.stream
} WeightStream;

typedef struct {
    const Config* config; // as this layer's mixer sees it
    const ParamTable* table;
    int64_t l, number, B, T;   // number: among the layers of its mixer, whose activations are one table
    const bf16* weights;       // flat buffer of the parameter table
    const float* weights_fp32; // of the tensors that kernels read in fp32: gates' and time steps'
    float* grads;              // flat buffer; NULL without a backward pass
    const Activations* mixer;
    const Activations* mlp;
    const CacheSizes* cache;  // of an inference engine's passes; NULL: a pass over whole sequences
    void* mixer_context;      // what the model has for its mixer besides activations; NULL: nothing
    const int32_t* doc_start; // [B,T] (documents.h); NULL without document_reset
    void* scratch;            // of one kernel at a time
    NormPartial partial[NUM_NORM_PARTIALS]; // [0] of the block's norms, the others of its mixer
    Matmul* matmul;
    WeightStream* weight_stream;
    cudaStream_t stream;
    const Fp8State* fp8; // NULL: all GEMMs in bf16

    bool deterministic;
    bool sequential;        // one kernel after another: one stream, no graph
    bool forward_only;      // while scratch_bytes is asked: no backward pass will need it
    bool cudnn;             // attention by cuDNN's kernels
    bool recompute_outputs; // tensors of UP_TO_NONE are not kept: backward kernels write them again
    bool recompute_qkv;     // nor are those of UP_TO_FUSED
    bool recomputing;       // this forward pass repeats an earlier one: it counts nothing
} Layer;

// ----------------------------------------------------------------------------
// tables of activations

// The layer's tensors of a mixer's whole table.
template <class Acts> static inline Acts mixer_acts(const Layer* layer) {
    Acts a;
    activations_layer(layer->mixer, layer->number, &a, sizeof a);
    return a;
}

// Makes the layer's config, l and number those of layer l.
static inline void layer_move(Layer* layer, int64_t l) {
    layer->config = &layer->table->by_layer[l].config;
    layer->l = l;
    layer->number = layer->table->by_layer[l].number;
}

// ----------------------------------------------------------------------------
// parameters of the layer

// A parameter of the layer in a buffer of the table's layout; NULL where the model has none.
template <class T> static inline T* layer_param(const Layer* layer, T* buffer, ParamKind kind) {
    const Param* p = params_find(layer->table, kind, layer->l);
    return p && buffer ? buffer + p->offset : NULL;
}

// A parameter of the layer that kernels read in fp32; NULL where the model has none.
static inline const float* layer_param_fp32(const Layer* layer, ParamKind kind) {
    const Param* p = params_find(layer->table, kind, layer->l);
    return p ? layer->weights_fp32 + p->fp32 : NULL;
}

// A linear layer of layer l in FP8, whose output has `columns` columns with those in bf16; all zero: bf16.
static inline Fp8Linear layer_fp8(const Layer* layer, int64_t l, ParamKind kind, int64_t columns) {
    const Fp8State* s = layer->fp8;
    int linear = 0;
    while (s && linear < FP8_LINEARS && s->shapes[linear].kind != kind) linear++;
    if (!s || linear == FP8_LINEARS) return Fp8Linear{};
    Fp8Linear found = fp8_linear(s, l, linear, columns);
    if (!layer->recompute_outputs)
        found.x.alone = false; // the weight gradient's copy is made of it, unless layer_keep_transposed
    return found;
}

// Where all layers keep x, the input of a linear layer that is in FP8 in all columns, its transposed copy
// takes the place of x in bf16: both passes call this, for x8 as the forward pass writes it and the backward
// pass reads it.
static inline void layer_keep_transposed(const Layer* layer, Fp8Tensor* x8, bf16* x) {
    if (!x8->data || layer->recompute_outputs) return;
    x8->alone = true;
    x8->transposed = (fp8*)x;
}

// The linear layer of a weight [N, K], over the rows of the pass.
static inline Linear layer_linear(const Layer* layer, ParamKind kind) {
    const Param* p = params_find(layer->table, kind, layer->l);
    int64_t N = p->shape[0], K = p->shape[1];
    return {.w = layer_param(layer, layer->weights, kind),
            .dw = layer_param(layer, layer->grads, kind),
            .rows = layer->B * layer->T,
            .N = N,
            .K = K,
            .out_stride = N,
            .x_stride = K,
            .fp8 = layer_fp8(layer, layer->l, kind, N)};
}

static inline Projection layer_proj(const Layer* layer) { return layer->table->by_layer[layer->l].proj; }

// The fused projection of all that the mixer reads of its input. Its GEMMs use S >= R rows of weights; the
// last S - R are weights of the following tensors. Their outputs land in padding columns, which no kernel
// reads and whose gradient is 0.
static inline Linear layer_in_proj(const Layer* layer) {
    Linear linear = layer_linear(layer, layer_proj(layer).first);
    linear.N = linear.out_stride = matmul_padded(layer_proj(layer).rows);
    linear.fp8 = layer_fp8(layer, layer->l, layer_proj(layer).first, linear.N);
    return linear;
}

// The MLP's input projection [2I, d], of one tensor or two.
static inline Linear layer_gate_up_proj(const Layer* layer) {
    Linear linear = layer_linear(layer, P_GATE_PROJ);
    linear.N = linear.out_stride = 2 * config_mlp_size(layer->config);
    linear.fp8 = layer_fp8(layer, layer->l, P_GATE_PROJ, linear.N);
    return linear;
}

// Before a pass reads new weights of the layer: their copies in FP8.
static inline void layer_weights_in_fp8(const Layer* layer, const Fp8State* s) {
    const bf16* w[FP8_LINEARS];
    for (int i = 0; i < FP8_LINEARS; i++) w[i] = layer_param(layer, layer->weights, s->shapes[i].kind);
    fp8_weights(s, layer->l, w, layer->stream);
}

// What a norm writes in FP8: the input of the linear layers behind it, and in the backward pass the gradient
// of the residual stream, which is the output's of the linear layer before it.
static inline Fp8Tensor layer_norm_output(const Layer* layer, ParamKind kind) {
    if (!layer->fp8) return Fp8Tensor{};
    if (kind == P_NORM) return fp8_head_input(layer->fp8);
    if (kind == P_MIXER_NORM) return layer_in_proj(layer).fp8.x;
    return kind == P_MLP_NORM ? layer_linear(layer, P_GATE_PROJ).fp8.x : Fp8Tensor{};
}
static inline Fp8Tensor layer_norm_gradient(const Layer* layer, ParamKind kind) {
    const int64_t before = kind == P_NORM ? layer->config->num_hidden_layers - 1 : layer->l - 1;
    if (!layer->fp8) return Fp8Tensor{};
    if (kind == P_MLP_NORM) return layer_linear(layer, P_O_PROJ).fp8.dout;
    return (kind == P_MIXER_NORM || kind == P_NORM) && before >= 0
               ? layer_fp8(layer, before, P_DOWN_PROJ, 0).dout
               : Fp8Tensor{};
}

static inline Norm layer_norm(const Layer* layer, ParamKind kind, float* rstd) {
    const Param* p = params_find(layer->table, kind, layer->l);
    return {.weight = layer_param(layer, layer->weights, kind),
            .dweight = layer_param(layer, layer->grads, kind),
            .rstd = rstd,
            .rows = layer->B * layer->T,
            .d = p->count,
            .eps = p->eps,
            .y8 = layer_norm_output(layer, kind),
            .dx8 = layer_norm_gradient(layer, kind)};
}

// ----------------------------------------------------------------------------
// weight gradients

// A weight gradient whose input x is not recomputed yet.
typedef struct {
    Linear linear;
    const bf16* dout;
    void (*then)(const Layer*, cudaStream_t); // queues what follows the gradient on its stream; NULL: nothing
} DeferredWeight;

static inline void weight_stream_init(WeightStream* w, bool deterministic, cudaStream_t main) {
    side_init(&w->side, main);
    matmul_init(&w->matmul, !deterministic, w->side.own);
}

static inline void weight_stream_free(WeightStream* w) {
    matmul_free(&w->matmul);
    side_free(&w->side);
}

// In sequential mode weight gradients are computed on the main stream.
static inline void weight_stream_sequential(WeightStream* w, bool on) {
    w->side.stream = w->matmul.stream = on ? w->side.main : w->side.own;
}

// Computes linear->dw += dout^T x after what is queued on the main stream now. Until weight_stream_join the
// main stream may overwrite neither dout nor x, nor what they are in FP8, nor add to any of the N rows of dw;
// those of the fused projection, padded, reach into the tensors behind it.
static inline void weight_gradient(WeightStream* w, const bf16* dout, const bf16* x, const Linear* linear) {
    side_fork(&w->side);
    linear_backward_weight(dout, x, linear, &w->matmul);
}

// The same for a deferred gradient, once its input x is there; w->then follows on the same stream.
static inline void deferred_weight_gradient(const Layer* layer, const DeferredWeight* w, const bf16* x) {
    weight_gradient(layer->weight_stream, w->dout, x, &w->linear);
    if (w->then) w->then(layer, layer->weight_stream->side.stream);
}

// What is queued on the main stream from now on waits for the weight gradients in flight.
static inline void weight_stream_join(WeightStream* w) { side_join(&w->side); }

// ----------------------------------------------------------------------------
// what takes a block's normed residual stream back to it: attention, or what may take its place

typedef struct {
    bool recurrent; // slots of a cache have states, its KEPT_ALWAYS tensors where Layer.cache is; not pages
    bool eager;     // its passes are not repeated as a graph; of all layers, or of none
    bool sums_on_main; // it reads norms' gradients on the main stream: their sums over tokens are there, too
    // dies where the kernels do not support passes over [B, T] tokens
    void (*check)(const Config*, int64_t B, int64_t T);
    // adds the tensors of a pass over the layer's B x T tokens; bytes of Layer.scratch besides
    void (*activations)(Activations*, const Layer*, Recompute);
    size_t (*scratch_bytes)(const Layer*);
    void (*init)(const Layer*);       // once after their allocation, of its first layer; NULL: nothing to do
    void (*begin_step)(const Layer*); // of layer 0, before the first pass of a step; NULL: nothing to do
    // before a pass reads new weights of the layer: their copies in FP8; NULL: it has no GEMMs in FP8
    void (*weights_in_fp8)(const Layer*, const Fp8State*);
    // out = residual + mixer(in)
    void (*forward)(const Layer*, bf16* out, const bf16* in, const bf16* residual);
    // writes din, the gradient of `in`, and adds to the weights' gradients, but for the one that it returns
    DeferredWeight (*backward)(const Layer*, bf16* din, const bf16* dout);

    // out = in + mixer(norm(in)) of the rows of an inference cache's pass
    void (*extend)(const Layer*, Cache*, bf16* out, const bf16* in);
} Mixer;
