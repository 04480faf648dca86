/*
The head-wise kernels (qkv, RoPE, output norm and gate), forward and backward, against the same in double.

    test_heads [quick] [SEED]     quick: without what is slow under compute-sanitizer
*/
#include "../../../llmc/layers/output_gate.cuh"
#include "../../../llmc/model/documents.h"
#include "../../../llmc/layers/qkv.cuh"
#include "buffers.cuh"

static const double EPS = 1e-6, QK_EPS = 1e-5, ROPE_BASE = 10000;

struct NormScratch : Buffer<float> {
    NormScratch() : Buffer<float>(norm_partial_bytes() / sizeof(float)) {}
};

// The fused projection of q, k, v, output gate, forget gate and both shift gates, padded to a multiple of 8
// columns.
static HeadShape head_shape(int64_t B, int64_t T, int64_t NH, int64_t dh, bool shared_norm = false) {
    int64_t columns = 4 * NH * dh + 3 * NH;
    return {B, T, NH, dh, columns, ceil_div<int64_t>(columns, 8) * 8, shared_norm ? 0 : dh};
}

// Columns [first, first + count) of the rows of x.
template <class T>
static vector<T> columns(const vector<T>& x, int64_t row_stride, int64_t first, int64_t count) {
    vector<T> out;
    for (size_t at = first; at < x.size(); at += row_stride)
        out.insert(out.end(), x.begin() + at, x.begin() + at + count);
    return out;
}

// ----------------------------------------------------------------------------
// one head in double

static double norm_oracle(double* y, const double* x, const double* weight, int64_t n, double eps) {
    double squares = 0;
    for (int64_t c = 0; c < n; c++) squares += x[c] * x[c];
    double rstd = 1 / sqrt(squares / (double)n + eps);
    for (int64_t c = 0; c < n; c++) y[c] = x[c] * rstd * weight[c];
    return rstd;
}

// g: from the gradient of y to that of x
static void norm_backward_oracle(double* g, double* dweight, const double* x, const double* weight,
                                 double rstd, int64_t n) {
    double gx = 0;
    for (int64_t c = 0; c < n; c++) gx += g[c] * weight[c] * x[c];
    for (int64_t c = 0; c < n; c++) {
        dweight[c] += g[c] * x[c] * rstd;
        g[c] = rstd * (g[c] * weight[c] - x[c] * rstd * rstd * gx / (double)n);
    }
}

static void rotate_oracle(double* x, int64_t t, int64_t dh, double direction) {
    for (int64_t i = 0; i < dh / 2; i++) {
        double angle = (double)t * pow(ROPE_BASE, -2.0 * (double)i / (double)dh);
        double cosine = cos(angle), sine = direction * sin(angle), first = x[i], second = x[i + dh / 2];
        x[i] = first * cosine - second * sine;
        x[i + dh / 2] = first * sine + second * cosine;
    }
}

// ----------------------------------------------------------------------------
// qkv

// One of the three paths: the kernels' buffers and the expected values.
struct PathTest {
    Drawn<bf16> weight, dout;
    Drawn<float> dweight0;
    Buffer<float> dweight, dweight_again, rstd;
    Buffer<bf16> out;
    HeadPath path;
    vector<double> want_out, want_rstd, want_dweight;
    // [B, T, NH]: sums of absolute values of the terms of the shift gate's gradient; rstd * |input| /
    // |output|, as 1 - alpha has the absolute error of alpha
    vector<double> dalpha_terms, rstd_terms;

    PathTest(const HeadShape& s, int64_t column, int64_t shift, bool norm, bool rope)
        : weight(s.weight_stride ? s.NH * s.dh : s.dh, 0.3, 1), dout(s.B * s.T * s.NH * s.dh),
          dweight0(weight.n), dweight(dweight0.host()), dweight_again(dweight0.host()),
          rstd(s.B * s.T * s.NH), out(dout.n), want_out(dout.n), want_rstd(rstd.n),
          want_dweight(dweight0.values), dalpha_terms(rstd.n), rstd_terms(rstd.n) {
        memset(&path, 0, sizeof path);
        path.column = column, path.shift = shift, path.rope = rope, path.eps = QK_EPS;
        path.weight = norm ? weight.p : NULL, path.dweight = norm ? dweight.p : NULL;
        path.out = out, path.rstd = rstd, path.dout = dout;
    }

    vector<int32_t> doc_start; // on the host; empty: a sequence is one document

    // Adds to dproj, as a token's input is in the next token's output too.
    void compute(const HeadShape& s, const vector<double>& proj, vector<double>* dproj) {
        for (int64_t bt = 0; bt < s.B * s.T; bt++)
            for (int64_t h = 0; h < s.NH; h++) compute_head(s, proj, dproj, bt, h);
    }

    void compute_head(const HeadShape& s, const vector<double>& proj, vector<double>* dproj, int64_t bt,
                      int64_t h) {
        bool begins = begins_document(doc_start.empty() ? NULL : doc_start.data(), bt, s.T);
        int64_t dh = s.dh, t = bt % s.T, i = bt * s.NH + h, at = bt * s.row_stride + path.column + h * dh;
        int64_t at_gate = bt * s.row_stride + path.shift + h;
        const double *in = &proj[at], *before = begins ? NULL : in - s.row_stride;
        const double* w = &weight.values[h * s.weight_stride];
        vector<double> x(dh), g(&dout.values[i * dh], &dout.values[i * dh] + dh);
        double alpha = path.shift >= 0 ? 1 / (1 + exp(-proj[at_gate])) : 0, dalpha = 0,
               *y = &want_out[i * dh];
        for (int64_t c = 0; c < dh; c++) y[c] = x[c] = (1 - alpha) * in[c] + (before ? alpha * before[c] : 0);
        if (path.weight) want_rstd[i] = norm_oracle(y, x.data(), w, dh, QK_EPS);
        double squares = 0;
        for (int64_t c = 0; c < dh; c++) squares += in[c] * in[c] / (double)dh;
        rstd_terms[i] = want_rstd[i] * want_rstd[i] * sqrt(squares);
        if (path.rope) rotate_oracle(y, t, dh, 1);

        if (path.rope) rotate_oracle(g.data(), t, dh, -1);
        if (path.weight)
            norm_backward_oracle(g.data(), &want_dweight[h * s.weight_stride], x.data(), w, want_rstd[i], dh);
        for (int64_t c = 0; c < dh; c++) {
            double term = g[c] * ((before ? before[c] : 0) - in[c]);
            (*dproj)[at + c] += (1 - alpha) * g[c];
            if (before) (*dproj)[at + c - s.row_stride] += alpha * g[c];
            dalpha += term;
            dalpha_terms[i] += fabs(term) * alpha * (1 - alpha);
        }
        if (path.shift >= 0) (*dproj)[at_gate] = dalpha * alpha * (1 - alpha);
    }
};

// The largest norms of q or k, from the first of them on.
static void check_squares(const char* name, const Buffer<bf16>& x, const vector<float>& squares, size_t from,
                          const HeadShape& s) {
    vector<double> values = doubles(x.host()), want((size_t)(s.NH * head_norm_groups(&s))), got;
    for (int64_t i = 0; i < s.B * s.T * s.NH; i++) {
        double square = 0;
        for (int64_t c = 0; c < s.dh; c++) square += pow(values[i * s.dh + c], 2);
        double& largest = want[i % s.NH * head_norm_groups(&s) + i / s.NH / NORM_TOKENS];
        largest = fmax(largest, square);
    }
    for (size_t i = 0; i < want.size(); i++) got.push_back(squares[from + i]);
    check_close(name, want, got, FP32_LIMIT);
}

// switches: 1 key shift, 2 value shift, 4 QK norm, 8 its weights shared, 16 RoPE, 32 packed documents. group:
// query heads that read one head of keys
static void test_qkv(int64_t B, int64_t T, int64_t NH, int64_t dh, int switches, int64_t group = 1) {
    snprintf(test_case, sizeof test_case, "qkv B %lld T %lld NH %lld / %lld dh %lld switches %d",
             (long long)B, (long long)T, (long long)NH, (long long)group, (long long)dh, switches);
    HeadShape s = head_shape(B, T, NH, dh, switches & 8);
    s.KVH = NH / group;
    const HeadShape keys = key_shape(&s);
    int64_t d = NH * dh, stride = s.row_stride, tokens = B * T;
    bool norm = switches & 4, rope = switches & 16;
    Drawn<bf16> proj(tokens * stride);
    Buffer<bf16> dproj(tokens * stride), dproj_again(dproj.n);
    Buffer<float> angles(T * dh);
    NormScratch partial;
    if (rope) rope_angles(angles, T, dh, rotation_plain(ROPE_BASE), 0);
    vector<int32_t> starts(tokens); // documents of 7 tokens in the mean, or one
    for (int64_t i = 0; i < tokens; i++) {
        bool begins = i % T == 0 || ((switches & 32) && random_u64(3, seed, (uint64_t)i) % 7 == 0);
        starts[i] = begins ? (int32_t)(i % T) : starts[i - 1];
    }
    Buffer<int32_t> doc_start(starts);
    if (switches & 32) s.doc_start = doc_start;

    PathTest q(s, 0, -1, norm, rope), k(keys, d, switches & 1 ? 4 * d + NH : -1, norm, rope),
        v(keys, 2 * d, switches & 2 ? 4 * d + 2 * NH : -1, false, false);
    PathTest* tests[3] = {&q, &k, &v};
    HeadPath paths[3] = {q.path, k.path, v.path}, paths_again[3] = {q.path, k.path, v.path};
    vector<double> want_dproj(tokens * stride);
    for (int i = 0; i < 3; i++) {
        if (paths[i].weight) paths_again[i].dweight = tests[i]->dweight_again;
        tests[i]->doc_start = starts;
        tests[i]->compute(i ? keys : s, proj.values, &want_dproj);
    }
    Buffer<float> squares(2 * NH * head_norm_groups(&s));
    qkv_forward(paths, NULL, proj, angles, &s, 0);
    vector<bf16> out[3] = {q.out.host(), k.out.host(), v.out.host()};
    qkv_forward(paths, squares, proj, angles, &s, 0);
    for (int i = 0; i < 3; i++)
        CHECK(same_bits(out[i], tests[i]->out.host()), "%s: other bits with norms", test_case);
    check_squares("largest norms of q", q.out, squares.host(), 0, s);
    check_squares("largest norms of k", k.out, squares.host(), squares.n / 2, keys);
    qkv_backward(paths, dproj, proj, angles, {partial}, &s, Fp8Tensor(), 0);
    qkv_backward(paths_again, dproj_again, proj, angles, {partial}, &s, Fp8Tensor(), 0);
    check_same_bits("dproj of a second run", dproj, dproj_again);

    static const char* const names[3][5] = {{"q", "q_rstd", "dproj q", "", "q_norm dweight"},
                                            {"k", "k_rstd", "dproj k", "dproj k_shift", "k_norm dweight"},
                                            {"v", "v_rstd", "dproj v", "dproj v_shift", ""}};
    vector<double> got = doubles(dproj.host());
    for (int i = 0; i < 3; i++) {
        const PathTest& p = *tests[i];
        int64_t column = paths[i].column, shift = paths[i].shift, heads = i ? keys.NH : NH;
        check_bf16(names[i][0], p.want_out, p.out);
        check_close(names[i][2], columns(want_dproj, stride, column, heads * dh),
                    columns(got, stride, column, heads * dh), bf16_limit(p.want_out.size(), 4096));
        if (shift >= 0)
            check_bf16(names[i][3], columns(want_dproj, stride, shift, heads),
                       columns(got, stride, shift, heads), &p.dalpha_terms);
        if (!paths[i].weight) continue;
        check_close(names[i][1], p.want_rstd, p.rstd, FP32_LIMIT, &p.rstd_terms);
        check_close(names[i][4], p.want_dweight, p.dweight, FP32_LIMIT);
        check_same_bits("dweight of a second run", p.dweight, p.dweight_again);
    }
    int64_t written = 0, not_zero = 0; // other layers' columns keep their NaN, the padding is zeroed
    for (double x : columns(got, stride, 3 * d, d + NH)) written += !isnan(x);
    for (int64_t first : {d, 2 * d}) // between the columns of fewer heads of keys
        for (double x : columns(got, stride, first + keys.NH * dh, d - keys.NH * dh)) written += !isnan(x);
    for (double x : columns(got, stride, s.columns, stride - s.columns)) not_zero += x != 0;
    CHECK(written == 0 && not_zero == 0, "%s: %lld writes to other columns, %lld padding elements not zero",
          test_case, (long long)written, (long long)not_zero);
}

static void test_rope_angles(void) {
    snprintf(test_case, sizeof test_case, "rope_angles");
    const int64_t T = 65536, dh = 64;
    Buffer<float> angles(T * dh);
    for (bool scaled : {false, true}) { // pairs 2 to 5 between both frequencies, and longer q and k
        Rotation rotation = rotation_plain(500000);
        if (scaled) rotation = {500000, 4, 1, 6, 1.125};
        rope_angles(angles, T, dh, rotation, 0);
        vector<double> want(T * dh);
        for (int64_t i = 0; i < T * dh / 2; i++) {
            int64_t pair = i % (dh / 2);
            double angle = (double)(i / (dh / 2)) * pow(500000, -2.0 * (double)pair / (double)dh);
            double ramp = pair <= 1 ? 0 : pair >= 6 ? 1 : (double)(pair - 1) / 5;
            if (scaled) angle *= 1 - 0.75 * ramp;
            want[2 * i] = rotation.gain * cos(angle);
            want[2 * i + 1] = rotation.gain * sin(angle);
        }
        check_close("angles", want, angles, 1e-7);
    }
}

// ----------------------------------------------------------------------------
// output norm and gate

// Tensors of a case, and what they should become.
struct OutputGateTest {
    HeadShape s;
    int64_t heads, n, d, column;
    Drawn<bf16> o, proj, weight, dy;
    Drawn<float> dweight0;
    vector<double> y, rstd, dout, dgate, dweight; // expected

    OutputGateTest(int64_t B, int64_t T, int64_t NH, int64_t dh)
        : s({B, T, NH, dh, NH * dh + 24, NH * dh + 24, dh}), heads(B * T * NH), n(heads * dh), d(NH * dh),
          column(16), o(n, 0.5), proj(B * T * s.row_stride, 2), weight(d, 0.3, 1), dy(n), dweight0(d),
          y(o.values), rstd(heads), dout(dy.values), dgate(n), dweight(dweight0.values) {}

    void compute(bool norm, bool gate) {
        vector<double> logits = columns(proj.values, s.row_stride, column, d);
        for (int64_t i = 0; i < heads; i++) {
            int64_t dh = s.dh, at = i * dh, at_weight = i % s.NH * dh;
            if (norm) rstd[i] = norm_oracle(&y[at], &o.values[at], &weight.values[at_weight], dh, EPS);
            for (int64_t c = at; c < at + dh && gate; c++) {
                double sigmoid = 1 / (1 + exp(-logits[c]));
                dgate[c] = dout[c] * y[c] * sigmoid * (1 - sigmoid);
                dout[c] *= sigmoid;
                y[c] *= sigmoid;
            }
            if (norm)
                norm_backward_oracle(&dout[at], &dweight[at_weight], &o.values[at], &weight.values[at_weight],
                                     rstd[i], dh);
        }
    }

    // delta of the gradient that the kernel has stored
    void check_delta(const Buffer<float>& delta, const vector<double>& stored_dout) const {
        vector<double> want(heads), terms(heads);
        for (int64_t i = 0; i < n; i++) {
            int64_t bt = i / d, h = i / s.dh % s.NH, b = bt / s.T, t = bt % s.T,
                    at = (b * s.NH + h) * s.T + t;
            want[at] += stored_dout[i] * o[i];
            terms[at] += fabs(stored_dout[i] * o[i]);
        }
        check_close("output_gate delta", want, delta, FP32_LIMIT, &terms);
    }
};

static void test_output_gate(int64_t B, int64_t T, int64_t NH, int64_t dh, bool norm, bool gate,
                             bool with_delta) {
    snprintf(test_case, sizeof test_case,
             "output_gate B %lld T %lld NH %lld dh %lld norm %d gate %d delta %d", (long long)B, (long long)T,
             (long long)NH, (long long)dh, norm, gate, with_delta);
    OutputGateTest want(B, T, NH, dh);
    want.compute(norm, gate);
    int64_t n = want.n, d = want.d, column = want.column, stride = want.s.row_stride;
    Buffer<bf16> y(n), y_again(n), dout(n), dproj(want.proj.n), in_place(want.dy.host());
    Buffer<float> dweight(want.dweight0.host()), dweight_again(want.dweight0.host()), rstd(want.heads),
        delta(want.heads);
    NormScratch partial;
    OutputGate args = {norm ? want.weight.p : NULL,
                       dweight,
                       rstd,
                       gate ? want.proj + column : NULL,
                       gate ? dproj + column : NULL,
                       with_delta ? delta.p : NULL,
                       EPS,
                       false};
    output_gate_forward(y, want.o, &args, &want.s, 0);
    output_gate_backward(dout, y_again, want.dy, want.o, &args, {partial}, &want.s, 0);
    check_same_bits("recomputed y", y, y_again);
    check_bf16("output_gate y", want.y, y);
    check_bf16("output_gate dout", want.dout, dout);
    if (norm) check_close("output_gate rstd", want.rstd, rstd, FP32_LIMIT);
    if (norm) check_close("output_gate dweight", want.dweight, dweight, FP32_LIMIT);
    vector<double> got = doubles(dproj.host());
    if (gate) check_bf16("output_gate dgate", want.dgate, columns(got, stride, column, d));
    int64_t written = 0;
    for (double x : columns(got, stride, 0, column)) written += !isnan(x);
    for (double x : columns(got, stride, column + d, stride - column - d)) written += !isnan(x);
    CHECK(written == 0, "%s: %lld writes to other columns of dproj", test_case, (long long)written);
    if (with_delta) want.check_delta(delta, doubles(dout.host()));

    args.dweight = dweight_again, args.delta = NULL;
    output_gate_backward(in_place, y_again, in_place, want.o, &args, {partial}, &want.s, 0);
    check_same_bits("dout in place of dy", dout, in_place);
    check_same_bits("dweight of a second run", dweight, dweight_again);
}

// ----------------------------------------------------------------------------
// Tensors above 2^31 elements, zeros but for the last sequence, which must come out as it does alone.

// What both kernels read and write: of one sequence, or of B with that one at the end.
struct LargeTest {
    HeadShape s;
    Buffer<bf16> proj, dout, dproj, out[3], dy;
    Buffer<float> rstd[3], dweight[3], delta, squares;
    LargeTest(const HeadShape& shape, const Buffer<bf16>& proj_end, const Buffer<bf16>& dout_end,
              const Buffer<bf16>& dy_end)
        : s(shape), proj(tokens() * s.row_stride, proj_end), dout(size(), dout_end),
          dproj(proj.n), out{Buffer<bf16>(size()), Buffer<bf16>(size()), Buffer<bf16>(size())},
          dy(size(), dy_end), rstd{Buffer<float>(heads()), Buffer<float>(heads()), Buffer<float>(heads())},
          dweight{Buffer<float>(d()), Buffer<float>(d()), Buffer<float>(d())}, delta(heads()),
          squares(2 * s.NH * head_norm_groups(&s)) {
        for (Buffer<float>& x : dweight) x.zero();
    }
    int64_t d() const { return s.NH * s.dh; }
    int64_t tokens() const { return s.B * s.T; }
    int64_t heads() const { return tokens() * s.NH; }
    int64_t size() const { return tokens() * d(); }

    void run_qkv(const bf16* weight, const float* angles, float* partial) {
        HeadPath paths[3];
        for (int i = 0; i < 3; i++)
            paths[i] = {i * d(),
                        i ? 4 * d() + i * s.NH : -1,
                        i < 2 ? weight : NULL,
                        dweight[i],
                        i < 2,
                        (float)QK_EPS,
                        out[i],
                        rstd[i],
                        dout};
        qkv_forward(paths, squares, proj, angles, &s, 0);
        qkv_backward(paths, dproj, proj, angles, {partial}, &s, Fp8Tensor(), 0);
    }
    // y in out[0] and, recomputed, in out[1]; dout in out[2]
    void run_output_gate(const bf16* weight, float* partial) {
        dweight[0].zero();
        OutputGate gate = {weight, dweight[0], rstd[0], proj + 3 * d(), dproj + 3 * d(), delta, EPS, false};
        output_gate_forward(out[0], dout, &gate, &s, 0);
        output_gate_backward(out[2], out[1], dy, dout, &gate, {partial}, &s, 0);
    }
    // The last m elements of x
    template <class T> static T* end(const Buffer<T>& x, int64_t m) { return x + x.n - m; }
};

static void test_large(void) {
    snprintf(test_case, sizeof test_case, "heads above 2^31 elements");
    const int64_t NH = 16, dh = 64, T = 16, B = ((int64_t)1 << 31) / (T * NH * dh) + 2, m = T * NH * dh;
    HeadShape few = head_shape(1, T, NH, dh), many = head_shape(B, T, NH, dh);
    Drawn<bf16> proj(T * few.row_stride), dout(m), dy(m), weight(NH * dh, 1, 1);
    Buffer<float> angles(T * dh);
    NormScratch partial;
    rope_angles(angles, T, dh, rotation_plain(ROPE_BASE), 0);
    LargeTest alone(few, proj, dout, dy), big(many, proj, dout, dy);
    for (LargeTest* test : {&alone, &big}) test->run_qkv(weight, angles, partial);
    for (int i = 0; i < 3; i++)
        check_same_bits("q, k or v", alone.out[i].p, LargeTest::end(big.out[i], m), m);
    for (int64_t row = 0, groups = T / NORM_TOKENS; row < 2 * NH; row++)
        check_same_bits("norms", alone.squares + row * groups, big.squares + ((row + 1) * B - 1) * groups,
                        groups);
    for (int64_t t = 0; t < T; t++) {
        bf16 *row = alone.dproj + t * few.row_stride,
             *big_row = big.dproj + ((B - 1) * T + t) * few.row_stride;
        check_same_bits("dproj", row, big_row, 3 * NH * dh);
        check_same_bits("dproj shifts", row + 4 * NH * dh + NH, big_row + 4 * NH * dh + NH, 2 * NH);
    }
    check_close("dweight at 2^31", doubles(alone.dweight[0].host()), big.dweight[0], FP32_LIMIT);

    for (LargeTest* test : {&alone, &big}) test->run_output_gate(weight, partial);
    check_same_bits("output_gate y", alone.out[0].p, LargeTest::end(big.out[0], m), m);
    check_same_bits("output_gate recomputed y", alone.out[1].p, LargeTest::end(big.out[1], m), m);
    check_same_bits("output_gate dout", alone.out[2].p, LargeTest::end(big.out[2], m), m);
    check_same_bits("output_gate delta", alone.delta.p, LargeTest::end(big.delta, T * NH), T * NH);
    check_close("dweight at 2^31", doubles(alone.dweight[0].host()), big.dweight[0], FP32_LIMIT);
}

// ----------------------------------------------------------------------------

static void test_shape(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    for (int switches = 0; switches < 64; switches++)
        if ((switches & 12) != 8) test_qkv(B, T, NH, dh, switches);
    for (int i = 0; i < 8; i++) test_output_gate(B, T, NH, dh, i & 1, i & 2, i & 4);
}

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    // B, T, NH, dh
    const int64_t small[][4] = {{1, 1, 1, 64},  {2, 17, 3, 64}, {1, 65, 2, 128}, {2, 9, 2, 8},
                                {1, 21, 3, 24}, {1, 19, 3, 48}, {2, 5, 1, 256},  {3, 7, 5, 16}};
    const int64_t large[][4] = {
        {1, 300, 24, 64}, {2, 150, 12, 64}, {1, 150, 12, 128}, {2, 101, 40, 32}, {3, 2000, 1, 64}};
    for (auto& s : small) test_shape(s[0], s[1], s[2], s[3]);
    if (!quick) {
        for (auto& s : large) test_shape(s[0], s[1], s[2], s[3]);
        test_qkv(2, 1000, 12, 64, 7);
        test_qkv(2, 1000, 12, 64, 23);
        test_qkv(2, 1000, 12, 64, 55);
        test_qkv(2, 300, 12, 64, 55, 3);
        test_qkv(1, 300, 24, 128, 23, 4); // q has more thread blocks than k and v
        test_qkv(2, 300, 6, 64, 15, 6);
        test_rope_angles();
        test_large();
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
