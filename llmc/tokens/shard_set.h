/*
Writing the shards of a conversion as a whole: of all splits, or none. Beside them PREFIX_tokenizer.json, the
tokenizer that made their tokens (tokenizer_json.h), for the checkpoints of models that are trained on them.
Used by data/text_to_shards and, for the locks, the mark and the tokenizer, by data/longcrawl64.

The writers hold their shards under temporary names. shard_set_publish gives all of them their final names, in
an order in which no moment shows a wrong dataset, because the loader refuses a set that is not complete:

    old train  0 1 2    removed    the old set is not complete from here on
    val                 renamed    each over the old one; older ones that remain are removed
    train        1 2    renamed
    tokenizer           renamed    over the old one; without a new one the old one is removed
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

// Creates or removes PREFIX_SPLIT_incomplete.bin, an empty file that exists until all shards do. The pattern
// PREFIX_SPLIT_*.bin includes it, and the loader refuses it: a part of the data does not pass for the whole.
static inline bool shard_set_mark(const char* prefix, const char* split, bool incomplete, Error* err) {
    char path[PATH_LENGTH], folder[PATH_LENGTH];
    snprintf(path, sizeof path, "%.4000s_%s_incomplete.bin", prefix, split);
    shard_folder(folder, prefix);
    if (incomplete) {
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0) return fail(err, "%s: cannot create: %s", path, strerror(errno));
        close(fd);
    } else if (unlink(path) != 0 && errno != ENOENT) {
        return fail(err, "%s: cannot remove: %s", path, strerror(errno));
    }
    return flush_folder(folder, err);
}

// Whether `name`, without a folder, is that of a data shard with any prefix, or of its tokenizer, or of an
// unfinished one.
static inline bool shard_name(const char* name) {
    const char* tokenizer = strstr(name, "_tokenizer.json");
    if (tokenizer && (tokenizer[15] == '\0' || strcmp(tokenizer + 15, ".tmp") == 0)) return true;
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

// Writes the path of a prefix's tokenizer to out[PATH_LENGTH]; shard_path must have accepted the prefix.
static inline void shard_tokenizer_path(char* out, const char* prefix) {
    snprintf(out, PATH_LENGTH, "%s_tokenizer.json", prefix);
}

// The same for the tokenizer that is being written for a split.
static inline void shard_tokenizer_temporary(char* out, const char* prefix, const char* split) {
    snprintf(out, PATH_LENGTH, "%s_%s_tokenizer.json.tmp", prefix, split);
}

// Writes the path of the tokenizer that belongs to the shard `path` to out[PATH_LENGTH]. False if `path` is
// not a name that shard_path makes.
static inline bool shard_tokenizer_beside(char* out, const char* path) {
    static const char* const ends[2] = {"_train_000000.bin", "_val_000000.bin"};
    if (!shard_sibling(out, path, 0)) return false;
    const size_t n = strlen(out);
    for (int split = 0; split < 2; split++) {
        const size_t end = strlen(ends[split]);
        if (n <= end || strcmp(out + n - end, ends[split]) != 0) continue;
        strcpy(out + n - end, "_tokenizer.json"); // not longer
        return true;
    }
    return false;
}

// Writes the text of a tokenizer through to the disk, under its temporary name. On error there is no file.
static inline bool shard_tokenizer_write(const char* prefix, const char* split, const char* text,
                                         Error* err) {
    char temporary[PATH_LENGTH];
    shard_tokenizer_temporary(temporary, prefix, split);
    if (write_text_file(temporary, text, err)) return true;
    unlink(temporary);
    return false;
}

// Gives the written tokenizer its final name, over an older one. Without a written one the older is removed.
static inline bool shard_tokenizer_rename(const char* prefix, const char* split, Error* err) {
    char path[PATH_LENGTH], temporary[PATH_LENGTH];
    shard_tokenizer_path(path, prefix);
    shard_tokenizer_temporary(temporary, prefix, split);
    if (rename(temporary, path) == 0) return true;
    if (errno != ENOENT) return fail(err, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    if (unlink(path) == 0 || errno == ENOENT) return true;
    return fail(err, "%s: cannot remove: %s", path, strerror(errno));
}

// Removes the temporary files that an interrupted or failed conversion left. One that cannot be removed is an
// error only if a shard needs its name.
static inline void shard_set_sweep(const char* prefix) {
    Error ignored;
    for (int split = 0; split < 2; split++) {
        char tokenizer[PATH_LENGTH];
        shard_set_remove(prefix, shard_splits[split], 0, true, &ignored);
        shard_tokenizer_temporary(tokenizer, prefix, shard_splits[split]);
        unlink(tokenizer);
    }
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
// they replace all older shards of the prefix, and its tokenizer, which shard_tokenizer_write has written for
// the train split. The train split must have a shard.
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
        !shard_set_rename(val, 0, err) || !shard_set_rename(train, 1, err) ||
        !shard_tokenizer_rename(train->prefix, train->split, err) || !flush_folder(folder, err))
        return false;
    if (rename(temporary, path) != 0)
        return fail(err, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    return flush_folder(folder, err);
}
