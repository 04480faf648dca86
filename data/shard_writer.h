/*
Writing data shards (llmc/tokens/shard.h), one by one, and those of a conversion as a whole: of all splits, or
none. Beside them PREFIX_tokenizer.json, the tokenizer that made their tokens (tokenizer_json.h), for the
checkpoints of models that are trained on them. Used by data/text_to_shards and data/ids_to_shards, of sets
the locks, the mark and the tokenizer also by data/longcrawl64.

The writers of a set hold their shards under temporary names. shard_set_publish gives all of them their final
names, in an order in which no moment shows a wrong dataset, because the loader refuses a set that is not
complete:

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
#include <libgen.h>
#include "../llmc/tokens/shard.h"

enum { SHARD_MIN_BLOCK = 32768 }; // tokens

// ----------------------------------------------------------------------------
// names

// Writes the path of a shard, PREFIX_SPLIT_000000.bin, to out[PATH_LENGTH].
static inline bool shard_path(char* out, const char* prefix, const char* split, int64_t index, Error* err) {
    int n = snprintf(out, PATH_LENGTH, "%s_%s_%06lld.bin", prefix, split, (long long)index);
    const size_t length = strlen(prefix);
    if (length == 0 || prefix[length - 1] == '/')
        return fail(err, "'%s': must end with the start of a file name", prefix);
    // 8 bytes are reserved for the suffix of the temporary name
    return n > 0 && n < PATH_LENGTH - 8 ? true : fail(err, "%s: this prefix is too long", prefix);
}

// Writes the temporary name of the shard `path`, which shard_path has made, to out[PATH_LENGTH].
static inline void shard_temporary(char* out, const char* path) { strcat(strcpy(out, path), ".tmp"); }

// Writes the folder of a prefix to out[PATH_LENGTH]. shard_path must have accepted the prefix.
static inline void shard_folder(char* out, const char* prefix) {
    char path[PATH_LENGTH + 1];
    snprintf(path, sizeof path, "%s_", prefix);
    strcpy(out, dirname(path));
}

// What this process has made for its shards: their folder, and locks (shard_set_lock).
static struct {
    char folder[PATH_LENGTH], locks[2][PATH_LENGTH];
    int fds[2], count;
} shard_made;

// Called when a command fails: removes the locks that it has made, and its folder if that is empty.
static inline void shard_remove_made(void) {
    for (int i = 0; i < shard_made.count; i++)
        if (file_is_at(shard_made.fds[i], shard_made.locks[i])) unlink(shard_made.locks[i]);
    if (shard_made.folder[0]) (void)rmdir(shard_made.folder);
}

// Creates the folder of a prefix if missing.
static inline bool shard_make_folder(const char* prefix, Error* err) {
    char folder[PATH_LENGTH];
    shard_folder(folder, prefix);
    if (access(folder, F_OK) != 0) strcpy(shard_made.folder, folder);
    message_hooks.clean = shard_remove_made;
    return make_folders(folder, err);
}

// ----------------------------------------------------------------------------
// a shard

typedef struct {
    const char *prefix, *split; // the caller's
    ShardHeader header;         // of the shard being written
    int64_t capacity;           // tokens of a full shard
    int64_t index;              // of the shard being written or, between shards, of the next one
    int64_t total;              // tokens written to all shards
    bool hold;                  // complete shards keep their temporary names, for shard_set_publish
    uint64_t set_id;            // hash of the tokens of the complete shards
    FILE* file;                 // the shard being written, under its temporary name; NULL between shards
    char path[PATH_LENGTH], temporary[PATH_LENGTH]; // names of that shard
} ShardWriter;

// Sets the final and the temporary path of shard w->index. shard_writer_open has checked their length.
static inline void shard_writer_set_paths(ShardWriter* w) {
    Error err;
    if (!shard_path(w->path, w->prefix, w->split, w->index, &err)) die("%s", err.msg);
    shard_temporary(w->temporary, w->path);
}

// Starts writing PREFIX_SPLIT_000000.bin, PREFIX_SPLIT_000001.bin, ... and creates the folder if missing. A
// shard has at most shard_tokens tokens; with doc_len > 0 it consists of whole documents. A token takes 2
// bytes if vocab_size <= 65536, otherwise 4. prefix and split must remain valid until the writer is closed.
// On error there is nothing to close.
static inline bool shard_writer_open(ShardWriter* w, const char* prefix, const char* split,
                                     int64_t vocab_size, int64_t doc_len, int64_t shard_tokens, Error* err) {
    char path[PATH_LENGTH];
    memset(w, 0, sizeof *w);
    if (!shard_path(path, prefix, split, SHARD_MAX_INDEX, err)) return false;
    if (vocab_size < 1 || vocab_size > INT32_MAX)
        return fail(err, "%s: vocabulary size %lld is not in 1..%d", prefix, (long long)vocab_size,
                    INT32_MAX);
    if (doc_len < 0 || doc_len > INT32_MAX)
        return fail(err, "%s: document length %lld is not in 0..%d", prefix, (long long)doc_len, INT32_MAX);
    if (shard_tokens < 1 || shard_tokens > INT32_MAX)
        return fail(err, "%s: %s per shard is not in 1..%d", prefix, counted(shard_tokens, "token").text,
                    INT32_MAX);
    if (shard_tokens < doc_len)
        return fail(err, "%s: a shard of %s cannot hold one document of %lld", prefix,
                    counted(shard_tokens, "token").text, (long long)doc_len);
    w->prefix = prefix;
    w->split = split;
    w->header.vocab_size = vocab_size;
    w->header.doc_len = doc_len;
    w->header.bytes_per_token = vocab_size <= 65536 ? 2 : 4;
    w->capacity = doc_len > 0 ? shard_tokens / doc_len * doc_len : shard_tokens;
    return shard_make_folder(prefix, err);
}

// Before the first token: the shards get a mask, and tokens come with SHARD_COUNTS where they count.
static inline void shard_writer_mask(ShardWriter* w) {
    w->header.masked = true;
    w->header.bytes_per_token = 4;
}

// Makes `index` the next shard, for a caller that found the shards before it complete. Returns false in the
// middle of a shard or if the index is out of range.
static inline bool shard_writer_skip_to(ShardWriter* w, int64_t index) {
    if (w->file || index < 0 || index > SHARD_MAX_INDEX) return false;
    w->index = index;
    return true;
}

// Discards the shard being written and its temporary file, if there is one. Complete shards are kept. Returns
// false, for a caller that fails.
static inline bool shard_writer_abort(ShardWriter* w) {
    if (w->file) {
        fclose(w->file);
        unlink(w->temporary);
    }
    w->file = NULL;
    return false;
}

// Writes a header at the start of a file. False if that fails.
static inline bool shard_put_header(FILE* file, const ShardHeader* h) {
    int32_t header[SHARD_HEADER_INTS] = {0};
    header[0] = SHARD_MAGIC;
    header[1] = h->masked ? 3 : h->bytes_per_token == 2 ? 1 : 2;
    header[2] = (int32_t)h->tokens;
    header[3] = (int32_t)h->doc_len;
    header[4] = (int32_t)h->vocab_size;
    header[5] = (int32_t)h->set_shards;
    header[6] = (int32_t)h->set_index;
    memcpy(header + 7, &h->set_id, sizeof h->set_id);
    header[9] = (int32_t)h->block_tokens;
    memcpy(header + 10, h->checksums, (size_t)shard_blocks(h) * sizeof *h->checksums);
    memcpy(header + 250, &h->vocab_hash, sizeof h->vocab_hash);
    header[SHARD_HEADER_INTS - 1] = (int32_t)shard_header_checksum(header);
    return fseek(file, 0, SEEK_SET) == 0 && fwrite(header, sizeof header, 1, file) == 1;
}

// Opens the temporary file of the next shard with a preliminary header, which shard_writer_end replaces.
static inline bool shard_writer_begin(ShardWriter* w, Error* err) {
    shard_writer_set_paths(w);
    if (w->index > SHARD_MAX_INDEX)
        return fail(err, "%s: more than %d shards; increase --shard-tokens", w->prefix, SHARD_MAX_INDEX + 1);
    w->header.tokens = w->header.block_tokens = 0;
    w->file = fopen(w->temporary, "w+b");
    if (!w->file) return fail(err, "%s: cannot create: %s", w->temporary, strerror(errno));
    if (!shard_put_header(w->file, &w->header))
        return fail(err, "%s: cannot write: %s", w->temporary, strerror(errno));
    return true;
}

// Computes the checksums of the shard being written, from the file.
static inline bool shard_writer_checksums(ShardWriter* w, Error* err) {
    ShardHeader* h = &w->header;
    if (fflush(w->file) != 0) return fail(err, "%s: cannot write: %s", w->temporary, strerror(errno));
    h->block_tokens = SHARD_MIN_BLOCK;
    while (shard_blocks(h) > SHARD_MAX_BLOCKS) h->block_tokens *= 2;
    for (int64_t b = 0; b < shard_blocks(h); b++)
        if (!shard_block_checksum(fileno(w->file), w->temporary, h, b, &h->checksums[b], err)) return false;
    w->set_id = hash64(w->set_id, &h->tokens, sizeof h->tokens);
    w->set_id = hash64(w->set_id, h->checksums, (size_t)shard_blocks(h) * sizeof *h->checksums);
    return true;
}

// Completes the shard being written and, unless the writer holds its shards, renames it to its final name.
static inline bool shard_writer_end(ShardWriter* w, Error* err) {
    char folder[PATH_LENGTH];
    if (w->header.doc_len > 0 && w->header.tokens % w->header.doc_len != 0)
        return fail(err, "%s: the last document has only %lld of %s", w->path,
                    (long long)(w->header.tokens % w->header.doc_len),
                    counted(w->header.doc_len, "token").text);
    if (!shard_writer_checksums(w, err)) return false;
    if (!shard_put_header(w->file, &w->header))
        return fail(err, "%s: cannot write: %s", w->temporary, strerror(errno));
    FILE* file = w->file;
    w->file = NULL;
    if (w->hold) {
        w->index++;
        return flush_and_close(file, w->temporary, err);
    }
    if (!close_and_rename(file, w->temporary, w->path, err)) return false;
    w->index++;
    shard_folder(folder, w->prefix);
    return flush_folder(folder, err);
}

// Writes n tokens, opening and completing shards as needed. On error the shard being written is discarded,
// and there is nothing to close.
static inline bool shard_write(ShardWriter* w, const uint32_t* tokens, int64_t n, Error* err) {
    const uint32_t id_bits = w->header.masked ? ~SHARD_COUNTS : UINT32_MAX;
    for (int64_t i = 0; i < n; i++) {
        if ((tokens[i] & id_bits) < w->header.vocab_size) continue;
        shard_writer_abort(w);
        return fail(err, "%s: token %lld has id %u, outside the vocabulary of %lld", w->prefix,
                    (long long)(w->total + i), tokens[i] & id_bits, (long long)w->header.vocab_size);
    }
    while (n > 0) {
        uint16_t narrow[8192];
        const int64_t block = sizeof narrow / sizeof narrow[0];
        bool ok = w->file || shard_writer_begin(w, err), wide = w->header.bytes_per_token == 4;
        int64_t room = w->capacity - w->header.tokens, m = n < room ? n : room;
        if (m > block) m = block;
        for (int64_t i = 0; i < m; i++) narrow[i] = (uint16_t)tokens[i];
        const void* data = wide ? (const void*)tokens : narrow;
        if (ok && fwrite(data, wide ? 4 : 2, (size_t)m, w->file) != (size_t)m)
            ok = fail(err, "%s_%s: cannot write: %s", w->prefix, w->split, strerror(errno));
        w->header.tokens += m, w->total += m;
        if (ok && w->header.tokens == w->capacity) ok = shard_writer_end(w, err);
        if (!ok) return shard_writer_abort(w);
        tokens += m;
        n -= m;
    }
    return true;
}

// Completes the last shard; on error it is discarded. An empty shard is not written. Warns if a shard with
// the next index exists: it is left from an earlier, longer dataset and would be read together with this one.
static inline bool shard_writer_close(ShardWriter* w, Error* err) {
    if (w->file && !shard_writer_end(w, err)) return shard_writer_abort(w);
    shard_writer_set_paths(w);
    if (!w->hold && access(w->path, F_OK) == 0)
        warn("%s: is left from an earlier dataset; remove it and those after it", w->path);
    return true;
}

// ----------------------------------------------------------------------------
// a set

enum { SHARD_TRAIN, SHARD_VAL };
static const char* const shard_splits[2] = {"train", "val"};

// Locks the shards of a prefix and split against other processes until this one ends, by the file
// PREFIX_SPLIT.lock, which remains unless the command that made it fails. Creates the folder if missing.
static inline bool shard_set_lock(const char* prefix, const char* split, Error* err) {
    char path[PATH_LENGTH];
    if (!shard_path(path, prefix, split, 0, err) || !shard_make_folder(prefix, err)) return false;
    snprintf(path, sizeof path, "%.4000s_%s.lock", prefix, split);
    const bool made = access(path, F_OK) != 0;
    const int fd = lock_file(path), why = errno;
    if (fd >= 0 && made && shard_made.count < 2) {
        strcpy(shard_made.locks[shard_made.count], path);
        shard_made.fds[shard_made.count++] = fd;
    }
    if (fd >= 0 && file_is_at(fd, path)) return true;
    if (fd >= 0 || why == EWOULDBLOCK)
        return fail(err, "%s: another process writes these shards; wait for it or choose another prefix",
                    prefix);
    return fail(err, "%s: cannot lock: %s", path, strerror(why));
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
