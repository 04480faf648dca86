/*
Samples the next token from a model's logits, with temperature, top-k, top-p and min-p.

Logits are float [V]. A random number is a function of (seed, counter), so a draw does not depend on earlier
draws. Weights, e^((logit - best) / temperature), are integers, so that sums do not depend on their order: the
CPU's sampler here and the GPU's (llmc/inference/cuda/scores.cuh) draw the same token from the same logits,
but for the rounding of exp.

The most likely tokens are popped off a heap one by one until the cuts are reached, which takes O(V + n log V)
for n tokens kept, on average. Without a cut nothing is sorted.

Called by llmc/inference/cpu/scores.h, which draws by sampler_next, and llmc/inference/cuda/scores.cuh, by
sampler_key, sampler_weight and sampler_target. llmc/serve makes the settings.
*/
#pragma once

#include <math.h>
#include "../base/common.h"
#include "../base/heap.h"
#include "../base/random.h"

// Stream of random numbers of the sampler. Other streams count from 0.
#define RANDOM_STREAM_SAMPLER (UINT64_MAX - 1)

typedef struct {
    double temperature; // divides the logits; 0: the most likely token, of several that with the lowest id
    int64_t top_k;      // draw from the k most likely tokens; 0: from all
    double top_p; // draw from the fewest most likely tokens, at least one, whose share of the probability
                  // that top-k leaves is at least top_p; 1: from all
    double min_p; // draw from tokens at least min_p times as likely as the most likely one; 0: from all
    uint64_t seed;
} SamplerSettings;

// One draw: `counter` numbers the draws of a seed.
typedef struct {
    SamplerSettings settings;
    uint64_t counter;
} Draw;

#define SAMPLER_ONE 1099511627776.0 // 2^40, the weight of the most likely token

// Scratch of one draw, [V] each
typedef struct {
    uint64_t* order;  // a heap of keys, followed by the keys popped off it, that of the most likely last
    uint64_t* weight; // of each id
} SamplerScratch;

// The most likely token. -1 if a logit is NaN or the largest one is infinite, which is not a distribution.
static inline int64_t sampler_argmax(const float* logits, int64_t V) {
    int64_t best = 0;
    for (int64_t i = 0; i < V; i++) {
        if (isnan(logits[i])) return -1;
        if (logits[i] > logits[best]) best = i;
    }
    return isfinite(logits[best]) ? best : -1;
}

// A token's key, with its id in the lower half. The smaller key is that of the more likely token, of equally
// likely ones that of the lower id.
RANDOM_FUNCTION uint64_t sampler_key(float logit, int64_t id) {
    uint32_t bits;
    logit += 0.0f; // -0 becomes 0
    memcpy(&bits, &logit, sizeof bits);
    if (bits >> 31 == 0) bits ^= 0x7fffffff; // positive floats descend; negative ones do already
    return (uint64_t)bits << 32 | (uint64_t)id;
}

// A logit's weight, relative to the most likely token's. Float is enough: logits are sums of bf16 products.
RANDOM_FUNCTION uint64_t sampler_weight(float logit, float best, double temperature) {
    const float scale = (float)fmin(1.4426950408889634 / temperature, 1e30); // log2 e; 0 times it is 0
    return (uint64_t)(exp2f((logit - best) * scale) * (float)SAMPLER_ONE + 0.5f);
}

// A number from 0 to total - 1, where total is at least 1. The token is drawn within whose weight it falls,
// in the order of ids.
RANDOM_FUNCTION uint64_t sampler_target(const SamplerSettings* s, uint64_t counter, uint64_t total) {
    uint64_t target = (uint64_t)(random_uniform(s->seed, RANDOM_STREAM_SAMPLER, counter) * (double)total);
    return target < total ? target : total - 1;
}

// Pops the most likely of the n tokens in the heap, stores its key behind the n - 1 that remain, and returns
// its weight.
static inline uint64_t sampler_pop(const SamplerScratch* s, int64_t n) {
    uint64_t key = heap_pop(s->order, &n);
    s->order[n] = key;
    return s->weight[(uint32_t)key];
}

// Cuts to top-k, then top-p, then min-p: returns the key of the last token that is kept.
static inline uint64_t sampler_cut(const SamplerScratch* s, const SamplerSettings* cut, int64_t V) {
    bool cut_k = cut->top_k > 0 && cut->top_k < V;
    if (!cut_k && cut->top_p >= 1 && cut->min_p <= 0) return UINT64_MAX;
    for (int64_t n = 0; n < V;) heap_push(s->order, &n, s->order[n]);

    int64_t popped = 0, most = cut_k ? cut->top_k : V, kept = 0;
    uint64_t total = 0, sum = 0, last = 0;
    if (cut_k)
        while (popped < most) total += sampler_pop(s, V - popped++);
    else
        for (int64_t i = 0; i < V; i++) total += s->weight[i];
    do {
        if (kept == popped) sampler_pop(s, V - popped++);
        uint64_t key = s->order[V - 1 - kept], weight = s->weight[(uint32_t)key];
        if (kept > 0 && (double)weight < cut->min_p * SAMPLER_ONE) break;
        kept++, sum += weight, last = key;
    } while ((cut->top_p >= 1 || (double)sum < cut->top_p * (double)total) && kept < most);
    return last;
}

// Draws one of V tokens. Returns -1 if a logit is NaN or the largest one infinite.
static inline int64_t sampler_next(const Draw* draw, const float* logits, int64_t V) {
    const SamplerSettings* settings = &draw->settings;
    int64_t best = sampler_argmax(logits, V), drawn = -1;
    if (best < 0 || settings->temperature == 0) return best;
    uint64_t* scratch = (uint64_t*)xcalloc(2 * (size_t)V, sizeof *scratch);
    const SamplerScratch s = {scratch, scratch + V};
    for (int64_t i = 0; i < V; i++) {
        s.order[i] = sampler_key(logits[i], i);
        s.weight[i] = sampler_weight(logits[i], logits[best], settings->temperature);
    }
    const uint64_t last = sampler_cut(&s, settings, V);
    uint64_t total = 0, sum = 0;
    for (int64_t i = 0; i < V; i++)
        if (sampler_key(logits[i], i) <= last) total += s.weight[i];
    const uint64_t target = sampler_target(settings, draw->counter, total);
    while (sum <= target) {
        drawn++;
        if (sampler_key(logits[drawn], drawn) <= last) sum += s.weight[drawn];
    }
    free(scratch);
    return drawn;
}
