/*
The training of both trainers: the loop, validation, evaluation, samples, checkpoints.

A step of the loop, for a trainer with one step in flight:

    queue step s    begin_step, (load_batch, add_gradients) for each of the rank's micro-batches, update
    log step s - 1  finish_step; dies if the step is not valid (step_is_valid), where update changed nothing
    where due       log step s too, then begin to save, validate, evaluate and sample, in this order

A checkpoint is written in the background (saver.h), and gets its name as soon as all ranks have written
their parts, also within an evaluation. It is logged after the first step at which it has its name. At the end
of training a checkpoint, a validation and an evaluation are always due. A signal ends the run after the
current step, or within a validation or evaluation, of which nothing is logged then, with a checkpoint and
exit code RUN_EXIT_INTERRUPTED; the run that resumes begins with it. Where nothing has been trained that a
checkpoint would keep, the step is dropped after its current micro-batch.

With several ranks everyone runs this loop, and rank 0 writes the log. What they do next depends only on what
all of them know: options, and the votes that travel with each step's loss. So they leave the loop, save and
end together, whichever of them got the signal.

Called by main.h, and only there.
*/
#pragma once

#include "../checkpoint/saver.h"
#include "../eval/in_training.h"
#include "../run/report.h"
#include "../run/schedule.h"
#include "../run/trainer.h"
#include "data.h"
#include "signals.h"
#include "step_progress.h"

#define RUN_EXIT_INTERRUPTED 75 // EX_TEMPFAIL: run the same command again with --resume

// ----------------------------------------------------------------------------
// state of the training loop

typedef struct {
    const Trainer* trainer;
    Model* model;
    Run* run;
    World* world;
    Logger logger;
    DataLoader data, val_data;
    int64_t val_sequences; // 0: no validation
    LogStep queued[2];     // log lines of steps in flight; step s is in [s % 2]
    int64_t in_flight;
    double last_time;           // when the current step began, in seconds_now()
    StepVotes votes;            // of the step finished last, summed over ranks
    Saver saver;                // if the run has a folder
    CheckpointTensors snapshot; // on the host, of this rank's shard: what the saver writes
    HfTokenizer tokenizer;      // for checkpoints and samples; of rank 0
    Tokenizer sampler;          // of samples and requests; vocab_size 0: they are token ids
    Requests* requests;         // of --eval-requests; NULL: none, or another rank answers them
    bool cut;                   // a signal has ended what was to be measured last
    int64_t kept;               // last step whose state needs no checkpoint: the first, or one that has it
    StepProgress progress;      // of the step that is queued
    int64_t saving;             // step of the checkpoint in the making, and
    double saving_waited;       // for how many seconds training has waited for it
} Training;

// Is something due after `step` that happens every `every` steps? 0: never.
static inline bool run_due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

// Dies where --out is no longer the folder that this rank has locked. Rank 0 asks after every step, as a run
// whose folder is gone should not go on until the next save.
static inline void training_check_folder(const Training* t) {
    Error err;
    const Run* run = t->run;
    if (run->options.out && !out_lock_held(run->options.out, run->lock, &err)) die("%s", err.msg);
}

// Collective: opens and checks the data. Free with training_free.
static inline Training* training_new(const Trainer* trainer, Run* run, Requests* requests) {
    Training* t = (Training*)xcalloc(1, sizeof *t);
    const Options* o = &run->options;
    t->trainer = trainer;
    t->run = run;
    t->world = run->world;
    t->requests = requests;
    run_open_data(run, &t->data, o->data, run->micro_batches);
    run_choose_order(run, &t->data);
    if (o->val_data) {
        run_open_data(run, &t->val_data, o->val_data, run_groups(run));
        t->val_sequences = positions_share(run, &t->val_data, dataloader_sequences(&t->val_data));
    }
    const DataLoader* val_data = o->val_data ? &t->val_data : NULL;
    run_reserve_files(&t->data, val_data);
    data_check(run, &t->data, val_data);
    data_check_tokenizer(run, &t->data, val_data);
    if (o->val_data) data_check_held_out(&t->val_data);
    data_find_tokenizer(&t->tokenizer, run, &t->data);
    const bool infers = o->sample_every || t->requests;
    if (infers && t->tokenizer.json && !o->vocab)
        t->sampler = sample_tokenizer_parse("tokenizer.json", t->tokenizer.json);
    else if (infers)
        t->sampler = sample_tokenizer(run, false);
    if (requests) eval_requests_encode(requests, run, &t->sampler);
    if (requests) requests->stop = &run_interrupted;
    return t;
}

static inline void training_free(Training* t) {
    dataloader_close(&t->data);
    if (t->run->options.val_data) dataloader_close(&t->val_data);
    hf_tokenizer_free(&t->tokenizer);
    tokenizer_free(&t->sampler);
    free(t);
}

// Opens what is written, once the model is there.
static inline void training_open(Training* t) {
    Error err;
    Run* run = t->run;
    const Options* o = &run->options;
    training_check_folder(t);
    if (!logger_open(&t->logger, t->world->rank == 0 ? o->out : NULL, &err)) die("%s", err.msg);
    if (o->out && !saver_open(&t->saver, t->world, &run->table, o->out, run->lock, (int)o->keep, &err))
        die("%s", err.msg);
    t->logger.num_steps = run->num_steps;
    t->logger.log_every = o->log_every;
    t->logger.measure_tokens = t->val_sequences * o->seq_len;
    t->logger.flops_per_token = run_flops_per_token(run);
    t->logger.attention_flops = run_attention_flops_per_token(run);
    t->logger.peak_flops = run->peak_flops * t->world->size;
    dataloader_seek(&t->data, run->state.position);
}

// ----------------------------------------------------------------------------
// what is due after a step

// Collective: ends a run whose checkpoint could not be written, with one message of the rank that failed.
__attribute__((noreturn)) static inline void training_die_unsaved(Training* t, bool mine, const Error* err) {
    Error gone;                         // the cause of any other error
    if (!mine) world_barrier(t->world); // until the message of the other rank ends this one
    if (!out_lock_held(t->run->options.out, t->saver.lock, &gone)) die("%s", gone.msg);
    if (t->saver.published)
        die("%s; the checkpoint of step %lld is complete, but a power failure may still lose it; older ones "
            "are unchanged",
            err->msg, (long long)t->saving);
    die("%s; no checkpoint of step %lld, older ones are unchanged", err->msg, (long long)t->saving);
}

// Collective: waits for the checkpoint in the making, if there is one, until it has its name, and logs it. On
// error, such as a full disk, the run ends; older checkpoints are unchanged.
static inline void training_finish_save(Training* t) {
    Error err;
    bool mine;
    char folder[PATH_LENGTH];
    const char* out = t->run->options.out;
    if (!out || saver_state(&t->saver) == SAVER_IDLE) return;
    if (!saver_finish(&t->saver, &mine, &err)) training_die_unsaved(t, mine, &err);
    checkpoint_path(folder, out, t->saving);
    logger_checkpoint(&t->logger, t->saving, folder, t->saving_waited);
    watch_progress(t->world);
}

// Collective: begins to save a checkpoint, if the run has a folder. Training waits for the copy to the host,
// and for the checkpoint before this one.
static inline void training_save(Training* t) {
    Error err;
    const Run* run = t->run;
    if (!run->options.out) return;
    double start = seconds_now();
    training_finish_save(t);
    const Options* o = &run->options;
    JsonWriter options = json_writer(2);
    options_put(o, &options, NULL);
    char* recipe = recipe_text(o, &run->config, &t->data);
    char* fp8_record = t->trainer->fp8_record ? t->trainer->fp8_record(t->model) : NULL;
    const CheckpointRecord record = {.config = &run->config,
                                     .table = &run->table,
                                     .state = &run->state,
                                     .run = {.model = o->model,
                                             .init = o->init,
                                             .data = o->data,
                                             .code_version = CODE_VERSION,
                                             .seq_len = o->seq_len,
                                             .seed = o->seed,
                                             .tokens = run->state.tokens,
                                             .json_escape = o->json_escape},
                                     .tokenizer = &t->tokenizer,
                                     .options = options.text,
                                     .recipe = recipe,
                                     .fp8 = fp8_record};
    t->saving = run->state.step;
    t->saver.published = false;
    t->trainer->download(t->model, &t->snapshot);
    if (!saver_start(&t->saver, &record, &t->snapshot, &err))
        training_die_unsaved(t, t->world->rank == 0, &err);
    json_writer_free(&options);
    free(recipe), free(fp8_record);
    t->votes.written = 0; // votes of the checkpoint before; with a step in flight they are read again
    t->saving_waited = seconds_now() - start;
}

// Collective: measures the loss on the first val_sequences held-out sequences, each rank on its share. Logs it
// as a validation, at the end of the run also by position, as part of an evaluation, or as both; of an
// evaluation rank 0 also answers the requests. A signal ends it, with nothing logged.
static inline void training_measure(Training* t, bool validates, bool evaluates) {
    const Run* run = t->run;
    const int64_t T = run->options.seq_len;
    double start = seconds_now();
    LogValidation v;
    Positions p = positions_new(T);
    memset(&v, 0, sizeof v);
    p.stop = &run_interrupted;
    if (t->val_sequences) {
        Progress progress;
        const bool shows = t->world->rank == 0 && isatty(STDERR_FILENO);
        progress_start(&progress, "held-out loss", (double)(t->val_sequences * T), "K tokens", 1000);
        positions_measure(&p, t->trainer, t->model, run, &t->val_data, t->val_sequences,
                          shows ? &progress : NULL);
        positions_reduce(&p, t->world);
        progress_end(&progress);
    }
    t->cut = p.sequences < t->val_sequences; // on one of the ranks
    for (int64_t i = 0; i < T; i++) log_validation_add(&v, i, p.sums[i], (int64_t)p.counts[i]);
    v.masked = t->val_data.set.masked;
    v.parts = &t->val_data.set.mixture;
    memcpy(v.part_sums, p.part_sums, sizeof v.part_sums);
    memcpy(v.part_targets, p.part_targets, sizeof v.part_targets);
    v.accuracy = positions_accuracy(&p);
    v.byte_tokens = data_is_bytes(run, &t->data);
    v.seconds = seconds_now() - start;
    if (t->val_sequences && !t->cut && positions_targets(&p, T) == 0)
        logger_warning(&t->logger, run->state.step,
                       "--val-data: none of the targets counts; there is no loss");
    if (validates && !t->cut) {
        start = seconds_now();
        logger_validation(&t->logger, run->state.step, &v);
        if (run->state.step >= run->last_step) run_print_by_position(&v);
    }
    if (evaluates && !t->cut) {
        const bool answered = t->requests && eval_requests_answer(t->requests, t->trainer, t->model);
        t->cut = t->requests && !answered && run_interrupted;
        v.seconds = seconds_now() - start;
        if (!t->cut) log_evaluation(&t->logger, run->state.step, &v, &p, answered ? t->requests : NULL);
    }
    if (!t->cut) t->logger.measure_seconds = v.seconds;
    positions_free(&p);
}

// Whether a measure was due at the step of the checkpoint that is resumed, and the log has none of this step:
// a signal or a crash had ended it.
static inline bool training_lacks(const Training* t, const char* event, int64_t every) {
    const int64_t step = t->run->state.step;
    return run_resumed(t->run) && !t->run->branched && run_due(every, step) &&
           !logger_has(&t->logger, event, step);
}

// Collective, before the first step: measures what rank 0's log lacks. With no step left, it measures what
// every run ends with.
static inline void training_measure_first(Training* t) {
    const Options* o = &t->run->options;
    const bool ended = t->run->state.step >= t->run->last_step;
    double due[2] = {0, 0}; // a validation, an evaluation
    if (t->world->rank == 0) {
        due[0] = t->val_sequences && (ended || training_lacks(t, "validation", o->val_every));
        due[1] = o->eval_every && (ended || training_lacks(t, "evaluation", o->eval_every));
    }
    world_sum(t->world, due, 2);
    if (due[0] + due[1] > 0) training_measure(t, due[0] > 0, due[1] > 0);
}

// Rank 0 generates a sample; the others wait with their next collective.
static inline void training_sample(Training* t) {
    if (t->world->rank != 0) return;
    char* text = generate_sample(t->run, &t->sampler, t->trainer, t->model);
    if (text) logger_event(&t->logger, t->run->state.step, "sample", text);
    free(text);
}

// ----------------------------------------------------------------------------
// training

// Collective: ends a run whose step is not valid. The first rank whose own part is not finite names the first
// such tensor.
__attribute__((noreturn)) static inline void training_die_not_valid(const Training* t, const LogStep* line) {
    ranks_wait_turn(t->world, !line->own_finite);
    if (line->grad_norm == 0)
        die("step %lld: the gradient is exactly 0 at a loss of %g: the weights have no effect on the loss, "
            "as where they are 0 or far too small; they were not updated; look at the weights of --init, "
            "or give other initial ones",
            (long long)line->step, line->loss);
    const char* weight = t->trainer->first_not_finite(t->model, false);
    const char* name = weight ? weight : t->trainer->first_not_finite(t->model, true);
    die("step %lld: the loss is %g and the gradient norm %g (first in the %s of %s); the weights were not "
        "updated; resume from the last checkpoint with a lower --lr, or look at the data",
        (long long)line->step, line->loss, line->grad_norm, weight ? "weights" : "gradient",
        name ? name : "no tensor, but squares overflow");
}

// A step of which no target counts has no loss. AdamW went on with a gradient of 0.
static inline void training_log_empty(Training* t, LogStep* line) {
    char text[160];
    snprintf(text, sizeof text, "step %lld: none of its %s counts: its gradient is 0", (long long)line->step,
             counted(line->step_tokens, "target").text);
    line->loss = NAN;
    logger_warning(&t->logger, line->step, text);
}

// A step that --skip-spikes leaves out.
static inline void training_log_spike(Training* t, const LogStep* line) {
    char text[160];
    snprintf(text, sizeof text,
             "step %lld: left out, a spike: the gradient norm is %.4g, of which --skip-spikes %g allows %.4g",
             (long long)line->step, line->grad_norm, t->run->options.skip_spikes, line->spike_norm);
    logger_warning(&t->logger, line->step, text);
}

// Finishes and logs the oldest steps in flight until `remaining` are left.
static inline void training_finish_steps(Training* t, int64_t remaining) {
    for (; t->in_flight > remaining; t->in_flight--) {
        LogStep* line = &t->queued[(t->run->state.step - t->in_flight + 1) % 2];
        t->trainer->finish_step(t->model, line);
        step_pruned(line, t->run);
        if (!step_is_valid(line->loss, line->grad_norm, &line->votes)) {
            training_finish_save(t); // of an earlier step
            training_die_not_valid(t, line);
        }
        if (step_is_empty(&line->votes)) training_log_empty(t, line);
        if (norm_is_spike(line->grad_norm, line->spike_norm)) training_log_spike(t, line);
        if (t->run->options.skip_spikes > 0)
            t->run->state.norms.values[line->step % NORMS_KEPT] = line->grad_norm;
        t->votes = line->votes;
        double now = seconds_now();
        line->seconds = now - t->last_time;
        t->last_time = now;
        logger_step(&t->logger, line);
        training_check_folder(t);
    }
}

// What this rank tells the others with a step.
static inline StepVotes training_votes(const Training* t) {
    SaverState saving = t->run->options.out ? saver_state(&t->saver) : SAVER_IDLE;
    const bool counts = t->run->group.rank == 0; // of ranks that share sequences one counts their tokens
    const int64_t tokens = counts ? t->data.options.share.count * t->data.options.seq_len : 0;
    const StepVotes votes = {.stop = run_interrupted ? 1.0 : 0.0,
                             .written = saving == SAVER_WRITTEN ? 1.0 : 0.0,
                             .failed = saving == SAVER_FAILED ? 1.0 : 0.0,
                             .tokens = (double)tokens,
                             .targets = (double)(counts ? tokens - t->data.uncounted : 0),
                             .documents = run_documents(t->run, &t->data.documents)};
    return votes;
}

// Tells the watch that this rank comes along. First steps take longer: kernels are loaded, GEMM algorithms
// chosen.
static inline void training_progress(Training* t) {
    const double first_step = 600;
    watch_progress(t->world);
    if (t->logger.steps == 0) watch_allow(t->world, first_step);
}

// Does a signal end the run within the step? Only of a rank alone, as others would wait for its part, and
// only where there is nothing to save. Tells the signal's handler, too (run_drops_step).
static inline bool training_drops_step(const Training* t) {
    run_drops_step = t->world->size == 1 && (!t->run->options.out || t->run->state.step == t->kept);
    return run_drops_step && run_interrupted;
}

// Queues one optimizer step and advances the state past it. False: a signal has ended the run within it.
static inline bool training_queue_step(Training* t) {
    const Options* o = &t->run->options;
    TrainerState* state = &t->run->state;
    int64_t step_tokens = t->run->batch_sequences * o->seq_len;
    double lr = schedule_lr(o, state->tokens, step_tokens);
    AdamWParams adamw = options_adamw(o, lr, state->step + 1);
    if (o->skip_spikes > 0)
        adamw.spike_norm = grad_norms_limit(&state->norms, state->step + 1, o->skip_spikes);
    int64_t mine = t->data.options.share.count / t->run->micro_batch;
    const bool waits = t->trainer->steps_in_flight == 0 && t->world->rank == 0; // for each micro-batch
    step_progress_begin(&t->progress, waits, t->logger.steps == 0, mine);
    t->trainer->begin_step(t->model);
    t->data.uncounted = 0;
    memset(&t->data.documents, 0, sizeof t->data.documents);
    for (int64_t i = 0; i < run_rank_batches(t->run); i++) {
        training_progress(t); // as often on all ranks, though one may have a micro-batch less
        if (training_drops_step(t)) break;
        if (i >= mine) continue;
        t->trainer->load_batch(t->model, &t->data);
        t->trainer->add_gradients(t->model, step_tokens, i + 1 == mine);
        step_progress_add(&t->progress, &t->logger, state->step + 1, t->run->num_steps - state->step);
    }
    step_progress_end(&t->progress);
    if (training_drops_step(t)) return false;
    StepVotes votes = training_votes(t);
    t->trainer->update(t->model, &adamw, o->grad_clip, &votes);
    state->step++;
    state->tokens += step_tokens;
    state->position = dataloader_position(&t->data);

    LogStep* line = &t->queued[state->step % 2];
    memset(line, 0, sizeof *line);
    line->step = state->step;
    line->tokens = state->tokens;
    line->step_tokens = step_tokens;
    line->lr = lr;
    line->spike_norm = adamw.spike_norm;
    line->masked = t->data.set.masked;
    line->sequence_ranks = t->run->group.size;
    line->measures_left = run_measures_left(t->run, t->val_sequences > 0, state->step);
    t->in_flight++;
    return true;
}

// Has a rank got a signal? Alone it is known at once, with several ranks from the votes of a step.
static inline bool training_stops(const Training* t) {
    return t->world->size == 1 ? run_interrupted : t->votes.stop > 0;
}

// The training loop, until the last step or a signal. Returns whether the present state needs no checkpoint.
static inline bool training_loop(Training* t) {
    const Trainer* trainer = t->trainer;
    const Options* o = &t->run->options;
    TrainerState* state = &t->run->state;
    bool saved = run_resumed(t->run) && !t->run->branched;
    while (state->step < t->run->last_step && !training_stops(t)) {
        if (!training_queue_step(t)) break;
        bool last = state->step == t->run->last_step;
        bool validates = t->val_sequences && (last || run_due(o->val_every, state->step));
        bool evaluates = o->eval_every && (last || run_due(o->eval_every, state->step));
        bool samples = run_due(o->sample_every, state->step);
        saved = last || run_due(o->save_every, state->step);
        bool due = saved || validates || evaluates || samples;
        training_finish_steps(t, due ? 0 : trainer->steps_in_flight);
        if (t->votes.failed > 0 || t->votes.written == t->world->size) training_finish_save(t);
        if (!due) continue;
        if (saved) {
            training_save(t);
            t->kept = state->step;
        }
        if (validates || evaluates) training_measure(t, validates, evaluates);
        if (samples) training_sample(t);
        t->last_time = seconds_now();
    }
    training_finish_steps(t, 0);
    return saved || (training_stops(t) && state->step == t->kept);
}

// Logs the run, and where it resumes. One that has nothing left to do leaves the log as it is.
static inline void training_log_start(Training* t) {
    const Run* run = t->run;
    char shared[DATA_WARNING_BYTES];
    const bool works =
        !run_resumed(run) || run->state.step < run->last_step || t->val_sequences || run->options.eval_every;
    char* recipe = recipe_text(&run->options, &run->config, &t->data);
    if (works) run_log(run, &t->logger, t->trainer->built_with, recipe, &t->data);
    free(recipe);
    if (run_resumed(run)) run_log_resume(run, &t->logger, works);
    if (t->world->rank == 0 && run->options.val_data && data_is_shared(&t->data, &t->val_data, shared))
        logger_warning(&t->logger, run->state.step, shared);
}

// Collective: trains from run->state to run->last_step, or until a signal. snapshot: host memory for a copy
// of the rank's shard, if the run has a folder. Returns the exit code.
static inline int train(Training* t, Model* model, const CheckpointTensors* snapshot) {
    Run* run = t->run;
    const Options* o = &run->options;
    TrainerState* state = &run->state;
    t->model = model;
    t->snapshot = *snapshot;
    if (o->skip_spikes == 0) memset(&state->norms, 0, sizeof state->norms);
    training_open(t);
    if (run->world->size == 1) run_catch_signals(run->world);
    run_print_start(run, &t->data, t->val_sequences);
    training_log_start(t);
    char at[RUN_PROGRESS_BYTES];
    if (state->step >= run->last_step)
        printf("nothing left to do: the run is at %s\n", run_progress(at, run));
    printf("%s", run->device);

    t->kept = state->step;
    t->last_time = seconds_now();
    training_measure_first(t);
    bool saved = training_loop(t);
    if (!saved) training_save(t); // after a signal, or with --max-steps 0
    training_finish_save(t);
    training_check_folder(t);
    if (o->out) saver_close(&t->saver);
    logger_close(&t->logger);
    double cut = t->cut; // of the last requests, on rank 0 alone
    world_sum(run->world, &cut, 1);
    const bool ended = state->step >= run->last_step && cut == 0;
    return ended ? EXIT_SUCCESS : RUN_EXIT_INTERRUPTED;
}
