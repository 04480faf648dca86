/*
PREFIX_tokenizer.json, which both programs of this folder write beside the shards of a prefix.
*/
#pragma once

#include "shard_writer.h"
#include "../llmc/tokens/tokenizer_json.h"

// Writes the file of a tokenizer under its temporary name (shard_writer.h).
static inline bool tokenizer_file_write(const char* prefix, const char* split, const Tokenizer* t,
                                        Error* err) {
    ByteBuffer json = {NULL, 0, 0};
    tokenizer_json(t, &json);
    const bool ok = shard_tokenizer_write(prefix, split, json.data, err);
    free(json.data);
    return ok;
}

// Writes the file of GPT-2's tokenizer, from its vocab.bpe, under its final name.
static inline bool tokenizer_file_gpt2(const char* prefix, const char* split, const char* vocab, Error* err) {
    char folder[PATH_LENGTH];
    Tokenizer t;
    if (!tokenizer_gpt2(&t, vocab, err)) return false;
    shard_folder(folder, prefix);
    const bool ok = tokenizer_file_write(prefix, split, &t, err) &&
                    shard_tokenizer_rename(prefix, split, err) && flush_folder(folder, err);
    tokenizer_free(&t);
    return ok;
}

// Says so where the shards of a prefix have no tokenizer.
static inline void tokenizer_file_report(const char* prefix) {
    char path[PATH_LENGTH];
    shard_tokenizer_path(path, prefix);
    if (access(path, F_OK) == 0) return;
    printf("no %s: checkpoints of models trained on these shards will have no tokenizer; run again with "
           "--vocab vocab.bpe\n",
           path);
}
