/*
The weights of a layer's attention where ranks share sequences (split.h). Which heads a rank has is read
here from the layer's row of the table (deal.cuh): the kernels of a pass see heads in the order of ranks.

    ordered       copies of weights of all heads for what is computed token by token, and gradients of theirs
      in_proj     the fused projection's rows: q, k and v of rank 0, of rank 1, ...; then the output gate's and the
                  other gates' as in the parameter table, but with their heads in order
      o_proj      its columns, and the output norm's weights, with their heads in order
    own heads     weights that a head has of its own, of QK norm and the gate's bias, and gradients of theirs

So in proj and o the columns that a rank sends to another are side by side, and copy engines need no packing. Every
pass of a layer copies its weights anew, on the main stream: all layers share these buffers. A gradient is added to
the model's behind the kernels that compute it.

Called by sequence.cuh, mixer.cuh and, before passes in FP8, by the GPU trainer.
*/
#pragma once

#include "deal.cuh"

// ----------------------------------------------------------------------------
// weights of all heads, in the order of ranks

struct HeadOrder {
    HeadColumns columns; // of proj
    const int* deal;     // of head_deal
    int gate, dh, d;     // the output gate's first row in the projection, -1: there is none; channels

    // The head at a position, as the model's weights have them; a channel of its.
    __device__ int head(int position) const {
        return (int)sequence_dealt_head(deal, position / columns.heads, columns.ranks, columns.heads,
                                        position % columns.heads);
    }
    __device__ int channel(int c) const { return head(c / dh) * dh + c % dh; }
    // The row of the model's projection that row j of the ordered one is.
    __device__ int row(int j) const {
        const int wide = head_columns_wide(&columns);
        if (j < columns.ranks * wide) return head_columns_whole(&columns, deal, j / wide, j % wide);
        if (gate >= 0 && j >= gate && j < gate + d) return gate + channel(j - gate);
        for (int p = 0; p < columns.parts; p++) {
            const int at = j - columns.part[p].column;
            if (columns.part[p].width == 1 && at >= 0 && at < columns.ranks * columns.heads)
                return columns.part[p].column + head(at);
        }
        return j;
    }
};

// A matrix [rows, width] whose rows or columns are ordered; behind it are padding rows of zeros.
struct OrderedTensor {
    ParamKind kind;
    int64_t rows, padded, width;
    bool columns;

    // Where the model's tensor has element `at` of the ordered one.
    __device__ int64_t of_model(int64_t at, const HeadOrder& order) const {
        const int row = (int)(at / width), column = (int)(at % width);
        return columns ? row * width + order.channel(column) : order.row(row) * width + column;
    }
};

// Thread: eight elements.
__global__ static void __launch_bounds__(256)
    order_weights_kernel(bf16* ordered, const bf16* w, const __grid_constant__ OrderedTensor t,
                         const __grid_constant__ HeadOrder order) {
    const int64_t at = 8 * ((int64_t)blockIdx.x * 256 + threadIdx.x);
    if (at >= t.padded * t.width) return;
    Raw8 values = {};
    if (at < t.rows * t.width) values = load_raw8(w + t.of_model(at, order));
    store16(ordered + at, values);
}

// Thread: four elements. dw += ordered, which becomes 0: the next gradient is added to it.
__global__ static void __launch_bounds__(256)
    order_add_kernel(float* dw, float* ordered, const __grid_constant__ OrderedTensor t,
                     const __grid_constant__ HeadOrder order) {
    const int64_t at = 4 * ((int64_t)blockIdx.x * 256 + threadIdx.x);
    if (at >= t.rows * t.width) return;
    float4* to = (float4*)(dw + t.of_model(at, order));
    const float4 sum = *to, add = *(float4*)(ordered + at);
    *to = {sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w};
    *(float4*)(ordered + at) = {};
}

static inline HeadOrder head_order(const Layer* layer) {
    return {.columns = rank_heads(layer)->proj,
            .deal = head_deal(layer),
            .gate = (int)params_column(layer->table, P_OGATE_PROJ),
            .dh = (int)config_head_size(layer->config),
            .d = (int)layer->config->hidden_size};
}

static inline OrderedTensor ordered_tensor(const Layer* layer, int which) {
    const int64_t R = layer->table->proj.rows, d = layer->config->hidden_size;
    if (which == ORDERED_IN_PROJ) return {layer->table->proj.first, R, matmul_padded(R), d, false};
    if (which == ORDERED_O_PROJ) return {P_O_PROJ, d, d, d, true};
    return {P_OUTPUT_NORM, 1, 1, d, true};
}

// ----------------------------------------------------------------------------
// weights of the rank's own heads

// Tensors of QK norm's weights for q and k [NH, dh], and of the gate's bias [NH]; NULL: there is none, or heads
// share it.
struct HeadWeights {
    const bf16* norms[2];
    const float* bias;
    float *dnorms[2], *dbias;
    const int* deal; // of head_deal
    int dh;
};

// Head i of the rank, of all heads.
__device__ static inline int64_t head_weights_whole(const RankHeads& h, const HeadWeights& w, int i) {
    return sequence_dealt_head(w.deal, h.group.rank, h.group.size, h.o.heads, i);
}

// Copies the weights of the rank's heads, and zeroes their gradients.
__global__ static void __launch_bounds__(256)
    head_weights_kernel(const __grid_constant__ RankHeads h, const __grid_constant__ HeadWeights w) {
    const int i = (int)(blockIdx.x * 256 + threadIdx.x), heads = h.o.heads, head = i / w.dh;
    if (head >= heads) return;
    const int64_t whole = head_weights_whole(h, w, head) * w.dh + i % w.dh;
    for (int k = 0; k < 2; k++)
        if (w.norms[k]) h.norms[k][i] = w.norms[k][whole], h.dnorms[k][i] = 0;
    if (i >= heads || !w.bias) return;
    h.bias[i] = w.bias[head_weights_whole(h, w, i)];
    h.dbias[i] = 0;
}

// Adds the gradients of the rank's heads to those of all heads.
__global__ static void __launch_bounds__(256)
    head_gradients_kernel(const __grid_constant__ RankHeads h, const __grid_constant__ HeadWeights w) {
    const int i = (int)(blockIdx.x * 256 + threadIdx.x), heads = h.o.heads, head = i / w.dh;
    if (head >= heads) return;
    const int64_t whole = head_weights_whole(h, w, head) * w.dh + i % w.dh;
    for (int k = 0; k < 2; k++)
        if (w.norms[k] && w.dnorms[k]) w.dnorms[k][whole] += h.dnorms[k][i];
    if (i < heads && w.bias && w.dbias) w.dbias[head_weights_whole(h, w, i)] += h.dbias[i];
}

static inline HeadWeights head_weights_of(const Layer* layer) {
    const bool own = !layer->config->qk_norm_share;
    return {
        .norms = {own ? layer_param(layer, layer->weights, P_Q_NORM) : NULL,
                  own ? layer_param(layer, layer->weights, P_K_NORM) : NULL},
        .bias = layer_param_fp32(layer, P_FGATE_BIAS),
        .dnorms = {layer_param(layer, layer->grads, P_Q_NORM), layer_param(layer, layer->grads, P_K_NORM)},
        .dbias = layer_param(layer, layer->grads, P_FGATE_BIAS),
        .deal = head_deal(layer),
        .dh = (int)config_head_size(layer->config)};
}

// Either kernel's thread blocks.
static inline int head_weights_blocks(const Layer* layer, const HeadWeights* w) {
    return ceil_div(rank_heads(layer)->o.heads * w->dh, 256);
}

// ----------------------------------------------------------------------------
// all of them

// Allocates the weights of all heads for passes, and their gradients for training. sequence_close frees them.
static inline void order_open(const Layer* layer) {
    RankHeads* h = &sequence_of(layer)->heads;
    const size_t d = (size_t)layer->config->hidden_size, S = (size_t)matmul_padded(layer->table->proj.rows);
    const size_t counts[NUM_ORDERED] = {S * d, d * d, d};
    for (int i = 0; i < NUM_ORDERED; i++) {
        h->ordered[i] = (bf16*)device_zeros(counts[i] * sizeof(bf16));
        if (layer->grads) h->dordered[i] = (float*)device_zeros(counts[i] * sizeof(float));
    }
}

// Before a pass of the layer reads weights of attention.
static inline void order_weights(const Layer* layer, RangePass pass) {
    Range range("exchange of sequences", pass, layer->stream);
    const HeadOrder order = head_order(layer);
    const HeadWeights own = head_weights_of(layer);
    for (int i = 0; i < NUM_ORDERED; i++) {
        const OrderedTensor t = ordered_tensor(layer, i);
        const bf16* from = layer_param(layer, layer->weights, t.kind);
        const int64_t groups = t.padded * t.width / 8;
        if (from)
            CUDA_LAUNCH(order_weights_kernel, ceil_div<int64_t>(groups, 256), 256, layer->stream,
                        rank_heads(layer)->ordered[i], from, t, order);
    }
    CUDA_LAUNCH(head_weights_kernel, head_weights_blocks(layer, &own), 256, layer->stream, *rank_heads(layer),
                own);
}

// layer_weights_in_fp8, of the weights that GEMMs read where ranks share sequences.
static inline void sequence_weights_in_fp8(const Layer* layer, const Fp8State* s) {
    if (sequence_ranks(sequence_of(layer)) == 1) return layer_weights_in_fp8(layer, s);
    if (layer->l < 0 || layer->l >= s->layers) return;
    const ParamKind kinds[NUM_ORDERED] = {layer->table->proj.first, P_O_PROJ, P_OUTPUT_NORM};
    const bf16* w[FP8_LINEARS];
    for (int i = 0; i < FP8_LINEARS; i++) {
        w[i] = layer_param(layer, layer->weights, s->shapes[i].kind);
        for (int n = 0; n < NUM_ORDERED; n++)
            if (kinds[n] == s->shapes[i].kind) w[i] = rank_heads(layer)->ordered[n];
    }
    order_weights(layer, RANGE_FORWARD);
    fp8_weights(s, layer->l, w, layer->stream);
}

// Behind the kernels that compute it on a stream: adds a gradient in the order of ranks to the model's.
static inline void order_add(const Layer* layer, Ordered which, cudaStream_t stream) {
    Range range("exchange of sequences", RANGE_BACKWARD, stream);
    const OrderedTensor t = ordered_tensor(layer, which);
    float* to = layer_param(layer, layer->grads, t.kind);
    if (to)
        CUDA_LAUNCH(order_add_kernel, ceil_div<int64_t>(t.rows * t.width / 4, 256), 256, stream, to,
                    rank_heads(layer)->dordered[which], t, head_order(layer));
}

// The linear layer of a projection, of weights in the order of ranks: behind its output are padding columns of 0.
static inline Linear ordered_linear(const Layer* layer, Ordered which) {
    Linear linear = which == ORDERED_IN_PROJ ? layer_in_proj(layer) : layer_linear(layer, P_O_PROJ);
    linear.w = rank_heads(layer)->ordered[which];
    linear.dw = rank_heads(layer)->dordered[which];
    return linear;
}

// Behind the backward pass's other kernels of attention.
static inline void order_gradients(const Layer* layer) {
    Range range("exchange of sequences", RANGE_BACKWARD, layer->stream);
    const HeadWeights own = head_weights_of(layer);
    order_add(layer, ORDERED_OUTPUT_NORM, layer->stream);
    CUDA_LAUNCH(head_gradients_kernel, head_weights_blocks(layer, &own), 256, layer->stream,
                *rank_heads(layer), own);
}
