/*
layer_types: layers of different kinds in one model.

    deltanet*3,attention            kinds in turn, which repeat to the last layer
    attention:window=2048*5,attention:window=0:rope

A kind is attention or a recurrent mixer. Attention has the window and the RoPE of the config, or its own:
window=0 is none, norope the opposite of rope. In config.json a list, a name a layer. Called by config.h and
config_file.h.
*/
#pragma once

#include "../base/common.h"
#include "../base/nearest.h"
#include "../base/numbers.h"

// What mixes the tokens of a sequence in a block, by the names of layer_types.
#define MIXER_CHOICES(X)                                                                                     \
    X(MIXER_ATTENTION, "attention")                                                                          \
    X(MIXER_DELTANET, "deltanet")                                                                            \
    X(MIXER_HGRN2, "hgrn2") X(MIXER_MAMBA2, "mamba2") X(MIXER_GATED_DELTANET, "gated_deltanet")
#define MIXER_VALUE(value, name) value,
#define MIXER_NAME(value, name)  name,
typedef enum { MIXER_CHOICES(MIXER_VALUE) NUM_MIXERS } MixerKind;
static const char* const mixer_names[NUM_MIXERS] = {MIXER_CHOICES(MIXER_NAME)};
#undef MIXER_VALUE
#undef MIXER_NAME
#undef MIXER_CHOICES

enum { LAYER_RUNS = 64, LAYERS_MOST = 1024 };

// Adjacent layers of one kind.
typedef struct {
    int64_t count;
    int64_t window; // of attention; -1: the config's
    int rope;       // the same
    int mixer;      // MixerKind
} LayerRun;

typedef struct {
    int64_t num_runs; // 0: all layers are of the config's mixer
    int64_t listed;   // layers that a list has; 0: a pattern that repeats
    LayerRun runs[LAYER_RUNS];
} LayerTypes;

static inline bool layer_run_equal(const LayerRun* a, const LayerRun* b) {
    return a->mixer == b->mixer && a->rope == b->rope && a->window == b->window;
}

// Layers of a pattern before it repeats.
static inline int64_t layer_types_period(const LayerTypes* t) {
    int64_t count = 0;
    for (int i = 0; i < t->num_runs; i++) count += t->runs[i].count;
    return count;
}

// The run that layer l is of.
static inline const LayerRun* layer_type(const LayerTypes* t, int64_t l) {
    const LayerRun* run = t->runs;
    for (l %= layer_types_period(t); l >= run->count; run++) l -= run->count;
    return run;
}

// The name of a kind, without its count.
static inline void layer_type_text(char* text, size_t size, const LayerRun* run) {
    int n = snprintf(text, size, "%s", mixer_names[run->mixer]);
    if (run->window >= 0) n += snprintf(text + n, size - (size_t)n, ":window=%lld", (long long)run->window);
    if (run->rope >= 0) snprintf(text + n, size - (size_t)n, run->rope ? ":rope" : ":norope");
}

// The whole pattern, cut off with dots where it is longer.
static inline void layer_types_text(char* text, size_t size, const LayerTypes* t) {
    size_t n = 0;
    text[0] = '\0';
    for (int i = 0; i < t->num_runs; i++) {
        char name[64], item[96];
        layer_type_text(name, sizeof name, &t->runs[i]);
        int length = snprintf(item, sizeof item, "%s%s", i ? "," : "", name);
        if (t->runs[i].count > 1)
            length +=
                snprintf(item + length, sizeof item - (size_t)length, "*%lld", (long long)t->runs[i].count);
        if (n + (size_t)length + 4 > size) {
            strcpy(text + n, "...");
            return;
        }
        memcpy(text + n, item, (size_t)length + 1);
        n += (size_t)length;
    }
}

// Adds a run, or prolongs the last one.
static inline bool layer_types_add(LayerTypes* t, const char* where, const LayerRun* run, Error* err) {
    LayerRun* last = t->num_runs ? &t->runs[t->num_runs - 1] : NULL;
    if (layer_types_period(t) + run->count > LAYERS_MOST)
        return fail(err, "%s: layer_types has more than %d layers", where, LAYERS_MOST);
    if (last && layer_run_equal(last, run)) {
        last->count += run->count;
        return true;
    }
    if (t->num_runs == LAYER_RUNS)
        return fail(err, "%s: layer_types changes more than %d times", where, LAYER_RUNS);
    t->runs[t->num_runs++] = *run;
    return true;
}

// Reads one item, KIND[:OPTION...][*COUNT], of `length` characters.
static inline bool layer_run_parse(LayerRun* run, const char* where, const char* item, size_t length,
                                   Error* err) {
    char text[96], hint[2 * NEAREST_BYTES];
    const LayerRun plain = {1, -1, -1, NUM_MIXERS};
    *run = plain;
    if (length >= sizeof text) return fail(err, "%s: layer_types: '%.40s...' is too long", where, item);
    memcpy(text, item, length);
    text[length] = '\0';
    char *times = strchr(text, '*'), *part = text, *next;
    if (times) *times++ = '\0';
    if (times && !parse_whole_within(times, 1, LAYERS_MOST, &run->count))
        return fail(err, "%s: layer_types: '%.*s': give a count from 1 to %d behind *", where, (int)length,
                    item, LAYERS_MOST);
    for (int i = 0; part; i++, part = next) {
        next = strchr(part, ':');
        if (next) *next++ = '\0';
        if (i == 0) {
            Nearest near = nearest_to(part, strlen(part));
            for (int m = NUM_MIXERS - 1; m >= 0; m--) {
                nearest_try(&near, mixer_names[m]);
                if (strcmp(part, mixer_names[m]) == 0) run->mixer = m;
            }
            if (run->mixer == NUM_MIXERS) {
                char names[256] = "";
                for (int m = 0; m < NUM_MIXERS; m++) strcat(strcat(names, m ? ", " : ""), mixer_names[m]);
                return fail(err, "%s: layer_types: no kind of layer is called '%s'%s: they are %s", where,
                            part, nearest_hint(&near, hint, ""), names);
            }
        } else if (run->mixer == MIXER_ATTENTION && run->rope < 0 && strcmp(part, "rope") == 0) {
            run->rope = 1;
        } else if (run->mixer == MIXER_ATTENTION && run->rope < 0 && strcmp(part, "norope") == 0) {
            run->rope = 0;
        } else if (run->mixer != MIXER_ATTENTION || run->window >= 0 || strncmp(part, "window=", 7) != 0 ||
                   !parse_whole_within(part + 7, 0, 1 << 24, &run->window)) {
            return fail(
                err,
                "%s: layer_types: '%s' of '%.*s' is none of attention's window=N, rope and norope, or "
                "the second of its kind",
                where, part, (int)length, item);
        }
    }
    return true;
}

// Reads a pattern; "null" is none.
static inline bool layer_types_parse(LayerTypes* t, const char* where, const char* text, Error* err) {
    LayerTypes types;
    memset(&types, 0, sizeof types);
    bool null = strcmp(text, "null") == 0;
    for (const char* item = text; !null; item++) {
        LayerRun run;
        const size_t length = strcspn(item, ",");
        if (!layer_run_parse(&run, where, item, length, err) || !layer_types_add(&types, where, &run, err))
            return false;
        item += length;
        if (*item == '\0') break;
    }
    *t = types;
    return true;
}

// Makes t the shortest pattern that the L layers repeat.
static inline bool layer_types_of(LayerTypes* t, const char* where, const LayerRun* layers, int64_t L,
                                  Error* err) {
    int64_t shortest = 0;
    memset(t, 0, sizeof *t);
    for (int64_t same = 0; same < L;) // of the layers, in which a pattern of `shortest` repeats
        for (shortest++, same = 0; same < L; same++)
            if (!layer_run_equal(&layers[same], &layers[same % shortest])) break;
    for (int64_t l = 0; l < shortest; l++)
        if (!layer_types_add(t, where, &layers[l], err)) return false;
    return true;
}

// Checks that the types are for L layers, and makes the pattern the shortest one; that of plain attention
// alone is none.
static inline bool layer_types_check(LayerTypes* t, const char* where, int64_t L, Error* err) {
    static const LayerRun plain = {1, -1, -1, MIXER_ATTENTION};
    const int64_t period = layer_types_period(t);
    LayerRun layers[LAYERS_MOST];
    LayerTypes types;
    if (t->num_runs == 0) return true;
    if (period > L || (t->listed && t->listed != L))
        return fail(err, "%s: layer_types has %s, but num_hidden_layers is %lld", where,
                    counted(t->listed ? t->listed : period, "layer").text, (long long)L);
    for (int64_t l = 0; l < L; l++) {
        layers[l] = *layer_type(t, l);
        layers[l].count = 1;
    }
    if (!layer_types_of(&types, where, layers, L, err)) return false;
    if (types.num_runs == 1 && layer_run_equal(&types.runs[0], &plain)) types.num_runs = 0;
    *t = types;
    return true;
}
