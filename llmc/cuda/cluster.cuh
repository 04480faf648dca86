/*
Primitives of decode.cuh, for Hopper and later: barriers and stores between the thread blocks of a cluster,
and bulk copies (cp.async.bulk) from global memory to a warp's shared memory. In code for GPUs before Hopper a
cluster is one block, and a copy has arrived when its call returns.
*/
#pragma once

#include "mma_sm90.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER_CODE 1
#else
#define CLUSTER_CODE 0
#endif

// The cluster's barrier, in two halves, by all its threads: what any thread wrote before its arrive, all
// threads read after their wait. `.aligned` needs a converged warp, and the code before may have diverged.
__device__ static inline void cluster_arrive() {
#if CLUSTER_CODE
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ static inline void cluster_wait() {
#if CLUSTER_CODE
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Stores x to the shared memory of the cluster's first block. `to` is the address of the same variable in
// this block.
__device__ static inline void cluster_store(float* to, float x) {
#if CLUSTER_CODE
    uint32_t first;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(first) : "r"(smem_address(to)));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(first), "f"(x) : "memory");
#else
    *to = x;
#endif
}

// By one lane: initialises the mbarriers of n stages.
__device__ static inline void bulk_init(uint64_t* barriers, int n) {
#if CLUSTER_CODE
    for (int i = 0; i < n; i++) sm90_barrier_init(barriers + i, 1, 0);
    sm90_barrier_init_fence();
#endif
}

// By one lane: arrives at the stage's barrier, and tells it the bytes of all copies that follow. Their
// addresses and sizes are multiples of 16.
__device__ static inline void bulk_arrive_expect(uint64_t* barrier, int bytes) {
#if CLUSTER_CODE
    sm90_arrive_expect_tx(barrier, (uint32_t)bytes);
#endif
}
__device__ static inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
#if CLUSTER_CODE
    sm90_load_bytes(to, from, (uint32_t)bytes, barrier);
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

// Orders the lane's own stores to shared memory before later bulk copies to the same addresses.
__device__ static inline void bulk_fence() {
#if CLUSTER_CODE
    sm90_fence_async_proxy();
#endif
}

// By all lanes of the warp: waits until all copies of the barrier's phase, alternately 0 and 1, have arrived.
__device__ static inline void bulk_wait(uint64_t* barrier, uint32_t phase) {
#if CLUSTER_CODE
    sm90_wait(barrier, phase);
#else
    __syncwarp();
#endif
}
