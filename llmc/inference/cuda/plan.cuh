/*
The work of a pass, listed on the device once for all layers:

    items    (tile of up to 16 rows, head, partition of its pages) of extend.cuh
    order    long and short heads of decode.cuh, in an uneven pass

Split-KV: a tile's pages are divided into partitions of extend_partition_pages, each one item with partial
results of its own, and extend_combine_kernel reduces them in one order. The borders of tiles and partitions
are positions of the sequence, so a row's bits do not depend on what else is in its pass.

The lists depend on lengths and on forgotten pages, launches do not: a CUDA graph of a pass can be replayed
while sequences grow.
*/
#pragma once

#include "pages.cuh"

enum { EXTEND_TILE = 16, EXTEND_PARTITION_PAGES = 16, EXTEND_PLAN_THREADS = 1024 };

// Number of pages of a partition, for rows that see `pages` pages: small enough to occupy the GPU with few
// sequences, large enough to have few partitions to combine with long ones.
__host__ __device__ static inline int extend_partition_pages(int pages) {
    int size = 2;
    while (size < EXTEND_PARTITION_PAGES && 16 * size < pages) size *= 2;
    return size;
}
__host__ __device__ static inline int extend_num_partitions(int pages) {
    return (pages + extend_partition_pages(pages) - 1) / extend_partition_pages(pages);
}

// Number of partial results that a row at `position` has at most, for one head: in a layer of this window, and with
// `narrower` in those with narrower ones. Fewer pages may have more partitions: 32 have 16, 33 have 9.
static inline int64_t extend_partials(int64_t window, bool narrower, int64_t position) {
    const int pages = (int)(position / PAGE_TOKENS) + 1 - pages_window_first(window, position);
    const int partials = extend_num_partitions(pages), most = extend_num_partitions(pages < 32 ? pages : 32);
    return narrower && most > partials ? most : partials;
}

// One tile, head and partition: pages first, .., first + count - 1 of the head
typedef struct __align__(16) {
    int pair, slot;  // pair: tile NH + head
    int first_count; // first << 5 | count
    int partial;     // index of the first row's partial results; the next row's follow
}
ExtendItem;
// One tile and head
typedef struct __align__(8) {
    int partial, partitions; // partial: index of the first partition's first row; other partitions follow it
}
ExtendPair;

// Number of tokens that a row sees from which on its decoded head is long
enum { DECODE_LONG_HEAD_TOKENS = 2048 };

// Decoded heads of an uneven pass, as sequence NH + head: long ones from the first element on, short ones
// from element num_sequences NH - 1 backwards
typedef struct {
    int* heads;   // [layers, slots NH]
    int2* counts; // [layers] numbers of long and of short ones
} DecodeOrder;

__host__ __device__ static inline DecodeOrder extend_layer_order(const DecodeOrder* order, const Pages* p,
                                                                 int64_t layer) {
    return {order->heads + layer * p->slots * p->NH, order->counts + layer};
}

// The lists of all layers, and the partial results of one layer at a time
typedef struct {
    int64_t max_items, max_pairs;
    ExtendItem* items;   // [layers, max_items]
    int* num_items;      // [layers]
    ExtendPair* pairs;   // [layers, max_pairs]
    float* partial_o;    // [max_items, dh] sum_j 2^(x_j - row_max) v_j
    float2* partial_sum; // [max_items] row_max, row_sum = sum_j 2^(x_j - row_max)
    DecodeOrder order;   // of decode.cuh
} ExtendWork;

// One layer of a pass
typedef struct {
    int64_t index;
    const Pages* pages;
    const ExtendWork* work;
    const PassArrays* pass;
} ExtendLayer;

// Inclusive prefix sum over the threads of the block. sums [32] is shared memory.
__device__ static inline int64_t extend_scan(int64_t x, int64_t* sums) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        int64_t before = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += before;
    }
    __syncthreads(); // the sums of an earlier call have been read
    if (lane == 31) sums[warp] = x;
    __syncthreads();
    for (int i = 0; i < warp; i++) x += sums[i];
    return x;
}

// Lists layer l's decoded heads. sums [32] and total are shared memory; total is 0 before and after.
__device__ static inline void extend_plan_order(const DecodeOrder& order, const Pages& p,
                                                const PassArrays& pass, int64_t l, int64_t* sums,
                                                int64_t* total) {
    int NH = (int)p.NH, pairs = pass.num_sequences * NH;
    for (int begin = 0; begin < pairs; begin += (int)blockDim.x) {
        int pair = begin + (int)threadIdx.x;
        int64_t mine = 0; // upper half: one long head; lower half: one short head
        if (pair < pairs) {
            PassRows sequence = pass.sequences[pair / NH];
            int forgotten = p.forgotten[pages_query_head(p, sequence.slot, l, pair % NH)];
            int first = max(forgotten, pages_window_first(pages_window(p, l), sequence.position));
            bool is_long = sequence.position - first * PAGE_TOKENS >= DECODE_LONG_HEAD_TOKENS;
            if (sequence.end - sequence.begin == 1) mine = is_long ? (int64_t)1 << 32 : 1;
        }
        int64_t end = extend_scan(mine, sums) + *total;
        if (mine == 1)
            order.heads[pairs - (int)end] = pair;
        else if (mine)
            order.heads[(end >> 32) - 1] = pair;
        __syncthreads(); // all threads have read total
        if (threadIdx.x == blockDim.x - 1) *total = end;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *order.counts = make_int2((int)(*total >> 32), (int)*total);
        *total = 0;
    }
    __syncthreads();
}

// Block l: layer l's forgotten pages, then its order, items and pairs. `mine`: items in the upper half,
// partial results in the lower.
__global__ static void __launch_bounds__(EXTEND_PLAN_THREADS)
    extend_plan_kernel(const __grid_constant__ ExtendWork work, const __grid_constant__ Pages p,
                       const __grid_constant__ PassArrays pass) {
    __shared__ int64_t sums[32], total;
    int64_t l = blockIdx.x, NH = p.NH, pairs = pass.num_tiles * NH;
    for (int64_t i = threadIdx.x; i < pass.num_sequences * p.KVH; i += blockDim.x) {
        PassRows sequence = pass.sequences[i / p.KVH];
        pages_advance_head(p, sequence.slot, l * p.KVH + i % p.KVH, sequence.position);
    }
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (pass.is_uneven) extend_plan_order(extend_layer_order(&work.order, &p, l), p, pass, l, sums, &total);
    for (int64_t begin = 0; begin < pairs; begin += blockDim.x) {
        int64_t pair = begin + threadIdx.x, mine = 0;
        PassRows tile = {};
        int window = 0; // first page of the tile's window, from which the pages below are counted
        int pages = 0, size = 1, first = 0, partitions = 0;
        if (pair < pairs) {
            tile = pass.tiles[pair / NH];
            window = pages_window_first(pages_window(p, l), tile.position);
            pages = tile.position / PAGE_TOKENS + 1 - window;
            size = extend_partition_pages(pages);
            first = max(p.forgotten[pages_query_head(p, tile.slot, l, (int)(pair % NH))] - window, 0);
            partitions = (pages + size - 1) / size - first / size;
            mine = (int64_t)partitions << 32 | (partitions * (tile.end - tile.begin));
        }
        int64_t end = extend_scan(mine, sums) + total;
        int item = (int)((end - mine) >> 32), partial = (int)(end - mine);
        __syncthreads(); // all threads have read total
        if (threadIdx.x == blockDim.x - 1) total = end;
        if (pair < pairs) work.pairs[l * work.max_pairs + pair] = {partial, partitions};
        for (int i = first / size; i < first / size + partitions; i++) {
            int page = max(i * size, first), count = min((i + 1) * size, pages) - page;
            work.items[l * work.max_items + item++] = {(int)pair, tile.slot, (window + page) << 5 | count,
                                                       partial};
            partial += tile.end - tile.begin;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) work.num_items[l] = (int)(total >> 32);
}

// Writes work's lists of all layers and p->forgotten of the pass's slots.
static inline void extend_plan(const ExtendWork* work, const Pages* p, const PassArrays* pass,
                               cudaStream_t stream) {
    Range range("attention", RANGE_FORWARD, stream);
    // Not launch_after: kernels after it read its lists and the pass's arrays before their kernel_wait
    // (launch.cuh).
    CUDA_LAUNCH(extend_plan_kernel, p->layers, EXTEND_PLAN_THREADS, stream, *work, *p, *pass);
}
