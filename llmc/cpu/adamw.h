/*
The global norm of gradients, and AdamW, on the CPU.

Called by train_fox.c.
*/
#pragma once

#include "../base/common.h"
#include "../model/shapes.h"
#include "matmul.h"

// The sum of squares.
static inline double global_squares(const real* grads, int64_t count) {
    const int64_t block = 65536;
    int64_t blocks = (count + block - 1) / block;
    double total = 0, *sums = (double*)xcalloc((size_t)blocks, sizeof(double));
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * block; i < min64(count, (b + 1) * block); i++)
            sum += (double)grads[i] * (double)grads[i];
        sums[b] = sum;
    }
    for (int64_t b = 0; b < blocks; b++) total += sums[b];
    free(sums);
    return total;
}

// The factor that clips a gradient of this norm to grad_clip; 0: no clipping.
static inline double clip_scale(double norm, double grad_clip) {
    return grad_clip > 0 && norm > grad_clip ? grad_clip / norm : 1;
}

// w -= lr (mhat / (sqrt(vhat) + eps) + weight_decay w) for n elements; the gradient is first scaled by
// grad_scale.
static inline void adamw_update(real* w, real* m, real* v, const real* g, int64_t n, double grad_scale,
                                const AdamWParams* p) {
    real beta1 = (real)p->beta1, beta2 = (real)p->beta2, eps = (real)p->eps, scale = (real)grad_scale;
    real rate = (real)(p->lr / (1 - pow(p->beta1, (double)p->step)));
    real root = (real)(1 / sqrt(1 - pow(p->beta2, (double)p->step)));
    real keep = (real)(1 - p->lr * p->weight_decay);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        real gradient = g[i] * scale;
        m[i] = beta1 * m[i] + (1 - beta1) * gradient;
        v[i] = beta2 * v[i] + (1 - beta2) * gradient * gradient;
        w[i] = keep * w[i] - rate * m[i] / ((real)sqrt((double)v[i]) * root + eps);
    }
}
