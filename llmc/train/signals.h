/*
Signals that end a training. SIGINT, SIGTERM, SIGUSR1 and SIGHUP end it after the current step, or after the
current micro-batch where that loses nothing (training_drops_step); a second one of the same kind ends it at
once. SIGUSR1 is the one that mpirun and Slurm pass on to all ranks with time left to save. Called by train.h.
*/
#pragma once

#include <poll.h>
#include <signal.h>
#include "../ranks/world.h"

static volatile sig_atomic_t run_interrupted; // a signal has come
static volatile sig_atomic_t run_answers;     // this rank answers Ctrl-C
static volatile sig_atomic_t run_drops_step;  // a signal ends the run within the step
static volatile sig_atomic_t run_has_ranks;   // whose step ends together: none leaves it alone

// Answers Ctrl-C at once: a step may take minutes. Other signals come from programs; mpirun's SIGTERM, after
// a rank has failed, would add a line to that rank's message. Not if stderr is a full pipe that nobody reads:
// write would wait forever.
static inline void run_on_signal(int signal_number) {
    static const char step[] = "stopping after this step; again to quit at once\n";
    static const char micro_batch[] = "stopping after this micro-batch; again to quit at once\n";
    static const char ranks[] =
        "stopping all ranks after this step; mpirun may end them before, unless it gets "
        "SIGUSR1 instead; again to quit at once\n";
    const char* text = run_has_ranks ? ranks : run_drops_step ? micro_batch : step;
    struct pollfd stderr_ready = {STDERR_FILENO, POLLOUT, 0};
    int before = errno;
    signal(signal_number, SIG_DFL); // first: another thread may get the second signal
    if (signal_number == SIGINT && run_answers && !run_interrupted && poll(&stderr_ready, 1, 0) == 1 &&
        write(STDERR_FILENO, text, strlen(text)) < 0)
        run_answers = 0;
    errno = before;
    run_interrupted = 1;
}

// Installs the handlers. Ranks often get a signal together; rank 0 answers.
static inline void run_catch_signals(const World* world) {
    run_answers = world->rank == 0;
    run_has_ranks = world->size > 1;
    signal(SIGINT, run_on_signal);
    signal(SIGTERM, run_on_signal);
    signal(SIGUSR1, run_on_signal);
    if (signal(SIGHUP, run_on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); // under nohup
}
