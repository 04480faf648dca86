/*
A fingerprint of a dataset: a hash by which a resumed run notices that its data is not what it was trained on.

It covers the number of sequences; the header fields of every shard, in order, with the checksums of its
blocks; of a mixture the parts' shares and sizes; and FINGERPRINT_SAMPLES blocks of FINGERPRINT_BLOCK bytes,
at equal distances in the tokens of all shards. A dataset that is not larger than these blocks is covered
completely. Names are not covered: a folder may be moved. Where shards have no checksums, a changed token
outside the samples is not noticed.

Recorded in a checkpoint's trainer.json.
*/
#pragma once

#include "../base/checksum.h"
#include "dataset.h"

enum { FINGERPRINT_SAMPLES = 64, FINGERPRINT_BLOCK = 4096 };

// Bytes of a shard's tokens.
static inline int64_t fingerprint_shard_bytes(const DataShard* shard) {
    return shard->header.tokens * shard->header.bytes_per_token;
}

// Continues *hash with bytes [offset, offset + bytes) of the tokens of all shards, at most FINGERPRINT_BLOCK.
static inline bool fingerprint_add(const Dataset* set, int64_t offset, int64_t bytes, uint64_t* hash,
                                   Error* err) {
    char block[FINGERPRINT_BLOCK];
    int64_t filled = 0;
    for (int64_t i = 0; i < set->num_shards && filled < bytes; i++) {
        const DataShard* shard = &set->shards[i];
        const int64_t size = fingerprint_shard_bytes(shard);
        if (offset >= size) {
            offset -= size;
            continue;
        }
        int fd = -1;
        const int64_t n = bytes - filled < size - offset ? bytes - filled : size - offset;
        if (!shard_open(shard->path, &fd, err)) return false;
        bool ok = shard_pread(fd, shard->path, block + filled, (size_t)n, SHARD_HEADER_BYTES + offset, err);
        close(fd);
        if (!ok) return false;
        filled += n;
        offset = 0;
    }
    *hash = hash64(*hash, block, (size_t)filled);
    return true;
}

// Sets *hash, never 0, to the fingerprint of an open dataset. Reads at most 256 KiB. Fails if a shard
// cannot be read.
static inline bool dataset_fingerprint(const Dataset* set, uint64_t* hash, Error* err) {
    int64_t total = 0;
    *hash = hash64(0, &set->sequences, sizeof set->sequences);
    for (int k = 0; k < set->mixture.count && set->mixture.count > 1; k++) {
        const MixturePart* part = &set->mixture.parts[k];
        const uint64_t fields[] = {part->fraction, (uint64_t)part->sequences};
        *hash = hash64(*hash, fields, sizeof fields);
    }
    for (int64_t i = 0; i < set->num_shards; i++) {
        const ShardHeader* h = &set->shards[i].header;
        const int64_t format = h->masked ? 3 * 4 : h->bytes_per_token;
        const int64_t fields[] = {h->tokens, h->doc_len, h->vocab_size, format};
        *hash = hash64(*hash, fields, sizeof fields);
        if (h->block_tokens)
            *hash = hash64(*hash, h->checksums, (size_t)shard_blocks(h) * sizeof *h->checksums);
        total += fingerprint_shard_bytes(&set->shards[i]);
    }
    const int64_t block = FINGERPRINT_BLOCK, samples = FINGERPRINT_SAMPLES;
    if (total <= samples * block) {
        for (int64_t at = 0; at < total; at += block)
            if (!fingerprint_add(set, at, total - at < block ? total - at : block, hash, err)) return false;
    } else {
        const int64_t last = total - block; // i * last may overflow
        for (int64_t i = 0; i < samples; i++) {
            int64_t at = last / (samples - 1) * i + last % (samples - 1) * i / (samples - 1);
            if (!fingerprint_add(set, at, block, hash, err)) return false;
        }
    }
    if (*hash == 0) *hash = 1;
    return true;
}
