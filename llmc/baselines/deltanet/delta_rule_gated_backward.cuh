/*
Gradients of the delta rule with decays, from S0, V', dS1 and dV' of each chunk (delta_rule_states.cuh), in
the terms of delta_rule_backward.cuh. With g the sums of the chunk's log decays, and D_ij = e^(g_i - g_j):

    dP = lower(dO V'^T) * D       dA = -strict_lower(X V'^T) * D       E = diag(beta) (dA K - diag(e^g) X S0^T)
    dQ = scale (diag(e^g) dO S0^T + dP K)
    dV = scale diag(beta) X,      dbeta as without decays
    dK = scale (E + (diag(beta) dA)^T K + dP^T Q + Z),   Z = diag(e^(g_C - g)) V' dS1^T

Factors of queries and keys are decays too: dg_i = q_i.dQ_i + 2 k_i.E_i - k_i.dK_i, and C's also has the sum
of all k_j.Z_j and <e^(g_C) S0, dS1>. A log decay's gradient is the sum of dg over its document's tokens of
the chunk from its own on; that of a document's first token is 0. Pairs of tokens, which cancel in these sums,
are the same bf16 numbers in a row and in a column.

A thread block has a tile of 64 tokens of one head, each of its four warps 16 of them. It goes through the
slices of values three times: for dP and dQ; backward for X, dA and dV; for Z. The slice that is in shared
memory stays there, and <S0, dS1> of the first slice takes S0 from there. Shared memory that the third time
leaves free has its odd slices, so that their copies are in flight beside the MMAs of the even ones.
*/
#pragma once

#include "delta_rule_forward.cuh"

struct DeltaGatedBackward {
    static constexpr int THREADS = DeltaBlock::THREADS;
    struct Shared {
        bf16 k[DELTA_ROWS]; // then dK
        union {
            struct {
                bf16 q[DELTA_ROWS];
                bf16 gradients[DELTA_ROWS]; // dO, then dV'^T; also dQ and dV of each warp
            };
            bf16 odd_states_t[DELTA_STATE]; // dS1^T of odd slices, S0^T of even ones but 0
        };
        bf16 states_t[DELTA_STATE]; // S0^T, then dS1^T of even slices, S0^T of odd ones
        bf16 values_t[DELTA_ROWS];
        union {
            struct {
                bf16 inverse_da[DELTA_CHUNK * DELTA_CHUNK]; // T, then diag(beta) dA
                bf16 dp[DELTA_CHUNK * DELTA_CHUNK];
            };
            bf16 odd_values_t[DELTA_ROWS]; // V'^T of odd slices
        };
        float beta[DELTA_CHUNK], cum[DELTA_CHUNK]; // then sums of the warps, and dg
    };
    static_assert(2 * (sizeof(Shared) + 1024) <= 227 << 10, "two thread blocks fit on an SM");
    __device__ static Shared& shared() {
        extern __shared__ __align__(1024) char shared_bytes[];
        return *(Shared*)shared_bytes;
    }
};

// Writes 16 rows of a [CHUNK, CHUNK] tile from fragments.
__device__ static inline void delta_rule_store_strip(bf16* tile, const uint32_t (&f)[4][4], int row) {
    for (int i = 0; i < 16; i++)
        *scan_pair<DELTA_CHUNK>(tile, row + (int)threadIdx.x % 32 / 4 + i % 2 * 8, i / 4 * 2 + i / 2 % 2) =
            f[i / 4][i % 4];
}

// Stores a warp's 16 rows of 128 columns, A fragments, of which `rows` exist, through `tile`, as sm80_store.
__device__ static inline void delta_rule_store_rows(bf16* to, int64_t row_stride, int rows, bf16* tile,
                                                    const uint32_t (&f)[8][4]) {
    const int lane = (int)threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 32; i++)
        *scan_pair<DELTA_D>(tile, i % 2 * 8 + lane / 4, i / 4 * 2 + i / 2 % 2) = f[i / 4][i % 4];
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * DELTA_D / 8; i += 32) {
        const int row = i / (DELTA_D / 8), chunk = i % (DELTA_D / 8);
        if (row < rows)
            store16(to + row * row_stride + chunk * 8,
                    *(Raw8*)((char*)tile + sm80_chunk_offset<DELTA_D>(row, chunk)));
    }
}

// acc += a strip of dP or dA, times K; the strip is also stored as rows of `tile`.
__device__ static inline void delta_rule_times_keys(float (&acc)[1][16][4], const float (&strip)[1][8][4],
                                                    bf16* keys, bf16* tile, int row) {
    uint32_t f[4][4];
    TileB<DELTA_D, true> tile_k(keys);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        scan_pack(f[j], strip, 2 * j);
        scan_mma(acc, f[j], tile_k, j * 16);
    }
    delta_rule_store_strip(tile, f, row);
}

// A thread's elements of a state in blocks: those that it copies itself, so that it needs no barrier to read
// them.
struct DeltaStatePart {
    static constexpr int STEP = DeltaBlock::THREADS * 8, N = DELTA_STATE / STEP;
    Raw8 raw[N];
    __device__ void load(const bf16* state) {
#pragma unroll
        for (int i = 0; i < N; i++) raw[i] = load_raw8(state + i * STEP + (int)threadIdx.x * 8);
    }
    // The thread's part of the inner product with another state
    __device__ float inner_product(const bf16* state) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float x[8], y[8];
            unpack8(x, load_raw8(state + i * STEP + (int)threadIdx.x * 8));
            unpack8(y, raw[i]);
            for (int c = 0; c < 8; c++) sum += x[c] * y[c];
        }
        return sum;
    }
};

// The thread block's tile, in the three parts of the kernel
template <bool DOCS> struct DeltaGatedTile {
    const ScanBackward& g;
    const DeltaWork& work;
    const ScanShape& s;
    DeltaGatedBackward::Shared& shared;
    const DeltaBlock& block;
    const DeltaWalls& walls;
    const int lane, row, left; // row: the warp's first one, of which `left` exist
    const int value_tile;      // of slice 0
    const int64_t t;
    bf16* const own_rows;

    // Offset in beta and log_decay, by divisions of 32 bits
    __device__ int64_t gate(int64_t token) const {
        const int head = (int)blockIdx.x / work.chunks;
        return (head / s.NH * s.T + token) * s.NH + head % s.NH;
    }
    // A tile of values or states, whose address the compiler recomputes: it would spill it.
    template <int N> __device__ const bf16* slice_of(const bf16* tiles, int slice) const {
        return tiles + (int64_t)scan_opaque(value_tile + slice) * N;
    }
    // Starts copying a tile in blocks. Unrolled, unlike DeltaBlock::copy_blocks
    template <int N> __device__ void copy_blocks(bf16* to, const bf16* tiles, int slice) const {
        const int first = scan_opaque((int)threadIdx.x) * 8;
        const uint32_t address = smem_address(to + first);
        const bf16* from = slice_of<N>(tiles, slice) + first;
#pragma unroll
        for (int i = 0; i < N; i += DeltaBlock::THREADS * 8)
            cp_async16(address + (uint32_t)i * 2, from + i, true);
    }
    __device__ void copy_values(int slice) const {
        copy_blocks<DELTA_ROWS>(shared.values_t, work.values_t, slice);
    }
    __device__ void copy_states(const bf16* states, int slice) const {
        copy_blocks<DELTA_STATE>(shared.states_t, states, slice);
    }
    // The lane's parts of the dot products of its two rows
    __device__ float2 row_dots(const float (&x)[1][16][4], bf16* tile) const {
        float parts[2] = {};
        scan_row_dot(parts, x, tile, row + lane / 4);
        return make_float2(parts[0], parts[1]);
    }
    // Through `rows`, own rows of a tile
    __device__ void store(bf16* to, const float (&x)[1][16][4], bf16* rows) const {
        const float scale = s.scale; // not read again after each store
        sm80_store<DELTA_D>(to + block.keys + t * s.key_row, s.key_row, left, rows, x,
                            [=](int, int) { return scale; });
    }

    // Starts copying dO, V' and S0 of a slice.
    __device__ void copy_for_queries(int slice) const {
        block.copy(shared.gradients, g.dout + block.out + slice * DELTA_D, s, (int64_t)s.NH * s.V);
        copy_values(slice);
        copy_states(work.states_t, slice);
    }
    // Starts reading what `queries` and `values` copy first, but for slice 0, into L2: else each of their waits
    // is one for DRAM.
    __device__ void prefetch() const {
        const int64_t token = block.first + (int)threadIdx.x / 2;
        const bf16* dout = g.dout + block.out + token * s.NH * s.V + threadIdx.x % 2 * 64; // two lines a row
        for (int i = 1; i < work.slices; i++)
            if (token < s.T) prefetch_line(dout + i * DELTA_D);
        if (threadIdx.x != 0) return;
        prefetch_slices<DELTA_ROWS>(work.values_t, 1);
        prefetch_slices<DELTA_STATE>(work.states_t, 1);
        prefetch_slices<DELTA_ROWS>(work.dvalues_t, 0);
    }
    // Slices [from, slices) of a tensor of tiles of N numbers. Called by one thread.
    template <int N> __device__ void prefetch_slices(const bf16* tiles, int from) const {
#if SM90_CODE
        const int slices = work.slices - from;
        if (slices > 0) sm90_prefetch(slice_of<N>(tiles, from), (uint32_t)(slices * N) * sizeof(bf16));
#endif
    }
    // dP and dQ; dg = q.dQ. Not inlined: else the kernel spills 92 bytes on sm_90a, 264 on sm_80.
    __device__ __noinline__ void queries(float (&dg)[2], const float (&since)[2]) const {
        // not the member, a pointer whose address space is not known here
        DeltaGatedBackward::Shared& shared = DeltaGatedBackward::shared();
        float dp[1][8][4], dq[1][16][4];
        scan_clear(dp);
        scan_clear(dq);
        for (int i = 0; i < work.slices; i++) {
            if (i > 0) {
                __syncthreads(); // the slice before has been read
                copy_for_queries(i);
            }
            if (i > 0 || work.slices == 1)
                cp_async_wait_all();
            else
                cp_async_wait_group<1>(); // q, k and T are needed after the slices
            __syncthreads();
            TileA<DELTA_D, false> tile_dout(shared.gradients, row);
            scan_matmul<DELTA_D>(dp, tile_dout, BlockB<DELTA_CHUNK, true>(shared.values_t));
            scan_matmul<DELTA_D>(dq, tile_dout, BlockB<DELTA_D, true>(shared.states_t));
        }
        delta_rule_scale_rows(dq, since);
        delta_rule_mask<false, false, DOCS>(dp, row, walls);
        delta_rule_decay<false>(dp, row, shared.cum);
        delta_rule_times_keys(dq, dp, shared.k, shared.dp, row);
        const float2 x = row_dots(dq, shared.q);
        dg[0] = x.x, dg[1] = x.y;
        store(g.dq, dq, shared.gradients + row * DELTA_D);
    }

    // X of a slice, which is stored as dV, and its part of X V'^T and X S0^T, both negative. Then starts copying
    // V' and S0 of the slice before.
    __device__ void slice_values(float (&da)[1][8][4], float (&e)[1][16][4], int slice,
                                 const float (&beta)[2]) const {
        uint32_t dv[8][4];
#pragma unroll
        for (int half = 0; half < 2; half++) { // of the columns: fewer registers
            float x[1][8][4];
            uint32_t minus_x[4][4];
            scan_clear(x);
            scan_matmul<DELTA_CHUNK>(
                x, TileA<DELTA_CHUNK, true>(shared.inverse_da, row),
                BlockB<DELTA_CHUNK, false>(shared.gradients + block_offset(DELTA_CHUNK, half * 64, 0)));
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const int r = n % 4;
                const float *two = &x[0][n / 4 * 2 + r / 2][r % 2 * 2], scaled = beta[r % 2] * s.scale;
                minus_x[n / 4][r] = pack_bf16x2(-two[0], -two[1]);
                dv[half * 4 + n / 4][r] = pack_bf16x2(two[0] * scaled, two[1] * scaled);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                scan_mma(da, minus_x[k], BlockB<DELTA_CHUNK, true>(shared.values_t), (half * 4 + k) * 16);
                scan_mma(e, minus_x[k], BlockB<DELTA_D, true>(shared.states_t), (half * 4 + k) * 16);
            }
        }
        __syncthreads(); // dV', V' and S0 have been read
        if (slice > 0) copy_values(slice - 1);
        if (slice > 0) copy_states(work.states_t, slice - 1);
        delta_rule_store_rows(g.dv + block.values + slice * DELTA_D + t * s.value_row, s.value_row, left,
                              own_rows, dv);
    }
    // From the diagonal of -X V'^T
    __device__ void store_dbeta(float (&minus_xv)[1][8][4], const float (&beta)[2]) const {
        float x_values[2] = {}; // X_i V'_i, in one lane of the row's four
        sm80_for_each(minus_xv, [&](float& y, int, int half, int i, int column) {
            if (row + i == column) x_values[half] = -y;
        });
        for (int half = 0; half < 2; half++) {
            const float of_row = quad_sum(x_values[half]);
            const int64_t i = t + half * 8 + lane / 4;
            if (i < s.T && lane % 4 == 0)
                g.dbeta[gate(i)] = beta[half] > 0 ? of_row * s.scale / beta[half] : 0;
        }
    }
    // dV, dbeta, diag(beta) dA in shared memory, and E; dg += 2 k.E
    __device__ void values(float (&e)[1][16][4], float (&dg)[2], const float (&since)[2]) const {
        const float beta[2] = {shared.beta[row + lane / 4], shared.beta[row + lane / 4 + 8]};
        float da[1][8][4];
        scan_clear(da);
        scan_clear(e);
        for (int i = work.slices - 1; i >= 0; i--) {
            __syncthreads(); // dO, or the slice before, has been read
            copy_blocks<DELTA_ROWS>(shared.gradients, work.dvalues_t, i);
            if (i == work.slices - 1 && threadIdx.x == 0) prefetch_slices<DELTA_STATE>(work.dstates_t, 0);
            cp_async_wait_all();
            __syncthreads();
            slice_values(da, e, i, beta);
        }
        store_dbeta(da, beta);
        delta_rule_mask<false, true, DOCS>(da, row, walls);
        delta_rule_decay<false>(da, row, shared.cum);
        delta_rule_scale_rows(da, beta);
        delta_rule_scale_rows(e, beta);
        delta_rule_scale_rows(e, since);
        delta_rule_times_keys(e, da, shared.k, shared.inverse_da, row); // all warps have read T
        const float2 x = row_dots(e, shared.k);
        dg[0] += 2 * x.x, dg[1] += 2 * x.y;
    }

    // Starts copying V' and dS1 of a slice.
    __device__ void copy_for_keys(int slice) const {
        copy_blocks<DELTA_ROWS>(values_of(slice), work.values_t, slice);
        copy_blocks<DELTA_STATE>(states_of(slice), work.dstates_t, slice);
    }
    __device__ bf16* values_of(int slice) const { return slice % 2 ? shared.odd_values_t : shared.values_t; }
    __device__ bf16* states_of(int slice) const { return slice % 2 ? shared.odd_states_t : shared.states_t; }

    // dK from E; dg -= k.dK. Returns the lane's part of what is C's alone.
    __device__ float keys(float (&e)[1][16][4], float (&dg)[2]) const {
        DeltaStatePart state;
        state.load(shared.states_t); // S0 of slice 0
        __syncthreads();             // dP and diag(beta) dA are complete, S0 has been read
        copy_states(work.dstates_t, 0);
        scan_matmul<DELTA_CHUNK>(e, TileA<DELTA_CHUNK, true>(shared.inverse_da, row),
                                 TileB<DELTA_D, true>(shared.k));
        scan_matmul<DELTA_CHUNK>(e, TileA<DELTA_CHUNK, true>(shared.dp, row), TileB<DELTA_D, true>(shared.q));
        float until[2];
        delta_rule_row_factors(until, DELTA_UNTIL, row, block, work);
        const float* factors = work.factors + block.tile * DELTA_FACTORS;
        const float kept = factors[DELTA_UNTIL - 1]; // e^(g_C), 0 behind a wall
        float2 x = row_dots(e, shared.k);
        dg[0] -= x.x, dg[1] -= x.y;
        cp_async_wait_all();
        __syncthreads(); // dS1 is there; Q, dP and diag(beta) dA have been read, and K but for own rows
        if (work.slices > 1) copy_for_keys(1);
        float z[1][16][4], total = state.inner_product(shared.states_t);
        scan_clear(z);
        for (int i = 0; i < work.slices; i++) {
            if (i > 0) {
                cp_async_wait_all();
                __syncthreads(); // the slice is there, the one before has been read
                copy_blocks<DELTA_STATE>(states_of(i + 1), work.states_t, i);
            }
            scan_matmul<DELTA_D>(z, BlockA<DELTA_CHUNK>(values_of(i), row),
                                 BlockB<DELTA_D, true>(states_of(i)));
            if (i > 0) {
                cp_async_wait_all();
                state.load(states_of(i + 1));
                total += state.inner_product(states_of(i));
                if (i + 1 < work.slices) copy_for_keys(i + 1);
            }
        }
        total *= kept;
        delta_rule_scale_rows(z, until);
        x = row_dots(z, shared.k);
        dg[0] -= x.x, dg[1] -= x.y;
#pragma unroll
        for (int i = 0; i < 64; i++) e[0][i / 4][i % 4] += z[0][i / 4][i % 4];
        store(g.dk, e, shared.k + row * DELTA_D);
        return total + x.x + x.y;
    }

    // Writes the gradients of the chunk's log decays from dg in shared memory, of which `total` belongs to
    // token C.
    __device__ void store_dlog_decay(const float* dg, float total) const {
        const int i = (int)threadIdx.x, token = block.first + i;
        if (i >= DELTA_CHUNK || token >= s.T) return;
        const int end = DOCS ? walls.end(i) : DELTA_CHUNK;
        const bool begins = token == 0 || (DOCS && (walls.mask >> i & 1));
        float sum = end == DELTA_CHUNK ? total : 0;
#pragma unroll
        for (int j = DELTA_CHUNK - 1; j >= 0; j--)
            if (j >= i && j < end) sum += dg[j];
        g.dlog_decay[gate(token)] = begins ? 0 : s.scale * sum;
    }
};

template <bool DOCS>
static __global__ void __launch_bounds__(DeltaGatedBackward::THREADS, 2)
    delta_rule_gated_backward_kernel(const __grid_constant__ ScanBackward g, const __grid_constant__ Scan a,
                                     const __grid_constant__ DeltaWork work,
                                     const __grid_constant__ ScanShape s) {
    DeltaGatedBackward::Shared& shared = DeltaGatedBackward::shared();
    DeltaBlock block(work, s);
    DeltaWalls walls = {};
    if (DOCS) walls = DeltaWalls::of(block, work, s);
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16;
    const DeltaGatedTile<DOCS> tile = {.g = g,
                                       .work = work,
                                       .s = s,
                                       .shared = shared,
                                       .block = block,
                                       .walls = walls,
                                       .lane = lane,
                                       .row = row,
                                       .left = (int)s.T - block.first - row,
                                       .value_tile = (int)block.tile * work.slices,
                                       .t = block.first + row,
                                       .own_rows = shared.gradients + row * DELTA_D};
    tile.copy_for_queries(0);
    cp_async_commit_group();
    block.copy(shared.k, a.k + block.keys, s, s.key_row);
    block.copy(shared.q, a.q + block.keys, s, s.key_row);
    block.copy_tile<DELTA_CHUNK, DELTA_CHUNK>(shared.inverse_da, work.inverse);
    cp_async_commit_group();
    delta_rule_load_beta(shared.beta, a.beta, block, work, s);
    delta_rule_load_cum(shared.cum, block, work);
    float since[2], dg[2], e[1][16][4];
    delta_rule_row_factors(since, DELTA_SINCE, row, block, work);
    tile.prefetch();
    tile.queries(dg, since);
    tile.values(e, dg, since);
    float total = tile.keys(e, dg);
    for (int half = 0; half < 2; half++) {
        float sum = quad_sum(dg[half]);
        if (lane % 4 == 0) shared.cum[row + lane / 4 + half * 8] = sum;
    }
    total = block_sum_all(total, *(float(*)[32])shared.beta);
    tile.store_dlog_decay(shared.cum, total);
}

static inline void delta_rule_gated_gradients(const DeltaWork* work, const ScanBackward* g, const Scan* a,
                                              const ScanShape* s, cudaStream_t stream) {
    auto kernel =
        s->doc_start ? delta_rule_gated_backward_kernel<true> : delta_rule_gated_backward_kernel<false>;
    scan_launch<DeltaGatedBackward>(kernel, s->B * s->NH * work->chunks, stream, *g, *a, *work, *s);
}
