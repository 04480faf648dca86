/*
The part of test_sequence.cu that scores and continues prompts with ranks that share the heads of each sequence, in
processes of their own that share one GPU: log-probabilities are those of one rank but for rounding, greedy tokens are
its likeliest, and all ranks have the same results.

Prompts are read in chunks, by attention_forward and by tiles, whose rows ranks divide or not; tokens are decoded;
sequences share beginnings, wait for pages and are put back; heads forget, each at its own pace.
*/
#pragma once

// Of the log-probability of a token that one rank draws, over that of the one that several draw, where they part:
// logits have rms 1.2, and an error of up to 9e-3 of that (test_decoding.cu).
#define DRAWN_LIMIT 0.1

enum { PROMPTS = 7, PROMPT_MOST = 700, PROMPT_DRAWN = 24 };

static const struct {
    int tokens, shared; // of the prompt; the first `shared` are those of all
    int scored;         // from this one on; 0: it is continued
    double temperature;
} prompts[PROMPTS] = {{700, 0, 600, 0}, {350, 300, 320, 0}, {40, 0, 0, 0}, {300, 299, 0, 0},
                      {20, 0, 1, 0},    {41, 39, 0, 1},     {1, 1, 0, 0}};

struct PromptModel {
    const char* spec;
    bool drops, drops_unseen, forgets; // in the cache; are pages forgotten?
};

// What ranks compute of the prompts.
struct PromptResults {
    double logprobs[PROMPTS];
    uint32_t drawn[PROMPTS][PROMPT_DRAWN];
    int64_t passes, put_back;
};

static bool prompt_on_token(Sequence*, int64_t) { return true; }
static void prompt_on_end(Sequence*) {}

static Trainer prompt_trainer(void) {
    Trainer t = {};
    t.pass_tokens = 512, t.pass_steps = EXTEND_STEPS;
    t.cache_new = cache_new, t.extend = cache_extend, t.cache_free = cache_free;
    t.cache_fork = cache_fork, t.cache_copy_page = cache_copy_page, t.cache_forgotten = cache_forgotten;
    return t;
}

// An engine of the ranks of a world, or of one: pages for two long sequences.
static void prompt_engine(Engine* g, const Trainer* trainer, Model* model, const PromptModel* m,
                          World* world) {
    CacheSizes sizes = engine_sizes(trainer, 4, PROMPT_MOST + PROMPT_DRAWN);
    sizes.drops = m->drops, sizes.drops_unseen = m->drops_unseen;
    sizes.ranks = world ? world->size : 1;
    sizes.pages = 2 * engine_heads(&model->config) / sizes.ranks * cache_table_width(&sizes);
    CHECK(engine_open(g, trainer, model, &model->config, &sizes, world), "%s: the engine opens", m->spec);
    g->on_token = prompt_on_token, g->on_end = prompt_on_end;
    g->end_of_text = -1;
}

static Sequence prompt_sequence(const uint32_t* tokens, int64_t count, int64_t scored) {
    Sequence s = {};
    token_buffer_append(&s.tokens, tokens, count);
    s.scored = scored;
    s.greedy = true;
    return s;
}

static std::vector<uint32_t> prompt_tokens(const cpu::Model* start, int i) {
    std::vector<uint32_t> tokens;
    for (int t = 0; t < prompts[i].tokens; t++)
        tokens.push_back(
            (uint32_t)(random_uniform(17, t < prompts[i].shared ? 0 : 1 + (uint64_t)i, (uint64_t)t) *
                       (double)start->config.vocab_size));
    return tokens;
}

// Reads and continues all prompts. forgotten: pages that this rank has given back.
static PromptResults prompt_run(Model* model, const cpu::Model* start, const PromptModel* m, World* world,
                                int64_t* forgotten) {
    const Trainer trainer = prompt_trainer();
    Engine g;
    Sequence all[PROMPTS], *order[PROMPTS];
    PromptResults results = {};
    prompt_engine(&g, &trainer, model, m, world);
    for (int i = 0; i < PROMPTS; i++) {
        const std::vector<uint32_t> tokens = prompt_tokens(start, i);
        all[i] = prompt_sequence(tokens.data(), (int64_t)tokens.size(), prompts[i].scored);
        order[i] = &all[i];
        if (prompts[i].scored) continue;
        all[i].most_tokens = PROMPT_DRAWN;
        all[i].sampling = {prompts[i].temperature, 0, 1, 0, 5};
    }
    engine_add(&g, order, PROMPTS);
    while (engine_step(&g)) {}
    for (int i = 0; i < PROMPTS; i++) {
        CHECK(!all[i].failed, "%s: logits of prompt %d are not finite", m->spec, i);
        results.logprobs[i] = all[i].logprob;
        for (int64_t t = 0; t < all[i].generated; t++)
            results.drawn[i][t] = all[i].tokens.data[prompts[i].tokens + t];
        free(all[i].tokens.data);
    }
    results.passes = g.passes, results.put_back = g.put_back;
    *forgotten = g.pages.forgotten;
    engine_close(&g);
    return results;
}

// The log-probability of `next` behind a prompt and `count` drawn tokens, by one rank.
static double prompt_logprob(Model* model, const cpu::Model* start, const PromptModel* m, int i,
                             const uint32_t* drawn, int count, uint32_t next) {
    const Trainer trainer = prompt_trainer();
    Engine g;
    std::vector<uint32_t> tokens = prompt_tokens(start, i);
    tokens.insert(tokens.end(), drawn, drawn + count);
    tokens.push_back(next);
    Sequence s = prompt_sequence(tokens.data(), (int64_t)tokens.size(), (int64_t)tokens.size() - 1);
    Sequence* order = &s;
    prompt_engine(&g, &trainer, model, m, NULL);
    engine_add(&g, &order, 1);
    while (engine_step(&g)) {}
    free(s.tokens.data);
    engine_close(&g);
    return s.logprob;
}

static void compare_prompts(Model* model, const cpu::Model* start, const PromptModel* m, int ranks,
                            const PromptResults* got, const PromptResults* alone) {
    int same = 0, drawn = 0;
    for (int i = 0; i < PROMPTS; i++) {
        if (prompts[i].scored) {
            const double error = fabs(got->logprobs[i] - alone->logprobs[i]) / fabs(alone->logprobs[i]);
            check_near(0, error, m->spec, ranks, "a prompt's log-probability");
        }
        if (prompts[i].scored || prompts[i].temperature > 0) continue;
        const uint32_t *a = got->drawn[i], *b = alone->drawn[i];
        int t = 0;
        while (t < PROMPT_DRAWN && a[t] == b[t]) t++;
        same += t, drawn += PROMPT_DRAWN;
        if (t == PROMPT_DRAWN) continue;
        const double likelier =
            prompt_logprob(model, start, m, i, b, t, b[t]) - prompt_logprob(model, start, m, i, b, t, a[t]);
        CHECK(likelier <= DRAWN_LIMIT, "%s, %d ranks: token %d behind prompt %d is %.3f less likely", m->spec,
              ranks, t, i, likelier);
    }
    printf("%s, %d ranks: %d of %d tokens drawn alike, %lld passes, %lld times put back\n", m->spec, ranks,
           same, drawn, (long long)got->passes, (long long)got->put_back);
}

// A model on the ranks of a world; rank 0 compares it with what it computes alone.
static void check_prompts(World* world, const PromptModel* m) {
    cpu::Model start = cpu::variant_model(m->spec, 1, 1);
    const SequenceGroup group = sequence_group(world->rank, world->size);
    Model model = model_new(&start.config, false, true, 0, 1);
    Floats host(start.params, start.params + model.table.count);
    model.group = group;
    model.heads = sequence_open(world, &model.config, &model.table, &group, EXTEND_ROWS, 1, NULL);
    model_allocate_weights(&model, false);
    model_upload(&model, host.data(), NULL, NULL);
    int64_t forgotten[RANKS_MOST] = {}, mine, alone_forgot = 0, sum = 0;
    PromptResults all[RANKS_MOST], alone = {};
    if (world->rank == 0) alone = prompt_run(&model, &start, m, NULL, &alone_forgot);
    const PromptResults got = prompt_run(&model, &start, m, world, &mine);
    world_allgather(world, all, &got, sizeof got);
    world_allgather(world, forgotten, &mine, sizeof mine);
    for (int r = 0; r < world->size; r++) {
        CHECK(memcmp(&all[r], &all[0], sizeof got) == 0, "%s: rank %d has other results", m->spec, r);
        sum += forgotten[r];
    }
    if (world->rank == 0) {
        compare_prompts(&model, &start, m, world->size, &got, &alone);
        CHECK((sum > 0) == m->forgets && (alone_forgot > 0) == m->forgets,
              "%s: %lld pages forgotten, alone %lld", m->spec, (long long)sum, (long long)alone_forgot);
    }
    model_free(&model);
    cpu::model_free(&start);
}

static void prompts_body(World* world) {
    static const PromptModel
        of_two[] =
            {{"fox-pro num_heads=4 hidden_size=256 intermediate_size=72", true, false, true},
             {"fox-pro num_heads=4 hidden_size=512 intermediate_size=72 use_rope=true", true, false, true},
             {"fox-pro num_heads=2 hidden_size=128 intermediate_size=72 qk_norm_share_param_across_head=true",
              false, false, false},
             {"fox-llama num_heads=4 hidden_size=256 intermediate_size=72", true, false, false},
             {"fox-llama num_heads=4 hidden_size=256 intermediate_size=72", true, true, true},
             {"fox-pro num_heads=4 hidden_size=256 intermediate_size=72 window_size=70", true, false, true},
             {"transformer-llama num_heads=4 hidden_size=256 intermediate_size=72 window_size=200", true,
              false, true},
             {"transformer-pro num_heads=4 hidden_size=512 intermediate_size=72", true, false, false}},
        of_three[] = {{"fox-pro num_heads=6 hidden_size=384 intermediate_size=72", true, false, true},
                      {"fox-llama num_heads=3 hidden_size=384 intermediate_size=72 fgate_type=bias_only",
                       true, false, false}};
    device_open(0);
    for (const PromptModel& m : of_two)
        if (world->size == 2) check_prompts(world, &m);
    for (const PromptModel& m : of_three)
        if (world->size == 3) check_prompts(world, &m);
    if (world->rank == 0)
        printf("prompts of %d ranks: log-probabilities at most %.1e, limit %.1e: %s\n", world->size, worst[0],
               LOSS_LIMIT, worst_where[0]);
}
