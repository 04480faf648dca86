/*
Tests the CPU trainer's cache (llmc/model/extension.h), for every variant of the model: what a row
computes has the same bits alone and among others, token by token and in chunks, in a fork and in a sequence
of its own; it is what the forward pass computes; and what is forgotten was below eps.

Built in float and in double. A limit that is no bound on rounding errors has the measured errors (float,
double) in a comment.
*/
#include "../trainer/trainer.h"
#include "../reals.h"
#include "../trainer/variants.h"
#include "cached.h"

enum { TEXTS = 3 };

// Texts of the model's tokens, and what each row of them computes.
typedef struct {
    int64_t counts[TEXTS];
    int32_t* tokens[TEXTS]; // [counts + 1]
    RowScore* scores[TEXTS];
    float* logits[TEXTS]; // [counts, V]
} Texts;

static Texts texts_new(const Model* model, const int64_t counts[TEXTS]) {
    Texts t;
    for (int i = 0; i < TEXTS; i++) {
        t.counts[i] = counts[i];
        t.tokens[i] = random_tokens(model, counts[i] + 1, (uint64_t)i);
        t.scores[i] = (RowScore*)xcalloc((size_t)counts[i], sizeof(RowScore));
        t.logits[i] = (float*)xcalloc((size_t)(counts[i] * model->config.vocab_size), sizeof(float));
    }
    return t;
}

static void texts_free(Texts* t) {
    for (int i = 0; i < TEXTS; i++) free(t->tokens[i]), free(t->scores[i]), free(t->logits[i]);
}

// Reads each text alone, by `step` tokens a pass.
static void read_alone(Model* model, Texts* t, int64_t step) {
    for (int32_t i = 0; i < TEXTS; i++) {
        int32_t slot = 0;
        Cached c = cached_new(model, 1, t->counts[i], false);
        for (int64_t at = 0, n; at < t->counts[i]; at += n) {
            n = min64(step, t->counts[i] - at);
            cached_pass(&c, 1, &slot, &n, &t->tokens[i], &t->scores[i], &t->logits[i]);
        }
        cached_free(&c);
    }
}

// Reads all texts together, in random chunks, which begin at different passes.
static void read_together(Model* model, Texts* t, uint64_t seed) {
    Cached c = cached_new(model, TEXTS + 1, t->counts[0], false);
    for (uint64_t pass = 0;; pass++) {
        int32_t slots[TEXTS], *tokens[TEXTS];
        int64_t counts[TEXTS], n = 0;
        RowScore* scores[TEXTS];
        float* logits[TEXTS];
        for (int i = 0; i < TEXTS; i++) {
            int64_t left = t->counts[i] - c.lengths[TEXTS - i];
            counts[n] = min64(left, (int64_t)(random_uniform(seed, 0, TEXTS * pass + (uint64_t)i) * 40));
            slots[n] = TEXTS - i, tokens[n] = t->tokens[i], scores[n] = t->scores[i],
            logits[n] = t->logits[i];
            n += counts[n] > 0;
        }
        if (n > 0) cached_pass(&c, n, slots, counts, tokens, scores, logits);
        bool all = true;
        for (int i = 0; i < TEXTS; i++) all = all && c.lengths[TEXTS - i] == t->counts[i];
        if (all) break;
    }
    cached_free(&c);
}

static bool same_texts(const Texts* a, const Texts* b, int64_t V) {
    bool same = true;
    for (int i = 0; i < TEXTS; i++) {
        same = same && memcmp(a->logits[i], b->logits[i], (size_t)(a->counts[i] * V) * sizeof(float)) == 0;
        for (int64_t t = 0; t < a->counts[i]; t++)
            same = same && a->scores[i][t].logprob == b->scores[i][t].logprob &&
                   a->scores[i][t].best == b->scores[i][t].best;
    }
    return same;
}

// The first text against the forward pass over the same tokens. Returns the worst error of a log-probability.
static double check_forward(const char* name, Model* model, const Texts* t) {
    int64_t T = t->counts[0], V = model->config.vocab_size;
    real* logits = new_reals(T * V);
    double worst = 0, least = 0;
    model_forward(model, t->tokens[0]);
    model_loss(model, t->tokens[0] + 1, 0, false, logits);
    for (int64_t i = 0; i < T; i++) {
        const RowScore* score = &t->scores[0][i];
        double highest = -INFINITY;
        for (int64_t v = 0; v < V; v++)
            if ((double)logits[i * V + v] > highest) highest = (double)logits[i * V + v];
        least = worse(least, highest - (double)logits[i * V + score->best]);
        worst = worse(worst, fabs(score->logprob + fabs((double)model->acts.losses[i])));
    }
    CHECK(worst <= PICK(3e-4, 1e-10), "%s: a log-probability is off by %.2e", name, worst);
    CHECK(least <= PICK(1e-4, 1e-11), "%s: the best token is %.2e below the largest logit", name, least);
    free(logits);
    return worst;
}

// At 3 rows a pass the products of few rows, at 131 the tiled ones.
static double check_variant(const char* name) {
    const int64_t counts[TEXTS] = {150, 77, 64};
    Model model = variant_model(name, 1, counts[0]);
    Texts alone = texts_new(&model, counts), other = texts_new(&model, counts);
    int64_t V = model.config.vocab_size;
    read_alone(&model, &alone, 1);
    for (int64_t step = 3; step <= 150; step += 64) {
        read_alone(&model, &other, step);
        CHECK(same_texts(&alone, &other, V), "%s: by %lld tokens", name, (long long)step);
    }
    read_together(&model, &other, 1);
    CHECK(same_texts(&alone, &other, V), "%s: among others", name);
    double worst = check_forward(name, &model, &alone);
    texts_free(&alone), texts_free(&other);
    model_free(&model);
    return worst;
}

// A fork in the middle of a page, at a page's end and in the first page: the fork, its parent and a fork of
// the fork all go on as if alone.
static void check_forks(const char* name) {
    const int64_t counts[TEXTS] = {190, 180, 170};
    Model model = variant_model(name, 1, 4);
    int64_t V = model.config.vocab_size;
    for (int64_t at = 5; at <= 70; at = at == 5 ? 64 : at + 6) {
        Texts alone = texts_new(&model, counts), forked = texts_new(&model, counts);
        for (int i = 1; i < TEXTS; i++) {
            memcpy(alone.tokens[i], alone.tokens[i - 1], (size_t)(at * i) * sizeof(int32_t));
            memcpy(forked.tokens[i], forked.tokens[i - 1], (size_t)(at * i) * sizeof(int32_t));
        }
        read_alone(&model, &alone, 50);
        Cached c = cached_new(&model, TEXTS, counts[0], false);
        for (int32_t i = 0, from = 0; i < TEXTS; i++) { // text i + 1 leaves text i at its token at (i + 1)
            int64_t n = min64(at * (i + 1), counts[i]) - c.lengths[i];
            int32_t next = i + 1;
            cached_pass(&c, 1, &i, &n, &forked.tokens[i], &forked.scores[i], &forked.logits[i]);
            if (next == TEXTS) break;
            for (int64_t t = 0; t < c.lengths[i]; t++) forked.scores[next][t] = forked.scores[i][t];
            memcpy(forked.logits[next], forked.logits[i], (size_t)(c.lengths[i] * V) * sizeof(float));
            cached_fork(&c, from = i, next);
        }
        for (int32_t i = 0; i < TEXTS; i++) {
            int64_t n = counts[i] - c.lengths[i];
            if (n > 0) cached_pass(&c, 1, &i, &n, &forked.tokens[i], &forked.scores[i], &forked.logits[i]);
        }
        // what a fork copied has the target of its parent at the last token before they part
        for (int i = 1; i < TEXTS; i++)
            CHECK(memcmp(alone.logits[i], forked.logits[i], (size_t)(counts[i] * V) * sizeof(float)) == 0,
                  "%s: text %d forked after %lld tokens", name, i, (long long)at);
        CHECK(memcmp(alone.logits[0], forked.logits[0], (size_t)(counts[0] * V) * sizeof(float)) == 0,
              "%s: the parent, forked after %lld tokens", name, (long long)at);
        for (int64_t i = 0; i < TEXTS; i++) page_table_release(&c.pages, i, counts[i]);
        CHECK(c.pages.num_free == c.pages.pages, "%s: %lld pages are never freed", name,
              (long long)(c.pages.pages - c.pages.num_free));
        cached_free(&c);
        texts_free(&alone), texts_free(&forked);
    }
    model_free(&model);
}

// With strong gates of the first `strong` heads: log-probabilities with and without forgetting, and how many
// pages are left. forgets: pages are given back; else all stay.
static void check_forgotten_pages(const char* name, int64_t strong, bool forgets) {
    const int64_t T = 900;
    Model model = variant_model(name, 1, 4);
    int64_t L = model.config.num_hidden_layers, heads = L * config_key_heads(&model.config);
    for (int64_t l = 0; l < L; l++) {
        real* bias = model.params + params_find(&model.table, P_FGATE_BIAS, l)->offset;
        for (int64_t h = 0; h < model.config.num_heads; h++) bias[h] = h < strong ? (real)-0.5 : (real)8;
    }
    int32_t *tokens = random_tokens(&model, T + 1, 0), slot = 0;
    RowScore* scores[3];
    float* logits = (float*)xcalloc((size_t)(T * model.config.vocab_size), sizeof(float));
    double worst = 0;
    for (int run = 0; run < 3; run++) { // all kept, forgotten, forgotten in other chunks
        Cached c = cached_new(&model, 1, T, run > 0);
        scores[run] = (RowScore*)xcalloc((size_t)T, sizeof(RowScore));
        for (int64_t at = 0, n; at < T; at += n) {
            n = min64(run == 2 ? 1 : 37, T - at);
            cached_pass(&c, 1, &slot, &n, &tokens, &scores[run], &logits);
        }
        int64_t held = c.pages.pages - c.pages.num_free, all = heads * pages_of(T);
        if (run == 0 || !forgets) {
            CHECK(held == all && c.pages.forgotten == 0, "%s: %lld of %lld pages held", name, (long long)held,
                  (long long)all);
        } else { // of the heads that forget fast, two pages or three
            CHECK(c.pages.forgotten >= L * (pages_of(T) - 3) && held == all - c.pages.forgotten,
                  "%s: %lld of %lld pages held, %lld forgotten", name, (long long)held, (long long)all,
                  (long long)c.pages.forgotten);
        }
        cached_free(&c);
    }
    int64_t changed = 0;
    for (int64_t t = 0; t < T; t++) {
        double error = fabs(scores[0][t].logprob - scores[1][t].logprob);
        worst = worse(worst, error);
        changed += error > 0;
        CHECK(scores[1][t].logprob == scores[2][t].logprob, "%s: token %lld depends on the chunks", name,
              (long long)t);
    }
    CHECK(worst <= 1e-3, "%s: forgetting changes a log-probability by %.2e", name, worst);
    printf("%s: forgetting changes %lld of %lld log-probabilities, at most by %.1e\n", name,
           (long long)changed, (long long)T, worst);
    for (int run = 0; run < 3; run++) free(scores[run]);
    free(tokens), free(logits);
    model_free(&model);
}

// A long text in chunks that are multiples of nothing, then token by token beside a second sequence of the
// same tokens, against the forward pass.
static double check_long(const char* name, int64_t T, bool drops) {
    enum { DECODED = 41, BESIDE = 63 };
    static const int64_t chunks[] = {4001, 37, 300, 1};
    Model model = variant_model(name, 1, T);
    int64_t V = model.config.vocab_size, prompt = T > DECODED ? T - DECODED : 0, counts[2] = {0, 1};
    int32_t *tokens = random_tokens(&model, T + 1, 0), *texts[] = {tokens, tokens}, slots[] = {0, 1};
    RowScore* scores[2];
    float* logits[2];
    double worst = 0;
    Cached c = cached_new(&model, 2, T, drops);
    for (int s = 0; s < 2; s++) {
        scores[s] = (RowScore*)xcalloc((size_t)T, sizeof(RowScore));
        logits[s] = (float*)xcalloc((size_t)(T * V), sizeof(float));
    }
    for (int i = 0; c.lengths[0] < prompt; i++) { // the second sequence joins in the third pass
        counts[0] = min64(chunks[i % 4], prompt - c.lengths[0]), counts[1] = BESIDE;
        cached_pass(&c, i == 2 ? 2 : 1, slots, counts, texts, scores, logits);
    }
    for (counts[0] = counts[1] = 1; c.lengths[0] < T;)
        cached_pass(&c, 2, slots, counts, texts, scores, logits);
    CHECK(!drops || T < 1000 || c.pages.forgotten > 0, "%s: nothing is dropped of %lld tokens", name,
          (long long)T);
    model_forward(&model, tokens);
    model_loss(&model, tokens + 1, 0, false, NULL);
    for (int s = 0; s < 2; s++)
        for (int64_t t = 0; t < c.lengths[s]; t++)
            worst = worse(worst, fabs(scores[s][t].logprob + fabs((double)model.acts.losses[t])));
    CHECK(worst <= (drops ? 1e-3 : PICK(3e-4, 1e-10)), "%s: %lld tokens: a log-probability is off by %.2e",
          name, (long long)T, worst);
    for (int s = 0; s < 2; s++) free(scores[s]), free(logits[s]);
    free(tokens);
    cached_free(&c);
    model_free(&model);
    return worst;
}

// Up to 65,536 tokens in float; in double and with sanitizers, which are slower, fewer. The longest one of
// the family that forgets alone.
static void check_lengths(void) {
    static const int64_t lengths[] = {1, 63, 1000, 4097, 16385, 65536};
    static const char* const families[] = {"fox-pro", "transformer-llama", "fox-llama", "transformer-pro"};
#ifdef __SANITIZE_ADDRESS__
    const int64_t most = 1000;
#else
    const int64_t most = PICK(65536, 4097);
#endif
    for (int i = 0; i < 6 && lengths[i] <= most; i++) {
        const int64_t T = lengths[i], count = T > 20000 ? 1 : T > 5000 ? 2 : 4;
        for (int64_t f = 0; f < count; f++) {
            char name[128];
            snprintf(name, sizeof name, "%s num_hidden_layers=1 num_heads=1 hidden_size=8", families[f]);
            double error = check_long(name, T, f == 0);
            printf("%s, %lld tokens: log-probabilities off by %.1e\n", families[f], (long long)T, error);
        }
    }
}

// With a window of W tokens, pages that have left it are given back, and no bit changes.
static void check_cached_window(const char* name, int64_t W) {
    const int64_t T = 700;
    Model model = variant_model(name, 1, 4);
    int64_t heads = model.config.num_hidden_layers * config_key_heads(&model.config),
            V = model.config.vocab_size;
    int32_t *tokens = random_tokens(&model, T + 1, 0), slot = 0;
    RowScore* scores[3];
    float* logits[3];
    CHECK(model.config.window_size == W, "%s: a window of %lld", name, (long long)model.config.window_size);
    for (int run = 0; run < 3; run++) { // all kept, forgotten, forgotten in other chunks
        Cached c = cached_new(&model, 1, T, run > 0);
        scores[run] = (RowScore*)xcalloc((size_t)T, sizeof(RowScore));
        logits[run] = (float*)xcalloc((size_t)(T * V), sizeof(float));
        for (int64_t at = 0, n; at < T; at += n) {
            n = min64(run == 2 ? 1 : 37, T - at);
            cached_pass(&c, 1, &slot, &n, &tokens, &scores[run], &logits[run]);
            int64_t end = at + n, held = c.pages.pages - c.pages.num_free;
            int64_t first = run > 0 && end >= W ? (end - W + 1) / PAGE_TOKENS : 0; // the next row's
            CHECK(held == heads * (pages_of(end) - first), "%s: %lld pages held after %lld tokens", name,
                  (long long)held, (long long)end);
        }
        CHECK(memcmp(logits[run], logits[0], (size_t)(T * V) * sizeof(float)) == 0,
              "%s: forgetting or the chunks change a bit, run %d", name, run);
        cached_free(&c);
    }
    for (int run = 0; run < 3; run++) free(scores[run]), free(logits[run]);
    free(tokens);
    model_free(&model);
}

enum { NORM_CHANNELS = 64, NORM_VECTORS = 64 };

// What QK norm makes of x; RoPE then turns the pairs by `turn`; rounds to bf16 if told.
static void norm_vector(double y[NORM_CHANNELS], const double x[NORM_CHANNELS], const real* weight,
                        double turn, bool rounds) {
    double sum = 0, turned[NORM_CHANNELS];
    const int half = NORM_CHANNELS / 2;
    for (int c = 0; c < NORM_CHANNELS; c++) sum += x[c] * x[c];
    for (int c = 0; c < NORM_CHANNELS; c++) y[c] = x[c] / sqrt(sum / NORM_CHANNELS) * (double)weight[c];
    for (int c = 0; c < NORM_CHANNELS; c++)
        turned[c] = cos(turn) * y[c] + (c < half ? -1 : 1) * sin(turn) * y[(c + half) % NORM_CHANNELS];
    for (int c = 0; c < NORM_CHANNELS; c++) {
        int exponent;
        const double fraction = frexp(turned[c], &exponent); // bf16 has eight bits of it
        y[c] = rounds ? ldexp(round(ldexp(fraction, 8)), exponent - 8) : turned[c];
    }
}

// U of QK norm's weights is above every score, also of vectors that bf16 rounds, and is reached: by a query
// and a key in the channels of the largest product. Weights: near 1; of both signs; one of q and one of k far
// larger, in channels that RoPE turns into one another; the same for q and k.
static void check_norm_limit(int kind, bool rope) {
    real weights[2][NORM_CHANNELS];
    static double vectors[2][2][NORM_VECTORS][NORM_CHANNELS]; // rounded, of k
    double most[2] = {0, 0}, largest[2] = {0, 0};
    int best[2] = {0, 0};
    for (int c = 0; c < 2 * NORM_CHANNELS; c++) {
        const int of_k = c / NORM_CHANNELS, at = c % NORM_CHANNELS;
        double x = 1 + 0.3 * random_normal(11, (uint64_t)kind, (uint64_t)c);
        if (kind == 1 && c % 3 == 0) x = -x;
        if (kind == 2 && at == of_k * NORM_CHANNELS / 2) x = 30;
        weights[of_k][at] = kind == 3 && of_k ? weights[0][at] : (real)x;
        largest[of_k] = fmax(largest[of_k], fabs((double)weights[of_k][at]));
    }
    const double limit = qk_norm_limit(weights[0], weights[1], NORM_CHANNELS, rope, PRUNING_OURS);
    for (int i = 0; i < NORM_CHANNELS; i++)
        for (int j = 0; j < NORM_CHANNELS; j++)
            if ((i == j || (rope && (i - j) % (NORM_CHANNELS / 2) == 0)) &&
                fabs((double)weights[0][i] * (double)weights[1][j]) > most[0])
                most[0] = fabs((double)weights[0][i] * (double)weights[1][j]), best[0] = i, best[1] = j;
    most[0] = 0;
    for (int of_k = 0; of_k < 2; of_k++)
        for (int n = 0; n < NORM_VECTORS; n++) {
            double x[NORM_CHANNELS], quarters = n ? 4 * random_uniform(12, (uint64_t)of_k, (uint64_t)n) : 0;
            for (int c = 0; c < NORM_CHANNELS; c++) // the first is in one channel, others nearly
                x[c] = (c == best[of_k] ? 40. / (1 + n % 8)
                        : n == 0        ? 0
                                        : 1) *
                       (n ? random_normal(13, (uint64_t)(2 * n + of_k), (uint64_t)c) : 1);
            if (n == 0 && of_k) quarters = best[0] == best[1] ? 0 : 1;
            for (int rounds = 0; rounds < 2; rounds++)
                norm_vector(vectors[rounds][of_k][n], x, weights[of_k], rope ? quarters * acos(0) : 0,
                            rounds);
        }
    for (int i = 0; i < 2 * NORM_VECTORS * NORM_VECTORS; i++) {
        const int rounds = i % 2;
        double score = 0;
        for (int c = 0; c < NORM_CHANNELS; c++)
            score +=
                vectors[rounds][0][i / 2 / NORM_VECTORS][c] * vectors[rounds][1][i / 2 % NORM_VECTORS][c];
        most[rounds] = fmax(most[rounds], fabs(score) / sqrt((double)NORM_CHANNELS));
    }
    CHECK(most[0] <= limit * (1 + 1e-12) && most[1] <= limit * (1 + 1. / 128) &&
              most[0] >= limit * (1 - 1e-6),
          "kind %d, rope %d: scores up to %.8g, %.8g in bf16, U %.8g", kind, rope, most[0], most[1], limit);
    const double published = qk_norm_limit(weights[0], weights[1], NORM_CHANNELS, rope, PRUNING_ACP),
                 want = largest[0] * largest[1] * sqrt((double)NORM_CHANNELS);
    CHECK(fabs(published - want) <= 1e-12 * want && limit <= published * (1 + 1e-12),
          "kind %d, rope %d: U %.8g of ACP's paper, %.8g by its definition, ours %.8g", kind, rope, published,
          want, limit);
    const double scaled = qk_norm_limit(weights[0], weights[1], NORM_CHANNELS, 1.5 * rope, PRUNING_OURS);
    CHECK(fabs(scaled - (rope ? 1.5 : 1) * limit) <= 1e-12 * scaled, "U %g is not scaled by YaRN", scaled);
}

static int test_cache(void) {
    for (int i = 0; i < 8; i++) check_norm_limit(i % 4, i / 4);
    omp_set_num_threads(1); // the models are too small for threads to pay
    double worst = 0;
    for (int i = 0; i < NUM_VARIANTS; i++) worst = fmax(worst, check_variant(variants[i].name));
    printf("log-probabilities against the forward pass: worst error %.1e\n", worst);
    worst = check_variant("fox-pro hidden_size=78 num_heads=3 vocab_size=401 intermediate_size=301");
    omp_set_num_threads(3);
    CHECK(worst == check_variant("fox-pro hidden_size=78 num_heads=3 vocab_size=401 intermediate_size=301"),
          "on three threads");
    omp_set_num_threads(1);
    check_forks("fox-pro");
    check_forks("transformer-llama");
    check_forks("fox-pro num_heads=4 num_kv_heads=2");
    check_forgotten_pages("fox-pro hidden_size=32", 1, true);
    check_forgotten_pages("fox-pro hidden_size=32 use_rope=true", 1, true);
    check_forgotten_pages("fox-pro hidden_size=32 use_rope=true rope_scaling=yarn:8:64", 1, true);
    check_forgotten_pages("fox-pro hidden_size=32 qk_norm=false", 1, false);
    // a page goes when all heads that read it have forgotten it
    check_forgotten_pages("fox-pro hidden_size=64 num_heads=4 num_kv_heads=2", 2, true);
    check_forgotten_pages("fox-pro hidden_size=64 num_heads=4 num_kv_heads=2", 1, false);
    check_cached_window("transformer-swa", 64);
    check_cached_window("transformer-swa window_size=1", 1);
    check_cached_window("transformer-llama window_size=129", 129);
    check_cached_window("transformer-llama window_size=129 num_heads=6 num_kv_heads=3", 129);
    check_cached_window("fox-pro window_size=200 log_pruning_tolerance=null", 200);
    omp_set_num_threads(2);
    check_lengths();
    worst = check_long("fox-pro hidden_size=32 num_heads=4 num_kv_heads=2", 1000, true);
    printf("grouped heads, 1000 tokens: log-probabilities off by %.1e\n", worst);
    return test_report();
}
