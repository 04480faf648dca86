/*
Numbers: parsed from option values, for the command line parser (run/command/cli.h) and the config
(config/config.h), and checked in arrays, for checkpoints and the message of a run that diverged
(model/shard.h).

A number is decimal, with an optional fraction and exponent: 12, -0.5, 1e9, 2.5e-3. A count may also have a
suffix: k M G T for powers of 1000, Ki Mi Gi Ti for powers of 1024.
*/
#pragma once

#include <float.h>
#include <locale.h>
#include <math.h>
#include "common.h"

// strtod with a decimal point, whatever locale a library of the process has set
static inline double number_from_text(const char* text, char** end) {
    const locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    const double value = strtod_l(text, end, plain);
    freelocale(plain);
    return value;
}

// Writes a number with so many significant digits, and with a decimal point likewise.
static inline void number_to_text(char text[32], int digits, double value) {
    const locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0), before = uselocale(plain);
    snprintf(text, 32, "%.*g", digits, value);
    uselocale(before);
    freelocale(plain);
}

// Parses the number at the start of text and returns the end of it, or NULL if there is none or it overflows
// a double. Unlike strtod, accepts neither leading white space nor hexadecimal numbers, "inf" and "nan".
static inline const char* parse_number_prefix(const char* text, double* value) {
    const char* s = text + (*text == '-' || *text == '+');
    if (!(*s >= '0' && *s <= '9') && !(*s == '.' && s[1] >= '0' && s[1] <= '9')) return NULL;
    if (*s == '0' && (s[1] == 'x' || s[1] == 'X')) return NULL;
    char* end;
    *value = number_from_text(text, &end);
    return isfinite(*value) ? end : NULL;
}

// Parses all of text as a number. If it is none, returns false and *value is undefined.
static inline bool parse_number(const char* text, double* value) {
    const char* end = parse_number_prefix(text, value);
    return end && *end == '\0';
}

// Parses all of text as a number with an optional suffix: 2.5Gi, 16Ki, 1e9. If it is none, returns false and
// *value is undefined. The caller checks that the number is whole and within its range.
static inline bool parse_count(const char* text, double* value) {
    static const char letters[] = "kMGT";
    const char* end = parse_number_prefix(text, value);
    if (!end || *end == '\0') return end != NULL;
    bool binary = end[1] == 'i';
    const char* letter = strchr(letters, *end == 'K' ? 'k' : *end);
    if (!letter || (binary && *end == 'k')) return false;
    for (const char* p = letters; p <= letter; p++) *value *= binary ? 1024 : 1000;
    return end[1 + binary] == '\0' && isfinite(*value);
}

// Parses all of text as a whole number below 2^63, with an optional suffix. Digits alone are exact; with a
// fraction, an exponent or a suffix it is the nearest double. If it is none, returns false and *value is
// undefined.
static inline bool parse_whole(const char* text, int64_t* value) {
    double number;
    if (text[0] != '\0' && text[strspn(text, "0123456789")] == '\0') {
        errno = 0;
        *value = strtoll(text, NULL, 10);
        return errno == 0;
    }
    if (!parse_count(text, &number) || number != floor(number) || fabs(number) >= 0x1p63) return false;
    *value = (int64_t)number;
    return true;
}

// The same, from `least` to `most`.
static inline bool parse_whole_within(const char* text, int64_t least, int64_t most, int64_t* value) {
    return parse_whole(text, value) && *value >= least && *value <= most;
}

// Index of the first of n numbers that is NaN, infinite or below `least`; n if there is none.
static inline int64_t numbers_first_bad(const void* numbers, int64_t n, int element_bytes, double least) {
    enum { BLOCK = 4096 }; // without a branch inside, so that it vectorises
    const float* f32 = (const float*)numbers;
    const double* f64 = (const double*)numbers;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = n - begin < BLOCK ? n : begin + BLOCK;
        int64_t good = 0, i = begin;
        for (int64_t k = begin; k < end; k++) {
            double x = element_bytes == 8 ? f64[k] : (double)f32[k];
            good += (x >= least) & (x <= DBL_MAX);
        }
        if (good == end - begin) continue;
        for (; i < end - 1; i++) {
            double x = element_bytes == 8 ? f64[i] : (double)f32[i];
            if (!(x >= least && x <= DBL_MAX)) break;
        }
        return i;
    }
    return n;
}

// Writes a duration in the unit that people use: 49.4 s, 3.3 minutes, 1 hour, 569 days, 46.1 years.
static inline const char* duration_text(char text[32], double seconds) {
    static const struct {
        double seconds, most;
        const char* name;
    } units[] = {{60, 60, "minute"}, {3600, 72, "hour"}, {86400, 730, "day"}, {31556952, 0, "year"}};
    int i = 0;
    if (!(seconds >= 120)) {
        snprintf(text, 32, "%.3g s", seconds);
        return text;
    }
    while (i < 3 && seconds / units[i].seconds >= units[i].most) i++;
    const int length = snprintf(text, 32, "%.3g", seconds / units[i].seconds);
    snprintf(text + length, (size_t)(32 - length), " %s%s", units[i].name, strcmp(text, "1") == 0 ? "" : "s");
    return text;
}

// Writes a size of memory: 158.5 MiB, 16.19 GiB.
static inline const char* memory_text(char text[32], double bytes) {
    if (bytes < 1 << 30)
        snprintf(text, 32, "%.1f MiB", bytes / (1 << 20));
    else
        snprintf(text, 32, "%.2f GiB", bytes / (1 << 30));
    return text;
}
