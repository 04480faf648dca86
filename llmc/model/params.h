/*
THE parameter table: one row a tensor, with its name in a checkpoint, its shape, and how it starts.

Everything else walks it: allocation, initialisation, checkpoints, the optimizer (its state and what decays),
gradient checks, dumps and the parameter counts. All tensors lie in one flat buffer, in the order of the rows,
each from a multiple of PARAM_ALIGN elements on.

In each layer the matrices that multiply the same input, the normed residual stream, are neighbours, so that
together, without gaps, they are one matrix [proj.rows, d] and one product computes q, k, v, the output gate,
the forget gate and the shift gates. ProjLayout says where each begins.
*/
#ifndef LLMC_PARAMS_H
#define LLMC_PARAMS_H

#include "config.h"
#include "../base/random.h"

typedef enum {
    P_EMBEDDINGS,  // [V, d]
    P_ATTN_NORM,   // [d]
    P_Q_PROJ,      // [d, d]     from here to P_V_SHIFT: the rows of the one fused projection
    P_K_PROJ,      // [d, d]
    P_V_PROJ,      // [d, d]
    P_OGATE_PROJ,  // [d, d]     with output gate
    P_FGATE_PROJ,  // [NH, d]    gate full
    P_K_SHIFT,     // [NH, d]    with key shift
    P_V_SHIFT,     // [NH, d]    with value shift
    P_FGATE_BIAS,  // [NH]       with any gate
    P_Q_NORM,      // [d], or [dh] when shared by all heads
    P_K_NORM,      // the same
    P_OUTPUT_NORM, // [d]       with output norm
    P_O_PROJ,      // [d, d]
    P_MLP_NORM,    // [d]
    P_GATE_PROJ,   // [2I, d]    rows 0..I-1 the SiLU gate, then up
    P_DOWN_PROJ,   // [d, I]
    P_NORM,        // [d]
    P_LM_HEAD,     // [V, d]
    NUM_PARAM_KINDS
} ParamKind;

#define PARAM_ALIGN 64 // elements: a cache line of bf16, and what vector loads ask for

typedef enum { INIT_NORMAL, INIT_ZERO, INIT_ONE, INIT_LONG_GATE } ParamInit;

typedef struct {
    char name[64]; // in a checkpoint
    ParamKind kind;
    int64_t rows, cols; // [rows, cols], or [rows] when cols is 0
    int64_t count;      // elements
    int64_t offset;     // of its first element in the flat buffer
    ParamInit init;
    bool trainable; // all but a fixed gate's bias
} Param;

// Weight decay is for matrices and the embedding, not for biases and norms.
static inline bool param_decays(const Param* p) { return p->cols > 0; }

// Row offsets in the fused projection [rows, d]; -1 for what the model does not have. As columns they index
// its output [B, T, rows].
typedef struct {
    int64_t q, k, v, ogate, fgate, k_shift, v_shift;
    int64_t rows;
} ProjLayout;

typedef struct {
    Param* rows;
    int num_rows;
    int64_t count;         // elements of the flat buffer, with padding
    int64_t parameters;    // without
    int64_t non_embedding; // all but the input embedding; the head counts
    int* index;            // [L * NUM_PARAM_KINDS]: row of a kind in a layer, -1 where the model has none
    ProjLayout proj;
} ParamTable;

// ----------------------------------------------------------------------------

// Adds a row; layer -1 is outside the layers. Rows of the fused projection follow each other without padding.
static inline void params_add(ParamTable* t, ParamKind kind, int64_t layer, const char* name, int64_t rows,
                              int64_t cols, ParamInit init) {
    Param* p = &t->rows[t->num_rows];
    memset(p, 0, sizeof *p);
    if (layer < 0)
        snprintf(p->name, sizeof p->name, "%s", name);
    else
        snprintf(p->name, sizeof p->name, "model.layers.%lld.%s", (long long)layer, name);
    p->kind = kind;
    p->rows = rows;
    p->cols = cols;
    p->count = cols ? rows * cols : rows;
    if (kind <= P_Q_PROJ || kind > P_V_SHIFT)
        t->count = (t->count + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
    p->offset = t->count;
    p->init = init;
    p->trainable = true;
    t->index[(layer < 0 ? 0 : layer) * NUM_PARAM_KINDS + kind] = t->num_rows++;
    t->count += p->count;
    t->parameters += p->count;
}

// Builds the table of a checked config; free with params_free.
static inline ParamTable params_build(const Config* c) {
    int64_t V = c->vocab_size, d = c->hidden_size, NH = c->num_heads, L = c->num_hidden_layers;
    int64_t I = config_mlp_size(c), dh = config_head_size(c);
    int64_t qk_norm = c->qk_norm_share ? dh : d;
    bool full = c->fgate_type == GATE_FULL;
    ParamInit gate_init = config_long_gate(c) ? INIT_LONG_GATE : INIT_ZERO;

    ParamTable t;
    memset(&t, 0, sizeof t);
    t.rows = (Param*)xcalloc((size_t)(L + 1) * NUM_PARAM_KINDS, sizeof(Param));
    t.index = (int*)xcalloc((size_t)L * NUM_PARAM_KINDS, sizeof(int));
    for (int64_t i = 0; i < L * NUM_PARAM_KINDS; i++) t.index[i] = -1;

    params_add(&t, P_EMBEDDINGS, -1, "model.embeddings.weight", V, d, INIT_NORMAL);
    for (int64_t l = 0; l < L; l++) {
        const char* k_name = c->use_k_shift ? "attn.k_proj.linear.weight" : "attn.k_proj.weight";
        const char* v_name = c->use_v_shift ? "attn.v_proj.linear.weight" : "attn.v_proj.weight";
        const char* bias_name = full ? "attn.fgate_proj.bias" : "attn.fgate_bias";
        params_add(&t, P_ATTN_NORM, l, "attn_norm.weight", d, 0, INIT_ONE);
        params_add(&t, P_Q_PROJ, l, "attn.q_proj.weight", d, d, INIT_NORMAL);
        params_add(&t, P_K_PROJ, l, k_name, d, d, INIT_NORMAL);
        params_add(&t, P_V_PROJ, l, v_name, d, d, INIT_NORMAL);
        if (c->use_output_gate) params_add(&t, P_OGATE_PROJ, l, "attn.ogate_proj.weight", d, d, INIT_NORMAL);
        if (full) params_add(&t, P_FGATE_PROJ, l, "attn.fgate_proj.weight", NH, d, INIT_NORMAL);
        if (c->use_k_shift) params_add(&t, P_K_SHIFT, l, "attn.k_proj.shift_proj.weight", NH, d, INIT_NORMAL);
        if (c->use_v_shift) params_add(&t, P_V_SHIFT, l, "attn.v_proj.shift_proj.weight", NH, d, INIT_NORMAL);
        if (config_has_gate(c)) {
            params_add(&t, P_FGATE_BIAS, l, bias_name, NH, 0, gate_init);
            t.rows[t.num_rows - 1].trainable = c->fgate_type != GATE_FIXED;
        }
        if (c->qk_norm) params_add(&t, P_Q_NORM, l, "attn.q_norm.weight", qk_norm, 0, INIT_ONE);
        if (c->qk_norm) params_add(&t, P_K_NORM, l, "attn.k_norm.weight", qk_norm, 0, INIT_ONE);
        if (c->use_output_norm) params_add(&t, P_OUTPUT_NORM, l, "attn.output_norm.weight", d, 0, INIT_ONE);
        params_add(&t, P_O_PROJ, l, "attn.o_proj.weight", d, d, INIT_NORMAL);
        params_add(&t, P_MLP_NORM, l, "mlp_norm.weight", d, 0, INIT_ONE);
        params_add(&t, P_GATE_PROJ, l, "mlp.gate_proj.weight", 2 * I, d, INIT_NORMAL);
        params_add(&t, P_DOWN_PROJ, l, "mlp.down_proj.weight", d, I, INIT_NORMAL);
    }
    params_add(&t, P_NORM, -1, "model.norm.weight", d, 0, INIT_ONE);
    params_add(&t, P_LM_HEAD, -1, "lm_head.weight", V, d, INIT_NORMAL);
    t.non_embedding = t.parameters - V * d;

    int64_t* const columns[] = {&t.proj.q,     &t.proj.k,       &t.proj.v,      &t.proj.ogate,
                                &t.proj.fgate, &t.proj.k_shift, &t.proj.v_shift};
    for (int kind = P_Q_PROJ; kind <= P_V_SHIFT; kind++) {
        int row = t.index[kind];
        *columns[kind - P_Q_PROJ] = row < 0 ? -1 : t.proj.rows;
        if (row >= 0) t.proj.rows += t.rows[row].rows;
    }
    return t;
}

// Frees the table; buffers laid out by it are their owners'.
static inline void params_free(ParamTable* t) {
    free(t->rows);
    free(t->index);
    memset(t, 0, sizeof *t);
}

// The row of a kind in layer l (0 for tensors outside the layers), or NULL where the model has none.
static inline const Param* params_find(const ParamTable* t, ParamKind kind, int64_t l) {
    int row = t->index[l * NUM_PARAM_KINDS + kind];
    return row < 0 ? NULL : &t->rows[row];
}

// Initial value of element i of row r of the table, a function of the seed alone: any trainer draws the same.
static inline double params_initial_value(const ParamTable* t, const Config* c, int r, int64_t i,
                                          uint64_t seed) {
    switch (t->rows[r].init) {
    case INIT_NORMAL: return c->initializer_range * random_normal(seed, (uint64_t)r, (uint64_t)i);
    case INIT_ZERO: return 0;
    case INIT_ONE: return 1;
    case INIT_LONG_GATE: return config_long_gate_bias(c, i);
    }
    return 0;
}

#endif // LLMC_PARAMS_H
