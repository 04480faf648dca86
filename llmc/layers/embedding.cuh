/*
The embedding: x_t = E[token_t], and its gradient: dE[token] += sum of dx_t over the positions t of the token.

x and dx are bf16 [rows, d], E is bf16 and dE float [V, d], all aligned to 16 bytes; d is a multiple of 8, and
tokens are in 0..V-1.

The backward pass sorts the positions by token, stably, and cuts the sorted list into slices of equal length,
whatever the tokens are: one that makes up half the batch costs no more than any other. A run of one token
within a slice is summed and added to the row of dE at once. If a run crosses slices, each slice writes
its part to scratch, and a second kernel adds the parts in order. There are no atomics on floats: the same
bits in every run.
*/
#pragma once

#include "../cuda/launch.cuh"

// ----------------------------------------------------------------------------
// forward: one warp a row

__global__ static void __launch_bounds__(256)
    embedding_forward_kernel(bf16* x, const int32_t* tokens, const bf16* embeddings, int64_t rows,
                             int64_t d) {
    const int ahead = 4;
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const bf16* from = embeddings + tokens[row] * d;
    bf16* to = x + row * d;
    for (int64_t first = 8 * (threadIdx.x % 32); first < d; first += ahead * 256) {
        Pack8 v[ahead];
#pragma unroll
        for (int i = 0; i < ahead; i++)
            if (first + i * 256 < d) v[i] = load16(from + first + i * 256);
#pragma unroll
        for (int i = 0; i < ahead; i++)
            if (first + i * 256 < d) store16(to + first + i * 256, v[i]);
    }
}

// x [rows, d] = rows of embeddings [V, d]
static inline void embedding_forward(bf16* x, const int32_t* tokens, const bf16* embeddings, int64_t rows,
                                     int64_t d, cudaStream_t stream) {
    Range range("embedding", RANGE_FORWARD, stream);
    assert(d % 8 == 0);
    CUDA_LAUNCH(embedding_forward_kernel, ceil_div<int64_t>(rows, 8), 256, stream, x, tokens, embeddings,
                rows, d);
}

// ----------------------------------------------------------------------------
// backward, first kernel: sorts the positions by token
//
// A radix sort of 8 bits a pass, in one thread block, as a micro-batch has few tokens. Each warp has a share
// of the list: it counts its items by digit, computes from the counts of all warps where they go, and moves
// them there in order.

// An item of the list: token << 32 | row
__host__ __device__ static inline uint32_t sorted_token(uint64_t item) { return (uint32_t)(item >> 32); }
__host__ __device__ static inline int64_t sorted_row(uint64_t item) { return (int64_t)(item & 0xffffffffu); }

__global__ static void __launch_bounds__(1024)
    embedding_sort_kernel(uint64_t* sorted, uint64_t* spare, const int32_t* tokens, int64_t rows,
                          int passes) {
    __shared__ int place[32][256]; // [warp][digit]: first the number of items, then where the next one goes
    __shared__ int in_warp[8];     // number of items of 32 digits
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, digit = threadIdx.x;
    int64_t first = rows * warp / 32, last = rows * (warp + 1) / 32;
    for (int pass = 0; pass < passes; pass++) {
        uint64_t *out = (passes - pass) % 2 ? sorted : spare, *in = out == sorted ? spare : sorted;
        auto item_at = [=](int64_t i) { return pass ? in[i] : (uint64_t)tokens[i] << 32 | (uint64_t)i; };
        auto digit_of = [=](uint64_t item) { return (int)(sorted_token(item) >> 8 * pass & 255); };

        for (int i = threadIdx.x; i < 32 * 256; i += 1024) place[i / 256][i % 256] = 0;
        __syncthreads();
#pragma unroll 4
        for (int64_t i = first + lane; i < last; i += 32) atomicAdd(&place[warp][digit_of(item_at(i))], 1);
        __syncthreads();

        int count = 0;
        if (digit < 256)
            for (int w = 0; w < 32; w++) count += place[w][digit];
        int up_to = count; // prefix sum over the 32 digits, inclusive
        for (int step = 1; step < 32; step *= 2) {
            int below = __shfl_up_sync(~0u, up_to, step);
            if (lane >= step) up_to += below;
        }
        if (digit < 256 && lane == 31) in_warp[warp] = up_to;
        __syncthreads();
        if (digit < 256) {
            int next = up_to - count;
            for (int w = 0; w < warp; w++) next += in_warp[w];
            for (int w = 0; w < 32; w++) {
                int n = place[w][digit];
                place[w][digit] = next;
                next += n;
            }
        }
        __syncthreads();

        uint64_t ahead = first + lane < last ? item_at(first + lane) : 0;
        for (int64_t i = first; i < last; i += 32) {
            bool valid = i + lane < last;
            unsigned lanes = __ballot_sync(~0u, valid);
            if (!valid) break;
            uint64_t item = ahead;
            if (i + 32 + lane < last) ahead = item_at(i + 32 + lane);
            int* next = &place[warp][digit_of(item)];
            unsigned same = __match_any_sync(lanes, digit_of(item));
            int rank = __popc(same & ((1u << lane) - 1));
            out[*next + rank] = item;
            __syncwarp(lanes);
            if (rank == 0) *next += __popc(same);
            __syncwarp(lanes);
        }
        __syncthreads();
    }
}

// ----------------------------------------------------------------------------
// backward, second and third kernel: the sums

// Length of a slice of the sorted list, which one block sums: short, for many blocks, but at most 1024
// slices, as the parts of a run are added one after another.
static inline int64_t embedding_slice(int64_t rows) {
    int64_t slice = ceil_div<int64_t>(rows, 1024);
    return slice < 16 ? 16 : slice;
}

// Bytes of embedding_backward's scratch: the list twice, and two parts [d] a slice.
static inline size_t embedding_scratch_bytes(int64_t rows, int64_t d) {
    int64_t slices = ceil_div(rows, embedding_slice(rows));
    return (size_t)(2 * rows) * sizeof(uint64_t) + (size_t)(2 * slices * d) * sizeof(float);
}

__device__ static inline void add8(float x[8], const float* p) {
    Pack4 low = load16(p), high = load16(p + 4);
    for (int i = 0; i < 4; i++) x[i] += low[i], x[i + 4] += high[i];
}

// row[0..7] += x, where x is overwritten
__device__ static inline void add_to_row(float* row, float x[8]) {
    add8(x, row);
    store8(row, x);
}

// One block a slice. parts [slices, 2, d]: of the run that continues from the previous slice, and of the run
// that starts in this slice and continues in the next.
__global__ static void __launch_bounds__(512)
    embedding_sum_kernel(float* dembeddings, float* parts, const bf16* dx, const uint64_t* sorted,
                         int64_t rows, int64_t d, int64_t slice) {
    kernel_wait();
    const int ahead = 4;
    int64_t first = blockIdx.x * slice, last = min(first + slice, rows);
    int64_t c = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= d) return;
    uint32_t token = sorted_token(sorted[first]);
    bool continues = first > 0 && sorted_token(sorted[first - 1]) == token;
    float* my_parts = parts + 2 * blockIdx.x * d + c;
    float sum[8] = {};
    for (int64_t i = first; i < last; i += ahead) {
        uint64_t item[ahead];
        Pack8 in[ahead];
#pragma unroll
        for (int j = 0; j < ahead; j++)
            if (i + j < last) {
                item[j] = sorted[i + j];
                in[j] = load16_once(dx + sorted_row(item[j]) * d + c);
            }
#pragma unroll
        for (int j = 0; j < ahead; j++) {
            if (i + j >= last) break;
            if (sorted_token(item[j]) != token) {
                if (continues)
                    store8(my_parts, sum);
                else
                    add_to_row(dembeddings + token * d + c, sum);
                continues = false;
                token = sorted_token(item[j]);
                for (int k = 0; k < 8; k++) sum[k] = 0;
            }
            for (int k = 0; k < 8; k++) sum[k] += __bfloat162float(in[j][k]);
        }
    }
    if (continues)
        store8(my_parts, sum);
    else if (last < rows && sorted_token(sorted[last]) == token)
        store8(my_parts + d, sum);
    else
        add_to_row(dembeddings + token * d + c, sum);
}

// Block n adds the parts of the run that starts in slice n and continues in later ones, if there is one.
__global__ static void __launch_bounds__(512)
    embedding_join_kernel(float* dembeddings, const float* parts, const uint64_t* sorted, int64_t rows,
                          int64_t d, int64_t slice) {
    kernel_wait();
    int64_t n = blockIdx.x, slices = gridDim.x;
    int64_t c = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= d || n + 1 == slices) return;
    auto starts_with = [=](int64_t s, uint32_t token) { return sorted_token(sorted[s * slice]) == token; };
    uint32_t token = sorted_token(sorted[(n + 1) * slice - 1]);
    if (!starts_with(n + 1, token)) return;
    // a run that started before n
    if (n > 0 && starts_with(n, token) && sorted_token(sorted[n * slice - 1]) == token) return;
    int64_t end = n + 2, not_before = slices; // the slice after the run, by bisection
    while (end < not_before) {
        int64_t middle = (end + not_before) / 2;
        if (starts_with(middle, token))
            end = middle + 1;
        else
            not_before = middle;
    }
    float sum[8] = {};
    add8(sum, parts + (2 * n + 1) * d + c);
#pragma unroll 8
    for (int64_t s = n + 1; s < end; s++) add8(sum, parts + 2 * s * d + c);
    add_to_row(dembeddings + token * d + c, sum);
}

// dembeddings [V, d] += sums of dx [rows, d] by token; scratch of embedding_scratch_bytes.
static inline void embedding_backward(float* dembeddings, const bf16* dx, const int32_t* tokens,
                                      void* scratch, int64_t rows, int64_t d, int64_t V,
                                      cudaStream_t stream) {
    Range range("embedding", RANGE_BACKWARD, stream);
    assert(rows <= INT32_MAX && V <= (int64_t)1 << 31);
    if (rows == 0) return;
    uint64_t *sorted = (uint64_t*)scratch, *spare = sorted + rows;
    float* parts = (float*)(sorted + 2 * rows);
    int passes = 1;
    while (passes < 4 && V > (int64_t)1 << 8 * passes) passes++;
    CUDA_LAUNCH(embedding_sort_kernel, 1, 1024, stream, sorted, spare, tokens, rows, passes);

    int64_t slice = embedding_slice(rows);
    RowGrid grid = row_grid(ceil_div(rows, slice), d);
    launch_after(embedding_sum_kernel, grid.blocks, grid.threads, 0, stream, dembeddings, parts, dx, sorted,
                 rows, d, slice);
    launch_after(embedding_join_kernel, grid.blocks, grid.threads, 0, stream, dembeddings, parts, sorted,
                 rows, d, slice);
}
