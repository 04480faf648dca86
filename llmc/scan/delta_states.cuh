/*
The chain over the chunks of the delta rule (delta_prepare.cuh), 64 tokens a step, and its backward:

    V'  = U - W S0                     S1  = S0 + K^T V'                        stores S0 and V'
    dV' = P^T dO + K dS1               dS0 = dS1 + Q^T dO - W^T dV'             stores dS1 and dV'

dS and dV' are without the factor `scale`. The steps depend on one another, so what counts is their latency. A
thread block has 16 columns of V of one head; columns do not depend on one another. All is transposed:

    S^T [16, 128]    a warp has 32 of the 128 rows of S, in fp32 accumulators
    V'^T [16, 64]    a warp computes 16 tokens of it, from all of S^T

Accumulators packed to bf16 have the layout of operand A, so the warps exchange them as such, in
shared memory, twice a step:

    S^T in shared memory  ->  V'^T = U^T - S^T W^T  ->  V'^T in shared memory  ->  S^T += V'^T K  ->  ..

Fragments of W and K are loaded before the barriers that they do not depend on, and four other warps copy the
tiles, whose instructions would be half of the chain's.
*/
#pragma once

#include "delta_prepare.cuh"

enum { DELTA_COLUMNS = 16, DELTA_SLICES = DELTA_D / DELTA_COLUMNS };

template <bool BACKWARD> struct DeltaStage {
    bf16 first[DELTA_ROWS], second[DELTA_ROWS]; // W and K, backward K and W
    bf16 vector[DELTA_CHUNK * DELTA_COLUMNS];   // U, backward P^T dO
};
template <> struct DeltaStage<true> : DeltaStage<false> {
    bf16 q[DELTA_ROWS];
    bf16 dout[DELTA_CHUNK * DELTA_COLUMNS];
};
template <bool BACKWARD> struct DeltaStates {
    static constexpr int THREADS = 2 * DeltaBlock::THREADS; // the first half copies
    static constexpr int STAGES = BACKWARD ? 2 : 3;         // so that two thread blocks fit a multiprocessor
    struct Shared {
        DeltaStage<BACKWARD> stage[STAGES];
        uint4 state[DELTA_D / 16][32], value[DELTA_CHUNK / 16][32]; // fragments of S^T and V'^T
    };
};

// Offset in bytes of a 16-byte chunk of a tile [CHUNK, COLUMNS]; without bank conflicts
__device__ static inline uint32_t delta_slice_offset(int row, int chunk) {
    return (uint32_t)(row * DELTA_COLUMNS * 2 + ((chunk ^ (row >> 2 & 1)) << 4));
}
// Starts copying such a tile.
__device__ static inline void delta_copy_slice(bf16* to, const bf16* x, int first, int rows,
                                               int64_t row_stride) {
    int row = (int)threadIdx.x / 2, chunk = (int)threadIdx.x % 2;
    bool exists = first + row < rows;
    cp_async16(smem_address(to) + delta_slice_offset(row, chunk),
               x + (exists ? first + row : 0) * row_stride + chunk * 8, exists);
}
// Tokens [t, t + 16) of such a tile, transposed: an A fragment
__device__ static inline void delta_load_slice(uint32_t (&f)[4], const bf16* tile, int t) {
    int lane = (int)threadIdx.x % 32;
    ldmatrix_trans(f,
                   smem_address(tile) + delta_slice_offset(t + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1));
}

__device__ static inline uint4 delta_vector(const uint32_t (&f)[4]) {
    return make_uint4(f[0], f[1], f[2], f[3]);
}
__device__ static inline void delta_fragment(uint32_t (&f)[4], const uint4& x) {
    f[0] = x.x, f[1] = x.y, f[2] = x.z, f[3] = x.w;
}

// The thread block's place
struct DeltaSlice {
    int64_t head, b, h;
    int column; // first of V
    __device__ DeltaSlice(const ScanShape& s, int block) {
        head = block / DELTA_SLICES, b = head / s.NH, h = head % s.NH;
        column = block % DELTA_SLICES * DELTA_COLUMNS;
    }
};

// Starts copying a step's tiles, and commits the group.
template <bool BACKWARD>
__device__ static inline void delta_copy_step(DeltaStage<BACKWARD>& stage, int chunk, const Scan& a,
                                              const bf16* dout, const DeltaSlice& slice,
                                              const DeltaScratch& scratch, const ScanShape& s) {
    constexpr int THREADS = DeltaBlock::THREADS;
    int T = (int)s.T, first = chunk * DELTA_CHUNK;
    int64_t tile = slice.head * scratch.chunks + chunk;
    int64_t keys = slice.b * T * s.key_row + slice.h * s.key_head;
    sm80_copy_tile<DELTA_D, DELTA_CHUNK, THREADS>(BACKWARD ? stage.second : stage.first,
                                                  scratch.w + tile * DELTA_ROWS, 0, DELTA_CHUNK, DELTA_D);
    sm80_copy_tile<DELTA_D, DELTA_CHUNK, THREADS>(BACKWARD ? stage.first : stage.second, a.k + keys, first, T,
                                                  s.key_row);
    delta_copy_slice(stage.vector, (BACKWARD ? scratch.y : scratch.u) + tile * DELTA_ROWS + slice.column, 0,
                     DELTA_CHUNK, DELTA_D);
    if constexpr (BACKWARD) {
        sm80_copy_tile<DELTA_D, DELTA_CHUNK, THREADS>(stage.q, a.q + keys, first, T, s.key_row);
        delta_copy_slice(stage.dout, dout + (slice.b * T * s.NH + slice.h) * DELTA_D + slice.column, first, T,
                         (int64_t)s.NH * DELTA_D);
    }
}

// Loads (STORE: stores) the warp's part of the fp32 state [K, V].
template <bool STORE>
__device__ static inline void delta_move_state(float (&acc)[1][4][4], float* state, int warp) {
    int lane = (int)threadIdx.x % 32;
    sm80_for_each(acc, [&](float& x, int, int half, int, int column) {
        float* at = state + (warp * 32 + column) * DELTA_D + half * 8 + lane / 4;
        if (STORE)
            *at = x;
        else
            x = *at;
    });
}

// Publishes the warp's part of S^T as fragments, and keeps them.
__device__ static inline void delta_publish(uint32_t (&mine)[2][4], uint4 (*state)[32],
                                            const float (&acc)[1][4][4], int warp) {
    int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < 2; i++) {
        scan_pack(mine[i], acc, 2 * i);
        state[warp * 2 + i][lane] = delta_vector(mine[i]);
    }
}

// The step's V'^T (dV'^T) of the warp's tokens in r, and in `operand` what S^T changes by, times K (W)
template <bool BACKWARD>
__device__ static inline void delta_values(uint32_t (&r)[4], uint32_t (&operand)[4], const uint4 (*state)[32],
                                           const uint32_t (&first)[8][4], const uint32_t (&vector)[4]) {
    float x[2][2][4] = {}; // two sums, for a shorter chain of mma
#pragma unroll
    for (int k = 0; k < 8; k++) {
        uint32_t f[4];
        delta_fragment(f, state[k][threadIdx.x % 32]);
        sm80_mma(x[k % 2][0], f, first[k][0], first[k][1], x[k % 2][0]);
        sm80_mma(x[k % 2][1], f, first[k][2], first[k][3], x[k % 2][1]);
    }
    for (int i = 0; i < 4; i++) {
        float2 y = unpack_bf16x2(vector[i]);
        const float *x0 = &x[0][i / 2][i % 2 * 2], *x1 = &x[1][i / 2][i % 2 * 2];
        float low = x0[0] + x1[0], high = x0[1] + x1[1];
        r[i] = BACKWARD ? pack_bf16x2(y.x + low, y.y + high) : pack_bf16x2(y.x - low, y.y - high);
        operand[i] = BACKWARD ? r[i] ^ 0x80008000u : r[i];
    }
}

// What the chain of a thread block works on
template <bool BACKWARD> struct DeltaChain {
    const Scan& a;
    const bf16* dout;
    const DeltaScratch& scratch;
    const ScanShape& s;
    typename DeltaStates<BACKWARD>::Shared& shared;
    DeltaSlice slice;
    static constexpr int STAGES = DeltaStates<BACKWARD>::STAGES;
    __device__ int chunk(int step) const { return BACKWARD ? scratch.chunks - 1 - step : step; }
    __device__ void copy(int step) const { // also commits the group
        if (step < scratch.chunks)
            delta_copy_step<BACKWARD>(shared.stage[step % STAGES], chunk(step), a, dout, slice, scratch, s);
        cp_async_commit_group();
    }
};

// The copying warps. Barriers as in delta_compute.
template <bool BACKWARD> __device__ static inline void delta_copy(const DeltaChain<BACKWARD>& c) {
    constexpr int STAGES = DeltaStates<BACKWARD>::STAGES;
    for (int i = 0; i < STAGES; i++) c.copy(i);
    cp_async_wait_group<STAGES - 1>();
    __syncthreads();
    for (int step = 0; step < c.scratch.chunks; step++) {
        __syncthreads();
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        c.copy(step + STAGES);
    }
}

// The computing warps
template <bool BACKWARD>
__device__ static inline void delta_compute(const DeltaChain<BACKWARD>& c, int warp) {
    typedef DeltaStates<BACKWARD> F;
    typename F::Shared& shared = c.shared;
    const DeltaScratch& scratch = c.scratch;
    const int lane = (int)threadIdx.x % 32, chunks = scratch.chunks;
    float acc[1][4][4];
    scan_clear(acc);
    float* state = BACKWARD || !c.a.state ? NULL : c.a.state + c.slice.head * DELTA_STATE + c.slice.column;
    if (state) delta_move_state<false>(acc, state, warp);
    uint32_t mine[2][4], first[8][4], vector[4];
    auto load_first = [&](const DeltaStage<BACKWARD>& stage) {
        TileB<DELTA_D, false> tile(stage.first, warp * 16);
#pragma unroll
        for (int k = 0; k < 8; k++) tile.load(first[k], 0, k * 16);
        delta_load_slice(vector, stage.vector, warp * 16);
    };
    delta_publish(mine, shared.state, acc, warp);
    __syncthreads();
    load_first(shared.stage[0]);
    for (int step = 0; step < chunks; step++) {
        const DeltaStage<BACKWARD>& stage = shared.stage[step % F::STAGES];
        int64_t tile = c.slice.head * chunks + c.chunk(step);
        uint32_t values[4], operand[4], second[4][2][4];
        __syncthreads(); // S^T is complete
        delta_values<BACKWARD>(values, operand, shared.state, first, vector);
        shared.value[warp][lane] = delta_vector(operand);
        TileB<DELTA_D, true> tile_second(stage.second, warp * 32);
#pragma unroll
        for (int i = 0; i < 8; i++) tile_second.load(second[i / 2][i % 2], i % 2 * 16, i / 2 * 16);
        if constexpr (BACKWARD) {
            TileB<DELTA_D, true> tile_q(stage.q, warp * 32);
#pragma unroll
            for (int k = 0; k < DELTA_CHUNK; k += 16) {
                uint32_t f[4];
                delta_load_slice(f, stage.dout, k);
                scan_mma(acc, f, tile_q, k);
            }
        }
        block_store<DELTA_CHUNK>((BACKWARD ? scratch.dvalues_t : scratch.values_t) + tile * DELTA_ROWS,
                                 values, c.slice.column, warp * 16);
        for (int i = 0; i < 2; i++)
            block_store<DELTA_D>((BACKWARD ? scratch.dstates_t : scratch.states_t) + tile * DELTA_STATE,
                                 mine[i], c.slice.column, warp * 32 + i * 16);
        __syncthreads(); // V'^T is complete, and the next step's tiles are there
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t f[4];
            delta_fragment(f, shared.value[k][lane]);
            for (int n = 0; n < 4; n++)
                sm80_mma(acc[0][n], f, second[k][n / 2][n % 2 * 2], second[k][n / 2][n % 2 * 2 + 1],
                         acc[0][n]);
        }
        delta_publish(mine, shared.state, acc, warp);
        load_first(shared.stage[(step + 1) % F::STAGES]);
    }
    if (state) delta_move_state<true>(acc, state, warp);
}

template <bool BACKWARD>
__device__ static inline void delta_chain(const Scan& a, const bf16* dout, const DeltaScratch& scratch,
                                          const ScanShape& s, char* shared, int block) {
    DeltaChain<BACKWARD> chain = {
        a, dout, scratch, s, *(typename DeltaStates<BACKWARD>::Shared*)shared, DeltaSlice(s, block)};
    if (threadIdx.x < DeltaBlock::THREADS)
        delta_copy(chain);
    else
        delta_compute(chain, ((int)threadIdx.x - DeltaBlock::THREADS) / 32);
}

template <bool BOTH> struct DeltaChains {
    static constexpr int THREADS = DeltaStates<false>::THREADS;
    union Shared {
        DeltaStates<false>::Shared forward;
        typename DeltaStates<BOTH>::Shared backward;
    };
    static_assert(2 * (sizeof(Shared) + 1024) <= 227 << 10, "two thread blocks fit a multiprocessor");
};

// Runs the chain, and with BOTH also the backward one, which does not need its states, side by side with it.
// Grid: B NH SLICES, times 2 with BOTH.
template <bool BOTH>
__global__ void __launch_bounds__(DeltaChains<BOTH>::THREADS, 2)
    delta_states_kernel(const __grid_constant__ Scan a, const bf16* dout,
                        const __grid_constant__ DeltaScratch scratch, const __grid_constant__ ScanShape s) {
    extern __shared__ __align__(1024) char shared_bytes[];
    int block = (int)blockIdx.x, backward = BOTH ? (int)gridDim.x / 2 : 0;
    if (BOTH && block < backward) // the longer chain first: one a multiprocessor, where there are enough
        delta_chain<true>(a, dout, scratch, s, shared_bytes, block);
    else
        delta_chain<false>(a, dout, scratch, s, shared_bytes, block - backward);
}

// dout: NULL in a forward pass.
static inline void delta_states(const DeltaScratch* scratch, const Scan* a, const bf16* dout,
                                const ScanShape* s, cudaStream_t stream) {
    int64_t grid = s->B * s->NH * DELTA_SLICES;
    if (dout)
        scan_launch<DeltaChains<true>>(delta_states_kernel<true>, 2 * grid, stream, *a, dout, *scratch, *s);
    else
        scan_launch<DeltaChains<false>>(delta_states_kernel<false>, grid, stream, *a, dout, *scratch, *s);
}
