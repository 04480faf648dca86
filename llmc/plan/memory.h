/*
Memory of the GPU trainer, in bytes, by part. train_fox.cu plans with the functions of weights, optimizer and
overhead; the memory of its passes is the sum over its own tables of activations. gpu_pass_bytes estimates
that for the CPU trainer, whose --dry-run --gpu has no CUDA code: dev/test/check_without_gpu.sh compares the
two.
*/
#pragma once

#include "../model/activations.h"
#include "../model/shapes.h"
#include "../model/shard.h"
#include "../sequence/split.h"

// Elements of the flat buffers of weights and gradients. Padding follows the last tensor, lm_head: its GEMMs
// read and write Vs >= V rows. Where it is tied to the embedding, the table has that padding.
static inline int64_t gpu_weights_count(const Config* c, const ParamTable* table) {
    if (c->tie_word_embeddings) return table->count;
    return table->count + (matmul_padded(c->vocab_size) - c->vocab_size) * c->hidden_size;
}

// Bytes of bf16 weights and, with `train`, fp32 gradients, the same on every rank.
static inline int64_t gpu_weights_bytes(const Config* c, const ParamTable* table, bool train) {
    return gpu_weights_count(c, table) * (2 + (train ? 4 : 0));
}

// Bytes of a rank's fp32 masters and both moments.
static inline int64_t gpu_shard_bytes(const Shard* shard) { return 3 * 4 * shard_count(shard); }

// Bytes of the workspaces of the GEMMs of both streams.
#define GPU_WORKSPACE_BYTES ((int64_t)64 << 20)

// Left free.
#define GPU_SPARE_BYTES ((int64_t)256 << 20)

// Bytes that the driver, loaded kernels, cuBLAS and NCCL take, measured on H200s with a third of the 25 MiB
// of partial sums of norms' gradients, and the inboxes for other GPUs' gradients.
static inline int64_t gpu_overhead_bytes(const Shard* shard) {
    if (shard->size == 1) return (int64_t)530 << 20;
    return ((int64_t)1452 << 20) + (shard->size - 1) * shard_largest_part(shard) * 4;
}

// Rows of logits, of row stride Vs, in memory at once: those of all tokens would be more than all else for a
// large vocabulary. 544 MiB are 5,632 rows for V 50257: the gradient of lm_head's input, a GEMM whose K is
// Vs, then has 132 tiles of 128 x 256 where d is 768, one for each SM of an H100, and 264 where it is 1536.
static inline int64_t gpu_logit_rows(int64_t rows, int64_t Vs) {
    const int64_t fit = ((int64_t)272 << 20) / Vs / 128 * 128, most = fit > 128 ? fit : 128;
    return rows < most ? rows : most;
}

// Memory of one of `ranks` GPUs for the exchange of B shared sequences, T tokens of each its own: inboxes,
// and rank-major copies of a layer's attention weights with their gradients (llmc/sequence/rank_major.cuh).
static inline int64_t gpu_exchange_bytes(const Config* c, const ParamTable* table, int64_t B, int64_t T,
                                         int ranks) {
    if (ranks == 1) return 0;
    return (ranks - 1) * sequence_message_bytes(B, T) +
           6 * (matmul_padded(table->by_layer[0].proj.rows) + c->hidden_size) * c->hidden_size;
}

// Cosines and sines of RoPE, of T positions.
static inline int64_t gpu_angles_bytes(const Config* c, int64_t T) {
    return config_uses_rope(c) ? T * config_head_size(c) * 4 : 0;
}

// What a pass over [B,T] tokens has beside that where `ranks` GPUs share a sequence: proj of its heads, the
// gradient of that, o, delta, the rows of a halo, and the exchange's own memory.
static inline int64_t gpu_sequence_bytes(const Config* c, const ParamTable* table, int64_t B, int64_t T,
                                         int ranks, Recompute recompute) {
    if (ranks == 1) return 0;
    const HeadColumns proj = head_columns_of_proj(table, c, ranks);
    const int64_t L = recompute == RECOMPUTE_BLOCK ? 1 : c->num_hidden_layers, BT = B * T;
    const int64_t gates_output = c->use_output_norm || c->use_output_gate;
    const int64_t row = 2 * (int64_t)proj.stride * ranks;
    const int64_t halo = sequence_may_halo(c) ? sequence_halo(B, T) : 0; // rows of proj, q, k, v, o and y
    const int64_t halo_row = 2 * (matmul_padded(table->by_layer[0].proj.rows) + 5 * c->hidden_size);
    return halo * (L + 1) * halo_row +
           BT * ((L + 1) * row + 2 * c->hidden_size + (gates_output ? 4 : 8) * c->num_heads) +
           gpu_exchange_bytes(c, table, B, T, ranks) + (ranks - 1) * gpu_angles_bytes(c, T);
}

// Bytes of activations and scratch of a training pass over [B,T] tokens, with attention; other mixers have
// tables of their own, which are not known here. Tensors of B NH T / 128 elements and less are left out.
static inline int64_t gpu_pass_bytes(const Config* c, const ParamTable* table, int64_t B, int64_t T,
                                     Recompute recompute) {
    const int64_t BT = B * T, d = c->hidden_size, NH = c->num_heads, I = config_mlp_size(c);
    const int64_t KVH = config_key_heads(c), kd = KVH * config_head_size(c);
    const int64_t L = c->num_hidden_layers, S = matmul_padded(table->by_layer[0].proj.rows),
                  Vs = matmul_padded(c->vocab_size);
    const int64_t gated = config_has_gate(c), learns = gated && c->fgate_type != GATE_FIXED;
    const int64_t gates_output = c->use_output_norm || c->use_output_gate;
    // Bytes a token in one layer: the block's input; q, k and v; outputs of norms, gates and SwiGLU; what
    // else the backward pass reads (proj, o, x_mid, gate_up; norms' statistics, lse and gates); what it
    // writes
    const int64_t x = 2 * d, qkv = 2 * d + 4 * kd, outputs = 4 * d + 2 * I + gates_output * 2 * d;
    const int64_t inner = 2 * S + 4 * d + 4 * I + 12 * NH + 4 * KVH + 8 * gated * NH + 8;
    const int64_t norms = config_prunes(c) * 2 * NH; // of q and k, every 4 tokens
    const int64_t shared =
        2 * S + 10 * d + 4 * kd + 6 * I + 4 * learns * NH + gates_output * 4 * NH + norms + 16;
    const int64_t layers = x * L + inner * (recompute == RECOMPUTE_BLOCK ? 1 : L) +
                           qkv * (recompute <= RECOMPUTE_FUSED ? L : 1) +
                           outputs * (recompute == RECOMPUTE_NONE ? L : 1);
    // scratch of attention's backward pass, or of the embedding's
    const int64_t groups = NH > KVH ? BT * 4 * d : 0; // dk and dv of each query head
    const int64_t dq = BT * 4 * (d + 2 * NH) + groups,
                  sorted = BT * 16 + (BT < 16384 ? (BT + 15) / 16 : 1024) * 8 * d;
    return BT * (layers + shared) + gpu_logit_rows(BT, Vs) * Vs * 2 + gpu_angles_bytes(c, T) +
           (dq > sorted ? dq : sorted);
}
