/*
Data loader of both trainers: turns data shards (shard.h) into batches of inputs [B, T] and targets [B, T].

A dataset is the list of shards that match a pattern, sorted by name. Its n sequences of T tokens, in order:
  documents (D > 0)   A document of D tokens has D / T columns. Sequence (document r, column k) has as targets
                      tokens [kT, (k+1)T) of document r, and as inputs the end-of-text token followed by all
                      targets but the last. Column 0 of all documents comes first, then column 1, and so on.
                      The last D mod T tokens of each document are not used. With `skip`, token 0 above is
                      the document's token `skip`.
  stream (D = 0)      Windows at p = 0, T, 2T, ... of each shard: inputs [p, p+T), targets [p+1, p+T+1). A
                      window never extends into the next shard.
Shards with a mask say which tokens count as targets; in place of the others there is TARGET_NONE.
After the last sequence a new epoch starts. With shuffle, each epoch has its own random permutation. All of
this is true of each part of a mixture (mixture.h).

All ranks together consume the next `stride` sequences, those of an optimizer step; this loader reads `count`
of them, from the `first` on, in batches of B. The only state between steps is the position, the number of
sequences consumed by all ranks. A resumed run therefore continues exactly, even with another number of ranks.

    stride 12, 3 ranks, B 2      position                                   position + 12
    ranks                        |0 0|0 0|1 1|1 1|2 2|2 2|                  |0 0|...
    first 4, count 4: rank 1              ^   ^ its batches

A thread reads batches ahead while the caller computes. It uses pread instead of mmap, where an I/O error
would be SIGBUS. Reading checks every token id, and the checksum of a block of tokens before the first
use of it. If a shard's file has changed since, as its times, size and inode tell, all of its blocks are
verified again; without checksums this is an error. Errors are reported with the batch that they affect, after
all batches before it.
*/
#pragma once

#include <pthread.h>
#include "../base/common.h"
#include "../base/document_count.h"
#include "../base/random.h"
#include "dataset.h"

enum {
    DATALOADER_RING = 4,       // batches read ahead
    DATALOADER_OPEN_FILES = 64 // a dataset may have more shards than a process may have open files
};

// Sequences, as above: first and count are multiples of B.
typedef struct {
    int64_t stride, first, count;
} DataShare;

typedef struct {
    int64_t seq_len, batch; // T and B
    DataShare share;
    int64_t vocab_size;  // of the model; every token id must be below it
    int64_t end_of_text; // first input of a document's sequences
    bool shuffle;
    uint64_t seed; // of the shuffle
    int64_t skip;  // tokens of each document before its first sequence; 0 for streams
} DataOptions;

typedef struct {
    // [B, T+1]: inputs are elements [0, T) of a row, targets [1, T+1). With a mask as in the shard
    int32_t* tokens;
    bool ok;
    Error err; // if not ok
} DataBatch;

typedef struct {
    // constant after open
    DataOptions options;
    Dataset set;
    // set by the caller after open
    bool unverified;       // checksums are not read
    bool rolls;            // each document is rotated by an offset drawn from
    uint64_t roll_seed;    // and its number in its part, as data/roll.h does in shards
    bool counts_documents; // of batches, and the pairs of attention in
    AttentionWindows windows;
    // owned by the caller's thread
    int64_t position;
    int64_t taken;     // of the loader's `count` sequences at this position
    int64_t uncounted; // targets of the batches so far that do not count; the caller may set it to 0, and
    DocumentCount documents; // of the batches so far, if it counts them
    bool started;            // the reading thread exists
    pthread_t thread;
    // owned by the reading thread: a cache of descriptors, indexed by shard number modulo its size
    struct {
        int64_t shard; // -1: free
        int fd;
    } open_files[DATALOADER_OPEN_FILES];
    // shared, protected by the lock. The caller's thread owns filled batches, the reading thread the others
    DataBatch ring[DATALOADER_RING];
    int64_t head, filled;  // batches head, ..., head + filled - 1 (modulo the ring's size) are filled
    int64_t read_position; // of the next batch to read, and
    int64_t read_taken;    // the sequences read before it at this position
    int64_t seeks;         // number of seeks; the reading thread discards a batch during which it changed
    bool stop;
    pthread_mutex_t lock;
    pthread_cond_t batch_filled, batch_wanted;
} DataLoader;

// ----------------------------------------------------------------------------
// reading a batch, in the reading thread

// Sets *fd to a descriptor of the shard, cached or newly opened.
static inline bool dataloader_file(DataLoader* loader, int64_t shard_index, int* fd, Error* err) {
    int64_t slot = shard_index % DATALOADER_OPEN_FILES;
    *fd = loader->open_files[slot].fd;
    if (loader->open_files[slot].shard == shard_index) return true;
    if (loader->open_files[slot].shard >= 0) close(*fd);
    loader->open_files[slot].shard = -1;

    if (!shard_open(loader->set.shards[shard_index].path, fd, err)) return false;
    loader->open_files[slot].shard = shard_index;
    loader->open_files[slot].fd = *fd;
    return true;
}

// Sets *changed to whether the file of an open shard is not as it was when it was verified. It then must have
// the same header, and its blocks are verified again: a file is also touched, or replaced by a copy of it.
// Fails if nothing can tell whether it has the same tokens. In a shard without checksums only the time of its
// content counts. Some network file systems forget its nanoseconds, which are 0 then.
static inline bool dataloader_recheck(DataShard* shard, int fd, bool* changed, Error* err) {
    struct stat now;
    ShardHeader h;
    const struct stat* then = &shard->file;
    if (fstat(fd, &now) != 0) return fail(err, "%s: cannot stat: %s", shard->path, strerror(errno));
    *changed = now.st_dev != then->st_dev || now.st_ino != then->st_ino || now.st_size != then->st_size ||
               memcmp(&now.st_mtim, &then->st_mtim, sizeof now.st_mtim) != 0 ||
               memcmp(&now.st_ctim, &then->st_ctim, sizeof now.st_ctim) != 0;
    if (!*changed) return true;
    if (!shard_read_header_fd(fd, shard->path, &h, err)) return false;
    if (!shard_same_tokens(&h, &shard->header))
        return fail(err, "%s: was replaced by another shard while in use", shard->path);
    const long nanoseconds = now.st_mtim.tv_nsec, before = then->st_mtim.tv_nsec;
    const bool written = now.st_mtim.tv_sec != then->st_mtim.tv_sec ||
                         (nanoseconds != before && nanoseconds != 0 && before != 0);
    if (!h.block_tokens && written)
        return fail(err,
                    "%s: was written while in use, and has no checksums to tell whether its tokens are the "
                    "same; restore it, and resume from the last checkpoint",
                    shard->path);
    memset(shard->verified, 0, sizeof shard->verified);
    shard->file = now;
    return true;
}

// The shard that contains `item`: the last one with first_item <= item. Shards without items are skipped,
// because the next shard has the same first_item.
static inline int64_t dataloader_find_shard(const DataLoader* loader, int64_t item) {
    int64_t i = loader->set.num_shards - 1;
    while (loader->set.shards[i].first_item > item) i--;
    return i;
}

// Verifies the blocks with tokens [first, first + count) of an open shard that were not verified before. A
// block is read as a whole; over an epoch, the dataset is read one time more.
static inline bool dataloader_verify(DataShard* shard, int fd, int64_t first, int64_t count, Error* err) {
    const ShardHeader* h = &shard->header;
    if (!h->block_tokens) return true;
    for (int64_t b = first / h->block_tokens; b <= (first + count - 1) / h->block_tokens; b++) {
        if (shard->verified[b]) continue;
        if (!shard_verify_block(fd, shard->path, h, b, err)) return false;
        shard->verified[b] = true;
    }
    return true;
}

// Reads tokens [first, first + count) of an open shard.
static inline bool dataloader_read_tokens(const DataLoader* loader, DataShard* shard, int fd, int64_t first,
                                          int64_t count, int32_t* tokens, Error* err) {
    return (loader->unverified || dataloader_verify(shard, fd, first, count, err)) &&
           shard_read_tokens(fd, shard->path, &shard->header, first, count, tokens, err);
}

// Reads sequence number `sequence`, counted over all epochs, into row[T+1].
static inline bool dataloader_read_sequence(DataLoader* loader, int64_t sequence, int32_t* row, Error* err) {
    const DataOptions* o = &loader->options;
    int64_t T = o->seq_len, D = loader->set.doc_len;
    int64_t i;
    const int k = mixture_part(&loader->set.mixture, sequence, &i);
    const MixturePart* part = &loader->set.mixture.parts[k];
    // each part has its own orders
    const uint64_t epoch = (uint64_t)(i / part->sequences) | (uint64_t)k << 48;
    i %= part->sequences;
    if (o->shuffle) i = random_permute(o->seed, epoch, part->sequences, i);
    const int64_t column = i / part->items, number = i % part->items, item = part->first_item + number;

    int64_t shard_index = dataloader_find_shard(loader, item);
    DataShard* shard = &loader->set.shards[shard_index];
    const int64_t begin = (item - shard->first_item) * (D > 0 ? D : T), count = D > 0 ? T : T + 1;
    int64_t first = begin + o->skip + column * T,
            n = count; // the first n tokens are there, others at `begin`
    if (loader->rolls) {
        const int64_t offset = (int64_t)(random_u64(loader->roll_seed, 0, (uint64_t)number) % (uint64_t)D);
        first = begin + (o->skip + column * T + offset) % D;
        if (n > begin + D - first) n = begin + D - first;
    }
    int32_t* tokens = row + (T + 1 - count);
    row[0] = (int32_t)o->end_of_text;
    int fd = -1;
    bool changed = true; // the file, while the tokens were read
    if (!dataloader_file(loader, shard_index, &fd, err)) return false;
    while (changed)
        if (!dataloader_recheck(shard, fd, &changed, err) ||
            !dataloader_read_tokens(loader, shard, fd, first, n, tokens, err) ||
            (n < count && !dataloader_read_tokens(loader, shard, fd, begin, count - n, tokens + n, err)) ||
            !dataloader_recheck(shard, fd, &changed, err))
            return false;
    const uint32_t id_bits = loader->set.masked ? ~SHARD_COUNTS : UINT32_MAX;
    for (int64_t t = 0; t < count; t++) {
        const uint32_t id = (uint32_t)tokens[t] & id_bits;
        if (id >= (uint64_t)o->vocab_size)
            return fail(err,
                        "%s: token %lld has id %u, outside the vocabulary of %lld; a new model gets a larger "
                        "one with --set vocab_size=N",
                        shard->path, (long long)(t < n ? first + t : begin + t - n), id,
                        (long long)o->vocab_size);
    }
    return true;
}

// Past the next batch: after the loader's last one of a stride comes the first one of the next.
static inline void dataloader_advance(const DataOptions* o, int64_t* position, int64_t* taken) {
    *taken += o->batch;
    if (*taken < o->share.count) return;
    *taken = 0;
    *position += o->share.stride;
}

// The reading thread: keeps the ring filled until stopped.
static inline void* dataloader_thread(void* argument) {
    DataLoader* loader = (DataLoader*)argument;
    const DataOptions* o = &loader->options;
    pthread_mutex_lock(&loader->lock);
    while (!loader->stop) {
        if (loader->filled == DATALOADER_RING) {
            pthread_cond_wait(&loader->batch_wanted, &loader->lock);
            continue;
        }
        DataBatch* batch = &loader->ring[(loader->head + loader->filled) % DATALOADER_RING];
        int64_t first = loader->read_position + o->share.first + loader->read_taken, seeks = loader->seeks;
        pthread_mutex_unlock(&loader->lock);
        batch->ok = true;
        for (int64_t b = 0; batch->ok && b < o->batch; b++)
            batch->ok = dataloader_read_sequence(loader, first + b, batch->tokens + b * (o->seq_len + 1),
                                                 &batch->err);
        pthread_mutex_lock(&loader->lock);
        if (seeks != loader->seeks) continue;
        dataloader_advance(o, &loader->read_position, &loader->read_taken);
        loader->filled++;
        pthread_cond_signal(&loader->batch_filled);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

// ----------------------------------------------------------------------------
// the interface

// Stops the reading thread and frees everything. Call once for a loader that was opened successfully.
static inline void dataloader_close(DataLoader* loader) {
    if (loader->started) {
        pthread_mutex_lock(&loader->lock);
        loader->stop = true;
        pthread_cond_signal(&loader->batch_wanted);
        pthread_mutex_unlock(&loader->lock);
        pthread_join(loader->thread, NULL);
    }
    pthread_cond_destroy(&loader->batch_wanted);
    pthread_cond_destroy(&loader->batch_filled);
    pthread_mutex_destroy(&loader->lock);
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++)
        if (loader->open_files[i].shard >= 0) close(loader->open_files[i].fd);
    for (int i = 0; i < DATALOADER_RING; i++) free(loader->ring[i].tokens);
    dataset_free(&loader->set);
    memset(loader, 0, sizeof *loader);
}

// The share of a rank of `world` in `batches` batches of B sequences: contiguous, and at most one batch more
// than another rank's.
static inline DataShare data_share(int64_t batches, int64_t B, int rank, int world) {
    int64_t begin = batches * rank / world, end = batches * (rank + 1) / world;
    DataShare share = {batches * B, begin * B, (end - begin) * B};
    return share;
}

// Opens the shards that match `patterns` (shell patterns, separated by commas, or a mixture) at position 0.
// Reads headers only; tokens are read from the first dataloader_next on. The loader must not move in memory
// until it is closed. On error there is nothing to close.
static inline bool dataloader_open(DataLoader* loader, const char* patterns, const DataOptions* options,
                                   Error* err) {
    int64_t T = options->seq_len, B = options->batch, V = options->vocab_size;
    if (T < 1 || T > INT32_MAX - 1 || B < 1 || B > INT32_MAX || V < 1 || V > INT32_MAX)
        return fail(err, "'%s': invalid batch of %s of %s, vocabulary of %lld", patterns,
                    counted(B, "sequence").text, counted(T, "token").text, (long long)V);
    if (options->end_of_text < 0 || options->end_of_text >= V)
        return fail(err, "'%s': the end-of-text token %lld is outside the vocabulary of %lld", patterns,
                    (long long)options->end_of_text, (long long)V);
    const DataShare* share = &options->share;
    if (share->first < 0 || share->count < 0 || share->count > share->stride - share->first ||
        share->first % B != 0 || share->count % B != 0)
        return fail(err, "'%s': sequences %lld to %lld of %lld are not batches of %lld", patterns,
                    (long long)share->first, (long long)(share->first + share->count),
                    (long long)share->stride, (long long)B);
    memset(loader, 0, sizeof *loader);
    loader->options = *options;
    loader->set.seq_len = T, loader->set.skip = options->skip, loader->set.vocab_size = V;
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++) loader->open_files[i].shard = -1;
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->batch_filled, NULL);
    pthread_cond_init(&loader->batch_wanted, NULL);
    if (!dataset_open(&loader->set, patterns, err)) {
        dataloader_close(loader);
        return false;
    }
    for (int i = 0; i < DATALOADER_RING; i++)
        loader->ring[i].tokens = (int32_t*)xcalloc((size_t)B * (size_t)(T + 1), sizeof(int32_t));
    return true;
}

// The number of sequences in an epoch, over all ranks; of a mixture, before one is read again.
static inline int64_t dataloader_sequences(const DataLoader* loader) { return loader->set.sequences; }

// The number of sequences consumed by all ranks, between two strides. A checkpoint stores it; a resumed run
// seeks to it.
static inline int64_t dataloader_position(const DataLoader* loader) { return loader->position; }

// Makes the next batch the one at `position`. Dies if the position is negative or above INT64_MAX / 2, the
// limit that keeps further batches from overflowing it.
static inline void dataloader_seek(DataLoader* loader, int64_t position) {
    if (position < 0 || position > INT64_MAX / 2)
        die("%lld is not a position in a dataset", (long long)position);
    pthread_mutex_lock(&loader->lock);
    loader->position = loader->read_position = position;
    loader->taken = loader->read_taken = 0;
    loader->filled = 0;
    loader->seeks++;
    pthread_cond_signal(&loader->batch_wanted);
    pthread_mutex_unlock(&loader->lock);
}

// Splits the T + 1 tokens of a row with a mask into T inputs and T targets. Returns the number of targets
// that do not count.
static inline int64_t dataloader_unmask(int32_t* inputs, int32_t* targets, const int32_t* row, int64_t T) {
    int64_t uncounted = 0;
    for (int64_t t = 0; t < T; t++) {
        const uint32_t next = (uint32_t)row[t + 1];
        inputs[t] = (int32_t)((uint32_t)row[t] & ~SHARD_COUNTS);
        targets[t] = next & SHARD_COUNTS ? (int32_t)(next & ~SHARD_COUNTS) : TARGET_NONE;
        uncounted += targets[t] == TARGET_NONE;
    }
    return uncounted;
}

// Copies the next batch to inputs [B,T] and targets [B,T] and advances the position. On error the outputs are
// undefined, the position is unchanged, and calls return the same error until a seek. Not thread-safe. Not to
// be called where count is 0.
static inline bool dataloader_next(DataLoader* loader, int32_t* inputs, int32_t* targets, Error* err) {
    if (!loader->started) {
        int rc = pthread_create(&loader->thread, NULL, dataloader_thread, loader);
        if (rc != 0) return fail(err, "cannot start the thread that reads the data: %s", strerror(rc));
        loader->started = true;
    }
    pthread_mutex_lock(&loader->lock);
    while (loader->filled == 0) pthread_cond_wait(&loader->batch_filled, &loader->lock);
    const DataBatch* batch = &loader->ring[loader->head];
    pthread_mutex_unlock(&loader->lock); // this thread owns the filled batch; the reading thread continues

    if (!batch->ok) {
        *err = batch->err;
        return false;
    }
    const DataOptions* o = &loader->options;
    const int64_t T = o->seq_len;
    for (int64_t b = 0; b < o->batch; b++) {
        const int32_t* row = batch->tokens + b * (T + 1);
        if (loader->set.masked) {
            loader->uncounted += dataloader_unmask(inputs + b * T, targets + b * T, row, T);
        } else {
            memcpy(inputs + b * T, row, (size_t)T * sizeof *row);
            memcpy(targets + b * T, row + 1, (size_t)T * sizeof *row);
        }
        if (loader->counts_documents)
            count_documents(&loader->documents, inputs + b * T, T, o->end_of_text, &loader->windows);
    }
    pthread_mutex_lock(&loader->lock);
    loader->head = (loader->head + 1) % DATALOADER_RING;
    loader->filled--;
    pthread_cond_signal(&loader->batch_wanted);
    pthread_mutex_unlock(&loader->lock);
    dataloader_advance(o, &loader->position, &loader->taken);
    return true;
}
