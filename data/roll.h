/*
Rolls documents of D tokens: each becomes tokens [o, D) and then [0, o) of itself, with an offset o drawn from
a seed and from its number in its split, as --eval --roll has it. What stands at the beginning of files is
then at any position, so that the loss by position does not mix content with the length of the context (arXiv
2503.02130, appendix B). Called by splits.h and longcrawl64.
*/
#pragma once

#include "../llmc/base/common.h"
#include "../llmc/base/random.h"

static inline void roll_reverse(uint32_t* tokens, int64_t count) {
    for (int64_t i = 0, k = count - 1; i < k; i++, k--) {
        const uint32_t token = tokens[i];
        tokens[i] = tokens[k], tokens[k] = token;
    }
}

// Rolls a document, of this number in its split.
static inline void roll_document(uint32_t* tokens, int64_t D, int64_t number, int64_t seed) {
    const int64_t o = (int64_t)(random_u64((uint64_t)seed, 0, (uint64_t)number) % (uint64_t)D);
    roll_reverse(tokens, o);
    roll_reverse(tokens + o, D - o);
    roll_reverse(tokens, D);
}

// Keeps the seed of a conversion that may be interrupted in PREFIX_SPLIT_roll.txt. Fails where it has begun,
// with another seed; -1: not rolled.
static inline bool roll_record(const char* prefix, const char* split, int64_t seed, bool begun, Error* err) {
    char path[PATH_LENGTH], text[32], none[] = "";
    size_t bytes;
    if (snprintf(path, sizeof path, "%s_%s_roll.txt", prefix, split) >= (int)sizeof path)
        return fail(err, "%s: this prefix is too long", prefix);
    snprintf(text, sizeof text, "%lld\n", (long long)seed);
    if (!begun && seed >= 0) return write_text_file(path, text, err);
    if (!begun)
        return unlink(path) == 0 || errno == ENOENT ||
               fail(err, "%s: cannot delete: %s", path, strerror(errno));
    char* was = access(path, F_OK) == 0 ? read_file(path, &bytes, err) : none;
    if (!was) return false;
    const bool same = strcmp(was, seed < 0 ? none : text) == 0;
    was[strcspn(was, "\n")] = '\0';
    if (!same)
        fail(err, "--roll: %s_%s_*.bin were made %s %s; remove these shards, or choose another --out", prefix,
             split, *was ? "with --roll" : "without", *was ? was : "it");
    if (was != none) free(was);
    return same;
}
