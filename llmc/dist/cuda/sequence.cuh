/*
The exchange around attention between GPUs that share sequences (llmc/model/sequence.h, --sequence-ranks): tokens
are split between them outside attention, heads within.

    forward     in_proj ----> proj  --in_proj_to_heads->  head_proj   shift, QK norm, RoPE, gate, attention
                o_proj  <---- o     <--o_to_tokens---   head_o
    backward    dy -> dO, delta     --dout_to_heads-->  head_o, head_delta
                dproj   <---------- <--dproj_to_tokens--  head_dproj

    proj, dproj           bf16 [B, T/N, row stride] of all heads, and the output gate
    o, din                bf16 [B, T/N, NH, dh]
    head_proj, head_dproj bf16 [B, T, stride] of the rank's heads (HeadColumns)
    head_o                bf16 [B, T, NH/N, dh]: o, then its gradient
    head_delta            float [B, NH/N, T]

Blocks of rows travel by copy engines, through peers of the group's own (peers.cuh), on a stream of their own, in
the same order on all ranks of a group. What runs beside them: the output gate's GEMM beside proj, and the weight
gradients of gate_proj and o_proj, which have a stream, beside dO. peers_send puts a number that grows with each
message into a wait, which a CUDA graph would repeat: passes of ranks that share sequences are not captured.

    main stream       GEMM of all but the gate | GEMM of the gate | wait | shift, QK norm, RoPE, ...
                      `ready` |                                     ^ `done`
    exchange's stream         split -> copies -> rows of the inboxes |

Which heads a rank has may change from step to step (deal.cuh).

Where layer->heads is NULL the exchanges of a pass return at once, but for in_proj_to_heads, which attention then
does not call: their tensors are the same ones on both sides. Called by attention, for losses by the GPU trainer,
and for inference by prompt.cuh. An error of CUDA ends the program; a message that never comes is ended by the
watch (llmc/dist/watch.h).
*/
#pragma once

#include "../../cuda/device.cuh"
#include "exchange.cuh"
#include "heads.cuh"

typedef struct SequenceExchange {
    World* world;
    Peers peers;
    cudaStream_t stream;
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
    CUDA_CHECK(cudaStreamCreateWithPriority(&h->exchange->stream, cudaStreamNonBlocking, greatest));
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

// Collective: connects the ranks that share sequences, behind the exchange of all; rows: of the rank's own tokens in a
// pass, at most. NULL: each rank has sequences of its own. Dies where the GPUs of a group do not reach one another.
static inline RankHeads* sequence_open(World* world, const Config* c, const ParamTable* table,
                                       const SequenceGroup* group, int64_t rows, const Exchange* all) {
    if (group->size == 1) return NULL;
    RankHeads* h = rank_heads_new(c, table, *group);
    h->exchange->world = world;
    h->exchange->all = all;
    if (!peers_open(&h->exchange->peers, world, group->size, sequence_message_bytes(&h->proj, rows)))
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
    CUDA_CHECK(cudaStreamDestroy(h->exchange->stream));
    CUDA_CHECK(cudaEventDestroy(h->exchange->ready));
    CUDA_CHECK(cudaEventDestroy(h->exchange->done));
    free(h->exchange);
    free(h);
}

// ----------------------------------------------------------------------------
// tokens to heads, heads to tokens

// The stream of exchanges; one kernel after another: the main stream.
static inline cudaStream_t sequence_stream(const Layer* layer) {
    return layer->sequential ? layer->stream : layer->heads->exchange->stream;
}

// What is queued on the exchange's stream from now on follows what is on the main stream, and the other way round.
static inline void sequence_begin(const Layer* layer) {
    CUDA_CHECK(cudaEventRecord(layer->heads->exchange->ready, layer->stream));
    CUDA_CHECK(cudaStreamWaitEvent(sequence_stream(layer), layer->heads->exchange->ready, 0));
}
static inline void sequence_end(const Layer* layer) {
    CUDA_CHECK(cudaEventRecord(layer->heads->exchange->done, sequence_stream(layer)));
    const SequenceExchange* e = layer->heads->exchange;
    if (e->all)
        exchange_wait(e->all, e->done, 0, layer->stream);
    else
        CUDA_CHECK(cudaStreamWaitEvent(layer->stream, e->done, 0));
}

// heads [B, T, stride] of the rank gets, of all tokens, the columns of its heads, from x, the whole rows of each
// rank's own tokens. blocks: scratch of as many elements as `heads`.
static inline void tokens_to_heads(const Layer* layer, const HeadColumns* columns, bf16* heads, bf16* blocks,
                                   const bf16* x, int64_t x_stride, RangePass pass) {
    const cudaStream_t stream = sequence_stream(layer);
    Range range("exchange of sequences", pass, stream);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const HeadRows rows = head_rows(columns, head_deal(layer), x_stride, layer->B, layer->T);
    const int64_t row = layer->T * columns->stride, bytes = row * (int64_t)sizeof(bf16),
                  all = bytes * g->size;
    HeadBlocks to = {.own_stride = row * g->size, .rank = g->rank};
    for (int r = 0; r < g->size; r++)
        to.rows[r] = r == g->rank ? heads + r * row : blocks + r * layer->B * row;
    heads_split(&to, x, &rows, stream);
    const PeersMessage message = {blocks, layer->B * bytes, layer->B, bytes, bytes};
    peers_send(peers, &message, stream);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank)
            copy_rows(heads + r * row, all, peers_inbox(peers, g->rank, r), bytes, bytes, layer->B, stream);
    peers_read(peers, stream);
}

// The columns of all heads of x, whole rows of the rank's own tokens, from `heads` of all ranks.
static inline void heads_to_tokens(const Layer* layer, const HeadColumns* columns, bf16* x, int64_t x_stride,
                                   const bf16* heads, RangePass pass) {
    const cudaStream_t stream = sequence_stream(layer);
    Range range("exchange of sequences", pass, stream);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const HeadRows rows = head_rows(columns, head_deal(layer), x_stride, layer->B, layer->T);
    const int64_t row = layer->T * columns->stride, bytes = row * (int64_t)sizeof(bf16);
    const PeersMessage message = {heads, bytes, layer->B, bytes, bytes * g->size};
    peers_send(peers, &message, stream);
    HeadBlocks from = {.own_stride = row * g->size, .rank = g->rank};
    for (int r = 0; r < g->size; r++)
        from.rows[r] =
            r == g->rank ? (bf16*)(uintptr_t)heads + r * row : (bf16*)peers_inbox(peers, g->rank, r);
    heads_join(x, &from, &rows, stream);
    peers_read(peers, stream);
}

// head_delta [B, NH/N, T] from delta [B, NH, T/N] of all ranks. blocks: scratch of as many elements as head_delta.
static inline void delta_to_heads(const Layer* layer, float* head_delta, float* blocks, const float* delta) {
    const cudaStream_t stream = sequence_stream(layer);
    Range range("exchange of sequences", RANGE_BACKWARD, stream);
    const SequenceGroup* g = &layer->heads->group;
    Peers* peers = &layer->heads->exchange->peers;
    const int heads = layer->heads->o.heads;
    const int64_t rows = layer->B * heads, T = layer->T, bytes = T * (int64_t)sizeof(float);
    const DeltaRows split = {
        .deal = head_deal(layer), .rank = g->rank, .ranks = g->size, .heads = heads, .B = layer->B, .Tn = T};
    delta_split(head_delta, blocks, delta, &split, stream);
    const PeersMessage message = {blocks, rows * bytes, 1, rows * bytes, rows * bytes};
    peers_send(peers, &message, stream);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank)
            copy_rows(head_delta + r * T, bytes * g->size, peers_inbox(peers, g->rank, r), bytes, bytes, rows,
                      stream);
    peers_read(peers, stream);
}

// ----------------------------------------------------------------------------
// the exchanges of a pass. head_dproj is free until the backward pass writes it: scratch of what is sent

// proj = in_proj(in), and head_proj from all ranks. What heads read is computed first, and travels while the output
// gate's columns, which stay here, are computed.
static inline void in_proj_to_heads(const Layer* layer, bf16* head_proj, bf16* head_dproj, bf16* proj,
                                    const bf16* in, const Linear* in_proj) {
    const int64_t gate = params_column(layer->table, P_OGATE_PROJ), d = layer->config->hidden_size;
    const int64_t first = gate < 0 ? in_proj->N : gate, rest = in_proj->N - first - d; // before and behind it
    const Linear before = linear_columns(in_proj, 0, first);
    linear_forward(proj, in, NULL, &before, layer->matmul);
    if (rest > 0) {
        const Linear behind = linear_columns(in_proj, first + d, rest);
        linear_forward(proj + first + d, in, NULL, &behind, layer->matmul);
    }
    head_weights_copy(layer);
    sequence_begin(layer);
    tokens_to_heads(layer, &layer->heads->proj, head_proj, head_dproj, proj, in_proj->out_stride,
                    RANGE_FORWARD);
    if (gate >= 0) {
        const Linear own = linear_columns(in_proj, gate, d);
        linear_forward(proj + gate, in, NULL, &own, layer->matmul);
    }
    sequence_end(layer);
}

static inline void o_to_tokens(const Layer* layer, bf16* o, const bf16* head_o) {
    if (!layer->heads) return;
    sequence_begin(layer);
    heads_to_tokens(layer, &layer->heads->o, o, layer->config->hidden_size, head_o, RANGE_FORWARD);
    sequence_end(layer);
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
    tokens_to_heads(layer, o, head_o, head_dproj, dout, layer->config->hidden_size, RANGE_BACKWARD);
    delta_to_heads(layer, head_delta, delta_blocks, delta);
    sequence_end(layer);
}

// dproj gets the gradients of its heads' columns, and with them those of q, k and v its FP8 tensor; its padding
// becomes 0.
static inline void dproj_to_tokens(const Layer* layer, bf16* dproj, const bf16* head_dproj) {
    if (!layer->heads) return;
    const int64_t columns = layer->table->proj.rows, stride = matmul_padded(columns);
    head_gradients_add(layer);
    sequence_begin(layer);
    heads_to_tokens(layer, &layer->heads->proj, dproj, stride, head_dproj, RANGE_BACKWARD);
    if (stride > columns)
        CUDA_CHECK(cudaMemset2DAsync(dproj + columns, (size_t)stride * sizeof(bf16), 0,
                                     (size_t)(stride - columns) * sizeof(bf16), (size_t)(layer->B * layer->T),
                                     sequence_stream(layer)));
    sequence_end(layer);
    if (!layer->fp8) return;
    const Fp8Tensor dproj8 = layer_in_proj(layer).fp8.dout;
    fp8_convert<FP8_E5M2>(&dproj8, dproj, layer->B * layer->T, 3 * layer->config->hidden_size, stride,
                          layer->stream);
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
