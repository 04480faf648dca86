/*
Backward of forgetting attention on Hopper. With p = exp(score - lse) and ds = p (do_i v_j - delta_i):

    dq_i = sum_j ds k_j / sqrt(dh),  dk_j = sum_i ds q_i / sqrt(dh),  dv_j = sum_i p do_i,
    dc_i = sum_j ds_ij - sum_j ds_ji

A block of 128 keys rests with a thread block, which walks over the queries from the diagonal on. One warp
loads, one makes the statistics that the scores start from, and two warpgroups of 64 keys each multiply. These
have scores and score gradients transposed, a row for each key: so p and ds come out of registers as operands
of dv and dk. Only ds goes through shared memory, where both groups' halves meet for dq.

Dq is summed in float, in memory, straight from registers: red.v4 in an order of elements of its own, in which
a warp adds 512 bytes in a row. A second kernel puts it in order and rounds it. Bulk adds would pass through
shared memory twice, and its bandwidth is what this kernel is short of.

The rows' sums of ds are eight more columns of the product ds k, whose operand is 1; so are the columns' sums
of ds q where registers allow it. Both take ds as it was rounded for dq and dk: dc's sum over time follows,
where only the pairs that cancel keep rounding errors from adding up.

In any order sums differ in their last bits from run to run. In turn they do not: see below.
*/
#ifndef LLMC_ATTENTION_SM90_BACKWARD_CUH
#define LLMC_ATTENTION_SM90_BACKWARD_CUH

#include "sm90.cuh"
#include "../cuda/mma_sm80.cuh"

template <int DH> struct Sm90Backward : Sm90BackwardTiles<DH> {
    typedef Sm90BackwardTiles<DH> Tiles;
    static constexpr int THREADS = 384, MATRIX_WARPS = 8, KEYS = ATTENTION_BLOCK;
    static constexpr int STEP = 64; // queries whose scores a warpgroup has in registers at a time
    static constexpr int QUERIES = Tiles::QUERIES, STEPS = QUERIES / STEP, STAGES = Tiles::STAGES;

    __host__ __device__ static int tiles(const AttentionShape& shape) {
        return (shape.T + QUERIES - 1) / QUERIES;
    }

    // Each warpgroup makes a part of a tile's dq, 64 by 64: the queries of a step, or half of the columns
    static constexpr int PART = 64 * 64;
    __device__ static int part_query(int tile, int group) {
        return tile * QUERIES + (STEPS == 2 ? group * 64 : 0);
    }
    __device__ static int part_column(int group) { return STEPS == 2 ? 0 : group * 64; }
    // and one of the groups that have the same queries their rows' sums
    __device__ static bool part_has_sums(int group) { return STEPS == 2 || group == 0; }

    struct Shared {
        bf16 k[KEYS * DH], v[KEYS * DH]; // at last dk and dv
        bf16 q[STAGES][QUERIES * DH], dout[STAGES][QUERIES * DH];
        bf16 ds[2][KEYS * QUERIES];
        bf16 ones[16 * SM90_PANEL];
        float start[STAGES][QUERIES]; // sqrt(dh) (c_i - c_anchor - lse_i); without c in the diagonal block
        float minus_delta[STAGES][QUERIES];
        float high[KEYS], low[KEYS]; // log2(e) (c - c_anchor) of the keys, as the sum of two floats
        uint64_t keys_full, full[STAGES], empty[STAGES], our_turn, added;
    };
};

struct Sm90BackwardParameters {
    CUtensorMap q, k, v, dout;    // boxes of a tile
    CUtensorMap dk, dv;           // of a warpgroup's rows
    float *dq_sum, *row_sum, *dc; // dc NULL: no sums wanted
    int* turn;                    // NULL: sums of dq are added up in any order
    const float *lse, *delta;
    const double* c;
    const int* last_query_block;
    AttentionShape shape;
};

// A block of keys from j0 on, and its tiles of queries: first to last, of which those before `clear` touch
// the diagonal.
struct Sm90BackwardBlock {
    int head, b, h, j0, first, clear, last;

    template <class F> __device__ static Sm90BackwardBlock of(const Sm90BackwardParameters& p) {
        constexpr int TILES = ATTENTION_BLOCK / F::QUERIES; // of a block
        AttentionWork work = p.shape.work(blockIdx.x);
        // The first keys have most queries. Where blocks take turns, each waits for the one behind it, which
        // must have been started before.
        int block = p.turn ? p.shape.tiles - 1 - work.place : work.place;
        int last_block = p.last_query_block ? p.last_query_block[(int64_t)work.head * p.shape.blocks + block]
                                            : p.shape.blocks;
        Sm90BackwardBlock x;
        x.head = work.head, x.b = work.head / p.shape.NH, x.h = work.head % p.shape.NH;
        x.j0 = block * ATTENTION_BLOCK;
        x.first = block * TILES, x.clear = x.first + TILES;
        x.last = min((last_block + 1) * TILES, F::tiles(p.shape)) - 1;
        return x;
    }
};

#if SM90_CODE

// ----------------------------------------------------------------------------
// the thread that loads

template <int DH>
__device__ static inline void sm90_backward_load(typename Sm90Backward<DH>::Shared& shared,
                                                 const Sm90BackwardParameters& p) {
    typedef Sm90Backward<DH> F;
    const Sm90BackwardBlock x = Sm90BackwardBlock::of<F>(p);
    sm90_arrive_expect(&shared.keys_full, sizeof shared.k + sizeof shared.v);
    sm90_load_tile<DH, F::KEYS>(shared.k, &p.k, x.h, x.j0, x.b, &shared.keys_full);
    sm90_load_tile<DH, F::KEYS>(shared.v, &p.v, x.h, x.j0, x.b, &shared.keys_full);
    Sm90Ring<F::STAGES> ring;
    for (int tile = x.first; tile <= x.last; tile++, ring.next()) {
        int stage = ring.stage, t = tile * F::QUERIES;
        uint64_t* full = &shared.full[stage];
        sm90_wait(&shared.empty[stage], ring.parity ^ 1);
        sm90_arrive_expect(full, sizeof shared.q[0] + sizeof shared.dout[0]);
        sm90_load_tile<DH, F::QUERIES>(shared.q[stage], &p.q, x.h, t, x.b, full);
        sm90_load_tile<DH, F::QUERIES>(shared.dout[stage], &p.dout, x.h, t, x.b, full);
    }
}

// ----------------------------------------------------------------------------
// the warp of statistics: what the scores of a query start from, and the score gradients

template <int DH, bool GATE>
__device__ static inline void sm90_backward_statistics(typename Sm90Backward<DH>::Shared& shared,
                                                       const Sm90BackwardParameters& p) {
    typedef Sm90Backward<DH> F;
    const Sm90BackwardBlock x = Sm90BackwardBlock::of<F>(p);
    int lane = (int)threadIdx.x % 32, T = p.shape.T;
    const float *lse = p.lse + (int64_t)x.head * T, *delta = p.delta + (int64_t)x.head * T;
    const double* c = GATE ? p.c + (int64_t)x.head * T : NULL;
    double anchor = GATE ? c[min(x.j0 + ATTENTION_BLOCK, T) - 1] : 0;
    double c_ahead[2] = {};
    float lse_ahead[2], delta_ahead[2];
    auto read = [&](int i0) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int i = min(i0 + lane + 32 * e, T - 1);
            lse_ahead[e] = lse[i], delta_ahead[e] = delta[i];
            if (GATE) c_ahead[e] = c[i];
        }
    };
    read(x.first * F::QUERIES);
    Sm90Ring<F::STAGES> ring;
    for (int tile = x.first; tile <= x.last; tile++, ring.next()) {
        sm90_wait(&shared.empty[ring.stage], ring.parity ^ 1);
#pragma unroll 1
        for (int step = 0; step < F::STEPS; step++) {
            int i0 = tile * F::QUERIES + step * F::STEP;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int at = step * F::STEP + lane + 32 * e;
                bool exists = i0 + lane + 32 * e < T; // past T probabilities are 0
                float gate = GATE && tile >= x.clear ? (float)(c_ahead[e] - anchor) : 0;
                float start = (gate - lse_ahead[e]) * (float)AttentionScale<DH>::ROOT;
                shared.start[ring.stage][at] = exists ? start : -INFINITY;
                shared.minus_delta[ring.stage][at] = exists ? -delta_ahead[e] : 0;
            }
            read(i0 + F::STEP); // while a place gets free
        }
        sm90_arrive_warp(&shared.full[ring.stage]);
    }
}

// ----------------------------------------------------------------------------
// turns: a tile of dq takes the sums of its blocks of keys in a fixed order, from the diagonal down, which is
// about the order in which they come to it. One thread waits for the block's turns, another passes them on
// when all can see its sums: each takes as long as memory does, but only sums that come out of turn wait.

// Of a tile, where stands how many blocks have added to it, and how many must have before this one does
template <int DH> struct Sm90BackwardTurn {
    int *added, before;
    __device__ Sm90BackwardTurn(const Sm90BackwardParameters& p, const Sm90BackwardBlock& x, int tile)
        : added(p.turn + (int64_t)x.head * Sm90Backward<DH>::tiles(p.shape) + tile),
          before(tile * Sm90Backward<DH>::QUERIES / ATTENTION_BLOCK - x.j0 / ATTENTION_BLOCK) {}
};

template <int DH>
__device__ static inline void sm90_backward_await_turns(typename Sm90Backward<DH>::Shared& shared,
                                                        const Sm90BackwardParameters& p) {
    const Sm90BackwardBlock x = Sm90BackwardBlock::of<Sm90Backward<DH>>(p);
    for (int tile = x.first; tile <= x.last; tile++) {
        Sm90BackwardTurn<DH> turn(p, x, tile);
        while (sm90_load_acquire(turn.added) != turn.before) {}
        if (tile > x.first) sm90_wait(&shared.our_turn, (uint32_t)(tile - x.first - 1) % 2);
        sm90_arrive(&shared.our_turn);
    }
}

template <int DH>
__device__ static inline void sm90_backward_pass_turns(typename Sm90Backward<DH>::Shared& shared,
                                                       const Sm90BackwardParameters& p) {
    const Sm90BackwardBlock x = Sm90BackwardBlock::of<Sm90Backward<DH>>(p);
    for (int tile = x.first; tile <= x.last; tile++) {
        if (tile == x.first) sm90_arrive(&shared.our_turn);
        sm90_wait(&shared.added, (uint32_t)(tile - x.first) % 2);
        if (tile < x.last) sm90_arrive(&shared.our_turn); // the next phase of `added` may begin
        Sm90BackwardTurn<DH> turn(p, x, tile);
        sm90_store_release(turn.added, turn.before + 1);
    }
}

// ----------------------------------------------------------------------------
// a warpgroup of 64 keys

template <int DH, bool GATE, bool TURNS> struct Sm90BackwardMatrix {
    typedef Sm90Backward<DH> F;
    static constexpr int K16 = F::STEP / 16; // products over the queries of a step

    typename F::Shared& shared;
    const Sm90BackwardParameters& p;
    const Sm90BackwardBlock& x;
    // The warp's number by a shuffle: so the compiler knows that all lanes have the same.
    const int lane = (int)threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) - 4;
    const int group = warp / 4, warp_key = warp * 16; // the group's 64 keys and the warp's 16 of them
    const int lane_key = warp_key + lane / 4;         // and lane_key + 8 are the lane's rows

    uint32_t lane_first = sm90_at<F::KEYS>(warp_key + lane % 16, lane / 16); // in a tile, see lane_place

    // Four more where a product has columns of ones: of dq the rows' sums, of dk the columns'. Of 128 columns
    // dk has no room for them.
    static constexpr bool WIDE_DK = GATE && DH == 64;
    float dk[DH / 2 + (WIDE_DK ? 4 : 0)] = {}, dv[DH / 2] = {};
    float s[32], dp[32], dq[32 + (GATE ? 4 : 0)];
    float column_sum[2] = {};                   // of the lane's columns of queries
    uint32_t probabilities[K16][4], ds[K16][4]; // operands
    uint32_t key_operand[DH / 16][4], value_operand[DH / 16][4];

    __device__ Sm90BackwardMatrix(typename F::Shared& shared, const Sm90BackwardParameters& p,
                                  const Sm90BackwardBlock& x)
        : shared(shared), p(p), x(x) {
        asm volatile("" : "+r"(lane_first)); // one register: the compiler would keep two parts of it
    }

    // Where the lane's 16 bytes of the warp's rows in a tile stand, columns from 16 k on, for ldmatrix and
    // stmatrix. Within a panel 16 columns on is this ^ 32.
    __device__ uint32_t lane_place(const bf16* tile, int k) const {
        return sm90_address(tile) + (uint32_t)(k / 4 * F::KEYS * 128) + (lane_first ^ (uint32_t)(k % 4 * 32));
    }

    // Each value twice, for the lane's two rows
    __device__ void start_sums(float (&d)[32], const float* of_columns) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 y = *(const float2*)(of_columns + n * 8 + lane % 4 * 2);
            d[4 * n] = d[4 * n + 2] = y.x;
            d[4 * n + 1] = d[4 * n + 3] = y.y;
        }
    }
    // d = start + own B^T, where own is the group's rows of keys or values, and B a step of queries
    __device__ void multiply_own(float (&d)[32], const uint32_t (&own)[DH / 16][4], const bf16* own_tile,
                                 const bf16* tile, int step) {
        uint64_t b = sm90_operand<F::QUERIES>(tile) + sm90_rows(step * F::STEP);
        uint64_t a = sm90_operand<F::KEYS>(own_tile) + sm90_rows(group * 64);
        // Made anew each time: kept over the loop, the operands' 16 addresses would take registers that the
        // sums need.
        asm volatile("" : "+l"(a));
        sm90_hold(d);
        sm90_products_fence();
#pragma unroll
        for (int k = 0; k < DH / 16; k++) {
            if (F::KEYS_IN_REGISTERS)
                sm90_product<false>(d, own[k], b + sm90_columns<F::QUERIES>(16 * k), true);
            else
                sm90_product<false, false>(d, a + sm90_columns<F::KEYS>(16 * k),
                                           b + sm90_columns<F::QUERIES>(16 * k), true);
        }
        sm90_products_commit();
    }
    __device__ void issue_scores(int stage, int step) {
        start_sums(s, shared.start[stage] + step * F::STEP);
        multiply_own(s, key_operand, shared.k, shared.q[stage], step);
    }
    __device__ void issue_dp(int stage, int step) {
        start_sums(dp, shared.minus_delta[stage] + step * F::STEP);
        multiply_own(dp, value_operand, shared.v, shared.dout[stage], step);
    }
    // += operand B, over a step of queries
    __device__ void issue_dv(int stage, int step) {
        sm90_products_fence();
        sm90_multiply_ab(dv, probabilities,
                         sm90_operand<F::QUERIES>(shared.dout[stage]) + sm90_rows(step * F::STEP), true);
        sm90_products_commit();
    }
    __device__ void issue_dk(int stage, int step) {
        const bf16* rows = shared.q[stage] + step * F::STEP * SM90_PANEL;
        sm90_products_fence();
#pragma unroll
        for (int k = 0; k < K16; k++)
            sm90_product<true>(dk, ds[k],
                               WIDE_DK ? sm90_operand_beside(rows + 16 * k * SM90_PANEL, shared.ones)
                                       : sm90_operand<F::QUERIES>(rows) + sm90_rows(16 * k),
                               true);
        sm90_products_commit();
    }

    // In the block on the diagonal parts of c_i - c_j may be large and of opposite sign: pairs are subtracted
    // high from high and low from low. i and j count from j0.
    __device__ void diagonal_scores(int i0) {
#pragma unroll
        for (int e = 0; e < 32; e++) {
            int i = i0 + e / 4 * 8 + lane % 4 * 2 + e % 2, j = lane_key + e % 4 / 2 * 8;
            float gate = GATE ? (shared.high[i] - shared.high[j]) + (shared.low[i] - shared.low[j]) : 0;
            s[e] = j <= i ? s[e] * AttentionScale<DH>::SCALE + gate : -INFINITY;
        }
    }
    __device__ void make_probabilities(bool diagonal) {
        float factor = diagonal ? 1 : AttentionScale<DH>::SCALE;
        float row_shift[2] = {}; // read each time: registers are too few to keep it
        if (GATE && !diagonal)
            row_shift[0] = -shared.high[lane_key], row_shift[1] = -shared.high[lane_key + 8];
#pragma unroll
        for (int e = 0; e < 32; e++) s[e] = sm90_exp2(s[e] * factor + row_shift[e % 4 / 2]);
    }
    __device__ void pack_probabilities() {
#pragma unroll
        for (int r = 0; r < 4 * K16; r++) probabilities[r / 4][r % 4] = sm90_pack(s[2 * r], s[2 * r + 1]);
    }
    __device__ void make_ds() {
#pragma unroll
        for (int r = 0; r < 4 * K16; r++)
            ds[r / 4][r % 4] = sm90_pack(s[2 * r] * dp[2 * r], s[2 * r + 1] * dp[2 * r + 1]);
    }
    // [keys][queries], a panel a step
    __device__ void store_ds(bf16* tile, int step) {
        uint32_t to = lane_place(tile, step * K16);
#pragma unroll
        for (int k = 0; k < K16; k++)
            sm90_store_matrices(to ^ (uint32_t)(k * 32), ds[k][0], ds[k][1], ds[k][2], ds[k][3]);
    }
    __device__ void add_columns() {
#pragma unroll
        for (int r = 0; r < 4 * K16; r++) {
            uint32_t pair = ds[r / 4][r % 4];
            column_sum[r % 2] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
        }
    }
    // [64 queries, 64 columns] = ds k over the block's keys, and 8 columns of sums
    __device__ void issue_dq(const bf16* ds_tile) {
        uint64_t a = sm90_operand<F::KEYS>(ds_tile + F::part_query(0, group) * F::KEYS);
        const bf16* keys = shared.k + F::part_column(group) * F::KEYS;
        sm90_products_fence();
#pragma unroll
        for (int k = 0; k < F::KEYS / 16; k++)
            sm90_product<true, true>(dq, a + sm90_rows(16 * k),
                                     sm90_operand_beside(keys + 16 * k * SM90_PANEL, shared.ones), k > 0);
        sm90_products_commit();
    }

    __device__ void add_dq(int tile) {
        if (TURNS) sm90_wait(&shared.our_turn, (uint32_t)(tile - x.first) % 2);
        float* to = p.dq_sum + (((int64_t)x.head * F::tiles(p.shape) + tile) * 2 + group) * F::PART +
                    threadIdx.x % 128 * 4;
#pragma unroll
        for (int n = 0; n < 8; n++)
            sm90_reduce_add4(to + n * 128 * 4, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
        bool sums_wanted = GATE && p.dc && lane % 4 == 0 && F::part_has_sums(group);
        int row = F::part_query(tile, group) + warp_key % 64 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2 && sums_wanted; half++)
            if (row + half * 8 < p.shape.T)
                atomicAdd(p.row_sum + (int64_t)x.head * p.shape.T + row + half * 8, dq[32 + 2 * half]);
        if (TURNS) sm90_arrive_warp(&shared.added);
    }

    // log2(e) (c - c_anchor) of the block's tokens
    __device__ void make_gate() {
        const double* c = p.c + (int64_t)x.head * p.shape.T;
        double anchor = c[min(x.j0 + ATTENTION_BLOCK, p.shape.T) - 1];
        int i = (int)threadIdx.x - 128;
        if (i < F::KEYS) {
            double y = x.j0 + i < p.shape.T ? (c[x.j0 + i] - anchor) * ATTENTION_LOG2E : 0;
            shared.high[i] = (float)y;
            shared.low[i] = (float)(y - shared.high[i]);
        }
    }
    __device__ void load_operands() {
#pragma unroll
        for (int k = 0; k < DH / 16; k++) {
            sm80_load(key_operand[k], lane_place(shared.k, k));
            sm80_load(value_operand[k], lane_place(shared.v, k));
        }
    }

    template <int R> __device__ void store_rows(bf16* tile, const float (&sum)[R], float factor) {
#pragma unroll
        for (int k = 0; k < DH / 16; k++) {
            uint32_t y[4];
#pragma unroll
            for (int r = 0; r < 4; r++)
                y[r] = sm90_pack(sum[8 * k + 2 * r] * factor, sum[8 * k + 2 * r + 1] * factor);
            sm90_store_matrices(lane_place(tile, k), y[0], y[1], y[2], y[3]);
        }
    }
    __device__ void store_results() {
        sm90_named_sync(1, 256); // the other group has done with our keys
        store_rows(shared.k, dk, (float)(1 / AttentionScale<DH>::ROOT));
        store_rows(shared.v, dv, 1);
        sm90_fence_shared();
        sm90_named_sync(2 + group, 128);
        if (threadIdx.x % 128 == 0) {
            int at = group * 64 * SM90_PANEL, t = x.j0 + group * 64;
            sm90_store_tile<DH, F::KEYS>(&p.dk, x.h, t, x.b, shared.k + at);
            sm90_store_tile<DH, F::KEYS>(&p.dv, x.h, t, x.b, shared.v + at);
            sm90_commit_stores();
            sm90_wait_stores_read<0>(); // shared memory must outlive them
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = WIDE_DK ? dk[DH / 2 + 2 * half] : sm80_row_sum(column_sum[half]);
            int j = x.j0 + lane_key + half * 8;
            if (GATE && p.dc && lane % 4 == 0 && j < p.shape.T) p.dc[(int64_t)x.head * p.shape.T + j] = -sum;
        }
    }

    // Products run behind the arithmetic: while probabilities are made, the last step's dk and this one's dp;
    // while ds is made, dv; while both groups' ds meet, the next step's scores.
    __device__ void run() {
        if (GATE) make_gate();
        sm90_named_sync(1, 256);
        sm90_wait(&shared.keys_full, 0);
        if (F::KEYS_IN_REGISTERS) load_operands();
        Sm90Ring<F::STAGES> ring;
        sm90_wait(&shared.full[0], 0);
        issue_scores(0, 0);
        sm90_products_wait<0>();

        for (int tile = x.first, buffer = 0; tile <= x.last; tile++, buffer ^= 1) {
            int stage = ring.stage;
            ring.next();
#pragma unroll
            for (int step = 0; step < F::STEPS; step++) {
                issue_dp(stage, step);
                sm90_products_wait<2>(); // all but dk and dp
                sm90_hold(s), sm90_hold(probabilities);
                if (tile < x.clear) diagonal_scores(tile * F::QUERIES + step * F::STEP - x.j0);
                make_probabilities(tile < x.clear);
                if (F::EARLY_DV) {
                    sm90_products_wait<1>(); // all but dp
                    pack_probabilities();
                    issue_dv(stage, step);
                    sm90_products_wait<1>(); // all but dv
                } else
                    sm90_products_wait<0>();
                sm90_hold(dp), sm90_hold(ds);
                if (step == 0 && tile > x.first) // the last tile's dk is done
                    sm90_arrive_warp(&shared.empty[stage == 0 ? F::STAGES - 1 : stage - 1]);
                if (!F::EARLY_DV) pack_probabilities();
                make_ds();
                store_ds(shared.ds[buffer], step);
                if (!F::EARLY_DV) issue_dv(stage, step);
                if (step + 1 < F::STEPS) {
                    issue_scores(stage, step + 1);
                } else {
                    sm90_fence_shared();
                    // Behind the last tile these are scores of nothing, which nobody looks at.
                    if (tile < x.last) sm90_wait(&shared.full[ring.stage], ring.parity);
                    issue_scores(ring.stage, 0);
                    sm90_named_sync(1, 256);
                    sm90_products_wait<1>(); // all but the scores: dq takes the probabilities' registers
                    sm90_hold(probabilities);
                    issue_dq(shared.ds[buffer]);
                }
                issue_dk(stage, step);
                if (GATE && !WIDE_DK) add_columns(); // while dq is made
            }
            sm90_products_wait<1>(); // all but dk
            sm90_hold(dq);
            add_dq(tile);
        }
        sm90_products_wait<0>();
        sm90_hold(dk), sm90_hold(dv), sm90_hold(s);
        store_results();
    }
};

#endif // SM90_CODE

// ----------------------------------------------------------------------------
// kernels and launch

template <int DH, bool GATE, bool TURNS>
__global__ void __launch_bounds__(Sm90Backward<DH>::THREADS, 1)
    sm90_backward_kernel(const __grid_constant__ Sm90BackwardParameters p) {
#if SM90_CODE
    typedef Sm90Backward<DH> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    if (threadIdx.x == 0) {
        sm90_barrier_init(&shared.keys_full, 1, 0);
        for (int i = 0; i < F::STAGES; i++) {
            sm90_barrier_init(&shared.full[i], 1, 1); // copies, statistics
            sm90_barrier_init(&shared.empty[i], 0, F::MATRIX_WARPS);
        }
        sm90_barrier_init(&shared.our_turn, 2, 0); // it has come, and the last one's sums are told of
        sm90_barrier_init(&shared.added, 0, F::MATRIX_WARPS);
        sm90_barrier_init_done();
    }
    for (int i = (int)threadIdx.x; i < 16 * SM90_PANEL; i += F::THREADS) shared.ones[i] = (bf16)1.0f;
    sm90_fence_shared();
    __syncthreads();
    if (threadIdx.x < 128) {
        sm90_give_registers<F::OTHER_REGISTERS>();
        if (threadIdx.x == 0) sm90_backward_load<DH>(shared, p);
        if (threadIdx.x / 32 == 1) sm90_backward_statistics<DH, GATE>(shared, p);
        if (TURNS && threadIdx.x == 64) sm90_backward_await_turns<DH>(shared, p);
        if (TURNS && threadIdx.x == 96) sm90_backward_pass_turns<DH>(shared, p);
    } else {
        sm90_take_registers<F::MATRIX_REGISTERS>();
        Sm90BackwardMatrix<DH, GATE, TURNS>(shared, p, Sm90BackwardBlock::of<F>(p)).run();
    }
#endif
}

// A thread block takes one warpgroup's part of a tile: dq in its place, rounded, and the rows' sums to dc.
template <int DH>
__global__ void __launch_bounds__(256)
    sm90_backward_finish_kernel(bf16* __restrict__ dq, float* __restrict__ dc,
                                const float* __restrict__ dq_sum, const float* __restrict__ row_sum,
                                AttentionShape shape) {
    typedef Sm90Backward<DH> F;
    int tiles = F::tiles(shape), group = (int)(blockIdx.x % 2u);
    int tile = (int)(blockIdx.x / 2u % (unsigned)tiles), head = (int)(blockIdx.x / 2u / (unsigned)tiles);
    int first_row = F::part_query(tile, group);
    int64_t token = (int64_t)head * shape.T + first_row;
    if (dc && F::part_has_sums(group) && threadIdx.x < 64 && first_row + (int)threadIdx.x < shape.T)
        dc[token + threadIdx.x] += row_sum[token + threadIdx.x];

    // Four lanes held 8 columns of a row, and of the row 8 on: here a thread gathers them by way of shared
    // memory, where each 8 columns' floats start a bank's width further on.
    __shared__ Pack4 part[F::PART / 4 + 8];
    const float* from = dq_sum + (int64_t)blockIdx.x * F::PART;
#pragma unroll
    for (int i = (int)threadIdx.x; i < F::PART / 4; i += 256) part[i + i / 128] = load16_once(from + i * 4);
    __syncthreads();
    int n = (int)threadIdx.x % 8, column = n * 8 + F::part_column(group);
    int row = first_row + (int)threadIdx.x / 64 * 16 + (int)threadIdx.x / 8 % 8;
    float x[2][8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Pack4 y = part[n * 129 + (int)threadIdx.x / 8 * 4 + i];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e / 2][2 * i + e % 2] = y[e] * (float)(1 / AttentionScale<DH>::ROOT);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int t = row + half * 8;
        int64_t at = ((int64_t)(head / shape.NH) * shape.T + t) * shape.NH + head % shape.NH;
        if (t < shape.T) store16(dq + at * DH + column, pack8(x[half]));
    }
}

// Bytes of scratch that attention_backward_sm90 needs: dq in float, rows' sums, turns.
static inline size_t attention_backward_scratch_sm90(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    int64_t blocks = ceil_div<int64_t>(T, ATTENTION_BLOCK);
    return (size_t)(B * NH * (blocks * ATTENTION_BLOCK * dh + T + blocks * 4)) * sizeof(float);
}

template <int DH, bool GATE>
static inline void attention_backward_sm90(bf16* dq, bf16* dk, bf16* dv, float* dc, const bf16* dout,
                                           const bf16* q, const bf16* k, const bf16* v, const float* lse,
                                           const float* delta, const double* c, const int* last_query_block,
                                           const int* head_order, void* scratch, bool deterministic,
                                           int64_t B, int64_t T, int64_t NH, cudaStream_t stream) {
    typedef Sm90Backward<DH> F;
    int64_t parts = B * NH * ceil_div<int64_t>(T, F::QUERIES) * 2;
    Sm90BackwardParameters p;
    p.q = sm90_tensor_map(q, B, T, NH, DH, F::QUERIES),
    p.dout = sm90_tensor_map(dout, B, T, NH, DH, F::QUERIES);
    p.k = sm90_tensor_map(k, B, T, NH, DH, F::KEYS), p.v = sm90_tensor_map(v, B, T, NH, DH, F::KEYS);
    p.dk = sm90_tensor_map(dk, B, T, NH, DH, 64), p.dv = sm90_tensor_map(dv, B, T, NH, DH, 64);
    p.dq_sum = (float*)scratch, p.row_sum = p.dq_sum + parts * F::PART;
    int* turn = (int*)(p.row_sum + B * NH * T);
    p.turn = deterministic ? turn : NULL;
    p.dc = GATE ? dc : NULL, p.lse = lse, p.delta = delta, p.c = c, p.last_query_block = last_query_block;
    // In turn, a head's blocks of keys wait for one another where they do not run close together: then groups
    // of heads are half as large, as if dq, which is float, had to have room in L2 too.
    p.shape = attention_shape(B, T, NH, DH, F::KEYS, head_order, deterministic ? 8 : 4);
    CUDA_CHECK(cudaMemsetAsync(scratch, 0, (size_t)((char*)(turn + parts) - (char*)scratch), stream));

    auto kernel =
        deterministic ? sm90_backward_kernel<DH, GATE, true> : sm90_backward_kernel<DH, GATE, false>;
    attention_launch<typename F::Shared, SM90_SHARED_KIB>(kernel, (int64_t)p.shape.heads * p.shape.tiles,
                                                          F::THREADS, stream, p);
    sm90_backward_finish_kernel<DH>
        <<<(unsigned)parts, 256, 0, stream>>>(dq, p.dc, p.dq_sum, p.row_sum, p.shape);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_ATTENTION_SM90_BACKWARD_CUH
