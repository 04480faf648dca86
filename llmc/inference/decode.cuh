/*
Attention of a decoding step: sequences that are extended by one token each,

    o = sum_j softmax_j(q k_j / sqrt(dh) + cum_logf - cum_logf_j) v_j  over the tokens j that the row sees

as one kernel between the projections: append (pages.cuh), attention, output norm and gate. A cluster of 1 to
8 thread blocks has one head of one sequence:

    every warp    q, and cum_logf of the new token
    warps         the tokens before, 16 a turn: keys and values come through the warp's own stages in shared
                  memory by bulk copies, the first ones before the kernel ahead has ended. By mma.sync: scores
                  = K q, with q in all eight columns; o = V^T p, with p rounded to bf16 in one column and what
                  rounding left of it in the next
    part 0        its first warp: k and v of the new token, which it appends
    block         joins its warps in shared memory and writes the result into the first block's
    first block   appends the gate; joins the parts, norms, gates, writes y

Tokens are dealt out to 8 parts of 8 warps, and a part is joined apart, however many blocks the 8 parts are
cut into: a row's bits depend on its own sequence alone. They differ from extend.cuh's.

Called by the GPU trainer on Hopper.
*/
#pragma once

#include "extend.cuh"
#include "hopper.cuh"

enum { DECODE_PARTS = 8, DECODE_WARPS = 8, DECODE_KEYS = 16, DECODE_STAGES = 3 };

// Whether decode_attention computes the sequences of a pass that have one row. Rows that skip pages
// (Pages.norms) are left to extend.cuh, which finds these before it reads any.
static inline bool decode_runs(const Pages* p) { return attention_runs_sm90() && !p->norms; }

struct DecodeArgs {
    Pages pages;
    PagesAppend append;
    PassArrays pass;
    ExtendOutput out;
    int blocks, stages; // of a cluster; of a warp
};

// Softmax over some tokens: exponents are relative to max. The channels of sum 2^(x - max) v are beside it.
typedef struct {
    float max, sum;
} DecodeSum;

// Tokens of a warp in one turn: tiles as in mma_sm80.cuh
template <int DH> struct alignas(2 * DH) DecodeStage {
    bf16 k[DECODE_KEYS * DH], v[DECODE_KEYS * DH];
    double cum_logf[DECODE_KEYS];
};

// Shared memory, behind which are warp_o [parts of the block, DECODE_WARPS, DH] and the stages [DECODE_WARPS,
// stages]. The last part is the new token.
template <int DH> struct alignas(2 * DH) DecodeShared {
    float part_o[DECODE_PARTS + 1][DH]; // the first block's is used, as part_sum
    DecodeSum part_sum[DECODE_PARTS + 1], warp_sum[DECODE_PARTS][DECODE_WARPS];
    uint64_t barriers[DECODE_WARPS][DECODE_STAGES];
    alignas(16) bf16 q[DECODE_WARPS][DH];

    __device__ float* warp_o(int part, int warp) {
        return (float*)(this + 1) + (part * DECODE_WARPS + warp) * DH;
    }
    __device__ DecodeStage<DH>* stages(int parts, int stage) {
        return (DecodeStage<DH>*)warp_o(parts, 0) + stage;
    }
    static int64_t bytes(int parts, int stages) {
        return (int64_t)(sizeof(DecodeShared) + (size_t)(parts * DECODE_WARPS * DH) * sizeof(float) +
                         (size_t)(DECODE_WARPS * stages) * sizeof(DecodeStage<DH>));
    }
};

template <int DH, bool GATE> struct DecodeWarp {
    static constexpr float SCALE = AttentionScale<DH>::SCALE, LEAST = -3e38f; // max of no tokens

    const DecodeArgs& a;
    DecodeShared<DH>& shared;
    const int lane, warp;
    const PassRows own;  // the sequence
    const HeadThread me; // its head
    int64_t head;        // in arrays [slots, heads]
    int visible, begin;  // the first token that the row sees; the same rounded down to the turns' grid
    int turns, part, end_part, turn, page; // of the next copy
    DecodeStage<DH>* stages;               // of the warp
    uint64_t* barriers;
    int stage, phase;       // of the next turn
    double cum_logf;        // of the new token
    uint32_t q[DH / 16][2]; // B fragments
    DecodeSum sum;          // sum: of the lane's tokens
    float acc[DH / 16][4];

    // Token at which a turn of the warp begins
    __device__ int first_token(int of_part, int of_turn) const {
        return begin + ((of_turn * DECODE_PARTS + of_part) * DECODE_WARPS + warp) * DECODE_KEYS;
    }
    // Passes over turns without tokens, and starts loading the page of the next copy.
    __device__ void find_page() {
        while (part < end_part && first_token(part, turn) >= own.position) next_turn();
        if (part < end_part)
            page = a.pages.table[head * a.pages.table_width + first_token(part, turn) / PAGE_TOKENS];
    }
    __device__ void next_turn() {
        if (++turn == turns) turn = 0, part++;
    }
    // Begins at the first token that the row sees.
    __device__ void see(int first, int first_part) {
        constexpr int IN_TURN = DECODE_PARTS * DECODE_WARPS * DECODE_KEYS;
        visible = first, begin = first & -DECODE_KEYS;
        turns = max((own.position - begin + IN_TURN - 1) / IN_TURN, 1);
        part = first_part, turn = 0;
        find_page();
    }
    // Before the kernel ahead has ended. The page of a row from which nothing is forgotten is loaded beside
    // the count of forgotten pages.
    __device__ void start(int first_part, int parts) {
        const Pages& p = a.pages;
        head = pages_slot_head(p, own.slot, a.append.layer, me.head);
        end_part = first_part + parts, page = 0, stage = 0, phase = 0;
        int forgotten = p.forgotten[head] * PAGE_TOKENS;
        see(p.window && own.position >= p.window ? own.position - (int)p.window + 1 : 0, first_part);
        if (forgotten > visible) see(forgotten, first_part);
        stages = shared.stages(parts, warp * a.stages), barriers = shared.barriers[warp];
        clear();
        if (lane == 0) bulk_init(barriers, a.stages);
        __syncwarp();
        for (int i = 0; i < a.stages; i++) copy(i);
    }
    // Starts copying the next turn, and loading its successor's page.
    __device__ void copy(int to) {
        const Pages& p = a.pages;
        if (part == end_part) return;
        if (lane == 0) {
            int first = first_token(part, turn);
            DecodeStage<DH>& s = stages[to];
            int64_t in_pool = (int64_t)page * PAGE_TOKENS + first % PAGE_TOKENS;
            bulk_expect(barriers + to, (int)(sizeof s.k + sizeof s.v + (GATE ? sizeof s.cum_logf : 0)));
            bulk_copy(s.k, p.k + in_pool * DH, sizeof s.k, barriers + to);
            if (GATE) bulk_copy(s.cum_logf, p.cum_logf + in_pool, sizeof s.cum_logf, barriers + to);
            bulk_copy(s.v, p.v + in_pool * DH, sizeof s.v, barriers + to);
        }
        next_turn();
        find_page();
    }

    __device__ void clear() {
        sum = {LEAST, 0};
        memset(acc, 0, sizeof acc);
    }
    // q of the head, eight channels a lane
    __device__ void set_q(const Raw8& mine) {
        bf16* all = shared.q[warp];
        if (lane < me.lanes) store16(all + me.channel, mine);
        __syncwarp();
        for (int i = 0; i < DH / 16 * 2; i++) q[i / 2][i % 2] = *(uint32_t*)(all + 8 * i + lane % 4 * 2);
    }
    __device__ bool sees(int token) const { return token >= visible && token < own.position; }
    // Values that the row does not see become zeros: they may be anything.
    __device__ void hide_values(DecodeStage<DH>& s, int first) const {
        if (first >= visible && first + DECODE_KEYS <= own.position) return;
        for (int i = lane; i < DECODE_KEYS * DH / 8; i += 32)
            if (!sees(first + i / (DH / 8))) store16(s.v + i * 8, Raw8{});
        bulk_fence(); // the stage will be copied to
        __syncwarp();
    }
    // Adds the tokens first, first + 1, .. of a stage. A lane has the scores of tokens lane / 4 and 8 more.
    __device__ void add(DecodeStage<DH>& s, int first) {
        float c[4] = {}, p[2], most = sum.max;
        uint32_t f[4], k = sm80_lane_a<DH>(s.k, lane), v = sm80_lane_b<DH>(s.v, lane);
        hide_values(s, first);
#pragma unroll
        for (int i = 0; i < DH / 16; i++) {
            ldmatrix(f, sm80_advance<DH>(k, 0, 16 * i));
            sm80_mma(c, f, q[i][0], q[i][1], c);
        }
        for (int r = 0; r < 2; r++) {
            int token = lane / 4 + 8 * r;
            p[r] = c[2 * r] * SCALE;
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
        for (int r = 0; r < 2; r++) p[r] = exp2_approx(p[r] - most), sum.sum += p[r];
        // Fragments of p: the lane's tokens are lane % 4 * 2, the next one, and 8 more. Column 0 has p
        // rounded, column 1 the rest.
        uint32_t b[2];
        for (int r = 0; r < 2; r++) {
            float low = __shfl_sync(~0u, p[r], lane % 4 * 8), high = __shfl_sync(~0u, p[r], lane % 4 * 8 + 4);
            if (lane & 4) low -= __bfloat162float((bf16)low), high -= __bfloat162float((bf16)high);
            b[r] = pack_bf16x2(low, high);
        }
#pragma unroll
        for (int i = 0; i < DH / 16; i++) {
            ldmatrix_trans(f, sm80_advance<DH>(v, 0, 16 * i));
            sm80_mma(acc[i], f, b[0], b[1], acc[i]);
        }
    }
    // The new token as the last part, in the first block
    __device__ void add_new(const Raw8& q, const Raw8& k, const Raw8& v) {
        float a[8], b[8], x = 0;
        unpack8(a, q);
        unpack8(b, k);
        for (int i = 0; i < 8; i++) x += a[i] * b[i];
        x = head_sum(x, me) * SCALE;
        unpack8(a, v);
        if (lane < me.lanes) store8(&shared.part_o[DECODE_PARTS][me.channel], a);
        if (lane == 0) shared.part_sum[DECODE_PARTS] = {x, 1};
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
    __device__ void run(int parts) {
        int first_part = end_part - parts;
        for (int to = 0; to < parts; to++) {
            for (int i = 0; i < turns; i++) {
                int first = first_token(first_part + to, i);
                if (first < own.position) {
                    bulk_wait(barriers + stage, (uint32_t)phase);
                    add(stages[stage], first);
                    __syncwarp(); // the stage may be overwritten
                    copy(stage);
                    if (++stage == a.stages) stage = 0, phase ^= 1;
                }
            }
            store(to);
        }
    }
};

// One of N sums and its channels: the thread's of `o`, which are `stride` apart.
template <int N>
__device__ static inline DecodeSum decode_join(float* channel, const DecodeSum* sums, const float* o,
                                               int stride) {
    DecodeSum all = {sums[0].max, 0};
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
                                            const ExtendOutputAhead& ahead, const HeadThread& me) {
    float o[8];
    for (int i = 0; i < 8; i++) {
        DecodeSum all =
            decode_join<DECODE_PARTS + 1>(&o[i], shared.part_sum, shared.part_o[0] + me.channel + i, DH);
        o[i] /= all.sum;
    }
    unpack8(o, pack8(o)); // as attention_forward rounds it
    extend_output(a.out, o, (row * a.pages.NH + me.head) * DH + me.channel, ahead, me);
}

template <int DH, bool GATE>
__global__ static void __launch_bounds__(32 * DECODE_WARPS, 2)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(1024) char shared_bytes[];
    DecodeShared<DH>& shared = *(DecodeShared<DH>*)shared_bytes;
    int NH = (int)a.pages.NH, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int parts = DECODE_PARTS / a.blocks, block = (int)blockIdx.x % a.blocks,
        pair = (int)blockIdx.x / a.blocks;
    PassRows own = a.pass.sequences[pair / NH];
    if (own.end - own.begin > 1) {
        kernel_wait();
        return;
    }
    const HeadThread me = {pair % NH, lane % (DH / 8) * 8, DH / 8, DH, 1.0f / DH, true};
    DecodeWarp<DH, GATE> w = {a, shared, lane, warp, own, me};
    w.start(block * parts, parts);
    bool appends = block == 0 && warp == 0;
    PagesRow rows[3] = {{0, own.begin, own}, {1, own.begin, own}, {2, own.begin, own}};
    PagesAhead ahead[3] = {pages_append_ahead(a.pages, a.append, rows[0], me)};
    for (int kind = 1; appends && kind < 3; kind++)
        ahead[kind] = pages_append_ahead(a.pages, a.append, rows[kind], me);
    double cum_logf = GATE && own.position > 0 ? a.pages.gates[w.head].x : 0;
    kernel_wait();

    Raw8 q = pages_append_value(a.pages, a.append, rows[0], ahead[0], me);
    w.cum_logf = cum_logf;
    if (GATE)
        w.cum_logf += pages_gate(forget_gate_logf(forget_gate_logit(
            a.append.gate, (int64_t)own.begin * a.append.row_stride + me.head, a.append.bias[me.head])));
    w.set_q(q);
    cluster_arrive(); // the gate's state has been read
    if (appends) {
        HeadThread first = me;
        first.active = lane < DH / 8;
        Raw8 k = pages_append_value(a.pages, a.append, rows[1], ahead[1], me);
        Raw8 v = pages_append_value(a.pages, a.append, rows[2], ahead[2], me);
        pages_append_store(a.pages, a.append, rows[0], q, first);
        pages_append_store(a.pages, a.append, rows[1], k, first);
        pages_append_store(a.pages, a.append, rows[2], v, first);
        w.add_new(q, k, v);
    }
    w.run(parts);

    ExtendOutputAhead output = {};
    if (appends) output = extend_output_ahead(a.out, own.begin, me);
    __syncthreads();
    cluster_wait(); // all blocks have begun
    for (int i = (int)threadIdx.x; i < parts * DH; i += 32 * DECODE_WARPS) {
        float o;
        int at = i / DH, part = block * parts + at;
        DecodeSum sum = decode_join<DECODE_WARPS>(&o, shared.warp_sum[at], shared.warp_o(at, 0) + i % DH, DH);
        cluster_store(&shared.part_o[part][i % DH], o);
        if (i % DH == 0) cluster_store(&shared.part_sum[part].max, sum.max);
        if (i % DH == 0) cluster_store(&shared.part_sum[part].sum, sum.sum);
    }
    cluster_arrive();
    if (block > 0) return;
    if (GATE && warp == 1 && lane == 0) {
        double2* state = a.pages.gates + w.head;
        double2 before = own.position > 0 ? *state : double2{};
        double weights = 1 + exp(w.cum_logf - before.x) * before.y; // the difference is exact
        pages_gate_store(a.pages, a.append, own, me.head, own.position, w.cum_logf, weights);
        *state = {w.cum_logf, weights};
    }
    __syncwarp();
    cluster_wait();
    if (warp == 0) decode_output(a, shared, own.begin, output, me);
}

template <int DH, bool GATE> static inline void decode_launch(DecodeArgs* a, cudaStream_t stream) {
    int64_t heads = a->pass.num_sequences * a->pages.NH;
    int64_t resident = (DH == 64 ? 2 : 1) * device_attribute(cudaDevAttrMultiProcessorCount);
    int blocks = DECODE_PARTS; // few heads are cut, so that all multiprocessors have work
    while (blocks > 1 && heads * blocks > resident) blocks /= 2;
    a->blocks = blocks, a->stages = DH == 64 && blocks >= 4 ? DECODE_STAGES : 2;
    launch_clusters(decode_kernel<DH, GATE>, blocks, dim3((unsigned)(heads * blocks)), 32 * DECODE_WARPS,
                    DecodeShared<DH>::bytes(DECODE_PARTS / blocks, a->stages), stream, *a);
}

// Appends a layer's rows that are their sequence's only ones in the pass, and computes their attention; where
// decode_runs.
static inline void decode_attention(const ExtendOutput* out, const PagesAppend* append,
                                    const ExtendLayer* layer, cudaStream_t stream) {
    const Pages* p = layer->pages;
    if (layer->pass->num_decoded == 0) return;
    Range range("attention", RANGE_FORWARD, stream);
    DecodeArgs a = {*p, *append, *layer->pass, *out, 0, 0};
    (p->dh == 64   ? p->cum_logf ? decode_launch<64, true> : decode_launch<64, false>
       : p->cum_logf ? decode_launch<128, true>
                   : decode_launch<128, false>)(&a, stream);
}
