/*
Attention for inference (llmc/inference) against the same in double on the host: passes of ragged rows over a
paged cache.

q, k, v and cum_logf are checked against the projection's values; o against attention over the rounded q, k, v
that the kernels read, so that only its own arithmetic shows. Its limit is twice the error of a plain bf16
implementation: probabilities and results rounded to bf16, everything else exact.

    test_extend [quick] [SEED]     quick: without what is slow under compute-sanitizer
*/
#include <memory>
#include <numeric>
#include "cache_case.cuh"

// ----------------------------------------------------------------------------
// expected values

// A head of q (kind 0), k or v of a sequence's token t from all its rows of proj, on the host.
static vector<double> expected_head(const Cache& cache, const vector<double>& proj, int kind, int64_t t,
                                    int64_t h) {
    const Model& m = cache.m;
    int64_t stride = m.row_stride(), at = t * stride + kind * m.d() + h * m.dh;
    vector<double> x(proj.begin() + at, proj.begin() + at + m.dh);
    if (m.pro && kind) {
        double alpha = 1 / (1 + exp(-proj[(size_t)(t * stride + m.gate_column() + kind * m.NH + h)]));
        for (int64_t i = 0; i < m.dh; i++)
            x[(size_t)i] = (1 - alpha) * x[(size_t)i] + alpha * (t ? proj[(size_t)(at - stride + i)] : 0);
    }
    if (m.pro && kind < 2) {
        double square = 0;
        for (double y : x) square += y * y;
        const Drawn<bf16>& weight = kind ? cache.k_weight : cache.q_weight;
        for (int64_t i = 0; i < m.dh; i++)
            x[(size_t)i] *= weight[h * m.dh + i] / sqrt(square / (double)m.dh + EPS);
    }
    for (int64_t i = 0; m.rope && kind < 2 && i < m.dh / 2; i++) {
        double angle = (double)t * pow(ROPE_BASE, -2.0 * (double)i / (double)m.dh);
        double a = x[(size_t)i], b = x[(size_t)(i + m.dh / 2)];
        x[(size_t)i] = a * cos(angle) - b * sin(angle);
        x[(size_t)(i + m.dh / 2)] = b * cos(angle) + a * sin(angle);
    }
    return x;
}

// What attention over keys first..t gives, in o, and in plain the same by a plain bf16 implementation. q is
// [dh].
static void expected_row(double* o, double* plain, const double* q, const vector<double>& k,
                         const vector<double>& v, const double* cum_logf, int64_t t, const Model& m) {
    int64_t dh = m.dh, first = m.window && t >= m.window ? t - m.window + 1 : 0;
    vector<double> p((size_t)(t + 1), -INFINITY);
    double row_max = -INFINITY, row_sum = 0;
    for (int64_t j = first; j <= t; j++) {
        double x = 0;
        for (int64_t i = 0; i < dh; i++) x += q[i] * k[(size_t)(j * dh + i)];
        p[(size_t)j] = x / sqrt((double)dh) + (cum_logf ? cum_logf[t] - cum_logf[j] : 0);
        row_max = fmax(row_max, p[(size_t)j]);
    }
    for (double& x : p) row_sum += x = exp(x - row_max);
    for (int64_t i = 0; i < dh; i++) o[i] = plain[i] = 0;
    for (int64_t j = 0; j <= t; j++)
        for (int64_t i = 0; i < dh; i++) {
            o[i] += p[(size_t)j] / row_sum * v[(size_t)(j * dh + i)];
            plain[i] += value(rounded<bf16>(p[(size_t)j] / row_sum)) * v[(size_t)(j * dh + i)];
        }
    for (int64_t i = 0; i < dh; i++) plain[i] = value(rounded<bf16>(plain[i]));
}

// ----------------------------------------------------------------------------
// checks

// Rows of proj of n sequences of `count` tokens each; all of it on the host, a pass's rows on the device.
struct Sequences {
    const Model& m;
    vector<vector<bf16>> rows;
    Sequences(const Model& model, const vector<int64_t>& counts) : m(model) {
        for (int64_t count : counts) rows.push_back(draw<bf16>((size_t)(count * m.row_stride()), 1));
    }
    vector<bf16> part(size_t sequence, int64_t first, int64_t count) const {
        auto begin = rows[sequence].begin() + first * m.row_stride();
        return vector<bf16>(begin, begin + count * m.row_stride());
    }
    // Rows first[i] .. + t[i] of each sequence, one behind the other
    vector<bf16> rows_of(const vector<int64_t>& first, const vector<int64_t>& t) const {
        vector<bf16> all;
        for (size_t i = 0; i < rows.size(); i++) {
            vector<bf16> own = part(i, first[i], t[i]);
            all.insert(all.end(), own.begin(), own.end());
        }
        return all;
    }
};

// k, v, cum_logf of slot i, which holds sequence i, and y of its t rows from `row` on.
struct Checked {
    vector<double> k, want_k, v, want_v, c, want_c, q, want_q, o, plain;
    vector<bf16> y;
};
static void collect(Checked* all, Cache& cache, const Pools& pools, const Sequences& in, int64_t slot,
                    int64_t row, int64_t t) {
    const Model& m = cache.m;
    int64_t length = cache.lengths[(size_t)slot], d = m.d();
    vector<double> proj = doubles(in.rows[(size_t)slot]);
    for (int64_t h = 0; h < m.NH; h++) {
        vector<double> k = cache.tokens_of(pools.k, slot, h), v = cache.tokens_of(pools.v, slot, h), c;
        double sum = 0;
        for (int64_t j = 0; j < length && m.gate != NO_GATE; j++) {
            int64_t at = cache.entry(slot, h, j / PAGE_TOKENS) * PAGE_TOKENS + j % PAGE_TOKENS;
            double logit = cache.bias[h] +
                           (m.gate == GATE ? proj[(size_t)(j * m.row_stride() + m.gate_column() + h)] : 0);
            sum -= log1p(exp(-logit));
            c.push_back(pools.cum_logf[(size_t)at]);
            all->want_c.push_back(sum);
        }
        all->c.insert(all->c.end(), c.begin(), c.end());
        all->k.insert(all->k.end(), k.begin(), k.end()), all->v.insert(all->v.end(), v.begin(), v.end());
        for (int64_t j = 0; j < length; j++) {
            vector<double> a = expected_head(cache, proj, 1, j, h), b = expected_head(cache, proj, 2, j, h);
            all->want_k.insert(all->want_k.end(), a.begin(), a.end());
            all->want_v.insert(all->want_v.end(), b.begin(), b.end());
        }
        size_t first = all->o.size();
        all->o.resize(first + (size_t)(t * m.dh)), all->plain.resize(all->o.size());
        vector<double> q((size_t)(t * m.dh));
        for (int64_t i = 0; i < t; i++) {
            for (int64_t x = 0; x < m.dh; x++) {
                q[(size_t)(i * m.dh + x)] = value(pools.q[(size_t)((row + i) * d + h * m.dh + x)]);
                all->y.push_back(pools.y[(size_t)((row + i) * d + h * m.dh + x)]);
            }
            vector<double> want = expected_head(cache, proj, 0, length - t + i, h);
            all->want_q.insert(all->want_q.end(), want.begin(), want.end());
        }
        all->q.insert(all->q.end(), q.begin(), q.end());
#pragma omp parallel for
        for (int64_t i = 0; i < t; i++)
            expected_row(&all->o[first + (size_t)(i * m.dh)], &all->plain[first + (size_t)(i * m.dh)],
                         &q[(size_t)(i * m.dh)], k, v, c.empty() ? NULL : c.data(), length - t + i, m);
    }
}

static double error_of(const vector<double>& got, const vector<double>& want) {
    return relative_error(got, want);
}

static void check_values(const char* name, const vector<double>& got, const vector<double>& want,
                         double limit) {
    double error = error_of(got, want);
    CHECK(error <= limit, "%s: %s: relative error %.3g, limit %.3g", test_case, name, error, limit);
    noted(name, error, limit);
}

static void check_all(const Checked& all) {
    double few = all.q.size() < 4096 ? 4e-3 : 2e-3;
    check_values("q", all.q, all.want_q, few);
    check_values("k", all.k, all.want_k, few);
    check_values("v", all.v, all.want_v, few);
    if (!all.c.empty()) check_values("cum_logf", all.c, all.want_c, CUM_LOGF_LIMIT);
    double limit = 2 * error_of(all.plain, all.o), error = error_of(doubles(all.y), all.o);
    CHECK(error <= limit, "%s: o: relative error %.3g, plain bf16's is %.3g", test_case, error, limit / 2);
    noted("o over plain bf16's error", error / (limit / 2), 2);
}

// The next rows of a sequence with `left` more in a pass of their own: a single row is decoded by another
// kernel than several.
static int64_t some_rows(int64_t left) { return left > 3 ? 2 : left; }

// The sequence's rows [row, row + t) have the bits of `want` in passes of their own; decoded one by one in
// the other cache they are the same but for rounding.
static void test_alone(Cache& several, Cache& single, const Sequences& in, size_t i, int64_t t,
                       const bf16* want) {
    const Model& m = in.m;
    int64_t length = several.lengths[i];
    vector<bf16> decoded;
    for (int64_t j = 0, n; j < t; j += n) {
        n = some_rows(t - j);
        vector<bf16> own = several.pass({(int32_t)i}, {n}, Buffer<bf16>(in.part(i, length + j, n)));
        CHECK(memcmp(own.data(), want + j * m.d(), own.size() * sizeof(bf16)) == 0,
              "%s: rows %lld.. of sequence %zu differ in a pass of their own", test_case, (long long)j, i);
    }
    for (int64_t j = 0; t > 1 && j < t; j++) {
        vector<bf16> own = single.pass({(int32_t)i}, {1}, Buffer<bf16>(in.part(i, length + j, 1)));
        decoded.insert(decoded.end(), own.begin(), own.end());
    }
    if (t > 1)
        check_values("rows one by one", doubles(decoded), doubles(vector<bf16>(want, want + t * m.d())),
                     6e-3);
}

// Sequences of `lengths` tokens extended by t[i] tokens each, in one pass. Then, where `alone`, the rows of
// the first sequences in passes of their own.
static void test_pass(const Model& m, const vector<int64_t>& lengths, const vector<int64_t>& t, bool alone) {
    size_t n = lengths.size();
    snprintf(test_case, sizeof test_case, "%s; n %zu, longest %lld, %lld rows", m.name(), n,
             (long long)largest(lengths), (long long)sum(t));
    vector<int64_t> counts, zeros(n);
    vector<int32_t> slots;
    for (size_t i = 0; i < n; i++) counts.push_back(lengths[i] + t[i]), slots.push_back((int32_t)i);
    Sequences in(m, counts);
    uint64_t weights_seed = seed;
    int64_t rows = std::max(sum(lengths), sum(t));
    Cache cache(m, (int64_t)n, largest(counts), rows, false, weights_seed);
    auto prefill = [&](Cache& to) {
        vector<int32_t> some;
        vector<int64_t> some_t;
        vector<bf16> proj;
        for (size_t i = 0; i < n; i++)
            if (lengths[i]) {
                vector<bf16> own = in.part(i, 0, lengths[i]);
                some.push_back((int32_t)i), some_t.push_back(lengths[i]);
                proj.insert(proj.end(), own.begin(), own.end());
            }
        if (!some.empty()) to.pass(some, some_t, Buffer<bf16>(proj), false);
    };
    prefill(cache);
    vector<bf16> y = cache.pass(slots, t, Buffer<bf16>(in.rows_of(lengths, t)));
    Pools pools(cache, y);
    Checked all;
    for (size_t i = 0, row = 0; i < n; row += (size_t)t[i++])
        collect(&all, cache, pools, in, (int64_t)i, (int64_t)row, t[i]);
    check_all(all);
    if (!alone) return;

    Cache several(m, (int64_t)n, largest(counts), rows, false, weights_seed),
        single(m, (int64_t)n, largest(counts), rows, false, weights_seed);
    prefill(several), prefill(single);
    for (size_t i = 0, row = 0; i < n && i < 3; row += (size_t)t[i++])
        test_alone(several, single, in, i, t[i], &y[row * (size_t)m.d()]);
}

// A sequence that shares its beginning: slot 1 is a fork of slot 0, and both go on as if they were alone. One of them
// gets copies of the partial pages: the fork, or slot 0, which the last child of a prompt takes over.
static void test_fork(const Model& m, int64_t length, int64_t t, int copied) {
    snprintf(test_case, sizeof test_case, "%s; fork at %lld, copies for slot %d", m.name(), (long long)length,
             copied);
    Sequences in(m, {length + t, length + t});
    std::copy_n(in.rows[0].begin(), length * m.row_stride(), in.rows[1].begin());
    uint64_t weights_seed = seed;
    Cache shared(m, 2, length + t, 2 * length, false, weights_seed),
        apart(m, 2, length + t, 2 * length, false, weights_seed);
    apart.pass({0, 1}, {length, length}, Buffer<bf16>(in.rows_of({0, 0}, {length, length})), false);
    shared.pass({0}, {length}, Buffer<bf16>(in.part(0, 0, length)), false);
    device_cache_fork(&shared.c, 0, 1, 0);
    for (int64_t h = 0; h < m.NH; h++)
        for (int64_t column = 0; column < ceil_div<int64_t>(length, PAGE_TOKENS); column++) {
            const int32_t page = shared.entry(0, h, column);
            shared.entry(1, h, column) = page;
            if ((column + 1) * PAGE_TOKENS <= length) continue;
            shared.entry(copied, h, column) = shared.free_pages.back();
            shared.free_pages.pop_back();
            device_cache_copy_page(&shared.c, page, shared.entry(copied, h, column), 0);
        }
    shared.lengths[1] = length;
    Buffer<bf16> proj(in.rows_of({length, length}, {t, t}));
    CHECK(same_bits(shared.pass({0, 1}, {t, t}, proj), apart.pass({0, 1}, {t, t}, proj)),
          "%s: sequences that share pages differ from sequences apart", test_case);
}

// The partial results for which a pass is planned are at least those of each layer, also of one with a narrower window.
static void test_partials(void) {
    for (int64_t widest : {0, 100, 2048, 4000, 20000})
        for (int64_t window : {1, 64, 100, 1000, 1536, 2000, 3072, 3900, 4000, 10000, 20000})
            for (int64_t position = 0; position < 40000 && (!widest || window <= widest); position += 16) {
                const int pages = (int)(position / PAGE_TOKENS) + 1 - pages_window_first(window, position);
                const int64_t planned = extend_partials(widest, window != widest, position);
                CHECK(extend_num_partitions(pages) <= planned,
                      "window %lld of at most %lld, position %lld: %d > %lld", (long long)window,
                      (long long)widest, (long long)position, extend_num_partitions(pages),
                      (long long)planned);
            }
}

// Forgotten pages are counted by the bound and the window, and are not read: their contents become NaN.
static void test_forgotten(const Model& m, int64_t length, int64_t t) {
    snprintf(test_case, sizeof test_case, "%s; forgotten of %lld, %lld rows", m.name(), (long long)length,
             (long long)t);
    Sequences in(m, {length + t});
    uint64_t weights_seed = seed;
    Cache cache(m, 1, length + t, std::max(length, t), true, weights_seed),
        whole(m, 1, length + t, std::max(length, t), false, weights_seed);
    cache.pass({0}, {length}, Buffer<bf16>(in.part(0, 0, length)), false);
    whole.pass({0}, {length}, Buffer<bf16>(in.part(0, 0, length)), false);
    vector<int32_t> forgotten((size_t)m.NH);
    device_cache_forgotten(&cache.c, forgotten.data(), 0);
    Pools pools(cache);
    int64_t all = 0;
    for (int64_t h = 0; h < m.NH; h++) {
        double limit = 0, sum = 0, logsum = -INFINITY;
        for (int64_t i = 0; i < m.dh; i++) // with RoPE any of q and of k in a pair of channels
            for (int64_t j : {i, (i + m.dh / 2) % m.dh})
                if (i == j || m.rope)
                    limit = fmax(limit, fabs(cache.q_weight[h * m.dh + i] * cache.k_weight[h * m.dh + j]));
        limit *= sqrt((double)m.dh) * (1 + 1.0 / 128);
        vector<double> ends;
        for (int64_t j = 0; j < length && m.gate != NO_GATE; j++) {
            int64_t at = cache.entry(0, h, j / PAGE_TOKENS) * PAGE_TOKENS + j % PAGE_TOKENS;
            sum = -pools.cum_logf[(size_t)at];
            logsum = sum + log1p(exp(logsum - sum));
            if ((j + 1) % PAGE_TOKENS == 0) ends.push_back(logsum);
        }
        int least = 0, most = 0; // the bound at the rounding of U
        double slack = 1e-6;
        for (double end : ends) {
            least += 2 * (limit + slack) + end - logsum < LOG_TOLERANCE;
            most += 2 * (limit - slack) + end - logsum < LOG_TOLERANCE;
        }
        // rows of one tile begin at the same page
        int64_t hidden = m.window ? (length / EXTEND_TILE * EXTEND_TILE - m.window + 1) / PAGE_TOKENS : 0;
        least = std::max(least, (int)hidden), most = std::max(most, (int)hidden);
        int got = forgotten[(size_t)h];
        CHECK(got >= least && got <= most, "%s: %d pages of head %lld are forgotten, not %d to %d", test_case,
              got, (long long)h, least, most);
        all += got;
        for (int column = 0; column < got; column++) {
            int64_t page = cache.entry(0, h, column);
            size_t bytes = (size_t)(PAGE_TOKENS * m.dh) * sizeof(bf16);
            CUDA_CHECK(cudaMemset(cache.c.pages.k + page * PAGE_TOKENS * m.dh, 0xFF, bytes));
            CUDA_CHECK(cudaMemset(cache.c.pages.v + page * PAGE_TOKENS * m.dh, 0xFF, bytes));
            if (m.gate != NO_GATE)
                CUDA_CHECK(cudaMemset(cache.c.pages.cum_logf + page * PAGE_TOKENS, 0xFF,
                                      PAGE_TOKENS * sizeof(double)));
            cache.entry(0, h, column) = -1;
        }
    }
    CHECK(all > 0, "%s: nothing is forgotten", test_case);
    Buffer<bf16> proj(in.part(0, length, t));
    cache.c.stale[0] = true; // all of the page table is copied again, with its -1
    vector<bf16> got = cache.pass({0}, {t}, proj), want = whole.pass({0}, {t}, proj);
    check_values("o without forgotten pages", doubles(got), doubles(want), 1e-3); // of 2e-3 where all round
}

// A fork has the counts of its parent, also before its first pass, which brings its page table to the device.
static void test_forgotten_by_fork(const Model& m, int64_t length) {
    snprintf(test_case, sizeof test_case, "%s; forgotten by a fork of %lld", m.name(), (long long)length);
    Sequences in(m, {length});
    Cache cache(m, 2, length, length, true, seed);
    cache.pass({0}, {length}, Buffer<bf16>(in.part(0, 0, length)), false);
    vector<int32_t> before((size_t)(2 * m.NH)), after(before.size());
    device_cache_forgotten(&cache.c, before.data(), 0);
    // What the slot held before, in its page table on the device: a page that would be forgotten
    vector<int32_t> held((size_t)(cache.heads * cache.width), cache.entry(0, 0, 0));
    CUDA_CHECK(cudaMemcpy(cache.c.pages.table + held.size(), held.data(), held.size() * sizeof held[0],
                          cudaMemcpyHostToDevice));
    device_cache_fork(&cache.c, 0, 1, 0);
    device_cache_forgotten(&cache.c, after.data(), 0);
    CHECK(before[0] > 0 && before[0] < length / PAGE_TOKENS, "%s: %d pages of head 0", test_case, before[0]);
    for (int64_t h = 0; h < m.NH; h++)
        for (int64_t slot = 0; slot < 2; slot++)
            CHECK(after[(size_t)(slot * m.NH + h)] == before[(size_t)h],
                  "%s: slot %lld: %d pages of head %lld, not %d", test_case, (long long)slot,
                  after[(size_t)(slot * m.NH + h)], (long long)h, before[(size_t)h]);
}

// attention_forward from a first query on has the bits of the whole.
static void test_first_query(int64_t T, int64_t first, int64_t dh, bool gate, int64_t window) {
    snprintf(test_case, sizeof test_case, "queries %lld to %lld, dh %lld, W %lld", (long long)first,
             (long long)T, (long long)dh, (long long)window);
    const int64_t NH = 3;
    int64_t d = NH * dh;
    HeadShape s = {1, T, NH, dh, d, d, dh, window, NULL};
    Drawn<bf16> q(T * d), k(T * d), v(T * d);
    vector<double> c((size_t)(NH * T));
    for (int64_t i = 0; i < NH * T; i++) c[(size_t)i] = i % T ? c[(size_t)i - 1] - 0.01 * (double)(i % 7) : 0;
    Buffer<double> cum_logf(c);
    Buffer<bf16> o(T * d), part((T - first) * d);
    Buffer<float> lse(NH * T);
    Buffer<char> scratch(attention_scratch_bytes(&s, true));
    AttentionForward forward = {o, lse, q, k, v, gate ? cum_logf.p : NULL, NULL, scratch, 0};
    attention_forward(&forward, &s, 0);
    forward.o = part, forward.q = q.p + first * d, forward.first_query = first;
    attention_forward(&forward, &s, 0);
    check_same_bits("o", o.p + first * d, part.p, part.n);
}

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    test_partials();
    for (int64_t dh : {64, 128}) {
        const Model models[] = {{3, dh, GATE, true, false, -2},     {2, dh, GATE_BIAS_ONLY, false, true, 1},
                                {2, dh, NO_GATE, true, true, 0},    {2, dh, GATE, false, false, -30},
                                {1, dh, NO_GATE, false, false, 0},  {2, dh, NO_GATE, false, true, 0, 100},
                                {2, dh, GATE, true, false, 2, 700}, {1, dh, NO_GATE, true, false, 0, 1}};
        for (const Model& m : models) {
            test_pass(m, {0}, {1}, false);
            test_pass(m, {5, 0, 63}, {1, 3, 2}, true);
            test_pass(m, {64, 127, 15}, {1, 17, 1}, true);
            // An uneven pass: a head gets another number of blocks than in a pass of its own.
            if (!quick || m.NH == 3)
                test_pass(m, {9000, 100, 8192, 31, 2050, 8191, 12000, 64}, {1, 1, 1, 1, 1, 1, 2, 1}, true);
            if (quick) continue;
            test_pass(m, {3000}, {1}, true);
            test_pass(m, {1000, 0, 2111, 640, 1}, {1, 40, 3, 64, 1}, true);
            test_pass(m, {100, 0, 31, 777}, {300, 256, 5, 299}, false); // long ones among others
            test_pass(m, {2050}, {257}, false);
            for (int64_t n : {70, 300}) { // of 300 the decoded heads are more than are computed at a time
                if (n > 70 && m.NH < 3) continue;
                vector<int64_t> many, ones;
                for (int64_t i = 0; i < n; i++)
                    many.push_back(i * i % 211 * 3), ones.push_back(1 + (i % 9 == 0));
                test_pass(m, many, ones, true);
                if (n > 70 && dh > 64) continue;
                many[1] = 9000; // uneven
                test_pass(m, many, ones, true);
            }
        }
        for (int copied : {1, 0}) test_fork(models[0], 200, 3, copied);
        test_fork(models[1], 128, 2, 1);
        test_forgotten({2, dh, GATE, true, false, -1}, 700, 3);
        test_forgotten_by_fork({2, dh, GATE, true, false, 2}, 700);
        test_forgotten_by_fork({2, dh, GATE, true, false, 8, 65}, 700);
        test_forgotten({2, dh, NO_GATE, false, false, 0, 100}, 700, 3);
        test_forgotten({2, dh, GATE, true, false, 8, 65}, 700, 17);
        for (bool gate : {false, true}) test_first_query(quick ? 400 : 1500, 384, dh, gate, 0);
        test_first_query(quick ? 400 : 1500, 384, dh, false, 300);
        if (quick) continue;
        test_forgotten({2, dh, GATE, true, false, -1}, 3001, 300);
        test_forgotten({2, dh, GATE, true, false, -1}, 9000, 1);
        test_forgotten({2, dh, NO_GATE, true, true, 0, 500}, 3001, 300);
        test_forgotten({2, dh, GATE, true, false, 4, 30}, 3001, 300);
        test_first_query(1500, 1152, dh, true, 0);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
