/*
The output of a chunk, or the gradient of its values, for gla.cuh. With A [64, 64] the scores of the
chunk's pairs (scale is in q), P_t the product of f from the chunk's start to t, R_t that from t + 1 to its
end:

    o_i  = sum_{j <= i} A_ij v_j + (q_i P_i) S                    forward
    dv_j = sum_{i >= j} A_ij dout_i + (k_j R_j) dS                backward

One thread block a chunk and head:

    each warp    gates and products of 16 channels                      -> levels 0 to 3 of X in shared memory
    each warp    two blocks of 16 x 16 scores, over all channels        -> A
    each warp    levels 4 and 5, and q P or k R                         -> shared memory
    six warps    a block of 16 x 16 scores of these levels              -> A
    each warp    16 columns of the output; fragments of the state come from device memory
*/
#pragma once

#include "gla_gates.cuh"

struct GlaOutputShared {
    static constexpr int THREADS = GLA_THREADS;
    union {
        bf16 x[4][GLA_HEAD * GLA_CHUNK];   // levels, [channels, tokens]
        bf16 raw[2][GLA_CHUNK * GLA_HEAD]; // q and f before their functions
    };
    bf16 values[GLA_CHUNK * GLA_HEAD]; // v or dout
    bf16 scores[GLA_CHUNK * GLA_CHUNK];
    float diagonal[8][GLA_CHUNK]; // each warp's part of q_t k_t
};

// Writes the warp's rows of X [channels, tokens] for a tile.
__device__ static inline void gla_store_level(bf16* level, const float (&x)[2][4], int tile) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int r = 0; r < 4; r++) {
        int row = warp * 16 + lane / 4 + r % 2 * 8;
        *(uint32_t*)((char*)level + sm80_chunk_offset<GLA_CHUNK>(row, tile * 2 + r / 2) + lane % 4 * 4) =
            pack_bf16x2(x[r / 2][r % 2 * 2], x[r / 2][r % 2 * 2 + 1]);
    }
}

// acc [16, 16] += X^T X for tokens i0 .. and j0 .., over all channels
__device__ static inline void gla_scores_block(float (&acc)[2][4], const bf16* level, int i0, int j0) {
    int lane = (int)threadIdx.x % 32;
    uint32_t a = sm80_advance<GLA_CHUNK>(sm80_lane_b<GLA_CHUNK>(level, lane), 0, i0);
    uint32_t b = sm80_advance<GLA_CHUNK>(sm80_lane_a<GLA_CHUNK>(level, lane), 0, j0);
#pragma unroll
    for (int k = 0; k < GLA_HEAD; k += 16) {
        uint32_t fa[4], fb[4];
        ldmatrix_trans(fa, sm80_advance<GLA_CHUNK>(a, k, 0));
        ldmatrix_trans(fb, sm80_advance<GLA_CHUNK>(b, k, 0));
        for (int n = 0; n < 2; n++) sm80_mma(acc[n], fa, fb[2 * n], fb[2 * n + 1], acc[n]);
    }
}

// Pairs of tokens in the same tile: levels 0 to 2 and the diagonal by the even warps, level 3 by the odd
// ones.
__device__ static inline void gla_near_scores(GlaOutputShared& shared) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, first = warp / 2 * GLA_TILE;
    uint32_t packed[2][2], all[2][2] = {};
    if (warp % 2) {
        float acc[2][4] = {};
        gla_scores_block(acc, shared.x[3], first, first);
        gla_pack_block(packed, acc);
        int at = sm80_chunk_offset<GLA_CHUNK>(first + 8 + lane / 4, first / 8) + lane % 4 * 4;
        *(uint32_t*)((char*)shared.scores + at) = packed[1][0];
        return;
    }
    for (int h = 0; h < 2; h++) { // a lane's row
        float sum = 0;
        for (int i = 0; i < 8; i++) sum += shared.diagonal[i][first + 8 * h + lane / 4];
        all[h][h] = pack_bf16x2(sum, sum) & gla_diagonal();
    }
#pragma unroll
    for (int bit = 0; bit < 3; bit++) {
        float acc[2][4] = {};
        gla_scores_block(acc, shared.x[bit], first, first);
        gla_pack_block(packed, acc);
        for (int h = 0; h < 2; h++) all[h][h] |= packed[h][h] & gla_mask(bit) & gla_below();
    }
    for (int h = 0; h < 2; h++) { // the other warp has rows 8 to 15 of columns 0 to 7
        int at = sm80_chunk_offset<GLA_CHUNK>(first + lane / 4, first / 8 + h) + lane % 4 * 4;
        *(uint32_t*)((char*)shared.scores + at) = h ? 0 : all[0][0];
        if (h) *(uint32_t*)((char*)shared.scores + at + 8 * GLA_CHUNK * 2) = all[1][1];
    }
}

// Level 4, in x[0], by warps 4 and 5, level 5, in x[1], by warps 0 to 3
__device__ static inline void gla_far_scores(GlaOutputShared& shared) {
    int warp = (int)threadIdx.x / 32;
    bool level5 = warp < 4;
    if (warp >= 6) return;
    int i0 = (level5 ? 2 + warp / 2 : warp * 2 - 7) * GLA_TILE,
        j0 = (level5 ? warp % 2 : warp * 2 - 8) * GLA_TILE;
    float acc[2][4] = {};
    uint32_t packed[2][2];
    gla_scores_block(acc, shared.x[level5], i0, j0);
    gla_pack_block(packed, acc);
    gla_store_block(shared.scores, packed, i0, j0);
}

// The gates of the warp's channels: fills shared.x with levels 0 to 3, and the diagonal's parts. Then
// query = q times the product from the tile's start, key = k times that to the tile's end.
struct GlaOperands {
    float query[GLA_TILES][2][4], key[GLA_TILES][2][4], total[GLA_TILES][2];

    template <bool DOCS>
    __device__ void compute(GlaOutputShared& shared, const GlaWork& w, const GlaBlock& b) {
        int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        uint32_t raw_q[GLA_TILES][4], raw_f[GLA_TILES][4];
        float bound[2];
        gla_bounds(bound, w, b, warp * 16);
#pragma unroll
        for (int t = 0; t < GLA_TILES; t++) {
            gla_load(raw_q[t], shared.raw[0], t);
            gla_load(raw_f[t], shared.raw[1], t);
        }
        __syncthreads(); // x overwrites raw
#pragma unroll
        for (int t = 0; t < GLA_TILES; t++) {
            float f[2][4], k[2][4], q[2][4], x[2][4];
            GlaProducts products;
            gla_gates(f, k, raw_f[t], bound, b.count - t * GLA_TILE);
            if constexpr (DOCS) gla_close(f, gla_walls<DOCS>(w, b, t));
            gla_query(q, raw_q[t], w.scale);
            products.compute(f, [&](int bit) {
                products.operand(x, q, k, bit);
                gla_store_level(shared.x[bit], x, t);
            });
            for (int i = 0; i < 4; i++) {
                int n = i / 2, e = i % 2;
                float sum = q[n][e] * k[n][e] + q[n][e + 2] * k[n][e + 2];
                for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
                if (lane < 4) shared.diagonal[warp][t * GLA_TILE + n * 8 + lane * 2 + e] = sum;
            }
            gla_multiply(query[t], q, products.pre);
            gla_multiply(key[t], k, products.suf);
            total[t][0] = products.total[0];
            total[t][1] = products.total[1];
        }
    }

    // Level 4 to x[0], level 5 to x[1], and to x[2] q P, or with `backward` k R
    __device__ void store_far(GlaOutputShared& shared, bool backward) const {
        float before[GLA_TILES][2], after[GLA_TILES][2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            before[0][c] = after[GLA_TILES - 1][c] = 1;
#pragma unroll
            for (int t = 1; t < GLA_TILES; t++) {
                before[t][c] = before[t - 1][c] * total[t - 1][c];
                after[GLA_TILES - 1 - t][c] = after[GLA_TILES - t][c] * total[GLA_TILES - t][c];
            }
        }
#pragma unroll
        for (int t = 0; t < GLA_TILES; t++) {
            const float one[2] = {1, 1};
            float x[2][4];
            gla_store_level(shared.x[0], t % 2 ? query[t] : key[t], t);
            gla_scale(x, t / 2 ? query[t] : key[t], t == 0 ? total[1] : t == 3 ? total[2] : one);
            gla_store_level(shared.x[1], x, t);
            gla_scale(x, backward ? key[t] : query[t], backward ? after[t] : before[t]);
            gla_store_level(shared.x[2], x, t);
        }
    }
};

// Grid: chunks, B NH.
template <bool BACKWARD, bool DOCS>
__global__ static void __launch_bounds__(GLA_THREADS, 2)
    gla_output_kernel(const __grid_constant__ GlaWork w) {
    extern __shared__ __align__(1024) char shared_bytes[];
    GlaOutputShared& shared = *(GlaOutputShared*)shared_bytes;
    const GlaStates& states = w.states[BACKWARD];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int64_t d = w.NH * GLA_HEAD;
    GlaBlock b = GlaBlock::of(w, blockIdx.y, (int)blockIdx.x);
    gla_copy(shared.raw[0], w.q, w.row_stride, b);
    gla_copy(shared.raw[1], w.f, w.row_stride, b);
    cp_async_commit_group();
    gla_copy(shared.values, BACKWARD ? w.dout : w.v, BACKWARD ? d : w.row_stride, b);
    cp_async_commit_group();
    { // the chunk's state, which is read late
        const bf16* at = states.local + (b.head * w.chunks + b.chunk) * GLA_STATE + (int)threadIdx.x * 64;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
    cp_async_wait_group<1>();
    __syncthreads();
    {
        GlaOperands operands;
        operands.compute<DOCS>(shared, w, b);
        __syncthreads();
        gla_near_scores(shared);
        __syncthreads();
        operands.store_far(shared, BACKWARD);
    }
    // The warp's 16 columns of the state, a fragment for every 16 channels
    GlaFragment fragments[8];
    for (int c = 0; c < 8; c++) fragments[c].load(w, states, b, c * 8 + warp);
    cp_async_wait_all();
    __syncthreads();
    gla_far_scores(shared);
    __syncthreads();

    float acc[4][2][4] = {};
    uint32_t x_lane = sm80_lane_b<GLA_CHUNK>(shared.x[2], lane);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        __nv_bfloat162 decay[2];
        uint32_t fb[4];
        gla_state_decay(decay, w, states, b, c * 16);
        fragments[c].state(fb, decay);
        for (int r = 0; r < 4; r++) fb[r] = gla_transpose(fb[r]);
        for (int m = 0; m < 4; m++) {
            uint32_t fa[4];
            ldmatrix_trans(fa, sm80_advance<GLA_CHUNK>(x_lane, c * 16, m * 16));
            for (int n = 0; n < 2; n++) sm80_mma(acc[m][n], fa, fb[2 * n], fb[2 * n + 1], acc[m][n]);
        }
    }
    uint32_t v_lane = sm80_advance<GLA_HEAD>(sm80_lane_a<GLA_HEAD>(shared.values, lane), 0, warp * 16);
    uint32_t a_lane =
        BACKWARD ? sm80_lane_b<GLA_CHUNK>(shared.scores, lane) : sm80_lane_a<GLA_CHUNK>(shared.scores, lane);
#pragma unroll
    for (int t = 0; t < 4; t++) { // tokens of the sum
        uint32_t fb[4];
        ldmatrix_trans(fb, sm80_advance<GLA_HEAD>(v_lane, t * 16, 0));
        for (int m = BACKWARD ? 0 : t; m < (BACKWARD ? t + 1 : 4); m++) {
            uint32_t fa[4];
            if (BACKWARD)
                ldmatrix_trans(fa, sm80_advance<GLA_CHUNK>(a_lane, t * 16, m * 16));
            else
                ldmatrix(fa, sm80_advance<GLA_CHUNK>(a_lane, m * 16, t * 16));
            for (int n = 0; n < 2; n++) sm80_mma(acc[m][n], fa, fb[2 * n], fb[2 * n + 1], acc[m][n]);
        }
    }
    for (int i = 0; i < 16; i++) { // x[3] is free: rows of the output [64, 128]
        int row = i / 4 * 16 + i % 2 * 8 + lane / 4, n = i / 2 % 2;
        const float* x = &acc[i / 4][n][i % 2 * 2];
        *(uint32_t*)((char*)shared.x[3] + sm80_chunk_offset<GLA_HEAD>(row, warp * 2 + n) + lane % 4 * 4) =
            pack_bf16x2(x[0], x[1]);
    }
    __syncthreads();
    gla_store_rows(BACKWARD ? w.dv : w.o, BACKWARD ? w.row_stride : d, shared.x[3], b);
}
