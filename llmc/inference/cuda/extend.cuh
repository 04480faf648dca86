/*
Attention of a pass over the cache, of sequences with several rows in it: each row over the keys up to its
own,

    o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + cum_logf_i - cum_logf_j) v_j  over j <= i, j in i's window

    extend_plan        lists the work of all layers, and the long and short heads of decode.cuh: once a pass
    extend_attention   a layer's partial results, one a unit of pages; their sum; output norm and gate

A sequence's only row in a pass is computed by decode.cuh on Hopper, elsewhere or where rows skip pages here.

Memory bounds decoding: pages are read once. A tile is 1 to 16 rows of one sequence that see the same pages,
for one head; an item is the pages of a tile that lie in one unit (extend_partition_pages). Each warp works alone:
it takes items from the list, one page after another through its own two stages in shared memory, by cp.async
and mma.sync as sm80_forward.cuh. While it computes a page, the next one is in flight, be it of another item.
The grid does not depend on lengths, so that a CUDA graph can be replayed while sequences grow.

A row's bits depend on its own sequence alone, not on how many rows these kernels have of a pass: a tile's and
a unit's borders are positions, row_max is the maximum, and units are added up in one order.

Called by the GPU trainer.
*/
#pragma once

#include "../../attention/attention.cuh"
#include "../../layers/output_gate.cuh"
#include "pages.cuh"

enum { EXTEND_TILE = 16, EXTEND_PARTITION_PAGES = 16, EXTEND_PLAN_THREADS = 1024 };

// Pages of a unit, for rows whose window has `pages` pages: enough units for few sequences, not too many for
// long ones.
__host__ __device__ static inline int extend_partition_pages(int pages) {
    int unit = 2;
    while (unit < EXTEND_PARTITION_PAGES && 16 * unit < pages) unit *= 2;
    return unit;
}
__host__ __device__ static inline int extend_num_partitions(int pages) {
    return (pages + extend_partition_pages(pages) - 1) / extend_partition_pages(pages);
}

// Partial results of a row at `position`, for one head, at most.
static inline int64_t extend_partials(int64_t window, int64_t position) {
    return extend_num_partitions((int)(position / PAGE_TOKENS) + 1 - pages_window_first(window, position));
}

// Pages first, first + 1, ... of a tile's head
typedef struct __align__(16) {
    int pair, slot;  // tile NH + head
    int first_count; // first << 5 | count
    int partial;     // of the tile's first row; the next row's follows
}
ExtendItem;
typedef struct __align__(8) {
    int partial, units; // of the first unit; a unit's rows follow the unit before
}
ExtendPair;

// A decoded head is long if its row looks at so many tokens.
enum { DECODE_LONG_HEAD_TOKENS = 2048 };

// Decoded heads, sequence NH + head, of an uneven pass: the long ones from the first element on, the short
// ones from element sequences NH - 1 backwards
typedef struct {
    int* heads;   // [layers, slots NH]
    int2* counts; // [layers] long ones, short ones
} DecodeOrder;

__host__ __device__ static inline DecodeOrder extend_layer_order(const DecodeOrder* order, const Pages* p,
                                                                 int64_t layer) {
    return {order->heads + layer * p->slots * p->NH, order->counts + layer};
}

// The work of a pass: arrays for all layers.
typedef struct {
    int64_t max_items, max_pairs;
    ExtendItem* items;   // [layers, max_items]
    int* num_items;      // [layers]
    ExtendPair* pairs;   // [layers, max_pairs]
    float* partial_o;    // [max_items, dh] sum of 2^(x - max) v, of one layer at a time
    float2* partial_sum; // [max_items] max and sum of 2^(x - max)
    DecodeOrder order;   // of decode.cuh
} ExtendWork;

// A layer of a pass
typedef struct {
    int64_t index;
    const Pages* pages;
    const ExtendWork* work;
    const PassArrays* pass;
} ExtendLayer;

// ----------------------------------------------------------------------------
// plan

// Inclusive sum over the threads of the block. sums [32] is shared memory.
__device__ static inline int64_t extend_scan(int64_t x, int64_t* sums) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        int64_t before = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += before;
    }
    __syncthreads(); // a previous call's sums have been read
    if (lane == 31) sums[warp] = x;
    __syncthreads();
    for (int i = 0; i < warp; i++) x += sums[i];
    return x;
}

// Layer l's order. sums [32] and total are shared memory; total is 0 before and after.
__device__ static inline void extend_plan_order(const DecodeOrder& order, const Pages& p,
                                                const PassArrays& pass, int64_t l, int64_t* sums,
                                                int64_t* total) {
    int NH = (int)p.NH, pairs = pass.num_sequences * NH;
    for (int begin = 0; begin < pairs; begin += (int)blockDim.x) {
        int pair = begin + (int)threadIdx.x;
        int64_t mine = 0; // a long head in the upper half, a short one in the lower
        if (pair < pairs) {
            PassRows sequence = pass.sequences[pair / NH];
            int forgotten = p.forgotten[pages_slot_head(p, sequence.slot, l, pair % NH)];
            int first = max(forgotten, pages_window_first(p.window, sequence.position));
            bool is_long = sequence.position - first * PAGE_TOKENS >= DECODE_LONG_HEAD_TOKENS;
            if (sequence.end - sequence.begin == 1) mine = is_long ? (int64_t)1 << 32 : 1;
        }
        int64_t end = extend_scan(mine, sums) + *total;
        if (mine == 1)
            order.heads[pairs - (int)end] = pair;
        else if (mine)
            order.heads[(end >> 32) - 1] = pair;
        __syncthreads(); // all have read total
        if (threadIdx.x == blockDim.x - 1) *total = end;
        __syncthreads();
    }
    if (threadIdx.x == 0) *order.counts = make_int2((int)(*total >> 32), (int)*total), *total = 0;
    __syncthreads();
}

// Block l: layer l's forgotten pages, then its order, items and pairs.
__global__ static void __launch_bounds__(EXTEND_PLAN_THREADS)
    extend_plan_kernel(const __grid_constant__ ExtendWork work, const __grid_constant__ Pages p,
                       const __grid_constant__ PassArrays pass) {
    __shared__ int64_t sums[32], total;
    int64_t l = blockIdx.x, NH = p.NH, pairs = pass.num_tiles * NH;
    for (int64_t i = threadIdx.x; i < pass.num_sequences * NH; i += blockDim.x) {
        PassRows sequence = pass.sequences[i / NH];
        pages_advance_head(p, sequence.slot, l * NH + i % NH, sequence.position);
        if (p.norms)
            pages_seal(p, sequence.slot, l * NH + i % NH, sequence.position,
                       sequence.position + sequence.end - sequence.begin);
    }
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (pass.is_uneven) extend_plan_order(extend_layer_order(&work.order, &p, l), p, pass, l, sums, &total);
    for (int64_t begin = 0; begin < pairs; begin += blockDim.x) {
        int64_t pair = begin + threadIdx.x, mine = 0;
        PassRows tile = {};
        int window = 0, pages = 0, unit = 1, first = 0,
            units = 0; // window: its first page; the rest from there
        if (pair < pairs) {
            tile = pass.tiles[pair / NH];
            window = pages_window_first(p.window, tile.position);
            pages = tile.position / PAGE_TOKENS + 1 - window, unit = extend_partition_pages(pages);
            first = max(p.forgotten[pages_slot_head(p, tile.slot, l, pair % NH)] - window, 0);
            units = (pages + unit - 1) / unit - first / unit;
            mine = (int64_t)units << 32 | (units * (tile.end - tile.begin));
        }
        int64_t end = extend_scan(mine, sums) + total;
        int item = (int)((end - mine) >> 32), partial = (int)(end - mine);
        __syncthreads(); // all have read total
        if (threadIdx.x == blockDim.x - 1) total = end;
        if (pair < pairs) work.pairs[l * work.max_pairs + pair] = {partial, units};
        for (int u = first / unit; u < first / unit + units; u++) {
            int page = max(u * unit, first), count = min((u + 1) * unit, pages) - page;
            work.items[l * work.max_items + item++] = {(int)pair, tile.slot, (window + page) << 5 | count,
                                                       partial};
            partial += tile.end - tile.begin;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) work.num_items[l] = (int)(total >> 32);
}

// Writes the items, pairs and order of all layers, and p->forgotten of the pass's slots.
static inline void extend_plan(const ExtendWork* work, const Pages* p, const PassArrays* pass,
                               cudaStream_t stream) {
    Range range("attention", RANGE_FORWARD, stream);
    // Not by launch_after, as the copy of the pass's arrays is before it. Kernels behind it may wait for it.
    CUDA_LAUNCH(extend_plan_kernel, p->layers, EXTEND_PLAN_THREADS, stream, *work, *p, *pass);
}

// ----------------------------------------------------------------------------
// results

// What a layer's attention computes. y = output gate(output norm(o)), where the model has them.
typedef struct {
    bf16* y;          // [rows, NH, dh]
    const bf16* o;    // [rows, NH, dh] of the rows that prefill_attention has computed
    OutputGate gate;  // rstd is not written
    int64_t gate_row; // elements of gate.gate from row to row
} ExtendOutput;

// What a thread reads for its eight channels of y.
struct ExtendOutputPrefetch {
    Raw8 logits, weight;
};
__device__ static inline ExtendOutputPrefetch extend_output_prefetch(const ExtendOutput& out, int64_t row,
                                                                     const HeadThread& me) {
    ExtendOutputPrefetch ahead = {};
    int column = me.head * me.dh + me.channel;
    if (out.gate.gate) ahead.logits = load_raw8(out.gate.gate + row * out.gate_row + column);
    if (out.gate.weight) ahead.weight = load_raw8(out.gate.weight + column);
    return ahead;
}

// Writes eight channels of y at `at`, from o. Called by all lanes of a warp, which have a head as in
// head_sum; the first ones store.
__device__ static inline void extend_output(const ExtendOutput& out, float o[8], int64_t at,
                                            const ExtendOutputPrefetch& ahead, const HeadThread& me) {
    output_gate_token(o, out.gate, (float)out.gate.eps, ahead.logits, ahead.weight, me);
    if ((int)threadIdx.x % 32 < me.lanes) store16(out.y + at, pack8(o));
}

// What becomes of a layer's partial results.
struct ExtendCombine {
    ExtendOutput out;
    const float* partial_o;
    const float2* partial_sum;
    const ExtendPair* pairs; // of the layer
    PassArrays pass;
    int NH;
};

// o of a row and head from its partial results, eight channels of it. One warp, whose lanes are DH / 8 times
// several groups; each group has every GROUPS-th unit.
template <int DH>
__device__ static inline void extend_combine_row(float o[8], const ExtendCombine& a, int tile, int row,
                                                 int h) {
    constexpr int LANES = DH / 8, GROUPS = 32 / LANES;
    int lane = (int)threadIdx.x % 32;
    PassRows rows = a.pass.tiles[tile];
    ExtendPair pair = a.pairs[tile * a.NH + h];
    int count = rows.end - rows.begin;
    int64_t first = pair.partial + row - rows.begin;
    float max = -INFINITY, sum = 0;
    for (int u = lane; u < pair.units; u += 32) max = fmaxf(max, a.partial_sum[first + u * count].x);
    max = warp_max(max);
    for (int i = 0; i < 8; i++) o[i] = 0;
#pragma unroll 4
    for (int u = lane / LANES; u < pair.units; u += GROUPS) {
        int64_t at = first + u * count;
        float2 of_unit = a.partial_sum[at];
        const float* from = a.partial_o + at * DH + lane % LANES * 8;
        Pack4 low = load16(from), high = load16(from + 4);
        float weight = exp2_approx(of_unit.x - max);
        sum += weight * of_unit.y;
        for (int i = 0; i < 4; i++) o[i] += weight * low[i], o[i + 4] += weight * high[i];
    }
    for (int step = LANES; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        for (int i = 0; i < 8; i++) o[i] += __shfl_xor_sync(~0u, o[i], step);
    }
    for (int i = 0; i < 8; i++) o[i] /= sum;
}

// y of a row and head from o, or from the row's partial results if it has a tile. One warp.
template <int DH>
__device__ static inline void extend_combine_head(const ExtendCombine& a, int tile, int row, int h) {
    constexpr int LANES = DH / 8;
    HeadThread me = {h, (int)threadIdx.x % LANES * 8, LANES, DH, 1.0f / DH, true};
    int64_t at = ((int64_t)row * a.NH + h) * DH + me.channel;
    ExtendOutputPrefetch ahead = extend_output_prefetch(a.out, row, me);
    float x[8];
    if (tile >= 0) {
        extend_combine_row<DH>(x, a, tile, row, h);
        unpack8(x, pack8(x)); // as attention_forward rounds it
    } else {
        unpack8(x, load_raw8(a.out.o + at));
    }
    extend_output(a.out, x, at, ahead, me);
}

// ----------------------------------------------------------------------------
// attention

// Shared memory of a warp
template <int DH> struct ExtendShared {
    bf16 q[2][EXTEND_TILE * DH], k[2][PAGE_TOKENS * DH], v[2][PAGE_TOKENS * DH];
    double cum_logf[2][PAGE_TOKENS];
    AttentionAccInit<PAGE_TOKENS>
        acc_init; // sqrt(dh) (anchor - cum_logf_j), the anchor is the page's last key
};
enum { EXTEND_MAX_WARPS = 6 };

struct ExtendArgs {
    const bf16* q;          // [rows, NH, dh]
    const double* cum_logf; // [rows, NH]; NULL: no gate
    Pages pages;
    const PassRows* tiles;
    const ExtendItem* items; // of the layer
    const int* num_items;
    float* partial_o;
    float2* partial_sum;
    int64_t layer;
};

// An item and what is loaded ahead of it
struct ExtendItemState {
    ExtendItem item;
    PassRows tile;
    int page;         // lane i: page i of the item
    int skipped;      // pages of the item that are not read: all rows skip them
    int row_first[2]; // the first page of the item that the lane's rows see
};

template <int DH, bool GATE> struct ExtendWarp {
    static constexpr int NS = PAGE_TOKENS / 8;
    static constexpr float ROOT = AttentionScale<DH>::ROOT, SCALE = AttentionScale<DH>::SCALE;
    typedef Sm80Softmax<DH, 1, 0> Softmax;

    const ExtendArgs& a;
    ExtendShared<DH>& shared;
    int lane;

    __device__ static int count(const ExtendItemState& s) { return s.item.first_count & 31; }
    __device__ int head(const ExtendItemState& s) const { return s.item.pair % (int)a.pages.NH; }

    __device__ ExtendItem item(int64_t n, int total) const { return n < total ? a.items[n] : ExtendItem{}; }

    // Starts loading what belongs to s.item.
    __device__ void load(ExtendItemState& s) const {
        if (count(s) == 0) return;
        s.tile = a.tiles[s.item.pair / (int)a.pages.NH];
        int64_t at = pages_slot_head(a.pages, s.item.slot, a.layer, head(s));
        if (lane < count(s))
            s.page = a.pages.table[at * a.pages.table_width + (s.item.first_count >> 5) + lane];
        s.skipped = s.row_first[0] = s.row_first[1] = 0;
    }
    // Finds the pages that the rows skip (pages.cuh). The item's last page is always read, though not seen.
    __device__ void skip(ExtendItemState& s) const {
        if (!GATE || !a.pages.norms || count(s) == 0) return;
        int first = s.item.first_count >> 5, rows = s.tile.end - s.tile.begin;
        float norm = 0;
        double logsum = 0;
        if (lane < count(s))
            norm = sqrtf(__uint_as_float(a.pages.page_norms[s.page])), logsum = a.pages.page_logsum[s.page];
        s.skipped = count(s) - 1;
        for (int row = 0; row < rows; row++) {
            int64_t at = (s.tile.begin + row) * a.pages.NH + head(s);
            float2 squares = ((const float2*)a.pages.norms)[at]; // of q and k
            double reach = sqrtf(squares.x) * (norm + sqrtf(squares.y)) / ROOT;
            bool sealed = (first + lane + 1) * PAGE_TOKENS + PAGES_UNSEALED <= s.tile.position + row;
            bool skips = lane < count(s) && sealed && reach + logsum + a.cum_logf[at] < a.pages.log_tolerance;
            int pages = __ffs(~__ballot_sync(~0u, skips)) - 1;
            if (row % 8 == lane / 4) s.row_first[row / 8] = pages;
            s.skipped = min(s.skipped, pages);
        }
    }
    // Starts copying the tile's queries.
    __device__ void copy_queries(const ExtendItemState& s, int q_stage) const {
        constexpr int CHUNKS = DH / 8;
        uint32_t to = smem_address(shared.q[q_stage]);
#pragma unroll
        for (int c = lane; c < EXTEND_TILE * CHUNKS; c += 32) {
            int row = c / CHUNKS;
            bool exists = row < s.tile.end - s.tile.begin;
            int64_t from = (s.tile.begin + (exists ? row : 0)) * a.pages.NH + head(s);
            cp_async16(to + (uint32_t)sm80_chunk_offset<DH>(row, c % CHUNKS),
                       a.q + from * DH + c % CHUNKS * 8, exists);
        }
    }
    __device__ void copy_keys(const ExtendItemState& s, int i, int stage) const {
        int64_t page = __shfl_sync(~0u, s.page, i);
        copy_page(shared.k[stage], a.pages.k + page * PAGE_TOKENS * DH);
        if (GATE)
            cp_async16(smem_address(shared.cum_logf[stage] + 2 * lane),
                       a.pages.cum_logf + page * PAGE_TOKENS + 2 * lane, true);
    }
    __device__ void copy_values(const ExtendItemState& s, int i, int stage) const {
        int64_t page = __shfl_sync(~0u, s.page, i);
        copy_page(shared.v[stage], a.pages.v + page * PAGE_TOKENS * DH);
    }
    // Starts copying page i of an item, with the tile's queries if it is the first one read. Two groups: what
    // the scores need, and the values.
    __device__ void copy(const ExtendItemState& s, int i, int stage, int q_stage) const {
        bool exists = i < count(s);
        if (exists && i == s.skipped) copy_queries(s, q_stage);
        if (exists) copy_keys(s, i, stage);
        cp_async_commit_group();
        if (exists) copy_values(s, i, stage);
        cp_async_commit_group();
    }
    __device__ void copy_page(bf16* to, const bf16* from) const {
        uint32_t address = smem_address(to) + (uint32_t)lane * 16;
#pragma unroll
        for (int i = 0; i < PAGE_TOKENS * DH / 8; i += 32)
            cp_async16(address + (uint32_t)i * 16, from + (i + lane) * 8, true);
    }

    // cum_logf of the lane's rows
    struct RowGate {
        double cum_logf[2];
    };
    __device__ RowGate row_gate(const ExtendItemState& s) const {
        RowGate g = {};
        for (int r = 0; GATE && r < 2; r++) {
            int row = s.tile.begin + min(r * 8 + lane / 4, s.tile.end - s.tile.begin - 1);
            g.cum_logf[r] = a.cum_logf[row * a.pages.NH + head(s)];
        }
        return g;
    }

    // Adds one page. `own`: the first row's token in the page, -1: it is none of the rows'. `hidden`: the
    // tokens before the first row's window; of the next row it is one more. skips: the lane's rows that skip
    // the page.
    __device__ void page(Softmax& softmax, const RowGate& gate, int stage, int q_stage, int own, int rows,
                         int hidden, const bool (&skips)[2]) {
        float s[1][NS][4], shift[1][2];
        bool diagonal = own >= 0;
        const double* cum_logf = shared.cum_logf[stage];
        cp_async_wait_group<3>();
        __syncwarp();
        double anchor = cum_logf[PAGE_TOKENS - 1];
        if (GATE && !diagonal) {
            for (int i = 0; i < 2; i++)
                shared.acc_init.set(2 * lane + i, (float)((anchor - cum_logf[2 * lane + i]) * ROOT));
            __syncwarp();
        }
        uint32_t acc_init = smem_address(shared.acc_init.pair + lane % 4);
        sm80_matmul_abt<DH>(s, sm80_lane_a<DH>(shared.q[q_stage], lane),
                            sm80_lane_b<DH>(shared.k[stage], lane), [&](float(&c)[4], int, int n) {
                                c[0] = c[1] = c[2] = c[3] = 0;
                                if (GATE && !diagonal)
                                    sm80_load_shared(c, acc_init + (uint32_t)(n * 4 * sizeof(float4)));
                            });
        if (diagonal)
            sm80_for_each(s, [&](float& x, int, int half, int row, int column) {
                x *= SCALE;
                if (GATE) x += (float)((gate.cum_logf[half] - cum_logf[column]) * ATTENTION_LOG2E);
                if (column > own + row) x = -INFINITY;
            });
        if (hidden + rows > 1)
            sm80_for_each(s, [&](float& x, int, int, int row, int column) {
                if (column < hidden + row) x = -INFINITY;
            });
        for (int r = 0; GATE && r < 2; r++)
            for (int n = 0; skips[r] && n < NS; n++) s[0][n][2 * r] = s[0][n][2 * r + 1] = -INFINITY;
        float factor = diagonal ? 1 : SCALE;
        for (int r = 0; r < 2; r++)
            shift[0][r] = GATE && !diagonal ? (float)((gate.cum_logf[r] - anchor) * ATTENTION_LOG2E) : 0;
        softmax.rescale(s, factor, shift);
        for (int r = 0; r < 2; r++) shift[0][r] -= softmax.row_max[0][r];

        cp_async_wait_group<2>();
        __syncwarp();
        if (diagonal) { // values that are not written yet: their weight is 0, but they may be anything
            for (int c = (own + rows) * (DH / 8) + lane; c < PAGE_TOKENS * DH / 8; c += 32)
                store16(shared.v[stage] + c * 8, Raw8{});
            __syncwarp();
        }
        uint32_t lane_v = sm80_lane_a<DH>(shared.v[stage], lane);
#pragma unroll
        for (int n = 0; n < NS; n += 2) softmax.add(s, n, factor, shift, sm80_advance<DH>(lane_v, n * 8, 0));
        __syncwarp(); // the stage may be overwritten
    }

    __device__ void store(const Softmax& softmax, const ExtendItemState& s) const {
        for (int r = 0; r < 2; r++) {
            int row = r * 8 + lane / 4;
            float sum = quad_sum(softmax.row_sum[0][r]);
            if (row >= s.tile.end - s.tile.begin) continue;
            int64_t partial = s.item.partial + row;
            if (lane % 4 == 0) a.partial_sum[partial] = make_float2(softmax.row_max[0][r], sum);
            float2* o = (float2*)(a.partial_o + partial * DH) + lane % 4;
#pragma unroll
            for (int n = 0; n < DH / 8; n++)
                o[4 * n] = make_float2(softmax.acc[0][n][2 * r], softmax.acc[0][n][2 * r + 1]);
        }
    }

    // Items n, n + step, ... The first ones, which the kernel ahead does not write, are loaded while it runs.
    __device__ void run(int64_t n, int64_t step) {
        int total = *a.num_items, stage = 0, q_stage = 0;
        ExtendItemState next = {};
        next.item = item(n, total);
        ExtendItem after = item(n + step, total);
        load(next);
        kernel_wait();
        skip(next);
        copy(next, next.skipped, stage, q_stage);
        while (count(next) > 0) {
            ExtendItemState now = next;
            next.item = after;
            load(next);
            skip(next);
            n += step;
            after = item(n + step, total);
            RowGate gate = row_gate(now);
            Softmax softmax;
            int rows = now.tile.end - now.tile.begin, first = now.item.first_count >> 5;
            for (int i = now.skipped; i < count(now); i++, stage ^= 1) {
                if (i + 1 < count(now))
                    copy(now, i + 1, stage ^ 1, 0);
                else
                    copy(next, next.skipped, stage ^ 1, q_stage ^ 1);
                int position = now.tile.position, begin = (first + i) * PAGE_TOKENS; // of the page
                bool diagonal = first + i == position / PAGE_TOKENS;
                int hidden = a.pages.window ? position - (int)a.pages.window + 1 - begin : -EXTEND_TILE;
                bool skips[2] = {i < now.row_first[0], i < now.row_first[1]};
                page(softmax, gate, stage, q_stage, diagonal ? position % PAGE_TOKENS : -1, rows, hidden,
                     skips);
            }
            q_stage ^= 1;
            store(softmax, now);
        }
        cp_async_wait_all();
    }
};

template <int DH, bool GATE>
__global__ static void __launch_bounds__(32 * EXTEND_MAX_WARPS, 1)
    extend_attention_kernel(const __grid_constant__ ExtendArgs a) {
    extern __shared__ __align__(1024) char shared_bytes[];
    int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    ExtendWarp<DH, GATE> work = {a, ((ExtendShared<DH>*)shared_bytes)[warp], (int)threadIdx.x % 32};
    work.run((int64_t)warp * gridDim.x + blockIdx.x, (int64_t)warps * gridDim.x);
}

template <int DH, bool GATE> static inline void extend_launch(const ExtendArgs* a, cudaStream_t stream) {
    int64_t bytes = sizeof(ExtendShared<DH>),
            room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    int64_t warps = room / bytes, most = EXTEND_MAX_WARPS;
    if (warps > most) warps = most;
    auto kernel = extend_attention_kernel<DH, GATE>;
    launch_after(kernel, dim3((unsigned)device_attribute(cudaDevAttrMultiProcessorCount)), 32 * warps,
                 warps * bytes, stream, *a);
}

// One warp a row and head
template <int DH>
__global__ static void __launch_bounds__(128) extend_combine_kernel(const __grid_constant__ ExtendCombine a) {
    kernel_wait();
    int i = (int)blockIdx.x * 4 + (int)threadIdx.x / 32, row = i / a.NH;
    if (row >= a.pass.num_rows || a.pass.row_tiles[row] == PASS_DECODE) return;
    extend_combine_head<DH>(a, a.pass.row_tiles[row], row, i % a.NH);
}

// Attention of all rows of a layer, but for those of decode_attention. q [rows, NH, dh] and cum_logf [rows,
// NH] are kv_append's; cum_logf is NULL without gate.
static inline void extend_attention(const ExtendOutput* out, const bf16* q, const double* cum_logf,
                                    const ExtendLayer* layer, cudaStream_t stream) {
    const Pages* p = layer->pages;
    const ExtendWork* work = layer->work;
    const PassArrays* pass = layer->pass;
    assert(!cum_logf == !p->cum_logf);
    ExtendCombine combine = {
        *out,  work->partial_o, work->partial_sum, work->pairs + layer->index * work->max_pairs,
        *pass, (int)p->NH};
    ExtendArgs a = {q,
                    cum_logf,
                    *p,
                    pass->tiles,
                    work->items + layer->index * work->max_items,
                    work->num_items + layer->index,
                    work->partial_o,
                    work->partial_sum,
                    layer->index};
    if (pass->num_tiles > 0) {
        Range range("attention", RANGE_FORWARD, stream);
        (p->dh == 64 ? cum_logf ? extend_launch<64, true> : extend_launch<64, false>
         : cum_logf ? extend_launch<128, true>
                     : extend_launch<128, false>)(&a, stream);
    }
    if (pass->num_decoded == pass->num_rows) return;
    Range range("output norm and gate", RANGE_FORWARD, stream);
    int64_t blocks = ceil_div<int64_t>(pass->num_rows * p->NH, 4);
    launch_after(p->dh == 64 ? extend_combine_kernel<64> : extend_combine_kernel<128>, dim3((unsigned)blocks),
                 128, 0, stream, combine);
}
