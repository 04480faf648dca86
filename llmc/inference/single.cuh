/*
A step that extends one sequence by one token, all layers and lm_head, as one kernel: what the kernels of
layers.cuh compute, with the same bits.

A thread block stays on each multiprocessor. Its producer warp streams its share of all weights through a ring
in shared memory, however far the other warps have come; these eight (single_matrix.cuh) go through the
layers:

    in-projection    proj = Wqkv norm(x)
    attention        as a cluster of decode.cuh, but of blocks h n to h n + n - 1 for head h, so many that all
                     heads have some; page table, keys and values are read a layer ahead
    join             the first of them joins the parts of the head, norms and gates: y
    out-projection   mid = x + Wo y
    gate and up      act = swiglu(Wgu norm(mid))
    down             x = mid + Wd act

What one of them hands to the next are words with tags, which the blocks poll. A tag belongs to a layer of a
step and is used again 2^32 layers later. A word is written again only when all that it was read for has been
read, as each part needs all of the part before it, and blocks without a share of a part do not read its
input.

All blocks have to run at once. They do, as each takes a multiprocessor's shared memory and there are as many
blocks as multiprocessors; kernels of other streams delay them.

Called by the GPU trainer on Hopper.
*/
#pragma once

#include "decode.cuh"
#include "single_matrix.cuh"

// Words; channels are in pairs.
typedef struct {
    uint2 *x, *mid, *proj, *y, *act; // [d/2], [d/2], [S/2], [NH dh/2], [I/2]
    uint2* parts;                    // [NH, DECODE_PARTS, dh + 2] o of a part, max and sum
    int stride;                      // from a copy of x, mid, y and act to the next one
} SingleWords;

typedef struct {
    DecodeArgs attention; // of layer 0; pointers into proj are not used
    int64_t ogate, fgate; // columns of proj, -1: none
    SingleMatrix matrices[SINGLE_MATRICES];
    const bf16* embeddings;
    int64_t layer_stride, layer_stride_fp32; // elements from a layer's weights to the next one's
    float eps;                               // of the norms
    int layers, d, V;
    float* logits; // [V]
    SingleWords words;
    unsigned* counters; // [2] the last tag that was used; blocks that have ended
    SingleRing ring;
    int sums, raw, input, own; // offsets in shared memory
} SingleArgs;

// ----------------------------------------------------------------------------
// attention

template <int DH, bool GATE> struct SingleAttention {
    const SingleArgs& a;
    DecodeArgs& args; // of the unit's layer; proj is own, of the unit's head
    DecodeWarp<DH, GATE>& w;
    // The warp's words of proj: [q, k or v or output gate, 8: forget gate, shift]. In place of q then the row
    // that the warp appends.
    bf16* own;
    const int tid;
    const PassRows sequence;
    const HeadThread me; // the block's head; it has parts if there is such a head
    int layer;           // of what is known:
    Raw8 q_weight;       // of QK norm
    PagesAhead ahead;    // of k in warp 1, of v in warp 2
    double cum_logf;     // before the new token
    float bias;

    __device__ bool runs() const { return me.head < (int)a.attention.pages.NH; }
    __device__ PagesRow row(int kind) const { return {kind, 0, sequence}; }
    __device__ DecodeHead head() const { return {sequence, me.head, 0}; }
    // The kind of row that the warp appends
    __device__ int kind() const { return w.first_part == 0 && w.warp < 3 ? w.warp : 0; }

    // What of args differs by layer and head
    __device__ void set_layer() {
        const PagesAppend& first_layer = a.attention.append;
        PagesAppend* append = &args.append;
        int64_t stride = layer * a.layer_stride;
        const bf16* weight = a.attention.out.gate.weight;
        int head = me.head;
        append->layer = layer, append->proj = own - head, append->row_stride = 0;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            HeadPath* path = &append->paths[i];
            path->column = head - head * DH + (i > 0 ? DH : 0);
            if (path->shift >= 0) path->shift = 2 * DH + 1;
            path->weight = first_layer.paths[i].weight ? first_layer.paths[i].weight + stride : NULL;
        }
        append->gate = a.fgate >= 0 ? own + 2 * DH : NULL;
        args.out.gate.gate = a.ogate >= 0 ? own + DH - head * DH : NULL;
        args.out.gate.weight = weight ? weight + stride : NULL;
        args.out.gate_row = 0;
    }
    // Starts loading what a layer needs besides proj; then `start` the copies of keys and values.
    __device__ void load(int of_layer) {
        layer = of_layer;
        if (!runs() || layer >= a.layers) return;
        set_layer();
        w.load(w.lane == 0 ? head() : DecodeHead{});
        q_weight = pages_append_ahead(args.pages, args.append, row(0), me).weight;
        if (kind() == 1) ahead = pages_append_ahead(args.pages, args.append, row(1), me);
        if (kind() == 2) ahead = pages_append_ahead(args.pages, args.append, row(2), me);
        cum_logf = GATE && sequence.position > 0 ? args.pages.gates[w.head_index(head())].x : 0;
        if (GATE) bias = a.attention.append.bias[layer * a.layer_stride_fp32 + me.head];
    }
    __device__ void start() {
        if (runs() && layer < a.layers) w.start();
    }
    // The warp's words of proj into `own`
    __device__ void take_proj(uint32_t tag) {
        const HeadPath* paths = a.attention.append.paths;
        int64_t second = kind() == 1 ? paths[1].column : paths[2].column;
        int64_t shift = kind() == 1 ? paths[1].shift : paths[2].shift;
        const uint2* proj = a.words.proj;
        int lane = w.lane, head = me.head;
        if (kind() == 0) second = w.warp == 0 && w.first_part == 0 ? a.ogate : -1, shift = -1;
        if (lane < DH / 4) {
            const uint2* q = proj + (paths[0].column + head * DH) / 2 + 2 * lane;
            Raw8 x = single_take(q, second < 0 ? q : proj + (second + head * DH) / 2 + 2 * lane, tag);
            ((uint2*)own)[lane] = {x.x, x.y};
            ((uint2*)own)[DH / 4 + lane] = {x.z, x.w};
        }
        int gate = DH == 64 ? lane - 16 : lane; // lanes without q, or for another time
        int64_t column = gate == 0 ? a.fgate : gate == 1 ? shift : -1;
        if (column >= 0) {
            column += head;
            uint2 x = single_take2(proj + column / 4 * 2, tag);
            uint32_t word = column & 2 ? x.y : x.x;
            ((uint16_t*)own)[2 * DH + gate] = (uint16_t)(column & 1 ? word >> 16 : word);
        }
        __syncwarp();
    }
    // The first block of a head: y from all parts, of which those of other blocks are in words.
    __device__ void join(uint32_t tag) {
        constexpr int PAIRS = (DH + 2) / 2;
        DecodeShared<DH>& shared = w.shared;
        ExtendOutputAhead output = {};
        if (w.warp == 0) output = extend_output_ahead(args.out, 0, me);
        for (int i = tid; i < (DECODE_PARTS - w.parts) * PAIRS; i += SINGLE_CONSUMERS) {
            int part = w.parts + i / PAIRS, c = i % PAIRS * 2;
            uint2 x = single_take2(words_of(part) + c, tag);
            float* to = c < DH ? &shared.part_o[part][c] : &shared.part_sum[part].max;
            to[0] = __uint_as_float(x.x), to[1] = __uint_as_float(x.y);
        }
        single_barrier();
        if (w.warp > 0) return;
        float o[8];
        decode_value<DH>(o, shared, me);
        output_gate_token(o, args.out.gate, (float)args.out.gate.eps, output.logits, output.weight, me);
        if (w.lane < DH / 8)
            for (int i = 0; i < 4; i++)
                single_put_all(a.words.y + (me.head * DH + me.channel) / 2 + i, a.words.stride,
                               pack_bf16x2(o[2 * i], o[2 * i + 1]), tag);
    }
    __device__ uint2* words_of(int part) const {
        return a.words.parts + (me.head * DECODE_PARTS + part) * (DH + 2);
    }
    // After run: the new token into the pages, and the gate's state, which all parts have read
    __device__ void append() {
        if (!runs() || w.first_part > 0) return;
        HeadThread once = me;
        once.active = w.lane < DH / 8;
        if (w.warp < 3)
            pages_append_store(args.pages, args.append, row(w.warp), load_raw8(own + me.channel), once);
        if (GATE && w.warp == 3 && w.lane == 0) w.store_gate();
    }
    // The block's parts of the layer that has been loaded
    __device__ void run(uint32_t tag) {
        if (!runs()) return;
        set_layer();
        w.now = w.head_of(0);
        take_proj(tag);
        Raw8 q = pages_append_value(args.pages, args.append, row(0), PagesAhead{q_weight, {}}, me), value = q;
        w.cum_logf = cum_logf;
        if (GATE) w.cum_logf += pages_gate(forget_gate_logf(forget_gate_logit(args.append.gate, 0, bias)));
        w.set_q(q);
        if (kind() == 1) {
            value = pages_append_value(args.pages, args.append, row(1), ahead, me);
            w.add_new_key(q, value, me);
        } else if (kind() == 2) {
            value = pages_append_value(args.pages, args.append, row(2), ahead, me);
            w.add_new_value(value, me);
        }
        if (w.lane < DH / 8) store16(own + me.channel, value);
        w.run();
        single_barrier();
        for (int i = tid; i < w.parts * DH; i += SINGLE_CONSUMERS) {
            float o;
            DecodeShared<DH>& shared = w.shared;
            int at = i / DH, c = i % DH;
            DecodeSum sum = decode_join<DECODE_WARPS>(&o, shared.warp_sum[at], shared.warp_o(at, 0) + c, DH);
            if (w.first_part == 0) {
                shared.part_o[at][c] = o;
                if (c == 0) shared.part_sum[at] = sum;
            } else {
                uint2* words = words_of(w.first_part + at);
                single_put(words + c, __float_as_uint(o), tag);
                if (c < 2) single_put(words + DH + c, __float_as_uint(c ? sum.sum : sum.max), tag);
            }
        }
        if (w.first_part == 0) join(tag);
    }
};

// ----------------------------------------------------------------------------
// the kernel

// Consumers
template <int DH, bool GATE>
__device__ static inline void single_layers(const SingleArgs& a, char* shared,
                                            SingleAttention<DH, GATE>& attention, uint32_t tag) {
    constexpr int GROUPS = DH == 64 ? 4 : 1; // more would spill
    int tid = (int)threadIdx.x;
    SingleConsumer c = {
        shared,   a.ring,   (bf16*)(shared + a.input),    (float*)(shared + a.sums),         tid,
        tid % 32, tid / 32, single_slots(shared, a.ring), single_norm_slots(shared, a.ring), 0};
    const bf16* embedding = a.embeddings + (int64_t)a.attention.pass.tokens[0] * a.d;
    int copy = (int)blockIdx.x % SINGLE_COPIES * a.words.stride;
    SingleWalk walk = {-1, 0, 0, 0};
    SingleShare next = walk.next(a.matrices, a.layers);
    for (int i = 0; i <= 4 * a.layers; i++) {
        SingleShare share = next;
        int kind = walk.kind, layer = walk.layer;
        const SingleMatrix& m = a.matrices[kind];
        const SingleWords& words = a.words;
        bf16* raw = (bf16*)(shared + a.raw) + (kind >= SINGLE_GATE_UP && kind != SINGLE_HEAD) * a.d;
        next = walk.next(a.matrices, a.layers);
        if (kind == SINGLE_OUT) attention.run(tag);
        if (m.norm && share.elements + next.elements * (kind != SINGLE_HEAD) > 0) {
            const uint2* from = (kind == SINGLE_GATE_UP ? words.mid : words.x) + copy;
            for (int k = 4 * tid; k < a.d; k += 4 * SINGLE_CONSUMERS)
                *(uint2*)(raw + k) =
                    i == 0 ? *(const uint2*)(embedding + k) : single_take2(from + k / 2, tag);
            single_barrier();
            if (share.elements > 0) c.norm_row(raw, a.d, a.eps);
        } else if (!m.norm && share.elements > 0) {
            c.take_input<GROUPS>((kind == SINGLE_OUT ? words.y : words.act) + copy, m.K, tag);
        }
        c.multiply(m, share, [&](int n, float2 sum, float2 up) {
            uint2* to = kind == SINGLE_OUT ? words.mid : kind == SINGLE_GATE_UP ? words.act : words.x;
            if (kind == SINGLE_HEAD) {
                if (n < a.V) a.logits[n] = sum.x;
                if (n + 1 < a.V) a.logits[n + 1] = sum.y;
                return;
            }
            if (kind == SINGLE_IN) return single_put(words.proj + n / 2, pack_bf16x2(sum.x, sum.y), tag);
            uint32_t data = pack_bf16x2(sum.x, sum.y);
            if (kind == SINGLE_GATE_UP)
                data = swiglu8(Raw8{data, 0, 0, 0}, Raw8{pack_bf16x2(up.x, up.y), 0, 0, 0}).x;
            else
                data = pack_bf16x2(sum.x + __bfloat162float(raw[n]), sum.y + __bfloat162float(raw[n + 1]));
            single_put_all(to + n / 2, words.stride, data, tag + (kind == SINGLE_DOWN));
        });
        if (kind == SINGLE_OUT) attention.append(), attention.load(layer + 1);
        if (kind == SINGLE_GATE_UP) attention.start();
        if (kind == SINGLE_DOWN) tag++;
    }
}

template <int DH, bool GATE>
__global__ static void __launch_bounds__(SINGLE_THREADS, 1)
    single_kernel(const __grid_constant__ SingleArgs a) {
#if SM90_CODE
    extern __shared__ __align__(1024) char bytes[];
    int tid = (int)threadIdx.x, lane = tid % 32;
    if (tid == 0) single_init(bytes, a.ring);
    __syncthreads();
    if (tid >= SINGLE_CONSUMERS) {
        single_produce(bytes, a.ring, a.matrices, a.layers, a.layer_stride);
        return;
    }
    kernel_wait();
    uint32_t tag = a.counters[0] + 1;
    DecodeArgs args = a.attention;
    int blocks = a.attention.blocks, parts = DECODE_PARTS / blocks, block = (int)blockIdx.x;
    DecodeWarp<DH, GATE> w = {args, *(DecodeShared<DH>*)bytes, lane, tid / 32, block % blocks * parts, parts};
    w.init();
    SingleAttention<DH, GATE> attention = {
        a,
        args,
        w,
        (bf16*)(bytes + a.own) + tid / 32 * (2 * DH + 8),
        tid,
        a.attention.pass.sequences[0],
        {block / blocks, lane % (DH / 8) * 8, DH / 8, DH, 1.0f / DH, true}};
    attention.load(0);
    attention.start();
    single_layers<DH, GATE>(a, bytes, attention, tag);
    if (tid > 0 || atomicAdd(&a.counters[1], 1) < gridDim.x - 1) return;
    a.counters[1] = 0, a.counters[0] += (uint32_t)a.layers + 1;
#endif
}

// ----------------------------------------------------------------------------

// Words of SingleWords
static inline int64_t single_words(int64_t NH, int64_t dh, int64_t d, int64_t S, int64_t I) {
    return SINGLE_COPIES * (d + NH * dh / 2 + I / 2) + S / 2 + NH * DECODE_PARTS * (dh + 2);
}

// From so many tokens on decode.cuh's clusters read the cache faster, where a block has several parts of a
// head.
enum { SINGLE_LONG = 4096 };

// Completes a with the memory of S columns of proj: words, the ring, and where they are in shared memory.
// False where that has no room for a ring.
template <int DH> static inline bool single_layout(SingleArgs* a, uint2* words, int64_t S) {
    int64_t grid = device_attribute(cudaDevAttrMultiProcessorCount);
    int64_t NH = a->attention.pages.NH, d = a->d, I = a->matrices[SINGLE_DOWN].K, widest = 0, K = 0, at;
    auto place = [&](uint2** to, int64_t n) { *to = words, words += n; };
    place(&a->words.parts, NH * DECODE_PARTS * (DH + 2)), place(&a->words.proj, S / 2);
    place(&a->words.x, d / 2), place(&a->words.mid, d / 2);
    place(&a->words.y, NH * DH / 2), place(&a->words.act, I / 2);
    a->words.stride = (int)(words - a->words.x);
    for (SingleMatrix& m : a->matrices) {
        int64_t pieces = ceil_div<int64_t>(m.K, SINGLE_PIECE), steps = ceil_div<int64_t>(m.K, MATVEC_STEP);
        m.piece = (int)ceil_div<int64_t>(steps, pieces) * MATVEC_STEP;
        widest = std::max<int64_t>(widest, m.piece), K = std::max<int64_t>(K, m.K);
    }
    SingleRing* r = &a->ring;
    r->row_stride = matvec_shared_stride(widest), r->slot_stride = 8 * r->row_stride;
    DecodeArgs* attention = &a->attention;
    attention->blocks = DECODE_PARTS;
    while (attention->blocks > 1 && NH * attention->blocks > grid) attention->blocks /= 2;
    attention->stages = decode_stages<DH>(attention->pass.is_uneven);
    at = DecodeShared<DH>::bytes(DECODE_PARTS / attention->blocks, attention->stages);
    auto reserve = [&](int* offset, int64_t bytes) {
        *offset = (int)at, at = ceil_div<int64_t>(at + bytes, 128) * 128;
    };
    reserve(&a->sums, 2 * MATVEC_WARPS * SINGLE_FLUSH * 8 * (int64_t)sizeof(float));
    reserve(&a->raw, 2 * d * (int64_t)sizeof(bf16));
    reserve(&a->input, K * (int64_t)sizeof(bf16));
    reserve(&a->own, MATVEC_WARPS * (2 * DH + 8) * (int64_t)sizeof(bf16));
    reserve(&r->barriers, (2 * SINGLE_MAX_SLOTS + 4) * (int64_t)sizeof(uint64_t));
    reserve(&r->norms, 2 * d * (int64_t)sizeof(bf16));
    reserve(&r->ring, 0);
    int64_t slot = r->slot_stride * (int64_t)sizeof(bf16);
    int64_t all = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    r->slots = (int)std::min<int64_t>((all - at) / slot, SINGLE_MAX_SLOTS);
    r->bytes = (int)(at + r->slots * slot);
    return r->slots >= SINGLE_TILES && NH * attention->blocks <= grid;
}

// Queues the kernel. RoPE's angles have been computed.
static inline void single_launch(const SingleArgs* a, cudaStream_t stream) {
    Range range("decoding step", RANGE_FORWARD, stream);
    const Pages* p = &a->attention.pages;
    auto kernel = p->dh == 64   ? p->cum_logf ? single_kernel<64, true> : single_kernel<64, false>
                    : p->cum_logf ? single_kernel<128, true>
                                : single_kernel<128, false>;
    launch_after(kernel, dim3((unsigned)device_attribute(cudaDevAttrMultiProcessorCount)), SINGLE_THREADS,
                 a->ring.bytes, stream, *a);
}
