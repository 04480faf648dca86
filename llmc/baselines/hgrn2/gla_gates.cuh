/*
What the kernels of gla.cuh share: the tensors of a pass, gates in registers, products of decays.

Chunks have 64 tokens, tiles 16. A warp computes 16 channels of K, over all tokens of a chunk, so that
products of decays over tokens need registers and shuffles only. A lane holds element [n][e] of a tile,

    token 8 n + 2 (lane % 4) + e % 2  of channel lane / 4 + 8 (e / 2),

which is both the A operand [channels, tokens] of mma.sync and two of its accumulators.

Within a chunk every pair of tokens i > j is computed by tensor cores, and no decay is ever divided by
another: let `bit` be the highest bit in which i and j differ, m = i with the bits below it cleared. i lies in
the upper half of a block of 2^(bit + 1) tokens, j in the lower, and the decay between them is

    prod_{j < t <= i} f_t = prod_{j < t < m} f_t  prod_{m <= t <= i} f_t,    both <= 1.

So level `bit` has one operand, X_t = q_t times the second product for t in an upper half, and k_t times the
first for t in a lower half; scores of the pairs of the level are X X^T.
*/
#pragma once

#include "../../cuda/mma_sm80.cuh"
#include "../../layers/rmsnorm.cuh"

enum { GLA_HEAD = 128, GLA_CHUNK = 64, GLA_TILE = 16, GLA_TILES = 4 };
enum { GLA_THREADS = 256 };               // a warp for every 16 channels of a head
enum { GLA_STATE = GLA_HEAD * GLA_HEAD }; // elements of a state

// States at the borders of chunks, of one direction: S at the start of each chunk (forward), or the gradient
// of the state at its end (backward). A segment is a run of chunks, whose thread block starts from zero:
//
//     state = local + decay * segment_state        decay per channel of K
//
// A state is stored as fragments: [K / 16, V / 16, 32 lanes, 8], a lane's A operand of 16 x 16 elements.
typedef struct {
    bf16* local;          // [B NH, chunks, K V]
    float* decay;         // [B NH, chunks, K]
    float* segment_sum;   // [B NH, segments, K V] what a segment adds
    float* segment_decay; // [B NH, segments, K]
    bf16* segment_state;  // [B NH, segments, K V]
} GlaStates;

// What the kernels read and write; NULL where a pass has no such tensor.
typedef struct {
    int T, NH, chunks, segments, segment_chunks;
    int64_t row_stride;
    float scale;
    const bf16 *q, *f, *v, *dout;
    const float* bound;
    float* state;
    bf16 *o, *dq, *df, *dv;
    float* dbound_partial;    // [B chunks, NH K]
    GlaStates states[2];      // forward, backward
    const int32_t* doc_start; // as in Gla
} GlaWork;

// A chunk of a head
struct GlaBlock {
    int chunk, count; // of its tokens
    int64_t head;     // b NH + h
    int64_t row;      // of its first token in [B T]
    int column;       // of the head in a row

    __device__ static GlaBlock of(const GlaWork& w, unsigned head, int chunk) {
        unsigned b = head / (unsigned)w.NH, h = head - b * (unsigned)w.NH;
        int first = chunk * GLA_CHUNK;
        return {chunk, min(GLA_CHUNK, w.T - first), head, (int64_t)b * w.T + first, (int)h * GLA_HEAD};
    }
};

// Starts copying WIDTH columns of the chunk's rows of x, from `column` of the head on, to a swizzled tile;
// rows past T become zero.
template <int WIDTH = GLA_HEAD, int THREADS = WIDTH * 2>
__device__ static inline void gla_copy(bf16* tile, const bf16* x, int64_t row_stride, const GlaBlock& b,
                                       int column = 0) {
    sm80_copy_tile<WIDTH, GLA_CHUNK, THREADS>(tile, x + b.row * row_stride + b.column + column, 0, b.count,
                                              row_stride);
}
// Stores the tile to the chunk's rows of x.
template <int WIDTH = GLA_HEAD>
__device__ static inline void gla_store_rows(bf16* x, int64_t row_stride, const bf16* tile, const GlaBlock& b,
                                             int column = 0) {
    for (int i = (int)threadIdx.x; i < b.count * (WIDTH / 8); i += WIDTH * 2) {
        int row = i / (WIDTH / 8), chunk = i % (WIDTH / 8);
        *(uint4*)(x + (b.row + row) * row_stride + b.column + column + chunk * 8) =
            *(const uint4*)((const char*)tile + sm80_chunk_offset<WIDTH>(row, chunk));
    }
}

// ----------------------------------------------------------------------------
// gates

// The warp's raw values of a tile, bf16 pairs of tokens: register r holds element [r / 2][2 (r % 2)] and the
// next.
template <int WIDTH = GLA_HEAD>
__device__ static inline void gla_load(uint32_t (&raw)[4], const bf16* rows, int tile) {
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    ldmatrix_trans(raw, sm80_advance<WIDTH>(sm80_lane_b<WIDTH>(rows, lane), tile * GLA_TILE, warp * 16));
}
__device__ static inline float gla_raw(const uint32_t (&raw)[4], int n, int e) {
    uint32_t pair = raw[2 * n + e / 2];
    return __uint_as_float(e % 2 ? pair & 0xffff0000u : pair << 16);
}
__device__ static inline void gla_pack(uint32_t (&packed)[4], const float (&x)[2][4]) {
    for (int r = 0; r < 4; r++) packed[r] = pack_bf16x2(x[r / 2][r % 2 * 2], x[r / 2][r % 2 * 2 + 1]);
}

// f = bound + (1 - bound) sigmoid(x) and k = 1 - f, each without cancellation
__device__ static inline void gla_gate(float& f, float& k, float x, float bound) {
    float least = -80; // exp(-x) is finite, NaN stays NaN
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(least));
    float t = exp2_approx(-1.44269504f * x), open = __fdividef(1 - bound, 1 + t);
    k = t * open;
    f = k < 0.5f ? 1 - k : bound + open;
}

// Bit i: token i of the tile is the first one of a packed document. Called by all lanes of a warp.
template <bool DOCS>
__device__ static inline unsigned gla_walls(const GlaWork& w, const GlaBlock& b, int tile) {
    if (!DOCS) return 0;
    int token = tile * GLA_TILE + (int)threadIdx.x % GLA_TILE;
    bool wall = token < b.count && w.doc_start[b.row + token] == b.chunk * GLA_CHUNK + token;
    return __ballot_sync(~0u, wall);
}
__device__ static inline bool gla_is_wall(unsigned walls, int n, int e) {
    return walls >> (n * 8 + (int)threadIdx.x % 4 * 2 + e % 2) & 1;
}

// f and k of a tile. The tile's tokens from `count` on leave the state unchanged: f = 1, k = 0.
__device__ static inline void gla_gates(float (&f)[2][4], float (&k)[2][4], const uint32_t (&raw)[4],
                                        const float (&bound)[2], int count) {
    int token = (int)threadIdx.x % 4 * 2;
    for (int i = 0; i < 8; i++) {
        int n = i / 4, e = i % 4;
        gla_gate(f[n][e], k[n][e], gla_raw(raw, n, e), bound[e / 2]);
    }
    if (count >= GLA_TILE) return;
    __syncwarp(); // a branch, which most tiles do not take, and not a select for every element
    for (int i = 0; i < 8; i++)
        if (i / 4 * 8 + token + i % 2 >= count) f[i / 4][i % 4] = 1, k[i / 4][i % 4] = 0;
}

// At a tile's walls the decay f becomes 0; k stays that of the gate.
__device__ static inline void gla_close(float (&f)[2][4], unsigned walls) {
    if (!walls) return;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (gla_is_wall(walls, i / 4, i % 4)) f[i / 4][i % 4] = 0;
}

// q = scale SiLU(raw), and its slope
__device__ static inline void gla_query(float (&q)[2][4], float (&slope)[2][4], const uint32_t (&raw)[4],
                                        float scale) {
    for (int i = 0; i < 8; i++) {
        int n = i / 4, e = i % 4;
        float x = gla_raw(raw, n, e), open = sigmoidf(x), scaled = scale * open;
        q[n][e] = x * scaled;
        slope[n][e] = scaled + q[n][e] * (1 - open);
    }
}
__device__ static inline void gla_query(float (&q)[2][4], const uint32_t (&raw)[4], float scale) {
    float slope[2][4];
    gla_query(q, slope, raw, scale);
}

// Loads the lower bounds of the lane's two channels; the warp has the head's 16 channels from `channel` on.
__device__ static inline void gla_bounds(float (&bound)[2], const GlaWork& w, const GlaBlock& b,
                                         int channel) {
    channel += b.column + (int)threadIdx.x % 32 / 4;
    for (int i = 0; i < 2; i++) bound[i] = w.bound ? w.bound[channel + 8 * i] : 0;
}

// 8x8 matrix of a fragment, transposed: an A operand becomes a B operand.
__device__ static inline uint32_t gla_transpose(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// ----------------------------------------------------------------------------
// products of decays

// Does the element's token lie in the upper half of its block of 2^(bit + 1) tokens?
__device__ static inline bool gla_upper(int bit, int n, int e) {
    return (bit == 0 ? e : bit == 3 ? n : (int)threadIdx.x >> (bit - 1)) & 1;
}

// Products within blocks of 2^bit tokens: pre from the block's first token to the element's, suf from the
// next token to the block's last. Calls level(bit) for bit 0 to 3, and returns with those of the whole tile,
// whose product is total of the lane's two channels.
struct GlaProducts {
    float pre[2][4], suf[2][4], total[2];

    template <class Level> __device__ void compute(const float (&f)[2][4], Level level) {
        float block[2][4], sibling[2][4];
        for (int i = 0; i < 8; i++)
            pre[i / 4][i % 4] = block[i / 4][i % 4] = f[i / 4][i % 4], suf[i / 4][i % 4] = 1;
#pragma unroll
        for (int bit = 0; bit < 4; bit++) {
            level(bit);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int n = i / 4, e = i % 4;
                sibling[n][e] = bit == 0   ? block[n][e ^ 1]
                                : bit == 3 ? block[n ^ 1][e]
                                : e % 2    ? sibling[n][e - 1]
                                           : __shfl_xor_sync(~0u, block[n][e], 1 << (bit - 1));
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int n = i / 4, e = i % 4;
                bool upper = gla_upper(bit, n, e);
                pre[n][e] *= upper ? sibling[n][e] : 1;
                suf[n][e] *= upper ? 1 : sibling[n][e];
                block[n][e] = bit > 0 && e % 2 ? block[n][e - 1] : block[n][e] * sibling[n][e];
            }
        }
        total[0] = block[0][0];
        total[1] = block[0][2];
    }
    // x = X of level `bit`; only within level(bit) of compute, where the products are those of the level
    __device__ void operand(float (&x)[2][4], const float (&q)[2][4], const float (&k)[2][4], int bit) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int n = i / 4, e = i % 4;
            bool upper = gla_upper(bit, n, e);
            x[n][e] = (upper ? q[n][e] : k[n][e]) * (upper ? pre[n][e] : suf[n][e]);
        }
    }
};

__device__ static inline void gla_multiply(float (&x)[2][4], const float (&a)[2][4], const float (&b)[2][4]) {
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = a[i / 4][i % 4] * b[i / 4][i % 4];
}

__device__ static inline void gla_scale(float (&x)[2][4], const float (&a)[2][4], const float (&factor)[2]) {
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = a[i / 4][i % 4] * factor[i % 4 / 2];
}

// ----------------------------------------------------------------------------
// states

// Fragments of a state in flight: the two terms
struct GlaFragment {
    uint4 local, segment;

    __device__ void load(const GlaWork& w, const GlaStates& s, const GlaBlock& b, int fragment) {
        int64_t chunk = b.head * w.chunks + b.chunk,
                segment_index = b.head * w.segments + b.chunk / w.segment_chunks;
        int at = fragment * 32 + (int)threadIdx.x % 32;
        local = ((const uint4*)s.local)[chunk * (GLA_STATE / 8) + at];
        segment = ((const uint4*)s.segment_state)[segment_index * (GLA_STATE / 8) + at];
    }
    // The fragment, rounded once; decay of the lane's two channels, which is rounded too
    __device__ void state(uint32_t (&packed)[4], const __nv_bfloat162 (&decay)[2]) const {
        const uint32_t terms[2][4] = {{local.x, local.y, local.z, local.w},
                                      {segment.x, segment.y, segment.z, segment.w}};
        for (int r = 0; r < 4; r++) {
            __nv_bfloat162 x[2], sum;
            memcpy(&x[0], &terms[0][r], sizeof sum), memcpy(&x[1], &terms[1][r], sizeof sum);
            sum = __hfma2(decay[r % 2], x[1], x[0]);
            memcpy(&packed[r], &sum, sizeof sum);
        }
    }
};

// The bits of an 8 x 8 matrix, a lane's columns 2 (lane % 4) and the next of row lane / 4, whose row and
// column differ in `bit` < 3 and in none above
__device__ static inline uint32_t gla_mask(int bit) {
    int lane = (int)threadIdx.x % 32, differ = (lane % 4 * 2) ^ lane / 4;
    return (differ >> bit == 1 ? 0xffffu : 0) | ((differ ^ 1) >> bit == 1 ? 0xffff0000u : 0);
}
// Those with row > column
__device__ static inline uint32_t gla_below(void) {
    int row = (int)threadIdx.x % 32 / 4, column = (int)threadIdx.x % 4 * 2;
    return (row > column ? 0xffffu : 0) | (row > column + 1 ? 0xffff0000u : 0);
}
// Those with row = column
__device__ static inline uint32_t gla_diagonal(void) {
    int row = (int)threadIdx.x % 32 / 4, column = (int)threadIdx.x % 4 * 2;
    return (row == column ? 0xffffu : 0) | (row == column + 1 ? 0xffff0000u : 0);
}

// Stores a block of 16 x 16 to [64, 64] tokens: packed[h][n] is rows 8 h, columns 8 n.
__device__ static inline void gla_store_block(bf16* to, const uint32_t (&packed)[2][2], int i0, int j0) {
    int lane = (int)threadIdx.x % 32;
    for (int n = 0; n < 2; n++) {
        char* at = (char*)to + sm80_chunk_offset<GLA_CHUNK>(i0 + lane / 4, j0 / 8 + n) + lane % 4 * 4;
        *(uint32_t*)at = packed[0][n];
        *(uint32_t*)(at + 8 * GLA_CHUNK * 2) = packed[1][n];
    }
}
__device__ static inline void gla_pack_block(uint32_t (&packed)[2][2], const float (&acc)[2][4]) {
    for (int i = 0; i < 4; i++)
        packed[i / 2][i % 2] = pack_bf16x2(acc[i % 2][i / 2 * 2], acc[i % 2][i / 2 * 2 + 1]);
}

// The decay of a chunk's state since its segment's border, for the lane's channels of the 16 from `channel`
// on
__device__ static inline void gla_state_decay(__nv_bfloat162 (&decay)[2], const GlaWork& w,
                                              const GlaStates& s, const GlaBlock& b, int channel) {
    const float* from =
        s.decay + (b.head * w.chunks + b.chunk) * GLA_HEAD + channel + (int)threadIdx.x % 32 / 4;
    decay[0] = __float2bfloat162_rn(from[0]);
    decay[1] = __float2bfloat162_rn(from[8]);
}

// Launches a kernel of SHARED::THREADS threads with a SHARED of dynamic shared memory.
template <class SHARED, class... Parameters, class... Arguments>
static inline void gla_launch(void (*kernel)(Parameters...), dim3 grid, cudaStream_t stream,
                              Arguments... arguments) {
    static_assert(sizeof(SHARED) <= 99 << 10, "a thread block of sm_86 and sm_89 has 99 KiB");
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(SHARED)));
    kernel<<<grid, SHARED::THREADS, sizeof(SHARED), stream>>>(arguments...);
    CUDA_CHECK_LAUNCH();
}
