/*
Assignment of heads to ranks, where ranks share sequences and train a model that prunes. Gates of unequal
reach leave heads unequal work, and the rank with the most work makes the others wait. So a table has a row
for each layer, which the end of each step computes from the blocks of attention that the step's passes kept
(sequence_assign_heads, llmc/sequence/split.h). Every rank has the weights of all heads: a new table moves no
weights.

    assignment  int [L, N, KVH/N]  heads of each rank (split.h); at first those of sequence_head
    kept        [L, NH/N]          blocks kept of the rank's own query heads, as PruningCount counts them
    all_kept    [L, KVH]           blocks kept of all heads, summed over all ranks: all groups have one table

    main stream    step begins: kept = 0  |  passes: pruning adds to kept  |
                   update: kept -> all_kept, summed over ranks -> assignment

Invariants, each with the line that keeps it:

 1. All ranks of a run have the same table.                 assignment_sums sums integers over all ranks, and
                                                            sequence_assign_heads has a rule for ties
 2. All passes of a step, and what they recompute, read     assign_heads is queued behind them on the main stream,
    one table.                                              which has joined the stream of weight gradients
 3. A resumed run, which has no counts of the step          the trainer does not call assignment_open then
    before, gives the same bits with --deterministic.

Without assignment_open, and in a model that does not prune, RankHeads.assignment is NULL: the heads are
sequence_head's. Layers with a halo (halo.cuh) count nothing, so their row stays.

Called by rank_major.cuh, which reads the table, by mixer.cuh, whose heads count blocks, and by the GPU
trainer, at both ends of a step. An error of CUDA ends the program.
*/
#pragma once

#include "context.cuh"

// The layer's row of the table; NULL: no table.
static inline const int* head_assignment(const Layer* layer) {
    const RankHeads* h = rank_heads(layer);
    return h->assignment ? h->assignment + layer->l * config_key_heads(layer->config) : NULL;
}

// [NH/N] counters to which pruning adds the blocks kept of the rank's query heads; NULL: not counted.
static inline unsigned long long* head_kept(const Layer* layer) {
    const RankHeads* h = rank_heads(layer);
    return h->kept && !layer->recomputing ? h->kept + layer->l * rank_query_heads(h) : NULL;
}

// Allocates the table if ranks share sequences and the model prunes. sequence_close frees it.
static inline void assignment_open(RankHeads* h, const Config* c) {
    if (h->group.size <= 1 || !config_prunes(c)) return;
    const int ranks = h->group.size, heads = h->o.heads;
    const size_t L = (size_t)c->num_hidden_layers, KVH = (size_t)config_key_heads(c);
    assert(ranks <= SEQUENCE_MAX_RANKS);
    int* host = (int*)xcalloc(L * KVH, sizeof *host);
    for (size_t l = 0; l < L; l++)
        for (int at = 0; at < (int)KVH; at++)
            host[l * KVH + (size_t)at] = (int)sequence_head(at / heads, ranks, at % heads);
    h->layers = (int)L;
    h->assignment = (int*)device_bytes(L * KVH * sizeof *host);
    h->kept = (unsigned long long*)device_zeros(L * (size_t)rank_query_heads(h) * sizeof *h->kept);
    h->all_kept = (unsigned long long*)device_zeros(L * KVH * sizeof *h->all_kept);
    CUDA_CHECK(cudaMemcpy(h->assignment, host, L * KVH * sizeof *host, cudaMemcpyHostToDevice));
    free(host);
}

// Called before the first pass of a step: zeroes the counters of all layers.
static inline void assignment_begin_step(const Layer* layer) {
    const RankHeads* h = rank_heads(layer);
    if (!h->assignment) return;
    CUDA_CHECK(cudaMemsetAsync(h->kept, 0, (size_t)(h->layers * rank_query_heads(h)) * sizeof *h->kept,
                               layer->stream));
}

// Thread (l, rank, i) writes all_kept of a rank's i-th head: the sum of `kept` if the rank is this one, else
// 0.
__global__ static void __launch_bounds__(256) assignment_collect_kernel(const __grid_constant__ RankHeads h) {
    const int n = (int)(blockIdx.x * 256 + threadIdx.x), heads = h.o.heads, KVH = heads * h.group.size;
    if (n >= h.layers * KVH) return;
    const int l = n / KVH, rank = n % KVH / heads, i = n % heads;
    unsigned long long sum = 0;
    for (int q = 0; q < h.o.queries && rank == h.group.rank; q++)
        sum += h.kept[(l * heads + i) * h.o.queries + q];
    h.all_kept[l * KVH + h.assignment[n]] = sum;
}

static inline void assignment_collect(const RankHeads* h, cudaStream_t main) {
    CUDA_LAUNCH(assignment_collect_kernel, ceil_div(h->layers * h->o.heads * h->group.size, 256), 256, main,
                *h);
}

// One thread block a layer
__global__ static void assignment_kernel(const __grid_constant__ RankHeads h) {
    const int row = (int)blockIdx.x * h.group.size * h.o.heads;
    sequence_assign_heads(h.assignment + row, h.all_kept + row, h.group.size, h.o.heads);
}

// Computes the table of the next step from all_kept, summed over ranks.
static inline void assign_heads(const RankHeads* h, cudaStream_t main) {
    CUDA_LAUNCH(assignment_kernel, h->layers, 1, main, *h);
}

// Called at the end of a step: exchange_sums of the stats and of the PruningCounts of L layers (NULL: none),
// with the sum of all_kept in the same NCCL group; then computes the next table.
static inline void assignment_sums(const RankHeads* h, Exchange* e, StepStats* stats, PruningCount* counts,
                                   int64_t L, cudaStream_t main) {
    unsigned long long* counters = (unsigned long long*)counts;
    const int64_t n = counts ? 2 * L : 0;
    if (!h->assignment) return exchange_sums(e, stats, counters, n, main);
    assignment_collect(h, main);
    nccl_group_begin();
    exchange_sums(e, stats, counters, n, main);
    nccl_sum(e, h->all_kept, h->all_kept, h->layers * h->o.heads * h->group.size, main);
    nccl_group_end();
    assign_heads(h, main);
}
