/*
What --fp8 keeps besides a model: weights in FP8, the scales of all tensors, the buffers of a pass.

Scales of inputs and gradients are delayed: a step quantizes with scales from the largest amax of the last
FP8_HISTORY steps, and measures its own amax. So a tensor is quantized by the kernel that computes it.
The scale of weights is that of the weights as they are.

    fp8_weights         of one layer, before its first pass with new weights: amax, then both copies
    fp8_collect_amax    at the end of a step; with several ranks follows the maximum over them
    fp8_update          scales of the next step, where this step is valid

A new run has no scales. Its first step is in bf16, and measures every tensor instead (fp8_measure). With
several ranks the amax of all are combined, so that their scales are the same, those of one rank with all
batches, and belong to the checkpoint as the weights do.

All bits are the same in every run: maxima do not depend on the order.
*/
#pragma once

#include "../cuda/device.cuh"
#include "../cuda/matmul.cuh"
#include "../model/fp8.h"

typedef struct {
    int64_t layers, Vs, d; // rows and columns of lm_head
    Fp8Shape shapes[FP8_LINEARS];
    int64_t weight_at[FP8_LINEARS]; // where a linear layer's copies begin in those of its block
    fp8* weights;      // [layers, fp8_block_bytes]: of each linear layer [N, K], then [K, N]; lm_head's
    Fp8Scale* scales;  // [layers + 1, FP8_BLOCK_TENSORS], at fp8_index; lm_head's are those of layer `layers`
    uint32_t* lanes;   // the same, amax in FP8_LANES: of inputs and gradients of this step so far
    uint32_t* amax;    // [layers, FP8_LINEARS, FP8_DELAYED] of this step
    uint16_t* history; // the same, [FP8_HISTORY], as fp8_history_text
    fp8 *inputs, *residuals, *proj_gradients; // buffers of a pass: Fp8Rows
    fp8 *x_scratch, *dout_scratch;            // the same, of the stream of weight gradients
    bool scaled;                              // has scales of inputs and gradients
    bool training;                            // the pass in progress is one of training; others are in bf16
} Fp8State;

enum { FP8_BLOCK_DELAYED = FP8_LINEARS * FP8_DELAYED, FP8_BLOCK_TENSORS = FP8_LINEARS * FP8_TENSORS };

// The index of a tensor in scales and lanes: of a block its inputs and gradients, then its weights.
static inline int64_t fp8_index(int64_t layer, int linear, int tensor) {
    return layer * FP8_BLOCK_TENSORS +
           (tensor == FP8_WEIGHT ? FP8_BLOCK_DELAYED + linear : linear * FP8_DELAYED + tensor);
}

// The same of the i-th of all inputs and gradients.
__device__ static inline int fp8_delayed_index(int i) {
    return i / FP8_BLOCK_DELAYED * FP8_BLOCK_TENSORS + i % FP8_BLOCK_DELAYED;
}

// Allocates the state of a model, without the buffers of a pass.
static inline Fp8State* fp8_open(const Config* c, const ParamTable* table) {
    Fp8State* s = (Fp8State*)xcalloc(1, sizeof *s);
    s->layers = c->num_hidden_layers;
    fp8_shapes(s->shapes, c, table);
    for (int i = 1; i < FP8_LINEARS; i++)
        s->weight_at[i] = s->weight_at[i - 1] + 2 * s->shapes[i - 1].N * s->shapes[i - 1].K;
    s->Vs = matmul_padded(c->vocab_size), s->d = c->hidden_size;
    const size_t linears = (size_t)(s->layers * FP8_LINEARS), tensors = (linears + FP8_LINEARS) * FP8_TENSORS;
    s->weights = (fp8*)device_bytes((size_t)fp8_weight_bytes(c, table));
    s->scales = (Fp8Scale*)device_zeros(tensors * sizeof(Fp8Scale));
    s->lanes = (uint32_t*)device_zeros(tensors * FP8_LANES * FP8_LANE_STRIDE * sizeof(uint32_t));
    s->amax = (uint32_t*)device_zeros(linears * FP8_DELAYED * sizeof(uint32_t));
    s->history = (uint16_t*)device_zeros((size_t)fp8_history_count(s->layers) * sizeof(uint16_t));
    return s;
}

// The buffers of passes over `rows` tokens.
static inline void fp8_allocate(Fp8State* s, int64_t rows) {
    const Fp8Rows row = fp8_rows(s->shapes);
    s->inputs = (fp8*)device_bytes((size_t)(rows * row.input));
    s->residuals = (fp8*)device_bytes((size_t)(rows * row.residual));
    s->proj_gradients = (fp8*)device_bytes((size_t)(rows * row.proj_gradient));
    s->x_scratch = (fp8*)device_bytes((size_t)(rows * row.x_scratch));
    s->dout_scratch = (fp8*)device_bytes((size_t)(rows * row.dout_scratch));
}

// s may be NULL.
static inline void fp8_close(Fp8State* s) {
    if (!s) return;
    void* const buffers[] = {s->weights, s->scales,    s->lanes,          s->amax,      s->history,
                             s->inputs,  s->residuals, s->proj_gradients, s->x_scratch, s->dout_scratch};
    for (void* buffer : buffers) device_free(buffer);
    free(s);
}

// ----------------------------------------------------------------------------
// a linear layer's tensors

static inline Fp8Scale* fp8_scale_of(const Fp8State* s, int64_t layer, int linear, int tensor) {
    return s->scales + fp8_index(layer, linear, tensor);
}

static inline uint32_t* fp8_lanes_of(const Fp8State* s, int64_t layer, int linear, int tensor) {
    return s->lanes + fp8_index(layer, linear, tensor) * (FP8_LANES * FP8_LANE_STRIDE);
}

// The weights of a linear layer in FP8: [N, K]; [K, N] follows.
static inline fp8* fp8_weights_of(const Fp8State* s, int64_t layer, int linear) {
    return s->weights + layer * fp8_block_bytes(s->shapes) + s->weight_at[linear];
}

// A linear layer whose output has `columns` columns with those in bf16. One buffer serves all inputs, as each
// is read by the next GEMM. Gradients are read until their weights' gradient is there: that of the residual
// stream is overwritten by norms behind weight_stream_join, and the projection's while the MLP's is computed.
// The caller gives the MLP's a place, in the buffer that it has in bf16.
static inline Fp8Linear fp8_linear(const Fp8State* s, int64_t layer, int linear, int64_t columns) {
    const Fp8Shape* shape = &s->shapes[linear];
    const fp8* w = fp8_weights_of(s, layer, linear);
    fp8* gradients = linear == FP8_IN_PROJ     ? s->proj_gradients
                     : linear == FP8_GATE_PROJ ? NULL
                                               : s->residuals;
    return {.w = w,
            .w_transposed = w + shape->N * shape->K,
            .w_scale = fp8_scale_of(s, layer, linear, FP8_WEIGHT),
            .x = {.data = s->scaled ? s->inputs : NULL,
                  .stride = shape->K,
                  .scale = fp8_scale_of(s, layer, linear, FP8_INPUT),
                  .amax = fp8_lanes_of(s, layer, linear, FP8_INPUT),
                  .alone = columns == shape->N},
            .dout = {.data = s->scaled ? gradients : NULL,
                     .stride = shape->N,
                     .scale = fp8_scale_of(s, layer, linear, FP8_GRADIENT),
                     .amax = fp8_lanes_of(s, layer, linear, FP8_GRADIENT),
                     .alone = linear == FP8_IN_PROJ},
            .x_scratch = s->x_scratch,
            .dout_scratch = s->dout_scratch,
            .N = shape->N};
}

// ----------------------------------------------------------------------------
// weights

// A matrix of weights: w [rows, columns] in bf16 becomes q, and t transposed.
struct Fp8Matrix {
    const bf16* w;
    fp8 *q, *t;
    int rows, columns;
    Fp8Scale* scale;
    uint32_t* lanes;
};

struct Fp8Matrices {
    Fp8Matrix items[FP8_LINEARS];
};

// The matrix of the thread block, and `tile` becomes its number there: tiles are numbered one matrix after
// the other.
__device__ static inline Fp8Matrix fp8_matrix(const Fp8Matrices& matrices, int& tile) {
    int i = 0;
    for (tile = (int)blockIdx.x; i < FP8_LINEARS - 1; i++) {
        const Fp8Matrix& m = matrices.items[i];
        const int tiles = ceil_div<int>(m.columns, FP8_TILE) * ceil_div<int>(m.rows, FP8_TILE);
        if (tile < tiles) break;
        tile -= tiles;
    }
    return matrices.items[i];
}

__device__ static inline void fp8_load_tile(Raw8 raw[FP8_TILE_ROWS], const Fp8Matrix& m,
                                            const Fp8Tile& tile) {
#pragma unroll
    for (int i = 0; i < FP8_TILE_ROWS; i++) {
        const int row = tile.row + FP8_TILE_STEP * i;
        raw[i] = Raw8{};
        if (tile.column < m.columns && row < m.rows)
            raw[i] = load_raw8(m.w + (int64_t)row * m.columns + tile.column);
    }
}

__global__ static void __launch_bounds__(256)
    fp8_weights_amax_kernel(const __grid_constant__ Fp8Matrices matrices) {
    int number;
    const Fp8Matrix m = fp8_matrix(matrices, number);
    const Fp8Tile tile(m.columns, number);
    Raw8 raw[FP8_TILE_ROWS];
    uint32_t amax = 0;
    fp8_load_tile(raw, m, tile);
    for (const Raw8& eight : raw) fp8_pack8<FP8_E4M3>(eight, 1, amax);
    fp8_add_amax(m.lanes, amax);
}

__global__ static void __launch_bounds__(256)
    fp8_weights_kernel(const __grid_constant__ Fp8Matrices matrices) {
    __shared__ Fp8Transposed transposed;
    int number;
    const Fp8Matrix m = fp8_matrix(matrices, number);
    const Fp8Tile tile(m.columns, number);
    Raw8 raw[FP8_TILE_ROWS];
    fp8_load_tile(raw, m, tile);
    const Fp8Scale scale = fp8_scale(fp8_amax(m.lanes), FP8_E4M3);
    if (threadIdx.x == 0 && number == 0) *m.scale = scale;
#pragma unroll
    for (int i = 0; i < FP8_TILE_ROWS; i++) {
        const int row = tile.row + FP8_TILE_STEP * i;
        const uint2 q = fp8_bytes<FP8_E4M3>(raw[i], scale.scale);
        if (row < m.rows && tile.column < m.columns)
            *(uint2*)(m.q + (int64_t)row * m.columns + tile.column) = q;
        transposed.put(tile, i, q);
    }
    __syncthreads();
    transposed.store(m.t, tile, m.rows, m.columns);
}

static inline void fp8_write_matrices(const Fp8Matrices* matrices, int64_t tiles, cudaStream_t stream) {
    CUDA_CHECK(cudaMemsetAsync(matrices->items[0].lanes, 0,
                               FP8_LINEARS * FP8_LANES * FP8_LANE_STRIDE * sizeof(uint32_t), stream));
    CUDA_LAUNCH(fp8_weights_amax_kernel, tiles, 256, stream, *matrices);
    CUDA_LAUNCH(fp8_weights_kernel, tiles, 256, stream, *matrices);
}

// Both copies of a layer's weights, and their scales. w: of each linear layer.
static inline void fp8_weights(const Fp8State* s, int64_t layer, const bf16* const w[FP8_LINEARS],
                               cudaStream_t stream) {
    Range range("weights in FP8", RANGE_FORWARD, stream);
    Fp8Matrices matrices;
    int64_t tiles = 0;
    for (int i = 0; i < FP8_LINEARS; i++) {
        const Fp8Shape* shape = &s->shapes[i];
        fp8* q = fp8_weights_of(s, layer, i);
        uint32_t* lanes = fp8_lanes_of(s, layer, i, FP8_WEIGHT);
        matrices.items[i] = {.w = w[i],
                             .q = q,
                             .t = q + shape->N * shape->K,
                             .rows = (int)shape->N,
                             .columns = (int)shape->K,
                             .scale = fp8_scale_of(s, layer, i, FP8_WEIGHT),
                             .lanes = lanes};
        tiles += fp8_tiles(shape->N, shape->K);
    }
    fp8_write_matrices(&matrices, tiles, stream);
}

// ----------------------------------------------------------------------------
// lm_head, whose scales have no history: a norm's output is at most sqrt(d) times its largest weight, and the
// logits' gradient at most the weight of a token's loss

static inline fp8* fp8_head_weights_of(const Fp8State* s) {
    return s->weights + s->layers * fp8_block_bytes(s->shapes);
}

// Both copies of lm_head's weights w [Vs, d], whose rows behind the vocabulary are 0.
static inline void fp8_head_weights(const Fp8State* s, const bf16* w, cudaStream_t stream) {
    Range range("weights in FP8", RANGE_FORWARD, stream);
    fp8* q = fp8_head_weights_of(s);
    Fp8Matrices matrices = {}; // but for the first of no rows
    matrices.items[0] = {.w = w,
                         .q = q,
                         .t = q + s->Vs * s->d,
                         .rows = (int)s->Vs,
                         .columns = (int)s->d,
                         .scale = fp8_scale_of(s, s->layers, 0, FP8_WEIGHT),
                         .lanes = fp8_lanes_of(s, s->layers, 0, FP8_WEIGHT)};
    fp8_write_matrices(&matrices, fp8_tiles(s->Vs, s->d), stream);
}

// The bits of bf16 of x > 0, rounded up
__host__ __device__ static inline uint32_t fp8_bits_above(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0xffff) >> 16;
}

// One warp
__global__ static void __launch_bounds__(32)
    fp8_norm_scale_kernel(Fp8Scale* scale, const bf16* weight, int d) {
    uint32_t pair = 0;
    for (int c = 8 * (int)threadIdx.x; c < d; c += 8 * 32)
        fp8_pack8<FP8_E4M3>(load_raw8(weight + c), 1, pair);
    const uint32_t amax = __reduce_max_sync(~0u, max(pair & 0xffff, pair >> 16));
    const float most = sqrtf((float)d) * __uint_as_float(amax << 16);
    if (threadIdx.x == 0) *scale = fp8_scale(fp8_bits_above(most), FP8_E4M3);
}

__global__ static void __launch_bounds__(1) fp8_set_scale_kernel(Fp8Scale* scale, Fp8Scale value) {
    *scale = value;
}

// The scale of lm_head's input, from the weights [d] of the norm before it; nothing where FP8 is not to be
// computed yet.
static inline void fp8_head_input_scale(const Fp8State* s, const bf16* weight, cudaStream_t stream) {
    if (s->scaled)
        CUDA_LAUNCH(fp8_norm_scale_kernel, 1, 32, stream, fp8_scale_of(s, s->layers, 0, FP8_INPUT), weight,
                    (int)s->d);
}

// The scale of the logits' gradient, of losses that count dloss.
static inline void fp8_head_gradient_scale(const Fp8State* s, float dloss, cudaStream_t stream) {
    if (s->scaled)
        CUDA_LAUNCH(fp8_set_scale_kernel, 1, 1, stream, fp8_scale_of(s, s->layers, 0, FP8_GRADIENT),
                    fp8_scale(fp8_bits_above(dloss), FP8_E5M2));
}

// lm_head's input, which the final norm writes. Nothing reads its amax.
static inline Fp8Tensor fp8_head_input(const Fp8State* s) {
    return {.data = s->scaled ? s->inputs : NULL,
            .stride = s->d,
            .scale = fp8_scale_of(s, s->layers, 0, FP8_INPUT),
            .amax = fp8_lanes_of(s, s->layers, 0, FP8_INPUT)};
}

// lm_head from row `first` of its input on, with places for the gradient of logits and for that transposed;
// all zero where FP8 is not to be computed yet.
static inline Fp8Linear fp8_head(const Fp8State* s, int64_t first, fp8* dlogits, fp8* transposed) {
    const Fp8Tensor input = fp8_head_input(s);
    const fp8* w = fp8_head_weights_of(s);
    if (!s->scaled) return Fp8Linear{};
    return {.w = w,
            .w_transposed = w + s->Vs * s->d,
            .w_scale = fp8_scale_of(s, s->layers, 0, FP8_WEIGHT),
            .x = fp8_slice(&input, first),
            .dout = {.data = dlogits, .stride = s->Vs, .scale = fp8_scale_of(s, s->layers, 0, FP8_GRADIENT)},
            .x_scratch = s->x_scratch,
            .dout_scratch = transposed,
            .N = s->Vs,
            .exact = true};
}

// ----------------------------------------------------------------------------
// the end of a step

// A block of one warp has an input or a gradient.
__global__ static void __launch_bounds__(32) fp8_collect_amax_kernel(uint32_t* amax, uint32_t* lanes) {
    uint32_t* mine = lanes + fp8_delayed_index((int)blockIdx.x) * (FP8_LANES * FP8_LANE_STRIDE);
    const uint32_t most = fp8_amax(mine);
    mine[threadIdx.x * FP8_LANE_STRIDE] = 0; // for the next step
    if (threadIdx.x == 0) amax[blockIdx.x] = most;
}

// `finite` on the device: this step is valid, and is entry `now` of the history; NULL: no step has been.
// saturated [FP8_DELAYED]: to the tensor's kind 1 is added where the step's scale brought its amax out of
// range.
__global__ static void __launch_bounds__(32)
    fp8_update_kernel(Fp8Scale* scales, uint16_t* history, const uint32_t* amax, int now,
                      const int32_t* finite, int32_t* saturated) {
    const int lane = (int)threadIdx.x, tensor = (int)blockIdx.x % FP8_DELAYED;
    uint16_t* mine = history + (int64_t)blockIdx.x * FP8_HISTORY;
    Fp8Scale* scale = scales + fp8_delayed_index((int)blockIdx.x);
    uint32_t most = lane < FP8_HISTORY ? mine[lane] : 0;
    if (finite && *finite && lane == now) {
        most = min(amax[blockIdx.x], (uint32_t)FP8_NOT_FINITE - 1);
        mine[lane] = (uint16_t)most;
        const float written = __uint_as_float(most << 16) * scale->scale; // 0 in a first step, of bf16
        if (written > (tensor == FP8_INPUT ? 448 : 57344)) atomicAdd(&saturated[tensor], 1);
    }
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) *scale = fp8_scale(most, tensor == FP8_INPUT ? FP8_E4M3 : FP8_E5M2);
}

static inline int64_t fp8_delayed_tensors(const Fp8State* s) { return s->layers * FP8_LINEARS * FP8_DELAYED; }

// s->amax of the step, whose maximum over all ranks fp8_update reads.
static inline void fp8_collect_amax(const Fp8State* s, cudaStream_t stream) {
    CUDA_LAUNCH(fp8_collect_amax_kernel, fp8_delayed_tensors(s), 32, stream, s->amax, s->lanes);
}

// The scales of the steps after `step`, counted from 1; where *finite, on the device, is 0 they stay. Adds to
// saturated [FP8_DELAYED] how many inputs and how many gradients had values out of range, in whose place
// GEMMs read the format's largest number. amax tells: the kernels that quantize count nothing.
static inline void fp8_update(Fp8State* s, int64_t step, const int32_t* finite, int32_t* saturated,
                              cudaStream_t stream) {
    CUDA_LAUNCH(fp8_update_kernel, fp8_delayed_tensors(s), 32, stream, s->scales, s->history, s->amax,
                (int)(step % FP8_HISTORY), finite, saturated);
    s->scaled = true;
}

// ----------------------------------------------------------------------------
// checkpoints

// The member "fp8" of trainer.json, to be freed; NULL where there are no scales yet. s may be NULL.
static inline char* fp8_record(const Fp8State* s) {
    if (!s || !s->scaled) return NULL;
    const int64_t count = fp8_history_count(s->layers);
    uint16_t* history = (uint16_t*)xcalloc((size_t)count, sizeof *history);
    device_download(history, s->history, count * (int64_t)sizeof *history);
    char* text = fp8_history_text(history, count);
    free(history);
    return text;
}

// Takes the scales from a record of trainer.json, if it has any. s may be NULL.
static inline void fp8_restore(Fp8State* s, const Json* record, cudaStream_t stream) {
    if (!s) return;
    const int64_t count = fp8_history_count(s->layers);
    uint16_t* history = (uint16_t*)xcalloc((size_t)count, sizeof *history);
    if (fp8_history_read(history, count, record)) {
        CUDA_CHECK(cudaMemcpy(s->history, history, (size_t)count * sizeof *history, cudaMemcpyHostToDevice));
        fp8_update(s, 0, NULL, NULL, stream);
    }
    free(history);
}
