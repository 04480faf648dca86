/*
The two formats of FP8 on the host, by definition and not by bits: a table of all numbers, and the nearest of
them to a number. For tests. A format is given by its bits of mantissa: 3 for E4M3, 2 for E5M2.
*/
#pragma once

#include <math.h>
#include <stdint.h>

// Codes 0 to this are the finite numbers that are not negative, in ascending order.
static inline int fp8_largest_code(int mantissa) { return mantissa == 3 ? 0x7e : 0x7b; }

// The number of a code; NAN and INFINITY for the codes behind the largest.
static inline double fp8_value(uint8_t code, int mantissa) {
    const int magnitude = code & 0x7f, bias = mantissa == 3 ? 7 : 15;
    const int exponent = magnitude >> mantissa, rest = magnitude & ((1 << mantissa) - 1);
    const double sign = code & 0x80 ? -1 : 1, fraction = ldexp(rest, -mantissa);
    if (magnitude > fp8_largest_code(mantissa)) return mantissa == 2 && rest == 0 ? sign * INFINITY : NAN;
    return sign * (exponent == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, exponent - bias));
}

// The code nearest to x, of two the even one; beyond the largest number that one's, 0x7f for NaN.
static inline uint8_t fp8_nearest(double x, int mantissa) {
    const double magnitude = fabs(x);
    int low = 0, high = fp8_largest_code(mantissa); // fp8_value(low) <= magnitude unless that is 0
    if (isnan(x)) return 0x7f;
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    if (magnitude >= fp8_value((uint8_t)high, mantissa)) return (uint8_t)(sign | high);
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (fp8_value((uint8_t)middle, mantissa) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    const double below = magnitude - fp8_value((uint8_t)low, mantissa),
                 above = fp8_value((uint8_t)high, mantissa) - magnitude;
    return (uint8_t)(sign | (below < above || (below == above && low % 2 == 0) ? low : high));
}
