/*
Tests of llmc/tokens/mixture.h: what is taken of each part against a count in double, and by loaders of 1 to 3
ranks that resume anywhere against a plain enumeration; weights that are refused; fingerprints.
*/
#include "datasets.h"
#include "../../../llmc/tokens/dataloader.h"
#include "../../../llmc/tokens/fingerprint.h"

enum { T = 16, V = 257, DRAWN = 100000 };

// How many of the first s sequences are of each part, for every s, and that they are numbered without gaps.
static void test_counts(void) {
    static const struct {
        const char* patterns;
        int parts;
        double weights[5];
    } rows[] = {{"a:0.7,b:0.3", 2, {0.7, 0.3}},
                {"a:1,b:1", 2, {0.5, 0.5}},
                {"a:1e-5,b:1", 2, {1e-5 / 1.00001, 1 / 1.00001}},
                {"a:1,b:1e-5", 2, {1 / 1.00001, 1e-5 / 1.00001}},
                {"a:5,b:3,c:2", 3, {0.5, 0.3, 0.2}},
                {"/x:y/a:1,b:2,c:3,d:4,e:5", 5, {1.0 / 15, 2.0 / 15, 3.0 / 15, 4.0 / 15, 5.0 / 15}},
                {"a:2", 1, {1}},
                {"a,b:c,d", 1, {1}}};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        Error err = {""};
        Mixture m;
        CHECK_OK(mixture_parse(&m, rows[r].patterns, &err));
        CHECK(m.count == rows[r].parts, "%s: %d parts", rows[r].patterns, m.count);
        const double most = m.count == 2 ? 0.5 : m.count - 1; // a rounding for each part before it
        double counts[MIXTURE_PARTS] = {0}, worst = 0;
        int64_t gaps = 0;
        for (int64_t s = 0; s < DRAWN; s++) {
            int64_t number;
            const int k = mixture_part(&m, s, &number);
            gaps += number != (int64_t)counts[k];
            counts[k]++;
            for (int i = 0; i < m.count; i++) {
                const double off = fabs(counts[i] - (double)(s + 1) * rows[r].weights[i]);
                worst = off > worst ? off : worst;
            }
        }
        CHECK(gaps == 0, "%s: %lld sequences out of turn", rows[r].patterns, (long long)gaps);
        CHECK(worst <= most + 1e-4, "%s: off by %g", rows[r].patterns, worst);
        mixture_free(&m);
    }
}

// Neither the sum nor the product overflows behind the largest position.
static void test_far(void) {
    Error err = {""};
    Mixture m;
    int64_t number, counts[2] = {0};
    CHECK_OK(mixture_parse(&m, "a:1,b:3", &err));
    const int64_t s = INT64_MAX / 2 - 3;
    for (int i = 0; i < 4; i++) counts[mixture_part(&m, s + i, &number)]++;
    CHECK(counts[0] == 1 && counts[1] == 3, "%lld of a", (long long)counts[0]);
    const int k = mixture_part(&m, s, &number);
    CHECK(fabs((double)number / (double)s - (k == 0 ? 0.25 : 0.75)) < 1e-9, "number %lld", (long long)number);
    mixture_free(&m);
}

// ----------------------------------------------------------------------------
// datasets

// The parts' tokens are those of the datasets' formula from these on.
static const int64_t offsets[] = {0, 1000000, 2000000}, sizes[] = {40, 7, 23};

static void write_part(int k) {
    ShardWriter w;
    Error err = {""};
    char prefix[16];
    snprintf(prefix, sizeof prefix, "part%d", k);
    bool ok = shard_writer_open(&w, in_folder(prefix), "train", V, 0, 10 * T + 1, &err);
    for (int64_t i = 0; ok && i < sizes[k] / 10 * (10 * T + 1) + (sizes[k] % 10 ? sizes[k] % 10 * T + 1 : 0);
         i++) {
        const uint32_t id = token(offsets[k] + i, V);
        ok = shard_write(&w, &id, 1, &err);
    }
    CHECK_OK(ok && shard_writer_close(&w, &err));
}

// The first input and the last target of window i of part k: shards have ten.
static bool is_window(const int32_t* inputs, const int32_t* targets, int k, int64_t i) {
    const int64_t at = offsets[k] + i / 10 * (10 * T + 1) + i % 10 * T;
    for (int t = 0; t < T; t++)
        if ((uint32_t)inputs[t] != token(at + t, V) || (uint32_t)targets[t] != token(at + t + 1, V))
            return false;
    return true;
}

static char* patterns_of(char text[3 * 4096], const char* const weights[3]) {
    text[0] = '\0';
    for (int k = 0; k < 3; k++) {
        char name[32];
        snprintf(name, sizeof name, "part%d_train_*.bin", k);
        if (!weights[k]) continue;
        if (text[0]) strcat(text, ",");
        strcat(text, in_folder(name));
        strcat(text, weights[k]);
    }
    return text;
}

static bool open_parts(DataLoader* l, const char* const weights[3], DataShare share, bool shuffle,
                       Error* err) {
    char text[3 * 4096];
    const DataOptions options = {.seq_len = T,
                                 .batch = 1,
                                 .share = share,
                                 .vocab_size = V,
                                 .end_of_text = V - 1,
                                 .shuffle = shuffle,
                                 .seed = 99};
    return dataloader_open(l, patterns_of(text, weights), &options, err);
}

// The window that sequence s is, by plain counting from the first one: of which part, and which.
static void enumerate(int parts[], int64_t windows[], int64_t n, const double weights[3], bool shuffle) {
    int64_t taken[3] = {0};
    for (int64_t s = 0; s < n; s++) {
        const double rest = (double)(s + 1 - taken[0]) * weights[1] / (weights[1] + weights[2]);
        int k = floor((double)(s + 1) * weights[0] + 0.5) > (double)taken[0] ? 0
                : floor(rest + 0.5) > (double)taken[1]                       ? 1
                                                                             : 2;
        const int64_t epoch = taken[k] / sizes[k], i = taken[k] % sizes[k];
        parts[s] = k;
        windows[s] = shuffle ? random_permute(99, (uint64_t)epoch | (uint64_t)k << 48, sizes[k], i) : i;
        taken[k]++;
    }
}

// Ranks 1 to 3 read strides of 6, stop anywhere, and others go on: each sequence is the enumeration's, and of
// each part as many are read as its share says, to one.
static void test_resumed(void) {
    enum { STRIDE = 6, STRIDES = DRAWN / STRIDE + 1, N = STRIDE * STRIDES };
    static const char* const weights[3] = {":2", ":1", ":1"};
    static const double shares[3] = {0.5, 0.25, 0.25};
    static int parts[N];
    static int64_t windows[N];
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        int64_t at = 0, wrong = 0, read = 0;
        double counts[3] = {0};
        enumerate(parts, windows, N, shares, shuffle);
        for (uint64_t turn = 0; at < N; turn++) {
            const int world = 1 + (int)(random_u64(7, 0, turn) % 3);
            int64_t strides = 1 + (int64_t)(random_u64(7, 1, turn) % 600), end = at;
            if (strides > (N - at) / STRIDE) strides = (N - at) / STRIDE;
            for (int rank = 0; rank < world; rank++) {
                DataLoader l;
                Error err = {""};
                const DataShare share = data_share(STRIDE, 1, rank, world);
                CHECK_OK(open_parts(&l, weights, share, shuffle, &err));
                dataloader_seek(&l, at);
                for (int64_t i = 0; i < strides * share.count; i++, read++) {
                    const int64_t s = dataloader_position(&l) + share.first + l.taken;
                    int32_t inputs[T], targets[T];
                    wrong += !dataloader_next(&l, inputs, targets, &err) ||
                             !is_window(inputs, targets, parts[s], windows[s]);
                    counts[parts[s]]++;
                }
                end = dataloader_position(&l);
                dataloader_close(&l);
            }
            at = end;
        }
        CHECK(read == N && wrong == 0, "shuffle %d: %lld of %lld wrong", shuffle, (long long)wrong,
              (long long)read);
        for (int k = 0; k < 3; k++)
            CHECK(fabs(counts[k] - shares[k] * N) <= 1, "%g sequences of part %d", counts[k], k);
    }
}

// No sequence is read twice among the first dataloader_sequences, and one is right behind them.
static void test_first_epoch(void) {
    static const char* const weights[][3] = {{":2", ":1", ":1"}, {":40", ":7", ":23"}, {":1", ":100", ":1"}};
    for (int w = 0; w < 3; w++) {
        DataLoader l;
        Error err = {""};
        CHECK_OK(open_parts(&l, weights[w], (DataShare){1, 0, 1}, true, &err));
        int64_t number, repeated = 0, n = dataloader_sequences(&l);
        for (int64_t s = 0; s <= n; s++) {
            const int k = mixture_part(&l.set.mixture, s, &number);
            repeated += number >= l.set.mixture.parts[k].sequences && s < n;
            if (s == n)
                CHECK(number >= l.set.mixture.parts[k].sequences || n == 70, "%lld are too few",
                      (long long)n);
        }
        CHECK(repeated == 0 && n > 0, "%lld of %lld repeated", (long long)repeated, (long long)n);
        const MixturePart* part = &l.set.mixture.parts[1];
        CHECK(part->sequences == 7 && fabs(mixture_epochs(part, 700) - 100 * part->share) < 1e-9, "epochs");
        dataloader_close(&l);
    }
}

static uint64_t fingerprint(const char* const weights[3]) {
    DataLoader l;
    Error err = {""};
    uint64_t hash = 0;
    CHECK_OK(open_parts(&l, weights, (DataShare){1, 0, 1}, true, &err));
    CHECK_OK(dataset_fingerprint(&l.set, &hash, &err));
    dataloader_close(&l);
    return hash;
}

static void test_fingerprints(void) {
    static const char* const sets[][3] = {{":0.7", ":0.2", ":0.1"}, {":7", ":2", ":1"},
                                          {":7", ":1", ":2"},       {"", "", ""},
                                          {"", NULL, NULL},         {":3", NULL, NULL}};
    uint64_t prints[6];
    for (int i = 0; i < 6; i++) prints[i] = fingerprint(sets[i]);
    CHECK(prints[0] == prints[1], "weights are not divided by their sum");
    CHECK(prints[1] != prints[2] && prints[1] != prints[3], "other weights are not noticed");
    CHECK(prints[4] == prints[5], "the weight of the only part changes something");
}

static void test_refused(void) {
    static const struct {
        const char* weights[3];
        const char* message;
    } rows[] = {
        {{":1", ":0", ":1"}, "is 0: not a number above a millionth of their sum"},
        {{":1", ":-2", ":1"}, "is -2: not a number above a millionth"},
        {{":1", ":1e-9", ":1"}, "is 1e-09: not a number above a millionth"},
        {{":1", "", ":1"}, "some of its patterns have a weight (PATTERN:WEIGHT), others have none"},
        {{":1", ":x", ":1"}, "others have none"},
        {{":1", "x:1", ":1"}, "no file matches"},
    };
    DataLoader l;
    Error err = {""};
    char text[3 * 4096], many[400] = "";
    const DataOptions options = {.seq_len = T, .batch = 1, .share = {1, 0, 1}, .vocab_size = V};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++)
        CHECK_FAILS(rows[r].message, open_parts(&l, rows[r].weights, (DataShare){1, 0, 1}, true, &err));
    for (int i = 0; i < 17; i++) strcat(many, i ? ",a:1" : "a:1");
    CHECK_FAILS("has 17 parts, at most 16 can be mixed", dataloader_open(&l, many, &options, &err));
    snprintf(text, sizeof text, "%s:1", in_folder("part0_train_*.bin"));
    snprintf(text + strlen(text), sizeof text - strlen(text), ",%s:2", in_folder("part0_train_000001.bin"));
    CHECK_FAILS("matches the same tokens twice", dataloader_open(&l, text, &options, &err));
    CHECK_FAILS("not a comma-separated list", dataloader_open(&l, ":1,:2", &options, &err));
}

// Parts that know their tokenizer are compared with one another, also behind one that does not.
static void test_vocabularies(void) {
    static const uint64_t hashes[] = {0, 5, 6};
    DataLoader l;
    Error err = {""};
    const char* const all[3] = {":1", ":1", ":1"};
    const char* const two[3] = {":1", ":1", NULL};
    for (int k = 0; k < 3; k++) {
        char name[64];
        int32_t header[SHARD_HEADER_INTS];
        for (int i = 0; i < 4; i++) {
            snprintf(name, sizeof name, "part%d_train_%06d.bin", k, i);
            int fd = open(in_folder(name), O_RDWR);
            if (fd < 0) continue;
            bool ok = pread(fd, header, sizeof header, 0) == (ssize_t)sizeof header;
            memcpy(header + 250, &hashes[k], sizeof hashes[k]);
            header[SHARD_HEADER_INTS - 1] = (int32_t)shard_header_checksum(header);
            ok = ok && pwrite(fd, header, sizeof header, 0) == (ssize_t)sizeof header;
            if (close(fd) != 0 || !ok) die("%s: cannot write", name);
        }
    }
    CHECK_OK(open_parts(&l, two, data_share(1, 1, 0, 1), false, &err));
    CHECK(dataset_vocab_hash(&l.set) == 5, "%llx", (unsigned long long)dataset_vocab_hash(&l.set));
    dataloader_close(&l);
    CHECK_FAILS("were encoded with different tokenizers",
                open_parts(&l, all, data_share(1, 1, 0, 1), false, &err));
    CHECK(strstr(err.msg, "part1_train_000000.bin"), "%s", err.msg);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("mixture"));
    for (int k = 0; k < 3; k++) write_part(k);
    test_counts();
    test_far();
    test_resumed();
    test_first_epoch();
    test_fingerprints();
    test_refused();
    test_vocabularies();
    return test_report();
}
