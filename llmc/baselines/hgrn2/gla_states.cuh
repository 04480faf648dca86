/*
States at the borders of chunks, for gla.cuh:

    forward     S at the start of each chunk;           S_t = diag(f_t) S_{t-1} + k_t v_t^T
    backward    dS, the gradient of the state at the end of each chunk;
                dS_{t-1} = diag(f_t) (dS_t + q_t dout_t^T)      (q times scale)

One thread block a segment of chunks, head and direction. A warp has 16 channels of K and all of V in fp32
accumulators. It adds a tile of 16 tokens at a time; the gates in registers have the layout of operand A:

    acc = diag(product of the tile's f) acc + X^T [16 channels, 16 tokens]  V [16 tokens, 128]
    X = k times the decay from its token to the tile's end, or q times the decay from the tile's start

A segment starts from a zero state, so that all run in parallel; gla_segments_kernel then computes the
states at their borders. The copies of the next chunk are in flight while one is computed.
*/
#pragma once

#include "gla_gates.cuh"
#include "../shared/scan.cuh"

struct GlaStatesShared {
    static constexpr int THREADS = GLA_THREADS;
    bf16 f[2][GLA_CHUNK * GLA_HEAD], values[2][GLA_CHUNK * GLA_HEAD], q[2][GLA_CHUNK * GLA_HEAD];
};

// Stores the warp's accumulators as fragments of bf16 or float.
__device__ static inline void gla_store_state(bf16* to, const float (&acc)[1][16][4]) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
        float x[8];
        for (int i = 0; i < 8; i++) x[i] = acc[0][n + i / 4][i % 4];
        store16(to + ((warp * 8 + n / 2) * 32 + lane) * 8, pack8(x));
    }
}
__device__ static inline void gla_store_state(float* to, const float (&acc)[1][16][4]) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const float(&x)[4] = acc[0][n];
        *(float4*)(to + ((warp * 8 + n / 2) * 32 + lane) * 8 + n % 2 * 4) =
            make_float4(x[0], x[1], x[2], x[3]);
    }
}

__device__ static inline void gla_store_decay(float* to, const float (&decay)[2]) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (lane % 4 == 0) to[warp * 16 + lane / 4] = decay[0], to[warp * 16 + lane / 4 + 8] = decay[1];
}

template <bool BACKWARD, bool DOCS>
__device__ static inline void gla_states_segment(const GlaWork& w, GlaStatesShared& shared) {
    const GlaStates& s = w.states[BACKWARD];
    int lane = (int)threadIdx.x % 32;
    unsigned head = blockIdx.y;
    int64_t segment = (int64_t)head * w.segments + blockIdx.x;
    int begin = (int)blockIdx.x * w.segment_chunks, end = min(begin + w.segment_chunks, w.chunks);
    auto copy = [&](int stage, int i) {
        GlaBlock b = GlaBlock::of(w, head, BACKWARD ? end - 1 - i : begin + i);
        gla_copy(shared.f[stage], w.f, w.row_stride, b);
        if (BACKWARD) gla_copy(shared.q[stage], w.q, w.row_stride, b);
        gla_copy(shared.values[stage], BACKWARD ? w.dout : w.v, BACKWARD ? w.NH * GLA_HEAD : w.row_stride, b);
    };
    float acc[1][16][4] = {}, decay[2] = {1, 1}, bound[2];
    gla_bounds(bound, w, GlaBlock::of(w, head, begin), (int)threadIdx.x / 32 * 16);
    copy(0, 0);
    for (int i = 0; i < end - begin; i++) {
        GlaBlock b = GlaBlock::of(w, head, BACKWARD ? end - 1 - i : begin + i);
        int stage = i % 2;
        cp_async_wait_all();
        __syncthreads();
        if (i + 1 < end - begin) copy(stage ^ 1, i + 1);
        int64_t at = b.head * w.chunks + b.chunk;
        gla_store_state(s.local + at * GLA_STATE, acc);
        gla_store_decay(s.decay + at * GLA_HEAD, decay);
#pragma unroll 1
        for (int step = 0; step < GLA_TILES; step++) {
            int tile = BACKWARD ? GLA_TILES - 1 - step : step;
            uint32_t raw[4], x[1][4];
            float f[2][4], k[2][4], q[2][4];
            GlaProducts products;
            gla_load(raw, shared.f[stage], tile);
            gla_gates(f, k, raw, bound, b.count - tile * GLA_TILE);
            if constexpr (DOCS) gla_close(f, gla_walls<DOCS>(w, b, tile));
            products.compute(f, [](int) {});
            if (BACKWARD) {
                gla_load(raw, shared.q[stage], tile);
                gla_query(q, raw, w.scale);
            }
            gla_multiply(f, BACKWARD ? q : k, BACKWARD ? products.pre : products.suf);
            gla_pack(x[0], f);
#pragma unroll
            for (int j = 0; j < 64; j++) acc[0][j / 4][j % 4] *= products.total[j % 4 / 2];
            decay[0] *= products.total[0];
            decay[1] *= products.total[1];
            sm80_matmul_ab<GLA_HEAD>(acc, x,
                                     sm80_advance<GLA_HEAD>(sm80_lane_a<GLA_HEAD>(shared.values[stage], lane),
                                                            tile * GLA_TILE, 0));
        }
    }
    gla_store_state(s.segment_sum + segment * GLA_STATE, acc);
    gla_store_decay(s.segment_decay + segment * GLA_HEAD, decay);
}

// Grid: segments, B NH, and 2 for both chains, the backward one first.
template <ScanChains CHAINS, bool DOCS>
__global__ static void __launch_bounds__(GLA_THREADS, 2)
    gla_states_kernel(const __grid_constant__ GlaWork w) {
    extern __shared__ __align__(1024) char shared_bytes[];
    GlaStatesShared& shared = *(GlaStatesShared*)shared_bytes;
    if (CHAINS == SCAN_BACKWARD || (CHAINS == SCAN_BOTH && blockIdx.z == 0))
        gla_states_segment<true, DOCS>(w, shared);
    else
        gla_states_segment<false, DOCS>(w, shared);
}

// States at the borders of segments, one after the other; a thread has the eight elements of a fragment.
// Grid: as above, but 8 for the segments. Reads and updates w.state, where there is one.
__global__ static void __launch_bounds__(GLA_THREADS)
    gla_segments_kernel(const __grid_constant__ GlaWork w, ScanChains chains) {
    enum { GROUP = 8 }; // segments whose loads are in flight at once
    bool backward = chains == SCAN_BACKWARD || (chains == SCAN_BOTH && blockIdx.z == 0);
    const GlaStates& s = w.states[backward];
    int at = (int)(blockIdx.x * GLA_THREADS + threadIdx.x), fragment = at / 32, lane = at % 32;
    int channel = fragment / 8 * 16 + lane / 4, value = fragment % 8 * 16 + lane % 4 * 2;
    int64_t head = blockIdx.y;
    float x[8] = {}, *state = w.state && !backward ? w.state + head * GLA_STATE : NULL;
    auto element = [&](int i) { return (channel + i / 2 % 2 * 8) * GLA_HEAD + value + i / 4 * 8 + i % 2; };
    for (int i = 0; state && i < 8; i++) x[i] = state[element(i)];
    for (int first = 0; first < w.segments; first += GROUP) {
        float4 sums[GROUP][2];
        float decays[GROUP][2];
        auto segment = [&](int i) {
            return head * w.segments + (backward ? w.segments - 1 - first - i : first + i);
        };
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (first + i >= w.segments) break;
            const float4* sum = (const float4*)(s.segment_sum + segment(i) * GLA_STATE + at * 8);
            const float* decay = s.segment_decay + segment(i) * GLA_HEAD + channel;
            sums[i][0] = __ldg(sum);
            sums[i][1] = __ldg(sum + 1);
            decays[i][0] = __ldg(decay);
            decays[i][1] = __ldg(decay + 8);
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (first + i >= w.segments) break;
            float sum[8];
            memcpy(sum, sums[i], sizeof sum);
            store16(s.segment_state + segment(i) * GLA_STATE + at * 8, pack8(x));
            for (int j = 0; j < 8; j++) x[j] = decays[i][j / 2 % 2] * x[j] + sum[j];
        }
    }
    for (int i = 0; state && i < 8; i++) state[element(i)] = x[i];
}

// Computes the chains of w->states.
template <bool DOCS>
static inline void gla_states(const GlaWork* w, int64_t heads, ScanChains chains, cudaStream_t stream) {
    unsigned count = chains == SCAN_BOTH ? 2 : 1;
    auto kernel = chains == SCAN_FORWARD    ? gla_states_kernel<SCAN_FORWARD, DOCS>
                  : chains == SCAN_BACKWARD ? gla_states_kernel<SCAN_BACKWARD, DOCS>
                                            : gla_states_kernel<SCAN_BOTH, DOCS>;
    gla_launch<GlaStatesShared>(kernel, dim3((unsigned)w->segments, (unsigned)heads, count), stream, *w);
    gla_segments_kernel<<<dim3(GLA_STATE / 8 / GLA_THREADS, (unsigned)heads, count), GLA_THREADS, 0,
                          stream>>>(*w, chains);
    CUDA_CHECK_LAUNCH();
}
