/*
An optimizer step in flight: pinned host memory for its results, and the event after which they are there.

Called by the GPU trainer, which queues the next step before it reads the results of this one.
*/
#pragma once

#include "../cuda/device.cuh"
#include "../layers/global_norm.cuh"

typedef struct {
    StepStats* stats;      // pinned
    PruningCount* pruning; // [L], pinned
    RankTime* times;       // [ranks], pinned; filled with several ranks
    StepVotes* votes;      // of this rank, pinned
    cudaEvent_t done;
} QueuedStep;

static inline void queued_step_open(QueuedStep* q, int64_t L, int ranks) {
    q->stats = (StepStats*)device_host_alloc(sizeof(StepStats));
    q->pruning = (PruningCount*)device_host_alloc((size_t)L * sizeof(PruningCount));
    q->times = (RankTime*)device_host_alloc((size_t)ranks * sizeof(RankTime));
    q->votes = (StepVotes*)device_host_alloc(sizeof(StepVotes));
    CUDA_CHECK(cudaEventCreateWithFlags(&q->done, cudaEventDisableTiming));
}

static inline void queued_step_close(QueuedStep* q) {
    void* const pinned[] = {q->stats, q->pruning, q->times, q->votes};
    for (void* memory : pinned) device_host_free(memory);
    if (q->done) CUDA_CHECK(cudaEventDestroy(q->done));
}

// Before the update: queues the copy of this rank's votes to the device.
static inline void queued_step_votes(QueuedStep* q, StepStats* stats, const StepVotes* votes,
                                     cudaStream_t stream) {
    *q->votes = *votes;
    CUDA_CHECK(cudaMemcpyAsync(&stats->own.votes, q->votes, sizeof *votes, cudaMemcpyHostToDevice, stream));
}

// After it: queues the copy of the step's results to the host. pruning [layers], times [ranks]; NULL: there
// are none.
static inline void queued_step_results(QueuedStep* q, const StepStats* stats, const PruningCount* pruning,
                                       int64_t layers, const RankTime* times, int ranks,
                                       cudaStream_t stream) {
    const size_t bytes = (size_t)layers * sizeof *pruning, time_bytes = (size_t)ranks * sizeof *times;
    CUDA_CHECK(cudaMemcpyAsync(q->stats, stats, sizeof *stats, cudaMemcpyDeviceToHost, stream));
    if (pruning) CUDA_CHECK(cudaMemcpyAsync(q->pruning, pruning, bytes, cudaMemcpyDeviceToHost, stream));
    if (times) CUDA_CHECK(cudaMemcpyAsync(q->times, times, time_bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaEventRecord(q->done, stream));
}
