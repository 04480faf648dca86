/*
DeltaNet's rows of the parameter table, their initialisation, and its FLOPs. Used by ../mixers.h.
*/
#pragma once

#include "../../model/params.h"

enum {
    P_DELTANET_Q_PROJ =
        P_FIRST_OF(MIXER_DELTANET), // [d, d]     this and the next three: the fused projection
    P_DELTANET_K_PROJ,              // [d, d]
    P_DELTANET_V_PROJ,              // [d, d]
    P_DELTANET_B_PROJ,              // [NH, d]    beta
    P_DELTANET_Q_CONV,              // [d, 1, 4]  this and the next two: one matrix [3d, 4]
    P_DELTANET_K_CONV,              // [d, 1, 4]
    P_DELTANET_V_CONV,              // [d, 1, 4]
    P_DELTANET_O_NORM,              // [dh]
    P_DELTANET_O_PROJ,              // [d, d]
};

// Rows of layer l.
static inline void deltanet_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size;
    params_add_proj(t, P_DELTANET_Q_PROJ, l, "attn.q_proj.weight", d, d);
    params_add_proj(t, P_DELTANET_K_PROJ, l, "attn.k_proj.weight", d, d);
    params_add_proj(t, P_DELTANET_V_PROJ, l, "attn.v_proj.weight", d, d);
    params_add_proj(t, P_DELTANET_B_PROJ, l, "attn.b_proj.weight", c->num_heads, d);
    params_add_conv(t, P_DELTANET_Q_CONV, l, "attn.q_conv1d.weight", d, false);
    params_add_conv(t, P_DELTANET_K_CONV, l, "attn.k_conv1d.weight", d, true);
    params_add_conv(t, P_DELTANET_V_CONV, l, "attn.v_conv1d.weight", d, true);
    params_add_norm(t, P_DELTANET_O_NORM, l, "attn.o_norm.weight", config_head_size(c), c->norm_eps);
    params_add_matrix(t, P_DELTANET_O_PROJ, l, "attn.o_proj.weight", d, d);
}

// As the paper counts the FLOPs of the recurrence.
static inline double deltanet_flops(const Config* c, int64_t T) {
    (void)T;
    return 18.0 * (double)(c->hidden_size * config_head_size(c));
}

static const MixerInfo deltanet_info = {
    MIXER_NAMES,
    .add_params = deltanet_add_params,
    .init = params_init_xavier,
    .flops = deltanet_flops,
};
