/*
Matrix products of one warp, for every GPU from sm_80 on: cp.async into swizzled tiles in shared memory,
ldmatrix out of them, mma.sync on bf16 with sums in float.
*/
#ifndef LLMC_MMA_SM80_CUH
#define LLMC_MMA_SM80_CUH

#include "cuda_common.cuh"

// ----------------------------------------------------------------------------
// instructions

__device__ static inline void sm80_copy16(uint32_t to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}
__device__ static inline void sm80_copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8x8 matrices; each lane names one row, 16 bytes.
__device__ static inline void sm80_load(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ static inline void sm80_load_transposed(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}

// d = a b + c: a 16x16, b 16x8. Of d a lane holds row lane/4, columns 2(lane%4) and the next, then the same
// of row + 8.
__device__ static inline void sm80_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

__device__ static inline float sm80_exp2(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ static inline uint32_t sm80_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}
__device__ static inline uint32_t sm80_address(const void* shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

// ----------------------------------------------------------------------------
// tiles in shared memory: rows of DH elements, whose 16-byte chunks are permuted by the row so that neither
// the copies in nor ldmatrix, eight rows at a time, meet in a bank

template <int DH> __device__ static inline int sm80_at(int row, int chunk) {
    return row * DH * 2 + ((chunk ^ (row & 7)) << 4);
}

// Starts copying ROWS rows; those from `rows` on become zero.
template <int DH, int ROWS, int THREADS>
__device__ static inline void sm80_copy_tile(uint32_t tile, const bf16* from, int64_t row_step, int rows) {
    constexpr int CHUNKS = DH / 8, STEP = THREADS / CHUNKS;
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "every thread keeps its place in the permutation");
    int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
    from += chunk * 8;
    tile += (uint32_t)sm80_at<DH>(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        bool exists = row + i < rows;
        sm80_copy16(tile + (uint32_t)(i * DH * 2), from + (exists ? row + i : 0) * row_step, exists);
    }
}

// A lane's address for ldmatrix. The operands whose rows are the sum's index (a's rows, and b transposed)
// take 16 rows by two chunks as four matrices in one order, b as it stands in the other.
template <int DH> __device__ static inline uint32_t sm80_lane_a(uint32_t tile, int lane) {
    return tile + (uint32_t)sm80_at<DH>(lane & 15, lane >> 4);
}
template <int DH> __device__ static inline uint32_t sm80_lane_b(uint32_t tile, int lane) {
    return tile + (uint32_t)sm80_at<DH>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}
// The address `row` (a multiple of 8) rows and `column` (of 16) columns on.
template <int DH> __device__ static inline uint32_t sm80_move(uint32_t lane_address, int row, int column) {
    return (lane_address ^ (uint32_t)(column * 2)) + (uint32_t)(row * DH * 2);
}

// ----------------------------------------------------------------------------
// products of one warp

// s [16 MS, 8 NS] = start + A B^T, over DH. a and b are lane addresses of A's and B's first rows; start(c, m,
// n) gives the values from which the sums of tile (m, n) start.
template <int DH, int MS, int NS, class Start>
__device__ static inline void sm80_scores(float (&s)[MS][NS][4], uint32_t a, uint32_t b, Start start) {
#pragma unroll
    for (int k = 0; k < DH; k += 16) {
        uint32_t fa[MS][4], fb[4];
#pragma unroll
        for (int m = 0; m < MS; m++) sm80_load(fa[m], sm80_move<DH>(a, m * 16, k));
#pragma unroll
        for (int n = 0; n < NS; n += 2) {
            sm80_load(fb, sm80_move<DH>(b, n * 8, k));
#pragma unroll
            for (int m = 0; m < MS; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float c[4];
                    if (k == 0) start(c, m, n + i);
                    sm80_mma(s[m][n + i], fa[m], fb[2 * i], fb[2 * i + 1], k == 0 ? c : s[m][n + i]);
                }
        }
    }
}

// Calls f(x, m, half, row, column) for each of the lane's scores, of row m * 16 + half * 8 + lane / 4.
template <int MS, int NS, class F> __device__ static inline void sm80_each(float (&s)[MS][NS][4], F f) {
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                f(s[m][n][e], m, e / 2, m * 16 + e / 2 * 8 + lane / 4, n * 8 + lane % 4 * 2 + e % 2);
}

// sum [16 MS, DH] += P X for 16 rows of X: P in registers, x the lane address of X's first row.
template <int DH, int MS>
__device__ static inline void sm80_add_product(float (&sum)[MS][DH / 8][4], const uint32_t (&p)[MS][4],
                                               uint32_t x) {
#pragma unroll
    for (int n = 0; n < DH / 8; n += 2) {
        uint32_t fx[4];
        sm80_load_transposed(fx, sm80_move<DH>(x, 0, n * 8));
#pragma unroll
        for (int m = 0; m < MS; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                sm80_mma(sum[m][n + i], p[m], fx[2 * i], fx[2 * i + 1], sum[m][n + i]);
    }
}

// Stores sum times its row's factor, through rows of shared memory that this warp alone still uses, so that
// the stores are 16 bytes wide. to points at the warp's first row; `rows` of them exist.
template <int DH, int MS>
__device__ static inline void sm80_store(bf16* to, int64_t row_step, int rows, char* tile,
                                         const float (&sum)[MS][DH / 8][4], const float (&factor)[MS][2]) {
    int lane = (int)threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MS; m++)
#pragma unroll
        for (int n = 0; n < DH / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t pair = sm80_pack(sum[m][n][2 * half] * factor[m][half],
                                          sum[m][n][2 * half + 1] * factor[m][half]);
                int row = m * 16 + half * 8 + lane / 4;
                *(uint32_t*)(tile + sm80_at<DH>(row, n) + lane % 4 * 4) = pair;
            }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MS * 16 * DH / 8; i += 32) {
        int row = (i + lane) / (DH / 8), chunk = (i + lane) % (DH / 8);
        if (row < rows) *(int4*)(to + row * row_step + chunk * 8) = *(int4*)(tile + sm80_at<DH>(row, chunk));
    }
}

// The sum over the four lanes that share a row.
__device__ static inline float sm80_row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

#endif // LLMC_MMA_SM80_CUH
