/*
config.json: reads and writes a Config. The keys are those of the table in config.h, in the names of the
paper's released checkpoints. Called by llmc/checkpoint and llmc/run.
*/
#pragma once

#include "config.h"
#include "config_check.h"
#include "../formats/json_writer.h"

// The value of a KEY_INT; head_dim is the derived one unless it waits for config_check.
static inline int64_t config_int(const Config* c, const ConfigKey* key) {
    bool derived = key->offset == offsetof(Config, head_dim) && c->head_dim == 0;
    return derived ? config_head_size(c) : *(const int64_t*)((const char*)c + key->offset);
}

// Writes rope_scaling in the form of transformers, which before version 5 called the object rope_scaling.
static inline void config_put_rope(const Config* c, JsonWriter* w) {
    const RopeScaling* r = &c->rope_scaling;
    if (r->type == ROPE_PLAIN) return;
    json_begin_object(w, "rope_parameters");
    json_put_string(w, "rope_type", rope_types[r->type]);
    json_put_double(w, "rope_theta", c->rope_base);
    json_put_double(w, "factor", r->factor);
    if (r->type == ROPE_YARN) json_put_int(w, "original_max_position_embeddings", r->length);
    json_end(w);
}

// Writes layer_types, a name a layer, or as a pattern.
static inline void config_put_layers(const Config* c, const char* key, bool pattern, JsonWriter* w) {
    char text[512];
    if (pattern) {
        layer_types_text(text, sizeof text, &c->layer_types);
        if (config_is_stack(c))
            json_put_string(w, key, text);
        else
            json_put_null(w, key);
        return;
    }
    json_begin_array(w, key);
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        layer_type_text(text, sizeof text, layer_type(&c->layer_types, l));
        json_put_string(w, NULL, text);
    }
    json_end(w);
}

// Writes key i and its value, if the model has it.
static inline void config_put_always(const Config* c, int i, JsonWriter* w) {
    const ConfigKey* key = &config_keys[i];
    const void* field = (const char*)c + key->offset;
    int choice = 0;
    if (!config_has_key(c, key)) return;
    bool decay_time = key->offset == offsetof(Config, decay_time_min) ||
                      key->offset == offsetof(Config, decay_time_max); // null unless the gate is long
    switch (key->type) {
    case KEY_INT:
        if (key->nullable && *(const int64_t*)field == (int64_t)key->null_value)
            json_put_null(w, key->name);
        else
            json_put_int(w, key->name, config_int(c, key));
        break;
    case KEY_REAL: // NAN becomes null
        json_put_double(w, key->name, decay_time && !config_long_gate(c) ? NAN : *(const double*)field);
        break;
    case KEY_WORD:
    case KEY_TEXT:
        memcpy(&choice, field, key->bytes);
        (key->type == KEY_TEXT ? json_put_string : json_put_word)(w, key->name, key->choices[choice]);
        break;
    case KEY_ROPE: config_put_rope(c, w); break;
    case KEY_LAYERS: config_put_layers(c, key->name, true, w); break;
    }
}

// The same; pruning_rule, document_reset and what stacks of layers have only where they are not the default.
static inline void config_put(const Config* c, int i, JsonWriter* w) {
    const size_t offset = config_keys[i].offset;
    int64_t value = 0;
    if (config_key_of_kind(&config_keys[i])) {
        memcpy(&value, (const char*)c + offset, config_keys[i].bytes);
        if (value == 0) return;
    }
    if (offset == offsetof(Config, layer_types)) {
        if (config_is_stack(c)) config_put_layers(c, config_keys[i].name, false, w);
        return;
    }
    if (offset == offsetof(Config, pruning_rule) && c->pruning_rule == PRUNING_OURS) return;
    if (offset == offsetof(Config, document_reset) && !c->document_reset) return;
    config_put_always(c, i, w);
}

// auto_map names the classes of a Python file beside config.json, for Hugging Face transformers. It names the
// model's file for the configuration, too: transformers 5 keeps one model class for each configuration class, and
// configuration_fox.py would give the same one to two folders of one name whose modeling_fox.py differ.
static inline void config_put_auto_map(const ModelClass* model_class, JsonWriter* w) {
    static const char* const classes[][2] = {{"AutoConfig", "Config"},
                                             {"AutoModel", "Model"}, // without lm_head
                                             {"AutoModelForCausalLM", "ForCausalLM"}};
    const char* file = model_class->stack                      ? "modeling_stack"
                       : model_class->mixer == MIXER_ATTENTION ? "modeling_fox"
                                                               : "modeling_recurrent";
    const int family = (int)(strlen(model_class->architecture) - strlen("ForCausalLM"));
    char name[64];
    json_begin_object(w, "auto_map");
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s.%.*s%s", file, family, model_class->architecture, classes[i][1]);
        json_put_string(w, classes[i][0], name);
    }
    json_end(w);
}

// Writes c as the object config.json holds, all keys, in the names of the paper's released checkpoints.
static inline void config_put_all(const Config* c, JsonWriter* w) {
    const ModelClass* model_class = config_class(c);
    json_begin_object(w, NULL);
    json_begin_array(w, "architectures");
    json_put_string(w, NULL, model_class->architecture);
    json_end(w);
    config_put_auto_map(model_class, w);
    json_put_string(w, "model_type", model_class->model_type);
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) config_put(c, i, w);
    json_end(w);
}

// The keys of the object "initialization" in trainer.json: how a full gate's bias was initialized. The
// paper's code opens a full gate only where config.json has none of them.
static const char* const config_initialization[] = {"fgate_bias_init", "decay_time_min", "decay_time_max"};

static inline bool config_is_initialization(const char* key) {
    for (int i = 0; i < 3; i++)
        if (strcmp(config_initialization[i], key) == 0) return true;
    return false;
}

// The config that config.json holds: a full gate without its initialization.
static inline Config config_without_initialization(const Config* c) {
    Config file = *c;
    if (c->mixer != MIXER_ATTENTION || c->fgate_type != GATE_FULL) return file;
    file.fgate_bias_init = false;
    file.decay_time_min = CONFIG_DECAY_TIME_MIN;
    file.decay_time_max = CONFIG_DECAY_TIME_MAX;
    return file;
}

// Writes the initialization as an object under `key`.
static inline void config_put_initialization(const Config* c, JsonWriter* w, const char* key) {
    json_begin_object(w, key);
    for (int i = 0; i < NUM_CONFIG_KEYS; i++)
        if (config_is_initialization(config_keys[i].name)) config_put(c, i, w);
    json_end(w);
}

// Writes config.json at `path`. The initialization of a full gate is not in it.
static inline bool config_write(const Config* c, const char* path, Error* err) {
    JsonWriter w = json_writer(2);
    const Config file = config_without_initialization(c);
    config_put_all(&file, &w);
    bool ok = json_writer_save(&w, path, err);
    json_writer_free(&w);
    return ok;
}

// Sets rope_scaling from transformers' object, if config.json has one; what changes its tables and is not
// written here is refused.
static inline bool config_set_rope(Config* c, const char* path, const Json* j, Error* err) {
    static const struct {
        const char* key;
        double only;
    } fixed[] = {{"beta_fast", 32}, {"beta_slow", 1}, {"mscale", NAN}, {"mscale_all_dim", NAN}};
    int node = json_get(j, 0, "rope_scaling"); // wins, as in transformers, unless null or {}
    if (node < 0 || json_is_null(j, node) || (json_is(j, node, JSON_OBJECT) && json_count(j, node) == 0))
        node = json_get(j, 0, "rope_parameters");
    if (node < 0 || json_is_null(j, node)) return true;
    const char* type = json_string(j, json_get(j, node, "rope_type"));
    char text[96], digits[32];
    double factor = 1, number = 0;
    int64_t length = 0;
    bool truncate = true;
    if (!type) type = json_string(j, json_get(j, node, "type"));
    if (!type && json_is(j, node, JSON_OBJECT) && json_get(j, node, "factor") < 0) type = "default";
    if (!type) return fail(err, "%s: rope_scaling has no rope_type", path);
    if (json_double(j, json_get(j, node, "rope_theta"), &number) && number != c->rope_base) {
        if (json_get(j, 0, "rope_base") >= 0)
            return fail(err, "%s: rope_scaling: rope_theta is not rope_base", path);
        number_to_text(digits, 17, number);
        if (!config_set(c, path, "rope_base", digits, err)) return false;
    }
    if (strcmp(type, "default") == 0) return config_set(c, path, "rope_scaling", "null", err);
    if (strcmp(type, "ntk") == 0 || !json_double(j, json_get(j, node, "factor"), &factor))
        return fail(err, "%s: rope_scaling: type '%.32s' is neither linear nor yarn with a factor", path,
                    type);
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++)
        if (json_double(j, json_get(j, node, fixed[i].key), &number) && number != fixed[i].only)
            return fail(err, "%s: rope_scaling: %s is not supported", path, fixed[i].key);
    if (json_double(j, json_get(j, node, "attention_factor"), &number) &&
        fabs(number - (0.1 * log(factor) + 1)) > 1e-6)
        return fail(err, "%s: rope_scaling: attention_factor is not 0.1 ln factor + 1", path);
    if (json_bool(j, json_get(j, node, "truncate"), &truncate) && !truncate)
        return fail(err, "%s: rope_scaling: truncate is not supported", path);
    number_to_text(digits, 17, factor);
    snprintf(text, sizeof text, "%.32s:%s", type, digits);
    if (strcmp(type, "yarn") == 0 && // without a length that of a Llama's sequences, as in transformers
        (json_int64(j, json_get(j, node, "original_max_position_embeddings"), &length) ||
         json_int64(j, json_get(j, 0, "max_position_embeddings"), &length)))
        snprintf(text, sizeof text, "yarn:%s:%lld", digits, (long long)length);
    return config_set(c, path, "rope_scaling", text, err);
}

// A LlamaForCausalLM's config.json is read as transformer-llama's: names that differ, and what it may not
// have.
static inline const char* config_llama_key(const char* name) {
    static const char* const names[][2] = {{"num_heads", "num_attention_heads"},
                                           {"num_kv_heads", "num_key_value_heads"},
                                           {"norm_eps", "rms_norm_eps"},
                                           {"rope_base", "rope_theta"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i][0]) == 0) return names[i][1];
    return name;
}

// Keys of another meaning there.
static inline bool config_differs_in_llama(const char* name) {
    return strcmp(name, "hidden_act") == 0 || strcmp(name, "max_position_embeddings") == 0;
}

static inline bool config_check_llama(Config* c, const char* path, const Json* j, Error* err) {
    static const char* const biases[] = {"attention_bias", "mlp_bias"};
    const char* act = json_string(j, json_get(j, 0, "hidden_act"));
    bool bias = false;
    if (act && strcmp(act, "silu") != 0)
        return fail(err, "%s: hidden_act '%.32s' is not supported, only silu", path, act);
    for (int i = 0; i < 2; i++)
        if (json_bool(j, json_get(j, 0, biases[i]), &bias) && bias)
            return fail(err, "%s: %s is not supported", path, biases[i]);
    json_int64(j, json_get(j, 0, "head_dim"), &c->head_dim); // config_check compares it
    return true;
}

// Sets layer_types from the list in config.json.
static inline bool config_set_layers(Config* c, const char* path, const char* name, const Json* j,
                                     Error* err) {
    const int list = json_get(j, 0, name);
    LayerTypes types;
    LayerRun layers[LAYERS_MOST];
    int64_t count = 0;
    if (!json_is(j, list, JSON_ARRAY)) return fail(err, "%s: %s is missing, or is no list", path, name);
    for (int node = json_first(j, list); node >= 0; node = json_next(j, node)) {
        LayerRun run;
        char written[64];
        const char* text = json_string(j, node);
        if (!text) return fail(err, "%s: %s is not a list of texts", path, name);
        if (!layer_run_parse(&run, path, text, strlen(text), err)) return false;
        layer_type_text(written, sizeof written, &run);
        if (strcmp(written, text) != 0) // other programs read the list too
            return fail(err, "%s: %s: a name a layer, '%s', not '%s'", path, name, written, text);
        if (count == LAYERS_MOST) return fail(err, "%s: %s has more than %d layers", path, name, LAYERS_MOST);
        layers[count++] = run;
    }
    if (count == 0) return fail(err, "%s: %s is empty", path, name);
    if (!layer_types_of(&types, path, layers, count, err)) return false;
    types.listed = count;
    c->layer_types = types;
    return true;
}

// Sets one key, called `name` in a JSON text, from its value there, if the object has it.
static inline bool config_set_named(Config* c, const char* path, const ConfigKey* key, const char* name,
                                    const Json* j, int object, Error* err) {
    int node = json_get(j, object, name);
    char digits[32];
    double number = 0;
    bool boolean = false;
    // the first of several ends texts: Llama 3 Instruct's are <|end_of_text|>, then those of a turn
    if (key->offset == offsetof(Config, eos_token_id) && json_is(j, node, JSON_ARRAY) && json_count(j, node))
        node = json_first(j, node);
    const char* value = key->type == KEY_TEXT ? json_string(j, node) : NULL;
    if (key->type == KEY_ROPE) return config_set_rope(c, path, j, err);
    if (key->type == KEY_LAYERS) return config_set_layers(c, path, name, j, err);
    if (node < 0) return true;
    if (json_double(j, node, &number))
        number_to_text(digits, 17, number), value = digits;
    else if (json_bool(j, node, &boolean))
        value = boolean ? "true" : "false";
    else if (json_is_null(j, node))
        value = "null";
    if (value) return config_set_key(c, path, key, name, value, err);
    const bool fixed = key->bytes == 0; // one value alone, as null of Gated DeltaNet's attn
    return fail(err, "%s: %s is %s%s%s", path, name,
                json_string(j, node) ? "a text" : "an array or an object",
                fixed ? ", not supported, only " : "", fixed ? key->choices[0] : "");
}

// Restores what config_put_initialization wrote, from object `node` of j; -1 changes nothing. `path` names
// the file.
static inline bool config_restore_initialization(Config* c, const char* path, const Json* j, int node,
                                                 Error* err) {
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) {
        const ConfigKey* key = &config_keys[i];
        if (config_is_initialization(key->name) && !config_set_named(c, path, key, key->name, j, node, err))
            return false;
    }
    return config_check(c, path, err);
}

// Parses the text of a config.json, whose path messages name; a LlamaForCausalLM's is transformer-llama's.
// Keys that are absent keep the default of the paper's code; keys that are not ours, of which tools add many,
// are passed over. On error *c is undefined.
static inline bool config_parse(Config* c, const char* path, const char* text, size_t bytes, Error* err) {
    Json j;
    if (!json_parse(&j, path, text, bytes, err)) return false;
    *c = config_defaults();
    bool ok = true;
    const char* model_type = json_string(&j, json_get(&j, 0, "model_type"));
    const bool llama = model_type && strcmp(model_type, "llama") == 0;
    if (llama) model_type = "transformer-project_fox", c->rope_base = 10000; // its default
    int known = 0; // without a model_type, the first
    while (model_type && known < NUM_CLASSES && strcmp(model_type, config_classes[known].model_type) != 0)
        known++;
    if (known == NUM_CLASSES) {
        ok = fail(err, "%s: model_type '%s' is not a Forgetting Transformer nor one of its baselines", path,
                  model_type);
    } else {
        config_set_mixer(c, config_classes[known].mixer);
        if (config_classes[known].plain) c->fgate_type = GATE_NONE, c->use_rope = true;
    }
    static const char* const required[] = {"vocab_size", "hidden_size", "num_hidden_layers", "num_heads"};
    for (int i = 0; ok && i < 4; i++) {
        const char* name = llama ? config_llama_key(required[i]) : required[i];
        if (json_get(&j, 0, name) < 0) ok = fail(err, "%s: %s is missing", path, name);
    }
    ok = ok && (!llama || config_check_llama(c, path, &j, err));
    for (int i = 0; ok && i < NUM_CONFIG_KEYS; i++) {
        const ConfigKey* key = &config_keys[i];
        if (!config_has_key(c, key) || (llama && config_differs_in_llama(key->name))) continue;
        if (key->type == KEY_LAYERS && !config_classes[known].stack) continue;
        int64_t heads; // flash-linear-attention's num_v_heads may say that values have the heads of keys
        if (strcmp(key->name, "num_v_heads") == 0 && json_int64(&j, json_get(&j, 0, key->name), &heads) &&
            heads == c->num_heads)
            continue;
        ok = config_set_named(c, path, key, llama ? config_llama_key(key->name) : key->name, &j, 0, err);
    }
    json_free(&j);
    const char *heads = config_llama_key("num_heads"), *key_heads = config_llama_key("num_kv_heads");
    ok = ok && (!llama || config_check_heads(c, path, heads, key_heads, err)); // messages with its keys
    return ok && config_check(c, path, err);
}

// Reads FOLDER/config.json, as config_parse.
static inline bool config_read(Config* c, const char* folder, Error* err) {
    char path[PATH_LENGTH];
    size_t bytes;
    path_join(path, folder, "config.json");
    char* text = read_file(path, &bytes, err);
    bool ok = text && config_parse(c, path, text, bytes, err);
    free(text);
    return ok;
}
