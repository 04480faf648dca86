/*
Output norm and output gate: y = RMSNorm(o) over the channels of each head, times sigmoid(gate) or silu(gate);
each of them optional.

    o, y, and their gradients dout, dy   bf16 [B, T, NH, dh]
    gate, dgate                          columns of proj and dproj, bf16 [B, T, row_stride]
    rstd                                 float [B, T, NH]
    delta                                float [B, NH, T]

The trainer calls it between attention and the output projection, with a sigmoid and weights for each head;
DeltaNet's mixer does with one head's weights for all, and where it is gated with silu. A thread has eight
channels of one head. The backward pass also computes delta = sum of dout * o over a head's channels, which
attention's backward pass needs, as both are in registers. Pointers to bf16 are aligned to 16 bytes,
row_stride is a multiple of 8.
*/
#pragma once

#include "qkv.cuh"

typedef struct {
    const bf16* weight; // [NH, dh] of the output norm; NULL: no norm
    float* dweight;     // the same shape
    float* rstd;        // [B, T, NH] with a norm: written by the forward pass, read by the backward pass
    const bf16* gate;   // column of proj; NULL: no gate
    bf16* dgate;        // column of dproj
    float* delta;       // [B, NH, T], written by the backward pass unless NULL
    double eps;         // of the norm
    bool shared;        // weight is [dh], the same for all heads
    bool silu;          // the gate is silu, not sigmoid, of its logits; without FP8
    Fp8Tensor y8;       // y of the forward pass in E4M3
    Fp8Tensor dgate8;   // dgate in E5M2; alone: dgate is not written
} OutputGate;

// The same from token `first` of one sequence on: for the forward pass over tensors that begin there.
static inline OutputGate output_gate_slice(const OutputGate* all, const HeadShape* shape, int64_t first) {
    OutputGate slice = *all;
    if (all->rstd) slice.rstd += first * shape->NH;
    if (all->gate) slice.gate += first * shape->row_stride;
    slice.y8 = fp8_slice(&all->y8, first);
    return slice;
}

enum { OUTPUT_GATE_TOKENS = 2 }; // of a thread of the forward pass, all loads in flight at once

struct OutputGateArgs {
    OutputGate gate;
    int64_t row_stride;
    int tokens, T, NH, dh;
    float eps;
};

static inline OutputGateArgs output_gate_args(const OutputGate* gate, const HeadShape* s) {
    assert(s->row_stride % 8 == 0 && s->B * s->T < INT32_MAX / 2);
    return {.gate = *gate,
            .row_stride = s->row_stride,
            .tokens = (int)(s->B * s->T),
            .T = (int)s->T,
            .NH = (int)s->NH,
            .dh = (int)s->dh,
            .eps = (float)gate->eps};
}

// What a thread reads of one token.
struct OutputGateToken {
    Raw8 o, logits, dy;
    float rstd;
};

// One token's eight channels of a head, in place: o becomes y. Returns the norm's rstd. Called by all lanes
// of a warp.
template <bool SILU = false>
__device__ static __forceinline__ float output_gate_token(float x[8], const OutputGate& p, float eps,
                                                          const Raw8& logits, const Raw8& weight,
                                                          const HeadThread& me) {
    float rstd = 0, logit[8];
    unpack8(logit, logits);
    if (p.weight) rstd = head_norm_forward(x, weight, eps, me);
    if (p.gate)
        for (int j = 0; j < 8; j++) x[j] *= (SILU ? logit[j] : 1) * sigmoidf(logit[j]);
    return rstd;
}

template <Fp8Format F, bool SILU>
__global__ static void __launch_bounds__(256)
    output_gate_forward_kernel(bf16* y, const bf16* o, const __grid_constant__ OutputGateArgs a) {
    kernel_wait();
    const OutputGate p = a.gate;
    Fp8Writer<F> quantized(a.gate.y8);
    HeadThread me = head_thread(a.NH, a.dh, (int)blockIdx.y);
    int column = me.head * a.dh + me.channel, d = a.NH * a.dh;
    int first = (int)block_from_end() * OUTPUT_GATE_TOKENS, left = min(OUTPUT_GATE_TOKENS, a.tokens - first);
    int64_t at = (int64_t)first * d + column, at_gate = first * a.row_stride + column;
    Raw8 in[OUTPUT_GATE_TOKENS] = {}, logits[OUTPUT_GATE_TOKENS] = {}, w = {};
#pragma unroll
    for (int i = 0; i < OUTPUT_GATE_TOKENS; i++)
        if (me.active && i < left) {
            in[i] = load_raw8_once(o + at + i * d);
            if (p.gate) logits[i] = load_raw8_once(p.gate + at_gate + i * a.row_stride);
        }
    if (p.weight && me.active) w = load_raw8(p.weight + (p.shared ? me.channel : column));
#pragma unroll
    for (int i = 0; i < OUTPUT_GATE_TOKENS; i++) {
        if (i >= left) break;
        float x[8];
        unpack8(x, in[i]);
        float rstd = output_gate_token<SILU>(x, p, a.eps, logits[i], w, me);
        if (p.weight && me.active && me.channel == 0) p.rstd[(int64_t)(first + i) * a.NH + me.head] = rstd;
        if (me.active && !quantized.alone()) store16_once(y + at + i * d, pack8(x));
        if (me.active) quantized.store(at + i * d, pack8(x));
    }
    quantized.finish();
}

// Writes y and y8, also transposed where that has a place, and rstd with a norm. y may be o where o is not
// needed afterwards; NULL: y8 alone is written.
static inline void output_gate_forward(bf16* y, const bf16* o, const OutputGate* gate, const HeadShape* shape,
                                       cudaStream_t stream) {
    Range range("output norm and gate", RANGE_FORWARD, stream);
    HeadGrid heads = head_grid(shape->NH, shape->dh);
    OutputGateArgs a = output_gate_args(gate, shape);
    a.gate.y8.alone |= !y;
    dim3 grid((unsigned)ceil_div<int>(a.tokens, OUTPUT_GATE_TOKENS), (unsigned)heads.blocks);
    auto kernel = gate->silu      ? output_gate_forward_kernel<FP8_NONE, true>
                  : gate->y8.data ? output_gate_forward_kernel<FP8_E4M3, false>
                                  : output_gate_forward_kernel<FP8_NONE, false>;
    launch_after(kernel, grid, heads.threads, 0, stream, y, o, a);
    fp8_turn<FP8_E4M3>(&gate->y8, a.tokens, shape->NH * shape->dh, stream);
}

// ----------------------------------------------------------------------------

template <Fp8Format F, bool SILU>
__global__ static void __launch_bounds__(256, 3)
    output_gate_backward_kernel(bf16* dout, bf16* y, const bf16* dy, const bf16* o,
                                const __grid_constant__ OutputGateArgs a, float* partial) {
    kernel_wait();
    const OutputGate p = a.gate;
    Fp8Writer<F> quantized(a.gate.dgate8);
    HeadThread me = head_thread(a.NH, a.dh, (int)blockIdx.y);
    int column = me.head * a.dh + me.channel, d = a.NH * a.dh, T = a.T;
    Raw8 w = {};
    if (p.weight && me.active) w = load_raw8(p.weight + (p.shared ? me.channel : column));
    float dw[8] = {};
    auto load = [&](int bt, bool valid) {
        OutputGateToken token = {};
        int64_t at = (int64_t)bt * d + column;
        if (valid) token.dy = load_raw8_once(dy + at);
        if (valid) token.o = load_raw8_once(o + at);
        if (valid && p.gate) token.logits = load_raw8_once(p.gate + bt * a.row_stride + column);
        token.rstd = 1;
        if (valid && p.weight) token.rstd = p.rstd[(int64_t)bt * a.NH + me.head];
        return token;
    };
    int bt = a.tokens - 1 - (int)blockIdx.x; // from the end, as block_from_end
    OutputGateToken ahead = load(bt, me.active);
    int b = bt / T, t = bt % T;
#pragma unroll 1
    for (; bt >= 0; bt -= (int)gridDim.x) {
        OutputGateToken token = ahead;
        int next = bt - (int)gridDim.x;
        ahead = load(next, me.active && next >= 0);
        float x[8], g[8], normed[8];
        unpack8(x, token.o);
        unpack8(g, token.dy);
        if (p.weight) unpack8(normed, w);
        for (int i = 0; i < 8; i++) normed[i] = p.weight ? x[i] * (token.rstd * normed[i]) : x[i];
        if (p.gate) {
            float logits[8];
            unpack8(logits, token.logits);
            for (int i = 0; i < 8; i++) {
                float sig = sigmoidf(logits[i]);
                if (SILU) {
                    const float open = logits[i] * sig;
                    logits[i] = g[i] * normed[i] * (sig + open * (1 - sig));
                    g[i] *= open;
                    normed[i] *= open;
                    continue;
                }
                g[i] *= sig;
                logits[i] = g[i] * normed[i] * (1 - sig); // gradient of the logit
                normed[i] *= sig;
            }
            if (me.active && !quantized.alone())
                store16_once(p.dgate + bt * a.row_stride + column, pack8(logits));
            if (me.active) quantized.store(bt * a.gate.dgate8.stride + column, pack8(logits));
        }
        if (y && me.active) store16_once(y + (int64_t)bt * d + column, pack8(normed));
        if (p.weight) head_norm_backward(g, dw, x, w, token.rstd, true, me);
        Raw8 rounded = pack8(g);
        if (me.active) store16_once(dout + (int64_t)bt * d + column, rounded);
        if (p.delta) {
            float sum = 0;
            unpack8(g, rounded); // what attention will read
            for (int i = 0; i < 8; i++) sum += g[i] * x[i];
            sum = head_sum(sum, me);
            if (me.active && me.channel == 0) p.delta[((int64_t)b * a.NH + me.head) * T + t] = sum;
        }
        for (t -= (int)gridDim.x; t < 0; t += T) b--;
    }
    quantized.finish();
    if (p.weight && me.active) store8(partial + (int64_t)blockIdx.x * d + column, dw);
}

// Writes dout, the gradient of o, dgate, dgate8 and delta, and adds to dweight. Unless it is NULL, y is
// recomputed, with the bits of the forward pass, so that it need not be kept. dout may be dy.
static inline void output_gate_backward(bf16* dout, bf16* y, const bf16* dy, const bf16* o,
                                        const OutputGate* gate, const NormPartial& partial,
                                        const HeadShape* shape, cudaStream_t stream) {
    Range range("output norm and gate", RANGE_BACKWARD, stream);
    HeadGrid heads = head_grid(shape->NH, shape->dh);
    OutputGateArgs a = output_gate_args(gate, shape);
    auto kernel = gate->silu          ? output_gate_backward_kernel<FP8_NONE, true>
                  : gate->dgate8.data ? output_gate_backward_kernel<FP8_E5M2, false>
                                      : output_gate_backward_kernel<FP8_NONE, false>;
    int64_t groups = resident_groups(kernel, heads.threads, heads.blocks, a.tokens);
    dim3 grid((unsigned)groups, (unsigned)heads.blocks);
    launch_after(kernel, grid, heads.threads, 0, stream, dout, y, dy, o, a, partial.sums);
    if (gate->weight)
        add_head_partials(gate->dweight, partial.sums, groups, shape->NH, shape->dh, gate->shared,
                          partial.fork(stream));
}
