/*
The configuration of a model: one struct, the keys of config.json, the classes of models. config_file.h reads
and writes config.json; families.h and presets.h have the models that --model names.

One table below has a row for every key of config.json. Reading and writing the file, `--set KEY=VALUE` and
the range checks all walk it, so a key is described once.
*/
#pragma once

#include <math.h>
#include "../base/common.h"
#include "../base/nearest.h"
#include "../base/numbers.h"
#include "layer_types.h"
#include "rope_scaling.h"

typedef enum { GATE_FULL, GATE_BIAS_ONLY, GATE_FIXED, GATE_NONE } GateType;

// By which bound training and --eval skip blocks: llmc/attention/pruning.cuh's, or the one that ACP's paper
// has, to compare shares with the literature.
typedef enum { PRUNING_OURS, PRUNING_ACP } PruningRule;

typedef struct {
    MixerKind mixer;                // follows from the file's model_type; attention with layer_types
    LayerTypes layer_types;         // each layer's mixer; none: as above
    int64_t kind_heads[NUM_MIXERS]; // with layer_types: heads of the recurrent layers; 0: their family's
    int64_t kind_state_size;        // the same: Mamba-2's N
    int64_t kind_head_dim;          // Gated DeltaNet's head_dim
    int64_t kind_expand_v;          // and expand_v
    int64_t vocab_size;             // V
    int64_t hidden_size;            // d
    int64_t num_hidden_layers;      // L
    int64_t num_heads;              // NH; head size: config_head_size
    int64_t num_kv_heads;           // KVH, heads of keys and values: NH / KVH query heads read each; 0: NH
    int64_t head_dim; // the head size that a file or an option names; 0 once config_check has seen it, but of
                      // Gated DeltaNet, where hidden_size does not imply it
    int64_t expand_v; // Gated DeltaNet: a head's values have so many times the channels of its keys
    int64_t intermediate_size; // I; 0 (null in the file) derives it from hidden_ratio
    double hidden_ratio;       // r in I = 256 ceil(floor(d r 2/3) / 256)
    double initializer_range;  // standard deviation of every matrix at the start
    double norm_eps;           // of every RMSNorm but QK norm's, which is QK_NORM_EPS
    double rope_base;          // angle of channel i at time t: t * rope_base^(-2 i / dh)
    bool use_rope;
    RopeScaling rope_scaling; // not a key of the paper's code: in the file as rope_parameters, if not plain
    bool use_output_gate;
    bool use_output_norm;
    bool qk_norm;
    bool qk_norm_share; // one weight [dh] for all heads instead of [d]
    bool use_k_shift;
    bool use_v_shift;
    int64_t window_size; // W: a token attends to itself and the W - 1 before; 0, null in the file: to all
    GateType fgate_type;
    bool fgate_bias_init;  // "long" initialisation of the gate's bias (always on for a fixed gate)
    double decay_time_min; // its T_min, in tokens
    double decay_time_max; // its T_max, in tokens
    bool use_lower_bound;  // HGRN2, also in stacks: learned lower bounds of the forget gates
    int64_t state_size;    // Mamba-2: N, rows of a head's state
    int64_t chunk_size;    // and the next: of other programs' kernels, kept as they are
    bool residual_in_fp32;
    bool rescale_prenorm_residual; // out_proj starts divided by sqrt(L)
    double time_step_min, time_step_max,
        time_step_floor;          // range of the initial time steps, which only Mamba-2's
                                  // files name
    double log_pruning_tolerance; // ACP's ln eps; NAN, null in the file, prunes nothing
    PruningRule pruning_rule;     // not a key of the paper's code: in the file only if it is PRUNING_ACP
    bool document_reset; // nor is this: no token sees anything before its document; in the file only if on
    bool tie_word_embeddings; // lm_head is the embedding
    int64_t bos_token_id;     // -1 is null
    int64_t eos_token_id;     // end of text: what a document starts with; -1 is null, read as V - 1
} Config;

#define QK_NORM_EPS 1e-5
enum { MAMBA2_STATE_SIZE = 128 };
#define L2_NORM_EPS 1e-6 // the delta rule's: |x| = sqrt(sum x^2 + eps)

// T_min and T_max of a long gate where the file has null: those of ALiBi's slopes
#define CONFIG_DECAY_TIME_MIN 2
#define CONFIG_DECAY_TIME_MAX 256

#define CONFIG_ROPE_BASE_MAX 1e12

// ----------------------------------------------------------------------------
// derived sizes

// The channels of all heads' values: d, with Mamba-2 2 d
static inline int64_t config_inner_size(const Config* c) {
    if (c->mixer == MIXER_GATED_DELTANET) return c->num_heads * c->head_dim * c->expand_v;
    return c->mixer == MIXER_MAMBA2 ? 2 * c->hidden_size : c->hidden_size;
}
// dh, the channels of a head, with Gated DeltaNet of its keys
static inline int64_t config_head_size(const Config* c) {
    return c->mixer == MIXER_GATED_DELTANET ? c->head_dim : config_inner_size(c) / c->num_heads;
}

// KVH, the heads of keys and values
static inline int64_t config_key_heads(const Config* c) {
    return c->num_kv_heads ? c->num_kv_heads : c->num_heads;
}

// I, the width of the MLP
static inline int64_t config_mlp_size(const Config* c) {
    if (c->intermediate_size) return c->intermediate_size;
    int64_t wanted = (int64_t)floor((double)c->hidden_size * c->hidden_ratio * 2 / 3);
    return (wanted + 255) / 256 * 256;
}

// Are the layers of different kinds?
static inline bool config_is_stack(const Config* c) { return c->layer_types.num_runs > 0; }

// The number of layers with a mixer.
static inline int64_t config_layers_of(const Config* c, MixerKind mixer) {
    if (!config_is_stack(c)) return mixer == c->mixer ? c->num_hidden_layers : 0;
    int64_t count = 0;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        count += layer_type(&c->layer_types, l)->mixer == (int)mixer;
    return count;
}
static inline bool config_has_attention(const Config* c) { return config_layers_of(c, MIXER_ATTENTION) > 0; }
// Is every layer attention?
static inline bool config_all_attention(const Config* c) {
    return config_layers_of(c, MIXER_ATTENTION) == c->num_hidden_layers;
}

// Does a layer have RoPE?
static inline bool config_uses_rope(const Config* c) {
    bool rope = !config_is_stack(c) && c->use_rope;
    for (int i = 0; i < c->layer_types.num_runs; i++) {
        const LayerRun* run = &c->layer_types.runs[i];
        rope |= run->mixer == MIXER_ATTENTION && (run->rope < 0 ? c->use_rope : run->rope);
    }
    return rope;
}

// Does a layer have a window?
static inline bool config_has_window(const Config* c) {
    bool window = !config_is_stack(c) && c->window_size;
    for (int i = 0; i < c->layer_types.num_runs; i++) {
        const LayerRun* run = &c->layer_types.runs[i];
        window |= run->mixer == MIXER_ATTENTION && (run->window < 0 ? c->window_size : run->window);
    }
    return window;
}

// Is there a forget gate of any kind?
static inline bool config_has_gate(const Config* c) { return c->fgate_type != GATE_NONE; }
// Does attention leave out blocks whose weights underflow under its gates? In training the CPU trainer, the
// reference, never does.
static inline bool config_prunes(const Config* c) {
    return config_has_gate(c) && !isnan(c->log_pruning_tolerance) && config_has_attention(c);
}

// Does the GPU's attention leave out blocks: those, or others' documents?
static inline bool config_has_bounds(const Config* c) {
    return config_prunes(c) || (c->document_reset && config_has_attention(c));
}

// The id that separates documents: eos_token_id, or the last one.
static inline int64_t config_end_of_text(const Config* c) {
    return c->eos_token_id >= 0 ? c->eos_token_id : c->vocab_size - 1;
}

// The name in config.json's architectures: a plain Transformer has a class of its own in the paper's code.
static inline bool config_is_plain_transformer(const Config* c) {
    return c->mixer == MIXER_ATTENTION && !config_is_stack(c) && c->fgate_type == GATE_NONE && c->use_rope &&
           !c->qk_norm && !c->use_output_norm && !c->use_output_gate && !c->use_k_shift && !c->use_v_shift;
}

// Bias of the forget gate of head i of NH under "long" initialisation: b = -log(expm1(1 / T_i)), so that
// logsigmoid(b) = -1 / T_i and the head forgets by 1/e in T_i tokens; T_i log-spaced from T_min to T_max.
static inline double config_long_gate_bias(const Config* c, int64_t head) {
    double step = c->num_heads > 1 ? (double)head / (double)(c->num_heads - 1) : 0;
    double decay_time = c->decay_time_min * pow(c->decay_time_max / c->decay_time_min, step);
    const double rate = 1 / decay_time;
    return rate < 500 ? -log(expm1(rate)) : -rate; // the same in double; expm1 overflows above 709
}

// ----------------------------------------------------------------------------
// the table of keys

typedef enum {
    KEY_INT,   // int64_t
    KEY_REAL,  // double
    KEY_WORD,  // a JSON literal out of `choices`: null, false or true
    KEY_TEXT,  // a JSON string out of `choices`
    KEY_ROPE,  // RopeScaling, an object in JSON
    KEY_LAYERS // LayerTypes, a list in JSON
} KeyType;

typedef struct {
    const char* name;
    KeyType type;
    size_t offset, bytes; // of the field in Config; bytes 0: none, for a key with one value
    double min, max;      // of a number
    bool nullable;        // null stands for null_value
    double null_value;
    const char* choices[4]; // values 0, 1, ... of the field
    MixerKind mixer;        // whose models have the key
} ConfigKey;

// NUMBER(type, field, least, most)  NULLABLE(type, field, least, most, null value)
// NAMED(key, type, field, least, most), where the key is not the field's name
// OF_KIND(key, field, most) of the recurrent layers of a stack  FIXED(type, key, only value)
// BOOL(field)  CHOICE(type, key, field, values ...)
// clang-format off
#define CONFIG_FIELD(name) offsetof(Config, name), sizeof(((Config*)0)->name)
#define NUMBER(type, name, min, max)    {#name, type, CONFIG_FIELD(name), min, max, false, 0, {NULL}, OF},
#define NAMED(key, type, name, min, max) {key, type, CONFIG_FIELD(name), min, max, false, 0, {NULL}, OF},
#define NULLABLE(type, name, min, max, null) \
    {#name, type, CONFIG_FIELD(name), min, max, true, null, {NULL}, OF},
#define FIXED(type, key, value)         {key, type, 0, 0, 0, 0, false, 0, {value}, OF},
#define CHOICE(type, key, name, ...)    {key, type, CONFIG_FIELD(name), 0, 0, false, 0, {__VA_ARGS__}, OF},
#define BOOL(name)                      CHOICE(KEY_WORD, #name, name, "false", "true")
#define ROPE(name)                      {#name, KEY_ROPE, CONFIG_FIELD(name), 0, 0, true, 0, {NULL}, OF},
#define OF_KIND(key, name, max)         {key, KEY_INT, CONFIG_FIELD(name), 1, max, true, 0, {NULL}, OF},
#define LAYERS(name)                    {#name, KEY_LAYERS, CONFIG_FIELD(name), 0, 0, true, 0, {NULL}, OF},

// The keys of each mixer's models in turn, in the order in which they are written.
static const ConfigKey config_keys[] = {
#define OF MIXER_ATTENTION
    NUMBER(KEY_INT, vocab_size, 2, 1 << 24)
    NUMBER(KEY_INT, hidden_size, 1, 1 << 16)
    NUMBER(KEY_REAL, hidden_ratio, 0.01, 64)
    NULLABLE(KEY_INT, intermediate_size, 1, 1 << 20, 0)
    NUMBER(KEY_INT, num_hidden_layers, 1, 1024)
    NUMBER(KEY_INT, num_heads, 1, 1024)
    NULLABLE(KEY_INT, num_kv_heads, 1, 1024, 0)
    LAYERS(layer_types)
    OF_KIND("deltanet_num_heads", kind_heads[MIXER_DELTANET], 1024)
    OF_KIND("hgrn2_num_heads", kind_heads[MIXER_HGRN2], 1024)
    CHOICE(KEY_WORD, "hgrn2_use_lower_bound", use_lower_bound, "false", "true")
    OF_KIND("mamba2_num_heads", kind_heads[MIXER_MAMBA2], 1024)
    OF_KIND("mamba2_state_size", kind_state_size, 1 << 16)
    OF_KIND("gated_deltanet_num_heads", kind_heads[MIXER_GATED_DELTANET], 1024)
    OF_KIND("gated_deltanet_head_dim", kind_head_dim, 1 << 12)
    OF_KIND("gated_deltanet_expand_v", kind_expand_v, 16)
    FIXED(KEY_TEXT, "hidden_act", "swish")
    NULLABLE(KEY_INT, window_size, 0, 1 << 24, 0)
    FIXED(KEY_WORD, "max_position_embeddings", "null")
    NUMBER(KEY_REAL, initializer_range, 0, 10)
    NUMBER(KEY_REAL, norm_eps, 0, 1)
    NUMBER(KEY_REAL, rope_base, 1, CONFIG_ROPE_BASE_MAX)
    BOOL(use_rope)
    ROPE(rope_scaling)
    BOOL(use_output_gate)
    FIXED(KEY_TEXT, "ogate_act", "sigmoid")
    BOOL(use_output_norm)
    BOOL(qk_norm)
    CHOICE(KEY_WORD, "qk_norm_share_param_across_head", qk_norm_share, "false", "true")
    BOOL(use_k_shift)
    BOOL(use_v_shift)
    CHOICE(KEY_TEXT, "fgate_type", fgate_type, "full", "bias_only", "fixed", "none") // GateType
    BOOL(fgate_bias_init)
    NULLABLE(KEY_REAL, decay_time_min, 1e-3, 1e12, CONFIG_DECAY_TIME_MIN)
    NULLABLE(KEY_REAL, decay_time_max, 1e-3, 1e12, CONFIG_DECAY_TIME_MAX)
    NULLABLE(KEY_REAL, log_pruning_tolerance, -1e4, 0, NAN)
    CHOICE(KEY_TEXT, "pruning_rule", pruning_rule, "ours", "acp") // PruningRule
    BOOL(document_reset)
    BOOL(tie_word_embeddings)
    NULLABLE(KEY_INT, bos_token_id, 0, (1 << 24) - 1, -1)
    NULLABLE(KEY_INT, eos_token_id, 0, (1 << 24) - 1, -1)
#undef OF

#define SIZES                                                                                                \
    NUMBER(KEY_INT, vocab_size, 2, 1 << 24)                                                                  \
    NUMBER(KEY_INT, hidden_size, 1, 1 << 16)                                                                 \
    NUMBER(KEY_INT, num_hidden_layers, 1, 1024)                                                              \
    NUMBER(KEY_INT, num_heads, 1, 1024)
#define MLP_AND_NORM                                                                                         \
    NUMBER(KEY_REAL, hidden_ratio, 0.01, 64)                                                                 \
    NULLABLE(KEY_INT, intermediate_size, 1, 1 << 20, 0)                                                      \
    FIXED(KEY_TEXT, "hidden_act", "swish")                                                                   \
    NUMBER(KEY_REAL, norm_eps, 0, 1)
#define ENDS                                                                                                 \
    NUMBER(KEY_REAL, initializer_range, 0, 10)                                                               \
    BOOL(document_reset)                                                                                     \
    BOOL(tie_word_embeddings)                                                                                \
    NULLABLE(KEY_INT, bos_token_id, 0, (1 << 24) - 1, -1)                                                    \
    NULLABLE(KEY_INT, eos_token_id, 0, (1 << 24) - 1, -1)

#define OF MIXER_DELTANET
    SIZES
    FIXED(KEY_TEXT, "attn_mode", "chunk")
    FIXED(KEY_WORD, "expand_k", "1")
    FIXED(KEY_WORD, "expand_v", "1")
    FIXED(KEY_WORD, "use_gate", "false")
    FIXED(KEY_WORD, "use_short_conv", "true")
    FIXED(KEY_WORD, "conv_size", "4")
    FIXED(KEY_WORD, "use_beta", "true")
    FIXED(KEY_WORD, "use_output_norm", "true")
    FIXED(KEY_TEXT, "qk_norm", "l2")
    FIXED(KEY_TEXT, "qk_activation", "silu")
    MLP_AND_NORM
    ENDS
#undef OF

#define OF MIXER_HGRN2
    SIZES
    FIXED(KEY_TEXT, "attn_mode", "chunk")
    NAMED("expand_ratio", KEY_INT, head_dim, 1, 1 << 16)
    FIXED(KEY_WORD, "use_short_conv", "false")
    BOOL(use_lower_bound)
    MLP_AND_NORM
    FIXED(KEY_WORD, "elementwise_affine", "true")
    ENDS
#undef OF

#define OF MIXER_MAMBA2
    SIZES
    NAMED("head_dim", KEY_INT, head_dim, 1, 1 << 17)
    NUMBER(KEY_INT, state_size, 1, 1 << 16)
    FIXED(KEY_WORD, "n_groups", "1")
    FIXED(KEY_WORD, "expand", "2")
    FIXED(KEY_WORD, "conv_kernel", "4")
    FIXED(KEY_WORD, "use_bias", "false")
    FIXED(KEY_WORD, "use_conv_bias", "true")
    FIXED(KEY_TEXT, "hidden_act", "silu")
    NAMED("layer_norm_epsilon", KEY_REAL, norm_eps, 0, 1)
    BOOL(residual_in_fp32)
    NUMBER(KEY_REAL, time_step_min, 1e-9, 1e3)
    NUMBER(KEY_REAL, time_step_max, 1e-9, 1e3)
    NUMBER(KEY_REAL, time_step_floor, 1e-9, 1e3)
    BOOL(rescale_prenorm_residual)
    NUMBER(KEY_INT, chunk_size, 1, 1 << 16)
    ENDS
#undef OF

// flash-linear-attention's names
#define OF MIXER_GATED_DELTANET
    SIZES
    FIXED(KEY_TEXT, "attn_mode", "chunk")
    NAMED("head_dim", KEY_INT, head_dim, 1, 1 << 12)
    NUMBER(KEY_INT, expand_v, 1, 16)
    FIXED(KEY_WORD, "num_v_heads", "null")
    FIXED(KEY_WORD, "use_gate", "true")
    FIXED(KEY_WORD, "use_short_conv", "true")
    FIXED(KEY_WORD, "conv_size", "4")
    FIXED(KEY_WORD, "allow_neg_eigval", "false")
    FIXED(KEY_WORD, "attn", "null")
    MLP_AND_NORM
    ENDS
#undef OF
};
// clang-format on
#define NUM_CONFIG_KEYS ((int)(sizeof config_keys / sizeof config_keys[0]))

#undef CONFIG_FIELD
#undef NUMBER
#undef NAMED
#undef NULLABLE
#undef FIXED
#undef CHOICE
#undef BOOL
#undef ROPE
#undef LAYERS
#undef OF_KIND
#undef SIZES
#undef MLP_AND_NORM
#undef ENDS

// Does the model have this key?
static inline bool config_has_key(const Config* c, const ConfigKey* key) { return key->mixer == c->mixer; }

// Is the key of the recurrent layers of a stack? 0 is then their family's.
static inline bool config_key_of_kind(const ConfigKey* key) {
    const size_t first = offsetof(Config, kind_heads), last = offsetof(Config, kind_expand_v);
    return key->mixer == MIXER_ATTENTION && ((key->offset >= first && key->offset <= last) ||
                                             key->offset == offsetof(Config, use_lower_bound));
}

// Is the key of attention alone, neither of a recurrent family nor of a stack's recurrent layers?
static inline bool config_key_of_attention(const ConfigKey* key) {
    bool alone = key->type != KEY_LAYERS && !config_key_of_kind(key);
    for (int i = 0; i < NUM_CONFIG_KEYS; i++)
        alone &= config_keys[i].mixer == MIXER_ATTENTION || config_keys[i].offset != key->offset;
    return alone;
}

// Sets a key from its text, as config_set. `name` is what messages call it.
static inline bool config_set_key(Config* c, const char* where, const ConfigKey* key, const char* name,
                                  const char* text, Error* err) {
    void* field = (char*)c + key->offset;
    if (key->type == KEY_ROPE) return rope_scaling_parse((RopeScaling*)field, where, text, err);
    if (key->type == KEY_LAYERS) return layer_types_parse((LayerTypes*)field, where, text, err);
    bool null = strcmp(text, "null") == 0 && key->nullable;
    if (key->type == KEY_INT) {
        int64_t whole = (int64_t)key->null_value;
        if (!null && !parse_whole_within(text, (int64_t)key->min, (int64_t)key->max, &whole))
            return fail(err, "%s: %s=%s is not a whole number from %.0f to %.0f", where, name, text, key->min,
                        key->max);
        *(int64_t*)field = whole;
        return true;
    }
    if (key->type == KEY_REAL) {
        double number = key->null_value;
        if (!null && (!parse_number(text, &number) || !(number >= key->min && number <= key->max)))
            return fail(err, "%s: %s=%s is not a number from %g to %g", where, name, text, key->min,
                        key->max);
        *(double*)field = number;
        return true;
    }
    char supported[64] = "";
    for (int i = 0; i < 4 && key->choices[i]; i++) {
        if (strcmp(text, key->choices[i]) == 0) {
            memcpy(field, &i, key->bytes); // little-endian: a bool is the first byte
            return true;
        }
        strcat(strcat(supported, i ? ", " : ""), key->choices[i]);
    }
    return fail(err, "%s: %s=%s is %s %s", where, name, text, key->bytes ? "none of" : "not supported, only",
                supported);
}

// Sets one key from its text, as `--set KEY=VALUE` has it and as config.json's values are printed. `where`
// names the file or option in messages.
static inline bool config_set(Config* c, const char* where, const char* name, const char* text, Error* err) {
    const ConfigKey* key = NULL;
    char hint[2 * NEAREST_BYTES];
    Nearest near = nearest_to(name, strlen(name));
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) {
        if (!config_has_key(c, &config_keys[i])) continue;
        if (strcmp(config_keys[i].name, name) == 0) key = &config_keys[i];
        nearest_try(&near, config_keys[i].name);
    }
    if (!key && strcmp(name, "layer_types") == 0)
        return fail(err,
                    "%s: layer_types: all layers of this model are %s; begin with a model of attention, as "
                    "--model fox-pro-nano",
                    where, mixer_names[c->mixer]);
    if (!key)
        return fail(err, "%s: no config key is called '%s'%s; --dry-run config prints those in config.json",
                    where, name, nearest_hint(&near, hint, ""));
    return config_set_key(c, where, key, name, text, err);
}

// Does the gate's bias start from config_long_gate_bias?
static inline bool config_long_gate(const Config* c) { return config_has_gate(c) && c->fgate_bias_init; }

// ----------------------------------------------------------------------------
// defaults

// What a key has when nothing sets it: the defaults of the paper's code, which are those of fox-llama.
static inline Config config_defaults(void) {
    Config c;
    memset(&c, 0, sizeof c);
    c.hidden_ratio = 4;
    c.initializer_range = 0.02;
    c.norm_eps = 1e-6;
    c.rope_base = 500000;
    c.fgate_type = GATE_FULL;
    c.decay_time_min = CONFIG_DECAY_TIME_MIN;
    c.decay_time_max = CONFIG_DECAY_TIME_MAX;
    c.log_pruning_tolerance = NAN;
    c.bos_token_id = c.eos_token_id = -1;
    return c;
}

// The mixer that models of a file have, and what follows from it. The defaults above are attention's.
static inline void config_set_mixer(Config* c, MixerKind mixer) {
    c->mixer = mixer;
    if (mixer == MIXER_ATTENTION) return;
    c->fgate_type = GATE_NONE;
    c->time_step_min = 1e-3;
    c->time_step_max = 0.1;
    c->time_step_floor = 1e-4;
    if (mixer == MIXER_GATED_DELTANET) c->head_dim = 256, c->expand_v = 2;
    if (mixer != MIXER_MAMBA2) return;
    c->hidden_ratio = 0; // no MLP
    c->norm_eps = 1e-5;
    c->state_size = MAMBA2_STATE_SIZE;
    c->chunk_size = 256;
    c->residual_in_fp32 = c->rescale_prenorm_residual = true;
}

// The model as layer l sees it: with its mixer, window, RoPE and heads. All layers of a stack have the
// model's MLP and its norms' eps.
static inline Config config_layer(const Config* c, int64_t l) {
    Config layer = *c;
    if (!config_is_stack(c)) return layer;
    for (LayerRun* run = layer.layer_types.runs; run < layer.layer_types.runs + layer.layer_types.num_runs;
         run++) {
        if (run->window < 0) run->window = c->window_size;
        if (run->rope < 0) run->rope = c->use_rope;
    }
    const LayerRun* type = layer_type(&layer.layer_types, l);
    if (type->mixer == MIXER_ATTENTION) {
        layer.window_size = type->window;
        layer.use_rope = type->rope;
        return layer;
    }
    config_set_mixer(&layer, (MixerKind)type->mixer);
    layer.hidden_ratio = c->hidden_ratio;
    layer.norm_eps = c->norm_eps;
    layer.num_heads = c->kind_heads[type->mixer];
    layer.num_kv_heads = layer.window_size = 0;
    layer.use_rope = false;
    layer.state_size = c->kind_state_size;
    layer.head_dim = type->mixer == MIXER_GATED_DELTANET ? c->kind_head_dim : 0;
    layer.expand_v = c->kind_expand_v;
    return layer;
}

// ----------------------------------------------------------------------------
// classes of models

// A model class of the paper's code, or Gated DeltaNet's of flash-linear-attention.
typedef struct {
    const char *model_type, *architecture;
    MixerKind mixer;
    bool plain, stack; // as config_is_plain_transformer and config_is_stack
} ModelClass;

static const ModelClass config_classes[] = {
    {"forgetting_transformer-project_fox", "ForgettingTransformerForCausalLM", MIXER_ATTENTION, false, false},
    {"transformer-project_fox", "TransformerForCausalLM", MIXER_ATTENTION, true, false},
    {"delta_net-project_fox", "DeltaNetForCausalLM", MIXER_DELTANET, false, false},
    {"hgrn2-project_fox", "HGRN2ForCausalLM", MIXER_HGRN2, false, false},
    {"mamba2-project_fox", "Mamba2ForCausalLM", MIXER_MAMBA2, false, false},
    {"gated_deltanet", "GatedDeltaNetForCausalLM", MIXER_GATED_DELTANET, false, false},
    {"fox_stack", "FoxStackForCausalLM", MIXER_ATTENTION, false, true},
};
#define NUM_CLASSES ((int)(sizeof config_classes / sizeof config_classes[0]))

static inline const ModelClass* config_class(const Config* c) {
    int i = 0;
    while (config_classes[i].mixer != c->mixer || config_classes[i].plain != config_is_plain_transformer(c) ||
           config_classes[i].stack != config_is_stack(c))
        i++;
    return &config_classes[i];
}
