/*
Inference of the recurrent mixers on the GPU (llmc/model/extension.h); extend.h is the CPU's. A slot's
state has a fixed size, and there are no pages: a mixer's table of states holds those of all slots for every
layer, and scratch of a pass, which all layers share.

    conv_extend           the convolution, of all rows of a pass
    scan_extend           the recurrence, of all rows of a pass

One-row sequences of a pass share one kernel per operation, which reads each slot's state once and writes it;
it finds the slots in the arrays of the pass, so that decoding can be a CUDA graph. Longer ones go one by one
through the kernels of training, which start from the slot's state.

Called by the recurrent mixers and the GPU trainer.
*/
#pragma once

#include "../../inference/cuda/layers.cuh"
#include "scan.cuh"
#include "conv.cuh"

// ----------------------------------------------------------------------------
// states

// Rows of a mixer's tensors: B T in training; in inference those of the largest pass, as GEMMs pad them.
static inline int64_t recurrent_rows(const Layer* layer) {
    return layer->cache ? linear_padded_rows(layer->T) : layer->B * layer->T;
}

// The state of a slot, zero where the sequence is empty; `size` elements each
template <class T>
static inline T* slot_state(T* states, int64_t size, const PassRows* sequence, cudaStream_t stream) {
    T* state = states + sequence->slot * size;
    if (sequence->position == 0) CUDA_CHECK(cudaMemsetAsync(state, 0, (size_t)size * sizeof(T), stream));
    return state;
}

// Calls work(sequence) for each sequence of the pass with several rows; returns the number of one-row ones.
template <class Work> static inline int for_long_sequences(const Cache* cache, const Work& work) {
    const PassArrays* pass = &cache->device.host;
    int steps = 0;
    for (int i = 0; i < pass->num_sequences; i++) {
        const PassRows* sequence = &pass->sequences[i];
        if (sequence->end - sequence->begin > 1)
            work(sequence);
        else
            steps++;
    }
    return steps;
}

// ----------------------------------------------------------------------------
// convolution

// Block (part of the channels, sequence); a thread has eight channels.
__global__ static void __launch_bounds__(CONV_THREADS)
    conv_step_kernel(bf16* y, const bf16* x, bf16* histories, const __grid_constant__ Conv s,
                     const PassRows* sequences) {
    kernel_wait();
    PassRows sequence = sequences[blockIdx.y];
    if (sequence.end - sequence.begin != 1) return;
    int c = 8 * (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int64_t row = sequence.begin;
    bf16* history = histories + (int64_t)sequence.slot * CONV_HISTORY * s.C + c;
    bool active = c < s.C;
    Raw8 raw[CONV_WIDTH] = {};
    for (int i = 0; i < CONV_HISTORY; i++)
        if (active && sequence.position > 0) raw[i] = load_raw8(history + i * s.C);
    if (active) raw[CONV_HISTORY] = load_raw8(x + row * s.row_stride + c);
    float w[CONV_WIDTH][8] = {}, bias[8] = {};
    if (active) conv_weights<8>(w, s.weight + CONV_WIDTH * c);
    if (active && s.bias) unpack8(bias, load_raw8(s.bias + c));
    Raw8 out = conv_token(raw, w, bias, s, row, c);
    if (!active) return;
    store16(y + row * s.C + c, out);
    for (int i = 0; i < CONV_HISTORY; i++) store16(history + i * s.C, raw[i + 1]);
}

// y [rows, C] of the rows of a pass, of a layer whose slots have histories [slots, 3, C]. s->T is the number
// of rows.
static inline void conv_extend(bf16* y, const bf16* x, bf16* histories, const Conv* s, const Cache* cache,
                               cudaStream_t stream) {
    Range range("convolution", RANGE_FORWARD, stream);
    HeadGrid grid = conv_grid(s->C / 8);
    const PassArrays* pass = &cache->device.pass;
    conv_check(s);
    int steps = for_long_sequences(cache, [&](const PassRows* sequence) {
        Conv one = *s;
        int64_t begin = sequence->begin;
        bf16* history = slot_state(histories, CONV_HISTORY * s->C, sequence, stream);
        one.B = 1;
        one.T = sequence->end - begin;
        one.history = history;
        if (one.steps.steps) one.steps.steps += begin * one.steps.NH;
        conv_forward(y + begin * s->C, x + begin * s->row_stride, &one, stream);
        conv_history(history, x + begin * s->row_stride, &one, stream);
    });
    if (steps > 0)
        launch_after(conv_step_kernel, dim3((unsigned)grid.blocks, (unsigned)pass->num_sequences),
                     grid.threads, 0, stream, y, x, histories, *s, pass->sequences);
}

// ----------------------------------------------------------------------------
// the recurrence

enum {
    STEP_COLUMNS = 32, // of a state, of a thread block: four of a thread
    STEP_GROUPS = 32,  // of threads, each with every STEP_GROUPS-th row of the state
    STEP_MOST_ROWS = 128
};

// A step of one-row sequences; `rows` has q, k, v, log_decay and beta of the rows of a pass.
typedef struct {
    bf16* o;         // [rows, NH, V]
    float* states;   // [slots, NH, K, V]
    Scan rows;       // its state and scratch are not used
    ScanShape shape; // B and T are not used
    const PassRows* sequences;
} ScanStep;

// Sums of four adjacent columns over all rows of the state: over the threads of the block that differ in
// `group`.
__device__ static inline void scan_step_sum(float x[4], float sums[STEP_GROUPS / 4][STEP_COLUMNS]) {
    int column = 4 * ((int)threadIdx.x % (STEP_COLUMNS / 4)), warp = (int)threadIdx.x / 32;
    for (int j = 0; j < 4; j++) {
        x[j] += __shfl_xor_sync(~0u, x[j], 8);
        x[j] += __shfl_xor_sync(~0u, x[j], 16);
    }
    if (threadIdx.x % 32 < STEP_COLUMNS / 4)
        for (int j = 0; j < 4; j++) sums[warp][column + j] = x[j];
    __syncthreads();
    for (int j = 0; j < 4; j++) {
        x[j] = 0;
        for (int i = 0; i < STEP_GROUPS / 4; i++) x[j] += sums[i][column + j];
    }
}

// Block (head and STEP_COLUMNS columns of its state, sequence). The equations are in scan.h.
__global__ static void __launch_bounds__(STEP_COLUMNS / 4 * STEP_GROUPS)
    scan_step_kernel(const __grid_constant__ ScanStep a) {
    constexpr int ROWS = STEP_MOST_ROWS / STEP_GROUPS; // of a thread
    __shared__ float sums[2][STEP_GROUPS / 4][STEP_COLUMNS];
    kernel_wait();
    const ScanShape& s = a.shape;
    const Scan& in = a.rows;
    PassRows sequence = a.sequences[blockIdx.y];
    if (sequence.end - sequence.begin != 1) return;
    int pieces = ceil_div<int>(s.V, STEP_COLUMNS), h = (int)blockIdx.x / pieces, K = s.K, V = s.V;
    int column = (int)blockIdx.x % pieces * STEP_COLUMNS + 4 * ((int)threadIdx.x % (STEP_COLUMNS / 4));
    int group = (int)threadIdx.x / (STEP_COLUMNS / 4);
    int64_t row = sequence.begin, head = row * s.NH + h, keys = row * s.key_row + h * s.key_head;
    float decay = in.log_decay ? expf(in.log_decay[head]) : 1, beta = in.beta ? in.beta[head] : 1;
    float skip = in.skip ? in.skip[head] : 0; // only without beta: u is v
    float* state = a.states + ((int64_t)sequence.slot * s.NH + h) * K * V + column;
    bool active = column < V;
    Pack4 S[ROWS] = {};
    float q[ROWS] = {}, k[ROWS] = {}, u[4] = {}, out[4] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int c = group + STEP_GROUPS * r;
        if (c >= K) continue;
        if (active && sequence.position > 0) S[r] = load16(state + (int64_t)c * V);
        q[r] = __bfloat162float(in.q[keys + c]);
        k[r] = __bfloat162float(in.k[keys + c]);
        for (int j = 0; j < 4; j++) S[r][j] *= decay;
    }
    if (in.beta) {
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) u[j] -= k[r] * S[r][j];
        scan_step_sum(u, sums[0]);
    }
    for (int j = 0; active && j < 4; j++)
        u[j] = beta * (__bfloat162float(in.v[row * s.value_row + (int64_t)h * V + column + j]) + u[j]);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int c = group + STEP_GROUPS * r;
        for (int j = 0; j < 4; j++) {
            S[r][j] += k[r] * u[j];
            out[j] += q[r] * S[r][j];
        }
        if (active && c < K) store16(state + (int64_t)c * V, S[r]);
    }
    scan_step_sum(out, sums[1]);
    if (!active || group > 0) return;
    for (int j = 0; j < 4; j++) out[j] = out[j] * s.scale + skip * u[j];
    store_bf16x4(a.o + head * V + column, Pack4{{out[0], out[1], out[2], out[3]}});
}

// o and the slots' states of the sequences with one row.
static inline void scan_step(const ScanStep* a, const PassArrays* pass, cudaStream_t stream) {
    const ScanShape* s = &a->shape;
    if (s->K > STEP_MOST_ROWS || s->V % 4)
        die("a step of a recurrence on the GPU takes states of at most %d rows, not %d x %d", STEP_MOST_ROWS,
            s->K, s->V);
    int pieces = ceil_div<int>(s->V, STEP_COLUMNS);
    launch_after(scan_step_kernel, dim3((unsigned)(s->NH * pieces), (unsigned)pass->num_sequences),
                 STEP_COLUMNS / 4 * STEP_GROUPS, 0, stream, *a);
}

// o [rows, NH, V] of the rows of a pass, of a layer whose slots have states [slots, NH, K, V]. shape->T is
// the number of rows.
static inline void scan_extend(bf16* o, float* states, const Scan* rows, const ScanShape* shape,
                               ScanForward* forward, const Cache* cache, cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    const PassArrays* pass = &cache->device.pass;
    int64_t NH = shape->NH, size = NH * shape->K * shape->V;
    int steps = for_long_sequences(cache, [&](const PassRows* sequence) {
        int64_t begin = sequence->begin;
        ScanShape one = *shape;
        Scan part = *rows;
        one.B = 1;
        one.T = sequence->end - begin;
        part.q += begin * shape->key_row;
        part.k += begin * shape->key_row;
        part.v += begin * shape->value_row;
        if (part.log_decay) part.log_decay += begin * NH;
        if (part.beta) part.beta += begin * NH;
        if (part.skip) part.skip += begin * NH;
        part.state = slot_state(states, size, sequence, stream);
        forward(o + begin * NH * shape->V, &part, &one, stream);
    });
    ScanStep step = {o, states, *rows, *shape, pass->sequences};
    if (steps > 0) scan_step(&step, pass, stream);
}
