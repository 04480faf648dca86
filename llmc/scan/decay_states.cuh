/*
States of the recurrence with one decay a head, in chunks of 128 tokens. With b_i the sum of the chunk's log
decays up to token i, and b_C that of the whole chunk:

    S1  = e^(b_C) S0 + sum_j e^(b_C - b_j) k_j v_j^T         forward: stores S0 of each chunk
    dS0 = e^(b_C) dS1 + sum_i e^(b_i) q_i do_i^T             backward, from the last chunk: stores dS1

A thread block has 64 rows of one head's state in registers, in fp32, and walks over the chunks; a warp has 16
rows. Both chains run side by side, two thread blocks on a multiprocessor: what counts is the latency of a
step. The stored states are bf16, as operands of the kernels in decay_forward.cuh and decay_backward.cuh. All
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
    static constexpr int THREADS = 128, ROWS = 64, SLICES = DECAY_K / ROWS, STAGES = 3;
    struct Shared {
        struct {
            bf16 keys[DECAY_CHUNK * ROWS], values[DECAY_CHUNK * DECAY_V];
        } stage[STAGES];
        bf16 out[THREADS / 32][16 * DECAY_V];
        float weight[2][DECAY_CHUNK];
    };
};

// The kernel's place in the state, as element [row][column] of the lane's accumulators
__device__ static inline float* decay_state_pair(float* state, int n, int half) {
    int lane = (int)threadIdx.x % 32;
    return state + (half * 8 + lane / 4) * DECAY_V + n * 8 + lane % 4 * 2;
}

// A thread block's chain. BACKWARD: the gradients of the states, from q and dout.
template <bool BACKWARD>
__device__ static inline void decay_chain(const Scan& a, const bf16* dout, const DecayScratch& scratch,
                                          const ScanShape& s, DecayStates::Shared& shared, int block) {
    typedef DecayStates F;
    int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, T = (int)s.T, chunks = scratch.chunks;
    int slice = block % F::SLICES;
    int64_t head = block / F::SLICES, b = head / s.NH, h = head % s.NH;
    int64_t value_row = BACKWARD ? s.NH * DECAY_V : s.value_row;
    const bf16* keys = (BACKWARD ? a.q : a.k) + b * T * s.key_row + h * s.key_head + slice * F::ROWS;
    const bf16* values = (BACKWARD ? dout : a.v) + b * T * value_row + h * DECAY_V;
    const float* cum = scratch.cum + head * chunks * DECAY_CHUNK;
    auto chunk_at = [&](int step) { return BACKWARD ? chunks - 1 - step : step; };
    auto state_at = [&](int step) { // offset of the block's rows of a state
        return (head * chunks + chunk_at(step)) * DECAY_STATE + slice * F::ROWS * DECAY_V;
    };
    auto copy = [&](int step) {
        if (step < chunks) {
            int first = chunk_at(step) * DECAY_CHUNK;
            auto& stage = shared.stage[step % F::STAGES];
            sm80_copy_tile<F::ROWS, DECAY_CHUNK, F::THREADS>(stage.keys, keys, first, T, s.key_row);
            sm80_copy_tile<DECAY_V, DECAY_CHUNK, F::THREADS>(stage.values, values, first, T, value_row);
        }
        cp_async_commit_group();
    };
    float next_cum = 0, next_last = 0; // of the thread's token, and of the chunk
    auto load_cum = [&](int step) {
        const float* x = cum + chunk_at(min(step, chunks - 1)) * DECAY_CHUNK;
        next_cum = x[tid], next_last = x[DECAY_CHUNK - 1];
    };
    for (int i = 0; i < F::STAGES - 1; i++) copy(i);
    load_cum(0);

    float acc[1][8][4];
    scan_clear(acc);
    float* state =
        BACKWARD || !a.state ? NULL : a.state + head * DECAY_STATE + (slice * F::ROWS + warp * 16) * DECAY_V;
    for (int i = 0; state && i < 16; i++) {
        const float2 x = *(const float2*)decay_state_pair(state, i / 2, i % 2);
        acc[0][i / 2][i % 2 * 2] = x.x, acc[0][i / 2][i % 2 * 2 + 1] = x.y;
    }
    for (int step = 0; step < chunks; step++) {
        float* weight = shared.weight[step % 2];
        float decay = exp2_approx(next_last);
        weight[tid] = exp2_approx(BACKWARD ? next_cum : next_last - next_cum);
        wait_panels<F::STAGES - 2>();
        __syncthreads();
        load_cum(step + 1);
        auto& stage = shared.stage[step % F::STAGES];
        Panels<DECAY_CHUNK, true> keys_tile(stage.keys, warp * 16);
        uint32_t f[8][4];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            keys_tile.load_a(f[k], k * 16);
            for (int r = 0; r < 4; r++) { // the lane's tokens
                const float2 w = *(const float2*)&weight[k * 16 + r / 2 * 8 + lane % 4 * 2];
                f[k][r] = scale_bf16x2(f[k][r], w.x, w.y);
            }
        }
        sm80_store<DECAY_V>((BACKWARD ? scratch.dstates : scratch.states) + state_at(step) +
                                warp * 16 * DECAY_V,
                            DECAY_V, 16, shared.out[warp], acc, [](int, int) { return 1; });
#pragma unroll
        for (int i = 0; i < 32; i++) acc[0][i / 4][i % 4] *= decay;
        panels_matmul(acc, f, Panels<DECAY_CHUNK, true>(stage.values), 0,
                      [&] { copy(step + F::STAGES - 1); });
    }
    for (int i = 0; state && i < 16; i++)
        *(float2*)decay_state_pair(state, i / 2, i % 2) =
            make_float2(acc[0][i / 2][i % 2 * 2], acc[0][i / 2][i % 2 * 2 + 1]);
}

// Writes the states, and with BOTH their gradients. Grid: B NH SLICES, times 2 with BOTH.
template <bool BOTH>
__global__ void __launch_bounds__(DecayStates::THREADS, 2)
    decay_states_kernel(const __grid_constant__ Scan a, const bf16* dout,
                        const __grid_constant__ DecayScratch scratch, const __grid_constant__ ScanShape s) {
    extern __shared__ __align__(1024) char shared_bytes[];
    DecayStates::Shared& shared = *(DecayStates::Shared*)shared_bytes;
    int block = (int)blockIdx.x;
    if (!BOTH)
        decay_chain<false>(a, dout, scratch, s, shared, block);
    else if (block % 2)
        decay_chain<true>(a, dout, scratch, s, shared, block / 2);
    else
        decay_chain<false>(a, dout, scratch, s, shared, block / 2);
}

static inline dim3 decay_head_grid(const DecayScratch* scratch, const ScanShape* s) {
    return dim3((unsigned)(s->B * scratch->chunks), (unsigned)ceil_div(s->NH, (int)DECAY_HEADS));
}

static inline void decay_cum(const DecayScratch* scratch, const Scan* a, const ScanShape* s,
                             cudaStream_t stream) {
    CUDA_LAUNCH(decay_cum_kernel, decay_head_grid(scratch, s), 256, stream, *scratch, a->log_decay, *s);
}

// dout: NULL in a forward pass, which needs the states alone.
static inline void decay_states(const DecayScratch* scratch, const Scan* a, const bf16* dout,
                                const ScanShape* s, cudaStream_t stream) {
    int64_t grid = s->B * s->NH * DecayStates::SLICES;
    if (dout)
        scan_launch<DecayStates>(decay_states_kernel<true>, 2 * grid, stream, *a, dout, *scratch, *s);
    else
        scan_launch<DecayStates>(decay_states_kernel<false>, grid, stream, *a, dout, *scratch, *s);
}
