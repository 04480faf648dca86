/*
The watch: a thread in every rank. It notices that a rank has died, stopped or hung, names it and ends the run
(ending.h). Every second each rank sends rank 0 a heartbeat with its progress number, and rank 0 one to each:

    the connection ends without LEAVE              ended without a message: killed or crashed
    no heartbeat for `timeout` seconds             has been stopped or is unreachable
    heartbeats, but its progress number is the     stuck. Ranks with a larger number wait for it. If several
    smallest and has not changed for `timeout`     have the smallest number the lowest rank is named
    seconds, or its allowance if longer

Rank 0 prints the line. If rank 0 is the one, rank 1 does, and the others leave a little later.
*/
#pragma once

#include "ending.h"

// Returns the time. A rank that was stopped itself has heard nobody: gives the others time to be heard.
static inline double watch_wake(Watch* w) {
    double now = seconds_now();
    bool stopped = now - w->woke > w->timeout - 2 * w->interval;
    if (stopped) w->resumed = now;
    for (int r = 0; stopped && r < w->link->size; r++) w->ranks[r].heard = w->ranks[r].changed = now;
    return w->woke = now;
}

// The connection to a rank has ended.
static inline void watch_lost(Watch* w, int r) {
    double now = watch_wake(w);
    w->ranks[r].gone = true;
    w->fds[r].fd = -1;
    if (w->closing || w->ending) return;
    if (w->speaker < 0 && now < w->resumed + 5) watch_leave(w); // the others have said why
    if (w->link->rank > 1) (void)poll(NULL, 0, 1000);           // rank 1 prints now
    if (w->link->rank > 1 || (w->link->rank == 1 && w->speaker == 1)) watch_leave(w);
    watch_report(w, r, "ended without a message: killed or crashed");
}

// Handles a message from a rank.
static inline void watch_take(Watch* w, int r, const WatchMessage* m) {
    WatchRank* rank = &w->ranks[r];
    rank->heard = seconds_now();
    if (m->changes != rank->last.changes) rank->changed = rank->heard;
    if (m->writing != rank->last.writing) w->wrote = rank->heard;
    rank->last = *m;
    if (m->kind == WATCH_LEAVE) watch_leave(w);
    if (m->kind == WATCH_SAID) watch_end(w);
    if (m->kind == WATCH_CLAIM) rank->claims = true;
    if (m->kind != WATCH_GRANT && m->kind != WATCH_DENY) return;
    w->answer = (WatchKind)m->kind;
    pthread_cond_broadcast(&w->answered);
}

// Reads all messages of a rank that have arrived in whole.
static inline void watch_listen(Watch* w, int r) {
    WatchMessage m;
    for (;;) {
        ssize_t n = recv(w->fds[r].fd, &m, sizeof m, MSG_PEEK | MSG_DONTWAIT);
        if (n == (ssize_t)sizeof m) n = recv(w->fds[r].fd, &m, sizeof m, MSG_DONTWAIT);
        if (n == (ssize_t)sizeof m) {
            watch_take(w, r, &m);
        } else if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) {
            return;
        } else {
            watch_lost(w, r);
            return;
        }
    }
}

// On rank 0: reports the rank that all others wait for, if it has made no progress for too long. A rank
// without a recent heartbeat is left to watch_judge.
static inline void watch_judge_progress(Watch* w, double now) {
    int slowest = 0, equal = 0; // the lowest of `equal` ranks with the smallest number
    double least = 0;           // how long all of them have made no progress; 0: one may still work
    for (int r = 0; r < w->link->size; r++) {
        const WatchRank* rank = &w->ranks[r];
        int64_t ahead = rank->last.progress - w->ranks[slowest].last.progress;
        double limit = rank->last.allowance > w->timeout ? rank->last.allowance : w->timeout;
        double idle = now - rank->changed;
        if (ahead > 0) continue;
        if (ahead < 0) slowest = r, equal = 0;
        if (idle <= limit || now - rank->heard > 3 * w->interval) idle = 0;
        if (equal++ == 0 || idle < least) least = idle;
    }
    if (least == 0) return;
    char what[128];
    int n = snprintf(what, sizeof what, "is stuck: no progress for %.0f s", least);
    if (equal > 1) snprintf(what + n, sizeof what - (size_t)n, ", like %s", counted(equal - 1, "other").text);
    watch_report(w, slowest, what);
}

// Reports a rank that has been silent for too long, and after that one that is stuck.
static inline void watch_judge(Watch* w, double now) {
    char what[128];
    int rank = w->link->rank;
    for (int r = 0; r < w->link->size && !w->closing && !w->ending; r++) {
        double silent = w->fds[r].fd >= 0 ? now - w->ranks[r].heard : 0;
        if (silent > w->timeout) w->silent = true;
        if (silent > w->timeout + 10 && (rank > 1 || w->speaker == rank)) watch_leave(w); // it is printed
        if (silent <= w->timeout || rank > 1) continue;
        snprintf(what, sizeof what, "has been stopped or is unreachable for %.0f s", silent);
        watch_report(w, r, what);
    }
    if (rank == 0 && w->ready && !w->closing && !w->ending) watch_judge_progress(w, now);
}

// The watch thread; returns when the watch is closing.
static inline void* watch_run(void* argument) {
    Watch* w = (Watch*)argument;
    int size = w->link->size;
    struct pollfd* polled = w->fds + size; // a thread in die() may update the list while this one waits
    double now = seconds_now(), next = now;
    pthread_mutex_lock(&w->lock);
    while (!w->closing) {
        watch_update_fds(w);
        for (int r = 0; now >= next && r < size; r++) watch_send(w, r, WATCH_HEARTBEAT);
        if (now >= next) next = now + w->interval;
        double until = w->ready && !w->ending ? next : now + 0.05; // until then ranks still connect, or write
        memcpy(polled, w->fds, (size_t)size * sizeof *polled);
        pthread_mutex_unlock(&w->lock);
        int ready = poll(polled, (nfds_t)size, link_milliseconds(until));
        pthread_mutex_lock(&w->lock);
        now = watch_wake(w);
        w->mine.writing = being_written();
        if (w->link->rank == 0) watch_take(w, 0, &w->mine);
        for (int r = 0; ready > 0 && r < size; r++)
            if (w->fds[r].fd >= 0 && polled[r].revents != 0) watch_listen(w, r);
        if (w->link->rank == 0) watch_answer_claims(w);
        watch_judge(w, now);
        if (w->ending) watch_end(w);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

// Starts the watch of a rank. On rank 0 before the others connect, elsewhere as soon as the WATCH connection
// exists.
static inline void watch_start(Watch* w, Link* link, double timeout, const char* advice) {
    sigset_t all, old;
    memset(w, 0, sizeof *w);
    w->link = link;
    w->timeout = timeout;
    w->advice = advice;
    w->speaker = -1;
    w->interval = timeout < 4 ? timeout / 4 : 1;
    w->resumed = -5;
    w->woke = seconds_now();
    w->ranks = (WatchRank*)xcalloc((size_t)link->size, sizeof *w->ranks);
    w->fds = (struct pollfd*)xcalloc(2 * (size_t)link->size, sizeof *w->fds);
    for (int r = 0; r < link->size; r++) w->fds[r].fd = -1;
    watch_update_fds(w);
    watch_init_lock(w);
    sigfillset(&all); // signals are for the main thread
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&w->thread, NULL, watch_run, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) die("cannot start the thread that watches the other ranks: %s", strerror(rc));
}
