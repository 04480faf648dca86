/*
Gradients of the recurrence with one decay a head, from the states S0 and their gradients dS1 of each chunk
(ssd_states.cuh). With e_ij = e^(b_i - b_j) for j <= i, a head's p_ij = (q_i k_j) e_ij, and sums over heads
where it says so:

    w_ij = sum over heads of (do_i v_j) e_ij
    dq_i = sum over heads of e^(b_i) S0 do_i + sum_j w_ij k_j                 ssd_dq_kernel
    dk_j = sum over heads of e^(b_C - b_j) dS1 v_j + sum_i w_ij q_i       ssd_dkv_kernel; ssd_dq_kernel
    dv_j = e^(b_C - b_j) dS1^T k_j + sum_i p_ij do_i                          ssd_dkv_kernel

    dlog_decay_t = sum over i >= t of (e^(b_i) (S0^T q_i) do_i + sum_j g_ij - sum_j g_ji)
                 + sum over j < t of e^(b_C - b_j) (dS1^T k_j) v_j  + <e^(b_C) S0, dS1>,
    g_ij = p_ij (do_i v_j) for j < i

The shorter formula, the sum of o_t do_t - v_t dv_t over later tokens, loses the small gradients of fast
decays to cancellation: g_ii and the terms after the chunk cancel only if both are rounded alike.

Thread blocks are those of ssd_forward.cuh: one chunk, iterating over heads, 8 warps of 16 tokens each. With
TMA one thread (COPIER) starts the copies. Each kernel's iteration:

    ssd_dq_kernel     d = do v^T  ->  w += d e, row and column sums of g  ->  x = Q S0, dq += do S0^T
    ssd_dkv_kernel    dv = k dS1, its dot with v  ->  dv += p do  ->  dk += v dS1^T  ->  <S0, dS1>

ssd_dq_kernel ends with what needs w of all heads: dq += w K, and the partial dk = w^T Q.

Where several thread blocks share a chunk, each writes its heads' partial dq and dk in fp32, and
ssd_add_kernel adds the partials in a fixed order.
*/
#pragma once

#include "ssd_forward.cuh"

struct SsdBackward {
    static constexpr int THREADS = 256;
    struct Stage {
        bf16 v[SSD_CHUNK * SSD_V], dout[SSD_CHUNK * SSD_V], state[SSD_STATE]; // S0 or dS1
    };
    static_assert(sizeof(Stage) >= SSD_CHUNK * SSD_K * sizeof(bf16), "a tile of q or w fits");
    static constexpr size_t HEAD_BYTES = sizeof(Stage) + SSD_CHUNK * sizeof(float);
};

// The warps' rows of Q K^T or its transpose, in bf16, as fragments [strip][block][lane]
typedef uint4 SsdStrips[8][8][32];

template <int STAGES_> struct SsdDq : SsdBackward {
    static constexpr int STAGES = STAGES_;
    static constexpr bool ROWS_ARE_QUERIES = true; // a warp's rows are tokens i, with q and do
    static constexpr int COPIER = 0;               // in the warp with the fewest pairs
    struct Shared {
        bf16 q[SSD_CHUNK * SSD_K], k[SSD_CHUNK * SSD_K];
        SsdStrips qk;
        Stage stage[STAGES]; // w is in the first one after the last head
        float cum[STAGES][SSD_CHUNK];
        uint64_t full[STAGES + 1];                 // mbarriers: of the stages, and of q and k
        float columns[2][THREADS / 32][SSD_CHUNK]; // the strips' column sums of g, for two heads
    };
};

template <int STAGES_> struct SsdDkv : SsdBackward {
    static constexpr int STAGES = STAGES_;
    static constexpr bool ROWS_ARE_QUERIES = false; // but tokens j, with k and v
    static constexpr int COPIER = 128;
    static constexpr size_t HEAD_BYTES = SsdBackward::HEAD_BYTES + SSD_STATE * sizeof(bf16);
    struct Shared {
        bf16 k[SSD_CHUNK * SSD_K];
        SsdStrips kq;
        bf16 before[STAGES][SSD_STATE]; // S0
        Stage stage[STAGES];            // q is in the last one before the first head
        bf16 out[THREADS / 32][16 * SSD_V];
        float cum[STAGES][SSD_CHUNK];
        uint64_t full[STAGES + 1];
    };
};

// state: S0 or dS1; before: S0, for SsdDkv
struct SsdBackwardTensors {
    PanelTensor q, k, v, dout, state, before;
};
static_assert(SSD_K == SSD_CHUNK, "boxes of states");

// Starts copying the tiles of head h; past the last head it only commits an empty group.
template <class F>
__device__ static inline void ssd_copy_head(typename F::Shared& shared, const SsdBlock& block, int h,
                                            const SsdBackwardTensors& t, const SsdWork& work,
                                            const ScanShape& s) {
    constexpr int THREADS = F::THREADS;
    constexpr bool QUERIES = F::ROWS_ARE_QUERIES;
    int i = (h - block.h) % F::STAGES;
    uint64_t* full = &shared.full[i];
    if (h < block.heads_end && panel_copier(F::COPIER)) {
        auto& stage = shared.stage[i];
        int state = (int)block.at(work, s, h, SSD_K);
        panel_expect(full, F::HEAD_BYTES);
        ssd_copy_tile<!QUERIES, THREADS>(stage.v, t.v, block, h, full);
        ssd_copy_tile<QUERIES, THREADS>(stage.dout, t.dout, block, h, full);
        panel_copy<SSD_K, THREADS>(stage.state, t.state, 0, 0, state, full);
        if constexpr (!QUERIES) panel_copy<SSD_K, THREADS>(shared.before[i], t.before, 0, 0, state, full);
        panel_copy_numbers<SSD_CHUNK>(shared.cum[i], work.cum + block.at(work, s, h, SSD_CHUNK), full);
    }
    panel_commit();
}
// Waits for the tiles of head h. With a single stage it starts their copies first, after all warps have
// finished the previous head.
template <class F>
__device__ static inline void ssd_wait_head(typename F::Shared& shared, const SsdBlock& block, int h,
                                            const SsdBackwardTensors& t, const SsdWork& work,
                                            const ScanShape& s) {
    int i = h - block.h;
    if (F::STAGES == 1) {
        __syncthreads();
        ssd_copy_head<F>(shared, block, h, t, work, s);
    }
    panel_wait<F::STAGES == 1 ? 0 : F::STAGES - 2>(&shared.full[i % F::STAGES], i / F::STAGES % 2);
#if !SM90_CODE
    __syncthreads();
#endif
}

// Copies q, k and the first heads.
template <class F>
__device__ static inline void ssd_copy_first(typename F::Shared& shared, bf16* q, const SsdBlock& block,
                                             const SsdBackwardTensors& t, const SsdWork& work,
                                             const ScanShape& s) {
    uint64_t* full = &shared.full[F::STAGES];
    panel_init(shared.full);
    if (panel_copier(F::COPIER)) {
        panel_expect(full, 2 * sizeof shared.k);
        ssd_copy_keys<F::ROWS_ARE_QUERIES, F::THREADS>(q, t.q, block, full);
        ssd_copy_keys<!F::ROWS_ARE_QUERIES, F::THREADS>(shared.k, t.k, block, full);
    }
    panel_commit();
    for (int i = 0; i < F::STAGES - 1; i++) ssd_copy_head<F>(shared, block, block.h + i, t, work, s);
    panel_wait<F::STAGES - 1>(full, 0);
    __syncthreads();
}

// Computes the warp's rows of A B^T over K channels, and stores them. Only the warp itself reads them.
template <class A, class B>
__device__ static inline void ssd_keep_strip(SsdStrips& strips, const A& a, const B& b,
                                             const SsdBlock& block) {
    float s[1][16][4];
    panels_matmul<SSD_K, false>(s, a, b);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint32_t f[4];
        scan_pack(f, s, 2 * j);
        strips[block.strip][j][threadIdx.x % 32] = make_uint4(f[0], f[1], f[2], f[3]);
    }
}
// Block j of the warp's rows as fragment registers
__device__ static inline void ssd_load_strip(uint32_t (&f)[4], const SsdStrips& strips, const SsdBlock& block,
                                             int j) {
    const uint4 x = strips[block.strip][j][threadIdx.x % 32];
    f[0] = x.x;
    f[1] = x.y;
    f[2] = x.z;
    f[3] = x.w;
}

// The lane's pairs of the strip's rows of dq or dk: f(x, i, j) gets a pair x, its offset i among the parts of
// dq or dk, and its offset j in dq or dk.
template <class F>
__device__ static inline void ssd_for_pairs(float (&acc)[1][16][4], const SsdBlock& block, const ScanShape& s,
                                            F f) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int64_t t = block.first + block.row() + i % 2 * 8, row = block.b * s.T + t;
        int column = i / 2 * 8 + (int)threadIdx.x % 4 * 2;
        if (t < s.T)
            f(*(float2*)&acc[0][i / 2][i % 2 * 2], (block.group * s.B * s.T + row) * SSD_K + column,
              row * s.key_row + column);
    }
}
// Writes the strip's rows of dq or dk: a part, or where there is one part only, the result.
__device__ static inline void ssd_store_part(bf16* whole, float* parts, float (&acc)[1][16][4],
                                             const SsdBlock& block, const SsdWork& work, const ScanShape& s) {
    if (work.groups > 1)
        ssd_for_pairs(acc, block, s, [&](float2 x, int64_t i, int64_t) { *(float2*)(parts + i) = x; });
    else
        ssd_for_pairs(acc, block, s, [&](float2 x, int64_t, int64_t j) {
            *(uint32_t*)(whole + j) = pack_bf16x2(x.x * s.scale, x.y * s.scale);
        });
}

// Writes one number for each of the strip's tokens, from the lanes' parts of it.
__device__ static inline void ssd_store_rows(float* to, const float (&part)[2], const SsdBlock& block) {
    for (int half = 0; half < 2; half++) {
        float sum = quad_sum(part[half]);
        if (threadIdx.x % 4 == 0) to[block.row() + half * 8] = sum;
    }
}

// ----------------------------------------------------------------------------
// dq

// Column sums over the warp of a 16x16 block g, of which r is a fragment register: to [16]
__device__ static inline void ssd_column_sums(float* to, const float2 (&g)[4]) {
    int lane = (int)threadIdx.x % 32;
    bool second = lane & 16,
         odd = lane & 8; // the column that the lane keeps: of the block's half, of the pair
    float x[2][2];       // [half][pair]
    for (int i = 0; i < 2; i++) x[i][0] = g[2 * i].x + g[2 * i + 1].x, x[i][1] = g[2 * i].y + g[2 * i + 1].y;
    float kept[2];
    for (int e = 0; e < 2; e++)
        kept[e] = (second ? x[1][e] : x[0][e]) + __shfl_xor_sync(0xffffffffu, second ? x[0][e] : x[1][e], 16);
    float sum = (odd ? kept[1] : kept[0]) + __shfl_xor_sync(0xffffffffu, odd ? kept[0] : kept[1], 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    if (!(lane & 4)) to[second * 8 + lane % 4 * 2 + odd] = sum;
}

// Pairs of the strip with the 64 tokens j from block `first` on: adds w to registers 2 N.. of it, and the row
// sums of g; writes its column sums. d: do_i v_j. BELOW: no block is on the diagonal.
template <bool BELOW, int N>
__device__ static inline void ssd_pairs(float (&w)[1][16][4], float (&row_sums)[2], const float (&d)[1][8][4],
                                        const SsdStrips& qk, float* columns, const SsdFactors<false>& factors,
                                        int first, const SsdBlock& block) {
    auto add = [&](int n, const float2(&e)[4], const uint32_t(&products)[4]) {
        float2 g[4];
        for (int r = 0; r < 4; r++) {
            const float* y = &d[0][2 * n + r / 2][r % 2 * 2];
            float* sum = &w[0][2 * (N + n) + r / 2][r % 2 * 2];
            float2 x = unpack_bf16x2(products[r]), dw = make_float2(e[r].x * y[0], e[r].y * y[1]);
            sum[0] += dw.x;
            sum[1] += dw.y;
            g[r] = make_float2(__fmul_rn(x.x, dw.x), __fmul_rn(x.y, dw.y)); // alike for rows and columns
            row_sums[r % 2] += g[r].x + g[r].y;
        }
        ssd_column_sums(columns + (first + n) * 16, g);
    };
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float2 e[4];
        uint32_t products[4];
        if (BELOW || first + n < block.strip) {
            factors.load(e, first + n);
            ssd_load_strip(products, qk, block, first + n);
            add(n, e, products);
        } else if (first + n == block.strip) {
            factors.load_diagonal(e);
            ssd_load_strip(products, qk, block, first + n);
            for (int r = 0; r < 4; r++) { // g without the diagonal
                int after = factors.column_after_row(r);
                products[r] &= after == 0 ? 0xffff0000u : after == -1 ? 0x0000ffffu : 0xffffffffu;
            }
            add(n, e, products);
        }
    }
}

// The rows of do times e^(b_i), as fragments
__device__ static inline void ssd_scaled_dout(uint32_t (&f)[4][4], const bf16* dout, const float (&decay)[2],
                                              const SsdBlock& block) {
    Panels<SSD_CHUNK, false> tile_dout(dout, scan_opaque(block.slot * 16));
    for (int k = 0; k < 4; k++) {
        tile_dout.load_a(f[k], k * 16);
        for (int r = 0; r < 4; r++) f[k][r] = scale_bf16x2(f[k][r], decay[r % 2], decay[r % 2]);
    }
}

// Reduces the strips' column sums of g: only strips from the column's own on have any.
__device__ static inline void ssd_store_columns(float* to, const float (*columns)[SSD_CHUNK]) {
    int j = (int)threadIdx.x;
    if (j >= SSD_CHUNK) return;
    float sum = 0;
    for (int strip = j / 16; strip < SsdBackward::THREADS / 32; strip++) sum += columns[strip][j];
    to[j] = sum;
}

// Writes dq or its parts, and in the parts of dk what comes from the token's own chunk.
template <int STAGES>
__global__ static void __launch_bounds__(SsdBackward::THREADS, 1)
    ssd_dq_kernel(bf16* whole, const __grid_constant__ SsdBackwardTensors tensors,
                  const __grid_constant__ SsdWork work, const __grid_constant__ ScanShape s) {
    typedef SsdDq<STAGES> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    SsdBlock block(work, s);
    ssd_copy_first<F>(shared, shared.q, block, tensors, work, s);
    Panels<SSD_CHUNK, false> tile_q(shared.q, block.slot * 16);
    ssd_keep_strip(shared.qk, tile_q, Panels<SSD_CHUNK, false>(shared.k), block);

    float dq[1][16][4], w[1][16][4]; // w: first the four blocks of which one is on the diagonal
    uint32_t dout[4][4] = {};        // do of the head before, of which dq is in flight
    scan_clear(dq);
    scan_clear(w);
    for (int h = block.h; h < block.heads_end; h++) {
        typename F::Stage& stage = shared.stage[(h - block.h) % F::STAGES];
        float* columns = shared.columns[h % 2][block.strip];
        const float* cum = shared.cum[(h - block.h) % F::STAGES];
        Panels<SSD_CHUNK, false> tile_dout(stage.dout, block.slot * 16);
        float d[1][8][4], x[1][8][4], row_sums[2] = {}, sums[2] = {};
        if (STAGES == 1) panels_finish<0>(dq, dout);
        ssd_wait_head<F>(shared, block, h, tensors, work, s);
        panels_start<SSD_V, false>(d, tile_dout, Panels<SSD_CHUNK, false>(stage.v));
        panels_finish<0>(dq, dout);
        panels_finish<0>(d);
        __syncthreads(); // all warps have finished the previous head
        if (STAGES > 1) ssd_copy_head<F>(shared, block, h + STAGES - 1, tensors, work, s);
        if (h > block.h)
            ssd_store_columns(work.g_columns + block.at(work, s, h - 1, SSD_CHUNK),
                              shared.columns[(h - 1) % 2]);
        const SsdFactors<false> factors(cum, block);
        if (block.strip >= 4) {
            ssd_pairs<true, 4>(w, row_sums, d, shared.qk, columns, factors, 0, block);
            panels_start<SSD_V, false>(d, tile_dout, Panels<SSD_CHUNK, false>(stage.v, 64));
            panels_finish<0>(d);
        }
        // mma.sync would not overlap it, only hold registers.
        auto start_state = [&] { panels_start<SSD_K, false>(x, tile_q, Panels<SSD_K, true>(stage.state)); };
        if (SM90_CODE) start_state();
        ssd_pairs<false, 0>(w, row_sums, d, shared.qk, columns, factors, block.strip / 4 * 4, block);
        if (!SM90_CODE) start_state();
        const float decay[2] = {exp2_approx(factors.row_cum[0]), exp2_approx(factors.row_cum[1])};
        ssd_scaled_dout(dout, stage.dout, decay, block);
        panels_finish<0>(x);
        panels_start(dq, dout, Panels<SSD_K, false>(stage.state), 0);
        scan_row_dot(sums, x, stage.dout, scan_opaque(block.tile_row()));
        for (int half = 0; half < 2; half++) row_sums[half] += decay[half] * sums[half];
        ssd_store_rows(work.g_rows + block.at(work, s, h, SSD_CHUNK), row_sums, block);
    }
    panels_finish<0>(dq, dout);
    __syncthreads();
    ssd_store_columns(work.g_columns + block.at(work, s, block.heads_end - 1, SSD_CHUNK),
                      shared.columns[(block.heads_end - 1) % 2]);
    bf16* tile_w = (bf16*)&shared.stage[0];
    uint32_t p[8][4];
#pragma unroll
    for (int j = 0; j < 8; j++) scan_pack(p[j], w, 2 * j);
    if (block.strip >= 4) // whose registers begin with block 4
        for (int i = 0; i < 16; i++) {
            uint32_t x = p[i / 4][i % 4];
            p[i / 4][i % 4] = p[i / 4 + 4][i % 4];
            p[i / 4 + 4][i % 4] = x;
        }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int j = i / 4, r = i % 4;
        *scan_pair<64>(tile_w + j / 4 * SSD_CHUNK * 64, block.tile_row() + r % 2 * 8, 2 * (j % 4) + r / 2) =
            p[j][r];
    }
    panels_matmul(dq, p, Panels<SSD_CHUNK, true>(shared.k), 0);
    ssd_store_part(whole, work.dq, dq, block, work, s);
    __syncthreads();
    scan_clear(dq); // now dk
    Panels<SSD_CHUNK, true> transposed_w(tile_w, block.strip * 16);
    for (int i = block.strip; i < 8; i++) {
        uint32_t f[4];
        transposed_w.load_a(f, ssd_slot(i) * 16);
        panels_mma(dq, f, Panels<SSD_CHUNK, true>(shared.q), ssd_slot(i) * 16);
    }
    ssd_for_pairs(dq, block, s, [&](float2 x, int64_t i, int64_t) { *(float2*)(work.dk + i) = x; });
}

// ----------------------------------------------------------------------------
// dk and dv

// dv += pairs of the strip with the 64 tokens i from block `first` on. BELOW: as in ssd_pairs
template <bool BELOW>
__device__ static inline void ssd_dv_pairs(float (&dv)[1][8][4], const bf16* dout, const SsdStrips& kq,
                                           const SsdFactors<true>& factors, int first,
                                           const SsdBlock& block) {
    uint32_t p[4][4] = {};
    auto load = [&](int n, const float2(&e)[4]) {
        ssd_load_strip(p[n], kq, block, first + n);
        for (int r = 0; r < 4; r++) p[n][r] = scale_bf16x2(p[n][r], e[r].x, e[r].y);
    };
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float2 e[4];
        if (BELOW || first + n > block.strip) {
            factors.load(e, first + n);
            load(n, e);
        } else if (first + n == block.strip) {
            factors.load_diagonal(e);
            load(n, e);
        }
    }
    panels_matmul(dv, p, Panels<SSD_CHUNK, true>(dout), first * 16);
}

// A head's part of dk through dS1, and dv before the factor `scale`; in `later` its part through dS1, times v
template <class S, class F>
__device__ static inline void ssd_dkv_head(float (&dk)[1][16][4], float (&dv)[1][8][4], float (&later)[2],
                                           S& shared, int i, const SsdBlock& block, F copy) {
    SsdBackward::Stage& stage = shared.stage[i];
    const float* cum = shared.cum[i];
    const SsdFactors<true> factors(cum, block);
    const float last = cum[SSD_CHUNK - 1];
    const float decay[2] = {exp2_approx(last - factors.row_cum[0]), exp2_approx(last - factors.row_cum[1])};
    panels_matmul<SSD_K, false>(dv, Panels<SSD_CHUNK, false>(shared.k, block.slot * 16),
                                Panels<SSD_K, true>(stage.state), copy);
#pragma unroll
    for (int e = 0; e < 32; e++) dv[0][e / 4][e % 4] *= decay[e % 4 / 2];
    scan_row_dot(later, dv, stage.v, block.tile_row());
    ssd_dv_pairs<false>(dv, stage.dout, shared.kq, factors, block.strip / 4 * 4, block);
    if (block.strip < 4) ssd_dv_pairs<true>(dv, stage.dout, shared.kq, factors, 4, block);
    uint32_t v[4][4];
    Panels<SSD_CHUNK, false> tile_v(stage.v, block.slot * 16);
    for (int k = 0; k < 4; k++) {
        tile_v.load_a(v[k], k * 16);
        for (int r = 0; r < 4; r++) v[k][r] = scale_bf16x2(v[k][r], decay[r % 2], decay[r % 2]);
    }
    panels_matmul(dk, v, Panels<SSD_K, false>(stage.state), 0);
}

// Writes the warp's part of <e^(b_C) S0, dS1>.
__device__ static inline void ssd_state_dot(float* to, const bf16* before, const bf16* dstate, float decay) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SSD_STATE; i += 8 * SsdBackward::THREADS) {
        float x[8], y[8];
        unpack8(x, load_raw8(before + i + threadIdx.x * 8));
        unpack8(y, load_raw8(dstate + i + threadIdx.x * 8));
        for (int c = 0; c < 8; c++) sum += x[c] * y[c];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) *to = sum * decay;
}

// Writes dv, dk or its parts, which begin with what ssd_dq_kernel left there, v . dv through dS1, and
// <e^(b_C) S0, dS1>.
template <int STAGES>
__global__ static void __launch_bounds__(SsdBackward::THREADS, 1)
    ssd_dkv_kernel(bf16* whole, bf16* dv, const __grid_constant__ SsdBackwardTensors tensors,
                   const __grid_constant__ SsdWork work, const __grid_constant__ ScanShape s) {
    typedef SsdDkv<STAGES> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    SsdBlock block(work, s);
    int left = (int)s.T - block.first - block.strip * 16;
    bf16* q = (bf16*)&shared.stage[F::STAGES - 1];
    ssd_copy_first<F>(shared, q, block, tensors, work, s);
    ssd_keep_strip(shared.kq, Panels<SSD_CHUNK, false>(shared.k, block.slot * 16),
                   Panels<SSD_CHUNK, false>(q), block);

    float dk[1][16][4];
    scan_clear(dk);
    ssd_for_pairs(dk, block, s, [&](float2& x, int64_t i, int64_t) { x = *(const float2*)(work.dk + i); });
    for (int h = block.h; h < block.heads_end; h++) {
        int i = (h - block.h) % F::STAGES;
        ssd_wait_head<F>(shared, block, h, tensors, work, s);
        __syncthreads(); // all warps have finished the previous head
        float acc[1][8][4], later[2] = {};
        ssd_dkv_head(dk, acc, later, shared, i, block, [&] {
            if (STAGES > 1) ssd_copy_head<F>(shared, block, h + STAGES - 1, tensors, work, s);
        });
        ssd_state_dot(work.dots + block.at(work, s, h, SSD_DOTS) + threadIdx.x / 32, shared.before[i],
                      shared.stage[i].state, exp2_approx(shared.cum[i][SSD_CHUNK - 1]));
        ssd_store_rows(work.later + block.at(work, s, h, SSD_CHUNK), later, block);
        bf16* to = dv + (block.b * s.T + block.first + block.strip * 16) * s.value_row + h * SSD_V;
        sm80_store<SSD_V>(to, s.value_row, left, shared.out[threadIdx.x / 32], acc,
                          [&](int, int) { return s.scale; });
    }
    ssd_store_part(whole, work.dk, dk, block, work, s);
}

// ----------------------------------------------------------------------------
// sums

// dq and dk [B,T,..] from their parts. A thread has 8 channels of a token.
static __global__ void __launch_bounds__(256) ssd_add_kernel(bf16* dq, bf16* dk, SsdWork work, ScanShape s) {
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, rows = s.B * s.T;
    int64_t row = i / (SSD_K / 8), column = i % (SSD_K / 8) * 8;
    if (row >= rows) return;
    float sums[2][8] = {};
    auto add = [&](float(&sum)[8], const float* part) {
        const Pack4 x = load16_once(part), y = load16_once(part + 4);
        for (int c = 0; c < 8; c++) sum[c] += c < 4 ? x[c] : y[c - 4];
    };
    for (int group = 0; group < work.groups; group++) {
        int64_t at = (group * rows + row) * SSD_K + column;
        add(sums[0], work.dq + at);
        add(sums[1], work.dk + at);
    }
    for (int c = 0; c < 16; c++) sums[c / 8][c % 8] *= s.scale;
    store16(dq + row * s.key_row + column, pack8(sums[0]));
    store16(dk + row * s.key_row + column, pack8(sums[1]));
}

// dlog_decay. Thread blocks as in ssd_cum_kernel; a warp has a head.
static __global__ void __launch_bounds__(SSD_THREADS)
    ssd_gate_kernel(float* dlog_decay, SsdWork work, ScanShape s) {
    constexpr int OF_WARP = SSD_HEADS / SSD_WARPS;
    __shared__ float tile[SSD_HEADS][SSD_CHUNK + 1];
    int first = (int)blockIdx.y * SSD_HEADS, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int b = (int)blockIdx.x / work.chunks, chunk = (int)blockIdx.x % work.chunks;
    float dots[OF_WARP];
    Pack4 rows[OF_WARP], columns[OF_WARP], later[OF_WARP];
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) { // all loads in flight; past the last head those of the last
        int h = min(first + i * SSD_WARPS + warp, s.NH - 1);
        int64_t at = ((int64_t)b * s.NH + h) * work.chunks + chunk, token = at * SSD_CHUNK + lane * 4;
        dots[i] = lane < SSD_DOTS ? work.dots[at * SSD_DOTS + lane] : 0;
        rows[i] = load16(work.g_rows + token);
        columns[i] = load16(work.g_columns + token);
        later[i] = load16(work.later + token);
    }
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        float own[4], before[4], own_sum = 0, before_sum = 0; // own: from the token on; before: before it
        for (int t = 0; t < 4; t++) own[3 - t] = own_sum += rows[i][3 - t] - columns[i][3 - t];
        for (int t = 0; t < 4; t++) before[t] = before_sum, before_sum += later[i][t];
        float lanes_before = warp_sum_before(before_sum), of_chunk = warp_sum(dots[i]);
        float lanes_after = warp_sum(own_sum) - own_sum - warp_sum_before(own_sum);
        for (int t = 0; t < 4; t++)
            tile[i * SSD_WARPS + warp][lane * 4 + t] =
                s.scale * (own[t] + lanes_after + before[t] + lanes_before + of_chunk);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < SSD_HEADS * SSD_CHUNK; i += SSD_THREADS) {
        int h = i % SSD_HEADS;
        int64_t t = (int64_t)chunk * SSD_CHUNK + i / SSD_HEADS;
        if (first + h < s.NH && t < s.T)
            dlog_decay[(b * s.T + t) * s.NH + first + h] = tile[h][i / SSD_HEADS];
    }
}

// F: SsdDq or SsdDkv
template <class F>
static inline SsdBackwardTensors ssd_backward_tensors(const SsdWork* work, const ScanBackward* g,
                                                      const Scan* a, const ScanShape* s) {
    int of_rows = 16, of_columns = SSD_CHUNK; // rows of a box
    int queries = F::ROWS_ARE_QUERIES ? of_rows : of_columns,
        keys = F::ROWS_ARE_QUERIES ? of_columns : of_rows;
    return {.q = ssd_keys(a->q, s, queries),
            .k = ssd_keys(a->k, s, keys),
            .v = ssd_values(a->v, s, s->value_row, keys),
            .dout = ssd_values(g->dout, s, s->NH * SSD_V, queries),
            .state = ssd_stored(F::ROWS_ARE_QUERIES ? work->states : work->dstates, work, s),
            .before = ssd_stored(work->states, work, s)};
}

static inline void ssd_dq(const SsdWork* work, const ScanBackward* g, const Scan* a, const ScanShape* s,
                          cudaStream_t stream) {
    int64_t grid = s->B * work->chunks * work->groups;
    SsdBackwardTensors t = ssd_backward_tensors<SsdDq<2>>(work, g, a, s);
    if (scan_is_large())
        scan_launch<SsdDq<2>>(ssd_dq_kernel<2>, grid, stream, g->dq, t, *work, *s);
    else
        scan_launch<SsdDq<1>>(ssd_dq_kernel<1>, grid, stream, g->dq, t, *work, *s);
}

static inline void ssd_dkv(const SsdWork* work, const ScanBackward* g, const Scan* a, const ScanShape* s,
                           cudaStream_t stream) {
    int64_t grid = s->B * work->chunks * work->groups;
    SsdBackwardTensors t = ssd_backward_tensors<SsdDkv<2>>(work, g, a, s);
    if (scan_is_large())
        scan_launch<SsdDkv<2>>(ssd_dkv_kernel<2>, grid, stream, g->dk, g->dv, t, *work, *s);
    else
        scan_launch<SsdDkv<1>>(ssd_dkv_kernel<1>, grid, stream, g->dk, g->dv, t, *work, *s);
}

static inline void ssd_sums(const SsdWork* work, const ScanBackward* g, const ScanShape* s,
                            cudaStream_t stream) {
    int64_t packs = s->B * s->T * (SSD_K / 8);
    if (work->groups > 1)
        CUDA_LAUNCH(ssd_add_kernel, (unsigned)ceil_div<int64_t>(packs, 256), 256, stream, g->dq, g->dk, *work,
                    *s);
    CUDA_LAUNCH(ssd_gate_kernel, ssd_head_grid(work, s), SSD_THREADS, stream, g->dlog_decay, *work, *s);
}

// Writes the gradients in g. dv is without skip_t do_t, which the caller adds: where skip is large, the sum
// rounded to bf16 would lose the part through the states, of which gradients of step sizes are made. a->state
// is NULL. a->saved is that of ssd_forward over the same inputs, unless g->recomputes.
static inline void ssd_backward(const ScanBackward* g, const Scan* a, const ScanShape* s,
                                cudaStream_t stream) {
    Range range("scan", RANGE_BACKWARD, stream);
    ssd_check(a, s);
    assert(!a->state);
    ScanMemory memory = scan_memory(a);
    SsdWork work = ssd_work(&memory, s, true);
    if (g->recomputes) ssd_cum(&work, a, s, stream);
    ssd_states(&work, a, g->dout, scan_chains(g->recomputes), s, stream);
    ssd_dq(&work, g, a, s, stream);
    ssd_dkv(&work, g, a, s, stream);
    ssd_sums(&work, g, s, stream);
}
