/*
One token of many sequences, as gla.cuh computes it: S = diag(f) S + k v^T, o = S^T q, for every head. A
thread block reads a state once and writes it: 64 KiB each way for a sequence and head, which bounds the speed
of decoding.

`Rows` describes a sequence's rows: a struct with int begin, end, slot, position. Sequences with other than
one row are skipped. The slots are read on the device, so that decoding can be a CUDA graph.
*/
#pragma once

#include "gla_gates.cuh"

typedef struct {
    const bf16 *q, *f, *v; // [rows, row_stride], as in Gla
    const float* bound;    // [NH 128]; NULL: 0
    float* states;         // [slots, NH, K, V], updated; zero where a sequence's position is 0
    int64_t row_stride;
    int NH;
    float scale;
} GlaStep;

// Grid: NH, sequences. A warp has 16 rows of S, a lane four columns of each. o: [rows, NH, 128]
template <class Rows>
__global__ static void __launch_bounds__(GLA_THREADS)
    gla_step_kernel(bf16* o, const __grid_constant__ GlaStep s, const Rows* sequences) {
    __shared__ float q[GLA_HEAD], f[GLA_HEAD], k[GLA_HEAD], v[GLA_HEAD];
    __shared__ float4 parts[8][32];
    Rows sequence = sequences[blockIdx.y];
    if (sequence.end - sequence.begin != 1) return;
    int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, column = (int)blockIdx.x * GLA_HEAD;
    float* state = s.states + ((int64_t)sequence.slot * s.NH + blockIdx.x) * GLA_STATE;
    if (tid < GLA_HEAD) {
        int64_t at = sequence.begin * s.row_stride + column + tid;
        float x = __bfloat162float(s.q[at]), low = s.bound ? s.bound[column + tid] : 0;
        q[tid] = s.scale * x * sigmoidf(x);
        v[tid] = __bfloat162float(s.v[at]);
        gla_gate(f[tid], k[tid], __bfloat162float(s.f[at]), low);
    }
    __syncthreads();
    float4 value = ((const float4*)v)[lane], sum = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int c = warp * 16 + i;
        float4 *at = (float4*)(state + c * GLA_HEAD) + lane, x = {};
        if (sequence.position > 0) x = *at;
        x.x = f[c] * x.x + k[c] * value.x;
        x.y = f[c] * x.y + k[c] * value.y;
        x.z = f[c] * x.z + k[c] * value.z;
        x.w = f[c] * x.w + k[c] * value.w;
        *at = x;
        sum.x += q[c] * x.x;
        sum.y += q[c] * x.y;
        sum.z += q[c] * x.z;
        sum.w += q[c] * x.w;
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (tid >= GLA_HEAD) return;
    float out = 0;
    for (int i = 0; i < 8; i++) out += ((const float*)parts[i])[tid];
    o[((int64_t)sequence.begin * s.NH + blockIdx.x) * GLA_HEAD + tid] = __float2bfloat16(out);
}

// o and the slots' states of the sequences with one row.
template <class Rows>
static inline void gla_step(bf16* o, const GlaStep* s, const Rows* sequences, int64_t num_sequences,
                            cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    if (num_sequences == 0) return;
    gla_step_kernel<Rows>
        <<<dim3((unsigned)s->NH, (unsigned)num_sequences), GLA_THREADS, 0, stream>>>(o, *s, sequences);
    CUDA_CHECK_LAUNCH();
}
