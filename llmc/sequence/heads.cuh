/*
Copies between rows of all heads and rows of one rank's heads, where ranks share sequences (split.h):

    whole rows        bf16 [B, Tn, x_stride], Tn = T / N tokens of a rank with all heads: proj, o, gradients
    block of heads    bf16 [B, Tn, stride], the same tokens with the heads of one rank (HeadColumns)

    heads_split       blocks from whole rows; padding columns become 0
    heads_join        whole rows from blocks; other columns stay as they are

A call copies one block a rank, and may write to that rank's GPU. A thread copies eight columns of a block.
Called by sequence.cuh, for gate logits alone: copy engines move all else. An error of CUDA ends the program.
*/
#pragma once

#include "../layers/layer.cuh"
#include "split.h"

// For each rank a block of heads, and whole rows of the same tokens. Sequences are block_stride elements
// apart in blocks, Tn rows in whole rows.
typedef struct {
    struct {
        bf16 *block, *whole;
        int heads; // number of the rank whose heads these are
    } ranks[SEQUENCE_MAX_RANKS];
    int64_t block_stride;
} HeadBlocks;

struct HeadRows {
    HeadColumns columns;
    int64_t x_stride;
    int Tn;     // tokens of a sequence
    int first;  // first column of a block's row that is copied
    int chunks; // groups of eight columns a row
    int count;  // groups of all rows
};

// One thread a group of eight columns of a block; blockIdx.y is the rank.
template <bool SPLIT>
__global__ static void __launch_bounds__(256)
    heads_kernel(const __grid_constant__ HeadBlocks blocks, const __grid_constant__ HeadRows a) {
    const int n = (int)(blockIdx.x * 256 + threadIdx.x), heads = blocks.ranks[blockIdx.y].heads;
    const int row = n / a.chunks, local = a.first + n % a.chunks * HEAD_COLUMNS_ALIGN, b = row / a.Tn,
              t = row % a.Tn;
    if (n >= a.count) return;
    bf16* at =
        blocks.ranks[blockIdx.y].block + b * blocks.block_stride + (int64_t)t * a.columns.stride + local;
    bf16* x = blocks.ranks[blockIdx.y].whole + row * a.x_stride;
    Pack8 values = {};
    if (!SPLIT) values = load16(at);
    for (int i = 0; i < HEAD_COLUMNS_ALIGN; i++) {
        const int whole = head_columns_whole(&a.columns, NULL, heads, local + i);
        if (SPLIT && whole >= 0) values[i] = x[whole];
        if (!SPLIT && whole >= 0) x[whole] = values[i];
    }
    if (SPLIT) store16(at, values);
}

// Describes blocks of B sequences of Tn tokens.
static inline HeadRows head_rows(const HeadColumns* columns, int64_t x_stride, int64_t B, int64_t Tn) {
    const int first = columns->parts > 0 ? columns->part[0].local : columns->stride,
              chunks = (columns->stride - first) / HEAD_COLUMNS_ALIGN;
    assert(B * Tn * chunks < INT32_MAX && x_stride % HEAD_COLUMNS_ALIGN == 0);
    return {.columns = *columns,
            .x_stride = x_stride,
            .Tn = (int)Tn,
            .first = first,
            .chunks = chunks,
            .count = (int)(B * Tn) * chunks};
}

// Writes the blocks from whole rows; padding columns become 0.
static inline void heads_split(const HeadBlocks* blocks, const HeadRows* rows, cudaStream_t stream) {
    const dim3 grid((unsigned)ceil_div(rows->count, 256), (unsigned)rows->columns.ranks);
    if (rows->count) CUDA_LAUNCH(heads_kernel<true>, grid, 256, stream, *blocks, *rows);
}

// Writes the heads' columns of whole rows from the blocks.
static inline void heads_join(const HeadBlocks* blocks, const HeadRows* rows, cudaStream_t stream) {
    const dim3 grid((unsigned)ceil_div(rows->count, 256), (unsigned)rows->columns.ranks);
    if (rows->count) CUDA_LAUNCH(heads_kernel<false>, grid, 256, stream, *blocks, *rows);
}
