/*
Mamba-2's rows of the parameter table, their initialisation, and its FLOPs. Used by ../mixers.h.

in_proj's rows are z [di], then x [di], B [N] and C [N], which the convolution reads, then dt [NH].
*/
#pragma once

#include "../shared/head_params.h"

// C = di + 2 N channels of the convolution
enum {
    P_MAMBA2_IN_PROJ = P_FIRST_OF(MIXER_MAMBA2), // [di + C + NH, d]  the whole fused projection
    P_MAMBA2_CONV,                               // [C, 1, 4]
    P_MAMBA2_CONV_BIAS,                          // [C]
    P_MAMBA2_DT_BIAS,                            // [NH]     of the time step
    P_MAMBA2_A_LOG,                              // [NH]     log of the decay's rate
    P_MAMBA2_D,                                  // [NH]     skip connection from x to the output
    P_MAMBA2_NORM,                               // [di]
    P_MAMBA2_OUT_PROJ,                           // [d, di]
};

// A_log of head i is log(i + 1).
static inline double mamba2_initial_A_log(const Config* c, int64_t head, double uniform) {
    (void)c, (void)uniform;
    return log((double)(head + 1));
}

// Matrices and lm_head start uniform in +-1 / sqrt(fan in), out_proj divided by sqrt(L).
static inline void mamba2_init(Param* p, const Config* c) {
    if (p->kind != P_MAMBA2_IN_PROJ && p->kind != P_MAMBA2_OUT_PROJ && p->kind != P_LM_HEAD) return;
    p->init = INIT_UNIFORM;
    p->scale = 1 / sqrt((double)p->shape[1]);
    if (p->kind == P_MAMBA2_OUT_PROJ && c->rescale_prenorm_residual)
        p->scale /= sqrt((double)c->num_hidden_layers);
}

// Rows of layer l.
static inline void mamba2_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size, di = config_inner_size(c), C = di + 2 * c->state_size;
    const int64_t channels[3] = {C, 0, 0};
    params_add_proj(t, P_MAMBA2_IN_PROJ, l, "mixer.in_proj.weight", di + C + c->num_heads, d);
    params_add_conv(t, P_MAMBA2_CONV, l, "mixer.conv1d.weight", C, false);
    params_add(t, P_MAMBA2_CONV_BIAS, l, "mixer.conv1d.bias", INIT_UNIFORM, channels, false)->scale =
        1 / sqrt((double)CONV_WIDTH);
    params_add_head_numbers(t, c, P_MAMBA2_DT_BIAS, l, "mixer.dt_bias", initial_dt_bias);
    params_add_head_numbers(t, c, P_MAMBA2_A_LOG, l, "mixer.A_log", mamba2_initial_A_log);
    params_add_head_numbers(t, c, P_MAMBA2_D, l, "mixer.D", NULL);
    params_add_norm(t, P_MAMBA2_NORM, l, "mixer.norm.weight", di, c->norm_eps);
    params_add_matrix(t, P_MAMBA2_OUT_PROJ, l, "mixer.out_proj.weight", d, di);
}

// As the paper counts the FLOPs of the recurrence.
static inline double mamba2_flops(const Config* c, int64_t T) {
    (void)T;
    return 30.0 * (double)(c->hidden_size * c->state_size);
}

static const MixerInfo mamba2_info = {
    .embeddings = "backbone.embeddings.weight",
    .layers = "backbone.layers",
    .final_norm = "backbone.norm_f.weight",
    .norm = "norm.weight",
    .add_params = mamba2_add_params,
    .init = mamba2_init,
    .flops = mamba2_flops,
};
