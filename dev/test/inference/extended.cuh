/*
The part of test_fox.cu that compares passes of inference over a cache with the forward pass.
*/
#pragma once

// The tokens that a sequence of a cache draws behind `prompt`, up to `at_once` of them in one extension. Slot
// 0 has the pages of `pages`.
static std::vector<int32_t> continued(Cache* cache, const std::vector<int32_t>& pages,
                                      std::vector<int32_t> prompt, int64_t at_once, double temperature) {
    enum { DRAWN = 19 };
    int32_t slot = 0, target = -1;
    int64_t length = 0;
    Draw draw = {{temperature, 7, 0.9, 0.01, 5}, 0};
    std::vector<int32_t> drawn;
    while (drawn.size() < DRAWN) {
        int64_t rows = (int64_t)prompt.size(), begins[] = {0, rows}, output = rows - 1;
        int64_t steps = rows > 1 ? 1 : std::min(at_once, DRAWN - (int64_t)drawn.size());
        std::vector<RowScore> scores((size_t)steps);
        Extension pass = {rows,         1, prompt.data(), &slot,   begins, &length,
                          pages.data(), 1, &output,       &target, &draw,  steps};
        cache_extend(cache, &pass, scores.data(), NULL);
        for (const RowScore& score : scores) drawn.push_back(score.drawn);
        length += rows + steps - 1, draw.counter += (uint64_t)steps;
        prompt = {drawn.back()};
    }
    return drawn;
}

// Extends n of the batch's sequences by t tokens at a time, the later ones with a delay of one extension
// each, and compares the logits with those of the forward pass. Then sequence 0 as one prompt, and what it
// draws.
static void compare_extended(Model* model, const Expected* e, int64_t n, int64_t t) {
    int64_t V = model->config.vocab_size, steps = std::min<int64_t>(e->T, 40) / t;
    int64_t heads = engine_heads(&model->config);
    CacheSizes sizes = {n, (int64_t)1 << 40, 1, n * t, n, false};
    CHECK(!cache_new(model, &sizes), "%s: a cache without memory for it", e->name);
    sizes.capacity = std::max(steps * t, e->T) + 32, sizes.rows = std::max(n * t, e->T);
    sizes.pages = n * heads * cache_table_width(&sizes);
    Cache* cache = cache_new(model, &sizes);
    std::vector<int32_t> pages((size_t)sizes.pages);
    for (size_t i = 0; i < pages.size(); i++) pages[i] = (int32_t)(pages.size() - 1 - i);
    Floats got;
    std::vector<double> expected;
    // Extends sequences first .. last, of which b holds held(b) tokens, by t tokens each.
    auto extend = [&](int64_t first, int64_t last, int64_t count, auto held) {
        std::vector<int32_t> tokens, slots, targets;
        std::vector<int64_t> begins = {0}, lengths, outputs;
        for (int64_t b = first; b <= last; b++) {
            const int32_t* from = e->inputs + b * e->T + held(b);
            const double* want = e->logits.data() + (b * e->T + held(b) + count - 1) * V;
            tokens.insert(tokens.end(), from, from + count);
            slots.push_back((int32_t)b), lengths.push_back(held(b)), targets.push_back((int32_t)(V - 1));
            begins.push_back(begins.back() + count), outputs.push_back(begins.back() - 1);
            expected.insert(expected.end(), want, want + V);
        }
        std::vector<RowScore> scores(slots.size());
        Floats logits(slots.size() * (size_t)V);
        Extension pass = {begins.back(),  (int64_t)slots.size(), tokens.data(), slots.data(),
                          begins.data(),  lengths.data(),        pages.data(),  (int64_t)outputs.size(),
                          outputs.data(), targets.data(),        NULL,          1};
        cache_extend(cache, &pass, scores.data(), logits.data());
        for (size_t i = 0; i < slots.size(); i++) {
            const float* row = &logits[i * (size_t)V];
            double sum = 0;
            for (int64_t v = 0; v < V; v++) sum += exp((double)row[v] - row[V - 1]);
            CHECK(scores[i].best == std::max_element(row, row + V) - row, "%s: best token", e->name);
            CHECK(fabs(scores[i].logprob + log(sum)) < 1e-4, "%s: logprob %g, not %g", e->name,
                  scores[i].logprob, -log(sum));
        }
        got.insert(got.end(), logits.begin(), logits.end());
    };
    for (int64_t step = 0; step < steps + n - 1; step++)
        extend(std::max<int64_t>(0, step - steps + 1), std::min(step, n - 1), t,
               [&](int64_t b) { return (step - b) * t; });
    extend(0, 0, e->T, [](int64_t) { return 0; });
    compare(e->name, config_layers_of(&model->config, MIXER_ATTENTION) < model->config.num_hidden_layers,
            Q_EXTENDED, "extended logits", got.data(), expected.data(), (int64_t)got.size(), 0);
    std::vector<int32_t> prompt(e->inputs, e->inputs + std::min<int64_t>(e->T, 60)); // crosses a page border
    for (double temperature : {0.0, 1.0})
        CHECK(continued(cache, pages, prompt, EXTEND_STEPS, temperature) ==
                  continued(cache, pages, prompt, 1, temperature),
              "%s, temperature %g: several steps at once draw other tokens", e->name, temperature);
    cache_free(cache);
}

// A recurrent mixer's slot is forked: one pass extends both by the same sequence, one by several tokens and
// one by one.
static void check_fork(Model* model, const Expected* e) {
    enum { SHARED = 7, MORE = 5 };
    if (engine_heads(&model->config) > 0 || e->T < SHARED + MORE) return;
    int64_t V = model->config.vocab_size;
    CacheSizes sizes = {2, e->T, 0, e->T, 2, false};
    Cache* cache = cache_new(model, &sizes);
    Floats logits((size_t)(2 * V));
    std::vector<double> expected;
    RowScore scores[2];
    const int32_t slots[] = {0, 1}, targets[] = {-1, -1}, *tokens = e->inputs;
    const int64_t empty[] = {0}, first[] = {0, SHARED}, last_of_first[] = {SHARED - 1};
    Extension prompt = {SHARED, 1, tokens, slots, first, empty, NULL, 1, last_of_first, targets, NULL, 1};
    cache_extend(cache, &prompt, scores, logits.data());
    cache_fork(cache, 0, 1);
    std::vector<int32_t> both(tokens + SHARED, tokens + SHARED + MORE);
    both.push_back(tokens[SHARED]);
    const int64_t begins[] = {0, MORE, MORE + 1}, lengths[] = {SHARED, SHARED}, outputs[] = {MORE - 1, MORE};
    Extension pass = {MORE + 1, 2, both.data(), slots, begins, lengths, NULL, 2, outputs, targets, NULL, 1};
    cache_extend(cache, &pass, scores, logits.data());
    for (int64_t t : {SHARED + MORE - 1, (int)SHARED})
        expected.insert(expected.end(), e->logits.data() + t * V, e->logits.data() + (t + 1) * V);
    compare(e->name, true, Q_EXTENDED, "logits after a fork", logits.data(), expected.data(), 2 * V, 0);
    cache_free(cache);
}
