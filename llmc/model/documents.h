/*
Packed documents: with document_reset in config.json the end-of-text token begins a document, and no token
sees anything before the document that it is in. A sequence's first token begins one whatever it is.

    inputs      E a b E c E E d        E: end of text
    doc_start   0 0 0 3 3 5 6 6        the position at which the token's document begins

doc_start [B, T] is computed once a pass and never decreases along a sequence. A wall lies before each token t
with doc_start[t] == t: attention begins at key doc_start[t], shifts and convolutions read zeros before it,
and a recurrence starts from a state of zeros there. Positions, of RoPE and of losses, go on over walls.

Called by train_fox.c, the CPU's mixers and llmc/eval. On the GPU llmc/layers/documents.cuh computes
doc_start.
*/
#pragma once

#include <stdbool.h>
#include <stdint.h>

// log f of a document's first token, instead of its gate's: exact, because no pair of a query and a key of
// one document has this token's gate between them. Within a block the GPU's attention knows documents by
// these gates alone, as do the bounds of pruning: a key of an earlier document has no weight unless its score
// is above the row's own ones by 99,000. A lower number would cost precision: after 2,000 of these walls the
// doubles of cum_logf have steps of 3e-8.
#ifndef WALL_LOGF // gradcheck.c takes lower walls: differences of losses need more digits
#define WALL_LOGF (-1e5)
#endif

// Fills doc_start [B, T]; NULL: documents are not told apart.
static inline void find_documents(int32_t* doc_start, const int32_t* inputs, int64_t B, int64_t T,
                                  int64_t end_of_text) {
    for (int64_t i = 0; doc_start && i < B * T; i++)
        doc_start[i] = i % T == 0 || inputs[i] == end_of_text ? (int32_t)(i % T) : doc_start[i - 1];
}

// Does a document begin at row i of B T?
static inline bool begins_document(const int32_t* doc_start, int64_t i, int64_t T) {
    return doc_start ? doc_start[i] == i % T : i % T == 0;
}

// The same where documents are told apart; else there are no walls.
static inline bool is_wall(const int32_t* doc_start, int64_t i, int64_t T) {
    return doc_start && doc_start[i] == i % T;
}
