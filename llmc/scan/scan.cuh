/*
The recurrence of DeltaNet and Mamba-2 on the GPU: see llmc/mixers/recurrence.h. The kernels' interface.
*/
#pragma once

#include "../cuda/cuda_common.cuh"

typedef struct {
    int64_t B, T;
    int NH, K, V; // heads; K is 128; V is 64 (Mamba-2) or 128 (DeltaNet)
    int64_t key_row,
        key_head;      // elements of q, k, dq, dk from token to token, from head to head; key_head 0: heads
                       // share q and k
    int64_t value_row; // of v and dv from token to token; heads are adjacent
    float scale;
} ScanShape;
typedef struct {
    const bf16 *q, *k, *v;
    const float* log_decay; // [B,T,NH] log f_t; NULL: none
    const float* beta;      // [B,T,NH]; NULL: not the delta rule
    float* state;           // [B,NH,K,V] fp32 state of the tokens before, updated; NULL: sequences begin here
                            // (always NULL in a backward pass)
    void* scratch;          // scan_scratch_bytes
} Scan;
typedef struct {
    bf16 *dq, *dk, *dv;        // dq, dk summed over heads where they share q and k
    float *dlog_decay, *dbeta; // [B,T,NH]
    const bf16* dout;          // [B,T,NH,V] contiguous
    const bf16* o;             // [B,T,NH,V] of the forward pass, if it helps (o.do)
} ScanBackward;
size_t scan_scratch_bytes(const ScanShape*, bool backward);
void scan_forward(bf16* o /* [B,T,NH,V] */, const Scan*, const ScanShape*, cudaStream_t);
void scan_backward(const ScanBackward*, const Scan*, const ScanShape*, cudaStream_t);
