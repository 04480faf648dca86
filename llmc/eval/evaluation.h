/*
--eval FILE.json: the loss by position (positions.h) of the model of --init on held-out shards.

In shards of documents a sequence is the first T tokens of a document, so that position i is the document's
token i; in streams it is a window of T tokens. T, --seq-len, may be longer than the length trained on. Ranks
share the sequences; rank 0 writes the file, under a temporary name, and renames it:

    seq_len, sequences, tokens       T, sequences used, and their product
    targets, accuracy                those that count: all tokens, without a mask; the share of them that are
                                     the likeliest token
    loss                             [L(1) .. L(T)], in nats; null where no target counts
    loss_error, loss_error_window    [E(1) .. E(T)], or null of one sequence alone, or with a mask; the window
                                     of E
    loss_mean, standard_error        over all targets; the error of that mean, from its spread over sequences
    perplexity                       {"512": P(512), "1024": P(1024), .., "T": P(T)}, with T as a number
    loss_of                          of a mixture: {PATTERN: mean loss of this part}
    documents                        losses of every document (documents.h), of the first 65,536; null of
                                     streams:
        octaves, loss                    [0, 1, 2, 4, .. T]; of each document, for each k, the mean loss of
                                         targets octaves[k] + 1 .. octaves[k+1]
        targets                          with a mask: how many of these count; where none does, loss is null
        contexts                         [C]
        last_targets, last_loss          2048; of each document, for each C, the mean loss of its last targets
                                         behind C tokens
    pruned                           share of attention that was pruned, by layer; null: nothing is pruned
    seconds, tokens_per_second       of the pass over all T; the first batch, which warms up, counts for the
                                     seconds alone
    checkpoint, data, model          --init, --val-data, and the --model that trainer.json names or null
    set, roll                        where they were given: the texts of --set, and --roll
    trained_seq_len, code_version    the --seq-len of training, or null

Called by main.h. Errors end the program.
*/
#pragma once

#include <sys/resource.h>
#include "../run/agreement.h"
#include "../run/logger.h"
#include "../tokens/fingerprint.h"
#include "positions.h"
#include "result_file.h"

static const int64_t EVALUATION_FIRST_LENGTH =
    512; // shortest l of P(l) that is reported, if T is not shorter

typedef struct {
    DataLoader data;
    int64_t present;   // sequences
    int64_t sequences; // of them to evaluate, on all ranks
    ResultFile file;   // of rank 0
} Evaluation;

// ----------------------------------------------------------------------------
// the file

// The length after l in the table of perplexities: powers of two, and T.
static inline int64_t evaluation_next_length(int64_t l, int64_t T) { return 2 * l < T ? 2 * l : T; }
static inline int64_t evaluation_first_length(int64_t T) {
    return T < EVALUATION_FIRST_LENGTH ? T : EVALUATION_FIRST_LENGTH;
}

// Writes {"512": P(512), "1024": P(1024), .., "T": P(T)}.
static inline void evaluation_put_perplexity(JsonWriter* w, const char* key, const Positions* p) {
    const int64_t T = p->seq_len;
    json_begin_object(w, key);
    for (int64_t l = evaluation_first_length(T), last = 0; l != last; l = evaluation_next_length(l, T)) {
        char length[32];
        snprintf(length, sizeof length, "%lld", (long long)l);
        json_put_double(w, length, exp(positions_mean(p, l)));
        last = l;
    }
    json_end(w);
}

// Are there targets that do not count?
static inline bool evaluation_masked(const Positions* p) {
    return positions_targets(p, p->seq_len) < (double)(p->sequences * p->seq_len);
}

// Writes value(p, 1) .. value(p, T) on one line, with 6 decimals: 65,536 of them take 0.6 MB.
static inline void evaluation_put_row(JsonWriter* w, const char* key, const Positions* p,
                                      double (*value)(const Positions*, int64_t)) {
    double* x = (double*)xcalloc((size_t)p->seq_len, sizeof *x);
    for (int64_t i = 1; i <= p->seq_len; i++) x[i - 1] = value(p, i);
    documents_put_line(w, key, x, (int)p->seq_len, "%.6f");
    free(x);
}

// Writes p, with its documents, as JSON. pruned: [layers] shares; layers 0: nothing is pruned.
static inline void evaluation_write(ResultFile* file, const Run* run, const Positions* p, double seconds,
                                    double rate, const double* pruned, int layers) {
    const int64_t T = p->seq_len;
    int64_t trained;
    JsonWriter w = json_writer(1);
    json_begin_object(&w, NULL);
    json_put_int(&w, "seq_len", T);
    json_put_int(&w, "sequences", p->sequences);
    json_put_int(&w, "tokens", p->sequences * T);
    json_put_int(&w, "targets", (int64_t)positions_targets(p, T));
    json_put_double(&w, "accuracy", positions_accuracy(p));
    json_put_double(&w, "loss_mean", positions_mean(p, T));
    json_put_double(&w, "standard_error", positions_standard_error(p));
    evaluation_put_perplexity(&w, "perplexity", p);
    log_parts_put(&w, "loss_of", p->parts, p->part_sums, p->part_targets);
    if (layers > 0) json_begin_array(&w, "pruned");
    for (int l = 0; l < layers; l++) json_put_double(&w, NULL, pruned[l]);
    if (layers > 0)
        json_end(&w);
    else
        json_put_null(&w, "pruned");
    json_put_double(&w, "seconds", seconds);
    json_put_double(&w, "tokens_per_second", rate);
    json_put_string(&w, "checkpoint", run->options.init);
    json_put_string(&w, "data", run->options.val_data);
    const CliList* set = &run->options.set;
    if (set->count) json_begin_array(&w, "set");
    for (int i = 0; i < set->count; i++) json_put_string(&w, NULL, set->items[i]);
    if (set->count) json_end(&w);
    if (run->options.roll != OPTION_UNSET) json_put_int(&w, "roll", run->options.roll);
    json_put_string(&w, "model", json_string(&run->record, run_recorded(run, "model")));
    if (json_int64(&run->record, run_recorded(run, "seq-len"), &trained))
        json_put_int(&w, "trained_seq_len", trained);
    else
        json_put_null(&w, "trained_seq_len");
    json_put_string(&w, "code_version", CODE_VERSION);
    evaluation_put_row(&w, "loss", p, positions_loss);
    json_put_int(&w, "loss_error_window", POSITIONS_WINDOW);
    if (p->sequences > 1 && !evaluation_masked(p))
        evaluation_put_row(&w, "loss_error", p, positions_loss_error);
    else
        json_put_null(&w, "loss_error");
    documents_put(&w, p->documents);
    json_end(&w);
    result_put_json(file, &w);
    json_writer_free(&w);
}

// ----------------------------------------------------------------------------
// the terminal

static inline void evaluation_print_start(const Evaluation* e, const Run* run) {
    printf("%s: %s\n", run->options.init, counted(run->table.parameters, "parameter").text);
    printf("%lld of %s of %s, %s, in batches of %lld", (long long)e->sequences,
           counted(e->present, "sequence").text, counted(run->options.seq_len, "token").text,
           e->data.rolls             ? "each the beginning of a rotated document"
           : e->data.set.doc_len > 0 ? "each the beginning of a document"
                                     : "windows in order",
           (long long)run->micro_batch);
    if (run->world->size > 1) printf(" on %s", counted(run->world->size, "rank").text);
    if (run->group.size > 1) printf(", %d for a sequence", run->group.size);
    printf("\n%s", run->device);
}

static inline void evaluation_print(const Positions* p, double seconds, double rate) {
    const int64_t T = p->seq_len;
    char text[32];
    struct rusage usage;
    printf("\n  %12s %10s %12s\n", "first tokens", "mean loss", "perplexity");
    for (int64_t l = evaluation_first_length(T), last = 0; l != last; l = evaluation_next_length(l, T)) {
        const double mean = positions_mean(p, l);
        if (!isnan(mean)) printf("  %12lld %10.4f %12.4f\n", (long long)l, mean, exp(mean));
        last = l;
    }
    for (int k = 0; k < p->parts->count && p->parts->count > 1; k++)
        printf("%s  mean loss of %s %s\n", k ? "" : "\n", p->parts->parts[k].pattern,
               log_number(text, p->part_sums[k] / p->part_targets[k]));
    if (evaluation_masked(p))
        printf("\n%s counted; %.2f%% of them the likeliest token\n",
               counted((int64_t)positions_targets(p, T), "target").text, 100 * positions_accuracy(p));
    getrusage(RUSAGE_SELF, &usage);
    printf("\n%s in %.1f s, %.0f tokens/s; host memory %.0f MiB", counted(p->sequences * T, "token").text,
           seconds, rate, (double)usage.ru_maxrss / 1024);
    if (p->sequences > 1) printf("; standard error of the mean loss %.4f", positions_standard_error(p));
    printf("\n");
}

// ----------------------------------------------------------------------------
// the run

// Rotates the documents of data that was opened, where --roll asks for it.
static inline void evaluation_roll(Evaluation* e, const Options* o) {
    if (o->roll == OPTION_UNSET) return;
    if (e->data.set.doc_len == 0)
        die("--roll: --val-data %s has no documents, only a token stream", o->val_data);
    e->data.rolls = true;
    e->data.roll_seed = (uint64_t)o->roll;
}

// Collective: opens the data and checks that FILE can be written, before a model is read. Free with
// evaluation_run.
static inline Evaluation* evaluation_open(const Run* run) {
    Error err;
    uint64_t fingerprint;
    Evaluation* e = (Evaluation*)xcalloc(1, sizeof *e);
    if (run->world->rank == 0) result_open(&e->file, "eval", run->options.eval);
    run_open_data(run, &e->data, run->options.val_data, run_groups(run));
    evaluation_roll(e, &run->options);
    run_reserve_files(&e->data, NULL);
    if (e->data.set.doc_len > 0 &&
        !documents_check(run->options.seq_len, e->data.set.masked, run->group.size, &err))
        die("%s", err.msg);
    if (!dataset_fingerprint(&e->data.set, &fingerprint, &err)) die("%s", err.msg);
    const RankField fields[] = {{"shards in --val-data", fingerprint},
                                {"length of sequences (--seq-len)", (uint64_t)run->options.seq_len}};
    ranks_compare(run->world, fields);
    // sequences 0 .. items - 1 are the beginnings of all documents
    e->present = e->data.set.doc_len > 0 ? e->data.set.items : dataloader_sequences(&e->data);
    e->sequences = positions_share(run, &e->data, e->present);
    return e;
}

// Collective: fills pruned [layers] and returns the number of layers; 0 where nothing is pruned.
static inline int evaluation_pruned(double* pruned, const Trainer* trainer, Model* model, const Run* run) {
    const int L = (int)config_layers_of(&run->config, MIXER_ATTENTION);
    double* counts = (double*)xcalloc((size_t)(2 * L), sizeof *counts);
    bool prunes = trainer->pruning_counts && trainer->pruning_counts(model, counts);
    if (prunes) world_sum(run->world, counts, 2 * L);
    for (int l = 0; prunes && l < L; l++)
        pruned[l] = counts[2 * l] > 0 ? 1 - counts[2 * l + 1] / counts[2 * l] : 0;
    free(counts);
    return prunes ? L : 0;
}

// Collective: measures the last targets of documents behind the contexts that are shorter than the whole one.
static inline void evaluation_contexts(Evaluation* e, const Trainer* trainer, Model* model, const Run* run,
                                       DocumentLosses* d) {
    for (int k = 0; k < d->contexts - 1; k++) {
        Error err;
        Progress progress;
        DataOptions options = e->data.options;
        options.seq_len = d->context[k] + DOCUMENTS_LAST;
        options.skip = d->T - options.seq_len;
        dataloader_close(&e->data);
        if (!dataloader_open(&e->data, run->options.val_data, &options, &err)) die("%s", err.msg);
        evaluation_roll(e, &run->options);
        Positions p = positions_new(options.seq_len);
        p.documents = d;
        d->pass = k;
        progress_start(&progress, "shorter contexts", (double)(e->sequences * options.seq_len), "K tokens",
                       1000);
        positions_measure(&p, trainer, model, run, &e->data, e->sequences,
                          run->world->rank == 0 ? &progress : NULL);
        progress_end(&progress);
        positions_free(&p);
    }
    documents_reduce(d, run->world);
}

// Collective: evaluates, prints and writes the file, and frees e.
static inline void evaluation_run(Evaluation* e, const Trainer* trainer, Model* model, const Run* run) {
    const int64_t T = run->options.seq_len;
    const double tokens = (double)(e->sequences * T),
                 first = (double)(run->micro_batch * T * run_groups(run));
    Positions p = positions_new(T);
    DocumentLosses documents =
        documents_new(e->data.set.doc_len > 0 ? e->sequences : 0, T, e->data.set.masked);
    Progress progress;
    p.documents = &documents;
    evaluation_print_start(e, run);
    progress_start(&progress, "evaluation", tokens, "K tokens", 1000);
    positions_measure(&p, trainer, model, run, &e->data, e->sequences,
                      run->world->rank == 0 ? &progress : NULL);
    positions_reduce(&p, run->world);
    double now = seconds_now(), seconds = now - p.started;
    double rate = tokens > first ? (tokens - first) / (now - p.first_finished) : tokens / seconds;
    double* pruned = (double*)xcalloc((size_t)run->config.num_hidden_layers, sizeof *pruned);
    int layers = evaluation_pruned(pruned, trainer, model, run);
    progress_end(&progress);
    if (positions_targets(&p, T) == 0)
        die("--val-data %s: none of the %s counts", run->options.val_data,
            counted((int64_t)tokens, "target").text);
    if (documents.count > 0) evaluation_contexts(e, trainer, model, run, &documents);
    evaluation_print(&p, seconds, rate);
    documents_print(&documents);
    if (run->world->rank == 0) evaluation_write(&e->file, run, &p, seconds, rate, pruned, layers);
    free(pruned);
    positions_free(&p);
    documents_free(&documents);
    dataloader_close(&e->data);
    free(e);
}
