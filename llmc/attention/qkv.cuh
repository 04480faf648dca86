/*
Heads on their way from the fused projection into attention: shift, QK norm, RoPE.

q, k and v differ only in which of the three they take, so one description serves all, and every switch is
free on its own. A block has one of the three paths, so that its threads agree on the switches; a thread has
eight channels of one head, of neighbouring tokens, so that what the shift takes from the next token is in its
registers already.

Layouts: proj and dproj [B,T,stride], of which columns 0..R-1 are in use (ProjLayout); q, k, v and their
gradients [B,T,NH,dh]; rstd [B,T,NH]; angles [T,dh/2,2]. Pointers to bf16 and angles are aligned to 16 bytes;
stride and the columns of q, k and v are multiples of 8.
*/
#ifndef LLMC_QKV_CUH
#define LLMC_QKV_CUH

#include "../model/config.h"
#include "../cuda/rmsnorm.cuh"

typedef struct {
    int64_t column;     // of the heads' channels in a row of proj
    int64_t shift;      // column of its shift gate's logits in proj, -1 without shift
    const bf16* weight; // QK norm's [NH,dh] or [dh], NULL without
    float* dweight;     //
    bool rope;          //
    bf16* out;          // [B,T,NH,dh]
    float* rstd;        // [B,T,NH], with QK norm
    const bf16* dout;   // [B,T,NH,dh]
} HeadPath;

struct QkvArgs {
    HeadPath paths[3];
    int64_t stride, R;
    int tokens, T, NH, dh;
    int weight_step;       // from one head's norm weights to the next: dh, or 0 when shared
    int units;             // blocks that a token's three paths take
    int walks_of_T, walks; // of the backward pass
};

// ----------------------------------------------------------------------------
// RoPE

__global__ static void __launch_bounds__(256)
    rope_angles_kernel(float* angles, int64_t count, int64_t pairs, double base) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    double angle = (double)(i / pairs) * pow(base, -(double)(i % pairs) / (double)pairs);
    angles[2 * i] = (float)cos(angle);
    angles[2 * i + 1] = (float)sin(angle);
}

// angles [T,dh/2,2]: cos and sin of t base^(-2i/dh) for position t and pair i
static inline void rope_angles(float* angles, int64_t T, int64_t dh, double base, cudaStream_t stream) {
    int64_t count = T * (dh / 2);
    rope_angles_kernel<<<(unsigned)ceil_div<int64_t>(count, 256), 256, 0, stream>>>(angles, count, dh / 2,
                                                                                    base);
    CUDA_CHECK_LAUNCH();
}

// Rotates the pairs (x_i, x_{i + dh/2}) of a head by one token's angles; direction -1 rotates back. Four
// neighbouring channels are always in the same half; where dh / 2 is no multiple of 8, their partners lie
// four places apart.
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

#define QKV_TOKENS 4  // that a thread of the forward pass takes, all loads on their way at once
#define QKV_WALK   15 // tokens of a walk of the backward pass, all of one sequence

__global__ static void __launch_bounds__(256)
    qkv_forward_kernel(const __grid_constant__ QkvArgs a, const bf16* proj, const float* angles) {
    int unit = (int)blockIdx.x % a.units, first = (int)blockIdx.x / a.units * QKV_TOKENS;
    const HeadPath& path = a.paths[unit % 3];
    HeadThread me = head_thread(a.NH, a.dh, unit / 3);
    bool shift = path.shift >= 0, norm = path.weight != NULL;
    int left = min(QKV_TOKENS, a.tokens - first), t = first % a.T, in_heads = me.head * a.dh + me.channel;
    const bf16* in = proj + first * a.stride + path.column + in_heads;
    const bf16* logits = proj + first * a.stride + path.shift + me.head;

    Raw8 raw[QKV_TOKENS + 1] = {}, w = {}; // [0] is of the token before
    float logit[QKV_TOKENS] = {};
    if (shift && t > 0 && me.active) raw[0] = load_raw8(in - a.stride);
#pragma unroll
    for (int i = 0; i < QKV_TOKENS; i++)
        if (me.active && i < left) {
            raw[i + 1] = load_raw8(in + i * a.stride);
            if (shift) logit[i] = __bfloat162float(logits[i * a.stride]);
        }
    if (norm && me.active) w = load_raw8(path.weight + me.head * a.weight_step + me.channel);
#pragma unroll
    for (int i = 0; i < QKV_TOKENS; i++) {
        if (i >= left) break;
        float x[8];
        unpack8(x, raw[i + 1]);
        if (shift) {
            float alpha = sigmoidf(logit[i]), before[8];
            unpack8(before, t > 0 ? raw[i] : Raw8{});
            for (int j = 0; j < 8; j++) x[j] = (1 - alpha) * x[j] + alpha * before[j];
        }
        if (norm) {
            float rstd = head_norm_forward(x, w, (float)QK_NORM_EPS, me);
            if (me.active && me.channel == 0) path.rstd[(int64_t)(first + i) * a.NH + me.head] = rstd;
        }
        if (path.rope) rope_rotate(x, angles + (int64_t)t * a.dh, 1, me);
        if (me.active) store16_once(path.out + (int64_t)(first + i) * (a.NH * a.dh) + in_heads, pack8(x));
        t = t + 1 == a.T ? 0 : t + 1;
    }
}

static inline QkvArgs qkv_args(const HeadPath paths[3], int64_t B, int64_t T, int64_t NH, int64_t dh,
                               int64_t R, int64_t stride, int64_t weight_step) {
    QkvArgs a;
    for (int p = 0; p < 3; p++) {
        a.paths[p] = paths[p];
        assert(paths[p].column % 8 == 0);
    }
    assert(stride % 8 == 0 && stride >= R && B * T < INT32_MAX / 2);
    a.stride = stride, a.R = R;
    a.tokens = (int)(B * T), a.T = (int)T, a.NH = (int)NH, a.dh = (int)dh;
    a.weight_step = (int)weight_step, a.units = 3 * head_grid(NH, dh).blocks;
    a.walks_of_T = ceil_div(a.T, QKV_WALK), a.walks = (int)B * a.walks_of_T;
    return a;
}

// proj -> each path's out and rstd
static inline void qkv_forward(const HeadPath paths[3], const bf16* proj, const float* angles, int64_t B,
                               int64_t T, int64_t NH, int64_t dh, int64_t R, int64_t stride,
                               int64_t weight_step, cudaStream_t stream) {
    HeadGrid heads = head_grid(NH, dh);
    QkvArgs a = qkv_args(paths, B, T, NH, dh, R, stride, weight_step);
    if (a.tokens == 0) return;
    dim3 grid((unsigned)(ceil_div(a.tokens, QKV_TOKENS) * a.units));
    qkv_forward_kernel<<<grid, heads.threads, 0, stream>>>(a, proj, angles);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// backward
//
// Token t's channels reach its own output by 1 - alpha_t and the next token's by alpha_{t+1}, so a walk goes
// down in time and carries what the later token gave. The later token of a walk's last one is in another
// walk: its share is computed here once more.

// What a thread reads of one token: its own gradient and gate, but the channels of the token before, as its
// own came with the later one. All as it lies in memory: a conversion here would wait for the load.
struct QkvToken {
    Raw8 dout, before;
    bf16 logit;
    float rstd;
};

__global__ static void __launch_bounds__(256, 3)
    qkv_backward_kernel(const __grid_constant__ QkvArgs a, bf16* dproj, float* partial, const bf16* proj,
                        const float* angles) {
    int unit = (int)blockIdx.x % a.units, group = (int)blockIdx.x / a.units;
    int groups = (int)gridDim.x / a.units;
    const HeadPath& path = a.paths[unit % 3];
    HeadThread me = head_thread(a.NH, a.dh, unit / 3);
    bool shift = path.shift >= 0, norm = path.weight != NULL;
    int d = a.NH * a.dh, in_heads = me.head * a.dh + me.channel, stride = (int)a.stride;
    Raw8 w = {};
    if (norm && me.active) w = load_raw8(path.weight + me.head * a.weight_step + me.channel);
    float dw[8] = {};
    for (int walk = group; walk < a.walks; walk += groups) {
        int first = walk % a.walks_of_T * QKV_WALK, last = min(first + QKV_WALK, a.T);
        int t = shift && last < a.T ? last : last - 1; // `last` only for what it took
        int64_t bt = (int64_t)(walk / a.walks_of_T) * a.T + t;
        const bf16 *row = proj + bt * stride, *dout = path.dout + bt * d + in_heads;
        const float* rstd = path.rstd + bt * a.NH + me.head;
        bf16* drow = dproj + bt * stride;
        int column = (int)path.column + in_heads, column_before = column - stride;
        int gate = (int)path.shift + me.head;
        auto load = [&](bool valid, bool has_before) {
            QkvToken token = {};
            if (valid) token.dout = load_raw8(dout);
            if (valid && has_before && (shift || norm)) token.before = load_raw8(row + column_before);
            if (valid && shift) token.logit = row[gate];
            if (valid && norm) token.rstd = *rstd;
            return token;
        };
        float later[8] = {};
        Raw8 now = {};
        if ((shift || norm) && me.active) now = load_raw8(row + column);
        QkvToken ahead = load(me.active, t > 0);
#pragma unroll 1
        for (; t >= first; t--) {
            QkvToken token = ahead;
            row -= stride, dout -= d, rstd -= a.NH;
            ahead = load(me.active && t > first, t > 1);
            float alpha = shift ? sigmoidf(__bfloat162float(token.logit)) : 0, dalpha = 0;
            float g[8], x[8], step[8];
            unpack8(g, token.dout);
            unpack8(x, now);
            unpack8(step, token.before);
            now = token.before;
            for (int i = 0; i < 8; i++) step[i] -= x[i], x[i] += alpha * step[i]; // x is now the shifted one
            if (path.rope) rope_rotate(g, angles + (int64_t)t * a.dh, -1, me);
            if (norm) head_norm_backward(g, dw, x, w, token.rstd, t < last, me);
            for (int i = 0; i < 8; i++) {
                dalpha += g[i] * step[i];
                x[i] = (1 - alpha) * g[i] + later[i]; // now the gradient
                later[i] = alpha * g[i];
            }
            if (t < last) {
                if (me.active) store16_once(drow + column, pack8(x));
                if (shift) dalpha = head_sum(dalpha, me) * alpha * (1 - alpha);
                if (shift && me.active && me.channel == 0) drow[gate] = __float2bfloat16(dalpha);
            }
            drow -= stride;
        }
        if (unit == 0) { // drow is that of the token before the walk
            int padding = (int)(a.stride - a.R);
            for (int i = (int)threadIdx.x; i < (last - first) * padding; i += (int)blockDim.x)
                drow[(1 + i / padding) * stride + a.R + i % padding] = __float2bfloat16(0);
        }
    }
    if (norm && me.active) store8(partial + ((int64_t)(unit % 3) * groups + group) * d + in_heads, dw);
}

// dweight += the sums that a kernel over heads left in partial [rows,NH,dh]; where heads share weights,
// dweight is [dh], and partial's first row is used up.
static inline void add_head_partials(float* dweight, float* partial, int64_t rows, int64_t NH, int64_t dh,
                                     bool shared, cudaStream_t stream) {
    if (!shared) {
        sum_rows(dweight, partial, rows, NH * dh, true, stream);
    } else {
        sum_rows(partial, partial, rows, NH * dh, false, stream);
        sum_rows(dweight, partial, NH, dh, true, stream);
    }
}

// Writes the columns of dproj that the paths read, zeros its padding columns R..stride-1, and adds to each
// path's dweight. partial is scratch of norm_partial_bytes.
static inline void qkv_backward(const HeadPath paths[3], bf16* dproj, const bf16* proj, const float* angles,
                                float* partial, int64_t B, int64_t T, int64_t NH, int64_t dh, int64_t R,
                                int64_t stride, int64_t weight_step, cudaStream_t stream) {
    HeadGrid heads = head_grid(NH, dh);
    QkvArgs a = qkv_args(paths, B, T, NH, dh, R, stride, weight_step);
    if (a.tokens == 0) return;
    int64_t groups = resident_blocks(qkv_backward_kernel, heads.threads) / a.units;
    groups = groups < 1 ? 1 : groups > a.walks ? a.walks : groups;
    qkv_backward_kernel<<<(unsigned)(groups * a.units), heads.threads, 0, stream>>>(a, dproj, partial, proj,
                                                                                    angles);
    CUDA_CHECK_LAUNCH();
    for (int p = 0; p < 3; p++)
        if (paths[p].weight)
            add_head_partials(paths[p].dweight, partial + p * groups * NH * dh, groups, NH, dh,
                              weight_step == 0, stream);
}

#endif // LLMC_QKV_CUH
