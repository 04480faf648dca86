/*
Heads on their way from the fused projection into attention: shift, QK norm, RoPE.

q, k and v differ only in which of the three they take, so one description serves all, and every switch is free on its
own. A block has one of the three paths, so that its threads agree on the switches; a thread has eight channels of one
head and walks over tokens, with its norm weights, and what the shift takes from the neighbouring token, in registers.
So everything is read once, but for one token at the end of each walk.

Layouts: proj and dproj [B,T,stride], of which columns 0..R-1 are in use (ProjLayout); q, k, v and their gradients
[B,T,NH,dh]; rstd [B,T,NH]; angles [T,dh/2,2]. Pointers to bf16 and angles are aligned to 16 bytes; stride and the
columns of q, k and v are multiples of 8.
*/
#ifndef LLMC_QKV_CUH
#define LLMC_QKV_CUH

#include "config.h"
#include "rmsnorm.cuh"

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
    int64_t tokens, stride, R;
    int T, NH, dh;
    int weight_step; // from one head's norm weights to the next: dh, or 0 when shared
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

// Rotates the pairs (x_i, x_{i + dh/2}) of a head by one token's angles; direction -1 rotates back. Four neighbouring
// channels are always in the same half; where dh / 2 is no multiple of 8, their partners lie four places apart.
__device__ static inline void rope_rotate(float x[8], const float* angles, float direction,
                                          const HeadThread& me) {
    int half = me.dh / 2, first_lane = threadIdx.x % 32 / me.lanes * me.lanes;
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

#define QKV_WALK 32 // tokens that a block of the forward pass walks over

// What a thread reads of one token.
struct QkvToken {
    Raw8 in, dout;
    float logit, rstd;
};

__global__ static void __launch_bounds__(256, 4)
    qkv_forward_kernel(const __grid_constant__ QkvArgs a, const bf16* proj, const float* angles) {
    const HeadPath& path = a.paths[blockIdx.y];
    HeadThread me = head_thread(a.NH, a.dh, blockIdx.z);
    bool shift = path.shift >= 0, norm = path.weight != NULL;
    int64_t first = (int64_t)blockIdx.x * QKV_WALK, last = min(first + QKV_WALK, a.tokens);
    const bf16* in = proj + path.column + me.head * a.dh + me.channel;
    const bf16* logits = proj + path.shift + me.head;
    auto load = [&](int64_t bt) {
        QkvToken token = {};
        if (!me.active) return token;
        token.in = load_raw8_once(in + bt * a.stride);
        if (shift) token.logit = __bfloat162float(logits[bt * a.stride]);
        return token;
    };

    Raw8 w = {};
    if (norm && me.active) w = load_raw8(path.weight + me.head * a.weight_step + me.channel);
    int t = (int)(first % a.T);
    Raw8 before = {};
    if (shift && t > 0) before = load(first - 1).in;
    QkvToken ahead[2] = {load(first)};
    if (first + 1 < last) ahead[1] = load(first + 1);
#pragma unroll 1
    for (int64_t bt = first; bt < last; bt++) {
        QkvToken now = ahead[0];
        ahead[0] = ahead[1];
        if (bt + 2 < last) ahead[1] = load(bt + 2);
        float x[8];
        unpack8(x, now.in);
        if (shift) {
            float alpha = sigmoidf(now.logit), last_x[8];
            unpack8(last_x, t > 0 ? before : Raw8{});
            for (int i = 0; i < 8; i++) x[i] = (1 - alpha) * x[i] + alpha * last_x[i];
            before = now.in;
        }
        if (norm) {
            float rstd = head_norm_forward(x, w, (float)QK_NORM_EPS, me);
            if (me.active && me.channel == 0) path.rstd[bt * a.NH + me.head] = rstd;
        }
        if (path.rope) rope_rotate(x, angles + (int64_t)t * a.dh, 1, me);
        if (me.active) store16(path.out + (bt * a.NH + me.head) * a.dh + me.channel, pack8(x));
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
    assert(stride % 8 == 0 && stride >= R && dh <= 256);
    a.tokens = B * T, a.stride = stride, a.R = R;
    a.T = (int)T, a.NH = (int)NH, a.dh = (int)dh, a.weight_step = (int)weight_step;
    return a;
}

// proj -> each path's out and rstd
static inline void qkv_forward(const HeadPath paths[3], const bf16* proj, const float* angles, int64_t B,
                               int64_t T, int64_t NH, int64_t dh, int64_t R, int64_t stride,
                               int64_t weight_step, cudaStream_t stream) {
    HeadGrid heads = head_grid(NH, dh);
    QkvArgs a = qkv_args(paths, B, T, NH, dh, R, stride, weight_step);
    if (a.tokens == 0) return;
    dim3 grid((unsigned)ceil_div<int64_t>(a.tokens, QKV_WALK), 3, (unsigned)heads.blocks);
    qkv_forward_kernel<<<grid, heads.threads, 0, stream>>>(a, proj, angles);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// backward
//
// Token t's channels reach its own output by 1 - alpha_t and the next token's by alpha_{t+1}, so a walk goes down in
// time and carries what the later token gave. The later token of a walk's last one is in another block's walk: its
// share is computed here once more.

__global__ static void __launch_bounds__(256, 3)
    qkv_backward_kernel(const __grid_constant__ QkvArgs a, bf16* dproj, float* partial, const bf16* proj,
                        const float* angles) {
    const HeadPath& path = a.paths[blockIdx.y];
    HeadThread me = head_thread(a.NH, a.dh, blockIdx.z);
    bool shift = path.shift >= 0, norm = path.weight != NULL;
    int64_t first = a.tokens * blockIdx.x / gridDim.x, last = a.tokens * (blockIdx.x + 1) / gridDim.x;
    int in_heads = me.head * a.dh + me.channel, column = (int)path.column + in_heads;
    // the token's own gradient and gate, but the channels of the one before it: its own came with the later one
    auto load = [&](int64_t bt) {
        QkvToken token = {};
        if (!me.active) return token;
        token.dout = load_raw8_once(path.dout + bt * (a.NH * a.dh) + in_heads);
        if ((shift || norm) && bt > 0) token.in = load_raw8_once(proj + (bt - 1) * a.stride + column);
        if (shift) token.logit = __bfloat162float(proj[bt * a.stride + path.shift + me.head]);
        if (norm) token.rstd = path.rstd[bt * a.NH + me.head];
        return token;
    };

    Raw8 w = {}, now = {};
    if (norm && me.active) w = load_raw8(path.weight + me.head * a.weight_step + me.channel);
    float dw[8] = {}, later[8] = {};
    int64_t bt = shift && last < a.tokens && last % a.T ? last : last - 1; // `last` only for what it took
    int t = (int)(bt % a.T);
    if ((shift || norm) && me.active) now = load_raw8(proj + bt * a.stride + column);
    QkvToken ahead = load(bt);
#pragma unroll 1
    for (; bt >= first; bt--) {
        QkvToken token = ahead;
        if (bt > first) ahead = load(bt - 1);
        float alpha = shift ? sigmoidf(token.logit) : 0, dalpha = 0, g[8], out[8], x_now[8], x_before[8];
        unpack8(x_now, now);
        unpack8(x_before, t > 0 ? token.in : Raw8{});
        unpack8(g, token.dout);
        if (path.rope) rope_rotate(g, angles + (int64_t)t * a.dh, -1, me);
        if (norm) {
            float x[8];
            for (int i = 0; i < 8; i++) x[i] = (1 - alpha) * x_now[i] + alpha * x_before[i];
            head_norm_backward(g, dw, x, w, token.rstd, me);
        }
        for (int i = 0; i < 8; i++) {
            out[i] = (1 - alpha) * g[i] + later[i];
            dalpha += g[i] * (x_before[i] - x_now[i]);
            later[i] = t > 0 ? alpha * g[i] : 0;
        }
        if (bt < last) {
            if (me.active) store16(dproj + bt * a.stride + column, pack8(out));
            if (shift) dalpha = head_sum(dalpha, me) * alpha * (1 - alpha);
            if (shift && me.active && me.channel == 0)
                dproj[bt * a.stride + path.shift + me.head] = __float2bfloat16(dalpha);
            if (blockIdx.y == 0 && blockIdx.z == 0)
                for (int64_t c = a.R + threadIdx.x; c < a.stride; c += blockDim.x)
                    dproj[bt * a.stride + c] = __float2bfloat16(0);
        } else {
            for (int i = 0; i < 8; i++) dw[i] = 0; // another walk's
        }
        now = token.in;
        t = t == 0 ? a.T - 1 : t - 1;
    }
    if (norm && me.active)
        store8(partial + ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * a.NH * a.dh + in_heads, dw);
}

// out [n] += the sums that a kernel over heads left in partial [rows,NH,dh]: n = NH dh, or dh where heads share (then
// partial's first row is used up).
static inline void add_head_partials(float* dweight, float* partial, int64_t rows, int64_t NH, int64_t dh,
                                     bool shared, cudaStream_t stream) {
    if (!shared) {
        sum_rows(dweight, partial, rows, NH * dh, true, stream);
    } else {
        sum_rows(partial, partial, rows, NH * dh, false, stream);
        sum_rows(dweight, partial, NH, dh, true, stream);
    }
}

// Writes the columns of dproj that the paths read, zeros its padding columns R..stride-1, and adds to each path's
// dweight. partial is scratch of norm_partial_bytes.
static inline void qkv_backward(const HeadPath paths[3], bf16* dproj, const bf16* proj, const float* angles,
                                float* partial, int64_t B, int64_t T, int64_t NH, int64_t dh, int64_t R,
                                int64_t stride, int64_t weight_step, cudaStream_t stream) {
    HeadGrid heads = head_grid(NH, dh);
    QkvArgs a = qkv_args(paths, B, T, NH, dh, R, stride, weight_step);
    if (a.tokens == 0) return;
    int64_t walks = resident_blocks(qkv_backward_kernel, heads.threads) / (3 * heads.blocks);
    walks = walks < 1 ? 1 : walks > a.tokens ? a.tokens : walks;
    dim3 grid((unsigned)walks, 3, (unsigned)heads.blocks);
    qkv_backward_kernel<<<grid, heads.threads, 0, stream>>>(a, dproj, partial, proj, angles);
    CUDA_CHECK_LAUNCH();
    for (int p = 0; p < 3; p++)
        if (paths[p].weight)
            add_head_partials(paths[p].dweight, partial + p * walks * NH * dh, walks, NH, dh,
                              weight_step == 0, stream);
}

#endif // LLMC_QKV_CUH
