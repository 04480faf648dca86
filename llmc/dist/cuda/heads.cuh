/*
Rows of a rank's heads, where ranks share sequences (llmc/model/sequence.h), and the weights of these heads.

    x, whole rows     bf16 [B, Tn, x_stride], the rank's own Tn = T / N tokens with all heads: proj, o, gradients
    block of rank r   bf16 [B, Tn, stride], the same tokens with the heads of rank r (HeadColumns)

heads_split cuts whole rows into N blocks, one for the heads of each rank; heads_join puts whole rows together
from the N blocks that ranks have sent. A thread moves eight columns of a block: 16 bytes of q, k, v or o, or
up to eight heads' logits of gates. Other columns of whole rows stay as they are.

Rows of delta, float [B, NH, Tn] of the rank's own tokens, are split in the same way, into blocks [B, NH/N, Tn].

Weights that a head has of its own, of QK norm and the gate's bias, are copied to [heads] of the rank before its
kernels run, and their gradients are added to those of all heads after: the kernels know of no ranks.

Which heads a rank has is read from the layer's row of the table (deal.cuh), for columns and weights alike.

Called by sequence.cuh and prompt.cuh.
*/
#pragma once

#include "../../layers/layer.cuh"
#include "deal.cuh"

// The block of each rank, NULL: left out; sequences are Tn stride elements apart, but in the rank's own block own_stride.
typedef struct {
    bf16* rows[SEQUENCE_MAX_RANKS];
    int64_t own_stride;
    int rank;
} HeadBlocks;

struct HeadRows {
    HeadColumns columns;
    const int* deal; // of head_deal
    int64_t x_stride;
    int Tn, chunks, count; // tokens of a sequence; groups of eight columns of a block's row, and of a block
};

// Thread: a group of eight columns of a block; blockIdx.y is the rank whose heads these are.
template <bool SPLIT>
__global__ static void __launch_bounds__(256)
    heads_kernel(const __grid_constant__ HeadBlocks blocks, bf16* x, const __grid_constant__ HeadRows a) {
    const int n = (int)(blockIdx.x * 256 + threadIdx.x), rank = (int)blockIdx.y;
    if (n >= a.count || !blocks.rows[rank]) return;
    const int row = n / a.chunks, local = n % a.chunks * HEAD_COLUMNS_ALIGN, b = row / a.Tn, t = row % a.Tn;
    const int64_t batch_stride = rank == blocks.rank ? blocks.own_stride : (int64_t)a.Tn * a.columns.stride;
    bf16* at = blocks.rows[rank] + b * batch_stride + (int64_t)t * a.columns.stride + local;
    x += row * a.x_stride;
    int part = 0;
    while (part + 1 < a.columns.parts && local >= a.columns.part[part + 1].local) part++;
    if (a.columns.part[part].width % HEAD_COLUMNS_ALIGN == 0) {
        bf16* whole = x + head_columns_whole(&a.columns, a.deal, rank, local);
        if (SPLIT)
            store16(at, load_raw8(whole));
        else
            store16(whole, load_raw8(at));
        return;
    }
    Pack8 values = {};
    if (!SPLIT) values = load16(at);
    for (int i = 0; i < HEAD_COLUMNS_ALIGN; i++) {
        const int whole = head_columns_whole(&a.columns, a.deal, rank, local + i);
        if (SPLIT && whole >= 0) values[i] = x[whole];
        if (!SPLIT && whole >= 0) x[whole] = values[i];
    }
    if (SPLIT) store16(at, values);
}

// deal: of head_deal.
static inline HeadRows head_rows(const HeadColumns* columns, const int* deal, int64_t x_stride, int64_t B,
                                 int64_t Tn) {
    const int chunks = columns->stride / HEAD_COLUMNS_ALIGN;
    assert(B * Tn * chunks < INT32_MAX && x_stride % HEAD_COLUMNS_ALIGN == 0);
    for (int p = 0; p < columns->parts; p++) // of 16 bytes, unless they are single columns
        assert(columns->part[p].width == 1 ||
               (columns->part[p].width | columns->part[p].column) % HEAD_COLUMNS_ALIGN == 0);
    return {.columns = *columns,
            .deal = deal,
            .x_stride = x_stride,
            .Tn = (int)Tn,
            .chunks = chunks,
            .count = (int)(B * Tn) * chunks};
}

// Writes the blocks of all ranks from x; padding columns become 0.
static inline void heads_split(const HeadBlocks* blocks, const bf16* x, const HeadRows* rows,
                               cudaStream_t stream) {
    const dim3 grid((unsigned)ceil_div(rows->count, 256), (unsigned)rows->columns.ranks);
    CUDA_LAUNCH(heads_kernel<true>, grid, 256, stream, *blocks, (bf16*)(uintptr_t)x, *rows);
}

// Writes the heads' columns of x from the blocks of all ranks.
static inline void heads_join(bf16* x, const HeadBlocks* blocks, const HeadRows* rows, cudaStream_t stream) {
    const dim3 grid((unsigned)ceil_div(rows->count, 256), (unsigned)rows->columns.ranks);
    CUDA_LAUNCH(heads_kernel<false>, grid, 256, stream, *blocks, x, *rows);
}

struct DeltaRows {
    const int* deal; // of head_deal
    int rank, ranks, heads;
    int64_t B, Tn;
};

// Thread block (row, chunk of tokens) of the rows of all blocks, [ranks, B, heads].
__global__ static void __launch_bounds__(256)
    delta_kernel(float* own, float* blocks, const float* delta, const __grid_constant__ DeltaRows a) {
    const int64_t row = blockIdx.x, t = blockIdx.y * 256 + threadIdx.x, of_rank = a.B * a.heads;
    if (t >= a.Tn) return;
    const int rank = (int)(row / of_rank), i = (int)(row % a.heads);
    const int64_t b = row % of_rank / a.heads, NH = (int64_t)a.ranks * a.heads;
    const float value = delta[(b * NH + sequence_dealt_head(a.deal, rank, a.ranks, a.heads, i)) * a.Tn + t];
    if (rank == a.rank)
        own[(row % of_rank * a.ranks + rank) * a.Tn + t] = value;
    else
        blocks[row * a.Tn + t] = value;
}

// Writes the blocks [ranks, B, heads, Tn] of the other ranks' heads from delta [B, NH, Tn], and the rank's own block
// into its tokens' place of `own` [B, heads, ranks, Tn].
static inline void delta_split(float* own, float* blocks, const float* delta, const DeltaRows* rows,
                               cudaStream_t stream) {
    const dim3 grid((unsigned)(rows->ranks * rows->B * rows->heads),
                    (unsigned)ceil_div<int64_t>(rows->Tn, 256));
    assert(grid.y < 65536);
    CUDA_LAUNCH(delta_kernel, grid, 256, stream, own, blocks, delta, *rows);
}

// ----------------------------------------------------------------------------
// weights of single heads

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

// Before the kernels of the rank's heads, in either pass.
static inline void head_weights_copy(const Layer* layer) {
    if (!layer->heads) return;
    const HeadWeights w = head_weights_of(layer);
    CUDA_LAUNCH(head_weights_kernel, ceil_div(layer->heads->o.heads * w.dh, 256), 256, layer->stream,
                *layer->heads, w);
}

// Behind them in the backward pass.
static inline void head_gradients_add(const Layer* layer) {
    if (!layer->heads) return;
    const HeadWeights w = head_weights_of(layer);
    CUDA_LAUNCH(head_gradients_kernel, ceil_div(layer->heads->o.heads * w.dh, 256), 256, layer->stream,
                *layer->heads, w);
}
