/*
llmc/attention/attention.cuh and llmc/attention/forget_gate.cuh against the formulas in double.

A kernel passes when its root mean square error is at most twice that of a plain bf16 implementation, in every
tensor and every head. On Hopper that goes for its own kernels and for those that every GPU runs. Inputs are
new in every run, unless a seed is given.

    test_attention                     everything: some 35 seconds and 36 GB on an H100
    test_attention LONGEST [SEED]      sequences up to that length
    test_attention quick [SEED]        a few short ones, for compute-sanitizer
*/
#include "../../../llmc/attention/forget_gate.cuh"
#include "../check.h"
#include "attention_oracle.cuh"

// ----------------------------------------------------------------------------
// a case: inputs, the kernels' results, the oracle's

struct Inputs {
    Shape s;
    Buffer<bf16> q, k, v, dout;
    Buffer<double> c;
    bool gate;
    explicit Inputs(Shape s, bool gate)
        : s(s), q(s.size()), k(s.size()), v(s.size()), dout(s.size()), c(gate ? s.tokens() : 0), gate(gate) {
        q.fill_normal(), k.fill_normal(), v.fill_normal(), dout.fill_normal();
    }
    const double* gates() const { return gate ? c.at : NULL; }
};

static bool on_sm80;              // the kernels for every GPU, and not those of the GPU at hand
static bool deterministic = true; // backward

struct Results {
    Buffer<bf16> o, dq, dk, dv;
    Buffer<float> lse, dc, scratch;
    explicit Results(Shape s)
        : o(s.size()), dq(s.size()), dk(s.size()), dv(s.size()), lse(s.tokens()), dc(s.tokens()),
          scratch((int64_t)(attention_scratch_bytes(s.B, s.T, s.NH, s.dh) / sizeof(float))) {}
    void compute(const Inputs& in, const AttentionBounds* bounds) {
        const Shape& s = in.s;
        if (on_sm80)
            compute_on_sm80(in, bounds);
        else {
            attention_forward(o.at, lse.at, scratch.at, in.q.at, in.k.at, in.v.at, in.gates(), bounds, s.B,
                              s.T, s.NH, s.dh, 0);
            attention_backward(dq.at, dk.at, dv.at, in.gate ? dc.at : NULL, scratch.at, in.dout.at, in.q.at,
                               in.k.at, in.v.at, o.at, lse.at, NULL, in.gates(), bounds, deterministic, s.B,
                               s.T, s.NH, s.dh, 0);
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    void compute_on_sm80(const Inputs& in, const AttentionBounds* bounds) {
        const Shape& s = in.s;
        const int *first = bounds ? bounds->first_key_block : NULL,
                  *last = bounds ? bounds->last_query_block : NULL;
        ATTENTION_DISPATCH(attention_forward_sm80, s.dh, in.gate, o.at, lse.at, in.q.at, in.k.at, in.v.at,
                           in.gates(), first, s.B, s.T, s.NH, 0);
        if (s.dh == 64) attention_delta<64>(scratch.at, in.dout.at, o.at, s.B, s.T, s.NH, 0);
        if (s.dh == 128) attention_delta<128>(scratch.at, in.dout.at, o.at, s.B, s.T, s.NH, 0);
        ATTENTION_DISPATCH(attention_backward_sm80, s.dh, in.gate, dq.at, dk.at, dv.at,
                           in.gate ? dc.at : NULL, in.dout.at, in.q.at, in.k.at, in.v.at, lse.at, scratch.at,
                           in.gates(), first, last, s.B, s.T, s.NH, 0);
    }
};
static bool same_results(const Results& a, const Results& b) {
    return same_bits(a.o, b.o) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) &&
           same_bits(a.dv, b.dv) && same_bits(a.dc, b.dc);
}

// dlogf_t = dc_t + ... + dc_{T-1}, to float's digits
template <class T>
static std::vector<double> suffix_sums(const std::vector<T>& dc, int64_t heads, int64_t length) {
    std::vector<double> sums(dc.size());
    for (int64_t h = 0; h < heads; h++) {
        double sum = 0;
        for (int64_t t = length - 1; t >= 0; t--)
            sums[h * length + t] = sum += (double)(float)dc[h * length + t];
    }
    return sums;
}

struct TensorError {
    double relative,
        times_plain; // the worst head's root mean square error over the tensor's, and over plain bf16's
};

// Element i belongs to head (i / inner) % heads of row i / (inner heads), or simply to i / inner.
template <class T>
static TensorError check_tensor(const char* name, const char* what, const std::vector<T>& x,
                                const std::vector<double>& exact, const std::vector<double>& plain,
                                const Shape& s, bool by_head, double limit) {
    TensorError worst = {0, 0};
    double error = 0, plain_error = 0, size = 0;
    int64_t n = 0;
    // Of a few tokens, or of gates that forget nothing, where dlogf wanders slowly, one head has too few
    // independent numbers for a ratio of errors to mean something: then all heads are taken together.
    bool together = s.T < 64 || s.NH >= 16;
    for (int64_t head = 0; head < s.heads(); head++) {
        for (int64_t i = 0; i < (by_head ? s.T : s.T * s.dh); i++, n++) {
            int64_t at = by_head ? head * s.T + i
                                 : ((head / s.NH * s.T + i / s.dh) * s.NH + head % s.NH) * s.dh + i % s.dh;
            double e = (double)(float)x[(size_t)at] - exact[(size_t)at],
                   p = plain[(size_t)at] - exact[(size_t)at];
            error += e * e, plain_error += p * p, size += exact[(size_t)at] * exact[(size_t)at];
        }
        if (together && head + 1 < s.heads()) continue;
        error = sqrt(error / (double)n), plain_error = sqrt(plain_error / (double)n),
        size = sqrt(size / (double)n);
        // 2e-5 is far below every tensor's size, but where it is zero on paper
        CHECK(error <= 2 * plain_error + 2e-5, "%s: %s, head %lld: error %.3g, plain bf16 %.3g, size %.3g",
              name, what, (long long)head, error, plain_error, size);
        if (size >= 1e-3) {
            CHECK(error <= limit * size, "%s: %s, head %lld: relative error %.3g > %.3g", name, what,
                  (long long)head, error / size, limit);
            worst.relative = fmax(worst.relative, error / size);
            worst.times_plain = fmax(worst.times_plain, error / (plain_error + 1e-6));
        }
        error = plain_error = size = 0, n = 0;
    }
    return worst;
}

static void check_results(const char* name, const Shape& s, const bf16* dout, const bf16* q, const bf16* k,
                          const bf16* v, const double* c, const std::vector<bf16>& o,
                          const std::vector<float>& lse, const std::vector<bf16>& dq,
                          const std::vector<bf16>& dk, const std::vector<bf16>& dv,
                          const std::vector<float>& dc) {
    Oracle exact(s), plain(s);
    exact.compute(s, dout, q, k, v, c, false);
    plain.compute(s, dout, q, k, v, c, true);
    TensorError e[5] = {};
    e[0] = check_tensor(name, "o", o, exact.o.read(), plain.o.read(), s, false, 6e-3);
    e[1] = check_tensor(name, "dq", dq, exact.dq.read(), plain.dq.read(), s, false, 1e-2);
    e[2] = check_tensor(name, "dk", dk, exact.dk.read(), plain.dk.read(), s, false, 1e-2);
    e[3] = check_tensor(name, "dv", dv, exact.dv.read(), plain.dv.read(), s, false, 6e-3);
    std::vector<double> exact_lse = exact.lse.read();
    double lse_error = 0;
    for (size_t i = 0; i < lse.size(); i++) lse_error = fmax(lse_error, fabs(lse[i] - exact_lse[i]));
    CHECK(lse_error <= 3e-5, "%s: lse is off by %.3g", name, lse_error);
    if (c)
        e[4] = check_tensor(name, "dlogf", suffix_sums(dc, s.heads(), s.T),
                            suffix_sums(exact.dc.read(), s.heads(), s.T),
                            suffix_sums(plain.dc.read(), s.heads(), s.T), s, true, 1e-2);
    printf("%-34s", name);
    for (int i = 0; i < 5; i++) printf("  %7.1e x%4.2f", e[i].relative, e[i].times_plain);
    printf("  %7.1e\n", lse_error);
}

typedef enum { NO_GATE, OPEN, RANDOM, ONE_CUT, ALL_CUT, ALTERNATING, DEAD_HEAD } GateKind;

// c of log gates whose logits have the given mean. Log gates are multiples of 2^-20, so that every sum is
// exact.
static std::vector<double> make_gates(GateKind kind, double mean, const Shape& s) {
    std::vector<double> c((size_t)s.tokens());
    uint64_t key = hash64(seed ^ (uint64_t)(s.T * 31 + kind));
    for (int64_t head = 0; head < s.heads(); head++) {
        double sum = 0;
        for (int64_t t = 0; t < s.T; t++) {
            double logf = -log1p(exp(-(mean + normal(key, (uint64_t)(head * s.T + t)))));
            if (kind == OPEN) logf = 0;
            if (kind == ONE_CUT && t == s.T / 3) logf = -1000;
            if (kind == ALL_CUT || (kind == DEAD_HEAD && head == 0)) logf = -1000;
            if (kind == ALTERNATING) logf = t % 2 ? -5 : 0;
            sum += round(logf * 1048576) / 1048576;
            c[(size_t)(head * s.T + t)] = sum;
        }
    }
    return c;
}

static void test_case(const char* what, GateKind kind, double mean, int64_t B, int64_t T, int64_t NH,
                      int64_t dh) {
    char name[128];
    Shape s = {B, T, NH, dh};
    snprintf(name, sizeof name, "%lldx%lld dh %lld T %lld %s", (long long)B, (long long)NH, (long long)dh,
             (long long)T, what);
    Inputs in(s, kind != NO_GATE);
    if (in.gate) in.c.upload(make_gates(kind, mean, s));
    Results a(s), b(s);
    a.compute(in, NULL);
    b.compute(in, NULL);
    CHECK(same_results(a, b), "%s: two runs differ", name);
    std::vector<bf16> o = a.o.read(), dq = a.dq.read(), dk = a.dk.read(), dv = a.dv.read();
    std::vector<float> lse = a.lse.read(), dc = a.dc.read();
    check_results(name, s, in.dout.at, in.q.at, in.k.at, in.v.at, in.gates(), o, lse, dq, dk, dv, dc);
    if (attention_runs_sm90() && !on_sm80) { // sums of dq and dc in any order
        deterministic = false;
        b.compute(in, NULL);
        deterministic = true;
        check_results("  in any order", s, in.dout.at, in.q.at, in.k.at, in.v.at, in.gates(), b.o.read(),
                      b.lse.read(), b.dq.read(), b.dk.read(), b.dv.read(), b.dc.read());
    }

    if (kind == ALL_CUT) { // every token sees itself alone
        CHECK(same_bits(a.o, in.v), "%s: o is not v", name);
        CHECK(same_bits(a.dv, in.dout), "%s: dv is not dout", name);
    }
    if (in.gate) { // the first gate takes no part: all rows and columns lie behind it
        std::vector<double> dlogf = suffix_sums(dc, s.heads(), T);
        for (int64_t h = 0; h < s.heads(); h++) {
            double size = 0;
            for (int64_t t = 0; t < T; t++) size += dlogf[h * T + t] * dlogf[h * T + t];
            size = sqrt(size / T);
            CHECK(fabs(dlogf[h * T]) <= 1e-3 * size + 1e-4, "%s: dlogf[0] is %.3g beside %.3g", name,
                  dlogf[h * T], size);
        }
    }
}

// ----------------------------------------------------------------------------
// what must hold whatever the numbers

// The oracle's gate gradient against central differences of the loss sum(o dout).
static void test_oracle(int64_t dh) {
    Shape s = {1, 37, 2, dh};
    Inputs in(s, true);
    std::vector<double> c = make_gates(RANDOM, 0.3, s);
    in.c.upload(c);
    Oracle oracle(s);
    oracle.compute(s, in.dout.at, in.q.at, in.k.at, in.v.at, in.c.at, false);
    std::vector<double> dlogf = oracle.dc.read();
    for (int64_t h = 0; h < s.NH; h++)
        for (int64_t t = s.T - 2; t >= 0; t--) dlogf[h * s.T + t] += dlogf[h * s.T + t + 1];
    std::vector<bf16> dout = in.dout.read();
    const double step = 1e-4;
    for (int64_t h = 0; h < s.NH; h++)
        for (int64_t t = 0; t < s.T; t++) {
            double loss[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                std::vector<double> moved = c;
                for (int64_t i = t; i < s.T; i++) moved[h * s.T + i] += side ? step : -step;
                in.c.upload(moved);
                oracle.forward(s, in.q.at, in.k.at, in.v.at, in.c.at, false);
                std::vector<double> o = oracle.o.read();
                for (size_t i = 0; i < o.size(); i++) loss[side] += o[i] * (double)(float)dout[i];
            }
            double expected = (loss[1] - loss[0]) / (2 * step), got = dlogf[h * s.T + t];
            CHECK(fabs(got - expected) <= 1e-6 * (1 + fabs(expected)),
                  "oracle: dlogf[%lld][%lld] is %.9g, by differences %.9g", (long long)h, (long long)t, got,
                  expected);
        }
}

static void test_constant_added(int64_t T, int64_t dh) {
    Shape s = {2, T, 2, dh};
    Inputs in(s, true);
    std::vector<double> c = make_gates(RANDOM, 0.3, s);
    Results a(s), b(s);
    in.c.upload(c);
    a.compute(in, NULL);
    for (double& x : c) x -= 123456.75;
    in.c.upload(c);
    b.compute(in, NULL);
    CHECK(same_results(a, b), "T %lld, dh %lld: a constant added to c changes the results", (long long)T,
          (long long)dh);
}

// A reset at token t: nothing flows across it.
static void test_document_reset(int64_t T, int64_t t, int64_t dh) {
    Shape s = {1, T, 2, dh};
    Inputs in(s, true);
    std::vector<double> c((size_t)s.tokens());
    for (int64_t i = 0; i < s.tokens(); i++) c[(size_t)i] = -0.25 * (double)(i % T) - (i % T >= t ? 1000 : 0);
    in.c.upload(c);
    std::vector<bf16> dout = in.dout.read();
    for (int before = 0; before < 2; before++) { // the loss looks at one side
        std::vector<bf16> masked = dout;
        size_t cut = (size_t)(t * s.NH * dh), all = (size_t)s.size();
        for (size_t i = before ? cut : 0; i < (before ? all : cut); i++) masked[i] = (bf16)0.0f;
        in.dout.upload(masked);
        Results a(s);
        a.compute(in, NULL);
        size_t from = before ? cut : 0, to = before ? all : cut;
        CHECK(all_zero(a.dq.read(), from, to) && all_zero(a.dk.read(), from, to) &&
                  all_zero(a.dv.read(), from, to),
              "T %lld, reset at %lld, dh %lld: gradients cross the reset", (long long)T, (long long)t,
              (long long)dh);
        std::vector<float> dc = a.dc.read();
        for (int64_t h = 0; h < s.NH; h++)
            CHECK(all_zero(dc, (size_t)(h * T + (before ? t : 0)), (size_t)(h * T + (before ? T : t))),
                  "T %lld, reset at %lld, dh %lld: dc crosses the reset", (long long)T, (long long)t,
                  (long long)dh);
    }
}

// Blocks whose keys are all 200 or more behind weigh nothing: pruned or not, the same bits.
static void test_pruning(int64_t T, int64_t dh) {
    Shape s = {1, T, 2, dh};
    Inputs in(s, true);
    std::vector<double> c = make_gates(RANDOM, 0.3, s);
    in.c.upload(c);
    int64_t blocks = ceil_div<int64_t>(T, ATTENTION_BLOCK), skipped = 0;
    std::vector<int> first((size_t)(s.heads() * blocks)), last((size_t)(s.heads() * blocks));
    for (int64_t h = 0; h < s.heads(); h++) {
        const double* hc = c.data() + h * T;
        for (int64_t m = 0; m < blocks; m++)
            for (int64_t n = 0; n <= m; n++) {
                bool kept = hc[m * ATTENTION_BLOCK] - hc[std::min(T, (n + 1) * ATTENTION_BLOCK) - 1] > -200;
                if (n == 0) first[h * blocks + m] = -1;
                if (kept && first[h * blocks + m] < 0) first[h * blocks + m] = (int)n;
                if (kept) last[h * blocks + n] = (int)m;
                skipped += !kept;
            }
    }
    CHECK(skipped > 0, "T %lld: nothing to prune", (long long)T);
    Buffer<int> first_key_block((int64_t)first.size()), last_query_block((int64_t)last.size());
    first_key_block.upload(first), last_query_block.upload(last);
    Results a(s), b(s);
    a.compute(in, NULL);
    AttentionBounds bounds = {first_key_block.at, last_query_block.at, NULL};
    b.compute(in, &bounds);
    CHECK(same_results(a, b), "T %lld, dh %lld: pruning weightless blocks changes the results", (long long)T,
          (long long)dh);
}

// More than 2^31 elements a tensor: the last sequence is right, and nothing is left unwritten.
static void test_large(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    Shape s = {B, T, NH, dh}, one = {1, T, NH, dh};
    Inputs in(s, true);
    std::vector<double> c1 = make_gates(RANDOM, 0.3, one);
    for (int64_t b = 0; b < B; b++)
        CUDA_CHECK(
            cudaMemcpy(in.c.at + b * NH * T, c1.data(), c1.size() * sizeof(double), cudaMemcpyHostToDevice));
    Results a(s);
    a.compute(in, NULL);
    int64_t at = s.size() - one.size(), at_token = s.tokens() - one.tokens();
    auto tail = [&](const auto& x, int64_t from) {
        auto y = std::vector<std::decay_t<decltype(*x.at)>>((size_t)(x.n - from));
        CUDA_CHECK(cudaMemcpy(y.data(), x.at + from, y.size() * sizeof y[0], cudaMemcpyDeviceToHost));
        return y;
    };
    check_results("more than 2^31 elements", one, in.dout.at + at, in.q.at + at, in.k.at + at, in.v.at + at,
                  in.c.at + at_token, tail(a.o, at), tail(a.lse, at_token), tail(a.dq, at), tail(a.dk, at),
                  tail(a.dv, at), tail(a.dc, at_token));
}

// ----------------------------------------------------------------------------
// the forget gate

static void test_forget_gate(int64_t B, int64_t T, int64_t NH, double mean, bool with_z) {
    int64_t stride = NH + 5;
    std::vector<bf16> z((size_t)(B * T * stride));
    std::vector<float> bias((size_t)NH), dc((size_t)(B * NH * T)), dbias_before((size_t)NH);
    uint64_t key = hash64(seed ^ (uint64_t)(T * 7 + NH));
    for (size_t i = 0; i < z.size(); i++) z[i] = (bf16)(float)(mean + 2 * normal(key, i));
    if (T > 10) z[3 * (size_t)stride] = (bf16)-3e4f, z[7 * (size_t)stride] = (bf16)3e4f;
    for (size_t i = 0; i < bias.size(); i++) bias[i] = (float)normal(key + 1, i), dbias_before[i] = (float)i;
    for (size_t i = 0; i < dc.size(); i++) dc[i] = (float)normal(key + 2, i);
    Buffer<bf16> device_z((int64_t)z.size()), dz((int64_t)z.size()), dz_again((int64_t)z.size());
    Buffer<float> device_bias(NH), device_dc((int64_t)dc.size()), dbias(NH), dbias_again(NH);
    Buffer<double> c(B * NH * T);
    Buffer<char> scratch((int64_t)forget_gate_scratch_bytes(B, T, NH));
    device_z.upload(z), device_bias.upload(bias), device_dc.upload(dc);
    dbias.upload(dbias_before), dbias_again.upload(dbias_before);
    const bf16* zp = with_z ? device_z.at : NULL;
    forget_gate_forward(c.at, zp, device_bias.at, scratch.at, B, T, NH, stride, 0);
    forget_gate_backward(with_z ? dz.at : NULL, dbias.at, device_dc.at, zp, device_bias.at, scratch.at, B, T,
                         NH, stride, 0);
    forget_gate_backward(with_z ? dz_again.at : NULL, dbias_again.at, device_dc.at, zp, device_bias.at,
                         scratch.at, B, T, NH, stride, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    CHECK(same_bits(dz, dz_again) && same_bits(dbias, dbias_again), "forget gate: two runs differ");

    std::vector<double> got_c = c.read(), dbias_sum((size_t)NH);
    std::vector<bf16> got_dz = dz.read();
    std::vector<float> got_dbias = dbias.read();
    double c_error = 0, dz_error = 0, dz_size = 0, dbias_size = 0;
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            double sum = 0, dlogf = 0;
            auto logit = [&](int64_t t) {
                return (double)((with_z ? (float)z[(size_t)((b * T + t) * stride + h)] : 0.0f) +
                                bias[(size_t)h]);
            };
            for (int64_t t = 0; t < T; t++) {
                sum += fmin(logit(t), 0) - log1p(exp(-fabs(logit(t))));
                c_error =
                    fmax(c_error, fabs(got_c[(size_t)((b * NH + h) * T + t)] - sum) / (fabs(sum) + 1e-6));
            }
            for (int64_t t = T - 1; t >= 0; t--) {
                dlogf += dc[(size_t)((b * NH + h) * T + t)];
                double d = dlogf / (1 + exp(logit(t)));
                dbias_sum[(size_t)h] += d, dbias_size += d * d;
                double e = (double)(float)got_dz[(size_t)((b * T + t) * stride + h)] - d;
                dz_error += e * e, dz_size += d * d;
            }
        }
    CHECK(c_error <= 1e-6, "forget gate, T %lld: c is off by %.3g", (long long)T, c_error);
    if (with_z)
        CHECK(sqrt(dz_error / dz_size) <= 3e-3, "forget gate, T %lld: dz is off by %.3g", (long long)T,
              sqrt(dz_error / dz_size));
    for (int64_t h = 0; h < NH; h++)
        CHECK(fabs(got_dbias[(size_t)h] - dbias_before[(size_t)h] - dbias_sum[(size_t)h]) <=
                  1e-5 * (fabs(dbias_sum[(size_t)h]) + sqrt(dbias_size)),
              "forget gate, T %lld: dbias is %.9g, not %.9g", (long long)T, got_dbias[(size_t)h],
              dbias_before[(size_t)h] + dbias_sum[(size_t)h]);
    uint16_t untouched = 0;
    for (size_t i = 0; i < got_dz.size(); i++) {
        memcpy(&untouched, &got_dz[i], sizeof untouched);
        if ((!with_z || (int64_t)i % stride >= NH) && untouched != 0xffff) break;
    }
    CHECK(!with_z || NH == stride || untouched == 0xffff, "forget gate: wrote outside its columns");
}

// ----------------------------------------------------------------------------

// A few short ones, for compute-sanitizer
static void test_quick(void) {
    test_forget_gate(1, 300, 2, 0.3, true);
    for (int64_t dh : {64, 128}) {
        test_case("gates 0.3", RANDOM, 0.3, 1, 450, 1, dh);
        test_case("no gate", NO_GATE, 0, 1, 193, 1, dh);
    }
}

static void test_attention(int64_t longest) {
    printf("%s\n", on_sm80 ? "mma.sync kernels (sm_80)" : attention_path());
    printf("relative error of each tensor's worst head, and times that of plain bf16\n");
    printf("%-34s  o              dq             dk             dv             dlogf          lse\n", "");
    for (int64_t dh : {64, 128}) {
        test_oracle(dh);
        for (int64_t T : {1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 4097})
            if (T <= longest) {
                int64_t B = T < 64 ? 32 : 2;
                test_case("gates 0.3", RANDOM, 0.3, B, T, 3, dh);
                test_case("no gate", NO_GATE, 0, B, T, 3, dh);
            }
        int64_t T = std::min<int64_t>(longest, 1500);
        test_case("open gates", OPEN, 0, 1, T, 32, dh);
        test_case("one cut", ONE_CUT, 4, 1, T, 2, dh);
        test_case("all cut", ALL_CUT, 0, 1, T, 2, dh);
        test_case("alternating", ALTERNATING, 0, 1, T, 2, dh);
        test_case("dead head", DEAD_HEAD, 2, 1, T, 2, dh);
        test_constant_added(T, dh);
        for (int64_t t : {1, 63, 64, 128, 200})
            if (t < T) test_document_reset(T, t, dh);
        if (longest >= 700) test_pruning(std::min<int64_t>(longest, 3000), dh);
    }
    for (double mean : {4.0, 0.3, -1.0}) {
        char what[32];
        snprintf(what, sizeof what, "gates %g", mean);
        for (int64_t T : {8192, 32768})
            if (T <= longest) test_case(what, RANDOM, mean, 1, T, 2, 64);
        if (longest >= 8192) test_case(what, RANDOM, mean, 1, 8192, 1, 128);
    }
    if (longest >= 65536) {
        test_case("gates 8", RANDOM, 8, 1, 65536, 1, 64);
        test_case("gates 0.3", RANDOM, 0.3, 1, 65536, 1, 128);
        test_case("no gate", NO_GATE, 0, 1, 65536, 1, 64);
        test_large(8200, 257, 16, 64);
    }
}

// The same bits a hundred times, under gates of all kinds.
static void test_races(int64_t T, int64_t dh) {
    Shape s = {1, T, 4, dh};
    Inputs in(s, true);
    const GateKind kinds[] = {RANDOM, OPEN, ONE_CUT, ALTERNATING, DEAD_HEAD};
    for (GateKind kind : kinds) {
        in.c.upload(make_gates(kind, 2, s));
        Results a(s), b(s);
        a.compute(in, NULL);
        for (int run = 0; run < 20; run++) {
            b.compute(in, NULL);
            CHECK(same_results(a, b), "T %lld, dh %lld, gates %d: run %d differs", (long long)T,
                  (long long)dh, (int)kind, run);
        }
    }
}

int main(int argc, char** argv) {
    bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    int64_t longest = argc > 1 && !quick ? strtoll(argv[1], NULL, 0) : INT64_MAX;
    uint64_t number = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
    seed = hash64(number);
    printf("seed %llu\n", (unsigned long long)number);
    if (quick) {
        test_quick();
        return test_report();
    }
    for (int64_t T : {1, 2, 31, 255, 256, 257, 4097, 65536})
        if (T <= longest) {
            test_forget_gate(2, T, 3, T % 2 ? 0.3 : 4, true);
            test_forget_gate(2, T, 3, 0, false);
        }

    test_attention(longest);
    for (int64_t dh : {64, 128})
        if (longest >= 4096) test_races(4096, dh);
    if (attention_runs_sm90()) {
        on_sm80 = true;
        test_attention(longest);
    }
    return test_report();
}
