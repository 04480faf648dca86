/*
Which attention kernels a GPU runs: the Hopper kernels exist in sm_90a code only; every other GPU, older or
newer, runs the sm_80 kernels, compiled for it or compiled from their PTX by the driver. attention.cuh calls
it.
*/
#pragma once

typedef enum { ATTENTION_SM80, ATTENTION_SM90 } AttentionPath;

// capability: the GPU's compute capability, 90 for 9.0. ptx_version: the architecture that the loaded Hopper
// kernel was compiled for, from cudaFuncAttributes; 80 if the program has no sm_90a code.
static inline AttentionPath attention_path_of(int capability, int ptx_version) {
    return capability == 90 && ptx_version == 90 ? ATTENTION_SM90 : ATTENTION_SM80;
}
