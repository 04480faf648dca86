/*
The options of both trainers, from one table.

A row of OPTIONS makes a field of struct Options, the row of cli.h that parses it and describes it in --help,
and its member in trainer.json, from which --resume restores it. Called by llmc/run and what stands on it.

A number or choice that was not given is OPTION_UNSET until the recipe, or the program, chooses it.
*/
#pragma once

#include "cli.h"
#include "../../base/common.h"
#include "../../formats/json_writer.h"
#include "../../model/activations.h"
#include "../../config/presets.h"
#include "../../model/sequence.h"
#include "../../model/shapes.h"

#define OPTION_UNSET CLI_UNSET

// Choices: X(value, name). The values make an enum, the names what the command line takes. RECOMPUTE_CHOICES
// is in llmc/model/activations.h, RECIPE_CHOICES in llmc/config/recipes.h.
#define ATTENTION_CHOICES(X) X(ATTENTION_FOX, "fox") X(ATTENTION_CUDNN, "cudnn")
#define SCHEDULE_CHOICES(X)                                                                                  \
    X(SCHEDULE_COSINE, "cosine")                                                                             \
    X(SCHEDULE_LINEAR, "linear")                                                                             \
    X(SCHEDULE_CONSTANT, "constant") X(SCHEDULE_WSD, "wsd") X(SCHEDULE_WSD_SQRT, "wsd-sqrt")

#define CHOICE_VALUE(value, name) value,
#define CHOICE_NAME(value, name)  name,
#define CHOICE_LIST(value, name)  "|" name

static const char* const option_recompute_names[] = {RECOMPUTE_CHOICES(CHOICE_NAME)};

static const char* const option_schedule_names[] = {SCHEDULE_CHOICES(CHOICE_NAME)};

typedef enum { SHUFFLE_FALSE, SHUFFLE_TRUE } Shuffle;     // as the words of --shuffle
typedef enum { DRY_RUN_PLAN, DRY_RUN_CONFIG } DryRunKind; // as those of --dry-run
typedef enum { ATTENTION_CHOICES(CHOICE_VALUE) } AttentionKernels;
typedef enum { SCHEDULE_CHOICES(CHOICE_VALUE) } ScheduleKind; // llmc/run/schedule.h

// What a process does: train, or one thing and exit.
typedef enum {
    RUN_TRAIN,
    RUN_GENERATE,
    RUN_REQUESTS,
    RUN_DUMP,
    RUN_BENCH,
    RUN_DRY,
    RUN_EVAL,
    RUN_MAPS
} RunMode;

// What uses an option: modes that take a model as it is, beside those that train, and the record of the run
enum {
    THIS_PROCESS = 0,
    GENERATES = 1 << RUN_GENERATE,
    ANSWERS = 1 << RUN_REQUESTS,
    EVALUATES = 1 << RUN_EVAL,
    MAPS = 1 << RUN_MAPS,
    ALL_MODES = GENERATES | ANSWERS | EVALUATES | MAPS,
    RECORDED = 1 << 16, // by trainer.json, from which --resume restores it
    // RECORDED, and it decides what a resumed run learns, or what its text is; others say how it is computed,
    // kept and measured. What can never change (resume.h) is RECORDED alone
    TRAINS = RECORDED | 1 << 17,
};

// GROUP(title) starts a group of --help. ROW(type, field, uses, name, value name, default, least, most, help)
// clang-format off
#define OPTIONS(GROUP, ROW) \
GROUP("Model") \
ROW(TEXT, model, RECORDED | ALL_MODES, "model", "NAME", 0, 0, 0, \
    "preset: one of " PRESET_NAMES) \
ROW(CHOICE, recipe, RECORDED | ALL_MODES, "recipe", &RECIPE_CHOICES(CHOICE_LIST)[1], OPTION_UNSET, 0, 0, \
    "train the preset as published, by the table below: the paper's main table, the analysis runs of its " \
    "repository, its anonymous submission, or Gated DeltaNet's paper [analysis]") \
ROW(LIST, set, RECORDED | ALL_MODES, "set", "KEY=VALUE", 0, 0, 0, \
    "set a key of config.json, as in use_rope=true; repeatable") \
ROW(TEXT, init, RECORDED | ALL_MODES, "init", "DIR", 0, 0, 0, \
    "start from the config and weights of a checkpoint, a run's newest one, or a Hugging Face folder") \
GROUP("Data") \
ROW(TEXT, data, RECORDED, "data", "GLOB", 0, 0, 0, \
    "training shards (data/README.md says how to make them); GLOB:0.7,GLOB:0.3: a mixture") \
ROW(TEXT, val_data, RECORDED | EVALUATES | MAPS, "val-data", "GLOB", 0, 0, 0, \
    "held-out shards; GLOB:1,GLOB:1: also the loss of each") \
ROW(FLAG, data_changed, THIS_PROCESS, "data-changed", "", 0, 0, 0, \
    "resume although --data holds other data than when the checkpoint was written") \
ROW(SWITCH, shuffle, RECORDED, "shuffle", "false|true", OPTION_UNSET, SHUFFLE_TRUE, 0, \
    "read the sequences in an order drawn from the seed, another one in every epoch, or in the data's " \
    "order [true of token streams; false of documents, as in the paper]") \
ROW(TEXT, vocab, RECORDED | GENERATES | ANSWERS | MAPS, "vocab", "FILE", 0, 0, 0, \
    "GPT-2's vocab.bpe (in the repository " GPT2_VOCAB "), for text of a model of its vocabulary whose " \
    "folder has no tokenizer.json") \
ROW(FLAG, json_escape, TRAINS | GENERATES | ANSWERS | MAPS, "json-escape", "", 0, 0, 0, \
    "the model's text is JSON-escaped, as in LongCrawl64") \
GROUP("Training") \
ROW(COUNT, seq_len, RECORDED | ALL_MODES, "seq-len", "T", OPTION_UNSET, 1, 1 << 24, \
    "tokens per sequence [the preset's]") \
ROW(COUNT, batch_tokens, TRAINS, "batch-tokens", "N", OPTION_UNSET, 1, 1LL << 40, \
    "tokens per optimizer step [the preset's]") \
ROW(COUNT, micro_batch, RECORDED | EVALUATES, "micro-batch", "B", OPTION_UNSET, 1, 1 << 20, \
    "sequences per forward and backward pass [chosen by the trainer]") \
ROW(COUNT, max_tokens, TRAINS, "max-tokens", "N", OPTION_UNSET, 1, 1LL << 53, \
    "tokens to train on, where the learning rate's schedule ends [the recipe's]") \
ROW(COUNT, max_steps, THIS_PROCESS, "max-steps", "N", OPTION_UNSET, 0, 1LL << 40, \
    "stop after step N with a checkpoint to resume from; the schedule remains that of --max-tokens") \
ROW(REAL, lr, TRAINS, "lr", "X", OPTION_UNSET, 0, 1e3, "peak learning rate [the recipe's]") \
ROW(COUNT, warmup_tokens, TRAINS, "warmup-tokens", "N", OPTION_UNSET, 0, 1LL << 53, \
    "tokens of linear warm-up [the preset's; where --max-tokens is below the preset's, the same share " \
    "of it]") \
ROW(CHOICE, lr_schedule, TRAINS, "lr-schedule", &SCHEDULE_CHOICES(CHOICE_LIST)[1], SCHEDULE_COSINE, 0, 0, \
    "learning rate after the warm-up; wsd: constant, then linear to --lr-end over --cooldown-tokens; " \
    "wsd-sqrt: then as 1 - sqrt [cosine]") \
ROW(REAL, lr_end, TRAINS, "lr-end", "F", OPTION_UNSET, 0, 1, \
    "learning rate at the end, as a share of the peak; not of constant [the recipe's]") \
ROW(COUNT, cooldown_tokens, TRAINS, "cooldown-tokens", "N", OPTION_UNSET, 1, 1LL << 53, \
    "with wsd and wsd-sqrt: tokens at the end over which the learning rate falls [a fifth of --max-tokens]") \
ROW(REAL, weight_decay, TRAINS, "weight-decay", "X", 0.1, 0, 1e3, \
    "AdamW's weight decay, of matrices and the embedding") \
ROW(REAL, beta1, TRAINS, "beta1", "X", 0.9, 0, 0.999999, "AdamW's decay rate of the first moment") \
ROW(REAL, beta2, TRAINS, "beta2", "X", 0.95, 0, 0.999999, "AdamW's decay rate of the second moment") \
ROW(REAL, adam_eps, TRAINS, "adam-eps", "X", 1e-8, 1e-30, 1, "AdamW's epsilon") \
ROW(REAL, grad_clip, TRAINS, "grad-clip", "X", 1.0, 0, 1e9, "maximum global gradient norm; 0: no clipping") \
ROW(REAL, skip_spikes, TRAINS, "skip-spikes", "K", 0, 0, 1e6, \
    "leave out a step whose gradient norm is more than K standard deviations above the mean of the last " \
    "128 norms, as 6; 0: none") \
ROW(COUNT, seed, RECORDED | GENERATES | ANSWERS, "seed", "N", 1, 0, 1LL << 62, \
    "seed of initial weights, shuffling and samples") \
GROUP("Output") \
ROW(TEXT, out, THIS_PROCESS, "out", "DIR", 0, 0, 0, "folder of the run: checkpoints and log.jsonl") \
ROW(FLAG, resume, THIS_PROCESS, "resume", "", 0, 0, 0, \
    "continue from the newest checkpoint in --out, with its recorded options; without a checkpoint start " \
    "anew") \
ROW(TEXT, resume_from, RECORDED, "resume-from", "DIR", 0, 0, 0, \
    "begin the run of a new --out where RUN/step_N, a checkpoint of another run, ends, with its " \
    "recorded options") \
ROW(COUNT, save_every, RECORDED, "save-every", "STEPS", 1000, 0, 1LL << 40, \
    "steps between checkpoints; 0: only one at the end") \
ROW(COUNT, keep, RECORDED, "keep", "N", 3, 0, 1 << 30, "number of newest checkpoints to keep; 0: all") \
ROW(COUNT, log_every, RECORDED, "log-every", "STEPS", 1, 1, 1LL << 40, \
    "steps between lines on the terminal; log.jsonl has every step") \
ROW(COUNT, val_every, RECORDED, "val-every", "STEPS", 250, 0, 1LL << 40, \
    "steps between measurements of the loss on --val-data; 0: only one at the end") \
ROW(COUNT, val_tokens, RECORDED | EVALUATES, "val-tokens", "N", OPTION_UNSET, 1, 1LL << 53, \
    "held-out tokens to measure it on, at most those in --val-data [at most 1 Mi, so that it takes a few " \
    "percent of the time; with --eval all]") \
ROW(COUNT, eval_every, RECORDED, "eval-every", "STEPS", 0, 0, 1LL << 40, \
    "steps between evaluations, of which one is at the end: the loss by position on --val-data, and " \
    "--eval-requests; 0: none") \
ROW(TEXT, eval_requests, RECORDED, "eval-requests", "FILE", 0, 0, 0, \
    "JSON lines as --requests takes them, of up to --seq-len tokens, which an evaluation answers and " \
    "sums by type") \
ROW(COUNT, sample_every, RECORDED, "sample-every", "STEPS", 0, 0, 1LL << 40, \
    "steps between samples on the terminal; 0: none") \
GROUP("Generation") \
ROW(COUNT, generate, RECORDED | GENERATES | ANSWERS, "generate", "N", OPTION_UNSET, 1, 1 << 24, \
    "print up to N tokens, until end of text, from the model of --init, and exit, as --init and " \
    "--prompt alone do; with --data the length of samples [128]") \
ROW(TEXT, prompt, RECORDED | GENERATES | MAPS, "prompt", "TEXT", 0, 0, 0, \
    "text to continue [empty: the start of a document]; -: standard input with --maps, and with " \
    "--generate each of its lines") \
ROW(COUNT, samples, RECORDED | GENERATES, "samples", "N", 1, 1, 512, \
    "samples of the prompt, generated at once") \
ROW(LIST, stop, RECORDED | GENERATES, "stop", "TEXT", 0, 0, 0, "end a sample before this text; repeatable") \
ROW(REAL, temperature, RECORDED | GENERATES | ANSWERS, "temperature", "X", 1.0, 0, 100, \
    "divides the logits; 0: the most likely token") \
ROW(COUNT, top_k, RECORDED | GENERATES | ANSWERS, "top-k", "N", 0, 0, 1 << 24, \
    "sample from the N most likely tokens; 0: from all") \
ROW(REAL, top_p, RECORDED | GENERATES | ANSWERS, "top-p", "X", 1.0, 0, 1, \
    "sample from the most likely tokens with this total probability") \
ROW(REAL, min_p, RECORDED | GENERATES | ANSWERS, "min-p", "X", 0.0, 0, 1, \
    "sample from tokens at least X times as likely as the most likely one") \
GROUP("Evaluation") \
ROW(TEXT, eval, EVALUATES, "eval", "FILE", 0, 0, 0, \
    "write the loss by position of the model of --init on --val-data to a JSON file, and exit; " \
    "--seq-len may be longer than the one trained on [65536 where documents are that long, else the " \
    "one trained on]") \
ROW(COUNT, roll, EVALUATES, "roll", "SEED", OPTION_UNSET, 0, 1LL << 62, \
    "with --eval: rotate each document by an offset drawn from the seed") \
ROW(TEXT, requests, ANSWERS, "requests", "FILE", 0, 0, 0, \
    "answer the JSON lines of FILE, -: standard input, with the model of --init: score, rolling or " \
    "generate; and exit") \
ROW(TEXT, maps, MAPS, "maps", "FILE", 0, 0, 0, \
    "write what each head of the model of --init forgets and attends to, on --prompt or --val-data, for " \
    "scripts/eval/maps.py, and exit") \
GROUP("GPU (ignored by the CPU trainer, but in --dry-run --gpu)") \
ROW(CHOICE, recompute, RECORDED, "recompute", &RECOMPUTE_CHOICES(CHOICE_LIST)[1], OPTION_UNSET, 0, 0, \
    "activations that the backward pass recomputes to save memory: none; outputs of norms, gates and " \
    "SwiGLU; q, k and v too; the whole block [the first that fits]") \
ROW(CHOICE, attention, RECORDED | ALL_MODES, "attention", &ATTENTION_CHOICES(CHOICE_LIST)[1], \
    OPTION_UNSET, 0, 0, \
    "attention kernels; cudnn: models without a forget gate, in a build with USE_CUDNN=1 [fox]") \
ROW(FLAG, deterministic, RECORDED | ALL_MODES, "deterministic", "", 0, 0, 0, \
    "bitwise reproducible, slightly slower") \
ROW(FLAG, fp8, RECORDED, "fp8", "", 0, 0, 0, \
    "train with the large GEMMs in FP8; models with attention, on GPUs from compute capability 8.9 on") \
GROUP("Many ranks (mpirun, torchrun or srun)") \
ROW(COUNT, timeout, ALL_MODES, "timeout", "SECONDS", 600, 1, 1LL << 30, \
    "end the run when a rank does not come, or makes no progress, for so long") \
ROW(COUNT, ranks, THIS_PROCESS, "ranks", "N", OPTION_UNSET, 1, 1 << 20, \
    "with --dry-run: plan the memory of each of N ranks, and the hours of all") \
ROW(COUNT, sequence_ranks, RECORDED | ALL_MODES, "sequence-ranks", "N", 1, 1, SEQUENCE_MAX_RANKS, \
    "GPUs that share a sequence: N divides the number of key heads, and the ranks are a multiple of it") \
GROUP("Checks") \
ROW(SWITCH, dry_run, THIS_PROCESS, "dry-run", "plan|config", OPTION_UNSET, DRY_RUN_PLAN, 0, \
    "print memory, time, checkpoints and sizes, with `config` the model's configuration too, and exit; needs " \
    "no GPU") \
ROW(TEXT, gpu, THIS_PROCESS, "gpu", "NAME", 0, 0, 0, \
    "with --dry-run: plan for this GPU, as in H100, A100, L40S or 4090, of another machine") \
ROW(REAL, gpu_memory, THIS_PROCESS, "gpu-memory", "GIB", OPTION_UNSET, 1, 1e6, \
    "the same with this memory [the GPU's]") \
ROW(REAL, mfu, THIS_PROCESS, "mfu", "PERCENT", OPTION_UNSET, 0.1, 1000, \
    "the same at this share of its peak speed [that of the nearest measured model]") \
ROW(COUNT, bench, THIS_PROCESS, "bench", "N", OPTION_UNSET, 1, 1 << 30, \
    "time N steps on random tokens, of --batch-tokens or else of one micro-batch a rank; print tokens/s, " \
    "milliseconds by phase and memory, and exit") \
ROW(TEXT, dump, THIS_PROCESS, "dump", "FILE", 0, 0, 0, \
    "write loss, logits and gradients of the first micro-batch as safetensors, and exit; in the data's " \
    "order without --shuffle") \
ROW(FLAG, version, THIS_PROCESS, "version", "", 0, 0, 0, \
    "print the program's version and what it was built with, and exit") \
ROW(FLAG, help, THIS_PROCESS, "help", "", 0, 0, 0, "print this text, and exit; also -h")

#define OPTION_NO_FIELD(title)
#define OPTION_FIELD(type, field, ...) CLI_##type##_FIELD field;
typedef struct { OPTIONS(OPTION_NO_FIELD, OPTION_FIELD) } Options;

#define OPTION_GROUP(title) {CLI_GROUP, title, "", 0, 0, 0, 0, ""},
#define OPTION_ROW(type, field, uses, name, value_name, preset, least, most, help) \
    {CLI_##type, name, value_name, offsetof(Options, field), \
     (double)(preset), (double)(least), (double)(most), help},
static const CliRow option_rows[] = {OPTIONS(OPTION_GROUP, OPTION_ROW)};

#define OPTION_GROUP_USES(title) THIS_PROCESS,
#define OPTION_USES(type, field, uses, ...) uses,
static const unsigned option_uses[] = {OPTIONS(OPTION_GROUP_USES, OPTION_USES)}; // of the same rows
// clang-format on
#define NUM_OPTION_ROWS ((int)(sizeof option_rows / sizeof option_rows[0]))

#undef ATTENTION_CHOICES
#undef SCHEDULE_CHOICES
#undef CHOICE_VALUE
#undef CHOICE_NAME
#undef CHOICE_LIST
#undef OPTIONS
#undef OPTION_NO_FIELD
#undef OPTION_FIELD
#undef OPTION_GROUP
#undef OPTION_ROW
#undef OPTION_GROUP_USES
#undef OPTION_USES

// Is the row an option with such a use?
static inline bool option_has(const CliRow* row, unsigned use) {
    return (option_uses[row - option_rows] & use) == use;
}

// ----------------------------------------------------------------------------
// the command line

// Fills every field with its default.
static inline void options_defaults(Options* o) { cli_defaults(option_rows, NUM_OPTION_ROWS, o); }

// Adds to the message on an unknown option, err, how to set the key of config.json that it names.
static inline void options_name_key(Error* err) {
    static const char unknown[] = ": no such option";
    char option[64], key[64];
    if (sscanf(err->msg, "--%63[a-z0-9_-]", option) != 1) return;
    if (strncmp(err->msg + 2 + strlen(option), unknown, strlen(unknown)) != 0) return;
    for (size_t i = 0; i < sizeof key; i++) key[i] = option[i] == '-' ? '_' : option[i];
    for (int i = 0; i < NUM_CONFIG_KEYS; i++)
        if (strcmp(config_keys[i].name, key) == 0)
            fail(err, "--%s: no such option, but a key of config.json: give --set %s=VALUE", option, key);
}

// Parses the command line into *o; given[i] tells whether row i was given. As cli_parse, without arguments.
static inline bool options_parse(Options* o, bool given[NUM_OPTION_ROWS], int argc, char** argv, Error* err) {
    const bool ok = cli_parse(option_rows, NUM_OPTION_ROWS, o, given, argc, argv, NULL, err);
    if (!ok) options_name_key(err);
    return ok;
}

// How often something is still due when `step` of `steps` steps has been trained, that one's included. It is
// due every `every` steps (0: never), and in any case after the last.
static inline int64_t option_times(int64_t every, int64_t step, int64_t steps) {
    if (every == 0 || every > steps) every = steps;
    return every == 0 ? 0 : (steps + every - 1) / every - (step > 0 ? (step - 1) / every : 0);
}

// A token without gradients takes about this share of the time of one with: 0.33 by FLOPs, 0.46 as measured.
#define OPTIONS_FORWARD_SHARE 0.4

// Tokens of a measure of the held-out loss without --val-tokens: all measures of a training have at most a
// tenth as many tokens as are trained on, and so take 2 to 5% of its time on any machine. At least 4
// sequences, at most 1 Mi tokens.
static inline int64_t options_val_tokens(const Options* o) {
    const int64_t steps = (o->max_tokens + o->batch_tokens - 1) / o->batch_tokens;
    const int64_t share = o->max_tokens / (10 * option_times(o->val_every, 0, steps));
    int64_t tokens = 1 << 20;
    while (tokens > share) tokens /= 2;
    const int64_t least = 4 * o->seq_len < 1 << 20 ? 4 * o->seq_len : 1 << 20;
    return tokens < least ? least : tokens;
}

// Does the schedule end with a cool-down?
static inline bool options_cools_down(const Options* o) {
    return o->lr_schedule == SCHEDULE_WSD || o->lr_schedule == SCHEDULE_WSD_SQRT;
}

// Fills what is unset from a recipe. A training shorter than the recipe's is warmed up for the same
// share of its tokens; a longer one for the recipe's tokens, as in the paper.
static inline void options_apply_recipe(Options* o, const Recipe* r) {
    if (o->recipe == OPTION_UNSET) o->recipe = r->name;
    if (o->seq_len == OPTION_UNSET) o->seq_len = r->seq_len;
    if (o->batch_tokens == OPTION_UNSET) o->batch_tokens = r->batch_tokens;
    if (o->max_tokens == OPTION_UNSET) o->max_tokens = r->max_tokens;
    double part = (double)o->max_tokens / (double)r->max_tokens;
    if (o->warmup_tokens == OPTION_UNSET)
        o->warmup_tokens = part < 1 ? (int64_t)(part * (double)r->warmup_tokens) : r->warmup_tokens;
    if (o->lr == OPTION_UNSET) o->lr = r->lr;
    if (o->lr_end == OPTION_UNSET) o->lr_end = o->lr_schedule == SCHEDULE_CONSTANT ? 0 : r->lr_end;
    if (o->cooldown_tokens == OPTION_UNSET && options_cools_down(o)) o->cooldown_tokens = o->max_tokens / 5;
    if (o->val_tokens == OPTION_UNSET) o->val_tokens = options_val_tokens(o);
}

// AdamW's numbers for optimizer step `step`, counted from 1, with learning rate lr.
static inline AdamWParams options_adamw(const Options* o, double lr, int64_t step) {
    AdamWParams p = {.lr = lr,
                     .beta1 = o->beta1,
                     .beta2 = o->beta2,
                     .eps = o->adam_eps,
                     .weight_decay = o->weight_decay,
                     .step = step};
    return p;
}

// Prints --help.
static inline void options_print_help(FILE* f, const char* program, const char* summary) {
    fprintf(f, "usage: %s --option value ...\n%s\n", program, summary);
    cli_print_help(f, option_rows, NUM_OPTION_ROWS);
    config_print_recipes(f);
}

// ----------------------------------------------------------------------------
// the record in trainer.json

// Is a number or switch unset? An unset choice has no name, an unset text is NULL.
static inline bool option_is_unset(const CliRow* row, const void* field) {
    if (row->type == CLI_REAL) return *(const double*)field == OPTION_UNSET;
    return (row->type == CLI_COUNT || row->type == CLI_SWITCH) && *(const int64_t*)field == OPTION_UNSET;
}

// Writes an option's value; null where it is unset.
static inline void option_put(const Options* o, const CliRow* row, JsonWriter* w, const char* key) {
    const void* field = (const char*)o + row->offset;
    const CliList* list = (const CliList*)field;
    char name[32];
    if (option_is_unset(row, field)) return json_put_null(w, key);
    switch (row->type) {
    case CLI_GROUP: break;
    case CLI_TEXT: json_put_string(w, key, *(const char* const*)field); break;
    case CLI_CHOICE:
        json_put_string(w, key, cli_choice_name(name, row, *(const int64_t*)field) ? name : NULL);
        break;
    case CLI_FLAG: json_put_bool(w, key, *(const bool*)field); break;
    case CLI_SWITCH: json_put_bool(w, key, *(const int64_t*)field == SHUFFLE_TRUE); break;
    case CLI_COUNT: json_put_int(w, key, *(const int64_t*)field); break;
    case CLI_REAL: json_put_double(w, key, *(const double*)field); break;
    case CLI_LIST:
        json_begin_array(w, key);
        for (int k = 0; k < list->count; k++) json_put_string(w, NULL, list->items[k]);
        json_end(w);
    }
}

// An option's value as JSON, or "unset", to be freed.
static inline char* option_text(const Options* o, const CliRow* row) {
    JsonWriter w = json_writer(0);
    option_put(o, row, &w, NULL);
    if (strcmp(w.text, "null") != 0) return w.text;
    json_writer_free(&w);
    return xstrdup("unset");
}

// Fails where trainer.json cannot record an option as it is: JSON must be UTF-8, which a path need not be. A
// resumed run would look for another file.
static inline bool options_check(const Options* o, Error* err) {
    for (const CliRow* row = option_rows; row < option_rows + NUM_OPTION_ROWS; row++) {
        const void* field = (const char*)o + row->offset;
        const CliList* list = (const CliList*)field;
        const int count = row->type == CLI_LIST ? list->count : row->type == CLI_TEXT;
        for (int i = 0; i < count && option_has(row, RECORDED); i++) {
            const char* text = row->type == CLI_LIST ? list->items[i] : *(const char* const*)field;
            size_t length;
            for (size_t n = text ? strlen(text) : 0; n > 0; text += length, n -= length)
                if (utf8_decode((const uint8_t*)text, n, &length) == UTF8_INVALID)
                    return fail(err, "--%s: is not valid UTF-8, which trainer.json needs to record it",
                                row->name);
        }
    }
    return true;
}

// Writes the recorded options as an object under `key`. Unset ones are left out.
static inline void options_put(const Options* o, JsonWriter* w, const char* key) {
    json_begin_object(w, key);
    for (const CliRow* row = option_rows; row < option_rows + NUM_OPTION_ROWS; row++) {
        if (!option_has(row, RECORDED)) continue;
        char* text = option_text(o, row);
        if (strcmp(text, "unset") != 0) option_put(o, row, w, row->name);
        free(text);
    }
    json_end(w);
}

// What a resumed run's option has become: "lr 0.002 (was 0.001)", to be freed; NULL where it is as recorded.
static inline char* option_change(const Options* now, const Options* before, const CliRow* row) {
    if (!option_has(row, RECORDED)) return NULL;
    char *is = option_text(now, row), *was = option_text(before, row), *text = NULL;
    if (strcmp(is, was) != 0 && asprintf(&text, "%s %s (was %s)", row->name, is, was) < 0)
        die("out of memory");
    free(is), free(was);
    return text;
}

// Sets an option to the value that options_put wrote as `node`; false if it is not valid.
static inline bool options_restore_one(Options* o, const CliRow* row, const Json* j, int node) {
    const char* text = json_string(j, node);
    char digits[32];
    double number;
    int64_t whole;
    bool ok = json_is(j, node, JSON_ARRAY);
    Error ignored; // the caller names the file and the option
    if (row->type == CLI_FLAG) return json_bool(j, node, (bool*)cli_field(row, o));
    if (row->type == CLI_SWITCH) {
        bool value;
        if (!json_bool(j, node, &value)) return false;
        *(int64_t*)cli_field(row, o) = value ? SHUFFLE_TRUE : SHUFFLE_FALSE;
        return true;
    }
    if (row->type == CLI_LIST) {
        for (int item = json_first(j, node); ok && item >= 0; item = json_next(j, item))
            ok = json_string(j, item) && cli_set(row, o, json_string(j, item), &ignored);
        return ok;
    }
    if (row->type == CLI_COUNT) {
        if (!json_int64(j, node, &whole)) return false;
        snprintf(digits, sizeof digits, "%lld", (long long)whole);
        text = digits;
    } else if (row->type == CLI_REAL) {
        if (!json_double(j, node, &number)) return false;
        number_to_text(digits, 17, number);
        text = digits;
    }
    return text && cli_set(row, o, text, &ignored);
}

// The row of an option. field: its offset in Options.
static inline int option_index(size_t field) {
    int i = 0;
    while (option_rows[i].type == CLI_GROUP || option_rows[i].offset != field) i++;
    return i;
}

// Does given[] say that the option was on the command line?
static inline bool options_give(const bool given[NUM_OPTION_ROWS], size_t field) {
    return given[option_index(field)];
}

// Restores what options_put wrote, from object `node` of j, but for the options that given[] says were on the
// command line. A recorded --cooldown-tokens or --lr-end is dropped where the schedule on the command line
// has no use for it. Options that this version does not have are ignored. Texts point into j, which must
// outlive *o. On error *o is undefined; `source` names the file.
static inline bool options_restore(Options* o, const bool given[NUM_OPTION_ROWS], const char* source,
                                   const Json* j, int node, Error* err) {
    for (int member = json_first(j, node); member >= 0; member = json_next(j, member)) {
        const char* name = json_key(j, member);
        const CliRow* row = cli_find(option_rows, NUM_OPTION_ROWS, name, strlen(name));
        if (!row || !option_has(row, RECORDED) || given[row - option_rows]) continue;
        if (!options_restore_one(o, row, j, member))
            return fail(err, "%s: the recorded value of --%s is not valid", source, row->name);
    }
    if (!options_give(given, offsetof(Options, lr_schedule))) return true;
    if (!options_cools_down(o) && !options_give(given, offsetof(Options, cooldown_tokens)))
        o->cooldown_tokens = OPTION_UNSET;
    if (o->lr_schedule == SCHEDULE_CONSTANT && !options_give(given, offsetof(Options, lr_end))) o->lr_end = 0;
    return true;
}
