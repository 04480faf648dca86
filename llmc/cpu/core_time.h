/*
Measures whether the threads of a step get the cores that they need. If other programs run on these, a step
may take eight times as long, and nothing else tells why: all threads of a parallel region wait for the one
without a core.

Compares the CPU time of the process with the time of its threads on the clock. They differ by what threads
waited for a core, and by what they slept because the step had no work for so many.

Called by the CPU trainer.
*/
#pragma once

#include "../base/common.h"

typedef struct {
    double clock, cpu; // seconds; cpu: of all threads of the process
} CoreTime;

// Steps since the last verdict. Starts as zero.
typedef struct {
    CoreTime step, sum;  // of the present step so far, and of all
    int64_t steps, slow; // slow: whose threads ran for less than half of their time
    bool started, said;
} CoreWatch;

// A verdict needs so many steps and seconds.
enum { CORE_WATCH_STEPS = 8, CORE_WATCH_SECONDS = 5 };

static inline CoreTime core_time_now(void) {
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    const CoreTime now = {seconds_now(), (double)cpu.tv_sec + 1e-9 * (double)cpu.tv_nsec};
    return now;
}

// Adds a part of the present step, which began at `begin`.
static inline void core_watch_add(CoreWatch* w, CoreTime begin, CoreTime end) {
    w->step.clock += end.clock - begin.clock;
    w->step.cpu += end.cpu - begin.cpu;
}

// The share of their time that n threads ran.
static inline double core_share(const CoreTime* t, int n) { return t->cpu / (t->clock * n); }

// Ends a step of n threads. Returns true once: where most steps were slow, whose threads ran for *share of
// their time. The first step does not count, as it touches its memory for the first time.
static inline bool core_watch_step(CoreWatch* w, int n, double* share) {
    const CoreTime none = {0, 0}, step = w->step;
    w->step = none;
    if (!w->started || w->said) return w->started = true, false;
    w->sum.clock += step.clock, w->sum.cpu += step.cpu;
    w->steps++, w->slow += core_share(&step, n) < 0.5;
    if (w->steps < CORE_WATCH_STEPS || w->sum.clock < CORE_WATCH_SECONDS) return false;
    *share = core_share(&w->sum, n);
    w->said = 2 * w->slow > w->steps && *share < 0.5;
    w->sum = none;
    w->steps = w->slow = 0;
    return w->said;
}

// As core_watch_step, and prints what the user can do.
static inline void core_watch_tell(CoreWatch* w, int n) {
    double share;
    if (!core_watch_step(w, n, &share)) return;
    printf("note: the threads of this program (%d) run for %.0f%% of a step's time: other programs use the "
           "cores%s\n",
           n, 100 * share,
           n == 1 ? "" : ", or a step has too little work for so many; OMP_NUM_THREADS sets their number");
}
