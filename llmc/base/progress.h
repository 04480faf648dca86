/*
One line on stderr that tells how far a long job is, how fast it goes and how long it will still take.

On a terminal the line replaces itself a few times a second; elsewhere (a log file) a line is added every ten
seconds. A job of less than a second prints nothing.
*/
#ifndef LLMC_PROGRESS_H
#define LLMC_PROGRESS_H

#include "common.h"

typedef struct {
    const char *what, *unit;
    double total, unit_scale;
    double started, next; // times: when the job began, when to print next
    bool terminal, shown;
} Progress;

// Begins a job of `total` units of work, 0 if that is not known. `what` and `unit` outlive the job; numbers
// are shown divided by unit_scale: 1e6 and "MB" for a count of bytes.
static inline void progress_start(Progress* p, const char* what, double total, const char* unit,
                                  double unit_scale) {
    memset(p, 0, sizeof *p);
    p->what = what;
    p->total = total;
    p->unit = unit;
    p->unit_scale = unit_scale;
    p->terminal = isatty(STDERR_FILENO);
    p->started = seconds_now();
    p->next = p->started + (p->terminal ? 1 : 10);
}

// Tells that `done` units are done; prints only now and then, so it may be called often.
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
    // erase what a longer line has left, and go back, so that whatever is printed next replaces this line
    fputs(p->terminal ? "\x1b[K\r" : "\n", stderr);
}

// Ends the job, done or failed: clears the line, so that the next message stands alone.
static inline void progress_end(Progress* p) {
    if (p->terminal && p->shown) fputs("\x1b[K", stderr);
    p->shown = false;
}

#endif // LLMC_PROGRESS_H
