/*
Trains the Forgetting Transformer (FoX, arXiv 2503.02130) and its baselines on a GPU.

It mirrors train_fox.c, the reference, in order and names; kernels are in llmc/layers and llmc/attention, the
tensors of a pass and their layouts in llmc/model/gpu_acts.h.
Callees come first. A step is read upwards from model_add_gradients: model_forward, block_forward,
attention_mixer_forward, heads_forward; decoding is in llmc/inference/cuda.
Weights and activations are bf16, GEMMs accumulate in fp32; masters, gradients and moments are fp32.

Sizes are named as in train_fox.c. S >= R is the row stride of the fused projection's output, Vs >= V that of
logits. Where ranks share sequences T is a rank's part of one, outside attention.

All work is queued on one stream, but for gradients of the blocks' weights and of the forget gates, which run
on a second one, and exchanges with other ranks' GPUs (llmc/exchange, llmc/sequence), which have their own. A
training step makes the host wait for the device only for the loss and norm of the step before, for the copy
of the batch before the last (load_batch), and for whether layers have halos (llmc/sequence/halo.cuh). AdamW's
kernel itself leaves out a step whose loss or gradient is not finite: masters, moments and bf16 weights
stay, and the run ends.
*/
#include "llmc/attention/attention.cuh" // defines: attention_forward, attention_backward, attention_path
#include "llmc/attention/cudnn.cuh"     // defines: attention_cudnn_*
#include "llmc/attention/pruning.cuh"   // defines: Pruning, pruning_*
#include "llmc/baselines/deltanet/deltanet.cuh" // defines: deltanet_mixer
#include "llmc/baselines/hgrn2/hgrn2.cuh"       // defines: hgrn2_mixer
#include "llmc/baselines/mamba2/mamba2.cuh"     // defines: mamba2_mixer
#include "llmc/cuda/device.cuh"                 // defines: Device, Scratch, device_zeros, device_download
#include "llmc/cuda/graph.cuh"                  // defines: PassGraph, pass_graph_run
#include "llmc/cuda/matmul.cuh"                 // defines: Linear, Matmul, linear_*, matmul_*
#include "llmc/cuda/range.cuh"                  // defines: Range, range_log_*
#include "llmc/exchange/exchange.cuh"           // defines: Exchange, exchange_*, nccl_*
#include "llmc/exchange/queued_step.cuh"        // defines: QueuedStep, queued_step_*
#include "llmc/inference/cuda/extension.cuh"    // defines: cache_*, page_bytes
#include "llmc/layers/adamw.cuh"                // defines: adamw_update, weights_copy
#include "llmc/layers/attention_layer.cuh"      // defines: AttentionHeads, attention_shape_of
#include "llmc/layers/classifier.cuh"           // defines: classifier, logits_download
#include "llmc/layers/documents.cuh"            // defines: documents_forward
#include "llmc/layers/embedding.cuh"            // defines: embedding_forward, embedding_backward
#include "llmc/layers/forget_gate.cuh"          // defines: forget_gate_*
#include "llmc/layers/fp8_state.cuh"            // defines: Fp8State, fp8_*
#include "llmc/layers/global_norm.cuh"          // defines: StepStats, ParamChunks, global_norm, loss_add
#include "llmc/layers/layer.cuh"                // defines: Layer, Mixer, layer_*, weight_*
#include "llmc/layers/output_gate.cuh"          // defines: OutputGate, output_gate_*
#include "llmc/layers/qkv.cuh"                  // defines: HeadPath, qkv_*, rope_angles
#include "llmc/layers/rmsnorm.cuh"              // defines: Norm, rmsnorm_*
#include "llmc/layers/swiglu.cuh"               // defines: swiglu_*
#include "llmc/model/gpu_acts.h"                // defines: HeadActs, AttentionActs, MlpActs, Acts
#include "llmc/model/gpu_models.h"              // defines: gpu_check_model
#include "llmc/model/rotation.h"                // defines: config_rotation, config_rope_gain
#include "llmc/plan/plan.h"                     // defines: GpuPlan, plan_*
#include "llmc/sequence/mixer.cuh"              // defines: sequence_*; includes SequenceMixer, assignment_*
#include "llmc/train/main.h"                    // defines: run_main; includes Config, ParamTable, Run

#include <algorithm>
#include <vector>

// ----------------------------------------------------------------------------
// the attention mixer: out = residual + Wo output_gate(attention(qkv(in)))

static void attention_activations(Activations* rows, const Layer* layer, Recompute recompute) {
    const HeadShape shape = attention_shape_of(layer);
    gpu_attention_activations(rows, layer->config, &shape, recompute);
}

static HeadActs head_acts(const Layer* layer) {
    HeadActs a;
    activations_rows(layer->mixer, 0, layer->number, &a, sizeof a);
    return a;
}

static AttentionActs attention_acts(const Layer* layer) {
    AttentionActs a;
    activations_last(layer->mixer, layer->number, &a, sizeof a);
    return a;
}

static size_t attention_mixer_scratch_bytes(const Layer* layer) {
    const HeadShape shape = attention_shape_of(layer);
    const bool backward = !layer->forward_only;
    const size_t kernels = layer->cudnn ? attention_cudnn_workspace(&shape, layer->deterministic, backward)
                                        : attention_scratch_bytes(&shape, backward);
    return std::max({kernels, forget_gate_scratch_bytes(&shape), pruning_scratch_bytes(&shape)});
}

static void attention_mixer_check(const Config* c, int64_t B, int64_t T) {
    HeadShape shape = {
        .B = B, .T = T, .NH = c->num_heads, .dh = config_head_size(c), .window = c->window_size};
    attention_check(&shape);
}

// Called once after allocation: fills tensors that passes only read.
static void heads_init(const Layer* layer, const HeadShape* s) {
    if (config_uses_rope(layer->config)) // does any layer? this is called for the first alone
        rope_angles(head_acts(layer).angles, s->T, s->dh, config_rotation(layer->config), layer->stream);
}
static void attention_init(const Layer* layer) {
    const HeadShape shape = attention_shape_of(layer);
    heads_init(layer, &shape);
}

// The paths of q, k and v with the tensors of a pass.
static void head_paths(HeadPath paths[3], const AttentionHeads* heads, const HeadActs* a) {
    bf16 *const out[] = {a->q, a->k, a->v}, *const dout[] = {a->dq, a->dk, a->dv};
    for (int p = 0; p < 3; p++) {
        paths[p] = heads->paths[p];
        paths[p].out = out[p];
        paths[p].dout = dout[p];
    }
    paths[0].rstd = a->q_rstd;
    paths[1].rstd = a->k_rstd;
}

static Pruning head_pruning(const Layer* layer, const AttentionHeads* heads, const HeadActs* a) {
    return {.bounds = {a->first_key_block, a->last_query_block, a->head_order},
            .score_limits = a->score_limits,
            .count = layer->recomputing ? NULL : a->pruning,
            .head_kept = heads->kept,
            .cum_logf = a->cum_logf,
            .squares = a->squares,
            .q_weight = heads->paths[0].weight,
            .k_weight = heads->paths[1].weight,
            .lse = a->lse,
            .log_tolerance = layer->config->log_pruning_tolerance,
            .rope_gain = config_rope_gain(layer->config),
            .acp = layer->config->pruning_rule == PRUNING_ACP,
            .scratch = layer->scratch,
            .part = heads->part};
}

// o = attention(qkv(proj)) of some heads over whole sequences
static void heads_forward(const Layer* layer, const AttentionHeads* heads, bf16* o, const bf16* proj) {
    const HeadActs a = head_acts(layer);
    const HeadShape* shape = &heads->shape;
    const bf16* gate = heads->gate < 0 ? NULL : proj + heads->gate;
    HeadPath paths[3];
    head_paths(paths, heads, &a);
    Pruning pruning = head_pruning(layer, heads, &a);
    AttentionForward attention = {.o = o,
                                  .lse = a.lse,
                                  .q = a.q,
                                  .k = a.k,
                                  .v = a.v,
                                  .cum_logf = a.cum_logf,
                                  .bounds = a.first_key_block ? &pruning.bounds : NULL,
                                  .scratch = layer->scratch};

    qkv_forward(paths, a.squares, proj, a.angles, shape, layer->stream);
    if (a.cum_logf && attention_computes_bounds(layer))
        forget_gate_forward(a.cum_logf, gate, heads->gate_bias, layer->scratch, shape, layer->stream);
    if (attention.bounds && attention_computes_bounds(layer)) pruning_bounds(&pruning, shape, layer->stream);
    (layer->cudnn ? attention_cudnn_forward : attention_forward)(&attention, shape, layer->stream);
}

// Writes dproj from dout, the gradient of o. delta [B,NH,T] is the sum of dout * o over a head's channels;
// NULL: attention's backward pass computes it from o.
static void heads_backward(const Layer* layer, const AttentionHeads* heads, bf16* dproj, const bf16* proj,
                           const bf16* dout, const bf16* o, const float* delta) {
    const HeadActs a = head_acts(layer);
    const HeadShape* shape = &heads->shape;
    HeadPath paths[3];
    head_paths(paths, heads, &a);
    Pruning pruning = head_pruning(layer, heads, &a);
    AttentionBackward attention = {.dq = a.dq,
                                   .dk = a.dk,
                                   .dv = a.dv,
                                   .dcum_logf = a.dcum_logf,
                                   .dout = dout,
                                   .q = a.q,
                                   .k = a.k,
                                   .v = a.v,
                                   .o = o,
                                   .lse = a.lse,
                                   .delta = delta,
                                   .cum_logf = a.cum_logf,
                                   .bounds = a.first_key_block ? &pruning.bounds : NULL,
                                   .deterministic = layer->deterministic,
                                   .scratch = layer->scratch};
    bf16* dgate = heads->gate < 0 ? NULL : dproj + heads->gate;
    const bf16* gate = heads->gate < 0 ? NULL : proj + heads->gate;
    SideStream* side = a.dcum_logf ? heads->gate_stream : NULL; // gates' gradients beside those of q, k and v

    if (layer->recompute_qkv) qkv_forward(paths, NULL, proj, a.angles, shape, layer->stream);
    if (attention.bounds && attention_computes_bounds(layer))
        pruning_backward_bounds(&pruning, shape, layer->stream);
    (layer->cudnn ? attention_cudnn_backward : attention_backward)(&attention, shape, layer->stream);
    if (a.dcum_logf)
        forget_gate_backward(dgate, heads->gate_dbias, a.dcum_logf, gate, heads->gate_bias, layer->scratch,
                             shape, side ? side_fork(side) : layer->stream);
    if (side) side_mark(side);
    qkv_backward(paths, dproj, proj, a.angles, layer->partial[2], shape, heads->dqkv8, layer->stream);
    if (side) side_await(side);
}

static void attention_mixer_forward(const Layer* layer, bf16* out, const bf16* in, const bf16* residual) {
    AttentionActs a = attention_acts(layer);
    AttentionHeads heads = attention_heads(layer);
    OutputGate output_gate = attention_output_gate(layer, a.o_rstd, a.proj, NULL, NULL);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);

    if (a.y) layer_keep_transposed(layer, &output_gate.y8, a.y);
    linear_forward(a.proj, in, NULL, &in_proj, layer->matmul);
    heads_forward(layer, &heads, a.o, a.proj);
    if (a.y || output_gate.y8.data) output_gate_forward(a.y, a.o, &output_gate, &heads.shape, layer->stream);
    linear_forward(out, a.y ? a.y : a.o, residual, &o_proj, layer->matmul);
}

// Writes din, the gradient of the mixer's input; din first holds the gradients of y, then of o.
static DeferredWeight attention_mixer_backward(const Layer* layer, bf16* din, const bf16* dout) {
    AttentionActs a = attention_acts(layer);
    AttentionHeads heads = attention_heads(layer);
    OutputGate output_gate = attention_output_gate(layer, a.o_rstd, a.proj, a.dproj, a.delta);
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);

    if (a.y) layer_keep_transposed(layer, &o_proj.fp8.x, a.y);
    linear_backward_input(din, dout, &o_proj, layer->matmul);
    if (a.y)
        output_gate_backward(din, layer->recompute_outputs ? a.y : NULL, din, a.o, &output_gate,
                             layer->partial[1], &heads.shape, layer->stream);
    weight_gradient(layer->weight_stream, dout, a.y ? a.y : a.o, &o_proj);
    heads_backward(layer, &heads, a.dproj, a.proj, din, a.o, a.delta);
    linear_backward_input(din, a.dproj, &in_proj, layer->matmul);
    return {in_proj, a.dproj};
}

static const Mixer attention_mixer = {
    .check = attention_mixer_check,
    .activations = attention_activations,
    .scratch_bytes = attention_mixer_scratch_bytes,
    .init = attention_init,
    .weights_in_fp8 = layer_weights_in_fp8,
    .forward = attention_mixer_forward,
    .backward = attention_mixer_backward,
    .extend = attention_mixer_extend,
};

// The same with --sequence-ranks: between exchanges heads_forward and heads_backward see whole sequences of
// some heads, or a part of a sequence with all heads, and passes are not repeated as graphs
// (llmc/sequence/mixer.cuh).
static const AttentionFunctions attention_functions = {attention_mixer_scratch_bytes, heads_init,
                                                       heads_forward, heads_backward};
static const Mixer sequence_attention_mixer = {
    .eager = true,
    .sums_on_main = true,
    .check = attention_mixer_check,
    .activations = sequence_activations,
    .scratch_bytes = sequence_scratch_bytes,
    .init = sequence_init,
    .begin_step = assignment_begin_step,
    .weights_in_fp8 = sequence_weights_in_fp8,
    .forward = sequence_forward,
    .backward = sequence_backward,
    .extend = attention_mixer_extend, // samples of a training, on one rank
};

// ----------------------------------------------------------------------------
// mixers: out = residual + mixer(in), where `in` is the normed residual stream. Layer l's is
// model_mixer(model, l). What another kind needs beside a row here: dev/README.md, "A mixer".

static const Mixer* const mixers[] = {&attention_mixer, &deltanet_mixer, &hgrn2_mixer, &mamba2_mixer,
                                      &deltanet_mixer};
static_assert(sizeof mixers / sizeof mixers[0] == NUM_MIXERS, "in the order of MixerKind");

// ----------------------------------------------------------------------------
// the MLP, SwiGLU: out = residual + Wd (silu(g) u), with g and u the two halves of gate_up = Wgu in

static void mlp_forward(const Layer* layer, bf16* out, const bf16* in, const bf16* residual) {
    MlpActs a;
    Linear gate_up_proj = layer_gate_up_proj(layer), down_proj = layer_linear(layer, P_DOWN_PROJ);
    activations_layer(layer->mlp, layer->l, &a, sizeof a);
    const bool in_fp8 = swiglu_place_fp8(a.act, a.dgate_up, &gate_up_proj, &down_proj);
    linear_forward(a.gate_up, in, NULL, &gate_up_proj, layer->matmul);
    if (in_fp8)
        swiglu_forward_fp8(swiglu_act8(layer, &down_proj, true), a.gate_up, down_proj.rows, down_proj.K,
                           layer->stream);
    else
        swiglu_forward(a.act, a.gate_up, down_proj.rows, down_proj.K, layer->stream);
    linear_forward(out, a.act, residual, &down_proj, layer->matmul);
}

static DeferredWeight mlp_backward(const Layer* layer, bf16* din, const bf16* dout) {
    MlpActs a;
    Linear gate_up_proj = layer_gate_up_proj(layer), down_proj = layer_linear(layer, P_DOWN_PROJ);
    activations_layer(layer->mlp, layer->l, &a, sizeof a);
    const bool in_fp8 = swiglu_place_fp8(a.act, a.dgate_up, &gate_up_proj, &down_proj);
    linear_backward_input(a.dact, dout, &down_proj, layer->matmul);
    if (in_fp8)
        swiglu_backward_fp8(gate_up_proj.fp8.dout, swiglu_act8(layer, &down_proj, false), a.dact, a.gate_up,
                            down_proj.rows, down_proj.K, layer->stream);
    else
        swiglu_backward(a.dgate_up, layer->recompute_outputs ? a.act : NULL, a.dact, a.gate_up,
                        down_proj.rows, down_proj.K, layer->stream);
    weight_gradient(layer->weight_stream, dout, a.act, &down_proj);
    linear_backward_input(din, a.dgate_up, &gate_up_proj, layer->matmul);
    return {gate_up_proj, a.dgate_up};
}

// ----------------------------------------------------------------------------
// the model

typedef struct Model {
    Config config;
    ParamTable table;
    Shard shard;         // of the flat buffers; alone: all of them
    int64_t Vs;          // row stride of logits
    bf16* weights;       // flat buffer: copy of the master weights that passes read
    float* weights_fp32; // [table.fp32_count] of the tensors that kernels read in fp32
    float* grads;        // flat buffer
    float* params;       // [shard_count] master weights, as AdamW's two moments
    float* m;
    float* v;
    Exchange* exchange;     // with other ranks; NULL: alone
    SequenceMixer sequence; // where ranks share sequences
    int64_t* fp32_begin;    // [buckets + 1] where the buckets begin in weights_fp32
    bool weights_in_flight; // new weights, which the next pass must await and copy to FP8
    bool with_fp8;          // trains with --fp8
    Fp8State* fp8;          // NULL: all GEMMs in bf16
    ParamChunks chunks;     // the update's work list
    double* chunk_squares;  // [chunks.count] scratch
    StepStats* stats;       // of the step in progress
    int64_t B, T;           // the shape of a training pass
    Pass pass;
    Acts acts; // of layer 0
    Recompute recompute;
    bool cudnn;         // attention by cuDNN's kernels
    bool deterministic; // the same bits in every run
    bool sequential;    // one kernel after another: one stream, no graph
    Scratch scratch;
    float* partial; // NUM_NORM_PARTIALS times norm_partial_bytes
    Matmul matmul;
    WeightStream weight_stream;
    cudaStream_t stream;
    bool warm;               // model_add_gradients has run: kernels are loaded, GEMM algorithms chosen
    bool capturing;          // its calls are captured into a graph
    bool reducing;           // its gradients are reduced over several ranks
    PassGraph graphs[2][2];  // of model_add_gradients, [weights_in_flight][reducing]
    PassGraph* layer_graphs; // [L] of model_backward, by the first layer

    // of a run
    Device device;
    PinnedPair tokens;                // [2,B,T] inputs, then targets, of the batches that are loaded
    PinnedPair losses;                // [B,T] of the batches of --eval and validation in flight
    QueuedStep steps[2];              // step number i is in [i % 2]
    int64_t num_queued, num_finished; // numbers of the next step to queue and to finish
    double* pruned;                   // [L] pruned fraction of attention's FLOPs, in the step finished last
    cudaEvent_t marks[NUM_MARKS];     // with --bench
} Model;

static_assert(GPU_WORKSPACE_BYTES == 2 * MATMUL_WORKSPACE, "planned: the GEMMs of both streams");

// The model's own tensors of layer l.
static Acts pass_acts(const Pass* pass, int64_t l) {
    Acts a;
    activations_layer(&pass->tables[PASS_MODEL], l, &a, sizeof a);
    return a;
}

static const Mixer* model_mixer(const Model* model, int64_t l) {
    return sequence_ranks(&model->sequence) > 1 ? &sequence_attention_mixer
                                                : mixers[model->table.by_layer[l].config.mixer];
}

static Layer model_layer(Model* model, const Pass* pass, int64_t l) {
    Layer layer = {};
    layer.table = &model->table;
    layer_move(&layer, l);
    layer.B = pass->B;
    layer.T = pass->T;
    layer.weights = model->weights;
    layer.weights_fp32 = model->weights_fp32;
    layer.grads = model->grads;
    layer.mixer = &pass->tables[PASS_MIXER + layer.config->mixer];
    layer.mlp = &pass->tables[PASS_MLP];
    layer.mixer_context = &model->sequence;
    layer.doc_start = pass == &model->pass ? model->acts.doc_start : NULL; // inference has no walls
    layer.scratch = model->scratch.memory;
    norm_partials(layer.partial, model->partial,
                  model_mixer(model, l)->sums_on_main ? NULL : &model->weight_stream.side);
    layer.matmul = &model->matmul;
    layer.weight_stream = &model->weight_stream;
    layer.stream = model->stream;
    layer.fp8 = model->fp8 && model->fp8->training ? model->fp8 : NULL;
    layer.deterministic = model->deterministic;
    layer.sequential = model->sequential;
    layer.cudnn = model->cudnn;
    layer.recompute_outputs = model->recompute > RECOMPUTE_NONE;
    layer.recompute_qkv = model->recompute == RECOMPUTE_QKV;
    return layer;
}

// What a pass over [B, T] tokens needs; nothing is allocated.
static Pass pass_plan(Model* model, int64_t B, int64_t T, Recompute recompute) {
    Pass pass = {.B = B, .T = T};
    for (int64_t l = 0; l < model->config.num_hidden_layers; l++) {
        const Layer layer = model_layer(model, &pass, l);
        const int t = PASS_MIXER + layer.config->mixer;
        if (layer.number == 0) model_mixer(model, l)->activations(&pass.tables[t], &layer, recompute);
        pass.layers[t]++;
    }
    gpu_pass_activations(&pass, &model->config, sequence_ranks(&model->sequence), model->with_fp8, recompute);
    return pass;
}

static size_t model_scratch_bytes(Model* model, int64_t B, int64_t T, Recompute recompute) {
    Pass pass = {.B = B, .T = T};
    const bool forward_only = recompute == FORWARD_ONLY;
    size_t bytes = forward_only ? 0 : embedding_scratch_bytes(B * T, model->config.hidden_size);
    for (int64_t l = 0; l < model->config.num_hidden_layers; l++) {
        Layer layer = model_layer(model, &pass, l);
        layer.forward_only = forward_only;
        bytes = std::max(bytes, model_mixer(model, l)->scratch_bytes(&layer));
    }
    return bytes;
}

// Bytes of activations and scratch of passes over [B, T] tokens. Allocates nothing.
static int64_t model_planned_bytes(const GpuPlan* plan, int64_t B, int64_t T, Recompute recompute) {
    Model* model = (Model*)plan->model;
    int64_t L = model->config.num_hidden_layers;
    Pass pass = pass_plan(model, B, T, recompute);
    int64_t in_fp8 = model->with_fp8 ? fp8_pass_bytes(&model->config, &model->table, B * T) : 0;
    return pass_bytes(&pass, L) + (int64_t)model_scratch_bytes(model, B, T, recompute) + in_fp8 +
           gpu_exchange_bytes(&model->config, &model->table, B, T, sequence_ranks(&model->sequence));
}

// The sizes of a model on one of several ranks, without device memory. `cudnn`: attention by cuDNN's kernels.
// Without `deterministic`, GEMM algorithms may be chosen by timing.
static Model model_new(const Config* config, bool cudnn, bool deterministic, int rank, int ranks) {
    Model model = {.config = *config,
                   .table = params_build_for(config, ranks),
                   .Vs = matmul_padded(config->vocab_size),
                   .cudnn = cudnn,
                   .deterministic = deterministic};
    model.shard = params_shard(&model.table, rank, ranks);
    return model;
}

// Allocates parameters for inference; with `train` also gradients and AdamW's moments.
static void model_allocate_weights(Model* model, bool train) {
    size_t count = (size_t)gpu_weights_count(&model->config, &model->table);
    size_t shard_bytes = (size_t)shard_count(&model->shard) * sizeof(float);
    model->params = (float*)device_zeros(shard_bytes);
    model->weights = (bf16*)exchange_alloc(model->exchange, count * sizeof(bf16));
    model->weights_fp32 = (float*)device_zeros((size_t)model->table.fp32_count * sizeof(float));
    model->chunks = param_chunks_upload(&model->table, &model->shard);
    model->stats = (StepStats*)device_bytes(sizeof(StepStats));
    CUDA_CHECK(cudaStreamCreate(&model->stream));
    matmul_init(&model->matmul, !model->deterministic, model->stream);
    if (!train) return;

    weight_stream_init(&model->weight_stream, model->deterministic, model->stream);
    if (model->with_fp8) model->fp8 = fp8_open(&model->config, &model->table);
    model->grads = (float*)exchange_alloc(model->exchange, count * sizeof(float));
    model->m = (float*)device_zeros(shard_bytes);
    model->v = (float*)device_zeros(shard_bytes);
    model->chunk_squares = (double*)device_bytes((size_t)model->chunks.count * sizeof(double));
}

// Collective: connects the model to its counterparts on the other ranks' GPUs. Called before
// model_allocate_weights, whose buffers the exchange allocates.
static void model_connect(Model* model, World* world) {
    model->fp32_begin = params_fp32_begin(&model->table);
    model->exchange = (Exchange*)xcalloc(1, sizeof *model->exchange);
    *model->exchange = exchange_open(world, &model->shard, model->fp32_begin);
}

static void model_allocate_activations(Model* model, int64_t B, int64_t T, Recompute recompute) {
    int64_t L = model->config.num_hidden_layers;
    model->B = B;
    model->T = T;
    model->recompute = recompute;
    model->pass = pass_plan(model, B, T, recompute);
    pass_allocate(&model->pass, L, device_bytes);
    if (model->fp8) fp8_allocate(model->fp8, B * T);
    model->acts = pass_acts(&model->pass, 0);
    scratch_reserve(&model->scratch, model_scratch_bytes(model, B, T, recompute));
    model->partial = (float*)device_bytes(NUM_NORM_PARTIALS * norm_partial_bytes());
    for (int64_t l = 0; l < L; l++) {
        const Layer layer = model_layer(model, &model->pass, l);
        if (layer.number == 0 && model_mixer(model, l)->init) model_mixer(model, l)->init(&layer);
    }
    model->layer_graphs = (PassGraph*)xcalloc((size_t)L, sizeof(PassGraph));
}

// With `on` model_add_gradients runs one kernel after another: on one stream, without a graph.
static void model_set_sequential(Model* model, bool on) {
    model->sequential = on;
    weight_stream_sequential(&model->weight_stream, on);
    launch_in_sequence = on;
}

static void model_free(Model* model) {
    sequence_close(&model->sequence);
    if (model->exchange) {
        exchange_close(model->exchange);
        nccl_free(model->weights);
        if (model->grads) nccl_free(model->grads);
        model->weights = NULL;
        model->grads = NULL;
        free(model->exchange);
        free(model->fp32_begin);
    }
    void* const buffers[] = {
        model->params, model->weights, model->weights_fp32,   model->grads,   model->m,
        model->v,      model->stats,   model->scratch.memory, model->partial, model->chunk_squares};
    pass_free(&model->pass, device_free);
    for (void* buffer : buffers) device_free(buffer);
    fp8_close(model->fp8);
    param_chunks_free(&model->chunks);
    for (auto& graphs : model->graphs)
        for (PassGraph& graph : graphs) pass_graph_free(&graph);
    for (int64_t l = 0; model->layer_graphs && l < model->config.num_hidden_layers; l++)
        pass_graph_free(&model->layer_graphs[l]);
    free(model->layer_graphs);
    matmul_free(&model->matmul);
    if (model->m) weight_stream_free(&model->weight_stream);
    CUDA_CHECK(cudaStreamDestroy(model->stream));
    params_free(&model->table);
    memset(model, 0, sizeof *model);
}

static AdamWTensors model_tensors(Model* model) {
    return {.weights = model->weights,
            .weights_fp32 = model->weights_fp32,
            .grads = model->grads,
            .params = model->params,
            .m = model->m,
            .v = model->v};
}

// Copies the rank's master weights and moments (NULL: they stay) from the host, and gives all ranks copies.
static void model_upload(Model* model, const float* params, const float* m, const float* v) {
    size_t bytes = (size_t)shard_count(&model->shard) * sizeof(float);
    AdamWTensors tensors = model_tensors(model);
    CUDA_CHECK(cudaMemcpy(model->params, params, bytes, cudaMemcpyHostToDevice));
    if (m) CUDA_CHECK(cudaMemcpy(model->m, m, bytes, cudaMemcpyHostToDevice));
    if (v) CUDA_CHECK(cudaMemcpy(model->v, v, bytes, cudaMemcpyHostToDevice));
    if (model->exchange) exchange_begin_update(model->exchange, model->weights_fp32, model->stream);
    weights_copy(&tensors, &model->chunks, model->stream);
    for (int b = 0; model->exchange && b < model->shard.num_buckets; b++)
        exchange_gather(model->exchange, b, model->weights, model->weights_fp32, model->stream);
    model->weights_in_flight = model->exchange || model->fp8;
}

// A tensor outside the layers, in a buffer of the table's layout.
template <class T> static inline T* model_param(const Model* model, T* buffer, ParamKind kind) {
    return buffer ? buffer + params_find(&model->table, kind, 0)->offset : NULL;
}

static int64_t model_attention_layers(const Model* model) {
    return config_layers_of(&model->config, MIXER_ATTENTION);
}

// Counts of the step's attention blocks, [layers with attention] on the device; NULL without bounds.
static PruningCount* model_pruning(Model* model) {
    int64_t l = 0;
    if (!config_has_bounds(&model->config)) return NULL;
    while (model->table.by_layer[l].config.mixer != MIXER_ATTENTION) l++;
    Layer layer = model_layer(model, &model->pass, l);
    return head_acts(&layer).pruning;
}

// ----------------------------------------------------------------------------
// forward

// Called before a pass reads the weights of a bucket: 0 the embedding, 1 + l layer l, 1 + L the final norm
// and lm_head. If they are in flight, the main stream waits for them, and --fp8 makes their copies in FP8.
static void model_await_weights(Model* model, int64_t bucket) {
    if (!model->weights_in_flight) return;
    if (model->exchange) exchange_await(model->exchange, (int)bucket, model->capturing, model->stream);
    const int64_t l = bucket - 1, L = model->config.num_hidden_layers;
    if (!model->fp8 || l < 0) return;
    if (l == L)
        return fp8_head_weights(model->fp8, model_param(model, model->weights, P_LM_HEAD), model->stream);
    const Layer layer = model_layer(model, &model->pass, l);
    model_mixer(model, l)->weights_in_fp8(&layer, model->fp8);
}

// Called before work that is not part of a step reads weights.
static void model_await_all_weights(Model* model) {
    if (model->weights_in_flight)
        for (int b = 0; b < model->shard.num_buckets; b++) model_await_weights(model, b);
    model->weights_in_flight = false;
}

// Begins to reduce a bucket's gradient, which the backward pass has completed.
static void model_reduce_bucket(Model* model, int64_t bucket) {
    if (!model->reducing) return;
    ParamChunks chunks = param_chunks_of(&model->chunks, (int)bucket, (int)bucket + 1);
    double* squares = model->chunk_squares + model->chunks.first[bucket];
    exchange_reduce(model->exchange, (int)bucket, model->grads, squares, &chunks, model->stream);
}

// One block: acts.x of layer l -> that of the next one. A block without an MLP ends after its mixer.
// `recomputing`: the backward pass repeats it.
static void block_forward(Model* model, int64_t l, bool recomputing) {
    const Pass* pass = &model->pass;
    Layer layer = model_layer(model, pass, l);
    Acts a = pass_acts(pass, l);
    bf16* x_next = l + 1 < model->config.num_hidden_layers ? pass_acts(pass, l + 1).x : a.x_last;
    bool has_mlp = layer_param(&layer, layer.weights, P_GATE_PROJ) != NULL;
    Norm norm = layer_norm(&layer, P_MIXER_NORM, a.mixer_rstd);
    layer.recomputing = recomputing;

    if (!recomputing) model_await_weights(model, 1 + l);
    rmsnorm_forward(a.mixer_in, a.x, &norm, model->stream);
    model_mixer(model, l)->forward(&layer, has_mlp ? a.x_mid : x_next, a.mixer_in, a.x);
    if (!has_mlp) return;
    norm = layer_norm(&layer, P_MLP_NORM, a.mlp_rstd);
    layer_keep_transposed(&layer, &norm.y8, a.mlp_in);
    rmsnorm_forward(a.mlp_in, a.x_mid, &norm, model->stream);
    mlp_forward(&layer, x_next, a.mlp_in, a.x_mid);
}

// The final norm, over acts.x_last.
static Norm model_final_norm(Model* model, const Pass* pass) {
    Layer layer = model_layer(model, pass, 0);
    return layer_norm(&layer, P_NORM, pass_acts(pass, 0).rstd);
}

// Begins an optimizer step: its loss and counts are zero.
static void model_begin_step(Model* model) {
    size_t bytes = (size_t)model_attention_layers(model) * sizeof(PruningCount);
    const Layer layer = model_layer(model, &model->pass, 0);
    CUDA_CHECK(cudaMemsetAsync(model->stats, 0, sizeof(StepStats), model->stream));
    if (model_pruning(model)) CUDA_CHECK(cudaMemsetAsync(model_pruning(model), 0, bytes, model->stream));
    if (model_mixer(model, 0)->begin_step) model_mixer(model, 0)->begin_step(&layer);
    if (model->exchange) exchange_begin_step(model->exchange, model->stream);
}

// acts.inputs [B,T] -> acts.x of layer 0 [B,T,d], and doc_start
static void model_embed(Model* model) {
    const Acts* a = &model->acts;
    const Config* c = &model->config;
    documents_forward(a->doc_start, a->all_inputs ? a->all_inputs : a->inputs, model->B,
                      model->T * sequence_ranks(&model->sequence), config_end_of_text(c), model->stream);
    embedding_forward(a->x, a->inputs, model_param(model, model->weights, P_EMBEDDINGS), model->B * model->T,
                      c->hidden_size, model->stream);
}

// acts.inputs [B,T] -> acts.lm_head_in [B,T,d]
static void model_forward(Model* model) {
    const Acts* a = &model->acts;
    Norm norm = model_final_norm(model, &model->pass);
    int64_t L = model->config.num_hidden_layers;
    model_await_weights(model, 0);
    model_embed(model);
    for (int64_t l = 0; l < L; l++) block_forward(model, l, false);
    model_await_weights(model, 1 + L);
    if (norm.y8.data) fp8_head_input_scale(model->fp8, norm.weight, model->stream);
    rmsnorm_forward(a->lm_head_in, a->x_last, &norm, model->stream);
}

// Forward pass over one sequence, whose layers' heads are visited on the host (llmc/run/trainer.h).
static void visit_heads(Model* model, const int32_t* tokens, HeadVisitor visit, void* context) {
    const Config* c = &model->config;
    const int64_t NH = c->num_heads, T = model->T, d = c->hidden_size;
    const int64_t kd = config_key_heads(c) * config_head_size(c);
    std::vector<double> cum_logf((size_t)(NH * T)), limits((size_t)NH, NAN);
    CUDA_CHECK(cudaMemcpy(model->acts.inputs, tokens, (size_t)T * sizeof *tokens, cudaMemcpyHostToDevice));
    model_await_all_weights(model);
    model_embed(model);
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        Layer layer = model_layer(model, &model->pass, l);
        block_forward(model, l, false);
        if (layer.config->mixer != MIXER_ATTENTION) continue;
        HeadActs a = head_acts(&layer);
        CUDA_CHECK(cudaStreamSynchronize(model->stream));
        float *q = device_download_bf16(a.q, T * d), *k = device_download_bf16(a.k, T * kd);
        if (a.cum_logf) device_download(cum_logf.data(), a.cum_logf, NH * T * (int64_t)sizeof(double));
        if (a.score_limits) device_download(limits.data(), a.score_limits, NH * (int64_t)sizeof(double));
        LayerHeads heads = {q, k, config_has_gate(c) ? cum_logf.data() : NULL, layer.config->window_size,
                            limits.data()};
        visit(context, layer.number, &heads);
        free(q);
        free(k);
    }
}

// The vocabulary projection of rows [first, first + rows).
static Linear model_lm_head(const Model* model, int64_t first, int64_t rows) {
    int64_t d = model->config.hidden_size, Vs = model->Vs;
    const Acts* a = &model->acts;
    const bool in_fp8 = model->fp8 && model->fp8->training;
    return {.w = model_param(model, model->weights, P_LM_HEAD),
            .dw = model_param(model, model->grads, P_LM_HEAD),
            .rows = rows,
            .N = Vs,
            .K = d,
            .out_stride = Vs,
            .x_stride = d,
            .fp8 = in_fp8 ? fp8_head(model->fp8, first, a->dlogits8, (fp8*)a->logits) : Fp8Linear{}};
}

// lm_head and cross entropy of the last forward pass, in chunks of rows: fills acts.losses [B,T] and adds
// their sum to the step's. With `train` also writes acts.dbranch, the gradient of lm_head_in, and adds to
// lm_head's; dloss is the weight of a token's loss. all_logits, on the host, gets [B,T,V] logits unless NULL.
static void model_loss(Model* model, float dloss, bool train, float* all_logits) {
    const Acts* a = &model->acts;
    int64_t BT = model->B * model->T, d = model->config.hidden_size, V = model->config.vocab_size;
    int64_t chunk = gpu_logit_rows(BT, model->Vs);
    Range range("lm_head and loss", RANGE_FORWARD, model->stream);
    if (train && model->fp8) fp8_head_gradient_scale(model->fp8, dloss, model->stream);
    for (int64_t t = 0; t < BT; t += chunk) {
        Linear lm_head = model_lm_head(model, t, std::min(chunk, BT - t));
        LogitShape shape = {lm_head.rows, V, model->Vs};
        linear_forward(a->logits, a->lm_head_in + t * d, NULL, &lm_head, &model->matmul);
        if (all_logits) logits_download(all_logits + t * V, a->logits, &shape, model->stream);
        classifier(a->losses + t, a->logits, a->targets + t, &shape, dloss, train, model->stream,
                   lm_head.fp8.dout);
        if (train)
            linear_backward(a->dbranch + t * d, a->logits, a->lm_head_in + t * d, &lm_head, &model->matmul);
    }
    loss_add(model->stats, a->losses, BT, model->stream);
}

// ----------------------------------------------------------------------------
// backward: adds to all gradients, after model_loss with `train`
//
// --recompute fused: backward kernels write the inputs of linear layers again, SwiGLU's act, the output
// gate's y, the norms' mixer_in and mlp_in, before the weight gradient that reads them. qkv: also q, k and v,
// in heads_backward. block: the whole block but its input x, by block_forward.
//
// Weight gradients run on the weight stream. A join makes the main stream wait for all that are in flight:
//     down_proj    reads dx, act               joined before the MLP's norm overwrites dx
//     gate_up      reads dgate_up, mlp_in      joined before the mixer's norm
//     o_proj       reads dx, y                 joined before the mixer's norm overwrites dx
//     in_proj      reads dproj, mixer_in       joined in the layer below, before its mixer overwrites dproj

// One block: acts.dx, the gradient of its output, becomes that of its input.
static void block_backward(Model* model, int64_t l) {
    Layer layer = model_layer(model, &model->pass, l);
    Acts a = pass_acts(&model->pass, l);
    WeightStream* weights = &model->weight_stream;
    const bool recomputes = layer.recompute_outputs;
    if (model->recompute == RECOMPUTE_BLOCK) block_forward(model, l, true);
    if (layer_param(&layer, layer.weights, P_GATE_PROJ)) {
        Norm norm = layer_norm(&layer, P_MLP_NORM, a.mlp_rstd);
        DeferredWeight gate_up_proj = mlp_backward(&layer, a.dbranch, a.dx);
        layer_keep_transposed(&layer, &gate_up_proj.linear.fp8.x, a.mlp_in);
        weight_stream_join(weights);
        rmsnorm_backward(a.dx, recomputes ? a.mlp_in : NULL, a.dbranch, a.x_mid, true, &norm,
                         layer.partial[0], model->stream);
        deferred_weight_gradient(&layer, &gate_up_proj, a.mlp_in);
    } else {
        weight_stream_join(weights);
    }
    Norm norm = layer_norm(&layer, P_MIXER_NORM, a.mixer_rstd);
    DeferredWeight in_proj = model_mixer(model, l)->backward(&layer, a.dbranch, a.dx);
    weight_stream_join(weights);
    rmsnorm_backward(a.dx, recomputes ? a.mixer_in : NULL, a.dbranch, a.x, true, &norm, layer.partial[0],
                     model->stream);
    deferred_weight_gradient(&layer, &in_proj, a.mixer_in);
    if (model->recompute == RECOMPUTE_BLOCK) weight_stream_join(weights); // the block before is recomputed
}

// Runs work(), as a CUDA graph once the model is warm, unless the mixer is eager or the model sequential.
template <class Work>
static void run_as_graph(Model* model, PassGraph* graph, float dloss, const Work& work) {
    if (!model->warm || model->sequential || model_mixer(model, 0)->eager) return work();
    pass_graph_run(graph, dloss, &model->capturing, model->stream, work);
}

// A pass whose gradients are reduced over several ranks is cut into graphs of a few layers, and their
// exchange begins between these (exchange.cuh). The last ones are short: nothing is left to hide their
// exchange behind.
static void model_backward(Model* model) {
    const Acts* a = &model->acts;
    Norm norm = model_final_norm(model, &model->pass);
    int64_t L = model->config.num_hidden_layers;
    rmsnorm_backward(a->dx, NULL, a->dbranch, a->x_last, false, &norm, {model->partial}, model->stream);
    model_reduce_bucket(model, 1 + L);
    for (int64_t l = L - 1; l >= 0 && !model->reducing; l--) block_backward(model, l);
    for (int64_t end = L, begin; model->reducing && end > 0; end = begin) {
        begin = end - std::clamp<int64_t>(end / 2, 1, 4);
        run_as_graph(model, &model->layer_graphs[begin], 0, [&] {
            for (int64_t l = end - 1; l >= begin; l--) block_backward(model, l);
            weight_stream_join(&model->weight_stream);
        });
        for (int64_t l = end - 1; l >= begin; l--) model_reduce_bucket(model, 1 + l);
    }
    embedding_backward(model_param(model, model->grads, P_EMBEDDINGS), a->dx, a->inputs,
                       model->scratch.memory, norm.rows, norm.d, model->config.vocab_size, model->stream);
    weight_stream_join(&model->weight_stream);
    model_reduce_bucket(model, 0);
    if (model->reducing) exchange_finish_reduce(model->exchange, model->stream);
}

// Adds the gradients and the loss of acts.inputs and acts.targets [B,T] to the step's: forward, model_loss
// and backward. `last`: of this rank's passes of the step.
static void model_add_gradients(Model* model, float dloss, bool last) {
    model->reducing = model->exchange && last;
    if (model->fp8) model->fp8->training = true;
    run_as_graph(model, &model->graphs[model->weights_in_flight][model->reducing], dloss, [&] {
        model_forward(model);
        model_loss(model, dloss, true, NULL);
        if (!model->reducing) model_backward(model);
    });
    if (model->reducing) model_backward(model);
    model->warm = !model->fp8 || model->fp8->scaled; // the first pass with FP8 chooses GEMM algorithms
    model->weights_in_flight = false;
    if (model->fp8) model->fp8->training = false;
}

// ----------------------------------------------------------------------------
// update: norm, clipping and AdamW, none of which waits for the host. AdamW's kernel zeroes the gradients,
// but not those of a step that is not finite. With several ranks each updates its shard, a bucket at a time,
// and the new weights are gathered while the next step begins.

static void model_update(Model* model, const AdamWParams* adamw, double grad_clip) {
    Range range("norm and AdamW", RANGE_BACKWARD, model->stream);
    AdamWTensors tensors = model_tensors(model);
    Exchange* exchange = model->exchange;
    if (!exchange) add_and_square(model->chunk_squares, model->grads, &model->chunks, NULL, model->stream);
    global_norm(model->stats, model->chunk_squares, model->chunks.count, model->stream);
    if (exchange) // all-reduces the norm, the loss and the pruning counts
        assignment_sums(&model->sequence.heads, exchange, model->stats, model_pruning(model),
                        model_attention_layers(model), model->stream);
    global_norm_finish(model->stats, grad_clip, adamw->spike_norm, !exchange, model->stream);
    if (model->fp8) {
        fp8_collect_amax(model->fp8, model->stream);
        if (exchange) nccl_max(exchange, model->fp8->amax, fp8_delayed_tensors(model->fp8), model->stream);
        fp8_update(model->fp8, adamw->step, &model->stats->finite, model->stats->fp8_saturated,
                   model->stream);
    }
    model->weights_in_flight = exchange || model->fp8;
    if (!exchange) {
        adamw_update(&tensors, &model->chunks, model->stats, adamw, model->stream);
        return;
    }
    exchange_begin_update(exchange, model->weights_fp32, model->stream);
    const int n = model->shard.num_buckets, group = 8; // buckets an update: fewer launches, and gathered soon
    for (int b = 0, end; b < n; b = end) {
        end = b == 0 ? 1 : std::min(b + group, n); // the embedding is needed first
        ParamChunks chunks = param_chunks_of(&model->chunks, b, end);
        adamw_update(&tensors, &chunks, model->stats, adamw, model->stream);
        for (int i = b; i < end; i++)
            exchange_gather(exchange, i, model->weights, model->weights_fp32, model->stream);
    }
}

// The first tensor with a number that is not finite, for the message that stops the run; NULL: none.
static const char* model_first_not_finite(Model* model, bool gradients) {
    const Shard whole = params_shard(&model->table, 0, 1), *shard = gradients ? &whole : &model->shard;
    int64_t count = shard_count(shard);
    float* host = (float*)xcalloc((size_t)count, sizeof(float));
    device_download(host, gradients ? model->grads : model->params, count * (int64_t)sizeof(float));
    const char* name = shard_first_not_finite(&model->table, shard, host, sizeof(float));
    free(host);
    return name;
}

// ----------------------------------------------------------------------------
// inference (llmc/inference/cuda)

// A cache for decoding with the weights as they are now. If it drops pages, the weights bound its scores: new
// weights need a new cache.
static Cache* cache_new(Model* model, const CacheSizes* sizes) {
    const Pass none = {};
    Layer layer = model_layer(model, &none, 0);
    layer.grads = NULL;
    model_await_all_weights(model);
    return cache_allocate(&model->config, &layer, mixers, sizes);
}

#ifndef TESTING
// ----------------------------------------------------------------------------
// a step of a run: batches in, results out, while the device computes

// Queues the copy of the next batch into acts.inputs and acts.targets; data as in batch_read.
static void load_batch(Model* model, DataLoader* data) {
    PinnedPair* p = &model->tokens;
    const SequenceGroup* g = &model->sequence.heads.group;
    const int64_t T = data ? sequence_tokens(g, data->options.seq_len) : model->T; // at most trainer_open's
    if (T != model->T) // shorter contexts of --eval, for which cuDNN makes other plans
        scratch_reserve(&model->scratch, model_scratch_bytes(model, model->B, T, model->recompute));
    model->T = model->pass.T = T;
    int64_t BT = model->B * T * g->size; // of whole sequences
    int32_t* inputs = (int32_t*)p->data[p->next];
    CUDA_CHECK(cudaEventSynchronize(p->done[p->next]));
    batch_read(inputs, inputs + BT, data, BT, model->config.vocab_size);
    sequence_upload(model->acts.inputs, inputs, g, model->B, T, model->stream);
    sequence_upload(model->acts.targets, inputs + BT, g, model->B, T, model->stream);
    if (model->acts.all_inputs)
        CUDA_CHECK(cudaMemcpyAsync(model->acts.all_inputs, inputs, (size_t)BT * sizeof(int32_t),
                                   cudaMemcpyHostToDevice, model->stream));
    CUDA_CHECK(cudaEventRecord(p->done[p->next], model->stream));
    p->next = 1 - p->next;
}

static void add_gradients(Model* model, int64_t step_tokens, bool last) {
    model_add_gradients(model, (float)(1 / (double)step_tokens), last);
}

// Queues the update, and the copy of the step's results to the host.
static void update(Model* model, const AdamWParams* adamw, double grad_clip, const StepVotes* votes) {
    QueuedStep* q = &model->steps[model->num_queued++ % 2];
    const RankTime* times = model->exchange ? model->exchange->times : NULL;
    queued_step_votes(q, model->stats, votes, model->stream);
    model_update(model, adamw, grad_clip);
    queued_step_results(q, model->stats, model_pruning(model), model_attention_layers(model), times,
                        model->shard.size, model->stream);
}

static void finish_step(Model* model, LogStep* line) {
    QueuedStep* q = &model->steps[model->num_finished++ % 2];
    exchange_synchronize(model->exchange, q->done);
    const StepStats* stats = q->stats;
    line->loss = stats->all.loss / (double)line->step_tokens * step_scale(&stats->all.votes);
    line->grad_norm = stats->grad_norm;
    line->own_finite = isfinite(stats->own.loss) && isfinite(stats->own.squares);
    line->votes = stats->all.votes;
    line->fp8_saturated = model->fp8 ? stats->fp8_saturated : NULL;
    line->ranks = model->shard.size;
    line->times = q->times;
    line->num_layers = config_prunes(&model->config) ? (int)model_attention_layers(model) : 0;
    line->pruned = model->pruned;
    for (int l = 0; l < line->num_layers; l++) model->pruned[l] = pruning_share(&q->pruning[l]);
}

static void queue_losses(Model* model) {
    PinnedPair* p = &model->losses;
    model_await_all_weights(model);
    model_forward(model);
    model_loss(model, 0, false, NULL);
    sequence_download_losses((float*)p->data[p->next], model->acts.losses, &model->sequence, model->B,
                             model->T, model->stream);
    CUDA_CHECK(cudaEventRecord(p->done[p->next], model->stream));
    p->next = 1 - p->next;
}

static void* finish_losses(Model* model) {
    PinnedPair* p = &model->losses;
    int i = p->oldest;
    p->oldest = 1 - i;
    exchange_synchronize(model->exchange, p->done[i]);
    return p->data[i];
}

static bool pruning_counts(Model* model, double* counts) {
    if (!config_prunes(&model->config)) return false;
    pruning_counts_download(counts, model_pruning(model), model_attention_layers(model));
    return true;
}

static void evaluate(Model* model, void* losses, void* logits, void* grads) {
    int64_t BT = model->B * model->T;
    model_await_all_weights(model);
    model_forward(model);
    model_loss(model, (float)(1 / (double)BT), grads != NULL, (float*)logits);
    model->reducing = false;
    if (grads) model_backward(model);
    CUDA_CHECK(cudaStreamSynchronize(model->stream));
    device_download(losses, model->acts.losses, BT * (int64_t)sizeof(float));
    if (grads) device_download(grads, model->grads, model->table.count * (int64_t)sizeof(float));
}

// ----------------------------------------------------------------------------
// the trainer: what the run skeleton (llmc/train/main.h) needs of the model

static int64_t planned_cache_bytes(const void* model, const CacheSizes* sizes) {
    const Model* m = (const Model*)model;
    return cache_bytes(&m->config, &m->table, mixers, sizes);
}

// Makes a model without device memory, and the plan of its memory: without a GPU everything fits. --dry-run
// opens no device where another GPU is planned for, or there is none: model->device is all zero. With cuDNN
// it needs one, which tells how much scratch cuDNN's kernels take.
static Model* make_plan(GpuPlan* plan, const Run* run) {
    const Options* o = &run->options;
    const bool cudnn = o->attention == ATTENTION_CUDNN;
    size_t free_bytes = SIZE_MAX / 4, all_bytes; // without a GPU
    PlanGpu gpu = plan_gpu_given(o);
    gpu_check_model(&run->config, cudnn, o->sequence_ranks);
    for (int64_t l = 0; l < run->config.num_hidden_layers && !cudnn; l++) {
        const Config layer = config_layer(&run->config, l);
        mixers[layer.mixer]->check(&layer, run->micro_batch, o->seq_len);
    }
    Model* model = (Model*)xcalloc(1, sizeof *model);
    bool opens = run->mode != RUN_DRY || cudnn || (gpu.memory == 0 && device_exists());
    Device device = opens ? device_open_ranked(run->world) : Device();
    *model = model_new(&run->config, cudnn, o->deterministic, run->shard.rank, run->shard.size);
    model->device = device;
    model->sequence = sequence_new(&run->config, &model->table, &run->group, &attention_functions);
    model->with_fp8 = plan_fp8(run);
    if (gpu.memory > 0) {
        free_bytes = (size_t)gpu.memory;
    } else if (device.memory > 0) {
        gpu = {model->device.name, gpu_find(device.name), device.memory, device.compute_capability};
        CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    }
    *plan = {.run = run,
             .gpu = gpu,
             .free_bytes = (int64_t)free_bytes,
             .cache_bytes = training_cache_bytes(run, planned_cache_bytes, model),
             .pass_bytes = model_planned_bytes,
             .model = model};
    plan_fit(plan);
    return model;
}

static void print_plan(const Run* run) {
    GpuPlan plan;
    Model* model = make_plan(&plan, run);
    plan_print(&plan);
    params_free(&model->table);
    free(model);
}

static Model* trainer_open(Run* run) {
    GpuPlan plan;
    Model* model = make_plan(&plan, run);
    const Device* device = &model->device;
    int64_t B = run->micro_batch, T = run->options.seq_len;
    bool train = run_has_gradients(run);
    if (!run_infers(run) && plan.recompute < 0)
        die("a micro-batch of %s of %s does not fit into the %.1f GiB that are free on %s: %s%s",
            counted(B, "sequence").text, counted(T, "token").text, (double)plan.free_bytes / (1 << 30),
            device->name, plan_advice(&plan), train ? "; --dry-run shows what fits" : "");
    const int64_t Tn = sequence_tokens(&run->group, T); // of the rank
    if (run->world->size > 1) model_connect(model, run->world);
    sequence_open(&model->sequence, run->world, B, Tn, model->exchange);
    if (train && !run->options.deterministic) assignment_open(&model->sequence.heads, &run->config);
    model_allocate_weights(model, train);
    if (run_infers(run)) return model;
    pinned_pair_open(&model->tokens, 2 * B * T * (int64_t)sizeof(int32_t));
    pinned_pair_open(&model->losses, B * T * (int64_t)sizeof(float));
    const char* attention = !config_has_attention(&run->config) ? NULL
                            : model->cudnn                      ? "cuDNN"
                                                                : attention_path();
    plan_describe(run->device, sizeof run->device, &plan, attention,
                  train && model->exchange ? exchange_path(model->exchange) : NULL);
    plan_set_rates(run, &plan, device->peak_flops);
    model->B = B;
    model->T = Tn;
    if (!train) return model; // upload allocates activations when the masters are gone
    fp8_restore(model->fp8, &run->record, model->stream);
    model_allocate_activations(model, B, Tn, (Recompute)plan.recompute);
    for (QueuedStep& q : model->steps) queued_step_open(&q, run->config.num_hidden_layers, model->shard.size);
    model->pruned = (double*)xcalloc((size_t)run->config.num_hidden_layers, sizeof(double));
    if (run->mode != RUN_BENCH) return model;
    for (cudaEvent_t& event : model->marks) CUDA_CHECK(cudaEventCreate(&event));
    if (model->exchange) model->exchange->timeline = true;
    return model;
}

static void trainer_close(Model* model) {
    pinned_pair_close(&model->tokens);
    pinned_pair_close(&model->losses);
    for (QueuedStep& q : model->steps) queued_step_close(&q);
    for (cudaEvent_t event : model->marks)
        if (event) CUDA_CHECK(cudaEventDestroy(event));
    free(model->pruned);
    model_free(model);
    free(model);
}

static void download(Model* model, const CheckpointTensors* to) {
    int64_t bytes = shard_count(&model->shard) * (int64_t)sizeof(float);
    device_download(to->w, model->params, bytes);
    device_download(to->m, model->m, bytes);
    device_download(to->v, model->v, bytes);
}

static void upload(Model* model, const CheckpointTensors* from) {
    model_upload(model, (const float*)from->w, (const float*)from->m, (const float*)from->v);
    if (model->grads) return;
    CUDA_CHECK(cudaStreamSynchronize(model->stream)); // the masters have been copied
    device_free(model->params);
    model->params = NULL;
    if (!model->tokens.data[0]) return;
    model_allocate_activations(model, model->B, model->T, FORWARD_ONLY);
    model_begin_step(model); // nothing is counted yet
}

static char* model_fp8_record(Model* model) { return fp8_record(model->fp8); }

static void mark(Model* model, int mark) { CUDA_CHECK(cudaEventRecord(model->marks[mark], model->stream)); }

static double elapsed(Model* model, int from, int to) {
    float ms;
    CUDA_CHECK(cudaEventSynchronize(model->marks[to]));
    CUDA_CHECK(cudaEventElapsedTime(&ms, model->marks[from], model->marks[to]));
    return ms;
}

// Prints GPU memory, the exchange with other GPUs, and the time in each range, of --bench more steps: of one
// pass each, whose kernels run one after another.
static void bench_print(Model* model, const Run* run, const LogStep* last) {
    RangeLog* log = (RangeLog*)xcalloc(1, sizeof *log);
    const AdamWParams adamw = options_adamw(&run->options, 1e-4, 1);
    size_t free_bytes, all_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    printf("  %-28s %10.2f GiB\n", "GPU memory in use", (double)(all_bytes - free_bytes) / (1 << 30));
    if (model->exchange) {
        model_forward(model); // waits for the last update's weights
        CUDA_CHECK(cudaStreamSynchronize(model->stream));
        printf("  %-28s %10.2f ms\n", "waiting for other GPUs", 1e3 * last->times[run->world->rank].waiting);
        exchange_print(model->exchange, model->marks[bench_marks(model->num_queued) + MARK_STEP]);
        model->exchange->timeline = false;
    }
    model_set_sequential(model, true);
    for (int64_t i = 0; i < run->options.bench; i++) {
        range_log_start(log);
        model_begin_step(model);
        load_batch(model, NULL);
        add_gradients(model, run->options.batch_tokens, true);
        model_update(model, &adamw, run->options.grad_clip);
        CUDA_CHECK(cudaStreamSynchronize(model->stream));
        range_log_stop();
    }
    model_set_sequential(model, false);
    range_log_print(log, (double)run->options.bench);
    range_log_free(log);
    free(log);
}

static const Trainer trainer = {
    .summary = "Trains the Forgetting Transformer, and Transformer and recurrent baselines, on a GPU.",
    .built_with = DEVICE_BUILT_WITH,
    .suggested_tokens = RUN_GPU_TOKENS,
    .pass_tokens = EXTEND_ROWS,
    .pass_steps = EXTEND_STEPS,
    .element_bytes = sizeof(float),
    .weight_bytes = sizeof(bf16),
    .steps_in_flight = 1,
    .print_plan = print_plan,
    .open = trainer_open,
    .close = trainer_close,
    .host_alloc = device_host_alloc,
    .host_free = device_host_free,
    .download = download,
    .upload = upload,
    .fp8_record = model_fp8_record,
    .load_batch = load_batch,
    .begin_step = model_begin_step,
    .add_gradients = add_gradients,
    .update = update,
    .finish_step = finish_step,
    .first_not_finite = model_first_not_finite,
    .queue_losses = queue_losses,
    .finish_losses = finish_losses,
    .pruning_counts = pruning_counts,
    .evaluate = evaluate,
    .visit_heads = visit_heads,
    .mark = mark,
    .elapsed = elapsed,
    .bench_print = bench_print,
    .page_bytes = page_bytes,
    .cache_new = cache_new,
    .extend = cache_extend,
    .cache_fork = cache_fork,
    .cache_copy_page = cache_copy_page,
    .cache_forgotten = cache_forgotten,
    .cache_free = cache_free};

int main(int argc, char** argv) { return run_main(argc, argv, &trainer); }

#endif // TESTING
