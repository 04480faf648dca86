/*
Tests llmc/config/rope_scaling.h and llmc/model/rotation.h: tables of transformers 5.23, the objects of
config.json, and the words of --set. dev/test/hf/test_hf_rope.py compares more tables where transformers is
installed.
*/
#include "../../../llmc/config/config_file.h"
#include "../../../llmc/config/presets.h"
#include "../../../llmc/model/rotation.h"
#include "../check.h"

static Error err;
static char folder[PATH_LENGTH], path[PATH_LENGTH];

// A Transformer with heads of 16 channels and a rope_base of 500,000
static Config rope_config(void) {
    Config c;
    Recipe recipe;
    if (!config_preset(&c, &recipe, "transformer-llama-nano", &err)) die("%s", err.msg);
    c.hidden_size = 64, c.num_heads = 4;
    return c;
}

static bool scale(Config* c, const char* scaling) {
    return config_set(c, "--set", "rope_scaling", scaling, &err) && config_check(c, "--set", &err);
}

// inv_freq and attention_factor as transformers has them, in float32; of ntk those of its plain table.
static const struct {
    const char* scaling;
    double frequencies[8], gain;
} tables[] = {
    {"null",
     {1, 1.93922758e-01, 3.76060307e-02, 7.29266508e-03, 1.41421345e-03, 2.74248188e-04, 5.31829573e-05,
      1.03133852e-05},
     1},
    {"linear:4",
     {2.5e-01, 4.84806895e-02, 9.40150768e-03, 1.82316627e-03, 3.53553361e-04, 6.85620471e-05, 1.32957393e-05,
      2.57834631e-06},
     1},
    {"ntk:4",
     {1, 1.59081683e-01, 2.53069829e-02, 4.02587745e-03, 6.40443352e-04, 1.01882812e-04, 1.62076885e-05,
      2.57834654e-06},
     1},
    {"yarn:4:512",
     {1, 1.45442069e-01, 1.88030154e-02, 1.82316627e-03, 3.53553361e-04, 6.85620471e-05, 1.32957393e-05,
      2.57834631e-06},
     1.138629436111989},
};

static void check_tables(void) {
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        Config c = rope_config();
        CHECK(scale(&c, tables[i].scaling), "%s", err.msg);
        const Rotation r = config_rotation(&c);
        CHECK(fabs(r.gain - tables[i].gain) < 1e-12, "%s: gain %.15g", tables[i].scaling, r.gain);
        CHECK(fabs(config_rope_gain(&c) - r.gain * r.gain) < 1e-12, "%s: of scores", tables[i].scaling);
        for (int pair = 0; pair < 8; pair++) {
            const double got = rotation_frequency(&r, pair, 8), want = tables[i].frequencies[pair];
            CHECK(fabs(got - want) <= 3e-7 * want, "%s: pair %d has frequency %.9g, not %.9g",
                  tables[i].scaling, pair, got, want);
        }
    }
    Config c = rope_config();
    c.use_rope = false;
    CHECK(config_rope_gain(&c) == 0, "a gain without RoPE");
}

// What --set says of words that it does not take; NULL: takes them.
static void check_words(void) {
    static const char* const words[][2] = {
        {"yarn:4", "which length"},
        {"yarn:4:1Ki", NULL},
        {"ntk:1.5", NULL},
        {"linear:1", NULL},
        {"null", NULL},
        {"llama3:8", "is none of"},
        {"linear:0", "the factor"},
        {"linear:-4", "the factor"},
        {"yarn:nan:512", "the factor"},
        {"linear", "the factor"},
        {"null:2", "more than"},
        {"ntk:4:512", "more than"},
        {"ntk:1e6", "rope_base of 3.6e+12"}, // which config.json's reader would refuse
        {"yarn:4:512:9", "more than"},
        {"yarn:4:0", "the length"},
        {"yarn:4:1.5", "the length"},
    };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        Config c = rope_config();
        const bool ok = scale(&c, words[i][0]);
        CHECK(ok == !words[i][1], "%s: %s", words[i][0], ok ? "is accepted" : err.msg);
        CHECK(ok || (strstr(err.msg, words[i][1]) && strstr(err.msg, "rope_scaling")), "unclear: %s",
              err.msg);
    }
    Config c = rope_config();
    c.use_rope = false;
    CHECK(!scale(&c, "linear:4") && strstr(err.msg, "no layer has RoPE"), "without RoPE: %s", err.msg);
    c = rope_config();
    c.num_heads = 32; // heads of 2 channels: the only pair turns at any base alike
    CHECK(!scale(&c, "ntk:4") && strstr(err.msg, "4 channels"), "ntk of one pair: %s", err.msg);
    c = rope_config();
    c = rope_config();
    c.rope_base = 1; // all pairs turn alike: YaRN divides by its logarithm
    CHECK(!scale(&c, "yarn:4:512") && strstr(err.msg, "rope_base above 1"), "yarn of base 1: %s", err.msg);
    CHECK(scale(&c, "linear:4"), "linear of base 1: %s", err.msg);
    c = rope_config();
    CHECK(scale(&c, "yarn:4:512") && scale(&c, "yarn:8") && c.rope_scaling.length == 512, "%s", err.msg);
    CHECK(scale(&c, "ntk:2") && c.rope_base > 1e6 && c.rope_scaling.type == ROPE_PLAIN, "%s", err.msg);
}

static void read_members(Config* c, const char* members, const char* says) {
    FILE* f = fopen(path, "wb");
    if (!f ||
        fprintf(f,
                "{\"vocab_size\": 9, \"hidden_size\": 64, \"num_hidden_layers\": 1, \"num_heads\": 4, "
                "\"use_rope\": true, %s}",
                members) < 0 ||
        fclose(f) != 0)
        die("%s: cannot write", path);
    const bool ok = config_read(c, folder, &err);
    CHECK(ok == !says, "%s: %s", members, ok ? "is accepted" : err.msg);
    CHECK(ok || (strstr(err.msg, says) && strstr(err.msg, "config.json: ")), "%s: unclear: %s", members,
          err.msg);
}

// The objects of config.json, of any version of transformers
static void check_rope_files(void) {
    Config c;
    read_members(&c, "\"rope_scaling\": null", NULL);
    CHECK(c.rope_scaling.type == ROPE_PLAIN, "null");
    read_members(&c, "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.5}", NULL);
    CHECK(c.rope_scaling.type == ROPE_LINEAR && c.rope_scaling.factor == 2.5, "linear");
    read_members(&c,
                 "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4, \"rope_theta\": 10000, "
                 "\"original_max_position_embeddings\": 512, \"beta_fast\": 32.0, \"beta_slow\": 1, "
                 "\"attention_factor\": null, \"truncate\": true}",
                 NULL);
    CHECK(c.rope_scaling.type == ROPE_YARN && c.rope_scaling.length == 512 && c.rope_base == 10000, "yarn");
    read_members(&c, "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 500000}", NULL);
    CHECK(c.rope_scaling.type == ROPE_PLAIN, "default");
    read_members(&c, "\"rope_parameters\": {\"rope_theta\": 20000}", NULL);
    CHECK(c.rope_scaling.type == ROPE_PLAIN && c.rope_base == 20000, "default without a type");
    read_members(&c,
                 "\"rope_parameters\": {\"rope_type\": \"default\"}, "
                 "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2}",
                 NULL);
    CHECK(c.rope_scaling.type == ROPE_LINEAR, "rope_scaling goes before");
    static const char* const bad[][2] = {
        {"\"rope_scaling\": \"yarn:4\"", "rope_type"},
        {"\"rope_scaling\": {\"factor\": 4}", "rope_type"},
        {"\"rope_scaling\": {\"rope_type\": \"linear\"}", "factor"},
        {"\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 0}", "the factor"},
        {"\"rope_scaling\": {\"rope_type\": \"ntk\", \"factor\": 4}", "neither"},
        {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8}", "is none of"},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}", "which length"},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"beta_fast\": 16}", "beta_fast"},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"mscale\": 1}", "mscale"},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"attention_factor\": 1}",
         "attention_factor"},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"truncate\": false}", "truncate"},
        {"\"rope_base\": 500000, \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 1e4}",
         "rope_theta"},
        {"\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4}, \"fgate_type\": \"none\", "
         "\"num_hidden_layers\": 1",
         "config.json"}, // twice a key
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) read_members(&c, bad[i][0], bad[i][1]);
    // what is written
    Config yarn = rope_config();
    Json j;
    CHECK(scale(&yarn, "yarn:4:512") && config_write(&yarn, path, &err), "%s", err.msg);
    if (!json_parse_file(&j, path, &err)) die("%s", err.msg);
    const int node = json_get(&j, 0, "rope_parameters");
    double theta = 0, factor = 0;
    int64_t length = 0;
    CHECK(json_double(&j, json_get(&j, node, "rope_theta"), &theta) && theta == 500000, "rope_theta %g",
          theta);
    CHECK(json_double(&j, json_get(&j, node, "factor"), &factor) && factor == 4, "factor %g", factor);
    CHECK(json_int64(&j, json_get(&j, node, "original_max_position_embeddings"), &length) && length == 512,
          "length %lld", (long long)length);
    json_free(&j);
    yarn = rope_config();
    CHECK(config_write(&yarn, path, &err) && json_parse_file(&j, path, &err), "%s", err.msg);
    CHECK(json_get(&j, 0, "rope_parameters") < 0, "a plain model has rope_parameters");
    json_free(&j);
}

static int test_rotation(void) {
    snprintf(folder, sizeof folder, "%s", test_scratch("rotation"));
    path_join(path, folder, "config.json");
    check_tables();
    check_words();
    check_rope_files();
    return test_report();
}
