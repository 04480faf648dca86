/*
Forgetting attention on tensor cores with mma.sync, for every GPU from sm_80 on:

    o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + c_i - c_j) v_j  over j <= i,    dh 64 or 128

One kernel forward, two backward: dQ with the queries at rest, dK and dV with the keys at rest. The scores are
computed twice that way, 7 products in place of 5, but nothing is added up across thread blocks: the same bits
in every run. The warps of a block share tiles in shared memory and nothing else. A warp owns 32 or 16 rows of
its scores, turns them into the next product's operand where they stand, in registers, and never waits for
another warp's results.

The gate. c falls to -1e5 and beyond, so differences of c are taken in double. Where a block of keys lies
before the block of queries, c_i - c_j is split at an anchor between them, (c_i - c_anchor) + (c_anchor -
c_j): both parts are <= 0, so what matters is small and float has the digits for it, and what is large
underflows as it should. One part is where the scores' sums start, q.k + sqrt(dh) (c_anchor - c_j), the other
joins the exponent's shift: the gate costs no instruction a score. In the block on the diagonal large parts of
opposite sign would cancel: there c - c_anchor is kept as a sum of two floats, and pairs are subtracted high
from high and low from low.
*/
#ifndef LLMC_ATTENTION_SM80_CUH
#define LLMC_ATTENTION_SM80_CUH

#include "shape.cuh"
#include "../cuda/mma_sm80.cuh"

// ----------------------------------------------------------------------------
// the gate

// log2(e) (c - c_anchor) of a block's own tokens, as the sum of two floats
struct Sm80Gate {
    float high[ATTENTION_BLOCK], low[ATTENTION_BLOCK];

    __device__ void fill(const double* c, double anchor, int first, int T) {
        for (int i = (int)threadIdx.x; i < ATTENTION_BLOCK; i += (int)blockDim.x) {
            double x = first + i < T ? (c[first + i] - anchor) * ATTENTION_LOG2E : 0;
            high[i] = (float)x;
            low[i] = (float)(x - high[i]);
        }
    }
    // c_i - c_j of two of the tokens
    __device__ float difference(int i, int j) const { return (high[i] - high[j]) + (low[i] - low[j]); }
};

// What the scores' sums start from, by column: each pair of columns twice, as a lane holds them in its two
// rows, to be loaded straight into the accumulators. The backward kernels, which are short of shared memory's
// bandwidth, keep them once and copy registers.
template <int COLUMNS> struct Sm80Start {
    float4 pair[COLUMNS / 2];

    __device__ void set(int column, float x) {
        float* to = (float*)&pair[column / 2] + column % 2;
        to[0] = to[2] = x;
    }
    // of columns `first` + 0, 8, 16, ...: the lane's address, then the n-th of them
    __device__ uint32_t lane(int first, int lane) const { return sm80_address(pair + first / 2 + lane % 4); }
    __device__ static void load(float (&c)[4], uint32_t lane, int n) {
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                     : "r"(lane + (uint32_t)(n * 4 * sizeof(float4))));
    }
};

// ----------------------------------------------------------------------------
// forward

template <int DH> struct Sm80Forward {
    static constexpr int THREADS = 128, KEYS = 64; // keys of a tile
    static constexpr float RAISE = 8;
    struct Shared {
        bf16 q[ATTENTION_BLOCK * DH], k[2][KEYS * DH], v[2][KEYS * DH];
        Sm80Start<KEYS> start[2]; // sqrt(dh) (c_anchor - c_j); 0 in the diagonal block
        Sm80Gate gate;
    };
};

template <int DH, bool GATE>
__global__ void __launch_bounds__(Sm80Forward<DH>::THREADS, 2)
    sm80_forward_kernel(bf16* __restrict__ o, float* __restrict__ lse, const bf16* __restrict__ q,
                        const bf16* __restrict__ k, const bf16* __restrict__ v, const double* __restrict__ c,
                        const int* __restrict__ first_key_block, AttentionShape shape) {
    typedef Sm80Forward<DH> F;
    constexpr int KEYS = F::KEYS, MS = 2, NS = KEYS / 8;
    constexpr float ROOT = AttentionScale<DH>::ROOT, SCALE = AttentionScale<DH>::SCALE;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    int tid = (int)threadIdx.x, lane = tid % 32, warp_row = tid / 32 * (MS * 16), T = shape.T;
    AttentionWork work = shape.work(blockIdx.x);
    int64_t head = work.head;
    int block = shape.blocks - 1 - work.place; // the last queries have most keys
    int i0 = block * ATTENTION_BLOCK;
    int64_t base = head / shape.NH * T * shape.row + head % shape.NH * DH;
    k += base;
    v += base;
    int tile = (min(i0 + ATTENTION_BLOCK, T) - 1) / KEYS;
    int last_tile =
        first_key_block ? first_key_block[head * shape.blocks + block] * (ATTENTION_BLOCK / KEYS) : 0;

    auto copy_keys = [&](int stage, int tile) {
        int64_t at = (int64_t)tile * KEYS * shape.row;
        sm80_copy_tile<DH, KEYS, F::THREADS>(sm80_address(shared.k[stage]), k + at, shape.row,
                                             T - tile * KEYS);
        sm80_copy_tile<DH, KEYS, F::THREADS>(sm80_address(shared.v[stage]), v + at, shape.row,
                                             T - tile * KEYS);
    };
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(sm80_address(shared.q), q + base + i0 * shape.row,
                                                    shape.row, T - i0);
    copy_keys(0, tile);

    // The gate's values are read two tiles ahead and kept for the next.
    double anchor = 0, c_ahead = 0;
    if (GATE) c += head * T;
    auto read_gate = [&](int tile) {
        if (GATE) c_ahead = c[max(tile * KEYS + tid % KEYS, 0)];
    };
    auto keep_start = [&](int stage, int tile) {
        if (GATE)
            shared.start[stage].set(tid % KEYS, tile * KEYS >= i0 ? 0 : (float)((anchor - c_ahead) * ROOT));
    };
    float from_first[MS][2] = {}; // log2(e) (c_i - c_first) of the lane's rows, where c_first is the anchor
    if (GATE) {
        anchor = c[i0];
        shared.gate.fill(c, anchor, i0, T);
        keep_start(0, tile);
        read_gate(tile - 1);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2 * MS; r++)
            from_first[r / 2][r % 2] = shared.gate.high[warp_row + r * 8 + lane / 4];
    }

    uint32_t lane_q = sm80_lane_a<DH>(sm80_address(shared.q), lane) + (uint32_t)(warp_row * DH * 2);
    float sum[MS][DH / 8][4] = {}, top[MS][2], total[MS][2] = {};
#pragma unroll
    for (int r = 0; r < 2 * MS; r++)
        top[r / 2][r % 2] = -1e30f; // finite: no infinity is ever subtracted from another

    // From the diagonal down to the first key: near keys tend to hold the maximum.
    for (int stage = 0; tile >= last_tile; tile--, stage ^= 1) {
        int j0 = tile * KEYS - i0; // counted from the first query; negative before the diagonal block
        sm80_copies_done();
        __syncthreads();
        if (tile > last_tile) copy_keys(stage ^ 1, tile - 1);

        float s[MS][NS][4];
        uint32_t start = shared.start[stage].lane(0, lane);
        sm80_scores<DH>(s, lane_q, sm80_lane_b<DH>(sm80_address(shared.k[stage]), lane),
                        [&](float(&from)[4], int, int n) {
                            if (GATE)
                                Sm80Start<KEYS>::load(from, start, n);
                            else
                                from[0] = from[1] = from[2] = from[3] = 0;
                        });

        // From here the exponent is factor s + shift, relative to the row's own c_i.
        bool diagonal = j0 >= 0;
        float factor = diagonal ? 1 : SCALE, shift[MS][2], highest[MS][2];
        if (diagonal) {
            sm80_each(s, [&](float& x, int, int, int row, int column) {
                int i = warp_row + row, j = j0 + column;
                x = x * SCALE + (GATE ? shared.gate.difference(i, j) : 0);
                if (j > i) x = -INFINITY;
            });
        }
        // A row's `top` need not be its maximum, only near enough for 2^(x - top) to stay in range: the sums
        // so far are rescaled only when a score exceeds it by RAISE, which is rare after a row's first tile.
        bool raise = false;
#pragma unroll
        for (int m = 0; m < MS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = s[m][0][2 * half];
#pragma unroll
                for (int n = 0; n < NS; n++) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                highest[m][half] = x * factor + (diagonal ? 0 : from_first[m][half]);
                raise |= highest[m][half] > top[m][half] + F::RAISE;
            }
        if (__any_sync(0xffffffffu, raise)) {
#pragma unroll
            for (int m = 0; m < MS; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float x = fmaxf(top[m][half], highest[m][half]);
                    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                    float rescale = sm80_exp2(top[m][half] - x);
                    top[m][half] = x;
                    total[m][half] *= rescale;
#pragma unroll
                    for (int n = 0; n < DH / 8; n++) {
                        sum[m][n][2 * half] *= rescale;
                        sum[m][n][2 * half + 1] *= rescale;
                    }
                }
        }
#pragma unroll
        for (int r = 0; r < 2 * MS; r++)
            shift[r / 2][r % 2] = (diagonal ? 0 : from_first[r / 2][r % 2]) - top[r / 2][r % 2];

        keep_start(stage ^ 1, tile - 1);
        read_gate(tile - 2);
        uint32_t lane_v = sm80_lane_a<DH>(sm80_address(shared.v[stage]), lane);
#pragma unroll
        for (int n = 0; n < NS; n += 2) { // 16 keys: probabilities, and at once their product with v
            uint32_t p[MS][4];
#pragma unroll
            for (int m = 0; m < MS; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    int half = r % 2;
                    float* x = &s[m][n + r / 2][2 * half];
                    float p0 = sm80_exp2(x[0] * factor + shift[m][half]);
                    float p1 = sm80_exp2(x[1] * factor + shift[m][half]);
                    total[m][half] += p0 + p1;
                    p[m][r] = sm80_pack(p0, p1);
                }
            sm80_add_product<DH>(sum, p, sm80_move<DH>(lane_v, n * 8, 0));
        }
    }

    lse += head * T;
#pragma unroll
    for (int r = 0; r < 2 * MS; r++) {
        float l = sm80_row_sum(total[r / 2][r % 2]);
        int i = i0 + warp_row + r * 8 + lane / 4;
        if (i < T && lane % 4 == 0) lse[i] = (top[r / 2][r % 2] + log2f(l)) * 0.6931471805599453f;
        total[r / 2][r % 2] = 1 / l;
    }
    sm80_store<DH>(o + base + (i0 + warp_row) * shape.row, shape.row, T - i0 - warp_row,
                   (char*)shared.q + warp_row * DH * 2, sum, total);
}

// ----------------------------------------------------------------------------
// backward. With p = exp(score - lse) and ds = p (do_i v_j - delta_i):
//   dq_i = sum_j ds k_j / sqrt(dh),  dk_j = sum_i ds q_i / sqrt(dh),  dv_j = sum_i p do_i,
//   dc_i = sum_j ds_ij - sum_j ds_ji
// The sums of do_i v_j start from -delta_i. dc takes ds as it is before rounding to bf16, in both kernels:
// dc's sum over time follows, where only the pairs that cancel keep rounding errors from adding up.

template <int DH> struct Sm80Dq {
    static constexpr int THREADS = 128, KEYS = DH == 64 ? 64 : 32;
    struct Shared {
        bf16 q[ATTENTION_BLOCK * DH], dout[ATTENTION_BLOCK * DH], k[2][KEYS * DH], v[2][KEYS * DH];
        float start[2][KEYS]; // sqrt(dh) (c_anchor - c_j); 0 in the diagonal block
        Sm80Gate gate;
    };
};

// Writes dq, and the rows' sums to dc.
template <int DH, bool GATE>
__global__ void __launch_bounds__(Sm80Dq<DH>::THREADS, 2)
    sm80_dq_kernel(bf16* __restrict__ dq, float* __restrict__ dc, const bf16* __restrict__ dout,
                   const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                   const float* __restrict__ lse, const float* __restrict__ delta,
                   const double* __restrict__ c, const int* __restrict__ first_key_block,
                   AttentionShape shape) {
    typedef Sm80Dq<DH> F;
    constexpr int KEYS = F::KEYS, PART = 32, MS = 2, NS = PART / 8; // a warp takes PART keys at a time
    constexpr float ROOT = AttentionScale<DH>::ROOT, SCALE = AttentionScale<DH>::SCALE;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    int tid = (int)threadIdx.x, lane = tid % 32, warp_row = tid / 32 * (MS * 16), T = shape.T;
    AttentionWork work = shape.work(blockIdx.x);
    int64_t head = work.head;
    int block = shape.blocks - 1 - work.place; // the last queries have most keys
    int i0 = block * ATTENTION_BLOCK;
    int64_t base = head / shape.NH * T * shape.row + head % shape.NH * DH;
    k += base;
    v += base;
    int tile = first_key_block ? first_key_block[head * shape.blocks + block] * (ATTENTION_BLOCK / KEYS) : 0;
    int last_tile = (min(i0 + ATTENTION_BLOCK, T) - 1) / KEYS;

    auto copy_keys = [&](int stage, int tile) {
        int64_t at = (int64_t)tile * KEYS * shape.row;
        sm80_copy_tile<DH, KEYS, F::THREADS>(sm80_address(shared.k[stage]), k + at, shape.row,
                                             T - tile * KEYS);
        sm80_copy_tile<DH, KEYS, F::THREADS>(sm80_address(shared.v[stage]), v + at, shape.row,
                                             T - tile * KEYS);
    };
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(sm80_address(shared.q), q + base + i0 * shape.row,
                                                    shape.row, T - i0);
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(sm80_address(shared.dout), dout + base + i0 * shape.row,
                                                    shape.row, T - i0);
    copy_keys(0, tile);

    double anchor = 0, c_ahead = 0;
    if (GATE) c += head * T;
    auto read_gate = [&](int tile) {
        if (GATE) c_ahead = c[min(tile * KEYS + tid % KEYS, T - 1)];
    };
    auto keep_start = [&](int stage, int tile) {
        if (GATE)
            shared.start[stage][tid % KEYS] = tile * KEYS >= i0 ? 0 : (float)((anchor - c_ahead) * ROOT);
    };
    if (GATE) {
        anchor = c[i0];
        shared.gate.fill(c, anchor, i0, T);
        read_gate(tile);
        keep_start(0, tile);
        read_gate(tile + 1);
        __syncthreads();
    }

    float shift[MS][2], row_lse[MS][2], row_delta[MS][2], row_sum[MS][2] = {}, sum[MS][DH / 8][4] = {};
#pragma unroll
    for (int r = 0; r < 2 * MS; r++) {
        int i = warp_row + r * 8 + lane / 4;
        int64_t at = head * T + min(i0 + i, T - 1);
        row_lse[r / 2][r % 2] = lse[at] * (float)ATTENTION_LOG2E;
        row_delta[r / 2][r % 2] = -delta[at];
        shift[r / 2][r % 2] = (GATE ? shared.gate.high[i] : 0) - row_lse[r / 2][r % 2];
    }
    uint32_t lane_q = sm80_lane_a<DH>(sm80_address(shared.q), lane) + (uint32_t)(warp_row * DH * 2);
    uint32_t lane_dout = sm80_lane_a<DH>(sm80_address(shared.dout), lane) + (uint32_t)(warp_row * DH * 2);

    for (int stage = 0; tile <= last_tile; tile++, stage ^= 1) {
        sm80_copies_done();
        __syncthreads();
        if (tile < last_tile) copy_keys(stage ^ 1, tile + 1);
        keep_start(stage ^ 1, tile + 1);
        read_gate(tile + 2);

#pragma unroll 1
        for (int part = 0; part < KEYS; part += PART) {
            int j0 = tile * KEYS + part - i0;
            if (j0 >= warp_row + MS * 16) break; // the rest lies in the future
            float s[MS][NS][4], dp[MS][NS][4];
            const float* start = shared.start[stage] + part + lane % 4 * 2;
            sm80_scores<DH>(s, lane_q,
                            sm80_move<DH>(sm80_lane_b<DH>(sm80_address(shared.k[stage]), lane), part, 0),
                            [&](float(&from)[4], int, int n) {
                                float2 x = GATE ? *(float2*)(start + n * 8) : make_float2(0, 0);
                                from[0] = from[2] = x.x;
                                from[1] = from[3] = x.y;
                            });
            bool diagonal = j0 >= 0;
            float factor = diagonal ? 1 : SCALE;
            if (diagonal) {
                sm80_each(s, [&](float& x, int m, int half, int row, int column) {
                    int i = warp_row + row, j = j0 + column;
                    x = x * SCALE + (GATE ? shared.gate.difference(i, j) : 0) - row_lse[m][half];
                    if (j > i) x = -INFINITY;
                });
            }
            // The exponentials overlap with the next product.
            sm80_each(s, [&](float& x, int m, int half, int, int) {
                x = sm80_exp2(x * factor + (diagonal ? 0 : shift[m][half]));
            });
            sm80_scores<DH>(dp, lane_dout,
                            sm80_move<DH>(sm80_lane_b<DH>(sm80_address(shared.v[stage]), lane), part, 0),
                            [&](float(&from)[4], int m, int) {
                                from[0] = from[1] = row_delta[m][0];
                                from[2] = from[3] = row_delta[m][1];
                            });
            uint32_t lane_k = sm80_lane_a<DH>(sm80_address(shared.k[stage]), lane);
#pragma unroll
            for (int n = 0; n < NS; n += 2) {
                uint32_t ds[MS][4];
#pragma unroll
                for (int m = 0; m < MS; m++)
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        int half = r % 2;
                        float *x = &s[m][n + r / 2][2 * half], *y = &dp[m][n + r / 2][2 * half];
                        float ds0 = x[0] * y[0], ds1 = x[1] * y[1];
                        if (GATE) row_sum[m][half] += ds0 + ds1;
                        ds[m][r] = sm80_pack(ds0, ds1);
                    }
                sm80_add_product<DH>(sum, ds, sm80_move<DH>(lane_k, part + n * 8, 0));
            }
        }
    }

    float factor[MS][2];
#pragma unroll
    for (int r = 0; r < 2 * MS; r++) {
        factor[r / 2][r % 2] = 1 / ROOT;
        if (!GATE || !dc) continue;
        float x = sm80_row_sum(row_sum[r / 2][r % 2]);
        int i = i0 + warp_row + r * 8 + lane / 4;
        if (i < T && lane % 4 == 0) dc[head * T + i] = x;
    }
    sm80_store<DH>(dq + base + (i0 + warp_row) * shape.row, shape.row, T - i0 - warp_row,
                   (char*)shared.q + warp_row * DH * 2, sum, factor);
}

template <int DH> struct Sm80Dkv {
    // Two results of DH columns a key leave registers for 32 keys a warp at 64 columns, for 16 at 128.
    static constexpr int MS = DH == 64 ? 2 : 1, THREADS = ATTENTION_BLOCK / (MS * 16) * 32,
                         BLOCKS_PER_SM = MS;
    static constexpr int QUERIES = DH == 64 ? 64 : 32;
    struct Shared {
        bf16 k[ATTENTION_BLOCK * DH], v[ATTENTION_BLOCK * DH], q[2][QUERIES * DH], dout[2][QUERIES * DH];
        float start[2][QUERIES]; // sqrt(dh) (c_i - c_anchor - lse_i); without c in the diagonal block
        float minus_delta[2][QUERIES];
        Sm80Gate gate;
    };
};

// Writes dk and dv, and subtracts the columns' sums from dc.
template <int DH, bool GATE>
__global__ void __launch_bounds__(Sm80Dkv<DH>::THREADS, Sm80Dkv<DH>::BLOCKS_PER_SM)
    sm80_dkv_kernel(bf16* __restrict__ dk, bf16* __restrict__ dv, float* __restrict__ dc,
                    const bf16* __restrict__ dout, const bf16* __restrict__ q, const bf16* __restrict__ k,
                    const bf16* __restrict__ v, const float* __restrict__ lse,
                    const float* __restrict__ delta, const double* __restrict__ c,
                    const int* __restrict__ last_query_block, AttentionShape shape) {
    typedef Sm80Dkv<DH> F;
    constexpr int QUERIES = F::QUERIES, PART = 32, MS = F::MS, NS = PART / 8;
    constexpr float ROOT = AttentionScale<DH>::ROOT, SCALE = AttentionScale<DH>::SCALE;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    int tid = (int)threadIdx.x, lane = tid % 32, warp_row = tid / 32 * (MS * 16), T = shape.T;
    AttentionWork work = shape.work(blockIdx.x);
    int64_t head = work.head;
    int block = work.place, j0 = block * ATTENTION_BLOCK; // the first keys have most queries
    int64_t base = head / shape.NH * T * shape.row + head % shape.NH * DH;
    q += base;
    dout += base;
    lse += head * T;
    delta += head * T;
    int tile = j0 / QUERIES, last_tile = (T - 1) / QUERIES;
    if (last_query_block)
        last_tile = min(
            last_tile, (last_query_block[head * shape.blocks + block] + 1) * (ATTENTION_BLOCK / QUERIES) - 1);

    auto copy_queries = [&](int stage, int tile) {
        int64_t at = (int64_t)tile * QUERIES * shape.row;
        sm80_copy_tile<DH, QUERIES, F::THREADS>(sm80_address(shared.q[stage]), q + at, shape.row,
                                                T - tile * QUERIES);
        sm80_copy_tile<DH, QUERIES, F::THREADS>(sm80_address(shared.dout[stage]), dout + at, shape.row,
                                                T - tile * QUERIES);
    };
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(sm80_address(shared.k), k + base + j0 * shape.row,
                                                    shape.row, T - j0);
    sm80_copy_tile<DH, ATTENTION_BLOCK, F::THREADS>(sm80_address(shared.v), v + base + j0 * shape.row,
                                                    shape.row, T - j0);
    copy_queries(0, tile);

    // What the scores of a query start from. Queries past T get probability 0.
    double anchor = 0, c_ahead = 0;
    float lse_ahead = 0, delta_ahead = 0;
    auto read_query = [&](int tile) {
        int i = tile * QUERIES + tid % QUERIES, exists = min(i, T - 1);
        lse_ahead = i < T ? lse[exists] : INFINITY;
        delta_ahead = i < T ? delta[exists] : 0;
        if (GATE) c_ahead = c[exists];
    };
    auto keep_start = [&](int stage, int tile) {
        float gate = GATE && tile * QUERIES >= j0 + ATTENTION_BLOCK ? (float)(c_ahead - anchor) : 0;
        shared.start[stage][tid % QUERIES] = (gate - lse_ahead) * ROOT;
        shared.minus_delta[stage][tid % QUERIES] = -delta_ahead;
    };
    if (GATE) {
        c += head * T;
        anchor = c[min(j0 + ATTENTION_BLOCK, T) - 1];
        shared.gate.fill(c, anchor, j0, T);
    }
    read_query(tile);
    keep_start(0, tile);
    read_query(tile + 1);
    __syncthreads();

    float shift[MS][2], column_sum[MS][2] = {}, sum_k[MS][DH / 8][4] = {}, sum_v[MS][DH / 8][4] = {};
#pragma unroll
    for (int r = 0; r < 2 * MS; r++)
        shift[r / 2][r % 2] = GATE ? -shared.gate.high[warp_row + r * 8 + lane / 4] : 0;
    uint32_t lane_k = sm80_lane_a<DH>(sm80_address(shared.k), lane) + (uint32_t)(warp_row * DH * 2);
    uint32_t lane_v = sm80_lane_a<DH>(sm80_address(shared.v), lane) + (uint32_t)(warp_row * DH * 2);

    // Here a row of scores is a key, a column a query.
    for (int stage = 0; tile <= last_tile; tile++, stage ^= 1) {
        sm80_copies_done();
        __syncthreads();
        if (tile < last_tile) copy_queries(stage ^ 1, tile + 1);
        keep_start(stage ^ 1, tile + 1);
        read_query(tile + 2);

#pragma unroll 1
        for (int part = 0; part < QUERIES; part += PART) {
            int i0 = tile * QUERIES + part - j0;
            if (i0 + PART <= warp_row) continue; // all of these queries come before the warp's keys
            float s[MS][NS][4], dp[MS][NS][4];
            const float *start = shared.start[stage] + part + lane % 4 * 2,
                        *minus_delta = shared.minus_delta[stage] + part + lane % 4 * 2;
            uint32_t row_q = sm80_address(shared.q[stage]) + (uint32_t)(part * DH * 2);
            uint32_t row_dout = sm80_address(shared.dout[stage]) + (uint32_t)(part * DH * 2);
            sm80_scores<DH>(s, lane_k, sm80_lane_b<DH>(row_q, lane), [&](float(&from)[4], int, int n) {
                float2 x = *(float2*)(start + n * 8);
                from[0] = from[2] = x.x;
                from[1] = from[3] = x.y;
            });
            bool diagonal = i0 < ATTENTION_BLOCK;
            float factor = diagonal ? 1 : SCALE;
            if (diagonal) {
                sm80_each(s, [&](float& x, int, int, int row, int column) {
                    int i = i0 + column, j = warp_row + row;
                    x = x * SCALE + (GATE ? shared.gate.difference(i, j) : 0);
                    if (j > i) x = -INFINITY;
                });
            }
            // The exponentials overlap with the next product.
            sm80_each(s, [&](float& x, int m, int half, int, int) {
                x = sm80_exp2(x * factor + (diagonal ? 0 : shift[m][half]));
            });
            sm80_scores<DH>(dp, lane_v, sm80_lane_b<DH>(row_dout, lane), [&](float(&from)[4], int, int n) {
                float2 x = *(float2*)(minus_delta + n * 8);
                from[0] = from[2] = x.x;
                from[1] = from[3] = x.y;
            });
            uint32_t lane_q = sm80_lane_a<DH>(row_q, lane), lane_dout = sm80_lane_a<DH>(row_dout, lane);
#pragma unroll
            for (int n = 0; n < NS; n += 2) {
                uint32_t p[MS][4], ds[MS][4];
#pragma unroll
                for (int m = 0; m < MS; m++)
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        int half = r % 2;
                        float *x = &s[m][n + r / 2][2 * half], *y = &dp[m][n + r / 2][2 * half];
                        float ds0 = x[0] * y[0], ds1 = x[1] * y[1];
                        if (GATE) column_sum[m][half] += ds0 + ds1;
                        p[m][r] = sm80_pack(x[0], x[1]);
                        ds[m][r] = sm80_pack(ds0, ds1);
                    }
                sm80_add_product<DH>(sum_v, p, sm80_move<DH>(lane_dout, n * 8, 0));
                sm80_add_product<DH>(sum_k, ds, sm80_move<DH>(lane_q, n * 8, 0));
            }
        }
    }

    float factor_k[MS][2], factor_v[MS][2];
#pragma unroll
    for (int r = 0; r < 2 * MS; r++) {
        factor_k[r / 2][r % 2] = 1 / ROOT;
        factor_v[r / 2][r % 2] = 1;
        if (!GATE || !dc) continue;
        float x = sm80_row_sum(column_sum[r / 2][r % 2]);
        int j = j0 + warp_row + r * 8 + lane / 4;
        if (j < T && lane % 4 == 0) dc[head * T + j] -= x;
    }
    int64_t at = base + (j0 + warp_row) * shape.row;
    sm80_store<DH>(dk + at, shape.row, T - j0 - warp_row, (char*)shared.k + warp_row * DH * 2, sum_k,
                   factor_k);
    sm80_store<DH>(dv + at, shape.row, T - j0 - warp_row, (char*)shared.v + warp_row * DH * 2, sum_v,
                   factor_v);
}

// ----------------------------------------------------------------------------
// launches; arguments as in attention.cuh

#define SM80_SHARED_KIB 99 // what sm_86 and sm_89 have for a thread block

template <int DH, bool GATE>
static inline void attention_forward_sm80(bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                                          const double* c, const int* first_key_block, int64_t B, int64_t T,
                                          int64_t NH, cudaStream_t stream) {
    AttentionShape shape = attention_shape(B, T, NH, DH, ATTENTION_BLOCK, NULL, 4);
    attention_launch<typename Sm80Forward<DH>::Shared, SM80_SHARED_KIB>(
        sm80_forward_kernel<DH, GATE>, (int64_t)shape.heads * shape.blocks, Sm80Forward<DH>::THREADS, stream,
        o, lse, q, k, v, c, first_key_block, shape);
}

template <int DH, bool GATE>
static inline void attention_backward_sm80(bf16* dq, bf16* dk, bf16* dv, float* dc, const bf16* dout,
                                           const bf16* q, const bf16* k, const bf16* v, const float* lse,
                                           const float* delta, const double* c, const int* first_key_block,
                                           const int* last_query_block, int64_t B, int64_t T, int64_t NH,
                                           cudaStream_t stream) {
    AttentionShape shape = attention_shape(B, T, NH, DH, ATTENTION_BLOCK, NULL, 4);
    attention_launch<typename Sm80Dq<DH>::Shared, SM80_SHARED_KIB>(
        sm80_dq_kernel<DH, GATE>, (int64_t)shape.heads * shape.blocks, Sm80Dq<DH>::THREADS, stream, dq, dc,
        dout, q, k, v, lse, delta, c, first_key_block, shape);
    attention_launch<typename Sm80Dkv<DH>::Shared, SM80_SHARED_KIB>(
        sm80_dkv_kernel<DH, GATE>, (int64_t)shape.heads * shape.blocks, Sm80Dkv<DH>::THREADS, stream, dk, dv,
        dc, dout, q, k, v, lse, delta, c, last_query_block, shape);
}

#endif // LLMC_ATTENTION_SM80_CUH
