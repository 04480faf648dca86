/*
Outputs of the recurrence with one decay a head, from the states that ssd_states.cuh stored:

    o_i = scale (e^(b_i) S0^T q_i + sum over j <= i of the chunk of (q_i k_j) e^(b_i - b_j) v_j) + skip_i v_i

A thread block has one chunk of 128 tokens and iterates over heads. Each of its 8 warps has 16 tokens; thread
0 starts the copies by TMA, all threads by cp.async.

    once              Q K^T, which all heads share, stays in fp32 registers
    for each head     wait for its stage  ->  acc = e^b Q S0, while the stage after next is copied
                      acc += (Q K^T * decay factors) V  ->  o = scale acc + skip v
*/
#pragma once

#include "ssd_states.cuh"

// Warp (and rows / 16 in shared tiles) of a chunk's strip of 16 tokens: the last four strips are reversed.
// Strip n has n + 1 blocks of pairs, and warps w and w + 4 share a scheduler, so each scheduler has 9 blocks.
// The map is its own inverse.
__device__ static inline int ssd_slot(int strip) { return strip < 4 ? strip : 11 - strip; }

// The chunk and the heads of a thread block, and the 16 tokens of a warp
struct SsdBlock {
    int64_t b;
    int chunk, group, h, heads_end, first; // first: the chunk's first token
    int slot, strip;                       // the warp's rows in a tile / 16, and its tokens / 16
    __device__ SsdBlock(const SsdWork& work, const ScanShape& s) {
        int i = (int)blockIdx.x / work.groups;
        group = (int)blockIdx.x % work.groups;
        b = i / work.chunks;
        chunk = i % work.chunks;
        first = chunk * SSD_CHUNK;
        h = group * work.group_heads;
        heads_end = min(h + work.group_heads, s.NH);
        slot = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); // uniform across the warp for the compiler
        strip = ssd_slot(slot);
    }
    // The lane's first row in the chunk, and in a tile
    __device__ int row() const { return strip * 16 + (int)threadIdx.x % 32 / 4; }
    __device__ int tile_row() const { return slot * 16 + (int)threadIdx.x % 32 / 4; }
    // The chunk of head i in buffers of `size` elements for each
    __device__ int64_t at(const SsdWork& work, const ScanShape& s, int i, int size) const {
        return ((b * s.NH + i) * work.chunks + chunk) * size;
    }
};

// Copies a chunk's tokens as panel_copy does, with the strips in the order of the warps (ssd_slot). Boxes
// of p have 16 rows.
template <int THREADS>
__device__ static inline void ssd_copy_strips(bf16* to, const PanelTensor& p, int64_t b, int head, int t,
                                              uint64_t* barrier) {
#if SM90_CODE
    for (int strip = 0; strip < 8; strip++)
        panel_copy<16, THREADS>(to + ssd_slot(strip) * 16 * 64, p, b, head, t + strip * 16, barrier);
#else
    constexpr int STEP = THREADS / 8;
    static_assert(STEP == 32, "two strips a step");
    int row = (int)threadIdx.x / 8, chunk = (int)threadIdx.x % 8, left = p.T - t;
    const bf16* x = p.x + (b * p.T + t) * p.row_stride + head * 64 + chunk * 8;
#pragma unroll
    for (int i = 0; i < SSD_CHUNK; i += STEP) {
        bool exists = row + i < left;
        int slot_row = ssd_slot(i / 16) * 16 + row % 16 + (i < 64 ? row / 16 * 16 : -(row / 16 * 16));
        cp_async16(smem_address(to) + (uint32_t)sm80_chunk_offset<64>(slot_row, chunk),
                   x + (exists ? row + i : 0) * p.row_stride, exists);
    }
#endif
}
// STRIPS: as ssd_copy_strips; else in order of tokens, in boxes of CHUNK rows
template <bool STRIPS, int THREADS>
__device__ static inline void ssd_copy_tile(bf16* to, const PanelTensor& p, const SsdBlock& block, int head,
                                            uint64_t* barrier) {
    if (STRIPS)
        ssd_copy_strips<THREADS>(to, p, block.b, head, block.first, barrier);
    else
        panel_copy<SSD_CHUNK, THREADS>(to, p, block.b, head, block.first, barrier);
}
// Both panels of q or k
template <bool STRIPS, int THREADS>
__device__ static inline void ssd_copy_keys(bf16* to, const PanelTensor& p, const SsdBlock& block,
                                            uint64_t* barrier) {
    for (int i = 0; i < 2; i++) ssd_copy_tile<STRIPS, THREADS>(to + i * SSD_CHUNK * 64, p, block, i, barrier);
}

// Decay factors e^(b_i - b_j) of a strip's pairs. Rows are tokens i and columns j <= i, or TRANSPOSED rows j
// and columns i >= j. Off the diagonal a factor is a row's times a column's, both at most 1: relative to the
// token before the strip, TRANSPOSED the strip's last.
template <bool TRANSPOSED> struct SsdFactors {
    const float* cum;
    int strip;
    float row_cum[2], border, row[2];
    __device__ SsdFactors(const float* c, const SsdBlock& block) : cum(c), strip(block.strip) {
        border = cum[TRANSPOSED ? strip * 16 + 15 : max(strip * 16 - 1, 0)];
        for (int half = 0; half < 2; half++) {
            row_cum[half] = cum[block.row() + half * 8];
            row[half] = between(row_cum[half], border);
        }
    }
    __device__ static float between(float of_row, float of_column) {
        return exp2_approx(TRANSPOSED ? of_column - of_row : of_row - of_column);
    }
    // Those of block j of the strip, not the one on the diagonal: e[r] of the pair in fragment register r
    __device__ void load(float2 (&e)[4], int j) const {
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
            float2 c = *(const float2*)(cum + j * 16 + r / 2 * 8 + threadIdx.x % 4 * 2);
            float2 f = make_float2(between(border, c.x), between(border, c.y));
            for (int half = 0; half < 2; half++) e[r + half] = make_float2(row[half] * f.x, row[half] * f.y);
        }
    }
    // e = decays of the block on the diagonal; 0 above the diagonal (TRANSPOSED: below it)
    __device__ void load_diagonal(float2 (&e)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float2 c = *(const float2*)(cum + strip * 16 + r / 2 * 8 + threadIdx.x % 4 * 2);
            int after = column_after_row(r) * (TRANSPOSED ? -1 : 1);
            e[r].x = after > 0 ? 0 : between(row_cum[r % 2], c.x);
            e[r].y = after + (TRANSPOSED ? -1 : 1) > 0 ? 0 : between(row_cum[r % 2], c.y);
        }
    }
    // Column of the first number in fragment register r of a 16x16 block, less its row
    __device__ static int column_after_row(int r) {
        int lane = (int)threadIdx.x % 32;
        return r / 2 * 8 + lane % 4 * 2 - r % 2 * 8 - lane / 4;
    }
};

struct SsdOutput {
    static constexpr int THREADS = 256, STAGES = 3;
    struct Stage {
        bf16 v[SSD_CHUNK * SSD_V], state[SSD_STATE];
    };
    struct Shared {
        bf16 q[SSD_CHUNK * SSD_K];
        Stage stage[STAGES]; // k is in the last one before the first head
        bf16 out[THREADS / 32][16 * SSD_V];
        float cum[STAGES][SSD_CHUNK], skip[STAGES][SSD_CHUNK];
        uint64_t full[STAGES + 1]; // mbarriers: of the stages, and of q and k
    };
    static_assert(sizeof(Stage) >= SSD_CHUNK * SSD_K * sizeof(bf16), "k fits");
};
struct SsdOutputTensors {
    PanelTensor q, k, v, states;
};

// acc += (Q K^T * decay factors) V for the strip and the 64 tokens j from block `first` on; qk: their Q K^T.
// BELOW: no block is on the diagonal.
template <bool BELOW>
__device__ static inline void ssd_output_pairs(float (&acc)[1][8][4], const float (&qk)[1][8][4],
                                               const bf16* v, const SsdFactors<false>& factors, int first,
                                               const SsdBlock& block) {
    uint32_t p[4][4] = {};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (!BELOW && first + n > block.strip) continue;
        float2 e[4];
        if (BELOW || first + n < block.strip)
            factors.load(e, first + n);
        else
            factors.load_diagonal(e);
        for (int r = 0; r < 4; r++) {
            const float* x = &qk[0][2 * n + r / 2][r % 2 * 2];
            p[n][r] = pack_bf16x2(x[0] * e[r].x, x[1] * e[r].y);
        }
    }
    panels_matmul(acc, p, Panels<SSD_CHUNK, true>(v), first * 16);
}

// acc, the strip's rows, becomes o = scale acc + skip v. skip NULL: 0
__device__ static inline void ssd_add_skip(float (&acc)[1][8][4], float scale, const float* skip,
                                           const bf16* v, const SsdBlock& block) {
    float of_row[2] = {};
    if (skip) of_row[0] = skip[block.row()], of_row[1] = skip[block.row() + 8];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4] = {};
        if (skip) Panels<SSD_CHUNK, false>(v, block.strip * 16).load_a(x, k * 16);
        for (int r = 0; r < 4; r++) {
            float* o = &acc[0][2 * k + r / 2][r % 2 * 2];
            const float2 y = unpack_bf16x2(x[r]);
            o[0] = o[0] * scale + of_row[r % 2] * y.x;
            o[1] = o[1] * scale + of_row[r % 2] * y.y;
        }
    }
}

static __global__ void __launch_bounds__(SsdOutput::THREADS, 1)
    ssd_output_kernel(bf16* o, const __grid_constant__ SsdOutputTensors tensors,
                      const __grid_constant__ SsdWork work, const __grid_constant__ ScanShape s) {
    typedef SsdOutput F;
    extern __shared__ __align__(1024) char shared_bytes[];
    F::Shared& shared = *(F::Shared*)shared_bytes;
    SsdBlock block(work, s);
    int tid = (int)threadIdx.x, T = (int)s.T, left = T - block.first - block.strip * 16;
    bf16* k = (bf16*)&shared.stage[F::STAGES - 1];
    auto copy = [&](int h) {
        int i = (h - block.h) % F::STAGES;
        F::Stage& stage = shared.stage[i];
        uint64_t* full = &shared.full[i];
        if (h < block.heads_end && panel_copier(0)) {
            panel_expect(full, sizeof stage + (work.skip ? 2 : 1) * sizeof shared.cum[i]);
            ssd_copy_tile<false, F::THREADS>(stage.v, tensors.v, block, h, full);
            panel_copy<SSD_K, F::THREADS>(stage.state, tensors.states, 0, 0, (int)block.at(work, s, h, SSD_K),
                                          full);
            int64_t numbers = block.at(work, s, h, SSD_CHUNK);
            panel_copy_numbers<SSD_CHUNK>(shared.cum[i], work.cum + numbers, full);
            if (work.skip) panel_copy_numbers<SSD_CHUNK>(shared.skip[i], work.skip + numbers, full);
        }
        panel_commit();
    };
    panel_init(shared.full);
    if (panel_copier(0)) {
        uint64_t* full = &shared.full[F::STAGES];
        panel_expect(full, 2 * sizeof shared.q);
        ssd_copy_keys<true, F::THREADS>(shared.q, tensors.q, block, full);
        ssd_copy_keys<false, F::THREADS>(k, tensors.k, block, full);
    }
    panel_commit();
    for (int i = 0; i < F::STAGES - 1; i++) copy(block.h + i);
    panel_wait<F::STAGES - 1>(&shared.full[F::STAGES], 0);
    __syncthreads();
    // Q K^T with the 64 tokens of which some are the strip's own, and with those before them, where there are
    float own[1][8][4], before[1][8][4];
    int first = block.strip / 4 * 4;
    Panels<SSD_CHUNK, false> tile_q(shared.q, block.slot * 16);
    panels_matmul<SSD_K, false>(own, tile_q, Panels<SSD_CHUNK, false>(k, first * 16));
    panels_matmul<SSD_K, false>(before, tile_q, Panels<SSD_CHUNK, false>(k));

    for (int h = block.h; h < block.heads_end; h++) {
        int i = (h - block.h) % F::STAGES;
        panel_wait<F::STAGES - 2>(&shared.full[i], (h - block.h) / F::STAGES % 2);
        __syncthreads(); // all warps have finished the previous head
        SsdFactors<false> factors(shared.cum[i], block);
        float acc[1][8][4];
        panels_matmul<SSD_K, false>(acc, tile_q, Panels<SSD_K, true>(shared.stage[i].state),
                                    [&] { copy(h + F::STAGES - 1); });
        float decay[2] = {exp2_approx(factors.row_cum[0]), exp2_approx(factors.row_cum[1])};
#pragma unroll
        for (int e = 0; e < 32; e++) acc[0][e / 4][e % 4] *= decay[e % 4 / 2];
        if (first > 0) ssd_output_pairs<true>(acc, before, shared.stage[i].v, factors, 0, block);
        ssd_output_pairs<false>(acc, own, shared.stage[i].v, factors, first, block);
        bf16* to = o + ((block.b * T + block.first + block.strip * 16) * s.NH + h) * SSD_V;
        ssd_add_skip(acc, s.scale, work.skip ? shared.skip[i] : NULL, shared.stage[i].v, block);
        sm80_store<SSD_V>(to, (int64_t)s.NH * SSD_V, left, shared.out[tid / 32], acc,
                          [](int, int) { return 1.0f; });
    }
}

static inline void ssd_output(bf16* o, const SsdWork* work, const Scan* a, const ScanShape* s,
                              cudaStream_t stream) {
    SsdOutputTensors t = {ssd_keys(a->q, s, 16), ssd_keys(a->k, s, SSD_CHUNK),
                          ssd_values(a->v, s, s->value_row, SSD_CHUNK), ssd_stored(work->states, work, s)};
    scan_launch<SsdOutput>(ssd_output_kernel, s->B * work->chunks * work->groups, stream, o, t, *work, *s);
}

// o [B,T,NH,V]; updates a->state where there is one.
static inline void ssd_forward(bf16* o, const Scan* a, const ScanShape* s, cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    ssd_check(a, s);
    ScanMemory memory = scan_memory(a);
    SsdWork work = ssd_work(&memory, s, false);
    if (!a->skip) work.skip = NULL;
    ssd_cum(&work, a, s, stream);
    ssd_states(&work, a, NULL, SCAN_FORWARD, s, stream);
    ssd_output(o, &work, a, s, stream);
}
