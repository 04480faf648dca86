/*
The tokenizer of a checkpoint folder: tokenizer.json and tokenizer_config.json, which AutoTokenizer opens.

It is read once, at the start of a run (hf_tokenizer_find), from beside the first data shard, or else from the
folder that the run starts from, and kept as text. Called on rank 0, by data.h and generate.h.
*/
#pragma once

#include "../../formats/json.h"
#include "../../model/config.h"
#include "../../tokens/shard_set.h"
#include "../../tokens/tokenizer_json.h"

enum { HF_TOKENIZER_BYTES = 64 << 20 }; // limit for the files that are read; GPT-2's has 2.4 MB

// The tokenizer's files. All NULL: the tokenizer is not known.
typedef struct {
    char* json;   // the text of tokenizer.json
    char* config; // of tokenizer_config.json
} HfTokenizer;

static inline void hf_tokenizer_free(HfTokenizer* t) {
    free(t->json);
    free(t->config);
    memset(t, 0, sizeof *t);
}

// Reads a text; NULL without an error if the file does not exist. False if it cannot be one of the
// tokenizer's.
static inline bool hf_read(char** text, const char* path, Error* err) {
    struct stat st;
    size_t bytes;
    *text = NULL;
    if (stat(path, &st) != 0)
        return errno == ENOENT || fail(err, "%s: cannot read: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) return fail(err, "%s: is not a regular file", path);
    if (st.st_size > HF_TOKENIZER_BYTES)
        return fail(err, "%s: has %lld bytes, more than a tokenizer's file can have (%d)", path,
                    (long long)st.st_size, HF_TOKENIZER_BYTES);
    *text = read_file(path, &bytes, err);
    if (!*text || strlen(*text) == bytes) return *text != NULL;
    free(*text);
    *text = NULL;
    return fail(err, "%s: is not JSON: it has a zero byte", path);
}

// Checks the text of a tokenizer.json: its ids fit into the model's vocabulary. Sets *end_of_text to the name
// of the model's end-of-text token, to be freed; NULL if the tokenizer has none with its id.
static inline bool hf_check_tokenizer(const char* path, const char* text, const Config* c, char** end_of_text,
                                      Error* err) {
    Json j;
    bool valid = true;
    *end_of_text = NULL;
    if (!json_parse(&j, path, text, strlen(text), err)) return false;
    const int vocab = json_get(&j, json_get(&j, 0, "model"), "vocab");
    const int added = json_get(&j, 0, "added_tokens");
    const bool list = json_is(&j, vocab, JSON_ARRAY); // as Unigram models have: of pairs
    int64_t id = 0, largest = list ? json_count(&j, vocab) - 1 : -1;
    for (int i = list ? -1 : json_first(&j, vocab); i >= 0; i = json_next(&j, i)) {
        valid = valid && json_int64(&j, i, &id) && id >= 0;
        if (id > largest) largest = id;
    }
    for (int i = json_first(&j, added); i >= 0; i = json_next(&j, i)) {
        const char* name = json_string(&j, json_get(&j, i, "content"));
        valid = valid && name && json_int64(&j, json_get(&j, i, "id"), &id) && id >= 0;
        if (id > largest) largest = id;
        if (valid && !*end_of_text && id == config_end_of_text(c)) *end_of_text = xstrdup(name);
    }
    json_free(&j);
    if (valid && largest >= 0 && largest < c->vocab_size) return true;
    free(*end_of_text);
    *end_of_text = NULL;
    if (!valid || largest < 0)
        return fail(err, "%s: is not a tokenizer: it has no model.vocab with a number for each token", path);
    return fail(err, "%s: has the token id %lld, but the model's vocabulary has %lld tokens", path,
                (long long)largest, (long long)c->vocab_size);
}

// Composes tokenizer_config.json, to be freed. Without model_max_length: transformers warns of every longer
// text that it leads to indexing errors, and these models read any length.
static inline char* hf_compose_config(const char* end_of_text, bool json_escape) {
    JsonWriter w = json_writer(2);
    json_begin_object(&w, NULL);
    json_put_string(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    if (end_of_text) json_put_string(&w, "bos_token", end_of_text);
    if (end_of_text) json_put_string(&w, "eos_token", end_of_text);
    json_put_bool(&w, "clean_up_tokenization_spaces", false);
    json_begin_array(&w, "model_input_names"); // without token_type_ids, which the model does not have
    json_put_string(&w, NULL, "input_ids");
    json_put_string(&w, NULL, "attention_mask");
    json_end(&w);
    if (json_escape)
        json_put_string(
            &w, "text_format",
            "The model's text is JSON-escaped: escape a text before encoding it (a line break is \\n, "
            "a non-ASCII character \\uXXXX), and unescape what was decoded.");
    json_end(&w);
    return w.text;
}

// Takes the text of a tokenizer.json, and that of its tokenizer_config.json, or NULL to compose one. `path`
// names the former. On error *t is empty and both texts are freed.
static inline bool hf_tokenizer_set(HfTokenizer* t, const char* path, char* json, char* config,
                                    const Config* c, bool json_escape, Error* err) {
    char* end_of_text;
    t->json = json;
    t->config = config;
    const bool ok = hf_check_tokenizer(path, json, c, &end_of_text, err);
    if (ok && !config) t->config = hf_compose_config(end_of_text, json_escape);
    free(end_of_text);
    if (!ok) hf_tokenizer_free(t);
    return ok;
}

// Finds the tokenizer of a run: PREFIX_tokenizer.json beside `shard`, the first of the training data, or else
// the files in `folder` (NULL: none), a checkpoint or Hugging Face folder. *t is empty if there is neither.
// Free with hf_tokenizer_free. Fails, with nothing to free, if a file is there but is not a tokenizer of the
// model.
static inline bool hf_tokenizer_find(HfTokenizer* t, const char* shard, const char* folder, const Config* c,
                                     bool json_escape, Error* err) {
    char path[PATH_LENGTH], config_path[PATH_LENGTH];
    char *json = NULL, *config = NULL;
    Json ignored;
    memset(t, 0, sizeof *t);
    if (shard_tokenizer_beside(path, shard) && !hf_read(&json, path, err)) return false;
    if (!json && folder) {
        path_join(path, folder, "tokenizer.json");
        path_join(config_path, folder, "tokenizer_config.json");
        if (!hf_read(&json, path, err)) return false;
        bool ok = !json || hf_read(&config, config_path, err);
        if (ok && config) {
            ok = json_parse(&ignored, config_path, config, strlen(config), err);
            if (ok) json_free(&ignored);
        }
        if (!ok) {
            free(json);
            free(config);
            return false;
        }
    }
    return !json || hf_tokenizer_set(t, path, json, config, c, json_escape, err);
}
