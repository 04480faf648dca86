/*
The attention mixer of sequences that N ranks share (--sequence-ranks N). It computes what train_fox.cu's
attention does, in three parts with the exchange (sequence.cuh) between them:

    tokens      T/N tokens of the rank, all NH heads    in_proj; output norm, output gate, o_proj
    heads       all T tokens, NH/N heads of the rank    shift, QK norm, RoPE, gate, attention, by the trainer's own
                                                        functions (AttentionFunctions)

    forward     in_proj -> exchange -> heads -> exchange -> output norm, gate, o_proj
    backward    the same from right to left, with the gradients of o and proj

or, in a layer whose gates forget quickly (halo.cuh), as one rank does it alone, all heads of the rank's tokens
behind a halo of the rank before:

    forward     in_proj -> halo -> heads -> output norm, gate, o_proj

Weights of the tokens' parts are rank-major copies, weights of the heads' part copies of the rank's heads
(rank_major.cuh). Passes are not captured as CUDA graphs, because messages are numbered. Sums of norms'
gradients are on the main stream, where rank_major_gradients reads them.

Called through the Mixer that the trainer builds from these functions. An error of CUDA ends the program.
*/
#pragma once

#include "../attention/attention.cuh"
#include "acts.h"
#include "halo.cuh"

// The rank's heads and their weights, for the heads' part
static inline AttentionHeads sequence_heads(const Layer* layer) {
    const RankHeads* h = rank_heads(layer);
    AttentionHeads heads = attention_heads(layer);
    heads.shape = sequence_head_shape(&heads.shape, &h->proj);
    for (HeadPath& path : heads.paths) {
        path.column = head_columns_local(&h->proj, path.column);
        if (path.shift >= 0) path.shift = head_columns_local(&h->proj, path.shift);
    }
    for (int p = 0; p < 2 && layer->config->qk_norm && !layer->config->qk_norm_share; p++) {
        heads.paths[p].weight = h->norms[p];
        heads.paths[p].dweight = h->dnorms[p];
    }
    if (heads.gate >= 0) heads.gate = head_columns_local(&h->proj, heads.gate);
    if (heads.gate_bias) heads.gate_bias = h->bias;
    if (heads.gate_dbias) heads.gate_dbias = h->dbias;
    heads.kept = head_kept(layer);
    heads.dqkv8 = {}; // dproj has all of a token's heads: heads_to_in_proj converts it
    heads.gate_stream = NULL;
    return heads;
}

static inline void sequence_activations(Activations* rows, const Layer* layer, Recompute recompute) {
    const HeadShape tokens = attention_shape_of(layer);
    sequence_add_activations(rows, layer->config, &tokens, &rank_heads(layer)->proj, layer_halo(layer),
                             recompute);
}

static inline size_t sequence_scratch_bytes(const Layer* layer) {
    Layer span = *layer;
    span.T += layer_halo(layer);
    return sequence_of(layer)->attention->scratch_bytes(&span);
}

static inline SequenceActs sequence_tensors(const Layer* layer) {
    SequenceActs a;
    activations_last(layer->mixer, layer->number, &a, sizeof a);
    return a;
}

// The same from the rank's own tokens on, which are behind those of a halo; delta is [NH, span], and begins
// with the halo.
static inline SequenceActs sequence_acts(const Layer* layer) {
    SequenceActs a = sequence_tensors(layer);
    const HeadShape s = attention_shape_of(layer);
    const int64_t halo = layer_halo(layer), d = s.NH * s.dh;
    a.proj += halo * s.row_stride;
    a.o += halo * d;
    a.o_rstd += halo * s.NH;
    if (a.y) a.y += halo * d;
    if (a.dproj) a.dproj += halo * s.row_stride;
    return a;
}

// Collective, called for layer 0 after allocation.
static inline void sequence_init(const Layer* layer) {
    const SequenceActs a = sequence_tensors(layer);
    const HeadShape tokens = attention_shape_of(layer),
                    heads = sequence_head_shape(&tokens, &rank_heads(layer)->proj);
    sequence_of(layer)->attention->init(layer, &heads);
    rank_major_open(layer);
    halo_open(layer);
    sequence_share(layer, {a.head_proj, a.o, a.head_o, a.head_delta, a.dproj, a.dproj_halo,
                           layer_halo(layer) ? a.proj : NULL});
}

// The output norm and gate with rank-major weights; dproj and delta are NULL in the forward pass.
static inline OutputGate rank_major_output_gate(const Layer* layer, const SequenceActs* a, bf16* dproj,
                                                float* delta) {
    OutputGate gate = attention_output_gate(layer, a->o_rstd, a->proj, dproj, delta);
    if (!gate.weight) return gate;
    gate.weight = rank_heads(layer)->weights[RANK_MAJOR_OUTPUT_NORM];
    gate.dweight = rank_heads(layer)->dweights[RANK_MAJOR_OUTPUT_NORM];
    return gate;
}

// ----------------------------------------------------------------------------
// with a halo

// The output norm and gate over the span; dproj and delta are NULL in the forward pass.
static inline OutputGate halo_output_gate(const Layer* layer, const SequenceActs* a, bf16* dproj,
                                          float* delta) {
    const HeadShape s = attention_shape_of(layer);
    return attention_output_gate(layer, halo_span(layer, a->o_rstd, s.NH),
                                 halo_span(layer, a->proj, s.row_stride),
                                 halo_span(layer, dproj, s.row_stride), delta);
}

static inline void halo_forward(const Layer* layer, const SequenceActs* a, bf16* out, const bf16* residual) {
    const AttentionHeads heads = halo_heads(layer);
    const int64_t d = layer->config->hidden_size, S = heads.shape.row_stride;
    const OutputGate gate = halo_output_gate(layer, a, NULL, NULL);
    const Linear o_proj = layer_linear(layer, P_O_PROJ);
    bf16 *o = halo_span(layer, a->o, d), *y = halo_span(layer, a->y, d);

    sequence_of(layer)->attention->forward(layer, &heads, o, halo_span(layer, a->proj, S));
    if (y) output_gate_forward(y, o, &gate, &heads.shape, layer->stream);
    halo_read(layer);
    linear_forward(out, a->y ? a->y : a->o, residual, &o_proj, layer->matmul);
}

// As sequence_backward. The gradients of y, then of o, are in head_o.
static inline DeferredWeight halo_backward(const Layer* layer, bf16* din, const bf16* dout) {
    const SequenceActs a = sequence_acts(layer);
    const AttentionHeads heads = halo_heads(layer);
    const int64_t d = layer->config->hidden_size, S = heads.shape.row_stride, before = halo_before(layer);
    const OutputGate gate = halo_output_gate(layer, &a, a.dproj, a.delta);
    const Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);
    bf16 *o = halo_span(layer, a.o, d), *y = halo_span(layer, a.y, d), *gradient = a.head_o;

    CUDA_CHECK(cudaMemsetAsync(gradient, 0, (size_t)(before * d) * sizeof(bf16), layer->stream));
    linear_backward_input(gradient + before * d, dout, &o_proj, layer->matmul);
    if (y)
        output_gate_backward(gradient, layer->recompute_outputs ? y : NULL, gradient, o, &gate,
                             layer->partial[1], &heads.shape, layer->stream);
    else
        attention_delta(a.delta, gradient, o, &heads.shape, layer->stream);
    weight_gradient(layer->weight_stream, dout, a.y ? a.y : a.o, &o_proj);
    sequence_of(layer)->attention->backward(layer, &heads, halo_span(layer, a.dproj, S),
                                            halo_span(layer, a.proj, S), gradient, o, a.delta);
    halo_to_in_proj(layer, din, a.dproj, a.dproj_halo, &in_proj);
    return {in_proj, a.dproj};
}

// ----------------------------------------------------------------------------
// with heads exchanged

static inline void sequence_forward(const Layer* layer, bf16* out, const bf16* in, const bf16* residual) {
    const SequenceActs a = sequence_acts(layer);
    const Linear model_in_proj = layer_in_proj(layer);
    if (halo_in_proj(layer, a.proj, in, &model_in_proj)) return halo_forward(layer, &a, out, residual);
    const AttentionHeads heads = sequence_heads(layer);
    HeadShape tokens = attention_shape_of(layer);
    const OutputGate output_gate = rank_major_output_gate(layer, &a, NULL, NULL);
    const Linear in_proj = rank_major_linear(layer, RANK_MAJOR_IN_PROJ),
                 o_proj = rank_major_linear(layer, RANK_MAJOR_O_PROJ);

    rank_major_weights(layer, RANGE_FORWARD);
    in_proj_to_heads(layer, a.head_proj, a.proj, in, &in_proj);
    sequence_of(layer)->attention->forward(layer, &heads, a.head_o, a.head_proj);
    for (int i = 0; i < layer_chunks(layer); i++) {
        const SequenceChunk chunk = layer_chunk(layer, i);
        const OutputGate gate = output_gate_slice(&output_gate, &tokens, chunk.first);
        const Linear linear = linear_slice(&o_proj, chunk.first, layer->B * chunk.tokens);
        bf16 *o = o_to_tokens(layer, a.o, a.head_o, chunk), *y = chunk_rows(a.y, chunk, o_proj.K);
        tokens.T = chunk.tokens;
        if (y || gate.y8.data) output_gate_forward(y, o, &gate, &tokens, layer->stream);
        linear_forward(chunk_rows(out, chunk, o_proj.N), y ? y : o, chunk_rows(residual, chunk, o_proj.N),
                       &linear, layer->matmul);
    }
}

static inline void rank_major_add_in_proj(const Layer* layer, cudaStream_t stream) {
    rank_major_add(layer, RANK_MAJOR_IN_PROJ, stream);
}
static inline void rank_major_add_o_proj(const Layer* layer, cudaStream_t stream) {
    rank_major_add(layer, RANK_MAJOR_O_PROJ, stream);
}

// Writes din, the gradient of the mixer's input; din first holds the gradients of y, then of o.
static inline DeferredWeight sequence_backward(const Layer* layer, bf16* din, const bf16* dout) {
    if (halo_taken(layer)) return halo_backward(layer, din, dout);
    const SequenceActs a = sequence_acts(layer);
    const AttentionHeads heads = sequence_heads(layer);
    const HeadShape tokens = attention_shape_of(layer);
    const OutputGate output_gate = rank_major_output_gate(layer, &a, a.dproj, a.delta);
    const Linear in_proj = rank_major_linear(layer, RANK_MAJOR_IN_PROJ),
                 o_proj = rank_major_linear(layer, RANK_MAJOR_O_PROJ);
    const DeferredWeight o_gradient = {o_proj, dout, rank_major_add_o_proj};

    rank_major_weights(layer, RANGE_BACKWARD);
    linear_backward_input(din, dout, &o_proj, layer->matmul);
    if (a.y)
        output_gate_backward(din, layer->recompute_outputs ? a.y : NULL, din, a.o, &output_gate,
                             layer->partial[1], &tokens, layer->stream);
    else
        attention_delta(a.delta, din, a.o, &tokens, layer->stream);
    deferred_weight_gradient(layer, &o_gradient, a.y ? a.y : a.o);
    dout_to_heads(layer, a.head_o, a.head_delta, din, a.delta);
    sequence_of(layer)->attention->backward(layer, &heads, a.head_dproj, a.head_proj, a.head_o, NULL,
                                            a.head_delta);
    heads_to_in_proj(layer, din, a.dproj, a.head_dproj, &in_proj);
    return {in_proj, a.dproj, rank_major_add_in_proj};
}
