/*
Activations: the tensors that a pass over B x T tokens writes, and the states of sequences that are being
extended.

Each part of a model (the mixer, the MLP, what is around them) lists its tensors in one macro table, a row
each:

    X(type, name, per_layer, elements of a layer)

From the table come a struct of pointers, `type* name`, which the part computes with, and the rows below,
which are summed for the memory plan, allocated, and turned into the struct for a layer. A tensor that is
per_layer holds [L, ...]; the others are scratch that all layers share. In the GPU trainer's tables this
column is called `kept`.

Called by the trainers and, for their own tables, by mixers.
*/
#pragma once

#include "../config/config.h"

enum { ACTIVATIONS_MAX = 32 };

typedef struct {
    int count;
    struct {
        int64_t bytes;  // of one layer
        bool per_layer; // false: shared by all layers
        bool of_slots;  // the states of a cache's slots, one behind the other
        void* data;     // NULL until allocated
    } rows[ACTIVATIONS_MAX];
} Activations;

// What the backward pass recomputes to save memory: from nothing to a whole block but its input. Names as
// --recompute has them.
#define RECOMPUTE_CHOICES(X)                                                                                 \
    X(RECOMPUTE_NONE, "none")                                                                                \
    X(RECOMPUTE_FUSED, "fused") X(RECOMPUTE_QKV, "qkv") X(RECOMPUTE_BLOCK, "block")
#define RECOMPUTE_VALUE(value, name) value,
typedef enum { RECOMPUTE_CHOICES(RECOMPUTE_VALUE) FORWARD_ONLY } Recompute; // FORWARD_ONLY: no backward pass
#undef RECOMPUTE_VALUE

// For a table X: typedef struct { X(ACTIVATION_FIELD) } Name; and X(ACTIVATION_ROW) where `Activations* rows`
// is in scope.
#define ACTIVATION_FIELD(type, name, per_layer, elements) type* name;
#define ACTIVATION_ROW(type, name, per_layer, elements)                                                      \
    activations_add(rows, (int64_t)sizeof(type) * (elements), per_layer);

// The column `kept` of the GPU trainer's tables: up to which level of --recompute every layer keeps a tensor
// for the backward pass; above it all layers share one buffer. What a backward kernel recomputes on the fly
// (norm outputs, act, y but for Mamba-2's) is UP_TO_NONE. What only the backward pass writes has `backward`
// times its elements.
typedef enum {
    SHARED = -1,
    UP_TO_NONE = RECOMPUTE_NONE,   // with --recompute none alone
    UP_TO_FUSED = RECOMPUTE_FUSED, // unless --recompute qkv or block
    UP_TO_QKV = RECOMPUTE_QKV,     // unless --recompute block
    UP_TO_BLOCK = RECOMPUTE_BLOCK, // unless no backward pass follows
    KEPT_ALWAYS = FORWARD_ONLY
} Kept;

// For a table X: X(KEPT_ROW) where `Activations* rows` and `Recompute recompute` are in scope.
#define KEPT_ROW(type, name, kept, elements)                                                                 \
    activations_add(rows, (int64_t)sizeof(type) * (elements), (int)recompute <= (int)(kept));

static inline void activations_add(Activations* a, int64_t bytes, bool per_layer) {
    if (a->count == ACTIVATIONS_MAX) die("more than %d tensors in a table of activations", ACTIVATIONS_MAX);
    a->rows[a->count].bytes = bytes;
    a->rows[a->count].per_layer = per_layer;
    a->rows[a->count].of_slots = false;
    a->rows[a->count++].data = NULL;
}

// Extends a table of states from those of one sequence to those of `slots`. A tensor per layer is a state.
static inline void activations_of_slots(Activations* a, int64_t slots) {
    for (int i = 0; i < a->count; i++)
        if (a->rows[i].per_layer) {
            a->rows[i].bytes *= slots;
            a->rows[i].of_slots = true;
        }
}

// Bytes of one tensor for L layers. L is 1 where no backward pass follows: all layers then share every
// tensor.
static inline int64_t activations_row_bytes(const Activations* a, int i, int64_t L) {
    return a->rows[i].bytes * (a->rows[i].per_layer ? L : 1);
}

// Bytes of a table's tensors for L layers.
static inline int64_t activations_bytes(const Activations* a, int64_t L) {
    int64_t bytes = 0;
    for (int i = 0; i < a->count; i++) bytes += activations_row_bytes(a, i, L);
    return bytes;
}

// Allocates every tensor but those of 0 bytes, which the model does not have. Where there is no memory
// `allocate` dies, or returns NULL for the tensor.
static inline void activations_allocate(Activations* a, int64_t L, void* (*allocate)(size_t bytes)) {
    for (int i = 0; i < a->count; i++) {
        if (L == 1) a->rows[i].per_layer = false;
        if (a->rows[i].bytes) a->rows[i].data = allocate((size_t)activations_row_bytes(a, i, L));
    }
}

// Fills a struct of pointers, `size` bytes at `pointers`, with the tensors of layer l that are row `first` of
// the table and those behind it; NULL for those that the model does not have.
static inline void activations_rows(const Activations* a, int first, int64_t l, void* pointers, size_t size) {
    assert(first >= 0 && first + (int)(size / sizeof(void*)) <= a->count);
    for (size_t i = 0; i < size / sizeof(void*); i++) {
        char* data = (char*)a->rows[first + (int)i].data;
        if (data && a->rows[first + (int)i].per_layer) data += l * a->rows[first + (int)i].bytes;
        memcpy((char*)pointers + i * sizeof data, &data, sizeof data);
    }
}

// The same of a whole table.
static inline void activations_layer(const Activations* a, int64_t l, void* pointers, size_t size) {
    assert(size == (size_t)a->count * sizeof(void*));
    activations_rows(a, 0, l, pointers, size);
}

// The same of the last rows of a table that begins with another part's.
static inline void activations_last(const Activations* a, int64_t l, void* pointers, size_t size) {
    activations_rows(a, a->count - (int)(size / sizeof(void*)), l, pointers, size);
}

// ----------------------------------------------------------------------------
// all tables of a pass over [B, T] tokens, or of an extension of B sequences by T tokens

// PASS_MIXER + a MixerKind: that of the layers with this mixer
enum { PASS_MODEL, PASS_MLP, PASS_MIXER, NUM_PASS_TABLES = PASS_MIXER + NUM_MIXERS };

typedef struct {
    int64_t B, T;
    Activations tables[NUM_PASS_TABLES];
    int64_t layers[NUM_PASS_TABLES]; // that a table is for
} Pass;

// The layers that table t has room for: L is that of the model, or 1 where all layers share every tensor.
static inline int64_t pass_layers(const Pass* pass, int t, int64_t L) {
    return L < pass->layers[t] ? L : pass->layers[t];
}

// Bytes for L layers. Allocates nothing, writes nothing.
static inline int64_t pass_bytes(const Pass* pass, int64_t L) {
    int64_t bytes = 0;
    for (int t = 0; t < NUM_PASS_TABLES; t++)
        bytes += activations_bytes(&pass->tables[t], pass_layers(pass, t, L));
    return bytes;
}

static inline void pass_allocate(Pass* pass, int64_t L, void* (*allocate)(size_t bytes)) {
    for (int t = 0; t < NUM_PASS_TABLES; t++)
        activations_allocate(&pass->tables[t], pass_layers(pass, t, L), allocate);
}

static inline void pass_free(Pass* pass, void (*release)(void*)) {
    for (int t = 0; t < NUM_PASS_TABLES; t++)
        for (int i = 0; i < pass->tables[t].count; i++) release(pass->tables[t].rows[i].data);
    memset(pass, 0, sizeof *pass);
}
