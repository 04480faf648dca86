/*
The dataset of a data loader: the list of shards that match a pattern, sorted by name, and how many sequences
of T tokens they have (dataloader.h says which). Its opening checks the headers of the shards, that their sets
are complete, and that no shard is there twice. Called by dataloader.h.
*/
#pragma once

#include "../base/common.h"
#include "mixture.h"
#include "shard.h"

enum { DATASET_START = 4096 }; // bytes of a shard's tokens by which copies of it are found

typedef struct {
    const char* path;
    ShardHeader header;
    int part;                        // of the mixture
    int64_t first_item;              // items (documents, or windows of a stream) in the shards before it
    uint64_t start;                  // hash of its first tokens
    struct stat file;                // when it was verified; owned by the reading thread, as is
    bool verified[SHARD_MAX_BLOCKS]; // blocks whose checksum is right; owned by the reading thread
} DataShard;

typedef struct {
    // set by the caller
    int64_t seq_len, skip, vocab_size; // of DataOptions
    // constant after open
    glob_t files; // owns the paths
    DataShard* shards;
    int64_t num_shards;
    Mixture mixture;
    int64_t doc_len;   // D
    bool masked;       // its shards have a mask
    int64_t items;     // of all shards; of a mixture how many first sequences are of different ones
    int64_t sequences; // n = items * columns; of a mixture how many first sequences are different ones
} Dataset;

// Lists the files of all parts, one part behind the other.
static inline bool dataset_list(Dataset* set, const char* patterns, Error* err) {
    glob_t* files = &set->files;
    size_t ends[MIXTURE_PARTS];
    int part = 0;
    if (!mixture_parse(&set->mixture, patterns, err)) return false;
    for (int k = 0; k < set->mixture.count; k++) {
        if (!mixture_list(files, set->mixture.parts[k].pattern, err)) return false;
        ends[k] = files->gl_pathc;
    }
    set->num_shards = (int64_t)files->gl_pathc;
    set->shards = (DataShard*)xcalloc(files->gl_pathc, sizeof *set->shards);
    for (size_t i = 0; i < files->gl_pathc; i++) {
        while (i == ends[part]) part++;
        set->shards[i].part = part;
        set->shards[i].path = files->gl_pathv[i];
        if (i > 0 && strcmp(files->gl_pathv[i - 1], files->gl_pathv[i]) == 0)
            return fail(err, "'%s': matches %s twice", patterns, files->gl_pathv[i]);
    }
    return true;
}

// The first of `count` shards whose vocabulary is known by its hash; the last one if none is.
static inline const DataShard* dataset_with_vocab(const DataShard* shards, int64_t count) {
    while (count > 1 && !shards->header.vocab_hash) shards++, count--;
    return shards;
}

// The hash of the vocabulary of all shards; 0: unknown.
static inline uint64_t dataset_vocab_hash(const Dataset* set) {
    return dataset_with_vocab(set->shards, set->num_shards)->header.vocab_hash;
}

// Checks that a shard is compatible with the model and with the shards of the dataset before it.
static inline bool dataset_check(const Dataset* set, const DataShard* shard, Error* err) {
    const DataShard *first = &set->shards[0], *known = dataset_with_vocab(first, shard - first + 1);
    const ShardHeader *h = &shard->header, *h0 = &first->header;
    if (h->doc_len != h0->doc_len)
        return fail(err, "%s has documents of %s, %s of %lld (0: a stream); use one dataset", shard->path,
                    counted(h->doc_len, "token").text, first->path, (long long)h0->doc_len);
    if (h->vocab_size != h0->vocab_size)
        return fail(err, "%s has a vocabulary of %lld, %s of %lld (0: unknown); use one dataset", shard->path,
                    (long long)h->vocab_size, first->path, (long long)h0->vocab_size);
    if (h->vocab_hash && h->vocab_hash != known->header.vocab_hash)
        return fail(err, "%s and %s were encoded with different tokenizers; use one dataset", shard->path,
                    known->path);
    if (h->masked != h0->masked)
        return fail(err, "%s has %s mask of the targets that count, %s has %s; use one dataset", shard->path,
                    h->masked ? "a" : "no", first->path, h0->masked ? "one" : "none");
    if (h->bytes_per_token != h0->bytes_per_token)
        return fail(err, "%s has tokens of %s, %s of %d; use one dataset", shard->path,
                    counted(h->bytes_per_token, "byte").text, first->path, h0->bytes_per_token);
    if (h->vocab_size > set->vocab_size)
        return fail(err,
                    "%s: its vocabulary of %lld is larger than the model's %lld; a new model of this data is "
                    "made with --set vocab_size=%lld (and bos_token_id and eos_token_id, unless its last "
                    "token ends texts)",
                    shard->path, (long long)h->vocab_size, (long long)set->vocab_size,
                    (long long)h->vocab_size);
    if (h->doc_len > 0 && h->doc_len < set->skip + set->seq_len)
        return fail(err, "%s: its documents of %s are shorter than a sequence of %lld", shard->path,
                    counted(h->doc_len, "token").text, (long long)(set->skip + set->seq_len));
    return true;
}

// Whether shard `index` of the set of the shard `of` is in the dataset or, under its name, beside that shard.
static inline bool dataset_has(const Dataset* set, const DataShard* known, int64_t index) {
    char sibling[PATH_LENGTH];
    ShardHeader h;
    Error ignored;
    for (int64_t i = 0; i < set->num_shards; i++) {
        const ShardHeader* listed = &set->shards[i].header;
        if (shard_same_set(listed, &known->header) && listed->set_index == index) return true;
    }
    return shard_sibling(sibling, known->path, index) && access(sibling, F_OK) == 0 &&
           shard_read_header(sibling, &h, &ignored) && shard_same_set(&h, &known->header) &&
           h.set_index == index;
}

// Refuses a shard whose conversion was interrupted or mixed with another: all shards of its set must exist.
// They need not all be in the dataset, which may be a part of a set.
static inline bool dataset_check_sets(const Dataset* set, Error* err) {
    for (int64_t i = 0; i < set->num_shards; i++) {
        const DataShard* shard = &set->shards[i];
        const ShardHeader* h = &shard->header;
        if (i > 0 && shard_same_set(h, &shard[-1].header)) continue; // its set was checked
        for (int64_t k = 0; k < h->set_shards; k++)
            if (!dataset_has(set, shard, k))
                return fail(err,
                            "%s: is one of %s of a conversion, but number %lld is missing or of another one: "
                            "put it back, or convert the data again",
                            shard->path, counted(h->set_shards, "shard").text, (long long)k);
    }
    return true;
}

// Reads the header and the first tokens of a shard. The file's state is taken first, so that a later change
// of the file shows.
static inline bool dataset_read_start(DataShard* shard, Error* err) {
    char start[DATASET_START];
    int fd = -1;
    ShardHeader* h = &shard->header;
    if (!shard_open(shard->path, &fd, err)) return false;
    bool ok = fstat(fd, &shard->file) == 0 || fail(err, "%s: cannot stat: %s", shard->path, strerror(errno));
    ok = ok && shard_read_header_fd(fd, shard->path, h, err);
    if (ok) {
        const int64_t bytes = h->tokens * h->bytes_per_token;
        const size_t n = bytes < (int64_t)sizeof start ? (size_t)bytes : sizeof start;
        ok = shard_pread(fd, shard->path, start, n, SHARD_HEADER_BYTES, err);
        if (ok) shard->start = hash64(0, start, n);
    }
    close(fd);
    return ok;
}

// Sets *same to whether two shards are one file, or copies. Two shards of one conversion are none: its text
// may repeat itself.
static inline bool dataset_same_shard(const DataShard* a, const DataShard* b, bool* same, Error* err) {
    const ShardHeader *h = &a->header, *other = &b->header;
    *same = a->file.st_dev == b->file.st_dev && a->file.st_ino == b->file.st_ino;
    if (*same || a->start != b->start || !shard_same_tokens(h, other) ||
        (shard_same_set(h, other) && h->set_index != other->set_index))
        return true;
    return shard_same_content(a->path, b->path, h, same, err);
}

// Refuses a dataset with a shard that is there twice, by a link or as a copy: it would count twice.
static inline bool dataset_check_repeated(const Dataset* set, const char* patterns, Error* err) {
    for (int64_t i = 1; i < set->num_shards; i++)
        for (int64_t k = 0; k < i; k++) {
            const DataShard *a = &set->shards[k], *b = &set->shards[i];
            bool same;
            if (!dataset_same_shard(a, b, &same, err)) return false;
            if (same)
                return fail(err,
                            "'%s': matches the same tokens twice, as %s and as %s; leave one of them out",
                            patterns, a->path, b->path);
        }
    return true;
}

// Sets *shared to the number of shards of a dataset that are also in another one, and *example to the first
// one's path. Not while the reading threads exist.
static inline bool dataset_shared(const Dataset* set, const Dataset* other, int64_t* shared,
                                  const char** example, Error* err) {
    *shared = 0;
    for (int64_t i = 0; i < set->num_shards; i++) {
        bool same = false;
        for (int64_t k = 0; k < other->num_shards && !same; k++)
            if (!dataset_same_shard(&set->shards[i], &other->shards[k], &same, err)) return false;
        if (same && (*shared)++ == 0) *example = set->shards[i].path;
    }
    return true;
}

// Reads and checks all headers and counts the items.
static inline bool dataset_index(Dataset* set, const char* patterns, Error* err) {
    const char* too_short = NULL;
    int64_t T = set->seq_len, skip = set->skip, num_too_short = 0;
    for (int64_t i = 0; i < set->num_shards; i++) {
        DataShard* shard = &set->shards[i];
        const ShardHeader* h = &shard->header;
        if (!dataset_read_start(shard, err)) return false;
        if (!dataset_check(set, shard, err)) return false;
        shard->first_item = set->items;
        int64_t items = h->doc_len > 0 ? h->tokens / h->doc_len : (h->tokens - 1) / T;
        if (items == 0 && num_too_short++ == 0) too_short = shard->path;
        set->mixture.parts[shard->part].items += items;
        set->items += items;
    }
    if (!dataset_check_sets(set, err) || !dataset_check_repeated(set, patterns, err)) return false;
    set->doc_len = set->shards[0].header.doc_len;
    set->masked = set->shards[0].header.masked;
    set->items = 0;
    for (int k = 0; k < set->mixture.count; k++) {
        MixturePart* part = &set->mixture.parts[k];
        if (part->items == 0)
            return fail(err, "'%s': no shard has the %s of a sequence and its last target", part->pattern,
                        counted(T + 1, "token").text);
        part->first_item = set->items;
        part->sequences = part->items * (set->doc_len > 0 ? (set->doc_len - skip) / T : 1);
        set->items += part->items;
    }
    set->items = mixture_first(&set->mixture, true);
    set->sequences = mixture_first(&set->mixture, false);
    if (num_too_short > 0)
        warn("not used: %lld of %s, for example %s: shorter than the %s of a sequence and its last target",
             (long long)num_too_short, counted(set->num_shards, "shard").text, too_short,
             counted(T + 1, "token").text);
    if (set->doc_len % T != 0 && skip == 0)
        warn("'%s': not used with sequences of %lld: the last %lld of the %s of each document", patterns,
             (long long)T, (long long)(set->doc_len % T), counted(set->doc_len, "token").text);
    return true;
}

// Opens the shards that match `patterns`. Free with dataset_free, also where it fails.
static inline bool dataset_open(Dataset* set, const char* patterns, Error* err) {
    return dataset_list(set, patterns, err) && dataset_index(set, patterns, err);
}

static inline void dataset_free(Dataset* set) {
    free(set->shards);
    mixture_free(&set->mixture);
    globfree(&set->files);
}
