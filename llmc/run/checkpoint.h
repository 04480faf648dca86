/*
Checkpoints: a run's state on disk, in folders that are Hugging Face model folders.

    OUT/step_00001000/config.json              the model's sizes and switches
                      model.safetensors        the master weights, named and shaped by the parameter table
                      optimizer.safetensors    AdamW's exp_avg.NAME and exp_avg_sq.NAME of what is trained
                      trainer.json             how far the run is, and the options that it goes on with
    OUT/lock                                   keeps a second process out

A folder that has its final name is complete: it is written and flushed under a temporary name, and renamed;
what a checkpoint replaces or makes superfluous goes only after that. Whatever crashes when, the newest
complete checkpoint stays, and the next save sweeps up what was left half done.

A folder can still come to harm, from outside. So a load looks at everything before it writes to the caller's
buffers (names, shapes, types, that no byte of a file is missing), and the caller who gets an error from any
of them takes the next older checkpoint of checkpoint_list. Values are the caller's to judge.

Buffers are flat, laid out by the parameter table; their elements are float or double, as element_bytes (4 or
8) says, and so is what is written. Reading converts from any floating-point type.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <dirent.h>
#include <sys/syscall.h>
#include "../base/common.h"
#include "../model/config.h"
#include "../formats/json.h"
#include "options.h"
#include "../model/params.h"
#include "../formats/safetensors.h"

#ifndef CODE_VERSION // the build says which commit it is made of
#define CODE_VERSION "unknown"
#endif

typedef struct {
    int64_t step;     // optimizer steps done
    int64_t tokens;   // trained on so far
    int64_t position; // sequences of the training data used up
    int64_t seed;
    double lr; // the schedule: peak learning rate
    int64_t warmup_tokens, max_tokens;
} TrainerState;

// ----------------------------------------------------------------------------
// names of folders

#define CHECKPOINT_TEMPORARY                                                                                 \
    ".tmp-" // what starts with this and step_ is nobody's, unless it is being written

static inline void checkpoint_join(char path[PATH_LENGTH], const char* out, const char* before, int64_t step,
                                   const char* after) {
    char name[64];
    snprintf(name, sizeof name, "%sstep_%08lld%s", before, (long long)step, after);
    path_join(path, out, name);
}

// The folder of a step's checkpoint: OUT/step_00001000.
static inline void checkpoint_path(char path[PATH_LENGTH], const char* out, int64_t step) {
    checkpoint_join(path, out, "", step, "");
}

// Where a checkpoint waits for its removal.
static inline void checkpoint_old_path(char path[PATH_LENGTH], const char* out, int64_t step) {
    checkpoint_join(path, out, CHECKPOINT_TEMPORARY, step, ".old");
}

// The step that a folder's name tells; -1 if it is not exactly what we would have given it.
static inline int64_t checkpoint_step(const char* name) {
    char ours[64];
    long long step = strncmp(name, "step_", 5) == 0 ? strtoll(name + 5, NULL, 10) : -1;
    snprintf(ours, sizeof ours, "step_%08lld", step);
    return step >= 0 && strcmp(name, ours) == 0 ? step : -1;
}

static inline int checkpoint_newer_first(const void* a, const void* b) {
    int64_t s = *(const int64_t*)a, t = *(const int64_t*)b;
    return (s < t) - (s > t);
}

static inline int checkpoint_list_failed(const char* out, int why, Error* err) {
    fail(err, "%s: cannot read this folder: %s", out, strerror(why));
    return -1;
}

// Lists the steps of the complete checkpoints in OUT, newest first, into *steps, for the caller to free.
// Returns their number, 0 if there is no such folder, and -1 on error: a folder that cannot be read is not an
// empty one.
static inline int checkpoint_list(const char* out, int64_t** steps, Error* err) {
    int count = 0;
    *steps = NULL;
    DIR* folder = opendir(out);
    if (!folder && errno == ENOENT) return 0;
    if (!folder) return checkpoint_list_failed(out, errno, err);
    // errno tells a failed readdir from the end of the folder
    for (struct dirent* entry; errno = 0, (entry = readdir(folder)) != NULL;) {
        int64_t step = checkpoint_step(entry->d_name);
        char path[PATH_LENGTH];
        struct stat st;
        if (step < 0) continue;
        checkpoint_path(path, out, step);
        if (stat(path, &st) == 0 && !S_ISDIR(st.st_mode)) continue;
        *steps = (int64_t*)xrealloc(*steps, (size_t)(count + 1) * sizeof **steps);
        (*steps)[count++] = step;
    }
    int why = errno;
    closedir(folder);
    if (why != 0) {
        free(*steps);
        *steps = NULL;
        return checkpoint_list_failed(out, why, err);
    }
    if (count > 1) qsort(*steps, (size_t)count, sizeof **steps, checkpoint_newer_first);
    return count;
}

// Makes sure that no other process writes to OUT, which is made if need be. Keep *fd open for as long as the
// run lasts; the lock goes with the process, however it ends.
static inline bool out_lock(const char* out, int* fd, Error* err) {
    char path[PATH_LENGTH];
    if (!make_folders(out, err)) return false;
    path_join(path, out, "lock");
    *fd = lock_file(path);
    if (*fd >= 0) return true;
    if (errno == EWOULDBLOCK)
        return fail(err, "%s: another process is training here; let it end, or choose another --out", out);
    return fail(err, "%s: cannot lock: %s", path, strerror(errno));
}

// ----------------------------------------------------------------------------
// removing

// Removes a file, or a folder with all that is in it. Links are removed, never followed.
static inline bool checkpoint_remove(const char* path, Error* err) {
    struct stat st;
    DIR* folder = lstat(path, &st) == 0 && S_ISDIR(st.st_mode) ? opendir(path) : NULL;
    bool ok = true;
    for (struct dirent* entry; ok && folder && (entry = readdir(folder)) != NULL;) {
        char inside[PATH_LENGTH];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        path_join(inside, path, entry->d_name);
        ok = checkpoint_remove(inside, err);
    }
    if (folder) closedir(folder);
    if (!ok || remove(path) == 0 || errno == ENOENT) return ok;
    return fail(err, "%s: cannot remove: %s", path, strerror(errno));
}

// Removes whatever has a temporary name in OUT. That it cannot is worth a warning: it costs room, no more.
static inline void checkpoint_sweep(const char* out) {
    const char* prefix = CHECKPOINT_TEMPORARY "step_";
    Error err;
    DIR* folder = opendir(out);
    for (struct dirent* entry; folder && (entry = readdir(folder)) != NULL;) {
        char path[PATH_LENGTH];
        if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0) continue;
        path_join(path, out, entry->d_name);
        if (!checkpoint_remove(path, &err)) warn("%s", err.msg);
    }
    if (folder) closedir(folder);
}

// Takes a checkpoint's name away, for the sweep to remove it: half removed, it must not look complete.
static inline bool checkpoint_discard(const char* out, int64_t step, Error* err) {
    char path[PATH_LENGTH], old[PATH_LENGTH];
    checkpoint_path(path, out, step);
    checkpoint_old_path(old, out, step);
    if (rename(path, old) == 0 || errno == ENOENT) return true;
    return fail(err, "%s: cannot rename: %s", path, strerror(errno));
}

// Discards all but the `keep` newest checkpoints up to that of `step`, which itself always stays. Newer ones
// are not counted: they are damaged ones that the run had to go back behind.
static inline void checkpoint_prune(const char* out, int64_t step, int keep) {
    int64_t* steps;
    Error err;
    int kept = 0, count = checkpoint_list(out, &steps, &err);
    for (int i = 0; i < count; i++)
        if (steps[i] <= step && kept++ >= keep && !checkpoint_discard(out, steps[i], &err))
            warn("%s", err.msg);
    if (count < 0) warn("%s", err.msg);
    free(steps);
}

// ----------------------------------------------------------------------------
// tensors

// What one file holds: in each part all parameters, or all trainable ones, under a prefix to their names.
typedef struct {
    const ParamTable* table;
    bool trainable_only;
    int element_bytes;
    int num_parts;
    const char* prefixes[2];
    char* buffers[2]; // flat, table->count elements; only read when saving
} CheckpointFile;

typedef struct {
    char name[96];
    int ndim;
    int64_t shape[3];
    char* data; // in the part's buffer
    size_t bytes;
} CheckpointTensor;

static inline CheckpointFile checkpoint_weights(const ParamTable* table, const void* w, int element_bytes) {
    CheckpointFile f = {table, false, element_bytes, 1, {"", NULL}, {(char*)w, NULL}};
    return f;
}

static inline CheckpointFile checkpoint_optimizer(const ParamTable* table, const void* m, const void* v,
                                                  int element_bytes) {
    CheckpointFile f = {table, true, element_bytes, 2, {"exp_avg.", "exp_avg_sq."}, {(char*)m, (char*)v}};
    return f;
}

// Steps to the file's next tensor: for (int i = 0; checkpoint_next(&f, &i, &t);)
static inline bool checkpoint_next(const CheckpointFile* f, int* i, CheckpointTensor* t) {
    int rows = f->table->num_rows;
    while (*i < f->num_parts * rows) {
        int part = *i / rows;
        const Param* p = &f->table->rows[(*i)++ % rows];
        if (f->trainable_only && !p->trainable) continue;
        snprintf(t->name, sizeof t->name, "%s%s", f->prefixes[part], p->name);
        t->ndim = p->ndim;
        memcpy(t->shape, p->shape, sizeof t->shape);
        t->data = f->buffers[part] + p->offset * f->element_bytes;
        t->bytes = (size_t)(p->count * f->element_bytes);
        return true;
    }
    return false;
}

static inline bool checkpoint_write_tensors(const CheckpointFile* f, const char* folder, const char* name,
                                            Error* err) {
    char path[PATH_LENGTH];
    SafetensorsWriter w;
    CheckpointTensor t;
    path_join(path, folder, name);
    SafetensorsDtype dtype = f->element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    safetensors_writer_open(&w, path, err); // close reports what fails on the way
    safetensors_writer_metadata(&w, "format", "pt");
    for (int i = 0; checkpoint_next(f, &i, &t);)
        safetensors_writer_declare(&w, t.name, dtype, t.ndim, t.shape);
    bool ok = safetensors_writer_begin(&w, err);
    for (int i = 0; ok && checkpoint_next(f, &i, &t);)
        ok = safetensors_writer_write(&w, t.data, t.bytes, err);
    return safetensors_writer_close(&w, err);
}

// A shape as text: [257, 64].
static inline const char* checkpoint_shape(char text[128], int ndim, const int64_t* shape) {
    int n = snprintf(text, 128, "[");
    for (int i = 0; i < ndim && n < 100; i++)
        n += snprintf(text + n, (size_t)(128 - n), "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(text + n, (size_t)(128 - n), "]");
    return text;
}

// Checks one tensor of a file, NULL if absent, against what it should be.
static inline bool checkpoint_check_tensor(const CheckpointTensor* want, const SafeTensor* have,
                                           const char* where, Error* err) {
    char is[128], should_be[128];
    if (!have && strcmp(want->name, "lm_head.weight") == 0)
        return fail(err, "%s: tensor '%s' is missing; a head tied to the embedding is not supported", where,
                    want->name);
    if (!have) return fail(err, "%s: tensor '%s' is missing", where, want->name);
    if (have->ndim != want->ndim ||
        memcmp(have->shape, want->shape, (size_t)want->ndim * sizeof(int64_t)) != 0)
        return fail(err, "%s: tensor '%s' has shape %s, but %s fits the config", have->path, want->name,
                    checkpoint_shape(is, have->ndim, have->shape),
                    checkpoint_shape(should_be, want->ndim, want->shape));
    bool floating = have->dtype == SAFETENSORS_F64 || have->dtype == SAFETENSORS_F32 ||
                    have->dtype == SAFETENSORS_F16 || have->dtype == SAFETENSORS_BF16;
    return floating ? true
                    : fail(err, "%s: tensor '%s' has type %s, not a floating-point type", have->path,
                           want->name, safetensors_dtype_name(have->dtype));
}

// Reports a tensor of the set that f does not know, of which there is one. To pass over it would be to load
// another model than the one that was trained.
static inline bool checkpoint_fail_extra(const CheckpointFile* f, const SafetensorsSet* set, Error* err) {
    CheckpointTensor t;
    for (int file = 0; file < set->count; file++) {
        for (int k = 0; k < set->files[file].count; k++) {
            const SafeTensor* have = &set->files[file].tensors[k];
            bool known = false;
            for (int i = 0; !known && checkpoint_next(f, &i, &t);) known = strcmp(t.name, have->name) == 0;
            if (known) continue;
            return fail(err, "%s: tensor '%.200s' is not part of the model that the config describes",
                        have->path, have->name);
        }
    }
    return fail(err, "%s: holds a tensor twice", set->files[0].path);
}

// Reads all tensors of f from the open files. They must be exactly those that f lists: on error nothing was
// touched.
static inline bool checkpoint_read_tensors(const CheckpointFile* f, const SafetensorsSet* set,
                                           const char* where, Error* err) {
    CheckpointTensor t;
    int wanted = 0, present = 0;
    for (int i = 0; checkpoint_next(f, &i, &t); wanted++)
        if (!checkpoint_check_tensor(&t, safetensors_set_find(set, t.name), where, err)) return false;
    for (int i = 0; i < set->count; i++) present += set->files[i].count;
    if (present != wanted) return checkpoint_fail_extra(f, set, err);
    bool ok = true;
    for (int i = 0; ok && checkpoint_next(f, &i, &t);) {
        const SafeTensor* have = safetensors_set_find(set, t.name);
        ok = f->element_bytes == 8 ? safetensors_read_f64(have, (double*)(void*)t.data, err)
                                   : safetensors_read_f32(have, (float*)(void*)t.data, err);
    }
    return ok;
}

// ----------------------------------------------------------------------------
// saving

static inline bool checkpoint_write_trainer(const char* folder, const TrainerState* s, const Options* o,
                                            int element_bytes, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, "trainer.json");
    JsonWriter w = json_writer(2);
    json_begin_object(&w, NULL);
    json_put_int(&w, "step", s->step);
    json_put_int(&w, "tokens", s->tokens);
    json_put_int(&w, "seed", s->seed);
    json_begin_object(&w, "schedule");
    json_put_double(&w, "lr", s->lr);
    json_put_int(&w, "warmup_tokens", s->warmup_tokens);
    json_put_int(&w, "max_tokens", s->max_tokens);
    json_end(&w);
    json_begin_object(&w, "data");
    json_put_int(&w, "position", s->position);
    json_end(&w);
    json_put_string(&w, "precision", element_bytes == 8 ? "float64" : "float32");
    json_put_string(&w, "code_version", CODE_VERSION);
    options_put(o, &w, "options");
    json_end(&w);
    bool ok = json_writer_save(&w, path, err);
    json_writer_free(&w);
    return ok;
}

// Gives the folder its final name. A folder that has it already is replaced: in one stroke where the file
// system can (most but NFS), and else in two, where a crash in between leaves the older checkpoints.
static inline bool checkpoint_publish(const char* out, const char* temporary, int64_t step, Error* err) {
    const unsigned exchange = 2; // RENAME_EXCHANGE, which the C library's headers may hide
    char path[PATH_LENGTH], old[PATH_LENGTH];
    checkpoint_path(path, out, step);
    checkpoint_old_path(old, out, step);
    bool done = syscall(SYS_renameat2, AT_FDCWD, temporary, AT_FDCWD, path, exchange) == 0 ||
                rename(temporary, path) == 0; // which takes no folder's place that is not empty
    if (!done) {
        if (!checkpoint_discard(out, step, err)) return false;
        done = rename(temporary, path) == 0;
        if (!done) fail(err, "%s: cannot make: %s", path, strerror(errno));
        if (!done) rename(old, path); // back to what was there, if anything
    }
    return done && flush_folder(out, err);
}

static inline bool checkpoint_check_finite_(const CheckpointFile* f, Error* err) {
    CheckpointTensor t;
    for (int i = 0; checkpoint_next(f, &i, &t);) {
        bool finite = true;
        for (size_t k = 0; f->element_bytes == 4 && k < t.bytes / 4; k++)
            finite &= (bool)isfinite(((const float*)(void*)t.data)[k]);
        for (size_t k = 0; f->element_bytes == 8 && k < t.bytes / 8; k++)
            finite &= (bool)isfinite(((const double*)(void*)t.data)[k]);
        if (!finite) return fail(err, "'%s' has become infinite or not a number", t.name);
    }
    return true;
}

// Are all numbers finite? A run whose numbers have gone bad must not replace good checkpoints by one that
// nothing can go on from.
static inline bool checkpoint_check_finite(const ParamTable* table, const void* w, const void* m,
                                           const void* v, int element_bytes, Error* err) {
    CheckpointFile weights = checkpoint_weights(table, w, element_bytes);
    CheckpointFile optimizer = checkpoint_optimizer(table, m, v, element_bytes);
    return checkpoint_check_finite_(&weights, err) && checkpoint_check_finite_(&optimizer, err);
}

// Saves a checkpoint as OUT/step_N, N = state->step, then removes older ones beyond the `keep` newest (0
// keeps all). w, m and v are weights and AdamW's two moments. A checkpoint of the same step is replaced:
// after a run went back behind a damaged one, that is the one in the way. The caller holds out_lock.
//
// On error nothing is known to be saved, the older checkpoints are as they were, and the temporary folder is
// gone.
static inline bool checkpoint_save(const char* out, const Config* config, const ParamTable* table,
                                   const Options* options, const TrainerState* state, const void* w,
                                   const void* m, const void* v, int element_bytes, int keep, Error* err) {
    char folder[PATH_LENGTH], config_path[PATH_LENGTH];
    CheckpointFile weights = checkpoint_weights(table, w, element_bytes);
    CheckpointFile optimizer = checkpoint_optimizer(table, m, v, element_bytes);
    if (!make_folders(out, err)) return false;
    checkpoint_sweep(out); // what a crash left may be the room that this one needs
    checkpoint_join(folder, out, CHECKPOINT_TEMPORARY, state->step, "");
    path_join(config_path, folder, "config.json");
    bool ok = make_folders(folder, err) && config_write(config, config_path, err) &&
              checkpoint_write_tensors(&weights, folder, "model.safetensors", err) &&
              checkpoint_write_tensors(&optimizer, folder, "optimizer.safetensors", err) &&
              checkpoint_write_trainer(folder, state, options, element_bytes, err) &&
              flush_folder(folder, err) && checkpoint_publish(out, folder, state->step, err);
    if (ok && keep > 0) checkpoint_prune(out, state->step, keep);
    checkpoint_sweep(out);
    return ok;
}

// ----------------------------------------------------------------------------
// loading. config.json is config_read's.

// Reads the weights of a checkpoint or Hugging Face folder, of one file or many, into w. Every tensor must be
// there with the table's shape, and no other; on error w is untouched.
static inline bool checkpoint_load_weights(const char* folder, const ParamTable* table, void* w,
                                           int element_bytes, Error* err) {
    SafetensorsSet set;
    CheckpointFile f = checkpoint_weights(table, w, element_bytes);
    if (!safetensors_set_open(&set, folder, err)) return false;
    bool ok = checkpoint_read_tensors(&f, &set, set.count == 1 ? set.files[0].path : folder, err);
    safetensors_set_close(&set);
    return ok;
}

// Reads AdamW's moments into m and v; what is not trained keeps the values it has there. On error both are
// untouched.
static inline bool checkpoint_load_optimizer(const char* folder, const ParamTable* table, void* m, void* v,
                                             int element_bytes, Error* err) {
    char path[PATH_LENGTH];
    Safetensors file;
    CheckpointFile f = checkpoint_optimizer(table, m, v, element_bytes);
    path_join(path, folder, "optimizer.safetensors");
    if (!safetensors_open(&file, path, err)) return false;
    SafetensorsSet set = {&file, 1};
    bool ok = checkpoint_read_tensors(&f, &set, path, err);
    safetensors_close(&file);
    return ok;
}

// Reads trainer.json: the state, and the whole text as *record, for json_free, whose member "options" is what
// options_restore takes. On error record is empty and *state undefined.
static inline bool checkpoint_load_state(const char* folder, TrainerState* state, Json* record, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, "trainer.json");
    if (!json_parse_file(record, path, err)) return false;
    int schedule = json_get(record, 0, "schedule"), data = json_get(record, 0, "data");
    const char* bad = NULL; // the first key that is wrong
    struct {
        int object;
        const char* key;
        int64_t* value;
    } const counts[] = {
        {0, "step", &state->step},
        {0, "tokens", &state->tokens},
        {0, "seed", &state->seed},
        {schedule, "warmup_tokens", &state->warmup_tokens},
        {schedule, "max_tokens", &state->max_tokens},
        {data, "position", &state->position},
    };
    for (int i = 0; i < 6 && !bad; i++)
        if (!json_int64(record, json_get(record, counts[i].object, counts[i].key), counts[i].value) ||
            *counts[i].value < 0 || *counts[i].value > (int64_t)1 << 60) // room to count on
            bad = counts[i].key;
    if (!bad && !json_double(record, json_get(record, schedule, "lr"), &state->lr)) bad = "lr";
    if (!bad && !json_is(record, json_get(record, 0, "options"), JSON_OBJECT)) bad = "options";
    if (!bad) return true;
    json_free(record);
    return fail(err, "%s: '%s' is missing or not valid", path, bad);
}

#endif // LLMC_CHECKPOINT_H
