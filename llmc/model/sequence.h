/*
Groups of ranks that share sequences (--sequence-ranks N): which tokens a rank has.

Rank r has number n = r % N in group r / N. The ranks of a group have the same sequences; groups are data
parallel. Rank n has tokens n T/N .. (n+1) T/N - 1 of each sequence, and in attention KVH/N key heads of whole
sequences, with the query heads that read them (llmc/sequence/split.h).

Called by llmc/run, which cuts the data by groups, and by the GPU trainer.
*/
#pragma once

#include "params.h"

enum { SEQUENCE_MAX_RANKS = 32 }; // GPUs of one host

// A rank's number in its group, and the ranks of a group; 0 of 1: a sequence is on one rank.
typedef struct {
    int rank, size;
} SequenceGroup;

static inline SequenceGroup sequence_group(int rank, int64_t sequence_ranks) {
    SequenceGroup group = {rank % (int)sequence_ranks, (int)sequence_ranks};
    return group;
}

// The rank's tokens of a sequence of T, which sequence_check has seen.
static inline int64_t sequence_tokens(const SequenceGroup* g, int64_t T) {
    assert(T % g->size == 0);
    return T / g->size;
}

// Fails where groups of N of `ranks` ranks cannot share sequences of T tokens of the model.
static inline bool sequence_check(const Config* c, int64_t N, int ranks, int64_t T, Error* err) {
    if (N == 1) return true;
    if (!config_has_attention(c))
        return fail(err, "--sequence-ranks %lld: this model has no attention, whose heads ranks could share",
                    (long long)N);
    if (!config_all_attention(c))
        return fail(err, "--sequence-ranks %lld: this model has recurrent layers, which ranks cannot share",
                    (long long)N);
    if (config_key_heads(c) % N != 0)
        return fail(err, "--sequence-ranks %lld: does not divide the %s of the model", (long long)N,
                    counted(config_key_heads(c), c->num_kv_heads ? "key head" : "head").text);
    if (T % N != 0)
        return fail(err, "--sequence-ranks %lld: does not divide the %s of a sequence (--seq-len)",
                    (long long)N, counted(T, "token").text);
    if (ranks % N != 0)
        return fail(err,
                    "--sequence-ranks %lld: %s cannot be groups of so many; start a multiple of it, or give "
                    "--sequence-ranks 1",
                    (long long)N, counted(ranks, "rank").text);
    return true;
}
