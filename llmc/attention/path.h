/*
Which kernels compute attention, by the architecture that the loaded code was compiled for. It is not always
the GPU's own: the driver compiles the program's PTX of sm_80 for any GPU without code of its own.

attention.cuh passes ptx_version, from cudaFuncAttributes of a Hopper kernel.
*/
#pragma once

// The Hopper kernels exist in sm_90a code only; every other GPU, older or newer, runs the sm_80 kernels.
typedef enum { ATTENTION_SM80, ATTENTION_SM90 } AttentionPath;

// capability: the GPU's compute capability, 90 for 9.0
static inline AttentionPath attention_path_of(int capability, int ptx_version) {
    return capability == 90 && ptx_version == 90 ? ATTENTION_SM90 : ATTENTION_SM80;
}
