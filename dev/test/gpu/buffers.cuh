/*
What GPU tests share: device buffers, random inputs, comparisons.

Inputs are drawn anew in every run, from the seed that is printed, and rounded to the type that the kernel
reads. Outputs start as 0xFF bytes, which are NaN. Expected values are computed in double. Errors are root
mean squares over a tensor, relative to the expected values' root mean square.
*/
#pragma once

#include <cmath>
#include <time.h>
#include <vector>
#include "../../../llmc/cuda/cuda_common.cuh"
#include "../../../llmc/base/random.h"
#include "../check.h"

using std::vector;

static uint64_t seed;       // of the next draw
static char test_case[256]; // under test, for messages

// Reads the arguments [quick] [SEED] in any order, sets and prints the seed; returns whether `quick` was
// given.
static inline bool test_begin(int argc, char** argv) {
    bool quick = false;
    seed = (uint64_t)(seconds_now() * 1e6);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0)
            quick = true;
        else
            seed = strtoull(argv[i], NULL, 10);
    }
    printf("seed %llu\n", (unsigned long long)seed);
    return quick;
}

// ----------------------------------------------------------------------------
// device buffers

// n elements, followed by 64 that nothing may write: the destructor checks them.
template <class T> struct Buffer {
    T* p;
    size_t n;
    explicit Buffer(size_t count) : n(count) {
        CUDA_CHECK(cudaMalloc(&p, (n + 64) * sizeof(T)));
        CUDA_CHECK(cudaMemset(p, 0xFF, (n + 64) * sizeof(T)));
    }
    explicit Buffer(const vector<T>& x) : Buffer(x.size()) { *this = x; }
    Buffer(size_t count, const Buffer& tail) : Buffer(count) { // zeros, but for a copy of `tail` at the end
        zero();
        CUDA_CHECK(cudaMemcpy(p + n - tail.n, tail.p, tail.n * sizeof(T), cudaMemcpyDeviceToDevice));
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() {
        CHECK(end_untouched(), "%s: a write past the end of a buffer", test_case);
        CUDA_CHECK(cudaFree(p));
    }
    void operator=(const vector<T>& x) {
        CUDA_CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    operator T*() const { return p; }
    void poison() { CUDA_CHECK(cudaMemset(p, 0xFF, n * sizeof(T))); }
    void zero() { CUDA_CHECK(cudaMemset(p, 0, n * sizeof(T))); }
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

// ----------------------------------------------------------------------------
// values on the host

template <class T> static inline T rounded(double x) { return (T)(float)x; }
static inline double value(double x) { return x; }
static inline double value(float x) { return x; }
static inline double value(bf16 x) { return __bfloat162float(x); }

template <class T> static inline vector<double> doubles(const vector<T>& x) {
    vector<double> y(x.size());
    for (size_t i = 0; i < x.size(); i++) y[i] = value(x[i]);
    return y;
}

// n normal numbers
template <class T> static inline vector<T> draw(size_t n, double scale, double mean = 0) {
    vector<T> x(n);
    uint64_t stream = seed++;
#pragma omp parallel for
    for (int64_t i = 0; i < (int64_t)n; i++)
        x[i] = rounded<T>(mean + scale * random_normal(1, stream, (uint64_t)i));
    return x;
}

// n normal numbers on the device, and their values on the host
template <class T> struct Drawn : Buffer<T> {
    vector<double> values;
    explicit Drawn(size_t count, double scale = 1, double mean = 0) : Drawn(draw<T>(count, scale, mean)) {}
    explicit Drawn(const vector<T>& x) : Buffer<T>(x), values(doubles(x)) {}
    double operator[](int64_t i) const { return values[i]; }
};

// The same directly on the device, for large buffers
template <class T> __global__ static void fill_normal_kernel(T* x, int64_t n, double scale, uint64_t stream) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x)
        x[i] = (T)(float)(scale * random_normal(1, stream, (uint64_t)i));
}
template <class T> static inline void fill_normal(const Buffer<T>& x, double scale) {
    fill_normal_kernel<<<1024, 256>>>(x.p, (int64_t)x.n, scale, seed++);
    CUDA_CHECK_LAUNCH();
}

// Adds a constant to all elements.
static inline void shift(Buffer<bf16>& x, float by) {
    vector<bf16> values = x.host();
    for (bf16& value : values) value = (bf16)((float)value + by);
    x = values;
}

// ----------------------------------------------------------------------------
// comparisons

// Rounding to bf16 alone leaves an error of 1.7e-3 over many elements and up to 3.9e-3 in one.
static inline double bf16_limit(size_t elements, size_t few = 1000) { return elements < few ? 4e-3 : 2e-3; }

static const double FP32_LIMIT = 2e-6; // sums in fp32 leave 4e-7

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

// The largest error of each kind, printed at the end beside its limit (0: several limits, or none)
struct Worst {
    const char* name;
    double error, limit;
};
static vector<Worst> worst;

static inline double noted(const char* name, double error, double limit = 0) {
    for (Worst& w : worst)
        if (strcmp(w.name, name) == 0 && w.limit == limit) {
            if (!(error <= w.error)) w.error = error;
            return error;
        }
    worst.push_back({name, error, limit});
    return error;
}

static inline void print_noted(void) {
    for (const Worst& w : worst) printf("  %-24s error at most %.2e, limit %.2e\n", w.name, w.error, w.limit);
}

// Where a value is a sum whose terms cancel, `terms` are the sums of the terms' absolute values: the error of
// fp32 arithmetic is relative to these.
template <class T>
static inline void check_close(const char* tensor, const vector<double>& want, const vector<T>& got,
                               double limit, const vector<double>* terms = NULL) {
    double difference = 0, norm = 0, lost = terms ? FP32_LIMIT / limit : 0;
    for (size_t i = 0; i < want.size(); i++) {
        difference += (value(got[i]) - want[i]) * (value(got[i]) - want[i]);
        norm += want[i] * want[i];
        if (terms) norm += lost * lost * (*terms)[i] * (*terms)[i];
    }
    double error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
    CHECK(error <= limit, "%s, %s: relative error %.3g, limit %.3g", test_case, tensor, error, limit);
    noted(tensor, error, limit);
}
template <class T>
static inline void check_close(const char* tensor, const vector<double>& want, const Buffer<T>& got,
                               double limit, const vector<double>* terms = NULL) {
    check_close(tensor, want, got.host(0, want.size()), limit, terms);
}

// Outputs in bf16: nothing but their rounding may show.
template <class Values>
static inline void check_bf16(const char* tensor, const vector<double>& want, const Values& got,
                              const vector<double>* terms = NULL) {
    check_close(tensor, want, got, bf16_limit(want.size(), 4096), terms);
}

// a and b are on the device.
template <class T> static inline void check_same_bits(const char* tensor, const T* a, const T* b, size_t n) {
    vector<T> x(n), y(n);
    CUDA_CHECK(cudaMemcpy(x.data(), a, n * sizeof(T), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(y.data(), b, n * sizeof(T), cudaMemcpyDeviceToHost));
    CHECK(same_bits(x, y), "%s: %s differs", test_case, tensor);
}
template <class T>
static inline void check_same_bits(const char* tensor, const Buffer<T>& a, const Buffer<T>& b) {
    check_same_bits(tensor, a.p, b.p, a.n);
}

// Element i of a large buffer.
__host__ __device__ static inline float element(int64_t i) {
    uint32_t x = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 32) * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(x >> 8) * (4.0f / 16777216) - 2;
}

template <class T> __global__ static void fill_kernel(T* x, int64_t n, float scale, float shift) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < n; i += step) x[i] = (T)(scale * element(i) + shift);
}

template <class T> static void fill(const Buffer<T>& x, float scale, float shift) {
    fill_kernel<<<4096, 256>>>(x.p, (int64_t)x.n, scale, shift);
    CUDA_CHECK_LAUNCH();
}
