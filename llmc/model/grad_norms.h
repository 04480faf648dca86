/*
The gradient norms of the last steps, by which --skip-spikes tells a spike.

A step's limit is the mean of 128 norms plus K of their standard deviations. They end with the step before the
last one: the last may still be in flight on a GPU, and both trainers leave out the same steps. Norms of steps
that are left out count too, so that a run whose gradients stay larger goes on after 128 / (1 + K^2) of them,
4 with K = 6.

Called by train.h; trainer.json has them (record.h).
*/
#pragma once

#include <math.h>
#include <stdint.h>

enum { NORMS_OF_LIMIT = 128, NORMS_KEPT = NORMS_OF_LIMIT + 1 };

typedef struct {
    double values[NORMS_KEPT]; // of step i at i % NORMS_KEPT; 0: not known
} GradNorms;

// The norm above which `step` is left out, `deviations` above the mean of the norms that are known; 0: none,
// as fewer than half of them are known.
static inline double grad_norms_limit(const GradNorms* n, int64_t step, double deviations) {
    const int last = (int)((step + NORMS_KEPT - 1) % NORMS_KEPT);
    double sum = 0, squares = 0;
    int known = 0;
    for (int i = 0; i < NORMS_KEPT; i++)
        if (i != last && n->values[i] > 0) sum += n->values[i], known++;
    if (known < NORMS_OF_LIMIT / 2) return 0;
    const double mean = sum / known;
    for (int i = 0; i < NORMS_KEPT; i++)
        if (i != last && n->values[i] > 0) squares += (n->values[i] - mean) * (n->values[i] - mean);
    return mean + deviations * sqrt(squares / known);
}
