/*
Samples: text that a model generates from a prompt, one token at a time.

The model reads its end-of-text token and the prompt, then continues until it draws end of text or n tokens
are written. Token ids become text by the byte tokenizer, or GPT-2's with --vocab; without a tokenizer ids are
written as numbers. With --json-escape prompts are escaped and samples unescaped, since an escape may be split
between two tokens.

Called by train.h, for --generate and for samples while training.
*/
#pragma once

#include "../run/sampler.h"
#include "../run/trainer.h"
#include "../tokens/tokenizer.h"

typedef struct {
    Tokenizer tokenizer; // vocab_size 0: none
    FILE* stream;        // receives the text while it is generated; may be NULL
    ByteBuffer text;     // zero-terminated
    size_t complete;     // bytes of text before the beginning of an incomplete escape
} Sample;

static const int64_t SAMPLE_DEFAULT_TOKENS = 128;

// Tokens that a sample of the run is to have at most, without its prompt.
static inline int64_t sample_tokens(const Run* run) {
    return run->options.generate == OPTION_UNSET ? SAMPLE_DEFAULT_TOKENS : run->options.generate;
}

// Tokens for which samples while training need states, at most; 0: there are none. A token of the prompt has
// at least one byte, and an escaped byte has six.
static inline int64_t sample_capacity(const Run* run) {
    const Options* o = &run->options;
    if (!o->sample_every || (run->mode != RUN_TRAIN && run->mode != RUN_DRY)) return 0;
    return 1 + (o->prompt ? (int64_t)strlen(o->prompt) : 0) * (o->json_escape ? 6 : 1) + sample_tokens(run);
}

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

// Feeds the prompt's tokens to empty states, and generates up to n tokens that continue them.
static inline void sample_extend(Sample* s, const Run* run, const TokenBuffer* prompt, int64_t n,
                                 const Trainer* trainer, Model* model, States* states) {
    const Options* o = &run->options;
    const int64_t V = run->config.vocab_size;
    Sampler sampler = {o->temperature, o->top_k, o->top_p, (uint64_t)o->seed, NULL, NULL, 0};
    float* logits = (float*)xcalloc((size_t)V, sizeof(float));
    for (int64_t i = 0; i < prompt->count; i++)
        trainer->decode(model, states, (int32_t)prompt->data[i], i + 1 < prompt->count ? NULL : logits);
    for (int64_t i = 0; i < n; i++) {
        int64_t token = sampler_next(&sampler, logits, V, (uint64_t)i);
        if (token < 0) die("the model's logits are not finite: its weights are damaged");
        if (token == config_end_of_text(&run->config)) break;
        char number[32];
        size_t bytes;
        const char* text = tokenizer_decode(&s->tokenizer, (uint32_t)token, &bytes);
        if (!text) text = number, bytes = (size_t)snprintf(number, sizeof number, " %lld", (long long)token);
        sample_put(s, text, bytes, o->json_escape, false);
        if (i + 1 < n) trainer->decode(model, states, (int32_t)token, logits);
    }
    sample_put(s, "", 0, o->json_escape, true);
    if (s->stream) sample_put(s, "\n", 1, false, true);
    free(logits);
    sampler_free(&sampler);
}

// Generates up to n tokens that continue the prompt, n >= 1, and returns the text, whose data the caller
// frees. A stream gets it too, with a line break; this needs a tokenizer. Where the device has no memory for
// the sequence's state, dies with a stream, and else warns and returns no text (NULL): training goes on.
static inline ByteBuffer sample_generate(const Run* run, int64_t n, FILE* stream, const Trainer* trainer,
                                         Model* model) {
    const Options* o = &run->options;
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
    if (!states && stream)
        die("too little memory is left on the device for a sample of %lld tokens", (long long)n);
    if (states) {
        sample_extend(&s, run, &ids, n, trainer, model, states);
        trainer->states_free(states);
    } else {
        warn("step %lld: no sample: too little memory is left on the device for %lld tokens",
             (long long)run->state.step, (long long)n);
        free(s.text.data);
        s.text.data = NULL;
    }
    free(ids.data);
    free(escaped.data);
    tokenizer_free(&s.tokenizer);
    return s.text;
}
