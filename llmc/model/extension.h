/*
Extension: the interface of inference between the engine (llmc/serve), which knows sequences and requests, and
a trainer's model, which knows layers.

Sequences live in slots of a cache. A pass extends some of them by some tokens each: a prompt in chunks, many
sequences by one token each, or both at once. The rows of a pass are its tokens: those of a sequence in order,
one sequence behind the other. What a row computes depends on no other sequence of the pass, but for rounding
on the GPU, whose GEMM kernels are chosen by the number of rows.

Keys, values and cum_logf are stored in pages: PAGE_TOKENS tokens of one head of keys of one layer, with a
cum_logf for each head of queries that reads it. The page table tells which page of the pool holds tokens
[n PAGE_TOKENS, (n + 1) PAGE_TOKENS) of a head. Sequences with the same beginning share its full pages. All
else that a sequence needs has a fixed size and belongs to its slot: the last token's projections for the
shifts, running sums of the gate, and the state of a recurrent mixer.

A cache that forgets. Keys that have left the window of a model that has one are seen by no row to come. And
gates only make cum_logf fall, so keys that once have less than eps of a row's weight never regain it, where
their scores are bounded for all queries to come (with QK norm). The model counts how many pages at the
beginning of each head are forgotten, by all heads of queries that read them, and skips them; the engine frees
them.

The engine owns the page table, allocates before a pass what the pass appends to, and frees. Called by
llmc/run/trainer.h, llmc/serve and the trainers.
*/
#pragma once

#include "sampler.h"

enum { PAGE_TOKENS = 64 };

// Defined by a trainer: a cache of sequences.
typedef struct Cache Cache;

// What a cache has room for.
typedef struct {
    int64_t slots;    // sequences held at a time
    int64_t capacity; // tokens of a sequence, at most
    int64_t pages;    // in the pool
    int64_t rows;     // tokens of a pass, at most
    int64_t outputs;  // rows of a pass whose outputs are wanted, at most
    bool drops;       // forgotten pages are counted; false: every key stays
} CacheSizes;

// Entries of a head's row in the page table.
static inline int64_t cache_table_width(const CacheSizes* s) {
    return (s->capacity + PAGE_TOKENS - 1) / PAGE_TOKENS;
}

// One pass. heads is the number of rows of the page table that a slot has: L KVH of the L layers with
// attention.
typedef struct {
    int64_t rows, sequences;
    const int32_t* tokens;  // [rows]
    const int32_t* slots;   // [sequences], each slot at most once
    const int64_t* begins;  // [sequences + 1], the first row of each sequence, and rows
    const int64_t* lengths; // [sequences], tokens in the slot before the pass
    const int32_t* pages; // [slots, heads, cache_table_width]: head l KVH + h; -1: forgotten, or not yet used

    int64_t outputs;            // rows with an output
    const int64_t* output_rows; // [outputs], never falling: a row can have several targets
    const int32_t* targets;     // [outputs], the token that follows the row; -1: none
    const Draw* draws;          // [outputs], how the next token is drawn; NULL: each is the most likely one
    // Passes to do one after another, of which each but the first extends every sequence by the token that it
    // has drawn in the one before. More than one only where each sequence has one row, and each row an
    // output.
    int64_t steps;
} Extension;

// Does a pass only continue sequences, each by one row, whose output is wanted?
static inline bool extension_decodes(const Extension* e) {
    bool decodes = e->rows == e->sequences && e->outputs == e->rows;
    for (int64_t i = 0; decodes && i < e->outputs; i++) decodes = e->output_rows[i] == i;
    return decodes;
}

// The output of a row.
typedef struct {
    double logprob; // of the target; 0 without
    int32_t best;   // the most likely next token, of equally likely ones the lowest; -1: logits not finite
    int32_t drawn;  // by the output's draw; best without
} RowScore;
