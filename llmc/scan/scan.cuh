/*
The recurrences of Mamba-2 and DeltaNet on the GPU, in chunks. A head's state S [K, V]:

    S' = f_t S_(t-1)
    u_t = v_t, or with beta  beta_t (v_t - S'^T k_t)
    S_t = S' + k_t u_t^T,    o_t = scale S_t^T q_t + skip_t v_t

    log_decay (log f_t) without beta, V 64, heads share q and k       Mamba-2, decay_*.cuh
    beta without log_decay (f_t is 1) or skip, V 128                  DeltaNet, delta_*.cuh

Operands of the GEMMs are bf16, sums, cumulative log decays and the states within a pass fp32. Every run gives
the same bits. All is queued on `stream`, without allocation, so that it can be part of a CUDA graph.
llmc/mixers calls these functions; llmc/mixers/recurrence.h is the same on the CPU, token by token.
*/
#pragma once

#include "../cuda/range.cuh"
#include "decay_backward.cuh"
#include "delta_backward.cuh"

static inline bool scan_is_delta(const ScanShape* s) { return s->V == DELTA_D; }

// Counts the memory of a pass over s.
static inline ScanMemory scan_count(const ScanShape* s, bool backward) {
    ScanMemory memory = {};
    if (scan_is_delta(s))
        delta_work(&memory, s, backward);
    else
        decay_work(&memory, s, backward);
    return memory;
}
// Bytes of Scan.saved, and of Scan.scratch; `backward` also covers the forward pass.
static inline size_t scan_saved_bytes(const ScanShape* s) { return scan_count(s, false).saved.used; }
static inline size_t scan_scratch_bytes(const ScanShape* s, bool backward) {
    return scan_count(s, backward).scratch.used;
}

// Ends the program where there are no kernels for the case.
static inline void scan_check(const Scan* a, const ScanShape* s) {
    bool delta = scan_is_delta(s);
    if (s->K != 128 || (s->V != 64 && !delta) || delta != (a->beta != NULL) ||
        delta == (a->log_decay != NULL) || (delta && a->skip) || (!delta && s->key_head != 0))
        die("no scan kernel for heads of %d x %d, %s, %s", s->K, s->V, a->log_decay ? "decay" : "no decay",
            a->beta ? "delta rule" : "no delta rule");
    assert(s->T > 0 && s->T < INT32_MAX - 128);
    assert(s->key_row % 8 == 0 && s->key_head % 8 == 0 && s->value_row % 8 == 0); // rows aligned to 16 bytes
}

// o [B,T,NH,V]; updates a->state where there is one.
static inline void scan_forward(bf16* o, const Scan* a, const ScanShape* s, cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    scan_check(a, s);
    if (scan_is_delta(s))
        delta_forward(o, a, s, stream);
    else
        decay_forward(o, a, s, stream);
}

// Writes the gradients in g. dv is without skip_t do_t, which the caller adds: where skip is large, the sum
// rounded to bf16 would lose the part through the states, of which gradients of step sizes are made. a->state
// is NULL. a->saved is that of scan_forward over the same inputs, unless g->recomputes.
static inline void scan_backward(const ScanBackward* g, const Scan* a, const ScanShape* s,
                                 cudaStream_t stream) {
    Range range("scan", RANGE_BACKWARD, stream);
    scan_check(a, s);
    assert(!a->state);
    if (scan_is_delta(s))
        delta_backward(g, a, s, stream);
    else
        decay_backward(g, a, s, stream);
}
