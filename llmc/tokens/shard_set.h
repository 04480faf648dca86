/*
Writing the shards of a conversion as a whole: of all splits, or none. Used by data/text_to_shards and, for
the locks, by data/longcrawl64.

The writers hold their shards under temporary names. shard_set_publish gives all of them their final names, in
an order in which no moment shows a wrong dataset, because the loader refuses a set that is not complete:

    old train  0 1 2    removed    the old set is not complete from here on
    val                 renamed    each over the old one; older ones that remain are removed
    train        1 2    renamed
    train      0        renamed    the new set is complete from here on

A process that is killed, or a machine that loses power, leaves the old dataset, the new one, or a train split
that the loader refuses. The next conversion removes the temporary files.
*/
#pragma once

#include <dirent.h>
#include "shard.h"

enum { SHARD_TRAIN, SHARD_VAL };
static const char* const shard_splits[2] = {"train", "val"};

// Locks the shards of a prefix and split against other processes until this one ends, by the file
// PREFIX_SPLIT.lock, which remains. Creates the folder if missing.
static inline bool shard_set_lock(const char* prefix, const char* split, Error* err) {
    char path[PATH_LENGTH], folder[PATH_LENGTH];
    if (!shard_path(path, prefix, split, 0, err)) return false;
    shard_folder(folder, prefix);
    if (!make_folders(folder, err)) return false;
    snprintf(path, sizeof path, "%s_%s.lock", prefix, split);
    if (lock_file(path) >= 0) return true;
    if (errno == EWOULDBLOCK)
        return fail(err, "%s: another process writes these shards; wait for it or choose another prefix",
                    prefix);
    return fail(err, "%s: cannot lock: %s", path, strerror(errno));
}

// Whether `name`, without a folder, is that of a data shard with any prefix, or of an unfinished one.
static inline bool shard_name(const char* name) {
    const char* number = strrchr(name, '_');
    if (!number || strspn(number + 1, "0123456789") != 6) return false;
    const size_t before = (size_t)(number - name);
    bool split = (before >= 6 && strncmp(number - 6, "_train", 6) == 0) ||
                 (before >= 4 && strncmp(number - 4, "_val", 4) == 0);
    return split && (strcmp(number + 7, ".bin") == 0 || strcmp(number + 7, ".bin.tmp") == 0);
}

// Removes the shards of a prefix and split with an index of at least `first`: with `temporary` only files
// with temporary names, otherwise only those with final names.
static inline bool shard_set_remove(const char* prefix, const char* split, int64_t first, bool temporary,
                                    Error* err) {
    char folder[PATH_LENGTH], path[PATH_LENGTH], unfinished[PATH_LENGTH];
    shard_folder(folder, prefix);
    DIR* d = opendir(folder);
    if (!d) return fail(err, "%s: cannot read this folder: %s", folder, strerror(errno));
    bool ok = true;
    for (struct dirent* entry; ok && (errno = 0, entry = readdir(d));) {
        const char* number = strrchr(entry->d_name, '_');
        int64_t index = number ? strtoll(number + 1, NULL, 10) : -1;
        if (index < first || !shard_path(path, prefix, split, index, err)) continue;
        shard_temporary(unfinished, path);
        const char *target = temporary ? unfinished : path, *slash = strrchr(target, '/');
        if (strcmp(entry->d_name, slash ? slash + 1 : target) == 0 && unlink(target) != 0)
            ok = fail(err, "%s: cannot remove: %s", target, strerror(errno));
    }
    if (ok && errno) ok = fail(err, "%s: cannot read this folder: %s", folder, strerror(errno));
    closedir(d);
    return ok;
}

// Removes the temporary files that an interrupted or failed conversion left. One that cannot be removed is an
// error only if a shard needs its name.
static inline void shard_set_sweep(const char* prefix) {
    Error ignored;
    for (int split = 0; split < 2; split++) shard_set_remove(prefix, shard_splits[split], 0, true, &ignored);
}

// Writes the set's fields to the header of a held shard.
static inline bool shard_set_stamp(const ShardWriter* w, int64_t index, Error* err) {
    char path[PATH_LENGTH], temporary[PATH_LENGTH];
    ShardHeader h;
    if (!shard_path(path, w->prefix, w->split, index, err)) return false;
    shard_temporary(temporary, path);
    if (!shard_read_header(temporary, &h, err)) return false;
    h.set_shards = w->index;
    h.set_index = index;
    h.set_id = w->set_id;
    FILE* f = fopen(temporary, "r+b");
    if (!f) return fail(err, "%s: cannot open: %s", temporary, strerror(errno));
    shard_put_header(f, &h); // flush_and_close reports errors
    return flush_and_close(f, temporary, err);
}

// Renames the held shards first .. w->index - 1, and removes older shards above them.
static inline bool shard_set_rename(const ShardWriter* w, int64_t first, Error* err) {
    char path[PATH_LENGTH], temporary[PATH_LENGTH];
    for (int64_t i = first; i < w->index; i++) {
        if (!shard_path(path, w->prefix, w->split, i, err)) return false;
        shard_temporary(temporary, path);
        if (rename(temporary, path) != 0)
            return fail(err, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    }
    return shard_set_remove(w->prefix, w->split, w->index, false, err);
}

// Gives the held shards of two closed writers with the same prefix their final names, in the order above;
// they replace all older shards of the prefix. The train split must have a shard.
static inline bool shard_set_publish(const ShardWriter* train, const ShardWriter* val, Error* err) {
    char folder[PATH_LENGTH], path[PATH_LENGTH], temporary[PATH_LENGTH];
    for (int64_t i = 0; i < train->index; i++)
        if (!shard_set_stamp(train, i, err)) return false;
    for (int64_t i = 0; i < val->index; i++)
        if (!shard_set_stamp(val, i, err)) return false;
    shard_folder(folder, train->prefix);
    if (!shard_path(path, train->prefix, train->split, 0, err)) return false;
    shard_temporary(temporary, path);
    // each flush keeps its step from reaching the disk after the next one
    if (!shard_set_remove(train->prefix, train->split, 0, false, err) || !flush_folder(folder, err) ||
        !shard_set_rename(val, 0, err) || !shard_set_rename(train, 1, err) || !flush_folder(folder, err))
        return false;
    if (rename(temporary, path) != 0)
        return fail(err, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    return flush_folder(folder, err);
}
