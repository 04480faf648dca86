/*
Checkpoints: the state of a run on disk, in folders that are Hugging Face model folders.

    OUT/step_00001000/config.json              the model's sizes and switches
                      model.safetensors        master weights, named and shaped by the parameter table
                      optimizer.safetensors    AdamW's exp_avg.NAME and exp_avg_sq.NAME of trainable tensors
                      trainer.json             step, tokens, schedule, data position and recorded options
    OUT/lock                                   keeps a second process out

Buffers are flat and laid out by the parameter table. Their elements are float or double (element_bytes 4 or
8), and files are written in the same type; reading converts from any floating-point type.

Called by run.h and train.h. A folder with its final name is complete: it is written and flushed under a
temporary name and then renamed, and what it replaces or makes superfluous is removed only afterwards.
Whenever a process crashes, the newest complete checkpoint remains, and the next save removes the leftovers.

A complete folder can still be damaged from outside. Loading therefore checks all names, shapes, types and
file sizes before it writes to the caller's buffers, and after an error the caller tries the next older
checkpoint of checkpoint_list. Values are not checked when loading.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <dirent.h>
#include <sys/syscall.h>
#include "../base/common.h"
#include "../formats/json.h"
#include "../formats/safetensors.h"
#include "../model/config.h"
#include "../model/params.h"
#include "options.h"

#ifndef CODE_VERSION // the Makefile defines it from git
#define CODE_VERSION "unknown"
#endif

typedef struct {
    int64_t step;     // optimizer steps done
    int64_t tokens;   // trained on so far
    int64_t position; // sequences consumed from the training data
    int64_t seed;
    double lr; // peak learning rate of the schedule
    int64_t warmup_tokens, max_tokens;
} TrainerState;

// What a checkpoint records beside the tensors.
typedef struct {
    const Config* config;
    const ParamTable* table;
    const Options* options;
    const TrainerState* state;
} CheckpointRecord;

// Weights and AdamW's first and second moments on the host, each [table.count]. m and v are NULL without
// training.
typedef struct {
    void *w, *m, *v;
    int element_bytes; // 4: float, 8: double
} CheckpointTensors;

// ----------------------------------------------------------------------------
// names of folders

// Before step_ in a name: a checkpoint that is being written, or a leftover that the next save removes.
#define CHECKPOINT_TEMPORARY ".tmp-"

static inline void checkpoint_join(char path[PATH_LENGTH], const char* out, const char* before, int64_t step,
                                   const char* after) {
    char name[64];
    snprintf(name, sizeof name, "%sstep_%08lld%s", before, (long long)step, after);
    path_join(path, out, name);
}

// Path of a step's checkpoint: OUT/step_00001000.
static inline void checkpoint_path(char path[PATH_LENGTH], const char* out, int64_t step) {
    checkpoint_join(path, out, "", step, "");
}

// Path of a checkpoint that is to be removed.
static inline void checkpoint_old_path(char path[PATH_LENGTH], const char* out, int64_t step) {
    checkpoint_join(path, out, CHECKPOINT_TEMPORARY, step, ".old");
}

// The step in a checkpoint folder's name; -1 unless the name is exactly the one that checkpoint_path makes.
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

// Lists the steps of the complete checkpoints in OUT, newest first, in *steps, which the caller frees.
// Returns their number: 0 if the folder does not exist, -1 on error, since an unreadable folder is not an
// empty one.
static inline int checkpoint_list(const char* out, int64_t** steps, Error* err) {
    int count = 0;
    *steps = NULL;
    DIR* folder = opendir(out);
    if (!folder && errno == ENOENT) return 0;
    if (!folder) return checkpoint_list_failed(out, errno, err);
    // errno distinguishes a failed readdir from the end of the folder
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

// Locks OUT against other processes and creates the folder if it does not exist. The lock lasts while *fd is
// open, at most until the process ends.
static inline bool out_lock(const char* out, int* fd, Error* err) {
    char path[PATH_LENGTH];
    if (!make_folders(out, err)) return false;
    path_join(path, out, "lock");
    *fd = lock_file(path);
    if (*fd >= 0) return true;
    if (errno == EWOULDBLOCK)
        return fail(err, "%s: another process is training here; wait for it to end, or choose another --out",
                    out);
    return fail(err, "%s: cannot lock: %s", path, strerror(errno));
}

// ----------------------------------------------------------------------------
// removing

// Removes a file, or a folder with its contents. Symbolic links are removed, not followed.
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

// Removes everything with a temporary name in OUT. A failure is only a warning: it costs disk space, nothing
// else.
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

// Renames a checkpoint to a temporary name, for checkpoint_sweep to remove: a folder that is partly removed
// must not look complete.
static inline bool checkpoint_discard(const char* out, int64_t step, Error* err) {
    char path[PATH_LENGTH], old[PATH_LENGTH];
    checkpoint_path(path, out, step);
    checkpoint_old_path(old, out, step);
    if (rename(path, old) == 0 || errno == ENOENT) return true;
    return fail(err, "%s: cannot rename: %s", path, strerror(errno));
}

// Discards all but the `keep` newest checkpoints up to and including that of `step`. Those of later steps are
// neither counted nor removed: the run found them damaged when it resumed from an earlier step.
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

// Contents of one file: parts, each of all parameters or all trainable ones, with a prefix before their
// names.
typedef struct {
    const ParamTable* table;
    bool trainable_only;
    int element_bytes;
    int num_parts;
    const char* prefixes[2];
    char* buffers[2]; // [table->count] each; not written to when saving
} CheckpointFile;

typedef struct {
    char name[96];
    int ndim;
    int64_t shape[3];
    char* data; // in the part's buffer
    size_t bytes;
} CheckpointTensor;

static inline CheckpointFile checkpoint_weights(const ParamTable* table, const CheckpointTensors* t) {
    CheckpointFile f = {table, false, t->element_bytes, 1, {"", NULL}, {(char*)t->w, NULL}};
    return f;
}

static inline CheckpointFile checkpoint_optimizer(const ParamTable* table, const CheckpointTensors* t) {
    CheckpointFile f = {
        table, true, t->element_bytes, 2, {"exp_avg.", "exp_avg_sq."}, {(char*)t->m, (char*)t->v}};
    return f;
}

// Iterates over the file's tensors: for (int i = 0; checkpoint_next(&f, &i, &t);)
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
    safetensors_writer_open(&w, path, err); // errors of all calls are reported by close
    safetensors_writer_metadata(&w, "format", "pt");
    for (int i = 0; checkpoint_next(f, &i, &t);)
        safetensors_writer_declare(&w, t.name, dtype, t.ndim, t.shape);
    bool ok = safetensors_writer_begin(&w, err);
    for (int i = 0; ok && checkpoint_next(f, &i, &t);)
        ok = safetensors_writer_write(&w, t.data, t.bytes, err);
    return safetensors_writer_close(&w, err);
}

// Formats a shape: [257, 64].
static inline const char* checkpoint_shape(char text[128], int ndim, const int64_t* shape) {
    int n = snprintf(text, 128, "[");
    for (int i = 0; i < ndim && n < 100; i++)
        n += snprintf(text + n, (size_t)(128 - n), "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(text + n, (size_t)(128 - n), "]");
    return text;
}

// Checks the name, shape and type of a tensor. have: NULL if the file does not contain it.
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

// Fails, naming a tensor of the set that is not in f; the caller knows that there is one. To ignore it would
// be to load a model other than the one that was trained.
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

// Reads all tensors of f from the open files, which must contain exactly these. Where the check fails the
// buffers are unchanged.
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

// Renames the temporary folder to its final name. An existing folder of that name is replaced: atomically
// where the file system supports it (most except NFS), otherwise in two renames, between which a crash leaves
// the older checkpoints.
static inline bool checkpoint_publish(const char* out, const char* temporary, int64_t step, Error* err) {
    const unsigned exchange = 2; // RENAME_EXCHANGE, which the C library's headers may not define
    char path[PATH_LENGTH], old[PATH_LENGTH];
    checkpoint_path(path, out, step);
    checkpoint_old_path(old, out, step);
    bool done = syscall(SYS_renameat2, AT_FDCWD, temporary, AT_FDCWD, path, exchange) == 0 ||
                rename(temporary, path) == 0; // fails where path is a folder that is not empty
    if (!done) {
        if (!checkpoint_discard(out, step, err)) return false;
        done = rename(temporary, path) == 0;
        if (!done) fail(err, "%s: cannot make: %s", path, strerror(errno));
        if (!done) rename(old, path); // restores the previous folder, if there was one
    }
    return done && flush_folder(out, err);
}

// Are all `bytes` of an array of floats or doubles finite numbers?
static inline bool checkpoint_finite(const void* data, size_t bytes, int element_bytes) {
    bool finite = true;
    for (size_t i = 0; element_bytes == 4 && i < bytes / 4; i++)
        finite &= (bool)isfinite(((const float*)data)[i]);
    for (size_t i = 0; element_bytes == 8 && i < bytes / 8; i++)
        finite &= (bool)isfinite(((const double*)data)[i]);
    return finite;
}

// The name of the first tensor in a buffer of the table's layout with an element that is NaN or infinite;
// NULL if all are finite.
static inline const char* params_first_not_finite(const ParamTable* table, const void* buffer,
                                                  int element_bytes) {
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        const char* data = (const char*)buffer + p->offset * element_bytes;
        if (!checkpoint_finite(data, (size_t)(p->count * element_bytes), element_bytes)) return p->name;
    }
    return NULL;
}

static inline bool checkpoint_file_is_finite(const CheckpointFile* f, Error* err) {
    CheckpointTensor t;
    for (int i = 0; checkpoint_next(f, &i, &t);)
        if (!checkpoint_finite(t.data, t.bytes, f->element_bytes))
            return fail(err, "'%s' has become infinite or not a number", t.name);
    return true;
}

// Fails unless all numbers are finite: a checkpoint with NaN would replace one that training can resume from.
static inline bool checkpoint_check_finite(const ParamTable* table, const CheckpointTensors* t, Error* err) {
    CheckpointFile weights = checkpoint_weights(table, t), optimizer = checkpoint_optimizer(table, t);
    return checkpoint_file_is_finite(&weights, err) && checkpoint_file_is_finite(&optimizer, err);
}

// Saves a checkpoint as OUT/step_N, N = state->step, then removes older ones beyond the `keep` newest (0:
// keeps all). An existing checkpoint of the same step is replaced, as after a run resumed from an older one
// because it was damaged. The caller holds out_lock.
//
// On error the older checkpoints are unchanged, the temporary folder is removed, and the new checkpoint may
// be missing.
static inline bool checkpoint_save(const char* out, const CheckpointRecord* r, const CheckpointTensors* t,
                                   int keep, Error* err) {
    char folder[PATH_LENGTH], config_path[PATH_LENGTH];
    CheckpointFile weights = checkpoint_weights(r->table, t), optimizer = checkpoint_optimizer(r->table, t);
    if (!make_folders(out, err)) return false;
    checkpoint_sweep(out); // frees the space of leftovers first
    checkpoint_join(folder, out, CHECKPOINT_TEMPORARY, r->state->step, "");
    path_join(config_path, folder, "config.json");
    bool ok = make_folders(folder, err) && config_write(r->config, config_path, err) &&
              checkpoint_write_tensors(&weights, folder, "model.safetensors", err) &&
              checkpoint_write_tensors(&optimizer, folder, "optimizer.safetensors", err) &&
              checkpoint_write_trainer(folder, r->state, r->options, t->element_bytes, err) &&
              flush_folder(folder, err) && checkpoint_publish(out, folder, r->state->step, err);
    if (ok && keep > 0) checkpoint_prune(out, r->state->step, keep);
    checkpoint_sweep(out);
    return ok;
}

// ----------------------------------------------------------------------------
// loading. config_read reads config.json.

// Reads the weights of a checkpoint or Hugging Face folder, of one file or several, into w [table->count].
// The files must contain all tensors of the table, with its shapes, and no others; otherwise w is unchanged.
static inline bool checkpoint_load_weights(const char* folder, const ParamTable* table, void* w,
                                           int element_bytes, Error* err) {
    SafetensorsSet set;
    CheckpointTensors t = {w, NULL, NULL, element_bytes};
    CheckpointFile f = checkpoint_weights(table, &t);
    if (!safetensors_set_open(&set, folder, err)) return false;
    bool ok = checkpoint_read_tensors(&f, &set, set.count == 1 ? set.files[0].path : folder, err);
    safetensors_set_close(&set);
    return ok;
}

// Reads AdamW's moments into m and v, each [table->count], where elements of tensors that are not trained
// stay as they are. Where a check of the file fails both are unchanged.
static inline bool checkpoint_load_optimizer(const char* folder, const ParamTable* table, void* m, void* v,
                                             int element_bytes, Error* err) {
    char path[PATH_LENGTH];
    Safetensors file;
    CheckpointTensors t = {NULL, m, v, element_bytes};
    CheckpointFile f = checkpoint_optimizer(table, &t);
    path_join(path, folder, "optimizer.safetensors");
    if (!safetensors_open(&file, path, err)) return false;
    SafetensorsSet set = {&file, 1};
    bool ok = checkpoint_read_tensors(&f, &set, path, err);
    safetensors_close(&file);
    return ok;
}

// Reads trainer.json: the state, and the whole file as *record, which the caller frees with json_free and
// whose member "options" options_restore reads. On error record is empty and *state undefined.
static inline bool checkpoint_load_state(const char* folder, TrainerState* state, Json* record, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, "trainer.json");
    if (!json_parse_file(record, path, err)) return false;
    int schedule = json_get(record, 0, "schedule"), data = json_get(record, 0, "data");
    const char* bad = NULL; // the first key whose value is not valid
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
            *counts[i].value < 0 || *counts[i].value > (int64_t)1 << 60) // sums must not overflow
            bad = counts[i].key;
    if (!bad && !json_double(record, json_get(record, schedule, "lr"), &state->lr)) bad = "lr";
    if (!bad && !json_is(record, json_get(record, 0, "options"), JSON_OBJECT)) bad = "options";
    if (!bad) return true;
    json_free(record);
    return fail(err, "%s: '%s' is missing or not valid", path, bad);
}

#endif // LLMC_CHECKPOINT_H
