/*
What every CUDA file builds on: error checks, 16-byte loads and stores of bf16, reductions over a warp and a
thread block.

Weights, activations and their gradients are bf16; sums, statistics and gates are float or double.
*/
#pragma once

#include <cuda_runtime.h>
#include "../base/common.h"
#include "../model/shapes.h"

// ----------------------------------------------------------------------------
// error checks: every failed call ends the program, with what to do about it

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

// After every kernel launch. Reports a bad launch configuration; errors on the device appear at a later call.
#define CUDA_CHECK_LAUNCH() cuda_check(cudaGetLastError(), "kernel launch", __FILE__, __LINE__)

// Queues kernel(...) and reports a bad launch configuration with the kernel's name. An empty grid is not
// launched.
#define CUDA_LAUNCH(kernel, grid, threads, stream, ...)                                                      \
    do {                                                                                                     \
        const dim3 blocks_(grid);                                                                            \
        if (blocks_.x > 0) kernel<<<blocks_, threads, 0, stream>>>(__VA_ARGS__);                             \
        cuda_check(cudaGetLastError(), #kernel, __FILE__, __LINE__);                                         \
    } while (0)

template <class T> __host__ __device__ static inline T ceil_div(T a, T b) { return (a + b - 1) / b; }

// Is there a GPU, and a driver new enough for this program? Without them --dry-run alone works.
static inline bool device_exists(void) {
    int count = 0;
    bool exists = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
    (void)cudaGetLastError(); // the error is not one of a later launch
    return exists;
}

// An attribute of the current GPU
static inline int device_attribute(cudaDeviceAttr attribute) {
    int device, value;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

// A function of the driver, looked up at run time so that the program does not link against the driver. Dies
// if the driver is older than `version` of CUDA, as in 11070.
static inline void* driver_function(const char* name, unsigned version) {
    void* found = NULL;
    cudaDriverEntryPointQueryResult status;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &status));
    if (status != cudaDriverEntryPointSuccess || !found) die("the driver has no %s: update the driver", name);
    return found;
}

// The grid of a kernel over rows of n columns, a multiple of 8: a thread has eight columns of one row.
// blockIdx.x is the row, blockIdx.y the part of it, as a block has at most 512 threads.
typedef struct {
    dim3 blocks;
    unsigned threads;
} RowGrid;

static inline RowGrid row_grid(int64_t rows, int64_t n) {
    assert(rows <= INT32_MAX && n > 0 && n % 8 == 0);
    int64_t parts = ceil_div<int64_t>(n, 8 * 512);
    return {dim3((unsigned)rows, (unsigned)parts), (unsigned)(32 * ceil_div<int64_t>(n, 8 * 32 * parts))};
}

// The x index of a thread block, from the end. Blocks start in the order of blockIdx.x, and GEMMs write and
// read rows from the first to the last: a kernel between two of them that takes rows from the end finds in L2
// what was written last, and leaves there what is read first.
__device__ static inline unsigned block_from_end(void) { return gridDim.x - 1 - blockIdx.x; }

// Two pinned host buffers that take turns: the host uses one while the device copies to or from the other.
typedef struct {
    void* data[2];       // NULL: not open
    cudaEvent_t done[2]; // of the device's copy
    int next, oldest;    // the buffers to use next, and to wait for next
} PinnedPair;

static inline void pinned_pair_open(PinnedPair* p, int64_t bytes) {
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost(&p->data[i], (size_t)bytes));
        CUDA_CHECK(cudaEventCreateWithFlags(&p->done[i], cudaEventDisableTiming));
    }
}

static inline void pinned_pair_close(PinnedPair* p) {
    for (int i = 0; i < 2 && p->data[i]; i++) {
        cudaFreeHost(p->data[i]);
        cudaEventDestroy(p->done[i]);
    }
}

// The smallest x in low..high for which holds(x), which is monotonic; high if there is none.
template <class T, class Holds> __device__ static inline T search_first(T low, T high, const Holds& holds) {
    while (low < high) {
        T middle = low + (high - low) / 2;
        if (holds(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// ----------------------------------------------------------------------------
// 16 bytes at a time: the widest load and store of a thread

template <class T> struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T at[size];
    __device__ T& operator[](int i) { return at[i]; }
    __device__ const T& operator[](int i) const { return at[i]; }
};
typedef Pack<bf16> Pack8;
typedef Pack<float> Pack4;

// p is aligned to 16 bytes.
template <class T> __device__ static inline Pack<T> load16(const T* p) { return *(const Pack<T>*)p; }
template <class T> __device__ static inline void store16(T* p, const Pack<T>& x) { *(Pack<T>*)p = x; }
// The same for data that is read or written once: evicted from the caches first.
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

// Eight bf16 as raw bits, for loads that are issued ahead of their use: they stay four registers until
// unpack8. With a Pack8 the compiler extracts the eight values, and so waits, right after the load.
typedef uint4 Raw8;
__device__ static inline Raw8 load_raw8(const bf16* p) { return *(const uint4*)p; }
__device__ static inline Raw8 load_raw8_once(const bf16* p) { return __ldcs((const uint4*)p); }
__device__ static inline void store16(bf16* p, const Raw8& x) { *(uint4*)p = x; }
__device__ static inline void store16_once(bf16* p, const Raw8& x) { __stcs((uint4*)p, x); }

// Arithmetic is in float. unpack8 is exact; pack8 rounds to nearest even.
__device__ static inline void unpack8(float x[8], const Raw8& raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ static inline void unpack8(float x[8], const Pack8& p) {
    for (int i = 0; i < 8; i++) x[i] = __bfloat162float(p[i]);
}
__device__ static inline Raw8 pack8(const float x[8]) {
    uint32_t words[4];
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ static inline void store_bf16x4(bf16* p, const Pack4& x) {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
    uint2 bits;
    memcpy(&bits, pairs, sizeof bits);
    *(uint2*)p = bits; // p is aligned to 8 bytes
}
__device__ static inline void store8(float* p, const float x[8]) {
    store16(p, Pack4{{x[0], x[1], x[2], x[3]}});
    store16(p + 4, Pack4{{x[4], x[5], x[6], x[7]}});
}

// ----------------------------------------------------------------------------
// reductions, in an order that never changes: the same bits in every run

template <class T> __device__ static inline T warp_sum(T x) { // in every lane
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}
__device__ static inline float warp_max(float x) { // in every lane
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// Sum over the thread block, in thread 0. Called at most once for each T in a kernel: its shared memory is
// not protected against a second call.
template <class T> __device__ static inline T block_sum(T x) {
    __shared__ T sums[32]; // of the warps
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned warp = 1; warp < blockDim.x / 32; warp++) x += sums[warp];
    return x;
}

// Sum over the thread block, in every thread. sums [32] is shared memory; two calls in a row need different
// ones, as slow warps may still be reading the first.
__device__ static inline float block_sum_all(float x, float sums[32]) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x = warp_sum(x);
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? sums[lane] : 0);
}

// The hardware's 2^x; denormal results are 0.
__device__ static inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / (1 + exp(-x)) within 3 ulp, from the hardware's 2^x and 1/x. expf and a division would also handle
// denormal numbers, which make no difference here: beside 1 they vanish.
__device__ static inline float sigmoidf(float x) {
    return __fdividef(1.0f, 1.0f + exp2_approx(-1.44269504f * x));
}
