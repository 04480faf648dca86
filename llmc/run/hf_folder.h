/*
What makes a checkpoint folder one that Hugging Face transformers opens, beside config.json and
model.safetensors:

    modeling_fox.py           the model in PyTorch, which config.json's auto_map names: scripts/hf/modeling_fox.py
    generation_config.json    end of text
    README.md                 the model card: facts of the run, for the hub and for people
    tokenizer.json            where the tokenizer is known
    tokenizer_config.json

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True), AutoTokenizer.from_pretrained(FOLDER)

The tokenizer is read once, at the start of a run (hf_tokenizer_find), from beside the first data shard, or else
from the folder that the run starts from. The trainer never reads these files of a checkpoint that it resumes,
the tokenizer excepted, so they may be edited.

Called on rank 0, by checkpoint.h and train.h.
*/
#pragma once

#include "../model/params.h"
#include "../tokens/shard_set.h"
#include "../tokens/tokenizer_json.h"
#include "options.h"

#ifndef CODE_VERSION // the Makefile defines it from git
#define CODE_VERSION "unknown"
#endif

// The text of scripts/hf/modeling_fox.py. The Makefile makes its lines into string literals.
static const char hf_modeling[] =
#include "../../build/modeling_fox.h"
    ;

enum { HF_TOKENIZER_BYTES = 64 << 20 }; // limit for the files that are read; GPT-2's has 2.8 MB

// The tokenizer's files. All NULL: the tokenizer is not known.
typedef struct {
    char* json;   // the text of tokenizer.json
    char* config; // of tokenizer_config.json
} HfTokenizer;

static inline void hf_tokenizer_free(HfTokenizer* t) {
    free(t->json);
    free(t->config);
    memset(t, 0, sizeof *t);
}

// ----------------------------------------------------------------------------
// the tokenizer

// Reads a text; NULL without an error if the file does not exist. False if it cannot be one of the tokenizer's.
static inline bool hf_read(char** text, const char* path, Error* err) {
    struct stat st;
    size_t bytes;
    *text = NULL;
    if (stat(path, &st) != 0)
        return errno == ENOENT || fail(err, "%s: cannot read: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) return fail(err, "%s: is not a regular file", path);
    if (st.st_size > HF_TOKENIZER_BYTES)
        return fail(err, "%s: has %lld bytes, more than a tokenizer's file can have (%d)", path,
                    (long long)st.st_size, HF_TOKENIZER_BYTES);
    *text = read_file(path, &bytes, err);
    return *text != NULL;
}

// Checks the text of a tokenizer.json: its ids fit into the model's vocabulary. Sets *end_of_text to the name of
// the model's end-of-text token, to be freed; NULL if the tokenizer has none with its id.
static inline bool hf_check_tokenizer(const char* path, const char* text, const Config* c, char** end_of_text,
                                      Error* err) {
    Json j;
    bool valid = true;
    *end_of_text = NULL;
    if (!json_parse(&j, path, text, strlen(text), err)) return false;
    const int vocab = json_get(&j, json_get(&j, 0, "model"), "vocab");
    const int added = json_get(&j, 0, "added_tokens");
    const bool list = json_is(&j, vocab, JSON_ARRAY); // as Unigram models have: of pairs
    int64_t id = 0, largest = list ? json_count(&j, vocab) - 1 : -1;
    for (int i = list ? -1 : json_first(&j, vocab); i >= 0; i = json_next(&j, i)) {
        valid = valid && json_int64(&j, i, &id) && id >= 0;
        if (id > largest) largest = id;
    }
    for (int i = json_first(&j, added); i >= 0; i = json_next(&j, i)) {
        const char* name = json_string(&j, json_get(&j, i, "content"));
        valid = valid && name && json_int64(&j, json_get(&j, i, "id"), &id) && id >= 0;
        if (id > largest) largest = id;
        if (valid && !*end_of_text && id == config_end_of_text(c)) *end_of_text = xstrdup(name);
    }
    json_free(&j);
    if (valid && largest >= 0 && largest < c->vocab_size) return true;
    free(*end_of_text);
    *end_of_text = NULL;
    if (!valid || largest < 0)
        return fail(err, "%s: is not a tokenizer: it has no model.vocab with a number for each token", path);
    return fail(err, "%s: has the token id %lld, but the model's vocabulary has %lld tokens", path,
                (long long)largest, (long long)c->vocab_size);
}

// Composes tokenizer_config.json, to be freed.
static inline char* hf_compose_config(const Options* o, const char* end_of_text) {
    JsonWriter w = json_writer(2);
    json_begin_object(&w, NULL);
    json_put_string(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    json_put_int(&w, "model_max_length", o->seq_len);
    if (end_of_text) json_put_string(&w, "bos_token", end_of_text);
    if (end_of_text) json_put_string(&w, "eos_token", end_of_text);
    json_put_bool(&w, "clean_up_tokenization_spaces", false);
    json_begin_array(&w, "model_input_names"); // without token_type_ids, which the model does not have
    json_put_string(&w, NULL, "input_ids");
    json_put_string(&w, NULL, "attention_mask");
    json_end(&w);
    if (o->json_escape)
        json_put_string(
            &w, "text_format",
            "The model's text is JSON-escaped: escape a text before encoding it (a line break is \\n, "
            "a non-ASCII character \\uXXXX), and unescape what was decoded.");
    json_end(&w);
    return w.text;
}

// Takes the text of a tokenizer.json, and that of its tokenizer_config.json, or NULL to compose one. `path`
// names the former. On error *t is empty and both texts are freed.
static inline bool hf_tokenizer_set(HfTokenizer* t, const char* path, char* json, char* config,
                                    const Config* c, const Options* o, Error* err) {
    char* end_of_text;
    t->json = json;
    t->config = config;
    const bool ok = hf_check_tokenizer(path, json, c, &end_of_text, err);
    if (ok && !config) t->config = hf_compose_config(o, end_of_text);
    free(end_of_text);
    if (!ok) hf_tokenizer_free(t);
    return ok;
}

// Finds the tokenizer of a run: PREFIX_tokenizer.json beside `shard`, the first of the training data, or else
// the files in `folder` (NULL: none), a checkpoint or Hugging Face folder. *t is empty if there is neither. Free
// with hf_tokenizer_free. Fails, with nothing to free, if a file is there but is not a tokenizer of the model.
static inline bool hf_tokenizer_find(HfTokenizer* t, const char* shard, const char* folder, const Config* c,
                                     const Options* o, Error* err) {
    char path[PATH_LENGTH], config_path[PATH_LENGTH];
    char *json = NULL, *config = NULL;
    Json ignored;
    memset(t, 0, sizeof *t);
    if (shard_tokenizer_beside(path, shard) && !hf_read(&json, path, err)) return false;
    if (!json && folder) {
        path_join(path, folder, "tokenizer.json");
        path_join(config_path, folder, "tokenizer_config.json");
        if (!hf_read(&json, path, err)) return false;
        bool ok = !json || hf_read(&config, config_path, err);
        if (ok && config) {
            ok = json_parse(&ignored, config_path, config, strlen(config), err);
            if (ok) json_free(&ignored);
        }
        if (!ok) {
            free(json);
            free(config);
            return false;
        }
    }
    return !json || hf_tokenizer_set(t, path, json, config, c, o, err);
}

// ----------------------------------------------------------------------------
// the files of a checkpoint

// Writes a text file through to the disk.
static inline bool hf_write_text(const char* folder, const char* name, const char* text, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, name);
    FILE* f = fopen(path, "wb");
    if (!f) return fail(err, "%s: cannot create: %s", path, strerror(errno));
    fputs(text, f); // flush_and_close reports errors
    return flush_and_close(f, path, err);
}

static inline bool hf_write_generation(const char* folder, const Config* c, Error* err) {
    char path[PATH_LENGTH];
    JsonWriter w = json_writer(2);
    json_begin_object(&w, NULL);
    json_put_int(&w, "bos_token_id", config_end_of_text(c)); // what a document starts with
    json_put_int(&w, "eos_token_id", config_end_of_text(c));
    json_put_int(&w, "pad_token_id", config_end_of_text(c));
    json_end(&w);
    path_join(path, folder, "generation_config.json");
    const bool ok = json_writer_save(&w, path, err);
    json_writer_free(&w);
    return ok;
}

// Prints a row of the card's table: a comma-separated list of paths, without their folders. A character with a
// meaning in Markdown's tables becomes '?'.
static inline void hf_print_names(FILE* f, const char* what, const char* paths) {
    if (!paths) return;
    fprintf(f, "| %s | `", what);
    for (const char *at = paths, *end; *at; at = end) {
        end = at + strcspn(at, ",");
        const char *stop = end, *name = at;
        while (stop > at + 1 && stop[-1] == '/') stop--;
        for (const char* s = at; s + 1 < stop; s++)
            if (*s == '/') name = s + 1;
        for (; name < stop; name++)
            fputc((unsigned char)*name < ' ' || strchr("|`\177", *name) ? '?' : *name, f);
        if (*end) fputs(", ", f), end++;
    }
    fprintf(f, "` |\n");
}

// Writes the model card. tokens: trained on so far; t: has the folder a tokenizer?
static inline bool hf_write_card(const char* folder, const Config* c, const ParamTable* table,
                                 const Options* o, int64_t tokens, bool has_tokenizer, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, "README.md");
    FILE* f = fopen(path, "wb");
    if (!f) return fail(err, "%s: cannot create: %s", path, strerror(errno));
    const bool gate = config_has_gate(c);
    fprintf(f, "---\nlibrary_name: transformers\npipeline_tag: text-generation\n");
    fprintf(f, "# license: yours to choose, with the rights in the data in mind\n---\n\n");
    fprintf(f, "# %s of %.3g M parameters\n\n", gate ? "Forgetting Transformer" : "Transformer",
            (double)table->parameters / 1e6);
    fprintf(f, "A %s of the family of https://arxiv.org/abs/2503.02130, trained by train_fox.\n\n",
            gate ? "Transformer with a forget gate" : "Transformer");
    fprintf(f, "| | |\n|---|---|\n");
    hf_print_names(f, "preset", o->model);
    hf_print_names(f, "initialized from", o->init);
    fprintf(f, "| layers | %lld |\n| width | %lld |\n", (long long)c->num_hidden_layers,
            (long long)c->hidden_size);
    fprintf(f, "| heads | %lld of %lld channels |\n| MLP width | %lld |\n", (long long)c->num_heads,
            (long long)config_head_size(c), (long long)config_mlp_size(c));
    fprintf(f, "| vocabulary | %lld tokens |\n", (long long)c->vocab_size);
    fprintf(f, "| parameters | %lld (%lld without the input embedding) |\n", (long long)table->parameters,
            (long long)table->non_embedding);
    fprintf(f, "| trained on | %lld tokens, in sequences of %lld |\n", (long long)tokens,
            (long long)o->seq_len);
    hf_print_names(f, "data", o->data);
    fprintf(f, "| seed | %lld |\n| code version | %s |\n\n", (long long)o->seed, CODE_VERSION);
    fprintf(f, "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n");
    fprintf(f, "model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)\n");
    if (has_tokenizer)
        fprintf(f, "tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)\n"
                   "inputs = tokenizer(tokenizer.bos_token + TEXT, return_tensors=\"pt\")\n"
                   "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))\n");
    fprintf(f, "```\n\n`trust_remote_code=True` runs `modeling_fox.py` of this folder.");
    fprintf(f, " In training a document starts with the end-of-text token, so a prompt should too.\n");
    if (o->json_escape)
        fprintf(f,
                "\nThe model's text is JSON-escaped: a line break is `\\n`, a non-ASCII character `\\uXXXX`. "
                "The tokenizer does not do that: escape a prompt (in Python "
                "`json.dumps(TEXT)[1:-1]`), and unescape the result.\n");
    return flush_and_close(f, path, err);
}

// Writes all these files to the folder of a checkpoint. `tokens`: trained on so far; t: NULL or empty: no
// tokenizer. On error some files may be there.
static inline bool hf_folder_write(const char* folder, const Config* c, const ParamTable* table,
                                   const Options* o, int64_t tokens, const HfTokenizer* t, Error* err) {
    const bool has_tokenizer = t && t->json;
    return hf_write_text(folder, "modeling_fox.py", hf_modeling, err) &&
           hf_write_generation(folder, c, err) &&
           hf_write_card(folder, c, table, o, tokens, has_tokenizer, err) &&
           (!has_tokenizer || (hf_write_text(folder, "tokenizer.json", t->json, err) &&
                               hf_write_text(folder, "tokenizer_config.json", t->config, err)));
}
