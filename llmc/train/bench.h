/*
What both trainers print with --bench: how fast they train, how fast they evaluate, how fast the engine reads
a prompt, and how fast it continues sequences. Tokens are random and nothing is forgotten, so the figures of
inference do not depend on what the weights have learnt. Called by main.h.
*/
#pragma once

#include <sys/resource.h>
#include "../serve/engine.h"

static const int64_t BENCH_CONTEXT = 1024; // tokens that sequences have before they are continued, at most

// Prints a step's time `ms`, tokens and FLOPs a second. hidden: share of attention that lies in other packed
// documents; pruned: share of the rest that is not computed.
static inline void bench_print_rate(const Run* run, const char* what, double ms, double pruned,
                                    double hidden) {
    double attention = run_attention_flops_per_token(run);
    double rate = 1e3 * (double)run->options.batch_tokens / ms,
           flops = run_flops_per_token(run) - hidden * attention;
    double executed = flops - pruned * (1 - hidden) * attention, peak = run->peak_flops * run->world->size;
    const bool small = rate * flops < 1e12;
    printf("  %-28s %10.2f ms %10.0f tokens/s %8.1f %s of the model", what, ms, rate,
           (small ? 1e-9 : 1e-12) * rate * flops, small ? "GFLOP/s" : "TFLOP/s");
    if (peak > 0) printf("  %4.1f%% MFU", 100 * rate * flops / peak);
    if (peak > 0 && config_prunes(&run->config)) printf(" (%4.1f%% executed)", 100 * rate * executed / peak);
    printf("\n");
}

// ----------------------------------------------------------------------------
// training

// The first mark of step i.
static inline int bench_marks(int64_t i) { return (int)(i & 1) * MARKS_A_STEP; }

// The documents of a batch, the same in all passes.
static inline DocumentCount bench_documents(const Run* run) {
    DocumentCount count = {0, 0, 0, 0};
    const Config* c = &run->config;
    const int64_t T = run->options.seq_len, BT = run->micro_batch * T;
    if (!c->document_reset) return count;
    const AttentionWindows windows = model_windows(c);
    int32_t* tokens = (int32_t*)xcalloc((size_t)(2 * BT), sizeof *tokens);
    batch_read(tokens, tokens + BT, NULL, BT, c->vocab_size);
    for (int64_t i = 0; i < BT; i += T)
        count_documents(&count, tokens + i, T, config_end_of_text(c), &windows);
    free(tokens);
    return run_documents(run, &count);
}

// Queues step i of this rank's `passes` on random tokens.
static inline void bench_step(const Trainer* trainer, Model* model, const Run* run, int64_t i, int64_t passes,
                              const DocumentCount* documents) {
    const StepVotes votes = {.documents = *documents};
    const AdamWParams adamw = options_adamw(&run->options, 1e-4, i);
    const int marks = bench_marks(i);
    trainer->mark(model, marks + MARK_STEP);
    trainer->begin_step(model);
    for (int64_t pass = 0; pass < passes; pass++) {
        trainer->load_batch(model, NULL);
        trainer->add_gradients(model, run->options.batch_tokens, pass + 1 == passes);
    }
    trainer->mark(model, marks + MARK_PASSES);
    trainer->update(model, &adamw, run->options.grad_clip, &votes);
    trainer->mark(model, marks + MARK_END);
}

// Times n steps, as many in flight as in training, after BENCH_WARM to warm up. ms: means over the n steps of
// a whole step, and of its forward and backward passes. last: the last step's results.
static inline void bench_steps(double ms[2], LogStep* last, const Trainer* trainer, Model* model,
                               const Run* run) {
    enum { BENCH_WARM = 3 };
    const int64_t n = run->options.bench, in_flight = trainer->steps_in_flight;
    const int64_t passes = run_share(run, run->micro_batches).count / run->micro_batch;
    const DocumentCount documents = bench_documents(run);
    memset(last, 0, sizeof *last);
    last->step_tokens = run->options.batch_tokens;
    last->sequence_ranks = run->group.size;
    ms[1] = 0;
    for (int64_t i = 1, first = BENCH_WARM + 1; i < first + n + in_flight; i++) {
        const int64_t done = i - in_flight; // the step that ends now
        if (i == first) trainer->mark(model, MARK_FIRST);
        if (i < first + n) bench_step(trainer, model, run, i, passes, &documents);
        if (done < 1) continue;
        trainer->finish_step(model, last);
        step_pruned(last, run);
        const int marks = bench_marks(done);
        if (done >= first)
            ms[1] += trainer->elapsed(model, marks + MARK_STEP, marks + MARK_PASSES) / (double)n;
    }
    ms[0] = trainer->elapsed(model, MARK_FIRST, bench_marks(BENCH_WARM + n) + MARK_END) / (double)n;
}

// Prints the rate of n forward passes without gradients, as --eval runs them.
static inline void bench_forward(const Trainer* trainer, Model* model, const Run* run) {
    const int64_t n = run->options.bench;
    const bool later = trainer->steps_in_flight > 0; // a pass is only queued
    double start = 0;
    for (int64_t i = -2; i < n; i++) { // two to warm up
        trainer->load_batch(model, NULL);
        if (i == 0 && !later) start = seconds_now();
        trainer->queue_losses(model);
        if (i > -2) trainer->finish_losses(model);
        if (i == 0 && later) start = seconds_now(); // this pass has just begun
    }
    trainer->finish_losses(model);
    const double seconds = (seconds_now() - start) / (double)n;
    printf("  %-28s %10.2f ms %10.0f tokens/s\n", "forward, without gradients", 1e3 * seconds,
           (double)(run_groups(run) * run->micro_batch * run->options.seq_len) / seconds);
}

// Prints how fast the model trains.
static inline void bench_training(const Trainer* trainer, Model* model, const Run* run) {
    LogStep last;
    struct rusage usage;
    double ms[2];
    bench_steps(ms, &last, trainer, model, run);
    const double hidden = documents_hidden(&last.votes.documents), pruned = last.pruned_of_all;
    getrusage(RUSAGE_SELF, &usage);
    const int ranks = run->world->size, threads = trainer->threads ? trainer->threads() : 0;
    printf("%s of %lld x %lld x %s on ", counted(run->options.bench, "step").text,
           (long long)run->micro_batches, (long long)run->micro_batch,
           counted(run->options.seq_len, "token").text);
    if (trainer->threads)
        printf("%s of %s\n", counted(ranks, "rank").text, counted(threads, "thread").text);
    else
        printf("%s", counted(ranks, "GPU").text);
    if (run->group.size > 1) printf(", %d for a sequence", run->group.size);
    if (!trainer->threads) printf("\n");
    if (trainer->bench_print) trainer->bench_print(model, run, &last);
    bench_print_rate(run, "forward and backward", ms[1], pruned, hidden);
    bench_print_rate(run, "step", ms[0], pruned, hidden);
    if (last.num_layers > 0) printf("  %-28s %10.2f%%\n", "attention pruned", 100 * pruned);
    const double share = logger_attention_share(&last);
    if (share > 0) printf("  %-28s %10.1f%%\n", "its largest share on a rank", 100 * share);
    printf("  %-28s %10.0f MiB\n", "host memory, at most", (double)usage.ru_maxrss / 1024);
    bench_forward(trainer, model, run);
}

// ----------------------------------------------------------------------------
// inference

static inline bool bench_on_token(Sequence* sequence) {
    (void)sequence;
    return true;
}
static inline void bench_on_end(Sequence* sequence) { (void)sequence; }

// Seconds of the engine's passes until each of the sequences has drawn n tokens.
static inline double bench_passes(Engine* g, const Sequence* sequences, int64_t count, int64_t n) {
    const double start = seconds_now();
    for (int64_t i = 0; i < count; i++)
        while (sequences[i].generated < n) engine_step(g);
    return seconds_now() - start;
}

// Tokens that each of `count` sequences draws: 4 extensions of them are timed, when all have their prompts.
static inline int64_t bench_tokens(const Trainer* trainer, int64_t count, int64_t length) {
    return 8 * trainer->pass_steps + count * length / trainer->pass_tokens;
}

// Reads `count` prompts of `length` tokens, which differ from the first token on, and continues them.
// seconds: of the passes that read, and of a pass that continues all.
static inline void bench_sequences(double seconds[2], Engine* g, int64_t count, int64_t length) {
    const int64_t steps = g->trainer->pass_steps;
    Sequence* sequences = (Sequence*)xcalloc((size_t)count, sizeof *sequences);
    Sequence** list = (Sequence**)xcalloc((size_t)count, sizeof *list);
    for (int64_t i = 0; i < count; i++) {
        TokenBuffer* tokens = &sequences[i].tokens;
        token_buffer_reserve(tokens, length);
        for (; tokens->count < length; tokens->count++)
            tokens->data[tokens->count] =
                (uint32_t)(random_uniform(0, (uint64_t)i, (uint64_t)tokens->count) * (double)g->V);
        tokens->data[0] = (uint32_t)(i % g->V);
        sequences[i].most_tokens = bench_tokens(g->trainer, count, length);
        list[i] = &sequences[i];
    }
    engine_add(g, list, count);
    seconds[0] = bench_passes(g, sequences, count, 1);
    bench_passes(g, sequences, count, 2 * steps); // kernels are loaded, graphs are captured
    const int64_t passes = g->passes;
    seconds[1] = bench_passes(g, sequences, count, 6 * steps);
    seconds[1] /= (double)(g->passes - passes);
    bench_passes(g, sequences, count, sequences[0].most_tokens);
    for (int64_t i = 0; i < count; i++) free(sequences[i].tokens.data);
    free(sequences);
    free(list);
}

// The fewest bytes that a pass can read to continue `count` sequences of `length` tokens: weights once, but
// for an embedding that is not lm_head, and keys and values.
static inline double bench_pass_bytes(const Run* run, const Trainer* trainer, int64_t count, double length) {
    const Config* c = &run->config;
    double page = engine_heads(c) ? (double)trainer->page_bytes(c) : 0;
    const int64_t embedding = c->tie_word_embeddings ? 0 : c->vocab_size * c->hidden_size;
    return (double)(run->table.count - embedding) * trainer->weight_bytes +
           (double)(count * engine_heads(c)) * page * length / PAGE_TOKENS;
}

// Prints how fast prompts of T tokens are read, and how fast one and several sequences are continued.
static inline void bench_inference(const Run* run, const Trainer* trainer, Model* model) {
    const int64_t T = run->options.seq_len, context = T < BENCH_CONTEXT ? T : BENCH_CONTEXT;
    const int64_t counts[] = {1, trainer->suggested_tokens / (BENCH_CONTEXT / 4)};
    const int64_t drawn = bench_tokens(trainer, counts[1], T),
                  several = counts[1] * pages_of(context + drawn);
    CacheSizes sizes = engine_sizes(trainer, counts[1], T + drawn);
    Engine engine;
    double seconds[2];
    char name[96];
    sizes.pages =
        engine_heads(&run->config) * (several > pages_of(T + drawn) ? several : pages_of(T + drawn));
    if (!engine_open(&engine, trainer, model, &run->config, &sizes, run->world)) {
        printf("  too little memory is left for inference\n");
        return;
    }
    engine.on_token = bench_on_token;
    engine.on_end = bench_on_end;
    engine.end_of_text = -1;                 // goes on behind it
    bench_sequences(seconds, &engine, 1, T); // to warm up
    bench_sequences(seconds, &engine, 1, T);
    snprintf(name, sizeof name, "prompt of %s", counted(T, "token").text);
    printf("  %-28s %10.2f ms %10.0f tokens/s\n", name, 1e3 * seconds[0], (double)T / seconds[0]);
    for (int i = 0; i < 2; i++) {
        double length = (double)(context + 4 * trainer->pass_steps);
        bench_sequences(seconds, &engine, counts[i], context);
        snprintf(name, sizeof name, "%lld x 1 token behind %lld", (long long)counts[i], (long long)context);
        printf("  %-28s %10.2f ms %10.0f tokens/s, reading %.0f GB/s\n", name, 1e3 * seconds[1],
               (double)counts[i] / seconds[1],
               1e-9 * bench_pass_bytes(run, trainer, counts[i], length) / seconds[1]);
    }
    engine_close(&engine);
}
