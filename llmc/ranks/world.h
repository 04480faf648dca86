/*
The ranks of a run: who this process is, and what ranks say to one another outside a step.

    World* world = world_identify();    rank, size, local rank. Only rank 0 prints from here on
    ... command line ...
    world_connect(world, timeout);                  connections (link.h) and the watch thread (watch.h)
    ... world_allgather, world_broadcast, world_barrier, world_sum: collectives of the main threads ...
    watch_progress(world);                          every step
    world_close(world);                             collective: the run has ended well

One process alone opens no connection and starts no thread; all functions work, and cost nothing. Results are
in the order of ranks, so every rank gets the same bits each time. Called by the trainers and by run/.

Errors: a rank that calls die(), dies or hangs ends the run within seconds, with one line (ending.h). No
function returns an error, except world_send and world_receive.
*/
#pragma once

#include <sched.h>
#include <sys/prctl.h>
#include "mpirun.h"
#include "start.h"
#include "watch.h"

typedef struct World {
    int rank, size;             // 0 of 1: alone
    int local_rank, local_size; // among the ranks of this host
    char host[64];
    bool mpi; // started by mpirun; MPI is initialized from world_connect on
    LinkAddress address;
    double timeout;     // seconds
    const char* advice; // set before world_connect: what to do when a rank has failed; NULL: nothing
    bool watching;      // the watch thread runs
    bool may_report;    // before it does: this rank prints errors
    Link link;
    Watch watch;
} World;

static World world_instance; // of this process; the message hooks need it

// ----------------------------------------------------------------------------
// messages

// For die() and warn().
static inline bool world_may_print(bool fatal) {
    World* w = &world_instance;
    if (!fatal) return w->rank == 0;
    if (w->watching) return watch_claim(&w->watch);
    // Before the connections exist an error is most often one of all ranks, and rank 0's message ends them,
    // also where rank 0 begins seconds later. A rank that is alone with its error is still here after that.
    if (!w->may_report) (void)poll(NULL, 0, 10000);
    return true;
}

// Ends a rank after its message, or without one.
static inline void world_leave(bool printed) {
    World* w = &world_instance;
    if (w->watching) watch_said(&w->watch, printed);
    fflush(stdout);
    _exit(EXIT_FAILURE);
}

// Ends this process when its parent ends: ranks must not outlive a launcher that was killed.
static inline void world_follow_parent(void) {
    pid_t parent = getppid();
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) warn("cannot follow the launcher's end: %s", strerror(errno));
    if (getppid() != parent) _exit(EXIT_FAILURE);
}

// Warns once a host if this rank may use only one of several cores.
static inline void world_check_cores(const World* w, const char* remedy) {
    cpu_set_t cores;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (w->local_rank != 0 || sched_getaffinity(0, sizeof cores, &cores) != 0) return; // only advice
    if (CPU_COUNT(&cores) == 1 && online > 1)
        warn("%s: rank %d may use only one of the host's %s; %s", w->host, w->rank,
             counted(online, "core").text, remedy);
}

// ----------------------------------------------------------------------------
// start

// Says which rank this process is. Dies with one line if it is one of several and its environment is
// malformed. With several ranks, stdout of all but rank 0 is discarded from here on, and their warnings and
// errors until world_connect: they would be those of rank 0.
static inline World* world_identify(void) {
    World* w = &world_instance;
    Start s;
    Error err;
    memset(w, 0, sizeof *w);
    bool ok = start_identify(&s, &err);
    w->rank = s.rank;
    w->size = s.size;
    w->local_rank = s.local_rank;
    w->local_size = s.local_size;
    w->mpi = s.mpi;
    w->address = s.address;
    if (gethostname(w->host, sizeof w->host - 1) != 0) strcpy(w->host, "unknown");
    if (ok && w->size == 1) return w;
    if (ok) world_follow_parent(), world_check_cores(w, s.unbound);
    w->may_report = w->rank == 0;
    message_hooks.may_print = world_may_print;
    message_hooks.leave = world_leave;
    if (!ok) die("%s", err.msg);
    if (w->rank != 0 && !freopen("/dev/null", "w", stdout)) {
        w->may_report = true;
        die("/dev/null: cannot open: %s", strerror(errno));
    }
    return w;
}

// ----------------------------------------------------------------------------
// lost connections

// Call after an error that the end of another rank may have caused, also in NCCL or MPI: gives the watch 10 s
// to name that rank and to end this process. Returns if it does not, or on rank 0 waits for a checkpoint.
static inline void world_await_reason(World* w) {
    for (int i = 0; w->watching && i < 1000 && !watch_is_ending(&w->watch); i++) (void)poll(NULL, 0, 10);
}

// Ends this process after a collective has lost its connection to a rank.
__attribute__((noreturn)) static inline void world_lost(World* w, int peer) {
    world_await_reason(w);
    die("lost the connection to rank %d (%s, process %d)", peer, w->link.peers[peer].host,
        (int)w->link.peers[peer].pid);
}

// ----------------------------------------------------------------------------
// collectives, on the main thread

typedef enum { WORLD_ALLGATHER, WORLD_BROADCAST, WORLD_BARRIER, WORLD_SUM, WORLD_CLOSE } WorldCall;

// Before the data of every collective, so that ranks which take different ways through the program are
// noticed.
typedef struct {
    int64_t call, bytes;
} WorldHeader;

// Sends this rank's data. False: the connection is lost.
static inline bool world_put(World* w, int peer, WorldCall call, const void* data, size_t bytes) {
    WorldHeader header = {call, (int64_t)bytes};
    int fd = w->link.peers[peer].fd[LINK_CONTROL];
    return link_write(fd, &header, sizeof header) && link_write(fd, data, bytes);
}

// Receives the data of a rank. False: the connection is lost. Dies if that rank is in another collective.
static inline bool world_get(World* w, int peer, WorldCall call, void* data, size_t bytes) {
    static const char* const names[] = {"allgather", "broadcast", "barrier", "sum", "close"};
    WorldHeader header;
    int fd = w->link.peers[peer].fd[LINK_CONTROL];
    if (!link_read(fd, &header, sizeof header)) return false;
    if (header.call != (int64_t)call || header.bytes != (int64_t)bytes)
        die("rank %d (%s) is in another collective: %s of %s, here %s of %lld; run the same program with the "
            "same options on all ranks",
            peer, w->link.peers[peer].host,
            header.call >= 0 && header.call <= WORLD_CLOSE ? names[header.call] : "unknown",
            counted(header.bytes, "byte").text, names[call], (long long)bytes);
    return link_read(fd, data, bytes);
}

// Rank 0 gets the data of all ranks in all[size]. Returns -1, or the rank whose connection is lost.
static inline int world_gather(World* w, WorldCall call, void* all, const void* mine, size_t bytes) {
    if (w->rank != 0) return world_put(w, 0, call, mine, bytes) ? -1 : 0;
    for (int r = 1; r < w->size; r++)
        if (!world_get(w, r, call, (char*)all + (size_t)r * bytes, bytes)) return r;
    return -1;
}

// All get the data of rank 0. Returns -1, or the rank whose connection is lost.
static inline int world_spread(World* w, WorldCall call, void* data, size_t bytes) {
    if (w->rank != 0) return world_get(w, 0, call, data, bytes) ? -1 : 0;
    for (int r = 1; r < w->size; r++)
        if (!world_put(w, r, call, data, bytes)) return r;
    return -1;
}

// Every collective is an event that the watch counts: ranks that have come here wait for those that have not.
static inline void world_arrive(World* w) {
    if (w->watching) watch_count(&w->watch, true, -1);
}

// Collective: *all [size] gets every rank's `bytes`, in the order of ranks.
static inline void world_allgather(World* w, void* all, const void* mine, size_t bytes) {
    memmove((char*)all + (size_t)w->rank * bytes, mine, bytes);
    world_arrive(w);
    int lost = world_gather(w, WORLD_ALLGATHER, all, mine, bytes);
    if (lost < 0) lost = world_spread(w, WORLD_ALLGATHER, all, (size_t)w->size * bytes);
    if (lost >= 0) world_lost(w, lost);
}

// Collective: everyone gets rank 0's `bytes`.
static inline void world_broadcast(World* w, void* data, size_t bytes) {
    world_arrive(w);
    int lost = world_spread(w, WORLD_BROADCAST, data, bytes);
    if (lost >= 0) world_lost(w, lost);
}

// Collective: rank 0's text, from malloc or NULL, with its length. The others get a copy, zero-terminated, to
// be freed with free(); NULL stays NULL. What they had in *text before is not read.
static inline void world_broadcast_text(World* w, char** text, size_t* bytes) {
    int64_t length = w->rank == 0 && *text ? (int64_t)*bytes : -1;
    world_broadcast(w, &length, sizeof length);
    if (w->rank != 0) {
        *text = length >= 0 ? (char*)xrealloc(NULL, (size_t)length + 1) : NULL;
        *bytes = length >= 0 ? (size_t)length : 0;
        if (length >= 0) (*text)[length] = '\0';
    }
    if (length > 0) world_broadcast(w, *text, (size_t)length);
}

// Collective: returns when every rank has called it.
static inline void world_barrier(World* w) {
    world_arrive(w);
    int lost = world_gather(w, WORLD_BARRIER, NULL, NULL, 0);
    if (lost < 0) lost = world_spread(w, WORLD_BARRIER, NULL, 0);
    if (lost >= 0) world_lost(w, lost);
}

// x[n] += y[n], floats or doubles.
static inline void world_add(void* x, const void* y, size_t n, size_t element_bytes) {
    if (element_bytes == sizeof(float))
        for (size_t i = 0; i < n; i++) ((float*)x)[i] += ((const float*)y)[i];
    else
        for (size_t i = 0; i < n; i++) ((double*)x)[i] += ((const double*)y)[i];
}

// Collective: replaces each of x[n], floats or doubles, by its sum over all ranks, added on rank 0 in the
// order of ranks: the same bits on all ranks, each time.
static inline void world_sum_reals(World* w, void* x, size_t n, size_t element_bytes) {
    const size_t bytes = n * element_bytes;
    int lost = -1;
    if (w->size == 1) return;
    world_arrive(w);
    if (w->rank != 0) {
        lost = world_put(w, 0, WORLD_SUM, x, bytes) ? -1 : 0;
    } else {
        void* theirs = xcalloc(n, element_bytes);
        for (int r = 1; lost < 0 && r < w->size; r++) {
            if (!world_get(w, r, WORLD_SUM, theirs, bytes)) lost = r;
            if (lost < 0) world_add(x, theirs, n, element_bytes);
        }
        free(theirs);
    }
    if (lost < 0) lost = world_spread(w, WORLD_SUM, x, bytes);
    if (lost >= 0) world_lost(w, lost);
}
static inline void world_sum(World* w, double* x, int n) { world_sum_reals(w, x, (size_t)n, sizeof *x); }

// ----------------------------------------------------------------------------
// bulk data between rank 0 and another rank, for one thread at a time that need not be the main thread.
// False: the connection is lost; the watch had 10 s to end this process first.

static inline bool world_send(World* w, int peer, const void* data, size_t bytes) {
    if (w->size == 1 || peer == w->rank || (w->rank != 0 && peer != 0)) return false;
    if (link_write(w->link.peers[peer].fd[LINK_BULK], data, bytes)) return true;
    world_await_reason(w);
    return false;
}

static inline bool world_receive(World* w, int peer, void* data, size_t bytes) {
    if (w->size == 1 || peer == w->rank || (w->rank != 0 && peer != 0)) return false;
    if (link_read(w->link.peers[peer].fd[LINK_BULK], data, bytes)) return true;
    world_await_reason(w);
    return false;
}

// ----------------------------------------------------------------------------
// the watch

// The main thread of this rank has come further. Calls are counted, and the rank with the smallest count is
// named when the run hangs. So count the same events on every rank: each step and each save, and best before
// this rank waits for others.
static inline void watch_progress(World* w) {
    if (w->watching) watch_count(&w->watch, true, 0);
}

// This rank works; callable from any thread, as often as it likes.
static inline void watch_alive(World* w) {
    if (w->watching) watch_count(&w->watch, false, -1);
}

// From now until the main thread's next watch_progress this rank may take `seconds`, where that is longer
// than the timeout: for a first step, or a save. 0: back to the timeout. Call it on every rank.
static inline void watch_allow(World* w, double seconds) {
    if (w->watching) watch_count(&w->watch, false, seconds);
}

// ----------------------------------------------------------------------------
// connecting, closing

// Starts the watch; from here on die() asks it who may print.
static inline void world_watch(World* w) {
    watch_start(&w->watch, &w->link, w->timeout, w->advice);
    w->watch.launcher = w->mpi ? getppid() : 0;
    w->watching = true;
}

// Under mpirun: initializes MPI, by which all get rank 0's address.
static inline bool world_connect_mpi(World* w, Error* err) {
#ifdef USE_MPI
    return !w->mpi ||
           mpirun_connect(&w->link.address, w->rank, w->size, w->local_size == w->size, w->timeout, err);
#else
    (void)w, (void)err;
    return true;
#endif
}

// Rank 0's part: listens, accepts all others.
static inline bool world_accept(World* w, Error* err) {
    if (!link_listen(&w->link, err)) return false;
    LinkAddress* a = &w->link.address;
    if (w->mpi && (!link_own_addresses(a, err) || !link_random_token(a, err))) return false;
    if (!world_connect_mpi(w, err)) return false;
    world_watch(w);
    return link_accept(&w->link, w->timeout, err);
}

// The part of the other ranks. The watch starts with its connection: from then on messages are claimed.
static inline bool world_reach(World* w, Error* err) {
    if (!world_connect_mpi(w, err)) return false;
    if (!link_connect(&w->link, LINK_WATCH, w->timeout, err)) return false;
    world_watch(w);
    return link_connect(&w->link, LINK_CONTROL, w->timeout, err) &&
           link_connect(&w->link, LINK_BULK, w->timeout, err);
}

// Collective: connects all ranks and starts the watch. timeout: seconds that a rank may take to come here,
// later that it may take without progress or, stopped, without a sign of life. Dies if a rank does not come.
static inline void world_connect(World* w, double timeout) {
    Error err;
    w->timeout = timeout;
    if (w->size == 1) return;
    snprintf(message_hooks.prefix, sizeof message_hooks.prefix, "rank %d (%s): ", w->rank, w->host);
    // If rank 0 cannot be reached, one rank a host says so.
    w->may_report = w->rank <= 1 || w->local_rank == 0;
    link_init(&w->link, w->rank, w->size, w->host, &w->address);
    if (!(w->rank == 0 ? world_accept(w, &err) : world_reach(w, &err))) die("%s", err.msg);
    world_barrier(w);
    watch_set(&w->watch, &w->watch.ready);
}

// Collective: returns when every rank has reached the end of its work; then closes the connections, and MPI.
// From then on the end of another rank is no failure.
static inline void world_close(World* w) {
    int lost = -1;
    if (w->watching) {
        world_barrier(w);
        watch_set(&w->watch, &w->watch.closing);
        // After this one no watch reports any more. A rank that is lost here has passed the barrier
        // above.
        lost = world_gather(w, WORLD_CLOSE, NULL, NULL, 0);
        if (lost < 0) lost = world_spread(w, WORLD_CLOSE, NULL, 0);
        w->watching = false;
        w->may_report = w->rank == 0;
        watch_stop(&w->watch);
        link_close(&w->link);
    }
#ifdef USE_MPI
    if (w->mpi && lost < 0 && MPI_Finalize() != MPI_SUCCESS) warn("MPI_Finalize has failed");
#endif
    (void)lost;
}
