/*
Inference of the recurrent mixers on the CPU (llmc/model/extension.h); extend.cuh is the GPU's. A slot's
state has a fixed size, and there are no pages: the tensors that a mixer's table of states keeps for every
layer hold the states of all slots, the others are scratch of a pass. A pass extends one sequence after the
other by the mixer's forward function, which starts from the slot's states and updates them.

Called by the recurrent mixers.
*/
#pragma once

#include "../../inference/cpu/extend.h"

typedef void MixerForward(const Layer* layer, real* out, const real* in, const real* residual);

// Extends the sequences of the cache's pass: out = in + forward(norm(in)), [rows, d].
static inline void mixer_extend(const Layer* layer, Cache* cache, real* out, const real* in,
                                MixerForward* forward) {
    const Extension* e = cache->pass;
    const int64_t d = layer->config->hidden_size;
    const real* normed = extend_normed(layer, cache, in, P_MIXER_NORM);
    for (int64_t s = 0; s < e->sequences; s++) {
        const int64_t begin = e->begins[s];
        size_t bytes;
        Activations slot = cache->states;
        Layer one = *layer;
        for (int i = 0; i < slot.count; i++) {
            char* state = cache_slot(cache, i, layer->l, e->slots[s], &bytes);
            if (state) slot.rows[i].data = state - layer->l * slot.rows[i].bytes;
            if (state && e->lengths[s] == 0) memset(state, 0, bytes); // an empty sequence
        }
        one.mixer = &slot;
        one.B = 1;
        one.T = e->begins[s + 1] - begin;
        forward(&one, out + begin * d, normed + begin * d, in + begin * d);
    }
}
