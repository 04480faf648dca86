/*
llmc/attention/pruning.cuh: the bounds against the rule, per block and per row, on the CPU, and the effect of
pruning on attention.

Attention with the bounds is compared with attention without them, on the same kernels: it may change by as
much as these round. With gates that are spread, as trained ones are, the pruned keys have almost no weight;
one case is built so that a row loses as much as it may.

    test_pruning [SEED]     everything
    test_pruning quick      without the tests that are slow under compute-sanitizer
*/
#include <algorithm>
#include "pruning_case.cuh"
namespace exact { // its shapes are those of test_attention
#include "attention_oracle.cuh"
}

// ----------------------------------------------------------------------------
// the bounds

// sum_j exp(c_i - c_j), j <= i, of a head, where c is cum_logf
static vector<double> weight_sums(const double* c, int64_t T) {
    vector<double> sums;
    for (int64_t i = 0; i < T; i++) sums.push_back(1 + (i ? exp(c[i] - c[i - 1]) * sums.back() : 0));
    return sums;
}
// The logarithm of its part from key `first` on
static double log_sum(const vector<double>& sums, const double* c, int64_t first, int64_t i) {
    double before = first > 0 ? exp(c[i] - c[first - 1]) * sums[(size_t)first - 1] : 0;
    return log(fmax(sums[(size_t)i] - before, 1));
}

static int64_t last_of(int64_t block, int64_t T) { return std::min(T, (block + 1) * ATTENTION_BLOCK) - 1; }

// The bounds of it in pruning.cuh: a lower one for the queries of block m, an upper one for the last key of
// block n
static double least_log_sum(const double* c, const Shape& s, int64_t m) {
    double sum = 0;
    for (int64_t n = std::max<int64_t>(m - PRUNING_BLOCKS, 0); n < m; n++)
        if (!s.window || n * ATTENTION_BLOCK > last_of(m, s.T) - s.window) // all queries see all of its keys
            sum += exp(c[last_of(m, s.T)] - c[n * ATTENTION_BLOCK]);
    return log(1 + ATTENTION_BLOCK * sum);
}
static double most_log_sum(const double* c, int64_t T, int64_t n) {
    double sum = 0;
    for (int64_t b = 0; b <= n; b++)
        sum += exp(c[last_of(n, T)] - c[last_of(std::max(b, n - PRUNING_BLOCKS), T)]);
    return log(ATTENTION_BLOCK * sum);
}

// Checks that the bounds agree with one another and with the rule, given each block's least lse [B NH,
// blocks], and that no row loses more than eps, given a lower bound of its lse [B NH, T].
static void check_rule(const char* name, const Inputs& in, const vector<int>& first, const vector<int>& last,
                       const vector<double>& least_lse, const vector<double>& lse) {
    int64_t T = in.s.T, blocks = in.s.blocks(), wrong = 0, heavy = 0;
    for (int64_t head = 0; head < in.s.heads(); head++) {
        double limit = in.score_limit(head), delta = LOG_TOLERANCE - limit, reach = -INFINITY;
        const double *c = in.cum_logf.data() + head * T, *row_lse = lse.data() + head * T;
        const int *first_key = first.data() + head * blocks, *last_query = last.data() + head * blocks;
        vector<double> sums = weight_sums(c, T), past;
        for (int64_t n = 0; n < blocks; n++) past.push_back(c[last_of(n, T)] - most_log_sum(c, T, n));
        for (int64_t m = blocks - 1; m >= 0; m--) {
            reach = fmax(reach, c[m * ATTENTION_BLOCK] - least_lse[(size_t)(head * blocks + m)]);
            wrong += first_key[m] < 0 || last_query[m] >= blocks;
            for (int64_t n = 0; n <= m; n++) {
                bool kept = first_key[m] <= n;
                double x = reach - past[(size_t)n];
                // Norms of q and k, and sums over blocks, are in float.
                bool near = fabs(x - delta) <= 1e-5 * fabs(delta);
                bool wanted = in.sees(head, m, n) && (m == n || x >= delta);
                wrong += kept != (m <= last_query[n]) || (!near && kept != wanted);
            }
            int64_t J = first_key[m] * ATTENTION_BLOCK - 1; // the last skipped key
            for (int64_t i = m * ATTENTION_BLOCK; i <= last_of(m, T); i++) {
                int64_t seen = in.first_key(head, i);
                if (J < seen) continue;
                heavy += limit + c[i] - c[J] + log_sum(sums, c, seen, J) - row_lse[i] >= LOG_TOLERANCE + 1e-3;
            }
        }
    }
    CHECK(wrong == 0, "%s: %lld pairs of blocks disagree with the rule", name, (long long)wrong);
    CHECK(heavy == 0, "%s: %lld rows lose more than eps", name, (long long)heavy);
}

// Is `head` a band head, where least_lse has the least lse of each block of queries? 2: too near to tell,
// as sums are in float.
static int is_band(const Inputs& in, int64_t head, const vector<double>& least_lse) {
    const int64_t T = in.s.T;
    const double *c = in.cum_logf.data() + head * T, limit = in.score_limit(head);
    int band = in.s.dh == 64 && !in.s.window;
    for (int64_t i = 2 * ATTENTION_BAND; i < T; i += ATTENTION_BAND) {
        const int64_t near = i - ATTENTION_BAND - PRUNING_KEYS, skipped = i - ATTENTION_BAND - 1;
        double sum = (double)near * exp(c[skipped] - c[near - 1]);
        for (int64_t j = near; j <= skipped; j++) sum += exp(c[skipped] - c[j]);
        const double least = least_lse[(size_t)(head * in.s.blocks() + i / ATTENTION_BLOCK)];
        const double over = c[i] - c[skipped] + log(sum) - least - (LOG_TOLERANCE - limit);
        const double error = 1e-4 + 1e-5 * limit;
        if (over > error) return 0;
        if (over >= -error) band = band ? 2 : 0;
    }
    return band;
}

// Counts the pairs of blocks that first_key_block keeps, and checks that the heads are ordered by them, band
// heads last. least_lse is as in is_band; empty: there are no band heads.
static PruningCount check_work(const char* name, const Inputs& in, const vector<int>& first,
                               vector<int> order, const vector<double>& least_lse) {
    const Shape& s = in.s;
    PruningCount count = {};
    vector<int64_t> work;
    vector<int> expected;
    for (int64_t head = 0; head < s.heads(); head++) {
        work.push_back(0), expected.push_back((int)head);
        for (int64_t m = 0; m < s.blocks(); m++) {
            work.back() += m - first[(size_t)(head * s.blocks() + m)] + 1;
            for (int64_t n = 0; n <= m; n++) count.all += in.sees(head, m, n);
        }
        count.kept += (unsigned long long)work.back();
    }
    const int others = order.back();
    order.pop_back();
    CHECK(others >= 0 && others <= s.heads(), "%s: %d of %lld heads are no band heads", name, others,
          (long long)s.heads());
    vector<bool> band((size_t)s.heads());
    for (int64_t i = others; i < s.heads(); i++) band.at((size_t)order[(size_t)i]) = true;
    for (int64_t head = 0; head < s.heads(); head++) {
        const int wanted = least_lse.empty() ? 0 : is_band(in, head, least_lse);
        CHECK(wanted == 2 || band[(size_t)head] == (wanted == 1), "%s: is head %lld a band head?", name,
              (long long)head);
    }
    std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) {
        if (band[(size_t)a] != band[(size_t)b]) return (bool)band[(size_t)b];
        return work[(size_t)a] > work[(size_t)b];
    });
    CHECK(order == expected, "%s: heads are not ordered by work", name);
    return count;
}

static void test_bounds(Gates gates, QKNorm norm, const Shape& s) {
    char name[128];
    const int64_t T = s.T;
    snprintf(name, sizeof name, "%s, %s, %lldx%lldx%lld, dh %lld, W %lld", gates_names[gates],
             norm_names[norm], (long long)s.B, (long long)T, (long long)s.NH, (long long)s.dh,
             (long long)s.window);
    Inputs in(s, norm, gates);
    Bounds bounds(in);
    vector<int> first = bounds.first_key_block.host();
    vector<double> least_lse, lse;
    for (int64_t head = 0; head < s.heads(); head++) {
        const double *c = in.cum_logf.data() + head * T, limit = in.score_limit(head);
        vector<double> sums = weight_sums(c, T);
        for (int64_t i = 0; i < T; i++) lse.push_back(log_sum(sums, c, in.first_key(head, i), i) - limit);
        for (int64_t m = 0; m < s.blocks(); m++) least_lse.push_back(least_log_sum(c, s, m) - limit);
    }
    check_rule(name, in, first, bounds.last_query_block.host(), least_lse, lse);
    PruningCount expected = check_work(name, in, first, bounds.head_order.host(), least_lse),
                 count = bounds.count.host()[0];
    CHECK(count.all == 2 * expected.all && count.kept == 2 * expected.kept,
          "%s: the count is %llu of %llu, not twice %llu of %llu", name, count.kept, count.all, expected.kept,
          expected.all);
    vector<unsigned long long> head_kept((size_t)s.NH);
    for (int64_t head = 0; head < s.heads(); head++)
        for (int64_t m = 0; m < s.blocks(); m++)
            head_kept[(size_t)(head % s.NH)] +=
                2 * (unsigned long long)(m - first[(size_t)(head * s.blocks() + m)] + 1);
    CHECK(head_kept == bounds.head_kept.host(), "%s: the counts of heads", name);
    if (gates == OPEN || (gates == WALLS && norm == NO_NORM))
        CHECK(expected.kept == expected.all, "%s: blocks were pruned", name);
    if (gates == DEAD)
        CHECK(expected.kept == (unsigned long long)(s.heads() * s.blocks()),
              "%s: dead gates keep more than the diagonal", name);
}

// The bounds of documents alone, in both passes: all that they and the window do not hide.
static void test_documents(const Shape& s) {
    char name[128];
    snprintf(name, sizeof name, "documents alone, %lldx%lldx%lld, W %lld", (long long)s.B, (long long)s.T,
             (long long)s.NH, (long long)s.window);
    Inputs in(s, NO_NORM, WALLS);
    Bounds bounds(in, false, false);
    for (int pass = 0; pass < 2; pass++) {
        if (pass) bounds.become_backward(NULL);
        vector<int> first = bounds.first_key_block.host(), last = bounds.last_query_block.host();
        int64_t wrong = 0, blocks = s.blocks();
        for (int64_t head = 0; head < s.heads(); head++)
            for (int64_t m = 0; m < blocks; m++)
                for (int64_t n = 0; n <= m; n++) {
                    bool sees = in.sees(head, m, n);
                    wrong += (first[(size_t)(head * blocks + m)] <= n) != sees ||
                             (m <= last[(size_t)(head * blocks + n)]) != sees;
                }
        CHECK(wrong == 0, "%s, pass %d: %lld pairs of blocks are wrong", name, pass, (long long)wrong);
        PruningCount expected = check_work(name, in, first, bounds.head_order.host(), {}),
                     count = bounds.count.host()[0];
        unsigned long long times = pass ? 4 : 2; // twice, and the backward pass counts double
        CHECK(expected.all == expected.kept && count.all == times * expected.all && count.kept == count.all,
              "%s: the count is %llu of %llu, not %llu times %llu", name, count.kept, count.all, times,
              expected.all);
    }
}

// Where all gates are NaN, or queries infinite, the bounds are in range, and nothing is pruned.
static void test_not_finite(void) {
    Shape s = {1, 1000, 2, 64};
    for (double bad : {(double)NAN, (double)-INFINITY}) {
        Inputs in(s, NO_NORM, OPEN);
        if (isnan(bad))
            std::fill(in.cum_logf.begin(), in.cum_logf.end(), bad);
        else
            in.q[77] = rounded<bf16>(bad);
        Bounds bounds(in);
        PruningCount count = bounds.count.host()[0];
        CHECK(count.kept == count.all, "%g: kept %llu of %llu", bad, count.kept, count.all);
    }
}

// ----------------------------------------------------------------------------
// attention

struct Results {
    Buffer<bf16> o, dq, dk, dv;
    Buffer<float> lse, dcum_logf;
    explicit Results(const Shape& s)
        : o(s.size()), dq(s.size()), dk(s.size()), dv(s.size()), lse((size_t)s.tokens()), dcum_logf(lse.n) {}
    void compute(const Inputs& in, const vector<bf16>& v_host, const vector<bf16>& dout_host,
                 Bounds* bounds) {
        HeadShape shape = in.s.head_shape(0); // the kernels see walls in cum_logf and in the bounds
        Buffer<bf16> q(in.q), k(in.k), v(v_host), dout(dout_host);
        Buffer<double> cum_logf(in.cum_logf);
        Buffer<char> scratch(attention_scratch_bytes(&shape, true));
        const AttentionBounds* at = bounds ? &bounds->pruning.bounds : NULL;
        AttentionForward forward = {o, lse, q, k, v, cum_logf, at, scratch};
        AttentionBackward backward = {dq, dk,  dv,   dcum_logf, dout, q,    k,      v,
                                      o,  lse, NULL, cum_logf,  at,   true, scratch};
        attention_forward(&forward, &shape, 0);
        if (bounds) bounds->become_backward(lse);
        attention_backward(&backward, &shape, 0);
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};

// With gates that are NaN from token t on a block there may skip older ones, but attends to its own keys: its
// results are NaN, as without pruning. The bounds are in range, and blocks before t have their results.
static void test_nan_from(int64_t t, int64_t dh) {
    Shape s = {1, 1000, 2, dh};
    Inputs in(s, NO_NORM, OPEN);
    for (int64_t i = 0; i < s.tokens(); i++)
        if (i % s.T >= t) in.cum_logf[(size_t)i] = NAN;
    vector<bf16> v = draw<bf16>(s.size(), 1);
    Bounds bounds(in);
    Results results(s);
    results.compute(in, v, v, &bounds);
    vector<int> first = bounds.first_key_block.host(), last = bounds.last_query_block.host();
    int64_t outside = 0, wrong = 0, whole = t / ATTENTION_FIRST_QUERY * ATTENTION_FIRST_QUERY;
    for (int64_t n = 0; n < s.heads() * s.blocks(); n++) {
        const int64_t m = n % s.blocks();
        outside += first[(size_t)n] < 0 || first[(size_t)n] > m || last[(size_t)n] < m ||
                   last[(size_t)n] >= s.blocks();
    }
    vector<bf16> o = results.o.host();
    for (int64_t i = 0; i < s.T; i++)
        for (int64_t c = 0; c < s.NH * dh; c++) {
            const double x = value(o[(size_t)(i * s.NH * dh + c)]);
            wrong += i >= t ? !isnan(x) : i < whole && !isfinite(x);
        }
    CHECK(outside == 0, "NaN from %lld on: %lld bounds are out of range", (long long)t, (long long)outside);
    CHECK(wrong == 0, "NaN from %lld on: %lld results are finite behind it, or not before", (long long)t,
          (long long)wrong);
}

template <class T> static double difference(const char* what, const Buffer<T>& a, const Buffer<T>& b) {
    vector<double> expected;
    for (T x : a.host()) expected.push_back(value(x));
    return noted(what, relative_error(b.host(), expected));
}

// Compares attention with and without pruning; returns the largest decrease of lse.
static double compare_attention(const char* name, const Inputs& in, double least_pruned, bool acp = false) {
    vector<bf16> v = draw<bf16>(in.s.size(), 1), dout = draw<bf16>(in.s.size(), 1);
    Bounds bounds(in, acp);
    PruningCount count = bounds.count.host()[0];
    double share = 1 - (double)count.kept / (double)count.all;
    CHECK(share >= least_pruned, "%s: only %.2f of the blocks are pruned", name, share);
    Results whole(in.s), pruned(in.s);
    whole.compute(in, v, dout, NULL);
    pruned.compute(in, v, dout, &bounds);

    // lse is in float and about 10: even unpruned keys differ by a few units in the last place.
    vector<float> a = whole.lse.host(), b = pruned.lse.host();
    double most = 0;
    size_t wrong = 0;
    for (size_t i = 0; i < a.size(); i++) {
        double fall = (double)a[i] - (double)b[i];
        wrong += !(fall >= -4e-6 && fall <= 4.6e-5 + 4e-6);
        most = fmax(most, fall);
    }
    CHECK(wrong == 0, "%s: lse falls by up to %.3g, out of bounds in %zu rows", name, most, wrong);
    // A weight of at most 4.5e-5, and the roundings to bf16 that it changes, of which one may move a row's
    // whole gradient: how many there are depends on the inputs. They are no more than the roundings that
    // attention has without pruning, its error against double.
    const exact::Shape shape = {in.s.B, in.s.T, in.s.NH, in.s.dh, in.s.window};
    const Buffer<bf16> q(in.q), k(in.k), device_v(v), device_dout(dout);
    const Buffer<double> cum_logf(in.cum_logf);
    exact::Oracle oracle(shape);
    oracle.compute(shape, {device_dout, q, k, device_v, NULL, NULL, cum_logf, false});
    double furthest = 0; // from its limit
    auto check = [&](const char* what, const auto& before, const auto& after,
                     const Buffer<double>& expected) {
        const double changed = difference(what, before, after),
                     error = relative_error(before.host(), expected.host());
        furthest = fmax(furthest, changed / error);
        CHECK(changed <= error, "%s: %s changes by %.2e, more than its error of %.2e without pruning", name,
              what, changed, error);
    };
    check("o", whole.o, pruned.o, oracle.o);
    check("dq", whole.dq, pruned.dq, oracle.dq);
    check("dk", whole.dk, pruned.dk, oracle.dk);
    check("dv", whole.dv, pruned.dv, oracle.dv);
    check("dcum_logf", whole.dcum_logf, pruned.dcum_logf, oracle.dcum_logf);
    printf("  %-36s %3.0f%% pruned, lse falls by up to %.1e, changes of up to %.2f of errors\n", name,
           100 * share, most, furthest);
    return most;
}

static void test_backward_bounds(Gates gates, QKNorm norm, const Shape& s) {
    char name[128];
    const int64_t T = s.T;
    snprintf(name, sizeof name, "backward, %s, %s, %lldx%lldx%lld, dh %lld, W %lld", gates_names[gates],
             norm_names[norm], (long long)s.B, (long long)T, (long long)s.NH, (long long)s.dh,
             (long long)s.window);
    Inputs in(s, norm, gates);
    vector<bf16> v = draw<bf16>(s.size(), 1);
    Bounds bounds(in);
    vector<int> forward_first = bounds.first_key_block.host();
    PruningCount before = bounds.count.host()[0];
    Results results(s);
    results.compute(in, v, v, &bounds);
    vector<double> lse, least_lse;
    for (float x : results.lse.host()) lse.push_back((double)x);
    for (int64_t head = 0; head < s.heads(); head++)
        for (int64_t t = 0; t < T; t += ATTENTION_BLOCK)
            least_lse.push_back(*std::min_element(lse.data() + head * T + t,
                                                  lse.data() + head * T + std::min(T, t + ATTENTION_BLOCK)));
    vector<int> first = bounds.first_key_block.host();
    check_rule(name, in, first, bounds.last_query_block.host(), least_lse, lse);
    size_t fewer = 0;
    for (size_t i = 0; i < first.size(); i++) fewer += first[i] < forward_first[i];
    CHECK(fewer == 0, "%s: %zu bounds below the forward pass's", name, fewer);
    PruningCount expected = check_work(name, in, first, bounds.head_order.host(), least_lse),
                 count = bounds.count.host()[0];
    CHECK(count.all - before.all == 2 * expected.all && count.kept - before.kept == 2 * expected.kept,
          "%s: does not count double", name);
}

// The rule of ACP's paper: exactly the pairs of blocks that it names, in both passes, all of which our own
// rule skips too.
static void test_acp(Gates gates, QKNorm norm, const Shape& s) {
    char name[128];
    const int64_t T = s.T, blocks = s.blocks();
    snprintf(name, sizeof name, "ACP's rule, %s, %s, %lldx%lldx%lld, dh %lld", gates_names[gates],
             norm_names[norm], (long long)s.B, (long long)T, (long long)s.NH, (long long)s.dh);
    Inputs in(s, norm, gates);
    vector<bf16> v = draw<bf16>(s.size(), 1);
    Bounds bounds(in, true), ours(in);
    vector<int> first = bounds.first_key_block.host(), last = bounds.last_query_block.host();
    int64_t wrong = 0, more = 0;
    vector<int> our_first = ours.first_key_block.host();
    for (int64_t head = 0; head < s.heads(); head++) {
        const double* c = in.cum_logf.data() + head * T;
        const double delta = -(2 * in.score_limit(head, true) + log((double)T)) + LOG_TOLERANCE;
        for (int64_t m = 0; m < blocks; m++) {
            const int64_t kept_from = first[(size_t)(head * blocks + m)];
            more += kept_from > our_first[(size_t)(head * blocks + m)];
            for (int64_t n = 0; n <= m; n++) {
                const double x = c[m * ATTENTION_BLOCK] - c[last_of(n, T)];
                const bool near = fabs(x - delta) <= 1e-5 * fabs(delta); // norms of q and k are in float
                const bool kept = kept_from <= n, wanted = m == n || x >= delta;
                wrong += kept != (m <= last[(size_t)(head * blocks + n)]) || (!near && kept != wanted);
            }
        }
    }
    CHECK(wrong == 0, "%s: %lld pairs of blocks disagree with the rule", name, (long long)wrong);
    CHECK(more == 0, "%s: %lld blocks of queries skip more than by our rule", name, (long long)more);
    PruningCount expected = check_work(name, in, first, bounds.head_order.host(), {}),
                 before = bounds.count.host()[0];
    CHECK(before.all == 2 * expected.all && before.kept == 2 * expected.kept, "%s: the count", name);
    Results results(s);
    results.compute(in, v, v, &bounds);
    PruningCount count = bounds.count.host()[0];
    CHECK(bounds.first_key_block.host() == first && bounds.last_query_block.host() == last,
          "%s: the backward pass has other bounds", name);
    CHECK(count.all - before.all == 2 * expected.all && count.kept - before.kept == 2 * expected.kept,
          "%s: the backward pass does not count double", name);
}

static void test_attention(Gates gates, QKNorm norm, const Shape& s, double least_pruned, bool acp = false) {
    char name[128];
    snprintf(name, sizeof name, "%s, %s, T %lld, dh %lld, W %lld%s", gates_names[gates], norm_names[norm],
             (long long)s.T, (long long)s.dh, (long long)s.window, acp ? ", ACP's rule" : "");
    compare_attention(name, Inputs(s, norm, gates), least_pruned, acp);
}

// Near the worst case: all keys of the past at the highest score, the query's own key at the lowest, and a
// gate that falls just below the threshold between them. The first row after it loses a third of eps.
static void test_worst_row(int64_t T, int64_t dh) {
    Shape s = {1, T, 1, dh};
    Inputs in(s, NO_NORM, OPEN);
    size_t channels = (size_t)dh, cut = (size_t)(s.blocks() - 1) * ATTENTION_BLOCK * channels;
    for (size_t i = 0; i < in.q.size(); i++) {
        bool aligned =
            i % channels < channels / 2; // the other half distinguishes keys, so that dq does not cancel
        in.q[i] = rounded<bf16>(aligned ? 1 : 0.03 * value(in.q[i]));
        in.k[i] = rounded<bf16>(aligned ? (i < cut ? 1 : -1) : 0.3 * value(in.k[i]));
    }
    double after = (LOG_TOLERANCE - log((double)(cut / channels)) - 2 * in.score_limit(0)) * (1 + 1e-5);
    for (size_t t = cut / channels; t < in.cum_logf.size(); t++) in.cum_logf[t] = after;
    char name[64];
    snprintf(name, sizeof name, "the worst row, dh %lld", (long long)dh);
    double most = compare_attention(name, in, 2 / ((double)s.blocks() + 1) * 0.9);
    CHECK(most >= 5e-6, "%s loses only %.3g: the case tests nothing", name, most);
}

// ----------------------------------------------------------------------------

int main(int argc, char** argv) {
    bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    uint64_t number = argc > 1 && !quick ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    seed = number << 20;
    printf("seed %llu\n", (unsigned long long)number);

    for (int gates = OPEN; gates <= WALLS; gates++)
        for (int norm = NORM_PER_HEAD; norm <= NO_NORM; norm++)
            for (int64_t T : {1, 127, 128, 129, 1000, 4097})
                if (T <= (quick ? 1000 : 4097))
                    test_bounds((Gates)gates, (QKNorm)norm, {1 + T % 2, T, 3, T % 3 ? 64 : 128});
    test_bounds(SPREAD, NORM_SHARED, {1, 70000, 1, 64}); // more blocks than a thread block's threads
    test_bounds(SPREAD, NORM_PER_HEAD, {200, 300, 24, 64});
    test_bounds(SPREAD, NO_NORM, {2, 257, 40, 128});
    for (int64_t window : {1, 2, 129, 130, 300, 999, 1000, 5000})
        for (Gates gates : {OPEN, SPREAD, DOCUMENTS, WALLS})
            test_bounds(gates, NORM_PER_HEAD, {2, 1000, 3, 64, window});
    test_bounds(SPREAD, NO_NORM, {1, 70000, 1, 64, 4097});
    test_not_finite();
    for (int64_t t : {0, 1, 384, 500, 999})
        for (int64_t dh : {64, 128}) test_nan_from(t, dh);
    for (int64_t window : {0, 1, 129, 300, 5000})
        for (int64_t T : {1, 128, 129, 1000, 4097}) test_documents({2, T, 3, 64, window});
    test_documents({1, 70000, 1, 64});

    for (int gates = OPEN; gates <= WALLS; gates++)
        for (int64_t T : {1, 129, 1000}) {
            test_backward_bounds((Gates)gates, NORM_PER_HEAD, {2, T, 3, 64});
            test_backward_bounds((Gates)gates, NO_NORM, {1, T, 3, 128});
            test_backward_bounds((Gates)gates, NORM_PER_HEAD, {2, T, 3, 64, 300});
        }
    if (!quick) test_backward_bounds(SPREAD, NORM_SHARED, {1, 70000, 1, 64});
    for (int gates = OPEN; gates <= DOCUMENTS; gates++)
        for (int64_t T : {1, 129, 1000, 4097})
            if (T <= (quick ? 1000 : 4097)) {
                test_acp((Gates)gates, NORM_PER_HEAD, {2, T, 3, 64});
                test_acp((Gates)gates, NO_NORM, {1, T, 3, 128});
            }
    for (int64_t dh : {64, 128}) {
        test_worst_row(2048, dh);
        if (quick) continue;
        test_attention(SPREAD, NORM_PER_HEAD, {2, 4000, 6, dh}, 0.2);
        test_attention(SPREAD, NO_NORM, {1, 4000, 6, dh}, 0.1);
        test_attention(FAST, NORM_SHARED, {1, 4097, 4, dh}, 0.3);
        test_attention(DOCUMENTS, NORM_PER_HEAD, {1, 3000, 2, dh}, 0.5);
        test_attention(DEAD, NO_NORM, {1, 1000, 2, dh}, 0.5);
        test_attention(SPREAD, NORM_PER_HEAD, {1, 16384, 6, dh}, 0.2);
        test_attention(SPREAD, NORM_PER_HEAD, {1, 4000, 6, dh, 1000}, 0.1);
        test_attention(SPREAD, NORM_PER_HEAD, {1, 16384, 6, dh}, 0.1, true);
    }
    print_noted();
    return test_report();
}
