/*
Presets: the models that --model names, a family (the block: config.h) and a size, as in fox-pro-125m, each
with the recipe that it trains with. Called by llmc/run/run.h.
*/
#pragma once

#include "config.h"

// What a preset trains with unless options say otherwise. Counts are tokens.
typedef struct {
    int64_t seq_len, batch_tokens, max_tokens, warmup_tokens;
    double lr;
} Recipe;

typedef struct {
    const char* name;
    int64_t V;
    Recipe recipe; // seq_len, batch_tokens, max_tokens, warmup_tokens, lr
} Size;

// 125m and up: as in the analysis runs of the paper's repository. nano trains on a laptop's CPU in minutes;
// both small ones read bytes.
static const Size config_sizes[NUM_SIZES] = {
    {"nano", 257, {512, 2048, 2097152, 131072, 2e-3}},
    {"micro", 257, {1024, 32768, 209715200, 4194304, 2e-3}},
    {"125m", 50257, {16384, 524288, 2684354560, 268435456, 2e-3}},
    {"360m", 50257, {16384, 524288, 7516192768, 268435456, 2e-3}},
    {"760m", 50257, {16384, 524288, 16106127360, 268435456, 1e-3}},
};

// Fills config and recipe from a preset's name, FAMILY-SIZE.
static inline bool config_preset(Config* c, Recipe* recipe, const char* name, Error* err) {
    for (int i = 0; i < NUM_FAMILIES * NUM_SIZES; i++) {
        const Family* family = &config_families[i / NUM_SIZES];
        const Size* size = &config_sizes[i % NUM_SIZES];
        const ModelShape* shape = &family->shapes[i % NUM_SIZES];
        char preset[64];
        snprintf(preset, sizeof preset, "%s-%s", family->name, size->name);
        if (strcmp(name, preset) != 0) continue;
        bool gated = family->gate != GATE_NONE;
        *c = config_defaults();
        config_set_mixer(c, family->mixer);
        c->vocab_size = size->V;
        c->hidden_size = shape->d;
        c->num_hidden_layers = shape->L;
        c->num_heads = shape->heads;
        c->hidden_ratio = family->hidden_ratio;
        c->use_rope = family->rope;
        c->use_output_gate = c->use_output_norm = c->qk_norm = c->use_k_shift = c->use_v_shift = family->pro;
        c->fgate_type = family->gate;
        c->log_pruning_tolerance = gated ? -10 : NAN;
        c->bos_token_id = c->eos_token_id = size->V - 1;
        *recipe = size->recipe;
        c->window_size = family->windows ? recipe->seq_len / family->windows : 0;
        return true;
    }
    return fail(err, "--model %s: no such preset; a preset is one of " PRESET_NAMES, name);
}

// The recipe that a model of unknown origin trains with: that of the largest preset that is neither wider nor
// deeper.
static inline Recipe config_nearest_recipe(const Config* c) {
    const ModelShape* shapes = config_families[0].shapes;
    int best = 0;
    for (int f = 0; f < NUM_FAMILIES; f++)
        if (config_families[f].mixer == c->mixer) shapes = config_families[f].shapes;
    for (int s = 0; s < NUM_SIZES; s++)
        if (shapes[s].d <= c->hidden_size && shapes[s].L <= c->num_hidden_layers) best = s;
    return config_sizes[best].recipe;
}
