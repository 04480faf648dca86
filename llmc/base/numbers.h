/*
Numbers as people type them in options and config files.

A number is decimal, with or without a fraction and an exponent: 12, -0.5, 1e9, 2.5e-3. A count may end in a
suffix: k M G T for powers of 1000, Ki Mi Gi Ti for powers of 1024.
*/
#ifndef LLMC_NUMBERS_H
#define LLMC_NUMBERS_H

#include <math.h>
#include "common.h"

// Reads the number at the front of text; returns where it ends, NULL if there is none or it is too large for
// a double. strtod alone would also take white space, hexadecimal, "inf" and "nan".
static inline const char* parse_number_prefix(const char* text, double* value) {
    const char* s = text + (*text == '-' || *text == '+');
    if (!(*s >= '0' && *s <= '9') && !(*s == '.' && s[1] >= '0' && s[1] <= '9')) return NULL;
    if (*s == '0' && (s[1] == 'x' || s[1] == 'X')) return NULL;
    char* end;
    *value = strtod(text, &end);
    return isfinite(*value) ? end : NULL;
}

// Parses text as a number, all of it. On false *value is undefined.
static inline bool parse_number(const char* text, double* value) {
    const char* end = parse_number_prefix(text, value);
    return end && *end == '\0';
}

// Parses text as a number with or without a suffix, all of it: 2.5Gi, 16Ki, 1e9. The caller checks the range,
// and that it is a whole number. On false *value is undefined.
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

#endif // LLMC_NUMBERS_H
