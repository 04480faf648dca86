/*
The model variants that gradcheck.c, test_model.c and test_fox.cu run: the families; each switch alone, turned
on in a LLaMA block and off in a Pro block; odd sizes. Include after train_fox.c.
*/
#pragma once

typedef struct {
    const char* name; // family, then the keys of config.json to change; mlp=none: blocks without an MLP
    int64_t B, T;
} Variant;

// T = 150 and 300 are two and three attention tiles of TILE: tiles on, next to and off the diagonal.
static const Variant variants[] = {
    {"fox-pro", 2, 9},
    {"fox-llama", 2, 9},
    {"transformer-pro", 2, 9},
    {"transformer-llama", 2, 9},

    {"fox-llama fgate_type=bias_only", 2, 7},
    {"fox-llama fgate_type=fixed", 2, 7},
    {"fox-llama fgate_type=none", 2, 7},
    {"fox-llama fgate_bias_init=true", 2, 7},
    {"fox-llama fgate_type=bias_only fgate_bias_init=true", 2, 7},
    {"fox-llama use_rope=true", 2, 7},
    {"fox-llama use_rope=true rope_scaling=linear:2.5", 2, 7},
    {"fox-llama qk_norm=true", 2, 7},
    {"fox-llama qk_norm=true qk_norm_share_param_across_head=true", 2, 7},
    {"fox-llama use_output_norm=true", 2, 7},
    {"fox-llama use_output_gate=true", 2, 7},
    {"fox-llama use_k_shift=true", 2, 7},
    {"fox-llama use_v_shift=true", 2, 7},

    {"fox-pro fgate_type=bias_only", 2, 7},
    {"fox-pro fgate_type=fixed", 2, 7},
    {"fox-pro fgate_type=none", 2, 7},
    {"fox-pro fgate_bias_init=true", 2, 7},
    {"fox-pro use_rope=true", 2, 7},
    {"fox-pro use_rope=true rope_scaling=yarn:4:64", 2, 7},
    {"fox-pro qk_norm=false", 2, 7},
    {"fox-pro qk_norm_share_param_across_head=true", 2, 7},
    {"fox-pro use_output_norm=false", 2, 7},
    {"fox-pro use_output_gate=false", 2, 7},
    {"fox-pro use_k_shift=false", 2, 7},
    {"fox-pro use_v_shift=false", 2, 7},

    // heads of keys and values that 2, 3 and 4 heads of queries read
    {"fox-pro num_heads=4 num_kv_heads=2", 2, 7},
    {"fox-pro num_heads=4 num_kv_heads=1 qk_norm_share_param_across_head=true fgate_bias_init=true", 1, 150},
    {"fox-llama num_heads=6 num_kv_heads=2 use_rope=true", 2, 7},
    {"fox-llama num_heads=4 num_kv_heads=2 use_k_shift=true window_size=100", 2, 300},
    {"transformer-llama num_heads=6 num_kv_heads=3", 2, 7},

    {"fox-pro tie_word_embeddings=true", 2, 7},
    {"transformer-llama tie_word_embeddings=true", 3, 9},
    {"hgrn2 tie_word_embeddings=true use_lower_bound=true", 2, 9},
    {"mamba2 tie_word_embeddings=true state_size=6", 2, 9},
    {"gated-deltanet tie_word_embeddings=true", 2, 9},

    {"fox-pro mlp=none", 2, 7},
    {"fox-llama mlp=none num_hidden_layers=1", 2, 7},

    {"fox-pro num_heads=3", 1, 5},
    {"fox-pro num_heads=3 hidden_size=9", 3, 5}, // an odd head size
    {"fox-pro num_heads=1", 2, 5},
    // at T = 1 value shift only scales v, which output norm would cancel but for its epsilon
    {"fox-pro use_output_norm=false", 3, 1},
    {"transformer-llama", 1, 1},
    {"fox-pro", 1, 150},
    {"fox-pro fgate_bias_init=true", 2, 300},
    {"fox-llama use_rope=true", 1, 300},
    {"transformer-llama", 1, 300},

    // windows within a tile, across tiles, and with whole tiles between their ends
    {"transformer-swa window_size=4", 2, 9},
    {"transformer-swa window_size=5 num_hidden_layers=1", 1, 300},
    {"transformer-swa", 1, 300}, // 64
    {"transformer-llama window_size=200", 1, 300},
    {"fox-pro window_size=1", 2, 7},
    {"fox-pro window_size=100 fgate_bias_init=true", 1, 300},
    {"fox-llama window_size=129 use_rope=true", 1, 300},
    {"fox-llama window_size=3 fgate_type=bias_only", 2, 9},
    {"transformer-pro window_size=1000", 2, 9},

    // T = 150 is three segments of SEGMENT, a head of 70 channels, or values, two pieces of COLUMNS
    {"deltanet", 2, 9},
    {"deltanet", 3, 1},
    {"deltanet", 2, 3},
    {"deltanet num_heads=3 hidden_size=9 num_hidden_layers=1", 2, 64},
    {"deltanet num_heads=1 hidden_size=70 num_hidden_layers=1", 1, 101},
    {"deltanet mlp=none", 1, 150},

    {"gated-deltanet", 2, 9},
    {"gated-deltanet", 3, 1},
    {"gated-deltanet expand_v=1 head_dim=5", 2, 3},
    {"gated-deltanet num_heads=3 head_dim=9 num_hidden_layers=1", 2, 64},
    {"gated-deltanet num_heads=1 head_dim=35 num_hidden_layers=1", 1, 101},
    {"gated-deltanet mlp=none", 1, 150},

    {"hgrn2", 2, 9},
    {"hgrn2", 3, 1},
    {"hgrn2 use_lower_bound=true num_hidden_layers=3", 2, 9},
    {"hgrn2 use_lower_bound=true num_heads=3 hidden_size=9 num_hidden_layers=2", 2, 64},
    {"hgrn2 num_heads=1 hidden_size=70 num_hidden_layers=1", 1, 101},
    {"hgrn2 use_lower_bound=true mlp=none", 1, 150},

    {"mamba2 state_size=6", 2, 9},
    {"mamba2 state_size=6", 3, 1},
    {"mamba2 state_size=3 num_heads=3 hidden_size=9 num_hidden_layers=1", 2, 64},
    {"mamba2 state_size=7 num_heads=1 hidden_size=35 num_hidden_layers=1", 1, 101},
    {"mamba2 state_size=6", 1, 150},

    // layers of different kinds: each recurrent one with attention, windows and RoPE of its own, none with
    // attention
    {"fox-pro layer_types=deltanet,attention,mamba2 num_hidden_layers=3 mamba2_state_size=6", 2, 9},
    {"fox-pro layer_types=hgrn2*2,attention num_hidden_layers=4 hgrn2_num_heads=3 hgrn2_use_lower_bound=true",
     2, 9},
    {"fox-pro layer_types=gated_deltanet,attention gated_deltanet_num_heads=2 gated_deltanet_head_dim=6", 2,
     9},
    {"fox-llama layer_types=mamba2,attention:window=64:rope mamba2_state_size=6 mamba2_num_heads=3", 1, 150},
    {"transformer-pro layer_types=attention:window=4:norope*2,attention num_hidden_layers=3", 2, 9},
    {"transformer-swa layer_types=attention:window=5,attention:window=0 hidden_size=16 num_heads=4 "
     "num_kv_heads=2",
     1, 300},
    {"transformer-llama layer_types=mamba2,deltanet mamba2_state_size=6 tie_word_embeddings=true", 2, 9},
};
#define NUM_VARIANTS ((int)(sizeof variants / sizeof variants[0]))

// The small config of a variant: its family with its keys. Dies if the name is invalid.
static Config variant_config(const char* name) {
    Error err;
    Config c = config_defaults();
    Recipe recipe;
    char text[256];
    snprintf(text, sizeof text, "%s", name);
    char* rest = NULL;
    char preset[64];
    bool no_mlp = false;
    snprintf(preset, sizeof preset, "%s-nano", strtok_r(text, " ", &rest));
    if (!config_preset(&c, &recipe, preset, &err)) die("%s", err.msg);
    c.vocab_size = 23, c.hidden_size = 12, c.num_hidden_layers = 2, c.num_heads = 2;
    if (c.mixer != MIXER_MAMBA2) c.intermediate_size = 10;
    if (c.mixer == MIXER_GATED_DELTANET) c.head_dim = 6;
    c.bos_token_id = c.eos_token_id = -1;
    for (char* key; (key = strtok_r(NULL, " ", &rest)) != NULL;) {
        char* value = strchr(key, '=');
        *value++ = '\0';
        if (strcmp(key, "mlp") == 0)
            no_mlp = true;
        else if (!config_set(&c, name, key, value, &err))
            die("%s", err.msg);
    }
    if (!config_check(&c, name, &err)) die("%s", err.msg);
    if (no_mlp) c.intermediate_size = 0, c.hidden_ratio = 0;
    return c;
}

// The variant with sizes that the GPU's kernels have: heads of 64 channels, or those of the recurrences.
static inline void variant_for_gpu(char* out, size_t size, const char* name) {
    const Config c = variant_config(name);
    long long d = (long long)c.num_heads * (c.mixer == MIXER_ATTENTION ? 64
                                            : c.mixer == MIXER_MAMBA2  ? 32
                                                                       : 128);
    int n = snprintf(out, size, "%s hidden_size=%lld %s", name, d,
                     c.mixer == MIXER_MAMBA2           ? "state_size=128"
                     : c.mixer == MIXER_GATED_DELTANET ? "head_dim=128 intermediate_size=72"
                                                       : "intermediate_size=72");
    for (int m = MIXER_ATTENTION + 1; m < NUM_MIXERS; m++) // of a stack
        if (c.kind_heads[m])
            n += snprintf(out + n, size - (size_t)n, " %s_num_heads=%lld", mixer_names[m],
                          m == MIXER_MAMBA2 ? d / 32 : d / 128);
    if (c.kind_state_size) n += snprintf(out + n, size - (size_t)n, " mamba2_state_size=128");
    if (c.kind_head_dim) snprintf(out + n, size - (size_t)n, " gated_deltanet_head_dim=128");
}

// Random weights for which every tensor affects the loss: norm weights differ from 1, gates are neither
// saturated at 0 nor at 1, scores differ. Head i's gate bias is near i: heads forget at different rates.
static void variant_weights(Model* model) {
    for (int r = 0; r < model->table.num_rows; r++) {
        const Param* p = &model->table.rows[r];
        for (int64_t i = 0; i < p->count; i++) {
            double noise = random_normal(11, (uint64_t)r, (uint64_t)i), w = 0;
            switch (p->init) {
            case INIT_NORMAL:
            case INIT_UNIFORM:
                w = ((p->kind == P_EMBEDDINGS && !model->config.tie_word_embeddings) || p->ndim == 1
                         ? 1
                         : 1.2 / sqrt((double)(p->count / p->shape[0]))) *
                    noise;
                break;
            case INIT_ZERO: w = p->kind == P_HGRN2_LOWER_BOUNDS ? noise : (double)i + 0.5 * noise; break;
            case INIT_ONE: w = 1 + 0.3 * noise; break;
            case INIT_FUNCTION:
                w = p->kind == P_MAMBA2_DT_BIAS || p->kind == P_DELTANET_DT_BIAS ? noise
                    : p->kind == P_MAMBA2_A_LOG || p->kind == P_DELTANET_A_LOG
                        ? 0.5 * noise
                        : config_long_gate_bias(&model->config, i) + 0.1 * noise;
                break;
            }
            model->params[p->offset + i] = (real)w;
        }
    }
}

// A model of the variant with these weights, allocated for forward and backward passes over [B, T] tokens.
static Model variant_model(const char* name, int64_t B, int64_t T) {
    Config c = variant_config(name);
    Model model = model_new(&c, true, 0, 1);
    model_allocate_activations(&model, B, T);
    variant_weights(&model);
    return model;
}

// n random tokens of the model's vocabulary, freed by the caller.
static int32_t* random_tokens(const Model* model, int64_t n, uint64_t stream) {
    int32_t* tokens = (int32_t*)xcalloc((size_t)n, sizeof(int32_t));
    for (int64_t i = 0; i < n; i++)
        tokens[i] = (int32_t)(random_uniform(13, stream, (uint64_t)i) * (double)model->config.vocab_size);
    return tokens;
}
