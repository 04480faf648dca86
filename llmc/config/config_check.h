/*
What no single key of a config can tell: that all fit together, and what one implies for another. Called by
config_file.h and llmc/run/ once every key is set.
*/
#pragma once

#include "families.h"

// Checks rope_scaling, and makes a rope_base of ntk.
static inline bool config_check_rope(Config* c, const char* where, Error* err) {
    const RopeScaling scaling = c->rope_scaling;
    const double dh = (double)config_head_size(c);
    if (scaling.type == ROPE_PLAIN) return true;
    if (!config_uses_rope(c))
        return fail(err,
                    "%s: rope_scaling: no layer has RoPE: set use_rope=true, or attention:rope in "
                    "layer_types, or leave it out",
                    where);
    if (scaling.type == ROPE_YARN && scaling.length == 0)
        return fail(err, "%s: rope_scaling: which length was the model trained at? give yarn:FACTOR:LENGTH",
                    where);
    if (scaling.type == ROPE_YARN && c->rope_base <= 1) // rotation_pair divides by its logarithm
        return fail(err, "%s: rope_scaling: yarn needs a rope_base above 1", where);
    if (scaling.type != ROPE_NTK) return true;
    if (dh < 4) return fail(err, "%s: rope_scaling: ntk needs heads of 4 channels or more", where);
    c->rope_base *= pow(scaling.factor, dh / (dh - 2));
    if (c->rope_base > CONFIG_ROPE_BASE_MAX)
        return fail(err, "%s: rope_scaling=ntk:%g makes a rope_base of %.2g, which may be %g at most", where,
                    scaling.factor, c->rope_base, CONFIG_ROPE_BASE_MAX);
    c->rope_scaling.type = ROPE_PLAIN;
    return true;
}

// Sizes of the recurrent layers of a stack, but for their heads, and their family's.
static const struct {
    MixerKind mixer;
    size_t offset; // of the field in Config
    const char* key;
    int64_t of_family;
} config_kind_sizes[] = {
    {MIXER_MAMBA2, offsetof(Config, kind_state_size), "mamba2_state_size", MAMBA2_STATE_SIZE},
    {MIXER_GATED_DELTANET, offsetof(Config, kind_head_dim), "gated_deltanet_head_dim", 128},
    {MIXER_GATED_DELTANET, offsetof(Config, kind_expand_v), "gated_deltanet_expand_v", 2},
};

// Checks layer_types and the sizes of its recurrent layers, which where they are not set get those of their
// family.
static inline bool config_check_layers(Config* c, const char* where, Error* err) {
    if (!layer_types_check(&c->layer_types, where, c->num_hidden_layers, err)) return false;
    for (int m = MIXER_ATTENTION + 1; m < NUM_MIXERS; m++) {
        const bool has = config_is_stack(c) && config_layers_of(c, (MixerKind)m) > 0;
        int64_t* heads = &c->kind_heads[m];
        if (!has && *heads)
            return fail(err, "%s: layer_types has no %s layer, but %s_num_heads is set", where,
                        mixer_names[m], mixer_names[m]);
        if (has && *heads == 0) *heads = config_family_heads((MixerKind)m, c->hidden_size);
    }
    if (c->use_lower_bound && c->mixer == MIXER_ATTENTION && c->kind_heads[MIXER_HGRN2] == 0)
        return fail(err, "%s: layer_types has no hgrn2 layer, but hgrn2_use_lower_bound is set", where);
    for (size_t i = 0; i < sizeof config_kind_sizes / sizeof config_kind_sizes[0]; i++) {
        const MixerKind kind = config_kind_sizes[i].mixer;
        int64_t* size = (int64_t*)((char*)c + config_kind_sizes[i].offset);
        if (*size && c->kind_heads[kind] == 0)
            return fail(err, "%s: layer_types has no %s layer, but %s is set", where, mixer_names[kind],
                        config_kind_sizes[i].key);
        if (*size == 0 && c->kind_heads[kind]) *size = config_kind_sizes[i].of_family;
    }
    for (int m = MIXER_ATTENTION + 1; m < NUM_MIXERS; m++) {
        const int64_t heads = c->kind_heads[m],
                      channels = m == MIXER_MAMBA2 ? 2 * c->hidden_size : c->hidden_size;
        if (heads && m != MIXER_GATED_DELTANET && channels % heads != 0)
            return fail(err, "%s: %s_num_heads %lld does not divide the %s of the layers", where,
                        mixer_names[m], (long long)heads, counted(channels, "channel").text);
    }
    return true;
}

// Checks the sizes of heads. heads, key_heads: what the file calls their numbers.
static inline bool config_check_heads(const Config* c, const char* where, const char* heads,
                                      const char* key_heads, Error* err) {
    if (config_inner_size(c) % c->num_heads != 0)
        return fail(err, "%s: hidden_size %lld is not a multiple of %s %lld", where,
                    (long long)c->hidden_size, heads, (long long)c->num_heads);
    if (c->num_heads % config_key_heads(c) != 0)
        return fail(err, "%s: %s %lld does not divide %s %lld", where, key_heads, (long long)c->num_kv_heads,
                    heads, (long long)c->num_heads);
    if (c->head_dim && c->head_dim != config_head_size(c))
        return fail(err, "%s: heads of %s, but hidden_size and %s give %lld", where,
                    counted(c->head_dim, "channel").text, heads, (long long)config_head_size(c));
    return true;
}

// Checks that the keys fit together, and settles what one implies: a fixed gate
// always has the long initialisation. Where that is off, decay times mean nothing, and the paper's code
// insists on null.
static inline bool config_check(Config* c, const char* where, Error* err) {
    if (!config_check_layers(c, where, err)) return false;
    if (c->fgate_type == GATE_FIXED) c->fgate_bias_init = true;
    if (!config_long_gate(c) &&
        (c->decay_time_min != CONFIG_DECAY_TIME_MIN || c->decay_time_max != CONFIG_DECAY_TIME_MAX))
        return fail(err, "%s: decay_time_min and decay_time_max need a gate with fgate_bias_init=true",
                    where);
    if (!config_check_heads(c, where, "num_heads", "num_kv_heads", err)) return false;
    // the paper's code writes the number of heads here when every head has keys and values of its own
    if (c->num_kv_heads == c->num_heads) c->num_kv_heads = 0;
    if (c->mixer != MIXER_GATED_DELTANET) c->head_dim = 0;
    if (config_mlp_size(c) < 1 && c->mixer != MIXER_MAMBA2)
        return fail(err, "%s: hidden_ratio %g gives an MLP of width 0; set intermediate_size", where,
                    c->hidden_ratio);
    if (config_uses_rope(c) && config_head_size(c) % 2 != 0)
        return fail(err, "%s: RoPE rotates pairs of channels, but the head size %lld is odd", where,
                    (long long)config_head_size(c));
    if (!config_check_rope(c, where, err)) return false;
    if (c->eos_token_id >= c->vocab_size || c->bos_token_id >= c->vocab_size)
        return fail(err, "%s: bos_token_id or eos_token_id is not below vocab_size %lld", where,
                    (long long)c->vocab_size);
    if (c->time_step_max < c->time_step_min)
        return fail(err, "%s: time_step_max %g is below time_step_min %g", where, c->time_step_max,
                    c->time_step_min);
    if (c->decay_time_max < c->decay_time_min)
        return fail(err, "%s: decay_time_max %g is below decay_time_min %g", where, c->decay_time_max,
                    c->decay_time_min);
    return true;
}
