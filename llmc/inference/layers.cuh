/*
The layers of a pass of the inference engine (llmc/model/extension.h): attention and the MLP as the trainer's
model has them, over the rows of sequences in a cache.

    attention_begin_extend    once a step: the work of all layers, and the angles of RoPE
    attention_mixer_extend    out = in + Wo output_gate(attention(qkv(norm(in))))
    mlp_extend                out = in + Wd swiglu(Wgu norm(in))
    single_step               all layers and the logits, of one sequence's next token

On Hopper a step of decoding one row is one kernel, single.cuh. A step up to 16 rows is five kernels a layer:
the two projections in, decode.cuh, and the two projections out; norms and SwiGLU are part of the projections.
Other rows have three kernels in place of decode.cuh: the append, attention, and the sum of its partial
results.
*/
#pragma once

#include <algorithm>
#include "../attention/layer.cuh"
#include "cache.cuh"
#include "matvec.cuh"
#include "scores.cuh"
#include "single.cuh"

// ----------------------------------------------------------------------------
// the cache, and what a pass computes in: R rows, of which `outputs` have logits

// clang-format off
// type, name, kept, elements
#define EXTEND_ACTS(X) \
    X(bf16, x, never, R * d)                  /* [R,d] residual stream */ \
    X(bf16, x_mid, never, R * d)              /* [R,d] the same between mixer and MLP */ \
    X(bf16, x_last, never, outputs * d)       /* [outputs,d] the rows with outputs */ \
    X(bf16, computed, never, std::max(R, logit_rows) * std::max(d, I)) /* [R,d] or [R,I] input of a GEMM */ \
    X(float, rstd, never, std::max(R, logit_rows)) /* [R] not read */ \
    X(bf16, proj, never, R * S)               /* [R,S] */ \
    X(bf16, y, never, R * config_inner_size(c)) /* [R,d], Mamba-2 [R,2d]: input of the output projection */ \
    X(bf16, gate_up, never, R * 2 * I)        /* [R,2I] */ \
    X(float, logits, never, logit_rows * Vs)  /* [rows,Vs] of a chunk of outputs */ \
    X(uint2, words, never, words)             /* single.cuh's, zero at first */ \
    X(unsigned, counters, never, 2)           /* the same */
// clang-format on

typedef struct {
    EXTEND_ACTS(ACTIVATION_FIELD)
} ExtendActs;

typedef struct Cache {
    DeviceCache device;
    Activations table;
    ExtendActs acts;
    Activations states; // of a recurrent mixer's slots, and its scratch: llmc/mixers/extend.cuh
    Matmul matmul;
    SingleArgs single;       // of the filled pass, where one kernel computes it
    bool is_single;          // it does: then its outputs too, but for scores
    RowScore* scores;        // [outputs + slots EXTEND_STEPS], pinned
    cudaGraphExec_t* graphs; // [cache_graphs] of steps that extend sequences by a token each
    bool* warm;              // the same: such a step has run, kernels are loaded, GEMM algorithms chosen
} Cache;

// Index of the filled pass's graph in [slots + 1, 2, 2]: its sequences (0: one, by single.cuh), whether it is
// uneven, whether it draws
static inline int64_t cache_graph(const Cache* cache) {
    const PassArrays* pass = &cache->device.pass;
    int64_t sequences = cache->is_single ? 0 : pass->num_sequences;
    return (2 * sequences + pass->is_uneven) * 2 + (cache->device.scores.outputs.draws != NULL);
}
static inline int64_t cache_graphs(const CacheSizes* sizes) { return 4 * (sizes->slots + 1); }

// Rows of logits at a time
static inline int64_t extend_logit_rows(int64_t outputs) { return std::min<int64_t>(outputs, 512); }

static inline Activations extend_activations(const Config* c, const ParamTable* table, const CacheSizes* s) {
    int64_t R = linear_padded_rows(s->rows), outputs = linear_padded_rows(s->outputs), d = c->hidden_size;
    int64_t I = config_mlp_size(c), S = matmul_padded(table->proj.rows), Vs = matmul_padded(c->vocab_size);
    int64_t logit_rows = linear_padded_rows(extend_logit_rows(s->outputs));
    int64_t words = single_words(c->num_heads, config_head_size(c), d, S, I);
    const bool never = false;
    Activations of = {}, *rows = &of;
    EXTEND_ACTS(ACTIVATION_ROW)
    return of;
}

#undef EXTEND_ACTS

// The input of a linear layer: a norm of x.
static inline MatvecInput extend_normed(const Layer* layer, const ExtendActs* a, const bf16* x,
                                        ParamKind kind) {
    Norm norm = layer_norm(layer, kind, a->rstd);
    return {x, norm.weight, norm.eps, false, a->computed, a->rstd};
}

// ----------------------------------------------------------------------------
// attention

static inline CacheModel attention_cache_model(const Config* c) {
    return {c->num_hidden_layers,
            c->num_heads,
            config_head_size(c),
            config_has_gate(c),
            c->qk_norm,
            c->use_rope,
            c->use_k_shift || c->use_v_shift,
            c->log_pruning_tolerance,
            c->window_size};
}

// Called once after allocation of a cache.
static inline void attention_cache_init(const Layer* layer, DeviceCache* cache) {
    const bf16* q_norm = layer_param(layer, layer->weights, P_Q_NORM);
    if (q_norm && cache->pages.drops)
        pages_limits(&cache->pages, layer->l, q_norm, layer_param(layer, layer->weights, P_K_NORM),
                     attention_shape_of(layer).weight_stride, layer->stream);
}

// Before the layers: what the pass is for all of them.
static inline void attention_begin_extend(const Layer* layer, Cache* cache) {
    DeviceCache* c = &cache->device;
    extend_plan(&c->work, &c->pages, &c->pass, layer->stream);
    if (layer->config->use_rope)
        pages_angles(c->angles, &c->pass, c->pages.dh, layer->config->rope_base, layer->stream);
}

// What a layer's rows are appended from and to, and what becomes of their o.
static inline void attention_extend_args(PagesAppend* append, ExtendOutput* output, const Layer* layer,
                                         const Cache* cache) {
    const DeviceCache* c = &cache->device;
    const ExtendActs* a = &cache->acts;
    HeadShape shape = attention_shape_of(layer);
    *output = {a->y, c->o, attention_output_gate(layer, NULL, a->proj, NULL, NULL), shape.row_stride};
    *append = {};
    append->layer = layer->l;
    attention_paths(layer, append->paths);
    append->paths[0].out = c->q;
    append->proj = a->proj, append->angles = c->angles, append->cum_logf = c->cum_logf;
    append->gate = proj_column(a->proj, layer->table->proj.fgate);
    append->bias = layer_param_fp32(layer, P_FGATE_BIAS);
    append->row_stride = (int)shape.row_stride, append->weight_stride = (int)shape.weight_stride;
}

static inline void attention_mixer_extend(const Layer* layer, Cache* cache, bf16* out, const bf16* in) {
    DeviceCache* c = &cache->device;
    const ExtendActs* a = &cache->acts;
    cudaStream_t stream = layer->stream;
    ExtendLayer pass = device_cache_layer(c, layer->l);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);
    MatvecInput normed = extend_normed(layer, a, in, P_MIXER_NORM), y = {};
    ExtendOutput output;
    PagesAppend append;
    attention_extend_args(&append, &output, layer, cache);
    y.x = a->y;

    linear_rows(a->proj, &normed, NULL, &in_proj, layer->matmul);
    pages_append(&c->pages, &append, &c->pass, stream);
    decode_attention(&output, &append, &pass, stream);
    device_cache_long(c, &pass, append.paths[0].weight, append.paths[1].weight, append.weight_stride, stream);
    extend_attention(&output, c->q, c->cum_logf, &pass, stream);
    linear_rows(out, &y, in, &o_proj, layer->matmul);
}

// ----------------------------------------------------------------------------
// the MLP

// out = in + mlp(norm(in)) of the rows of an extension
static inline void mlp_extend(const Layer* layer, const Cache* cache, bf16* out, const bf16* in) {
    const ExtendActs* a = &cache->acts;
    Linear gate_proj = layer_linear(layer, P_GATE_PROJ), down_proj = layer_linear(layer, P_DOWN_PROJ);
    MatvecInput normed = extend_normed(layer, a, in, P_MLP_NORM), act = {};
    act.x = a->gate_up, act.swiglu = true, act.computed = a->computed;
    linear_rows(a->gate_up, &normed, NULL, &gate_proj, layer->matmul);
    linear_rows(out, &act, in, &down_proj, layer->matmul);
}

// ----------------------------------------------------------------------------
// a step of one sequence

// Elements from a layer's tensor to the next layer's; -1 where layers are not equally far apart.
static inline int64_t single_stride(const Layer* layer, ParamKind kind, bool fp32) {
    int64_t stride = 0;
    for (int64_t l = 1; l < layer->config->num_hidden_layers; l++) {
        const Param *p = params_find(layer->table, kind, l), *before = params_find(layer->table, kind, l - 1);
        int64_t step = fp32 ? p->fp32 - before->fp32 : p->offset - before->offset;
        if (l > 1 && step != stride) return -1;
        stride = step;
    }
    return stride;
}

// No word has a tag yet.
static inline void single_reset(const Cache* cache, cudaStream_t stream) {
    for (int i = 0; i < cache->table.count; i++) {
        const auto* row = &cache->table.rows[i];
        if (row->data == cache->acts.words || row->data == cache->acts.counters)
            CUDA_CHECK(cudaMemsetAsync(row->data, 0, (size_t)row->bytes, stream));
    }
}

// Whether one kernel computes the layers and the logits of the filled pass: one row of one sequence, of a
// model whose layers fit. Its arguments are then cache->single. layer is layer 0.
static inline bool single_args(Cache* cache, const Layer* layer, const bf16* lm_head) {
    const Config* c = layer->config;
    const DeviceCache* device = &cache->device;
    const ProjLayout* proj = &layer->table->proj;
    SingleArgs* a = &cache->single;
    int64_t d = c->hidden_size, I = config_mlp_size(c), rows = proj->rows, S = matmul_padded(rows);
    if (!device->model.layers || I == 0 || device->pass.num_rows != 1 || device->pass.num_decoded != 1)
        return false;
    if (!a->counters) single_reset(cache, layer->stream);
    *a = {};
    a->counters = cache->acts.counters, a->logits = cache->acts.logits;
    a->layer_stride = single_stride(layer, P_Q_PROJ, false);
    for (ParamKind kind :
         {P_MIXER_NORM, P_O_PROJ, P_MLP_NORM, P_GATE_PROJ, P_DOWN_PROJ, P_Q_NORM, P_K_NORM, P_OUTPUT_NORM})
        if (params_find(layer->table, kind, 0) && single_stride(layer, kind, false) != a->layer_stride)
            return false;
    if (params_find(layer->table, P_FGATE_BIAS, 0))
        a->layer_stride_fp32 = single_stride(layer, P_FGATE_BIAS, true);
    a->attention.pages = device->pages, a->attention.pass = device->pass;
    attention_extend_args(&a->attention.append, &a->attention.out, layer, cache);
    a->ogate = proj->ogate, a->fgate = proj->fgate;
    auto add = [&](int kind, const bf16* w, const bf16* norm, int64_t K, int64_t N, int64_t half) {
        int64_t tiles = ceil_div<int64_t>(N, 8), grid = device_attribute(cudaDevAttrMultiProcessorCount);
        a->matrices[kind] = {w, norm, (int)K, (int)half, (int)(tiles / grid), (int)(tiles % grid), 0};
    };
    auto weight = [&](ParamKind kind) { return layer_param(layer, layer->weights, kind); };
    add(SINGLE_IN, weight(P_Q_PROJ), weight(P_MIXER_NORM), d, rows, 0);
    add(SINGLE_OUT, weight(P_O_PROJ), NULL, config_inner_size(c), d, 0);
    add(SINGLE_GATE_UP, weight(P_GATE_PROJ), weight(P_MLP_NORM), d, I, I);
    add(SINGLE_DOWN, weight(P_DOWN_PROJ), NULL, I, d, 0);
    add(SINGLE_HEAD, lm_head, weight(P_NORM), d, c->vocab_size, 0);
    a->embeddings = weight(P_EMBEDDINGS), a->eps = (float)c->norm_eps;
    a->layers = (int)c->num_hidden_layers, a->d = (int)d, a->V = (int)c->vocab_size;
    bool fits = device->pages.dh == 64 ? single_layout<64>(a, cache->acts.words, S)
                                       : single_layout<128>(a, cache->acts.words, S);
    return fits && (a->attention.blocks == DECODE_PARTS || device->host.sequences[0].position < SINGLE_LONG);
}

// Queues it.
static inline void single_step(const Layer* layer, const Cache* cache) {
    const DeviceCache* c = &cache->device;
    if (layer->config->use_rope)
        pages_angles(c->angles, &c->pass, c->pages.dh, layer->config->rope_base, layer->stream);
    single_launch(&cache->single, layer->stream);
}
