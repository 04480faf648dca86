/*
Halos, where ranks share sequences (split.h). Where gates forget, in the `halo` last tokens of each rank, all
that was before, a rank needs of the other ranks' tokens these alone. It then has all heads over

    span    its own T/N tokens behind the last `halo` tokens of the rank before, which rank 0 has not

as if that were a sequence, with the model's weights in their own layout and no exchange of o:

    forward     rows of proj of the own last tokens ->  before proj of the rank behind
    backward    gradients of these rows             ->  dproj_halo of the rank before, which adds them to dproj

Queries of the halo are computed and not used: gradients of their outputs are 0. Gradients of weights from the
halo's rows are those of keys and values that the own queries read; the rank that has the rows adds the
others.

The first token of a halo has no token before it that its shift could read, so its key is none. A rank looks
at its own last tokens, before it sends them, and may say that they suffice: that key and all before it weigh
less than eps, by the rule of pruning.cuh, with U by QK norm's weights and lse >= -U. Each of these keys has
decayed by at least the gates behind the first token of the halo:

    2 U + ln(number of these keys) + sum of log gates behind the first token of the halo < ln eps

for every head. A row may then lose 2 eps of its weight: eps by the halo, eps by pruning within the span.

All ranks tell all, and the host waits for the answers, since other work follows from them; the GPU meanwhile
computes proj, if the layer's last pass had a halo. So what a pass computes is a function of its weights and
tokens alone. What a backward pass recomputes has the same answer.

Message n of a halo fills tensors that are free when message n - 1 was read (sequence_begin):

    proj's rows before the own ones    last used by the output gate; the main stream tells `read` behind it, or, where a
                                       backward pass reads them again, behind that message
    dproj_halo                         by halo_add_kernel; the main stream tells `read` behind it

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

// One thread block, a warp a head: whether of s.T tokens the first, and what is before, is forgotten by the
// query behind the last. z: the gates' logits of these tokens, NULL where a gate has only a bias; keys: the
// first token and those before it.
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

// Answers for the rank's last tokens, whose rows of proj are `rows`. The last rank's are no
// halo.
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

// Computes proj = in_proj(in), with the halo of the rank before it, and returns true; or returns false where
// the layer's heads are to be exchanged. proj: the rank's own rows. The caller tells `read` (halo_read)
// behind the last use of the halo's rows.
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
        peers_read(&s->exchange.peers, sequence_in(layer)); // nobody uses the rows
        return false;
    }
    if (!expected) compute_others();
    return true;
}

// Tells the others that what they sent last has been used, by what is queued on the main stream.
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

// Computes din, the gradient of in_proj's input, from dproj of the own rows, to which it adds what the rank
// behind has for the last of them. dproj_halo: where that comes.
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
