/*
The training and the validation split of a conversion, to which it writes its documents: as a stream in which
an end-of-text token precedes each, as documents of exactly D tokens (--doc-len), or packed into rows of T
tokens (--pack: pack.h). Used by text_to_shards and ids_to_shards:

    splits_open
    splits_begin, (tokens to s->tokens, splits_write) x n    for each document
    splits_publish                                           or splits_abort after an error
*/
#pragma once

#include "../llmc/tokens/tokenizer.h"
#include "pack.h"
#include "roll.h"
#include "shard_writer.h"

// Options of the same names.
typedef struct {
    const char* out;
    int64_t doc_len, roll, pack, shard_tokens;
} SplitOptions;

typedef struct {
    const SplitOptions* options;
    uint32_t end_of_text; // its id
    int64_t row;          // tokens of what is written at a time: D or T; 0: any number
    ShardWriter writers[2];
    Packer packers[2];    // with --pack
    int64_t documents[2]; // so far, before --doc-len divides them
    int64_t dropped;      // tokens at the ends of documents
    int split;            // of the document in progress
    TokenBuffer tokens;   // of it, not written yet
} Splits;

// Dies where options contradict one another.
static inline void splits_check_options(const SplitOptions* o) {
    if (o->pack && o->doc_len) die("--pack and --doc-len: only one of them");
    if (o->roll >= 0 && !o->doc_len) die("--roll: only documents of --doc-len can be rolled");
}

// Locks the shards of both splits and removes what an interrupted conversion left. Dies where that fails.
static inline void splits_open(Splits* s, const SplitOptions* o, int64_t vocab_size, uint64_t vocab_hash,
                               uint32_t end_of_text) {
    Error err;
    memset(s, 0, sizeof *s);
    s->options = o;
    s->end_of_text = end_of_text;
    s->row = o->pack ? o->pack : o->doc_len;
    for (int split = 0; split < 2; split++) {
        ShardWriter* w = &s->writers[split];
        if (!shard_writer_open(w, o->out, shard_splits[split], vocab_size, s->row, o->shard_tokens, &err) ||
            !shard_set_lock(o->out, shard_splits[split], &err))
            die("--out %s", err.msg);
        w->hold = true;
        w->header.vocab_hash = vocab_hash;
        s->packers[split] = pack_open(w, o->pack, end_of_text);
    }
    shard_set_sweep(o->out);
}

// Writes what is complete of the document in progress.
static inline bool splits_write(Splits* s, Error* err) {
    TokenBuffer* t = &s->tokens;
    ShardWriter* w = &s->writers[s->split];
    const int64_t D = s->options->doc_len, seed = s->options->roll;
    const int64_t ready = s->row ? t->count / s->row * s->row : t->count;
    for (int64_t i = 0; seed >= 0 && i < ready / D; i++)
        roll_document(t->data + i * D, D, w->total / D + i, seed);
    if (!shard_write(w, t->data, ready, err)) return false;
    t->count -= ready;
    memmove(t->data, t->data + ready, (size_t)t->count * sizeof *t->data);
    return true;
}

// Packs or drops what remains of the document in progress, if there is one.
static inline bool splits_end(Splits* s, Error* err) {
    const int64_t count = s->tokens.count;
    s->tokens.count = 0;
    if (s->options->pack) return pack_add(&s->packers[s->split], s->tokens.data, count, err);
    s->dropped += count;
    return true;
}

// Ends the document in progress and begins one of a split.
static inline bool splits_begin(Splits* s, int split, Error* err) {
    if (!splits_end(s, err)) return false;
    s->split = split;
    s->documents[split]++;
    if (!s->row) token_buffer_add(&s->tokens, s->end_of_text);
    return true;
}

// Ends the last document and completes the shards. Fails where a split has documents and no shard. unit: what
// a document was, for that message; NULL: a document of another program.
static inline bool splits_close(Splits* s, const char* unit, Error* err) {
    if (!splits_end(s, err)) return false;
    free(s->tokens.data);
    for (int split = 0; split < 2; split++) {
        const char* name = shard_splits[split];
        if (s->options->pack && !pack_end(&s->packers[split], err)) return false;
        if (!shard_writer_close(&s->writers[split], err)) return false;
        if (s->documents[split] == 0 || s->writers[split].total > 0) continue;
        const Counted row = counted(s->row, "token");
        if (s->options->pack) return fail(err, "the %s split has no row of %s; lower --pack", name, row.text);
        if (!unit) return fail(err, "the %s split has no document of %s; lower --doc-len", name, row.text);
        return fail(err, "the %s split has no document: none of its %ss has %s; lower --doc-len", name, unit,
                    row.text);
    }
    return s->writers[SHARD_TRAIN].total > 0 || fail(err, "the training split has no document");
}

// At the end: the shards, and the tokenizer of this text (NULL: none), replace those of the prefix.
static inline bool splits_publish(Splits* s, const char* unit, const char* tokenizer, Error* err) {
    const ShardWriter *train = &s->writers[SHARD_TRAIN], *val = &s->writers[SHARD_VAL];
    return splits_close(s, unit, err) &&
           (!tokenizer || shard_tokenizer_write(train->prefix, train->split, tokenizer, err)) &&
           shard_set_publish(train, val, err);
}

// Removes what is written so far.
static inline void splits_abort(Splits* s) {
    for (int split = 0; split < 2; split++) shard_writer_abort(&s->writers[split]);
    shard_set_sweep(s->options->out);
}

// Prints the splits that have documents, as in "train: 2 documents, 96 tokens, 1 shard", between two texts.
static inline void splits_print(const Splits* s, const char* before, const char* after) {
    const int64_t D = s->options->doc_len;
    for (int split = 0; split < 2; split++) {
        const int64_t tokens = s->writers[split].total, shards = s->writers[split].index;
        const int64_t documents = D ? tokens / D : s->documents[split];
        if (documents > 0)
            printf("%s%s: %s, %s, %s%s", before, shard_splits[split], counted(documents, "document").text,
                   counted(tokens, "token").text, counted(shards, "shard").text, after);
    }
}
