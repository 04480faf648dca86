/*
Forgetting attention forward with mma.sync:

    o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + cum_logf_i - cum_logf_j) v_j  over j <= i,    dh 64 or 128

A thread block has 128 queries of one head, 32 a warp, and loops over tiles of 64 keys, double-buffered, from
the diagonal down to the first key that is neither pruned nor hidden by the window: near keys tend to hold the
maximum. Layouts are those of attention.cuh, which calls attention_forward_sm80.

row_max need not be the maximum, only close enough for 2^(x - row_max) to stay in range: the accumulators are
rescaled only when a score exceeds row_max by RESCALE_THRESHOLD, which is rare after a row's first tile.
*/
#pragma once

#include "sm80.cuh"

template <int DH> struct Sm80Forward {
    static constexpr int THREADS = 128, KEYS = 64; // keys of a tile
    static constexpr int RESCALE_THRESHOLD = 8;
    struct Shared {
        bf16 q[ATTENTION_BLOCK * DH], k[2][KEYS * DH], v[2][KEYS * DH];
        union {                                  // the diagonal block is computed first
            AttentionGate<ATTENTION_BLOCK> gate; // during it
            AttentionAccInit<KEYS> acc_init[2];  // after it: sqrt(dh) (anchor - cum_logf_j)
        };
    };
    static_assert(DH > 64 || 2 * (sizeof(Shared) + 1024) <= 100 << 10,
                  "two thread blocks, each with its reserved KiB, fit an SM of sm_86, 89 and 120");
};

// One 16-byte load. It is inline assembly so that it stays next to the mma that needs it.
__device__ static inline void sm80_load_shared(float (&c)[4], uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                 : "r"(from));
}

// A warp's online softmax: acc = sum of 2^(x - row_max) v, row_sum = the lane's part of sum of 2^(x -
// row_max). THRESHOLD by which a score exceeds row_max before acc is rescaled; with 0 row_max is the maximum,
// and a row's bits do not depend on the other rows.
template <int DH, int MS, int THRESHOLD> struct Sm80Softmax {
    float acc[MS][DH / 8][4] = {}, row_max[MS][2], row_sum[MS][2] = {};

    __device__ Sm80Softmax() {
        for (int r = 0; r < 2 * MS; r++)
            row_max[r / 2][r % 2] = -1e30f; // finite: no infinity is ever subtracted from another
    }
    // Raises row_max, and rescales acc and row_sum, where a tile's exponents, s factor + shift, need it.
    template <int NS>
    __device__ void rescale(const float (&s)[MS][NS][4], float factor, const float (&shift)[MS][2]) {
        float tile_max[MS][2];
        bool exceeds = false;
        for (int r = 0; r < 2 * MS; r++) {
            int m = r / 2, half = r % 2;
            float x = s[m][0][2 * half];
#pragma unroll
            for (int n = 0; n < NS; n++) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            tile_max[m][half] = x * factor + shift[m][half];
            exceeds |= tile_max[m][half] > row_max[m][half] + THRESHOLD;
        }
        if (!__any_sync(0xffffffffu, exceeds)) return;
        for (int r = 0; r < 2 * MS; r++) {
            int m = r / 2, half = r % 2;
            float x = quad_max(fmaxf(row_max[m][half], tile_max[m][half]));
            float scale = exp2_approx(row_max[m][half] - x);
            row_max[m][half] = x;
            row_sum[m][half] *= scale;
#pragma unroll
            for (int n = 0; n < DH / 8; n++) {
                acc[m][n][2 * half] *= scale;
                acc[m][n][2 * half + 1] *= scale;
            }
        }
    }
    // acc += P V, row_sum += P over 16 keys; P = 2^(s factor + shift), shift relative to row_max
    template <int NS>
    __device__ void add(const float (&s)[MS][NS][4], int n, float factor, const float (&shift)[MS][2],
                        uint32_t lane_v) {
        uint32_t p[MS][4];
        for (int r = 0; r < 4 * MS; r++) {
            int m = r / 4, half = r % 2;
            const float* x = &s[m][n + r % 4 / 2][2 * half];
            float p0 = exp2_approx(x[0] * factor + shift[m][half]);
            float p1 = exp2_approx(x[1] * factor + shift[m][half]);
            row_sum[m][half] += p0 + p1;
            p[m][r % 4] = pack_bf16x2(p0, p1);
        }
        sm80_matmul_ab<DH>(acc, p, lane_v);
    }
};

// Forward. Main loop, each warp for its 32 queries:
//
//     start copies of Q and of K, V of the tile on the diagonal
//     for tiles of 64 keys from the diagonal down to last_tile:
//         wait for the tile's copy;  __syncthreads;  start that of the next tile
//         S = Q K^T, from 0 or, before the diagonal block, from acc_init (the keys' gate)
//         diagonal block: scale, gate, causal mask;  window: mask where it ends in the tile
//         raise row_max and rescale O, where a score exceeds row_max by the threshold
//         store acc_init of the next tile, load cum_logf of the one after it
//         for each 16 keys: P = 2^(S scale + row_gate - row_max), row_sum += P, O += P V
//     store O / row_sum and lse
//
// Pruning and the window only set last_tile.
template <int DH, bool GATE, bool WINDOW>
__global__ void __launch_bounds__(Sm80Forward<DH>::THREADS, 2)
    sm80_forward_kernel(const __grid_constant__ AttentionForward a,
                        const __grid_constant__ AttentionShape shape) {
    typedef Sm80Forward<DH> F;
    constexpr int KEYS = F::KEYS, MS = 2, NS = KEYS / 8;
    constexpr float ROOT = AttentionScale<DH>::ROOT, SCALE = AttentionScale<DH>::SCALE;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    int tid = (int)threadIdx.x, lane = tid % 32, warp_row = tid / 32 * (MS * 16), T = shape.T;
    Sm80Block block = Sm80Block::of<DH>(shape, true); // the last queries have most keys
    int i0 = block.first, tile = (min(i0 + ATTENTION_BLOCK, T) - 1) / KEYS;
    int last_tile = shape.first_key_block<WINDOW>(block.head, block.index) * (ATTENTION_BLOCK / KEYS);
    const bf16 *k = a.k + block.key_base, *v = a.v + block.key_base;

    auto copy_keys = [&](int stage, int n) {
        sm80_copy_tile<DH, KEYS, F::THREADS>(shared.k[stage], k, n * KEYS, T, shape.key_stride);
        sm80_copy_tile<DH, KEYS, F::THREADS>(shared.v[stage], v, n * KEYS, T, shape.key_stride);
    };
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(shared.q, a.q + block.base, i0, T, shape.row_stride);
    copy_keys(0, tile);

    // Before the diagonal block cum_logf is loaded two tiles ahead, and acc_init stored one tile ahead.
    const double* cum_logf = GATE ? a.cum_logf + block.head * T : NULL;
    double anchor = 0, next_cum_logf = 0;
    auto load_gate = [&](int n) {
        if (GATE) next_cum_logf = __ldg(&cum_logf[max(n * KEYS + tid % KEYS, 0)]);
    };
    auto store_acc_init = [&](int stage, int n) {
        if (GATE) shared.acc_init[stage].set(tid % KEYS, (float)((anchor - next_cum_logf) * ROOT));
    };
    // log2(e) (cum_logf_i - anchor) of the lane's rows; the anchor is the first query
    float row_gate[MS][2] = {};
    if (GATE) {
        anchor = __ldg(&cum_logf[i0]);
        sm80_fill_gate(shared.gate, cum_logf, i0, T, anchor);
        load_gate(i0 / KEYS - 1); // the first tile before the diagonal block
        __syncthreads();
        for (int r = 0; r < 2 * MS; r++)
            row_gate[r / 2][r % 2] = shared.gate.high[warp_row + r * 8 + lane / 4];
    }

    uint32_t lane_q = sm80_advance<DH>(sm80_lane_a<DH>(shared.q, lane), warp_row, 0);
    Sm80Softmax<DH, MS, F::RESCALE_THRESHOLD> softmax;
    for (int stage = 0; tile >= last_tile; tile--, stage ^= 1) {
        int j0 = tile * KEYS - i0; // relative to the first query; negative before the diagonal block
        cp_async_wait_all();
        __syncthreads();
        if (tile > last_tile) copy_keys(stage ^ 1, tile - 1);

        float s[MS][NS][4];
        uint32_t acc_init = smem_address(shared.acc_init[stage].pair + lane % 4);
        sm80_matmul_abt<DH>(s, lane_q, sm80_lane_b<DH>(shared.k[stage], lane), [&](float(&c)[4], int, int n) {
            c[0] = c[1] = c[2] = c[3] = 0;
            if (GATE && j0 < 0) sm80_load_shared(c, acc_init + (uint32_t)(n * 4 * sizeof(float4)));
        });

        // Below, the exponent to base 2, relative to cum_logf_i, is s factor + shift.
        bool diagonal = j0 >= 0;
        float factor = diagonal ? 1 : SCALE, shift[MS][2];
        if (diagonal)
            sm80_for_each(s, [&](float& x, int, int, int row, int column) {
                int i = warp_row + row, j = j0 + column;
                x = x * SCALE + (GATE ? shared.gate.difference(i, j) : 0);
                if (j > i) x = -INFINITY;
            });
        if (WINDOW && j0 < ATTENTION_BLOCK - shape.window) // the window ends in the tile
            sm80_for_each(s, [&](float& x, int, int, int row, int column) {
                if (j0 + column <= warp_row + row - shape.window) x = -INFINITY;
            });
        for (int r = 0; r < 2 * MS; r++) shift[r / 2][r % 2] = diagonal ? 0 : row_gate[r / 2][r % 2];
        softmax.rescale(s, factor, shift);
        for (int r = 0; r < 2 * MS; r++) shift[r / 2][r % 2] -= softmax.row_max[r / 2][r % 2];

        if (GATE && j0 <= 0) {            // the next tile lies before the diagonal block
            if (j0 == 0) __syncthreads(); // acc_init overwrites the gate, which all warps have read
            store_acc_init(stage ^ 1, tile - 1);
            load_gate(tile - 2);
        }
        uint32_t lane_v = sm80_lane_a<DH>(shared.v[stage], lane);
#pragma unroll
        for (int n = 0; n < NS; n += 2) softmax.add(s, n, factor, shift, sm80_advance<DH>(lane_v, n * 8, 0));
    }

    float* lse = a.lse + block.head * T;
    for (int r = 0; r < 2 * MS; r++) {
        float l = quad_sum(softmax.row_sum[r / 2][r % 2]);
        int i = i0 + warp_row + r * 8 + lane / 4;
        if (i < T && lane % 4 == 0) lse[i] = (softmax.row_max[r / 2][r % 2] + log2f(l)) * 0.6931471805599453f;
        softmax.row_sum[r / 2][r % 2] = 1 / l;
    }
    int row = i0 + warp_row;
    sm80_store<DH>(a.o + block.base + row * shape.row_stride, shape.row_stride, T - row,
                   shared.q + warp_row * DH, softmax.acc,
                   [&](int m, int half) { return softmax.row_sum[m][half]; });
}

template <int DH, bool GATE, bool WINDOW>
static inline void attention_forward_sm80(const AttentionForward* a, const HeadShape* s,
                                          cudaStream_t stream) {
    AttentionForward at = attention_from_first_query(a, s);
    AttentionShape shape = attention_shape(s, ATTENTION_BLOCK, a->bounds, 4);
    shape.tiles_per_head -= (int)(a->first_query / ATTENTION_BLOCK);
    shape.bounds.head_order = NULL; // heads in memory order
    attention_launch<Sm80Forward<DH>, SM80_SHARED_KIB>(sm80_forward_kernel<DH, GATE, WINDOW>,
                                                       (int64_t)shape.tiles(), stream, at, shape);
}
