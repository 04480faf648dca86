/*
What decode.cuh uses of Hopper: clusters of thread blocks, and bulk copies into a warp's shared memory. Code
for GPUs before Hopper has clusters of one block and copies at once.
*/
#pragma once

#include "mma_sm90.cuh"

// A barrier of all threads of the cluster, in two halves: what was written before one's arrival is read after
// another's wait. `.aligned` needs a converged warp, and code ahead may have diverged.
__device__ static inline void cluster_arrive() {
#if SM90_CODE
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ static inline void cluster_wait() {
#if SM90_CODE
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Stores to a variable in the shared memory of the cluster's first block, `to` being that of this block.
__device__ static inline void cluster_store(float* to, float x) {
#if SM90_CODE
    uint32_t first;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(first) : "r"(smem_address(to)));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(first), "f"(x) : "memory");
#else
    *to = x;
#endif
}

// The barriers of a warp's copies, by one of its lanes
__device__ static inline void bulk_init(uint64_t* barriers, int n) {
#if SM90_CODE
    for (int i = 0; i < n; i++) sm90_barrier_init(barriers + i, 1, 0);
    sm90_barrier_init_fence();
#endif
}

// By one lane: bulk_expect says how many bytes its copies that follow have together, `bytes` each. Addresses
// and bytes are multiples of 16.
__device__ static inline void bulk_expect(uint64_t* barrier, int bytes) {
#if SM90_CODE
    sm90_arrive_expect_tx(barrier, (uint32_t)bytes);
#endif
}
__device__ static inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
#if SM90_CODE
    sm90_load_bytes(to, from, (uint32_t)bytes, barrier);
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

// Orders the lane's own stores to shared memory before copies to the same place.
__device__ static inline void bulk_fence() {
#if SM90_CODE
    sm90_fence_async_proxy();
#endif
}

// By all lanes of the warp: the copies of the barrier's phase, 0 and 1 in turn, have arrived.
__device__ static inline void bulk_wait(uint64_t* barrier, uint32_t phase) {
#if SM90_CODE
    sm90_wait(barrier, phase);
#else
    __syncwarp();
#endif
}
