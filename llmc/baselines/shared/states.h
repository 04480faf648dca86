/*
Inference with the recurrent mixers on the CPU (llmc/inference/extension.h). A slot's state has a fixed size, and
there are no pages: the tensors that a mixer's table keeps for every layer hold the states of all slots, the
others are scratch of a pass. A pass extends one sequence after the other by the mixer's forward function,
which starts from the states that it finds and updates them.

Called by the recurrent mixers and by train_fox.c.
*/
#pragma once

#include "../../cpu/layer.h"

typedef void MixerForward(const Layer* layer, real* out, const real* in, const real* residual);

// Makes the states of one sequence, in a table of an extension, those of all slots.
static inline void mixer_slots(Activations* rows, const CacheSizes* sizes) {
    for (int i = 0; i < rows->count; i++)
        if (rows->rows[i].per_layer) rows->rows[i].bytes *= sizes->slots, rows->rows[i].of_slots = true;
}

// The layer's part of tensor i that belongs to a slot; NULL and 0 bytes for scratch.
static inline char* mixer_slot(const Layer* layer, int i, int64_t slot, size_t* bytes) {
    *bytes = 0;
    if (!layer->mixer->rows[i].of_slots) return NULL;
    const int64_t all = layer->mixer->rows[i].bytes;
    *bytes = (size_t)(all / layer->sizes->slots);
    return (char*)layer->mixer->rows[i].data + layer->l * all + slot * (int64_t)*bytes;
}

// Extends the sequences of the layer's extension: out, in, residual [rows, d].
static inline void mixer_extend(const Layer* layer, real* out, const real* in, const real* residual,
                                MixerForward* forward) {
    const Extension* e = layer->extension;
    const int64_t d = layer->config->hidden_size;
    for (int64_t s = 0; s < e->sequences; s++) {
        const int64_t begin = e->begins[s];
        size_t bytes;
        Activations slot = *layer->mixer;
        Layer one = *layer;
        for (int i = 0; i < slot.count; i++) {
            char* state = mixer_slot(layer, i, e->slots[s], &bytes);
            if (state) slot.rows[i].data = state - layer->l * slot.rows[i].bytes;
            if (state && e->lengths[s] == 0) memset(state, 0, bytes); // an empty sequence
        }
        one.mixer = &slot, one.B = 1, one.T = e->begins[s + 1] - begin;
        forward(&one, out + begin * d, in + begin * d, residual ? residual + begin * d : NULL);
    }
}

// Copies the layer's state of a slot to another one.
static inline void mixer_fork(const Layer* layer, int64_t from, int64_t to) {
    size_t bytes;
    for (int i = 0; i < layer->mixer->count; i++) {
        const char* state = mixer_slot(layer, i, from, &bytes);
        if (state) memcpy(mixer_slot(layer, i, to, &bytes), state, bytes);
    }
}
