/*
Forgetting attention forward on Hopper:

    o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + cum_logf_i - cum_logf_j) v_j  over j <= i,    dh 64 or 128

Thread blocks are persistent: each takes tiles of 128 or 192 queries from a global counter, longest first. The
first tile comes from the counter too: a thread block that starts late, because another kernel (NCCL) holds
its SM, then finds short tiles left, or none. Warp roles:

    warp 0       tma_producer: Q, K, V tiles  ->  shared memory (K and V: ring of 2 or 4 stages); one thread
    warps 1-2    gate_producer: acc_init of each K tile, row_gate of the Q tile; only with a gate
    warp 3       idle
    warps 4-     mma_consumer: 2 or 3 warpgroups of 64 queries, from the diagonal down to the first key that
                 is neither pruned nor hidden by the window; pseudocode of the loop: above first_step

Layouts are those of attention.cuh, which calls attention_forward_sm90. The gate is described in shape.cuh;
the anchor is the tile's first query.

The softmax limits this kernel, not the tensor cores, so the loop is written for few instructions: scores are
only checked for an overflow, and rescaling is rare (may_need_rescale).
*/
#pragma once

#include <limits.h>
#include "sm90_band.cuh"

// ----------------------------------------------------------------------------
// shared memory, barriers and tiles

template <int DH, bool WITH_WINDOW> struct Sm90Forward : Sm90ForwardTiles<DH> {
    typedef Sm90ForwardTiles<DH> Tiles;
    static constexpr bool WINDOW = WITH_WINDOW;
    static constexpr int CHANNELS = DH, ROWS = Tiles::CONSUMERS * 64, KEYS = Tiles::KEYS,
                         STAGES = Tiles::STAGES;
    static constexpr int GATE_WARPS = 2; // of the producer warpgroup, after the tma_producer
    static constexpr int CONSUMER_WARPS = Tiles::CONSUMERS * 4, THREADS = 128 + Tiles::CONSUMERS * 128;
    static constexpr int TILE_BYTES = KEYS * DH * (int)sizeof(bf16); // of keys or values
    static constexpr float RESCALE_THRESHOLD = 8;
    static constexpr double ROOT = AttentionScale<DH>::ROOT;
    static constexpr float SCALE = AttentionScale<DH>::SCALE;
    static_assert(KEYS == ATTENTION_BLOCK, "pruning counts tiles of keys");

    // Every role counts tiles of queries, and steps (one tile of keys each), from the kernel's start. The
    // count gives the stage and the phase of its barriers.
    __device__ static int stage(uint32_t step) { return (int)(step % STAGES); }
    __device__ static uint32_t phase(uint32_t step) { return step / STAGES % 2; }

    struct Shared {
        bf16 q[ROWS * DH], k[STAGES][KEYS * DH], v[STAGES][KEYS * DH], o[ROWS * DH];
        AttentionAccInit<KEYS> acc_init[STAGES]; // off the diagonal: sqrt(dh) (anchor - cum_logf_j)
        AttentionGate<KEYS> key_gate[STAGES];    // on the diagonal: anchor - cum_logf_j
        AttentionGate<ROWS> row_gate[2];         // cum_logf_i - anchor
        unsigned tile_number[2];
        uint64_t tile_full[2], tile_empty[2], q_full, q_empty;
        uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];

        __device__ void init_barriers(bool gate) {
            for (int i = 0; i < 2; i++) {
                sm90_barrier_init(&tile_full[i], 1, 0);
                sm90_barrier_init(&tile_empty[i], 0, CONSUMER_WARPS + (gate ? GATE_WARPS : 0));
            }
            sm90_barrier_init(&q_full, 1, 0);
            sm90_barrier_init(&q_empty, 0, CONSUMER_WARPS);
            for (int i = 0; i < STAGES; i++) {
                sm90_barrier_init(&k_full[i], 1, gate ? GATE_WARPS : 0); // the keys, and their acc_init
                sm90_barrier_init(&v_full[i], 1, 0);
                sm90_barrier_init(&k_empty[i], 0, CONSUMER_WARPS);
                sm90_barrier_init(&v_empty[i], 0, CONSUMER_WARPS);
            }
            sm90_barrier_init_fence();
        }
    };
};

struct Sm90ForwardParameters {
    CUtensorMap q, k, v, o; // boxes of ROWS, KEYS, KEYS and 16 (each warp stores its own rows of o) tokens
    float* lse;
    const double* cum_logf;
    unsigned* tile_counter; // tiles taken
    AttentionShape shape;
    int last_tile; // index of a head's last tile of queries
};

// A tile of queries from i0 on, and its tiles of keys: from last down to first, masked from `diagonal` on.
struct Sm90ForwardTile {
    int head, b, h, i0, last, diagonal, first;

    static constexpr unsigned NONE = UINT_MAX;
    // Number, the same in all roles, of the n-th tile to compute of the first `heads` heads
    __device__ static unsigned number(unsigned n, const Sm90ForwardParameters& p, int heads) {
        if (n >= (unsigned)heads * (unsigned)p.shape.tiles_per_head) return NONE;
        AttentionTile at = p.shape.tile(n, heads);
        return (unsigned)at.head * (unsigned)p.shape.tiles_per_head + (unsigned)at.tile_index;
    }
    template <class F> __device__ static Sm90ForwardTile of(unsigned number, const Sm90ForwardParameters& p) {
        AttentionTile at = {(int)(number / (unsigned)p.shape.tiles_per_head),
                            (int)(number % (unsigned)p.shape.tiles_per_head)};
        Sm90ForwardTile tile;
        tile.head = at.head;
        tile.b = at.head / p.shape.NH;
        tile.h = at.head % p.shape.NH;
        tile.i0 = (p.last_tile - at.tile_index) * F::ROWS; // the last queries have most keys
        tile.last = (min(tile.i0 + F::ROWS, p.shape.T) - 1) / F::KEYS;
        tile.diagonal = tile.i0 / F::KEYS;
        tile.first = p.shape.first_key_block<F::WINDOW>(tile.head, tile.diagonal);
        return tile;
    }
};

// ----------------------------------------------------------------------------
// tma_producer: one thread, which has already taken tile `index` from the counter

template <class F>
__device__ static inline void sm90_forward_tma_producer(typename F::Shared& shared,
                                                        const Sm90ForwardParameters& p, unsigned index) {
    const int heads = p.shape.heads_with_tiles();
    uint32_t step_count = 0;
    for (uint32_t tile_count = 0;; tile_count++) {
        unsigned number = Sm90ForwardTile::number(index, p, heads);
        sm90_wait(&shared.tile_empty[tile_count % 2], tile_count / 2 % 2 ^ 1);
        shared.tile_number[tile_count % 2] = number;
        sm90_arrive(&shared.tile_full[tile_count % 2]);
        if (number == Sm90ForwardTile::NONE) break;
        Sm90ForwardTile tile = Sm90ForwardTile::of<F>(number, p);
        index = atomicAdd(p.tile_counter, 1); // early: its latency is long

        sm90_wait(&shared.q_empty, tile_count % 2 ^ 1);
        sm90_arrive_expect_tx(&shared.q_full, sizeof shared.q);
        sm90_load_tile<F::CHANNELS, F::ROWS>(shared.q, &p.q, tile.h, tile.i0, tile.b, &shared.q_full);
        const int key_head = p.shape.key_head(tile.h);
        auto load = [&](bf16* to, const CUtensorMap* map, uint64_t* full, uint64_t* empty, int n,
                        uint32_t step) {
            sm90_wait(empty + F::stage(step), F::phase(step) ^ 1);
            sm90_arrive_expect_tx(full + F::stage(step), F::TILE_BYTES);
            sm90_load_tile<F::CHANNELS, F::KEYS>(to + F::stage(step) * (F::KEYS * F::CHANNELS), map, key_head,
                                                 n * F::KEYS, tile.b, full + F::stage(step));
        };
        // A step needs a tile of keys and the values of the tile before.
        for (int n = tile.last; n >= tile.first - 1; n--, step_count++) {
            if (n >= tile.first) load(shared.k[0], &p.k, shared.k_full, shared.k_empty, n, step_count);
            if (n < tile.last) load(shared.v[0], &p.v, shared.v_full, shared.v_empty, n + 1, step_count - 1);
        }
        step_count--; // the last one loaded values only
    }
}

// ----------------------------------------------------------------------------
// gate_producer: two warps

template <class F>
__device__ static inline void sm90_forward_gate_producer(typename F::Shared& shared,
                                                         const Sm90ForwardParameters& p) {
    constexpr int THREADS = 32 * F::GATE_WARPS, KEYS_PER_THREAD = F::KEYS / THREADS;
    int thread = (int)threadIdx.x - 32;
    uint32_t step_count = 0;
    for (uint32_t tile_count = 0;; tile_count++) {
        sm90_wait(&shared.tile_full[tile_count % 2], tile_count / 2 % 2);
        unsigned number = shared.tile_number[tile_count % 2];
        if (number == Sm90ForwardTile::NONE) break;
        Sm90ForwardTile tile = Sm90ForwardTile::of<F>(number, p);
        const double* cum_logf = p.cum_logf + (int64_t)tile.head * p.shape.T;
        double anchor = cum_logf[tile.i0], next[KEYS_PER_THREAD];
        auto load = [&](int n) {
#pragma unroll
            for (int i = 0; i < KEYS_PER_THREAD; i++)
                next[i] = cum_logf[max(min(n * F::KEYS + thread + THREADS * i, p.shape.T - 1), 0)];
        };
        load(tile.last);
#pragma unroll 1 // unrolled, it needs more registers than the role has
        for (int i = thread; i < F::ROWS; i += THREADS)
            shared.row_gate[tile_count % 2].set(i, cum_logf[min(tile.i0 + i, p.shape.T - 1)] - anchor);
        for (int n = tile.last; n >= tile.first; n--, step_count++) {
            int stage = F::stage(step_count);
            sm90_wait(&shared.k_empty[stage], F::phase(step_count) ^ 1);
#pragma unroll
            for (int i = 0; i < KEYS_PER_THREAD; i++) {
                int key = thread + THREADS * i;
                double difference = anchor - next[i];
                if (n >= tile.diagonal)
                    shared.key_gate[stage].set(key, difference);
                else
                    shared.acc_init[stage].set(key, (float)(difference * F::ROOT));
            }
            sm90_arrive_warp(&shared.k_full[stage]);
            load(n - 1);
        }
        sm90_arrive_warp(&shared.tile_empty[tile_count % 2]);
    }
}

// ----------------------------------------------------------------------------
// mma_consumer: a warpgroup of 64 queries. A thread holds parts of two rows of its warp's 16, lane / 4 and
// lane / 4 + 8.

template <int DH, bool GATE, bool WINDOW> struct Sm90ForwardConsumer {
    typedef Sm90Forward<DH, WINDOW> F;
    static constexpr int KEYS = F::KEYS;

    typename F::Shared& shared;
    const Sm90ForwardParameters& p;
    int warp, consumer; // the same in all lanes
    uint32_t tile_count = 0, step_count = 0;
    float s[KEYS / 2], acc[DH / 2];
    uint32_t probabilities[KEYS / 16][4];
    float row_max[2], row_sum[2]; // s is exponentiated relative to row_max; row_sum: the lane's part of it
    float row_gate_high[2], row_gate_low[2]; // log2(e) (cum_logf_i - anchor)

    __device__ Sm90ForwardConsumer(typename F::Shared& shared, const Sm90ForwardParameters& p)
        : shared(shared), p(p) {
        warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32 - 4, 0);
        consumer = warp / 4;
    }

    // The lane and the thread's first row in the tile are recomputed where they are needed: with three
    // consumers no registers are left to keep them, or values derived from them, across the loop.
    __device__ static int lane() {
        int lane;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }
    __device__ int row(int lane) const { return warp * 16 + lane / 4; }

    // Ping-pong: consumers issue their wgmmas in turn, so that the exponentials of one overlap with the
    // wgmmas of another.
    __device__ void pingpong_wait() const {
        if (F::PINGPONG) sm90_named_sync(1 + consumer, 256);
    }
    __device__ void pingpong_arrive() const {
        if (F::PINGPONG) sm90_named_arrive(1 + (consumer + 1) % F::CONSUMERS, 256);
    }

    __device__ void load_acc_init() {
        const float4* pair = shared.acc_init[F::stage(step_count)].pair + lane() % 4;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 4) {
            float4 x = pair[i];
            s[i] = x.x, s[i + 1] = x.y, s[i + 2] = x.z, s[i + 3] = x.w;
        }
    }
    // S = Q K^T, plus s where accumulate
    __device__ void issue_qk(bool accumulate) {
        sm90_wgmma_fence();
        sm90_matmul_abt<DH, F::ROWS, KEYS>(
            s, sm90_make_smem_desc<F::ROWS>(shared.q) + sm90_rows(64 * consumer),
            sm90_make_smem_desc<KEYS>(shared.k[F::stage(step_count)]), accumulate);
        sm90_commit_group();
    }
    // O += P V of the step before
    __device__ void issue_pv() {
        sm90_wgmma_fence();
        sm90_matmul_ab(acc, probabilities, sm90_make_smem_desc<KEYS>(shared.v[F::stage(step_count - 1)]),
                       true);
        sm90_commit_group();
    }

    // Column of s[i] relative to the lane's first one, and which of the two rows
    __device__ static constexpr int column(int i) { return i / 4 * 8 + i % 2; }
    __device__ static constexpr int half(int i) { return i / 2 % 2; }

    // On the diagonal: turns scores into exponents to base 2, relative to cum_logf_i, with later keys masked.
    __device__ void finish_diagonal(const Sm90ForwardTile& tile, int n) {
        int lane = this->lane(), first_column = lane % 4 * 2;
        int own = tile.i0 + row(lane) - n * KEYS - first_column; // the first row's diagonal element
        const float* high = shared.key_gate[F::stage(step_count)].high + first_column;
        const float* low = shared.key_gate[F::stage(step_count)].low + first_column;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            float x = s[i] * F::SCALE;
            if (GATE)
                x += (row_gate_high[half(i)] + high[column(i)]) + (row_gate_low[half(i)] + low[column(i)]);
            s[i] = column(i) > own + 8 * half(i) ? -INFINITY : x;
        }
    }
    // Masks the keys before the window, in scores or exponents, where the tile has any.
    __device__ void mask_window(const Sm90ForwardTile& tile, int n) {
        if (tile.i0 + F::ROWS - n * KEYS <= p.shape.window) return;
        int lane = this->lane();
        // the last such column, relative to the lane's first one
        int before = tile.i0 + row(lane) - n * KEYS - lane % 4 * 2 - p.shape.window;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (column(i) <= before + 8 * half(i)) s[i] = -INFINITY;
    }

    // The exponent to base 2, relative to cum_logf_i, is s factor + shift.
    template <bool DIAGONAL> __device__ static constexpr float factor() { return DIAGONAL ? 1 : F::SCALE; }
    template <bool DIAGONAL> __device__ float shift(int h) const {
        return GATE && !DIAGONAL ? row_gate_high[h] : 0;
    }

    // row_max need not be the maximum, only close enough for 2^(x - row_max) to stay in range. It is updated,
    // and the accumulators rescaled, only when a score exceeds it by RESCALE_THRESHOLD, which is rare after a
    // row's first tile. Scores are compared as integers, three per instruction: positive floats compare like
    // their bits, and negative ones are below a positive limit either way. Where the limit is not positive
    // (rows whose scores are all far below zero), update_row_max decides.
    template <bool DIAGONAL> __device__ bool may_need_rescale() const {
        int tile_max[2] = {INT_MIN, INT_MIN};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2)
            tile_max[half(i)] =
                __vimax3_s32(tile_max[half(i)], __float_as_int(s[i]), __float_as_int(s[i + 1]));
        bool exceeds = false;
        for (int h = 0; h < 2; h++) {
            float limit = (row_max[h] + F::RESCALE_THRESHOLD - shift<DIAGONAL>(h)) * (1 / factor<DIAGONAL>());
            exceeds |= limit <= 0 || tile_max[h] > __float_as_int(limit);
        }
        return __any_sync(0xffffffffu, exceeds);
    }
    // Returns whether the accumulators must be multiplied by rescale.
    template <bool DIAGONAL> __device__ bool update_row_max(float (&rescale)[2]) {
        float tile_max[2] = {s[0], s[2]};
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) tile_max[half(i)] = fmaxf(tile_max[half(i)], s[i]);
        for (int h = 0; h < 2; h++) {
            tile_max[h] = tile_max[h] * factor<DIAGONAL>() + shift<DIAGONAL>(h);
            exceeds |= tile_max[h] > row_max[h] + F::RESCALE_THRESHOLD;
        }
        if (!__any_sync(0xffffffffu, exceeds)) return false;
        for (int h = 0; h < 2; h++) {
            float x = quad_max(fmaxf(row_max[h], tile_max[h]));
            rescale[h] = exp2_approx(row_max[h] - x);
            row_sum[h] *= rescale[h];
            row_max[h] = x;
        }
        return true;
    }

    // Exponentiates s and adds it to row_sum. Returns whether acc must be multiplied by rescale.
    template <bool DIAGONAL> __device__ bool exponentiate(float (&rescale)[2]) {
        bool rescaled = may_need_rescale<DIAGONAL>() && update_row_max<DIAGONAL>(rescale);
        float add[2] = {shift<DIAGONAL>(0) - row_max[0], shift<DIAGONAL>(1) - row_max[1]};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2) {
            s[i] = exp2_approx(s[i] * factor<DIAGONAL>() + add[half(i)]);
            s[i + 1] = exp2_approx(s[i + 1] * factor<DIAGONAL>() + add[half(i)]);
            row_sum[half(i)] += s[i] + s[i + 1];
        }
        return rescaled;
    }
    __device__ void pack_probabilities() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) probabilities[i / 4][i % 4] = pack_bf16x2(s[2 * i], s[2 * i + 1]);
    }

    // Main loop of a warpgroup (run), 64 queries of a tile; K[n], V[n]: tile n of 128 keys.
    //
    //     wait q_full, k_full;  S = Q K[last]^T;  scale, gate, masks;  arrive k_empty              first_step
    //     P = 2^(S - row_max), row_sum;  wait v_full
    //     for n = last - 1 .. first:                                                               step
    //         wait k_full;  S = 0, or acc_init (the keys' gate) before the diagonal
    //         [dh 128: wait for the other warpgroup to have issued]
    //         issue S += Q K[n]^T;  issue O += P V[n + 1]                   two wgmma groups in flight
    //         [dh 128: let the other warpgroup issue]
    //         wait S;  diagonal: scale, gate, causal mask;  window: mask;  arrive k_empty
    //         S = 2^(S scale + row_gate - row_max), row_sum += S            overlaps O += P V[n + 1]
    //         wait v_full;  wait O;  arrive v_empty;  O *= rescale, where row_max rose;  P = bf16(S)
    //     arrive q_empty;  O += P V[first];  arrive v_empty;  store O / row_sum, lse;  arrive tile_empty
    //
    // Pruning and the window only set `first`: skipped tiles are neither loaded nor computed. The
    // tma_producer runs up to STAGES tiles of keys ahead, so Q, K, V of the next tile of queries arrive
    // during the store.
    __device__ void first_step(const Sm90ForwardTile& tile) {
        float rescale[2];
        int row = this->row(lane());
        sm90_wait(&shared.q_full, tile_count % 2);
        sm90_wait(&shared.k_full[F::stage(step_count)], F::phase(step_count));
        issue_qk(false);
        for (int h = 0; h < 2; h++) {
            row_max[h] = -1e30f; // finite: no infinity is ever subtracted from another
            row_sum[h] = 0;
            row_gate_high[h] = GATE ? shared.row_gate[tile_count % 2].high[row + 8 * h] : 0;
            row_gate_low[h] = GATE ? shared.row_gate[tile_count % 2].low[row + 8 * h] : 0;
        }
#pragma unroll
        for (int i = 0; i < DH / 2; i++) acc[i] = 0;
        sm90_wait_group<0>();
        sm90_fence_operand(s);
        finish_diagonal(tile, tile.last);
        if (WINDOW) mask_window(tile, tile.last);
        sm90_arrive_warp(&shared.k_empty[F::stage(step_count)]);
        exponentiate<true>(rescale);
        sm90_wait(&shared.v_full[F::stage(step_count)], F::phase(step_count));
        step_count++;
        pack_probabilities();
    }

    // Scores of key tile n, while O += P V runs for tile n + 1, whose values have arrived.
    template <bool DIAGONAL> __device__ void step(const Sm90ForwardTile& tile, int n) {
        constexpr bool ACC_INIT = GATE && !DIAGONAL;
        float rescale[2];
        sm90_wait(&shared.k_full[F::stage(step_count)], F::phase(step_count));
        if (ACC_INIT) load_acc_init();
        pingpong_wait();
        issue_qk(ACC_INIT);
        issue_pv();
        pingpong_arrive();
        sm90_wait_group<1>();
        sm90_fence_operand(s);
        if (DIAGONAL) finish_diagonal(tile, n);
        if (WINDOW) mask_window(tile, n);
        sm90_arrive_warp(&shared.k_empty[F::stage(step_count)]);
        bool rescaled = exponentiate<DIAGONAL>(rescale);
        // Not where V is needed, but here, before the wait for O += P V: the compiler moves no instruction
        // across a spin loop, so the exponentials stay ahead of that wait.
        sm90_fence_operand(s);
        sm90_wait(&shared.v_full[F::stage(step_count)], F::phase(step_count));
        finish_pv();
        step_count++;
        if (rescaled) {
#pragma unroll
            for (int i = 0; i < DH / 2; i++) acc[i] *= rescale[half(i)];
        }
        pack_probabilities();
    }
    __device__ void finish_pv() {
        sm90_wait_group<0>();
        sm90_fence_operand(acc);
        sm90_fence_operand(probabilities);
        sm90_arrive_warp(&shared.v_empty[F::stage(step_count - 1)]);
    }

    // Each warp stores its own 16 rows.
    __device__ void store(const Sm90ForwardTile& tile) {
        int T = p.shape.T, lane = this->lane(), row = this->row(lane), warp_row = warp * 16;
        bf16* o = shared.o + warp_row * DH;
        if (lane == 0) sm90_wait_stores_read<0>(); // those of the previous tile
        __syncwarp();
        float factor[2];
        for (int h = 0; h < 2; h++) {
            float l = quad_sum(row_sum[h]);
            factor[h] = __fdividef(1, l);
            int i = tile.i0 + row + 8 * h;
            if (lane % 4 == 0 && i < T)
                p.lse[(int64_t)tile.head * T + i] = (row_max[h] + log2f(l)) * 0.6931471805599453f;
        }
        uint32_t to = smem_address(o);
#pragma unroll
        for (int n = 0; n < DH / 16; n++) {
            uint32_t pairs[4];
            for (int i = 0; i < 4; i++)
                pairs[i] =
                    pack_bf16x2(acc[8 * n + 2 * i] * factor[i % 2], acc[8 * n + 2 * i + 1] * factor[i % 2]);
            sm90_stmatrix(to + sm90_chunk_offset<16>(lane % 16, 2 * n + lane / 16), pairs);
        }
        sm90_fence_async_proxy();
        __syncwarp();
        if (lane == 0 && tile.i0 + warp_row < T) {
            sm90_store_tile<DH, 16>(&p.o, tile.h, tile.i0 + warp_row, tile.b, o);
            sm90_commit_stores();
        }
    }

    // Reads the tile that the tma_producer has announced; false if there are no more.
    __device__ bool read_tile(Sm90ForwardTile& tile) const {
        unsigned number =
            __shfl_sync(0xffffffffu, *(volatile unsigned*)&shared.tile_number[tile_count % 2], 0);
        if (number == Sm90ForwardTile::NONE) return false;
        tile = Sm90ForwardTile::of<F>(number, p);
        return true;
    }

    __device__ void run() {
        Sm90ForwardTile tile;
        if (consumer == F::CONSUMERS - 1) pingpong_arrive();
        for (;; tile_count++) {
            sm90_wait(&shared.tile_full[tile_count % 2], tile_count / 2 % 2);
            if (!read_tile(tile)) break;
            first_step(tile);
            for (int n = tile.last - 1; n >= tile.diagonal; n--) step<true>(tile, n);
            if (WINDOW)
                for (int n = tile.diagonal - 1; n >= tile.first; n--) step<false>(tile, n);
            else
                for (int left = tile.diagonal - tile.first; left > 0; left--)
                    step<false>(tile, 0); // only masks read the tile's number
            sm90_arrive_warp(&shared.q_empty);
            issue_pv();
            finish_pv();
            read_tile(tile); // again: not kept in registers across the loop
            store(tile);
            sm90_arrive_warp(&shared.tile_empty[tile_count % 2]);
        }
        if (lane() == 0) sm90_wait_stores_read<0>(); // the thread block must not end before
    }
};

// ----------------------------------------------------------------------------
// kernel and launch

template <int DH, bool GATE, bool WINDOW>
__global__ void __launch_bounds__(Sm90Forward<DH, WINDOW>::THREADS, 1)
    sm90_forward_kernel(const __grid_constant__ Sm90ForwardParameters p) {
#if SM90_CODE
    typedef Sm90Forward<DH, WINDOW> F;
    extern __shared__ __align__(1024) char shared_bytes[];
    typename F::Shared& shared = *(typename F::Shared*)shared_bytes;
    unsigned index = 0;
    if (threadIdx.x == 0) {
        index = atomicAdd(p.tile_counter, 1); // arrives while the barriers are initialized
        shared.init_barriers(GATE);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        sm90_reg_dealloc<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) sm90_forward_tma_producer<F>(shared, p, index);
        if (GATE && threadIdx.x >= 32 && threadIdx.x < 32 + 32 * F::GATE_WARPS)
            sm90_forward_gate_producer<F>(shared, p);
    } else {
        sm90_reg_alloc<F::CONSUMER_REGISTERS>();
        Sm90ForwardConsumer<DH, GATE, WINDOW>(shared, p).run();
    }
#endif
}

template <int DH, bool GATE, bool WINDOW>
static inline void attention_forward_sm90(const AttentionForward* a, const HeadShape* s,
                                          cudaStream_t stream) {
    typedef Sm90Forward<DH, WINDOW> F;
    static_assert(ATTENTION_FIRST_QUERY % F::ROWS == 0, "tiles begin at the first query");
    Sm90ForwardParameters p;
    AttentionForward at = attention_from_first_query(a, s);
    const HeadShape keys = key_shape(s);
    p.q = sm90_tensor_map(at.q, s, F::ROWS);
    p.k = sm90_tensor_map(a->k, &keys, F::KEYS);
    p.v = sm90_tensor_map(a->v, &keys, F::KEYS);
    p.o = sm90_tensor_map(at.o, s, 16);
    p.lse = a->lse;
    p.cum_logf = a->cum_logf;
    p.tile_counter = (unsigned*)a->scratch;
    p.shape = attention_shape(s, F::ROWS, a->bounds, 4);
    p.last_tile = p.shape.tiles_per_head - 1;
    p.shape.tiles_per_head -= (int)(a->first_query / F::ROWS);
    if (Sm90HasBand<DH, GATE, WINDOW>::value && a->bounds && a->bounds->head_order && a->first_query == 0) {
        p.shape.tiled_heads = a->bounds->head_order + p.shape.heads;
        sm90_band_forward(a, s, p.shape, p.tile_counter, stream);
    } else
        CUDA_CHECK(cudaMemsetAsync(p.tile_counter, 0, sizeof *p.tile_counter, stream));
    // One thread block per SM, or per tile where there are fewer
    int64_t tiles = (int64_t)p.shape.heads * p.shape.tiles_per_head;
    int64_t num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
    attention_launch<F, SM90_SHARED_KIB>(sm90_forward_kernel<DH, GATE, WINDOW>,
                                         tiles < num_sms ? tiles : num_sms, stream, p);
}
