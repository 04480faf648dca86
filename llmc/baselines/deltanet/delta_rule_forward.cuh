/*
Outputs of the delta rule, O = scale (Q S0 + P V') with P = lower(Q K^T), and with decays their factors, from
the states and V' of delta_rule_states.cuh; and P^T dO, the first term of dV' there. A thread block has a tile
of 64 tokens of one head, each of its four warps 16 of them.
*/
#pragma once

#include "delta_rule_states.cuh"

struct DeltaOutput {
    static constexpr int THREADS = DeltaBlock::THREADS;
    struct Shared {
        bf16 q[DELTA_ROWS], k[DELTA_ROWS], values_t[DELTA_ROWS], state_t[DELTA_STATE];
        float cum[DELTA_CHUNK];
    };
};

template <bool DOCS, bool DECAY>
static __global__ void __launch_bounds__(DeltaOutput::THREADS, 2)
    delta_rule_output_kernel(bf16* o, const __grid_constant__ Scan a, const __grid_constant__ DeltaWork work,
                             const __grid_constant__ ScanShape s) {
    extern __shared__ __align__(1024) char shared_bytes[];
    DeltaOutput::Shared& shared = *(DeltaOutput::Shared*)shared_bytes;
    DeltaBlock block(work, s);
    int row = (int)threadIdx.x / 32 * 16, t = block.first + row;
    DeltaWalls walls = {};
    if (DOCS) walls = DeltaWalls::of(block, work, s);
    block.copy(shared.q, a.q + block.keys, s, s.key_row);
    block.copy(shared.k, a.k + block.keys, s, s.key_row);
    cp_async_commit_group();
    const int slices = DECAY ? work.slices : 1;
    block.copy_blocks<DELTA_ROWS>(shared.values_t, work.values_t, block.tile * slices);
    block.copy_blocks<DELTA_STATE>(shared.state_t, work.states_t, block.tile * slices);
    cp_async_commit_group();
    float since[2] = {};
    if (DECAY) delta_rule_load_cum(shared.cum, block, work);
    if (DECAY) delta_rule_row_factors(since, DELTA_SINCE, row, block, work);
    cp_async_wait_group<1>();
    __syncthreads();
    float p[1][8][4], acc[1][16][4];
    scan_clear(p);
    TileA<DELTA_D, false> tile_q(shared.q, row);
    scan_matmul<DELTA_D>(p, tile_q, TileB<DELTA_D, false>(shared.k));
    delta_rule_mask<false, false, DOCS>(p, row, walls);
    if (DECAY) delta_rule_decay<false>(p, row, shared.cum);
    const int64_t row_stride = (int64_t)s.NH * s.V;
    for (int slice = 0; slice < slices; slice++) {
        cp_async_wait_all();
        __syncthreads();
        scan_clear(acc);
        scan_matmul<DELTA_D>(acc, tile_q, BlockB<DELTA_D, false>(shared.state_t));
        if (DECAY)
            delta_rule_scale_rows(acc, since);
        else if (DOCS)
            delta_rule_clear_rows(acc, row, walls.first());
        BlockB<DELTA_CHUNK, false> tile_values(shared.values_t);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t f[4];
            scan_pack(f, p, 2 * j);
            scan_mma(acc, f, tile_values, j * 16);
        }
        if (slice + 1 < slices) {
            __syncthreads(); // the slice's tiles have been read
            block.copy_blocks<DELTA_ROWS>(shared.values_t, work.values_t, block.tile * slices + slice + 1);
            block.copy_blocks<DELTA_STATE>(shared.state_t, work.states_t, block.tile * slices + slice + 1);
        }
        // through rows that no other warp uses: of q, or where q is needed again of k
        sm80_store<DELTA_D>(o + block.out + slice * DELTA_D + t * row_stride, row_stride, (int)s.T - t,
                            (DECAY ? shared.k : shared.q) + row * DELTA_D, acc,
                            [&](int, int) { return s.scale; });
    }
}

struct DeltaY {
    static constexpr int THREADS = DeltaBlock::THREADS;
    struct Shared {
        bf16 q[DELTA_ROWS], k[DELTA_ROWS], dout[DELTA_ROWS];
        float cum[DELTA_CHUNK];
    };
};

// Writes work.y = P^T dO.
template <bool DOCS, bool DECAY>
static __global__ void __launch_bounds__(DeltaY::THREADS, 3)
    delta_rule_y_kernel(const __grid_constant__ Scan a, const bf16* dout,
                        const __grid_constant__ DeltaWork work, const __grid_constant__ ScanShape s) {
    extern __shared__ __align__(1024) char shared_bytes[];
    DeltaY::Shared& shared = *(DeltaY::Shared*)shared_bytes;
    DeltaBlock block(work, s);
    int row = (int)threadIdx.x / 32 * 16;
    DeltaWalls walls = {};
    if (DOCS) walls = DeltaWalls::of(block, work, s);
    block.copy(shared.q, a.q + block.keys, s, s.key_row);
    block.copy(shared.k, a.k + block.keys, s, s.key_row);
    block.copy(shared.dout, dout + block.out, s, (int64_t)s.NH * s.V);
    if (DECAY) delta_rule_load_cum(shared.cum, block, work);
    cp_async_wait_all();
    __syncthreads();
    float p[1][8][4], acc[1][16][4];
    scan_clear(p);
    scan_matmul<DELTA_D>(p, TileA<DELTA_D, false>(shared.k, row), TileB<DELTA_D, false>(shared.q));
    delta_rule_mask<true, false, DOCS>(p, row, walls);
    if (DECAY) delta_rule_decay<true>(p, row, shared.cum);
    const int slices = DECAY ? work.slices : 1;
    for (int slice = 0; slice < slices; slice++) { // of dO, in dout and q in turn
        if (DECAY && slice > 0) cp_async_wait_all();
        if (DECAY) __syncthreads(); // the tile before has been read, and the slice's is there
        if (slice + 1 < slices)
            block.copy(slice % 2 ? shared.dout : shared.q, dout + block.out + (slice + 1) * DELTA_D, s,
                       (int64_t)s.NH * s.V);
        TileB<DELTA_D, true> tile_dout(slice % 2 ? shared.q : shared.dout);
        scan_clear(acc);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t f[4];
            scan_pack(f, p, 2 * i);
            scan_mma(acc, f, tile_dout, i * 16);
        }
        sm80_store<DELTA_D>(work.y + (block.tile * slices + slice) * DELTA_ROWS + row * DELTA_D, DELTA_D, 16,
                            shared.k + row * DELTA_D, acc, [](int, int) { return 1; });
    }
}

static inline void delta_rule_output(bf16* o, const DeltaWork* work, const Scan* a, const ScanShape* s,
                                     cudaStream_t stream) {
    auto kernel = s->decays      ? s->doc_start ? delta_rule_output_kernel<true, true>
                                                : delta_rule_output_kernel<false, true>
                       : s->doc_start ? delta_rule_output_kernel<true, false>
                                 : delta_rule_output_kernel<false, false>;
    scan_launch<DeltaOutput>(kernel, s->B * s->NH * work->chunks, stream, o, *a, *work, *s);
}

static inline void delta_rule_y(const DeltaWork* work, const Scan* a, const bf16* dout, const ScanShape* s,
                                cudaStream_t stream) {
    auto kernel = s->decays
                      ? s->doc_start ? delta_rule_y_kernel<true, true> : delta_rule_y_kernel<false, true>
                  : s->doc_start ? delta_rule_y_kernel<true, false>
                                 : delta_rule_y_kernel<false, false>;
    scan_launch<DeltaY>(kernel, s->B * s->NH * work->chunks, stream, *a, dout, *work, *s);
}

// o [B,T,NH,V]; updates a->state where there is one.
static inline void delta_rule_forward(bf16* o, const Scan* a, const ScanShape* s, cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    delta_rule_check(a, s);
    ScanMemory memory = scan_memory(a);
    DeltaWork work = delta_rule_work(&memory, s, false);
    delta_rule_prepare(&work, a, s, stream);
    delta_rule_states(&work, a, NULL, SCAN_FORWARD, s, stream);
    delta_rule_output(o, &work, a, s, stream);
}
