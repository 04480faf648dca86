/*
Cross entropy of the CPU trainer, as llmc/layers/classifier.cuh of the GPU trainer: loss_t = -log softmax(logits_t)[target_t],
0 of TARGET_NONE.

    losses, targets [rows]    logits [rows, V]

Training: logits become their own gradient times dloss, the weight of a token's loss. Else loss_t has a minus sign if
the target is the likeliest token, the first of ties. Called by train_fox.c.
*/
#pragma once

#include "../base/common.h"
#include "vector.h"

static inline void classifier(real* losses, real* logits, const int32_t* targets, int64_t rows, int64_t V,
                              real dloss, bool train) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        real *row = logits + t * V, highest = -INFINITY, sum = 0;
        losses[t] = 0;
        if (targets[t] == TARGET_NONE && train) memset(row, 0, (size_t)V * sizeof(real));
        if (targets[t] == TARGET_NONE) continue;
#pragma omp simd reduction(max : highest)
        for (int64_t i = 0; i < V; i++) highest = row[i] > highest ? row[i] : highest;
        real target_logit = row[targets[t]] - highest;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < V; i++) {
            real e = exp_real(row[i] - highest);
            sum += e;
            row[i] = train ? e : row[i];
        }
        losses[t] = (real)log((double)sum) - target_logit;
        if (!train && find_number(row, highest, V) == targets[t]) losses[t] = -losses[t];
        if (!train) continue;
        for (int64_t i = 0; i < V; i++) row[i] *= dloss / sum;
        row[targets[t]] -= dloss;
    }
}
