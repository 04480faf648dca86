/*
The data of a plan: whether --data and --val-data can be used, how much there is, and what packed documents
leave of its sequences. Data that is not there yet is no error.

From a large data set it reads as many sequences as PLAN_SEQUENCES and PLAN_TOKENS allow, drawn evenly, and no
checksums: at most 4,096 reads, of at most 64 MiB in all. Called by main.h for --dry-run; report.h prints it,
and run.h takes attention over other documents off the model's FLOPs.
*/
#pragma once

#include "../config/config.h"
#include "../tokens/dataloader.h"
#include "command/options.h"

enum { PLAN_SEQUENCES = 4096, PLAN_TOKENS = 1 << 24 };
static_assert((int)LAYER_RUNS <= (int)ATTENTION_WINDOWS, "a window for each run");

typedef struct {
    DataLoader loader, held_out;
    bool opened, held_out_opened;
    Error held_out_err;      // if not opened
    Error err;               // if not opened, or if the documents cannot be counted
    bool counted;            // with document_reset, unless a token cannot be read
    DocumentCount documents; // of the sequences read
} PlanData;

// Options that read one sequence a batch, in order and without other ranks; the caller sets what differs.
static inline DataOptions data_options(const Config* c, int64_t seq_len) {
    const DataOptions options = {.seq_len = seq_len,
                                 .batch = 1,
                                 .share = {1, 0, 1},
                                 .vocab_size = c->vocab_size,
                                 .end_of_text = config_end_of_text(c)};
    return options;
}

// The windows whose pairs are counted: of a stack those of its layers.
static inline AttentionWindows model_windows(const Config* c) {
    AttentionWindows windows = {1, {{c->window_size, 1}}};
    if (!config_is_stack(c) || !config_has_attention(c)) return windows;
    memset(&windows, 0, sizeof windows);
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const Config layer = config_layer(c, l);
        int i = 0;
        if (layer.mixer != MIXER_ATTENTION) continue;
        while (i < windows.count && windows.kinds[i].keys != layer.window_size) i++;
        if (i == windows.count) windows.kinds[windows.count++].keys = layer.window_size;
        windows.kinds[i].layers++;
    }
    return windows;
}

// Counts the documents of m of the n sequences: all, or those in the middle of m equal parts; of a mixture,
// whose parts may alternate, one drawn from each of them.
static inline bool plan_data_count(PlanData* data, int64_t m, const AttentionWindows* windows, Error* err) {
    bool ok = true;
    const DataOptions* o = &data->loader.options;
    const int64_t n = dataloader_sequences(&data->loader), T = o->seq_len;
    int32_t* tokens = (int32_t*)xcalloc((size_t)(2 * T + 1), sizeof *tokens);
    int32_t *row = tokens, *targets = tokens + T + 1;
    for (int64_t i = 0; ok && i < m; i++) {
        const int64_t first = i * n / m, width = (i + 1) * n / m - first;
        const int64_t drawn = first + (int64_t)(random_u64(0, 0, (uint64_t)i) % (uint64_t)width);
        const int64_t s = data->loader.set.mixture.count > 1 ? drawn : (2 * i + 1) * n / (2 * m);
        ok = dataloader_read_sequence(&data->loader, s, row, err);
        if (ok && data->loader.set.masked) dataloader_unmask(row, targets, row, T);
        if (ok) count_documents(&data->documents, row, T, o->end_of_text, windows);
    }
    free(tokens);
    return ok;
}

// Opens the data of a plan, and counts its documents where the model tells them apart.
static inline void plan_data_open(PlanData* data, const Options* o, const Config* c) {
    memset(data, 0, sizeof *data);
    const DataOptions options = data_options(c, o->seq_len);
    data->opened = o->data && dataloader_open(&data->loader, o->data, &options, &data->err);
    data->held_out_opened =
        o->val_data && dataloader_open(&data->held_out, o->val_data, &options, &data->held_out_err);
    if (!data->opened || !c->document_reset) return;
    data->loader.unverified = true;
    int64_t most = dataloader_sequences(&data->loader);
    if (most > PLAN_SEQUENCES) most = PLAN_SEQUENCES;
    if (most > PLAN_TOKENS / o->seq_len) most = PLAN_TOKENS / o->seq_len;
    const AttentionWindows windows = model_windows(c);
    data->counted = plan_data_count(data, most > 1 ? most : 1, &windows, &data->err);
}

static inline void plan_data_close(PlanData* data) {
    if (data->opened) dataloader_close(&data->loader);
    if (data->held_out_opened) dataloader_close(&data->held_out);
}

// The share of attention that documents hide, as far as a plan knows. data: NULL: it has none.
static inline double plan_data_hidden(const PlanData* data, const Config* c) {
    const bool known = data && data->counted && config_has_attention(c);
    return known ? documents_hidden(&data->documents) : 0;
}
