/*
Which part of the model's flat buffers a rank owns, and which range of each tensor: its masters, AdamW's
moments, and the reduced gradients (ZeRO stage 1, arXiv 1910.02054).

A flat buffer is a sequence of buckets: embedding, a layer each, final norm and lm_head (params.h). Each
bucket is cut into `size` equal parts, and rank r owns part r of every bucket:

    flat buffer, 2 ranks    | bucket 0      | bucket 1           | bucket 2   |
    owned by rank           | 0     | 1     | 0        | 1       | 0   | 1    |

    shard of rank 1                 | part 0| part 1  | part 2|          a buffer of count / size elements

A shard is contiguous: part b begins at its element buckets[b] / size. One rank alone owns everything, and
its shard is the flat buffer. A tensor is in one bucket, so a rank owns at most one range of it, which is
contiguous in the tensor and in the shard:

    flat buffer  | ... | bucket of layer 3                                        | ... |
    tensors            | norm | q_proj         | ...   | o_proj  | mlp ...        |
    ranks              | part of rank 0        | part of rank 1  | part of rank 2 |
                                       ^^^^^^^^ q_proj: elements [first, count) belong to rank 1

Called by the trainers, their exchange of gradients and weights, AdamW's work list and checkpoints.
*/
#pragma once

#include "../base/numbers.h"
#include "../base/progress.h"
#include "params.h"

typedef struct {
    int rank, size;
    int num_buckets;
    const int64_t* buckets; // [num_buckets + 1] first elements, multiples of size; then the buffer's end
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

// The elements of a rank's part of the largest bucket.
static inline int64_t shard_largest_part(const Shard* s) {
    int64_t largest = 0;
    for (int b = 0; b < s->num_buckets; b++) {
        const int64_t count = shard_part(s, b).count;
        if (count > largest) largest = count;
    }
    return largest;
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

// ----------------------------------------------------------------------------
// tensors

// The shard of a rank, of a table that was built for `size` ranks. params_shard(table, 0, 1) is the whole
// buffer of any table.
static inline Shard params_shard(const ParamTable* table, int rank, int size) {
    Shard shard = {rank, size, table->num_buckets, table->buckets};
    return shard;
}

// Elements [first, first + count) of a tensor are elements [local, local + count) of the shard; count 0:
// none.
typedef struct {
    int64_t first, count, local;
} TensorRange;

// What a rank owns of a tensor.
static inline TensorRange tensor_range(const Param* p, const Shard* shard) {
    int bucket = 0;
    while (shard->buckets[bucket + 1] <= p->offset) bucket++;
    ShardPart part = shard_overlap(shard, bucket, p->offset, p->offset + p->count);
    TensorRange range = {part.begin - p->offset, part.count, part.local};
    return range;
}

// The name of the first tensor in a buffer of the shard's layout with an element that is NaN or infinite;
// NULL if all are finite.
static inline const char* shard_first_not_finite(const ParamTable* table, const Shard* shard,
                                                 const void* buffer, int element_bytes) {
    for (int r = 0; r < table->num_rows; r++) {
        const TensorRange range = tensor_range(&table->rows[r], shard);
        const char* numbers = (const char*)buffer + range.local * element_bytes;
        if (numbers_first_bad(numbers, range.count, element_bytes, -DBL_MAX) < range.count)
            return table->rows[r].name;
    }
    return NULL;
}

// Draws the initial weights of the rank's shard into w, floats or doubles; rank 0 shows the progress. A value
// depends only on the seed, on the tensor's layer and kind, and on its index in the tensor.
static inline void draw_weights(void* w, int element_bytes, const ParamTable* table, const Shard* shard,
                                const Config* config, uint64_t seed) {
    Progress progress; // of large models
    double drawn = 0;
    progress_start(&progress, "initial weights", (double)shard_count(shard), "M", 1e6);
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        const TensorRange range = tensor_range(p, shard);
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < range.count; i++) {
            double x = params_initial_value(table, config, r, range.first + i, seed);
            if (element_bytes == 8)
                ((double*)w)[range.local + i] = x;
            else
                ((float*)w)[range.local + i] = (float)x;
        }
        drawn += (double)range.count;
        if (shard->rank == 0) progress_update(&progress, drawn);
    }
    progress_end(&progress);
}
