/*
Writing a checkpoint, step by step. Rank 0 creates the folder and the files at their full size, every rank
writes its own ranges of the files, and rank 0 adds trainer.json and the final name:

    rank 0        checkpoint_create                            checkpoint_finish
    every rank                        checkpoint_write_shard

The folder has its temporary name until the end (out.h). Its files are flushed before it is renamed, and
what it replaces or makes superfluous is removed only afterwards. Each step first asks whether OUT is still
the folder of this run.

Called by saver.h, in a thread of each rank, and by send.h for ranks that do not see OUT.
*/
#pragma once

#include "../config/config_file.h"
#include "format.h"
#include "hf/folder.h"
#include "out.h"
#include "record.h"

// What a checkpoint records beside the tensors.
typedef struct {
    const Config* config;
    const ParamTable* table;
    const TrainerState* state;
    HfRun run;
    const HfTokenizer* tokenizer; // NULL: not known
    const char* options;          // of the run, as JSON: trainer.json has them under this name
    const char* recipe;           // and what of it is changed; NULL: none
    const char* fp8;              // of scales, as in llmc/model/fp8.h; NULL: none
} CheckpointRecord;

// ----------------------------------------------------------------------------
// the files that are being written

// A file of tensors that is being written.
typedef struct {
    CheckpointFile tensors;
    char path[PATH_LENGTH];
    char* header; // the file's first bytes
    int64_t header_bytes;
    int64_t bytes;    // of the whole file
    uint64_t* blocks; // checksums of its blocks [num_blocks], of what this process has written so far
    int64_t num_blocks;
    int fd; // from checkpoint_open_files to checkpoint_close_files
} WriterFile;

// A checkpoint that is being written under its temporary name.
typedef struct {
    char out[PATH_LENGTH], folder[PATH_LENGTH]; // OUT, and the temporary folder in it
    int lock;                                   // for out_lock_held; -1 unless the caller sets it
    int64_t step;
    WriterFile files[CHECKPOINT_FILES];
    uint64_t* sums; // [num_sums]: the blocks of all files
    int64_t num_sums;
    int64_t unflushed;  // bytes of the open files
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

// Computes the layout of a file. On error there is nothing to free but its tensors.
static inline bool checkpoint_writer_file(WriterFile* f, const char* folder, int file,
                                          const ParamTable* table, int element_bytes, Error* err) {
    char name[64];
    size_t header_bytes = 0;
    snprintf(name, sizeof name, "%s.safetensors", checkpoint_file_names[file]);
    path_join(f->path, folder, name);
    f->tensors = checkpoint_file(table, file, element_bytes);
    f->header = safetensors_header(f->path, f->tensors.tensors, f->tensors.count, NULL, &header_bytes, err);
    f->bytes = f->header_bytes = (int64_t)header_bytes;
    for (int i = 0; i < f->tensors.count; i++) f->bytes += (int64_t)f->tensors.tensors[i].bytes;
    f->num_blocks = checksum_blocks(f->bytes, CHECKSUM_BLOCK_BYTES);
    return f->header != NULL;
}

// Computes the layout of the files of a step's checkpoint in OUT, on every rank. Touches no file. On error
// there is nothing to close.
static inline bool checkpoint_writer_open(CheckpointWriter* w, const char* out, int64_t step,
                                          const ParamTable* table, int element_bytes, Error* err) {
    memset(w, 0, sizeof *w);
    snprintf(w->out, sizeof w->out, "%s", out);
    checkpoint_join(w->folder, out, CHECKPOINT_TEMPORARY, step, "");
    w->lock = -1;
    w->step = step;
    w->trainer = json_writer(2);
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        if (!checkpoint_writer_file(&w->files[f], w->folder, f, table, element_bytes, err)) {
            checkpoint_writer_close(w);
            return false;
        }
        w->num_sums += w->files[f].num_blocks;
    }
    w->sums = (uint64_t*)xcalloc((size_t)w->num_sums, sizeof *w->sums);
    w->files[0].blocks = w->sums;
    for (int f = 1; f < CHECKPOINT_FILES; f++)
        w->files[f].blocks = w->files[f - 1].blocks + w->files[f - 1].num_blocks;
    return true;
}

// ----------------------------------------------------------------------------
// first step, of rank 0: the folder and its small files

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
    int why = ok && fsync(fd) != 0 ? errno : 0;
    if (close(fd) != 0 && why == 0) why = errno;
    if (ok && why != 0) return fail(err, "%s: cannot write: %s", path, strerror(why));
    return ok;
}

// Creates a file at its full size with its header. The space is reserved where the file system can, so that a
// full disk is noticed before the tensors are written.
static inline bool checkpoint_create_file(WriterFile* f, Error* err) {
    int fd = open(f->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), rc = 0;
    if (fd < 0) return fail(err, "%s: cannot create: %s", f->path, strerror(errno));
    do rc = fallocate(fd, 0, 0, (off_t)f->bytes);
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) rc = ftruncate(fd, (off_t)f->bytes);
    bool ok = rc == 0 || fail(err, "%s: cannot write: %s", f->path, strerror(errno));
    ok = ok && checkpoint_write_at(fd, f->path, f->header, (size_t)f->header_bytes, 0, err);
    checksum_add(f->blocks, f->header, (size_t)f->header_bytes, 0);
    return checkpoint_close_file(fd, f->path, ok, err);
}

// Composes trainer.json but for the checksums.
static inline void checkpoint_put_trainer(JsonWriter* w, const CheckpointRecord* r, int element_bytes) {
    json_begin_object(w, NULL);
    checkpoint_put_state(w, r->state);
    json_put_string(w, "precision", element_bytes == 8 ? "float64" : "float32");
    json_put_string(w, "code_version", r->run.code_version);
    if (r->recipe) json_put_string(w, "recipe", r->recipe);
    if (r->config->mixer == MIXER_ATTENTION && r->config->fgate_type == GATE_FULL)
        config_put_initialization(r->config, w, "initialization");
    if (r->fp8) json_put_string(w, "fp8", r->fp8);
    json_put_json(w, "options", r->options);
}

// Rank 0, first step of a save: removes leftovers, makes the temporary folder with config.json, the files of
// hf/ and both files of tensors at their full size, and composes trainer.json. On error the folder is
// removed.
static inline bool checkpoint_create(CheckpointWriter* w, const CheckpointRecord* r, Error* err) {
    char config_path[PATH_LENGTH];
    Error moved;
    if (!out_lock_held(w->out, w->lock, err) || (w->lock < 0 && !make_folders(w->out, err))) return false;
    checkpoint_sweep(w->out); // frees the space of leftovers first
    path_join(config_path, w->folder, "config.json");
    // OUT itself is not made again, in case it was moved since its lock was asked
    bool ok = mkdir(w->folder, 0777) == 0 || errno == EEXIST ||
              fail(err, "%s: cannot create this folder: %s", w->folder, strerror(errno));
    ok = ok && config_write(r->config, config_path, err) &&
         hf_folder_write(w->folder, r->config, r->table, &r->run, r->tokenizer, err);
    for (int f = 0; ok && f < CHECKPOINT_FILES; f++) ok = checkpoint_create_file(&w->files[f], err);
    if (ok) checkpoint_put_trainer(&w->trainer, r, w->files[0].tensors.element_bytes);
    if (ok) return true;
    checkpoint_writer_sweep(w);
    if (!out_lock_held(w->out, w->lock, &moved)) *err = moved; // why the folder could not be written
    return false;
}

// ----------------------------------------------------------------------------
// second step, of every rank: its numbers

// Fails unless all numbers of the shard are finite: a checkpoint with NaN would replace one that training can
// resume from. The message names the tensor.
static inline bool checkpoint_check_finite(const CheckpointPart* part, Error* err) {
    const CheckpointTensors* t = part->tensors;
    const void* const buffers[] = {t->w, t->m, t->v};
    for (int i = 0; i < 3; i++) {
        const char* name = shard_first_not_finite(part->table, part->shard, buffers[i], t->element_bytes);
        if (name)
            return fail(err, "'%s%s' has become infinite or not a number", checkpoint_prefixes[i], name);
    }
    return true;
}

// Opens both files for writing. O_WRONLY matters: on NFS, writers of neighbouring ranges of one page then
// send their own bytes only. On error nothing is open.
static inline bool checkpoint_open_files(CheckpointWriter* w, Error* err) {
    w->unflushed = 0;
    if (!out_lock_held(w->out, w->lock, err)) return false;
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        w->files[f].fd = open(w->files[f].path, O_WRONLY | O_CLOEXEC);
        if (w->files[f].fd >= 0) continue;
        fail(err, "%s: cannot open: %s", w->files[f].path, strerror(errno));
        while (f-- > 0) close(w->files[f].fd);
        return false;
    }
    return true;
}

// Flushes and closes both files. `ok` is false if an earlier error has been reported.
static inline bool checkpoint_close_files(const CheckpointWriter* w, bool ok, Error* err) {
    for (int f = 0; f < CHECKPOINT_FILES; f++)
        ok = checkpoint_close_file(w->files[f].fd, w->files[f].path, ok, err);
    return ok;
}

// Writes data[bytes] at an offset of an open file and adds them to its checksums. Flushes every
// CHECKPOINT_PROGRESS_BYTES, so that a slow disk delays the next call of watch_alive only by that much,
// and not by a whole file.
static inline bool checkpoint_write_piece(CheckpointWriter* w, int file, const void* data, size_t bytes,
                                          int64_t offset, Error* err) {
    WriterFile* f = &w->files[file];
    checksum_add(f->blocks, data, bytes, offset);
    if (!checkpoint_write_at(f->fd, f->path, data, bytes, offset, err)) return false;
    w->unflushed += (int64_t)bytes;
    if (w->unflushed < CHECKPOINT_PROGRESS_BYTES) return true;
    w->unflushed = 0;
    return fdatasync(f->fd) == 0 || fail(err, "%s: cannot write: %s", f->path, strerror(errno));
}

// Every rank, after checkpoint_create: writes a rank's numbers through to the disk, into the existing files,
// and adds them to the writer's checksums.
static inline bool checkpoint_write_shard(CheckpointWriter* w, const CheckpointPart* part, Error* err) {
    bool ok = true;
    assert(part->tensors->m && part->tensors->v);
    if (!checkpoint_open_files(w, err)) return false;
    for (int f = 0; f < CHECKPOINT_FILES; f++) {
        CheckpointPiece p = checkpoint_pieces(&w->files[f].tensors, part);
        while (ok && checkpoint_next_piece(&p))
            ok = checkpoint_write_piece(w, f, p.data, p.bytes, w->files[f].header_bytes + p.offset, err);
    }
    return checkpoint_close_files(w, ok, err);
}

// ----------------------------------------------------------------------------
// last step, of rank 0: trainer.json and the final name

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
        const WriterFile* file = &w->files[f];
        json_begin_array(&w->trainer, strrchr(file->path, '/') + 1);
        for (int64_t i = 0; i < file->num_blocks; i++)
            json_put_string(&w->trainer, NULL, hex64(hex, file->blocks[i]));
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

// Renames the temporary folder to its final name and sets w->published. An existing checkpoint of that name
// is replaced: atomically where the file system supports it (most except NFS), otherwise in two renames,
// between which a crash leaves the older checkpoints.
static inline bool checkpoint_publish(CheckpointWriter* w, Error* err) {
    char path[PATH_LENGTH], old[PATH_LENGTH];
    checkpoint_path(path, w->out, w->step);
    checkpoint_old_path(old, w->out, w->step);
    if (!checkpoint_set_aside(w->out, w->step, err)) return false;
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
