/*
The run skeleton of both trainers: main, the training loop, validation, samples, checkpoints, --dump.

A step of the loop, for a trainer with one step in flight:

    queue step s    begin_step, (load_batch, add_gradients) x grad_accum_steps, update
    log step s - 1  finish_step; dies if loss or gradient norm is not finite, where update changed nothing
    where due       log step s too, then save, validate and sample, in this order

At the end of training a checkpoint and a validation are always due. A signal ends the run after the current
step, with a checkpoint and exit code RUN_EXIT_INTERRUPTED.

Called by main of the trainers, and only there.
*/
#pragma once

#include "report.h"
#include "sample.h"
#include "schedule.h"
#include "trainer.h"

#define RUN_DAMAGED          (-1) // not an exit code: the next older checkpoint is tried
#define RUN_EXIT_INTERRUPTED 75   // EX_TEMPFAIL: run the same command again with --resume

#define RUN_DEFAULT_SAMPLE_TOKENS 128

#define DUMP_LOGITS_BYTES ((int64_t)64 << 20)

// ----------------------------------------------------------------------------
// signals: SIGINT, SIGTERM and SIGHUP end the run after the current step; a second one of the same kind ends
// it at once

static volatile sig_atomic_t run_interrupted;

static inline void run_on_signal(int signal_number) {
    run_interrupted = 1;
    signal(signal_number, SIG_DFL);
}

static inline void run_catch_signals(void) {
    signal(SIGINT, run_on_signal);
    signal(SIGTERM, run_on_signal);
    if (signal(SIGHUP, run_on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); // under nohup
}

// ----------------------------------------------------------------------------
// state of the training loop

typedef struct {
    const Trainer* trainer;
    Model* model;
    Run* run;
    Logger logger;
    DataLoader data, val_data;
    int64_t val_sequences; // 0: no validation
    LogStep queued[2];     // log lines of steps in flight; step s is in [s % 2]
    int64_t in_flight;
    double last_time; // when the current step began, in seconds_now()
} Training;

// Is something due after `step` that happens every `every` steps? 0: never.
static inline bool run_due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

static inline void training_open(Training* t) {
    Error err;
    const Run* run = t->run;
    const Options* o = &run->options;
    run_open_data(run, &t->data, o->data, o->shuffle);
    if (o->val_data) {
        run_open_data(run, &t->val_data, o->val_data, false);
        int64_t wanted = (o->val_tokens + o->seq_len - 1) / o->seq_len,
                present = dataloader_sequences(&t->val_data);
        t->val_sequences = wanted < present ? wanted : present;
    }
    if (!logger_open(&t->logger, o->out, &err)) die("%s", err.msg);
    t->logger.num_steps = run->num_steps;
    t->logger.log_every = o->log_every;
    t->logger.flops_per_token = run_flops_per_token(run);
    t->logger.attention_flops = run_mixer_flops_per_token(run);
    t->logger.peak_flops = run->peak_flops;
    dataloader_seek(&t->data, run->state.position);
    if (o->sample_every) { // reports an unreadable vocabulary now instead of at the first sample
        Tokenizer tokenizer = sample_tokenizer(run, false);
        tokenizer_free(&tokenizer);
    }
}

// ----------------------------------------------------------------------------
// what is due after a step

// Saves a checkpoint, if the run has a folder. On error, such as a full disk, the run ends; older checkpoints
// are unchanged.
static inline void training_save(Training* t) {
    Error err;
    char folder[PATH_LENGTH];
    const Run* run = t->run;
    const Options* o = &run->options;
    if (!o->out) return;
    const CheckpointRecord record = {&run->config, &run->table, o, &run->state};
    CheckpointTensors tensors = t->trainer->host_open(t->model, true);
    if (!checkpoint_check_finite(&run->table, &tensors, &err) ||
        !checkpoint_save(o->out, &record, &tensors, (int)o->keep, &err))
        die("%s; no checkpoint of step %lld, older ones are unchanged", err.msg, (long long)run->state.step);
    t->trainer->host_close(t->model, &tensors, false);
    checkpoint_path(folder, o->out, run->state.step);
    logger_event(&t->logger, run->state.step, "checkpoint", folder);
}

// Number i of a buffer that evaluate filled.
static inline double host_number(const Trainer* trainer, const void* buffer, int64_t i) {
    return trainer->element_bytes == 8 ? ((const double*)buffer)[i] : (double)((const float*)buffer)[i];
}

// Measures and logs the loss on the first val_sequences held-out sequences; at the end of the run also by
// position.
static inline void training_validate(Training* t) {
    const Run* run = t->run;
    const int64_t B = run->micro_batch, T = run->options.seq_len;
    LogValidation v;
    memset(&v, 0, sizeof v);
    double start = seconds_now();
    void* losses = xcalloc((size_t)(B * T), (size_t)t->trainer->element_bytes);
    dataloader_seek(&t->val_data, 0);
    for (int64_t i = 0; i < t->val_sequences; i += B) {
        int64_t sequences = t->val_sequences - i < B ? t->val_sequences - i : B;
        t->trainer->load_batch(t->model, &t->val_data);
        t->trainer->evaluate(t->model, losses, NULL, NULL);
        for (int64_t k = 0; k < sequences * T; k++)
            log_validation_add(&v, k % T, host_number(t->trainer, losses, k));
    }
    free(losses);
    v.byte_tokens = run_reads_bytes(run);
    v.seconds = seconds_now() - start;
    logger_validation(&t->logger, run->state.step, &v);
    if (run->state.step >= run->last_step) run_print_by_position(&v);
}

static inline void training_sample(Training* t) {
    int64_t n = t->run->options.generate;
    ByteBuffer text = sample_generate(t->run, n == OPTION_UNSET ? RUN_DEFAULT_SAMPLE_TOKENS : n, NULL,
                                      t->trainer, t->model);
    logger_event(&t->logger, t->run->state.step, "sample", text.data);
    free(text.data);
}

// ----------------------------------------------------------------------------
// training

// Ends a run whose loss or gradient norm is not finite; names the first tensor that is not.
__attribute__((noreturn)) static inline void training_die_not_finite(const Training* t, const LogStep* line) {
    const char* weight = t->trainer->first_not_finite(t->model, false);
    const char* name = weight ? weight : t->trainer->first_not_finite(t->model, true);
    die("step %lld: the loss is %g and the gradient norm %g (first in the %s of %s); the weights were not "
        "updated; resume from the last checkpoint with a lower --lr, or look at the data",
        (long long)line->step, line->loss, line->grad_norm, weight ? "weights" : "gradient",
        name ? name : "no tensor");
}

// Finishes and logs the oldest steps in flight until `remaining` are left.
static inline void training_finish_steps(Training* t, int64_t remaining) {
    for (; t->in_flight > remaining; t->in_flight--) {
        LogStep* line = &t->queued[(t->run->state.step - t->in_flight + 1) % 2];
        t->trainer->finish_step(t->model, line);
        if (!isfinite(line->loss) || !isfinite(line->grad_norm)) training_die_not_finite(t, line);
        double now = seconds_now();
        line->seconds = now - t->last_time;
        t->last_time = now;
        logger_step(&t->logger, line);
    }
}

// Queues one optimizer step and advances the state past it.
static inline void training_queue_step(Training* t) {
    const Options* o = &t->run->options;
    TrainerState* state = &t->run->state;
    int64_t step_tokens = t->run->batch_sequences * o->seq_len;
    double lr = schedule_lr(o->lr, o->warmup_tokens, o->max_tokens, state->tokens, step_tokens);
    AdamWParams adamw = options_adamw(o, lr, state->step + 1);
    t->trainer->begin_step(t->model);
    for (int64_t i = 0; i < t->run->grad_accum_steps; i++) {
        t->trainer->load_batch(t->model, &t->data);
        t->trainer->add_gradients(t->model, step_tokens);
    }
    t->trainer->update(t->model, &adamw, o->grad_clip);
    state->step++;
    state->tokens += step_tokens;
    state->position = dataloader_position(&t->data);

    LogStep* line = &t->queued[state->step % 2];
    memset(line, 0, sizeof *line);
    line->step = state->step, line->tokens = state->tokens, line->step_tokens = step_tokens, line->lr = lr;
    t->in_flight++;
}

// Trains from run->state to run->last_step, or until a signal. Returns the exit code.
static inline int train(const Trainer* trainer, Model* model, Run* run) {
    const Options* o = &run->options;
    TrainerState* state = &run->state;
    char text[64];
    Training* t = (Training*)xcalloc(1, sizeof *t);
    t->trainer = trainer, t->model = model, t->run = run;
    training_open(t);
    run_catch_signals();
    run_print_start(run, dataloader_sequences(&t->data), t->val_sequences);
    if (run_resumed(run)) {
        snprintf(text, sizeof text, "at %lld tokens", (long long)state->tokens);
        logger_event(&t->logger, state->step, "resume", text);
    }
    if (state->step >= run->last_step)
        printf("nothing left to do: the run is at step %lld of %lld\n", (long long)state->step,
               (long long)run->last_step);
    printf("%s", run->device);

    bool saved = run_resumed(run); // the present state
    t->last_time = seconds_now();
    if (t->val_sequences && state->step >= run->last_step) training_validate(t);
    while (state->step < run->last_step && !run_interrupted) {
        training_queue_step(t);
        bool last = state->step == run->last_step;
        bool validates = t->val_sequences && (last || run_due(o->val_every, state->step));
        bool samples = run_due(o->sample_every, state->step);
        saved = last || run_due(o->save_every, state->step);
        bool due = saved || validates || samples;
        training_finish_steps(t, due ? 0 : trainer->steps_in_flight);
        if (!due) continue;
        if (saved) training_save(t);
        if (validates) training_validate(t);
        if (samples) training_sample(t);
        t->last_time = seconds_now();
    }
    training_finish_steps(t, 0);
    if (!saved) training_save(t); // after a signal, or with --max-steps 0
    logger_close(&t->logger);
    dataloader_close(&t->data);
    if (o->val_data) dataloader_close(&t->val_data);
    free(t);
    return state->step < run->last_step ? RUN_EXIT_INTERRUPTED : EXIT_SUCCESS;
}

// ----------------------------------------------------------------------------
// --dump

// Writes losses, logits and gradients of the first micro-batch to a safetensors file, for comparison with
// another implementation. Elements are floats or doubles, like the trainer's numbers:
//
//     loss    [B, T]       of every token
//     logits  [B, T, V]    unless larger than DUMP_LOGITS_BYTES
//     NAME                 gradient of the mean loss, of every trainable tensor
static inline void dump(const Trainer* trainer, Model* model, const Run* run) {
    Error err;
    DataLoader data;
    const char* path = run->options.dump;
    const int64_t element_bytes = trainer->element_bytes, B = run->micro_batch, T = run->options.seq_len;
    const int64_t BT = B * T, V = run->config.vocab_size, shape[3] = {B, T, V};
    const SafetensorsDtype dtype = element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    const ParamTable* table = &run->table;
    void* losses = xcalloc((size_t)BT, (size_t)element_bytes);
    void* grads = xcalloc((size_t)table->count, (size_t)element_bytes);
    void* logits =
        BT * V * element_bytes <= DUMP_LOGITS_BYTES ? xcalloc((size_t)(BT * V), (size_t)element_bytes) : NULL;
    run_open_data(run, &data, run->options.data, run->options.shuffle);
    trainer->load_batch(model, &data);
    trainer->evaluate(model, losses, logits, grads);
    dataloader_close(&data);

    SafeTensor* tensors = (SafeTensor*)xcalloc((size_t)table->num_rows + 2, sizeof *tensors);
    int count = 0;
    tensors[count++] = safetensors_tensor("loss", dtype, 2, shape, losses);
    if (logits) tensors[count++] = safetensors_tensor("logits", dtype, 3, shape, logits);
    for (const Param* p = table->rows; p < table->rows + table->num_rows; p++) {
        const char* grad = (const char*)grads + p->offset * element_bytes;
        if (p->trainable) tensors[count++] = safetensors_tensor(p->name, dtype, p->ndim, p->shape, grad);
    }
    if (!safetensors_write(path, tensors, count, &err)) die("%s", err.msg);

    double loss = 0;
    for (int64_t t = 0; t < BT; t++) loss += host_number(trainer, losses, t);
    printf("%s: mean loss %.6f of %lld x %lld tokens\n", path, loss / (double)BT, (long long)B, (long long)T);
    free(tensors);
    free(losses);
    free(logits);
    free(grads);
}

// ----------------------------------------------------------------------------
// main

// Draws the initial weights into w [table->count], floats or doubles. Element i of tensor r depends only on
// (seed, r, i).
static inline void draw_weights(void* w, int element_bytes, const ParamTable* table, const Config* config,
                                uint64_t seed) {
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < p->count; i++) {
            double x = params_initial_value(table, config, r, i, seed);
            if (element_bytes == 8)
                ((double*)w)[p->offset + i] = x;
            else
                ((float*)w)[p->offset + i] = (float)x;
        }
    }
}

// Sets the model's weights: with the moments from the checkpoint to resume, from --init, or drawn from the
// seed. Fails if the checkpoint is damaged; the model is then of no further use.
static inline bool load_weights(const Trainer* trainer, Model* model, const Run* run, Error* err) {
    const char* init = run->options.init;
    CheckpointTensors t = trainer->host_open(model, false);
    bool ok = true;
    if (run_resumed(run))
        ok = checkpoint_load_weights(run->checkpoint, &run->table, t.w, t.element_bytes, err) &&
             checkpoint_load_optimizer(run->checkpoint, &run->table, t.m, t.v, t.element_bytes, err);
    else if (!init)
        draw_weights(t.w, t.element_bytes, &run->table, &run->config, (uint64_t)run->options.seed);
    else if (!checkpoint_load_weights(init, &run->table, t.w, t.element_bytes, err))
        die("%s", err->msg);
    trainer->host_close(model, &t, ok);
    return ok;
}

// Does what the run's mode asks for. Returns the exit code, or RUN_DAMAGED if the checkpoint's weights cannot
// be read.
static inline int run_work(const Trainer* trainer, Run* run, Error* err) {
    int exit_code = EXIT_SUCCESS;
    if (run->mode == RUN_DRY) {
        trainer->print_plan(run);
        return exit_code;
    }
    Model* model = trainer->open(run);
    if (!load_weights(trainer, model, run, err))
        exit_code = RUN_DAMAGED;
    else if (run->mode == RUN_TRAIN)
        exit_code = train(trainer, model, run);
    else if (run->mode == RUN_DUMP)
        dump(trainer, model, run);
    else if (run->mode == RUN_GENERATE)
        free(sample_generate(run, run->options.generate, stdout, trainer, model).data);
    else {
        printf("%s", run->device);
        trainer->bench(model, run);
    }
    trainer->close(model);
    return exit_code;
}

// The program: returns the exit code of main.
static inline int run_main(int argc, char** argv, const Trainer* trainer) {
    const CommandLine line = command_line_parse(argc, argv, trainer->summary);
    RunFolder folder = run_folder_open(&line);
    int exit_code = RUN_DAMAGED;
    for (int candidate = 0; exit_code == RUN_DAMAGED; candidate++) {
        Error err;
        Run run;
        if (candidate > 0 && candidate == folder.count)
            die("%s: none of its %d checkpoints can be read; move them away to start anew", line.options.out,
                folder.count);
        if (run_configure(&run, &line, &folder, candidate, trainer->suggested_tokens, &err))
            exit_code = run_work(trainer, &run, &err);
        if (exit_code == RUN_DAMAGED) warn("%s; going back to the checkpoint before it", err.msg);
        run_free(&run);
    }
    free(folder.steps);
    if (folder.lock >= 0) close(folder.lock);
    return exit_code;
}
