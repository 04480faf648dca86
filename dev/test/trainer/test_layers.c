/*
Tests single layers of train_fox.c against known results: attention with gates that keep or forget everything,
classifier, global norm, AdamW.

Built in float and in double. A limit that is no bound on rounding errors has the measured errors (float,
double) in a comment.
*/
#include "trainer.h"
#include "../reals.h"

// ----------------------------------------------------------------------------
// attention alone

typedef struct {
    HeadShape shape;
    int64_t n, gates; // elements of q, and of cum_logf
    real *q, *k, *v, *dout, *o, *lse, *dq, *dk, *dv;
    double *cum_logf, *dcum_logf;
} Attention;

// Random q, k, v and dout. All gates are 1: cum_logf is 0.
static Attention new_attention(int64_t B, int64_t T) {
    Attention a;
    memset(&a, 0, sizeof a);
    a.shape.B = B, a.shape.T = T, a.shape.NH = 2, a.shape.dh = 4;
    a.gates = a.shape.B * a.shape.NH * T, a.n = a.gates * a.shape.dh;
    a.q = random_reals(a.n, 0), a.k = random_reals(a.n, 1), a.v = random_reals(a.n, 2);
    a.dout = random_reals(a.n, 3);
    a.o = new_reals(a.n), a.lse = new_reals(a.gates);
    a.dq = new_reals(a.n), a.dk = new_reals(a.n), a.dv = new_reals(a.n);
    a.cum_logf = (double*)xcalloc((size_t)a.gates, sizeof(double));
    a.dcum_logf = (double*)xcalloc((size_t)a.gates, sizeof(double));
    return a;
}

static void free_attention(Attention* a) {
    free(a->q), free(a->k), free(a->v), free(a->dout), free(a->o), free(a->lse);
    free(a->dq), free(a->dk), free(a->dv), free(a->cum_logf), free(a->dcum_logf);
}

// Sets the log forget gates to `at_reset` at token `reset` and to `elsewhere` at all others
static void set_gates(Attention* a, double elsewhere, int64_t reset, double at_reset) {
    for (int64_t i = 0; i < a->gates; i++) {
        int64_t t = i % a->shape.T;
        a->cum_logf[i] = (t ? a->cum_logf[i - 1] : 0) + (t == reset ? at_reset : elsewhere);
    }
}

static void run_attention(Attention* a, bool gated) {
    const double* cum_logf = gated ? a->cum_logf : NULL;
    AttentionForward forward = {a->o, a->lse, a->q, a->k, a->v, cum_logf};
    AttentionBackward backward = {
        a->dq, a->dk, a->dv, gated ? a->dcum_logf : NULL, a->dout, a->q, a->k, a->v, a->o, a->lse, cum_logf};
    attention_forward(&forward, &a->shape);
    attention_backward(&backward, &a->shape);
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

    // Only differences of cum_logf matter. These values are exact in binary: the results must be
    // bit-identical.
    set_gates(&a, -1.0 / 64, -1, 0);
    memcpy(b.cum_logf, a.cum_logf, (size_t)a.gates * sizeof(double));
    for (int64_t i = 0; i < b.gates; i++) b.cum_logf[i] += 4096;
    run_attention(&a, true);
    run_attention(&b, true);
    check_same_attention(&a, &b, "a constant added to cum_logf");
    CHECK(memcmp(a.dcum_logf, b.dcum_logf, (size_t)a.gates * sizeof(double)) == 0,
          "a constant added to cum_logf: dcum_logf");

    set_gates(&a, -1000, -1, 0);
    run_attention(&a, true);
    CHECK(same_bits(a.o, a.v, a.n), "o differs from v with a gate that forgets everything");
    CHECK(same_bits(a.dv, a.dout, a.n), "dv differs from dout with a gate that forgets everything");
    free_attention(&a);
    free_attention(&b);
}

// A forget gate of 0 at token `reset` separates two documents: nothing crosses it, forward or backward.
static void check_reset(int64_t reset) {
    const int64_t T = 2 * TILE + 17;
    Attention a = new_attention(2, T), b = new_attention(2, T);
    int64_t d = a.shape.NH * a.shape.dh, from = token_at(&a, reset), rest = (T - reset) * d;
    set_gates(&a, -0.01, reset, -1000);
    set_gates(&b, -0.01, reset, -1000);
    // change sequence 0 before `reset` in b; in a the outputs there have no gradient
    for (int64_t i = 0; i < from; i++) {
        b.q[i] += 1, b.k[i] -= 2, b.v[i] += 3;
        a.dout[i] = 0;
    }
    run_attention(&a, true);
    run_attention(&b, true);
    CHECK(same_bits(a.o + from, b.o + from, rest), "tokens before %lld change later outputs",
          (long long)reset);
    CHECK(!same_bits(a.o, b.o, from), "the outputs before the reset must differ");
    CHECK(same_bits(a.dq + from, b.dq + from, rest) && same_bits(a.dk + from, b.dk + from, rest) &&
              same_bits(a.dv + from, b.dv + from, rest),
          "tokens before %lld change later gradients", (long long)reset);
    CHECK(all_zero(a.dq, from) && all_zero(a.dk, from) && all_zero(a.dv, from),
          "later tokens change the gradients of tokens before %lld", (long long)reset);
    bool no_gradient = true;
    for (int64_t t = 0; t < reset; t++) no_gradient = no_gradient && a.dcum_logf[t] == 0;
    CHECK(no_gradient, "later tokens change the gradients of gates before %lld", (long long)reset);
    free_attention(&a);
    free_attention(&b);
}

// After 8000 tokens with gates of e^-20 cum_logf is -1.6e5, where a float has a resolution of 1/64. A gate of
// e^-1000 separates the last tokens: their outputs must be those of the same tokens as a separate sequence.
static void check_long_attention(void) {
    const int64_t T = 8192, tail = 64;
    Attention a = new_attention(1, T), b = new_attention(1, tail);
    int64_t from = token_at(&a, T - tail), rest = b.n;
    memcpy(b.q, a.q + from, (size_t)rest * sizeof(real));
    memcpy(b.k, a.k + from, (size_t)rest * sizeof(real));
    memcpy(b.v, a.v + from, (size_t)rest * sizeof(real));
    set_gates(&b, -0.1, -1, 0);
    for (int64_t i = 0; i < a.gates; i++) {
        int64_t t = i % T;
        a.cum_logf[i] = (t ? a.cum_logf[i - 1] : 0) + (t < T - tail ? -20.1 : t == T - tail ? -1000 : -0.1);
    }
    run_attention(&a, true);
    run_attention(&b, true);
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
    fill(logits + 2 * V, V, (real)1e4); // the last row is constant
    real* before = copy_reals(logits, 3 * V);
    classifier(losses, logits, targets, 3, V, 1, false);
    CHECK(same_bits(logits, before, 3 * V), "logits change without `train`");
    CHECK(losses[0] == 0 && losses[1] == (real)2e4, "losses are %g and %g", (double)losses[0],
          (double)losses[1]);
    CHECK(fabs((double)losses[2] - log(V)) <= 4 * EPSILON, "the loss of equal logits is %g",
          (double)losses[2]);
    CHECK(signbit(losses[0]) && !signbit(losses[1]) && !signbit(losses[2]), "which are the likeliest tokens");
    const int32_t others[3] = {TARGET_NONE, TARGET_NONE, 0};
    classifier(losses, logits, others, 3, V, 1, false);
    CHECK(losses[0] == 0 && losses[1] == 0 && !signbit(losses[0]) && !signbit(losses[1]),
          "without a target the loss is %g", (double)losses[0]);
    CHECK(fabs((double)losses[2] + log(V)) <= 4 * EPSILON, "the first of equal logits is the likeliest: %g",
          (double)losses[2]);
    classifier(losses, logits, targets, 3, V, (real)0.5, true);
    CHECK(losses[1] == (real)2e4, "with `train` the loss is %g", (double)losses[1]);
    for (int i = 0; i < 3 * V; i++) {
        int t = i / V, k = i % V;
        double p = t == 2 ? 1.0 / V : k == 0, expected = 0.5 * (p - (k == t));
        CHECK(fabs((double)logits[i] - expected) <= EPSILON, "gradient %d of row %d is %g", k, t,
              (double)logits[i]);
    }
    memcpy(logits, before, sizeof logits);
    classifier(losses, logits, others, 3, V, (real)0.5, true);
    real zeros[2 * V] = {0};
    CHECK(losses[0] == 0 && losses[1] == 0 && same_bits(logits, zeros, 2 * V),
          "without a target there is a gradient");
    CHECK(losses[2] > 0 && logits[2 * V] < 0, "and none with one");
    free(before);
}

static void check_global_norm(void) {
    const int64_t counts[] = {1, 7, 65535, 65536, 65537, 3 * 65536 + 11};
    real* x = random_reals(counts[5], 0);
    for (int i = 0; i < 6; i++) {
        double sum = 0;
        for (int64_t k = 0; k < counts[i]; k++) sum += (double)x[k] * (double)x[k];
        double norm = sqrt(global_squares(x, counts[i]));
        CHECK(fabs(norm / sqrt(sum) - 1) <= 1e-10, "norm of %lld is %.17g", (long long)counts[i], norm);
    }
    x[12345] = NAN;
    CHECK(isnan(sqrt(global_squares(x, counts[5]))), "the norm of a gradient with a NaN is not NaN");
    free(x);
}

static void check_adamw(void) {
    enum { N = 1003 };
    const double scale = 0.7;
    AdamWParams p = {.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    real *w = random_reals(N, 0), *m = new_reals(N), *v = new_reals(N);
    double w2[N], m2[N] = {0}, v2[N] = {0}, worst = 0;
    for (int i = 0; i < N; i++) w2[i] = (double)w[i];
    for (int step = 1; step <= 5; step++) {
        real* g = random_reals(N, (uint64_t)step);
        g[0] = 0; // weight decay alone
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
        worst = worse(worst, fabs((double)w[i] - w2[i]) / size);
        CHECK(fabs((double)m[i] - m2[i]) <= 8 * EPSILON && fabs((double)v[i] - v2[i]) <= 8 * EPSILON,
              "moments of element %d are %g and %g", i, (double)m[i], (double)v[i]);
    }
    CHECK(worst <= 8 * EPSILON, "the relative error of a weight is %.2e", worst);
    free(w), free(m), free(v);
}

// ----------------------------------------------------------------------------
// halos: what ranks that share a sequence do where gates forget (llmc/sequence/halo.cuh)

enum { HALO_RANKS = 3, HALO_TOKENS = 160, HALO = 128, HALO_HEADS = 2, HALO_DH = 4 };
enum { HALO_D = HALO_HEADS * HALO_DH, HALO_ROW = 3 * HALO_D + 3 * HALO_HEADS };

// Norms' weights and gates' bias, or their gradients
typedef struct {
    real norms[2][HALO_D], bias[HALO_HEADS];
} HeadWeights;

// o and dproj of all heads over T tokens, as attention's mixer computes them; adds to the weights' gradients.
static void run_heads(real* o, real* dproj, HeadWeights* gradients, const HeadWeights* w, const real* proj,
                      const real* dout, int64_t T) {
    const HeadShape s = {.B = 1,
                         .T = T,
                         .NH = HALO_HEADS,
                         .dh = HALO_DH,
                         .columns = HALO_ROW,
                         .row_stride = HALO_ROW,
                         .weight_stride = HALO_DH,
                         .KVH = HALO_HEADS};
    const int64_t n = T * HALO_D, gates = T * HALO_HEADS, gate = 3 * HALO_D + 2 * HALO_HEADS;
    real *x[3], *dx[3], *rstd = new_reals(2 * gates), *lse = new_reals(gates),
                        *scratch = new_reals(9 * HALO_D);
    double *cum_logf = (double*)xcalloc((size_t)gates, sizeof *cum_logf),
           *dcum_logf = (double*)xcalloc((size_t)gates, sizeof *dcum_logf);
    HeadPath paths[3];
    memset(paths, 0, sizeof paths);
    for (int p = 0; p < 3; p++) {
        x[p] = new_reals(n), dx[p] = new_reals(n);
        paths[p].column = p * HALO_D;
        paths[p].shift = p ? 3 * HALO_D + (p - 1) * HALO_HEADS : -1;
        paths[p].eps = 1e-6;
        paths[p].out = x[p], paths[p].dout = dx[p];
        if (p == 2) continue;
        paths[p].weight = w->norms[p], paths[p].dweight = gradients->norms[p];
        paths[p].rstd = rstd + p * gates;
    }
    qkv_forward(paths, proj, NULL, NULL, &s);
    forget_gate_forward(cum_logf, proj + gate, w->bias, &s);
    const AttentionForward forward = {o, lse, x[0], x[1], x[2], cum_logf};
    const AttentionBackward backward = {dx[0], dx[1], dx[2], dcum_logf, dout,    x[0],
                                        x[1],  x[2],  o,     lse,       cum_logf};
    attention_forward(&forward, &s);
    attention_backward(&backward, &s);
    forget_gate_backward(dproj + gate, gradients->bias, dcum_logf, proj + gate, w->bias, scratch, &s);
    qkv_backward(paths, dproj, proj, NULL, scratch, &s);
    for (int p = 0; p < 3; p++) free(x[p]), free(dx[p]);
    free(rstd), free(lse), free(scratch), free(cum_logf), free(dcum_logf);
}

// The same by ranks, each over its own tokens behind a halo, whose queries have no gradient; the halo's rows
// of dproj are added to those of the rank before. Unless `present` the halo's rows of proj are 0.
static void run_halos(real* o, real* dproj, HeadWeights* gradients, const HeadWeights* w, const real* proj,
                      const real* dout, bool present) {
    for (int64_t rank = 0; rank < HALO_RANKS; rank++) {
        const int64_t halo = rank ? HALO : 0, T = halo + HALO_TOKENS, own = rank * HALO_TOKENS,
                      first = own - halo;
        real *span = copy_reals(proj + first * HALO_ROW, T * HALO_ROW),
             *span_dout = copy_reals(dout + first * HALO_D, T * HALO_D), *span_o = new_reals(T * HALO_D),
             *span_dproj = new_reals(T * HALO_ROW);
        fill(span_dout, halo * HALO_D, 0);
        if (!present) fill(span, halo * HALO_ROW, 0);
        run_heads(span_o, span_dproj, gradients, w, span, span_dout, T);
        memcpy(o + own * HALO_D, span_o + halo * HALO_D, HALO_TOKENS * HALO_D * sizeof(real));
        for (int64_t i = 0; i < T * HALO_ROW; i++) dproj[first * HALO_ROW + i] += span_dproj[i];
        free(span), free(span_dout), free(span_o), free(span_dproj);
    }
}

// Log gates are some -0.4, so that what is before a halo keeps 1e-22 of its weight.
static void check_halos(void) {
    const int64_t T = HALO_RANKS * HALO_TOKENS, num_weights = sizeof(HeadWeights) / sizeof(real);
    real *proj = random_reals(T * HALO_ROW, 20), *dout = random_reals(T * HALO_D, 21), *o[3], *dproj[3];
    HeadWeights w, gradients[3];
    memset(gradients, 0, sizeof gradients);
    for (int i = 0; i < 2 * HALO_D; i++) w.norms[i / HALO_D][i % HALO_D] = 1 + (real)(i % 5) / 8;
    for (int h = 0; h < HALO_HEADS; h++) w.bias[h] = (real)(h + 0.5);
    for (int i = 0; i < 3; i++) {
        o[i] = new_reals(T * HALO_D), dproj[i] = new_reals(T * HALO_ROW);
        if (i == 0) run_heads(o[i], dproj[i], &gradients[i], &w, proj, dout, T);
        if (i > 0) run_halos(o[i], dproj[i], &gradients[i], &w, proj, dout, i == 1);
    }
    for (int i = 1; i < 3; i++) {
        const double errors[] = {relative_error(o[i], o[0], T * HALO_D),
                                 relative_error(dproj[i], dproj[0], T * HALO_ROW),
                                 relative_error(gradients[i].norms[0], gradients[0].norms[0], num_weights)};
        for (int e = 0; e < 3; e++) // of the weights' gradients 3e-6, 6e-14
            CHECK(i == 1 ? errors[e] <= PICK(2e-5, 4e-13) : errors[e] > 1e-2, "%s halos: error %d is %.2e",
                  i == 1 ? "with" : "without", e, errors[e]);
    }
    for (int i = 0; i < 3; i++) free(o[i]), free(dproj[i]);
    free(proj), free(dout);
}

static int test_layers(void) {
    check_gates();
    check_reset(1);
    check_reset(TILE);
    check_reset(TILE + 70);
    check_long_attention();
    check_halos();
    check_classifier();
    check_global_norm();
    check_adamw();
    return test_report();
}
