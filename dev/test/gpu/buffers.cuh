/*
What GPU tests share: buffers on the device that notice a write behind their end, random inputs, errors.

Inputs are drawn anew in every run and rounded to what the kernel reads; outputs start as 0xFF bytes, which
are NaN. Errors are root mean squares relative to the reference's.
*/
#ifndef DEV_TEST_GPU_BUFFERS_CUH
#define DEV_TEST_GPU_BUFFERS_CUH

#include <cmath>
#include <vector>
#include "../../../llmc/cuda/cuda_common.cuh"
#include "../../../llmc/base/random.h"
#include "../check.h"

using std::vector;

static uint64_t seed; // of the next draw; main sets it and prints it

// Rounding to bf16 alone makes 1.7e-3 over many elements and up to 3.9e-3 in one.
static inline double bf16_limit(size_t elements) { return elements < 1000 ? 4e-3 : 2e-3; }

// On the device, with 64 elements behind its end that nothing may touch; freed at the end of its scope.
template <class T> struct Buffer {
    T* p;
    size_t n;
    explicit Buffer(size_t count) : n(count) {
        CUDA_CHECK(cudaMalloc(&p, (n + 64) * sizeof(T)));
        CUDA_CHECK(cudaMemset(p, 0xFF, (n + 64) * sizeof(T)));
    }
    explicit Buffer(const vector<T>& x) : Buffer(x.size()) { *this = x; }
    Buffer(const Buffer&) = delete;
    ~Buffer() { CUDA_CHECK(cudaFree(p)); }
    void operator=(const vector<T>& x) {
        CUDA_CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    operator T*() const { return p; }
    vector<T> host(size_t first = 0, size_t count = (size_t)-1) const {
        vector<T> x(count == (size_t)-1 ? n - first : count);
        CUDA_CHECK(cudaMemcpy(x.data(), p + first, x.size() * sizeof(T), cudaMemcpyDeviceToHost));
        return x;
    }
    bool end_untouched() const {
        vector<unsigned char> x(64 * sizeof(T));
        CUDA_CHECK(cudaMemcpy(x.data(), p + n, x.size(), cudaMemcpyDeviceToHost));
        for (unsigned char c : x)
            if (c != 0xFF) return false;
        return true;
    }
};

template <class T> static inline T rounded(double x) { return (T)(float)x; }
static inline double value(float x) { return x; }
static inline double value(bf16 x) { return __bfloat162float(x); }

template <class T> static inline vector<T> draw(size_t n, double scale) {
    vector<T> x(n);
    uint64_t row = seed++;
#pragma omp parallel for
    for (int64_t i = 0; i < (int64_t)n; i++)
        x[(size_t)i] = rounded<T>(scale * random_normal(1, row, (uint64_t)i));
    return x;
}

template <class T> static inline bool same_bits(const vector<T>& a, const vector<T>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T> static inline double relative_error(const vector<T>& got, const vector<double>& want) {
    double error = 0, sum = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double e = value(got[i]) - want[i];
        error += e * e;
        sum += want[i] * want[i];
    }
    return sqrt(error / (sum + 1e-300));
}

// The greatest error of each kind, for the limits above.
struct Worst {
    const char* name;
    double error;
} static worst[16];

static inline double noted(const char* name, double error) {
    Worst* w = worst;
    while (w->name && strcmp(w->name, name) != 0) w++;
    w->name = name;
    if (!(error <= w->error)) w->error = error;
    return error;
}

static inline void print_noted(void) {
    for (const Worst* w = worst; w->name; w++) printf("  %-14s error at most %.2e\n", w->name, w->error);
}

#endif // DEV_TEST_GPU_BUFFERS_CUH
