/*
Forgetting attention, causal (arXiv 2503.02130):

    o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + cum_logf_i - cum_logf_j) v_j  over j <= i

where cum_logf is the running sum of the log forget gates. Without a gate (cum_logf NULL) this is plain
attention. With a window of W keys (HeadShape) j begins at i - W + 1: tiles that the window hides are skipped,
tiles at its border masked.

    q, k, v, o, their gradients   bf16   [B, T, NH, dh], aligned to 16 bytes; dh 64 or 128; T from 1 to 2^30;
                                         k, v and their gradients [B, T, KVH, dh]
    lse                           float  [B, NH, T], log of each row's sum of exponentials; small even where
                                         cum_logf is not, as the scores contain cum_logf_i - cum_logf_j
    cum_logf                      double [B, NH, T], never rising (forget_gate.cuh)
    dcum_logf                     float  [B, NH, T]

Head h of the queries reads head h / (NH / KVH) of the keys. Where several read one, the kernels of the
backward pass write dk and dv of each to scratch, and attention_add_groups sums them: one order, no
atomics, and the same work and balance as with a head of keys each.

The trainer calls attention_forward and attention_backward, which check the shape (an unsupported one ends the
program with a message) and choose the kernels:

                  forward             backward                                       band heads
    Hopper        sm90_forward.cuh    sm90_backward.cuh, sm90_backward_launch.cuh    sm90_band.cuh
    other GPUs    sm80_forward.cuh    sm80_backward.cuh                              as the others

pruning.cuh finds the blocks of keys that they skip, shape.cuh has the structs of the tensors and the gate's
arithmetic. Results are the same bits in every run, those of the backward pass if `deterministic`.
*/
#pragma once

#include "../cuda/range.cuh"
#include "path.h"
#include "sm80_backward.cuh"
#include "sm80_forward.cuh"
#include "sm90_backward_launch.cuh"
#include "sm90_forward.cuh"

// Ends the program with the reason if attention has no kernels for the shape.
static inline void attention_check(const HeadShape* s) {
    if (s->dh != 64 && s->dh != 128)
        die("attention on the GPU has kernels for head sizes 64 and 128, not %lld: change num_heads or "
            "hidden_size",
            (long long)s->dh);
    if (s->T < 1 || s->T > 1 << 30 || s->B * s->NH < 1 || s->B * s->NH > INT32_MAX / head_blocks(s))
        die("attention of %s of %s, %s, is out of range", counted(s->B, "sequence").text,
            counted(s->T, "token").text, counted(s->NH, "head").text);
}

// Whether the current GPU runs the Hopper kernels. True without a GPU (--dry-run), as they need more scratch.
static inline bool attention_runs_sm90(void) {
    static int runs = -1;
    if (runs < 0 && !device_exists()) runs = 1;
    if (runs < 0) {
        int capability = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
                         device_attribute(cudaDevAttrComputeCapabilityMinor);
        cudaFuncAttributes kernel;
        CUDA_CHECK(cudaFuncGetAttributes(&kernel, sm90_forward_kernel<64, true, false>));
        runs = attention_path_of(capability, kernel.ptxVersion) == ATTENTION_SM90;
    }
    return runs;
}

// Name of the kernels in use, for messages
static inline const char* attention_path(void) {
    return attention_runs_sm90() ? "wgmma kernels (sm_90a)" : "mma.sync kernels (sm_80)";
}

// Calls FUNCTION<dh, with gate, with window>(a, shape, stream).
#define ATTENTION_GATED(FUNCTION, DH, WINDOW, a)                                                             \
    ((a)->cum_logf ? FUNCTION<DH, true, WINDOW> : FUNCTION<DH, false, WINDOW>)
#define ATTENTION_WINDOWED(FUNCTION, DH, a, shape)                                                           \
    (attention_windowed(shape) ? ATTENTION_GATED(FUNCTION, DH, true, a)                                      \
                               : ATTENTION_GATED(FUNCTION, DH, false, a))
#define ATTENTION_DISPATCH(FUNCTION, a, shape, stream)                                                       \
    ((shape)->dh == 64 ? ATTENTION_WINDOWED(FUNCTION, 64, a, shape)                                          \
                       : ATTENTION_WINDOWED(FUNCTION, 128, a, shape))(a, shape, stream)

// Bytes of scratch on the current GPU: of the backward pass, which needs the most, or of a forward pass alone
static inline size_t attention_scratch_bytes(const HeadShape* s, bool backward) {
    return backward ? attention_scratch_of(s, attention_runs_sm90()) : sizeof(unsigned); // a counter of tiles
}

// Writes o and lse.
static inline void attention_forward(const AttentionForward* a, const HeadShape* shape, cudaStream_t stream) {
    Range range("attention", RANGE_FORWARD, stream);
    attention_check(shape);
    if (attention_runs_sm90())
        ATTENTION_DISPATCH(attention_forward_sm90, a, shape, stream);
    else
        ATTENTION_DISPATCH(attention_forward_sm80, a, shape, stream);
}

// delta [B, NH, T] = dout_i o_i
template <int DH>
__global__ void attention_delta_kernel(float* __restrict__ delta, const bf16* __restrict__ dout,
                                       const bf16* __restrict__ o, int64_t rows, int64_t T, int64_t NH) {
    constexpr int LANES = DH / 8;                                           // per row
    int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES; // (b T + t) NH + h
    if (row >= rows) row = rows - 1; // the shuffles need every lane; the last row is written twice
    int64_t at = row * DH + threadIdx.x % LANES * 8;
    Pack8 x = load16(dout + at), y = load16(o + at);
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += (float)x[i] * (float)y[i];
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    int64_t bt = row / NH;
    if (threadIdx.x % LANES == 0) delta[(bt / T * NH + row % NH) * T + bt % T] = sum;
}

static inline void attention_delta(float* delta, const bf16* dout, const bf16* o, const HeadShape* s,
                                   cudaStream_t stream) {
    int64_t rows = s->B * s->T * s->NH;
    auto kernel = s->dh == 64 ? attention_delta_kernel<64> : attention_delta_kernel<128>;
    CUDA_LAUNCH(kernel, ceil_div<int64_t>(rows * (s->dh / 8), 256), 256, stream, delta, dout, o, rows, s->T,
                s->NH);
}

// out [rows, KVH, dh]: sums of the heads of each group in x [rows, KVH, group, dh]. Eight channels a thread.
__global__ static void __launch_bounds__(256)
    attention_add_groups_kernel(bf16* out, const bf16* __restrict__ x, int64_t count, int group, int dh) {
    int64_t at = 8 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= count) return;
    const bf16* from = x + at / dh * group * dh + at % dh;
    float sum[8] = {};
    for (int g = 0; g < group; g++) {
        float y[8];
        unpack8(y, load_raw8(from + g * dh));
        for (int i = 0; i < 8; i++) sum[i] += y[i];
    }
    store16(out + at, pack8(sum));
}

static inline void attention_add_groups(bf16* out, const bf16* x, const HeadShape* s, cudaStream_t stream) {
    const int64_t count = s->B * s->T * key_heads(s) * s->dh;
    CUDA_LAUNCH(attention_add_groups_kernel, ceil_div<int64_t>(count / 8, 256), 256, stream, out, x, count,
                (int)head_group(s), (int)s->dh);
}

// Writes dq, dk, dv and, unless it is NULL, dcum_logf_i = sum_j ds_ij - sum_j ds_ji, where ds is the gradient
// of the scores. o and lse are those of attention_forward.
static inline void attention_backward(const AttentionBackward* a, const HeadShape* shape,
                                      cudaStream_t stream) {
    Range range("attention", RANGE_BACKWARD, stream);
    attention_check(shape);
    AttentionBackward b = *a;
    char* scratch = (char*)a->scratch + 2 * attention_group_bytes(shape);
    if (head_group(shape) > 1) {
        b.dk = (bf16*)a->scratch;
        b.dv = (bf16*)((char*)a->scratch + attention_group_bytes(shape));
    }
    if (!a->delta) {
        attention_delta((float*)scratch, a->dout, a->o, shape, stream);
        b.delta = (float*)scratch;
    }
    b.scratch = scratch + attention_delta_bytes(shape);
    if (attention_runs_sm90())
        ATTENTION_DISPATCH(attention_backward_sm90, &b, shape, stream);
    else
        ATTENTION_DISPATCH(attention_backward_sm80, &b, shape, stream);
    if (head_group(shape) == 1) return;
    attention_add_groups(a->dk, b.dk, shape, stream);
    attention_add_groups(a->dv, b.dv, shape, stream);
}
