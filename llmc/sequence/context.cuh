/*
State of the mixer of shared sequences (mixer.cuh) besides activations: the heads of this rank with copies of
their weights, and the connection to the other ranks of its group.

A model has one SequenceMixer for all layers, Layer.mixer_context. If sequences are not shared it is all zero,
or its group has size 1.

    sequence_new    sizes alone, no device memory: for the plan
    sequence_open   collective: allocates memory and streams, connects the ranks
    sequence_share  collective: maps the tensors that the other ranks write to
    sequence_close  collective: frees all

Called by the other files of this room and by the GPU trainer. An error of CUDA, and GPUs that do not reach
one another, end the program with a message.
*/
#pragma once

#include <initializer_list>
#include "../cuda/device.cuh"
#include "../exchange/exchange.cuh"
#include "../layers/attention_layer.cuh"
#include "split.h"

// Weights of attention that have a rank-major copy (rank_major.cuh)
typedef enum { RANK_MAJOR_IN_PROJ, RANK_MAJOR_O_PROJ, RANK_MAJOR_OUTPUT_NORM, NUM_RANK_MAJOR } RankMajor;

// The heads of this rank, and copies of weights. All layers share these buffers.
typedef struct {
    SequenceGroup group;
    HeadColumns proj, o;
    bf16* weights[NUM_RANK_MAJOR];   // rank-major copies of the weights of all heads
    float* dweights[NUM_RANK_MAJOR]; // their gradients; NULL without a backward pass
    bf16* norms[2];      // [NH/N, dh], [KVH/N, dh] QK norm's weights for q and k, of the rank's heads
    float* dnorms[2];    // their gradients
    float *bias, *dbias; // [NH/N] the gate's bias and its gradient
    int* assignment; // [layers, KVH] which heads a rank has (assignment.cuh); NULL: those of sequence_head in
                     // all layers
    int layers;      // of assignment
    unsigned long long* kept;     // [layers, NH/N] blocks of the step in progress; NULL without assignment
    unsigned long long* all_kept; // [layers, KVH] of all heads, summed over ranks at the step's end
} RankHeads;

typedef struct {
    World* world; // NULL: connected to no other rank
    Peers peers;
    int chunks;              // number of chunks of the largest pass
    cudaStream_t out, in;    // copies to other ranks; copies of the rank's own part, and waits for the others
    cudaEvent_t ready, done; // ready: the main stream before an exchange; done: the exchange
    const Exchange* all;     // of all ranks: its clock counts the main stream's waits, and it tells where the
                             // network has failed; NULL: no clock
} SequenceExchange;

// What halo.cuh keeps
typedef struct {
    int64_t always; // tokens of a halo that every layer has, whatever its gates; 0: gates decide. For tests
    bool possible;  // a pass may have a halo; false once the longest one is known to have none
    bool* taken;    // [layers] whether the last forward pass had a halo; on the host
    int32_t *suffices, *answers; // on the device this rank's answer; [ranks] on the host those of all
    cudaEvent_t answered;
} SequenceHalos;

typedef struct {
    RankHeads heads;
    SequenceExchange exchange;
    SequenceHalos halos;
    const AttentionFunctions* attention;
} SequenceMixer;

// Number of ranks that share a sequence; 1: each has its own.
static inline int sequence_ranks(const SequenceMixer* s) {
    return s->heads.group.size > 1 ? s->heads.group.size : 1;
}

static inline SequenceMixer* sequence_of(const Layer* layer) { return (SequenceMixer*)layer->mixer_context; }
static inline const RankHeads* rank_heads(const Layer* layer) { return &sequence_of(layer)->heads; }

// NH/N, the query heads of the rank
static inline int rank_query_heads(const RankHeads* h) { return h->o.heads * h->o.queries; }

// ----------------------------------------------------------------------------
// opening and closing

static inline SequenceMixer sequence_new(const Config* c, const ParamTable* table, const SequenceGroup* group,
                                         const AttentionFunctions* attention) {
    SequenceMixer s = {};
    s.heads.group = *group;
    s.attention = attention;
    if (sequence_ranks(&s) == 1) return s;
    s.heads.proj = head_columns_of_proj(table, c, group->size);
    s.heads.o = head_columns_of_o(c, group->size);
    s.halos.possible = true;
    return s;
}

// Creates streams and events, and allocates the weights of the rank's own heads.
static inline void sequence_allocate(SequenceMixer* s) {
    RankHeads* h = &s->heads;
    SequenceExchange* e = &s->exchange;
    const size_t queries = (size_t)rank_query_heads(h), channels = (size_t)h->o.columns;
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&e->out, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&e->in, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&e->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&e->done, cudaEventDisableTiming));
    for (int k = 0; k < 2; k++) {
        h->norms[k] = (bf16*)device_zeros(channels * sizeof(bf16));
        h->dnorms[k] = (float*)device_zeros(channels * sizeof(float));
    }
    h->bias = (float*)device_zeros(queries * sizeof(float));
    h->dbias = (float*)device_zeros(queries * sizeof(float));
}

// Collective: connects the ranks that share sequences; `all` is open already. A pass has at most B sequences,
// and `tokens` tokens of each are the rank's own. Ends the program if the GPUs of a group do not reach one
// another.
static inline void sequence_open(SequenceMixer* s, World* world, int64_t B, int64_t tokens,
                                 const Exchange* all) {
    const int ranks = sequence_ranks(s);
    if (ranks == 1) return;
    sequence_allocate(s);
    s->exchange.world = world;
    s->exchange.all = all;
    s->exchange.chunks = sequence_chunks(B, tokens);
    if (!peers_open(&s->exchange.peers, world, ranks, sequence_message_bytes(B, tokens)))
        die("--sequence-ranks %d: the GPUs of a group must be on one host and reach one another's memory "
            "(nvidia-smi topo -p2p r tells), and NCCL_P2P_DISABLE must not be set",
            ranks);
}

// Collective: lets the other ranks write to these tensors of the mixer, in all layers. tensors: those of
// layer 0; NULL: the pass has no such tensor.
static inline void sequence_share(const Layer* layer, std::initializer_list<const void*> tensors) {
    SequenceExchange* e = &sequence_of(layer)->exchange;
    if (!e->world) return;
    for (int i = 0; i < layer->mixer->count; i++)
        for (const void* tensor : tensors)
            if (tensor && tensor == layer->mixer->rows[i].data)
                peers_share(&e->peers, e->world, layer->mixer->rows[i].data,
                            activations_row_bytes(layer->mixer, i, layer->config->num_hidden_layers));
}

// Collective: frees what sequence_open has opened.
static inline void sequence_close(SequenceMixer* s) {
    RankHeads* h = &s->heads;
    SequenceExchange* e = &s->exchange;
    if (!e->out) return;
    if (e->world) peers_close(&e->peers, e->world);
    if (s->halos.answered) CUDA_CHECK(cudaEventDestroy(s->halos.answered));
    if (s->halos.answers) device_host_free(s->halos.answers);
    device_free(s->halos.suffices);
    free(s->halos.taken);
    void* const buffers[] = {h->norms[0], h->norms[1],   h->dnorms[0], h->dnorms[1], h->bias,
                             h->dbias,    h->assignment, h->kept,      h->all_kept};
    for (void* buffer : buffers) device_free(buffer);
    for (int i = 0; i < NUM_RANK_MAJOR; i++) {
        device_free(h->weights[i]);
        device_free(h->dweights[i]);
    }
    CUDA_CHECK(cudaStreamDestroy(e->out));
    CUDA_CHECK(cudaStreamDestroy(e->in));
    CUDA_CHECK(cudaEventDestroy(e->ready));
    CUDA_CHECK(cudaEventDestroy(e->done));
}
