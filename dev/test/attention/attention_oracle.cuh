/*
The reference of test_attention: attention in double, naive, on the GPU. With `plain_bf16` it is a plain bf16
implementation instead: probabilities, score gradients and results are rounded to bf16, everything else is
exact.
*/
#pragma once

#include "../../../llmc/attention/attention.cuh"
#include "../gpu/buffers.cuh"

// ----------------------------------------------------------------------------
// inputs, drawn on the GPU

__host__ __device__ static inline uint64_t hash64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
__host__ __device__ static inline double normal(uint64_t key, uint64_t i) {
    uint64_t a = hash64(key ^ (i * 2 + 1) * 0x9e3779b97f4a7c15u), b = hash64(a + 0x9e3779b97f4a7c15u);
    double u = ((double)(a >> 11) + 1) / 9007199254740993.0, v = (double)(b >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}
__global__ static void fill_normal_kernel(bf16* x, int64_t n, uint64_t key) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x)
        x[i] = (bf16)(float)normal(key, (uint64_t)i);
}
static void fill_normal(const Buffer<bf16>& x) {
    static uint64_t calls;
    fill_normal_kernel<<<1024, 256>>>(x, (int64_t)x.n, hash64(seed + ++calls));
    CUDA_CHECK_LAUNCH();
}

// ----------------------------------------------------------------------------
// the oracle. A thread block has OWN rows; each of its threads computes their scores with one other row at a
// time.

#define OWN     8
#define THREADS 128

struct Shape {
    int64_t B, T, NH, dh;
    int64_t window = 0; // as in HeadShape
    int64_t KVH = 0;    // the same, of the kernels; the oracle has a head of keys for each query head
    __device__ bool sees(int64_t i, int64_t j) const {
        return j <= i && i < T && !(window && j <= i - window);
    }
    __host__ __device__ int64_t heads() const { return B * NH; }
    __host__ __device__ int64_t tokens() const { return heads() * T; }
    int64_t size() const { return tokens() * dh; }
    HeadShape head_shape() const { return {B, T, NH, dh, NH * dh, NH * dh, dh, window, NULL, KVH}; }
    __device__ int64_t at(int64_t head, int64_t t) const {
        return ((head / NH * T + t) * NH + head % NH) * dh;
    }
};

// Tensors of a case, on the device: inputs, and the results that the backward pass reads
struct OracleTensors {
    const bf16 *dout, *q, *k, *v;
    const double *lse, *delta;
    const double* cum_logf; // NULL: no gate
    bool plain_bf16;
};

__device__ static double round_bf16(double x, bool round) {
    return round ? (double)(float)(bf16)(float)x : x;
}

// own [dh][OWN], in shared memory: rows of x from `first` on; zero past T
__device__ static void load_own(double* own, const bf16* x, const Shape& s, int64_t head, int64_t first) {
    for (int i = (int)threadIdx.x; i < s.dh * OWN; i += THREADS)
        own[i] = first + i % OWN < s.T ? (double)(float)x[s.at(head, first + i % OWN) + i / OWN] : 0;
}
__device__ static void dots(double (&sum)[OWN], const double* own, const bf16* row, int dh) {
    for (int r = 0; r < OWN; r++) sum[r] = 0;
    for (int x = 0; x < dh; x += 8) {
        Pack8 y = load16(row + x);
#pragma unroll
        for (int e = 0; e < 8; e++)
#pragma unroll
            for (int r = 0; r < OWN; r++) sum[r] += own[(x + e) * OWN + r] * (double)(float)y[e];
    }
}
// sum [OWN * dh / THREADS] of this thread += w [OWN][THREADS] times `count` rows of x
__device__ static void add_rows(double* sum, const double* w, const bf16* x, int64_t step, int count,
                                int dh) {
    int channel = (int)threadIdx.x % dh, group = (int)threadIdx.x / dh, groups = THREADS / dh;
    for (int j = 0; j < count; j++) {
        double y = (double)(float)x[j * step + channel];
#pragma unroll
        for (int r = 0; r < OWN; r++)
            if (r % groups == group) sum[r] += w[r * THREADS + j] * y;
    }
}
__device__ static void store_own(double* to, const double* sum, double factor, bool round, const Shape& s,
                                 int64_t head, int64_t first) {
    int channel = (int)threadIdx.x % (int)s.dh, group = (int)threadIdx.x / (int)s.dh,
        groups = THREADS / (int)s.dh;
#pragma unroll
    for (int r = 0; r < OWN; r++)
        if (r % groups == group && first + r < s.T)
            to[s.at(head, first + r) + channel] = round_bf16(sum[r] * factor, round);
}
// The sum over the thread block, in every thread
__device__ static double block_sum(double x) {
    __shared__ double partial[THREADS];
    __syncthreads();
    partial[threadIdx.x] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < THREADS; i++) sum += partial[i];
    return sum;
}
__device__ static double score_bias(const double* cum_logf, int64_t i, int64_t j) {
    return cum_logf ? cum_logf[i] - cum_logf[j] : 0;
}

__global__ static void oracle_forward_kernel(double* o, double* lse, OracleTensors in, Shape s) {
    __shared__ double own[128 * OWN], p[OWN * THREADS];
    int64_t head = blockIdx.y, first = (int64_t)blockIdx.x * OWN, end = min(first + OWN, s.T);
    double scale = 1 / sqrt((double)s.dh), row_max[OWN], row_sum[OWN], sum[OWN] = {}, x[OWN];
    const double* cum_logf = in.cum_logf ? in.cum_logf + head * s.T : NULL;
    load_own(own, in.q, s, head, first);
    __syncthreads();
    for (int r = 0; r < OWN; r++) row_max[r] = -1e300, row_sum[r] = 0;
    for (int64_t j = threadIdx.x; j < end; j += THREADS) {
        dots(x, own, in.k + s.at(head, j), (int)s.dh);
        for (int r = 0; r < OWN; r++) {
            if (!s.sees(first + r, j)) continue;
            double y = x[r] * scale + score_bias(cum_logf, first + r, j), higher = fmax(y, row_max[r]);
            row_sum[r] = row_sum[r] * exp(row_max[r] - higher) + exp(y - higher);
            row_max[r] = higher;
        }
    }
    double row_lse[OWN];
    for (int r = 0; r < OWN; r++) {
        __syncthreads();
        p[threadIdx.x] = row_max[r];
        __syncthreads();
        double highest = -1e300;
        for (int i = 0; i < THREADS; i++) highest = fmax(highest, p[i]);
        row_lse[r] = highest + log(block_sum(row_sum[r] * exp(row_max[r] - highest)));
        if (threadIdx.x == 0 && first + r < s.T) lse[head * s.T + first + r] = row_lse[r];
    }
    for (int64_t j0 = 0; j0 < end; j0 += THREADS) {
        int64_t j = j0 + threadIdx.x;
        if (j < end) dots(x, own, in.k + s.at(head, j), (int)s.dh);
        __syncthreads();
        for (int r = 0; r < OWN; r++) {
            bool seen = s.sees(first + r, j);
            double y = seen ? exp(x[r] * scale + score_bias(cum_logf, first + r, j) - row_lse[r]) : 0;
            p[r * THREADS + threadIdx.x] = round_bf16(y, in.plain_bf16);
        }
        __syncthreads();
        add_rows(sum, p, in.v + s.at(head, j0), s.NH * s.dh, (int)min((int64_t)THREADS, end - j0), (int)s.dh);
    }
    store_own(o, sum, 1, in.plain_bf16, s, head, first);
}

__global__ static void oracle_delta_kernel(double* delta, const bf16* dout, const double* o, Shape s) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.tokens()) return;
    double sum = 0;
    for (int64_t x = 0, at = s.at(i / s.T, i % s.T); x < s.dh; x++)
        sum += (double)(float)dout[at + x] * o[at + x];
    delta[i] = sum;
}

// The own rows are queries: writes dq, and the row sums to dcum_logf.
__global__ static void oracle_dq_kernel(double* dq, double* dcum_logf, OracleTensors in, Shape s) {
    __shared__ double own_q[128 * OWN], own_dout[128 * OWN], ds[OWN * THREADS];
    int64_t head = blockIdx.y, first = (int64_t)blockIdx.x * OWN, end = min(first + OWN, s.T);
    double scale = 1 / sqrt((double)s.dh), sum[OWN] = {}, row_sum[OWN] = {}, x[OWN], y[OWN];
    const double* cum_logf = in.cum_logf ? in.cum_logf + head * s.T : NULL;
    load_own(own_q, in.q, s, head, first);
    load_own(own_dout, in.dout, s, head, first);
    for (int64_t j0 = 0; j0 < end; j0 += THREADS) {
        int64_t j = j0 + threadIdx.x;
        __syncthreads();
        if (j < end) {
            dots(x, own_q, in.k + s.at(head, j), (int)s.dh);
            dots(y, own_dout, in.v + s.at(head, j), (int)s.dh);
        }
        for (int r = 0; r < OWN; r++) {
            int64_t i = first + r;
            double d = 0;
            if (s.sees(i, j))
                d = exp(x[r] * scale + score_bias(cum_logf, i, j) - in.lse[head * s.T + i]) *
                    (y[r] - in.delta[head * s.T + i]);
            d = round_bf16(d, in.plain_bf16);
            ds[r * THREADS + threadIdx.x] = d;
            row_sum[r] += d;
        }
        __syncthreads();
        add_rows(sum, ds, in.k + s.at(head, j0), s.NH * s.dh, (int)min((int64_t)THREADS, end - j0),
                 (int)s.dh);
    }
    store_own(dq, sum, scale, in.plain_bf16, s, head, first);
    for (int r = 0; r < OWN; r++) {
        double all = block_sum(row_sum[r]);
        if (threadIdx.x == 0 && first + r < s.T) dcum_logf[head * s.T + first + r] = all;
    }
}

// The own rows are keys: writes dk and dv, and subtracts the column sums from dcum_logf.
__global__ static void oracle_dkv_kernel(double* dk, double* dv, double* dcum_logf, OracleTensors in,
                                         Shape s) {
    __shared__ double own_k[128 * OWN], own_v[128 * OWN], p[OWN * THREADS], ds[OWN * THREADS];
    int64_t head = blockIdx.y, first = (int64_t)blockIdx.x * OWN;
    double scale = 1 / sqrt((double)s.dh), sum_k[OWN] = {}, sum_v[OWN] = {}, column_sum[OWN] = {}, x[OWN],
           y[OWN];
    const double* cum_logf = in.cum_logf ? in.cum_logf + head * s.T : NULL;
    load_own(own_k, in.k, s, head, first);
    load_own(own_v, in.v, s, head, first);
    for (int64_t i0 = first; i0 < s.T; i0 += THREADS) {
        int64_t i = i0 + threadIdx.x;
        __syncthreads();
        if (i < s.T) {
            dots(x, own_k, in.q + s.at(head, i), (int)s.dh);
            dots(y, own_v, in.dout + s.at(head, i), (int)s.dh);
        }
        for (int r = 0; r < OWN; r++) {
            int64_t j = first + r;
            double w = 0, d = 0;
            if (s.sees(i, j)) {
                w = exp(x[r] * scale + score_bias(cum_logf, i, j) - in.lse[head * s.T + i]);
                d = w * (y[r] - in.delta[head * s.T + i]);
            }
            p[r * THREADS + threadIdx.x] = round_bf16(w, in.plain_bf16);
            ds[r * THREADS + threadIdx.x] = d = round_bf16(d, in.plain_bf16);
            column_sum[r] += d;
        }
        __syncthreads();
        int count = (int)min((int64_t)THREADS, s.T - i0);
        add_rows(sum_k, ds, in.q + s.at(head, i0), s.NH * s.dh, count, (int)s.dh);
        add_rows(sum_v, p, in.dout + s.at(head, i0), s.NH * s.dh, count, (int)s.dh);
    }
    store_own(dk, sum_k, scale, in.plain_bf16, s, head, first);
    store_own(dv, sum_v, 1, in.plain_bf16, s, head, first);
    for (int r = 0; r < OWN; r++) {
        double all = block_sum(column_sum[r]);
        if (threadIdx.x == 0 && first + r < s.T) dcum_logf[head * s.T + first + r] -= all;
    }
}

struct Oracle {
    Buffer<double> o, lse, delta, dq, dk, dv, dcum_logf;
    explicit Oracle(const Shape& s)
        : o((size_t)s.size()), lse((size_t)s.tokens()), delta(lse.n), dq(o.n), dk(o.n), dv(o.n),
          dcum_logf(lse.n) {}
    void forward(const Shape& s, const OracleTensors& in) {
        dim3 grid((unsigned)ceil_div<int64_t>(s.T, OWN), (unsigned)s.heads());
        oracle_forward_kernel<<<grid, THREADS>>>(o, lse, in, s);
        CUDA_CHECK_LAUNCH();
    }
    // in.lse and in.delta are computed here.
    void compute(const Shape& s, OracleTensors in) {
        dim3 grid((unsigned)ceil_div<int64_t>(s.T, OWN), (unsigned)s.heads());
        forward(s, in);
        oracle_delta_kernel<<<(unsigned)ceil_div<int64_t>(s.tokens(), THREADS), THREADS>>>(delta, in.dout, o,
                                                                                           s);
        in.lse = lse, in.delta = delta;
        oracle_dq_kernel<<<grid, THREADS>>>(dq, dcum_logf, in, s);
        oracle_dkv_kernel<<<grid, THREADS>>>(dk, dv, dcum_logf, in, s);
        CUDA_CHECK_LAUNCH();
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};
