/*
Tests of llmc/serve/engine.h and pages.h on the CPU trainer's model: sequences together have the
bits that each has alone, in any number of slots and pages; nothing waits forever; common beginnings are read
once; greedy generation follows the forward pass. And of the texts of generate.h: stop strings, escapes.

Built in float and in double.
*/
#include "../trainer/trainer.h"
#include "../reals.h"
#include "../trainer/variants.h"
#include "cached.h"

static int64_t ended; // sequences

static bool on_token(Sequence* s) { return !s->owner || s->generated < 3; } // an owner that stops it

static void on_end(Sequence* s) {
    (void)s;
    ended++;
}

static World watched;                                   // of a rank for which others wait
static const Trainer* engine_trainer = &cached_trainer; // of engine_of

static Engine engine_of(Model* model, const CacheSizes* sizes) {
    Engine g;
    CHECK(engine_open(&g, engine_trainer, model, &model->config, sizes, &watched), "the engine opens");
    g.on_token = on_token, g.on_end = on_end;
    return g;
}

// Runs an engine to its end: every slot and page is free again, and the watch has heard of each pass.
static void run_engine(Engine* g) {
    const uint32_t heard = watched.watch.mine.changes;
    int64_t calls = 0;
    while (engine_step(g)) calls++;
    CHECK(watched.watch.mine.changes == heard + (uint32_t)calls, "the watch heard of %u of %lld passes",
          watched.watch.mine.changes - heard, (long long)calls);
    CHECK(g->pages.num_free == g->pages.pages, "%lld pages are still held",
          (long long)(g->pages.pages - g->pages.num_free));
    CHECK(!g->running.first && !g->waiting.first && !g->held.first && engine_free_slot(g) == 0,
          "nodes are left");
}

// `count` sequences, every third to be generated, which share beginnings of random lengths.
static Sequence* mixed_sequences(const Model* model, int64_t count) {
    Sequence* all = (Sequence*)xcalloc((size_t)count, sizeof *all);
    for (int64_t i = 0; i < count; i++) {
        Sequence* s = &all[i];
        int32_t* tokens = random_tokens(model, 200, (uint64_t)i / 3 % 4);
        int32_t* own = random_tokens(model, 200, 100 + (uint64_t)i);
        int64_t shared = (int64_t)(random_uniform(1, 0, (uint64_t)i) * 90),
                length = 2 + (int64_t)(random_uniform(1, 1, (uint64_t)i) * 110);
        for (int64_t t = 0; t < length; t++)
            token_buffer_add(&s->tokens, (uint32_t)(t < shared ? tokens[t] : own[t]));
        s->greedy = true;
        s->scored = 1 + (length - 1) * (i % 2) / 2;
        if (i % 3 == 0) {
            s->most_tokens = 1 + i % 7;
            SamplerSettings settings = {i % 2 ? 1.0 : 0.0, 0, 1, 0, 5};
            s->sampling = settings;
            if (i % 4 == 0) s->owner = s;
        }
        free(tokens), free(own);
    }
    return all;
}

static void sequences_free(Sequence* all, int64_t count) {
    for (int64_t i = 0; i < count; i++) free(all[i].tokens.data);
    free(all);
}

static void check_same(const char* what, const Sequence* a, const Sequence* b, int64_t count) {
    int64_t differ = 0;
    for (int64_t i = 0; i < count; i++)
        differ += a[i].tokens.count != b[i].tokens.count || a[i].logprob != b[i].logprob ||
                  a[i].greedy != b[i].greedy || a[i].failed || a[i].generated != b[i].generated ||
                  a[i].stopped != b[i].stopped ||
                  memcmp(a[i].tokens.data, b[i].tokens.data, (size_t)a[i].tokens.count * 4) != 0;
    CHECK(differ == 0, "%s: %lld of %lld sequences differ", what, (long long)differ, (long long)count);
}

// Mixed sequences alone, and together under many sizes of the cache.
static void check_together(const char* name) {
    enum { COUNT = 60 };
    Model model = variant_model(name, 1, 4);
    int64_t heads = engine_heads(&model.config);
    Sequence* alone = mixed_sequences(&model, COUNT);
    const CacheSizes one = {1, 128, 0, 128, 128, false};
    Engine g = engine_of(&model, &one);
    ended = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        Sequence* s = &alone[i];
        engine_add(&g, &s, 1);
        run_engine(&g);
    }
    CHECK(ended == COUNT, "%lld sequences ended", (long long)ended);
    engine_close(&g);
    // slots, rows of a pass, pages a head: 2 hold one sequence
    const struct {
        int64_t slots, rows, pages;
    } runs[] = {{1, 128, 2}, {2, 7, 2}, {3, 64, 3}, {8, 32, 5}, {8, 500, 40}, {64, 256, 200}, {4, 9, 4}};
    int64_t put_back = 0;
    for (size_t r = 0; r < sizeof runs / sizeof runs[0]; r++) {
        Sequence *all = mixed_sequences(&model, COUNT), *order[COUNT];
        const CacheSizes sizes = {runs[r].slots, 128, runs[r].pages * heads, runs[r].rows, COUNT, false};
        char what[128];
        snprintf(what, sizeof what, "%s: %lld slots, %lld rows, %lld pages", name, (long long)runs[r].slots,
                 (long long)runs[r].rows, (long long)runs[r].pages);
        g = engine_of(&model, &sizes);
        ended = 0;
        for (int64_t i = 0; i < COUNT; i++) order[i] = &all[i];
        engine_add(&g, order, COUNT / 2);
        for (int i = 0; i < 5; i++) engine_step(&g); // the others join later
        engine_add(&g, order + COUNT / 2, COUNT - COUNT / 2);
        run_engine(&g);
        CHECK(ended == COUNT, "%s: %lld sequences ended", what, (long long)ended);
        put_back += g.put_back;
        CHECK(g.pages.most_held <= runs[r].pages * heads, "%s: pages", what);
        check_same(what, all, alone, COUNT);
        engine_close(&g);
        sequences_free(all, COUNT);
    }
    CHECK(put_back > 20, "%s: only %lld nodes were put back", name, (long long)put_back);
    sequences_free(alone, COUNT);
    model_free(&model);
}

// Questions of four choices behind a common instruction: tokens read against the distinct ones. The last
// token of a choice is only scored.
static void check_shared(void) {
    enum { QUESTIONS = 40, COUNT = 4 * QUESTIONS };
    Model model = variant_model("fox-pro", 1, 4);
    int64_t heads = engine_heads(&model.config), distinct = 20, all_tokens = 0;
    Sequence *all = (Sequence*)xcalloc(COUNT, sizeof(Sequence)), *order[COUNT];
    int32_t* instruction = random_tokens(&model, 20, 0);
    for (int64_t i = 0; i < COUNT; i++) {
        int64_t question = i / 4, context = 25 + question % 30, choice = 1 + (i * 7) % 12;
        int32_t *tokens = random_tokens(&model, context, 10 + (uint64_t)question),
                *own = random_tokens(&model, choice, 1000 + (uint64_t)i);
        Sequence* s = order[(i * 37) % COUNT] = &all[i];
        uint32_t* to = token_buffer_reserve(&s->tokens, 20 + context + choice);
        for (int64_t t = 0; t < 20; t++) *to++ = (uint32_t)instruction[t];
        for (int64_t t = 0; t < context; t++) *to++ = (uint32_t)tokens[t];
        own[0] = (int32_t)(i % 4); // choices differ from their first token on
        for (int64_t t = 0; t < choice; t++) *to++ = (uint32_t)own[t];
        s->tokens.count = 20 + context + choice, s->scored = 20 + context;
        distinct += (i % 4 == 0 ? context : 0) + choice - 1;
        all_tokens += s->tokens.count - 1;
        free(tokens), free(own);
    }
    const CacheSizes sizes = {16, 128, 16 * 2 * heads, 256, COUNT, false};
    Engine g = engine_of(&model, &sizes);
    ended = 0;
    engine_add(&g, order, COUNT);
    run_engine(&g);
    CHECK(ended == COUNT && g.put_back == 0, "%lld ended", (long long)ended);
    CHECK((double)g.tokens_read <= 1.1 * (double)distinct && g.tokens_read >= distinct,
          "%lld tokens read, %lld distinct of %lld", (long long)g.tokens_read, (long long)distinct,
          (long long)all_tokens);
    printf("four choices: %lld tokens read, %lld distinct of %lld\n", (long long)g.tokens_read,
           (long long)distinct, (long long)all_tokens);
    engine_close(&g);
    sequences_free(all, COUNT);
    free(instruction);
    model_free(&model);
}

// Greedy generation: each token is the forward pass's most likely one, but for rounding. Samples of one
// prompt read it once, and differ; a greedy one behind them does not take what they draw.
static void check_greedy(const char* name, int64_t generated) {
    enum { PROMPT = 9, COUNT = 5 };
    const int64_t T = PROMPT + generated;
    Model model = variant_model(name, 1, T);
    int64_t V = model.config.vocab_size;
    int32_t* prompt = random_tokens(&model, T, 0);
    Sequence all[COUNT], *order[COUNT];
    const CacheSizes sizes = {COUNT, T, COUNT * pages_of(T) * engine_heads(&model.config), 16, COUNT, true};
    Engine g = engine_of(&model, &sizes);
    g.end_of_text = -1; // never drawn
    memset(all, 0, sizeof all);
    for (int i = 0; i < COUNT; i++) {
        order[i] = &all[i];
        uint32_t* to = token_buffer_reserve(&all[i].tokens, PROMPT);
        for (int t = 0; t < PROMPT; t++) to[t] = (uint32_t)prompt[t];
        all[i].tokens.count = PROMPT, all[i].most_tokens = generated;
        SamplerSettings settings = {i % 3 ? 1.0 : 0.0, 0, 1, 0, (uint64_t)i};
        all[i].sampling = settings;
    }
    engine_add(&g, order, COUNT);
    run_engine(&g);
    CHECK(g.tokens_read == PROMPT + COUNT * (generated - 1), "%s: %lld tokens read", name,
          (long long)g.tokens_read);
    real* logits = new_reals(T * V);
    for (int64_t t = 0; t < T; t++) prompt[t] = (int32_t)all[0].tokens.data[t];
    model_forward(&model, prompt);
    model_loss(&model, prompt, 0, false, logits);
    int wrong = 0;
    for (int64_t t = PROMPT; t < T; t++) {
        const real* row = logits + (t - 1) * V;
        for (int64_t v = 0; v < V; v++) wrong += row[v] - row[prompt[t]] > PICK((real)1e-4, (real)1e-11);
    }
    CHECK(wrong == 0 && all[0].tokens.count == T, "%s: %d tokens are not the most likely ones", name, wrong);
    CHECK(memcmp(all[1].tokens.data, all[2].tokens.data, (size_t)T * sizeof(uint32_t)) != 0,
          "%s: samples differ", name);
    CHECK(memcmp(all[0].tokens.data, all[3].tokens.data, (size_t)T * sizeof(uint32_t)) == 0,
          "%s: greedy texts of one prompt are the same", name);
    for (int i = 0; i < COUNT; i++) free(all[i].tokens.data);
    free(logits), free(prompt);
    engine_close(&g);
    model_free(&model);
}

static int64_t in_steps; // steps that were not the only one of their extension

// An extension of several steps, as the GPU trainer has them.
static void extend_in_steps(Cache* cache, const Extension* e, RowScore* scores, float* logits) {
    enum { MOST = 8 };
    int32_t tokens[MOST];
    int64_t lengths[MOST];
    Draw draws[MOST];
    Extension one = *e;
    one.steps = 1;
    cache_extend(cache, &one, scores, logits);
    if (e->steps == 1) return;
    assert(extension_decodes(e) && e->sequences <= MOST);
    in_steps += e->steps;
    one.tokens = tokens, one.lengths = lengths;
    if (e->draws) one.draws = (Draw*)memcpy(draws, e->draws, (size_t)e->outputs * sizeof(Draw));
    for (int64_t step = 1; step < e->steps; step++) {
        for (int64_t i = 0; i < e->sequences; i++) {
            tokens[i] = scores[(step - 1) * e->outputs + i].drawn;
            lengths[i] = e->lengths[i] + step;
            if (e->draws) draws[i].counter++;
        }
        cache_extend(cache, &one, scores + step * e->outputs, NULL);
    }
}

// Passes of up to 4 steps give the tokens of passes of one, with pages for all steps or not.
static void check_steps(const char* name) {
    enum { COUNT = 6, PROMPT = 5, MOST = PROMPT + 300 };
    Model model = variant_model(name, 1, 4);
    const int64_t heads = engine_heads(&model.config);
    Sequence all[3][COUNT], *order[COUNT];
    Trainer stepping = cached_trainer;
    stepping.pass_steps = 4, stepping.extend = extend_in_steps;
    memset(all, 0, sizeof all);
    for (int run = 0; run < 3; run++) {
        const int64_t pages = run < 2 ? COUNT * pages_of(MOST) : pages_of(MOST) + 1;
        const CacheSizes sizes = {COUNT, MOST, pages * heads, 16, COUNT, false};
        if (run > 0) engine_trainer = &stepping;
        Engine g = engine_of(&model, &sizes);
        g.end_of_text = -1; // never drawn
        for (int i = 0; i < COUNT; i++) {
            Sequence* s = order[i] = &all[run][i];
            int32_t* prompt = random_tokens(&model, PROMPT, (uint64_t)i);
            for (int t = 0; t < PROMPT; t++) token_buffer_add(&s->tokens, (uint32_t)prompt[t]);
            s->most_tokens = i < 2 ? MOST - PROMPT : 20 + 3 * i;
            s->sampling = (SamplerSettings){i % 2 ? 1.0 : 0.0, 0, 1, 0, (uint64_t)i};
            if (i == 2) s->owner = s; // which stops it in the middle of an extension
            free(prompt);
        }
        in_steps = ended = 0;
        engine_add(&g, order, COUNT);
        run_engine(&g);
        CHECK(ended == COUNT && (in_steps > 0) == (run > 0), "%s: %lld sequences ended, %lld steps", name,
              (long long)ended, (long long)in_steps);
        if (run > 0) check_same(name, all[run], all[0], COUNT);
        engine_close(&g);
    }
    engine_trainer = &cached_trainer;
    for (int run = 0; run < 3; run++)
        for (int i = 0; i < COUNT; i++) free(all[run][i].tokens.data);
    model_free(&model);
}

// Strong gates: a long sequence runs in a pool that holds a fifth of it, and forgotten pages are given back.
static void check_forgetting(void) {
    enum { T = 2000 };
    Model model = variant_model("fox-pro num_heads=1", 1, 4);
    int64_t L = model.config.num_hidden_layers;
    for (int64_t l = 0; l < L; l++) model.params[params_find(&model.table, P_FGATE_BIAS, l)->offset] = -1;
    double logprob[2];
    for (int drops = 0; drops < 2; drops++) {
        const CacheSizes sizes = {2, T, 0, 100, 2, drops == 1};
        Engine g = engine_of(&model, &sizes);
        int32_t* tokens = random_tokens(&model, T, 0);
        Sequence s, *order = &s;
        memset(&s, 0, sizeof s);
        for (int t = 0; t < T; t++) token_buffer_add(&s.tokens, (uint32_t)tokens[t]);
        s.scored = T - 1;
        engine_add(&g, &order, 1);
        run_engine(&g);
        logprob[drops] = s.logprob;
        CHECK(drops ? g.pages.most_held <= L * pages_of(T) / 5 && g.pages.forgotten >= L * pages_of(T) * 4 / 5
                    : g.pages.most_held == L * pages_of(T - 1) && g.pages.forgotten == 0,
              "%lld pages held, %lld forgotten", (long long)g.pages.most_held, (long long)g.pages.forgotten);
        free(tokens), free(s.tokens.data);
        engine_close(&g);
    }
    CHECK(fabs(logprob[0] - logprob[1]) <= 1e-3, "%g and %g", logprob[0], logprob[1]);
    model_free(&model);
}

// A slot in which a sequence has forgotten pages, and then short ones: these have the bits that they have in
// a new cache.
static void check_reused(const char* name) {
    enum { T = 600, SHORT = 3 };
    Model model = variant_model(name, 1, 4);
    const CacheSizes sizes = {1, T, 0, 100, 2, true};
    Sequence all[2][SHORT];
    for (int64_t l = 0; l < model.config.num_hidden_layers && config_has_gate(&model.config); l++)
        model.params[params_find(&model.table, P_FGATE_BIAS, l)->offset] = -1;
    memset(all, 0, sizeof all);
    for (int used = 0; used < 2; used++) {
        Engine g = engine_of(&model, &sizes);
        for (int64_t i = 0; i < SHORT; i++) {
            int32_t *before = random_tokens(&model, T, 9), *tokens = random_tokens(&model, T, (uint64_t)i);
            Sequence s, *order = &s;
            memset(&s, 0, sizeof s);
            for (int64_t t = 0; t < T - 1; t++) token_buffer_add(&s.tokens, (uint32_t)before[t]);
            s.most_tokens = 1;
            if (used) engine_add(&g, &order, 1), run_engine(&g);
            order = &all[used][i];
            for (int64_t t = 0; t < 1 + 5 * i; t++) token_buffer_add(&order->tokens, (uint32_t)tokens[t]);
            SamplerSettings sampling = {1, 0, 1, 0, 3};
            order->most_tokens = 40, order->sampling = sampling;
            engine_add(&g, &order, 1);
            run_engine(&g);
            free(before), free(tokens), free(s.tokens.data);
        }
        CHECK(!used || !config_has_gate(&model.config) || g.pages.forgotten > 0, "%s: pages are forgotten",
              name);
        engine_close(&g);
    }
    check_same(name, all[1], all[0], SHORT);
    for (int i = 0; i < 2 * SHORT; i++) free(all[i / SHORT][i % SHORT].tokens.data);
    model_free(&model);
}

// A window: a sequence many times as long runs in the pages that the window and a pass touch, with the same
// bits.
static void check_shared_window(void) {
    enum { T = 2000, ROWS = 100 };
    Model model = variant_model("transformer-swa num_heads=1", 1, 4);
    int64_t L = model.config.num_hidden_layers, window = model.config.window_size;
    double logprob[2];
    for (int drops = 0; drops < 2; drops++) {
        const CacheSizes sizes = {2, T, 0, ROWS, 2, drops == 1};
        Engine g = engine_of(&model, &sizes);
        int32_t* tokens = random_tokens(&model, T, 0);
        Sequence s, *order = &s;
        memset(&s, 0, sizeof s);
        for (int t = 0; t < T; t++) token_buffer_add(&s.tokens, (uint32_t)tokens[t]);
        s.scored = 1;
        engine_add(&g, &order, 1);
        run_engine(&g);
        logprob[drops] = s.logprob;
        int64_t most = pages_of(window) + 2 * pages_of(ROWS) + 2; // it forgets every second page
        CHECK(drops ? g.pages.most_held <= L * most && g.pages.forgotten >= L * (pages_of(T) - most)
                    : g.pages.most_held == L * pages_of(T - 1) && g.pages.forgotten == 0,
              "%lld pages held, %lld forgotten", (long long)g.pages.most_held, (long long)g.pages.forgotten);
        free(tokens), free(s.tokens.data);
        engine_close(&g);
    }
    CHECK(logprob[0] == logprob[1], "%.17g and %.17g", logprob[0], logprob[1]);
    model_free(&model);
}

static void check_not_finite(void) {
    Model model = variant_model("fox-pro", 1, 4);
    model.params[params_find(&model.table, P_NORM, 0)->offset] = NAN;
    const CacheSizes sizes = {2, 64, 0, 16, 4, false};
    Engine g = engine_of(&model, &sizes);
    Sequence all[2], *order[2] = {&all[0], &all[1]};
    memset(all, 0, sizeof all);
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t t = 0; t < 5; t++) token_buffer_add(&all[i].tokens, i + t);
        all[i].scored = 1, all[i].most_tokens = i ? 4 : 0;
    }
    engine_add(&g, order, 2);
    run_engine(&g);
    CHECK(all[0].failed && all[1].failed && all[1].generated == 0, "logits that are not finite");
    for (int i = 0; i < 2; i++) free(all[i].tokens.data);
    engine_close(&g);
    model_free(&model);
}

// ----------------------------------------------------------------------------
// texts

// Adds texts in pieces; what is certain never shrinks, and is never behind what a stop string takes back.
static void check_text(bool escaped, const char* const* stop, const char* const* pieces, const char* want,
                       bool stopped) {
    Tokenizer tokenizer;
    Stops stops = {NULL, 0};
    tokenizer_bytes(&tokenizer);
    for (; *stop; stop++) {
        Stop* s = stops_add(&stops);
        s->text = xstrdup(*stop), s->bytes = strlen(*stop);
    }
    GeneratedText t = {&tokenizer, &stops, escaped, {NULL, 0, 0}, {NULL, 0, 0}, 0, false};
    char seen[64] = "";
    for (; *pieces && !t.stopped; pieces++) {
        text_add(&t, *pieces, strlen(*pieces), false);
        CHECK(t.certain >= strlen(seen) && strncmp(t.text.data, seen, strlen(seen)) == 0, "'%s' was certain",
              seen);
        snprintf(seen, sizeof seen, "%.*s", (int)t.certain, t.text.data);
    }
    text_end(&t);
    CHECK(strcmp(t.text.data, want) == 0 && t.text.count == strlen(want) && t.certain == t.text.count &&
              t.stopped == stopped,
          "'%s', want '%s'", t.text.data, want);
    text_free(&t);
    stops_free(&stops);
    tokenizer_free(&tokenizer);
}

static void check_texts(void) {
#define LIST(...) (const char* const[]){__VA_ARGS__, NULL}
    check_text(false, LIST("END"), LIST("a", "bE", "N", "Dc"), "ab", true);
    check_text(false, LIST("END"), LIST("a", "E", "N", "d"), "aENd", false);
    check_text(false, LIST("END"), LIST("a", "EN"), "aEN", false);
    check_text(false, LIST("aab", "c"), LIST("a", "a", "a", "b"), "a", true);
    check_text(false, LIST("xyz", "y"), LIST("x", "y", "z"), "", true); // the one that begins first
    check_text(false, LIST("\n\n"), LIST("a\n", "b\n", "\nc"), "a\nb", true);
    check_text(true, LIST("\n"), LIST("a\\", "n", "b"), "a", true);
    check_text(true, LIST("\n"), LIST("a\\u00", "e4\\"), "aä\\", false);
    check_text(false, LIST(""), LIST("a"), "a", false);
#undef LIST
}

// A device whose memory is enough for caches of `most_slots` slots of 100 tokens
static int64_t most_slots;
static Cache* small_cache_new(Model* model, const CacheSizes* sizes) {
    return sizes->slots > most_slots || sizes->capacity > 100 ? NULL : cache_new(model, sizes);
}

// Too little memory for what is wanted: shorter sequences, then fewer slots.
static void check_memory(const char* name) {
    Model model = variant_model(name, 1, 4);
    Trainer trainer = cached_trainer;
    Run run;
    Requests r;
    memset(&run, 0, sizeof run), memset(&r, 0, sizeof r);
    trainer.cache_new = small_cache_new, trainer.pass_tokens = 64, trainer.suggested_tokens = 64 * 40;
    run.config = model.config, run.options.seq_len = 100, r.reader.run = &run;
    for (most_slots = 1; most_slots <= 40; most_slots = 2 * most_slots + 1) {
        requests_open(&r, &trainer, &model);
        int64_t slots = r.engine.sizes.slots;
        CHECK(r.engine.sizes.capacity == 100 && slots <= most_slots && 2 * slots > most_slots / 2,
              "%s: %lld slots of at most %lld", name, (long long)slots, (long long)most_slots);
        engine_close(&r.engine);
    }
    model_free(&model);
}

// What a pass of --bench reads: lm_head, also where it is the embedding. 128 rows need no padding on the GPU.
static void check_bytes_read(void) {
    double bytes[2];
    Trainer reads = cached_trainer;
    reads.weight_bytes = sizeof(real);
    for (int tied = 0; tied < 2; tied++) {
        Run run;
        memset(&run, 0, sizeof run);
        run.config = variant_config(tied ? "fox-pro vocab_size=128 tie_word_embeddings=true"
                                         : "fox-pro vocab_size=128");
        run.table = params_build(&run.config);
        bytes[tied] = bench_pass_bytes(&run, &reads, 1, 64);
        params_free(&run.table);
    }
    CHECK(fabs(bytes[0] - bytes[1]) < 1024, "%.0f bytes, tied %.0f", bytes[0], bytes[1]); // of alignment
}

static int test_engine(void) {
    watched.size = 1, watched.watching = true;
    watch_init_lock(&watched.watch);
    omp_set_num_threads(1); // the models are too small for threads to pay
    check_together("fox-pro");
    check_together("transformer-llama");
    check_together("fox-llama use_k_shift=true");
    check_shared();
    for (int i = 0; i < NUM_VARIANTS; i++) check_greedy(variants[i].name, 60);
    check_greedy("transformer-swa", 400);
    check_greedy("fox-pro window_size=30", 200);
    check_steps("fox-pro");
    check_steps("mamba2");
    check_steps("gated-deltanet");
    check_forgetting();
    check_reused("fox-pro num_heads=1");
    check_reused("fox-pro num_heads=1 use_rope=true");
    check_reused("transformer-swa");
    check_reused("hgrn2");
    check_shared_window();
    check_not_finite();
    check_memory("fox-pro");
    check_memory("mamba2 state_size=6");
    check_bytes_read();
    check_texts();
    return test_report();
}
