/*
Products of one row with the weights of a model, one after another, by thread blocks that stay on their
multiprocessors: what matvec.cuh computes for one row, with the same bits. Part of single.cuh.

    words       8 bytes in global memory, half data and half tag. A reader polls a word until it has the tag
                that it waits for: one way through L2 from block to block, no barrier of the grid
    shares      a block has every grid-th tile of 8 rows of a weight
    ring        of pieces of tiles in shared memory, which a producer warp fills by bulk copies, as far ahead
                as there is room; 8 consumer warps share the channels of a piece as matvec's do
*/
#pragma once

#include "hopper.cuh"
#include "matvec.cuh"

enum {
    SINGLE_TILES = 4,  // of a block, computed together
    SINGLE_COPIES = 4, // of words that all blocks poll; a block has one copy's
    SINGLE_FLUSH = 8,  // tiles whose sums are added up together
    SINGLE_STEPS = 3,  // of a warp in a piece, at most
    SINGLE_PIECE = SINGLE_STEPS * MATVEC_WARPS * MATVEC_STEP, // channels of a piece, at most
    SINGLE_MAX_SLOTS = 28,                                    // of the ring
    SINGLE_CONSUMERS = 32 * MATVEC_WARPS,
    SINGLE_THREADS = SINGLE_CONSUMERS + 32
};

// Two halves: rows n and half + n of a weight are one column of the result, of SwiGLU.
typedef struct {
    const bf16 *w, *norm; // [rows, K]; weight of the RMSNorm before it, NULL: none. Of layer 0
    int K, half;          // half: 0: no halves
    int each, rest;       // tiles of each block, and how many blocks have one more
    int piece;            // channels that are copied at once
} SingleMatrix;

// In the order of a layer
enum { SINGLE_IN, SINGLE_OUT, SINGLE_GATE_UP, SINGLE_DOWN, SINGLE_HEAD, SINGLE_MATRICES };

// The ring, and a ring of two for the weights of norms. Strides in elements.
typedef struct {
    int slots, slot_stride, row_stride;
    int barriers, norms, ring,
        bytes; // offsets in shared memory; barriers: full, empty, and of norms the same
} SingleRing;

// ----------------------------------------------------------------------------
// words

__device__ static inline void single_put(uint2* at, uint32_t data, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(data), "r"(tag) : "memory");
}
// The same for words that all blocks poll, of which there are copies `stride` apart.
__device__ static inline void single_put_all(uint2* at, int stride, uint32_t data, uint32_t tag) {
#pragma unroll
    for (int i = 0; i < SINGLE_COPIES; i++) single_put(at + i * stride, data, tag);
}
__device__ static inline uint4 single_look(const uint2* at) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
}
__device__ static inline bool single_tagged(const uint4& x, uint32_t tag) { return x.y == tag && x.w == tag; }
// Waits for two words, at an even index.
__device__ static inline uint2 single_take2(const uint2* at, uint32_t tag) {
    uint4 x;
    do x = single_look(at);
    while (!single_tagged(x, tag));
    return {x.x, x.z};
}
// Waits for two words at `a` and two at `b`, which are even indices.
__device__ static inline Raw8 single_take(const uint2* a, const uint2* b, uint32_t tag) {
    uint4 x, y;
    do x = single_look(a), y = single_look(b);
    while (!single_tagged(x, tag) || !single_tagged(y, tag));
    return {x.x, x.z, y.x, y.z};
}

// ----------------------------------------------------------------------------
// shares

// What a block has of a matrix: `elements` tiles, which with halves are those of both.
struct SingleShare {
    int first, elements, half;
    __device__ int row(int e) const {
        int tile = half ? e / 2 : e;
        return 8 * (first + tile * (int)gridDim.x) + (half ? e % 2 * half : 0);
    }
};

// Goes through the matrices of a step in order. Each begins at another block, where the one before ended.
struct SingleWalk {
    int i, kind, layer, begin; // begin: block that has tile 0 of the next matrix

    __device__ SingleShare next(const SingleMatrix* matrices, int layers) {
        kind = ++i < 4 * layers ? i % 4 : (int)SINGLE_HEAD, layer = i / 4;
        const SingleMatrix& m = matrices[kind];
        int grid = (int)gridDim.x, first = (int)blockIdx.x - begin;
        if (first < 0) first += grid;
        if ((begin += m.rest) >= grid) begin -= grid;
        int n = m.each + (first < m.rest);
        return {first, m.half ? 2 * n : n, m.half};
    }
};

// ----------------------------------------------------------------------------
// the ring

struct SingleSlots {
    uint64_t *full, *empty;
    int slot, phase;

    __device__ void next(int n) {
        if (++slot == n) slot = 0, phase ^= 1;
    }
};

__device__ static inline SingleSlots single_slots(char* shared, const SingleRing& r) {
    uint64_t* barriers = (uint64_t*)(shared + r.barriers);
    return {barriers, barriers + r.slots, 0, 0};
}
__device__ static inline SingleSlots single_norm_slots(char* shared, const SingleRing& r) {
    uint64_t* barriers = (uint64_t*)(shared + r.barriers) + 2 * r.slots;
    return {barriers, barriers + 2, 0, 0};
}

// By one thread
__device__ static inline void single_init(char* shared, const SingleRing& r) {
#if SM90_CODE
    SingleSlots slots = single_slots(shared, r), norms = single_norm_slots(shared, r);
    for (int i = 0; i < r.slots; i++) {
        sm90_barrier_init(slots.full + i, 1, 0);
        sm90_barrier_init(slots.empty + i, MATVEC_WARPS, 0);
    }
    for (int i = 0; i < 2; i++) {
        sm90_barrier_init(norms.full + i, 1, 0);
        sm90_barrier_init(norms.empty + i, MATVEC_WARPS, 0);
    }
    sm90_barrier_init_fence();
#endif
}

// By one lane: a slot of which the warp needs nothing any more
__device__ static inline void single_release(uint64_t* empty) {
#if SM90_CODE
    sm90_arrive(empty);
#endif
}

// By one warp: copies all that the consumers of the block take from both rings. layer_stride: elements from a
// layer's weights to the next one's.
__device__ static inline void single_produce(char* shared, const SingleRing& r, const SingleMatrix* matrices,
                                             int layers, int64_t layer_stride) {
    SingleSlots slots = single_slots(shared, r), norms = single_norm_slots(shared, r);
    SingleWalk walk = {-1, 0, 0, 0};
    int lane = (int)threadIdx.x % 32;
    for (int i = 0; i <= 4 * layers; i++) {
        SingleShare share = walk.next(matrices, layers);
        const SingleMatrix& m = matrices[walk.kind];
        int64_t of_layer = walk.kind == SINGLE_HEAD ? 0 : walk.layer * layer_stride;
        if (share.elements == 0) continue;
        if (m.norm) {
            int bytes = m.K * (int)sizeof(bf16);
            bulk_wait(norms.empty + norms.slot, (uint32_t)norms.phase ^ 1);
            if (lane == 0) {
                bulk_expect(norms.full + norms.slot, bytes);
                bulk_copy(shared + r.norms + norms.slot * bytes, m.norm + of_layer, bytes,
                          norms.full + norms.slot);
            }
            norms.next(2);
        }
        for (int e = 0; e < share.elements; e += SINGLE_TILES)
            for (int k = 0; k < m.K; k += m.piece)
                for (int g = e; g < min(e + SINGLE_TILES, share.elements); g++) {
                    int bytes = min(m.piece, m.K - k) * (int)sizeof(bf16);
                    bf16* to = (bf16*)(shared + r.ring) + slots.slot * r.slot_stride + lane * r.row_stride;
                    bulk_wait(slots.empty + slots.slot, (uint32_t)slots.phase ^ 1);
                    if (lane == 0) bulk_expect(slots.full + slots.slot, 8 * bytes);
                    __syncwarp();
                    if (lane < 8)
                        bulk_copy(to, m.w + of_layer + (int64_t)(share.row(g) + lane) * m.K + k, bytes,
                                  slots.full + slots.slot);
                    slots.next(r.slots);
                }
    }
}

// ----------------------------------------------------------------------------
// consumers

__device__ static inline void single_barrier() {
    asm volatile("bar.sync 1, %0;" ::"r"((int)SINGLE_CONSUMERS) : "memory");
}

// Consumer warps. A warp's channels are those of steps warp, warp + 8, .., which it alone writes to and reads
// from `input`.
struct SingleConsumer {
    char* shared;
    const SingleRing& r;
    bf16* input; // [K]
    float* sums; // [2, MATVEC_WARPS, SINGLE_FLUSH, 8]
    int tid, lane, warp;
    SingleSlots slots, norms;
    int flushes;

    // Calls f(first of eight channels) for the warp's channels.
    template <class F> __device__ void channels(int K, const F& f) const {
        for (int i = lane; i / 4 * MATVEC_WARPS * MATVEC_STEP < K; i += 32) {
            int k = (i / 4 * MATVEC_WARPS + warp) * MATVEC_STEP + i % 4 * 8;
            if (k < K) f(k);
        }
    }
    // RMSNorm of x [K] in shared memory. A lane adds up as in matvec_norm_x.
    __device__ void norm_row(const bf16* x, int K, float eps) {
        const bf16* weight = (const bf16*)(shared + r.norms) + norms.slot * K;
        float sum = 0, v[8], w[8];
        for (int c = lane; c < K / 8; c += 32) {
            unpack8(v, load_raw8(x + 8 * c));
            for (int i = 0; i < 8; i++) sum += v[i] * v[i];
        }
        float rstd = norm_rstd(__fdividef(warp_sum(sum), (float)K), eps);
        bulk_wait(norms.full + norms.slot, (uint32_t)norms.phase);
        channels(K, [&](int k) {
            unpack8(v, load_raw8(x + k));
            unpack8(w, load_raw8(weight + k));
            for (int i = 0; i < 8; i++) v[i] *= rstd * w[i];
            store16(input + k, pack8(v));
        });
        __syncwarp();
        if (lane == 0) single_release(norms.empty + norms.slot);
        norms.next(2);
    }
    // The warp's channels of a row of words. A lane polls up to GROUPS times four channels at a time, and
    // only those that are missing: what all blocks poll comes from few slices of L2.
    template <int GROUPS> __device__ void take_input(const uint2* words, int K, uint32_t tag) {
        for (int first = lane; first / 8 * MATVEC_WARPS * MATVEC_STEP < K; first += 32 * GROUPS) {
            uint4 x[GROUPS];
            int k[GROUPS], missing = 0;
#pragma unroll
            for (int j = 0; j < GROUPS; j++) {
                int i = first + 32 * j;
                k[j] = (i / 8 * MATVEC_WARPS + warp) * MATVEC_STEP + i % 8 * 4;
                missing |= (k[j] < K) << j;
            }
            while (missing) {
#pragma unroll
                for (int j = 0; j < GROUPS; j++)
                    if (missing >> j & 1) x[j] = single_look(words + k[j] / 2);
#pragma unroll
                for (int j = 0; j < GROUPS; j++)
                    if ((missing >> j & 1) && single_tagged(x[j], tag)) {
                        *(uint2*)(input + k[j]) = {x[j].x, x[j].z};
                        missing &= ~(1 << j);
                    }
            }
        }
        __syncwarp();
    }
    // The warp's sums of one row with COUNT tiles, whose first piece is the ring's next slot
    template <int COUNT> __device__ void add_tiles(float* to, const SingleMatrix& m) {
        constexpr int LOADED = COUNT > 3 ? 2 : 3; // steps
        float acc[COUNT][4] = {};
        const bf16* ring = (const bf16*)(shared + r.ring) + lane / 4 * r.row_stride + lane % 4 * 8;
        for (int begin = 0; begin < m.K; begin += m.piece) {
            int end = min(begin + m.piece, m.K), used = slots.slot, from[COUNT];
            int first = begin + ((warp - begin / MATVEC_STEP) & (MATVEC_WARPS - 1)) * MATVEC_STEP;
#pragma unroll
            for (int g = 0; g < COUNT; g++) {
                from[g] = slots.slot * r.slot_stride - begin;
                bulk_wait(slots.full + slots.slot, (uint32_t)slots.phase);
                slots.next(r.slots);
            }
#pragma unroll
            for (int step = 0; step < SINGLE_STEPS; step += LOADED) {
                Raw8 w[LOADED][COUNT], x[LOADED];
                auto at = [&](int s) { return first + (step + s) * MATVEC_WARPS * MATVEC_STEP; };
                if (at(0) >= end) break;
#pragma unroll
                for (int s = 0; s < LOADED; s++) {
                    x[s] = Raw8{};
                    if (step + s >= SINGLE_STEPS) continue;
                    if (lane < 4 && at(s) + 8 * lane < end) x[s] = load_raw8(input + at(s) + 8 * lane);
#pragma unroll
                    for (int g = 0; g < COUNT; g++) {
                        w[s][g] = Raw8{};
                        if (at(s) + lane % 4 * 8 < end) w[s][g] = load_raw8(ring + from[g] + at(s));
                    }
                }
#pragma unroll
                for (int s = 0; s < LOADED; s++) {
                    if (step + s >= SINGLE_STEPS || at(s) >= end) break;
                    uint32_t even[4] = {x[s].x, 0, x[s].y, 0}, odd[4] = {x[s].z, 0, x[s].w, 0};
#pragma unroll
                    for (int g = 0; g < COUNT; g++) sm80_mma(acc[g], even, w[s][g].x, w[s][g].y, acc[g]);
#pragma unroll
                    for (int g = 0; g < COUNT; g++) sm80_mma(acc[g], odd, w[s][g].z, w[s][g].w, acc[g]);
                }
            }
            __syncwarp();
            used += lane;
            if (lane < COUNT) single_release(slots.empty + (used < r.slots ? used : used - r.slots));
        }
#pragma unroll
        for (int g = 0; g < COUNT; g++)
            if (lane < 4) *(float2*)(to + 8 * g + 2 * lane) = {acc[g][0], acc[g][1]};
    }
    // The block's columns of the product of `input`, two at a time: store(first column, sums, the other
    // half's sums).
    template <class Store>
    __device__ void multiply(const SingleMatrix& m, const SingleShare& share, const Store& store) {
        for (int begin = 0; begin < share.elements; begin += SINGLE_FLUSH) {
            int end = min(begin + SINGLE_FLUSH, share.elements);
            float* flush = sums + (flushes++ & 1) * MATVEC_WARPS * SINGLE_FLUSH * 8;
            for (int e = begin; e < end; e += SINGLE_TILES) {
                float* to = flush + (warp * SINGLE_FLUSH + e - begin) * 8;
                int count = min(SINGLE_TILES, end - e);
                if (count == 4)
                    add_tiles<4>(to, m);
                else if (count == 3)
                    add_tiles<3>(to, m);
                else if (count == 2)
                    add_tiles<2>(to, m);
                else
                    add_tiles<1>(to, m);
            }
            single_barrier();
            auto total = [&](int e, int column) {
                float2 sum = {};
                for (int w = 0; w < MATVEC_WARPS; w++) {
                    float2 x = *(float2*)(flush + (w * SINGLE_FLUSH + e) * 8 + column);
                    sum.x += x.x, sum.y += x.y;
                }
                return sum;
            };
            int pairs = share.half ? 1 : 0;
            if (tid < (end - begin) >> pairs << 2) {
                int e = tid / 4 << pairs, column = tid % 4 * 2;
                float2 sum = total(e, column), other = {};
                if (pairs) other = total(e + 1, column);
                store(share.row(begin + e) + column, sum, other);
            }
        }
    }
};
