/*
What exchange.cuh calls of NCCL, through the host's shared memory, so that the ranks of a test share one GPU:
NCCL itself refuses two ranks on a GPU. The build with -DRANKS_SHARE_GPU (build/gpu/train_fox_one_gpu)
includes it in NCCL's place; copies between ranks (peers.cuh) and everything else are as with several GPUs.

A collective waits for its stream on the host, writes its numbers to the rank's slot, and waits for the other
ranks. Sums are in the order of ranks. A rank that waits for one that is gone is ended by the watch
(llmc/ranks/watch.h).
*/
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NCCL_MAJOR 0
#define NCCL_MINOR 0
#define NCCL_PATCH 0
#define NCCL_CONFIG_INITIALIZER                                                                              \
    { 0 }

typedef enum { ncclSuccess, ncclSystemError, ncclInProgress } ncclResult_t;
typedef enum { ncclFloat, ncclDouble, ncclUint64, ncclUint32, ncclBfloat16 } ncclDataType_t;
typedef enum { ncclSum, ncclMax } ncclRedOp_t; // ncclMax of ncclUint32, ncclSum of the others
typedef struct {
    char name[64]; // of the shared memory
} ncclUniqueId;
typedef struct {
    int unused;
} ncclConfig_t;

enum { FAKE_NCCL_SLOT = 4 << 20, FAKE_NCCL_HEADER = 4096 }; // bytes

typedef struct {
    int rank, size;
    volatile int* arrived; // how often all ranks together have come to wait
    int waits;
    char *slots, *host; // [size][SLOT], shared; [SLOT]
} * ncclComm_t;

static inline const char* ncclGetErrorString(ncclResult_t) { return "an error of CUDA or of shared memory"; }
static inline const char* ncclGetLastError(ncclComm_t) { return ""; }
static inline ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
static inline ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }
static inline ncclResult_t ncclMemAlloc(void** p, size_t bytes) {
    return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
static inline ncclResult_t ncclMemFree(void* p) {
    return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
static inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
    return *state = ncclSuccess;
}

static inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    snprintf(id->name, sizeof id->name, "/train_fox_one_gpu_%d", (int)getpid());
    return ncclSuccess;
}

// Returns when all ranks have come as often.
static inline void fake_nccl_wait(ncclComm_t c) {
    const int expected = ++c->waits * c->size;
    __sync_fetch_and_add(c->arrived, 1);
    while (*c->arrived < expected) sched_yield();
    __sync_synchronize();
}

static inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                                  ncclConfig_t*) {
    const size_t bytes = FAKE_NCCL_HEADER + (size_t)size * FAKE_NCCL_SLOT;
    const int fd = shm_open(id.name, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) return ncclSystemError;
    char* shared = (char*)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared == (char*)MAP_FAILED) return ncclSystemError;
    ncclComm_t c = (ncclComm_t)calloc(1, sizeof *c);
    c->rank = rank;
    c->size = size;
    c->arrived = (volatile int*)shared;
    c->slots = shared + FAKE_NCCL_HEADER;
    c->host = (char*)malloc(FAKE_NCCL_SLOT);
    fake_nccl_wait(c);
    if (rank == 0) shm_unlink(id.name); // all have it
    *comm = c;
    return ncclSuccess;
}

static inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    munmap((char*)(uintptr_t)c->arrived, FAKE_NCCL_HEADER + (size_t)c->size * FAKE_NCCL_SLOT);
    free(c->host);
    free(c);
    return ncclSuccess;
}

static inline size_t fake_nccl_bytes(ncclDataType_t type) {
    return type == ncclBfloat16 ? 2 : type == ncclFloat || type == ncclUint32 ? 4 : 8;
}

template <class T> static inline void fake_nccl_sum(ncclComm_t c, size_t bytes) {
    T* sums = (T*)c->host;
    for (size_t i = 0; i < bytes / sizeof(T); i++) {
        sums[i] = 0;
        for (int r = 0; r < c->size; r++) sums[i] += ((const T*)(c->slots + (size_t)r * FAKE_NCCL_SLOT))[i];
    }
}

static inline void fake_nccl_max(ncclComm_t c, size_t bytes) {
    uint32_t* most = (uint32_t*)c->host;
    for (size_t i = 0; i < bytes / sizeof *most; i++) {
        most[i] = 0;
        for (int r = 0; r < c->size; r++) {
            const uint32_t x = ((const uint32_t*)(c->slots + (size_t)r * FAKE_NCCL_SLOT))[i];
            if (x > most[i]) most[i] = x;
        }
    }
}

// Exchanges `bytes` in pieces that fit into a slot: all ranks, or rank `only`, get the sum or maximum; with
// type bf16 they get each rank's own bytes, `bytes` apart.
static inline ncclResult_t fake_nccl_collective(ncclComm_t c, const char* in, char* out, size_t bytes,
                                                ncclDataType_t type, int only, cudaStream_t stream) {
    bool ok = cudaStreamSynchronize(stream) == cudaSuccess;
    for (size_t at = 0; at < bytes && ok; at += FAKE_NCCL_SLOT) {
        const size_t n = bytes - at < FAKE_NCCL_SLOT ? bytes - at : (size_t)FAKE_NCCL_SLOT;
        char* mine = c->slots + (size_t)c->rank * FAKE_NCCL_SLOT;
        ok = cudaMemcpyAsync(mine, in + at, n, cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
             cudaStreamSynchronize(stream) == cudaSuccess;
        fake_nccl_wait(c);
        for (int r = 0; r < c->size && type == ncclBfloat16; r++)
            ok = ok && cudaMemcpyAsync(out + (size_t)r * bytes + at, c->slots + (size_t)r * FAKE_NCCL_SLOT, n,
                                       cudaMemcpyHostToDevice, stream) == cudaSuccess;
        if (type == ncclFloat) fake_nccl_sum<float>(c, n);
        if (type == ncclDouble) fake_nccl_sum<double>(c, n);
        if (type == ncclUint64) fake_nccl_sum<uint64_t>(c, n);
        if (type == ncclUint32) fake_nccl_max(c, n);
        if (type != ncclBfloat16 && (only < 0 || only == c->rank))
            ok = ok && cudaMemcpyAsync(out + at, c->host, n, cudaMemcpyHostToDevice, stream) == cudaSuccess;
        ok = ok && cudaStreamSynchronize(stream) == cudaSuccess;
        fake_nccl_wait(c); // all have read the slots
    }
    return ok ? ncclSuccess : ncclSystemError;
}

static inline ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                                         ncclRedOp_t, ncclComm_t c, cudaStream_t stream) {
    return fake_nccl_collective(c, (const char*)in, (char*)out, count * fake_nccl_bytes(type), type, -1,
                                stream);
}

static inline ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                                         ncclComm_t c, cudaStream_t stream) {
    return fake_nccl_collective(c, (const char*)in, (char*)out, count * fake_nccl_bytes(type), type, -1,
                                stream);
}

static inline ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                                             ncclRedOp_t, ncclComm_t c, cudaStream_t stream) {
    const size_t bytes = count * fake_nccl_bytes(type);
    ncclResult_t result = ncclSuccess;
    for (int r = 0; r < c->size && result == ncclSuccess;
         r++) // `in` may hold `out`: that part is read in its turn
        result =
            fake_nccl_collective(c, (const char*)in + (size_t)r * bytes, (char*)out, bytes, type, r, stream);
    return result;
}
