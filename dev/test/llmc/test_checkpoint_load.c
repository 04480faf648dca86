/*
Tests of loading checkpoints (llmc/run/checkpoint.h): damaged files, weights of another model and folders made
elsewhere load completely, or fail with one clear line and leave the caller's buffers unchanged.
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
                checkpoint_load_weights(folder_of(3), &table, b.w, 4, &err));
    CHECK_FAILS("optimizer.safetensors: tensor 'exp_avg_sq.lm_head.weight' has type I32",
                checkpoint_load_optimizer(folder_of(3), &table, b.m, b.v, 4, &err));
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
    bool ok = checkpoint_load_weights(out, &table, b.w, element_bytes, &err);
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
    static void (*const tests[])(void) = {test_cut_short,      test_untouched, test_bad_trainer,
                                          test_newest_damaged, test_types,     test_shards,
                                          test_wrong_tensors};
    return run_checkpoint_tests(tests, sizeof tests / sizeof tests[0], "checkpoint_load");
}
