/*
What all attention kernels share: the blocks in which attention is pruned, the scale of scores, the order in
which heads and their tiles are taken up, and the launch.
*/
#ifndef LLMC_ATTENTION_SHAPE_CUH
#define LLMC_ATTENTION_SHAPE_CUH

#include "../cuda/cuda_common.cuh"

#define ATTENTION_BLOCK 128 // queries or keys that rest with a thread block, and the grain of pruning
#define ATTENTION_LOG2E 1.4426950408889634

// sqrt(dh): scores are q.k / ROOT, and with exponentials to base 2, q.k SCALE
template <int DH> struct AttentionScale {
    static constexpr float ROOT = DH == 64 ? 8 : 11.313708498984761f;
    static constexpr float SCALE = (float)ATTENTION_LOG2E / ROOT;
};

// A piece of work: one head, and its `place`-th tile of queries or keys, the longest first.
struct AttentionWork {
    int head, place;
};

struct AttentionShape {
    int T, NH, blocks;     // blocks = ceil(T / ATTENTION_BLOCK)
    int heads, group;      // heads = B NH, taken up in groups
    int tiles;             // a head's
    int64_t row;           // elements from a token of a head to the next, NH dh
    const int* head_order; // NULL: heads as they stand

    __device__ unsigned works() const { return (unsigned)heads * (unsigned)tiles; }
    // Within a group of heads the longest tiles come first, so that the GPU does not end up waiting for a few
    // of them; a group is small enough for what its tiles share to stay in L2.
    __device__ AttentionWork work(unsigned index) const {
        int first = (int)(index / (unsigned)(group * tiles)) * group;
        unsigned within = index - (unsigned)first * (unsigned)tiles;
        unsigned size = (unsigned)min(group, heads - first);
        int head = first + (int)(within % size);
        return {head_order ? head_order[head] : head, (int)(within / size)};
    }
};

// Tiles of `rows` queries or keys, which share bytes_a_channel of each token: 4 where these are k and v, or
// q and dout.
static inline AttentionShape attention_shape(int64_t B, int64_t T, int64_t NH, int64_t dh, int rows,
                                             const int* head_order, int64_t bytes_a_channel) {
    AttentionShape shape;
    shape.T = (int)T, shape.NH = (int)NH, shape.blocks = (int)ceil_div<int64_t>(T, ATTENTION_BLOCK);
    shape.heads = (int)(B * NH), shape.tiles = (int)ceil_div<int64_t>(T, rows);
    shape.row = NH * dh;
    shape.head_order = head_order;
    int device, l2;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
    int64_t head_bytes = T * dh * bytes_a_channel;
    int64_t groups = ceil_div<int64_t>(shape.heads, l2 / 2 > head_bytes ? l2 / 2 / head_bytes : 1);
    shape.group = (int)ceil_div<int64_t>(shape.heads, groups);
    return shape;
}

// Launches a kernel whose thread blocks have a Shared, of up to MOST_KIB, in dynamic shared memory: more than
// 48 KiB is given only when asked for.
template <class Shared, int MOST_KIB, class... Parameters, class... Arguments>
static inline void attention_launch(void (*kernel)(Parameters...), int64_t grid, int threads,
                                    cudaStream_t stream, Arguments... arguments) {
    static_assert(sizeof(Shared) <= MOST_KIB << 10, "more shared memory than the GPU has for a thread block");
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    kernel<<<(unsigned)grid, threads, sizeof(Shared), stream>>>(arguments...);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_ATTENTION_SHAPE_CUH
