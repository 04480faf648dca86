/*
A progress line on stderr for a long job: amount done, rate, percentage and estimated time left. Used by the
programs under data/, and by a run for its initial weights, validations, --eval and --maps.

On a terminal the line is updated in place four times a second. Elsewhere, for example in a log file, a new
line is printed every ten seconds. A job shorter than a second prints nothing.
*/
#pragma once

#include "common.h"

typedef struct {
    const char *what, *unit;
    double total, unit_scale;
    double started, next; // in seconds_now(): start of the job, earliest time of the next line
    bool terminal, shown; // stderr is a terminal; a line is on the screen
} Progress;

// Starts a job of `total` units of work; 0 means unknown. Amounts are printed divided by unit_scale, for
// example with 1e6 and "MB" for bytes. The strings `what` and `unit` must outlive the job.
static inline void progress_start(Progress* p, const char* what, double total, const char* unit,
                                  double unit_scale) {
    double now = seconds_now();
    bool terminal = isatty(STDERR_FILENO);
    Progress started = {.what = what,
                        .unit = unit,
                        .total = total,
                        .unit_scale = unit_scale,
                        .started = now,
                        .next = now + (terminal ? 1 : 10),
                        .terminal = terminal};
    *p = started;
}

// Reports that `done` units are complete. Cheap: prints only when the next line is due.
static inline void progress_update(Progress* p, double done) {
    double now = seconds_now();
    if (now < p->next) return;
    p->next = now + (p->terminal ? 0.25 : 10);
    p->shown = true;
    double rate = done / (now - p->started);
    fprintf(stderr, "%s: %.1f", p->what, done / p->unit_scale);
    if (p->total > 0) fprintf(stderr, " of %.1f", p->total / p->unit_scale);
    fprintf(stderr, " %s, %.1f %s/s", p->unit, rate / p->unit_scale, p->unit);
    if (p->total >= done && done > 0) {
        long long left = (long long)((p->total - done) / rate + 0.5);
        fprintf(stderr, ", %.0f%%, %lld:%02lld:%02lld left", 100 * done / p->total, left / 3600,
                left / 60 % 60, left % 60);
    }
    // erase the rest of a longer previous line; carriage return, so that the next output overwrites this line
    fputs(p->terminal ? "\x1b[K\r" : "\n", stderr);
}

// Ends the job, successful or not, and clears the line, so that the next message starts on an empty one.
static inline void progress_end(Progress* p) {
    if (p->terminal && p->shown) fputs("\x1b[K", stderr);
    p->shown = false;
}
