/*
Both trainers in one program, for test_fox.cu: the GPU trainer at global scope, the CPU trainer, in double, in
namespace cpu. All device memory is filled with NaN when it is allocated.
*/
#pragma once

#include "../../../llmc/cuda/cuda_common.cuh"

static bool poison = true; // compute-sanitizer's initcheck must not see these writes

static cudaError_t poisoned_malloc(void** p, size_t bytes) {
    cudaError_t error = cudaMalloc(p, bytes);
    if (error == cudaSuccess && poison) error = cudaMemset(*p, 0xFF, bytes);
    return error;
}

#define cudaMalloc(p, bytes) poisoned_malloc((void**)(p), bytes)
#define TESTING
#pragma nv_diag_suppress 177 // functions of the trainers that no test calls
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../../train_fox.cu"
#undef cudaMalloc

// All headers that train_fox.c includes at global scope, so that within the namespace only llmc/cpu is left
// of them.
#include <float.h>
#include <omp.h>
#include <signal.h>
#include <sys/resource.h>
#include "../../../llmc/model/sampler.h"

#define REAL_IS_DOUBLE
#define _Thread_local thread_local
// Their arguments would also match the GPU trainer's functions, which the types of the arguments bring into
// view.
#define model_new cpu_model_new
#define pass_acts cpu_pass_acts
namespace cpu {
#include "../../../train_fox.c"
#include "variants.h"
} // namespace cpu
#undef model_new
#undef pass_acts
