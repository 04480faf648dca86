/*
Attention for inference: n = shape.B sequences extended by t = shape.T tokens, each with its own state. t = 1
is decoding; a larger t reads a prompt.

    rope_angles_extend    angles of the positions of proj's rows
    (qkv_forward)         on the n (1 + t) rows of proj as one sequence: B = 1, T = n (1 + t). Row 0 of each
                          sequence is its previous token, which the shift of row 1 reads. The outputs of row 0
                          itself are not used, so that no shift crosses from one sequence to the next.
    attention_append      adds keys, values and forget gates of the new tokens to the state
    attention_extend      o of the new tokens' queries, each over the keys up to its own
    attention_keep_last   row 0 of proj = row t
    (the caller)          lengths += t

    q, k, v of the new tokens   bf16 [n, 1 + t, NH, dh], of which rows 1..t are used
    o                           bf16 [n, t, NH, dh]
    angles                      float [n, 1 + t, dh/2, 2]

dh is 64 or 128. The kernels are simple, as memory bounds decoding: a step reads every weight and all cached
keys and values once. No kernel checks that lengths + t <= capacity: the caller does.
*/
#pragma once

#include "forget_gate.cuh"
#include "qkv.cuh"

// What is kept of n sequences in one layer.
typedef struct {
    bf16 *k, *v;      // [n, capacity, NH, dh] as attention reads them
    double* cum_logf; // [n, capacity, NH], NULL without gate. Entries never change
    bf16* proj;       // [n, 1 + t, row_stride]: the last token (zeros before the first), then the new ones
    const int64_t* lengths; // [n] on the device: tokens held before this call
    int64_t capacity;       // in tokens
} AttentionState;

// ----------------------------------------------------------------------------
// RoPE

// angles [n, 1 + t, dh/2, 2] of positions lengths[s] - 1 + i. Row 0 of an empty sequence is finite, not used.
static inline void rope_angles_extend(float* angles, const AttentionState* state, double base,
                                      const HeadShape* shape, cudaStream_t stream) {
    Range range("shift, QK norm, RoPE", RANGE_FORWARD, stream);
    int64_t rows = 1 + shape->T, pairs = shape->dh / 2, count = shape->B * rows * pairs;
    CUDA_LAUNCH(rope_angles_kernel, ceil_div<int64_t>(count, 256), 256, stream, angles, state->lengths, count,
                rows, pairs, base);
}

// ----------------------------------------------------------------------------
// the state

// Block (token, sequence): copies a row of k and of v.
__global__ static void __launch_bounds__(256)
    attention_append_kernel(const __grid_constant__ AttentionState state, const bf16* k, const bf16* v,
                            int64_t d) {
    int64_t t = gridDim.x, from = blockIdx.y * (1 + t) + 1 + blockIdx.x;
    int64_t to = blockIdx.y * state.capacity + state.lengths[blockIdx.y] + blockIdx.x;
    for (int64_t c = 8 * threadIdx.x; c < d; c += 8 * blockDim.x) {
        store16(state.k + to * d + c, load_raw8(k + from * d + c));
        store16(state.v + to * d + c, load_raw8(v + from * d + c));
    }
}

// One thread a head, block n: cum_logf_t = cum_logf_{t-1} + logsigmoid(z_t + bias), token by token
__global__ static void __launch_bounds__(128)
    forget_gate_append_kernel(const __grid_constant__ AttentionState state, const float* bias, const bf16* z,
                              const __grid_constant__ HeadShape shape) {
    int64_t length = state.lengths[blockIdx.x], T = shape.T, NH = shape.NH;
    for (int64_t h = threadIdx.x; h < NH; h += blockDim.x) {
        double* cum_logf = state.cum_logf + (blockIdx.x * state.capacity + length) * NH + h;
        double sum = length > 0 ? cum_logf[-NH] : 0.0;
        for (int64_t t = 0; t < T; t++) {
            float logit = forget_gate_logit(z, (blockIdx.x * (1 + T) + t) * shape.row_stride + h, bias[h]);
            sum += logit < 0 ? logit - log1p(exp((double)logit)) : -log1p(exp(-(double)logit));
            cum_logf[t * NH] = sum;
        }
    }
}

// Appends rows 1..t of k and v and, with a gate, cum_logf. z points at the gate's column in row 1 of
// state->proj; NULL where the gate has only a bias. fgate_bias [NH] is not read without gate.
static inline void attention_append(const AttentionState* state, const bf16* k, const bf16* v,
                                    const float* fgate_bias, const bf16* z, const HeadShape* shape,
                                    cudaStream_t stream) {
    Range range("attention", RANGE_FORWARD, stream);
    dim3 grid((unsigned)shape->T, (unsigned)shape->B);
    CUDA_LAUNCH(attention_append_kernel, grid, 256, stream, *state, k, v, shape->NH * shape->dh);
    if (state->cum_logf)
        CUDA_LAUNCH(forget_gate_append_kernel, shape->B, 128, stream, *state, fgate_bias, z, *shape);
}

// Row 0 of proj = row t: the next call's previous token.
static inline void attention_keep_last(const AttentionState* state, const HeadShape* shape,
                                       cudaStream_t stream) {
    Range range("attention", RANGE_FORWARD, stream);
    size_t row = (size_t)shape->row_stride * sizeof(bf16), sequence = (size_t)(1 + shape->T) * row;
    CUDA_CHECK(cudaMemcpy2DAsync(state->proj, sequence, state->proj + shape->T * shape->row_stride, sequence,
                                 row, (size_t)shape->B, cudaMemcpyDeviceToDevice, stream));
}

// ----------------------------------------------------------------------------
// attention

enum { EXTEND_WARPS = 8 };

// Block (token, head, sequence). Each warp has every eighth key, with a softmax of its own; the eight are
// joined at the end.
template <int PER_LANE> // channels of a lane: dh / 32
__global__ static void __launch_bounds__(32 * EXTEND_WARPS)
    attention_extend_kernel(bf16* o, const bf16* q, const __grid_constant__ AttentionState state) {
    constexpr int DH = 32 * PER_LANE;
    __shared__ float maxima[EXTEND_WARPS], sums[EXTEND_WARPS], outs[EXTEND_WARPS][DH];
    int h = blockIdx.y, NH = gridDim.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t t = blockIdx.x, T = gridDim.x, s = blockIdx.z, length = state.lengths[s] + t + 1;
    const bf16 *k = state.k + s * state.capacity * NH * DH, *v = state.v + s * state.capacity * NH * DH;
    const double* cum_logf = state.cum_logf ? state.cum_logf + s * state.capacity * NH : NULL;
    q += (s * (1 + T) + 1 + t) * NH * DH;
    o += (s * T + t) * NH * DH;
    const float scale = rsqrtf((float)DH);
    float query[PER_LANE], out[PER_LANE] = {}, row_max = -INFINITY, row_sum = 0;
    for (int i = 0; i < PER_LANE; i++) query[i] = scale * __bfloat162float(q[h * DH + lane * PER_LANE + i]);
    for (int64_t j = warp; j < length; j += EXTEND_WARPS) {
        int64_t at = (j * NH + h) * DH + lane * PER_LANE;
        float score = 0;
        for (int i = 0; i < PER_LANE; i++) score += query[i] * __bfloat162float(k[at + i]);
        score = warp_sum(score);
        if (cum_logf) score += (float)(cum_logf[(length - 1) * NH + h] - cum_logf[j * NH + h]);
        float new_max = fmaxf(row_max, score), rescale = __expf(row_max - new_max),
              p = __expf(score - new_max);
        for (int i = 0; i < PER_LANE; i++) out[i] = out[i] * rescale + p * __bfloat162float(v[at + i]);
        row_sum = row_sum * rescale + p;
        row_max = new_max;
    }
    for (int i = 0; i < PER_LANE; i++) outs[warp][lane * PER_LANE + i] = out[i];
    if (lane == 0) maxima[warp] = row_max, sums[warp] = row_sum;
    __syncthreads();
    for (int x = threadIdx.x; x < DH; x += blockDim.x) {
        float max = maxima[0], sum = 0, value = 0; // warp 0 always has a key
        for (int w = 1; w < EXTEND_WARPS; w++) max = fmaxf(max, maxima[w]);
        for (int w = 0; w < EXTEND_WARPS; w++) {
            float weight = __expf(maxima[w] - max); // 0 for a warp without keys
            sum += weight * sums[w];
            value += weight * outs[w][x];
        }
        o[h * DH + x] = __float2bfloat16(value / sum);
    }
}

// o [n, t, NH, dh]: query i of sequence s, which is row 1 + i of q [n, 1 + t, NH, dh], sees the first
// lengths[s] + i + 1 keys.
static inline void attention_extend(bf16* o, const bf16* q, const AttentionState* state,
                                    const HeadShape* shape, cudaStream_t stream) {
    Range range("attention", RANGE_FORWARD, stream);
    int64_t dh = shape->dh;
    auto kernel = dh == 64 ? attention_extend_kernel<2> : dh == 128 ? attention_extend_kernel<4> : NULL;
    if (!kernel) die("generation on the GPU has kernels for head sizes 64 and 128, not %lld", (long long)dh);
    dim3 grid((unsigned)shape->T, (unsigned)shape->NH, (unsigned)shape->B);
    CUDA_LAUNCH(kernel, grid, 32 * EXTEND_WARPS, stream, o, q, *state);
}
