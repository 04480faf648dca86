/*
States of the recurrence with one decay a head, in chunks of 128 tokens. With b_i the sum of the chunk's log
decays up to token i, and b_C that of the whole chunk:

    S1  = e^(b_C) S0 + sum_j e^(b_C - b_j) k_j v_j^T         forward: stores S0 of each chunk
    dS0 = e^(b_C) dS1 + sum_i e^(b_i) q_i do_i^T             backward, from the last chunk: stores dS1

A thread block has 64 rows of one head's state in registers, in fp32, and walks over the chunks. What counts is
the latency of a step, so half of the warps copy tiles and scale the keys, ahead of the other half; there a warp
has 16 rows. The stored states are bf16, as operands of the kernels in decay_forward.cuh and decay_backward.cuh. All
exponents are at most 0. Called by scan.cuh. dS is the gradient without the factor `scale`.
*/
#pragma once

#include "panels.cuh"

enum { DECAY_CHUNK = 128, DECAY_K = 128, DECAY_V = 64, DECAY_STATE = DECAY_K * DECAY_V, DECAY_DOTS = 8 };

// Buffers between the kernels; those from dstates on in a backward pass only
struct DecayScratch {
    float* cum;    // [B,NH,chunks,CHUNK] log2(e) b
    bf16* states;  // [B,NH,chunks,K,V] S0
    bf16* dstates; // [B,NH,chunks,K,V] dS1
    float* dots;   // [B,NH,chunks,DECAY_DOTS] parts of <e^(b_C) S0, dS1>
    // [B,NH,chunks,CHUNK] sums that dlog_decay is made of, as decay_backward.cuh names them: a row's of g and
    // of what comes through S0, a column's of g, and a token's v . dv through dS1
    float *g_rows, *g_columns, *later;
    float *dq, *dk, *dk_own; // [groups,B,T,K] parts of dq and dk; dk_own: of dk, from the token's own chunk
    int chunks, groups,
        group_heads; // a thread block of the other kernels has one chunk and group_heads heads
};

// groups: enough thread blocks for a large GPU. A function of the shape alone, as sums depend on it.
static inline DecayScratch decay_scratch(ScanArena* arena, const ScanShape* s, bool backward) {
    DecayScratch d = {};
    d.chunks = scan_chunks<DECAY_CHUNK>(*s);
    int64_t blocks = s->B * d.chunks, heads = s->B * s->NH, rows = heads * d.chunks * DECAY_CHUNK;
    d.group_heads = (int)ceil_div<int64_t>(s->NH, ceil_div<int64_t>(128, blocks));
    d.groups = (int)ceil_div<int64_t>(s->NH, d.group_heads);
    d.cum = arena->take<float>(rows);
    d.states = arena->take<bf16>(heads * d.chunks * DECAY_STATE);
    if (!backward) return d;
    d.dstates = arena->take<bf16>(heads * d.chunks * DECAY_STATE);
    d.dots = arena->take<float>(heads * d.chunks * DECAY_DOTS);
    d.g_rows = arena->take<float>(rows);
    d.g_columns = arena->take<float>(rows);
    d.later = arena->take<float>(rows);
    int64_t part = (int64_t)d.groups * s->B * s->T * DECAY_K;
    d.dq = arena->take<float>(part);
    d.dk = arena->take<float>(part);
    d.dk_own = arena->take<float>(part);
    return d;
}

// ----------------------------------------------------------------------------
// cumulative log decays

enum { DECAY_HEADS = 32 }; // heads of a thread block of the kernels that change between [T,NH] and [NH,T]

// The sum of x over the warp's lanes before this one
__device__ static inline float warp_sum_before(float x) {
    int lane = (int)threadIdx.x % 32;
    float sum = x;
    for (int step = 1; step < 32; step *= 2) {
        float before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
    }
    return sum - x;
}

// Writes scratch.cum. A thread block has one chunk (blockIdx.x, over all sequences) of DECAY_HEADS heads.
static __global__ void __launch_bounds__(256)
    decay_cum_kernel(DecayScratch scratch, const float* log_decay, ScanShape s) {
    __shared__ float tile[DECAY_HEADS][DECAY_CHUNK + 1];
    int first = (int)blockIdx.y * DECAY_HEADS, lane = (int)threadIdx.x % 32,
        b = (int)blockIdx.x / scratch.chunks;
    int chunk = (int)blockIdx.x % scratch.chunks;
    for (int i = (int)threadIdx.x; i < DECAY_HEADS * DECAY_CHUNK; i += (int)blockDim.x) {
        int h = i % DECAY_HEADS, t = i / DECAY_HEADS;
        int64_t at = (int64_t)chunk * DECAY_CHUNK + t;
        bool exists = first + h < s.NH && at < s.T;
        tile[h][t] = exists ? log_decay[(b * s.T + at) * s.NH + first + h] * 1.44269504f : 0;
    }
    __syncthreads();
    for (int h = (int)threadIdx.x / 32; h < DECAY_HEADS && first + h < s.NH; h += (int)blockDim.x / 32) {
        float x[4], sum = 0;
        for (int i = 0; i < 4; i++) x[i] = sum += tile[h][lane * 4 + i];
        float before = warp_sum_before(sum);
        int64_t head = (int64_t)b * s.NH + first + h;
        store16(scratch.cum + (head * scratch.chunks + chunk) * DECAY_CHUNK + lane * 4,
                Pack4{{x[0] + before, x[1] + before, x[2] + before, x[3] + before}});
    }
}

// ----------------------------------------------------------------------------
// states

struct DecayStates {
    static constexpr int HALF = 128, THREADS = 2 * HALF, ROWS = 64, SLICES = DECAY_K / ROWS, STAGES = 4;
    struct Shared {
        struct {
            bf16 keys[DECAY_CHUNK * ROWS], values[DECAY_CHUNK * DECAY_V];
            bf16 state[ROWS * DECAY_V]; // S0, backward
        } stage[STAGES];
        bf16 out[HALF / 32][16 * DECAY_V];
    };
};

// The kernel's place in the state, as element [row][column] of the lane's accumulators
__device__ static inline float* decay_state_pair(float* state, int n, int half) {
    int lane = (int)threadIdx.x % 32;
    return state + (half * 8 + lane / 4) * DECAY_V + n * 8 + lane % 4 * 2;
}

// Writes <S0, e^(b_C) dS1> of the warp's rows of a tile of S0; dS1 in acc.
__device__ static inline void decay_state_dot(float* to, bf16* state, const float (&acc)[1][8][4],
                                              float decay, int warp) {
    int lane = (int)threadIdx.x % 32;
    float sums[2] = {};
    scan_row_dot(sums, acc, state, warp * 16 + lane / 4);
    float sum = warp_sum(sums[0] + sums[1]);
    if (lane == 0) *to = sum * decay;
}

// What a thread block works on. BACKWARD: the gradients of the states, from q and dout, which then is v.
template <bool BACKWARD> struct DecayChain {
    typedef DecayStates F;
    F::Shared& shared;
    const DecayScratch& scratch;
    int64_t head, key_row, value_row;
    int T, slice, chunks;
    const bf16 *keys, *values;
    const float* cum;
    __device__ DecayChain(const Scan& a, const bf16* dout, const DecayScratch& d, const ScanShape& s,
                          F::Shared& sh)
        : shared(sh), scratch(d), head(blockIdx.x / F::SLICES), key_row(s.key_row),
          value_row(BACKWARD ? s.NH * DECAY_V : s.value_row), T((int)s.T), slice((int)blockIdx.x % F::SLICES),
          chunks(d.chunks) {
        int64_t b = head / s.NH, h = head % s.NH;
        keys = (BACKWARD ? a.q : a.k) + b * T * s.key_row + h * s.key_head + slice * F::ROWS;
        values = (BACKWARD ? dout : a.v) + b * T * value_row + h * DECAY_V;
        cum = d.cum + head * chunks * DECAY_CHUNK;
    }
    __device__ int chunk(int step) const { return BACKWARD ? chunks - 1 - step : step; }
    __device__ const float* cum_of(int step) const { // of the last step past the end
        return cum + chunk(min(step, chunks - 1)) * DECAY_CHUNK;
    }
    __device__ int64_t state_at(int step) const { // offset of the block's rows of a state
        return (head * chunks + chunk(step)) * DECAY_STATE + slice * F::ROWS * DECAY_V;
    }

    // Starts copying a step's tiles, and commits the group.
    __device__ void copy(int step) const {
        if (step < chunks) {
            int first = chunk(step) * DECAY_CHUNK;
            auto& stage = shared.stage[step % F::STAGES];
            sm80_copy_tile<F::ROWS, DECAY_CHUNK, F::HALF>(stage.keys, keys, first, T, key_row);
            sm80_copy_tile<DECAY_V, DECAY_CHUNK, F::HALF>(stage.values, values, first, T, value_row);
            if (BACKWARD)
                sm80_copy_tile<DECAY_V, F::ROWS, F::HALF>(stage.state, scratch.states + state_at(step), 0,
                                                          F::ROWS, DECAY_V);
        }
        cp_async_commit_group();
    }
    // Scales the keys that the thread itself has copied; x: cum of their tokens, and of the chunk
    static constexpr int STEP = F::HALF / 8; // from a key of the thread to the next
    __device__ void scale(int step, const float (&x)[DECAY_CHUNK / STEP], float last) const {
        int row = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8;
        char* keys_tile = (char*)shared.stage[step % F::STAGES].keys;
#pragma unroll
        for (int i = 0; i < DECAY_CHUNK / STEP; i++) {
            Raw8* at = (Raw8*)(keys_tile + sm80_chunk_offset<F::ROWS>(row + i * STEP, column));
            float y[8], weight = exp2_approx(BACKWARD ? x[i] : last - x[i]);
            unpack8(y, *at);
            for (int c = 0; c < 8; c++) y[c] *= weight;
            *at = pack8(y);
        }
    }
    // The copying warps
    __device__ void prepare() const {
        float x[DECAY_CHUNK / STEP], last;
        auto load = [&](int step) { // a step ahead
            for (int i = 0; i < DECAY_CHUNK / STEP; i++) x[i] = cum_of(step)[threadIdx.x / 8 + i * STEP];
            last = cum_of(step)[DECAY_CHUNK - 1];
        };
        load(0);
        for (int i = 0; i < F::STAGES - 1; i++) copy(i);
        for (int step = -1; step < chunks; step++) {
            if (step >= 0) {
                __syncthreads(); // the step's tiles are ready, and those of the step before are free
                copy(step + F::STAGES - 1);
            }
            cp_async_wait_group<F::STAGES - 2>();
            if (step + 1 < chunks) scale(step + 1, x, last);
            load(step + 2);
            fence_panels();
        }
    }
    // The computing warps: acc is the warp's 16 rows of the state.
    __device__ void compute(float (&acc)[1][8][4], int warp) const {
        float next_last = cum_of(0)[DECAY_CHUNK - 1];
        for (int step = 0; step < chunks; step++) {
            float decay = exp2_approx(next_last);
            next_last = cum_of(step + 1)[DECAY_CHUNK - 1];
            __syncthreads();
            auto& stage = shared.stage[step % F::STAGES];
            bf16* to = (BACKWARD ? scratch.dstates : scratch.states) + state_at(step) + warp * 16 * DECAY_V;
            sm80_store<DECAY_V>(to, DECAY_V, 16, shared.out[warp], acc, [](int, int) { return 1; });
            if (BACKWARD)
                decay_state_dot(scratch.dots + (head * chunks + chunk(step)) * DECAY_DOTS + slice * 4 + warp,
                                stage.state, acc, decay, warp);
#pragma unroll
            for (int i = 0; i < 32; i++) acc[0][i / 4][i % 4] *= decay;
            panels_matmul<DECAY_CHUNK, true>(acc, Panels<DECAY_CHUNK, true>(stage.keys, warp * 16),
                                             Panels<DECAY_CHUNK, true>(stage.values));
        }
    }
};

// Grid: B NH SLICES.
template <bool BACKWARD>
__global__ void __launch_bounds__(DecayStates::THREADS, 1)
    decay_states_kernel(const __grid_constant__ Scan a, const bf16* dout,
                        const __grid_constant__ DecayScratch scratch, const __grid_constant__ ScanShape s) {
    typedef DecayStates F;
    extern __shared__ __align__(1024) char shared_bytes[];
    DecayChain<BACKWARD> chain(a, dout, scratch, s, *(F::Shared*)shared_bytes);
    if (threadIdx.x < F::HALF) {
        chain.prepare();
        return;
    }
    int warp = ((int)threadIdx.x - F::HALF) / 32;
    float acc[1][8][4];
    scan_clear(acc);
    float* state = BACKWARD || !a.state
                       ? NULL
                       : a.state + chain.head * DECAY_STATE + (chain.slice * F::ROWS + warp * 16) * DECAY_V;
    for (int i = 0; state && i < 16; i++) {
        const float2 x = *(const float2*)decay_state_pair(state, i / 2, i % 2);
        acc[0][i / 2][i % 2 * 2] = x.x, acc[0][i / 2][i % 2 * 2 + 1] = x.y;
    }
    chain.compute(acc, warp);
    for (int i = 0; state && i < 16; i++)
        *(float2*)decay_state_pair(state, i / 2, i % 2) =
            make_float2(acc[0][i / 2][i % 2 * 2], acc[0][i / 2][i % 2 * 2 + 1]);
}

static inline dim3 decay_head_grid(const DecayScratch* scratch, const ScanShape* s) {
    return dim3((unsigned)(s->B * scratch->chunks), (unsigned)ceil_div(s->NH, (int)DECAY_HEADS));
}

static inline void decay_cum(const DecayScratch* scratch, const Scan* a, const ScanShape* s,
                             cudaStream_t stream) {
    CUDA_LAUNCH(decay_cum_kernel, decay_head_grid(scratch, s), 256, stream, *scratch, a->log_decay, *s);
}

template <bool BACKWARD>
static inline void decay_states(const DecayScratch* scratch, const Scan* a, const bf16* dout,
                                const ScanShape* s, cudaStream_t stream) {
    scan_launch<DecayStates>(decay_states_kernel<BACKWARD>, s->B * s->NH * DecayStates::SLICES, stream, *a,
                             dout, *scratch, *s);
}
