/*
Exchange between GPUs that share sequences (split.h, --sequence-ranks N): outside attention a rank has T/N
tokens with all heads, within attention NH/N heads with all tokens.

    forward     in_proj ----> proj  --in_proj_to_heads->  head_proj   shift, QK norm, RoPE, gate, attention
                o_proj  <---- o     <--o_to_tokens------  head_o
    backward    dy -> dO, delta     --dout_to_heads---->  head_o, head_delta
                in_proj <---- dproj <--heads_to_in_proj-  head_dproj

    proj, dproj           bf16 [B, T/N, row stride]: all heads, and the output gate
    o, din                bf16 [B, T/N, NH, dh]
    head_proj, head_dproj bf16 [B, T, stride]: the rank's heads (HeadColumns)
    head_o                bf16 [B, T, NH/N, dh]: o, then its gradient
    head_delta            float [B, NH/N, T]

Nothing is packed: rows are rank-major, as the weights are (rank_major.cuh), and copy engines write a rank's
columns into the tensors of the others, where they are read (peers_share). Only gate logits, one column a
head, are stored by a kernel.

q, k, v, o and dproj are exchanged chunk by chunk (SequenceChunk) on two streams, so that copies overlap
computation:

    q, k, v     the GEMMs of the next chunk for other ranks' heads, then those of the gates and of the rank's own heads
    o           output gate and o_proj of the chunk before
    dO          the weight gradient of o_proj, on its own stream
    dproj       in_proj's input gradient of the chunk before

    main stream   GEMM 0 | GEMM 1 | GEMM 2 | GEMMs of gates, own heads | wait | shift, QK norm, RoPE, ...
    out                  | copy 0 | copy 1 | copy 2 |                        to the other ranks
    in                                         all have arrived |            and own parts of o, dO and dproj

Passes are not captured as CUDA graphs: messages are numbered, and a graph would repeat the numbers.

Called by mixer.cuh, and for tokens and losses by the GPU trainer. An error of CUDA ends the program; the
watch (llmc/ranks/watch.h) ends a wait for a message that never comes.
*/
#pragma once

#include "heads.cuh"
#include "rank_major.cuh"

// ----------------------------------------------------------------------------
// the streams of an exchange

// The exchange's two streams; with one kernel after another (Layer.sequential), the main stream
static inline cudaStream_t sequence_out(const Layer* layer) {
    return layer->sequential ? layer->stream : sequence_of(layer)->exchange.out;
}
static inline cudaStream_t sequence_in(const Layer* layer) {
    return layer->sequential ? layer->stream : sequence_of(layer)->exchange.in;
}

// Makes the exchange's streams wait for what is queued on the main stream.
static inline void sequence_follow(const Layer* layer) {
    const cudaEvent_t ready = sequence_of(layer)->exchange.ready;
    CUDA_CHECK(cudaEventRecord(ready, layer->stream));
    CUDA_CHECK(cudaStreamWaitEvent(sequence_out(layer), ready, 0));
    CUDA_CHECK(cudaStreamWaitEvent(sequence_in(layer), ready, 0));
}

// Begins an exchange: the exchange's streams wait for the main stream, and until the tensors that are filled
// are free on all ranks. A rank says so at the end of the exchange before (peers_read in sequence_end); when
// that one began, its main stream was past their last use (halo.cuh tells of halos):
//
//     exchange     fills                last used
//     q, k, v      head_proj            by attention, before the exchange of o (or of dproj, the pass before)
//     o            o                    by the output gate and o_proj of the layer before, and by o_proj's weight
//                                       gradient, joined before this layer's pass begins
//     dO           head_o, head_delta   what the exchange of o sent; or by attention, before the exchange of dproj
//     dproj        dproj                by in_proj's weight gradient of the layer above, joined before that of dO
static inline void sequence_begin(const Layer* layer) {
    sequence_follow(layer);
    peers_await_readers(&sequence_of(layer)->exchange.peers, sequence_out(layer));
}

// All that this rank sends is queued: the stream `in` waits for it and for what the others send.
static inline void sequence_sent(const Layer* layer) {
    SequenceExchange* e = &sequence_of(layer)->exchange;
    const cudaStream_t out = sequence_out(layer), in = sequence_in(layer);
    peers_written(&e->peers, out);
    CUDA_CHECK(cudaEventRecord(e->done, out));
    CUDA_CHECK(cudaStreamWaitEvent(in, e->done, 0));
    peers_await(&e->peers, in);
}

// The main stream waits for what is queued on the stream `in`.
static inline void sequence_await(const Layer* layer, bool timed) {
    SequenceExchange* e = &sequence_of(layer)->exchange;
    CUDA_CHECK(cudaEventRecord(e->done, sequence_in(layer)));
    if (e->all && timed)
        exchange_wait(e->all, e->done, 0, layer->stream);
    else
        CUDA_CHECK(cudaStreamWaitEvent(layer->stream, e->done, 0));
}

// Ends an exchange, or one chunk of it: the main stream waits for it, and may then overwrite what was sent
// and read what was received. When an exchange is awaited in chunks, only the first wait is timed: later
// chunks arrive while the one before is in use, and the clock's two kernels would take as long as most of
// these waits.
static inline void sequence_end(const Layer* layer, bool first, RangePass pass) {
    Range range("exchange of sequences", pass, sequence_in(layer));
    sequence_sent(layer);
    peers_read(&sequence_of(layer)->exchange.peers, sequence_in(layer));
    sequence_await(layer, first);
}

// ----------------------------------------------------------------------------
// copies of a chunk of tokens between heads [B, T, stride], a rank's heads, and x [B, T/N, x_stride], all
// heads

// Columns that are copied: `width` a rank, the first ones in a row of `heads`; in a row of x, rank-major
typedef struct {
    int64_t stride, x_stride, width;
} HeadCopies;

// Number of chunks of a pass: fewer in the shorter contexts of --eval, so that none is empty.
static inline int layer_chunks(const Layer* layer) {
    const int64_t most = max(layer->T / SEQUENCE_CHUNK_ALIGN, (int64_t)1);
    return (int)min((int64_t)sequence_of(layer)->exchange.chunks, most);
}
static inline SequenceChunk layer_chunk(const Layer* layer, int i) {
    return sequence_chunk(layer->T, layer_chunks(layer), i);
}

// The chunk's rows of x [B, T/N, width]; NULL if the pass has no x.
template <class T> static inline T* chunk_rows(T* x, SequenceChunk chunk, int64_t width) {
    return x ? x + chunk.first * width : NULL;
}

// Queues copies of this rank's tokens: the columns of each other rank's heads, from x to that rank's `heads`;
// with `own` also those of its own heads.
static inline void copy_to_heads(const Layer* layer, const HeadCopies* c, bf16* heads, const bf16* x,
                                 SequenceChunk chunk, bool own, RangePass pass) {
    Range range("exchange of sequences", pass, sequence_out(layer));
    const SequenceGroup* g = &rank_heads(layer)->group;
    const int64_t size = sizeof(bf16);
    for (int i = 1; i < g->size + own; i++) {
        const int r = (g->rank + i) % g->size; // each rank starts with a different one, and ends with itself
        for (int64_t b = 0; b < layer->B; b++)
            copy_rows(peers_at(&sequence_of(layer)->exchange.peers, r, heads) +
                          ((b * g->size + g->rank) * layer->T + chunk.first) * c->stride,
                      size * c->stride, x + (b * layer->T + chunk.first) * c->x_stride + r * c->width,
                      size * c->x_stride, size * c->width, chunk.tokens,
                      r == g->rank ? sequence_in(layer) : sequence_out(layer));
    }
}

// Queues copies of this rank's heads: the tokens of each rank, from `heads` to that rank's x.
static inline void copy_to_tokens(const Layer* layer, const HeadCopies* c, bf16* x, const bf16* heads,
                                  SequenceChunk chunk, RangePass pass) {
    Range range("exchange of sequences", pass, sequence_out(layer));
    const SequenceGroup* g = &rank_heads(layer)->group;
    const int64_t size = sizeof(bf16);
    for (int i = 1; i <= g->size; i++) {
        const int r = (g->rank + i) % g->size;
        for (int64_t b = 0; b < layer->B; b++)
            copy_rows(peers_at(&sequence_of(layer)->exchange.peers, r, x) +
                          (b * layer->T + chunk.first) * c->x_stride + g->rank * c->width,
                      size * c->x_stride, heads + ((b * g->size + r) * layer->T + chunk.first) * c->stride,
                      size * c->stride, size * c->width, chunk.tokens,
                      r == g->rank ? sequence_in(layer) : sequence_out(layer));
    }
}

static inline HeadCopies copies_of_qkv(const Layer* layer, int64_t x_stride) {
    return {rank_heads(layer)->proj.stride, x_stride, rank_heads(layer)->proj.wide};
}
static inline HeadCopies copies_of_o(const Layer* layer) {
    return {rank_heads(layer)->o.stride, layer->config->hidden_size, rank_heads(layer)->o.stride};
}

// Exchanges gate logits likewise, by a kernel on the main stream, for which the exchange's streams then wait.
template <bool TO_HEADS>
static inline void store_gates(const Layer* layer, bf16* heads, bf16* x, int64_t x_stride) {
    Range range("exchange of sequences", TO_HEADS ? RANGE_FORWARD : RANGE_BACKWARD, layer->stream);
    const SequenceGroup* g = &rank_heads(layer)->group;
    const Peers* peers = &sequence_of(layer)->exchange.peers;
    const HeadColumns columns = head_columns_narrow(&rank_heads(layer)->proj);
    const HeadRows rows = head_rows(&columns, x_stride, layer->B, layer->T);
    const int64_t row = layer->T * columns.stride;
    HeadBlocks blocks = {.block_stride = row * g->size};
    for (int r = 0; r < g->size; r++) {
        if (TO_HEADS)
            blocks.ranks[r] = {peers_at(peers, r, heads) + g->rank * row, x, r};
        else
            blocks.ranks[r] = {heads + r * row, peers_at(peers, r, x), g->rank};
    }
    peers_await_readers(peers, layer->stream);
    (TO_HEADS ? heads_split : heads_join)(&blocks, &rows, layer->stream);
    sequence_follow(layer);
}

// ----------------------------------------------------------------------------
// the exchanges of a pass, and the GEMMs that overlap them

// Computes proj = in_proj(in), and fills head_proj from all ranks. q, k and v of the rank's own heads go to
// head_proj alone.
static inline void in_proj_to_heads(const Layer* layer, bf16* head_proj, bf16* proj, const bf16* in,
                                    const Linear* in_proj) {
    const SequenceGroup* g = &rank_heads(layer)->group;
    const int64_t d = layer->config->hidden_size, stride = in_proj->out_stride, T = layer->T;
    const HeadCopies qkv = copies_of_qkv(layer, stride);
    const int64_t first = g->rank * qkv.width, behind = first + qkv.width, all = g->size * qkv.width;
    const Linear before = linear_columns(in_proj, 0, first),
                 after = linear_columns(in_proj, behind, all - behind),
                 gates = linear_columns(in_proj, all, in_proj->N - all);
    Linear own = linear_columns(in_proj, first, qkv.width);
    own.out_stride = qkv.stride;
    sequence_begin(layer);
    for (int i = 0; i < layer_chunks(layer); i++) {
        const SequenceChunk chunk = layer_chunk(layer, i);
        const int64_t rows = layer->B * chunk.tokens;
        const Linear part_before = linear_slice(&before, chunk.first, rows),
                     part_after = linear_slice(&after, chunk.first, rows);
        const bf16* part_in = chunk_rows(in, chunk, d);
        linear_forward(chunk_rows(proj, chunk, stride), part_in, NULL, &part_before, layer->matmul);
        linear_forward(chunk_rows(proj, chunk, stride) + behind, part_in, NULL, &part_after, layer->matmul);
        sequence_follow(layer);
        copy_to_heads(layer, &qkv, head_proj, proj, chunk, false, RANGE_FORWARD);
    }
    linear_forward(proj + all, in, NULL, &gates, layer->matmul);
    store_gates<true>(layer, head_proj, proj, stride);
    for (int64_t b = 0; b < layer->B; b++) {
        const Linear sequence = linear_slice(&own, b * T, T);
        linear_forward(head_proj + (b * g->size + g->rank) * T * qkv.stride, in + b * T * d, NULL, &sequence,
                       layer->matmul);
    }
    sequence_end(layer, true, RANGE_FORWARD);
}

// Fills and returns the chunk's rows of o, from head_o of all ranks. Called for the chunks in order.
static inline bf16* o_to_tokens(const Layer* layer, bf16* o, const bf16* head_o, SequenceChunk chunk) {
    const HeadCopies copies = copies_of_o(layer);
    if (chunk.first == 0) sequence_begin(layer);
    copy_to_tokens(layer, &copies, o, head_o, chunk, RANGE_FORWARD);
    sequence_end(layer, chunk.first == 0, RANGE_FORWARD);
    return chunk_rows(o, chunk, copies.x_stride);
}

// Fills head_o with the gradient of o from dout, and head_delta [B, NH/N, T] from delta [B, NH, T/N], of all
// ranks.
static inline void dout_to_heads(const Layer* layer, bf16* head_o, float* head_delta, const bf16* dout,
                                 const float* delta) {
    const HeadCopies copies = copies_of_o(layer);
    const SequenceGroup* g = &rank_heads(layer)->group;
    const int64_t heads = rank_query_heads(rank_heads(layer)), T = layer->T,
                  bytes = T * (int64_t)sizeof(float);
    sequence_begin(layer);
    for (int r = 0; r < g->size; r++)
        for (int64_t b = 0; b < layer->B; b++)
            copy_rows(peers_at(&sequence_of(layer)->exchange.peers, r, head_delta) +
                          (b * heads * g->size + g->rank) * T,
                      g->size * bytes, delta + (b * g->size + r) * heads * T, bytes, bytes, heads,
                      sequence_out(layer));
    copy_to_heads(layer, &copies, head_o, dout, {0, T}, true, RANGE_BACKWARD);
    sequence_end(layer, true, RANGE_BACKWARD);
}

// Fills dproj's columns of heads from all ranks' head_dproj, converts those of q, k and v to FP8, zeroes
// dproj's padding, and computes din, the gradient of in_proj's input.
static inline void heads_to_in_proj(const Layer* layer, bf16* din, bf16* dproj, bf16* head_dproj,
                                    const Linear* in_proj) {
    const int64_t columns = layer_proj(layer).rows, stride = in_proj->out_stride, rows = layer->B * layer->T;
    const int64_t d = layer->config->hidden_size, padding = (stride - columns) * (int64_t)sizeof(bf16);
    const HeadCopies qkv = copies_of_qkv(layer, stride);
    // begins the exchange: it waits as sequence_begin does
    store_gates<false>(layer, head_dproj, dproj, stride);
    rank_major_gradients(layer);
    if (padding > 0)
        CUDA_CHECK(cudaMemset2DAsync(dproj + columns, (size_t)stride * sizeof(bf16), 0, (size_t)padding,
                                     (size_t)rows, layer->stream));
    for (int i = 0; i < layer_chunks(layer); i++) {
        const SequenceChunk chunk = layer_chunk(layer, i);
        const Linear part = linear_slice(in_proj, chunk.first, layer->B * chunk.tokens);
        bf16* part_dproj = chunk_rows(dproj, chunk, stride);
        copy_to_tokens(layer, &qkv, dproj, head_dproj, chunk, RANGE_BACKWARD);
        sequence_end(layer, i == 0, RANGE_BACKWARD);
        fp8_convert<FP8_E5M2>(&part.fp8.dout, part_dproj, part.rows,
                              qkv.width * rank_heads(layer)->group.size, stride, layer->stream);
        linear_backward_input(chunk_rows(din, chunk, d), part_dproj, &part, layer->matmul);
    }
}

// ----------------------------------------------------------------------------
// tokens and losses

// Queues a copy of the rank's own tokens [B, Tn] from those of whole sequences on the host.
static inline void sequence_upload(int32_t* tokens, const int32_t* whole, const SequenceGroup* g, int64_t B,
                                   int64_t Tn, cudaStream_t stream) {
    const int64_t bytes = Tn * (int64_t)sizeof(int32_t);
    copy_rows(tokens, bytes, whole + g->rank * Tn, bytes * g->size, bytes, B, stream);
}

// Queues a copy of the losses [B, T] of whole sequences to the host, from those [B, Tn] of each rank.
static inline void sequence_download_losses(float* whole, const float* losses, SequenceMixer* s, int64_t B,
                                            int64_t Tn, cudaStream_t stream) {
    const int64_t bytes = Tn * (int64_t)sizeof(float);
    const SequenceGroup g = s->heads.group;
    const PeersMessage message = {losses, 0, B * bytes};
    if (g.size > 1) peers_send(&s->exchange.peers, &message, stream);
    for (int r = 0; r < g.size; r++)
        copy_rows(whole + r * Tn, bytes * g.size,
                  r == g.rank ? (const void*)losses : peers_inbox(&s->exchange.peers, g.rank, r), bytes,
                  bytes, B, stream);
    if (g.size > 1) peers_read(&s->exchange.peers, stream);
}
