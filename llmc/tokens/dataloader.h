/*
The data loader of both trainers: from data shards (shard.h) to batches of sequences.

A data set is the shards that match a pattern, sorted by name. It has n sequences of T tokens, in this order:
  documents (D > 0)   D / T columns a document. Sequence (document r, column k) is tokens [kT, (k+1)T) of the
                      document; its input is the same shifted right by one with end-of-text first, so that
                      every token is a target. All documents' column 0 comes first, then column 1, and so on.
                      The last D mod T tokens of a document are never used.
  a stream (D = 0)    windows at p = 0, T, 2T, ... of each shard: input [p, p+T), target [p+1, p+T+1). A
                      window never crosses into the next shard.
Past the end it starts over. A shuffled data set is permuted anew in each of these epochs.

The only state is the position: the number of sequences consumed by all ranks since training began. A global
batch is the next world * B sequences, of which rank r takes the r-th group of B. Hence a run resumes exactly,
also on another number of ranks.

A thread reads the next batches while the caller computes on this one. It reads with pread, not through a
mapping: there a failing disk is a signal, here it is an error. What it finds wrong it hands over at the batch
where it belongs: the batches before that one are still good.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <glob.h>
#include <pthread.h>
#include "../base/common.h"
#include "../base/random.h"
#include "shard.h"

#define DATALOADER_RING       4  // batches read ahead
#define DATALOADER_OPEN_FILES 64 // a data set may have more shards than a process may have open files

typedef struct {
    char* path;
    ShardHeader header;
    int64_t first_item; // items of the shards before it; an item is a document, or a window of a stream
} DataShard;

typedef struct {
    int32_t* tokens; // [B, T+1]: a row is the input, and from its second token on the target
    bool ok;
    Error err; // why, if not ok
} DataBatch;

typedef struct {
    // the data set and the share of it that is ours; fixed after open
    DataShard* shards;
    int64_t num_shards;
    int64_t doc_len;   // D
    int64_t items;     // documents, or windows, over all shards
    int64_t sequences; // n: items times columns
    int64_t B, T, V, eot, rank, world;
    bool shuffle;
    uint64_t seed;
    // the caller's
    int64_t position;
    bool started; // the thread runs
    pthread_t thread;
    // the thread's: descriptors of shards, each in the place that its number picks
    struct {
        int64_t shard; // -1: free
        int fd;
    } open_files[DATALOADER_OPEN_FILES];
    // shared, under the lock. A filled batch is the caller's to read, any other is the thread's to fill
    DataBatch ring[DATALOADER_RING];
    int64_t head, filled;  // batches head, head + 1, ... head + filled - 1 of the ring are filled
    int64_t read_position; // of the batch to be read next
    int64_t seeks;         // tells the thread that the batch it reads is no longer wanted
    bool stop;
    pthread_mutex_t lock;
    pthread_cond_t batch_filled, batch_wanted;
} DataLoader;

// ----------------------------------------------------------------------------
// the list of shards

static inline int data_shard_compare(const void* a, const void* b) {
    return strcmp(((const DataShard*)a)->path, ((const DataShard*)b)->path);
}

// Lists the files that match any of the patterns, which commas separate, sorted by name.
static inline bool dataloader_list(DataLoader* loader, const char* patterns, Error* err) {
    char pattern[PATH_LENGTH];
    for (const char* p = patterns;;) {
        size_t length = strcspn(p, ",");
        if (length == 0 || length >= sizeof pattern)
            return fail(err, "'%s': needs file patterns separated by single commas", patterns);
        memcpy(pattern, p, length);
        pattern[length] = '\0';

        glob_t found;
        int rc = glob(pattern, GLOB_ERR, NULL, &found);
        if (rc != 0) {
            globfree(&found);
            return fail(err, "'%s': %s", pattern,
                        rc == GLOB_NOMATCH ? "no file matches" : "cannot search for files that match");
        }
        size_t total = (size_t)loader->num_shards + found.gl_pathc;
        loader->shards = (DataShard*)xrealloc(loader->shards, total * sizeof(DataShard));
        for (size_t i = 0; i < found.gl_pathc; i++) {
            DataShard* shard = &loader->shards[loader->num_shards++];
            memset(shard, 0, sizeof *shard);
            shard->path = xstrdup(found.gl_pathv[i]);
        }
        globfree(&found);
        p += length;
        if (*p++ == '\0') break;
    }
    qsort(loader->shards, (size_t)loader->num_shards, sizeof(DataShard), data_shard_compare);
    for (int64_t i = 1; i < loader->num_shards; i++)
        if (data_shard_compare(&loader->shards[i - 1], &loader->shards[i]) == 0)
            return fail(err, "'%s': matches %s twice", patterns, loader->shards[i].path);
    return true;
}

// Checks that a shard fits the model, and the first shard of the data set.
static inline bool dataloader_check(const DataLoader* loader, const DataShard* shard, Error* err) {
    const DataShard* first = &loader->shards[0];
    const ShardHeader *h = &shard->header, *h0 = &first->header;
    if (h->doc_len != h0->doc_len)
        return fail(err, "%s has documents of %lld tokens, %s of %lld (0: a stream); use one data set",
                    shard->path, (long long)h->doc_len, first->path, (long long)h0->doc_len);
    if (h->vocab_size != h0->vocab_size)
        return fail(err, "%s has a vocabulary of %lld, %s of %lld (0: not said); use one data set",
                    shard->path, (long long)h->vocab_size, first->path, (long long)h0->vocab_size);
    if (h->bytes_per_token != h0->bytes_per_token)
        return fail(err, "%s has tokens of %d bytes, %s of %d; use one data set", shard->path,
                    h->bytes_per_token, first->path, h0->bytes_per_token);
    if (h->vocab_size > loader->V)
        return fail(err, "%s: its vocabulary of %lld is larger than the model's %lld", shard->path,
                    (long long)h->vocab_size, (long long)loader->V);
    if (h->doc_len > 0 && h->doc_len < loader->T)
        return fail(err, "%s: its documents of %lld tokens are shorter than a sequence of %lld", shard->path,
                    (long long)h->doc_len, (long long)loader->T);
    return true;
}

// Reads and checks all headers, and numbers the items.
static inline bool dataloader_index(DataLoader* loader, const char* patterns, Error* err) {
    const char* too_short = NULL;
    int64_t T = loader->T, num_too_short = 0;
    for (int64_t i = 0; i < loader->num_shards; i++) {
        DataShard* shard = &loader->shards[i];
        const ShardHeader* h = &shard->header;
        if (!shard_read_header(shard->path, &shard->header, err)) return false;
        if (!dataloader_check(loader, shard, err)) return false;
        shard->first_item = loader->items;
        int64_t items = h->doc_len > 0 ? h->tokens / h->doc_len : (h->tokens - 1) / T;
        if (items == 0 && num_too_short++ == 0) too_short = shard->path;
        loader->items += items;
    }
    if (loader->items == 0)
        return fail(err, "'%s': no shard has the %lld tokens of a sequence and its last target", patterns,
                    (long long)T + 1);
    loader->doc_len = loader->shards[0].header.doc_len;
    loader->sequences = loader->items * (loader->doc_len > 0 ? loader->doc_len / T : 1);
    if (loader->rank != 0) return true;
    if (num_too_short > 0)
        warn("%lld of %lld shards, such as %s, are shorter than a sequence and its last target, %lld tokens; "
             "they are not used",
             (long long)num_too_short, (long long)loader->num_shards, too_short, (long long)T + 1);
    if (loader->doc_len % T != 0)
        warn("'%s': the last %lld of the %lld tokens of a document are never used, with sequences of %lld",
             patterns, (long long)(loader->doc_len % T), (long long)loader->doc_len, (long long)T);
    return true;
}

// ----------------------------------------------------------------------------
// reading a batch, in the thread

// A descriptor of the shard, open already or opened now; -1 on error.
static inline int dataloader_file(DataLoader* loader, int64_t shard_index, Error* err) {
    int64_t place = shard_index % DATALOADER_OPEN_FILES;
    if (loader->open_files[place].shard == shard_index) return loader->open_files[place].fd;
    if (loader->open_files[place].shard >= 0) close(loader->open_files[place].fd);
    loader->open_files[place].shard = -1;

    const DataShard* shard = &loader->shards[shard_index];
    ShardHeader now;
    int fd = shard_open(shard->path, err);
    if (fd < 0) return -1;
    bool ok = shard_read_header_fd(fd, shard->path, &now, err);
    if (ok && (now.tokens != shard->header.tokens || now.doc_len != shard->header.doc_len ||
               now.bytes_per_token != shard->header.bytes_per_token))
        ok = fail(err, "%s: was replaced by another shard while in use", shard->path);
    if (!ok) {
        close(fd);
        return -1;
    }
    loader->open_files[place].shard = shard_index;
    return loader->open_files[place].fd = fd;
}

// The last shard whose first item is not behind `item`: the one that holds it, as shards without items come
// before one with the same first item.
static inline int64_t dataloader_find_shard(const DataLoader* loader, int64_t item) {
    int64_t low = 0, high = loader->num_shards;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (loader->shards[middle].first_item <= item)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Reads sequence number `sequence`, counted over all epochs, into row[T+1].
static inline bool dataloader_read_sequence(DataLoader* loader, int64_t sequence, int32_t* row, Error* err) {
    int64_t T = loader->T, D = loader->doc_len;
    int64_t epoch = sequence / loader->sequences, i = sequence % loader->sequences;
    if (loader->shuffle) i = random_permute(loader->seed, (uint64_t)epoch, loader->sequences, i);
    int64_t column = i / loader->items, item = i % loader->items;

    int64_t shard_index = dataloader_find_shard(loader, item);
    const DataShard* shard = &loader->shards[shard_index];
    int64_t first = (item - shard->first_item) * (D > 0 ? D : T) + column * T;
    int64_t count = D > 0 ? T : T + 1;
    int32_t* tokens = row + (T + 1 - count);
    row[0] = (int32_t)loader->eot;
    int fd = dataloader_file(loader, shard_index, err);
    if (fd < 0) return false;
    if (!shard_read_tokens(fd, shard->path, &shard->header, first, count, tokens, err)) return false;
    for (int64_t t = 0; t < count; t++)
        if ((uint32_t)tokens[t] >= (uint64_t)loader->V)
            return fail(err, "%s: token %lld has id %u, outside the vocabulary of %lld", shard->path,
                        (long long)(first + t), (uint32_t)tokens[t], (long long)loader->V);
    return true;
}

// Reads our share of the global batch at `position`.
static inline bool dataloader_read_batch(DataLoader* loader, int64_t position, DataBatch* batch) {
    for (int64_t b = 0; b < loader->B; b++) {
        int32_t* row = batch->tokens + b * (loader->T + 1);
        int64_t sequence = position + loader->rank * loader->B + b;
        if (!dataloader_read_sequence(loader, sequence, row, &batch->err)) return false;
    }
    return true;
}

// Keeps the ring filled until told to stop.
static inline void* dataloader_thread(void* argument) {
    DataLoader* loader = (DataLoader*)argument;
    pthread_mutex_lock(&loader->lock);
    while (!loader->stop) {
        if (loader->filled == DATALOADER_RING) {
            pthread_cond_wait(&loader->batch_wanted, &loader->lock);
            continue;
        }
        DataBatch* batch = &loader->ring[(loader->head + loader->filled) % DATALOADER_RING];
        int64_t position = loader->read_position, seeks = loader->seeks;
        pthread_mutex_unlock(&loader->lock);
        batch->ok = dataloader_read_batch(loader, position, batch);
        pthread_mutex_lock(&loader->lock);
        if (seeks != loader->seeks) continue;
        loader->read_position += loader->B * loader->world;
        loader->filled++;
        pthread_cond_signal(&loader->batch_filled);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

// ----------------------------------------------------------------------------
// the interface

// Stops the thread and frees everything. For a loader that open returned true for, at any time; once.
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
    for (int64_t i = 0; i < loader->num_shards; i++) free(loader->shards[i].path);
    free(loader->shards);
    memset(loader, 0, sizeof *loader);
}

// Opens the shards that match `patterns` (as for the shell; several separated by commas) for rank `rank` of
// `world`, in batches of B sequences of T tokens a rank, at position 0. V is the model's vocabulary: an id
// outside it is an error. eot is what a document's sequences begin with. seed matters only with shuffle. Only
// headers are read here, tokens from the first dataloader_next on. The loader must stay where it is in memory
// until it is closed. On error there is nothing to close.
static inline bool dataloader_open(DataLoader* loader, const char* patterns, int64_t T, int64_t B, int64_t V,
                                   int64_t eot, int64_t rank, int64_t world, bool shuffle, uint64_t seed,
                                   Error* err) {
    if (T < 1 || T > INT32_MAX - 1 || B < 1 || B > INT32_MAX || V < 1 || V > INT32_MAX)
        return fail(err, "'%s': cannot be read as %lld sequences of %lld tokens out of %lld", patterns,
                    (long long)B, (long long)T, (long long)V);
    if (eot < 0 || eot >= V)
        return fail(err, "'%s': end-of-text, %lld, is outside the vocabulary of %lld", patterns,
                    (long long)eot, (long long)V);
    if (rank < 0 || rank >= world || world > INT32_MAX)
        return fail(err, "'%s': there is no rank %lld of %lld", patterns, (long long)rank, (long long)world);
    memset(loader, 0, sizeof *loader);
    loader->T = T;
    loader->B = B;
    loader->V = V;
    loader->eot = eot;
    loader->rank = rank;
    loader->world = world;
    loader->shuffle = shuffle;
    loader->seed = seed;
    for (int i = 0; i < DATALOADER_OPEN_FILES; i++) loader->open_files[i].shard = -1;
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->batch_filled, NULL);
    pthread_cond_init(&loader->batch_wanted, NULL);
    if (!dataloader_list(loader, patterns, err) || !dataloader_index(loader, patterns, err)) {
        dataloader_close(loader);
        return false;
    }
    for (int i = 0; i < DATALOADER_RING; i++)
        loader->ring[i].tokens = (int32_t*)xcalloc((size_t)B * (size_t)(T + 1), sizeof(int32_t));
    return true;
}

// n, the number of sequences in an epoch, over all ranks.
static inline int64_t dataloader_sequences(const DataLoader* loader) { return loader->sequences; }

// The number of sequences that all ranks together have consumed: what to save, and to seek to on resuming.
static inline int64_t dataloader_position(const DataLoader* loader) { return loader->position; }

// The next batch will be the one at `position`. Half the range is plenty, and leaves room to count on.
static inline void dataloader_seek(DataLoader* loader, int64_t position) {
    if (position < 0 || position > INT64_MAX / 2)
        die("%lld is no position in a data set", (long long)position);
    pthread_mutex_lock(&loader->lock);
    loader->position = loader->read_position = position;
    loader->filled = 0;
    loader->seeks++;
    pthread_cond_signal(&loader->batch_wanted);
    pthread_mutex_unlock(&loader->lock);
}

// Copies the next batch to inputs [B,T] and targets [B,T], and moves the position past it. On error the
// position stays, the outputs are undefined, and the error is the same until a seek. Call it from one thread.
static inline bool dataloader_next(DataLoader* loader, int32_t* inputs, int32_t* targets, Error* err) {
    if (!loader->started) {
        int rc = pthread_create(&loader->thread, NULL, dataloader_thread, loader);
        if (rc != 0) return fail(err, "cannot start the thread that reads the data: %s", strerror(rc));
        loader->started = true;
    }
    pthread_mutex_lock(&loader->lock);
    while (loader->filled == 0) pthread_cond_wait(&loader->batch_filled, &loader->lock);
    const DataBatch* batch = &loader->ring[loader->head];
    pthread_mutex_unlock(&loader->lock); // a filled batch is ours, and the thread reads on meanwhile

    if (!batch->ok) {
        *err = batch->err;
        return false;
    }
    int64_t T = loader->T;
    for (int64_t b = 0; b < loader->B; b++) {
        const int32_t* row = batch->tokens + b * (T + 1);
        memcpy(inputs + b * T, row, (size_t)T * sizeof *row);
        memcpy(targets + b * T, row + 1, (size_t)T * sizeof *row);
    }
    pthread_mutex_lock(&loader->lock);
    loader->head = (loader->head + 1) % DATALOADER_RING;
    loader->filled--;
    pthread_cond_signal(&loader->batch_wanted);
    pthread_mutex_unlock(&loader->lock);
    loader->position += loader->B * loader->world;
    return true;
}

#endif // LLMC_DATALOADER_H
