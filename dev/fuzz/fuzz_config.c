/*
llmc/config/config.h and llmc/model/params.h: config.json and, in an input that does not begin with a brace,
the KEY=VALUE lines of --set. A config that is accepted makes a parameter table without overflow, and survives
writing and reading.
*/
#include "fuzz.h"
#include "../../llmc/baselines/mixers.h"
#include "../../llmc/config/config_file.h"
#include "../../llmc/config/presets.h"

static Error err;

// Requires that key `name`, whose value was accepted as this text, is the number of the text, all of it.
static void require_value(const Config* c, const char* name, const char* text) {
    char* end;
    double number = strtod(text, &end);
    if (strcmp(text, "null") == 0) return;
    int power = *end == 'k' || *end == 'K' ? 1 : *end == 'M' ? 2 : *end == 'G' ? 3 : *end == 'T' ? 4 : 0;
    bool binary = power && end[1] == 'i', whole = end > text && !end[(power > 0) + binary];
    for (; power > 0; power--) number *= binary ? 1024 : 1000;
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) {
        const ConfigKey* key = &config_keys[i];
        const void* field = (const char*)c + key->offset;
        if (strcmp(key->name, name) != 0 || !config_has_key(c, key)) continue;
        if (key->type == KEY_INT) {
            int64_t value = config_int(c, key);
            // as many as heads of queries, which config_check writes as 0
            if (strcmp(name, "num_kv_heads") == 0 && !value) value = c->num_heads;
            REQUIRE(whole && (double)value == number, "%s=%s", name, text);
        }
        if (key->type == KEY_REAL) REQUIRE(whole && *(const double*)field == number, "%s=%s", name, text);
    }
}

// Sets the keys that the lines name, on a preset, as --set does.
static bool set_keys(Config* c, char* text) {
    Recipe recipe;
    if (!config_preset(c, &recipe, "fox-pro-nano", &err)) die("%s", err.msg);
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        char* value = strchr(line, '=');
        if (!value) continue;
        *value++ = '\0';
        if (!config_set(c, "input", line, value, &err)) return false;
        require_value(c, line, value);
    }
    return config_check(c, "input", &err);
}

// Parses a config.json.
static bool parse_text(Config* c, const char* text, size_t bytes) {
    Json j;
    double number;
    char digits[32];
    if (!config_parse(c, "input", text, bytes, &err)) return false;
    if (!json_parse(&j, "input", text, bytes, &err)) die("%s", err.msg);
    for (int node = json_first(&j, 0); node >= 0; node = json_next(&j, node)) {
        if (!json_double(&j, node, &number)) continue;
        snprintf(digits, sizeof digits, "%.17g", number);
        require_value(c, json_key(&j, node), digits);
    }
    json_free(&j);
    return true;
}

// Requires that the rows of the table are disjoint and in order, with sizes that no product overflowed.
static void require_table(const Config* c, int ranks) {
    ParamTable t = params_build_for(c, ranks);
    int64_t at = 0, parameters = 0;
    for (int r = 0; r < t.num_rows; r++) {
        const Param* p = &t.rows[r];
        __int128 count = 1;
        for (int k = 0; k < p->ndim; k++) count *= p->shape[k];
        REQUIRE(p->ndim >= 1 && count > 0 && count == (__int128)p->count, "%s has %lld elements", p->name,
                (long long)p->count);
        REQUIRE(p->offset >= at && p->offset - at < (int64_t)PARAM_ALIGN * ranks, "%s is at %lld, not %lld",
                p->name, (long long)p->offset, (long long)at);
        REQUIRE(strlen(p->name) + 1 < sizeof p->name, "the name %s was cut", p->name);
        at = p->offset + p->count;
        parameters += p->count;
    }
    REQUIRE(t.count >= at && t.parameters == parameters && t.count < INT64_MAX / 64, "%lld elements of %lld",
            (long long)t.count, (long long)parameters);
    REQUIRE(t.num_buckets == c->num_hidden_layers + 2 && t.buckets[t.num_buckets] == t.count, "%d buckets",
            t.num_buckets);
    params_free(&t);
}

// The text of config.json; free with json_writer_free.
static JsonWriter text_of(const Config* c) {
    JsonWriter w = json_writer(2);
    config_put_all(c, &w);
    return w;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    Config c, again;
    char* text = (char*)memcpy(xcalloc(bytes + 1, 1), data, bytes);
    bool ok = text[0] == '{' ? parse_text(&c, text, bytes) : set_keys(&c, text);
    free(text);
    if (!ok) {
        require_message(&err, "input");
        return 0;
    }
    REQUIRE(config_head_size(&c) >= 1 && config_head_size(&c) * c.num_heads == config_inner_size(&c),
            "heads");
    REQUIRE(config_key_heads(&c) >= 1 && c.num_heads % config_key_heads(&c) == 0, "heads of keys");
    REQUIRE((config_mlp_size(&c) >= 1) == (c.mixer != MIXER_MAMBA2) && config_end_of_text(&c) < c.vocab_size,
            "sizes");
    for (int64_t head = 0; head < c.num_heads; head++)
        REQUIRE(isfinite(config_long_gate_bias(&c, head)), "the gate's bias of head %lld is %g",
                (long long)head, config_long_gate_bias(&c, head));
    require_table(&c, 1);
    if (c.num_hidden_layers < 16) require_table(&c, 3);
    JsonWriter first = text_of(&c);
    REQUIRE(config_parse(&again, "output", first.text, first.length, &err), "%s", err.msg);
    JsonWriter second = text_of(&again);
    REQUIRE(strcmp(first.text, second.text) == 0, "%s became %s", first.text, second.text);
    json_writer_free(&first);
    json_writer_free(&second);
    return 0;
}
