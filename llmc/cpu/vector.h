/*
Vector functions of the CPU trainer: the exponential and what is made of it, dot product, RMSNorm and
RoPE of one vector.

`real` is float, or double with -DREAL_IS_DOUBLE for checking gradients. train_fox.c and the CPU mixers call
these; loops over them vectorise. Every sum has one fixed order.

libm's expf does not vectorise, so float has its own exponential. Below e^-60 it returns 0: such a term is
lost beside the largest term of a softmax, which is 1, and the denormal numbers it leads to make a matmul a
hundred times slower.
*/
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#include "../model/shapes.h"

#ifdef REAL_IS_DOUBLE
typedef double real;
#else
typedef float real;
#endif

// What this build computes with, for --version; -march=native decides the vector instructions.
#ifdef REAL_IS_DOUBLE
#define CPU_BUILT_WITH_REAL "double"
#else
#define CPU_BUILT_WITH_REAL "float"
#endif
#if defined __AVX512F__
#define CPU_BUILT_WITH_VECTORS "AVX-512"
#elif defined __AVX2__
#define CPU_BUILT_WITH_VECTORS "AVX2"
#else
#define CPU_BUILT_WITH_VECTORS "the architecture's basic"
#endif
#define CPU_BUILT_WITH "numbers " CPU_BUILT_WITH_REAL "\nvector instructions " CPU_BUILT_WITH_VECTORS

// e^x. In float within 1.25 ulp from e^-60 on, 0 below, infinity above e^88.
#ifdef REAL_IS_DOUBLE
static inline real exp_real(real x) { return exp(x); }
#else
static inline real exp_real(real x) {
    // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 2^23 rounds to an integer and leaves it in the low
    // bits.
    const float shift = 12582912.0f;
    float t = x * 1.44269504f + shift;
    uint32_t n, shift_bits;
    memcpy(&n, &t, sizeof n);
    memcpy(&shift_bits, &shift, sizeof n);
    t -= shift;
    float r = x - t * 0.693359375f;
    r = r + t * 2.12194440e-4f; // ln 2 in two parts, the first exact in few bits
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits = (n - shift_bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    float y = p * power;
    y = x < -60.0f ? 0.0f : y;
    return x > 88.0f ? INFINITY : y;
}
#endif

static inline real sigmoid(real x) { return 1 / (1 + exp_real(-x)); }

static inline real silu(real x) { return x * sigmoid(x); }
// Its derivative.
static inline real silu_slope(real x) {
    real open = sigmoid(x);
    return open * (1 + x * (1 - open));
}

// Computed in double: near 0 and far from it float would lose digits.
static inline real log_sigmoid(real x) {
    double z = (double)x;
    return (real)(z < 0 ? z - log1p(exp(z)) : -log1p(exp(-z)));
}

static inline real dot(const real* a, const real* b, int64_t n) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++) sum += a[c] * b[c];
    return sum;
}

// The index of the first x[i] that equals `value`; n: there is none.
static inline int64_t find_number(const real* x, real value, int64_t n) {
    int64_t i = 0;
    while (i < n && x[i] != value) i++;
    return i;
}

// y = x / sqrt(mean(x^2) + eps) * weight over n channels; y may be x. Returns 1 / rms for the backward pass.
// Where the mean overflows y would be 0, and training would go on with a wrong loss: y and rms become NaN.
static inline real norm_forward(real* y, const real* x, const real* weight, int64_t n, double eps) {
    real rstd = (real)(1 / sqrt((double)(dot(x, x, n) / (real)n) + eps));
    if (rstd == 0) rstd = NAN;
#pragma omp simd
    for (int64_t c = 0; c < n; c++) y[c] = x[c] * rstd * weight[c];
    return rstd;
}

// With g = dy * weight: dx = rstd (g - x rstd^2 mean(g x)), added to dx's old value with `add`; dweight += dy
// x rstd. dx may be dy.
static inline void norm_backward(real* dx, real* dweight, const real* dy, const real* x, const real* weight,
                                 real rstd, int64_t n, int add) {
    real gx = 0;
#pragma omp simd reduction(+ : gx)
    for (int64_t c = 0; c < n; c++) gx += dy[c] * weight[c] * x[c];
    real mean = gx / (real)n * rstd * rstd;
#pragma omp simd
    for (int64_t c = 0; c < n; c++) {
        real g = rstd * (dy[c] * weight[c] - x[c] * mean);
        dweight[c] += dy[c] * x[c] * rstd;
        dx[c] = add ? dx[c] + g : g;
    }
}

// ----------------------------------------------------------------------------
// RoPE

// Angles of position t: cos and sin of t f_i, times the gain, for each of dh/2 pairs.
static inline void rope_angles(real* row, int64_t t, int64_t dh, const Rotation* r) {
    for (int64_t i = 0; i < dh / 2; i++) {
        double angle = (double)t * rotation_frequency(r, i, dh / 2);
        row[2 * i] = (real)(r->gain * cos(angle));
        row[2 * i + 1] = (real)(r->gain * sin(angle));
    }
}

// Rotates the pairs (x_i, x_{i + dh/2}) by their angles; direction -1 rotates back.
static inline void rope_rotate(real* x, const real* angles, int64_t dh, real direction) {
    for (int64_t i = 0; i < dh / 2; i++) {
        real cosine = angles[2 * i], sine = direction * angles[2 * i + 1];
        real first = x[i], second = x[i + dh / 2];
        x[i] = first * cosine - second * sine;
        x[i + dh / 2] = first * sine + second * cosine;
    }
}
