/*
Whether decode.cuh's kernels, which need clusters and bulk copies, run on a GPU.

decode.cuh passes ptx_version, the architecture that the loaded code was compiled for, from cudaFuncAttributes
of one of these kernels.
*/
#pragma once

#include <stdbool.h>

// shared: bytes that a thread block can have; needed: bytes of the largest kernel, more than sm_120 has
static inline bool decode_runs_of(int ptx_version, long long shared, long long needed) {
    return ptx_version >= 90 && shared >= needed;
}
