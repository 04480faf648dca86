/*
Matmul of the CPU trainer: out[M,N] (+)= a[M,K] b[K,N], and the linear layer made of them.

Operands are views with two strides, so a transpose or a slice of columns costs nothing. Blocks of a and b are
packed into panels, MR rows of a and NR columns of b wide, that the kernel reads contiguously; its MR x NR
sums stay in vector registers. Rows of a that few columns of b use are read where they are.

train_fox.c and the CPU mixers call these. Each element's sum has one order whatever the number of threads.
*/
#pragma once

#include "../base/common.h"
#include "vector.h"

typedef struct {
    const real* at;
    int64_t row, col; // strides: element (i, j) is at[i * row + j * col]
} View;

static inline View view(const real* at, int64_t row, int64_t col) {
    const View v = {at, row, col};
    return v;
}
// The row-major matrix with this row stride, and its transpose.
static inline View rows_of(const real* at, int64_t stride) { return view(at, stride, 1); }
static inline View transpose_of(const real* at, int64_t stride) { return view(at, 1, stride); }

// Tile sizes: MR x NV vectors of sums, NV of b and one of a fit in the vector registers, a packed panel of b
// in L1, a block of a in L2. With 16 registers packed_b is read from L3, in 32 it is in L2.
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define MR 8 // 8 x 3 sums fill 24 of 32 registers
#define NV 3
#define MC (8 * MR)  // rows of a block of a
#define NC (12 * NR) // columns of a block of b
#else
#define MR 6 // 6 x 2 sums fill 12 of 16
#define NV 2
#define MC (16 * MR)
#define NC (48 * NR)
#endif
#define VECTOR_REALS (VECTOR_BYTES / (int)sizeof(real))
#define NR           (NV * VECTOR_REALS)
#define KC           256       // depth of a block
#define NC_SERIAL    (12 * NR) // columns of a block of b of matmul_serial: a thread has its own
#define NC_IN_PLACE  384       // columns of b below which packing a costs more than it saves

typedef real Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef Vector VectorAnywhere __attribute__((aligned(sizeof(real)), may_alias)); // in an array of real

#ifdef REAL_IS_DOUBLE
typedef int64_t VectorIndex __attribute__((vector_size(VECTOR_BYTES)));
#else
typedef int32_t VectorIndex __attribute__((vector_size(VECTOR_BYTES)));
#endif

// Interleaves the halves of a and b that begin at element `from`.
__attribute__((always_inline)) static inline Vector interleave(Vector a, Vector b, const int from) {
    Vector out;
#ifdef __clang__
    for (int i = 0; i < VECTOR_REALS; i++) out[i] = i % 2 ? b[from + i / 2] : a[from + i / 2];
#else
    VectorIndex index;
    for (int i = 0; i < VECTOR_REALS; i++) index[i] = from + i / 2 + i % 2 * VECTOR_REALS;
    out = __builtin_shuffle(a, b, index);
#endif
    return out;
}

// Transposes VECTOR_REALS vectors in place: each round interleaves the first half of them with the second.
__attribute__((always_inline)) static inline void transpose_vectors(Vector x[VECTOR_REALS]) {
    enum { W = VECTOR_REALS };
    for (int step = 1; step < W; step *= 2) {
        Vector y[W];
        for (int i = 0; i < W / 2; i++) {
            y[2 * i] = interleave(x[i], x[i + W / 2], 0);
            y[2 * i + 1] = interleave(x[i], x[i + W / 2], W / 2);
        }
        memcpy(x, y, sizeof y);
    }
}

// A panel of `width` vectors whose elements are contiguous, in square tiles; returns the depth that they
// cover.
__attribute__((always_inline)) static inline int64_t pack_transposed(real* out, const real* at, int64_t K,
                                                                     int64_t vector_stride, const int width) {
    enum { W = VECTOR_REALS };
    int64_t k = 0;
    for (; k + W <= K; k += W)
        for (int first = 0; first < width; first += W) {
            const int n = width - first < W ? width - first : W;
            Vector x[W];
            for (int i = 0; i < W; i++)
                memcpy(&x[i], at + k + (first + (i < n ? i : 0)) * vector_stride, sizeof x[i]);
            transpose_vectors(x);
            for (int i = 0; i < W; i++)
                memcpy(out + (k + i) * width + first, &x[i], (size_t)n * sizeof(real));
        }
    return k;
}

// Packs m vectors of length K into panels of `width` vectors: out[panel][k][width], padded with zeros.
// Element k of vector i is at[i * vector_stride + k * element_stride]. Inlined so that `width` is a constant
// in the loops.
__attribute__((always_inline)) static inline void pack_panels(real* out, const real* at, int64_t m, int64_t K,
                                                              int64_t vector_stride, int64_t element_stride,
                                                              const int width) {
    for (int64_t first = 0; first < m; first += width, at += width * vector_stride, out += width * K) {
        int n = (int)(m - first < width ? m - first : width);
        if (n == width && vector_stride == 1) {
            for (int64_t k = 0; k < K; k++)
                memcpy(out + k * width, at + k * element_stride, (size_t)width * sizeof(real));
            continue;
        }
        int64_t k = n == width && element_stride == 1 ? pack_transposed(out, at, K, vector_stride, width) : 0;
        for (; k < K; k++)
            for (int i = 0; i < width; i++)
                out[k * width + i] = i < n ? at[k * element_stride + i * vector_stride] : 0;
    }
}

// m x n elements of out: MR x NR, fewer at its edges.
typedef struct {
    real* out;
    int64_t stride;
    int m, n;
} Tile;

// The next loop, n times unrolled. nvcc, which compiles this for tests alone, warns of gcc's pragma.
#ifdef __CUDACC__
#define UNROLL(n)
#else
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(n)    PRAGMA(GCC unroll n)
#endif

// Builds with sanitizers are not optimized (Makefile) but in these loops, which halves the time of tests that
// train. fp-contract=off: -O3 alone would fuse multiplications with additions, and change bits.
#ifdef __SANITIZE_ADDRESS__
#define KERNEL      __attribute__((noinline, optimize("O3", "fp-contract=off")))
#define UNROLLED_BY 1 // 4 would compile for ten seconds more
#else
#define KERNEL      __attribute__((noinline))
#define UNROLLED_BY 4
#endif

// tile (+)= a[m,K] b[K,NR], where b is a packed panel, and element k of row i of a is a[i * row + k * step].
// Inlined so that `step` is a constant.
__attribute__((always_inline)) static inline void multiply_panels(const Tile* tile, const real* a,
                                                                  int64_t row, const int step, const real* b,
                                                                  int64_t K, bool add) {
    const Vector zero = {0};
    const real* rows[MR];
    Vector sum[MR][NV];
    for (int i = 0; i < MR; i++) {
        const int64_t last = tile->m - 1;
        rows[i] = a + (step == 1 ? min64(i, last) : i) * row; // packed rows are padded
        __builtin_prefetch(tile->out + min64(i, last) * tile->stride);
        for (int j = 0; j < NV; j++) sum[i][j] = zero;
    }
    UNROLL(UNROLLED_BY)
    for (int64_t k = 0; k < K; k++, b += NR)
        for (int i = 0; i < MR; i++)
            for (int j = 0; j < NV; j++) sum[i][j] += rows[i][k * step] * ((const Vector*)b)[j];
    real* out = tile->out;
    if (tile->m == MR && tile->n == NR) {
        UNROLL(8)
        for (int i = 0; i < MR; i++, out += tile->stride)
            for (int j = 0; j < NV; j++) {
                VectorAnywhere* to = (VectorAnywhere*)out + j;
                if (add) sum[i][j] += *to;
                *to = sum[i][j];
            }
        return;
    }
    Vector edge[MR][NV]; // a copy: the sums above then need no memory
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < NV; j++) edge[i][j] = sum[i][j];
    for (int i = 0; i < tile->m; i++, out += tile->stride)
        for (int j = 0; j < tile->n; j++) out[j] = (add ? out[j] : 0) + ((const real*)edge[i])[j];
}

// Not inlined: together they would need more registers than there are.
KERNEL static void multiply_in_place(const Tile* tile, const real* a, int64_t row, const real* b, int64_t K,
                                     bool add) {
    multiply_panels(tile, a, row, 1, b, K, add);
}
KERNEL static void multiply_packed(const Tile* tile, const real* a, const real* b, int64_t K, bool add) {
    multiply_panels(tile, a, 1, MR, b, K, add);
}

// out[m,n] (+)= a[m,K] times the packed block b[K,n], with m <= MC, K <= KC, n <= NC.
static inline void multiply_block(real* out, int64_t stride, View a, const real* packed_b, int64_t m,
                                  int64_t n, int64_t K, bool add) {
    static __thread real packed_a[MC * KC] __attribute__((aligned(64)));
    const bool in_place = a.col == 1 && n < NC_IN_PLACE;
    if (!in_place) pack_panels(packed_a, a.at, m, K, a.row, a.col, MR);
    for (int64_t j = 0; j < n; j += NR)
        for (int64_t i = 0; i < m; i += MR) {
            const Tile tile = {out + i * stride + j, stride, (int)min64(MR, m - i), (int)min64(NR, n - j)};
            if (in_place)
                multiply_in_place(&tile, a.at + i * a.row, a.row, packed_b + j * K, K, add);
            else
                multiply_packed(&tile, packed_a + i * K, packed_b + j * K, K, add);
        }
}

// On the calling thread alone, for callers that are parallel themselves. `stride` is the row stride of out.
static inline void matmul_serial(real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K,
                                 bool add) {
    static __thread real packed_b[KC * NC_SERIAL] __attribute__((aligned(64)));
    for (int64_t j = 0; j < N; j += NC_SERIAL)
        for (int64_t k = 0; k < K; k += KC) {
            int64_t n = min64(NC_SERIAL, N - j), depth = min64(KC, K - k);
            pack_panels(packed_b, b.at + k * b.row + j * b.col, n, depth, b.col, b.row, NR);
            for (int64_t i = 0; i < M; i += MC)
                multiply_block(out + i * stride + j, stride, view(a.at + i * a.row + k * a.col, a.row, a.col),
                               packed_b, min64(MC, M - i), n, depth, add || k > 0);
        }
}

// On all threads.
static inline void matmul(real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K,
                          bool add) {
    static real packed_b[KC * NC] __attribute__((aligned(64))); // shared by all threads
    // of a block: fewer where M is small, so that all threads have some
    const int64_t rows = min64(MC, (M / 64 / MR + 1) * 4 * MR);
#pragma omp parallel
    for (int64_t j = 0; j < N; j += NC)
        for (int64_t k = 0; k < K; k += KC) {
            int64_t n = min64(NC, N - j), depth = min64(KC, K - k);
#pragma omp for schedule(static)
            for (int64_t p = 0; p < n; p += NR)
                pack_panels(packed_b + p * depth, b.at + k * b.row + (j + p) * b.col, min64(NR, n - p), depth,
                            b.col, b.row, NR);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < M; i += rows)
                multiply_block(out + i * stride + j, stride, view(a.at + i * a.row + k * a.col, a.row, a.col),
                               packed_b, min64(rows, M - i), n, depth, add || k > 0);
        }
}

// ----------------------------------------------------------------------------
// GEMMs of few rows, for decoding: packing w would cost more than the GEMM

enum { FEW_ROWS = 8 }; // at most

// out[m, columns] (+)= x[m,K] w[columns,K]^T for m rows of x and up to VECTOR_REALS columns; out has row
// stride N. Inlined so that m is a constant.
__attribute__((always_inline)) static inline void multiply_few(real* out, const real* x, const real* w,
                                                               int64_t N, int64_t K, int columns, bool add,
                                                               const int m) {
    enum { W = VECTOR_REALS };
    for (int64_t first = 0; first < K; first += KC) {
        int64_t end = min64(K, first + KC);
        Vector sum[FEW_ROWS];
        memset(sum, 0, sizeof sum);
        for (int64_t k = first; k < end; k += W) {
            Vector b[W];
            int depth = (int)min64(W, end - k);
            if (columns == W && depth == W) {
                for (int j = 0; j < W; j++) memcpy(&b[j], w + j * K + k, sizeof b[j]);
                transpose_vectors(b);
                for (int i = 0; i < W; i++)
                    for (int r = 0; r < m; r++) sum[r] += x[r * K + k + i] * b[i];
                continue;
            }
            memset(b, 0, sizeof b);
            for (int j = 0; j < columns; j++) memcpy(&b[j], w + j * K + k, (size_t)depth * sizeof(real));
            transpose_vectors(b);
            for (int i = 0; i < depth; i++)
                for (int r = 0; r < m; r++) sum[r] += x[r * K + k + i] * b[i];
        }
        for (int r = 0; r < m; r++)
            for (int j = 0; j < columns; j++)
                out[r * N + j] = (add || first > 0 ? out[r * N + j] : 0) + sum[r][j];
    }
}

// out[rows,N] (+)= x[rows,K] w[N,K]^T for rows <= FEW_ROWS. Sums in the order of matmul: fused
// multiply-adds along a block of KC, then block after block. So an element's bits do not depend on the number
// of rows.
static inline void matmul_few(real* out, const real* x, const real* w, int64_t rows, int64_t N, int64_t K,
                              bool add) {
#pragma omp parallel for schedule(static) if (N * K > 65536)
    for (int64_t n = 0; n < N; n += VECTOR_REALS) {
        int columns = (int)min64(VECTOR_REALS, N - n);
        const real* from = w + n * K;
        switch (rows) {
#define FEW_CASE(m)                                                                                          \
    case m: multiply_few(out + n, x, from, N, K, columns, add, m); break;
            FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4) FEW_CASE(5) FEW_CASE(6) FEW_CASE(7) FEW_CASE(8)
#undef FEW_CASE
        }
    }
}

// ----------------------------------------------------------------------------
// A linear layer without bias: out[rows,N] = x[rows,K] w[N,K]^T. All matrices are contiguous and row-major.

typedef struct {
    const real* w; // [N, K]
    real* dw;      // [N, K]; NULL for inference
    int64_t rows, N, K;
} Linear;

// out = x w^T + residual [rows,N]; residual may be NULL, or out itself: in a forward pass alone, blocks
// without an MLP read and write one residual stream.
static inline void linear_forward(real* out, const real* x, const real* residual, const Linear* linear) {
    int64_t rows = linear->rows, N = linear->N, K = linear->K;
    if (residual && residual != out) memcpy(out, residual, (size_t)(rows * N) * sizeof(real));
    if (rows <= FEW_ROWS)
        matmul_few(out, x, linear->w, rows, N, K, residual != NULL);
    else
        matmul(out, N, rows_of(x, K), transpose_of(linear->w, K), rows, N, K, residual != NULL);
}

// Writes dx [rows,K] and adds to linear->dw.
static inline void linear_backward(real* dx, const real* dout, const real* x, const Linear* linear) {
    int64_t rows = linear->rows, N = linear->N, K = linear->K;
    matmul(dx, K, rows_of(dout, N), rows_of(linear->w, K), rows, K, N, false);
    matmul(linear->dw, K, transpose_of(dout, N), rows_of(x, K), N, K, rows, true);
}
