/*
Saves checkpoints in the background, one at a time, on all ranks together.

    saver_start     collective. Rank 0 creates the temporary folder. A thread of each rank then writes the
                    rank's numbers, or sends them to rank 0's thread where the rank does not see its disk, and
                    tells that thread how it went. Rank 0's thread waits for all, and if all have succeeded
                    gives the checkpoint its final name.
    saver_state     how far this rank's thread is; never waits
    saver_finish    collective. Waits for the threads, and tells all ranks how the save has ended

Training goes on between the two, but must not change the buffers of saver_start: the GPU trainer passes a
copy in pinned memory. No thread waits for training: a checkpoint gets its name while the main threads
evaluate, or wait for one another. A thread first checks that all numbers are finite. If a rank fails, rank
0's thread removes the temporary folder, and older checkpoints are unchanged. An error of a main thread, as of
the data, ends the run when the save has ended (message_hooks.writing). Called by train.h.
*/
#pragma once

#include <pthread.h>
#include "send.h"

typedef enum { SAVER_IDLE, SAVER_WRITING, SAVER_WRITTEN, SAVER_FAILED } SaverState;

typedef struct {
    World* world;
    const ParamTable* table; // belongs to the caller
    Shard shard;
    char out[PATH_LENGTH];
    int lock;   // of OUT/lock, for out_lock_held; -1: not known. Rank 0's belongs to the caller
    int keep;   // newest checkpoints that stay; 0: all
    bool* sees; // [world->size]: ranks that write into OUT themselves
    // of the save in progress
    CheckpointWriter writer;
    CheckpointTensors tensors;
    pthread_t thread;
    bool threaded;
    int state;      // SaverState; written by the thread with release, read with acquire
    int failed;     // rank 0's thread: the lowest rank that has failed; -1: none
    Error err;      // why
    bool published; // the checkpoint of the last save has its final name; on all ranks after saver_finish
} Saver;

static int saver_writing;           // a thread of this process writes a checkpoint
static __thread bool saver_is_here; // and is this one

// For die(), which waits as long as this rises: 0 where no checkpoint is in the making, or not any more
// because it is its own thread that dies.
static inline int64_t saver_progress(void) {
    if (saver_is_here) __atomic_store_n(&saver_writing, 0, __ATOMIC_RELEASE);
    if (!__atomic_load_n(&saver_writing, __ATOMIC_ACQUIRE)) return 0;
    return 1 + __atomic_load_n(&checkpoint_pieces_done, __ATOMIC_RELAXED);
}

// How far this rank's thread is. Never waits. WRITTEN or FAILED: saver_finish will not wait for this rank. On
// rank 0 WRITTEN means that the checkpoint has its final name, FAILED that a rank has failed.
static inline SaverState saver_state(const Saver* s) {
    return (SaverState)__atomic_load_n(&s->state, __ATOMIC_ACQUIRE);
}

// Collective: prepares saving to OUT, which it creates, and finds out which ranks see it. lock: rank 0's of
// out_lock, or -1; the other ranks that see it open OUT/lock to compare. `table` was built for world->size
// ranks and outlives the saver. On error, which is the same on all ranks, there is nothing to close.
static inline bool saver_open(Saver* s, World* world, const ParamTable* table, const char* out, int lock,
                              int keep, Error* err) {
    char path[PATH_LENGTH];
    memset(s, 0, sizeof *s);
    s->world = world;
    s->table = table;
    s->shard = params_shard(table, world->rank, world->size);
    s->keep = keep;
    s->state = SAVER_IDLE;
    snprintf(s->out, sizeof s->out, "%s", out);
    s->sees = (bool*)xcalloc((size_t)world->size, sizeof *s->sees);
    if (!checkpoint_find_writers(world, out, s->sees, err)) {
        free(s->sees);
        return false;
    }
    path_join(path, out, "lock");
    message_hooks.writing = saver_progress;
    s->lock = world->rank == 0 ? lock : s->sees[world->rank] ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    return true;
}

// Frees a saver without a save in progress.
static inline void saver_close(Saver* s) {
    assert(s->state == SAVER_IDLE);
    if (s->world->rank != 0 && s->lock >= 0) close(s->lock);
    free(s->sees);
    memset(s, 0, sizeof *s);
}

// Another rank's thread tells rank 0's whether it has succeeded, and then its checksums.
static inline bool saver_send_result(Saver* s, bool ok) {
    const CheckpointVote vote = checkpoint_vote_of(ok, &s->err);
    return world_send(s->world, 0, &vote, sizeof vote) &&
           (!ok || world_send(s->world, 0, s->writer.sums, (size_t)s->writer.num_sums * sizeof(uint64_t)));
}

// Rank 0's thread hears all others, and adds their checksums to its own. False where one has failed.
static inline bool saver_hear_results(Saver* s, bool ok) {
    const size_t n = (size_t)s->writer.num_sums;
    uint64_t* sums = (uint64_t*)xcalloc(n, sizeof *sums);
    s->failed = ok ? -1 : 0;
    for (int rank = 1; rank < s->world->size; rank++) {
        CheckpointVote vote;
        const bool heard = world_receive(s->world, rank, &vote, sizeof vote) &&
                           (!vote.ok || world_receive(s->world, rank, sums, n * sizeof *sums));
        if (!heard) fail(&vote.err, "the connection to rank %d is lost", rank);
        for (size_t i = 0; heard && vote.ok && i < n; i++) s->writer.sums[i] += sums[i];
        if ((heard && vote.ok) || s->failed >= 0) continue;
        s->failed = heard ? rank : 0;
        s->err = vote.err;
    }
    free(sums);
    return s->failed < 0;
}

// The thread of a rank.
static inline void* saver_thread(void* argument) {
    Saver* s = (Saver*)argument;
    const int rank = s->world->rank;
    const CheckpointPart part = {s->table, &s->shard, &s->tensors, s->world};
    saver_is_here = true;
    bool ok = checkpoint_check_finite(&part, &s->err);
    if (!s->sees[rank]) {
        Error lost;
        const bool sent = checkpoint_send_shard(&s->writer, &part, ok, &lost);
        if (ok && !sent) s->err = lost;
        ok = ok && sent;
    } else {
        ok = ok && checkpoint_write_shard(&s->writer, &part, &s->err);
        if (rank == 0) ok = checkpoint_receive_shards(&s->writer, s->sees, s->world, ok, &s->err);
    }
    if (rank != 0) {
        ok = saver_send_result(s, ok) && ok;
    } else if (!saver_hear_results(s, ok)) {
        ok = false;
        checkpoint_writer_sweep(&s->writer);
    } else {
        ok = checkpoint_finish(&s->writer, s->keep, &s->err);
        if (!ok) s->failed = 0;
        s->published = s->writer.published;
    }
    __atomic_store_n(&s->state, ok ? SAVER_WRITTEN : SAVER_FAILED, __ATOMIC_RELEASE);
    __atomic_store_n(&saver_writing, 0, __ATOMIC_RELEASE);
    saver_is_here = false; // where this is the main thread
    return NULL;
}

// Collective: starts to save the checkpoint of r->state->step. Copies what it needs of the record. The
// buffers of `t` must not change until saver_finish. No save may be in progress. Fails on all ranks, with
// rank 0's message, if rank 0 cannot create the files, as on a full disk; then nothing has started.
static inline bool saver_start(Saver* s, const CheckpointRecord* r, const CheckpointTensors* t, Error* err) {
    assert(s->state == SAVER_IDLE);
    bool ok = checkpoint_writer_open(&s->writer, s->out, r->state->step, s->table, t->element_bytes, err);
    const bool is_open = ok; // the same on all ranks
    s->writer.lock = s->lock;
    if (ok && s->world->rank == 0) ok = checkpoint_create(&s->writer, r, err);
    ok = checkpoint_told(s->world, ok, err);
    if (!ok) {
        if (is_open) checkpoint_writer_close(&s->writer);
        return false;
    }
    s->tensors = *t;
    s->published = false;
    s->failed = -1;
    s->state = SAVER_WRITING;
    saver_writing = 1;
    s->threaded = pthread_create(&s->thread, NULL, saver_thread, s) == 0;
    if (!s->threaded) saver_thread(s); // no more threads: training waits, but other ranks need not fail
    return true;
}

// Collective: waits for the save in progress to end. True on all ranks, or false on all with the message of
// the lowest rank that failed: older checkpoints are unchanged, and there is no new one, or with s->published
// one that a power failure may still lose. *mine (which may be NULL) says whether this rank is the one that
// failed. Without a save in progress it is true at once.
static inline bool saver_finish(Saver* s, bool* mine, Error* err) {
    struct {
        bool published;
        int failed;
        Error err;
    } result;
    if (mine) *mine = false;
    if (saver_state(s) == SAVER_IDLE) return true;
    if (s->threaded) pthread_join(s->thread, NULL);
    memset(&result, 0, sizeof result);
    result.published = s->published, result.failed = s->failed;
    if (s->failed >= 0) result.err = s->err;
    world_broadcast(s->world, &result, sizeof result); // rank 0's
    s->published = result.published;
    if (result.failed >= 0) *err = result.err;
    if (mine) *mine = result.failed == s->world->rank;
    checkpoint_writer_close(&s->writer);
    s->state = SAVER_IDLE;
    return result.failed < 0;
}
