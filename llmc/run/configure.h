/*
The start of a run, as a pipeline of values. Each stage makes one value from those before it and changes none
of them:

    CommandLine   options given, and what to do with them             command_line_parse (command/mode.h)
    World         the ranks (llmc/ranks/world.h)                      world_identify, world_connect
    RunFolder     lock on --out and its checkpoints                   run_folder_open
    Run           a checkpoint, options and config from it,           run_configure: run_find_start,
                  options completed by mode and recipe,               run_complete_options,
                  the group of ranks, parameter table,                run_plan_group,
                  checked options,                                    mode_check_completed (command/mode.h),
                  batches, steps                                      run_plan

With several ranks, rank 0 alone locks --out and reads its checkpoints' texts, which the others get from it:
they need not see its folder.

Called by main.h. If the checkpoint proves damaged, the last stage is repeated with the next older one, and
nothing of the damaged one remains. These are the outermost layers of a program: most functions die() on
error.
*/
#pragma once

#include "../checkpoint/out.h"
#include "../config/presets.h"
#include "../tokens/dataloader.h"
#include "resume.h"
#include "schedule.h"

typedef struct {
    int lock;       // descriptor of OUT/lock, on rank 0; -1: nothing is written to --out
    int64_t* steps; // of the checkpoints, newest first
    int count;
} RunFolder;

// ----------------------------------------------------------------------------
// the folder of checkpoints

// Locks --out and lists its checkpoints, if the run writes to it. A plan of --resume only lists them.
static inline RunFolder run_folder_lock(const CommandLine* line) {
    Error err;
    RunFolder folder = {-1, NULL, 0};
    char path[PATH_LENGTH];
    const char* out = line->options.out;
    if (line->options.resume && !out) die("--resume: from where? give --out DIR");
    const bool planned = line->mode == RUN_DRY && line->options.resume;
    if (!out || (line->mode != RUN_TRAIN && !planned)) return folder;
    path_join(path, out, "trainer.json");
    if (access(path, F_OK) == 0) // --resume would find no checkpoint in it, and start anew
        die("--out %s: is a checkpoint: give the folder of its run, or begin another one with --resume-from",
            out);
    if (!planned && !out_lock(out, &folder.lock, &err)) die("%s", err.msg);
    folder.count = checkpoint_list(out, &folder.steps, &err);
    if (folder.count < 0) die("%s", err.msg);
    if (folder.count > 0 && !line->options.resume)
        die("--out %s: holds checkpoints of a run already; continue it with --resume, or choose another "
            "folder",
            out);
    return folder;
}

// Collective: rank 0 locks --out and lists its checkpoints, for all ranks.
static inline RunFolder run_folder_open(const CommandLine* line, World* world) {
    RunFolder folder = {-1, NULL, 0};
    if (world->rank == 0) folder = run_folder_lock(line);
    world_broadcast(world, &folder.count, sizeof folder.count);
    if (world->rank != 0) folder.steps = (int64_t*)xcalloc((size_t)folder.count, sizeof *folder.steps);
    world_broadcast(world, folder.steps, (size_t)folder.count * sizeof *folder.steps);
    return folder;
}

// ----------------------------------------------------------------------------
// steps and micro-batches

// Sets the schedule and the steps to do from run->state. Resuming may change --max-tokens and --batch-tokens,
// so the number of steps follows from the number of tokens.
static inline void run_plan_steps(Run* run) {
    const Options* o = &run->options;
    int64_t left = o->max_tokens - run->state.tokens;
    run->state.lr = o->lr;
    run->state.warmup_tokens = o->warmup_tokens;
    run->state.max_tokens = o->max_tokens;
    run->num_steps = run->state.step + (left > 0 ? (left + o->batch_tokens - 1) / o->batch_tokens : 0);
    run->last_step =
        o->max_steps != OPTION_UNSET && o->max_steps < run->num_steps ? o->max_steps : run->num_steps;
}

// Chooses the micro-batch, a divisor of the step's sequences S and at most `most`, that minimizes the
// sequences of the busiest group of ranks; on a tie, the largest.
static inline int64_t run_choose_micro_batch(int64_t S, int64_t most, int64_t groups) {
    int64_t best = 1, best_load = S;
    for (int64_t B = 1; B <= most && B * groups <= S; B++) {
        int64_t load = (S / B + groups - 1) / groups * B;
        if (S % B == 0 && load <= best_load) best = B, best_load = load;
    }
    return best;
}

// Tokens of a step of --bench without --batch-tokens: a micro-batch on each rank, or group of them.
static inline int64_t run_bench_tokens(const Run* run, int64_t suggested_tokens) {
    const Options* o = &run->options;
    int64_t T = o->seq_len, suggested = suggested_tokens / T < 1 ? 1 : suggested_tokens / T;
    return (o->micro_batch == OPTION_UNSET ? suggested : o->micro_batch) * T * run_groups(run);
}

// Refuses sizes that overflow an int64_t: no machine has the memory.
static inline void run_check_pass_size(const Run* run) {
    const int64_t B = run->micro_batch, T = run->options.seq_len;
    const Config* c = &run->config;
    double layer = (double)params_widest_proj(&run->table, c->num_hidden_layers) +
                   8.0 * (double)c->hidden_size + 3.0 * (double)config_mlp_size(c);
    double pass = (double)B * (double)T * ((double)c->num_hidden_layers * layer + (double)c->vocab_size);
    if (pass > 1e15)
        die("--micro-batch %lld of --seq-len %lld: %.1e numbers in a forward pass, more than any machine "
            "holds",
            (long long)B, (long long)T, pass);
}

// Sets the sizes of step and micro-batch; by default at most suggested_tokens a micro-batch.
static inline void run_plan_batches(Run* run, int64_t suggested_tokens) {
    const Options* o = &run->options;
    int64_t T = o->seq_len, B = o->micro_batch, groups = run_groups(run);
    const char* ranks = o->sequence_ranks > 1 ? "groups of ranks" : "ranks";
    if (o->batch_tokens % T != 0)
        die("--batch-tokens %lld: not a multiple of the %s of a sequence (--seq-len)",
            (long long)o->batch_tokens, counted(T, "token").text);
    run->batch_sequences = o->batch_tokens / T;
    if (groups > run->batch_sequences)
        die("%lld %s for the %s of a step (--batch-tokens / --seq-len): start fewer", (long long)groups,
            ranks, counted(run->batch_sequences, "sequence").text);
    if (B == OPTION_UNSET) B = run_choose_micro_batch(run->batch_sequences, suggested_tokens / T, groups);
    if (run->batch_sequences % B != 0)
        die("--micro-batch %lld: does not divide the %s of a step (--batch-tokens / --seq-len)", (long long)B,
            counted(run->batch_sequences, "sequence").text);
    run->micro_batch = B;
    run->micro_batches = run->batch_sequences / B;
    if (run->micro_batches < groups)
        die("--micro-batch %lld: a step has %s, too few for %lld %s; lower it", (long long)B,
            counted(run->micro_batches, "micro-batch").text, (long long)groups, ranks);
    run_check_pass_size(run);
}

// ----------------------------------------------------------------------------
// --eval, --generate, --requests and --maps: what the trainer.json in --init tells

// --seq-len of the training that wrote the checkpoint of --init; OPTION_UNSET for a folder of another origin.
static inline int64_t run_trained_length(const Run* run) {
    int64_t length = OPTION_UNSET;
    const bool known = json_int64(&run->record, run_recorded(run, "seq-len"), &length);
    return known && length >= 1 && length <= 1 << 24 ? length : OPTION_UNSET;
}

// For generation, requests and maps: a sequence has at most the trained length, unless --seq-len is given. A
// trainer.json that cannot be read is that of a folder of another origin.
static inline void run_complete_inference(Run* run) {
    Error ignored;
    char path[PATH_LENGTH];
    Options* o = &run->options;
    if (!o->init || o->seq_len != OPTION_UNSET) return;
    path_join(path, o->init, "trainer.json");
    if (json_parse_file(&run->record, path, &ignored)) o->seq_len = run_trained_length(run);
}

// The length of the documents in --val-data; 0: a stream.
static inline int64_t run_document_length(const Run* run) {
    Error err;
    DataLoader data;
    const DataOptions options = data_options(&run->config, 1);
    if (!dataloader_open(&data, run->options.val_data, &options, &err)) die("%s", err.msg);
    const int64_t length = data.set.doc_len;
    dataloader_close(&data);
    return length;
}

// Completes the options of --eval with another default than in training, from the data and from the
// trainer.json in --init. A folder without one leaves the length to the nearest preset's recipe.
static inline void run_complete_eval(Run* run) {
    enum { LONG = 65536 }; // the paper's length
    Error err;
    char path[PATH_LENGTH];
    Options* o = &run->options;
    path_join(path, o->init, "trainer.json");
    if (access(path, F_OK) == 0 && !json_parse_file(&run->record, path, &err)) die("%s", err.msg);
    if (o->val_tokens == OPTION_UNSET) o->val_tokens = 1LL << 53; // all
    if (o->seq_len != OPTION_UNSET) return;
    if (run_document_length(run) >= LONG)
        o->seq_len = LONG;
    else
        o->seq_len = run_trained_length(run);
}

// The micro-batch of --eval, the same on any number of ranks.
static inline void run_plan_eval(Run* run, int64_t suggested_tokens) {
    const Options* o = &run->options;
    const int64_t suggested = suggested_tokens / o->seq_len;
    run->micro_batch = o->micro_batch != OPTION_UNSET ? o->micro_batch : suggested > 1 ? suggested : 1;
    run_check_pass_size(run);
}

// Sets the group of ranks that shares sequences. Dies where there can be none.
static inline void run_plan_group(Run* run) {
    Error err;
    const Options* o = &run->options;
    if (!sequence_check(&run->config, o->sequence_ranks, run_ranks(run), o->seq_len, &err))
        die("%s", err.msg);
    run->group = sequence_group(run->world->rank, o->sequence_ranks);
}

// ----------------------------------------------------------------------------
// the stages

// Suggested tokens of a micro-batch on a GPU
enum { RUN_GPU_TOKENS = 16384 };

// Sets options, config and recipe: those of the checkpoint in `folder` of index `candidate`, the newest one
// being 0; if there is none those of --resume-from, or of the command line. Fails if the checkpoint is
// damaged.
static inline bool run_find_start(Run* run, const CommandLine* line, const RunFolder* folder, int candidate,
                                  Recipe* recipe, Error* err) {
    if (candidate >= folder->count && !line->options.resume_from) {
        run->options = line->options;
        init_find(&run->options, run->init, run->world->rank == 0);
        run->config = model_choose(&run->options, NULL, recipe);
        run->state.seed = run->options.seed;
        return true;
    }
    if (candidate < folder->count)
        checkpoint_path(run->checkpoint, line->options.out, folder->steps[candidate]);
    else
        resume_branch(run, line->options.resume_from);
    if (!run_read_checkpoint(run, line, err)) return false;
    resume_check_data_order(run);
    resume_check_model(run, line);
    resume_check_parent(run, line);
    *recipe = config_nearest_recipe(&run->config); // of options that are not recorded
    options_apply_recipe(&run->before, recipe);
    resume_check_branch(run);
    return true;
}

// Completes the options: first by the mode, then by the recipe.
static inline void run_complete_options(Run* run, const Recipe* recipe) {
    if (run->options.vocab && run_reads_bytes(run))
        die("--vocab: this model reads bytes: leave it out, or begin one with --set vocab_size=50257");
    if (run->mode == RUN_EVAL) run_complete_eval(run);
    if (mode_reads_sequences(run->mode)) run_complete_inference(run);
    options_apply_recipe(&run->options, recipe);
    if (mode_reads_sequences(run->mode)) run->options.batch_tokens = run->options.seq_len;
}

// Plans batches and, but for --eval, steps.
static inline void run_plan(Run* run, int64_t suggested_tokens) {
    if (run->mode == RUN_EVAL) {
        run_plan_eval(run, suggested_tokens);
        return;
    }
    run_plan_batches(run, suggested_tokens);
    schedule_check(&run->options);
    run_plan_steps(run);
}

// Makes the run of a command line, as run_find_start says from where. suggested_tokens: size of a micro-batch
// that suits the trainer. Returns false, with *err, if the checkpoint is damaged; other errors end the
// program with a message. Free with run_free, also on error.
static inline bool run_configure(Run* run, const CommandLine* line, World* world, const RunFolder* folder,
                                 int candidate, int64_t suggested_tokens, Error* err) {
    Recipe recipe;
    const Options* o = &run->options;
    memset(run, 0, sizeof *run);
    run->mode = line->mode;
    run->world = world;
    run->lock = folder->lock;
    if (!run_find_start(run, line, folder, candidate, &recipe, err)) return false;
    const bool bench = run->mode == RUN_BENCH && o->batch_tokens == OPTION_UNSET; // before a recipe sets it
    run_complete_options(run, &recipe);
    run_plan_group(run);
    if (o->gpu || o->gpu_memory != OPTION_UNSET) suggested_tokens = RUN_GPU_TOKENS;
    suggested_tokens *= o->sequence_ranks;
    if (bench) run->options.batch_tokens = run_bench_tokens(run, suggested_tokens);
    run->table = params_build_for(&run->config, run_ranks(run));
    run->shard = params_shard(&run->table, world->rank, run_ranks(run));
    mode_check_completed(line, o, world->size);
    run_plan(run, suggested_tokens);
    if (run_resumed(run)) resume_check_end(run);
    return true;
}
