/*
Output norm and output gate: y = RMSNorm(o) over each head's channels, times sigmoid(g); either may be
missing.

A thread has eight channels of one head. The backward pass also leaves what attention's begins with, delta =
the sum of do * o over a head's channels, as both are at hand.

Layouts: o, y and their gradients [B,T,NH,dh]; gate and dgate point at their column in proj and dproj
[B,T,stride]; rstd [B,T,NH]; delta [B,NH,T]. Pointers to bf16 are aligned to 16 bytes, stride is a multiple of
8.
*/
#ifndef LLMC_OUTPUT_GATE_CUH
#define LLMC_OUTPUT_GATE_CUH

#include "qkv.cuh"

#define OUTPUT_GATE_TOKENS 2 // that a thread of the forward pass takes, all loads on their way at once

// What a thread reads of one token.
struct OutputGateToken {
    Raw8 o, logits, dy;
    float rstd;
};

__global__ static void __launch_bounds__(256)
    output_gate_forward_kernel(bf16* y, float* rstd, const bf16* o, const bf16* weight, const bf16* gate,
                               int tokens, int NH, int dh, int64_t stride, float eps) {
    HeadThread me = head_thread(NH, dh, (int)blockIdx.y);
    int column = me.head * dh + me.channel, d = NH * dh;
    int first = (int)blockIdx.x * OUTPUT_GATE_TOKENS, left = min(OUTPUT_GATE_TOKENS, tokens - first);
    int64_t at = (int64_t)first * d + column, at_gate = first * stride + column;
    Raw8 in[OUTPUT_GATE_TOKENS] = {}, logits[OUTPUT_GATE_TOKENS] = {}, w = {};
#pragma unroll
    for (int i = 0; i < OUTPUT_GATE_TOKENS; i++)
        if (me.active && i < left) {
            in[i] = load_raw8_once(o + at + i * d);
            if (gate) logits[i] = load_raw8_once(gate + at_gate + i * stride);
        }
    if (weight && me.active) w = load_raw8(weight + column);
#pragma unroll
    for (int i = 0; i < OUTPUT_GATE_TOKENS; i++) {
        if (i >= left) break;
        float x[8], open[8];
        unpack8(x, in[i]);
        unpack8(open, logits[i]);
        if (weight) {
            float r = head_norm_forward(x, w, eps, me);
            if (me.active && me.channel == 0) rstd[(int64_t)(first + i) * NH + me.head] = r;
        }
        if (gate)
            for (int j = 0; j < 8; j++) x[j] *= sigmoidf(open[j]);
        if (me.active) store16_once(y + at + i * d, pack8(x));
    }
}

// y and rstd from o; rstd only with a norm. weight [NH,dh] is NULL without norm, gate NULL without gate. y
// may be o where nobody needs o any more.
static inline void output_gate_forward(bf16* y, float* rstd, const bf16* o, const bf16* weight,
                                       const bf16* gate, int64_t B, int64_t T, int64_t NH, int64_t dh,
                                       int64_t stride, double eps, cudaStream_t stream) {
    HeadGrid heads = head_grid(NH, dh);
    assert(stride % 8 == 0 && B * T < INT32_MAX / 2);
    if (B * T == 0) return;
    dim3 grid((unsigned)ceil_div<int64_t>(B * T, OUTPUT_GATE_TOKENS), (unsigned)heads.blocks);
    output_gate_forward_kernel<<<grid, heads.threads, 0, stream>>>(y, rstd, o, weight, gate, (int)(B * T),
                                                                   (int)NH, (int)dh, stride, (float)eps);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------

__global__ static void __launch_bounds__(256, 3)
    output_gate_backward_kernel(bf16* dout, float* partial, bf16* dgate, float* delta, bf16* y,
                                const bf16* dy, const bf16* o, const bf16* weight, const float* rstd,
                                const bf16* gate, int tokens, int T, int NH, int dh, int64_t stride) {
    HeadThread me = head_thread(NH, dh, (int)blockIdx.y);
    int column = me.head * dh + me.channel, d = NH * dh;
    Raw8 w = {};
    if (weight && me.active) w = load_raw8(weight + column);
    float dw[8] = {};
    auto load = [&](int bt, bool valid) {
        OutputGateToken token = {};
        int64_t at = (int64_t)bt * d + column;
        if (valid) token.dy = load_raw8_once(dy + at);
        if (valid) token.o = load_raw8_once(o + at);
        if (valid && gate) token.logits = load_raw8_once(gate + bt * stride + column);
        token.rstd = 1;
        if (valid && weight) token.rstd = rstd[(int64_t)bt * NH + me.head];
        return token;
    };
    OutputGateToken ahead = load((int)blockIdx.x, me.active);
    int b = (int)blockIdx.x / T, t = (int)blockIdx.x % T;
#pragma unroll 1
    for (int bt = (int)blockIdx.x; bt < tokens; bt += (int)gridDim.x) {
        OutputGateToken token = ahead;
        int next = bt + (int)gridDim.x;
        ahead = load(next, me.active && next < tokens);
        float x[8], g[8], normed[8];
        unpack8(x, token.o);
        unpack8(g, token.dy);
        if (weight) unpack8(normed, w);
        for (int i = 0; i < 8; i++) normed[i] = weight ? x[i] * (token.rstd * normed[i]) : x[i];
        if (gate) {
            float logits[8];
            unpack8(logits, token.logits);
            for (int i = 0; i < 8; i++) {
                float open = sigmoidf(logits[i]);
                g[i] *= open;
                logits[i] = g[i] * normed[i] * (1 - open); // now its gradient
                normed[i] *= open;
            }
            if (me.active) store16_once(dgate + bt * stride + column, pack8(logits));
        }
        if (me.active) store16_once(y + (int64_t)bt * d + column, pack8(normed));
        if (weight) head_norm_backward(g, dw, x, w, token.rstd, true, me);
        Raw8 out = pack8(g);
        if (me.active) store16_once(dout + (int64_t)bt * d + column, out);
        if (delta) {
            float sum = 0;
            unpack8(g, out); // as attention will read it
            for (int i = 0; i < 8; i++) sum += g[i] * x[i];
            sum = head_sum(sum, me);
            if (me.active && me.channel == 0) delta[((int64_t)b * NH + me.head) * T + t] = sum;
        }
        for (t += (int)gridDim.x; t >= T; t -= T) b++;
    }
    if (weight && me.active) store8(partial + (int64_t)blockIdx.x * d + column, dw);
}

// Writes dout, the gradient of o, and dgate from dy, and adds to dweight; delta too unless it is NULL. y
// comes once more, as the forward pass gave it: made in passing, it need not be kept. dout may be dy.
// partial is scratch of norm_partial_bytes.
static inline void output_gate_backward(bf16* dout, float* dweight, bf16* dgate, float* delta, bf16* y,
                                        const bf16* dy, const bf16* o, const bf16* weight, const float* rstd,
                                        const bf16* gate, float* partial, int64_t B, int64_t T, int64_t NH,
                                        int64_t dh, int64_t stride, cudaStream_t stream) {
    HeadGrid heads = head_grid(NH, dh);
    assert(stride % 8 == 0 && B * T < INT32_MAX / 2);
    int64_t tokens = B * T;
    if (tokens == 0) return;
    int64_t groups = resident_blocks(output_gate_backward_kernel, heads.threads) / heads.blocks;
    groups = groups < 1 ? 1 : groups > tokens ? tokens : groups;
    dim3 grid((unsigned)groups, (unsigned)heads.blocks);
    output_gate_backward_kernel<<<grid, heads.threads, 0, stream>>>(dout, partial, dgate, delta, y, dy, o,
                                                                    weight, rstd, gate, (int)tokens, (int)T,
                                                                    (int)NH, (int)dh, stride);
    CUDA_CHECK_LAUNCH();
    if (weight) add_head_partials(dweight, partial, groups, NH, dh, false, stream);
}

#endif // LLMC_OUTPUT_GATE_CUH
