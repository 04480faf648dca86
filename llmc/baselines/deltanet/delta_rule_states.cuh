/*
The chain over the chunks of the delta rule (delta_rule_prepare.cuh), 64 tokens an iteration, and its
backward:

    V'  = U - W S0                     S1  = S0 + K^T V'                        stores S0 and V'
    dV' = P^T dO + K dS1               dS0 = dS1 + Q^T dO - W^T dV'             stores dS1 and dV'

With decays S0 and dS1 enter S1 and dS0 times e^(g_C); V' enters S1, and K dS1 dV', times e^(g_C - g), and dO
enters dS0 times e^g: factors of delta_rule_prepare.cuh, which are 0 where documents end the chain.

dS and dV' are without the factor `scale`. Columns of V are independent: a thread block has 16 or 32 of one
head, in blocks of 16, all transposed. Warps, numbered from the consumers on:

    warps 0 to 3    S^T [16, 128]: 32 of the 128 rows of S each, in fp32 accumulators
                    V'^T [16, 64]: 16 tokens each, computed from all of S^T
    warps 4 to 7    producers: one thread by TMA, else all threads by cp.async
    warps 6 and 7   where that is TMA, with decays and backward: dO times e^g, in place

The iterations depend on one another, so the kernel is bound by their latency. Accumulators packed to bf16
have the layout of operand A, so the warps exchange them as fragments in shared memory, twice an iteration:

    S^T in shared memory  ->  V'^T = U^T - S^T W^T  ->  V'^T in shared memory  ->  S^T += V'^T K  ->  ..

Fragments of W and K are loaded before the barriers that they do not depend on; with 32 columns a fragment
serves both blocks.
*/
#pragma once

#include "delta_rule_prepare.cuh"
#include "../shared/panels.cuh"

enum { DELTA_COLUMNS = 16 }; // of a block

template <bool BACKWARD, int WIDTH> struct DeltaStage {
    bf16 first[DELTA_ROWS], second[DELTA_ROWS];      // W and K, backward K and W
    bf16 vector[WIDTH][DELTA_CHUNK * DELTA_COLUMNS]; // U, backward P^T dO
};
template <int WIDTH> struct DeltaStage<true, WIDTH> : DeltaStage<false, WIDTH> {
    bf16 dout[WIDTH][DELTA_CHUNK * DELTA_COLUMNS];
    bf16 q[DELTA_ROWS];
};
// The same with decays: e^g and e^(g_C - g), padded so that the stages' tiles are aligned to 1024 bytes
template <bool BACKWARD, int WIDTH> struct DeltaDecayStage : DeltaStage<BACKWARD, WIDTH> {
    enum {
        FACTORS = DELTA_FACTORS - DELTA_SINCE,
        COPIED = sizeof(DeltaStage<BACKWARD, WIDTH>) + FACTORS * 4
    };
    float factors[FACTORS];
    uint64_t scaled; // mbarrier of the warps that scale dO
    char padding[1024 - FACTORS * 4 - 8];
};
// WIDTH: blocks of 16 columns
template <bool BACKWARD, int WIDTH_, int STAGES_, bool DECAY> struct DeltaStates {
    static constexpr int WIDTH = WIDTH_, STAGES = STAGES_, COPYING = 128, THREADS = COPYING + 128;
    static constexpr int SLICES = DELTA_D / DELTA_COLUMNS / WIDTH;
    typedef std::conditional_t<DECAY, DeltaDecayStage<BACKWARD, WIDTH>, DeltaStage<BACKWARD, WIDTH>> Stage;
    struct Shared {
        Stage stage[STAGES];
        uint4 state[WIDTH][DELTA_D / 16][32], value[WIDTH][DELTA_CHUNK / 16][32]; // fragments of S^T and V'^T
        uint64_t full[STAGES], empty[STAGES];                                     // mbarriers
    };
};

// Offset in bytes of a 16-byte chunk of a tile [CHUNK, COLUMNS]; without bank conflicts
__device__ static inline uint32_t delta_rule_slice_offset(int row, int chunk) {
    return (uint32_t)(row * DELTA_COLUMNS * 2 + ((chunk ^ (row >> 2 & 1)) << 4));
}
// Starts copying such a tile, as panel_copy.
__device__ static inline void delta_rule_copy_slice(bf16* to, const PanelTensor& p, int64_t b, int head,
                                                    int t, uint64_t* barrier) {
#if SM90_CODE
    sm90_load_tile<DELTA_COLUMNS, DELTA_CHUNK>(to, &p.map, head, t, (int)b, barrier);
#else
    int row = (int)threadIdx.x / 2, chunk = (int)threadIdx.x % 2;
    bool exists = t + row < p.T;
    cp_async16(smem_address(to) + delta_rule_slice_offset(row, chunk),
               p.x + (b * p.T + (exists ? t + row : 0)) * p.row_stride + head * DELTA_COLUMNS + chunk * 8,
               exists);
#endif
}
// Tokens [t, t + 16) of such a tile, transposed: an A fragment
__device__ static inline void delta_rule_load_slice(uint32_t (&f)[4], const bf16* tile, int t) {
    int lane = (int)threadIdx.x % 32;
    ldmatrix_trans(f, smem_address(tile) +
                          delta_rule_slice_offset(t + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1));
}

__device__ static inline uint4 delta_rule_vector(const uint32_t (&f)[4]) {
    return make_uint4(f[0], f[1], f[2], f[3]);
}
__device__ static inline void delta_rule_fragment(uint32_t (&f)[4], const uint4& x) {
    f[0] = x.x;
    f[1] = x.y;
    f[2] = x.z;
    f[3] = x.w;
}

// Inputs and outputs of a chain. W, U, P^T dO and the outputs are one tile after another.
struct DeltaChainTensors {
    PanelTensor first, second, vector, q, dout; // q and dout: backward
    bf16 *states, *values;
    float* state; // as in Scan
    int key_head; // in panels
    const float* factors;
};

// Loads (STORE: stores) the warp's part of the fp32 state [K, V], from its block's first column on.
template <bool STORE, int WIDTH>
__device__ static inline void delta_rule_move_state(float (&acc)[WIDTH][4][4], float* state, int V,
                                                    int warp) {
    int lane = (int)threadIdx.x % 32;
    sm80_for_each(acc, [&](float& x, int m, int half, int, int column) {
        float* at = state + (warp * 32 + column) * V + m * 16 + half * 8 + lane / 4;
        if (STORE)
            *at = x;
        else
            x = *at;
    });
}

// Publishes the warp's part of S^T as fragments, and keeps them.
template <int WIDTH>
__device__ static inline void delta_rule_publish(uint32_t (&mine)[WIDTH][2][4], uint4 (&state)[WIDTH][8][32],
                                                 const float (&acc)[WIDTH][4][4], int warp) {
#pragma unroll
    for (int i = 0; i < 2 * WIDTH; i++) {
        uint32_t(&f)[4] = mine[i / 2][i % 2];
        scan_pack(f, (const float(&)[1][4][4])acc[i / 2], i % 2 * 2);
        state[i / 2][warp * 2 + i % 2][threadIdx.x % 32] = delta_rule_vector(f);
    }
}

// A register of an A fragment whose columns are tokens, of which its first one has token 0 of the lane's
// four: zero but for tokens from .. to - 1.
__device__ static inline uint32_t delta_rule_keep(uint32_t x, int token, int from, int to) {
    token += (int)threadIdx.x % 4 * 2;
    return x & ((token >= from && token < to ? 0xffffu : 0) |
                (token + 1 >= from && token + 1 < to ? 0xffff0000u : 0));
}

// V'^T (dV'^T) of the warp's tokens, in r; and in `operand` the factor of K (W) in the change of S^T.
// state: fragments of S^T
// DOCS: of the tokens before `last`, of the 16, nothing passes to the state, nor backward from it.
// DECAY: what passes has the factors `until` of the lane's tokens.
template <bool BACKWARD, bool DOCS, bool DECAY>
__device__ static inline void delta_rule_values(uint32_t (&r)[4], uint32_t (&operand)[4],
                                                const uint32_t (&state)[8][4], const uint32_t (&first)[8][4],
                                                const uint32_t (&vector)[4], int last,
                                                const float2 (&until)[2]) {
    float x[2][2][4] = {}; // two sums, for a shorter chain of mma
#pragma unroll
    for (int k = 0; k < 8; k++) {
        sm80_mma(x[k % 2][0], state[k], first[k][0], first[k][1], x[k % 2][0]);
        sm80_mma(x[k % 2][1], state[k], first[k][2], first[k][3], x[k % 2][1]);
    }
    for (int i = 0; i < 4; i++) {
        float2 y = unpack_bf16x2(vector[i]);
        const float *x0 = &x[0][i / 2][i % 2 * 2], *x1 = &x[1][i / 2][i % 2 * 2];
        float low = x0[0] + x1[0], high = x0[1] + x1[1];
        int token = i / 2 * 8; // of the lanes' first
        if (DOCS && BACKWARD && token + (int)threadIdx.x % 4 * 2 < last) low = 0;
        if (DOCS && BACKWARD && token + (int)threadIdx.x % 4 * 2 + 1 < last) high = 0;
        if (DECAY && BACKWARD) low *= until[i / 2].x, high *= until[i / 2].y;
        r[i] = BACKWARD ? pack_bf16x2(y.x + low, y.y + high) : pack_bf16x2(y.x - low, y.y - high);
        operand[i] = BACKWARD ? r[i] ^ 0x80008000u
                     : DOCS   ? delta_rule_keep(r[i], token, last, DELTA_CHUNK)
                     : DECAY  ? pack_bf16x2((y.x - low) * until[i / 2].x, (y.y - high) * until[i / 2].y)
                              : r[i];
    }
}

// The chain of a thread block
template <class F, bool BACKWARD, bool DOCS, bool DECAY> struct DeltaChain {
    const DeltaChainTensors& tensors;
    typename F::Shared& shared;
    int chunks, slice; // blocks of the head's columns, WIDTH at a time
    int64_t head, b;
    int h;
    const int32_t* doc_start; // with DOCS, of sequences of T tokens
    int T;
    int slices;            // of 128 columns of the head's values, with DECAY
    enum { SCALING = 64 }; // threads

    __device__ int chunk(int step) const { return BACKWARD ? chunks - 1 - step : step; }
    __device__ int64_t tile(int step) const { return head * chunks + chunk(step); }
    // The same of the tensors of values, which have a tile for each slice
    __device__ int64_t value_tile(int step) const {
        return DECAY ? tile(step) * slices + slice / F::SLICES : tile(step);
    }
    __device__ int first_column() const {
        return (DECAY ? slice % F::SLICES : slice) * F::WIDTH * DELTA_COLUMNS;
    }

    // Starts copying a step's tiles.
    __device__ void copy(int step) const {
        constexpr int THREADS = F::COPYING;
        auto& stage = shared.stage[step % F::STAGES];
        uint64_t* full = &shared.full[step % F::STAGES];
        if (step < chunks) {
            int row = (int)tile(step) * DELTA_CHUNK, t = chunk(step) * DELTA_CHUNK;
            int value_row = (int)value_tile(step) * DELTA_CHUNK;
            if constexpr (DECAY) {
                panel_expect(full, F::Stage::COPIED);
                panel_copy_numbers<F::Stage::FACTORS>(
                    stage.factors, tensors.factors + tile(step) * DELTA_FACTORS + DELTA_SINCE, full);
            } else {
                panel_expect(full, sizeof stage);
            }
            for (int n = 0; n < 2; n++) {
                bf16 *w = (BACKWARD ? stage.second : stage.first) + n * DELTA_CHUNK * 64,
                     *k = (BACKWARD ? stage.first : stage.second) + n * DELTA_CHUNK * 64;
                panel_copy<DELTA_CHUNK, THREADS>(w, BACKWARD ? tensors.second : tensors.first, 0, n, row,
                                                 full);
                panel_copy<DELTA_CHUNK, THREADS>(k, BACKWARD ? tensors.first : tensors.second, b,
                                                 h * tensors.key_head + n, t, full);
                if constexpr (BACKWARD)
                    panel_copy<DELTA_CHUNK, THREADS>(stage.q + n * DELTA_CHUNK * 64, tensors.q, b,
                                                     h * tensors.key_head + n, t, full);
            }
            for (int i = 0; i < F::WIDTH; i++) {
                int of_values = slice * F::WIDTH + i, heads = DECAY ? h * slices : h;
                delta_rule_copy_slice(stage.vector[i], tensors.vector, 0, first_column() / DELTA_COLUMNS + i,
                                      value_row, full);
                if constexpr (BACKWARD)
                    delta_rule_copy_slice(stage.dout[i], tensors.dout, b,
                                          heads * (DELTA_D / DELTA_COLUMNS) + of_values, t, full);
            }
        }
        panel_commit();
    }
    // Multiplies dO by e^g, in place, before the chain needs it: there it would be in the critical path of
    // each of the consumer warps, which all need all of it.
    __device__ void scale_queries() const {
#if SM90_CODE
        for (int step = 0; step < chunks; step++) {
            auto& stage = shared.stage[step % F::STAGES];
            wait(step);
#pragma unroll
            for (int n = 0; n < F::WIDTH * DELTA_CHUNK * DELTA_COLUMNS / 8 / SCALING; n++) {
                const int i = n * SCALING + (int)threadIdx.x - (F::COPYING - SCALING); // two chunks a token
                const float since = stage.factors[i / 2 % DELTA_CHUNK];
                uint4 *at = (uint4*)stage.dout + i, x = *at;
                *at = make_uint4(scale_bf16x2(x.x, since, since), scale_bf16x2(x.y, since, since),
                                 scale_bf16x2(x.z, since, since), scale_bf16x2(x.w, since, since));
            }
            sm90_fence_async_proxy(); // TMA overwrites these stores
            sm90_arrive_warp(&stage.scaled);
        }
#endif
    }
    // The producer warps. With cp.async they pass the same barriers as `compute`.
    __device__ void produce() const {
#if SM90_CODE
        if constexpr (DECAY && BACKWARD)
            if (threadIdx.x >= F::COPYING - SCALING) return scale_queries();
        for (int step = 0; step < chunks && threadIdx.x == 0; step++) {
            sm90_wait(&shared.empty[step % F::STAGES], (uint32_t)(step / F::STAGES % 2 ^ 1));
            copy(step);
        }
#else
        for (int i = 0; i < F::STAGES; i++) copy(i);
        cp_async_wait_group<F::STAGES - 1>();
        __syncthreads();
        for (int step = 0; step < chunks; step++) {
            __syncthreads();
            cp_async_wait_group<F::STAGES - 2>();
            __syncthreads();
            copy(step + F::STAGES);
        }
#endif
    }
    // Barrier of the consumer warps; with cp.async of the whole thread block
    __device__ void sync() const {
#if SM90_CODE
        sm90_named_sync(1, F::THREADS - F::COPYING);
#else
        __syncthreads();
#endif
    }
    // Before the tiles of a step are read; with cp.async `sync` before it is enough.
    __device__ void wait(int step) const {
#if SM90_CODE
        sm90_wait(&shared.full[step % F::STAGES], (uint32_t)(step / F::STAGES % 2));
#endif
    }
    __device__ void done(int step) const {
#if SM90_CODE
        sm90_arrive_warp(&shared.empty[step % F::STAGES]);
#endif
    }
    // Fragments of a step's tiles: `first` and `second` of all tokens or channels of the warp
    __device__ void load_first(uint32_t (&first)[8][4], uint32_t (&vector)[F::WIDTH][4], int step,
                               int warp) const {
        const auto& stage = shared.stage[step % F::STAGES];
        Panels<DELTA_CHUNK, false> tile(stage.first);
#pragma unroll
        for (int k = 0; k < 8; k++) tile.load(first[k], warp * 16, k * 16);
        for (int i = 0; i < F::WIDTH; i++) delta_rule_load_slice(vector[i], stage.vector[i], warp * 16);
    }
    __device__ void load_second(uint32_t (&second)[2][4], int step, int warp, int k) const {
        Panels<DELTA_CHUNK, true> tile(shared.stage[step % F::STAGES].second);
        for (int i = 0; i < 2; i++) tile.load(second[i], warp * 32 + i * 16, k * 16);
    }
    __device__ DeltaWalls walls(int step) const {
        return DeltaWalls::of<DOCS>(doc_start, b, T, chunk(min(step, chunks - 1)) * DELTA_CHUNK);
    }
    // Two of a step's factors: those of the lane's tokens in a block of 8 that begins at `from`
    __device__ float2 factors(int step, int from) const {
        if constexpr (DECAY)
            return *(const float2*)(shared.stage[step % F::STAGES].factors + from + threadIdx.x % 4 * 2);
        return {};
    }
    // dS^T += dO^T Q; DOCS: over the tokens before `end`
    __device__ void add_queries(float (&acc)[F::WIDTH][4][4], int step, int warp, int end) const {
        if constexpr (BACKWARD) {
            auto& stage = shared.stage[step % F::STAGES];
            Panels<DELTA_CHUNK, true> tile(stage.q);
#if SM90_CODE
            if constexpr (DECAY) sm90_wait(&stage.scaled, (uint32_t)(step / F::STAGES % 2));
#endif
#pragma unroll
            for (int k = 0; k < DELTA_CHUNK; k += 16) {
                uint32_t q[2][4], f[4];
                for (int i = 0; i < 2; i++) tile.load(q[i], warp * 32 + i * 16, k);
                for (int m = 0; m < F::WIDTH; m++) {
                    delta_rule_load_slice(f, stage.dout[m], k);
                    for (int r = 0; DOCS && r < 4; r++) f[r] = delta_rule_keep(f[r], k + r / 2 * 8, 0, end);
                    for (int r = 0; DECAY && !SM90_CODE && r < 4; r++) {
                        float2 since = factors(step, k + r / 2 * 8);
                        f[r] = scale_bf16x2(f[r], since.x, since.y);
                    }
                    for (int n = 0; n < 4; n++)
                        sm80_mma(acc[m][n], f, q[n / 2][n % 2 * 2], q[n / 2][n % 2 * 2 + 1], acc[m][n]);
                }
            }
        }
    }
    // The consumer warps
    __device__ void compute(int warp) const {
        constexpr int WIDTH = F::WIDTH;
        const int lane = (int)threadIdx.x % 32, column = first_column();
        const int V = DECAY ? slices * DELTA_D : DELTA_D;
        float acc[WIDTH][4][4] = {};
        float* state =
            tensors.state ? tensors.state + head * DELTA_D * V + slice * WIDTH * DELTA_COLUMNS : NULL;
        if (state) delta_rule_move_state<false>(acc, state, V, warp);
        uint32_t mine[WIDTH][2][4], first[8][4], second[4][2][4], vector[WIDTH][4]; // fragments
        delta_rule_publish(mine, shared.state, acc, warp);
#if !SM90_CODE
        __syncthreads();
#endif
        wait(0);
        load_first(first, vector, 0, warp);
#pragma unroll
        for (int k = 0; k < 4; k++) load_second(second[k], 0, warp, k);
        DeltaWalls walls_ahead = walls(0);
        for (int step = 0; step < chunks; step++) {
            uint32_t values[WIDTH][4], operand[4], f[8][4], changes[WIDTH][4][4];
            const DeltaWalls here = walls_ahead;
            if (DOCS) walls_ahead = walls(step + 1);
            sync(); // S^T is complete
            if (DOCS && here.mask)
                sm80_for_each(acc, [](float& x, int, int, int, int) { x = 0; }); // published before
            float2 until[2] = {};
            if constexpr (DECAY) {
                const float kept = shared.stage[step % F::STAGES].factors[DELTA_UNTIL - DELTA_SINCE - 1];
                sm80_for_each(acc, [=](float& x, int, int, int, int) { x *= kept; });
                for (int i = 0; i < 2; i++)
                    until[i] = factors(step, DELTA_UNTIL - DELTA_SINCE + warp * 16 + i * 8);
            }
#pragma unroll
            for (int m = 0; m < WIDTH; m++) {
                for (int k = 0; k < 8; k++) delta_rule_fragment(f[k], shared.state[m][k][lane]);
                if (m == 0 && step + 1 < chunks) wait(step + 1);
                delta_rule_values<BACKWARD, DOCS, DECAY>(values[m], operand, f, first, vector[m],
                                                         here.last() - warp * 16, until);
                shared.value[m][warp][lane] = delta_rule_vector(operand);
            }
            add_queries(acc, step, warp, here.first());
            done(step);
            sync(); // V'^T is complete; with cp.async, the next step's tiles are there
#pragma unroll
            for (int i = 0; i < 4 * WIDTH; i++)
                delta_rule_fragment(changes[i / 4][i % 4], shared.value[i / 4][i % 4][lane]);
            load_first(first, vector, step + 1, warp); // past the last step stale tiles, not used
            // Stores and loads between the MMAs, where they delay neither LDS nor STS.
            bf16 *to_values = tensors.values + value_tile(step) * DELTA_ROWS,
                 *to_state = tensors.states + value_tile(step) * DELTA_STATE;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                for (int i = 0; i < 4 * WIDTH; i++) {
                    int m = i / 4, n = i % 4;
                    sm80_mma(acc[m][n], changes[m][k], second[k][n / 2][n % 2 * 2],
                             second[k][n / 2][n % 2 * 2 + 1], acc[m][n]);
                }
                load_second(second[k], step + 1, warp, k);
                for (int m = 0; m < WIDTH; m++)
                    if (k == 0)
                        block_store<DELTA_CHUNK>(to_values, values[m], column + m * 16, warp * 16);
                    else if (k < 3)
                        block_store<DELTA_D>(to_state, mine[m][k - 1], column + m * 16,
                                             warp * 32 + (k - 1) * 16);
            }
            delta_rule_publish(mine, shared.state, acc, warp);
        }
        if (state) delta_rule_move_state<true>(acc, state, V, warp);
    }
    __device__ void run() const {
#if SM90_CODE
        if constexpr (DECAY && BACKWARD)
            for (int i = 0; i < F::STAGES && threadIdx.x == 0; i++)
                sm90_barrier_init(&shared.stage[i].scaled, 0, SCALING / 32);
#endif
        panel_init(shared.full);
        panel_init(shared.empty, 4);
        int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0) - F::COPYING / 32;
        if (warp < 0)
            produce();
        else
            compute(warp);
    }
};

// Columns and stages of the chains. At 12 heads one chain occupies 96 SMs with 16 columns a thread block,
// both chains together with 32. With decays, 9 heads of 256 values, one chain occupies 72 with 32.
template <ScanChains CHAINS, bool LARGE, bool DECAY> struct DeltaKernel {
    static constexpr bool BOTH = CHAINS == SCAN_BOTH, WIDE = BOTH || DECAY;
    static constexpr int FORWARD = CHAINS == SCAN_BACKWARD ? 1
                                   : !LARGE                ? 4
                                   : WIDE                  ? 5
                                                           : 6,
                         BACKWARD = CHAINS == SCAN_FORWARD ? 1
                                    : WIDE                 ? 2 + LARGE
                                                           : 3 + LARGE;
    typedef DeltaStates<false, 1 + WIDE, FORWARD, DECAY> Forward;
    typedef DeltaStates<true, 1 + WIDE, BACKWARD, DECAY> Backward;
    static constexpr int THREADS = Forward::THREADS, SLICES = Forward::SLICES;
    union Shared {
        typename Forward::Shared forward;
        typename Backward::Shared backward;
    };
};

struct DeltaStatesTensors {
    DeltaChainTensors forward, backward;
};

// Runs one chain or both at once: the backward one does not read the other's states. Grid: B NH slices
// SLICES, times 2 for both. DOCS without DECAY, whose factors tell of documents
template <ScanChains CHAINS, bool LARGE, bool DOCS, bool DECAY>
__global__ void __launch_bounds__(DeltaKernel<CHAINS, LARGE, DECAY>::THREADS, 1)
    delta_rule_states_kernel(const __grid_constant__ DeltaStatesTensors tensors, int chunks, int NH,
                             const int32_t* doc_start, int T, int slices) {
    typedef DeltaKernel<CHAINS, LARGE, DECAY> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    // of both the longer chain first: one an SM, where there are enough
    int block = (int)blockIdx.x, backward = CHAINS == SCAN_FORWARD ? 0 : (int)gridDim.x / (1 + F::BOTH);
    int own = block < backward ? block : block - backward, of_head = DECAY ? slices * F::SLICES : F::SLICES;
    int slice = own % of_head;
    int64_t head = own / of_head, b = head / NH;
    int h = (int)(head % NH);
    if constexpr (CHAINS != SCAN_FORWARD)
        if (block < backward)
            DeltaChain<typename F::Backward, true, DOCS, DECAY>{
                tensors.backward, shared.backward, chunks, slice, head, b, h, doc_start, T, slices}
                .run();
    if constexpr (CHAINS != SCAN_BACKWARD)
        if (block >= backward)
            DeltaChain<typename F::Forward, false, DOCS, DECAY>{
                tensors.forward, shared.forward, chunks, slice, head, b, h, doc_start, T, slices}
                .run();
}

template <ScanChains CHAINS, bool LARGE, bool DECAY>
static inline void delta_rule_launch_states_of(const DeltaStatesTensors& t, const DeltaWork* work,
                                               const ScanShape* s, cudaStream_t stream) {
    typedef DeltaKernel<CHAINS, LARGE, DECAY> F;
    auto kernel = delta_rule_states_kernel<CHAINS, LARGE, false, DECAY>;
    if constexpr (!DECAY)
        if (s->doc_start) kernel = delta_rule_states_kernel<CHAINS, LARGE, true, DECAY>;
    scan_launch<F>(kernel, (1 + F::BOTH) * s->B * s->NH * work->slices * F::SLICES, stream, t, work->chunks,
                   s->NH, s->doc_start, (int)s->T, work->slices);
}
template <ScanChains CHAINS, bool LARGE>
static inline void delta_rule_launch_states(const DeltaStatesTensors& t, const DeltaWork* work,
                                            const ScanShape* s, cudaStream_t stream) {
    if (s->decays)
        delta_rule_launch_states_of<CHAINS, LARGE, true>(t, work, s, stream);
    else
        delta_rule_launch_states_of<CHAINS, LARGE, false>(t, work, s, stream);
}

// dout: NULL in a forward pass
static inline void delta_rule_states(const DeltaWork* work, const Scan* a, const bf16* dout,
                                     ScanChains chains, const ScanShape* s, cudaStream_t stream) {
    int64_t rows = s->B * s->NH * work->chunks * DELTA_CHUNK;
    int64_t panels = (s->NH - 1) * s->key_head / 64 + 2;
    assert(s->key_head % 64 == 0);
    auto tiles = [&](const bf16* x) { return panel_tensor(x, 1, rows, 2, DELTA_D, DELTA_CHUNK); };
    auto slices = [&](const bf16* x) {
        return panel_tensor(x, 1, rows * work->slices, DELTA_D / DELTA_COLUMNS, DELTA_D, DELTA_CHUNK,
                            DELTA_COLUMNS);
    };
    auto keys = [&](const bf16* x) { return panel_tensor(x, s->B, s->T, panels, s->key_row, DELTA_CHUNK); };
    DeltaStatesTensors t = {};
    PanelTensor w = tiles(work->w), k = keys(a->k);
    int key_head = (int)(s->key_head / 64);
    t.forward = {w,        k,        slices(work->u), {}, {}, work->states_t, work->values_t,
                 a->state, key_head, work->factors};
    int64_t heads = s->NH * (s->V / DELTA_COLUMNS);
    if (dout)
        t.backward = {k,
                      w,
                      slices(work->y),
                      keys(a->q),
                      panel_tensor(dout, s->B, s->T, heads, s->NH * s->V, DELTA_CHUNK, DELTA_COLUMNS),
                      work->dstates_t,
                      work->dvalues_t,
                      NULL,
                      key_head,
                      work->factors};
    bool large = scan_is_large();
    auto launch = chains == SCAN_FORWARD    ? large ? delta_rule_launch_states<SCAN_FORWARD, true>
                                                    : delta_rule_launch_states<SCAN_FORWARD, false>
                     : chains == SCAN_BACKWARD ? large ? delta_rule_launch_states<SCAN_BACKWARD, true>
                                                       : delta_rule_launch_states<SCAN_BACKWARD, false>
                     : large ? delta_rule_launch_states<SCAN_BOTH, true>
                                            : delta_rule_launch_states<SCAN_BOTH, false>;
    launch(t, work, s, stream);
}
