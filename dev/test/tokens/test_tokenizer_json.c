/*
Tests of llmc/tokens/tokenizer_json.h: the text parsed back. dev/test/hf/test_hf_trained.py compares it with
Hugging Face's own tokenizers.
*/
#include "../check.h"
#include "../../../llmc/formats/json.h"
#include "../../../llmc/tokens/tokenizer_json.h"

static const char VOCAB[] = "dev/test/fixtures/gpt2/vocab.bpe";

// Every id has the name that stands for its bytes, in vocab.bpe's characters.
static void check_names(const Tokenizer* t, const Json* j) {
    uint32_t symbol_of[256];
    uint8_t byte_of[GPT2_SYMBOLS] = {0}, name_bytes[GPT2_TOKEN_BYTES];
    const int vocab = json_get(j, json_get(j, 0, "model"), "vocab");
    int64_t id = 0, found = -1, wrong = 0;
    gpt2_symbols(symbol_of);
    for (int i = 0; i < 256; i++) byte_of[symbol_of[i]] = (uint8_t)i;
    CHECK(json_count(j, vocab) == t->vocab_size, "%d names", json_count(j, vocab));
    for (int i = json_first(j, vocab); i >= 0; i = json_next(j, i), id++) {
        const char* name = json_key(j, i);
        size_t bytes, n = gpt2_symbol(name, strlen(name), byte_of, name_bytes);
        const char* token = tokenizer_decode(t, (uint32_t)id, &bytes);
        wrong += !json_int64(j, i, &found) || found != id || n != bytes || memcmp(token, name_bytes, n) != 0;
    }
    CHECK(wrong == 0, "%d names or ids are wrong", (int)wrong);
}

// The merges are the lines of vocab.bpe.
static void check_merges(const Json* j) {
    Error err;
    size_t bytes;
    char *file = read_file(VOCAB, &bytes, &err), *line = file;
    if (!file) die("%s", err.msg);
    const int merges = json_get(j, json_get(j, 0, "model"), "merges");
    int wrong = 0;
    strsep(&line, "\n"); // the version
    for (int i = json_first(j, merges); i >= 0; i = json_next(j, i))
        wrong += strcmp(json_string(j, i), strsep(&line, "\n")) != 0;
    CHECK(wrong == 0 && line && *line == '\0', "%d merges differ, then '%.20s'", wrong, line);
    free(file);
}

static void test_tokenizer_json(const Tokenizer* t) {
    ByteBuffer text = {NULL, 0, 0};
    Json j;
    Error err;
    int64_t id = 0;
    bool special = false, splits = false;
    tokenizer_json(t, &text);
    CHECK(strlen(text.data) == text.count, "counts %d bytes", (int)text.count);
    size_t ascii = 0;
    while (ascii < text.count && (uint8_t)text.data[ascii] < 128) ascii++;
    CHECK(ascii == text.count, "byte %d is not ASCII", (int)ascii);
    if (!json_parse(&j, "tokenizer.json", text.data, text.count, &err)) die("%s", err.msg);
    const int added = json_get(&j, 0, "added_tokens"), end = json_first(&j, added);
    CHECK(json_count(&j, added) == 1 && json_int64(&j, json_get(&j, end, "id"), &id) &&
              id == t->end_of_text && json_bool(&j, json_get(&j, end, "special"), &special) && special &&
              strcmp(json_string(&j, json_get(&j, end, "content")), "<|endoftext|>") == 0,
          "the end-of-text token has id %d", (int)id);
    json_bool(&j, json_get(&j, json_get(&j, 0, "pre_tokenizer"), "use_regex"), &splits);
    CHECK(splits == (t->words != NULL), "splits into words: %d", splits);
    check_names(t, &j);
    if (t->merges) check_merges(&j);
    if (!t->merges)
        CHECK(json_count(&j, json_get(&j, json_get(&j, 0, "model"), "merges")) == 0, "bytes have merges");
    json_free(&j);
    free(text.data);
}

int main(void) {
    Tokenizer gpt2, bytes;
    Error err;
    tokenizer_bytes(&bytes);
    if (!tokenizer_gpt2(&gpt2, VOCAB, &err)) die("%s", err.msg);
    test_tokenizer_json(&gpt2);
    test_tokenizer_json(&bytes);
    tokenizer_free(&gpt2);
    tokenizer_free(&bytes);
    return test_report();
}
