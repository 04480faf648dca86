/*
The trainer table of the CPU trainer's inference, and a cache that tests fill pass by pass. Include after
train_fox.c without main (trainer/trainer.h).
*/
#pragma once

static const Trainer cached_trainer = {.element_bytes = sizeof(real),
                                       .pass_steps = 1,
                                       .page_bytes = page_bytes,
                                       .cache_new = cache_new,
                                       .extend = cache_extend,
                                       .cache_fork = cache_fork,
                                       .cache_copy_page = cache_copy_page,
                                       .cache_forgotten = cache_forgotten,
                                       .cache_free = cache_free};

typedef struct {
    Model* model;
    CacheSizes sizes;
    Cache* cache;
    PageTable pages;
    int64_t* lengths; // [slots]
    int32_t *copies, *first;
} Cached;

static Cached cached_new(Model* model, int64_t slots, int64_t capacity, bool drops) {
    Cached c;
    memset(&c, 0, sizeof c);
    int64_t heads = engine_heads(&model->config);
    CacheSizes sizes = {slots, capacity, 0, slots * capacity, slots * capacity, drops};
    sizes.pages = slots * heads * cache_table_width(&sizes);
    c.model = model, c.sizes = sizes;
    c.cache = cache_new(model, &sizes);
    c.pages = page_table_new(&sizes, heads);
    c.lengths = (int64_t*)xcalloc((size_t)slots, sizeof(int64_t));
    c.copies = (int32_t*)xcalloc((size_t)(2 * heads), sizeof(int32_t));
    c.first = (int32_t*)xcalloc((size_t)(slots * heads), sizeof(int32_t));
    return c;
}

static void cached_free(Cached* c) {
    cache_free(c->cache);
    page_table_free(&c->pages);
    free(c->lengths), free(c->copies), free(c->first);
}

static void cached_fork(Cached* c, int64_t from, int64_t to) {
    page_table_fork(&c->pages, from, to, c->lengths[from]);
    cache_fork(c->cache, from, to);
    c->lengths[to] = c->lengths[from];
}

// One pass: slot slots[s] by counts[s] tokens of texts[s], whose first token is the slot's first. Every row
// has an output: its scores and logits [V] are written to scores[s] and logits[s], at the row's position.
static void cached_pass(Cached* c, int64_t n, const int32_t* slots, const int64_t* counts,
                        int32_t* const* texts, RowScore** scores, float** logits) {
    int64_t V = c->model->config.vocab_size, rows = 0;
    for (int64_t s = 0; s < n; s++) rows += counts[s];
    int32_t *tokens = (int32_t*)xcalloc((size_t)rows, 4), *targets = (int32_t*)xcalloc((size_t)rows, 4);
    int64_t *begins = (int64_t*)xcalloc((size_t)n + 1, 8), *lengths = (int64_t*)xcalloc((size_t)n, 8),
            *outputs = (int64_t*)xcalloc((size_t)rows, 8);
    RowScore* all_scores = (RowScore*)xcalloc((size_t)rows, sizeof(RowScore));
    float* all_logits = (float*)xcalloc((size_t)(rows * V), sizeof(float));
    for (int64_t s = 0, row = 0; s < n; s++) {
        lengths[s] = c->lengths[slots[s]], begins[s] = row;
        int64_t pairs = page_table_append(&c->pages, slots[s], lengths[s], counts[s], c->copies);
        for (int64_t i = 0; i < pairs; i++) cache_copy_page(c->cache, c->copies[2 * i], c->copies[2 * i + 1]);
        for (int64_t i = 0; i < counts[s]; i++, row++) {
            tokens[row] = texts[s][lengths[s] + i], targets[row] = texts[s][lengths[s] + i + 1];
            outputs[row] = row;
        }
        begins[s + 1] = row;
    }
    Extension e = {rows, n, tokens, slots, begins, lengths, c->pages.table, rows, outputs, targets, NULL, 1};
    cache_extend(c->cache, &e, all_scores, all_logits);
    for (int64_t s = 0; s < n; s++) {
        memcpy(scores[s] + lengths[s], all_scores + begins[s], (size_t)counts[s] * sizeof(RowScore));
        memcpy(logits[s] + lengths[s] * V, all_logits + begins[s] * V,
               (size_t)(counts[s] * V) * sizeof(float));
        c->lengths[slots[s]] += counts[s];
    }
    if (c->sizes.drops) {
        cache_forgotten(c->cache, c->first);
        for (int64_t s = 0; s < n; s++)
            page_table_forget(&c->pages, slots[s], c->first + slots[s] * c->pages.heads);
    }
    free(tokens), free(targets), free(begins), free(lengths), free(outputs), free(all_scores),
        free(all_logits);
}
