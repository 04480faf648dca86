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
#pragma once

#include <dirent.h>
#include <ftw.h>
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

static inline int checkpoint_is_step(const struct dirent* entry) {
    return checkpoint_step(entry->d_name) >= 0;
}

// Lists the steps of the complete checkpoints in OUT, newest first, in *steps, which the caller frees.
// Returns their number: 0 if the folder does not exist, -1 on error, since an unreadable folder is not an
// empty one.
static inline int checkpoint_list(const char* out, int64_t** steps, Error* err) {
    struct dirent** entries;
    int count = 0, found = scandir(out, &entries, checkpoint_is_step, versionsort);
    *steps = NULL;
    if (found < 0 && errno == ENOENT) return 0;
    if (found < 0) {
        fail(err, "%s: cannot read this folder: %s", out, strerror(errno));
        return -1;
    }
    *steps = (int64_t*)xcalloc((size_t)found, sizeof **steps);
    for (int i = found - 1; i >= 0; i--) {
        char path[PATH_LENGTH];
        struct stat st;
        path_join(path, out, entries[i]->d_name);
        if (stat(path, &st) != 0 || S_ISDIR(st.st_mode))
            (*steps)[count++] = checkpoint_step(entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
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

static inline int checkpoint_is_temporary(const struct dirent* entry) {
    const char* prefix = CHECKPOINT_TEMPORARY "step_";
    return strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
}

// For nftw: removes a file or an empty folder; a failure ends the walk. It is only a warning: it costs disk
// space, nothing else.
static inline int checkpoint_remove(const char* path, const struct stat* st, int type, struct FTW* position) {
    (void)st, (void)type, (void)position;
    if (remove(path) == 0 || errno == ENOENT) return 0;
    warn("%s: cannot remove: %s", path, strerror(errno));
    return 1;
}

// Removes everything with a temporary name in OUT. Symbolic links are removed, not followed.
static inline void checkpoint_sweep(const char* out) {
    struct dirent** entries = NULL;
    int count = scandir(out, &entries, checkpoint_is_temporary, NULL);
    for (int i = 0; i < count; i++) {
        char path[PATH_LENGTH];
        path_join(path, out, entries[i]->d_name);
        nftw(path, checkpoint_remove, 16, FTW_DEPTH | FTW_PHYS);
        free(entries[i]);
    }
    free(entries);
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

// The tensors of one file. Their data is in the caller's buffers.
typedef struct {
    SafeTensor* tensors;
    char (*names)[96];
    int count;
} CheckpointFile;

// The weights, or the moments of the trainable tensors.
static inline CheckpointFile checkpoint_file(const ParamTable* table, const CheckpointTensors* t,
                                             bool optimizer) {
    static const char* const prefixes[] = {"", "exp_avg.", "exp_avg_sq."};
    char* const buffers[] = {(char*)t->w, (char*)t->m, (char*)t->v};
    SafetensorsDtype dtype = t->element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    size_t most = 2 * (size_t)table->num_rows;
    CheckpointFile f = {(SafeTensor*)xcalloc(most, sizeof *f.tensors),
                        (char(*)[96])xcalloc(most, sizeof *f.names), 0};
    for (int part = optimizer; part <= 2 * optimizer; part++) {
        for (int r = 0; r < table->num_rows; r++) {
            const Param* p = &table->rows[r];
            if (optimizer && !p->trainable) continue;
            char* name = f.names[f.count];
            snprintf(name, sizeof *f.names, "%s%s", prefixes[part], p->name);
            f.tensors[f.count++] = safetensors_tensor(name, dtype, p->ndim, p->shape,
                                                      buffers[part] + p->offset * t->element_bytes);
        }
    }
    return f;
}

static inline void checkpoint_file_free(CheckpointFile* f) {
    free(f->tensors);
    free(f->names);
}

// Writes model.safetensors or optimizer.safetensors.
static inline bool checkpoint_write_tensors(const char* folder, const ParamTable* table,
                                            const CheckpointTensors* t, bool optimizer, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, optimizer ? "optimizer.safetensors" : "model.safetensors");
    CheckpointFile f = checkpoint_file(table, t, optimizer);
    bool ok = safetensors_write(path, f.tensors, f.count, err);
    checkpoint_file_free(&f);
    return ok;
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
static inline bool checkpoint_check_tensor(const SafeTensor* want, const SafeTensor* have, const char* where,
                                           Error* err) {
    char is[128], should_be[128];
    bool head = strcmp(want->name, "lm_head.weight") == 0;
    if (!have)
        return fail(err, "%s: tensor '%s' is missing%s", where, want->name,
                    head ? "; a head tied to the embedding is not supported" : "");
    if (have->ndim != want->ndim ||
        memcmp(have->shape, want->shape, (size_t)want->ndim * sizeof(int64_t)) != 0)
        return fail(err, "%s: tensor '%s' has shape %s, but %s fits the config", have->path, want->name,
                    checkpoint_shape(is, have->ndim, have->shape),
                    checkpoint_shape(should_be, want->ndim, want->shape));
    if (have->dtype > SAFETENSORS_BF16)
        return fail(err, "%s: tensor '%s' has type %s, not a floating-point type", have->path, want->name,
                    safetensors_dtypes[have->dtype].name);
    return true;
}

// Fails if the files hold a tensor that is not in f. To ignore it would be to load a model other than the one
// that was trained.
static inline bool checkpoint_check_extra(const CheckpointFile* f, const SafetensorsSet* set, Error* err) {
    for (int file = 0; file < set->count; file++) {
        for (int k = 0; k < set->files[file].count; k++) {
            const SafeTensor* have = &set->files[file].tensors[k];
            bool known = false;
            for (int i = 0; !known && i < f->count; i++) known = strcmp(f->names[i], have->name) == 0;
            if (!known)
                return fail(err, "%s: tensor '%.200s' is not part of the model that the config describes",
                            have->path, have->name);
        }
    }
    return true;
}

// Reads the weights or the moments from a folder's files, which must contain exactly these tensors. Where a
// check fails the buffers are unchanged.
static inline bool checkpoint_read_tensors(const char* folder, const ParamTable* table,
                                           const CheckpointTensors* t, bool optimizer, Error* err) {
    SafetensorsSet set;
    if (!safetensors_set_open(&set, folder, optimizer ? "optimizer" : "model", err)) return false;
    const char* where = set.count == 1 ? set.files[0].path : folder;
    CheckpointFile f = checkpoint_file(table, t, optimizer);
    bool ok = true;
    for (int i = 0; ok && i < f.count; i++)
        ok = checkpoint_check_tensor(&f.tensors[i], safetensors_set_find(&set, f.names[i]), where, err);
    ok = ok && checkpoint_check_extra(&f, &set, err);
    for (int i = 0; ok && i < f.count; i++)
        ok = safetensors_read(safetensors_set_find(&set, f.names[i]), (void*)f.tensors[i].data,
                              t->element_bytes, err);
    checkpoint_file_free(&f);
    safetensors_set_close(&set);
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
    char path[PATH_LENGTH], old[PATH_LENGTH];
    checkpoint_path(path, out, step);
    checkpoint_old_path(old, out, step);
    bool done = renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_EXCHANGE) == 0 ||
                rename(temporary, path) == 0; // fails where path is a folder that is not empty
    if (!done) {
        if (!checkpoint_discard(out, step, err)) return false;
        done = rename(temporary, path) == 0;
        if (!done) fail(err, "%s: cannot make: %s", path, strerror(errno));
        if (!done) rename(old, path); // restores the previous folder, if there was one
    }
    return done && flush_folder(out, err);
}

// The name of the first tensor in a buffer of the table's layout with an element that is NaN or infinite;
// NULL if all are finite.
static inline const char* params_first_not_finite(const ParamTable* table, const void* buffer,
                                                  int element_bytes) {
    const float* f32 = (const float*)buffer;
    const double* f64 = (const double*)buffer;
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        bool finite = true;
        for (int64_t i = p->offset; i < p->offset + p->count; i++)
            finite &= (bool)(element_bytes == 8 ? isfinite(f64[i]) : isfinite(f32[i]));
        if (!finite) return p->name;
    }
    return NULL;
}

// Fails unless all numbers are finite: a checkpoint with NaN would replace one that training can resume from.
static inline bool checkpoint_check_finite(const ParamTable* table, const CheckpointTensors* t, Error* err) {
    const char* w = params_first_not_finite(table, t->w, t->element_bytes);
    const char* m = params_first_not_finite(table, t->m, t->element_bytes);
    const char* v = params_first_not_finite(table, t->v, t->element_bytes);
    if (!w && !m && !v) return true;
    return fail(err, "'%s%s' has become infinite or not a number",
                w   ? ""
                : m ? "exp_avg."
                    : "exp_avg_sq.",
                w   ? w
                : m ? m
                    : v);
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
    if (!make_folders(out, err)) return false;
    checkpoint_sweep(out); // frees the space of leftovers first
    checkpoint_join(folder, out, CHECKPOINT_TEMPORARY, r->state->step, "");
    path_join(config_path, folder, "config.json");
    bool ok = make_folders(folder, err) && config_write(r->config, config_path, err) &&
              checkpoint_write_tensors(folder, r->table, t, false, err) &&
              checkpoint_write_tensors(folder, r->table, t, true, err) &&
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
    CheckpointTensors t = {w, NULL, NULL, element_bytes};
    return checkpoint_read_tensors(folder, table, &t, false, err);
}

// Reads AdamW's moments into m and v, each [table->count], where elements of tensors that are not trained
// stay as they are. Where a check of the file fails both are unchanged.
static inline bool checkpoint_load_optimizer(const char* folder, const ParamTable* table, void* m, void* v,
                                             int element_bytes, Error* err) {
    CheckpointTensors t = {NULL, m, v, element_bytes};
    return checkpoint_read_tensors(folder, table, &t, true, err);
}

// Reads an integer of trainer.json. If it is not valid and *bad is NULL, sets *bad to its key.
static inline void checkpoint_read_count(const Json* j, int object, const char* key, int64_t* value,
                                         const char** bad) {
    bool ok = json_int64(j, json_get(j, object, key), value) && *value >= 0 &&
              *value <= (int64_t)1 << 60; // sums must not overflow
    if (!ok && !*bad) *bad = key;
}

// Reads trainer.json: the state, and the whole file as *record, which the caller frees with json_free and
// whose member "options" options_restore reads. On error record is empty and *state undefined.
static inline bool checkpoint_load_state(const char* folder, TrainerState* state, Json* record, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, "trainer.json");
    if (!json_parse_file(record, path, err)) return false;
    int schedule = json_get(record, 0, "schedule"), data = json_get(record, 0, "data");
    const char* bad = NULL; // the first key whose value is not valid
    checkpoint_read_count(record, 0, "step", &state->step, &bad);
    checkpoint_read_count(record, 0, "tokens", &state->tokens, &bad);
    checkpoint_read_count(record, 0, "seed", &state->seed, &bad);
    checkpoint_read_count(record, schedule, "warmup_tokens", &state->warmup_tokens, &bad);
    checkpoint_read_count(record, schedule, "max_tokens", &state->max_tokens, &bad);
    checkpoint_read_count(record, data, "position", &state->position, &bad);
    if (!bad && !json_double(record, json_get(record, schedule, "lr"), &state->lr)) bad = "lr";
    if (!bad && !json_is(record, json_get(record, 0, "options"), JSON_OBJECT)) bad = "options";
    if (!bad) return true;
    json_free(record);
    return fail(err, "%s: '%s' is missing or not valid", path, bad);
}
