/*
Parameters of the recurrent mixers that are one number a head: the time step's bias, the decay's rate. The
decay of a token is exp(-softplus(dt + dt_bias) e^A_log). Called by the params.h of Mamba-2 and DeltaNet.
*/
#pragma once

#include "../../model/params.h"

// Bias of a time step: softplus of it is exp(a number uniform between the logarithms of time_step_min and
// time_step_max), at least time_step_floor.
static inline double initial_dt_bias(const Config* c, int64_t head, double uniform) {
    (void)head;
    double low = log(c->time_step_min), high = log(c->time_step_max);
    double dt = fmax(exp(low + uniform * (high - low)), c->time_step_floor);
    return dt + log(-expm1(-dt));
}

// A number for each head, read in fp32; `initial` NULL: it starts at 1.
static inline void params_add_head_numbers(ParamTable* t, const Config* c, ParamKind kind, int64_t l,
                                           const char* name, InitialValue* initial) {
    const int64_t heads[3] = {c->num_heads, 0, 0};
    Param* p = params_add(t, kind, l, name, initial ? INIT_FUNCTION : INIT_ONE, heads, false);
    p->initial = initial;
    params_in_fp32(t, p);
}
