/*
Copies and GEMMs of tiles in shared memory whose layout serves mma.sync, wgmma and TMA: panels of 64 columns
as in mma_sm90.cuh, which for one panel is also the layout of mma_sm80.cuh's tiles. A warp's accumulators [16,
8 NS] and its A fragments have the same layout for mma.sync and wgmma. With wgmma four warps, 64 rows, compute
together: they call the same functions with the same arguments except the rows. Code for sm_90a copies by
TMA, other code by cp.async.

Callers: Mamba-2's kernels (ssd_*.cuh) and the chains of delta_rule_states.cuh.
*/
#pragma once

#include "../../cuda/mma_sm90.cuh"
#include "scan.cuh"

// ----------------------------------------------------------------------------
// copies of tiles: by TMA with wgmma, else by cp.async

// A tensor [B,T,heads,columns] of bf16, of which boxes of `rows` tokens of one head are copied. columns: 64,
// one panel, or 16, in which chunk c of row r is at c ^ (r >> 2 & 1). The two halves of rows of 128 columns
// are two heads of 64.
struct PanelTensor {
    CUtensorMap map; // empty where the GPU has no TMA
    const bf16* x;
    int64_t row_stride; // elements from token to token
    int T;
};
// Dies where the driver cannot make the tensor map. x and its rows are aligned to 16 bytes.
static inline PanelTensor panel_tensor(const bf16* x, int64_t B, int64_t T, int64_t heads, int64_t row_stride,
                                       int rows, int columns = SM90_PANEL) {
    PanelTensor p = {{}, x, row_stride, (int)T};
    assert(T <= INT32_MAX);
    static const bool has_tma = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
    if (!has_tma) return p;
    cuuint64_t row = (cuuint64_t)row_stride * sizeof(bf16);
    cuuint64_t lengths[4] = {(cuuint64_t)columns, (cuuint64_t)heads, (cuuint64_t)T, (cuuint64_t)B};
    cuuint64_t strides[3] = {(cuuint64_t)columns * sizeof(bf16), row, row * (cuuint64_t)T};
    p.map = sm90_encode(x, lengths, strides, rows, columns);
    return p;
}

// Starts copying ROWS tokens of a head, from token t on, to a panel; zeros past the end. With wgmma one
// thread calls it, and the bytes are counted on the barrier; else all THREADS do.
template <int ROWS, int THREADS>
__device__ static inline void panel_copy(bf16* to, const PanelTensor& p, int64_t b, int head, int t,
                                         uint64_t* barrier) {
#if SM90_CODE
    sm90_load_tile<64, ROWS>(to, &p.map, head, t, (int)b, barrier);
#else
    sm80_copy_tile<64, ROWS, THREADS>(to, p.x + b * p.T * p.row_stride + head * 64, t, p.T, p.row_stride);
#endif
}
// Likewise contiguous numbers, as many as are a multiple of 4
template <int N>
__device__ static inline void panel_copy_numbers(float* to, const float* from, uint64_t* barrier) {
#if SM90_CODE
    sm90_load_bytes(to, from, N * sizeof(float), barrier);
#else
    if (threadIdx.x < N / 4) cp_async16(smem_address(to + threadIdx.x * 4), from + threadIdx.x * 4, true);
#endif
}
// Does the thread start copies? By TMA one does, by cp.async all do.
__device__ static inline bool panel_copier(int thread) { return !SM90_CODE || (int)threadIdx.x == thread; }
// Before copies by TMA: the bytes that complete the barrier's phase
__device__ static inline void panel_expect(uint64_t* barrier, size_t bytes) {
#if SM90_CODE
    sm90_arrive_expect_tx(barrier, (uint32_t)bytes);
#endif
}
// Ends a group of copies. Called by all threads, also for an empty group.
__device__ static inline void panel_commit() {
#if !SM90_CODE
    cp_async_commit_group();
#endif
}
// Waits for the barrier's phase, or until at most N groups are in flight. With cp.async the others' copies
// are there after __syncthreads.
template <int N> __device__ static inline void panel_wait(uint64_t* barrier, int phase) {
#if SM90_CODE
    sm90_wait(barrier, (uint32_t)phase);
#else
    cp_async_wait_group<N>();
#endif
}
// Initialises the barriers, for `warps` arrivals a phase, or with 0 that of one thread; then synchronises.
template <int N> __device__ static inline void panel_init(uint64_t (&barriers)[N], int warps = 0) {
#if SM90_CODE
    if (threadIdx.x == 0) {
        for (int i = 0; i < N; i++) sm90_barrier_init(&barriers[i], warps == 0, warps);
        sm90_barrier_init_fence();
    }
    __syncthreads();
#endif
}

// ----------------------------------------------------------------------------
// GEMMs

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

// Starts acc (+)= A B over K numbers of the reduction, both from shared memory. B has 8 NS columns, from
// b.first on. Until panels_finish wgmma may be in flight.
template <int K, bool ACCUMULATE, int NS, class A, class B>
__device__ static inline void panels_start(float (&acc)[1][NS][4], const A& a, const B& b) {
#if SM90_CODE
    float(&d)[NS * 4] = (float(&)[NS * 4]) acc;
    if (ACCUMULATE) sm90_fence_operand(d);
    sm90_wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; k += 16)
        sm90_wgmma<A::ACROSS, B::ACROSS>(d, a.desc(k), b.desc(k), ACCUMULATE || k > 0);
    sm90_commit_group();
#else
    if (!ACCUMULATE) scan_clear(acc);
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        uint32_t f[4];
        a.load_a(f, k);
        panels_mma(acc, f, b, k);
    }
#endif
}
// Starts acc += A B over 16 KS numbers of the reduction, those of B from k on; A's fragments in registers
template <int KS, int NS, class B>
__device__ static inline void panels_start(float (&acc)[1][NS][4], uint32_t (&a)[KS][4], const B& b, int k) {
#if SM90_CODE
    float(&d)[NS * 4] = (float(&)[NS * 4]) acc;
    sm90_fence_operand(d);
    sm90_fence_operand(a);
    sm90_wgmma_fence();
#pragma unroll
    for (int i = 0; i < KS; i++) sm90_wgmma<B::ACROSS>(d, a[i], b.desc(k + i * 16), true);
    sm90_commit_group();
#else
#pragma unroll
    for (int i = 0; i < KS; i++) panels_mma(acc, a[i], b, k + i * 16);
#endif
}
// Waits until at most PENDING of the GEMMs started last are in flight. acc, and A's fragments in registers,
// belong to a GEMM that is complete then.
template <int PENDING, int NS> __device__ static inline void panels_finish(float (&acc)[1][NS][4]) {
#if SM90_CODE
    sm90_wait_group<PENDING>();
    sm90_fence_operand((float(&)[NS * 4]) acc);
#endif
}
template <int PENDING, int NS, int KS>
__device__ static inline void panels_finish(float (&acc)[1][NS][4], uint32_t (&a)[KS][4]) {
    panels_finish<PENDING>(acc);
#if SM90_CODE
    sm90_fence_operand(a);
#endif
}

// All of it. meanwhile() is called while wgmma computes.
template <int K, bool ACCUMULATE, int NS, class A, class B, class F>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], const A& a, const B& b, F meanwhile) {
    panels_start<K, ACCUMULATE>(acc, a, b);
    meanwhile();
    panels_finish<0>(acc);
}
template <int K, bool ACCUMULATE, int NS, class A, class B>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], const A& a, const B& b) {
    panels_matmul<K, ACCUMULATE>(acc, a, b, [] {});
}
template <int KS, int NS, class B, class F>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], uint32_t (&a)[KS][4], const B& b, int k,
                                            F meanwhile) {
    panels_start(acc, a, b, k);
    meanwhile();
    panels_finish<0>(acc, a);
}
template <int KS, int NS, class B>
__device__ static inline void panels_matmul(float (&acc)[1][NS][4], uint32_t (&a)[KS][4], const B& b, int k) {
    panels_matmul(acc, a, b, k, [] {});
}
