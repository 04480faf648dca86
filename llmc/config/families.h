/*
Families of presets: the blocks and sizes of the models that --model names FAMILY-SIZE. presets.h makes
configs of them, config_check.h takes the heads of a stack's recurrent layers from them.
*/
#pragma once

#include "config.h"

// Layers, width and heads of a model.
typedef struct {
    int64_t L, d, heads;
} ModelShape;

enum { NUM_SIZES = 5 }; // nano, micro, 125m, 360m, 760m: presets.h

// The presets of one block, FAMILY-SIZE.
typedef struct {
    const char* name;
    MixerKind mixer;
    GateType gate;
    bool rope, pro; // pro: QK norm, output norm, output gate, key and value shift
    double hidden_ratio;
    int64_t windows; // a sequence has so many windows; 0: attention without a window
    ModelShape shapes[NUM_SIZES];
    const char* layers; // layer_types; NULL: all are of the mixer
} Family;

// Heads of 128 channels, for matrix states: MATRIX
#define FOX                                                                                                  \
    {                                                                                                        \
        {4, 128, 2}, {8, 320, 5}, {12, 768, 12}, {24, 1024, 16}, { 24, 1536, 24 }                            \
    }
#define TRANSFORMER                                                                                          \
    {                                                                                                        \
        {4, 128, 2}, {8, 320, 5}, {12, 768, 12}, {24, 1024, 16}, { 24, 1536, 12 }                            \
    }
#define MATRIX                                                                                               \
    {                                                                                                        \
        {4, 128, 1}, {6, 384, 3}, {12, 768, 6}, {24, 1024, 8}, { 24, 1536, 12 }                              \
    }
#define MAMBA2                                                                                               \
    {                                                                                                        \
        {8, 128, 4}, {16, 320, 10}, {24, 768, 24}, {48, 1024, 32}, { 48, 1536, 48 }                          \
    }
#define GATED_DELTANET                                                                                       \
    {                                                                                                        \
        {3, 128, 1}, {6, 384, 2}, {11, 768, 4}, {21, 1024, 6}, { 21, 1536, 9 }                               \
    }

// Three layers with the model's window, one without: LOCAL
#define LOCAL "attention*3,attention:window=0"

// name, mixer, gate, rope, pro, hidden_ratio, windows, shapes, layers
static const Family config_families[] = {
    {"fox-pro", MIXER_ATTENTION, GATE_FULL, false, true, 3.5, 0, FOX, NULL},
    {"fox-llama", MIXER_ATTENTION, GATE_FULL, false, false, 4, 0, FOX, NULL},
    {"transformer-pro", MIXER_ATTENTION, GATE_NONE, true, true, 3.5, 0, TRANSFORMER, NULL},
    {"transformer-llama", MIXER_ATTENTION, GATE_NONE, true, false, 4, 0, TRANSFORMER, NULL},
    {"transformer-swa", MIXER_ATTENTION, GATE_NONE, true, false, 4, 8, TRANSFORMER, NULL},
    {"deltanet", MIXER_DELTANET, GATE_NONE, false, false, 4, 0, MATRIX, NULL},
    {"hgrn2", MIXER_HGRN2, GATE_NONE, false, false, 4, 0, MATRIX, NULL},
    {"mamba2", MIXER_MAMBA2, GATE_NONE, false, false, 0, 0, MAMBA2, NULL},
    {"gated-deltanet", MIXER_GATED_DELTANET, GATE_NONE, false, false, 4, 0, GATED_DELTANET, NULL},
    {"fox-gdn", MIXER_ATTENTION, GATE_FULL, false, true, 3.5, 0, FOX, "gated_deltanet*3,attention"},
    {"samba2", MIXER_ATTENTION, GATE_NONE, true, false, 4, 8, TRANSFORMER, "mamba2,attention"},
    {"fox-pro-local", MIXER_ATTENTION, GATE_FULL, false, true, 3.5, 8, FOX, LOCAL},
    {"transformer-pro-local", MIXER_ATTENTION, GATE_NONE, true, true, 3.5, 8, TRANSFORMER, LOCAL},
};
#define NUM_FAMILIES ((int)(sizeof config_families / sizeof config_families[0]))

// Heads that a family with the mixer has at width d: in proportion to its largest preset.
static inline int64_t config_family_heads(MixerKind mixer, int64_t d) {
    int f = 0;
    while (config_families[f].mixer != mixer) f++;
    const ModelShape* largest = &config_families[f].shapes[NUM_SIZES - 1];
    int64_t heads = d * largest->heads / largest->d;
    if (heads < 1) heads = 1;
    while (mixer != MIXER_GATED_DELTANET && d % heads != 0) heads++; // whose heads need not have all channels
    return heads;
}

#undef FOX
#undef TRANSFORMER
#undef MATRIX
#undef MAMBA2
#undef GATED_DELTANET
#undef LOCAL

// All presets in words, for --help and messages
#define PRESET_NAMES                                                                                         \
    "fox-pro, fox-llama, transformer-pro, transformer-llama, transformer-swa, deltanet, gated-deltanet, "    \
    "hgrn2, mamba2, fox-gdn, samba2, fox-pro-local or transformer-pro-local, then -nano, -micro, -125m, "    \
    "-360m or -760m"
