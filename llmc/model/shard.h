/*
Which part of the model's flat buffers a rank owns: its masters, AdamW's moments, and the reduced gradients
(ZeRO stage 1, arXiv 1910.02054).

A flat buffer is a sequence of buckets: embedding, a layer each, final norm and lm_head (params.h). Each
bucket is cut into `size` equal parts, and rank r owns part r of every bucket:

    flat buffer, 2 ranks    | bucket 0      | bucket 1           | bucket 2   |
    owned by rank           | 0     | 1     | 0        | 1       | 0   | 1    |

    shard of rank 1                 | part 0| part 1  | part 2|          a buffer of count / size elements

A shard is contiguous: part b begins at element bucket_begin / size of it. One rank alone owns everything, and
its shard is the flat buffer. Called by the trainers, checkpoint.h and the work list of AdamW.
*/
#pragma once

#include "../base/common.h"

typedef struct {
    int rank, size;
    int num_buckets;
    const int64_t*
        buckets; // [num_buckets + 1] first elements, multiples of size; the last is the buffer's end
} Shard;

// Elements [begin, begin + count) of the flat buffer are elements [local, local + count) of the shard.
typedef struct {
    int64_t begin, count, local;
} ShardPart;

// Elements of a shard, the same for all ranks.
static inline int64_t shard_count(const Shard* s) { return s->buckets[s->num_buckets] / s->size; }

// The rank's part of a bucket.
static inline ShardPart shard_part(const Shard* s, int bucket) {
    int64_t begin = s->buckets[bucket], count = (s->buckets[bucket + 1] - begin) / s->size;
    ShardPart part = {begin + s->rank * count, count, begin / s->size};
    return part;
}

// What elements [begin, end) of the flat buffer and the rank's part of a bucket have in common; count 0:
// nothing.
static inline ShardPart shard_overlap(const Shard* s, int bucket, int64_t begin, int64_t end) {
    ShardPart part = shard_part(s, bucket);
    int64_t from = begin > part.begin ? begin : part.begin;
    int64_t to = end < part.begin + part.count ? end : part.begin + part.count;
    ShardPart overlap = {from, to > from ? to - from : 0, part.local + from - part.begin};
    return overlap;
}
