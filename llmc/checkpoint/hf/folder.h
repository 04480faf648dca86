/*
What makes a checkpoint folder one that Hugging Face transformers opens, beside config.json and
model.safetensors:

    configuration_fox.py      the keys of config.json
    modeling_fox.py           the model in PyTorch, which config.json's auto_map names
    modeling_recurrent.py     with the recurrent baselines, which then auto_map names
    modeling_stack.py         with layer_types, likewise
    generation_config.json    end of text
    README.md                 the model card: facts of the run, for the hub and for people
    tokenizer.json            where the tokenizer is known (tokenizer.h)
    tokenizer_config.json

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    AutoTokenizer.from_pretrained(FOLDER)

The Python files are those of llmc/checkpoint/hf/. The one of the model imports all others of its folder
itself: transformers 4.44 copies a file with its own imports, but not with the imports of those.

The trainer reads only the tokenizer of these files again. They have no checksums, so people may edit them.
Called on rank 0, by write.h.
*/
#pragma once

#include "../../model/params.h"
#include "tokenizer.h"

// What the model card says of the run. Texts are NULL where an option was not given.
typedef struct {
    const char *model, *init, *data; // --model, --init, --data
    const char* code_version;
    int64_t seq_len, seed;
    int64_t tokens;   // trained on so far
    bool json_escape; // the model's text is JSON-escaped
} HfRun;

// The text of the Python files beside this one, whose lines the Makefile makes into string literals.
static const char hf_configuration_fox[] =
#include "../../../build/configuration_fox.h"
    ;
static const char hf_modeling_fox[] =
#include "../../../build/modeling_fox.h"
    ;
static const char hf_modeling_recurrent[] =
#include "../../../build/modeling_recurrent.h"
    ;

static const char hf_modeling_stack[] =
#include "../../../build/modeling_stack.h"
    ;

static inline bool hf_write_text(const char* folder, const char* name, const char* text, Error* err) {
    char path[PATH_LENGTH];
    path_join(path, folder, name);
    return write_text_file(path, text, err);
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

// Prints a row of the card's table: a comma-separated list of paths, without their folders. A character with
// a meaning in Markdown's tables becomes '?'.
static inline void hf_print_names(FILE* f, const char* what, const char* paths) {
    if (!paths) return;
    fprintf(f, "| %s | `", what);
    for (const char *at = paths, *end; *at; at = end + 1) {
        end = at + strcspn(at, ",");
        const char *stop = end, *name = at;
        while (stop > at + 1 && stop[-1] == '/') stop--;
        for (const char* s = at; s + 1 < stop; s++)
            if (*s == '/') name = s + 1;
        for (; name < stop; name++)
            fputc((unsigned char)*name < ' ' || strchr("|`\177", *name) ? '?' : *name, f);
        if (!*end) break;
        fputs(", ", f);
    }
    fprintf(f, "` |\n");
}

// Prints how transformers opens the folder. A prompt's first token is given by its id: written as text, it
// would be no token of a text with a prefix space.
static inline void hf_print_usage(FILE* f, const HfTokenizer* t) {
    fprintf(f, "```python\n%sfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n",
            t ? "import torch\n" : "");
    fprintf(f, "model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)\n");
    if (t)
        fprintf(f,
                "tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)\n"
                "ids = torch.tensor([[model.generation_config.bos_token_id, *tokenizer(TEXT).input_ids]])\n"
                "ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=100)\n"
                "print(tokenizer.decode(ids[0]))\n");
    fprintf(f, "```\n\n`trust_remote_code=True` runs the Python files of this folder.");
    fprintf(f, " In training a document starts with the end-of-text token, so a prompt should too.");
    if (t)
        fprintf(f, " The tokenizer adds no token to a text. The name of a special token in a text becomes "
                   "that token; with `split_special_tokens=True` it is text, as in training.");
    fprintf(f, "\n");
}

// Writes the model card. t: NULL where the tokenizer is not known.
static inline bool hf_write_card(const char* folder, const Config* c, const ParamTable* table, const HfRun* r,
                                 const HfTokenizer* t, Error* err) {
    char path[PATH_LENGTH], types[512];
    path_join(path, folder, "README.md");
    FILE* f = fopen(path, "wb");
    if (!f) return fail(err, "%s: cannot create: %s", path, strerror(errno));
    const bool named = c->mixer != MIXER_ATTENTION || config_is_stack(c);
    const char* kind = named                ? config_class(c)->architecture
                       : config_has_gate(c) ? "Forgetting Transformer"
                                            : "Transformer";
    fprintf(f, "---\nlibrary_name: transformers\npipeline_tag: text-generation\n");
    fprintf(f, "# license: yours to choose, with the rights in the data in mind\n---\n\n");
    fprintf(f, "# %s of %.3g M parameters\n\n", kind, (double)table->parameters / 1e6);
    fprintf(f, "A model of https://arxiv.org/abs/2503.02130, trained by train_fox.\n\n");
    fprintf(f, "| | |\n|---|---|\n");
    hf_print_names(f, "preset", r->model);
    hf_print_names(f, "initialized from", r->init);
    fprintf(f, "| layers | %lld |\n| width | %lld |\n", (long long)c->num_hidden_layers,
            (long long)c->hidden_size);
    fprintf(f, "| heads | %lld of %s |\n", (long long)c->num_heads,
            counted(config_head_size(c), "channel").text);
    layer_types_text(types, sizeof types, &c->layer_types);
    if (config_is_stack(c)) fprintf(f, "| layer types | `%s` |\n", types);
    if (c->num_kv_heads) fprintf(f, "| heads of keys and values | %lld |\n", (long long)c->num_kv_heads);
    fprintf(f, "| MLP width | %lld |\n", (long long)config_mlp_size(c));
    fprintf(f, "| vocabulary | %s |\n", counted(c->vocab_size, "token").text);
    fprintf(f, "| parameters | %lld (%lld without the input embedding) |\n", (long long)table->parameters,
            (long long)table->non_embedding);
    fprintf(f, "| trained on | %s, in sequences of %lld |\n", counted(r->tokens, "token").text,
            (long long)r->seq_len);
    hf_print_names(f, "data", r->data);
    fprintf(f, "| seed | %lld |\n| code version | %s |\n\n", (long long)r->seed, r->code_version);
    hf_print_usage(f, t);
    if (r->json_escape)
        fprintf(f,
                "\nThe model's text is JSON-escaped: a line break is `\\n`, a non-ASCII character `\\uXXXX`. "
                "The tokenizer does not do that: escape a prompt (in Python "
                "`json.dumps(TEXT)[1:-1]`), and unescape the result.\n");
    return flush_and_close(f, path, err);
}

// Writes all these files to the folder of a checkpoint, through to the disk. t is NULL or empty where the
// tokenizer is not known. On error some files may be there.
static inline bool hf_folder_write(const char* folder, const Config* c, const ParamTable* table,
                                   const HfRun* r, const HfTokenizer* t, Error* err) {
    if (t && !t->json) t = NULL;
    return hf_write_text(folder, "configuration_fox.py", hf_configuration_fox, err) &&
           hf_write_text(folder, "modeling_fox.py", hf_modeling_fox, err) &&
           ((c->mixer == MIXER_ATTENTION && !config_is_stack(c)) ||
            hf_write_text(folder, "modeling_recurrent.py", hf_modeling_recurrent, err)) &&
           (!config_is_stack(c) || hf_write_text(folder, "modeling_stack.py", hf_modeling_stack, err)) &&
           hf_write_generation(folder, c, err) && hf_write_card(folder, c, table, r, t, err) &&
           (!t || (hf_write_text(folder, "tokenizer.json", t->json, err) &&
                   hf_write_text(folder, "tokenizer_config.json", t->config, err)));
}
