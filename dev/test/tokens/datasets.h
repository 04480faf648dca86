/*
Helpers of the tests of shards and loaders: datasets whose tokens follow from a formula.
*/
#pragma once

#include "../scratch.h"
#include "../../../llmc/base/random.h"
#include "../../../data/shard_writer.h"

// Checks that a call with an Error `err` succeeds, or fails with `expected` in its message.
#define CHECK_OK(call)              CHECK(call, "%s", err.msg)
#define CHECK_FAILS(expected, call) CHECK(!(call) && strstr(err.msg, expected), "%s", err.msg)

// Token number i of every test dataset, below vocab_size.
static inline uint32_t token(int64_t i, int64_t vocab_size) {
    return (uint32_t)(random_u64(123, 0, (uint64_t)i) % (uint64_t)vocab_size);
}

// Whether it counts in a dataset with a mask.
static inline bool token_counts(int64_t i) { return random_u64(321, 0, (uint64_t)i) % 3 == 0; }

// Writes tokens [0, count) with the shard writer, in pieces of varying sizes.
static inline void write_set_masked(const char* prefix, int64_t vocab_size, int64_t doc_len,
                                    int64_t shard_tokens, int64_t count, bool masked) {
    ShardWriter w;
    Error err = {""};
    uint32_t piece[97];
    bool ok = shard_writer_open(&w, in_folder(prefix), "train", vocab_size, doc_len, shard_tokens, &err);
    if (masked) shard_writer_mask(&w);
    for (int64_t i = 0; ok && i < count;) {
        int64_t n = 1 + (i * 7) % 97;
        if (n > count - i) n = count - i;
        for (int64_t j = 0; j < n; j++)
            piece[j] = token(i + j, vocab_size) | (masked && token_counts(i + j) ? SHARD_COUNTS : 0);
        ok = shard_write(&w, piece, n, &err);
        i += n;
    }
    ok = ok && shard_writer_close(&w, &err);
    CHECK_OK(ok);
}

static inline void write_set(const char* prefix, int64_t vocab_size, int64_t doc_len, int64_t shard_tokens,
                             int64_t count) {
    write_set_masked(prefix, vocab_size, doc_len, shard_tokens, count, false);
}

// Turns a shard of the shard writer into one without set and checksums, like a file of llm.c.
static inline void strip_checks(const char* name) {
    static const char zeros[SHARD_HEADER_BYTES - 5 * 4];
    int fd = open(in_folder(name), O_WRONLY);
    bool ok = fd >= 0 && pwrite(fd, zeros, sizeof zeros, 5 * 4) == (ssize_t)sizeof zeros;
    if (!ok || close(fd) != 0) die("%s: cannot write", name);
}

// Writes a file without the shard writer: five header fields, and `count` tokens of 2 or (version 2, 3) 4
// bytes.
static inline void write_file(const char* name, int magic, int version, int tokens, int doc_len,
                              int vocab_size, int count) {
    int32_t header[256] = {magic, version, tokens, doc_len, vocab_size};
    FILE* f = fopen(in_folder(name), "wb");
    bool ok = f && fwrite(header, sizeof header, 1, f) == 1;
    for (int i = 0; ok && i < count; i++) {
        uint32_t id = token(i, 50257);
        ok = fwrite(&id, version == 2 || version == 3 ? 4 : 2, 1, f) == 1;
    }
    if (!ok || fclose(f) != 0) die("%s: cannot write", name);
}
