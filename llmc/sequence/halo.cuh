/*
Halos: attention without an exchange of heads, where ranks share sequences (split.h) and gates forget quickly.

A rank computes attention for its own T/N tokens with all heads. The only tokens before these that it needs
are the halo, the last `halo` tokens of the previous rank: its queries have forgotten all others. Halo and own
tokens are the span:

    tokens of a sequence    ...  rank n - 1       |       rank n       |  ...
    span of rank n                       [ halo   |     own tokens     ]        rank 0 has no halo

The span is computed like a sequence of its own. Weights have the model's layout, and o is not exchanged. Two
messages are left:

    forward     proj of the last own tokens     ->  the halo's rows of proj of the next rank
    backward    gradients of the halo's rows    ->  dproj_halo of the previous rank, which adds them to dproj

The halo's queries are computed but not used: gradients of their outputs are 0. Two ranks share the gradients
of weights from the halo's rows. This rank adds what its own queries contribute through the halo's keys and
values; the rank that owns the rows adds the rest.

A rank decides whether its last tokens suffice as a halo before it sends them. The halo's first token lacks
the previous token that its shift would read, so its key cannot be used. The halo suffices if this key and all
keys before it weigh less than eps, by the rule of pruning.cuh, with U from QK norm's weights and lse >= -U.
Each of these keys has decayed by at least the gates of the halo's other tokens:

    2 U + ln(number of these keys) + sum of log gates of the halo's other tokens < ln eps      for every head

A row may lose 2 eps of its weight: eps to the halo, and eps to pruning within the span.

Rules of the answers:

 1. All ranks of a group do the same.               halo_send_answer sends to all ranks, and
                                                    sequence_halos_suffice needs all answers
 2. The host queues no attention before it has      halos_suffice waits for `answered`; meanwhile the GPU
    the answers, as they decide which one.          computes proj of the other tokens
 3. What a pass computes is a function of its       `expected`, the last pass's answer, decides only whether
    weights and tokens alone.                       proj is computed before or after the wait
 4. What a backward pass recomputes has the         halo_in_proj: `taken`, with layer->recomputing
    forward pass's answer.

Message n fills tensors that are free when message n - 1 was read (sequence_begin):

 5. The halo's rows of proj are free after the      halo_read follows the output gate (halo_forward), and in
    output gate, or a backward pass, has used them. halo_to_in_proj the backward pass of the heads
 6. dproj_halo is free after halo_add_kernel.       halo_read follows it in halo_to_in_proj

Called by mixer.cuh. An error of CUDA ends the program.
*/
#pragma once

#include "../attention/pruning.cuh"
#include "../layers/forget_gate.cuh"
#include "../model/rotation.h"
#include "sequence.cuh"

// Tokens of a halo that a layer of this pass may have; 0: heads are exchanged. With FP8 the weights are
// rank-major, so heads are always exchanged.
static inline int64_t layer_halo(const Layer* layer) {
    const SequenceHalos* h = &sequence_of(layer)->halos;
    if (!sequence_may_halo(layer->config) || layer->fp8 || layer->cudnn || layer->B > 1 || !h->possible)
        return 0;
    return h->always ? h->always : sequence_halo(layer->B, layer->T);
}

// Whether the last forward pass of the layer had a halo.
static inline bool halo_taken(const Layer* layer) {
    return layer_halo(layer) > 0 && sequence_of(layer)->halos.taken[layer->l];
}

// Tokens of the halo that this rank has before its own.
static inline int64_t halo_before(const Layer* layer) {
    return sequence_span(&rank_heads(layer)->group, layer->T, layer_halo(layer)).halo;
}

// Where the span begins in a tensor of `width` elements a token, of which `own` is the rank's first; NULL if
// the pass has no such tensor.
template <class T> static inline T* halo_span(const Layer* layer, T* own, int64_t width) {
    return own ? own - halo_before(layer) * width : NULL;
}

// All heads of the layer, over the span
static inline AttentionHeads halo_heads(const Layer* layer) {
    const SequenceSpan span = sequence_span(&rank_heads(layer)->group, layer->T, layer_halo(layer));
    AttentionHeads heads = attention_heads(layer);
    assert(layer->T % ATTENTION_BLOCK == 0 && span.halo % ATTENTION_BLOCK == 0 && span.halo <= layer->T);
    heads.shape.T += span.halo;
    heads.part = {span.halo / ATTENTION_BLOCK, span.before / ATTENTION_BLOCK};
    return heads;
}

// Allocates what the host keeps, unless the longest pass has no halo. sequence_close frees it.
static inline void halo_open(const Layer* layer) {
    SequenceHalos* h = &sequence_of(layer)->halos;
    h->possible = layer_halo(layer) > 0;
    if (!h->possible) return;
    h->taken = (bool*)xcalloc((size_t)layer->config->num_hidden_layers, sizeof *h->taken);
    h->suffices = (int32_t*)device_zeros(sizeof *h->suffices);
    h->answers = (int32_t*)device_host_alloc((size_t)rank_heads(layer)->group.size * sizeof *h->answers);
    CUDA_CHECK(cudaEventCreateWithFlags(&h->answered, cudaEventDisableTiming));
}

// ----------------------------------------------------------------------------
// whether halos suffice

enum { HALO_THREADS = 1024 };

// Whether the query after s.T tokens has forgotten the first of them and all before it. One thread block, one
// warp a head. z: the gates' logits of these tokens, NULL where a gate has only a bias; keys: number of keys
// that must be forgotten.
__global__ static void __launch_bounds__(HALO_THREADS)
    halo_answer_kernel(int32_t* suffices, const bf16* z, const float* bias, double keys,
                       const __grid_constant__ Pruning p, const __grid_constant__ HeadShape s) {
    bool all = true;
    for (int h = (int)threadIdx.x / 32; h < s.NH; h += HALO_THREADS / 32) {
        const double limit = pruning_weight_limit(p, s, h);
        double sum = 0;
        for (int64_t t = 1 + threadIdx.x % 32; t < s.T; t += 32)
            sum += forget_gate_logf(forget_gate_logit(z, t * s.row_stride + h, bias[h]));
        all &= 2 * limit + log(keys) + warp_sum(sum) < p.log_tolerance; // false where one is NaN
    }
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) *suffices = all;
}

// Queues this rank's answer: whether its last tokens suffice as the next rank's halo. rows: their rows of
// proj. The last rank has no next one, and its answer is yes.
static inline void halo_answer(const Layer* layer, const bf16* rows) {
    const SequenceGroup* g = &rank_heads(layer)->group;
    AttentionHeads heads = attention_heads(layer);
    const SequenceGroup behind = {g->rank + 1, g->size};
    const int64_t halo = layer_halo(layer);
    const Pruning rule = {.q_weight = heads.paths[0].weight,
                          .k_weight = heads.paths[1].weight,
                          .log_tolerance = layer->config->log_pruning_tolerance,
                          .rope_gain = config_rope_gain(layer->config)};
    heads.shape.T = g->rank + 1 < g->size ? halo : 0;
    if (!heads.shape.T) heads.shape.NH = 0;
    CUDA_LAUNCH(halo_answer_kernel, 1, HALO_THREADS, layer->stream, sequence_of(layer)->halos.suffices,
                heads.gate < 0 ? NULL : rows + heads.gate, heads.gate_bias,
                (double)(sequence_span(&behind, layer->T, halo).before + 1), rule, heads.shape);
}

// Queues copies of the answer to the inboxes of the others.
static inline void halo_send_answer(const Layer* layer) {
    const SequenceMixer* s = sequence_of(layer);
    const SequenceGroup* g = &s->heads.group;
    for (int i = 1; i < g->size; i++)
        CUDA_CHECK(cudaMemcpyAsync(peers_inbox(&s->exchange.peers, (g->rank + i) % g->size, g->rank),
                                   s->halos.suffices, sizeof(int32_t), cudaMemcpyDefault,
                                   sequence_out(layer)));
}

// Queues copies of all ranks' answers to the host, behind their arrival.
static inline void halo_fetch_answers(const Layer* layer) {
    const SequenceMixer* s = sequence_of(layer);
    const SequenceGroup* g = &s->heads.group;
    const cudaStream_t in = sequence_in(layer);
    for (int r = 0; r < g->size; r++) {
        const void* from =
            r == g->rank ? (const void*)s->halos.suffices : peers_inbox(&s->exchange.peers, g->rank, r);
        CUDA_CHECK(cudaMemcpyAsync(&s->halos.answers[r], from, sizeof(int32_t), cudaMemcpyDeviceToHost, in));
    }
    CUDA_CHECK(cudaEventRecord(s->halos.answered, in));
}

// Waits for the answers; whether the halos of all ranks suffice. As exchange_synchronize, but polls without a
// pause: the GPU may have nothing else to do.
static inline bool halos_suffice(const SequenceMixer* s) {
    const Exchange* e = s->exchange.all;
    while (e && cudaEventQuery(s->halos.answered) == cudaErrorNotReady) nccl_check_network(e->comm, e->world);
    CUDA_CHECK(cudaEventSynchronize(s->halos.answered));
    return sequence_halos_suffice(s->halos.answers, s->heads.group.size);
}

// ----------------------------------------------------------------------------
// the exchanges

// Computes proj = in_proj(in) and receives the halo's rows before it. Returns false where heads must be
// exchanged instead. proj: the rank's own rows. After the last use of the halo's rows the caller calls
// halo_read.
static inline bool halo_in_proj(const Layer* layer, bf16* proj, const bf16* in, const Linear* in_proj) {
    const SequenceMixer* s = sequence_of(layer);
    const SequenceGroup* g = &s->heads.group;
    const int64_t halo = layer_halo(layer), first = layer->T - halo, stride = in_proj->out_stride;
    bool* taken = halo ? &s->halos.taken[layer->l] : NULL;
    if (!halo || (layer->recomputing && !*taken)) return false;
    const bool asks = !layer->recomputing && !s->halos.always;
    const Linear last = linear_slice(in_proj, first, halo), others = linear_slice(in_proj, 0, first);
    auto compute_others = [&] {
        if (first > 0) linear_forward(proj, in, NULL, &others, layer->matmul);
    };
    const bool expected = *taken || !asks;
    linear_forward(proj + first * stride, in + first * in_proj->x_stride, NULL, &last, layer->matmul);
    if (asks) halo_answer(layer, proj + first * stride);
    sequence_begin(layer);
    {
        Range range("exchange of sequences", RANGE_FORWARD, sequence_out(layer));
        const int64_t row = stride * (int64_t)sizeof(bf16);
        if (g->rank + 1 < g->size)
            copy_rows(peers_at(&s->exchange.peers, g->rank + 1, proj - halo * stride), row,
                      proj + first * stride, row, row, halo, sequence_out(layer));
        if (asks) halo_send_answer(layer);
        sequence_sent(layer);
        if (asks) halo_fetch_answers(layer);
    }
    if (expected) compute_others();
    sequence_await(layer, true); // before the host's wait, during which the clock counts, too
    *taken = !asks || halos_suffice(s);
    if (!*taken) {
        peers_read(&s->exchange.peers, sequence_in(layer)); // the rows stay unused
        return false;
    }
    if (!expected) compute_others();
    return true;
}

// Marks the last message as read, after what is queued on the main stream: the next one may be sent.
static inline void halo_read(const Layer* layer) {
    peers_read(&sequence_of(layer)->exchange.peers, layer->stream);
}

// to += x, of 8 count elements. Eight a thread.
__global__ static void __launch_bounds__(256) halo_add_kernel(bf16* to, const bf16* x, int64_t count) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    float a[8], b[8];
    if (i >= count) return;
    unpack8(a, load_raw8(to + 8 * i));
    unpack8(b, load_raw8(x + 8 * i));
    for (int k = 0; k < 8; k++) a[k] += b[k];
    store16(to + 8 * i, pack8(a));
}

// Computes din, the gradient of in_proj's input, from dproj of the own rows. First adds dproj_halo to the
// last of these rows: the next rank's gradients of its halo.
static inline void halo_to_in_proj(const Layer* layer, bf16* din, bf16* dproj, bf16* dproj_halo,
                                   const Linear* in_proj) {
    const SequenceExchange* e = &sequence_of(layer)->exchange;
    const SequenceGroup* g = &rank_heads(layer)->group;
    const int64_t halo = layer_halo(layer), first = layer->T - halo, stride = in_proj->out_stride;
    const Linear last = linear_slice(in_proj, first, halo), others = linear_slice(in_proj, 0, first);
    sequence_begin(layer);
    {
        Range range("exchange of sequences", RANGE_BACKWARD, sequence_out(layer));
        const int64_t row = stride * (int64_t)sizeof(bf16);
        if (g->rank > 0)
            copy_rows(peers_at(&e->peers, g->rank - 1, dproj_halo), row, dproj - halo * stride, row, row,
                      halo, sequence_out(layer));
        sequence_sent(layer);
    }
    if (first > 0) linear_backward_input(din, dproj, &others, layer->matmul);
    sequence_await(layer, true);
    if (g->rank + 1 < g->size)
        CUDA_LAUNCH(halo_add_kernel, ceil_div<int64_t>(halo * stride / 8, 256), 256, layer->stream,
                    dproj + first * stride, dproj_halo, halo * stride / 8);
    halo_read(layer);
    linear_backward_input(din + first * in_proj->x_stride, dproj + first * stride, &last, layer->matmul);
}
