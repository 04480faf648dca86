/*
Tests of llmc/checkpoint/hf: the files that make a checkpoint a Hugging Face folder, and the tokenizers that
are accepted for it. dev/test/hf/test_hf_trained.py opens such folders in transformers.
*/
#include "../scratch.h"
#include "../checkpoint_fixture.h"

static char* read_text(const char* path) {
    size_t n;
    char* text = read_file(path, &n, &err);
    if (!text) die("%s", err.msg);
    return text;
}

// Saves a checkpoint of a step without the tensors' values, with a tokenizer or NULL.
static void save_with(int64_t step, const HfTokenizer* tokenizer) {
    const TrainerState state = state_at(step);
    const Shard whole = params_shard(&table, 0, 1);
    const CheckpointRecord record = record_of(&table, &state, tokenizer);
    Buffers b = buffers(4);
    const CheckpointTensors t = tensors_of(&b);
    const CheckpointPart part = {&table, &whole, &t, NULL};
    CheckpointWriter w;
    CHECK_OK(checkpoint_writer_open(&w, out, step, &table, 4, &err));
    CHECK_OK(checkpoint_create(&w, &record, &err) && checkpoint_write_shard(&w, &part, &err) &&
             checkpoint_finish(&w, 0, &err));
    checkpoint_writer_close(&w);
    free_buffers(&b);
}

#define IN_STEP(step, name) in_out("step_%08d/" name, step)

static void check_contains(const char* path, const char* text, bool expected) {
    char* found = read_text(path);
    CHECK((strstr(found, text) != NULL) == expected, "%s %s '%s': %s", path, expected ? "lacks" : "has", text,
          found);
    free(found);
}

// A Python file of the folder is that of llmc/checkpoint/hf, in ASCII.
static void check_python(const char* folder, const char* name) {
    char in_folder[64], in_source[64];
    snprintf(in_folder, sizeof in_folder, "%s/%s", folder, name);
    snprintf(in_source, sizeof in_source, "llmc/checkpoint/hf/%s", name);
    char *python = read_text(in_out("%s", in_folder)), *source = read_text(in_source);
    CHECK(strcmp(python, source) == 0, "%s is not %s", in_folder, in_source);
    size_t ascii = strspn(python, "\n");
    while (python[ascii] == '\n' || (python[ascii] >= ' ' && python[ascii] < 127)) ascii++;
    CHECK(!python[ascii], "%s: byte %d is not ASCII", name, (int)ascii);
    free(python), free(source);
}

// The folder of a recurrent model, and of a stack of layers, has the Python files that its auto_map names and
// imports, and its card how to open it.
static void test_recurrent(void) {
    Config c;
    Recipe recipe;
    const TrainerState state = state_at(0);
    const HfRun run = record_of(&table, &state, NULL).run;
    CHECK(config_preset(&c, &recipe, "deltanet-nano", &err), "%s", err.msg);
    ParamTable deltanet = params_build_for(&c, 1);
    if (!make_folders(in_out("deltanet"), &err)) die("%s", err.msg);
    CHECK_OK(hf_folder_write(in_out("deltanet"), &c, &deltanet, &run, NULL, &err));
    check_python("deltanet", "configuration_fox.py");
    check_python("deltanet", "modeling_fox.py");
    check_python("deltanet", "modeling_recurrent.py");
    check_contains(in_out("deltanet/README.md"), "# DeltaNetForCausalLM of", true);
    check_contains(in_out("deltanet/README.md"), "AutoModelForCausalLM.from_pretrained(FOLDER", true);
    CHECK(access(in_out("deltanet/modeling_stack.py"), F_OK) != 0, "modeling_stack.py without layer_types");
    params_free(&deltanet);

    CHECK(config_preset(&c, &recipe, "fox-pro-nano", &err) &&
              config_set(&c, "test", "layer_types", "mamba2,attention:window=64", &err) &&
              config_check(&c, "test", &err),
          "%s", err.msg);
    ParamTable stack = params_build_for(&c, 1);
    if (!make_folders(in_out("stack"), &err)) die("%s", err.msg);
    CHECK_OK(hf_folder_write(in_out("stack"), &c, &stack, &run, NULL, &err));
    check_python("stack", "configuration_fox.py");
    check_python("stack", "modeling_fox.py");
    check_python("stack", "modeling_recurrent.py");
    check_python("stack", "modeling_stack.py");
    check_contains(in_out("stack/README.md"), "| layer types | `mamba2,attention:window=64` |", true);
    params_free(&stack);
}

// Every file is there, the same in the next save, and what the run was.
static void test_files(void) {
    static const char* const names[] = {"configuration_fox.py", "modeling_fox.py", "generation_config.json",
                                        "README.md", "config.json"};
    options.data = "/home/some|one/shards/text_train_*.bin,more/x_*.bin";
    options.seq_len = 512, options.seed = 7;
    save_with(10, NULL);
    rename(in_out("step_00000010"), in_out("first"));
    save_with(10, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *a = read_text(in_out("first/%s", names[i])),
             *b = read_text(in_out("step_00000010/%s", names[i]));
        CHECK(strcmp(a, b) == 0, "%s differs in the next save", names[i]);
        free(a), free(b);
    }
    check_python("step_00000010", "configuration_fox.py");
    check_python("step_00000010", "modeling_fox.py");
    CHECK(access(IN_STEP(10, "modeling_recurrent.py"), F_OK) != 0, "modeling_recurrent.py with attention");

    const char* card = IN_STEP(10, "README.md");
    check_contains(card, "---\nlibrary_name: transformers\npipeline_tag: text-generation\n", true);
    check_contains(card, "\nlicense:", false);
    check_contains(card, "| preset | `fox-pro-nano` |\n| layers | 2 |\n", true);
    check_contains(card, "| data | `text_train_*.bin, x_*.bin` |\n", true);
    check_contains(card, "| trained on | 1000 tokens, in sequences of 512 |\n", true);
    check_contains(card, "| seed | 7 |\n| code version | ", true);
    check_contains(card, "home", false);
    check_contains(card, "AutoTokenizer.from_pretrained", false);
    check_contains(card, "JSON-escaped", false);
    check_contains(IN_STEP(10, "generation_config.json"), "\"eos_token_id\": 10", true);
    CHECK(!exists(IN_STEP(10, "tokenizer.json")) && !exists(IN_STEP(10, "tokenizer_config.json")),
          "a tokenizer from nowhere");
    CHECK(loads(folder_of(10)), "%s", err.msg);
}

// A name cannot end the card's table or its code.
static void test_names(void) {
    options.model = NULL;
    options.init = "runs/a`b|c\nd/";
    options.data = ",/,x//,";
    save_with(10, NULL);
    check_contains(IN_STEP(10, "README.md"), "| initialized from | `a?b?c?d` |\n", true);
    check_contains(IN_STEP(10, "README.md"), "| data | `, /, x, ` |\n", true);
    options.model = "fox-pro-nano";
    options.init = NULL;
    options.data = NULL;
}

// ----------------------------------------------------------------------------
// tokenizers

// Finds the tokenizer beside t_train_000000.bin or in a folder.
static bool find(HfTokenizer* t, const char* folder) {
    return hf_tokenizer_find(t, in_out("t_train_000000.bin"), folder, &config, options.json_escape, &err);
}

// Writes a tokenizer.json of 3 tokens, of which the last has the id `last`.
static void write_tokenizer(const char* path, int last) {
    FILE* f = fopen(path, "wb");
    if (!f) die("%s: cannot create", path);
    fprintf(f,
            "{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1}}, \"added_tokens\": [{\"id\": %d, \"content\": "
            "\"\\\"end\"}]}",
            last);
    fclose(f);
}

static void test_find(void) {
    static const char* const none[] = {"s_000000.bin", "s_test_000000.bin", "s_train_00000.bin",
                                       "train_000000.bin"};
    HfTokenizer t;
    char path[PATH_LENGTH];
    CHECK(shard_tokenizer_beside(path, "a/s_val_000007.bin") && strcmp(path, "a/s_tokenizer.json") == 0,
          "at %s", path);
    for (int i = 0; i < 4; i++) CHECK(!shard_tokenizer_beside(path, none[i]), "%s: at %s", none[i], path);
    options.seq_len = 512;
    CHECK_OK(find(&t, NULL));
    CHECK(!t.json && !t.config, "a tokenizer from nowhere");
    if (!make_folders(in_out("init"), &err)) die("%s", err.msg);
    CHECK_OK(find(&t, in_out("init")));
    CHECK(!t.json, "a tokenizer from nowhere");

    write_tokenizer(in_out("init/tokenizer.json"), 9); // the model's end of text is 10
    CHECK_OK(find(&t, in_out("init")));
    CHECK(t.json && !strstr(t.config, "model_max_length") && !strstr(t.config, "eos_token"), "%s", t.config);
    hf_tokenizer_free(&t);
    write_bytes(in_out("init/tokenizer_config.json"), "{\"add_bos_token\": true}", 23);
    CHECK_OK(find(&t, in_out("init")));
    CHECK(strstr(t.config, "\"add_bos_token\": false"), "%s", t.config);
    hf_tokenizer_free(&t);

    write_tokenizer(in_out("t_tokenizer.json"), 10); // comes first
    options.json_escape = true;
    CHECK_OK(find(&t, in_out("init")));
    CHECK(strstr(t.json, "10") && strstr(t.config, "\"eos_token\": \"\\\"end\"") &&
              strstr(t.config, "JSON-escaped"),
          "%s", t.config);
    save_with(10, &t);
    char* json = read_text(IN_STEP(10, "tokenizer.json"));
    CHECK(strcmp(json, t.json) == 0, "tokenizer.json: %s", json);
    free(json);
    check_contains(IN_STEP(10, "tokenizer_config.json"), "JSON-escaped", true);
    check_contains(IN_STEP(10, "README.md"), "JSON-escaped", true);
    check_contains(IN_STEP(10, "README.md"), "tokenizer = AutoTokenizer.from_pretrained(FOLDER", true);
    options.json_escape = false;
    hf_tokenizer_free(&t);
}

// What shards are encoded without is null in a checkpoint; the rest of the file stays as it is, byte for
// byte.
static void test_as_in_training(void) {
    static const struct {
        const char *text, *expected, *config;
    } files[] = {
        {"{\"model\": {\"dropout\":0.1, \"vocab\": {\"a\": 0}, \"x\" :1e0 }, \"padding\": {\"length\":[ 8 "
         "]},\n"
         "\"post_processor\": {\"type\": \"TemplateProcessing\", \"a\": \"}\\u00e9\"} ,\"truncation\" : 7 "
         "}\n",
         "{\"model\": {\"dropout\":null, \"vocab\": {\"a\": 0}, \"x\" :1e0 }, \"padding\": null,\n"
         "\"post_processor\": null ,\"truncation\" : null }\n",
         "\"add_bos_token\": false"},
        {"{\"post_processor\":{},\"model\":{\"vocab\":{\"a\":0,\"</s>\":10}}}",
         "{\"post_processor\":null,\"model\":{\"vocab\":{\"a\":0,\"</s>\":10}}}", "\"bos_token\": \"</s>\""},
        {"{\"post_processor\":{},\"model\":{\"vocab\":{\"\\u0000\":0,\"</s>\":10}}}", // a token of a zero byte
         "{\"post_processor\":null,\"model\":{\"vocab\":{\"\\u0000\":0,\"</s>\":10}}}",
         "\"bos_token\": \"</s>\""},
        {"{\"model\":{\"vocab\":[[\"a\",0],1,2,3,4,5,6,7,8,9,[\"</s>\",-1]]}}",
         "{\"model\":{\"vocab\":[[\"a\",0],1,2,3,4,5,6,7,8,9,[\"</s>\",-1]]}}", "\"eos_token\": \"</s>\""},
        {"{\"model\":{\"vocab\":{\"a\":0}},\"pre_tokenizer\":{\"add_prefix_space\":true}}",
         "{\"model\":{\"vocab\":{\"a\":0}},\"pre_tokenizer\":{\"add_prefix_space\":true}}",
         "\"add_prefix_space\": true"}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        HfTokenizer t;
        CHECK_OK(hf_tokenizer_set(&t, "tokenizer.json", xstrdup(files[i].text), &config, false, &err));
        CHECK(strcmp(t.json, files[i].expected) == 0, "file %d: %s", (int)i, t.json);
        CHECK(strstr(t.config, files[i].config), "file %d: %s", (int)i, t.config);
        hf_tokenizer_free(&t);
    }
}

// A file that is there, but not a tokenizer of the model, is an error that names it.
static void test_bad(void) {
    static const struct {
        const char *text, *expected;
    } bad[] = {
        {"", "bad JSON"},
        {"{", "bad JSON"},
        {"{}", "is not a tokenizer: it has no model.vocab with a number for each token"},
        {"{\"model\": {\"vocab\": {}}}", "is not a tokenizer"},
        {"{\"model\": {\"vocab\": {\"a\": 11}}}",
         "has the token id 11, but the model's vocabulary has 11 tokens"},
        {"{\"model\": {\"vocab\": {\"a\": 1}}, \"added_tokens\": [{\"id\": 12, \"content\": \"\"}]}",
         "has the token id 12"},
        {"{\"model\": {\"vocab\": {\"a\": 1, \"b\": \"2\"}}}", "is not a tokenizer"},
        {"{\"model\": {\"vocab\": {\"a\": 1, \"b\": -1}}}", "is not a tokenizer"},
        {"{\"model\": {\"vocab\": {\"a\": 1}}, \"added_tokens\": [{\"id\": 2}]}", "is not a tokenizer"},
        {"{\"model\": {\"vocab\": [[\"a\",0],1,2,3,4,5,6,7,8,9,10,11]}}", "has the token id 11"}};
    HfTokenizer t;
    if (!make_folders(in_out("init"), &err)) die("%s", err.msg);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (int beside = 0; beside < 2; beside++) {
            const char* path = in_out(beside ? "t_tokenizer.json" : "init/tokenizer.json");
            write_bytes(path, bad[i].text, strlen(bad[i].text));
            CHECK_FAILS(bad[i].expected, find(&t, in_out("init")));
            CHECK(strncmp(err.msg, path, strlen(path)) == 0, "does not name %s: %s", path, err.msg);
            CHECK(!t.json && !t.config, "something to free");
            if (beside) unlink(path);
        }
    write_bytes(in_out("init/tokenizer.json"), "{}\0", 3);
    CHECK_FAILS("tokenizer.json: is not JSON: it has a zero byte", find(&t, in_out("init")));
    if (mkdir(in_out("t_tokenizer.json"), 0777) != 0) die("mkdir");
    CHECK_FAILS("t_tokenizer.json: is not a regular file", find(&t, NULL));
    rmdir(in_out("t_tokenizer.json"));
    write_tokenizer(in_out("t_tokenizer.json"), 10);
    if (truncate(in_out("t_tokenizer.json"), (off_t)HF_TOKENIZER_BYTES + 1) != 0) die("truncate");
    CHECK_FAILS("has 67108865 bytes, more than a tokenizer's file can have", find(&t, NULL));
}

// The byte tokenizer as text_to_shards writes it is one of a byte model.
static void test_bytes(void) {
    Tokenizer bytes;
    ByteBuffer json = {NULL, 0, 0};
    HfTokenizer t;
    Config c = config;
    c.vocab_size = 257;
    memset(&t, 0, sizeof t);
    tokenizer_bytes(&bytes);
    tokenizer_json(&bytes, &json);
    CHECK_OK(hf_tokenizer_set(&t, "bytes", json.data, &c, false, &err));
    CHECK(strstr(t.config, "\"bos_token\": \"<|endoftext|>\""), "%s", t.config);
    hf_tokenizer_free(&t);
    tokenizer_free(&bytes);
}

// auto_map names the classes of a Python file in the folder that architectures names.
static void test_auto_map(void) {
    static const char* const families[][3] = {{"fox-pro", "modeling_fox", "ForgettingTransformer"},
                                              {"transformer-llama", "modeling_fox", "Transformer"},
                                              {"transformer-swa", "modeling_fox", "Transformer"},
                                              {"deltanet", "modeling_recurrent", "DeltaNet"},
                                              {"gated-deltanet", "modeling_recurrent", "GatedDeltaNet"},
                                              {"hgrn2", "modeling_recurrent", "HGRN2"},
                                              {"mamba2", "modeling_recurrent", "Mamba2"},
                                              {"fox-llama", "modeling_stack", "FoxStack"}};
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        const size_t file = strlen(families[f][1]) + 1;
        Config c;
        Recipe recipe;
        Json j;
        char name[64];
        snprintf(name, sizeof name, "%s-nano", families[f][0]);
        CHECK(config_preset(&c, &recipe, name, &err), "%s", err.msg);
        if (strstr(families[f][1], "stack"))
            CHECK(config_set(&c, "test", "layer_types", "hgrn2,attention", &err) &&
                      config_check(&c, "test", &err),
                  "%s", err.msg);
        CHECK(config_write(&c, in_out("config.json"), &err) &&
                  json_parse_file(&j, in_out("config.json"), &err),
              "%s", err.msg);
        const int map = json_get(&j, 0, "auto_map");
        snprintf(name, sizeof name, "%s.%sConfig", families[f][1], families[f][2]);
        CHECK(strcmp(json_string(&j, json_get(&j, map, "AutoConfig")), name) == 0, "not %s", name);
        snprintf(name, sizeof name, "%s.%sForCausalLM", families[f][1], families[f][2]);
        CHECK(strcmp(json_string(&j, json_get(&j, map, "AutoModelForCausalLM")), name) == 0, "not %s", name);
        CHECK(strcmp(json_string(&j, json_first(&j, json_get(&j, 0, "architectures"))), name + file) == 0,
              "architectures is not %s", name + file);
        json_free(&j);
    }
}

static int test_hf_folder(void) {
    static void (*const tests[])(void) = {test_files, test_names, test_find,     test_as_in_training,
                                          test_bad,   test_bytes, test_auto_map, test_recurrent};
    return run_checkpoint_tests(tests, sizeof tests / sizeof *tests, "hf_folder");
}
