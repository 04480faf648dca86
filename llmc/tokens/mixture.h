/*
Mixtures: datasets of several parts, of which sequences are taken by weight, as
'books_*.bin:0.7,code_*.bin:0.3' says. Patterns without weights are one part.

Which part sequence s is of, and its number there, follow from s alone. With weights w_k, and f_k = w_k / (w_k
+ w_k+1 + ...), part 0 has n_0(s) = floor(s f_0 + 1/2) of the first s sequences, part 1 has floor((s - n_0)
f_1 + 1/2) of the others, and so on; the last part has the rest. So any first s sequences have of a part s w_k
/ (sum of w), to within the number of parts, and neither ranks nor a resumed run need a state. Each part
begins anew when its own sequences are used up: parts have epochs of their own.

Called by dataloader.h, and by what reports on parts.
*/
#pragma once

#include <glob.h>
#include "../base/common.h"
#include "../base/numbers.h"

enum { MIXTURE_PARTS = 16 };
#define MIXTURE_UNIT  4294967296.0 // of the f_k: 2^32
#define MIXTURE_LEAST 1e-6         // of a part's share

typedef struct {
    const char* pattern; // of its shards, without the weight; several with commas where it is the only part
    double share;        // w_k / (sum of w)
    uint64_t fraction;   // f_k, in units of 2^-32: of the last part exactly 1
    int64_t first_item, items; // of the dataset's items
    int64_t sequences;         // of an epoch
} MixturePart;

typedef struct {
    MixturePart parts[MIXTURE_PARTS];
    int count;
    char* text; // owns the patterns
} Mixture;

// The weight behind a pattern's last colon, at which *colon points then; 0: there is none, or an invalid one.
static inline double mixture_weight(char* pattern, char** colon) {
    double weight;
    *colon = strrchr(pattern, ':');
    if (!*colon || !parse_number(*colon + 1, &weight)) *colon = NULL;
    return *colon ? weight : 0;
}

// Sets shares and fractions from the weights that `share` has.
static inline bool mixture_weigh(Mixture* m, const char* patterns, Error* err) {
    double sum = 0, rest = 0;
    for (int k = 0; k < m->count; k++) sum += m->parts[k].share;
    for (int k = m->count - 1; k >= 0; k--) {
        MixturePart* part = &m->parts[k];
        if (!(part->share >= MIXTURE_LEAST * sum) || !(part->share > 0) || !isfinite(sum))
            return fail(err, "'%s': the weight of %s is %g: not a number above a millionth of their sum",
                        patterns, part->pattern, part->share);
        rest += part->share;
        part->fraction = (uint64_t)(part->share / rest * MIXTURE_UNIT + 0.5);
        part->share /= sum;
    }
    return true;
}

// Splits comma-separated patterns into parts. On error m is to be freed, too.
static inline bool mixture_parse(Mixture* m, const char* patterns, Error* err) {
    char *rest = m->text = xstrdup(patterns), *pattern, *colon;
    int weighted = 0, listed = 0;
    for (const char* p = patterns; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL) listed++;
    memset(m->parts, 0, sizeof m->parts);
    m->count = 0;
    while ((pattern = strsep(&rest, ",")) != NULL) {
        const double weight = mixture_weight(pattern, &colon);
        if (!colon) continue;
        *colon = '\0';
        if (weighted < MIXTURE_PARTS) {
            m->parts[weighted].pattern = pattern;
            m->parts[weighted].share = weight;
        }
        m->count = ++weighted;
    }
    if (weighted > MIXTURE_PARTS)
        return fail(err, "'%s': has %s, at most %d can be mixed", patterns, counted(weighted, "part").text,
                    MIXTURE_PARTS);
    if (weighted > 0 && weighted < listed)
        return fail(err, "'%s': some of its patterns have a weight (PATTERN:WEIGHT), others have none",
                    patterns);
    if (weighted == 0) {
        strcpy(m->text, patterns);
        m->parts[0].pattern = m->text;
        m->parts[0].share = 1;
        m->count = 1;
    }
    return mixture_weigh(m, patterns, err);
}

static inline void mixture_free(Mixture* m) { free(m->text); }

static inline int mixture_compare_paths(const void* a, const void* b) {
    return strcmp(*(char* const*)a, *(char* const*)b);
}

// For glob: a missing folder has no file that matches; another one that cannot be read ends the search.
static inline int mixture_unreadable(const char* folder, int error) {
    (void)folder;
    return error != ENOENT;
}

// Adds to `files` those that match a pattern, or the file of that very name: it may have brackets, too.
// Returns glob's code.
static inline int mixture_glob(const char* pattern, glob_t* files) {
    const bool literal = access(pattern, F_OK) == 0;
    char *escaped = (char*)xcalloc(2 * strlen(pattern) + 1, 1), *to = escaped;
    for (const char* from = pattern; *from; from++) {
        if (literal && strchr("*?[\\", *from)) *to++ = '\\';
        *to++ = *from;
    }
    const int rc = glob(escaped, files->gl_pathc > 0 ? GLOB_APPEND : 0, mixture_unreadable, files);
    free(escaped);
    return rc;
}

// Adds the files that match any of a part's comma-separated patterns, sorted by name.
static inline bool mixture_list(glob_t* files, const char* patterns, Error* err) {
    const size_t before = files->gl_pathc;
    char *copy = xstrdup(patterns), *rest = copy, *pattern;
    bool ok = true;
    while (ok && (pattern = strsep(&rest, ",")) != NULL) {
        const int rc = mixture_glob(pattern, files);
        if (*pattern == '\0')
            ok = fail(err, "'%s': not a comma-separated list of file patterns", patterns);
        else if (rc != 0)
            ok = fail(err, "'%s': %s", pattern,
                      rc == GLOB_NOMATCH ? "no file matches" : "cannot search for files that match");
    }
    free(copy);
    if (ok)
        qsort(files->gl_pathv + before, files->gl_pathc - before, sizeof *files->gl_pathv,
              mixture_compare_paths);
    return ok;
}

// floor(s f + 1/2), in integers: s may be up to 2^62.
static inline int64_t mixture_taken(uint64_t fraction, int64_t s) {
    const uint64_t high = (uint64_t)s >> 32, low = (uint64_t)s & UINT32_MAX;
    return (int64_t)(high * fraction + ((low * fraction + (1ULL << 31)) >> 32));
}

// The part of sequence s, whose number within the part, over all of its epochs, is put in *number.
static inline int mixture_part(const Mixture* m, int64_t s, int64_t* number) {
    for (int k = 0;; k++) {
        *number = mixture_taken(m->parts[k].fraction, s);
        if (mixture_taken(m->parts[k].fraction, s + 1) > *number) return k;
        s -= *number;
    }
}

// The first part that has none of the first s sequences; NULL: each has some.
static inline const MixturePart* mixture_without(const Mixture* m, int64_t s) {
    for (int k = 0; k < m->count; k++) {
        const int64_t taken = mixture_taken(m->parts[k].fraction, s);
        if (taken == 0) return &m->parts[k];
        s -= taken;
    }
    return NULL;
}

// Are of the first s sequences no more than its items, or its sequences, from each part?
static inline bool mixture_has(const Mixture* m, int64_t s, bool items) {
    for (int k = 0; k < m->count; k++) {
        const MixturePart* part = &m->parts[k];
        const int64_t taken = mixture_taken(part->fraction, s);
        if (taken > (items ? part->items : part->sequences)) return false;
        s -= taken;
    }
    return true;
}

// How many of the first sequences are of different items, or different ones, in each part.
static inline int64_t mixture_first(const Mixture* m, bool items) {
    int64_t low = 0, high = 0;
    for (int k = 0; k < m->count; k++) high += items ? m->parts[k].items : m->parts[k].sequences;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (mixture_has(m, middle, items))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// How often a training on `sequences` reads a part.
static inline double mixture_epochs(const MixturePart* part, double sequences) {
    return sequences * part->share / (double)part->sequences;
}
