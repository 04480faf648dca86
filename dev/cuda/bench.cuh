/*
Shared by the benchmarks: random inputs and timing.
*/
#pragma once

#include <algorithm>
#include <vector>
#include "../../llmc/cuda/cuda_common.cuh"

template <class T> static inline T* device_array(int64_t n) {
    T* p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(T)));
    return p;
}

template <class T> __global__ static void fill_kernel(T* x, int64_t n, uint32_t key, float scale) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < n; i += step) {
        uint32_t h = ((uint32_t)i + key) * 2654435761u;
        h = (h ^ h >> 15) * 2246822519u;
        h ^= h >> 13;
        x[i] = (T)(scale * ((float)(h & 0xFFFF) + (float)(h >> 16) - 65535.0f) / 26755);
    }
}

// Fills x with pseudo-random values of standard deviation `scale`, different in each call. Zeros would make
// GEMMs faster.
template <class T> static inline void fill(T* x, int64_t n, float scale) {
    static uint32_t key;
    fill_kernel<<<2048, 256>>>(x, n, key += 1234567, scale);
    CUDA_CHECK_LAUNCH();
}

template <class T> static inline T* random_array(int64_t n, float scale) {
    T* p = device_array<T>(n);
    fill(p, n, scale);
    return p;
}

// Median milliseconds of run(variant) for each variant. Runs of the variants are interleaved, because a GPU
// slows down when it gets warm. prepare() is called before each run and not timed. Two warm-up rounds are not
// counted.
template <class Prepare, class Run>
static inline std::vector<double> milliseconds(int variants, int rounds, const Prepare& prepare,
                                               const Run& run) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<std::vector<float>> times((size_t)variants);
    for (int round = -2; round < rounds; round++)
        for (int v = 0; v < variants; v++) {
            prepare();
            CUDA_CHECK(cudaEventRecord(start));
            run(v);
            CUDA_CHECK(cudaEventRecord(stop));
            CUDA_CHECK(cudaEventSynchronize(stop));
            float ms;
            CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
            if (round >= 0) times[(size_t)v].push_back(ms);
        }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    std::vector<double> medians;
    for (std::vector<float>& t : times) {
        std::sort(t.begin(), t.end());
        medians.push_back(t[t.size() / 2]);
    }
    return medians;
}

// Bytes per second that a device-to-device copy of 1 GiB reads and writes; also printed.
static inline double bench_copy(void) {
    const int64_t bytes = (int64_t)1 << 30;
    char *from = random_array<char>(bytes, 30), *to = device_array<char>(bytes);
    std::vector<double> ms = milliseconds(
        1, 20, [] {},
        [&](int) { CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, 0)); });
    double rate = 2 * (double)bytes / ms[0] * 1e3;
    printf("copy of 1024 MiB: %.0f GB/s read and written\n", rate / 1e9);
    CUDA_CHECK(cudaFree(from));
    CUDA_CHECK(cudaFree(to));
    return rate;
}
