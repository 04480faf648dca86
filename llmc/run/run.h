/*
A run, as both trainers see it: from the command line to a configuration and a starting point, and all that is
decided outside the model: steps and micro-batches, what is due when, resuming, saving, samples, the plan that
--dry-run prints.

These are the outermost layers of a program, so most of them die() on error.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include <signal.h>
#include "checkpoint.h"
#include "../model/config.h"
#include "../tokens/dataloader.h"
#include "logger.h"
#include "options.h"
#include "../model/params.h"
#include "sampler.h"
#include "../tokens/tokenizer.h"

// Exit code of a run that a signal ended after it saved: EX_TEMPFAIL, "try again".
#define RUN_EXIT_INTERRUPTED 75

#define RUN_DEFAULT_SAMPLE_TOKENS 128

typedef struct {
    Options options; // complete: what nobody gave is filled in
    bool given[NUM_OPTION_ROWS];
    Config config;
    ParamTable table;
    int64_t batch_sequences; // of an optimizer step
    int64_t micro_batch;     // B, of one forward and backward pass
    int64_t micro_steps;     // passes a step
    int64_t num_steps;       // of the whole training
    int64_t last_step;       // where this process leaves
    TrainerState state;      // where it stands
    int64_t* checkpoints;    // steps of the checkpoints to resume from, newest first
    int num_checkpoints;
    int checkpoint; // the one of these that is in use; num_checkpoints: none
    int lock;       // descriptor of OUT/lock
} Run;

// SIGINT, SIGTERM and SIGHUP ask for a checkpoint and an orderly leave at the end of the step; a second
// of the same kind ends at once.
static volatile sig_atomic_t run_interrupted;
static inline void run_on_signal(int signal_number) {
    run_interrupted = 1;
    signal(signal_number, SIG_DFL);
}

// ----------------------------------------------------------------------------
// from the command line to a configuration

// Was this option on the command line?
static inline bool run_given(const Run* run, const char* option) {
    return run->given[cli_find(option_rows, NUM_OPTION_ROWS, option, strlen(option)) - option_rows];
}

// Does it only write a sample? With --data, --generate is the length of samples while training.
static inline bool run_generates(const Run* run) {
    return run->options.generate != OPTION_UNSET && !run->options.data;
}

// Does it train, and write to --out?
static inline bool run_trains(const Run* run) {
    const Options* o = &run->options;
    return !o->dry_run && o->bench == OPTION_UNSET && !o->dump && !run_generates(run);
}

// Frees the texts that options_restore copied: those that are there without having been given.
static inline void run_free_restored(Run* run) {
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        void* field = cli_field(&option_rows[i], &run->options);
        if (run->given[i]) continue;
        if (option_rows[i].type == CLI_TEXT) free((void*)*(const char**)field);
        if (option_rows[i].type != CLI_LIST) continue;
        CliList* list = (CliList*)field;
        while (list->count > 0) free((void*)list->items[--list->count]);
    }
}

// Checks that a resumed run goes on reading where it stopped: the position in the data is a number of
// sequences, in an order that these options fix.
static inline void run_check_data_order(const Run* run, const Json* record, int options) {
    const Options* o = &run->options;
    int64_t seq_len, seed;
    bool shuffle;
    if (json_int64(record, json_get(record, options, "seq-len"), &seq_len) && seq_len != o->seq_len)
        die("--seq-len %lld: the run in %s has %lld, which cannot change on the way", (long long)o->seq_len,
            o->out, (long long)seq_len);
    if (json_int64(record, json_get(record, options, "seed"), &seed) && seed != o->seed)
        die("--seed %lld: the run in %s has %lld, which cannot change on the way", (long long)o->seed, o->out,
            (long long)seed);
    if (json_bool(record, json_get(record, options, "shuffle"), &shuffle) && shuffle != o->shuffle)
        die("--shuffle: the run in %s reads its data in order, which cannot change on the way", o->out);
}

// Reads config and state of the newest checkpoint that has both whole, from run->checkpoint on, warning of
// those that have not. With `restore` it also takes back the options that were not given.
static inline bool run_find_checkpoint(Run* run, bool restore) {
    Error err;
    char folder[PATH_LENGTH];
    const Options on_command_line = run->options;
    for (; run->checkpoint < run->num_checkpoints; run->checkpoint++) {
        Json record;
        checkpoint_path(folder, run->options.out, run->checkpoints[run->checkpoint]);
        bool ok = config_read(&run->config, folder, &err) &&
                  checkpoint_load_state(folder, &run->state, &record, &err);
        if (ok) {
            int options = json_get(&record, 0, "options");
            ok = !restore || options_restore(&run->options, run->given, folder, &record, options, &err);
            if (ok) run_check_data_order(run, &record, options);
            json_free(&record);
        }
        if (ok) return true;
        if (restore) {
            run_free_restored(run);
            run->options = on_command_line;
        }
        warn("%s; going back to the checkpoint before it", err.msg);
    }
    if (run->num_checkpoints > 0)
        die("%s: none of its %d checkpoints can be read; move them away to start afresh", run->options.out,
            run->num_checkpoints);
    return false;
}

// The model's configuration: from a checkpoint to resume, --init or --model, then --set.
static inline void run_choose_config(Run* run) {
    Error err;
    Options* o = &run->options;
    Recipe recipe;
    if (o->model && o->init) die("--model and --init both name a model: give one of them");
    if (o->init) {
        if (!config_read(&run->config, o->init, &err)) die("%s", err.msg);
        recipe = config_nearest_recipe(&run->config);
    } else {
        if (!o->model) die("which model? give --model NAME or --init DIR; --help lists the options");
        if (!config_preset(&run->config, &recipe, o->model, &err)) die("%s", err.msg);
        run->config.bos_token_id = run->config.eos_token_id = -1; // the last id, of as many as --set asks for
    }
    for (int i = 0; i < o->set.count; i++) {
        const char *item = o->set.items[i], *equals = strchr(item, '=');
        char key[64];
        if (!equals || equals == item || equals - item >= (ptrdiff_t)sizeof key)
            die("--set %s: not of the form KEY=VALUE", item);
        snprintf(key, sizeof key, "%.*s", (int)(equals - item), item);
        if (!config_set(&run->config, "--set", key, equals + 1, &err)) die("%s", err.msg);
    }
    if (!o->init && run->config.bos_token_id < 0) run->config.bos_token_id = run->config.vocab_size - 1;
    if (!o->init && run->config.eos_token_id < 0) run->config.eos_token_id = run->config.vocab_size - 1;
    if (!config_check(&run->config, o->init ? o->init : o->model, &err)) die("%s", err.msg);
    options_apply_recipe(o, &recipe);
}

// The first key in which two configurations differ, NULL if they are the same. Their bytes cannot tell: there
// are holes between the fields.
static inline const char* run_config_difference(const Config* a, const Config* b) {
    const char* found = NULL;
    JsonWriter wa = json_writer(0), wb = json_writer(0);
    for (int i = 0; i < NUM_CONFIG_KEYS && !found; i++) {
        json_writer_clear(&wa), json_writer_clear(&wb);
        json_begin_object(&wa, NULL), json_begin_object(&wb, NULL);
        config_put(a, i, &wa), config_put(b, i, &wb);
        json_end(&wa), json_end(&wb);
        if (strcmp(wa.text, wb.text) != 0) found = config_keys[i].name;
    }
    json_writer_free(&wa);
    json_writer_free(&wb);
    return found;
}

// Completes what a resumed run has from its checkpoint. It needs no --init any more; but a model that the
// command line names must be the same one, or the user means another run.
static inline void run_check_resumed(Run* run) {
    Options* o = &run->options;
    Config resumed = run->config;
    Recipe recipe = config_nearest_recipe(&resumed);
    options_apply_recipe(o, &recipe); // for an option that an older version did not record
    if (!run_given(run, "model") && !run_given(run, "init") && !run_given(run, "set")) return;
    run_choose_config(run);
    const char* key = run_config_difference(&run->config, &resumed);
    if (key)
        die("--out %s: its checkpoints are of a model with another %s than the command line's; choose "
            "another folder",
            o->out, key);
}

// Finds out whether there is something to resume, and that nobody else writes to --out.
static inline void run_claim_out(Run* run) {
    Error err;
    Options* o = &run->options;
    if (!o->out) {
        if (o->resume) die("--resume: from where? give --out DIR");
        return;
    }
    if (!run_trains(run)) return;
    if (!out_lock(o->out, &run->lock, &err)) die("%s", err.msg);
    run->num_checkpoints = checkpoint_list(o->out, &run->checkpoints, &err);
    if (run->num_checkpoints < 0) die("%s", err.msg);
    if (run->num_checkpoints > 0 && !o->resume)
        die("--out %s: holds checkpoints of a run already; go on with --resume, or choose another folder",
            o->out);
}

// Parses the command line; prints help if asked to, and leaves.
static inline void run_parse(Run* run, int argc, char** argv, const char* summary) {
    Error err;
    memset(run, 0, sizeof *run);
    run->lock = -1;
    guard_standard_streams();
    signal(SIGXFSZ, SIG_IGN); // a file size limit then shows as a failed write, which is reported
    if (!options_parse(&run->options, run->given, argc, argv, &err)) die("%s", err.msg);
    if (!run->options.help) return;
    options_print_help(stdout, argv[0], summary);
    exit(EXIT_SUCCESS);
}

// From where the run stands, the schedule and the steps still to be done. Resuming may have changed
// --max-tokens and --batch-tokens, so the steps follow from the tokens.
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

// Completes *run after run_parse: config, options, state. `suggested_tokens` of a micro-batch are what suits
// the trainer where --micro-batch is not given.
static inline void run_configure(Run* run, int64_t suggested_tokens) {
    Options* o = &run->options;
    run_claim_out(run);
    if (run_find_checkpoint(run, true))
        run_check_resumed(run);
    else {
        run_choose_config(run);
        run->state.seed = o->seed;
    }
    run->table = params_build(&run->config);
    if (o->dry_run + (o->bench != OPTION_UNSET) + (o->dump != NULL) + run_generates(run) > 1)
        die("--dry-run, --bench, --dump and --generate each leave when they are done: give one of them");
    if (o->recompute) option_place(option_recompute_names, "recompute", o->recompute);
    if (o->attention) option_place(option_attention_names, "attention", o->attention);
    if (run_generates(run) && !o->init) die("--generate: with which model? give --init DIR, a checkpoint");
    if ((run_trains(run) || o->dump) && !o->data) die("--data GLOB is missing: the shards to train on");

    int64_t T = o->seq_len;
    if (o->batch_tokens % T != 0)
        die("--batch-tokens %lld: not a multiple of the %lld tokens of a sequence (--seq-len)",
            (long long)o->batch_tokens, (long long)T);
    run->batch_sequences = o->batch_tokens / T;
    int64_t B = o->micro_batch;
    if (B == OPTION_UNSET) {
        B = suggested_tokens / T < 1 ? 1 : suggested_tokens / T;
        if (B > run->batch_sequences) B = run->batch_sequences;
        while (run->batch_sequences % B != 0) B--;
    }
    if (run->batch_sequences % B != 0)
        die("--micro-batch %lld: does not divide the %lld sequences of a step (--batch-tokens / --seq-len)",
            (long long)B, (long long)run->batch_sequences);
    run->micro_batch = B;
    run->micro_steps = run->batch_sequences / B;
    run_plan_steps(run);

    // what no machine can hold must not overflow an int64_t either
    const Config* c = &run->config;
    double layer =
        (double)run->table.proj.rows + 8.0 * (double)c->hidden_size + 3.0 * (double)config_mlp_size(c);
    double pass = (double)B * (double)T * ((double)c->num_hidden_layers * layer + (double)c->vocab_size);
    if (pass > 1e15)
        die("--micro-batch %lld of --seq-len %lld: %.1e numbers in a forward pass, which no machine holds",
            (long long)B, (long long)T, pass);
}

// Frees what run_configure made, and lets go of --out.
static inline void run_free(Run* run) {
    run_free_restored(run);
    params_free(&run->table);
    free(run->checkpoints);
    if (run->lock >= 0) close(run->lock);
}

// ----------------------------------------------------------------------------
// the starting point

// Loads weights and AdamW's moments of the checkpoint to resume, or the weights of --init. Returns false if
// there is neither, and the weights are to be drawn. Buffers are as checkpoint_load_weights has them; m and v
// are needed for a run that may resume. A damaged checkpoint is named, and the one before it is taken.
static inline bool run_load(Run* run, void* w, void* m, void* v, int element_bytes) {
    Error err;
    char folder[PATH_LENGTH];
    while (run->checkpoint < run->num_checkpoints) {
        checkpoint_path(folder, run->options.out, run->checkpoints[run->checkpoint]);
        if (checkpoint_load_weights(folder, &run->table, w, element_bytes, &err) &&
            checkpoint_load_optimizer(folder, &run->table, m, v, element_bytes, &err))
            return true;
        warn("%s; going back to the checkpoint before it", err.msg);
        run->checkpoint++;
        run_find_checkpoint(run, false);
        run_plan_steps(run);
    }
    if (!run->options.init) return false;
    if (!checkpoint_load_weights(run->options.init, &run->table, w, element_bytes, &err)) die("%s", err.msg);
    return true;
}

// Opens shards for this run's model and sequences; validation is never shuffled.
static inline void run_open_data(const Run* run, DataLoader* data, const char* glob, bool shuffle) {
    Error err;
    int64_t T = run->options.seq_len, V = run->config.vocab_size,
            end_of_text = config_end_of_text(&run->config);
    int rank = 0, world = 1;
    uint64_t seed = (uint64_t)run->options.seed;
    DataOptions options = {T, run->micro_batch, V, end_of_text, rank, world, shuffle, seed};
    if (!dataloader_open(data, glob, &options, &err)) die("%s", err.msg);
}

// Sequences to validate on: what --val-tokens asks for, but no more than there are.
static inline int64_t run_val_sequences(const Run* run, const DataLoader* val_data) {
    int64_t wanted = (run->options.val_tokens + run->options.seq_len - 1) / run->options.seq_len;
    int64_t there = dataloader_sequences(val_data);
    return wanted < there ? wanted : there;
}

// ----------------------------------------------------------------------------
// on the way

// Is something that happens every `every` steps due after this step? Never if every is 0.
static inline bool run_due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

// Model FLOPs of a token, forward and backward: causal attention's 6 L d T, and all with 6 N, N without the
// input embedding.
static inline double run_attention_flops_per_token(const Run* run) {
    return 6.0 * (double)(run->config.num_hidden_layers * run->config.hidden_size * run->options.seq_len);
}
static inline double run_flops_per_token(const Run* run) {
    return 6.0 * (double)run->table.non_embedding + run_attention_flops_per_token(run);
}

// The byte tokenizer's vocabulary is the only one of its size.
static inline bool run_reads_bytes(const Run* run) { return run->config.vocab_size == 257; }

// Ends a run whose loss or gradient norm is not finite, before anything is updated; weight and gradient name
// the first tensors that are not, NULL where all is well.
static inline void run_die_not_finite(int64_t step, double loss, double norm, const char* weight,
                                      const char* gradient) {
    die("step %lld: the loss is %g and the gradient norm %g (first in the %s of %s); the weights were not "
        "updated; resume "
        "from the last checkpoint with a lower --lr, or look at the data",
        (long long)step, loss, norm, weight ? "weights" : "gradient",
        weight     ? weight
        : gradient ? gradient
                   : "no tensor");
}

// Saves a checkpoint, which is a line of the log. A disk that is full ends the run, and the older checkpoints
// stay.
static inline void run_save(const Run* run, Logger* logger, const void* w, const void* m, const void* v,
                            int element_bytes) {
    Error err;
    char folder[PATH_LENGTH];
    const Options* o = &run->options;
    if (!o->out) return;
    if (!checkpoint_check_finite(&run->table, w, m, v, element_bytes, &err) ||
        !checkpoint_save(o->out, &run->config, &run->table, o, &run->state, w, m, v, element_bytes,
                         (int)o->keep, &err))
        die("%s; no checkpoint of step %lld, older ones are untouched", err.msg, (long long)run->state.step);
    checkpoint_path(folder, o->out, run->state.step);
    logger_event(logger, run->state.step, "checkpoint", folder);
}

// ----------------------------------------------------------------------------
// samples: prompt and continuation as text

typedef struct {
    Tokenizer tokenizer; // vocab_size 0: there is none, and ids are written as numbers
    bool json_escaped;   // the model's text is in LongCrawl64's form
    FILE* stream;        // gets the text as it comes; may be NULL
    ByteBuffer text;     // what was written so far, with a zero behind it
    ByteBuffer pending;  // json_escaped: the start of an escape that is not complete
} Sample;

// Starts a sample; `required`: a missing vocabulary is an error, not a reason to write numbers.
static inline Sample sample_new(const Run* run, FILE* stream, bool required) {
    Error err;
    Sample s;
    memset(&s, 0, sizeof s);
    s.stream = stream;
    s.json_escaped = run->options.json_escape;
    if (run_reads_bytes(run))
        tokenizer_bytes(&s.tokenizer);
    else if (run->options.vocab) {
        if (!tokenizer_gpt2(&s.tokenizer, run->options.vocab, &err)) die("%s", err.msg);
        if (s.tokenizer.vocab_size > run->config.vocab_size)
            die("--vocab %s: has more tokens than the model's vocabulary of %lld", run->options.vocab,
                (long long)run->config.vocab_size);
    } else if (required)
        die("--vocab FILE is missing: GPT-2's vocab.bpe, to read the prompt and write the text");
    *byte_buffer_reserve(&s.text, 1) = '\0';
    return s;
}

// Frees all but the stream.
static inline void sample_free(Sample* s) {
    tokenizer_free(&s->tokenizer);
    free(s->text.data);
    free(s->pending.data);
}

// Adds bytes to the text, and to the stream; dies if that cannot be written.
static inline void sample_append(Sample* s, const char* bytes, size_t n) {
    memcpy(byte_buffer_reserve(&s->text, n + 1), bytes, n);
    s->text.count += n;
    s->text.data[s->text.count] = '\0';
    if (!s->stream) return;
    if (fwrite(bytes, 1, n, s->stream) != n || fflush(s->stream) != 0)
        die("cannot write the sample: %s", strerror(errno));
}

// Writes text, unescaped; `last` lets go of what was held back as the start of an escape.
static inline void sample_put_bytes(Sample* s, const char* bytes, size_t n, bool last) {
    if (!s->json_escaped) {
        sample_append(s, bytes, n);
        return;
    }
    memcpy(byte_buffer_reserve(&s->pending, n), bytes, n);
    s->pending.count += n;
    size_t out_bytes;
    char* out = (char*)xrealloc(NULL, s->pending.count);
    size_t used = json_unescape(s->pending.data, s->pending.count, last, out, &out_bytes);
    sample_append(s, out, out_bytes);
    memmove(s->pending.data, s->pending.data + used, s->pending.count - used);
    s->pending.count -= used;
    free(out);
}

// Writes one token; one without text becomes a number.
static inline void sample_put(Sample* s, uint32_t token) {
    char number[16];
    size_t n;
    const char* bytes = tokenizer_decode(&s->tokenizer, token, &n);
    if (bytes)
        sample_put_bytes(s, bytes, n, false);
    else
        sample_append(s, number, (size_t)snprintf(number, sizeof number, " %u", token));
}

// Completes the text.
static inline void sample_end(Sample* s) {
    sample_put_bytes(s, "", 0, true);
    if (s->stream) sample_append(s, "\n", 1);
}

// The prompt's ids, after the end of text that every document starts with, and its text into the sample.
static inline TokenBuffer sample_prompt(Sample* s, const Run* run) {
    TokenBuffer ids;
    ByteBuffer escaped;
    const char* prompt = run->options.prompt ? run->options.prompt : "";
    size_t n = strlen(prompt);
    memset(&ids, 0, sizeof ids);
    memset(&escaped, 0, sizeof escaped);
    *token_buffer_reserve(&ids, 1) = (uint32_t)config_end_of_text(&run->config);
    ids.count = 1;
    if (s->tokenizer.vocab_size == 0) return ids;
    sample_append(s, prompt, n);
    if (s->json_escaped) {
        json_escape(prompt, n, &escaped);
        tokenizer_encode(&s->tokenizer, escaped.data ? escaped.data : "", escaped.count, &ids);
    } else
        tokenizer_encode(&s->tokenizer, prompt, n, &ids);
    free(escaped.data);
    return ids;
}

// The sampler that the options describe; free with sampler_free.
static inline Sampler run_sampler(const Options* o) {
    Sampler s;
    memset(&s, 0, sizeof s);
    s.temperature = o->temperature;
    s.top_k = o->top_k;
    s.top_p = o->top_p;
    s.seed = (uint64_t)o->seed;
    return s;
}

// Says what begins, and lets signals end it in order.
static inline void run_begin(const Run* run, Logger* logger, const DataLoader* data, int64_t val_sequences) {
    const Options* o = &run->options;
    char text[256];
    if (o->sample_every) { // a vocabulary that cannot be read is better found now than at the first sample
        Sample sample = sample_new(run, NULL, false);
        sample_free(&sample);
    }
    signal(SIGINT, run_on_signal);
    signal(SIGTERM, run_on_signal);
    if (signal(SIGHUP, run_on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); // under nohup
    printf("%s: %lld parameters (%lld without the embedding), V %lld, L %lld, d %lld, heads %lld\n",
           o->model ? o->model : o->init, (long long)run->table.parameters,
           (long long)run->table.non_embedding, (long long)run->config.vocab_size,
           (long long)run->config.num_hidden_layers, (long long)run->config.hidden_size,
           (long long)run->config.num_heads);
    printf("%lld steps of %lld x %lld tokens in %lld passes; %lld sequences to train on, %lld held out\n",
           (long long)run->num_steps, (long long)run->batch_sequences, (long long)o->seq_len,
           (long long)run->micro_steps, (long long)dataloader_sequences(data), (long long)val_sequences);
    if (!o->out && run->state.step < run->last_step) warn("without --out DIR nothing of this run is kept");
    if (run->checkpoint < run->num_checkpoints) {
        snprintf(text, sizeof text, "at %lld tokens", (long long)run->state.tokens);
        logger_event(logger, run->state.step, "resume", text);
    }
    if (run->state.step >= run->last_step)
        printf("nothing left to do: the run is at step %lld of %lld\n", (long long)run->state.step,
               (long long)run->last_step);
}

// ----------------------------------------------------------------------------
// reports

typedef struct {
    const char* what;
    int64_t bytes;
} MemoryRow;

// What --dry-run prints: config, parameter counts, steps, and the trainer's memory plan.
static inline void run_print_plan(const Run* run, const MemoryRow* rows, int num_rows) {
    const Options* o = &run->options;
    int64_t total = 0;
    JsonWriter w = json_writer(2);
    config_put_all(&run->config, &w);
    printf("%s\n\n", w.text);
    json_writer_free(&w);
    printf("parameters         %15lld\n", (long long)run->table.parameters);
    printf("  non-embedding    %15lld\n", (long long)run->table.non_embedding);
    printf("MLP width          %15lld\n", (long long)config_mlp_size(&run->config));
    printf("head size          %15lld\n\n", (long long)config_head_size(&run->config));
    printf("sequence           %15lld tokens\n", (long long)o->seq_len);
    printf("step               %15lld tokens: %lld passes of %lld sequences\n", (long long)o->batch_tokens,
           (long long)run->micro_steps, (long long)run->micro_batch);
    printf("training           %15lld tokens: %lld steps, peak learning rate %g, %lld tokens of warm-up\n",
           (long long)o->max_tokens, (long long)run->num_steps, o->lr, (long long)o->warmup_tokens);
    printf("model FLOPs        %15.4g a token, %.4g in all\n\n", run_flops_per_token(run),
           run_flops_per_token(run) * (double)o->max_tokens);
    for (int i = 0; i < num_rows; i++) {
        printf("%-18s %15.1f MiB\n", rows[i].what, (double)rows[i].bytes / 1048576);
        total += rows[i].bytes;
    }
    printf("%-18s %15.1f MiB\n", "memory", (double)total / 1048576);
}

// A table of the held-out loss by position in the context.
static inline void run_print_by_position(const LogValidation* v) {
    printf("\nheld-out loss by position in the context\n  %17s %10s %8s%s\n", "positions", "tokens", "loss",
           v->byte_tokens ? "  bits per byte" : "");
    for (int i = 0; i < LOG_BUCKETS; i++) {
        if (v->tokens[i] == 0) continue;
        double loss = v->loss_sum[i] / (double)v->tokens[i];
        printf("  %7d .. %6lld %10lld %8.4f", i ? 1 << (i - 1) : 0, (1LL << i) - 1, (long long)v->tokens[i],
               loss);
        if (v->byte_tokens) printf("  %13.4f", loss / 0.69314718055994530942);
        printf("\n");
    }
    printf("\n");
}

#endif // LLMC_RUN_H
