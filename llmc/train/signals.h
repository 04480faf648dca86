/*
Signals to a training. SIGINT, SIGTERM, SIGUSR1 and SIGHUP end the run after the current step; a second one of the
same kind ends it at once. SIGUSR1 is the one that mpirun and Slurm pass on to all ranks with time left to save.
*/
#pragma once

#include <poll.h>
#include "../dist/world.h"

static volatile sig_atomic_t run_interrupted, run_answers;

// Answers Ctrl-C at once: a step may take minutes. Other signals come from programs; mpirun's SIGTERM, after
// a rank has failed, would add a line to that rank's message. Not if stderr is a full pipe that nobody reads:
// write would wait forever.
static inline void run_on_signal(int signal_number) {
    static const char text[] = "stopping after this step; again to quit at once\n";
    struct pollfd stderr_ready = {STDERR_FILENO, POLLOUT, 0};
    int before = errno;
    signal(signal_number, SIG_DFL); // first: another thread may get the second signal
    if (signal_number == SIGINT && run_answers && !run_interrupted && poll(&stderr_ready, 1, 0) == 1 &&
        write(STDERR_FILENO, text, sizeof text - 1) < 0)
        run_answers = 0;
    errno = before;
    run_interrupted = 1;
}

// Of several ranks, which often get a signal together, rank 0 answers.
static inline void run_catch_signals(const World* world) {
    run_answers = world->rank == 0;
    signal(SIGINT, run_on_signal);
    signal(SIGTERM, run_on_signal);
    signal(SIGUSR1, run_on_signal);
    if (signal(SIGHUP, run_on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); // under nohup
}
