/*
Samples: text that a model generates from a prompt, one token at a time.

The model reads its end-of-text token and the prompt, then continues until it draws end of text or n tokens
are written. Token ids become text by the byte tokenizer, or GPT-2's with --vocab; without a tokenizer ids are
written as numbers. With --json-escape prompts are escaped and samples unescaped, since an escape may be split
between two tokens.

Called by train.h, for --generate and for samples while training.
*/
#pragma once

#include "../tokens/tokenizer.h"
#include "sampler.h"
#include "trainer.h"

typedef struct {
    Tokenizer tokenizer; // vocab_size 0: none
    FILE* stream;        // receives the text while it is generated; may be NULL
    ByteBuffer text;     // zero-terminated
    size_t complete;     // bytes of text before the beginning of an incomplete escape
} Sample;

// The tokenizer of the run's model. If --vocab is missing there is none, which is an error if `required`.
static inline Tokenizer sample_tokenizer(const Run* run, bool required) {
    Error err;
    Tokenizer t;
    const char* vocab = run->options.vocab;
    memset(&t, 0, sizeof t);
    if (run_reads_bytes(run))
        tokenizer_bytes(&t);
    else if (vocab && !tokenizer_gpt2(&t, vocab, &err))
        die("%s", err.msg);
    else if (!vocab && required)
        die("--vocab FILE is missing: GPT-2's vocab.bpe, to read the prompt and write the text");
    if (t.vocab_size > run->config.vocab_size)
        die("--vocab %s: has more tokens than the model's vocabulary of %lld", vocab,
            (long long)run->config.vocab_size);
    return t;
}

// Appends bytes to the text and the stream; dies if the stream cannot be written to. json_escaped: the bytes
// are unescaped; an incomplete escape at their end waits for the next call, unless this one is the `last`.
static inline void sample_put(Sample* s, const char* bytes, size_t n, bool json_escaped, bool last) {
    memcpy(byte_buffer_reserve(&s->text, n + 1), bytes, n);
    char* added = s->text.data + s->complete;
    size_t count = s->text.count + n - s->complete, used = count, out = count;
    if (json_escaped) used = json_unescape(added, count, last, added, &out);
    memmove(added + out, added + used, count - used);
    s->complete += out;
    s->text.count = s->complete + count - used;
    s->text.data[s->text.count] = '\0';
    if (s->stream && (fwrite(added, 1, out, s->stream) != out || fflush(s->stream) != 0))
        die("cannot write the sample: %s", strerror(errno));
}

// Generates up to n tokens that continue the prompt, n >= 1, and returns the text, whose data the caller
// frees. A stream gets it too, with a line break; this needs a tokenizer.
static inline ByteBuffer sample_generate(const Run* run, int64_t n, FILE* stream, const Trainer* trainer,
                                         Model* model) {
    const Options* o = &run->options;
    const int64_t V = run->config.vocab_size;
    Sample s = {sample_tokenizer(run, stream != NULL), stream, {NULL, 0, 0}, 0};
    const char* prompt = o->prompt ? o->prompt : "";
    size_t prompt_bytes = strlen(prompt);
    TokenBuffer ids = {NULL, 0, 0}; // of the prompt, which follows the end of text that documents start with
    ByteBuffer escaped = {NULL, 0, 0}; // the prompt, as the model's text is
    *token_buffer_reserve(&ids, 1) = (uint32_t)config_end_of_text(&run->config);
    ids.count = 1;
    if (s.tokenizer.vocab_size > 0) {
        sample_put(&s, prompt, prompt_bytes, false, false);
        if (o->json_escape) {
            json_escape(prompt, prompt_bytes, &escaped);
            prompt = escaped.data ? escaped.data : "", prompt_bytes = escaped.count;
        }
        tokenizer_encode(&s.tokenizer, prompt, prompt_bytes, &ids);
    }

    States* states = trainer->states_new(model, 1, 1, ids.count + n);
    Sampler sampler = {o->temperature, o->top_k, o->top_p, (uint64_t)o->seed, NULL, NULL, 0};
    float* logits = (float*)xcalloc((size_t)V, sizeof(float));
    for (int64_t i = 0; i < ids.count; i++)
        trainer->decode(model, states, (int32_t)ids.data[i], i + 1 < ids.count ? NULL : logits);
    for (int64_t i = 0; i < n; i++) {
        int64_t token = sampler_next(&sampler, logits, V, (uint64_t)i);
        if (token < 0) die("the model's logits are not finite: its weights are damaged");
        if (token == config_end_of_text(&run->config)) break;
        char number[32];
        size_t bytes;
        const char* text = tokenizer_decode(&s.tokenizer, (uint32_t)token, &bytes);
        if (!text) text = number, bytes = (size_t)snprintf(number, sizeof number, " %lld", (long long)token);
        sample_put(&s, text, bytes, o->json_escape, false);
        if (i + 1 < n) trainer->decode(model, states, (int32_t)token, logits);
    }
    sample_put(&s, "", 0, o->json_escape, true);
    if (stream) sample_put(&s, "\n", 1, false, true);
    free(logits);
    free(ids.data);
    free(escaped.data);
    sampler_free(&sampler);
    tokenizer_free(&s.tokenizer);
    trainer->states_free(states);
    return s.text;
}
