/*
A run: what a process is to do, and how far it has come. configure.h makes it of the command line; a trainer
adds what it knows of its device, and the training its progress.
*/
#pragma once

#include "../checkpoint/record.h"
#include "../ranks/world.h"
#include "../baselines/mixers.h"
#include "../model/sequence.h"
#include "../model/shard.h"
#include "command/mode.h"
#include "plan_data.h"

typedef struct {
    RunMode mode;
    World* world;
    Options options; // complete
    Options before;  // of a resumed run: the options that its checkpoint records
    Config config;
    ParamTable table;
    Shard shard;                  // this rank's, of the table's flat buffers
    SequenceGroup group;          // of the ranks that share its sequences
    int64_t batch_sequences;      // sequences of an optimizer step
    int64_t micro_batch;          // B: sequences of a forward and backward pass
    int64_t micro_batches;        // forward and backward passes of a step, of all ranks together
    int64_t num_steps;            // of the whole training
    int64_t last_step;            // after which this process ends
    TrainerState state;           // progress, updated while training
    char checkpoint[PATH_LENGTH]; // folder to resume from; empty: start from --init, or from weights drawn
    char init[PATH_LENGTH];       // the newest checkpoint in --init; empty: that is a model's own folder
    bool branched;                // the checkpoint is another run's, that of --resume-from
    bool data_changed;            // since the checkpoint, by --data-changed
    int lock;                     // of the RunFolder
    Json record;                  // its trainer.json, or --init's with --eval; texts in options point into it
    const PlanData* plan_data;    // with --dry-run; else NULL
    int64_t eval_tokens;          // most tokens of one of --eval-requests; set on the rank that answers
    char device[512];             // printed before training and --bench: a line on device and implementation
    double peak_flops;            // of this rank's device, per second, for MFU; 0: not known
    double planned_seconds;       // of the whole training; 0: not known
} Run;

static inline void run_free(Run* run) {
    params_free(&run->table);
    json_free(&run->record);
}

// ----------------------------------------------------------------------------
// what follows from a run

// Was the run resumed from a checkpoint?
static inline bool run_resumed(const Run* run) { return run->checkpoint[0] != '\0'; }

// Does the run only infer, without gradients and optimizer state?
static inline bool run_infers(const Run* run) {
    return run->mode == RUN_GENERATE || run->mode == RUN_REQUESTS;
}

// The number of ranks that the run is planned for.
static inline int run_ranks(const Run* run) {
    const Options* o = &run->options;
    if (run->mode != RUN_DRY) return run->world->size;
    return (int)(o->ranks != OPTION_UNSET ? o->ranks : o->sequence_ranks);
}

// Groups of ranks that share sequences: as many as ranks, where each has its own.
static inline int run_groups(const Run* run) { return run_ranks(run) / (int)run->options.sequence_ranks; }

// Micro-batches a step of the busiest rank.
static inline int64_t run_rank_batches(const Run* run) {
    return (run->micro_batches + run_groups(run) - 1) / run_groups(run);
}

// Does the run compute gradients?
static inline bool run_has_gradients(const Run* run) {
    return !mode_reads_sequences(run->mode) && run->mode != RUN_EVAL;
}

// Does the model read bytes? Few other tokenizers have a vocabulary of this size (data_is_bytes).
static inline bool run_reads_bytes(const Run* run) { return run->config.vocab_size == 257; }

// An option in trainer.json; -1 where there is none.
static inline int run_recorded(const Run* run, const char* name) {
    const Json* record = &run->record;
    return record->nodes ? json_get(record, json_get(record, 0, "options"), name) : -1;
}

// Where a run is: "step 3 of 20", and --max-steps where that ends it before.
enum { RUN_PROGRESS_BYTES = 128 };
static inline const char* run_progress(char text[RUN_PROGRESS_BYTES], const Run* run) {
    const long long step = run->state.step, steps = run->num_steps, last = run->last_step;
    const int n = snprintf(text, RUN_PROGRESS_BYTES, "step %lld of %lld", step, steps);
    if (last < steps)
        snprintf(text + n, RUN_PROGRESS_BYTES - (size_t)n, ", %s --max-steps %lld",
                 step > last ? "behind" : "at", last);
    return text;
}

// How often the held-out loss is still to be measured when `step` has been trained. A validation and an
// evaluation of one step are one measure: counts the more frequent of the two, with which the other mostly
// coincides.
static inline int64_t run_measures_left(const Run* run, bool validates, int64_t step) {
    const Options* o = &run->options;
    const int64_t validations = validates ? option_times(o->val_every, step, run->num_steps) : 0;
    const int64_t evaluations = o->eval_every ? option_times(o->eval_every, step, run->num_steps) : 0;
    return validations > evaluations ? validations : evaluations;
}

// Model FLOPs per token, forward and backward: of the mixers, in a plan without attention over other
// documents.
static inline double run_mixer_flops_per_token(const Run* run) {
    const double hidden = plan_data_hidden(run->plan_data, &run->config);
    return config_mixer_flops(&run->config, run->options.seq_len, hidden);
}
// Attention's part of these.
static inline double run_attention_flops_per_token(const Run* run) {
    return run_mixer_flops_per_token(run) - config_mixer_flops(&run->config, run->options.seq_len, 1);
}
// In total: also 6 per parameter but the input embedding's.
static inline double run_flops_per_token(const Run* run) {
    return 6.0 * (double)run->table.non_embedding + run_mixer_flops_per_token(run);
}
