/*
Presets: the models that --model names, a family (the block: families.h) and a size, as in fox-pro-125m, each
with the recipe that it trains with (recipes.h). Called by llmc/run/.
*/
#pragma once

#include "families.h"
#include "recipes.h"

// What the presets of a size share, whatever their recipe. Counts are tokens.
typedef struct {
    const char* name;
    int64_t V, seq_len, batch_tokens, warmup_tokens;
} Size;

// nano trains on a laptop's CPU in minutes; both small ones read bytes.
static const Size config_sizes[NUM_SIZES] = {
    {"nano", 257, 512, 2048, 131072},          {"micro", 257, 1024, 32768, 4194304},
    {"125m", 50257, 16384, 524288, 268435456}, {"360m", 50257, 16384, 524288, 268435456},
    {"760m", 50257, 16384, 524288, 268435456},
};

// The whole recipe of a row for models of a size.
static inline Recipe config_recipe(const Size* size, const RecipeRow* row) {
    Recipe r = {.name = row->name,
                .seq_len = row->seq_len ? row->seq_len : size->seq_len,
                .batch_tokens = size->batch_tokens,
                .max_tokens = row->max_tokens,
                .warmup_tokens = row->warmup_tokens ? row->warmup_tokens : size->warmup_tokens,
                .lr = row->lr,
                .lr_end = row->lr_end};
    return r;
}

// Fills config and recipe from a preset's name, FAMILY-SIZE, and a recipe that it has.
static inline bool config_preset_recipe(Config* c, Recipe* recipe, const char* name, RecipeName wanted,
                                        Error* err) {
    char hint[2 * NEAREST_BYTES];
    Nearest near = nearest_to(name, strlen(name));
    for (int i = 0; i < NUM_FAMILIES * NUM_SIZES; i++) {
        const Family* family = &config_families[i / NUM_SIZES];
        const Size* size = &config_sizes[i % NUM_SIZES];
        const ModelShape* shape = &family->shapes[i % NUM_SIZES];
        char preset[64], rows[512];
        snprintf(preset, sizeof preset, "%s-%s", family->name, size->name);
        nearest_try(&near, preset);
        if (strcmp(name, preset) != 0) continue;
        const RecipeRow* row = recipe_find(wanted, family->name, size->name);
        if (!row) {
            recipe_list(rows, sizeof rows, wanted);
            return fail(err, "--recipe %s: has no row for %s; its rows are %s", recipe_name(wanted), name,
                        rows);
        }
        bool gated = family->gate != GATE_NONE;
        *c = config_defaults();
        config_set_mixer(c, family->mixer);
        c->vocab_size = size->V;
        c->hidden_size = shape->d;
        c->num_hidden_layers = shape->L;
        c->num_heads = shape->heads;
        if (family->mixer == MIXER_GATED_DELTANET) c->head_dim = 128;
        if (row->head_size) c->num_heads = shape->d / row->head_size;
        c->hidden_ratio = family->hidden_ratio;
        c->use_rope = family->rope;
        c->use_output_gate = c->use_output_norm = c->qk_norm = c->use_k_shift = c->use_v_shift = family->pro;
        c->fgate_type = family->gate;
        c->log_pruning_tolerance = gated ? -10 : NAN;
        c->bos_token_id = c->eos_token_id = size->V - 1;
        *recipe = config_recipe(size, row);
        if (wanted == RECIPE_OWN && recipe_lists(RECIPE_OWN_FAMILIES, family->name))
            recipe->name = RECIPE_OWN;
        c->window_size = family->windows ? recipe->seq_len / family->windows : 0;
        return !family->layers || layer_types_parse(&c->layer_types, name, family->layers, err);
    }
    return fail(err, "--model %s: no such preset%s; a preset is one of " PRESET_NAMES, name,
                nearest_hint(&near, hint, ""));
}

// The same with the preset's own recipe.
static inline bool config_preset(Config* c, Recipe* recipe, const char* name, Error* err) {
    return config_preset_recipe(c, recipe, name, RECIPE_OWN, err);
}

// The recipe that a model of unknown origin trains with: that of the largest preset that is neither wider nor
// deeper.
static inline Recipe config_nearest_recipe(const Config* c) {
    const ModelShape* shapes = config_families[0].shapes;
    int best = 0;
    for (int f = 0; f < NUM_FAMILIES; f++)
        if (config_families[f].mixer == c->mixer) shapes = config_families[f].shapes;
    for (int s = 0; s < NUM_SIZES; s++)
        if (shapes[s].d <= c->hidden_size && shapes[s].L <= c->num_hidden_layers) best = s;
    Recipe recipe = config_recipe(&config_sizes[best],
                                  recipe_find(RECIPE_OWN, config_families[0].name, config_sizes[best].name));
    recipe.name = RECIPE_OWN; // it is not that preset
    return recipe;
}

// Prints the table of recipes, for --help.
static inline void config_print_recipes(FILE* f) {
    fprintf(f,
            "\nRecipes of presets (--recipe; options beside it win; cosine with warm-up)\n"
            "  %-10s %-5s%12s %7s %3s %5s %6s %10s  %s\n",
            "recipe", "size", "tokens", "peak lr", "end", "T", "a step", "warm-up", "models");
    for (const RecipeRow* row = recipe_rows; row < recipe_rows + NUM_RECIPE_ROWS; row++) {
        const Size* size = config_sizes;
        char heads[40] = "";
        while (strcmp(size->name, row->size) != 0) size++;
        if (row->head_size) snprintf(heads, sizeof heads, "; heads of %lld", (long long)row->head_size);
        const Recipe r = config_recipe(size, row);
        fprintf(f, "  %-10s %-5s%12lld %7g %3g %5lld %6lld %10lld  %s%s\n", recipe_name(row->name), row->size,
                (long long)r.max_tokens, r.lr, r.lr_end, (long long)r.seq_len, (long long)r.batch_tokens,
                (long long)r.warmup_tokens,
                row->families             ? row->families
                : row->name == RECIPE_OWN ? "all"
                                          : "the paper's",
                heads);
    }
}
