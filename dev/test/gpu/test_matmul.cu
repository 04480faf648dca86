/*
The three GEMMs of a linear layer, against double on the CPU, at the model's shapes and odd ones.

    test_matmul [quick] [SEED]     quick: a few small shapes, for compute-sanitizer
*/
#include "../../../llmc/cuda/device.cuh"

// Is the GPU's memory full, to what follows? Filling it would stop other programs on the GPU.
static bool full;
template <class T> static cudaError_t malloc_unless_full(T** p, size_t bytes) {
    return full ? cudaErrorMemoryAllocation : cudaMalloc(p, bytes);
}
#define cudaMalloc malloc_unless_full

#include "../../../llmc/cuda/matmul.cuh"
#include "buffers.cuh"

// Limits of float outputs' errors, 2 to 3 times what an H100 showed. Tensor cores truncate what they add, so
// the error grows with the number of terms: up to 3584, and 43000.
static const double FLOAT_LIMIT = 1e-5, LONG_SUM_LIMIT = 6e-5;

template <class T>
static vector<T> without_padding(const vector<T>& x, int64_t rows, int64_t cols, int64_t stride) {
    vector<T> y;
    for (int64_t i = 0; i < rows; i++)
        y.insert(y.end(), x.begin() + i * stride, x.begin() + i * stride + cols);
    return y;
}

// Rows of `stride` elements of which the last stride - cols are NaN: a kernel that reads them fails.
static vector<bf16> draw_padded(int64_t rows, int64_t cols, int64_t stride, double scale) {
    vector<bf16> x = draw<bf16>(rows * stride, scale);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = cols; j < stride; j++) x[i * stride + j] = rounded<bf16>(NAN);
    return x;
}

template <class T>
static bool padding_is_nan(const vector<T>& x, int64_t rows, int64_t cols, int64_t stride) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = cols; j < stride; j++)
            if (!std::isnan(value(x[i * stride + j]))) return false;
    return true;
}

// Inputs, and what should be computed from them.
struct MatmulTest {
    Linear shape; // without w and dw
    int64_t M, N, K;
    vector<bf16> x, w, dout, residual;
    vector<float> dw0;
    vector<double> out, out_residual, dx, dw;

    explicit MatmulTest(const Linear& s)
        : shape(s), M(s.rows), N(s.N), K(s.K), x(draw_padded(M, K, s.x_stride, 1)),
          w(draw<bf16>(N * K, 0.02)), dout(draw_padded(M, N, s.out_stride, 1)),
          residual(draw<bf16>(M * s.out_stride, 0.5)), dw0(draw<float>(N * K, 1)), out(M * N),
          out_residual(M * N), dx(M * K), dw(dw0.begin(), dw0.end()) {
        vector<double> fx = doubles(without_padding(x, M, K, s.x_stride)), fw = doubles(w);
        vector<double> fdout = doubles(without_padding(dout, M, N, s.out_stride));
#pragma omp parallel for
        for (int64_t n = 0; n < N; n++)
            for (int64_t m = 0; m < M; m++) {
                double sum = 0, g = fdout[m * N + n];
                for (int64_t k = 0; k < K; k++) {
                    sum += fx[m * K + k] * fw[n * K + k];
                    dw[n * K + k] += g * fx[m * K + k];
                }
                out[m * N + n] = sum;
                out_residual[m * N + n] = sum + value(residual[m * s.out_stride + n]);
            }
#pragma omp parallel for
        for (int64_t m = 0; m < M; m++)
            for (int64_t n = 0; n < N; n++)
                for (int64_t k = 0; k < K; k++) dx[m * K + k] += fdout[m * N + n] * fw[n * K + k];
    }
};

// What the GPU computes from them.
struct MatmulResults {
    vector<bf16> out, out_residual, out_in_place, dx;
    vector<float> out_float, dw;

    MatmulResults(const MatmulTest& in, Matmul* mm) {
        Buffer<bf16> x(in.x), w(in.w), dout(in.dout), residual(in.residual), d_out(residual.n), d_dx(x.n);
        Buffer<float> d_out_float(d_out.n), d_dw(in.dw0);
        Linear linear = in.shape;
        linear.w = w, linear.dw = d_dw;
        linear_forward(d_out.p, x, NULL, &linear, mm);
        out = d_out.host();
        d_out.poison();
        linear_forward(d_out.p, x, residual, &linear, mm);
        out_residual = d_out.host();
        d_out = in.residual;
        linear_forward(d_out.p, x, d_out, &linear, mm);
        out_in_place = d_out.host();
        linear_forward(d_out_float.p, x, NULL, &linear, mm);
        out_float = d_out_float.host();
        linear_backward(d_dx, dout, x, &linear, mm);
        dx = d_dx.host();
        dw = d_dw.host();
    }
};

static void test_matmul(Matmul* mm, const Linear& s) {
    int64_t M = s.rows, N = s.N, K = s.K, out_stride = s.out_stride, x_stride = s.x_stride;
    snprintf(test_case, sizeof test_case, "%lld x %lld x %lld", (long long)M, (long long)N, (long long)K);
    MatmulTest want(s);
    MatmulResults got(want, mm), again(want, mm);
    CHECK(same_bits(got.out, again.out) && same_bits(got.out_residual, again.out_residual) &&
              same_bits(got.out_in_place, again.out_in_place) && same_bits(got.out_float, again.out_float) &&
              same_bits(got.dx, again.dx) && same_bits(got.dw, again.dw),
          "%s: two runs differ", test_case);

    auto within = [&](const vector<bf16>& x, const vector<double>& reference, double roundings) {
        double e = relative_error(without_padding(x, M, N, out_stride), reference) / sqrt(roundings);
        return noted("matmul, bf16", e) < bf16_limit(reference.size());
    };
    CHECK(within(got.out, want.out, 1), "%s: forward", test_case);
    CHECK(within(got.out_residual, want.out_residual, 1), "%s: forward with a residual", test_case);
    CHECK(within(got.out_in_place, want.out_residual, 2), "%s: forward onto the residual", test_case);
    double error =
        noted("matmul, float", relative_error(without_padding(got.out_float, M, N, out_stride), want.out));
    CHECK(error < FLOAT_LIMIT, "%s: forward in float: %g", test_case, error);
    error = noted("matmul, bf16", relative_error(without_padding(got.dx, M, K, x_stride), want.dx));
    CHECK(error < bf16_limit(want.dx.size()), "%s: backward, input: %g", test_case, error);
    error = noted("matmul, float", relative_error(got.dw, want.dw));
    CHECK(error < FLOAT_LIMIT, "%s: backward, weight: %g", test_case, error);
    CHECK(padding_is_nan(got.out, M, N, out_stride) && padding_is_nan(got.out_float, M, N, out_stride) &&
              padding_is_nan(got.dx, M, K, x_stride),
          "%s: wrote into the padding of a row", test_case);
}

// The vocabulary projection with more than 2^31 logits, by samples.
static void test_matmul_big(Matmul* mm) {
    const int64_t M = 43000, N = 50257, K = 64, stride = 50264;
    snprintf(test_case, sizeof test_case, "more than 2^31 logits");
    vector<bf16> x = draw<bf16>(M * K, 1), w = draw<bf16>(N * K, 0.1);
    Buffer<bf16> d_x(x), d_w(w), logits(M * stride), dx(d_x.n);
    Buffer<float> dw(vector<float>(N * K));
    Linear linear = {d_w, dw, M, N, K, stride, K};
    linear_forward(logits.p, d_x, NULL, &linear, mm);
    linear_backward(dx, logits, d_x, &linear, mm);

    vector<bf16> got, got_dx;
    vector<double> want, want_dx;
    for (int64_t m : {(int64_t)0, (int64_t)42723, (int64_t)42724, M - 1}) {
        vector<bf16> row = logits.host(m * stride, N), dx_row = dx.host(m * K, K);
        got.insert(got.end(), row.begin(), row.end());
        got_dx.insert(got_dx.end(), dx_row.begin(), dx_row.end());
        vector<double> sums(K, 0.0);
        for (int64_t n = 0; n < N; n++) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++) {
                sum += value(x[m * K + k]) * value(w[n * K + k]);
                sums[k] += value(row[n]) * value(w[n * K + k]);
            }
            want.push_back(sum);
        }
        want_dx.insert(want_dx.end(), sums.begin(), sums.end());
    }
    CHECK(relative_error(got, want) < bf16_limit(want.size()), "forward: %g", relative_error(got, want));
    CHECK(relative_error(got_dx, want_dx) < bf16_limit(want_dx.size()), "backward, input: %g",
          relative_error(got_dx, want_dx));

    const int64_t cols = 8;
    vector<bf16> columns(M * cols);
    CUDA_CHECK(cudaMemcpy2D(columns.data(), cols * 2, logits.p + (N - cols), stride * 2, cols * 2, M,
                            cudaMemcpyDeviceToHost));
    vector<double> want_dw(cols * K, 0.0);
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < cols; n++)
            for (int64_t k = 0; k < K; k++)
                want_dw[n * K + k] += value(columns[m * cols + n]) * value(x[m * K + k]);
    double error = relative_error(dw.host((N - cols) * K), want_dw);
    CHECK(error < LONG_SUM_LIMIT, "backward, weight: %g", error);
}

// ----------------------------------------------------------------------------

// Where a GEMM adds to its output and there is no memory for a second one, it is not timed, and a warning
// says so.
static bool warned;
static bool note_warning(bool) {
    warned = true;
    return false;
}

static void test_no_memory() {
    const int64_t n = 4096;
    Buffer<bf16> x(draw<bf16>(n * 64, 1)), w(draw<bf16>(n * 64, 1)), out((size_t)(n * n)); // out: 32 MiB
    Linear linear = {w, NULL, n, n, 64, n, 64};
    Matmul mm;
    matmul_init(&mm, true, 0);
    full = true;
    message_hooks.may_print = note_warning;
    linear_forward(out.p, x.p, out.p, &linear, &mm);
    message_hooks.may_print = NULL;
    full = false;
    CHECK(warned, "no warning that GEMMs are not timed");
    matmul_free(&mm);
}

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    CHECK_DIES("CUBLAS_STATUS_NOT_SUPPORTED; matrices must", CUBLAS_CHECK(CUBLAS_STATUS_NOT_SUPPORTED));
    for (int tune = 0; tune < 2; tune++) {
        Matmul mm;
        matmul_init(&mm, tune, 0);
        // M, N, K, stride of out, stride of x
        const int64_t shapes[][5] = {
            {1, 8, 8, 8, 8},
            {1, 768, 768, 768, 768},
            {37, 40, 24, 48, 40},
            {129, 257, 64, 264, 64},
            {96, 3108, 768, 3112, 768},
            {96, 768, 768, 768, 768},
            {96, 3584, 768, 3584, 768},
            {96, 768, 1792, 768, 1792},
            {64, 6216, 1536, 6216, 1536},
            {64, 1536, 1536, 1536, 1536},
            {64, 7168, 1536, 7168, 1536},
            {64, 1536, 3584, 1536, 3584},
            {24, 50257, 768, 50264, 768},
            {16, 50257, 1536, 50264, 1536},
        };
        for (auto& s : shapes)
            if (quick ? s[1] < 1000 : !tune || s[1] < 10000)
                test_matmul(&mm, {NULL, NULL, s[0], s[1], s[2], s[3], s[4]});
        if (!quick && !tune) test_matmul_big(&mm);
        matmul_free(&mm);
    }
    if (!quick) test_no_memory(); // compute-sanitizer reports calls that fail
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
