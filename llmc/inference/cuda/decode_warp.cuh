/*
Parts of a warp of decode.cuh:

    DecodeLookup     page table -> registers: 32 tiles, one a lane, while the 32 tiles before are copied
    DecodeRing       pages -> 1 or 2 stages of k, v and cum_logf in shared memory, by cp.async.bulk
    DecodeSoftmax    mma.sync: scores = K q, with q in all eight columns; o = V^T p, with the bf16 high part
                     of p in one column and the low part in the next

A tile is 32 tokens of a split (16 where dh is 128). Invariants of the ring:

1. A stage belongs to one warp. Tiles are looked up, copied and consumed in one order: heads, splits,
   iterations. DecodeLookup (found_token) and DecodeWarp.run (first) skip the same tiles: those that begin
   at the new token or later.
2. A stage is read after ring.wait for the phase of its copy; the phase flips when the ring wraps (advance).
3. A stage is copied to again after the __syncwarp in DecodeWarp.run, so all lanes have read it; bulk_fence in
   hide_values orders the warp's own stores before that copy.
4. Each copy is waited for: there is one for each tile that is consumed, and no other, so none is in flight
   when the warp ends.
5. `run` starts the next copy after each tile that it consumes, across heads: the next head's first tiles are
   in flight while the block reduces a head.
*/
#pragma once

#include "extend.cuh"
#include "../../cuda/cluster.cuh"

enum { DECODE_SPLITS = 8, DECODE_WARPS = 8, DECODE_MAX_STAGES = 2 };

struct DecodeArgs {
    Pages pages;
    KvAppend append;
    PassArrays pass;
    ExtendOutput out;
    int blocks;        // of a cluster
    int stages;        // of a warp: decode_stages
    DecodeOrder order; // of the layer; NULL unless the pass is uneven
};

// Number of stages of a warp. A second stage takes shared memory from other blocks of the SM. It pays in
// uneven passes where each block has an SM to itself, and where a tile has only 16 tokens.
template <int DH> static inline int decode_stages(bool second) {
    return DH > 64 || second ? DECODE_MAX_STAGES : 1;
}

// Online softmax over some tokens, scores x in log2: row_max, row_sum = sum 2^(x - row_max). Their o = sum
// 2^(x - row_max) v is stored beside it.
typedef struct {
    float row_max, row_sum;
} DecodeRowState;

// A tile of a warp, 4 KiB of keys, laid out as in mma_sm80.cuh
template <int DH> struct alignas(2 * DH) DecodeStage {
    static constexpr int KEYS = 2048 / DH;
    bf16 k[KEYS * DH], v[KEYS * DH];
    double cum_logf[KEYS];
};

// Shared memory of a block, followed by warp_o [splits of the block, DECODE_WARPS, DH] and stages
// [DECODE_WARPS, stages]. Element DECODE_SPLITS of split_o and split_state is the new token.
template <int DH> struct alignas(2 * DH) DecodeShared {
    float split_o[DECODE_SPLITS + 1][DH]; // used in the first block alone, like split_state
    DecodeRowState split_state[DECODE_SPLITS + 1], warp_state[DECODE_SPLITS][DECODE_WARPS];
    uint64_t barriers[DECODE_WARPS][DECODE_MAX_STAGES];
    alignas(16) bf16 q[DECODE_WARPS][DH];

    __device__ float* warp_o(int split, int warp) {
        return (float*)(this + 1) + (split * DECODE_WARPS + warp) * DH;
    }
    __device__ DecodeStage<DH>* stages(int splits) { return (DecodeStage<DH>*)warp_o(splits, 0); }
    static int64_t bytes(int64_t splits, int64_t stages) {
        return (int64_t)(sizeof(DecodeShared) + (size_t)(splits * DECODE_WARPS * DH) * sizeof(float) +
                         (size_t)(DECODE_WARPS * stages) * sizeof(DecodeStage<DH>));
    }
};

// Where a tile is in the pool: its first token in k and v, and with GROUPED the row of its page in cum_logf
struct DecodeTile {
    int keys, gate_row;
};

// A head of a decoded sequence. The new token, at own.position, sees the tokens from `visible` on and itself.
struct DecodeHead {
    PassRows own;
    int h, visible;
};

// ----------------------------------------------------------------------------
// page lookup

// Iterates over the tiles of a warp in the order in which they are copied: heads, splits, iterations. A lane
// holds one of the block's heads, and one of the 32 tiles that are looked up at a time.
template <int DH, bool GROUPED> struct DecodeLookup {
    static constexpr int KEYS = DecodeStage<DH>::KEYS;

    const DecodeArgs& a;
    const int lane, warp, first_split, splits;
    DecodeHead mine;        // the lane's head
    int forgotten;          // number of its forgotten tokens
    unsigned heads;         // mask of lanes that have a head
    unsigned pending_heads; // mask of lanes whose heads have tiles that are not looked up yet
    int looked_up;          // number of tiles looked up of the first pending head
    int found_token;        // the lane's tile of the last 32 looked up: first token in the sequence, -1: none
    int found_page;         // and that token's page
    int found_row;          // and row of the head's gates in the pool
    unsigned pending_tiles; // mask of lanes whose tiles of the 32 before are not copied yet
    DecodeTile source;      // the lane's tile of those

    // Number of iterations (tiles of a warp) of each split. Tiles begin at multiples of KEYS.
    __device__ static int num_iterations(const DecodeHead& head) {
        constexpr int STRIDE = DECODE_SPLITS * DECODE_WARPS * KEYS;
        return max((head.own.position - (head.visible & -KEYS) + STRIDE - 1) / STRIDE, 1);
    }
    __device__ int first_token(const DecodeHead& head, int split, int iteration) const {
        return (head.visible & -KEYS) + ((iteration * DECODE_SPLITS + split) * DECODE_WARPS + warp) * KEYS;
    }
    __device__ int64_t head_index(const DecodeHead& head) const {
        return pages_query_head<GROUPED>(a.pages, head.own.slot, a.append.layer, head.h);
    }
    // The head of lane `from`, in all lanes
    __device__ DecodeHead head_of(int from) const {
        auto get = [&](int x) { return __shfl_sync(~0u, x, from); };
        int row = get(mine.own.begin);
        return {{row, row + 1, get(mine.own.slot), get(mine.own.position)}, get(mine.h), get(mine.visible)};
    }

    // Starts loading what `start` needs for the lane's head, if its sequence has one row: the number of
    // forgotten pages, and the first page numbers in case none is forgotten. May come before kernel_wait.
    __device__ void prefetch(const DecodeHead& of_lane) {
        const Pages& p = a.pages;
        mine = of_lane;
        forgotten = 0;
        bool active = mine.own.end - mine.own.begin == 1;
        heads = pending_heads = __ballot_sync(~0u, active);
        looked_up = 0;
        pending_tiles = 0;
        if (active) forgotten = p.forgotten[head_index(mine)] * PAGE_TOKENS;
        if (p.window && mine.own.position >= p.window) mine.visible = mine.own.position - (int)p.window + 1;
        look_up();
    }
    // Repeats the first lookup where pages of its head are forgotten.
    __device__ void start() {
        bool fewer = forgotten > mine.visible;
        if (fewer) mine.visible = forgotten;
        if (__shfl_sync(~0u, (int)fewer, __ffs((int)heads) - 1)) {
            pending_heads = heads;
            looked_up = 0;
            look_up();
        }
    }
    // Starts loading the page numbers of the next 32 tiles.
    __device__ void look_up() {
        found_token = -1;
        found_page = found_row = 0;
        if (pending_heads == 0) return;
        DecodeHead head = head_of(__ffs((int)pending_heads) - 1);
        int iterations = num_iterations(head), i = looked_up + lane, split = i / iterations;
        int token = first_token(head, first_split + split, i - split * iterations);
        if (split < splits && token < head.own.position) {
            const Pages& p = a.pages;
            found_token = token;
            found_page = p.table[head_index(head) * p.table_width + token / PAGE_TOKENS];
            if (GROUPED) found_row = head.h % p.group;
        }
        looked_up += 32;
        if (looked_up >= splits * iterations) {
            looked_up = 0;
            pending_heads &= pending_heads - 1;
        }
    }
    // Returns where the next tile to copy is in the pool; -1 if there is none.
    __device__ DecodeTile next() {
        for (bool more = true; pending_tiles == 0 && more;) {
            more = pending_heads != 0;
            pending_tiles = __ballot_sync(~0u, found_token >= 0);
            source.keys = found_page * PAGE_TOKENS + found_token % PAGE_TOKENS;
            if (GROUPED) source.gate_row = found_page * a.pages.group + found_row;
            look_up();
        }
        if (pending_tiles == 0) return {-1, -1};
        int from = __ffs((int)pending_tiles) - 1;
        pending_tiles &= pending_tiles - 1;
        return {__shfl_sync(~0u, source.keys, from), GROUPED ? __shfl_sync(~0u, source.gate_row, from) : 0};
    }
};

// ----------------------------------------------------------------------------
// ring of keys and values

template <int DH, bool GATE, bool GROUPED> struct DecodeRing {
    const DecodeArgs& a;
    DecodeStage<DH>* stages; // the warp's
    uint64_t* barriers;
    int stage, phase; // those of the next tile to consume

    __device__ int num_stages() const { return DH > 64 ? (int)DECODE_MAX_STAGES : a.stages; }
    __device__ void init(DecodeShared<DH>& shared, int splits, int warp, int lane) {
        stages = shared.stages(splits) + warp * num_stages();
        barriers = shared.barriers[warp];
        stage = phase = 0;
        if (lane == 0) bulk_init(barriers, num_stages());
        __syncwarp();
    }
    // By one lane: starts copying a tile.
    __device__ void copy(int to, const DecodeTile& tile) {
        const Pages& p = a.pages;
        DecodeStage<DH>& s = stages[to];
        bulk_arrive_expect(barriers + to, (int)(sizeof s.k + sizeof s.v + (GATE ? sizeof s.cum_logf : 0)));
        bulk_copy(s.k, p.k + (int64_t)tile.keys * DH, sizeof s.k, barriers + to);
        int64_t gate = tile.keys;
        if (GROUPED) gate = (int64_t)tile.gate_row * PAGE_TOKENS + tile.keys % PAGE_TOKENS;
        if (GATE) bulk_copy(s.cum_logf, p.cum_logf + gate, sizeof s.cum_logf, barriers + to);
        bulk_copy(s.v, p.v + (int64_t)tile.keys * DH, sizeof s.v, barriers + to);
    }
    __device__ void wait() const { bulk_wait(barriers + stage, (uint32_t)phase); }
    __device__ void advance() {
        if (++stage == num_stages()) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// ----------------------------------------------------------------------------
// softmax

// One warp's online softmax over some tokens of a head; row_sum is the lane's part.
template <int DH, bool GATE> struct DecodeSoftmax {
    static constexpr int KEYS = DecodeStage<DH>::KEYS;
    static constexpr float SCALE = AttentionScale<DH>::SCALE, LEAST = -3e38f; // row_max of no tokens

    const int lane;
    int visible, position;  // the new token sees tokens visible, .., position - 1
    double cum_logf;        // of the new token
    uint32_t q[DH / 16][2]; // B fragments
    DecodeRowState state;
    float acc[DH / 16][4];

    __device__ void clear() {
        state = {LEAST, 0};
        memset(acc, 0, sizeof acc);
    }
    // Loads the B fragments of q, given eight channels a lane. shared_q [DH] is the warp's.
    __device__ void set_q(bf16* shared_q, const Raw8& channels) {
        __syncwarp(); // all lanes have read the previous head's
        if (lane < DH / 8) store16(shared_q + lane * 8, channels);
        __syncwarp();
        for (int i = 0; i < DH / 16 * 2; i++) q[i / 2][i % 2] = *(uint32_t*)(shared_q + 8 * i + lane % 4 * 2);
    }
    __device__ bool sees(int token) const { return token >= visible && token < position; }
    // Sets the values of tokens that are not seen to 0: their weight is 0, but they may be NaN.
    __device__ void hide_values(DecodeStage<DH>& s, int first) const {
        if (first >= visible && first + KEYS <= position) return;
        for (int i = lane; i < KEYS * DH / 8; i += 32)
            if (!sees(first + i / (DH / 8))) store16(s.v + i * 8, Raw8{});
        bulk_fence(); // invariant 3
        __syncwarp();
    }
    // Adds tokens first, .., first + KEYS - 1 in a stage. A lane has the scores of tokens lane / 4, lane / 4
    // + 8, ..
    __device__ void add(DecodeStage<DH>& s, int first) {
        constexpr int TILES = KEYS / 16, EIGHTS = KEYS / 8;
        float c[TILES][4] = {}, p[EIGHTS], row_max = state.row_max;
        uint32_t f[4], k = sm80_lane_a<DH>(s.k, lane), v = sm80_lane_b<DH>(s.v, lane);
        hide_values(s, first);
#pragma unroll
        for (int i = 0; i < DH / 16; i++)
            for (int n = 0; n < TILES; n++) {
                ldmatrix(f, sm80_advance<DH>(k, 16 * n, 16 * i));
                sm80_mma(c[n], f, q[i][0], q[i][1], c[n]);
            }
#pragma unroll
        for (int r = 0; r < EIGHTS; r++) {
            int token = 8 * r + lane / 4;
            p[r] = c[r / 2][r % 2 * 2] * SCALE;
            if (GATE) p[r] += (float)((cum_logf - s.cum_logf[token]) * ATTENTION_LOG2E);
            if (!sees(first + token)) p[r] = -INFINITY;
            row_max = fmaxf(row_max, p[r]);
        }
        for (int step = 4; step < 32; step *= 2)
            row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
        if (row_max > state.row_max) {
            float factor = exp2_approx(state.row_max - row_max);
            state = {row_max, state.row_sum * factor};
            for (auto& tile : acc)
                for (float& x : tile) x *= factor;
        }
        // B fragments of p: the lane's tokens are lane % 4 * 2, the next one, 8 more, .. Column 0 has the
        // bf16 high part of p, column 1 the low part.
        uint32_t b[EIGHTS];
#pragma unroll
        for (int r = 0; r < EIGHTS; r++) {
            p[r] = exp2_approx(p[r] - row_max);
            state.row_sum += p[r];
            float even = __shfl_sync(~0u, p[r], lane % 4 * 8), odd = __shfl_sync(~0u, p[r], lane % 4 * 8 + 4);
            if (lane & 4) {
                even -= __bfloat162float((bf16)even);
                odd -= __bfloat162float((bf16)odd);
            }
            b[r] = pack_bf16x2(even, odd);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < DH / 16; i++) {
                ldmatrix_trans(f, sm80_advance<DH>(v, 16 * n, 16 * i));
                sm80_mma(acc[i], f, b[2 * n], b[2 * n + 1], acc[i]);
            }
    }
    // Combines the warp's lanes into o [DH] and *to in shared memory, and clears the softmax.
    __device__ void store(float* o, DecodeRowState* to) {
        float row_sum = state.row_sum;
        for (int step = 4; step < 32; step *= 2) row_sum += __shfl_xor_sync(~0u, row_sum, step);
        for (int i = 0; lane % 4 == 0 && i < DH / 8; i++)
            o[8 * i + lane / 4] = acc[i / 2][i % 2 * 2] + acc[i / 2][i % 2 * 2 + 1];
        if (lane == 0) *to = {state.row_max, row_sum};
        clear();
    }
};
