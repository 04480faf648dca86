/*
Matrix products: cuBLASLt, bf16 times bf16 with fp32 sums, through the three forms that a linear layer needs.

    forward          out[M,N] = x[M,K] w[N,K]^T       (+ a residual)
    backward, input  dx[M,K]  = dout[M,N] w[N,K]
    backward, weight dw[N,K] += dout[M,N]^T x[M,K]    in fp32

Which kernel runs a shape is asked once, at its first call, and kept; asking costs more than many a product.
Wherever the inner dimension is split, partial sums stay in fp32 and are added in a fixed order: the other
ways round them to bf16 or add them in the order in which they come.
*/
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <cublasLt.h>
#include <type_traits>
#include "cuda_common.cuh"

// ----------------------------------------------------------------------------
// checked calls

static inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    const char* hint = status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED
                           ? "; no memory was left for cuBLAS: lower --micro-batch or --seq-len"
                       : status == CUBLAS_STATUS_ARCH_MISMATCH
                           ? "; this cuBLAS has no code for this GPU: update CUDA"
                       : status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE
                           ? "; matrices must be aligned to 16 bytes, and row strides multiples of 8"
                       : status == CUBLAS_STATUS_EXECUTION_FAILED
                           ? "; often the error of a kernel before it: run with CUDA_LAUNCH_BLOCKING=1"
                           : "";
    die("%s:%d: %s: %s%s", file, line, call, cublasLtGetStatusName(status), hint);
}
#define CUBLAS_CHECK(call) cublas_check(call, #call, __FILE__, __LINE__)

// ----------------------------------------------------------------------------
// plans

// What tells plans apart, in cuBLAS's terms: d[m,n] = a' b' + add d, all stored by columns. One type
// throughout, so that memcmp sees no padding.
typedef struct {
    int64_t m, n, k;
    int64_t transpose_a, transpose_b;
    int64_t lda, ldb, ldd;
    int64_t d_type; // a cudaDataType_t; a and b are bf16
    int64_t add;    // 1: a matrix laid out like d is added
    int64_t align;  // bytes, of all pointers
} MatmulShape;

typedef struct {
    MatmulShape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} MatmulPlan;

enum { MATMUL_MAX_PLANS = 128, MATMUL_CANDIDATES = 8 };
const size_t MATMUL_WORKSPACE = (size_t)32 << 20; // bytes; what cuBLAS recommends for Hopper

typedef struct {
    cublasLtHandle_t handle;
    void* workspace; // of MATMUL_WORKSPACE bytes, the caller's; products of one Matmul run one after another
    bool tune;       // time the likeliest kernels of a shape and keep the fastest
    int num_plans;
    MatmulPlan plans[MATMUL_MAX_PLANS];
} Matmul;

// With `tune` the first call of a shape takes some milliseconds, waits for the device, and allocates another
// output for the while; and as the choice hangs on timings, another run may choose, and so round,
// differently.
static inline void matmul_init(Matmul* mm, void* workspace, bool tune) {
    memset(mm, 0, sizeof *mm);
    mm->workspace = workspace;
    mm->tune = tune;
    CUBLAS_CHECK(cublasLtCreate(&mm->handle));
}

static inline void matmul_free(Matmul* mm) {
    for (int i = 0; i < mm->num_plans; i++) {
        cublasLtMatmulDescDestroy(mm->plans[i].desc);
        cublasLtMatrixLayoutDestroy(mm->plans[i].a);
        cublasLtMatrixLayoutDestroy(mm->plans[i].b);
        cublasLtMatrixLayoutDestroy(mm->plans[i].d);
    }
    cublasLtDestroy(mm->handle);
    memset(mm, 0, sizeof *mm);
}

static inline cublasStatus_t matmul_launch(Matmul* mm, const MatmulPlan* p, const cublasLtMatmulAlgo_t* algo,
                                           const bf16* a, const bf16* b, const void* add, void* d,
                                           cudaStream_t stream) {
    float one = 1, beta = p->shape.add ? 1 : 0;
    return cublasLtMatmul(mm->handle, p->desc, &one, a, p->a, b, p->b, &beta, add, p->d, d, p->d, algo,
                          mm->workspace, MATMUL_WORKSPACE, stream);
}

// Times n candidates on the operands, the output going elsewhere, and returns the fastest; but the first,
// cuBLAS's own choice, if little would be gained, so that a choice seldom hangs on noise, or if there is no
// memory for another output.
static inline int matmul_fastest(Matmul* mm, const MatmulPlan* p,
                                 const cublasLtMatmulHeuristicResult_t* candidates, int n, const bf16* a,
                                 const bf16* b, const void* add, const void* d, cudaStream_t stream) {
    void* output;
    size_t bytes = (size_t)(p->shape.ldd * p->shape.n) * (p->shape.d_type == CUDA_R_32F ? 4 : 2);
    if (cudaMalloc(&output, bytes) != cudaSuccess) {
        cudaGetLastError(); // not an error of ours any more
        return 0;
    }
    CUDA_CHECK(cudaMemsetAsync(output, 0, bytes, stream));
    CUDA_CHECK(cudaDeviceSynchronize()); // nothing else is to be timed along
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    float least[MATMUL_CANDIDATES], ms;
    // in turns, as a GPU slows down when it gets warm; the first round does not count
    for (int round = 0; round < 6; round++)
        for (int i = 0; i < n; i++) {
            CUDA_CHECK(cudaEventRecord(start, stream));
            CUBLAS_CHECK(matmul_launch(mm, p, &candidates[i].algo, a, b, add == d || !add ? output : add,
                                       output, stream));
            CUDA_CHECK(cudaEventRecord(stop, stream));
            CUDA_CHECK(cudaEventSynchronize(stop));
            CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
            if (round <= 1 || ms < least[i]) least[i] = ms;
        }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaFree(output));
    int best = 0;
    for (int i = 1; i < n; i++)
        if (least[i] < least[best] && least[i] < 0.97f * least[0]) best = i;
    return best;
}

static inline cublasLtMatrixLayout_t matmul_layout(int64_t type, int64_t rows, int64_t cols, int64_t ld) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(
        cublasLtMatrixLayoutCreate(&layout, (cudaDataType_t)type, (uint64_t)rows, (uint64_t)cols, ld));
    return layout;
}

template <class T>
static inline void matmul_prefer(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t key,
                                 T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(p, key, &value, sizeof value));
}

static inline MatmulPlan matmul_plan(Matmul* mm, const MatmulShape* s, const bf16* a, const bf16* b,
                                     const void* add, const void* d, cudaStream_t stream) {
    MatmulPlan p;
    p.shape = *s;
    cublasOperation_t op_a = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    p.a = matmul_layout(CUDA_R_16BF, s->transpose_a ? s->k : s->m, s->transpose_a ? s->m : s->k, s->lda);
    p.b = matmul_layout(CUDA_R_16BF, s->transpose_b ? s->n : s->k, s->transpose_b ? s->k : s->n, s->ldb);
    p.d = matmul_layout(s->d_type, s->m, s->n, s->ldd);

    cublasLtMatmulPreference_t prefer;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&prefer));
    matmul_prefer(prefer, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, MATMUL_WORKSPACE);
    matmul_prefer(prefer, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                  (uint32_t)(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    matmul_prefer(prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)s->align);
    matmul_prefer(prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)s->align);
    matmul_prefer(prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)s->align);
    matmul_prefer(prefer, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)s->align);
    cublasLtMatmulHeuristicResult_t candidates[MATMUL_CANDIDATES];
    int n = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(mm->handle, p.desc, p.a, p.b, p.d, p.d, prefer,
                                                           mm->tune ? MATMUL_CANDIDATES : 1, candidates, &n);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) CUBLAS_CHECK(status);
    if (n == 0)
        die("cuBLAS has no kernel for a product of %lld x %lld x %lld with row strides %lld, %lld and %lld, "
            "aligned to %lld bytes; strides should be multiples of 8 and the alignment 16",
            (long long)s->n, (long long)s->m, (long long)s->k, (long long)s->lda, (long long)s->ldb,
            (long long)s->ldd, (long long)s->align);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(prefer));
    p.algo = candidates[n > 1 ? matmul_fastest(mm, &p, candidates, n, a, b, add, d, stream) : 0].algo;
    return p;
}

// d = a' b' + add, by its plan, which is made at the first call. add may be d itself; NULL adds nothing.
static inline void matmul_by_columns(Matmul* mm, MatmulShape shape, const bf16* a, const bf16* b,
                                     const void* add, void* d, cudaStream_t stream) {
    if (shape.m == 0 || shape.n == 0 || (shape.k == 0 && add == d)) return;
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)add | (uintptr_t)d;
    shape.align = (int64_t)((bits | 16) & -(bits | 16)); // up to 16: kernels ask for no more
    shape.add = add != NULL;
    int i = 0;
    while (i < mm->num_plans && memcmp(&mm->plans[i].shape, &shape, sizeof shape) != 0) i++;
    if (i == MATMUL_MAX_PLANS) die("more than %d shapes of matrix products", MATMUL_MAX_PLANS);
    if (i == mm->num_plans) {
        mm->plans[i] = matmul_plan(mm, &shape, a, b, add, d, stream);
        mm->num_plans++;
    }
    CUBLAS_CHECK(matmul_launch(mm, &mm->plans[i], &mm->plans[i].algo, a, b, add ? add : d, d, stream));
}

// ----------------------------------------------------------------------------
// the three products of a linear layer. Matrices are stored by rows; strides, in elements, are from row to
// row: of x and dx x_stride, of out and dout out_stride; rows of w and dw lie close. A matrix by rows is its
// transpose by columns, so that operands trade places.

// A size that products run fast at, not less than n. Of other sizes than multiples of 8 they are up to 8
// times slower, so that a layer's weight should have this many rows, and its output this many columns, those
// from n on zeros.
static inline int64_t matmul_padded(int64_t n) { return ceil_div<int64_t>(n, 64) * 64; }

// out[M,N] = x[M,K] w[N,K]^T, plus add[M,N] unless that is NULL; out, like add, is bf16 or float. add may be
// out, but in bf16 cuBLAS then rounds the product before it adds.
template <class T>
static inline void linear_forward(Matmul* mm, T* out, const bf16* x, const bf16* w, const T* add, int64_t M,
                                  int64_t N, int64_t K, int64_t out_stride, int64_t x_stride,
                                  cudaStream_t stream) {
    assert(out_stride >= N && x_stride >= K);
    cudaDataType_t type = std::is_same<T, float>::value ? CUDA_R_32F : CUDA_R_16BF;
    MatmulShape s = {N, M, K, true, false, K, x_stride, out_stride, type, 0, 0};
    matmul_by_columns(mm, s, w, x, add, out, stream);
}

// dx[M,K] = dout[M,N] w[N,K]
static inline void linear_backward_input(Matmul* mm, bf16* dx, const bf16* dout, const bf16* w, int64_t M,
                                         int64_t N, int64_t K, int64_t out_stride, int64_t x_stride,
                                         cudaStream_t stream) {
    assert(out_stride >= N && x_stride >= K);
    MatmulShape s = {K, M, N, false, false, K, out_stride, x_stride, CUDA_R_16BF, 0, 0};
    matmul_by_columns(mm, s, w, dout, NULL, dx, stream);
}

// dw[N,K] += dout[M,N]^T x[M,K]
static inline void linear_backward_weight(Matmul* mm, float* dw, const bf16* dout, const bf16* x, int64_t M,
                                          int64_t N, int64_t K, int64_t out_stride, int64_t x_stride,
                                          cudaStream_t stream) {
    assert(out_stride >= N && x_stride >= K);
    MatmulShape s = {K, N, M, false, true, x_stride, out_stride, K, CUDA_R_32F, 0, 0};
    matmul_by_columns(mm, s, x, dout, dw, dw, stream);
}

// both, with dx in rows of x_stride like x
static inline void linear_backward(Matmul* mm, bf16* dx, float* dw, const bf16* dout, const bf16* x,
                                   const bf16* w, int64_t M, int64_t N, int64_t K, int64_t out_stride,
                                   int64_t x_stride, cudaStream_t stream) {
    linear_backward_input(mm, dx, dout, w, M, N, K, out_stride, x_stride, stream);
    linear_backward_weight(mm, dw, dout, x, M, N, K, out_stride, x_stride, stream);
}

#endif // LLMC_MATMUL_CUH
