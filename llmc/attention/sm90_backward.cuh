/*
Backward of forgetting attention on Hopper. With p = exp(score - lse) and ds = p (dout_i v_j - delta_i):

    dq_i = sum_j ds k_j / sqrt(dh),  dk_j = sum_i ds q_i / sqrt(dh),  dv_j = sum_i p dout_i,
    dcum_logf_i = sum_j ds_ij - sum_j ds_ji

A thread block has 128 keys of a head and loops over tiles of queries, from the diagonal to the last query
that neither pruning nor the window hides from these keys. Warp roles:

    warp 0       tma_producer: K and V once, Q and dO tiles  ->  shared memory (ring of 3 stages); one thread
    warp 1       lse_producer: acc_init (lse and gate) and -delta of each query tile
    warps 2, 3   deterministic only: acquire and release the dq_semaphore; one thread each
    warps 4-11   mma_consumer: two warpgroups of 64 keys: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO,
                 dK += dS^T Q; dS^T goes through shared memory, as dQ = dS K needs all 128 keys

    then         sm90_backward_finish_kernel: dQ from float accumulators to bf16 rows

Pseudocode of the consumers' loop: above Sm90BackwardConsumer's run. sm90_backward_launch.cuh has the finish
kernel and launches both. Layouts are those of attention.cuh. The gate is described in shape.cuh; the anchor
is the block's last key.

S and dP are transposed (a row per key), so that P and dS are register operands of dV and dK. dQ is
accumulated in float in global memory, straight from registers (red.v4) and in accumulator layout, in which a
warp adds 512 contiguous bytes. Bulk adds would pass through shared memory twice, whose bandwidth bounds this
kernel.

The row sums of dS are 8 more columns of dS K, with ones in place of K; where registers allow it the column
sums are 8 more columns of dS^T Q. Both take dS as rounded for dQ and dK: dcum_logf is summed over time next,
where rounding errors would accumulate unless the same dS enters both sums.

Deterministic mode: a thread block adds to a tile of dQ after all blocks of keys nearer to the diagonal have
(dq_semaphore). Blocks of keys are therefore assigned by a ticket, in the order in which thread blocks start:
each waits only for others that already run, however few are resident, so there is no deadlock. Otherwise
thread blocks add to dQ in any order, and its last bits differ from run to run.
*/
#pragma once

#include "sm90.cuh"

template <int DH, bool WITH_WINDOW> struct Sm90Backward : Sm90BackwardTiles<DH> {
    typedef Sm90BackwardTiles<DH> Tiles;
    static constexpr bool WINDOW = WITH_WINDOW;
    static constexpr int CHANNELS = DH, THREADS = 384, CONSUMER_WARPS = 8, KEYS = ATTENTION_BLOCK;
    static constexpr int STEP = 64; // queries whose scores a warpgroup holds in registers at a time
    static constexpr int QUERIES = Tiles::QUERIES, STEPS = QUERIES / STEP, STAGES = Tiles::STAGES;

    __host__ __device__ static int tiles(const AttentionShape& shape) {
        return (shape.T + QUERIES - 1) / QUERIES;
    }

    // Each warpgroup computes a 64 x 64 part of a tile's dq: the queries of one step, or half of the columns.
    static constexpr int PART = 64 * 64;
    __device__ static int part_query(int tile, int group) {
        return tile * QUERIES + (STEPS == 2 ? group * 64 : 0);
    }
    __device__ static int part_column(int group) { return STEPS == 2 ? 0 : group * 64; }
    // Where both groups have the same queries, the first one adds the row sums.
    __device__ static bool part_has_sums(int group) { return STEPS == 2 || group == 0; }

    struct Shared {
        bf16 k[KEYS * DH], v[KEYS * DH]; // finally dk and dv
        bf16 q[STAGES][QUERIES * DH], dout[STAGES][QUERIES * DH];
        bf16 ds[2][KEYS * QUERIES];
        bf16 ones[16 * SM90_PANEL];
        // sqrt(dh) (cum_logf_i - anchor - lse_i); without cum_logf in the diagonal block
        float acc_init[STAGES][QUERIES];
        float minus_delta[STAGES][QUERIES];
        AttentionGate<KEYS> gate; // the keys' gate
        uint64_t keys_full, full[STAGES], empty[STAGES], dq_ready, dq_added;
        unsigned ticket; // deterministic only: number of thread blocks that started before this one
    };
};

struct Sm90BackwardParameters {
    CUtensorMap q, k, v, dout;           // boxes of a tile
    CUtensorMap dk, dv;                  // boxes of a warpgroup's rows
    float *dq_sum, *row_sum, *dcum_logf; // dcum_logf NULL: the gate is not learned
    int* dq_semaphore; // per tile: number of thread blocks that have added their dq; NULL: any order
    unsigned* tickets; // number of thread blocks that have started; used with dq_semaphore only
    const float *lse, *delta;
    const double* cum_logf;
    AttentionShape shape;
};

// A block of keys from j0 on, and its tiles of queries: from first to last, masked before `clear`.
struct Sm90BackwardBlock {
    int head, b, h, j0, first, clear, last;

    // The n-th block to compute
    template <class F>
    __device__ static Sm90BackwardBlock of(unsigned n, const Sm90BackwardParameters& p, int heads) {
        constexpr int TILES = ATTENTION_BLOCK / F::QUERIES; // of a block
        AttentionTile at = p.shape.tile(n, heads);
        // The first keys have most queries and come first. With the semaphore a block waits for the next one
        // nearer to the diagonal (a larger index), so these come first instead.
        int index = p.dq_semaphore ? p.shape.tiles_per_head - 1 - at.tile_index : at.tile_index;
        int last_block = p.shape.last_query_block<F::WINDOW>(at.head, index);
        Sm90BackwardBlock block;
        block.head = at.head;
        block.b = at.head / p.shape.NH;
        block.h = at.head % p.shape.NH;
        block.j0 = index * ATTENTION_BLOCK;
        block.first = index * TILES;
        block.clear = block.first + TILES;
        block.last = min((last_block + 1) * TILES, F::tiles(p.shape)) - 1;
        return block;
    }
};

#if SM90_CODE

// ----------------------------------------------------------------------------
// tma_producer: one thread

template <class F>
__device__ static inline void sm90_backward_tma_producer(typename F::Shared& shared,
                                                         const Sm90BackwardParameters& p,
                                                         const Sm90BackwardBlock& block) {
    sm90_arrive_expect_tx(&shared.keys_full, sizeof shared.k + sizeof shared.v);
    const int key_head = p.shape.key_head(block.h);
    sm90_load_tile<F::CHANNELS, F::KEYS>(shared.k, &p.k, key_head, block.j0, block.b, &shared.keys_full);
    sm90_load_tile<F::CHANNELS, F::KEYS>(shared.v, &p.v, key_head, block.j0, block.b, &shared.keys_full);
    Sm90Ring<F::STAGES> ring;
    for (int tile = block.first; tile <= block.last; tile++, ring.next()) {
        int stage = ring.stage, t = tile * F::QUERIES;
        uint64_t* full = &shared.full[stage];
        sm90_wait(&shared.empty[stage], ring.phase ^ 1);
        sm90_arrive_expect_tx(full, sizeof shared.q[0] + sizeof shared.dout[0]);
        sm90_load_tile<F::CHANNELS, F::QUERIES>(shared.q[stage], &p.q, block.h, t, block.b, full);
        sm90_load_tile<F::CHANNELS, F::QUERIES>(shared.dout[stage], &p.dout, block.h, t, block.b, full);
    }
}

// ----------------------------------------------------------------------------
// lse_producer: one warp. Writes the initial accumulators: acc_init of the scores, -delta of their gradients

template <class F, bool GATE>
__device__ static inline void sm90_backward_lse_producer(typename F::Shared& shared,
                                                         const Sm90BackwardParameters& p,
                                                         const Sm90BackwardBlock& block) {
    int lane = (int)threadIdx.x % 32, T = p.shape.T;
    const float *lse = p.lse + (int64_t)block.head * T, *delta = p.delta + (int64_t)block.head * T;
    const double* cum_logf = GATE ? p.cum_logf + (int64_t)block.head * T : NULL;
    double anchor = GATE ? cum_logf[min(block.j0 + ATTENTION_BLOCK, T) - 1] : 0;
    double next_cum_logf[2] = {};
    float next_lse[2], next_delta[2];
    auto load = [&](int i0) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int i = min(i0 + lane + 32 * e, T - 1);
            next_lse[e] = lse[i], next_delta[e] = delta[i];
            if (GATE) next_cum_logf[e] = cum_logf[i];
        }
    };
    load(block.first * F::QUERIES);
    Sm90Ring<F::STAGES> ring;
    for (int tile = block.first; tile <= block.last; tile++, ring.next()) {
        sm90_wait(&shared.empty[ring.stage], ring.phase ^ 1);
#pragma unroll 1
        for (int step = 0; step < F::STEPS; step++) {
            int i0 = tile * F::QUERIES + step * F::STEP;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int at = step * F::STEP + lane + 32 * e;
                bool exists = i0 + lane + 32 * e < T; // queries past T get probability 0
                float gate = GATE && tile >= block.clear ? (float)(next_cum_logf[e] - anchor) : 0;
                float acc_init = (gate - next_lse[e]) * (float)AttentionScale<F::CHANNELS>::ROOT;
                shared.acc_init[ring.stage][at] = exists ? acc_init : -INFINITY;
                shared.minus_delta[ring.stage][at] = exists ? -next_delta[e] : 0;
            }
            load(i0 + F::STEP); // while waiting for an empty stage
        }
        sm90_arrive_warp(&shared.full[ring.stage]);
    }
}

// ----------------------------------------------------------------------------
// dq_semaphore: thread blocks add to a tile of dq in a fixed order, from the diagonal down, which is about
// the order in which they reach it. For each tile:
//
//     acquire_dq   spins until the tile's counter says that all blocks before this one have added
//     consumers    wait for dq_ready, add, arrive on dq_added
//     release_dq   waits for dq_added, then raises the counter (store release: every block sees the sums)
//
// Each of the two threads waits for memory, but consumers wait only where additions come out of order.

// Per-tile counter: thread blocks that have added their dq, and how many must have before this one may
template <class F> struct Sm90DqSemaphore {
    int *added, before;
    __device__ Sm90DqSemaphore(const Sm90BackwardParameters& p, const Sm90BackwardBlock& block, int tile)
        : added(p.dq_semaphore + (int64_t)block.head * F::tiles(p.shape) + tile),
          before(tile * F::QUERIES / ATTENTION_BLOCK - block.j0 / ATTENTION_BLOCK) {}
};

template <class F>
__device__ static inline void sm90_backward_acquire_dq(typename F::Shared& shared,
                                                       const Sm90BackwardParameters& p,
                                                       const Sm90BackwardBlock& block) {
    for (int tile = block.first; tile <= block.last; tile++) {
        Sm90DqSemaphore<F> semaphore(p, block, tile);
        while (sm90_load_acquire(semaphore.added) != semaphore.before) {}
        if (tile > block.first) sm90_wait(&shared.dq_ready, (uint32_t)(tile - block.first - 1) % 2);
        sm90_arrive(&shared.dq_ready);
    }
}

template <class F>
__device__ static inline void sm90_backward_release_dq(typename F::Shared& shared,
                                                       const Sm90BackwardParameters& p,
                                                       const Sm90BackwardBlock& block) {
    for (int tile = block.first; tile <= block.last; tile++) {
        if (tile == block.first) sm90_arrive(&shared.dq_ready);
        sm90_wait(&shared.dq_added, (uint32_t)(tile - block.first) % 2);
        if (tile < block.last) sm90_arrive(&shared.dq_ready); // the next phase of dq_added may begin
        Sm90DqSemaphore<F> semaphore(p, block, tile);
        sm90_store_release(semaphore.added, semaphore.before + 1);
    }
}

// ----------------------------------------------------------------------------
// mma_consumer: a warpgroup of 64 keys

template <int DH, bool GATE, bool WINDOW, bool DETERMINISTIC> struct Sm90BackwardConsumer {
    typedef Sm90Backward<DH, WINDOW> F;
    static constexpr int K16 = F::STEP / 16; // wgmmas over the queries of a step

    typename F::Shared& shared;
    const Sm90BackwardParameters& p;
    const Sm90BackwardBlock& block;
    // The shuffle tells the compiler that all lanes have the same warp number.
    const int lane = (int)threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) - 4;
    const int group = warp / 4, warp_key = warp * 16; // the group's 64 keys and the warp's 16 of them
    const int lane_key = warp_key + lane / 4;         // and lane_key + 8 are the lane's rows

    uint32_t lane_offset = sm90_chunk_offset<F::KEYS>(warp_key + lane % 16, lane / 16); // see lane_address

    // 4 more registers for 8 columns of ones: row sums in dq, column sums in dk, where there is room (dh 64).
    static constexpr bool WIDE_DK = GATE && DH == 64;
    float dk[DH / 2 + (WIDE_DK ? 4 : 0)] = {}, dv[DH / 2] = {};
    float s[32], dp[32], dq[32 + (GATE ? 4 : 0)];
    float column_sum[2] = {}; // the lane's part
    uint32_t probabilities[K16][4], ds[K16][4];
    uint32_t key_operand[DH / 16][4], value_operand[DH / 16][4];

    __device__ Sm90BackwardConsumer(typename F::Shared& shared, const Sm90BackwardParameters& p,
                                    const Sm90BackwardBlock& block)
        : shared(shared), p(p), block(block) {
        // Opaque, so that the compiler keeps one register and not two parts of it
        asm volatile("" : "+r"(lane_offset));
    }

    // Address of the lane's 16 bytes in the warp's rows of a tile, columns from 16 k on, for ldmatrix and
    // stmatrix. Within a panel, 16 columns further on is ^ 32.
    __device__ uint32_t lane_address(const bf16* tile, int k) const {
        return smem_address(tile) + (uint32_t)(k / 4 * F::KEYS * 128) +
               (lane_offset ^ (uint32_t)(k % 4 * 32));
    }

    // One value per column, for both of the lane's rows
    __device__ void load_acc_init(float (&d)[32], const float* columns) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 y = *(const float2*)(columns + n * 8 + lane % 4 * 2);
            d[4 * n] = d[4 * n + 2] = y.x;
            d[4 * n + 1] = d[4 * n + 3] = y.y;
        }
    }
    // d += A B^T: A is the group's 64 rows of k or v, in registers or shared memory, B a step of queries
    __device__ void issue_abt(float (&d)[32], const uint32_t (&rows)[DH / 16][4], const bf16* rows_tile,
                              const bf16* tile, int step) {
        uint64_t b = sm90_make_smem_desc<F::QUERIES>(tile) + sm90_rows(step * F::STEP);
        uint64_t a = sm90_make_smem_desc<F::KEYS>(rows_tile) + sm90_rows(group * 64);
        // Recomputed each time: kept across the loop, 16 descriptors would take the accumulators' registers.
        asm volatile("" : "+l"(a));
        sm90_fence_operand(d);
        sm90_wgmma_fence();
#pragma unroll
        for (int k = 0; k < DH / 16; k++) {
            if (F::KEYS_IN_REGISTERS)
                sm90_wgmma<false>(d, rows[k], b + sm90_columns<F::QUERIES>(16 * k), true);
            else
                sm90_wgmma<false, false>(d, a + sm90_columns<F::KEYS>(16 * k),
                                         b + sm90_columns<F::QUERIES>(16 * k), true);
        }
        sm90_commit_group();
    }
    __device__ void issue_scores(int stage, int step) {
        load_acc_init(s, shared.acc_init[stage] + step * F::STEP);
        issue_abt(s, key_operand, shared.k, shared.q[stage], step);
    }
    __device__ void issue_dp(int stage, int step) {
        load_acc_init(dp, shared.minus_delta[stage] + step * F::STEP);
        issue_abt(dp, value_operand, shared.v, shared.dout[stage], step);
    }
    // dV += P^T dO and dK += dS^T Q, over a step of queries
    __device__ void issue_dv(int stage, int step) {
        sm90_wgmma_fence();
        sm90_matmul_ab(dv, probabilities,
                       sm90_make_smem_desc<F::QUERIES>(shared.dout[stage]) + sm90_rows(step * F::STEP), true);
        sm90_commit_group();
    }
    __device__ void issue_dk(int stage, int step) {
        const bf16* rows = shared.q[stage] + step * F::STEP * SM90_PANEL;
        sm90_wgmma_fence();
#pragma unroll
        for (int k = 0; k < K16; k++)
            sm90_wgmma<true>(dk, ds[k],
                             WIDE_DK ? sm90_make_smem_desc_pair(rows + 16 * k * SM90_PANEL, shared.ones)
                                     : sm90_make_smem_desc<F::QUERIES>(rows) + sm90_rows(16 * k),
                             true);
        sm90_commit_group();
    }

    // On the diagonal: makes scores exponents to base 2, with earlier queries masked. i, j count from j0.
    __device__ void finish_diagonal(int i0) {
#pragma unroll
        for (int e = 0; e < 32; e++) {
            int i = i0 + e / 4 * 8 + lane % 4 * 2 + e % 2, j = lane_key + e % 4 / 2 * 8;
            float gate = GATE ? shared.gate.difference(i, j) : 0;
            s[e] = j <= i ? s[e] * AttentionScale<DH>::SCALE + gate : -INFINITY;
        }
    }
    // Masks the queries past the window, in scores or exponents, where the step has any.
    __device__ void mask_window(int i0) {
        int past = lane_key + p.shape.window - i0 - lane % 4 * 2; // relative to the lane's first column
        if (i0 + F::STEP <= p.shape.window) return;
#pragma unroll
        for (int e = 0; e < 32; e++)
            if (e / 4 * 8 + e % 2 >= past + e % 4 / 2 * 8) s[e] = -INFINITY;
    }
    __device__ void exponentiate(bool diagonal) {
        float factor = diagonal ? 1 : AttentionScale<DH>::SCALE;
        float shift[2] = {}; // loaded each time: there are no registers to keep it
        if (GATE && !diagonal)
            shift[0] = -shared.gate.high[lane_key], shift[1] = -shared.gate.high[lane_key + 8];
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = exp2_approx(s[e] * factor + shift[e % 4 / 2]);
    }
    __device__ void pack_probabilities() {
#pragma unroll
        for (int r = 0; r < 4 * K16; r++) probabilities[r / 4][r % 4] = pack_bf16x2(s[2 * r], s[2 * r + 1]);
    }
    __device__ void compute_ds() {
#pragma unroll
        for (int r = 0; r < 4 * K16; r++)
            ds[r / 4][r % 4] = pack_bf16x2(s[2 * r] * dp[2 * r], s[2 * r + 1] * dp[2 * r + 1]);
    }
    // tile: [keys][queries], one panel per step
    __device__ void store_ds(bf16* tile, int step) {
        uint32_t to = lane_address(tile, step * K16);
#pragma unroll
        for (int k = 0; k < K16; k++) sm90_stmatrix(to ^ (uint32_t)(k * 32), ds[k]);
    }
    __device__ void add_column_sums() {
#pragma unroll
        for (int r = 0; r < 4 * K16; r++) {
            uint32_t pair = ds[r / 4][r % 4];
            column_sum[r % 2] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
        }
    }
    // dq [64 queries, 64 columns] = dS K over the block's keys, and 8 columns of row sums
    __device__ void issue_dq(const bf16* ds_tile) {
        uint64_t a = sm90_make_smem_desc<F::KEYS>(ds_tile + F::part_query(0, group) * F::KEYS);
        const bf16* keys = shared.k + F::part_column(group) * F::KEYS;
        sm90_wgmma_fence();
#pragma unroll
        for (int k = 0; k < F::KEYS / 16; k++)
            sm90_wgmma<true, true>(dq, a + sm90_rows(16 * k),
                                   sm90_make_smem_desc_pair(keys + 16 * k * SM90_PANEL, shared.ones), k > 0);
        sm90_commit_group();
    }

    __device__ void add_dq(int tile) {
        if (DETERMINISTIC) sm90_wait(&shared.dq_ready, (uint32_t)(tile - block.first) % 2);
        float* to = p.dq_sum + (((int64_t)block.head * F::tiles(p.shape) + tile) * 2 + group) * F::PART +
                    threadIdx.x % 128 * 4;
#pragma unroll
        for (int n = 0; n < 8; n++)
            sm90_reduce_add4(to + n * 128 * 4, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
        bool has_sums = GATE && p.dcum_logf && lane % 4 == 0 && F::part_has_sums(group);
        int row = F::part_query(tile, group) + warp_key % 64 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2 && has_sums; half++)
            if (row + half * 8 < p.shape.T)
                atomicAdd(p.row_sum + (int64_t)block.head * p.shape.T + row + half * 8, dq[32 + 2 * half]);
        if (DETERMINISTIC) sm90_arrive_warp(&shared.dq_added);
    }

    __device__ void fill_gate() {
        const double* cum_logf = p.cum_logf + (int64_t)block.head * p.shape.T;
        double anchor = cum_logf[min(block.j0 + ATTENTION_BLOCK, p.shape.T) - 1];
        int i = (int)threadIdx.x - 128;
        if (i < F::KEYS) shared.gate.set(i, block.j0 + i < p.shape.T ? cum_logf[block.j0 + i] - anchor : 0);
    }
    __device__ void load_operands() {
#pragma unroll
        for (int k = 0; k < DH / 16; k++) {
            ldmatrix(key_operand[k], lane_address(shared.k, k));
            ldmatrix(value_operand[k], lane_address(shared.v, k));
        }
    }

    template <int R> __device__ void store_rows(bf16* tile, const float (&acc)[R], float factor) {
#pragma unroll
        for (int k = 0; k < DH / 16; k++) {
            uint32_t y[4];
#pragma unroll
            for (int r = 0; r < 4; r++)
                y[r] = pack_bf16x2(acc[8 * k + 2 * r] * factor, acc[8 * k + 2 * r + 1] * factor);
            sm90_stmatrix(lane_address(tile, k), y);
        }
    }
    __device__ void store_results() {
        sm90_named_sync(1, 256); // the other group no longer reads our keys
        store_rows(shared.k, dk, (float)(1 / AttentionScale<DH>::ROOT));
        store_rows(shared.v, dv, 1);
        sm90_fence_async_proxy();
        sm90_named_sync(2 + group, 128);
        if (threadIdx.x % 128 == 0) {
            int at = group * 64 * SM90_PANEL, t = block.j0 + group * 64;
            sm90_store_tile<DH, F::KEYS>(&p.dk, block.h, t, block.b, shared.k + at);
            sm90_store_tile<DH, F::KEYS>(&p.dv, block.h, t, block.b, shared.v + at);
            sm90_commit_stores();
            sm90_wait_stores_read<0>(); // the thread block must not end before
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = WIDE_DK ? dk[DH / 2 + 2 * half] : quad_sum(column_sum[half]);
            int j = block.j0 + lane_key + half * 8;
            if (GATE && p.dcum_logf && lane % 4 == 0 && j < p.shape.T)
                p.dcum_logf[(int64_t)block.head * p.shape.T + j] = -sum;
        }
    }

    // Main loop of a warpgroup, 64 keys; a step is 64 queries, a tile 2 steps at dh 64, 1 at dh 128.
    //
    //     S^T = acc_init + K Q^T of the first step
    //     for each tile of queries, from the diagonal to `last`; for each step of it:
    //         issue dP^T = -delta + V dO^T;  wait S^T                  in flight: dK of the step before, dP^T
    //         diagonal block: scale, gate, causal mask;  window: mask
    //         P^T = 2^(S^T scale - gate), in the diagonal block 2^(S^T)
    //         dh 64:  wait dK;   issue dV += P^T dO;  wait dP^T        in flight: dV
    //         dh 128: wait dK, dP^T
    //         first step: arrive empty (the tile before);  dS^T = P^T dP^T as bf16, also to shared memory
    //         dh 128: issue dV += P^T dO
    //         issue S^T of the next step; after a tile's last step first wait full (the next tile)
    //         last step: both warpgroups meet (their dS^T is complete);  wait dV;  issue dQ = dS K
    //         issue dK += dS^T Q
    //     after each tile: wait dQ;  add dQ to global memory, in order when deterministic       in flight: dK
    //     store dK, dV through the shared memory of K, V; column sums of dS to dcum_logf
    //
    // Loads run up to 2 tiles ahead (3 stages). Pruning and the window only set `last`.
    __device__ void run() {
        if (GATE) fill_gate();
        sm90_named_sync(1, 256);
        sm90_wait(&shared.keys_full, 0);
        if (F::KEYS_IN_REGISTERS) load_operands();
        Sm90Ring<F::STAGES> ring;
        sm90_wait(&shared.full[0], 0);
        issue_scores(0, 0);
        sm90_wait_group<0>();

        for (int tile = block.first, buffer = 0; tile <= block.last; tile++, buffer ^= 1) {
            int stage = ring.stage;
            ring.next();
#pragma unroll
            for (int step = 0; step < F::STEPS; step++) {
                issue_dp(stage, step);
                sm90_wait_group<2>(); // dk and dp remain in flight
                sm90_fence_operand(s), sm90_fence_operand(probabilities);
                if (tile < block.clear) finish_diagonal(tile * F::QUERIES + step * F::STEP - block.j0);
                if (WINDOW) mask_window(tile * F::QUERIES + step * F::STEP - block.j0);
                exponentiate(tile < block.clear);
                if (F::EARLY_DV) {
                    sm90_wait_group<1>(); // dp remains in flight
                    pack_probabilities();
                    issue_dv(stage, step);
                    sm90_wait_group<1>(); // dv remains in flight
                } else
                    sm90_wait_group<0>();
                sm90_fence_operand(dp), sm90_fence_operand(ds);
                if (step == 0 && tile > block.first) // dk of the previous tile has finished
                    sm90_arrive_warp(&shared.empty[stage == 0 ? F::STAGES - 1 : stage - 1]);
                if (!F::EARLY_DV) pack_probabilities();
                compute_ds();
                store_ds(shared.ds[buffer], step);
                if (!F::EARLY_DV) issue_dv(stage, step);
                if (step + 1 < F::STEPS) {
                    issue_scores(stage, step + 1);
                } else {
                    sm90_fence_async_proxy();
                    // After the last tile these are scores of stale data, which are not used.
                    if (tile < block.last) sm90_wait(&shared.full[ring.stage], ring.phase);
                    issue_scores(ring.stage, 0);
                    sm90_named_sync(1, 256);
                    sm90_wait_group<1>(); // the scores remain in flight; dq takes probabilities' registers
                    sm90_fence_operand(probabilities);
                    issue_dq(shared.ds[buffer]);
                }
                issue_dk(stage, step);
                if (GATE && !WIDE_DK) add_column_sums(); // while dq is in flight
            }
            sm90_wait_group<1>(); // dk remains in flight
            sm90_fence_operand(dq);
            add_dq(tile);
        }
        sm90_wait_group<0>();
        sm90_fence_operand(dk), sm90_fence_operand(dv), sm90_fence_operand(s);
        store_results();
    }
};

#endif // SM90_CODE

// ----------------------------------------------------------------------------
// kernels and launch

template <int DH, bool GATE, bool WINDOW, bool DETERMINISTIC>
__global__ void __launch_bounds__(Sm90Backward<DH, WINDOW>::THREADS, 1)
    sm90_backward_kernel(const __grid_constant__ Sm90BackwardParameters p) {
#if SM90_CODE
    typedef Sm90Backward<DH, WINDOW> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    unsigned index = blockIdx.x;
    const int heads = p.shape.heads_with_tiles();
    if (index >= (unsigned)heads * (unsigned)p.shape.tiles_per_head) return;
    if (threadIdx.x == 0) {
        if (DETERMINISTIC) index = atomicAdd(p.tickets, 1); // arrives while the barriers are initialized
        sm90_barrier_init(&shared.keys_full, 1, 0);
        for (int i = 0; i < F::STAGES; i++) {
            sm90_barrier_init(&shared.full[i], 1, 1); // tma_producer, lse_producer
            sm90_barrier_init(&shared.empty[i], 0, F::CONSUMER_WARPS);
        }
        sm90_barrier_init(&shared.dq_ready, 2, 0); // acquired, and the previous tile's dq_added has completed
        sm90_barrier_init(&shared.dq_added, 0, F::CONSUMER_WARPS);
        sm90_barrier_init_fence();
    }
    for (int i = (int)threadIdx.x; i < 16 * SM90_PANEL; i += F::THREADS) shared.ones[i] = (bf16)1.0f;
    sm90_fence_async_proxy();
    if (DETERMINISTIC && threadIdx.x == 0) shared.ticket = index;
    __syncthreads();
    // The shuffle tells the compiler that all lanes have the same ticket.
    if (DETERMINISTIC) index = __shfl_sync(0xffffffffu, shared.ticket, 0);
    const Sm90BackwardBlock block = Sm90BackwardBlock::of<F>(index, p, heads);
    if (threadIdx.x < 128) {
        sm90_reg_dealloc<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) sm90_backward_tma_producer<F>(shared, p, block);
        if (threadIdx.x / 32 == 1) sm90_backward_lse_producer<F, GATE>(shared, p, block);
        if (DETERMINISTIC && threadIdx.x == 64) sm90_backward_acquire_dq<F>(shared, p, block);
        if (DETERMINISTIC && threadIdx.x == 96) sm90_backward_release_dq<F>(shared, p, block);
    } else {
        sm90_reg_alloc<F::CONSUMER_REGISTERS>();
        Sm90BackwardConsumer<DH, GATE, WINDOW, DETERMINISTIC>(shared, p, block).run();
    }
#endif
}
