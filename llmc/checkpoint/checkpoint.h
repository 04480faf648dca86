/*
Checkpoints: the state of a run on disk, in folders that are Hugging Face model folders.

    OUT/step_00001000/config.json              the model's sizes and switches
                      model.safetensors        master weights, named and shaped by the parameter table
                      optimizer.safetensors    AdamW's exp_avg.NAME and exp_avg_sq.NAME of trainable tensors
                      trainer.json             step, tokens, schedule, data position, options, checksums
                      ...                      what transformers needs besides (llmc/checkpoint/hf/folder.h)
    OUT/lock                                   keeps a second process out (out_lock)

Several ranks write one checkpoint: rank 0 creates the folder and the files at their full size, every rank
writes its own ranges of the files (tensors.h), and rank 0 adds trainer.json and the final name.
The files are the same, byte for byte, for any number of ranks. saver.h calls these steps from a thread of
each rank.

    rank 0        checkpoint_create                            checkpoint_finish
    every rank                        checkpoint_write_shard

A folder with its final name is complete: it is written and flushed under a temporary name by all ranks and
then renamed, and what it replaces or makes superfluous is removed only afterwards. Whenever a process
crashes, the newest complete checkpoint remains, and the next save removes the leftovers.

A complete folder can still be damaged from outside. Checksums in trainer.json cover these four files, itself
included: checkpoint_parse_state, _check_config and _verify compare them, so that any flipped bit is found.
Loading checks all names, shapes, types and file sizes before it writes to the caller's buffers, and then that
all numbers are finite. After an error the caller tries the next older checkpoint of checkpoint_list.
*/
#pragma once

#include <dirent.h>
#include <ftw.h>
#include "../formats/json.h"
#include "hf/folder.h"
#include "../model/config.h"
#include "tensors.h"
#include "../run/command/options.h"

typedef struct {
    int64_t step;         // optimizer steps done
    int64_t tokens;       // trained on so far
    int64_t position;     // sequences consumed from the training data
    int64_t sequences;    // in an epoch of the training data; 0: not recorded
    uint64_t fingerprint; // of the training data (tokens/fingerprint.h); 0: not recorded
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
    const HfTokenizer* tokenizer; // NULL: not known
} CheckpointRecord;

// What the files for transformers say of a run, at a number of tokens.
static inline HfRun checkpoint_hf_run(const Options* o, int64_t tokens) {
    HfRun run = {o->model, o->init, o->data, CODE_VERSION, o->seq_len, o->seed, tokens, o->json_escape};
    return run;
}

// Fails where trainer.json cannot record an option as it is: JSON must be UTF-8, which a path need not be. A
// resumed run would look for another file.
static inline bool checkpoint_check_options(const Options* o, Error* err) {
    for (const CliRow* row = option_rows; row < option_rows + NUM_OPTION_ROWS; row++) {
        const void* field = (const char*)o + row->offset;
        const CliList* list = (const CliList*)field;
        const int count = row->type == CLI_LIST ? list->count : row->type == CLI_TEXT;
        for (int i = 0; i < count && option_recorded(row); i++) {
            const char* text = row->type == CLI_LIST ? list->items[i] : *(const char* const*)field;
            size_t length;
            for (size_t n = text ? strlen(text) : 0; n > 0; text += length, n -= length)
                if (utf8_decode((const uint8_t*)text, n, &length) == UTF8_INVALID)
                    return fail(err, "--%s: is not valid UTF-8, which trainer.json needs to record it",
                                row->name);
        }
    }
    return true;
}

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
// open, at most until the process ends; out_lock_held says whether it still protects OUT. Fails also where
// OUT is too long a name for the files of a save, so that this is known before training.
static inline bool out_lock(const char* out, int* fd, Error* err) {
    char path[PATH_LENGTH], longest[96];
    const int n = snprintf(longest, sizeof longest, "/" CHECKPOINT_TEMPORARY "step_%lld/%s",
                           (long long)INT64_MAX, "optimizer.safetensors");
    if (strlen(out) + (size_t)n >= PATH_LENGTH)
        return fail(err, "--out %.100s...: too long: names of checkpoints in it would exceed %d bytes", out,
                    PATH_LENGTH - 1);
    if (!make_folders(out, err)) return false;
    path_join(path, out, "lock");
    *fd = lock_file(path);
    if (*fd >= 0 && file_is_at(*fd, path)) return true;
    if (*fd >= 0) {
        close(*fd);
        return fail(err, "%s: was removed or replaced while this run locked it; start the run again", path);
    }
    if (errno == EWOULDBLOCK)
        return fail(err, "%s: another process is training here; wait for it to end, or choose another --out",
                    out);
    return fail(err, "%s: cannot lock: %s", path, strerror(errno));
}

// Is OUT still the folder that was locked? fd: of OUT/lock, opened then; -1: not known, which counts as yes.
// A folder that is moved takes its lock along, and another run may make a new one in its place. So each rank
// asks before it writes, renames or deletes anything by a name in OUT.
static inline bool out_lock_held(const char* out, int fd, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, out, "lock");
    if (fd < 0 || file_is_at(fd, path)) return true;
    return fail(err,
                "--out %s: is no longer the folder of this run, which was moved or removed, or lost its lock "
                "file; nothing more is written there; continue with --resume and the --out that has its "
                "checkpoints now",
                out);
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
// saving

// A checkpoint that is being written under its temporary name.
typedef struct {
    char out[PATH_LENGTH], folder[PATH_LENGTH]; // OUT, and the temporary folder in it
    int lock;                                   // for out_lock_held; -1 unless the caller sets it
    int64_t step;
    const ParamTable* table;
    struct {
        CheckpointFile tensors;
        char path[PATH_LENGTH];
        char* header; // the file's first header_bytes bytes
        size_t header_bytes;
        int64_t bytes;    // of the whole file
        uint64_t* blocks; // checksums of its blocks [num_blocks], of what this process has written so far
        int64_t num_blocks;
    } files[CHECKPOINT_FILES];
    uint64_t* sums; // [num_sums]: the blocks of all files
    int64_t num_sums;
    JsonWriter trainer; // trainer.json without its end, from checkpoint_create on
    bool published;     // the folder has its final name
} CheckpointWriter;

// Frees the layout, whose files stay. May be called on one that is zero.
static inline void checkpoint_writer_close(CheckpointWriter* w) {
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        checkpoint_file_free(&w->files[f].tensors);
        free(w->files[f].header);
    }
    free(w->sums);
    json_writer_free(&w->trainer);
    memset(w, 0, sizeof *w);
}

// Removes everything with a temporary name in OUT, if that is still the run's.
static inline void checkpoint_writer_sweep(const CheckpointWriter* w) {
    Error ignored;
    if (out_lock_held(w->out, w->lock, &ignored)) checkpoint_sweep(w->out);
}

// Computes the layout of the files of a step's checkpoint in OUT, on every rank. Touches no file. On error
// there is nothing to close.
static inline bool checkpoint_writer_open(CheckpointWriter* w, const char* out, int64_t step,
                                          const ParamTable* table, int element_bytes, Error* err) {
    bool ok = true;
    memset(w, 0, sizeof *w);
    snprintf(w->out, sizeof w->out, "%s", out);
    checkpoint_join(w->folder, out, CHECKPOINT_TEMPORARY, step, "");
    w->lock = -1;
    w->step = step;
    w->table = table;
    w->trainer = json_writer(2);
    for (int f = 0; ok && f < CHECKPOINT_FILES; f++) {
        char name[64];
        CheckpointFile* file = &w->files[f].tensors;
        snprintf(name, sizeof name, "%s.safetensors", checkpoint_file_names[f]);
        path_join(w->files[f].path, w->folder, name);
        *file = checkpoint_file(table, f, element_bytes);
        w->files[f].header =
            safetensors_header(w->files[f].path, file->tensors, file->count, &w->files[f].header_bytes, err);
        ok = w->files[f].header != NULL;
        w->files[f].bytes = (int64_t)w->files[f].header_bytes;
        for (int i = 0; i < file->count; i++) w->files[f].bytes += (int64_t)file->tensors[i].bytes;
        w->files[f].num_blocks = checksum_blocks(w->files[f].bytes, CHECKSUM_BLOCK_BYTES);
        w->num_sums += w->files[f].num_blocks;
    }
    w->sums = (uint64_t*)xcalloc((size_t)w->num_sums, sizeof *w->sums);
    uint64_t* sums = w->sums;
    for (int f = 0; f < CHECKPOINT_FILES; sums += w->files[f++].num_blocks) w->files[f].blocks = sums;
    if (!ok) checkpoint_writer_close(w);
    return ok;
}

// Composes trainer.json but for the checksums.
static inline void checkpoint_put_trainer(JsonWriter* w, const CheckpointRecord* r, int element_bytes) {
    const TrainerState* s = r->state;
    char hex[17];
    json_begin_object(w, NULL);
    json_put_int(w, "step", s->step);
    json_put_int(w, "tokens", s->tokens);
    json_put_int(w, "seed", s->seed);
    json_begin_object(w, "schedule");
    json_put_double(w, "lr", s->lr);
    json_put_int(w, "warmup_tokens", s->warmup_tokens);
    json_put_int(w, "max_tokens", s->max_tokens);
    json_end(w);
    json_begin_object(w, "data");
    json_put_int(w, "position", s->position);
    if (s->sequences) json_put_int(w, "sequences", s->sequences);
    if (s->fingerprint) json_put_string(w, "fingerprint", hex64(hex, s->fingerprint));
    json_end(w);
    json_put_string(w, "precision", element_bytes == 8 ? "float64" : "float32");
    json_put_string(w, "code_version", CODE_VERSION);
    if (r->config->mixer == MIXER_ATTENTION && r->config->fgate_type == GATE_FULL)
        config_put_initialization(r->config, w, "initialization");
    options_put(r->options, w, "options");
}

// Writes data[bytes] at an offset of an open file.
static inline bool checkpoint_write_at(int fd, const char* path, const void* data, size_t bytes,
                                       int64_t offset, Error* err) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pwrite(fd, (const char*)data + done, bytes - done, (off_t)(offset + (int64_t)done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail(err, "%s: cannot write: %s", path, strerror(n < 0 ? errno : ENOSPC));
        done += (size_t)n;
    }
    return true;
}

// Flushes a file to the disk and closes it. `ok` is false if an earlier error has been reported.
static inline bool checkpoint_close_file(int fd, const char* path, bool ok, Error* err) {
    bool flushed = !ok || fsync(fd) == 0;
    int why = errno;
    if (close(fd) != 0 && flushed) flushed = false, why = errno;
    if (ok && !flushed) return fail(err, "%s: cannot write: %s", path, strerror(why));
    return ok;
}

// Creates a file at its full size with its header. The space is reserved where the file system can, so that a
// full disk is noticed before the tensors are written.
static inline bool checkpoint_create_file(CheckpointWriter* w, int file, Error* err) {
    const char *path = w->files[file].path, *header = w->files[file].header;
    const size_t header_bytes = w->files[file].header_bytes;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), rc = 0;
    if (fd < 0) return fail(err, "%s: cannot create: %s", path, strerror(errno));
    do rc = fallocate(fd, 0, 0, (off_t)w->files[file].bytes);
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) rc = ftruncate(fd, (off_t)w->files[file].bytes);
    bool ok = rc == 0 || fail(err, "%s: cannot write: %s", path, strerror(errno));
    ok = ok && checkpoint_write_at(fd, path, header, header_bytes, 0, err);
    checksum_add(w->files[file].blocks, header, header_bytes, 0);
    return checkpoint_close_file(fd, path, ok, err);
}

// Rank 0, first step of a save: removes leftovers, makes the temporary folder with config.json, the files of
// hf/ and both files of tensors at their full size, and composes trainer.json. On error the folder is
// removed.
static inline bool checkpoint_create(CheckpointWriter* w, const CheckpointRecord* r, Error* err) {
    char config_path[PATH_LENGTH];
    const HfRun run = checkpoint_hf_run(r->options, r->state->tokens);
    if (!out_lock_held(w->out, w->lock, err) || !make_folders(w->out, err)) return false;
    checkpoint_sweep(w->out); // frees the space of leftovers first
    path_join(config_path, w->folder, "config.json");
    bool ok = make_folders(w->folder, err) && config_write(r->config, config_path, err) &&
              hf_folder_write(w->folder, r->config, r->table, &run, r->tokenizer, err);
    for (int f = 0; ok && f < CHECKPOINT_FILES; f++) ok = checkpoint_create_file(w, f, err);
    if (ok) checkpoint_put_trainer(&w->trainer, r, w->files[0].tensors.element_bytes);
    if (!ok) checkpoint_writer_sweep(w);
    return ok;
}

// Receives the pieces of a shard in the order of the files: data[bytes] at `offset` of file number `file`.
typedef bool (*CheckpointPut)(void* to, int file, const void* data, size_t bytes, int64_t offset, Error* err);

// Calls put(to, ...) for all of a rank's numbers, at most CHECKPOINT_PIECE_BYTES at a time, until it fails.
static inline bool checkpoint_put_shard(const CheckpointWriter* w, const Shard* shard,
                                        const CheckpointTensors* t, World* world, CheckpointPut put, void* to,
                                        Error* err) {
    CheckpointProgress progress = {world, 0};
    const int size = t->element_bytes;
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        const CheckpointFile* file = &w->files[f].tensors;
        for (int i = 0; i < file->count; i++) {
            char* data;
            const TensorRange range = checkpoint_range(file, i, shard, t, &data);
            int64_t n, begin = (int64_t)(w->files[f].header_bytes + file->tensors[i].begin);
            for (int64_t at = 0; (n = checkpoint_next_piece(&range, at, size)) > 0; at += n) {
                if (!put(to, f, data + at * size, (size_t)(n * size), begin + (range.first + at) * size, err))
                    return false;
                checkpoint_progress(&progress, n * size);
            }
        }
    }
    return true;
}

// Where checkpoint_write_piece writes. Begins with checkpoint_open_files.
typedef struct {
    CheckpointWriter* writer;
    int fds[CHECKPOINT_FILES];
    int64_t unflushed; // bytes
} CheckpointOutput;

// Opens both files for writing. O_WRONLY matters: on NFS, writers of neighbouring ranges of one page then
// send their own bytes only. On error nothing is open.
static inline bool checkpoint_open_files(CheckpointOutput* o, CheckpointWriter* w, Error* err) {
    o->writer = w;
    o->unflushed = 0;
    if (!out_lock_held(w->out, w->lock, err)) return false;
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        o->fds[f] = open(w->files[f].path, O_WRONLY | O_CLOEXEC);
        if (o->fds[f] >= 0) continue;
        fail(err, "%s: cannot open: %s", w->files[f].path, strerror(errno));
        while (f-- > 0) close(o->fds[f]);
        return false;
    }
    return true;
}

// Flushes and closes both files. `ok` is false if an earlier error has been reported.
static inline bool checkpoint_close_files(CheckpointOutput* o, bool ok, Error* err) {
    for (int f = 0; f < CHECKPOINT_FILES; f++)
        ok = checkpoint_close_file(o->fds[f], o->writer->files[f].path, ok, err);
    return ok;
}

// A CheckpointPut: adds a piece to the checksums and writes it. Flushes every CHECKPOINT_PROGRESS_BYTES, so
// that a slow disk delays the next call of watch_alive only by that much, and not by a whole file.
static inline bool checkpoint_write_piece(void* to, int file, const void* data, size_t bytes, int64_t offset,
                                          Error* err) {
    CheckpointOutput* o = (CheckpointOutput*)to;
    const char* path = o->writer->files[file].path;
    checksum_add(o->writer->files[file].blocks, data, bytes, offset);
    if (!checkpoint_write_at(o->fds[file], path, data, bytes, offset, err)) return false;
    o->unflushed += (int64_t)bytes;
    if (o->unflushed < CHECKPOINT_PROGRESS_BYTES) return true;
    o->unflushed = 0;
    return fdatasync(o->fds[file]) == 0 || fail(err, "%s: cannot write: %s", path, strerror(errno));
}

// Every rank, after checkpoint_create: writes a rank's numbers through to the disk, into the existing files,
// and adds them to the writer's checksums. world may be NULL.
static inline bool checkpoint_write_shard(CheckpointWriter* w, const Shard* shard, const CheckpointTensors* t,
                                          World* world, Error* err) {
    CheckpointOutput o;
    assert(t->w && t->m && t->v);
    if (!checkpoint_open_files(&o, w, err)) return false;
    bool ok = checkpoint_put_shard(w, shard, t, world, checkpoint_write_piece, &o, err);
    return checkpoint_close_files(&o, ok, err);
}

// Adds the checksums and saves trainer.json.
static inline bool checkpoint_write_trainer(CheckpointWriter* w, Error* err) {
    char path[PATH_LENGTH], hex[17];
    size_t bytes;
    path_join(path, w->folder, "config.json");
    char* config = read_file(path, &bytes, err);
    if (!config) return false;
    json_begin_object(&w->trainer, "checksums");
    json_put_int(&w->trainer, "block_bytes", CHECKSUM_BLOCK_BYTES);
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        json_begin_array(&w->trainer, strrchr(w->files[f].path, '/') + 1);
        for (int64_t i = 0; i < w->files[f].num_blocks; i++)
            json_put_string(&w->trainer, NULL, hex64(hex, w->files[f].blocks[i]));
        json_end(&w->trainer);
    }
    json_put_string(&w->trainer, "config.json", hex64(hex, checksum(config, bytes, 0)));
    free(config);
    hex64(hex, checksum(w->trainer.text, w->trainer.length, 0));
    json_put_string(&w->trainer, "trainer.json", hex); // ends as CHECKPOINT_RECORD_END
    json_end(&w->trainer);
    json_end(&w->trainer);
    path_join(path, w->folder, "trainer.json");
    return json_writer_save(&w->trainer, path, err);
}

// Renames the temporary folder to its final name and sets w->published. An existing folder of that name is
// replaced: atomically where the file system supports it (most except NFS), otherwise in two renames, between
// which a crash leaves the older checkpoints.
static inline bool checkpoint_publish(CheckpointWriter* w, Error* err) {
    char path[PATH_LENGTH], old[PATH_LENGTH];
    checkpoint_path(path, w->out, w->step);
    checkpoint_old_path(old, w->out, w->step);
    w->published = renameat2(AT_FDCWD, w->folder, AT_FDCWD, path, RENAME_EXCHANGE) == 0 ||
                   rename(w->folder, path) == 0; // fails where path is a folder that is not empty
    if (!w->published) {
        if (!checkpoint_discard(w->out, w->step, err)) return false;
        w->published = rename(w->folder, path) == 0;
        if (!w->published) fail(err, "%s: cannot make: %s", path, strerror(errno));
        if (!w->published) rename(old, path); // restores the previous folder, if there was one
    }
    return w->published && flush_folder(w->out, err);
}

// Rank 0, last step of a save, when all ranks have written and w->sums are the sums over all: adds
// trainer.json and gives the folder its final name OUT/step_N, then removes older checkpoints beyond the
// `keep` newest (0: keeps all). An existing checkpoint of the same step is replaced, as after a run resumed
// from an older one because it was damaged. The caller holds out_lock.
//
// On error the older checkpoints are unchanged. Unless w->published the new one is missing and the temporary
// folder removed, if OUT is still the run's; with w->published it is there, but may be lost in a power
// failure, and nothing is removed.
static inline bool checkpoint_finish(CheckpointWriter* w, int keep, Error* err) {
    bool ok = out_lock_held(w->out, w->lock, err) && checkpoint_write_trainer(w, err) &&
              flush_folder(w->folder, err) && out_lock_held(w->out, w->lock, err) &&
              checkpoint_publish(w, err) && out_lock_held(w->out, w->lock, err);
    if (ok && keep > 0) checkpoint_prune(w->out, w->step, keep);
    if (ok || !w->published) checkpoint_writer_sweep(w);
    return ok;
}

// ----------------------------------------------------------------------------
// trainer.json. config_read reads config.json, checkpoint_load_weights and _optimizer the tensors.

// Reads an integer of trainer.json. If it is not valid and *bad is NULL, sets *bad to its key.
static inline void checkpoint_read_count(const Json* j, int object, const char* key, int64_t* value,
                                         const char** bad) {
    bool ok = json_int64(j, json_get(j, object, key), value) && *value >= 0 &&
              *value <= (int64_t)1 << 60; // sums must not overflow
    if (!ok && !*bad) *bad = key;
}

// Reads an integer that older versions did not record: 0.
static inline void checkpoint_read_new_count(const Json* j, int object, const char* key, int64_t* value,
                                             const char** bad) {
    *value = 0;
    if (json_get(j, object, key) >= 0) checkpoint_read_count(j, object, key, value, bad);
}

// Parses the text of a trainer.json, whose path messages name: the state, and all of it as *record, which the
// caller frees with json_free and whose member "options" options_restore reads. Fails also where the text
// does not match its checksum. On error record is empty and *state undefined.
static inline bool checkpoint_parse_state(const char* path, const char* text, size_t bytes,
                                          TrainerState* state, Json* record, Error* err) {
    if (!json_parse(record, path, text, bytes, err)) return false;
    int schedule = json_get(record, 0, "schedule"), data = json_get(record, 0, "data");
    int fingerprint = json_get(record, data, "fingerprint");
    const char* bad = NULL; // the first key whose value is not valid
    checkpoint_read_count(record, 0, "step", &state->step, &bad);
    checkpoint_read_count(record, 0, "tokens", &state->tokens, &bad);
    checkpoint_read_count(record, schedule, "warmup_tokens", &state->warmup_tokens, &bad);
    checkpoint_read_count(record, schedule, "max_tokens", &state->max_tokens, &bad);
    checkpoint_read_count(record, data, "position", &state->position, &bad);
    checkpoint_read_new_count(record, data, "sequences", &state->sequences, &bad);
    if (!bad && (!json_int64(record, json_get(record, 0, "seed"), &state->seed) || state->seed < 0))
        bad = "seed";
    state->fingerprint = 0;
    if (!bad && fingerprint >= 0 && !hex64_parse(json_string(record, fingerprint), &state->fingerprint))
        bad = "fingerprint";
    if (!bad && !json_double(record, json_get(record, schedule, "lr"), &state->lr)) bad = "lr";
    if (!bad && !json_is(record, json_get(record, 0, "options"), JSON_OBJECT)) bad = "options";
    if (!bad && checkpoint_check_record(path, text, bytes, err)) return true;
    json_free(record);
    return bad ? fail(err, "%s: '%s' is missing or not valid", path, bad) : false;
}

// Reads FOLDER/trainer.json, as checkpoint_parse_state.
static inline bool checkpoint_load_state(const char* folder, TrainerState* state, Json* record, Error* err) {
    char path[PATH_LENGTH];
    size_t bytes;
    memset(record, 0, sizeof *record);
    path_join(path, folder, "trainer.json");
    char* text = read_file(path, &bytes, err);
    bool ok = text && checkpoint_parse_state(path, text, bytes, state, record, err);
    free(text);
    return ok;
}
