/*
The GPU: opens it, checks that the trainer can run on it, knows its peak speed, and allocates its memory.
*/
#pragma once

#ifdef USE_CUDNN
#include <cudnn.h>
#endif
#ifdef USE_NCCL
#include <nccl.h>
#endif
#include "../base/gpus.h"
#include "../ranks/world.h"
#include "cuda_common.cuh"

// What the program was built with, for --version. The Makefile names the architectures.
#ifndef GPU_CODE
#define GPU_CODE "unknown"
#endif
#define DEVICE_TEXT_(x) #x
#define DEVICE_DOTTED_(major, minor, patch)                                                                  \
    DEVICE_TEXT_(major) "." DEVICE_TEXT_(minor) "." DEVICE_TEXT_(patch)
#ifdef USE_CUDNN
#define DEVICE_CUDNN "cuDNN " DEVICE_DOTTED_(CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL)
#else
#define DEVICE_CUDNN "no cuDNN"
#endif
#ifdef USE_NCCL
#define DEVICE_NCCL "NCCL " DEVICE_DOTTED_(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)
#else
#define DEVICE_NCCL "no NCCL"
#endif
#define DEVICE_BUILT_WITH                                                                                    \
    "CUDA " DEVICE_DOTTED_(__CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__,                                       \
                           __CUDACC_VER_BUILD__) "\n" DEVICE_NCCL "\n" DEVICE_CUDNN "\nGPU code " GPU_CODE

typedef struct {
    int index;
    char name[256];
    int compute_capability; // 80 for 8.0
    int sms;
    int64_t memory;    // bytes in total
    double peak_flops; // a second, of dense bf16 GEMMs with fp32 accumulation; 0 when unknown
} Device;

// ----------------------------------------------------------------------------
// opening

// Selects GPU `index` of the visible ones for this thread and describes it. Dies, with what to do, when there
// is no such GPU, the driver is too old for this program, or the GPU has no tensor cores for bf16.
static inline Device device_open(int index) {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    int driver = 0, runtime = 0, count = 0;
    cudaDriverGetVersion(&driver);
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    cudaError_t error = cudaGetDeviceCount(&count);
    if (driver == 0)
        die("no NVIDIA driver on this machine: install it, or train on the CPU with ./train_fox");
    if (error == cudaErrorInsufficientDriver)
        die("the NVIDIA driver is too old: it supports CUDA %d.%d at most, and this program needs %d.%d; "
            "update the driver, or build with an older CUDA",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
        die("there is no GPU%s%s%s; ./train_fox trains on the CPU",
            visible ? " in CUDA_VISIBLE_DEVICES='" : "", visible ? visible : "", visible ? "'" : "");
    CUDA_CHECK(error);
    if (index < 0 || index >= count)
        die("there is no GPU %d: this process sees %d, counted from 0", index, count);

    cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDeviceProperties(&prop, index));
    if (prop.major < 8)
        die("GPU %d (%s) has compute capability %d.%d, and bf16 needs 8.0 or more (A100, RTX 30 and newer); "
            "./train_fox trains on the CPU",
            index, prop.name, prop.major, prop.minor);
    CUDA_CHECK(cudaSetDevice(index));

    const Gpu* known = gpu_find(prop.name);
    Device d = {.index = index,
                .compute_capability = 10 * prop.major + prop.minor,
                .sms = prop.multiProcessorCount,
                .memory = (int64_t)prop.totalGlobalMem,
                .peak_flops = known ? 1e12 * known->tflops : 0};
    snprintf(d.name, sizeof d.name, "%s", prop.name);
    return d;
}

// Collective: the same for a rank, which takes the GPU of its number on this host, or the only one that it
// sees. Dies where two ranks took the same GPU.
static inline Device device_open_ranked(World* world) {
    typedef struct {
        char host[sizeof world->host];
        cudaUUID_t uuid;
    } Place;
    int count = 0;
    if (world->size == 1) return device_open(0);
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 1 && world->local_rank >= count)
        die("%s on host %s, which has %s: start one rank a GPU", counted(world->local_size, "rank").text,
            world->host, counted(count, "GPU").text);
    Device d = device_open(count > 1 ? world->local_rank : 0);
    cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDeviceProperties(&prop, d.index));
    Place mine, *all = (Place*)xcalloc((size_t)world->size, sizeof *all);
    memset(&mine, 0, sizeof mine);
    memcpy(mine.host, world->host, sizeof mine.host);
    mine.uuid = prop.uuid;
    world_allgather(world, all, &mine, sizeof mine);
#ifdef RANKS_SHARE_GPU // a test: dev/test/one_gpu
    const bool may_share = true;
#else
    const bool may_share = false;
#endif
    for (int r = 0; r < world->rank; r++)
        if (!may_share && memcmp(&all[r], &mine, sizeof mine) == 0)
            die("rank %d uses the GPU of rank %d, %s of host %s: start one rank a GPU", world->rank, r,
                d.name, world->host);
    free(all);
    return d;
}

// ----------------------------------------------------------------------------
// memory

static inline void* device_bytes(size_t bytes) {
    void* p;
    CUDA_CHECK(cudaMalloc(&p, bytes ? bytes : 1));
    return p;
}

static inline void* device_zeros(size_t bytes) {
    void* p = device_bytes(bytes);
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    return p;
}

static inline void device_free(void* p) { CUDA_CHECK(cudaFree(p)); }

// Device memory, or NULL where there is none.
static inline void* device_bytes_if_any(size_t bytes) {
    void* p = NULL;
    if (cudaMalloc(&p, bytes) != cudaSuccess)
        (void)cudaGetLastError(); // the error is not one of a later launch
    return p;
}

// Memory of one kernel at a time; all zero: none yet.
typedef struct {
    void* memory;
    size_t bytes;
} Scratch;

// Makes it at least so large. What was in it is lost, and kernels that have its address must not run again.
static inline void scratch_reserve(Scratch* s, size_t bytes) {
    if (s->memory && s->bytes >= bytes) return;
    device_free(s->memory); // waits for the kernels that use it
    *s = {device_bytes(bytes), bytes};
}

// Pinned memory of the host
static inline void* device_host_alloc(size_t bytes) {
    void* memory;
    CUDA_CHECK(cudaMallocHost(&memory, bytes));
    return memory;
}
static inline void device_host_free(void* memory) { CUDA_CHECK(cudaFreeHost(memory)); }

// ----------------------------------------------------------------------------
// copies to the host, which wait for what is queued on all streams but those of exchanges

static inline void device_download(void* host, const void* device, int64_t bytes) {
    CUDA_CHECK(cudaMemcpy(host, device, (size_t)bytes, cudaMemcpyDeviceToHost));
}

// n numbers, as floats; free them
static inline float* device_download_bf16(const bf16* device, int64_t n) {
    bf16* raw = (bf16*)xcalloc((size_t)n, sizeof *raw);
    float* host = (float*)xcalloc((size_t)n, sizeof *host);
    device_download(raw, device, n * (int64_t)sizeof *raw);
    for (int64_t i = 0; i < n; i++) host[i] = __bfloat162float(raw[i]);
    free(raw);
    return host;
}
