/*
Embedding, RMSNorm and SwiGLU, forward and backward, against the same in double; doc_start against the host's.

    test_layers [quick] [SEED]     quick: without what is slow under compute-sanitizer
*/
#include "../../../llmc/layers/documents.cuh"
#include "../../../llmc/layers/embedding.cuh"
#include "../../../llmc/layers/rmsnorm.cuh"
#include "../../../llmc/layers/swiglu.cuh"
#include "buffers.cuh"

struct NormScratch : Buffer<float> {
    NormScratch() : Buffer<float>(norm_partial_bytes() / sizeof(float)) {}
};

static int64_t draw_below(int64_t n, int64_t i) {
    return (int64_t)(random_u64(2, seed, (uint64_t)i) % (uint64_t)n);
}

// ----------------------------------------------------------------------------

static void test_embedding(int64_t rows, int64_t d, int64_t V, const char* kind) {
    snprintf(test_case, sizeof test_case, "embedding rows %lld d %lld V %lld %s", (long long)rows,
             (long long)d, (long long)V, kind);
    vector<int32_t> tokens(rows);
    for (int64_t i = 0; i < rows; i++) {
        int64_t token = draw_below(V, i);
        if (!strcmp(kind, "equal")) token = V - 1;
        if (!strcmp(kind, "frequent")) token = draw_below(V, rows + i) % 3 ? token % 5 : token;
        if (!strcmp(kind, "falling")) token = (rows - i) * (V - 1) / rows;
        tokens[i] = (int32_t)token;
    }
    Buffer<int32_t> d_tokens(tokens);
    Drawn<bf16> embeddings(V * d), dx(rows * d);
    Drawn<float> dembeddings(V * d);
    Buffer<float> again(dembeddings.host());
    Buffer<bf16> x(rows * d);
    Buffer<char> scratch(embedding_scratch_bytes(rows, d));

    vector<double> want_x(rows * d), want_dembeddings = dembeddings.values;
    for (int64_t i = 0; i < rows * d; i++) {
        int64_t at = tokens[i / d] * d + i % d;
        want_x[i] = embeddings[at];
        want_dembeddings[at] += dx[i];
    }
    embedding_forward(x, d_tokens, embeddings, rows, d, 0);
    check_close("embedding x", want_x, x, 0);
    embedding_backward(dembeddings, dx, d_tokens, scratch, rows, d, V, 0);
    check_close("embedding dE", want_dembeddings, dembeddings, FP32_LIMIT);
    embedding_backward(again, dx, d_tokens, scratch, rows, d, V, 0);
    check_same_bits<float>("dE of a second run", dembeddings, again);
}

// ----------------------------------------------------------------------------

static void test_rmsnorm(int64_t rows, int64_t d, bool add) {
    snprintf(test_case, sizeof test_case, "rmsnorm rows %lld d %lld add %d", (long long)rows, (long long)d,
             add);
    const double eps = 1e-6;
    Drawn<bf16> x(rows * d, 3, 0.5), weight(d, 0.3, 1), dy(rows * d), residual(rows * d);
    Drawn<float> dweight0(d);
    vector<double> want_y(rows * d), want_rstd(rows), want_dx(rows * d), want_dweight = dweight0.values;
    for (int64_t r = 0; r < rows; r++) {
        const double *xr = &x.values[r * d], *dyr = &dy.values[r * d];
        double squares = 0, gx = 0;
        for (int64_t c = 0; c < d; c++) squares += xr[c] * xr[c];
        double s = want_rstd[r] = 1 / sqrt(squares / (double)d + eps);
        for (int64_t c = 0; c < d; c++) {
            want_y[r * d + c] = xr[c] * s * weight[c];
            want_dweight[c] += dyr[c] * xr[c] * s;
            gx += dyr[c] * weight[c] * xr[c];
        }
        for (int64_t c = 0; c < d; c++)
            want_dx[r * d + c] =
                (add ? residual[r * d + c] : 0) + s * (dyr[c] * weight[c] - xr[c] * s * s * gx / (double)d);
    }
    Buffer<bf16> y(rows * d), y_again(rows * d), dx(rows * d), dx_again(rows * d);
    Buffer<float> rstd(rows), dweight(dweight0.host()), dweight_again(dweight0.host());
    NormScratch partial;
    Norm norm = {weight, dweight, rstd, rows, d, eps}, norm_again = norm;
    norm_again.dweight = dweight_again;
    if (add) dx = residual.host();
    if (add) dx_again = residual.host();
    rmsnorm_forward(y, x, &norm, 0);
    rmsnorm_backward(dx_again, NULL, dy, x, add, &norm_again, {partial}, 0);
    rmsnorm_backward(dx, y_again, dy, x, add, &norm, {partial}, 0);
    check_bf16("rmsnorm y", want_y, y);
    check_close("rmsnorm rstd", want_rstd, rstd, FP32_LIMIT);
    check_bf16("rmsnorm dx", want_dx, dx);
    check_close("rmsnorm dweight", want_dweight, dweight, FP32_LIMIT);
    check_same_bits("recomputed y", y, y_again);
    check_same_bits("dx of a second run", dx, dx_again);
    check_same_bits("dweight of a second run", dweight, dweight_again);
}

// A row whose mean square overflows becomes NaN, and no other row changes. 1e15 does not overflow.
static void test_rmsnorm_overflow(void) {
    snprintf(test_case, sizeof test_case, "rmsnorm that overflows");
    const int64_t rows = 5, d = 72, bad = 2;
    Drawn<bf16> x(rows * d), weight(d, 1, 1);
    Buffer<bf16> y(rows * d), y_before(rows * d);
    Buffer<float> rstd(rows), rstd_before(rows);
    Norm before = {weight, NULL, rstd_before, rows, d, 1e-6}, norm = before;
    norm.rstd = rstd;
    rmsnorm_forward(y_before, x, &before, 0);
    for (double large : {1e15, -1e20, 3e38}) {
        vector<bf16> host = x.host();
        host[bad * d + 70] = rounded<bf16>(large);
        Buffer<bf16> changed(host);
        rmsnorm_forward(y, changed, &norm, 0);
        vector<bf16> got = y.host(), want = y_before.host();
        vector<float> got_rstd = rstd.host();
        int others = 0, nans = 0;
        for (int64_t i = 0; i < rows * d; i++) {
            if (i / d == bad)
                nans += isnan(value(got[i]));
            else
                others += value(got[i]) != value(want[i]);
        }
        CHECK(others == 0, "%g: %d elements of other rows changed", large, others);
        CHECK(nans == (fabs(large) > 1e19 ? d : 0) && isnan(got_rstd[bad]) == (nans > 0),
              "%g: %d NaN, rstd %g", large, nans, got_rstd[bad]);
    }
}

// ----------------------------------------------------------------------------

static void test_swiglu(int64_t rows, int64_t I) {
    snprintf(test_case, sizeof test_case, "swiglu rows %lld I %lld", (long long)rows, (long long)I);
    Drawn<bf16> gate_up(2 * rows * I, 4), dact(rows * I);
    Buffer<bf16> act(rows * I), dgate_up(2 * rows * I);
    vector<double> want_act(rows * I), want_dgate_up(2 * rows * I);
    for (int64_t i = 0; i < rows * I; i++) {
        int64_t at_gate = i / I * 2 * I + i % I, at_up = at_gate + I;
        double gate = gate_up[at_gate], up = gate_up[at_up], sigmoid = 1 / (1 + exp(-gate));
        want_act[i] = gate * sigmoid * up;
        want_dgate_up[at_gate] = dact[i] * up * sigmoid * (1 + gate * (1 - sigmoid));
        want_dgate_up[at_up] = dact[i] * gate * sigmoid;
    }
    swiglu_forward(act, gate_up, rows, I, 0);
    swiglu_backward(dgate_up, dact, dact, gate_up, rows, I, 0); // act over dact
    check_same_bits<bf16>("recomputed act", act, dact);
    check_bf16("swiglu act", want_act, act);
    check_bf16("swiglu dgate_up", want_dgate_up, dgate_up);
}

// ----------------------------------------------------------------------------

// every: tokens from one end-of-text to the next in the mean; 0: there is none.
static void test_documents(int64_t B, int64_t T, int64_t every) {
    snprintf(test_case, sizeof test_case, "documents B %lld T %lld every %lld", (long long)B, (long long)T,
             (long long)every);
    vector<int32_t> tokens(B * T), want(B * T);
    for (int64_t i = 0; i < B * T; i++) tokens[i] = every && draw_below(every, i) == 0 ? 7 : 8;
    find_documents(want.data(), tokens.data(), B, T, 7);
    Buffer<int32_t> inputs(tokens), doc_start(B * T);
    documents_forward(doc_start, inputs, B, T, 7, 0);
    int64_t wrong = 0;
    vector<int32_t> got = doc_start.host();
    for (int64_t i = 0; i < B * T; i++) wrong += got[i] != want[i];
    CHECK(wrong == 0, "%s: %lld wrong", test_case, (long long)wrong);
}

// ----------------------------------------------------------------------------
// Tensors above 2^31 elements, zeros but for their end, which must come out as it does alone.

static const int64_t FEW = 16;

static void test_large_swiglu_and_rmsnorm(void) {
    snprintf(test_case, sizeof test_case, "swiglu and rmsnorm above 2^31 elements");
    const int64_t d = 8192, I = d / 2, rows = ((int64_t)1 << 31) / d + 2 * FEW, n = rows * d, m = FEW * d;
    Drawn<bf16> x(m), dact(m / 2), dy(m), weight(d, 1, 1);
    Buffer<bf16> out(m), act(m / 2), big_x(n, x), big_out(n), big_act(n / 2);
    {
        Buffer<bf16> big_dact(n / 2, dact);
        swiglu_forward(act, x, FEW, I, 0);
        swiglu_forward(big_act, big_x, rows, I, 0);
        check_same_bits("swiglu act", act.p, big_act + (n - m) / 2, m / 2);
        swiglu_backward(out, act, dact, x, FEW, I, 0);
        swiglu_backward(big_out, big_act, big_dact, big_x, rows, I, 0);
        check_same_bits("swiglu dgate_up", out.p, big_out + n - m, m);
        check_same_bits("swiglu recomputed act", act.p, big_act + (n - m) / 2, m / 2);
    }
    Buffer<bf16> big_dy(n, dy);
    Buffer<float> rstd(FEW), big_rstd(rows), dweight(d), big_dweight(d);
    NormScratch partial;
    dweight.zero(), big_dweight.zero();
    Norm norm = {weight, dweight, rstd, FEW, d, 1e-6},
         big_norm = {weight, big_dweight, big_rstd, rows, d, 1e-6};
    rmsnorm_forward(out, x, &norm, 0);
    rmsnorm_forward(big_out, big_x, &big_norm, 0);
    check_same_bits("rmsnorm y", out.p, big_out + n - m, m);
    rmsnorm_backward(out, NULL, dy, x, false, &norm, {partial}, 0);
    rmsnorm_backward(big_out, NULL, big_dy, big_x, false, &big_norm, {partial}, 0);
    check_same_bits("rmsnorm dx", out.p, big_out + n - m, m);
    check_close("dweight at 2^31", doubles(dweight.host()), big_dweight, FP32_LIMIT);
}

static void test_large_embedding(void) { // the last rows have the last tokens, the others all token 0
    snprintf(test_case, sizeof test_case, "embedding above 2^31 elements");
    const int64_t d = 8192, rows = ((int64_t)1 << 31) / d + FEW, V = rows, n = rows * d, m = FEW * d;
    vector<int32_t> tokens(rows, 0);
    for (int64_t i = 0; i < FEW; i++) tokens[rows - FEW + i] = (int32_t)(V - FEW + i);
    Buffer<int32_t> d_tokens(tokens);
    Drawn<bf16> tail(m);
    Buffer<bf16> dx(n, tail), x(n);
    Buffer<float> dembeddings(n);
    Buffer<char> scratch(embedding_scratch_bytes(rows, d));
    dembeddings.zero();
    embedding_forward(x, d_tokens, dx, rows, d, 0);
    check_same_bits("embedding x", tail.p, x + n - m, m);
    embedding_backward(dembeddings, dx, d_tokens, scratch, rows, d, V, 0);
    check_close("embedding dE at 2^31", tail.values, dembeddings.host(n - m), 0);
}

// ----------------------------------------------------------------------------

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    for (const char* kind : {"random", "equal", "frequent", "falling"}) {
        test_embedding(1, 8, 2, kind);
        test_embedding(7, 64, 3, kind);
        test_embedding(33, 72, 256, kind);
        test_embedding(1000, 72, 257, kind);
        if (quick) continue;
        test_embedding(4097, 768, 5000, kind);
        test_embedding(20000, 64, 70000, kind);
    }
    for (int add = 0; add < 2; add++) {
        test_rmsnorm(1, 64, add);
        test_rmsnorm(3, 72, add);
        test_rmsnorm(37, 768, add);
        test_rmsnorm(2, 8192, add);
        if (quick) continue;
        test_rmsnorm(1000, 1000, add);
        test_rmsnorm(1501, 1536, add);
        test_rmsnorm(9000, 64, add);
    }
    test_rmsnorm_overflow();
    for (int64_t every : {0, 1, 3, 300, 9000})
        for (int64_t T : {1, 7, 8, 257, 8191, 8192, 8193, 20000})
            if (!quick || T < 300) test_documents(3, T, every);
    test_swiglu(1, 8);
    test_swiglu(5, 72);
    test_swiglu(33, 256);
    if (!quick) {
        test_swiglu(7, 3584);
        test_swiglu(300, 5000);
        test_large_swiglu_and_rmsnorm();
        test_large_embedding();
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
