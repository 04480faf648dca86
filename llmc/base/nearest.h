/*
The known name that is nearest to a mistyped one, for messages: by the number of letters to insert, remove or
replace and of neighbours to swap, at most a third of them, or as the beginning of a longer name. Called by
the command line and the config.
*/
#pragma once

#include "common.h"

enum { NEAREST_BYTES = 64 }; // of a name; longer ones are not compared

typedef struct {
    char word[NEAREST_BYTES], name[NEAREST_BYTES]; // name: empty, or the nearest one until now
    int distance;                                  // of it; without one more than is near
} Nearest;

// Begins to look for what is near to the first n characters of a word.
static inline Nearest nearest_to(const char* word, size_t n) {
    Nearest near = {"", "", n < 6 ? 2 : (int)(n / 3) + 1};
    if (n < NEAREST_BYTES) snprintf(near.word, sizeof near.word, "%.*s", (int)n, word);
    return near;
}

// Letters to insert, remove or replace, and pairs to swap
static inline int edit_distance(const char* a, const char* b) {
    int rows[3][NEAREST_BYTES]; // distances of the first i letters of a, at i % 3, to the first j of b
    const int n = (int)strlen(b);
    for (int j = 0; j <= n; j++) rows[0][j] = j;
    int i = 1;
    for (; a[i - 1]; i++) {
        int *row = rows[i % 3], *last = rows[(i - 1) % 3], *before = rows[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            const int replaced = last[j - 1] + (a[i - 1] != b[j - 1]);
            const int shorter = last[j] < row[j - 1] ? last[j] : row[j - 1];
            row[j] = replaced < shorter + 1 ? replaced : shorter + 1;
            const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && before[j - 2] + 1 < row[j]) row[j] = before[j - 2] + 1;
        }
    }
    return rows[(i - 1) % 3][n];
}

// Compares with a known name.
static inline void nearest_try(Nearest* near, const char* name) {
    const size_t n = strlen(near->word);
    if (n == 0 || strlen(name) >= NEAREST_BYTES) return;
    const bool begins = strncmp(name, near->word, n) == 0 && (name[n] == '-' || name[n] == '_');
    int distance = edit_distance(near->word, name);
    if (begins && distance >= near->distance) distance = near->name[0] ? near->distance : near->distance - 1;
    if (distance >= near->distance) return;
    near->distance = distance;
    snprintf(near->name, sizeof near->name, "%s", name);
}

// What a message adds about the name: "(is --NAME meant?)", with the dashes of `before`; empty where none is
// near.
static inline const char* nearest_hint(Nearest* near, char text[2 * NEAREST_BYTES], const char* before) {
    text[0] = '\0';
    if (near->name[0]) snprintf(text, 2 * NEAREST_BYTES, " (is %s%s meant?)", before, near->name);
    return text;
}
