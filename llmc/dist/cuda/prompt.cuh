/*
Inference over GPUs that share the heads of each sequence (--requests and --generate with --sequence-ranks): every
rank computes all rows of a pass, but attention of its own heads alone, whose keys and values its cache has.

    in_proj ----> proj  --rows_to_heads->  head_proj   shift, QK norm, RoPE, gates, attention, output norm and gate
    o_proj  <---- y     <--heads_to_rows-- head_y

    proj         bf16 [rows, row stride] of all heads, the same on all ranks but for rounding
    head_proj    bf16 [rows, stride] of the rank's heads, its columns of proj (head_columns_of_pass)
    head_y       bf16 [rows, NH/N, dh]
    y            bf16 [rows, NH dh], the same bits on all ranks

Only y travels: each rank copies its head_y to all others through the group's peers (peers.cuh), on the main stream.
What all ranks must do alike follows from rank 0's results (llmc/inference/engine/lockstep.h), so it does not matter
that another rank may have chosen another GEMM kernel, which rounds differently. Messages are numbered: such passes
are not captured as graphs.

Called by llmc/inference/cuda. Each function of a pass returns at once where layer->heads is NULL.
*/
#pragma once

#include "sequence.cuh"

// The rank's heads of all layers of `layer`'s model, with copies of the weights that each head has of its own. Free
// with layer_heads_free.
static inline RankHeads* layer_heads_new(const Layer* layer) {
    const Config* c = layer->config;
    const RankHeads* shared = layer->heads;
    const int rank = shared->group.rank, ranks = shared->group.size;
    const int64_t L = c->num_hidden_layers, heads = shared->o.heads, dh = config_head_size(c);
    const int64_t row = dh * (int64_t)sizeof(bf16), number = sizeof(float);
    RankHeads* all = (RankHeads*)xcalloc((size_t)L, sizeof *all);
    bf16* weights = (bf16*)device_bytes((size_t)(3 * L * heads * row));
    float* biases = (float*)device_bytes((size_t)(L * heads * number));
    for (int64_t l = 0; l < L; l++) {
        RankHeads* h = &all[l];
        Layer of = *layer;
        of.l = l;
        h->group = shared->group;
        h->proj = head_columns_of_pass(layer->table, c, ranks);
        h->o = shared->o;
        h->exchange = shared->exchange;
        const bf16* const whole[] = {c->qk_norm_share ? NULL : layer_param(&of, of.weights, P_Q_NORM),
                                     c->qk_norm_share ? NULL : layer_param(&of, of.weights, P_K_NORM),
                                     layer_param(&of, of.weights, P_OUTPUT_NORM)};
        bf16** const own[] = {&h->norms[0], &h->norms[1], &h->output_norm};
        for (int k = 0; k < 3; k++, weights += heads * dh) {
            if (k < 2 || whole[k]) *own[k] = weights; // the first is what layer_heads_free frees
            if (whole[k])
                copy_rows(weights, row, whole[k] + rank * dh, ranks * row, row, heads, layer->stream);
        }
        const float* bias = layer_param_fp32(&of, P_FGATE_BIAS);
        h->bias = biases + l * heads;
        if (bias) copy_rows(h->bias, number, bias + rank, ranks * number, number, heads, layer->stream);
    }
    return all;
}

static inline void layer_heads_free(RankHeads* all) {
    if (!all) return;
    device_free(all[0].norms[0]);
    device_free(all[0].bias);
    free(all);
}

// head_proj gets the columns of the rank's heads; its padding becomes 0.
static inline void rows_to_heads(const Layer* layer, bf16* head_proj, const bf16* proj, int64_t row_stride) {
    if (!layer->heads) return;
    Range range("exchange of sequences", RANGE_FORWARD, layer->stream);
    const HeadRows rows = head_rows(&layer->heads->proj, row_stride, 1, layer->T);
    HeadBlocks to = {.own_stride = 0, .rank = layer->heads->group.rank};
    to.rows[to.rank] = head_proj;
    heads_split(&to, proj, &rows, layer->stream);
}

// y gets the rows of all ranks' heads.
static inline void heads_to_rows(const Layer* layer, bf16* y, const bf16* head_y) {
    if (!layer->heads) return;
    Range range("exchange of sequences", RANGE_FORWARD, layer->stream);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const HeadColumns* columns = &layer->heads->o;
    const HeadRows rows = head_rows(columns, (int64_t)columns->stride * g->size, 1, layer->T);
    const int64_t bytes = layer->T * head_columns_bytes(columns);
    const PeersMessage message = {head_y, 0, 1, bytes, bytes};
    peers_send(peers, &message, layer->stream);
    HeadBlocks from = {.own_stride = 0, .rank = g->rank};
    for (int r = 0; r < g->size; r++)
        from.rows[r] = r == g->rank ? (bf16*)(uintptr_t)head_y : (bf16*)peers_inbox(peers, g->rank, r);
    heads_join(y, &from, &rows, layer->stream);
    peers_read(peers, layer->stream);
}
