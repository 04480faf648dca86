/*
All mixers: attention and the baselines, as the parameter table and the FLOPs need them; and what builds the
table of a model, which needs all of them. Called by the trainers and llmc/run.

A new baseline: a folder here, a row below, a row of the mixers of each trainer, and its MixerKind, keys,
class and presets in llmc/config (dev/README.md, "A mixer").
*/
#pragma once

#include "deltanet/params.h"
#include "hgrn2/params.h"
#include "mamba2/params.h"
#include "../model/shapes.h"

static const MixerInfo* const mixer_infos[] = {
    &attention_info,      // MIXER_ATTENTION
    &deltanet_info,       // MIXER_DELTANET
    &hgrn2_info,          // MIXER_HGRN2
    &mamba2_info,         // MIXER_MAMBA2
    &gated_deltanet_info, // MIXER_GATED_DELTANET
};
static_assert(sizeof mixer_infos / sizeof mixer_infos[0] == NUM_MIXERS, "one row a MixerKind");

// FLOPs per token of all mixers, forward and backward, without the 6 per parameter; `hidden` is the share of
// attention's that documents hide.
static inline double config_mixer_flops(const Config* c, int64_t T, double hidden) {
    double flops = 0;
    if (!config_is_stack(c))
        return (1 - hidden) * ((double)c->num_hidden_layers * mixer_infos[c->mixer]->flops(c, T));
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const Config layer = config_layer(c, l);
        flops +=
            (layer.mixer == MIXER_ATTENTION ? 1 - hidden : 1) * mixer_infos[layer.mixer]->flops(&layer, T);
    }
    return flops;
}

// The fraction of attention's FLOPs that is pruned, from that of each layer with attention.
static inline double config_pruned(const Config* c, int64_t T, const double* pruned) {
    double sum = 0, all = 0;
    for (int64_t l = 0, number = 0; l < c->num_hidden_layers; l++) {
        const Config layer = config_layer(c, l);
        if (layer.mixer != MIXER_ATTENTION) continue;
        const double flops = attention_flops(&layer, T);
        sum += flops * pruned[number++];
        all += flops;
    }
    return all > 0 ? sum / all : 0;
}

// Begins a bucket at the next multiple of `align` elements, which also ends the bucket before it.
static inline void params_begin_bucket(ParamTable* t, int64_t align) {
    t->count = (t->count + align - 1) / align * align;
    t->buckets[t->num_buckets++] = t->count;
}

// lm_head is the embedding's row. Its GEMMs on the GPU read and write matmul_padded(V) rows, of which those
// behind the embedding stay 0.
static inline void params_tie_lm_head(ParamTable* t, const Config* c) {
    t->index[P_LM_HEAD] = t->index[P_EMBEDDINGS];
    t->count += (matmul_padded(c->vocab_size) - c->vocab_size) * c->hidden_size;
}

// Builds the table of a checked config, laid out for a number of ranks; free with params_free.
static inline ParamTable params_build_for(const Config* c, int ranks) {
    int64_t V = c->vocab_size, d = c->hidden_size, L = c->num_hidden_layers, I = config_mlp_size(c);
    const int64_t align = (int64_t)PARAM_ALIGN * ranks;
    const MixerInfo* mixer = mixer_infos[c->mixer];
    int64_t numbers[NUM_MIXERS] = {0};
    ParamTable t = {.layers = mixer->layers};
    t.rows = (Param*)xcalloc((size_t)(L + 1) * NUM_PARAM_KINDS, sizeof(Param));
    t.index = (int*)xcalloc((size_t)L * NUM_PARAM_KINDS, sizeof(int));
    t.buckets = (int64_t*)xcalloc((size_t)L + 3, sizeof(int64_t));
    t.by_layer = (LayerTable*)xcalloc((size_t)L, sizeof(LayerTable));
    for (int64_t i = 0; i < L * NUM_PARAM_KINDS; i++) t.index[i] = -1;

    params_begin_bucket(&t, align);
    params_add_matrix(&t, P_EMBEDDINGS, -1, mixer->embeddings, V, d);
    if (c->tie_word_embeddings) params_tie_lm_head(&t, c);
    for (int m = 0; m < NUM_MIXERS; m++)
        if (mixer_infos[m]->add_outside && config_layers_of(c, (MixerKind)m) > 0)
            mixer_infos[m]->add_outside(&t, c);
    for (int64_t l = 0; l < L; l++) {
        LayerTable* layer = &t.by_layer[l];
        layer->config = config_layer(c, l);
        layer->number = numbers[layer->config.mixer]++;
        params_begin_bucket(&t, align);
        params_add_norm(&t, P_MIXER_NORM, l, mixer->norm, d, c->norm_eps);
        mixer_infos[layer->config.mixer]->add_params(&t, &layer->config, l);
        if (I == 0) continue;
        params_add_norm(&t, P_MLP_NORM, l, "mlp_norm.weight", d, c->norm_eps);
        params_add_gate_up(&t, l, I, d, mixer->up_proj);
        params_add_matrix(&t, P_DOWN_PROJ, l, "mlp.down_proj.weight", d, I);
    }
    params_begin_bucket(&t, align);
    params_add_norm(&t, P_NORM, -1, mixer->final_norm, d, c->norm_eps);
    if (!c->tie_word_embeddings) params_add_matrix(&t, P_LM_HEAD, -1, "lm_head.weight", V, d);
    params_begin_bucket(&t, ranks > 1 ? align : 1); // ends the last
    t.num_buckets--;
    for (Param* p = t.rows; p < t.rows + t.num_rows; p++) {
        const Config* config = p->layer < 0 ? c : &t.by_layer[p->layer].config;
        if (mixer_infos[config->mixer]->init) mixer_infos[config->mixer]->init(p, config);
    }
    t.non_embedding = t.parameters - (c->tie_word_embeddings ? 0 : V * d);
    return t;
}

// The table of one rank alone.
static inline ParamTable params_build(const Config* c) { return params_build_for(c, 1); }
