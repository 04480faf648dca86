/*
Tests of llmc/run/checkpoint.h: what is saved is read back bit by bit in both precisions, and nothing that goes
wrong on the way (a full disk, a crash, a damaged file, another model's weights) costs an older checkpoint,
touches the caller's buffers, or goes by without one clear line.
*/
#include <signal.h>
#include <sys/resource.h>
#include "../check.h"
#include "../../../llmc/run/checkpoint.h"
#include "../../../llmc/base/random.h"

// Checks that a call that reports through `err` succeeds, or fails with `expected` in its message of one
// line.
#define CHECK_OK(call) CHECK(call, "%s", err.msg)
#define CHECK_FAILS(expected, call)                                                                          \
    CHECK(!(call) && strstr(err.msg, expected) && !strchr(err.msg, '\n'), "%s", err.msg)

static char out[PATH_LENGTH]; // the test's scratch folder, as --out
static Error err;
static Config config;
static ParamTable table;
static Options options;

// A path below OUT; the last eight stay valid.
PRINTF_LIKE(1, 2)
static const char* in_out(const char* format, ...) {
    static char paths[8][PATH_LENGTH];
    static int next;
    char name[256];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    path_join(paths[next % 8], out, name);
    return paths[next++ % 8];
}

static const char* folder_of(int64_t step) { return in_out("step_%08d", (int)step); }

// ----------------------------------------------------------------------------
// a small model with every kind of tensor, the untrained one of a fixed gate among them; of sizes that leave
// no gaps between tensors in the flat buffer, so that whole buffers can be compared

static void make_model(void) {
    config = config_defaults();
    config.vocab_size = 11, config.hidden_size = PARAM_ALIGN, config.num_hidden_layers = 2;
    config.num_heads = PARAM_ALIGN;
    config.intermediate_size = 6;
    config.qk_norm = config.use_k_shift = config.use_v_shift = true;
    config.use_output_gate = config.use_output_norm = true;
    config.fgate_type = GATE_FIXED;
    table = params_build(&config);
    options_defaults(&options);
    options.model = "fox-pro-nano";
    options.weight_decay = 0.3;
}

static TrainerState state_at(int64_t step) {
    TrainerState s;
    s.step = step, s.tokens = 100 * step, s.position = 10 * step + 1;
    s.seed = ((int64_t)1 << 53) - 1; // the largest that --seed takes
    s.lr = 0.1, s.warmup_tokens = 16, s.max_tokens = (int64_t)1 << 60;
    return s;
}

// Flat buffers, floats or doubles.
typedef struct {
    void *w, *m, *v;
    int bytes; // of an element
} Buffers;

static double get(const Buffers* b, const void* buffer, int64_t i) {
    return b->bytes == 8 ? ((const double*)buffer)[i] : (double)((const float*)buffer)[i];
}

static void put(const Buffers* b, void* buffer, int64_t i, double x) {
    if (b->bytes == 8)
        ((double*)buffer)[i] = x;
    else
        ((float*)buffer)[i] = (float)x;
}

static Buffers buffers(int element_bytes) {
    Buffers b = {NULL, NULL, NULL, element_bytes};
    b.w = xcalloc((size_t)table.count, (size_t)element_bytes);
    b.m = xcalloc((size_t)table.count, (size_t)element_bytes);
    b.v = xcalloc((size_t)table.count, (size_t)element_bytes);
    return b;
}

// Random values that differ from seed to seed.
static Buffers filled_buffers(int element_bytes, uint64_t seed) {
    Buffers b = buffers(element_bytes);
    for (int64_t i = 0; i < table.count; i++) {
        put(&b, b.w, i, random_normal(seed, 0, (uint64_t)i));
        put(&b, b.m, i, random_normal(seed, 1, (uint64_t)i));
        put(&b, b.v, i, random_uniform(seed, 2, (uint64_t)i));
    }
    return b;
}

static void free_buffers(Buffers* b) {
    free(b->w);
    free(b->m);
    free(b->v);
}

static bool save(int64_t step, const Buffers* b, int keep) {
    TrainerState state = state_at(step);
    return checkpoint_save(out, &config, &table, &options, &state, b->w, b->m, b->v, b->bytes, keep, &err);
}

// Saves a checkpoint whose values come from its step.
static bool save_filled(int64_t step, int keep) {
    Buffers b = filled_buffers(4, (uint64_t)step);
    bool ok = save(step, &b, keep);
    free_buffers(&b);
    return ok;
}

// Whether everything in the folder can be loaded.
static bool loads(const char* folder) {
    Buffers b = buffers(4);
    TrainerState state;
    Json record;
    Config c;
    bool ok = config_read(&c, folder, &err) && checkpoint_load_weights(folder, &table, b.w, 4, &err) &&
              checkpoint_load_optimizer(folder, &table, b.m, b.v, 4, &err) &&
              checkpoint_load_state(folder, &state, &record, &err);
    if (ok) json_free(&record);
    free_buffers(&b);
    return ok;
}

// The checkpoints in OUT, newest first: "30 20 10".
static const char* listed(void) {
    static char text[256];
    int64_t* steps;
    int count = checkpoint_list(out, &steps, &err), n = 0;
    text[0] = '\0';
    for (int i = 0; i < count && n < 200; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%lld", i ? " " : "", (long long)steps[i]);
    free(steps);
    return count < 0 ? err.msg : text;
}
#define CHECK_LISTED(expected) CHECK(strcmp(listed(), expected) == 0, "%s", listed())

// The number of entries of OUT whose name starts with a dot: leftovers, besides . and ..
static int leftovers(void) {
    int count = -2;
    DIR* folder = opendir(out);
    for (struct dirent* entry; folder && (entry = readdir(folder)) != NULL;) count += entry->d_name[0] == '.';
    if (folder) closedir(folder);
    return count;
}

// ----------------------------------------------------------------------------
// round trips

static void round_trip(int written, int read) {
    Buffers a = filled_buffers(written, 1), b = filled_buffers(read, 2), old = filled_buffers(read, 2);
    TrainerState state, saved = state_at(1000);
    Json record;
    Config c;
    CHECK_OK(save(1000, &a, 0));
    const char* folder = folder_of(1000);
    CHECK_OK(checkpoint_load_weights(folder, &table, b.w, read, &err));
    CHECK_OK(checkpoint_load_optimizer(folder, &table, b.m, b.v, read, &err));
    CHECK_OK(checkpoint_load_state(folder, &state, &record, &err));
    CHECK_OK(config_read(&c, folder, &err));
    CHECK(memcmp(&state, &saved, sizeof state) == 0, "the state");
    CHECK(c.hidden_size == PARAM_ALIGN && c.fgate_type == GATE_FIXED && c.use_k_shift, "the config");
    for (int r = 0; r < table.num_rows; r++) {
        const Param* p = &table.rows[r];
        int64_t differ = 0;
        for (int64_t i = p->offset; i < p->offset + p->count; i++) {
            double w = get(&a, a.w, i), m = get(&a, a.m, i), v = get(&a, a.v, i);
            if (!p->trainable) m = get(&old, old.m, i), v = get(&old, old.v, i); // not in the file
            if (read == 4) w = (float)w, m = (float)m, v = (float)v;
            differ += get(&b, b.w, i) != w || get(&b, b.m, i) != m || get(&b, b.v, i) != v;
        }
        CHECK(differ == 0, "%s, %d to %d bytes: %d elements differ", p->name, written, read, (int)differ);
    }

    const char* precision = json_string(&record, json_get(&record, 0, "precision"));
    CHECK(precision && strcmp(precision, written == 8 ? "float64" : "float32") == 0, "%s", precision);
    CHECK(json_string(&record, json_get(&record, 0, "code_version")), "the code's version");
    Options restored;
    bool given[NUM_OPTION_ROWS] = {false};
    options_defaults(&restored);
    CHECK_OK(options_restore(&restored, given, folder, &record, json_get(&record, 0, "options"), &err));
    CHECK(restored.weight_decay == 0.3 && strcmp(restored.model, "fox-pro-nano") == 0, "the options");
    free((void*)restored.model);
    json_free(&record);
    free_buffers(&a);
    free_buffers(&b);
    free_buffers(&old);
}

static void test_round_trips(void) {
    for (int bytes = 4; bytes <= 8; bytes += 4) {
        round_trip(bytes, bytes);
        round_trip(bytes, 12 - bytes); // a checkpoint of the double build in the float build, and back
    }
}

// NaN and infinities are values like any other: the trainer's first step is to find them.
static void test_not_finite(void) {
    Buffers a = filled_buffers(4, 1), b = buffers(4);
    put(&a, a.w, 3, NAN), put(&a, a.w, 4, INFINITY), put(&a, a.m, 5, NAN);
    CHECK_OK(save(1, &a, 0));
    CHECK_OK(checkpoint_load_weights(folder_of(1), &table, b.w, 4, &err));
    CHECK_OK(checkpoint_load_optimizer(folder_of(1), &table, b.m, b.v, 4, &err));
    CHECK(memcmp(a.w, b.w, (size_t)table.count * 4) == 0 && isnan(get(&b, b.m, 5)), "bits differ");
    free_buffers(&a);
    free_buffers(&b);
}

// ----------------------------------------------------------------------------
// which checkpoints there are

static void test_list(void) {
    static const char* const not_ours[] = {
        "step_7",         "step_000000012",         "step_0000001x",  "step_-0000001", "step_",
        "xstep_00000001", ".tmp-step_00000009.bak", "step_00000009 ", "evaluation"};
    for (size_t i = 0; i < sizeof not_ours / sizeof not_ours[0]; i++)
        CHECK_OK(make_folders(in_out("%s", not_ours[i]), &err));
    FILE* f = fopen(in_out("step_00000077"), "wb"); // no folder
    if (f) fclose(f);
    CHECK_LISTED("");
    CHECK_OK(make_folders(in_out("step_123456789"), &err));
    CHECK_OK(save_filled(20, 0));
    CHECK_OK(save_filled(0, 0));
    CHECK_OK(save_filled(100, 0));
    CHECK_LISTED("123456789 100 20 0");

    int64_t* steps;
    CHECK(checkpoint_list(in_out("nowhere"), &steps, &err) == 0 && !steps, "no folder, no checkpoints");
    CHECK(checkpoint_list(in_out("step_00000077"), &steps, &err) == -1, "a file is not an empty folder");
    CHECK(strstr(err.msg, "step_00000077: cannot read this folder"), "%s", err.msg);
}

static void test_keep(void) {
    const char* strangers[] = {"step_1", "other", "step_00000002.bak"};
    for (int i = 0; i < 3; i++) CHECK_OK(make_folders(in_out("%s/x", strangers[i]), &err));
    for (int64_t step = 10; step <= 50; step += 10) CHECK_OK(save_filled(step, 0));
    CHECK_LISTED("50 40 30 20 10");
    CHECK_OK(save_filled(60, 3));
    CHECK_LISTED("60 50 40");
    CHECK_OK(save_filled(70, 1));
    CHECK_LISTED("70");
    CHECK_OK(save_filled(80, 2));
    CHECK_LISTED("80 70");
    // back behind 70 and 80: the one just saved must stay, whatever they are
    CHECK_OK(save_filled(65, 1));
    CHECK_LISTED("80 70 65");
    CHECK_OK(save_filled(66, 1));
    CHECK_LISTED("80 70 66");
    CHECK_OK(save_filled(70, 1));
    CHECK_LISTED("80 70");
    CHECK(loads(folder_of(70)), "%s", err.msg);
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
    for (int i = 0; i < 3; i++) CHECK(rmdir(in_out("%s/x", strangers[i])) == 0, "%s", strangers[i]);

    // a link is removed itself, and not what it points to
    CHECK(rename(folder_of(70), in_out("elsewhere")) == 0, "rename");
    CHECK(symlink("elsewhere", folder_of(70)) == 0, "symlink");
    CHECK_OK(save_filled(80, 1));
    CHECK_LISTED("80");
    CHECK(loads(in_out("elsewhere")), "%s", err.msg);
}

static void test_same_step_again(void) {
    Buffers b = buffers(4), expected = filled_buffers(4, 8);
    CHECK_OK(save_filled(7, 2));
    CHECK(truncate(in_out("step_00000007/model.safetensors"), 100) == 0, "truncate");
    CHECK(!loads(folder_of(7)), "a damaged checkpoint loads");
    CHECK_OK(save(7, &expected, 2));
    CHECK_OK(checkpoint_load_weights(folder_of(7), &table, b.w, 4, &err));
    CHECK(memcmp(b.w, expected.w, (size_t)table.count * 4) == 0, "the damaged one is still there");
    CHECK_LISTED("7");
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
    free_buffers(&b);
    free_buffers(&expected);
}

// ----------------------------------------------------------------------------
// what goes wrong while saving

// What a crash left behind, at any point, does not count as a checkpoint and goes with the next save.
static void test_crash(void) {
    CHECK_OK(save_filled(10, 0));
    CHECK_OK(save_filled(20, 0));
    CHECK(rename(folder_of(20), in_out(".tmp-step_00000020")) == 0, "rename");
    CHECK_OK(make_folders(in_out(".tmp-step_00000030"), &err)); // the step to be saved now
    CHECK_OK(make_folders(in_out(".tmp-step_00000005.old/deep/er"), &err));
    FILE* f = fopen(in_out(".tmp-step_00000030/model.safetensors"), "wb");
    if (f) fclose(f);
    CHECK_LISTED("10");
    CHECK(leftovers() == 3, "%d leftovers", leftovers());
    CHECK_OK(save_filled(30, 0));
    CHECK_LISTED("30 10");
    CHECK(loads(folder_of(30)), "%s", err.msg);
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
}

// A process killed at any time while it saves again and again, keeping one, leaves at least one whole
// checkpoint.
static void test_killed(void) {
    CHECK_OK(save_filled(1, 1));
    for (int round = 0; round < 20; round++) {
        int pipe_ends[2];
        pid_t child = test_fork(pipe_ends);
        if (child == 0) {
            for (int64_t step = 2;; step++)
                if (!save_filled(step, 1) || write(STDERR_FILENO, "x", 1) != 1) _exit(1);
        }
        // after a number of saves, which depends on the round, the child is somewhere in the middle of the
        // next one
        char byte;
        for (int saves = 0; saves <= round % 3; saves++)
            CHECK(read(pipe_ends[0], &byte, 1) == 1, "the child failed");
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        close(pipe_ends[0]);

        int64_t* steps;
        int count = checkpoint_list(out, &steps, &err);
        CHECK(count >= 1, "%s", count < 0 ? err.msg : "no checkpoint is left");
        for (int i = 0; i < count; i++) CHECK(loads(folder_of(steps[i])), "%s", err.msg);
        free(steps);
    }
}

// A limit on the size of files stands for a full disk. It lets less and less through, so that each file fails
// in turn.
static void test_full_disk(void) {
    static const int limits[] = {2000000, 400000, 200000, 1000, 100, 0};
    struct rlimit old, small;
    int failures = 0;
    CHECK_OK(save_filled(10, 1));
    CHECK_OK(save_filled(20, 2));
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        small.rlim_cur = (rlim_t)limits[i];
        setrlimit(RLIMIT_FSIZE, &small);
        bool ok = save_filled(20, 1); // that would replace one checkpoint and remove the other
        setrlimit(RLIMIT_FSIZE, &old);
        failures += !ok;
        if (ok && save_filled(10, 1)) continue;
        CHECK(strstr(err.msg, out) && strstr(err.msg, ": cannot write: File too large"), "%s", err.msg);
        CHECK_LISTED("20 10");
        CHECK(loads(folder_of(10)) && loads(folder_of(20)), "%s", err.msg);
        CHECK(leftovers() == 0, "%d leftovers", leftovers());
    }
    CHECK(failures == 5, "%d failures", failures);
}

static void test_unwritable(void) {
    FILE* f = fopen(in_out("file"), "wb");
    if (f) fclose(f);
    char saved[PATH_LENGTH];
    strcpy(saved, out);
    strcpy(out, in_out("file"));
    CHECK_FAILS("file", save_filled(1, 1));
    strcpy(out, saved);
    if (geteuid() == 0) return; // root may write anywhere
    CHECK_OK(save_filled(1, 1));
    chmod(out, 0555);
    CHECK_FAILS(".tmp-step_00000002: cannot make", save_filled(2, 1));
    chmod(out, 0777);
    CHECK_LISTED("1");
}

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
            // nothing, a byte, half, all but the last two (which are a closing bracket and a line break), and
            // no file
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

// A resume goes through the list until everything of a checkpoint loads.
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
// other people's folders

// Writes the named shard of a Hugging Face folder: rows [first, last) of the table as the type, and `extra`
// if it is not NULL. Element i of the flat buffer is i mod 128, which is exact in all types.
static void write_shard(const char* path, int first, int last, SafetensorsDtype dtype, const char* extra) {
    SafetensorsWriter w;
    size_t size = safetensors_dtype_size(dtype);
    const int64_t one = 1;
    safetensors_writer_open(&w, path, &err);
    for (int r = first; r < last; r++) {
        const Param* p = &table.rows[r];
        safetensors_writer_declare(&w, p->name, dtype, p->ndim, p->shape);
    }
    if (extra) safetensors_writer_declare(&w, extra, dtype, 1, &one);
    safetensors_writer_begin(&w, &err);
    int64_t end = table.rows[last - 1].offset + table.rows[last - 1].count;
    for (int64_t i = table.rows[first].offset; i < end; i++) {
        double f64 = (double)(i % 128);
        float f32 = (float)f64;
        const void* value = size == 8 ? (const char*)&f64 : (const char*)&f32 + 4 - size;
        safetensors_writer_write(&w, value, size, &err);
    }
    const double zero = 0;
    if (extra) safetensors_writer_write(&w, &zero, size, &err);
    CHECK_OK(safetensors_writer_close(&w, &err));
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

// ----------------------------------------------------------------------------
// the lock

static void test_lock(void) {
    char run[PATH_LENGTH];
    strcpy(run, in_out("runs/first"));
    int fd = -1, second = -1;
    CHECK_OK(out_lock(run, &fd, &err));
    CHECK_FAILS("runs/first: another process is training here", out_lock(run, &second, &err));
    CHECK_DIES("another process is training", if (!out_lock(run, &second, &err)) die("%s", err.msg));
    CHECK_OK(out_lock(in_out("runs/second"), &second, &err));
    close(second);
    close(fd);
    // a process that dies in any way gives the lock back
    int pipe_ends[2];
    char byte;
    pid_t child = test_fork(pipe_ends);
    if (child == 0) {
        bool ok = out_lock(run, &fd, &err);
        if (write(STDERR_FILENO, ok ? "y" : "n", 1) == 1) pause();
        _exit(1);
    }
    CHECK(read(pipe_ends[0], &byte, 1) == 1 && byte == 'y', "the child could not lock");
    CHECK_FAILS("another process", out_lock(run, &fd, &err));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(pipe_ends[0]);
    CHECK_OK(out_lock(run, &fd, &err));
    close(fd);
}

int main(void) {
    static void (*const tests[])(void) = {
        test_round_trips,   test_not_finite,  test_list,           test_keep,       test_same_step_again,
        test_crash,         test_killed,      test_full_disk,      test_unwritable, test_cut_short,
        test_untouched,     test_bad_trainer, test_newest_damaged, test_types,      test_shards,
        test_wrong_tensors, test_lock};
    make_model();
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        strcpy(out, test_scratch("checkpoint"));
        tests[i]();
    }
    params_free(&table);
    return test_report();
}
