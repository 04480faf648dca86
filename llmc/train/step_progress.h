/*
What a training shows while a step of many micro-batches takes long: how far it is, and the time left of the
training by the micro-batches so far.

A terminal has it in place of an empty line, updated four times a second in steps that take more than a
second. Elsewhere the first step prints one line, after its first micro-batch behind STEP_TELLS seconds. Only
where the host computes, so that a micro-batch that it has begun is done when it returns. Called by train.h.
*/
#pragma once

#include "../run/logger.h"

#define STEP_TELLS 10.0

typedef struct {
    bool open, terminal, shown; // is anything to be shown; is stderr a terminal; a line is on the screen
    double began, next;         // in seconds_now(): of the step, and of the next line
    int64_t done, all;          // micro-batches of this rank
} StepProgress;

static inline void step_progress_begin(StepProgress* p, bool open, bool first, int64_t micro_batches) {
    const bool terminal = isatty(STDERR_FILENO);
    const double now = seconds_now();
    const StepProgress begun = {.open = open && (terminal || first),
                                .terminal = terminal,
                                .began = now,
                                .next = now + (terminal ? 1 : STEP_TELLS),
                                .all = micro_batches};
    *p = begun;
}

// A micro-batch of the step that is queued is done. steps: those of the training from this one on.
static inline void step_progress_add(StepProgress* p, const Logger* l, int64_t step, int64_t steps) {
    char left[32];
    const double now = seconds_now();
    p->done++;
    if (!p->open || now < p->next || p->done == p->all) return;
    const double seconds = (now - p->began) / (double)p->done;
    log_duration(left, seconds * (double)(p->all * steps - p->done));
    fflush(stdout);
    FILE* to = p->terminal ? stderr : stdout;
    fprintf(to, "step %lld/%lld  %lld of %s  %6s left%s", (long long)step, (long long)l->num_steps,
            (long long)p->done, counted(p->all, "micro-batch").text, left, p->terminal ? "\x1b[K\r" : "\n");
    fflush(to);
    p->shown = p->terminal;
    p->next = p->terminal ? now + 0.25 : INFINITY;
}

static inline void step_progress_end(StepProgress* p) {
    if (p->shown) fputs("\x1b[K", stderr);
    p->shown = p->open = false;
}
