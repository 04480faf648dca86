/*
Does the data of a run have the tokenizer of its model? Both are known by the hash of their vocabularies
(tokens/vocab_hash.h): the data's from the headers of its shards, the model's from a tokenizer.json.

Called by shares.h, data.h and data/ids_to_shards.
*/
#pragma once

#include "../formats/json.h"
#include "vocab_hash.h"

enum { VOCAB_CHECK_IDS = 1 << 24 }; // more ids than any vocabulary has

// Adds a token to the sum, unless one of its id was added before: added tokens may repeat the model's.
static inline void vocab_check_add(uint64_t* sum, bool* seen, int64_t id, const char* name) {
    if (!name || id < 0 || id >= VOCAB_CHECK_IDS || seen[id]) return;
    seen[id] = true;
    *sum = vocab_hash_add(*sum, id, name, strlen(name));
}

// The hash of the vocabulary in the text of a tokenizer.json; 0 if it cannot be parsed. Its model's tokens
// are an object of names with ids (BPE, WordPiece) or a list of names with scores (Unigram).
static inline uint64_t vocab_hash_of_text(const char* text, size_t bytes) {
    Error ignored;
    Json j;
    if (!json_parse_tokenizer(&j, "", text, bytes, &ignored)) return 0;
    const int vocab = json_get(&j, json_get(&j, 0, "model"), "vocab");
    bool* seen = (bool*)xcalloc(VOCAB_CHECK_IDS, sizeof *seen);
    uint64_t sum = 0;
    int64_t id = 0;
    for (int token = json_first(&j, vocab); token >= 0; token = json_next(&j, token), id++) {
        if (json_is(&j, vocab, JSON_ARRAY))
            vocab_check_add(&sum, seen, id, json_string(&j, json_first(&j, token)));
        else if (json_int64(&j, token, &id))
            vocab_check_add(&sum, seen, id, json_key(&j, token));
    }
    const int added = json_get(&j, 0, "added_tokens");
    for (int token = json_first(&j, added); token >= 0; token = json_next(&j, token))
        if (json_int64(&j, json_get(&j, token, "id"), &id))
            vocab_check_add(&sum, seen, id, json_string(&j, json_get(&j, token, "content")));
    const bool empty = json_count(&j, vocab) == 0;
    free(seen);
    json_free(&j);
    return empty ? 0 : vocab_hash_end(sum);
}

// The same of a file; 0 if it cannot be read.
static inline uint64_t vocab_hash_of_file(const char* path) {
    Error ignored;
    size_t bytes;
    char* text = read_file(path, &bytes, &ignored);
    const uint64_t hash = text ? vocab_hash_of_text(text, bytes) : 0;
    free(text);
    return hash;
}

// Whether two vocabularies are known and differ.
static inline bool vocab_differs(uint64_t a, uint64_t b) { return a && b && a != b; }
