/*
Published training recipes, one table: what --recipe names. A preset without --recipe has its own row: for
125m and up the analysis runs of the paper's repository, for nano and micro one that nothing has published.

What the recipes of a size share (lengths, batch, warm-up) stands in presets.h; what all recipes share (AdamW,
weight decay, clipping, cosine) are the defaults of options.h. Called by presets.h.
*/
#pragma once

#include "../base/common.h"

#define RECIPE_CHOICES(X)                                                                                    \
    X(RECIPE_ICLR, "iclr")                                                                                   \
    X(RECIPE_ANALYSIS, "analysis") X(RECIPE_SUBMISSION, "submission") X(RECIPE_GDN, "gdn")
#define RECIPE_VALUE(value, name) value,
#define RECIPE_NAME(value, name)  name,
typedef enum { RECIPE_CHOICES(RECIPE_VALUE) RECIPE_OWN = -1 } RecipeName; // RECIPE_OWN: the preset's
#undef RECIPE_VALUE

// As --recipe has it; "" of RECIPE_OWN.
static inline const char* recipe_name(RecipeName name) {
    static const char* const names[] = {RECIPE_CHOICES(RECIPE_NAME)};
    return name == RECIPE_OWN ? "" : names[name];
}
#undef RECIPE_NAME

// What a preset trains with unless options say otherwise. Counts are tokens; lr_end is a share of the peak.
typedef struct {
    RecipeName name; // RECIPE_OWN: not a published one
    int64_t seq_len, batch_tokens, max_tokens, warmup_tokens;
    double lr, lr_end;
} Recipe;

// The part of a recipe that the recipes of a size differ in, and the models that it is for.
typedef struct {
    RecipeName name;
    const char *size, *families; // as in "fox-pro, mamba2"; NULL: all of the paper's
    int64_t max_tokens;
    int64_t head_size, seq_len, warmup_tokens; // 0: the preset's
    double lr, lr_end;
} RecipeRow;

#define ROW(recipe, preset_size, models, tokens, heads, peak, end)                                           \
    {                                                                                                        \
        .name = recipe, .size = preset_size, .families = models, .max_tokens = tokens, .head_size = heads,   \
        .lr = peak, .lr_end = end                                                                            \
    }
#define ICLR_TOKENS 48318382080 // 45 Gi

// ICLR: the main table of arXiv 2503.02130. Submission: its anonymous first version on OpenReview, before Pro
// blocks; its models of 760m also had QK norm in one variant (qk_norm=true). The rates of its recurrent
// models are not known. GDN: what arXiv 2412.06464 (section 4; the cosine's end: its repository's
// pretrain.py) trains models of 1.3 B parameters with, at the nearest size, where no rate was searched.
// clang-format off
static const RecipeRow recipe_rows[] = {
    //  recipe            size     families                                tokens       head  peak lr  end
    ROW(RECIPE_ICLR,       "760m",  "fox-pro, hgrn2, mamba2",               ICLR_TOKENS, 0,    2e-3,    0),
    ROW(RECIPE_ICLR,       "760m",  "transformer-pro, fox-llama, deltanet", ICLR_TOKENS, 0,    1e-3,    0),
    ROW(RECIPE_ICLR,       "760m",  "transformer-llama",                    ICLR_TOKENS, 0,    5e-4,    0),
    ROW(RECIPE_ANALYSIS,   "125m",  NULL,                                   2684354560,  0,    2e-3,    0),
    ROW(RECIPE_ANALYSIS,   "360m",  NULL,                                   7516192768,  0,    2e-3,    0),
    ROW(RECIPE_ANALYSIS,   "760m",  NULL,                                   16106127360, 0,    1e-3,    0),
    ROW(RECIPE_SUBMISSION, "125m",  "fox-llama, transformer-llama",         2600000000,  0,    3e-3,    0.1),
    ROW(RECIPE_SUBMISSION, "760m",  "fox-llama, transformer-llama",         16106127360, 128,  1.25e-3, 0.1),
    {.name = RECIPE_GDN, .size = "760m", .families = "gated-deltanet", .max_tokens = 100000000000,
     .seq_len = 4096, .warmup_tokens = 1000000000, .lr = 4e-4, .lr_end = 0.1},
    ROW(RECIPE_OWN,        "nano",  NULL,                                   2097152,     0,    2e-3,    0),
    ROW(RECIPE_OWN,        "micro", NULL,                                   209715200,   0,    2e-3,    0),
};
// clang-format on
enum { NUM_RECIPE_ROWS = sizeof recipe_rows / sizeof recipe_rows[0] };
#undef ROW
#undef ICLR_TOKENS

// Families that the paper does not have: nothing is published of them at these sizes, and no rate was
// searched. Their presets train as the analysis runs, under no recipe's name.
#define RECIPE_OWN_FAMILIES "gated-deltanet, fox-gdn, samba2, fox-pro-local, transformer-pro-local"

// Is it the FoX paper's, which reads the first sequence of LongCrawl64's documents, in order?
static inline bool recipe_reads_longcrawl64(RecipeName name) {
    return name != RECIPE_OWN && name != RECIPE_GDN;
}

// Is the family in a list of them?
static inline bool recipe_lists(const char* families, const char* family) {
    const size_t n = strlen(family);
    for (const char* name = families; *name; name += strspn(name, ", ")) {
        const size_t length = strcspn(name, ",");
        if (length == n && strncmp(name, family, n) == 0) return true;
        name += length;
    }
    return false;
}

// The row of a recipe for a preset; NULL: it has none.
static inline const RecipeRow* recipe_find(RecipeName name, const char* family, const char* size) {
    for (const RecipeRow* row = recipe_rows; row < recipe_rows + NUM_RECIPE_ROWS; row++) {
        const bool own = name == RECIPE_OWN && (row->name == RECIPE_OWN || row->name == RECIPE_ANALYSIS);
        if (strcmp(row->size, size) != 0 || !(own || row->name == name)) continue;
        if (row->families ? recipe_lists(row->families, family)
                          : own || !recipe_lists(RECIPE_OWN_FAMILIES, family))
            return row;
    }
    return NULL;
}

// Lists the rows of a recipe, as in "760m (transformer-llama), 125m (the paper's families)".
static inline void recipe_list(char* text, size_t size, RecipeName name) {
    size_t n = 0;
    text[0] = '\0';
    for (const RecipeRow* row = recipe_rows; row < recipe_rows + NUM_RECIPE_ROWS; row++)
        if (row->name == name && n < size)
            n += (size_t)snprintf(text + n, size - n, "%s%s (%s)", n ? ", " : "", row->size,
                                  row->families ? row->families : "the paper's families");
}
