/*
From the gradients to the update, on the device: the sum of the losses, the global gradient norm, the clipping
factor, and whether all of them are finite.

AdamW reads the result from device memory. So the host queues a whole step without waiting, and a loss or
gradient that is not finite leaves the weights unchanged even before the host has read it.

    param_chunks           once: the work list of global_norm and adamw_update
    loss_add               every micro-batch: adds the tokens' losses
    global_norm            the gradient's sum of squares; with several GPUs, then all-reduce loss and squares
    global_norm_finish     norm, clipping factor, verdict
    adamw_update           (adamw.cuh)
*/
#pragma once

#include "range.cuh"
#include "../model/params.h"

typedef struct {
    double loss;      // sum of the tokens' losses       with several GPUs: one all-reduce
    double squares;   // the gradient's sum of squares   of 2 doubles, from &loss
    double norm;      // sqrt(squares)
    float grad_scale; // clips the norm: AdamW multiplies the gradient by it
    int32_t finite;   // 0: the loss or the norm is not finite, and AdamW changes nothing
} StepStats;

// ----------------------------------------------------------------------------
// the work list: the flat buffers of parameters, gradients and optimizer state in chunks, one a thread block

typedef struct {
    int64_t begin; // index of the first element in the flat buffers
    int32_t count;
    int16_t trainable; // frozen parameters are left out of the norm and of the update
    int16_t decays;
} ParamChunk;

typedef struct {
    ParamChunk* chunks; // on the device
    int64_t count;
} ParamChunks;

static const int64_t CHUNK_SIZE = 8192; // elements

// Cuts elements [begin, end) of the flat buffers, all or a rank's shard, into chunks of one tensor each.
// Writes them to chunks, on the host, unless that is NULL; returns their number.
static inline int64_t param_chunks(ParamChunk* chunks, const ParamTable* table, int64_t begin, int64_t end) {
    int64_t n = 0;
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        int64_t i = p->offset > begin ? p->offset : begin;
        int64_t stop = p->offset + p->count < end ? p->offset + p->count : end;
        while (i < stop) {
            int64_t next = (i / CHUNK_SIZE + 1) * CHUNK_SIZE; // only the ends of a tensor are ragged
            if (next > stop) next = stop;
            if (chunks) chunks[n] = {i, (int32_t)(next - i), p->trainable, p->decays};
            n++;
            i = next;
        }
    }
    return n;
}

// The same, uploaded. The caller frees .chunks with cudaFree.
static inline ParamChunks param_chunks_upload(const ParamTable* table, int64_t begin, int64_t end) {
    ParamChunks chunks = {NULL, param_chunks(NULL, table, begin, end)};
    size_t bytes = (size_t)chunks.count * sizeof(ParamChunk);
    ParamChunk* host = (ParamChunk*)xcalloc(1, bytes);
    param_chunks(host, table, begin, end);
    CUDA_CHECK(cudaMalloc((void**)&chunks.chunks, bytes));
    CUDA_CHECK(cudaMemcpy(chunks.chunks, host, bytes, cudaMemcpyHostToDevice));
    free(host);
    return chunks;
}

// Spreads a chunk over the threads of the block: four(i) for every aligned group of 4 elements, one(i) for
// each element at the ragged ends.
template <class Four, class One>
__device__ static inline void for_chunk(const ParamChunk& chunk, const Four& four, const One& one) {
    int64_t begin = chunk.begin, end = begin + chunk.count;
    for (int64_t i = begin / 4 * 4 + 4 * threadIdx.x; i < end; i += 4 * blockDim.x) {
        if (i >= begin && i + 4 <= end)
            four(i);
        else
            for (int64_t j = i > begin ? i : begin; j < i + 4 && j < end; j++) one(j);
    }
}

// ----------------------------------------------------------------------------

__global__ static void __launch_bounds__(256)
    squares_kernel(double* partial, const float* grads, const ParamChunk* chunks) {
    ParamChunk chunk = chunks[blockIdx.x];
    double sum = 0;
    if (chunk.trainable)
        for_chunk(
            chunk,
            [&](int64_t i) {
                Pack4 g = load16(grads + i);
                sum += (g[0] * g[0] + g[1] * g[1]) + (g[2] * g[2] + g[3] * g[3]);
            },
            [&](int64_t i) { sum += grads[i] * grads[i]; });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block: *out = (add ? *out : 0) + sum of x[0..n)
template <class T>
__global__ static void __launch_bounds__(1024) sum_kernel(double* out, const T* x, int64_t n, bool add) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += (double)x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = add ? *out + sum : sum;
}

__global__ static void finish_kernel(StepStats* stats, double clip) {
    double norm = sqrt(stats->squares);
    stats->norm = norm;
    stats->finite = isfinite(stats->loss) && isfinite(norm);
    stats->grad_scale = (float)(clip > 0 && norm > clip ? clip / norm : 1);
}

// stats->loss += sum of losses[0..n). The caller zeroes stats before a step.
static inline void loss_add(StepStats* stats, const float* losses, int64_t n, cudaStream_t stream) {
    Range range("loss", RANGE_FORWARD, stream);
    CUDA_LAUNCH(sum_kernel, 1, 1024, stream, &stats->loss, losses, n, true);
}

// stats->squares = sum of squares of the gradients in the chunks. partial is scratch of chunks->count
// doubles. Squares are computed in float, so that an element above 1.8e19 counts as not finite.
static inline void global_norm(StepStats* stats, double* partial, const float* grads,
                               const ParamChunks* chunks, cudaStream_t stream) {
    Range range("norm and AdamW", RANGE_BACKWARD, stream);
    CUDA_LAUNCH(squares_kernel, chunks->count, 256, stream, partial, grads, chunks->chunks);
    CUDA_LAUNCH(sum_kernel, 1, 1024, stream, &stats->squares, partial, chunks->count, false);
}

// Computes the other fields of stats from loss and squares. The gradient's norm is clipped at `clip`; 0:
// never.
static inline void global_norm_finish(StepStats* stats, double clip, cudaStream_t stream) {
    Range range("norm and AdamW", RANGE_BACKWARD, stream);
    CUDA_LAUNCH(finish_kernel, 1, 1, stream, stats, clip);
}
