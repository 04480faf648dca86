/*
The layers of a pass of the inference engine (llmc/model/extension.h): attention and the MLP as the
trainer's model has them, over the rows of sequences in a cache.

    attention_begin_extend    once a step: the work of all layers, and the angles of RoPE
    attention_mixer_extend    out = in + Wo output_gate(attention(qkv(norm(in))))
    mlp_extend                out = in + Wd swiglu(Wgu norm(in))

On Hopper a step that decodes up to 16 rows is five kernels a layer: the two input projections, decode.cuh,
and the two output projections; norms and SwiGLU are fused into the projections. Other rows have three kernels
in place of decode.cuh: the append, attention, and the sum of its partial results.
*/
#pragma once

#include <algorithm>
#include "../../layers/attention_layer.cuh"
#include "../../model/rotation.h"
#include "cache.cuh"
#include "matvec.cuh"
#include "scores.cuh"

// ----------------------------------------------------------------------------
// the cache, and what a pass computes in: R rows, of which `outputs` have logits

// clang-format off
// type, name, kept, elements
#define EXTEND_ACTS(X) \
    X(bf16, x, SHARED, R * d)                  /* [R,d] residual stream */ \
    X(bf16, x_mid, SHARED, R * d)              /* [R,d] the same between mixer and MLP */ \
    X(bf16, x_last, SHARED, outputs * d)       /* [outputs,d] the rows with outputs */ \
    X(bf16, computed, SHARED, std::max(R, logit_rows) * std::max(d, I)) /* [R,d] or [R,I] input of a GEMM */ \
    X(float, rstd, SHARED, std::max(R, logit_rows)) /* [R] not read */ \
    X(bf16, proj, SHARED, R * S)               /* [R,S] */ \
    X(bf16, y, SHARED, R * inner) /* [R,d], Mamba-2 [R,2d]: input of the output projection */ \
    X(bf16, gate_up, SHARED, R * 2 * I)        /* [R,2I] */ \
    X(float, logits, SHARED, logit_rows * Vs)  /* [rows,Vs] of a chunk of outputs */
// clang-format on

typedef struct {
    EXTEND_ACTS(ACTIVATION_FIELD)
} ExtendActs;

struct Cache {
    const Config* config; // the model's
    Layer layer;          // of layer 0
    const Mixer* const* mixers;
    DeviceCache device;
    Activations table;
    ExtendActs acts;
    // of the recurrent mixers' slots, and their scratch: llmc/baselines/shared/extend.cuh
    Activations states[NUM_MIXERS];
    int64_t layers[NUM_MIXERS]; // of each mixer
    Matmul matmul;
    RowScore* scores;        // [outputs + slots EXTEND_STEPS], pinned
    cudaGraphExec_t* graphs; // [cache_graphs] of steps that extend sequences by a token each
    bool* warm;              // the same: such a step has run, kernels are loaded, GEMM algorithms chosen
};

// Index of the filled pass's graph in [slots, 2, 2]: its sequences, whether it is uneven, whether it draws
static inline int64_t cache_graph(const Cache* cache) {
    const PassArrays* pass = &cache->device.pass;
    return (2 * (pass->num_sequences - 1) + pass->is_uneven) * 2 +
           (cache->device.scores.outputs.draws != NULL);
}
static inline int64_t cache_graphs(const CacheSizes* sizes) { return 4 * sizes->slots; }

// Rows of logits at a time
static inline int64_t extend_logit_rows(int64_t outputs) { return std::min<int64_t>(outputs, 512); }

static inline Activations extend_activations(const Config* c, const ParamTable* table, const CacheSizes* s) {
    int64_t R = linear_padded_rows(s->rows), outputs = linear_padded_rows(s->outputs), d = c->hidden_size;
    int64_t I = config_mlp_size(c), S = matmul_padded(params_widest_proj(table, c->num_hidden_layers)),
            Vs = matmul_padded(c->vocab_size);
    int64_t logit_rows = linear_padded_rows(extend_logit_rows(s->outputs));
    Activations acts = {}, *rows = &acts;
    const Recompute recompute = FORWARD_ONLY;
    int64_t inner = 0;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        inner = std::max(inner, config_inner_size(&table->by_layer[l].config));
    EXTEND_ACTS(KEPT_ROW)
    return acts;
}

#undef EXTEND_ACTS

// The tensors of an allocated table.
static inline ExtendActs extend_acts(const Activations* table) {
    ExtendActs a;
    activations_layer(table, 0, &a, sizeof a);
    return a;
}

// The input of a linear layer: a norm of x.
static inline MatvecInput extend_normed(const Layer* layer, const ExtendActs* a, const bf16* x,
                                        ParamKind kind) {
    Norm norm = layer_norm(layer, kind, a->rstd);
    return {.x = x, .norm = norm.weight, .eps = norm.eps, .computed = a->computed, .rstd = a->rstd};
}

// ----------------------------------------------------------------------------
// attention

// The windows of the layers with attention, in turn; returns their number.
static inline int64_t attention_windows(const Config* c, int32_t windows[LAYERS_MOST]) {
    int64_t n = 0;
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const Config layer = config_layer(c, l);
        if (layer.mixer == MIXER_ATTENTION) windows[n++] = (int32_t)layer.window_size;
    }
    return n;
}

// All zero without attention.
static inline CacheModel attention_cache_model(const Config* c) {
    int32_t windows[LAYERS_MOST];
    const int64_t layers = attention_windows(c, windows);
    if (layers == 0) return {};
    int64_t window = windows[0];
    bool differ = false;
    double gain = 0;
    for (int64_t l = 0; l < layers; l++) {
        differ = differ || windows[l] != windows[0];
        window = window && windows[l] ? std::max<int64_t>(window, windows[l]) : 0;
    }
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const Config layer = config_layer(c, l);
        gain = std::max(gain, config_rope_gain(&layer));
    }
    return {.layers = layers,
            .NH = c->num_heads,
            .dh = config_head_size(c),
            .gate = config_has_gate(c),
            .qk_norm = c->qk_norm,
            .shifts = c->use_k_shift || c->use_v_shift,
            .rope_gain = gain,
            .log_tolerance = c->log_pruning_tolerance,
            .window = window,
            .own_windows = differ,
            .KVH = c->num_kv_heads};
}

// Called once after allocation of a cache.
static inline void attention_cache_init(const Layer* layer, DeviceCache* cache) {
    HeadPath paths[3];
    attention_paths(layer, paths);
    if (paths[0].weight && cache->pages.drops)
        pages_limits(&cache->pages, layer->number, paths[0].weight, paths[1].weight,
                     attention_shape_of(layer).weight_stride, config_rope_gain(layer->config), layer->stream);
}

// Before the layers: what the pass is for all of them.
static inline void attention_begin_extend(const Layer* layer, Cache* cache) {
    DeviceCache* c = &cache->device;
    extend_plan(&c->work, &c->pages, &c->pass, layer->stream);
    if (c->model.rope_gain > 0)
        pages_angles(c->angles, &c->pass, c->pages.dh, config_rotation(cache->config), layer->stream);
}

static inline void attention_mixer_extend(const Layer* layer, Cache* cache, bf16* out, const bf16* in) {
    DeviceCache* c = &cache->device;
    const ExtendActs* a = &cache->acts;
    cudaStream_t stream = layer->stream;
    ExtendLayer pass = device_cache_layer(c, layer->number);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);
    MatvecInput normed = extend_normed(layer, a, in, P_MIXER_NORM), y = {.x = a->y};
    HeadShape shape = attention_shape_of(layer);
    ExtendOutput output = {a->y, c->o, attention_output_gate(layer, NULL, a->proj, NULL, NULL),
                           shape.row_stride};
    KvAppend append = {.layer = layer->number,
                       .proj = a->proj,
                       .angles = c->angles,
                       .gate = proj_column(layer, a->proj, P_FGATE_PROJ),
                       .bias = layer_param_fp32(layer, P_FGATE_BIAS),
                       .cum_logf = c->cum_logf,
                       .row_stride = (int)shape.row_stride,
                       .weight_stride = (int)shape.weight_stride};
    attention_paths(layer, append.paths);
    append.paths[0].out = c->q;

    linear_rows(a->proj, &normed, NULL, &in_proj, layer->matmul);
    kv_append(&c->pages, &append, &c->pass, stream);
    decode_attention(&output, &append, &pass, stream);
    device_cache_prefill(c, &pass, append.paths[0].weight, append.paths[1].weight, append.weight_stride,
                         stream);
    extend_attention(&output, c->q, c->cum_logf, &pass, stream);
    linear_rows(out, &y, in, &o_proj, layer->matmul);
}

// ----------------------------------------------------------------------------
// the MLP

// out = in + mlp(norm(in)) of the rows of an extension
static inline void mlp_extend(const Layer* layer, const Cache* cache, bf16* out, const bf16* in) {
    const ExtendActs* a = &cache->acts;
    Linear gate_up_proj = layer_gate_up_proj(layer), down_proj = layer_linear(layer, P_DOWN_PROJ);
    MatvecInput normed = extend_normed(layer, a, in, P_MLP_NORM);
    MatvecInput act = {.x = a->gate_up, .swiglu = true, .computed = a->computed};
    linear_rows(a->gate_up, &normed, NULL, &gate_up_proj, layer->matmul);
    linear_rows(out, &act, in, &down_proj, layer->matmul);
}
