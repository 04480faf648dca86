/*
Samples the next token from a model's logits, with temperature, top-k and top-p.

Logits are float [V]. A random number is a function of (seed, counter), so a draw does not depend on earlier
draws. Called by sample.h.

The most likely tokens are popped off a heap one by one until the cuts are reached, which takes O(V + n log V)
for n tokens kept. Without a cut nothing is sorted.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>
#include "../base/common.h"
#include "../base/random.h"

// Stream of random numbers of the sampler. Other streams count from 0.
#define RANDOM_STREAM_SAMPLER (UINT64_MAX - 1)

// All zeros but for the settings at first; freed by sampler_free.
typedef struct {
    double temperature; // divides the logits; 0: the most likely token, of several that with the lowest id
    int64_t top_k;      // draw from the k most likely tokens; 0: from all
    double top_p; // draw from the fewest most likely tokens, at least one, whose share of the probability
                  // that top-k leaves is at least top_p; 1: from all
    uint64_t seed;

    // scratch [capacity], capacity >= V
    int32_t* order; // a heap of ids, followed by the ids popped off it, the most likely one last
    double* weight; // of each id: probability, not normalised
    int64_t capacity;
} Sampler;

static inline void sampler_free(Sampler* s) {
    free(s->order);
    free(s->weight);
    s->order = NULL;
    s->weight = NULL;
    s->capacity = 0;
}

// The most likely token. -1 if a logit is NaN or the largest one is infinite, which is not a distribution.
static inline int64_t sampler_argmax(const float* logits, int64_t V) {
    int64_t best = 0;
    for (int64_t i = 0; i < V; i++) {
        if (isnan(logits[i])) return -1;
        if (logits[i] > logits[best]) best = i;
    }
    return isfinite(logits[best]) ? best : -1;
}

// Order of the heap: the more likely token first, of equally likely ones that with the lower id.
static inline bool sampler_before(const float* logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

// Moves the id at heap[i] down to its position in a heap of n.
static inline void sampler_sink(int32_t* heap, int64_t n, int64_t i, const float* logits) {
    int32_t id = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && sampler_before(logits, heap[child + 1], heap[child])) child++;
        if (sampler_before(logits, id, heap[child])) break;
        heap[i] = heap[child];
    }
    heap[i] = id;
}

// Pops the most likely of the n ids in the heap, stores it behind the n - 1 that remain, and returns its
// weight.
static inline double sampler_pop(const Sampler* s, int64_t n, const float* logits) {
    int32_t id = s->order[0];
    s->order[0] = s->order[n - 1];
    s->order[n - 1] = id;
    sampler_sink(s->order, n - 1, 0, logits);
    return s->weight[id];
}

// Cuts to top-k, then top-p: moves the tokens that are kept to the end of order and returns their number.
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

// Draws one of V tokens; counter numbers the draws of a seed. Returns -1 if a logit is NaN or the largest one
// infinite. Allocates scratch at the first call.
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
    // u < 1, so the target is below the total; the loop repeats the same additions, so a sum exceeds the
    // target
    double target = random_uniform(s->seed, RANDOM_STREAM_SAMPLER, counter) * total;
    for (int64_t i = first; i < V; i++)
        if ((sum += s->weight[s->order[i]]) > target) return s->order[i];
    return best; // not reached
}

#endif // LLMC_SAMPLER_H
