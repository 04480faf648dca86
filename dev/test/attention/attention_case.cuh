/*
A case of attention on the GPU: random inputs, the kernels' results, and their comparison with the oracle's.
For test_attention.
*/
#pragma once

#include <algorithm>
#include "attention_oracle.cuh"

// ----------------------------------------------------------------------------
// a case: inputs, the kernels' results, the oracle's

struct Inputs {
    Shape s;
    Buffer<bf16> q, k, v, dout;
    Buffer<double> cum_logf;
    bool gate;
    Inputs(const Shape& s, bool gate)
        : s(s), q((size_t)s.size()), k(q.n), v(q.n), dout(q.n), cum_logf(gate ? (size_t)s.tokens() : 0),
          gate(gate) {
        fill_normal(q), fill_normal(k), fill_normal(v), fill_normal(dout);
    }
    OracleTensors tensors() const { return {dout, q, k, v, NULL, NULL, gate ? cum_logf.p : NULL, false}; }
};

static bool on_sm80;              // test the sm_80 kernels, whatever the GPU,
static bool narrow;               // with narrow tiles in the backward pass
static bool deterministic = true; // the backward pass

template <int DH, bool GATE, bool WINDOW>
static void backward_narrow(const AttentionBackward* a, const HeadShape* s, cudaStream_t stream) {
    sm80_backward<DH, 32, GATE, WINDOW>(a, s, stream);
}

struct Results {
    Buffer<bf16> o, dq, dk, dv;
    Buffer<float> lse, dcum_logf;
    Buffer<char> scratch;
    explicit Results(const Shape& s)
        : o((size_t)s.size()), dq(o.n), dk(o.n), dv(o.n), lse((size_t)s.tokens()), dcum_logf(lse.n),
          scratch(bytes(s)) {}
    static size_t bytes(const Shape& s) {
        HeadShape shape = s.head_shape();
        return attention_scratch_bytes(&shape, true);
    }
    void queue(const Inputs& in, const AttentionBounds* bounds) {
        HeadShape shape = in.s.head_shape();
        const double* cum_logf = in.gate ? in.cum_logf.p : NULL;
        AttentionForward forward = {o, lse, in.q, in.k, in.v, cum_logf, bounds, scratch};
        AttentionBackward backward = {};
        backward.dq = dq, backward.dk = dk, backward.dv = dv;
        backward.dcum_logf = in.gate ? dcum_logf.p : NULL;
        backward.dout = in.dout, backward.q = in.q, backward.k = in.k, backward.v = in.v;
        backward.o = o, backward.lse = lse, backward.cum_logf = cum_logf;
        backward.bounds = bounds, backward.deterministic = deterministic, backward.scratch = scratch;
        if (on_sm80) {
            backward.delta = (float*)scratch.p;
            ATTENTION_DISPATCH(attention_forward_sm80, &forward, &shape, 0);
            attention_delta((float*)scratch.p, in.dout, o, &shape, 0);
            if (narrow)
                ATTENTION_DISPATCH(backward_narrow, &backward, &shape, 0);
            else
                ATTENTION_DISPATCH(attention_backward_sm80, &backward, &shape, 0);
        } else {
            attention_forward(&forward, &shape, 0);
            attention_backward(&backward, &shape, 0);
        }
    }
    void compute(const Inputs& in, const AttentionBounds* bounds) {
        queue(in, bounds);
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};

// Results on the host
struct HostResults {
    vector<bf16> o, dq, dk, dv;
    vector<float> lse, dcum_logf;
    HostResults(const Results& r, size_t first, size_t first_token) // from those elements to the end
        : o(r.o.host(first)), dq(r.dq.host(first)), dk(r.dk.host(first)), dv(r.dv.host(first)),
          lse(r.lse.host(first_token)), dcum_logf(r.dcum_logf.host(first_token)) {}
};

template <class T> static bool same_bits(const Buffer<T>& a, const Buffer<T>& b) {
    return same_bits(a.host(), b.host());
}
static bool same_results(const Results& a, const Results& b) {
    return same_bits(a.o, b.o) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) &&
           same_bits(a.dv, b.dv) && same_bits(a.dcum_logf, b.dcum_logf);
}

template <class T> static bool all_zero(const vector<T>& x, size_t from, size_t to) {
    return std::all_of(x.begin() + (ptrdiff_t)from, x.begin() + (ptrdiff_t)to,
                       [](T y) { return (double)y == 0; });
}

// dlogf_t = dcum_logf_t + ... + dcum_logf_{T-1}, rounded to float first
template <class T> static vector<double> suffix_sums(const vector<T>& dcum_logf, const Shape& s) {
    vector<double> sums(dcum_logf.size());
    for (int64_t h = 0; h < s.heads(); h++) {
        double sum = 0;
        for (int64_t t = s.T - 1; t >= 0; t--) {
            size_t at = (size_t)(h * s.T + t);
            sums[at] = sum += (double)(float)dcum_logf[at];
        }
    }
    return sums;
}

// Root mean square error of the worst head, relative to the tensor and to the error of plain bf16
struct TensorError {
    double relative, times_plain;
};

// What a tensor is compared with, and its largest relative error
struct Expected {
    vector<double> exact, plain;
    double limit;
};

// per_token: x is [B, NH, T], else [B, T, NH, dh]
template <class T>
static TensorError check_tensor(const char* name, const char* what, const vector<T>& x,
                                const Expected& expected, const Shape& s, bool per_token) {
    const vector<double>&exact = expected.exact, &plain = expected.plain;
    TensorError worst = {0, 0};
    double error = 0, plain_error = 0, size = 0;
    int64_t n = 0;
    // With few tokens, or with gates that forget nothing, where dlogf is a slow random walk, one head has too
    // few independent numbers for a ratio of errors to be meaningful: then all heads are taken together.
    bool together = s.T <= 64 || s.NH >= 16;
    for (int64_t head = 0; head < s.heads(); head++) {
        for (int64_t i = 0; i < (per_token ? s.T : s.T * s.dh); i++, n++) {
            int64_t at = per_token ? head * s.T + i
                                   : ((head / s.NH * s.T + i / s.dh) * s.NH + head % s.NH) * s.dh + i % s.dh;
            double e = (double)(float)x[(size_t)at] - exact[(size_t)at],
                   p = plain[(size_t)at] - exact[(size_t)at];
            error += e * e, plain_error += p * p, size += exact[(size_t)at] * exact[(size_t)at];
        }
        if (together && head + 1 < s.heads()) continue;
        error = sqrt(error / (double)n), plain_error = sqrt(plain_error / (double)n),
        size = sqrt(size / (double)n);
        // 2e-5 is far below every tensor's size, except where it is zero in exact arithmetic
        CHECK(error <= 2 * plain_error + 2e-5, "%s: %s, head %lld: error %.3g, plain bf16 %.3g, size %.3g",
              name, what, (long long)head, error, plain_error, size);
        if (size >= 1e-3) {
            CHECK(error <= expected.limit * size, "%s: %s, head %lld: relative error %.3g > %.3g", name, what,
                  (long long)head, error / size, expected.limit);
            worst.relative = fmax(worst.relative, error / size);
            worst.times_plain = fmax(worst.times_plain, error / (plain_error + 1e-6));
        }
        error = plain_error = size = 0, n = 0;
    }
    return worst;
}

static void check_results(const char* name, const Shape& s, OracleTensors in, const HostResults& r) {
    Oracle exact(s), plain(s);
    exact.compute(s, in);
    in.plain_bf16 = true;
    plain.compute(s, in);
    TensorError e[5] = {};
    e[0] = check_tensor(name, "o", r.o, {exact.o.host(), plain.o.host(), 6e-3}, s, false);
    e[1] = check_tensor(name, "dq", r.dq, {exact.dq.host(), plain.dq.host(), 1e-2}, s, false);
    e[2] = check_tensor(name, "dk", r.dk, {exact.dk.host(), plain.dk.host(), 1e-2}, s, false);
    e[3] = check_tensor(name, "dv", r.dv, {exact.dv.host(), plain.dv.host(), 6e-3}, s, false);
    vector<double> exact_lse = exact.lse.host();
    double lse_error = 0;
    for (size_t i = 0; i < r.lse.size(); i++) lse_error = worse(lse_error, fabs(r.lse[i] - exact_lse[i]));
    CHECK(lse_error <= 3e-5, "%s: lse is off by %.3g", name, lse_error);
    if (in.cum_logf)
        e[4] = check_tensor(
            name, "dlogf", suffix_sums(r.dcum_logf, s),
            {suffix_sums(exact.dcum_logf.host(), s), suffix_sums(plain.dcum_logf.host(), s), 1e-2}, s, true);
    printf("%-34s", name);
    for (int i = 0; i < 5; i++) printf("  %7.1e x%4.2f", e[i].relative, e[i].times_plain);
    printf("  %7.1e\n", lse_error);
}

// BANDS: heads 0, 1, 2 of every four are band heads (pruning.cuh), the first two with open gates but for
// walls between pairs of blocks of 64; the fourth is as RANDOM.
typedef enum { NO_GATE, OPEN, RANDOM, ONE_CUT, ALL_CUT, ALTERNATING, DEAD_HEAD, BANDS } GateKind;

// cum_logf [B, NH, T] of random gates whose logits have the given mean. Log gates are multiples of 2^-20, so
// that every sum is exact.
static vector<double> make_gates(GateKind kind, double mean, const Shape& s) {
    vector<double> cum_logf((size_t)s.tokens());
    uint64_t key = hash64(seed ^ (uint64_t)(s.T * 31 + kind));
    for (int64_t head = 0; head < s.heads(); head++) {
        double sum = 0;
        for (int64_t t = 0; t < s.T; t++) {
            double logf = -log1p(exp(-(mean + normal(key, (uint64_t)(head * s.T + t)))));
            if (kind == OPEN) logf = 0;
            if (kind == ONE_CUT && t == s.T / 3) logf = -1000;
            if (kind == ALL_CUT || (kind == DEAD_HEAD && head == 0)) logf = -1000;
            if (kind == ALTERNATING) logf = t % 2 ? -5 : 0;
            if (kind == BANDS && head % 4 < 2) logf = t % 128 == 64 * head % 128 ? -1000 : -0.01;
            if (kind == BANDS && head % 4 == 2) logf = fmin(5 * logf, -1);
            sum += round(logf * 1048576) / 1048576;
            cum_logf[(size_t)(head * s.T + t)] = sum;
        }
    }
    return cum_logf;
}

// All scores lie near -offset^2 sqrt(dh).
static void check_case(const char* what, GateKind kind, double mean, const Shape& s, float offset = 0) {
    char name[128];
    int n = snprintf(name, sizeof name, "%lldx%lld dh %lld T %lld %s", (long long)s.B, (long long)s.NH,
                     (long long)s.dh, (long long)s.T, what);
    if (s.window) snprintf(name + n, sizeof name - (size_t)n, ", W %lld", (long long)s.window);
    Inputs in(s, kind != NO_GATE);
    if (in.gate) in.cum_logf = make_gates(kind, mean, s);
    if (offset != 0) shift(in.q, offset), shift(in.k, -offset);
    Results a(s), b(s);
    a.compute(in, NULL);
    b.compute(in, NULL);
    CHECK(same_results(a, b), "%s: two runs differ", name);
    HostResults results(a, 0, 0);
    check_results(name, s, in.tensors(), results);
    if (on_sm80) { // tiles of both widths are summed in the same order
        narrow = true;
        b.compute(in, NULL);
        narrow = false;
        CHECK(same_results(a, b), "%s: narrow tiles give other bits", name);
    }
    if (attention_runs_sm90() && !on_sm80) {
        deterministic = false;
        b.compute(in, NULL);
        deterministic = true;
        check_results("  not deterministic", s, in.tensors(), HostResults(b, 0, 0));
    }

    if (kind == ALL_CUT) { // every token attends to itself only
        CHECK(same_bits(a.o, in.v), "%s: o is not v", name);
        CHECK(same_bits(a.dv, in.dout), "%s: dv is not dout", name);
    }
    if (in.gate) { // the first gate has no gradient: it is in cum_logf of every token
        vector<double> dlogf = suffix_sums(results.dcum_logf, s);
        for (int64_t h = 0; h < s.heads(); h++) {
            const double* head = dlogf.data() + h * s.T;
            double size = 0;
            for (int64_t t = 0; t < s.T; t++) size += head[t] * head[t];
            size = sqrt(size / (double)s.T);
            CHECK(fabs(head[0]) <= 1e-3 * size + 1e-4, "%s: dlogf[0] is %.3g, the head's size %.3g", name,
                  head[0], size);
        }
    }
}
