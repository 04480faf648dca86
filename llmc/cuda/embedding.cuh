/*
The embedding: x_t = E[token_t], and the gradient of E's rows, each the sum over the tokens that took it.

The backward pass sorts the tokens by id, keeping those of one id in the order of time, and cuts the sorted
list into slices of equal length, whatever the ids are: a token that makes up half the batch costs no more
than any other. A run of one id inside a slice is summed and added to E's row at once. Of a run that goes over
the edge of a slice, each slice leaves its part, and a second kernel adds the parts in order. No atomics on
floats: the same bits in every run.

Pointers to bf16 and float are aligned to 16 bytes, d is a multiple of 8, and ids are in 0..V-1.
*/
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "cuda_common.cuh"

// ----------------------------------------------------------------------------
// forward: a warp has one row

__global__ static void __launch_bounds__(256)
    embedding_forward_kernel(bf16* x, const bf16* embeddings, const int32_t* tokens, int64_t rows,
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

// x [rows,d] from embeddings [V,d]
static inline void embedding_forward(bf16* x, const bf16* embeddings, const int32_t* tokens, int64_t rows,
                                     int64_t d, cudaStream_t stream) {
    assert(d % 8 == 0);
    if (rows == 0) return;
    embedding_forward_kernel<<<(unsigned)ceil_div<int64_t>(rows, 8), 256, 0, stream>>>(x, embeddings, tokens,
                                                                                       rows, d);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// backward, first: the tokens in order of their ids
//
// A radix sort, eight bits at a time, in one block: a step's tokens are few. Each warp has a share of the
// list; it counts its items of each digit, learns from all counts where they go, and moves them there in
// order.

// an id and its place in the batch
__host__ __device__ static inline uint32_t sorted_token(uint64_t item) { return (uint32_t)(item >> 32); }
__host__ __device__ static inline int64_t sorted_row(uint64_t item) { return (int64_t)(item & 0xffffffffu); }

__global__ static void __launch_bounds__(1024)
    embedding_sort_kernel(uint64_t* sorted, uint64_t* spare, const int32_t* tokens, int64_t rows,
                          int passes) {
    __shared__ int
        place[32][256]; // first the number of a warp's items with a digit, then where the next one goes
    __shared__ int in_warp[8];
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
        int up_to = count; // in this warp of digits, this one included
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
// backward, second: the sums

// Sorted tokens that a block sums up: few, so that there are many blocks, but no more than 1024 slices, as
// the parts of a run are added one after another.
static inline int64_t embedding_slice(int64_t rows) {
    int64_t slice = ceil_div<int64_t>(rows, 1024);
    return slice < 16 ? 16 : slice;
}

// Bytes of embedding_backward's scratch: the list twice, and two parts a slice.
static inline size_t embedding_scratch_bytes(int64_t rows, int64_t d) {
    int64_t slices = ceil_div(rows, embedding_slice(rows));
    return (size_t)(2 * rows) * sizeof(uint64_t) + (size_t)(2 * slices * d) * sizeof(float);
}

__device__ static inline void add8(float x[8], const float* p) {
    Pack4 low = load16(p), high = load16(p + 4);
    for (int i = 0; i < 4; i++) x[i] += low[i], x[i + 4] += high[i];
}

// parts [slices,2,d]: of each slice, its part of the run that comes in from the last slice, and of the one
// that begins here and goes on in the next.
__global__ static void __launch_bounds__(512)
    embedding_sum_kernel(float* dembeddings, float* parts, const bf16* dx, const uint64_t* sorted,
                         int64_t rows, int64_t d, int64_t slice) {
    const int ahead = 4;
    int64_t first = blockIdx.x * slice, last = min(first + slice, rows);
    int64_t c = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= d) return;
    uint32_t token = sorted_token(sorted[first]);
    bool came_in = first > 0 && sorted_token(sorted[first - 1]) == token;
    float* my_parts = parts + 2 * blockIdx.x * d + c;
    float sum[8] = {};
    auto add_to_row = [&]() {
        float* row = dembeddings + token * d + c;
        add8(sum, row);
        store8(row, sum);
    };
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
                if (came_in)
                    store8(my_parts, sum);
                else
                    add_to_row();
                came_in = false;
                token = sorted_token(item[j]);
                for (int k = 0; k < 8; k++) sum[k] = 0;
            }
            for (int k = 0; k < 8; k++) sum[k] += __bfloat162float(in[j][k]);
        }
    }
    if (came_in)
        store8(my_parts, sum);
    else if (last < rows && sorted_token(sorted[last]) == token)
        store8(my_parts + d, sum);
    else
        add_to_row();
}

// Block n adds up the run, if there is one, that begins in slice n and goes on in later ones.
__global__ static void __launch_bounds__(512)
    embedding_join_kernel(float* dembeddings, const float* parts, const uint64_t* sorted, int64_t rows,
                          int64_t d, int64_t slice) {
    int64_t n = blockIdx.x, slices = gridDim.x;
    int64_t c = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= d || n + 1 == slices) return;
    auto starts_with = [=](int64_t s, uint32_t token) { return sorted_token(sorted[s * slice]) == token; };
    uint32_t token = sorted_token(sorted[(n + 1) * slice - 1]);
    if (!starts_with(n + 1, token)) return;
    if (n > 0 && starts_with(n, token) && sorted_token(sorted[n * slice - 1]) == token)
        return;                               // began before n
    int64_t end = n + 2, not_before = slices; // the run's end among the slices, by bisection
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
    float* row = dembeddings + token * d + c;
    add8(sum, row);
    store8(row, sum);
}

// dembeddings [V,d] += the sums of dx [rows,d] over each id's tokens; scratch has embedding_scratch_bytes.
static inline void embedding_backward(float* dembeddings, const bf16* dx, const int32_t* tokens,
                                      void* scratch, int64_t rows, int64_t d, int64_t V,
                                      cudaStream_t stream) {
    assert(d % 8 == 0 && rows <= INT32_MAX && V <= (int64_t)1 << 31);
    if (rows == 0) return;
    uint64_t *sorted = (uint64_t*)scratch, *spare = sorted + rows;
    float* parts = (float*)(sorted + 2 * rows);
    int passes = 1;
    while (passes < 4 && V > (int64_t)1 << 8 * passes) passes++;
    embedding_sort_kernel<<<1, 1024, 0, stream>>>(sorted, spare, tokens, rows, passes);
    CUDA_CHECK_LAUNCH();

    int64_t slice = embedding_slice(rows), columns = ceil_div<int64_t>(d, 8 * 512);
    dim3 grid((unsigned)ceil_div(rows, slice), (unsigned)columns);
    unsigned threads = (unsigned)(32 * ceil_div<int64_t>(d, 8 * 32 * columns));
    embedding_sum_kernel<<<grid, threads, 0, stream>>>(dembeddings, parts, dx, sorted, rows, d, slice);
    CUDA_CHECK_LAUNCH();
    embedding_join_kernel<<<grid, threads, 0, stream>>>(dembeddings, parts, sorted, rows, d, slice);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_EMBEDDING_CUH
