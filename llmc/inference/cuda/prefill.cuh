/*
Attention of a sequence's many rows over the cache, by the kernel of the forward pass.

Called by the GPU trainer before extend_attention, which applies the output norm and gate.
*/
#pragma once

#include "extend.cuh"

// Scratch for one sequence in one layer, [T] tokens; and what prunes its attention: with a gate ln eps, NAN
// for none, and QK norm's weights, NULL without.
typedef struct {
    PagesGathered keys;
    float* lse;            // [NH, T]
    Pruning pruning;       // bounds, score_limits, scratch, log_tolerance and weights
    int64_t weight_stride; // of QK norm
} PrefillScratch;

// o of the rows of one sequence (`rows` on the host), by attention_forward over its gathered keys. Up to
// ATTENTION_FIRST_QUERY - 1 rows before its first are read of q and overwritten in o: the sequences of a pass
// are computed from the last one on, before extend_combine, and q and o have as many rows before their first.
static inline void prefill_attention(bf16* o, const bf16* q, const PrefillScratch* space,
                                     const PassRows* rows, const ExtendLayer* layer, cudaStream_t stream) {
    const Pages* p = layer->pages;
    int64_t T = rows->position + rows->end - rows->begin;
    int64_t first = rows->position / ATTENTION_FIRST_QUERY * ATTENTION_FIRST_QUERY;
    int64_t at = (rows->begin - (rows->position - first)) * p->NH * p->dh;
    HeadShape shape = {1, T, p->NH, p->dh, 0, 0, space->weight_stride, p->window};
    Pruning pruning = space->pruning;
    // norms are those of all keys, of which a window's are gathered
    bool prunes = p->cum_logf && !isnan(pruning.log_tolerance) && (pruning.q_weight || !p->window);
    PagesGathered keys = space->keys;
    // whole blocks, as attention reads them
    keys.first_page =
        (int)(head_first_key(&shape, first) / ATTENTION_BLOCK * (ATTENTION_BLOCK / PAGE_TOKENS));
    pruning.cum_logf = keys.cum_logf;
    pruning.q = q + rows->begin * p->NH * p->dh, pruning.first_query = rows->position;
    pruning.k = keys.k;
    pages_gather(&keys, p, layer->index, rows->slot, T, stream);
    if (prunes) pruning_bounds(&pruning, &shape, stream);
    AttentionForward forward = {o + at,
                                space->lse,
                                q + at,
                                keys.k,
                                keys.v,
                                p->cum_logf ? keys.cum_logf : NULL,
                                prunes ? &pruning.bounds : NULL,
                                pruning.scratch,
                                first};
    attention_forward(&forward, &shape, stream);
}
