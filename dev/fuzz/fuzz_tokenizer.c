/*
llmc/tokens/tokenizer.h and llmc/base/text.h, with GPT-2's vocabulary and by bytes: decode(encode(text)) is
the text, text cut by tokenizer_cut encodes to the same tokens, escaped or not, the two ways to encode a word
agree, and JSON-escaped text, unescaped whole or in pieces, is the text.
*/
#include "fuzz.h"
#include "../../llmc/tokens/tokenizer.h"

static Tokenizer tokenizers[2];

static void load_tokenizers(void) {
    Error err;
    if (tokenizers[0].vocab_size) return;
    if (!tokenizer_gpt2(&tokenizers[0], "dev/test/fixtures/gpt2/vocab.bpe", &err)) die("%s", err.msg);
    tokenizer_bytes(&tokenizers[1]);
}

static void require_decodes(const Tokenizer* t, const TokenBuffer* tokens, const char* text, size_t bytes) {
    size_t at = 0, n;
    for (int64_t i = 0; i < tokens->count; i++, at += n) {
        const char* s = tokenizer_decode(t, tokens->data[i], &n);
        REQUIRE(s && n > 0 && n <= bytes - at && memcmp(s, text + at, n) == 0, "byte %zu is not decoded", at);
        REQUIRE(tokens->data[i] != t->end_of_text, "text was encoded as end of text");
    }
    REQUIRE(at == bytes, "%zu of %zu bytes are decoded", at, bytes);
}

static void encode(const Tokenizer* t, const char* text, size_t bytes, bool escape, TokenBuffer* out) {
    ByteBuffer escaped = {NULL, 0, 0};
    if (escape) json_escape(text, bytes, &escaped);
    tokenizer_encode(t, escape ? escaped.data : text, escape ? escaped.count : bytes, out);
    free(escaped.data);
}

// The text is cut where only its first `known` bytes have been read.
static void require_cut(const Tokenizer* t, const char* text, size_t bytes, size_t known) {
    size_t after = known / 4, cut = tokenizer_cut(t, text, after, known);
    REQUIRE(cut == 0 || (cut > after && cut < known), "cut at %zu of %zu", cut, known);
    for (int escape = 0; cut > 0 && escape < 2; escape++) {
        TokenBuffer whole = {NULL, 0, 0}, parts = {NULL, 0, 0};
        encode(t, text, bytes, escape, &whole);
        encode(t, text, cut, escape, &parts);
        encode(t, text + cut, bytes - cut, escape, &parts);
        REQUIRE(parts.count == whole.count, "%lld tokens, %lld of a text cut at %zu of %zu",
                (long long)whole.count, (long long)parts.count, cut, known);
        REQUIRE(memcmp(parts.data, whole.data, (size_t)parts.count * sizeof *parts.data) == 0,
                "other tokens of a text cut at %zu of %zu", cut, known);
        free(whole.data);
        free(parts.data);
    }
}

// The text taken as one word, encoded by the search over a list and by the heap.
static void require_same_word(const Tokenizer* t, const uint8_t* s, size_t bytes) {
    uint32_t a[BPE_SHORT], b[BPE_SHORT];
    if (bytes < 1 || bytes > BPE_SHORT) return;
    int64_t n = bpe_short(t, s, (int)bytes, a), m = bpe_long(t, s, (int64_t)bytes, b);
    REQUIRE(n == m && memcmp(a, b, (size_t)n * sizeof *a) == 0, "%lld and %lld tokens", (long long)n,
            (long long)m);
}

static void require_unescapes(const char* text, size_t bytes) {
    ByteBuffer escaped = {NULL, 0, 0};
    json_escape(text, bytes, &escaped);
    for (size_t i = 0; i < escaped.count; i++)
        REQUIRE(escaped.data[i] >= ' ' && escaped.data[i] <= '~', "byte %zu is not printable", i);
    const size_t pieces[] = {escaped.count, 7, 1};
    char* out = (char*)xcalloc(escaped.count, 1);
    for (size_t k = 0; k < 3 && escaped.count > 0; k++) {
        size_t at = 0, count = 0, given = pieces[k], n;
        while (at < escaped.count) {
            if (given > escaped.count - at) given = escaped.count - at;
            bool last = at + given == escaped.count;
            size_t read = json_unescape(escaped.data + at, given, last, out + count, &n);
            REQUIRE(read > 0 || given < 12, "12 bytes are not a whole escape");
            at += read, count += n;
            given = read > 0 ? pieces[k] : given + 1; // what was left unread, and a byte more
        }
        REQUIRE(count == bytes && memcmp(out, text, bytes) == 0, "in pieces of %zu", pieces[k]);
    }
    free(out);
    free(escaped.data);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    const char* text = (const char*)data;
    load_tokenizers();
    for (int i = 0; i < 2; i++) {
        TokenBuffer tokens = {NULL, 0, 0};
        tokenizer_encode(&tokenizers[i], text, bytes, &tokens);
        require_decodes(&tokenizers[i], &tokens, text, bytes);
        require_cut(&tokenizers[i], text, bytes, bytes);
        require_cut(&tokenizers[i], text, bytes, bytes / 2);
        free(tokens.data);
    }
    require_same_word(&tokenizers[0], data, bytes);
    require_unescapes(text, bytes);
    // any text may be unescaped: a model writes invalid escapes
    size_t n;
    char* out = (char*)xcalloc(bytes, 1);
    REQUIRE(json_unescape(text, bytes, true, out, &n) == bytes && n <= bytes, "%zu bytes", n);
    free(out);
    return 0;
}
