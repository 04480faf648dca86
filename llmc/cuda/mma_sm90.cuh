/*
Hopper's machinery in small named functions: barriers in shared memory, the tensor copy engine (TMA), products
of a warpgroup (wgmma). The instructions exist on sm_90a alone: call them under SM90_CODE only.

Tiles in shared memory are made of panels: 64 columns of bf16, 128 bytes a row, rows one behind the other,
16-byte chunks permuted within every 8 rows (TMA's and wgmma's 128-byte swizzle). A tile of 128 columns is two
panels, ROWS * 128 bytes apart. Tiles are aligned to 1024 bytes.
*/
#ifndef LLMC_MMA_SM90_CUH
#define LLMC_MMA_SM90_CUH

// Set while the compiler makes code for sm_90a. Elsewhere the kernels' bodies are left out. Plain sm_90 lacks the
// instructions, but a GPU of that architecture would choose these kernels and run their empty bodies.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SM90_CODE 1
#else
#define SM90_CODE 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !SM90_CODE
#error "the Hopper kernels need sm_90a: compile for compute_90a, not compute_90 (make maps ARCHS=90 to 90a)"
#endif

#include <cudaTypedefs.h>
#include "cuda_common.cuh"

#define SM90_PANEL 64 // columns

// One lane of a warp, the same each time: cheaper than asking for its number.
__device__ static inline bool sm90_elected() {
    uint32_t elected;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(elected));
    return elected != 0;
}
__device__ static inline uint32_t sm90_address(const void* shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

// ----------------------------------------------------------------------------
// barriers in shared memory. A phase ends when `threads` and `warps` have arrived and the bytes expected have
// landed. Phases are counted modulo 2: wait(0) returns once the first one has ended, wait(1) at once on a
// fresh barrier.

// One lane arrives for its warp. racecheck takes that for what this lane alone has done: for it, build so
// that all do.
#ifdef SM90_EVERY_LANE_ARRIVES
#define SM90_ARRIVALS_OF_WARP 32
#else
#define SM90_ARRIVALS_OF_WARP 1
#endif
__device__ static inline void sm90_barrier_init(uint64_t* barrier, int threads, int warps) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sm90_address(barrier)),
                 "r"(threads + warps * SM90_ARRIVALS_OF_WARP)
                 : "memory");
}
// After the inits, by the thread that did them; then __syncthreads.
__device__ static inline void sm90_barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ static inline void sm90_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sm90_address(barrier)) : "memory");
}
// Called by all lanes: what they did before is done.
__device__ static inline void sm90_arrive_warp(uint64_t* barrier) {
    __syncwarp();
    if (SM90_ARRIVALS_OF_WARP > 1 || sm90_elected()) sm90_arrive(barrier);
}
__device__ static inline void sm90_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sm90_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ static inline bool sm90_try_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(sm90_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}
__device__ static inline void sm90_wait(uint64_t* barrier, uint32_t parity) {
    while (!sm90_try_wait(barrier, parity)) {}
}

// A place in a ring of stages, and the parity of this round's barriers: what fills a stage waits for
// parity ^ 1 of the stage's `empty`, what uses it for parity of its `full`.
template <int STAGES> struct Sm90Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The hardware's 16 numbered barriers (0 is __syncthreads'): `threads` counts those that sync and those that
// only arrive.
__device__ static inline void sm90_named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ static inline void sm90_named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ----------------------------------------------------------------------------
// registers move between warpgroups: a kernel compiled for few gives what its producers need not

template <int REGISTERS> __device__ static inline void sm90_take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ static inline void sm90_give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ----------------------------------------------------------------------------
// copies between memory and tiles, by one thread. TMA and wgmma read shared memory through a proxy of their
// own: threads that have written there with plain stores pass this fence, then a barrier, then the one thread
// goes on.

__device__ static inline void sm90_fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One panel of the map's rows from `t` on; rows past the end become zeros. Lands as bytes on the barrier.
__device__ static inline void sm90_load_panel(void* to, const CUtensorMap* map, int column, int head, int t,
                                              int b, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
                 "{%2, %3, %4, %5}], [%6];" ::"r"(sm90_address(to)),
                 "l"(map), "r"(column), "r"(head), "r"(t), "r"(b), "r"(sm90_address(barrier))
                 : "memory");
}
// The other way; rows past the end are left out. Then commit and wait as below.
__device__ static inline void sm90_store_panel(const CUtensorMap* map, int column, int head, int t, int b,
                                               const void* from) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
        "r"(column), "r"(head), "r"(t), "r"(b), "r"(sm90_address(from))
        : "memory");
}
// A whole tile of DH columns and ROWS rows, the rows of the map's box
template <int DH, int ROWS>
__device__ static inline void sm90_load_tile(bf16* to, const CUtensorMap* map, int head, int t, int b,
                                             uint64_t* barrier) {
#pragma unroll
    for (int column = 0; column < DH; column += SM90_PANEL)
        sm90_load_panel(to + column * ROWS, map, column, head, t, b, barrier);
}
template <int DH, int ROWS>
__device__ static inline void sm90_store_tile(const CUtensorMap* map, int head, int t, int b,
                                              const bf16* from) {
#pragma unroll
    for (int column = 0; column < DH; column += SM90_PANEL)
        sm90_store_panel(map, column, head, t, b, from + column * ROWS);
}

// to[0..3] += a, b, c, d. The order in which several add to one place is not fixed.
__device__ static inline void sm90_reduce_add4(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
}

// Among thread blocks: who loads what was stored sees all that the storing thread had seen.
__device__ static inline int sm90_load_acquire(const int* from) {
    int x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ static inline void sm90_store_release(int* to, int x) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Stores end in groups, like wgmma's products: waits until at most PENDING groups still read shared memory.
__device__ static inline void sm90_commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int PENDING> __device__ static inline void sm90_wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ----------------------------------------------------------------------------
// registers to tiles

// Where chunk `chunk` (8 columns) of a row stands, in bytes from the tile
template <int ROWS> __device__ static inline uint32_t sm90_at(int row, int chunk) {
    return (uint32_t)(chunk / 8 * ROWS * 128 + row * 128 + ((chunk ^ row) & 7) * 16);
}
// Four 8x8 matrices as wgmma's and mma's fragments hold them; each lane names one row, 16 bytes.
__device__ static inline void sm90_store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                                  uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
__device__ static inline uint32_t sm90_pack(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ static inline float sm90_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ----------------------------------------------------------------------------
// products of a warpgroup: d [64, N] (+)= a [64, 16] b [16, N], in the background

// Before the first product of a batch, and wherever registers that products read or write were touched
// between: orders them.
__device__ static inline void sm90_products_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ static inline void sm90_products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING of the committed batches are still under way.
template <int PENDING> __device__ static inline void sm90_products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of d across this point: it does not know that products run on.
template <int R> __device__ static inline void sm90_hold(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int K> __device__ static inline void sm90_hold(uint32_t (&a)[K][4]) {
#pragma unroll
    for (int i = 0; i < K * 4; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// An operand in shared memory: a tile of ROWS rows. It serves both ways, with the sum's index along the
// columns (K major) or along the rows (MN major, "transposed"). Add sm90_columns or sm90_rows to move in it.
template <int ROWS> __device__ static inline uint64_t sm90_operand(const void* tile) {
    uint64_t address = (sm90_address(tile) & 0x3FFFF) >> 4, panel = ROWS * 128 >> 4, eight_rows = 1024 >> 4;
    return address | panel << 16 | eight_rows << 32 | (uint64_t)1 << 62;
}
// 16 rows of a transposed operand whose second panel is not the tile's, but stands further on, at `beside`
__device__ static inline uint64_t sm90_operand_beside(const void* rows, const void* beside) {
    uint64_t address = (sm90_address(rows) & 0x3FFFF) >> 4, panel = (sm90_address(beside) & 0x3FFFF) >> 4;
    return address | (panel - address) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
template <int ROWS> __host__ __device__ constexpr uint64_t sm90_columns(int columns) {
    return (uint64_t)((columns / 64 * ROWS * 128 + columns % 64 * 2) >> 4);
}
__host__ __device__ constexpr uint64_t sm90_rows(int rows) { return (uint64_t)(rows * 128 >> 4); } // 8 n

// Of d, lane l of warp w holds row 16 w + l / 4, columns 8 n + 2 (l % 4) and the next, in d[4 n] and
// d[4 n + 1], and the same of row + 8 in d[4 n + 2] and d[4 n + 3]. So pairs of d's are the next product's a.
#define SM90_D4(d, i)   "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SM90_D16(d, i)  SM90_D4(d, i), SM90_D4(d, i + 4), SM90_D4(d, i + 8), SM90_D4(d, i + 12)
#define SM90_D32(d, i)  SM90_D16(d, i), SM90_D16(d, i + 16)
#define SM90_REGS_32(d) SM90_D32(d, 0)
#define SM90_REGS_36(d) SM90_REGS_32(d), SM90_D4(d, 32)
#define SM90_REGS_64(d) SM90_REGS_32(d), SM90_D32(d, 32)

#define SM90_LIST_32                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"     \
    "%27,%28,%29,%30,%31"
#define SM90_LIST_36 SM90_LIST_32 ",%32,%33,%34,%35"
#define SM90_LIST_64                                                                                         \
    SM90_LIST_36 ",%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"     \
                 "%57,%58,%59,%60,%61,%62,%63"

// sm90_product(d, a, b, accumulate), N = 2 R by the size of d; without accumulate d need not be set before.
// a is an operand in shared memory or four registers. TRANSPOSED: the sum's index runs along the tile's rows.
// Behind d's R registers follow the other arguments, numbered from R on.
#define SM90_DEFINE_PRODUCT(N, R, R1, R2, R3, R4, R5, R6)                                                    \
    template <bool A_TRANSPOSED, bool B_TRANSPOSED>                                                          \
    __device__ static inline void sm90_product(float(&d)[R], uint64_t a, uint64_t b, bool accumulate) {      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R2 ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SM90_LIST_##R              \
                     "}, %" #R ", %" #R1 ", p, 1, 1, %" #R3 ", %" #R4 ";\n}"                                 \
                     : SM90_REGS_##R(d)                                                                      \
                     : "l"(a), "l"(b), "r"((int)accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED)            \
                     : "memory");                                                                            \
    }                                                                                                        \
    template <bool B_TRANSPOSED>                                                                             \
    __device__ static inline void sm90_product(float(&d)[R], const uint32_t(&a)[4], uint64_t b,              \
                                               bool accumulate) {                                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R5 ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SM90_LIST_##R              \
                     "}, {%" #R ",%" #R1 ",%" #R2 ",%" #R3 "}, %" #R4 ", p, 1, 1, %" #R6 ";\n}"              \
                     : SM90_REGS_##R(d)                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate),             \
                       "n"(B_TRANSPOSED)                                                                     \
                     : "memory");                                                                            \
    }
SM90_DEFINE_PRODUCT(64, 32, 33, 34, 35, 36, 37, 38)
SM90_DEFINE_PRODUCT(72, 36, 37, 38, 39, 40, 41, 42)
SM90_DEFINE_PRODUCT(128, 64, 65, 66, 67, 68, 69, 70)

// d [64, N] (+)= A B^T over K columns of both: tiles of A_ROWS and B_ROWS rows, a moved to its 64 rows.
template <int K, int A_ROWS, int B_ROWS, int R>
__device__ static inline void sm90_multiply_abt(float (&d)[R], uint64_t a, uint64_t b,
                                                bool accumulate = false) {
#pragma unroll
    for (int k = 0; k < K; k += 16)
        sm90_product<false, false>(d, a + sm90_columns<A_ROWS>(k), b + sm90_columns<B_ROWS>(k),
                                   accumulate || k > 0);
}
// d [64, N] (+)= A B with A's 64 x 16 K in registers, B's rows the sum's index
template <int K, int R>
__device__ static inline void sm90_multiply_ab(float (&d)[R], const uint32_t (&a)[K][4], uint64_t b,
                                               bool accumulate) {
#pragma unroll
    for (int k = 0; k < K; k++) sm90_product<true>(d, a[k], b + sm90_rows(16 * k), accumulate || k > 0);
}

// ----------------------------------------------------------------------------
// tensor maps, on the host

// The driver's cuTensorMapEncodeTiled, found at run time: nothing links against the driver.
static inline PFN_cuTensorMapEncodeTiled_v12000 sm90_map_encoder(void) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode;
    if (!encode) {
        void* found = NULL;
        cudaDriverEntryPointQueryResult status;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                    cudaEnableDefault, &status));
        if (status != cudaDriverEntryPointSuccess || !found)
            die("the driver has no cuTensorMapEncodeTiled, which Hopper's kernels need: update it");
        encode = (PFN_cuTensorMapEncodeTiled_v12000)found;
    }
    return encode;
}

// Of x [B, T, NH, dh], bf16, aligned to 16 bytes: a box is a panel of `rows` tokens of one head.
static inline CUtensorMap sm90_tensor_map(const bf16* x, int64_t B, int64_t T, int64_t NH, int64_t dh,
                                          int rows) {
    CUtensorMap map;
    cuuint64_t size = sizeof(bf16);
    cuuint64_t lengths[4] = {(cuuint64_t)dh, (cuuint64_t)NH, (cuuint64_t)T, (cuuint64_t)B};
    cuuint64_t steps[3] = {lengths[0] * size, lengths[0] * lengths[1] * size,
                           lengths[0] * lengths[1] * lengths[2] * size};
    cuuint32_t box[4] = {SM90_PANEL, 1, (cuuint32_t)rows, 1}, element_steps[4] = {1, 1, 1, 1};
    CUresult result =
        sm90_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)x, lengths, steps, box,
                           element_steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        die("no tensor map of [%lld, %lld, %lld, %lld] at %p: the driver says %d", (long long)B, (long long)T,
            (long long)NH, (long long)dh, (const void*)x, (int)result);
    return map;
}

#endif // LLMC_MMA_SM90_CUH
