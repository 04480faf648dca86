/*
Tests of loading checkpoints (llmc/run/checkpoint.h): damaged files, weights of another model and folders made
elsewhere load completely, or fail with one clear line and leave the caller's buffers unchanged. Checksums
find any flipped bit.
*/
#include "../checkpoint_fixture.h"

// ----------------------------------------------------------------------------
// damaged checkpoints

// Replaces `from` by `to` in a file.
static void edit(const char* path, const char* from, const char* to) {
    size_t bytes;
    char* text = read_file(path, &bytes, &err);
    char* at = text ? (char*)memmem(text, bytes, from, strlen(from)) : NULL;
    FILE* f = at ? fopen(path, "wb") : NULL;
    if (!f) die("%s: cannot edit", path);
    fwrite(text, 1, (size_t)(at - text), f);
    fputs(to, f);
    fwrite(at + strlen(from), 1, bytes - (size_t)(at - text) - strlen(from), f);
    fclose(f);
    free(text);
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
        CHECK_FAILS(edits[i].message, checkpoint_load_state(folder_of(3), &state, &record, &err));
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

// What an older version did not record is 0.
static void test_older_version(void) {
    TrainerState state;
    Json record;
    Buffers b = filled_buffers(4, 1);
    const char* path = in_out("step_00000003/trainer.json");
    CHECK_OK(save_filled(3, 1));
    edit(path, "\"checksums\"", "\"sums\"");
    edit(path, "\"sequences\"", "\"of_sequences\"");
    edit(path, "\"fingerprint\"", "\"print\"");
    bool ok = checkpoint_load_state(folder_of(3), &state, &record, &err);
    CHECK(ok && state.sequences == 0 && state.fingerprint == 0 && state.position == 31, "%s", err.msg);
    int fd = open(in_out("step_00000003/model.safetensors"), O_RDWR);
    CHECK(pwrite(fd, "x", 1, 5000) == 1 && close(fd) == 0, "pwrite");
    CHECK_OK(ok && checkpoint_verify(folder_of(3), &record, 0, 1, NULL, &err)); // not noticed
    if (ok) json_free(&record);
    free_buffers(&b);
}

// ----------------------------------------------------------------------------
// checksums

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
    if (!checkpoint_load_state(folder, &state, &record, &err)) return false;
    bool ok = checkpoint_verify(folder, &record, part, parts, NULL, &err);
    json_free(&record);
    return ok;
}

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
        CHECK_FAILS("step_00000003/trainer.json: 'checksums' is not valid", verify(folder_of(3), 0, 1));
    }
    CHECK_OK(save_filled(3, 1));
    edit(in_out("step_00000003/trainer.json"), "\"model.safetensors\": [",
         "\"model.safetensors\": [\"0123456789abcdef\", ");
    CHECK_FAILS("has 1 blocks of 67108864 bytes, but trainer.json lists 2", verify(folder_of(3), 0, 1));
}

// A folder of --init: a checkpoint or part of one, or a folder of another program.
static void test_verify_init(void) {
    const char* model = in_out("step_00000003/model.safetensors");
    CHECK_OK(save_filled(3, 1));
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    CHECK(remove(in_out("step_00000003/optimizer.safetensors")) == 0, "remove");
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    flip(model, 5000, 3);
    CHECK_FAILS("model.safetensors: is damaged", checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    CHECK(strstr(err.msg, "; if the folder was changed on purpose, remove its trainer.json"), "%s", err.msg);
    edit(in_out("step_00000003/trainer.json"), "\"checksums\"", "\"sums\"");
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    edit(in_out("step_00000003/trainer.json"), "\"sums\"", "\"sums");
    CHECK_FAILS("trainer.json: bad JSON", checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
    CHECK(remove(in_out("step_00000003/trainer.json")) == 0, "remove");
    CHECK_OK(checkpoint_verify_init(folder_of(3), 0, 1, NULL, &err));
}

// ----------------------------------------------------------------------------
// folders made elsewhere

// Writes the named shard of a Hugging Face folder: rows [first, last) of the table as the type, and `extra`
// if it is not NULL. Element i of the flat buffer is i mod 128, which is exact in all types.
static void write_shard(const char* path, int first, int last, SafetensorsDtype dtype, const char* extra) {
    SafeTensor tensors[64];
    size_t size = safetensors_dtypes[dtype].size;
    const int64_t one = 1;
    int n = 0;
    char* values = (char*)xcalloc((size_t)table.count, size);
    for (int64_t i = 0; i < table.count; i++) {
        double f64 = (double)(i % 128);
        float f32 = (float)f64;
        memcpy(values + (size_t)i * size, size == 8 ? (const char*)&f64 : (const char*)&f32 + 4 - size, size);
    }
    for (int r = first; r < last; r++) {
        const Param* p = &table.rows[r];
        const char* data = values + (size_t)p->offset * size;
        tensors[n++] = safetensors_tensor(p->name, dtype, p->ndim, p->shape, data);
    }
    if (extra) tensors[n++] = safetensors_tensor(extra, dtype, 1, &one, values);
    CHECK_OK(safetensors_write(path, tensors, n, &err));
    free(values);
}

// Whether the folder's weights are those that write_shard writes.
static bool shards_load(int element_bytes) {
    Buffers b = filled_buffers(element_bytes, 1);
    bool ok = load_weights(out, &b);
    for (int64_t i = 0; ok && i < table.count; i++)
        if (get(&b, b.w, i) != (double)(i % 128)) ok = fail(&err, "element %lld differs", (long long)i);
    free_buffers(&b);
    return ok;
}

static void test_types(void) {
    static const SafetensorsDtype types[] = {SAFETENSORS_F64, SAFETENSORS_F32, SAFETENSORS_BF16};
    for (int i = 0; i < 3; i++) {
        write_shard(in_out("model.safetensors"), 0, table.num_rows, types[i], NULL);
        CHECK_OK(shards_load(4));
        CHECK_OK(shards_load(8));
    }
}

static void test_shards(void) {
    const int half = table.num_rows / 2;
    write_shard(in_out("model-00001-of-00002.safetensors"), 0, half, SAFETENSORS_F32, NULL);
    write_shard(in_out("model-00002-of-00002.safetensors"), half, table.num_rows, SAFETENSORS_BF16, NULL);
    JsonWriter w = json_writer(2);
    json_begin_object(&w, NULL);
    json_begin_object(&w, "weight_map");
    for (int r = 0; r < table.num_rows; r++)
        json_put_string(&w, table.rows[r].name,
                        r < half ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors");
    json_end(&w);
    json_end(&w);
    CHECK_OK(json_writer_save(&w, in_out("model.safetensors.index.json"), &err));
    json_writer_free(&w);
    CHECK_OK(shards_load(4));
    CHECK_OK(shards_load(8));
    CHECK(remove(in_out("model-00002-of-00002.safetensors")) == 0, "remove");
    CHECK_FAILS("model-00002-of-00002.safetensors: cannot open", shards_load(4));
}

static void test_wrong_tensors(void) {
    const char* path = in_out("model.safetensors");
    const int rows = table.num_rows;
    write_shard(path, 0, rows, SAFETENSORS_F32, "model.layers.2.attn_norm.weight");
    CHECK_FAILS("model.safetensors: tensor 'model.layers.2.attn_norm.weight' is not part of the model",
                shards_load(4));
    write_shard(path, 0, rows, SAFETENSORS_F32, "two\nlines");
    CHECK_FAILS("model.safetensors: tensor 'two?lines'", shards_load(4));
    write_shard(path, 1, rows, SAFETENSORS_F32, NULL);
    CHECK_FAILS("model.safetensors: tensor 'model.embeddings.weight' is missing", shards_load(4));
    write_shard(path, 1, rows, SAFETENSORS_F32, "embeddings"); // the right number of tensors
    CHECK_FAILS("model.safetensors: tensor 'model.embeddings.weight' is missing", shards_load(4));
    write_shard(path, 0, rows - 1, SAFETENSORS_F32, NULL);
    CHECK_FAILS("'lm_head.weight' is missing; a head tied to the embedding is not supported", shards_load(4));
    edit(path, "\"shape\":[11,64]", "\"shape\":[704]  ");
    CHECK_FAILS("'model.embeddings.weight' has shape [704], but [11, 64] fits the config", shards_load(4));
    remove(path);
    CHECK_FAILS("holds neither model.safetensors nor", shards_load(4));
}

int main(void) {
    static void (*const tests[])(void) = {test_cut_short,      test_untouched,     test_bad_trainer,
                                          test_newest_damaged, test_older_version, test_flipped_bits,
                                          test_blocks,         test_bad_checksums, test_verify_init,
                                          test_types,          test_shards,        test_wrong_tensors};
    return run_checkpoint_tests(tests, sizeof tests / sizeof tests[0], "checkpoint_load");
}
