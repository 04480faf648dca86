/*
The tensors of a pass of the GPU trainer over [B,T] tokens: of attention, the MLP and the model around them.

Each table has a row a tensor (activations.h; its column `kept` is a Kept there). train_fox.cu computes with
the structs. The functions that add rows are plain C: the CPU trainer plans a GPU's memory with them
(llmc/plan/memory.h). Where ranks share sequences SEQUENCE_ACTS (llmc/sequence/acts.h) replaces
ATTENTION_ACTS.

Sizes: NH heads of dh channels, d = NH dh; KVH heads of keys and values, kd = KVH dh; MLP width I; row strides
S of the fused projection's output and Vs of logits.
*/
#pragma once

#include "activations.h"
#include "shapes.h"

// Rows of logits, of row stride Vs, in memory at once: those of all tokens would be more than all else for a
// large vocabulary. 544 MiB are 5,632 rows for V 50257: the gradient of lm_head's input, a GEMM whose K is
// Vs, then has 132 tiles of 128 x 256 where d is 768, one for each SM of an H100, and 264 where it is 1536.
static inline int64_t gpu_logit_rows(int64_t rows, int64_t Vs) {
    const int64_t fit = ((int64_t)272 << 20) / Vs / 128 * 128, most = fit > 128 ? fit : 128;
    return rows < most ? rows : most;
}

// clang-format off
// type, name, kept, elements of a layer
// per head, over whole sequences of T tokens
#define HEAD_ACTS(X) \
    X(bf16, q, UP_TO_FUSED, BT * d)                 /* [L,B,T,d] after shift, norm and RoPE, like k and v */ \
    X(bf16, k, UP_TO_FUSED, BT * kd)                      /* [L,B,T,kd] */ \
    X(bf16, v, UP_TO_FUSED, BT * kd)                      /* [L,B,T,kd] */ \
    X(float, q_rstd, UP_TO_QKV, BT * NH)                  /* [L,B,T,NH] */ \
    X(float, k_rstd, UP_TO_QKV, BT * KVH)                 /* [L,B,T,KVH] */ \
    X(double, cum_logf, gated ? UP_TO_QKV : SHARED, (gated | resets) * BT * NH) /* [L,B,NH,T] */ \
    X(int, first_key_block, SHARED, blocks)               /* [B,NH,blocks] as in AttentionBounds */ \
    X(int, last_query_block, SHARED, blocks)              /* [B,NH,blocks] */ \
    X(int, head_order, SHARED, (prunes | resets) * (B * NH + 1)) /* [B NH + 1] */ \
    X(float, squares, SHARED, 2 * prunes * NH * groups)  /* [2,NH,groups] norms of q and k, as in qkv.cuh */ \
    X(double, score_limits, UP_TO_QKV, prunes * B * NH)   /* [L,B NH] as in Pruning */ \
    X(PruningCount, pruning, KEPT_ALWAYS, prunes | resets) /* [L] of the step in progress */ \
    X(float, lse, UP_TO_QKV, BT * NH)                     /* [L,B,NH,T] */ \
    X(float, angles, SHARED, config_uses_rope(config) * T * dh) /* [T,dh/2,2] of RoPE */ \
    X(bf16, dq, SHARED, backward * BT * d)                /* [B,T,d] */ \
    X(bf16, dk, SHARED, backward * BT * kd)               /* [B,T,kd] */ \
    X(bf16, dv, SHARED, backward * BT * kd)               /* [B,T,kd] */ \
    X(float, dcum_logf, SHARED, backward * learns * BT * NH) /* [B,NH,T] */

// per token: in_proj, output norm and gate, o_proj. A new row needs its like in SEQUENCE_ACTS
// (llmc/sequence/acts.h).
#define ATTENTION_ACTS(X) \
    X(bf16, proj, UP_TO_QKV, BT * S)                      /* [L,B,T,S] q~ k~ v~ and all gates */ \
    X(bf16, o, UP_TO_QKV, BT * d)                         /* [L,B,T,d] output of attention */ \
    X(float, o_rstd, UP_TO_QKV, BT * NH)                  /* [L,B,T,NH] */ \
    X(bf16, y, UP_TO_NONE, gates_output * BT * d)         /* [L,B,T,d] after output norm and gate, if any */ \
    X(float, delta, SHARED, backward * gates_output * BT * NH) /* [B,NH,T] as in AttentionBackward */ \
    X(bf16, dproj, SHARED, backward * BT * S)             /* [B,T,S] */

#define MLP_ACTS(X) \
    X(bf16, gate_up, UP_TO_QKV, BT * 2 * I)               /* [L,B,T,2I] */ \
    X(bf16, act, UP_TO_NONE, BT * I)                      /* [L,B,T,I] */ \
    X(bf16, dgate_up, SHARED, backward * BT * 2 * I)      /* [B,T,2I] */ \
    X(bf16, dact, SHARED, backward * BT * I)              /* [B,T,I] */

#define MODEL_ACTS(X) \
    X(bf16, x, UP_TO_BLOCK, BT * d)                   /* [L,B,T,d] residual stream that enters each block */ \
    X(float, mixer_rstd, UP_TO_QKV, BT)                   /* [L,B,T] */ \
    X(bf16, mixer_in, UP_TO_NONE, BT * d)                 /* [L,B,T,d] normed x */ \
    X(bf16, x_mid, UP_TO_QKV, has_mlp * BT * d)        /* [L,B,T,d] residual stream between mixer and MLP */ \
    X(float, mlp_rstd, UP_TO_QKV, has_mlp * BT)           /* [L,B,T] */ \
    X(bf16, mlp_in, UP_TO_NONE, has_mlp * BT * d)         /* [L,B,T,d] normed x_mid */ \
    X(bf16, x_last, SHARED, BT * d)                       /* [B,T,d] residual stream after the last block */ \
    X(float, rstd, SHARED, BT)                            /* [B,T] of the final norm */ \
    X(bf16, lm_head_in, SHARED, BT * d)                   /* [B,T,d] normed x_last */ \
    X(float, losses, SHARED, BT)                          /* [B,T] */ \
    X(bf16, logits, SHARED, logit_rows * Vs)         /* [rows,Vs] of a chunk of rows, then their gradient */ \
    X(fp8, dlogits8, SHARED, in_fp8 * logit_rows * Vs)    /* [rows,Vs] of --fp8 */ \
    X(bf16, dx, SHARED, backward * BT * d)                /* [B,T,d] gradient of the residual stream */ \
    X(bf16, dbranch, SHARED, backward * BT * d)           /* [B,T,d] gradient of a norm's output */ \
    X(int32_t, inputs, SHARED, BT)                        /* [B,T] */ \
    X(int32_t, targets, SHARED, BT)                       /* [B,T] */ \
    X(int32_t, all_inputs, SHARED, (ranks > 1) * resets * ranks * BT) /* of whole sequences, as is */ \
    X(int32_t, doc_start, SHARED, resets * ranks * BT)    /* [B,T] */
// clang-format on

#ifdef __CUDACC__ // the CPU trainer's structs have the same names
typedef struct {
    HEAD_ACTS(ACTIVATION_FIELD)
} HeadActs;
typedef struct {
    ATTENTION_ACTS(ACTIVATION_FIELD)
} AttentionActs;
typedef struct {
    MLP_ACTS(ACTIVATION_FIELD)
} MlpActs;
typedef struct {
    MODEL_ACTS(ACTIVATION_FIELD)
} Acts;
#endif

// Shape of all heads over [B,T] tokens, in a layer whose fused projection has R rows
static inline HeadShape gpu_head_shape(const Config* config, int64_t R, int64_t B, int64_t T) {
    const int64_t dh = config_head_size(config);
    const HeadShape s = {.B = B,
                         .T = T,
                         .NH = config->num_heads,
                         .dh = dh,
                         .columns = R,
                         .row_stride = matmul_padded(R),
                         .weight_stride = config->qk_norm_share ? 0 : dh,
                         .window = config->window_size,
                         .KVH = config->num_kv_heads};
    return s;
}

static inline void gpu_head_activations(Activations* rows, const Config* config, const HeadShape* s,
                                        Recompute recompute) {
    const int64_t B = s->B, T = s->T, NH = s->NH, dh = s->dh, BT = B * T, d = NH * dh;
    const int64_t KVH = key_heads(s), kd = KVH * dh;
    const int64_t gated = config_has_gate(config), prunes = config_prunes(config),
                  resets = config->document_reset;
    const int64_t blocks = (prunes | resets) * B * NH * head_blocks(s), groups = head_norm_groups(s);
    const int64_t learns = gated && config->fgate_type != GATE_FIXED, backward = recompute != FORWARD_ONLY;
    HEAD_ACTS(KEPT_ROW)
}

static inline void gpu_attention_activations(Activations* rows, const Config* config, const HeadShape* s,
                                             Recompute recompute) {
    const int64_t BT = s->B * s->T, NH = s->NH, d = config->hidden_size, S = s->row_stride;
    const int64_t gates_output = config->use_output_norm || config->use_output_gate;
    const int64_t backward = recompute != FORWARD_ONLY;
    gpu_head_activations(rows, config, s, recompute);
    ATTENTION_ACTS(KEPT_ROW)
}

// Adds the tables of the MLP and the model to a pass of `ranks` ranks that share sequences.
static inline void gpu_pass_activations(Pass* pass, const Config* config, int64_t ranks, bool with_fp8,
                                        Recompute recompute) {
    const int64_t BT = pass->B * pass->T, d = config->hidden_size, I = config_mlp_size(config);
    const int64_t Vs = matmul_padded(config->vocab_size), logit_rows = gpu_logit_rows(BT, Vs);
    const int64_t has_mlp = I > 0, resets = config->document_reset;
    const int64_t backward = recompute != FORWARD_ONLY, in_fp8 = with_fp8 ? backward : 0;
    Activations* rows = &pass->tables[PASS_MODEL];
    MODEL_ACTS(KEPT_ROW)
    rows = &pass->tables[PASS_MLP];
    MLP_ACTS(KEPT_ROW)
    pass->layers[PASS_MODEL] = pass->layers[PASS_MLP] = config->num_hidden_layers;
}

#undef HEAD_ACTS
#undef ATTENTION_ACTS
#undef MLP_ACTS
#undef MODEL_ACTS
