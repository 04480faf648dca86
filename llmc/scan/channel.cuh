/*
The chunked scan with a decay per channel (HGRN2; gated linear attention). With q~, f~, v rows of a
projection:

    q = scale SiLU(q~)    f = bound + (1 - bound) sigmoid(f~)    k = 1 - f        channels of 128 a head
    S_t = diag(f_t) S_{t-1} + k_t v_t^T       o_t = S_t^T q_t                     S [128, 128]

Chunks of 64 tokens. Forward: two kernels and a small one.

    channel_states.cuh    states at the borders of chunks; segments of chunks in parallel, then their borders
    channel_output.cuh    o from the state at the chunk's start and the pairs within the chunk

Backward: states are recomputed, together with their gradients, which run from the end; then dv by the kernel
that computes o, and dq~, df~ by channel_keys.cuh. llmc/mixers/channel_step.cuh is the recurrence for one
token a sequence.

q, k and f are computed from q~ and f~ by each kernel: 12 instructions an element cost less than reading them.
Operands of tensor cores are bf16; gates, products of decays and sums fp32. Decays are multiplied, never
divided (channel_gates.cuh). States are bf16 between kernels, and fp32 within.

Nothing is added in an order that can change: every run on a GPU gives the same bits. The number of segments
depends on the GPU.

Called by the HGRN2 mixer.
*/
#pragma once

#include "channel_keys.cuh"
#include "channel_output.cuh"
#include "channel_states.cuh"

typedef struct {
    int64_t B, T, NH;   // heads of CHANNEL_HEAD channels
    int64_t row_stride; // elements of q, f, v and of their gradients from token to token; heads are adjacent
    float scale;
} ChannelShape;

typedef struct {
    const bf16 *q, *f, *v; // q and f before SiLU and sigmoid; aligned to 16 bytes
    const float* bound;    // [NH 128] least f; NULL: 0
    float* state;          // [B,NH,K,V] of the tokens before, updated; NULL: the sequences begin here
    void* scratch;         // channel_scratch_bytes
} Channel;

typedef struct {
    bf16 *dq, *df, *dv; // of q, f, v, in rows like theirs
    float* dbound;      // [NH 128] gradient of bound, overwritten, 0 where bound is 0; NULL: not needed
    const bf16* dout;   // [B,T,NH,128], contiguous
} ChannelBackward;

// ----------------------------------------------------------------------------
// scratch

// The next `bytes` of scratch, aligned to 256 bytes; only counts where scratch is NULL.
static inline void* channel_take(char* scratch, size_t* used, int64_t bytes) {
    void* at = scratch ? scratch + *used : NULL;
    *used += (size_t)ceil_div<int64_t>(bytes, 256) * 256;
    return at;
}

enum { CHANNEL_PLANNED = 132 }; // multiprocessors of an H100, for a plan where there is no GPU

// Sets sizes and scratch of w; returns the bytes of scratch. Segments: about two thread blocks of the states'
// kernel on every multiprocessor.
static inline size_t channel_plan(ChannelWork* w, const ChannelShape* s, void* scratch, bool backward) {
    int64_t heads = s->B * s->NH, chunks = ceil_div<int64_t>(s->T, CHANNEL_CHUNK),
            directions = backward ? 2 : 1;
    static const int64_t blocks =
        2 * (device_exists() ? device_attribute(cudaDevAttrMultiProcessorCount) : CHANNEL_PLANNED);
    int64_t segments = ceil_div<int64_t>(blocks, heads * directions);
    size_t used = 0;
    memset(w, 0, sizeof *w);
    w->T = (int)s->T, w->NH = (int)s->NH, w->row_stride = s->row_stride, w->scale = s->scale;
    w->chunks = (int)chunks;
    w->segment_chunks = (int)ceil_div<int64_t>(chunks, segments < chunks ? segments : chunks);
    w->segments = (int)ceil_div<int64_t>(chunks, w->segment_chunks);
    auto take = [&](int64_t bytes) { return channel_take((char*)scratch, &used, bytes); };
    for (int i = 0; i < directions; i++) {
        ChannelStates* states = &w->states[i];
        states->local = (bf16*)take(heads * chunks * CHANNEL_STATE * (int64_t)sizeof(bf16));
        states->decay = (float*)take(heads * chunks * CHANNEL_HEAD * (int64_t)sizeof(float));
        states->segment_sum = (float*)take(heads * w->segments * CHANNEL_STATE * (int64_t)sizeof(float));
        states->segment_decay = (float*)take(heads * w->segments * CHANNEL_HEAD * (int64_t)sizeof(float));
        states->segment_state = (bf16*)take(heads * w->segments * CHANNEL_STATE * (int64_t)sizeof(bf16));
    }
    if (backward)
        w->dbound_partial = (float*)take(s->B * chunks * s->NH * CHANNEL_HEAD * (int64_t)sizeof(float));
    return used;
}

// Bytes of scratch of a pass, aligned to 256 bytes
static inline size_t channel_scratch_bytes(const ChannelShape* s, bool backward) {
    ChannelWork w;
    return channel_plan(&w, s, NULL, backward);
}

// ----------------------------------------------------------------------------
// passes

static inline void channel_inputs(ChannelWork* w, const Channel* x) {
    w->q = x->q, w->f = x->f, w->v = x->v, w->bound = x->bound, w->state = x->state;
}

// o [B,T,NH,128], contiguous
static inline void channel_forward(bf16* o, const Channel* x, const ChannelShape* s, cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    ChannelWork w;
    int64_t heads = s->B * s->NH;
    if (heads * s->T == 0) return;
    channel_plan(&w, s, x->scratch, false);
    channel_inputs(&w, x);
    w.o = o;
    channel_states(&w, heads, false, stream);
    channel_launch<ChannelOutputShared>(channel_output_kernel<false>,
                                        dim3((unsigned)w.chunks, (unsigned)heads), stream, w);
}

// Writes the gradients in g. x->state must be NULL.
static inline void channel_backward(const ChannelBackward* g, const Channel* x, const ChannelShape* s,
                                    cudaStream_t stream) {
    Range range("scan", RANGE_BACKWARD, stream);
    ChannelWork w;
    int64_t heads = s->B * s->NH;
    assert(!x->state);
    if (heads * s->T == 0) return;
    channel_plan(&w, s, x->scratch, true);
    channel_inputs(&w, x);
    w.dout = g->dout, w.dq = g->dq, w.df = g->df, w.dv = g->dv;
    if (!g->dbound) w.dbound_partial = NULL;
    dim3 grid((unsigned)w.chunks, (unsigned)heads);
    channel_states(&w, heads, true, stream);
    channel_launch<ChannelOutputShared>(channel_output_kernel<true>, grid, stream, w);
    channel_launch<ChannelKeysShared>(channel_keys_kernel, dim3(2 * grid.x, grid.y), stream, w);
    if (g->dbound)
        sum_rows(g->dbound, w.dbound_partial, s->B * w.chunks, s->NH * CHANNEL_HEAD, false, stream);
}
