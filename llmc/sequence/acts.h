/*
The tensors of attention where N ranks share sequences (mixer.cuh), as llmc/model/gpu_acts.h has those of one
rank. Plain C, for the plan of a GPU's memory too (llmc/plan/memory.h).
*/
#pragma once

#include "../model/gpu_acts.h"
#include "split.h"

// clang-format off
// type, name, kept, elements of a layer; BT: B T/N, the rank's tokens; HS: the stride of HeadColumns; HT: BT
// behind the tokens of the pass's halo, if it may have one (halo.cuh); span: those of HT that the rank has
#define SEQUENCE_ACTS(X) \
    X(bf16, proj, UP_TO_QKV, HT * S)                 /* [L,HT,S] q~ k~ v~ and all gates */ \
    X(bf16, head_proj, UP_TO_QKV, ranks * BT * HS)   /* [L,B,T,HS] its columns of the rank's heads */ \
    X(bf16, o, UP_TO_QKV, HT * d)                    /* [L,HT,d] output of attention */ \
    X(bf16, head_o, SHARED, HT * d)                  /* [B,T,d/N] o, then its gradient, or [span,d] that */ \
    X(float, o_rstd, UP_TO_QKV, HT * NH)             /* [L,HT,NH] */ \
    X(bf16, y, UP_TO_NONE, gates_output * HT * d)    /* [L,HT,d] after output norm and gate, if any */ \
    X(float, delta, SHARED, backward * HT * NH)     /* [B,NH,T/N] or [NH,span] as in AttentionBackward */ \
    X(float, head_delta, SHARED, backward * BT * NH)            /* [B,NH/N,T] */ \
    X(bf16, dproj, SHARED, backward * HT * S)                   /* [HT,S] */ \
    X(bf16, head_dproj, SHARED, backward * ranks * BT * HS)     /* [B,T,HS] */ \
    X(bf16, dproj_halo, SHARED, backward * halo * S) /* [halo,S] of the own last tokens, from the rank behind */
// clang-format on

typedef struct {
    SEQUENCE_ACTS(ACTIVATION_FIELD)
} SequenceActs;

// Shape of the rank's heads over whole sequences, with head_proj's rows. tokens: all heads over its tokens
static inline HeadShape sequence_head_shape(const HeadShape* tokens, const HeadColumns* proj) {
    HeadShape shape = *tokens;
    shape.T *= proj->ranks;
    shape.NH = proj->heads * proj->queries;
    if (shape.KVH) shape.KVH = proj->heads;
    shape.columns = proj->columns;
    shape.row_stride = proj->stride;
    return shape;
}

// halo: tokens of the longest one, with which tensors are as large as they get
static inline void sequence_add_activations(Activations* rows, const Config* config, const HeadShape* tokens,
                                            const HeadColumns* proj, int64_t halo, Recompute recompute) {
    const int64_t BT = tokens->B * tokens->T, NH = tokens->NH, d = config->hidden_size,
                  S = tokens->row_stride;
    const int64_t ranks = proj->ranks, HS = proj->stride, HT = halo + BT;
    const int64_t gates_output = config->use_output_norm || config->use_output_gate;
    const int64_t backward = recompute != FORWARD_ONLY;
    const HeadShape heads = sequence_head_shape(tokens, proj);
    HeadShape span = *tokens;
    Activations of_span = *rows;
    span.T += halo;
    gpu_head_activations(rows, config, &heads, recompute);
    gpu_head_activations(&of_span, config, &span, recompute);
    for (int i = 0; i < rows->count && halo; i++)
        if (rows->rows[i].bytes < of_span.rows[i].bytes) rows->rows[i].bytes = of_span.rows[i].bytes;
    SEQUENCE_ACTS(KEPT_ROW)
}

#undef SEQUENCE_ACTS
