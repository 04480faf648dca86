/*
Inference over GPUs that share the heads of each sequence (--requests and --generate with --sequence-ranks): a rank has
keys, values and attention of its own heads alone. All else is computed row by row:

    few rows     every rank computes all rows of the pass
    many rows    rank n computes rows n Rn .. (n + 1) Rn - 1, where Rn = ceil(R / N): those behind the pass's R rows hold
                 no numbers, and nothing reads them (pass_rows)

    in_proj ----> proj  --rows_to_heads->  head_proj   shift, QK norm, RoPE, gates, attention, output norm and gate
    o_proj  <---- y     <--heads_to_rows-- head_y
    x of all rows     <------all_rows----- x of the rank's    for the rows with outputs

    proj         bf16 [R or Rn, row stride] of all heads
    head_proj    bf16 [R or N Rn, stride] of the rank's heads, its columns of proj (head_columns_of_pass)
    head_blocks  as head_proj: scratch of what is sent
    head_y       bf16 [R or N Rn, NH/N, dh]
    y            bf16 [R or Rn, NH dh]

Rows travel through the group's peers (peers.cuh), on the main stream. What all ranks must do alike follows from rank 0's
results (llmc/serve/lockstep.h), so it does not matter that another rank may have chosen another GEMM kernel,
which rounds differently. Messages are numbered: such passes are not captured as graphs.

Called by llmc/inference/cuda, with layer->T the rows that the rank computes and rows the pass's. Each function of a pass
returns at once where layer->heads is NULL.
*/
#pragma once

#include "sequence.cuh"

// The rank's heads of all layers of `layer`'s model, those of sequence_head, with copies of the weights that each head
// has of its own. Free with layer_heads_free.
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

// ----------------------------------------------------------------------------
// a pass

enum { PASS_LEAST_ROWS = 128 }; // of a rank, where ranks divide the rows of a pass

// Rows of a pass of `rows` that a rank computes; the first one.
static inline int64_t pass_rows(const RankHeads* heads, int64_t rows) {
    const bool divided = heads && rows >= PASS_LEAST_ROWS * heads->group.size;
    return divided ? ceil_div<int64_t>(rows, heads->group.size) : rows;
}
static inline int64_t pass_first_row(const RankHeads* heads, int64_t rows) {
    return pass_rows(heads, rows) < rows ? heads->group.rank * pass_rows(heads, rows) : 0;
}

// head_proj gets the columns of the rank's heads, of all rows; its padding becomes 0.
static inline void rows_to_heads(const Layer* layer, bf16* head_proj, bf16* head_blocks, const bf16* proj,
                                 int64_t row_stride, int64_t rows) {
    if (!layer->heads) return;
    Range range("exchange of sequences", RANGE_FORWARD, layer->stream);
    const SequenceGroup* g = &layer->heads->group;
    const HeadColumns* columns = &layer->heads->proj;
    Peers* peers = &layer->heads->exchange->peers;
    const bool divided = layer->T < rows;
    const HeadRows shape = head_rows(columns, row_stride, 1, layer->T);
    const int64_t row = layer->T * columns->stride, bytes = row * (int64_t)sizeof(bf16);
    HeadBlocks to = {};
    for (int r = 0; r < g->size; r++)
        if (divided || r == g->rank)
            to.of[r] = {divided && r != g->rank ? head_blocks + r * row : head_proj + (divided ? r * row : 0),
                        (bf16*)(uintptr_t)proj, r};
    heads_split(&to, &shape, layer->stream);
    if (!divided) return;
    const PeersMessage message = {head_blocks, bytes, bytes};
    peers_send(peers, &message, layer->stream);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank)
            copy_rows(head_proj + r * row, bytes, peers_inbox(peers, g->rank, r), bytes, bytes, 1,
                      layer->stream);
    peers_read(peers, layer->stream);
}

// y gets the rank's rows, of all heads.
static inline void heads_to_rows(const Layer* layer, bf16* y, const bf16* head_y, int64_t rows) {
    if (!layer->heads) return;
    Range range("exchange of sequences", RANGE_FORWARD, layer->stream);
    const SequenceGroup* g = &layer->heads->group;
    const HeadColumns* columns = &layer->heads->o;
    Peers* peers = &layer->heads->exchange->peers;
    const bool divided = layer->T < rows;
    const HeadRows shape = head_rows(columns, (int64_t)columns->stride * g->size, 1, layer->T);
    const int64_t row = layer->T * columns->stride, bytes = row * (int64_t)sizeof(bf16);
    const PeersMessage message = {head_y, divided ? bytes : 0, bytes};
    peers_send(peers, &message, layer->stream);
    HeadBlocks from = {};
    for (int r = 0; r < g->size; r++)
        from.of[r] = {r == g->rank ? (bf16*)(uintptr_t)head_y + (divided ? r * row : 0)
                                   : (bf16*)peers_inbox(peers, g->rank, r),
                      y, r};
    heads_join(&from, &shape, layer->stream);
    peers_read(peers, layer->stream);
}

// all [N Rn, d] gets the rows of all ranks, x [Rn, d] being the rank's. layer->T is Rn.
static inline void all_rows(const Layer* layer, bf16* all, const bf16* x) {
    Range range("exchange of sequences", RANGE_FORWARD, layer->stream);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const int64_t row = layer->T * layer->config->hidden_size, bytes = row * (int64_t)sizeof(bf16);
    const PeersMessage message = {x, 0, bytes};
    peers_send(peers, &message, layer->stream);
    for (int r = 0; r < g->size; r++)
        copy_rows(all + r * row, bytes, r == g->rank ? (const void*)x : peers_inbox(peers, g->rank, r), bytes,
                  bytes, 1, layer->stream);
    peers_read(peers, layer->stream);
}
