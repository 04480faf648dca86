/*
Saves checkpoints behind training's back, one at a time, on all ranks together.

    saver_start     collective. Rank 0 creates the temporary folder. A thread of each rank then writes the
                    rank's numbers, or sends them to rank 0's thread where the rank does not see its disk.
    saver_state     how far this rank's thread is; never waits
    saver_finish    collective. Waits for the threads. If all have succeeded rank 0 gives the checkpoint its
                    final name.

Training goes on between the two, but must not change the buffers of saver_start: the GPU trainer passes a
copy in pinned memory. A thread first checks that all numbers are finite. If a rank fails, all ranks are told
by saver_finish, rank 0 removes the temporary folder, and older checkpoints are unchanged. Called by train.h.
*/
#pragma once

#include <pthread.h>
#include "ranks.h"

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
    Error err;      // if SAVER_FAILED
    bool published; // on rank 0: the checkpoint of the last save has its final name
} Saver;

// How far this rank's thread is. Never waits. WRITTEN or FAILED: saver_finish will not wait for this rank.
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

// The thread of a rank.
static inline void* saver_thread(void* argument) {
    Saver* s = (Saver*)argument;
    const int rank = s->world->rank;
    const CheckpointPart part = {s->table, &s->shard, &s->tensors, s->world};
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
    __atomic_store_n(&s->state, ok ? SAVER_WRITTEN : SAVER_FAILED, __ATOMIC_RELEASE);
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
    s->state = SAVER_WRITING;
    s->threaded = pthread_create(&s->thread, NULL, saver_thread, s) == 0;
    if (!s->threaded) saver_thread(s); // no more threads: training waits, but other ranks need not fail
    return true;
}

// Collective: adds up the block checksums of all ranks, on every rank.
static inline void saver_sum_blocks(Saver* s) {
    const size_t n = (size_t)s->writer.num_sums, size = (size_t)s->world->size;
    uint64_t* all = (uint64_t*)xcalloc(n * size, sizeof *all);
    world_allgather(s->world, all, s->writer.sums, n * sizeof *all);
    for (size_t i = 0; i < n; i++) {
        s->writer.sums[i] = 0;
        for (size_t rank = 0; rank < size; rank++) s->writer.sums[i] += all[rank * n + i];
    }
    free(all);
}

// Collective: waits for the save in progress and completes it. True on all ranks, or false on all with the
// message of the lowest rank that failed: older checkpoints are unchanged, and there is no new one, or with
// s->published one that a power failure may still lose. *mine (which may be NULL) says whether this rank is
// the one that failed. Without a save in progress it is true at once.
static inline bool saver_finish(Saver* s, bool* mine, Error* err) {
    if (mine) *mine = false;
    if (saver_state(s) == SAVER_IDLE) return true;
    if (s->threaded) pthread_join(s->thread, NULL);
    bool ok = s->state == SAVER_WRITTEN;
    if (!ok) *err = s->err;
    ok = checkpoint_vote(s->world, ok, mine, err);
    if (ok) {
        saver_sum_blocks(s);
        if (s->world->rank == 0) ok = checkpoint_finish(&s->writer, s->keep, err);
        s->published = s->writer.published;
        ok = checkpoint_told(s->world, ok, err);
        if (mine) *mine = !ok && s->world->rank == 0;
    } else {
        if (s->world->rank == 0) checkpoint_writer_sweep(&s->writer);
        checkpoint_told(s->world, true, err); // rank 0 has swept before the rank that failed ends all
    }
    checkpoint_writer_close(&s->writer);
    s->state = SAVER_IDLE;
    return ok;
}
