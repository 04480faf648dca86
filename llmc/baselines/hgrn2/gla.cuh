/*
The chunked scan with a decay per channel (HGRN2; gated linear attention). With q~, f~, v rows of a
projection:

    q = scale SiLU(q~)    f = bound + (1 - bound) sigmoid(f~)    k = 1 - f        channels of 128 a head
    S_t = diag(f_t) S_{t-1} + k_t v_t^T       o_t = S_t^T q_t                     S [128, 128]

Chunks of 64 tokens. Forward: two kernels and a small one.

    gla_states.cuh    states at the borders of chunks; segments of chunks in parallel, then their borders
    gla_output.cuh    o from the state at the chunk's start and the pairs within the chunk

Backward: the gradients of the states, from the last chunk on, and the states again where they are not saved;
then dv by the kernel that computes o, and dq~ and df~ by gla_dq_df.cuh. gla_step.cuh is the recurrence
for one token a sequence.

q, k and f are computed from q~ and f~ by each kernel: 12 instructions an element cost less than reading them.
Operands of tensor cores are bf16; gates, products of decays and sums fp32. Decays are multiplied, never
divided (gla_gates.cuh), so that a packed document begins with a decay of 0. States are bf16 between kernels,
and fp32 within.

All sums have a fixed order: runs on one model of GPU give the same bits. The number of segments depends on
the GPU.

Called by the HGRN2 mixer.
*/
#pragma once

#include "gla_dq_df.cuh"
#include "gla_output.cuh"
#include "gla_states.cuh"
#include "../shared/scan.cuh"

typedef struct {
    int64_t B, T, NH;   // heads of GLA_HEAD channels
    int64_t row_stride; // elements of q, f, v and of their gradients from token to token; heads are adjacent
    float scale;
} GlaShape;

typedef struct {
    const bf16 *q, *f, *v; // q and f before SiLU and sigmoid; aligned to 16 bytes
    const float* bound;    // [NH 128] least f; NULL: 0
    float* state;          // [B,NH,K,V] of the tokens before, updated; NULL: the sequences begin here
    void* saved;           // gla_saved_bytes: what the forward pass leaves to the backward pass
    void* scratch;         // gla_scratch_bytes
    // [B,T] of packed documents (llmc/model/documents.h), whose states begin with 0; NULL: a sequence is one
    const int32_t* doc_start;
} Gla;

typedef struct {
    bf16 *dq, *df, *dv; // of q, f, v, in rows like theirs
    float* dbound;      // [NH 128] gradient of bound, overwritten, 0 where bound is 0; NULL: not needed
    const bf16* dout;   // [B,T,NH,128], contiguous
    bool recomputes;    // saved was not kept: recompute it first
} GlaBackward;

// ----------------------------------------------------------------------------
// scratch

enum { GLA_PLANNED = 132 }; // SMs of an H100, for a plan where there is no GPU

// Sets sizes and buffers of w. Segments: about two thread blocks of the states' kernel on every
// SM. Fewer or shorter sequences may have more segments, but never need more memory.
static inline ScanMemory gla_plan(GlaWork* w, const GlaShape* s, const Gla* x, bool backward) {
    int64_t heads = s->B * s->NH, chunks = ceil_div<int64_t>(s->T, GLA_CHUNK);
    static const int64_t blocks =
        2 * (device_exists() ? device_attribute(cudaDevAttrMultiProcessorCount) : GLA_PLANNED);
    int64_t segments = ceil_div<int64_t>(blocks, heads), most = std::min(heads * chunks, heads + blocks);
    ScanMemory memory = {{(char*)x->saved, 0}, {(char*)x->scratch, 0}};
    memset(w, 0, sizeof *w);
    w->T = (int)s->T;
    w->NH = (int)s->NH;
    w->row_stride = s->row_stride;
    w->scale = s->scale;
    w->chunks = (int)chunks;
    w->segment_chunks = (int)ceil_div<int64_t>(chunks, segments < chunks ? segments : chunks);
    w->segments = (int)ceil_div<int64_t>(chunks, w->segment_chunks);
    assert(heads * w->segments <= most);
    w->q = x->q;
    w->f = x->f;
    w->v = x->v;
    w->bound = x->bound;
    w->doc_start = x->doc_start;
    w->state = x->state;
    for (int i = 0; i <= backward; i++) {
        GlaStates* states = &w->states[i];
        ScanArena* kept = i ? &memory.scratch : &memory.saved;
        states->local = kept->take<bf16>(heads * chunks * GLA_STATE);
        states->decay = kept->take<float>(heads * chunks * GLA_HEAD);
        states->segment_state = kept->take<bf16>(most * GLA_STATE);
        states->segment_sum = memory.scratch.take<float>(most * GLA_STATE);
        states->segment_decay = memory.scratch.take<float>(most * GLA_HEAD);
    }
    if (backward) w->dbound_partial = memory.scratch.take<float>(s->B * chunks * s->NH * GLA_HEAD);
    return memory;
}

// Bytes of Gla.saved, and of Gla.scratch; `backward` also covers the forward pass.
static inline size_t gla_saved_bytes(const GlaShape* s) {
    GlaWork w;
    Gla none = {};
    return gla_plan(&w, s, &none, false).saved.used;
}
static inline size_t gla_scratch_bytes(const GlaShape* s, bool backward) {
    GlaWork w;
    Gla none = {};
    return gla_plan(&w, s, &none, backward).scratch.used;
}

// ----------------------------------------------------------------------------
// passes

template <bool DOCS>
static inline void gla_launch_forward(const GlaWork* w, int64_t heads, cudaStream_t stream) {
    gla_states<DOCS>(w, heads, SCAN_FORWARD, stream);
    gla_launch<GlaOutputShared>(gla_output_kernel<false, DOCS>, dim3((unsigned)w->chunks, (unsigned)heads),
                                stream, *w);
}

// o [B,T,NH,128], contiguous
static inline void gla_forward(bf16* o, const Gla* x, const GlaShape* s, cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    GlaWork w;
    int64_t heads = s->B * s->NH;
    if (heads * s->T == 0) return;
    gla_plan(&w, s, x, false);
    w.o = o;
    (w.doc_start ? gla_launch_forward<true> : gla_launch_forward<false>)(&w, heads, stream);
}

template <bool DOCS>
static inline void gla_launch_backward(const GlaWork* w, int64_t heads, bool recomputes,
                                       cudaStream_t stream) {
    dim3 grid((unsigned)w->chunks, (unsigned)heads);
    gla_states<DOCS>(w, heads, scan_chains(recomputes), stream);
    gla_launch<GlaOutputShared>(gla_output_kernel<true, DOCS>, grid, stream, *w);
    gla_launch<GlaDqDfShared>(gla_dq_df_kernel<DOCS>, dim3(2 * grid.x, grid.y), stream, *w);
}

// Writes the gradients in g; x->state is NULL. x->saved is that of gla_forward over the same inputs,
// unless g->recomputes.
static inline void gla_backward(const GlaBackward* g, const Gla* x, const GlaShape* s, cudaStream_t stream) {
    Range range("scan", RANGE_BACKWARD, stream);
    GlaWork w;
    int64_t heads = s->B * s->NH;
    assert(!x->state);
    if (heads * s->T == 0) return;
    gla_plan(&w, s, x, true);
    w.dout = g->dout;
    w.dq = g->dq;
    w.df = g->df;
    w.dv = g->dv;
    if (!g->dbound) w.dbound_partial = NULL;
    (w.doc_start ? gla_launch_backward<true> : gla_launch_backward<false>)(&w, heads, g->recomputes, stream);
    if (g->dbound) sum_rows(g->dbound, w.dbound_partial, s->B * w.chunks, s->NH * GLA_HEAD, false, stream);
}
