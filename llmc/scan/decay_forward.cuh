/*
Outputs of the recurrence with one decay a head, from the states that decay_states.cuh stored:

    o_i = scale (e^(b_i) S0^T q_i + sum over j <= i of the chunk of (q_i k_j) e^(b_i - b_j) v_j)

A thread block has one chunk of 128 tokens and walks over heads: Q K^T, which they share, is computed once and
stays in registers, in fp32. A warp has 16 tokens.
*/
#pragma once

#include "decay_states.cuh"

// The chunk and the heads of a thread block, and the 16 tokens of a warp
struct DecayBlock {
    int64_t b;
    int chunk, group, h, heads_end, first,
        strip; // first: the chunk's first token; strip: the warp's tokens / 16
    __device__ DecayBlock(const DecayScratch& scratch, const ScanShape& s) {
        int i = (int)blockIdx.x / scratch.groups, warp = (int)threadIdx.x / 32;
        group = (int)blockIdx.x % scratch.groups;
        b = i / scratch.chunks, chunk = i % scratch.chunks, first = chunk * DECAY_CHUNK;
        h = group * scratch.group_heads, heads_end = min(h + scratch.group_heads, s.NH);
        strip = warp;
    }
    __device__ int row() const { return strip * 16 + (int)threadIdx.x % 32 / 4; } // the lane's first row
    // The chunk of head i in buffers of `size` elements for each
    __device__ int64_t at(const DecayScratch& scratch, const ScanShape& s, int i, int size) const {
        return ((b * s.NH + i) * scratch.chunks + chunk) * size;
    }
};

// Decay factors e^(b_i - b_j) of a strip's pairs. Rows are tokens i and columns j <= i, or TRANSPOSED rows j
// and columns i >= j. Off the diagonal a factor is a row's times a column's, both at most 1: relative to the
// token before the strip, TRANSPOSED the strip's last.
template <bool TRANSPOSED> struct DecayFactors {
    const float* cum;
    int strip;
    float row_cum[2], border, row[2];
    __device__ DecayFactors(const float* c, const DecayBlock& block) : cum(c), strip(block.strip) {
        border = cum[TRANSPOSED ? strip * 16 + 15 : max(strip * 16 - 1, 0)];
        for (int half = 0; half < 2; half++) {
            row_cum[half] = cum[block.row() + half * 8];
            row[half] = between(row_cum[half], border);
        }
    }
    __device__ static float between(float of_row, float of_column) {
        return exp2_approx(TRANSPOSED ? of_column - of_row : of_row - of_column);
    }
    // Those of block j of the strip: e[r] of the pair in fragment register r; 0 above the diagonal
    // (TRANSPOSED below it)
    __device__ void load(float2 (&e)[4], int j) const {
        int lane = (int)threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
            int column = r / 2 * 8 + lane % 4 * 2;
            float2 c = *(const float2*)(cum + j * 16 + column);
            if (j == strip) {
                for (int half = 0; half < 2; half++) {
                    int after = (column - half * 8 - lane / 4) * (TRANSPOSED ? -1 : 1); // the row's token
                    e[r + half].x = after > 0 ? 0 : between(row_cum[half], c.x);
                    e[r + half].y = after + (TRANSPOSED ? -1 : 1) > 0 ? 0 : between(row_cum[half], c.y);
                }
            } else {
                float2 f = make_float2(between(border, c.x), between(border, c.y));
                for (int half = 0; half < 2; half++)
                    e[r + half] = make_float2(row[half] * f.x, row[half] * f.y);
            }
        }
    }
};

struct DecayOutput {
    static constexpr int THREADS = 256, STAGES = 3;
    struct Stage {
        bf16 v[DECAY_CHUNK * DECAY_V], state[DECAY_STATE];
    };
    struct Shared {
        bf16 q[DECAY_CHUNK * DECAY_K];
        Stage stage[STAGES]; // k is in the last one before the first head
        bf16 out[THREADS / 32][16 * DECAY_V];
        float cum[STAGES][DECAY_CHUNK];
    };
    static_assert(sizeof(Stage) >= DECAY_CHUNK * DECAY_K * sizeof(bf16), "k fits");
};

static __global__ void __launch_bounds__(DecayOutput::THREADS, 1)
    decay_output_kernel(bf16* o, const __grid_constant__ Scan a, const __grid_constant__ DecayScratch scratch,
                        const __grid_constant__ ScanShape s) {
    typedef DecayOutput F;
    extern __shared__ __align__(1024) char shared_bytes[];
    F::Shared& shared = *(F::Shared*)shared_bytes;
    DecayBlock block(scratch, s);
    int tid = (int)threadIdx.x, T = (int)s.T, left = T - block.first - block.strip * 16;
    bf16* k = (bf16*)&shared.stage[F::STAGES - 1];
    int64_t keys = block.b * T * s.key_row;
    auto copy = [&](int h) {
        if (h < block.heads_end) {
            int i = (h - block.h) % F::STAGES;
            const bf16* v = a.v + block.b * T * s.value_row + h * DECAY_V;
            sm80_copy_tile<DECAY_V, DECAY_CHUNK, F::THREADS>(shared.stage[i].v, v, block.first, T,
                                                             s.value_row);
            sm80_copy_tile<DECAY_V, DECAY_K, F::THREADS>(
                shared.stage[i].state, scratch.states + block.at(scratch, s, h, DECAY_STATE), 0, DECAY_K,
                DECAY_V);
            if (tid < DECAY_CHUNK / 4)
                cp_async16(smem_address(shared.cum[i] + tid * 4),
                           scratch.cum + block.at(scratch, s, h, DECAY_CHUNK) + tid * 4, true);
        }
        cp_async_commit_group();
    };
    copy_panels<DECAY_CHUNK, F::THREADS>(shared.q, a.q + keys, block.first, T, s.key_row);
    copy_panels<DECAY_CHUNK, F::THREADS>(k, a.k + keys, block.first, T, s.key_row);
    cp_async_commit_group();
    for (int i = 0; i < F::STAGES - 1; i++) copy(block.h + i);
    wait_panels<F::STAGES - 1>();
    __syncthreads();
    float qk[1][16][4];
    Panels<DECAY_CHUNK, false> tile_q(shared.q, block.strip * 16);
    panels_matmul<DECAY_K, false>(qk, tile_q, Panels<DECAY_CHUNK, false>(k));

    for (int h = block.h; h < block.heads_end; h++) {
        int i = (h - block.h) % F::STAGES;
        wait_panels<F::STAGES - 2>();
        __syncthreads();
        DecayFactors<false> factors(shared.cum[i], block);
        float acc[1][8][4];
        panels_matmul<DECAY_K, false>(acc, tile_q, Panels<DECAY_K, true>(shared.stage[i].state),
                                      [&] { copy(h + F::STAGES - 1); });
        float decay[2] = {exp2_approx(factors.row_cum[0]), exp2_approx(factors.row_cum[1])};
#pragma unroll
        for (int e = 0; e < 32; e++) acc[0][e / 4][e % 4] *= decay[e % 4 / 2];
#pragma unroll
        for (int part = 0; part < 8; part += 4) { // 64 tokens j
            if (part > block.strip) continue;
            uint32_t p[4][4] = {};
#pragma unroll
            for (int j = part; j < part + 4; j++) {
                if (j > block.strip) continue;
                float2 e[4];
                factors.load(e, j);
                for (int r = 0; r < 4; r++) {
                    const float* x = &qk[0][2 * j + r / 2][r % 2 * 2];
                    p[j - part][r] = pack_bf16x2(x[0] * e[r].x, x[1] * e[r].y);
                }
            }
            panels_matmul(acc, p, Panels<DECAY_CHUNK, true>(shared.stage[i].v), part * 16);
        }
        bf16* to = o + ((block.b * T + block.first + block.strip * 16) * s.NH + h) * DECAY_V;
        sm80_store<DECAY_V>(to, (int64_t)s.NH * DECAY_V, left, shared.out[tid / 32], acc,
                            [&](int, int) { return s.scale; });
    }
}

static inline void decay_output(bf16* o, const DecayScratch* scratch, const Scan* a, const ScanShape* s,
                                cudaStream_t stream) {
    scan_launch<DecayOutput>(decay_output_kernel, s->B * scratch->chunks * scratch->groups, stream, o, *a,
                             *scratch, *s);
}

static inline void decay_forward(bf16* o, const Scan* a, const ScanShape* s, cudaStream_t stream) {
    ScanArena arena = {(char*)a->scratch, 0};
    DecayScratch scratch = decay_scratch(&arena, s, false);
    decay_cum(&scratch, a, s, stream);
    decay_states(&scratch, a, NULL, s, stream);
    decay_output(o, &scratch, a, s, stream);
}
