/*
Helpers of test_dataloader.c and test_shard_sets.c: loaders of datasets that datasets.h writes.
*/
#pragma once

#include "datasets.h"
#include "../../../llmc/tokens/dataloader.h"

enum { T = 16, EOT = 256, V = 257 };

// Opens a dataset of vocabulary size V in sequences of T tokens, a batch for each rank of a stride; dies on
// error.
static inline void open_set(DataLoader* l, const char* pattern, int64_t B, int rank, int world,
                            bool shuffle) {
    Error err = {""};
    DataOptions options = {T, B, data_share(world, B, rank, world), V, EOT, shuffle, 99, 0};
    if (!dataloader_open(l, in_folder(pattern), &options, &err)) die("%s", err.msg);
}

// Checks that opening fails, with both texts in the message.
static inline void check_open_fails(const char* patterns, int64_t vocab_size, const char* expected,
                                    const char* expected2) {
    DataLoader l;
    Error err = {""};
    DataOptions options = {T, 2, data_share(1, 2, 0, 1), vocab_size, 0, false, 0, 0};
    bool ok = dataloader_open(&l, patterns, &options, &err);
    CHECK(!ok && strstr(err.msg, expected) && strstr(err.msg, expected2), "%s: %s", patterns, err.msg);
    if (ok) dataloader_close(&l);
}
