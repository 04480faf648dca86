/*
The three products of a linear layer, against double on the CPU, at the model's shapes and odd ones.

    test_matmul [quick]     quick: a few small shapes, for compute-sanitizer
*/
#include "../../../llmc/cuda/matmul.cuh"
#include "buffers.cuh"

// Of float outputs, 2 to 3 times what an H100 showed. Tensor cores cut off what they add rather than round
// it, so that the error grows with the number of terms: up to 3584, and 43000.
static const double FLOAT_LIMIT = 1e-5, LONG_SUM_LIMIT = 6e-5;

static vector<double> doubles(const vector<bf16>& x) {
    vector<double> y(x.size());
    for (size_t i = 0; i < x.size(); i++) y[i] = value(x[i]);
    return y;
}

template <class T>
static vector<T> without_padding(const vector<T>& x, int64_t rows, int64_t cols, int64_t stride) {
    vector<T> y;
    for (int64_t i = 0; i < rows; i++)
        y.insert(y.end(), x.begin() + i * stride, x.begin() + i * stride + cols);
    return y;
}

// Rows of `stride` elements of which the last stride - cols are NaN: whoever reads them shows.
static vector<bf16> draw_padded(int64_t rows, int64_t cols, int64_t stride, double scale) {
    vector<bf16> x = draw<bf16>((size_t)(rows * stride), scale);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = cols; j < stride; j++) x[(size_t)(i * stride + j)] = rounded<bf16>(NAN);
    return x;
}

template <class T>
static bool padding_is_nan(const vector<T>& x, int64_t rows, int64_t cols, int64_t stride) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = cols; j < stride; j++)
            if (!std::isnan(value(x[(size_t)(i * stride + j)]))) return false;
    return true;
}

template <class T> static void poison(const Buffer<T>& x) {
    CUDA_CHECK(cudaMemset(x.p, 0xFF, x.n * sizeof(T)));
}

static void test_matmul(Matmul* mm, int64_t M, int64_t N, int64_t K, int64_t out_stride, int64_t x_stride) {
    vector<bf16> x = draw_padded(M, K, x_stride, 1), w = draw<bf16>((size_t)(N * K), 0.02);
    vector<bf16> dout = draw_padded(M, N, out_stride, 1),
                 residual = draw<bf16>((size_t)(M * out_stride), 0.5);
    vector<float> dw0 = draw<float>((size_t)(N * K), 1);
    Buffer<bf16> d_x(x), d_w(w), d_dout(dout), d_add(residual), out((size_t)(M * out_stride)),
        dx((size_t)(M * x_stride));
    Buffer<float> out_float(out.n), dw(dw0);

    vector<double> fx = doubles(without_padding(x, M, K, x_stride)), fw = doubles(w);
    vector<double> fdout = doubles(without_padding(dout, M, N, out_stride));
    vector<double> want((size_t)(M * N)), want_add(want.size()), want_dx((size_t)(M * K), 0.0);
    vector<double> want_dw(dw0.begin(), dw0.end());
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t m = 0; m < M; m++) {
            double sum = 0, g = fdout[(size_t)(m * N + n)];
            for (int64_t k = 0; k < K; k++) {
                sum += fx[(size_t)(m * K + k)] * fw[(size_t)(n * K + k)];
                want_dw[(size_t)(n * K + k)] += g * fx[(size_t)(m * K + k)];
            }
            want[(size_t)(m * N + n)] = sum;
            want_add[(size_t)(m * N + n)] = sum + value(residual[(size_t)(m * out_stride + n)]);
        }
#pragma omp parallel for
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++)
                want_dx[(size_t)(m * K + k)] += fdout[(size_t)(m * N + n)] * fw[(size_t)(n * K + k)];

    char shape[96];
    snprintf(shape, sizeof shape, "%lld x %lld x %lld", (long long)M, (long long)N, (long long)K);
    vector<bf16> results[2][4];
    vector<float> dws[2], floats[2];
    for (int run = 0; run < 2; run++) {
        poison(out);
        poison(out_float);
        poison(dx);
        linear_forward(mm, out.p, d_x, d_w, (bf16*)NULL, M, N, K, out_stride, x_stride, 0);
        results[run][0] = out.host();
        poison(out);
        linear_forward(mm, out.p, d_x, d_w, d_add.p, M, N, K, out_stride, x_stride,
                       0); // a residual elsewhere
        results[run][1] = out.host();
        out = residual;
        linear_forward(mm, out.p, d_x, d_w, out.p, M, N, K, out_stride, x_stride, 0); // and in place
        results[run][2] = out.host();
        linear_forward(mm, out_float.p, d_x, d_w, (float*)NULL, M, N, K, out_stride, x_stride, 0);
        floats[run] = out_float.host();
        dw = dw0;
        linear_backward(mm, dx, dw, d_dout, d_x, d_w, M, N, K, out_stride, x_stride, 0);
        results[run][3] = dx.host();
        dws[run] = dw.host();
    }
    for (int i = 0; i < 4; i++)
        CHECK(same_bits(results[0][i], results[1][i]), "%s: two runs differ in %d", shape, i);
    CHECK(same_bits(dws[0], dws[1]) && same_bits(floats[0], floats[1]), "%s: two runs differ", shape);

    auto within = [&](const vector<bf16>& got, const vector<double>& reference, double roundings) {
        double e = relative_error(without_padding(got, M, N, out_stride), reference) / sqrt(roundings);
        return noted("matmul, bf16", e) < bf16_limit(reference.size());
    };
    CHECK(within(results[0][0], want, 1), "%s: forward", shape);
    CHECK(within(results[0][1], want_add, 1), "%s: forward with a residual", shape);
    CHECK(within(results[0][2], want_add, 2), "%s: forward onto the residual", shape);
    double error = noted("matmul, float", relative_error(without_padding(floats[0], M, N, out_stride), want));
    CHECK(error < FLOAT_LIMIT, "%s: forward in float: %g", shape, error);
    error = noted("matmul, bf16", relative_error(without_padding(results[0][3], M, K, x_stride), want_dx));
    CHECK(error < bf16_limit(want_dx.size()), "%s: backward, input: %g", shape, error);
    error = noted("matmul, float", relative_error(dws[0], want_dw));
    CHECK(error < FLOAT_LIMIT, "%s: backward, weight: %g", shape, error);
    CHECK(padding_is_nan(results[0][0], M, N, out_stride) && padding_is_nan(floats[0], M, N, out_stride) &&
              padding_is_nan(results[0][3], M, K, x_stride),
          "%s: wrote into the padding of a row", shape);
    CHECK(out.end_untouched() && dx.end_untouched() && dw.end_untouched(), "%s: wrote behind the end", shape);
}

// The head on more than 2^31 logits, by samples.
static void test_matmul_big(Matmul* mm) {
    const int64_t M = 43000, N = 50257, K = 64, stride = 50264;
    vector<bf16> x = draw<bf16>((size_t)(M * K), 1), w = draw<bf16>((size_t)(N * K), 0.1);
    Buffer<bf16> d_x(x), d_w(w), logits((size_t)(M * stride)), dx(d_x.n);
    Buffer<float> dw(vector<float>((size_t)(N * K)));
    linear_forward(mm, logits.p, d_x, d_w, (bf16*)NULL, M, N, K, stride, K, 0);
    linear_backward(mm, dx, dw, logits, d_x, d_w, M, N, K, stride, K, 0);

    vector<bf16> got, got_dx;
    vector<double> want, want_dx;
    for (int64_t m : {(int64_t)0, (int64_t)42723, (int64_t)42724, M - 1}) {
        vector<bf16> row = logits.host((size_t)(m * stride), (size_t)N),
                     dx_row = dx.host((size_t)(m * K), (size_t)K);
        got.insert(got.end(), row.begin(), row.end());
        got_dx.insert(got_dx.end(), dx_row.begin(), dx_row.end());
        vector<double> sums((size_t)K, 0.0);
        for (int64_t n = 0; n < N; n++) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++) {
                sum += value(x[(size_t)(m * K + k)]) * value(w[(size_t)(n * K + k)]);
                sums[(size_t)k] += value(row[(size_t)n]) * value(w[(size_t)(n * K + k)]);
            }
            want.push_back(sum);
        }
        want_dx.insert(want_dx.end(), sums.begin(), sums.end());
    }
    CHECK(relative_error(got, want) < bf16_limit(want.size()), "forward: %g", relative_error(got, want));
    CHECK(relative_error(got_dx, want_dx) < bf16_limit(want_dx.size()), "backward, input: %g",
          relative_error(got_dx, want_dx));

    const int64_t cols = 8;
    vector<bf16> columns((size_t)(M * cols));
    CUDA_CHECK(cudaMemcpy2D(columns.data(), (size_t)cols * 2, logits.p + (N - cols), (size_t)stride * 2,
                            (size_t)cols * 2, (size_t)M, cudaMemcpyDeviceToHost));
    vector<double> want_dw((size_t)(cols * K), 0.0);
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < cols; n++)
            for (int64_t k = 0; k < K; k++)
                want_dw[(size_t)(n * K + k)] +=
                    value(columns[(size_t)(m * cols + n)]) * value(x[(size_t)(m * K + k)]);
    double error = relative_error(dw.host((size_t)((N - cols) * K)), want_dw);
    CHECK(error < LONG_SUM_LIMIT, "backward, weight: %g", error);
}

// ----------------------------------------------------------------------------

int main(int argc, char** argv) {
    bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    seed = (uint64_t)time(NULL) * 1000;
    printf("seed %llu\n", (unsigned long long)seed);
    CHECK_DIES("CUBLAS_STATUS_NOT_SUPPORTED; matrices must", CUBLAS_CHECK(CUBLAS_STATUS_NOT_SUPPORTED));
    for (int tune = 0; tune < 2; tune++) {
        Buffer<char> workspace(MATMUL_WORKSPACE);
        Matmul mm;
        matmul_init(&mm, workspace, tune);
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
            if (quick ? s[1] < 1000 : !tune || s[1] < 10000) test_matmul(&mm, s[0], s[1], s[2], s[3], s[4]);
        if (!quick && !tune) test_matmul_big(&mm);
        matmul_free(&mm);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
