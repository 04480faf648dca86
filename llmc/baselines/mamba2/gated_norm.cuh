/*
Mamba-2's gated norm between the recurrence and out_proj, and its time steps:

    step = softplus(dt + dt_bias)    at least 1e-30; log decay = -step e^A_log; skip = D / step
                                     MAMBA2_WALL at a packed document's first token
    y = RMSNorm(o silu(z))           over all di channels

    z, dz    columns of proj and dproj, bf16, row_stride elements from row to row
    o, y     bf16 [rows, di]; dout, the gradient of o, too
    steps    float [rows, NH], as log_decay and skip

Called by mamba2.cuh. As in rmsnorm.cuh a thread block has a row, and a thread eight channels of it; the
backward pass iterates over rows and accumulates the gradient of the norm's weight. The lower bound of step
keeps skip finite: a step this small adds nothing to a state, but D x still counts.
*/
#pragma once

#include "../../cuda/mma_sm80.cuh"
#include "../shared/conv.cuh"

const float LEAST_STEP = 1e-30f;
// log decay of a wall. Its exponential is 0 in fp32; much less, and a chunk's sum of many would be imprecise.
const float MAMBA2_WALL = -104;

enum { GATED_NORM_MOST = 6144 }; // channels; above, the backward pass would have only 64 registers a thread

// A warp per row. DOCS: with doc_start [rows] of sequences of T tokens
template <bool DOCS>
__global__ static void __launch_bounds__(256)
    head_steps_kernel(const __grid_constant__ HeadSteps h, int64_t rows, int64_t row_stride,
                      const int32_t* doc_start, int64_t T) {
    int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    for (int head = (int)threadIdx.x % 32; row < rows && head < h.NH; head += 32) {
        float dt = __bfloat162float(h.dt[row * row_stride + head]) + h.dt_bias[head];
        float step = fmaxf(dt, 0) + log1pf(expf(-fabsf(dt)));
        if (step < LEAST_STEP) step = LEAST_STEP; // NaN stays
        h.steps[row * h.NH + head] = step;
        h.log_decay[row * h.NH + head] =
            DOCS && doc_start[row] == row % T ? MAMBA2_WALL : -step * expf(h.A_log[head]);
        h.skip[row * h.NH + head] = h.D[head] / step;
    }
}

// Writes steps, log_decay and skip from dt, for all rows of the convolution.
static inline void head_steps_forward(const Conv* s, cudaStream_t stream) {
    Range range("time steps", RANGE_FORWARD, stream);
    auto kernel = s->doc_start ? head_steps_kernel<true> : head_steps_kernel<false>;
    int64_t rows = s->B * s->T;
    CUDA_LAUNCH(kernel, (unsigned)ceil_div<int64_t>(rows, 8), 256, stream, s->steps, rows, s->row_stride,
                s->doc_start, s->T);
}

typedef struct {
    const bf16 *o, *z;
    bf16* dz;
    int64_t row_stride;
    int64_t padding; // columns of dproj from `end` on, behind the R in use, which become 0
    bf16* end;
    Norm norm; // over di channels
} GatedNorm;

__global__ static void __launch_bounds__(1024)
    gated_norm_forward_kernel(bf16* y, const __grid_constant__ GatedNorm p) {
    __shared__ float sums[32];
    int d = (int)p.norm.d, c = 8 * (int)threadIdx.x;
    int64_t row = blockIdx.x;
    float g[8] = {}, w[8] = {}, sum = 0;
    if (c < d) {
        float z[8];
        unpack8(g, load_raw8_once(p.o + row * d + c));
        unpack8(z, load_raw8_once(p.z + row * p.row_stride + c));
        unpack8(w, load_raw8(p.norm.weight + c));
        for (int i = 0; i < 8; i++) {
            g[i] *= z[i] * sigmoidf(z[i]);
            sum += g[i] * g[i];
        }
    }
    float rstd = norm_rstd(__fdividef(block_sum_all(sum, sums), (float)d), (float)p.norm.eps);
    if (threadIdx.x == 0) p.norm.rstd[row] = rstd;
    if (c >= d) return;
    for (int i = 0; i < 8; i++) g[i] *= rstd * w[i]; // as the backward pass
    store16_once(y + row * d + c, pack8(g));
}

// Writes y and rstd.
static inline void gated_norm_forward(bf16* y, const GatedNorm* p, cudaStream_t stream) {
    Range range("gated RMSNorm", RANGE_FORWARD, stream);
    CUDA_LAUNCH(gated_norm_forward_kernel, p->norm.rows, rmsnorm_threads(p->norm.d), stream, y, *p);
}

// A thread's part of the next row, in flight. A thread reads only the shared memory that it copied itself.
typedef struct {
    Raw8 o[GATED_NORM_MOST / 8], z[GATED_NORM_MOST / 8];
} GatedCopies;
typedef struct {
    Raw8 dy;
    float rstd;
} GatedAhead;

// Starts loading a row; zeros past the last row. Past the last channel c is 0 and `active` false.
__device__ static inline GatedAhead gated_start(GatedCopies& copies, const bf16* dy, const GatedNorm& p,
                                                int64_t row, int c, bool active) {
    bool exists = active && row < p.norm.rows;
    if (!exists) row = 0;
    cp_async16(smem_address(copies.o + threadIdx.x), p.o + row * p.norm.d + c, exists);
    cp_async16(smem_address(copies.z + threadIdx.x), p.z + row * p.row_stride + c, exists);
    if (!exists) return {};
    return {load_raw8_once(dy + row * p.norm.d + c), p.norm.rstd[row]};
}

__global__ static void __launch_bounds__(GATED_NORM_MOST / 8)
    gated_norm_backward_kernel(bf16* dout, bf16* y, const bf16* dy, const __grid_constant__ GatedNorm p,
                               float* partial) {
    __shared__ float sums[2][32];
    __shared__ GatedCopies copies;
    int d = (int)p.norm.d, c = 8 * (int)threadIdx.x;
    bool active = c < d;
    if (!active) c = 0;
    float dw[8] = {};
    Raw8 weight = {};
    if (active) weight = load_raw8(p.norm.weight + c);
    int buffer = 0;
    GatedAhead ahead = gated_start(copies, dy, p, blockIdx.x, c, active);
    for (int64_t at = blockIdx.x; at < p.norm.rows; at += gridDim.x, buffer ^= 1) {
        cp_async_wait_all();
        Raw8 raw_z = copies.z[threadIdx.x], gradient = ahead.dy;
        float o[8], g[8], z[8], w[8], gx = 0, rstd = ahead.rstd;
        unpack8(o, copies.o[threadIdx.x]);
        unpack8(g, gradient);
        unpack8(z, raw_z);
        unpack8(w, weight);
        for (int i = 0; i < 8; i++) {
            float gated = o[i] * (z[i] * sigmoidf(z[i]));
            dw[i] += g[i] * gated * rstd;
            gx += g[i] * w[i] * gated;
        }
        ahead = gated_start(copies, dy, p, at + gridDim.x, c, active); // this row's copies have been read
        float mean = __fdividef(block_sum_all(gx, sums[buffer]), (float)d) * rstd * rstd;
        unpack8(g, gradient); // unpacked again: fewer live registers across the block sum
        unpack8(z, raw_z);
        unpack8(w, weight);
        for (int i = 0; i < 8; i++) {
            float open = sigmoidf(z[i]), gated = o[i] * (z[i] * open);
            float dgated = rstd * (g[i] * w[i] - gated * mean);
            w[i] = gated * (rstd * w[i]); // y
            g[i] = dgated * (z[i] * open);
            o[i] *= dgated * (open * (1 + z[i] * (1 - open))); // dz
        }
        if (active) {
            if (y) store16_once(y + at * d + c, pack8(w));
            store16_once(dout + at * d + c, pack8(g));
            store16_once(p.dz + at * p.row_stride + c, pack8(o));
        }
        for (int i = (int)threadIdx.x; i < p.padding; i += (int)blockDim.x)
            p.end[at * p.row_stride + i] = __float2bfloat16(0);
    }
    if (active) store8(partial + (int64_t)blockIdx.x * d + c, dw);
}

// Writes dout, which may be dy, dz and the padding, and adds to the norm's weight gradient. y is recomputed,
// with the bits of the forward pass; NULL where that was kept. partial is scratch of norm_partial_bytes.
static inline void gated_norm_backward(bf16* dout, bf16* y, const bf16* dy, const GatedNorm* p,
                                       float* partial, cudaStream_t stream) {
    Range range("gated RMSNorm", RANGE_BACKWARD, stream);
    int threads = rmsnorm_threads(p->norm.d);
    int64_t blocks = resident_groups(gated_norm_backward_kernel, threads, 1, p->norm.rows);
    CUDA_LAUNCH(gated_norm_backward_kernel, blocks, threads, stream, dout, y, dy, *p, partial);
    sum_rows(p->norm.dweight, partial, blocks, p->norm.d, true, stream);
}
