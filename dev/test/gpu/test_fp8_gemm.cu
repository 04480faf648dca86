/*
The GEMMs of --fp8 against the products of their operands in double.

    test_fp8_gemm [quick] [SEED]     quick: small shapes, for compute-sanitizer
*/
#include "../../../llmc/cuda/matmul.cuh"
#include "fp8_written.cuh"

// Beside rounding to bf16, of which a GEMM with a residual in its own output has two: tensor cores keep 14
// bits of an FP8 GEMM's sums, of up to 224 additions of 32 products.
static const double GEMM_LIMIT = 1e-2;
// Gradients of weights, in fp32: tensor cores cut the 32 products of an addition to 13 bits of the largest,
// of which one is up to 16 times as large as usual. A weight GEMM adds them to a sum in fp32 at every 128
// products: 16 / 2^13.
static const double WEIGHT_LIMIT = 2e-3;
static const double EXACT_LIMIT = 5e-3; // the same, and two roundings to bf16

// Random codes of finite numbers, of up to a quarter of the range.
static vector<uint8_t> draw_codes(int64_t n, Fp8Format format) {
    const vector<float> x = draw<float>((size_t)n, 1);
    vector<uint8_t> codes((size_t)n);
    for (int64_t i = 0; i < n; i++) codes[i] = fp8_nearest(16 * x[i], mantissa(format));
    return codes;
}

static vector<double> decoded(const vector<uint8_t>& codes, Fp8Format format, double inverse) {
    vector<double> x(codes.size());
    for (size_t i = 0; i < x.size(); i++) x[i] = inverse * fp8_value(codes[i], mantissa(format));
    return x;
}

// N columns, of which the first N8 are in FP8: out = x w^T + residual, dx = dout w, dw += dout^T x.
static void test_gemm(Matmul* mm, int64_t M, int64_t N, int64_t N8, int64_t K) {
    snprintf(test_case, sizeof test_case, "FP8 GEMM %lld x %lld (%lld) x %lld", (long long)M, (long long)N,
             (long long)N8, (long long)K);
    const double x_scale = 1.0 / 16, w_scale = 1.0 / 1024, g_scale = 1.0 / 8192;
    const vector<uint8_t> x8 = draw_codes(M * K, FP8_E4M3), w8 = draw_codes(N8 * K, FP8_E4M3),
                          g8 = draw_codes(M * N8, FP8_E5M2);
    vector<uint8_t> w8_transposed(w8.size());
    for (int64_t i = 0; i < N8 * K; i++) w8_transposed[i % K * N8 + i / K] = w8[i];
    const vector<bf16> x = draw<bf16>(M * K, 1), w = draw<bf16>(N * K, 0.02), g = draw<bf16>(M * N, 0.002),
                       residual = draw<bf16>(M * N, 0.5);
    const vector<float> dw = draw<float>(N * K, 0.01);
    const vector<double> fx8 = decoded(x8, FP8_E4M3, x_scale), fw8 = decoded(w8, FP8_E4M3, w_scale),
                         fg8 = decoded(g8, FP8_E5M2, g_scale), fx = doubles(x), fw = doubles(w),
                         fg = doubles(g);
    vector<double> want(M * N), want_residual(M * N), want_dx(M * K), want_dw = doubles(dw),
                                                                      fx_transposed(M * K);
    for (int64_t i = 0; i < M * K; i++) // x is converted where it is transposed
        fx_transposed[i] = x_scale * fp8_value(fp8_nearest(fx[i] / x_scale, 3), 3);
#pragma omp parallel for
    for (int64_t m = 0; m < M; m++) {
        for (int64_t n = 0; n < N; n++) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++)
                sum += n < N8 ? fx8[m * K + k] * fw8[n * K + k] : fx[m * K + k] * fw[n * K + k];
            want[m * N + n] = sum;
            want_residual[m * N + n] = sum + value(residual[m * N + n]);
        }
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++)
                want_dx[m * K + k] +=
                    n < N8 ? fg8[m * N8 + n] * fw8[n * K + k] : fg[m * N + n] * fw[n * K + k];
    }
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t m = 0; m < M; m++)
            for (int64_t k = 0; k < K; k++)
                want_dw[n * K + k] +=
                    n < N8 ? fg8[m * N8 + n] * fx_transposed[m * K + k] : fg[m * N + n] * fx[m * K + k];
    Buffer<uint8_t> x_scratch(M * K), dout_scratch(M * N8);
    Buffer<float> d_dw(dw), dw_again(dw);
    Buffer<uint8_t> d_x8(x8), d_w8(w8), d_w8_transposed(w8_transposed), d_g8(g8);
    Buffer<Fp8Scale> scales(vector<Fp8Scale>{{(float)w_scale, (float)(1 / w_scale)},
                                             {(float)x_scale, (float)(1 / x_scale)},
                                             {(float)g_scale, (float)(1 / g_scale)}});
    Buffer<bf16> d_x(x), d_w(w), d_g(g), d_residual(residual), out(M * N), out_again(M * N), dx(M * K),
        dx_again(M * K);
    const Fp8Scale* scale = scales;
    Linear l = {.w = d_w, .dw = d_dw, .rows = M, .N = N, .K = K, .out_stride = N, .x_stride = K};
    l.fp8 = {.w = d_w8,
             .w_transposed = d_w8_transposed,
             .w_scale = scale,
             .x = {.data = d_x8, .stride = K, .scale = scale + 1},
             .dout = {.data = d_g8, .stride = N8, .scale = scale + 2},
             .x_scratch = x_scratch,
             .dout_scratch = dout_scratch,
             .N = N8};
    linear_forward(out.p, d_x, NULL, &l, mm);
    double error = noted("FP8 forward", relative_error(out.host(), want), GEMM_LIMIT);
    CHECK(error < GEMM_LIMIT, "%s: forward: %g", test_case, error);
    linear_forward(out.p, d_x, d_residual, &l, mm);
    error = noted("FP8 forward, residual", relative_error(out.host(), want_residual), GEMM_LIMIT);
    CHECK(error < GEMM_LIMIT, "%s: forward with a residual: %g", test_case, error);
    linear_forward(out_again.p, d_x, d_residual, &l, mm);
    check_same_bits("out of a second run", out, out_again);
    const int64_t ends[] = {0, N8 / 2, N8 - 16, N}; // in FP8, in FP8, in both
    for (int part = 0; part < 3; part++) {
        const Linear columns = linear_columns(&l, ends[part], ends[part + 1] - ends[part]);
        linear_forward(out.p + ends[part], d_x, NULL, &columns, mm);
    }
    if (N8 < N) { // in bf16
        const Linear columns = linear_columns(&l, N8, N - N8);
        linear_forward(out.p + N8, d_x, NULL, &columns, mm);
    }
    error = noted("FP8 forward in parts", relative_error(out.host(), want), GEMM_LIMIT);
    CHECK(error < GEMM_LIMIT, "%s: forward in parts: %g", test_case, error);
    linear_backward_input(dx, d_g, &l, mm);
    error = noted("FP8 input gradient", relative_error(dx.host(), want_dx), GEMM_LIMIT);
    CHECK(error < GEMM_LIMIT, "%s: backward: %g", test_case, error);
    linear_backward_input(dx_again, d_g, &l, mm);
    check_same_bits("dx of a second run", dx, dx_again);
    l.fp8.exact = true;
    linear_backward_input(dx, d_g, &l, mm);
    error = noted("FP8 input gradient, exact", relative_error(dx.host(), want_dx), EXACT_LIMIT);
    CHECK(error < EXACT_LIMIT, "%s: backward without fast accumulation: %g", test_case, error);
    linear_backward_weight(d_g, d_x, &l, mm);
    error = noted("FP8 weight gradient", relative_error(d_dw.host(), want_dw), WEIGHT_LIMIT);
    CHECK(error < WEIGHT_LIMIT, "%s: gradient of weights: %g", test_case, error);
    l.dw = dw_again;
    linear_backward_weight(d_g, d_x, &l, mm);
    check_same_bits("dw of a second run", d_dw, dw_again);
}

// Without data in FP8, amax is found, and the GEMM is in bf16.
static void test_measuring(Matmul* mm) {
    snprintf(test_case, sizeof test_case, "measuring");
    const int64_t M = 48, N = 192, N8 = 128, K = 80;
    vector<bf16> x = draw<bf16>(M * K, 1), g = draw<bf16>(M * N, 1);
    x[M * K - 1] = (bf16)-300.0f, g[5 * N + N8 - 1] = (bf16)77.0f,
              g[5 * N + N8] = (bf16)999.0f; // the last is in bf16
    Buffer<bf16> d_x(x), d_g(g), w(draw<bf16>(N * K, 1)), out(M * N), want(M * N), dx(M * K), want_dx(M * K);
    Written x8(FP8_E4M3, 1, 8, 8, 1), g8(FP8_E5M2, 1, 8, 8, 1);
    Linear plain = {.w = w, .dw = NULL, .rows = M, .N = N, .K = K, .out_stride = N, .x_stride = K}, l = plain;
    l.fp8.N = N8, l.fp8.x = x8.tensor, l.fp8.dout = g8.tensor;
    l.fp8.x.data = l.fp8.dout.data = NULL;
    linear_forward(want.p, d_x, NULL, &plain, mm);
    linear_forward(out.p, d_x, NULL, &l, mm);
    linear_backward_input(want_dx, d_g, &plain, mm);
    linear_backward_input(dx, d_g, &l, mm);
    check_same_bits("out", out, want);
    check_same_bits("dx", dx, want_dx);
    CHECK(x8.amax() == bf16_bits((bf16)300.0f) && g8.amax() == bf16_bits((bf16)77.0f), "amax %x and %x",
          x8.amax(), g8.amax());
}

int main(int argc, char** argv) {
    const bool quick = test_begin(argc, argv);
    const int capability = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
                           device_attribute(cudaDevAttrComputeCapabilityMinor);
    if (capability >= 89) {
        for (int tune = 0; tune < 2; tune++) {
            Matmul mm;
            matmul_init(&mm, tune, 0);
            test_gemm(&mm, 64, 128, 128, 64);
            test_gemm(&mm, 80, 192, 128, 144);
            if (!quick) test_gemm(&mm, 512, 6272, 6144, 1536);
            if (!quick) test_gemm(&mm, 512, 1536, 1536, 3584);
            if (!quick) test_gemm(&mm, 512, 7168, 7168, 1536);
            test_measuring(&mm);
            matmul_free(&mm);
        }
    } else
        SKIP("FP8, which this GPU does not have");
    print_noted();
    return test_report();
}
