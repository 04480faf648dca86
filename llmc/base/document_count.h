/*
What packed documents leave of causal attention: counts over sequences in which the end-of-text token begins a
document, of documents and of the pairs (query, key) of attention in its window, summed over the layers where
windows differ.

    inputs      E a b E c E E d        E: end of text
    documents   1 1 1 2 2 3 4 4        4
    pairs       1 2 3 4 5 6 7 8        36
    seen        1 2 3 1 2 1 1 2        13: pairs of one document

A sequence's first token begins a document whatever it is, so what is left of a document that an earlier
sequence began counts as one. Numbers are doubles, exact to 2^53, because they travel between ranks with the
loss.

Called by the data loader; StepVotes (llmc/model/shapes.h) has the counts of an optimizer step.
*/
#pragma once

#include <stdint.h>

typedef struct {
    double sequences, documents;
    double pairs, seen; // both 0 where there is no attention
} DocumentCount;

// The windows of a model's layers with attention, and how many have each.
enum { ATTENTION_WINDOWS = 64 };
typedef struct {
    int count;
    struct {
        int64_t keys; // 0: all
        double layers;
    } kinds[ATTENTION_WINDOWS];
} AttentionWindows;

// Pairs of causal attention over n tokens in a window of W keys, 0: without one.
static inline double attention_pairs(int64_t n, int64_t W) {
    const double whole = W && W < n ? (double)(n - W) : 0, rising = (double)n - whole; // windows
    return rising * (rising + 1) / 2 + whole * (double)W;
}

static inline double attention_pairs_of_layers(int64_t n, const AttentionWindows* windows) {
    double pairs = 0;
    for (int i = 0; i < windows->count; i++)
        pairs += windows->kinds[i].layers * attention_pairs(n, windows->kinds[i].keys);
    return pairs;
}

// Adds a sequence of T inputs.
static inline void count_documents(DocumentCount* count, const int32_t* inputs, int64_t T,
                                   int64_t end_of_text, const AttentionWindows* windows) {
    int64_t start = 0;
    for (int64_t t = 1; t <= T; t++) {
        if (t < T && inputs[t] != end_of_text) continue;
        count->documents++;
        count->seen += attention_pairs_of_layers(t - start, windows);
        start = t;
    }
    count->sequences++;
    count->pairs += attention_pairs_of_layers(T, windows);
}

// The share of the pairs that documents hide; 0 where none was counted.
static inline double documents_hidden(const DocumentCount* count) {
    return count->pairs > 0 ? 1 - count->seen / count->pairs : 0;
}
