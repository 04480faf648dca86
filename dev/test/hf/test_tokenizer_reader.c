/*
Tests of llmc/checkpoint/hf/tokenizer_reader.h: which files of tokenizer.json are read, and that they encode
as they should.
*/
#include "../check.h"
#include "../../../llmc/checkpoint/hf/tokenizer_reader.h"

static const char VOCAB[] = "dev/test/fixtures/gpt2/vocab.bpe";
static const char TEXT[] = "the there'll be 12 thé\n\n  <|endoftext|> the\t\xff\n";

// GPT-2's form with three merges, the third of the two before it.
static const char SMALL[] = "#version: 0.2\n\xc4\xa0 t\nh e\n\xc4\xa0t he\n";

// The text of a tokenizer.json in which `from` is replaced by `to`, to be freed. NULL: as it is.
static char* changed_json(const Tokenizer* t, const char* from, const char* to) {
    ByteBuffer json = {NULL, 0, 0};
    tokenizer_json(t, &json);
    char* at = from ? strstr(json.data, from) : json.data;
    if (!at) die("'%s' is not in the file", from);
    if (!from) return json.data;
    char* out = (char*)xcalloc(json.count + strlen(to) + 1, 1);
    memcpy(out, json.data, (size_t)(at - json.data));
    strcat(strcat(out, to), at + strlen(from));
    free(json.data);
    return out;
}

static bool read_text(Tokenizer* t, const char* text) {
    Error err;
    Json j;
    if (!json_parse(&j, "tokenizer.json", text, strlen(text), &err)) die("%s", err.msg);
    const bool ok = tokenizer_read_json(t, &j);
    json_free(&j);
    return ok;
}

// The file is read, and encodes and decodes as t.
static void check_reads(const char* what, const Tokenizer* t, const char* text) {
    Tokenizer got;
    TokenBuffer a = {NULL, 0, 0}, b = {NULL, 0, 0};
    const bool ok = read_text(&got, text);
    CHECK(ok, "%s: is not read", what);
    if (!ok) return;
    tokenizer_encode(t, TEXT, sizeof TEXT - 1, &a);
    tokenizer_encode(&got, TEXT, sizeof TEXT - 1, &b);
    CHECK(a.count == b.count && memcmp(a.data, b.data, (size_t)a.count * sizeof *a.data) == 0,
          "%s: encodes %lld tokens otherwise", what, (long long)b.count);
    CHECK(got.vocab_size == t->vocab_size && got.end_of_text == t->end_of_text &&
              got.text.count == t->text.count && memcmp(got.text.data, t->text.data, t->text.count) == 0,
          "%s: decodes otherwise", what);
    free(a.data);
    free(b.data);
    tokenizer_free(&got);
}

static void check_change(const Tokenizer* t, bool reads, const char* from, const char* to) {
    char* text = changed_json(t, from, to);
    Tokenizer got;
    if (reads) {
        check_reads(to, t, text);
    } else {
        const bool ok = read_text(&got, text);
        CHECK(!ok && !got.start && got.vocab_size == 0, "%s: is read", to);
        if (ok) tokenizer_free(&got);
    }
    free(text);
}

static void test_reads(const Tokenizer* bytes, const Tokenizer* gpt2, const Tokenizer* small) {
    const Tokenizer* all[] = {bytes, gpt2, small};
    for (int i = 0; i < 3; i++) check_change(all[i], true, NULL, "as it is written");
    // as Hugging Face's own GPT-2, and as newer versions of the library write it
    check_change(small, true, "\"type\": \"BPE\",", "");
    check_change(small, true, ", \"use_regex\": true},\n  \"post_processor\": null",
                 "},\n  \"post_processor\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true}");
    check_change(small, true, "\"continuing_subword_prefix\": null", "\"continuing_subword_prefix\": \"\"");
    check_change(small, true, "\"h e\"", "[\"h\", \"e\"]");
    check_change(small, true, ",\n      \"<|endoftext|>\": 259", "");         // an added token alone
    check_change(bytes, true, "\"use_regex\": false", "\"use_regex\": true"); // nothing is merged
}

static void test_refuses(const Tokenizer* bytes, const Tokenizer* small) {
    check_change(small, false, "\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}");
    check_change(small, false, "\"use_regex\": true", "\"use_regex\": false");
    check_change(small, false, "\"add_prefix_space\": false", "\"add_prefix_space\": true");
    check_change(small, false, "\"pre_tokenizer\": {\"type\": \"ByteLevel\"",
                 "\"pre_tokenizer\": {\"type\": \"Split\"");
    check_change(small, false, "\"dropout\": null", "\"dropout\": 0.1");
    check_change(small, false, "\"dropout\": null", "\"ignore_merges\": true");
    check_change(small, false, "\"type\": \"BPE\"", "\"type\": \"WordPiece\"");
    check_change(small, false, "\"h e\"", "\"h i\"");  // a token that the vocabulary does not have
    check_change(small, false, "\"h e\"", "\"h  e\""); // no pair
    check_change(small, false, "\"h e\"", "7");
    check_change(small, false, "\"!\": 0", "\"!\": 1"); // two tokens of an id
    check_change(small, false, "\"!\": 0,", "");        // none of an id
    check_change(small, false, "\"<|endoftext|>\": 259", "\"<|end|>\": 259");
    check_change(small, false, "\"added_tokens\": [",
                 "\"added_tokens\": [{\"id\": 260, \"content\": \"<pad>\"}, ");
    check_change(small, false, "\"special\": true", "\"special\": false"); // in text it would be the token
    check_change(bytes, false, "\"A\": 65", "\"A\": 66");
    check_change(bytes, false, "\"normalizer\": null", "\"normalizer\": {\"type\": \"Lowercase\"}");
    Tokenizer t;
    CHECK(!read_text(&t, "{}") && !read_text(&t, "[]") && !read_text(&t, "{\"model\": {\"merges\": 1}}"),
          "no tokenizer is read");
}

int main(void) {
    Tokenizer gpt2, bytes, small;
    Error err;
    tokenizer_bytes(&bytes);
    if (!tokenizer_gpt2(&gpt2, VOCAB, &err)) die("%s", err.msg);
    if (!gpt2_parse(&small, "small", SMALL, sizeof SMALL - 1, 3, &err)) die("%s", err.msg);
    test_reads(&bytes, &gpt2, &small);
    test_refuses(&bytes, &small);
    tokenizer_free(&gpt2);
    tokenizer_free(&bytes);
    tokenizer_free(&small);
    return test_report();
}
