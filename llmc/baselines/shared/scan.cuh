/*
The recurrences of Mamba-2, DeltaNet and Gated DeltaNet on the GPU, in chunks. A head's state S [K, V]:

    S' = f_t S_(t-1)
    u_t = v_t, or with beta  beta_t (v_t - S'^T k_t)
    S_t = S' + k_t u_t^T,    o_t = scale S_t^T q_t + skip_t v_t

    log_decay (log f_t) without beta, V 64, heads share q and k       Mamba-2, ssd_*.cuh
    beta without log_decay (f_t is 1) or skip, V 128                  DeltaNet, delta_rule_*.cuh
    both, without skip, V a multiple of 128                           Gated DeltaNet, the same files

Arguments of their functions, and what their kernels share. Operands of the GEMMs are bf16; sums, cumulative
log decays and the states within a pass fp32. Every run gives the same bits. Nothing is allocated, so that a
pass can be a CUDA graph. scan.h computes the same on the CPU, token by token.

A sequence is cut into chunks of CHUNK tokens. The last chunk is padded: tokens past the end have q, k, v,
gradients and beta 0 and log decay 0, so that they change nothing.
*/
#pragma once

#include "../../cuda/mma_sm80.cuh"
#include "../../cuda/range.cuh"

typedef struct {
    int64_t B, T;
    int NH, K, V;              // heads; K is 128; V as above
    int64_t key_row, key_head; // elements of q, k, dq, dk from token to token, from head to head; key_head 0:
                               // heads share q and k
    int64_t value_row;         // of v and dv from token to token; heads are adjacent
    float scale;
    // [B,T] of packed documents (llmc/model/documents.h), whose states begin with 0; read only with beta, as
    // a decay of 0 does the same. NULL: a sequence is one document
    const int32_t* doc_start;
    bool decays; // with beta: there is also log_decay
} ScanShape;

typedef struct {
    const bf16 *q, *k, *v;
    const float* log_decay; // [B,T,NH] log f_t; NULL: none
    const float* beta;      // [B,T,NH]; NULL: not the delta rule
    const float* skip;      // [B,T,NH]; NULL: 0
    float* state;           // [B,NH,K,V] fp32 state of the tokens before, updated; NULL: sequences begin here
                            // (always NULL in a backward pass)
    void* saved;            // ssd_saved_bytes, delta_rule_saved_bytes: for the backward pass
    void* scratch;          // ssd_scratch_bytes, delta_rule_scratch_bytes
} Scan;

typedef struct {
    bf16 *dq, *dk, *dv;        // dq, dk summed over heads where they share q and k
    float *dlog_decay, *dbeta; // [B,T,NH]
    const bf16* dout;          // [B,T,NH,V] contiguous
    bool recomputes;           // Scan.saved was not kept: recompute it first
} ScanBackward;

// Chains of states that a kernel computes: S from the first chunk on, dS from the last
enum ScanChains { SCAN_FORWARD, SCAN_BACKWARD, SCAN_BOTH };
static inline ScanChains scan_chains(bool recomputes) { return recomputes ? SCAN_BOTH : SCAN_BACKWARD; }

// Divides a buffer into tensors; with a NULL buffer it only counts their bytes.
struct ScanArena {
    char* base;
    size_t used;
    template <class T> T* take(int64_t n) {
        T* p = base ? (T*)(base + used) : NULL;
        used += ((size_t)n * sizeof(T) + 255) / 256 * 256;
        return p;
    }
};
// Arenas over Scan.saved and Scan.scratch
struct ScanMemory {
    ScanArena saved, scratch;
};
static inline ScanMemory scan_memory(const Scan* a) { return {{(char*)a->saved, 0}, {(char*)a->scratch, 0}}; }

// A forward function: o [B,T,NH,V]; updates a->state where there is one.
typedef void ScanForward(bf16* o, const Scan* a, const ScanShape* s, cudaStream_t stream);

// Rows are aligned to 16 bytes.
static inline void scan_check_rows(const ScanShape* s) {
    assert(s->T > 0 && s->T < INT32_MAX - 128);
    assert(s->key_row % 8 == 0 && s->key_head % 8 == 0 && s->value_row % 8 == 0);
    (void)s;
}

// x, opaque to the compiler, which therefore recomputes what depends on it in every iteration instead of
// keeping it in registers.
__device__ static inline int scan_opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

template <int CHUNK> __host__ __device__ static inline int scan_chunks(const ScanShape& s) {
    return (int)((s.T + CHUNK - 1) / CHUNK);
}

// Kernels whose stages exceed the 163 KiB of shared memory of an A100's thread block have a variant with
// fewer stages, which a test can select.
static bool scan_is_small = false;
static inline bool scan_is_large(void) {
    static const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return most >= 227 << 10 && !scan_is_small;
}

// Queues a kernel whose shared memory is F::Shared, with F::THREADS threads a block.
template <class F, class... Parameters, class... Arguments>
static inline void scan_launch(void (*kernel)(Parameters...), int64_t grid, cudaStream_t stream,
                               Arguments... arguments) {
    constexpr size_t SHARED = sizeof(typename F::Shared);
    static_assert(SHARED <= 227 << 10, "more shared memory than a thread block may have");
    assert(grid <= INT32_MAX);
    static const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if ((int)SHARED > most)
        die("a scan kernel needs %d KiB of shared memory a thread block, and this GPU has %d",
            (int)SHARED >> 10, most >> 10);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)SHARED));
    kernel<<<(unsigned)grid, F::THREADS, SHARED, stream>>>(arguments...);
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// GEMMs of one warp: acc [16, 8 NS] += A B, operands in shared memory

// A lane's view of an operand in a tile of W columns, from row (or column) `first` of the tile on. The
// reduction runs along the tile's columns, or with ACROSS along its rows. load: the fragments of 16 rows of A
// (16 columns of B) from m (n) on, over 16 numbers of the reduction from k on.
template <int W, bool ACROSS> struct TileA {
    uint32_t lane;
    __device__ TileA(const bf16* tile, int first) {
        int l = scan_opaque((int)threadIdx.x % 32);
        lane = ACROSS ? sm80_advance<W>(sm80_lane_b<W>(tile, l), 0, first)
                      : sm80_advance<W>(sm80_lane_a<W>(tile, l), first, 0);
    }
    __device__ void load(uint32_t (&f)[4], int k) const {
        if (ACROSS)
            ldmatrix_trans(f, sm80_advance<W>(lane, k, 0));
        else
            ldmatrix(f, sm80_advance<W>(lane, 0, k));
    }
};
template <int W, bool ACROSS> struct TileB {
    uint32_t lane;
    __device__ TileB(const bf16* tile, int first = 0) {
        int l = scan_opaque((int)threadIdx.x % 32);
        lane = ACROSS ? sm80_advance<W>(sm80_lane_a<W>(tile, l), 0, first)
                      : sm80_advance<W>(sm80_lane_b<W>(tile, l), first, 0);
    }
    __device__ void load(uint32_t (&f)[4], int n, int k) const {
        if (ACROSS)
            ldmatrix_trans(f, sm80_advance<W>(lane, k, n));
        else
            ldmatrix(f, sm80_advance<W>(lane, n, k));
    }
};

// Adds 16 numbers of the reduction, from k on: A's fragment in registers.
template <int NS, class B>
__device__ static inline void scan_mma(float (&acc)[1][NS][4], const uint32_t (&a)[4], const B& b, int k) {
#pragma unroll
    for (int n = 0; n < NS; n += 2) {
        uint32_t f[4];
        b.load(f, n * 8, k);
        sm80_mma(acc[0][n], a, f[0], f[1], acc[0][n]);
        sm80_mma(acc[0][n + 1], a, f[2], f[3], acc[0][n + 1]);
    }
}
template <int K, int NS, class A, class B>
__device__ static inline void scan_matmul(float (&acc)[1][NS][4], const A& a, const B& b) {
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        uint32_t f[4];
        a.load(f, k);
        scan_mma(acc, f, b, k);
    }
}

template <int NS> __device__ static inline void scan_clear(float (&acc)[1][NS][4]) {
#pragma unroll
    for (int i = 0; i < NS * 4; i++) acc[0][i / 4][i % 4] = 0;
}

// Columns [8 n, 8 n + 16) of acc as an A fragment
template <int NS>
__device__ static inline void scan_pack(uint32_t (&f)[4], const float (&acc)[1][NS][4], int n) {
#pragma unroll
    for (int r = 0; r < 4; r++)
        f[r] = pack_bf16x2(acc[0][n + r / 2][r % 2 * 2], acc[0][n + r / 2][r % 2 * 2 + 1]);
}

__device__ static inline float2 unpack_bf16x2(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ static inline uint32_t scale_bf16x2(uint32_t x, float low, float high) {
    float2 y = unpack_bf16x2(x);
    return pack_bf16x2(y.x * low, y.y * high);
}

// The lane's pair of a tile in row `row` and column block n, where an accumulator of that block has it
template <int W> __device__ static inline uint32_t* scan_pair(bf16* tile, int row, int n) {
    return (uint32_t*)((char*)tile + sm80_chunk_offset<W>(row, n) + threadIdx.x % 4 * 4);
}

// The lane's part of the dot products of acc's rows with rows row and row + 8 of a tile of 8 NS columns
template <int NS>
__device__ static inline void scan_row_dot(float (&sum)[2], const float (&acc)[1][NS][4], bf16* tile,
                                           int row) {
#pragma unroll
    for (int i = 0; i < 2 * NS; i++) {
        float2 x = unpack_bf16x2(*scan_pair<NS * 8>(tile, row + i % 2 * 8, i / 2));
        const float* y = &acc[0][i / 2][i % 2 * 2];
        sum[i % 2] += y[0] * x.x + y[1] * x.y;
    }
}
