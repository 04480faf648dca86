/*
From the gradients to the update, on the device: the global norm, the clipping factor, whether all is finite.

AdamW reads the result where it lies, so that the host queues a whole step without waiting, and a loss or
gradient that is not finite leaves the weights as they were even if the host learns of it only later.

    param_chunks           once: the work list of all that follows
    loss_add               every micro-batch: sums the tokens' losses
    global_norm            the sum of the gradient's squares; several GPUs now add up loss and squares
    global_norm_finish     norm, clipping factor, verdict
    adamw_update           (adamw.cuh)
*/
#ifndef LLMC_GLOBAL_NORM_CUH
#define LLMC_GLOBAL_NORM_CUH

#include "cuda_common.cuh"
#include "../model/params.h"

typedef struct {
    double loss;      // sum of the tokens' losses       these two add up over ranks, in one all-reduce
    double squares;   // of the gradient                 of 2 doubles from &loss on
    double norm;      // sqrt(squares)
    float grad_scale; // by which AdamW multiplies the gradient: clips its norm
    int32_t finite;   // 0: the loss or the norm is not finite, and AdamW changes nothing
} StepStats;

// ----------------------------------------------------------------------------
// the work list: the flat buffers of parameters, gradients and optimizer state in pieces, one a block

typedef struct {
    int64_t begin; // of its first element in the flat buffers
    int32_t count;
    int16_t trainable; // frozen parameters count neither in the norm nor in the update
    int16_t decays;
} ParamChunk;

const int64_t CHUNK_SIZE = 8192;

// Cuts what of the table's tensors lies in elements [begin, end) of the flat buffers, all of it or a rank's
// shard, into chunks of one tensor each. Writes them to chunks unless that is NULL; returns their number.
static inline int64_t param_chunks(ParamChunk* chunks, const ParamTable* table, int64_t begin, int64_t end) {
    int64_t n = 0;
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        int64_t i = p->offset > begin ? p->offset : begin;
        int64_t stop = p->offset + p->count < end ? p->offset + p->count : end;
        while (i < stop) {
            int64_t next = (i / CHUNK_SIZE + 1) * CHUNK_SIZE; // multiples: only a tensor's ends can be ragged
            if (next > stop) next = stop;
            if (chunks) {
                chunks[n].begin = i;
                chunks[n].count = (int32_t)(next - i);
                chunks[n].trainable = p->trainable;
                chunks[n].decays = p->decays;
            }
            n++;
            i = next;
        }
    }
    return n;
}

// Calls four(i) for each aligned group of 4 elements that lies in the chunk, and one(i) for the elements at
// its ragged ends, the work spread over the threads of the block.
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

// Over the block, in an order that never changes; the result is thread 0's.
__device__ static inline double block_sum(double x) {
    __shared__ double of_warp[32];
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned warp = 1; warp < blockDim.x / 32; warp++) x += of_warp[warp];
    return x;
}

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

// One block: *out = sum of x[0..n), added to what it held if `add`
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

// stats->loss += the sum of losses[0..n); the caller zeroes stats before a step
static inline void loss_add(StepStats* stats, const float* losses, int64_t n, cudaStream_t stream) {
    sum_kernel<<<1, 1024, 0, stream>>>(&stats->loss, losses, n, true);
    CUDA_CHECK_LAUNCH();
}

// stats->squares = the sum of the gradients' squares over the chunks. partial has num_chunks doubles of
// scratch. A square is taken in float, so that an element above 1.8e19 counts as not finite.
static inline void global_norm(StepStats* stats, double* partial, const float* grads,
                               const ParamChunk* chunks, int64_t num_chunks, cudaStream_t stream) {
    if (num_chunks > 0) squares_kernel<<<(unsigned)num_chunks, 256, 0, stream>>>(partial, grads, chunks);
    CUDA_CHECK_LAUNCH();
    sum_kernel<<<1, 1024, 0, stream>>>(&stats->squares, partial, num_chunks, false);
    CUDA_CHECK_LAUNCH();
}

// Fills the rest of stats from loss and squares; the gradient's norm is clipped at clip, 0 for never.
static inline void global_norm_finish(StepStats* stats, double clip, cudaStream_t stream) {
    finish_kernel<<<1, 1, 0, stream>>>(stats, clip);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_GLOBAL_NORM_CUH
