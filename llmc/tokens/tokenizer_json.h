/*
A tokenizer as Hugging Face's tokenizer.json (the `tokenizers` library, version 1.0), which AutoTokenizer
opens.

Both tokenizers are byte-level BPE there, with the same ids. Bytes: 256 tokens and end of text, no merges.
GPT-2: the lines of vocab.bpe are the merges, and text is split into words by GPT-2's regular expression.

One thing differs: there, as with Hugging Face's own GPT-2, the text "<|endoftext|>" is encoded as the
end-of-text token. No such token is added before or after a text.

Used by the programs under data/, and by the trainers for checkpoints.
*/
#pragma once

#include "tokenizer.h"

// Appends a text.
static inline void tokenizer_json_put(ByteBuffer* out, const char* text) {
    byte_buffer_append(out, text, strlen(text));
}

// Appends the name of a token as it is between the quotes of a JSON string.
static inline void tokenizer_json_put_name(ByteBuffer* out, const Tokenizer* t, uint32_t id) {
    char name[TOKENIZER_NAME_BYTES];
    json_escape(name, tokenizer_name(t, id, name), out);
}

// Appends the merges, in order: pairs of names.
static inline void tokenizer_json_put_merges(ByteBuffer* out, const Tokenizer* t) {
    uint32_t* pairs = (uint32_t*)xcalloc((size_t)t->vocab_size, sizeof *pairs); // [id]: what is merged to it
    for (size_t i = 0; i < BPE_HASH_SLOTS; i++)
        if (t->merges[i] != BPE_HASH_EMPTY) pairs[(uint32_t)t->merges[i]] = (uint32_t)(t->merges[i] >> 32);
    for (uint32_t id = 256; id < t->end_of_text; id++) {
        tokenizer_json_put(out, id > 256 ? ",\n      \"" : "\n      \"");
        tokenizer_json_put_name(out, t, pairs[id] >> 16);
        tokenizer_json_put(out, " ");
        tokenizer_json_put_name(out, t, pairs[id] & 0xffff);
        tokenizer_json_put(out, "\"");
    }
    free(pairs);
}

// Appends the text of tokenizer.json, in ASCII. Cannot fail. A terminating zero follows, which is not
// counted.
static inline void tokenizer_json(const Tokenizer* t, ByteBuffer* out) {
    char number[32], head[1024];
    const char* splits = t->words ? "true" : "false"; // into words, before merging
    snprintf(head, sizeof head,
             "{\n"
             "  \"version\": \"1.0\",\n"
             "  \"truncation\": null,\n"
             "  \"padding\": null,\n"
             "  \"added_tokens\": [{\"id\": %u, \"content\": \"<|endoftext|>\", \"single_word\": false, "
             "\"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": true}],\n"
             "  \"normalizer\": null,\n"
             "  \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
             "\"trim_offsets\": true, \"use_regex\": %s},\n"
             "  \"post_processor\": null,\n"
             "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
             "\"use_regex\": %s},\n"
             "  \"model\": {\n"
             "    \"type\": \"BPE\",\n"
             "    \"dropout\": null,\n"
             "    \"unk_token\": null,\n"
             "    \"continuing_subword_prefix\": null,\n"
             "    \"end_of_word_suffix\": null,\n"
             "    \"fuse_unk\": false,\n"
             "    \"byte_fallback\": false,\n"
             "    \"vocab\": {",
             t->end_of_text, splits, splits);
    tokenizer_json_put(out, head);
    for (uint32_t id = 0; id < t->vocab_size; id++) {
        tokenizer_json_put(out, id ? ",\n      \"" : "\n      \"");
        tokenizer_json_put_name(out, t, id);
        snprintf(number, sizeof number, "\": %u", id);
        tokenizer_json_put(out, number);
    }
    tokenizer_json_put(out, "\n    },\n    \"merges\": [");
    if (t->merges) tokenizer_json_put_merges(out, t);
    tokenizer_json_put(out, "\n    ]\n  }\n}\n");
}
