/*
One token of many sequences, for channel.cuh: S = diag(f) S + k v^T, o = S^T q, for every row and head. A thread
block reads a state once and writes it: 128 KiB a row and head, which is what decoding costs.
*/
#pragma once

#include "channel_gates.cuh"

typedef struct {
    const bf16 *q, *f, *v;  // [rows, row_stride], as in Channel
    const float* bound;     // [NH 128]; NULL: 0
    float* states;          // [slots, slot_stride], of which the layer's [NH, K, V]; updated
    const int32_t* slots;   // [rows] a row's slot, each once
    int64_t slot_stride;
    int64_t row_stride;
    int NH;
    float scale;
} ChannelStep;

// Grid: NH, rows. A warp has 16 rows of S, a lane four columns of each.
__global__ static void __launch_bounds__(CHANNEL_THREADS)
    channel_step_kernel(bf16* o, const __grid_constant__ ChannelStep s) {
    __shared__ float q[CHANNEL_HEAD], f[CHANNEL_HEAD], k[CHANNEL_HEAD], v[CHANNEL_HEAD];
    __shared__ float4 parts[8][32];
    int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, row = (int)blockIdx.y,
        column = (int)blockIdx.x * CHANNEL_HEAD;
    float* state = s.states + s.slots[row] * s.slot_stride + (int64_t)blockIdx.x * CHANNEL_STATE;
    if (tid < CHANNEL_HEAD) {
        int64_t at = row * s.row_stride + column + tid;
        float x = (float)s.q[at], z = (float)s.f[at], low = s.bound ? s.bound[column + tid] : 0;
        float e = exp2_approx(-1.44269504f * (z < -80 ? -80 : z)), open = __fdividef(1 - low, 1 + e);
        q[tid] = s.scale * x * sigmoidf(x);
        v[tid] = (float)s.v[at];
        k[tid] = e * open;
        f[tid] = k[tid] < 0.5f ? 1 - k[tid] : low + open;
    }
    __syncthreads();
    float4 value = ((const float4*)v)[lane], sum = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int c = warp * 16 + i;
        float4* at = (float4*)(state + c * CHANNEL_HEAD) + lane;
        float4 x = *at;
        x.x = f[c] * x.x + k[c] * value.x, x.y = f[c] * x.y + k[c] * value.y;
        x.z = f[c] * x.z + k[c] * value.z, x.w = f[c] * x.w + k[c] * value.w;
        *at = x;
        sum.x += q[c] * x.x, sum.y += q[c] * x.y, sum.z += q[c] * x.z, sum.w += q[c] * x.w;
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (tid >= CHANNEL_HEAD) return;
    float out = 0;
    for (int i = 0; i < 8; i++) out += ((const float*)parts[i])[tid];
    o[((int64_t)row * s.NH + blockIdx.x) * CHANNEL_HEAD + tid] = (bf16)out;
}

// o [rows,NH,128] of one token of each row's sequence.
static inline void channel_step(bf16* o, const ChannelStep* s, int64_t rows, cudaStream_t stream) {
    Range range("scan", RANGE_FORWARD, stream);
    if (rows == 0) return;
    channel_step_kernel<<<dim3((unsigned)s->NH, (unsigned)rows), CHANNEL_THREADS, 0, stream>>>(o, *s);
    CUDA_CHECK_LAUNCH();
}
