/*
Programmatic dependent launch: kernels compiled for Hopper and later start while those before them in the
stream still run, so that launch latency and the first loads of weights are hidden.

Invariants:

1. A kernel launched by launch_after or launch_clusters calls kernel_wait once in every thread. By induction
   all kernels before it have then ended (griddepcontrol.wait waits for the kernel before, which waited
   itself).
2. Before its kernel_wait a kernel writes no global memory, and reads only what no kernel since the last one
   without the attribute (3.) writes: several may still run, as kernel_wait first lets the next one start.
3. CUDA_LAUNCH and cuBLAS launch without the attribute (attributes[0]): such a kernel starts when all before
   it have ended, needs no kernel_wait, and may stand between others.
4. In a pass that is captured into a graph, the first kernel behind work of another stream (side_fork,
   side_join, side_await, exchange_await) is launched without the attribute: a kernel with it depends on the
   one before alone.
*/
#pragma once

#include <utility>
#include "overlap.h"
#include "range.cuh"

#ifndef LAUNCH_OVERLAPS
#define LAUNCH_OVERLAPS 1 // 0: each kernel starts when the one before has ended
#endif

// Each kernel starts when the one before has ended: model_set_sequential
static bool launch_in_sequence;

// Lets the next kernel start, then waits until all kernels before this one have ended and their writes are
// visible.
__device__ static inline void kernel_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// All kernels are compiled for the same architectures, so one of them answers for all.
static inline bool launch_overlaps(const void* kernel) {
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    return LAUNCH_OVERLAPS && launch_overlaps_of(attributes.ptxVersion);
}

// Allows a kernel the most dynamic shared memory that a thread block can have: one limit for all sizes, as
// captured launches of other sizes depend on it.
static inline void launch_allow_shared(const void* kernel) {
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - (int)attributes.sharedSizeBytes;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
}

// Launches a kernel with `shared` bytes of dynamic shared memory and clusters of `cluster` thread blocks,
// more than 1 on Hopper and later only. An empty grid is not launched.
template <class... Parameters, class... Arguments>
static inline void launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 grid, int64_t threads,
                                   int64_t shared, cudaStream_t stream, Arguments&&... arguments) {
    static const bool can_overlap = launch_overlaps((const void*)kernel);
    const bool overlaps = can_overlap && !launch_in_sequence;
    if (grid.x == 0) return;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)shared;
    config.stream = stream;
    config.attrs = attributes + (overlaps ? 0 : 1);
    config.numAttrs = (unsigned)overlaps + (cluster > 1);
    if (shared > 16 << 10) launch_allow_shared((const void*)kernel);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...));
}

// The same without clusters
template <class... Parameters, class... Arguments>
static inline void launch_after(void (*kernel)(Parameters...), dim3 grid, int64_t threads, int64_t shared,
                                cudaStream_t stream, Arguments&&... arguments) {
    launch_clusters(kernel, 1, grid, threads, shared, stream, std::forward<Arguments>(arguments)...);
}

// ----------------------------------------------------------------------------
// a second stream beside the main one, for work that only later kernels of the main stream need: it runs on
// SMs that the ends of other kernels leave idle
//
//     side_fork     what is queued on the side stream from now on waits for what is queued on the main one
//     side_join     what is queued on the main stream from now on waits for what is queued on the side one
//     side_mark, side_await     the same for what was queued on the side stream at side_mark
//
// A stream that is being captured may wait only for what was captured with it, so that side_join does nothing
// unless side_fork was called since the last one. The GPU trainer's is in its WeightStream
// (layers/layer.cuh).

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
