/*
Attention of a decoding step: sequences that are extended by one token each,

    o = sum_j softmax_j(q k_j / sqrt(dh) + cum_logf - cum_logf_j) v_j  over the tokens j that the row sees

as one kernel between the projections: append (pages.cuh), attention, output norm and gate. A cluster of 1 to
8 thread blocks has one head of one sequence:

    every warp    q, and cum_logf of the new token
    warps         the tokens before, 32 a turn, 16 where dh is 128: keys and values come through the warp's
                  own stages in shared memory by bulk copies, the first ones before the kernel ahead has
                  ended. By mma.sync: scores = K q, with q in all eight columns; o = V^T p, with p rounded to
                  bf16 in one column and what rounding left of it in the next
    part 0        its first warp: k and v of the new token, which it appends
    block         joins its warps in shared memory and writes the result into the first block's
    first block   appends the gate; joins the parts, norms, gates, writes y

In an uneven pass (PassArrays) extend_plan has listed the long heads and the short ones. The first clusters
have a long head each; in the others each block has all 8 parts of a short head.

In other passes, if the heads do not all fit at once, blocks have all 8 parts and go on from head to head.
While a warp adds the last turns of one head it has begun to copy the first ones of the next, whose pages have
been looked up a head before, so that bytes are in flight while the block joins its warps.

Tokens are dealt out to 8 parts of 8 warps, and a part is joined apart, however many blocks the 8 parts are
cut into: a row's bits depend on its own sequence alone. They differ from extend.cuh's.

Called by the GPU trainer on Hopper.
*/
#pragma once

#include <algorithm>
#include "extend.cuh"
#include "../../cuda/cluster.cuh"

enum { DECODE_SPLITS = 8, DECODE_WARPS = 8, DECODE_MAX_STAGES = 2 };

// A cluster has DECODE_MAX_HEADS heads at most, one a lane. Unless the pass is uneven, lane n of cluster i has
// head n clusters + (i + n DECODE_HEAD_SHIFT) % clusters: without the shift a cluster would often have the same
// head of many sequences, and heads differ in how much they forget.
enum { DECODE_MAX_HEADS = 32, DECODE_HEAD_SHIFT = 101 };

// Whether decode_attention computes the sequences of a pass that have one row. Rows that skip pages
// (Pages.norms) are left to extend.cuh, which finds these before it reads any.
static inline bool decode_runs(const Pages* p) { return attention_runs_sm90() && !p->norms; }

struct DecodeArgs {
    Pages pages;
    KvAppend append;
    PassArrays pass;
    ExtendOutput out;
    int blocks;        // of a cluster
    int stages;        // of a warp: decode_stages
    DecodeOrder order; // of the layer; NULL unless the pass is uneven
};

// A pass is uneven only if a decoded sequence has so many tokens.
enum { DECODE_UNEVEN_TOKENS = 8192 };

// Stages of a warp. The second one takes shared memory from other blocks. It pays in uneven passes where each
// block has an SM to itself, and where an iteration has only 16 tokens.
template <int DH> static inline int decode_stages(bool second) {
    return DH > 64 || second ? DECODE_MAX_STAGES : 1;
}

// Softmax over some tokens: exponents are relative to max. The channels of sum 2^(x - max) v are beside it.
typedef struct {
    float max, sum;
} DecodeRowState;

// Tokens of a warp in one turn, 4 KiB of keys: tiles as in mma_sm80.cuh
template <int DH> struct alignas(2 * DH) DecodeStage {
    static constexpr int KEYS = 2048 / DH;
    bf16 k[KEYS * DH], v[KEYS * DH];
    double cum_logf[KEYS];
};

// Shared memory, behind which are warp_o [parts of the block, DECODE_WARPS, DH] and the stages
// [DECODE_WARPS, stages]. The last part is the new token.
template <int DH> struct alignas(2 * DH) DecodeShared {
    float part_o[DECODE_SPLITS + 1][DH]; // the first block's is used, as part_sum
    DecodeRowState part_sum[DECODE_SPLITS + 1], warp_sum[DECODE_SPLITS][DECODE_WARPS];
    uint64_t barriers[DECODE_WARPS][DECODE_MAX_STAGES];
    alignas(16) bf16 q[DECODE_WARPS][DH];

    __device__ float* warp_o(int part, int warp) {
        return (float*)(this + 1) + (part * DECODE_WARPS + warp) * DH;
    }
    __device__ DecodeStage<DH>* stages(int parts) { return (DecodeStage<DH>*)warp_o(parts, 0); }
    static int64_t bytes(int64_t parts, int64_t stages) {
        return (int64_t)(sizeof(DecodeShared) + (size_t)(parts * DECODE_WARPS * DH) * sizeof(float) +
                         (size_t)(DECODE_WARPS * stages) * sizeof(DecodeStage<DH>));
    }
};

// A head of a sequence, of which the new token sees visible, visible + 1, .. and itself
struct DecodeHead {
    PassRows own;
    int h, visible;
};

template <int DH, bool GATE> struct DecodeWarp {
    static constexpr int KEYS = DecodeStage<DH>::KEYS;
    static constexpr float SCALE = AttentionScale<DH>::SCALE, LEAST = -3e38f; // max of no tokens

    const DecodeArgs& a;
    DecodeShared<DH>& shared;
    const int lane, warp, first_part, parts;
    DecodeHead mine; // a lane has one of the heads that the cluster computes
    int forgotten;   // of its tokens
    unsigned heads;  // which lanes have one
    // Pages are looked up 32 turns at a time, one a lane, while the 32 before are copied.
    unsigned lookups;            // heads of which turns are left to be looked up
    int looked_up;               // turns of the first of them that have been
    int found_token, found_page; // of the last 32: first token or -1, and page
    int source;                  // of the 32 before: first token in the pool
    unsigned copies;             // and which of these are left to be copied
    DecodeStage<DH>* stages;     // of the warp
    uint64_t* barriers;
    int stage, phase;       // of the next turn
    DecodeHead now;         // the head that is computed
    double cum_logf;        // of the new token
    uint32_t q[DH / 16][2]; // B fragments
    DecodeRowState sum;     // sum: of the lane's tokens
    float acc[DH / 16][4];

    // A barrier, in two halves, of the blocks that have parts of the head, if these are several; a store to the
    // first one's memory
    __device__ bool is_whole() const { return parts == DECODE_SPLITS; }
    __device__ void arrive() const {
        if (!is_whole()) cluster_arrive();
    }
    __device__ void wait() const {
        if (!is_whole()) cluster_wait();
    }
    __device__ void put(float* to, float x) const {
        if (is_whole())
            *to = x;
        else
            cluster_store(to, x);
    }
    // Turns of a warp in each part, which begin at multiples of KEYS, and the token at which one begins
    __device__ static int turns_of(const DecodeHead& of) {
        constexpr int IN_TURN = DECODE_SPLITS * DECODE_WARPS * KEYS;
        return max((of.own.position - (of.visible & -KEYS) + IN_TURN - 1) / IN_TURN, 1);
    }
    __device__ int first_token(const DecodeHead& of, int part, int turn) const {
        return (of.visible & -KEYS) + ((turn * DECODE_SPLITS + part) * DECODE_WARPS + warp) * KEYS;
    }
    // A lane's head
    __device__ DecodeHead head_of(int from) const {
        auto get = [&](int x) { return __shfl_sync(~0u, x, from); };
        int row = get(mine.own.begin);
        return {{row, row + 1, get(mine.own.slot), get(mine.own.position)}, get(mine.h), get(mine.visible)};
    }
    // Starts loading the pages of the next 32 turns.
    __device__ void look_up() {
        found_token = -1, found_page = 0;
        if (lookups == 0) return;
        DecodeHead of = head_of(__ffs((int)lookups) - 1);
        int turns = turns_of(of), i = looked_up + lane, part = i / turns;
        int token = first_token(of, first_part + part, i - part * turns);
        if (part < parts && token < of.own.position) {
            const Pages& p = a.pages;
            found_token = token;
            found_page = p.table[head_index(of) * p.table_width + token / PAGE_TOKENS];
        }
        looked_up += 32;
        if (looked_up >= parts * turns) looked_up = 0, lookups &= lookups - 1;
    }
    __device__ int64_t head_index(const DecodeHead& of) const {
        return pages_slot_head(a.pages, of.own.slot, a.append.layer, of.h);
    }
    __device__ int num_stages() const { return DH > 64 ? (int)DECODE_MAX_STAGES : a.stages; }
    // Once, before start
    __device__ void init() {
        stages = shared.stages(parts) + warp * num_stages(), barriers = shared.barriers[warp];
        stage = phase = 0;
        if (lane == 0) bulk_init(barriers, num_stages());
        __syncwarp();
    }
    // Starts loading what `start` needs of each lane's head, if its sequence has one row: the count of
    // forgotten pages, and beside it the first pages of a row from which nothing is forgotten. It may come
    // before the kernel ahead has ended.
    __device__ void load(const DecodeHead& of_lane) {
        const Pages& p = a.pages;
        mine = of_lane, forgotten = 0;
        bool active = mine.own.end - mine.own.begin == 1;
        heads = lookups = __ballot_sync(~0u, active);
        looked_up = 0, copies = 0;
        if (active) forgotten = p.forgotten[head_index(mine)] * PAGE_TOKENS;
        if (p.window && mine.own.position >= p.window) mine.visible = mine.own.position - (int)p.window + 1;
        look_up();
    }
    // Starts the first copies.
    __device__ void start() {
        bool fewer = forgotten > mine.visible;
        if (fewer) mine.visible = forgotten;
        if (__shfl_sync(~0u, (int)fewer, __ffs((int)heads) - 1)) {
            lookups = heads, looked_up = 0;
            look_up();
        }
        for (int i = 0; i < num_stages(); i++) copy((stage + i) & (num_stages() - 1));
    }
    // Starts copying the next turn, of this head or of the next one.
    __device__ void copy(int to) {
        const Pages& p = a.pages;
        for (bool more = true; copies == 0 && more;) {
            more = lookups != 0;
            copies = __ballot_sync(~0u, found_token >= 0);
            source = found_page * PAGE_TOKENS + found_token % PAGE_TOKENS;
            look_up();
        }
        if (copies == 0) return;
        int64_t in_pool = __shfl_sync(~0u, source, __ffs((int)copies) - 1);
        copies &= copies - 1;
        if (lane == 0) {
            DecodeStage<DH>& s = stages[to];
            bulk_expect(barriers + to, (int)(sizeof s.k + sizeof s.v + (GATE ? sizeof s.cum_logf : 0)));
            bulk_copy(s.k, p.k + in_pool * DH, sizeof s.k, barriers + to);
            if (GATE) bulk_copy(s.cum_logf, p.cum_logf + in_pool, sizeof s.cum_logf, barriers + to);
            bulk_copy(s.v, p.v + in_pool * DH, sizeof s.v, barriers + to);
        }
    }

    __device__ void clear() {
        sum = {LEAST, 0};
        memset(acc, 0, sizeof acc);
    }
    // q of the head, eight channels a lane
    __device__ void set_q(const Raw8& channels) {
        bf16* all = shared.q[warp];
        __syncwarp(); // that of the head before has been read
        if (lane < DH / 8) store16(all + lane * 8, channels);
        __syncwarp();
        for (int i = 0; i < DH / 16 * 2; i++) q[i / 2][i % 2] = *(uint32_t*)(all + 8 * i + lane % 4 * 2);
    }
    __device__ bool sees(int token) const { return token >= now.visible && token < now.own.position; }
    // Values that the row does not see become zeros: they may be anything.
    __device__ void hide_values(DecodeStage<DH>& s, int first) const {
        if (first >= now.visible && first + KEYS <= now.own.position) return;
        for (int i = lane; i < KEYS * DH / 8; i += 32)
            if (!sees(first + i / (DH / 8))) store16(s.v + i * 8, Raw8{});
        bulk_fence(); // the stage will be copied to
        __syncwarp();
    }
    // Adds the tokens first, first + 1, .. of a stage. A lane has the scores of tokens lane / 4, 8 more, ..
    __device__ void add(DecodeStage<DH>& s, int first) {
        constexpr int TILES = KEYS / 16, EIGHTS = KEYS / 8;
        float c[TILES][4] = {}, p[EIGHTS], most = sum.max;
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
            most = fmaxf(most, p[r]);
        }
        for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        if (most > sum.max) {
            float factor = exp2_approx(sum.max - most);
            sum = {most, sum.sum * factor};
            for (auto& tile : acc)
                for (float& x : tile) x *= factor;
        }
        // Fragments of p: the lane's tokens are lane % 4 * 2, the next one, 8 more, .. Column 0 has p
        // rounded, column 1 the rest.
        uint32_t b[EIGHTS];
#pragma unroll
        for (int r = 0; r < EIGHTS; r++) {
            p[r] = exp2_approx(p[r] - most), sum.sum += p[r];
            float low = __shfl_sync(~0u, p[r], lane % 4 * 8), high = __shfl_sync(~0u, p[r], lane % 4 * 8 + 4);
            if (lane & 4) low -= __bfloat162float((bf16)low), high -= __bfloat162float((bf16)high);
            b[r] = pack_bf16x2(low, high);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < DH / 16; i++) {
                ldmatrix_trans(f, sm80_advance<DH>(v, 16 * n, 16 * i));
                sm80_mma(acc[i], f, b[2 * n], b[2 * n + 1], acc[i]);
            }
    }
    // The new token as the last part, in the first block: its score, and its values
    __device__ void add_new_key(const Raw8& q, const Raw8& k, const HeadThread& me) {
        float a[8], b[8], x = 0;
        unpack8(a, q);
        unpack8(b, k);
        for (int i = 0; i < 8; i++) x += a[i] * b[i];
        x = head_sum(x, me) * SCALE;
        if (lane == 0) shared.part_sum[DECODE_SPLITS] = {x, 1};
    }
    __device__ void add_new_value(const Raw8& v, const HeadThread& me) {
        float x[8];
        unpack8(x, v);
        if (lane < me.lanes) store8(&shared.part_o[DECODE_SPLITS][me.channel], x);
    }
    // By one thread, when all parts have read the gate's state: appends the new token's, and updates it.
    __device__ void store_gate() const {
        double2* state = a.pages.gates + head_index(now);
        double2 before = now.own.position > 0 ? *state : double2{};
        double weights = 1 + exp(cum_logf - before.x) * before.y; // the difference is exact
        kv_append_gate_store(a.pages, a.append, now.own, now.h, now.own.position, cum_logf, weights);
        *state = {cum_logf, weights};
    }
    // Joins the warp's lanes into shared memory, as the block's part `to`, and begins another part.
    __device__ void store(int to) {
        float total = sum.sum, *o = shared.warp_o(to, warp);
        for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        for (int i = 0; lane % 4 == 0 && i < DH / 8; i++)
            o[8 * i + lane / 4] = acc[i / 2][i % 2 * 2] + acc[i / 2][i % 2 * 2 + 1];
        if (lane == 0) shared.warp_sum[to][warp] = {sum.max, total};
        clear();
    }
    // Tokens of all the block's parts
    __device__ void run() {
        int turns = turns_of(now);
        clear();
        for (int to = 0; to < parts; to++) {
            for (int i = 0; i < turns; i++) {
                int first = first_token(now, first_part + to, i);
                if (first < now.own.position) {
                    bulk_wait(barriers + stage, (uint32_t)phase);
                    add(stages[stage], first);
                    __syncwarp(); // the stage may be overwritten
                    copy(stage);
                    if (++stage == num_stages()) stage = 0, phase ^= 1;
                }
            }
            store(to);
        }
    }
};

// One of N sums and its channels: the thread's of `o`, which are `stride` apart.
template <int N>
__device__ static inline DecodeRowState decode_combine(float* channel, const DecodeRowState* sums,
                                                       const float* o, int stride) {
    DecodeRowState all = {sums[0].max, 0};
    for (int i = 1; i < N; i++) all.max = fmaxf(all.max, sums[i].max);
    *channel = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float factor = exp2_approx(sums[i].max - all.max);
        all.sum += factor * sums[i].sum, *channel += factor * o[i * stride];
    }
    return all;
}

// By one warp of the first block: y from all parts.
template <int DH>
__device__ static inline void decode_output(const DecodeArgs& a, const DecodeShared<DH>& shared, int64_t row,
                                            const ExtendOutputPrefetch& ahead, const HeadThread& me) {
    float o[8];
    for (int i = 0; i < 8; i++) {
        DecodeRowState all =
            decode_combine<DECODE_SPLITS + 1>(&o[i], shared.part_sum, shared.part_o[0] + me.channel + i, DH);
        o[i] /= all.sum;
    }
    unpack8(o, pack8(o)); // as attention_forward rounds it
    extend_output(a.out, o, (row * a.pages.NH + me.head) * DH + me.channel, ahead, me);
}

// One head of the cluster
template <int DH, bool GATE>
__device__ static inline void decode_head(DecodeWarp<DH, GATE>& w, const HeadThread& me, bool first) {
    const DecodeArgs& a = w.a;
    DecodeShared<DH>& shared = w.shared;
    PassRows own = w.now.own;
    int lane = w.lane, block = w.first_part / w.parts;
    bool appends = block == 0 && w.warp == 0;
    KvAppendRow rows[3] = {{0, own.begin, own}, {1, own.begin, own}, {2, own.begin, own}};
    KvAppendPrefetch ahead[3] = {kv_append_prefetch(a.pages, a.append, rows[0], me)};
    for (int kind = 1; appends && kind < 3; kind++)
        ahead[kind] = kv_append_prefetch(a.pages, a.append, rows[kind], me);
    double cum_logf = GATE && own.position > 0 ? a.pages.gates[w.head_index(w.now)].x : 0;
    if (first) kernel_wait();

    Raw8 q = kv_append_value(a.pages, a.append, rows[0], ahead[0], me);
    w.cum_logf = cum_logf;
    if (GATE)
        w.cum_logf += pages_round_logf(forget_gate_logf(forget_gate_logit(
            a.append.gate, (int64_t)own.begin * a.append.row_stride + me.head, a.append.bias[me.head])));
    w.set_q(q);
    w.arrive(); // the gate's state has been read
    if (appends) {
        HeadThread once = me;
        once.active = lane < DH / 8;
        Raw8 k = kv_append_value(a.pages, a.append, rows[1], ahead[1], me);
        Raw8 v = kv_append_value(a.pages, a.append, rows[2], ahead[2], me);
        kv_append_store(a.pages, a.append, rows[0], q, once);
        kv_append_store(a.pages, a.append, rows[1], k, once);
        kv_append_store(a.pages, a.append, rows[2], v, once);
        w.add_new_key(q, k, me);
        w.add_new_value(v, me);
    }
    w.run();

    ExtendOutputPrefetch output = {};
    if (appends) output = extend_output_prefetch(a.out, own.begin, me);
    __syncthreads();
    w.wait(); // all blocks have begun
    for (int i = (int)threadIdx.x; i < w.parts * DH; i += 32 * DECODE_WARPS) {
        float o;
        int at = i / DH, part = w.first_part + at;
        DecodeRowState sum =
            decode_combine<DECODE_WARPS>(&o, shared.warp_sum[at], shared.warp_o(at, 0) + i % DH, DH);
        w.put(&shared.part_o[part][i % DH], o);
        if (i % DH == 0) w.put(&shared.part_sum[part].max, sum.max);
        if (i % DH == 0) w.put(&shared.part_sum[part].sum, sum.sum);
    }
    w.arrive();
    if (GATE && block == 0 && w.warp == 1 && lane == 0) w.store_gate();
    if (w.is_whole()) __syncthreads();
    w.wait();
    if (appends) decode_output(a, shared, own.begin, output, me);
}

// What a block computes: `parts` parts, from first_part on, of the heads that its lanes have
struct DecodeAssignment {
    int first_part, parts, head; // head: sequence NH + head, -1: none
};

__device__ static inline DecodeAssignment decode_assignment(const DecodeArgs& a, int lane) {
    int clusters = (int)gridDim.x / a.blocks, cluster = (int)blockIdx.x / a.blocks;
    int block = (int)blockIdx.x % a.blocks, parts = DECODE_SPLITS / a.blocks;
    int heads = a.pass.num_sequences * (int)a.pages.NH;
    const int* order = a.order.heads;
    if (!order) {
        int head = lane * clusters + (cluster + lane * DECODE_HEAD_SHIFT) % clusters;
        return {block * parts, parts, head < heads ? head : -1};
    }
    int2 counts = *a.order.counts;
    if (cluster < counts.x) return {block * parts, parts, lane == 0 ? order[cluster] : -1};
    int i = (cluster - counts.x) * a.blocks + block;
    return {0, DECODE_SPLITS, lane == 0 && i < counts.y ? order[heads - 1 - i] : -1};
}

template <int DH, bool GATE>
__global__ static void __launch_bounds__(32 * DECODE_WARPS, DH == 64 ? 2 : 1)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(1024) char shared_bytes[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, NH = (int)a.pages.NH;
    DecodeAssignment share = decode_assignment(a, lane);
    DecodeWarp<DH, GATE> w = {a, *(DecodeShared<DH>*)shared_bytes, lane, warp, share.first_part, share.parts};
    w.load(share.head < 0 ? DecodeHead{} : DecodeHead{a.pass.sequences[share.head / NH], share.head % NH, 0});
    w.init();
    w.start();
    if (w.heads == 0) kernel_wait();
    for (unsigned left = w.heads; left; left &= left - 1) {
        w.now = w.head_of(__ffs((int)left) - 1);
        const HeadThread me = {w.now.h, lane % (DH / 8) * 8, DH / 8, DH, 1.0f / DH, true};
        decode_head(w, me, left == w.heads);
    }
}

template <int DH, bool GATE> static inline void decode_launch(DecodeArgs* a, cudaStream_t stream) {
    int64_t heads = a->pass.num_sequences * a->pages.NH, blocks = DECODE_SPLITS;
    int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
    int64_t resident = (DH == 64 ? 2 : 1) * multiprocessors;
    bool uneven = a->order.heads;
    // Few heads are cut, so that all multiprocessors have work. In uneven passes long heads always are. The
    // grid has a cluster for each head, as all may be long; 8 times the resident blocks bound how many of its
    // blocks are launched without work.
    int64_t least = uneven ? 2 : 1, most = (uneven ? 8 : 1) * resident;
    while (blocks > least && heads * blocks > most) blocks /= 2;
    int64_t clusters = std::min(heads, std::max(resident, ceil_div<int64_t>(heads, DECODE_MAX_HEADS)));
    if (blocks > 1) clusters = heads;
    int64_t parts = DECODE_SPLITS / (uneven ? 1 : blocks), grid = clusters * blocks;
    a->blocks = (int)blocks;
    a->stages = decode_stages<DH>(uneven && grid <= multiprocessors);
    launch_clusters(decode_kernel<DH, GATE>, a->blocks, dim3((unsigned)grid), 32 * DECODE_WARPS,
                    DecodeShared<DH>::bytes(parts, a->stages), stream, *a);
}

// Appends a layer's rows that are their sequence's only ones in the pass, and computes their attention; where
// decode_runs.
static inline void decode_attention(const ExtendOutput* out, const KvAppend* append, const ExtendLayer* layer,
                                    cudaStream_t stream) {
    const Pages* p = layer->pages;
    if (layer->pass->num_decoded == 0) return;
    Range range("attention", RANGE_FORWARD, stream);
    DecodeArgs a = {*p, *append, *layer->pass, *out, 0, 0, {}};
    if (layer->pass->is_uneven) a.order = extend_layer_order(&layer->work->order, p, layer->index);
    (p->dh == 64   ? p->cum_logf ? decode_launch<64, true> : decode_launch<64, false>
       : p->cum_logf ? decode_launch<128, true>
                   : decode_launch<128, false>)(&a, stream);
}
