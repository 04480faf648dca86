/*
Both trainers in one program, for test_fox.cu: the GPU trainer at global scope, the CPU trainer, in double, in
namespace cpu. All device memory is filled with NaN when it is allocated.

The errors of the GPU's tensors and their limits: the error of a tensor is ||gpu - expected|| / ||expected||.
The worst ones of all parts are printed beside their limits, so that the table can be measured anew.
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
struct Cache; // llmc/model/extension.h has declared the GPU trainer's
#include "../../../train_fox.c"
#include "variants.h"
} // namespace cpu
#undef model_new
#undef pass_acts

// ----------------------------------------------------------------------------
// errors and their limits

#include "../check.h"

// A ParamKind: its gradient; Q_GATED + a ParamKind: that of a delta rule with decays, where its error is
// larger
enum { Q_LOSS = NUM_PARAM_KINDS, Q_LOGITS, Q_EXTENDED, Q_GATED };

// The worst errors of all parts, of models with attention and of models with a recurrent layer: those of bf16's 8
// bits, accumulated over the tensors between. Measured with CUDA 13.0; of recurrent models by the same kernels
// emulated on a CPU, where those that an H200 reported are the same in three digits; tensors that have the
// same place in two of them share a limit. The errors of attention beside recurrent layers are an H200's. Other GPUs
// add in another order, so an error may be LIMIT times as large. 0: the models do not have the tensor.
static struct {
    int quantity;
    const char* name;
    double measured[2], worst[2];
    char where[2][160];
} quantities[] = {
    {P_EMBEDDINGS, "embeddings", {1.5e-2, 4.7e-2}, {0, 0}, {"", ""}},
    {P_MIXER_NORM, "mixer_norm", {1.9e-2, 4.8e-2}, {0, 0}, {"", ""}},
    {P_Q_PROJ, "q_proj", {2.0e-2, 2.8e-2}, {0, 0}, {"", ""}},
    {P_K_PROJ, "k_proj", {2.0e-2, 2.8e-2}, {0, 0}, {"", ""}},
    {P_V_PROJ, "v_proj", {1.2e-2, 1.9e-2}, {0, 0}, {"", ""}},
    {P_OGATE_PROJ, "ogate_proj", {1.3e-2, 2.1e-2}, {0, 0}, {"", ""}},
    {P_FGATE_PROJ, "fgate_proj", {2.3e-2, 2.2e-2}, {0, 0}, {"", ""}},
    {P_K_SHIFT, "k_shift", {2.2e-2, 3.0e-2}, {0, 0}, {"", ""}},
    {P_V_SHIFT, "v_shift", {2.0e-2, 2.2e-2}, {0, 0}, {"", ""}},
    {P_FGATE_BIAS, "fgate_bias", {3.2e-2, 1.5e-2}, {0, 0}, {"", ""}},
    {P_Q_NORM, "q_norm", {2.2e-2, 1.1e-2}, {0, 0}, {"", ""}},
    {P_K_NORM, "k_norm", {2.1e-2, 1.1e-2}, {0, 0}, {"", ""}},
    {P_OUTPUT_NORM, "output_norm", {1.2e-2, 1.9e-2}, {0, 0}, {"", ""}},
    {P_O_PROJ, "o_proj", {1.2e-2, 1.9e-2}, {0, 0}, {"", ""}},
    {P_MLP_NORM, "mlp_norm", {1.4e-2, 5.0e-2}, {0, 0}, {"", ""}},
    {P_GATE_PROJ, "gate_proj", {1.3e-2, 4.8e-2}, {0, 0}, {"", ""}},
    {P_UP_PROJ, "up_proj", {0, 2.0e-2}, {0, 0}, {"", ""}},
    {P_DOWN_PROJ, "down_proj", {1.3e-2, 4.8e-2}, {0, 0}, {"", ""}},
    {P_NORM, "norm", {7.6e-3, 2.3e-2}, {0, 0}, {"", ""}},
    {P_LM_HEAD, "lm_head", {8.2e-3, 2.4e-2}, {0, 0}, {"", ""}},
    {Q_LOSS, "loss", {2.7e-3, 1.4e-2}, {0, 0}, {"", ""}},
    {Q_LOGITS, "logits", {8.7e-3, 1.8e-2}, {0, 0}, {"", ""}},
    {Q_EXTENDED, "extended", {9.5e-3, 1.8e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_Q_PROJ, "DeltaNet q_proj", {0, 4.9e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_K_PROJ, "DeltaNet k_proj", {0, 5.2e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_V_PROJ, "DeltaNet v_proj", {0, 4.4e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_B_PROJ, "DeltaNet b_proj", {0, 2.6e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_Q_CONV, "DeltaNet q_conv", {0, 2.1e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_K_CONV, "DeltaNet k_conv", {0, 1.9e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_V_CONV, "DeltaNet v_conv", {0, 4.3e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_O_NORM, "DeltaNet o_norm", {0, 3.9e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_O_PROJ, "DeltaNet o_proj", {0, 6.4e-2}, {0, 0}, {"", ""}},
    {Q_GATED + P_DELTANET_B_PROJ, "gated b_proj", {0, 3.6e-2}, {0, 0}, {"", ""}},
    {Q_GATED + P_DELTANET_Q_CONV, "gated q_conv", {0, 4.1e-2}, {0, 0}, {"", ""}},
    {Q_GATED + P_DELTANET_K_CONV, "gated k_conv", {0, 3.4e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_G_PROJ, "gated g_proj", {0, 2.1e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_A_PROJ, "gated a_proj", {0, 2.9e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_A_LOG, "gated A_log", {0, 1.8e-2}, {0, 0}, {"", ""}},
    {P_DELTANET_DT_BIAS, "gated dt_bias", {0, 1.1e-2}, {0, 0}, {"", ""}},
    {P_HGRN2_LOWER_BOUNDS, "HGRN2 lower_bounds", {0, 2.3e-3}, {0, 0}, {"", ""}},
    {P_HGRN2_Q_PROJ, "HGRN2 q_proj", {0, 4.9e-2}, {0, 0}, {"", ""}},
    {P_HGRN2_F_PROJ, "HGRN2 f_proj", {0, 5.2e-2}, {0, 0}, {"", ""}},
    {P_HGRN2_I_PROJ, "HGRN2 i_proj", {0, 4.4e-2}, {0, 0}, {"", ""}},
    {P_HGRN2_G_NORM, "HGRN2 g_norm", {0, 3.9e-2}, {0, 0}, {"", ""}},
    {P_HGRN2_O_PROJ, "HGRN2 o_proj", {0, 6.4e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_IN_PROJ, "Mamba-2 in_proj", {0, 4.9e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_CONV, "Mamba-2 conv", {0, 2.1e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_CONV_BIAS, "Mamba-2 conv_bias", {0, 2.1e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_DT_BIAS, "Mamba-2 dt_bias", {0, 5.5e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_A_LOG, "Mamba-2 A_log", {0, 1.7e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_D, "Mamba-2 D", {0, 3.9e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_NORM, "Mamba-2 norm", {0, 3.9e-2}, {0, 0}, {"", ""}},
    {P_MAMBA2_OUT_PROJ, "Mamba-2 out_proj", {0, 6.4e-2}, {0, 0}, {"", ""}},
};
enum { NUM_QUANTITIES = sizeof quantities / sizeof quantities[0] };
#define LIMIT 1.5

static double norm_of(const double* x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// `least` replaces ||expected|| where that is smaller.
static void compare(const char* model, bool recurrent, int quantity, const char* name, const float* got,
                    const double* expected, int64_t n, double least) {
    int row = 0;
    while (row < NUM_QUANTITIES && quantities[row].quantity != quantity) row++;
    assert(row < NUM_QUANTITIES);
    double squares = 0, norm = norm_of(expected, n), limit = LIMIT * quantities[row].measured[recurrent];
    for (int64_t i = 0; i < n; i++)
        squares += ((double)got[i] - expected[i]) * ((double)got[i] - expected[i]);
    double error = sqrt(squares) / (norm > least ? norm : least);
    CHECK(error <= limit, "%s: %s is off by %.2e, more than %.2e", model, name, error, limit);
    if (error <= quantities[row].worst[recurrent]) return;
    quantities[row].worst[recurrent] = error;
    snprintf(quantities[row].where[recurrent], sizeof quantities[row].where[recurrent], "%s of %s", name,
             model);
}

static void print_errors(void) {
    for (int recurrent = 0; recurrent < 2; recurrent++) {
        printf("%-18s %8s %8s  where the worst is, of models with %s\n", "tensor", "error", "limit",
               recurrent ? "a recurrence" : "attention");
        for (int i = 0; i < NUM_QUANTITIES; i++)
            if (quantities[i].worst[recurrent] > 0)
                printf("%-18s %8.1e %8.1e  %s\n", quantities[i].name, quantities[i].worst[recurrent],
                       LIMIT * quantities[i].measured[recurrent], quantities[i].where[recurrent]);
    }
}
