/*
How a run of several ranks ends after an error: one rank prints one line, then every rank exits with code 1.

    rank r -> 0   CLAIM   before die() prints            rank 0 gives GRANT to the first, DENY to all others
           -> 0   SAID    after it has printed           rank 0 then sends LEAVE to all: _exit(1)

Between SAID and LEAVE rank 0 waits for the checkpoint in the making (being_written), to which all ranks that
are left write on, as long as one of them comes further within `timeout` seconds.

The watch thread (watch.h) receives these messages, between its heartbeats, on the WATCH connections. It
claims for itself when it reports a rank that cannot speak any more. Neither MPI nor NCCL is called: they hang
once a rank is gone. Exit code 1 makes a launcher end what remains.
*/
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include "link.h"

typedef enum { WATCH_HEARTBEAT, WATCH_CLAIM, WATCH_GRANT, WATCH_DENY, WATCH_SAID, WATCH_LEAVE } WatchKind;

typedef struct {
    int32_t kind;
    uint32_t changes; // counts what restarts the rank's timer
    int64_t progress; // number of steps and collectives begun
    int64_t writing;  // being_written()
    double allowance; // seconds without a change that this rank may take, if more than the timeout
} WatchMessage;

typedef struct {
    WatchMessage last;
    double heard, changed; // times of the last message, and of the last one with another `changes`
    bool gone, claims;     // its connection has ended; it waits for GRANT or DENY
} WatchRank;

typedef struct {
    Link* link;
    double timeout, interval; // seconds; interval: between heartbeats
    const char* advice;       // what to do when a rank has failed; NULL: nothing
    pid_t launcher;           // mpirun, or its daemon on this host; 0: none that has to be ended
    pthread_t thread;
    pthread_mutex_t lock; // protects what follows
    pthread_cond_t answered;
    bool ready;        // all ranks are connected
    bool closing;      // all have reached the end: no death is a failure any more
    bool dying;        // a thread of this rank is in die()
    bool ending;       // on rank 0: it is printed why the run ends
    bool silent;       // a rank has been silent for too long
    double wrote;      // when a rank had come further in writing, or `ending` was set
    WatchMessage mine; // this rank's next message
    int speaker;       // the rank that prints why the run ends, or -1. Ranks above 0 know only of themselves
    double chosen;     // when the speaker was chosen
    double woke, resumed; // when the watch thread ran last; when it did after this rank had been stopped
    WatchKind answer;     // to this rank's claim: WATCH_CLAIM until there is one
    WatchRank* ranks;     // [size]; ranks above 0 use element 0
    struct pollfd* fds;   // [size]; fd is -1 for a rank that is not connected. Then the copy that is polled
} Watch;

// Lists the connections that exist by now: rank 0 accepts them while its watch runs.
static inline void watch_update_fds(Watch* w) {
    for (int r = 0; r < w->link->size; r++) {
        int fd = __atomic_load_n(&w->link->peers[r].fd[LINK_WATCH], __ATOMIC_ACQUIRE);
        if (w->fds[r].fd >= 0 || fd < 0 || w->ranks[r].gone) continue;
        w->fds[r].fd = fd;
        w->fds[r].events = POLLIN;
        w->ranks[r].heard = seconds_now();
    }
}

// Sends a message to a connected rank. A lost connection is noticed by reading; a full one belongs to a rank
// that has been stopped.
static inline void watch_send(Watch* w, int r, WatchKind kind) {
    WatchMessage m = w->mine;
    m.kind = kind;
    if (w->fds[r].fd >= 0) (void)send(w->fds[r].fd, &m, sizeof m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// After a rank has been silent for too long: mpirun waits for its host, for minutes or for ever. Leaves a
// process that kills mpirun where it is still there 10 s later. clone, since the handlers of fork may wait
// for a thread that hangs.
static inline void watch_end_launcher(const Watch* w) {
    enum { PIDFD_SEND_SIGNAL = 424, PIDFD_OPEN = 434 }; // system calls that older headers do not name
    const int launcher = w->launcher > 1 ? (int)syscall(PIDFD_OPEN, w->launcher, 0) : -1;
    if (launcher < 0 || getppid() != w->launcher || syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L) != 0) return;
    (void)setsid(); // mpirun kills the groups of its ranks, and waits for the ends of their pipes
    for (int fd = 0; fd < 4096; fd++)
        if (fd != launcher) (void)close(fd);
    if (!link_wait(launcher, POLLIN, seconds_now() + 10))
        (void)syscall(PIDFD_SEND_SIGNAL, launcher, SIGKILL, 0L, 0);
    _exit(EXIT_SUCCESS);
}

// Ends this process and, on rank 0, all others. Rank 0 waits up to 2 s until they have closed their
// connections: a socket that is closed with unread data may discard what it has sent.
__attribute__((noreturn)) static inline void watch_leave(Watch* w) {
    if (w->silent) watch_end_launcher(w);
    double deadline = seconds_now() + 2;
    char unread[256];
    bool tell = w->link->rank == 0;
    if (tell) watch_update_fds(w);
    for (int r = 1; tell && r < w->link->size; r++) {
        watch_send(w, r, WATCH_LEAVE);
        if (w->fds[r].fd >= 0) (void)shutdown(w->fds[r].fd, SHUT_WR);
    }
    for (int r = 1; tell && r < w->link->size; r++)
        while (w->fds[r].fd >= 0 && link_wait(w->fds[r].fd, POLLIN, deadline) &&
               recv(w->fds[r].fd, unread, sizeof unread, MSG_DONTWAIT) > 0) {}
    _exit(EXIT_FAILURE);
}

// After the message: ends the run, on rank 0 not before the checkpoint in the making is written. Then it
// returns, and is called again.
static inline void watch_end(Watch* w) {
    const double now = seconds_now();
    if (w->link->rank == 0 && !w->ending) w->wrote = now;
    w->ending = true;
    if (w->link->rank > 0 || being_written() == 0 || now > w->wrote + w->timeout) watch_leave(w);
}

// Prints what happened to a rank and ends the run, unless a rank prints an error already: then returns.
static inline void watch_report(Watch* w, int r, const char* what) {
    const LinkPeer* peer = &w->link->peers[r];
    if (w->ending || (w->speaker >= 0 && w->speaker != r)) return;
    w->speaker = w->link->rank;
    if (link_wait(STDERR_FILENO, POLLOUT, seconds_now() + 2)) // not if nobody reads a full pipe
        dprintf(STDERR_FILENO, "error: rank %d (%s, process %d) %s%s%s\n", r, peer->host, (int)peer->pid,
                what, w->advice ? "; " : "", w->advice ? w->advice : "");
    watch_end(w);
}

// On rank 0: chooses the speaker among the ranks that want to print. Gives it 15 s.
static inline void watch_answer_claims(Watch* w) {
    for (int r = 1; r < w->link->size; r++) {
        if (!w->ranks[r].claims) continue;
        w->ranks[r].claims = false;
        if (w->speaker < 0) w->chosen = seconds_now();
        watch_send(w, r, w->speaker < 0 ? WATCH_GRANT : WATCH_DENY);
        if (w->speaker < 0) w->speaker = r;
    }
    if (w->speaker > 0 && seconds_now() > w->chosen + 15)
        watch_report(w, w->speaker, "failed, and could not print why within 15 s");
}

// In die(): may this rank print its message? Asks rank 0, and prints if rank 0 does not answer within 15 s.
static inline bool watch_claim(Watch* w) {
    struct timespec limit;
    clock_gettime(CLOCK_MONOTONIC, &limit); // the clock of w->answered
    limit.tv_sec += 15;
    pthread_mutex_lock(&w->lock);
    bool mine = !w->dying;
    w->dying = true;
    if (mine && w->link->rank == 0) {
        mine = w->speaker < 0;
        if (mine) w->speaker = 0;
    } else if (mine) {
        w->answer = WATCH_CLAIM;
        watch_send(w, 0, WATCH_CLAIM);
        while (w->answer == WATCH_CLAIM && pthread_cond_timedwait(&w->answered, &w->lock, &limit) == 0) {}
        mine = w->answer != WATCH_DENY;
    }
    pthread_mutex_unlock(&w->lock);
    return mine;
}

// In die(), after the message: waits until the watch thread ends this process. It does so on rank 0's LEAVE,
// which comes when the message is printed, by whichever rank, and the checkpoint in the making is written,
// and where rank 0 is lost or silent.
__attribute__((noreturn)) static inline void watch_said(Watch* w, bool printed) {
    (void)being_written(); // the thread that writes the checkpoint learns here that it does not any more
    pthread_mutex_lock(&w->lock);
    if (printed) w->speaker = w->link->rank;
    if (printed) watch_send(w, 0, WATCH_SAID);
    while (!w->closing) {
        if (printed && w->link->rank == 0) watch_end(w);
        pthread_mutex_unlock(&w->lock);
        (void)poll(NULL, 0, 10);
        pthread_mutex_lock(&w->lock);
    }
    _exit(EXIT_FAILURE);
}

// Is it printed why the run ends? On rank 0.
static inline bool watch_is_ending(Watch* w) {
    pthread_mutex_lock(&w->lock);
    const bool ending = w->ending;
    pthread_mutex_unlock(&w->lock);
    return ending;
}

// Makes lock and condition. The condition's clock is the monotonic one: the wall clock may be set.
static inline void watch_init_lock(Watch* w) {
    pthread_condattr_t clock;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&w->answered, &clock);
    pthread_condattr_destroy(&clock);
}

// Sets a flag of the watch (ready, closing) and restarts the timers of all ranks.
static inline void watch_set(Watch* w, bool* flag) {
    pthread_mutex_lock(&w->lock);
    for (int r = 0; r < w->link->size; r++) w->ranks[r].changed = seconds_now();
    *flag = true;
    pthread_mutex_unlock(&w->lock);
}

// Restarts this rank's timer. counts: it is an event that every rank counts, in the same order. A negative
// allowance leaves it as it is.
static inline void watch_count(Watch* w, bool counts, double allowance) {
    pthread_mutex_lock(&w->lock);
    w->mine.changes++;
    if (counts) w->mine.progress++;
    if (allowance >= 0) w->mine.allowance = allowance;
    pthread_mutex_unlock(&w->lock);
}

// Ends the watch thread of a rank whose watch is closing, and frees the watch.
static inline void watch_stop(Watch* w) {
    for (int r = 0; r < w->link->size; r++) // wakes the thread
        if (w->link->peers[r].fd[LINK_WATCH] >= 0)
            (void)shutdown(w->link->peers[r].fd[LINK_WATCH], SHUT_RDWR);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->answered);
    pthread_mutex_destroy(&w->lock);
    free(w->ranks);
    free(w->fds);
}
