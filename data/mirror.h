/*
What LongCrawl64 has, and the copy of it on Hugging Face, the source of data/longcrawl64 unless --source names
another. The copy has all of heldout, and of train the first documents, about a tenth. That it has their later
columns too, behind the 16384 that the paper trains on, is not confirmed.
*/
#pragma once

#include "../llmc/base/common.h"

static const char MIRROR[] =
    "https://huggingface.co/datasets/clankur/longcrawl64/resolve/5e2f38e601ca7c16fa304f30536d9e2945bb2a32";
enum { MIRROR_DOCUMENTS = 655360 }; // of the copy's train
enum { LONGCRAWL64_COLUMNS = 65536 };

static inline int64_t longcrawl64_documents(const char* split) {
    return strcmp(split, "train") == 0 ? 6609334 : 52131;
}

// The tokens of train to write, of `columns` a document: as many as are wanted. Dies where the copy has
// fewer, or with at_most returns those.
static inline int64_t mirror_tokens(int64_t wanted, int64_t columns, bool at_most) {
    const int64_t documents = (wanted - 1) / columns + 1;
    const double Gi = 1 << 30;
    if (documents <= MIRROR_DOCUMENTS) return wanted;
    if (at_most) return MIRROR_DOCUMENTS * columns;
    die("--tokens %lld: %s of %s, %.4g times the %d that the default source has of train (%.4g Gi tokens, "
        "%.4g Gi with --columns %d): give a larger --source, or --at-most to train on what it has repeatedly",
        (long long)wanted, counted(documents, "document").text, counted(columns, "token").text,
        (double)documents / MIRROR_DOCUMENTS, MIRROR_DOCUMENTS, (double)(MIRROR_DOCUMENTS * columns) / Gi,
        (double)MIRROR_DOCUMENTS * LONGCRAWL64_COLUMNS / Gi, LONGCRAWL64_COLUMNS);
}
