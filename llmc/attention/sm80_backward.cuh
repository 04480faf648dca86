/*
Backward of forgetting attention with mma.sync. With p = exp(score - lse) and ds = p (dout_i v_j - delta_i):

    dq_i = sum_j ds k_j / sqrt(dh),  dk_j = sum_i ds q_i / sqrt(dh),  dv_j = sum_i p dout_i,
    dcum_logf_i = sum_j ds_ij - sum_j ds_ji

Two kernels, called by attention.cuh, whose layouts these are:

    sm80_dq_kernel     128 queries stationary, loop over keys:     dq, and the row sums of ds to dcum_logf
    sm80_dkv_kernel    128 keys stationary, loop over queries:     dk, dv, and minus the column sums

Scores and their gradients are computed in both, 7 GEMMs instead of 5, but nothing is summed across thread
blocks: every run gives the same bits. dP starts from -delta_i. dcum_logf takes ds before it is rounded to
bf16, in both kernels: dcum_logf is summed over time next, where rounding errors would accumulate unless the
same ds enters both sums.

Tiles have 32 tokens. At dh 64 they have 64 where shared memory suffices, which synchronizes half as often
and gives the same bits: two thread blocks with tiles of 64 fit an SM of sm_80 and 90, with tiles of 32 the
100 KiB of sm_86, 89 and 120. In the diagonal block the gate of a tile's tokens is in shared memory, that of
a lane's rows in registers.
*/
#pragma once

#include "sm80.cuh"

// p = the lane's probabilities s as bf16: operands of the next matmul, 16 columns from 8 n on
template <int MS, int NS>
__device__ static inline void sm80_pack(uint32_t (&p)[MS][4], const float (&s)[MS][NS][4], int n) {
    for (int r = 0; r < 4 * MS; r++) {
        const float* x = &s[r / 4][n + r % 4 / 2][r % 2 * 2];
        p[r / 4][r % 4] = pack_bf16x2(x[0], x[1]);
    }
}
// ds = s dp as bf16, likewise; with a gate, sum += ds before rounding, for each row
template <bool GATE, int MS, int NS>
__device__ static inline void sm80_pack_ds(uint32_t (&ds)[MS][4], float (&sum)[MS][2],
                                           const float (&s)[MS][NS][4], const float (&dp)[MS][NS][4], int n) {
    for (int r = 0; r < 4 * MS; r++) {
        const float *x = &s[r / 4][n + r % 4 / 2][r % 2 * 2], *y = &dp[r / 4][n + r % 4 / 2][r % 2 * 2];
        float ds0 = x[0] * y[0], ds1 = x[1] * y[1];
        if (GATE) sum[r / 4][r % 2] += ds0 + ds1;
        ds[r / 4][r % 4] = pack_bf16x2(ds0, ds1);
    }
}

// The gate of a lane's rows, as in AttentionGate
template <int MS> struct Sm80RowGate {
    float high[MS][2], low[MS][2];

    // first_row: the lane's first; rows past T get that of the last token
    __device__ void load(const double* cum_logf, int first_row, int T, double anchor) {
        for (int r = 0; r < 2 * MS; r++) {
            AttentionGate<1> gate;
            gate.set(0, __ldg(&cum_logf[min(first_row + r * 8, T - 1)]) - anchor);
            high[r / 2][r % 2] = gate.high[0], low[r / 2][r % 2] = gate.low[0];
        }
    }
};

// ----------------------------------------------------------------------------
// dq

template <int DH, int TILE> struct Sm80Dq {
    static constexpr int THREADS = 128, KEYS = TILE;
    struct Shared {
        bf16 q[ATTENTION_BLOCK * DH], dout[ATTENTION_BLOCK * DH], k[2][KEYS * DH], v[2][KEYS * DH];
        float acc_init[2][KEYS];     // sqrt(dh) (anchor - cum_logf_j); 0 in the diagonal block
        AttentionGate<KEYS> gate[2]; // in the diagonal block
    };
    static_assert(DH > 64 || TILE > 32 || 2 * (sizeof(Shared) + 1024) <= 100 << 10,
                  "two thread blocks, each with its reserved KiB, fit an SM of sm_86, 89 and 120");
};

// Writes dq, and the row sums of ds to dcum_logf.
//
// Main loop, each warp for its 32 queries; Q and dO of the block stay in shared memory. A tile's copy
// overlaps the computation on the tile before it.
//
//     for tiles of keys from the first that is neither pruned nor hidden by the window to the diagonal:
//         wait for the tile's copy of K, V;  __syncthreads;  start that of the next tile
//         store acc_init and gate of the next tile, load cum_logf of the one after it
//         for each 32 keys, up to the warp's diagonal:
//             S = acc_init + Q K^T;  window: mask where it ends in these keys
//             P = 2^(S scale + row_gate - lse); diagonal block: gate differences and causal mask
//             dP = -delta + dO V^T
//             for each 16 keys: dS = P dP, row sums += dS, dQ += bf16(dS) K
//     store dQ, and the row sums to dcum_logf
template <int DH, int TILE, bool GATE, bool WINDOW>
__global__ void __launch_bounds__(Sm80Dq<DH, TILE>::THREADS, 2)
    sm80_dq_kernel(const __grid_constant__ AttentionBackward a,
                   const __grid_constant__ AttentionShape shape) {
    typedef Sm80Dq<DH, TILE> F;
    constexpr int KEYS = F::KEYS, PART = 32, MS = 2, NS = PART / 8; // a warp takes PART keys at a time
    constexpr float ROOT = AttentionScale<DH>::ROOT, SCALE = AttentionScale<DH>::SCALE;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    int tid = (int)threadIdx.x, lane = tid % 32, warp_row = tid / 32 * (MS * 16), T = shape.T;
    Sm80Block block = Sm80Block::of<DH>(shape, true); // the last queries have most keys
    int i0 = block.first, last_tile = (min(i0 + ATTENTION_BLOCK, T) - 1) / KEYS;
    int tile = shape.first_key_block<WINDOW>(block.head, block.index) * (ATTENTION_BLOCK / KEYS);
    const bf16 *k = a.k + block.key_base, *v = a.v + block.key_base;

    auto copy_keys = [&](int stage, int n) {
        sm80_copy_tile<DH, KEYS, F::THREADS>(shared.k[stage], k, n * KEYS, T, shape.key_stride);
        sm80_copy_tile<DH, KEYS, F::THREADS>(shared.v[stage], v, n * KEYS, T, shape.key_stride);
    };
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(shared.q, a.q + block.base, i0, T, shape.row_stride);
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(shared.dout, a.dout + block.base, i0, T,
                                                    shape.row_stride);
    copy_keys(0, tile);

    // cum_logf is loaded two tiles ahead, and acc_init stored one tile ahead. The anchor is the first
    // query.
    const double* cum_logf = GATE ? a.cum_logf + block.head * T : NULL;
    double anchor = 0, next_cum_logf = 0;
    auto load_gate = [&](int n) {
        if (GATE) next_cum_logf = __ldg(&cum_logf[min(n * KEYS + tid % KEYS, T - 1)]);
    };
    auto store_acc_init = [&](int stage, int n) {
        if (!GATE) return;
        bool diagonal = n * KEYS >= i0;
        shared.acc_init[stage][tid % KEYS] = diagonal ? 0 : (float)((anchor - next_cum_logf) * ROOT);
        if (diagonal) shared.gate[stage].set(tid % KEYS, next_cum_logf - anchor);
    };
    Sm80RowGate<MS> row_gate;
    if (GATE) {
        anchor = __ldg(&cum_logf[i0]);
        row_gate.load(cum_logf, i0 + warp_row + lane / 4, T, anchor);
        load_gate(tile);
        store_acc_init(0, tile);
        load_gate(tile + 1);
    }

    float shift[MS][2], row_lse[MS][2], row_delta[MS][2], row_sum[MS][2] = {}, acc[MS][DH / 8][4] = {};
    for (int r = 0; r < 2 * MS; r++) {
        int64_t at = block.head * T + min(i0 + warp_row + r * 8 + lane / 4, T - 1);
        row_lse[r / 2][r % 2] = __ldg(&a.lse[at]) * (float)ATTENTION_LOG2E;
        row_delta[r / 2][r % 2] = -__ldg(&a.delta[at]);
        shift[r / 2][r % 2] = (GATE ? row_gate.high[r / 2][r % 2] : 0) - row_lse[r / 2][r % 2];
    }
    uint32_t lane_q = sm80_advance<DH>(sm80_lane_a<DH>(shared.q, lane), warp_row, 0);
    uint32_t lane_dout = sm80_advance<DH>(sm80_lane_a<DH>(shared.dout, lane), warp_row, 0);

    for (int stage = 0; tile <= last_tile; tile++, stage ^= 1) {
        cp_async_wait_all();
        __syncthreads();
        if (tile < last_tile) copy_keys(stage ^ 1, tile + 1);
        store_acc_init(stage ^ 1, tile + 1);
        load_gate(tile + 2);

#pragma unroll 1
        for (int part = 0; part < KEYS; part += PART) {
            int j0 = tile * KEYS + part - i0;
            if (j0 >= warp_row + MS * 16) break; // all later keys are masked
            float s[MS][NS][4], dp[MS][NS][4];
            const float* acc_init = shared.acc_init[stage] + part + lane % 4 * 2;
            const bf16 *part_k = shared.k[stage] + part * DH, *part_v = shared.v[stage] + part * DH;
            sm80_matmul_abt<DH>(s, lane_q, sm80_lane_b<DH>(part_k, lane), [&](float(&c)[4], int, int n) {
                if (GATE)
                    sm80_init_columns(c, acc_init, n);
                else
                    c[0] = c[1] = c[2] = c[3] = 0;
            });
            if (WINDOW && j0 < ATTENTION_BLOCK - shape.window) // the window ends in these keys
                sm80_for_each(s, [&](float& x, int, int, int row, int column) {
                    if (j0 + column <= warp_row + row - shape.window) x = -INFINITY;
                });
            if (j0 >= 0)
                sm80_for_each(s, [&](float& x, int m, int half, int row, int column) {
                    const AttentionGate<KEYS>& gate = shared.gate[stage];
                    int j = part + column;
                    float difference =
                        GATE ? (row_gate.high[m][half] - gate.high[j]) + (row_gate.low[m][half] - gate.low[j])
                             : 0;
                    float y = x * SCALE + difference - row_lse[m][half];
                    x = exp2_approx(j0 + column > warp_row + row ? -INFINITY : y);
                });
            else
                sm80_for_each(s, [&](float& x, int m, int half, int, int) {
                    x = exp2_approx(x * SCALE + shift[m][half]);
                });
            sm80_matmul_abt<DH>(dp, lane_dout, sm80_lane_b<DH>(part_v, lane), [&](float(&c)[4], int m, int) {
                c[0] = c[1] = row_delta[m][0];
                c[2] = c[3] = row_delta[m][1];
            });
            uint32_t lane_k = sm80_lane_a<DH>(part_k, lane);
#pragma unroll
            for (int n = 0; n < NS; n += 2) {
                uint32_t ds[MS][4];
                sm80_pack_ds<GATE>(ds, row_sum, s, dp, n);
                sm80_matmul_ab<DH>(acc, ds, sm80_advance<DH>(lane_k, n * 8, 0));
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2 * MS && GATE && a.dcum_logf; r++) {
        float x = quad_sum(row_sum[r / 2][r % 2]);
        int i = i0 + warp_row + r * 8 + lane / 4;
        if (i < T && lane % 4 == 0) a.dcum_logf[block.head * T + i] = x;
    }
    int row = i0 + warp_row;
    sm80_store<DH>(a.dq + block.base + row * shape.row_stride, shape.row_stride, T - row,
                   shared.q + warp_row * DH, acc, [](int, int) { return 1 / ROOT; });
}

// ----------------------------------------------------------------------------
// dk and dv

template <int DH, int TILE> struct Sm80Dkv {
    // With two accumulators of DH columns a key, registers suffice for 32 keys a warp at dh 64, for 16 at
    // 128.
    static constexpr int MS = DH == 64 ? 2 : 1, BLOCKS_PER_SM = MS;
    static constexpr int THREADS = ATTENTION_BLOCK / (MS * 16) * 32, QUERIES = TILE;
    struct Shared {
        bf16 k[ATTENTION_BLOCK * DH], v[ATTENTION_BLOCK * DH], q[2][QUERIES * DH], dout[2][QUERIES * DH];
        // sqrt(dh) (cum_logf_i - anchor - lse_i); without cum_logf in the diagonal block
        float acc_init[2][QUERIES];
        float minus_delta[2][QUERIES];
        AttentionGate<QUERIES> gate[2]; // in the diagonal block
    };
    static_assert(DH > 64 || TILE > 32 || 2 * (sizeof(Shared) + 1024) <= 100 << 10,
                  "two thread blocks, each with its reserved KiB, fit an SM of sm_86, 89 and 120");
};

// Writes dk and dv, and subtracts the column sums of ds from dcum_logf. Scores are transposed: a row is a
// key.
//
// Main loop, each warp for its 16 or 32 keys; K and V of the block stay in shared memory. A tile's copy
// overlaps the computation on the tile before it.
//
//     for tiles of queries from the diagonal to the last that pruning and the window leave (last_tile):
//         wait for the tile's copy of Q, dO;  __syncthreads;  start that of the next tile
//         store acc_init, -delta and gate of the next tile, load lse, delta, cum_logf of the one after it
//         for each 32 queries, from the warp's diagonal on:
//             S^T = acc_init + K Q^T;  window: mask where it ends in these queries
//             P^T = 2^(S^T scale - row_gate); diagonal block: gate differences and causal mask
//             dP^T = -delta + V dO^T
//             for each 16 queries: dS^T = P^T dP^T, column sums += dS, dV += P^T dO, dK += dS^T Q
//     store dK, dV, and subtract the column sums from dcum_logf
template <int DH, int TILE, bool GATE, bool WINDOW>
__global__ void __launch_bounds__(Sm80Dkv<DH, TILE>::THREADS, Sm80Dkv<DH, TILE>::BLOCKS_PER_SM)
    sm80_dkv_kernel(const __grid_constant__ AttentionBackward a,
                    const __grid_constant__ AttentionShape shape) {
    typedef Sm80Dkv<DH, TILE> F;
    constexpr int QUERIES = F::QUERIES, PART = 32, MS = F::MS, NS = PART / 8; // a warp takes PART queries
    constexpr float ROOT = AttentionScale<DH>::ROOT, SCALE = AttentionScale<DH>::SCALE;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    int tid = (int)threadIdx.x, lane = tid % 32, warp_row = tid / 32 * (MS * 16), T = shape.T;
    Sm80Block block = Sm80Block::of<DH>(shape, false); // the first keys have most queries
    int j0 = block.first, tile = j0 / QUERIES;
    int last_tile =
        min((T - 1) / QUERIES,
            (shape.last_query_block<WINDOW>(block.head, block.index) + 1) * (ATTENTION_BLOCK / QUERIES) - 1);
    const bf16 *q = a.q + block.base, *dout = a.dout + block.base;

    auto copy_queries = [&](int stage, int n) {
        sm80_copy_tile<DH, QUERIES, F::THREADS>(shared.q[stage], q, n * QUERIES, T, shape.row_stride);
        sm80_copy_tile<DH, QUERIES, F::THREADS>(shared.dout[stage], dout, n * QUERIES, T, shape.row_stride);
    };
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(shared.k, a.k + block.key_base, j0, T, shape.key_stride);
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(shared.v, a.v + block.key_base, j0, T, shape.key_stride);
    copy_queries(0, tile);

    // lse, delta and cum_logf are loaded two tiles ahead, and acc_init stored one tile ahead. The anchor is
    // the last key. Queries past T get probability 0.
    const double* cum_logf = GATE ? a.cum_logf + block.head * T : NULL;
    double anchor = 0, next_cum_logf = 0;
    float next_lse = 0, next_delta = 0;
    auto load_queries = [&](int n) {
        int i = n * QUERIES + tid % QUERIES;
        int64_t at = block.head * T + min(i, T - 1);
        next_lse = i < T ? __ldg(&a.lse[at]) : INFINITY;
        next_delta = i < T ? __ldg(&a.delta[at]) : 0;
        if (GATE) next_cum_logf = __ldg(&a.cum_logf[at]);
    };
    auto store_acc_init = [&](int stage, int n) {
        bool diagonal = n * QUERIES < j0 + ATTENTION_BLOCK;
        float gate = GATE && !diagonal ? (float)(next_cum_logf - anchor) : 0;
        shared.acc_init[stage][tid % QUERIES] = (gate - next_lse) * ROOT;
        shared.minus_delta[stage][tid % QUERIES] = -next_delta;
        if (GATE && diagonal) shared.gate[stage].set(tid % QUERIES, next_cum_logf - anchor);
    };
    Sm80RowGate<MS> row_gate;
    if (GATE) {
        anchor = __ldg(&cum_logf[min(j0 + ATTENTION_BLOCK, T) - 1]);
        row_gate.load(cum_logf, j0 + warp_row + lane / 4, T, anchor);
    }
    load_queries(tile);
    store_acc_init(0, tile);
    load_queries(tile + 1);

    float shift[MS][2], column_sum[MS][2] = {}, acc_k[MS][DH / 8][4] = {}, acc_v[MS][DH / 8][4] = {};
    for (int r = 0; r < 2 * MS; r++) shift[r / 2][r % 2] = GATE ? -row_gate.high[r / 2][r % 2] : 0;
    uint32_t lane_k = sm80_advance<DH>(sm80_lane_a<DH>(shared.k, lane), warp_row, 0);
    uint32_t lane_v = sm80_advance<DH>(sm80_lane_a<DH>(shared.v, lane), warp_row, 0);

    for (int stage = 0; tile <= last_tile; tile++, stage ^= 1) {
        cp_async_wait_all();
        __syncthreads();
        if (tile < last_tile) copy_queries(stage ^ 1, tile + 1);
        store_acc_init(stage ^ 1, tile + 1);
        load_queries(tile + 2);

#pragma unroll 1
        for (int part = 0; part < QUERIES; part += PART) {
            int i0 = tile * QUERIES + part - j0;
            if (i0 + PART <= warp_row) continue; // all of these queries come before the warp's keys
            float s[MS][NS][4], dp[MS][NS][4];
            const float* acc_init = shared.acc_init[stage] + part + lane % 4 * 2;
            const float* minus_delta = shared.minus_delta[stage] + part + lane % 4 * 2;
            const bf16 *part_q = shared.q[stage] + part * DH, *part_dout = shared.dout[stage] + part * DH;
            sm80_matmul_abt<DH>(s, lane_k, sm80_lane_b<DH>(part_q, lane),
                                [&](float(&c)[4], int, int n) { sm80_init_columns(c, acc_init, n); });
            if (WINDOW && i0 + PART > shape.window) // the window ends in these queries
                sm80_for_each(s, [&](float& x, int, int, int row, int column) {
                    if (i0 + column >= warp_row + row + shape.window) x = -INFINITY;
                });
            if (i0 < ATTENTION_BLOCK)
                sm80_for_each(s, [&](float& x, int m, int half, int row, int column) {
                    const AttentionGate<QUERIES>& gate = shared.gate[stage];
                    int i = part + column;
                    float difference =
                        GATE ? (gate.high[i] - row_gate.high[m][half]) + (gate.low[i] - row_gate.low[m][half])
                             : 0;
                    x = exp2_approx(warp_row + row > i0 + column ? -INFINITY : x * SCALE + difference);
                });
            else
                sm80_for_each(s, [&](float& x, int m, int half, int, int) {
                    x = exp2_approx(x * SCALE + shift[m][half]);
                });
            sm80_matmul_abt<DH>(dp, lane_v, sm80_lane_b<DH>(part_dout, lane),
                                [&](float(&c)[4], int, int n) { sm80_init_columns(c, minus_delta, n); });
            uint32_t lane_q = sm80_lane_a<DH>(part_q, lane), lane_dout = sm80_lane_a<DH>(part_dout, lane);
#pragma unroll
            for (int n = 0; n < NS; n += 2) {
                uint32_t p[MS][4], ds[MS][4];
                sm80_pack(p, s, n);
                sm80_pack_ds<GATE>(ds, column_sum, s, dp, n);
                sm80_matmul_ab<DH>(acc_v, p, sm80_advance<DH>(lane_dout, n * 8, 0));
                sm80_matmul_ab<DH>(acc_k, ds, sm80_advance<DH>(lane_q, n * 8, 0));
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2 * MS && GATE && a.dcum_logf; r++) {
        float x = quad_sum(column_sum[r / 2][r % 2]);
        int j = j0 + warp_row + r * 8 + lane / 4;
        if (j < T && lane % 4 == 0) a.dcum_logf[block.head * T + j] -= x;
    }
    int row = j0 + warp_row;
    int64_t at = block.base + row * shape.row_stride;
    sm80_store<DH>(a.dk + at, shape.row_stride, T - row, shared.k + warp_row * DH, acc_k,
                   [](int, int) { return 1 / ROOT; });
    sm80_store<DH>(a.dv + at, shape.row_stride, T - row, shared.v + warp_row * DH, acc_v,
                   [](int, int) { return 1; });
}

// Launches both kernels with tiles of TILE tokens. delta must not be NULL. Results are always
// deterministic.
template <int DH, int TILE, bool GATE, bool WINDOW>
static inline void sm80_backward(const AttentionBackward* a, const HeadShape* s, cudaStream_t stream) {
    AttentionShape shape = attention_shape(s, ATTENTION_BLOCK, a->bounds, 4);
    shape.bounds.head_order = NULL; // heads in memory order
    int64_t grid = (int64_t)shape.heads * shape.blocks;
    attention_launch<Sm80Dq<DH, TILE>, SM80_SHARED_KIB>(sm80_dq_kernel<DH, TILE, GATE, WINDOW>, grid, stream,
                                                        *a, shape);
    attention_launch<Sm80Dkv<DH, TILE>, SM80_SHARED_KIB>(sm80_dkv_kernel<DH, TILE, GATE, WINDOW>, grid,
                                                         stream, *a, shape);
}

template <int DH, bool GATE, bool WINDOW>
static inline void attention_backward_sm80(const AttentionBackward* a, const HeadShape* s,
                                           cudaStream_t stream) {
    constexpr int WIDE = DH == 64 ? 64 : 32;
    constexpr size_t TWO = 2 * (sizeof(typename Sm80Dkv<DH, WIDE>::Shared) + 1024); // thread blocks
    bool narrow = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) < TWO;
    (narrow ? sm80_backward<DH, 32, GATE, WINDOW> : sm80_backward<DH, WIDE, GATE, WINDOW>)(a, s, stream);
}
