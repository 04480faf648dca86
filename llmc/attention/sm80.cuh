/*
Shared code of the mma.sync kernels of forgetting attention (sm80_forward.cuh, sm80_backward.cuh), which run
on every GPU from sm_80 on but Hopper: one kernel forward, two backward.

A thread block keeps one block of ATTENTION_BLOCK queries (or keys) in shared memory and loops over tiles of
keys (or queries), double-buffered by cp.async:

    all warps    copy the next tile, and store the gate's acc_init for it
    each warp    16 or 32 rows of the scores: matmul, mask and exponentials in registers, which are operands
                 of the next matmul; warps share the tiles and nothing else

The gate is described in shape.cuh.
*/
#pragma once

#include "shape.cuh"
#include "../cuda/mma_sm80.cuh"

#define SM80_SHARED_KIB 99 // shared memory of a thread block on sm_86 and sm_89

// The block of queries or keys that a thread block keeps in shared memory
struct Sm80Block {
    int64_t head, base; // base: offset of the head's first token in q, o and all gradients
    int64_t key_base;   // the same in k and v
    int index, first;   // first: the block's first token

    // last_is_longest: the head's last block has the most work, so that it is the head's first tile
    template <int DH> __device__ static Sm80Block of(const AttentionShape& shape, bool last_is_longest) {
        AttentionTile tile = shape.tile(blockIdx.x, shape.heads);
        int64_t base =
            (int64_t)(tile.head / shape.NH) * shape.T * shape.row_stride + tile.head % shape.NH * DH;
        int index = last_is_longest ? shape.blocks - 1 - tile.tile_index : tile.tile_index;
        return {tile.head, base, shape.key_base<DH>(tile.head), index, index * ATTENTION_BLOCK};
    }
};

// The gate of a block's own tokens; tokens past T get 0.
__device__ static inline void sm80_fill_gate(AttentionGate<ATTENTION_BLOCK>& gate, const double* cum_logf,
                                             int first, int T, double anchor) {
    for (int i = (int)threadIdx.x; i < ATTENTION_BLOCK; i += (int)blockDim.x)
        gate.set(i, first + i < T ? __ldg(&cum_logf[first + i]) - anchor : 0);
}

// Sets c to acc_init, one value a column; `columns` points at the lane's first pair of columns.
__device__ static inline void sm80_init_columns(float (&c)[4], const float* columns, int n) {
    float2 x = *(const float2*)(columns + n * 8);
    c[0] = c[2] = x.x;
    c[1] = c[3] = x.y;
}
