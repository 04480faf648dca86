/*
A tokenizer.json (Hugging Face's `tokenizers`, version 1.0) as a Tokenizer of tokens/tokenizer.h, whoever has
written it: the byte tokenizer, GPT-2's, or one that differs from GPT-2's in its merges alone.

What is taken encodes text as scripts/make_shards.py does. Every name and id is compared, so that the file of
another tokenizer is never mistaken for one of these; scripts/ encode with those and send token ids. As
elsewhere here, the text "<|endoftext|>" is ordinary text, and no such token is added: what the file says of
special tokens in text, and its post-processor, does not matter. An added token that is not special would be
that token in text, too.

Called by serve/generate.h and train.h.
*/
#pragma once

#include "../../formats/json.h"
#include "../../tokens/tokenizer_json.h"

// Is a member of an object absent, null, false or an empty text?
static inline bool tokenizer_json_unset(const Json* j, int object, const char* name) {
    const int node = json_get(j, object, name);
    const char* text = json_string(j, node);
    bool value = true;
    if (node < 0 || json_is_null(j, node) || (text && !*text)) return true;
    return json_bool(j, node, &value) && !value;
}

// Is the file byte-level BPE without what would change ids: a normalizer, a prefix, another lookup? *splits:
// text is split into words by GPT-2's regular expression.
static inline bool tokenizer_json_byte_level(const Json* j, bool* splits) {
    static const char* const unset[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix",
                                        "ignore_merges"};
    const int model = json_get(j, 0, "model"), pre_tokenizer = json_get(j, 0, "pre_tokenizer");
    const char *type = json_string(j, json_get(j, model, "type")),
               *split = json_string(j, json_get(j, pre_tokenizer, "type"));
    *splits = true; // where the member is absent
    json_bool(j, json_get(j, pre_tokenizer, "use_regex"), splits);
    for (size_t i = 0; i < sizeof unset / sizeof *unset; i++)
        if (!tokenizer_json_unset(j, model, unset[i])) return false;
    return (!type || strcmp(type, "BPE") == 0) && split && strcmp(split, "ByteLevel") == 0 &&
           tokenizer_json_unset(j, pre_tokenizer, "add_prefix_space") &&
           tokenizer_json_unset(j, 0, "normalizer");
}

// Makes a tokenizer of the file's merges, texts "A B" or pairs, as if they were the lines of a vocab.bpe.
static inline bool tokenizer_json_merges(Tokenizer* t, const Json* j, int merges) {
    Error ignored;
    ByteBuffer lines = {NULL, 0, 0};
    tokenizer_json_put(&lines, "#version: 0.2\n");
    for (int i = json_first(j, merges); i >= 0; i = json_next(j, i)) {
        const int left = json_first(j, i);
        const char *text = json_string(j, left < 0 ? i : left), *right = json_string(j, json_next(j, left));
        if (text) tokenizer_json_put(&lines, text);
        if (right) tokenizer_json_put(&lines, " "), tokenizer_json_put(&lines, right);
        tokenizer_json_put(&lines, "\n");
    }
    const bool ok = json_count(j, merges) <= GPT2_MERGES &&
                    gpt2_parse(t, "tokenizer.json", lines.data, lines.count, json_count(j, merges), &ignored);
    free(lines.data);
    return ok;
}

// Is `name` that of the token with an id?
static inline bool tokenizer_json_is_name(const Tokenizer* t, int64_t id, const char* name) {
    char ours[TOKENIZER_NAME_BYTES];
    if (!name || id < 0 || id >= t->vocab_size) return false;
    tokenizer_name(t, (uint32_t)id, ours);
    return strcmp(name, ours) == 0;
}

// Does the file have these tokens and no others? End of text may be an added token alone, a special one.
static inline bool tokenizer_json_same_names(const Tokenizer* t, const Json* j) {
    const int vocab = json_get(j, json_get(j, 0, "model"), "vocab"), added = json_get(j, 0, "added_tokens");
    bool same = true, ends = false, special = true;
    int64_t id = -1;
    for (int i = json_first(j, vocab); same && i >= 0; i = json_next(j, i)) {
        same = json_int64(j, i, &id) && tokenizer_json_is_name(t, id, json_key(j, i));
        ends = ends || id == t->end_of_text;
    }
    const int64_t missing = t->vocab_size - json_count(j, vocab); // names differ, so no id comes twice
    for (int i = json_first(j, added); same && i >= 0; i = json_next(j, i))
        same = json_int64(j, json_get(j, i, "id"), &id) && id == t->end_of_text &&
               !(json_bool(j, json_get(j, i, "special"), &special) && !special) &&
               tokenizer_json_is_name(t, id, json_string(j, json_get(j, i, "content")));
    return same && (missing == 0 || (missing == 1 && !ends && json_count(j, added) > 0));
}

// Creates the tokenizer of a parsed tokenizer.json, to be freed with tokenizer_free. False, and *t is empty,
// if it is neither the byte tokenizer nor of GPT-2's form.
static inline bool tokenizer_read_json(Tokenizer* t, const Json* j) {
    const int merges = json_get(j, json_get(j, 0, "model"), "merges");
    bool splits;
    memset(t, 0, sizeof *t);
    if (!tokenizer_json_byte_level(j, &splits)) return false;
    if (json_count(j, merges) == 0)
        tokenizer_bytes(t);
    else if (!splits || !tokenizer_json_merges(t, j, merges))
        return false;
    if (tokenizer_json_same_names(t, j)) return true;
    tokenizer_free(t);
    return false;
}
