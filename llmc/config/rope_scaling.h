/*
rope_scaling: rotations for sequences that are `factor` times as long as those of the training before.

    linear    positions divided by the factor (arXiv 2306.15595)
    ntk       rope_base times factor^(dh / (dh - 2)); config_check makes a rope_base of it
    yarn      a blend by frequency of both, with longer q and k (arXiv 2309.00071): llmc/model/rotation.h

On the command line TYPE:FACTOR, of yarn also yarn:FACTOR:LENGTH with the length of the training before; in
config.json transformers' object rope_parameters. Called by config.h and config_file.h.
*/
#pragma once

#include "../base/common.h"
#include "../base/numbers.h"

typedef enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_NTK, ROPE_YARN, NUM_ROPE_TYPES } RopeType;

typedef struct {
    RopeType type;
    double factor;
    int64_t length; // yarn's, of the training before; 0: not known
} RopeScaling;

static const char* const rope_types[NUM_ROPE_TYPES] = {"null", "linear", "ntk", "yarn"};

// Reads "null", TYPE:FACTOR or yarn:FACTOR:LENGTH; yarn without a length keeps the one that *r has.
static inline bool rope_scaling_parse(RopeScaling* r, const char* where, const char* text, Error* err) {
    char parts[3][32] = {"", "", ""};
    RopeScaling scaling = {ROPE_PLAIN, 1, 0};
    int count = 0;
    for (const char* part = text; count < 3; part++, count++) {
        const size_t n = strcspn(part, ":");
        snprintf(parts[count], sizeof parts[0], "%.*s", (int)n, part);
        part += n;
        if (*part == '\0') break;
    }
    while (scaling.type < NUM_ROPE_TYPES && strcmp(parts[0], rope_types[scaling.type]) != 0)
        scaling.type = (RopeType)(scaling.type + 1);
    if (scaling.type == NUM_ROPE_TYPES)
        return fail(err, "%s: rope_scaling=%s is none of null, linear:FACTOR, ntk:FACTOR, yarn:FACTOR", where,
                    text);
    const int most = scaling.type == ROPE_PLAIN ? 0 : scaling.type == ROPE_YARN ? 2 : 1;
    if (count > most) return fail(err, "%s: rope_scaling=%s: has more than %s takes", where, text, parts[0]);
    if (most && (!parse_number(parts[1], &scaling.factor) || !(scaling.factor >= 1) || scaling.factor > 1e6))
        return fail(err, "%s: rope_scaling=%s: the factor is not a number from 1 to 1000000", where, text);
    if (scaling.type == ROPE_YARN) scaling.length = r->length;
    if (count == 2 && !parse_whole_within(parts[2], 1, 1 << 24, &scaling.length))
        return fail(err, "%s: rope_scaling=%s: the length is not a whole number from 1 to %d", where, text,
                    1 << 24);
    *r = scaling;
    return true;
}
