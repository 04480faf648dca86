/*
Forgetting attention forward on Hopper:

    o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + c_i - c_j) v_j  over j <= i,    dh 64 or 128

A thread block stays on its multiprocessor and takes up tiles of queries, the longest first, from a counter.
Its warps have roles. One loads: tiles of queries, keys and values, by the tensor copy engine, as far ahead as
there are stages. Two compute the gate's share for each tile of keys. Consumer warpgroups, of 64 queries each,
do the rest, from the diagonal down to the first key. In a step a consumer starts two products, of q and the
next keys, and of the last probabilities and their values, and turns the first into probabilities while the
second runs.

The tensor cores wait for the exponentials and all that goes with them, so the loop is short of instructions
first of all: row maxima are looked at only to see that nothing overflows, and sums are rescaled only then.

The gate. c falls to -1e5 and beyond, so differences of c are taken in double, against an anchor, the c of the
tile's first query. For keys before the tile, c_i - c_j = (c_i - c_anchor) + (c_anchor - c_j), both <= 0: what
matters is small and float has the digits for it, and what is large underflows as it should. The second part
is where the scores' sums start, the first joins the exponent's shift: the gate costs no instruction a score.
In the tiles on the diagonal large parts of opposite sign would cancel: there both are sums of two floats, and
high is added to high and low to low.
*/
#ifndef LLMC_ATTENTION_SM90_FORWARD_CUH
#define LLMC_ATTENTION_SM90_FORWARD_CUH

#include <limits.h>
#include "sm90.cuh"

// ----------------------------------------------------------------------------
// what the roles share

template <int DH> struct Sm90Forward : Sm90ForwardTiles<DH> {
    typedef Sm90ForwardTiles<DH> Tiles;
    static constexpr int ROWS = Tiles::CONSUMERS * 64, KEYS = Tiles::KEYS, STAGES = Tiles::STAGES;
    static constexpr int GATE_WARPS = 2; // of the producer warpgroup, behind the one that loads
    static constexpr int CONSUMER_WARPS = Tiles::CONSUMERS * 4, THREADS = 128 + Tiles::CONSUMERS * 128;
    static constexpr int TILE_BYTES = KEYS * DH * (int)sizeof(bf16); // of keys or values
    static constexpr float RAISE = 8;
    static constexpr double ROOT = AttentionScale<DH>::ROOT;
    static constexpr float SCALE = AttentionScale<DH>::SCALE;
    static_assert(KEYS == ATTENTION_BLOCK, "pruning counts tiles of keys");

    // All roles count steps, of one tile of keys each, and works from the kernel's start: the count tells the
    // stage and its barriers' parity.
    __device__ static int stage(uint32_t step) { return (int)(step % STAGES); }
    __device__ static uint32_t parity(uint32_t step) { return step / STAGES % 2; }

    // log2(e) (c_i - c_anchor) of queries, log2(e) (c_anchor - c_j) of keys, as sums of two floats
    template <int TOKENS> struct Gate { float high[TOKENS], low[TOKENS]; };
    // Off the diagonal: sqrt(dh) (c_anchor - c_j), what the scores' sums start from. Each pair of keys twice,
    // as a lane holds them in its two rows, to be loaded straight into the accumulators.
    struct Start {
        float4 pair[KEYS / 2];
        __device__ void set(int key, float x) {
            float* to = (float*)&pair[key / 2] + key % 2;
            to[0] = to[2] = x;
        }
    };

    struct Shared {
        bf16 q[ROWS * DH], k[STAGES][KEYS * DH], v[STAGES][KEYS * DH], o[ROWS * DH];
        Start start[STAGES];
        Gate<KEYS> diagonal[STAGES];
        Gate<ROWS> rows[2];
        unsigned work[2];
        uint64_t work_full[2], work_empty[2], q_full, q_empty;
        uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];

        __device__ void init_barriers(bool gate) {
            for (int i = 0; i < 2; i++) {
                sm90_barrier_init(&work_full[i], 1, 0);
                sm90_barrier_init(&work_empty[i], 0, CONSUMER_WARPS + (gate ? GATE_WARPS : 0));
            }
            sm90_barrier_init(&q_full, 1, 0);
            sm90_barrier_init(&q_empty, 0, CONSUMER_WARPS);
            for (int i = 0; i < STAGES; i++) {
                sm90_barrier_init(&k_full[i], 1, gate ? GATE_WARPS : 0); // the keys, and the gate's share
                sm90_barrier_init(&v_full[i], 1, 0);
                sm90_barrier_init(&k_empty[i], 0, CONSUMER_WARPS);
                sm90_barrier_init(&v_empty[i], 0, CONSUMER_WARPS);
            }
            sm90_barrier_init_done();
        }
    };
};

struct Sm90ForwardParameters {
    CUtensorMap q, k, v, o; // tiles of ROWS, KEYS, KEYS and, each warp its own, 16
    float* lse;
    const double* c;
    const int* first_key_block;
    unsigned* counter; // of the works taken up behind the first one of each thread block
    AttentionShape shape;
};

// A tile of queries from i0 on, and its tiles of keys: last down to first, those from `diagonal` on masked.
struct Sm90ForwardTile {
    int head, b, h, i0, last, diagonal, first;

    template <class F> __device__ static Sm90ForwardTile of(unsigned index, const Sm90ForwardParameters& p) {
        AttentionWork work = p.shape.work(index);
        Sm90ForwardTile tile;
        tile.head = work.head, tile.b = work.head / p.shape.NH, tile.h = work.head % p.shape.NH;
        tile.i0 = (p.shape.tiles - 1 - work.place) * F::ROWS; // the last queries have most keys
        tile.last = (min(tile.i0 + F::ROWS, p.shape.T) - 1) / F::KEYS;
        tile.diagonal = tile.i0 / F::KEYS;
        tile.first =
            p.first_key_block ? p.first_key_block[(int64_t)tile.head * p.shape.blocks + tile.diagonal] : 0;
        return tile;
    }
};

// ----------------------------------------------------------------------------
// the warp that loads: one thread of it

template <int DH>
__device__ static inline void sm90_forward_load(typename Sm90Forward<DH>::Shared& shared,
                                                const Sm90ForwardParameters& p) {
    typedef Sm90Forward<DH> F;
    unsigned index = blockIdx.x;
    uint32_t steps = 0;
    for (uint32_t works = 0;; works++) {
        sm90_wait(&shared.work_empty[works % 2], works / 2 % 2 ^ 1);
        shared.work[works % 2] = index;
        sm90_arrive(&shared.work_full[works % 2]);
        if (index >= p.shape.works()) break;
        Sm90ForwardTile tile = Sm90ForwardTile::of<F>(index, p);
        index = gridDim.x + atomicAdd(p.counter, 1); // early: it is long under way

        sm90_wait(&shared.q_empty, works % 2 ^ 1);
        sm90_arrive_expect(&shared.q_full, sizeof shared.q);
        sm90_load_tile<DH, F::ROWS>(shared.q, &p.q, tile.h, tile.i0, tile.b, &shared.q_full);
        auto load = [&](bf16* to, const CUtensorMap* map, uint64_t* full, uint64_t* empty, int n,
                        uint32_t step) {
            sm90_wait(empty + F::stage(step), F::parity(step) ^ 1);
            sm90_arrive_expect(full + F::stage(step), F::TILE_BYTES);
            sm90_load_tile<DH, F::KEYS>(to + F::stage(step) * (F::KEYS * DH), map, tile.h, n * F::KEYS,
                                        tile.b, full + F::stage(step));
        };
        // A step needs a tile of keys and the values of the tile before.
        for (int n = tile.last; n >= tile.first - 1; n--, steps++) {
            if (n >= tile.first) load(shared.k[0], &p.k, shared.k_full, shared.k_empty, n, steps);
            if (n < tile.last) load(shared.v[0], &p.v, shared.v_full, shared.v_empty, n + 1, steps - 1);
        }
        steps--; // the last one was for values alone
    }
}

// ----------------------------------------------------------------------------
// the warps that compute the gate's share

template <int DH>
__device__ static inline void sm90_forward_gate(typename Sm90Forward<DH>::Shared& shared,
                                                const Sm90ForwardParameters& p) {
    typedef Sm90Forward<DH> F;
    constexpr int THREADS = 32 * F::GATE_WARPS, EACH = F::KEYS / THREADS; // keys of a thread
    int thread = (int)threadIdx.x - 32;
    uint32_t steps = 0;
    auto keep = [](float* high, float* low, double difference) {
        double x = difference * ATTENTION_LOG2E;
        *high = (float)x;
        *low = (float)(x - *high);
    };
    for (uint32_t works = 0;; works++) {
        sm90_wait(&shared.work_full[works % 2], works / 2 % 2);
        unsigned index = shared.work[works % 2];
        if (index >= p.shape.works()) break;
        Sm90ForwardTile tile = Sm90ForwardTile::of<F>(index, p);
        const double* c = p.c + (int64_t)tile.head * p.shape.T;
        double anchor = c[tile.i0], ahead[EACH];
        auto read = [&](int n) {
#pragma unroll
            for (int i = 0; i < EACH; i++)
                ahead[i] = c[max(min(n * F::KEYS + thread + THREADS * i, p.shape.T - 1), 0)];
        };
        read(tile.last);
#pragma unroll 1 // registers are short
        for (int i = thread; i < F::ROWS; i += THREADS)
            keep(&shared.rows[works % 2].high[i], &shared.rows[works % 2].low[i],
                 c[min(tile.i0 + i, p.shape.T - 1)] - anchor);
        for (int n = tile.last; n >= tile.first; n--, steps++) {
            sm90_wait(&shared.k_empty[F::stage(steps)], F::parity(steps) ^ 1);
            auto& start = shared.start[F::stage(steps)];
            auto& diagonal = shared.diagonal[F::stage(steps)];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                int key = thread + THREADS * i;
                double difference = anchor - ahead[i];
                if (n >= tile.diagonal)
                    keep(&diagonal.high[key], &diagonal.low[key], difference);
                else
                    start.set(key, (float)(difference * F::ROOT));
            }
            sm90_arrive_warp(&shared.k_full[F::stage(steps)]);
            read(n - 1);
        }
        sm90_arrive_warp(&shared.work_empty[works % 2]);
    }
}

// ----------------------------------------------------------------------------
// consumers. A thread holds parts of two rows, lane / 4 and 8 on of its warp's 16.

template <int DH, bool GATE> struct Sm90ForwardConsumer {
    typedef Sm90Forward<DH> F;
    static constexpr int KEYS = F::KEYS;

    typename F::Shared& shared;
    const Sm90ForwardParameters& p;
    int warp, consumer; // the same in all lanes
    uint32_t works = 0, steps = 0;
    float scores[KEYS / 2], sum[DH / 2];
    uint32_t probabilities[KEYS / 16][4];
    float top[2], total[2]; // scores are taken relative to top; total: the lane's part of the row's sum
    float from_first[2], from_first_low[2]; // log2(e) (c_i - c_anchor)

    __device__ Sm90ForwardConsumer(typename F::Shared& shared, const Sm90ForwardParameters& p)
        : shared(shared), p(p) {
        warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 - 4, 0);
        consumer = warp / 4;
    }

    // The lane, and the thread's first row in the tile. Asked for again where they are needed: with three
    // consumers there are no registers to keep them, or what follows from them, beside the loop.
    __device__ static int lane() {
        int lane;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }
    __device__ int row(int lane) const { return warp * 16 + lane / 4; }

    // Where consumers start their products in turn, one's exponentials run beside another's products.
    __device__ void wait_turn() const {
        if (F::IN_TURN) sm90_named_sync(1 + consumer, 256);
    }
    __device__ void pass_turn() const {
        if (F::IN_TURN) sm90_named_arrive(1 + (consumer + 1) % F::CONSUMERS, 256);
    }

    // What the sums of q.k start from, off the diagonal
    __device__ void load_start() {
        const float4* pair = shared.start[F::stage(steps)].pair + lane() % 4;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 4) {
            float4 x = pair[i];
            scores[i] = x.x, scores[i + 1] = x.y, scores[i + 2] = x.z, scores[i + 3] = x.w;
        }
    }
    __device__ void start_scores(bool accumulate) {
        sm90_products_fence();
        sm90_multiply_abt<DH, F::ROWS, KEYS>(scores,
                                             sm90_operand<F::ROWS>(shared.q) + sm90_rows(64 * consumer),
                                             sm90_operand<KEYS>(shared.k[F::stage(steps)]), accumulate);
        sm90_products_commit();
    }
    __device__ void start_sum() {
        sm90_products_fence();
        sm90_multiply_ab(sum, probabilities, sm90_operand<KEYS>(shared.v[F::stage(steps - 1)]), true);
        sm90_products_commit();
    }

    // Of scores[i]: the column, counted from the lane's first, and which of the two rows
    __device__ static constexpr int column(int i) { return i / 4 * 8 + i % 2; }
    __device__ static constexpr int half(int i) { return i / 2 % 2; }

    // On the diagonal: scores become exponents to base 2, relative to the row's own c; keys ahead drop out.
    __device__ void finish_scores(const Sm90ForwardTile& tile, int n) {
        int lane = this->lane(), first_column = lane % 4 * 2;
        int own = tile.i0 + row(lane) - n * KEYS - first_column; // the first row's own column
        const float* high = shared.diagonal[F::stage(steps)].high + first_column;
        const float* low = shared.diagonal[F::stage(steps)].low + first_column;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            float x = scores[i] * F::SCALE;
            if (GATE)
                x += (from_first[half(i)] + high[column(i)]) + (from_first_low[half(i)] + low[column(i)]);
            scores[i] = column(i) > own + 8 * half(i) ? -INFINITY : x;
        }
    }

    // What turns scores into exponents to base 2, relative to the row's own c: the factor, and what is added
    template <bool DIAGONAL> __device__ static constexpr float factor() { return DIAGONAL ? 1 : F::SCALE; }
    template <bool DIAGONAL> __device__ float shift(int h) const {
        return GATE && !DIAGONAL ? from_first[h] : 0;
    }

    // A row's `top` need not be its maximum, only near enough for 2^(x - top) to stay in range: it is raised,
    // and what was summed rescaled, only when a score exceeds it by RAISE, which is rare after a row's first
    // tile. Scores are compared as integers, three in one instruction: right for positive ones, and others do
    // not matter beside a positive limit.
    template <bool DIAGONAL> __device__ bool exceed_top() const {
        int highest[2] = {INT_MIN, INT_MIN};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2)
            highest[half(i)] =
                __vimax3_s32(highest[half(i)], __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
        bool exceed = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float limit = (top[h] + F::RAISE - shift<DIAGONAL>(h)) * (1 / factor<DIAGONAL>());
            exceed |= limit <= 0 || highest[h] > __float_as_int(limit);
        }
        return __any_sync(0xffffffffu, exceed);
    }
    template <bool DIAGONAL> __device__ void raise_top(float (&rescale)[2]) {
        float highest[2] = {scores[0], scores[2]};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) highest[half(i)] = fmaxf(highest[half(i)], scores[i]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = fmaxf(top[h], highest[h] * factor<DIAGONAL>() + shift<DIAGONAL>(h));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
            rescale[h] = sm90_exp2(top[h] - x);
            total[h] *= rescale[h];
            top[h] = x;
        }
    }

    // Turns scores into exponentials and adds them to total. Returns whether sum is to be multiplied by
    // rescale.
    template <bool DIAGONAL> __device__ bool exponentiate(float (&rescale)[2]) {
        bool raise = exceed_top<DIAGONAL>();
        if (raise) raise_top<DIAGONAL>(rescale);
        float add[2] = {shift<DIAGONAL>(0) - top[0], shift<DIAGONAL>(1) - top[1]};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2) {
            scores[i] = sm90_exp2(scores[i] * factor<DIAGONAL>() + add[half(i)]);
            scores[i + 1] = sm90_exp2(scores[i + 1] * factor<DIAGONAL>() + add[half(i)]);
            total[half(i)] += scores[i] + scores[i + 1];
        }
        return raise;
    }
    __device__ void keep_probabilities() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
            probabilities[i / 4][i % 4] = sm90_pack(scores[2 * i], scores[2 * i + 1]);
    }

    __device__ void first_step(const Sm90ForwardTile& tile) {
        float rescale[2];
        int row = this->row(lane());
        sm90_wait(&shared.q_full, works % 2);
        sm90_wait(&shared.k_full[F::stage(steps)], F::parity(steps));
        start_scores(false);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[h] = -1e30f; // finite: no infinity is ever subtracted from another
            total[h] = 0;
            from_first[h] = GATE ? shared.rows[works % 2].high[row + 8 * h] : 0;
            from_first_low[h] = GATE ? shared.rows[works % 2].low[row + 8 * h] : 0;
        }
#pragma unroll
        for (int i = 0; i < DH / 2; i++) sum[i] = 0;
        sm90_products_wait<0>();
        sm90_hold(scores);
        finish_scores(tile, tile.last);
        sm90_arrive_warp(&shared.k_empty[F::stage(steps)]);
        exponentiate<true>(rescale);
        sm90_wait(&shared.v_full[F::stage(steps)], F::parity(steps));
        steps++;
        keep_probabilities();
    }

    // The scores of tile n of keys, beside the sum over tile n + 1, whose values are there.
    template <bool DIAGONAL> __device__ void step(const Sm90ForwardTile& tile, int n) {
        constexpr bool START = GATE && !DIAGONAL;
        float rescale[2];
        sm90_wait(&shared.k_full[F::stage(steps)], F::parity(steps));
        if (START) load_start();
        wait_turn();
        start_scores(START);
        start_sum();
        pass_turn();
        sm90_products_wait<1>();
        sm90_hold(scores);
        if (DIAGONAL) finish_scores(tile, n);
        sm90_arrive_warp(&shared.k_empty[F::stage(steps)]);
        bool raised = exponentiate<DIAGONAL>(rescale);
        // The next values are waited for here and not where they are needed because the compiler moves no
        // instruction across such a loop: it would start the exponentials when the sum is there, not before.
        sm90_hold(scores);
        sm90_wait(&shared.v_full[F::stage(steps)], F::parity(steps));
        finish_sum();
        steps++;
        if (raised) {
#pragma unroll
            for (int i = 0; i < DH / 2; i++) sum[i] *= rescale[half(i)];
        }
        keep_probabilities();
    }
    __device__ void finish_sum() {
        sm90_products_wait<0>();
        sm90_hold(sum);
        sm90_hold(probabilities);
        sm90_arrive_warp(&shared.v_empty[F::stage(steps - 1)]);
    }
    __device__ void last_sum() {
        start_sum();
        finish_sum();
    }

    // Each warp stores its 16 rows by itself.
    __device__ void store(const Sm90ForwardTile& tile) {
        int T = p.shape.T, lane = this->lane(), row = this->row(lane), warp_row = warp * 16;
        bf16* o = shared.o + warp_row * DH;
        if (lane == 0) sm90_wait_stores_read<0>(); // those of the tile before
        __syncwarp();
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float l = total[h] + __shfl_xor_sync(0xffffffffu, total[h], 1);
            l += __shfl_xor_sync(0xffffffffu, l, 2);
            factor[h] = __fdividef(1, l);
            int i = tile.i0 + row + 8 * h;
            if (lane % 4 == 0 && i < T)
                p.lse[(int64_t)tile.head * T + i] = (top[h] + log2f(l)) * 0.6931471805599453f;
        }
        uint32_t to = sm90_address(o);
#pragma unroll
        for (int n = 0; n < DH / 16; n++) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                pairs[i] =
                    sm90_pack(sum[8 * n + 2 * i] * factor[i % 2], sum[8 * n + 2 * i + 1] * factor[i % 2]);
            sm90_store_matrices(to + sm90_at<16>(lane % 16, 2 * n + lane / 16), pairs[0], pairs[1], pairs[2],
                                pairs[3]);
        }
        sm90_fence_shared();
        __syncwarp();
        if (lane == 0 && tile.i0 + warp_row < T) {
            sm90_store_tile<DH, 16>(&p.o, tile.h, tile.i0 + warp_row, tile.b, o);
            sm90_commit_stores();
        }
    }

    // The tile at hand, if there is one
    __device__ bool tile_at_hand(Sm90ForwardTile& tile) const {
        unsigned index = __shfl_sync(0xffffffffu, *(volatile unsigned*)&shared.work[works % 2], 0);
        if (index >= p.shape.works()) return false;
        tile = Sm90ForwardTile::of<F>(index, p);
        return true;
    }

    __device__ void run() {
        Sm90ForwardTile tile;
        if (consumer == F::CONSUMERS - 1) pass_turn();
        for (;; works++) {
            sm90_wait(&shared.work_full[works % 2], works / 2 % 2);
            if (!tile_at_hand(tile)) break;
            first_step(tile);
            for (int n = tile.last - 1; n >= tile.diagonal; n--) step<true>(tile, n);
            for (int left = tile.diagonal - tile.first; left > 0; left--) step<false>(tile, 0);
            sm90_arrive_warp(&shared.q_empty);
            last_sum();
            tile_at_hand(tile); // again: not kept beside the loop
            store(tile);
            sm90_arrive_warp(&shared.work_empty[works % 2]);
        }
        if (lane() == 0) sm90_wait_stores_read<0>(); // shared memory must outlive them
    }
};

// ----------------------------------------------------------------------------
// kernel and launch

template <int DH, bool GATE>
__global__ void __launch_bounds__(Sm90Forward<DH>::THREADS, 1)
    sm90_forward_kernel(const __grid_constant__ Sm90ForwardParameters p) {
#if SM90_CODE
    typedef Sm90Forward<DH> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    if (threadIdx.x == 0) shared.init_barriers(GATE);
    __syncthreads();
    if (threadIdx.x < 128) {
        sm90_give_registers<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) sm90_forward_load<DH>(shared, p);
        if (GATE && threadIdx.x >= 32 && threadIdx.x < 32 + 32 * F::GATE_WARPS)
            sm90_forward_gate<DH>(shared, p);
    } else {
        sm90_take_registers<F::CONSUMER_REGISTERS>();
        Sm90ForwardConsumer<DH, GATE>(shared, p).run();
    }
#endif
}

// Bytes of scratch that attention_forward_sm90 needs.
static inline size_t attention_forward_scratch_sm90(void) { return 16; }

template <int DH, bool GATE>
static inline void attention_forward_sm90(bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                                          const double* c, const int* first_key_block, const int* head_order,
                                          void* scratch, int64_t B, int64_t T, int64_t NH,
                                          cudaStream_t stream) {
    typedef Sm90Forward<DH> F;
    Sm90ForwardParameters p;
    p.q = sm90_tensor_map(q, B, T, NH, DH, F::ROWS);
    p.k = sm90_tensor_map(k, B, T, NH, DH, F::KEYS);
    p.v = sm90_tensor_map(v, B, T, NH, DH, F::KEYS);
    p.o = sm90_tensor_map(o, B, T, NH, DH, 16);
    p.lse = lse, p.c = c, p.first_key_block = first_key_block, p.counter = (unsigned*)scratch;
    p.shape = attention_shape(B, T, NH, DH, F::ROWS, head_order, 4);
    CUDA_CHECK(cudaMemsetAsync(p.counter, 0, sizeof *p.counter, stream));
    // A thread block for each multiprocessor, or for each tile where those are fewer
    int device, processors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    int64_t works = (int64_t)p.shape.heads * p.shape.tiles;
    attention_launch<typename F::Shared, SM90_SHARED_KIB>(
        sm90_forward_kernel<DH, GATE>, works < processors ? works : processors, F::THREADS, stream, p);
}

#endif // LLMC_ATTENTION_SM90_FORWARD_CUH
