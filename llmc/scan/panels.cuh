/*
GEMMs of tiles in shared memory whose layout serves both mma.sync and wgmma: panels of 64 columns as in
mma_sm90.cuh, which for one panel is also the layout of mma_sm80.cuh's tiles. A warp's accumulators [16, 8 NS]
and its A fragments are laid out alike for both. With wgmma four warps, 64 rows, compute together: they call
the same functions with the same arguments, but for the rows.

Callers: the decay kernels.
*/
#pragma once

#include "../cuda/mma_sm90.cuh"
#include "shape.cuh"

// Starts copying ROWS rows of 128 columns as two panels, as sm80_copy_tile.
template <int ROWS, int THREADS>
__device__ static inline void copy_panels(bf16* tile, const bf16* x, int first, int rows,
                                          int64_t row_stride) {
    sm80_copy_tile<64, ROWS, THREADS>(tile, x, first, rows, row_stride);
    sm80_copy_tile<64, ROWS, THREADS>(tile + ROWS * 64, x + 64, first, rows, row_stride);
}
// Before the barrier that makes the thread's writes of panels visible: wgmma reads through another proxy.
__device__ static inline void fence_panels() {
#if SM90_CODE
    sm90_fence_async_proxy();
#endif
}
// Waits until at most N groups of the thread's copies are in flight.
template <int N> __device__ static inline void wait_panels() {
    cp_async_wait_group<N>();
    fence_panels();
}

// An operand of ROWS rows. The reduction runs along its columns, or with ACROSS along its rows. A: `first` is
// the warp's first row (ACROSS: column). load: as TileA and TileB.
template <int ROWS_, bool ACROSS_> struct Panels {
    static constexpr int ROWS = ROWS_;
    static constexpr bool ACROSS = ACROSS_;
    const bf16* tile;
    int first;
    __device__ explicit Panels(const bf16* t, int f = 0) : tile(t), first(f) {}
    __device__ void load_a(uint32_t (&f)[4], int k) const {
        int lane = (int)threadIdx.x % 32, row = ACROSS ? k : first, column = ACROSS ? first : k;
        const bf16* panel = tile + column / 64 * ROWS * 64;
        if (ACROSS)
            ldmatrix_trans(f, sm80_advance<64>(sm80_lane_b<64>(panel, lane), row, column % 64));
        else
            ldmatrix(f, sm80_advance<64>(sm80_lane_a<64>(panel, lane), row, column % 64));
    }
    __device__ void load(uint32_t (&f)[4], int n, int k) const {
        int lane = (int)threadIdx.x % 32, row = ACROSS ? k : n, column = ACROSS ? n : k;
        const bf16* panel = tile + column / 64 * ROWS * 64;
        if (ACROSS)
            ldmatrix_trans(f, sm80_advance<64>(sm80_lane_a<64>(panel, lane), row, column % 64));
        else
            ldmatrix(f, sm80_advance<64>(sm80_lane_b<64>(panel, lane), row, column % 64));
    }
#if SM90_CODE
    __device__ uint64_t desc(int k) const { // of the warpgroup's 64 rows of A, or of all of B
        uint64_t d = sm90_make_smem_desc<ROWS>(tile);
        int at = first / 64 * 64;
        return ACROSS ? d + sm90_rows(k) + sm90_columns<ROWS>(at) : d + sm90_columns<ROWS>(k) + sm90_rows(at);
    }
#endif
};

// acc += A B over 16 numbers of the reduction, those of B from k on, by mma.sync
template <int NS, class B>
__device__ static inline void panels_mma(float (&acc)[1][NS][4], const uint32_t (&a)[4], const B& b, int k) {
#pragma unroll
    for (int n = 0; n < NS; n += 2) {
        uint32_t f[4];
        b.load(f, b.first + n * 8, k);
        sm80_mma(acc[0][n], a, f[0], f[1], acc[0][n]);
        sm80_mma(acc[0][n + 1], a, f[2], f[3], acc[0][n + 1]);
    }
}

// acc (+)= A B over K numbers of the reduction, both from shared memory. B has 8 NS columns, from b.first on.
// meanwhile() is called while wgmma computes: for copies, whose instructions would hold up ldmatrix.
template <int K, bool ACCUMULATE, int NS, class A, class B, class F>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], const A& a, const B& b, F meanwhile) {
#if SM90_CODE
    float(&d)[NS * 4] = (float(&)[NS * 4]) acc;
    if (ACCUMULATE) sm90_fence_operand(d);
    sm90_wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; k += 16)
        sm90_wgmma<A::ACROSS, B::ACROSS>(d, a.desc(k), b.desc(k), ACCUMULATE || k > 0);
    sm90_commit_group();
    meanwhile();
    sm90_wait_group<0>();
    sm90_fence_operand(d);
#else
    if (!ACCUMULATE) scan_clear(acc);
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        uint32_t f[4];
        a.load_a(f, k);
        panels_mma(acc, f, b, k);
    }
    meanwhile();
#endif
}
template <int K, bool ACCUMULATE, int NS, class A, class B>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], const A& a, const B& b) {
    panels_matmul<K, ACCUMULATE>(acc, a, b, [] {});
}

// acc += A B over 16 KS numbers of the reduction, those of B from k on; A's fragments in registers
template <int KS, int NS, class B, class F>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], uint32_t (&a)[KS][4], const B& b, int k,
                                            F meanwhile) {
#if SM90_CODE
    float(&d)[NS * 4] = (float(&)[NS * 4]) acc;
    sm90_fence_operand(d);
    sm90_fence_operand(a);
    sm90_wgmma_fence();
#pragma unroll
    for (int i = 0; i < KS; i++) sm90_wgmma<B::ACROSS>(d, a[i], b.desc(k + i * 16), true);
    sm90_commit_group();
    meanwhile();
    sm90_wait_group<0>();
    sm90_fence_operand(d);
    sm90_fence_operand(a);
#else
#pragma unroll
    for (int i = 0; i < KS; i++) panels_mma(acc, a[i], b, k + i * 16);
    meanwhile();
#endif
}
template <int KS, int NS, class B>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], uint32_t (&a)[KS][4], const B& b, int k) {
    panels_matmul(acc, a, b, k, [] {});
}
