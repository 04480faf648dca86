/*
Tests of loading checkpoints (llmc/checkpoint/read.h and record.h): damaged files and weights of another model
fail with one clear line and leave the caller's buffers unchanged. Checksums find any flipped bit of any file,
and numbers that training never makes are refused. test_checkpoint_init.c has folders made elsewhere.
*/
#include "../checkpoint_fixture.h"

// ----------------------------------------------------------------------------
// damaged checkpoints

// Makes an edited trainer.json match the checksum at its end again.
static void seal(const char* path) {
    size_t bytes, n = strlen(CHECKPOINT_RECORD_END) + 14; // %s becomes 16 digits
    char hex[17], *text = read_file(path, &bytes, &err);
    FILE* f = text && bytes > n ? fopen(path, "wb") : NULL;
    if (!f) die("%s: cannot seal", path);
    fwrite(text, 1, bytes - n, f);
    fprintf(f, CHECKPOINT_RECORD_END, hex64(hex, checksum(text, bytes - n, 0)));
    fclose(f);
    free(text);
}

// Leaves a trainer.json the checksums of the tensors alone.
static void drop_own_checksums(const char* path) {
    edit(path, "\"config.json\": \"", "\"config\": \"");
    edit(path, "\"trainer.json\": \"", "\"trainer\": \"");
}

// Cutting any file of a checkpoint anywhere makes loading fail with that file's name, and nothing is touched.
static void test_cut_short(void) {
    static const char* const names[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                        "trainer.json"};
    for (int i = 0; i < 4; i++) {
        for (int cut = 0; cut < 5; cut++) {
            struct stat st;
            CHECK_OK(save_filled(3, 1));
            const char* path = in_out("step_00000003/%s", names[i]);
            CHECK(stat(path, &st) == 0, "%s", path);
            // 0 bytes, 1 byte, half, all but the last two (a closing bracket and a line break), and no file
            off_t left[] = {0, 1, st.st_size / 2, st.st_size - 2};
            CHECK((cut < 4 ? truncate(path, left[cut]) : remove(path)) == 0, "cannot damage %s", path);
            CHECK_FAILS(names[i], loads(folder_of(3)));
        }
    }
}

static void test_untouched(void) {
    Buffers b = filled_buffers(4, 1), same = filled_buffers(4, 1);
    CHECK_OK(save_filled(3, 1));
    // the last tensor of each file has another shape of the same size
    edit(in_out("step_00000003/model.safetensors"), "\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[11,64]",
         "\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[64,11]");
    edit(in_out("step_00000003/optimizer.safetensors"), "\"exp_avg_sq.lm_head.weight\":{\"dtype\":\"F32\"",
         "\"exp_avg_sq.lm_head.weight\":{\"dtype\":\"I32\"");
    CHECK_FAILS("model.safetensors: tensor 'lm_head.weight' has shape [64, 11], but [11, 64] fits the config",
                load_weights(folder_of(3), &b));
    CHECK_FAILS("optimizer.safetensors: tensor 'exp_avg_sq.lm_head.weight' has type I32",
                load_optimizer(folder_of(3), &b));
    size_t bytes = (size_t)table.count * 4;
    CHECK(memcmp(b.w, same.w, bytes) == 0, "a failed load touched the weights");
    CHECK(memcmp(b.m, same.m, bytes) == 0 && memcmp(b.v, same.v, bytes) == 0, "... the moments");
    free_buffers(&b);
    free_buffers(&same);
}

static void test_bad_trainer(void) {
    static const struct {
        const char *from, *to, *message;
    } edits[] = {
        {"\"step\"", "\"steps\"", "'step' is missing or not valid"},
        {"\"tokens\": 300", "\"tokens\": -300", "'tokens' is missing or not valid"},
        {"\"position\": 31", "\"position\": 31.5", "'position' is missing or not valid"},
        {"\"sequences\": ", "\"sequences\": -", "'sequences' is missing or not valid"},
        {"\"fedcba98", "\"fedcba9", "'fingerprint' is missing or not valid"},
        {"\"fedcba9876543210\"", "17", "'fingerprint' is missing or not valid"},
        {"\"lr\": 0.1", "\"lr\": \"0.1\"", "'lr' is missing or not valid"},
        {"\"schedule\"", "\"plan\"", "'warmup_tokens' is missing or not valid"},
        {"\"options\"", "\"choices\"", "'options' is missing or not valid"},
        {"\"seed\": ", "\"seed\": \"\x01", "bad JSON at byte"},
    };
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        TrainerState state;
        Json record;
        CHECK_OK(save_filled(3, 1));
        edit(in_out("step_00000003/trainer.json"), edits[i].from, edits[i].to);
        CHECK_FAILS(edits[i].message, load_state(folder_of(3), &state, &record));
        CHECK(strstr(err.msg, "step_00000003/trainer.json"), "%s", err.msg);
        CHECK(record.count == 0, "the record is not empty");
    }
}

// Resuming tries the checkpoints of the list until one loads completely.
static void test_newest_damaged(void) {
    int64_t *steps, good = -1;
    for (int64_t step = 10; step <= 40; step += 10) CHECK_OK(save_filled(step, 0));
    CHECK(truncate(in_out("step_00000040/optimizer.safetensors"), 500) == 0, "truncate");
    CHECK(remove(in_out("step_00000030/trainer.json")) == 0, "remove");
    int count = checkpoint_list(out, &steps, &err);
    CHECK(count == 4, "%d checkpoints", count);
    for (int i = 0; i < count && good < 0; i++)
        if (loads(folder_of(steps[i]))) good = steps[i];
    CHECK(good == 20, "%lld", (long long)good);
    free(steps);
}

// Flips a bit of a file.
static void flip(const char* path, int64_t byte, int bit) {
    char c = 0;
    int fd = open(path, O_RDWR);
    bool ok = fd >= 0 && pread(fd, &c, 1, (off_t)byte) == 1;
    c ^= (char)(1 << bit);
    if (!ok || pwrite(fd, &c, 1, (off_t)byte) != 1 || close(fd) != 0) die("%s: cannot flip a bit", path);
}

static bool verify(const char* folder, int part, int parts) {
    TrainerState state;
    Json record;
    if (!load_state(folder, &state, &record)) return false;
    bool ok = checkpoint_verify(folder, &record, part, parts, NULL, &err);
    json_free(&record);
    return ok;
}

// What is not recorded is 0, and what has no checksum is not checked.
static void test_not_recorded(void) {
    TrainerState state;
    Json record;
    Buffers b = filled_buffers(4, 1);
    const char* path = in_out("step_00000003/trainer.json");
    CHECK_OK(save_filled(3, 1));
    drop_own_checksums(path);
    CHECK_OK(verify(folder_of(3), 0, 1));
    edit(path, "\"checksums\"", "\"sums\"");
    edit(path, "\"sequences\"", "\"of_sequences\"");
    edit(path, "\"fingerprint\"", "\"print\"");
    bool ok = load_state(folder_of(3), &state, &record);
    CHECK(ok && state.sequences == 0 && state.fingerprint == 0 && state.position == 31, "%s", err.msg);
    int fd = open(in_out("step_00000003/model.safetensors"), O_RDWR);
    CHECK(pwrite(fd, "x", 1, 5000) == 1 && close(fd) == 0, "pwrite");
    CHECK_OK(ok && checkpoint_verify(folder_of(3), &record, 0, 1, NULL, &err)); // not noticed
    if (ok) json_free(&record);
    free_buffers(&b);
}

// ----------------------------------------------------------------------------
// checksums

static void test_flipped_bits(void) {
    CHECK_OK(save_filled(3, 1));
    for (int file = 0; file < 2; file++) {
        char name[64], path[PATH_LENGTH];
        struct stat st;
        snprintf(name, sizeof name, "%s.safetensors", checkpoint_file_names[file]);
        strcpy(path, in_out("step_00000003/%s", name));
        CHECK(stat(path, &st) == 0, "%s", path);
        // the header's length, its JSON, the white space behind it and the data
        for (int64_t byte = 0; byte < st.st_size; byte += byte < 40 ? 1 : 991) {
            flip(path, byte, (int)(byte % 8));
            CHECK_FAILS(name, verify(folder_of(3), 0, 1));
            CHECK(strstr(err.msg, "(block 0 of 1) do not match their checksum"), "%s", err.msg);
            CHECK(verify(folder_of(3), 1, 2), "another rank's block: %s", err.msg);
            flip(path, byte, (int)(byte % 8));
        }
        flip(path, st.st_size - 1, 7);
        CHECK_FAILS(name, verify(folder_of(3), 0, 1));
        flip(path, st.st_size - 1, 7);
        CHECK(truncate(path, st.st_size - 4) == 0, "truncate");
        CHECK_FAILS(name, verify(folder_of(3), 0, 1)); // other blocks, or another sum
        CHECK(truncate(path, 0) == 0, "truncate");
        CHECK_FAILS("has 0 blocks of 67108864 bytes, but trainer.json lists 1", verify(folder_of(3), 0, 1));
        CHECK(remove(path) == 0, "remove");
        CHECK_FAILS("cannot open", verify(folder_of(3), 0, 1));
        CHECK_OK(save_filled(3, 1));
    }
    CHECK_OK(verify(folder_of(3), 0, 1));
}

// What a run does with a checkpoint before it trains from it (run_read_checkpoint, checkpoint_load).
static bool accepts(const char* folder) {
    Buffers b = buffers(4);
    TrainerState state;
    Json record;
    Config c;
    char path[PATH_LENGTH], *text = NULL;
    size_t bytes = 0;
    bool ok = load_state(folder, &state, &record), loaded = ok;
    path_join(path, folder, "config.json");
    if (ok) text = read_file(path, &bytes, &err);
    ok = text && checkpoint_check_config(path, text, bytes, &record, &err) &&
         config_parse(&c, path, text, bytes, &err) && checkpoint_verify(folder, &record, 0, 1, NULL, &err) &&
         load_weights(folder, &b) && load_optimizer(folder, &b);
    if (loaded) json_free(&record);
    free(text);
    free_buffers(&b);
    return ok;
}

// One flipped bit anywhere in a checkpoint is found: one in every byte of the two JSON files, one in 16 bytes
// of the headers, and bits of the data that a fixed seed draws.
static void test_flipped_anywhere(void) {
    static const char* const names[] = {"config.json", "trainer.json", "model.safetensors",
                                        "optimizer.safetensors"};
    CHECK_OK(save_filled(3, 1));
    CHECK_OK(accepts(folder_of(3)));
    for (int file = 0; file < 4; file++) {
        char path[PATH_LENGTH];
        struct stat st;
        uint64_t header = 0;
        int64_t missed = 0, tried = 0;
        strcpy(path, in_out("step_00000003/%s", names[file]));
        int fd = open(path, O_RDONLY);
        CHECK(fd >= 0 && fstat(fd, &st) == 0 && pread(fd, &header, 8, 0) == 8, "%s", path);
        close(fd);
        const int64_t whole = file < 2 ? st.st_size : 8 + (int64_t)header, drawn = file < 2 ? 0 : 100;
        for (int64_t k = 0; k < 8 * whole + drawn; k += file < 2 ? 7 : k < 8 * whole ? 131 : 1) {
            int64_t bit = k;
            if (k >= 8 * whole)
                bit = (int64_t)(random_uniform(5, (uint64_t)file, (uint64_t)k) * 8.0 * (double)st.st_size);
            flip(path, bit / 8, (int)(bit % 8));
            tried++;
            if (accepts(folder_of(3)) && missed++ == 0) CHECK(false, "%s: bit %lld", path, (long long)bit);
            flip(path, bit / 8, (int)(bit % 8));
        }
        CHECK(missed == 0 && tried > 200, "%s: %lld of %lld flipped bits are not found", path,
              (long long)missed, (long long)tried);
    }
    CHECK_OK(accepts(folder_of(3)));
}

// Blocks of another size, as a later version may have, each verified by the rank that it belongs to.
static void test_blocks(void) {
    enum { block = 4096, parts = 3 };
    JsonWriter w = json_writer(0);
    Json record;
    size_t n = 0;
    char hex[17];
    CHECK_OK(save_filled(3, 1));
    json_begin_object(&w, NULL);
    json_begin_object(&w, "checksums");
    json_put_int(&w, "block_bytes", block);
    int64_t counts[2];
    for (int file = 0; file < 2; file++) {
        char name[64];
        snprintf(name, sizeof name, "%s.safetensors", checkpoint_file_names[file]);
        char* data = read_file(in_out("step_00000003/%s", name), &n, &err);
        if (!data) die("%s", err.msg);
        json_begin_array(&w, name);
        for (size_t at = 0; at < n; at += block)
            json_put_string(&w, NULL,
                            hex64(hex, checksum(data + at, n - at < block ? n - at : block, (int64_t)at)));
        json_end(&w);
        counts[file] = (int64_t)(n + block - 1) / block;
        free(data);
    }
    json_end(&w);
    json_end(&w);
    CHECK_OK(json_parse(&record, "record", w.text, w.length, &err));
    for (int part = 0; part < parts; part++)
        CHECK_OK(checkpoint_verify(folder_of(3), &record, part, parts, NULL, &err));
    for (int file = 0; file < 2; file++) {
        char path[PATH_LENGTH];
        strcpy(path, in_out("step_00000003/%s.safetensors", checkpoint_file_names[file]));
        for (int64_t i = 0; i < counts[file]; i += i == 0 ? 1 : 7) {
            char expected[64];
            snprintf(expected, sizeof expected, "(block %d of %d)", (int)i, (int)counts[file]);
            flip(path, i * block + 3, 0);
            for (int part = 0; part < parts; part++) {
                bool ok = checkpoint_verify(folder_of(3), &record, part, parts, NULL, &err);
                CHECK(ok == (i % parts != part) && (ok || strstr(err.msg, expected)), "block %d, part %d: %s",
                      (int)i, part, err.msg);
            }
            flip(path, i * block + 3, 0);
        }
    }
    json_free(&record);
    json_writer_free(&w);
}

static void test_bad_checksums(void) {
    static const struct {
        const char *from, *to;
    } edits[] = {
        {"\"checksums\": {", "\"checksums\": 1, \"x\": {"},
        {"\"block_bytes\": 67108864", "\"block_bytes\": 0"},
        {"\"block_bytes\": 67108864", "\"block_bytes\": -4"},
        {"\"block_bytes\": 67108864", "\"block_bytes\": 67108863"},
        {"\"block_bytes\": 67108864", "\"block_bytes\": \"67108864\""},
        {"\"block_bytes\"", "\"bytes\""},
        {"\"optimizer.safetensors\": [", "\"model\": ["},
        {"\"model.safetensors\": [", "\"model.safetensors\": [1, "},
        {"\"model.safetensors\": [", "\"model.safetensors\": [\"0123456789abcdeF\", "},
        {"\"model.safetensors\": [", "\"model.safetensors\": [\"0123456789abcde\", "},
        {"\"model.safetensors\": [", "\"model.safetensors\": [\"00123456789abcdef\", "},
    };
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        CHECK_OK(save_filled(3, 1));
        edit(in_out("step_00000003/trainer.json"), edits[i].from, edits[i].to);
        CHECK_FAILS("step_00000003/trainer.json: is damaged: does not match the checksum at its end",
                    verify(folder_of(3), 0, 1));
        seal(in_out("step_00000003/trainer.json"));
        CHECK_FAILS("step_00000003/trainer.json: 'checksums' is not valid", verify(folder_of(3), 0, 1));
    }
    CHECK_OK(save_filled(3, 1));
    edit(in_out("step_00000003/trainer.json"), "\"model.safetensors\": [",
         "\"model.safetensors\": [\"0123456789abcdef\", ");
    seal(in_out("step_00000003/trainer.json"));
    CHECK_FAILS("has 1 block of 67108864 bytes, but trainer.json lists 2", verify(folder_of(3), 0, 1));
}

// A folder of --init: a checkpoint or part of one, or a folder of another program.
static void test_verify_init(void) {
    char model[PATH_LENGTH];
    strcpy(model, in_out("step_00000003/model.safetensors"));
    CHECK_OK(save_filled(3, 1));
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    CHECK(remove(in_out("step_00000003/optimizer.safetensors")) == 0, "remove");
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    flip(model, 5000, 3);
    CHECK_FAILS("model.safetensors: is damaged", checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    CHECK(strstr(err.msg, "; if the folder was changed on purpose, remove its trainer.json"), "%s", err.msg);
    flip(model, 5000, 3);
    for (int i = 0; i < 2; i++) {
        const char* path = in_out("step_00000003/%s.json", i ? "config" : "trainer");
        flip(path, 100, 0);
        CHECK_FAILS(path, checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
        flip(path, 100, 0);
    }
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    flip(model, 5000, 3);
    drop_own_checksums(in_out("step_00000003/trainer.json"));
    edit(in_out("step_00000003/trainer.json"), "\"checksums\"", "\"sums\"");
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    edit(in_out("step_00000003/trainer.json"), "\"sums\"", "\"sums");
    CHECK_FAILS("trainer.json: bad JSON", checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    CHECK(remove(in_out("step_00000003/trainer.json")) == 0, "remove");
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
}

// ----------------------------------------------------------------------------
// numbers that training never makes

static void test_numbers(void) {
    static const struct {
        int buffer, bytes; // 0 w, 1 m, 2 v; of the writer's numbers
        double value;
        const char* message; // NULL: it loads
    } cases[] = {
        {0, 4, NAN, "model.safetensors: tensor 'model.norm.weight' contains nan"},
        {0, 4, INFINITY, "model.safetensors: tensor 'model.norm.weight' contains inf"},
        {0, 8, 1e39, "model.safetensors: tensor 'model.norm.weight' contains inf"}, // in float
        {0, 4, -FLT_MAX, NULL},
        {0, 4, 1e-45, NULL},
        {1, 4, -INFINITY, "optimizer.safetensors: tensor 'exp_avg.model.norm.weight' contains -inf"},
        {1, 4, -1, NULL},
        {2, 4, NAN, "optimizer.safetensors: tensor 'exp_avg_sq.model.norm.weight' contains nan"},
        {2, 4, -1e-30, "optimizer.safetensors: tensor 'exp_avg_sq.model.norm.weight' contains -1e-30"},
        {2, 4, -0.0, NULL},
        {2, 4, FLT_MAX, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Buffers b = filled_buffers(cases[i].bytes, 1), read = buffers(4);
        void* const of[] = {b.w, b.m, b.v};
        const Param* p = params_find(&table, P_NORM, 0);
        for (int last = 0; last < 2; last++) { // the first and the last number of the tensor
            const int64_t at = p->offset + (last ? p->count - 1 : 0);
            const double was = get(&b, of[cases[i].buffer], at);
            put(&b, of[cases[i].buffer], at, cases[i].value);
            CHECK_OK(save(3, &b, 1));
            put(&b, of[cases[i].buffer], at, was);
            bool ok = load_weights(folder_of(3), &read) && load_optimizer(folder_of(3), &read);
            if (cases[i].message)
                CHECK_FAILS(cases[i].message, ok);
            else
                CHECK_OK(ok);
        }
        free_buffers(&b);
        free_buffers(&read);
    }
}

// Every position of a bad number, in lengths around the block of the scan.
static void test_first_bad(void) {
    enum { MOST = 9000 };
    double* f64 = (double*)xcalloc(MOST, sizeof *f64);
    float* f32 = (float*)xcalloc(MOST, sizeof *f32);
    int64_t wrong = 0;
    for (int64_t n = 0; n <= MOST; n += n < 8 ? 1 : 1499)
        for (int64_t at = 0; at < n; at += at < 8 || at > n - 8 ? 1 : 97) {
            f32[at] = NAN, f64[at] = -INFINITY;
            wrong += numbers_first_bad(f32, n, 4, -DBL_MAX) != at;
            wrong += numbers_first_bad(f64, n, 8, -DBL_MAX) != at;
            f32[at] = -1, f64[at] = -1;
            wrong += numbers_first_bad(f32, n, 4, 0) != at || numbers_first_bad(f32, n, 4, -1) != n;
            wrong += numbers_first_bad(f64, n, 8, 0) != at || numbers_first_bad(f64, at, 8, 0) != at;
            f32[at] = 0, f64[at] = 0;
        }
    CHECK(wrong == 0, "%lld wrong answers", (long long)wrong);
    free(f64);
    free(f32);
}

static int test_checkpoint_load(void) {
    static void (*const tests[])(void) = {test_cut_short,        test_untouched,     test_bad_trainer,
                                          test_newest_damaged,   test_not_recorded,  test_flipped_bits,
                                          test_blocks,           test_bad_checksums, test_verify_init,
                                          test_flipped_anywhere, test_numbers,       test_first_bad};
    return run_checkpoint_tests(tests, sizeof tests / sizeof tests[0], "checkpoint_load");
}
