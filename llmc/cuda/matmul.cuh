/*
Linear layers without bias: three GEMMs of cuBLASLt, bf16 operands with fp32 accumulation.

With --fp8 they have FP8 operands (fp8.cuh), in all columns of out and dout or in the first fp8.N. cuBLASLt
multiplies by the operands' inverse scales, which it reads from the device. On Hopper it takes both operands
with contiguous k, so that the second GEMM reads a transposed copy of w, and the third ones of x and dout.
Products of the first two are added with fast accumulation, to 14 bits or so: far below the rounding of the
operands, to 3 or 4 bits. Sums over all tokens, or over the vocabulary, are not: they would lose the sum of
many small products.

    forward          out[rows,N] = x[rows,K] w[N,K]^T       (+ a residual)
    backward, input  dx[rows,K]  = dout[rows,N] w[N,K]
    backward, weight dw[N,K]    += dout[rows,N]^T x[rows,K]    in fp32

All matrices are row-major. The trainer describes a layer by a Linear and has one Matmul for each stream.

cuBLASLt is asked for the kernel of a shape once, at its first call: asking takes longer than many a GEMM.
Split-K partial sums stay in fp32 and are added in a fixed order; cuBLAS's other reduction schemes round them
to bf16 or add them in the order of arrival.
*/
#pragma once

#include <cublasLt.h>
#include <float.h>
#include <type_traits>
#include "../model/shapes.h"
#include "fp8.cuh"
#include "range.cuh"

// ----------------------------------------------------------------------------
// error checks

static inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    const char* hint = status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED
                           ? "; no memory was left for cuBLAS: lower --micro-batch or --seq-len"
                       : status == CUBLAS_STATUS_ARCH_MISMATCH
                           ? "; this cuBLAS has no code for this GPU: update CUDA"
                       : status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE
                           ? "; matrices must be aligned to 16 bytes, and row strides multiples of 8"
                       : status == CUBLAS_STATUS_EXECUTION_FAILED
                           ? "; often the error of an earlier kernel: run with CUDA_LAUNCH_BLOCKING=1"
                           : "";
    die("%s:%d: %s: %s%s", file, line, call, cublasLtGetStatusName(status), hint);
}
#define CUBLAS_CHECK(call) cublas_check(call, #call, __FILE__, __LINE__)

// ----------------------------------------------------------------------------
// plans: what runs a shape

// The key of a plan, in cuBLAS's terms: d[m,n] = a' b' + residual, all column-major. One type throughout, so
// that there is no padding and memcmp compares values.
typedef struct {
    int64_t m, n, k;
    int64_t transpose_a, transpose_b;
    int64_t lda, ldb, ldd;
    int64_t d_type;       // a cudaDataType_t
    int64_t b_format;     // an Fp8Format: FP8_NONE where a and b are bf16; else a is E4M3
    int64_t fast;         // FP8: fast accumulation
    int64_t has_residual; // 0 or 1; the residual has the layout of d
    int64_t align;        // bytes, of all pointers
} MatmulShape;

typedef struct {
    const void *a, *b;
    const void* residual; // NULL: none; may be d
    void* d;
    const float *a_inverse, *b_inverse; // of operands in FP8, on the device
} MatmulOperands;

typedef struct {
    MatmulShape shape;
    cublasLtMatmulDescOpaque_t desc; // plain structs: nothing to destroy
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} MatmulPlan;

// Shapes: up to 154 where requests of a model of width 8,192 have come in all their sizes.
enum { MATMUL_MAX_PLANS = 256, MATMUL_CANDIDATES = 24 };
static const size_t MATMUL_WORKSPACE = (size_t)32 << 20; // bytes; cuBLAS's recommendation for Hopper

// The GEMMs of one stream. They run one after another, and so share a workspace.
typedef struct {
    cublasLtHandle_t handle;
    void* workspace; // MATMUL_WORKSPACE bytes
    cudaStream_t stream;
    bool tune; // time the first candidates of a shape and keep the fastest
    int num_plans;
    MatmulPlan plans[MATMUL_MAX_PLANS];
} Matmul;

// Allocates the workspace; matmul_free frees it. With `tune` the first call of a shape takes some
// milliseconds, waits for the device, and if it adds to d, for that time allocates a second output. The
// choice then depends on timings, so that another run may choose another kernel and round differently.
static inline void matmul_init(Matmul* mm, bool tune, cudaStream_t stream) {
    memset(mm, 0, sizeof *mm);
    mm->stream = stream;
    mm->tune = tune;
    CUDA_CHECK(cudaMalloc(&mm->workspace, MATMUL_WORKSPACE));
    CUBLAS_CHECK(cublasLtCreate(&mm->handle));
}

static inline void matmul_free(Matmul* mm) {
    cublasLtDestroy(mm->handle);
    cudaFree(mm->workspace);
    memset(mm, 0, sizeof *mm);
}

template <class T> static inline void matmul_set(MatmulPlan* p, cublasLtMatmulDescAttributes_t key, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&p->desc, key, &value, sizeof value));
}

static inline void matmul_set_scales(MatmulPlan* p, const MatmulOperands* x) {
    if (p->shape.b_format == FP8_NONE) return;
    matmul_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void*)x->a_inverse);
    matmul_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void*)x->b_inverse);
}

static inline void matmul_launch(Matmul* mm, MatmulPlan* p, const cublasLtMatmulAlgo_t* algo,
                                 const MatmulOperands* x) {
    matmul_set_scales(p, x);
    float one = 1, beta = p->shape.has_residual ? 1 : 0;
    const void* residual = x->residual ? x->residual : x->d;
    CUBLAS_CHECK(cublasLtMatmul(mm->handle, &p->desc, &one, x->a, &p->a, x->b, &p->b, &beta, residual, &p->d,
                                x->d, &p->d, algo, mm->workspace, MATMUL_WORKSPACE, mm->stream));
}

// Times n candidates on the operands, with an output of its own where the GEMM adds to d, and returns the
// index of the fastest. Returns 0, cuBLAS's own choice, if less than 3% would be gained, so that timing noise
// rarely decides. Without memory for the second output it returns 0 too, and warns the first time.
static inline int matmul_fastest(Matmul* mm, MatmulPlan* p, const cublasLtMatmulHeuristicResult_t* candidates,
                                 int n, MatmulOperands x) {
    void* output = x.d;
    const bool adds = x.residual == x.d;
    size_t bytes = (size_t)(p->shape.ldd * p->shape.n) * (p->shape.d_type == CUDA_R_32F ? 4 : 2);
    if (adds && cudaMalloc(&output, bytes) != cudaSuccess) {
        static bool warned;
        cudaGetLastError(); // clears the error
        if (!warned)
            warn("too little GPU memory is left to time GEMMs on an output of %.0f MiB: cuBLAS's first "
                 "choices are used, which may be slower; lower --micro-batch",
                 (double)bytes / 1048576.0);
        warned = true;
        return 0;
    }
    if (adds) CUDA_CHECK(cudaMemsetAsync(output, 0, bytes, mm->stream));
    CUDA_CHECK(cudaDeviceSynchronize()); // no other work while timing
    if (adds) x.residual = x.d = output;
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    float least[MATMUL_CANDIDATES], fastest = FLT_MAX, ms;
    // interleaved, as a GPU slows down when it gets warm; the first round does not count, and the last four
    // are among those that come near the fastest
    for (int round = 0; round < 6; round++)
        for (int i = 0; i < n; i++) {
            if (round > 1 && least[i] > 1.15f * fastest) continue;
            CUDA_CHECK(cudaEventRecord(start, mm->stream));
            matmul_launch(mm, p, &candidates[i].algo, &x);
            CUDA_CHECK(cudaEventRecord(stop, mm->stream));
            CUDA_CHECK(cudaEventSynchronize(stop));
            CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
            if (round <= 1 || ms < least[i]) least[i] = ms;
            if (round > 0 && ms < fastest) fastest = ms;
        }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    if (adds) CUDA_CHECK(cudaFree(output));
    int best = 0;
    for (int i = 1; i < n; i++)
        if (least[i] < least[best] && least[i] < 0.97f * least[0]) best = i;
    return best;
}

template <class T>
static inline void matmul_prefer(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t key,
                                 T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(p, key, &value, sizeof value));
}

// Moves the candidates that can run to the front, in their order, and returns their number.
static inline int matmul_usable(Matmul* mm, MatmulPlan* p, cublasLtMatmulHeuristicResult_t* candidates,
                                int n) {
    int usable = 0;
    for (int i = 0; i < n; i++) {
        cublasLtMatmulHeuristicResult_t checked;
        if (candidates[i].state == CUBLAS_STATUS_SUCCESS &&
            cublasLtMatmulAlgoCheck(mm->handle, &p->desc, &p->a, &p->b, &p->d, &p->d, &candidates[i].algo,
                                    &checked) == CUBLAS_STATUS_SUCCESS &&
            checked.workspaceSize <= MATMUL_WORKSPACE)
            candidates[usable++] = candidates[i];
    }
    return usable;
}

static inline MatmulPlan matmul_plan(Matmul* mm, const MatmulShape* s, const MatmulOperands* x) {
    MatmulPlan p;
    p.shape = *s;
    const cublasOperation_t ops[2] = {CUBLAS_OP_N, CUBLAS_OP_T};
    uint64_t m = (uint64_t)s->m, n = (uint64_t)s->n, k = (uint64_t)s->k;
    bool ta = s->transpose_a, tb = s->transpose_b;
    CUBLAS_CHECK(cublasLtMatmulDescInit(&p.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cudaDataType_t a_type = s->b_format == FP8_NONE ? CUDA_R_16BF : CUDA_R_8F_E4M3;
    const cudaDataType_t b_type = s->b_format == FP8_E5M2 ? CUDA_R_8F_E5M2 : a_type;
    matmul_set(&p, CUBLASLT_MATMUL_DESC_TRANSA, ops[s->transpose_a]);
    matmul_set(&p, CUBLASLT_MATMUL_DESC_TRANSB, ops[s->transpose_b]);
    if (s->fast) matmul_set(&p, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
    matmul_set_scales(&p, x);
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&p.a, a_type, ta ? k : m, ta ? m : k, s->lda));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&p.b, b_type, tb ? n : k, tb ? k : n, s->ldb));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&p.d, (cudaDataType_t)s->d_type, m, n, s->ldd));

    cublasLtMatmulPreferenceOpaque_t prefer;
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&prefer));
    matmul_prefer(&prefer, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, MATMUL_WORKSPACE);
    matmul_prefer(&prefer, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                  (uint32_t)(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    for (auto key : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        matmul_prefer(&prefer, key, (uint32_t)s->align);
    cublasLtMatmulHeuristicResult_t candidates[MATMUL_CANDIDATES];
    int found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        mm->handle, &p.desc, &p.a, &p.b, &p.d, &p.d, &prefer,
        mm->tune || s->b_format != FP8_NONE ? MATMUL_CANDIDATES : 1, candidates, &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) CUBLAS_CHECK(status);
    found = matmul_usable(mm, &p, candidates, found);
    if (found == 0)
        die("cuBLAS has no kernel for %s GEMM of %lld x %lld x %lld with row strides %lld, %lld and %lld, "
            "aligned to %s; strides should be multiples of %d and the alignment 16",
            s->b_format == FP8_NONE ? "a" : "an FP8", (long long)s->n, (long long)s->m, (long long)s->k,
            (long long)s->lda, (long long)s->ldb, (long long)s->ldd, counted(s->align, "byte").text,
            s->b_format == FP8_NONE ? 8 : 16);
    p.algo = candidates[mm->tune && found > 1 ? matmul_fastest(mm, &p, candidates, found, *x) : 0].algo;
    return p;
}

// d = a' b' + residual, by the shape's plan, which is made at the first call.
static inline void matmul_column_major(Matmul* mm, MatmulShape shape, const MatmulOperands& x) {
    if (shape.m == 0 || shape.n == 0 || (shape.k == 0 && x.residual == x.d)) return;
    uintptr_t bits = (uintptr_t)x.a | (uintptr_t)x.b | (uintptr_t)x.residual | (uintptr_t)x.d;
    shape.align = (int64_t)((bits | 16) & -(bits | 16)); // at most 16: no kernel needs more
    shape.has_residual = x.residual != NULL;
    int i = 0;
    while (i < mm->num_plans && memcmp(&mm->plans[i].shape, &shape, sizeof shape) != 0) i++;
    if (i == MATMUL_MAX_PLANS) die("more than %d shapes of GEMMs", MATMUL_MAX_PLANS);
    if (i == mm->num_plans) mm->plans[mm->num_plans++] = matmul_plan(mm, &shape, &x);
    matmul_launch(mm, &mm->plans[i], &mm->plans[i].algo, &x);
}

// ----------------------------------------------------------------------------
// the three GEMMs of a linear layer. A row-major matrix is its transpose in column-major order, so that
// cuBLAS gets the operands in exchanged order.

// The FP8 side of a linear layer; all zero: there is none.
typedef struct {
    const fp8 *w, *w_transposed; // [N, K] and [K, N], contiguous; E4M3
    const Fp8Scale* w_scale;     // on the device
    Fp8Tensor x, dout;           // [rows, K] in E4M3, [rows, N] in E5M2: written by what computes x and dout
    fp8 *x_scratch, *dout_scratch; // [K, rows] and [N, rows], where x or dout is not `transposed`
    int64_t N;                     // of w's rows; the others are in bf16 alone
    bool exact;                    // the input's gradient without fast accumulation: too many small products
} Fp8Linear;

typedef struct {
    const bf16* w; // [N, K], contiguous
    float* dw;     // [N, K], contiguous; NULL for inference
    int64_t rows, N, K;
    int64_t out_stride, x_stride; // row strides of out and dout, and of x and dx, in elements
    Fp8Linear fp8;
} Linear;

// The layer's columns [first, first + N): for linear_forward.
static inline Linear linear_columns(const Linear* all, int64_t first, int64_t N) {
    Linear part = *all;
    part.w += first * all->K;
    part.N = N;
    part.fp8.N = max(min(all->fp8.N - first, N), (int64_t)0);
    if (part.fp8.N > 0) part.fp8.w += first * all->K;
    return part;
}

// The layer over rows [first, first + rows): for calls whose tensors begin there.
static inline Linear linear_slice(const Linear* all, int64_t first, int64_t rows) {
    Linear slice = *all;
    slice.rows = rows;
    slice.fp8.x = fp8_slice(&all->fp8.x, first);
    slice.fp8.dout = fp8_slice(&all->fp8.dout, first);
    return slice;
}

// The three GEMMs' common part
static inline void linear_gemm(RangePass pass, const Linear* l, const MatmulShape& shape,
                               const MatmulOperands& x, Matmul* mm) {
    Range range(shape.b_format == FP8_NONE ? "matmul" : "matmul, FP8", pass, mm->stream);
    assert(l->out_stride >= l->N && l->x_stride >= l->K);
    matmul_column_major(mm, shape, x);
}

// The columns of linear_forward in FP8: returns their number. Where FP8 is not to be computed yet, amax of x
// is found.
static inline int64_t linear_forward_fp8(void* out, const bf16* x, const void* residual, const Linear* l,
                                         Matmul* mm) {
    const Fp8Linear* f = &l->fp8;
    if (f->N == 0) return 0;
    fp8_measure(&f->x, x, l->rows, l->K, l->x_stride, mm->stream);
    if (!f->x.data) return 0;
    MatmulShape shape = {.m = f->N,
                         .n = l->rows,
                         .k = l->K,
                         .transpose_a = true,
                         .lda = l->K,
                         .ldb = l->K,
                         .ldd = l->out_stride,
                         .d_type = CUDA_R_16BF,
                         .b_format = FP8_E4M3,
                         .fast = true};
    linear_gemm(RANGE_FORWARD, l, shape,
                {.a = f->w,
                 .b = f->x.data,
                 .residual = residual,
                 .d = out,
                 .a_inverse = &f->w_scale->inverse,
                 .b_inverse = &f->x.scale->inverse},
                mm);
    return f->N;
}

// dx = dout w of the columns in FP8, or with `add` dx +=. Where FP8 is not to be computed yet, amax of dout
// is found.
static inline void linear_backward_fp8(bf16* dx, const bf16* dout, bool add, const Linear* l, Matmul* mm) {
    const Fp8Linear* f = &l->fp8;
    fp8_measure(&f->dout, dout, l->rows, f->N, l->out_stride, mm->stream);
    if (!f->dout.data) return;
    MatmulShape shape = {.m = l->K,
                         .n = l->rows,
                         .k = f->N,
                         .transpose_a = true,
                         .lda = f->N,
                         .ldb = f->N,
                         .ldd = l->x_stride,
                         .d_type = CUDA_R_16BF,
                         .b_format = FP8_E5M2,
                         .fast = !f->exact};
    linear_gemm(RANGE_BACKWARD, l, shape,
                {.a = f->w_transposed,
                 .b = f->dout.data,
                 .residual = add ? dx : NULL,
                 .d = dx,
                 .a_inverse = &f->w_scale->inverse,
                 .b_inverse = &f->dout.scale->inverse},
                mm);
}

// out [rows, N] = x w^T, plus residual [rows, N] with the strides of out, unless that is NULL. T is bf16 or
// float. The residual may be out itself, but in bf16 cuBLAS then rounds the GEMM's result before it adds.
// (common_type_t: T is deduced from out alone, so that NULL needs no cast.)
template <class T>
static inline void linear_forward(T* out, const bf16* x, const std::common_type_t<T>* residual,
                                  const Linear* l, Matmul* mm) {
    cudaDataType_t type = std::is_same<T, float>::value ? CUDA_R_32F : CUDA_R_16BF;
    const int64_t done = linear_forward_fp8(out, x, residual, l, mm); // columns, in FP8
    MatmulShape shape = {.m = l->N - done,
                         .n = l->rows,
                         .k = l->K,
                         .transpose_a = true,
                         .lda = l->K,
                         .ldb = l->x_stride,
                         .ldd = l->out_stride,
                         .d_type = type};
    if (done < l->N)
        linear_gemm(RANGE_FORWARD, l, shape,
                    {l->w + done * l->K, x, residual ? residual + done : NULL, out + done}, mm);
}

// dx [rows, K] = dout w. The columns in FP8 come last and add to those in bf16.
static inline void linear_backward_input(bf16* dx, const bf16* dout, const Linear* l, Matmul* mm) {
    const int64_t left = l->fp8.dout.data ? l->fp8.N : 0; // columns, to FP8
    MatmulShape shape = {.m = l->K,
                         .n = l->rows,
                         .k = l->N - left,
                         .lda = l->K,
                         .ldb = l->out_stride,
                         .ldd = l->x_stride,
                         .d_type = CUDA_R_16BF};
    if (left < l->N) linear_gemm(RANGE_BACKWARD, l, shape, {l->w + left * l->K, dout + left, NULL, dx}, mm);
    linear_backward_fp8(dx, dout, left < l->N, l, mm);
}

// The same of the columns of dout in FP8: returns their number, 0 where FP8 is not to be computed yet.
// Transposed copies are made unless there are some, that of x from bf16.
static inline int64_t linear_backward_weight_fp8(const bf16* x, const Linear* l, Matmul* mm) {
    const Fp8Linear* f = &l->fp8;
    if (!f->dout.data) return 0;
    const fp8 *x_transposed = f->x.transposed, *dout_transposed = f->dout.transposed;
    if (!x_transposed) {
        Range range("transposed, FP8", RANGE_BACKWARD, mm->stream);
        fp8_transpose<FP8_E4M3>(f->x_scratch, x, l->x_stride, l->rows, l->K, f->x.scale, mm->stream);
        x_transposed = f->x_scratch;
    }
    if (!dout_transposed) {
        Range range("transposed, FP8", RANGE_BACKWARD, mm->stream);
        fp8_transpose<FP8_E5M2>(f->dout_scratch, f->dout.data, f->dout.stride, l->rows, f->N, f->dout.scale,
                                mm->stream);
        dout_transposed = f->dout_scratch;
    }
    MatmulShape shape = {.m = l->K,
                         .n = f->N,
                         .k = l->rows,
                         .transpose_a = true,
                         .lda = l->rows,
                         .ldb = l->rows,
                         .ldd = l->K,
                         .d_type = CUDA_R_32F,
                         .b_format = FP8_E5M2};
    linear_gemm(RANGE_BACKWARD, l, shape,
                {.a = x_transposed,
                 .b = dout_transposed,
                 .residual = l->dw,
                 .d = l->dw,
                 .a_inverse = &f->x.scale->inverse,
                 .b_inverse = &f->dout.scale->inverse},
                mm);
    return f->N;
}

// l->dw [N, K] += dout^T x
static inline void linear_backward_weight(const bf16* dout, const bf16* x, const Linear* l, Matmul* mm) {
    const int64_t done = linear_backward_weight_fp8(x, l, mm); // columns of dout, in FP8
    MatmulShape shape = {.m = l->K,
                         .n = l->N - done,
                         .k = l->rows,
                         .transpose_b = true,
                         .lda = l->x_stride,
                         .ldb = l->out_stride,
                         .ldd = l->K,
                         .d_type = CUDA_R_32F};
    float* dw = l->dw + done * l->K;
    if (done < l->N) linear_gemm(RANGE_BACKWARD, l, shape, {x, dout + done, dw, dw}, mm);
}

// Both gradients.
static inline void linear_backward(bf16* dx, const bf16* dout, const bf16* x, const Linear* linear,
                                   Matmul* mm) {
    linear_backward_input(dx, dout, linear, mm);
    linear_backward_weight(dout, x, linear, mm);
}
