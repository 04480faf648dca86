/*
What the tests of llmc/checkpoint have in common: a small model, buffers with its weights and moments, and a
folder that stands for --out.
*/
#pragma once

#include "../../llmc/baselines/mixers.h"
#include "../../llmc/checkpoint/read.h"
#include "../../llmc/checkpoint/write.h"
#include "../../llmc/run/command/options.h"
#include "check.h"
#include "tensor_files.h"

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
static JsonWriter options_json; // what make_model sets of them

// A path below OUT; the last eight stay valid.
PRINTF_LIKE(1, 2)
static inline const char* in_out(const char* format, ...) {
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
// a small model with every kind of tensor, including the bias of a fixed gate, which is not trained. Its
// sizes leave no gaps between tensors in the flat buffer, so that whole buffers can be compared

static inline void make_model(void) {
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
    options_json = json_writer(2);
    options_put(&options, &options_json, NULL);
}

static const char* scales; // of --fp8, which checkpoints record; NULL: none

// What a checkpoint of a state records.
static inline CheckpointRecord record_of(const ParamTable* of, const TrainerState* state,
                                         const HfTokenizer* tokenizer) {
    CheckpointRecord record = {.config = &config,
                               .table = of,
                               .state = state,
                               .run = {.model = options.model,
                                       .init = options.init,
                                       .data = options.data,
                                       .code_version = "a version",
                                       .seq_len = options.seq_len,
                                       .seed = options.seed,
                                       .tokens = state->tokens,
                                       .json_escape = options.json_escape},
                               .tokenizer = tokenizer,
                               .options = options_json.text,
                               .fp8 = scales};
    return record;
}

static inline TrainerState state_at(int64_t step) {
    TrainerState s;
    s.step = step, s.tokens = 100 * step, s.position = 10 * step + 1;
    s.sequences = 12345, s.fingerprint = 0xfedcba9876543210u;
    s.seed = ((int64_t)1 << 62) - 1; // almost the largest that --seed takes
    s.lr = 0.1, s.warmup_tokens = 16, s.max_tokens = (int64_t)1 << 60;
    memset(&s.norms, 0, sizeof s.norms);
    for (int64_t i = step; i > 0 && i > step - NORMS_KEPT; i--)
        s.norms.values[i % NORMS_KEPT] = 1 / (double)i;
    return s;
}

// Flat buffers, floats or doubles.
typedef struct {
    void *w, *m, *v;
    int bytes; // of an element
} Buffers;

static inline double get(const Buffers* b, const void* buffer, int64_t i) {
    return b->bytes == 8 ? ((const double*)buffer)[i] : (double)((const float*)buffer)[i];
}

static inline void put(const Buffers* b, void* buffer, int64_t i, double x) {
    if (b->bytes == 8)
        ((double*)buffer)[i] = x;
    else
        ((float*)buffer)[i] = (float)x;
}

static inline Buffers buffers(int element_bytes) {
    Buffers b = {NULL, NULL, NULL, element_bytes};
    b.w = xcalloc((size_t)table.count, (size_t)element_bytes);
    b.m = xcalloc((size_t)table.count, (size_t)element_bytes);
    b.v = xcalloc((size_t)table.count, (size_t)element_bytes);
    return b;
}

// The next value of a linear congruential generator, in [0, 1). llmc's random numbers would take most of a
// test's time.
static inline double next_value(uint64_t* state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 0x1p53;
}

// Random values that differ from seed to seed.
static inline Buffers filled_buffers(int element_bytes, uint64_t seed) {
    Buffers b = buffers(element_bytes);
    uint64_t state = seed << 32;
    for (int64_t i = 0; i < table.count; i++) {
        put(&b, b.w, i, 4 * next_value(&state) - 2);
        put(&b, b.m, i, 4 * next_value(&state) - 2);
        put(&b, b.v, i, next_value(&state));
    }
    return b;
}

static inline void free_buffers(Buffers* b) {
    free(b->w);
    free(b->m);
    free(b->v);
}

// The buffers as one rank's.
static inline CheckpointTensors tensors_of(const Buffers* b) {
    CheckpointTensors t = {b->w, b->m, b->v, b->bytes};
    return t;
}

static inline bool load_weights(const char* folder, const Buffers* b) {
    const Shard whole = params_shard(&table, 0, 1);
    const CheckpointTensors t = tensors_of(b);
    const CheckpointPart part = {&table, &whole, &t, NULL};
    return checkpoint_read_file(folder, CHECKPOINT_MODEL, &part, &err);
}

static inline bool load_optimizer(const char* folder, const Buffers* b) {
    const Shard whole = params_shard(&table, 0, 1);
    const CheckpointTensors t = tensors_of(b);
    const CheckpointPart part = {&table, &whole, &t, NULL};
    return checkpoint_read_file(folder, CHECKPOINT_OPTIMIZER, &part, &err);
}

// Copies between buffers of the model's table and a rank's shard of `other`, which was built for more ranks.
static inline void copy_shard(const ParamTable* other, const Shard* shard, const CheckpointTensors* t,
                              const Buffers* b, bool to_shard) {
    char* const parts[] = {(char*)t->w, (char*)t->m, (char*)t->v};
    char* const wholes[] = {(char*)b->w, (char*)b->m, (char*)b->v};
    for (int r = 0; r < other->num_rows; r++) {
        const TensorRange range = tensor_range(&other->rows[r], shard);
        for (int k = 0; k < 3; k++) {
            char* part = parts[k] + range.local * b->bytes;
            char* whole = wholes[k] + (table.rows[r].offset + range.first) * b->bytes;
            memcpy(to_shard ? part : whole, to_shard ? whole : part, (size_t)(range.count * b->bytes));
        }
    }
}

// Buffers of one rank of `other`, NaN where a shard has no tensor.
static inline CheckpointTensors shard_tensors(const Shard* shard, int element_bytes) {
    size_t bytes = (size_t)shard_count(shard) * (size_t)element_bytes;
    CheckpointTensors t = {xcalloc(bytes, 1), xcalloc(bytes, 1), xcalloc(bytes, 1), element_bytes};
    memset(t.w, 0xff, bytes);
    memset(t.m, 0xff, bytes);
    memset(t.v, 0xff, bytes);
    return t;
}

static inline void free_tensors(CheckpointTensors* t) {
    free(t->w);
    free(t->m);
    free(t->v);
}

// Saves as a number of ranks do, one after the other.
static inline bool save_by(int ranks, int64_t step, const Buffers* b, int keep) {
    const TrainerState state = state_at(step);
    ParamTable other = params_build_for(&config, ranks);
    const CheckpointRecord record = record_of(&other, &state, NULL);
    CheckpointWriter w;
    bool ok = checkpoint_writer_open(&w, out, step, &other, b->bytes, &err);
    if (!ok) return false;
    ok = checkpoint_create(&w, &record, &err);
    for (int rank = ranks; ok && rank-- > 0;) {
        const Shard shard = params_shard(&other, rank, ranks);
        CheckpointTensors t = shard_tensors(&shard, b->bytes);
        copy_shard(&other, &shard, &t, b, true);
        const CheckpointPart part = {&other, &shard, &t, NULL};
        ok = checkpoint_write_shard(&w, &part, &err);
        free_tensors(&t);
        if (!ok) checkpoint_sweep(out);
    }
    ok = ok && checkpoint_finish(&w, keep, &err);
    checkpoint_writer_close(&w);
    params_free(&other);
    return ok;
}

static inline bool save(int64_t step, const Buffers* b, int keep) { return save_by(1, step, b, keep); }

// Saves a checkpoint whose values come from its step.
static inline bool save_filled(int64_t step, int keep) {
    Buffers b = filled_buffers(4, (uint64_t)step);
    bool ok = save(step, &b, keep);
    free_buffers(&b);
    return ok;
}

// Replaces `from` by `to` in a file.
static inline void edit(const char* path, const char* from, const char* to) {
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

// Reads FOLDER/trainer.json, as checkpoint_parse_state.
static inline bool load_state(const char* folder, TrainerState* state, Json* record) {
    char path[PATH_LENGTH];
    size_t bytes;
    memset(record, 0, sizeof *record);
    path_join(path, folder, "trainer.json");
    char* text = read_file(path, &bytes, &err);
    bool ok = text && checkpoint_parse_state(path, text, bytes, state, record, &err);
    free(text);
    return ok;
}

// Whether everything in the folder can be loaded.
static inline bool loads(const char* folder) {
    Buffers b = buffers(4);
    TrainerState state;
    Json record;
    Config c;
    bool ok = config_read(&c, folder, &err) && load_weights(folder, &b) && load_optimizer(folder, &b) &&
              load_state(folder, &state, &record);
    if (ok) {
        ok = checkpoint_verify(folder, &record, 0, 1, NULL, &err);
        json_free(&record);
    }
    free_buffers(&b);
    return ok;
}

// The checkpoints in OUT, newest first: "30 20 10".
static inline const char* listed(void) {
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
static inline int leftovers(void) {
    int count = -2;
    DIR* folder = opendir(out);
    for (struct dirent* entry; folder && (entry = readdir(folder)) != NULL;) count += entry->d_name[0] == '.';
    if (folder) closedir(folder);
    return count;
}

// Kills a child of test_fork, which writes a byte after each of its saves, in the middle of a later one: of
// which depends on the round. At least one whole checkpoint is left.
static inline void check_killed(pid_t child, const int pipe_ends[2], int round) {
    char byte;
    int64_t* steps;
    for (int saves = 0; saves <= round % 3; saves++)
        CHECK(read(pipe_ends[0], &byte, 1) == 1, "the child failed");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(pipe_ends[0]);
    int count = checkpoint_list(out, &steps, &err);
    CHECK(count >= 1, "%s", count < 0 ? err.msg : "no checkpoint is left");
    for (int i = 0; i < count; i++) CHECK(loads(folder_of(steps[i])), "%s", err.msg);
    free(steps);
}

// Runs the tests, each in an empty folder; returns the exit code of main.
static inline int run_checkpoint_tests(void (*const tests[])(void), size_t count, const char* scratch) {
    make_model();
    for (size_t i = 0; i < count; i++) {
        strcpy(out, test_scratch(scratch));
        tests[i]();
    }
    params_free(&table);
    json_writer_free(&options_json);
    return test_report();
}
