/*
Tests of train_fox.c that need no other implementation to compare with: what must hold between its own
functions (generation and training, one and many threads, one batch and two halves), matrix products against a
naive one, and attention where the answer is known.

Built twice, in float and in double. Where a limit is not a bound that holds for any rounding, the error that
was measured stands beside it.
*/
#define TESTING
#pragma GCC diagnostic ignored "-Wunused-function" // of the trainer
#include "../../../train_fox.c"
#include <float.h>
#include "../check.h"
#include "variants.h"

#ifdef REAL_IS_DOUBLE
#define EPSILON                   DBL_EPSILON
#define PICK(of_float, of_double) (of_double)
#else
#define EPSILON                   FLT_EPSILON
#define PICK(of_float, of_double) (of_float)
#endif

static real* new_reals(int64_t n) { return (real*)xcalloc((size_t)n, sizeof(real)); }

static real* random_reals(int64_t n, uint64_t stream) {
    real* x = new_reals(n);
    for (int64_t i = 0; i < n; i++) x[i] = (real)random_normal(3, stream, (uint64_t)i);
    return x;
}

static real* copy_reals(const real* x, int64_t n) {
    return (real*)memcpy(new_reals(n), x, (size_t)n * sizeof(real));
}

static void fill(real* x, int64_t n, real value) {
    for (int64_t i = 0; i < n; i++) x[i] = value;
}

static bool same_bits(const real* a, const real* b, int64_t n) {
    return memcmp(a, b, (size_t)n * sizeof(real)) == 0;
}

static bool all_zero(const real* x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != 0) return false;
    return true;
}

// ||a - b|| / ||b||
static double relative_error(const real* a, const real* b, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return sqrt(difference / norm);
}

// ----------------------------------------------------------------------------
// exp

// In float exp_real is our own, and 0 below e^-60; in double it is libm's.
static void check_exp(void) {
#ifndef REAL_IS_DOUBLE
    double worst = 0;
    float worst_at = 0;
    for (double x = -60; x <= 88; x += 1.0 / 8192 + 1e-7) {
        double expected = exp((double)(float)x), got = (double)exp_real((float)x);
        double error = fabs(got - expected) / ldexp(1, ilogb(expected) - 23);
        if (!(error <= worst)) worst = error, worst_at = (float)x;
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
// matrix products

// A rows x cols matrix inside NaNs, stored by rows or by columns: whoever reads outside of it shows.
typedef struct {
    real* buffer;
    View view;
} Matrix;

static Matrix new_matrix(int64_t rows, int64_t cols, bool by_columns, uint64_t stream) {
    enum { BORDER = 3 };
    Matrix m;
    int64_t stride = (by_columns ? rows : cols) + BORDER, lines = (by_columns ? cols : rows) + 1;
    m.buffer = new_reals(lines * stride);
    m.view = by_columns ? transpose_of(m.buffer + BORDER, stride) : rows_of(m.buffer + BORDER, stride);
    fill(m.buffer, lines * stride, NAN);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            m.buffer[BORDER + i * m.view.row + j * m.view.col] =
                (real)random_normal(5, stream, (uint64_t)(i * cols + j));
    return m;
}

static double element(View v, int64_t i, int64_t j) { return (double)v.at[i * v.row + j * v.col]; }

typedef void Product(real* out, int64_t stride, View a, View b, int64_t M, int64_t N, int64_t K, bool add);

// Does out[M,N], whose rows lie `stride` apart, hold the product of a and b, or its sum with 1? The limit
// holds for sums in any order.
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

static bool product_is_right(Product* product, View a, View b, int64_t M, int64_t N, int64_t K, bool add) {
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

// Sizes around the edges of every block; layouts and accumulation take turns.
static void check_matmul(void) {
    const int64_t Ms[] = {1, MR - 1, MR + 1, MC - 1, MC, MC + 1, 2 * MC + 3};
    const int64_t Ns[] = {1, NR - 1, NR, NR + 1, NC, NC + 1};
    const int64_t Ks[] = {1, 2, KC - 1, KC, KC + 1};
    unsigned turn = 0;
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 6; j++)
            for (int k = 0; k < 5; k++, turn++) {
                int64_t M = Ms[i], N = Ns[j], K = Ks[k];
                if (M * N * K > 2000000) continue; // both are past an edge elsewhere
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

// Sizes of 1 leave a matrix without a stride of its own; one row takes the path of generation.
static void check_linear(void) {
    const int64_t sizes[][3] = {{1, 1, 1}, {1, 5, 1}, {1, 1, 5}, {1, 7, 9},   {1, 300, 301},
                                {6, 1, 1}, {6, 5, 1}, {6, 1, 5}, {130, 5, 1}, {130, 40, 30}};
    for (int i = 0; i < (int)(sizeof sizes / sizeof sizes[0]); i++) {
        int64_t rows = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
        real *x = random_reals(rows * K, 0), *w = random_reals(N * K, 1), *dout = random_reals(rows * N, 2);
        real *out = new_reals(rows * N), *dx = new_reals(rows * K), *dw = new_reals(N * K);
        View vx = rows_of(x, K), vw = rows_of(w, K), vdout = rows_of(dout, N);
        fill(dw, N * K, 1);
        linear_forward(out, x, w, rows, N, K, false);
        linear_backward(dx, dw, dout, x, w, rows, N, K);
        long long r = rows, n = N, k = K;
        CHECK(is_product(out, N, vx, transpose_of(w, K), rows, N, K, false), "out, %lld %lld %lld", r, n, k);
        CHECK(is_product(dx, K, vdout, vw, rows, K, N, false), "dx, %lld %lld %lld", r, n, k);
        CHECK(is_product(dw, K, transpose_of(dout, N), vx, N, K, rows, true), "dw, %lld %lld %lld", r, n, k);
        fill(out, rows * N, 1);
        linear_forward(out, x, w, rows, N, K, true);
        CHECK(is_product(out, N, vx, transpose_of(w, K), rows, N, K, true), "add, %lld %lld %lld", r, n, k);
        free(x), free(w), free(dout), free(out), free(dx), free(dw);
    }
}

// ----------------------------------------------------------------------------
// attention alone

typedef struct {
    HeadShape shape;
    int64_t n, gates; // elements of q, and of c
    real *q, *k, *v, *dout, *o, *lse, *dq, *dk, *dv;
    double *c, *dc;
} Attention;

// Random queries, keys, values and output gradients; no gate yet: c is 0.
static Attention new_attention(int64_t B, int64_t T) {
    Attention a;
    memset(&a, 0, sizeof a);
    a.shape.B = B, a.shape.T = T, a.shape.NH = 2, a.shape.dh = 4;
    a.gates = a.shape.B * a.shape.NH * T, a.n = a.gates * a.shape.dh;
    a.q = random_reals(a.n, 0), a.k = random_reals(a.n, 1), a.v = random_reals(a.n, 2);
    a.dout = random_reals(a.n, 3);
    a.o = new_reals(a.n), a.lse = new_reals(a.gates);
    a.dq = new_reals(a.n), a.dk = new_reals(a.n), a.dv = new_reals(a.n);
    a.c = (double*)xcalloc((size_t)a.gates, sizeof(double));
    a.dc = (double*)xcalloc((size_t)a.gates, sizeof(double));
    return a;
}

static void free_attention(Attention* a) {
    free(a->q), free(a->k), free(a->v), free(a->dout), free(a->o), free(a->lse);
    free(a->dq), free(a->dk), free(a->dv), free(a->c), free(a->dc);
}

// log forget gates: `at_reset` at token `reset`, `elsewhere` at the others
static void set_gates(Attention* a, double elsewhere, int64_t reset, double at_reset) {
    for (int64_t i = 0; i < a->gates; i++) {
        int64_t t = i % a->shape.T;
        a->c[i] = (t ? a->c[i - 1] : 0) + (t == reset ? at_reset : elsewhere);
    }
}

static void run_attention(Attention* a, bool gated) {
    attention_forward(a->o, a->lse, a->q, a->k, a->v, gated ? a->c : NULL, &a->shape);
    attention_backward(a->dq, a->dk, a->dv, gated ? a->dc : NULL, a->dout, a->q, a->k, a->v, a->o, a->lse,
                       gated ? a->c : NULL, &a->shape);
}

static void check_same_attention(const Attention* a, const Attention* b, const char* what) {
    CHECK(same_bits(a->o, b->o, a->n) && same_bits(a->lse, b->lse, a->gates), "%s: forward", what);
    CHECK(same_bits(a->dq, b->dq, a->n) && same_bits(a->dk, b->dk, a->n) && same_bits(a->dv, b->dv, a->n),
          "%s: backward", what);
}

// The first element of token t, head 0, batch 0 in q, k, v or o
static int64_t token_at(const Attention* a, int64_t t) { return t * a->shape.NH * a->shape.dh; }

static void check_gates(void) {
    const int64_t T = 2 * TILE + 17;
    Attention a = new_attention(2, T), b = new_attention(2, T);
    run_attention(&a, false);
    run_attention(&b, true); // f = 1
    check_same_attention(&a, &b, "a gate that keeps everything");

    // Only differences of c count. These are exact in binary, so that not a bit may change.
    set_gates(&a, -1.0 / 64, -1, 0);
    memcpy(b.c, a.c, (size_t)a.gates * sizeof(double));
    for (int64_t i = 0; i < b.gates; i++) b.c[i] += 4096;
    run_attention(&a, true);
    run_attention(&b, true);
    check_same_attention(&a, &b, "a constant added to c");
    CHECK(memcmp(a.dc, b.dc, (size_t)a.gates * sizeof(double)) == 0, "a constant added to c: dc");

    set_gates(&a, -1000, -1, 0);
    run_attention(&a, true);
    CHECK(same_bits(a.o, a.v, a.n), "a gate that forgets everything leaves a token its own value");
    CHECK(same_bits(a.dv, a.dout, a.n), "and hands its gradient to that value");
    free_attention(&a);
    free_attention(&b);
}

// A forget gate of 0 where a document begins: nothing crosses, forward or backward.
static void check_reset(int64_t reset) {
    const int64_t T = 2 * TILE + 17;
    Attention a = new_attention(2, T), b = new_attention(2, T);
    int64_t d = a.shape.NH * a.shape.dh, from = token_at(&a, reset), rest = (T - reset) * d;
    set_gates(&a, -0.01, reset, -1000);
    set_gates(&b, -0.01, reset, -1000);
    for (int64_t i = 0; i < from; i++) { // batch 0's earlier tokens differ, and get no gradient of their own
        b.q[i] += 1, b.k[i] -= 2, b.v[i] += 3;
        a.dout[i] = 0;
    }
    run_attention(&a, true);
    run_attention(&b, true);
    CHECK(same_bits(a.o + from, b.o + from, rest), "tokens before %lld reach later outputs",
          (long long)reset);
    CHECK(!same_bits(a.o, b.o, from), "the earlier outputs should differ");
    CHECK(same_bits(a.dq + from, b.dq + from, rest) && same_bits(a.dk + from, b.dk + from, rest) &&
              same_bits(a.dv + from, b.dv + from, rest),
          "tokens before %lld reach later gradients", (long long)reset);
    CHECK(all_zero(a.dq, from) && all_zero(a.dk, from) && all_zero(a.dv, from),
          "later tokens reach the gradients of those before %lld", (long long)reset);
    bool no_dc = true;
    for (int64_t t = 0; t < reset; t++) no_dc = no_dc && a.dc[t] == 0;
    CHECK(no_dc, "later tokens reach the gates before %lld", (long long)reset);
    free_attention(&a);
    free_attention(&b);
}

// After 8000 tokens with gates of e^-20 c is at -1.6e5: the end of the sequence, which remembers only itself,
// must be what it is as a sequence of its own. Were c a float, its last digit would be 1/64.
static void check_long(void) {
    const int64_t T = 8192, tail = 64;
    Attention a = new_attention(1, T), b = new_attention(1, tail);
    int64_t from = token_at(&a, T - tail), rest = b.n;
    memcpy(b.q, a.q + from, (size_t)rest * sizeof(real));
    memcpy(b.k, a.k + from, (size_t)rest * sizeof(real));
    memcpy(b.v, a.v + from, (size_t)rest * sizeof(real));
    set_gates(&b, -0.1, -1, 0);
    for (int64_t i = 0; i < a.gates; i++) {
        int64_t t = i % T;
        a.c[i] = (t ? a.c[i - 1] : 0) + (t < T - tail ? -20.1 : t == T - tail ? -1000 : -0.1);
    }
    attention_forward(a.o, a.lse, a.q, a.k, a.v, a.c, &a.shape);
    attention_forward(b.o, b.lse, b.q, b.k, b.v, b.c, &b.shape);
    double error = relative_error(a.o + from, b.o, rest);
    CHECK(error <= PICK(1e-6, 1e-9), "the end of a long sequence is off by %.2e", error); // 0, 2e-11
    free_attention(&a);
    free_attention(&b);
}

// ----------------------------------------------------------------------------
// classifier, global norm, AdamW

static void check_classifier(void) {
    enum { V = 19 };
    real logits[3 * V], losses[3];
    const int32_t targets[3] = {0, 1, 2};
    for (int i = 0; i < 3 * V; i++) logits[i] = i % V == 0 ? (real)1e4 : (real)-1e4;
    fill(logits + 2 * V, V, (real)1e4); // the last row is level
    real* before = copy_reals(logits, 3 * V);
    classifier(losses, logits, targets, 3, V, 1, false);
    CHECK(same_bits(logits, before, 3 * V), "without training the logits stay");
    CHECK(losses[0] == 0 && losses[1] == (real)2e4, "losses are %g and %g", (double)losses[0],
          (double)losses[1]);
    CHECK(fabs((double)losses[2] - log(V)) <= 4 * EPSILON, "level logits cost %g", (double)losses[2]);
    classifier(losses, logits, targets, 3, V, (real)0.5, true);
    CHECK(losses[1] == (real)2e4, "in training the loss is %g", (double)losses[1]);
    for (int i = 0; i < 3 * V; i++) {
        int t = i / V, k = i % V;
        double p = t == 2 ? 1.0 / V : k == 0, expected = 0.5 * (p - (k == t));
        CHECK(fabs((double)logits[i] - expected) <= EPSILON, "gradient %d of row %d is %g", k, t,
              (double)logits[i]);
    }
    free(before);
}

static void check_global_norm(void) {
    const int64_t counts[] = {1, 7, 65535, 65536, 65537, 3 * 65536 + 11};
    real* x = random_reals(counts[5], 0);
    for (int i = 0; i < 6; i++) {
        double sum = 0;
        for (int64_t k = 0; k < counts[i]; k++) sum += (double)x[k] * (double)x[k];
        double norm = global_norm(x, counts[i]);
        CHECK(fabs(norm / sqrt(sum) - 1) <= 1e-10, "norm of %lld is %.17g", (long long)counts[i], norm);
    }
    x[12345] = NAN;
    CHECK(isnan(global_norm(x, counts[5])), "a NaN must show");
    free(x);
}

static void check_adamw(void) {
    enum { N = 1003 };
    const double scale = 0.7;
    AdamWParams p = {3e-3, 0.9, 0.95, 1e-8, 0.1, 0};
    real *w = random_reals(N, 0), *m = new_reals(N), *v = new_reals(N);
    double w2[N], m2[N] = {0}, v2[N] = {0}, worst = 0;
    for (int i = 0; i < N; i++) w2[i] = (double)w[i];
    for (int step = 1; step <= 5; step++) {
        real* g = random_reals(N, (uint64_t)step);
        g[0] = 0; // no gradient at all: only decay
        p.step = step;
        adamw_update(w, m, v, g, N, scale, &p);
        for (int i = 0; i < N; i++) {
            double gradient = scale * (double)g[i];
            m2[i] += (1 - p.beta1) * (gradient - m2[i]);
            v2[i] += (1 - p.beta2) * (gradient * gradient - v2[i]);
            double mhat = m2[i] / (1 - pow(p.beta1, step)), vhat = v2[i] / (1 - pow(p.beta2, step));
            w2[i] -= p.lr * (mhat / (sqrt(vhat) + p.eps) + p.weight_decay * w2[i]);
        }
        free(g);
    }
    for (int i = 0; i < N; i++) {
        double size = fabs(w2[i]) + p.lr;
        worst = fmax(worst, fabs((double)w[i] - w2[i]) / size);
        CHECK(fabs((double)m[i] - m2[i]) <= 8 * EPSILON && fabs((double)v[i] - v2[i]) <= 8 * EPSILON,
              "moments of element %d are %g and %g", i, (double)m[i], (double)v[i]);
    }
    CHECK(worst <= 8 * EPSILON, "a weight is off by %.2e of its size", worst);
    free(w), free(m), free(v);
}

// ----------------------------------------------------------------------------
// the whole model

// One forward and backward pass of the mean loss; adds to the gradients. Returns the sum of losses.
static double pass(Model* model, const int32_t* inputs, const int32_t* targets, int64_t mean_over,
                   real* logits) {
    model_forward(model, inputs);
    double loss = model_loss(model, targets, (real)(1 / (double)mean_over), true, logits);
    model_backward(model, inputs);
    return loss;
}

// Generation, a token at a time, must see the logits that the forward pass sees.
static double decode_error(const Variant* variant) {
    int64_t T = variant->T;
    Model model = variant_model(variant->name, 1, T);
    int64_t V = model.config.vocab_size;
    int32_t* tokens = random_tokens(&model, T, 0);
    real *expected = new_reals(T * V), *got = new_reals(T * V);
    model_forward(&model, tokens);
    model_loss(&model, tokens, 0, false, expected);
    Cache cache = cache_new(&model, T);
    for (int64_t t = 0; t < T; t++) model_decode(&model, &cache, tokens[t], got + t * V);
    double error = relative_error(got, expected, T * V);
    CHECK(error <= PICK(1e-5, 1e-13), "%s: generation is off by %.2e", variant->name, error);
    cache_free(&cache);
    free(tokens), free(expected), free(got);
    model_free(&model);
    return error;
}

static void check_decode(void) {
    double worst = 0;
    for (int i = 0; i < NUM_VARIANTS; i++) worst = fmax(worst, decode_error(&variants[i]));
    printf("generation against the forward pass: worst error %.1e\n", worst); // 1e-6, 1e-15
}

// Sizes with several blocks of every matrix product, several attention tiles and no round number.
static const char wide[] = "fox-pro hidden_size=78 num_heads=3 vocab_size=401 intermediate_size=301";

static void check_threads(void) {
    const int64_t B = 2, T = 139;
    Options o;
    options_defaults(&o);
    real* weights[4] = {NULL};
    real* grads[4] = {NULL};
    double losses[4];
    int64_t count = 0;
    const int usual = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        Model model = variant_model(wide, B, T);
        int32_t *inputs = random_tokens(&model, B * T, 0), *targets = random_tokens(&model, B * T, 1);
        count = model.table.count;
        for (int step = 1; step <= 2; step++) {
            memset(model.grads, 0, (size_t)count * sizeof(real));
            losses[threads] = pass(&model, inputs, targets, B * T, NULL);
            double norm = global_norm(model.grads, count);
            AdamWParams adamw = options_adamw(&o, 1e-3, step);
            model_update(&model, &adamw, 1 / norm);
        }
        weights[threads] = copy_reals(model.params, count);
        grads[threads] = copy_reals(model.grads, count);
        free(inputs), free(targets);
        model_free(&model);
    }
    omp_set_num_threads(usual);
    for (int threads = 2; threads <= 3; threads++) {
        CHECK(memcmp(&losses[1], &losses[threads], sizeof(double)) == 0, "loss on %d threads", threads);
        CHECK(same_bits(grads[1], grads[threads], count), "gradients on %d threads", threads);
        CHECK(same_bits(weights[1], weights[threads], count), "weights on %d threads", threads);
    }
    for (int threads = 1; threads <= 3; threads++) free(weights[threads]), free(grads[threads]);
}

// Other tokens later in a sequence, or in another sequence, change no bit of what came before.
static void check_causality(const char* name) {
    const int64_t T = TILE + 22, B = 2, first_changed = TILE + 3;
    Model model = variant_model(name, B, T);
    int64_t V = model.config.vocab_size;
    int32_t* tokens = random_tokens(&model, B * T, 0);
    real *before = new_reals(B * T * V), *after = new_reals(B * T * V);
    model_forward(&model, tokens);
    model_loss(&model, tokens, 0, false, before);
    for (int64_t t = first_changed; t < B * T; t++) tokens[t] = (int32_t)((tokens[t] + 1) % V);
    model_forward(&model, tokens);
    model_loss(&model, tokens, 0, false, after);
    CHECK(same_bits(before, after, first_changed * V), "%s: a later token reaches earlier logits", name);
    for (int64_t t = first_changed; t < B * T; t++)
        CHECK(!same_bits(before + t * V, after + t * V, V), "%s: token %lld should differ", name,
              (long long)t);
    free(tokens), free(before), free(after);
    model_free(&model);
}

// Two passes over one sequence each add up to one pass over both.
static void check_accumulation(const char* name, int64_t T) {
    Model both = variant_model(name, 2, T), one = variant_model(name, 1, T);
    int32_t *inputs = random_tokens(&both, 2 * T, 0), *targets = random_tokens(&both, 2 * T, 1);
    double loss = pass(&both, inputs, targets, 2 * T, NULL);
    double halves =
        pass(&one, inputs, targets, 2 * T, NULL) + pass(&one, inputs + T, targets + T, 2 * T, NULL);
    CHECK(fabs(halves / loss - 1) <= 4 * EPSILON, "losses are %.17g and %.17g", halves, loss);
    for (int r = 0; r < both.table.num_rows; r++) {
        const Param* p = &both.table.rows[r];
        double error = relative_error(one.grads + p->offset, both.grads + p->offset, p->count);
        CHECK(error <= PICK(3e-6, 3e-15), "%s is off by %.2e", p->name, error); // 7e-7, 8e-16
    }
    free(inputs), free(targets);
    model_free(&both);
    model_free(&one);
}

// Activations grow with T, not with its square: a long sequence fits, and trains.
static void check_memory(void) {
    Config c = variant_config("fox-pro hidden_size=4");
    ParamTable table = params_build(&c);
    int64_t bytes[3];
    for (int i = 0; i < 3; i++)
        bytes[i] = model_plan_activations(NULL, &c, &table, 1, (int64_t)4096 << i, false);
    CHECK(bytes[2] - bytes[1] == 2 * (bytes[1] - bytes[0]), "not linear in T");
    CHECK(bytes[1] <= 2 * bytes[0], "%lld bytes at T 4096, %lld at 8192", (long long)bytes[0],
          (long long)bytes[1]);
    params_free(&table);

    const int64_t T = 8192;
    Model model = variant_model("fox-pro hidden_size=4 num_heads=1 num_hidden_layers=1", 1, T);
    int32_t *inputs = random_tokens(&model, T, 0), *targets = random_tokens(&model, T, 1);
    double loss = pass(&model, inputs, targets, T, NULL);
    CHECK(isfinite(loss) && !params_first_not_finite(&model.table, model.grads, sizeof(real)),
          "a long sequence is not finite");
    free(inputs), free(targets);
    model_free(&model);
}

// ----------------------------------------------------------------------------
// initial weights

static void check_initial_matrix(const Model* model, const Param* p) {
    const real* w = model->params + p->offset;
    double sum = 0, squares = 0, n = (double)p->count, sigma = model->config.initializer_range;
    for (int64_t i = 0; i < p->count; i++) sum += (double)w[i], squares += (double)w[i] * (double)w[i];
    double mean = sum / n, deviation = sqrt(squares / n);
    CHECK(fabs(mean) <= 5 * sigma / sqrt(n), "%s has mean %g", p->name, mean);
    CHECK(fabs(deviation - sigma) <= 5 * sigma / sqrt(2 * n), "%s has deviation %g", p->name, deviation);
}

static void check_initial_weights(void) {
    Config c = variant_config(wide);
    c.fgate_bias_init = true;
    Model a = model_new(&c, false), b = model_new(&c, false), other = model_new(&c, false);
    int64_t count = a.table.count;
    draw_weights(a.params, sizeof(real), &a.table, &a.config, 1);
    draw_weights(b.params, sizeof(real), &b.table, &b.config, 1);
    draw_weights(other.params, sizeof(real), &other.table, &other.config, 2);
    CHECK(same_bits(a.params, b.params, count), "the same seed must give the same weights");
    for (int r = 0; r < a.table.num_rows; r++) {
        const Param *p = &a.table.rows[r], *next = r + 1 < a.table.num_rows ? p + 1 : p - 1;
        const real* w = a.params + p->offset;
        if (p->init == INIT_NORMAL) {
            check_initial_matrix(&a, p);
            CHECK(!same_bits(w, other.params + p->offset, p->count), "%s is the same for seed 2", p->name);
            CHECK(!same_bits(w, a.params + next->offset, min64(p->count, next->count)), "%s and %s are equal",
                  p->name, next->name);
        }
        for (int64_t i = 0; p->init == INIT_ONE && i < p->count; i++) CHECK(w[i] == 1, "%s", p->name);
        for (int64_t i = 0; p->kind == P_FGATE_BIAS && i < p->count; i++) {
            double T_i = i == 0 ? 2 : i == 1 ? sqrt(2.0 * 256) : 256; // of three heads
            CHECK(fabs((double)log_sigmoid(w[i]) * T_i + 1) <= 8 * EPSILON, "head %lld forgets in %g tokens",
                  (long long)i, -1 / (double)log_sigmoid(w[i]));
        }
    }
    model_free(&a), model_free(&b), model_free(&other);

    c.fgate_bias_init = false;
    a = model_new(&c, false);
    draw_weights(a.params, sizeof(real), &a.table, &a.config, 1);
    CHECK(all_zero(param_at(&a, a.params, P_FGATE_BIAS, 1), c.num_heads), "gate biases start at 0");
    model_free(&a);
}

int main(void) {
    check_exp();
    check_matmul();
    check_linear();
    check_gates();
    check_reset(1);
    check_reset(TILE);
    check_reset(TILE + 70);
    check_long();
    check_classifier();
    check_global_norm();
    check_adamw();
    check_threads();
    omp_set_num_threads(1); // waking threads would take longer than the small models of the rest
    check_decode();
    check_causality("fox-pro");
    check_causality("transformer-llama");
    check_accumulation("fox-pro", 150);
    check_accumulation("fox-llama vocab_size=70000 hidden_size=4", 50); // logits in two chunks, against one
    check_memory();
    check_initial_weights();
    return test_report();
}
