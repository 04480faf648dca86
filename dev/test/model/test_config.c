/*
Tests llmc/config: presets and their parameter counts; every key of config.json with valid and invalid values.
test_parts.c tests the parameter table.
*/
#include "../../../llmc/config/config_file.h"
#include "../../../llmc/baselines/mixers.h"
#include "../check.h"
#include "models.h"

static Error err;
static char folder[PATH_LENGTH], config_path[PATH_LENGTH];

static void write_text(const char* path, const char* text) {
    FILE* f = fopen(path, "wb");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) die("%s: cannot write", path);
}

// The text of config.json, to compare two configs; freed by the caller.
static char* config_text(const Config* c) {
    JsonWriter w = json_writer(0);
    config_put_all(c, &w);
    char* text = xstrdup(w.text);
    json_writer_free(&w);
    return text;
}

static bool same_config(const Config* a, const Config* b) {
    char *text_a = config_text(a), *text_b = config_text(b);
    bool same = strcmp(text_a, text_b) == 0;
    free(text_a), free(text_b);
    return same;
}

// ----------------------------------------------------------------------------
// presets

static void check_counts(void) {
    static const struct {
        const char* name;
        int64_t non_embedding; // in the paper's code
    } expected[] = {
        {"fox-pro-125m", 123910800},         {"transformer-pro-125m", 123800064},
        {"fox-llama-125m", 123661968},       {"transformer-llama-125m", 123551232},
        {"fox-pro-360m", 367339904},         {"transformer-pro-360m", 366946304},
        {"fox-llama-360m", 360188288},       {"transformer-llama-360m", 359794688},
        {"fox-pro-760m", 759512640},         {"transformer-pro-760m", 757742592},
        {"fox-llama-760m", 757632576},       {"transformer-llama-760m", 756747264},
        {"deltanet-125m", 123718656},        {"deltanet-360m", 360289280},
        {"deltanet-760m", 757635072},        {"hgrn2-125m", 123569664},
        {"hgrn2-360m", 359843840},           {"hgrn2-760m", 756820992},
        {"mamba2-125m", 128965824},          {"mamba2-360m", 368314880},
        {"mamba2-760m", 780113664},          {"transformer-swa-125m", 123551232},
        {"transformer-swa-360m", 359794688}, {"transformer-swa-760m", 756747264},
        {"gated-deltanet-125m", 125283160},  {"gated-deltanet-360m", 365815292},
        {"gated-deltanet-760m", 771867258},  {"fox-gdn-760m", 800740308},
        {"samba2-760m", 819211968},          {"fox-pro-local-760m", 759512640},
    };
    for (int i = 0; i < (int)(sizeof expected / sizeof expected[0]); i++) {
        Config c = preset(expected[i].name);
        ParamTable table = params_build(&c);
        CHECK(table.non_embedding == expected[i].non_embedding, "%s has %lld parameters", expected[i].name,
              (long long)table.non_embedding);
        CHECK(table.parameters == table.non_embedding + c.vocab_size * c.hidden_size, "%s: %lld in all",
              expected[i].name, (long long)table.parameters);
        params_free(&table);
    }
    for (int f = 0; f < NUM_FAMILIES; f++)
        for (int s = 0; s < 2; s++) {
            char name[64];
            double about = s == 0 ? 1e6 : 1e7;
            snprintf(name, sizeof name, "%s-%s", config_families[f].name, s == 0 ? "nano" : "micro");
            Config c = preset(name);
            ParamTable table = params_build(&c);
            double count = (double)table.parameters;
            CHECK(count > 0.8 * about && count < (config_is_stack(&c) ? 1.4 : 1.3) * about,
                  "%s has %.0f parameters", name, count);
            params_free(&table);
        }
}

// The presets' windows, and the FLOPs that a window leaves: 12 d for each pair of a token and a key.
static void check_window(void) {
    static const int64_t windows[] = {0, 1, 7, 2048, 16383, 16384, 20000};
    const int64_t T = 16384;
    for (int s = 0; s < NUM_SIZES; s++) {
        char name[64];
        snprintf(name, sizeof name, "transformer-swa-%s", config_sizes[s].name);
        Config c = preset(name);
        CHECK(c.window_size == config_sizes[s].seq_len / 8 && config_is_plain_transformer(&c),
              "%s: a window of %lld", name, (long long)c.window_size);
    }
    Config c = preset("transformer-swa-760m");
    CHECK(c.window_size == 2048 && c.num_heads == 12 && c.rope_base == 500000, "not the paper's model");
    for (int i = 0; i < 7; i++) {
        double pairs = 0,
               W = c.window_size = windows[i]; // of a token's own key half, unless others are hidden
        for (int64_t t = 0; t < T; t++) pairs += W && W < T && (double)t >= W ? W : (double)t + 0.5;
        double error = attention_flops(&c, T) / (12 * 1536 * pairs / (double)T) - 1;
        CHECK(fabs(error) < 1e-12, "the FLOPs of a window of %g are off by %g", W, error);
    }
}

// The names of all presets are accepted, similar names are not.
static void check_presets(void) {
    static const char* const bad[] = {"",           "fox-pro",      "fox-pro-",      "fox-pro-1b",
                                      "fox-125m",   "fox-pro-125M", "fox-pro-125mm", "transformer-125m",
                                      "fox-pronano"};
    Config c = config_defaults();
    Recipe recipe;
    for (int f = 0; f < NUM_FAMILIES; f++)
        for (int s = 0; s < NUM_SIZES; s++) {
            char name[64];
            snprintf(name, sizeof name, "%s-%s", config_families[f].name, config_sizes[s].name);
            CHECK(config_preset(&c, &recipe, name, &err) && config_check(&c, name, &err), "%s: %s", name,
                  err.msg);
            const bool own = s < 2 || recipe_lists(RECIPE_OWN_FAMILIES, config_families[f].name);
            CHECK(recipe.name == (own ? RECIPE_OWN : RECIPE_ANALYSIS), "%s: recipe", name);
            Recipe nearest = config_nearest_recipe(&c);
            CHECK(nearest.seq_len == recipe.seq_len && nearest.lr == recipe.lr, "%s: nearest recipe", name);
            CHECK(recipe.batch_tokens % recipe.seq_len == 0,
                  "%s: the batch is no multiple of the sequence length", name);
            CHECK(config_end_of_text(&c) == c.vocab_size - 1, "%s: end of text", name);
            CHECK(strstr(PRESET_NAMES, config_families[f].name), "%s is not in PRESET_NAMES", name);
        }
    for (int i = 0; i < (int)(sizeof bad / sizeof bad[0]); i++)
        CHECK(!config_preset(&c, &recipe, bad[i], &err), "'%s' is accepted as a preset", bad[i]);
    config_preset(&c, &recipe, "fox-pro-760m", &err);
    CHECK(recipe.seq_len == 16384 && recipe.batch_tokens == 32 * 16384 && recipe.max_tokens == 16106127360 &&
              recipe.warmup_tokens == 268435456 && recipe.lr == 1e-3,
          "the recipe of fox-pro-760m is not the paper's");
}

// ----------------------------------------------------------------------------
// keys of config.json

// fox-pro-nano with fgate_bias_init, without which decay times have no effect
static Config base_config(void) {
    Config c = preset("fox-pro-nano");
    c.fgate_bias_init = true;
    return c;
}

// For every key: a valid value that differs from base_config's, and invalid values separated by blanks ("~"
// is the empty value).
typedef struct {
    const char *name, *value, *bad;
} KeyTest;

static const KeyTest keys[] = {
    {"vocab_size", "300", "1 0 -5 16777217 2.5 x ~ null true 1e99"},
    {"hidden_size", "256", "0 -2 65537 1.5 null 12x"},
    {"hidden_ratio", "2.25", "0 -1 65 nan inf x ~ null"},
    {"intermediate_size", "100", "0 -1 1.5 1048577 x"},
    {"num_hidden_layers", "3", "0 1025 -1 0.5 null"},
    {"num_heads", "4", "0 1025 -1 null"},
    {"num_kv_heads", "1", "0 1025 -1 1.5 x"},
    {"layer_types", "deltanet,gated_deltanet,mamba2,hgrn2,attention:window=64:rope",
     "~ , deltanet, foo attention*0 attention*1025 mamba2*1e3,hgrn2*1e3 attention:window=-1 attention:window "
     "mamba2:rope attention:windows=4 attention* *3"},
    {"deltanet_num_heads", "4", "0 1025 -1 1.5"},
    {"hgrn2_num_heads", "2", "0 1025 -1 1.5"},
    {"hgrn2_use_lower_bound", "true", "1 null yes"},
    {"mamba2_num_heads", "8", "0 1025 -1 1.5"},
    {"mamba2_state_size", "64", "0 65537 -1 1.5"},
    {"gated_deltanet_num_heads", "2", "0 1025 -1 1.5"},
    {"gated_deltanet_head_dim", "64", "0 4097 -1 1.5"},
    {"gated_deltanet_expand_v", "1", "0 17 -1 1.5"},
    {"hidden_act", "swish", "gelu ~"},
    {"window_size", "512", "-1 1.5 16777217 x ~ true"},
    {"max_position_embeddings", "null", "2048"},
    {"initializer_range", "0.01", "-0.1 11 nan null"},
    {"norm_eps", "1e-5", "-1e-6 2 null"},
    {"rope_base", "10000", "0.5 -1 inf null"},
    {"use_rope", "true", "1 True yes ~ null"},
    {"rope_scaling", "yarn:4:512",
     "4 llama3:8 yarn linear:0 linear:-2 ntk:x yarn:0.5 linear:4:512 yarn:4:0 ~"},
    {"use_output_gate", "false", "0 no"},
    {"ogate_act", "sigmoid", "silu null"},
    {"use_output_norm", "false", "0"},
    {"qk_norm", "false", "0"},
    {"qk_norm_share_param_across_head", "true", "1"},
    {"use_k_shift", "false", "0"},
    {"use_v_shift", "false", "0"},
    {"fgate_type", "bias_only", "FULL half ~ null 0"},
    {"fgate_bias_init", "false", "1"},
    {"decay_time_min", "3.5", "0 -1 1e13 nan"},
    {"decay_time_max", "1e6", "0 -1 1e13 nan"},
    {"log_pruning_tolerance", "-5.5", "1 0.1 -10001 nan"},
    {"pruning_rule", "acp", "ACP ~ null 1 true"},
    {"document_reset", "true", "1 null yes"},
    {"tie_word_embeddings", "true", "1 0 null"},
    {"bos_token_id", "7", "-1 16777216 1.5"},
    {"eos_token_id", "null", "-1 16777216"},
};
#define NUM_KEYS ((int)(sizeof keys / sizeof keys[0]))

#define ENDS                                                                                                 \
    {"initializer_range", "0.01", "11"}, {"document_reset", "true", "1 null yes"},                           \
        {"tie_word_embeddings", "true", "1"}, {"bos_token_id", "7", "-1"}, {                                 \
        "eos_token_id", "null", "-1"                                                                         \
    }

// The same for the recurrent mixers, on their nano presets. A fixed key has one value.
static const struct {
    const char* preset;
    KeyTest keys[32];
} recurrent_keys[] = {
    {"deltanet-nano",
     {{"vocab_size", "300", "1 null"},
      {"hidden_size", "256", "0 null"},
      {"num_hidden_layers", "3", "0"},
      {"num_heads", "4", "0 1025"},
      {"attn_mode", "chunk", "fused_recurrent"},
      {"expand_k", "1", "2 0.5"},
      {"expand_v", "1", "2"},
      {"use_gate", "false", "true"},
      {"use_short_conv", "true", "false"},
      {"conv_size", "4", "3"},
      {"use_beta", "true", "false"},
      {"use_output_norm", "true", "false"},
      {"qk_norm", "l2", "sum true"},
      {"qk_activation", "silu", "relu"},
      {"hidden_ratio", "2.25", "0"},
      {"intermediate_size", "100", "0"},
      {"hidden_act", "swish", "gelu"},
      {"norm_eps", "1e-5", "2"},
      ENDS}},
    {"hgrn2-nano",
     {{"vocab_size", "300", "1 null"},
      {"hidden_size", "256", "0 null"},
      {"num_hidden_layers", "3", "0"},
      {"num_heads", "4", "0 1025"},
      {"attn_mode", "chunk", "fused_recurrent"},
      {"expand_ratio", "128", "0 1.5 null"},
      {"use_short_conv", "false", "true"},
      {"use_lower_bound", "true", "1"},
      {"hidden_ratio", "2.25", "0"},
      {"intermediate_size", "100", "0"},
      {"hidden_act", "swish", "gelu"},
      {"norm_eps", "1e-5", "2"},
      {"elementwise_affine", "true", "false"},
      ENDS}},
    {"mamba2-nano",
     {{"vocab_size", "300", "1 null"},
      {"hidden_size", "256", "0 null"},
      {"num_hidden_layers", "3", "0"},
      {"num_heads", "8", "0 1025"},
      {"head_dim", "64", "0 1.5 null"},
      {"state_size", "64", "0 null"},
      {"n_groups", "1", "2"},
      {"expand", "2", "1"},
      {"conv_kernel", "4", "3"},
      {"use_bias", "false", "true"},
      {"use_conv_bias", "true", "false"},
      {"hidden_act", "silu", "swish"},
      {"layer_norm_epsilon", "1e-6", "2"},
      {"residual_in_fp32", "false", "1"},
      {"time_step_min", "0.01", "0 nan"},
      {"time_step_max", "0.2", "0 -1"},
      {"time_step_floor", "1e-3", "0"},
      {"rescale_prenorm_residual", "false", "0"},
      {"chunk_size", "64", "0"},
      ENDS}},
    {"gated-deltanet-nano",
     {{"vocab_size", "300", "1 null"},
      {"hidden_size", "250", "0 null"},
      {"num_hidden_layers", "4", "0"},
      {"num_heads", "4", "0 1025"},
      {"attn_mode", "chunk", "fused_recurrent"},
      {"head_dim", "96", "0 1.5 null"},
      {"expand_v", "1", "0 1.5 null"},
      {"num_v_heads", "null", "4"},
      {"use_gate", "true", "false"},
      {"use_short_conv", "true", "false"},
      {"conv_size", "4", "3"},
      {"allow_neg_eigval", "false", "true"},
      {"attn", "null", "true"},
      {"hidden_ratio", "2.25", "0"},
      {"intermediate_size", "100", "0"},
      {"hidden_act", "swish", "gelu"},
      {"norm_eps", "1e-5", "2"},
      ENDS}},
};

#undef ENDS

// Writes c to config.json and reads it back.
static void check_round_trip(const Config* c, const char* what) {
    Config back;
    CHECK(config_write(c, config_path, &err), "%s: %s", what, err.msg);
    CHECK(config_read(&back, folder, &err), "%s: %s", what, err.msg);
    const Config file = config_without_initialization(c);
    CHECK(same_config(&file, &back), "%s: differs after config_write and config_read", what);

    // the initialization of a full gate is in trainer.json instead
    Json j;
    JsonWriter w = json_writer(0);
    config_put_initialization(c, &w, NULL);
    CHECK(json_parse(&j, "trainer.json", w.text, w.length, &err), "%s", err.msg);
    CHECK(config_restore_initialization(&back, "trainer.json", &j, 0, &err), "%s", err.msg);
    CHECK(same_config(c, &back), "%s: differs after config_restore_initialization", what);
    json_free(&j);
    json_writer_free(&w);
}

// A gate's initialization in config.json: nothing of a full gate, which the paper's code would refuse.
static void check_initialization(void) {
    for (GateType gate = GATE_FULL; gate <= GATE_FIXED; gate = (GateType)(gate + 1)) {
        Config c = base_config(), back;
        Json j;
        bool init = true;
        c.fgate_type = gate;
        c.decay_time_max = 512;
        CHECK(config_write(&c, config_path, &err) && json_parse_file(&j, config_path, &err), "%s", err.msg);
        CHECK(json_bool(&j, json_get(&j, 0, "fgate_bias_init"), &init) && init == (gate != GATE_FULL),
              "gate %d: fgate_bias_init %d", gate, init);
        CHECK(json_is_null(&j, json_get(&j, 0, "decay_time_max")) == (gate == GATE_FULL), "gate %d", gate);
        CHECK(config_read(&back, folder, &err), "%s", err.msg);
        CHECK(config_restore_initialization(&back, "trainer.json", &j, -1, &err), "absent: %s", err.msg);
        CHECK((back.decay_time_max == 512) == (gate != GATE_FULL), "gate %d: restored from nothing", gate);
        json_free(&j);

        static const char* const bad[] = {"{\"fgate_bias_init\": 1}", "{\"decay_time_max\": \"x\"}",
                                          "{\"fgate_bias_init\": false, \"decay_time_min\": 3}",
                                          "{\"fgate_bias_init\": true, \"decay_time_min\": 600}"};
        for (int i = 0; i < 4 && gate == GATE_FULL; i++) {
            CHECK(json_parse(&j, "trainer.json", bad[i], strlen(bad[i]), &err), "%s", err.msg);
            CHECK(!config_restore_initialization(&back, "trainer.json", &j, 0, &err) &&
                      strncmp(err.msg, "trainer.json: ", 14) == 0,
                  "%s is accepted, or: %s", bad[i], err.msg);
            json_free(&j);
            back = c;
        }
    }
}

// Tests a key on `base`, and sets its value in `all`.
static void check_key(const KeyTest* test, const ConfigKey* key, const Config* base, Config* all) {
    Config c = *base;
    const bool of_kind = config_key_of_kind(key);
    CHECK(config_set(&c, "--set", test->name, test->value, &err), "%s", err.msg);
    if (key->type == KEY_ROPE) c.use_rope = true;
    if (of_kind)
        CHECK(config_set(&c, "--set", "layer_types", "deltanet,hgrn2,mamba2,gated_deltanet", &err), "%s",
              err.msg);
    if (key->type == KEY_LAYERS) c.num_hidden_layers = 7;
    if (of_kind || key->type == KEY_LAYERS) CHECK(config_check(&c, "--set", &err), "%s", err.msg);
    const bool derived = key->offset == offsetof(Config, head_dim) && base->mixer != MIXER_GATED_DELTANET;
    bool fixed = key->bytes == 0 || derived; // one value
    CHECK(strcmp(key->name, test->name) == 0, "key %s is %s", test->name, key->name);
    CHECK(same_config(&c, base) == fixed, "--set %s=%s", test->name, test->value);
    check_round_trip(&c, test->name);
    config_set(all, "--set", test->name, test->value, &err);

    char bad[256], *rest = NULL;
    snprintf(bad, sizeof bad, "%s", test->bad);
    for (char* value = strtok_r(bad, " ", &rest); value; value = strtok_r(NULL, " ", &rest)) {
        const char* text = strcmp(value, "~") == 0 ? "" : value;
        Config kept = *base;
        CHECK(!config_set(&kept, "--set", test->name, text, &err), "%s=%s is accepted", test->name, text);
        CHECK(same_config(&kept, base), "%s=%s changes the config", test->name, text);
        CHECK(strstr(err.msg, test->name) && strstr(err.msg, "--set"), "unclear: %s", err.msg);
    }
}

static void check_recurrent_keys(void) {
    int key = NUM_KEYS;
    for (int i = 0; i < (int)(sizeof recurrent_keys / sizeof recurrent_keys[0]); i++) {
        const KeyTest* test = recurrent_keys[i].keys;
        Config base = preset(recurrent_keys[i].preset), all = base;
        for (; test->name; test++, key++) check_key(test, &config_keys[key], &base, &all);
        all.num_heads = base.num_heads, all.hidden_size = base.hidden_size;
        check_round_trip(&all, recurrent_keys[i].preset);
        CHECK(!config_set(&all, "--set", "use_rope", "true", &err) && strstr(err.msg, "use_rope"),
              "%s has attention's keys", recurrent_keys[i].preset);
    }
    CHECK(key == NUM_CONFIG_KEYS, "%d keys are tested, %d exist", key, NUM_CONFIG_KEYS);
}

static void check_keys(void) {
    const Config base = base_config();
    Config all = base;
    for (int i = 0; i < NUM_KEYS; i++) check_key(&keys[i], &config_keys[i], &base, &all);
    all.num_hidden_layers = 5, all.num_kv_heads = 2;
    check_round_trip(&all, "all keys at once");
    CHECK(!config_set(&all, "--set", "hidden_sizes", "4", &err) && strstr(err.msg, "hidden_sizes"),
          "unknown key");
    CHECK(config_set(&all, "--set", "vocab_size", "1Ki", &err) && all.vocab_size == 1024,
          "vocab_size=1Ki is not 1024");
    Config same = base;
    CHECK(config_set(&same, "--set", "num_kv_heads", "2", &err) && config_check(&same, "--set", &err) &&
              same.num_heads == 2 && same.num_kv_heads == 0,
          "num_kv_heads equal to num_heads is not null: %s", err.msg);
    // the paper's configs have these nulls
    CHECK(config_set(&all, "config", "decay_time_min", "null", &err), "%s", err.msg);
    CHECK(config_set(&all, "config", "window_size", "null", &err) && all.window_size == 0, "%s", err.msg);
    CHECK(config_set(&all, "config", "log_pruning_tolerance", "null", &err) &&
              isnan(all.log_pruning_tolerance),
          "log_pruning_tolerance=null is not NaN");
}

// Values that are valid alone but invalid together.
static void check_impossible(void) {
    static const char* const cases[][2] = {
        {"num_heads", "3"},         {"hidden_size", "126"},
        {"num_kv_heads", "3"}, // head size 63 with RoPE
        {"bos_token_id", "257"},    {"eos_token_id", "257"},
        {"decay_time_min", "257"},  {"mamba2_num_heads", "4"},
        {"mamba2_state_size", "4"}, {"decay_time_max", "1"},
        {"hidden_ratio", "0.01"}, // an MLP of width 0
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
        Config c = base_config();
        c.use_rope = true;
        CHECK(config_set(&c, "--set", cases[i][0], cases[i][1], &err), "%s", err.msg);
        CHECK(!config_check(&c, "somewhere", &err), "%s=%s is accepted", cases[i][0], cases[i][1]);
        CHECK(strstr(err.msg, "somewhere"), "unclear: %s", err.msg);
    }
    Config c = preset("hgrn2-nano");
    CHECK(config_set(&c, "--set", "expand_ratio", "64", &err) && !config_check(&c, "somewhere", &err) &&
              strstr(err.msg, "somewhere: heads of 64 channels"),
          "an expand_ratio of other heads: %s", err.msg);
    c = preset("mamba2-nano");
    c.time_step_max = 1e-4;
    CHECK(!config_check(&c, "somewhere", &err) && strstr(err.msg, "time_step_max"), "no time steps");
    c = preset("fox-pro-nano");
    c.hidden_size = 126;
    CHECK(config_check(&c, "x", &err), "an odd head size is refused without RoPE: %s", err.msg);
}

// flash-linear-attention's num_v_heads, which may say that keys and values have the same heads.
static void check_value_heads(void) {
    for (int heads = 2; heads <= 4; heads += 2) {
        char text[256];
        Config c;
        snprintf(text, sizeof text,
                 "{\"model_type\": \"gated_deltanet\", \"vocab_size\": 10, \"hidden_size\": 8, "
                 "\"num_hidden_layers\": 1, \"num_heads\": 2, \"num_v_heads\": %d}",
                 heads);
        const bool read = config_parse(&c, "x", text, strlen(text), &err);
        CHECK(read == (heads == 2) && (read || strstr(err.msg, "num_v_heads=4 is not supported")),
              "%d of 2: %s", heads, err.msg);
    }
    static const char hybrid[] = // with layers of attention
        "{\"model_type\": \"gated_deltanet\", \"vocab_size\": 10, \"hidden_size\": 8, "
        "\"num_hidden_layers\": 1, \"num_heads\": 2, \"attn\": {\"layers\": [0]}}";
    Config c;
    CHECK(!config_parse(&c, "x", hybrid, strlen(hybrid), &err) && strstr(err.msg, "x: attn is ") &&
              strstr(err.msg, "only null"),
          "of a hybrid: %s", err.msg);
}

static void check_family(const char* name, const char* model_type, const char* architecture) {
    Config c = preset(name), back;
    Json j;
    check_round_trip(&c, name);
    if (!json_parse_file(&j, config_path, &err)) die("%s", err.msg);
    const char* type = json_string(&j, json_get(&j, 0, "model_type"));
    const char* class_name = json_string(&j, json_first(&j, json_get(&j, 0, "architectures")));
    CHECK(type && strcmp(type, model_type) == 0, "%s is written as %s", name, type);
    CHECK(class_name && strcmp(class_name, architecture) == 0, "%s is written as %s", name, class_name);
    json_free(&j);

    // A key that is missing in config.json has the default of the paper's model class.
    char text[256];
    snprintf(text, sizeof text,
             "{\"model_type\": \"%s\", \"vocab_size\": 10, \"hidden_size\": 8, \"num_hidden_layers\": 1, "
             "\"num_heads\": 2}",
             model_type);
    write_text(config_path, text);
    CHECK(config_read(&back, folder, &err), "%s", err.msg);
    bool plain = strcmp(architecture, "TransformerForCausalLM") == 0;
    CHECK(back.mixer == c.mixer && back.use_rope == plain && !back.qk_norm &&
              (back.fgate_type == GATE_NONE) == (plain || c.mixer != MIXER_ATTENTION),
          "%s: defaults of its class", name);
}

static void check_files(void) {
    static const char gated[] = "forgetting_transformer-project_fox", plain[] = "transformer-project_fox";
    check_value_heads();
    check_family("fox-pro-nano", gated, "ForgettingTransformerForCausalLM");
    check_family("fox-llama-125m", gated, "ForgettingTransformerForCausalLM");
    check_family("transformer-pro-760m", gated, "ForgettingTransformerForCausalLM");
    check_family("transformer-llama-nano", plain, "TransformerForCausalLM");
    check_family("deltanet-nano", "delta_net-project_fox", "DeltaNetForCausalLM");
    check_family("hgrn2-nano", "hgrn2-project_fox", "HGRN2ForCausalLM");
    check_family("mamba2-nano", "mamba2-project_fox", "Mamba2ForCausalLM");
    check_family("gated-deltanet-nano", "gated_deltanet", "GatedDeltaNetForCausalLM");

    static const char sizes[] =
        "\"vocab_size\": 10, \"hidden_size\": 8, \"num_hidden_layers\": 1, \"num_heads\": 2";
    static const struct {
        const char *members, *says; // text of the error; NULL: accepted
    } files[] = {
        {"\"num_kv_heads\": 2, \"torch_dtype\": \"bfloat16\", \"extra\": [1, {}]", NULL},
        {"\"num_kv_heads\": 1", NULL},
        {"\"num_kv_heads\": 3", "config.json: num_kv_heads 3 does not divide num_heads 2"},
        {"\"model_type\": \"gpt2\"", "gpt2"},
        {"\"hidden_size\": \"big\"", "hidden_size"},
        {"\"hidden_ratio\": [4]", "hidden_ratio"},
        {"\"qk_norm\": 1", "qk_norm"},
        {"\"qk_norm\": \"true\"", "qk_norm"},
        {"\"norm_eps\": \"1e-6\"", "norm_eps"},
        {"\"fgate_type\": true", "fgate_type"},
        {"\"hidden_act\": \"gelu\"", "hidden_act"},
        {"\"tie_word_embeddings\": 1", "tie_word_embeddings"},
        {"\"eos_token_id\": 10", "eos_token_id"},
        {"\"decay_time_min\": null, \"decay_time_max\": null", NULL},
        {"\"rope_base\": 1e400", "config.json"},
        {"\"rope_base\": }", "config.json"},
    };
    Config c;
    char text[512];
    for (int i = 0; i < (int)(sizeof files / sizeof files[0]); i++) {
        // json.h refuses duplicate keys: a file with hidden_size gets `sizes` without it
        bool resized = strstr(files[i].members, "\"hidden_size\"") != NULL;
        snprintf(text, sizeof text, "{%s, %s}",
                 resized ? "\"vocab_size\": 10, \"num_hidden_layers\": 1, \"num_heads\": 2" : sizes,
                 files[i].members);
        write_text(config_path, text);
        bool ok = config_read(&c, folder, &err);
        CHECK(ok == !files[i].says, "%s: %s", files[i].members, ok ? "is accepted" : err.msg);
        CHECK(ok || (strstr(err.msg, files[i].says) && strstr(err.msg, "config.json")), "unclear: %s",
              err.msg);
    }
    static const char* const required[] = {"vocab_size", "hidden_size", "num_hidden_layers", "num_heads"};
    for (int missing = 0; missing < 4; missing++) {
        JsonWriter w = json_writer(0);
        json_begin_object(&w, NULL);
        for (int i = 0; i < 4; i++)
            if (i != missing) json_put_int(&w, required[i], 2);
        json_end(&w);
        write_text(config_path, w.text);
        json_writer_free(&w);
        CHECK(!config_read(&c, folder, &err) && strstr(err.msg, required[missing]), "%s: %s",
              required[missing], err.msg);
    }
    CHECK(!config_read(&c, "build/test/nowhere", &err) && strstr(err.msg, "nowhere/config.json"),
          "a missing file: %s", err.msg);
    CHECK(!config_write(&c, "build/test/nowhere/config.json", &err), "written into a missing folder");
}

static int test_config(void) {
    snprintf(folder, sizeof folder, "%s", test_scratch("config"));
    path_join(config_path, folder, "config.json");
    check_counts();
    check_presets();
    check_window();
    check_keys();
    check_initialization();
    check_recurrent_keys();
    check_impossible();
    check_files();
    return test_report();
}
