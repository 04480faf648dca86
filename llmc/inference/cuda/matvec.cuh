/*
Linear layers for few rows, bound by reading their weights:

    out[rows,N] = f(x)[rows,K] w[N,K]^T  (+ residual)        rows 1 to MATVEC_MAX_ROWS

    x, residual, out    row-major, as in matmul.cuh; K is a multiple of 8
    f                   identity, RMSNorm or SwiGLU, fused: each thread block computes it, its input is small

A thread block has 8 TILES rows of w (columns of out); its 8 warps share K, warp s % 8 having K-step s of 32
channels:

    w -> registers         the next K-steps are in flight, the first ones before kernel_wait; w is read once
    x -> shared memory     f(x), by all warps
    mma.sync m16n8k16      16 rows of x by 8 rows of w: no row costs more than its loads, and a row's bits do
                           not depend on the number of rows
    warps -> out           sums over warps in shared memory, plus residual

A lane loads 16 bytes of a row of w and the same channels of a row of x. Their order within a K-step is not
that of mma.sync, but the same in both operands.

Called by layers.cuh, extension.cuh and the recurrent mixers (linear_rows).
*/
#pragma once

#include "../../cuda/matmul.cuh"
#include "../../cuda/mma_sm80.cuh"
#include "../../layers/rmsnorm.cuh"
#include "../../layers/swiglu.cuh"
#include "../../cuda/launch.cuh"

enum { MATVEC_MAX_ROWS = 16, MATVEC_WARPS = 8, MATVEC_K_STEP = 32 };

// The input of a layer
typedef struct {
    const bf16* x;    // [rows, K]
    const bf16* norm; // [K] weight of an RMSNorm; NULL: none
    double eps;       // the norm's
    bool swiglu;      // x is [rows, 2K], gate and up; not with a norm
    bf16* computed;   // [rows, K] scratch for f(x), used by linear_rows above MATVEC_MAX_ROWS
    float* rstd;      // [rows] scratch, with a norm
} MatvecInput;

struct MatvecArgs {
    void* out;
    const bf16 *w, *residual;
    MatvecInput in;
    int rows, N, K, out_stride, x_stride;
    int shared_stride; // elements from one row of x in shared memory to the next
};

// 64 bytes modulo 128, so the 16-byte loads of eight lanes, from two rows, have no bank conflicts
static inline int matvec_shared_stride(int64_t K) { return (int)ceil_div<int64_t>(K, 64) * 64 + 32; }

// By all threads: x or SwiGLU(x) to shared memory.
__device__ static inline void matvec_load_x(bf16* shared, const MatvecArgs& a) {
    int chunks = a.K / 8;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < a.rows * chunks; i += 32 * MATVEC_WARPS) {
        int row = i / chunks, c = i % chunks;
        const bf16* x = a.in.x + (int64_t)row * a.x_stride + 8 * c;
        Raw8 raw = load_raw8(x);
        if (a.in.swiglu) raw = swiglu8(raw, load_raw8(x + a.K));
        store16(shared + row * a.shared_stride + 8 * c, raw);
    }
}

// RMSNorm(x) to shared memory, a warp a row. weight [K] is in shared memory. The first 256 CACHED channels of
// a row stay in registers between the sum of squares and the product; the others are read twice.
template <int CACHED>
__device__ static inline void matvec_norm_x(bf16* shared, const bf16* weight, const MatvecArgs& a) {
    int chunks = a.K / 8, lane = (int)threadIdx.x % 32;
    for (int row = (int)threadIdx.x / 32; row < a.rows; row += MATVEC_WARPS) {
        const bf16* x = a.in.x + (int64_t)row * a.x_stride;
        Raw8 cached[CACHED] = {};
        float sum = 0, v[8], w[8];
#pragma unroll
        for (int i = 0; i < CACHED; i++)
            if (lane + 32 * i < chunks) cached[i] = load_raw8(x + 8 * (lane + 32 * i));
        auto add = [&](const Raw8& raw) {
            unpack8(v, raw);
            for (int i = 0; i < 8; i++) sum += v[i] * v[i];
        };
#pragma unroll
        for (int i = 0; i < CACHED; i++) add(cached[i]);
        for (int c = lane + 32 * CACHED; c < chunks; c += 32) add(load_raw8(x + 8 * c));
        float rstd = norm_rstd(__fdividef(warp_sum(sum), (float)a.K), (float)a.in.eps);
        auto store = [&](int c, const Raw8& raw) {
            unpack8(v, raw);
            unpack8(w, load_raw8(weight + 8 * c));
            for (int i = 0; i < 8; i++) v[i] *= rstd * w[i];
            store16(shared + row * a.shared_stride + 8 * c, pack8(v));
        };
#pragma unroll
        for (int i = 0; i < CACHED; i++)
            if (lane + 32 * i < chunks) store(lane + 32 * i, cached[i]);
        for (int c = lane + 32 * CACHED; c < chunks; c += 32) store(c, load_raw8(x + 8 * c));
    }
}

// Number of chunks of x that matvec_norm_x keeps in registers with two tiles. On sm_100 and later, where no
// run has timed it, 6 would spill 72 bytes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
enum { MATVEC_CACHED = 4 };
#else
enum { MATVEC_CACHED = 6 };
#endif

// Resident thread blocks of an SM
constexpr int matvec_blocks(int tiles) { return tiles == 4 ? 2 : 3; }

// By all threads: sums the warps' partial results of the block's columns, adds residual, stores.
template <class T, int COLUMNS>
__device__ static inline void matvec_store(const float (*sums)[MATVEC_MAX_ROWS][COLUMNS], int first,
                                           const MatvecArgs& a) {
    for (int i = (int)threadIdx.x; i < a.rows * COLUMNS; i += 32 * MATVEC_WARPS) {
        int row = i / COLUMNS, n = first + i % COLUMNS;
        if (n >= a.N) continue;
        int64_t at = (int64_t)row * a.out_stride + n;
        float sum = 0;
        for (int w = 0; w < MATVEC_WARPS; w++) sum += sums[w][row][i % COLUMNS];
        if (a.residual) sum += __bfloat162float(a.residual[at]);
        ((T*)a.out)[at] = (T)sum;
    }
}

// LOOPS: a block has every gridDim.x-th group of columns, and prefetches the next group's first weights
// during the last K-steps of this one.
template <class T, int TILES, bool LOOPS>
__global__ static void __launch_bounds__(32 * MATVEC_WARPS, matvec_blocks(TILES))
    matvec_kernel(const __grid_constant__ MatvecArgs a) {
    constexpr int COLUMNS = 8 * TILES, IN_FLIGHT = TILES == 1 ? 7 : 3; // K-steps
    extern __shared__ __align__(128) bf16 x[];
    __shared__ float sums[MATVEC_WARPS][MATVEC_MAX_ROWS][COLUMNS];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int steps = ceil_div<int>(a.K, MATVEC_K_STEP), column = lane / 4, in_step = lane % 4 * 8;
    int first = (int)blockIdx.x * COLUMNS, stride = (int)gridDim.x * COLUMNS;
    Raw8 next_w[IN_FLIGHT][TILES];
    auto load = [&](Raw8(&w)[TILES], int columns, int step) {
        int k = step * MATVEC_K_STEP + in_step;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            int n = columns + t * 8 + column;
            w[t] = n < a.N && k < a.K ? load_raw8_once(a.w + (int64_t)n * a.K + k) : Raw8{};
        }
    };
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) load(next_w[i], first, warp + i * MATVEC_WARPS);
    bf16* weight = x + a.rows * a.shared_stride;
    for (int c = (int)threadIdx.x; a.in.norm && c < a.K / 8; c += 32 * MATVEC_WARPS)
        store16(weight + 8 * c, load_raw8(a.in.norm + 8 * c));
    __syncthreads();
    kernel_wait();
    if (a.in.norm)
        matvec_norm_x<TILES == 1 ? 3 : TILES == 2 ? MATVEC_CACHED : 6>(x, weight, a);
    else
        matvec_load_x(x, a);
    do {
        __syncthreads(); // x is complete; the previous group's sums have been read
        float acc[TILES][4] = {};
        for (int step = warp; step < steps; step += IN_FLIGHT * MATVEC_WARPS) {
            bool last = LOOPS && step + IN_FLIGHT * MATVEC_WARPS >= steps;
            int next = last ? warp : step + IN_FLIGHT * MATVEC_WARPS;
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                int k = (step + i * MATVEC_WARPS) * MATVEC_K_STEP + in_step;
                const bf16* from = x + lane / 4 * a.shared_stride + k;
                Raw8 low = {}, high = {};
                if (k < a.K && lane / 4 < a.rows) low = load_raw8(from);
                if (k < a.K && lane / 4 + 8 < a.rows) high = load_raw8(from + 8 * a.shared_stride);
                uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    sm80_mma(acc[t], even, next_w[i][t].x, next_w[i][t].y, acc[t]);
                    sm80_mma(acc[t], odd, next_w[i][t].z, next_w[i][t].w, acc[t]);
                }
                load(next_w[i], last ? first + stride : first, next + i * MATVEC_WARPS);
            }
        }
#pragma unroll
        for (int i = 0; i < TILES * 4; i++)
            sums[warp][lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] = acc[i / 4][i % 4];
        __syncthreads();
        matvec_store<T>(sums, first, a);
        first += stride;
    } while (LOOPS && first < a.N);
}

// Dynamic shared memory: rows of x and the norm's weight
static inline int64_t matvec_shared_bytes(const Linear* l) {
    return (l->rows + 1) * matvec_shared_stride(l->K) * (int64_t)sizeof(bf16);
}

// Whether it and `sums`, 16 KiB at most, fit in a thread block's shared memory
static inline bool matvec_fits(const Linear* l) {
    return l->rows <= MATVEC_MAX_ROWS &&
           matvec_shared_bytes(l) + (17 << 10) <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// out [rows, N] = f(x) w^T + residual. residual [rows, N] has the strides of out and may be out; NULL: none.
// T is bf16 or float. tiles: 1, 2, 4, or 0 to choose by N.
template <class T>
static inline void matvec(T* out, const MatvecInput* in, const bf16* residual, const Linear* l, int tiles,
                          cudaStream_t stream) {
    Range range("matmul", RANGE_FORWARD, stream);
    assert(matvec_fits(l) && l->K % 8 == 0 && l->x_stride == l->K && !(in->swiglu && in->norm));
    int64_t num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
    if (tiles == 0) tiles = l->N >= 64 * num_sms ? 4 : l->N >= 16 * num_sms ? 2 : 1;
    MatvecArgs a = {.out = out,
                    .w = l->w,
                    .residual = residual,
                    .in = *in,
                    .rows = (int)l->rows,
                    .N = (int)l->N,
                    .K = (int)l->K,
                    .out_stride = (int)l->out_stride,
                    .x_stride = (int)(in->swiglu ? 2 * l->K : l->K),
                    .shared_stride = matvec_shared_stride(l->K)};
    int64_t blocks = ceil_div<int64_t>(l->N, 8 * tiles), resident = num_sms * matvec_blocks(tiles);
    bool loops = tiles > 1 && blocks > resident;
    auto kernel = tiles == 4   ? loops ? matvec_kernel<T, 4, true> : matvec_kernel<T, 4, false>
                    : tiles == 2 ? loops ? matvec_kernel<T, 2, true> : matvec_kernel<T, 2, false>
                                 : matvec_kernel<T, 1, false>;
    launch_after(kernel, dim3((unsigned)(loops ? resident : blocks)), 32 * MATVEC_WARPS,
                 matvec_shared_bytes(l), stream, a);
}

// `rows` rounded up to one of a few sizes, as cuBLAS chooses a kernel for each size
static inline int64_t linear_padded_rows(int64_t rows) {
    int64_t padded = rows;
    if (rows > MATVEC_MAX_ROWS)
        for (padded = MATVEC_MAX_ROWS; padded < rows;)
            padded += padded & (padded - 1) ? padded / 3 : padded / 2;
    return padded;
}

// The same for any number of rows: by matvec, or by kernels for f and cuBLAS where matvec_fits is false. out,
// residual and the input have memory for linear_padded_rows rows; residual is not out.
template <class T>
static inline void linear_rows(T* out, const MatvecInput* in, const std::common_type_t<T>* residual,
                               const Linear* l, Matmul* mm) {
    Linear padded = *l;
    if (matvec_fits(l)) {
        matvec(out, in, (const bf16*)residual, l, 0, mm->stream);
        return;
    }
    padded.rows = linear_padded_rows(l->rows);
    Norm norm = {.weight = in->norm, .rstd = in->rstd, .rows = l->rows, .d = l->K, .eps = in->eps};
    if (in->norm) rmsnorm_forward(in->computed, in->x, &norm, mm->stream);
    if (in->swiglu) swiglu_forward(in->computed, in->x, l->rows, l->K, mm->stream);
    linear_forward(out, in->norm || in->swiglu ? in->computed : in->x, residual, &padded, mm);
}
