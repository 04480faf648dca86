/*
HGRN2's rows of the parameter table, their initialisation, and its FLOPs. Used by ../mixers.h.
*/
#pragma once

#include "../../model/params.h"

enum {
    P_HGRN2_LOWER_BOUNDS =
        P_FIRST_OF(MIXER_HGRN2), // [HGRN2's layers, d]  outside the layers; trainable where it is used
    P_HGRN2_Q_PROJ,              // [d, d]  this and the next two: the fused projection
    P_HGRN2_F_PROJ,              // [d, d]  forget gate
    P_HGRN2_I_PROJ,              // [d, d]  input: the recurrence's v
    P_HGRN2_G_NORM,              // [d]
    P_HGRN2_O_PROJ,              // [d, d]
};

static inline void hgrn2_add_lower_bounds(ParamTable* t, const Config* c) {
    const int64_t shape[3] = {config_layers_of(c, MIXER_HGRN2), c->hidden_size, 0};
    if (config_is_stack(c) && !c->use_lower_bound) return;
    Param* p = params_add(t, P_HGRN2_LOWER_BOUNDS, -1, "model.lower_bounds", INIT_ZERO, shape, false);
    p->decays = false;
    p->trainable = c->use_lower_bound;
    p->optional = !c->use_lower_bound; // flash-linear-attention has it only where it is used
    if (c->use_lower_bound) params_in_fp32(t, p);
}

// Rows of layer l.
static inline void hgrn2_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size;
    params_add_proj(t, P_HGRN2_Q_PROJ, l, "attn.q_proj.weight", d, d);
    params_add_proj(t, P_HGRN2_F_PROJ, l, "attn.f_proj.weight", d, d);
    params_add_proj(t, P_HGRN2_I_PROJ, l, "attn.i_proj.weight", d, d);
    params_add_norm(t, P_HGRN2_G_NORM, l, "attn.g_norm.weight", d, c->norm_eps);
    params_add_matrix(t, P_HGRN2_O_PROJ, l, "attn.o_proj.weight", d, d);
}

// As the paper counts the FLOPs of the recurrence.
static inline double hgrn2_flops(const Config* c, int64_t T) {
    (void)T;
    return 15.0 * (double)(c->hidden_size * config_head_size(c));
}

static const MixerInfo hgrn2_info = {
    MIXER_NAMES,
    .add_params = hgrn2_add_params,
    .add_outside = hgrn2_add_lower_bounds,
    .init = params_init_xavier,
    .flops = hgrn2_flops,
};
