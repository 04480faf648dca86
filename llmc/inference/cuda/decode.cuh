/*
Attention of decoding, for sequences that a pass extends by one token each:

    o = sum_j softmax_j(q k_j / sqrt(dh) + cum_logf - cum_logf_j) v_j    over all tokens j in its sight

    in    proj [rows, row_stride] and other inputs of kv_append; pages (pages.cuh); order (plan.cuh)
    out   y [rows, NH, dh] after output norm and gate; the new token's q, k, v, cum_logf; the gate's state

One kernel between the projections: kv_append, attention, output norm and gate. Split-KV: the tokens before
the new one are divided over 8 splits of 8 warps, and each split is reduced separately, so a row's bits do not
depend on how many thread blocks compute the splits. (They differ from extend.cuh's.) Heads are assigned to
thread blocks in one of three ways (decode_assignment, decode_launch):

    few heads      a cluster of 1 to 8 blocks has one head, 8 / blocks splits a block
    many heads     a block has all splits of several heads, one after another
    uneven pass    (PassArrays) a cluster has one long head, or each of its blocks one short head

    every warp          q and cum_logf of the new token; its tokens of each of the block's splits
    lane 0 of a warp    issues the bulk copies
    warp 0, block 0     kv_append of q, k, v; the new token's score and value; y
    warp 1, block 0     kv_append of the gate (lane 0)

Pipeline (decode_warp.cuh has the first two lines and the invariants of the ring):

    page table -> registers -> ring of k, v, cum_logf      per warp, across heads; begins before kernel_wait
    ring -> scores -> softmax -> o                         per warp and split, in registers
    lanes -> warp_o, warp_state                            DecodeSoftmax::store
    8 warps -> split_o, split_state of the first block     decode_combine, by all threads
    8 splits and the new token -> y                        decode_output, by warp 0 of the first block

Invariants of a launch and of a cluster:

1. Before kernel_wait a block reads only extend_plan's lists and what earlier passes wrote: order, sequences,
   page table, pages, the gate's state, the last token. It writes no global memory.
2. The gate's state is updated (decode_store_gate) after every warp has read it: each block's first `arrive`
   follows the read, the update follows `wait`, and __syncthreads where a block has the whole head.
3. A block stores to the first block's shared memory after the first `wait`: all blocks have then started.
4. The first block reads split_o and split_state after the second `wait`, which follows all blocks' stores. A
   cluster of several blocks has one head, so nothing there is overwritten.
5. A block with several heads overwrites warp_o after the __syncthreads that follows decode_combine of the
   warps, and split_o after the next head's first __syncthreads, which warp 0 reaches after decode_output. The
   last elements of split_o and split_state are warp 0's alone.

Called by layers.cuh, on Hopper and later GPUs with as much shared memory (decode_runs).
*/
#pragma once

#include <algorithm>
#include "decode_warp.cuh"
#include "path.h"

// A cluster has up to DECODE_MAX_HEADS heads, one a lane. Unless the pass is uneven, lane n of cluster i has
// head n clusters + (i + n DECODE_HEAD_SHIFT) % clusters. Without the shift a cluster would often have the
// same head of many sequences, and unequal work, as heads differ in how much they forget.
enum { DECODE_MAX_HEADS = 32, DECODE_HEAD_SHIFT = 101 };

// Length of a decoded sequence, in tokens, from which on a pass may be uneven
enum { DECODE_UNEVEN_TOKENS = 8192 };

// ----------------------------------------------------------------------------
// which heads and splits a block computes

// A block's share: splits first_split, .., first_split + splits - 1 of each of its heads. arrive, wait: the
// two halves of the barrier of the blocks that share a head; store: to the first such block's shared memory.
// With one block a head both are local.
struct DecodeAssignment {
    int first_split, splits;
    int head; // the lane's, as sequence NH + head; -1: none

    __device__ int rank() const { return first_split / splits; } // of the block in its cluster
    __device__ bool is_whole() const { return splits == DECODE_SPLITS; }
    __device__ void arrive() const {
        if (!is_whole()) cluster_arrive();
    }
    __device__ void wait() const {
        if (!is_whole()) cluster_wait();
    }
    __device__ void store(float* to, float x) const {
        if (is_whole())
            *to = x;
        else
            cluster_store(to, x);
    }
};

__device__ static inline DecodeAssignment decode_assignment(const DecodeArgs& a, int lane) {
    int clusters = (int)gridDim.x / a.blocks, cluster = (int)blockIdx.x / a.blocks;
    int block = (int)blockIdx.x % a.blocks, splits = DECODE_SPLITS / a.blocks;
    int heads = a.pass.num_sequences * (int)a.pages.NH;
    const int* order = a.order.heads;
    if (!order) {
        int head = lane * clusters + (cluster + lane * DECODE_HEAD_SHIFT) % clusters;
        return {block * splits, splits, head < heads ? head : -1};
    }
    int2 counts = *a.order.counts;
    if (cluster < counts.x) return {block * splits, splits, lane == 0 ? order[cluster] : -1};
    int i = (cluster - counts.x) * a.blocks + block;
    return {0, DECODE_SPLITS, lane == 0 && i < counts.y ? order[heads - 1 - i] : -1};
}

// ----------------------------------------------------------------------------
// a head

template <int DH, bool GATE, bool GROUPED> struct DecodeWarp {
    const DecodeArgs& a;
    DecodeShared<DH>& shared;
    const int lane, warp;
    const DecodeAssignment block;
    DecodeLookup<DH, GROUPED> lookup;
    DecodeRing<DH, GATE, GROUPED> ring;
    DecodeSoftmax<DH, GATE> softmax;
    DecodeHead now; // the head that is computed

    // Starts the first copies.
    __device__ void start() {
        ring.init(shared, block.splits, warp, lane);
        lookup.start();
        for (int i = 0; i < ring.num_stages(); i++) copy((ring.stage + i) & (ring.num_stages() - 1));
    }
    // Starts copying the next tile, of this head or of the next one, to stage `to`.
    __device__ void copy(int to) {
        DecodeTile tile = lookup.next();
        if (tile.keys >= 0 && lane == 0) ring.copy(to, tile);
    }
    // Main loop of a warp, for one head; the steps around it are in decode_head:
    //
    //     q and cum_logf of the new token;  warp 0 of the first block: kv_append, its score and value
    //     for each of the block's splits:                                                             run
    //         for each tile of the warp in the split (32 tokens, 16 at dh 128):
    //             wait for the tile's bulk copy
    //             scores = K q, with q in all 8 columns;  gate;  tokens that the row does not see get -inf
    //             raise row_max and rescale o;  o += V^T p, with p as bf16 high and low part in two columns
    //             start copying the warp's next tile into the stage, of this head or of the next
    //         reduce lanes: o, row_max, row_sum to shared memory
    //     __syncthreads, cluster barrier;  reduce 8 warps to split_o of the first block;  cluster barrier
    //     warp 0 of the first block: reduce 8 splits and the new token;  output norm, output gate;  store y
    //
    // Forgotten pages and the window only move the first tile (now.visible): nothing before it is copied.
    __device__ void run() {
        int iterations = lookup.num_iterations(now);
        softmax.visible = now.visible;
        softmax.position = now.own.position;
        softmax.clear();
        for (int split = 0; split < block.splits; split++) {
            for (int i = 0; i < iterations; i++) {
                int first = lookup.first_token(now, block.first_split + split, i);
                if (first < now.own.position) {
                    ring.wait();
                    softmax.add(ring.stages[ring.stage], first);
                    __syncwarp(); // all lanes have read the stage (decode_warp.cuh, 3)
                    copy(ring.stage);
                    ring.advance();
                }
            }
            softmax.store(shared.warp_o(split, warp), &shared.warp_state[split][warp]);
        }
    }
};

// By warp 0 of the first block: stores the new token's score and value as the last element of split_state and
// split_o.
template <int DH>
__device__ static inline void decode_add_new_token(DecodeShared<DH>& shared, const Raw8& q, const Raw8& k,
                                                   const Raw8& v, const HeadThread& me) {
    int lane = (int)threadIdx.x % 32;
    float a[8], b[8], score = 0;
    unpack8(a, q);
    unpack8(b, k);
    for (int i = 0; i < 8; i++) score += a[i] * b[i];
    score = head_sum(score, me) * AttentionScale<DH>::SCALE;
    if (lane == 0) shared.split_state[DECODE_SPLITS] = {score, 1};
    unpack8(b, v);
    if (lane < me.lanes) store8(&shared.split_o[DECODE_SPLITS][me.channel], b);
}

// By one thread, after all warps have read the gate's state: appends the new token's gate and updates the
// state.
template <bool GROUPED>
static __device__ inline void decode_store_gate(const DecodeArgs& a, const DecodeHead& now, double cum_logf) {
    double2* state = a.pages.gates + pages_gate(a.pages, now.own.slot, a.append.layer, now.h);
    double2 before = now.own.position > 0 ? *state : double2{};
    double weights = 1 + exp(cum_logf - before.x) * before.y; // the difference is exact
    kv_append_gate_store<GROUPED>(a.pages, a.append, now.own, now.h, now.own.position, cum_logf, weights);
    *state = {cum_logf, weights};
}

// Reduces N partial softmaxes: states, and one channel of their o, elements o[0], o[stride], ..
template <int N>
__device__ static inline DecodeRowState decode_combine(float* channel, const DecodeRowState* states,
                                                       const float* o, int stride) {
    DecodeRowState all = {states[0].row_max, 0};
    for (int i = 1; i < N; i++) all.row_max = fmaxf(all.row_max, states[i].row_max);
    *channel = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float factor = exp2_approx(states[i].row_max - all.row_max);
        all.row_sum += factor * states[i].row_sum;
        *channel += factor * o[i * stride];
    }
    return all;
}

// By one warp of the first block: stores y, from all splits and the new token.
template <int DH>
__device__ static inline void decode_output(const DecodeArgs& a, const DecodeShared<DH>& shared, int64_t row,
                                            const ExtendOutputPrefetch& prefetched, const HeadThread& me) {
    float o[8];
    for (int i = 0; i < 8; i++) {
        const float* channel = shared.split_o[0] + me.channel + i;
        DecodeRowState all = decode_combine<DECODE_SPLITS + 1>(&o[i], shared.split_state, channel, DH);
        o[i] /= all.row_sum;
    }
    unpack8(o, pack8(o)); // as attention_forward rounds it
    extend_output(a.out, o, (row * a.pages.NH + me.head) * DH + me.channel, prefetched, me);
}

// Computes head w.now. first: this call also calls kernel_wait, before it reads what this pass wrote.
template <int DH, bool GATE, bool GROUPED>
__device__ static inline void decode_head(DecodeWarp<DH, GATE, GROUPED>& w, const HeadThread& me,
                                          bool first) {
    const DecodeArgs& a = w.a;
    DecodeShared<DH>& shared = w.shared;
    PassRows own = w.now.own;
    bool is_first_block = w.block.rank() == 0, appends = is_first_block && w.warp == 0;
    KvAppendRow rows[3] = {{0, own.begin, own}, {1, own.begin, own}, {2, own.begin, own}};
    KvAppendPrefetch prefetched[3] = {kv_append_prefetch<GROUPED>(a.pages, a.append, rows[0], me)};
    HeadThread key = me; // of the head of keys, which the first query head of its group appends
    if (GROUPED) key.head = me.head / a.pages.group;
    for (int kind = 1; appends && kind < 3; kind++)
        prefetched[kind] = kv_append_prefetch<GROUPED>(a.pages, a.append, rows[kind], key);
    double cum_logf = GATE && own.position > 0
                          ? a.pages.gates[pages_gate(a.pages, own.slot, a.append.layer, me.head)].x
                          : 0;
    if (first) kernel_wait();

    Raw8 q = kv_append_value<GROUPED>(a.pages, a.append, rows[0], prefetched[0], me);
    w.softmax.cum_logf = cum_logf;
    if (GATE)
        w.softmax.cum_logf += pages_round_logf(forget_gate_logf(forget_gate_logit(
            a.append.gate, (int64_t)own.begin * a.append.row_stride + me.head, a.append.bias[me.head])));
    w.softmax.set_q(shared.q[w.warp], q);
    w.block.arrive(); // the gate's state has been read (invariant 2)
    if (appends) {
        HeadThread once = me, key_once = key;
        once.active = w.lane < DH / 8;
        key_once.active = once.active && (!GROUPED || me.head % a.pages.group == 0);
        Raw8 k = kv_append_value<GROUPED>(a.pages, a.append, rows[1], prefetched[1], key);
        Raw8 v = kv_append_value<GROUPED>(a.pages, a.append, rows[2], prefetched[2], key);
        kv_append_store<GROUPED>(a.pages, a.append, rows[0], q, once);
        kv_append_store<GROUPED>(a.pages, a.append, rows[1], k, key_once);
        kv_append_store<GROUPED>(a.pages, a.append, rows[2], v, key_once);
        decode_add_new_token(shared, q, k, v, me);
    }
    w.run();

    ExtendOutputPrefetch output = {};
    if (appends) output = extend_output_prefetch(a.out, own.begin, me);
    __syncthreads();
    w.block.wait(); // all blocks have started and have read the gate's state (invariants 2, 3)
    for (int i = (int)threadIdx.x; i < w.block.splits * DH; i += 32 * DECODE_WARPS) {
        float o;
        int n = i / DH, split = w.block.first_split + n;
        const float* channel = shared.warp_o(n, 0) + i % DH;
        DecodeRowState state = decode_combine<DECODE_WARPS>(&o, shared.warp_state[n], channel, DH);
        w.block.store(&shared.split_o[split][i % DH], o);
        if (i % DH == 0) w.block.store(&shared.split_state[split].row_max, state.row_max);
        if (i % DH == 0) w.block.store(&shared.split_state[split].row_sum, state.row_sum);
    }
    w.block.arrive();
    if (GATE && is_first_block && w.warp == 1 && w.lane == 0)
        decode_store_gate<GROUPED>(a, w.now, w.softmax.cum_logf);
    if (w.block.is_whole()) __syncthreads();
    w.block.wait(); // all splits are in the first block's shared memory (invariant 4)
    if (appends) decode_output(a, shared, own.begin, output, me);
}

// GROUPED: several query heads read one head of keys. Without, no instruction is spent on groups.
template <int DH, bool GATE, bool GROUPED>
__global__ static void __launch_bounds__(32 * DECODE_WARPS, DH == 64 ? 2 : 1)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(1024) char shared_bytes[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, NH = (int)a.pages.NH;
    DecodeAssignment block = decode_assignment(a, lane);
    DecodeWarp<DH, GATE, GROUPED> w = {.a = a,
                                       .shared = *(DecodeShared<DH>*)shared_bytes,
                                       .lane = lane,
                                       .warp = warp,
                                       .block = block,
                                       .lookup = {a, lane, warp, block.first_split, block.splits},
                                       .ring = {a},
                                       .softmax = {lane},
                                       .now = {}};
    DecodeHead head = {};
    if (block.head >= 0) head = {a.pass.sequences[block.head / NH], block.head % NH, 0};
    w.lookup.prefetch(head);
    w.start();
    if (w.lookup.heads == 0) kernel_wait();
    for (unsigned left = w.lookup.heads; left; left &= left - 1) {
        w.now = w.lookup.head_of(__ffs((int)left) - 1);
        decode_head(w, extend_head_thread<DH>(w.now.h), left == w.lookup.heads);
    }
}

// ----------------------------------------------------------------------------
// launch

template <int DH, bool GATE, bool GROUPED>
static inline void decode_launch(DecodeArgs* a, cudaStream_t stream) {
    int64_t heads = a->pass.num_sequences * a->pages.NH, blocks = DECODE_SPLITS;
    int64_t num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
    int64_t resident = (DH == 64 ? 2 : 1) * num_sms;
    bool uneven = a->order.heads;
    // As many blocks a head as fit at once, so that few heads occupy all SMs. In an uneven pass long heads
    // always have several. Its grid has a cluster for each head, as all may be long: most of its blocks may
    // have no work, hence the limit of 8 times the resident blocks.
    int64_t min_blocks = uneven ? 2 : 1, max_grid = (uneven ? 8 : 1) * resident;
    while (blocks > min_blocks && heads * blocks > max_grid) blocks /= 2;
    int64_t clusters = std::min(heads, std::max(resident, ceil_div<int64_t>(heads, DECODE_MAX_HEADS)));
    if (blocks > 1) clusters = heads;
    int64_t splits = DECODE_SPLITS / (uneven ? 1 : blocks), grid = clusters * blocks;
    a->blocks = (int)blocks;
    a->stages = decode_stages<DH>(uneven && grid <= num_sms);
    launch_clusters(decode_kernel<DH, GATE, GROUPED>, a->blocks, dim3((unsigned)grid), 32 * DECODE_WARPS,
                    DecodeShared<DH>::bytes(splits, a->stages), stream, *a);
}

template <bool GROUPED> static inline void decode_launch_of(DecodeArgs* a, cudaStream_t stream) {
    const bool gate = a->pages.cum_logf;
    (a->pages.dh == 64 ? gate ? decode_launch<64, true, GROUPED> : decode_launch<64, false, GROUPED>
     : gate ? decode_launch<128, true, GROUPED>
                       : decode_launch<128, false, GROUPED>)(a, stream);
}

// Whether decode_attention computes the sequences of a pass that have one row. True without a GPU.
static inline bool decode_runs(void) {
    static int runs = -1;
    if (runs < 0 && !device_exists()) runs = 1;
    if (runs < 0) {
        const int64_t needed = std::max(DecodeShared<64>::bytes(DECODE_SPLITS, DECODE_MAX_STAGES),
                                        DecodeShared<128>::bytes(DECODE_SPLITS, DECODE_MAX_STAGES));
        cudaFuncAttributes kernel;
        CUDA_CHECK(cudaFuncGetAttributes(&kernel, decode_kernel<64, true, false>));
        runs = decode_runs_of(kernel.ptxVersion, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                              needed);
    }
    return runs;
}

// Appends a layer's rows that are their sequence's only ones in the pass, and computes their attention. Only
// where decode_runs, or where the pass has no such rows.
static inline void decode_attention(const ExtendOutput* out, const KvAppend* append, const ExtendLayer* layer,
                                    cudaStream_t stream) {
    const Pages* p = layer->pages;
    if (layer->pass->num_decoded == 0) return;
    Range range("attention", RANGE_FORWARD, stream);
    DecodeArgs a = {.pages = *p, .append = *append, .pass = *layer->pass, .out = *out};
    if (layer->pass->is_uneven) a.order = extend_layer_order(&layer->work->order, p, layer->index);
    (p->group > 1 ? decode_launch_of<true> : decode_launch_of<false>)(&a, stream);
}
