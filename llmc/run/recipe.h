/*
The recipe of a run (llmc/config/recipes.h) and what of it is changed, as one line: in --dry-run, at the start
of a run, in log.jsonl and in trainer.json,

    iclr, changed: lr 0.001 (0.002), num_heads 12 (24)

with the recipe's own values in brackets. Called by resume.h, shares.h, report.h and train.h.
*/
#pragma once

#include "../config/config_check.h"
#include "../config/config_file.h"
#include "../tokens/dataloader.h"
#include "command/options.h"

// The order in which a training reads data without --shuffle: documents as in the paper, a stream, whose
// neighbouring sequences are of one text, shuffled.
static inline Shuffle data_default_order(const DataLoader* data) {
    return data->set.doc_len > 0 ? SHUFFLE_FALSE : SHUFFLE_TRUE;
}

static inline const char* shuffle_text(int64_t shuffle) {
    return shuffle == SHUFFLE_TRUE ? "shuffled" : "in order";
}

// Is the option a part of recipes?
static inline bool recipe_has_option(const CliRow* row) {
    return row->offset == offsetof(Options, seq_len) || row->offset == offsetof(Options, shuffle) ||
           (option_has(row, TRAINS) && row->offset != offsetof(Options, json_escape));
}

// Adds "NAME IS (WAS)" to a list where the texts of the values differ.
static inline void recipe_put(FILE* list, int* count, const char* name, const char* is, const char* was) {
    if (strcmp(is, was) == 0) return;
    fprintf(list, "%s%s %s (%s)", (*count)++ ? ", " : ", changed: ", name, is, was);
}

// The options that differ from the recipe's.
static inline void recipe_put_options(FILE* list, int* count, const Options* o, const Recipe* recipe,
                                      const DataLoader* data) {
    Options published;
    options_defaults(&published);
    options_apply_recipe(&published, recipe);
    published.shuffle = o->shuffle;
    const bool in_order = recipe_reads_longcrawl64(recipe->name);
    if (o->shuffle != OPTION_UNSET && in_order) published.shuffle = SHUFFLE_FALSE;
    if (data && !in_order) published.shuffle = data_default_order(data);
    for (const CliRow* row = option_rows; row < option_rows + NUM_OPTION_ROWS; row++) {
        if (row->type == CLI_GROUP || !recipe_has_option(row)) continue;
        char *is = option_text(o, row), *was = option_text(&published, row);
        recipe_put(list, count, row->name, is, was);
        free(is), free(was);
    }
}

// The keys of config.json that differ from the recipe's.
static inline void recipe_put_config(FILE* list, int* count, const Config* c, const Config* published) {
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) {
        JsonWriter is = json_writer(0), was = json_writer(0);
        json_begin_object(&is, NULL), json_begin_object(&was, NULL);
        config_put_always(c, i, &is), config_put_always(published, i, &was);
        const char *colon = strchr(is.text, ':'), *other = strchr(was.text, ':'); // NULL: plain rope_scaling
        if (colon || other)
            recipe_put(list, count, config_keys[i].name, colon ? colon + 1 : "null",
                       other ? other + 1 : "null");
        json_writer_free(&is), json_writer_free(&was);
    }
}

// How often a training reads its data; 1 where it has enough.
static inline double recipe_epochs(const Options* o, const DataLoader* data) {
    const double epochs = (double)o->max_tokens / ((double)dataloader_sequences(data) * (double)o->seq_len);
    return epochs > 1 ? epochs : 1;
}

// How often it reads a part of them.
static inline double recipe_part_epochs(const Options* o, const MixturePart* part) {
    return mixture_epochs(part, (double)o->max_tokens / (double)o->seq_len);
}

// What of the data differs: sequences of each document, of which the paper's recipes read the first alone,
// and epochs.
static inline void recipe_put_data(FILE* list, int* count, const Options* o, const DataLoader* data) {
    char text[32];
    const int64_t columns = data->set.doc_len / o->seq_len; // 0: a stream
    const double first_columns = (double)data->set.items * (double)o->seq_len;
    const bool beyond = o->shuffle == SHUFFLE_TRUE || (double)o->max_tokens > first_columns;
    snprintf(text, sizeof text, "%lld", columns > 1 && beyond ? (long long)columns : 1LL);
    recipe_put(list, count, "sequences of a document", text, "1");
    snprintf(text, sizeof text, "%.4g", recipe_epochs(o, data));
    recipe_put(list, count, "epochs", text, "1");
}

// The recipe of a run and what of it is changed, to be freed; NULL where it has none. data: the opened
// --data, or NULL.
static inline char* recipe_text(const Options* o, const Config* c, const DataLoader* data) {
    Error err;
    Config published;
    Recipe recipe;
    char* text = NULL;
    size_t bytes;
    int count = 0;
    if (!o->model || !config_preset_recipe(&published, &recipe, o->model, (RecipeName)o->recipe, &err) ||
        !config_check(&published, o->model, &err))
        return NULL;
    FILE* list = open_memstream(&text, &bytes);
    if (!list) die("out of memory");
    fprintf(list, "%s", recipe.name == RECIPE_OWN ? "the preset's" : recipe_name(recipe.name));
    recipe_put_options(list, &count, o, &recipe, data);
    recipe_put_config(list, &count, c, &published);
    if (data && recipe_reads_longcrawl64(recipe.name)) recipe_put_data(list, &count, o, data);
    const bool whole = !ferror(list); // a list that has no memory to grow fails as a full disk does
    if (fclose(list) != 0 || !whole || !text) die("out of memory");
    return text;
}
