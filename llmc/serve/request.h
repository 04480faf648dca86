/*
A request: a line of --requests, whose JSON becomes sequences of tokens for the engine.

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
sequence of its own, and a generation continues the last one. For users: dev/INFERENCE.md.

Called by requests.h, and by eval/in_training.h.
*/
#pragma once

#include "generate.h"

typedef enum { REQUEST_SCORE, REQUEST_ROLLING, REQUEST_GENERATE, NUM_REQUEST_TYPES } RequestType;
static const char* const request_types[] = {"score", "rolling", "generate"};

// What requests are read with
typedef struct {
    const Run* run;
    Tokenizer tokenizer; // vocab_size 0: none
    int64_t capacity;    // most tokens of a sequence
} RequestReader;

typedef struct Requests Requests; // the stream that a request is of (requests.h)

typedef struct {
    const RequestReader* reader;
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

static inline void request_free(Request* q) {
    for (int64_t i = 0; i < q->count; i++) free(q->sequences[i].tokens.data);
    free(q->sequences);
    free(q->id);
    text_free(&q->text);
    stops_free(&q->stops);
    free(q->expected.text), free(q->expected.ids.data);
    free(q);
}

// ----------------------------------------------------------------------------
// its JSON

// Appends the ids of a JSON list.
static inline bool request_ids(const RequestReader* r, const Json* j, int node, const char* name,
                               TokenBuffer* ids, Error* err) {
    const int64_t V = r->run->config.vocab_size;
    for (int item = json_first(j, node); item >= 0; item = json_next(j, item)) {
        int64_t id = -1;
        if (!json_int64(j, item, &id))
            return fail(err, "\"%s\": a list of token ids has another value", name);
        if (id < 0 || id >= V)
            return fail(err, "\"%s\": token %lld, of a vocabulary of %lld", name, (long long)id,
                        (long long)V);
        token_buffer_add(ids, (uint32_t)id);
    }
    return true;
}

static inline bool request_need_tokenizer(const RequestReader* r, const char* name, Error* err) {
    if (r->tokenizer.vocab_size > 0) return true;
    return fail(err,
                "\"%s\": this program reads text of bytes or GPT-2's vocabulary alone (tokenizer.json in "
                "--init, or --vocab FILE): give token ids, as scripts/prompt.py does",
                name);
}

// Appends the tokens of a member, text or ids. A missing member that is not `required` has none.
static inline bool request_tokens(const RequestReader* r, const Json* j, const char* name, bool required,
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
static inline bool request_pair(const RequestReader* r, const Json* j, TokenBuffer* ids, int64_t* scored,
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
    if (!text) return request_ids(q->reader, j, node, name, &stop->ids, err);
    if (!request_need_tokenizer(q->reader, name, err)) return false;
    stop->text = xstrdup(text);
    stop->bytes = strlen(text);
    return true;
}

// A member that is there and not null, or -1.
static inline int request_given(const Json* j, const char* name) {
    const int node = json_get(j, 0, name);
    return json_is_null(j, node) ? -1 : node;
}

static inline bool request_until(Request* q, const Json* j, Error* err) {
    const int until = request_given(j, "until");
    const bool list = json_is(j, until, JSON_ARRAY);
    for (int item = list ? json_first(j, until) : until; item >= 0; item = list ? json_next(j, item) : -1) {
        if (!json_string(j, item) && !(list && json_is(j, item, JSON_ARRAY)))
            return fail(err, "\"until\": neither a text nor a list of texts");
        if (!request_stop(q, j, item, "until", stops_add(&q->stops), err)) return false;
    }
    return true;
}

static inline bool request_expected(Request* q, const Json* j, Error* err) {
    const int expected = request_given(j, "expected");
    q->expects = expected >= 0;
    if (q->expects && !json_string(j, expected) && !json_is(j, expected, JSON_ARRAY))
        return fail(err, "\"expected\": neither text nor a list of token ids");
    return !q->expects || request_stop(q, j, expected, "expected", &q->expected, err);
}

// Sets *value to a member between least and most; a missing or null member leaves it unchanged.
static inline bool request_number(const Json* j, const char* name, double least, double most, bool whole,
                                  double* value, Error* err) {
    const int node = request_given(j, name);
    if (node < 0) return true;
    if (!json_double(j, node, value) || !(*value >= least && *value <= most) ||
        (whole && floor(*value) != *value))
        return fail(err, "\"%s\": not a%s number from %.15g to %.15g", name, whole ? " whole" : "", least,
                    most);
    return true;
}

static inline bool request_sampling(const Request* q, const Json* j, Sequence* s, Error* err) {
    const Options* o = &q->reader->run->options;
    double tokens = (double)sample_tokens(q->reader->run), temperature = o->temperature,
           top_k = (double)o->top_k, top_p = o->top_p, min_p = o->min_p;
    int64_t seed = o->seed;
    const int given = request_given(j, "seed");
    bool ok = request_number(j, "max_tokens", 1, 1 << 24, true, &tokens, err) &&
              request_number(j, "temperature", 0, 100, false, &temperature, err) &&
              request_number(j, "top_k", 0, 1 << 24, true, &top_k, err) &&
              request_number(j, "top_p", 0, 1, false, &top_p, err) &&
              request_number(j, "min_p", 0, 1, false, &min_p, err);
    if (ok && given >= 0 && (!json_int64(j, given, &seed) || seed < 0))
        ok = fail(err, "\"seed\": not a whole number from 0 to 2^63 - 1");
    if (!ok) return false; // a number may be outside of int64_t
    const SamplerSettings sampling = {temperature, (int64_t)top_k, top_p, min_p, (uint64_t)seed};
    s->sampling = sampling;
    s->most_tokens = (int64_t)tokens;
    return true;
}

// ----------------------------------------------------------------------------
// its sequences

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
    const Config* c = &q->reader->run->config;
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
    for (int64_t first = 1; first < ids->count; first += T) {
        int64_t end = first + T < ids->count ? first + T : ids->count; // scored
        int64_t begin = end - T - 1 > 0 ? end - T - 1 : 0;
        request_add_documents(q, s, ids, begin, end, first);
    }
}

// Builds the sequences of a request from its JSON.
static inline bool request_sequences(Request* q, const Json* j, TokenBuffer* ids, Error* err) {
    const int64_t longest = q->reader->capacity, T = q->reader->run->options.seq_len;
    int64_t scored = 1, rows;
    Sequence s;
    memset(&s, 0, sizeof s);
    token_buffer_add(ids, (uint32_t)config_end_of_text(&q->reader->run->config));
    if (q->type == REQUEST_SCORE && !request_pair(q->reader, j, ids, &scored, err)) return false;
    if (q->type == REQUEST_ROLLING && !request_tokens(q->reader, j, "text", true, ids, err)) return false;
    if (q->type == REQUEST_GENERATE &&
        !(request_tokens(q->reader, j, "prompt", true, ids, err) && request_sampling(q, j, &s, err) &&
          request_until(q, j, err) && request_expected(q, j, err)))
        return false;
    q->tokens = ids->count - scored;
    if (q->type == REQUEST_ROLLING) request_windows(q, &s, ids, T);
    if (q->type == REQUEST_SCORE && q->tokens > 0) request_add_documents(q, &s, ids, 0, ids->count, scored);
    if (q->type == REQUEST_GENERATE) {
        const int64_t begin = last_document(&q->reader->run->config, ids);
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
    q->text.tokenizer = &q->reader->tokenizer, q->text.stops = &q->stops;
    q->text.json_escape = q->reader->run->options.json_escape;
    byte_buffer_append(&q->text.text, "", 0);
    bool ok = request_type(q, j, err) && request_sequences(q, j, &ids, err);
    free(ids.data);
    return ok;
}
