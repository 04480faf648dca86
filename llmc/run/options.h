/*
The options of both trainers, from one table.

A row of OPTIONS makes a field of struct Options, what the parser and --help know of it (cli.h), and its place
in trainer.json's record, from which --resume takes back what is not given again. A number that nobody gave is
OPTION_UNSET until the preset's recipe, or the program, chooses it.
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "cli.h"
#include "../base/common.h"
#include "../model/config.h"
#include "../formats/json.h"

#define OPTION_UNSET CLI_UNSET

// GROUP(title) opens a group of --help. ROW: type, field, name, what its value is; of a number the default,
// the least and the greatest; does a resumed run take it from the record; help.
// clang-format off
#define OPTIONS(GROUP, ROW) \
GROUP("Model") \
ROW(TEXT, model, "model", "NAME", 0, 0, 0, true, \
    "preset: fox-pro, fox-llama, transformer-pro or transformer-llama, then -nano, -micro, -125m, -360m " \
    "or -760m") \
ROW(LIST, set, "set", "KEY=VALUE", 0, 0, 0, true, \
    "set a key of config.json, as in use_rope=true; may be given many times") \
ROW(TEXT, init, "init", "DIR", 0, 0, 0, true, \
    "start from the config and weights of a checkpoint or Hugging Face folder") \
GROUP("Data") \
ROW(TEXT, data, "data", "GLOB", 0, 0, 0, true, "training shards (data/README.md says how to make them)") \
ROW(TEXT, val_data, "val-data", "GLOB", 0, 0, 0, true, "held-out shards") \
ROW(FLAG, shuffle, "shuffle", "", 0, 0, 0, true, \
    "visit the sequences in an order drawn from the seed, new each epoch") \
ROW(TEXT, vocab, "vocab", "FILE", 0, 0, 0, true, \
    "GPT-2's vocab.bpe, for prompts and samples of models that read its tokens") \
ROW(FLAG, json_escape, "json-escape", "", 0, 0, 0, true, \
    "prompts and samples are in LongCrawl64's JSON-escaped form") \
GROUP("Training") \
ROW(COUNT, seq_len, "seq-len", "T", OPTION_UNSET, 1, 1 << 24, true, "tokens of a sequence [the preset's]") \
ROW(COUNT, batch_tokens, "batch-tokens", "N", OPTION_UNSET, 1, 1LL << 40, true, \
    "tokens of an optimizer step [the preset's]") \
ROW(COUNT, micro_batch, "micro-batch", "B", OPTION_UNSET, 1, 1 << 20, true, \
    "sequences of one forward and backward pass [as many as suit the machine]") \
ROW(COUNT, max_tokens, "max-tokens", "N", OPTION_UNSET, 1, 1LL << 60, true, \
    "tokens to train on; the learning rate reaches 0 there [the preset's]") \
ROW(COUNT, max_steps, "max-steps", "N", OPTION_UNSET, 0, 1LL << 40, false, \
    "leave after step N, with a checkpoint to resume from; the schedule stays that of --max-tokens") \
ROW(REAL, lr, "lr", "X", OPTION_UNSET, 0, 1e3, true, "peak learning rate [the preset's]") \
ROW(COUNT, warmup_tokens, "warmup-tokens", "N", OPTION_UNSET, 0, 1LL << 60, true, \
    "tokens of linear warm-up [the preset's]") \
ROW(REAL, weight_decay, "weight-decay", "X", 0.1, 0, 1e3, true, \
    "AdamW's weight decay, of matrices and the embedding") \
ROW(REAL, beta1, "beta1", "X", 0.9, 0, 0.999999, true, "AdamW's decay of the mean gradient") \
ROW(REAL, beta2, "beta2", "X", 0.95, 0, 0.999999, true, "AdamW's decay of the mean squared gradient") \
ROW(REAL, adam_eps, "adam-eps", "X", 1e-8, 1e-30, 1, true, "AdamW's epsilon") \
ROW(REAL, grad_clip, "grad-clip", "X", 1.0, 0, 1e9, true, "greatest global gradient norm; 0 never clips") \
ROW(COUNT, seed, "seed", "N", 1, 0, 1LL << 53, true, "of initial weights, shuffling and samples") \
GROUP("Output") \
ROW(TEXT, out, "out", "DIR", 0, 0, 0, false, "folder of the run: checkpoints and log.jsonl") \
ROW(FLAG, resume, "resume", "", 0, 0, 0, false, \
    "go on from the newest checkpoint in --out, with the run's own options; from the start if there is " \
    "none") \
ROW(COUNT, save_every, "save-every", "STEPS", 1000, 0, 1LL << 40, true, \
    "write a checkpoint this often and at the end; 0: at the end") \
ROW(COUNT, keep, "keep", "N", 3, 0, 1 << 30, true, "keep the N newest checkpoints; 0 keeps all") \
ROW(COUNT, log_every, "log-every", "STEPS", 1, 1, 1LL << 40, true, \
    "print a line this often; log.jsonl has every step") \
ROW(COUNT, val_every, "val-every", "STEPS", 250, 0, 1LL << 40, true, \
    "measure the loss on --val-data this often and at the end; 0: at the end") \
ROW(COUNT, val_tokens, "val-tokens", "N", 1048576, 1, 1LL << 60, true, \
    "held-out tokens to measure it on, or all there are") \
ROW(COUNT, sample_every, "sample-every", "STEPS", 0, 0, 1LL << 40, true, \
    "print a sample this often; 0: never") \
GROUP("Generation") \
ROW(COUNT, generate, "generate", "N", OPTION_UNSET, 1, 1 << 24, true, \
    "write up to N tokens, until end of text, with the model of --init, and leave; [128] in samples while " \
    "training") \
ROW(TEXT, prompt, "prompt", "TEXT", 0, 0, 0, true, \
    "what to continue [end of text, where a document starts]") \
ROW(REAL, temperature, "temperature", "X", 1.0, 0, 100, true, \
    "divides the logits; 0 takes the likeliest token") \
ROW(COUNT, top_k, "top-k", "N", 0, 0, 1 << 24, true, "draw from the N likeliest tokens; 0 from all") \
ROW(REAL, top_p, "top-p", "X", 1.0, 0, 1, true, \
    "draw from the likeliest tokens that make up this probability") \
GROUP("GPU (the CPU trainer has no use for them)") \
ROW(TEXT, recompute, "recompute", "WHAT", 0, 0, 0, true, \
    "what the backward pass computes again to save memory: none, cheap (q, k and v) or block (all of it) " \
    "[the first that fits]") \
ROW(TEXT, attention, "attention", "WHOSE", 0, 0, 0, true, \
    "kernels: fox, or cudnn for models without a forget gate, in a build with USE_CUDNN=1 [fox]") \
ROW(FLAG, deterministic, "deterministic", "", 0, 0, 0, true, "the same bits in every run, a little slower") \
GROUP("Checks") \
ROW(FLAG, dry_run, "dry-run", "", 0, 0, 0, false, \
    "print config, parameter counts and memory plan, and leave") \
ROW(COUNT, bench, "bench", "N", OPTION_UNSET, 1, 1 << 30, false, \
    "time N steps on random tokens, print tokens/s, milliseconds by phase and memory, and leave") \
ROW(TEXT, dump, "dump", "FILE", 0, 0, 0, false, \
    "write loss, logits and gradients of the first micro-batch as safetensors, and leave") \
ROW(FLAG, help, "help", "", 0, 0, 0, false, "print this text, and leave")

#define OPTION_TYPE_TEXT  const char*
#define OPTION_TYPE_COUNT int64_t
#define OPTION_TYPE_REAL  double
#define OPTION_TYPE_FLAG  bool
#define OPTION_TYPE_LIST  CliList

#define OPTION_NO_FIELD(title)
#define OPTION_FIELD(type, field, ...) OPTION_TYPE_##type field;
typedef struct { OPTIONS(OPTION_NO_FIELD, OPTION_FIELD) } Options;

#define OPTION_GROUP(title) {CLI_GROUP, title, "", 0, 0, 0, 0, ""},
#define OPTION_ROW(type, field, name, value, preset, least, most, kept, help) \
    {CLI_##type, name, value, offsetof(Options, field), \
     (double)(preset), (double)(least), (double)(most), help},
static const CliRow option_rows[] = {OPTIONS(OPTION_GROUP, OPTION_ROW)};

#define OPTION_GROUP_KEPT(title) false,
#define OPTION_KEPT(type, field, name, value, preset, least, most, kept, help) kept,
static const bool option_kept[] = {OPTIONS(OPTION_GROUP_KEPT, OPTION_KEPT)};
// clang-format on
#define NUM_OPTION_ROWS ((int)(sizeof option_rows / sizeof option_rows[0]))

// ----------------------------------------------------------------------------
// the command line

// Fills every field with its default.
static inline void options_defaults(Options* o) { cli_defaults(option_rows, NUM_OPTION_ROWS, o); }

// Parses the command line into *o; given[i] tells whether row i was on it. As cli_parse, without arguments.
static inline bool options_parse(Options* o, bool given[NUM_OPTION_ROWS], int argc, char** argv, Error* err) {
    return cli_parse(option_rows, NUM_OPTION_ROWS, o, given, argc, argv, NULL, err);
}

// Fills what is still unset from a preset's recipe.
static inline void options_apply_recipe(Options* o, const Recipe* r) {
    if (o->seq_len == OPTION_UNSET) o->seq_len = r->seq_len;
    if (o->batch_tokens == OPTION_UNSET) o->batch_tokens = r->batch_tokens;
    if (o->max_tokens == OPTION_UNSET) o->max_tokens = r->max_tokens;
    if (o->warmup_tokens == OPTION_UNSET) o->warmup_tokens = r->warmup_tokens;
    if (o->lr == OPTION_UNSET) o->lr = r->lr;
}

// What options that take one of a few names may be: of --recompute from what keeps most to what keeps least.
static const char* const option_recompute_names[] = {"none", "cheap", "block", NULL};
static const char* const option_attention_names[] = {"fox", "cudnn", NULL};

// The place of an option's value among its names. Another name is one line, and the end.
static inline int option_place(const char* const* names, const char* option, const char* value) {
    char all[128] = "";
    for (int i = 0; names[i]; i++) {
        if (strcmp(value, names[i]) == 0) return i;
        size_t n = strlen(all);
        snprintf(all + n, sizeof all - n, "%s%s", i ? ", " : "", names[i]);
    }
    die("--%s %s: not one of %s", option, value, all);
}

// Prints --help.
static inline void options_print_help(FILE* f, const char* program, const char* summary) {
    fprintf(f, "usage: %s --option value ...\n%s\n", program, summary);
    cli_print_help(f, option_rows, NUM_OPTION_ROWS);
}

// ----------------------------------------------------------------------------
// the record

// Writes the options that a resumed run takes back, as an object under `key`. What is unset is left out.
static inline void options_put(const Options* o, JsonWriter* w, const char* key) {
    json_begin_object(w, key);
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        const CliRow* row = &option_rows[i];
        const void* field = (const char*)o + row->offset;
        if (!option_kept[i]) continue;
        switch (row->type) {
        case CLI_GROUP: break;
        case CLI_TEXT:
            if (*(const char* const*)field) json_put_string(w, row->name, *(const char* const*)field);
            break;
        case CLI_COUNT:
            if (*(const int64_t*)field != OPTION_UNSET) json_put_int(w, row->name, *(const int64_t*)field);
            break;
        case CLI_REAL:
            if (*(const double*)field != OPTION_UNSET) json_put_double(w, row->name, *(const double*)field);
            break;
        case CLI_FLAG: json_put_bool(w, row->name, *(const bool*)field); break;
        case CLI_LIST: {
            const CliList* list = (const CliList*)field;
            json_begin_array(w, row->name);
            for (int k = 0; k < list->count; k++) json_put_string(w, NULL, list->items[k]);
            json_end(w);
            break;
        }
        }
    }
    json_end(w);
}

// Gives an option the value that options_put wrote as `node`; false if it is not a valid one.
static inline bool options_restore_one(Options* o, const CliRow* row, const Json* j, int node) {
    const char* text = json_string(j, node);
    char digits[32];
    double number;
    bool ok = true;
    Error ignored; // the caller names the file, and the option
    switch (row->type) {
    case CLI_GROUP: break;
    case CLI_TEXT: return text && cli_set(row, o, xstrdup(text), &ignored);
    case CLI_COUNT:
    case CLI_REAL:
        if (!json_double(j, node, &number)) return false;
        snprintf(digits, sizeof digits, "%.17g", number);
        return cli_set(row, o, digits, &ignored);
    case CLI_FLAG: return json_bool(j, node, (bool*)cli_field(row, o));
    case CLI_LIST:
        for (int item = json_first(j, node); ok && item >= 0; item = json_next(j, item)) {
            text = json_string(j, item);
            ok = text && cli_set(row, o, xstrdup(text), &ignored);
        }
        return ok && json_is(j, node, JSON_ARRAY);
    }
    return false;
}

// Takes back what options_put wrote, from object `node` of j, but for what given[] says was on the command
// line. Options that this version no longer has are passed over. Texts are copied and live on.
static inline bool options_restore(Options* o, const bool given[NUM_OPTION_ROWS], const char* source,
                                   const Json* j, int node, Error* err) {
    for (int member = json_first(j, node); member >= 0; member = json_next(j, member)) {
        const char* name = json_key(j, member);
        const CliRow* row = cli_find(option_rows, NUM_OPTION_ROWS, name, strlen(name));
        if (!row || !option_kept[row - option_rows] || given[row - option_rows]) continue;
        if (!options_restore_one(o, row, j, member))
            return fail(err, "%s: the recorded value of --%s is not valid", source, row->name);
    }
    return true;
}

#endif // LLMC_OPTIONS_H
