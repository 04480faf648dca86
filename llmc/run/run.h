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
#include "../checkpoint/record.h"
#include "../ranks/world.h"
#include "../baselines/mixers.h"
#include "../config/config_file.h"
#include "../config/presets.h"
#include "../model/sequence.h"
#include "../model/shard.h"
#include "../tokens/dataloader.h"
#include "chosen_model.h"
#include "command/mode.h"
#include "plan_data.h"
#include "recipe.h"
#include "schedule.h"

typedef struct {
    int lock;       // descriptor of OUT/lock, on rank 0; -1: nothing is written to --out
    int64_t* steps; // of the checkpoints, newest first
    int count;
} RunFolder;

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
    int64_t eval_tokens;          // of the longest of --eval-requests, at most, on the rank that answers
    char device[512];             // printed before training and --bench: a line on device and implementation
    double peak_flops;            // of this rank's device, per second, for MFU; 0: not known
    double planned_seconds;       // of the whole training; 0: not known
} Run;

// ----------------------------------------------------------------------------
// checkpoint

// Was the run resumed from a checkpoint?
static inline bool run_resumed(const Run* run) { return run->checkpoint[0] != '\0'; }

// Locks --out and lists its checkpoints, if the run writes to it. A plan of --resume only lists them.
static inline RunFolder run_folder_lock(const CommandLine* line) {
    Error err;
    RunFolder folder = {-1, NULL, 0};
    const char* out = line->options.out;
    if (line->options.resume && !out) die("--resume: from where? give --out DIR");
    const bool planned = line->mode == RUN_DRY && line->options.resume;
    if (!out || (line->mode != RUN_TRAIN && !planned)) return folder;
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

// Collective: all ranks get rank 0's text of a file of the checkpoint, to be freed; NULL if it cannot be
// read.
static inline char* run_read_text(const Run* run, const char* name, size_t* bytes, Error* err) {
    char path[PATH_LENGTH], *text = NULL;
    path_join(path, run->checkpoint, name);
    *bytes = 0;
    err->msg[0] = '\0';
    if (run->world->rank == 0) text = read_file(path, bytes, err);
    world_broadcast_text(run->world, &text, bytes);
    world_broadcast(run->world, err, sizeof *err);
    return text;
}

// Parses a checkpoint's trainer.json and then its config.json, and checks that they belong together.
static inline bool run_parse_checkpoint(Run* run, const char* trainer, size_t trainer_bytes,
                                        const char* config, size_t config_bytes, Error* err) {
    char path[PATH_LENGTH], trainer_path[PATH_LENGTH];
    path_join(trainer_path, run->checkpoint, "trainer.json");
    if (!checkpoint_parse_state(trainer_path, trainer, trainer_bytes, &run->state, &run->record, err))
        return false;
    const int64_t step = checkpoint_step(strrchr(run->checkpoint, '/') + 1);
    if (run->state.step != step)
        return fail(err, "%s: is of step %lld, not of this folder's", trainer_path,
                    (long long)run->state.step);
    path_join(path, run->checkpoint, "config.json");
    return checkpoint_check_config(path, config, config_bytes, &run->record, err) &&
           config_parse(&run->config, path, config, config_bytes, err) &&
           config_restore_initialization(&run->config, trainer_path, &run->record,
                                         json_get(&run->record, 0, "initialization"), err);
}

// Reads a checkpoint's config and trainer.json, and restores the options that were not given.
static inline bool run_read_checkpoint(Run* run, const CommandLine* line, Error* err) {
    size_t trainer_bytes, config_bytes;
    run->options = line->options;
    char* trainer = run_read_text(run, "trainer.json", &trainer_bytes, err);
    char* config = trainer ? run_read_text(run, "config.json", &config_bytes, err) : NULL;
    bool ok = config && run_parse_checkpoint(run, trainer, trainer_bytes, config, config_bytes, err);
    free(trainer);
    free(config);
    if (!ok) return false;
    const bool none[NUM_OPTION_ROWS] = {false};
    const int options = json_get(&run->record, 0, "options");
    options_defaults(&run->before);
    return options_restore(&run->before, none, run->checkpoint, &run->record, options, err) &&
           options_restore(&run->options, line->given, run->checkpoint, &run->record, options, err);
}

// ----------------------------------------------------------------------------
// what a resumed run may change

// What messages call the run that the checkpoint is of.
static inline const char* resume_name(const Run* run) {
    return run->branched ? run->checkpoint : run->options.out;
}

// Dies where the data position, a number of sequences, would mean other sequences than in the recorded run,
// or where the recipe is another.
static inline void resume_check_data_order(const Run* run) {
    const Options *o = &run->options, *before = &run->before;
    const struct {
        const char* name;
        int64_t value, recorded;
    } sizes[] = {{"seq-len", o->seq_len, before->seq_len}, {"seed", o->seed, before->seed}};
    for (int i = 0; i < 2; i++)
        if (sizes[i].recorded != OPTION_UNSET && sizes[i].recorded != sizes[i].value)
            die("--%s %lld: the run in %s has %lld, which cannot change when it resumes", sizes[i].name,
                (long long)sizes[i].value, resume_name(run), (long long)sizes[i].recorded);
    if (before->shuffle != o->shuffle)
        die("--shuffle: the run in %s reads its data %s, which cannot change when it resumes",
            resume_name(run), shuffle_text(before->shuffle));
    Error err;
    if (!recipe_check_resumed(o, before, resume_name(run), &err)) die("%s", err.msg);
}

// Dies where --set gives another rope_scaling=ntk than the run began with: its factor is not in the
// checkpoint, but the rope_base that it made of that of --init.
static inline void resume_check_ntk(const Run* run, const Options* o) {
    const Options* before = &run->before;
    for (int i = 0; i < o->set.count; i++) {
        const char* item = o->set.items[i];
        bool recorded = strncmp(item, "rope_scaling=ntk", strlen("rope_scaling=ntk")) != 0 || !o->init;
        for (int k = 0; k < before->set.count; k++) recorded |= strcmp(before->set.items[k], item) == 0;
        if (!recorded) die("--set %s: the run in %s began without it; leave it out", item, resume_name(run));
    }
}

// The checkpoint has the model, and --init is not read again. But a model named on the command line must be
// the same, or the user means another run. What names it stays as recorded: the same model can be described
// in several ways, and the folder of --init may have a newer checkpoint by now.
static inline void resume_check_model(Run* run, const CommandLine* line) {
    const Options *o = &line->options, *before = &run->before;
    if (!o->model && !o->init && o->set.count == 0) return;
    if (o->init && (before->init || before->model) && !init_is(o->init, before->init))
        die("--init %s: the run in %s started from %s, which cannot change when it resumes; leave it out",
            o->init, resume_name(run), before->init ? before->init : before->model);
    resume_check_ntk(run, o);
    Recipe recipe;
    const Config c = model_choose(&run->options, &run->config, &recipe);
    JsonWriter ours = json_writer(0), theirs = json_writer(0);
    json_begin_object(&ours, NULL), json_begin_object(&theirs, NULL);
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) { // as texts: padding bytes of the structs may differ
        config_put(&c, i, &ours), config_put(&run->config, i, &theirs);
        if (strcmp(ours.text, theirs.text) != 0)
            die(run->branched
                    ? "--resume-from %s: is of a model with another %s than the command line's; leave it out"
                    : "--out %s: its checkpoints are of a model with another %s than the command line's; "
                      "choose another folder",
                resume_name(run), config_keys[i].name);
    }
    json_writer_free(&ours), json_writer_free(&theirs);
    run->options.model = before->model, run->options.init = before->init;
    run->options.set = before->set;
}

// Names the checkpoint of --resume-from, RUN/step_N.
static inline void resume_branch(Run* run, const char* from) {
    size_t n = strlen(from);
    while (n > 1 && from[n - 1] == '/') n--;
    if (n >= PATH_LENGTH - 2) die("--resume-from %.100s...: is longer than a path", from);
    snprintf(run->checkpoint, sizeof run->checkpoint, "%s%.*s", strchr(from, '/') ? "" : "./", (int)n, from);
    if (checkpoint_step(strrchr(run->checkpoint, '/') + 1) < 0)
        die("--resume-from %s: not a checkpoint of a run, as in out/RUN/step_00001000", from);
    run->branched = true;
}

// Dies where a branch begins inside a cool-down: its learning rate would rise again.
static inline void resume_check_branch(const Run* run) {
    const Options* before = &run->before;
    if (!run->branched || !options_cools_down(before)) return;
    if (run->state.tokens > before->max_tokens - before->cooldown_tokens)
        die("--resume-from %s: lies in the cool-down of its run, which began at %s; take a checkpoint before "
            "that",
            run->checkpoint, counted(before->max_tokens - before->cooldown_tokens, "token").text);
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

// Dies where nothing is left to train with an option that the run has had another value of: its log and its
// checkpoints would tell of a training that never was.
static inline void resume_check_end(const Run* run) {
    const Options* o = &run->options;
    char at[RUN_PROGRESS_BYTES];
    if (run->state.step < run->last_step) return;
    for (const CliRow* row = option_rows; row < option_rows + NUM_OPTION_ROWS; row++) {
        const char* change = option_has(row, TRAINS) ? option_change(o, &run->before, row) : NULL;
        if (change)
            die("--%s: the run in %s is at %s, where nothing is left to train with it; leave it out, or "
                "choose another --out",
                change, resume_name(run), run_progress(at, run));
    }
}

// ----------------------------------------------------------------------------
// plan

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

// An option in trainer.json; -1 where there is none.
static inline int run_recorded(const Run* run, const char* name) {
    const Json* record = &run->record;
    return record->nodes ? json_get(record, json_get(record, 0, "options"), name) : -1;
}

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

// Does the model read bytes? Only the byte tokenizer has a vocabulary of this size.
static inline bool run_reads_bytes(const Run* run) { return run->config.vocab_size == 257; }

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

static inline void run_free(Run* run) {
    params_free(&run->table);
    json_free(&run->record);
}

// ----------------------------------------------------------------------------
// what follows from a run

// Measures of held-out loss from behind `step` on: as many as there are of the more frequent kind, which the
// other mostly falls together with.
static inline int64_t run_measures_left(const Run* run, bool validates, int64_t step) {
    const Options* o = &run->options;
    const int64_t validations = validates ? option_times(o->val_every, step, run->num_steps) : 0;
    const int64_t evaluations = o->eval_every ? option_times(o->eval_every, step, run->num_steps) : 0;
    return validations > evaluations ? validations : evaluations;
}

// Does it compute gradients?
static inline bool run_has_gradients(const Run* run) {
    return !mode_reads_sequences(run->mode) && run->mode != RUN_EVAL;
}

// Model FLOPs per token, forward and backward: those of the mixers, of a plan without attention over other
// documents, and in total also 6 per parameter but the input embedding's.
static inline double run_mixer_flops_per_token(const Run* run) {
    const double hidden = plan_data_hidden(run->plan_data, &run->config);
    return config_mixer_flops(&run->config, run->options.seq_len, hidden);
}
// Attention's part of them.
static inline double run_attention_flops_per_token(const Run* run) {
    return run_mixer_flops_per_token(run) - config_mixer_flops(&run->config, run->options.seq_len, 1);
}
static inline double run_flops_per_token(const Run* run) {
    return 6.0 * (double)run->table.non_embedding + run_mixer_flops_per_token(run);
}
