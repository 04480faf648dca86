/*
Ranks of a test: processes of this machine, joined by socket pairs. Stands in for the connections of
llmc/ranks/world.h, so that a test needs no launcher and no port. Include it before what uses a World.

    static void body(World* world) { CHECK(world->size == 3, "..."); }      in every rank
    ranks_run(3, body);
*/
#pragma once

#include <sys/socket.h>
#include "../../llmc/ranks/world.h"
#include "check.h"

#define world_allgather ranks_allgather
#define world_broadcast ranks_broadcast
#define world_barrier   ranks_barrier
#define world_sum       ranks_sum
#define world_send      ranks_send
#define world_receive   ranks_receive
#define watch_alive     ranks_progress

enum { RANKS_MAX = 8, RANKS_SECONDS = 60 };
enum { RANKS_CONTROL, RANKS_BULK, RANKS_CHANNELS };

static int ranks_links[RANKS_CHANNELS][RANKS_MAX][2]; // rank 0's end and the rank's
static int ranks_progress_calls;

static inline void ranks_progress(World* w) {
    (void)w;
    __atomic_add_fetch(&ranks_progress_calls, 1, __ATOMIC_RELAXED);
}

// All bytes, or false at the end of the connection.
// Sends the bytes at `from`, or receives them at `to` where that is NULL.
static inline bool ranks_transfer(int fd, const void* from, void* to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = from ? send(fd, (const char*)from + done, bytes - done, MSG_NOSIGNAL)
                         : recv(fd, (char*)to + done, bytes - done, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

static inline int ranks_link(const World* w, int channel, int peer) {
    return w->rank == 0 ? ranks_links[channel][peer][0] : ranks_links[channel][w->rank][1];
}

static inline bool ranks_send(World* w, int peer, const void* data, size_t bytes) {
    return ranks_transfer(ranks_link(w, RANKS_BULK, peer), data, NULL, bytes);
}

static inline bool ranks_receive(World* w, int peer, void* data, size_t bytes) {
    return ranks_transfer(ranks_link(w, RANKS_BULK, peer), NULL, data, bytes);
}

static inline void ranks_broadcast(World* w, void* data, size_t bytes) {
    bool ok = w->rank == 0 || ranks_transfer(ranks_link(w, RANKS_CONTROL, 0), NULL, data, bytes);
    for (int r = 1; ok && w->rank == 0 && r < w->size; r++)
        ok = ranks_transfer(ranks_link(w, RANKS_CONTROL, r), data, NULL, bytes);
    if (!ok) die("rank %d: a connection is lost", w->rank);
}

static inline void ranks_allgather(World* w, void* all, const void* mine, size_t bytes) {
    bool ok = w->rank == 0 || ranks_transfer(ranks_link(w, RANKS_CONTROL, 0), mine, NULL, bytes);
    if (w->rank == 0) memcpy(all, mine, bytes);
    for (int r = 1; ok && w->rank == 0 && r < w->size; r++)
        ok = ranks_transfer(ranks_link(w, RANKS_CONTROL, r), NULL, (char*)all + (size_t)r * bytes, bytes);
    if (!ok) die("rank %d: a connection is lost", w->rank);
    ranks_broadcast(w, all, bytes * (size_t)w->size);
}

static inline void ranks_barrier(World* w) {
    char all[RANKS_MAX];
    ranks_allgather(w, all, "", 1);
}

static inline void ranks_sum(World* w, double* x, int n) {
    double* all = (double*)xcalloc((size_t)(w->size * n), sizeof *all);
    ranks_allgather(w, all, x, (size_t)n * sizeof *x);
    for (int i = 0; i < n; i++) {
        x[i] = 0;
        for (int r = 0; r < w->size; r++) x[i] += all[r * n + i];
    }
    free(all);
}

// Runs body in `size` processes. One check per rank: all its own checks pass, within RANKS_SECONDS.
static inline void ranks_run(int size, void (*body)(World* world)) {
    pid_t children[RANKS_MAX];
    assert(size <= RANKS_MAX);
    fflush(stdout);
    for (int channel = 0; channel < RANKS_CHANNELS; channel++)
        for (int r = 1; r < size; r++)
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ranks_links[channel][r]) != 0)
                die("socketpair: %s", strerror(errno));
    for (int rank = 0; rank < size; rank++) {
        children[rank] = fork();
        if (children[rank] < 0) die("fork: %s", strerror(errno));
        if (children[rank] > 0) continue;
        alarm(RANKS_SECONDS); // ends a rank that waits for ever
        World world;
        memset(&world, 0, sizeof world);
        world.rank = world.local_rank = rank;
        world.size = world.local_size = size;
        tests_failed = 0;
        for (int channel = 0; channel < RANKS_CHANNELS; channel++) // so that a rank's end is noticed
            for (int r = 1; r < size; r++)
                for (int end = 0; end < 2; end++)
                    if (rank != (end ? r : 0)) close(ranks_links[channel][r][end]);
        body(&world);
        fflush(stdout);
        _exit(tests_failed ? EXIT_FAILURE : EXIT_SUCCESS);
    }
    for (int channel = 0; channel < RANKS_CHANNELS; channel++)
        for (int r = 1; r < size; r++) close(ranks_links[channel][r][0]), close(ranks_links[channel][r][1]);
    for (int rank = 0; rank < size; rank++) {
        int status = -1;
        waitpid(children[rank], &status, 0);
        CHECK(status == 0, "rank %d of %d: status %#x", rank, size, (unsigned)status);
    }
}
