/*
THE parameter table: one row a tensor, with its name in a checkpoint, its shape, how it starts, whether it
decays.

Everything else walks it: allocation, initialisation, checkpoints, the optimizer (its state and what decays),
gradient checks, dumps and the parameter counts. All tensors are in one flat buffer, in the order of the rows,
each aligned to PARAM_ALIGN elements.

Each layer has the rows of its mixer (`mixers` below) and, unless the MLP's width is 0, those of an MLP.

Attention's matrices that multiply the same input, the normed residual stream, are adjacent rows without
padding between them: together they are one matrix [proj.rows, d], and one GEMM computes q, k, v, the output
gate, the forget gate and the shift gates. ProjLayout says where each begins.

With several ranks the flat buffer is reduced and gathered in buckets: the embedding, each layer, and the
final norm with lm_head. Each is padded so that it has equal parts for all ranks, of a multiple of PARAM_ALIGN
elements (llmc/model/shard.h).
*/
#pragma once

#include "config.h"
#include "../base/random.h"

typedef enum {
    P_EMBEDDINGS,   // [V, d]
    P_LOWER_BOUNDS, // [L, d]    HGRN2's, outside the layers; trainable where the model uses them
    P_MIXER_NORM,   // [d]
    P_Q_PROJ,       // [d, d]     P_Q_PROJ .. P_V_SHIFT are the rows of the one fused projection
    P_K_PROJ,       // [d, d]
    P_V_PROJ,       // [d, d]
    P_B_PROJ,       // [NH, d]    DeltaNet's beta
    P_OGATE_PROJ,   // [d, d]     with output gate
    P_FGATE_PROJ,   // [NH, d]    gate full
    P_K_SHIFT,      // [NH, d]    with key shift
    P_V_SHIFT,      // [NH, d]    with value shift
    P_FGATE_BIAS,   // [NH]       with any gate
    P_Q_NORM,       // [d], or [dh] when shared by all heads
    P_K_NORM,       // the same
    P_CONV,         // [C, 1, 4]  recurrent mixers' convolutions, or the first of several: C channels in all
    P_K_CONV,       // [d, 1, 4]  DeltaNet's other two: with P_CONV one matrix [3d, 4]
    P_V_CONV,       // [d, 1, 4]
    P_CONV_BIAS,    // [C]        Mamba-2, like the next three
    P_DT_BIAS,      // [NH]       of the time step
    P_A_LOG,        // [NH]       log of the decay's rate
    P_D,            // [NH]       the input's way past the state
    P_OUTPUT_NORM,  // [d]        with output norm, and HGRN2's; DeltaNet: [dh], Mamba-2: [2d]
    P_O_PROJ,       // [d, d]
    P_MLP_NORM,     // [d]        this row and the next two: with an MLP
    P_GATE_PROJ,    // [2I, d]    rows 0..I-1 the SiLU gate, then up
    P_DOWN_PROJ,    // [d, I]
    P_NORM,         // [d]
    P_LM_HEAD,      // [V, d]
    NUM_PARAM_KINDS
} ParamKind;

enum { CONV_WIDTH = 4 };   // taps of the recurrent mixers' convolutions
enum { PARAM_ALIGN = 64 }; // elements: a cache line of bf16, and a multiple of every vector load

typedef enum {
    INIT_NORMAL,
    INIT_UNIFORM,
    INIT_ZERO,
    INIT_ONE,
    INIT_LONG_GATE,
    INIT_TIME_STEP,
    INIT_A_LOG
} ParamInit;

typedef struct {
    char name[80]; // in a checkpoint
    ParamKind kind;
    int ndim;
    int64_t shape[3];
    int64_t count;  // elements
    int64_t offset; // of its first element in the flat buffer
    ParamInit init;
    double scale;   // INIT_NORMAL: factor of initializer_range; INIT_UNIFORM: the numbers are in +-scale
    double eps;     // of the RMSNorm that this is the weight of; 0 for all others
    bool decays;    // under weight decay: matrices and the embedding, not biases and norms
    bool trainable; // all but a fixed gate's bias, and HGRN2's lower bounds where they are off
    bool optional;  // files of others may lack it; it is 0 then
    int64_t fp32;   // its first element among the weights that GPU kernels read in fp32; -1: they read bf16
} Param;

// Row offsets in the fused projection [rows, d]; -1 for what the model does not have. As columns they index
// its output [B, T, rows].
typedef struct {
    int64_t q, k, v, b, ogate, fgate, k_shift, v_shift;
    int64_t rows;
} ProjLayout;

typedef struct {
    Param* rows;
    int num_rows;
    const char* layers;    // prefix of names in layer l: LAYERS.l.
    int64_t count;         // elements of the flat buffer, with padding
    int64_t parameters;    // without padding
    int64_t non_embedding; // all but the input embedding; lm_head counts
    int64_t fp32_count;    // elements of the tensors that GPU kernels read in fp32
    int* index;            // [L * NUM_PARAM_KINDS]: row of a kind in a layer, -1 where the model has none
    int num_buckets;       // L + 2: embedding, layers, final norm and lm_head
    int64_t* buckets;      // [num_buckets + 1] first elements; the last is count
    ProjLayout proj;
} ParamTable;

// ----------------------------------------------------------------------------
// rows

// Adds the next row: a tensor of layer l, or one outside the layers (l = -1). Its shape ends at the first 0.
// No padding separates a `fused` row from the row before it. By default it is trainable, and decays if it has
// two dimensions or more; the caller overrides this in the row returned.
static inline Param* params_add(ParamTable* t, ParamKind kind, int64_t l, const char* name, ParamInit init,
                                const int64_t shape[3], bool fused) {
    Param* p = &t->rows[t->num_rows];
    memset(p, 0, sizeof *p);
    if (l < 0)
        snprintf(p->name, sizeof p->name, "%s", name);
    else
        snprintf(p->name, sizeof p->name, "%s.%lld.%s", t->layers, (long long)l, name);
    p->kind = kind;
    p->init = init;
    p->scale = 1;
    p->count = 1;
    for (; p->ndim < 3 && shape[p->ndim]; p->ndim++) p->count *= p->shape[p->ndim] = shape[p->ndim];
    if (!fused) t->count = (t->count + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
    p->offset = t->count;
    p->decays = p->ndim > 1;
    p->trainable = true;
    p->fp32 = -1;
    t->index[(l < 0 ? 0 : l) * NUM_PARAM_KINDS + kind] = t->num_rows++;
    t->count += p->count;
    t->parameters += p->count;
    return p;
}

static inline void params_add_matrix(ParamTable* t, ParamKind kind, int64_t l, const char* name, int64_t rows,
                                     int64_t cols) {
    const int64_t shape[3] = {rows, cols, 0};
    params_add(t, kind, l, name, INIT_NORMAL, shape, kind > P_Q_PROJ && kind <= P_V_SHIFT);
}

// The weight of an RMSNorm over n channels.
static inline void params_add_norm(ParamTable* t, ParamKind kind, int64_t l, const char* name, int64_t n,
                                   double eps) {
    const int64_t shape[3] = {n, 0, 0};
    params_add(t, kind, l, name, INIT_ONE, shape, false)->eps = eps;
}

// ----------------------------------------------------------------------------
// mixers: attention, and what may take its place in a block

// GPU kernels read the tensor in fp32.
static inline void params_in_fp32(ParamTable* t, Param* p) {
    p->fp32 = t->fp32_count;
    t->fp32_count += p->count;
}

// Attention's rows of layer l.
static inline void attention_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size, NH = c->num_heads, qk_norm = c->qk_norm_share ? config_head_size(c) : d;
    bool full = c->fgate_type == GATE_FULL;
    params_add_matrix(t, P_Q_PROJ, l, "attn.q_proj.weight", d, d);
    params_add_matrix(t, P_K_PROJ, l, c->use_k_shift ? "attn.k_proj.linear.weight" : "attn.k_proj.weight", d,
                      d);
    params_add_matrix(t, P_V_PROJ, l, c->use_v_shift ? "attn.v_proj.linear.weight" : "attn.v_proj.weight", d,
                      d);
    if (c->use_output_gate) params_add_matrix(t, P_OGATE_PROJ, l, "attn.ogate_proj.weight", d, d);
    if (full) params_add_matrix(t, P_FGATE_PROJ, l, "attn.fgate_proj.weight", NH, d);
    if (c->use_k_shift) params_add_matrix(t, P_K_SHIFT, l, "attn.k_proj.shift_proj.weight", NH, d);
    if (c->use_v_shift) params_add_matrix(t, P_V_SHIFT, l, "attn.v_proj.shift_proj.weight", NH, d);
    if (config_has_gate(c)) {
        const int64_t shape[3] = {NH, 0, 0};
        Param* bias = params_add(t, P_FGATE_BIAS, l, full ? "attn.fgate_proj.bias" : "attn.fgate_bias",
                                 config_long_gate(c) ? INIT_LONG_GATE : INIT_ZERO, shape, false);
        bias->trainable = c->fgate_type != GATE_FIXED;
        params_in_fp32(t, bias);
    }
    if (c->qk_norm) params_add_norm(t, P_Q_NORM, l, "attn.q_norm.weight", qk_norm, QK_NORM_EPS);
    if (c->qk_norm) params_add_norm(t, P_K_NORM, l, "attn.k_norm.weight", qk_norm, QK_NORM_EPS);
    if (c->use_output_norm) params_add_norm(t, P_OUTPUT_NORM, l, "attn.output_norm.weight", d, c->norm_eps);
    params_add_matrix(t, P_O_PROJ, l, "attn.o_proj.weight", d, d);
}

// Rows of a width-4 convolution over n channels each, adjacent where there are several.
static inline void params_add_conv(ParamTable* t, ParamKind kind, int64_t l, const char* name, int64_t n) {
    const int64_t shape[3] = {n, 1, CONV_WIDTH};
    params_add(t, kind, l, name, INIT_UNIFORM, shape, kind != P_CONV)->scale = 1 / sqrt((double)CONV_WIDTH);
}

// DeltaNet's rows of layer l.
static inline void deltanet_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size;
    params_add_matrix(t, P_Q_PROJ, l, "attn.q_proj.weight", d, d);
    params_add_matrix(t, P_K_PROJ, l, "attn.k_proj.weight", d, d);
    params_add_matrix(t, P_V_PROJ, l, "attn.v_proj.weight", d, d);
    params_add_matrix(t, P_B_PROJ, l, "attn.b_proj.weight", c->num_heads, d);
    params_add_conv(t, P_CONV, l, "attn.q_conv1d.weight", d);
    params_add_conv(t, P_K_CONV, l, "attn.k_conv1d.weight", d);
    params_add_conv(t, P_V_CONV, l, "attn.v_conv1d.weight", d);
    params_add_norm(t, P_OUTPUT_NORM, l, "attn.o_norm.weight", config_head_size(c), c->norm_eps);
    params_add_matrix(t, P_O_PROJ, l, "attn.o_proj.weight", d, d);
}

// HGRN2's rows of layer l: q, forget gate and input are the fused projection's q, k and v.
static inline void hgrn2_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size;
    params_add_matrix(t, P_Q_PROJ, l, "attn.q_proj.weight", d, d);
    params_add_matrix(t, P_K_PROJ, l, "attn.f_proj.weight", d, d);
    params_add_matrix(t, P_V_PROJ, l, "attn.i_proj.weight", d, d);
    params_add_norm(t, P_OUTPUT_NORM, l, "attn.g_norm.weight", d, c->norm_eps);
    params_add_matrix(t, P_O_PROJ, l, "attn.o_proj.weight", d, d);
}

static inline void hgrn2_add_lower_bounds(ParamTable* t, const Config* c) {
    const int64_t shape[3] = {c->num_hidden_layers, c->hidden_size, 0};
    Param* p = params_add(t, P_LOWER_BOUNDS, -1, "model.lower_bounds", INIT_ZERO, shape, false);
    p->decays = false;
    p->trainable = c->use_lower_bound;
    p->optional = !c->use_lower_bound; // flash-linear-attention has it only where it is used
    if (!c->use_lower_bound) return;
    p->fp32 = t->fp32_count;
    t->fp32_count += p->count;
}

// Mamba-2's rows of layer l. in_proj's rows are z [di], then x [di], B [N] and C [N], which the convolution
// reads, then dt [NH].
static inline void mamba2_add_params(ParamTable* t, const Config* c, int64_t l) {
    int64_t d = c->hidden_size, di = config_inner_size(c), NH = c->num_heads, C = di + 2 * c->state_size;
    const int64_t channels[3] = {C, 0, 0}, heads[3] = {NH, 0, 0};
    params_add_matrix(t, P_Q_PROJ, l, "mixer.in_proj.weight", di + C + NH, d);
    params_add_conv(t, P_CONV, l, "mixer.conv1d.weight", C);
    params_add(t, P_CONV_BIAS, l, "mixer.conv1d.bias", INIT_UNIFORM, channels, false)->scale =
        1 / sqrt((double)CONV_WIDTH);
    params_in_fp32(t, params_add(t, P_DT_BIAS, l, "mixer.dt_bias", INIT_TIME_STEP, heads, false));
    params_in_fp32(t, params_add(t, P_A_LOG, l, "mixer.A_log", INIT_A_LOG, heads, false));
    params_in_fp32(t, params_add(t, P_D, l, "mixer.D", INIT_ONE, heads, false));
    params_add_norm(t, P_OUTPUT_NORM, l, "mixer.norm.weight", di, c->norm_eps);
    params_add_matrix(t, P_O_PROJ, l, "mixer.out_proj.weight", d, di);
}

// How Mamba-2 starts: matrices uniform in +-1 / sqrt(fan in), out_proj's divided by sqrt(L).
static inline void mamba2_init(Param* p, const Config* c) {
    if (p->kind != P_Q_PROJ && p->kind != P_O_PROJ && p->kind != P_LM_HEAD) return;
    p->init = INIT_UNIFORM;
    p->scale = 1 / sqrt((double)p->shape[1]);
    if (p->kind == P_O_PROJ && c->rescale_prenorm_residual) p->scale /= sqrt((double)c->num_hidden_layers);
}

// Bias of a time step: softplus of it is exp(a number uniform between the logarithms of time_step_min and
// time_step_max), at least time_step_floor.
static inline double mamba2_dt_bias(const Config* c, double uniform) {
    double low = log(c->time_step_min), high = log(c->time_step_max);
    double dt = fmax(exp(low + uniform * (high - low)), c->time_step_floor);
    return dt + log(-expm1(-dt));
}

// How DeltaNet and HGRN2 start in the paper's code: the mixer's matrices Xavier-uniform with a gain of
// 2^-2.5, down_proj divided by sqrt(2 L).
static inline void matrix_state_init(Param* p, const Config* c) {
    bool of_mixer = (p->kind >= P_Q_PROJ && p->kind <= P_V_SHIFT) || p->kind == P_O_PROJ;
    if (p->kind == P_DOWN_PROJ) p->scale = 1 / sqrt(2 * (double)c->num_hidden_layers);
    if (!of_mixer) return;
    p->init = INIT_UNIFORM;
    p->scale = pow(2, -2.5) * sqrt(6 / (double)(p->shape[0] + p->shape[1]));
}

// Per token and layer, forward and backward, as the paper counts the FLOPs of a recurrence.
static inline double deltanet_flops(const Config* c, int64_t T) {
    (void)T;
    return 18.0 * (double)(c->hidden_size * config_head_size(c));
}

static inline double hgrn2_flops(const Config* c, int64_t T) {
    (void)T;
    return 15.0 * (double)(c->hidden_size * config_head_size(c));
}

static inline double mamba2_flops(const Config* c, int64_t T) {
    (void)T;
    return 30.0 * (double)(c->hidden_size * c->state_size);
}

// FLOPs per token and layer of causal attention, forward and backward, without the 6 per parameter: 12 d for
// each key that a token attends to, of which it has T / 2 in the mean, or W - W^2 / 2T in a window of W < T.
static inline double attention_flops(const Config* c, int64_t T) {
    double window = c->window_size && c->window_size < T ? (double)c->window_size : (double)T;
    return 6.0 * (double)c->hidden_size * (2 * window - window * window / (double)T);
}

// What the parameter table and the FLOPs need of a mixer, a row each; its functions are in the trainers'
// lists.
typedef struct {
    const char *embeddings, *layers, *final_norm; // names outside the layers, and the prefix of those within
    const char* norm;                             // name of the norm before the mixer, in its layer
    void (*add_params)(ParamTable* t, const Config* c, int64_t l);
    double (*flops)(const Config* c,
                    int64_t T); // per token and layer, forward and backward, without the 6 per parameter
    void (*init)(Param* p, const Config* c); // changes how a row of the table starts; NULL: none
} MixerInfo;

static const MixerInfo mixer_infos[] = {
    {"model.embeddings.weight", "model.layers", "model.norm.weight", "attn_norm.weight", attention_add_params,
     attention_flops, NULL}, // MIXER_ATTENTION
    {"model.embeddings.weight", "model.layers", "model.norm.weight", "attn_norm.weight", deltanet_add_params,
     deltanet_flops, matrix_state_init}, // MIXER_DELTANET
    {"model.embeddings.weight", "model.layers", "model.norm.weight", "attn_norm.weight", hgrn2_add_params,
     hgrn2_flops, matrix_state_init}, // MIXER_HGRN2
    {"backbone.embeddings.weight", "backbone.layers", "backbone.norm_f.weight", "norm.weight",
     mamba2_add_params, mamba2_flops, mamba2_init}, // MIXER_MAMBA2
};
static_assert(sizeof mixer_infos / sizeof mixer_infos[0] == NUM_MIXERS, "one row a MixerKind");

// FLOPs per token of all mixers, forward and backward, without the 6 per parameter.
static inline double config_mixer_flops(const Config* c, int64_t T) {
    return (double)c->num_hidden_layers * mixer_infos[c->mixer].flops(c, T);
}

// ----------------------------------------------------------------------------
// the table

// Where the fused projection's parts begin. The layout is the same in all layers.
static inline ProjLayout params_proj_layout(const ParamTable* t) {
    ProjLayout proj;
    int64_t* const columns[] = {&proj.q,     &proj.k,     &proj.v,       &proj.b,
                                &proj.ogate, &proj.fgate, &proj.k_shift, &proj.v_shift};
    static_assert(sizeof columns / sizeof columns[0] == P_V_SHIFT - P_Q_PROJ + 1, "one column a fused row");
    proj.rows = 0;
    for (int kind = P_Q_PROJ; kind <= P_V_SHIFT; kind++) {
        int row = t->index[kind];
        *columns[kind - P_Q_PROJ] = row < 0 ? -1 : proj.rows;
        if (row >= 0) proj.rows += t->rows[row].shape[0];
    }
    return proj;
}

// Begins a bucket at the next multiple of `align` elements, which also ends the bucket before it.
static inline void params_begin_bucket(ParamTable* t, int64_t align) {
    t->count = (t->count + align - 1) / align * align;
    t->buckets[t->num_buckets++] = t->count;
}

// Builds the table of a checked config, laid out for a number of ranks; free with params_free.
static inline ParamTable params_build_for(const Config* c, int ranks) {
    int64_t V = c->vocab_size, d = c->hidden_size, L = c->num_hidden_layers, I = config_mlp_size(c);
    const int64_t align = (int64_t)PARAM_ALIGN * ranks;
    const MixerInfo* mixer = &mixer_infos[c->mixer];
    ParamTable t;
    memset(&t, 0, sizeof t);
    t.layers = mixer->layers;
    t.rows = (Param*)xcalloc((size_t)(L + 1) * NUM_PARAM_KINDS, sizeof(Param));
    t.index = (int*)xcalloc((size_t)L * NUM_PARAM_KINDS, sizeof(int));
    t.buckets = (int64_t*)xcalloc((size_t)L + 3, sizeof(int64_t));
    for (int64_t i = 0; i < L * NUM_PARAM_KINDS; i++) t.index[i] = -1;

    params_begin_bucket(&t, align);
    params_add_matrix(&t, P_EMBEDDINGS, -1, mixer->embeddings, V, d);
    if (c->mixer == MIXER_HGRN2) hgrn2_add_lower_bounds(&t, c);
    for (int64_t l = 0; l < L; l++) {
        params_begin_bucket(&t, align);
        params_add_norm(&t, P_MIXER_NORM, l, mixer->norm, d, c->norm_eps);
        mixer->add_params(&t, c, l);
        if (I == 0) continue;
        params_add_norm(&t, P_MLP_NORM, l, "mlp_norm.weight", d, c->norm_eps);
        params_add_matrix(&t, P_GATE_PROJ, l, "mlp.gate_proj.weight", 2 * I, d);
        params_add_matrix(&t, P_DOWN_PROJ, l, "mlp.down_proj.weight", d, I);
    }
    params_begin_bucket(&t, align);
    params_add_norm(&t, P_NORM, -1, mixer->final_norm, d, c->norm_eps);
    params_add_matrix(&t, P_LM_HEAD, -1, "lm_head.weight", V, d);
    params_begin_bucket(&t, ranks > 1 ? align : 1); // ends the last
    t.num_buckets--;
    for (int r = 0; mixer->init && r < t.num_rows; r++) mixer->init(&t.rows[r], c);
    t.non_embedding = t.parameters - V * d;
    t.proj = params_proj_layout(&t);
    return t;
}

// The table of one rank alone.
static inline ParamTable params_build(const Config* c) { return params_build_for(c, 1); }

// Frees the table; buffers laid out by it belong to their owners.
static inline void params_free(ParamTable* t) {
    free(t->rows);
    free(t->index);
    free(t->buckets);
    memset(t, 0, sizeof *t);
}

// The row of a kind in layer l (0 for tensors outside the layers), or NULL where the model has none.
static inline const Param* params_find(const ParamTable* t, ParamKind kind, int64_t l) {
    int row = t->index[l * NUM_PARAM_KINDS + kind];
    return row < 0 ? NULL : &t->rows[row];
}

// Initial value of element i of row r of the table, a function of the seed alone, so the CPU and the GPU
// trainer draw the same weights.
static inline double params_initial_value(const ParamTable* t, const Config* c, int r, int64_t i,
                                          uint64_t seed) {
    const Param* p = &t->rows[r];
    switch (p->init) {
    case INIT_NORMAL: return p->scale * c->initializer_range * random_normal(seed, (uint64_t)r, (uint64_t)i);
    case INIT_UNIFORM: return p->scale * (2 * random_uniform(seed, (uint64_t)r, (uint64_t)i) - 1);
    case INIT_ZERO: return 0;
    case INIT_ONE: return 1;
    case INIT_LONG_GATE: return config_long_gate_bias(c, i);
    case INIT_TIME_STEP: return mamba2_dt_bias(c, random_uniform(seed, (uint64_t)r, (uint64_t)i));
    case INIT_A_LOG: return log((double)(i + 1));
    }
    return 0;
}
