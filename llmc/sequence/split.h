/*
How N ranks split a sequence (--sequence-ranks N). Rank n of a group has

    token by token    tokens n T/N .. (n+1) T/N - 1 of each sequence: embedding, norms, projections, MLP, loss
    attention         NH/N heads over all T tokens: shift, QK norm, RoPE, gate, scores

Heads move as key heads, each with the NH / KVH query heads that read it: "head" below is a key head with
these, one query head where every query head has keys of its own. By default a rank's heads are n, n + N, n +
2N, ...: neighbours in index, whose gates often forget alike, are on different ranks. In training each layer
may have a table that assigns heads by the work that pruning left them in the step before
(sequence_assign_heads, assignment.cuh).

Between the two parts are exchanges: a rank sends each other rank of its group the columns of the other's
heads for its own tokens, or the columns of its own heads for the other's tokens. HeadColumns describes such
rows:

    row of proj, NH = 4                | q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 | output gate | f0 f1 f2 f3 |
    its columns for heads 1 and 3      | q1 q3 | k1 k3 | v1 v3 | f1 f3 | padding |          rank 1 of 2
    rank-major row of proj             | q0 q2 k0 k2 v0 v2 | q1 q3 k1 k3 v1 v3 | output gate of 0 2 1 3 | f0 f2 f1 f3 |

q, k, v, o and dproj are exchanged in chunks of a rank's tokens: while one chunk is copied, the next is
computed, or the one before is used.

A layer needs no exchange of heads if every head forgets within a few hundred tokens. A rank then computes
attention, too, for its own tokens with all heads. It needs the last tokens of the previous rank: the halo
(halo.cuh).

Called by the other files of this room, and by the plan of a GPU's memory (llmc/plan/memory.h). Nothing here
fails, but by assertion.
*/
#pragma once

#include "../model/sequence.h"

#ifdef __CUDACC__
#define SEQUENCE_FUNCTION __host__ __device__ static inline
#else
#define SEQUENCE_FUNCTION static inline
#endif

// ----------------------------------------------------------------------------
// heads of a rank

// The i-th head of rank `rank` of `ranks`, without a table.
SEQUENCE_FUNCTION int64_t sequence_head(int rank, int ranks, int64_t i) { return i * ranks + rank; }

// The i-th head of a rank by a layer's row of the table, assignment [ranks, heads]; NULL: no table.
SEQUENCE_FUNCTION int64_t sequence_assigned_head(const int* assignment, int rank, int ranks, int heads,
                                                 int i) {
    return assignment ? assignment[rank * heads + i] : sequence_head(rank, ranks, i);
}

// Assigns a layer's heads for the next step by their work in this one, work [ranks * heads]. Heads with most
// work come first; each goes to the rank with the least sum so far that has fewer than `heads` heads. Ties go
// to the lowest head and rank, so that all ranks compute the same row. A rank's heads are in rising order. If
// no head has work the row stays. One thread reads `work` (ranks heads)^2 times: meant for up to some hundred
// heads.
SEQUENCE_FUNCTION void sequence_assign_heads(int* assignment, const unsigned long long* work, int ranks,
                                             int heads) {
    unsigned long long sums[SEQUENCE_MAX_RANKS] = {0};
    int filled[SEQUENCE_MAX_RANKS] = {0}, head = -1;
    bool worked = false;
    for (int h = 0; h < ranks * heads; h++) worked = worked || work[h] > 0;
    for (int n = 0; worked && n < ranks * heads; n++) {
        int next = -1, rank = -1;
        for (int h = 0; h < ranks * heads; h++) {
            const bool behind = head < 0 || work[h] < work[head] || (work[h] == work[head] && h > head);
            if (behind && (next < 0 || work[h] > work[next])) next = h;
        }
        for (int r = 0; r < ranks; r++)
            if (filled[r] < heads && (rank < 0 || sums[r] < sums[rank])) rank = r;
        int *row = assignment + rank * heads, at = filled[rank]++;
        for (; at > 0 && row[at - 1] > next; at--) row[at] = row[at - 1];
        row[at] = next;
        sums[rank] += work[next];
        head = next;
    }
}

// ----------------------------------------------------------------------------
// chunks of a rank's tokens

// More, or smaller, chunks slow GEMMs and copies down by more than their overlap saves.
enum { SEQUENCE_CHUNKS = 4, SEQUENCE_CHUNK_TOKENS = 16384, SEQUENCE_CHUNK_ALIGN = 16 };

typedef struct {
    int64_t first, tokens; // of each sequence of the rank
} SequenceChunk;

// Number of chunks of an exchange of `tokens` tokens of each of B sequences; 1 for B > 1, whose chunks would
// not be contiguous.
static inline int sequence_chunks(int64_t B, int64_t tokens) {
    const int64_t chunks = tokens / SEQUENCE_CHUNK_TOKENS;
    if (B > 1 || chunks < 1) return 1;
    return chunks < SEQUENCE_CHUNKS ? (int)chunks : SEQUENCE_CHUNKS;
}

// Chunk i of them. Chunks begin at multiples of SEQUENCE_CHUNK_ALIGN tokens, as GEMMs in FP8 need.
static inline SequenceChunk sequence_chunk(int64_t tokens, int chunks, int i) {
    const int64_t align = SEQUENCE_CHUNK_ALIGN, first = tokens * i / chunks / align * align,
                  next = i + 1 < chunks ? tokens * (i + 1) / chunks / align * align : tokens;
    const SequenceChunk chunk = {first, next - first};
    return chunk;
}

// ----------------------------------------------------------------------------
// halos

// A longer halo suffices for slower gates, but attention covers as many more tokens.
enum { SEQUENCE_HALO_ALIGN = 128, SEQUENCE_HALO_MOST = 1024, SEQUENCE_HALO_LEAST_TOKENS = 8192 };

// Tokens of a halo of `tokens` tokens of each of B sequences; 0: such a pass has none. Its rows come before
// the rank's own, so it is for one sequence alone.
static inline int64_t sequence_halo(int64_t B, int64_t tokens) {
    const int64_t align = SEQUENCE_HALO_ALIGN, most = SEQUENCE_HALO_MOST, halo = tokens / 256 / align * align;
    if (B > 1 || tokens % align != 0 || tokens < SEQUENCE_HALO_LEAST_TOKENS) return 0;
    return halo < align ? align : halo < most ? halo : most;
}

// The span of a rank: its halo, then its own tokens
typedef struct {
    int64_t halo;   // tokens of the halo; rank 0 has none
    int64_t before; // tokens of the sequence before the span
} SequenceSpan;

static inline SequenceSpan sequence_span(const SequenceGroup* g, int64_t tokens, int64_t halo) {
    const SequenceSpan span = {g->rank > 0 ? halo : 0, g->rank > 0 ? g->rank * tokens - halo : 0};
    return span;
}

// Whether a layer has halos, by the answers of all ranks of the group.
static inline bool sequence_halos_suffice(const int32_t* answers, int ranks) {
    bool all = true;
    for (int r = 0; r < ranks; r++) all = all && answers[r];
    return all;
}

// Whether layers of the model may have halos: their gates forget, the length of q and k is bounded by weights,
// a key depends on its own token and the one before alone, and no layer has a window. All layers or none: the
// tensors of each are as long as the first layer's.
static inline bool sequence_may_halo(const Config* c) {
    return config_prunes(c) && c->qk_norm && c->pruning_rule != PRUNING_ACP && !c->document_reset &&
           !config_has_window(c);
}

// ----------------------------------------------------------------------------
// columns of the heads of a rank

enum { HEAD_COLUMNS_PARTS = 6, HEAD_COLUMNS_ALIGN = 8 };

// A part is a tensor's columns, `width` a head: they begin at `column` in a row of all heads, at `local` in a
// row of a rank's heads.
typedef struct {
    int ranks, heads; // N; heads of a rank
    int queries;      // NH / KVH, query heads of a head
    bool rank_major;  // a row of all heads has rank 0's heads first, then rank 1's, ...
    int parts;
    struct {
        int column, width, local;
    } part[HEAD_COLUMNS_PARTS];
    int columns, stride; // of a rank's row: columns in use; elements from a row to the next, aligned
    int wide;            // columns of a rank's row that have channels, q, k, v and o, which come first
} HeadColumns;

static inline HeadColumns head_columns_new(const Config* c, int ranks) {
    const int heads = (int)config_key_heads(c);
    HeadColumns h = {.ranks = ranks, .heads = heads / ranks, .queries = (int)c->num_heads / heads};
    return h;
}

static inline void head_columns_add(HeadColumns* h, int64_t column, int64_t width) {
    if (column < 0) return; // the model has no such tensor
    assert(h->parts < HEAD_COLUMNS_PARTS);
    h->part[h->parts].column = (int)column;
    h->part[h->parts].width = (int)width;
    h->part[h->parts++].local = h->columns;
    h->columns += h->heads * (int)width;
    h->stride = (h->columns + HEAD_COLUMNS_ALIGN - 1) / HEAD_COLUMNS_ALIGN * HEAD_COLUMNS_ALIGN;
}

// Columns of the fused projection that attention reads. The output gate's are not exchanged.
static inline HeadColumns head_columns_of_proj(const ParamTable* table, const Config* c, int ranks) {
    HeadColumns h = head_columns_new(c, ranks);
    const int64_t dh = config_head_size(c);
    head_columns_add(&h, params_column(table, P_Q_PROJ, 0), h.queries * dh);
    head_columns_add(&h, params_column(table, P_K_PROJ, 0), dh);
    head_columns_add(&h, params_column(table, P_V_PROJ, 0), dh);
    h.wide = h.columns;
    head_columns_add(&h, params_column(table, P_K_SHIFT, 0), 1);
    head_columns_add(&h, params_column(table, P_V_SHIFT, 0), 1);
    head_columns_add(&h, params_column(table, P_FGATE_PROJ, 0), h.queries);
    return h;
}

// Columns of o and of its gradient, whose rows are NH heads of dh channels
static inline HeadColumns head_columns_of_o(const Config* c, int ranks) {
    HeadColumns h = head_columns_new(c, ranks);
    head_columns_add(&h, 0, h.queries * config_head_size(c));
    h.wide = h.columns;
    return h;
}

// The gates' logits, in rank-major rows
static inline HeadColumns head_columns_narrow(const HeadColumns* all) {
    HeadColumns h = *all;
    h.rank_major = true;
    h.parts = 0;
    for (int p = 0; p < all->parts; p++)
        if (all->part[p].local >= all->wide) h.part[h.parts++] = all->part[p];
    return h;
}

// Column, in a row of all heads, of column `local` of rank `rank`'s row; -1: padding. assignment: the layer's
// row of the table, or NULL.
SEQUENCE_FUNCTION int head_columns_whole(const HeadColumns* h, const int* assignment, int rank, int local) {
    for (int p = h->parts - 1; p >= 0 && local < h->columns; p--) {
        const int width = h->part[p].width, at = local - h->part[p].local;
        if (at < 0) continue;
        const int head = h->rank_major
                             ? rank * h->heads + at / width
                             : (int)sequence_assigned_head(assignment, rank, h->ranks, h->heads, at / width);
        return h->part[p].column + head * width + at % width;
    }
    return -1;
}

// Column, in a rank's row, of the tensor that begins at `column` in a row of all heads; -1: it is none of the
// parts.
static inline int64_t head_columns_local(const HeadColumns* h, int64_t column) {
    for (int p = 0; p < h->parts; p++)
        if (h->part[p].column == column) return h->part[p].local;
    return -1;
}

// Size of the largest message that needs a staging buffer: the losses of a rank's `tokens` of each of B
// sequences.
static inline int64_t sequence_message_bytes(int64_t B, int64_t tokens) {
    return (4 * B * tokens + 255) / 256 * 256;
}
