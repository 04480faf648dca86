/*
The command line of both trainers, from one table.

A row of OPTIONS makes a field of struct Options, and what the parser, --help, and the record in trainer.json know of
it; from that record --resume takes back what is not given again. Counts take suffixes (2.5Gi, 16Ki, 1e9). A number
that nobody gave is OPTION_UNSET until the preset's recipe, or the program, chooses it.
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "common.h"
#include "config.h"
#include "json.h"
#include "numbers.h"

#define OPTION_UNSET    (-1)
#define OPTION_MAX_SETS 64

typedef struct {
    const char* items[OPTION_MAX_SETS];
    int count;
} OptionList;

// GROUP(title) opens a group of --help. The others: field, name, what its value is, default, least and greatest
// value, does a resumed run take it from the record, help.
// clang-format off
#define OPTIONS(GROUP, TEXT, COUNT, REAL, FLAG, LIST) \
GROUP("Model") \
TEXT(model, "model", "NAME", NULL, 0, 0, true, \
     "preset: fox-pro, fox-llama, transformer-pro or transformer-llama, then -nano, -micro, -125m, -360m or -760m") \
LIST(set, "set", "KEY=VALUE", 0, 0, 0, true, "set a key of config.json, as in use_rope=true; may be given many times") \
TEXT(init, "init", "DIR", NULL, 0, 0, true, "start from the config and weights of a checkpoint or Hugging Face folder") \
GROUP("Data") \
TEXT(data, "data", "GLOB", NULL, 0, 0, true, "training shards (data/README.md says how to make them)") \
TEXT(val_data, "val-data", "GLOB", NULL, 0, 0, true, "held-out shards") \
FLAG(shuffle, "shuffle", "", false, 0, 0, true, "visit the sequences in an order drawn from the seed, new each epoch") \
TEXT(vocab, "vocab", "FILE", NULL, 0, 0, true, "GPT-2's vocab.bpe, for prompts and samples of models that read its tokens") \
FLAG(json_escape, "json-escape", "", false, 0, 0, true, "prompts and samples are in LongCrawl64's JSON-escaped form") \
GROUP("Training") \
COUNT(seq_len, "seq-len", "T", OPTION_UNSET, 1, 1 << 24, true, "tokens of a sequence [the preset's]") \
COUNT(batch_tokens, "batch-tokens", "N", OPTION_UNSET, 1, 1LL << 40, true, "tokens of an optimizer step [the preset's]") \
COUNT(micro_batch, "micro-batch", "B", OPTION_UNSET, 1, 1 << 20, true, \
      "sequences of one forward and backward pass [as many as suit the machine]") \
COUNT(max_tokens, "max-tokens", "N", OPTION_UNSET, 1, 1LL << 60, true, \
      "tokens to train on; the learning rate reaches 0 there [the preset's]") \
COUNT(max_steps, "max-steps", "N", OPTION_UNSET, 0, 1LL << 40, false, \
      "leave after step N, with a checkpoint to resume from; the schedule stays that of --max-tokens") \
REAL(lr, "lr", "X", OPTION_UNSET, 0, 1e3, true, "peak learning rate [the preset's]") \
COUNT(warmup_tokens, "warmup-tokens", "N", OPTION_UNSET, 0, 1LL << 60, true, "tokens of linear warm-up [the preset's]") \
REAL(weight_decay, "weight-decay", "X", 0.1, 0, 1e3, true, "AdamW's weight decay, of matrices and the embedding") \
REAL(beta1, "beta1", "X", 0.9, 0, 0.999999, true, "AdamW's decay of the mean gradient") \
REAL(beta2, "beta2", "X", 0.95, 0, 0.999999, true, "AdamW's decay of the mean squared gradient") \
REAL(adam_eps, "adam-eps", "X", 1e-8, 1e-30, 1, true, "AdamW's epsilon") \
REAL(grad_clip, "grad-clip", "X", 1.0, 0, 1e9, true, "greatest global gradient norm; 0 never clips") \
COUNT(seed, "seed", "N", 1, 0, 1LL << 53, true, "of initial weights, shuffling and samples") \
GROUP("Output") \
TEXT(out, "out", "DIR", NULL, 0, 0, false, "folder of the run: checkpoints and log.jsonl") \
FLAG(resume, "resume", "", false, 0, 0, false, \
     "go on from the newest checkpoint in --out, with the run's own options; from the start if there is none") \
COUNT(save_every, "save-every", "STEPS", 1000, 0, 1LL << 40, true, "write a checkpoint this often and at the end; 0: at the end") \
COUNT(keep, "keep", "N", 3, 0, 1 << 30, true, "keep the N newest checkpoints; 0 keeps all") \
COUNT(log_every, "log-every", "STEPS", 1, 1, 1LL << 40, true, "print a line this often; log.jsonl has every step") \
COUNT(val_every, "val-every", "STEPS", 250, 0, 1LL << 40, true, "measure the loss on --val-data this often and at the end; 0: at the end") \
COUNT(val_tokens, "val-tokens", "N", 1048576, 1, 1LL << 60, true, "held-out tokens to measure it on, or all there are") \
COUNT(sample_every, "sample-every", "STEPS", 0, 0, 1LL << 40, true, "print a sample this often; 0: never") \
GROUP("Generation") \
COUNT(generate, "generate", "N", OPTION_UNSET, 1, 1LL << 40, false, \
      "write up to N tokens, until end of text, with the model of --init, and leave; [128] in samples while training") \
TEXT(prompt, "prompt", "TEXT", NULL, 0, 0, true, "what to continue [end of text, where a document starts]") \
REAL(temperature, "temperature", "X", 1.0, 0, 100, true, "divides the logits; 0 takes the likeliest token") \
COUNT(top_k, "top-k", "N", 0, 0, 1 << 24, true, "draw from the N likeliest tokens; 0 from all") \
REAL(top_p, "top-p", "X", 1.0, 0, 1, true, "draw from the likeliest tokens that make up this probability") \
GROUP("Checks") \
FLAG(dry_run, "dry-run", "", false, 0, 0, false, "print config, parameter counts and memory plan, and leave") \
COUNT(bench, "bench", "N", OPTION_UNSET, 1, 1 << 30, false, \
      "time N steps on random tokens, print tokens/s, milliseconds by phase and memory, and leave") \
TEXT(dump, "dump", "FILE", NULL, 0, 0, false, \
     "write loss, logits and gradients of the first micro-batch as safetensors, and leave") \
FLAG(help, "help", "", false, 0, 0, false, "print this text, and leave")

#define OPTION_NONE(...)
#define OPTION_FIELD_TEXT(field, ...)  const char* field;
#define OPTION_FIELD_COUNT(field, ...) int64_t field;
#define OPTION_FIELD_REAL(field, ...)  double field;
#define OPTION_FIELD_FLAG(field, ...)  bool field;
#define OPTION_FIELD_LIST(field, ...)  OptionList field;

typedef enum { OPTION_GROUP, OPTION_TEXT, OPTION_COUNT, OPTION_REAL, OPTION_FLAG, OPTION_LIST } OptionType;

typedef struct {
    OPTIONS(OPTION_NONE, OPTION_FIELD_TEXT, OPTION_FIELD_COUNT, OPTION_FIELD_REAL, OPTION_FIELD_FLAG, OPTION_FIELD_LIST)
} Options;

typedef struct {
    OptionType type;
    const char *name, *value_name;
    size_t offset;              // of the field in Options
    double preset, least, most; // default, and range
    bool kept;                  // is in trainer.json's record for a resumed run
    const char* help;
} OptionRow;

#define OPTION_ROW_GROUP(title) {OPTION_GROUP, title, "", 0, 0, 0, 0, false, ""},
#define OPTION_ROW_TEXT(field, name, value, preset, least, most, kept, help) \
    {OPTION_TEXT, name, value, offsetof(Options, field), 0, 0, 0, kept, help},
#define OPTION_ROW_COUNT(field, name, value, preset, least, most, kept, help) \
    {OPTION_COUNT, name, value, offsetof(Options, field), (double)(preset), (double)(least), (double)(most), kept, help},
#define OPTION_ROW_REAL(field, name, value, preset, least, most, kept, help) \
    {OPTION_REAL, name, value, offsetof(Options, field), preset, least, most, kept, help},
#define OPTION_ROW_FLAG(field, name, value, preset, least, most, kept, help) \
    {OPTION_FLAG, name, value, offsetof(Options, field), 0, 0, 0, kept, help},
#define OPTION_ROW_LIST(field, name, value, preset, least, most, kept, help) \
    {OPTION_LIST, name, value, offsetof(Options, field), 0, 0, 0, kept, help},

static const OptionRow option_rows[] = {
    OPTIONS(OPTION_ROW_GROUP, OPTION_ROW_TEXT, OPTION_ROW_COUNT, OPTION_ROW_REAL, OPTION_ROW_FLAG, OPTION_ROW_LIST)
};
// clang-format on
#define NUM_OPTION_ROWS ((int)(sizeof option_rows / sizeof option_rows[0]))

// ----------------------------------------------------------------------------
// parsing

// Fills every field with its default.
static inline void options_defaults(Options* o) {
    memset(o, 0, sizeof *o);
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        const OptionRow* row = &option_rows[i];
        void* field = (char*)o + row->offset;
        if (row->type == OPTION_COUNT) *(int64_t*)field = (int64_t)row->preset;
        if (row->type == OPTION_REAL) *(double*)field = row->preset;
    }
}

// Gives option `row` the value `text`, which must outlive the options. `source` names where it stands in messages.
static inline bool options_set(Options* o, const OptionRow* row, const char* text, const char* source,
                               Error* err) {
    void* field = (char*)o + row->offset;
    double number = 0;
    switch (row->type) {
    case OPTION_GROUP: break;
    case OPTION_TEXT: *(const char**)field = text; break;
    case OPTION_FLAG: *(bool*)field = true; break;
    case OPTION_LIST: {
        OptionList* list = (OptionList*)field;
        if (list->count == OPTION_MAX_SETS)
            return fail(err, "%s--%s: given more than %d times", source, row->name, OPTION_MAX_SETS);
        list->items[list->count++] = text;
        break;
    }
    case OPTION_COUNT:
        if (!parse_count(text, &number) || number != floor(number) || number < row->least ||
            number > row->most)
            return fail(err, "%s--%s %s: not a whole number from %.0f to %.0f (suffixes: k M G Ki Mi Gi)",
                        source, row->name, text, row->least, row->most);
        *(int64_t*)field = (int64_t)number;
        break;
    case OPTION_REAL:
        if (!parse_number(text, &number) || !(number >= row->least && number <= row->most))
            return fail(err, "%s--%s %s: not a number from %g to %g", source, row->name, text, row->least,
                        row->most);
        *(double*)field = number;
        break;
    }
    return true;
}

// The row of the option whose name is the first n characters of `name`, or NULL.
static inline const OptionRow* options_find(const char* name, size_t n) {
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        const OptionRow* row = &option_rows[i];
        if (row->type != OPTION_GROUP && strlen(row->name) == n && strncmp(row->name, name, n) == 0)
            return row;
    }
    return NULL;
}

// Parses `--name value` and `--name=value` into *o, which starts from the defaults; given[i] tells whether row i was
// on the command line. Text values point into argv. An unknown or malformed option is an error that names it.
static inline bool options_parse(Options* o, bool given[NUM_OPTION_ROWS], int argc, char** argv, Error* err) {
    options_defaults(o);
    memset(given, 0, NUM_OPTION_ROWS * sizeof given[0]);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) != 0) return fail(err, "%s: not an option; --help lists them", argv[i]);
        const char* name = argv[i] + 2;
        size_t n = strcspn(name, "=");
        const OptionRow* row = options_find(name, n);
        if (!row) return fail(err, "--%.*s: no such option; --help lists them", (int)n, name);
        const char* value = name[n] == '=' ? name + n + 1 : NULL;
        if (row->type == OPTION_FLAG && value) return fail(err, "--%s takes no value", row->name);
        if (row->type != OPTION_FLAG && !value) {
            if (i + 1 == argc) return fail(err, "--%s: its %s is missing", row->name, row->value_name);
            value = argv[++i];
        }
        if (given[row - option_rows] && row->type != OPTION_LIST)
            return fail(err, "--%s: given twice", row->name);
        if (!options_set(o, row, value, "", err)) return false;
        given[row - option_rows] = true;
    }
    return true;
}

// Fills what is still unset from a preset's recipe.
static inline void options_apply_recipe(Options* o, const Recipe* r) {
    if (o->seq_len == OPTION_UNSET) o->seq_len = r->seq_len;
    if (o->batch_tokens == OPTION_UNSET) o->batch_tokens = r->batch_tokens;
    if (o->max_tokens == OPTION_UNSET) o->max_tokens = r->max_tokens;
    if (o->warmup_tokens == OPTION_UNSET) o->warmup_tokens = r->warmup_tokens;
    if (o->lr == OPTION_UNSET) o->lr = r->lr;
}

// ----------------------------------------------------------------------------
// help and record

// Prints --help, an option a line (its text on the next one when the name is long), wrapped to 110 columns.
static inline void options_print_help(FILE* f, const char* program, const char* summary) {
    const int indent = 28, width = 110;
    fprintf(f, "usage: %s --option value ...\n%s\n", program, summary);
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        const OptionRow* row = &option_rows[i];
        if (row->type == OPTION_GROUP) {
            fprintf(f, "\n%s\n", row->name);
            continue;
        }
        int column = fprintf(f, "  --%s %s", row->name, row->value_name);
        char text[512];
        snprintf(text, sizeof text, "%s", row->help);
        bool chosen = row->preset != OPTION_UNSET && !strchr(row->help, '[');
        if ((row->type == OPTION_COUNT || row->type == OPTION_REAL) && chosen)
            snprintf(text, sizeof text, "%s [%.15g]", row->help, row->preset);
        for (char* word = strtok(text, " "); word; word = strtok(NULL, " ")) {
            if (column < indent)
                column += fprintf(f, "%*s", indent - column, "");
            else if (column + 1 + (int)strlen(word) > width)
                column = fprintf(f, "\n%*s", indent, "") - 1;
            else
                column += fprintf(f, " ");
            column += fprintf(f, "%s", word);
        }
        fprintf(f, "\n");
    }
}

// Writes the options that a resumed run takes back, as an object under `key`. What is unset is left out.
static inline void options_put(const Options* o, JsonWriter* w, const char* key) {
    json_begin_object(w, key);
    for (int i = 0; i < NUM_OPTION_ROWS; i++) {
        const OptionRow* row = &option_rows[i];
        const void* field = (const char*)o + row->offset;
        if (!row->kept) continue;
        switch (row->type) {
        case OPTION_GROUP: break;
        case OPTION_TEXT:
            if (*(char* const*)field) json_put_string(w, row->name, *(char* const*)field);
            break;
        case OPTION_COUNT:
            if (*(const int64_t*)field != OPTION_UNSET) json_put_int(w, row->name, *(const int64_t*)field);
            break;
        case OPTION_REAL:
            if (*(const double*)field != OPTION_UNSET) json_put_double(w, row->name, *(const double*)field);
            break;
        case OPTION_FLAG: json_put_bool(w, row->name, *(const bool*)field); break;
        case OPTION_LIST:
            json_begin_array(w, row->name);
            for (int k = 0; k < ((const OptionList*)field)->count; k++)
                json_put_string(w, NULL, ((const OptionList*)field)->items[k]);
            json_end(w);
            break;
        }
    }
    json_end(w);
}

// Takes back what options_put wrote, from object `node` of j, but for what given[] says was on the command line.
// Options that this version no longer has are passed over. Texts are copied and live on.
static inline bool options_restore(Options* o, const bool given[NUM_OPTION_ROWS], const char* source,
                                   const Json* j, int node, Error* err) {
    for (int member = json_first(j, node); member >= 0; member = json_next(j, member)) {
        const OptionRow* row = options_find(json_key(j, member), strlen(json_key(j, member)));
        if (!row || !row->kept || given[row - option_rows]) continue;
        double number = 0;
        bool flag = false, ok = true;
        char text[32];
        if (row->type == OPTION_LIST) {
            for (int item = json_first(j, member); ok && item >= 0; item = json_next(j, item))
                ok = json_string(j, item) && options_set(o, row, xstrdup(json_string(j, item)), source, err);
        } else if (row->type == OPTION_FLAG) {
            ok = json_bool(j, member, &flag);
            *(bool*)((char*)o + row->offset) = flag;
        } else if (row->type == OPTION_TEXT) {
            ok = json_string(j, member) && options_set(o, row, xstrdup(json_string(j, member)), source, err);
        } else {
            ok = json_double(j, member, &number);
            snprintf(text, sizeof text, "%.17g", number);
            ok = ok && options_set(o, row, text, source, err);
        }
        if (!ok) return fail(err, "%s: the recorded value of --%s is not valid", source, row->name);
    }
    return true;
}

#endif // LLMC_OPTIONS_H
