/*
Launches of small kernels one after another. Code compiled for Hopper and later starts while the kernel before it
in the stream still runs (programmatic dependent launch): what does not depend on others, as the first loads of
weights, comes before kernel_wait, all else behind it.

Every kernel launched by launch_after calls kernel_wait in every thread. Kernels without it may stand between
them.
*/
#pragma once

#include <utility>
#include "path.h"
#include "range.cuh"

#ifndef LAUNCH_OVERLAPS
#define LAUNCH_OVERLAPS 1 // 0: each kernel starts when the one before has ended
#endif

// The kernels before have ended, and what they have written can be read. The next kernel may start before
// that, up to its kernel_wait: what it reads there is written by none of the kernels since the last one
// without kernel_wait.
__device__ static inline void kernel_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// All kernels are compiled for the same architectures, so that one of them answers for all.
static inline bool launch_overlaps(const void* kernel) {
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    return LAUNCH_OVERLAPS && launch_overlaps_of(attributes.ptxVersion);
}

// Allows a kernel all shared memory that a thread block may have: always the same limit, since captured
// launches of other sizes depend on it.
static inline void launch_allow_shared(const void* kernel) {
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - (int)attributes.sharedSizeBytes;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
}

// Queues a kernel with `shared` bytes of dynamic shared memory, `cluster` neighbouring blocks of the grid a
// cluster; more than one on Hopper and later only. An empty grid is not launched.
template <class... Parameters, class... Arguments>
static inline void launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 grid, int64_t threads,
                                   int64_t shared, cudaStream_t stream, Arguments&&... arguments) {
    static const bool overlaps = launch_overlaps((const void*)kernel);
    if (grid.x == 0) return;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)shared, config.stream = stream;
    config.attrs = attributes + (overlaps ? 0 : 1), config.numAttrs = (unsigned)overlaps + (cluster > 1);
    if (shared > 16 << 10) launch_allow_shared((const void*)kernel);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...));
}

// The same without clusters
template <class... Parameters, class... Arguments>
static inline void launch_after(void (*kernel)(Parameters...), dim3 grid, int64_t threads, int64_t shared,
                                cudaStream_t stream, Arguments&&... arguments) {
    launch_clusters(kernel, 1, grid, threads, shared, stream, std::forward<Arguments>(arguments)...);
}
