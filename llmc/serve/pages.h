/*
Page table of a cache (llmc/model/extension.h): which pages are free, and which slots hold each. Host memory
only; a page is a number.

Invariants:

 1. A page is free or held by uses[page] slots. A slot shares pages with the slots forked from it.
 2. A partial page, to which a slot appends, is that slot's alone: page_table_append first replaces a shared
    one by a copy (copy on write), whose contents the caller copies.
 3. All heads of a slot have as many pages, but for those that a head has forgotten: entries of -1 at its
    beginning.

Callers check page_table_needed before they append; taking a page when none is free is a bug (assert). Called
by engine.h.
*/
#pragma once

#include "../base/common.h"
#include "../model/extension.h"

typedef struct {
    int64_t pages, heads, width; // width: entries of a head's row in the table
    int64_t num_free;
    int32_t* free;     // [pages] numbers of free pages, the first num_free of them
    int32_t* uses;     // [pages] slots that hold the page
    int32_t* table;    // [slots, heads, width]
    int32_t* released; // [slots, heads] pages at the beginning of a head that were forgotten
    int64_t most_held; // most pages in use at a time, so far
    int64_t forgotten; // number of pages given back because they were forgotten, so far
} PageTable;

static inline void page_table_free(PageTable* t) {
    free(t->free);
    free(t->uses);
    free(t->table);
    free(t->released);
    memset(t, 0, sizeof *t);
}

// Returns a table whose slots have no pages, or zeros if memory is too small. Free with page_table_free.
static inline PageTable page_table_new(const CacheSizes* sizes, int64_t heads) {
    PageTable t;
    memset(&t, 0, sizeof t);
    t.pages = t.num_free = sizes->pages;
    t.heads = heads;
    t.width = cache_table_width(sizes);
    size_t rows = (size_t)(sizes->slots * heads), entries = rows * (size_t)t.width;
    t.free = (int32_t*)calloc((size_t)t.pages + 1, sizeof *t.free); // NULL for 0 bytes would be an error
    t.uses = (int32_t*)calloc((size_t)t.pages + 1, sizeof *t.uses);
    t.table = (int32_t*)calloc(entries + 1, sizeof *t.table);
    t.released = (int32_t*)calloc(rows + 1, sizeof *t.released);
    if (!t.free || !t.uses || !t.table || !t.released) {
        page_table_free(&t);
        return t;
    }
    memset(t.table, 0xff, entries * sizeof *t.table);                             // -1
    for (int64_t i = 0; i < t.pages; i++) t.free[i] = (int32_t)(t.pages - 1 - i); // the lowest is taken first
    return t;
}

// Number of pages that hold `tokens` tokens of a head.
static inline int64_t pages_of(int64_t tokens) { return (tokens + PAGE_TOKENS - 1) / PAGE_TOKENS; }

static inline int32_t* page_table_row(const PageTable* t, int64_t slot, int64_t head) {
    return t->table + (slot * t->heads + head) * t->width;
}

static inline int32_t page_table_take(PageTable* t) {
    assert(t->num_free > 0);
    int32_t page = t->free[--t->num_free];
    t->uses[page] = 1;
    if (t->pages - t->num_free > t->most_held) t->most_held = t->pages - t->num_free;
    return page;
}

// Gives up one slot's hold of the page in an entry of the table. Returns whether the page is now free.
static inline bool page_table_drop(PageTable* t, int32_t* entry) {
    int32_t page = *entry;
    *entry = -1;
    if (page < 0 || --t->uses[page] > 0) return false;
    t->free[t->num_free++] = page;
    return true;
}

// Whether a slot of `length` tokens ends with a partial page that other slots share.
static inline bool page_table_partial_is_shared(const PageTable* t, int64_t slot, int64_t length) {
    if (length % PAGE_TOKENS == 0 || t->heads == 0) return false;
    return t->uses[page_table_row(t, slot, 0)[length / PAGE_TOKENS]] > 1;
}

// Number of free pages that appending `more` tokens to a slot of `length` tokens takes.
static inline int64_t page_table_needed(const PageTable* t, int64_t slot, int64_t length, int64_t more) {
    return t->heads *
           (pages_of(length + more) - pages_of(length) + page_table_partial_is_shared(t, slot, length));
}

// Makes room for `more` tokens in a slot of `length` tokens: page_table_needed pages must be free. copies [2
// heads] gets pairs of pages, from and to, whose contents the caller copies; returns the number of pairs.
static inline int64_t page_table_append(PageTable* t, int64_t slot, int64_t length, int64_t more,
                                        int32_t* copies) {
    bool shared = page_table_partial_is_shared(t, slot, length);
    for (int64_t h = 0; h < t->heads; h++) {
        int32_t* row = page_table_row(t, slot, h);
        if (shared) {
            int32_t* partial = &row[length / PAGE_TOKENS];
            copies[2 * h] = *partial;
            page_table_drop(t, partial);
            copies[2 * h + 1] = *partial = page_table_take(t);
        }
        for (int64_t n = pages_of(length); n < pages_of(length + more); n++) row[n] = page_table_take(t);
    }
    return shared ? t->heads : 0;
}

// Makes slot `to`, which has no pages, share those of `from`.
static inline void page_table_fork(PageTable* t, int64_t from, int64_t to, int64_t length) {
    for (int64_t h = 0; h < t->heads; h++) {
        const int32_t* row = page_table_row(t, from, h);
        memcpy(page_table_row(t, to, h), row, (size_t)pages_of(length) * sizeof *row);
        for (int64_t n = 0; n < pages_of(length); n++)
            if (row[n] >= 0) t->uses[row[n]]++;
        t->released[to * t->heads + h] = t->released[from * t->heads + h];
    }
}

// Gives back a slot's forgotten pages: the first first[h] pages of head h.
static inline void page_table_forget(PageTable* t, int64_t slot, const int32_t* first) {
    for (int64_t h = 0; h < t->heads; h++) {
        int32_t* released = &t->released[slot * t->heads + h];
        for (; *released < first[h]; ++*released)
            t->forgotten += page_table_drop(t, &page_table_row(t, slot, h)[*released]);
    }
}

// Gives back all pages of a slot of `length` tokens.
static inline void page_table_release(PageTable* t, int64_t slot, int64_t length) {
    for (int64_t h = 0; h < t->heads; h++) {
        for (int64_t n = 0; n < pages_of(length); n++) page_table_drop(t, &page_table_row(t, slot, h)[n]);
        t->released[slot * t->heads + h] = 0;
    }
}
