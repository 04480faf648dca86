/*
The CPU trainer's cache of sequences (llmc/model/extension.h), and attention over it.

Attention keeps a pool of pages for the heads of all its layers (attend.h), and of each slot a state of fixed
size: the last token's row of the fused projection, for the shifts, and each head's running sums. A recurrent
mixer keeps states alone, in its own table (recurrent_extend). All else is scratch of a pass of R rows. A
layer is number l among those of its mixer.

Called by attention's `extend`, and by extend.h.
*/
#pragma once

#include "../../cpu/layer.h"
#include "../../model/rotation.h"
#include "attend.h"

// clang-format off
// type, name, kept for every layer, elements of a layer
#define CACHE_PAGES(X) \
    X(real, k, false, pages * dh * PAGE_TOKENS)             /* [pages,dh,PAGE_TOKENS] as attention reads */ \
    X(real, v, false, pages * PAGE_TOKENS * dh)             /* [pages,PAGE_TOKENS,dh] */ \
    X(double, cum_logf, false, gated * pages * g * PAGE_TOKENS) /* [pages,g,PAGE_TOKENS] */ \
    X(HeadSums, page_end, false, gated * pages * g)         /* [pages,g] at the page's last token */ \
    X(real, last, true, slots * R)                          /* [L,slots,R] proj of the last token */ \
    X(HeadSums, sums, true, slots * NH)                     /* [L,slots,NH] at the last token */ \
    X(int64_t, first_page, false, rows * NH)                /* [R,NH] that the row attends to */ \
    X(const real*, before, false, rows)                     /* [R] proj of the token before; NULL: none */
// clang-format on

typedef struct {
    CACHE_PAGES(ACTIVATION_FIELD)
} CachePages;

struct Cache {
    CacheSizes sizes;
    const Config* config; // the model's
    Layer layer;          // of layer 0, without gradients, mixer and mlp
    const Mixer* const* mixers;
    const Mixer* mlp;
    const Extension* pass;          // in progress
    bool has_angles;                // attention has RoPE's angles of the pass
    int64_t layers[NUM_MIXERS];     // of each mixer
    Activations states[NUM_MIXERS]; // attention's CACHE_PAGES; those of a recurrent mixer with its scratch
    Activations acts;               // EXTEND_ACTS of extend.h
    Activations of_mixer;           // attention's tensors of a pass
    Activations of_mlp;
};

static inline void cache_pages_activations(Activations* table, const Layer* layer, const CacheSizes* sizes) {
    const Config* config = layer->config;
    int64_t NH = config->num_heads, g = NH / config_key_heads(config), dh = config_head_size(config);
    int64_t R = layer_proj(layer).rows, gated = config_has_gate(config);
    int64_t pages = sizes->pages, slots = sizes->slots, rows = sizes->rows;
#define ROW(type, name, per_layer, elements)                                                                 \
    activations_add(table, (int64_t)sizeof(type) * (elements), per_layer);                                   \
    table->rows[table->count - 1].of_slots = per_layer;
    CACHE_PAGES(ROW)
#undef ROW
}

#undef CACHE_PAGES

static inline CachePages cache_pages(const Cache* cache, int64_t l) {
    CachePages pages;
    activations_layer(&cache->states[MIXER_ATTENTION], l, &pages, sizeof pages);
    return pages;
}

// Bytes of a page: of one head of keys, PAGE_TOKENS tokens.
static inline int64_t page_bytes(const Config* c) {
    int64_t numbers = 2 * config_head_size(c) * PAGE_TOKENS * (int64_t)sizeof(real);
    int64_t gates = config_has_gate(c) ? c->num_heads / config_key_heads(c) : 0;
    return numbers + gates * PAGE_TOKENS * (int64_t)sizeof(double);
}

// Row i's position in its sequence s.
static inline int64_t cache_position(const Extension* e, int64_t s, int64_t i) {
    return e->lengths[s] + i - e->begins[s];
}

// The rows of proj [rows, R] before each of the pass's rows, of the same sequence: NULL at its first token.
static inline const real* const* cache_before(const Layer* layer, Cache* cache, const real* proj) {
    const Extension* e = cache->pass;
    const CachePages pages = cache_pages(cache, layer->number);
    int64_t R = layer_proj(layer).rows;
    for (int64_t s = 0; s < e->sequences; s++)
        for (int64_t i = e->begins[s]; i < e->begins[s + 1]; i++) {
            const real* before = i > e->begins[s] ? proj + (i - 1) * R : pages.last + e->slots[s] * R;
            pages.before[i] = cache_position(e, s, i) ? before : NULL;
        }
    return pages.before;
}

// ----------------------------------------------------------------------------
// attention over the cache

// A layer's rows, and what their keys are forgotten by.
typedef struct {
    const Config* config;            // the layer's
    real* o;                         // [rows, NH, dh]
    const real *q, *k, *v;           // [rows, NH, dh], k and v [rows, KVH, dh]
    const real* proj;                // [rows, R]
    const real* gate;                // the forget gate's column of proj; NULL: it has only a bias
    const real* bias;                // [NH] of the forget gate; NULL: no gate
    const real *q_weight, *k_weight; // of QK norm; NULL without
} PagedAttention;

// The cache as head h of a slot reads it; the head of all pages with slot -1.
static inline HeadPages head_pages(const Cache* cache, const CachePages* a, int64_t l, int64_t slot,
                                   int64_t h) {
    const Config* c = cache->config;
    int64_t KVH = config_key_heads(c), group = c->num_heads / KVH;
    int64_t head = (slot * cache->layers[MIXER_ATTENTION] + l) * KVH + h / group;
    const int32_t* table = slot < 0 ? NULL : cache->pass->pages + head * cache_table_width(&cache->sizes);
    HeadPages pages = {.k = a->k,
                       .v = a->v,
                       .cum_logf = a->cum_logf,
                       .page_end = a->page_end,
                       .numbers = table,
                       .dh = config_head_size(c),
                       .group = group,
                       .member = h % group};
    return pages;
}

// U of head h, whose QK norm has these weights; NAN without.
static inline double head_limit(const real* q_weight, const real* k_weight, const HeadShape* s, int64_t h,
                                double rope_gain, PruningRule rule) {
    const int64_t q = h * s->weight_stride, k = h / head_group(s) * s->weight_stride;
    return q_weight ? qk_norm_limit(q_weight + q, k_weight + k, s->dh, rope_gain, rule) : NAN;
}

static inline Forgetting head_forgetting(const Cache* cache, const PagedAttention* a, const HeadShape* s,
                                         int64_t h) {
    const Config* c = a->config;
    Forgetting f = {.drops = cache->sizes.drops && config_prunes(c) && a->q_weight,
                    .limit = head_limit(a->q_weight, a->k_weight, s, h, config_rope_gain(c), PRUNING_OURS),
                    .log_tolerance = c->log_pruning_tolerance};
    return f;
}

// Appends the rows of one sequence to the cache of head h, token by token.
static inline void head_append(const Cache* cache, const PagedAttention* a, const HeadShape* s, int64_t l,
                               int64_t sequence, int64_t h) {
    const Extension* e = cache->pass;
    const CachePages tensors = cache_pages(cache, l);
    const Forgetting forgetting = head_forgetting(cache, a, s, h);
    int64_t slot = e->slots[sequence], begin = e->begins[sequence];
    const HeadPages pages = head_pages(cache, &tensors, l, slot, h);
    HeadSums none = {0, -INFINITY, 0}, *sums = &tensors.sums[slot * s->NH + h];
    if (e->lengths[sequence] == 0) *sums = none;
    for (int64_t i = begin; i < e->begins[sequence + 1]; i++) {
        int64_t position = cache_position(e, sequence, i), head = i * s->NH + h;
        int64_t key = (i * key_heads(s) + h / head_group(s)) * s->dh; // in k and v
        int64_t first_page = head_first_key(s, position) / PAGE_TOKENS;
        if (a->bias) {
            double logf = (double)log_sigmoid((a->gate ? a->gate[i * s->row_stride + h] : 0) + a->bias[h]);
            head_sums_add(sums, &forgetting, &pages, position, logf);
        }
        tensors.first_page[head] = first_page > sums->forgotten ? first_page : sums->forgotten;
        int64_t next_page = head_first_key(s, position + 1) / PAGE_TOKENS; // that later rows see
        if (cache->sizes.drops && sums->forgotten < next_page) sums->forgotten = next_page;
        page_append(&pages, position, a->k + key, a->v + key, sums);
    }
}

// Appends every sequence's rows to the cache of layer l.
static inline void cache_append(const Cache* cache, const PagedAttention* a, const HeadShape* shape,
                                int64_t l) {
    const Extension* e = cache->pass;
    const CachePages tensors = cache_pages(cache, l);
    int64_t R = shape->row_stride;
#pragma omp parallel for schedule(dynamic) collapse(2) if (e->rows * shape->NH * shape->dh > 16384)
    for (int64_t s = 0; s < e->sequences; s++)
        for (int64_t h = 0; h < shape->NH; h++) head_append(cache, a, shape, l, s, h);
    for (int64_t s = 0; s < e->sequences; s++)
        memcpy(tensors.last + e->slots[s] * R, a->proj + (e->begins[s + 1] - 1) * R,
               (size_t)R * sizeof(real));
}

// Every row's queries over the keys of its sequence up to itself: fills a->o.
static inline void cache_attend(const Cache* cache, const PagedAttention* a, const HeadShape* shape,
                                int64_t l) {
    const Extension* e = cache->pass;
    const CachePages tensors = cache_pages(cache, l);
    int64_t NH = shape->NH, dh = shape->dh, keys = 0;
    for (int64_t s = 0; s < e->sequences; s++)
        keys += (e->begins[s + 1] - e->begins[s]) * cache_position(e, s, e->begins[s + 1]);
#pragma omp parallel if (keys * NH * dh > 65536)
    for (int64_t s = 0; s < e->sequences; s++)
#pragma omp for schedule(dynamic) collapse(2) nowait
        for (int64_t h = 0; h < NH; h++)
            for (int64_t first = e->begins[s]; first < e->begins[s + 1]; first += QUERY_ROWS) {
                const HeadPages pages = head_pages(cache, &tensors, l, e->slots[s], h);
                Query queries[QUERY_ROWS];
                int64_t count = min64(QUERY_ROWS, e->begins[s + 1] - first);
                for (int64_t i = 0; i < count; i++) {
                    int64_t at = (first + i) * NH + h;
                    queries[i].o = a->o + at * dh;
                    queries[i].q = a->q + at * dh;
                    queries[i].position = cache_position(e, s, first + i);
                    queries[i].first_page = tensors.first_page[at];
                    queries[i].first_key = head_first_key(shape, queries[i].position);
                }
                attend(queries, count, &pages);
            }
}

// Attention of the pass's rows in layer l, whose keys, values and gates join the cache.
static inline void paged_attention(const PagedAttention* a, const HeadShape* shape, const Cache* cache,
                                   int64_t l) {
    cache_append(cache, a, shape, l);
    cache_attend(cache, a, shape, l);
}

// ----------------------------------------------------------------------------
// what the engine asks of a cache (llmc/run/trainer.h)

// The part of tensor i of a layer's states that belongs to a slot; NULL and 0 bytes for scratch and pages.
static inline char* cache_slot(const Cache* cache, int mixer, int i, int64_t l, int64_t slot, size_t* bytes) {
    const Activations* states = &cache->states[mixer];
    *bytes = 0;
    if (!states->rows[i].of_slots) return NULL;
    const int64_t all = states->rows[i].bytes;
    *bytes = (size_t)(all / cache->sizes.slots);
    return (char*)states->rows[i].data + l * all + slot * (int64_t)*bytes;
}

// Copies a slot's state of fixed size to another slot, which then has the same tokens.
static inline void cache_fork(Cache* cache, int64_t from, int64_t to) {
    for (int m = 0; m < NUM_MIXERS; m++)
        for (int64_t l = 0; l < cache->layers[m]; l++)
            for (int i = 0; i < cache->states[m].count; i++) {
                size_t bytes;
                const char* state = cache_slot(cache, m, i, l, from, &bytes);
                if (state) memcpy(cache_slot(cache, m, i, l, to, &bytes), state, bytes);
            }
}

static inline void cache_copy_page(Cache* cache, int32_t from, int32_t to) {
    const CachePages tensors = cache_pages(cache, 0);
    const HeadPages pages = head_pages(cache, &tensors, 0, -1, 0);
    page_copy(&pages, from, to);
}

// first [slots, heads]: pages at the beginning of each head that no later query of its group needs.
static inline void cache_forgotten(Cache* cache, int32_t* first) {
    const Config* c = cache->config;
    int64_t L = cache->layers[MIXER_ATTENTION], KVH = config_key_heads(c), group = c->num_heads / KVH;
    for (int64_t l = 0; l < L; l++) {
        const CachePages tensors = cache_pages(cache, l);
        for (int64_t i = 0; i < cache->sizes.slots * KVH; i++) {
            int64_t least = INT64_MAX;
            for (int64_t h = i * group; h < (i + 1) * group; h++)
                least = min64(least, tensors.sums[h].forgotten);
            first[(i / KVH * L + l) * KVH + i % KVH] = (int32_t)least;
        }
    }
}
