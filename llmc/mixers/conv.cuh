/*
Causal depthwise convolution and SiLU before DeltaNet's and Mamba-2's recurrence, with what the recurrence
reads of it fused:

    z_t = bias + w_0 x_{t-3} + w_1 x_{t-2} + w_2 x_{t-1} + w_3 x_t    each channel alone
    s_t = silu(z_t)
    y_t = s / sqrt(sum s^2 + 1e-6)    heads of the first `normed` channels: DeltaNet's q and k
    y_t = step_t s                    heads of the first NH dh channels: Mamba-2's x, a step a head
    y_t = s                           all others

    x, dx           columns of the fused projection: bf16, `stride` elements from row to row
    y, dy           bf16 [B, T, C]
    weight, bias    bf16 [C, 4] and [C]; their gradients float

Inputs before the first token are zeros, or in an extension those of the tokens before (extend.cuh). Nothing
is kept but x: the backward pass computes z, s and the heads' norms again. Pointers are aligned to 16 bytes; C
and stride are multiples of 8, dh is a power of two of 8 to 128.

A thread has a few adjacent channels. In the forward pass it computes CONV_TOKENS tokens, all loads in flight.
In the backward pass it walks through a segment of a sequence from its end, with the next tokens in flight and
the gradients of the three later z in registers. For the last tokens of a segment these belong to the next
segment: both compute them.
*/
#pragma once

#include <algorithm>
#include "../cuda/layer.cuh"

// Mamba-2's time steps; see mamba2.cuh. The part behind `log_decay` is the backward pass's alone.
typedef struct {
    int64_t NH;
    float *steps, *log_decay;         // [B, T, NH] step, and -step e^A_log; steps NULL: none
    const bf16* dt;                   // column of proj
    bf16* ddt;                        // column of dproj
    const float *dt_bias, *A_log, *D; // [NH]
    float *ddt_bias, *dA_log, *dD;    // [NH]
    const float* dlog_decay;          // [B, T, NH]
    const bf16* dout;                 // [B, T, NH, dh] gradient of o + D s
} HeadSteps;

typedef struct {
    int64_t B, T, C;
    int64_t stride;
    const bf16* weight; // [C, 4]
    const bf16* bias;   // [C], NULL without
    float *dweight, *dbias;
    const bf16*
        history; // [B, 3, C] inputs of the tokens before, oldest first; NULL: the sequences begin here
    int64_t dh;  // channels of a head
    int64_t normed;
    HeadSteps steps;
} Conv;

enum {
    CONV_HISTORY = CONV_WIDTH - 1, // inputs of earlier tokens that a token reads
    CONV_TOKENS = 8,               // of a thread of the forward pass
    CONV_THREADS = 128
};

// Thread blocks that cover n threads of a token, and the threads of a block.
static inline HeadGrid conv_grid(int64_t n) {
    int64_t blocks = ceil_div<int64_t>(n, CONV_THREADS);
    return {(int)blocks, (int)(32 * ceil_div<int64_t>(n, 32 * blocks))};
}

static inline void conv_check(const Conv* s) {
    assert(s->C % 8 == 0 && s->stride % 8 == 0 && s->normed % 8 == 0 && s->dh > 0);
    if ((s->normed || s->steps.steps) && (s->dh < 8 || s->dh > 128 || (s->dh & (s->dh - 1))))
        die("convolved heads on the GPU have 8 to 128 channels, a power of two, not %lld", (long long)s->dh);
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

// Sum over the adjacent lanes of a head, in each of them.
__device__ static inline float conv_head_sum(float x, int lanes) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        if (lane < lanes) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// ----------------------------------------------------------------------------
// forward

// y of eight channels from c on, of row i of y: raw are the inputs of the three tokens before and of its own.
// Called by all lanes of a warp.
__device__ static inline Raw8 conv_token(const Raw8* raw, const float w[CONV_WIDTH][8], const float bias[8],
                                         const Conv& s, int64_t i, int c) {
    float y[8], x[8];
    for (int j = 0; j < 8; j++) y[j] = bias[j];
    for (int tap = 0; tap < CONV_WIDTH; tap++) {
        unpack8(x, raw[tap]);
        for (int j = 0; j < 8; j++) y[j] += w[tap][j] * x[j];
    }
    for (int j = 0; j < 8; j++) y[j] *= sigmoidf(y[j]);
    float scale = 1;
    if (s.normed) {
        float sum = 0;
        for (int j = 0; j < 8; j++) sum += y[j] * y[j];
        sum = conv_head_sum(sum, (int)s.dh / 8);
        if (c < s.normed) scale = norm_rstd(sum, (float)L2_NORM_EPS);
    }
    int head = c / (int)s.dh;
    if (s.steps.steps && head < s.steps.NH) scale = s.steps.steps[i * s.steps.NH + head];
    for (int j = 0; j < 8; j++) y[j] *= scale;
    return pack8(y);
}

__global__ static void __launch_bounds__(CONV_THREADS)
    conv_forward_kernel(bf16* y, const bf16* x, const __grid_constant__ Conv s, int parts) {
    int segments = ceil_div<int>((int)s.T, CONV_TOKENS), segment = (int)blockIdx.x / parts;
    int c = 8 * ((int)blockIdx.x % parts * (int)blockDim.x + (int)threadIdx.x);
    int b = segment / segments, t = segment % segments * CONV_TOKENS;
    int left = min(CONV_TOKENS, (int)s.T - t);
    int64_t row = (int64_t)b * s.T + t;
    const bf16* in = x + row * s.stride + c;
    bool active = c < s.C;
    Raw8 raw[CONV_HISTORY + CONV_TOKENS] = {};
#pragma unroll
    for (int i = 0; i < CONV_HISTORY + CONV_TOKENS; i++) {
        int ahead = i - CONV_HISTORY;
        if (active && ahead < left && t + ahead >= 0)
            raw[i] = load_raw8(in + ahead * s.stride);
        else if (active && ahead < left && s.history)
            raw[i] = load_raw8(s.history + ((int64_t)b * CONV_HISTORY + CONV_HISTORY + t + ahead) * s.C + c);
    }
    float w[CONV_WIDTH][8] = {}, bias[8] = {};
    if (active) conv_weights<8>(w, s.weight + CONV_WIDTH * c);
    if (active && s.bias) unpack8(bias, load_raw8(s.bias + c));
#pragma unroll
    for (int i = 0; i < CONV_TOKENS; i++) {
        if (i >= left) break;
        Raw8 out = conv_token(raw + i, w, bias, s, row + i, c);
        if (active) store16(y + (row + i) * s.C + c, out);
    }
}

// Writes y.
static inline void conv_forward(bf16* y, const bf16* x, const Conv* s, cudaStream_t stream) {
    Range range("convolution", RANGE_FORWARD, stream);
    conv_check(s);
    HeadGrid grid = conv_grid(s->C / 8);
    int64_t segments = s->B * ceil_div<int64_t>(s->T, CONV_TOKENS);
    CUDA_LAUNCH(conv_forward_kernel, (unsigned)(segments * grid.blocks), grid.threads, stream, y, x, *s,
                grid.blocks);
}

// history [3, C] becomes that of the tokens behind a sequence of T tokens; it was s->history in the forward
// pass.
__global__ static void __launch_bounds__(CONV_THREADS)
    conv_history_kernel(bf16* history, const bf16* x, int64_t T, int64_t C, int64_t stride) {
    int64_t c = 8 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= C) return;
    Raw8 last[CONV_HISTORY];
    for (int i = 0; i < CONV_HISTORY; i++) {
        int64_t t = T - CONV_HISTORY + i;
        last[i] = t >= 0 ? load_raw8(x + t * stride + c) : load_raw8(history + (CONV_HISTORY + t) * C + c);
    }
    for (int i = 0; i < CONV_HISTORY; i++) store16(history + i * C + c, last[i]);
}

static inline void conv_history(bf16* history, const bf16* x, const Conv* s, cudaStream_t stream) {
    HeadGrid grid = conv_grid(s->C / 8);
    CUDA_LAUNCH(conv_history_kernel, grid.blocks, grid.threads, stream, history, x, s->T, s->C, s->stride);
}

// ----------------------------------------------------------------------------
// backward

// Four bf16 as raw bits
typedef uint2 Raw4;
__device__ static inline Raw4 load_raw4(const bf16* p) { return *(const uint2*)p; }
__device__ static inline void unpack4(float x[4], const Raw4& raw) {
    const uint32_t words[2] = {raw.x, raw.y};
    for (int i = 0; i < 2; i++) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// How the backward pass cuts the tokens: group g has the segments g, g + groups, ..
struct ConvSegments {
    int parts, groups;          // thread blocks of a token; of them, rows of partial sums
    int length, of_T, segments; // tokens of a segment; segments of a sequence, of all
};

// What a thread reads of one token, with the input of three tokens before: its own was read with a later
// token.
struct ConvBackwardToken {
    Raw4 before, dy, dout;
    float step, dlog_decay;
};

// A token's row, and whether it is of the segment, not of the next one.
struct ConvPlace {
    int64_t bt;
    bool own;
};

// A thread's four channels.
struct ConvChannels {
    float w[CONV_WIDTH][4], bias[4];
    int c, head, lanes; // lanes: of a head
    bool active, stepped, normed, warp_normed;
    float D, dt_bias, rate; // of the head
};

// A thread's sums over tokens.
struct ConvSums {
    float weight[CONV_WIDTH][4], bias[4];
    float dt_bias, A_log, D; // of its head, the same in all its lanes
};

// The gradient of s for Mamba-2's steps, of a channel of x: g holds dy. Writes the gradient of dt and adds to
// the heads' sums where the token is the segment's own.
__device__ static inline void conv_steps_backward(float g[4], ConvSums& sums, const float y[4],
                                                  const ConvBackwardToken& token, const ConvPlace& at,
                                                  const ConvChannels& k, const Conv& s) {
    const HeadSteps& h = s.steps;
    float dout[4], dstep = 0, dD = 0;
    unpack4(dout, token.dout);
    for (int j = 0; j < 4; j++) dstep += y[j] * g[j], dD += y[j] * dout[j];
    dstep = conv_head_sum(dstep, k.lanes), dD = conv_head_sum(dD, k.lanes);
    if (!k.stepped) return;
    for (int j = 0; j < 4; j++) g[j] = token.step * g[j] + k.D * dout[j];
    if (!at.own || (int)threadIdx.x % k.lanes) return;
    float dt = __bfloat162float(h.dt[at.bt * s.stride + k.head]) + k.dt_bias;
    float ddt = (dstep - token.dlog_decay * k.rate) * sigmoidf(dt);
    h.ddt[at.bt * s.stride + k.head] = __float2bfloat16(ddt);
    sums.dt_bias += ddt;
    sums.A_log -= token.dlog_decay * token.step * k.rate;
    sums.D += dD;
}

// dz of four channels from the gradient of y, and the sums where the token is the segment's own. x: the
// inputs of the token and of the three before, that of i tokens before in x[(slot + i) % 4].
template <bool STEPS>
__device__ static inline void conv_token_backward(float dz[4], ConvSums& sums,
                                                  const float (&x)[CONV_WIDTH][4], int slot,
                                                  const ConvBackwardToken& token, const ConvPlace& at,
                                                  const ConvChannels& k, const Conv& s) {
    float z[4], y[4];
    for (int j = 0; j < 4; j++) z[j] = k.bias[j];
    for (int tap = 0; tap < CONV_WIDTH; tap++)
        for (int j = 0; j < 4; j++) z[j] += k.w[tap][j] * x[(slot + CONV_HISTORY - tap) % CONV_WIDTH][j];
    unpack4(dz, token.dy);
    for (int j = 0; j < 4; j++) y[j] = z[j] * sigmoidf(z[j]);
    if (STEPS) {
        conv_steps_backward(dz, sums, y, token, at, k, s);
    } else if (k.warp_normed) {
        float squares = 0, along = 0;
        for (int j = 0; j < 4; j++) squares += y[j] * y[j], along += y[j] * dz[j];
        squares = conv_head_sum(squares, k.lanes), along = conv_head_sum(along, k.lanes);
        float scale = norm_rstd(squares, (float)L2_NORM_EPS);
        if (k.normed)
            for (int j = 0; j < 4; j++) dz[j] = scale * (dz[j] - y[j] * (along * scale * scale));
    }
    for (int j = 0; j < 4; j++) {
        float open = sigmoidf(z[j]);
        dz[j] *= open * (1 + z[j] * (1 - open));
        if (!at.own) continue;
        sums.bias[j] += dz[j];
        for (int tap = 0; tap < CONV_WIDTH; tap++)
            sums.weight[tap][j] += dz[j] * x[(slot + CONV_HISTORY - tap) % CONV_WIDTH][j];
    }
}

// A thread's sums become its part of a row of partial: [groups, C, 4] of weight, [groups, C] of bias, and
// three times [groups, NH] of dt_bias, A_log and D.
__device__ static inline void conv_store_sums(float* partial, const ConvSums& sums, const Conv& s,
                                              const ConvChannels& k, int groups, int group) {
    int c = k.c, NH = (int)s.steps.NH;
    float *bias = partial + (int64_t)groups * s.C * CONV_WIDTH, *heads = bias + (int64_t)groups * s.C;
    float* weight = partial + ((int64_t)group * s.C + c) * CONV_WIDTH;
    for (int j = 0; j < 4; j++)
        store16(weight + CONV_WIDTH * j,
                Pack4{{sums.weight[0][j], sums.weight[1][j], sums.weight[2][j], sums.weight[3][j]}});
    store16(bias + (int64_t)group * s.C + c, Pack4{{sums.bias[0], sums.bias[1], sums.bias[2], sums.bias[3]}});
    if (!k.stepped || (int)threadIdx.x % k.lanes) return;
    const float of_head[3] = {sums.dt_bias, sums.A_log, sums.D};
    for (int i = 0; i < 3; i++) heads[((int64_t)i * groups + group) * NH + k.head] = of_head[i];
}

// Four channels from c on. Called by all lanes of a warp.
__device__ static inline ConvChannels conv_channels(const Conv& s, int c, int lanes, bool steps) {
    ConvChannels k = {};
    k.c = c, k.head = c / (4 * lanes), k.lanes = lanes;
    k.active = c < s.C, k.stepped = steps && k.head < s.steps.NH;
    k.normed = c < s.normed, k.warp_normed = __any_sync(~0u, k.normed);
    if (k.active) conv_weights<4>(k.w, s.weight + CONV_WIDTH * c);
    if (k.active && s.bias) unpack4(k.bias, load_raw4(s.bias + c));
    if (!k.stepped) return k;
    k.D = s.steps.D[k.head], k.dt_bias = s.steps.dt_bias[k.head], k.rate = expf(s.steps.A_log[k.head]);
    return k;
}

// The tokens of a thread, AHEAD of them in flight. Inputs, in[i], and gradients dz, later[i], are in rings of
// four tokens, so that no register moves. LANES: of a head, 0 where the compiler does not know.
template <bool STEPS, int LANES>
__global__ static void __launch_bounds__(CONV_THREADS, 4)
    conv_backward_kernel(bf16* dx, const bf16* dy, const bf16* x, const __grid_constant__ Conv s,
                         const __grid_constant__ ConvSegments cut, float* partial) {
    constexpr int AHEAD = STEPS ? 2 : 4;
    const int group = (int)blockIdx.x / cut.parts, stride = (int)s.stride, C = (int)s.C, NH = (int)s.steps.NH;
    const ConvChannels k =
        conv_channels(s, 4 * ((int)blockIdx.x % cut.parts * (int)blockDim.x + (int)threadIdx.x),
                      LANES ? LANES : (int)s.dh / 4, STEPS);
    ConvSums sums = {};
    for (int segment = group; segment < cut.segments; segment += cut.groups) {
        int first = segment % cut.of_T * cut.length, last = min(first + cut.length, (int)s.T);
        int64_t begin = (int64_t)(segment / cut.of_T) * s.T; // row of the sequence's first token
        const bf16 *x_rows = x + begin * stride + k.c, *dy_rows = dy + begin * C + k.c;
        bf16* dx_rows = dx + begin * stride + k.c;
        auto load_x = [&](int t) {
            return k.active && t >= 0 ? load_raw4(x_rows + (int64_t)t * stride) : Raw4{};
        };
        auto load = [&](int t) {
            ConvBackwardToken token = {};
            if (t < first) return token;
            token.before = load_x(t - CONV_HISTORY);
            if (k.active) token.dy = load_raw4(dy_rows + (int64_t)t * C);
            if (k.stepped) {
                token.dout = load_raw4(s.steps.dout + (begin + t) * (NH * 4 * k.lanes) + k.c);
                token.step = s.steps.steps[(begin + t) * NH + k.head];
                token.dlog_decay = s.steps.dlog_decay[(begin + t) * NH + k.head];
            }
            return token;
        };
        int top = min(last + CONV_HISTORY, (int)s.T) - 1;
        float in[CONV_WIDTH][4], later[CONV_WIDTH][4] = {};
        for (int i = 0; i < CONV_HISTORY; i++) unpack4(in[i], load_x(top - i));
        ConvBackwardToken ahead[AHEAD];
        for (int i = 0; i < AHEAD; i++) ahead[i] = load(top - i);
#pragma unroll 1
        for (; top >= first; top -= CONV_WIDTH) {
#pragma unroll
            for (int u = 0; u < CONV_WIDTH; u++) {
                int t = top - u;
                if (t < first) break;
                ConvBackwardToken token = ahead[u % AHEAD];
                ahead[u % AHEAD] = load(t - AHEAD);
                unpack4(in[(u + CONV_HISTORY) % CONV_WIDTH], token.before);
                ConvPlace at = {begin + t, t < last};
                float *dz = later[u], out[4];
                conv_token_backward<STEPS>(dz, sums, in, u, token, at, k, s);
                for (int j = 0; j < 4; j++)
                    out[j] = k.w[3][j] * dz[j] + k.w[2][j] * later[(u + 3) % CONV_WIDTH][j] +
                             k.w[1][j] * later[(u + 2) % CONV_WIDTH][j] +
                             k.w[0][j] * later[(u + 1) % CONV_WIDTH][j];
                if (k.active && at.own)
                    store_bf16x4(dx_rows + (int64_t)t * stride, Pack4{{out[0], out[1], out[2], out[3]}});
            }
        }
    }
    if (k.active) conv_store_sums(partial, sums, s, k, cut.groups, group);
}

// One segment a group, unless there are more sequences than groups.
template <class Kernel>
static inline ConvSegments conv_segments(Kernel kernel, const Conv* s, HeadGrid grid) {
    int64_t floats = (CONV_WIDTH + 1) * s->C + 3 * s->steps.NH,
            most = (int64_t)(norm_partial_bytes() / sizeof(float)) / floats;
    if (most < 1) die("a convolution on the GPU over %lld channels is too wide", (long long)s->C);
    int64_t tokens = s->B * s->T,
            groups = resident_groups(kernel, grid.threads, grid.blocks, std::min(most, tokens));
    int64_t of_T = std::clamp<int64_t>(groups / s->B, 1, ceil_div<int64_t>(s->T, 16));
    ConvSegments cut;
    cut.parts = grid.blocks;
    cut.length = (int)ceil_div<int64_t>(s->T, of_T);
    cut.of_T = (int)ceil_div<int64_t>(s->T, cut.length);
    cut.segments = (int)s->B * cut.of_T;
    cut.groups = (int)std::min<int64_t>(groups, cut.segments);
    return cut;
}

template <bool STEPS, int LANES>
static inline void conv_backward_of(bf16* dx, const bf16* dy, const bf16* x, const Conv* s, float* partial,
                                    cudaStream_t stream) {
    auto kernel = conv_backward_kernel<STEPS, LANES>;
    HeadGrid grid = conv_grid(s->C / 4);
    ConvSegments cut = conv_segments(kernel, s, grid);
    int64_t groups = cut.groups, NH = s->steps.NH;
    CUDA_LAUNCH(kernel, (unsigned)(groups * cut.parts), grid.threads, stream, dx, dy, x, *s, cut, partial);
    float *bias = partial + groups * s->C * CONV_WIDTH, *heads = bias + groups * s->C;
    sum_rows(s->dweight, partial, groups, s->C * CONV_WIDTH, true, stream);
    if (s->bias) sum_rows(s->dbias, bias, groups, s->C, true, stream);
    if (!STEPS) return;
    sum_rows(s->steps.ddt_bias, heads, groups, NH, true, stream);
    sum_rows(s->steps.dA_log, heads + groups * NH, groups, NH, true, stream);
    sum_rows(s->steps.dD, heads + 2 * groups * NH, groups, NH, true, stream);
}

// Writes dx, with the row stride of x, and with steps the gradient of dt, and adds to the gradients of weight
// and bias, and with steps of dt_bias, A_log and D. partial is scratch of norm_partial_bytes.
static inline void conv_backward(bf16* dx, const bf16* dy, const bf16* x, const Conv* s, float* partial,
                                 cudaStream_t stream) {
    Range range("convolution", RANGE_BACKWARD, stream);
    conv_check(s);
    auto of = s->steps.steps ? s->dh == 64 ? conv_backward_of<true, 16> : conv_backward_of<true, 0>
              : s->dh == 128 ? conv_backward_of<false, 32>
                             : conv_backward_of<false, 0>;
    of(dx, dy, x, s, partial, stream);
}
