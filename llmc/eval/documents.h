/*
Mean losses of single documents in spans of their targets, in nats, for comparisons document by document: a
document's loss varies far more from document to document than between models.

    octaves     of the targets' positions (llmc/base/octaves.h), in the pass over all T of them
    contexts    the last DOCUMENTS_LAST targets of each, when only C tokens of the document, and end of text
                before them, precede the first of these: 1024, 4096, 16384, ... while C < T - DOCUMENTS_LAST,
                each in a pass over the last C + DOCUMENTS_LAST tokens of every document; and C = T -
                DOCUMENTS_LAST, all that there is, from the pass over T. The same targets behind every
                context: what a longer context is worth, where L(i) mixes it with what stands at position i

With a mask the means are over the targets that count, whose numbers are kept too, and there are no contexts.
So a short document, alone in its row and padded with targets that do not count, has its own loss.

Sums are doubles. Filled by positions.h, written by evaluation.h.
*/
#pragma once

#include "../base/octaves.h"
#include "../formats/json_writer.h"
#include "../ranks/watch.h"
#include "../run/trainer.h"

enum {
    DOCUMENTS_LAST = 2048,
    DOCUMENTS_CONTEXT = 1024, // the shortest; each one after it is 4 times as long
    DOCUMENTS_MOST = 65536,   // documents whose losses are kept
    DOCUMENTS_CONTEXTS = 12   // below 2^31
};

typedef struct {
    int64_t count, T; // documents, 0: none are kept; and their targets
    int octaves, contexts;
    bool masked;
    int64_t context[DOCUMENTS_CONTEXTS]; // C
    int pass;     // index of the context that is measured now; `contexts` - 1: the pass over T
    double* loss; // [count, octaves + contexts + octaves]: the last ones are the targets that count in each
                  // octave. 0 where another rank has the document, NaN where no target counts
} DocumentLosses;

static inline int documents_columns(const DocumentLosses* d) { return 2 * d->octaves + d->contexts; }

// Number i of a buffer of the trainer's numbers on the host, floats or doubles.
static inline double host_number(const Trainer* trainer, const void* buffer, int64_t i) {
    return trainer->element_bytes == 8 ? ((const double*)buffer)[i] : (double)((const float*)buffer)[i];
}

// Fills the contexts of documents of T targets, the longest last, and returns their number.
static inline int documents_contexts(int64_t context[DOCUMENTS_CONTEXTS], int64_t T, bool masked) {
    const int64_t longest = masked ? 0 : T - DOCUMENTS_LAST;
    int n = 0;
    for (int64_t C = DOCUMENTS_CONTEXT; C < longest; C *= 4) context[n++] = C;
    if (longest > 0) context[n++] = longest;
    return n;
}

// Fails where N ranks cannot share the sequences of a shorter context.
static inline bool documents_check(int64_t T, bool masked, int64_t N, Error* err) {
    int64_t context[DOCUMENTS_CONTEXTS];
    const int n = documents_contexts(context, T, masked);
    for (int k = 0; k < n - 1; k++)
        if ((context[k] + DOCUMENTS_LAST) % N != 0)
            return fail(err,
                        "--sequence-ranks %lld: --eval of documents also measures sequences of %s, which it "
                        "does not divide: take another number, or --seq-len %d or less",
                        (long long)N, counted(context[k] + DOCUMENTS_LAST, "token").text,
                        DOCUMENTS_CONTEXT + DOCUMENTS_LAST);
    return true;
}

// Losses of `count` documents of T targets, before the pass over T; free with documents_free.
static inline DocumentLosses documents_new(int64_t count, int64_t T, bool masked) {
    DocumentLosses d = {.count = count, .T = T, .octaves = octaves_of(T), .masked = masked};
    if (count > DOCUMENTS_MOST) d.count = DOCUMENTS_MOST;
    d.contexts = documents_contexts(d.context, T, masked);
    d.pass = d.contexts - 1;
    d.loss = (double*)xcalloc((size_t)(d.count * documents_columns(&d)) + 1, sizeof *d.loss);
    return d;
}

static inline void documents_free(DocumentLosses* d) { free(d->loss); }

// The mean of losses[begin .. end - 1], as finish_losses marks them, over the *targets that count: those
// whose loss is not 0, or has a sign (positions_unmark).
static inline double documents_mean(const Trainer* trainer, const void* losses, int64_t begin, int64_t end,
                                    double* targets) {
    double sum = 0;
    *targets = 0;
    for (int64_t t = begin; t < end; t++) {
        const double loss = host_number(trainer, losses, t);
        *targets += loss != 0 || signbit(loss);
        sum += fabs(loss);
    }
    return sum / *targets;
}

// Adds a document of the present pass, whose losses, marked, begin at losses[first].
static inline void documents_add(DocumentLosses* d, int64_t document, const Trainer* trainer,
                                 const void* losses, int64_t first) {
    if (document >= d->count) return;
    double* row = d->loss + document * documents_columns(d);
    double *targets = row + d->octaves + d->contexts, last;
    const bool whole = d->pass == d->contexts - 1;
    for (int k = 0; whole && k < d->octaves; k++)
        row[k] = documents_mean(trainer, losses, first + octave_begin(k, d->T),
                                first + octave_begin(k + 1, d->T), &targets[k]);
    if (d->contexts == 0) return;
    const int64_t begin = first + d->context[d->pass];
    row[d->octaves + d->pass] = documents_mean(trainer, losses, begin, begin + DOCUMENTS_LAST, &last);
}

// Collective: what all ranks have.
static inline void documents_reduce(DocumentLosses* d, World* world) {
    world_sum(world, d->loss, (int)d->count * documents_columns(d));
    watch_progress(world);
}

// The mean over documents of column i of the table.
static inline double documents_column(const DocumentLosses* d, int i) {
    double sum = 0;
    for (int64_t n = 0; n < d->count; n++) sum += d->loss[n * documents_columns(d) + i];
    return sum / (double)d->count;
}

// Writes n numbers on one line.
static inline void documents_put_line(JsonWriter* w, const char* key, const double* x, int n,
                                      const char* format) {
    const int indent = w->indent;
    json_begin_array(w, key);
    w->indent = 0;
    for (int i = 0; i < n; i++) {
        char number[64];
        snprintf(number, sizeof number, format, x[i]);
        json_put_word(w, NULL, isnan(x[i]) ? "null" : number);
    }
    json_end(w);
    w->indent = indent;
}

// Writes n columns of the table from the `first` on, a document a line.
static inline void documents_put_columns(JsonWriter* w, const char* key, const DocumentLosses* d, int first,
                                         int n, const char* format) {
    json_begin_array(w, key);
    for (int64_t i = 0; i < d->count; i++)
        documents_put_line(w, NULL, d->loss + i * documents_columns(d) + first, n, format);
    json_end(w);
}

// The member "documents" of --eval's file.
static inline void documents_put(JsonWriter* w, const DocumentLosses* d) {
    double octaves[MAX_OCTAVES + 1], contexts[DOCUMENTS_CONTEXTS];
    if (d->count == 0) {
        json_put_null(w, "documents");
        return;
    }
    for (int k = 0; k <= d->octaves; k++) octaves[k] = (double)octave_begin(k, d->T);
    for (int k = 0; k < d->contexts; k++) contexts[k] = (double)d->context[k];
    json_begin_object(w, "documents");
    documents_put_line(w, "octaves", octaves, d->octaves + 1, "%.0f");
    documents_put_columns(w, "loss", d, 0, d->octaves, "%.6f");
    if (d->masked) documents_put_columns(w, "targets", d, d->octaves + d->contexts, d->octaves, "%.0f");
    documents_put_line(w, "contexts", contexts, d->contexts, "%.0f");
    json_put_int(w, "last_targets", DOCUMENTS_LAST);
    documents_put_columns(w, "last_loss", d, d->octaves, d->contexts, "%.6f");
    json_end(w);
}

static inline void documents_print(const DocumentLosses* d) {
    if (d->count == 0 || d->contexts == 0) return;
    printf("\n  %12s %10s   of the last %d tokens of each document\n", "context", "mean loss",
           DOCUMENTS_LAST);
    for (int k = 0; k < d->contexts; k++)
        printf("  %12lld %10.4f\n", (long long)d->context[k], documents_column(d, d->octaves + k));
}
