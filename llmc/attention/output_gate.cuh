/*
Output norm and output gate: y = RMSNorm(o) over the channels of each head, times sigmoid(gate); each of them optional.

    o, y, and their gradients dout, dy   bf16 [B, T, NH, dh]
    gate, dgate                          columns of proj and dproj, bf16 [B, T, row_stride]
    rstd                                 float [B, T, NH]
    delta                                float [B, NH, T]

A thread has eight channels of one head. The backward pass also computes delta = sum of dout * o over a head's channels,
which attention's backward pass needs, as both are in registers. Pointers to bf16 are aligned to 16 bytes, row_stride is a
multiple of 8.
*/
#ifndef LLMC_OUTPUT_GATE_CUH
#define LLMC_OUTPUT_GATE_CUH

#include "qkv.cuh"

typedef struct {
    const bf16* weight; // [NH, dh] of the output norm; NULL: no norm
    float* dweight;     // [NH, dh]
    float* rstd;        // [B, T, NH] with a norm: written by the forward pass, read by the backward pass
    const bf16* gate;   // column of proj; NULL: no gate
    bf16* dgate;        // column of dproj
    float* delta;       // [B, NH, T], written by the backward pass unless NULL
    double eps;         // of the norm
} OutputGate;

#define OUTPUT_GATE_TOKENS 2 // tokens of a thread of the forward pass, all loads in flight at once

// What a thread reads of one token.
struct OutputGateToken {
    Raw8 o, logits, dy;
    float rstd;
};

__global__ static void __launch_bounds__(256)
    output_gate_forward_kernel(bf16* y, const bf16* o, const __grid_constant__ OutputGate out,
                               const __grid_constant__ HeadShape shape, int tokens) {
    int NH = (int)shape.NH, dh = (int)shape.dh;
    int64_t stride = shape.row_stride;
    float eps = (float)out.eps;
    HeadThread me = head_thread(NH, dh, (int)blockIdx.y);
    int column = me.head * dh + me.channel, d = NH * dh;
    int first = (int)blockIdx.x * OUTPUT_GATE_TOKENS, left = min(OUTPUT_GATE_TOKENS, tokens - first);
    int64_t at = (int64_t)first * d + column, at_gate = first * stride + column;
    Raw8 in[OUTPUT_GATE_TOKENS] = {}, logits[OUTPUT_GATE_TOKENS] = {}, w = {};
#pragma unroll
    for (int i = 0; i < OUTPUT_GATE_TOKENS; i++)
        if (me.active && i < left) {
            in[i] = load_raw8_once(o + at + i * d);
            if (out.gate) logits[i] = load_raw8_once(out.gate + at_gate + i * stride);
        }
    if (out.weight && me.active) w = load_raw8(out.weight + column);
#pragma unroll
    for (int i = 0; i < OUTPUT_GATE_TOKENS; i++) {
        if (i >= left) break;
        float x[8], logit[8];
        unpack8(x, in[i]);
        unpack8(logit, logits[i]);
        if (out.weight) {
            float r = head_norm_forward(x, w, eps, me);
            if (me.active && me.channel == 0) out.rstd[(int64_t)(first + i) * NH + me.head] = r;
        }
        if (out.gate)
            for (int j = 0; j < 8; j++) x[j] *= sigmoidf(logit[j]);
        if (me.active) store16_once(y + at + i * d, pack8(x));
    }
}

// Writes y, and rstd with a norm. y may be o where o is not needed afterwards.
static inline void output_gate_forward(bf16* y, const bf16* o, const OutputGate* out, const HeadShape* shape,
                                       cudaStream_t stream) {
    Range range("output norm and gate", RANGE_FORWARD, stream);
    HeadGrid heads = head_grid(shape->NH, shape->dh);
    int64_t tokens = shape->B * shape->T;
    assert(shape->row_stride % 8 == 0 && tokens < INT32_MAX / 2);
    if (tokens == 0) return;
    dim3 grid((unsigned)ceil_div<int64_t>(tokens, OUTPUT_GATE_TOKENS), (unsigned)heads.blocks);
    output_gate_forward_kernel<<<grid, heads.threads, 0, stream>>>(y, o, *out, *shape, (int)tokens);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------

__global__ static void __launch_bounds__(256, 3)
    output_gate_backward_kernel(bf16* dout, bf16* y, const bf16* dy, const bf16* o,
                                const __grid_constant__ OutputGate out, float* partial,
                                const __grid_constant__ HeadShape shape, int tokens) {
    int T = (int)shape.T, NH = (int)shape.NH, dh = (int)shape.dh;
    int64_t stride = shape.row_stride;
    HeadThread me = head_thread(NH, dh, (int)blockIdx.y);
    int column = me.head * dh + me.channel, d = NH * dh;
    Raw8 w = {};
    if (out.weight && me.active) w = load_raw8(out.weight + column);
    float dw[8] = {};
    auto load = [&](int bt, bool valid) {
        OutputGateToken token = {};
        int64_t at = (int64_t)bt * d + column;
        if (valid) token.dy = load_raw8_once(dy + at);
        if (valid) token.o = load_raw8_once(o + at);
        if (valid && out.gate) token.logits = load_raw8_once(out.gate + bt * stride + column);
        token.rstd = 1;
        if (valid && out.weight) token.rstd = out.rstd[(int64_t)bt * NH + me.head];
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
        if (out.weight) unpack8(normed, w);
        for (int i = 0; i < 8; i++) normed[i] = out.weight ? x[i] * (token.rstd * normed[i]) : x[i];
        if (out.gate) {
            float logits[8];
            unpack8(logits, token.logits);
            for (int i = 0; i < 8; i++) {
                float sig = sigmoidf(logits[i]);
                g[i] *= sig;
                logits[i] = g[i] * normed[i] * (1 - sig); // gradient of the logit
                normed[i] *= sig;
            }
            if (me.active) store16_once(out.dgate + bt * stride + column, pack8(logits));
        }
        if (me.active) store16_once(y + (int64_t)bt * d + column, pack8(normed));
        if (out.weight) head_norm_backward(g, dw, x, w, token.rstd, true, me);
        Raw8 rounded = pack8(g);
        if (me.active) store16_once(dout + (int64_t)bt * d + column, rounded);
        if (out.delta) {
            float sum = 0;
            unpack8(g, rounded); // what attention will read
            for (int i = 0; i < 8; i++) sum += g[i] * x[i];
            sum = head_sum(sum, me);
            if (me.active && me.channel == 0) out.delta[((int64_t)b * NH + me.head) * T + t] = sum;
        }
        for (t += (int)gridDim.x; t >= T; t -= T) b++;
    }
    if (out.weight && me.active) store8(partial + (int64_t)blockIdx.x * d + column, dw);
}

// Writes dout, the gradient of o, dgate and delta, and adds to dweight. y is recomputed, with the bits of the forward pass,
// so that it need not be kept. dout may be dy. partial is scratch of norm_partial_bytes.
static inline void output_gate_backward(bf16* dout, bf16* y, const bf16* dy, const bf16* o,
                                        const OutputGate* out, float* partial, const HeadShape* shape,
                                        cudaStream_t stream) {
    Range range("output norm and gate", RANGE_BACKWARD, stream);
    HeadGrid heads = head_grid(shape->NH, shape->dh);
    int64_t tokens = shape->B * shape->T;
    assert(shape->row_stride % 8 == 0 && tokens < INT32_MAX / 2);
    if (tokens == 0) return;
    int64_t groups = resident_blocks(output_gate_backward_kernel, heads.threads) / heads.blocks;
    groups = groups < 1 ? 1 : groups > tokens ? tokens : groups;
    dim3 grid((unsigned)groups, (unsigned)heads.blocks);
    output_gate_backward_kernel<<<grid, heads.threads, 0, stream>>>(dout, y, dy, o, *out, partial, *shape,
                                                                    (int)tokens);
    CUDA_CHECK_LAUNCH();
    if (out->weight) add_head_partials(out->dweight, partial, groups, shape->NH, shape->dh, false, stream);
}

#endif // LLMC_OUTPUT_GATE_CUH
