/*
--requests: answers JSON lines with a model. One object a line in, one out, in the order in which answers are
ready.

    {"id": .., "type": "score", "context": .., "continuation": ..} -> {"id", "logprob", "greedy", "tokens"}
    {"id": .., "type": "rolling", "text": ..}                      -> {"id", "logprob", "tokens"}
    {"id": .., "type": "generate", "prompt": ..}                   -> {"id", "text", "tokens": [..], "finish"}
        also "max_tokens", "until": [..], "temperature", "top_k", "top_p", "min_p", "seed", and "expected":
        then the answer has "match", whether its text contains what is expected

Texts may be lists of token ids. End of text stands before every context, text and prompt. A score is the sum
of log-probabilities of tok(context + continuation) beyond tok(context), where white space that ends the
context belongs to the continuation. A rolling text is cut into windows as lm-evaluation-harness cuts it: of
--seq-len tokens, or those of training, each token scored once, with as much context as the window has. What a
generation does not set is as on the command line. With document_reset each document of a request is a
sequence of its own, and a generation continues the last one. A line that is no request is answered by an
"error". For users: dev/INFERENCE.md.

Lines are read in windows of up to ENGINE_MEMBERS sequences, whose common beginnings the engine reads once;
the next window is read while the engine works on this one. A request from a pipe does not wait for others. A
program that writes to a pipe must read the answers at the same time.

During training (llmc/eval/in_training.h) requests are held in memory, and their answers are summed into
totals.

Called by main.h.
*/
#pragma once

#include <poll.h>
#include "generate.h"

static const int64_t REQUESTS_LEAST_CAPACITY = 65536; // tokens of a sequence, where there is memory
enum { REQUESTS_READ_BYTES = 1 << 16 };

typedef enum { REQUEST_SCORE, REQUEST_ROLLING, REQUEST_GENERATE, NUM_REQUEST_TYPES } RequestType;
static const char* const request_types[] = {"score", "rolling", "generate"};

// Sums over the answers to requests of one type, errors left out
typedef struct {
    int64_t requests, tokens;  // tokens: scored, or generated
    int64_t greedy;            // of scores: each token was the likeliest
    int64_t expected, matched; // of generations: those with "expected", and those whose text contains it
    double logprob;
} RequestTotals;

typedef struct {
    const Run* run;
    Engine engine;
    Tokenizer tokenizer; // vocab_size 0: none
    const char* name;    // of the file
    int file;
    ByteBuffer input; // read, from `parsed` on not yet looked at
    size_t parsed;
    bool ended;                             // the file
    Sequence* queue[ENGINE_MEMBERS];        // of requests that are not in the engine yet
    int64_t queued, lines, answers, errors; // so far
    bool adds_up;                           // answers are added to `totals` and not written
    RequestTotals totals[NUM_REQUEST_TYPES];
    const volatile sig_atomic_t* stop; // not 0: the rest stays without answers; NULL: never
} Requests;

typedef struct {
    Requests* requests;
    RequestType type;
    char* id;             // its JSON, without control characters; NULL: none
    Sequence* sequences;  // [count], several windows of a rolling text
    int64_t count, ended; // of the sequences
    int64_t tokens;       // scored
    GeneratedText text;
    Stops stops;
    Stop expected; // in what is generated
    bool expects;
} Request;

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

static inline void request_free(Request* q) {
    for (int64_t i = 0; i < q->count; i++) free(q->sequences[i].tokens.data);
    free(q->sequences);
    free(q->id);
    text_free(&q->text);
    stops_free(&q->stops);
    free(q->expected.text), free(q->expected.ids.data);
    free(q);
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
    if (q->requests->tokenizer.vocab_size > 0)
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

static inline bool request_on_token(Sequence* sequence, int64_t token) {
    (void)token; // the last one of the sequence
    return text_add_token(&((Request*)sequence->owner)->text, &sequence->tokens, sequence->generated);
}

static inline void request_on_end(Sequence* sequence) {
    Request* q = (Request*)sequence->owner;
    if (++q->ended == q->count) request_answer(q);
}

// ----------------------------------------------------------------------------
// a line: its JSON

// Appends the ids of a JSON list.
static inline bool request_ids(const Requests* r, const Json* j, int node, const char* name, TokenBuffer* ids,
                               Error* err) {
    const int64_t V = r->run->config.vocab_size;
    for (int item = json_first(j, node); item >= 0; item = json_next(j, item)) {
        int64_t id;
        if (!json_int64(j, item, &id))
            return fail(err, "\"%s\": a list of token ids has another value", name);
        if (id < 0 || id >= V)
            return fail(err, "\"%s\": token %lld, of a vocabulary of %lld", name, (long long)id,
                        (long long)V);
        token_buffer_add(ids, (uint32_t)id);
    }
    return true;
}

static inline bool request_need_tokenizer(const Requests* r, const char* name, Error* err) {
    if (r->tokenizer.vocab_size > 0) return true;
    return fail(err,
                "\"%s\": this program reads text of bytes or GPT-2's vocabulary alone (tokenizer.json in "
                "--init, or --vocab FILE): give token ids, as scripts/prompt.py does",
                name);
}

// Appends the tokens of a member, text or ids. A missing member that is not `required` has none.
static inline bool request_tokens(const Requests* r, const Json* j, const char* name, bool required,
                                  TokenBuffer* ids, Error* err) {
    int node = json_get(j, 0, name);
    const char* text = json_string(j, node);
    if (node < 0 && !required) return true;
    if (node < 0) return fail(err, "\"%s\" is missing", name);
    if (json_is(j, node, JSON_ARRAY)) return request_ids(r, j, node, name, ids, err);
    if (!text) return fail(err, "\"%s\": neither text nor a list of token ids", name);
    if (!request_need_tokenizer(r, name, err)) return false;
    text_encode(&r->tokenizer, r->run->options.json_escape, text, strlen(text), ids);
    return true;
}

// Number of bytes of the text without the white space at its end, which is Python's str.isspace as far as the
// tokenizer knows white space
static inline size_t text_trimmed(const Tokenizer* t, const char* text) {
    size_t end = strlen(text);
    while (end > 0) {
        size_t from = end - 1, length;
        while (from > 0 && end - from < 4 && ((uint8_t)text[from] & 0xc0) == 0x80) from--;
        uint32_t c = utf8_decode((const uint8_t*)text + from, end - from, &length);
        bool ascii = c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
        if (!ascii &&
            (c < 128 || c == UTF8_INVALID || !t->classes || unicode_class(t->classes, c) != UNICODE_SPACE))
            break;
        end = from;
    }
    return end;
}

// Appends the tokens of context and continuation; *scored is the number of the context's.
static inline bool request_pair(const Requests* r, const Json* j, TokenBuffer* ids, int64_t* scored,
                                Error* err) {
    const char *context = json_string(j, json_get(j, 0, "context")),
               *continuation = json_string(j, json_get(j, 0, "continuation"));
    if (!context || !continuation) { // ids, or a mistake
        if (!request_tokens(r, j, "context", false, ids, err)) return false;
        *scored = ids->count;
        return request_tokens(r, j, "continuation", true, ids, err);
    }
    if (!request_need_tokenizer(r, "context", err)) return false;
    ByteBuffer whole = {NULL, 0, 0};
    TokenBuffer alone = {NULL, 0, 0};
    const bool escape = r->run->options.json_escape;
    byte_buffer_append(&whole, context, strlen(context));
    byte_buffer_append(&whole, continuation, strlen(continuation));
    text_encode(&r->tokenizer, escape, context, text_trimmed(&r->tokenizer, context), &alone);
    text_encode(&r->tokenizer, escape, whole.data, whole.count, ids);
    *scored = ids->count < 1 + alone.count ? ids->count : 1 + alone.count; // behind end of text
    free(whole.data);
    free(alone.data);
    return true;
}

// Fills *stop with a text or a list of ids.
static inline bool request_stop(const Request* q, const Json* j, int node, const char* name, Stop* stop,
                                Error* err) {
    const char* text = json_string(j, node);
    if (!text) return request_ids(q->requests, j, node, name, &stop->ids, err);
    if (!request_need_tokenizer(q->requests, name, err)) return false;
    stop->text = xstrdup(text);
    stop->bytes = strlen(text);
    return true;
}

static inline bool request_until(Request* q, const Json* j, Error* err) {
    int until = json_get(j, 0, "until"), list = json_is(j, until, JSON_ARRAY);
    if (until < 0 || json_is_null(j, until)) return true;
    for (int item = list ? json_first(j, until) : until; item >= 0; item = list ? json_next(j, item) : -1) {
        if (!json_string(j, item) && !(list && json_is(j, item, JSON_ARRAY)))
            return fail(err, "\"until\": neither a text nor a list of texts");
        if (!request_stop(q, j, item, "until", stops_add(&q->stops), err)) return false;
    }
    return true;
}

static inline bool request_expected(Request* q, const Json* j, Error* err) {
    const int expected = json_get(j, 0, "expected");
    q->expects = expected >= 0 && !json_is_null(j, expected);
    if (q->expects && !json_string(j, expected) && !json_is(j, expected, JSON_ARRAY))
        return fail(err, "\"expected\": neither text nor a list of token ids");
    return !q->expects || request_stop(q, j, expected, "expected", &q->expected, err);
}

// Sets *value to a member between least and most; a missing or null member leaves it unchanged.
static inline bool request_number(const Json* j, const char* name, double least, double most, bool whole,
                                  double* value, Error* err) {
    int node = json_get(j, 0, name);
    if (node < 0 || json_is_null(j, node)) return true;
    if (!json_double(j, node, value) || !(*value >= least && *value <= most) ||
        (whole && floor(*value) != *value))
        return fail(err, "\"%s\": not a%s number from %.15g to %.15g", name, whole ? " whole" : "", least,
                    most);
    return true;
}

static inline bool request_sampling(const Request* q, const Json* j, Sequence* s, Error* err) {
    const Options* o = &q->requests->run->options;
    double tokens = (double)sample_tokens(q->requests->run), temperature = o->temperature,
           top_k = (double)o->top_k, top_p = o->top_p, min_p = o->min_p;
    int64_t seed = o->seed;
    const int given = json_get(j, 0, "seed");
    bool ok = request_number(j, "max_tokens", 1, 1 << 24, true, &tokens, err) &&
              request_number(j, "temperature", 0, 100, false, &temperature, err) &&
              request_number(j, "top_k", 0, 1 << 24, true, &top_k, err) &&
              request_number(j, "top_p", 0, 1, false, &top_p, err) &&
              request_number(j, "min_p", 0, 1, false, &min_p, err);
    if (ok && given >= 0 && !json_is_null(j, given) && (!json_int64(j, given, &seed) || seed < 0))
        ok = fail(err, "\"seed\": not a whole number from 0 to 2^63 - 1");
    SamplerSettings sampling = {temperature, (int64_t)top_k, top_p, min_p, (uint64_t)seed};
    s->sampling = sampling;
    s->most_tokens = (int64_t)tokens;
    return ok;
}

// ----------------------------------------------------------------------------
// a line: its sequences

// Adds a sequence like s of tokens [begin, end) of ids, scored from `scored` on.
static inline void request_add(Request* q, const Sequence* s, const TokenBuffer* ids, int64_t begin,
                               int64_t end, int64_t scored) {
    q->sequences = (Sequence*)xrealloc(q->sequences, (size_t)(q->count + 1) * sizeof *s);
    Sequence* added = &q->sequences[q->count++];
    *added = *s;
    added->scored = scored - begin;
    token_buffer_append(&added->tokens, ids->data + begin, end - begin);
}

// Likewise, one sequence for each document in them: from its end of text to the next one's, its last target.
// Documents before the first scored token are left out.
static inline void request_add_documents(Request* q, const Sequence* s, const TokenBuffer* ids, int64_t begin,
                                         int64_t end, int64_t scored) {
    const Config* c = &q->requests->run->config;
    for (int64_t first = begin, last; first + 1 < end; first = last) {
        for (last = first + 1; last + 1 < end;)
            if (c->document_reset && ids->data[last] == config_end_of_text(c))
                break;
            else
                last++;
        if (last >= scored) request_add(q, s, ids, first, last + 1, scored > first ? scored : first + 1);
    }
}

// Adds the windows of tokens ids[1 ..] behind end of text, ids[0], each of up to T rows. The last window
// begins early enough to have T rows too, and scores only new tokens.
static inline void request_windows(Request* q, const Sequence* s, const TokenBuffer* ids, int64_t T) {
    q->tokens = ids->count - 1;
    for (int64_t first = 1; first < ids->count; first += T) {
        int64_t end = first + T < ids->count ? first + T : ids->count; // scored
        int64_t begin = end - T - 1 > 0 ? end - T - 1 : 0;
        request_add_documents(q, s, ids, begin, end, first);
    }
}

// Builds the sequences of a request from its JSON.
static inline bool request_sequences(Request* q, const Json* j, TokenBuffer* ids, Error* err) {
    const int64_t longest = q->requests->engine.sizes.capacity, T = q->requests->run->options.seq_len;
    int64_t scored = 1, rows;
    Sequence s;
    memset(&s, 0, sizeof s);
    token_buffer_add(ids, (uint32_t)config_end_of_text(&q->requests->run->config));
    if (q->type == REQUEST_SCORE && !request_pair(q->requests, j, ids, &scored, err)) return false;
    if (q->type == REQUEST_ROLLING && !request_tokens(q->requests, j, "text", true, ids, err)) return false;
    if (q->type == REQUEST_GENERATE &&
        !(request_tokens(q->requests, j, "prompt", true, ids, err) && request_sampling(q, j, &s, err) &&
          request_until(q, j, err) && request_expected(q, j, err)))
        return false;
    q->tokens = ids->count - scored;
    if (q->type == REQUEST_ROLLING) request_windows(q, &s, ids, T);
    if (q->type == REQUEST_SCORE && q->tokens > 0) request_add_documents(q, &s, ids, 0, ids->count, scored);
    if (q->type == REQUEST_GENERATE) {
        const int64_t begin = last_document(&q->requests->run->config, ids);
        request_add(q, &s, ids, begin, ids->count, begin + 1);
    }
    for (int64_t i = 0; i < q->count; i++) {
        rows = q->sequences[i].tokens.count + (s.most_tokens ? s.most_tokens : -1);
        if (rows > longest)
            return fail(err, "%s, more than the %lld that a sequence can have here",
                        counted(rows, "token").text, (long long)longest);
    }
    return true;
}

// Finds the type of a request, and refuses members that it does not have.
static inline bool request_type(Request* q, const Json* j, Error* err) {
    static const char* const members[][12] = {{"id", "type", "context", "continuation"},
                                              {"id", "type", "text"},
                                              {"id", "type", "prompt", "max_tokens", "until", "temperature",
                                               "top_k", "top_p", "min_p", "seed", "expected"}};
    const char* type = json_string(j, json_get(j, 0, "type"));
    int found = 0;
    if (!json_is(j, 0, JSON_OBJECT)) return fail(err, "not a JSON object");
    while (found < NUM_REQUEST_TYPES && !(type && strcmp(type, request_types[found]) == 0)) found++;
    if (found == NUM_REQUEST_TYPES) return fail(err, "\"type\": not one of score, rolling, generate");
    for (int member = json_first(j, 0); member >= 0; member = json_next(j, member)) {
        const char *key = json_key(j, member), *const *known = members[found];
        while (*known && strcmp(*known, key) != 0) known++;
        if (!*known) return fail(err, "\"%s\": not a member of a request of type %s", key, type);
    }
    q->type = (RequestType)found;
    return true;
}

// Adds the queued sequences to the engine.
static inline void requests_flush(Requests* r) {
    engine_add(&r->engine, r->queue, r->queued);
    r->queued = 0;
}

// Builds a request, with its id if it has one, from a line's JSON. Returns false if the line is no request.
static inline bool request_parse(Request* q, const Json* j, const char* line, Error* err) {
    TokenBuffer ids = {NULL, 0, 0};
    int id = json_get(j, 0, "id");
    if (id >= 0) {
        size_t begin = j->nodes[id].begin, length = j->nodes[id].end - begin;
        q->id = (char*)memcpy(xcalloc(length + 1, 1), line + begin, length);
        for (char* c = q->id; *c; c++) // a carriage return between values would end the answer's line
            if ((unsigned char)*c < ' ') *c = ' ';
    }
    q->text.tokenizer = &q->requests->tokenizer, q->text.stops = &q->stops;
    q->text.json_escape = q->requests->run->options.json_escape;
    byte_buffer_append(&q->text.text, "", 0);
    bool ok = request_type(q, j, err) && request_sequences(q, j, &ids, err);
    free(ids.data);
    return ok;
}

// Queues the sequences of a line, or answers it with an error.
static inline void requests_line(Requests* r, const char* line, size_t bytes) {
    Error err;
    Json j;
    char source[64];
    r->lines++;
    if (text_is_blank(line, bytes)) return;
    snprintf(source, sizeof source, "line %lld", (long long)r->lines);
    if (!json_parse(&j, source, line, bytes, &err)) {
        answer_error(r, NULL, err.msg);
        return;
    }
    Request* q = (Request*)xcalloc(1, sizeof *q);
    q->requests = r;
    bool ok = request_parse(q, &j, line, &err);
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

// ----------------------------------------------------------------------------
// the file

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
    const Config* config = &r->run->config;
    const int64_t T = r->run->options.seq_len;
    CacheSizes sizes = engine_sizes(trainer, trainer->suggested_tokens / 64, T);
    sizes.drops = true;
    if (sizes.capacity < REQUESTS_LEAST_CAPACITY) sizes.capacity = REQUESTS_LEAST_CAPACITY;
    for (;;) {
        sizes.pages = sizes.slots * engine_heads(config) * cache_table_width(&sizes);
        if (engine_open(&r->engine, trainer, model, config, &sizes, r->run->world)) break;
        if (sizes.capacity > T)
            sizes.capacity = sizes.capacity / 2 < T ? T : sizes.capacity / 2;
        else if (sizes.slots > 1)
            sizes.slots /= 2;
        else
            die("too little memory is left on the device for a sequence of %s, a cache of %.2f GiB; lower "
                "--seq-len",
                counted(T, "token").text, (double)(sizes.pages * trainer->page_bytes(config)) / (1 << 30));
    }
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
    r->run = run;
    r->name = run->options.requests;
    const bool file = strcmp(r->name, "-") != 0;
    r->file = file ? open(r->name, O_RDONLY) : STDIN_FILENO;
    if (r->file < 0) die("--requests %s: cannot open: %s", r->name, strerror(errno));
    r->tokenizer = sample_tokenizer(run, false);
    requests_open(r, trainer, model);
    requests_work(r);
    requests_print_end(r, trainer->page_bytes(&run->config), seconds_now() - start);
    engine_close(&r->engine);
    tokenizer_free(&r->tokenizer);
    free(r->input.data);
    if (file) close(r->file);
    free(r);
}
