/*
The model that --model, --recipe, --init and --set describe. Called by configure.h, resume.h and shares.h.
*/
#pragma once

#include <glob.h>
#include "../checkpoint/out.h"
#include "../config/config_check.h"
#include "../config/config_file.h"
#include "../tokens/mixture.h"
#include "../tokens/shard.h"
#include "command/options.h"

// Is there what a model is read from?
static inline bool init_has_model(const char* folder) {
    static const char* const names[] = {"config.json", "model.safetensors", "model.safetensors.index.json"};
    bool has[3];
    for (int i = 0; i < 3; i++) {
        char path[PATH_LENGTH];
        path_join(path, folder, names[i]);
        has[i] = access(path, F_OK) == 0;
    }
    return has[0] && (has[1] || has[2]);
}

// --init may name the folder of a run: where it has no config.json but checkpoints, the newest of them takes
// its place in the options, as a text in `path`. One without a model is passed over with a warning, on the
// rank that `tells`, as --resume does.
static inline void init_find(Options* o, char path[PATH_LENGTH], bool tells) {
    Error ignored; // config_read reports a folder that cannot be read
    int64_t* steps;
    if (!o->init) return;
    path_join(path, o->init, "config.json");
    if (access(path, F_OK) == 0) return;
    if (errno == ENOTDIR) die("--init %s: is a file; give the folder that it is in", o->init);
    const int count = checkpoint_list(o->init, &steps, &ignored);
    path_join(path, o->init, "log.jsonl");
    if (count == 0 && access(path, F_OK) == 0) die("--init %s: this run has no checkpoint yet", o->init);
    for (int i = 0; i < count; i++) {
        checkpoint_path(path, o->init, steps[i]);
        if (init_has_model(path)) break;
        if (i + 1 == count)
            die("--init %s: none of its checkpoints has config.json and model.safetensors", o->init);
        if (tells)
            warn("%s: has no config.json and model.safetensors; going back to the checkpoint before it",
                 path);
    }
    if (count > 0) o->init = path;
    free(steps);
}

// Dies where there is no config.json in the folder of --init, or no such folder.
static inline void init_check(const char* folder) {
    char path[PATH_LENGTH];
    struct stat st;
    path_join(path, folder, "config.json");
    if (access(path, F_OK) == 0 || errno != ENOENT) return; // config_read reports one that cannot be read
    die("--init %s: %s: give the folder of a checkpoint or of a Hugging Face model, with config.json and "
        "model.safetensors",
        folder, stat(folder, &st) == 0 ? "has no config.json" : "there is no such folder");
}

// Is `started`, the checkpoint that a run started from, the folder `init` or one of its checkpoints?
static inline bool init_is(const char* init, const char* started) {
    size_t n = strlen(init);
    while (n > 1 && init[n - 1] == '/') n--;
    if (!started || strncmp(started, init, n) != 0) return false;
    const char* rest = started + n + strspn(started + n, "/");
    return *rest == '\0' || (started[n] == '/' && checkpoint_step(rest) >= 0);
}

// Does a key's text turn it off?
static inline bool model_turns_off(const char* value) {
    static const char* const off[] = {"null", "false", "none", "ours"};
    bool found = false;
    for (size_t i = 0; i < sizeof off / sizeof off[0]; i++) found |= strcmp(value, off[i]) == 0;
    return found;
}

// Dies where --set gives a key that changes nothing: of forget gates to a model without them, unless its
// value turns the key off; of initial weights where --init has weights. A `resumed` run may repeat keys of
// initial weights.
static inline void model_check_keys(const Options* o, const Config* c, bool resumed) {
    enum { GATE_KEYS = 5, FIRST_INITIAL = 2, KEYS = 10 }; // both kinds have 2, 3 and 4
    static const char* const keys[KEYS] = {
        "log_pruning_tolerance=", "pruning_rule=",      "fgate_bias_init=",          "decay_time_min=",
        "decay_time_max=",        "initializer_range=", "rescale_prenorm_residual=", "time_step_min=",
        "time_step_max=",         "time_step_floor="};
    for (int i = 0; i < o->set.count; i++)
        for (int k = 0; k < KEYS; k++) {
            const char *item = o->set.items[i], *value = item + strlen(keys[k]);
            if (strncmp(item, keys[k], strlen(keys[k])) != 0) continue;
            if (k < GATE_KEYS && !config_has_gate(c) && !model_turns_off(value))
                die("--set %s: this model has no forget gate (fgate_type is none)", item);
            if (k >= FIRST_INITIAL && o->init && !resumed)
                die("--set %s: of initial weights, and --init has weights: leave it out", item);
        }
}

// Does --set give the key?
static inline bool model_sets(const Options* o, const char* key) {
    const size_t n = strlen(key);
    for (int i = 0; i < o->set.count; i++)
        if (strncmp(o->set.items[i], key, n) == 0 && o->set.items[i][n] == '=') return true;
    return false;
}

// Dies where --set gives a key of attention to a stack that has none, unless its value turns the key off.
// num_heads counts as one, but not beside --set hidden_size: it has to divide the width of any model.
static inline void model_check_attention_keys(const Options* o, const Config* c) {
    for (int i = 0; i < o->set.count && !config_has_attention(c); i++)
        for (int k = 0; k < NUM_CONFIG_KEYS; k++) {
            const char *item = o->set.items[i], *value = strchr(item, '=') + 1;
            const size_t n = strlen(config_keys[k].name);
            const bool heads = config_keys[k].offset == offsetof(Config, num_heads);
            if (config_has_key(c, &config_keys[k]) &&
                (config_key_of_attention(&config_keys[k]) || (heads && !model_sets(o, "hidden_size"))) &&
                (size_t)(value - item) == n + 1 && strncmp(item, config_keys[k].name, n) == 0 &&
                !model_turns_off(value) && strcmp(value, "0") != 0) // window_size=0: none
                die("--set %s: a key of attention, and no layer is attention", item);
        }
}

// Changes the config by --set.
static inline void model_set(Config* c, const Options* o) {
    Error err;
    for (int i = 0; i < o->set.count; i++) {
        const char *item = o->set.items[i], *equals = strchr(item, '=');
        char key[64];
        if (!equals || equals == item || equals - item >= (ptrdiff_t)sizeof key)
            die("--set %s: not of the form KEY=VALUE", item);
        snprintf(key, sizeof key, "%.*s", (int)(equals - item), item);
        if (!config_set(c, "--set", key, equals + 1, &err)) die("%s", err.msg);
    }
}

// Dies where --set gives a stack the window or the RoPE of its attention, and each layer has one of its own.
static inline void model_check_layer_keys(const Options* o, const Config* c) {
    bool window = false, rope = false; // does a layer have the config's?
    for (int i = 0; i < c->layer_types.num_runs; i++) {
        const LayerRun* run = &c->layer_types.runs[i];
        window |= run->mixer == MIXER_ATTENTION && run->window < 0;
        rope |= run->mixer == MIXER_ATTENTION && run->rope < 0;
    }
    if (!config_has_attention(c)) return;
    if (!window && model_sets(o, "window_size"))
        die("--set window_size: each layer of attention has a window of its own: change layer_types");
    if (!rope && model_sets(o, "use_rope"))
        die("--set use_rope: each layer of attention says rope or norope itself: change layer_types");
}

// The vocabulary of the first shard of a list of patterns; 0: unknown. Errors are reported where the data is
// opened.
static inline int64_t model_data_vocabulary(const char* patterns) {
    Error ignored;
    char pattern[PATH_LENGTH], *colon;
    glob_t files;
    ShardHeader h;
    h.vocab_size = 0;
    if (!patterns) return 0;
    memset(&files, 0, sizeof files);
    snprintf(pattern, sizeof pattern, "%.*s", (int)strcspn(patterns, ","), patterns);
    mixture_weight(pattern, &colon);
    if (colon) *colon = '\0';
    if (mixture_glob(pattern, &files) == 0 && !shard_read_header(files.gl_pathv[0], &h, &ignored))
        h.vocab_size = 0;
    globfree(&files);
    return h.vocab_size;
}

// Completes a preset's model: the token that begins and ends texts is the last one of the data, for which the
// model may have more rows than needed (50,304 for GPT-2's 50,257), or of the model where the data does not
// tell; in a run that is `resumed` (else NULL) that of its checkpoint.
static inline void model_complete(Config* c, const Options* o, const Config* resumed) {
    const int64_t V = resumed ? 0 : model_data_vocabulary(o->data);
    const int64_t end = (V > 0 && V < c->vocab_size ? V : c->vocab_size) - 1;
    if (c->bos_token_id < 0) c->bos_token_id = resumed ? resumed->bos_token_id : end;
    if (c->eos_token_id < 0) c->eos_token_id = resumed ? resumed->eos_token_id : end;
}

// The length of sequences that the model in a folder was trained on: trainer.json's, or
// max_position_embeddings of a folder of another origin; 0: unknown.
static inline int64_t model_trained_length(const char* folder) {
    static const char* const files[] = {"trainer.json", "config.json"};
    int64_t length = 0;
    for (int i = 0; i < 2 && length == 0; i++) {
        Json j;
        Error ignored;
        char path[PATH_LENGTH];
        path_join(path, folder, files[i]);
        if (access(path, F_OK) != 0 || !json_parse_file(&j, path, &ignored)) continue;
        const int node = i ? json_get(&j, 0, "max_position_embeddings")
                           : json_get(&j, json_get(&j, 0, "options"), "seq-len");
        if (!json_int64(&j, node, &length) || length < 1 || length > 1 << 24) length = 0;
        json_free(&j);
    }
    return length;
}

// Completes --set rope_scaling. known: as model_choose's; it has ntk's rope_base already, unless --set gives
// the plain one.
static inline void model_complete_rope(Config* c, const Options* o, const Config* known,
                                       const Recipe* recipe) {
    RopeScaling* r = &c->rope_scaling;
    if (r->type == ROPE_YARN && r->length == 0)
        r->length = o->init                      ? model_trained_length(o->init)
                    : o->seq_len != OPTION_UNSET ? o->seq_len
                                                 : recipe->seq_len;
    if (r->type == ROPE_NTK && o->init && known && !model_sets(o, "rope_base")) r->type = ROPE_PLAIN;
}

// The model that the options describe, and the recipe that it trains with. known: the config of --init, or of
// the checkpoint from which a run resumes; NULL: that of --init is read.
static inline Config model_choose(const Options* o, const Config* known, Recipe* recipe) {
    Error err;
    Config c;
    if (o->model && o->init) die("--model and --init both name a model: give one of them");
    if (o->init && o->recipe != OPTION_UNSET)
        die("--recipe %s: trains a preset: give it with --model, without --init",
            recipe_name((RecipeName)o->recipe));
    if (o->init) {
        if (known) {
            c = *known;
        } else {
            init_check(o->init);
            if (!config_read(&c, o->init, &err)) die("%s", err.msg);
        }
        *recipe = config_nearest_recipe(&c);
    } else {
        if (!o->model && o->resume && o->out)
            die("--out %s has no checkpoint to resume from: give --model NAME or --init DIR to begin a run",
                o->out);
        if (!o->model) die("which model? give --model NAME or --init DIR; --help lists the options");
        if (!config_preset_recipe(&c, recipe, o->model, (RecipeName)o->recipe, &err)) die("%s", err.msg);
        c.bos_token_id = c.eos_token_id = -1; // unless set
    }
    model_set(&c, o);
    if (!o->init) model_complete(&c, o, known);
    model_complete_rope(&c, o, known, recipe);
    model_check_keys(o, &c, known != NULL);
    if (config_is_stack(&c)) model_check_attention_keys(o, &c);
    if (model_sets(o, "rope_base") && !config_uses_rope(&c))
        die("--set rope_base: no layer has RoPE: set use_rope=true, or attention:rope in layer_types, or "
            "leave it out");
    if (config_is_stack(&c)) model_check_layer_keys(o, &c);
    if (!config_check(&c, o->init ? o->init : o->model, &err)) die("%s", err.msg);
    return c;
}
