/*
Launches the backward pass of attention on Hopper:

    band heads     sm90_band_kernel (sm90_band.cuh): all gradients
    other heads    sm90_backward_kernel (sm90_backward.cuh): dK, dV, and dQ accumulated in float
                   sm90_backward_finish_kernel: dQ to bf16, row sums of dS to dcum_logf

Called by attention.cuh, whose layouts these are.
*/
#pragma once

#include "sm90_backward.cuh"
#include "sm90_band.cuh"

// dq = dq_sum / sqrt(dh), and dcum_logf += row_sum. A thread block has one warpgroup's part of a tile.
template <int DH>
__global__ void __launch_bounds__(256)
    sm90_backward_finish_kernel(bf16* __restrict__ dq, float* __restrict__ dcum_logf,
                                const float* __restrict__ dq_sum, const float* __restrict__ row_sum,
                                AttentionShape shape) {
    typedef Sm90Backward<DH, false> F; // the same with a window
    int tiles = F::tiles(shape), group = (int)(blockIdx.x % 2u);
    int tile = (int)(blockIdx.x / 2u % (unsigned)tiles), head = (int)(blockIdx.x / 2u / (unsigned)tiles);
    if (head >= shape.heads_with_tiles()) return; // a band head
    if (shape.bounds.head_order) head = shape.bounds.head_order[head];
    int first_row = F::part_query(tile, group);
    int64_t token = (int64_t)head * shape.T + first_row;
    if (dcum_logf && F::part_has_sums(group) && threadIdx.x < 64 && first_row + (int)threadIdx.x < shape.T)
        dcum_logf[token + threadIdx.x] += row_sum[token + threadIdx.x];

    // Accumulator layout: four lanes held 8 columns of a row and of the row 8 further on. One thread gathers
    // them through shared memory, where the floats of each 8 columns are shifted by one bank width.
    __shared__ Pack4 part[F::PART / 4 + 8];
    const float* from = dq_sum + (((int64_t)head * tiles + tile) * 2 + group) * F::PART;
#pragma unroll
    for (int i = (int)threadIdx.x; i < F::PART / 4; i += 256) part[i + i / 128] = load16_once(from + i * 4);
    __syncthreads();
    int n = (int)threadIdx.x % 8, column = n * 8 + F::part_column(group);
    int row = first_row + (int)threadIdx.x / 64 * 16 + (int)threadIdx.x / 8 % 8;
    float x[2][8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Pack4 y = part[n * 129 + (int)threadIdx.x / 8 * 4 + i];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e / 2][2 * i + e % 2] = y[e] * (float)(1 / AttentionScale<DH>::ROOT);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int t = row + half * 8;
        int64_t at = ((int64_t)(head / shape.NH) * shape.T + t) * shape.NH + head % shape.NH;
        if (t < shape.T) store16(dq + at * DH + column, pack8(x[half]));
    }
}

// delta must not be NULL.
template <int DH, bool GATE, bool WINDOW>
static inline void attention_backward_sm90(const AttentionBackward* a, const HeadShape* s,
                                           cudaStream_t stream) {
    typedef Sm90Backward<DH, WINDOW> F;
    int64_t tiles = s->B * s->NH * ceil_div<int64_t>(s->T, F::QUERIES), parts = 2 * tiles;
    Sm90BackwardParameters p;
    const HeadShape keys = key_shape(s);
    p.q = sm90_tensor_map(a->q, s, F::QUERIES);
    p.dout = sm90_tensor_map(a->dout, s, F::QUERIES);
    p.k = sm90_tensor_map(a->k, &keys, F::KEYS);
    p.v = sm90_tensor_map(a->v, &keys, F::KEYS);
    p.dk = sm90_tensor_map(a->dk, s, 64);
    p.dv = sm90_tensor_map(a->dv, s, 64);
    p.dq_sum = (float*)a->scratch;
    p.row_sum = p.dq_sum + parts * F::PART;
    int* semaphores = (int*)(p.row_sum + s->B * s->NH * s->T);
    p.dq_semaphore = a->deterministic ? semaphores : NULL;
    p.tickets = (unsigned*)(semaphores + tiles);
    p.dcum_logf = GATE ? a->dcum_logf : NULL;
    p.lse = a->lse;
    p.delta = a->delta;
    p.cum_logf = a->cum_logf;
    // Deterministic thread blocks of a head wait for one another unless they run close together. Groups of
    // heads are then half as large, as if dq, which is float, had to fit into L2 too.
    p.shape = attention_shape(s, F::KEYS, a->bounds, a->deterministic ? 8 : 4);
    const bool band = Sm90HasBand<DH, GATE, WINDOW>::value && a->bounds && a->bounds->head_order;
    if (band) {
        p.shape.tiled_heads = a->bounds->head_order + p.shape.heads;
        sm90_band_backward(a, s, p.shape, p.dq_sum, p.row_sum, stream); // clears dq_sum and row_sum, too
    }
    char *clear = (char*)(band ? (void*)semaphores : a->scratch), *end = (char*)(p.tickets + 1);
    if (!band || a->deterministic) CUDA_CHECK(cudaMemsetAsync(clear, 0, (size_t)(end - clear), stream));

    auto kernel = a->deterministic ? sm90_backward_kernel<DH, GATE, WINDOW, true>
                                   : sm90_backward_kernel<DH, GATE, WINDOW, false>;
    attention_launch<F, SM90_SHARED_KIB>(kernel, (int64_t)p.shape.heads * p.shape.tiles_per_head, stream, p);
    CUDA_LAUNCH(sm90_backward_finish_kernel<DH>, parts, 256, stream, a->dq, p.dcum_logf, p.dq_sum, p.row_sum,
                p.shape);
}
