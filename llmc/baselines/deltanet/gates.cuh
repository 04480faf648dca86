/*
DeltaNet's gates between the fused projection and the recurrence, one number a head and token:

    beta = sigmoid(b)                                         both families
    log decay = -softplus(a + dt_bias) e^A_log                Gated DeltaNet; at least DELTA_LEAST_DECAY

    b, a, db, da    columns of proj and dproj, bf16, row_stride elements from row to row; a is behind b
    beta, log_decay, and their gradients    float [rows, NH]

Called by deltanet.cuh.
*/
#pragma once

#include "../../layers/layer.cuh"

// Its exponential is 0 in fp32; much less, and the sums of a chunk's log decays would be imprecise.
const float DELTA_LEAST_DECAY = -104;

enum { DELTA_GATE_ROWS = 128 }; // of a thread block of the decays' backward pass

__global__ static void __launch_bounds__(256)
    beta_forward_kernel(float* beta, const bf16* logits, int64_t count, int64_t NH, int64_t row_stride) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) beta[i] = sigmoidf(__bfloat162float(logits[i / NH * row_stride + i % NH]));
}

// beta [rows, NH] from columns of proj
static inline void beta_forward(float* beta, const bf16* logits, int64_t rows, int64_t NH, int64_t row_stride,
                                cudaStream_t stream) {
    Range range("beta", RANGE_FORWARD, stream);
    CUDA_LAUNCH(beta_forward_kernel, (unsigned)ceil_div<int64_t>(rows * NH, 256), 256, stream, beta, logits,
                rows * NH, NH, row_stride);
}

// A thread per row of proj and column behind q, k and v
__global__ static void __launch_bounds__(256)
    beta_backward_kernel(bf16* dlogits, const float* dbeta, const float* beta, int64_t rows, int NH,
                         int columns, int64_t row_stride) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / columns, h = i % columns;
    if (row >= rows) return;
    float gradient = 0;
    if (h < NH) gradient = dbeta[row * NH + h] * beta[row * NH + h] * (1 - beta[row * NH + h]);
    dlogits[row * row_stride + h] = __float2bfloat16(gradient);
}

// Writes beta's columns of dproj, the first NH of `columns` up to the end of a row, and zeros the others.
static inline void beta_backward(bf16* dlogits, const float* dbeta, const float* beta, const HeadShape* s,
                                 int64_t columns, cudaStream_t stream) {
    Range range("beta", RANGE_BACKWARD, stream);
    int64_t rows = s->B * s->T;
    CUDA_LAUNCH(beta_backward_kernel, (unsigned)ceil_div<int64_t>(rows * columns, 256), 256, stream, dlogits,
                dbeta, beta, rows, (int)s->NH, (int)columns, s->row_stride);
}

// ----------------------------------------------------------------------------
// decays

typedef struct {
    int64_t rows, NH, row_stride;
    const bf16* logits;           // a
    const float *A_log, *dt_bias; // [NH]
    float* log_decay;             // [rows, NH]
    bf16* dlogits;                // from here on: backward
    const float* dlog_decay;      // [rows, NH]
    float *dA_log, *ddt_bias;     // [NH]
} DeltaDecays;

// softplus, and its slope
__device__ static inline float delta_step(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }

__global__ static void __launch_bounds__(256)
    delta_decays_forward_kernel(const __grid_constant__ DeltaDecays d) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= d.rows * d.NH) return;
    const int64_t h = i % d.NH;
    const float step = delta_step(__bfloat162float(d.logits[i / d.NH * d.row_stride + h]) + d.dt_bias[h]);
    const float x = -step * expf(d.A_log[h]);
    d.log_decay[i] = x < DELTA_LEAST_DECAY ? DELTA_LEAST_DECAY : x; // NaN stays
}

static inline void delta_decays_forward(const DeltaDecays* d, cudaStream_t stream) {
    Range range("decays", RANGE_FORWARD, stream);
    CUDA_LAUNCH(delta_decays_forward_kernel, (unsigned)ceil_div<int64_t>(d->rows * d->NH, 256), 256, stream,
                *d);
}

// A warp has every eighth head of the block's rows, a lane every 32nd row. partial [2, blocks, NH]: sums over
// a block's rows for dA_log, then for ddt_bias
__global__ static void __launch_bounds__(256)
    delta_decays_backward_kernel(const __grid_constant__ DeltaDecays d, float* partial) {
    const int64_t first = (int64_t)blockIdx.x * DELTA_GATE_ROWS;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int h = warp; h < d.NH; h += 8) {
        const float rate = expf(d.A_log[h]), bias = d.dt_bias[h];
        float of_rate = 0, of_bias = 0;
        for (int64_t row = first + lane; row < min(first + DELTA_GATE_ROWS, d.rows); row += 32) {
            const float logit = __bfloat162float(d.logits[row * d.row_stride + h]) + bias;
            const float gradient = d.dlog_decay[row * d.NH + h], dlogit = -gradient * rate * sigmoidf(logit);
            of_rate -= gradient * rate * delta_step(logit);
            of_bias += dlogit;
            d.dlogits[row * d.row_stride + h] = __float2bfloat16(dlogit);
        }
        of_rate = warp_sum(of_rate), of_bias = warp_sum(of_bias);
        if (lane != 0) continue;
        partial[blockIdx.x * d.NH + h] = of_rate;
        partial[(gridDim.x + blockIdx.x) * d.NH + h] = of_bias;
    }
}

// Writes a's columns of dproj, and adds to the gradients of A_log and dt_bias. partial is scratch of
// norm_partial_bytes.
static inline void delta_decays_backward(const DeltaDecays* d, float* partial, cudaStream_t stream) {
    Range range("decays", RANGE_BACKWARD, stream);
    const int64_t blocks = ceil_div<int64_t>(d->rows, DELTA_GATE_ROWS);
    if (2 * blocks * d->NH * (int64_t)sizeof(float) > (int64_t)norm_partial_bytes())
        die("decays on the GPU of %s and %s: too many", counted(d->rows, "token").text,
            counted(d->NH, "head").text);
    CUDA_LAUNCH(delta_decays_backward_kernel, (unsigned)blocks, 256, stream, *d, partial);
    sum_rows(d->dA_log, partial, blocks, d->NH, true, stream);
    sum_rows(d->ddt_bias, partial + blocks * d->NH, blocks, d->NH, true, stream);
}
