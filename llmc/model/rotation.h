/*
RoPE's angles, plain and scaled (llmc/config/rope_scaling.h). At position t pair i of a head's dh/2 is rotated
by t f_i and becomes `gain` times as long:

    plain     f_i = base^(-2i/dh)
    linear    f_i / factor
    yarn      f_i (1 - r_i) + f_i / factor r_i, gain = 0.1 ln factor + 1; r_i rises linearly from 0 to 1
              between the pairs that turn 32 times and once in the length of the training before

Called by attention as a layer, on the CPU and on the GPU. The struct and f_i are in shapes.h, for the
functions and kernels that rotate.
*/
#pragma once

#include "../config/config.h"
#include "shapes.h"

// The pair that turns so many times in the length of the training before.
static inline double rotation_pair(const Config* c, double turns) {
    const double wavelength = (double)c->rope_scaling.length / turns;
    return (double)config_head_size(c) * log(wavelength / (2 * acos(-1.0))) / (2 * log(c->rope_base));
}

static inline Rotation config_rotation(const Config* c) {
    Rotation r = rotation_plain(c->rope_base);
    if (c->rope_scaling.type == ROPE_PLAIN) return r;
    r.factor = c->rope_scaling.factor;
    if (c->rope_scaling.type == ROPE_LINEAR) return r;
    // as transformers' tables: whole pairs, of which there are at most dh
    r.low = fmax(floor(rotation_pair(c, 32)), 0);
    r.high = fmin(ceil(rotation_pair(c, 1)), (double)(config_head_size(c) - 1));
    if (r.high == r.low) r.high += 0.001;
    r.gain = 0.1 * log(r.factor) + 1;
    return r;
}

// What RoPE multiplies bounds of |q| |k| by; 0: q and k are not rotated.
static inline double config_rope_gain(const Config* c) {
    const Rotation r = config_rotation(c);
    return c->use_rope ? r.gain * r.gain : 0;
}
