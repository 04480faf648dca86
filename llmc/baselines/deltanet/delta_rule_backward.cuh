/*
Gradients of the delta rule without decays (delta_rule_gated_backward.cuh: with them), from S0, V', dS1 and
dV' of each chunk (delta_rule_states.cuh). With T of delta_rule_prepare.cuh, X = T^T dV' is the gradient of
the recurrence's u, and the terms through A and W simplify:

    dP = lower(dO V'^T)           dA = -strict_lower(X V'^T)         E = dA K - X S0^T
    dQ = scale (dO S0^T + dP K)
    dV = scale diag(beta) X
    dK = scale (diag(beta) E + (diag(beta) dA)^T K + dP^T Q + V' dS1^T)
    dbeta_i = scale X_i V'_i / beta_i     as V'_i is beta_i times the prediction's error; 0 for beta_i = 0

A thread block has a tile of 64 tokens of one head, each of its four warps 16 of them. Q and dS1 reuse the
shared memory of dO and S0, so that two thread blocks fit on an SM.
*/
#pragma once

#include "delta_rule_forward.cuh"
#include "delta_rule_gated_backward.cuh"

struct DeltaBackward {
    static constexpr int THREADS = DeltaBlock::THREADS;
    struct Shared {
        bf16 k[DELTA_ROWS], values_t[DELTA_ROWS], dvalues_t[DELTA_ROWS];
        bf16 dout_q[DELTA_ROWS];                    // dO, then Q
        bf16 states_t[DELTA_STATE];                 // S0^T, then dS1^T
        bf16 inverse_da[DELTA_CHUNK * DELTA_CHUNK]; // T, then diag(beta) dA
        bf16 dp[DELTA_CHUNK * DELTA_CHUNK];
        float beta[DELTA_CHUNK];
    };
    static_assert(2 * (sizeof(Shared) + 1024) <= 227 << 10, "two thread blocks fit on an SM");
};

// dP, and dQ before the factor `scale`
template <bool DOCS>
__device__ static inline void delta_rule_dq(float (&dq)[1][16][4], DeltaBackward::Shared& shared, int row,
                                            const DeltaWalls& walls) {
    float s[1][8][4];
    scan_clear(s);
    scan_clear(dq);
    TileA<DELTA_D, false> tile_dout(shared.dout_q, row);
    scan_matmul<DELTA_D>(s, tile_dout, BlockB<DELTA_CHUNK, true>(shared.values_t));
    delta_rule_mask<false, false, DOCS>(s, row, walls);
    scan_matmul<DELTA_D>(dq, tile_dout, BlockB<DELTA_D, true>(shared.states_t));
    if (DOCS) delta_rule_clear_rows(dq, row, walls.first());
    uint32_t dp[4][4];
    TileB<DELTA_D, true> tile_k(shared.k);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        scan_pack(dp[j], s, 2 * j);
        scan_mma(dq, dp[j], tile_k, j * 16);
    }
    delta_rule_store_strip(shared.dp, dp, row);
}

// From the fragments of -X: E, diag(beta) dA in shared memory, where T was, and X_i V'_i, in one lane of the
// row's four, 0 in others
template <bool DOCS>
__device__ static inline void
delta_rule_e(float (&e)[1][16][4], float (&x_values)[2], const uint32_t (&minus_x)[8][4],
             const float (&beta)[2], DeltaBackward::Shared& shared, int first_row, const DeltaWalls& walls) {
    float s[1][8][4];
    scan_clear(s);
    scan_clear(e);
    BlockB<DELTA_D, true> tile_state(shared.states_t);
    TileB<DELTA_D, true> tile_k(shared.k);
    BlockB<DELTA_CHUNK, true> tile_values(shared.values_t);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        scan_mma(s, minus_x[k], tile_values, k * 16);
        scan_mma(e, minus_x[k], tile_state, k * 16);
    }
    if (DOCS) delta_rule_clear_rows(e, first_row, walls.first());
    sm80_for_each(s, [&](float& y, int, int half, int row, int column) {
        if (first_row + row == column) x_values[half] = -y;
        if (first_row + row <= column) y = 0;
    });
    if (DOCS) delta_rule_mask<false, true, true>(s, first_row, walls);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t f[4];
        scan_pack(f, s, 2 * j);
        scan_mma(e, f, tile_k, j * 16);
        for (int r = 0; r < 4; r++) {
            const float* x = &s[0][2 * j + r / 2][r % 2 * 2];
            *scan_pair<DELTA_CHUNK>(shared.inverse_da, first_row + (int)threadIdx.x % 32 / 4 + r % 2 * 8,
                                    2 * j + r / 2) = pack_bf16x2(x[0] * beta[r % 2], x[1] * beta[r % 2]);
        }
    }
}

// Rows before `first` as zeros
template <class A> struct DeltaRowsFrom {
    A rows;
    int row, first; // row: the lane's first one
    __device__ void load(uint32_t (&f)[4], int k) const {
        rows.load(f, k);
        for (int r = 0; r < 4; r++)
            if (row + r % 2 * 8 < first) f[r] = 0;
    }
};

template <bool DOCS>
static __global__ void __launch_bounds__(DeltaBackward::THREADS, 2)
    delta_rule_backward_kernel(const __grid_constant__ ScanBackward g, const __grid_constant__ Scan a,
                               const __grid_constant__ DeltaWork work, const __grid_constant__ ScanShape s) {
    extern __shared__ __align__(1024) char shared_bytes[];
    DeltaBackward::Shared& shared = *(DeltaBackward::Shared*)shared_bytes;
    DeltaBlock block(work, s);
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16,
              left = (int)s.T - block.first - row;
    const int64_t t = block.first + row;
    auto factor = [&](int, int) { return s.scale; };
    block.copy(shared.dout_q, g.dout + block.out, s, (int64_t)s.NH * DELTA_D);
    block.copy_blocks<DELTA_ROWS>(shared.values_t, work.values_t);
    block.copy_blocks<DELTA_STATE>(shared.states_t, work.states_t);
    block.copy(shared.k, a.k + block.keys, s, s.key_row);
    cp_async_commit_group();
    block.copy_tile<DELTA_CHUNK, DELTA_CHUNK>(shared.inverse_da, work.inverse);
    block.copy_blocks<DELTA_ROWS>(shared.dvalues_t, work.dvalues_t);
    cp_async_commit_group();
    delta_rule_load_beta(shared.beta, a.beta, block, work, s);
    DeltaWalls walls = {};
    if (DOCS) walls = DeltaWalls::of(block, work, s);
    cp_async_wait_group<1>();
    __syncthreads();
    const float beta[2] = {shared.beta[row + lane / 4], shared.beta[row + lane / 4 + 8]};
    bf16* own_rows = shared.dout_q + row * DELTA_D; // of dO: no other warp reads them
    float acc[1][16][4];
    delta_rule_dq<DOCS>(acc, shared, row, walls);
    sm80_store<DELTA_D>(g.dq + block.keys + t * s.key_row, s.key_row, left, own_rows, acc, factor);

    cp_async_wait_all();
    __syncthreads();
    scan_clear(acc); // X
    scan_matmul<DELTA_CHUNK>(acc, TileA<DELTA_CHUNK, true>(shared.inverse_da, row),
                             BlockB<DELTA_CHUNK, false>(shared.dvalues_t));
    uint32_t minus_x[8][4];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (i % 4 == 0) scan_pack(minus_x[i / 4], acc, i / 4 * 2);
        minus_x[i / 4][i % 4] ^= 0x80008000u;
    }
    sm80_store<DELTA_D>(g.dv + block.values + t * s.value_row, s.value_row, left, own_rows, acc,
                        [&](int, int half) { return beta[half] * s.scale; });
    float x_values[2] = {};
    __syncthreads(); // T has been read
    delta_rule_e<DOCS>(acc, x_values, minus_x, beta, shared, row, walls);
    __syncthreads(); // dO and S0 have been read
    block.copy(shared.dout_q, a.q + block.keys, s, s.key_row);
    block.copy_blocks<DELTA_STATE>(shared.states_t, work.dstates_t);
    for (int half = 0; half < 2; half++) {
        float x = quad_sum(x_values[half]);
        int64_t i = t + half * 8 + lane / 4, head = block.tile / work.chunks;
        if (i < s.T && lane % 4 == 0)
            g.dbeta[(head / s.NH * s.T + i) * s.NH + head % s.NH] =
                beta[half] > 0 ? x * s.scale / beta[half] : 0;
    }
#pragma unroll
    for (int i = 0; i < 64; i++) acc[0][i / 4][i % 4] *= beta[i % 4 / 2];
    cp_async_wait_all();
    __syncthreads();
    scan_matmul<DELTA_CHUNK>(acc, TileA<DELTA_CHUNK, true>(shared.inverse_da, row),
                             TileB<DELTA_D, true>(shared.k));
    scan_matmul<DELTA_CHUNK>(acc, TileA<DELTA_CHUNK, true>(shared.dp, row),
                             TileB<DELTA_D, true>(shared.dout_q));
    BlockA<DELTA_CHUNK> values(shared.values_t, row);
    BlockB<DELTA_D, true> dstates(shared.states_t);
    if constexpr (DOCS)
        scan_matmul<DELTA_D>(acc, DeltaRowsFrom<BlockA<DELTA_CHUNK>>{values, row + lane / 4, walls.last()},
                             dstates);
    else
        scan_matmul<DELTA_D>(acc, values, dstates);
    sm80_store<DELTA_D>(g.dk + block.keys + t * s.key_row, s.key_row, left, shared.dvalues_t + row * DELTA_D,
                        acc, factor);
}

static inline void delta_rule_gradients(const DeltaWork* work, const ScanBackward* g, const Scan* a,
                                        const ScanShape* s, cudaStream_t stream) {
    if (s->decays) return delta_rule_gated_gradients(work, g, a, s, stream);
    auto kernel = s->doc_start ? delta_rule_backward_kernel<true> : delta_rule_backward_kernel<false>;
    scan_launch<DeltaBackward>(kernel, s->B * s->NH * work->chunks, stream, *g, *a, *work, *s);
}

// Writes the gradients in g. a->state is NULL. a->saved is that of delta_rule_forward over the same inputs,
// unless g->recomputes.
static inline void delta_rule_backward(const ScanBackward* g, const Scan* a, const ScanShape* s,
                                       cudaStream_t stream) {
    Range range("scan", RANGE_BACKWARD, stream);
    delta_rule_check(a, s);
    assert(!a->state);
    ScanMemory memory = scan_memory(a);
    DeltaWork work = delta_rule_work(&memory, s, true);
    if (g->recomputes) delta_rule_prepare(&work, a, s, stream);
    delta_rule_y(&work, a, g->dout, s, stream);
    delta_rule_states(&work, a, g->dout, scan_chains(g->recomputes), s, stream);
    delta_rule_gradients(&work, g, a, s, stream);
}
