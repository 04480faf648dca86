/*
Forgetting attention of band heads (pruning.cuh) on Hopper, dh 64: block m of 64 queries attends to its own 64
keys and to those of block m - 1, and to no others.

The kernels of sm90_forward.cuh and sm90_backward.cuh have tiles of 128 tokens: for band heads half of what
they compute has no weight, and dq passes through memory in float. Here a thread block is one warpgroup, which
walks along a strip of 8 blocks of one head. Several thread blocks on an SM hide each other's latencies.

    forward     O_m = softmax(Q_m [K_m-1, K_m]^T) [V_m-1, V_m]; all scores of a row are in registers
    backward    with K, V of block m - 1, then with those of block m:
                S^T = K Q_m^T, dP^T = V dO_m^T, dV += P^T dO_m, dK += dS^T Q_m, dQ_m += dS K

    registers   P and dS as operands; dQ_m for both steps of m; dK and dV of block m for the second step of m
                and the first of m + 1: each gradient is written once, as bf16, without atomics
    shared      3 stages, each the tiles of one block: m - 1, m and the next one, in flight; dS. Results leave
                through tiles that are no longer read
    warps       thread 0 issues all TMA copies; all four warps compute, 16 rows each

A strip reads the keys of the block before it, and backward the queries of the block behind it, a second time.
Fused for the other heads' kernels: backward clears their dq_sum and row_sum, forward clears the tile counter.

Pseudocode of the loops: above run_block (forward) and step (backward). Layouts are those of attention.cuh.
The gate is described in shape.cuh; the anchor is a block's last token. Called by the launches of
sm90_forward.cuh and sm90_backward_launch.cuh.
*/
#pragma once

#include "sm90.cuh"

// Which kernels leave band heads to these
template <int DH, bool GATE, bool WINDOW> struct Sm90HasBand {
    static constexpr bool value = DH == 64 && GATE && !WINDOW;
};

template <bool BACKWARD> struct Sm90Band {
    static constexpr int DH = 64, ROWS = ATTENTION_BAND, THREADS = 128, STAGES = 3;
    static constexpr int TILE = ROWS * DH;
    static constexpr int RESIDENT = BACKWARD ? 2 : 3;           // thread blocks an SM
    static constexpr int SHARED_KIB = 228 / RESIDENT - 1;       // CUDA reserves 1 KiB a thread block
    enum { K, V, Q, DOUT, TILES = BACKWARD ? DOUT + 1 : DOUT }; // tiles of a stage

    struct Stage {
        bf16 tile[TILES][TILE];
    };
    struct Shared {
        Stage stage[STAGES];
        bf16 ds[BACKWARD ? ROWS * ROWS : 8]; // [keys][queries]
        bf16 ones[BACKWARD ? 16 * SM90_PANEL : 8];
        AttentionGate<ROWS> gate[2]; // of block m in m % 2
        // One value a query of block m. Forward: log2(e) (cum_logf_i - anchor of m - 1). Backward: acc_init
        // with the keys of m - 1, acc_init with the keys of m, -delta.
        float row[BACKWARD ? 3 : 1][ROWS];
        uint64_t full[STAGES];
    };
};

struct Sm90BandParameters {
    CUtensorMap in[4];  // k, v, q and, backward, dout; all boxes are of one block
    CUtensorMap out[3]; // forward o; backward dk, dv, dq
    const double* cum_logf;
    float* lse_out; // forward, like the following
    unsigned* tile_counter;
    const float *lse, *delta; // backward, like the following: as in Sm90BackwardParameters
    float *dcum_logf, *dq_sum, *row_sum;
    AttentionShape shape;
};

// The thread block's strip: blocks first, .., end - 1 of the `blocks` of a head
struct Sm90BandStrip {
    static constexpr int BLOCKS = 8;
    int head, b, h, key_head, first, end, blocks;
    bool band; // else the head is not a band head

    __host__ __device__ static int strips(int T) { return ceil_div(T, BLOCKS * ATTENTION_BAND); } // of a head
    __device__ explicit Sm90BandStrip(const AttentionShape& shape) {
        int position = (int)blockIdx.x / strips(shape.T);
        head = shape.bounds.head_order[position];
        band = position >= shape.heads_with_tiles();
        b = head / shape.NH;
        h = head % shape.NH;
        key_head = shape.key_head(h);
        blocks = ceil_div(shape.T, ATTENTION_BAND);
        first = (int)blockIdx.x % strips(shape.T) * BLOCKS;
        end = min(first + BLOCKS, blocks);
    }
};

#if SM90_CODE

// ----------------------------------------------------------------------------
// what both passes share: the ring of stages, the tokens' gates, results before they are stored

// A thread has parts of two rows of its warp's 16, lane_row and lane_row + 8, of whatever the rows are.
template <bool BACKWARD> struct Sm90BandWalk {
    typedef Sm90Band<BACKWARD> F;
    static constexpr int ROWS = F::ROWS, DH = F::DH;
    typename F::Shared& shared;
    const Sm90BandParameters& p;
    const Sm90BandStrip& strip;
    const int lane = (int)threadIdx.x % 32;
    const int warp_row = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) * 16,
              lane_row = warp_row + lane / 4;
    // cum_logf, lse and delta of token thread % 64 of the next block; anchors of that block and the one
    // before
    double cum_logf = 0, anchor = 0, anchor_before = 0;
    float lse = 0, delta = 0;

    __device__ Sm90BandWalk(typename F::Shared& shared, const Sm90BandParameters& p,
                            const Sm90BandStrip& strip)
        : shared(shared), p(p), strip(strip) {}

    __device__ int stage_index(int m) const { return (m - strip.first + 1) % F::STAGES; }
    __device__ typename F::Stage& stage(int m) { return shared.stage[stage_index(m)]; }
    __device__ void wait(int m) {
        sm90_wait(&shared.full[stage_index(m)], (uint32_t)((m - strip.first + 1) / F::STAGES % 2));
    }
    // Loads the tiles of block m that the strip needs. Block -1 has none, but its phase completes all the
    // same. One thread.
    __device__ void load(int m) {
        bool keys = m >= 0 && m < strip.end, queries = m >= strip.first;
        if (m >= min(strip.end + BACKWARD, strip.blocks)) return;
        uint64_t* full = &shared.full[stage_index(m)];
        sm90_arrive_expect_tx(full,
                              (uint32_t)((2 * keys + (F::TILES - 2) * queries) * F::TILE * sizeof(bf16)));
#pragma unroll
        for (int tile = 0; tile < F::TILES; tile++)
            if (tile < F::Q ? keys : queries)
                sm90_load_tile<DH, ROWS>(stage(m).tile[tile], &p.in[tile],
                                         tile < F::Q ? strip.key_head : strip.h, m * ROWS, strip.b, full);
    }
    // Loads block m + 1 into the stage of block m - 2, once the results there have been stored. One thread.
    __device__ void load_ahead(int m) {
        if (m == strip.first) return; // loaded at the start
        sm90_wait_stores_read<0>();
        load(m + 1);
    }

    // Starts loading cum_logf and, backward, lse and delta of block m's tokens into registers.
    __device__ void fetch(int m) {
        const int64_t head = (int64_t)strip.head * p.shape.T;
        const int last = p.shape.T - 1, i = min(m * ROWS + (int)threadIdx.x % ROWS, last);
        anchor_before = anchor;
        anchor = p.cum_logf[head + min(m * ROWS + ROWS - 1, last)];
        cum_logf = p.cum_logf[head + i];
        if (BACKWARD) {
            lse = p.lse[head + i];
            delta = p.delta[head + i];
        }
    }
    // Writes what fetch(m) loaded to shared memory, as gate and row.
    __device__ void set_tokens(int m) {
        int i = (int)threadIdx.x;
        if (i >= ROWS) return;
        bool exists = m * ROWS + i < p.shape.T;
        double past = exists ? cum_logf - anchor_before : 0;
        shared.gate[m % 2].set(i, exists ? cum_logf - anchor : 0);
        if (BACKWARD) { // queries past T get probability 0
            shared.row[0][i] = exists && m > 0 ? ((float)past - lse) * AttentionScale<DH>::ROOT : -INFINITY;
            shared.row[1][i] = exists ? -lse * AttentionScale<DH>::ROOT : -INFINITY;
            shared.row[2][i] = exists ? -delta : 0;
        } else {
            shared.row[0][i] = m > 0 ? (float)(past * ATTENTION_LOG2E) : -INFINITY;
        }
    }
    // Issues the loads of the strip's first two blocks and of the block before them, whose gate it writes.
    __device__ void start() {
        const int first = strip.first;
        for (int m = first - 1; threadIdx.x == 0 && m <= first + 1; m++) load(m);
        fetch(max(first - 1, 0));
        const double before = cum_logf, anchor_of_before = anchor;
        fetch(first);
        if (first == 0) return;
        if (threadIdx.x < ROWS) shared.gate[(first - 1) % 2].set((int)threadIdx.x, before - anchor_of_before);
        wait(first - 1);
    }

    // Column of element e of an accumulator relative to the lane's first one, and which of the two rows
    __device__ static constexpr int column(int e) { return e / 4 * 8 + e % 2; }
    __device__ static constexpr int half(int e) { return e / 2 % 2; }
    __device__ int first_column() const { return lane % 4 * 2; }

    // 16 columns of the warp's rows of a tile, from 16 k on, for stmatrix
    __device__ uint32_t lane_address(const bf16* tile, int k) const {
        return smem_address(tile) +
               (sm90_chunk_offset<ROWS>(warp_row + lane % 16, lane / 16) ^ (uint32_t)(k * 32));
    }
    template <int R> __device__ void store_rows(bf16* tile, const float (&acc)[R], const float (&factor)[2]) {
#pragma unroll
        for (int k = 0; k < DH / 16; k++) {
            uint32_t y[4];
#pragma unroll
            for (int r = 0; r < 4; r++)
                y[r] =
                    pack_bf16x2(acc[8 * k + 2 * r] * factor[r % 2], acc[8 * k + 2 * r + 1] * factor[r % 2]);
            sm90_stmatrix(lane_address(tile, k), y);
        }
    }
    __device__ static void pack(uint32_t (&to)[ROWS / 16][4], const float (&x)[ROWS / 2]) {
#pragma unroll
        for (int r = 0; r < ROWS / 4; r++) to[r / 4][r % 4] = pack_bf16x2(x[2 * r], x[2 * r + 1]);
    }
};

// ----------------------------------------------------------------------------
// forward: rows are queries, columns of scores keys

struct Sm90BandForward : Sm90BandWalk<false> {
    using Sm90BandWalk<false>::Sm90BandWalk;
    float before[ROWS / 2], own[ROWS / 2], acc[DH / 2]; // scores with the keys of block m - 1 and of m; o

    // Turns scores into exponents to base 2, relative to cum_logf_i, with later keys masked.
    __device__ void finish_scores(int m) {
        const AttentionGate<ROWS>&gate = shared.gate[m % 2],
              &gate_before = shared.gate[m > 0 ? (m - 1) % 2 : 0];
        const float row[2] = {shared.row[0][lane_row], shared.row[0][lane_row + 8]};
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++) {
            int i = lane_row + 8 * half(e), j = first_column() + column(e);
            before[e] = before[e] * AttentionScale<DH>::SCALE + (row[half(e)] - gate_before.high[j]);
            own[e] = j <= i ? own[e] * AttentionScale<DH>::SCALE + gate.difference(i, j) : -INFINITY;
        }
    }

    // Main loop of a thread block (run), for block m of a strip:
    //
    //     write the gate of block m;  wait stage m;  load the gate of m + 1 into registers
    //     issue S_before = Q_m K_m-1^T, S_own = Q_m K_m^T
    //     thread 0: wait for the stores so far, issue the loads of block m + 1            overlaps the GEMMs
    //     wait;  scale, gate; causal mask on S_own
    //     row_max, P = 2^(S - row_max), row_sum: of both at once, no rescaling
    //     issue O = P_before V_m-1 + P_own V_m;  write lse                                overlaps the GEMMs
    //     wait;  O / row_sum as bf16 into Q's tile;  thread 0 issues its TMA store
    //
    // No ping-pong: the 3 thread blocks on an SM overlap each other's GEMMs and softmax.
    __device__ void run_block(int m) {
        typename F::Stage &now = stage(m), &past = m > 0 ? stage(m - 1) : now; // of block 0, all is masked
        uint64_t q = sm90_make_smem_desc<ROWS>(now.tile[F::Q]);
        sm90_wgmma_fence();
        sm90_matmul_abt<DH, ROWS, ROWS>(before, q, sm90_make_smem_desc<ROWS>(past.tile[F::K]));
        sm90_matmul_abt<DH, ROWS, ROWS>(own, q, sm90_make_smem_desc<ROWS>(now.tile[F::K]));
        sm90_commit_group();
        if (threadIdx.x == 0) load_ahead(m);
        __syncwarp();
        sm90_wait_group<0>();
        sm90_fence_operand(before);
        sm90_fence_operand(own);
        finish_scores(m);

        float row_max[2] = {own[0], own[2]}, row_sum[2] = {}, factor[2];
        uint32_t probabilities[2][ROWS / 16][4];
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++)
            row_max[half(e)] = fmaxf(row_max[half(e)], fmaxf(before[e], own[e]));
        for (int r = 0; r < 2; r++) row_max[r] = quad_max(row_max[r]);
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++) {
            before[e] = exp2_approx(before[e] - row_max[half(e)]);
            own[e] = exp2_approx(own[e] - row_max[half(e)]);
            row_sum[half(e)] += before[e] + own[e];
        }
        pack(probabilities[0], before), pack(probabilities[1], own);
        sm90_wgmma_fence();
        sm90_matmul_ab(acc, probabilities[0], sm90_make_smem_desc<ROWS>(past.tile[F::V]), false);
        sm90_matmul_ab(acc, probabilities[1], sm90_make_smem_desc<ROWS>(now.tile[F::V]), true);
        sm90_commit_group();
        for (int r = 0; r < 2; r++) {
            int i = m * ROWS + lane_row + 8 * r;
            row_sum[r] = quad_sum(row_sum[r]);
            factor[r] = __fdividef(1, row_sum[r]);
            if (lane % 4 == 0 && i < p.shape.T)
                p.lse_out[(int64_t)strip.head * p.shape.T + i] =
                    (row_max[r] + log2f(row_sum[r])) * 0.6931471805599453f;
        }
        sm90_wait_group<0>();
        sm90_fence_operand(acc);
        sm90_fence_operand(probabilities[0]);
        sm90_fence_operand(probabilities[1]);
        __syncthreads(); // all warps have read q, and the gates that the next block overwrites
        store_rows(now.tile[F::Q], acc, factor);
        sm90_fence_async_proxy();
        __syncthreads();
        if (threadIdx.x == 0) {
            sm90_store_tile<DH, ROWS>(&p.out[0], strip.h, m * ROWS, strip.b, now.tile[F::Q]);
            sm90_commit_stores();
        }
    }
    __device__ void run() {
        start();
        for (int m = strip.first; m < strip.end; m++) {
            set_tokens(m);
            wait(m);
            __syncthreads();
            fetch(m + 1);
            run_block(m);
        }
        if (threadIdx.x == 0) sm90_wait_stores_read<0>(); // the thread block must not end before
    }
};

// ----------------------------------------------------------------------------
// backward: rows are keys, columns of scores queries, and the other way round in dq

struct Sm90BandBackward : Sm90BandWalk<true> {
    using Sm90BandWalk<true>::Sm90BandWalk;
    // 8 more columns, of ones: row sums of dS in dq, column sums in dk
    float s[ROWS / 2], dp[ROWS / 2], dq[DH / 2 + 4], dk[DH / 2 + 4], dv[DH / 2];
    float row_sum[2]; // row sums of dS of the block whose dk is in registers
    uint32_t probabilities[ROWS / 16][4], ds[ROWS / 16][4];

    template <int R> __device__ static void clear(float (&acc)[R]) {
#pragma unroll
        for (int i = 0; i < R; i++) acc[i] = 0;
        sm90_fence_operand(acc);
    }
    // Initial accumulators: one value per column, for both of the lane's rows
    __device__ void load_columns(float (&d)[ROWS / 2], const float* columns) {
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            float2 y = *(const float2*)(columns + n * 8 + first_column());
            d[4 * n] = d[4 * n + 2] = y.x;
            d[4 * n + 1] = d[4 * n + 3] = y.y;
        }
        sm90_fence_operand(d);
    }
    // d += A B^T
    __device__ static void issue_abt(float (&d)[ROWS / 2], const bf16* a, const bf16* b) {
        sm90_matmul_abt<DH, ROWS, ROWS>(d, sm90_make_smem_desc<ROWS>(a), sm90_make_smem_desc<ROWS>(b), true);
        sm90_commit_group();
    }
    // Keys of step OWN of block m. Block 0 has no block before: its own keys, all masked, take their place.
    template <bool OWN> __device__ static int keys_of(int m) { return OWN || m == 0 ? m : m - 1; }
    // Exponentiates s: queries of block m, keys of m - 1 or, OWN, of m, with later keys masked.
    template <bool OWN> __device__ void exponentiate(int m) {
        const AttentionGate<ROWS>& gate = shared.gate[keys_of<OWN>(m) % 2];
        const float shift[2] = {-gate.high[lane_row], -gate.high[lane_row + 8]};
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++) {
            int i = first_column() + column(e), j = lane_row + 8 * half(e);
            float x = s[e] * AttentionScale<DH>::SCALE + (OWN ? gate.difference(i, j) : shift[half(e)]);
            s[e] = exp2_approx(OWN && j > i ? -INFINITY : x);
        }
    }
    // Adds to dq of block m, and to dk and dv of block m - 1 or, OWN, of m. Main loop of a thread block
    // (run), for block m of a strip:
    //
    //     write gate, acc_init, -delta of block m;  wait stage m;  load those of m + 1 into registers
    //     step<false>, keys of block m - 1;  store dK, dV of m - 1;  clear dK, dV
    //     step<true>, keys of block m;       store dQ of m
    //
    //     step:  issue S^T = acc_init + K Q_m^T;  issue dP^T = -delta + V dO_m^T
    //            step<false>: thread 0 waits for the stores so far, issues the loads of block m + 1
    //            wait S^T;  P^T = 2^(S^T scale - gate), causal mask if OWN                overlaps dP^T
    //            wait dP^T;  dS^T = P^T dP^T as bf16, also to shared memory
    //            issue dV += P^T dO_m, dK += dS^T Q_m;  __syncthreads;  issue dQ += dS K;  wait all
    //
    // After the strip, one step<false> of the block behind it completes dK and dV of the last block.
    template <bool OWN> __device__ void step(int m) {
        const typename F::Stage &queries = stage(m), &keys = stage(keys_of<OWN>(m));
        load_columns(s, shared.row[OWN]), load_columns(dp, shared.row[2]);
        sm90_wgmma_fence();
        issue_abt(s, keys.tile[F::K], queries.tile[F::Q]);
        issue_abt(dp, keys.tile[F::V], queries.tile[F::DOUT]);
        if (!OWN && threadIdx.x == 0) load_ahead(m);
        __syncwarp();
        sm90_wait_group<1>(); // dp remains in flight
        sm90_fence_operand(s);
        exponentiate<OWN>(m);
        sm90_wait_group<0>();
        sm90_fence_operand(dp);
        pack(probabilities, s);
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++) dp[e] *= s[e];
        pack(ds, dp);
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++) sm90_stmatrix(lane_address(shared.ds, k), ds[k]);
        sm90_fence_async_proxy();
        sm90_wgmma_fence();
        sm90_matmul_ab(dv, probabilities, sm90_make_smem_desc<ROWS>(queries.tile[F::DOUT]), true);
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++)
            sm90_wgmma<true>(dk, ds[k], with_ones(queries.tile[F::Q], k), true);
        sm90_commit_group();
        __syncthreads(); // ds is complete
        sm90_wgmma_fence();
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++)
            sm90_wgmma<true, true>(dq, sm90_make_smem_desc<ROWS>(shared.ds) + sm90_rows(16 * k),
                                   with_ones(keys.tile[F::K], k), true);
        sm90_commit_group();
        sm90_wait_group<0>();
        sm90_fence_operand(dv);
        sm90_fence_operand(dk);
        sm90_fence_operand(dq);
        sm90_fence_operand(probabilities);
        sm90_fence_operand(ds);
        __syncthreads(); // ds, and what the step alone needs of both stages, has been read
    }
    // Rows 16 k and on of a tile, and 8 columns of ones
    __device__ uint64_t with_ones(const bf16* tile, int k) const {
        return sm90_make_smem_desc_pair(tile + 16 * k * SM90_PANEL, shared.ones);
    }

    // Stores dk, dv and dcum_logf of block m, through the K and V tiles of its stage.
    __device__ void store_keys(int m) {
        typename F::Stage& to = stage(m);
        const float root[2] = {1 / AttentionScale<DH>::ROOT, 1 / AttentionScale<DH>::ROOT}, one[2] = {1, 1};
        store_rows(to.tile[F::K], dk, root);
        store_rows(to.tile[F::V], dv, one);
        sm90_fence_async_proxy();
        __syncthreads();
        if (threadIdx.x == 0) {
            sm90_store_tile<DH, ROWS>(&p.out[0], strip.h, m * ROWS, strip.b, to.tile[F::K]);
            sm90_store_tile<DH, ROWS>(&p.out[1], strip.h, m * ROWS, strip.b, to.tile[F::V]);
            sm90_commit_stores();
        }
        for (int r = 0; r < 2; r++) {
            int j = m * ROWS + lane_row + 8 * r;
            if (p.dcum_logf && lane % 4 == 0 && j < p.shape.T)
                p.dcum_logf[(int64_t)strip.head * p.shape.T + j] = row_sum[r] - dk[DH / 2 + 2 * r];
        }
    }
    // Stores dq of block m, through the Q tile of block m - 1, which is no longer read.
    __device__ void store_queries(int m) {
        bf16* to = stage(m - 1).tile[F::Q];
        const float root[2] = {1 / AttentionScale<DH>::ROOT, 1 / AttentionScale<DH>::ROOT};
        store_rows(to, dq, root);
        sm90_fence_async_proxy();
        __syncthreads();
        if (threadIdx.x == 0) {
            sm90_store_tile<DH, ROWS>(&p.out[2], strip.h, m * ROWS, strip.b, to);
            sm90_commit_stores();
        }
        for (int r = 0; r < 2; r++) row_sum[r] = dq[DH / 2 + 2 * r];
    }
    // Loads block m's tokens and runs its first step. dk and dv of the block before the strip, and dq of the
    // block behind it, are partial and never stored.
    __device__ void begin_block(int m) {
        set_tokens(m);
        wait(m);
        __syncthreads();
        fetch(m + 1);
        clear(dq);
        step<false>(m);
    }
    __device__ void run() {
        start();
        clear(dk);
        clear(dv);
        for (int m = strip.first; m < strip.end; m++) {
            begin_block(m);
            if (m > strip.first) store_keys(m - 1);
            clear(dk);
            clear(dv);
            step<true>(m);
            store_queries(m);
        }
        if (strip.end < strip.blocks) begin_block(strip.end);
        store_keys(strip.end - 1);
        if (threadIdx.x == 0) sm90_wait_stores_read<0>(); // the thread block must not end before
    }
};

// Clears dq_sum ([64 queries][DH], in accumulator layout) and row_sum of the strip's tiles.
__device__ static inline void sm90_band_clear(const Sm90BandParameters& p, const Sm90BandStrip& strip) {
    typedef Sm90Band<true> F;
    const int parts = 2 * p.shape.blocks, end = min(strip.first + Sm90BandStrip::BLOCKS, parts);
    float* dq_sum = p.dq_sum + ((int64_t)strip.head * parts + strip.first) * F::TILE;
    const Pack4 zeros = {};
#pragma unroll 8
    for (int i = (int)threadIdx.x * 4; i < (end - strip.first) * F::TILE; i += F::THREADS * 4)
        store16(dq_sum + i, zeros);
    for (int t = strip.first * F::ROWS + (int)threadIdx.x; t < min(end * F::ROWS, p.shape.T); t += F::THREADS)
        p.row_sum[(int64_t)strip.head * p.shape.T + t] = 0;
}

#endif // SM90_CODE

// ----------------------------------------------------------------------------
// kernels and launches

template <bool BACKWARD>
__global__ void __launch_bounds__(Sm90Band<BACKWARD>::THREADS, Sm90Band<BACKWARD>::RESIDENT)
    sm90_band_kernel(const __grid_constant__ Sm90BandParameters p) {
#if SM90_CODE
    typedef Sm90Band<BACKWARD> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    const Sm90BandStrip strip(p.shape);
    if (!BACKWARD && blockIdx.x == 0 && threadIdx.x == 0) *p.tile_counter = 0;
    if (BACKWARD && !strip.band) sm90_band_clear(p, strip);
    if (!strip.band) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::STAGES; i++) sm90_barrier_init(&shared.full[i], 1, 0);
        sm90_barrier_init_fence();
    }
    for (int i = (int)threadIdx.x; BACKWARD && i < 16 * SM90_PANEL; i += F::THREADS)
        shared.ones[i] = (bf16)1.0f;
    sm90_fence_async_proxy();
    __syncthreads();
    if constexpr (BACKWARD)
        Sm90BandBackward(shared, p, strip).run();
    else
        Sm90BandForward(shared, p, strip).run();
#endif
}

template <bool BACKWARD>
static inline void sm90_band_launch(const Sm90BandParameters& p, cudaStream_t stream) {
    typedef Sm90Band<BACKWARD> F;
    auto kernel = sm90_band_kernel<BACKWARD>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared));
    attention_launch<F, F::SHARED_KIB>(kernel, (int64_t)p.shape.heads * Sm90BandStrip::strips(p.shape.T),
                                       stream, p);
}

// o and lse of the band heads; sets tile_counter to 0. shape.tiled_heads is not NULL.
static inline void sm90_band_forward(const AttentionForward* a, const HeadShape* s,
                                     const AttentionShape& shape, unsigned* tile_counter,
                                     cudaStream_t stream) {
    const bf16* const in[] = {a->k, a->v, a->q};
    const HeadShape keys = key_shape(s);
    Sm90BandParameters p = {
        .cum_logf = a->cum_logf, .lse_out = a->lse, .tile_counter = tile_counter, .shape = shape};
    for (int i = 0; i < 3; i++) p.in[i] = sm90_tensor_map(in[i], i < 2 ? &keys : s, ATTENTION_BAND);
    p.out[0] = sm90_tensor_map(a->o, s, ATTENTION_BAND);
    sm90_band_launch<false>(p, stream);
}

// All gradients of the band heads; sets dq_sum and row_sum of the others to 0. shape.tiled_heads is not NULL.
static inline void sm90_band_backward(const AttentionBackward* a, const HeadShape* s,
                                      const AttentionShape& shape, float* dq_sum, float* row_sum,
                                      cudaStream_t stream) {
    const bf16* const in[] = {a->k, a->v, a->q, a->dout};
    bf16* const out[] = {a->dk, a->dv, a->dq};
    const HeadShape keys = key_shape(s);
    Sm90BandParameters p = {.cum_logf = a->cum_logf,
                            .lse = a->lse,
                            .delta = a->delta,
                            .dcum_logf = a->dcum_logf,
                            .dq_sum = dq_sum,
                            .row_sum = row_sum,
                            .shape = shape};
    for (int i = 0; i < 4; i++) p.in[i] = sm90_tensor_map(in[i], i < 2 ? &keys : s, ATTENTION_BAND);
    for (int i = 0; i < 3; i++) p.out[i] = sm90_tensor_map(out[i], s, ATTENTION_BAND);
    sm90_band_launch<true>(p, stream);
}
