/*
Trains the Forgetting Transformer (FoX, arXiv 2503.02130) and its Transformer baselines on the CPU, in plain
C.

This is the reference: the whole model stands below, forward and backward, in the order in which it runs, and
train_fox.cu mirrors it in order and names. `real` is float, or double with -DREAL_IS_DOUBLE for checking
gradients.

Sizes: B sequences of T tokens, L layers, d channels, NH heads of dh = d / NH channels, MLP width I,
vocabulary V, R rows in the fused projection of q, k, v and all gates. A tensor's shape stands in a comment,
last axis fastest.

Threads never share a sum: work is cut into pieces that do not depend on the number of threads, each sum is
taken in one fixed order, and so a run gives the same bits on any number of threads.
*/
#include <math.h>
#include <omp.h>
#include <sys/resource.h>
#ifdef USE_OPENBLAS
#include <cblas.h>
#endif

#include "llmc/model/params.h"
#include "llmc/model/shapes.h"
#include "llmc/run/train.h"
#define HeadShape OwnHeadShape // until this file takes that of shapes.h

#ifdef REAL_IS_DOUBLE
typedef double real;
#else
typedef float real;
#endif

// Sums over rows (gradients of norm weights) are taken in this many pieces, whatever the number of threads.
#define NUM_PIECES 32

// ----------------------------------------------------------------------------
// exp and its kin
//
// libm's expf does not vectorise; this one does, within 1.25 ulp of the true value from e^-60 on. Below that
// it is 0: beside the largest term of a softmax, which is 1, no float can hold what is lost, and the denormal
// numbers that such probabilities lead to make a product a hundred times slower.

#ifdef REAL_IS_DOUBLE
static inline real exp_real(real x) { return exp(x); }
#else
static inline real exp_real(real x) {
    // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 2^23 rounds to an integer and leaves it in the low
    // bits.
    const float shift = 12582912.0f;
    float t = x * 1.44269504f + shift;
    uint32_t n, shift_bits;
    memcpy(&n, &t, sizeof n);
    memcpy(&shift_bits, &shift, sizeof n);
    t -= shift;
    float r = x - t * 0.693359375f;
    r = r + t * 2.12194440e-4f; // ln 2 in two parts, the first exact in few bits
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits = (n - shift_bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    float y = p * power;
    y = x < -60.0f ? 0.0f : y;
    return x > 88.0f ? INFINITY : y;
}
#endif

static inline real sigmoid(real x) { return 1 / (1 + exp_real(-x)); }

static inline real log_sigmoid(real x) {
    double z = (double)x;
    return (real)(z < 0 ? z - log1p(exp(z)) : -log1p(exp(-z)));
}

// ----------------------------------------------------------------------------
// matrix products
//
// out[M,N] (+)= a[M,K] b[K,N]. Operands are views with two strides, so that a transpose or a slice of columns
// costs nothing. Blocks of a and b are copied into panels, MR rows of a and NR columns of b wide, that the
// kernel reads from front to back; its MR x NR sums stay in vector registers.

typedef struct {
    const real* at;
    int64_t row, col; // element (i, j) is at[i * row + j * col]
} View;

static inline View view(const real* at, int64_t row, int64_t col) {
    View v;
    v.at = at, v.row = row, v.col = col;
    return v;
}
// the matrix whose rows start `stride` elements apart, and its transpose
static inline View rows_of(const real* at, int64_t stride) { return view(at, stride, 1); }
static inline View transpose_of(const real* at, int64_t stride) { return view(at, 1, stride); }

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define MR 8 // 8 x 3 sums fill 24 of 32 vector registers
#else
#define MR 4 // 4 x 3 sums fill 12 of 16
#endif
#define VECTOR_REALS (VECTOR_BYTES / (int)sizeof(real))
#define NR           (3 * VECTOR_REALS)
#define MC           (8 * MR)  // rows of a block of a
#define KC           256       // depth of a block
#define NC           (12 * NR) // columns of a block of b

typedef real Vector __attribute__((vector_size(VECTOR_BYTES)));

// Copies m vectors of length K into panels of `width` of them: out[panel][k][width], padded with zeros.
// Vector i is at[i * step], its element k another k * along further. Inlined, for `width` to be a constant in
// the loops.
__attribute__((always_inline)) static inline void pack_panels(real* out, const real* at, int64_t m, int64_t K,
                                                              int64_t step, int64_t along, const int width) {
    for (int64_t first = 0; first < m; first += width, at += width * step, out += width * K) {
        int n = (int)(m - first < width ? m - first : width);
        if (n == width && step == 1) {
            for (int64_t k = 0; k < K; k++)
                for (int i = 0; i < width; i++) out[k * width + i] = at[k * along + i];
        } else if (n == width) {
            for (int64_t k = 0; k < K; k++)
                for (int i = 0; i < width; i++) out[k * width + i] = at[k * along + i * step];
        } else {
            for (int64_t k = 0; k < K; k++)
                for (int i = 0; i < width; i++) out[k * width + i] = i < n ? at[k * along + i * step] : 0;
        }
    }
}

// out[m,n] (+)= a[MR,K] b[K,NR], one packed panel each; m <= MR and n <= NR cut the edges off.
static void multiply_panels(real* out, int64_t stride, const real* a, const real* b, int64_t K, int m, int n,
                            bool add) {
    Vector sum[MR][3];
    memset(sum, 0, sizeof sum);
    for (int64_t k = 0; k < K; k++, a += MR, b += NR)
        for (int i = 0; i < MR; i++)
            for (int j = 0; j < 3; j++) sum[i][j] += a[i] * ((const Vector*)b)[j];
    for (int i = 0; i < m; i++, out += stride) {
        const real* row = (const real*)sum[i];
        if (add)
            for (int j = 0; j < n; j++) out[j] += row[j];
        else
            for (int j = 0; j < n; j++) out[j] = row[j];
    }
}

// out[m,n] (+)= a[m,K] times the packed block b[K,n], with m <= MC, K <= KC, n <= NC.
static void multiply_block(real* out, int64_t stride, View a, const real* packed_b, int64_t m, int64_t n,
                           int64_t K, bool add) {
    static _Thread_local real packed_a[MC * KC] __attribute__((aligned(64)));
    pack_panels(packed_a, a.at, m, K, a.row, a.col, MR);
    for (int64_t j = 0; j < n; j += NR)
        for (int64_t i = 0; i < m; i += MR)
            multiply_panels(out + i * stride + j, stride, packed_a + i * K, packed_b + j * K, K,
                            (int)(m - i < MR ? m - i : MR), (int)(n - j < NR ? n - j : NR), add);
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// The product on one thread, for callers that are parallel themselves. `stride` is that of out's rows.
static void matmul_serial(real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K,
                          bool add) {
    static _Thread_local real packed_b[KC * NC] __attribute__((aligned(64)));
    for (int64_t j = 0; j < N; j += NC)
        for (int64_t k = 0; k < K; k += KC) {
            int64_t n = min64(NC, N - j), depth = min64(KC, K - k);
            pack_panels(packed_b, b.at + k * b.row + j * b.col, n, depth, b.col, b.row, NR);
            for (int64_t i = 0; i < M; i += MC)
                multiply_block(out + i * stride + j, stride, view(a.at + i * a.row + k * a.col, a.row, a.col),
                               packed_b, min64(MC, M - i), n, depth, add || k > 0);
        }
}

#ifdef USE_OPENBLAS
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// OpenBLAS on blocks of rows, each on one thread: its own threads would split sums by their number.
static void matmul(real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K, bool add) {
    CBLAS_TRANSPOSE ta = a.col == 1 ? CblasNoTrans : CblasTrans, tb = b.col == 1 ? CblasNoTrans : CblasTrans;
    // a stride that BLAS accepts, also where there is but one row or column and ours means nothing
    int lda = (int)(a.col == 1 ? max64(a.row, K) : max64(a.col, M));
    int ldb = (int)(b.col == 1 ? max64(b.row, N) : max64(b.col, K));
    int64_t rows = M >= 2048 ? 512 : 128; // of a block: large ones pay for the packing of b
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < M; i += rows) {
        int m = (int)min64(rows, M - i);
#ifdef REAL_IS_DOUBLE
        cblas_dgemm
#else
        cblas_sgemm
#endif
            (CblasRowMajor, ta, tb, m, (int)N, (int)K, 1, a.at + i * a.row, lda, b.at, ldb, add,
             out + i * stride, (int)stride);
    }
}
#else
static void matmul(real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K, bool add) {
    static real packed_b[KC * NC] __attribute__((aligned(64))); // shared by all threads
#pragma omp parallel
    for (int64_t j = 0; j < N; j += NC)
        for (int64_t k = 0; k < K; k += KC) {
            int64_t n = min64(NC, N - j), depth = min64(KC, K - k);
#pragma omp for schedule(static)
            for (int64_t p = 0; p < n; p += NR)
                pack_panels(packed_b + p * depth, b.at + k * b.row + (j + p) * b.col, min64(NR, n - p), depth,
                            b.col, b.row, NR);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < M; i += MC)
                multiply_block(out + i * stride + j, stride, view(a.at + i * a.row + k * a.col, a.row, a.col),
                               packed_b, min64(MC, M - i), n, depth, add || k > 0);
        }
}
#endif

// out[N] = w[N,K] x[K], for generation, where copying w into panels would cost more than the product
static void matvec(real* out, const real* w, const real* x, int64_t N, int64_t K) {
#pragma omp parallel for schedule(static) if (N * K > 65536)
    for (int64_t n = 0; n < N; n++) {
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < K; k++) sum += w[n * K + k] * x[k];
        out[n] = sum;
    }
}

// A linear layer without bias: out[rows,N] (+)= x[rows,K] w[N,K]^T. Its backward pass writes dx and adds to
// dw.
static void linear_forward(real* out, const real* x, const real* w, int64_t rows, int64_t N, int64_t K,
                           bool add) {
    if (rows == 1 && !add)
        matvec(out, w, x, N, K);
    else
        matmul(out, N, rows_of(x, K), transpose_of(w, K), rows, N, K, add);
}

static void linear_backward(real* dx, real* dw, const real* dout, const real* x, const real* w, int64_t rows,
                            int64_t N, int64_t K) {
    matmul(dx, K, rows_of(dout, N), rows_of(w, K), rows, K, N, false);
    matmul(dw, K, transpose_of(dout, N), rows_of(x, K), N, K, rows, true);
}

// ----------------------------------------------------------------------------
// embedding: x_t = E[token_t]

static void embedding_forward(real* x, const real* embeddings, const int32_t* tokens, int64_t rows,
                              int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
        memcpy(x + t * d, embeddings + tokens[t] * d, (size_t)d * sizeof(real));
}

// Pieces are ranges of channels: a token that occurs twice is then summed by one thread, in order.
static void embedding_backward(real* dembeddings, const real* dx, const int32_t* tokens, int64_t rows,
                               int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES; piece++) {
        int64_t first = d * piece / NUM_PIECES, last = d * (piece + 1) / NUM_PIECES;
        for (int64_t t = 0; t < rows; t++)
            for (int64_t c = first; c < last; c++) dembeddings[tokens[t] * d + c] += dx[t * d + c];
    }
}

// ----------------------------------------------------------------------------
// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight

static inline real dot(const real* a, const real* b, int64_t n) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++) sum += a[c] * b[c];
    return sum;
}

// One vector; returns 1 / rms, which the backward pass takes back. y may be x.
static inline real norm_forward(real* y, const real* x, const real* weight, int64_t n, double eps) {
    real rstd = (real)(1 / sqrt((double)(dot(x, x, n) / (real)n) + eps));
    for (int64_t c = 0; c < n; c++) y[c] = x[c] * rstd * weight[c];
    return rstd;
}

// One vector: with g = dy * weight,  dx (+)= rstd (g - x rstd^2 mean(g x)),  dweight += dy x rstd. dx may be
// dy.
static inline void norm_backward(real* dx, real* dweight, const real* dy, const real* x, const real* weight,
                                 real rstd, int64_t n, bool add) {
    real gx = 0;
#pragma omp simd reduction(+ : gx)
    for (int64_t c = 0; c < n; c++) gx += dy[c] * weight[c] * x[c];
    real mean = gx / (real)n * rstd * rstd;
    for (int64_t c = 0; c < n; c++) {
        real g = rstd * (dy[c] * weight[c] - x[c] * mean);
        dweight[c] += dy[c] * x[c] * rstd;
        dx[c] = add ? dx[c] + g : g;
    }
}

static void rmsnorm_forward(real* y, real* rstd, const real* x, const real* weight, int64_t rows, int64_t d,
                            double eps) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) rstd[t] = norm_forward(y + t * d, x + t * d, weight, d, eps);
}

// dx += the gradient of x; partial [NUM_PIECES, d] is scratch
static void rmsnorm_backward(real* dx, real* dweight, const real* dy, const real* x, const real* weight,
                             const real* rstd, real* partial, int64_t rows, int64_t d) {
    memset(partial, 0, (size_t)(NUM_PIECES * d) * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES; piece++)
        for (int64_t t = rows * piece / NUM_PIECES; t < rows * (piece + 1) / NUM_PIECES; t++)
            norm_backward(dx + t * d, partial + piece * d, dy + t * d, x + t * d, weight, rstd[t], d, true);
    for (int64_t piece = 0; piece < NUM_PIECES; piece++)
        for (int64_t c = 0; c < d; c++) dweight[c] += partial[piece * d + c];
}

// ----------------------------------------------------------------------------
// heads on their way from the fused projection into attention: shift, QK norm, RoPE
//
// q, k and v differ only in which of the three they take, so one description serves all.

typedef struct {
    int64_t column;     // of the head's channels in a row of proj
    int64_t shift;      // column of its shift gate's logits in proj, -1 without shift
    const real* weight; // QK norm's [d] or [dh], NULL without
    real* dweight;
    bool rope;
    real* out;  // [B, T, d]
    real* rstd; // [B, T, NH], with QK norm
    real* dout; // [B, T, d], used up by the backward pass
} HeadPath;

typedef struct {
    int64_t B, T, NH, dh, R;
    int64_t weight_step; // from one head's QK norm weights to the next: dh, or 0 when shared
} HeadShape;

// Angles of position t: cos and sin of t base^(-2i/dh) for each of dh/2 pairs.
static void rope_angles(real* row, int64_t t, int64_t dh, double base) {
    for (int64_t i = 0; i < dh / 2; i++) {
        double angle = (double)t * pow(base, -2.0 * (double)i / (double)dh);
        row[2 * i] = (real)cos(angle);
        row[2 * i + 1] = (real)sin(angle);
    }
}

// Rotates the pairs (x_i, x_{i + dh/2}) by their angles; direction -1 rotates back.
static inline void rope_rotate(real* x, const real* angles, int64_t dh, real direction) {
    for (int64_t i = 0; i < dh / 2; i++) {
        real cosine = angles[2 * i], sine = direction * angles[2 * i + 1];
        real first = x[i], second = x[i + dh / 2];
        x[i] = first * cosine - second * sine;
        x[i + dh / 2] = first * sine + second * cosine;
    }
}

// (1 - alpha) now + alpha before, where `before` is the last token's (NULL at the first one)
static inline void shift_head(real* out, const real* now, const real* before, real alpha, int64_t dh) {
    for (int64_t c = 0; c < dh; c++) out[c] = (1 - alpha) * now[c] + (before ? alpha * before[c] : 0);
}

// One head of one token. `row` and `before` are its and the last token's rows of proj; angles is [dh/2, 2].
static void head_forward(const HeadPath* path, const HeadShape* s, int64_t h, real* out, real* rstd,
                         const real* row, const real* before, const real* angles) {
    int64_t column = path->column + h * s->dh;
    real alpha = path->shift >= 0 ? sigmoid(row[path->shift + h]) : 0;
    shift_head(out, row + column, before ? before + column : NULL, alpha, s->dh);
    if (path->weight) *rstd = norm_forward(out, out, path->weight + h * s->weight_step, s->dh, QK_NORM_EPS);
    if (path->rope) rope_rotate(out, angles, s->dh, 1);
}

// proj [B, T, R] -> each path's out [B, T, d]; angles [T, dh/2, 2]
static void qkv_forward(const HeadPath paths[3], const HeadShape* s, const real* proj, const real* angles) {
#pragma omp parallel for schedule(static)
    for (int64_t bt = 0; bt < s->B * s->T; bt++) {
        int64_t t = bt % s->T;
        const real *row = proj + bt * s->R, *before = t ? row - s->R : NULL;
        for (int p = 0; p < 3; p++)
            for (int64_t h = 0; h < s->NH; h++) {
                int64_t i = bt * s->NH + h;
                head_forward(&paths[p], s, h, paths[p].out + i * s->dh,
                             paths[p].rstd ? paths[p].rstd + i : NULL, row, before, angles + t * s->dh);
            }
    }
}

// Adds the sums of each (batch, head), partial [B, NH, dh], to a norm's weight gradient.
static void add_head_partials(real* dweight, const real* partial, const HeadShape* s, int64_t weight_step) {
    for (int64_t i = 0; i < s->B * s->NH; i++)
        for (int64_t c = 0; c < s->dh; c++) dweight[i % s->NH * weight_step + c] += partial[i * s->dh + c];
}

// Writes the columns of dproj that the path reads, from path->dout. Time runs backward: what token t+1 took
// from token t is carried over in `later`. partial [B, NH, dh] and scratch [B, NH, 2, dh] are working space.
static void head_backward(const HeadPath* path, const HeadShape* s, real* dproj, const real* proj,
                          const real* angles, real* partial, real* scratch) {
    int64_t T = s->T, dh = s->dh;
    memset(partial, 0, (size_t)(s->B * s->NH * dh) * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s->B * s->NH; i++) {
        int64_t b = i / s->NH, h = i % s->NH, column = path->column + h * dh;
        real *later = scratch + 2 * i * dh, *shifted = later + dh;
        memset(later, 0, (size_t)dh * sizeof(real));
        for (int64_t t = T - 1; t >= 0; t--) {
            int64_t bt = b * T + t;
            const real *now = proj + bt * s->R + column, *before = t ? now - s->R : NULL;
            real *dout = path->dout + (bt * s->NH + h) * dh, *drow = dproj + bt * s->R;
            real alpha = path->shift >= 0 ? sigmoid(proj[bt * s->R + path->shift + h]) : 0;
            if (path->rope) rope_rotate(dout, angles + t * dh, dh, -1);
            if (path->weight) {
                shift_head(shifted, now, before, alpha, dh);
                norm_backward(dout, partial + i * dh, dout, shifted, path->weight + h * s->weight_step,
                              path->rstd[bt * s->NH + h], dh, false);
            }
            real dalpha = 0;
            for (int64_t c = 0; c < dh; c++) {
                drow[column + c] = (1 - alpha) * dout[c] + later[c];
                dalpha += dout[c] * ((before ? before[c] : 0) - now[c]);
                later[c] = alpha * dout[c];
            }
            if (path->shift >= 0) drow[path->shift + h] = dalpha * alpha * (1 - alpha);
        }
    }
    if (path->weight) add_head_partials(path->dweight, partial, s, s->weight_step);
}

// ----------------------------------------------------------------------------
// forget gate: logf_t = logsigmoid(z_t + bias), c_t = logf_0 + ... + logf_t, in double whatever real is
//
// z [B, T, R] points at the gate's column of proj; NULL where the gate has only a bias.

static void forget_gate_forward(double* c, const real* z, const real* bias, const HeadShape* s) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s->B * s->NH; i++) {
        int64_t b = i / s->NH, h = i % s->NH;
        double sum = 0;
        for (int64_t t = 0; t < s->T; t++) {
            real logit = (z ? z[(b * s->T + t) * s->R + h] : 0) + bias[h];
            sum += (double)log_sigmoid(logit);
            c[i * s->T + t] = sum;
        }
    }
}

// dlogf_t = dc_t + ... + dc_{T-1},  dz = dlogf sigmoid(-z). partial [B, NH] is scratch.
static void forget_gate_backward(real* dz, real* dbias, const double* dc, const real* z, const real* bias,
                                 real* partial, const HeadShape* s) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s->B * s->NH; i++) {
        int64_t b = i / s->NH, h = i % s->NH;
        double dlogf = 0, sum = 0;
        for (int64_t t = s->T - 1; t >= 0; t--) {
            int64_t at = (b * s->T + t) * s->R + h;
            real logit = (z ? z[at] : 0) + bias[h];
            dlogf += dc[i * s->T + t];
            double dlogit = dlogf * (double)sigmoid(-logit);
            if (z) dz[at] = (real)dlogit;
            sum += dlogit;
        }
        partial[i] = (real)sum;
    }
    for (int64_t i = 0; i < s->B * s->NH; i++) dbias[i % s->NH] += partial[i];
}

// ----------------------------------------------------------------------------
// attention: o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + c_i - c_j) v_j over j <= i
//
// In tiles of TILE x TILE scores, with a running maximum and sum, so that memory is linear in T. The bias is
// the difference of two doubles, taken pair by pair: c falls to -1e5 and beyond, where float has no digits
// left.

#define TILE 128

static inline double gate_bias(const double* c, int64_t i, int64_t j) { return c ? c[i] - c[j] : 0; }

// q, k, v, o [B, T, NH, dh]; c [B, NH, T], NULL without gate; lse [B, NH, T] = log of each row's sum of
// exponentials
static void attention_forward(real* o, real* lse, const real* q, const real* k, const real* v,
                              const double* c, const HeadShape* s) {
    int64_t T = s->T, dh = s->dh, d = s->NH * dh;
    real scale = (real)(1 / sqrt((double)dh));
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t head = 0; head < s->B * s->NH; head++)
        for (int64_t i0 = 0; i0 < T; i0 += TILE) {
            static _Thread_local real scores[TILE * TILE];
            real top[TILE], sum[TILE];
            int64_t m = min64(TILE, T - i0), base = head / s->NH * T * d + head % s->NH * dh;
            const double* hc = c ? c + head * T : NULL;
            real* tile_o = o + base + i0 * d;
            for (int64_t i = 0; i < m; i++) top[i] = -INFINITY, sum[i] = 0;
            for (int64_t j0 = 0; j0 <= i0; j0 += TILE) {
                int64_t n = min64(TILE, T - j0);
                matmul_serial(scores, TILE, rows_of(q + base + i0 * d, d), transpose_of(k + base + j0 * d, d),
                              m, n, dh, false);
                for (int64_t i = 0; i < m; i++) {
                    real *row = scores + i * TILE, highest = top[i], total = 0;
                    int64_t keys = min64(n, i0 + i - j0 + 1); // those not in the future
#pragma omp simd reduction(max : highest)
                    for (int64_t j = 0; j < keys; j++) {
                        row[j] = scale * row[j] + (real)gate_bias(hc, i0 + i, j0 + j);
                        highest = row[j] > highest ? row[j] : highest;
                    }
#pragma omp simd reduction(+ : total)
                    for (int64_t j = 0; j < keys; j++) {
                        row[j] = exp_real(row[j] - highest);
                        total += row[j];
                    }
                    for (int64_t j = keys; j < n; j++) row[j] = 0;
                    real rescale = exp_real(top[i] - highest);
                    sum[i] = sum[i] * rescale + total;
                    top[i] = highest;
                    if (j0 > 0)
                        for (int64_t x = 0; x < dh; x++) tile_o[i * d + x] *= rescale;
                }
                matmul_serial(tile_o, d, rows_of(scores, TILE), rows_of(v + base + j0 * d, d), m, dh, n,
                              j0 > 0);
            }
            for (int64_t i = 0; i < m; i++) {
                for (int64_t x = 0; x < dh; x++) tile_o[i * d + x] /= sum[i];
                lse[head * T + i0 + i] = top[i] + (real)log((double)sum[i]);
            }
        }
}

// With p = exp(score - lse), delta_i = do_i o_i and ds = p (do_i v_j - delta_i):
//   dv_j = sum_i p do_i,  dq_i = sum_j ds k_j / sqrt(dh),  dk_j = sum_i ds q_i / sqrt(dh),
//   dc_i = sum_j ds_ij - sum_j ds_ji
// A head is one thread's work from end to end. dc is NULL without gate.
static void attention_backward(real* dq, real* dk, real* dv, double* dc, const real* dout, const real* q,
                               const real* k, const real* v, const real* o, const real* lse, const double* c,
                               const HeadShape* s) {
    int64_t T = s->T, dh = s->dh, d = s->NH * dh;
    real scale = (real)(1 / sqrt((double)dh));
#pragma omp parallel for schedule(dynamic)
    for (int64_t head = 0; head < s->B * s->NH; head++) {
        static _Thread_local real p[TILE * TILE], ds[TILE * TILE];
        static _Thread_local double dc_none[TILE];
        int64_t base = head / s->NH * T * d + head % s->NH * dh;
        const double* hc = c ? c + head * T : NULL;
        if (dc) memset(dc + head * T, 0, (size_t)T * sizeof(double));
        for (int64_t j0 = 0; j0 < T; j0 += TILE)
            for (int64_t i0 = j0; i0 < T; i0 += TILE) {
                int64_t m = min64(TILE, T - i0), n = min64(TILE, T - j0), at_i = base + i0 * d,
                        at_j = base + j0 * d;
                matmul_serial(p, TILE, rows_of(q + at_i, d), transpose_of(k + at_j, d), m, n, dh, false);
                matmul_serial(ds, TILE, rows_of(dout + at_i, d), transpose_of(v + at_j, d), m, n, dh, false);
                double* dc_j = dc ? dc + head * T + j0 : dc_none;
                for (int64_t i = 0; i < m; i++) {
                    real *p_row = p + i * TILE, *ds_row = ds + i * TILE, total = 0;
                    real row_lse = lse[head * T + i0 + i];
                    real delta = dot(dout + at_i + i * d, o + at_i + i * d, dh);
                    int64_t keys = min64(n, i0 + i - j0 + 1);
#pragma omp simd reduction(+ : total)
                    for (int64_t j = 0; j < keys; j++) {
                        real bias = (real)gate_bias(hc, i0 + i, j0 + j);
                        p_row[j] = exp_real(scale * p_row[j] + bias - row_lse);
                        real gradient = p_row[j] * (ds_row[j] - delta);
                        ds_row[j] = gradient * scale;
                        dc_j[j] -= (double)gradient;
                        total += gradient;
                    }
                    for (int64_t j = keys; j < n; j++) p_row[j] = ds_row[j] = 0;
                    if (dc) dc[head * T + i0 + i] += (double)total;
                }
                matmul_serial(dv + at_j, d, transpose_of(p, TILE), rows_of(dout + at_i, d), n, dh, m,
                              i0 > j0);
                matmul_serial(dk + at_j, d, transpose_of(ds, TILE), rows_of(q + at_i, d), n, dh, m, i0 > j0);
                matmul_serial(dq + at_i, d, rows_of(ds, TILE), rows_of(k + at_j, d), m, dh, n, j0 > 0);
            }
    }
}

// ----------------------------------------------------------------------------
// output norm and output gate: y = RMSNorm(o) over each head's channels, times sigmoid(g); either may be
// missing
//
// weight [d] is NULL without norm; gate [B, T, R] points at its column of proj, NULL without gate.

static void output_gate_forward(real* y, real* rstd, const real* o, const real* weight, const real* gate,
                                const HeadShape* s, double eps) {
    int64_t dh = s->dh;
#pragma omp parallel for schedule(static)
    for (int64_t bt = 0; bt < s->B * s->T; bt++)
        for (int64_t h = 0; h < s->NH; h++) {
            int64_t i = bt * s->NH + h;
            if (weight)
                rstd[i] = norm_forward(y + i * dh, o + i * dh, weight + h * dh, dh, eps);
            else
                memcpy(y + i * dh, o + i * dh, (size_t)dh * sizeof(real));
            if (!gate) continue;
            for (int64_t c = 0; c < dh; c++) y[i * dh + c] *= sigmoid(gate[bt * s->R + h * dh + c]);
        }
}

// Writes dout, the gradient of o, and dgate, from dy. partial [B, NH, dh] is scratch.
static void output_gate_backward(real* dout, real* dweight, real* dgate, const real* dy, const real* o,
                                 const real* weight, const real* rstd, const real* gate, real* partial,
                                 const HeadShape* s) {
    int64_t dh = s->dh;
    memset(partial, 0, (size_t)(s->B * s->NH * dh) * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < s->B * s->NH; head++)
        for (int64_t t = 0; t < s->T; t++) {
            int64_t h = head % s->NH, bt = head / s->NH * s->T + t, i = bt * s->NH + h;
            const real *out = o + i * dh, *w = weight ? weight + h * dh : NULL;
            real *dnormed = dout + i * dh, r = weight ? rstd[i] : 1;
            for (int64_t c = 0; c < dh; c++) {
                dnormed[c] = dy[i * dh + c];
                if (!gate) continue;
                real open = sigmoid(gate[bt * s->R + h * dh + c]);
                real normed = w ? out[c] * r * w[c] : out[c];
                dgate[bt * s->R + h * dh + c] = dnormed[c] * normed * open * (1 - open);
                dnormed[c] *= open;
            }
            if (w) norm_backward(dnormed, partial + head * dh, dnormed, out, w, r, dh, false);
        }
    if (weight) add_head_partials(dweight, partial, s, dh);
}

// ----------------------------------------------------------------------------
// SwiGLU: s = silu(g) u, with g and u the two halves of gu [rows, 2I]

static void swiglu_forward(real* s, const real* gu, int64_t rows, int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = 0; i < I; i++) {
            real g = gu[t * 2 * I + i], u = gu[t * 2 * I + I + i];
            s[t * I + i] = g * sigmoid(g) * u;
        }
}

static void swiglu_backward(real* dgu, const real* ds, const real* gu, int64_t rows, int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = 0; i < I; i++) {
            real g = gu[t * 2 * I + i], u = gu[t * 2 * I + I + i], open = sigmoid(g);
            dgu[t * 2 * I + i] = ds[t * I + i] * u * open * (1 + g * (1 - open));
            dgu[t * 2 * I + I + i] = ds[t * I + i] * g * open;
        }
}

// ----------------------------------------------------------------------------
// classifier: loss_t = -log softmax(logits_t)[target_t]; when training, logits become their own gradient
// times dloss

static void classifier(real* losses, real* logits, const int32_t* targets, int64_t rows, int64_t V,
                       real dloss, bool train) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        real *row = logits + t * V, highest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : highest)
        for (int64_t i = 0; i < V; i++) highest = row[i] > highest ? row[i] : highest;
        real target_logit = row[targets[t]] - highest;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < V; i++) {
            real e = exp_real(row[i] - highest);
            sum += e;
            row[i] = train ? e : row[i];
        }
        losses[t] = (real)log((double)sum) - target_logit;
        if (!train) continue;
        for (int64_t i = 0; i < V; i++) row[i] *= dloss / sum;
        row[targets[t]] -= dloss;
    }
}

// ----------------------------------------------------------------------------
// global norm and AdamW

static double global_norm(const real* grads, int64_t count) {
    const int64_t block = 65536;
    int64_t blocks = (count + block - 1) / block;
    double total = 0, *sums = (double*)xcalloc((size_t)blocks, sizeof(double));
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * block; i < min64(count, (b + 1) * block); i++)
            sum += (double)grads[i] * (double)grads[i];
        sums[b] = sum;
    }
    for (int64_t b = 0; b < blocks; b++) total += sums[b];
    free(sums);
    return sqrt(total);
}

// The factor that clips a gradient of this norm to grad_clip; 0: no clipping.
static inline double clip_scale(double norm, double grad_clip) {
    return grad_clip > 0 && norm > grad_clip ? grad_clip / norm : 1;
}

// w -= lr (mhat / (sqrt(vhat) + eps) + weight_decay w) for n elements; the gradient is first scaled by
// grad_scale.
static void adamw_update(real* w, real* m, real* v, const real* g, int64_t n, double grad_scale,
                         const AdamWParams* p) {
    real beta1 = (real)p->beta1, beta2 = (real)p->beta2, eps = (real)p->eps, scale = (real)grad_scale;
    real rate = (real)(p->lr / (1 - pow(p->beta1, (double)p->step)));
    real root = (real)(1 / sqrt(1 - pow(p->beta2, (double)p->step)));
    real keep = (real)(1 - p->lr * p->weight_decay);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        real gradient = g[i] * scale;
        m[i] = beta1 * m[i] + (1 - beta1) * gradient;
        v[i] = beta2 * v[i] + (1 - beta2) * gradient * gradient;
        w[i] = keep * w[i] - rate * m[i] / ((real)sqrt((double)v[i]) * root + eps);
    }
}

// ----------------------------------------------------------------------------
// the model

// Every activation: type, name, whether each layer keeps its own for the backward pass or all share one,
// number of elements (of a layer).
enum { SHARED, PER_LAYER };
// clang-format off
#define ACTIVATIONS(X) \
    X(real, x, PER_LAYER, BT * d)            /* [L,B,T,d] residual stream as it enters each block */ \
    X(real, attn_rstd, PER_LAYER, BT)        /* [L,B,T] */ \
    X(real, attn_in, PER_LAYER, BT * d)      /* [L,B,T,d] normed, what the fused projection reads */ \
    X(real, proj, PER_LAYER, BT * R)         /* [L,B,T,R] q~ k~ v~, output gate, forget gate, shift gates */ \
    X(real, q, PER_LAYER, BT * d)            /* [L,B,T,d] as attention reads them, like k and v */ \
    X(real, k, PER_LAYER, BT * d)            /* [L,B,T,d] */ \
    X(real, v, PER_LAYER, BT * d)            /* [L,B,T,d] */ \
    X(real, q_rstd, PER_LAYER, BT * NH)      /* [L,B,T,NH] */ \
    X(real, k_rstd, PER_LAYER, BT * NH)      /* [L,B,T,NH] */ \
    X(double, c, PER_LAYER, gated * BT * NH) /* [L,B,NH,T] running sum of log forget gates */ \
    X(real, lse, PER_LAYER, BT * NH)         /* [L,B,NH,T] */ \
    X(real, o, PER_LAYER, BT * d)            /* [L,B,T,d] attention's output */ \
    X(real, o_rstd, PER_LAYER, BT * NH)      /* [L,B,T,NH] */ \
    X(real, y, PER_LAYER, BT * d)            /* [L,B,T,d] after output norm and gate */ \
    X(real, x_mid, PER_LAYER, BT * d)        /* [L,B,T,d] residual stream between attention and MLP */ \
    X(real, mlp_rstd, PER_LAYER, BT)         /* [L,B,T] */ \
    X(real, mlp_in, PER_LAYER, BT * d)       /* [L,B,T,d] normed */ \
    X(real, gu, PER_LAYER, BT * 2 * I)       /* [L,B,T,2I] */ \
    X(real, s, PER_LAYER, BT * I)            /* [L,B,T,I] */ \
    X(real, x_last, SHARED, BT * d)          /* [B,T,d] residual stream after the last block */ \
    X(real, rstd, SHARED, BT)                /* [B,T] of the final norm */ \
    X(real, head_in, SHARED, BT * d)         /* [B,T,d] normed, what the head reads */ \
    X(real, losses, SHARED, BT)              /* [B,T] */ \
    X(real, logits, SHARED, logit_rows * V)  /* [rows,V] of a chunk of rows, then their gradient */ \
    X(real, dx, SHARED, BT * d)              /* [B,T,d] gradient of the residual stream */ \
    X(real, dbranch, SHARED, BT * d)         /* [B,T,d] of what a norm or attention's output gave */ \
    X(real, dproj, SHARED, BT * R)           /* [B,T,R] */ \
    X(real, dq, SHARED, BT * d)              /* [B,T,d] */ \
    X(real, dk, SHARED, BT * d)              /* [B,T,d] */ \
    X(real, dv, SHARED, BT * d)              /* [B,T,d] */ \
    X(real, dout, SHARED, BT * d)            /* [B,T,d] of attention's output */ \
    X(double, dc, SHARED, gated * BT * NH)   /* [B,NH,T] */ \
    X(real, dgu, SHARED, BT * 2 * I)         /* [B,T,2I] */ \
    X(real, ds, SHARED, BT * I)              /* [B,T,I] */ \
    X(real, partial, SHARED, NUM_PIECES * d + 3 * B * NH * dh) /* pieces of norms' weight gradients */
// clang-format on

#define ACTIVATION_FIELD(type, name, kept, count) type* name;
#define ACTIVATION_STEP(type, name, kept, count)  int64_t name;
typedef struct {
    ACTIVATIONS(ACTIVATION_FIELD)
    struct {
        ACTIVATIONS(ACTIVATION_STEP)
    } step; // from a layer's to the next one's; 0 where they share
} Activations;

typedef struct {
    Config config;
    ParamTable table;
    int64_t B, T; // the shape that the activations are for
    real* params; // [table.count], as grads and AdamW's two moments
    real* grads;
    real* m;
    real* v;
    real* angles; // [T, dh/2, 2] of RoPE
    Activations acts;
} Model;

// Rows of logits that are held at once: the whole [B, T, V] of a large vocabulary would dwarf everything
// else.
static int64_t model_logit_rows(const Config* c, int64_t rows) {
    int64_t most = ((int64_t)1 << 22) / c->vocab_size;
    return min64(rows, most < 64 ? 64 : most);
}

// Allocates what forward and backward passes over [B, T] tokens need, or only sums it up.
static int64_t model_plan_activations(Activations* acts, const Config* config, const ParamTable* table,
                                      int64_t B, int64_t T, bool allocate) {
    int64_t BT = B * T, L = config->num_hidden_layers, d = config->hidden_size, NH = config->num_heads,
            dh = d / NH;
    int64_t R = table->proj.rows, I = config_mlp_size(config), V = config->vocab_size, bytes = 0;
    int64_t logit_rows = model_logit_rows(config, BT), gated = config_has_gate(config);
#define ACTIVATION_PLAN(type, name, kept, count)                                                             \
    {                                                                                                        \
        int64_t elements = (count) * (kept == PER_LAYER ? L : 1);                                            \
        bytes += elements * (int64_t)sizeof(type);                                                           \
        if (allocate) acts->name = (type*)xcalloc((size_t)elements, sizeof(type));                           \
        if (allocate) acts->step.name = kept == PER_LAYER ? (count) : 0;                                     \
    }
    ACTIVATIONS(ACTIVATION_PLAN)
    return bytes;
}

// A model without weights: parameters for inference; with `train` also gradients and AdamW's moments.
static Model model_new(const Config* config, bool train) {
    Model model;
    memset(&model, 0, sizeof model);
    model.config = *config;
    model.table = params_build(config);
    size_t count = (size_t)model.table.count;
    model.params = (real*)xcalloc(count, sizeof(real));
    if (!train) return model;
    model.grads = (real*)xcalloc(count, sizeof(real));
    model.m = (real*)xcalloc(count, sizeof(real));
    model.v = (real*)xcalloc(count, sizeof(real));
    return model;
}

static void model_allocate_activations(Model* model, int64_t B, int64_t T) {
    int64_t dh = config_head_size(&model->config);
    model->B = B;
    model->T = T;
    model_plan_activations(&model->acts, &model->config, &model->table, B, T, true);
    model->angles = (real*)xcalloc((size_t)(T * dh), sizeof(real));
    for (int64_t t = 0; model->config.use_rope && t < T; t++)
        rope_angles(model->angles + t * dh, t, dh, model->config.rope_base);
}

static void model_free(Model* model) {
#define ACTIVATION_FREE(type, name, kept, count) free(model->acts.name);
    ACTIVATIONS(ACTIVATION_FREE)
    free(model->params);
    free(model->grads);
    free(model->m);
    free(model->v);
    free(model->angles);
    params_free(&model->table);
    memset(model, 0, sizeof *model);
}

// A parameter of layer l in a buffer of the table's layout; NULL where the model has none.
static inline real* param_at(const Model* model, real* buffer, ParamKind kind, int64_t l) {
    const Param* p = params_find(&model->table, kind, l);
    return p && buffer ? buffer + p->offset : NULL;
}

// Column `column` of a tensor with rows of proj's width, NULL where the model does not have it (-1).
static inline real* proj_column(real* proj, int64_t column) { return column < 0 ? NULL : proj + column; }

static HeadShape model_head_shape(const Model* model, int64_t B, int64_t T) {
    HeadShape s;
    s.B = B, s.T = T, s.NH = model->config.num_heads, s.dh = config_head_size(&model->config);
    s.R = model->table.proj.rows;
    s.weight_step = model->config.qk_norm_share ? 0 : s.dh;
    return s;
}

// The activations of layer l.
#define ACTIVATION_AT(type, name, kept, count) a.name = model->acts.name + l * model->acts.step.name;
static Activations model_layer(const Model* model, int64_t l) {
    Activations a = model->acts;
    ACTIVATIONS(ACTIVATION_AT)
    return a;
}

// How q, k and v of layer l get from proj to attention.
static void model_head_paths(Model* model, int64_t l, HeadPath paths[3]) {
    const ProjLayout* proj = &model->table.proj;
    memset(paths, 0, 3 * sizeof paths[0]);
    HeadPath *q = &paths[0], *k = &paths[1], *v = &paths[2];
    q->column = proj->q, k->column = proj->k, v->column = proj->v;
    q->shift = -1, k->shift = proj->k_shift, v->shift = proj->v_shift;
    q->weight = param_at(model, model->params, P_Q_NORM, l),
    q->dweight = param_at(model, model->grads, P_Q_NORM, l);
    k->weight = param_at(model, model->params, P_K_NORM, l),
    k->dweight = param_at(model, model->grads, P_K_NORM, l);
    q->rope = k->rope = model->config.use_rope;
    if (!model->acts.q) return; // generation has no activations
    Activations a = model_layer(model, l);
    q->out = a.q, k->out = a.k, v->out = a.v;
    q->rstd = a.q_rstd, k->rstd = a.k_rstd;
    q->dout = a.dq, k->dout = a.dk, v->dout = a.dv;
}

// ----------------------------------------------------------------------------
// forward

// One block: acts.x of layer l -> that of the next one, keeping what the backward pass needs.
static void block_forward(Model* model, int64_t l) {
    const Config* config = &model->config;
    const ProjLayout* layout = &model->table.proj;
    int64_t B = model->B, T = model->T, BT = B * T, L = config->num_hidden_layers, d = config->hidden_size;
    int64_t I = config_mlp_size(config), R = layout->rows;
    real* w = model->params;
    Activations a = model_layer(model, l);
    real* x_next = l + 1 < L ? a.x + BT * d : a.x_last;
    double* c = config_has_gate(config) ? a.c : NULL;
    HeadShape shape = model_head_shape(model, B, T);
    HeadPath paths[3];
    model_head_paths(model, l, paths);

    rmsnorm_forward(a.attn_in, a.attn_rstd, a.x, param_at(model, w, P_ATTN_NORM, l), BT, d, config->norm_eps);
    linear_forward(a.proj, a.attn_in, param_at(model, w, P_Q_PROJ, l), BT, R, d, false);
    qkv_forward(paths, &shape, a.proj, model->angles);
    if (c)
        forget_gate_forward(c, proj_column(a.proj, layout->fgate), param_at(model, w, P_FGATE_BIAS, l),
                            &shape);
    attention_forward(a.o, a.lse, a.q, a.k, a.v, c, &shape);
    output_gate_forward(a.y, a.o_rstd, a.o, param_at(model, w, P_OUTPUT_NORM, l),
                        proj_column(a.proj, layout->ogate), &shape, config->norm_eps);
    memcpy(a.x_mid, a.x, (size_t)(BT * d) * sizeof(real));
    linear_forward(a.x_mid, a.y, param_at(model, w, P_O_PROJ, l), BT, d, d, true);

    rmsnorm_forward(a.mlp_in, a.mlp_rstd, a.x_mid, param_at(model, w, P_MLP_NORM, l), BT, d,
                    config->norm_eps);
    linear_forward(a.gu, a.mlp_in, param_at(model, w, P_GATE_PROJ, l), BT, 2 * I, d, false);
    swiglu_forward(a.s, a.gu, BT, I);
    memcpy(x_next, a.x_mid, (size_t)(BT * d) * sizeof(real));
    linear_forward(x_next, a.s, param_at(model, w, P_DOWN_PROJ, l), BT, d, I, true);
}

// inputs [B,T] -> acts.head_in [B,T,d]
static void model_forward(Model* model, const int32_t* inputs) {
    const Config* config = &model->config;
    Activations* a = &model->acts;
    int64_t BT = model->B * model->T, d = config->hidden_size;
    embedding_forward(a->x, param_at(model, model->params, P_EMBEDDINGS, 0), inputs, BT, d);
    for (int64_t l = 0; l < config->num_hidden_layers; l++) block_forward(model, l);
    rmsnorm_forward(a->head_in, a->rstd, a->x_last, param_at(model, model->params, P_NORM, 0), BT, d,
                    config->norm_eps);
}

// Head and cross entropy of the last forward pass, in chunks of rows: fills acts.losses [B,T] and returns
// their sum. With `train` also acts.dbranch, the gradient of head_in, and the head's; dloss is the weight of
// a token's loss. all_logits [B,T,V] takes a copy of the logits, NULL for none.
static double model_loss(Model* model, const int32_t* targets, real dloss, bool train, real* all_logits) {
    Activations* a = &model->acts;
    int64_t BT = model->B * model->T, d = model->config.hidden_size, V = model->config.vocab_size;
    const real* head = param_at(model, model->params, P_LM_HEAD, 0);
    int64_t chunk = model_logit_rows(&model->config, BT);
    for (int64_t t = 0; t < BT; t += chunk) {
        int64_t rows = min64(chunk, BT - t);
        linear_forward(a->logits, a->head_in + t * d, head, rows, V, d, false);
        if (all_logits) memcpy(all_logits + t * V, a->logits, (size_t)(rows * V) * sizeof(real));
        classifier(a->losses + t, a->logits, targets + t, rows, V, dloss, train);
        if (train)
            linear_backward(a->dbranch + t * d, param_at(model, model->grads, P_LM_HEAD, 0), a->logits,
                            a->head_in + t * d, head, rows, V, d);
    }
    double sum = 0;
    for (int64_t t = 0; t < BT; t++) sum += (double)a->losses[t];
    return sum;
}

// ----------------------------------------------------------------------------
// backward: adds to all gradients, after model_loss with `train`

// One block: acts.dx, the gradient of its output, becomes that of its input.
static void block_backward(Model* model, int64_t l) {
    const Config* config = &model->config;
    const ProjLayout* layout = &model->table.proj;
    int64_t B = model->B, T = model->T, BT = B * T, d = config->hidden_size;
    int64_t I = config_mlp_size(config), R = layout->rows;
    real *w = model->params, *g = model->grads;
    Activations a = model_layer(model, l);
    double *c = config_has_gate(config) ? a.c : NULL, *dc = c ? a.dc : NULL;
    HeadShape shape = model_head_shape(model, B, T);
    HeadPath paths[3];
    model_head_paths(model, l, paths);

    linear_backward(a.ds, param_at(model, g, P_DOWN_PROJ, l), a.dx, a.s, param_at(model, w, P_DOWN_PROJ, l),
                    BT, d, I);
    swiglu_backward(a.dgu, a.ds, a.gu, BT, I);
    linear_backward(a.dbranch, param_at(model, g, P_GATE_PROJ, l), a.dgu, a.mlp_in,
                    param_at(model, w, P_GATE_PROJ, l), BT, 2 * I, d);
    rmsnorm_backward(a.dx, param_at(model, g, P_MLP_NORM, l), a.dbranch, a.x_mid,
                     param_at(model, w, P_MLP_NORM, l), a.mlp_rstd, a.partial, BT, d);

    linear_backward(a.dbranch, param_at(model, g, P_O_PROJ, l), a.dx, a.y, param_at(model, w, P_O_PROJ, l),
                    BT, d, d);
    output_gate_backward(a.dout, param_at(model, g, P_OUTPUT_NORM, l), proj_column(a.dproj, layout->ogate),
                         a.dbranch, a.o, param_at(model, w, P_OUTPUT_NORM, l), a.o_rstd,
                         proj_column(a.proj, layout->ogate), a.partial, &shape);
    attention_backward(a.dq, a.dk, a.dv, dc, a.dout, a.q, a.k, a.v, a.o, a.lse, c, &shape);
    if (c)
        forget_gate_backward(proj_column(a.dproj, layout->fgate), param_at(model, g, P_FGATE_BIAS, l), dc,
                             proj_column(a.proj, layout->fgate), param_at(model, w, P_FGATE_BIAS, l),
                             a.partial, &shape);
    for (int p = 0; p < 3; p++)
        head_backward(&paths[p], &shape, a.dproj, a.proj, model->angles, a.partial, a.partial + B * d);
    linear_backward(a.dbranch, param_at(model, g, P_Q_PROJ, l), a.dproj, a.attn_in,
                    param_at(model, w, P_Q_PROJ, l), BT, R, d);
    rmsnorm_backward(a.dx, param_at(model, g, P_ATTN_NORM, l), a.dbranch, a.x,
                     param_at(model, w, P_ATTN_NORM, l), a.attn_rstd, a.partial, BT, d);
}

static void model_backward(Model* model, const int32_t* inputs) {
    Activations* a = &model->acts;
    int64_t BT = model->B * model->T, d = model->config.hidden_size;
    memset(a->dx, 0, (size_t)(BT * d) * sizeof(real));
    rmsnorm_backward(a->dx, param_at(model, model->grads, P_NORM, 0), a->dbranch, a->x_last,
                     param_at(model, model->params, P_NORM, 0), a->rstd, a->partial, BT, d);
    for (int64_t l = model->config.num_hidden_layers - 1; l >= 0; l--) block_backward(model, l);
    embedding_backward(param_at(model, model->grads, P_EMBEDDINGS, 0), a->dx, inputs, BT, d);
}

// ----------------------------------------------------------------------------
// update

// The frozen rows' gradients, zeroed: they do not count in the norm.
static void model_freeze(Model* model) {
    for (int r = 0; r < model->table.num_rows; r++) {
        const Param* p = &model->table.rows[r];
        if (!p->trainable) memset(model->grads + p->offset, 0, (size_t)p->count * sizeof(real));
    }
}

static void model_update(Model* model, const AdamWParams* adamw, double grad_scale) {
    for (int r = 0; r < model->table.num_rows; r++) {
        const Param* p = &model->table.rows[r];
        if (!p->trainable) continue;
        AdamWParams of_tensor = *adamw;
        if (!param_decays(p)) of_tensor.weight_decay = 0;
        adamw_update(model->params + p->offset, model->m + p->offset, model->v + p->offset,
                     model->grads + p->offset, p->count, grad_scale, &of_tensor);
    }
}

// ----------------------------------------------------------------------------
// generation: one token at a time, with keys, values and gate sums of the past kept

typedef struct {
    int64_t length, capacity; // tokens held, and room for
    real *k, *v;              // [L, capacity, d] as attention reads them
    double* c;                // [L, capacity, NH]; entries never change, as only differences of c matter
    real* last;               // [L, R] the last token's row of proj, for the shifts
    real* row;                // scratch of one token
} Cache;

static Cache cache_new(const Model* model, int64_t capacity) {
    const Config* config = &model->config;
    int64_t L = config->num_hidden_layers, d = config->hidden_size, NH = config->num_heads;
    int64_t R = model->table.proj.rows, I = config_mlp_size(config);
    Cache cache;
    memset(&cache, 0, sizeof cache);
    cache.capacity = capacity;
    cache.k = (real*)xcalloc((size_t)(L * capacity * d), sizeof(real));
    cache.v = (real*)xcalloc((size_t)(L * capacity * d), sizeof(real));
    cache.c = (double*)xcalloc((size_t)(L * capacity * NH), sizeof(double));
    cache.last = (real*)xcalloc((size_t)(L * R), sizeof(real));
    cache.row = (real*)xcalloc((size_t)(R + 7 * d + 3 * I + NH + capacity * NH), sizeof(real));
    return cache;
}

static void cache_free(Cache* cache) {
    free(cache->k);
    free(cache->v);
    free(cache->c);
    free(cache->last);
    free(cache->row);
    memset(cache, 0, sizeof *cache);
}

// Attention of one query at the end of `length` keys: o [NH, dh]; k, v [length, NH, dh]; c [length, NH] or
// NULL
static void attention_decode(real* o, real* scores, const real* q, const real* k, const real* v,
                             const double* c, int64_t length, int64_t NH, int64_t dh) {
    real scale = (real)(1 / sqrt((double)dh));
#pragma omp parallel for schedule(static) if (length * NH * dh > 65536)
    for (int64_t h = 0; h < NH; h++) {
        real *row = scores + h * length, *out = o + h * dh, highest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < length; j++) {
            row[j] = scale * dot(q + h * dh, k + (j * NH + h) * dh, dh);
            if (c) row[j] += (real)(c[(length - 1) * NH + h] - c[j * NH + h]);
            highest = row[j] > highest ? row[j] : highest;
        }
        memset(out, 0, (size_t)dh * sizeof(real));
        for (int64_t j = 0; j < length; j++) {
            real p = exp_real(row[j] - highest);
            sum += p;
            for (int64_t x = 0; x < dh; x++) out[x] += p * v[(j * NH + h) * dh + x];
        }
        for (int64_t x = 0; x < dh; x++) out[x] /= sum;
    }
}

// Takes one more token in and writes the logits [V] of the one after it: what model_forward computes for the
// same tokens, but for rounding.
static void model_decode(Model* model, Cache* cache, int32_t token, real* logits) {
    const Config* config = &model->config;
    int64_t L = config->num_hidden_layers, d = config->hidden_size, NH = config->num_heads, dh = d / NH;
    int64_t R = model->table.proj.rows, I = config_mlp_size(config), t = cache->length++;
    const ProjLayout* layout = &model->table.proj;
    HeadShape shape = model_head_shape(model, 1, 1);
    HeadPath paths[3];
    real *w = model->params, rstd;
    real *x = cache->row, *normed = x + d, *proj = normed + d, *q = proj + R, *o = q + d, *y = o + d,
         *branch = y + d;
    real *angles = branch + d, *gu = angles + d, *s = gu + 2 * I, *o_rstd = s + I, *scores = o_rstd + NH;
    if (cache->length > cache->capacity) die("the cache of %lld tokens is full", (long long)cache->capacity);
    if (config->use_rope) rope_angles(angles, t, dh, config->rope_base);

    embedding_forward(x, param_at(model, w, P_EMBEDDINGS, 0), &token, 1, d);
    for (int64_t l = 0; l < L; l++) {
        real *l_k = cache->k + l * cache->capacity * d, *l_v = cache->v + l * cache->capacity * d;
        real* l_last = cache->last + l * R;
        double* l_c = config_has_gate(config) ? cache->c + l * cache->capacity * NH : NULL;
        real* const out[3] = {q, l_k + t * d, l_v + t * d};
        model_head_paths(model, l, paths);

        rmsnorm_forward(normed, &rstd, x, param_at(model, w, P_ATTN_NORM, l), 1, d, config->norm_eps);
        linear_forward(proj, normed, param_at(model, w, P_Q_PROJ, l), 1, R, d, false);
        for (int p = 0; p < 3; p++)
            for (int64_t h = 0; h < NH; h++)
                head_forward(&paths[p], &shape, h, out[p] + h * dh, &rstd, proj, t ? l_last : NULL, angles);
        for (int64_t h = 0; l_c && h < NH; h++) {
            real z = layout->fgate < 0 ? 0 : proj[layout->fgate + h];
            real logf = log_sigmoid(z + param_at(model, w, P_FGATE_BIAS, l)[h]);
            l_c[t * NH + h] = (t ? l_c[(t - 1) * NH + h] : 0) + (double)logf;
        }
        attention_decode(o, scores, q, l_k, l_v, l_c, t + 1, NH, dh);
        output_gate_forward(y, o_rstd, o, param_at(model, w, P_OUTPUT_NORM, l),
                            proj_column(proj, layout->ogate), &shape, config->norm_eps);
        linear_forward(branch, y, param_at(model, w, P_O_PROJ, l), 1, d, d, false);
        for (int64_t c = 0; c < d; c++) x[c] += branch[c];
        memcpy(l_last, proj, (size_t)R * sizeof(real));

        rmsnorm_forward(normed, &rstd, x, param_at(model, w, P_MLP_NORM, l), 1, d, config->norm_eps);
        linear_forward(gu, normed, param_at(model, w, P_GATE_PROJ, l), 1, 2 * I, d, false);
        swiglu_forward(s, gu, 1, I);
        linear_forward(branch, s, param_at(model, w, P_DOWN_PROJ, l), 1, d, I, false);
        for (int64_t c = 0; c < d; c++) x[c] += branch[c];
    }
    rmsnorm_forward(normed, &rstd, x, param_at(model, w, P_NORM, 0), 1, d, config->norm_eps);
    linear_forward(logits, normed, param_at(model, w, P_LM_HEAD, 0), 1, config->vocab_size, d, false);
}

// ----------------------------------------------------------------------------
// the trainer: what the run skeleton (llmc/run/train.h) needs of the model
#ifndef TESTING

struct Engine {
    Model model;
    int32_t *inputs, *targets; // [B,T], the loaded batch
    double loss, norm;         // of the step: mean loss, and gradient norm
};

static void print_plan(const Run* run) {
    Activations none;
    int64_t weights = run->table.count * (int64_t)sizeof(real);
    int64_t acts = model_plan_activations(&none, &run->config, &run->table, run->micro_batch,
                                          run->options.seq_len, false);
    const MemoryRow rows[] = {{"weights", weights},
                              {"gradients", weights},
                              {"AdamW's moments", 2 * weights},
                              {"activations", acts}};
    run_print_plan(run, rows, 4);
}

static Engine* engine_open(const Run* run, DeviceInfo* info) {
    int64_t B = run->micro_batch, T = run->options.seq_len;
    Engine* e = (Engine*)xcalloc(1, sizeof *e);
    (void)info; // nothing to say about a CPU
#ifdef USE_OPENBLAS
    openblas_set_num_threads(1); // each of our threads calls it
#endif
    e->model = model_new(&run->config, run->mode != RUN_GENERATE);
    if (run->mode == RUN_GENERATE) return e;
    model_allocate_activations(&e->model, B, T);
    e->inputs = (int32_t*)xcalloc((size_t)(B * T), sizeof(int32_t));
    e->targets = (int32_t*)xcalloc((size_t)(B * T), sizeof(int32_t));
    return e;
}

static void engine_close(Engine* e) {
    model_free(&e->model);
    free(e->inputs);
    free(e->targets);
    free(e);
}

static CheckpointTensors engine_host_open(Engine* e, bool read) {
    CheckpointTensors own = {e->model.params, e->model.m, e->model.v, sizeof(real)};
    (void)read;
    return own;
}
static void engine_host_close(Engine* e, CheckpointTensors* tensors, bool write) {
    (void)e, (void)tensors, (void)write;
}

static void engine_load_batch(Engine* e, DataLoader* data) {
    batch_read(e->inputs, e->targets, data, e->model.B * e->model.T, e->model.config.vocab_size);
}

static void engine_begin_step(Engine* e) {
    memset(e->model.grads, 0, (size_t)e->model.table.count * sizeof(real));
    e->loss = 0;
}

static void engine_add_gradients(Engine* e, int64_t step_tokens) {
    real dloss = (real)(1 / (double)step_tokens);
    model_forward(&e->model, e->inputs);
    e->loss += model_loss(&e->model, e->targets, dloss, true, NULL) / (double)step_tokens;
    model_backward(&e->model, e->inputs);
}

static void engine_update(Engine* e, const AdamWParams* adamw, double grad_clip) {
    model_freeze(&e->model);
    e->norm = global_norm(e->model.grads, e->model.table.count);
    if (isfinite(e->loss) && isfinite(e->norm))
        model_update(&e->model, adamw, clip_scale(e->norm, grad_clip));
}

static bool engine_finish_step(Engine* e, LogStep* line) {
    line->loss = e->loss;
    line->grad_norm = e->norm;
    return isfinite(e->loss) && isfinite(e->norm);
}

static const char* engine_first_not_finite(Engine* e, bool gradients) {
    return params_first_not_finite(&e->model.table, gradients ? e->model.grads : e->model.params,
                                   sizeof(real));
}

static void engine_evaluate(Engine* e, const PassResults* out) {
    Model* model = &e->model;
    int64_t BT = model->B * model->T;
    model_forward(model, e->inputs);
    model_loss(model, e->targets, (real)(1 / (double)BT), out->grads != NULL, (real*)out->logits);
    memcpy(out->losses, model->acts.losses, (size_t)BT * sizeof(real));
    if (!out->grads) return;
    model_backward(model, e->inputs);
    model_freeze(model);
    memcpy(out->grads, model->grads, (size_t)model->table.count * sizeof(real));
}

static double peak_memory_mib(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss / 1024;
}

// Times --bench optimizer steps of one micro-batch each, on random tokens.
static void engine_bench(Engine* e, const Run* run) {
    enum { FORWARD, LOSS, BACKWARD, UPDATE, NUM_PHASES };
    static const char* const names[NUM_PHASES] = {"forward", "lm_head and loss", "backward",
                                                  "norm and AdamW"};
    double seconds[NUM_PHASES] = {0}, total = 0;
    Model* model = &e->model;
    int64_t BT = model->B * model->T, n = run->options.bench;
    engine_load_batch(e, NULL);
    for (int64_t step = 0; step <= n; step++) { // step 0 is warm-up
        AdamWParams adamw = options_adamw(&run->options, 1e-4, step + 1);
        double start[NUM_PHASES + 1];
        engine_begin_step(e);
        start[FORWARD] = seconds_now();
        model_forward(model, e->inputs);
        start[LOSS] = seconds_now();
        model_loss(model, e->targets, (real)(1 / (double)BT), true, NULL);
        start[BACKWARD] = seconds_now();
        model_backward(model, e->inputs);
        start[UPDATE] = seconds_now();
        engine_update(e, &adamw, run->options.grad_clip);
        start[NUM_PHASES] = seconds_now();
        for (int i = 0; step > 0 && i < NUM_PHASES; i++) seconds[i] += start[i + 1] - start[i];
    }
    for (int i = 0; i < NUM_PHASES; i++) total += seconds[i];
    printf("%lld steps of %lld x %lld tokens, %d threads\n", (long long)n, (long long)model->B,
           (long long)model->T, omp_get_max_threads());
    for (int i = 0; i < NUM_PHASES; i++)
        printf("  %-16s %9.2f ms %5.1f%%\n", names[i], 1e3 * seconds[i] / (double)n,
               100 * seconds[i] / total);
    double rate = (double)(n * BT) / total;
    printf("  %-16s %9.2f ms  %.0f tokens/s  %.1f GFLOP/s of the model  peak memory %.0f MiB\n", "step",
           1e3 * total / (double)n, rate, 1e-9 * rate * run_flops_per_token(run), peak_memory_mib());
}

struct DecodeState {
    Cache cache;
    real* logits; // [V]
};

static DecodeState* engine_decode_open(Engine* e, int64_t capacity) {
    DecodeState* state = (DecodeState*)xcalloc(1, sizeof *state);
    state->cache = cache_new(&e->model, capacity);
    state->logits = (real*)xcalloc((size_t)e->model.config.vocab_size, sizeof(real));
    return state;
}

static void engine_decode(Engine* e, DecodeState* state, int32_t token, float* logits) {
    model_decode(&e->model, &state->cache, token, state->logits);
    for (int64_t i = 0; logits && i < e->model.config.vocab_size; i++) logits[i] = (float)state->logits[i];
}

static void engine_decode_close(DecodeState* state) {
    cache_free(&state->cache);
    free(state->logits);
    free(state);
}

static const Trainer trainer = {
    .summary = "Trains the Forgetting Transformer and its Transformer baselines on the CPU.",
    .suggested_tokens = 4096, // enough for large matrix products, and little memory
    .element_bytes = sizeof(real),
    .steps_in_flight = 0,
    .print_plan = print_plan,
    .open = engine_open,
    .close = engine_close,
    .host_open = engine_host_open,
    .host_close = engine_host_close,
    .load_batch = engine_load_batch,
    .begin_step = engine_begin_step,
    .add_gradients = engine_add_gradients,
    .update = engine_update,
    .finish_step = engine_finish_step,
    .first_not_finite = engine_first_not_finite,
    .evaluate = engine_evaluate,
    .bench = engine_bench,
    .decode_open = engine_decode_open,
    .decode = engine_decode,
    .decode_close = engine_decode_close};

int main(int argc, char** argv) { return run_main(argc, argv, &trainer); }

#endif // TESTING
