/*
The exchange around attention between GPUs that share sequences (llmc/model/sequence.h, --sequence-ranks): tokens
are split between them outside attention, heads within.

    forward     in_proj ----> proj  --in_proj_to_heads->  head_proj   shift, QK norm, RoPE, gate, attention
                o_proj  <---- o     <--o_to_tokens------  head_o
    backward    dy -> dO, delta     --dout_to_heads---->  head_o, head_delta
                in_proj <---- dproj <--heads_to_in_proj-  head_dproj

    proj, dproj           bf16 [B, T/N, row stride] of all heads, and the output gate
    o, din                bf16 [B, T/N, NH, dh]
    head_proj, head_dproj bf16 [B, T, stride] of the rank's heads (HeadColumns)
    head_o                bf16 [B, T, NH/N, dh]: o, then its gradient
    head_delta            float [B, NH/N, T]

Blocks of rows travel by copy engines, through peers of the group's own (peers.cuh), in the same order on all ranks
of a group. An exchange goes chunk by chunk (SequenceChunk) on two streams, so that the link is busy while the main
stream computes: the GEMMs of q, k and v, and of the output gate, beside proj; o_proj beside o; in_proj's input
gradient beside dproj. Beside dO run the weight gradients of gate_proj and o_proj, which have a stream.

    main stream   GEMM 0 | GEMM 1 | GEMM 2 | GEMM of the gate | wait | shift, QK norm, RoPE, ...
    out                  | split 0, copy 0 | split 1, copy 1  | split 2, copy 2 |
    in                     rows of inbox 0 | rows of inbox 1  | rows of inbox 2 |

Each message has a number of its own in its wait, which a CUDA graph would repeat: passes of ranks that share
sequences are not captured. Which heads a rank has may change from step to step (deal.cuh).

Where layer->heads is NULL nothing is exchanged: tensors are the same ones on both sides, and there is one chunk.
Called by attention, for losses by the GPU trainer, and for inference by prompt.cuh. An error of CUDA ends the
program; a message that never comes is ended by the watch (llmc/dist/watch.h).
*/
#pragma once

#include "../../cuda/device.cuh"
#include "exchange.cuh"
#include "heads.cuh"

typedef struct SequenceExchange {
    World* world;
    Peers peers;             // a slot of an inbox for each chunk
    cudaStream_t out, in;    // of what the rank sends; of what it receives
    cudaEvent_t ready, done; // of the main stream before an exchange; of the exchange
    const Exchange* all;     // of all ranks, whose clock counts the main stream's waits; NULL: none does
} SequenceExchange;

// ----------------------------------------------------------------------------
// opening

// The heads of a rank of `group`, with memory for their weights, connected to no other rank.
static inline RankHeads* rank_heads_new(const Config* c, const ParamTable* table, SequenceGroup group) {
    RankHeads* h = (RankHeads*)xcalloc(1, sizeof *h);
    const size_t heads = (size_t)(c->num_heads / group.size), channels = heads * (size_t)config_head_size(c);
    h->group = group;
    h->proj = head_columns_of_proj(table, c, group.size);
    h->o = head_columns_of_o(c, group.size);
    h->exchange = (SequenceExchange*)xcalloc(1, sizeof *h->exchange);
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&h->exchange->out, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&h->exchange->in, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&h->exchange->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&h->exchange->done, cudaEventDisableTiming));
    for (int k = 0; k < 2; k++) {
        h->norms[k] = (bf16*)device_zeros(channels * sizeof(bf16));
        h->dnorms[k] = (float*)device_zeros(channels * sizeof(float));
    }
    h->bias = (float*)device_zeros(heads * sizeof(float));
    h->dbias = (float*)device_zeros(heads * sizeof(float));
    return h;
}

// Collective: connects the ranks that share sequences, after the exchange of all is open. A pass has at most B sequences,
// of each of which `tokens` are the rank's own. NULL: each rank has sequences of its own. Dies where the GPUs of a group
// do not reach one another.
static inline RankHeads* sequence_open(World* world, const Config* c, const ParamTable* table,
                                       const SequenceGroup* group, int64_t B, int64_t tokens,
                                       const Exchange* all) {
    if (group->size == 1) return NULL;
    RankHeads* h = rank_heads_new(c, table, *group);
    const int chunks = sequence_chunks(B, tokens);
    const int64_t bytes = sequence_message_bytes(&h->proj, B, tokens, chunks);
    h->exchange->world = world;
    h->exchange->all = all;
    if (!peers_open(&h->exchange->peers, world, group->size, bytes, chunks))
        die("--sequence-ranks %d: the GPUs of a group must be on one host and reach one another's memory "
            "(nvidia-smi topo -p2p r tells), and NCCL_P2P_DISABLE must not be set",
            group->size);
    return h;
}

// Collective, of what sequence_open has returned.
static inline void sequence_close(RankHeads* h) {
    if (!h) return;
    if (h->exchange->world) peers_close(&h->exchange->peers, h->exchange->world);
    void* const buffers[] = {h->norms[0], h->norms[1], h->dnorms[0], h->dnorms[1], h->bias,
                             h->dbias,    h->deal,     h->kept,      h->all_kept};
    for (void* buffer : buffers) device_free(buffer);
    CUDA_CHECK(cudaStreamDestroy(h->exchange->out));
    CUDA_CHECK(cudaStreamDestroy(h->exchange->in));
    CUDA_CHECK(cudaEventDestroy(h->exchange->ready));
    CUDA_CHECK(cudaEventDestroy(h->exchange->done));
    free(h->exchange);
    free(h);
}

// ----------------------------------------------------------------------------
// tokens to heads, heads to tokens

// Chunks of an exchange: as many as slots, but none is empty where --eval measures shorter contexts. Chunk i, of the
// rank's tokens.
static inline int layer_chunks(const Layer* layer) {
    const int64_t most = max(layer->T / SEQUENCE_CHUNK_ALIGN, (int64_t)1);
    return layer->heads ? (int)min((int64_t)layer->heads->exchange->peers.slots, most) : 1;
}
static inline SequenceChunk layer_chunk(const Layer* layer, int i) {
    return sequence_chunk(layer->T, layer_chunks(layer), i);
}

// The chunk's rows of x [B, T/N, width]; NULL where the pass has no x.
template <class T> static inline T* chunk_rows(T* x, SequenceChunk chunk, int64_t width) {
    return x ? x + chunk.first * width : NULL;
}

// The streams of an exchange; one kernel after another: the main stream.
static inline cudaStream_t sequence_out(const Layer* layer) {
    return layer->sequential ? layer->stream : layer->heads->exchange->out;
}
static inline cudaStream_t sequence_in(const Layer* layer) {
    return layer->sequential ? layer->stream : layer->heads->exchange->in;
}

// What is queued on the exchange's streams from now on follows what is on the main stream.
static inline void sequence_begin(const Layer* layer) {
    const cudaEvent_t ready = layer->heads->exchange->ready;
    CUDA_CHECK(cudaEventRecord(ready, layer->stream));
    CUDA_CHECK(cudaStreamWaitEvent(sequence_out(layer), ready, 0));
    CUDA_CHECK(cudaStreamWaitEvent(sequence_in(layer), ready, 0));
}

// What is queued on the main stream from now on follows the exchange so far: it may overwrite what was sent, and read
// what was received. Of an exchange that is awaited chunk by chunk the clock counts the wait for the first alone: the
// others arrive while the one before is in use, and the clock's two kernels would take as long as most of these waits.
static inline void sequence_end(const Layer* layer, SequenceChunk chunk) {
    const SequenceExchange* e = layer->heads->exchange;
    CUDA_CHECK(cudaEventRecord(e->done, sequence_out(layer)));
    CUDA_CHECK(cudaStreamWaitEvent(sequence_in(layer), e->done, 0));
    CUDA_CHECK(cudaEventRecord(e->done, sequence_in(layer)));
    if (e->all && chunk.first == 0)
        exchange_wait(e->all, e->done, 0, layer->stream);
    else
        CUDA_CHECK(cudaStreamWaitEvent(layer->stream, e->done, 0));
}

// heads [B, T, stride] of the rank gets, of the chunk's tokens on each rank, the columns of its heads, from x, the
// whole rows of each rank's own tokens. blocks: scratch of as many elements as `heads`.
static inline void tokens_to_heads(const Layer* layer, const HeadColumns* columns, bf16* heads, bf16* blocks,
                                   const bf16* x, int64_t x_stride, SequenceChunk chunk, RangePass pass) {
    const cudaStream_t out = sequence_out(layer), in = sequence_in(layer);
    Range range("exchange of sequences", pass, out);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const HeadRows rows = head_rows(columns, head_deal(layer), x_stride, layer->B, chunk.tokens);
    const int64_t row = layer->T * columns->stride, bytes = row * (int64_t)sizeof(bf16),
                  all = bytes * g->size, first = chunk.first * columns->stride,
                  chunk_bytes = chunk.tokens * head_columns_bytes(columns);
    HeadBlocks to = {.own_stride = row * g->size, .rank = g->rank};
    for (int r = 0; r < g->size; r++)
        to.rows[r] = (r == g->rank ? heads + r * row : blocks + r * layer->B * row) + first;
    heads_split(&to, x + chunk.first * x_stride, &rows, out);
    const PeersMessage message = {blocks + first, layer->B * bytes, layer->B, chunk_bytes, bytes};
    peers_post(peers, &message, out);
    peers_await(peers, in);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank)
            copy_rows(heads + r * row + first, all, peers_inbox(peers, g->rank, r), chunk_bytes, chunk_bytes,
                      layer->B, in);
    peers_read(peers, in);
}

// The columns of all heads of x, whole rows of the chunk's tokens of the rank's own, from `heads` of all ranks.
static inline void heads_to_tokens(const Layer* layer, const HeadColumns* columns, bf16* x, int64_t x_stride,
                                   const bf16* heads, SequenceChunk chunk, RangePass pass) {
    const cudaStream_t out = sequence_out(layer), in = sequence_in(layer);
    Range range("exchange of sequences", pass, in);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const HeadRows rows = head_rows(columns, head_deal(layer), x_stride, layer->B, chunk.tokens);
    const int64_t row = layer->T * columns->stride, bytes = row * (int64_t)sizeof(bf16);
    const bf16* from_chunk = heads + chunk.first * columns->stride;
    const PeersMessage message = {from_chunk, bytes, layer->B, chunk.tokens * head_columns_bytes(columns),
                                  bytes * g->size};
    peers_post(peers, &message, out);
    peers_await(peers, in);
    HeadBlocks from = {.own_stride = row * g->size, .rank = g->rank};
    for (int r = 0; r < g->size; r++)
        from.rows[r] =
            r == g->rank ? (bf16*)(uintptr_t)from_chunk + r * row : (bf16*)peers_inbox(peers, g->rank, r);
    heads_join(x + chunk.first * x_stride, &from, &rows, in);
    peers_read(peers, in);
}

// head_delta [B, NH/N, T] from delta [B, NH, T/N] of all ranks. blocks: scratch of as many elements as head_delta.
static inline void delta_to_heads(const Layer* layer, float* head_delta, float* blocks, const float* delta) {
    const cudaStream_t out = sequence_out(layer), in = sequence_in(layer);
    Range range("exchange of sequences", RANGE_BACKWARD, out);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const int heads = layer->heads->o.heads;
    const int64_t rows = layer->B * heads, T = layer->T, bytes = T * (int64_t)sizeof(float);
    const DeltaRows split = {
        .deal = head_deal(layer), .rank = g->rank, .ranks = g->size, .heads = heads, .B = layer->B, .Tn = T};
    delta_split(head_delta, blocks, delta, &split, out);
    const PeersMessage message = {blocks, rows * bytes, 1, rows * bytes, rows * bytes};
    peers_post(peers, &message, out);
    peers_await(peers, in);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank)
            copy_rows(head_delta + r * T, bytes * g->size, peers_inbox(peers, g->rank, r), bytes, bytes, rows,
                      in);
    peers_read(peers, in);
}

// ----------------------------------------------------------------------------
// the exchanges of a pass, and the GEMMs that hide them. head_dproj is free until the backward pass writes it: scratch
// of what is sent

// proj = in_proj(in), and head_proj from all ranks.
static inline void in_proj_to_heads(const Layer* layer, bf16* head_proj, bf16* head_dproj, bf16* proj,
                                    const bf16* in, const Linear* in_proj) {
    if (!layer->heads) {
        linear_forward(proj, in, NULL, in_proj, layer->matmul);
        return;
    }
    const int64_t gate = params_column(layer->table, P_OGATE_PROJ), d = layer->config->hidden_size;
    const int64_t first = gate < 0 ? in_proj->N : gate, rest = in_proj->N - first - d; // before and behind it
    if (rest > 0) {
        const Linear behind = linear_columns(in_proj, first + d, rest);
        linear_forward(proj + first + d, in, NULL, &behind, layer->matmul);
    }
    head_weights_copy(layer);
    const Linear before = linear_columns(in_proj, 0, first);
    for (int i = 0; i < layer_chunks(layer); i++) {
        const SequenceChunk chunk = layer_chunk(layer, i);
        const Linear part = linear_slice(&before, chunk.first, layer->B * chunk.tokens);
        linear_forward(chunk_rows(proj, chunk, in_proj->out_stride), chunk_rows(in, chunk, d), NULL, &part,
                       layer->matmul);
        sequence_begin(layer);
        tokens_to_heads(layer, &layer->heads->proj, head_proj, head_dproj, proj, in_proj->out_stride, chunk,
                        RANGE_FORWARD);
    }
    if (gate >= 0) {
        const Linear own = linear_columns(in_proj, gate, d);
        linear_forward(proj + gate, in, NULL, &own, layer->matmul);
    }
    sequence_end(layer, layer_chunk(layer, 0));
}

// Returns the chunk's rows of o, from head_o of all ranks. Chunks are called for in order.
static inline bf16* o_to_tokens(const Layer* layer, bf16* o, const bf16* head_o, SequenceChunk chunk) {
    const int64_t d = layer->config->hidden_size;
    if (!layer->heads) return o;
    if (chunk.first == 0) sequence_begin(layer);
    heads_to_tokens(layer, &layer->heads->o, o, d, head_o, chunk, RANGE_FORWARD);
    sequence_end(layer, chunk);
    return chunk_rows(o, chunk, d);
}

// head_o gets the gradient of o, dout, and head_delta delta.
static inline void dout_to_heads(const Layer* layer, bf16* head_o, float* head_delta, bf16* head_dproj,
                                 const bf16* dout, const float* delta) {
    if (!layer->heads) return;
    // dO's blocks are in use until they are sent; delta's, as floats, are behind them in the same scratch
    const HeadColumns *o = &layer->heads->o, *proj = &layer->heads->proj;
    const int64_t tokens = layer->B * layer->T * layer->heads->group.size;
    assert(o->stride + 2 * o->heads <= proj->stride); // a row of head_dproj: 3 dh columns a head, at least
    float* delta_blocks = (float*)(head_dproj + tokens * o->stride);
    head_weights_copy(layer);
    sequence_begin(layer);
    for (int i = 0; i < layer_chunks(layer); i++)
        tokens_to_heads(layer, o, head_o, head_dproj, dout, layer->config->hidden_size, layer_chunk(layer, i),
                        RANGE_BACKWARD);
    delta_to_heads(layer, head_delta, delta_blocks, delta);
    sequence_end(layer, layer_chunk(layer, 0));
}

// din = the gradient of in_proj's input, from dproj, whose columns of heads come from all ranks' head_dproj; with
// those of q, k and v come their FP8 tensor's. The padding of dproj becomes 0.
static inline void heads_to_in_proj(const Layer* layer, bf16* din, bf16* dproj, const bf16* head_dproj,
                                    const Linear* in_proj) {
    if (!layer->heads) {
        linear_backward_input(din, dproj, in_proj, layer->matmul);
        return;
    }
    const int64_t columns = layer->table->proj.rows, stride = in_proj->out_stride, rows = layer->B * layer->T;
    const int64_t d = layer->config->hidden_size, padding = (stride - columns) * (int64_t)sizeof(bf16);
    head_gradients_add(layer);
    if (padding > 0)
        CUDA_CHECK(cudaMemset2DAsync(dproj + columns, (size_t)stride * sizeof(bf16), 0, (size_t)padding,
                                     (size_t)rows, layer->stream));
    sequence_begin(layer);
    for (int i = 0; i < layer_chunks(layer); i++) {
        const SequenceChunk chunk = layer_chunk(layer, i);
        const Linear part = linear_slice(in_proj, chunk.first, layer->B * chunk.tokens);
        bf16* part_dproj = chunk_rows(dproj, chunk, stride);
        heads_to_tokens(layer, &layer->heads->proj, dproj, stride, head_dproj, chunk, RANGE_BACKWARD);
        sequence_end(layer, chunk);
        fp8_convert<FP8_E5M2>(&part.fp8.dout, part_dproj, part.rows, 3 * d, stride, layer->stream);
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

// Queues a copy of the losses [B, T] of whole sequences to the host, from those [B, Tn] of each rank; h may be NULL.
static inline void sequence_download_losses(float* whole, const float* losses, RankHeads* h, int64_t B,
                                            int64_t Tn, cudaStream_t stream) {
    const int64_t bytes = Tn * (int64_t)sizeof(float);
    const SequenceGroup g = h ? h->group : sequence_group(0, 1);
    const PeersMessage message = {losses, 0, 1, B * bytes, B * bytes};
    if (h) peers_send(&h->exchange->peers, &message, stream);
    for (int r = 0; r < g.size; r++)
        copy_rows(whole + r * Tn, bytes * g.size,
                  r == g.rank ? (const void*)losses : peers_inbox(&h->exchange->peers, g.rank, r), bytes,
                  bytes, B, stream);
    if (h) peers_read(&h->exchange->peers, stream);
}
