/*
Octaves of positions in a context, by which losses are averaged: octave 0 is position 0, octave k has
positions 2^(k-1) .. 2^k - 1. T positions have octaves_of(T) of them, of which the last may be cut short: 17
at 65,536.

Used by validation's log and by --eval.
*/
#pragma once

#include <stdint.h>

// Number of octaves of positions 0 .. 2^31 - 1, the most that a sequence has.
enum { MAX_OCTAVES = 32 };

// The octave of position t.
static inline int octave_of(int64_t t) { return t == 0 ? 0 : 64 - __builtin_clzll((unsigned long long)t); }

// The first position of octave k, in T positions: T where k is octaves_of(T).
static inline int64_t octave_begin(int k, int64_t T) {
    const int64_t begin = k == 0 ? 0 : (int64_t)1 << (k - 1);
    return begin < T ? begin : T;
}

// The number of octaves of T > 0 positions.
static inline int octaves_of(int64_t T) { return octave_of(T - 1) + 1; }
