/*
How far the fp32 accumulators of the matrix instructions drift over a million keys: o = P V is a sum of 65,536
k-steps of 16 keys, and the hardware truncates each. The last 256 queries of 1,048,576 tokens, no gate, random
q and k.

o is rounded to bf16, which would hide the drift. So v is 1 or 1 + 2^-7, neighbours in bf16, and channel c has
the larger value in a share (c + 1/2) / dh of the tokens: the channels' exact o fill the interval between them
evenly, and the mean over channels of o - exact is the drift, as the roundings cancel. For test_attention.
*/
#pragma once

#include "attention_case.cuh"

enum { MILLION_QUERIES = 256 };

__global__ static void million_values_kernel(bf16* v, int64_t T, int dh, uint64_t key) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < T * dh;
         i += (int64_t)gridDim.x * blockDim.x) {
        double u = (double)(hash64(key ^ (uint64_t)i * 0x9e3779b97f4a7c15u) >> 11) / 9007199254740992.0;
        v[i] = (bf16)(u < ((double)(i % dh) + 0.5) / dh ? 1 + 0x1p-7f : 1.0f);
    }
}

// Block i: o of query first + i in double. A thread has the score of one of dh keys, then a channel of their
// sum.
__global__ static void million_exact_kernel(double* o, const bf16* q, const bf16* k, const bf16* v,
                                            int64_t first, int dh) {
    __shared__ double query[128], weights[128];
    int tid = (int)threadIdx.x;
    int64_t row = first + blockIdx.x;
    double sum = 0, weight_sum = 0;
    query[tid] = (double)(float)q[row * dh + tid] / sqrt((double)dh);
    for (int64_t begin = 0; begin <= row; begin += dh) {
        __syncthreads();
        double score = 0;
        for (int c = 0; c < dh && begin + tid <= row; c++)
            score += query[c] * (double)(float)k[(begin + tid) * dh + c];
        weights[tid] = begin + tid <= row ? exp(score) : 0;
        __syncthreads();
        for (int j = 0; j < dh && begin + j <= row; j++)
            sum += weights[j] * (double)(float)v[(begin + j) * dh + tid], weight_sum += weights[j];
    }
    o[blockIdx.x * dh + tid] = sum / weight_sum;
}

static void test_million(int64_t dh, double limit) {
    Shape s = {1, 1 << 20, 1, dh};
    HeadShape shape = s.head_shape();
    int64_t first = (s.T - MILLION_QUERIES) / ATTENTION_FIRST_QUERY * ATTENTION_FIRST_QUERY;
    Buffer<bf16> q((size_t)s.size()), k(q.n), v(q.n), o((size_t)((s.T - first) * dh));
    Buffer<float> lse((size_t)s.T);
    Buffer<double> exact((size_t)((s.T - first) * dh));
    Buffer<char> scratch(Results::bytes(s));
    fill_normal(q), fill_normal(k);
    million_values_kernel<<<1024, 256>>>(v, s.T, (int)dh, seed++);
    million_exact_kernel<<<(unsigned)(s.T - first), (unsigned)dh>>>(exact, q, k, v, first, (int)dh);
    CUDA_CHECK_LAUNCH();
    AttentionForward a = {o, lse, q + first * dh, k, v, NULL, NULL, scratch, first};
    if (on_sm80)
        ATTENTION_DISPATCH(attention_forward_sm80, &a, &shape, 0);
    else
        attention_forward(&a, &shape, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    vector<bf16> got = o.host();
    vector<double> want = exact.host();
    double drift = 0;
    for (size_t i = 0; i < got.size(); i++)
        drift += ((double)(float)got[i] / want[i] - 1) / (double)got.size();
    printf("dh %lld: o of 1,048,576 keys is off by %.2e of itself\n", (long long)dh, drift);
    CHECK(fabs(drift) <= limit, "dh %lld, 1,048,576 keys: o is off by %.2e of itself", (long long)dh, drift);
}
