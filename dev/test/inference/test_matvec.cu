/*
Linear layers for few rows (llmc/inference/cuda/matvec.cuh) and what is made of logits (scores.cuh)
against double on the host. A row's bits may not depend on the number of rows, nor on the tiles.

    test_matvec [quick] [SEED]
*/
#include <algorithm>
#include "../../../llmc/inference/cuda/matvec.cuh"
#include "../../../llmc/inference/cuda/scores.cuh"
#include "../gpu/buffers.cuh"

typedef enum { PLAIN, NORM, SWIGLU } Kind;

static const double EPS = 1e-6;

// f(x) [rows, K], rounded to bf16 as the kernel does
static vector<double> expected_input(const vector<double>& x, const vector<double>& norm, int64_t rows,
                                     int64_t K, Kind kind) {
    vector<double> y((size_t)(rows * K));
    for (int64_t r = 0; r < rows; r++) {
        double square = 0;
        for (int64_t k = 0; k < K; k++) square += x[(size_t)(r * K + k)] * x[(size_t)(r * K + k)];
        for (int64_t k = 0; k < K; k++) {
            double& to = y[(size_t)(r * K + k)];
            if (kind == PLAIN) to = x[(size_t)(r * K + k)];
            if (kind == NORM) to = x[(size_t)(r * K + k)] / sqrt(square / (double)K + EPS) * norm[(size_t)k];
            if (kind != SWIGLU) continue;
            double gate = x[(size_t)(r * 2 * K + k)], up = x[(size_t)(r * 2 * K + K + k)];
            to = gate / (1 + exp(-gate)) * up;
        }
    }
    return y;
}

template <class T> static void test_matvec(int64_t rows, int64_t N, int64_t K, Kind kind, bool residual) {
    snprintf(test_case, sizeof test_case, "%lld rows, N %lld, K %lld, kind %d%s, %s", (long long)rows,
             (long long)N, (long long)K, kind, residual ? ", residual" : "",
             sizeof(T) == 2 ? "bf16" : "float");
    int64_t stride = N + 8;
    Drawn<bf16> x(rows * (kind == SWIGLU ? 2 : 1) * K), w(N * K), norm(K), add(rows * stride);
    MatvecInput in = {x, kind == NORM ? norm.p : NULL, EPS, kind == SWIGLU, NULL, NULL};
    Linear l = {w, NULL, rows, N, K, stride, K};
    vector<double> want((size_t)(rows * N)), terms(want.size()),
        input = expected_input(x.values, norm.values, rows, K, kind);
#pragma omp parallel for
    for (int64_t i = 0; i < rows * N; i++) {
        for (int64_t k = 0; k < K; k++) {
            double term = input[(size_t)(i / N * K + k)] * w[i % N * K + k];
            want[(size_t)i] += term, terms[(size_t)i] += fabs(term);
        }
        if (residual) want[(size_t)i] += add[i / N * stride + i % N];
    }
    vector<T> first;
    for (int tiles : {1, 2, 4, 0}) {
        Buffer<T> out(rows * stride);
        matvec((T*)out, &in, residual ? add.p : NULL, &l, tiles, 0);
        vector<T> all = out.host(), got;
        for (int64_t r = 0; r < rows; r++) {
            got.insert(got.end(), all.begin() + r * stride, all.begin() + r * stride + N);
            for (int64_t i = N; i < stride; i++)
                CHECK(isnan(value(all[(size_t)(r * stride + i)])), "%s: a write past a row", test_case);
        }
        if (first.empty()) {
            // the input's rounding to bf16, where it is computed, shows beside that of the output
            double limit = kind == PLAIN ? sizeof(T) == 2 ? bf16_limit(got.size()) : FP32_LIMIT : 4e-3;
            check_close("out", want, got, limit, &terms);
            first = got;
        }
        CHECK(same_bits(got, first), "%s: tiles %d change the result", test_case, tiles);
    }
    l.rows = 1; // the last row alone
    in.x = x.p + (rows - 1) * (kind == SWIGLU ? 2 : 1) * K;
    Buffer<T> one(stride);
    matvec((T*)one, &in, residual ? add.p + (rows - 1) * stride : NULL, &l, 0, 0);
    CHECK(same_bits(one.host(0, (size_t)N), vector<T>(first.end() - N, first.end())),
          "%s: the last row alone differs", test_case);
}

// linear_rows above the rows of matvec, with memory for the padded ones
static void test_linear_rows(int64_t rows, int64_t N, int64_t K, Kind kind) {
    snprintf(test_case, sizeof test_case, "linear_rows of %lld rows, N %lld, K %lld, kind %d",
             (long long)rows, (long long)N, (long long)K, kind);
    int64_t padded = linear_padded_rows(rows);
    CHECK(padded >= rows && (rows <= MATVEC_MAX_ROWS || padded <= rows + rows / 2), "%s: %lld are computed",
          test_case, (long long)padded);
    Drawn<bf16> x(padded * (kind == SWIGLU ? 2 : 1) * K), w(N * K), norm(K);
    Buffer<bf16> computed(padded * K), out(padded * N);
    Buffer<float> rstd(padded);
    Matmul mm;
    matmul_init(&mm, false, 0);
    computed.zero();
    MatvecInput in = {x, kind == NORM ? norm.p : NULL, EPS, kind == SWIGLU, computed, rstd};
    Linear l = {w, NULL, rows, N, K, N, K};
    linear_rows((bf16*)out, &in, NULL, &l, &mm);
    vector<double> want((size_t)(rows * N)), input = expected_input(x.values, norm.values, rows, K, kind);
#pragma omp parallel for
    for (int64_t i = 0; i < rows * N; i++)
        for (int64_t k = 0; k < K; k++) want[(size_t)i] += input[(size_t)(i / N * K + k)] * w[i % N * K + k];
    check_close("linear_rows", want, out.host(0, (size_t)(rows * N)), 4e-3);
    matmul_free(&mm);
}

// The arrays of row_scores and row_draws for one step.
struct ScoreBuffers {
    Buffer<RowScore> scores;
    Buffer<ScorePartial> partials;
    Buffer<unsigned> num_done;
    Buffer<int> step;

    ScoreBuffers(int64_t rows)
        : scores((size_t)rows), partials((size_t)(rows * SCORE_PARTITIONS)),
          num_done(vector<unsigned>((size_t)rows)), step(vector<int>((size_t)rows)) {}
    Scores of(const int32_t* targets, Draw* draws) {
        return {{scores, step, draws, {}, (int)step.host().size(), false}, targets, partials, num_done};
    }
};

static void test_scores(int64_t rows, int64_t V) {
    snprintf(test_case, sizeof test_case, "scores of %lld rows, V %lld", (long long)rows, (long long)V);
    int64_t stride = ceil_div<int64_t>(V, 64) * 64;
    vector<float> logits = draw<float>((size_t)(rows * stride), 3);
    vector<int32_t> targets;
    for (int64_t r = 0; r < rows; r++) targets.push_back(r % 3 == 1 ? -1 : (int32_t)((r * 7919 + 5) % V));
    float* last = &logits[(size_t)((rows - 1) * stride)];
    for (int64_t i = V; i < stride; i++) last[i] = NAN; // padding is not read
    if (V > 4) last[V - 1] = last[V / 2] = 50;          // equally likely: the lower one
    if (rows > 2) logits[(size_t)(stride + V / 3)] = NAN, logits[(size_t)(2 * stride)] = INFINITY;
    Buffer<float> device(logits);
    Buffer<int32_t> device_targets(targets);
    ScoreBuffers buffers(rows);
    Scores scores = buffers.of(device_targets, NULL);
    LogitShape shape = {rows, V, stride};
    row_scores(&scores, device, 0, &shape, 0);
    vector<RowScore> got = buffers.scores.host();
    for (int64_t r = 0; r < rows; r++) {
        const float* row = &logits[(size_t)(r * stride)];
        bool damaged = rows > 2 && (r == 1 || r == 2);
        int64_t best = std::max_element(row, row + V) - row;
        CHECK(got[(size_t)r].best == (damaged ? -1 : best), "%s: row %lld: best %d", test_case, (long long)r,
              got[(size_t)r].best);
        if (damaged) continue;
        double sum = 0, want = 0;
        for (int64_t i = 0; i < V; i++) sum += exp((double)row[i] - row[best]);
        if (targets[(size_t)r] >= 0) want = (double)row[targets[(size_t)r]] - row[best] - log(sum);
        CHECK(fabs(got[(size_t)r].logprob - want) <= 1e-5, "%s: row %lld: logprob %.8g, not %.8g", test_case,
              (long long)r, got[(size_t)r].logprob, want);
    }
}

// The tokens that are drawn against the CPU's sampler, with ties and impossible tokens.
static void test_draws(int64_t V) {
    const SamplerSettings settings[] = {{0, 0, 1, 0, 1},    {1, 0, 1, 0, 2},       {0.7, 0, 1, 0, 3},
                                        {1, 5, 1, 0, 4},    {1, 0, 0.6, 0, 5},     {1.3, 20, 0.9, 0, 6},
                                        {1, 0, 1, 0.05, 7}, {1, 40, 0.95, 0.1, 8}, {1e-320, 0, 1, 0, 9},
                                        {2, 0, 0, 0, 10},   {1, V + 3, 1, 0, 11}};
    const int64_t rows = (int64_t)(sizeof settings / sizeof settings[0]),
                  stride = ceil_div<int64_t>(V, 64) * 64;
    vector<float> logits = draw<float>((size_t)(rows * stride), 4);
    for (size_t i = 0; i < logits.size(); i++) {
        logits[i] = floorf(8 * logits[i]) / 2; // many are equal
        if (i % 11 == 3) logits[i] = -INFINITY;
    }
    vector<Draw> draws;
    for (int64_t r = 0; r < rows; r++) draws.push_back({settings[r], 17});
    Buffer<float> device(logits);
    Buffer<Draw> device_draws(draws);
    Buffer<int32_t> targets(vector<int32_t>((size_t)rows, -1));
    ScoreBuffers buffers(rows);
    Scores scores = buffers.of(targets, device_draws);
    LogitShape shape = {rows, V, stride};
    for (uint64_t counter = 17; counter < 37; counter++) {
        row_scores(&scores, device, 0, &shape, 0);
        row_draws(&scores.outputs, device, 0, &shape, 0);
        vector<RowScore> got = buffers.scores.host();
        for (int64_t r = 0; r < rows; r++) {
            const Draw draw = {settings[r], counter};
            int64_t want = sampler_next(&draw, &logits[(size_t)(r * stride)], V);
            CHECK(got[(size_t)r].drawn == want, "V %lld, setting %lld, draw %llu: %d, not %lld", (long long)V,
                  (long long)r, (unsigned long long)counter, got[(size_t)r].drawn, (long long)want);
        }
    }
}

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    for (int64_t rows : {1, 3, 8, 9, 16}) {
        for (Kind kind : {PLAIN, NORM, SWIGLU}) {
            test_matvec<bf16>(rows, 72, 64, kind, false);
            test_matvec<bf16>(rows, 40, 136, kind, true);
            if (quick) continue;
            test_matvec<bf16>(rows, 768, 1792, kind, true);
            test_matvec<float>(rows, 3136, 768, kind, false);
            test_matvec<bf16>(rows, 1536, 3584, kind, true); // norm: more channels than a thread block's
        }
        if (!quick) test_matvec<float>(rows, 20032, 256, NORM, false);
    }
    for (Kind kind : {PLAIN, NORM, SWIGLU})
        for (int64_t rows : {17, 70, 100}) test_linear_rows(rows, 128, 192, kind);
    for (int64_t V : {1, 5, 256, 50257})
        for (int64_t rows : {1, 5}) test_scores(rows, V);
    for (int64_t V : {5, 256, 50257}) test_draws(V);
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
