/*
Presets: the models that --model names, a family (the block) and a size, as in fox-pro-125m, each with the
recipe that it trains with. Called by llmc/run/run.h.
*/
#pragma once

#include "config.h"

// What a preset trains with unless options say otherwise. Counts are tokens.
typedef struct {
    int64_t seq_len, batch_tokens, max_tokens, warmup_tokens;
    double lr;
} Recipe;

// Which of a size's shapes a family has. MATRIX: recurrences with heads of 128 channels.
typedef enum { SHAPE_FOX, SHAPE_TRANSFORMER, SHAPE_MATRIX, SHAPE_MAMBA2, NUM_SHAPES } ShapeKind;

typedef struct {
    const char* name;
    MixerKind mixer;
    ShapeKind shape;
    GateType gate;
    bool rope, pro; // pro: QK norm, output norm, output gate, key and value shift
    double hidden_ratio;
    int64_t windows; // a sequence has so many windows; 0: attention without a window
} Family;

static const Family config_families[] = {
    {"fox-pro", MIXER_ATTENTION, SHAPE_FOX, GATE_FULL, false, true, 3.5, 0},
    {"fox-llama", MIXER_ATTENTION, SHAPE_FOX, GATE_FULL, false, false, 4, 0},
    {"transformer-pro", MIXER_ATTENTION, SHAPE_TRANSFORMER, GATE_NONE, true, true, 3.5, 0},
    {"transformer-llama", MIXER_ATTENTION, SHAPE_TRANSFORMER, GATE_NONE, true, false, 4, 0},
    {"transformer-swa", MIXER_ATTENTION, SHAPE_TRANSFORMER, GATE_NONE, true, false, 4, 8},
    {"deltanet", MIXER_DELTANET, SHAPE_MATRIX, GATE_NONE, false, false, 4, 0},
    {"hgrn2", MIXER_HGRN2, SHAPE_MATRIX, GATE_NONE, false, false, 4, 0},
    {"mamba2", MIXER_MAMBA2, SHAPE_MAMBA2, GATE_NONE, false, false, 0, 0},
};

// All presets in words, for --help and messages
#define PRESET_NAMES                                                                                         \
    "fox-pro, fox-llama, transformer-pro, transformer-llama, transformer-swa, deltanet, hgrn2 or mamba2, "   \
    "then -nano, -micro, -125m, -360m or -760m"

typedef struct {
    const char* name;
    int64_t V;
    struct {
        int64_t L, d, heads;
    } shapes[NUM_SHAPES]; // in the order of ShapeKind
    Recipe recipe;        // seq_len, batch_tokens, max_tokens, warmup_tokens, lr
} Size;

// 125m and up: as in the analysis runs of the paper's repository. nano trains on a laptop's CPU in minutes; both
// small ones read bytes.
static const Size config_sizes[] = {
    {"nano", 257, {{4, 128, 2}, {4, 128, 2}, {4, 128, 1}, {8, 128, 4}}, {512, 2048, 2097152, 131072, 2e-3}},
    {"micro",
     257,
     {{8, 320, 5}, {8, 320, 5}, {6, 384, 3}, {16, 320, 10}},
     {1024, 32768, 209715200, 4194304, 2e-3}},
    {"125m",
     50257,
     {{12, 768, 12}, {12, 768, 12}, {12, 768, 6}, {24, 768, 24}},
     {16384, 524288, 2684354560, 268435456, 2e-3}},
    {"360m",
     50257,
     {{24, 1024, 16}, {24, 1024, 16}, {24, 1024, 8}, {48, 1024, 32}},
     {16384, 524288, 7516192768, 268435456, 2e-3}},
    {"760m",
     50257,
     {{24, 1536, 24}, {24, 1536, 12}, {24, 1536, 12}, {48, 1536, 48}},
     {16384, 524288, 16106127360, 268435456, 1e-3}},
};
#define NUM_FAMILIES ((int)(sizeof config_families / sizeof config_families[0]))
#define NUM_SIZES    ((int)(sizeof config_sizes / sizeof config_sizes[0]))

// Fills config and recipe from a preset's name, FAMILY-SIZE.
static inline bool config_preset(Config* c, Recipe* recipe, const char* name, Error* err) {
    for (int i = 0; i < NUM_FAMILIES * NUM_SIZES; i++) {
        const Family* family = &config_families[i / NUM_SIZES];
        const Size* size = &config_sizes[i % NUM_SIZES];
        char preset[64];
        snprintf(preset, sizeof preset, "%s-%s", family->name, size->name);
        if (strcmp(name, preset) != 0) continue;
        bool gated = family->gate != GATE_NONE;
        *c = config_defaults();
        config_set_mixer(c, family->mixer);
        c->vocab_size = size->V;
        c->hidden_size = size->shapes[family->shape].d;
        c->num_hidden_layers = size->shapes[family->shape].L;
        c->num_heads = size->shapes[family->shape].heads;
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
    ShapeKind kind = SHAPE_FOX;
    int best = 0;
    for (int f = 0; f < NUM_FAMILIES; f++)
        if (config_families[f].mixer == c->mixer) kind = config_families[f].shape;
    for (int s = 0; s < NUM_SIZES; s++)
        if (config_sizes[s].shapes[kind].d <= c->hidden_size &&
            config_sizes[s].shapes[kind].L <= c->num_hidden_layers)
            best = s;
    return config_sizes[best].recipe;
}
