/*
FP8: tensors of one byte an element, which cuBLASLt multiplies at twice the rate of bf16.

    q = round(scale x)     E4M3: 3 bits of mantissa, up to 448; E5M2: 2 bits, up to 57344
    x ~ q inverse          scale is a power of two, so that only q is rounded

A kernel that computes a tensor writes it in FP8 too, from the bits of bf16 that it has rounded it to, or
would have: the FP8 tensor is a function of the bf16 tensor. It also finds amax, the largest absolute value,
from which layers/fp8_state.cuh computes a later scale. What exceeds the range saturates. Eight neighbours of
which one is infinite or NaN all become NaN, so that a value that is not finite still reaches loss and
gradient.

A kernel is compiled for each format of what it writes, FP8_NONE among them, where an Fp8Writer does nothing:

    Fp8Writer<F> fp8(tensor);                     // before loads are awaited: reads the scale
    if (!fp8.alone()) store16(y + at, raw);
    fp8.store(at, raw);                           // eight elements
    fp8.finish();                                 // once a thread

amax is kept as bits of bf16, which are ordered as the values: an atomic maximum does not depend on the order,
and the bits are the same in every run. One address would take an atomic of each warp one after another, so
there are FP8_LANES, in cache lines of their own.
*/
#pragma once

#include <cuda_fp8.h>
#include "cuda_common.cuh"

enum Fp8Format { FP8_NONE, FP8_E4M3, FP8_E5M2 };

enum { FP8_LANES = 32, FP8_LANE_STRIDE = 32 }; // words

// cuBLAS reads the inverse, 1 / scale, on the device; from 12.9 on it rejects one that is not aligned to 16
// bytes.
struct alignas(16) Fp8Scale {
    float inverse, scale;
};

// A tensor that is written in FP8; all zero: one that is not.
typedef struct {
    fp8* data;             // NULL: bf16 alone, while amax is found for a first scale
    int64_t stride;        // elements from one row to the next
    const Fp8Scale* scale; // on the device
    uint32_t* amax;        // [FP8_LANES * FP8_LANE_STRIDE] of the step so far
    bool alone;            // nothing reads it in bf16, which need not be written
    fp8* transposed;       // [columns, rows], transposed for a weight gradient; NULL: not written
} Fp8Tensor;

// The tensor from row `first` on.
static inline Fp8Tensor fp8_slice(const Fp8Tensor* all, int64_t first) {
    Fp8Tensor slice = *all;
    if (all->data) slice.data += first * all->stride;
    return slice;
}

// ----------------------------------------------------------------------------
// numbers

enum { FP8_NOT_FINITE = 0x7f80 }; // bits of bf16 from which on a value is infinite or NaN

// The largest power of two by which amax, as bits of bf16, can be multiplied within the format's range; 1 for
// what is not finite. An amax of 0 says nothing, as after a first step of which no target counts: inputs are
// near 1, and gradients from 2^-40 to 2^-8, as those of the mean loss over thousands of tokens are.
__host__ __device__ static inline Fp8Scale fp8_scale(uint32_t amax, Fp8Format format) {
    const int most = format == FP8_E4M3 ? 8 : 15;      // the largest number is 1.75 times two to this
    int exponent = (int)(amax >> 7) - 127;             // of amax; -127 where it is denormal
    exponent = most - exponent - ((amax & 0x7f) > 96); // 96: a mantissa of 1.75
    if (exponent > 100) exponent = 100;
    if (amax == 0) exponent = format == FP8_E4M3 ? 0 : 24;
    if (amax >= FP8_NOT_FINITE) exponent = 0;
    return {ldexpf(1, -exponent), ldexpf(1, exponent)};
}

// Eight elements in FP8. amax: the largest of the elements of even and of odd index, as pairs of bf16 in a
// word.
template <Fp8Format F>
__device__ static inline uint2 fp8_pack8(const Raw8& raw, float scale, uint32_t& amax) {
    const uint32_t sign = 0x7fff7fffu;
    const uint32_t pairs =
        __vmaxu2(__vmaxu2(raw.x & sign, raw.y & sign), __vmaxu2(raw.z & sign, raw.w & sign));
    float x[8];
    uint16_t packed[4];
    unpack8(x, raw);
    amax = __vmaxu2(amax, pairs);
    if (__vcmpgeu2(pairs, FP8_NOT_FINITE << 16 | FP8_NOT_FINITE)) scale = NAN;
    for (int i = 0; i < 4; i++)
        packed[i] = __nv_cvt_float2_to_fp8x2(make_float2(x[2 * i] * scale, x[2 * i + 1] * scale),
                                             __NV_SATFINITE, F == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2);
    return make_uint2(packed[0] | (uint32_t)packed[1] << 16, packed[2] | (uint32_t)packed[3] << 16);
}

// ----------------------------------------------------------------------------
// amax

// Called by any lanes of a warp, each with an amax of fp8_pack8: *lanes becomes at least the largest.
__device__ static inline void fp8_add_amax(uint32_t* lanes, uint32_t pair) {
    const unsigned mask = __activemask();
    const uint32_t amax = __reduce_max_sync(mask, max(pair & 0xffff, pair >> 16));
    const unsigned lane = (blockIdx.x + blockIdx.y) % FP8_LANES;
    if (threadIdx.x % 32 == (unsigned)__ffs((int)mask) - 1) atomicMax(lanes + lane * FP8_LANE_STRIDE, amax);
}

// The amax of a tensor, in every lane of a warp.
__device__ static inline uint32_t fp8_amax(const uint32_t* lanes) {
    static_assert(FP8_LANES == 32, "one for each lane of a warp");
    return __reduce_max_sync(~0u, lanes[threadIdx.x % 32 * FP8_LANE_STRIDE]);
}

// ----------------------------------------------------------------------------
// what a kernel writes

template <Fp8Format F> struct Fp8Writer {
    const Fp8Tensor& to;
    float scale;
    uint32_t amax;

    __device__ explicit Fp8Writer(const Fp8Tensor& tensor)
        : to(tensor), scale(tensor.scale->scale), amax(0) {}
    __device__ bool alone() const { return to.alone; }
    __device__ uint2 store(int64_t at, const Raw8& raw) { // returns what it has written
        const uint2 bytes = fp8_pack8<F>(raw, scale, amax);
        __stcs((uint2*)(to.data + at), bytes);
        return bytes;
    }
    __device__ void store_one(int64_t at, bf16 x) { // amax apart; x is finite
        to.data[at] = __nv_cvt_float_to_fp8(__bfloat162float(x) * scale, __NV_SATFINITE,
                                            F == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2);
    }
    __device__ void finish() const { fp8_add_amax(to.amax, amax); }
};

template <> struct Fp8Writer<FP8_NONE> {
    __device__ explicit Fp8Writer(const Fp8Tensor&) {}
    __device__ static constexpr bool alone() { return false; }
    __device__ void store(int64_t, const Raw8&) {}
    __device__ void store_one(int64_t, bf16) {}
    __device__ void finish() const {}
};

// ----------------------------------------------------------------------------
// a tensor that the kernel before does not write: one whose first scale is not known yet, of which amax is
// found; one that comes from other ranks

// A thread has eight columns; blockIdx.x walks over the rows.
__global__ static void __launch_bounds__(512)
    fp8_measure_kernel(uint32_t* lanes, const bf16* x, int64_t rows, int64_t columns, int64_t stride) {
    const int64_t c = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    uint32_t amax = 0;
    for (int64_t row = blockIdx.x; c < columns && row < rows; row += gridDim.x)
        fp8_pack8<FP8_E4M3>(load_raw8_once(x + row * stride + c), 1, amax);
    fp8_add_amax(lanes, amax);
}

// Finds amax of x [rows, columns] where that is all that is wanted of it in FP8. columns and stride are
// multiples of 8.
static inline void fp8_measure(const Fp8Tensor* tensor, const bf16* x, int64_t rows, int64_t columns,
                               int64_t stride, cudaStream_t stream) {
    if (!tensor->amax || tensor->data || rows == 0) return;
    RowGrid grid = row_grid(rows, columns);
    grid.blocks.x = min(grid.blocks.x, 1024u);
    CUDA_LAUNCH(fp8_measure_kernel, grid.blocks, grid.threads, stream, tensor->amax, x, rows, columns,
                stride);
}

template <Fp8Format F>
__global__ static void __launch_bounds__(512)
    fp8_convert_kernel(const __grid_constant__ Fp8Tensor tensor, const bf16* x, int64_t rows, int64_t columns,
                       int64_t stride) {
    const int64_t c = 8 * ((int64_t)blockIdx.y * blockDim.x + threadIdx.x);
    Fp8Writer<F> quantized(tensor);
    for (int64_t row = blockIdx.x; c < columns && row < rows; row += gridDim.x)
        quantized.store(row * tensor.stride + c, load_raw8(x + row * stride + c));
    quantized.finish();
}

// Writes x [rows, columns] in FP8. columns and strides are multiples of 8.
template <Fp8Format F>
static inline void fp8_convert(const Fp8Tensor* tensor, const bf16* x, int64_t rows, int64_t columns,
                               int64_t stride, cudaStream_t stream) {
    if (!tensor->data || rows == 0) return;
    RowGrid grid = row_grid(rows, columns);
    grid.blocks.x = min(grid.blocks.x, 1024u);
    CUDA_LAUNCH(fp8_convert_kernel<F>, grid.blocks, grid.threads, stream, *tensor, x, rows, columns, stride);
}

// ----------------------------------------------------------------------------
// transposed copies, for GEMMs whose sums are over rows: cuBLASLt takes operands with contiguous k

// rows and columns of a thread block of 256 threads, of which 16 have a row
enum { FP8_TILE = 128, FP8_TILE_STEP = 256 / 16, FP8_TILE_ROWS = FP8_TILE / FP8_TILE_STEP };

// The thread block's tile of a tensor: where it begins, and the thread's eight columns, from `column` on, of
// rows row + FP8_TILE_STEP i.
struct Fp8Tile {
    int first_row, first_column, group, row, column;

    __device__ explicit Fp8Tile(int columns, int tile = (int)block_from_end()) {
        const int across = ceil_div<int>(columns, FP8_TILE);
        first_row = tile / across * FP8_TILE, first_column = tile % across * FP8_TILE;
        group = (int)threadIdx.x % 16;
        row = first_row + (int)threadIdx.x / 16, column = first_column + 8 * group;
    }
};

// The number of thread blocks
static inline int64_t fp8_tiles(int64_t rows, int64_t columns) {
    const int64_t tiles = ceil_div<int64_t>(rows, FP8_TILE) * ceil_div<int64_t>(columns, FP8_TILE);
    assert(rows % 4 == 0 && columns % 8 == 0 && rows < INT32_MAX / 2 && tiles < INT32_MAX);
    return tiles;
}

// A tile in shared memory, which becomes that of the transposed copy. Word w of row r is at w ^ (r / 4): no
// bank conflicts where it is read.
struct Fp8Transposed {
    uint32_t words[FP8_TILE][FP8_TILE / 4];

    // The thread's eight columns of its i-th row
    __device__ void put(const Fp8Tile& tile, int i, uint2 bytes) {
        const int row = tile.row - tile.first_row + FP8_TILE_STEP * i;
        words[row][(2 * tile.group) ^ (row / 4)] = bytes.x;
        words[row][(2 * tile.group + 1) ^ (row / 4)] = bytes.y;
    }
    // Behind __syncthreads: writes the tile to t [columns, rows]; rows is a multiple of 4. A lane has four
    // rows, a warp all of them, of four columns at a time.
    __device__ void store(fp8* t, const Fp8Tile& tile, int rows, int columns) const {
        const int lane = (int)threadIdx.x % 32, r = 4 * lane, row = tile.first_row + r;
        for (int word = (int)threadIdx.x / 32; word < FP8_TILE / 4; word += 8) {
            uint32_t in[4], out[4];
            for (int j = 0; j < 4; j++) in[j] = words[r + j][word ^ lane];
            const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140), // columns 0 and 1 of rows 0 and 1
                low23 = __byte_perm(in[2], in[3], 0x5140), high01 = __byte_perm(in[0], in[1], 0x7362),
                           high23 = __byte_perm(in[2], in[3], 0x7362);
            out[0] = __byte_perm(low01, low23, 0x5410), out[1] = __byte_perm(low01, low23, 0x7632);
            out[2] = __byte_perm(high01, high23, 0x5410), out[3] = __byte_perm(high01, high23, 0x7632);
            for (int j = 0; j < 4; j++) {
                const int c = tile.first_column + 4 * word + j;
                if (c < columns && row < rows) *(uint32_t*)(t + (int64_t)c * rows + row) = out[j];
            }
        }
    }
};

// Eight elements as they are in memory, and in FP8
__device__ static inline Raw8 fp8_load8(const bf16* p) { return load_raw8(p); }
__device__ static inline uint2 fp8_load8(const fp8* p) { return *(const uint2*)p; }
template <Fp8Format F> __device__ static inline uint2 fp8_bytes(const Raw8& raw, float scale) {
    uint32_t amax = 0;
    return fp8_pack8<F>(raw, scale, amax);
}
template <Fp8Format F> __device__ static inline uint2 fp8_bytes(const uint2& raw, float) { return raw; }

template <Fp8Format F, class T>
__global__ static void __launch_bounds__(256)
    fp8_transpose_kernel(fp8* t, const T* x, int64_t stride, int rows, int columns, const Fp8Scale* scale) {
    __shared__ Fp8Transposed transposed;
    const Fp8Tile tile(columns);
    const float by = scale->scale;
    decltype(fp8_load8(x)) raw[FP8_TILE_ROWS];
#pragma unroll
    for (int i = 0; i < FP8_TILE_ROWS; i++) {
        const int row = tile.row + FP8_TILE_STEP * i;
        raw[i] = {};
        if (tile.column < columns && row < rows) raw[i] = fp8_load8(x + row * stride + tile.column);
    }
#pragma unroll
    for (int i = 0; i < FP8_TILE_ROWS; i++) transposed.put(tile, i, fp8_bytes<F>(raw[i], by));
    __syncthreads();
    transposed.store(t, tile, rows, columns);
}

// t [columns, rows] = x [rows, columns] in FP8, of x in bf16 or FP8. columns and stride are multiples of 8,
// rows of 4. amax is not found: the kernel that wrote x has done so.
template <Fp8Format F, class T>
static inline void fp8_transpose(fp8* t, const T* x, int64_t stride, int64_t rows, int64_t columns,
                                 const Fp8Scale* scale, cudaStream_t stream) {
    assert(stride % 8 == 0);
    auto kernel = fp8_transpose_kernel<F, T>;
    CUDA_LAUNCH(kernel, fp8_tiles(rows, columns), 256, stream, t, x, stride, (int)rows, (int)columns, scale);
}

// The transposed copy of a tensor [rows, columns], unless it has no place for it.
template <Fp8Format F>
static inline void fp8_turn(const Fp8Tensor* x, int64_t rows, int64_t columns, cudaStream_t stream) {
    if (x->transposed) fp8_transpose<F>(x->transposed, x->data, x->stride, rows, columns, x->scale, stream);
}
