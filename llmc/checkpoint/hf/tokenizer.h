/*
The tokenizer of a checkpoint folder: tokenizer.json and tokenizer_config.json, which AutoTokenizer opens.

It is read once, at the start of a run (hf_tokenizer_find): the file beside the first data shard, or else that
of the folder from which the run starts. It is kept as text that gives the ids of training. Called on rank 0,
by data.h and generate.h.
*/
#pragma once

#include "../../config/config.h"
#include "../../formats/json_writer.h"
#include "../../tokens/shard.h"
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
        return fail(err, "%s: has %s, more than a tokenizer's file can have (%d)", path,
                    counted(st.st_size, "byte").text, HF_TOKENIZER_BYTES);
    *text = read_file(path, &bytes, err);
    if (!*text || strlen(*text) == bytes) return *text != NULL;
    free(*text);
    *text = NULL;
    return fail(err, "%s: is not JSON: it has a zero byte", path);
}

// The name of the token with an id; NULL if there is none. `vocab` has names with ids, or, as a Unigram
// model's, pairs of a name and a score.
static inline const char* hf_token_name(const Json* j, int vocab, int added, int64_t wanted) {
    int64_t id = -1;
    for (int i = json_first(j, added); i >= 0; i = json_next(j, i))
        if (json_int64(j, json_get(j, i, "id"), &id) && id == wanted)
            return json_string(j, json_get(j, i, "content"));
    const bool list = json_is(j, vocab, JSON_ARRAY);
    int64_t index = 0;
    for (int i = json_first(j, vocab); i >= 0; i = json_next(j, i), index++)
        if (list ? index == wanted : json_int64(j, i, &id) && id == wanted)
            return list ? json_string(j, json_first(j, i)) : json_key(j, i);
    return NULL;
}

// Checks a parsed tokenizer.json: its ids fit into the model's vocabulary.
static inline bool hf_check_tokenizer(const char* path, const Json* j, const Config* c, Error* err) {
    bool valid = true;
    const int vocab = json_get(j, json_get(j, 0, "model"), "vocab"), added = json_get(j, 0, "added_tokens");
    const bool list = json_is(j, vocab, JSON_ARRAY);
    int64_t id = 0, largest = list ? json_count(j, vocab) - 1 : -1;
    for (int i = list ? -1 : json_first(j, vocab); i >= 0; i = json_next(j, i)) {
        valid = valid && json_int64(j, i, &id) && id >= 0;
        if (id > largest) largest = id;
    }
    for (int i = json_first(j, added); i >= 0; i = json_next(j, i)) {
        const bool named = json_string(j, json_get(j, i, "content")) != NULL;
        valid = valid && named && json_int64(j, json_get(j, i, "id"), &id) && id >= 0;
        if (id > largest) largest = id;
    }
    if (!valid || largest < 0)
        return fail(err, "%s: is not a tokenizer: it has no model.vocab with a number for each token", path);
    if (largest < c->vocab_size) return true;
    return fail(err, "%s: has the token id %lld, but the model's vocabulary has %s", path, (long long)largest,
                counted(c->vocab_size, "token").text);
}

// The text of a parsed tokenizer.json, to be freed, in which null stands for what shards are encoded without
// (scripts/common.py): tokens added to a text, its truncation and padding, and merges that are left out at
// random.
static inline char* hf_as_in_training(const Json* j, const char* text) {
    const int nodes[] = {json_get(j, 0, "truncation"), json_get(j, 0, "padding"),
                         json_get(j, 0, "post_processor"), json_get(j, json_get(j, 0, "model"), "dropout")};
    ByteBuffer out = {NULL, 0, 0};
    size_t at = 0;
    for (;;) {
        const JsonNode* next = NULL; // the first one behind `at`
        for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
            const JsonNode* node = nodes[i] < 0 ? NULL : &j->nodes[nodes[i]];
            if (node && node->begin >= at && (!next || node->begin < next->begin)) next = node;
        }
        if (!next) break;
        byte_buffer_append(&out, text + at, next->begin - at);
        byte_buffer_append(&out, "null", 4);
        at = next->end;
    }
    byte_buffer_append(&out, text + at, strlen(text + at));
    return out.data;
}

// Composes tokenizer_config.json, to be freed; end_of_text: NULL where that token has no name. Without
// model_max_length: transformers warns of every longer text that it leads to indexing errors, and these
// models read any length.
static inline char* hf_compose_config(const Json* j, const char* end_of_text, bool json_escape) {
    bool prefix_space = false; // transformers 4 switches the file's off where the config does not have it
    json_bool(j, json_get(j, json_get(j, 0, "pre_tokenizer"), "add_prefix_space"), &prefix_space);
    JsonWriter w = json_writer(2);
    json_begin_object(&w, NULL);
    json_put_string(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    if (end_of_text) json_put_string(&w, "bos_token", end_of_text);
    if (end_of_text) json_put_string(&w, "eos_token", end_of_text);
    json_put_bool(&w, "add_bos_token", false);
    if (prefix_space) json_put_bool(&w, "add_prefix_space", true);
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

// Makes the tokenizer's files from the text of a tokenizer.json, which is freed. `path` names it. On error *t
// is empty.
static inline bool hf_tokenizer_set(HfTokenizer* t, const char* path, char* text, const Config* c,
                                    bool json_escape, Error* err) {
    Json j;
    memset(t, 0, sizeof *t);
    bool ok = json_parse_tokenizer(&j, path, text, strlen(text), err);
    if (ok && (ok = hf_check_tokenizer(path, &j, c, err))) {
        const int vocab = json_get(&j, json_get(&j, 0, "model"), "vocab");
        const char* end = hf_token_name(&j, vocab, json_get(&j, 0, "added_tokens"), config_end_of_text(c));
        if (end && strstr(end, json_zero)) end = NULL; // no name that this program could write
        t->json = hf_as_in_training(&j, text);
        t->config = hf_compose_config(&j, end, json_escape);
    }
    json_free(&j);
    free(text);
    return ok;
}

// Finds the tokenizer of a run: PREFIX_tokenizer.json beside `shard`, the first of the training data, or else
// tokenizer.json in `folder` (NULL: none), a checkpoint or Hugging Face folder. The latter's
// tokenizer_config.json is not taken: shards are encoded without what it switches on. *t is empty if there is
// neither. Free with hf_tokenizer_free. Fails, with nothing to free, if a file is there but is not a
// tokenizer of the model.
static inline bool hf_tokenizer_find(HfTokenizer* t, const char* shard, const char* folder, const Config* c,
                                     bool json_escape, Error* err) {
    char path[PATH_LENGTH], *text = NULL;
    memset(t, 0, sizeof *t);
    if (shard_tokenizer_beside(path, shard) && !hf_read(&text, path, err)) return false;
    if (!text && folder) {
        path_join(path, folder, "tokenizer.json");
        if (!hf_read(&text, path, err)) return false;
    }
    return !text || hf_tokenizer_set(t, path, text, c, json_escape, err);
}
