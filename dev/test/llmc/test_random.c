/*
Tests of llmc/base/random.h: Philox against its published vectors, distributions against their moments, and
permutations against their definition. All random numbers are fixed by their seeds, so no statistical bound
fails by chance.
*/
#include "../check.h"
#include "../../../llmc/base/random.h"

// The known-answer vectors published with Random123: counter, key, result.
static void test_philox(void) {
    static const uint32_t vectors[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e,
         0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb,
         0x5001e420, 0x24126ea1},
    };
    for (int v = 0; v < 3; v++) {
        const uint32_t* expected = vectors[v];
        uint32_t x[4];
        memcpy(x, expected, sizeof x);
        random_philox4x32(x, expected[4], expected[5]);
        CHECK(memcmp(x, expected + 6, sizeof x) == 0, "vector %d: %08x %08x %08x %08x", v, x[0], x[1], x[2],
              x[3]);
    }
    // the mapping of seed, stream and counter to key and counter must never change: the third vector again
    uint64_t bits = random_u64(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u);
    CHECK(bits == 0x94fdccebd16cfe09u, "%016llx", (unsigned long long)bits);
}

static void test_uniform(void) {
    enum { N = 100000, BINS = 100 };
    int64_t histogram[BINS] = {0};
    double lowest = 1, highest = 0;
    for (uint64_t i = 0; i < N; i++) {
        double x = random_uniform(42, 7, i);
        if (x < lowest) lowest = x;
        if (x > highest) highest = x;
        if (x >= 0 && x < 1) histogram[(int)(x * BINS)]++;
    }
    CHECK(lowest >= 0 && lowest < 1e-4 && highest < 1 && highest > 1 - 1e-4, "[%g, %g]", lowest, highest);
    double chi2 = 0;
    for (int b = 0; b < BINS; b++) chi2 += pow((double)histogram[b] - N / BINS, 2) / (N / BINS);
    CHECK(chi2 > 55 && chi2 < 160, "chi square %.1f with %d degrees of freedom", chi2, BINS - 1);
}

// Moments, tails, and no correlation between adjacent counters, streams or seeds.
static void test_normal(void) {
    enum { N = 200000 };
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0, next = 0, stream = 0, seed = 0;
    int64_t beyond_2 = 0, beyond_4 = 0, not_finite = 0;
    for (uint64_t i = 0; i < N; i++) {
        double x = random_normal(1, 3, i);
        not_finite += !isfinite(x);
        m1 += x, m2 += x * x, m3 += x * x * x, m4 += x * x * x * x;
        next += x * random_normal(1, 3, i + 1);
        stream += x * random_normal(1, 4, i);
        seed += x * random_normal(2, 3, i);
        beyond_2 += fabs(x) > 2, beyond_4 += fabs(x) > 4;
    }
    double sigma = 1 / sqrt((double)N);
    CHECK(not_finite == 0, "%lld values are not finite", (long long)not_finite);
    CHECK(fabs(m1 / N) < 4 * sigma, "mean %g", m1 / N);
    CHECK(fabs(m2 / N - 1) < 4 * sqrt(2) * sigma, "variance %g", m2 / N);
    CHECK(fabs(m3 / N) < 4 * sqrt(15) * sigma, "third moment %g", m3 / N);
    CHECK(fabs(m4 / N - 3) < 4 * sqrt(96) * sigma, "fourth moment %g", m4 / N);
    CHECK(fabs((double)beyond_2 / N - 0.0455) < 0.002, "%lld beyond two sigma", (long long)beyond_2);
    CHECK(beyond_4 > 0 && beyond_4 < 40, "%lld beyond four sigma", (long long)beyond_4);
    CHECK(fabs(next / N) < 4 * sigma, "correlation with the next counter %g", next / N);
    CHECK(fabs(stream / N) < 4 * sigma, "correlation with the next stream %g", stream / N);
    CHECK(fabs(seed / N) < 4 * sigma, "correlation with the next seed %g", seed / N);
    CHECK(random_normal(5, 6, 7) == random_normal(5, 6, 7), "two calls return different values");
}

// Whether the permutation of (seed, epoch) is a bijection of [0, n).
static bool is_permutation(uint64_t seed, uint64_t epoch, int64_t n) {
    char* seen = (char*)xcalloc((size_t)n, 1);
    bool ok = true;
    for (int64_t i = 0; ok && i < n; i++) {
        int64_t x = random_permute(seed, epoch, n, i);
        ok = x >= 0 && x < n && !seen[x];
        if (ok) seen[x] = 1;
    }
    free(seen);
    return ok;
}

static int compare_int64(const void* a, const void* b) {
    int64_t x = *(const int64_t*)a, y = *(const int64_t*)b;
    return (x > y) - (x < y);
}

static void test_permute_is_a_bijection(void) {
    for (int64_t n = 1; n <= 300; n++)
        for (uint64_t seed = 0; seed < 3; seed++)
            CHECK(is_permutation(seed, seed + (uint64_t)n, n), "n = %lld", (long long)n);
    static const int64_t larger[] = {1023, 1024, 1025, 4095, 4096, 4097, 65537, 100003};
    for (size_t i = 0; i < sizeof larger / sizeof *larger; i++)
        CHECK(is_permutation(9, 1, larger[i]), "n = %lld", (long long)larger[i]);

    // too large to enumerate: the images of a sample must be in range and distinct
    static const int64_t huge[] = {6609334ll * 4, 1ll << 40, (1ll << 40) + 1, (1ll << 62) - 1, 1ll << 62};
    enum { SAMPLE = 5000 };
    static int64_t image[SAMPLE];
    for (size_t h = 0; h < sizeof huge / sizeof *huge; h++) {
        int64_t n = huge[h], outside = 0, twice = 0, upper_half = 0;
        for (int64_t i = 0; i < SAMPLE; i++) {
            image[i] = random_permute(3, 0, n, i % 2 ? n - 1 - i : i);
            outside += image[i] < 0 || image[i] >= n;
            upper_half += image[i] >= n / 2;
        }
        qsort(image, SAMPLE, sizeof *image, compare_int64);
        for (int i = 1; i < SAMPLE; i++) twice += image[i] == image[i - 1];
        CHECK(outside == 0, "n = %lld: %lld of %d are out of range", (long long)n, (long long)outside,
              SAMPLE);
        CHECK(twice == 0, "n = %lld: %lld of %d occur twice", (long long)n, (long long)twice, SAMPLE);
        CHECK(llabs(upper_half - SAMPLE / 2) < 150, "n = %lld: %lld of %d in the upper half", (long long)n,
              (long long)upper_half, SAMPLE);
    }
}

// Over many epochs, and over many seeds, two elements are mapped to every pair of positions equally often.
static void test_permute_is_uniform(void) {
    enum { PLACES = 7, PAIRS = PLACES * (PLACES - 1), EACH = 300 };
    for (int by_seed = 0; by_seed < 2; by_seed++) {
        int64_t histogram[PLACES][PLACES] = {{0}};
        for (uint64_t e = 0; e < PAIRS * EACH; e++) {
            uint64_t seed = by_seed ? e : 11, epoch = by_seed ? 0 : e;
            int64_t a = random_permute(seed, epoch, PLACES, 2), b = random_permute(seed, epoch, PLACES, 3);
            histogram[a][b]++;
        }
        double chi2 = 0;
        for (int a = 0; a < PLACES; a++)
            for (int b = 0; b < PLACES; b++)
                if (a != b) chi2 += pow((double)histogram[a][b] - EACH, 2) / EACH;
        CHECK(chi2 > 15 && chi2 < 80, "chi square %.1f with %d degrees of freedom", chi2, PAIRS - 1);
    }
    // for any n, about one element keeps its position, and about one still follows its predecessor
    int64_t n = 100003, in_place = 0, beside = 0, as_in_next_epoch = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t x = random_permute(1, 2, n, i);
        in_place += x == i;
        beside += i > 0 && x == random_permute(1, 2, n, i - 1) + 1;
        as_in_next_epoch += x == random_permute(1, 3, n, i);
    }
    CHECK(in_place < 8 && beside < 8, "%lld keep their position, %lld follow their predecessor",
          (long long)in_place, (long long)beside);
    CHECK(as_in_next_epoch < 8, "%lld have the same position in the next epoch", (long long)as_in_next_epoch);
}

int main(void) {
    test_philox();
    test_uniform();
    test_normal();
    test_permute_is_a_bijection();
    test_permute_is_uniform();
    return test_report();
}
