/*
States of the recurrence with one decay a head, in chunks of 128 tokens. With b_i the inclusive sum of the
chunk's log decays up to token i, and b_C that of the whole chunk:

    S1  = e^(b_C) S0 + sum_j e^(b_C - b_j) k_j v_j^T         forward: stores S0 of each chunk
    dS0 = e^(b_C) dS1 + sum_i e^(b_i) q_i do_i^T             backward, from the last chunk: stores dS1

A thread block has one head's state, or 64 of its 128 rows, and iterates over the chunks:

    warps 0 to WARPS - 1    16 rows of the state each, in fp32 accumulators
    warp WARPS              TMA producer: keys, values, cum -> shared memory ring (STAGES stages);
                            without TMA the other warps copy, by cp.async

    iteration i     stage the accumulators as bf16  ->  scale them by the chunk's decay
                    start wgmma: += keys(i)^T values(i)
                    while it is in flight: wait for stage i + 1, load and scale its keys, store the state of i
                    release stage i

The kernel is bound by the latency of an iteration. Stored states are bf16, operands of the kernels of
ssd_forward.cuh and ssd_backward.cuh. All exponents are at most 0. dS is the gradient without the factor
`scale`.
*/
#pragma once

#include "../shared/panels.cuh"

enum { SSD_CHUNK = 128, SSD_K = 128, SSD_V = 64, SSD_STATE = SSD_K * SSD_V, SSD_DOTS = 8 };

// Buffers between the kernels. cum and states are saved; those from dstates on are a backward pass's.
struct SsdWork {
    float* cum;    // [B,NH,chunks,CHUNK] log2(e) b
    bf16* states;  // [B,NH,chunks,K,V] S0
    float* skip;   // [B,NH,chunks,CHUNK]; NULL without, and in a backward pass
    bf16* dstates; // [B,NH,chunks,K,V] dS1
    float* dots;   // [B,NH,chunks,SSD_DOTS] parts of <e^(b_C) S0, dS1>
    // [B,NH,chunks,CHUNK] sums that dlog_decay is made of, as ssd_backward.cuh names them: a row's of g and
    // of what comes through S0, a column's of g, and a token's v . dv through dS1
    float *g_rows, *g_columns, *later;
    float *dq, *dk; // [groups,B,T,K] parts of dq and dk
    int chunks, groups,
        group_heads; // a thread block of the other kernels has one chunk and group_heads heads
};

// groups: enough thread blocks for a large GPU. A function of the shape alone, as sums depend on it.
static inline SsdWork ssd_work(ScanMemory* memory, const ScanShape* s, bool backward) {
    SsdWork d = {};
    ScanArena* arena = &memory->scratch;
    d.chunks = scan_chunks<SSD_CHUNK>(*s);
    int64_t blocks = s->B * d.chunks, heads = s->B * s->NH, rows = heads * d.chunks * SSD_CHUNK;
    d.group_heads = (int)ceil_div<int64_t>(s->NH, ceil_div<int64_t>(128, blocks));
    d.groups = (int)ceil_div<int64_t>(s->NH, d.group_heads);
    d.cum = memory->saved.take<float>(rows);
    d.states = memory->saved.take<bf16>(heads * d.chunks * SSD_STATE);
    if (!backward) {
        d.skip = arena->take<float>(rows);
        return d;
    }
    d.dstates = arena->take<bf16>(heads * d.chunks * SSD_STATE);
    d.dots = arena->take<float>(heads * d.chunks * SSD_DOTS);
    d.g_rows = arena->take<float>(rows);
    d.g_columns = arena->take<float>(rows);
    d.later = arena->take<float>(rows);
    int64_t part = (int64_t)d.groups * s->B * s->T * SSD_K;
    d.dq = arena->take<float>(part);
    d.dk = arena->take<float>(part);
    return d;
}

// Bytes of Scan.saved, and of Scan.scratch; `backward` also covers the forward pass.
static inline size_t ssd_saved_bytes(const ScanShape* s) {
    ScanMemory memory = {};
    ssd_work(&memory, s, false);
    return memory.saved.used;
}
static inline size_t ssd_scratch_bytes(const ScanShape* s, bool backward) {
    ScanMemory memory = {};
    ssd_work(&memory, s, backward);
    return memory.scratch.used;
}

// Dies for a shape that the kernels do not support.
static inline void ssd_check(const Scan* a, const ScanShape* s) {
    if (s->K != SSD_K || s->V != SSD_V || s->key_head != 0 || !a->log_decay || a->beta)
        die("no kernels for a scan of heads of %d x %d, %s, %s", s->K, s->V,
            a->log_decay ? "decay" : "no decay", a->beta ? "delta rule" : "no delta rule");
    scan_check_rows(s);
}

// ----------------------------------------------------------------------------
// cumulative log decays

// Heads and threads of a thread block of the kernels that change between [T,NH] and [NH,T]. A warp has every
// eighth head.
enum { SSD_HEADS = 32, SSD_THREADS = 256, SSD_WARPS = SSD_THREADS / 32 };

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

// Writes work.cum, and where there is one work.skip. A thread block has one chunk (blockIdx.x, over all
// sequences) of SSD_HEADS heads.
static __global__ void __launch_bounds__(SSD_THREADS)
    ssd_cum_kernel(SsdWork work, const float* log_decay, const float* skip, ScanShape s) {
    __shared__ float tile[2][SSD_HEADS][SSD_CHUNK + 1];
    int first = (int)blockIdx.y * SSD_HEADS, lane = (int)threadIdx.x % 32, b = (int)blockIdx.x / work.chunks;
    int chunk = (int)blockIdx.x % work.chunks;
#pragma unroll
    for (int i = 0; i < SSD_HEADS * SSD_CHUNK / SSD_THREADS; i++) {
        int h = (int)threadIdx.x % SSD_HEADS,
            t = i * (SSD_THREADS / SSD_HEADS) + (int)threadIdx.x / SSD_HEADS;
        int64_t at = (int64_t)chunk * SSD_CHUNK + t, from = (b * s.T + at) * s.NH + first + h;
        bool exists = first + h < s.NH && at < s.T;
        tile[0][h][t] = exists ? log_decay[from] * 1.44269504f : 0;
        if (work.skip) tile[1][h][t] = exists ? skip[from] : 0;
    }
    __syncthreads();
    for (int h = (int)threadIdx.x / 32; h < SSD_HEADS && first + h < s.NH; h += SSD_WARPS) {
        float x[4], sum = 0;
        for (int i = 0; i < 4; i++) x[i] = sum += tile[0][h][lane * 4 + i];
        float before = warp_sum_before(sum);
        int64_t to = (((int64_t)b * s.NH + first + h) * work.chunks + chunk) * SSD_CHUNK + lane * 4;
        store16(work.cum + to, Pack4{{x[0] + before, x[1] + before, x[2] + before, x[3] + before}});
        if (!work.skip) continue;
        const float* y = &tile[1][h][lane * 4];
        store16(work.skip + to, Pack4{{y[0], y[1], y[2], y[3]}});
    }
}

// ----------------------------------------------------------------------------
// states

// SLICES thread blocks share a head: 2 where one chain runs, to occupy all SMs; 1 where both do, since slices
// copy v and do twice.
template <int SLICES_, int STAGES_> struct SsdStates {
    static constexpr int SLICES = SLICES_, STAGES = STAGES_, ROWS = SSD_K / SLICES, WARPS = ROWS / 16;
    static constexpr int COMPUTING = WARPS * 32, THREADS = COMPUTING + 32; // and the TMA producer
    struct Shared {
        struct {
            bf16 keys[SSD_CHUNK * ROWS], values[SSD_CHUNK * SSD_V];
        } stage[STAGES];
        bf16 out[WARPS][16 * SSD_V];
        float cum[STAGES][SSD_CHUNK];
        float weight[WARPS][SSD_CHUNK];
        uint64_t full[STAGES], empty[STAGES]; // mbarriers
    };
};

struct SsdChainTensors {
    PanelTensor keys, values;
    bf16* states; // written
};

// Address in the state of the pair of accumulators (n, half) of the lane
__device__ static inline float* ssd_state_pair(float* state, int n, int half) {
    int lane = (int)threadIdx.x % 32;
    return state + (half * 8 + lane / 4) * SSD_V + n * 8 + lane % 4 * 2;
}

// The chain of a thread block. BACKWARD: the gradients of the states, from q and dout.
template <class F, bool BACKWARD> struct SsdChain {
    const SsdChainTensors& tensors;
    const SsdWork& work;
    typename F::Shared& shared;
    int64_t head, b;
    int h, slice;

    __device__ int chunk(int step) const { return BACKWARD ? work.chunks - 1 - step : step; }

    // Starts copying the tiles of a step. Called by one thread, or with cp.async by all that compute.
    __device__ void copy(int step) const {
        constexpr int THREADS = F::COMPUTING;
        int i = step % F::STAGES, first = chunk(step) * SSD_CHUNK;
        auto& stage = shared.stage[i];
        uint64_t* full = &shared.full[i];
        if (step < work.chunks) {
            panel_expect(full, sizeof stage + sizeof shared.cum[i]);
            for (int n = 0; n < F::ROWS / 64; n++)
                panel_copy<SSD_CHUNK, THREADS>(stage.keys + n * SSD_CHUNK * 64, tensors.keys, b,
                                               slice * (F::ROWS / 64) + n, first, full);
            panel_copy<SSD_CHUNK, THREADS>(stage.values, tensors.values, b, h, first, full);
            panel_copy_numbers<SSD_CHUNK>(shared.cum[i],
                                          work.cum + (head * work.chunks + chunk(step)) * SSD_CHUNK, full);
        }
        panel_commit();
    }
    // The TMA producer's thread
    __device__ void produce() const {
#if SM90_CODE
        for (int step = 0; step < work.chunks; step++) {
            sm90_wait(&shared.empty[step % F::STAGES], (uint32_t)(step / F::STAGES % 2 ^ 1));
            copy(step);
        }
#endif
    }
    // Waits for the tiles of a step.
    __device__ void wait(int step) const {
#if SM90_CODE
        sm90_wait(&shared.full[step % F::STAGES], (uint32_t)(step / F::STAGES % 2));
#else
        if (step == 0)
            for (int i = 0; i < F::STAGES - 1; i++) copy(i);
        cp_async_wait_group<F::STAGES - 3>();
        __syncthreads(); // all warps have released step - 2
        if (step > 0) copy(step + F::STAGES - 2);
#endif
    }
    // Releases the tiles of a step.
    __device__ void done(int step) const {
#if SM90_CODE
        sm90_arrive_warp(&shared.empty[step % F::STAGES]);
#endif
    }
    // The warp's keys of a step as fragments, times their tokens' weights; returns the decay of the chunk.
    __device__ float load(uint32_t (&f)[8][4], int step) const {
        int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        const float* cum = shared.cum[step % F::STAGES];
        float* weight = shared.weight[warp];
        const float last = cum[SSD_CHUNK - 1];
        const float4 x = *(const float4*)(cum + lane * 4);
        auto weight_at = [&](float y) { return exp2_approx(BACKWARD ? y : last - y); };
        __syncwarp();
        *(float4*)(weight + lane * 4) =
            make_float4(weight_at(x.x), weight_at(x.y), weight_at(x.z), weight_at(x.w));
        __syncwarp();
        Panels<SSD_CHUNK, true> keys(shared.stage[step % F::STAGES].keys, warp * 16);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            keys.load_a(f[k], k * 16);
            for (int r = 0; r < 4; r++) { // the lane's tokens
                const float2 w = *(const float2*)&weight[k * 16 + r / 2 * 8 + lane % 4 * 2];
                f[k][r] = scale_bf16x2(f[k][r], w.x, w.y);
            }
        }
        return exp2_approx(last);
    }
    // Stores the warp's rows of a state: first to shared memory, then from there.
    __device__ void stage_state(const float (&acc)[1][8][4]) const {
        int lane = (int)threadIdx.x % 32;
        bf16* tile = shared.out[threadIdx.x / 32];
        uint32_t x[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++) scan_pack(x[n], acc, 2 * n);
        __syncwarp();
#if SM90_CODE
        uint32_t at = sm80_lane_a<SSD_V>(tile, lane);
#pragma unroll
        for (int n = 0; n < 4; n++) sm90_stmatrix(sm80_advance<SSD_V>(at, 0, n * 16), x[n]);
#else
#pragma unroll
        for (int i = 0; i < 16; i++) *scan_pair<SSD_V>(tile, lane / 4 + i % 2 * 8, i / 2) = x[i / 4][i % 4];
#endif
        __syncwarp();
    }
    __device__ void store_state(int step) const {
        int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        const char* tile = (const char*)shared.out[warp];
        bf16* to = tensors.states + (head * work.chunks + chunk(step)) * SSD_STATE +
                   (slice * F::ROWS + warp * 16) * SSD_V + lane * 8;
        int4 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = *(const int4*)(tile + sm80_chunk_offset<SSD_V>(i * 4 + lane / 8, lane % 8));
#pragma unroll
        for (int i = 0; i < 4; i++) *(int4*)(to + i * 4 * SSD_V) = x[i];
    }
    // A step: the state S0 in acc, with its fragments f in tiles of the step, becomes S1; next: the fragments
    // of the next step, loaded while wgmma computes.
    __device__ void step(float (&acc)[1][8][4], uint32_t (&f)[8][4], uint32_t (&next)[8][4], float& decay,
                         int i) const {
        stage_state(acc);
#pragma unroll
        for (int e = 0; e < 32; e++) acc[0][e / 4][e % 4] *= decay;
        panels_matmul(acc, f, Panels<SSD_CHUNK, true>(shared.stage[i % F::STAGES].values), 0, [&] {
            if (i + 1 < work.chunks) {
                wait(i + 1);
                decay = load(next, i + 1);
            }
            store_state(i);
        });
        done(i);
    }
    // initial: the block's rows of the fp32 state before the sequence, updated; NULL: none
    __device__ void compute(float* initial) const {
        int chunks = work.chunks, warp = (int)threadIdx.x / 32;
        float acc[1][8][4];
        scan_clear(acc);
        float* state = initial ? initial + warp * 16 * SSD_V : NULL;
        for (int i = 0; state && i < 16; i++) {
            const float2 x = *(const float2*)ssd_state_pair(state, i / 2, i % 2);
            acc[0][i / 2][i % 2 * 2] = x.x;
            acc[0][i / 2][i % 2 * 2 + 1] = x.y;
        }
        uint32_t even[8][4], odd[8][4]; // fragments of even and odd steps
        wait(0);
        float decay = load(even, 0);
        for (int i = 0; i < chunks; i += 2) {
            step(acc, even, odd, decay, i);
            if (i + 1 < chunks) step(acc, odd, even, decay, i + 1);
        }
        for (int i = 0; state && i < 16; i++)
            *(float2*)ssd_state_pair(state, i / 2, i % 2) =
                make_float2(acc[0][i / 2][i % 2 * 2], acc[0][i / 2][i % 2 * 2 + 1]);
    }
    __device__ void run(float* initial) const {
        panel_init(shared.full);
        panel_init(shared.empty, F::WARPS);
        if (threadIdx.x < F::COMPUTING)
            compute(initial);
        else if (threadIdx.x == F::COMPUTING)
            produce();
    }
};

struct SsdStatesTensors {
    SsdChainTensors forward, backward;
};

// Writes the states, their gradients, or both. Grid: B NH SLICES, times 2 for both. state: as in Scan
template <class F, ScanChains CHAINS>
__global__ void __launch_bounds__(F::THREADS, 1)
    ssd_states_kernel(const __grid_constant__ SsdStatesTensors tensors, float* state,
                      const __grid_constant__ SsdWork work, int NH) {
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    constexpr bool BOTH = CHAINS == SCAN_BOTH;
    int block = (int)blockIdx.x / (1 + BOTH), slice = block % F::SLICES;
    int64_t head = block / F::SLICES;
    if (BOTH ? blockIdx.x % 2 : CHAINS == SCAN_BACKWARD)
        SsdChain<F, true>{tensors.backward, work, shared, head, head / NH, (int)(head % NH), slice}.run(NULL);
    else
        SsdChain<F, false>{tensors.forward, work, shared, head, head / NH, (int)(head % NH), slice}.run(
            state ? state + head * SSD_STATE + slice * F::ROWS * SSD_V : NULL);
}

static inline dim3 ssd_head_grid(const SsdWork* work, const ScanShape* s) {
    return dim3((unsigned)(s->B * work->chunks), (unsigned)ceil_div(s->NH, (int)SSD_HEADS));
}

static inline void ssd_cum(const SsdWork* work, const Scan* a, const ScanShape* s, cudaStream_t stream) {
    CUDA_LAUNCH(ssd_cum_kernel, ssd_head_grid(work, s), SSD_THREADS, stream, *work, a->log_decay, a->skip,
                *s);
}

// q or k, whose heads are the same; as many rows in a box
static inline PanelTensor ssd_keys(const bf16* x, const ScanShape* s, int rows) {
    return panel_tensor(x, s->B, s->T, SSD_K / 64, s->key_row, rows);
}
static inline PanelTensor ssd_values(const bf16* x, const ScanShape* s, int64_t row_stride, int rows) {
    return panel_tensor(x, s->B, s->T, s->NH, row_stride, rows);
}
// Stored states, one after another
static inline PanelTensor ssd_stored(const bf16* x, const SsdWork* work, const ScanShape* s) {
    return panel_tensor(x, 1, s->B * s->NH * work->chunks * SSD_K, 1, SSD_V, SSD_K);
}

template <ScanChains CHAINS>
static inline void ssd_launch_states(const SsdStatesTensors& t, const SsdWork* work, const Scan* a,
                                     const ScanShape* s, cudaStream_t stream) {
    constexpr bool BOTH = CHAINS == SCAN_BOTH;
    typedef SsdStates<2, 3> Small;
    typedef std::conditional_t<BOTH, SsdStates<1, 4>, SsdStates<2, 6>> Large;
    auto launch = [&](auto f) {
        typedef decltype(f) F;
        scan_launch<F>(ssd_states_kernel<F, CHAINS>, (1 + BOTH) * s->B * s->NH * F::SLICES, stream, t,
                       a->state, *work, s->NH);
    };
    if (scan_is_large())
        launch(Large());
    else
        launch(Small());
}

// dout: NULL in a forward pass
static inline void ssd_states(const SsdWork* work, const Scan* a, const bf16* dout, ScanChains chains,
                              const ScanShape* s, cudaStream_t stream) {
    SsdStatesTensors t = {};
    t.forward = {ssd_keys(a->k, s, SSD_CHUNK), ssd_values(a->v, s, s->value_row, SSD_CHUNK), work->states};
    if (dout)
        t.backward = {ssd_keys(a->q, s, SSD_CHUNK), ssd_values(dout, s, s->NH * SSD_V, SSD_CHUNK),
                      work->dstates};
    auto launch = chains == SCAN_FORWARD    ? ssd_launch_states<SCAN_FORWARD>
                  : chains == SCAN_BACKWARD ? ssd_launch_states<SCAN_BACKWARD>
                                            : ssd_launch_states<SCAN_BOTH>;
    launch(t, work, a, s, stream);
}
