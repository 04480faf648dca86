/*
The arrays of a pass on the device (llmc/inference/extension.h): which rows belong to which sequences, and what is
wanted of them.

A pass of several steps changes them itself: when a row's next token is drawn, that token becomes the row's,
and the row's position moves on by one (pass_advance).
*/
#pragma once

#include "../extension.h"
#include "../../cuda/launch.cuh"

enum { EXTEND_STEPS = 16 }; // of an extension, at most

// Some rows of one sequence; `position` is the first one's, the tokens before it.
typedef struct __align__(16) {
    int begin, end; // rows
    int slot, position;
}
PassRows;

// Rows without a tile: of a sequence that attention_forward computes; a sequence's only row, by decode.cuh
enum { PASS_PREFILL = -1, PASS_DECODE = -2 };

// One pass, on the device. Tiles are rows of one sequence whose positions differ in their last 4 bits only:
// how rows are cut into tiles does not depend on the pass.
typedef struct {
    const int32_t* tokens;     // [rows]
    const PassRows* sequences; // [num_sequences]
    const PassRows* rows;      // [num_rows], the rows of the row's sequence, but its own position
    const PassRows* tiles;     // [num_tiles], for the kernel of extend.cuh
    const int* row_tiles;      // [num_rows], or PASS_PREFILL, PASS_DECODE
    int num_rows, num_sequences, num_tiles, num_decoded;
    bool is_uneven; // some decoded heads may hold thousands of tokens more than others
} PassArrays;

// The outputs of a pass. With several steps output i is that of row i, sequence i and, where rows are not
// decoded, tile i.
typedef struct {
    RowScore* scores; // [steps, outputs]
    int* step;        // [outputs] the one that is next, 0 at first
    Draw* draws;      // [outputs]; NULL: none
    PassArrays pass;
    int outputs;
    bool advances; // there are several steps
} PassOutputs;

__device__ static inline RowScore* pass_score(const PassOutputs& o, int output) {
    return o.scores + o.step[output] * o.outputs + output;
}

// By one thread, when an output's token has been drawn: the next step.
__device__ static inline void pass_advance(const PassOutputs& o, int output, int token) {
    if (!o.advances) return;
    o.step[output]++;
    ((int32_t*)o.pass.tokens)[output] = max(token, 0); // -1: nothing that follows is used
    ((PassRows*)o.pass.rows)[output].position++;
    ((PassRows*)o.pass.sequences)[output].position++;
    if (o.pass.num_tiles > 0) ((PassRows*)o.pass.tiles)[output].position++;
}
