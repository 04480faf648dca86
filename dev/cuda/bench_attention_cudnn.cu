/*
Benchmarks cuDNN's causal attention without a gate against ours with and without a gate, interleaved in one
process.

TFLOP/s count the nominal FLOPs of causal attention, 2 B NH T^2 dh forward and 2.5 times as many backward,
whatever the kernels execute.

    bench_attention_cudnn [DH [T]]      only this head size and sequence length
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
    float *lse = device_array<float>(rows), *dcum_logf = device_array<float>(rows);
    double* cum_logf = device_array<double>(rows); // every log gate is -1/1000
    std::vector<double> gates((size_t)rows);
    for (int64_t i = 0; i < rows; i++) gates[(size_t)i] = -1e-3 * (double)(i % T);
    CUDA_CHECK(cudaMemcpy(cum_logf, gates.data(), gates.size() * sizeof(double), cudaMemcpyHostToDevice));
    HeadShape shape = {B, T, NH, dh, NH * dh, NH * dh, dh, 0, NULL};
    char* scratch = device_array<char>((int64_t)attention_scratch_bytes(&shape, true));
    char* workspace = device_array<char>((int64_t)attention_cudnn_workspace(&shape, true, true));
    char* fast_workspace = device_array<char>((int64_t)attention_cudnn_workspace(&shape, false, true));

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
            bool gate = variant <= GATED_BACKWARD, cudnn = variant >= CUDNN,
                 deterministic = variant == CUDNN_BACK_DETERMINISTIC;
            void* space = !cudnn ? scratch : deterministic ? workspace : fast_workspace;
            AttentionForward f = {o, lse, q, k, v, gate ? cum_logf : NULL, NULL, space};
            AttentionBackward b = {};
            b.dq = dq, b.dk = dk, b.dv = dv, b.dcum_logf = gate ? dcum_logf : NULL;
            b.dout = dout, b.q = q, b.k = k, b.v = v, b.o = o, b.lse = lse;
            b.cum_logf = gate ? cum_logf : NULL, b.deterministic = deterministic, b.scratch = space;
            bool forward = variant == GATED || variant == OURS || variant == CUDNN;
            if (forward) (cudnn ? attention_cudnn_forward : attention_forward)(&f, &shape, 0);
            if (!forward) (cudnn ? attention_cudnn_backward : attention_backward)(&b, &shape, 0);
        });
    double flops = 2e-9 * (double)B * (double)NH * (double)T * (double)T * (double)dh;
    printf("%4lld %5lld %6lld", (long long)dh, (long long)(B * NH), (long long)T);
    for (int i = 0; i < VARIANTS; i++)
        printf("   %8.3f %4.0f", ms[(size_t)i],
               (i == GATED || i == OURS || i == CUDNN ? 1 : 2.5) * flops / ms[(size_t)i]);
    printf("\n");
    for (void* p :
         {(void*)q, (void*)k, (void*)v, (void*)dout, (void*)o, (void*)dq, (void*)dk, (void*)dv, (void*)lse,
          (void*)dcum_logf, (void*)cum_logf, (void*)scratch, (void*)workspace, (void*)fast_workspace})
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
