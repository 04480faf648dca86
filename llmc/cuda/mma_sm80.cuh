/*
Matrix multiplication by one warp, for every GPU from sm_80 on: cp.async into swizzled tiles in shared memory,
ldmatrix out of them, mma.sync m16n8k16 on bf16 with float accumulators.

A tile in shared memory is row-major [rows, DH]. The 16-byte chunks of a row are permuted by chunk ^ (row %
8), so that neither cp.async nor ldmatrix, eight rows at a time, has bank conflicts.

Callers: the kernels of llmc/attention, of attention and few rows in llmc/inference, of llmc/baselines.
mma_sm90.cuh builds on the instructions.
*/
#pragma once

#include "cuda_common.cuh"

// ----------------------------------------------------------------------------
// instructions

__device__ static inline uint32_t smem_address(const void* shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

// Starts copying 16 bytes to shared memory; zeros where `exists` is false.
__device__ static inline void cp_async16(uint32_t to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}
__device__ static inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// A group: the copies that the thread has started since the group before. cp_async_wait_group waits until at
// most N groups are in flight.
__device__ static inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ static inline void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Starts reading the address's 128-byte line into L2; nothing waits for it.
__device__ static inline void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Four 8x8 matrices; each lane passes the address of one row, 16 bytes.
__device__ static inline void ldmatrix(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ static inline void ldmatrix_trans(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}

// d = a b + c: a 16x16, b 16x8. A lane holds columns 2 (lane % 4) and the next of row lane / 4 in d[0..1], of
// row lane / 4 + 8 in d[2..3].
__device__ static inline void sm80_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

__device__ static inline uint32_t pack_bf16x2(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// Reductions over the four lanes that share an accumulator's row
__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// ----------------------------------------------------------------------------
// tiles in shared memory

// Offset in bytes of a 16-byte chunk of a row
template <int DH> __device__ static inline int sm80_chunk_offset(int row, int chunk) {
    return row * DH * 2 + ((chunk ^ (row & 7)) << 4);
}

// Starts copying ROWS rows of x [rows, DH], from row `first` on; rows past the end become zero.
template <int DH, int ROWS, int THREADS>
__device__ static inline void sm80_copy_tile(bf16* tile, const bf16* x, int first, int rows,
                                             int64_t row_stride) {
    constexpr int CHUNKS = DH / 8, STEP = THREADS / CHUNKS;
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "a thread's chunks have the same permutation");
    int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS, left = rows - first;
    uint32_t to = smem_address(tile) + (uint32_t)sm80_chunk_offset<DH>(row, chunk);
    x += first * row_stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        bool exists = row + i < left;
        cp_async16(to + (uint32_t)(i * DH * 2), x + (exists ? row + i : 0) * row_stride, exists);
    }
}

// A lane's address for ldmatrix of 16 rows by two chunks, from the tile's first row on. lane_a: A fragments,
// and B fragments whose reduction runs along the rows (ldmatrix_trans). lane_b: B fragments whose reduction
// runs along the columns.
template <int DH> __device__ static inline uint32_t sm80_lane_a(const bf16* tile, int lane) {
    return smem_address(tile) + (uint32_t)sm80_chunk_offset<DH>(lane & 15, lane >> 4);
}
template <int DH> __device__ static inline uint32_t sm80_lane_b(const bf16* tile, int lane) {
    return smem_address(tile) + (uint32_t)sm80_chunk_offset<DH>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}
// The lane's address `row` rows (a multiple of 8) and `column` columns (of 16) further on
template <int DH> __device__ static inline uint32_t sm80_advance(uint32_t lane_address, int row, int column) {
    return (lane_address ^ (uint32_t)(column * 2)) + (uint32_t)(row * DH * 2);
}

// ----------------------------------------------------------------------------
// GEMMs of one warp

// s [16 MS, 8 NS] = acc_init + A B^T, over DH columns. a and b are lane addresses of the first rows of A and
// B; acc_init(c, m, n) sets the initial accumulator of block (m, n).
template <int DH, int MS, int NS, class AccInit>
__device__ static inline void sm80_matmul_abt(float (&s)[MS][NS][4], uint32_t a, uint32_t b,
                                              AccInit acc_init) {
#pragma unroll
    for (int k = 0; k < DH; k += 16) {
        uint32_t fa[MS][4], fb[4];
        for (int m = 0; m < MS; m++) ldmatrix(fa[m], sm80_advance<DH>(a, m * 16, k));
#pragma unroll
        for (int n = 0; n < NS; n += 2) {
            ldmatrix(fb, sm80_advance<DH>(b, n * 8, k));
            for (int e = 0; e < 2 * MS; e++) {
                int m = e / 2, i = e % 2;
                float c[4];
                if (k == 0) acc_init(c, m, n + i);
                sm80_mma(s[m][n + i], fa[m], fb[2 * i], fb[2 * i + 1], k == 0 ? c : s[m][n + i]);
            }
        }
    }
}

// acc [16 MS, DH] += P X over 16 rows of X: P in registers, x the lane address of X's first row.
template <int DH, int MS>
__device__ static inline void sm80_matmul_ab(float (&acc)[MS][DH / 8][4], const uint32_t (&p)[MS][4],
                                             uint32_t x) {
#pragma unroll
    for (int n = 0; n < DH / 8; n += 2) {
        uint32_t fx[4];
        ldmatrix_trans(fx, sm80_advance<DH>(x, 0, n * 8));
        for (int e = 0; e < 2 * MS; e++) {
            float(&d)[4] = acc[e / 2][n + e % 2];
            sm80_mma(d, p[e / 2], fx[e % 2 * 2], fx[e % 2 * 2 + 1], d);
        }
    }
}

// Calls f(x, m, half, row, column) for each of the lane's elements of s; row is m * 16 + half * 8 + lane / 4.
template <int MS, int NS, class F> __device__ static inline void sm80_for_each(float (&s)[MS][NS][4], F f) {
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MS * NS * 4; i++) {
        int m = i / 4 / NS, n = i / 4 % NS, e = i % 4;
        f(s[m][n][e], m, e / 2, m * 16 + e / 2 * 8 + lane / 4, n * 8 + lane % 4 * 2 + e % 2);
    }
}

// Stores acc times factor(m, half), its row's factor, to rows [16 MS, DH] of `to`, of which the first `rows`
// exist. The values go through `tile`, shared memory of 16 MS rows that no other warp uses any more, so that
// the stores are 16 bytes wide.
template <int DH, int MS, class Factor>
__device__ static inline void sm80_store(bf16* to, int64_t row_stride, int rows, bf16* tile,
                                         const float (&acc)[MS][DH / 8][4], Factor factor) {
    int lane = (int)threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MS * DH / 4; i++) {
        int m = i / (DH / 4), n = i / 2 % (DH / 8), half = i % 2, row = m * 16 + half * 8 + lane / 4;
        const float *x = &acc[m][n][2 * half], f = factor(m, half);
        *(uint32_t*)((char*)tile + sm80_chunk_offset<DH>(row, n) + lane % 4 * 4) =
            pack_bf16x2(x[0] * f, x[1] * f);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MS * 16 * DH / 8; i += 32) {
        int row = (i + lane) / (DH / 8), chunk = (i + lane) % (DH / 8);
        if (row < rows)
            *(int4*)(to + row * row_stride + chunk * 8) =
                *(int4*)((char*)tile + sm80_chunk_offset<DH>(row, chunk));
    }
}
