/*
Memory of the GPU trainer, in bytes, by part: train_fox.cu plans with these functions. Its passes are the sum
over the tables of its mixers; gpu_pass_bytes is that of attention, for the CPU trainer, whose --dry-run --gpu
has no CUDA code: dev/test/check_without_gpu.sh compares the two.
*/
#pragma once

#include "../model/fp8.h"
#include "../model/shard.h"
#include "../sequence/acts.h"

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

// Memory of one of `ranks` GPUs for the exchange of B shared sequences, T tokens of each its own: inboxes,
// and rank-major copies of a layer's attention weights with their gradients (llmc/sequence/rank_major.cuh).
static inline int64_t gpu_exchange_bytes(const Config* c, const ParamTable* table, int64_t B, int64_t T,
                                         int ranks) {
    if (ranks == 1) return 0;
    return (ranks - 1) * sequence_message_bytes(B, T) +
           6 * (matmul_padded(table->by_layer[0].proj.rows) + c->hidden_size) * c->hidden_size;
}

// Bytes of activations and scratch of a training pass over [B,T] tokens, T of a sequence on each of `ranks`
// GPUs that share it, of a model whose mixer is attention: model_planned_bytes of train_fox.cu without a GPU.
static inline int64_t gpu_pass_bytes(const Config* c, const ParamTable* table, int64_t B, int64_t T,
                                     int ranks, bool with_fp8, Recompute recompute) {
    const int64_t L = c->num_hidden_layers;
    const int64_t halo = ranks > 1 && sequence_may_halo(c) ? sequence_halo(B, T) : 0;
    const HeadColumns proj = head_columns_of_proj(table, c, ranks);
    HeadShape shape = gpu_head_shape(c, table->by_layer[0].proj.rows, B, T);
    Pass pass = {.B = B, .T = T};
    if (ranks > 1)
        sequence_add_activations(&pass.tables[PASS_MIXER], c, &shape, &proj, halo, recompute);
    else
        gpu_attention_activations(&pass.tables[PASS_MIXER], c, &shape, recompute);
    pass.layers[PASS_MIXER] = L;
    gpu_pass_activations(&pass, c, ranks, with_fp8, recompute);
    shape.T += halo;
    return pass_bytes(&pass, L) + (int64_t)attention_scratch_of(&shape, true) +
           (with_fp8 ? fp8_pass_bytes(c, table, B * T) : 0) + gpu_exchange_bytes(c, table, B, T, ranks);
}
