/*
What every CUDA file stands on: checked calls, the compute type, small device functions.
*/
#ifndef LLMC_CUDA_COMMON_CUH
#define LLMC_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include "common.h"

// Weights, activations and their gradients on their way through the model; sums, statistics and gates are float.
typedef __nv_bfloat16 bf16;

// ----------------------------------------------------------------------------
// checked calls

static inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) return;
    const char* hint = error == cudaErrorMemoryAllocation ? "; lower --micro-batch or --seq-len"
                       : error == cudaErrorNoKernelImageForDevice
                           ? "; this binary has no code for this GPU: build with ARCHS for it (make help)"
                       : error == cudaErrorInsufficientDriver
                           ? "; the driver is older than this CUDA: update it"
                           : "";
    die("%s:%d: %s: %s%s", file, line, call, cudaGetErrorString(error), hint);
}
#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)

// After a launch: finds a bad launch configuration at once; what happens on the device shows at a later call.
#define CUDA_CHECK_LAUNCH() cuda_check(cudaGetLastError(), "kernel launch", __FILE__, __LINE__)

template <class T> static inline T ceil_div(T a, T b) { return (a + b - 1) / b; }

// ----------------------------------------------------------------------------
// 16 bytes at a time: the widest load and store there is

template <class T> struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T at[size];
    __device__ T& operator[](int i) { return at[i]; }
    __device__ const T& operator[](int i) const { return at[i]; }
};
typedef Pack<bf16> Pack8;
typedef Pack<float> Pack4;

// p must be aligned to 16 bytes
template <class T> __device__ static inline Pack<T> load16(const T* p) { return *(const Pack<T>*)p; }
template <class T> __device__ static inline void store16(T* p, const Pack<T>& x) { *(Pack<T>*)p = x; }
// the same for data that is read or written once: it need not stay in the caches
template <class T> __device__ static inline Pack<T> load16_once(const T* p) {
    int4 bits = __ldcs((const int4*)p);
    Pack<T> x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
template <class T> __device__ static inline void store16_once(T* p, const Pack<T>& x) {
    int4 bits;
    memcpy(&bits, &x, sizeof x);
    __stcs((int4*)p, bits);
}

// ----------------------------------------------------------------------------
// sums over a warp: every lane gets the result, and every run the same bits

__device__ static inline float warp_sum(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}
__device__ static inline float warp_max(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

__device__ static inline float sigmoidf(float x) { return 1.0f / (1.0f + __expf(-x)); }

#endif // LLMC_CUDA_COMMON_CUH
