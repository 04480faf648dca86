/*
llmc/serve/request.h and requests.h: the lines of --requests, for a model of bytes and for one without a
tokenizer. Every line that is not empty gets one answer, which is one line of JSON; what is handed to the
engine keeps its rules. The engine's place is taken by tokens that follow from the input.
*/
#include "fuzz.h"
#include "../../llmc/serve/requests.h"

enum { T = 1024, CAPACITY = 2048 };

static char* answers; // standard output
static size_t answers_bytes;

// Gives a sequence of the engine's its tokens, and ends it.
static void finish_sequence(Requests* r, Sequence* s) {
    const int64_t V = r->reader.run->config.vocab_size;
    REQUIRE(sequence_rows(s) >= 1, "%lld rows", (long long)sequence_rows(s));
    REQUIRE(s->most_tokens > 0 || (s->scored >= 1 && s->scored < s->tokens.count), "scored from %lld of %lld",
            (long long)s->scored, (long long)s->tokens.count);
    REQUIRE(s->tokens.count + (s->most_tokens > 0 ? s->most_tokens : -1) <= CAPACITY,
            "%lld tokens and %lld more", (long long)s->tokens.count, (long long)s->most_tokens);
    for (int64_t i = 0; i < s->tokens.count; i++)
        REQUIRE(s->tokens.data[i] < V, "token %u of %lld", s->tokens.data[i], (long long)V);
    for (int64_t i = 0; i < s->most_tokens && i < 40; i++) {
        uint32_t token = s->tokens.data[(i * 7 + 1) % s->tokens.count];
        if (token == r->engine.end_of_text) break;
        token_buffer_add(&s->tokens, token);
        s->generated++;
        if (!r->engine.on_token(s)) break;
    }
    r->engine.on_end(s);
}

static void finish_nodes(Requests* r) {
    while (r->engine.waiting.first) {
        EngineNode* node = r->engine.waiting.first;
        engine_remove(&r->engine.waiting, node);
        for (int64_t i = 0; i < node->count; i++) finish_sequence(r, node->members[i]);
        engine_free_node(node);
    }
}

// Each answer is a line, an object, and an error names what is wrong.
static void require_answers(const Requests* r) {
    Error err;
    int64_t count = 0;
    fflush(stdout);
    for (char *line = answers, *end; line < answers + answers_bytes; line = end + 1, count++) {
        Json j;
        end = (char*)memchr(line, '\n', (size_t)(answers + answers_bytes - line));
        REQUIRE(end, "an answer has no line break");
        if (!json_parse(&j, "answer", line, (size_t)(end - line), &err)) {
            // a model of bytes may write a zero byte, which json.h does not read
            REQUIRE(strstr(err.msg, "\\u0000 in a string"), "%s: %.*s", err.msg, (int)(end - line), line);
            continue;
        }
        const char* error = json_string(&j, json_get(&j, 0, "error"));
        REQUIRE(json_is(&j, 0, JSON_OBJECT) && (!error || *error), "%.*s", (int)(end - line), line);
        json_free(&j);
    }
    REQUIRE(count == r->answers && r->answers <= r->lines && r->errors <= r->answers,
            "%lld lines, %lld answers of %lld", (long long)r->lines, (long long)count, (long long)r->answers);
}

// The first byte says with or without tokenizer, and escaped or not.
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    static Run run;
    Requests* r = (Requests*)xcalloc(1, sizeof *r);
    const int flags = bytes > 0 ? data[0] : 0;
    if (bytes == 0) return free(r), 0;
    run.config.vocab_size = flags & 1 ? 257 : 500;
    run.config.eos_token_id = 256;
    options_defaults(&run.options);
    run.options.seq_len = T, run.options.json_escape = flags & 2;
    stdout = open_memstream(&answers, &answers_bytes);
    r->reader.run = &run, r->name = "input";
    r->file = open(file_in_memory(0, data + 1, bytes - 1), O_RDONLY);
    r->reader.capacity = CAPACITY, r->engine.end_of_text = 256;
    r->engine.on_token = request_on_token, r->engine.on_end = request_on_end;
    if (flags & 1) tokenizer_bytes(&r->reader.tokenizer);
    while (!r->ended || r->parsed < r->input.count) {
        requests_fill(r, true);
        finish_nodes(r);
    }
    require_answers(r);
    fclose(stdout);
    close(r->file);
    tokenizer_free(&r->reader.tokenizer);
    free(r->input.data);
    free(answers);
    free(r);
    return 0;
}
