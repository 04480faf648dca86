/*
Tests of llmc/model/sampler.h: the frequency of each token against its exact probability, which the test
computes in another way (a full sort), and the limits of every setting.
*/
#include "../check.h"
#include "../../../llmc/model/sampler.h"

enum { V = 40, DRAWS = 200000 };

static float logits[V];

static SamplerSettings settings_of(double temperature, int64_t top_k, double top_p, uint64_t seed) {
    const SamplerSettings settings = {temperature, top_k, top_p, 0, seed};
    return settings;
}

static int64_t draw_next(const SamplerSettings* s, const float* from, int64_t n, uint64_t counter) {
    const Draw draw = {*s, counter};
    return sampler_next(&draw, from, n);
}

// Logits in random order, with ties, some of them -infinity.
static void make_logits(void) {
    for (int i = 0; i < V; i++) logits[i] = (float)floor(8 * random_normal(5, 0, (uint64_t)i)) / 4;
    logits[7] = logits[31] = -INFINITY;
}

static int likelier_first(const void* a, const void* b) {
    int i = *(const int*)a, j = *(const int*)b;
    return logits[i] != logits[j] ? (logits[i] > logits[j] ? -1 : 1) : i - j;
}

// The exact probabilities of all tokens under the settings.
static void exact_probabilities(const SamplerSettings* s, double p[V]) {
    int ids[V], n = s->top_k > 0 && s->top_k < V ? (int)s->top_k : V;
    double total = 0, sum = 0;
    for (int i = 0; i < V; i++) ids[i] = i, p[i] = 0;
    qsort(ids, V, sizeof ids[0], likelier_first);
    for (int i = 0; i < n; i++) total += exp(logits[ids[i]] / s->temperature);
    int kept = 0;
    double least = s->min_p * exp(logits[ids[0]] / s->temperature);
    while (kept < n && (kept == 0 || s->top_p >= 1 || sum < s->top_p * total) &&
           exp(logits[ids[kept]] / s->temperature) >= least)
        sum += exp(logits[ids[kept++]] / s->temperature);
    for (int i = 0; i < kept; i++) p[ids[i]] = exp(logits[ids[i]] / s->temperature) / sum;
}

// The count of a token of probability p in N draws is binomial, with variance N p (1 - p). Five standard
// deviations would be passed by chance in one of 1.7 million tokens; the draws are those of one seed, so the
// outcome is fixed.
static void check_frequencies(double temperature, int64_t top_k, double top_p, double min_p) {
    SamplerSettings s = settings_of(temperature, top_k, top_p, 99);
    s.min_p = min_p;
    double p[V];
    int64_t counts[V] = {0};
    exact_probabilities(&s, p);
    for (uint64_t i = 0; i < DRAWS; i++) {
        int64_t id = draw_next(&s, logits, V, i);
        if (id >= 0 && id < V) counts[id]++;
    }
    for (int i = 0; i < V; i++) {
        double expected = DRAWS * p[i], bound = 5 * sqrt(expected * (1 - p[i])) + 1e-9;
        CHECK(
            fabs((double)counts[i] - expected) <= bound,
            "temperature %g, top-k %d, top-p %g, min-p %g, token %d: drawn %lld times, expected %.1f +- %.1f",
            temperature, (int)top_k, top_p, min_p, i, (long long)counts[i], expected, bound);
    }
}

// The tokens that occur in many draws, as a set of bits.
static uint64_t tokens_drawn(SamplerSettings s, const float* from, int n) {
    uint64_t set = 0;
    for (uint64_t i = 0; i < 2000; i++) set |= (uint64_t)1 << draw_next(&s, from, n, i);
    return set;
}

static void test_cuts(void) {
    const float even[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    const float halves[4] = {(float)log(0.125), (float)log(0.5), (float)log(0.125), (float)log(0.25)};
    CHECK(tokens_drawn(settings_of(1, 0, 1, 1), even, 8) == 0xff, "no cut draws from all");
    CHECK(tokens_drawn(settings_of(1, 3, 1, 1), even, 8) == 0x07, "of equals the lowest ids are kept");
    CHECK(tokens_drawn(settings_of(1, 8, 1, 1), even, 8) == 0xff, "top-k of V");
    CHECK(tokens_drawn(settings_of(1, 1000, 1, 1), even, 8) == 0xff, "top-k beyond V");
    CHECK(tokens_drawn(settings_of(1, 1, 1, 1), halves, 4) == 0x2, "top-k of 1");
    CHECK(tokens_drawn(settings_of(1, 0, 0, 1), halves, 4) == 0x2, "top-p of 0 keeps one");
    CHECK(tokens_drawn(settings_of(1, 0, 0.25, 1), even, 8) == 0x3, "top-p reached exactly");
    CHECK(tokens_drawn(settings_of(1, 0, 0.2501, 1), even, 8) == 0x7, "top-p passed");
    CHECK(tokens_drawn(settings_of(1, 0, 0.7, 1), halves, 4) == 0xa, "top-p of 0.7");
    CHECK(tokens_drawn(settings_of(1, 0, 0.8, 1), halves, 4) == 0xb, "top-p of 0.8");
    // of 0.5 and 0.25, the first has two thirds
    CHECK(tokens_drawn(settings_of(1, 2, 0.6, 1), halves, 4) == 0x2, "top-p is a share of what top-k leaves");
    CHECK(tokens_drawn(settings_of(1, 2, 0.7, 1), halves, 4) == 0xa, "top-p is a share of what top-k leaves");
}

static void test_temperature(void) {
    const float ties[5] = {1, 3, 2, 3, -INFINITY}, one[1] = {-5};
    CHECK(tokens_drawn(settings_of(0, 0, 1, 1), ties, 5) == 0x2,
          "0 takes the most likely token, of equals the lowest id");
    CHECK(tokens_drawn(settings_of(1e-6, 0, 1, 1), ties, 5) == 0xa, "near 0 the others are never drawn");
    CHECK(tokens_drawn(settings_of(1e-320, 0, 1, 1), ties, 5) == 0xa, "denormal");
    CHECK(tokens_drawn(settings_of(100, 0, 1, 1), ties, 5) == 0xf, "100 draws all but the impossible one");
    CHECK(tokens_drawn(settings_of(100, 5, 1, 1), ties, 5) == 0xf, "impossible though within top-k");
    CHECK(tokens_drawn(settings_of(100, 4, 0.999, 1), ties, 5) == 0xf, "both cuts");
    CHECK(tokens_drawn(settings_of(1, 0, 1, 1), one, 1) == 0x1, "one token to choose from");
    CHECK(tokens_drawn(settings_of(1, 1, 0.5, 1), one, 1) == 0x1, "one token to choose from, with cuts");
    const float far[3] = {3e38f, -3e38f, 3e38f};
    CHECK(tokens_drawn(settings_of(1, 0, 1, 1), far, 3) == 0x5, "no overflow");
}

static void test_not_a_distribution(void) {
    const float bad[4][3] = {{0, NAN, 1}, {NAN, 0, 1}, {0, INFINITY, 1}, {-INFINITY, -INFINITY, -INFINITY}};
    for (int i = 0; i < 4; i++) {
        for (int temperature = 0; temperature < 2; temperature++) {
            const SamplerSettings s = settings_of(temperature, 2, 0.9, 1);
            CHECK(draw_next(&s, bad[i], 3, 0) == -1, "case %d, temperature %d", i, temperature);
        }
    }
}

// A draw depends on seed and counter alone.
static void test_reproducible(void) {
    const SamplerSettings s = settings_of(1, 20, 0.95, 7), other = settings_of(1, 20, 0.95, 8);
    int differ = 0;
    for (uint64_t i = 0; i < 100; i++) {
        int64_t id = draw_next(&s, logits, V, i);
        int64_t again = draw_next(&s, logits, V, i);
        CHECK(id == again, "draw %d: %d and %d", (int)i, (int)id, (int)again);
        differ += id != draw_next(&other, logits, V, i);
    }
    CHECK(differ > 20, "another seed differs in only %d draws of 100", differ);
}

// A vocabulary of realistic size: top-k keeps the tokens that counting says it should.
static void test_large(void) {
    enum { LARGE = 50257 };
    float* large = (float*)xcalloc(LARGE, sizeof *large);
    for (int i = 0; i < LARGE; i++) large[i] = (float)random_normal(3, 0, (uint64_t)i);
    const SamplerSettings s = settings_of(0.8, 50, 1, 11);
    for (uint64_t i = 0; i < 20; i++) {
        int64_t id = draw_next(&s, large, LARGE, i), likelier = 0;
        for (int k = 0; k < LARGE; k++) likelier += large[k] > large[id];
        CHECK(likelier < 50, "drew a token that %lld are more likely than", (long long)likelier);
    }
    free(large);
}

int main(void) {
    make_logits();
    check_frequencies(1, 0, 1, 0);
    check_frequencies(0.7, 0, 1, 0);
    check_frequencies(2.5, 0, 1, 0);
    check_frequencies(1, 5, 1, 0);
    check_frequencies(1, 0, 0.6, 0);
    check_frequencies(1.3, 20, 0.9, 0);
    check_frequencies(1, 0, 1, 0.2);
    check_frequencies(1.3, 20, 0.9, 0.1);
    test_cuts();
    test_temperature();
    test_not_a_distribution();
    test_reproducible();
    test_large();
    return test_report();
}
