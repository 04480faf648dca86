/*
The forget gate (arXiv 2503.02130, section 3):

    cum_logf_t = logf_0 + ... + logf_t,   logf_t = logsigmoid(z_t + bias)

    z, dz           bf16   [B, T, row_stride], pointing at the gate's column of the fused projection; NULL
                           where the gate has only a bias
    bias, dbias     float  [NH]
    cum_logf        double [B, NH, T], never rising along T
    dcum_logf       float  [B, NH, T]

With packed documents (HeadShape's doc_start) logf_t is WALL_LOGF at a document's first token, whatever its
gate, which gets no gradient there. dcum_logf is then summed within a document: over the later ones it
cancels on paper, but in float only nearly. Models without a gate have walls alone: bias is NULL, and logf 0.

The trainer calls it before attention.cuh, which reads cum_logf, and after attention's backward pass, which
writes dcum_logf. For new tokens of a sequence see llmc/inference/cuda/pages.cuh.

A gate is computed in float and summed in double: after 65536 tokens cum_logf may reach -1e5, and its
differences over a few tokens still matter. The backward pass sums dlogf_t = dcum_logf_t + ... +
dcum_logf_{T-1}, whose terms nearly cancel, in double too. dcum_logf itself is float, far more precise than
the bf16 GEMMs that it is computed from.

Both are scans over time. A thread block scans a chunk of tokens, one a thread; a second kernel adds the sum
of the chunks before (or after) it. So a few heads fill the GPU, and every order of sums is fixed.
*/
#pragma once

#include "../model/documents.h"
#include "../model/shapes.h"
#include "../cuda/launch.cuh"

enum { FORGET_GATE_CHUNK = 256 }; // tokens, and threads of a block

// The chunk of a thread block: chunk `index` of the `count` chunks of a head.
struct GateChunk {
    int64_t head, b, h;
    int index, count;
    int64_t first, end; // tokens

    // Block index: head * count + index.
    __device__ GateChunk(const HeadShape& s) {
        count = (int)ceil_div<int64_t>(s.T, FORGET_GATE_CHUNK);
        head = blockIdx.x / (unsigned)count, index = (int)(blockIdx.x % (unsigned)count);
        b = head / s.NH, h = head % s.NH;
        first = (int64_t)index * FORGET_GATE_CHUNK, end = min(first + FORGET_GATE_CHUNK, s.T);
    }
};

static inline int64_t forget_gate_chunks(const HeadShape* s) {
    return s->B * s->NH * ceil_div<int64_t>(s->T, FORGET_GATE_CHUNK);
}

// Bytes of the scratch of both passes: two sums a chunk.
static inline size_t forget_gate_scratch_bytes(const HeadShape* s) {
    return (size_t)(2 * forget_gate_chunks(s)) * sizeof(double);
}

// Inclusive prefix sum of x over the threads of the block. Every thread calls it. DOCS: over those alone that
// have the thread's `start`; they are adjacent.
template <bool DOCS> __device__ static inline double forget_gate_scan(double x, int start = 0) {
    constexpr int WARPS = FORGET_GATE_CHUNK / 32;
    __shared__ double warps[WARPS];
    __shared__ int starts[DOCS ? WARPS : 1];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        double before = __shfl_up_sync(0xffffffffu, x, step);
        bool same = !DOCS || __shfl_up_sync(0xffffffffu, start, step) == start;
        if (lane >= step && same) x += before;
    }
    __syncthreads(); // a previous call's sums have been read
    if (lane == 31) warps[warp] = x;
    if (DOCS && lane == 31) starts[warp] = start;
    __syncthreads();
    double earlier = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        if (i < warp && (!DOCS || starts[i] == start)) earlier += warps[i];
    return earlier + x;
}

// x[0] + ... + x[n - 1] by one warp, in every lane
__device__ static inline double forget_gate_sum(const double* x, int64_t n) {
    double sum = 0;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32) sum += x[i];
    return warp_sum(sum);
}

__device__ static inline float forget_gate_logit(const bf16* z, int64_t at, float bias) {
    return (z ? (float)z[at] : 0) + bias;
}

// logsigmoid
__device__ static inline float forget_gate_logf(float logit) {
    return fminf(logit, 0) - log1pf(expf(-fabsf(logit)));
}

// ----------------------------------------------------------------------------
// forward

// Forward (dcum_logf NULL): totals [B, NH, chunks] of the log gates, and cum_logf of each chunk as if it were
// the first of its head. Backward: totals of dcum_logf alone, with DOCS of those tokens that are in the
// document of the chunk's first token.
template <bool DOCS>
__global__ static void __launch_bounds__(FORGET_GATE_CHUNK)
    forget_gate_scan_kernel(double* __restrict__ cum_logf, double* __restrict__ totals,
                            const float* __restrict__ dcum_logf, const bf16* __restrict__ z,
                            const float* __restrict__ bias, const __grid_constant__ HeadShape s) {
    kernel_wait();
    GateChunk chunk(s);
    int64_t t = chunk.first + threadIdx.x, at = chunk.head * s.T + t;
    float x = 0;
    int start = DOCS && t < s.T ? s.doc_start[chunk.b * s.T + t] : 0;
    if (t < s.T && dcum_logf && (!DOCS || start <= chunk.first)) x = dcum_logf[at];
    if (DOCS && t < s.T && !dcum_logf && start == t) {
        x = (float)WALL_LOGF;
    } else if (t < s.T && !dcum_logf && (!DOCS || bias)) {
        float logit = forget_gate_logit(z, (chunk.b * s.T + t) * s.row_stride + chunk.h, bias[chunk.h]);
        x = forget_gate_logf(logit);
    }
    double sum = forget_gate_scan<false>(x);
    if (t < s.T && !dcum_logf) cum_logf[at] = sum;
    if (threadIdx.x == FORGET_GATE_CHUNK - 1) totals[blockIdx.x] = sum;
}

// cum_logf += the totals of the earlier chunks
__global__ static void __launch_bounds__(FORGET_GATE_CHUNK)
    forget_gate_carry_kernel(double* __restrict__ cum_logf, const double* __restrict__ totals,
                             const __grid_constant__ HeadShape s) {
    kernel_wait();
    GateChunk chunk(s);
    int64_t t = chunk.first + threadIdx.x;
    if (chunk.index == 0) return;
    double own = t < s.T ? cum_logf[chunk.head * s.T + t] : 0;
    double before = forget_gate_sum(totals + chunk.head * chunk.count, chunk.index);
    if (t < s.T) cum_logf[chunk.head * s.T + t] = before + own;
}

// Writes cum_logf; z and bias NULL: of walls alone. scratch of forget_gate_scratch_bytes.
static inline void forget_gate_forward(double* cum_logf, const bf16* z, const float* bias, void* scratch,
                                       const HeadShape* shape, cudaStream_t stream) {
    Range range("forget gate", RANGE_FORWARD, stream);
    unsigned chunks = (unsigned)forget_gate_chunks(shape);
    double* totals = (double*)scratch;
    auto scan = shape->doc_start ? forget_gate_scan_kernel<true> : forget_gate_scan_kernel<false>;
    assert(bias || shape->doc_start);
    launch_after(scan, chunks, FORGET_GATE_CHUNK, 0, stream, cum_logf, totals, NULL, z, bias, *shape);
    if (shape->T > FORGET_GATE_CHUNK)
        launch_after(forget_gate_carry_kernel, chunks, FORGET_GATE_CHUNK, 0, stream, cum_logf, totals,
                     *shape);
}

// ----------------------------------------------------------------------------
// backward

// The sum of dcum_logf over the later chunks; with DOCS over those tokens of them that are in the document of
// the first one, of which `after` becomes the start. By one warp, in every lane.
template <bool DOCS>
__device__ static inline double forget_gate_after(const double* totals, const GateChunk& chunk,
                                                  const HeadShape& s, int& after) {
    int later = chunk.count - 1 - chunk.index;
    if (!DOCS) return forget_gate_sum(totals, later);
    const int32_t* starts = s.doc_start + chunk.b * s.T + chunk.end; // of each later chunk's first token
    double sum = 0;
    after = later > 0 ? starts[0] : INT32_MAX;
    for (int i = (int)threadIdx.x % 32; i < later && starts[(int64_t)i * FORGET_GATE_CHUNK] == after; i += 32)
        sum += totals[i];
    return warp_sum(sum);
}

// dz, and dlogit_sums [NH, B, chunks]. Thread i has the i-th token from the end of the chunk.
template <bool DOCS>
__global__ static void __launch_bounds__(FORGET_GATE_CHUNK)
    forget_gate_backward_kernel(bf16* __restrict__ dz, double* __restrict__ dlogit_sums,
                                const double* __restrict__ totals, const float* __restrict__ dcum_logf,
                                const bf16* __restrict__ z, const float* __restrict__ bias,
                                const __grid_constant__ HeadShape s) {
    kernel_wait();
    GateChunk chunk(s);
    int64_t t = chunk.end - 1 - threadIdx.x, at = (chunk.b * s.T + t) * s.row_stride + chunk.h;
    float d = 0, logit = 0, dlogit = 0;
    int start = -1, start_after = 0;
    if (t >= chunk.first) {
        if (DOCS) start = s.doc_start[chunk.b * s.T + t];
        d = dcum_logf[chunk.head * s.T + t];
        logit = forget_gate_logit(z, at, bias[chunk.h]);
    }
    double after = forget_gate_after<DOCS>(totals + blockIdx.x + 1, chunk, s, start_after);
    if (DOCS && start != start_after) after = 0;
    double dlogf = after + forget_gate_scan<DOCS>(d, start);
    if (t >= chunk.first) {
        dlogit = (float)dlogf / (1 + expf(logit));
        if (DOCS && start == t) dlogit = 0; // a wall stands in for this gate
        if (z) dz[at] = (bf16)dlogit;
    }
    double sum = forget_gate_scan<false>(dlogit);
    if (threadIdx.x == FORGET_GATE_CHUNK - 1)
        dlogit_sums[(chunk.h * s.B + chunk.b) * chunk.count + chunk.index] = sum;
}

// Block h, one warp: dbias[h] += sum of the n dlogit_sums of head h
__global__ static void __launch_bounds__(32)
    forget_gate_dbias_kernel(float* __restrict__ dbias, const double* __restrict__ dlogit_sums, int64_t n) {
    kernel_wait();
    double sum = forget_gate_sum(dlogit_sums + blockIdx.x * n, n);
    if (threadIdx.x == 0) dbias[blockIdx.x] += (float)sum;
}

// Writes dz = dlogf sigmoid(-logit), rounded to bf16, and adds its sum to dbias. Where z is NULL, so is dz.
// scratch of forget_gate_scratch_bytes.
static inline void forget_gate_backward(bf16* dz, float* dbias, const float* dcum_logf, const bf16* z,
                                        const float* bias, void* scratch, const HeadShape* shape,
                                        cudaStream_t stream) {
    Range range("forget gate", RANGE_BACKWARD, stream);
    unsigned chunks = (unsigned)forget_gate_chunks(shape);
    double *totals = (double*)scratch, *dlogit_sums = totals + chunks;
    const bool docs = shape->doc_start != NULL;
    auto scan = docs ? forget_gate_scan_kernel<true> : forget_gate_scan_kernel<false>;
    auto backward = docs ? forget_gate_backward_kernel<true> : forget_gate_backward_kernel<false>;
    CUDA_LAUNCH(scan, chunks, FORGET_GATE_CHUNK, stream, NULL, totals, dcum_logf, z, bias, *shape);
    launch_after(backward, chunks, FORGET_GATE_CHUNK, 0, stream, dz, dlogit_sums, totals, dcum_logf, z, bias,
                 *shape);
    launch_after(forget_gate_dbias_kernel, shape->NH, 32, 0, stream, dbias, dlogit_sums, chunks / shape->NH);
}
