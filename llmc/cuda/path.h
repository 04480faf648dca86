/*
Which kernels run, by the architecture that the loaded code was compiled for. It is not always the GPU's own:
the driver compiles the program's PTX of sm_80 for any GPU without code of its own.

attention.cuh and launch.cuh pass ptx_version, from cudaFuncAttributes of one of their kernels.
*/
#pragma once

#include <stdbool.h>

// The Hopper kernels exist in sm_90a code only; every other GPU, older or newer, runs the sm_80 kernels.
typedef enum { ATTENTION_SM80, ATTENTION_SM90 } AttentionPath;

// capability: the GPU's compute capability, 90 for 9.0. ptx_version: of a Hopper kernel.
static inline AttentionPath attention_path_of(int capability, int ptx_version) {
    return capability == 90 && ptx_version == 90 ? ATTENTION_SM90 : ATTENTION_SM80;
}

// Whether decode.cuh's kernels, which need clusters and bulk copies, run. ptx_version: of one of them.
// shared: bytes that a thread block can have; needed: bytes of the largest one, more than sm_120 has.
static inline bool decode_runs_of(int ptx_version, long long shared, long long needed) {
    return ptx_version >= 90 && shared >= needed;
}

// Whether a kernel may start before the one ahead of it has ended: only where kernel_wait (launch.cuh) waits
// for that one, which it does in code for sm_90 and later.
static inline bool launch_overlaps_of(int ptx_version) { return ptx_version >= 90; }
