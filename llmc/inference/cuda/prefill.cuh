/*
Prefill: attention of a sequence with many rows in a pass, by the kernel of the training forward pass over the
sequence's gathered keys.

    pages_gather -> k, v [T, KVH, dh], cum_logf [NH, T] -> pruning_bounds -> attention_forward
                 -> o [rows, NH, dh]

Called by cache.cuh (device_cache_prefill), before extend_attention, which applies output norm and gate.
*/
#pragma once

#include "extend.cuh"

// Scratch for T tokens of one sequence in one layer, and the inputs of its pruning
typedef struct {
    PagesGathered keys;
    float* lse;            // [NH, T]
    Pruning pruning;       // bounds, score_limits, scratch; log_tolerance (NAN: none) and weights of QK norm
    int64_t weight_stride; // of QK norm
} PrefillScratch;

// o of the rows of one sequence. `rows` is in host memory.
//
// attention_forward begins at a multiple of ATTENTION_FIRST_QUERY: up to ATTENTION_FIRST_QUERY - 1 rows
// before the sequence's first are read of q, and overwritten in o. Therefore
// 1. q and o have that many rows before their first;
// 2. the sequences of a pass are computed from the last one to the first (device_cache_prefill), so that a
//    row's own result is written last;
// 3. extend_attention, which reads o, comes after.
static inline void prefill_attention(bf16* o, const bf16* q, const PrefillScratch* space,
                                     const PassRows* rows, const ExtendLayer* layer, cudaStream_t stream) {
    const Pages* p = layer->pages;
    int64_t T = rows->position + rows->end - rows->begin;
    int64_t first = rows->position / ATTENTION_FIRST_QUERY * ATTENTION_FIRST_QUERY;
    int64_t at = (rows->begin - (rows->position - first)) * p->NH * p->dh;
    HeadShape shape = {};
    shape.B = 1;
    shape.T = T;
    shape.NH = p->NH;
    shape.KVH = p->KVH;
    shape.dh = p->dh;
    shape.weight_stride = space->weight_stride;
    shape.window = p->window;
    Pruning pruning = space->pruning;
    // Without QK norm bounds come from the norms of all keys, and with a window not all keys are gathered.
    bool prunes = p->cum_logf && !isnan(pruning.log_tolerance) && (pruning.q_weight || !p->window);
    PagesGathered keys = space->keys;
    // attention_forward reads whole blocks of keys
    keys.first_page =
        (int)(head_first_key(&shape, first) / ATTENTION_BLOCK * (ATTENTION_BLOCK / PAGE_TOKENS));
    pruning.cum_logf = keys.cum_logf;
    pruning.q = q + rows->begin * p->NH * p->dh;
    pruning.first_query = rows->position;
    pruning.k = keys.k;
    pages_gather(&keys, p, layer->index, rows->slot, T, stream);
    if (prunes) pruning_bounds(&pruning, &shape, stream);
    AttentionForward forward = {.o = o + at,
                                .lse = space->lse,
                                .q = q + at,
                                .k = keys.k,
                                .v = keys.v,
                                .cum_logf = p->cum_logf ? keys.cum_logf : NULL,
                                .bounds = prunes ? &pruning.bounds : NULL,
                                .scratch = pruning.scratch,
                                .first_query = first};
    attention_forward(&forward, &shape, stream);
}
