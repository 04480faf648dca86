/*
What the Hopper kernels of forgetting attention share: tiles, stages and registers for each head size, how the
work is laid out, how a kernel is launched. How they run stands in attention_sm90_forward.cuh and
attention_sm90_backward.cuh.
*/
#ifndef LLMC_ATTENTION_SM90_CUH
#define LLMC_ATTENTION_SM90_CUH

#include "mma_sm90.cuh"

#define SM90_BLOCK 128 // tokens of a block in first_key_block and last_query_block
#define SM90_LOG2E 1.4426950408889634

// ----------------------------------------------------------------------------
// what to run

// Forward: consumer warpgroups take 64 queries each and share tiles of keys. 192 queries read a tile of keys
// a third less often than 128; at dh 128 their registers would not do.
template <int DH> struct Sm90ForwardTiles;
template <> struct Sm90ForwardTiles<64> {
    static constexpr int CONSUMERS = 3, KEYS = 128, STAGES = 4;
    static constexpr bool IN_TURN = false;
    static constexpr int CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 32;
};
template <> struct Sm90ForwardTiles<128> {
    static constexpr int CONSUMERS = 2, KEYS = 128, STAGES = 2;
    static constexpr bool IN_TURN = true;
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
};

// sqrt(dh): scores are q.k / ROOT, and with exponentials to base 2, q.k SCALE
template <int DH> struct Sm90Scale {
    static constexpr double ROOT = DH == 64 ? 8 : 11.313708498984761;
    static constexpr float SCALE = (float)(SM90_LOG2E / ROOT);
};

// ----------------------------------------------------------------------------
// the work: every head's tiles of queries or keys

// A tile: one head, and its `place`-th tile, the longest first.
struct Sm90Work {
    int head, place;
};

struct Sm90Shape {
    int T, NH, blocks;     // blocks = ceil(T / SM90_BLOCK)
    int heads, group;      // heads = B NH, taken up in groups
    int tiles;             // a head's
    const int* head_order; // NULL: heads as they stand

    __device__ unsigned works() const { return (unsigned)heads * (unsigned)tiles; }
    // Within a group of heads the longest tiles come first, so that the GPU does not end up waiting for a few
    // of them; a group is small enough for what its tiles share to stay in L2.
    __device__ Sm90Work work(unsigned index) const {
        int first = (int)(index / (unsigned)(group * tiles)) * group;
        unsigned within = index - (unsigned)first * (unsigned)tiles,
                 size = (unsigned)min(group, heads - first);
        int head = first + (int)(within % size);
        return {head_order ? head_order[head] : head, (int)(within / size)};
    }
};

// Tiles of `rows` queries or keys
static inline Sm90Shape sm90_shape(int64_t B, int64_t T, int64_t NH, int64_t dh, int rows,
                                   const int* head_order) {
    Sm90Shape shape;
    shape.T = (int)T, shape.NH = (int)NH, shape.blocks = (int)ceil_div<int64_t>(T, SM90_BLOCK);
    shape.heads = (int)(B * NH), shape.tiles = (int)ceil_div<int64_t>(T, rows);
    shape.head_order = head_order;
    int device, l2;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
    int64_t head_bytes = 2 * T * dh * (int64_t)sizeof(bf16); // k and v, or q and dout
    int64_t groups = ceil_div<int64_t>(shape.heads, l2 / 2 > head_bytes ? l2 / 2 / head_bytes : 1);
    shape.group = (int)ceil_div<int64_t>(shape.heads, groups);
    return shape;
}

// One thread block for each multiprocessor, or for each piece of work where those are fewer.
template <class Shared, class... Parameters, class... Arguments>
static inline void sm90_launch(void (*kernel)(Parameters...), int64_t works, int threads, cudaStream_t stream,
                               Arguments... arguments) {
    static_assert(sizeof(Shared) <= 227 << 10, "what sm_90 has for a thread block");
    int device, processors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    kernel<<<(unsigned)(works < processors ? works : processors), threads, sizeof(Shared), stream>>>(
        arguments...);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_ATTENTION_SM90_CUH
