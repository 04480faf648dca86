/*
llmc/tokens/tokenizer.h: GPT-2's vocab.bpe, here with any number of merges. The tokens of an accepted file are
distinct, and every text decodes to itself: tried on the file's own text.
*/
#include "fuzz.h"
#include "../../llmc/tokens/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    const char* text = (const char*)data;
    Tokenizer t;
    TokenBuffer tokens = {NULL, 0, 0};
    Error err = {""};
    int64_t lines = 0;
    for (size_t i = 0; i < bytes; i++) lines += text[i] == '\n';
    int64_t merges = lines > 0 ? lines - 1 : 0;
    if (!gpt2_parse(&t, "input", text, bytes, merges, &err)) {
        require_message(&err, "input");
        REQUIRE(!t.start && !t.words && !t.merges, "not empty after an error");
        return 0;
    }
    REQUIRE(t.vocab_size == 256 + merges + 1 && t.end_of_text == t.vocab_size - 1, "%lld tokens",
            (long long)t.vocab_size);
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
