/*
The gradients of queries and gates of a chunk, for gla.cuh. dA_ij = dout_i v_j, P_t and R_t as in
gla_output.cuh, decay(i, j) the product of f from j + 1 to i; q has its scale:

    dq_i = P_i S dout_i + sum_{j <= i} dA_ij decay(i, j) k_j
    dk_j = R_j dS v_j   + sum_{i >= j} dA_ij decay(i, j) q_i
    dlogf_t = rowsum(S_end * dS) + sum_{s >= t} (q_s dq_s - k_s dk_s),    per channel, s within the chunk

The row sums replace the sum over all later chunks, in which q dq and k dk would cancel badly. S_end = diag(P)
S + sum_s R_s k_s v_s^T gives rowsum(S_end * dS) = P rowsum(S * dS) + sum_s k_s (R_s dS v_s): S_end is not
computed.

All warps of a thread block compute W = dA + dA^T, with dA_tt on the diagonal; after that a warp has 16
channels and shares nothing with the others. With X a level (gla_gates.cuh) and W restricted to the
level's pairs, X W [channels, tokens] is the gradient of both roles of a token: X as it comes from registers
is the A operand, and the result has the layout of the gates, whose products it is multiplied by.
*/
#pragma once

#include "gla_gates.cuh"

// 64 channels: two thread blocks a chunk and head, which both compute W. On an SM one of them copies while
// the other computes.
enum { GLA_DQ_DF_CHANNELS = 64 };

struct GlaDqDfShared {
    static constexpr int THREADS = 2 * GLA_DQ_DF_CHANNELS;
    bf16 q[GLA_CHUNK * GLA_DQ_DF_CHANNELS], f[GLA_CHUNK * GLA_DQ_DF_CHANNELS]; // their gradients at the end
    bf16 v[GLA_CHUNK * GLA_HEAD], dout[GLA_CHUNK * GLA_HEAD];
    bf16 w[GLA_CHUNK * GLA_CHUNK];
    uint4 level4[GLA_TILES][THREADS], level5[GLA_TILES][THREADS]; // X as A operands, of every thread
};

// d += a b: a 16x8, b 8x8
__device__ static inline void gla_mma_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// W, four blocks of 16 x 16 a warp. Above the diagonal a block is v dout^T.
__device__ static inline void gla_fill_w(GlaDqDfShared& shared) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, i0 = warp * GLA_TILE;
#pragma unroll
    for (int j0 = 0; j0 < GLA_CHUNK; j0 += GLA_TILE) {
        float acc[1][2][4];
        uint32_t a = sm80_lane_a<GLA_HEAD>(i0 < j0 ? shared.v : shared.dout, lane),
                 b = sm80_lane_b<GLA_HEAD>(i0 < j0 ? shared.dout : shared.v, lane), packed[2][2];
        sm80_matmul_abt<GLA_HEAD>(acc, sm80_advance<GLA_HEAD>(a, i0, 0), sm80_advance<GLA_HEAD>(b, j0, 0),
                                  [](float(&c)[4], int, int) { c[0] = c[1] = c[2] = c[3] = 0; });
        gla_pack_block(packed, acc[0]);
        if (i0 == j0) { // its own transpose above the diagonal
            uint32_t below = gla_below() | gla_diagonal();
            for (int h = 0; h < 2; h++)
                packed[h][h] = (packed[h][h] & below) | (gla_transpose(packed[h][h]) & ~below);
            packed[0][1] = gla_transpose(packed[1][0]);
        }
        gla_store_block(shared.w, packed, i0, j0);
    }
}

// W's rows of tile `from` and columns of tile `to`, as B operands
__device__ static inline void gla_load_w(uint32_t (&fb)[4], const bf16* w, int from, int to) {
    int lane = (int)threadIdx.x % 32;
    ldmatrix_trans(fb,
                   sm80_advance<GLA_CHUNK>(sm80_lane_a<GLA_CHUNK>(w, lane), from * GLA_TILE, to * GLA_TILE));
}

__device__ static inline void gla_load_level(uint32_t (&x)[4], const uint4* level) {
    uint4 packed = level[threadIdx.x];
    x[0] = packed.x;
    x[1] = packed.y;
    x[2] = packed.z;
    x[3] = packed.w;
}

// What a warp keeps of the chunk: gates, and gradients of q and k
struct GlaDqDf {
    float f[GLA_TILES][2][4], k[GLA_TILES][2][4];
    float dq[GLA_TILES][2][4], dk[GLA_TILES][2][4];
    float total[GLA_TILES][2]; // product of a tile's f
    float later[2];            // sum over the tokens after the tile in progress, in dlogf

    // dq = S dout, dk = dS v, later = rowsum(S * dS), the lane's part
    __device__ void inter(const GlaDqDfShared& shared, const GlaFragment (&fragments)[2][8], const GlaWork& w,
                          const GlaBlock& b, int channel) {
        int lane = (int)threadIdx.x % 32;
        __nv_bfloat162 decay[2][2];
        uint32_t lane_dout = sm80_lane_b<GLA_HEAD>(shared.dout, lane),
                 lane_v = sm80_lane_b<GLA_HEAD>(shared.v, lane);
        for (int i = 0; i < 2; i++) gla_state_decay(decay[i], w, w.states[i], b, channel), later[i] = 0;
        memset(dq, 0, sizeof dq), memset(dk, 0, sizeof dk);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            uint32_t fa[2][4], fb[4];
            for (int i = 0; i < 2; i++) fragments[i][c].state(fa[i], decay[i]);
            for (int r = 0; r < 4; r++) {
                later[r % 2] += __uint_as_float(fa[0][r] << 16) * __uint_as_float(fa[1][r] << 16);
                later[r % 2] +=
                    __uint_as_float(fa[0][r] & 0xffff0000u) * __uint_as_float(fa[1][r] & 0xffff0000u);
            }
#pragma unroll
            for (int t = 0; t < GLA_TILES; t++) {
                ldmatrix(fb, sm80_advance<GLA_HEAD>(lane_dout, t * 16, c * 16));
                for (int n = 0; n < 2; n++) sm80_mma(dq[t][n], fa[0], fb[2 * n], fb[2 * n + 1], dq[t][n]);
                ldmatrix(fb, sm80_advance<GLA_HEAD>(lane_v, t * 16, c * 16));
                for (int n = 0; n < 2; n++) sm80_mma(dk[t][n], fa[1], fb[2 * n], fb[2 * n + 1], dk[t][n]);
            }
        }
        later[0] = quad_sum(later[0]);
        later[1] = quad_sum(later[1]);
    }

    // Gates of all tiles, and X of levels 4 and 5. Multiplies dq by P, dk by R; later = rowsum(S_end * dS).
    template <bool DOCS>
    __device__ void prepare(GlaDqDfShared& shared, const GlaWork& w, const GlaBlock& b,
                            const float (&bound)[2]) {
        float before[2] = {1, 1}, sum[2] = {}, after[GLA_TILES][2];
        after[GLA_TILES - 1][0] = after[GLA_TILES - 1][1] = 1;
#pragma unroll
        for (int t = 0; t < GLA_TILES; t++) {
            uint32_t raw[4];
            gla_load<GLA_DQ_DF_CHANNELS>(raw, shared.f, t);
            gla_gates(f[t], k[t], raw, bound, b.count - t * GLA_TILE);
            if constexpr (DOCS) gla_close(f[t], gla_walls<DOCS>(w, b, t));
            for (int c = 0; c < 2; c++) {
                float product = f[t][0][2 * c] * f[t][0][2 * c + 1] * f[t][1][2 * c] * f[t][1][2 * c + 1];
                product *= __shfl_xor_sync(~0u, product, 1);
                total[t][c] = product * __shfl_xor_sync(~0u, product, 2);
            }
        }
#pragma unroll
        for (int t = GLA_TILES - 2; t >= 0; t--)
            for (int c = 0; c < 2; c++) after[t][c] = after[t + 1][c] * total[t + 1][c];
#pragma unroll
        for (int t = 0; t < GLA_TILES; t++) {
            float q[2][4], x[2][4];
            uint32_t raw[4], packed[4];
            GlaProducts products;
            gla_load<GLA_DQ_DF_CHANNELS>(raw, shared.q, t);
            gla_query(q, raw, w.scale);
            products.compute(f[t], [](int) {});
            gla_multiply(x, t % 2 ? q : k[t], t % 2 ? products.pre : products.suf);
            gla_pack(packed, x);
            shared.level4[t][threadIdx.x] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            gla_multiply(x, t / 2 ? q : k[t], t / 2 ? products.pre : products.suf);
            if (t == 0 || t == 3) gla_scale(x, x, total[t == 0 ? 1 : 2]);
            gla_pack(packed, x);
            shared.level5[t][threadIdx.x] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            for (int i = 0; i < 8; i++) {
                int n = i / 4, e = i % 4, c = e / 2;
                dq[t][n][e] *= products.pre[n][e] * before[c];
                dk[t][n][e] *= products.suf[n][e] * after[t][c];
                sum[c] += k[t][n][e] * dk[t][n][e];
            }
            before[0] *= total[t][0];
            before[1] *= total[t][1];
        }
        for (int c = 0; c < 2; c++) later[c] = before[c] * later[c] + quad_sum(sum[c]);
    }

    // Adds to dq and dk of tile t, and to balance = q dq - k dk, what a level's pairs give: with g = X W the
    // gradient of X, which has the tokens' decays in it. balance takes X as rounded: over all tokens of the
    // level's pairs its sum is then 0 but for rounding to fp32.
    __device__ void add(float (&balance)[2][4], const float (&decay)[2][4], const uint32_t (&x)[4],
                        const float (&g)[2][4], int bit, int t) {
        float upper_lane = gla_upper(bit, 0, 0),
              lower_lane = 1 - upper_lane; // for bits that lanes differ in
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int n = i / 4, e = i % 4;
            float to_q = g[n][e], to_k = g[n][e], rounded = gla_raw(x, n, e);
            if (bit == 1 || bit == 2) {
                to_q *= upper_lane;
                to_k *= lower_lane;
                dq[t][n][e] += decay[n][e] * to_q;
                dk[t][n][e] += decay[n][e] * to_k;
                balance[n][e] += rounded * (to_q - to_k);
            } else if (bit == 4 ? t % 2 : bit == 5 ? t / 2 : gla_upper(bit, n, e)) {
                dq[t][n][e] += decay[n][e] * to_q;
                balance[n][e] += rounded * to_q;
            } else {
                dk[t][n][e] += decay[n][e] * to_k;
                balance[n][e] -= rounded * to_k;
            }
        }
    }

    // Adds what the pairs within the chunk give to dq and dk of tile t, and to balance.
    __device__ void intra(float (&balance)[2][4], const GlaDqDfShared& shared, const float (&q)[2][4],
                          int t) {
        int lane = (int)threadIdx.x % 32;
        uint32_t near[4], fb[4];
        gla_load_w(near, shared.w, t, t);
        for (int i = 0; i < 4; i++) { // i = j
            int n = i / 2, e = i % 2, token = t * GLA_TILE + n * 8 + lane % 4 * 2 + e;
            float g = __bfloat162float(*(const bf16*)((const char*)shared.w +
                                                      sm80_chunk_offset<GLA_CHUNK>(token, token / 8) +
                                                      token % 8 * 2));
            for (int j = e; j < 4; j += 2) dq[t][n][j] += g * k[t][n][j], dk[t][n][j] += g * q[n][j];
        }
        GlaProducts products;
        float decay[2][4];
        products.compute(f[t], [&](int bit) {
            float x[2][4], g[2][4] = {};
            uint32_t fa[4], mask = gla_mask(bit);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int n = i / 4, e = i % 4;
                bool upper = gla_upper(bit, n, e);
                decay[n][e] = upper ? products.pre[n][e] : products.suf[n][e];
                x[n][e] = decay[n][e] * (upper ? q[n][e] : k[t][n][e]);
            }
            gla_pack(fa, x);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int from = bit == 3 ? 1 - n : n; // the eight tokens of the sum
                uint32_t part = near[2 * n + from];
                gla_mma_k8(g[n], fa[2 * from], fa[2 * from + 1], bit == 3 ? part : part & mask);
            }
            add(balance, decay, fa, g, bit, t);
        });
        float g[2][2][4] = {}; // of levels 4 and 5
        uint32_t x[4];
        gla_load_level(x, shared.level4[t ^ 1]);
        gla_load_w(fb, shared.w, t ^ 1, t);
        for (int n = 0; n < 2; n++) sm80_mma(g[0][n], x, fb[2 * n], fb[2 * n + 1], g[0][n]);
        for (int i = 0; i < 2; i++) {
            int from = (t / 2 * 2 ^ 2) + i;
            gla_load_level(x, shared.level5[from]);
            gla_load_w(fb, shared.w, from, t);
            for (int n = 0; n < 2; n++) sm80_mma(g[1][n], x, fb[2 * n], fb[2 * n + 1], g[1][n]);
        }
        gla_load_level(x, shared.level4[t]);
        add(balance, t % 2 ? products.pre : products.suf, x, g[0], 4, t);
        float one[2] = {1, 1};
        gla_scale(decay, t / 2 ? products.pre : products.suf, t == 0 ? total[1] : t == 3 ? total[2] : one);
        gla_load_level(x, shared.level5[t]);
        add(balance, decay, x, g[1], 5, t);
    }

    // balance of each token becomes its dlogf: the sum from the token on.
    __device__ void sum_later(float (&balance)[2][4]) {
        int lane = (int)threadIdx.x % 32;
        for (int c = 0; c < 2; c++) {
            float all[2]; // of the eight tokens
            for (int n = 0; n < 2; n++) {
                float pair = balance[n][2 * c] + balance[n][2 * c + 1], quad,
                      other = __shfl_xor_sync(~0u, pair, 1);
                float behind = lane & 1 ? 0 : other;
                quad = pair + other;
                other = __shfl_xor_sync(~0u, quad, 2);
                behind += lane & 2 ? 0 : other;
                all[n] = quad + other;
                balance[n][2 * c + 1] += behind + later[c];
                balance[n][2 * c] += balance[n][2 * c + 1];
            }
            for (int e = 2 * c; e < 2 * c + 2; e++) balance[0][e] += all[1];
            later[c] += all[0] + all[1];
        }
    }

    // At walls f becomes the gate's again, which k has come from, and nothing has come through the decay.
    __device__ void reopen(float (&dlogf)[2][4], unsigned walls, int t) {
        if (!walls) return;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (gla_is_wall(walls, i / 4, i % 4)) {
                f[t][i / 4][i % 4] = 1 - k[t][i / 4][i % 4];
                dlogf[i / 4][i % 4] = 0;
            }
    }

    // Turns dk of tile t into the gradient of f before its sigmoid; dlogf of the tile. With bounds adds to
    // dbound.
    __device__ void finish(const float (&dlogf)[2][4], const float (&bound)[2], bool bounded,
                           float (&dbound)[2], int t) {
        if (!bounded) {
            for (int i = 0; i < 8; i++) {
                int n = i / 4, e = i % 4;
                dk[t][n][e] = k[t][n][e] * (dlogf[n][e] - f[t][n][e] * dk[t][n][e]);
            }
            return;
        }
        float inverse[2];
        for (int c = 0; c < 2; c++) inverse[c] = bound[c] < 1 ? __fdividef(1, 1 - bound[c]) : 0;
        for (int i = 0; i < 8; i++) { // f = low + (1 - low) s, df = dlogf / f - dk
            int n = i / 4, e = i % 4, c = e / 2;
            float low = bound[c], gate = f[t][n][e], key = k[t][n][e], s = (gate - low) * inverse[c];
            float df = low > 0 ? __fdividef(dlogf[n][e], gate) - dk[t][n][e] : 0;
            dbound[c] += df * key * inverse[c];
            dk[t][n][e] = key * (low > 0 ? df * s : dlogf[n][e] - gate * dk[t][n][e]);
        }
    }
};

// Stores a warp's tile [16 channels, 16 tokens] to the rows of `to` [64, GLA_DQ_DF_CHANNELS].
__device__ static inline void gla_store_transposed(bf16* to, const float (&x)[2][4], int tile) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int r = 0; r < 4; r++) {
        uint32_t pair =
            gla_transpose(pack_bf16x2(x[r / 2][r % 2 * 2], x[r / 2][r % 2 * 2 + 1])); // two channels
        int row = tile * GLA_TILE + r / 2 * 8 + lane / 4, chunk = warp * 2 + r % 2;
        *(uint32_t*)((char*)to + sm80_chunk_offset<GLA_DQ_DF_CHANNELS>(row, chunk) + lane % 4 * 4) = pair;
    }
}

// Grid: 2 chunks, B NH.
template <bool DOCS>
__global__ static void __launch_bounds__(GlaDqDfShared::THREADS, 2)
    gla_dq_df_kernel(const __grid_constant__ GlaWork w) {
    extern __shared__ __align__(1024) char shared_bytes[];
    GlaDqDfShared& shared = *(GlaDqDfShared*)shared_bytes;
    GlaBlock b = GlaBlock::of(w, blockIdx.y, (int)blockIdx.x / 2);
    int first = (int)blockIdx.x % 2 * GLA_DQ_DF_CHANNELS, channel = first + (int)threadIdx.x / 32 * 16;
    int64_t d = w.NH * GLA_HEAD;
    gla_copy<GLA_HEAD, GlaDqDfShared::THREADS>(shared.v, w.v, w.row_stride, b);
    gla_copy<GLA_HEAD, GlaDqDfShared::THREADS>(shared.dout, w.dout, d, b);
    gla_copy<GLA_DQ_DF_CHANNELS>(shared.q, w.q, w.row_stride, b, first);
    gla_copy<GLA_DQ_DF_CHANNELS>(shared.f, w.f, w.row_stride, b, first);
    GlaFragment fragments[2][8]; // in flight with the tiles
    for (int i = 0; i < 16; i++) fragments[i / 8][i % 8].load(w, w.states[i / 8], b, channel / 2 + i % 8);
    float bound[2], dbound[2] = {};
    gla_bounds(bound, w, b, channel);
    cp_async_wait_all();
    __syncthreads();
    gla_fill_w(shared);
    GlaDqDf grads;
    grads.inter(shared, fragments, w, b, channel);
    grads.prepare<DOCS>(shared, w, b, bound);
    __syncthreads(); // W
#pragma unroll
    for (int t = GLA_TILES - 1; t >= 0; t--) {
        uint32_t raw[4];
        float q[2][4], slope[2][4], balance[2][4];
        gla_load<GLA_DQ_DF_CHANNELS>(raw, shared.q, t);
        gla_query(q, slope, raw, w.scale);
        for (int i = 0; i < 8; i++) {
            int n = i / 4, e = i % 4;
            balance[n][e] = q[n][e] * grads.dq[t][n][e] - grads.k[t][n][e] * grads.dk[t][n][e];
        }
        grads.intra(balance, shared, q, t);
        grads.sum_later(balance);
        if (DOCS) grads.reopen(balance, gla_walls<DOCS>(w, b, t), t);
        gla_multiply(grads.dq[t], grads.dq[t], slope);
        grads.finish(balance, bound, w.bound != NULL, dbound, t);
        __syncwarp(); // the warp's columns of the tile have been read
        gla_store_transposed(shared.q, grads.dq[t], t);
        gla_store_transposed(shared.f, grads.dk[t], t);
    }
    if (w.dbound_partial) {
        float* to = w.dbound_partial + ((int64_t)(blockIdx.y / (unsigned)w.NH) * w.chunks + b.chunk) * d +
                    b.column + channel + (int)threadIdx.x % 32 / 4;
        for (int c = 0; c < 2; c++) {
            float sum = quad_sum(dbound[c]);
            if (threadIdx.x % 4 == 0) to[8 * c] = sum;
        }
    }
    __syncthreads();
    gla_store_rows<GLA_DQ_DF_CHANNELS>(w.dq, w.row_stride, shared.q, b, first);
    gla_store_rows<GLA_DQ_DF_CHANNELS>(w.df, w.row_stride, shared.f, b, first);
}
