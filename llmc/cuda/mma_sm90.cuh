/*
Hopper's instructions as small functions: mbarriers, the tensor memory accelerator (TMA), matrix
multiplication by a warpgroup (wgmma). wgmma and setmaxnreg exist on sm_90a only: call them under SM90_CODE.
mbarriers and bulk copies exist on later GPUs too: cluster.cuh calls them there.

A tile in shared memory consists of panels: 64 columns of bf16, row-major, 128 bytes a row, with the 16-byte
chunks permuted within every 8 rows (the 128-byte swizzle of TMA and wgmma). A tile of 128 columns is two
panels, ROWS * 128 bytes apart. Tiles are aligned to 1024 bytes.

Callers: attention's kernels for Hopper (attention/sm90_*.cuh), baselines/shared/panels.cuh, cluster.cuh.
*/
#pragma once

// Set while compiling for sm_90a; in code for any other architecture the kernels' bodies are empty. Plain
// sm_90 is an error: it lacks the instructions, but a GPU of that architecture would choose these kernels and
// run empty bodies.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SM90_CODE 1
#else
#define SM90_CODE 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !SM90_CODE
#error "the Hopper kernels need sm_90a: compile for compute_90a, not compute_90 (make maps ARCHS=90 to 90a)"
#endif

#include <cudaTypedefs.h>
#include "mma_sm80.cuh"
#include "../model/shapes.h"

#define SM90_PANEL 64 // columns

// True in one lane of the warp, always the same one: cheaper than comparing the lane's number.
__device__ static inline bool sm90_elected() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// ----------------------------------------------------------------------------
// mbarriers, in shared memory. A phase completes when `threads` and `warps` have arrived and the expected
// bytes have been copied. Phases are counted modulo 2: wait(0) returns once the first one has completed,
// wait(1) returns at once on a new barrier.

// One lane arrives for its warp. compute-sanitizer's racecheck takes that as an arrival of this lane only:
// for it, define SM90_EVERY_LANE_ARRIVES, so that all lanes arrive.
#ifdef SM90_EVERY_LANE_ARRIVES
#define SM90_ARRIVALS_PER_WARP 32
#else
#define SM90_ARRIVALS_PER_WARP 1
#endif
__device__ static inline void sm90_barrier_init(uint64_t* barrier, int threads, int warps) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
                 "r"(threads + warps * SM90_ARRIVALS_PER_WARP)
                 : "memory");
}
// Called by the initializing thread after its last init, before __syncthreads.
__device__ static inline void sm90_barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ static inline void sm90_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
// Called by all lanes, whose shared memory accesses before it are then complete.
__device__ static inline void sm90_arrive_warp(uint64_t* barrier) {
    __syncwarp();
    if (SM90_ARRIVALS_PER_WARP > 1 || sm90_elected()) sm90_arrive(barrier);
}
__device__ static inline void sm90_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ static inline void sm90_wait(uint64_t* barrier, uint32_t phase) {
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(smem_address(barrier)), "r"(phase)
                     : "memory");
}

// Position in a ring of stages. A producer waits for phase ^ 1 of the stage's `empty` barrier, a consumer for
// phase of its `full` barrier.
template <int STAGES> struct Sm90Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// The 16 named barriers (__syncthreads uses 0). `threads` counts the threads that sync and those that only
// arrive.
__device__ static inline void sm90_named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ static inline void sm90_named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ----------------------------------------------------------------------------
// setmaxnreg: producers release registers, consumers acquire them

template <int REGISTERS> __device__ static inline void sm90_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ static inline void sm90_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ----------------------------------------------------------------------------
// TMA copies between global memory and tiles, issued by one thread

// TMA and wgmma access shared memory through the async proxy. Threads that wrote it with plain stores call
// this fence before the barrier that orders the stores before the TMA copy or the wgmma.
__device__ static inline void sm90_fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Loads a tile of DH columns and ROWS rows, as many as a box of the map has, from row `t` on, zeros past the
// end, and counts its bytes on the barrier.
template <int DH, int ROWS>
__device__ static inline void sm90_load_tile(bf16* to, const CUtensorMap* map, int head, int t, int b,
                                             uint64_t* barrier) {
#pragma unroll
    for (int column = 0; column < DH; column += SM90_PANEL)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
                     "{%2, %3, %4, %5}], [%6];" ::"r"(smem_address(to + column * ROWS)),
                     "l"(map), "r"(column), "r"(head), "r"(t), "r"(b), "r"(smem_address(barrier))
                     : "memory");
}
// Starts reading contiguous bytes, a multiple of 16, into L2; nothing waits for it.
__device__ static inline void sm90_prefetch(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Loads contiguous bytes, a multiple of 16, and counts them on the barrier.
__device__ static inline void sm90_load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_address(to)),
        "l"(from), "r"(bytes), "r"(smem_address(barrier))
        : "memory");
}
// Stores a tile without the rows past the end; then sm90_commit_stores and sm90_wait_stores_read.
template <int DH, int ROWS>
__device__ static inline void sm90_store_tile(const CUtensorMap* map, int head, int t, int b,
                                              const bf16* from) {
#pragma unroll
    for (int column = 0; column < DH; column += SM90_PANEL)
        asm volatile(
            "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
            "r"(column), "r"(head), "r"(t), "r"(b), "r"(smem_address(from + column * ROWS))
            : "memory");
}

// to[0..3] += a, b, c, d, atomically and in no fixed order.
__device__ static inline void sm90_reduce_add4(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
}

// Acquire and release between thread blocks: a thread that loads the value sees all writes before its store.
__device__ static inline int sm90_load_acquire(const int* from) {
    int x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ static inline void sm90_store_release(int* to, int x) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Stores are committed in groups, like wgmma: waits until at most PENDING groups still read shared memory.
__device__ static inline void sm90_commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int PENDING> __device__ static inline void sm90_wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ----------------------------------------------------------------------------
// registers to tiles

// Offset in bytes of a 16-byte chunk (8 columns) of a row
template <int ROWS> __device__ static inline uint32_t sm90_chunk_offset(int row, int chunk) {
    return (uint32_t)(chunk / 8 * ROWS * 128 + row * 128 + ((chunk ^ row) & 7) * 16);
}
// Four 8x8 matrices in the fragment layout of wgmma and mma; each lane passes the address of one row, 16
// bytes.
__device__ static inline void sm90_stmatrix(uint32_t to, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ----------------------------------------------------------------------------
// wgmma: d [64, N] (+)= a [64, 16] b [16, N] by a warpgroup, asynchronously

// Orders register accesses before the next wgmma, where it reads or writes registers that other instructions
// touched.
__device__ static inline void sm90_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ static inline void sm90_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING committed groups are still in flight.
template <int PENDING> __device__ static inline void sm90_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of d across this point: it does not know that a wgmma in flight uses d.
template <int R> __device__ static inline void sm90_fence_operand(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int K> __device__ static inline void sm90_fence_operand(uint32_t (&a)[K][4]) {
#pragma unroll
    for (int i = 0; i < K * 4; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Descriptor of a tile of ROWS rows as an operand. It is the same for both layouts: the reduction along the
// columns (K-major) or along the rows (MN-major, "transposed"). Adding sm90_columns or sm90_rows moves it
// within the tile.
template <int ROWS> __device__ static inline uint64_t sm90_make_smem_desc(const void* tile) {
    uint64_t address = (smem_address(tile) & 0x3FFFF) >> 4, panel = ROWS * 128 >> 4, eight_rows = 1024 >> 4;
    return address | panel << 16 | eight_rows << 32 | (uint64_t)1 << 62;
}
// Descriptor of 16 rows of a transposed operand whose second panel is at `second`, anywhere after the first
__device__ static inline uint64_t sm90_make_smem_desc_pair(const void* rows, const void* second) {
    uint64_t address = (smem_address(rows) & 0x3FFFF) >> 4, panel = (smem_address(second) & 0x3FFFF) >> 4;
    return address | (panel - address) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
template <int ROWS> __host__ __device__ constexpr uint64_t sm90_columns(int columns) {
    return (uint64_t)((columns / 64 * ROWS * 128 + columns % 64 * 2) >> 4);
}
__host__ __device__ constexpr uint64_t sm90_rows(int rows) { return (uint64_t)(rows * 128 >> 4); } // 8 n rows

// Layout of d: lane l of warp w holds row 16 w + l / 4, columns 8 n + 2 (l % 4) and the next, in d[4 n] and
// d[4 n + 1], and the same columns of row + 8 in d[4 n + 2] and d[4 n + 3]. Packed to pairs of bf16 this is
// the layout of operand a.
#define SM90_D4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SM90_D16(d, i) SM90_D4(d, i), SM90_D4(d, i + 4), SM90_D4(d, i + 8), SM90_D4(d, i + 12)
#define SM90_D32(d, i) SM90_D16(d, i), SM90_D16(d, i + 16)
#define SM90_D36(d, i) SM90_D32(d, i), SM90_D4(d, i + 32)
#define SM90_D64(d, i) SM90_D32(d, i), SM90_D32(d, i + 32)

#define SM90_LIST_32                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"     \
    "%27,%28,%29,%30,%31"
#define SM90_LIST_36 SM90_LIST_32 ",%32,%33,%34,%35"
#define SM90_LIST_64                                                                                         \
    SM90_LIST_36 ",%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"     \
                 "%57,%58,%59,%60,%61,%62,%63"

// sm90_wgmma(d, a, b, accumulate): N = 2 R by the size of d; without accumulate d need not be initialized. a
// is a descriptor or four registers. TRANSPOSED: the reduction runs along the tile's rows. In the macro, R1
// is R + 1 and so on: the numbers of the asm operands that follow d's R registers.
#define SM90_DEFINE_WGMMA(N, R, R1, R2, R3, R4, R5, R6)                                                      \
    template <bool A_TRANSPOSED, bool B_TRANSPOSED>                                                          \
    __device__ static inline void sm90_wgmma(float(&d)[R], uint64_t a, uint64_t b, bool accumulate) {        \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R2 ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SM90_LIST_##R              \
                     "}, %" #R ", %" #R1 ", p, 1, 1, %" #R3 ", %" #R4 ";\n}"                                 \
                     : SM90_D##R(d, 0)                                                                       \
                     : "l"(a), "l"(b), "r"((int)accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED)            \
                     : "memory");                                                                            \
    }                                                                                                        \
    template <bool B_TRANSPOSED>                                                                             \
    __device__ static inline void sm90_wgmma(float(&d)[R], const uint32_t(&a)[4], uint64_t b,                \
                                             bool accumulate) {                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R5 ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SM90_LIST_##R              \
                     "}, {%" #R ",%" #R1 ",%" #R2 ",%" #R3 "}, %" #R4 ", p, 1, 1, %" #R6 ";\n}"              \
                     : SM90_D##R(d, 0)                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate),             \
                       "n"(B_TRANSPOSED)                                                                     \
                     : "memory");                                                                            \
    }
SM90_DEFINE_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
SM90_DEFINE_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
SM90_DEFINE_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
#undef SM90_DEFINE_WGMMA
#undef SM90_LIST_64
#undef SM90_LIST_36
#undef SM90_LIST_32
#undef SM90_D64
#undef SM90_D36
#undef SM90_D32
#undef SM90_D16
#undef SM90_D4

// d [64, N] (+)= A B^T over K columns of tiles of A_ROWS and B_ROWS rows; a is the descriptor of A's 64 rows.
template <int K, int A_ROWS, int B_ROWS, int R>
__device__ static inline void sm90_matmul_abt(float (&d)[R], uint64_t a, uint64_t b,
                                              bool accumulate = false) {
#pragma unroll
    for (int k = 0; k < K; k += 16)
        sm90_wgmma<false, false>(d, a + sm90_columns<A_ROWS>(k), b + sm90_columns<B_ROWS>(k),
                                 accumulate || k > 0);
}
// d [64, N] (+)= A B over 16 K rows of B, with A [64, 16 K] in registers
template <int K, int R>
__device__ static inline void sm90_matmul_ab(float (&d)[R], const uint32_t (&a)[K][4], uint64_t b,
                                             bool accumulate) {
#pragma unroll
    for (int k = 0; k < K; k++) sm90_wgmma<true>(d, a[k], b + sm90_rows(16 * k), accumulate || k > 0);
}

// ----------------------------------------------------------------------------
// tensor maps, on the host

// Tensor map of x [lengths 3, 2, 1, 0], bf16, aligned to 16 bytes; strides: bytes from element to
// element of dimensions 1, 2 and 3. A box has `columns` of dimension 0, SM90_PANEL or 16, and `rows` of
// dimension 2. Dies where the driver cannot make the map.
static inline CUtensorMap sm90_encode(const bf16* x, const cuuint64_t lengths[4], const cuuint64_t strides[3],
                                      int rows, int columns) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encode =
        (PFN_cuTensorMapEncodeTiled_v12000)driver_function("cuTensorMapEncodeTiled", 12000);
    CUtensorMap map;
    cuuint32_t box[4] = {(cuuint32_t)columns, 1, (cuuint32_t)rows, 1}, element_strides[4] = {1, 1, 1, 1};
    CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)x, lengths, strides, box,
                             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             columns == 16 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        die("cuTensorMapEncodeTiled failed with error %d for a tensor [%lld, %lld, %lld, %lld] at %p",
            (int)result, (long long)lengths[3], (long long)lengths[2], (long long)lengths[1],
            (long long)lengths[0], (const void*)x);
    return map;
}

// Tensor map of x [B, T, NH, dh]. A box is one panel of `rows` tokens of one head.
static inline CUtensorMap sm90_tensor_map(const bf16* x, const HeadShape* s, int rows) {
    cuuint64_t lengths[4] = {(cuuint64_t)s->dh, (cuuint64_t)s->NH, (cuuint64_t)s->T, (cuuint64_t)s->B},
               strides[3];
    for (int i = 0; i < 3; i++) strides[i] = (i ? strides[i - 1] : sizeof(bf16)) * lengths[i];
    return sm90_encode(x, lengths, strides, rows, SM90_PANEL);
}
