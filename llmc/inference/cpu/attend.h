/*
Inference on the CPU: attention over a paged cache, and which of its pages a head has forgotten.

A page (llmc/model/extension.h) is PAGE_TOKENS tokens of one head of keys: keys [dh, PAGE_TOKENS], transposed
so that a query's scores are sums of vectors; values [PAGE_TOKENS, dh]; cum_logf of each of the `group` heads
of queries that read it. Each query reads its keys page by page in an online softmax, so a row's bits depend
neither on the other rows of the pass nor on how the sequence was cut into passes.

Forgetting. Write c for cum_logf and U for a bound of all scores |q k| / sqrt(dh). The keys up to the end e of
a page have at most this share of query i's weight:

    exp(2 U) sum_j exp(-c_j), j <= e  /  sum_j exp(-c_j), j <= i

which only falls with i. Pages for which it is below eps (config.json's log_pruning_tolerance is ln eps) are
forgotten for good: what is left has all but eps of each row's weight. That holds in a window too: both sums
lose the same terms, and the quotient falls. Pages that have left the window are forgotten as well. U follows
from the weights of a QK norm; without one there is no U for queries to come, and gates forget nothing.

Called by cache.h.
*/
#pragma once

#include "../../model/extension.h"
#include "../../cpu/matmul.h"
#include "../../config/config.h"

// Sums of a head over its tokens so far
typedef struct {
    double cum_logf;
    double weight;     // ln of the sum of exp(-cum_logf)
    int64_t forgotten; // pages at its beginning
} HeadSums;

// The pages of all heads, and what one head's queries read of them.
typedef struct {
    real *k, *v;            // [pages, dh, PAGE_TOKENS], [pages, PAGE_TOKENS, dh]
    double* cum_logf;       // [pages, group, PAGE_TOKENS], NULL without gate
    HeadSums* page_end;     // [pages, group] at the page's last token
    const int32_t* numbers; // of the head's pages in its sequence
    int64_t dh, group;
    int64_t member; // the head's number in its group
} HeadPages;

// The head's cum_logf [PAGE_TOKENS] of a page, and its sums at the page's last token.
static inline double* page_cum_logf(const HeadPages* pages, int64_t page) {
    return pages->cum_logf + (page * pages->group + pages->member) * PAGE_TOKENS;
}
static inline HeadSums* page_end(const HeadPages* pages, int64_t page) {
    return pages->page_end + page * pages->group + pages->member;
}

// ----------------------------------------------------------------------------
// forgetting

// How a head finds the pages that it can forget.
typedef struct {
    bool drops;           // it forgets
    double limit;         // U of QK norm
    double log_tolerance; // ln eps
} Forgetting;

// U >= |q k| / sqrt(dh) for all queries and keys that a QK norm with these weights can make: each normed
// vector has length sqrt(dh) at most. RoPE rotates pairs of channels, so of each pair the larger weight
// counts, times rope_gain; 0: no RoPE. The published rule takes the largest of all channels.
static inline double qk_norm_limit(const real* q_weight, const real* k_weight, int64_t dh, double rope_gain,
                                   PruningRule rule) {
    double limit = 0, q_max = 0, k_max = 0;
    for (int64_t c = 0; c < dh; c++) {
        int64_t other = rope_gain > 0 ? (c + dh / 2) % dh : c;
        double q = fmax(fabs((double)q_weight[c]), fabs((double)q_weight[other]));
        double k = fmax(fabs((double)k_weight[c]), fabs((double)k_weight[other]));
        if (q * k > limit) limit = q * k; // not fmax: gcc 12.2 for aarch64 cannot compile such a loop
        if (q > q_max) q_max = q;
        if (k > k_max) k_max = k;
    }
    return (rule == PRUNING_ACP ? q_max * k_max : limit) * (rope_gain > 0 ? rope_gain : 1) * sqrt((double)dh);
}

// ln(e^a + e^b)
static inline double log_add(double a, double b) { return fmax(a, b) + log1p(exp(-fabs(a - b))); }

// Adds a token's log gate to the sums of its head, and counts the pages that it forgets. `position` is the
// token's, counted from 0.
static inline void head_sums_add(HeadSums* sums, const Forgetting* f, const HeadPages* pages,
                                 int64_t position, double logf) {
    sums->cum_logf += logf;
    sums->weight = log_add(sums->weight, -sums->cum_logf);
    while (f->drops && sums->forgotten < position / PAGE_TOKENS) {
        const HeadSums* end = page_end(pages, pages->numbers[sums->forgotten]);
        if (!(2 * f->limit + end->weight - sums->weight < f->log_tolerance)) break;
        sums->forgotten++;
    }
}

// ----------------------------------------------------------------------------
// the cache

// Stores a token's key and value [dh], once for the group, and its head's sums.
static inline void page_append(const HeadPages* pages, int64_t position, const real* k, const real* v,
                               const HeadSums* sums) {
    int64_t dh = pages->dh, page = pages->numbers[position / PAGE_TOKENS], at = position % PAGE_TOKENS;
    if (pages->member == 0) {
        for (int64_t x = 0; x < dh; x++) pages->k[(page * dh + x) * PAGE_TOKENS + at] = k[x];
        memcpy(pages->v + (page * PAGE_TOKENS + at) * dh, v, (size_t)dh * sizeof(real));
    }
    if (!pages->cum_logf) return;
    page_cum_logf(pages, page)[at] = sums->cum_logf;
    if (at == PAGE_TOKENS - 1) *page_end(pages, page) = *sums;
}

static inline void page_copy(const HeadPages* pages, int32_t from, int32_t to) {
    int64_t count = pages->dh * PAGE_TOKENS, sums = pages->group * PAGE_TOKENS, group = pages->group;
    memcpy(pages->k + to * count, pages->k + from * count, (size_t)count * sizeof(real));
    memcpy(pages->v + to * count, pages->v + from * count, (size_t)count * sizeof(real));
    if (!pages->cum_logf) return;
    memcpy(pages->cum_logf + to * sums, pages->cum_logf + from * sums, (size_t)sums * sizeof(double));
    memcpy(pages->page_end + to * group, pages->page_end + from * group, (size_t)group * sizeof(HeadSums));
}

// ----------------------------------------------------------------------------
// attention

// A query and its running softmax; o [dh] is divided by row_sum at the end.
typedef struct {
    real* o;
    const real* q;
    int64_t position, first_page;
    int64_t first_key; // of the window
    double cum_logf;
    real row_max, row_sum;
} Query;

// Adds the keys of page n that are in the query's window and not in its future; there is at least one.
static inline void attend_page(Query* query, const HeadPages* pages, int64_t n) {
    enum { VECTORS = PAGE_TOKENS / VECTOR_REALS };
    int64_t dh = pages->dh, page = pages->numbers[n];
    int64_t keys = min64(PAGE_TOKENS, query->position + 1 - n * PAGE_TOKENS);
    int64_t begin = query->first_key - n * PAGE_TOKENS;
    begin = begin < 0 ? 0 : begin;
    const real *k = pages->k + page * dh * PAGE_TOKENS, *v = pages->v + page * PAGE_TOKENS * dh;
    const double* cum_logf = pages->cum_logf ? page_cum_logf(pages, page) : NULL;
    real scores[PAGE_TOKENS], scale = (real)(1 / sqrt((double)dh)), highest = query->row_max, total = 0;
    Vector sum[VECTORS];
    memset(sum, 0, sizeof sum);
    for (int64_t x = 0; x < dh; x++)
        for (int i = 0; i < VECTORS; i++) sum[i] += query->q[x] * ((const Vector*)(k + x * PAGE_TOKENS))[i];
    memcpy(scores, sum, sizeof scores);
#pragma omp simd reduction(max : highest)
    for (int64_t j = begin; j < keys; j++) {
        scores[j] = scale * scores[j] + (real)(cum_logf ? query->cum_logf - cum_logf[j] : 0);
        highest = scores[j] > highest ? scores[j] : highest;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t j = begin; j < keys; j++) {
        scores[j] = exp_real(scores[j] - highest);
        total += scores[j];
    }
    real rescale = exp_real(query->row_max - highest);
    query->row_sum = query->row_sum * rescale + total;
    query->row_max = highest;
    for (int64_t x = 0; x < dh; x++) query->o[x] *= rescale;
    for (int64_t j = begin; j < keys; j++)
        for (int64_t x = 0; x < dh; x++) query->o[x] += scores[j] * v[j * dh + x];
}

enum { QUERY_ROWS = 16 }; // consecutive rows of a sequence that read a page together

// Attention of `count` queries at consecutive positions over the keys of their head: fills each one's o.
static inline void attend(Query* queries, int64_t count, const HeadPages* pages) {
    int64_t first = queries[0].first_page, last = queries[count - 1].position / PAGE_TOKENS;
    for (Query* q = queries; q < queries + count; q++) {
        int64_t page = pages->numbers[q->position / PAGE_TOKENS];
        q->cum_logf = pages->cum_logf ? page_cum_logf(pages, page)[q->position % PAGE_TOKENS] : 0;
        q->row_max = -INFINITY;
        q->row_sum = 0;
        memset(q->o, 0, (size_t)pages->dh * sizeof(real));
        first = min64(first, q->first_page);
    }
    for (int64_t n = first; n <= last; n++)
        for (Query* q = queries; q < queries + count; q++)
            if (n >= q->first_page && n * PAGE_TOKENS <= q->position) attend_page(q, pages, n);
    for (Query* q = queries; q < queries + count; q++)
        for (int64_t x = 0; x < pages->dh; x++) q->o[x] /= q->row_sum;
}
