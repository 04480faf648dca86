/*
Tests llmc/cpu: exp_real against libm, matmul against a naive one, the linear layer.

Built in float and in double. A limit that is no bound on rounding errors has the measured error in a comment.
*/
#include "../../../llmc/cpu/matmul.h"
#include "../reals.h"

// ----------------------------------------------------------------------------
// exp

// In float exp_real is our own: 0 for x < -60, which avoids denormals. In double it is libm's exp.
static void check_exp(void) {
#ifndef REAL_IS_DOUBLE
    double worst = 0;
    float worst_at = 0;
    for (double x = -60; x <= 88; x += 1.0 / 8192 + 1e-7) {
        double expected = exp((double)(float)x), got = (double)exp_real((float)x);
        double error = fabs(got - expected) / ldexp(1, ilogb(expected) - 23);
        if (!(error <= worst) && !isnan(worst)) worst = error, worst_at = (float)x;
    }
    // over all floats: 0.94 with fused multiply-adds, 1.22 without
    CHECK(worst <= 1.25, "exp_real(%.9g) is off by %.3f ulp", (double)worst_at, worst);
#endif
    for (int i = 1; i < 40; i++) {
        double x = ldexp(1, -i);
        CHECK(fabs((double)exp_real((real)x) / exp(x) - 1) <= 2 * EPSILON, "exp(%g)", x);
        CHECK(fabs((double)exp_real((real)-x) / exp(-x) - 1) <= 2 * EPSILON, "exp(%g)", -x);
    }
    CHECK(exp_real(0) == 1 && exp_real((real)-0.0) == 1, "exp(0)");
    CHECK(exp_real((real)-61) == PICK(0, exp(-61)) && exp_real((real)-86) == PICK(0, exp(-86)),
          "below e^-60");
    CHECK(exp_real((real)-800) == 0 && exp_real((real)-1e30) == 0 && exp_real(-INFINITY) == 0, "underflow");
    CHECK(isinf(exp_real((real)800)) && isinf(exp_real((real)1e30)) && isinf(exp_real(INFINITY)), "overflow");
    CHECK(isnan(exp_real(NAN)) && isnan(exp_real(-NAN)), "NaN");
    CHECK(sigmoid(-1000) == 0 && sigmoid(1000) == 1 && sigmoid(0) == (real)0.5, "sigmoid");
    CHECK(log_sigmoid(-1000) == -1000 && log_sigmoid(1000) == 0, "log_sigmoid");
    CHECK(isnan(sigmoid(NAN)) && isnan(log_sigmoid(NAN)), "sigmoid of NaN");
}

// ----------------------------------------------------------------------------
// GEMM

// A row-major or column-major matrix [rows, cols] surrounded by NaNs, so that an out-of-bounds read makes the
// result NaN.
typedef struct {
    real* buffer;
    View view;
} Matrix;

static Matrix new_matrix(int64_t rows, int64_t cols, bool column_major, uint64_t stream) {
    enum { BORDER = 3 };
    Matrix m;
    int64_t stride = (column_major ? rows : cols) + BORDER, lines = (column_major ? cols : rows) + 1;
    m.buffer = new_reals(lines * stride);
    m.view = column_major ? transpose_of(m.buffer + BORDER, stride) : rows_of(m.buffer + BORDER, stride);
    fill(m.buffer, lines * stride, NAN);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            m.buffer[BORDER + i * m.view.row + j * m.view.col] =
                (real)random_normal(5, stream, (uint64_t)(i * cols + j));
    return m;
}

static double element(View v, int64_t i, int64_t j) { return (double)v.at[i * v.row + j * v.col]; }

typedef void Matmul(real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K, bool add);

// Is out [M,N], of row stride `stride`, equal to a b, or to a b + 1 with `add`? The limit bounds the rounding
// error of sums in any order.
static bool is_product(const real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K,
                       bool add) {
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            double sum = add, size = add;
            for (int64_t k = 0; k < K; k++) {
                double term = element(a, i, k) * element(b, k, j);
                sum += term, size += fabs(term);
            }
            if (!(fabs((double)out[i * stride + j] - sum) <= (double)(K + 1) * EPSILON * size)) return false;
        }
    return true;
}

static bool product_is_right(Matmul* product, View a, View b, int64_t M, int64_t N, int64_t K, bool add) {
    enum { GAP = 5 };
    int64_t stride = N + GAP;
    real* out = new_reals(M * stride);
    for (int64_t i = 0; i < M; i++) {
        fill(out + i * stride, N, add ? 1 : NAN);
        fill(out + i * stride + N, GAP, 7);
    }
    product(out, stride, a, b, M, N, K, add);
    bool right = is_product(out, stride, a, b, M, N, K, add);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = N; j < stride; j++) right = right && out[i * stride + j] == 7;
    free(out);
    return right;
}

// Sizes around every block size. Layouts and accumulation alternate from size to size.
static void check_matmul(void) {
    const int64_t Ms[] = {1, MR - 1, MR + 1, MC - 1, MC, MC + 1, 2 * MC + 3};
    const int64_t Ns[] = {1, NR - 1, NR, NR + 1, NC_IN_PLACE, NC, NC + 1};
    const int64_t Ks[] = {1, 2, KC - 1, KC, KC + 1};
    unsigned turn = 0;
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 7; j++)
            for (int k = 0; k < 5; k++, turn++) {
                int64_t M = Ms[i], N = Ns[j], K = Ks[k];
                if (M * N * K > 2000000) continue; // smaller products have the same edges
                bool a_columns = turn & 1, b_columns = turn >> 1 & 1, add = turn >> 2 & 1;
                Matrix a = new_matrix(M, K, a_columns, 0), b = new_matrix(K, N, b_columns, 1);
                CHECK(product_is_right(matmul, a.view, b.view, M, N, K, add),
                      "matmul %lld x %lld x %lld, layouts %d %d, add %d", (long long)M, (long long)N,
                      (long long)K, a_columns, b_columns, add);
                CHECK(product_is_right(matmul_serial, a.view, b.view, M, N, K, add),
                      "matmul_serial %lld x %lld x %lld, layouts %d %d, add %d", (long long)M, (long long)N,
                      (long long)K, a_columns, b_columns, add);
                free(a.buffer);
                free(b.buffer);
            }
}

// Includes sizes of 1, for which strides are ambiguous, and single rows, which use the code path of decoding.
static void check_linear(void) {
    const int64_t sizes[][3] = {{1, 1, 1}, {1, 5, 1}, {1, 1, 5}, {1, 7, 9},   {1, 300, 301},
                                {6, 1, 1}, {6, 5, 1}, {6, 1, 5}, {130, 5, 1}, {130, 40, 30}};
    for (int i = 0; i < (int)(sizeof sizes / sizeof sizes[0]); i++) {
        int64_t rows = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
        real *x = random_reals(rows * K, 0), *w = random_reals(N * K, 1), *dout = random_reals(rows * N, 2);
        real *out = new_reals(rows * N), *dx = new_reals(rows * K), *dw = new_reals(N * K),
             *ones = new_reals(rows * N);
        View vx = rows_of(x, K), vw = rows_of(w, K), vdout = rows_of(dout, N);
        Linear linear = {w, dw, rows, N, K};
        fill(dw, N * K, 1);
        fill(ones, rows * N, 1);
        linear_forward(out, x, NULL, &linear);
        linear_backward(dx, dout, x, &linear);
        long long r = rows, n = N, k = K;
        CHECK(is_product(out, N, vx, transpose_of(w, K), rows, N, K, false), "out, %lld %lld %lld", r, n, k);
        CHECK(is_product(dx, K, vdout, vw, rows, K, N, false), "dx, %lld %lld %lld", r, n, k);
        CHECK(is_product(dw, K, transpose_of(dout, N), vx, N, K, rows, true), "dw, %lld %lld %lld", r, n, k);
        linear_forward(out, x, ones, &linear);
        CHECK(is_product(out, N, vx, transpose_of(w, K), rows, N, K, true), "residual, %lld %lld %lld", r, n,
              k);
        linear_forward(ones, x, ones, &linear);
        CHECK(same_bits(ones, out, rows * N), "residual in place, %lld %lld %lld", r, n, k);
        free(x), free(w), free(dout), free(out), free(dx), free(dw), free(ones);
    }
}

// A row's bits are the same whatever the number of rows: GEMMs of few rows sum in the order of tiled ones.
static void check_rows(void) {
    const int64_t sizes[][2] = {{1, 1}, {17, 3}, {64, 256}, {50, 257}, {33, 700}, {97, 512}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        enum { ROWS = 40 };
        int64_t N = sizes[i][0], K = sizes[i][1];
        real *w = random_reals(N * K, 7), *x = random_reals(ROWS * K, 8),
             *residual = random_reals(ROWS * N, 9), *all = new_reals(ROWS * N), *out = new_reals(ROWS * N);
        for (int with = 0; with < 2; with++) {
            Linear linear = {w, NULL, ROWS, N, K};
            linear_forward(all, x, with ? residual : NULL, &linear);
            for (linear.rows = 1; linear.rows <= 2 * FEW_ROWS; linear.rows++) {
                linear_forward(out, x, with ? residual : NULL, &linear);
                CHECK(same_bits(out, all, linear.rows * N), "%lld rows of %lld x %lld",
                      (long long)linear.rows, (long long)N, (long long)K);
            }
        }
        free(w), free(x), free(residual), free(all), free(out);
    }
}

int main(void) {
    check_exp();
    check_matmul();
    check_linear();
    check_rows();
    return test_report();
}
