/*
Packs documents into rows of T tokens: a shard of documents of D = T tokens (shard.h), so that every row
begins with a document. Inside a row an end-of-text token precedes each further document, as in a stream; the
data loader puts one before the row. Called by splits.h.

    inputs    E a a a a a E b b E c c    E: end of text; c is cropped
    targets   a a a a a E b b E c c c    the row in the shard

Best fit decreasing among the documents of a buffer: the longest of them that fits follows. The last document
of a row is cropped where the row ends; where no document fits, or where this loses less than the shortest one
would behind the longest that fits. No row is padded. What remains at the end and fills no row is cropped too.

A row is made when the buffer is full, so memory is bounded: 64 rows, at most 64 MiB, or one row where that is
more. A larger one would crop little less, and put more rows of short documents, which come last, behind one
another. Full rows of a longer document are written at once; its last piece comes here as a document. Among
equal lengths the oldest comes first, so the rows depend on the documents and their order alone.
*/
#pragma once

#include "shard_writer.h"

enum { PACK_ROWS = 64, PACK_TOKENS = 16 << 20, PACK_DOCUMENTS = 16 << 10 }; // the buffer is full at any

typedef struct {
    uint32_t* tokens;
    int64_t count; // 1 .. row - 1
} PackDocument;

typedef struct {
    ShardWriter* writer;
    int64_t row;             // T
    uint32_t end_of_text;    // its id
    PackDocument* documents; // by length, of equal length the oldest first
    size_t capacity;
    int64_t count;
    int64_t held;          // tokens of the documents, with an end of text for each
    int64_t ends, cropped; // end-of-text tokens written; tokens cropped
} Packer;

static inline Packer pack_open(ShardWriter* writer, int64_t row, uint32_t end_of_text) {
    Packer p;
    memset(&p, 0, sizeof p);
    p.writer = writer;
    p.row = row;
    p.end_of_text = end_of_text;
    return p;
}

// The index of the first document of at least `length` tokens.
static inline int64_t pack_find(const Packer* p, int64_t length) {
    int64_t first = 0, last = p->count;
    while (first < last) {
        const int64_t middle = first + (last - first) / 2;
        if (p->documents[middle].count < length)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

// The index of the document for the next `room` tokens of a row.
static inline int64_t pack_choose(const Packer* p, int64_t room) {
    const PackDocument* documents = p->documents;
    const int64_t longer = pack_find(p, room + 1);
    if (longer == 0) return 0; // none fits
    const int64_t best = pack_find(p, documents[longer - 1].count);
    const int64_t left = room - documents[best].count; // an end of text fills 1
    if (longer == p->count || left <= 1) return best;
    const int64_t needed = documents[best == 0].count + 1; // by the shortest of the others
    return documents[longer].count - room < needed - left ? longer : best;
}

// Writes a row; the documents fill one.
static inline bool pack_row(Packer* p, Error* err) {
    for (int64_t room = p->row; room > 0;) {
        if (room < p->row) {
            if (!shard_write(p->writer, &p->end_of_text, 1, err)) return false;
            p->ends++;
            if (--room == 0) break;
        }
        const int64_t i = pack_choose(p, room);
        const PackDocument chosen = p->documents[i];
        const int64_t n = chosen.count < room ? chosen.count : room;
        p->count--;
        memmove(p->documents + i, p->documents + i + 1, (size_t)(p->count - i) * sizeof chosen);
        const bool ok = shard_write(p->writer, chosen.tokens, n, err);
        free(chosen.tokens);
        if (!ok) return false;
        p->held -= chosen.count + 1;
        p->cropped += chosen.count - n;
        room -= n;
    }
    return true;
}

// Adds a copy of a document of less than T tokens.
static inline bool pack_add(Packer* p, const uint32_t* tokens, int64_t count, Error* err) {
    if (count == 0) return true;
    const size_t bytes = (size_t)count * sizeof *tokens;
    const int64_t i = pack_find(p, count + 1);
    p->documents = (PackDocument*)xgrow(p->documents, (size_t)p->count, &p->capacity, sizeof *p->documents);
    memmove(p->documents + i + 1, p->documents + i, (size_t)(p->count - i) * sizeof *p->documents);
    p->documents[i].tokens = (uint32_t*)memcpy(xrealloc(NULL, bytes), tokens, bytes);
    p->documents[i].count = count;
    p->count++;
    p->held += count + 1;
    const bool full = p->held / PACK_ROWS >= p->row || p->held >= PACK_TOKENS || p->count >= PACK_DOCUMENTS;
    return !full || p->held < p->row || pack_row(p, err);
}

// Writes the rows that the remaining documents fill.
static inline bool pack_end(Packer* p, Error* err) {
    while (p->held >= p->row)
        if (!pack_row(p, err)) return false;
    p->cropped += p->held - p->count;
    for (int64_t i = 0; i < p->count; i++) free(p->documents[i].tokens);
    free(p->documents);
    p->documents = NULL;
    p->count = p->held = 0;
    return true;
}

// Prints what was packed, of both splits. Shares are of the tokens of all documents.
static inline void pack_print(const Packer packers[2]) {
    const int64_t row = packers[0].row, tokens = packers[0].writer->total + packers[1].writer->total;
    const int64_t cropped = packers[0].cropped + packers[1].cropped;
    const int64_t given = tokens - packers[0].ends - packers[1].ends + cropped;
    printf("packed into %s of %s: cropped %s (%.3f%%), padded none\n", counted(tokens / row, "row").text,
           counted(row, "token").text, counted(cropped, "token").text,
           100.0 * (double)cropped / (double)given);
}
