/*
Rank-major copies of attention's weights, where ranks share sequences (split.h): first the heads of rank 0,
then those of rank 1, ... Only this file reads which heads a rank has (assignment.cuh); the kernels of a pass
see rank-major heads.

    all heads     copies of their weights, for the parts that compute token by token, and their gradients
      in_proj     rows of the fused projection: q, k, v of rank 0, of rank 1, ...; then the output gate's and
                  the other gates' rows, each rank-major
      o_proj      rank-major columns; likewise the output norm's weights
    own heads     copies of the weights of the rank's heads, QK norm's and the gate's bias, and their gradients

So the columns of proj and o that a rank sends to another are contiguous within a row, and copy engines need
no packing. All layers share these buffers: every pass of a layer first copies its weights, on the main
stream, and gradients are added to the model's behind the kernels that compute them.

Called by sequence.cuh, mixer.cuh and, before passes in FP8, by the GPU trainer. An error of CUDA ends the
program.
*/
#pragma once

#include "assignment.cuh"

// ----------------------------------------------------------------------------
// rank-major weights of all heads

struct HeadLayout {
    HeadColumns columns;   // of proj
    const int* assignment; // of head_assignment
    int gate;              // the output gate's first row in the projection; -1: there is none
    int width, d;          // channels of o that a head has, and all heads together

    // The model's head at a rank-major position, and the model's channel of a rank-major channel
    __device__ int head(int position) const {
        return (int)sequence_assigned_head(assignment, position / columns.heads, columns.ranks, columns.heads,
                                           position % columns.heads);
    }
    __device__ int channel(int c) const { return head(c / width) * width + c % width; }
    // The row of the model's projection whose copy is row j.
    __device__ int row(int j) const {
        const int wide = columns.wide;
        if (j < columns.ranks * wide) return head_columns_whole(&columns, assignment, j / wide, j % wide);
        if (gate >= 0 && j >= gate && j < gate + d) return gate + channel(j - gate);
        for (int p = 0; p < columns.parts; p++) {
            const int at = j - columns.part[p].column, n = columns.part[p].width;
            if (columns.part[p].local >= wide && at >= 0 && at < columns.ranks * columns.heads * n)
                return columns.part[p].column + head(at / n) * n + at % n;
        }
        return j;
    }
};

// A matrix [rows, width] whose rows, or columns, are rank-major; padding rows of zeros follow.
struct RankMajorTensor {
    ParamKind kind;
    int64_t rows, padded, width;
    bool columns;

    // Index in the model's tensor of element `at` of the copy
    __device__ int64_t of_model(int64_t at, const HeadLayout& layout) const {
        const int row = (int)(at / width), column = (int)(at % width);
        return columns ? row * width + layout.channel(column) : layout.row(row) * width + column;
    }
};

// One thread copies eight elements.
__global__ static void __launch_bounds__(256)
    rank_major_weights_kernel(bf16* copy, const bf16* w, const __grid_constant__ RankMajorTensor t,
                              const __grid_constant__ HeadLayout layout) {
    const int64_t at = 8 * ((int64_t)blockIdx.x * 256 + threadIdx.x);
    if (at >= t.padded * t.width) return;
    Raw8 values = {};
    if (at < t.rows * t.width) values = load_raw8(w + t.of_model(at, layout));
    store16(copy + at, values);
}

// dw += dcopy, then dcopy = 0 for the next gradient. Four elements a thread.
__global__ static void __launch_bounds__(256)
    rank_major_add_kernel(float* dw, float* dcopy, const __grid_constant__ RankMajorTensor t,
                          const __grid_constant__ HeadLayout layout) {
    const int64_t at = 4 * ((int64_t)blockIdx.x * 256 + threadIdx.x);
    if (at >= t.rows * t.width) return;
    float4* to = (float4*)(dw + t.of_model(at, layout));
    const float4 sum = *to, add = *(float4*)(dcopy + at);
    *to = {sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w};
    *(float4*)(dcopy + at) = {};
}

static inline HeadLayout head_layout(const Layer* layer) {
    return {.columns = rank_heads(layer)->proj,
            .assignment = head_assignment(layer),
            .gate = (int)params_column(layer->table, P_OGATE_PROJ, layer->l),
            .width = rank_heads(layer)->o.part[0].width,
            .d = (int)layer->config->hidden_size};
}

static inline RankMajorTensor rank_major_tensor(const Layer* layer, int which) {
    const int64_t R = layer_proj(layer).rows, d = layer->config->hidden_size;
    if (which == RANK_MAJOR_IN_PROJ) return {layer_proj(layer).first, R, matmul_padded(R), d, false};
    if (which == RANK_MAJOR_O_PROJ) return {P_O_PROJ, d, d, d, true};
    return {P_OUTPUT_NORM, 1, 1, d, true};
}

// ----------------------------------------------------------------------------
// weights of the rank's own heads

// The model's QK norm weights for q [NH, dh] and k [KVH, dh], and gate bias [NH]; NULL: the model has none,
// or heads share it.
struct HeadWeights {
    const bf16* norms[2];
    const float* bias;
    float *dnorms[2], *dbias;
    const int* assignment; // of head_assignment
    int dh;
};

// The model's index of weight i of the rank's heads, which have `width` each; -1: they have fewer.
__device__ static inline int64_t head_weights_whole(const RankHeads& h, const HeadWeights& w, int i,
                                                    int width) {
    if (i >= h.o.heads * width) return -1;
    return sequence_assigned_head(w.assignment, h.group.rank, h.group.size, h.o.heads, i / width) * width +
           i % width;
}

// Copies the weights of the rank's heads, and zeroes their gradients.
__global__ static void __launch_bounds__(256)
    head_weights_kernel(const __grid_constant__ RankHeads h, const __grid_constant__ HeadWeights w) {
    const int i = (int)(blockIdx.x * 256 + threadIdx.x);
    for (int k = 0; k < 2; k++) {
        const int64_t whole = head_weights_whole(h, w, i, k ? w.dh : h.o.queries * w.dh);
        if (w.norms[k] && whole >= 0) {
            h.norms[k][i] = w.norms[k][whole];
            h.dnorms[k][i] = 0;
        }
    }
    const int64_t whole = head_weights_whole(h, w, i, h.o.queries);
    if (w.bias && whole >= 0) {
        h.bias[i] = w.bias[whole];
        h.dbias[i] = 0;
    }
}

// Adds the gradients of the rank's heads to those of all heads.
__global__ static void __launch_bounds__(256)
    head_gradients_kernel(const __grid_constant__ RankHeads h, const __grid_constant__ HeadWeights w) {
    const int i = (int)(blockIdx.x * 256 + threadIdx.x);
    for (int k = 0; k < 2; k++) {
        const int64_t whole = head_weights_whole(h, w, i, k ? w.dh : h.o.queries * w.dh);
        if (w.norms[k] && w.dnorms[k] && whole >= 0) w.dnorms[k][whole] += h.dnorms[k][i];
    }
    const int64_t whole = head_weights_whole(h, w, i, h.o.queries);
    if (w.bias && w.dbias && whole >= 0) w.dbias[whole] += h.dbias[i];
}

static inline HeadWeights head_weights_of(const Layer* layer) {
    const bool own = !layer->config->qk_norm_share;
    return {
        .norms = {own ? layer_param(layer, layer->weights, P_Q_NORM) : NULL,
                  own ? layer_param(layer, layer->weights, P_K_NORM) : NULL},
        .bias = layer_param_fp32(layer, P_FGATE_BIAS),
        .dnorms = {layer_param(layer, layer->grads, P_Q_NORM), layer_param(layer, layer->grads, P_K_NORM)},
        .dbias = layer_param(layer, layer->grads, P_FGATE_BIAS),
        .assignment = head_assignment(layer),
        .dh = (int)config_head_size(layer->config)};
}

// Number of thread blocks of either kernel
static inline int head_weights_blocks(const Layer* layer) {
    return ceil_div(rank_heads(layer)->o.columns, 256);
}

// ----------------------------------------------------------------------------
// all of them

// Allocates the rank-major weights and, for training, their gradients. sequence_close frees them.
static inline void rank_major_open(const Layer* layer) {
    RankHeads* h = &sequence_of(layer)->heads;
    const size_t d = (size_t)layer->config->hidden_size, S = (size_t)matmul_padded(layer_proj(layer).rows);
    const size_t counts[NUM_RANK_MAJOR] = {S * d, d * d, d};
    for (int i = 0; i < NUM_RANK_MAJOR; i++) {
        h->weights[i] = (bf16*)device_zeros(counts[i] * sizeof(bf16));
        if (layer->grads) h->dweights[i] = (float*)device_zeros(counts[i] * sizeof(float));
    }
}

// Copies the layer's weights, before a pass reads them.
static inline void rank_major_weights(const Layer* layer, RangePass pass) {
    Range range("exchange of sequences", pass, layer->stream);
    const HeadLayout layout = head_layout(layer);
    const HeadWeights own = head_weights_of(layer);
    for (int i = 0; i < NUM_RANK_MAJOR; i++) {
        const RankMajorTensor t = rank_major_tensor(layer, i);
        const bf16* from = layer_param(layer, layer->weights, t.kind);
        const int64_t groups = t.padded * t.width / 8;
        if (from)
            CUDA_LAUNCH(rank_major_weights_kernel, ceil_div<int64_t>(groups, 256), 256, layer->stream,
                        rank_heads(layer)->weights[i], from, t, layout);
    }
    CUDA_LAUNCH(head_weights_kernel, head_weights_blocks(layer), 256, layer->stream, *rank_heads(layer), own);
}

// As layer_weights_in_fp8, of the rank-major copies, which GEMMs read.
static inline void sequence_weights_in_fp8(const Layer* layer, const Fp8State* s) {
    const ParamKind kinds[NUM_RANK_MAJOR] = {layer_proj(layer).first, P_O_PROJ, P_OUTPUT_NORM};
    const bf16* w[FP8_LINEARS];
    for (int i = 0; i < FP8_LINEARS; i++) {
        w[i] = layer_param(layer, layer->weights, s->shapes[i].kind);
        for (int n = 0; n < NUM_RANK_MAJOR; n++)
            if (kinds[n] == s->shapes[i].kind) w[i] = rank_heads(layer)->weights[n];
    }
    rank_major_weights(layer, RANGE_FORWARD);
    fp8_weights(s, layer->l, w, layer->stream);
}

// Adds a rank-major gradient to the model's, on the stream whose kernels computed it.
static inline void rank_major_add(const Layer* layer, RankMajor which, cudaStream_t stream) {
    Range range("exchange of sequences", RANGE_BACKWARD, stream);
    const RankMajorTensor t = rank_major_tensor(layer, which);
    float* to = layer_param(layer, layer->grads, t.kind);
    if (to)
        CUDA_LAUNCH(rank_major_add_kernel, ceil_div<int64_t>(t.rows * t.width / 4, 256), 256, stream, to,
                    rank_heads(layer)->dweights[which], t, head_layout(layer));
}

// The linear layer of a projection with rank-major weights. Padding columns of 0 follow its output.
static inline Linear rank_major_linear(const Layer* layer, RankMajor which) {
    Linear linear = which == RANK_MAJOR_IN_PROJ ? layer_in_proj(layer) : layer_linear(layer, P_O_PROJ);
    linear.w = rank_heads(layer)->weights[which];
    linear.dw = rank_heads(layer)->dweights[which];
    return linear;
}

// Adds the output norm's and the own heads' gradients to the model's, behind the other kernels of the
// backward pass.
static inline void rank_major_gradients(const Layer* layer) {
    Range range("exchange of sequences", RANGE_BACKWARD, layer->stream);
    const HeadWeights own = head_weights_of(layer);
    rank_major_add(layer, RANK_MAJOR_OUTPUT_NORM, layer->stream);
    CUDA_LAUNCH(head_gradients_kernel, head_weights_blocks(layer), 256, layer->stream, *rank_heads(layer),
                own);
}
