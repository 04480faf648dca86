/*
Which heads each rank has, where ranks share sequences and train a model that prunes. Gates of unequal reach leave heads
unequal work, and the rank with the most makes the others wait. So each layer has a row of a table, which the end of
each step writes anew from the blocks of attention that the step's passes have kept (sequence_deal,
llmc/sequence/split.h). Every rank has the weights of all heads: another table moves none.

    deal      int [L, N, NH/N]   heads of each rank; at first those of sequence_head
    kept      [L, NH/N]          blocks of the rank's own heads, as PruningCount counts them
    all_kept  [L, NH]            blocks of all heads, summed over all ranks: groups that share sequences have one table

    main stream    begin: kept = 0 | passes: pruning adds to kept | update: kept -> all_kept, sum over ranks -> deal

Invariants, each with the line that keeps it:

 1. All ranks of a run have the same table.                 integer sums over all ranks in deal_sums; sequence_deal
                                                            decides ties
 2. All passes of a step, and what they recompute, read     deal_heads is queued on the main stream behind them,
    one table.                                              which has joined the stream of weight gradients
 3. A resumed run, which has no counts of the step          the trainer does not call deal_open then
    before, gives the same bits with --deterministic.

Without deal_open, and where nothing is pruned, RankHeads.deal is NULL: the heads of sequence_head.

Called by order.cuh, which reads the table, by mixer.cuh, whose heads count blocks, and by the GPU trainer, once a step.
*/
#pragma once

#include "context.cuh"

// The layer's row of the table; NULL: there is none.
static inline const int* head_deal(const Layer* layer) {
    const RankHeads* h = rank_heads(layer);
    return h->deal ? h->deal + layer->l * layer->config->num_heads : NULL;
}

// [heads] where pruning counts the blocks of the rank's heads; NULL: nowhere.
static inline unsigned long long* head_kept(const Layer* layer) {
    const RankHeads* h = rank_heads(layer);
    return h->kept && !layer->recomputing ? h->kept + layer->l * h->o.heads : NULL;
}

// Gives the heads of ranks that share sequences a table, if the model prunes. sequence_close frees it.
static inline void deal_open(RankHeads* h, const Config* c) {
    if (h->group.size <= 1 || !config_prunes(c)) return;
    const int ranks = h->group.size, heads = h->o.heads;
    const size_t L = (size_t)c->num_hidden_layers, NH = (size_t)c->num_heads;
    assert(ranks <= SEQUENCE_MAX_RANKS);
    int* host = (int*)xcalloc(L * NH, sizeof *host);
    for (size_t l = 0; l < L; l++)
        for (int at = 0; at < (int)NH; at++)
            host[l * NH + (size_t)at] = (int)sequence_head(at / heads, ranks, at % heads);
    h->layers = (int)L;
    h->deal = (int*)device_bytes(L * NH * sizeof *host);
    h->kept = (unsigned long long*)device_zeros(L * (size_t)heads * sizeof *h->kept);
    h->all_kept = (unsigned long long*)device_zeros(L * NH * sizeof *h->all_kept);
    CUDA_CHECK(cudaMemcpy(h->deal, host, L * NH * sizeof *host, cudaMemcpyHostToDevice));
    free(host);
}

// Before the first pass of a step.
static inline void deal_begin_step(const RankHeads* h, cudaStream_t main) {
    if (!h->deal) return;
    CUDA_CHECK(cudaMemsetAsync(h->kept, 0, (size_t)(h->layers * h->o.heads) * sizeof *h->kept, main));
}

// Thread (l, rank, i): all_kept of head i of a rank is `kept` of this rank's heads, 0 of others'.
__global__ static void __launch_bounds__(256) deal_collect_kernel(const __grid_constant__ RankHeads h) {
    const int n = (int)(blockIdx.x * 256 + threadIdx.x), heads = h.o.heads, NH = heads * h.group.size;
    if (n >= h.layers * NH) return;
    const int l = n / NH, rank = n % NH / heads, i = n % heads;
    h.all_kept[l * NH + h.deal[n]] = rank == h.group.rank ? h.kept[l * heads + i] : 0;
}

static inline void deal_collect(const RankHeads* h, cudaStream_t main) {
    CUDA_LAUNCH(deal_collect_kernel, ceil_div(h->layers * h->o.heads * h->group.size, 256), 256, main, *h);
}

// Thread block: a layer.
__global__ static void deal_kernel(const __grid_constant__ RankHeads h) {
    const int row = (int)blockIdx.x * h.group.size * h.o.heads;
    sequence_deal(h.deal + row, h.all_kept + row, h.group.size, h.o.heads);
}

// The table of the next step, from all_kept of all ranks.
static inline void deal_heads(const RankHeads* h, cudaStream_t main) {
    CUDA_LAUNCH(deal_kernel, h->layers, 1, main, *h);
}

// At the end of a step: exchange_sums of the stats and the PruningCounts of L layers, NULL: none; in the same group of
// NCCL's the sum of all_kept; then the next table.
static inline void deal_sums(const RankHeads* h, Exchange* e, StepStats* stats, PruningCount* counts,
                             int64_t L, cudaStream_t main) {
    unsigned long long* counters = (unsigned long long*)counts;
    const int64_t n = counts ? 2 * L : 0;
    if (!h->deal) return exchange_sums(e, stats, counters, n, main);
    deal_collect(h, main);
    nccl_group_begin();
    exchange_sums(e, stats, counters, n, main);
    nccl_sum(e, h->all_kept, h->all_kept, h->layers * h->o.heads * h->group.size, main);
    nccl_group_end();
    deal_heads(h, main);
}
