/*
Draws the next token from a model's logits: temperature, top-k, top-p.

The random number is a function of (seed, counter), so a text is a function of its seed, whatever was drawn
before. The likeliest tokens come off a heap one by one, only as many as the cuts keep: O(V + n log V) for n
tokens kept, and without a cut nothing is sorted at all.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>
#include "../base/common.h"
#include "../base/random.h"

// The stream of random numbers that samples draw from, out of the way of those that count from 0.
#define RANDOM_STREAM_SAMPLER (UINT64_MAX - 1)

// Starts from all zeros but for the settings; ends with sampler_free.
typedef struct {
    double
        temperature; // divides the logits; 0 takes the likeliest token, of equals the one with the lowest id
    int64_t top_k;   // draw from the k likeliest tokens; 0: from all
    double top_p;    // draw from the fewest likeliest tokens, but at least one, whose share of what top-k has
                     // left reaches p; 1: from all
    uint64_t seed;

    // scratch [V]
    int32_t* order; // first a heap of ids; the tokens taken off it gather at the end, the likeliest last
    double* weight; // of each id: its probability but for a common factor
    int64_t capacity;
} Sampler;

static inline void sampler_free(Sampler* s) {
    free(s->order);
    free(s->weight);
    s->order = NULL;
    s->weight = NULL;
    s->capacity = 0;
}

// The likeliest token. -1 if a logit is NaN, or the largest is infinite: such logits describe no
// distribution.
static inline int64_t sampler_argmax(const float* logits, int64_t V) {
    int64_t best = 0;
    for (int64_t i = 0; i < V; i++) {
        if (isnan(logits[i])) return -1;
        if (logits[i] > logits[best]) best = i;
    }
    return isfinite(logits[best]) ? best : -1;
}

// The order of the heap: the likelier token first, of equals the one with the lower id.
static inline bool sampler_before(const float* logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

// Lets the id at heap[i] sink to its place among n.
static inline void sampler_sink(int32_t* heap, int64_t n, int64_t i, const float* logits) {
    int32_t id = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && sampler_before(logits, heap[child + 1], heap[child])) child++;
        if (sampler_before(logits, id, heap[child])) break;
        heap[i] = heap[child];
    }
    heap[i] = id;
}

// Takes the likeliest of the n ids in the heap off it, puts it right behind the n - 1 that are left, and
// returns its weight.
static inline double sampler_pop(const Sampler* s, int64_t n, const float* logits) {
    int32_t id = s->order[0];
    s->order[0] = s->order[n - 1];
    s->order[n - 1] = id;
    sampler_sink(s->order, n - 1, 0, logits);
    return s->weight[id];
}

// Cuts to top-k, then top-p: moves the tokens that stay to the end of order and returns their number.
static inline int64_t sampler_cut(const Sampler* s, int64_t V, const float* logits) {
    bool cut_k = s->top_k > 0 && s->top_k < V;
    if (!cut_k && s->top_p >= 1) return V;
    for (int64_t i = V / 2 - 1; i >= 0; i--) sampler_sink(s->order, V, i, logits);

    int64_t popped = 0;
    double total = 0;
    if (cut_k)
        while (popped < s->top_k) total += sampler_pop(s, V - popped++, logits);
    else
        for (int64_t i = 0; i < V; i++) total += s->weight[i];
    if (s->top_p >= 1) return popped;

    int64_t kept = 0, most = cut_k ? popped : V;
    double sum = 0;
    do {
        if (kept == popped) sampler_pop(s, V - popped++, logits);
        sum += s->weight[s->order[V - ++kept]];
    } while (sum < s->top_p * total && kept < most);
    return kept;
}

// Draws one of V tokens; counter numbers the draws of a seed. Returns -1, for the caller to report, if a
// logit is NaN or the largest one infinite. The scratch grows once to V; nothing else is allocated.
static inline int64_t sampler_next(Sampler* s, const float* logits, int64_t V, uint64_t counter) {
    int64_t best = sampler_argmax(logits, V);
    if (best < 0 || s->temperature == 0) return best;
    if (V > s->capacity) {
        s->order = (int32_t*)xrealloc(s->order, (size_t)V * sizeof *s->order);
        s->weight = (double*)xrealloc(s->weight, (size_t)V * sizeof *s->weight);
        s->capacity = V;
    }
    for (int64_t i = 0; i < V; i++) {
        s->order[i] = (int32_t)i;
        s->weight[i] = exp(((double)logits[i] - (double)logits[best]) / s->temperature); // 1 for the best
    }
    const int64_t first = V - sampler_cut(s, V, logits);
    double total = 0, sum = 0;
    for (int64_t i = first; i < V; i++) total += s->weight[s->order[i]];
    // u < 1 keeps the target below the total, and the sums below repeat those above bit by bit: one passes it
    double target = random_uniform(s->seed, RANDOM_STREAM_SAMPLER, counter) * total;
    for (int64_t i = first; i < V; i++)
        if ((sum += s->weight[s->order[i]]) > target) return s->order[i];
    return best; // not reached
}

#endif // LLMC_SAMPLER_H
