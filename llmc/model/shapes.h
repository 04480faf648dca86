/*
Sizes and numbers that travel together: the same structs for the CPU trainer's functions and the GPU's
kernels.

Symbols are those of the trainers: B sequences of T tokens, NH heads of dh channels, d = NH dh; KVH heads of
keys and values, kd = KVH dh. Head h of the queries reads head h / (NH / KVH) of the keys and values.
*/
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../base/document_count.h"

// Types of tensors on the GPU; without CUDA for their sizes alone
#ifdef __CUDACC__
#include <cuda_bf16.h>
typedef __nv_bfloat16 bf16;
#else
typedef uint16_t bf16;
#endif
typedef uint8_t fp8;

enum { GPU_MAX_CHANNELS = 8192 }; // of a row of RMSNorm on the GPU: 8 a thread

// Heads of attention over B sequences of T tokens. proj is the fused projection's output [B, T, row_stride].
typedef struct {
    int64_t B, T, NH, dh;
    int64_t columns;       // of proj that are in use: ParamTable's proj.rows
    int64_t row_stride;    // elements from one row of proj to the next: columns, padded on the GPU
    int64_t weight_stride; // elements from a head's QK norm weights to the next's; 0: heads share them
    int64_t window; // keys that a query sees, its own the last of them; 0: all that are not in its future
    const int32_t* doc_start; // [B, T], as Layer's; NULL: a sequence is one document
    int64_t KVH;              // heads of keys and values; 0: NH
} HeadShape;

// Where a shape's tokens are a part of a longer sequence, in blocks of attention. The first `halo` blocks are
// the end of what comes before the part; `before` more blocks come before these, and are not in the shape.
// All 0: a whole sequence.
typedef struct {
    int64_t halo, before;
} HeadPart;

static inline int64_t key_heads(const HeadShape* s) { return s->KVH ? s->KVH : s->NH; }

// Heads of queries that read one head of keys and values.
static inline int64_t head_group(const HeadShape* s) { return s->NH / key_heads(s); }

// The shape of the keys' and values' heads.
static inline HeadShape key_shape(const HeadShape* s) {
    HeadShape keys = *s;
    keys.NH = key_heads(s);
    keys.KVH = 0;
    return keys;
}

// RoPE's angles, of which rotation.h tells: at position t a pair of channels is rotated by t
// rotation_frequency and becomes `gain` times as long.
typedef struct {
    double base, factor; // factor 1: plain
    double low, high;    // pairs up to low are as plain, from high on slower by the factor
    double gain;
} Rotation;

#ifdef __CUDACC__
#define ROTATION_FUNCTION __host__ __device__ static inline
#else
#define ROTATION_FUNCTION static inline
#endif

ROTATION_FUNCTION double rotation_frequency(const Rotation* r, int64_t pair, int64_t pairs) {
    const double plain = pow(r->base, -(double)pair / (double)pairs);
    if (r->factor == 1) return plain;
    const double ramp = fmin(fmax(((double)pair - r->low) / (r->high - r->low), 0.0), 1.0);
    return plain * (1 - ramp) + plain / r->factor * ramp;
}

static inline Rotation rotation_plain(double base) {
    Rotation r = {.base = base, .factor = 1, .low = -1, .high = 0, .gain = 1};
    return r;
}

// qkv_forward (llmc/layers/qkv.cuh) gives the largest norm of so many neighbouring tokens of [B, T].
enum { NORM_TOKENS = 4 };

static inline int64_t head_norm_groups(const HeadShape* s) {
    return (s->B * s->T + NORM_TOKENS - 1) / NORM_TOKENS;
}

// The first key that query i sees.
static inline int64_t head_first_key(const HeadShape* s, int64_t i) {
    return s->window && i >= s->window ? i - s->window + 1 : 0;
}

#define ATTENTION_BLOCK 128 // queries or keys that a thread block keeps in shared memory; the unit of pruning

static inline int64_t head_blocks(const HeadShape* s) {
    return (s->T + ATTENTION_BLOCK - 1) / ATTENTION_BLOCK;
}

// Bytes in scratch of dk or dv of each query head; 0 where each has a head of keys.
static inline size_t attention_group_bytes(const HeadShape* s) {
    return head_group(s) > 1 ? (size_t)(s->B * s->T * s->NH * s->dh) * sizeof(bf16) : 0;
}

// Bytes of `count` floats in scratch, rounded up so that what follows is aligned to 256 bytes
static inline size_t attention_float_bytes(int64_t count) {
    return ((size_t)count * sizeof(float) + 255) / 256 * 256;
}
static inline size_t attention_delta_bytes(const HeadShape* s) {
    return attention_float_bytes(s->B * s->NH * s->T);
}

// Bytes of scratch of attention's backward pass; the forward pass needs less. The Hopper kernels also have dq
// in float, row sums, semaphores (at most 2 tiles a block) and tickets.
static inline size_t attention_scratch_of(const HeadShape* s, bool sm90) {
    const int64_t blocks = head_blocks(s), dq = blocks * ATTENTION_BLOCK * s->dh;
    const int64_t floats = sm90 ? s->B * s->NH * (dq + s->T + 2 * blocks) + 1 : 0;
    return 2 * attention_group_bytes(s) + attention_delta_bytes(s) + (size_t)floats * sizeof(float);
}

// What ranks tell one another with every optimizer step: before the step this rank's, after it the sums over
// all ranks. Doubles, because they travel with the loss.
typedef struct {
    double stop;             // a signal asked this rank to stop
    double written, failed;  // its part of the checkpoint in the making is written, or could not be
    double tokens, targets;  // of its batches: tokens, and targets that count; both 0: all count
    DocumentCount documents; // of its batches; all 0 without document_reset
} StepVotes;

// Sums of an optimizer step over passes and ranks. Doubles alone, for one all-reduce. Loss and gradient
// are weighted by 1 / tokens of the step whatever counts, and scaled to the mean over the targets at its end.
typedef struct {
    double loss;    // on the GPU the sum of the tokens' losses, on the CPU divided by the tokens of the step
    double squares; // the gradient's sum of squares
    StepVotes votes;
} StepSums;

// How a rank spent an optimizer step: seconds of computing, and of waiting for other ranks' gradients and
// weights; and the blocks of attention that it computed, where they are counted.
typedef struct {
    double computing, waiting, attention;
} RankTime;
enum { RANK_TIMES = sizeof(RankTime) / sizeof(double) };

// Pairs of a block of queries and a block of keys: all that causal attention in its window and its documents
// has, and those that are kept. The backward pass counts them double, as in the model's FLOPs.
typedef struct {
    unsigned long long all, kept;
} PruningCount;

// One optimizer step of AdamW.
typedef struct {
    double lr, beta1, beta2, eps;
    double weight_decay; // of the tensors that decay
    int64_t step;        // counts from 1
    double spike_norm;   // a step of a larger gradient norm changes nothing; 0: none
} AdamWParams;

// Is a step of this gradient norm left out?
static inline bool norm_is_spike(double norm, double spike_norm) {
    return spike_norm > 0 && norm > spike_norm;
}

// n rounded up to a size at which the GPU's GEMMs are fast: where N is not a multiple of 8 they are up to 8
// times slower. A layer's weight should have this many rows, and its output this many columns.
static inline int64_t matmul_padded(int64_t n) { return (n + 63) / 64 * 64; }
