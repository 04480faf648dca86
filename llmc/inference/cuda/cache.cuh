/*
The cache of an inference engine on the device, whole: pages and slots (pages.cuh), the arrays of a pass, and
scratch of a layer's attention (extend.cuh).

    device_cache_new       allocates
    device_cache_fill      the arrays of a pass in pinned memory, and new entries of the page table
    device_cache_copy      ... to the device: once, however many steps follow
    device_cache_layer     what extend.cuh needs of a layer

A pass may be filled when the one before has ended. Called by layers.cuh and extension.cuh.
*/
#pragma once

#include "decode.cuh"
#include "prefill.cuh"
#include "scores.cuh"

// What a cache needs of a model; all zero for a recurrent mixer, which has no pages.
typedef struct {
    int64_t layers, NH, dh;
    bool gate, qk_norm, shifts;
    double rope_gain;     // Pruning's
    double log_tolerance; // ln eps of what may be forgotten; NAN: nothing
    int64_t window;       // tokens that a row sees, as in HeadShape
    bool own_windows;     // the layers have other ones: device_cache_windows; `window` is the widest
    int64_t KVH;          // as in HeadShape; a cache has it set
} CacheModel;

typedef struct {
    int index; // in the page table
    int page;
} TableEntry;

typedef struct {
    CacheModel model;
    CacheSizes sizes;
    Pages pages;
    Pages* of_layer;  // [layers] the same with the layer's window; NULL: it is that of all
    int32_t* windows; // [layers] on the device
    ExtendWork work;
    PrefillScratch space; // for one long sequence
    bf16 *q, *o;          // [rows, NH dh], and ATTENTION_FIRST_QUERY rows before them
    double* cum_logf;     // [rows, NH]
    float* angles;        // [rows, dh/2, 2]

    PassArrays pass;                 // on the device
    PassArrays host;                 // the same in pinned memory
    int32_t* output_rows;            // [outputs] on the device, behind the pass's arrays
    Scores scores;                   // the same, but for results and scratch
    char *host_bytes, *device_bytes; // the arrays, one behind the other
    int64_t bytes, max_bytes;        // of this pass, of any
    TableEntry *host_entries, *device_entries;
    int64_t max_entries;
    int64_t* held; // [slots] tokens after the slot's last pass
    bool* stale;   // [slots] the device's page table lacks columns before those
    bool copied;   // a page has been copied since the last pass
} DeviceCache;

// ----------------------------------------------------------------------------
// memory

// Rows of partial results that fit: enough to decode all slots, and 64 MiB for small chunks.
static inline int64_t device_cache_partials(const CacheModel* m, const CacheSizes* s) {
    int64_t width = cache_table_width(s), window = (m->window + EXTEND_TILE + 61) / PAGE_TOKENS + 1; // pages
    int64_t units = extend_num_partitions((int)(m->window && window < width ? window : width));
    units = units > 16 ? units : 16; // shorter sequences may have up to 16
    int64_t decoding = s->slots * m->NH * units, all = s->rows * m->NH * units;
    int64_t chunks = ((int64_t)64 << 20) / ((m->dh + 2) * (int64_t)sizeof(float));
    return chunks < decoding ? decoding : chunks < all ? chunks : all;
}

// Calls add(address of the pointer, elements, zeroed) for each device buffer; 0 elements: not needed.
template <class Add> static inline void device_cache_buffers(DeviceCache* c, const Add& add) {
    const CacheModel* m = &c->model;
    const CacheSizes* s = &c->sizes;
    Pages* p = &c->pages;
    int64_t d = m->NH * m->dh, kd = m->KVH * m->dh, width = cache_table_width(s), gate = m->gate;
    int64_t heads = m->layers * m->KVH, query_heads = m->layers * m->NH;
    int64_t blocks = ceil_div<int64_t>(s->capacity, ATTENTION_BLOCK), slack = ATTENTION_FIRST_QUERY * d;
    HeadShape shape = {.B = 1, .T = s->capacity, .NH = m->NH, .dh = m->dh, .KVH = m->KVH};
    Pruning* pruning = &c->space.pruning;
    add(&p->k, s->pages * PAGE_TOKENS * m->dh, false), add(&p->v, s->pages * PAGE_TOKENS * m->dh, false);
    add(&p->cum_logf, gate * s->pages * p->group * PAGE_TOKENS, false);
    add(&p->page_logsum, gate * m->qk_norm * s->pages * p->group, false);
    add(&p->table, s->slots * heads * width, true), add(&p->forgotten, s->slots * heads, true);
    add(&p->gates, gate * s->slots * query_heads, true);
    add(&p->last, m->shifts * m->layers * s->slots * 2 * 2 * kd, true);
    add(&p->limits, m->qk_norm * query_heads, true);
    add(&c->windows, m->own_windows * m->layers, false);
    add(&c->work.items, m->layers * c->work.max_items, true), add(&c->work.num_items, m->layers, true);
    add(&c->work.pairs, m->layers * c->work.max_pairs, true);
    add(&c->work.partial_o, c->work.max_items * m->dh, true);
    add(&c->work.partial_sum, c->work.max_items, true);
    add(&c->work.order.heads, s->slots * query_heads, false), add(&c->work.order.counts, m->layers, false);
    add(&c->space.keys.k, s->capacity * kd, false), add(&c->space.keys.v, s->capacity * kd, false);
    add(&c->space.keys.cum_logf, gate * s->capacity * m->NH, false);
    add(&c->space.lse, s->capacity * m->NH, false);
    add(&pruning->bounds.first_key_block, m->NH * blocks, false);
    add(&pruning->bounds.last_query_block, m->NH * blocks, false);
    add(&pruning->bounds.head_order, m->NH + 1, false), add(&pruning->score_limits, m->NH, false);
    add((char**)&pruning->scratch, (int64_t)pruning_scratch_bytes(&shape) + 256, false);
    add(&c->q, slack + s->rows * d, true), add(&c->o, slack + s->rows * d, true);
    add(&c->cum_logf, gate * s->rows * m->NH, false),
        add(&c->angles, (m->rope_gain > 0) * s->rows * m->dh, false);
    add(&c->scores.outputs.scores, s->outputs + s->slots * EXTEND_STEPS, false);
    add(&c->scores.partials, s->outputs * SCORE_PARTITIONS, false);
    add(&c->scores.num_done, s->outputs, true);
    add(&c->device_bytes, c->max_bytes, false), add(&c->device_entries, c->max_entries, false);
}

// The sizes that follow from the model's and the engine's; nothing is allocated.
static inline DeviceCache device_cache_plan(const CacheModel* m, const CacheSizes* s) {
    DeviceCache c = {};
    const int64_t KVH = m->KVH ? m->KVH : m->NH, heads = m->layers * KVH;
    c.model = *m;
    c.model.KVH = KVH;
    c.sizes = *s;
    c.pages.NH = m->NH;
    c.pages.KVH = KVH;
    c.pages.dh = m->dh;
    c.pages.layers = m->layers;
    c.pages.group = KVH ? (int)(m->NH / KVH) : 1;
    c.pages.slots = s->slots;
    c.pages.pages = s->pages;
    c.pages.table_width = cache_table_width(s);
    c.pages.log_tolerance = m->log_tolerance;
    c.pages.drops = s->drops && m->gate && !isnan(m->log_tolerance) && m->qk_norm;
    c.pages.window = m->window;
    c.pages.drops_window = s->drops && (m->window || m->own_windows);
    c.work.max_items = device_cache_partials(m, s);
    c.work.max_pairs = s->rows * m->NH;
    c.space.weight_stride = m->dh;
    c.max_bytes = s->slots * (int64_t)sizeof(PassRows) +
                  s->rows * (int64_t)(2 * sizeof(PassRows) + 2 * sizeof(int32_t)) +
                  s->outputs * (int64_t)(3 * sizeof(int32_t) + sizeof(Draw)) + 8;
    c.max_entries = (s->rows / PAGE_TOKENS + 2 * s->slots) * heads;
    return c;
}

// Bytes on the device.
static inline int64_t device_cache_bytes(const CacheModel* m, const CacheSizes* s) {
    DeviceCache c = device_cache_plan(m, s);
    int64_t bytes = 0;
    device_cache_buffers(&c, [&](auto** at, int64_t n, bool) { bytes += n * (int64_t)sizeof **at; });
    return bytes;
}

static inline void device_cache_free(DeviceCache* c) {
    if (c->q) c->q -= ATTENTION_FIRST_QUERY * c->model.NH * c->model.dh;
    if (c->o) c->o -= ATTENTION_FIRST_QUERY * c->model.NH * c->model.dh;
    device_cache_buffers(c, [](auto** at, int64_t, bool) { CUDA_CHECK(cudaFree(*at)); });
    CUDA_CHECK(cudaFreeHost(c->host_bytes));
    CUDA_CHECK(cudaFreeHost(c->host_entries));
    free(c->of_layer);
    free(c->held);
    free(c->stale);
    *c = {};
}

// Bytes that a cache leaves free on the device for what is allocated later: the workspace of GEMMs, CUDA
// graphs, code that is loaded when it first runs.
static const size_t DEVICE_CACHE_MARGIN = (size_t)128 << 20;

// Returns false, with nothing allocated, where the device or the host has no memory. Fill pages.limits with
// pages_limits where the model has QK norm.
static inline bool device_cache_new(DeviceCache* c, const CacheModel* m, const CacheSizes* s) {
    *c = device_cache_plan(m, s);
    int64_t largest = s->slots * m->layers * m->NH * c->pages.table_width;
    if (largest > INT32_MAX || c->work.max_items > INT32_MAX || s->capacity > 1 << 30) return false;
    void* margin = NULL;
    bool all = true;
    auto allocated = [&](cudaError_t error) {
        if (error != cudaSuccess) all = false, (void)cudaGetLastError(); // is not one of a later launch
        return error == cudaSuccess;
    };
    allocated(cudaMalloc(&margin, DEVICE_CACHE_MARGIN));
    device_cache_buffers(c, [&](auto** at, int64_t n, bool zeroed) {
        if (!all || n == 0) return;
        if (!allocated(cudaMalloc(at, (size_t)n * sizeof **at))) *at = NULL;
        if (all && zeroed) CUDA_CHECK(cudaMemset(*at, 0, (size_t)n * sizeof **at));
    });
    CUDA_CHECK(cudaFree(margin));
    if (c->q) c->q += ATTENTION_FIRST_QUERY * m->NH * m->dh;
    if (c->o) c->o += ATTENTION_FIRST_QUERY * m->NH * m->dh;
    if (all) allocated(cudaMallocHost(&c->host_bytes, (size_t)c->max_bytes));
    if (all) allocated(cudaMallocHost(&c->host_entries, (size_t)c->max_entries * sizeof(TableEntry)));
    if (!all) {
        device_cache_free(c);
        return false;
    }
    c->held = (int64_t*)xcalloc((size_t)s->slots, sizeof(int64_t));
    c->stale = (bool*)xcalloc((size_t)s->slots, sizeof(bool));
    return true;
}

// Sets the windows [layers] of a model whose layers differ in them.
static inline void device_cache_windows(DeviceCache* c, const int32_t* windows) {
    const int64_t layers = c->model.layers;
    CUDA_CHECK(cudaMemcpy(c->windows, windows, (size_t)layers * sizeof *windows, cudaMemcpyHostToDevice));
    c->pages.windows = c->windows;
    c->of_layer = (Pages*)xcalloc((size_t)layers, sizeof(Pages));
    for (int64_t l = 0; l < layers; l++) {
        c->of_layer[l] = c->pages;
        c->of_layer[l].window = windows[l];
    }
}

// ----------------------------------------------------------------------------
// a pass

__global__ static void __launch_bounds__(256)
    device_cache_entries_kernel(int32_t* table, const TableEntry* entries, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) table[entries[i].index] = entries[i].page;
}

// Copies what is new in the page table: the columns that this pass appends to, or all of a slot. Where pages have
// been copied, a slot's partial page may be another one now: a slot that its last child took over is not stale.
static inline void device_cache_table(DeviceCache* c, const Extension* e, cudaStream_t stream) {
    int64_t heads = pages_heads(c->pages), width = c->pages.table_width, n = 0;
    if (heads == 0) return;
    for (int64_t i = 0; i < e->sequences; i++) {
        int64_t slot = e->slots[i], length = e->lengths[i],
                end = length + e->begins[i + 1] - e->begins[i] + e->steps - 1;
        int64_t first = (length + (c->copied ? 0 : PAGE_TOKENS - 1)) / PAGE_TOKENS,
                last = ceil_div<int64_t>(end, PAGE_TOKENS);
        const int32_t* from = e->pages + slot * heads * width;
        if (length > 0 && (c->stale[slot] || c->held[slot] != length))
            CUDA_CHECK(cudaMemcpyAsync(c->pages.table + slot * heads * width, from,
                                       (size_t)(heads * width) * sizeof *from, cudaMemcpyHostToDevice,
                                       stream));
        else
            for (int64_t head = 0; first < last && head < heads; head++)
                for (int64_t column = first; column < last; column++)
                    c->host_entries[n++] = {(int)((slot * heads + head) * width + column),
                                            from[head * width + column]};
        c->held[slot] = end;
        c->stale[slot] = false;
    }
    c->copied = false;
    assert(n <= c->max_entries);
    if (n == 0) return;
    CUDA_CHECK(cudaMemcpyAsync(c->device_entries, c->host_entries, (size_t)n * sizeof(TableEntry),
                               cudaMemcpyHostToDevice, stream));
    CUDA_LAUNCH(device_cache_entries_kernel, ceil_div<int64_t>(n, 256), 256, stream, c->pages.table,
                c->device_entries, n);
}

static inline bool device_cache_decodes(const Extension* e, int64_t sequence) {
    return e->begins[sequence + 1] - e->begins[sequence] == 1 && decode_runs();
}

// Are a sequence's rows computed in tiles, if those with long_rows rows or more are not?
static inline bool device_cache_tiled(const Extension* e, int64_t sequence, int64_t long_rows) {
    return e->begins[sequence + 1] - e->begins[sequence] < long_rows && !device_cache_decodes(e, sequence);
}

// Partial results of the sequences with fewer than long_rows rows.
static inline int64_t device_cache_needs(const DeviceCache* c, const Extension* e, int64_t long_rows) {
    int64_t partials = 0;
    for (int64_t i = 0; i < e->sequences; i++)
        for (int64_t row = e->begins[i]; row < e->begins[i + 1] && device_cache_tiled(e, i, long_rows); row++)
            partials += c->model.NH * extend_partials(c->model.window, c->model.own_windows,
                                                      e->lengths[i] + row - e->begins[i]);
    return partials;
}

// Cuts a sequence's rows into tiles, which begin where their position is a multiple of EXTEND_TILE.
static inline void device_cache_tiles(DeviceCache* c, const PassRows* sequence) {
    PassRows* tiles = c->host.tiles;
    for (int row = sequence->begin; row < sequence->end;) {
        int position = sequence->position + row - sequence->begin;
        int end = row + EXTEND_TILE - position % EXTEND_TILE;
        if (end > sequence->end) end = sequence->end;
        tiles[c->host.num_tiles] = {row, end, sequence->slot, position};
        for (; row < end; row++) c->host.row_tiles[row] = c->host.num_tiles;
        c->host.num_tiles++;
    }
}

enum { DEVICE_CACHE_LONG_ROWS = 256 }; // from so many rows on attention_forward computes them

// Fills c->host, c->pass and c->scores for a pass, and brings the page table up to date. The pass before has
// ended. Dies where the pass is larger than the cache's sizes.
static inline void device_cache_fill(DeviceCache* c, const Extension* e, cudaStream_t stream) {
    const CacheSizes* s = &c->sizes;
    if (e->rows < 1 || e->rows > s->rows || e->sequences > s->slots || e->outputs > s->outputs ||
        e->steps > EXTEND_STEPS)
        die("a pass of %s, %s and %s is larger than its cache", counted(e->rows, "row").text,
            counted(e->sequences, "sequence").text, counted(e->outputs, "output").text);
    for (int64_t i = 0; i < e->sequences; i++)
        if (e->lengths[i] + e->begins[i + 1] - e->begins[i] + e->steps - 1 > s->capacity)
            die("a sequence of more than %s does not fit the cache", counted(s->capacity, "token").text);
    device_cache_table(c, e, stream);

    int64_t long_rows = DEVICE_CACHE_LONG_ROWS;
    while (long_rows > 1 && device_cache_needs(c, e, long_rows) > c->work.max_items) long_rows /= 2;
    int64_t R = e->rows, S = e->sequences, at = 0;
    auto place = [&](auto** on_host, auto** on_device, int64_t n) {
        *on_host = (std::remove_reference_t<decltype(*on_host)>)(c->host_bytes + at);
        *on_device = (std::remove_reference_t<decltype(*on_device)>)(c->device_bytes + at);
        at += n * (int64_t)sizeof **on_host;
    };
    int32_t *host_outputs, *host_targets;
    int* host_steps;
    Draw* host_draws;
    PassOutputs* outputs = &c->scores.outputs;
    place(&c->host.sequences, &c->pass.sequences, S);
    place(&c->host.rows, &c->pass.rows, R);
    place(&c->host.tiles, &c->pass.tiles, R);
    place(&c->host.tokens, &c->pass.tokens, R);
    place(&c->host.row_tiles, &c->pass.row_tiles, R);
    place(&host_outputs, &c->output_rows, e->outputs);
    place(&host_targets, &c->scores.targets, e->outputs);
    place(&host_steps, &outputs->step, e->outputs);
    at = ceil_div<int64_t>(at, 8) * 8;
    place(&host_draws, &outputs->draws, e->draws ? e->outputs : 0);
    if (e->draws)
        memcpy(host_draws, e->draws, (size_t)e->outputs * sizeof(Draw));
    else
        outputs->draws = NULL;
    c->bytes = at;
    memcpy(c->host.tokens, e->tokens, (size_t)R * sizeof *e->tokens);
    c->host.num_tiles = c->host.num_decoded = 0;
    int64_t longest = 0, decoded = 0; // tokens of decoded sequences: the most, and of all
    for (int64_t i = 0; i < S; i++) {
        PassRows sequence = {(int)e->begins[i], (int)e->begins[i + 1], e->slots[i], (int)e->lengths[i]};
        bool decodes = device_cache_decodes(e, i);
        c->host.sequences[i] = sequence;
        for (int row = sequence.begin; row < sequence.end; row++) {
            PassRows own = sequence;
            own.position += row - sequence.begin;
            c->host.rows[row] = own;
            c->host.row_tiles[row] = decodes ? PASS_DECODE : PASS_PREFILL;
        }
        if (decodes) {
            c->host.num_decoded++;
            decoded += e->lengths[i];
            longest = std::max(longest, e->lengths[i]);
        }
        if (device_cache_tiled(e, i, long_rows)) device_cache_tiles(c, &sequence);
    }
    for (int64_t i = 0; i < e->outputs; i++) {
        host_outputs[i] = (int32_t)e->output_rows[i];
        host_targets[i] = e->targets[i];
        host_steps[i] = 0;
    }
    c->host.num_rows = c->pass.num_rows = (int)R;
    c->host.num_sequences = c->pass.num_sequences = (int)S;
    c->pass.num_tiles = c->host.num_tiles;
    c->pass.num_decoded = c->host.num_decoded;
    // Heads of one sequence differ if they forget; otherwise only those of different sequences do.
    c->pass.is_uneven =
        longest >= DECODE_UNEVEN_TOKENS && (c->pages.drops || longest * c->host.num_decoded > 2 * decoded);
    outputs->pass = c->pass;
    outputs->outputs = (int)e->outputs;
    outputs->advances = extension_decodes(e);
}

// Copies the filled arrays to the device.
static inline void device_cache_copy(const DeviceCache* c, cudaStream_t stream) {
    CUDA_CHECK(
        cudaMemcpyAsync(c->device_bytes, c->host_bytes, (size_t)c->bytes, cudaMemcpyHostToDevice, stream));
}

// Layer `index` of the filled pass. c outlives it.
static inline ExtendLayer device_cache_layer(const DeviceCache* c, int64_t index) {
    return {index, c->of_layer ? &c->of_layer[index] : &c->pages, &c->work, &c->pass};
}

// The sequences of the filled pass that have no tiles, from the last one on: o of their rows.
static inline void device_cache_prefill(const DeviceCache* c, const ExtendLayer* layer, const bf16* q_weight,
                                        const bf16* k_weight, int64_t weight_stride, cudaStream_t stream) {
    PrefillScratch space = c->space;
    space.pruning.q_weight = q_weight;
    space.pruning.k_weight = k_weight;
    space.pruning.rope_gain = c->model.rope_gain;
    space.weight_stride = weight_stride;
    space.pruning.log_tolerance = c->model.log_tolerance;
    for (int i = c->host.num_sequences - 1; i >= 0; i--)
        if (c->host.row_tiles[c->host.sequences[i].begin] == PASS_PREFILL)
            prefill_attention(c->o, c->q, &space, &c->host.sequences[i], layer, stream);
}

// Slot `to` becomes a copy of slot `from`, whose pages it shares: the page table is the caller's.
static inline void device_cache_fork(DeviceCache* c, int64_t from, int64_t to, cudaStream_t stream) {
    pages_copy_slot(&c->pages, from, to, stream);
    c->held[to] = c->held[from];
    c->stale[to] = true;
}

// Page `to`, which a slot of the next pass has instead of page `from`, becomes a copy of it.
static inline void device_cache_copy_page(DeviceCache* c, int32_t from, int32_t to, cudaStream_t stream) {
    pages_copy(&c->pages, from, to, stream);
    c->copied = true;
}

// forgotten [slots, heads]: pages at the beginning of each head that no later row needs, of all slots that
// hold tokens. Waits for the device. A slot whose page table is not on the device yet, such as a fork before
// its first pass, keeps the counts that it was forked with (length -1).
static inline void device_cache_forgotten(DeviceCache* c, int32_t* forgotten, cudaStream_t stream) {
    int64_t count = c->sizes.slots * pages_heads(c->pages);
    int32_t* lengths = (int32_t*)c->host_bytes; // free between passes
    for (int64_t i = 0; i < c->sizes.slots; i++) lengths[i] = c->stale[i] ? -1 : (int32_t)c->held[i];
    CUDA_CHECK(cudaMemcpyAsync(c->device_bytes, lengths, (size_t)c->sizes.slots * sizeof *lengths,
                               cudaMemcpyHostToDevice, stream));
    pages_advance(&c->pages, (const int32_t*)c->device_bytes, stream);
    CUDA_CHECK(cudaMemcpyAsync(forgotten, c->pages.forgotten, (size_t)count * sizeof *forgotten,
                               cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}
