/*
Shared by all attention kernels: the structs of attention's tensors, the blocks of pruning, the scale of the
scores, the gate's arithmetic, the schedule of tiles, and the kernel launch. Layouts are those of
attention.cuh.

The gate. cum_logf falls to -1e5 and beyond, so its differences are taken in double, relative to an anchor
token. For a block of keys before the block of queries, an anchor between them splits the difference:

    cum_logf_i - cum_logf_j = (cum_logf_i - anchor) + (anchor - cum_logf_j)

Both terms are <= 0. Where the weight matters both are small, so float is precise enough; a large one makes
the weight underflow, as it should. One term is the initial value of the score's accumulator (acc_init),
divided by the score's scale. The other is added to the exponent together with row_max or lse. So the gate
costs no instruction per score.

In a block on the diagonal both terms may be large and of opposite sign, and would cancel. There each token's
difference to the anchor is stored as two floats, high and low part, and a pair's difference is high minus
high plus low minus low (AttentionGate).
*/
#pragma once

#include "../cuda/cuda_common.cuh"
#include "../model/shapes.h"

#define ATTENTION_BAND  64 // queries of a band head (pruning.cuh) attend to as many keys, and to those before
#define ATTENTION_LOG2E 1.4426950408889634

// ----------------------------------------------------------------------------
// tensors of attention

// The blocks between which attention is computed, and the order of heads that balances the work best
// (pruning.cuh). With a window, the bounds leave out what it hides.
typedef struct {
    int* first_key_block;  // [B, NH, blocks], the first block of keys that a block of queries attends to
    int* last_query_block; // [B, NH, blocks], the last block of queries that attends to a block of keys
    // [B NH + 1] order in which kernels take the heads b NH + h: most work first, band heads (pruning.cuh)
    // last; then one more element, the number of heads that are not band heads
    int* head_order;
} AttentionBounds;

typedef struct {
    bf16* o;
    float* lse;
    const bf16 *q, *k, *v;
    const double* cum_logf;        // NULL: no gate
    const AttentionBounds* bounds; // NULL: no pruning
    void* scratch;                 // attention_scratch_bytes
    // First query to compute, with which o and q begin: [T - first_query, NH, dh]. A multiple of
    // ATTENTION_FIRST_QUERY; B is 1 unless it is 0.
    int64_t first_query;
} AttentionForward;

#define ATTENTION_FIRST_QUERY 384 // a multiple of the number of queries of every kernel's tile

typedef struct {
    // As q, k and v. Kernels write dk and dv [B, T, NH, dh]; attention_backward sums those of a group.
    bf16 *dq, *dk, *dv;
    float* dcum_logf; // NULL: the gate is not learned
    const bf16 *dout, *q, *k, *v, *o;
    const float* lse;
    const float* delta; // [B, NH, T], dout_i o_i with dout as rounded; NULL: computed here
    const double* cum_logf;
    const AttentionBounds* bounds;
    bool deterministic; // false: the last bits of dq and dcum_logf may differ from run to run
    void* scratch;
} AttentionBackward;

// ----------------------------------------------------------------------------
// scores and the gate

// ROOT = sqrt(dh): scores are q k / ROOT; SCALE: as exponents to base 2 they are q k SCALE
template <int DH> struct AttentionScale {
    static constexpr float ROOT = DH == 64 ? 8 : 11.313708498984761f;
    static constexpr float SCALE = (float)ATTENTION_LOG2E / ROOT;
};

// log2(e) (cum_logf - anchor) of TOKENS tokens, each as high and low part in float
template <int TOKENS> struct AttentionGate {
    float high[TOKENS], low[TOKENS];

    __device__ void set(int token, double difference) {
        double x = difference * ATTENTION_LOG2E;
        high[token] = (float)x;
        low[token] = (float)(x - high[token]);
    }
    // log2(e) (cum_logf_i - cum_logf_j)
    __device__ float difference(int i, int j) const { return (high[i] - high[j]) + (low[i] - low[j]); }
};

// Initial accumulators of a tile of scores, one value a column. Each pair of columns is stored twice, since a
// lane holds it in two rows: one 16-byte load fills four accumulators. The backward kernels, which are bound
// by shared memory bandwidth, store it once and copy registers.
template <int COLUMNS> struct AttentionAccInit {
    float4 pair[COLUMNS / 2];

    __device__ void set(int column, float x) {
        float* to = (float*)&pair[column / 2] + column % 2;
        to[0] = to[2] = x;
    }
};

// ----------------------------------------------------------------------------
// the schedule: tiles of queries or keys, taken by thread blocks

struct AttentionTile {
    int head, tile_index; // 0: the head's longest tile
};

struct AttentionShape {
    int T, NH, blocks; // blocks = ceil(T / ATTENTION_BLOCK)
    int heads, group;  // heads = B NH, taken in groups of `group`
    int tiles_per_head;
    int64_t row_stride;     // elements from a token of a head to the next, NH dh
    uint32_t key_inverse;   // ceil(2^16 / group) of a group of query heads that read one head of keys
    int64_t key_stride;     // as row_stride, of k and v
    AttentionBounds bounds; // all NULL: no pruning, heads in memory order
    int window;             // keys that a query sees, its own the last; read where attention_windowed
    const int* tiled_heads; // the first *tiled_heads of head_order have tiles; NULL: all have. The others are
                            // band heads, which sm90_band.cuh computes

    // Offset in k and v of the first token that head b NH + h reads
    template <int DH> __device__ int64_t key_base(int head) const {
        return (int64_t)(head / NH) * T * key_stride + key_head(head % NH) * DH;
    }
    // The head of keys and values that query head h reads, h / group: exact for up to 256 heads, and much
    // faster than a division.
    __device__ int key_head(int h) const { return (int)((uint32_t)h * key_inverse >> 16); }
    __host__ __device__ unsigned tiles() const { return (unsigned)heads * (unsigned)tiles_per_head; }
    __device__ int heads_with_tiles() const { return tiled_heads ? *tiled_heads : heads; }
    // The n-th tile to compute of the first `heads` heads. Within a group of heads the longest tiles come
    // first, so that the GPU does not wait for a few of them at the end. The tensors that the tiles of a
    // group share fit into L2.
    __device__ AttentionTile tile(unsigned n, int heads) const {
        int first = (int)(n / (unsigned)(group * tiles_per_head)) * group;
        unsigned within = n - (unsigned)first * (unsigned)tiles_per_head;
        unsigned size = (unsigned)min(group, heads - first);
        int head = first + (int)(within % size);
        return {bounds.head_order ? bounds.head_order[head] : head, (int)(within / size)};
    }
    template <bool WINDOW> __device__ int first_key_block(int64_t head, int query_block) const {
        int first = bounds.first_key_block ? bounds.first_key_block[head * blocks + query_block] : 0;
        return WINDOW ? max(first, (query_block * ATTENTION_BLOCK - window + 1) / ATTENTION_BLOCK) : first;
    }
    // May be past the last block.
    template <bool WINDOW> __device__ int last_query_block(int64_t head, int key_block) const {
        int last = bounds.last_query_block ? bounds.last_query_block[head * blocks + key_block] : blocks;
        int last_key = (key_block + 1) * ATTENTION_BLOCK - 1;
        return WINDOW ? min(last, (last_key + window - 1) / ATTENTION_BLOCK) : last;
    }
};

// Returns whether the window hides any keys. Kernels are compiled with and without code for a window.
static inline bool attention_windowed(const HeadShape* s) { return s->window > 0 && s->window < s->T; }

// Schedule for tiles of `rows` queries or keys. bytes_per_channel: of the tensors that a head's tiles share,
// a token; 4 for k and v, or q and dout. bounds may be NULL.
static inline AttentionShape attention_shape(const HeadShape* s, int rows, const AttentionBounds* bounds,
                                             int64_t bytes_per_channel) {
    assert(s->NH <= (head_group(s) == 1 ? 1 << 16 : 256)); // key_head
    AttentionShape shape = {.T = (int)s->T,
                            .NH = (int)s->NH,
                            .blocks = (int)head_blocks(s),
                            .heads = (int)(s->B * s->NH),
                            .tiles_per_head = (int)ceil_div<int64_t>(s->T, rows),
                            .row_stride = s->NH * s->dh,
                            .key_inverse = (uint32_t)ceil_div<int64_t>(1 << 16, head_group(s)),
                            .key_stride = key_heads(s) * s->dh,
                            .window = (int)s->window};
    if (bounds) shape.bounds = *bounds;
    int64_t l2 = device_attribute(cudaDevAttrL2CacheSize), head_bytes = s->T * s->dh * bytes_per_channel;
    int64_t groups = ceil_div<int64_t>(shape.heads, l2 / 2 > head_bytes ? l2 / 2 / head_bytes : 1);
    shape.group = (int)ceil_div<int64_t>(shape.heads, groups);
    return shape;
}

// Copy of *a with o and q moved to where query 0 would be, for kernels that index them by query
static inline AttentionForward attention_from_first_query(const AttentionForward* a, const HeadShape* s) {
    AttentionForward at = *a;
    uintptr_t before = (uintptr_t)(a->first_query * s->NH * s->dh) * sizeof(bf16);
    assert(a->first_query % ATTENTION_FIRST_QUERY == 0 && (a->first_query == 0 || s->B == 1));
    at.o = (bf16*)((uintptr_t)a->o - before);
    at.q = (const bf16*)((uintptr_t)a->q - before);
    return at;
}

// Launches `grid` thread blocks of F::THREADS threads with an F::Shared, of at most MAX_KIB, as dynamic
// shared memory; CUDA wants more than 48 KiB requested.
template <class F, int MAX_KIB, class... Parameters, class... Arguments>
static inline void attention_launch(void (*kernel)(Parameters...), int64_t grid, cudaStream_t stream,
                                    Arguments... arguments) {
    constexpr size_t SHARED = sizeof(typename F::Shared);
    static_assert(SHARED <= MAX_KIB << 10, "more shared memory than a thread block may have");
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)SHARED));
    kernel<<<(unsigned)grid, F::THREADS, SHARED, stream>>>(arguments...);
    CUDA_CHECK_LAUNCH();
}
