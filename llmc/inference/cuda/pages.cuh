/*
The paged KV cache of an inference engine on the device (llmc/model/extension.h). Rows are the tokens of a
pass.

    kv_append                    a layer's q, k, v and gates of all rows, from the fused projection
    pages_advance                which pages are forgotten
    pages_gather                 a sequence's k, v and cum_logf as contiguous tensors, for prefill.cuh
    pages_copy, pages_copy_slot  what a fork copies of a page, of a slot

    k, v        [pages, PAGE_TOKENS, dh] bf16, dh 64 or 128, the 16-byte chunks of a row swizzled as in shared
                memory (mma_sm80.cuh), so that attention copies a page as it is
    cum_logf    [pages, group, PAGE_TOKENS] double, of each of the `group` query heads that read a page; log
                gates are rounded to multiples of 2^-36, so sums down to -1.3e5 are exact, and cum_logf does
                not depend on how a sequence is cut into passes
    table       [slots, heads, table_width] pages of a head of keys; head l KVH + h is head h of layer l

Forgetting. With QK norm |q k| / sqrt(dh) <= U for all pairs of a head, so the keys up to the end e of a page
have at most

    exp(2 U) sum_{j <= e} exp(-c_j) / sum_{j <= i} exp(-c_j)        c: cum_logf

of row i's weight. c only falls, and so does this bound: a page once below the tolerance stays forgotten. The
logarithm of the sum is kept for the end of each page (page_logsum) and for the last token (gates). Without QK
norm there is no U for queries to come, and nothing is forgotten but what has left a window. A page is
forgotten when all query heads that read it have forgotten it.
*/
#pragma once

#include "../../layers/forget_gate.cuh"
#include "../../attention/pruning.cuh"
#include "../../layers/qkv.cuh"
#include "pass.cuh"

typedef struct {
    int64_t NH, KVH, dh, layers, slots, pages, table_width;
    int group;           // NH / KVH query heads read a head of keys
    bf16 *k, *v;         // [pages, PAGE_TOKENS, dh]
    double* cum_logf;    // [pages, group, PAGE_TOKENS]; NULL: no gate
    double* page_logsum; // [pages, group] ln sum exp(-cum_logf_j) up to the page's end; NULL: no QK norm
    int32_t* table;      // [slots, heads, table_width]
    int32_t* forgotten;  // [slots, heads] number of forgotten pages, the first ones of a head
    double2* gates; // [slots, layers NH] c: cum_logf of the last token; sum exp(c - cum_logf_j) over all j
    // [layers, slots, 2, 2, KVH dh] k and v before the shift of the last token, with a group in element
    // position % 2 of the first 2: its thread blocks may read the token before while another writes the next
    bf16* last;
    double* limits;         // [layers NH] U from QK norm's weights; NULL: no QK norm
    double log_tolerance;   // ln of the share of a row's weight that may be forgotten
    bool drops;             // pages are forgotten by gates, with QK norm
    int64_t window;         // tokens that a row sees, as in HeadShape; 0: all before it
    const int32_t* windows; // [layers] the same of each layer; NULL: `window` in all
    bool drops_window;      // pages that have left the window are forgotten
} Pages;

// First page of the window of a row at `position`, which is rounded down to a multiple of 16: all rows of a
// tile begin at one page, whatever else is in their pass.
__host__ __device__ static inline int pages_window_first(int64_t window, int64_t position) {
    int64_t first = (position & ~(int64_t)15) - window + 1;
    return window && first > 0 ? (int)(first / PAGE_TOKENS) : 0;
}

// The window of layer l
__device__ static inline int64_t pages_window(const Pages& p, int64_t l) {
    return p.windows ? p.windows[l] : p.window;
}

// Number of heads of keys
__host__ __device__ static inline int64_t pages_heads(const Pages& p) { return p.layers * p.KVH; }

// Index of a slot's head of keys in arrays [slots, heads], and of the one that query head h reads. GROUPED,
// here and below: false where the group is known to be 1, for code without divisions that computes an index
// once.
template <bool GROUPED = true>
__host__ __device__ static inline int64_t pages_slot_head(const Pages& p, int64_t slot, int64_t l,
                                                          int64_t key_head) {
    return (slot * p.layers + l) * (GROUPED ? p.KVH : p.NH) + key_head;
}
template <bool GROUPED = true>
__device__ static inline int64_t pages_query_head(const Pages& p, int64_t slot, int64_t l, int h) {
    return pages_slot_head<GROUPED>(p, slot, l, GROUPED ? h / p.group : h);
}

// Index of a slot's query head in gates, and of its row of a page in cum_logf and page_logsum
__device__ static inline int64_t pages_gate(const Pages& p, int64_t slot, int64_t l, int h) {
    return (slot * p.layers + l) * p.NH + h;
}
template <bool GROUPED = true>
__device__ static inline int64_t pages_gate_row(const Pages& p, int64_t page, int h) {
    return GROUPED ? page * p.group + h % p.group : page;
}

// Index in k and v of channels 8 chunk, .. of a page's token
__device__ static inline int64_t pages_chunk(const Pages& p, int64_t page, int token, int chunk) {
    return (page * PAGE_TOKENS + token) * p.dh + ((chunk ^ (token & 7)) << 3);
}

// ----------------------------------------------------------------------------
// append

// Inputs of a layer's append, and outputs besides the cache
typedef struct {
    int64_t layer;
    HeadPath paths[3];   // of q, k, v as in qkv.cuh; only q's has an `out` [rows, NH, dh]
    const bf16* proj;    // [rows, row_stride]
    const float* angles; // [rows, dh/2, 2] with RoPE
    const bf16* gate;    // the forget gate's column of proj; NULL: the gate has only a bias
    const float* bias;   // [NH] of the forget gate
    double* cum_logf;    // [rows, NH] output, with a gate
    int row_stride, weight_stride;
} KvAppend;

// For a sequence with so many rows or more, a thread block computes a head's gates, otherwise a warp.
enum { KV_APPEND_GATE_ROWS = 256 };

__device__ static inline double pages_round_logf(float logf) {
    return rint((double)logf * 68719476736.0) * (1 / 68719476736.0);
}

// One warp: tokens first, .., first + 31 of a sequence in one head, a token a lane; those outside the pass
// count as logf 0. Returns the inclusive sum of logf up to the lane's token. *total: the sum over all.
// *weights: sum_j exp(sum of logf over the tokens after j).
__device__ static inline double kv_append_gate_chunk(double* total, double* weights, const Pages& p,
                                                     const KvAppend& a, const PassRows& sequence, int h,
                                                     int first) {
    int lane = (int)threadIdx.x % 32, row = sequence.begin + first + lane - sequence.position;
    bool valid = row >= sequence.begin && row < sequence.end;
    double c = 0;
    if (valid)
        c = pages_round_logf(
            forget_gate_logf(forget_gate_logit(a.gate, (int64_t)row * a.row_stride + h, a.bias[h])));
    for (int step = 1; step < 32; step *= 2) {
        double before = __shfl_up_sync(~0u, c, step);
        if (lane >= step) c += before;
    }
    *total = __shfl_sync(~0u, c, 31);
    *weights = warp_sum(valid ? exp(*total - c) : 0.0);
    return c;
}

// Stores cum_logf of the lane's token. weights: sum over all tokens j up to the chunk's end of exp(cum_logf
// of the chunk's last token - cum_logf_j).
template <bool GROUPED>
__device__ static inline void kv_append_gate_store(const Pages& p, const KvAppend& a,
                                                   const PassRows& sequence, int h, int position,
                                                   double cum_logf, double weights) {
    int64_t row = sequence.begin + position - sequence.position;
    if (row < sequence.begin || row >= sequence.end) return;
    int64_t head = pages_query_head<GROUPED>(p, sequence.slot, a.layer, h);
    int64_t at = pages_gate_row<GROUPED>(p, p.table[head * p.table_width + position / PAGE_TOKENS], h);
    p.cum_logf[at * PAGE_TOKENS + position % PAGE_TOKENS] = cum_logf;
    a.cum_logf[row * p.NH + h] = cum_logf;
    if (p.page_logsum && position % PAGE_TOKENS == PAGE_TOKENS - 1)
        p.page_logsum[at] = log(weights) - cum_logf;
}

// One warp: cum_logf of a sequence's new tokens in one head, in chunks of 32. Every page ends with a chunk.
template <bool GROUPED>
__device__ static inline void kv_append_gate(const Pages& p, const KvAppend& a, const PassRows& sequence,
                                             int h) {
    int lane = (int)threadIdx.x % 32, end = sequence.position + sequence.end - sequence.begin;
    int64_t head = pages_gate(p, sequence.slot, a.layer, h);
    double2 state = sequence.position ? p.gates[head] : double2{};
    for (int first = sequence.position & ~31; first < end; first += 32) {
        double total, weights, c = kv_append_gate_chunk(&total, &weights, p, a, sequence, h, first);
        weights += exp(total) * state.y;
        kv_append_gate_store<GROUPED>(p, a, sequence, h, first + lane, state.x + c, weights);
        state = {state.x + total, weights};
    }
    if (lane == 0) p.gates[head] = state;
}

// The same by a thread block for one head of a sequence with many rows, a chunk a warp. Chunks are combined
// by a scan of the linear recurrence weights <- exp(total) weights + the chunk's weights.
template <bool GROUPED>
__global__ static void __launch_bounds__(1024)
    kv_append_gate_kernel(const __grid_constant__ Pages p, const __grid_constant__ KvAppend a,
                          const __grid_constant__ PassArrays pass) {
    __shared__ double2 chunks[32];
    PassRows sequence = pass.sequences[blockIdx.y];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, h = (int)blockIdx.x;
    int end = sequence.position + sequence.end - sequence.begin;
    int64_t head = pages_gate(p, sequence.slot, a.layer, h);
    if (sequence.end - sequence.begin < KV_APPEND_GATE_ROWS) return;
    double2 state = sequence.position ? p.gates[head] : double2{};
    for (int begin = sequence.position & ~31; begin < end; begin += 1024) {
        int first = begin + 32 * warp;
        double2 chunk;
        double c = kv_append_gate_chunk(&chunk.x, &chunk.y, p, a, sequence, h, first);
        __syncthreads(); // all warps have read the previous chunks
        if (lane == 0) chunks[warp] = chunk;
        __syncthreads();
        chunk = chunks[lane];
        double factor = exp(chunk.x);
        for (int step = 1; step < 32; step *= 2) {
            double total = __shfl_up_sync(~0u, chunk.x, step), weights = __shfl_up_sync(~0u, chunk.y, step);
            double before = __shfl_up_sync(~0u, factor, step);
            if (lane < step) continue;
            chunk = {chunk.x + total, chunk.y + factor * weights};
            factor *= before;
        }
        chunk = {state.x + chunk.x, chunk.y + factor * state.y}; // the state after chunk `lane`
        double before = __shfl_sync(~0u, chunk.x, max(warp - 1, 0));
        kv_append_gate_store<GROUPED>(p, a, sequence, h, first + lane, (warp ? before : state.x) + c,
                                      __shfl_sync(~0u, chunk.y, warp));
        state = {__shfl_sync(~0u, chunk.x, 31), __shfl_sync(~0u, chunk.y, 31)};
    }
    if (threadIdx.x == 0) p.gates[head] = state;
}

// A row of q, k or v (kind 0, 1, 2) in one head
typedef struct {
    int kind, row;
    PassRows own; // its element of PassArrays.rows
} KvAppendRow;

// What a thread needs of it that no kernel since extend_plan writes, so it may be read before kernel_wait
struct KvAppendPrefetch {
    Raw8 weight; // of QK norm
    Raw8 last;   // k or v before the shift of the sequence's last token before the pass
};

// The thread's eight channels of k or v of a sequence's last token, which is at `position`
template <bool GROUPED>
__device__ static inline bf16* pages_last_token(const Pages& p, const KvAppend& a, const KvAppendRow& r,
                                                int position, const HeadThread& me) {
    const int half = GROUPED ? position & 1 : 0;
    int64_t token = ((a.layer * p.slots + r.own.slot) * 2 + half) * 2 + r.kind - 1;
    return p.last + (token * (GROUPED ? p.KVH : p.NH) + me.head) * p.dh + me.channel;
}

template <bool GROUPED>
__device__ static inline KvAppendPrefetch kv_append_prefetch(const Pages& p, const KvAppend& a,
                                                             const KvAppendRow& r, const HeadThread& me) {
    const HeadPath& path = a.paths[r.kind];
    KvAppendPrefetch prefetched = {};
    if (path.weight && me.active)
        prefetched.weight = load_raw8(path.weight + me.head * a.weight_stride + me.channel);
    if (path.shift >= 0 && me.active && r.row == r.own.begin && r.own.position > 0)
        prefetched.last = load_raw8(pages_last_token<GROUPED>(p, a, r, r.own.position - 1, me));
    return prefetched;
}

// The row's q, k or v, eight channels a thread. The thread that has read `last` writes the pass's last token:
// to the same place without groups or in a pass of an even number of rows, where it alone reads these
// channels, else to the other.
template <bool GROUPED>
__device__ static inline Raw8 kv_append_value(const Pages& p, const KvAppend& a, const KvAppendRow& r,
                                              const KvAppendPrefetch& prefetched, const HeadThread& me) {
    const HeadPath& path = a.paths[r.kind];
    const bf16* in = a.proj + (int64_t)r.row * a.row_stride + path.column + (me.head * me.dh + me.channel);
    Raw8 now = {}, before = prefetched.last;
    float logit = 0, x[8];
    if (me.active) now = load_raw8(in);
    if (path.shift >= 0 && me.active) {
        logit = __bfloat162float(a.proj[(int64_t)r.row * a.row_stride + path.shift + me.head]);
        if (r.row > r.own.begin)
            before = load_raw8(in - a.row_stride);
        else
            store16(pages_last_token<GROUPED>(p, a, r, r.own.position + r.own.end - 1 - r.row, me),
                    load_raw8(in + (r.own.end - 1 - r.row) * a.row_stride));
    }
    unpack8(x, now);
    qkv_token(x, path, before, logit, prefetched.weight, a.angles + r.row * p.dh, me);
    return pack8(x);
}

// Stores q for attention, k and v in their page.
template <bool GROUPED>
__device__ static inline void kv_append_store(const Pages& p, const KvAppend& a, const KvAppendRow& r,
                                              const Raw8& out, const HeadThread& me) {
    PassRows own = r.own;
    int kind = r.kind;
    if (!me.active) return;
    if (kind == 0) {
        store16(a.paths[0].out + (r.row * p.NH + me.head) * p.dh + me.channel, out);
        return;
    }
    int64_t head = pages_slot_head<GROUPED>(p, own.slot, a.layer, me.head),
            page = p.table[head * p.table_width + own.position / PAGE_TOKENS];
    store16((kind == 1 ? p.k : p.v) + pages_chunk(p, page, own.position % PAGE_TOKENS, me.channel / 8), out);
}

// Thread blocks 0 to gate_blocks - 1: gates, a warp a (sequence, head). The others, key_blocks a row for k,
// as many for v, and row_blocks in all: q, k, v of several heads of a row.
template <bool GROUPED>
__global__ static void __launch_bounds__(256)
    kv_append_kernel(const __grid_constant__ Pages p, const __grid_constant__ KvAppend a,
                     const __grid_constant__ PassArrays pass, int gate_blocks, int row_blocks,
                     int key_blocks) {
    kernel_wait();
    int block = (int)blockIdx.x - gate_blocks;
    if (block < 0) {
        int warps = (int)blockDim.x / 32, NH = (int)p.NH;
        int i = (int)blockIdx.x * warps + (int)threadIdx.x / 32;
        if (i >= pass.num_sequences * NH) return;
        PassRows sequence = pass.sequences[i / NH];
        if (sequence.end - sequence.begin < KV_APPEND_GATE_ROWS &&
            pass.row_tiles[sequence.begin] != PASS_DECODE)
            kv_append_gate<GROUPED>(p, a, sequence, i % NH);
        return;
    }
    int row = block / row_blocks;
    QkvUnit<GROUPED> unit(key_blocks, block % row_blocks);
    HeadThread me = head_thread((int)(GROUPED && unit.path ? p.KVH : p.NH), (int)p.dh, unit.block);
    KvAppendRow r = {unit.path, row, pass.rows[row]};
    if (pass.row_tiles[row] == PASS_DECODE) return;
    Raw8 out = kv_append_value<GROUPED>(p, a, r, kv_append_prefetch<GROUPED>(p, a, r, me), me);
    kv_append_store<GROUPED>(p, a, r, out, me);
}

// Appends a layer's rows, except those that decode_attention appends: q to a->paths[0].out, k, v and cum_logf
// to the pages of the page table, and the state of their slots.
static inline void kv_append(const Pages* p, const KvAppend* a, const PassArrays* pass, cudaStream_t stream) {
    if (pass->num_decoded == pass->num_rows) return;
    Range range("shift, QK norm, RoPE", RANGE_FORWARD, stream);
    HeadGrid grid = head_grid(p->NH, p->dh);
    int key_blocks = ceil_div(grid.blocks, p->group), row_blocks = grid.blocks + 2 * key_blocks;
    int warps = grid.threads / 32;
    int gates = p->cum_logf ? ceil_div<int>(pass->num_sequences * (int)p->NH, warps) : 0;
    const bool grouped = p->group > 1;
    launch_after(grouped ? kv_append_kernel<true> : kv_append_kernel<false>,
                 dim3((unsigned)(gates + pass->num_rows * row_blocks)), grid.threads, 0, stream, *p, *a,
                 *pass, gates, row_blocks, key_blocks);
    if (p->cum_logf && pass->num_rows >= KV_APPEND_GATE_ROWS) {
        auto gate_kernel = grouped ? kv_append_gate_kernel<true> : kv_append_gate_kernel<false>;
        dim3 heads((unsigned)p->NH, (unsigned)pass->num_sequences);
        CUDA_LAUNCH(gate_kernel, heads, 1024, stream, *p, *a, *pass);
    }
}

// angles [rows, dh/2, 2] of the rows' positions
__global__ static void __launch_bounds__(256)
    pages_angles_kernel(float* angles, const __grid_constant__ PassArrays pass, int pairs,
                        const __grid_constant__ Rotation r) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)pass.num_rows * pairs) return;
    rope_angle(angles + 2 * i, pass.rows[i / pairs].position, (int)(i % pairs), pairs, r);
}

// Computes the angles that kv_append reads with RoPE.
static inline void pages_angles(float* angles, const PassArrays* pass, int64_t dh, const Rotation& r,
                                cudaStream_t stream) {
    Range range("shift, QK norm, RoPE", RANGE_FORWARD, stream);
    CUDA_LAUNCH(pages_angles_kernel, ceil_div<int64_t>(pass->num_rows * (dh / 2), 256), 256, stream, angles,
                *pass, (int)(dh / 2), r);
}

// ----------------------------------------------------------------------------
// forgotten pages

// Updates the number of forgotten pages of a slot's head of keys, which holds `length` tokens; -1: the number
// stays.
__device__ static inline void pages_advance_head(const Pages& p, int64_t slot, int64_t head, int length) {
    int64_t at = slot * pages_heads(p) + head;
    if (length == 0) p.forgotten[at] = 0;
    if (p.drops_window && length > 0)
        p.forgotten[at] = max(p.forgotten[at], pages_window_first(pages_window(p, head / p.KVH), length));
    if (!p.drops || length <= 0) return;
    const int32_t* table = p.table + at * p.table_width;
    const double2* gates = p.gates + at * p.group; // of the query heads that read it
    auto kept = [&](int page) {
        bool any = false;
        for (int g = 0; g < p.group && !any; g++) {
            double limit = p.limits[head * p.group + g];
            double min_logsum = log(gates[g].y) - gates[g].x - 2 * limit + p.log_tolerance;
            any = p.page_logsum[(int64_t)table[page] * p.group + g] >= min_logsum;
        }
        return any;
    };
    int first = p.forgotten[at], full = length / PAGE_TOKENS;
    if (first < full && !kept(first)) p.forgotten[at] = search_first(first + 1, full, kept);
}

__global__ static void __launch_bounds__(256)
    pages_advance_kernel(const __grid_constant__ Pages p, const int32_t* lengths) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, heads = pages_heads(p);
    if (i < p.slots * heads) pages_advance_head(p, i / heads, i % heads, lengths[i / heads]);
}

// Updates p->forgotten of all slots. lengths [slots], on the device: tokens that a slot holds; -1: its counts
// stay.
static inline void pages_advance(const Pages* p, const int32_t* lengths, cudaStream_t stream) {
    CUDA_LAUNCH(pages_advance_kernel, ceil_div<int64_t>(p->slots * pages_heads(*p), 256), 256, stream, *p,
                lengths);
}

// One warp a head
__global__ static void __launch_bounds__(32)
    pages_limits_kernel(double* limits, const __grid_constant__ Pruning pruning,
                        const __grid_constant__ HeadShape s) {
    double limit = pruning_weight_limit(pruning, s, (int)blockIdx.x);
    if (threadIdx.x == 0) limits[blockIdx.x] = limit;
}

// Computes p->limits of a layer from its QK norm's weights. rope_gain is Pruning's.
static inline void pages_limits(const Pages* p, int64_t layer, const bf16* q_weight, const bf16* k_weight,
                                int64_t weight_stride, double rope_gain, cudaStream_t stream) {
    HeadShape s = {};
    s.B = s.T = 1;
    s.NH = p->NH;
    s.KVH = p->KVH;
    s.dh = p->dh;
    s.weight_stride = weight_stride;
    Pruning pruning = {};
    pruning.q_weight = q_weight;
    pruning.k_weight = k_weight;
    pruning.rope_gain = rope_gain;
    CUDA_LAUNCH(pages_limits_kernel, p->NH, 32, stream, p->limits + layer * p->NH, pruning, s);
}

// ----------------------------------------------------------------------------
// copies

// A sequence's keys, values and gates of one layer in the layout of attention_forward. Keys of forgotten
// pages are 0, with a cum_logf that makes their weight underflow. Keys and values before first_page are not
// written.
#define PAGES_FORGOTTEN_CUM_LOGF 1e6
typedef struct {
    bf16 *k, *v;      // [T, KVH, dh]
    double* cum_logf; // [NH, T]
    int first_page;
} PagesGathered;

// Block (page, head of keys)
__global__ static void __launch_bounds__(128)
    pages_gather_kernel(const __grid_constant__ PagesGathered to, const __grid_constant__ Pages p,
                        int64_t layer, int slot, int T) {
    int index = (int)blockIdx.x, h = (int)blockIdx.y, chunks = (int)p.dh / 8;
    int64_t head = pages_slot_head(p, slot, layer, h);
    bool forgotten = index < p.forgotten[head];
    int64_t page = forgotten ? 0 : p.table[head * p.table_width + index];
    int tokens = min(PAGE_TOKENS, T - index * PAGE_TOKENS);
    for (int i = (int)threadIdx.x; index >= to.first_page && i < tokens * chunks; i += 128) {
        int token = i / chunks, chunk = i % chunks;
        int64_t from = pages_chunk(p, page, token, chunk);
        int64_t at = ((index * PAGE_TOKENS + token) * p.KVH + h) * p.dh + chunk * 8;
        store16(to.k + at, forgotten ? Raw8{} : load_raw8(p.k + from));
        store16(to.v + at, forgotten ? Raw8{} : load_raw8(p.v + from));
    }
    for (int g = 0; p.cum_logf && g < p.group && (int)threadIdx.x < tokens; g++)
        to.cum_logf[((int64_t)h * p.group + g) * T + index * PAGE_TOKENS + threadIdx.x] =
            forgotten ? PAGES_FORGOTTEN_CUM_LOGF
                      : p.cum_logf[(page * p.group + g) * PAGE_TOKENS + threadIdx.x];
}

// Gathers the T tokens of a slot in one layer.
static inline void pages_gather(const PagesGathered* to, const Pages* p, int64_t layer, int slot, int64_t T,
                                cudaStream_t stream) {
    dim3 grid((unsigned)ceil_div<int64_t>(T, PAGE_TOKENS), (unsigned)p->KVH);
    CUDA_LAUNCH(pages_gather_kernel, grid, 128, stream, *to, *p, layer, slot, (int)T);
}

// Copies element `from` of an array to element `to`, `bytes` bytes. An array that is NULL has none.
static inline void pages_copy_element(void* array, int64_t from, int64_t to, size_t bytes,
                                      cudaStream_t stream) {
    char* base = (char*)array;
    if (array)
        CUDA_CHECK(cudaMemcpyAsync(base + to * (int64_t)bytes, base + from * (int64_t)bytes, bytes,
                                   cudaMemcpyDeviceToDevice, stream));
}

// Copies what a slot has besides pages; the page table is the host's.
static inline void pages_copy_slot(const Pages* p, int64_t from, int64_t to, cudaStream_t stream) {
    size_t heads = (size_t)pages_heads(*p), gates = (size_t)(p->layers * p->NH);
    size_t bytes = (size_t)(2 * 2 * p->KVH * p->dh) * sizeof(bf16);
    pages_copy_element(p->forgotten, from, to, heads * sizeof *p->forgotten, stream);
    pages_copy_element(p->gates, from, to, gates * sizeof *p->gates, stream);
    if (p->last) // [layers, slots, ..]
        CUDA_CHECK(cudaMemcpy2DAsync((char*)p->last + to * (int64_t)bytes, (size_t)p->slots * bytes,
                                     (char*)p->last + from * (int64_t)bytes, (size_t)p->slots * bytes, bytes,
                                     (size_t)p->layers, cudaMemcpyDeviceToDevice, stream));
}

// Page `to` becomes a copy of page `from`.
static inline void pages_copy(const Pages* p, int64_t from, int64_t to, cudaStream_t stream) {
    size_t elements = (size_t)(PAGE_TOKENS * p->dh), group = (size_t)p->group;
    pages_copy_element(p->k, from, to, elements * sizeof *p->k, stream);
    pages_copy_element(p->v, from, to, elements * sizeof *p->v, stream);
    pages_copy_element(p->cum_logf, from, to, group * PAGE_TOKENS * sizeof *p->cum_logf, stream);
    pages_copy_element(p->page_logsum, from, to, group * sizeof *p->page_logsum, stream);
}
