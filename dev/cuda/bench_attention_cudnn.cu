/*
cuDNN's causal attention without a gate beside ours, with a gate and without, in turns.

FLOPs are those of causal attention on paper: 2 B NH T^2 dh forward, 2.5 times as many backward, whatever is
computed.

    bench_attention_cudnn [DH [T]]      that head size and length only
*/
#include "../../llmc/attention/attention.cuh"
#include "../../llmc/attention/cudnn.cuh"
#include "bench.cuh"

#ifdef USE_CUDNN

static void bench(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    int64_t n = B * T * NH * dh, rows = B * T * NH;
    bf16 *q = random_array<bf16>(n, 1), *k = random_array<bf16>(n, 1), *v = random_array<bf16>(n, 1),
         *dout = random_array<bf16>(n, 1);
    bf16 *o = device_array<bf16>(n), *dq = device_array<bf16>(n), *dk = device_array<bf16>(n),
         *dv = device_array<bf16>(n);
    float *lse = device_array<float>(rows), *dc = device_array<float>(rows);
    double* c = device_array<double>(rows); // each gate forgets 1/1000 of what is
    std::vector<double> gates((size_t)rows);
    for (int64_t i = 0; i < rows; i++) gates[(size_t)i] = -1e-3 * (double)(i % T);
    CUDA_CHECK(cudaMemcpy(c, gates.data(), gates.size() * sizeof(double), cudaMemcpyHostToDevice));
    char* scratch = device_array<char>((int64_t)attention_scratch_bytes(B, T, NH, dh));
    char* workspace = device_array<char>((int64_t)attention_cudnn_workspace(B, T, NH, dh, true));
    char* fast_workspace = device_array<char>((int64_t)attention_cudnn_workspace(B, T, NH, dh, false));

    enum {
        GATED,
        GATED_BACKWARD,
        OURS,
        OURS_BACKWARD,
        CUDNN,
        CUDNN_BACK,
        CUDNN_BACK_DETERMINISTIC,
        VARIANTS
    };
    std::vector<double> ms = milliseconds(
        VARIANTS, 10, [] {},
        [&](int variant) {
            if (variant == GATED) attention_forward(o, lse, scratch, q, k, v, c, NULL, B, T, NH, dh, 0);
            if (variant == GATED_BACKWARD)
                attention_backward(dq, dk, dv, dc, scratch, dout, q, k, v, o, lse, NULL, c, NULL, false, B, T,
                                   NH, dh, 0);
            if (variant == OURS) attention_forward(o, lse, scratch, q, k, v, NULL, NULL, B, T, NH, dh, 0);
            if (variant == OURS_BACKWARD)
                attention_backward(dq, dk, dv, NULL, scratch, dout, q, k, v, o, lse, NULL, NULL, NULL, false,
                                   B, T, NH, dh, 0);
            if (variant == CUDNN) attention_cudnn_forward(o, lse, fast_workspace, q, k, v, B, T, NH, dh, 0);
            if (variant == CUDNN_BACK)
                attention_cudnn_backward(dq, dk, dv, fast_workspace, dout, q, k, v, o, lse, false, B, T, NH,
                                         dh, 0);
            if (variant == CUDNN_BACK_DETERMINISTIC)
                attention_cudnn_backward(dq, dk, dv, workspace, dout, q, k, v, o, lse, true, B, T, NH, dh, 0);
        });
    double flops = 2e-9 * (double)B * (double)NH * (double)T * (double)T * (double)dh;
    printf("%4lld %5lld %6lld", (long long)dh, (long long)(B * NH), (long long)T);
    for (int i = 0; i < VARIANTS; i++)
        printf("   %8.3f %4.0f", ms[(size_t)i],
               (i == GATED || i == OURS || i == CUDNN ? 1 : 2.5) * flops / ms[(size_t)i]);
    printf("\n");
    for (void* p : {(void*)q, (void*)k, (void*)v, (void*)dout, (void*)o, (void*)dq, (void*)dk, (void*)dv,
                    (void*)lse, (void*)dc, (void*)c, (void*)scratch, (void*)workspace, (void*)fast_workspace})
        CUDA_CHECK(cudaFree(p));
}

int main(int argc, char** argv) {
    int64_t only_dh = argc > 1 ? strtoll(argv[1], NULL, 10) : 0,
            only_T = argc > 2 ? strtoll(argv[2], NULL, 10) : 0;
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    printf("%s, cuDNN %zu; milliseconds and TFLOP/s\n", device.name, cudnnGetVersion());
    printf("  dh heads      T  gate on, forward        backward  gate off, forw.        backward   cuDNN "
           "forward  cuDNN backward   "
           "deterministic\n");
    for (int64_t dh : {64, 128})
        for (int64_t T : {2048, 4096, 16384})
            if ((!only_dh || dh == only_dh) && (!only_T || T == only_T)) bench(1, T, dh == 64 ? 24 : 12, dh);
    return 0;
}

#else // USE_CUDNN

int main(void) {
    printf("bench_attention_cudnn: built without cuDNN\n");
    return 0;
}

#endif
