/*
Speed of llmc/attention.cuh, beside the rate at which cuBLAS multiplies matrices in the same run.

FLOPs are those of causal attention on paper: 2 B NH T^2 dh forward, 2.5 times as many backward, whatever is
computed.

    bench_attention [DH [T]]      that head size and length only
*/
#include <algorithm>
#include <vector>
#include <cublas_v2.h>
#include "../../llmc/attention.cuh"
#include "../../llmc/forget_gate.cuh"

__global__ static void fill_kernel(bf16* x, int64_t n, uint32_t key) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t a = ((uint64_t)i + key) * 0x9e3779b97f4a7c15u;
        a = (a ^ (a >> 32)) * 0xd6e8feb86659fd93u;
        a ^= a >> 32;
        // the sum of four bytes is near enough to a normal variable
        float sum = (float)((a & 255) + (a >> 8 & 255) + (a >> 16 & 255) + (a >> 24 & 255));
        x[i] = (bf16)((sum - 510) / 147.8f);
    }
}
template <class T> static T* allocate(int64_t n) {
    T* p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(T)));
    return p;
}
static bf16* allocate_random(int64_t n) {
    static uint32_t key;
    bf16* p = allocate<bf16>(n);
    fill_kernel<<<1024, 256>>>(p, n, key += 1234567);
    CUDA_CHECK_LAUNCH();
    return p;
}

// Median milliseconds of one call, over at least 5 calls and about 0.15 s.
template <class Call> static double milliseconds(Call call) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    double total = 0;
    for (int i = 0; i < 2; i++) call();
    while (times.size() < 5 || (total < 150 && times.size() < 100)) {
        float ms;
        CUDA_CHECK(cudaEventRecord(start));
        call();
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        times.push_back(ms);
        total += ms;
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static double cublas_rate(int n) {
    bf16 *a = allocate_random((int64_t)n * n), *b = allocate_random((int64_t)n * n),
         *c = allocate<bf16>((int64_t)n * n);
    cublasHandle_t handle;
    if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) die("cublasCreate failed");
    float one = 1, zero = 0;
    double ms = milliseconds([&] {
        if (cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_16BF, n, b, CUDA_R_16BF,
                         n, &zero, c, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
            die("cublasGemmEx failed");
    });
    cublasDestroy(handle);
    for (bf16* p : {a, b, c}) CUDA_CHECK(cudaFree(p));
    return 2e-9 * n * n * n / ms;
}

static void bench(int64_t B, int64_t T, int64_t NH, int64_t dh, bool gate) {
    int64_t n = B * T * NH * dh, tokens = B * T * NH, stride = ceil_div<int64_t>(4 * NH * dh + 3 * NH, 8) * 8;
    bf16 *q = allocate_random(n), *k = allocate_random(n), *v = allocate_random(n),
         *dout = allocate_random(n);
    bf16 *o = allocate<bf16>(n), *dq = allocate<bf16>(n), *dk = allocate<bf16>(n), *dv = allocate<bf16>(n);
    bf16* proj = allocate_random(B * T * stride);
    float *lse = allocate<float>(tokens), *dc = allocate<float>(tokens), *bias = allocate<float>(NH);
    double* c = allocate<double>(tokens);
    void* scratch = allocate<char>((int64_t)attention_backward_scratch(B, T, NH));
    CUDA_CHECK(cudaMemset(bias, 0, (size_t)NH * sizeof(float)));

    double gate_forward = milliseconds([&] { forget_gate_forward(c, proj, bias, B, T, NH, stride, 0); });
    double forward =
        milliseconds([&] { attention_forward(o, lse, q, k, v, gate ? c : NULL, NULL, B, T, NH, dh, 0); });
    double backward = milliseconds([&] {
        attention_backward(dq, dk, dv, gate ? dc : NULL, scratch, dout, q, k, v, o, lse, gate ? c : NULL,
                           NULL, NULL, B, T, NH, dh, 0);
    });
    double gate_backward =
        gate ? milliseconds([&] { forget_gate_backward(proj, bias, dc, proj, bias, B, T, NH, stride, 0); })
             : 0;
    double flops = 2e-9 * (double)B * (double)NH * (double)T * (double)T * (double)dh;
    printf("%4lld %4lld %6lld  %-4s  %8.3f %6.0f  %8.3f %6.0f", (long long)dh, (long long)(B * NH),
           (long long)T, gate ? "yes" : "no", forward, flops / forward, backward, 2.5 * flops / backward);
    if (gate) printf("   %6.3f %6.3f", gate_forward, gate_backward);
    printf("\n");
    for (void* p : {(void*)q, (void*)k, (void*)v, (void*)dout, (void*)o, (void*)dq, (void*)dk, (void*)dv,
                    (void*)proj, (void*)lse, (void*)dc, (void*)bias, (void*)c, scratch})
        CUDA_CHECK(cudaFree(p));
}

int main(int argc, char** argv) {
    int64_t only_dh = argc > 1 ? strtoll(argv[1], NULL, 10) : 0,
            only_T = argc > 2 ? strtoll(argv[2], NULL, 10) : 0;
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    printf("%s; cuBLAS bf16 8192 x 8192 x 8192: %.0f TFLOP/s\n", device.name, cublas_rate(8192));
    printf("  dh heads    T  gate   forward ms TFLOP/s  backward ms TFLOP/s  gate's own ms\n");
    for (int64_t dh : {64, 128})
        for (int64_t T : {2048, 4096, 16384, 65536})
            for (int gate = 1; gate >= 0; gate--)
                if ((!only_dh || dh == only_dh) && (!only_T || T == only_T))
                    bench(1, T, (dh == 64 ? 24 : 12) / (T == 65536 ? 4 : 1), dh, gate);
    return 0;
}
