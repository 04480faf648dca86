/*
Rolls documents of D tokens: each becomes tokens [o, D) and then [0, o) of itself, with an offset o drawn from a seed
and from its number in its split. What stands at the beginning of files is then at any position, so that the loss by
position does not mix content with the length of the context (arXiv 2503.02130, appendix B). Called by text_to_shards
and ids_to_shards.
*/
#pragma once

#include "../llmc/base/random.h"
#include "../llmc/tokens/shard.h"

static inline void roll_reverse(uint32_t* tokens, int64_t count) {
    for (int64_t i = 0, k = count - 1; i < k; i++, k--) {
        const uint32_t token = tokens[i];
        tokens[i] = tokens[k], tokens[k] = token;
    }
}

// Rolls the documents that the writer of a split gets next.
static inline void roll_documents(uint32_t* tokens, int64_t count, const ShardWriter* writer, int split,
                                  int64_t seed) {
    const int64_t D = writer->header.doc_len;
    for (int64_t i = 0; i < count / D; i++) {
        const uint64_t number = (uint64_t)(writer->total / D + i);
        const int64_t o = (int64_t)(random_u64((uint64_t)seed, (uint64_t)split, number) % (uint64_t)D);
        roll_reverse(tokens + i * D, o);
        roll_reverse(tokens + i * D + o, D - o);
        roll_reverse(tokens + i * D, D);
    }
}
