/*
Attention of new rows over the cache, for sequences with several rows in a pass (and for single rows where
decode_runs is false):

    o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + cum_logf_i - cum_logf_j) v_j     over j <= i, j in i's window

    in    q [rows, NH, dh] and cum_logf [rows, NH] of kv_append; pages (pages.cuh); items and pairs (plan.cuh)
    out   partial_o, partial_sum for each row of an item; then y [rows, NH, dh] after output norm and gate

    extend_attention_kernel   one warp an item: 16 rows x the pages of a partition. No warp waits for another.
    extend_combine_kernel     one warp a (row, head): combines the partitions, output norm, output gate

Pipeline of a warp of extend_attention_kernel:

    items      the next item, its tile and its page numbers are loaded while the current item is computed
    pages      2 stages of k, v and cum_logf in shared memory, by cp.async; while a page is computed, the next
               one, of this item or the next, is in flight
    scores     mma.sync m16n8k16 q k^T; gates relative to the page's last key are the accumulator's init
    softmax    online, row_max and row_sum in registers (sm80_forward.cuh)
    o          mma.sync p v; partial results to global memory after the item's last page

Invariants of the stages:

1. A page is two commit groups, (q, k, cum_logf) and (v), empty ones where there is no page (`copy`), so the
   number of groups in flight is known.
2. Scores wait for the first group (cp_async_wait_group<3>), o for the second (cp_async_wait_group<2>): 3,
   then 2 later groups remain in flight. __syncwarp after each makes all lanes' copies visible.
3. A stage is overwritten only after all lanes have read it: __syncwarp at the end of `page`, before the next
   `copy` into it.
4. q has a stage of its own for each of two adjacent items (q_stage), as the next item's q is copied during
   the current item's last page.
5. Only what extend_plan or an earlier pass wrote is read before kernel_wait: items, tiles, page table. q, k
   and v of the pass's rows are not.

Called by layers.cuh; decode.cuh computes outputs by extend_output.
*/
#pragma once

#include "../../attention/attention.cuh"
#include "../../layers/output_gate.cuh"
#include "plan.cuh"

// ----------------------------------------------------------------------------
// combine, output norm and gate

// Output of a layer's attention: y = output_gate(output_norm(o)), where the model has them.
typedef struct {
    bf16* y;          // [rows, NH, dh]
    const bf16* o;    // [rows, NH, dh] of the rows that prefill_attention computes
    OutputGate gate;  // rstd is not written
    int64_t gate_row; // elements from one row of gate.gate to the next
} ExtendOutput;

// The thread's eight channels of what extend_output needs besides o
struct ExtendOutputPrefetch {
    Raw8 logits, weight;
};
__device__ static inline ExtendOutputPrefetch extend_output_prefetch(const ExtendOutput& out, int64_t row,
                                                                     const HeadThread& me) {
    ExtendOutputPrefetch prefetched = {};
    int column = me.head * me.dh + me.channel;
    if (out.gate.gate) prefetched.logits = load_raw8(out.gate.gate + row * out.gate_row + column);
    if (out.gate.weight) prefetched.weight = load_raw8(out.gate.weight + column);
    return prefetched;
}

// A warp computes one head: DH / 8 lanes have all its channels, and each further group of DH / 8 lanes has
// the same ones.
template <int DH> __device__ static inline HeadThread extend_head_thread(int head) {
    constexpr int LANES = DH / 8;
    return {.head = head,
            .channel = (int)threadIdx.x % LANES * 8,
            .lanes = LANES,
            .dh = DH,
            .mean = 1.0f / DH,
            .active = true};
}

// Computes y from the thread's eight channels of o, and stores it at y + at. By all lanes of a warp, each
// group of me.lanes with the same head (extend_head_thread); the first group stores.
__device__ static inline void extend_output(const ExtendOutput& out, float o[8], int64_t at,
                                            const ExtendOutputPrefetch& prefetched, const HeadThread& me) {
    output_gate_token(o, out.gate, (float)out.gate.eps, prefetched.logits, prefetched.weight, me);
    if ((int)threadIdx.x % 32 < me.lanes) store16(out.y + at, pack8(o));
}

// Arguments of extend_combine_kernel
struct ExtendCombine {
    ExtendOutput out;
    const float* partial_o;
    const float2* partial_sum;
    const ExtendPair* pairs; // of the layer
    PassArrays pass;
    int NH;
};

// By one warp: reduces the partial results of a row and head to o, eight channels a lane. The warp is GROUPS
// groups of DH / 8 lanes; group i reads partitions i, i + GROUPS, ..
template <int DH>
__device__ static inline void extend_combine_row(float o[8], const ExtendCombine& a, int tile, int row,
                                                 int h) {
    constexpr int LANES = DH / 8, GROUPS = 32 / LANES;
    int lane = (int)threadIdx.x % 32;
    PassRows rows = a.pass.tiles[tile];
    ExtendPair pair = a.pairs[tile * a.NH + h];
    int count = rows.end - rows.begin;
    int64_t first = pair.partial + row - rows.begin;
    float row_max = -INFINITY, row_sum = 0;
    for (int i = lane; i < pair.partitions; i += 32)
        row_max = fmaxf(row_max, a.partial_sum[first + i * count].x);
    row_max = warp_max(row_max);
    for (int i = 0; i < 8; i++) o[i] = 0;
#pragma unroll 4
    for (int n = lane / LANES; n < pair.partitions; n += GROUPS) {
        int64_t at = first + n * count;
        float2 partial = a.partial_sum[at];
        const float* from = a.partial_o + at * DH + lane % LANES * 8;
        Pack4 low = load16(from), high = load16(from + 4);
        float factor = exp2_approx(partial.x - row_max);
        row_sum += factor * partial.y;
        for (int i = 0; i < 4; i++) {
            o[i] += factor * low[i];
            o[i + 4] += factor * high[i];
        }
    }
    for (int step = LANES; step < 32; step *= 2) {
        row_sum += __shfl_xor_sync(~0u, row_sum, step);
        for (int i = 0; i < 8; i++) o[i] += __shfl_xor_sync(~0u, o[i], step);
    }
    for (int i = 0; i < 8; i++) o[i] /= row_sum;
}

// By one warp: stores y of a row and head, from partial results if the row has a tile, else from o of
// prefill_attention.
template <int DH>
__device__ static inline void extend_combine_head(const ExtendCombine& a, int tile, int row, int h) {
    HeadThread me = extend_head_thread<DH>(h);
    int64_t at = ((int64_t)row * a.NH + h) * DH + me.channel;
    ExtendOutputPrefetch prefetched = extend_output_prefetch(a.out, row, me);
    float x[8];
    if (tile >= 0) {
        extend_combine_row<DH>(x, a, tile, row, h);
        unpack8(x, pack8(x)); // as attention_forward rounds it
    } else {
        unpack8(x, load_raw8(a.out.o + at));
    }
    extend_output(a.out, x, at, prefetched, me);
}

// ----------------------------------------------------------------------------
// attention

// Shared memory of a warp
template <int DH> struct ExtendShared {
    bf16 q[2][EXTEND_TILE * DH], k[2][PAGE_TOKENS * DH], v[2][PAGE_TOKENS * DH];
    double cum_logf[2][PAGE_TOKENS];
    // sqrt(dh) (anchor - cum_logf_j), where anchor is cum_logf of the page's last key
    AttentionAccInit<PAGE_TOKENS> acc_init;
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

// An item, and what is prefetched of it
struct ExtendItemState {
    ExtendItem item;
    PassRows tile;
    int page; // lane i: number in the pool of the item's page i
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

    // Prefetches tile and page numbers of s.item.
    __device__ void load(ExtendItemState& s) const {
        if (count(s) == 0) return;
        s.tile = a.tiles[s.item.pair / (int)a.pages.NH];
        int64_t at = pages_query_head(a.pages, s.item.slot, a.layer, head(s));
        if (lane < count(s))
            s.page = a.pages.table[at * a.pages.table_width + (s.item.first_count >> 5) + lane];
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
                       a.pages.cum_logf + pages_gate_row(a.pages, page, head(s)) * PAGE_TOKENS + 2 * lane,
                       true);
    }
    __device__ void copy_values(const ExtendItemState& s, int i, int stage) const {
        int64_t page = __shfl_sync(~0u, s.page, i);
        copy_page(shared.v[stage], a.pages.v + page * PAGE_TOKENS * DH);
    }
    // Starts copying page i of an item, and the tile's queries with the first page, as two
    // commit groups: what scores need, then values.
    __device__ void copy(const ExtendItemState& s, int i, int stage, int q_stage) const {
        bool exists = i < count(s);
        if (exists && i == 0) copy_queries(s, q_stage);
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

    // Adds one page to the softmax. own: index in the page of the first row's own token; -1: it is in a later
    // page. hidden: how many of the page's first tokens are before the first row's window; one more for each
    // later row.
    __device__ void page(Softmax& softmax, const RowGate& gate, int stage, int q_stage, int own, int rows,
                         int hidden) {
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
        float factor = diagonal ? 1 : SCALE;
        for (int r = 0; r < 2; r++)
            shift[0][r] = GATE && !diagonal ? (float)((gate.cum_logf[r] - anchor) * ATTENTION_LOG2E) : 0;
        softmax.rescale(s, factor, shift);
        for (int r = 0; r < 2; r++) shift[0][r] -= softmax.row_max[0][r];

        cp_async_wait_group<2>();
        __syncwarp();
        if (diagonal) { // tokens to come have weight 0, but their values may be NaN
            for (int c = (own + rows) * (DH / 8) + lane; c < PAGE_TOKENS * DH / 8; c += 32)
                store16(shared.v[stage] + c * 8, Raw8{});
            __syncwarp();
        }
        uint32_t lane_v = sm80_lane_a<DH>(shared.v[stage], lane);
#pragma unroll
        for (int n = 0; n < NS; n += 2) softmax.add(s, n, factor, shift, sm80_advance<DH>(lane_v, n * 8, 0));
        __syncwarp(); // all lanes have read the stage (invariant 3)
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

    // Main loop of a warp, over the items n, n + stride, ..: up to 16 rows, one head, the pages of a
    // partition.
    //
    //     start copies of the first item's q and first page
    //     for each item:
    //         load tile and page numbers of the next item
    //         for each page of the item:
    //             start copies of the next page, or of the next item's q and first page: k, cum_logf, then v
    //             wait for q, k, cum_logf;  S = 0 on the diagonal, else acc_init (keys' gate);  S += q k^T
    //             diagonal: scale, gate, causal mask;  window: mask
    //             where row_max rises: rescale o
    //             wait for v;  for each 16 keys: P = 2^(S scale + gate - row_max), row_sum += P, o += P v
    //         store o, row_max, row_sum as partial results, which extend_combine_kernel reduces
    //
    // The diagonal is the page that holds the rows' own tokens. All copies of a page overlap the page before.
    __device__ void run(int64_t n, int64_t stride) {
        int total = *a.num_items, stage = 0, q_stage = 0;
        ExtendItemState next = {};
        next.item = item(n, total);
        ExtendItem after = item(n + stride, total);
        load(next);
        kernel_wait();
        copy(next, 0, stage, q_stage);
        while (count(next) > 0) {
            ExtendItemState now = next;
            next.item = after;
            load(next);
            n += stride;
            after = item(n + stride, total);
            RowGate gate = row_gate(now);
            Softmax softmax;
            int rows = now.tile.end - now.tile.begin, first = now.item.first_count >> 5;
            for (int i = 0; i < count(now); i++, stage ^= 1) {
                if (i + 1 < count(now))
                    copy(now, i + 1, stage ^ 1, 0);
                else
                    copy(next, 0, stage ^ 1, q_stage ^ 1);
                int position = now.tile.position, begin = (first + i) * PAGE_TOKENS; // of the page
                bool diagonal = first + i == position / PAGE_TOKENS;
                int hidden = a.pages.window ? position - (int)a.pages.window + 1 - begin : -EXTEND_TILE;
                page(softmax, gate, stage, q_stage, diagonal ? position % PAGE_TOKENS : -1, rows, hidden);
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
    int64_t bytes = sizeof(ExtendShared<DH>);
    int64_t warps = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) / bytes;
    if (warps > EXTEND_MAX_WARPS) warps = EXTEND_MAX_WARPS;
    auto kernel = extend_attention_kernel<DH, GATE>;
    launch_after(kernel, dim3((unsigned)device_attribute(cudaDevAttrMultiProcessorCount)), 32 * warps,
                 warps * bytes, stream, *a);
}

// One warp a (row, head)
template <int DH>
__global__ static void __launch_bounds__(128) extend_combine_kernel(const __grid_constant__ ExtendCombine a) {
    kernel_wait();
    int i = (int)blockIdx.x * 4 + (int)threadIdx.x / 32, row = i / a.NH;
    if (row >= a.pass.num_rows || a.pass.row_tiles[row] == PASS_DECODE) return;
    extend_combine_head<DH>(a, a.pass.row_tiles[row], row, i % a.NH);
}

// Attention of all rows of a layer except those of decode_attention, after kv_append and prefill_attention.
// cum_logf is NULL without gate.
static inline void extend_attention(const ExtendOutput* out, const bf16* q, const double* cum_logf,
                                    const ExtendLayer* layer, cudaStream_t stream) {
    const Pages* p = layer->pages;
    const ExtendWork* work = layer->work;
    const PassArrays* pass = layer->pass;
    assert(!cum_logf == !p->cum_logf);
    ExtendCombine combine = {.out = *out,
                             .partial_o = work->partial_o,
                             .partial_sum = work->partial_sum,
                             .pairs = work->pairs + layer->index * work->max_pairs,
                             .pass = *pass,
                             .NH = (int)p->NH};
    ExtendArgs a = {.q = q,
                    .cum_logf = cum_logf,
                    .pages = *p,
                    .tiles = pass->tiles,
                    .items = work->items + layer->index * work->max_items,
                    .num_items = work->num_items + layer->index,
                    .partial_o = work->partial_o,
                    .partial_sum = work->partial_sum,
                    .layer = layer->index};
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
