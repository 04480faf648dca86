/*
Lockstep of ranks that share the heads of each sequence in --requests and --generate (--sequence-ranks N,
llmc/model/sequence.h). Every rank has the whole engine, with the same sequences in the same slots, and a cache of its
own heads alone; all do the same passes. So what they do next depends only on options and on

 1. the bytes of requests and prompts    rank 0 reads them         lockstep_read, lockstep_line
 2. scores and drawn tokens              those of rank 0           lockstep_scores
 3. free pages                           of the rank with fewest   lockstep_free: heads do not forget alike
 4. whether there is memory for a cache  on all ranks              lockstep_all

Most functions are collective. Without other ranks (world NULL) they do what one process does.
While rank 0 waits for input the watch (llmc/ranks/watch.h) knows that it works. Called by engine.h, requests.h and
generate.h.
*/
#pragma once

#include <poll.h>
#include "../model/extension.h"
#include "../ranks/world.h"

typedef struct {
    World* world;  // NULL: alone
    int64_t spare; // free pages of this rank beyond those of the rank with fewest
    bool unequal;  // ranks have given back pages since that was counted
} Lockstep;

// world: of ranks that share heads; NULL or one rank: alone.
static inline Lockstep lockstep_new(World* world) {
    const Lockstep alone = {NULL, 0, false}, l = {world, 0, false};
    return world && world->size > 1 ? l : alone;
}

// GiB of the pages of a cache on this rank.
static inline double lockstep_cache_gib(const CacheSizes* sizes, int64_t page_bytes) {
    return (double)sizes->pages * (double)page_bytes / (1 << 30);
}

// Prints, by rank 0 on stderr, what ranks share.
static inline void lockstep_print(const Lockstep* l, const CacheSizes* sizes, int64_t num_heads,
                                  int64_t page_bytes) {
    if (!l->world || l->world->rank > 0) return;
    fprintf(stderr, "%s share each sequence, of up to %s: %lld of %s and a cache of %.2f GiB on each\n",
            counted(l->world->size, "rank").text, counted(sizes->capacity, "token").text,
            (long long)(num_heads / l->world->size), counted(num_heads, "head").text,
            lockstep_cache_gib(sizes, page_bytes));
}

// Is it so on all ranks?
static inline bool lockstep_all(const Lockstep* l, bool mine) {
    double refusals = mine ? 0 : 1;
    if (l->world) world_sum(l->world, &refusals, 1);
    return refusals == 0;
}

// Free pages that all ranks have, of which this one has num_free. They take as many as one another.
static inline int64_t lockstep_free(Lockstep* l, int64_t num_free) {
    if (l->world && l->unequal) {
        int64_t *all = (int64_t*)xcalloc((size_t)l->world->size, sizeof *all), least = num_free;
        world_allgather(l->world, all, &num_free, sizeof num_free);
        for (int r = 0; r < l->world->size; r++)
            if (all[r] < least) least = all[r];
        l->spare = num_free - least;
        l->unequal = false;
        free(all);
    }
    return num_free - l->spare;
}

// The results of a pass become rank 0's.
static inline void lockstep_scores(const Lockstep* l, void* scores, size_t bytes) {
    if (!l->world) return;
    watch_progress(l->world);
    world_broadcast(l->world, scores, bytes);
}

// Waits until a file has something to read, or has ended.
static inline void lockstep_await(const Lockstep* l, int file) {
    struct pollfd ready = {file, POLLIN, 0};
    while (l->world && poll(&ready, 1, 100) == 0) watch_alive(l->world);
}

// Bytes that `to`, with room for `most`, gets of a file that rank 0 has open; 0: the file has ended; -1: none
// is there yet, unless it `waits` for them. Errors call the file `name`.
static inline int64_t lockstep_read(const Lockstep* l, int file, const char* name, bool waits, char* to,
                                    size_t most) {
    struct pollfd ready = {file, POLLIN, 0};
    int64_t got = -1;
    const bool reads = !l->world || l->world->rank == 0;
    if (reads && waits) lockstep_await(l, file);
    if (reads && (waits || poll(&ready, 1, 0) != 0)) {
        do got = read(file, to, most);
        while (got < 0 && errno == EINTR);
        if (got < 0) die("--requests %s: cannot read: %s", name, strerror(errno));
    }
    if (l->world) world_broadcast(l->world, &got, sizeof got);
    if (l->world && got > 0) world_broadcast(l->world, to, (size_t)got);
    return got;
}

// Makes room for a line of so many bytes and its end.
static inline void lockstep_room(char** line, size_t* capacity, int64_t bytes) {
    if ((size_t)bytes < *capacity) return;
    *capacity = 2 * (size_t)bytes + 64;
    *line = (char*)xrealloc(*line, *capacity);
}

// The next line of rank 0's standard input, as getline has it; -1: none is left.
static inline ssize_t lockstep_line(const Lockstep* l, char** line, size_t* capacity) {
    if (!l->world) return getline(line, capacity, stdin);
    int64_t bytes = 0;
    for (char c = 0;
         l->world->rank == 0 && c != '\n';) { // not by stdio, which may hold a line that poll does not see
        lockstep_await(l, STDIN_FILENO);
        const ssize_t got = read(STDIN_FILENO, &c, 1);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) die("cannot read prompts from standard input: %s", strerror(errno));
        if (got == 0) break;
        lockstep_room(line, capacity, bytes + 1);
        (*line)[bytes++] = c;
    }
    world_broadcast(l->world, &bytes, sizeof bytes);
    lockstep_room(line, capacity, bytes);
    world_broadcast(l->world, *line, (size_t)bytes);
    (*line)[bytes] = '\0';
    return bytes > 0 ? (ssize_t)bytes : -1;
}
