/*
Tests stacks of layers of different kinds: llmc/config/layer_types.h, what config.h and config_file.h make of
it, and the tables of their parameters.
*/
#include "../../../llmc/config/config_file.h"
#include "../../../llmc/baselines/mixers.h"
#include "../check.h"
#include "models.h"

static Error err;
static char folder[PATH_LENGTH], config_path[PATH_LENGTH];

// Are their texts in config.json the same?
static bool same_text(const Config* a, const Config* b) {
    JsonWriter w = json_writer(0), other = json_writer(0);
    config_put_all(a, &w), config_put_all(b, &other);
    const bool same = strcmp(w.text, other.text) == 0;
    json_writer_free(&w), json_writer_free(&other);
    return same;
}

// Each layer's rows are its mixer's, with a fused projection of their own, and start as in its family's
// models.
static void check_table(const Config* c, const char* name) {
    ParamTable t = params_build(c);
    int64_t numbers[NUM_MIXERS] = {0};
    for (int r = 0; r < t.num_rows; r++) {
        const Param* p = &t.rows[r];
        for (int q = 0; q < r; q++)
            CHECK(strcmp(t.rows[q].name, p->name) != 0, "%s: two tensors are named %s", name, p->name);
        CHECK(p->layer >= 0 || p->init == INIT_ONE || p->init == INIT_NORMAL, "%s: %s", name, p->name);
    }
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const LayerTable* layer = &t.by_layer[l];
        Config of = layer->config;
        of.layer_types.num_runs = 0;
        of.num_hidden_layers = 1;
        CHECK(layer->number == numbers[of.mixer]++, "%s: number of layer %lld", name, (long long)l);
        ParamTable alone = params_build(&of); // a model of this layer
        CHECK(layer->proj.rows == alone.by_layer[0].proj.rows &&
                  layer->proj.first == alone.by_layer[0].proj.first,
              "%s: projection of layer %lld", name, (long long)l);
        for (int r = 0; r < alone.num_rows; r++) {
            const Param* p = &alone.rows[r];
            const Param* same = p->layer < 0 ? NULL : params_find(&t, p->kind, l);
            if (p->kind < NUM_SHARED_KINDS || p->layer < 0) continue; // the MLP's are the stack's
            CHECK(same && same->count == p->count && same->init == p->init && same->column == p->column,
                  "%s: %s in layer %lld", name, p->name, (long long)l);
        }
        params_free(&alone);
    }
    params_free(&t);
}

// The pattern that config.json's list of layers is read back as, and their windows and RoPE.
static void check_layer_types(void) {
    static const struct {
        const char *given, *read;
        int64_t layers;
    } cases[] = {
        {"deltanet*3,attention", "deltanet*3,attention", 8},
        {"deltanet,deltanet,deltanet*1,attention", "deltanet*3,attention", 6},
        {"mamba2,hgrn2,mamba2,mamba2,hgrn2", "mamba2,hgrn2,mamba2", 5},
        {"gated_deltanet*3,attention", "gated_deltanet*3,attention", 4},
        {"mamba2,attention:rope:window=9,mamba2,attention:window=9:rope", "mamba2,attention:window=9:rope",
         4},
        {"attention:window=0,attention:norope", "attention:window=0,attention:norope", 4},
        {"hgrn2", "hgrn2", 4},
        {"mamba2,attention", "mamba2,attention", 129}, // more changes than LAYER_RUNS
        {"attention*2", "", 4},
        {"null", "", 4},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
        Config c = preset("fox-pro-nano"), back;
        char text[256];
        c.num_hidden_layers = cases[i].layers;
        CHECK(config_set(&c, "--set", "layer_types", cases[i].given, &err) && config_check(&c, "x", &err),
              "%s", err.msg);
        CHECK(config_write(&c, config_path, &err) && config_read(&back, folder, &err), "%s", err.msg);
        layer_types_text(text, sizeof text, &back.layer_types);
        CHECK(strcmp(text, cases[i].read) == 0 && same_text(&c, &back), "%s became %s", cases[i].given, text);
        CHECK(config_is_stack(&back) == (*cases[i].read != '\0'), "%s", cases[i].given);
        check_table(&back, cases[i].given);
    }
    Config c = preset("transformer-swa-nano"); // 64 tokens
    static const struct {
        int64_t window;
        bool rope;
        MixerKind mixer;
    } want[] = {{64, true, MIXER_ATTENTION},
                {5, true, MIXER_ATTENTION},
                {0, false, MIXER_ATTENTION},
                {0, false, MIXER_MAMBA2}};
    CHECK(config_set(&c, "--set", "layer_types",
                     "attention,attention:window=5,attention:window=0:norope,mamba2", &err) &&
              config_check(&c, "x", &err),
          "%s", err.msg);
    for (int64_t l = 0; l < 4; l++) {
        const Config of = config_layer(&c, l);
        CHECK(of.window_size == want[l].window && of.use_rope == want[l].rope && of.mixer == want[l].mixer,
              "layer %lld", (long long)l);
    }
    CHECK(config_layers_of(&c, MIXER_ATTENTION) == 3 && c.kind_heads[MIXER_MAMBA2] == 4 &&
              c.kind_state_size == 128,
          "layers and heads of a stack");
    CHECK(has_param(&c, "model.layers.3.mixer.A_log") && has_param(&c, "model.layers.3.attn_norm.weight") &&
              has_param(&c, "model.layers.3.mlp.down_proj.weight"),
          "names of a stack");
    // the heads that a family has at the widths of its presets
    for (int i = 0; i < NUM_FAMILIES * NUM_SIZES; i++) {
        const Family* family = &config_families[i / NUM_SIZES];
        const ModelShape* shape = &family->shapes[i % NUM_SIZES];
        if (family->mixer != MIXER_ATTENTION)
            CHECK(config_family_heads(family->mixer, shape->d) == shape->heads, "%s: heads at width %lld",
                  family->name, (long long)shape->d);
    }
    static const char* const bad[] = {"deltanet*3,mamba2*2", "hgrn2*5"};
    for (int i = 0; i < 2; i++) {
        c = preset("fox-pro-nano");
        CHECK(config_set(&c, "--set", "layer_types", bad[i], &err) && !config_check(&c, "x", &err) &&
                  strstr(err.msg, "x: layer_types has 5 layers"),
              "%s: %s", bad[i], err.msg);
    }
}

// In config.json each layer has its name alone, in one way of writing it: what modeling_stack.py reads.
static void check_listed_names(void) {
    static const char* const other[][2] = {{"mamba2*2", "mamba2"},
                                           {"attention:window=1Ki", "attention:window=1024"},
                                           {"attention:window=04", "attention:window=4"},
                                           {"attention:rope:window=4", "attention:window=4:rope"}};
    for (int i = 0; i < (int)(sizeof other / sizeof other[0]); i++) {
        Config c;
        char text[512], want[160];
        snprintf(text, sizeof text,
                 "{\"model_type\": \"fox_stack\", \"vocab_size\": 257, \"hidden_size\": 128, "
                 "\"num_hidden_layers\": 2, \"num_heads\": 2, \"layer_types\": [\"%s\"]}",
                 other[i][0]);
        snprintf(want, sizeof want, "x: layer_types: a name a layer, '%s', not '%s'", other[i][1],
                 other[i][0]);
        CHECK(!config_parse(&c, "x", text, strlen(text), &err) && strcmp(err.msg, want) == 0, "%s: %s",
              other[i][0], err.msg);
    }
}

// HGRN2's lower bounds, a row for each of its layers.
static void check_lower_bounds(void) {
    Config c = preset("fox-pro-nano"), back;
    CHECK(config_set(&c, "--set", "layer_types", "hgrn2,attention,hgrn2,hgrn2", &err) &&
              config_check(&c, "x", &err) && !has_param(&c, "model.lower_bounds"),
          "%s", err.msg);
    CHECK(config_set(&c, "--set", "hgrn2_use_lower_bound", "true", &err) && config_check(&c, "x", &err) &&
              config_write(&c, config_path, &err) && config_read(&back, folder, &err),
          "%s", err.msg);
    CHECK(back.use_lower_bound && same_text(&c, &back), "hgrn2_use_lower_bound is lost");
    ParamTable t = params_build(&back);
    const Param* p = params_find(&t, P_HGRN2_LOWER_BOUNDS, 0);
    CHECK(p && p->layer == -1 && p->trainable && !p->decays && p->shape[0] == 3 && p->shape[1] == 128,
          "lower bounds of a stack");
    params_free(&t);
    c = preset("fox-gdn-nano");
    CHECK(config_set(&c, "--set", "hgrn2_use_lower_bound", "true", &err) && !config_check(&c, "x", &err) &&
              strcmp(err.msg, "x: layer_types has no hgrn2 layer, but hgrn2_use_lower_bound is set") == 0,
          "%s", err.msg);
}

// The presets of stacks: their layers, and with --set others.
static void check_stack_presets(void) {
    static const struct {
        const char *name, *layers;
        int64_t windows[2]; // of the first and the last layer
        int64_t gates;
    } cases[] = {
        {"fox-gdn-760m", "gated_deltanet*3,attention", {0, 0}, 6},
        {"samba2-760m", "mamba2,attention", {0, 2048}, 0},
        {"samba2-nano", "mamba2,attention", {0, 64}, 0},
        {"fox-pro-local-125m", "attention*3,attention:window=0", {2048, 0}, 12},
        {"transformer-pro-local-125m", "attention*3,attention:window=0", {2048, 0}, 0},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
        Config c = preset(cases[i].name);
        char text[256];
        layer_types_text(text, sizeof text, &c.layer_types);
        CHECK(strcmp(text, cases[i].layers) == 0, "%s: %s", cases[i].name, text);
        for (int last = 0; last < 2; last++)
            CHECK(config_layer(&c, last ? c.num_hidden_layers - 1 : 0).window_size == cases[i].windows[last],
                  "%s: window of layer %s", cases[i].name, last ? "L - 1" : "0");
        ParamTable t = params_build(&c);
        int64_t gates = 0;
        for (int r = 0; r < t.num_rows; r++) gates += strstr(t.rows[r].name, "fgate_proj.bias") != NULL;
        CHECK(gates == cases[i].gates, "%s: %lld layers have gates", cases[i].name, (long long)gates);
        params_free(&t);
        check_table(&c, cases[i].name);
        CHECK(config_set(&c, "--set", "num_hidden_layers", "1", &err) && !config_check(&c, "x", &err) &&
                  strstr(err.msg, "but num_hidden_layers is 1"),
              "%s: %s", cases[i].name, err.msg);
    }
}

// What is pruned of layers with windows counts by their FLOPs: T = 8 W here.
static void check_pruned(void) {
    double pruned[12];
    const Config alike = preset("fox-pro-125m"), stack = preset("fox-pro-local-125m");
    for (int l = 0; l < 12; l++) pruned[l] = l % 4 == 3 ? 1 : 0.25;
    double share = config_pruned(&alike, 16384, pruned);
    CHECK(fabs(share - (3 + 9 * 0.25) / 12) < 1e-12, "of layers that are alike: %g", share);
    share = config_pruned(&stack, 16384, pruned);
    const double window = 2048 * (2 - 2048 / 16384.);
    CHECK(fabs(share - (3 * 16384 + 9 * 0.25 * window) / (3 * 16384 + 9 * window)) < 1e-12, "of windows: %g",
          share);
    const double one = 0.5; // of Gated DeltaNet and one layer with attention
    Config gdn = preset("fox-gdn-nano");
    CHECK(config_layers_of(&gdn, MIXER_ATTENTION) == 1 && config_pruned(&gdn, 512, &one) == one, "fox-gdn");
}

static int test_layer_types(void) {
    snprintf(folder, sizeof folder, "%s", test_scratch("layer_types"));
    path_join(config_path, folder, "config.json");
    check_layer_types();
    check_listed_names();
    check_lower_bounds();
    check_stack_presets();
    check_pruned();
    return test_report();
}
