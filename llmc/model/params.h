/*
THE parameter table: one row a tensor, with its name in a checkpoint, its shape, its initialisation, and
whether it decays.

Everything else walks it: allocation, initialisation, checkpoints, the optimizer (its state and what decays),
gradient checks, dumps and the parameter counts. All tensors are in one flat buffer, in the order of the rows,
each aligned to PARAM_ALIGN elements.

Each layer has the rows of its mixer and, unless the MLP's width is 0, those of an MLP. In a stack of layers
of different kinds a layer's rows start as in its own family's models, the others as attention's. Here are the
type of the table, what adds rows to it, and attention's rows; a baseline's rows are in its params.h, and
llmc/baselines/mixers.h, which knows all mixers, builds the tables.

A mixer's matrices that multiply the same input, the normed residual stream, are adjacent rows without padding
between them: together they are one matrix [R, d], the fused projection, and one GEMM computes, for
example, q, k, v, the output gate, the forget gate and the shift gates of attention.

With several ranks the flat buffer is reduced and gathered in buckets: the embedding, each layer, and the
final norm with lm_head. Each is padded so that it has equal parts for all ranks, of a multiple of PARAM_ALIGN
elements (llmc/model/shard.h).
*/
#pragma once

#include "../config/config.h"
#include "../base/random.h"

// What a tensor is. The kinds of a mixer begin at P_FIRST_OF(its MixerKind). A tensor's initial values are
// drawn by its layer and its kind: new kinds and mixers are added at the end, or a seed's weights change.
typedef int ParamKind;

enum {
    P_EMBEDDINGS,          // [V, d]
    P_MIXER_NORM,          // [d]
    P_MLP_NORM,            // [d]      this row and the next two: with an MLP
    P_GATE_PROJ,           // [2I, d]  rows 0..I-1 the SiLU gate, then up
    P_DOWN_PROJ,           // [d, I]
    P_NORM,                // [d]
    P_LM_HEAD,             // [V, d]   no row of its own where it is tied to the embedding
    P_UP_PROJ,             // [I, d]   where the file has it apart: behind P_GATE_PROJ, which then is [I, d]
    NUM_SHARED_KINDS = 16, // room for those of every model
    MIXER_KINDS = 16,      // room for a mixer's own
    NUM_PARAM_KINDS = NUM_SHARED_KINDS + MIXER_KINDS * NUM_MIXERS
};
#define P_FIRST_OF(mixer) (NUM_SHARED_KINDS + MIXER_KINDS * (mixer))

enum { CONV_WIDTH = 4 };   // taps of the recurrent mixers' convolutions
enum { PARAM_ALIGN = 64 }; // elements: a cache line of bf16, and a multiple of every vector load

typedef enum { INIT_NORMAL, INIT_UNIFORM, INIT_ZERO, INIT_ONE, INIT_FUNCTION } ParamInit;

// The initial value of element i; `uniform` is a random number in [0, 1).
typedef double InitialValue(const Config* c, int64_t i, double uniform);

typedef struct {
    char name[80]; // in a checkpoint
    ParamKind kind;
    int64_t layer; // -1: outside the layers
    int ndim;
    int64_t shape[3];
    int64_t count;  // elements
    int64_t offset; // of its first element in the flat buffer
    int64_t column; // its first row in the fused projection, and column of the output; -1: no part of it
    ParamInit init;
    double scale; // INIT_NORMAL: factor of initializer_range; INIT_UNIFORM: the numbers are in +-scale
    InitialValue* initial; // INIT_FUNCTION
    double eps;            // of the RMSNorm that this is the weight of; 0 for all others
    bool decays;           // under weight decay: matrices and the embedding, not biases and norms
    bool trainable;        // all but a fixed gate's bias, and HGRN2's lower bounds where they are off
    bool optional;         // files of others may lack it; it is 0 then
    int64_t fp32; // its first element among the weights that GPU kernels read in fp32; -1: they read bf16
} Param;

// The fused projection [rows, d] of a layer. Its output is [B, T, rows].
typedef struct {
    ParamKind first; // its first tensor
    int64_t rows;
} Projection;

typedef struct {
    Config config;  // the model's as the layer's mixer sees it
    int64_t number; // among the layers of its mixer
    Projection proj;
} LayerTable;

typedef struct {
    Param* rows;
    int num_rows;
    const char* layers;    // prefix of names in layer l: LAYERS.l.
    int64_t count;         // elements of the flat buffer, with padding
    int64_t parameters;    // without padding
    int64_t non_embedding; // all but the input embedding; lm_head counts, tied or not
    int64_t fp32_count;    // elements of the tensors that GPU kernels read in fp32
    int* index;            // [L * NUM_PARAM_KINDS]: row of a kind in a layer, -1 where the model has none
    int num_buckets;       // L + 2: embedding, layers, final norm and lm_head
    int64_t* buckets;      // [num_buckets + 1] first elements; the last is count
    LayerTable* by_layer;  // [L]
} ParamTable;

// ----------------------------------------------------------------------------
// rows

// Adds the next row: a tensor of layer l, or one outside the layers (l = -1). Its shape ends at the first 0.
// No padding separates a `fused` row from the row before it. By default it is trainable, and decays if it has
// two dimensions or more; the caller overrides this in the row returned.
static inline Param* params_add(ParamTable* t, ParamKind kind, int64_t l, const char* name, ParamInit init,
                                const int64_t shape[3], bool fused) {
    Param* p = &t->rows[t->num_rows];
    assert(kind < NUM_PARAM_KINDS);
    memset(p, 0, sizeof *p);
    if (l < 0)
        snprintf(p->name, sizeof p->name, "%s", name);
    else
        snprintf(p->name, sizeof p->name, "%s.%lld.%s", t->layers, (long long)l, name);
    p->kind = kind;
    p->layer = l;
    p->init = init;
    p->scale = 1;
    p->count = 1;
    for (; p->ndim < 3 && shape[p->ndim]; p->ndim++) p->count *= p->shape[p->ndim] = shape[p->ndim];
    if (!fused) t->count = (t->count + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
    p->offset = t->count;
    p->column = -1;
    p->decays = p->ndim > 1;
    p->trainable = true;
    p->fp32 = -1;
    t->index[(l < 0 ? 0 : l) * NUM_PARAM_KINDS + kind] = t->num_rows++;
    t->count += p->count;
    t->parameters += p->count;
    return p;
}

static inline Param* params_add_matrix(ParamTable* t, ParamKind kind, int64_t l, const char* name,
                                       int64_t rows, int64_t cols) {
    const int64_t shape[3] = {rows, cols, 0};
    return params_add(t, kind, l, name, INIT_NORMAL, shape, false);
}

// A matrix of the fused projection, whose matrices are added one after the other.
static inline void params_add_proj(ParamTable* t, ParamKind kind, int64_t l, const char* name, int64_t rows,
                                   int64_t d) {
    const int64_t shape[3] = {rows, d, 0}, before = t->num_rows - 1;
    const int64_t column = t->rows[before].column < 0 ? 0 : t->rows[before].column + t->rows[before].shape[0];
    Projection* proj = &t->by_layer[l].proj;
    params_add(t, kind, l, name, INIT_NORMAL, shape, column > 0)->column = column;
    if (column == 0) proj->first = kind;
    proj->rows = column + rows;
}

// The MLP's input matrix [2I, d]; apart: as two tensors, contiguous in the flat buffer.
static inline void params_add_gate_up(ParamTable* t, int64_t l, int64_t I, int64_t d, bool apart) {
    const int64_t up[3] = {I, d, 0};
    params_add_matrix(t, P_GATE_PROJ, l, "mlp.gate_proj.weight", apart ? I : 2 * I, d);
    if (apart) params_add(t, P_UP_PROJ, l, "mlp.up_proj.weight", INIT_NORMAL, up, true);
}

// The weights of a convolution over n channels; `fused` with those of the row before.
static inline void params_add_conv(ParamTable* t, ParamKind kind, int64_t l, const char* name, int64_t n,
                                   bool fused) {
    const int64_t shape[3] = {n, 1, CONV_WIDTH};
    params_add(t, kind, l, name, INIT_UNIFORM, shape, fused)->scale = 1 / sqrt((double)CONV_WIDTH);
}

// The weight of an RMSNorm over n channels.
static inline void params_add_norm(ParamTable* t, ParamKind kind, int64_t l, const char* name, int64_t n,
                                   double eps) {
    const int64_t shape[3] = {n, 0, 0};
    params_add(t, kind, l, name, INIT_ONE, shape, false)->eps = eps;
}

// GPU kernels read the tensor in fp32.
static inline void params_in_fp32(ParamTable* t, Param* p) {
    p->fp32 = t->fp32_count;
    t->fp32_count += p->count;
}

// Initialisation of matrices Xavier-uniform with a gain of 2^-2.5, and of down_proj divided by sqrt(2 L):
// what the paper's code does for DeltaNet and HGRN2.
static inline void params_init_xavier(Param* p, const Config* c) {
    if (p->kind == P_DOWN_PROJ) p->scale = 1 / sqrt(2 * (double)c->num_hidden_layers);
    if (p->kind < NUM_SHARED_KINDS || p->init != INIT_NORMAL) return;
    p->init = INIT_UNIFORM;
    p->scale = pow(2, -2.5) * sqrt(6 / (double)(p->shape[0] + p->shape[1]));
}

// ----------------------------------------------------------------------------
// mixers: what mixes the tokens in a block, attention or a baseline

// What the parameter table and the FLOPs need of a mixer; its functions are in the trainers' lists.
typedef struct {
    const char *embeddings, *layers, *final_norm; // names outside the layers, and the prefix of those within
    const char* norm;                             // name of the norm before the mixer, in its layer
    bool up_proj;                                 // the MLP's up_proj is a tensor of its own
    void (*add_params)(ParamTable* t, const Config* c, int64_t l);
    void (*add_outside)(ParamTable* t, const Config* c); // rows outside the layers; NULL: none
    void (*init)(Param* p, const Config* c);             // changes how a row of the table starts; NULL: none
    // per token and layer, forward and backward, without the 6 per parameter
    double (*flops)(const Config* c, int64_t T);
} MixerInfo;

// Names outside the mixer, of all but Mamba-2
#define MIXER_NAMES                                                                                          \
    .embeddings = "model.embeddings.weight", .layers = "model.layers", .final_norm = "model.norm.weight",    \
    .norm = "attn_norm.weight"

// ----------------------------------------------------------------------------
// attention

enum {
    P_Q_PROJ = P_FIRST_OF(MIXER_ATTENTION), // [d, d]    this and the next six: the fused projection
    P_K_PROJ,                               // [kd, d]   kd = KVH dh
    P_V_PROJ,                               // [kd, d]
    P_OGATE_PROJ,                           // [d, d]    with output gate
    P_FGATE_PROJ,                           // [NH, d]   gate full
    P_K_SHIFT,                              // [KVH, d]  with key shift
    P_V_SHIFT,                              // [KVH, d]  with value shift
    P_FGATE_BIAS,                           // [NH]      with any gate
    P_Q_NORM,                               // [d], or [dh] when shared by all heads
    P_K_NORM,                               // [kd], or [dh]
    P_OUTPUT_NORM,                          // [d]       with output norm
    P_O_PROJ,                               // [d, d]
};

// Bias of a long gate.
static inline double attention_initial_bias(const Config* c, int64_t head, double uniform) {
    (void)uniform;
    return config_long_gate_bias(c, head);
}

// Attention's rows of layer l.
static inline void attention_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size, NH = c->num_heads, KVH = config_key_heads(c), dh = config_head_size(c);
    int64_t kd = KVH * dh;
    bool full = c->fgate_type == GATE_FULL;
    params_add_proj(t, P_Q_PROJ, l, "attn.q_proj.weight", d, d);
    params_add_proj(t, P_K_PROJ, l, c->use_k_shift ? "attn.k_proj.linear.weight" : "attn.k_proj.weight", kd,
                    d);
    params_add_proj(t, P_V_PROJ, l, c->use_v_shift ? "attn.v_proj.linear.weight" : "attn.v_proj.weight", kd,
                    d);
    if (c->use_output_gate) params_add_proj(t, P_OGATE_PROJ, l, "attn.ogate_proj.weight", d, d);
    if (full) params_add_proj(t, P_FGATE_PROJ, l, "attn.fgate_proj.weight", NH, d);
    if (c->use_k_shift) params_add_proj(t, P_K_SHIFT, l, "attn.k_proj.shift_proj.weight", KVH, d);
    if (c->use_v_shift) params_add_proj(t, P_V_SHIFT, l, "attn.v_proj.shift_proj.weight", KVH, d);
    if (config_has_gate(c)) {
        const int64_t shape[3] = {NH, 0, 0};
        Param* bias = params_add(t, P_FGATE_BIAS, l, full ? "attn.fgate_proj.bias" : "attn.fgate_bias",
                                 config_long_gate(c) ? INIT_FUNCTION : INIT_ZERO, shape, false);
        bias->initial = attention_initial_bias;
        bias->trainable = c->fgate_type != GATE_FIXED;
        params_in_fp32(t, bias);
    }
    if (c->qk_norm) {
        params_add_norm(t, P_Q_NORM, l, "attn.q_norm.weight", c->qk_norm_share ? dh : d, QK_NORM_EPS);
        params_add_norm(t, P_K_NORM, l, "attn.k_norm.weight", c->qk_norm_share ? dh : kd, QK_NORM_EPS);
    }
    if (c->use_output_norm) params_add_norm(t, P_OUTPUT_NORM, l, "attn.output_norm.weight", d, c->norm_eps);
    params_add_matrix(t, P_O_PROJ, l, "attn.o_proj.weight", d, d);
}

// FLOPs per token and layer of causal attention, forward and backward, without the 6 per parameter: 12 d for
// each key that a token attends to, of which it has T / 2 in the mean, or W - W^2 / 2T in a window of W < T.
static inline double attention_flops(const Config* c, int64_t T) {
    double window = c->window_size && c->window_size < T ? (double)c->window_size : (double)T;
    return 6.0 * (double)c->hidden_size * (2 * window - window * window / (double)T);
}

static const MixerInfo attention_info = {
    MIXER_NAMES,
    .add_params = attention_add_params,
    .flops = attention_flops,
};

// ----------------------------------------------------------------------------
// the table

// Frees the table; buffers laid out by it belong to their owners.
static inline void params_free(ParamTable* t) {
    free(t->rows);
    free(t->index);
    free(t->buckets);
    free(t->by_layer);
    memset(t, 0, sizeof *t);
}

// [num_buckets + 1] where the buckets begin among the tensors that GPU kernels read in fp32; the caller frees
// it.
static inline int64_t* params_fp32_begin(const ParamTable* t) {
    int64_t* begin = (int64_t*)xcalloc((size_t)t->num_buckets + 1, sizeof(int64_t));
    int bucket = 0;
    for (const Param* p = t->rows; p < t->rows + t->num_rows; p++) {
        while (p->offset >= t->buckets[bucket + 1]) bucket++;
        if (p->fp32 >= 0) begin[bucket + 1] += p->count;
    }
    for (int b = 0; b < t->num_buckets; b++) begin[b + 1] += begin[b];
    return begin;
}

// The row of a kind in layer l (0 for tensors outside the layers), or NULL where the model has none.
static inline const Param* params_find(const ParamTable* t, ParamKind kind, int64_t l) {
    int row = t->index[l * NUM_PARAM_KINDS + kind];
    return row < 0 ? NULL : &t->rows[row];
}

// The first column of a kind in the output of layer l's fused projection; -1 where the layer has none.
static inline int64_t params_column(const ParamTable* t, ParamKind kind, int64_t l) {
    const Param* p = params_find(t, kind, l);
    return p ? p->column : -1;
}

// Rows of the widest fused projection.
static inline int64_t params_widest_proj(const ParamTable* t, int64_t L) {
    int64_t rows = 0;
    for (int64_t l = 0; l < L; l++)
        if (t->by_layer[l].proj.rows > rows) rows = t->by_layer[l].proj.rows;
    return rows;
}

// Initial value of element i of row r of the table, a function of (seed, layer, kind, i) alone: the CPU and
// the GPU trainer draw the same weights, and so do models that have other tensors beside this one.
static inline double params_initial_value(const ParamTable* t, const Config* c, int r, int64_t i,
                                          uint64_t seed) {
    const Param* p = &t->rows[r];
    const uint64_t stream = (uint64_t)(p->layer + 1) << 32 | (uint64_t)p->kind;
    switch (p->init) {
    case INIT_NORMAL: return p->scale * c->initializer_range * random_normal(seed, stream, (uint64_t)i);
    case INIT_UNIFORM: return p->scale * (2 * random_uniform(seed, stream, (uint64_t)i) - 1);
    case INIT_ZERO: return 0;
    case INIT_ONE: return 1;
    case INIT_FUNCTION:
        return p->initial(&t->by_layer[p->layer].config, i, random_uniform(seed, stream, (uint64_t)i));
    }
    return 0;
}
