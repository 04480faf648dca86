/*
The hash of a vocabulary, by which a trainer notices that data was encoded with another tokenizer than its
model's. Data shards have it (shard.h); of a model it follows from its tokenizer.json (tokens/vocab_check.h).

    hash = sum over ids of hash64(id, the token's name) modulo 2^64; 1 if that is 0

A name is that of Hugging Face's tokenizer.json (tokenizer_name). The hash tells nothing of merges or
normalization.
*/
#pragma once

#include "../base/checksum.h"
#include "tokenizer.h"

// Continues the sum, which starts at 0, with a token.
static inline uint64_t vocab_hash_add(uint64_t sum, int64_t id, const char* name, size_t bytes) {
    return sum + hash64((uint64_t)id, name, bytes);
}

static inline uint64_t vocab_hash_end(uint64_t sum) { return sum ? sum : 1; }

// The hash of a tokenizer's vocabulary.
static inline uint64_t vocab_hash(const Tokenizer* t) {
    char name[TOKENIZER_NAME_BYTES];
    uint64_t sum = 0;
    for (uint32_t id = 0; id < t->vocab_size; id++)
        sum = vocab_hash_add(sum, id, name, tokenizer_name(t, id, name));
    return vocab_hash_end(sum);
}
