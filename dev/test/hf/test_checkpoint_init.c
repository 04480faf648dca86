/*
Tests of --init from folders made elsewhere (llmc/checkpoint/read.h): what Hugging Face transformers
saves, in any floating-point type, in one file or in several with an index. Everything is read as stored, by
any number of ranks, or fails with one clear line that names file and tensor.
*/
#include "../checkpoint_fixture.h"

// ----------------------------------------------------------------------------
// writing such a folder

// Element i of the flat buffer is this number, which is exact in all types.
static double value_of(int64_t i) { return (double)(i % 128) - 64; }

// The bytes of a small integer in a type; returns their number.
static size_t bytes_of(double x, SafetensorsDtype dtype, void* bytes) {
    const size_t size = safetensors_dtypes[dtype].size;
    const float f32 = (float)x;
    int exponent;
    const double fraction = frexp(fabs(x), &exponent); // of F16: 0.1xxx times 2^exponent
    const uint16_t f16 =
        (uint16_t)((x < 0) << 15 | (x != 0 ? (exponent + 13) * 1024 + (int)(fraction * 2048) : 0));
    if (dtype == SAFETENSORS_F16)
        memcpy(bytes, &f16, size);
    else
        memcpy(bytes, size == 8 ? (const char*)&x : (const char*)&f32 + 4 - size, size);
    return size;
}

// Writes rows [first, last) of the table as the type, and `extra` if it is not NULL.
static void write_shard(const char* path, int first, int last, SafetensorsDtype dtype, const char* extra) {
    SafeTensor tensors[64];
    const size_t size = safetensors_dtypes[dtype].size;
    const int64_t one = 1;
    int n = 0;
    char* values = (char*)xcalloc((size_t)table.count, size);
    for (int64_t i = 0; i < table.count; i++) bytes_of(value_of(i), dtype, values + (size_t)i * size);
    for (int r = first; r < last; r++) {
        const Param* p = &table.rows[r];
        const char* data = values + (size_t)p->offset * size;
        tensors[n++] = safetensors_tensor(p->name, dtype, p->ndim, p->shape, data);
    }
    if (extra) tensors[n++] = safetensors_tensor(extra, dtype, 1, &one, values);
    CHECK_OK(safetensors_write(path, tensors, n, &err));
    free(values);
}

enum { SHARDS = 3 };

// The first row of a shard; the first of shard SHARDS is the number of rows.
static int first_row(int shard) { return shard * table.num_rows / SHARDS; }

static const char* piece_name(int shard) {
    static char names[SHARDS][64];
    snprintf(names[shard], sizeof names[shard], "model-%05d-of-%05d.safetensors", shard + 1, SHARDS);
    return names[shard];
}

static const char* piece_path(int shard) {
    static char paths[SHARDS][PATH_LENGTH];
    path_join(paths[shard], out, piece_name(shard));
    return paths[shard];
}

// Writes an index of the rows, without row `omitted`, and with `extra` in the last file if it is not NULL.
static void write_index(int omitted, const char* extra) {
    JsonWriter w = json_writer(2);
    json_begin_object(&w, NULL);
    json_begin_object(&w, "metadata");
    json_put_int(&w, "total_parameters", table.parameters);
    json_put_int(&w, "total_size", 2 * table.parameters);
    json_end(&w);
    json_begin_object(&w, "weight_map");
    for (int shard = 0; shard < SHARDS; shard++)
        for (int r = first_row(shard); r < first_row(shard + 1); r++)
            if (r != omitted) json_put_string(&w, table.rows[r].name, piece_name(shard));
    if (extra) json_put_string(&w, extra, piece_name(SHARDS - 1));
    json_end(&w);
    json_end(&w);
    CHECK_OK(json_writer_save(&w, in_out("model.safetensors.index.json"), &err));
    json_writer_free(&w);
}

// Writes a folder of several files with an index.
static void write_folder(SafetensorsDtype dtype) {
    for (int shard = 0; shard < SHARDS; shard++)
        write_shard(piece_path(shard), first_row(shard), first_row(shard + 1), dtype, NULL);
    write_index(-1, NULL);
}

// Whether the folder's weights are those that write_shard writes. A folder that is refused leaves the buffer
// unchanged, unless it is for a number.
static bool shards_load(int element_bytes) {
    Buffers b = filled_buffers(element_bytes, 1), same = filled_buffers(element_bytes, 1);
    bool ok = load_weights(out, &b);
    if (!ok && !strstr(err.msg, "' contains "))
        CHECK(memcmp(b.w, same.w, (size_t)(table.count * element_bytes)) == 0, "the weights are changed: %s",
              err.msg);
    for (int64_t i = 0; ok && i < table.count; i++)
        if (get(&b, b.w, i) != value_of(i)) ok = fail(&err, "element %lld differs", (long long)i);
    free_buffers(&b);
    free_buffers(&same);
    return ok;
}

// ----------------------------------------------------------------------------
// what is read

static const SafetensorsDtype types[] = {SAFETENSORS_F64, SAFETENSORS_F32, SAFETENSORS_BF16, SAFETENSORS_F16};

static void test_types(void) {
    for (int i = 0; i < 4; i++) {
        write_shard(in_out("model.safetensors"), 0, table.num_rows, types[i], NULL);
        CHECK_OK(shards_load(4));
        CHECK_OK(shards_load(8));
    }
}

static void test_shards(void) {
    for (int i = 0; i < 4; i++) {
        write_folder(types[i]);
        CHECK_OK(shards_load(4));
        CHECK_OK(shards_load(8));
    }
    write_shard(piece_path(1), first_row(1), first_row(2), SAFETENSORS_BF16,
                NULL); // beside F16
    CHECK_OK(shards_load(4));
}

// Every rank reads its ranges, which begin and end within tensors.
static void test_ranks(void) {
    enum { RANKS = 5 };
    ParamTable other = params_build_for(&config, RANKS);
    Buffers whole = buffers(4);
    write_folder(SAFETENSORS_BF16);
    for (int rank = 0; rank < RANKS; rank++) {
        const Shard shard = params_shard(&other, rank, RANKS);
        CheckpointTensors t = shard_tensors(&shard, 4);
        const CheckpointPart part = {&other, &shard, &t, NULL};
        CHECK_OK(checkpoint_read_file(out, CHECKPOINT_MODEL, &part, &err));
        copy_shard(&other, &shard, &t, &whole, false);
        free_tensors(&t);
    }
    int64_t wrong = 0;
    for (int64_t i = 0; i < table.count; i++) wrong += get(&whole, whole.w, i) != value_of(i);
    CHECK(wrong == 0, "%lld elements differ", (long long)wrong);
    free_buffers(&whole);
    params_free(&other);
}

// Keys that transformers 4.44 and 5 add, with their lists and objects, are passed over.
static void test_config(void) {
    static const char* const added[] = {
        "\"_name_or_path\": \"x\", \"torch_dtype\": \"bfloat16\", \"transformers_version\": \"4.44.2\", ",
        "\"dtype\": \"float32\", \"transformers_version\": \"5.23.0\", \"id2label\": {\"0\": \"L\"}, ",
        "\"pruned_heads\": {}, \"quantization\": null, \"suppress_tokens\": [1, [2]], \"rope_scaling\": "
        "null, "};
    JsonWriter ours = json_writer(0), theirs = json_writer(0);
    Config nano;
    Recipe recipe;
    CHECK_OK(config_preset(&nano, &recipe, "fox-pro-nano", &err));
    config_put_all(&nano, &ours);
    for (int i = 0; i < 3; i++) {
        char text[4096];
        Config read;
        const int n = snprintf(text, sizeof text,
                               "{%s\"task_specific_params\": {\"x\": {\"y\": [1]}}, \"use_cache\": true, %s",
                               added[i], ours.text + 1);
        CHECK_OK(config_parse(&read, "config.json", text, (size_t)n, &err));
        json_writer_clear(&theirs);
        config_put_all(&read, &theirs);
        CHECK(strcmp(ours.text, theirs.text) == 0, "%s became %s", ours.text, theirs.text);
    }
    json_writer_free(&ours);
    json_writer_free(&theirs);
}

// ----------------------------------------------------------------------------
// what is refused

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
    CHECK_FAILS("'lm_head.weight' is missing; a head tied to the embedding needs tie_word_embeddings",
                shards_load(4));
    edit(path, "\"shape\":[11,64]", "\"shape\":[704]  ");
    CHECK_FAILS("'model.embeddings.weight' has shape [704], but [11, 64] fits the config", shards_load(4));
    remove(path);
    CHECK_FAILS("holds neither model.safetensors nor", shards_load(4));
}

// Overwrites the last two bytes of a file: the last number of its last tensor.
static void write_last(const char* path, uint16_t bits) {
    struct stat st;
    int fd = open(path, O_WRONLY);
    bool ok = fd >= 0 && fstat(fd, &st) == 0 && pwrite(fd, &bits, 2, st.st_size - 2) == 2;
    if (!ok || close(fd) != 0) die("%s: cannot write", path);
}

static void test_not_finite(void) {
    const char* last = piece_path(2);
    write_folder(SAFETENSORS_BF16);
    write_last(last, 0x7fc1);
    CHECK_FAILS("model-00003-of-00003.safetensors: tensor 'lm_head.weight' contains nan", shards_load(4));
    CHECK_FAILS("model-00003-of-00003.safetensors: tensor 'lm_head.weight' contains nan", shards_load(8));
    write_folder(SAFETENSORS_F16);
    write_last(last, 0xfc00);
    CHECK_FAILS("model-00003-of-00003.safetensors: tensor 'lm_head.weight' contains -inf", shards_load(4));
    write_last(piece_path(0), 0x7c00);
    CHECK_FAILS("model-00001-of-00003.safetensors: tensor '", shards_load(4));
    write_folder(SAFETENSORS_F64);
    write_last(last, 0x7fe0); // 1e308, which no float is
    CHECK_FAILS("model-00003-of-00003.safetensors: tensor 'lm_head.weight' contains inf", shards_load(4));
}

static void test_bad_shards(void) {
    const char *first = piece_path(0), *last = piece_path(2);
    const int second_row = first_row(1), rows = table.num_rows;
    char expected[256];
    struct stat st;
    write_folder(SAFETENSORS_BF16);
    CHECK(stat(last, &st) == 0 && truncate(last, st.st_size - 1) == 0, "truncate");
    CHECK_FAILS("model-00003-of-00003.safetensors: tensor 'lm_head.weight': ends at byte", shards_load(4));
    CHECK(strstr(err.msg, "it is truncated"), "%s", err.msg);
    CHECK(remove(last) == 0, "remove");
    CHECK_FAILS("model-00003-of-00003.safetensors: cannot open", shards_load(4));

    write_folder(SAFETENSORS_F32); // missing in the files, in the index, in both
    write_shard(first, 1, second_row, SAFETENSORS_F32, NULL);
    CHECK_FAILS("model-00001-of-00003.safetensors: tensor 'model.embeddings.weight' is missing, which",
                shards_load(4));
    write_index(0, NULL);
    CHECK_FAILS("model.safetensors.index.json: tensor 'model.embeddings.weight' is missing", shards_load(4));
    write_shard(first, 0, second_row, SAFETENSORS_F32, NULL);
    CHECK_FAILS("model-00001-of-00003.safetensors: tensor 'model.embeddings.weight': ", shards_load(4));
    CHECK(strstr(err.msg, "model.safetensors.index.json does not list it"), "%s", err.msg);

    write_folder(SAFETENSORS_F32); // in two files
    write_shard(first, 0, second_row + 1, SAFETENSORS_F32, NULL);
    snprintf(expected, sizeof expected,
             "model-00001-of-00003.safetensors: tensor '%s': is also in model-00002-of-00003.safetensors",
             table.rows[second_row].name);
    CHECK_FAILS(expected, shards_load(4));

    write_folder(SAFETENSORS_F32); // of another model
    write_shard(last, first_row(2), rows, SAFETENSORS_F32, "lora_A.weight");
    write_index(-1, "lora_A.weight");
    CHECK_FAILS("model-00003-of-00003.safetensors: tensor 'lora_A.weight' is not part of the model",
                shards_load(4));

    write_folder(SAFETENSORS_BF16);
    edit(last, "\"lm_head.weight\":{\"dtype\":\"BF16\"", "\"lm_head.weight\":{\"dtype\":\"I16\" ");
    CHECK_FAILS("model-00003-of-00003.safetensors: tensor 'lm_head.weight' has type I16", shards_load(4));
    write_folder(SAFETENSORS_BF16);
    edit(first, "\"shape\":[11,64]", "\"shape\":[704]  ");
    CHECK_FAILS(
        "model-00001-of-00003.safetensors: tensor 'model.embeddings.weight' has shape [704], but [11, 64]",
        shards_load(4));
    CHECK(truncate(in_out("model.safetensors.index.json"), 100) == 0, "truncate");
    CHECK_FAILS("model.safetensors.index.json: bad JSON at byte", shards_load(4));
}

// A checkpoint to resume has the files that the trainer wrote, whatever reads as the same numbers.
static void test_checkpoint_of_another_type(void) {
    CHECK_OK(save_filled(3, 1));
    CHECK_OK(loads(folder_of(3)));
    write_shard(in_out("step_00000003/model.safetensors"), 0, table.num_rows, SAFETENSORS_BF16, NULL);
    CHECK_FAILS("step_00000003/model.safetensors: is damaged", loads(folder_of(3)));
    write_folder(SAFETENSORS_F32);
    CHECK(remove(in_out("step_00000003/model.safetensors")) == 0, "remove");
    for (int i = 0; i <= SHARDS; i++) {
        const char* name = i < SHARDS ? piece_name(i) : "model.safetensors.index.json";
        CHECK(rename(in_out("%s", name), in_out("step_00000003/%s", name)) == 0, "rename %s", name);
    }
    CHECK_FAILS("step_00000003/model.safetensors: cannot open", loads(folder_of(3)));
}

static int test_checkpoint_init(void) {
    static void (*const tests[])(void) = {
        test_types,         test_shards,     test_ranks,      test_config,
        test_wrong_tensors, test_not_finite, test_bad_shards, test_checkpoint_of_another_type};
    return run_checkpoint_tests(tests, sizeof tests / sizeof tests[0], "checkpoint_init");
}
