/*
llmc/tokens/tokenizer.h: GPT-2's vocab.bpe, here with any number of merges, and
llmc/checkpoint/hf/tokenizer_reader.h: tokenizer.json. The tokens of an accepted file are distinct, and every
text decodes to itself: tried on the file's own text.
*/
#include "fuzz.h"
#include "../../llmc/checkpoint/hf/tokenizer_reader.h"

// The tokenizer of the input. False if it is none, and *t is empty.
static bool read_input(Tokenizer* t, const char* text, size_t bytes) {
    Error err = {""};
    Json j;
    int64_t lines = 0;
    memset(t, 0, sizeof *t);
    if (bytes > 0 && text[0] == '{') {
        if (!json_parse(&j, "input", text, bytes, &err)) return false;
        const bool ok = tokenizer_read_json(t, &j);
        json_free(&j);
        return ok;
    }
    for (size_t i = 0; i < bytes; i++) lines += text[i] == '\n';
    const int64_t merges = lines > 0 ? lines - 1 : 0;
    if (!gpt2_parse(t, "input", text, bytes, merges, &err)) {
        require_message(&err, "input");
        return false;
    }
    REQUIRE(t->vocab_size == 256 + merges + 1, "%lld tokens", (long long)t->vocab_size);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    const char* text = (const char*)data;
    Tokenizer t;
    TokenBuffer tokens = {NULL, 0, 0};
    if (!read_input(&t, text, bytes)) {
        REQUIRE(!t.start && !t.words && !t.merges, "not empty after an error");
        return 0;
    }
    REQUIRE(t.end_of_text == t.vocab_size - 1, "%lld tokens", (long long)t.vocab_size);
    for (int64_t id = 0; id < t.vocab_size; id++) {
        size_t n, m;
        const char* s = tokenizer_decode(&t, (uint32_t)id, &n);
        REQUIRE(s && n > 0 && n <= GPT2_TOKEN_BYTES, "token %lld has %zu bytes", (long long)id, n);
        for (int64_t other = 256; other < id && id < t.end_of_text; other++) {
            const char* o = tokenizer_decode(&t, (uint32_t)other, &m);
            REQUIRE(n != m || memcmp(s, o, n) != 0, "tokens %lld and %lld are the same", (long long)other,
                    (long long)id);
        }
    }
    tokenizer_encode(&t, text, bytes, &tokens);
    size_t at = 0, n;
    for (int64_t i = 0; i < tokens.count; i++, at += n) {
        const char* s = tokenizer_decode(&t, tokens.data[i], &n);
        REQUIRE(tokens.data[i] < t.end_of_text && n <= bytes - at && memcmp(s, text + at, n) == 0,
                "byte %zu is not decoded", at);
    }
    REQUIRE(at == bytes, "%zu of %zu bytes are decoded", at, bytes);
    free(tokens.data);
    tokenizer_free(&t);
    return 0;
}
