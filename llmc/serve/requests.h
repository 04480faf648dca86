/*
--requests: answers JSON lines with a model. One object a line in, one out, in the order in which answers are
ready. What a request may say and what its answer has: request.h. A line that is no request is answered by an
"error".

Lines are read in windows of up to ENGINE_MEMBERS sequences, whose common beginnings the engine reads once;
the next window is read while the engine works on this one. A request from a pipe does not wait for others. A
program that writes to a pipe must read the answers at the same time.

During training requests are held in memory, and their answers are summed into totals.

Called by main.h and llmc/eval/in_training.h.
*/
#pragma once

#include <poll.h>
#include "request.h"

static const int64_t REQUESTS_LEAST_CAPACITY = 65536; // tokens of a sequence, where there is memory
enum { REQUESTS_READ_BYTES = 1 << 16 };

// Sums over the answers to requests of one type, errors left out
typedef struct {
    int64_t requests, tokens;  // tokens: scored, or generated
    int64_t greedy;            // of scores: each token was the likeliest
    int64_t expected, matched; // of generations: those with "expected", and those whose text contains it
    double logprob;
} RequestTotals;

struct Requests {
    RequestReader reader;
    Engine engine;
    const char* name; // of the file
    int file;
    ByteBuffer input; // read, from `parsed` on not yet looked at
    size_t parsed;
    bool ended;                             // the file
    Sequence* queue[ENGINE_MEMBERS];        // of requests that are not in the engine yet
    int64_t queued, lines, answers, errors; // so far
    bool adds_up;                           // answers are added to `totals` and not written
    RequestTotals totals[NUM_REQUEST_TYPES];
    const volatile sig_atomic_t* stop; // not 0: the rest stays without answers; NULL: never
};

// ----------------------------------------------------------------------------
// answers

// Begins the answer to a request. id: the JSON of any value; NULL: none.
static inline JsonWriter answer_begin(const char* id) {
    JsonWriter w = json_writer(0);
    json_begin_object(&w, NULL);
    if (id) json_put_word(&w, "id", id);
    return w;
}

static inline void answer_end(Requests* r, JsonWriter* w, bool error) {
    json_end(w);
    if (fprintf(stdout, "%s\n", w->text) < 0 || fflush(stdout) != 0)
        die("cannot write answers to standard output: %s", strerror(errno));
    json_writer_free(w);
    r->answers++;
    r->errors += error;
}

static inline void answer_error(Requests* r, const char* id, const char* message) {
    if (r->adds_up) {
        r->errors++;
        return;
    }
    JsonWriter w = answer_begin(id);
    json_put_string(&w, "error", message);
    answer_end(r, &w, true);
}

// Whether the generated text, or its tokens, contain what is expected
static inline bool request_matches(const Request* q) {
    const TokenBuffer *tokens = &q->sequences[0].tokens, *ids = &q->expected.ids;
    if (q->expected.text)
        return memmem(q->text.text.data, q->text.text.count, q->expected.text, q->expected.bytes) != NULL;
    if (ids->count == 0) return true;
    for (int64_t i = tokens->count - q->sequences[0].generated; i + ids->count <= tokens->count; i++)
        if (memcmp(tokens->data + i, ids->data, (size_t)ids->count * sizeof *ids->data) == 0) return true;
    return false;
}

static inline void answer_generation(const Request* q, JsonWriter* w) {
    const Sequence* s = q->sequences;
    if (q->reader->tokenizer.vocab_size > 0)
        json_put_text(w, "text", q->text.text.data, q->text.text.count);
    else
        json_put_null(w, "text");
    json_begin_array(w, "tokens");
    for (int64_t i = s->tokens.count - s->generated; i < s->tokens.count; i++)
        json_put_int(w, NULL, s->tokens.data[i]);
    json_end(w);
    json_put_string(w, "finish", s->stopped || q->text.stopped ? "stop" : "length");
    if (q->expects) json_put_bool(w, "match", request_matches(q));
}

static inline void request_add_up(const Request* q, double logprob, bool greedy) {
    RequestTotals* t = &q->requests->totals[q->type];
    t->requests++;
    t->tokens += q->type == REQUEST_GENERATE ? q->sequences[0].generated : q->tokens;
    t->logprob += logprob;
    t->greedy += greedy;
    t->expected += q->expects;
    t->matched += q->expects && request_matches(q);
}

// Answers a request whose sequences have all ended, and frees it.
static inline void request_answer(Request* q) {
    double logprob = 0;
    bool greedy = true, failed = false;
    for (int64_t i = 0; i < q->count; i++) {
        logprob += q->sequences[i].logprob;
        greedy = greedy && q->sequences[i].greedy;
        failed = failed || q->sequences[i].failed;
    }
    if (q->type == REQUEST_GENERATE) text_end(&q->text);
    if (failed || !isfinite(logprob)) {
        answer_error(q->requests, q->id, "the model's logits are not finite: its weights are damaged");
    } else if (q->requests->adds_up) {
        request_add_up(q, logprob, greedy);
    } else {
        JsonWriter w = answer_begin(q->id);
        if (q->type == REQUEST_GENERATE) {
            answer_generation(q, &w);
        } else {
            json_put_double(&w, "logprob", logprob);
            if (q->type == REQUEST_SCORE) json_put_bool(&w, "greedy", greedy);
            json_put_int(&w, "tokens", q->tokens);
        }
        answer_end(q->requests, &w, false);
    }
    request_free(q);
}

static inline bool request_on_token(Sequence* sequence) {
    return text_add_token(&((Request*)sequence->owner)->text, &sequence->tokens, sequence->generated);
}

static inline void request_on_end(Sequence* sequence) {
    Request* q = (Request*)sequence->owner;
    if (++q->ended == q->count) request_answer(q);
}

// ----------------------------------------------------------------------------
// the file

// Adds the queued sequences to the engine.
static inline void requests_flush(Requests* r) {
    engine_add(&r->engine, r->queue, r->queued);
    r->queued = 0;
}

// Queues the sequences of a line, or answers it with an error.
static inline void requests_line(Requests* r, const char* line, size_t bytes) {
    Error err, without_id;
    Json j;
    char source[64];
    r->lines++;
    if (text_is_blank(line, bytes)) return;
    snprintf(source, sizeof source, "line %lld", (long long)r->lines);
    Request* q = (Request*)xcalloc(1, sizeof *q);
    q->reader = &r->reader, q->requests = r;
    bool ok = json_parse(&j, source, line, bytes, &err);
    if (ok && !request_parse(q, &j, line, &err)) {
        ok = false;
        fail(&without_id, "%s: %s", source, err.msg);
        if (!q->id) err = without_id;
    }
    json_free(&j);
    if (!ok) {
        answer_error(r, q->id, err.msg);
        request_free(q);
        return;
    }
    if (q->count == 0) {
        request_answer(q); // nothing to score
        return;
    }
    for (int64_t i = 0; i < q->count; i++) {
        Sequence* s = &q->sequences[i];
        s->owner = q;
        s->greedy = true;
        if (r->queued == ENGINE_MEMBERS) requests_flush(r);
        r->queue[r->queued++] = s;
    }
}

// Reads more of the file; if `waits`, waits for a pipe. Returns false if nothing came.
static inline bool requests_read(Requests* r, bool waits) {
    struct pollfd ready = {r->file, POLLIN, 0};
    ssize_t got;
    if (r->ended || (!waits && poll(&ready, 1, 0) == 0)) return false;
    byte_buffer_reserve(&r->input, REQUESTS_READ_BYTES + 1);
    memmove(r->input.data, r->input.data + r->parsed, r->input.count - r->parsed);
    r->input.count -= r->parsed, r->parsed = 0;
    do got = read(r->file, r->input.data + r->input.count, REQUESTS_READ_BYTES);
    while (got < 0 && errno == EINTR);
    if (got < 0) die("--requests %s: cannot read: %s", r->name, strerror(errno));
    r->ended = got == 0;
    r->input.count += (size_t)got;
    r->input.data[r->input.count] = '\0';
    return true;
}

// Fills the window with the lines that are there; if `waits`, waits for the first one.
static inline void requests_fill(Requests* r, bool waits) {
    size_t searched = r->parsed;
    while (r->queued < ENGINE_MEMBERS) {
        const char* text = r->input.data;
        const char* end = text ? (const char*)memchr(text + searched, '\n', r->input.count - searched) : NULL;
        if (!end && r->ended && r->parsed < r->input.count)
            end = text + r->input.count; // without a line break
        if (end) {
            size_t at = r->parsed, bytes = (size_t)(end - text) - at;
            r->parsed = searched = at + bytes + (at + bytes < r->input.count);
            requests_line(r, text + at, bytes);
            continue;
        }
        searched = r->input.count - r->parsed; // requests_read moves it to the beginning
        if (!requests_read(r, waits && r->queued == 0)) break;
    }
    requests_flush(r);
}

// Opens the engine for sequences of at least T tokens, more if memory suffices, and with fewer slots if it
// does not.
static inline void requests_open(Requests* r, const Trainer* trainer, Model* model) {
    const Config* config = &r->reader.run->config;
    const int64_t T = r->reader.run->options.seq_len;
    CacheSizes sizes = engine_sizes(trainer, trainer->suggested_tokens / 64, T);
    sizes.drops = true;
    if (sizes.capacity < REQUESTS_LEAST_CAPACITY) sizes.capacity = REQUESTS_LEAST_CAPACITY;
    for (;;) {
        sizes.pages = sizes.slots * engine_heads(config) * cache_table_width(&sizes);
        if (engine_open(&r->engine, trainer, model, config, &sizes, r->reader.run->world)) break;
        if (sizes.capacity > T)
            sizes.capacity = sizes.capacity / 2 < T ? T : sizes.capacity / 2;
        else if (sizes.slots > 1)
            sizes.slots /= 2;
        else
            die("too little memory is left on the device for a sequence of %s, a cache of %.2f GiB; lower "
                "--seq-len",
                counted(T, "token").text, (double)(sizes.pages * trainer->page_bytes(config)) / (1 << 30));
    }
    r->reader.capacity = sizes.capacity;
    r->engine.on_token = request_on_token, r->engine.on_end = request_on_end;
}

// Answers requests until the file ends; returns false if it stops earlier, on a signal.
static inline bool requests_work(Requests* r) {
    for (bool works = false;;) {
        if (r->stop && *r->stop) break;
        if (engine_waiting(&r->engine) < r->engine.sizes.slots) requests_fill(r, !works);
        works = engine_step(&r->engine);
        if (!works && r->ended && r->parsed == r->input.count) return true;
    }
    engine_abandon(&r->engine);
    return false;
}

// Prints the totals on stderr, so that standard output has only answers.
static inline void requests_print_end(const Requests* r, int64_t page_bytes, double seconds) {
    const Engine* g = &r->engine;
    const double mib = (double)page_bytes / 1048576;
    fprintf(stderr,
            "%s, %s, in %.1f s: %s read in %s (%.0f tokens/s); cache: at most %.1f MiB "
            "held, %.1f MiB forgotten, put back %s\n",
            counted(r->answers, "answer").text, counted(r->errors, "error").text, seconds,
            counted(g->tokens_read, "token").text, counted(g->passes, "pass").text,
            (double)g->tokens_read / seconds, mib * (double)g->pages.most_held,
            mib * (double)g->pages.forgotten, counted(g->put_back, "time").text);
}

// Answers the requests of a run's --requests. Ends the program with a message if the file cannot be read or
// answers cannot be written.
static inline void answer_requests(const Run* run, const Trainer* trainer, Model* model) {
    Requests* r = (Requests*)xcalloc(1, sizeof *r);
    const double start = seconds_now();
    r->reader.run = run;
    r->name = run->options.requests;
    const bool file = strcmp(r->name, "-") != 0;
    r->file = file ? open(r->name, O_RDONLY) : STDIN_FILENO;
    if (r->file < 0) die("--requests %s: cannot open: %s", r->name, strerror(errno));
    r->reader.tokenizer = sample_tokenizer(run, false);
    requests_open(r, trainer, model);
    requests_work(r);
    requests_print_end(r, trainer->page_bytes(&run->config), seconds_now() - start);
    engine_close(&r->engine);
    tokenizer_free(&r->reader.tokenizer);
    free(r->input.data);
    if (file) close(r->file);
    free(r);
}
