/*
The score of a row of logits (RowScore of llmc/model/extension.h). Called by extend.h.
*/
#pragma once

#include "../../cpu/vector.h"
#include "../../model/extension.h"

// The most likely token and, in double, the log-probability of the target, -1: none.
static inline RowScore score_row(const real* logits, int32_t target, int64_t V) {
    RowScore score = {0, 0, 0};
    double sum = 0;
    bool finite = true;
    for (int64_t i = 0; i < V; i++) {
        finite = finite && !isnan(logits[i]);
        if (logits[i] > logits[score.best]) score.best = (int32_t)i;
    }
    double highest = (double)logits[score.best];
    for (int64_t i = 0; target >= 0 && i < V; i++) sum += exp((double)logits[i] - highest);
    if (target >= 0) score.logprob = (double)logits[target] - highest - log(sum);
    if (!finite || !isfinite(highest)) score.best = -1;
    score.drawn = score.best;
    return score;
}

// The token of a draw from a row's logits.
static inline int32_t draw_row(const real* logits, const Draw* draw, int64_t V) {
    float* row = (float*)xcalloc((size_t)V, sizeof *row);
    for (int64_t i = 0; i < V; i++) row[i] = (float)logits[i];
    const int64_t token = sampler_next(draw, row, V);
    free(row);
    return (int32_t)token;
}
