/*
Forgetting attention, causal: o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + c_i - c_j) v_j over j <= i, with c
the running sum of the log forget gates; without them (c NULL) plain attention.

This file is the interface: it checks the shape and picks the kernels. The same bits come out of every run,
of the backward pass if it is asked to be deterministic.

    q, k, v, o, their gradients   bf16   [B, T, NH, dh], aligned to 16 bytes; dh 64 or 128; T from 1 to 2^30
    lse                           float  [B, NH, T], the log of each row's sum of exponentials: with c_i - c_j
                                         in the scores it has a score's size, however far c has fallen
    c                             double [B, NH, T], never rising
    dc                            float  [B, NH, T]
*/
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "path.h"
#include "sm80.cuh"
#include "sm90_backward.cuh"
#include "sm90_forward.cuh"

// What attention need not look at, and in which order it best takes the heads (pruning.cuh). Where a function
// takes a pointer to it, NULL leaves nothing out.
typedef struct {
    int* first_key_block;  // [B, NH, blocks], the first block of keys that a block of queries looks at
    int* last_query_block; // [B, NH, blocks], the last block of queries that looks at a block of keys
    int* head_order;       // [B NH], heads b NH + h, those with the most work first
} AttentionBounds;

static inline void attention_check(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    if (dh != 64 && dh != 128)
        die("attention on the GPU has kernels for head sizes 64 and 128, not %lld: change num_heads or "
            "hidden_size",
            (long long)dh);
    if (T < 1 || T > 1 << 30 || B * NH < 1 || B * NH > INT32_MAX / ceil_div<int64_t>(T, ATTENTION_BLOCK))
        die("attention of %lld sequences of %lld tokens, %lld heads, is out of range", (long long)B,
            (long long)T, (long long)NH);
}

// Do the Hopper kernels run on the GPU at hand?
static inline bool attention_runs_sm90(void) {
    static int runs = -1;
    if (runs < 0) {
        int device, major, minor;
        cudaFuncAttributes kernel;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
        CUDA_CHECK(cudaFuncGetAttributes(&kernel, sm90_forward_kernel<64, true>));
        runs = attention_path_of(10 * major + minor, kernel.ptxVersion) == ATTENTION_SM90;
    }
    return runs;
}

// Names the kernels in use, for messages.
static inline const char* attention_path(void) {
    return attention_runs_sm90() ? "wgmma kernels (sm_90a)" : "mma.sync kernels (sm_80)";
}

// Calls FUNCTION<dh, with gate>(...)
#define ATTENTION_DISPATCH(FUNCTION, dh, gate, ...)                                                          \
    do {                                                                                                     \
        if ((dh) == 64 && (gate)) FUNCTION<64, true>(__VA_ARGS__);                                           \
        if ((dh) == 64 && !(gate)) FUNCTION<64, false>(__VA_ARGS__);                                         \
        if ((dh) == 128 && (gate)) FUNCTION<128, true>(__VA_ARGS__);                                         \
        if ((dh) == 128 && !(gate)) FUNCTION<128, false>(__VA_ARGS__);                                       \
    } while (0)

static inline size_t attention_delta_bytes(int64_t B, int64_t T, int64_t NH) {
    return (size_t)ceil_div<int64_t>(B * NH * T * (int64_t)sizeof(float), 256) * 256;
}

// Bytes of the scratch that both passes need, one at a time.
static inline size_t attention_scratch_bytes(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    if (!attention_runs_sm90()) return attention_delta_bytes(B, T, NH);
    size_t forward = attention_forward_scratch_sm90();
    size_t backward = attention_delta_bytes(B, T, NH) + attention_backward_scratch_sm90(B, T, NH, dh);
    return forward > backward ? forward : backward;
}

// Writes o and lse.
static inline void attention_forward(bf16* o, float* lse, void* scratch, const bf16* q, const bf16* k,
                                     const bf16* v, const double* c, const AttentionBounds* bounds, int64_t B,
                                     int64_t T, int64_t NH, int64_t dh, cudaStream_t stream) {
    attention_check(B, T, NH, dh);
    const int* first_key_block = bounds ? bounds->first_key_block : NULL;
    if (attention_runs_sm90())
        ATTENTION_DISPATCH(attention_forward_sm90, dh, c, o, lse, q, k, v, c, first_key_block,
                           bounds ? bounds->head_order : NULL, scratch, B, T, NH, stream);
    else
        ATTENTION_DISPATCH(attention_forward_sm80, dh, c, o, lse, q, k, v, c, first_key_block, B, T, NH,
                           stream);
}

// delta [B, NH, T] = do_i o_i
template <int DH>
__global__ void attention_delta_kernel(float* __restrict__ delta, const bf16* __restrict__ dout,
                                       const bf16* __restrict__ o, int64_t rows, int64_t T, int64_t NH) {
    constexpr int LANES = DH / 8;                                           // a row's
    int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES; // (b T + t) NH + h
    if (row >= rows)
        row = rows - 1; // the shuffles below want every lane; these write what another writes too
    int64_t at = row * DH + threadIdx.x % LANES * 8;
    Pack8 x = load16(dout + at), y = load16(o + at);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += (float)x[i] * (float)y[i];
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    int64_t bt = row / NH;
    if (threadIdx.x % LANES == 0) delta[(bt / T * NH + row % NH) * T + bt % T] = sum;
}

template <int DH>
static inline void attention_delta(float* delta, const bf16* dout, const bf16* o, int64_t B, int64_t T,
                                   int64_t NH, cudaStream_t stream) {
    const int threads = 256;
    int64_t blocks = ceil_div<int64_t>(B * T * NH * (DH / 8), threads);
    attention_delta_kernel<DH><<<(unsigned)blocks, threads, 0, stream>>>(delta, dout, o, B * T * NH, T, NH);
    CUDA_CHECK_LAUNCH();
}

// Writes dq, dk, dv and dc: dc_i = sum_j ds_ij - sum_j ds_ji, ds being the scores' gradients. dc is NULL
// where the gate is not learned. o and lse are attention_forward's. delta [B, NH, T] is do_i o_i, of dout
// as rounded, which output_gate_backward gives in passing; NULL: it is computed here. Unless
// `deterministic`, the last bits of dq and dc may differ from run to run.
static inline void attention_backward(bf16* dq, bf16* dk, bf16* dv, float* dc, void* scratch,
                                      const bf16* dout, const bf16* q, const bf16* k, const bf16* v,
                                      const bf16* o, const float* lse, const float* delta, const double* c,
                                      const AttentionBounds* bounds, bool deterministic, int64_t B, int64_t T,
                                      int64_t NH, int64_t dh, cudaStream_t stream) {
    attention_check(B, T, NH, dh);
    const int* first_key_block = bounds ? bounds->first_key_block : NULL;
    const int* last_query_block = bounds ? bounds->last_query_block : NULL;
    if (!delta) {
        delta = (float*)scratch;
        if (dh == 64) attention_delta<64>((float*)scratch, dout, o, B, T, NH, stream);
        if (dh == 128) attention_delta<128>((float*)scratch, dout, o, B, T, NH, stream);
    }
    if (attention_runs_sm90())
        ATTENTION_DISPATCH(attention_backward_sm90, dh, c, dq, dk, dv, dc, dout, q, k, v, lse, delta, c,
                           last_query_block, bounds ? bounds->head_order : NULL,
                           (char*)scratch + attention_delta_bytes(B, T, NH), deterministic, B, T, NH, stream);
    else
        ATTENTION_DISPATCH(attention_backward_sm80, dh, c, dq, dk, dv, dc, dout, q, k, v, lse, delta, c,
                           first_key_block, last_query_block, B, T, NH, stream);
}

#endif // LLMC_ATTENTION_CUH
