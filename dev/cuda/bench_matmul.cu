/*
Benchmarks the GEMMs of each linear layer of fox-pro (forward, input gradient, weight gradient), with the
first algorithm of cuBLASLt's heuristic and with the fastest of its first 24 ("tuned"). On a GPU that has FP8
also those of --fp8; of the projection the columns in FP8 alone.

    bench_matmul [TOKENS]     default 16384
*/
#include "../../llmc/config/config.h"
#include "../../llmc/cuda/device.cuh"
#include "../../llmc/cuda/matmul.cuh"
#include "../../llmc/baselines/mixers.h"
#include "../../llmc/config/presets.h"
#include "bench.cuh"

enum { FORWARD, FORWARD_ADD, BACKWARD_INPUT, BACKWARD_WEIGHT, NUM_FORMS };
static const char* const forms[NUM_FORMS] = {"forward", "forward + residual", "backward, input",
                                             "backward, weight"};
static bool has_fp8;

// n elements of x in FP8, in rows of `columns`; of standard deviation 1, or 1/64.
template <Fp8Format F>
static Fp8Tensor quantize(const bf16* x, int64_t n, int64_t columns, bool small, Fp8Scale* scale) {
    const Fp8Scale by = fp8_scale(small ? 0x3d20 : 0x4020, F); // 2.5 deviations, the largest of fill_kernel
    Fp8Tensor tensor = {.data = device_array<fp8>(n),
                        .stride = columns,
                        .scale = scale,
                        .amax = device_array<uint32_t>(FP8_LANES * FP8_LANE_STRIDE)};
    CUDA_CHECK(cudaMemcpy(scale, &by, sizeof by, cudaMemcpyHostToDevice));
    fp8_convert<F>(&tensor, x, n / columns, columns, columns, 0);
    return tensor;
}
static Matmul choices[2]; // first algorithm, tuned

// Prints the times of a GEMM, and returns them in milliseconds. `kind` follows them.
static std::vector<double> time_form(int form, const char* name, const Linear& linear, bf16* out, bf16* dx,
                                     const bf16* x, const bf16* dout, const char* kind) {
    const std::vector<double> ms = milliseconds(
        2, 11, [] {},
        [&](int choice) {
            Matmul* mm = &choices[choice];
            if (form == FORWARD) linear_forward(out, x, NULL, &linear, mm);
            if (form == FORWARD_ADD) linear_forward(out, x, dout, &linear, mm);
            if (form == BACKWARD_INPUT) linear_backward_input(dx, dout, &linear, mm);
            if (form == BACKWARD_WEIGHT) linear_backward_weight(dout, x, &linear, mm);
        });
    const double flop = 2e-9 * (double)linear.rows * (double)linear.N * (double)linear.K;
    printf("%-12s %6lld x %5lld  %-20s %8.3f ms %5.0f TFLOP/s   tuned %8.3f ms %5.0f TFLOP/s%s\n", name,
           (long long)linear.N, (long long)linear.K, forms[form], ms[0], flop / ms[0], ms[1], flop / ms[1],
           kind);
    return ms;
}

// Prints the times of a layer's GEMMs in FP8, that of weights with the transposed copies that it reads.
// Outputs are overwritten.
static void layer_fp8_gemms(bool residual, const char* name, Linear linear, const bf16* x, const bf16* dout,
                            bf16* dx, bf16* out) {
    const int64_t M = linear.rows, N = linear.N / 16 * 16, K = linear.K;
    Fp8Scale* scales = device_array<Fp8Scale>(4);
    const Fp8Tensor w = quantize<FP8_E4M3>(linear.w, N * K, K, true, scales + 3),
                    transposed = quantize<FP8_E4M3>(linear.w, N * K, N, true, scales);
    linear.N = N;
    linear.fp8 = {.w = w.data,
                  .w_transposed = transposed.data,
                  .w_scale = scales,
                  .x = quantize<FP8_E4M3>(x, M * K, K, false, scales + 1),
                  .dout = quantize<FP8_E5M2>(dout, M * N, N, false, scales + 2),
                  .x_scratch = device_array<fp8>(M * K),
                  .dout_scratch = device_array<fp8>(M * N),
                  .N = N};
    for (int form : {residual ? FORWARD_ADD : FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
        time_form(form, name, linear, out, dx, x, dout, "   FP8");
    for (const Fp8Tensor& t : {w, transposed, linear.fp8.x, linear.fp8.dout}) {
        CUDA_CHECK(cudaFree(t.data));
        CUDA_CHECK(cudaFree(t.amax));
    }
    for (void* p : {(void*)linear.fp8.x_scratch, (void*)linear.fp8.dout_scratch, (void*)scales})
        CUDA_CHECK(cudaFree(p));
}

// Prints the times of a layer's three GEMMs and adds them, multiplied by `times`, to total[2] in
// milliseconds.
static void layer(double total[2], int64_t times, bool residual, const char* name, int64_t M, int64_t N,
                  int64_t K) {
    int64_t stride = ceil_div<int64_t>(N, 8) * 8;
    bf16 *x = random_array<bf16>(M * K, 1), *w = random_array<bf16>(N * K, 0.02f),
         *dx = device_array<bf16>(M * K);
    bf16 *out = device_array<bf16>(M * stride), *dout = random_array<bf16>(M * stride, 1);
    float* dw = random_array<float>(N * K, 1);
    Linear linear = {w, dw, M, N, K, stride, K};
    for (int form = 0; form < NUM_FORMS; form++) {
        if (form == (residual ? FORWARD : FORWARD_ADD)) continue;
        const std::vector<double> ms = time_form(form, name, linear, out, dx, x, dout, "");
        for (int i = 0; i < 2; i++) total[i] += (double)times * ms[i];
    }
    if (has_fp8) layer_fp8_gemms(residual, name, linear, x, dout, dx, out);
    for (void* p : {(void*)x, (void*)w, (void*)dx, (void*)out, (void*)dout, (void*)dw})
        CUDA_CHECK(cudaFree(p));
}

int main(int argc, char** argv) {
    int64_t M = argc > 1 ? atoll(argv[1]) : 16384;
    if (M < 1) die("usage: bench_matmul [TOKENS]");
    Device device = device_open(0);
    printf("%s, peak %.1f TFLOP/s, %lld tokens\n", device.name, 1e-12 * device.peak_flops, (long long)M);
    has_fp8 = device.compute_capability >= 89;
    for (int i = 0; i < 2; i++) matmul_init(&choices[i], i, 0);
    for (const char* model : {"fox-pro-760m", "fox-pro-125m"}) {
        Error err;
        Recipe recipe;
        Config c = config_defaults();
        if (!config_preset(&c, &recipe, model, &err)) die("%s", err.msg);
        ParamTable table = params_build(&c);
        int64_t d = c.hidden_size, I = config_mlp_size(&c), L = c.num_hidden_layers;
        double total[2] = {0, 0};
        printf("%s\n", model);
        layer(total, L, false, "projection", M, matmul_padded(table.by_layer[0].proj.rows), d);
        layer(total, L, true, "output", M, d, d);
        layer(total, L, false, "gate, up", M, 2 * I, d);
        layer(total, L, true, "down", M, d, I);
        layer(total, 1, false, "lm_head", M, matmul_padded(c.vocab_size), d);
        double flop = 6e-9 * (double)M * (double)table.non_embedding;
        printf("all GEMMs: %.1f ms, %.0f TFLOP/s; tuned %.1f ms, %.0f TFLOP/s\n", total[0], flop / total[0],
               total[1], flop / total[1]);
        params_free(&table);
    }
    for (Matmul& mm : choices) matmul_free(&mm);
    return 0;
}
