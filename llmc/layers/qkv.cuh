/*
From the fused projection to attention's q, k and v: token shift, QK norm and RoPE in one kernel, each of them
optional.

    shift    x_t = (1 - alpha_t) x_t + alpha_t x_{t-1},   alpha_t = sigmoid(logit_t), one for each head
    norm     RMSNorm over a head's channels (rmsnorm.cuh)
    RoPE     rotates the pairs (x_i, x_{i + dh/2})

    proj, dproj     bf16 [B, T, row_stride], of which `columns` are in use (Projection)
    out, dout       bf16 [B, T, NH, dh] of each path; k and v have KVH heads, like their rstd and weights
    rstd            float [B, T, NH]
    angles          float [T, dh/2, 2], cos and sin
    squares         float [2, NH, head_norm_groups], the largest |q|^2, then |k|^2, of NORM_TOKENS neighbours
                    in [B, T], the last of one sequence and the first of the next included: for pruning.cuh
    QK norm weight  bf16 [NH, dh], or [dh] shared by all heads

With packed documents (HeadShape's doc_start) x_{t-1} is 0 at a document's first token.

The trainer calls it between the projection and attention; for new tokens of a sequence see
llmc/inference/cuda/pages.cuh. q, k and v are three paths through the same code, each with its own switches. A
thread block has one path, so that its threads take the same branches. A thread has eight channels of one head
for several neighbouring tokens, so that the shift finds x_{t-1} in registers. Pointers to bf16 and angles are
aligned to 16 bytes; row_stride and the columns of q, k and v are multiples of 8.
*/
#pragma once

#include "../model/shapes.h"
#include "rmsnorm.cuh"

typedef struct {
    int64_t column;     // of the heads' channels in a row of proj
    int64_t shift;      // column of the shift gate's logits in proj, -1: no shift
    const bf16* weight; // QK norm's, NULL: no norm
    float* dweight;     // same shape
    bool rope;          // rotate by angles
    float eps;          // QK norm's
    bf16* out;          // [B, T, NH, dh]
    float* rstd;        // [B, T, NH], with QK norm
    const bf16* dout;   // [B, T, NH, dh]
} HeadPath;

struct QkvArgs {
    HeadPath paths[3];
    int64_t row_stride, columns;
    int tokens, T, NH, dh, weight_stride;
    int units;                            // thread blocks for the three paths of a token
    int segment, segments_of_T, segments; // backward: tokens of one; number in a sequence, and in all
    int heads[3];                         // of each path
    int key_blocks;                       // thread blocks for the heads of k, or v, of a token
};

// ----------------------------------------------------------------------------
// RoPE

// Cosine and sine of a pair's angle at a position, times the gain
__device__ static inline void rope_angle(float angle[2], int64_t position, int64_t pair, int64_t pairs,
                                         const Rotation& r) {
    double x = (double)position * rotation_frequency(&r, pair, pairs);
    angle[0] = (float)(r.gain * cos(x));
    angle[1] = (float)(r.gain * sin(x));
}

// angles [rows, pairs, 2] of row t at position t; count of pairs in total
__global__ static void __launch_bounds__(256)
    rope_angles_kernel(float* angles, int64_t count, int64_t pairs, const __grid_constant__ Rotation r) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) rope_angle(angles + 2 * i, i / pairs, i % pairs, pairs, r);
}

// angles [T, dh/2, 2]: cos and sin of t f_i for position t and pair i, times the gain (Rotation)
static inline void rope_angles(float* angles, int64_t T, int64_t dh, const Rotation& r, cudaStream_t stream) {
    int64_t count = T * (dh / 2);
    CUDA_LAUNCH(rope_angles_kernel, ceil_div<int64_t>(count, 256), 256, stream, angles, count, dh / 2, r);
}

// Rotates the pairs (x_i, x_{i + dh/2}) of a head by the angles of one token; direction -1 rotates back. A
// thread's eight channels are two groups of 4, each within one half of the head. Where dh / 2 is not a
// multiple of 8 (`apart`), the partners of a group are the other group of another lane.
__device__ static inline void rope_rotate(float x[8], const float* angles, float direction,
                                          const HeadThread& me) {
    int half = me.dh / 2, first_lane = (int)threadIdx.x & (32 - me.lanes);
    bool apart = half % 8, second[2];
    int pair[2], lane[2];
    for (int q = 0; q < 2; q++) {
        int c = me.channel + 4 * q;
        second[q] = c >= half;
        pair[q] = second[q] ? c - half : c;
        lane[q] = first_lane + (second[q] ? c - half : c + half) / 8;
    }
    for (int i = 0; i < 4; i += 2) {
        Pack4 angle[2] = {};
        for (int q = 0; q < 2; q++)
            if (me.active) angle[q] = load16(angles + 2 * (pair[q] + i));
        for (int k = 0; k < 2; k++) {
            float* mine[2] = {&x[i + k], &x[4 + i + k]};
            float first = *mine[0], last = *mine[1];
            float other[2] = {__shfl_sync(~0u, apart ? last : first, lane[0]),
                              __shfl_sync(~0u, apart ? first : last, lane[1])};
            for (int q = 0; q < 2; q++) {
                float cosine = angle[q][2 * k], sine = direction * angle[q][2 * k + 1];
                *mine[q] = *mine[q] * cosine + (second[q] ? sine : -sine) * other[q];
            }
        }
    }
}

// ----------------------------------------------------------------------------
// forward

// One token's eight channels of a head, in place: x as read from proj becomes a channel of q, k or v. before:
// the same channels of the token before, zero for the first token; logit: the shift gate's. Returns the
// norm's rstd. Called by all lanes of a warp.
__device__ static __forceinline__ float qkv_token(float x[8], const HeadPath& path, const Raw8& before,
                                                  float logit, const Raw8& weight, const float* angles,
                                                  const HeadThread& me) {
    float rstd = 0;
    if (path.shift >= 0) {
        float alpha = sigmoidf(logit), y[8];
        unpack8(y, before);
        for (int j = 0; j < 8; j++) x[j] = (1 - alpha) * x[j] + alpha * y[j];
    }
    if (path.weight) rstd = head_norm_forward(x, weight, path.eps, me);
    if (path.rope) rope_rotate(x, angles, 1, me);
    return rstd;
}

enum {
    QKV_TOKENS = NORM_TOKENS, // of a thread of the forward pass, all loads in flight at once
    QKV_LEAST_SEGMENT = 8     // tokens of a segment of the backward pass
};

// What one of a token's units computes: a path, and which of its heads. GROUPED, here and below: k and v have
// fewer heads than q, which may have more thread blocks.
template <bool GROUPED> struct QkvUnit {
    int path, block;

    __device__ QkvUnit(int key_blocks, int unit) {
        bool all = !GROUPED || unit < 3 * key_blocks; // paths take turns
        path = all ? unit % 3 : 0;
        block = all ? unit / 3 : unit - 2 * key_blocks;
    }
};

template <bool DOCS, bool GROUPED>
__global__ static void __launch_bounds__(256, 4)
    qkv_forward_kernel(const __grid_constant__ QkvArgs a, float* squares, const bf16* proj,
                       const float* angles, const int32_t* doc_start) {
    kernel_wait();
    int first = (int)block_from_end() / a.units * QKV_TOKENS;
    QkvUnit<GROUPED> unit(a.key_blocks, (int)block_from_end() % a.units);
    const HeadPath& path = a.paths[unit.path];
    const int heads = GROUPED ? a.heads[unit.path] : a.NH;
    HeadThread me = head_thread(heads, a.dh, unit.block);
    bool shift = path.shift >= 0, norm = path.weight != NULL, measured = squares && unit.path < 2;
    int left = min(QKV_TOKENS, a.tokens - first), t = first % a.T, in_heads = me.head * a.dh + me.channel;
    const bf16* in = proj + first * a.row_stride + path.column + in_heads;
    const bf16* logits = proj + first * a.row_stride + path.shift + me.head;

    Raw8 raw[QKV_TOKENS + 1] = {}, w = {}; // [0]: the token before the first
    float logit[QKV_TOKENS] = {}, square[QKV_TOKENS] = {};
    if (shift && t > 0 && me.active) raw[0] = load_raw8(in - a.row_stride);
#pragma unroll
    for (int i = 0; i < QKV_TOKENS; i++)
        if (me.active && i < left) {
            raw[i + 1] = load_raw8(in + i * a.row_stride);
            if (shift) logit[i] = __bfloat162float(logits[i * a.row_stride]);
        }
    if (norm && me.active) w = load_raw8(path.weight + me.head * a.weight_stride + me.channel);
#pragma unroll
    for (int i = 0; i < QKV_TOKENS; i++) {
        if (i >= left) break;
        float x[8];
        unpack8(x, raw[i + 1]);
        bool follows = DOCS ? doc_start[first + i] < t : t > 0;
        float rstd =
            qkv_token(x, path, follows ? raw[i] : Raw8{}, logit[i], w, angles + (int64_t)t * a.dh, me);
        if (norm && me.active && me.channel == 0) path.rstd[(int64_t)(first + i) * heads + me.head] = rstd;
        Raw8 out = pack8(x);
        if (me.active) store16_once(path.out + (int64_t)(first + i) * (heads * a.dh) + in_heads, out);
        if (measured) {
            unpack8(x, out);
            for (int j = 0; j < 8; j++) square[i] += x[j] * x[j];
        }
        t = t + 1 == a.T ? 0 : t + 1;
    }
    if (!measured) return;
    float largest = 0;
    for (float x : square) largest = fmaxf(largest, head_sum(x, me));
    int64_t groups = gridDim.x / (unsigned)a.units, row = unit.path * a.NH + me.head;
    if (me.active && me.channel == 0) squares[row * groups + first / QKV_TOKENS] = largest;
}

static inline QkvArgs qkv_args(const HeadPath paths[3], const HeadShape* shape) {
    QkvArgs a = {};
    int64_t tokens = shape->B * shape->T;
    for (int p = 0; p < 3; p++) a.paths[p] = paths[p];
    assert((paths[0].column | paths[1].column | paths[2].column) % 8 == 0);
    assert(shape->row_stride % 8 == 0 && shape->row_stride >= shape->columns && tokens < INT32_MAX / 2);
    a.row_stride = shape->row_stride;
    a.columns = shape->columns;
    a.tokens = (int)tokens;
    a.T = (int)shape->T;
    a.NH = a.heads[0] = (int)shape->NH;
    a.heads[1] = a.heads[2] = (int)key_heads(shape);
    a.dh = (int)shape->dh;
    a.weight_stride = (int)shape->weight_stride;
    HeadGrid grid = head_grid(shape->NH, shape->dh);
    a.key_blocks = ceil_div(grid.blocks, (int)head_group(shape));
    a.units = grid.blocks + 2 * a.key_blocks;
    return a;
}

// Writes each path's out and rstd, and squares unless that is NULL. angles are not read without RoPE.
static inline void qkv_forward(const HeadPath paths[3], float* squares, const bf16* proj, const float* angles,
                               const HeadShape* shape, cudaStream_t stream) {
    Range range("shift, QK norm, RoPE", RANGE_FORWARD, stream);
    HeadGrid heads = head_grid(shape->NH, shape->dh);
    QkvArgs a = qkv_args(paths, shape);
    const bool grouped = head_group(shape) > 1;
    auto kernel = grouped ? qkv_forward_kernel<false, true> : qkv_forward_kernel<false, false>;
    if (shape->doc_start) kernel = grouped ? qkv_forward_kernel<true, true> : qkv_forward_kernel<true, false>;
    launch_after(kernel, head_norm_groups(shape) * a.units, heads.threads, 0, stream, a, squares, proj,
                 angles, shape->doc_start);
}

// ----------------------------------------------------------------------------
// backward
//
// Token t's input reaches its own output with 1 - alpha_t and the next token's with alpha_{t+1}. A thread
// walks through a segment, neighbouring tokens of one sequence, backward in time and carries the gradient
// that comes from the later token. At the end of a segment the later token belongs to another segment: its
// share is recomputed here. A thread takes its segments for one path after another, so that all have the same
// work.

// What a thread reads of one token: its gradient, its gate, and the channels of the token before, as its own
// were read with the later token. All are raw bits: a conversion would wait for the load.
struct QkvToken {
    Raw8 dout, before;
    bf16 logit;
    float rstd;
    int32_t start; // of its document
};

template <bool DOCS, Fp8Format F>
__global__ static void __launch_bounds__(256, DOCS ? 2 : 3)
    qkv_backward_kernel(const __grid_constant__ QkvArgs a, bf16* dproj, const bf16* proj, const float* angles,
                        float* partial, const int32_t* doc_start, const __grid_constant__ Fp8Tensor dproj8) {
    kernel_wait();
    Fp8Writer<F> quantized(dproj8);
    int blocks = a.units - 2 * a.key_blocks, block = (int)blockIdx.x % blocks;
    int group = (int)blockIdx.x / blocks, groups = (int)gridDim.x / blocks, stride = (int)a.row_stride;
#pragma unroll 1
    for (int n = 0; n < 3; n++) {
        int p = (group + n) % 3; // neighbours are in different paths, which different units limit
        if (p > 0 && block >= a.key_blocks) continue;
        const HeadPath& path = a.paths[p];
        const int heads = a.heads[p], d = heads * a.dh;
        HeadThread me = head_thread(heads, a.dh, block);
        int in_heads = me.head * a.dh + me.channel;
        bool shift = path.shift >= 0, norm = path.weight != NULL;
        Raw8 w = {};
        if (norm && me.active) w = load_raw8(path.weight + me.head * a.weight_stride + me.channel);
        float dw[8] = {};
        for (int segment = group; segment < a.segments; segment += groups) {
            int first = segment % a.segments_of_T * a.segment, last = min(first + a.segment, a.T);
            int t = shift && last < a.T ? last : last - 1; // `last` only for its share in token last - 1
            int64_t bt = (int64_t)(segment / a.segments_of_T) * a.T + t;
            // the same in all threads, so that they are in uniform registers
            const bf16 *row = proj + bt * stride, *dout = path.dout + bt * d;
            const float* rstd = path.rstd + bt * heads;
            const int32_t* start = DOCS ? doc_start + bt : NULL;
            bf16* drow = dproj + bt * stride;
            int64_t at8 = bt * dproj8.stride + path.column; // may exceed 32 bits
            int column = (int)path.column, gate = (int)path.shift;
            auto load = [&](bool valid, bool has_before) {
                QkvToken token = {};
                if (valid) token.dout = load_raw8(dout + in_heads);
                if (valid && has_before && (shift || norm))
                    token.before = load_raw8(row - stride + column + in_heads);
                if (valid && shift) token.logit = (row + gate)[me.head];
                if (valid && norm) token.rstd = rstd[me.head];
                if (DOCS && valid) token.start = *start;
                return token;
            };
            float later[8] = {};
            Raw8 now = {};
            if ((shift || norm) && me.active) now = load_raw8(row + column + in_heads);
            QkvToken ahead = load(me.active, t > 0);
#pragma unroll 1
            for (; t >= first; t--) {
                QkvToken token = ahead;
                row -= stride, dout -= d, rstd -= heads;
                if (DOCS) start--;
                const bool begins = DOCS && token.start == t; // nothing comes from the token before
                ahead = load(me.active && t > first, t > 1);
                float alpha = shift ? sigmoidf(__bfloat162float(token.logit)) : 0, dalpha = 0;
                float g[8], x[8], change[8];
                unpack8(g, token.dout);
                unpack8(x, now);
                unpack8(change, begins ? Raw8{} : token.before);
                now = token.before;
                for (int i = 0; i < 8; i++)
                    change[i] -= x[i], x[i] += alpha * change[i]; // x: after the shift
                if (path.rope) rope_rotate(g, angles + (int64_t)t * a.dh, -1, me);
                if (norm) head_norm_backward(g, dw, x, w, token.rstd, t < last, me);
                for (int i = 0; i < 8; i++) {
                    dalpha += g[i] * change[i];
                    x[i] = (1 - alpha) * g[i] + later[i]; // gradient of the input
                    later[i] = begins ? 0 : alpha * g[i];
                }
                if (t < last) {
                    if (me.active && !quantized.alone()) store16_once(drow + column + in_heads, pack8(x));
                    if (me.active) quantized.store(at8 + in_heads, pack8(x));
                    if (shift) dalpha = head_sum(dalpha, me) * alpha * (1 - alpha);
                    if (shift && me.active && me.channel == 0)
                        (drow + gate)[me.head] = __float2bfloat16(dalpha);
                }
                drow -= stride;
                at8 -= dproj8.stride;
            }
            if (p + block == 0) { // zeros the padding columns; drow is the row before the segment
                int padding = (int)(a.row_stride - a.columns);
                for (int i = (int)threadIdx.x; i < (last - first) * padding; i += (int)blockDim.x)
                    drow[(int64_t)(1 + i / padding) * stride + a.columns + i % padding] = __float2bfloat16(0);
            }
        }
        int64_t row_of_path = (int64_t)p * groups * a.NH * a.dh + (int64_t)group * d;
        if (norm && me.active) store8(partial + row_of_path + in_heads, dw);
    }
    quantized.finish();
}

// Cuts sequences into segments such that `groups` groups of thread blocks have equally many iterations: one
// for each token of a segment, and one for the share in it of the token behind.
static inline void qkv_cut(QkvArgs* a, int B, int groups) {
    int64_t least = INT64_MAX;
    for (int rounds = 1; rounds <= 8; rounds++) {
        int segment = ceil_div(a->T, std::max(1, rounds * groups / B));
        if (segment < QKV_LEAST_SEGMENT) segment = QKV_LEAST_SEGMENT;
        int of_T = ceil_div(a->T, segment);
        int64_t iterations = ceil_div<int64_t>((int64_t)B * of_T, groups) * (segment + 1);
        if (iterations >= least) continue;
        least = iterations;
        a->segment = segment;
        a->segments_of_T = of_T;
        a->segments = B * of_T;
    }
}

// dweight += sum of partial [rows, NH, dh] over its rows. With weights shared by all heads, dweight is [dh],
// and the sum is over the heads too; the first row of partial is then overwritten.
static inline void add_head_partials(float* dweight, float* partial, int64_t rows, int64_t NH, int64_t dh,
                                     bool shared, cudaStream_t stream) {
    sum_rows(shared ? partial : dweight, partial, rows, NH * dh, !shared, stream);
    if (shared) sum_rows(dweight, partial, NH, dh, true, stream);
}

// Writes the columns of dproj that the paths read, but for the shift gates' in dproj8 too, in E5M2, or there
// alone; zeros its padding columns, and adds to each path's dweight.
static inline void qkv_backward(const HeadPath paths[3], bf16* dproj, const bf16* proj, const float* angles,
                                const NormPartial& partial, const HeadShape* shape, const Fp8Tensor& dproj8,
                                cudaStream_t stream) {
    Range range("shift, QK norm, RoPE", RANGE_BACKWARD, stream);
    int64_t NH = shape->NH, dh = shape->dh;
    HeadGrid heads = head_grid(NH, dh);
    QkvArgs a = qkv_args(paths, shape);
    if (a.tokens == 0) return;
    auto kernel = dproj8.data && shape->doc_start ? qkv_backward_kernel<true, FP8_E5M2>
                  : dproj8.data                   ? qkv_backward_kernel<false, FP8_E5M2>
                  : shape->doc_start              ? qkv_backward_kernel<true, FP8_NONE>
                                                  : qkv_backward_kernel<false, FP8_NONE>;
    // rows of partial sums fit for the paths up to the last one with a norm
    int64_t paths_normed = paths[2].weight ? 3 : paths[1].weight ? 2 : 1;
    int64_t rows = (int64_t)(norm_partial_bytes() / sizeof(float)) / (paths_normed * NH * dh);
    int64_t groups = resident_groups(kernel, heads.threads, heads.blocks, rows);
    qkv_cut(&a, (int)shape->B, (int)groups);
    if (groups > a.segments) groups = a.segments;
    launch_after(kernel, groups * heads.blocks, heads.threads, 0, stream, a, dproj, proj, angles,
                 partial.sums, shape->doc_start, dproj8);
    for (int p = 0; p < 3; p++)
        if (paths[p].weight)
            add_head_partials(paths[p].dweight, partial.sums + p * groups * NH * dh, groups, a.heads[p], dh,
                              shape->weight_stride == 0, partial.fork(stream));
}
