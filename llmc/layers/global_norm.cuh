/*
From the gradients to the update, on the device: the sum of the losses, the global gradient norm, the factor
of the mean over the targets that count, that of clipping, and whether the step is valid: loss and norm are
finite, and the norm is neither 0 nor so large that squares overflow.

AdamW reads the result from device memory. So the host queues a whole step without waiting, and a step that is
not valid leaves the weights unchanged even before the host has read it.

    param_chunks_upload    once: the work list of add_and_square and adamw_update
    loss_add               every micro-batch: adds the tokens' losses
    add_and_square         the gradient's sums of squares; first adds other GPUs' gradients of the own shard
    global_norm            their sum
    exchange_sums          (exchange.cuh) with several GPUs: the sums over all ranks
    global_norm_finish     norm, clipping factor, verdict
    adamw_update           (adamw.cuh)
*/
#pragma once

#include "../cuda/range.cuh"
#include "../model/fp8.h"
#include "../model/shard.h"
#include "../model/params.h"
#include "../model/shapes.h"

typedef struct {
    StepSums own, all; // of this rank, and of all ranks
    double grad_norm;  // of the mean loss over the targets that count
    float grad_scale;  // AdamW multiplies the gradient by it: makes it that of the mean, clipped
    int32_t finite;    // 0: the step is not valid, or left out, and AdamW changes nothing
    int32_t skipped;   // 1: a spike is left out, and its gradients are zeroed
    int32_t fp8_saturated[FP8_DELAYED]; // inputs and gradients with values out of FP8's range (fp8_state.cuh)
} StepStats;

// ----------------------------------------------------------------------------
// the work list: the flat buffers of parameters, gradients and optimizer state in chunks, one a thread block

typedef struct {
    int64_t begin; // index of the first element in the flat buffers
    int64_t local; // and in the rank's shard; the same for one rank alone
    int64_t fp32;  // and among the weights that kernels read in fp32; -1: they read bf16
    int32_t count;
    int16_t trainable; // frozen parameters are left out of the norm and of the update
    int16_t decays;
} ParamChunk;

typedef struct {
    ParamChunk* chunks; // on the device
    int64_t count;
    int64_t* first; // [buckets + 1] on the host: the first chunk of each bucket; NULL in a part of a list
} ParamChunks;

static const int64_t CHUNK_SIZE = 8192; // elements

// Cuts a rank's part of a bucket into chunks of one tensor each. Writes them to chunks, on the host, unless
// that is NULL; returns their number.
static inline int64_t param_chunks(ParamChunk* chunks, const ParamTable* table, const Shard* shard,
                                   int bucket) {
    int64_t n = 0;
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        ShardPart part = shard_overlap(shard, bucket, p->offset, p->offset + p->count);
        int64_t i = part.begin, stop = part.begin + part.count;
        while (i < stop) {
            int64_t next = (i / CHUNK_SIZE + 1) * CHUNK_SIZE; // only the ends of a tensor are ragged
            if (next > stop) next = stop;
            int64_t fp32 = p->fp32 < 0 ? -1 : p->fp32 + i - p->offset;
            if (chunks)
                chunks[n] = {i,        part.local + i - part.begin, fp32, (int32_t)(next - i), p->trainable,
                             p->decays};
            n++;
            i = next;
        }
    }
    return n;
}

// The chunks of all buckets of a rank's shard, uploaded. Free with param_chunks_free.
static inline ParamChunks param_chunks_upload(const ParamTable* table, const Shard* shard) {
    ParamChunks list = {NULL, 0, (int64_t*)xcalloc((size_t)shard->num_buckets + 1, sizeof(int64_t))};
    for (int b = 0; b < shard->num_buckets; b++) {
        list.first[b] = list.count;
        list.count += param_chunks(NULL, table, shard, b);
    }
    list.first[shard->num_buckets] = list.count;
    size_t bytes = (size_t)list.count * sizeof(ParamChunk);
    ParamChunk* host = (ParamChunk*)xcalloc(1, bytes);
    for (int b = 0; b < shard->num_buckets; b++) param_chunks(host + list.first[b], table, shard, b);
    CUDA_CHECK(cudaMalloc((void**)&list.chunks, bytes));
    CUDA_CHECK(cudaMemcpy(list.chunks, host, bytes, cudaMemcpyHostToDevice));
    free(host);
    return list;
}

static inline void param_chunks_free(ParamChunks* list) {
    CUDA_CHECK(cudaFree(list->chunks));
    free(list->first);
    memset(list, 0, sizeof *list);
}

// The chunks of buckets [begin, end).
static inline ParamChunks param_chunks_of(const ParamChunks* list, int begin, int end) {
    int64_t first = list->first[begin];
    return {list->chunks + first, list->first[end] - first, NULL};
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

// Other ranks' gradients: element i of the flat buffer is from[k * stride + i - begin], k < count.
typedef struct {
    const float* from;
    int64_t begin, stride;
    int count;
} OtherGradients;

// ADD: adds the other ranks' to grads first.
template <bool ADD>
__global__ static void __launch_bounds__(256)
    squares_kernel(double* partial, float* grads, const ParamChunk* chunks, const OtherGradients others) {
    ParamChunk chunk = chunks[blockIdx.x];
    double sum = 0;
    if (chunk.trainable)
        for_chunk(
            chunk,
            [&](int64_t i) {
                Pack4 g = load16(grads + i);
                for (int k = 0; ADD && k < others.count; k++) {
                    Pack4 other = load16_once(others.from + k * others.stride + i - others.begin);
                    for (int j = 0; j < 4; j++) g[j] += other[j];
                }
                if (ADD) store16(grads + i, g);
                sum += (g[0] * g[0] + g[1] * g[1]) + (g[2] * g[2] + g[3] * g[3]);
            },
            [&](int64_t i) {
                for (int k = 0; ADD && k < others.count; k++)
                    grads[i] += others.from[k * others.stride + i - others.begin];
                sum += grads[i] * grads[i];
            });
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

// As step_scale and step_is_valid of trainer.h, and norm_is_spike of shapes.h.
__global__ static void finish_kernel(StepStats* stats, double clip, double spike_norm, bool alone) {
    if (alone) stats->all = stats->own;
    StepVotes votes = stats->all.votes;
    bool empty = votes.targets == 0 && votes.tokens > 0;
    double scale = votes.targets == votes.tokens ? 1 : empty ? 0 : votes.tokens / votes.targets;
    double norm = scale * sqrt(stats->all.squares);
    stats->grad_norm = norm;
    const bool valid = isfinite(stats->all.loss) && (norm > 0 || empty) && norm < 1e19;
    stats->skipped = valid && spike_norm > 0 && norm > spike_norm;
    stats->finite = valid && !stats->skipped;
    stats->grad_scale = (float)(scale * (clip > 0 && norm > clip ? clip / norm : 1));
}

// stats->own.loss += sum of losses[0..n). The caller zeroes stats before a step.
static inline void loss_add(StepStats* stats, const float* losses, int64_t n, cudaStream_t stream) {
    Range range("loss", RANGE_FORWARD, stream);
    CUDA_LAUNCH(sum_kernel, 1, 1024, stream, &stats->own.loss, losses, n, true);
}

// squares[i] = sum of squares of the gradients in chunk i. Squares are computed in float, so that an element
// above 1.8e19 counts as not finite. Adds other ranks' gradients first, unless others is NULL; otherwise
// grads is only read.
static inline void add_and_square(double* squares, float* grads, const ParamChunks* chunks,
                                  const OtherGradients* others, cudaStream_t stream) {
    Range range("norm and AdamW", RANGE_BACKWARD, stream);
    if (others)
        CUDA_LAUNCH(squares_kernel<true>, chunks->count, 256, stream, squares, grads, chunks->chunks,
                    *others);
    else
        CUDA_LAUNCH(squares_kernel<false>, chunks->count, 256, stream, squares, grads, chunks->chunks,
                    OtherGradients());
}

// stats->own.squares = sum of squares[n].
static inline void global_norm(StepStats* stats, const double* squares, int64_t n, cudaStream_t stream) {
    Range range("norm and AdamW", RANGE_BACKWARD, stream);
    CUDA_LAUNCH(sum_kernel, 1, 1024, stream, &stats->own.squares, squares, n, false);
}

// Computes the other fields of stats from stats->all, which for one rank alone is stats->own. The gradient's
// norm is clipped at `clip`; 0: never. Above spike_norm the step is left out; 0: never.
static inline void global_norm_finish(StepStats* stats, double clip, double spike_norm, bool alone,
                                      cudaStream_t stream) {
    Range range("norm and AdamW", RANGE_BACKWARD, stream);
    CUDA_LAUNCH(finish_kernel, 1, 1, stream, stats, clip, spike_norm, alone);
}
