/*
A second stream beside the main one, for work that only later kernels of the main stream need: it runs on
multiprocessors that the ends of other kernels leave idle.

    side_fork     what is queued on the side stream from now on waits for what is queued on the main one
    side_join     what is queued on the main stream from now on waits for what is queued on the side one
    side_mark, side_await     the same for what was queued on the side stream at side_mark

A stream that is being captured may wait only for what was captured with it, so that side_join does nothing
unless side_fork was called since the last one. The GPU trainer's is in its WeightStream (layers/layer.cuh).
*/
#pragma once

#include "cuda_common.cuh"

typedef struct {
    cudaStream_t main;
    cudaStream_t stream; // main in sequential mode, else `own`
    cudaStream_t own;
    cudaEvent_t event, marked;
    bool used; // since the last side_join
} SideStream;

static inline void side_init(SideStream* side, cudaStream_t main) {
    side->main = main;
    CUDA_CHECK(cudaStreamCreate(&side->own));
    CUDA_CHECK(cudaEventCreateWithFlags(&side->event, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&side->marked, cudaEventDisableTiming));
    side->stream = side->own;
    side->used = false;
}

static inline void side_free(SideStream* side) {
    CUDA_CHECK(cudaStreamDestroy(side->own));
    CUDA_CHECK(cudaEventDestroy(side->event));
    CUDA_CHECK(cudaEventDestroy(side->marked));
}

static inline void side_order(SideStream* side, cudaStream_t later, cudaStream_t earlier) {
    if (later == earlier) return;
    CUDA_CHECK(cudaEventRecord(side->event, earlier));
    CUDA_CHECK(cudaStreamWaitEvent(later, side->event, 0));
}

static inline cudaStream_t side_fork(SideStream* side) {
    side_order(side, side->stream, side->main);
    side->used = true;
    return side->stream;
}

static inline void side_join(SideStream* side) {
    if (side->used) side_order(side, side->main, side->stream);
    side->used = false;
}

static inline void side_mark(SideStream* side) { CUDA_CHECK(cudaEventRecord(side->marked, side->stream)); }
static inline void side_await(SideStream* side) {
    CUDA_CHECK(cudaStreamWaitEvent(side->main, side->marked, 0));
}
