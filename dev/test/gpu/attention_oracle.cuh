/*
What test_attention compares with: the formulas in double, naive, on the GPU. It also plays the plain bf16
implementation: probabilities and score gradients rounded to bf16, o and the results too, all else exact.
*/
#ifndef DEV_TEST_GPU_ATTENTION_ORACLE_CUH
#define DEV_TEST_GPU_ATTENTION_ORACLE_CUH

#include <algorithm>
#include <math.h>
#include <vector>
#include "../../../llmc/attention/attention.cuh"

// ----------------------------------------------------------------------------
// inputs and buffers

static uint64_t seed;

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

// Device memory that frees itself. Poisoned: every bit set is a NaN in all our types.
template <class T> struct Buffer {
    T* at;
    int64_t n;
    explicit Buffer(int64_t n) : at(NULL), n(n) {
        CUDA_CHECK(cudaMalloc(&at, (size_t)(n ? n : 1) * sizeof(T)));
        poison();
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { CUDA_CHECK(cudaFree(at)); }
    void poison() { CUDA_CHECK(cudaMemset(at, 0xff, (size_t)n * sizeof(T))); }
    void upload(const std::vector<T>& x) {
        CUDA_CHECK(cudaMemcpy(at, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> read() const {
        std::vector<T> x((size_t)n);
        CUDA_CHECK(cudaMemcpy(x.data(), at, (size_t)n * sizeof(T), cudaMemcpyDeviceToHost));
        return x;
    }
    void fill_normal() {
        static uint64_t calls;
        fill_normal_kernel<<<1024, 256>>>((bf16*)at, n, hash64(seed + ++calls));
        CUDA_CHECK_LAUNCH();
    }
};

template <class T> static bool same_bits(const Buffer<T>& a, const Buffer<T>& b) {
    std::vector<T> x = a.read(), y = b.read();
    return memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}
template <class T> static bool all_zero(const std::vector<T>& x, size_t from, size_t to) {
    for (size_t i = from; i < to; i++)
        if ((double)x[i] != 0) return false;
    return true;
}

// ----------------------------------------------------------------------------
// the oracle. A thread block has OWN rows; its threads take the rows they meet, one each.

#define OWN     8
#define THREADS 128

struct Shape {
    int64_t B, T, NH, dh;
    __host__ __device__ int64_t heads() const { return B * NH; }
    __host__ __device__ int64_t tokens() const { return heads() * T; }
    int64_t size() const { return tokens() * dh; }
    __device__ int64_t at(int64_t head, int64_t t) const {
        return ((head / NH * T + t) * NH + head % NH) * dh;
    }
};

__device__ static double round_bf16(double x, bool round) {
    return round ? (double)(float)(bf16)(float)x : x;
}

// own [dh][OWN] in shared memory from rows first.. of x; zero past T
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
// the block's sum, in every thread
__device__ static double block_sum(double x) {
    __shared__ double partial[THREADS];
    __syncthreads();
    partial[threadIdx.x] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < THREADS; i++) sum += partial[i];
    return sum;
}
__device__ static double score_bias(const double* c, int64_t i, int64_t j) { return c ? c[i] - c[j] : 0; }

__global__ static void oracle_forward_kernel(double* o, double* lse, const bf16* q, const bf16* k,
                                             const bf16* v, const double* c, Shape s, bool round) {
    __shared__ double own[128 * OWN], p[OWN * THREADS];
    int64_t head = blockIdx.y, first = (int64_t)blockIdx.x * OWN, end = min(first + OWN, s.T);
    double scale = 1 / sqrt((double)s.dh), top[OWN], total[OWN], sum[OWN] = {}, x[OWN];
    if (c) c += head * s.T;
    load_own(own, q, s, head, first);
    __syncthreads();
    for (int r = 0; r < OWN; r++) top[r] = -1e300, total[r] = 0;
    for (int64_t j = threadIdx.x; j < end; j += THREADS) {
        dots(x, own, k + s.at(head, j), (int)s.dh);
        for (int r = 0; r < OWN; r++) {
            if (j > first + r || first + r >= s.T) continue;
            double y = x[r] * scale + score_bias(c, first + r, j), higher = fmax(y, top[r]);
            total[r] = total[r] * exp(top[r] - higher) + exp(y - higher);
            top[r] = higher;
        }
    }
    for (int r = 0; r < OWN; r++) { // top and total of the row, and from them its lse
        __syncthreads();
        p[threadIdx.x] = top[r];
        __syncthreads();
        double highest = -1e300;
        for (int i = 0; i < THREADS; i++) highest = fmax(highest, p[i]);
        top[r] = highest + log(block_sum(total[r] * exp(top[r] - highest)));
        if (threadIdx.x == 0 && first + r < s.T) lse[head * s.T + first + r] = top[r];
    }
    for (int64_t j0 = 0; j0 < end; j0 += THREADS) {
        int64_t j = j0 + threadIdx.x;
        if (j < end) dots(x, own, k + s.at(head, j), (int)s.dh);
        __syncthreads();
        for (int r = 0; r < OWN; r++) {
            bool seen = j <= first + r && first + r < s.T;
            double y = seen ? exp(x[r] * scale + score_bias(c, first + r, j) - top[r]) : 0;
            p[r * THREADS + threadIdx.x] = round_bf16(y, round);
        }
        __syncthreads();
        add_rows(sum, p, v + s.at(head, j0), s.NH * s.dh, (int)min((int64_t)THREADS, end - j0), (int)s.dh);
    }
    store_own(o, sum, 1, round, s, head, first);
}

__global__ static void oracle_delta_kernel(double* delta, const bf16* dout, const double* o, Shape s) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.tokens()) return;
    double sum = 0;
    for (int64_t x = 0, at = s.at(i / s.T, i % s.T); x < s.dh; x++)
        sum += (double)(float)dout[at + x] * o[at + x];
    delta[i] = sum;
}

// own rows are queries: writes dq, and the rows' sums to dc
__global__ static void oracle_dq_kernel(double* dq, double* dc, const bf16* dout, const bf16* q,
                                        const bf16* k, const bf16* v, const double* lse, const double* delta,
                                        const double* c, Shape s, bool round) {
    __shared__ double own_q[128 * OWN], own_dout[128 * OWN], ds[OWN * THREADS];
    int64_t head = blockIdx.y, first = (int64_t)blockIdx.x * OWN, end = min(first + OWN, s.T);
    double scale = 1 / sqrt((double)s.dh), sum[OWN] = {}, row_sum[OWN] = {}, x[OWN], y[OWN];
    if (c) c += head * s.T;
    load_own(own_q, q, s, head, first);
    load_own(own_dout, dout, s, head, first);
    for (int64_t j0 = 0; j0 < end; j0 += THREADS) {
        int64_t j = j0 + threadIdx.x;
        __syncthreads();
        if (j < end) {
            dots(x, own_q, k + s.at(head, j), (int)s.dh);
            dots(y, own_dout, v + s.at(head, j), (int)s.dh);
        }
        for (int r = 0; r < OWN; r++) {
            int64_t i = first + r;
            double d = 0;
            if (j <= i && i < s.T)
                d = exp(x[r] * scale + score_bias(c, i, j) - lse[head * s.T + i]) *
                    (y[r] - delta[head * s.T + i]);
            d = round_bf16(d, round);
            ds[r * THREADS + threadIdx.x] = d;
            row_sum[r] += d;
        }
        __syncthreads();
        add_rows(sum, ds, k + s.at(head, j0), s.NH * s.dh, (int)min((int64_t)THREADS, end - j0), (int)s.dh);
    }
    store_own(dq, sum, scale, round, s, head, first);
    for (int r = 0; r < OWN; r++) {
        double all = block_sum(row_sum[r]);
        if (threadIdx.x == 0 && first + r < s.T) dc[head * s.T + first + r] = all;
    }
}

// own rows are keys: writes dk and dv, and subtracts the columns' sums from dc
__global__ static void oracle_dkv_kernel(double* dk, double* dv, double* dc, const bf16* dout, const bf16* q,
                                         const bf16* k, const bf16* v, const double* lse, const double* delta,
                                         const double* c, Shape s, bool round) {
    __shared__ double own_k[128 * OWN], own_v[128 * OWN], p[OWN * THREADS], ds[OWN * THREADS];
    int64_t head = blockIdx.y, first = (int64_t)blockIdx.x * OWN;
    double scale = 1 / sqrt((double)s.dh), sum_k[OWN] = {}, sum_v[OWN] = {}, column_sum[OWN] = {}, x[OWN],
           y[OWN];
    if (c) c += head * s.T;
    load_own(own_k, k, s, head, first);
    load_own(own_v, v, s, head, first);
    for (int64_t i0 = first; i0 < s.T; i0 += THREADS) {
        int64_t i = i0 + threadIdx.x;
        __syncthreads();
        if (i < s.T) {
            dots(x, own_k, q + s.at(head, i), (int)s.dh);
            dots(y, own_v, dout + s.at(head, i), (int)s.dh);
        }
        for (int r = 0; r < OWN; r++) {
            int64_t j = first + r;
            double w = 0, d = 0;
            if (j <= i && i < s.T) {
                w = exp(x[r] * scale + score_bias(c, i, j) - lse[head * s.T + i]);
                d = w * (y[r] - delta[head * s.T + i]);
            }
            p[r * THREADS + threadIdx.x] = round_bf16(w, round);
            ds[r * THREADS + threadIdx.x] = d = round_bf16(d, round);
            column_sum[r] += d;
        }
        __syncthreads();
        int count = (int)min((int64_t)THREADS, s.T - i0);
        add_rows(sum_k, ds, q + s.at(head, i0), s.NH * s.dh, count, (int)s.dh);
        add_rows(sum_v, p, dout + s.at(head, i0), s.NH * s.dh, count, (int)s.dh);
    }
    store_own(dk, sum_k, scale, round, s, head, first);
    store_own(dv, sum_v, 1, round, s, head, first);
    for (int r = 0; r < OWN; r++) {
        double all = block_sum(column_sum[r]);
        if (threadIdx.x == 0 && first + r < s.T) dc[head * s.T + first + r] -= all;
    }
}

struct Oracle {
    Buffer<double> o, lse, delta, dq, dk, dv, dc;
    explicit Oracle(Shape s)
        : o(s.size()), lse(s.tokens()), delta(s.tokens()), dq(s.size()), dk(s.size()), dv(s.size()),
          dc(s.tokens()) {}
    void forward(const Shape& s, const bf16* q, const bf16* k, const bf16* v, const double* c, bool round) {
        dim3 grid((unsigned)ceil_div<int64_t>(s.T, OWN), (unsigned)s.heads());
        oracle_forward_kernel<<<grid, THREADS>>>(o.at, lse.at, q, k, v, c, s, round);
        CUDA_CHECK_LAUNCH();
    }
    void compute(const Shape& s, const bf16* dout, const bf16* q, const bf16* k, const bf16* v,
                 const double* c, bool round) {
        dim3 grid((unsigned)ceil_div<int64_t>(s.T, OWN), (unsigned)s.heads());
        forward(s, q, k, v, c, round);
        oracle_delta_kernel<<<(unsigned)ceil_div<int64_t>(s.tokens(), THREADS), THREADS>>>(delta.at, dout,
                                                                                           o.at, s);
        oracle_dq_kernel<<<grid, THREADS>>>(dq.at, dc.at, dout, q, k, v, lse.at, delta.at, c, s, round);
        oracle_dkv_kernel<<<grid, THREADS>>>(dk.at, dv.at, dc.at, dout, q, k, v, lse.at, delta.at, c, s,
                                             round);
        CUDA_CHECK_LAUNCH();
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};

#endif // DEV_TEST_GPU_ATTENTION_ORACLE_CUH
