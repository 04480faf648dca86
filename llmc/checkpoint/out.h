/*
OUT, the folder of a run: which checkpoints it holds, the lock that keeps a second process out, and removing.

    OUT/step_00001000/          a complete checkpoint (format.h)
    OUT/.tmp-step_00002000/     one that is being written, or the leftover of a crash
    OUT/.tmp-step_00001000.old  one that is being removed or replaced
    OUT/lock                    held by the process that trains here (out_lock)

A folder with its final name is complete: it is written and flushed under a temporary name and then
renamed, and what it replaces or makes superfluous is removed only afterwards. Whenever a process crashes,
the newest complete checkpoint remains, and the next save removes the leftovers. A folder in which
something else stands is never removed. A complete folder can still be damaged from outside: the caller then
tries the next older one of checkpoint_list.

Called by configure.h and chosen_model.h, which look for a checkpoint to start from, by write.h and train.h.
*/
#pragma once

#include <dirent.h>
#include <ftw.h>
#include "../base/common.h"

// ----------------------------------------------------------------------------
// names

// Before step_ in a name: a checkpoint that is being written, or a leftover that the next save removes.
#define CHECKPOINT_TEMPORARY ".tmp-"

// Path of OUT/BEFOREstep_00001000AFTER.
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

// ----------------------------------------------------------------------------
// the lock

static struct {
    char out[PATH_LENGTH];
    int fd;    // of the lock
    bool made; // by this process
    pid_t process;
} out_locked;

// Called when a command fails: if it wrote nothing to OUT, removes its lock, and OUT if the command made it.
// Another run that has begun in the place of a folder that was moved has a lock of its own.
static inline void out_remove_empty(void) {
    enum { DOTS_AND_LOCK = 3 };
    char path[PATH_LENGTH];
    struct dirent** entries = NULL;
    if (getpid() != out_locked.process) return;
    const int count = scandir(out_locked.out, &entries, NULL, NULL);
    for (int i = 0; i < count; i++) free(entries[i]);
    free(entries);
    path_join(path, out_locked.out, "lock");
    if (count == DOTS_AND_LOCK && file_is_at(out_locked.fd, path) && unlink(path) == 0 && out_locked.made)
        (void)rmdir(out_locked.out);
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
    const bool made = access(out, F_OK) != 0;
    if (!make_folders(out, err)) return false;
    path_join(path, out, "lock");
    *fd = lock_file(path);
    if (*fd >= 0 && file_is_at(*fd, path)) {
        snprintf(out_locked.out, sizeof out_locked.out, "%s", out);
        out_locked.fd = *fd;
        out_locked.made = made;
        out_locked.process = getpid();
        message_hooks.clean = out_remove_empty;
        return true;
    }
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

// All that this program writes into a checkpoint (write.h, hf/folder.h). Whatever else stands there is not
// the run's to remove.
static const char* const checkpoint_entries[] = {".",
                                                 "..",
                                                 "README.md",
                                                 "config.json",
                                                 "trainer.json",
                                                 "model.safetensors",
                                                 "optimizer.safetensors",
                                                 "generation_config.json",
                                                 "tokenizer.json",
                                                 "tokenizer_config.json",
                                                 "configuration_fox.py",
                                                 "modeling_fox.py",
                                                 "modeling_recurrent.py",
                                                 "modeling_stack.py"};

static inline int checkpoint_is_foreign(const struct dirent* entry) {
    const size_t n = sizeof checkpoint_entries / sizeof checkpoint_entries[0];
    size_t i = 0;
    while (i < n && strcmp(entry->d_name, checkpoint_entries[i]) != 0) i++;
    return i == n;
}

// Is there something at `path` that is more than a checkpoint: a file, or a folder with something else in it,
// whose name it writes to `name`? Of a link only the link would be removed.
static inline bool checkpoint_has_more(const char* path, char name[256]) {
    struct stat st;
    struct dirent** entries = NULL;
    *name = '\0';
    if (lstat(path, &st) != 0 || S_ISLNK(st.st_mode)) return false;
    if (!S_ISDIR(st.st_mode)) return true;
    const int count = scandir(path, &entries, checkpoint_is_foreign, alphasort);
    if (count > 0) snprintf(name, 256, "%s", entries[0]->d_name);
    for (int i = 0; i < count; i++) free(entries[i]);
    free(entries);
    return count > 0;
}

// Moves what stands in the place of a step's new checkpoint out of its way, if it is more than a checkpoint.
static inline bool checkpoint_set_aside(const char* out, int64_t step, Error* err) {
    char path[PATH_LENGTH], aside[PATH_LENGTH], name[256];
    struct stat st;
    checkpoint_path(path, out, step);
    checkpoint_join(aside, out, "", step, ".other");
    if (!checkpoint_has_more(path, name)) return true;
    if (lstat(aside, &st) == 0 || rename(path, aside) != 0)
        return fail(err, "%s: is not a checkpoint alone, and cannot be moved to %s: move it away", path,
                    aside);
    warn("%s: was not a checkpoint alone: it is now %s", path, aside);
    return true;
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

// Discards all but the `keep` newest checkpoints up to and including that of `step`, and folders that hold
// more than a checkpoint. Those of later steps are neither counted nor removed: the run found them damaged
// when it resumed from an earlier step.
static inline void checkpoint_prune(const char* out, int64_t step, int keep) {
    int64_t* steps;
    Error err;
    char path[PATH_LENGTH], name[256];
    static int64_t told = -1; // of folders up to this step was said that they stay
    int64_t newest = told;
    int kept = 0, count = checkpoint_list(out, &steps, &err);
    for (int i = 0; i < count; i++) {
        if (steps[i] > step || kept++ < keep) continue;
        checkpoint_path(path, out, steps[i]);
        if (!checkpoint_has_more(path, name)) {
            if (!checkpoint_discard(out, steps[i], &err)) warn("%s", err.msg);
        } else if (steps[i] > told) {
            warn("%s: holds '%s', which is not the checkpoint's: --keep leaves this folder", path, name);
            if (steps[i] > newest) newest = steps[i];
        }
    }
    told = newest;
    if (count < 0) warn("%s", err.msg);
    free(steps);
}
