/*
Trains the Forgetting Transformer (FoX, arXiv 2503.02130) and its Transformer baselines on a GPU.

It mirrors train_fox.c, the reference, in order and names; the kernels are in llmc/, a forward and backward
pair a file. Weights and activations are bf16 and products sum in fp32; master weights, gradients and AdamW's
moments are fp32.

Sizes: B sequences of T tokens, L layers, d channels, NH heads of dh = d / NH channels, MLP width I,
vocabulary V; R rows in the fused projection of q, k, v and all gates, S >= R its row stride; Vs >= V that of
logits.

Everything is queued on one stream, but for the gradients of the blocks' matrices, which run beside it. The
host waits for the device only where it must read: a step's loss and norm, which it reads while the next runs.
A step whose loss or gradient is not finite changes nothing on the device itself.
*/
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/cuda/device.cuh"
#include "llmc/cuda/matmul.cuh"
#include "llmc/cuda/embedding.cuh"
#include "llmc/cuda/rmsnorm.cuh"
#include "llmc/attention/qkv.cuh"
#include "llmc/attention/forget_gate.cuh"
#include "llmc/attention/attention.cuh"
#include "llmc/attention/cudnn.cuh"
#include "llmc/attention/pruning.cuh"
#include "llmc/attention/decode.cuh"
#include "llmc/attention/output_gate.cuh"
#include "llmc/cuda/swiglu.cuh"
#include "llmc/cuda/classifier.cuh"
#include "llmc/cuda/global_norm.cuh"
#include "llmc/cuda/adamw.cuh"
#include "llmc/run/train.h"

// ----------------------------------------------------------------------------
// the model

// Every activation: type, name, the last Recompute that keeps it for all layers (KEEP_NONE: scratch that
// layers share), number of elements of a layer.
#define KEEP_NONE (-1)
// clang-format off
#define ACTIVATIONS(X) \
    X(bf16, x, RECOMPUTE_BLOCK, BT * d)            /* [L,B,T,d] residual stream as it enters each block */ \
    X(float, attn_rstd, RECOMPUTE_QKV, BT)       /* [L,B,T] */ \
    X(bf16, attn_in, KEEP_NONE, BT * d)            /* [B,T,d] normed, what the fused projection reads */ \
    X(bf16, proj, RECOMPUTE_QKV, BT * S)         /* [L,B,T,S] q~ k~ v~ and all gates */ \
    X(bf16, q, RECOMPUTE_NONE, BT * d)             /* [L,B,T,d] as attention reads them, like k and v */ \
    X(bf16, k, RECOMPUTE_NONE, BT * d)             /* [L,B,T,d] */ \
    X(bf16, v, RECOMPUTE_NONE, BT * d)             /* [L,B,T,d] */ \
    X(float, q_rstd, RECOMPUTE_QKV, BT * NH)     /* [L,B,T,NH] */ \
    X(float, k_rstd, RECOMPUTE_QKV, BT * NH)     /* [L,B,T,NH] */ \
    X(double, c, RECOMPUTE_QKV, gated * BT * NH) /* [L,B,NH,T] running sum of log forget gates */ \
    X(int, first_key_block, KEEP_NONE, blocks)     /* [B,NH,blocks] as in AttentionBounds */ \
    X(int, last_query_block, KEEP_NONE, blocks)    /* [B,NH,blocks] */ \
    X(int, head_order, KEEP_NONE, prunes * B * NH) /* [B NH] */ \
    X(double, score_limits, RECOMPUTE_QKV, prunes * B * NH) /* [L,B NH] as in pruning_bounds */ \
    X(float, lse, RECOMPUTE_QKV, BT * NH)        /* [L,B,NH,T] */ \
    X(bf16, o, RECOMPUTE_QKV, BT * d)            /* [L,B,T,d] attention's output */ \
    X(float, o_rstd, RECOMPUTE_QKV, BT * NH)     /* [L,B,T,NH] */ \
    X(bf16, y, KEEP_NONE, BT * d)                  /* [B,T,d] after output norm and gate */ \
    X(bf16, x_mid, RECOMPUTE_QKV, BT * d)        /* [L,B,T,d] residual stream between attention and MLP */ \
    X(float, mlp_rstd, RECOMPUTE_QKV, BT)        /* [L,B,T] */ \
    X(bf16, mlp_in, KEEP_NONE, BT * d)             /* [B,T,d] normed */ \
    X(bf16, gu, RECOMPUTE_QKV, BT * 2 * I)       /* [L,B,T,2I] */ \
    X(bf16, s, KEEP_NONE, BT * I)                  /* [B,T,I] */ \
    X(bf16, x_last, KEEP_NONE, BT * d)             /* [B,T,d] residual stream after the last block */ \
    X(float, rstd, KEEP_NONE, BT)                  /* [B,T] of the final norm */ \
    X(bf16, head_in, KEEP_NONE, BT * d)            /* [B,T,d] normed, what the head reads */ \
    X(float, losses, KEEP_NONE, BT)                /* [B,T] */ \
    X(bf16, logits, KEEP_NONE, logit_rows * Vs)    /* [rows,Vs] of a chunk of rows, then their gradient */ \
    X(bf16, dx, KEEP_NONE, BT * d)                 /* [B,T,d] gradient of the residual stream */ \
    X(bf16, dbranch, KEEP_NONE, BT * d)            /* [B,T,d] of what a norm or attention's output gave */ \
    X(float, delta, KEEP_NONE, BT * NH)            /* [B,NH,T] as in attention_backward */ \
    X(bf16, dproj, KEEP_NONE, BT * S)              /* [B,T,S] */ \
    X(bf16, dq, KEEP_NONE, BT * d)                 /* [B,T,d] */ \
    X(bf16, dk, KEEP_NONE, BT * d)                 /* [B,T,d] */ \
    X(bf16, dv, KEEP_NONE, BT * d)                 /* [B,T,d] */ \
    X(float, dc, KEEP_NONE, gated * BT * NH)       /* [B,NH,T] */ \
    X(bf16, dgu, KEEP_NONE, BT * 2 * I)            /* [B,T,2I] */ \
    X(bf16, ds, KEEP_NONE, BT * I)                 /* [B,T,I] */ \
    X(int32_t, inputs, KEEP_NONE, BT)              /* [B,T] */ \
    X(int32_t, targets, KEEP_NONE, BT)             /* [B,T] */
// clang-format on

#define ACTIVATION_FIELD(type, name, keep, count) type* name;
typedef struct {
    ACTIVATIONS(ACTIVATION_FIELD)
} Activations;

// How far a layer's part of each activation is from the last layer's: 0 where layers share it.
#define ACTIVATION_STEP(type, name, keep, count) int64_t name;
typedef struct {
    ACTIVATIONS(ACTIVATION_STEP)
} ActivationSteps;

typedef struct {
    Config config;
    ParamTable table;
    int64_t B, T, S, Vs; // shape and strides that the activations are for
    float* params;       // [table.count] master weights, as grads and AdamW's two moments
    bf16* weights;       // their copy that computes, at the same offsets
    float* grads;
    float* m;
    float* v;
    ParamChunk* chunks; // the update's work list
    int64_t num_chunks;
    double* chunk_squares; // [num_chunks] scratch
    StepStats* stats;      // of the step under way
    PruningCount* pruning; // [L] of the step under way
    float* angles;         // [T, dh/2, 2] of RoPE
    Activations acts;
    ActivationSteps steps;
    Recompute recompute;
    bool cudnn;         // attention by cuDNN's kernels
    bool deterministic; // the same bits in every run
    void* scratch;      // of kernels, one at a time
    float* partial;     // of norms' weight gradients
    Matmul matmul;
    Matmul weight_matmul; // of weights' gradients
    cudaStream_t stream, weight_stream;
    cudaEvent_t weight_event;
    bool warm;             // model_add_gradients has run: kernels are loaded, products chosen
    cudaGraphExec_t graph; // what it queues from then on; NULL until it is captured,
    float graph_dloss;     // with this dloss
} Model;

// Elements behind the last tensor: products read the head, and write its gradient, in whole tiles of rows.
static int64_t model_tail(const Config* c) {
    return (matmul_padded(c->vocab_size) - c->vocab_size) * c->hidden_size;
}

// Rows of logits that are held at once: the whole [B, T, V] of a large vocabulary would dwarf everything
// else.
static int64_t model_logit_rows(int64_t rows, int64_t Vs) {
    int64_t most = ((int64_t)1 << 27) / Vs / 128 * 128; // 256 MiB
    return most < 128 ? (rows < 128 ? rows : 128) : rows < most ? rows : most;
}

static size_t model_scratch_bytes(const Model* model, int64_t B, int64_t T) {
    const Config* c = &model->config;
    int64_t NH = c->num_heads, dh = config_head_size(c);
    const size_t each[] = {model->cudnn ? attention_cudnn_workspace(B, T, NH, dh, model->deterministic)
                                        : attention_scratch_bytes(B, T, NH, dh),
                           forget_gate_scratch_bytes(B, T, NH), pruning_scratch_bytes(B, T, NH),
                           embedding_scratch_bytes(B * T, c->hidden_size)};
    size_t most = 0;
    for (size_t bytes : each)
        if (bytes > most) most = bytes;
    return most;
}

// Memory of everything but the activations, and of these.
static int64_t model_weights_bytes(const Config* c, const ParamTable* table) {
    return (table->count + model_tail(c)) * (int64_t)(4 * sizeof(float) + sizeof(bf16));
}

// Allocates what forward and backward passes over [B, T] tokens need, or only sums it up.
static int64_t model_plan_activations(Model* model, int64_t B, int64_t T, Recompute recompute,
                                      bool allocate) {
    const Config* c = &model->config;
    int64_t BT = B * T, L = c->num_hidden_layers, d = c->hidden_size, NH = c->num_heads,
            I = config_mlp_size(c);
    int64_t S = matmul_padded(model->table.proj.rows), Vs = matmul_padded(c->vocab_size);
    int64_t gated = config_has_gate(c), prunes = config_prunes(c),
            blocks = prunes * B * NH * ceil_div<int64_t>(T, ATTENTION_BLOCK);
    int64_t logit_rows = model_logit_rows(BT, Vs), bytes = 0;
#define ACTIVATION_PLAN(type, name, keep, count)                                                             \
    {                                                                                                        \
        bool kept = (int)recompute <= keep;                                                                  \
        int64_t size = (count) * (int64_t)sizeof(type) * (kept ? L : 1);                                     \
        bytes += (size + 511) / 512 * 512;                                                                   \
        model->steps.name = kept ? (count) : 0;                                                              \
        if (allocate) CUDA_CHECK(cudaMalloc((void**)&model->acts.name, (size_t)(size ? size : 1)));          \
    }
    ACTIVATIONS(ACTIVATION_PLAN)
    return bytes + (int64_t)model_scratch_bytes(model, B, T) +
           T * config_head_size(c) * (int64_t)sizeof(float);
}

static float* device_floats(int64_t count) {
    float* p;
    CUDA_CHECK(cudaMalloc((void**)&p, (size_t)count * sizeof(float)));
    CUDA_CHECK(cudaMemset(p, 0, (size_t)count * sizeof(float)));
    return p;
}

// A model without any memory, which is enough to plan it. `cudnn`: attention by cuDNN's kernels. Without
// `deterministic`, what is fastest may be chosen by time.
static Model model_new(const Config* config, bool cudnn, bool deterministic) {
    Model model;
    memset(&model, 0, sizeof model);
    model.config = *config;
    model.table = params_build(config);
    model.cudnn = cudnn;
    model.deterministic = deterministic;
    return model;
}

const int64_t MODEL_WORKSPACE_BYTES = 2 * (int64_t)MATMUL_WORKSPACE; // of both streams' products

// The products of a stream, with their workspace.
static void products_init(Matmul* mm, bool deterministic) {
    void* workspace;
    CUDA_CHECK(cudaMalloc(&workspace, MATMUL_WORKSPACE));
    matmul_init(mm, workspace, !deterministic);
}
static void products_free(Matmul* mm) {
    cudaFree(mm->workspace);
    matmul_free(mm);
}

// Allocates parameters for inference; with `train` also gradients and AdamW's moments.
static void model_allocate_weights(Model* model, bool train) {
    int64_t count = model->table.count + model_tail(&model->config);
    model->params = device_floats(count);
    CUDA_CHECK(cudaMalloc((void**)&model->weights, (size_t)count * sizeof(bf16)));
    CUDA_CHECK(cudaMalloc((void**)&model->stats, sizeof(StepStats)));
    CUDA_CHECK(cudaStreamCreate(&model->stream));
    products_init(&model->matmul, model->deterministic);
    if (!train) return;

    CUDA_CHECK(cudaStreamCreate(&model->weight_stream));
    CUDA_CHECK(cudaEventCreateWithFlags(&model->weight_event, cudaEventDisableTiming));
    products_init(&model->weight_matmul, model->deterministic);
    model->grads = device_floats(count);
    model->m = device_floats(count);
    model->v = device_floats(count);
    size_t pruning_bytes = (size_t)model->config.num_hidden_layers * sizeof(PruningCount);
    CUDA_CHECK(cudaMalloc((void**)&model->pruning, pruning_bytes));
    CUDA_CHECK(cudaMemset(model->pruning, 0, pruning_bytes));
    model->num_chunks = param_chunks(NULL, &model->table, 0, model->table.count);
    size_t bytes = (size_t)model->num_chunks * sizeof(ParamChunk);
    ParamChunk* chunks = (ParamChunk*)xcalloc(1, bytes);
    param_chunks(chunks, &model->table, 0, model->table.count);
    CUDA_CHECK(cudaMalloc((void**)&model->chunks, bytes));
    CUDA_CHECK(cudaMalloc((void**)&model->chunk_squares, (size_t)model->num_chunks * sizeof(double)));
    CUDA_CHECK(cudaMemcpy(model->chunks, chunks, bytes, cudaMemcpyHostToDevice));
    free(chunks);
}

static void model_allocate_activations(Model* model, int64_t B, int64_t T, Recompute recompute) {
    int64_t dh = config_head_size(&model->config);
    model->B = B;
    model->T = T;
    model->S = matmul_padded(model->table.proj.rows);
    model->Vs = matmul_padded(model->config.vocab_size);
    model->recompute = recompute;
    model_plan_activations(model, B, T, recompute, true);
    CUDA_CHECK(cudaMalloc(&model->scratch, model_scratch_bytes(model, B, T)));
    CUDA_CHECK(cudaMalloc((void**)&model->partial, norm_partial_bytes()));
    model->angles = device_floats(T * dh);
    if (model->config.use_rope) rope_angles(model->angles, T, dh, model->config.rope_base, model->stream);
}

static void model_free(Model* model) {
#define ACTIVATION_FREE(type, name, keep, count) cudaFree(model->acts.name);
    ACTIVATIONS(ACTIVATION_FREE)
    void* const rest[] = {model->params,  model->weights, model->grads,         model->m,
                          model->v,       model->chunks,  model->stats,         model->angles,
                          model->scratch, model->partial, model->chunk_squares, model->pruning};
    for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++) cudaFree(rest[i]);
    if (model->graph) cudaGraphExecDestroy(model->graph);
    products_free(&model->matmul);
    cudaStreamDestroy(model->stream);
    if (model->grads) {
        products_free(&model->weight_matmul);
        cudaStreamDestroy(model->weight_stream);
        cudaEventDestroy(model->weight_event);
    }
    params_free(&model->table);
    memset(model, 0, sizeof *model);
}

// Master weights and moments from and to the host, in the table's layout.
static void model_upload(Model* model, const float* params, const float* m, const float* v) {
    size_t bytes = (size_t)model->table.count * sizeof(float);
    CUDA_CHECK(cudaMemcpy(model->params, params, bytes, cudaMemcpyHostToDevice));
    if (model->m) CUDA_CHECK(cudaMemcpy(model->m, m, bytes, cudaMemcpyHostToDevice));
    if (model->v) CUDA_CHECK(cudaMemcpy(model->v, v, bytes, cudaMemcpyHostToDevice));
    weights_copy(model->weights, model->params, model->table.count + model_tail(&model->config),
                 model->stream);
}

static void download(float* host, const float* device, int64_t count) {
    CUDA_CHECK(cudaMemcpy(host, device, (size_t)count * sizeof(float), cudaMemcpyDeviceToHost));
}

// A parameter of layer l in a buffer of the table's layout; NULL where the model has none.
template <class T> static inline T* param_at(const Model* model, T* buffer, ParamKind kind, int64_t l) {
    const Param* p = params_find(&model->table, kind, l);
    return p ? buffer + p->offset : NULL;
}

// Column `column` of a tensor with rows of proj's width, NULL where the model does not have it (-1).
static inline bf16* proj_column(bf16* proj, int64_t column) { return column < 0 ? NULL : proj + column; }

// Is there anything between attention and the output projection?
static inline bool model_gates_output(const Config* c) { return c->use_output_norm || c->use_output_gate; }

// The activations of layer l.
#define ACTIVATION_AT(type, name, keep, count) a.name = model->acts.name + l * model->steps.name;
static Activations model_layer(const Model* model, int64_t l) {
    Activations a;
    ACTIVATIONS(ACTIVATION_AT)
    if (!model_gates_output(&model->config)) a.y = a.o;
    return a;
}

// How q, k and v of layer l get from proj to attention.
static void model_head_paths(const Model* model, int64_t l, HeadPath paths[3]) {
    const ProjLayout* proj = &model->table.proj;
    Activations a = model_layer(model, l);
    memset(paths, 0, 3 * sizeof paths[0]);
    HeadPath *q = &paths[0], *k = &paths[1], *v = &paths[2];
    q->column = proj->q, k->column = proj->k, v->column = proj->v;
    q->shift = -1, k->shift = proj->k_shift, v->shift = proj->v_shift;
    q->weight = param_at(model, model->weights, P_Q_NORM, l),
    q->dweight = param_at(model, model->grads, P_Q_NORM, l);
    k->weight = param_at(model, model->weights, P_K_NORM, l),
    k->dweight = param_at(model, model->grads, P_K_NORM, l);
    q->rope = k->rope = model->config.use_rope;
    q->out = a.q, k->out = a.k, v->out = a.v;
    q->rstd = a.q_rstd, k->rstd = a.k_rstd;
    q->dout = a.dq, k->dout = a.dk, v->dout = a.dv;
}

// ----------------------------------------------------------------------------
// phases: how long each part of a step takes, for --bench. Off, it costs a comparison.

enum Phase {
    PHASE_EMBEDDING,
    PHASE_NORM,
    PHASE_MATMUL,
    PHASE_QKV,
    PHASE_ATTENTION,
    PHASE_OUTPUT_GATE,
    PHASE_SWIGLU,
    PHASE_HEAD,
    PHASE_UPDATE,
    NUM_PHASES
};
static const char* const phase_names[NUM_PHASES] = {"embedding",       "RMSNorm",
                                                    "matrix products", "shift, QK norm, RoPE, gate",
                                                    "attention",       "output norm and gate",
                                                    "SwiGLU",          "head and loss",
                                                    "norm and AdamW"};

enum { PHASE_MAX_MARKS = 16384 };
static struct {
    bool on, backward;
    int count;
    cudaEvent_t event[PHASE_MAX_MARKS];
    int phase[PHASE_MAX_MARKS]; // what ended there: a Phase, + NUM_PHASES in the backward pass; -1 starts
} phases;

// Marks the end of `phase` on the stream.
static void phase_end(const Model* model, int phase) {
    if (!phases.on || phases.count == PHASE_MAX_MARKS) return;
    int i = phases.count++;
    if (!phases.event[i]) CUDA_CHECK(cudaEventCreate(&phases.event[i]));
    CUDA_CHECK(cudaEventRecord(phases.event[i], model->stream));
    phases.phase[i] = phase < 0 ? -1 : phase + (phases.backward ? NUM_PHASES : 0);
}

// ----------------------------------------------------------------------------
// forward

// One block: acts.x of layer l -> that of the next one, keeping what the backward pass needs. When that pass
// does it `again`, nothing is counted.
static void block_forward(Model* model, int64_t l, bool again) {
    const Config* config = &model->config;
    const ProjLayout* layout = &model->table.proj;
    int64_t B = model->B, T = model->T, BT = B * T, L = config->num_hidden_layers, d = config->hidden_size;
    int64_t NH = config->num_heads, dh = d / NH, I = config_mlp_size(config), R = layout->rows, S = model->S;
    int64_t weight_step = config->qk_norm_share ? 0 : dh;
    cudaStream_t stream = model->stream;
    Matmul* mm = &model->matmul;
    const bf16* w = model->weights;
    Activations a = model_layer(model, l);
    bf16* x_next = l + 1 < L ? a.x + BT * d : a.x_last;
    double* c = config_has_gate(config) ? a.c : NULL;
    AttentionBounds bounds = {a.first_key_block, a.last_query_block, a.head_order};
    bool prunes = config_prunes(config);
    HeadPath paths[3];
    model_head_paths(model, l, paths);

    rmsnorm_forward(a.attn_in, a.attn_rstd, NULL, a.x, NULL, param_at(model, w, P_ATTN_NORM, l), BT, d,
                    config->norm_eps, stream);
    phase_end(model, PHASE_NORM);
    // S rows of weights, R of them the projection's: the others belong to the tensors behind it. What they
    // give lands in padding columns, which nobody reads, and whose gradient is zero.
    linear_forward<bf16>(mm, a.proj, a.attn_in, param_at(model, w, P_Q_PROJ, l), NULL, BT, S, d, S, d,
                         stream);
    phase_end(model, PHASE_MATMUL);
    qkv_forward(paths, a.proj, model->angles, B, T, NH, dh, R, S, weight_step, stream);
    if (c)
        forget_gate_forward(c, proj_column(a.proj, layout->fgate),
                            param_at(model, model->params, P_FGATE_BIAS, l), model->scratch, B, T, NH, S,
                            stream);
    if (prunes)
        pruning_bounds(&bounds, a.score_limits, again ? NULL : model->pruning + l, c, a.q, a.k,
                       paths[0].weight, paths[1].weight, weight_step, config->log_pruning_tolerance,
                       model->scratch, B, T, NH, dh, stream);
    phase_end(model, PHASE_QKV);
    if (model->cudnn)
        attention_cudnn_forward(a.o, a.lse, model->scratch, a.q, a.k, a.v, B, T, NH, dh, stream);
    else
        attention_forward(a.o, a.lse, model->scratch, a.q, a.k, a.v, c, prunes ? &bounds : NULL, B, T, NH, dh,
                          stream);
    phase_end(model, PHASE_ATTENTION);
    if (model_gates_output(config))
        output_gate_forward(a.y, a.o_rstd, a.o, param_at(model, w, P_OUTPUT_NORM, l),
                            proj_column(a.proj, layout->ogate), B, T, NH, dh, S, config->norm_eps, stream);
    phase_end(model, PHASE_OUTPUT_GATE);
    linear_forward<bf16>(mm, a.x_mid, a.y, param_at(model, w, P_O_PROJ, l), a.x, BT, d, d, d, d, stream);
    phase_end(model, PHASE_MATMUL);

    rmsnorm_forward(a.mlp_in, a.mlp_rstd, NULL, a.x_mid, NULL, param_at(model, w, P_MLP_NORM, l), BT, d,
                    config->norm_eps, stream);
    phase_end(model, PHASE_NORM);
    linear_forward<bf16>(mm, a.gu, a.mlp_in, param_at(model, w, P_GATE_PROJ, l), NULL, BT, 2 * I, d, 2 * I, d,
                         stream);
    phase_end(model, PHASE_MATMUL);
    swiglu_forward(a.s, a.gu, BT, I, stream);
    phase_end(model, PHASE_SWIGLU);
    linear_forward<bf16>(mm, x_next, a.s, param_at(model, w, P_DOWN_PROJ, l), a.x_mid, BT, d, I, d, I,
                         stream);
    phase_end(model, PHASE_MATMUL);
}

// Before the first pass of an optimizer step: nothing is counted yet.
static void model_begin_step(Model* model) {
    size_t bytes = (size_t)model->config.num_hidden_layers * sizeof(PruningCount);
    CUDA_CHECK(cudaMemsetAsync(model->stats, 0, sizeof(StepStats), model->stream));
    CUDA_CHECK(cudaMemsetAsync(model->pruning, 0, bytes, model->stream));
}

// acts.inputs [B,T] -> acts.head_in [B,T,d]
static void model_forward(Model* model) {
    const Config* config = &model->config;
    Activations* a = &model->acts;
    int64_t BT = model->B * model->T, d = config->hidden_size;
    phases.backward = false;
    phase_end(model, -1);
    embedding_forward(a->x, param_at(model, model->weights, P_EMBEDDINGS, 0), a->inputs, BT, d,
                      model->stream);
    phase_end(model, PHASE_EMBEDDING);
    for (int64_t l = 0; l < config->num_hidden_layers; l++) block_forward(model, l, false);
    rmsnorm_forward(a->head_in, a->rstd, NULL, a->x_last, NULL, param_at(model, model->weights, P_NORM, 0),
                    BT, d, config->norm_eps, model->stream);
    phase_end(model, PHASE_NORM);
}

// Head and cross entropy of the last forward pass, in chunks of rows: fills acts.losses [B,T] and adds their
// sum to the step's. With `train` also acts.dbranch, the gradient of head_in, and the head's; dloss is the
// weight of a token's loss. all_logits, on the host, takes [B,T,V] logits; NULL for none.
static void model_loss(Model* model, float dloss, bool train, float* all_logits) {
    Activations* a = &model->acts;
    int64_t BT = model->B * model->T, d = model->config.hidden_size, V = model->config.vocab_size,
            Vs = model->Vs;
    int64_t chunk = model_logit_rows(BT, Vs);
    const bf16* head = param_at(model, model->weights, P_LM_HEAD, 0);
    for (int64_t t = 0; t < BT; t += chunk) {
        int64_t rows = BT - t < chunk ? BT - t : chunk;
        linear_forward<bf16>(&model->matmul, a->logits, a->head_in + t * d, head, NULL, rows, Vs, d, Vs, d,
                             model->stream);
        if (all_logits) {
            bf16* host = (bf16*)xcalloc((size_t)(rows * Vs), sizeof(bf16));
            CUDA_CHECK(cudaMemcpyAsync(host, a->logits, (size_t)(rows * Vs) * sizeof(bf16),
                                       cudaMemcpyDeviceToHost, model->stream));
            CUDA_CHECK(cudaStreamSynchronize(model->stream));
            for (int64_t i = 0; i < rows * V; i++)
                all_logits[t * V + i] = __bfloat162float(host[i / V * Vs + i % V]);
            free(host);
        }
        classifier(a->losses + t, a->logits, a->targets + t, rows, V, Vs, dloss, train, model->stream);
        if (train)
            linear_backward(&model->matmul, a->dbranch + t * d, param_at(model, model->grads, P_LM_HEAD, 0),
                            a->logits, a->head_in + t * d, head, rows, Vs, d, Vs, d, model->stream);
    }
    loss_add(model->stats, a->losses, BT, model->stream);
    phase_end(model, PHASE_HEAD);
}

// ----------------------------------------------------------------------------
// backward: adds to all gradients, after model_loss with `train`
//
// What a linear layer read is made again by the backward kernel of whatever made it (s by SwiGLU's, y by the
// output gate's, attn_in and mlp_in by the norms'), so that its weight's gradient comes after that kernel.
//
// The gradients of the blocks' matrices are products on a stream of their own: they take the multiprocessors
// that the ends of other kernels leave idle. To tell phases apart they are queued with the rest.

// linear_backward_weight behind what is queued now. Until weight_gradients_wait the main stream overwrites
// neither dout nor x, and adds to none of dw's N rows; of the fused projection, S rows reach into the tensors
// behind it.
static void weight_gradient(Model* model, float* dw, const bf16* dout, const bf16* x, int64_t M, int64_t N,
                            int64_t K, int64_t out_stride, int64_t x_stride) {
    cudaStream_t stream = phases.on ? model->stream : model->weight_stream;
    CUDA_CHECK(cudaEventRecord(model->weight_event, model->stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream, model->weight_event, 0));
    linear_backward_weight(&model->weight_matmul, dw, dout, x, M, N, K, out_stride, x_stride, stream);
}

// What the main stream gets from now on waits for the weights' gradients that are under way.
static void weight_gradients_wait(Model* model) {
    CUDA_CHECK(cudaEventRecord(model->weight_event, model->weight_stream));
    CUDA_CHECK(cudaStreamWaitEvent(model->stream, model->weight_event, 0));
}

static void block_backward(Model* model, int64_t l) {
    const Config* config = &model->config;
    const ProjLayout* layout = &model->table.proj;
    int64_t B = model->B, T = model->T, BT = B * T, d = config->hidden_size;
    int64_t NH = config->num_heads, dh = d / NH, I = config_mlp_size(config), R = layout->rows, S = model->S;
    int64_t weight_step = config->qk_norm_share ? 0 : dh;
    cudaStream_t stream = model->stream;
    Matmul* mm = &model->matmul;
    const bf16* w = model->weights;
    float *g = model->grads, *partial = model->partial;
    Activations a = model_layer(model, l);
    double* c = config_has_gate(config) ? a.c : NULL;
    AttentionBounds bounds = {a.first_key_block, a.last_query_block, a.head_order};
    bool prunes = config_prunes(config), gate_learns = c && config->fgate_type != GATE_FIXED;
    HeadPath paths[3];
    model_head_paths(model, l, paths);

    if (model->recompute == RECOMPUTE_BLOCK) {
        phases.backward = false; // counts as forward work
        block_forward(model, l, true);
        phases.backward = true;
    }
    linear_backward_input(mm, a.ds, a.dx, param_at(model, w, P_DOWN_PROJ, l), BT, d, I, d, I, stream);
    phase_end(model, PHASE_MATMUL);
    swiglu_backward(a.dgu, a.s, a.ds, a.gu, BT, I, stream);
    phase_end(model, PHASE_SWIGLU);
    weight_gradient(model, param_at(model, g, P_DOWN_PROJ, l), a.dx, a.s, BT, d, I, d, I);
    linear_backward_input(mm, a.dbranch, a.dgu, param_at(model, w, P_GATE_PROJ, l), BT, 2 * I, d, 2 * I, d,
                          stream);
    phase_end(model, PHASE_MATMUL);
    weight_gradients_wait(model); // down_proj's reads dx, which is overwritten now
    rmsnorm_backward(a.dx, param_at(model, g, P_MLP_NORM, l), a.mlp_in, a.dx, a.dbranch, a.x_mid,
                     param_at(model, w, P_MLP_NORM, l), a.mlp_rstd, partial, BT, d, stream);
    phase_end(model, PHASE_NORM);
    weight_gradient(model, param_at(model, g, P_GATE_PROJ, l), a.dgu, a.mlp_in, BT, 2 * I, d, 2 * I, d);

    linear_backward_input(mm, a.dbranch, a.dx, param_at(model, w, P_O_PROJ, l), BT, d, d, d, d, stream);
    phase_end(model, PHASE_MATMUL);
    if (model_gates_output(config)) // dbranch becomes the gradient of o
        output_gate_backward(a.dbranch, param_at(model, g, P_OUTPUT_NORM, l),
                             proj_column(a.dproj, layout->ogate), a.delta, a.y, a.dbranch, a.o,
                             param_at(model, w, P_OUTPUT_NORM, l), a.o_rstd,
                             proj_column(a.proj, layout->ogate), partial, B, T, NH, dh, S, stream);
    phase_end(model, PHASE_OUTPUT_GATE);
    weight_gradient(model, param_at(model, g, P_O_PROJ, l), a.dx, a.y, BT, d, d, d, d);
    phase_end(model, PHASE_MATMUL);
    if (model->recompute == RECOMPUTE_QKV)
        qkv_forward(paths, a.proj, model->angles, B, T, NH, dh, R, S, weight_step, stream);
    if (prunes)
        pruning_backward_bounds(&bounds, model->pruning + l, c, a.lse, a.score_limits,
                                config->log_pruning_tolerance, model->scratch, B, T, NH, stream);
    phase_end(model, PHASE_QKV);
    if (model->cudnn)
        attention_cudnn_backward(a.dq, a.dk, a.dv, model->scratch, a.dbranch, a.q, a.k, a.v, a.o, a.lse,
                                 model->deterministic, B, T, NH, dh, stream);
    else
        attention_backward(a.dq, a.dk, a.dv, gate_learns ? a.dc : NULL, model->scratch, a.dbranch, a.q, a.k,
                           a.v, a.o, a.lse, model_gates_output(config) ? a.delta : NULL, c,
                           prunes ? &bounds : NULL, model->deterministic, B, T, NH, dh, stream);
    phase_end(model, PHASE_ATTENTION);
    if (gate_learns)
        forget_gate_backward(proj_column(a.dproj, layout->fgate), param_at(model, g, P_FGATE_BIAS, l), a.dc,
                             proj_column(a.proj, layout->fgate),
                             param_at(model, model->params, P_FGATE_BIAS, l), model->scratch, B, T, NH, S,
                             stream);
    qkv_backward(paths, a.dproj, a.proj, model->angles, partial, B, T, NH, dh, R, S, weight_step, stream);
    phase_end(model, PHASE_QKV);
    linear_backward_input(mm, a.dbranch, a.dproj, param_at(model, w, P_Q_PROJ, l), BT, S, d, S, d, stream);
    phase_end(model, PHASE_MATMUL);
    weight_gradients_wait(model); // o_proj's reads dx, which is overwritten now
    rmsnorm_backward(a.dx, param_at(model, g, P_ATTN_NORM, l), a.attn_in, a.dx, a.dbranch, a.x,
                     param_at(model, w, P_ATTN_NORM, l), a.attn_rstd, partial, BT, d, stream);
    phase_end(model, PHASE_NORM);
    weight_gradient(model, param_at(model, g, P_Q_PROJ, l), a.dproj, a.attn_in, BT, S, d, S, d);
    if (model->recompute == RECOMPUTE_BLOCK) weight_gradients_wait(model); // the block before is made again
    phase_end(model, PHASE_MATMUL);
}

static void model_backward(Model* model) {
    Activations* a = &model->acts;
    int64_t BT = model->B * model->T, d = model->config.hidden_size;
    phases.backward = true;
    rmsnorm_backward(a->dx, param_at(model, model->grads, P_NORM, 0), NULL, NULL, a->dbranch, a->x_last,
                     param_at(model, model->weights, P_NORM, 0), a->rstd, model->partial, BT, d,
                     model->stream);
    phase_end(model, PHASE_NORM);
    for (int64_t l = model->config.num_hidden_layers - 1; l >= 0; l--) block_backward(model, l);
    embedding_backward(param_at(model, model->grads, P_EMBEDDINGS, 0), a->dx, a->inputs, model->scratch, BT,
                       d, model->config.vocab_size, model->stream);
    phase_end(model, PHASE_EMBEDDING);
    weight_gradients_wait(model);
}

// Adds the gradients and the loss of acts.inputs and acts.targets [B,T] to the step's: forward, model_loss
// and backward. From the second call on it is one graph, in which kernels follow one another sooner than on a
// stream; another dloss makes another graph.
static void model_add_gradients(Model* model, float dloss) {
    bool graph = model->warm && !phases.on, capture = graph && (!model->graph || model->graph_dloss != dloss);
    if (capture) CUDA_CHECK(cudaStreamBeginCapture(model->stream, cudaStreamCaptureModeThreadLocal));
    if (capture || !graph) {
        model_forward(model);
        model_loss(model, dloss, true, NULL);
        model_backward(model);
        model->warm = true;
    }
    if (capture) {
        cudaGraph_t captured;
        CUDA_CHECK(cudaStreamEndCapture(model->stream, &captured));
        if (model->graph) CUDA_CHECK(cudaGraphExecDestroy(model->graph));
        CUDA_CHECK(cudaGraphInstantiate(&model->graph, captured, 0));
        CUDA_CHECK(cudaGraphDestroy(captured));
        model->graph_dloss = dloss;
    }
    if (graph) CUDA_CHECK(cudaGraphLaunch(model->graph, model->stream));
}

// ----------------------------------------------------------------------------
// update: norm, clipping and AdamW without the host; zeroes the gradients

static void model_update(Model* model, const AdamWParams* adamw, double grad_clip) {
    Options o; // until adamw_update takes AdamWParams
    o.beta1 = adamw->beta1, o.beta2 = adamw->beta2, o.adam_eps = adamw->eps,
    o.weight_decay = adamw->weight_decay;
    global_norm(model->stats, model->chunk_squares, model->grads, model->chunks, model->num_chunks,
                model->stream);
    global_norm_finish(model->stats, grad_clip, model->stream);
    adamw_update(model->weights, model->params, model->grads, model->m, model->v, model->chunks,
                 model->num_chunks, model->stats, adamw->lr, adamw->step, true, &o, model->stream);
    phase_end(model, PHASE_UPDATE);
}

// The first tensor of a device buffer with an element that is not finite; NULL if there is none.
static const char* model_first_not_finite(const Model* model, const float* device) {
    float* host = (float*)xcalloc((size_t)model->table.count, sizeof(float));
    download(host, device, model->table.count);
    const char* name = params_first_not_finite(&model->table, host, sizeof(float));
    free(host);
    return name;
}

// ----------------------------------------------------------------------------
// generation: one token at a time, with keys, values and gate sums of the past kept

typedef struct {
    int64_t length, capacity; // tokens held, and room for
    bf16 *k, *v;              // [L, capacity, d] as attention reads them
    double* c;                // [L, capacity, NH]; entries never change, as only differences of c matter
    bf16* proj;               // [L, 2, S] the last token's row of proj, for the shifts, and the new one's
    float* angles;            // [capacity, dh/2, 2] of RoPE
    bf16* row;                // scratch of one token
    float* rstd;              // that nobody reads
    int32_t* token;
} Cache;

static bf16* device_bf16s(int64_t count) {
    bf16* p;
    CUDA_CHECK(cudaMalloc((void**)&p, (size_t)count * sizeof(bf16)));
    CUDA_CHECK(cudaMemset(p, 0, (size_t)count * sizeof(bf16)));
    return p;
}

static Cache cache_new(const Model* model, int64_t capacity) {
    const Config* config = &model->config;
    int64_t L = config->num_hidden_layers, d = config->hidden_size, NH = config->num_heads;
    int64_t I = config_mlp_size(config), Vs = matmul_padded(config->vocab_size);
    Cache cache;
    memset(&cache, 0, sizeof cache);
    cache.capacity = capacity;
    cache.k = device_bf16s(L * capacity * d);
    cache.v = device_bf16s(L * capacity * d);
    CUDA_CHECK(cudaMalloc((void**)&cache.c, (size_t)(L * capacity * NH) * sizeof(double)));
    cache.proj = device_bf16s(L * 2 * matmul_padded(model->table.proj.rows));
    cache.angles = device_floats(capacity * config_head_size(config));
    cache.row = device_bf16s(10 * d + 3 * I + Vs);
    cache.rstd = device_floats(6 * NH);
    CUDA_CHECK(cudaMalloc((void**)&cache.token, sizeof(int32_t)));
    if (config->use_rope)
        rope_angles(cache.angles, capacity, config_head_size(config), config->rope_base, model->stream);
    return cache;
}

static void cache_free(Cache* cache) {
    void* const all[] = {cache->k,      cache->v,   cache->c,    cache->proj,
                         cache->angles, cache->row, cache->rstd, cache->token};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) CUDA_CHECK(cudaFree(all[i]));
}

static void copy_row(bf16* to, const bf16* from, int64_t n, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)n * sizeof(bf16), cudaMemcpyDeviceToDevice, stream));
}

// Takes one more token in and returns the logits [V] of the one after it, on the device: what model_forward
// computes for the same tokens, but for rounding.
static const bf16* model_decode(Model* model, Cache* cache, int32_t token) {
    const Config* config = &model->config;
    const ProjLayout* layout = &model->table.proj;
    int64_t L = config->num_hidden_layers, d = config->hidden_size, NH = config->num_heads, dh = d / NH;
    int64_t I = config_mlp_size(config), R = layout->rows, S = matmul_padded(R), t = cache->length++;
    int64_t Vs = matmul_padded(config->vocab_size), weight_step = config->qk_norm_share ? 0 : dh;
    cudaStream_t stream = model->stream;
    Matmul* mm = &model->matmul;
    const bf16* w = model->weights;
    bf16 *x = cache->row, *normed = x + d, *heads = normed + d, *o = heads + 6 * d,
         *y = o + d; // heads: q, k, v [2,d]
    bf16 *gu = y + d, *s = gu + 2 * I, *logits = s + I;
    float* rstd = cache->rstd;
    if (cache->length > cache->capacity) die("the cache of %lld tokens is full", (long long)cache->capacity);
    CUDA_CHECK(cudaMemcpyAsync(cache->token, &token, sizeof token, cudaMemcpyHostToDevice, stream));

    embedding_forward(x, param_at(model, w, P_EMBEDDINGS, 0), cache->token, 1, d, stream);
    for (int64_t l = 0; l < L; l++) {
        bf16 *l_k = cache->k + l * cache->capacity * d, *l_v = cache->v + l * cache->capacity * d;
        bf16 *l_last = cache->proj + l * 2 * S, *l_proj = l_last + S;
        double* l_c = config_has_gate(config) ? cache->c + l * cache->capacity * NH : NULL;
        int64_t pair = t ? 2 : 1; // the last token goes along for the shifts, but for the first one
        HeadPath paths[3];
        model_head_paths(model, l, paths);
        for (int p = 0; p < 3; p++)
            paths[p].out = heads + (2 * p + 2 - pair) * d, paths[p].rstd = rstd + 2 * p * NH;

        rmsnorm_forward(normed, rstd, NULL, x, NULL, param_at(model, w, P_ATTN_NORM, l), 1, d,
                        config->norm_eps, stream);
        linear_forward<bf16>(mm, l_proj, normed, param_at(model, w, P_Q_PROJ, l), NULL, 1, S, d, S, d,
                             stream);
        qkv_forward(paths, l_proj - (pair - 1) * S, cache->angles + (t + 1 - pair) * dh, 1, pair, NH, dh, R,
                    S, weight_step, stream);
        copy_row(l_k + t * d, heads + 3 * d, d, stream);
        copy_row(l_v + t * d, heads + 5 * d, d, stream);
        if (l_c)
            forget_gate_decode(l_c, proj_column(l_proj, layout->fgate),
                               param_at(model, model->params, P_FGATE_BIAS, l), t, NH, stream);
        attention_decode(o, heads + d, l_k, l_v, l_c, t + 1, NH, dh, stream);
        output_gate_forward(y, rstd, o, param_at(model, w, P_OUTPUT_NORM, l),
                            proj_column(l_proj, layout->ogate), 1, 1, NH, dh, S, config->norm_eps, stream);
        linear_forward<bf16>(mm, x, y, param_at(model, w, P_O_PROJ, l), x, 1, d, d, d, d, stream);
        copy_row(l_last, l_proj, S, stream);

        rmsnorm_forward(normed, rstd, NULL, x, NULL, param_at(model, w, P_MLP_NORM, l), 1, d,
                        config->norm_eps, stream);
        linear_forward<bf16>(mm, gu, normed, param_at(model, w, P_GATE_PROJ, l), NULL, 1, 2 * I, d, 2 * I, d,
                             stream);
        swiglu_forward(s, gu, 1, I, stream);
        linear_forward<bf16>(mm, x, s, param_at(model, w, P_DOWN_PROJ, l), x, 1, d, I, d, I, stream);
    }
    rmsnorm_forward(normed, rstd, NULL, x, NULL, param_at(model, w, P_NORM, 0), 1, d, config->norm_eps,
                    stream);
    linear_forward<bf16>(mm, logits, normed, param_at(model, w, P_LM_HEAD, 0), NULL, 1, Vs, d, Vs, d, stream);
    return logits;
}

#ifndef TESTING
// ----------------------------------------------------------------------------
// batches: two pinned buffers, so that the host fills one while the other is copied to the device

typedef struct {
    int32_t *inputs[2], *targets[2]; // [B,T]
    cudaEvent_t copied[2];
    int next;
} DataPrefetcher;

static DataPrefetcher prefetcher_new(const Model* model) {
    DataPrefetcher p;
    size_t bytes = (size_t)(model->B * model->T) * sizeof(int32_t);
    p.next = 0;
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost((void**)&p.inputs[i], bytes));
        CUDA_CHECK(cudaMallocHost((void**)&p.targets[i], bytes));
        CUDA_CHECK(cudaEventCreateWithFlags(&p.copied[i], cudaEventDisableTiming));
    }
    return p;
}

static void prefetcher_free(DataPrefetcher* p) {
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(p->inputs[i]);
        cudaFreeHost(p->targets[i]);
        cudaEventDestroy(p->copied[i]);
    }
}

// Queues the copy of the next batch into acts.inputs and acts.targets; data as in batch_read.
static void prefetcher_next(DataPrefetcher* p, Model* model, DataLoader* data) {
    int i = p->next;
    int64_t BT = model->B * model->T;
    size_t bytes = (size_t)BT * sizeof(int32_t);
    p->next = 1 - i;
    CUDA_CHECK(cudaEventSynchronize(p->copied[i]));
    batch_read(p->inputs[i], p->targets[i], data, BT, model->config.vocab_size);
    CUDA_CHECK(
        cudaMemcpyAsync(model->acts.inputs, p->inputs[i], bytes, cudaMemcpyHostToDevice, model->stream));
    CUDA_CHECK(
        cudaMemcpyAsync(model->acts.targets, p->targets[i], bytes, cudaMemcpyHostToDevice, model->stream));
    CUDA_CHECK(cudaEventRecord(p->copied[i], model->stream));
}

// ----------------------------------------------------------------------------
// memory: which level of recomputation fits

typedef struct {
    Device device;
    Model model;        // without memory
    int64_t free_bytes; // on the device
    int64_t room;       // for activations
    int recompute;      // --recompute, or the first level whose activations fit; -1: none fits
} MemoryPlan;

// Dies where the kernels do not support the model.
static void check(const Run* run) {
    const Config* c = &run->config;
    if (c->hidden_size % 8 != 0 || config_mlp_size(c) % 8 != 0)
        die("on the GPU hidden_size and intermediate_size are multiples of 8, not %lld and %lld",
            (long long)c->hidden_size, (long long)config_mlp_size(c));
    bool cudnn = run->options.attention == ATTENTION_CUDNN;
    if (cudnn && config_has_gate(c))
        die("--attention cudnn: cuDNN has no forget gate: use --attention fox, or a transformer- model");
    if (!cudnn) attention_check(run->micro_batch, run->options.seq_len, c->num_heads, config_head_size(c));
}

static bool activations_fit(MemoryPlan* plan, const Run* run, int64_t B, int recompute) {
    return model_plan_activations(&plan->model, B, run->options.seq_len, (Recompute)recompute, false) <=
           plan->room;
}

// Dies where the kernels do not support the model, or there is no GPU.
static MemoryPlan memory_plan(const Run* run) {
    const Options* o = &run->options;
    const int64_t reserve = (int64_t)768 << 20; // of cuBLAS, the driver and loaded kernels
    MemoryPlan plan;
    size_t free_bytes, all_bytes;
    check(run);
    plan.device = device_open(0);
    plan.model = model_new(&run->config, o->attention == ATTENTION_CUDNN, o->deterministic);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    plan.free_bytes = (int64_t)free_bytes;
    plan.room =
        plan.free_bytes - model_weights_bytes(&run->config, &run->table) - MODEL_WORKSPACE_BYTES - reserve;
    plan.recompute = -1;
    for (int i = RECOMPUTE_BLOCK; i >= RECOMPUTE_NONE; i--) {
        bool wanted = o->recompute == OPTION_UNSET || o->recompute == i;
        if (wanted && activations_fit(&plan, run, run->micro_batch, i)) plan.recompute = i;
    }
    return plan;
}

static void print_plan(const Run* run) {
    MemoryPlan plan = memory_plan(run);
    Recompute recompute = plan.recompute < 0 ? RECOMPUTE_BLOCK : (Recompute)plan.recompute;
    int64_t weights = model_weights_bytes(&run->config, &run->table);
    int64_t acts =
        model_plan_activations(&plan.model, run->micro_batch, run->options.seq_len, recompute, false);
    const MemoryRow rows[] = {{"weights, gradients, moments", weights},
                              {"activations", acts},
                              {"cuBLAS's workspaces", MODEL_WORKSPACE_BYTES}};
    run_print_plan(run, rows, 3);
    printf("%s: %.1f GiB; recompute %s\n", plan.device.name, (double)plan.device.memory / (1 << 30),
           plan.recompute < 0 ? "block is not enough" : option_recompute_names[recompute]);
    for (int i = RECOMPUTE_NONE; i <= RECOMPUTE_BLOCK; i++) {
        int64_t B = 0;
        while (B < run->batch_sequences && activations_fit(&plan, run, B + 1, i)) B++;
        printf("  --recompute %-6s largest micro-batch that fits: %lld sequences\n",
               option_recompute_names[i], (long long)B);
    }
    params_free(&plan.model.table);
}

// ----------------------------------------------------------------------------
// the trainer: what the run skeleton (llmc/run/train.h) needs of the model

// A step in flight: its results, which are copied to the host when it ends.
typedef struct {
    StepStats* stats;      // pinned
    PruningCount* pruning; // [L], pinned
    double* pruned;        // [L] fraction of attention's FLOPs
    cudaEvent_t done;
} QueuedStep;

enum { MAX_QUEUED = TRAINER_STEPS_IN_FLIGHT + 1 };

struct Engine {
    Model model;
    Device device;
    DataPrefetcher prefetcher;
    QueuedStep steps[MAX_QUEUED];     // step number i is in [i % MAX_QUEUED]
    int64_t num_queued, num_finished; // numbers of the next step to queue and to finish
};

static QueuedStep queued_step_new(const Model* model) {
    QueuedStep q;
    size_t L = (size_t)model->config.num_hidden_layers;
    CUDA_CHECK(cudaMallocHost((void**)&q.stats, sizeof(StepStats)));
    CUDA_CHECK(cudaMallocHost((void**)&q.pruning, L * sizeof(PruningCount)));
    CUDA_CHECK(cudaEventCreateWithFlags(&q.done, cudaEventDisableTiming));
    q.pruned = (double*)xcalloc(L, sizeof(double));
    return q;
}

static void queued_step_free(QueuedStep* q) {
    cudaFreeHost(q->stats);
    cudaFreeHost(q->pruning);
    cudaEventDestroy(q->done);
    free(q->pruned);
}

static Engine* engine_open(const Run* run, DeviceInfo* info) {
    Engine* e = (Engine*)xcalloc(1, sizeof *e);
    MemoryPlan plan = memory_plan(run);
    bool train = run->mode != RUN_GENERATE;
    e->device = plan.device;
    e->model = plan.model;
    if (train && plan.recompute < 0)
        die("%lld sequences of %lld tokens do not fit into the %.1f GiB that are free on %s: lower "
            "--micro-batch or --seq-len, or give --recompute block; --dry-run shows what fits",
            (long long)run->micro_batch, (long long)run->options.seq_len, (double)plan.free_bytes / (1 << 30),
            e->device.name);
    model_allocate_weights(&e->model, train);
    if (!train) return e;
    model_allocate_activations(&e->model, run->micro_batch, run->options.seq_len, (Recompute)plan.recompute);
    e->prefetcher = prefetcher_new(&e->model);
    for (int i = 0; i < MAX_QUEUED; i++) e->steps[i] = queued_step_new(&e->model);
    snprintf(info->text, sizeof info->text, "%s, compute capability %d.%d: attention by %s, recompute %s",
             e->device.name, e->device.compute_capability / 10, e->device.compute_capability % 10,
             e->model.cudnn ? "cuDNN" : attention_path(), option_recompute_names[plan.recompute]);
    info->peak_flops = e->device.peak_flops;
    return e;
}

static void engine_close(Engine* e) {
    if (e->model.grads) {
        prefetcher_free(&e->prefetcher);
        for (int i = 0; i < MAX_QUEUED; i++) queued_step_free(&e->steps[i]);
    }
    model_free(&e->model);
    free(e);
}

static CheckpointTensors engine_host_open(Engine* e, bool read) {
    int64_t count = e->model.table.count;
    float* host = (float*)xcalloc((size_t)(3 * count), sizeof(float));
    CheckpointTensors t = {host, host + count, host + 2 * count, sizeof(float)};
    if (read) {
        download(host, e->model.params, count);
        download(host + count, e->model.m, count);
        download(host + 2 * count, e->model.v, count);
    }
    return t;
}

static void engine_host_close(Engine* e, CheckpointTensors* t, bool write) {
    if (write) model_upload(&e->model, (const float*)t->w, (const float*)t->m, (const float*)t->v);
    free(t->w);
}

static void engine_load_batch(Engine* e, DataLoader* data) {
    prefetcher_next(&e->prefetcher, &e->model, data);
}

static void engine_begin_step(Engine* e) { model_begin_step(&e->model); }

static void engine_add_gradients(Engine* e, int64_t step_tokens) {
    model_add_gradients(&e->model, (float)(1 / (double)step_tokens));
}

// Queues the update, and the copy of the step's results to the host.
static void engine_update(Engine* e, const AdamWParams* adamw, double grad_clip) {
    Model* model = &e->model;
    QueuedStep* q = &e->steps[e->num_queued++ % MAX_QUEUED];
    size_t bytes = (size_t)model->config.num_hidden_layers * sizeof(PruningCount);
    model_update(model, adamw, grad_clip);
    CUDA_CHECK(
        cudaMemcpyAsync(q->stats, model->stats, sizeof(StepStats), cudaMemcpyDeviceToHost, model->stream));
    CUDA_CHECK(cudaMemcpyAsync(q->pruning, model->pruning, bytes, cudaMemcpyDeviceToHost, model->stream));
    CUDA_CHECK(cudaEventRecord(q->done, model->stream));
}

static bool engine_finish_step(Engine* e, LogStep* line) {
    QueuedStep* q = &e->steps[e->num_finished++ % MAX_QUEUED];
    CUDA_CHECK(cudaEventSynchronize(q->done));
    line->loss = q->stats->loss / (double)line->step_tokens;
    line->grad_norm = q->stats->norm;
    line->num_layers = config_prunes(&e->model.config) ? (int)e->model.config.num_hidden_layers : 0;
    line->pruned = q->pruned;
    for (int l = 0; l < line->num_layers; l++) q->pruned[l] = pruning_share(&q->pruning[l]);
    return q->stats->finite;
}

static const char* engine_first_not_finite(Engine* e, bool gradients) {
    return model_first_not_finite(&e->model, gradients ? e->model.grads : e->model.params);
}

static void engine_evaluate(Engine* e, const PassResults* out) {
    Model* model = &e->model;
    int64_t BT = model->B * model->T;
    model_forward(model);
    model_loss(model, (float)(1 / (double)BT), out->grads != NULL, (float*)out->logits);
    if (out->grads) model_backward(model);
    CUDA_CHECK(cudaStreamSynchronize(model->stream));
    download((float*)out->losses, model->acts.losses, BT);
    if (out->grads) download((float*)out->grads, model->grads, model->table.count);
}

// ----------------------------------------------------------------------------
// --bench

// The share of attention's FLOPs that the last step pruned, over all layers.
static double model_pruned_share(const Model* model) {
    int64_t L = model->config.num_hidden_layers;
    PruningCount* counts = (PruningCount*)xcalloc((size_t)L, sizeof(PruningCount));
    double share = 0;
    CUDA_CHECK(cudaMemcpy(counts, model->pruning, (size_t)L * sizeof(PruningCount), cudaMemcpyDeviceToHost));
    for (int64_t l = 0; l < L; l++) share += pruning_share(&counts[l]) / (double)L;
    free(counts);
    return share;
}

// Milliseconds: of forward and backward and of a whole step; and of each phase, forward then backward.
typedef struct {
    double forward_backward, step, phases[2 * NUM_PHASES];
} BenchTimes;

// Runs two steps to warm up, n steps timed as a whole, and n steps timed by phase, on random tokens.
static BenchTimes bench_measure(Engine* e, const Run* run) {
    Model* model = &e->model;
    int64_t n = run->options.bench;
    BenchTimes times;
    cudaEvent_t event[3];
    memset(&times, 0, sizeof times);
    for (int i = 0; i < 3; i++) CUDA_CHECK(cudaEventCreate(&event[i]));
    for (int64_t step = -2; step < 2 * n; step++) {
        AdamWParams adamw = options_adamw(&run->options, 1e-4, step + 3);
        engine_load_batch(e, NULL);
        phases.on = step >= n;
        phases.count = 0;
        model_begin_step(model);
        CUDA_CHECK(cudaEventRecord(event[0], model->stream));
        engine_add_gradients(e, model->B * model->T);
        CUDA_CHECK(cudaEventRecord(event[1], model->stream));
        model_update(model, &adamw, run->options.grad_clip);
        CUDA_CHECK(cudaEventRecord(event[2], model->stream));
        CUDA_CHECK(cudaStreamSynchronize(model->stream));
        float elapsed;
        if (step >= 0 && !phases.on) {
            CUDA_CHECK(cudaEventElapsedTime(&elapsed, event[0], event[1]));
            times.forward_backward += elapsed / (double)n;
            CUDA_CHECK(cudaEventElapsedTime(&elapsed, event[0], event[2]));
            times.step += elapsed / (double)n;
        }
        for (int i = 1; i < phases.count; i++) {
            CUDA_CHECK(cudaEventElapsedTime(&elapsed, phases.event[i - 1], phases.event[i]));
            times.phases[phases.phase[i]] += elapsed / (double)n;
        }
    }
    for (int i = 0; i < 3; i++) CUDA_CHECK(cudaEventDestroy(event[i]));
    return times;
}

static void bench_print_rate(const Engine* e, const Run* run, const char* what, double ms, double pruned) {
    double rate = 1e3 * (double)(e->model.B * e->model.T) / ms, flops = run_flops_per_token(run);
    double executed = flops - pruned * run_attention_flops_per_token(run), peak = e->device.peak_flops;
    printf("  %-28s %10.2f ms %10.0f tokens/s %8.1f TFLOP/s of the model", what, ms, rate,
           1e-12 * rate * flops);
    if (peak > 0) printf("  %4.1f%% MFU", 100 * rate * flops / peak);
    if (peak > 0 && config_prunes(&e->model.config))
        printf(" (%4.1f%% executed)", 100 * rate * executed / peak);
    printf("\n");
}

static void engine_bench(Engine* e, const Run* run) {
    const Model* model = &e->model;
    BenchTimes times = bench_measure(e, run);
    double total = 0, pruned = model_pruned_share(model);
    size_t free_bytes, all_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    for (int i = 0; i < 2 * NUM_PHASES; i++) total += times.phases[i];
    printf("%lld steps of %lld x %lld tokens\n", (long long)run->options.bench, (long long)model->B,
           (long long)model->T);
    printf("  %-28s %10s %10s\n", "milliseconds, in sequence", "forward", "backward");
    for (int i = 0; i < NUM_PHASES; i++)
        printf("  %-28s %10.2f %10.2f  %5.1f%%\n", phase_names[i], times.phases[i],
               times.phases[NUM_PHASES + i], 100 * (times.phases[i] + times.phases[NUM_PHASES + i]) / total);
    printf("  %-28s %10.2f ms\n", "sum", total);
    bench_print_rate(e, run, "forward and backward", times.forward_backward, pruned);
    bench_print_rate(e, run, "step", times.step, pruned);
    if (config_prunes(&model->config)) printf("  %-28s %10.1f%%\n", "attention pruned", 100 * pruned);
    printf("  %-28s %10.2f GiB\n", "GPU memory in use", (double)(all_bytes - free_bytes) / (1 << 30));
}

// ----------------------------------------------------------------------------
// generation

struct DecodeState {
    Cache cache;
    bf16* logits; // [V], on the host
};

static DecodeState* engine_decode_open(Engine* e, int64_t capacity) {
    DecodeState* state = (DecodeState*)xcalloc(1, sizeof *state);
    state->cache = cache_new(&e->model, capacity);
    state->logits = (bf16*)xcalloc((size_t)e->model.config.vocab_size, sizeof(bf16));
    return state;
}

static void engine_decode(Engine* e, DecodeState* state, int32_t token, float* logits) {
    int64_t V = e->model.config.vocab_size;
    const bf16* device = model_decode(&e->model, &state->cache, token);
    if (!logits) return;
    CUDA_CHECK(cudaMemcpyAsync(state->logits, device, (size_t)V * sizeof(bf16), cudaMemcpyDeviceToHost,
                               e->model.stream));
    CUDA_CHECK(cudaStreamSynchronize(e->model.stream));
    for (int64_t i = 0; i < V; i++) logits[i] = __bfloat162float(state->logits[i]);
}

static void engine_decode_close(DecodeState* state) {
    cache_free(&state->cache);
    free(state->logits);
    free(state);
}

static const Trainer trainer = {
    .summary = "Trains the Forgetting Transformer and its Transformer baselines on a GPU.",
    .suggested_tokens = 16384,
    .element_bytes = sizeof(float),
    .steps_in_flight = TRAINER_STEPS_IN_FLIGHT,
    .print_plan = print_plan,
    .open = engine_open,
    .close = engine_close,
    .host_open = engine_host_open,
    .host_close = engine_host_close,
    .load_batch = engine_load_batch,
    .begin_step = engine_begin_step,
    .add_gradients = engine_add_gradients,
    .update = engine_update,
    .finish_step = engine_finish_step,
    .first_not_finite = engine_first_not_finite,
    .evaluate = engine_evaluate,
    .bench = engine_bench,
    .decode_open = engine_decode_open,
    .decode = engine_decode,
    .decode_close = engine_decode_close};

int main(int argc, char** argv) { return run_main(argc, argv, &trainer); }

#endif // TESTING
