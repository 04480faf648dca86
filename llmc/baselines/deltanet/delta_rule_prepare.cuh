/*
The delta rule in chunks of 64 tokens: the part that does not depend on the state. With S0 the state before a
chunk:

    A = strict_lower(diag(beta) K K^T),  T = (I + A)^-1,  W = T diag(beta) K,  U = T diag(beta) V
    V' = U - W S0            u_t of the recurrence, which S0 and the chunk's earlier tokens correct
    S1 = S0 + K^T V'         delta_rule_states.cuh
    O = scale (Q S0 + P V'),  P = lower(Q K^T)         delta_rule_forward.cuh

Gated DeltaNet, with g the inclusive sums of the chunk's log decays and C its last token:

    A_ij and P_ij times e^(g_i - g_j),  W = T diag(beta e^g) K
    S1 = e^(g_C) S0 + (diag(e^(g_C - g)) K)^T V',  O = scale (diag(e^g) Q S0 + P V')

Its heads have a multiple of 128 values: slices of 128 columns, which share W, T and P.

A and T are fp32: T is the inverse of a triangular matrix whose entries grow where keys are alike. T is
rounded once, as an operand of W and U.

With packed documents (ScanShape's doc_start) A, P and their gradients have the pairs within a document alone;
rows of W and of Q S0 are 0 behind the chunk's first wall, and only the tokens from its last wall on enter S1,
to which S0 adds nothing (DeltaWalls).

Tensors between the kernels are tiles of a chunk and a head: [tiles, ..], tile (b NH + h) chunks + chunk.
Those of values have a tile for each slice: [tiles, slices, ..]. Names that end in _t are transposed, and
stored in blocks (BlockA, BlockB). Called by delta_rule_forward.cuh and delta_rule_backward.cuh.
*/
#pragma once

#include "../shared/scan.cuh"

enum { DELTA_CHUNK = 64, DELTA_D = 128, DELTA_ROWS = DELTA_CHUNK * DELTA_D, DELTA_STATE = DELTA_D * DELTA_D };

// Numbers of a tile's tokens that decays give, fp32: log2(e) g; e^g, 0 behind the chunk's first wall;
// e^(g_C - g), 0 before its last wall. So the second's last one is the factor of S0 in S1.
enum { DELTA_CUM, DELTA_SINCE = DELTA_CHUNK, DELTA_UNTIL = 2 * DELTA_CHUNK, DELTA_FACTORS = 3 * DELTA_CHUNK };

// Buffers between the kernels. Those before u are saved; those from y on are a backward pass's.
struct DeltaWork {
    bf16* w;         // [tiles,CHUNK,D]
    bf16* states_t;  // [tiles,slices,D,K] S0^T
    bf16* values_t;  // [tiles,slices,D,CHUNK] V'^T
    bf16* inverse;   // [tiles,CHUNK,CHUNK] T
    float* factors;  // [tiles,DELTA_FACTORS] with decays
    bf16* u;         // [tiles,slices,CHUNK,D]
    bf16* y;         // [tiles,slices,CHUNK,D] P^T dO
    bf16* dstates_t; // [tiles,slices,D,K] dS1^T
    bf16* dvalues_t; // [tiles,slices,D,CHUNK] dV'^T
    int chunks, slices;
};

static inline DeltaWork delta_rule_work(ScanMemory* memory, const ScanShape* s, bool backward) {
    DeltaWork d = {};
    ScanArena *saved = &memory->saved, *arena = &memory->scratch;
    d.chunks = scan_chunks<DELTA_CHUNK>(*s);
    d.slices = s->V / DELTA_D;
    int64_t tiles = s->B * s->NH * d.chunks, value_tiles = tiles * d.slices;
    d.w = saved->take<bf16>(tiles * DELTA_ROWS);
    d.states_t = saved->take<bf16>(value_tiles * DELTA_STATE);
    d.values_t = saved->take<bf16>(value_tiles * DELTA_ROWS);
    d.inverse = saved->take<bf16>(tiles * DELTA_CHUNK * DELTA_CHUNK);
    if (s->decays) d.factors = saved->take<float>(tiles * DELTA_FACTORS);
    d.u = arena->take<bf16>(value_tiles * DELTA_ROWS);
    if (!backward) return d;
    d.y = arena->take<bf16>(value_tiles * DELTA_ROWS);
    d.dstates_t = arena->take<bf16>(value_tiles * DELTA_STATE);
    d.dvalues_t = arena->take<bf16>(value_tiles * DELTA_ROWS);
    return d;
}

// Bytes of Scan.saved, and of Scan.scratch; `backward` also covers the forward pass.
static inline size_t delta_rule_saved_bytes(const ScanShape* s) {
    ScanMemory memory = {};
    delta_rule_work(&memory, s, false);
    return memory.saved.used;
}
static inline size_t delta_rule_scratch_bytes(const ScanShape* s, bool backward) {
    ScanMemory memory = {};
    delta_rule_work(&memory, s, backward);
    return memory.scratch.used;
}

// Dies for a shape that the kernels do not support.
static inline void delta_rule_check(const Scan* a, const ScanShape* s) {
    const bool sliced = s->decays && s->V > 0 && s->V % DELTA_D == 0;
    if (s->K != DELTA_D || !(s->V == DELTA_D || sliced) || s->decays != (a->log_decay != NULL) || a->skip ||
        !a->beta)
        die("no kernels for a scan of heads of %d x %d, %s, %s", s->K, s->V,
            a->log_decay ? "decay" : "no decay", a->beta ? "delta rule" : "no delta rule");
    scan_check_rows(s);
}

// A tile of W columns in blocks of 16x16, row-major, and in each the 8x8 matrices of an A fragment: top left,
// bottom left, top right, bottom right, 128 contiguous bytes each. A warp stores a register of a fragment in
// one piece, and ldmatrix reads a matrix without bank conflicts. Otherwise as TileA and TileB.
__device__ static inline int block_offset(int columns, int row, int column) { // in elements
    return (row / 16 * (columns / 16) + column / 16) * 256;
}
template <int W> struct BlockA { // the reduction runs along the rows
    uint32_t lane;
    __device__ BlockA(const bf16* tile, int first) {
        int l = (int)threadIdx.x % 32, matrix = (l >> 3 & 1) * 2 + (l >> 4);
        lane = smem_address(tile + block_offset(W, 0, first) + matrix * 64 + l % 8 * 8);
    }
    __device__ void load(uint32_t (&f)[4], int k) const {
        ldmatrix_trans(f, lane + (uint32_t)block_offset(W, k, 0) * 2);
    }
};
template <int W, bool ACROSS> struct BlockB {
    uint32_t lane;
    __device__ explicit BlockB(const bf16* tile) {
        int l = (int)threadIdx.x % 32, matrix = ACROSS ? l >> 3 : (l >> 3 & 1) * 2 + (l >> 4);
        lane = smem_address(tile + matrix * 64 + l % 8 * 8);
    }
    __device__ void load(uint32_t (&f)[4], int n, int k) const {
        if (ACROSS)
            ldmatrix_trans(f, lane + (uint32_t)block_offset(W, k, n) * 2);
        else
            ldmatrix(f, lane + (uint32_t)block_offset(W, n, k) * 2);
    }
};
// Stores a fragment as block (row / 16, column / 16).
template <int W>
__device__ static inline void block_store(bf16* tile, const uint32_t (&f)[4], int row, int column) {
    for (int r = 0; r < 4; r++)
        *(uint32_t*)(tile + block_offset(W, row, column) + r * 64 + threadIdx.x % 32 * 2) = f[r];
}

// A thread block's tile
struct DeltaBlock {
    static constexpr int THREADS = 128; // 4 warps of 16 tokens
    int64_t tile, keys, values;         // keys: offset of the sequence's first token in q and k; values: in v
    int64_t out;                        // in o and dout
    int first;                          // the chunk's first token
    __device__ DeltaBlock(const DeltaWork& work, const ScanShape& s) : tile(blockIdx.x) {
        int64_t head = tile / work.chunks, b = head / s.NH, h = head % s.NH;
        keys = b * s.T * s.key_row + h * s.key_head;
        values = b * s.T * s.value_row + h * s.V;
        out = (b * s.T * s.NH + h) * s.V;
        first = (int)(tile % work.chunks) * DELTA_CHUNK;
    }
    // Starts copying the chunk's rows of a tensor of tokens, a tile of W columns and ROWS rows, or one in
    // blocks.
    __device__ void copy(bf16* to, const bf16* x, const ScanShape& s, int64_t row_stride) const {
        sm80_copy_tile<DELTA_D, DELTA_CHUNK, THREADS>(to, x, scan_opaque(first), (int)s.T,
                                                      scan_opaque((int)row_stride));
    }
    template <int W, int ROWS> __device__ void copy_tile(bf16* to, const bf16* tiles) const {
        sm80_copy_tile<W, ROWS, THREADS>(to, tiles + tile * W * ROWS, 0, ROWS, W);
    }
    template <int N> __device__ void copy_blocks(bf16* to, const bf16* tiles) const {
        copy_blocks<N>(to, tiles, tile);
    }
    template <int N> __device__ void copy_blocks(bf16* to, const bf16* tiles, int64_t number) const {
#pragma unroll
        for (int i = (int)threadIdx.x * 8; i < N; i += THREADS * 8)
            cp_async16(smem_address(to + i), tiles + number * N + i, true);
    }
};

// beta of the chunk's tokens, 0 past the end
__device__ static inline void delta_rule_load_beta(float* to, const float* beta, const DeltaBlock& block,
                                                   const DeltaWork& work, const ScanShape& s) {
    int t = block.first + (int)threadIdx.x;
    int64_t head = block.tile / work.chunks;
    if (threadIdx.x < DELTA_CHUNK)
        to[threadIdx.x] = t < s.T ? beta[(head / s.NH * s.T + t) * s.NH + head % s.NH] : 0;
}

// The walls of a chunk: bit i is set if its token i is the first one of a packed document.
struct DeltaWalls {
    unsigned long long mask;

    // The walls of the chunk that begins with token `first` of sequence b. Called by all lanes of a warp.
    template <bool DOCS>
    __device__ static DeltaWalls of(const int32_t* doc_start, int64_t b, int64_t T, int first) {
        unsigned halves[2] = {};
        for (int i = 0; DOCS && i < 2; i++) {
            int t = first + 32 * i + (int)threadIdx.x % 32;
            halves[i] = __ballot_sync(~0u, t < T && doc_start[b * T + min((int64_t)t, T - 1)] == t);
        }
        return {(unsigned long long)halves[1] << 32 | halves[0]};
    }
    __device__ static DeltaWalls of(const DeltaBlock& block, const DeltaWork& work, const ScanShape& s) {
        return of<true>(s.doc_start, block.tile / work.chunks / s.NH, s.T, block.first);
    }
    // Tokens before this one are in the document that S0 is of.
    __device__ int first() const { return mask ? __ffsll((long long)mask) - 1 : DELTA_CHUNK; }
    // Tokens from this one on are in the document that S1 is of.
    __device__ int last() const { return mask ? 63 - __clzll((long long)mask) : 0; }
    // First token in the chunk of token i's document, and the token behind its last one.
    __device__ int begin(int i) const {
        unsigned long long here = mask & (~0ull >> (63 - i));
        return here ? 63 - __clzll((long long)here) : 0;
    }
    __device__ int end(int i) const {
        unsigned long long later = mask & ~(~0ull >> (63 - i));
        return later ? __ffsll((long long)later) - 1 : DELTA_CHUNK;
    }
};

// Zeroes the accumulators of the rows from `end` on.
template <int NS>
__device__ static inline void delta_rule_clear_rows(float (&acc)[1][NS][4], int first_row, int end) {
    sm80_for_each(acc, [&](float& y, int, int, int row, int) {
        if (first_row + row >= end) y = 0;
    });
}

// Zeroes the elements above the diagonal of a strip of a [CHUNK, CHUNK] matrix, or with TRANSPOSED below it;
// with STRICT also the diagonal.
// DOCS: also the pairs of tokens of two documents
template <bool TRANSPOSED, bool STRICT, bool DOCS>
__device__ static inline void delta_rule_mask(float (&x)[1][8][4], int first_row, const DeltaWalls& walls) {
    int border[2] = {}; // of a row's document, by half
    for (int half = 0; DOCS && half < 2; half++) {
        int row = first_row + half * 8 + (int)threadIdx.x % 32 / 4;
        border[half] = TRANSPOSED ? walls.end(row) : walls.begin(row);
    }
    sm80_for_each(x, [&](float& y, int, int half, int row, int column) {
        int below = first_row + row - column;
        if (TRANSPOSED) below = -below;
        if (below < (STRICT ? 1 : 0)) y = 0;
        if (DOCS && (TRANSPOSED ? column >= border[half] : column < border[half])) y = 0;
    });
}

// ----------------------------------------------------------------------------
// decays

// e^(g_i - g_j) from sums in units of log2(e); 1 above the diagonal, where it may not overflow
__device__ static inline float delta_rule_between(float cum_i, float cum_j) {
    return exp2f(fminf(cum_i - cum_j, 0));
}

// Multiplies a strip of a [CHUNK, CHUNK] matrix by e^(g_i - g_j), with TRANSPOSED by e^(g_j - g_i).
template <bool TRANSPOSED>
__device__ static inline void delta_rule_decay(float (&x)[1][8][4], int first_row, const float* cum) {
    const float rows[2] = {cum[first_row + (int)threadIdx.x % 32 / 4],
                           cum[first_row + (int)threadIdx.x % 32 / 4 + 8]};
    sm80_for_each(x, [&](float& y, int, int half, int, int column) {
        y *= TRANSPOSED ? delta_rule_between(cum[column], rows[half])
                        : delta_rule_between(rows[half], cum[column]);
    });
}

// Multiplies row i of a strip by factor[half] of its lane.
template <int NS>
__device__ static inline void delta_rule_scale_rows(float (&x)[1][NS][4], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < NS * 4; i++) x[0][i / 4][i % 4] *= factor[i % 4 / 2];
}

// The tile's sums in shared memory, as other kernels read them. Only after __syncthreads they are there.
__device__ static inline void delta_rule_load_cum(float* cum, const DeltaBlock& block,
                                                  const DeltaWork& work) {
    if (threadIdx.x < DELTA_CHUNK)
        cum[threadIdx.x] = work.factors[block.tile * DELTA_FACTORS + DELTA_CUM + threadIdx.x];
}

// Factors of the lane's two rows of a strip
__device__ static inline void delta_rule_row_factors(float (&factor)[2], int which, int first_row,
                                                     const DeltaBlock& block, const DeltaWork& work) {
    const float* from = work.factors + block.tile * DELTA_FACTORS + which + first_row + threadIdx.x % 32 / 4;
    factor[0] = from[0], factor[1] = from[8];
}

// Writes the tile's factors, and its sums to shared memory. Called by all threads.
__device__ static inline void delta_rule_make_factors(float* cum, const float* log_decay,
                                                      const DeltaBlock& block, const DeltaWork& work,
                                                      const ScanShape& s, const DeltaWalls& walls) {
    if (threadIdx.x >= 32) return;
    const int lane = (int)threadIdx.x;
    const int64_t head = block.tile / work.chunks;
    float sum[2], total = 0;
    for (int half = 0; half < 2; half++) {
        int t = block.first + 32 * half + lane;
        float x = t < s.T ? 1.44269504f * log_decay[(head / s.NH * s.T + t) * s.NH + head % s.NH] : 0;
        for (int step = 1; step < 32; step *= 2) {
            float before = __shfl_up_sync(~0u, x, step);
            if (lane >= step) x += before;
        }
        sum[half] = total + x;
        total += __shfl_sync(~0u, x, 31);
    }
    float* factors = work.factors + block.tile * DELTA_FACTORS;
    for (int half = 0; half < 2; half++) {
        int i = 32 * half + lane;
        cum[i] = factors[DELTA_CUM + i] = sum[half];
        factors[DELTA_SINCE + i] = i < walls.first() ? exp2f(sum[half]) : 0;
        factors[DELTA_UNTIL + i] = i >= walls.last() ? delta_rule_between(total, sum[half]) : 0;
    }
}

// ----------------------------------------------------------------------------
// W and U

struct DeltaPrepare {
    static constexpr int THREADS = DeltaBlock::THREADS, STRIDE = DELTA_CHUNK + 4;
    struct Shared {
        bf16 k[DELTA_ROWS], v[DELTA_ROWS], inverse_beta[DELTA_CHUNK * DELTA_CHUNK]; // T diag(beta)
        union {
            struct {
                float a[DELTA_CHUNK][STRIDE]; // A^T
                float t[DELTA_CHUNK][STRIDE]; // T
            };
            bf16 out[THREADS / 32][16 * DELTA_D];
        };
        float beta[DELTA_CHUNK], cum[DELTA_CHUNK];
    };
    static_assert(3 * (sizeof(Shared) + 1024) <= 227 << 10, "three thread blocks fit on an SM");
};

// T = (I + A)^-1 in fp32, in blocks of 16 rows: those on the diagonal by forward substitution, then from the
// top T_r = -T_rr sum over c < r of A_rc T_c.
__device__ static inline void delta_rule_inverse(float (*t)[DeltaPrepare::STRIDE],
                                                 const float (*a)[DeltaPrepare::STRIDE]) {
    const int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32;
    for (int i = tid; i < DELTA_CHUNK * DELTA_CHUNK; i += DeltaPrepare::THREADS)
        t[i / DELTA_CHUNK][i % DELTA_CHUNK] = 0;
    __syncthreads();
    if (lane < 16) { // a column of the warp's block
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            x[i] = i == lane;
#pragma unroll
            for (int k = 0; k < i; k++) x[i] -= a[warp * 16 + k][warp * 16 + i] * x[k];
            t[warp * 16 + i][warp * 16 + lane] = x[i];
        }
    }
    const int column = tid % DELTA_CHUNK, half = tid / DELTA_CHUNK * 8; // 8 rows of a column
    for (int r = 16; r < DELTA_CHUNK; r += 16) {
        float sum[8] = {}, x[8] = {};
        __syncthreads(); // T's rows before r are complete
#pragma unroll 4
        for (int k = 0; k < r; k++) {
            const float4 low = *(const float4*)&a[k][r + half], high = *(const float4*)&a[k][r + half + 4];
            float y = t[k][column];
            sum[0] += low.x * y;
            sum[1] += low.y * y;
            sum[2] += low.z * y;
            sum[3] += low.w * y;
            sum[4] += high.x * y;
            sum[5] += high.y * y;
            sum[6] += high.z * y;
            sum[7] += high.w * y;
        }
        if (column < r)
            for (int i = 0; i < 8; i++) t[r + half + i][column] = sum[i];
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < 16; k++) {
            float y = t[r + k][column];
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] -= t[r + half + i][r + k] * y;
        }
        __syncthreads();
        if (column < r)
            for (int i = 0; i < 8; i++) t[r + half + i][column] = x[i];
    }
    __syncthreads();
}

// The operand T diag(beta) of U, or with `since` T diag(beta e^g) of W; with `inverse` also T
__device__ static inline void delta_rule_scale_inverse(DeltaPrepare::Shared& shared, bool since,
                                                       bf16* inverse) {
    for (int i = (int)threadIdx.x; i < DELTA_CHUNK * DELTA_CHUNK / 8; i += DeltaPrepare::THREADS) {
        float x[8], scaled[8];
        for (int c = 0; c < 8; c++) {
            x[c] = shared.t[i / 8][i % 8 * 8 + c];
            scaled[c] = x[c] * shared.beta[i % 8 * 8 + c];
            if (since) scaled[c] *= exp2f(shared.cum[i % 8 * 8 + c]);
        }
        *(Raw8*)((char*)shared.inverse_beta + sm80_chunk_offset<DELTA_CHUNK>(i / 8, i % 8)) = pack8(scaled);
        if (inverse) store16(inverse + i * 8, pack8(x));
    }
}

template <bool DOCS, bool DECAY>
static __global__ void __launch_bounds__(DeltaPrepare::THREADS, 3)
    delta_rule_prepare_kernel(const __grid_constant__ Scan a, const __grid_constant__ DeltaWork work,
                              const __grid_constant__ ScanShape s) {
    typedef DeltaPrepare F;
    extern __shared__ __align__(1024) char shared_bytes[];
    F::Shared& shared = *(F::Shared*)shared_bytes;
    DeltaBlock block(work, s);
    int tid = (int)threadIdx.x, row = tid / 32 * 16;
    block.copy(shared.k, a.k + block.keys, s, s.key_row);
    cp_async_commit_group();
    block.copy(shared.v, a.v + block.values, s, s.value_row);
    cp_async_commit_group();
    delta_rule_load_beta(shared.beta, a.beta, block, work, s);
    DeltaWalls walls = {};
    if (DOCS) walls = DeltaWalls::of(block, work, s);
    if (DECAY) delta_rule_make_factors(shared.cum, a.log_decay, block, work, s, walls);
    cp_async_wait_group<1>();
    __syncthreads();

    float kk[1][8][4];
    scan_clear(kk);
    scan_matmul<DELTA_D>(kk, TileA<DELTA_D, false>(shared.k, row), TileB<DELTA_D, false>(shared.k));
    delta_rule_mask<false, true, DOCS>(kk, row, walls);
    if (DECAY) delta_rule_decay<false>(kk, row, shared.cum);
    sm80_for_each(kk,
                  [&](float& y, int, int, int i, int j) { shared.a[j][row + i] = y * shared.beta[row + i]; });
    delta_rule_inverse(shared.t, shared.a);
    delta_rule_scale_inverse(shared, DECAY, work.inverse + block.tile * DELTA_CHUNK * DELTA_CHUNK);
    cp_async_wait_all();
    __syncthreads();
    TileA<DELTA_CHUNK, false> inverse(shared.inverse_beta, row);
    const int slices = DECAY ? work.slices : 1;
    for (int i = 0; i < 1 + slices; i++) { // W, then U's slices, whose values take turns in v and k
        float acc[1][16][4];
        if (DECAY && i > 0) {
            cp_async_wait_all();
            __syncthreads(); // the operands before have been read, and the slice's values are there
            if (i < slices)
                block.copy(i % 2 ? shared.k : shared.v, a.v + block.values + i * DELTA_D, s, s.value_row);
            if (i == 1) delta_rule_scale_inverse(shared, false, NULL);
            if (i == 1) __syncthreads();
        }
        scan_clear(acc);
        scan_matmul<DELTA_CHUNK>(acc, inverse, TileB<DELTA_D, true>(i % 2 ? shared.v : shared.k));
        if (DOCS && i == 0) delta_rule_clear_rows(acc, row, walls.first());
        bf16* to = i ? work.u + (block.tile * slices + i - 1) * DELTA_ROWS : work.w + block.tile * DELTA_ROWS;
        sm80_store<DELTA_D>(to + row * DELTA_D, DELTA_D, 16, shared.out[tid / 32], acc,
                            [](int, int) { return 1; });
    }
}

static inline void delta_rule_prepare(const DeltaWork* work, const Scan* a, const ScanShape* s,
                                      cudaStream_t stream) {
    auto kernel = s->decays      ? s->doc_start ? delta_rule_prepare_kernel<true, true>
                                                : delta_rule_prepare_kernel<false, true>
                       : s->doc_start ? delta_rule_prepare_kernel<true, false>
                                 : delta_rule_prepare_kernel<false, false>;
    scan_launch<DeltaPrepare>(kernel, s->B * s->NH * work->chunks, stream, *a, *work, *s);
}
