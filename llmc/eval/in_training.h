/*
--eval-every: what a training measures of its own model every N steps, and at its end.

    loss by position    on --val-data (positions.h), by octaves as a validation has it, P(l) as --eval has it
    --eval-requests     the answers to FILE's requests (requests.h), summed by type

One line of log.jsonl, an object; what has nothing to measure is left out:

    {"event": "evaluation", "step", "ms",
     "val_tokens", "val_loss", "perplexity", "accuracy", "bits_per_byte", "by_position",  as of a validation
     "perplexity_by_length": {"512": P(512), "1024": P(1024), .., "T": P(T)},
     "requests": {"score":    {"requests", "tokens", "logprob", "logprob_per_token", "greedy"},
                  "rolling":  {"requests", "tokens", "logprob", "logprob_per_token"},
                  "generate": {"requests", "tokens", "expected", "match"},
                  "errors"}}

logprob is the mean over requests of a type, greedy the share of scores whose tokens were all the likeliest,
match the share of generations with "expected" whose text contains it. errors: requests at which the logits
were not finite, which count for nothing else.

FILE is read once, by rank 0, before the device is opened: its longest sequence decides the cache, which is in
the plan of memory. A sequence has at most --seq-len tokens. Rank 0 answers alone, as it samples alone; the
others wait with their next collective, and the watch (llmc/ranks/watch.h) knows that rank 0 works.

Training has the same bits with and without it: it reads the weights and writes none, draws depend on a
request's seed and the token's number alone, and --val-data has a loader of its own.

Called by train.h, and training_cache_bytes by the trainers.
*/
#pragma once

#include "../run/logger.h"
#include "../serve/requests.h"
#include "evaluation.h"

enum {
    EVAL_CACHE_TOKENS = 8192, // in all slots, or as many as the longest sequence has
    EVAL_CACHE_SLOTS = 16
};

// ----------------------------------------------------------------------------
// memory

// The cache for requests whose longest sequence has `longest` tokens.
static inline CacheSizes eval_cache_sizes(const Run* run, int64_t longest) {
    int64_t slots = EVAL_CACHE_TOKENS / longest;
    if (slots > EVAL_CACHE_SLOTS) slots = EVAL_CACHE_SLOTS;
    CacheSizes s = {.slots = slots < 1 ? 1 : slots,
                    .capacity = longest,
                    .rows = GENERATE_ROWS,
                    .outputs = GENERATE_ROWS,
                    .drops = true};
    s.pages = s.slots * engine_heads(&run->config) * cache_table_width(&s);
    return s;
}

// Bytes of the larger one of the caches that a training opens on this rank, one at a time: of a sample and of
// --eval-requests. bytes: of a cache of the model.
static inline int64_t training_cache_bytes(const Run* run, int64_t (*bytes)(const void*, const CacheSizes*),
                                           const void* model) {
    const int64_t sample = run->world->rank == 0 ? sample_capacity(run) : 0, n = sample_tokens(run);
    CacheSizes sizes;
    int64_t of_sample = 0, of_requests = 0;
    if (sample > 0) {
        sizes = sample_sizes(engine_heads(&run->config), 1, sample - n, n, GENERATE_ROWS);
        of_sample = bytes(model, &sizes);
    }
    if (run->eval_tokens > 0) {
        sizes = eval_cache_sizes(run, run->eval_tokens);
        of_requests = bytes(model, &sizes);
    }
    return of_sample > of_requests ? of_sample : of_requests;
}

// ----------------------------------------------------------------------------
// requests

// Checks every line with the tokenizer that r has, and returns the tokens of the longest sequence. Dies at
// the first line that is no request, or has a sequence of more than `most` tokens.
static inline int64_t eval_requests_check(Requests* r, int64_t most) {
    Error err;
    int64_t longest = 1, requests = 0;
    char source[PATH_LENGTH + 64];
    r->reader.capacity = most;
    r->lines = 0;
    for (const char *line = r->input.data, *end = line + r->input.count, *next; line < end; line = next + 1) {
        Json j;
        Request* q;
        next = (const char*)memchr(line, '\n', (size_t)(end - line));
        if (!next) next = end;
        r->lines++;
        if (text_is_blank(line, (size_t)(next - line))) continue;
        snprintf(source, sizeof source, "--eval-requests %s: line %lld", r->name, (long long)r->lines);
        if (!json_parse(&j, source, line, (size_t)(next - line), &err)) die("%s", err.msg);
        q = (Request*)xcalloc(1, sizeof *q);
        q->reader = &r->reader;
        if (!request_parse(q, &j, line, &err)) die("%s: %s", source, err.msg);
        for (int64_t i = 0; i < q->count; i++) {
            const int64_t tokens = sequence_rows(&q->sequences[i]) + q->sequences[i].most_tokens;
            if (tokens > longest) longest = tokens;
        }
        requests++;
        json_free(&j);
        request_free(q);
    }
    if (requests == 0) die("--eval-requests %s: has no requests", r->name);
    return longest;
}

// Dies where there is nothing to evaluate, or never. Reads FILE and sets run->eval_tokens to at least the
// tokens of its longest sequence: those that it would have as bytes, as the model's tokenizer is not known
// yet. NULL: this run, or rank, answers no requests.
static inline Requests* eval_requests_open(Run* run) {
    Error err;
    const Options* o = &run->options;
    if (run->mode != RUN_TRAIN && run->mode != RUN_DRY) return NULL;
    if (o->eval_every && !o->val_data && !o->eval_requests)
        die("--eval-every: evaluate what? give --val-data GLOB, --eval-requests FILE, or both");
    if (o->eval_requests && !o->eval_every && !run_resumed(run))
        die("--eval-requests: how often? give --eval-every STEPS");
    if (!o->eval_every || !o->eval_requests || run->world->rank != 0) return NULL;
    Requests* r = (Requests*)xcalloc(1, sizeof *r);
    r->reader.run = run;
    r->name = o->eval_requests;
    r->adds_up = r->ended = true;
    r->input.data = read_file(r->name, &r->input.count, &err);
    if (!r->input.data) die("--eval-requests %s", err.msg);
    tokenizer_bytes(&r->reader.tokenizer);
    const int64_t longest = eval_requests_check(r, INT64_MAX);
    tokenizer_free(&r->reader.tokenizer);
    run->eval_tokens = longest < o->seq_len ? longest : o->seq_len;
    return r;
}

// Encodes the requests with the model's tokenizer, which outlives r.
static inline void eval_requests_encode(Requests* r, Run* run, const Tokenizer* tokenizer) {
    r->reader.tokenizer = *tokenizer;
    run->eval_tokens = eval_requests_check(r, run->options.seq_len);
}

static inline void eval_requests_close(Requests* r) {
    if (r) free(r->input.data);
    free(r);
}

// Answers all requests. False: there is no result, as the device has no memory for it, or because *stop is
// not 0.
static inline bool eval_requests_answer(Requests* r, const Trainer* trainer, Model* model) {
    const Run* run = r->reader.run;
    const CacheSizes sizes = eval_cache_sizes(run, run->eval_tokens);
    memset(r->totals, 0, sizeof r->totals);
    r->parsed = 0;
    r->lines = r->answers = r->errors = 0;
    if (!engine_open(&r->engine, trainer, model, &run->config, &sizes, run->world)) {
        warn("step %lld: --eval-requests without answers: too little memory is left on the device for a "
             "sequence of %s",
             (long long)run->state.step, counted(sizes.capacity, "token").text);
        return false;
    }
    r->engine.on_token = request_on_token;
    r->engine.on_end = request_on_end;
    const bool done = requests_work(r);
    engine_close(&r->engine);
    return done;
}

// ----------------------------------------------------------------------------
// the log

static inline void log_requests_put(JsonWriter* w, const Requests* r) {
    json_begin_object(w, "requests");
    for (int type = 0; type < NUM_REQUEST_TYPES; type++) {
        const RequestTotals* t = &r->totals[type];
        const double n = (double)t->requests;
        if (t->requests == 0) continue;
        json_begin_object(w, request_types[type]);
        json_put_int(w, "requests", t->requests);
        json_put_int(w, "tokens", t->tokens);
        if (type != REQUEST_GENERATE) json_put_double(w, "logprob", t->logprob / n);
        if (type != REQUEST_GENERATE)
            json_put_double(w, "logprob_per_token", t->tokens ? t->logprob / (double)t->tokens : 0);
        if (type == REQUEST_SCORE) json_put_double(w, "greedy", (double)t->greedy / n);
        if (t->expected > 0) json_put_int(w, "expected", t->expected);
        if (t->expected > 0) json_put_double(w, "match", (double)t->matched / (double)t->expected);
        json_end(w);
    }
    json_put_int(w, "errors", r->errors);
    json_end(w);
}

static inline void log_requests_print(const Requests* r) {
    const RequestTotals *score = &r->totals[REQUEST_SCORE], *rolling = &r->totals[REQUEST_ROLLING],
                        *generate = &r->totals[REQUEST_GENERATE];
    if (score->requests > 0)
        printf("  score %.4f, %.1f%% greedy", score->logprob / (double)score->requests,
               100 * (double)score->greedy / (double)score->requests);
    if (rolling->tokens > 0) printf("  rolling %.4f a token", rolling->logprob / (double)rolling->tokens);
    if (generate->requests > 0 && generate->expected == 0)
        printf("  generate %s", counted(generate->tokens, "token").text);
    if (generate->expected > 0)
        printf("  generate %.1f%% match", 100 * (double)generate->matched / (double)generate->expected);
    if (r->errors > 0) printf("  %s: logits that are not finite", counted(r->errors, "error").text);
}

// Logs an evaluation that has taken v->seconds: v of no tokens and r NULL are left out.
static inline void log_evaluation(Logger* l, int64_t step, const LogValidation* v, const Positions* p,
                                  const Requests* r) {
    double loss;
    const bool has_loss = log_validation_total(v, &loss) > 0;
    JsonWriter* w = logger_begin_line(l, "evaluation", step);
    if (has_loss) {
        log_validation_put(w, v);
        evaluation_put_perplexity(w, "perplexity_by_length", p);
    } else {
        json_put_double(w, "ms", 1000 * v->seconds);
    }
    if (r) log_requests_put(w, r);
    logger_end_line(l);

    char text[2][32];
    logger_print_step(l, step);
    printf("evaluation");
    if (has_loss)
        printf(" loss %s  perplexity %s", log_number(text[0], loss), log_number(text[1], exp(loss)));
    if (has_loss && v->masked) printf("  accuracy %.2f%%", 100 * v->accuracy);
    if (r) log_requests_print(r);
    printf("\n");
    fflush(stdout);
}
