/*
The arrays of a pass on the device (llmc/model/extension.h): which rows belong to which sequences, and
which outputs are wanted.

A pass of several steps runs without the host. After each step the kernel that has chosen an output's next
token (scores.cuh) makes it the row's token and increments the row's position (pass_advance): the
arrays are written on the device, and are not const.
*/
#pragma once

#include "../../model/extension.h"
#include "../../cuda/launch.cuh"

enum { EXTEND_ROWS = 16384 }; // most rows of a pass of the engine
enum { EXTEND_STEPS = 16 };   // most steps of an extension

// Rows begin, .., end - 1 of a pass, all of one sequence. position: tokens of the sequence before row
// `begin`.
typedef struct __align__(16) {
    int begin, end;
    int slot, position;
}
PassRows;

// Instead of a tile: rows of a sequence that prefill.cuh computes; the only row of a sequence that decode.cuh
// computes
enum { PASS_PREFILL = -1, PASS_DECODE = -2 };

// One pass. A tile is rows of one sequence whose positions differ in their last 4 bits only: how a sequence
// is cut into tiles does not depend on the pass.
typedef struct {
    int32_t* tokens;     // [num_rows]
    PassRows* sequences; // [num_sequences]
    PassRows* rows;      // [num_rows] begin, end and slot of the row's sequence, position of the row
    PassRows* tiles;     // [num_tiles] of extend.cuh
    int* row_tiles;      // [num_rows] the row's tile, or PASS_PREFILL, PASS_DECODE
    int num_rows, num_sequences, num_tiles, num_decoded;
    bool is_uneven; // decoded heads may differ by thousands of tokens
} PassArrays;

// The outputs of a pass. With several steps output i is that of row i, sequence i and, unless decode.cuh
// computes the rows, tile i.
typedef struct {
    RowScore* scores; // [steps, outputs]
    int* step;        // [outputs] steps done
    Draw* draws;      // [outputs]; NULL: the most likely tokens
    PassArrays pass;
    int outputs;
    bool advances; // the pass has several steps
} PassOutputs;

__device__ static inline RowScore* pass_score(const PassOutputs& o, int output) {
    return o.scores + o.step[output] * o.outputs + output;
}

// By one thread, when an output's token has been chosen: the row's next step.
__device__ static inline void pass_advance(const PassOutputs& o, int output, int token) {
    if (!o.advances) return;
    o.step[output]++;
    o.pass.tokens[output] = max(token, 0); // -1, logits not finite: no later score is read
    o.pass.rows[output].position++;
    o.pass.sequences[output].position++;
    if (o.pass.num_tiles > 0) o.pass.tiles[output].position++;
}
