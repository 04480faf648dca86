/*
Causal depthwise convolution and SiLU before DeltaNet's and Mamba-2's recurrence, fused with the normalisation
or scaling of its output:

    z_t = bias + w_0 x_{t-3} + w_1 x_{t-2} + w_2 x_{t-1} + w_3 x_t    each channel on its own
    s_t = silu(z_t)
    y_t = s / sqrt(sum s^2 + 1e-6)    heads of the first `normed` channels: DeltaNet's q and k
    y_t = step_t s                    heads of the first NH dh channels: Mamba-2's x, a step a head
    y_t = s                           all others

    x, dx           columns of the fused projection: bf16, `row_stride` elements from row to row
    y, dy           bf16 [B, T, C]
    weight, bias    bf16 [C, 4] and [C]; their gradients float

Inputs before the first token are zeros, or in an extension those of the previous tokens (extend.cuh); with
packed documents (doc_start) those before a token's document are zeros. Only x is kept: the backward pass
recomputes z, s and the heads' norms. Pointers are aligned to 16 bytes; C and row_stride are multiples of 8,
dh is a power of two from 8 to 128.

A thread block is one warp, which has 256 (forward) or 128 (backward, conv_backward.cuh) adjacent channels of
a segment of a sequence. It iterates over tiles of a few tokens, with the copies of the next tile to shared
memory in flight. A tile whose tokens and channels all exist takes a path without bounds checks.
*/
#pragma once

#include <algorithm>
#include "../../layers/layer.cuh"
#include "../../cuda/mma_sm80.cuh"

// Mamba-2's time steps; see mamba2.cuh. The part behind `log_decay` is the backward pass's alone.
typedef struct {
    int64_t NH;
    float *steps, *log_decay;         // [B, T, NH] step, and -step e^A_log; steps NULL: none
    float* skip;                      // [B, T, NH] D / step
    const bf16* dt;                   // column of proj
    bf16* ddt;                        // column of dproj
    const float *dt_bias, *A_log, *D; // [NH]
    float *ddt_bias, *dA_log, *dD;    // [NH]
    const float* dlog_decay;          // [B, T, NH]
    const bf16* dout;                 // [B, T, NH, dh] gradient of o, to which D s was added
} HeadSteps;

typedef struct {
    int64_t B, T, C;
    int64_t row_stride;
    const bf16* weight; // [C, 4]
    const bf16* bias;   // [C], NULL without
    float *dweight, *dbias;
    const bf16* history; // [B, 3, C] inputs of the tokens before, oldest first; NULL: none
    int64_t dh;          // channels of a head
    int64_t normed;      // channels; 0 with steps
    HeadSteps steps;
    const int32_t* doc_start; // [B, T] (llmc/model/documents.h); NULL: a sequence is one document
} Conv;

enum {
    CONV_HISTORY = CONV_WIDTH - 1, // inputs of earlier tokens that a token reads
    CONV_TILE = 8,                 // tokens of a tile of the forward pass
    CONV_AT_ONCE = 4,              // tokens whose heads' norms are summed at once
    CONV_FORWARD_WARPS = 16,       // resident on an SM
    CONV_THREADS = 128             // of a block of the other kernels
};

// Thread blocks that cover n threads of a token, and the threads of a block.
static inline HeadGrid conv_grid(int64_t n) {
    int64_t blocks = ceil_div<int64_t>(n, CONV_THREADS);
    return {(int)blocks, (int)(32 * ceil_div<int64_t>(n, 32 * blocks))};
}

static inline void conv_check(const Conv* s) {
    assert(s->C % 8 == 0 && s->row_stride % 8 == 0 && s->normed % 8 == 0 && s->dh > 0);
    assert(!s->normed || !s->steps.steps);
    if ((s->normed || s->steps.steps) && (s->dh < 8 || s->dh > 128 || (s->dh & (s->dh - 1))))
        die("convolved heads on the GPU have 8 to 128 channels, a power of two, not %lld", (long long)s->dh);
}

// How a pass cuts the tokens. In the backward pass group g has the segments g, g + groups, ..
struct ConvSegments {
    int parts, groups;          // warps of a token; of them
    int length, of_T, segments; // tokens of a segment; segments of a sequence, of all
};

// A warp has `channels`, a segment a multiple of `tile` tokens. `resident` warps run on an SM at
// once; groups: at most. One segment a group, unless there are more sequences than groups.
static inline ConvSegments conv_segments(const Conv* s, int64_t channels, int64_t tile, int64_t resident,
                                         int64_t groups) {
    ConvSegments cut;
    cut.parts = (int)ceil_div<int64_t>(s->C, channels);
    int64_t fit = resident * device_attribute(cudaDevAttrMultiProcessorCount) / cut.parts;
    groups = std::clamp<int64_t>(fit, 1, std::min(groups, s->B * s->T));
    int64_t of_T = std::clamp<int64_t>(groups / s->B, 1, ceil_div<int64_t>(s->T, 16));
    cut.length = (int)(ceil_div<int64_t>(ceil_div<int64_t>(s->T, of_T), tile) * tile);
    cut.of_T = (int)ceil_div<int64_t>(s->T, cut.length);
    cut.segments = (int)s->B * cut.of_T;
    cut.groups = (int)std::min<int64_t>(groups, cut.segments);
    return cut;
}

// w[tap][i] of N channels, 2 or 4 times two
template <int N> __device__ static inline void conv_weights(float w[CONV_WIDTH][N], const bf16* weight) {
    for (int i = 0; i < N / 2; i++) {
        float both[8]; // four taps of two channels
        unpack8(both, load_raw8(weight + 8 * i));
        for (int tap = 0; tap < CONV_WIDTH; tap++)
            w[tap][2 * i] = both[tap], w[tap][2 * i + 1] = both[CONV_WIDTH + tap];
    }
}

// Sum over the adjacent lanes of a head, returned to each of them.
__device__ static inline float conv_head_sum(float x, int lanes) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        if (lane < lanes) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// Sums of N numbers over a head's LANES lanes, each with the bits of conv_head_sum. The first LANES / N
// lanes of the head return that of x[0], the next ones that of x[1], ..: while a lane has several, a step
// exchanges half of them, so that N sums take N - 1 + log2(LANES / N) shuffles.
template <int LANES, int N> __device__ static inline float conv_head_sums(float (&x)[N]) {
    int lane = (int)threadIdx.x, left = N / 2;
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2, left /= 2) {
        if (left == 0) x[0] += __shfl_xor_sync(~0u, x[0], step);
#pragma unroll
        for (int i = 0; i < left; i++) {
            bool upper = lane & step;
            float given = __shfl_xor_sync(~0u, upper ? x[i] : x[i + left], step);
            x[i] = (upper ? x[i + left] : x[i]) + given;
        }
    }
    return x[0];
}

// What the lanes of the i-th sum of conv_head_sums have, in each lane of the head
template <int LANES, int N> __device__ static inline float conv_head_share(float x, int i) {
    return __shfl_sync(~0u, x, ((int)threadIdx.x & ~(LANES - 1)) + i * (LANES / N));
}

// ----------------------------------------------------------------------------
// forward

// s of eight channels, from their inputs at the three tokens before, `reach` of which are in the document,
// and at their own.
__device__ static inline void conv_silu(float y[8], const float (*x)[8], const float w[CONV_WIDTH][8],
                                        const float bias[8], int reach = CONV_HISTORY) {
    for (int j = 0; j < 8; j++) y[j] = bias[j];
    for (int tap = 0; tap < CONV_WIDTH; tap++)
        for (int j = 0; j < 8; j++) y[j] += CONV_HISTORY - tap <= reach ? w[tap][j] * x[tap][j] : 0;
    for (int j = 0; j < 8; j++) y[j] *= sigmoidf(y[j]);
}

__device__ static inline float conv_squares(const float y[8]) {
    float sum = 0;
    for (int j = 0; j < 8; j++) sum += y[j] * y[j];
    return sum;
}

__device__ static inline Raw8 conv_scaled(float y[8], float scale) {
    for (int j = 0; j < 8; j++) y[j] *= scale;
    return pack8(y);
}

// y of eight channels from c on, of row i of y: raw are the inputs of the three tokens before and of its own.
// Called by all lanes of a warp.
__device__ static inline Raw8 conv_token(const Raw8* raw, const float w[CONV_WIDTH][8], const float bias[8],
                                         const Conv& s, int64_t i, int c) {
    float y[8], x[CONV_WIDTH][8], scale = 1;
    for (int tap = 0; tap < CONV_WIDTH; tap++) unpack8(x[tap], raw[tap]);
    conv_silu(y, x, w, bias);
    if (s.normed) {
        float sum = conv_head_sum(conv_squares(y), (int)s.dh / 8);
        if (c < s.normed) scale = norm_rstd(sum, (float)L2_NORM_EPS);
    }
    int head = c / (int)s.dh;
    if (s.steps.steps && head < s.steps.NH) scale = s.steps.steps[i * s.steps.NH + head];
    return conv_scaled(y, scale);
}

// The factors of N tokens of a normed head, from the lane's sums of squares. LANES: of a head, 0 where the
// compiler does not know.
template <int LANES, int N>
__device__ static inline void conv_norm_scales(float (&scale)[N], float (&squares)[N], int lanes) {
    if constexpr (LANES > 0) {
        float mine = norm_rstd(conv_head_sums<LANES>(squares), (float)L2_NORM_EPS);
        for (int i = 0; i < N; i++) scale[i] = conv_head_share<LANES, N>(mine, i);
    } else {
        for (int i = 0; i < N; i++)
            scale[i] = norm_rstd(conv_head_sum(squares[i], lanes), (float)L2_NORM_EPS);
    }
}

// A thread's eight channels in the forward pass, and where it goes on.
struct ConvForward {
    const bf16* x;         // the tile that is copied next
    const float* steps;    // of the channels' head, of the tile whose steps are read next
    bf16* y;               // the tile that is computed next
    const int32_t* starts; // of its tokens' documents, with packed documents
    int t;                 // its first token
    float w[CONV_WIDTH][8], bias[8];
    bool active, stepped, normed, warp_normed; // active: the channels exist
};

// Eight channels from c on, from row on. Called by all lanes of a warp.
__device__ static inline ConvForward conv_forward_at(bf16* y, const bf16* x, const Conv& s, int64_t row,
                                                     int c) {
    ConvForward k = {};
    int head = c >> (__ffs((int)s.dh) - 1);
    k.x = x + row * s.row_stride + c;
    k.y = y + row * s.C + c;
    k.steps = s.steps.steps + row * s.steps.NH + head;
    k.active = c < s.C;
    k.stepped = head < s.steps.NH;
    k.normed = c < s.normed;
    k.warp_normed = __any_sync(~0u, k.normed);
    return k;
}

// Starts copying a tile of which `left` tokens exist. A lane reads only what it copied itself.
__device__ static inline void conv_copy(Raw8 (&to)[CONV_TILE][32], ConvForward& k, const Conv& s, int left) {
    int row_stride = (int)s.row_stride;
#pragma unroll
    for (int i = 0; i < CONV_TILE; i++)
        cp_async16(smem_address(&to[i][threadIdx.x]), k.x + i * row_stride, k.active && i < left);
    k.x += CONV_TILE * row_stride;
}

__device__ static inline void conv_load_steps(float (&steps)[CONV_TILE], ConvForward& k, const Conv& s,
                                              int left) {
    int NH = (int)s.steps.NH;
    for (int i = 0; i < CONV_TILE; i++) steps[i] = k.stepped && i < left ? k.steps[i * NH] : 1;
    k.steps += CONV_TILE * NH;
}

// Inputs of the three tokens before a segment. begins: it is the first one of its sequence, whose history, if
// there is one, has these channels from `history` on.
__device__ static inline void conv_inputs_before(float (&in)[CONV_HISTORY][8], const ConvForward& k,
                                                 const Conv& s, bool begins, const bf16* history) {
    for (int i = 0; i < CONV_HISTORY; i++) {
        Raw8 raw = {};
        if (k.active && !begins) raw = load_raw8(k.x + (i - CONV_HISTORY) * s.row_stride);
        if (k.active && begins && s.history) raw = load_raw8(history + i * s.C);
        unpack8(in[i], raw);
    }
}

// y of a tile of which `left` tokens exist; in: the inputs of the three tokens before, which become those
// before the next tile. FULL: all tokens and channels exist.
template <bool STEPS, int LANES, bool FULL, bool DOCS>
__device__ static inline void
conv_tile_forward(float (&in)[CONV_HISTORY][8], const Raw8 (&copies)[CONV_TILE][32],
                  const float (&steps)[CONV_TILE], ConvForward& k, const Conv& s, int left) {
    constexpr int N = !STEPS && LANES > 0 ? CONV_AT_ONCE : 1;
    float x[CONV_HISTORY + CONV_TILE][8];
    int C = (int)s.C;
    for (int i = 0; i < CONV_HISTORY; i++)
        for (int j = 0; j < 8; j++) x[i][j] = in[i][j];
#pragma unroll
    for (int i = 0; i < CONV_TILE; i += N) {
        float y[N][8], squares[N], scale[N];
        for (int u = 0; u < N; u++) {
            unpack8(x[CONV_HISTORY + i + u], copies[i + u][threadIdx.x]);
            int reach = CONV_HISTORY;
            if (DOCS && (FULL || i + u < left)) reach = k.t + i + u - k.starts[i + u];
            conv_silu(y[u], x + i + u, k.w, k.bias, reach);
            scale[u] = STEPS ? steps[i + u] : 1;
        }
        if (!STEPS && k.warp_normed) {
            for (int u = 0; u < N; u++) squares[u] = conv_squares(y[u]);
            conv_norm_scales<LANES>(scale, squares, (int)s.dh / 8);
            for (int u = 0; u < N; u++) scale[u] = k.normed ? scale[u] : 1;
        }
        for (int u = 0; u < N; u++) {
            Raw8 packed = conv_scaled(y[u], scale[u]);
            if (FULL || (k.active && i + u < left)) store16(k.y + (i + u) * C, packed);
        }
    }
    for (int i = 0; i < CONV_HISTORY; i++)
        for (int j = 0; j < 8; j++) in[i][j] = x[CONV_TILE + i][j];
    k.y += CONV_TILE * C;
    if (DOCS) k.starts += CONV_TILE, k.t += CONV_TILE;
}

// STEPS: Mamba-2's; none is normed. LANES: of a normed head, 0 where the compiler does not know.
template <bool STEPS, int LANES, bool DOCS>
__global__ static void __launch_bounds__(32, CONV_FORWARD_WARPS)
    conv_forward_kernel(bf16* y, const bf16* x, const __grid_constant__ Conv s,
                        const __grid_constant__ ConvSegments cut) {
    __shared__ Raw8 copies[2][CONV_TILE][32];
    int segment = (int)blockIdx.x / cut.parts, part = (int)blockIdx.x % cut.parts;
    int c = 256 * part + 8 * (int)threadIdx.x, b = segment / cut.of_T;
    int first = segment % cut.of_T * cut.length, left = min(cut.length, (int)s.T - first), stage = 0;
    ConvForward k = conv_forward_at(y, x, s, (int64_t)b * s.T + first, c);
    if (DOCS) k.starts = s.doc_start + (int64_t)b * s.T + first, k.t = first;
    float steps[CONV_TILE], in[CONV_HISTORY][8];
    conv_inputs_before(in, k, s, first == 0, s.history + (int64_t)b * CONV_HISTORY * s.C + c);
    conv_copy(copies[0], k, s, left);
    if (STEPS) conv_load_steps(steps, k, s, left);
    if (k.active) conv_weights<8>(k.w, s.weight + CONV_WIDTH * c);
    if (k.active && s.bias) unpack8(k.bias, load_raw8(s.bias + c));
    auto tile = [&](auto full) {
        float steps_now[CONV_TILE];
        for (int i = 0; STEPS && i < CONV_TILE; i++) steps_now[i] = steps[i];
        cp_async_wait_all();
        if (left > CONV_TILE) {
            conv_copy(copies[stage ^ 1], k, s, left - CONV_TILE);
            if (STEPS) conv_load_steps(steps, k, s, left - CONV_TILE);
        }
        conv_tile_forward<STEPS, LANES, decltype(full)::value, DOCS>(in, copies[stage], steps_now, k, s,
                                                                     left);
        left -= CONV_TILE;
        stage ^= 1;
    };
    bool whole = 256 * part + 256 <= s.C;
#pragma unroll 1
    while (whole && left >= CONV_TILE) tile(std::true_type());
#pragma unroll 1
    while (left > 0) tile(std::false_type());
}

template <bool STEPS, int LANES>
static inline void conv_launch_forward(bf16* y, const bf16* x, const Conv* s, cudaStream_t stream) {
    auto kernel =
        s->doc_start ? conv_forward_kernel<STEPS, LANES, true> : conv_forward_kernel<STEPS, LANES, false>;
    ConvSegments cut = conv_segments(s, 256, CONV_TILE, CONV_FORWARD_WARPS, INT_MAX);
    CUDA_LAUNCH(kernel, (unsigned)(cut.segments * cut.parts), 32, stream, y, x, *s, cut);
}

// Writes y.
static inline void conv_forward(bf16* y, const bf16* x, const Conv* s, cudaStream_t stream) {
    Range range("convolution", RANGE_FORWARD, stream);
    conv_check(s);
    auto launch = s->steps.steps ? conv_launch_forward<true, 0>
                  : s->dh == 128 ? conv_launch_forward<false, 16>
                                 : conv_launch_forward<false, 0>;
    launch(y, x, s, stream);
}

// history [3, C] becomes that of the tokens behind a sequence of T tokens; it was s->history in the forward
// pass.
__global__ static void __launch_bounds__(CONV_THREADS)
    conv_history_kernel(bf16* history, const bf16* x, int64_t T, int64_t C, int64_t row_stride) {
    int64_t c = 8 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= C) return;
    Raw8 last[CONV_HISTORY];
    for (int i = 0; i < CONV_HISTORY; i++) {
        int64_t t = T - CONV_HISTORY + i;
        last[i] =
            t >= 0 ? load_raw8(x + t * row_stride + c) : load_raw8(history + (CONV_HISTORY + t) * C + c);
    }
    for (int i = 0; i < CONV_HISTORY; i++) store16(history + i * C + c, last[i]);
}

static inline void conv_history(bf16* history, const bf16* x, const Conv* s, cudaStream_t stream) {
    HeadGrid grid = conv_grid(s->C / 8);
    CUDA_LAUNCH(conv_history_kernel, grid.blocks, grid.threads, stream, history, x, s->T, s->C,
                s->row_stride);
}
