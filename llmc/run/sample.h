/*
Samples: text that a model generates from a prompt, one token at a time.

The model reads its end-of-text token and the prompt, then continues until it draws end of text or n tokens
are written. Token ids become text by the byte tokenizer, or GPT-2's with --vocab; without a tokenizer ids are
written as numbers. With --json-escape prompts are escaped and samples unescaped, since an escape may be split
between two tokens.

Called by train.h, for --generate and for samples while training.
*/
#ifndef LLMC_SAMPLE_H
#define LLMC_SAMPLE_H

#include "../tokens/tokenizer.h"
#include "sampler.h"
#include "trainer.h"

typedef struct {
    Tokenizer tokenizer; // vocab_size 0: none
    bool json_escaped;   // the model's text is JSON-escaped
    FILE* stream;        // receives the text while it is generated; may be NULL
    ByteBuffer text;     // written so far, zero-terminated
    ByteBuffer pending;  // json_escaped: beginning of an incomplete escape
} Sample;

// Starts a sample. A vocabulary that was not given is an error if `required`.
static inline Sample sample_new(const Run* run, FILE* stream, bool required) {
    Error err;
    Sample s;
    memset(&s, 0, sizeof s);
    s.stream = stream;
    s.json_escaped = run->options.json_escape;
    if (run_reads_bytes(run))
        tokenizer_bytes(&s.tokenizer);
    else if (run->options.vocab) {
        if (!tokenizer_gpt2(&s.tokenizer, run->options.vocab, &err)) die("%s", err.msg);
        if (s.tokenizer.vocab_size > run->config.vocab_size)
            die("--vocab %s: has more tokens than the model's vocabulary of %lld", run->options.vocab,
                (long long)run->config.vocab_size);
    } else if (required)
        die("--vocab FILE is missing: GPT-2's vocab.bpe, to read the prompt and write the text");
    *byte_buffer_reserve(&s.text, 1) = '\0';
    return s;
}

// Frees everything but the stream.
static inline void sample_free(Sample* s) {
    tokenizer_free(&s->tokenizer);
    free(s->text.data);
    free(s->pending.data);
}

// Appends bytes to the text and the stream; dies if the stream cannot be written to.
static inline void sample_append(Sample* s, const char* bytes, size_t n) {
    memcpy(byte_buffer_reserve(&s->text, n + 1), bytes, n);
    s->text.count += n;
    s->text.data[s->text.count] = '\0';
    if (!s->stream) return;
    if (fwrite(bytes, 1, n, s->stream) != n || fflush(s->stream) != 0)
        die("cannot write the sample: %s", strerror(errno));
}

// Appends the model's text, unescaped if it is JSON-escaped. `last`: an incomplete escape at the end is
// written as it is.
static inline void sample_put_bytes(Sample* s, const char* bytes, size_t n, bool last) {
    if (!s->json_escaped) {
        sample_append(s, bytes, n);
        return;
    }
    memcpy(byte_buffer_reserve(&s->pending, n), bytes, n);
    s->pending.count += n;
    size_t out_bytes;
    char* out = (char*)xrealloc(NULL, s->pending.count);
    size_t used = json_unescape(s->pending.data, s->pending.count, last, out, &out_bytes);
    sample_append(s, out, out_bytes);
    memmove(s->pending.data, s->pending.data + used, s->pending.count - used);
    s->pending.count -= used;
    free(out);
}

// Appends one token; without text it becomes a number.
static inline void sample_put(Sample* s, uint32_t token) {
    char number[16];
    size_t n;
    const char* bytes = tokenizer_decode(&s->tokenizer, token, &n);
    if (bytes)
        sample_put_bytes(s, bytes, n, false);
    else
        sample_append(s, number, (size_t)snprintf(number, sizeof number, " %u", token));
}

// Completes the text.
static inline void sample_end(Sample* s) {
    sample_put_bytes(s, "", 0, true);
    if (s->stream) sample_append(s, "\n", 1);
}

// Appends the prompt to the sample and returns its ids, which follow the end of text that every document
// starts with.
static inline TokenBuffer sample_prompt(Sample* s, const Run* run) {
    TokenBuffer ids;
    ByteBuffer escaped;
    const char* prompt = run->options.prompt ? run->options.prompt : "";
    size_t n = strlen(prompt);
    memset(&ids, 0, sizeof ids);
    memset(&escaped, 0, sizeof escaped);
    *token_buffer_reserve(&ids, 1) = (uint32_t)config_end_of_text(&run->config);
    ids.count = 1;
    if (s->tokenizer.vocab_size == 0) return ids;
    sample_append(s, prompt, n);
    if (s->json_escaped) {
        json_escape(prompt, n, &escaped);
        tokenizer_encode(&s->tokenizer, escaped.data ? escaped.data : "", escaped.count, &ids);
    } else
        tokenizer_encode(&s->tokenizer, prompt, n, &ids);
    free(escaped.data);
    return ids;
}

// Generates up to n tokens that continue the prompt, n >= 1.
static inline void sample_generate(Sample* text, const Run* run, int64_t n, const Trainer* trainer,
                                   Engine* engine) {
    const Options* o = &run->options;
    const int64_t V = run->config.vocab_size;
    TokenBuffer prompt = sample_prompt(text, run);
    DecodeState* state = trainer->decode_open(engine, prompt.count + n);
    Sampler sampler = {o->temperature, o->top_k, o->top_p, (uint64_t)o->seed, NULL, NULL, 0};
    float* logits = (float*)xcalloc((size_t)V, sizeof(float));
    for (int64_t i = 0; i < prompt.count; i++)
        trainer->decode(engine, state, (int32_t)prompt.data[i], i + 1 < prompt.count ? NULL : logits);
    for (int64_t i = 0; i < n; i++) {
        int64_t token = sampler_next(&sampler, logits, V, (uint64_t)i);
        if (token < 0) die("the model's logits are not finite: its weights are damaged");
        if (token == config_end_of_text(&run->config)) break;
        sample_put(text, (uint32_t)token);
        if (i + 1 < n) trainer->decode(engine, state, (int32_t)token, logits);
    }
    sample_end(text);
    free(logits);
    free(prompt.data);
    sampler_free(&sampler);
    trainer->decode_close(state);
}

#endif // LLMC_SAMPLE_H
