/*
Extension on the CPU (llmc/model/extension.h): one pass over rows of sequences in a cache,

    x = E[tokens];   every layer: x = extend(x) of its mixer,  x += mlp(norm(x));   scores of lm_head(norm(x))

A row's logits are those of the model's forward pass for the same tokens, but for rounding and what is
forgotten. The model is seen through a Layer and Mixers, one of each kind and its MLP.

    cache_allocate  an empty cache
    cache_extend    a pass

Called by train_fox.c.
*/
#pragma once

#include "../../cpu/memory.h"
#include "../../cpu/threads.h"
#include "cache.h"
#include "scores.h"

// clang-format off
// type, name, kept, elements: of R rows
#define EXTEND_ACTS(X) \
    X(real, x, false, R * d)                 /* [R,d] residual stream */ \
    X(real, x_mid, false, R * d)             /* [R,d] the same between mixer and MLP */ \
    X(real, normed, false, R * d)            /* [R,d] input of a mixer, an MLP, or lm_head */ \
    X(real, rstd, false, R)                  /* [R] not read */ \
    X(real, logits, false, logit_rows * V)   /* [rows,V] of a chunk of outputs */
// clang-format on

typedef struct {
    EXTEND_ACTS(ACTIVATION_FIELD)
} ExtendActs;

static inline void extend_activations(Activations* rows, const Config* config, int64_t R) {
    int64_t d = config->hidden_size, V = config->vocab_size, logit_rows = layer_logit_rows(config, R);
    EXTEND_ACTS(ACTIVATION_ROW)
}

#undef EXTEND_ACTS

static inline ExtendActs extend_acts(const Cache* cache) {
    ExtendActs a;
    activations_layer(&cache->acts, 0, &a, sizeof a);
    return a;
}

// A norm of the pass's rows x [R, d], valid until the next one.
static inline const real* extend_normed(const Layer* layer, const Cache* cache, const real* x,
                                        ParamKind kind) {
    const ExtendActs a = extend_acts(cache);
    Norm norm = layer_norm(layer, kind, a.rstd);
    rmsnorm_forward(a.normed, x, &norm);
    return a.normed;
}

// ----------------------------------------------------------------------------
// the cache

// A cache's table t of CACHE_TABLES, and the layers that it has room for: all share scratch.
enum { CACHE_TABLES = NUM_MIXERS + 3 };
static inline Activations* cache_table(Cache* cache, int t, int64_t* layers) {
    Activations* const scratch[] = {&cache->acts, &cache->of_mixer, &cache->of_mlp};
    *layers = t < NUM_MIXERS ? cache->layers[t] : 1;
    return t < NUM_MIXERS ? &cache->states[t] : scratch[t - NUM_MIXERS];
}

static inline void cache_free(Cache* cache) {
    for (int t = 0; t < CACHE_TABLES; t++) {
        int64_t layers;
        const Activations* table = cache_table(cache, t, &layers);
        for (int i = 0; i < table->count; i++) free(table->rows[i].data);
    }
    free(cache);
}

// Fills a cache's tables, which have no memory yet.
static inline void cache_tables(Cache* cache, const Config* config, const ParamTable* params,
                                const CacheSizes* sizes) {
    extend_activations(&cache->acts, config, sizes->rows);
    for (int64_t l = 0; l < config->num_hidden_layers; l++) {
        const Layer layer = layer_of(params, l, 1, sizes->rows);
        const MixerKind kind = layer.config->mixer;
        const Mixer* mixer = cache->mixers[kind];
        Activations* states = &cache->states[kind];
        if (l == 0) cache->mlp->activations(&cache->of_mlp, &layer, false);
        if (cache->layers[kind]++ > 0) continue;
        if (mixer->recurrent) {
            mixer->activations(states, &layer, false);
            activations_of_slots(states, sizes->slots);
        } else {
            cache_pages_activations(states, &layer, sizes);
            mixer->activations(&cache->of_mixer, &layer, false);
        }
    }
}

// Bytes of a cache.
static inline int64_t cache_bytes(const Config* config, const ParamTable* params, const Mixer* const* mixers,
                                  const Mixer* mlp, const CacheSizes* sizes) {
    Cache cache = {.mixers = mixers, .mlp = mlp};
    int64_t bytes = 0, layers;
    cache_tables(&cache, config, params, sizes);
    for (int t = 0; t < CACHE_TABLES; t++) {
        const Activations* table = cache_table(&cache, t, &layers);
        bytes += activations_bytes(table, layers);
    }
    return bytes;
}

// An empty cache for a model without gradients, whose layer 0 is `layer`. NULL where the cache would have
// more than half of the memory that is left, or leave less than a quarter of its size and 8 MiB for what is
// allocated later.
static inline Cache* cache_allocate(const Config* config, const Layer* layer, const Mixer* const* mixers,
                                    const Mixer* mlp, const CacheSizes* sizes) {
    Cache* cache = (Cache*)xcalloc(1, sizeof *cache);
    int64_t bytes = 0, layers;
    cache->sizes = *sizes;
    cache->config = config;
    cache->layer = *layer;
    cache->mixers = mixers;
    cache->mlp = mlp;
    cache->layer.B = 1;
    cache->layer.mixer = &cache->of_mixer;
    cache->layer.mlp = &cache->of_mlp;
    cache_tables(cache, config, layer->table, sizes);
    threads_create();
    for (int m = 0; m < NUM_MIXERS; m++) bytes += activations_bytes(&cache->states[m], cache->layers[m]);
    void* margin = allocate_if_any((size_t)bytes / 4 + (8 << 20));
    bool all = margin && (double)bytes <= memory_left("") / 2;
    for (int t = 0; t < CACHE_TABLES && all; t++) {
        Activations* table = cache_table(cache, t, &layers);
        activations_allocate(table, layers, allocate_if_any);
        for (int i = 0; i < table->count; i++) all = all && (table->rows[i].data || !table->rows[i].bytes);
    }
    free(margin);
    if (all) return cache;
    cache_free(cache);
    return NULL;
}

// ----------------------------------------------------------------------------
// a pass

// Extends a recurrent mixer's sequences, one after the other: out = in + mixer(norm(in)), [rows, d]. Tensors
// that it keeps for every layer hold the states of all slots; the others are scratch.
static inline void recurrent_extend(const Layer* layer, Cache* cache, real* out, const real* in) {
    const Extension* e = cache->pass;
    const int64_t d = layer->config->hidden_size;
    const MixerKind kind = layer->config->mixer;
    const real* normed = extend_normed(layer, cache, in, P_MIXER_NORM);
    for (int64_t s = 0; s < e->sequences; s++) {
        const int64_t begin = e->begins[s];
        size_t bytes;
        Activations slot = cache->states[kind];
        Layer one = *layer;
        for (int i = 0; i < slot.count; i++) {
            char* state = cache_slot(cache, kind, i, layer->number, e->slots[s], &bytes);
            if (state) slot.rows[i].data = state - layer->number * slot.rows[i].bytes;
            if (state && e->lengths[s] == 0) memset(state, 0, bytes); // an empty sequence
        }
        one.mixer = &slot;
        one.B = 1;
        one.T = e->begins[s + 1] - begin;
        cache->mixers[kind]->forward(&one, out + begin * d, normed + begin * d, in + begin * d);
    }
}

// Final norm, lm_head and scores of the pass's outputs, from x [rows, d], in chunks of logits.
static inline void extend_outputs(Cache* cache, const real* x, RowScore* scores, float* logits) {
    const Extension* e = cache->pass;
    const ExtendActs a = extend_acts(cache);
    Layer layer = cache->layer;
    int64_t d = layer.config->hidden_size, V = layer.config->vocab_size;
    int64_t most = layer_logit_rows(layer.config, cache->sizes.rows);
    for (int64_t first = 0, last; first < e->outputs; first = last) {
        int64_t n = 0; // distinct rows
        for (last = first; last < e->outputs; last++) {
            if (last > first && e->output_rows[last] == e->output_rows[last - 1]) continue;
            if (n == most) break;
            memcpy(a.normed + n++ * d, x + e->output_rows[last] * d, (size_t)d * sizeof(real));
        }
        layer.T = n;
        Linear lm_head = layer_linear(&layer, P_LM_HEAD);
        linear_forward(a.logits, extend_normed(&layer, cache, a.normed, P_NORM), NULL, &lm_head);
#pragma omp parallel for schedule(static) if ((last - first) * V > 4096)
        for (int64_t i = first; i < last; i++) {
            int64_t row = 0;
            for (int64_t j = first + 1; j <= i; j++) row += e->output_rows[j] != e->output_rows[j - 1];
            scores[i] = score_row(a.logits + row * V, e->targets[i], V);
            if (e->draws) scores[i].drawn = draw_row(a.logits + row * V, &e->draws[i], V);
            for (int64_t c = 0; logits && c < V; c++) logits[i * V + c] = (float)a.logits[row * V + c];
        }
    }
}

static inline void extend_swap(real** a, real** b) {
    real* c = *a;
    *a = *b;
    *b = c;
}

// Extends the sequences by their rows, and computes the outputs' scores [outputs] and, unless that is NULL,
// logits [outputs, V].
static inline void cache_extend(Cache* cache, const Extension* e, RowScore* scores, float* logits) {
    const ExtendActs a = extend_acts(cache);
    const int64_t d = cache->layer.config->hidden_size;
    Layer layer = cache->layer;
    layer.T = e->rows;
    cache->pass = e;
    cache->has_angles = false;
    for (int64_t i = 0; i < e->rows; i++)
        memcpy(a.x + i * d, layer_param(&layer, P_EMBEDDINGS) + e->tokens[i] * d, (size_t)d * sizeof(real));
    real *x = a.x, *other = a.x_mid;
    for (int64_t l = 0; l < cache->config->num_hidden_layers; l++) {
        layer_move(&layer, l);
        if (cache->mixers[layer.config->mixer]->recurrent)
            recurrent_extend(&layer, cache, other, x);
        else
            cache->mixers[layer.config->mixer]->extend(&layer, cache, other, x);
        extend_swap(&x, &other);
        if (!layer_param(&layer, P_GATE_PROJ)) continue;
        cache->mlp->forward(&layer, other, extend_normed(&layer, cache, x, P_MLP_NORM), x);
        extend_swap(&x, &other);
    }
    extend_outputs(cache, x, scores, logits);
}
