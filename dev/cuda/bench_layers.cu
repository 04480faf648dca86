/*
How fast the layers that only move memory are, beside a copy: bytes that must move, each once, over the time
taken.

Two sets of random inputs take turns and are larger than the caches. A time is the median of 40 calls.

    bench_layers [PART]     only those with PART in their name
*/
#include <algorithm>
#include <set>
#include <vector>
#include "../../llmc/cuda/device.cuh"
#include "../../llmc/cuda/embedding.cuh"
#include "../../llmc/attention/output_gate.cuh"
#include "../../llmc/attention/qkv.cuh"
#include "../../llmc/base/random.h"
#include "../../llmc/cuda/rmsnorm.cuh"
#include "../../llmc/cuda/swiglu.cuh"

static const int CALLS = 40, SETS = 2;
static double copy_rate; // bytes a second, read and written
static const char* part = "";

// ----------------------------------------------------------------------------

// Microseconds that call(set) takes, the median.
template <class Call> static double time_call(const Call& call) {
    std::vector<cudaEvent_t> events(CALLS + 1);
    for (cudaEvent_t& e : events) CUDA_CHECK(cudaEventCreate(&e));
    for (int i = 0; i < 4; i++) call(i % SETS);
    CUDA_CHECK(cudaEventRecord(events[0]));
    for (int i = 0; i < CALLS; i++) {
        call(i % SETS);
        CUDA_CHECK(cudaEventRecord(events[(size_t)i + 1]));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<double> times;
    for (size_t i = 0; i < CALLS; i++) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
        times.push_back(1e3 * ms);
    }
    for (cudaEvent_t e : events) CUDA_CHECK(cudaEventDestroy(e));
    std::nth_element(times.begin(), times.begin() + CALLS / 2, times.end());
    return times[CALLS / 2];
}

template <class Call> static void bench(const char* name, double bytes, const Call& call) {
    if (!strstr(name, part)) return;
    double us = time_call(call), rate = bytes / us * 1e6;
    printf("%-38s %8.1f MB %8.1f us %8.1f us floor %7.0f GB/s %6.1f%% of copy\n", name, bytes / 1e6, us,
           bytes / copy_rate * 1e6, rate / 1e9, 100 * rate / copy_rate);
}

// ----------------------------------------------------------------------------

template <class T> __global__ static void fill_kernel(T* p, int64_t n, uint64_t stream) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x)
        p[i] = (T)(float)(2 * random_uniform(1, stream, (uint64_t)i) - 1);
}

static std::vector<void*> allocated;

// A tensor of n random elements for each set.
template <class T> struct Tensor {
    T* at[SETS];
    T* operator[](int set) const { return at[set]; }
};
template <class T> static Tensor<T> tensor(int64_t n) {
    Tensor<T> t;
    for (int set = 0; set < SETS; set++) {
        CUDA_CHECK(cudaMalloc(&t.at[set], (size_t)n * sizeof(T)));
        allocated.push_back(t.at[set]);
        fill_kernel<<<4096, 256>>>(t.at[set], n, allocated.size());
        CUDA_CHECK_LAUNCH();
    }
    return t;
}

static void free_all(void) {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (void* p : allocated) CUDA_CHECK(cudaFree(p));
    allocated.clear();
}

// ----------------------------------------------------------------------------

static void bench_copy(void) {
    for (int64_t bytes : {(int64_t)50 << 20, (int64_t)100 << 20, (int64_t)1 << 30}) {
        Tensor<float> from = tensor<float>(bytes / 4), to = tensor<float>(bytes / 4);
        double us = time_call([&](int set) {
            CUDA_CHECK(cudaMemcpyAsync(to[set], from[set], (size_t)bytes, cudaMemcpyDeviceToDevice));
        });
        copy_rate = 2 * (double)bytes / us * 1e6;
        printf("copy of %5lld MiB: %8.1f us, %5.0f GB/s read and written\n", (long long)(bytes >> 20), us,
               copy_rate / 1e9);
        free_all();
    }
}

// The layers of one model, on B sequences of T tokens.
static void bench_model(const char* name, int64_t B, int64_t T, int64_t NH, int64_t dh, int64_t I,
                        int64_t V) {
    int64_t d = NH * dh, R = 4 * d + 3 * NH, stride = ceil_div<int64_t>(R, 8) * 8, rows = B * T, n = rows * d;
    double act = 2 * (double)n,
           per_head = 4 * (double)(rows * NH); // bytes of [B,T,d] in bf16 and of [B,T,NH] in fp32
    printf("\n%s: B %lld, T %lld, NH %lld, dh %lld, I %lld\n", name, (long long)B, (long long)T,
           (long long)NH, (long long)dh, (long long)I);
    Tensor<bf16> a = tensor<bf16>(n), b = tensor<bf16>(n), c = tensor<bf16>(n), e = tensor<bf16>(n),
                 w = tensor<bf16>(d);
    Tensor<bf16> f = tensor<bf16>(n), g = tensor<bf16>(n);
    Tensor<float> rstd = tensor<float>(rows * NH), dw = tensor<float>(d), rstd2 = tensor<float>(rows * NH);
    Tensor<float> delta = tensor<float>(rows * NH), angles = tensor<float>(T * dh);
    float* partial = tensor<float>((int64_t)(norm_partial_bytes() / sizeof(float)))[0];

    bench("rmsnorm_forward", 2 * act,
          [&](int s) { rmsnorm_forward(a[s], rstd[s], NULL, b[s], NULL, w[s], rows, d, 1e-6, 0); });
    bench("rmsnorm_forward, x + branch", 4 * act,
          [&](int s) { rmsnorm_forward(a[s], rstd[s], e[s], b[s], c[s], w[s], rows, d, 1e-6, 0); });
    bench("rmsnorm_backward", 3 * act, [&](int s) {
        rmsnorm_backward(a[s], dw[s], NULL, NULL, b[s], c[s], w[s], rstd[s], partial, rows, d, 0);
    });
    bench("rmsnorm_backward, + residual, y", 5 * act, [&](int s) {
        rmsnorm_backward(a[s], dw[s], e[s], a[s], b[s], c[s], w[s], rstd[s], partial, rows, d, 0);
    });
    {
        Tensor<bf16> proj = tensor<bf16>(rows * stride), dproj = tensor<bf16>(rows * stride);
        for (int set = 0; set < SETS; set++) rope_angles(angles[set], T, dh, 500000, 0);
        bench("output_gate_forward, norm, gate", 3 * act + per_head, [&](int s) {
            output_gate_forward(a[s], rstd[s], b[s], w[s], proj[s] + 3 * d, B, T, NH, dh, stride, 1e-6, 0);
        });
        bench("output_gate_backward, norm, gate, delta, y", 6 * act + 2 * per_head, [&](int s) {
            output_gate_backward(a[s], dw[s], dproj[s] + 3 * d, delta[s], e[s], b[s], c[s], w[s], rstd[s],
                                 proj[s] + 3 * d, partial, B, T, NH, dh, stride, 0);
        });
        struct {
            const char* name;
            bool shift, norm, rope;
        } variants[] = {{"shift, norm", true, true, false},
                        {"shift, norm, rope", true, true, true},
                        {"rope", false, false, true},
                        {"none", false, false, false}};
        for (auto& v : variants) {
            auto paths = [&](int s, HeadPath* p) {
                bf16 *outs[3] = {a[s], b[s], c[s]}, *douts[3] = {e[s], f[s], g[s]};
                float* rstds[3] = {rstd[s], rstd2[s], NULL};
                for (int i = 0; i < 3; i++) {
                    p[i].column = i * d, p[i].shift = v.shift && i ? 4 * d + i * NH : -1;
                    p[i].weight = v.norm && i < 2 ? w[s] : NULL, p[i].dweight = dw[s],
                    p[i].rope = v.rope && i < 2;
                    p[i].out = outs[i], p[i].dout = douts[i], p[i].rstd = rstds[i];
                }
            };
            double extra =
                (v.shift ? per_head : 0) + (v.norm ? 2 * per_head : 0); // two bf16 logits a head; two rstds
            double recompute = v.norm ? (v.shift ? 3 : 2) : v.shift ? 2 : 0; // paths that need proj again
            char title[96];
            snprintf(title, sizeof title, "qkv_forward, %s", v.name);
            bench(title, 6 * act + extra, [&](int s) {
                HeadPath p[3];
                paths(s, p);
                qkv_forward(p, proj[s], angles[s], B, T, NH, dh, R, stride, dh, 0);
            });
            snprintf(title, sizeof title, "qkv_backward, %s", v.name);
            bench(title, (6 + recompute) * act + extra + (v.shift ? per_head : 0), [&](int s) {
                HeadPath p[3];
                paths(s, p);
                qkv_backward(p, dproj[s], proj[s], angles[s], partial, B, T, NH, dh, R, stride, dh, 0);
            });
        }
    }
    {
        Tensor<bf16> gu = tensor<bf16>(2 * rows * I), s_ = tensor<bf16>(rows * I),
                     dgu = tensor<bf16>(2 * rows * I);
        bench("swiglu_forward", 6 * (double)(rows * I),
              [&](int s) { swiglu_forward(s_[s], gu[s], rows, I, 0); });
        bench("swiglu_backward, s", 12 * (double)(rows * I),
              [&](int s) { swiglu_backward(dgu[s], s_[s], s_[s], gu[s], rows, I, 0); });
    }
    {
        Tensor<bf16> embeddings = tensor<bf16>(V * d);
        Tensor<float> de = tensor<float>(V * d);
        Tensor<char> scratch = tensor<char>((int64_t)embedding_scratch_bytes(rows, d));
        Tensor<int32_t> tokens = tensor<int32_t>(rows);
        for (const char* kind : {"as text", "uniform", "all equal"}) {
            double distinct = 0;
            for (int set = 0; set < SETS; set++) {
                std::vector<int32_t> ids((size_t)rows);
                for (int64_t i = 0; i < rows; i++) { // text: an id's frequency falls as 1 / rank
                    double u = random_uniform(2, (uint64_t)set, (uint64_t)i);
                    ids[(size_t)i] = (int32_t)(!strcmp(kind, "as text")   ? pow((double)V, u) - 1
                                               : !strcmp(kind, "uniform") ? u * (double)V
                                                                          : 7);
                }
                distinct = (double)std::set<int32_t>(ids.begin(), ids.end()).size();
                CUDA_CHECK(cudaMemcpy(tokens[set], ids.data(), ids.size() * sizeof(int32_t),
                                      cudaMemcpyHostToDevice));
            }
            char title[96];
            snprintf(title, sizeof title, "embedding_forward, %s", kind);
            bench(title, act + 2 * distinct * (double)d,
                  [&](int s) { embedding_forward(a[s], embeddings[s], tokens[s], rows, d, 0); });
            snprintf(title, sizeof title, "embedding_backward, %s", kind);
            bench(title, act + 8 * distinct * (double)d,
                  [&](int s) { embedding_backward(de[s], a[s], tokens[s], scratch[s], rows, d, V, 0); });
        }
    }
    free_all();
}

int main(int argc, char** argv) {
    if (argc > 1) part = argv[1];
    Device device = device_open(0);
    printf("%s, %d multiprocessors\n", device.name, device.multiprocessors);
    bench_copy();
    bench_model("fox-pro-760m", 1, 16384, 24, 64, 3584, 50257);
    bench_model("fox-pro-125m", 2, 16384, 12, 64, 1792, 50257);
    bench_model("transformer-pro-760m", 1, 16384, 12, 128, 3584, 50257);
    return EXIT_SUCCESS;
}
