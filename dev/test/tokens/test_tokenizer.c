/*
Tests of llmc/tokens/tokenizer.h and llmc/base/text.h: vectors of the reference encoder, a direct
implementation of byte-pair encoding, round trips of random bytes, and invalid vocab.bpe files.
*/
#include "../scratch.h"
#include "../../../llmc/base/random.h"
#include "../../../llmc/tokens/tokenizer.h"

static const char VOCAB[] = "dev/test/fixtures/gpt2/vocab.bpe";

static uint64_t drawn; // counter of the random numbers
static uint64_t below(uint64_t n) { return random_u64(1, 0, drawn++) % n; }

static bool same_tokens(const TokenBuffer* a, const uint32_t* ids, int64_t count) {
    return a->count == count && (count == 0 || memcmp(a->data, ids, (size_t)count * sizeof *ids) == 0);
}

// Whether the tokens decode to text[n].
static bool decodes_to(const Tokenizer* t, const TokenBuffer* tokens, const char* text, size_t n) {
    size_t at = 0, bytes;
    for (int64_t i = 0; i < tokens->count; i++) {
        const char* token = tokenizer_decode(t, tokens->data[i], &bytes);
        if (!token || bytes > n - at || memcmp(token, text + at, bytes) != 0) return false;
        at += bytes;
    }
    return at == n;
}

// ----------------------------------------------------------------------------
// vectors: lines of {"text":"...","ids":[...]}

static void test_vectors(const Tokenizer* t, const char* path, int expected_lines) {
    Error err;
    size_t bytes;
    char* file = read_file(path, &bytes, &err);
    if (!file) die("%s", err.msg);
    int lines = 0;
    for (char *line = file, *next; *line; line = next, lines++) {
        next = strchr(line, '\n') + 1;
        char *text = line + strlen("{\"text\":\""), *end = text;
        while (*end != '"') end += *end == '\\' ? 2 : 1;
        size_t n;
        char* ids = end + strlen("\",\"ids\":[");
        json_unescape(text, (size_t)(end - text), true, text, &n);
        TokenBuffer want = {0}, got = {0};
        while (*ids != ']') {
            token_buffer_add(&want, (uint32_t)strtoul(ids, &ids, 10));
            ids += *ids == ',';
        }
        tokenizer_encode(t, text, n, &got);
        CHECK(same_tokens(&got, want.data, want.count), "%s:%d: encodes to other ids", path, lines + 1);
        CHECK(decodes_to(t, &want, text, n), "%s:%d: decodes to another text", path, lines + 1);
        free(want.data);
        free(got.data);
    }
    CHECK(lines == expected_lines, "%s: %d lines", path, lines);
    free(file);
}

// ----------------------------------------------------------------------------
// splitting into words

static Tokenizer splitter; // has classes only

// `words` is a text with | between the expected words.
static void test_split(const char* words) {
    uint8_t text[256];
    bool ends[257] = {false};
    size_t n = 0;
    for (const char* s = words; *s; s++) {
        if (*s == '|')
            ends[n] = true;
        else
            text[n++] = (uint8_t)*s;
    }
    ends[n] = true;
    bool same = true;
    for (size_t at = 0, end; at < n; at = end) {
        end = gpt2_word_end(&splitter, text, at, n);
        for (size_t i = at + 1; i <= end; i++) same = same && ends[i] == (i == end);
    }
    CHECK(same, "'%s' is split differently", words);
}

static void test_splits(void) {
    splitter.classes = (uint8_t*)xcalloc(UNICODE_POINTS, 1);
    unicode_expand(splitter.classes);
    test_split("Hello| world|!");
    test_split("a| b|  | c|    |\n|d");
    test_split("a|  ");
    test_split("a| \n");
    test_split("a| |\n|b");
    test_split("don|'t| I|'ve| we|'re| he|'ll| it|'s| I|'m| you|'d");
    test_split("'s|'s|''|s| '|s|'|S|'");
    test_split("'re|x");
    test_split("'|ra");
    test_split("abc|123|abc| 4|.|5|!?|x");
    test_split("x|\xc2\xbd\xe2\x85\xa8| \xd9\xa3|y"); // one half, Roman nine, Arabic three: numbers
    test_split("e|\xcc\x81|e");                       // a combining accent is not a letter
    test_split("a|\xc2\xa0|b|\xe3\x80\x80|c|\xc2\x85|\xe2\x80\xa8|d"); // white space outside ASCII
    test_split("a|\x1c\xe2\x80\x8b|b"); // file separator, zero width space: not white space
    test_split("\xe4\xb8\xad\xf0\xa0\x80\x80| \xd0\xb6|\xf0\x9f\x99\x82");
    test_split("a|\xff\xc3| \xed\xa0\x80|b|\xc0\xaf\xf4\x90\x80\x80"); // invalid UTF-8: as punctuation
    test_split("a|\xe4\xb8");                                          // a truncated character
    tokenizer_free(&splitter);
}

static void test_unicode(void) {
    uint8_t* classes = (uint8_t*)xcalloc(UNICODE_POINTS, 1);
    unicode_expand(classes);
    static const struct {
        uint32_t first, last;
        int of_class;
    } some[] = {
        {0x0, 0x8, UNICODE_OTHER},           {0x9, 0xd, UNICODE_SPACE},
        {0x30, 0x39, UNICODE_NUMBER},        {0x41, 0x5a, UNICODE_LETTER},
        {0x85, 0x85, UNICODE_SPACE},         {0xa0, 0xa0, UNICODE_SPACE},
        {0xaa, 0xaa, UNICODE_LETTER},        {0x300, 0x36f, UNICODE_OTHER},
        {0x2000, 0x200a, UNICODE_SPACE},     {0x200b, 0x200f, UNICODE_OTHER},
        {0x2160, 0x2182, UNICODE_NUMBER},    {0x3007, 0x3007, UNICODE_NUMBER},
        {0x4e00, 0x9fff, UNICODE_LETTER},    {0xac00, 0xd7a3, UNICODE_LETTER},
        {0xd800, 0xdfff, UNICODE_OTHER},     {0x10d40, 0x10d49, UNICODE_NUMBER},
        {0x20000, 0x2a6df, UNICODE_LETTER},  {0xe0000, 0x10ffff, UNICODE_OTHER},
        {0x110000, 0x110000, UNICODE_OTHER}, {UTF8_INVALID, UTF8_INVALID, UNICODE_OTHER},
    };
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        uint32_t c = some[i].first;
        while (c < some[i].last && unicode_class(classes, c) == some[i].of_class) c++;
        CHECK(unicode_class(classes, c) == some[i].of_class, "U+%04X has class %d", (unsigned)c,
              unicode_class(classes, c));
    }
    free(classes);
}

static void test_utf8(void) {
    int wrong = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        char text[4];
        size_t n = utf8_encode(c, text), length;
        bool surrogate = c >= 0xd800 && c < 0xe000;
        uint32_t got = utf8_decode((const uint8_t*)text, n, &length);
        wrong += surrogate ? got != UTF8_INVALID || length != 1 : got != c || length != n;
        if (n > 1 && !surrogate) wrong += utf8_decode((const uint8_t*)text, n - 1, &length) != UTF8_INVALID;
    }
    CHECK(wrong == 0, "%d code points are not decoded as encoded", wrong);
}

// ----------------------------------------------------------------------------
// byte-pair encoding

// The definition: find the pair with the lowest merged id, the leftmost of several, merge it, repeat.
static int64_t slow_bpe(const Tokenizer* t, const uint8_t* s, size_t n, uint32_t* ids) {
    for (size_t i = 0; i < n; i++) ids[i] = t->of_byte[s[i]];
    for (;;) {
        uint32_t best = TOKEN_NONE;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            uint32_t id = bpe_merged(t, ids[i], ids[i + 1]);
            if (id < best) best = id, at = i;
        }
        if (best == TOKEN_NONE) return (int64_t)n;
        ids[at] = best;
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        n--;
    }
}

static void test_bpe(const Tokenizer* t) {
    static const char* const alphabets[] = {"a", "ab", "etaoinshr", " -=*_", "THEthe", NULL};
    int wrong_short = 0, wrong_long = 0;
    for (int round = 0; round < 6000; round++) {
        uint8_t s[400];
        uint32_t want[400], got[400];
        const char* alphabet = alphabets[round % 6];
        size_t n = 1 + below(round % 4 ? BPE_SHORT : sizeof s);
        for (size_t i = 0; i < n; i++)
            s[i] = alphabet ? (uint8_t)alphabet[below(strlen(alphabet))] : (uint8_t)below(256);
        int64_t count = slow_bpe(t, s, n, want);
        size_t bytes = (size_t)count * sizeof *want;
        if (n <= BPE_SHORT)
            wrong_short += bpe_short(t, s, (int)n, got) != count || memcmp(got, want, bytes) != 0;
        wrong_long += bpe_long(t, s, (int64_t)n, got) != count || memcmp(got, want, bytes) != 0;
    }
    CHECK(wrong_short == 0, "%d short words differ from the definition", wrong_short);
    CHECK(wrong_long == 0, "%d words differ from the definition", wrong_long);
}

static void test_long_words(const Tokenizer* t) {
    size_t n = 1 << 20;
    char* text = xcalloc(n, 1);
    for (int kind = 0; kind < 5; kind++) {
        TokenBuffer tokens = {0};
        for (size_t i = 0; i < n; i++)
            text[i] = kind == 0   ? 'a'
                      : kind == 1 ? ' '
                      : kind == 2 ? '='
                      : kind == 3 ? (char)('a' + below(26))
                                  : (char)255;
        tokenizer_encode(t, text, n, &tokens);
        CHECK(decodes_to(t, &tokens, text, n), "a word of %zu bytes, kind %d, decodes to another text", n,
              kind);
        free(tokens.data);
    }
    free(text);
}

// ----------------------------------------------------------------------------
// random text

// Fills text with random bytes, characters, or snippets around the splitting rules; returns its length.
static size_t random_text(char* text, size_t most) {
    static const char* const snippets[] = {
        " ",           "  ",    "\n",   "\t",   "'",        "'s",       "'ll",          "re",
        "a",           "Zebra", "1",    "22",   "!",        ".",        "\\",           "\"",
        "{}",          "\x1f",  "\xc3", "\xa9", "\xc2\xa0", "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x99\x82",
        "\xe2\x80\x83"};
    size_t n = 0, target = below(most - 4), kind = below(3);
    while (n < target) {
        if (kind == 0) {
            text[n++] = (char)below(256);
        } else if (kind == 1) {
            uint32_t c = (uint32_t)below(below(2) ? 0x3000 : 0x110000);
            n += utf8_encode(c, text + n);
        } else {
            const char* s = snippets[below(sizeof snippets / sizeof snippets[0])];
            size_t length = strlen(s);
            if (n + length > most) break;
            memcpy(text + n, s, length);
            n += length;
        }
    }
    return n;
}

// Whether the byte tokenizer cuts the first `known` bytes of text[n] near their end, and between characters:
// its two parts have the JSON-escaped form of the whole.
static bool byte_cut_is_right(const Tokenizer* bytes, const char* text, size_t known,
                              const ByteBuffer* escaped, size_t n) {
    ByteBuffer parts = {0};
    size_t cut = tokenizer_cut(bytes, text, 0, known);
    json_escape(text, cut, &parts);
    json_escape(text + cut, n - cut, &parts);
    bool right = cut + 4 >= known && cut <= known && parts.count == escaped->count &&
                 (parts.count == 0 || memcmp(parts.data, escaped->data, parts.count) == 0);
    free(parts.data);
    return right;
}

static void test_random_text(const Tokenizer* gpt2, const Tokenizer* bytes) {
    int wrong[5] = {0}, cuts = 0;
    for (int round = 0; round < 20000; round++) {
        char text[300], back[12 * sizeof text];
        size_t n = random_text(text, sizeof text), back_bytes;
        TokenBuffer whole = {0}, parts = {0}, plain = {0};
        ByteBuffer escaped = {0};
        tokenizer_encode(gpt2, text, n, &whole);
        wrong[0] += !decodes_to(gpt2, &whole, text, n);
        tokenizer_encode(bytes, text, n, &plain);
        wrong[1] += plain.count != (int64_t)n || !decodes_to(bytes, &plain, text, n);
        json_escape(text, n, &escaped);
        size_t used = json_unescape(escaped.data, escaped.count, round % 2, back, &back_bytes);
        wrong[2] += used != escaped.count || back_bytes != n || memcmp(back, text, n) != 0;
        for (size_t i = 0; i < escaped.count; i++) wrong[2] += escaped.data[i] < ' ' || escaped.data[i] > '~';
        // in two parts, plain and JSON-escaped, cut when only the first `known` bytes were read
        size_t known = round % 2 ? n : below(n + 1);
        wrong[4] += !byte_cut_is_right(bytes, text, known, &escaped, n);
        size_t cut = tokenizer_cut(gpt2, text, 0, known);
        cuts += cut > 0;
        for (int escape = 0; escape < 2 && cut; escape++) {
            ByteBuffer a = {0}, b = {0};
            whole.count = parts.count = 0;
            if (escape) {
                json_escape(text, cut, &a);
                json_escape(text + cut, n - cut, &b);
                tokenizer_encode(gpt2, escaped.data, escaped.count, &whole);
                tokenizer_encode(gpt2, a.data, a.count, &parts);
                tokenizer_encode(gpt2, b.data, b.count, &parts);
            } else {
                tokenizer_encode(gpt2, text, n, &whole);
                tokenizer_encode(gpt2, text, cut, &parts);
                tokenizer_encode(gpt2, text + cut, n - cut, &parts);
            }
            wrong[3] += !same_tokens(&parts, whole.data, whole.count);
            free(a.data);
            free(b.data);
        }
        free(whole.data);
        free(parts.data);
        free(plain.data);
        free(escaped.data);
    }
    CHECK(wrong[0] == 0, "GPT-2: %d texts decode to other texts", wrong[0]);
    CHECK(wrong[1] == 0, "bytes: %d texts decode to other texts", wrong[1]);
    CHECK(wrong[2] == 0, "%d JSON-escaped texts are unescaped to other texts", wrong[2]);
    CHECK(wrong[3] == 0, "%d texts have other tokens when encoded in two parts", wrong[3]);
    CHECK(wrong[4] == 0, "bytes: %d texts are cut in a character, or not at all", wrong[4]);
    CHECK(cuts > 5000, "only %d texts were cut in two", cuts);
    CHECK(tokenizer_cut(gpt2, "abc def", 0, 7) == 3, "cut at another position");
    CHECK(tokenizer_cut(gpt2, "abc def", 3, 7) == 0, "cut before the start of the range");
    CHECK(tokenizer_cut(gpt2, "", 0, 0) == 0, "cut an empty text");
    // Chinese: before a comma, a full stop, a newline; not between letters, nor in a character that is not
    // complete yet
    static const char chinese[] =
        "\xe4\xb8\xad\xe6\x96\x87\xef\xbc\x8c\xe4\xb8\xad\xe3\x80\x82\n\xe4\xb8\xad";
    static const size_t want[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 12, 15, 15, 15, 15};
    for (size_t n = 0; n < sizeof want / sizeof *want; n++) {
        size_t cut = tokenizer_cut(gpt2, chinese, 0, n);
        CHECK(cut == want[n], "the first %zu bytes of Chinese text are cut at %zu", n, cut);
    }
}

static void test_vocabularies(const Tokenizer* gpt2, const Tokenizer* bytes) {
    size_t n;
    CHECK(gpt2->vocab_size == 50257 && gpt2->end_of_text == 50256, "GPT-2: another vocabulary");
    CHECK(bytes->vocab_size == 257 && bytes->end_of_text == 256, "bytes: another vocabulary");
    const char* end = tokenizer_decode(gpt2, 50256, &n);
    CHECK(n == 13 && memcmp(end, "<|endoftext|>", n) == 0, "the end-of-text token decodes to another text");
    CHECK(!tokenizer_decode(gpt2, 50257, &n) && n == 0, "decodes an id outside the vocabulary");
    CHECK(!tokenizer_decode(bytes, TOKEN_NONE, &n) && n == 0, "decodes an id outside the vocabulary");
    for (uint32_t id = 0; id < 50257; id++)
        if (!tokenizer_decode(gpt2, id, &n) || n == 0) CHECK(false, "token %u is empty", (unsigned)id);
    TokenBuffer none = {0};
    tokenizer_encode(gpt2, "", 0, &none);
    tokenizer_encode(bytes, "", 0, &none);
    CHECK(none.count == 0, "an empty text has tokens");
    free(none.data);
}

// ----------------------------------------------------------------------------
// JSON-escaped text

static void test_escape(const char* text, size_t n, const char* want) {
    ByteBuffer got = {0};
    json_escape(text, n, &got);
    CHECK(got.count == strlen(want) && (!got.count || memcmp(got.data, want, got.count) == 0),
          "not escaped to %s", want);
    free(got.data);
}

static void test_unescape(const char* text, const char* want, size_t want_bytes) {
    char out[64];
    size_t n, used = json_unescape(text, strlen(text), true, out, &n);
    CHECK(used == strlen(text) && n == want_bytes && memcmp(out, want, n) == 0, "%s is unescaped differently",
          text);
}

#define ESCAPE(text, want)   test_escape(text, sizeof text - 1, want)
#define UNESCAPE(text, want) test_unescape(text, want, sizeof want - 1)

static void test_json(void) {
    ESCAPE("", "");
    ESCAPE("a \"b\" \\ / '~'", "a \\\"b\\\" \\\\ / '~'");
    ESCAPE("\b\f\n\r\t", "\\b\\f\\n\\r\\t");
    ESCAPE("\0\1\x1f\x7f", "\\u0000\\u0001\\u001f\\u007f");
    ESCAPE("\xc3\xa9\xe2\x82\xac", "\\u00e9\\u20ac");
    ESCAPE("\xf0\x9f\x99\x82\xf4\x8f\xbf\xbf", "\\ud83d\\ude42\\udbff\\udfff");
    ESCAPE("\xff\xc3", "\\udcff\\udcc3"); // as Python with surrogateescape
    ESCAPE("\xed\xa0\x80", "\\udced\\udca0\\udc80");
    UNESCAPE("\\\"\\\\\\/\\b\\f\\n\\r\\t", "\"\\/\b\f\n\r\t");
    UNESCAPE("\\u0041\\u00E9\\u20aC\\u0000", "A\xc3\xa9\xe2\x82\xac\0");
    UNESCAPE("\\uD83D\\uDE42", "\xf0\x9f\x99\x82");
    UNESCAPE("\\udcff", "\xff");
    // invalid escapes are copied unchanged
    UNESCAPE("\\", "\\");
    UNESCAPE("\\q\\n", "\\q\n");
    UNESCAPE("\\u12", "\\u12");
    UNESCAPE("\\u12g4\\n", "\\u12g4\n");
    UNESCAPE("\\u\\n", "\\u\n");
    UNESCAPE("\\ud83d", "\\ud83d");
    UNESCAPE("\\ud83d\\n", "\\ud83d\n");
    UNESCAPE("\\ud83d\\ud83d\\ude42", "\\ud83d\xf0\x9f\x99\x82");
    UNESCAPE("\\ude42", "\\ude42");
    UNESCAPE("\\u\x10\x11\x12\x13", "\\u\x10\x11\x12\x13");
}

#undef ESCAPE
#undef UNESCAPE

// Text with invalid escapes is unescaped to the same result in pieces of any size as in one call.
static void test_json_stream(void) {
    int wrong = 0;
    for (int round = 0; round < 20000; round++) {
        char text[60], whole[60], pieces[60], waiting[60];
        size_t n = below(sizeof text), whole_bytes, bytes = 0, kept = 0, got;
        for (size_t i = 0; i < n; i++) text[i] = "\\\\\\uuudd8Dc30\"n"[below(15)];
        if (round % 2 && n > 20) memcpy(text + below(n - 12), "\\ud83d\\ude42", 12);
        json_unescape(text, n, true, whole, &whole_bytes);
        for (size_t at = 0; at < n;) {
            size_t piece = 1 + below(n - at < 9 ? n - at : 9);
            memcpy(waiting + kept, text + at, piece);
            at += piece;
            kept += piece;
            size_t used = json_unescape(waiting, kept, at == n, pieces + bytes, &got);
            bytes += got;
            kept -= used;
            memmove(waiting, waiting + used, kept);
            wrong += kept > 11; // the longest incomplete escape
        }
        wrong += kept != 0 || bytes != whole_bytes || memcmp(pieces, whole, bytes) != 0;
    }
    CHECK(wrong == 0, "%d texts are unescaped differently in pieces", wrong);
}

// ----------------------------------------------------------------------------
// invalid vocab.bpe files

static void test_bad_vocab(const char* text, size_t n, const char* expected) {
    const char* path = in_folder("bad.bpe");
    write_bytes(path, text, n);
    Tokenizer t;
    Error err = {""};
    bool ok = tokenizer_gpt2(&t, path, &err);
    CHECK(!ok, "accepted; expected the error '%s'", expected);
    CHECK(strstr(err.msg, path) && strstr(err.msg, expected), "'%s' instead of '%s'", err.msg, expected);
    CHECK(ok || (!t.text.data && !t.words), "the tokenizer is not empty after an error");
    if (ok) tokenizer_free(&t);
}

#define BAD(text, expected) test_bad_vocab(text, strlen(text), expected)

static void test_bad_vocabs(void) {
    Error err = {""};
    Tokenizer t;
    size_t n;
    char* good = read_file(VOCAB, &n, &err);
    if (!good) die("%s", err.msg);
    CHECK(!tokenizer_gpt2(&t, "build/no/such.bpe", &err) && strstr(err.msg, "build/no/such.bpe"), "%s",
          err.msg);
    CHECK(!tokenizer_gpt2(&t, scratch_folder, &err) && strstr(err.msg, scratch_folder), "%s", err.msg);
    BAD("", "#version:");
    BAD("{\"a\": 1}\n", "#version:");
    BAD("#version: 0.2", "middle of line 1");
    BAD("#version: 0.2\n", "has 0 merges");
    BAD("#version: 0.2\na b\n\n", "line 3 is not two symbols");
    BAD("#version: 0.2\nab\n", "line 2 is not two symbols");
    BAD("#version: 0.2\na b c\n", "second symbol of line 2");
    BAD("#version: 0.2\na b\nab cd\n", "second symbol of line 3");
    BAD("#version: 0.2\n a\n", "first symbol of line 2");
    BAD("#version: 0.2\na b\r\n", "second symbol of line 2");
    BAD("#version: 0.2\na \xff\n", "second symbol of line 2");
    BAD("#version: 0.2\na \xc5\x84\n",
        "second symbol of line 2"); // U+0144, the first that represents no byte
    BAD("#version: 0.2\na b\nb c\na b\n", "line 4 makes the same token as");
    BAD("#version: 0.2\na b\nb c\na bc\nab c\n", "line 5 makes the same token as");
    BAD("#version: 0.2\na a\naa aa\naaaa aaaa\n", "has 3 merges");
    test_bad_vocab(good, n - 1, "middle of line 50001");
    test_bad_vocab(good, n / 2, "truncated");
    char* end = good + n - 2;
    while (*end != '\n') end--;
    test_bad_vocab(good, (size_t)(end + 1 - good), "has 49999 merges");
    char* longer = xcalloc(n + 8, 1);
    memcpy(longer, good, n);
    memcpy(longer + n, "zz zz\n", 6);
    test_bad_vocab(longer, n + 6, "more than the 50000 merges");
    // each token is twice as long as the one before
    ByteBuffer b = {0};
    memcpy(byte_buffer_reserve(&b, 8192), "#version: 0.2\n", 14);
    b.count = 14;
    for (size_t length = 1; length <= 1024; length *= 2) {
        memset(b.data + b.count, 'a', 2 * length + 1);
        b.data[b.count + length] = ' ';
        b.data[b.count + 2 * length + 1] = '\n';
        b.count += 2 * length + 2;
    }
    test_bad_vocab(b.data, b.count, "line 12 makes a token of more than");
    free(b.data);
    free(longer);
    free(good);
}

#undef BAD

// A token that its own bytes do not encode to: the merges `a b`, `b c`, `a bc` define abc, but in the text
// abc, `a b` is merged first.
static void test_unreachable_token(void) {
    const char* path = in_folder("odd.bpe");
    FILE* f = fopen(path, "wb");
    if (!f) die("%s: cannot write", path);
    fprintf(f, "#version: 0.2\na b\nb c\na bc\n");
    int merges = 3;
    for (int i = 0; i < 256 * 256 && merges < GPT2_MERGES; i++) {
        int pair[2] = {i / 256, i % 256};
        if (i == 'a' * 256 + 'b' || i == 'b' * 256 + 'c') continue;
        for (int side = 0; side < 2; side++) {
            char symbol[4];
            uint32_t c = (uint32_t)pair[side];
            if (!gpt2_printable(c)) c = c < 0x21 ? 256 + c : c < 0xa1 ? 256 + c - 0x7f + 0x21 : 256 + 67;
            fwrite(symbol, 1, utf8_encode(c, symbol), f);
            fputc(side ? '\n' : ' ', f);
        }
        merges++;
    }
    fclose(f);
    Tokenizer t;
    Error err;
    size_t n;
    if (!tokenizer_gpt2(&t, path, &err)) die("%s", err.msg);
    TokenBuffer tokens = {0};
    tokenizer_encode(&t, "abc", 3, &tokens);
    CHECK(tokens.count == 2 && tokens.data[0] == 256 && tokens.data[1] == t.of_byte['c'],
          "encodes abc to the token abc");
    tokens.count = 0;
    tokenizer_encode(&t, "bc\x7f\xad", 4, &tokens);
    CHECK(tokens.count == 2 && decodes_to(&t, &tokens, "bc\x7f\xad", 4),
          "does not encode a pair to its token");
    const char* token = tokenizer_decode(&t, 258, &n);
    CHECK(n == 3 && memcmp(token, "abc", 3) == 0, "does not decode abc");
    free(tokens.data);
    tokenizer_free(&t);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("tokenizer"));
    Tokenizer gpt2, bytes;
    Error err;
    tokenizer_bytes(&bytes);
    if (!tokenizer_gpt2(&gpt2, VOCAB, &err)) die("%s", err.msg);
    test_vectors(&gpt2, "dev/test/fixtures/gpt2/vectors.jsonl", 15);
    test_vectors(&gpt2, "dev/test/fixtures/gpt2/unicode.jsonl", 24);
    test_splits();
    test_unicode();
    test_utf8();
    test_bpe(&gpt2);
    test_long_words(&gpt2);
    test_vocabularies(&gpt2, &bytes);
    test_json();
    test_json_stream();
    test_random_text(&gpt2, &bytes);
    test_bad_vocabs();
    test_unreachable_token();
    tokenizer_free(&gpt2);
    tokenizer_free(&bytes);
    return test_report();
}
