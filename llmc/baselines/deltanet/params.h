/*
Rows of the parameter table of DeltaNet and Gated DeltaNet, their initialisation, and their FLOPs. Used by
../mixers.h. One mixer computes both: Gated DeltaNet's own tensors are those that DeltaNet lacks.
*/
#pragma once

#include "../shared/head_params.h"

// kd = NH dh channels of keys, vd = config_inner_size of values: d both of DeltaNet
enum {
    P_DELTANET_Q_PROJ =
        P_FIRST_OF(MIXER_DELTANET), // [kd, d]    this and the next three: the fused projection
    P_DELTANET_K_PROJ,              // [kd, d]
    P_DELTANET_V_PROJ,              // [vd, d]
    P_DELTANET_B_PROJ,              // [NH, d]    beta
    P_DELTANET_Q_CONV,              // [kd, 1, 4] this and the next two: one matrix [2 kd + vd, 4]
    P_DELTANET_K_CONV,              // [kd, 1, 4]
    P_DELTANET_V_CONV,              // [vd, 1, 4]
    P_DELTANET_O_NORM,              // [vd / NH]
    P_DELTANET_O_PROJ,              // [d, vd]
    // gated: in the fused projection G_PROJ before B_PROJ, and A_PROJ behind it
    P_DELTANET_G_PROJ,  // [vd, d]    output gate
    P_DELTANET_A_PROJ,  // [NH, d]    time step
    P_DELTANET_A_LOG,   // [NH]       log of the decay's rate
    P_DELTANET_DT_BIAS, // [NH]       of the time step
};

static inline bool deltanet_is_gated(const Config* c) { return c->mixer == MIXER_GATED_DELTANET; }

// Channels of the convolutions: q, k and v.
static inline int64_t deltanet_channels(const Config* c) {
    return 2 * c->num_heads * config_head_size(c) + config_inner_size(c);
}

// A_log is the logarithm of a number uniform between 0 and 16.
static inline double deltanet_initial_A_log(const Config* c, int64_t head, double uniform) {
    (void)c, (void)head;
    return log(16 * (1 - uniform)); // of a number above 0
}

// Rows of layer l.
static inline void deltanet_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size, NH = c->num_heads, kd = NH * config_head_size(c), vd = config_inner_size(c);
    const bool gated = deltanet_is_gated(c);
    params_add_proj(t, P_DELTANET_Q_PROJ, l, "attn.q_proj.weight", kd, d);
    params_add_proj(t, P_DELTANET_K_PROJ, l, "attn.k_proj.weight", kd, d);
    params_add_proj(t, P_DELTANET_V_PROJ, l, "attn.v_proj.weight", vd, d);
    if (gated) params_add_proj(t, P_DELTANET_G_PROJ, l, "attn.g_proj.weight", vd, d);
    params_add_proj(t, P_DELTANET_B_PROJ, l, "attn.b_proj.weight", NH, d);
    if (gated) params_add_proj(t, P_DELTANET_A_PROJ, l, "attn.a_proj.weight", NH, d);
    params_add_conv(t, P_DELTANET_Q_CONV, l, "attn.q_conv1d.weight", kd, false);
    params_add_conv(t, P_DELTANET_K_CONV, l, "attn.k_conv1d.weight", kd, true);
    params_add_conv(t, P_DELTANET_V_CONV, l, "attn.v_conv1d.weight", vd, true);
    if (gated) {
        params_add_head_numbers(t, c, P_DELTANET_A_LOG, l, "attn.A_log", deltanet_initial_A_log);
        params_add_head_numbers(t, c, P_DELTANET_DT_BIAS, l, "attn.dt_bias", initial_dt_bias);
    }
    params_add_norm(t, P_DELTANET_O_NORM, l, "attn.o_norm.weight", vd / NH, c->norm_eps);
    params_add_matrix(t, P_DELTANET_O_PROJ, l, "attn.o_proj.weight", d, vd);
}

// flash-linear-attention draws Gated DeltaNet's convolutions as its matrices.
static inline void gated_deltanet_init(Param* p, const Config* c) {
    (void)c;
    if (p->init == INIT_UNIFORM) p->init = INIT_NORMAL, p->scale = 1;
}

// As the paper counts the FLOPs of the recurrence.
static inline double deltanet_flops(const Config* c, int64_t T) {
    (void)T;
    return 18.0 * (double)(config_inner_size(c) * config_head_size(c));
}

static const MixerInfo deltanet_info = {
    MIXER_NAMES,
    .add_params = deltanet_add_params,
    .init = params_init_xavier,
    .flops = deltanet_flops,
};

static const MixerInfo gated_deltanet_info = {
    MIXER_NAMES,
    .up_proj = true,
    .add_params = deltanet_add_params,
    .init = gated_deltanet_init,
    .flops = deltanet_flops,
};
