/*
Backward pass of the convolution before a recurrence (conv.cuh):

    x, dy, with steps dout  ->  dx, with steps ddt
                                sums over tokens: dweight, dbias, with steps ddt_bias, dA_log, dD

z, s and the heads' norms are recomputed. A warp iterates over the tiles of a segment of a sequence from its
end, with the gradients of the three later z in registers. At the end of a segment these are the next
segment's: both compute them. Called by deltanet.cuh and mamba2.cuh.

    tile                four tokens, 128 channels. The copies of x, dy and dout of the previous tile to shared
                        memory are in flight, 16 bytes a lane; a lane then reads its four channels.
    sums over a head    of 16 or 32 lanes, for the four tokens at once. With steps, a lane then has the
                        numbers of one token.
    sums over tokens    a row of partial for each group of warps; one kernel adds all of them up.
*/
#pragma once

#include "conv.cuh"

enum {
    CONV_BACKWARD_TILE = 4,   // tokens
    CONV_BACKWARD_WARPS = 12, // resident on an SM: 168 registers a thread
    CONV_STEP_LANES = 16      // of a head with steps, which has 64 channels
};

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

// A thread's four channels.
struct ConvChannels {
    float w[CONV_WIDTH][4], bias[4];
    int c, head, lanes;                        // lanes: of a head
    bool active, stepped, normed, warp_normed; // active: the channels exist
    float D, dt_bias, rate;                    // of the head
};

// Four channels from c on. Called by all lanes of a warp.
__device__ static inline ConvChannels conv_channels(const Conv& s, int c, int lanes, bool steps) {
    ConvChannels k = {};
    k.c = c;
    k.head = c / (4 * lanes);
    k.lanes = lanes;
    k.active = c < s.C;
    k.stepped = steps && k.head < s.steps.NH;
    k.normed = c < s.normed;
    k.warp_normed = __any_sync(~0u, k.normed);
    if (k.active) conv_weights<4>(k.w, s.weight + CONV_WIDTH * c);
    if (k.active && s.bias) unpack4(k.bias, load_raw4(s.bias + c));
    if (!k.stepped) return k;
    k.D = s.steps.D[k.head];
    k.dt_bias = s.steps.dt_bias[k.head];
    k.rate = expf(s.steps.A_log[k.head]);
    return k;
}

// ----------------------------------------------------------------------------
// tiles in flight

// A warp's copies of a tile: x from three tokens before, dy, and with steps dout.
template <int TENSORS> struct alignas(16) ConvCopies { Raw4 tensors[TENSORS][CONV_BACKWARD_TILE][32]; };

// What a lane copies of a tile, eight channels of every second token: where the first ones are, and the
// elements to the next token's.
struct ConvSource {
    const bf16 *x, *dy, *dout;
    int row_stride, C, inner;
    int token;            // the first one; of x the third one before
    bool active, stepped; // the channels exist; in dout too
};

// Where the thread reads, of the tile from row `row` on, token t of its sequence, a warp's channels from c on
__device__ static inline ConvSource conv_source(const bf16* dy, const bf16* x, const Conv& s, int64_t row,
                                                int t, int c) {
    int lane = (int)threadIdx.x, token = lane / 16;
    c += 8 * (lane % 16);
    row += token;
    ConvSource from = {};
    from.row_stride = (int)s.row_stride;
    from.C = (int)s.C;
    from.inner = (int)(s.steps.NH * s.dh);
    from.x = x + (row - CONV_HISTORY) * s.row_stride + c;
    from.dy = dy + row * s.C + c;
    from.dout = s.steps.dout + row * from.inner + c;
    from.token = t + token;
    from.active = c < s.C;
    from.stepped = c < from.inner;
    return from;
}

// Starts copying a tile, and moves on to the one before. T: tokens of the sequence. FULL: all tokens and
// channels exist but those before the sequence.
template <bool FULL, int TENSORS>
__device__ static inline void conv_backward_copy(ConvCopies<TENSORS>& to, ConvSource& from, int T) {
#pragma unroll
    for (int i = 0; i < CONV_BACKWARD_TILE; i += 2) {
        int token = from.token + i, before = token - CONV_HISTORY;
        auto at = [&](int tensor) { return smem_address(&to.tensors[tensor][i][0]) + 16 * threadIdx.x; };
        bool exists = FULL || (from.active && token < T);
        cp_async16(at(0), from.x + i * from.row_stride, before >= 0 && (FULL || (from.active && before < T)));
        cp_async16(at(1), from.dy + i * from.C, exists);
        if constexpr (TENSORS == 3) cp_async16(at(2), from.dout + i * from.inner, exists && from.stepped);
    }
    from.token -= CONV_BACKWARD_TILE;
    from.x -= CONV_BACKWARD_TILE * from.row_stride;
    from.dy -= CONV_BACKWARD_TILE * from.C;
    if constexpr (TENSORS == 3) from.dout -= CONV_BACKWARD_TILE * from.inner;
}

// The numbers of a lane's token of a tile: lanes 2 i and 2 i + 1 of a head have those of token i mod 4.
struct ConvStep {
    float step, dlog_decay;
    bf16 dt;
};

__device__ static inline int conv_step_token(void) { return (int)threadIdx.x / 2 % CONV_BACKWARD_TILE; }

// Loads the steps of the tile that begins with row `row`, token t of its sequence, and has `left` tokens.
// DOCS: the decay of a document's first token is 0 whatever its step.
template <bool DOCS>
__device__ static inline ConvStep conv_load_step(const Conv& s, const ConvChannels& k, int64_t row, int left,
                                                 int t) {
    int token = conv_step_token();
    ConvStep step = {1, 0, __float2bfloat16(0)};
    if (!k.stepped || token >= left) return step;
    int64_t at = (row + token) * s.steps.NH + k.head;
    step.step = s.steps.steps[at];
    step.dlog_decay = s.steps.dlog_decay[at];
    if (DOCS && s.doc_start[row + token] == t + token) step.dlog_decay = 0;
    step.dt = s.steps.dt[(row + token) * s.row_stride + k.head];
    return step;
}

// ----------------------------------------------------------------------------
// a tile

// A thread's sums over tokens.
struct ConvSums {
    float weight[CONV_WIDTH][4], bias[4];
    float head,
        A_log; // of the lane's tokens; head: of dt_bias in the lower half of a head's lanes, else of D
};

// Inputs from three tokens before a tile on, and from its first token on gradients dz and, with packed
// documents, the number of tokens before that are in a token's document.
struct ConvWindow {
    float x[CONV_HISTORY + CONV_BACKWARD_TILE][4], dz[CONV_BACKWARD_TILE + CONV_HISTORY][4];
    int reach[CONV_BACKWARD_TILE + CONV_HISTORY];
};

// Where a tile is: its first row, and the number of tokens from there that are the segment's, not the next
// one's.
struct ConvPlace {
    int64_t row;
    int own, t; // t: the first token in its sequence
};

// dz becomes the gradient of s from that of y, of N tokens of a normed head: s = z open, y = s / |s|.
template <int LANES, int N>
__device__ static inline void conv_norm_backward(float (&dz)[N][4], const float (&z)[N][4],
                                                 const float (&open)[N][4], const ConvChannels& k) {
    float squares[N], along[N];
    for (int i = 0; i < N; i++) {
        squares[i] = along[i] = 0;
        for (int j = 0; j < 4; j++) {
            float y = z[i][j] * open[i][j];
            squares[i] += y * y;
            along[i] += y * dz[i][j];
        }
    }
    if constexpr (LANES > 0) {
        float sums[2 * N];
        for (int i = 0; i < N; i++) sums[2 * i] = squares[i], sums[2 * i + 1] = along[i];
        float mine = conv_head_sums<LANES>(sums);
        for (int i = 0; i < N; i++) {
            squares[i] = conv_head_share<LANES, 2 * N>(mine, 2 * i);
            along[i] = conv_head_share<LANES, 2 * N>(mine, 2 * i + 1);
        }
    } else {
        for (int i = 0; i < N; i++) {
            squares[i] = conv_head_sum(squares[i], k.lanes);
            along[i] = conv_head_sum(along[i], k.lanes);
        }
    }
    if (!k.normed) return;
    for (int i = 0; i < N; i++) {
        float scale = norm_rstd(squares[i], (float)L2_NORM_EPS), part = along[i] * scale * scale;
        for (int j = 0; j < 4; j++) dz[i][j] = scale * (dz[i][j] - z[i][j] * open[i][j] * part);
    }
}

// The gradients of dt of a tile, and the head's sums over the segment's own tokens, from the lane's part of
// the tokens' sums over the head's channels: of x dv, then of x dout.
template <bool FULL>
__device__ static inline void conv_steps_backward(ConvSums& sums, float (&of_lane)[2 * CONV_BACKWARD_TILE],
                                                  const ConvStep& own, const ConvPlace& at,
                                                  const ConvChannels& k, const Conv& s) {
    float sum = conv_head_sums<CONV_STEP_LANES>(of_lane);
    int lane = (int)threadIdx.x % CONV_STEP_LANES, token = conv_step_token();
    bool of_dt = lane < CONV_STEP_LANES / 2;
    float dt = __bfloat162float(own.dt) + k.dt_bias;
    float ddt = (sum - own.dlog_decay * k.rate) * sigmoidf(dt);
    if (!k.stepped || (!FULL && token >= at.own)) return;
    sums.head += of_dt ? ddt : sum;
    sums.A_log -= own.dlog_decay * own.step * k.rate;
    if (of_dt && lane % 2 == 0) s.steps.ddt[(at.row + token) * s.row_stride + k.head] = __float2bfloat16(ddt);
}

// dx of a tile, whose first row and channels dx points to, and its part of the sums. Template parameters as
// of the kernel; FULL: all tokens are the segment's own, and all channels exist.
template <bool STEPS, int LANES, bool BIAS, bool FULL, bool DOCS>
__device__ static inline void conv_tile_backward(bf16* dx, ConvSums& sums, ConvWindow& in,
                                                 const ConvCopies<STEPS ? 3 : 2>& copies, const ConvStep& own,
                                                 const ConvPlace& at, const ConvChannels& k, const Conv& s) {
    constexpr int N = !STEPS && LANES > 0 ? CONV_AT_ONCE : 1;
    int lane = (int)threadIdx.x;
    float of_head[2 * CONV_BACKWARD_TILE];
    // Does input `tap` of a token, of the tile or after it, lie in the token's document?
    auto sees = [&](int token, int tap) { return !DOCS || CONV_HISTORY - tap <= in.reach[token]; };
    for (int i = 0; DOCS && i < CONV_BACKWARD_TILE; i++) {
        bool exists = at.t + i < (int)s.T;
        in.reach[i] = exists ? at.t + i - s.doc_start[at.row + i] : 0;
    }
#pragma unroll
    for (int u = CONV_BACKWARD_TILE - N; u >= 0; u -= N) {
        float z[N][4], open[N][4], dz[N][4];
#pragma unroll
        for (int i = N - 1; i >= 0; i--) {
            unpack4(in.x[u + i], copies.tensors[0][u + i][lane]);
            unpack4(dz[i], copies.tensors[1][u + i][lane]);
            for (int j = 0; j < 4; j++) z[i][j] = BIAS ? k.bias[j] : 0;
            for (int tap = 0; tap < CONV_WIDTH; tap++)
                for (int j = 0; j < 4; j++)
                    z[i][j] += sees(u + i, tap) ? k.w[tap][j] * in.x[u + i + tap][j] : 0;
            for (int j = 0; j < 4; j++) open[i][j] = sigmoidf(z[i][j]);
        }
        if constexpr (STEPS) {
            float dout[4], step = conv_head_share<CONV_STEP_LANES, 8>(own.step, u), dstep = 0, dD = 0;
            unpack4(dout, copies.tensors[2][u][lane]);
            for (int j = 0; j < 4; j++) {
                float y = z[0][j] * open[0][j];
                dstep += y * dz[0][j];
                dD += y * dout[j];
                dz[0][j] = step * dz[0][j] + k.D * dout[j];
            }
            of_head[u] = dstep;
            of_head[CONV_BACKWARD_TILE + u] = dD;
        } else if (k.warp_normed) {
            conv_norm_backward<LANES>(dz, z, open, k);
        }
#pragma unroll
        for (int i = N - 1; i >= 0; i--) {
            float* g = in.dz[u + i];
            float out[4];
            for (int j = 0; j < 4; j++) {
                g[j] = dz[i][j] * (open[i][j] * (1 + z[i][j] * (1 - open[i][j])));
                out[j] = k.w[3][j] * g[j] + (sees(u + i + 1, 2) ? k.w[2][j] * in.dz[u + i + 1][j] : 0) +
                         (sees(u + i + 2, 1) ? k.w[1][j] * in.dz[u + i + 2][j] : 0) +
                         (sees(u + i + 3, 0) ? k.w[0][j] * in.dz[u + i + 3][j] : 0);
            }
            if (!FULL && u + i >= at.own) continue;
            for (int j = 0; j < 4; j++) {
                if (BIAS) sums.bias[j] += g[j];
                for (int tap = 0; tap < CONV_WIDTH; tap++)
                    sums.weight[tap][j] += sees(u + i, tap) ? g[j] * in.x[u + i + tap][j] : 0;
            }
            if (FULL || k.active)
                store_bf16x4(dx + (u + i) * (int)s.row_stride, Pack4{{out[0], out[1], out[2], out[3]}});
        }
    }
    for (int i = 0; i < CONV_HISTORY; i++)
        for (int j = 0; j < 4; j++)
            in.x[CONV_BACKWARD_TILE + i][j] = in.x[i][j], in.dz[CONV_BACKWARD_TILE + i][j] = in.dz[i][j];
    for (int i = 0; DOCS && i < CONV_HISTORY; i++) in.reach[CONV_BACKWARD_TILE + i] = in.reach[i];
    if constexpr (STEPS) conv_steps_backward<FULL>(sums, of_head, own, at, k, s);
}

// ----------------------------------------------------------------------------
// sums over tokens

// Floats of a row of partial: the sums of weight, bias, dt_bias, A_log and D, to a multiple of 16 bytes.
__host__ __device__ static inline int conv_pitch(const Conv& s) {
    return (int)((CONV_WIDTH + 1) * s.C + ceil_div<int64_t>(3 * s.steps.NH, 4) * 4);
}

// A warp's sums become its part of a row of partial.
__device__ static inline void conv_store_sums(float* partial, const ConvSums& sums, const Conv& s,
                                              const ConvChannels& k) {
    int c = k.c, C = (int)s.C, NH = (int)s.steps.NH, lane = (int)threadIdx.x % CONV_STEP_LANES;
    float *bias = partial + CONV_WIDTH * C, *heads = bias + C, of_head[2] = {sums.head, sums.A_log};
    for (int i = 0; i < 2; i++)
        for (int step = CONV_BACKWARD_TILE; step > 1; step /= 2)
            of_head[i] += __shfl_xor_sync(~0u, of_head[i], step);
    if (!k.active) return;
    for (int j = 0; j < 4; j++)
        store16(partial + CONV_WIDTH * (c + j),
                Pack4{{sums.weight[0][j], sums.weight[1][j], sums.weight[2][j], sums.weight[3][j]}});
    store16(bias + c, Pack4{{sums.bias[0], sums.bias[1], sums.bias[2], sums.bias[3]}});
    if (!k.stepped) return;
    if (lane == 0) heads[k.head] = of_head[0], heads[NH + k.head] = of_head[1];
    if (lane == CONV_STEP_LANES / 2) heads[2 * NH + k.head] = of_head[0];
}

// Where column c of partial is added; NULL: nowhere.
__device__ static inline float* conv_gradient(const Conv& s, int c) {
    int C = (int)s.C, NH = (int)s.steps.NH;
    if (c < CONV_WIDTH * C) return s.dweight + c;
    c -= CONV_WIDTH * C;
    if (c < C) return s.bias ? s.dbias + c : NULL;
    c -= C;
    if (c >= 3 * NH) return NULL;
    return (c < NH ? s.steps.ddt_bias : c < 2 * NH ? s.steps.dA_log : s.steps.dD) + c % NH;
}

// A block sums 32 columns; each of its warps takes every 16th row of partial.
__global__ static void __launch_bounds__(512)
    conv_sums_kernel(const float* partial, const __grid_constant__ Conv s, int rows) {
    __shared__ float sums[16][32];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int c = 32 * (int)blockIdx.x + lane, pitch = conv_pitch(s);
    float sum = 0;
    if (c < pitch) {
#pragma unroll 4
        for (int row = warp; row < rows; row += 16) sum += partial[(int64_t)row * pitch + c];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    float* to = warp == 0 && c < pitch ? conv_gradient(s, c) : NULL;
    if (!to) return;
    for (int i = 1; i < 16; i++) sum += sums[i][lane];
    *to += sum;
}

// ----------------------------------------------------------------------------
// the pass

// STEPS: Mamba-2's; none is normed. LANES: of a normed head, 0 where the compiler does not know. BIAS: there
// may be one.
template <bool STEPS, int LANES, bool BIAS, bool DOCS>
__global__ static void __launch_bounds__(32, CONV_BACKWARD_WARPS)
    conv_backward_kernel(bf16* dx, const bf16* dy, const bf16* x, const __grid_constant__ Conv s,
                         const __grid_constant__ ConvSegments cut, float* partial) {
    constexpr int TILE = CONV_BACKWARD_TILE;
    __shared__ ConvCopies<STEPS ? 3 : 2> stages[2];
    int group = (int)blockIdx.x / cut.parts, c = 128 * ((int)blockIdx.x % cut.parts), T = (int)s.T;
    const ConvChannels k = conv_channels(s, c + 4 * (int)threadIdx.x,
                                         STEPS   ? CONV_STEP_LANES
                                         : LANES ? LANES
                                                 : (int)s.dh / 4,
                                         STEPS);
    ConvSums sums = {};
    for (int segment = group; segment < cut.segments; segment += cut.groups) {
        int first = segment % cut.of_T * cut.length, last = min(first + cut.length, T);
        int64_t begin = (int64_t)(segment / cut.of_T) * T; // row of the sequence's first token
        int t = (min(last + CONV_HISTORY, T) - 1) / TILE * TILE, stage = 0;
        ConvSource from = conv_source(dy, x, s, begin + t, t, c);
        __syncwarp(); // all lanes have read the copies of the segment before
        conv_backward_copy<false>(stages[0], from, T);
        ConvStep ahead = {};
        if (STEPS) ahead = conv_load_step<DOCS>(s, k, begin + t, T - t, t);
        ConvWindow in = {};
        for (int i = 1; i < TILE; i++)
            if (k.active && t + i < T)
                unpack4(in.x[CONV_HISTORY + i], load_raw4(x + (begin + t + i) * s.row_stride + k.c));
        bf16* out = dx + (begin + t) * s.row_stride + k.c;
        auto tile = [&](auto full) {
            constexpr bool FULL = decltype(full)::value;
            cp_async_wait_all();
            __syncwarp(); // all lanes have read the copies that are overwritten next
            ConvStep own = ahead;
            if (t > first) {
                conv_backward_copy<FULL>(stages[stage ^ 1], from, T);
                if (STEPS) ahead = conv_load_step<DOCS>(s, k, begin + t - TILE, TILE, t - TILE);
            }
            conv_tile_backward<STEPS, LANES, BIAS, FULL, DOCS>(out, sums, in, stages[stage], own,
                                                               {begin + t, last - t, t}, k, s);
            t -= TILE;
            stage ^= 1;
            out -= TILE * (int)s.row_stride;
        };
        bool whole = c + 128 <= s.C;
        while (t >= first && (!whole || t + TILE > last)) tile(std::false_type());
#pragma unroll 1
        while (t >= first) tile(std::true_type());
    }
    conv_store_sums(partial + (int64_t)group * conv_pitch(s), sums, s, k);
}

template <bool STEPS, int LANES, bool BIAS>
static inline void conv_launch_backward(bf16* dx, const bf16* dy, const bf16* x, const Conv* s,
                                        float* partial, cudaStream_t stream) {
    auto kernel = s->doc_start ? conv_backward_kernel<STEPS, LANES, BIAS, true>
                               : conv_backward_kernel<STEPS, LANES, BIAS, false>;
    int pitch = conv_pitch(*s);
    int64_t rows = (int64_t)(norm_partial_bytes() / sizeof(float)) / pitch;
    if (rows < 1) die("a convolution on the GPU over %s is too wide", counted(s->C, "channel").text);
    ConvSegments cut = conv_segments(s, 128, CONV_BACKWARD_TILE, CONV_BACKWARD_WARPS, rows);
    CUDA_LAUNCH(kernel, (unsigned)(cut.groups * cut.parts), 32, stream, dx, dy, x, *s, cut, partial);
    CUDA_LAUNCH(conv_sums_kernel, (unsigned)ceil_div(pitch, 32), 512, stream, partial, *s, cut.groups);
}

// Writes dx, with the row stride of x, and with steps the gradient of dt, and adds to the gradients of weight
// and bias, and with steps of dt_bias, A_log and D. Heads with steps have 64 channels. partial is scratch of
// norm_partial_bytes.
static inline void conv_backward(bf16* dx, const bf16* dy, const bf16* x, const Conv* s, float* partial,
                                 cudaStream_t stream) {
    Range range("convolution", RANGE_BACKWARD, stream);
    conv_check(s);
    if (s->steps.steps && s->dh != 4 * CONV_STEP_LANES)
        die("heads with time steps on the GPU have 64 channels, not %lld", (long long)s->dh);
    auto launch = s->steps.steps             ? conv_launch_backward<true, 0, true>
                  : s->dh == 128 && !s->bias ? conv_launch_backward<false, 32, false>
                                             : conv_launch_backward<false, 0, true>;
    launch(dx, dy, x, s, partial, stream);
}
