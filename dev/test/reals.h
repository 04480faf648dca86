/*
Helpers of the tests that compute in `real` (float or double): random buffers, comparisons, error measures.
Include after llmc/cpu/vector.h.
*/
#pragma once

#include <float.h>
#include "../../llmc/base/random.h"
#include "check.h"

#ifdef REAL_IS_DOUBLE
#define EPSILON                   DBL_EPSILON
#define PICK(of_float, of_double) (of_double)
#else
#define EPSILON                   FLT_EPSILON
#define PICK(of_float, of_double) (of_float)
#endif

static inline real* new_reals(int64_t n) { return (real*)xcalloc((size_t)n, sizeof(real)); }

static inline real* random_reals(int64_t n, uint64_t stream) {
    real* x = new_reals(n);
    for (int64_t i = 0; i < n; i++) x[i] = (real)random_normal(3, stream, (uint64_t)i);
    return x;
}

static inline real* copy_reals(const real* x, int64_t n) {
    return (real*)memcpy(new_reals(n), x, (size_t)n * sizeof(real));
}

static inline void fill(real* x, int64_t n, real value) {
    for (int64_t i = 0; i < n; i++) x[i] = value;
}

static inline bool same_bits(const real* a, const real* b, int64_t n) {
    return memcmp(a, b, (size_t)n * sizeof(real)) == 0;
}

static inline bool all_zero(const real* x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != 0) return false;
    return true;
}

// ||a - b|| / ||b||
static inline double relative_error(const real* a, const real* b, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return sqrt(difference / norm);
}
