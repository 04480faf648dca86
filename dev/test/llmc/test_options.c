/*
Tests of llmc/run/command/cli.h and llmc/run/command/options.h: the command line, --help, and the record of
options in trainer.json that --resume restores.
*/
#include "../../../llmc/run/command/options.h"
#include "../check.h"

static Error err;
static Options options;
static bool given[NUM_OPTION_ROWS];

// Parses a command line of words separated by blanks ("~" is the empty one). Texts live until the next call.
static bool parse(const char* line) {
    static char words[512];
    static char* argv[32];
    int argc = 1;
    char* rest = NULL;
    snprintf(words, sizeof words, "%s", line);
    for (char* word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        argv[argc++] = strcmp(word, "~") == 0 ? word + 1 : word;
    return options_parse(&options, given, argc, argv, &err);
}

static void check_parse(void) {
    CHECK(parse(""), "no options: %s", err.msg);
    CHECK(options.seq_len == OPTION_UNSET && options.lr == OPTION_UNSET && options.beta2 == 0.95 &&
              options.keep == 3,
          "defaults");
    CHECK(parse("--model fox-pro-nano --set a=1 --set=b=2 --lr=1e-3 --max-tokens 2.5Gi --shuffle --prompt ~ "
                "--keep 0"),
          "%s", err.msg);
    CHECK(strcmp(options.model, "fox-pro-nano") == 0 && options.lr == 1e-3 &&
              options.max_tokens == 2684354560 && options.shuffle == SHUFFLE_TRUE &&
              options.prompt[0] == '\0' && options.keep == 0,
          "values");
    CHECK(options.set.count == 2 && strcmp(options.set.items[0], "a=1") == 0 &&
              strcmp(options.set.items[1], "b=2") == 0,
          "a list");
    int count = 0;
    for (int i = 0; i < NUM_OPTION_ROWS; i++) count += given[i];
    CHECK(count == 7, "%d options were given", count);
    CHECK(parse("--model a --lr 1 --shuffle --lr=2 --model b --shuffle --set a=1 --set a=2 -h --help") &&
              strcmp(options.model, "b") == 0 && options.lr == 2 && options.shuffle == SHUFFLE_TRUE &&
              options.help && options.set.count == 2,
          "the last one counts, but all of a list");
    CHECK(!parse("--lr fast --lr 1") && strstr(err.msg, "--lr fast"), "a bad value that is overridden");
    CHECK(parse("--batch-tokens 16Ki") && options.batch_tokens == 16384, "Ki");
    CHECK(parse("--max-tokens 1e9") && options.max_tokens == 1000000000, "exponent");
    CHECK(parse("-h") && options.help && !options.version, "-h: %s", err.msg);
    CHECK(parse("--version") && options.version && !options.help, "--version: %s", err.msg);

    static const struct {
        const char *line, *says;
    } bad[] = {
        {"--modle x", "--modle"},
        {"--", "--"},
        {"-x", "-x"},
        {"-h=1", "-h=1"},
        {"train", "train"},
        {"--model", "--model"},
        {"--shuffle=1", "--shuffle 1: not one of false|true"},
        {"--shuffle off --lr 1", "--shuffle off: not one of false|true"},
        {"--seq-len x", "--seq-len"},
        {"--seq-len 0", "--seq-len"},
        {"--seq-len -4", "--seq-len"},
        {"--seq-len 1.5", "--seq-len"},
        {"--seq-len 3k5", "--seq-len"},
        {"--seq-len ~", "--seq-len"},
        {"--seq-len 20M", "--seq-len"},
        {"--seq-len 1e400", "--seq-len"},
        {"--lr -1", "--lr"},
        {"--lr nan", "--lr"},
        {"--lr inf", "--lr"},
        {"--lr 0x10", "--lr"},
        {"--lr=", "--lr"},
        {"--beta1 1", "--beta1"},
        {"--adam-eps 0", "--adam-eps"},
        {"--top-p 1.01", "--top-p"},
        {"--model-x y", "--model-x"},
    };
    for (int i = 0; i < (int)(sizeof bad / sizeof bad[0]); i++) {
        CHECK(!parse(bad[i].line), "'%s' is accepted", bad[i].line);
        CHECK(strstr(err.msg, bad[i].says), "'%s': unclear: %s", bad[i].line, err.msg);
    }
    // Each number is held to its own range, on both sides.
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        const CliRow* row = &option_rows[i];
        char line[128];
        if (row->type != CLI_COUNT && row->type != CLI_REAL) continue;
        snprintf(line, sizeof line, "--%s %.17g", row->name, row->least);
        CHECK(parse(line), "%s: %s", line, err.msg);
        snprintf(line, sizeof line, "--%s %.17g", row->name, row->most);
        CHECK(parse(line), "%s: %s", line, err.msg);
        snprintf(line, sizeof line, "--%s %.17g", row->name, row->type == CLI_COUNT ? row->least - 1 : -1e-6);
        CHECK(!parse(line) && strstr(err.msg, row->name), "%s is accepted", line);
        snprintf(line, sizeof line, "--%s %.17g", row->name, 2 * row->most + 1);
        CHECK(!parse(line) && strstr(err.msg, row->name), "%s is accepted", line);
    }
    char* argv[2 * (CLI_MAX_LIST + 1) + 1];
    for (int i = 1; i <= 2 * (CLI_MAX_LIST + 1); i++) argv[i] = i % 2 ? (char*)"--set" : (char*)"a=b";
    CHECK(options_parse(&options, given, 2 * CLI_MAX_LIST + 1, argv, &err), "%s", err.msg);
    CHECK(!options_parse(&options, given, 2 * CLI_MAX_LIST + 3, argv, &err) && strstr(err.msg, "--set"),
          "too many --set");
}

// Puts the options in a record and reads it.
static Json record_of(const Options* o) {
    Json j;
    JsonWriter w = json_writer(0);
    json_begin_object(&w, NULL);
    options_put(o, &w, "options");
    json_end(&w);
    if (!json_parse(&j, "record", w.text, strlen(w.text), &err)) die("%s", err.msg);
    json_writer_free(&w);
    return j;
}

// A switch alone means one of its words, and takes another one that follows it.
static void check_switch(void) {
    static const struct {
        const char* line;
        int64_t shuffle;
    } cases[] = {
        {"--lr 1", OPTION_UNSET},
        {"--shuffle", SHUFFLE_TRUE},
        {"--shuffle --lr 1", SHUFFLE_TRUE},
        {"--shuffle true --lr 1", SHUFFLE_TRUE},
        {"--shuffle false --lr 1", SHUFFLE_FALSE},
        {"--shuffle=false --lr 1", SHUFFLE_FALSE},
        {"--shuffle --shuffle false", SHUFFLE_FALSE},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
        CHECK(parse(cases[i].line) && options.shuffle == cases[i].shuffle, "'%s': %lld", cases[i].line,
              (long long)options.shuffle);
        Json j = record_of(&options);
        const bool none[NUM_OPTION_ROWS] = {false};
        Options to;
        options_defaults(&to);
        CHECK(options_restore(&to, none, "record", &j, json_get(&j, 0, "options"), &err), "%s", err.msg);
        CHECK(to.shuffle == cases[i].shuffle, "'%s' is restored as %lld", cases[i].line,
              (long long)to.shuffle);
        json_free(&j);
    }
}

static void check_choices(void) {
    CHECK(parse("") && options.recompute == OPTION_UNSET && options.attention == OPTION_UNSET, "unset");
    CHECK(parse("--recompute none") && options.recompute == RECOMPUTE_NONE, "none");
    CHECK(parse("--recompute fused") && options.recompute == RECOMPUTE_FUSED, "fused");
    CHECK(parse("--recompute=qkv") && options.recompute == RECOMPUTE_QKV, "qkv");
    CHECK(parse("--recompute block --attention cudnn") && options.recompute == RECOMPUTE_BLOCK &&
              options.attention == ATTENTION_CUDNN,
          "block and cudnn");
    CHECK(parse("--attention fox") && options.attention == ATTENTION_FOX, "fox");
    static const struct {
        const char *line, *says;
    } bad[] = {
        {"--recompute cheap", "--recompute cheap: not one of none|fused|qkv|block"},
        {"--recompute ~", "--recompute : not one of none|fused|qkv|block"},
        {"--recompute none|qkv", "--recompute none|qkv: not one of none|fused|qkv|block"},
        {"--recompute bloc", "--recompute bloc: not one of none|fused|qkv|block"},
        {"--recompute blocks", "--recompute blocks: not one of none|fused|qkv|block"},
        {"--recompute", "--recompute: its none|fused|qkv|block is missing"},
        {"--attention most", "--attention most: not one of fox|cudnn"},
        {"--out --resume", "--out: its DIR is missing before --resume; --out=--resume means this text"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK(!parse(bad[i].line) && strcmp(err.msg, bad[i].says) == 0, "'%s': %s", bad[i].line, err.msg);
    // the names that are printed are those that are parsed
    for (int i = 0; i < (int)(sizeof option_recompute_names / sizeof option_recompute_names[0]); i++) {
        char line[64];
        snprintf(line, sizeof line, "--recompute %s", option_recompute_names[i]);
        CHECK(parse(line) && options.recompute == i, "%s", line);
    }
}

static void check_recipe(void) {
    Recipe recipe = {.name = RECIPE_SUBMISSION,
                     .seq_len = 16,
                     .batch_tokens = 64,
                     .max_tokens = 640,
                     .warmup_tokens = 32,
                     .lr = 0.5,
                     .lr_end = 0.25};
    parse("--lr 2 --seq-len 8");
    options_apply_recipe(&options, &recipe);
    CHECK(options.lr == 2 && options.seq_len == 8, "what was given stays");
    CHECK(options.batch_tokens == 64 && options.max_tokens == 640 && options.warmup_tokens == 32 &&
              options.lr_end == 0.25 && options.recipe == RECIPE_SUBMISSION,
          "the rest is filled");
    parse("--lr-end 0 --recipe analysis --max-tokens 320");
    options_apply_recipe(&options, &recipe);
    CHECK(options.lr_end == 0 && options.max_tokens == 320 && options.lr == 0.5, "0 is a value, too");
    parse("--lr-schedule constant");
    options_apply_recipe(&options, &recipe);
    CHECK(options.lr_end == 0, "a constant learning rate does not fall");
    // the warm-up is the recipe's, at most its share of the recipe's tokens
    static const struct {
        const char* line;
        int64_t warmup;
    } cases[] = {
        {"--max-tokens 320", 16},  {"--max-tokens 639", 31}, {"--max-tokens 640", 32},
        {"--max-tokens 1280", 32}, {"--max-tokens 1", 0},    {"--max-tokens 320 --warmup-tokens 32", 32},
        {"--max-steps 1", 32},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        parse(cases[i].line);
        options_apply_recipe(&options, &recipe);
        CHECK(options.warmup_tokens == cases[i].warmup, "%s: %lld", cases[i].line,
              (long long)options.warmup_tokens);
    }
}

// Without --val-tokens all validations of a training have at most a tenth as many tokens as are trained on.
static void check_val_tokens(void) {
    static const struct {
        const char* line;
        int64_t tokens;
    } cases[] = {
        {"--model fox-pro-nano", 32768}, // 5 of them in 2 Mi tokens
        {"--model fox-pro-nano --val-every 0", 131072},
        {"--model fox-pro-nano --max-tokens 128Ki", 8192},
        {"--model fox-pro-nano --max-tokens 4Ki", 2048}, // 4 sequences
        {"--model fox-pro-micro", 1 << 19},
        {"--model fox-pro-760m --recipe iclr", 1 << 20},
        {"--model fox-pro-125m --max-tokens 1Mi --batch-tokens 128Ki", 65536},
        {"--model fox-pro-125m --max-tokens 1Mi --batch-tokens 1Mi --seq-len 1Mi", 1 << 20},
        {"--model fox-pro-nano --val-tokens 5", 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Config c;
        Recipe recipe;
        CHECK(parse(cases[i].line) && config_preset(&c, &recipe, options.model, &err), "%s", err.msg);
        options_apply_recipe(&options, &recipe);
        CHECK(options.val_tokens == cases[i].tokens, "%s: %lld", cases[i].line,
              (long long)options.val_tokens);
    }
    for (int64_t every = 0; every < 12; every++) // as a loop over the steps counts what is due
        for (int64_t steps = 1; steps < 30; steps++)
            for (int64_t step = steps, due = 0; step >= 0; step--) {
                due += step == steps || (every && step && step % every == 0);
                CHECK(option_times(every, step, steps) == due, "every %lld of %lld, from %lld",
                      (long long)every, (long long)steps, (long long)step);
            }
}

// The published recipes, in numbers of the publications, and of each recipe a preset that it has no row for.
static void check_published(void) {
    static const struct {
        RecipeName name;
        const char* preset;
        int64_t tokens;
        double lr, lr_end;
        int64_t head_size;
    } rows[] = {
        {.name = RECIPE_ICLR, .preset = "fox-pro-760m", .tokens = 45LL << 30, .lr = 2e-3, .head_size = 64},
        {.name = RECIPE_ICLR, .preset = "hgrn2-760m", .tokens = 45LL << 30, .lr = 2e-3, .head_size = 128},
        {.name = RECIPE_ICLR, .preset = "mamba2-760m", .tokens = 45LL << 30, .lr = 2e-3, .head_size = 64},
        {.name = RECIPE_ICLR,
         .preset = "transformer-pro-760m",
         .tokens = 45LL << 30,
         .lr = 1e-3,
         .head_size = 128},
        {.name = RECIPE_ICLR, .preset = "fox-llama-760m", .tokens = 45LL << 30, .lr = 1e-3, .head_size = 64},
        {.name = RECIPE_ICLR, .preset = "deltanet-760m", .tokens = 45LL << 30, .lr = 1e-3, .head_size = 128},
        {.name = RECIPE_ICLR,
         .preset = "transformer-llama-760m",
         .tokens = 45LL << 30,
         .lr = 5e-4,
         .head_size = 128},
        {.name = RECIPE_ANALYSIS, .preset = "fox-pro-125m", .tokens = 5LL << 29, .lr = 2e-3, .head_size = 64},
        {.name = RECIPE_ANALYSIS,
         .preset = "fox-llama-360m",
         .tokens = 7LL << 30,
         .lr = 2e-3,
         .head_size = 64},
        {.name = RECIPE_ANALYSIS,
         .preset = "transformer-swa-760m",
         .tokens = 15LL << 30,
         .lr = 1e-3,
         .head_size = 128},
        {.name = RECIPE_SUBMISSION,
         .preset = "fox-llama-760m",
         .tokens = 15LL << 30,
         .lr = 1.25e-3,
         .lr_end = 0.1,
         .head_size = 128},
        {.name = RECIPE_SUBMISSION,
         .preset = "transformer-llama-760m",
         .tokens = 15LL << 30,
         .lr = 1.25e-3,
         .lr_end = 0.1,
         .head_size = 128},
        {.name = RECIPE_SUBMISSION,
         .preset = "fox-llama-125m",
         .tokens = 2600000000,
         .lr = 3e-3,
         .lr_end = 0.1,
         .head_size = 64},
        {.name = RECIPE_GDN,
         .preset = "gated-deltanet-760m",
         .tokens = 100000000000,
         .lr = 4e-4,
         .lr_end = 0.1,
         .head_size = 128},
    };
    Config c = config_defaults();
    Recipe r;
    memset(&r, 0, sizeof r);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        CHECK(config_preset_recipe(&c, &r, rows[i].preset, rows[i].name, &err), "%s", err.msg);
        CHECK(r.name == rows[i].name && r.max_tokens == rows[i].tokens && r.lr == rows[i].lr &&
                  r.lr_end == rows[i].lr_end && config_head_size(&c) == rows[i].head_size,
              "%s of %s: %lld tokens at %g to %g, heads of %lld", recipe_name(rows[i].name), rows[i].preset,
              (long long)r.max_tokens, r.lr, r.lr_end, (long long)config_head_size(&c));
        const bool of_4096 = rows[i].name == RECIPE_GDN;
        CHECK(r.seq_len == (of_4096 ? 4096 : 16384) && r.batch_tokens == 524288 &&
                  r.warmup_tokens == (of_4096 ? 1000000000 : 268435456),
              "lengths");
    }
    static const struct {
        RecipeName name;
        const char *preset, *says;
    } bad[] = {
        {RECIPE_ICLR, "fox-pro-360m",
         "--recipe iclr: has no row for fox-pro-360m; its rows are 760m (fox-pro, hgrn2,"},
        {RECIPE_ICLR, "transformer-swa-760m", "--recipe iclr: has no row for transformer-swa-760m"},
        {RECIPE_ANALYSIS, "fox-pro-nano", "its rows are 125m (the paper's families), 360m (the paper's"},
        {RECIPE_ANALYSIS, "gated-deltanet-760m", "--recipe analysis: has no row for gated-deltanet-760m"},
        {RECIPE_ANALYSIS, "fox-gdn-125m", "--recipe analysis: has no row for fox-gdn-125m"},
        {RECIPE_SUBMISSION, "fox-llama-360m", "--recipe submission: has no row for fox-llama-360m"},
        {RECIPE_SUBMISSION, "fox-pro-760m",
         "its rows are 125m (fox-llama, transformer-llama), 760m (fox-llama,"},
        {RECIPE_GDN, "gated-deltanet-360m", "its rows are 760m (gated-deltanet)"},
        {RECIPE_GDN, "fox-gdn-760m", "--recipe gdn: has no row for fox-gdn-760m"},
        {RECIPE_ICLR, "fox-pro-1b", "--model fox-pro-1b: no such preset"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK(!config_preset_recipe(&c, &r, bad[i].preset, bad[i].name, &err) && strstr(err.msg, bad[i].says),
              "%s: %s", bad[i].preset, err.msg);
}

static void check_adamw(void) {
    CHECK(parse("--beta1 0.5 --beta2 0.75 --adam-eps 1e-3 --weight-decay 2"), "%s", err.msg);
    AdamWParams p = options_adamw(&options, 0.25, 7);
    CHECK(p.lr == 0.25 && p.beta1 == 0.5 && p.beta2 == 0.75 && p.eps == 1e-3 && p.weight_decay == 2 &&
              p.step == 7,
          "AdamW's numbers");
}

// Every option is in the help, with its default where it has one, in no more than 110 columns.
static void check_help(void) {
    char* text = NULL;
    size_t n = 0;
    FILE* f = open_memstream(&text, &n);
    options_print_help(f, "./train_fox", "What it does.");
    fclose(f);
    CHECK(strstr(text, "./train_fox") && strstr(text, "What it does."), "usage");
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        char name[64];
        bool group = option_rows[i].type == CLI_GROUP;
        snprintf(name, sizeof name, group ? "\n%s\n" : "  --%s ", option_rows[i].name);
        CHECK(strstr(text, name), "help does not mention %s", name);
    }
    CHECK(strstr(text, "[0.95]"), "defaults");
    CHECK(strstr(text, "save memory: none; outputs of"), "recompute");
    CHECK(strstr(text, "  --recipe iclr|analysis|submission|gdn\n                            train "),
          "recipes");
    for (int i = 0; i < NUM_RECIPE_ROWS; i++) {
        const RecipeRow* row = &recipe_rows[i];
        char start[64];
        snprintf(start, sizeof start, "\n  %-10s %-5s%12lld %7g ", recipe_name(row->name), row->size,
                 (long long)row->max_tokens, row->lr);
        CHECK(strstr(text, start), "help has no row%s", start);
    }
    size_t width = 0;
    for (char* line = text; *line;) {
        size_t length = strcspn(line, "\n");
        width = length > width ? length : width;
        line += length + (line[length] == '\n');
    }
    CHECK(width <= 110, "help is %zu columns wide", width);
    free(text);
}

// Gives option i a value that is not its default.
static void give(Options* o, int i) {
    const CliRow* row = &option_rows[i];
    char text[64];
    snprintf(text, sizeof text, "%.17g",
             row->type == CLI_COUNT ? row->least + 2 : row->least + 0.1 * (row->most - row->least));
    bool number = row->type == CLI_COUNT || row->type == CLI_REAL;
    bool named = row->type == CLI_CHOICE || row->type == CLI_SWITCH;
    if (named) cli_choice_name(text, row, 1);
    if (!cli_set(row, o, number || named ? text : "a=\"b\"\n", &err)) die("%s", err.msg);
}

static bool has_default(const Options* o, int i) {
    const CliRow* row = &option_rows[i];
    const void* field = (const char*)o + row->offset;
    switch (row->type) {
    case CLI_GROUP: return true;
    case CLI_TEXT: return *(char* const*)field == NULL;
    case CLI_CHOICE:
    case CLI_SWITCH:
    case CLI_COUNT: return *(const int64_t*)field == (int64_t)row->preset;
    case CLI_REAL: return *(const double*)field == row->preset;
    case CLI_FLAG: return !*(const bool*)field;
    case CLI_LIST: return ((const CliList*)field)->count == 0;
    }
    return false;
}

static void check_restore(void) {
    Options from, to, other;
    options_defaults(&from);
    for (int i = 0; i < NUM_OPTION_ROWS; i++) give(&from, i);
    Json j = record_of(&from);
    int node = json_get(&j, 0, "options");
    bool none[NUM_OPTION_ROWS] = {false};
    options_defaults(&to);
    CHECK(options_restore(&to, none, "record", &j, node, &err), "%s", err.msg);
    for (int i = 0; i < NUM_OPTION_ROWS; i++)
        CHECK(option_rows[i].type == CLI_GROUP ||
                  has_default(&to, i) == !option_has(&option_rows[i], RECORDED),
              "--%s", option_rows[i].name);
    Json again = record_of(&to);
    CHECK(again.count == j.count, "the record of what was restored");
    CHECK(to.lr == from.lr && to.seq_len == from.seq_len && strcmp(to.model, from.model) == 0 &&
              to.set.count == 1 && strcmp(to.set.items[0], from.set.items[0]) == 0 &&
              to.shuffle == SHUFFLE_TRUE,
          "values survive");
    CHECK(to.recompute == RECOMPUTE_FUSED && to.attention == ATTENTION_CUDNN, "choices survive");
    json_free(&again);

    // A seed is exact to the last digit.
    CHECK(parse("--seed 9007199254740993") && options.seed == 9007199254740993, "the seed given");
    again = record_of(&options);
    CHECK(options_restore(&to, none, "record", &again, json_get(&again, 0, "options"), &err), "%s", err.msg);
    CHECK(to.seed == 9007199254740993, "the seed restored is %lld", (long long)to.seed);
    json_free(&again);

    // The command line wins.
    parse("--lr 0.25 --set x=y");
    CHECK(options_restore(&options, given, "record", &j, node, &err), "%s", err.msg);
    CHECK(options.lr == 0.25 && options.set.count == 1 && strcmp(options.set.items[0], "x=y") == 0,
          "given options stay");
    CHECK(options.seq_len == from.seq_len, "others are restored");
    json_free(&j);

    static const struct {
        const char* text;
        bool ok;
    } records[] = {
        {"{\"lr\": \"fast\"}", false},
        {"{\"seq-len\": 0}", false},
        {"{\"seq-len\": 1.5}", false},
        {"{\"recompute\": 1}", false},
        {"{\"recompute\": \"most\"}", false},
        {"{\"attention\": \"cheap\"}", false},
        {"{\"shuffle\": 1}", false},
        {"{\"model\": 5}", false},
        {"{\"set\": [1]}", false},
        {"{\"gone\": 1}", true},
        {"{\"resume\": true}", true},
        {"{}", true},
    };
    for (int i = 0; i < (int)(sizeof records / sizeof records[0]); i++) {
        if (!json_parse(&j, "record", records[i].text, strlen(records[i].text), &err)) die("%s", err.msg);
        options_defaults(&other);
        CHECK(options_restore(&other, none, "FOLDER", &j, 0, &err) == records[i].ok, "%s", records[i].text);
        CHECK(records[i].ok || strstr(err.msg, "FOLDER"), "unclear: %s", err.msg);
        CHECK(!other.resume, "--resume is no part of a record");
        json_free(&j);
    }
}

static void check_recorded_choices(void) {
    static const struct {
        const char* text;
        int recompute;
    } records[] = {
        {"{\"recompute\": \"none\"}", RECOMPUTE_NONE},
        {"{\"recompute\": \"qkv\"}", RECOMPUTE_QKV},
        {"{\"recompute\": \"block\"}", RECOMPUTE_BLOCK},
        {"{}", OPTION_UNSET},
    };
    const bool none[NUM_OPTION_ROWS] = {false};
    for (size_t i = 0; i < sizeof records / sizeof records[0]; i++) {
        Json j;
        Options o;
        if (!json_parse(&j, "record", records[i].text, strlen(records[i].text), &err)) die("%s", err.msg);
        options_defaults(&o);
        CHECK(options_restore(&o, none, "FOLDER", &j, 0, &err) && o.recompute == records[i].recompute, "%s",
              records[i].text);
        json_free(&j);
        o.model = NULL; // pointed into j
        j = record_of(&o);
        const char* name = json_string(&j, json_get(&j, json_get(&j, 0, "options"), "recompute"));
        CHECK(o.recompute == OPTION_UNSET ? !name
                                          : name && strcmp(name, option_recompute_names[o.recompute]) == 0,
              "%s is recorded as %s", records[i].text, name ? name : "nothing");
        json_free(&j);
    }
}

// A mistyped name is answered with the nearest one; one that is near to nothing, by itself.
static void check_nearest(void) {
    static const struct {
        const char *option, *says;
    } options_typed[] = {{"--seeed=1", "--seeed: no such option (is --seed meant?); --help lists them"},
                         {"--resmue", "is --resume meant?"},
                         {"--modle=x", "is --model meant?"},
                         {"--daat=x", "is --data meant?"},
                         {"--warmup=1", "is --warmup-tokens meant?"},
                         {"--maxtokens", "is --max-tokens meant?"},
                         {"--top_k 1", "is --top-k meant?"},
                         {"--learning-rate 1", "--learning-rate: no such option; --help"},
                         {"--x", "--x: no such option; --help"},
                         {"--=", "--: no such option; --help"}};
    for (size_t i = 0; i < sizeof options_typed / sizeof options_typed[0]; i++)
        CHECK(!parse(options_typed[i].option) && strstr(err.msg, options_typed[i].says), "%s: %s",
              options_typed[i].option, err.msg);
    static const struct {
        const char *typed, *says;
    } presets[] = {{"foxpro-125m", "no such preset (is fox-pro-125m meant?); a preset is one of"},
                   {"fox-pro-760M", "is fox-pro-760m meant?"},
                   {"transformer_llama-nano", "is transformer-llama-nano meant?"},
                   {"gpt2", "--model gpt2: no such preset; a preset is"}};
    Config c;
    Recipe r;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        CHECK(!config_preset_recipe(&c, &r, presets[i].typed, RECIPE_ANALYSIS, &err) &&
                  strstr(err.msg, presets[i].says),
              "%s: %s", presets[i].typed, err.msg);
    c = config_defaults();
    CHECK(!config_set(&c, "--set", "num_head", "2", &err) &&
              strstr(err.msg, "'num_head' (is num_heads meant?); --dry-run config prints"),
          "%s", err.msg);
    CHECK(!config_set(&c, "--set", "colour", "2", &err) &&
              strstr(err.msg, "'colour'; --dry-run config prints"),
          "%s", err.msg);
    char word[200];
    memset(word, 'x', sizeof word);
    CHECK(nearest_to(word, sizeof word).word[0] == '\0', "a word that is longer than any name");
    CHECK(edit_distance("kitten", "sitting") == 3 && edit_distance("", "abc") == 3, "edit_distance");
    CHECK(edit_distance("ab", "ba") == 1 && edit_distance("abcd", "badc") == 2, "swapped");
}

int main(void) {
    check_nearest();
    check_parse();
    check_switch();
    check_choices();
    check_recipe();
    check_val_tokens();
    check_published();
    check_adamw();
    check_help();
    check_restore();
    check_recorded_choices();
    return test_report();
}
