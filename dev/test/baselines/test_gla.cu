/*
Tests llmc/baselines/hgrn2/gla.cuh against the recurrence in double. An output or gradient may have at
most twice the error of a plain bf16 implementation (gla_oracle.cuh).

    test_gla [quick] [SEED]     quick: small shapes, for compute-sanitizer
*/
#include "../../../llmc/baselines/hgrn2/gla_step.cuh"
#include "../../../llmc/baselines/hgrn2/gla.cuh"
#include "gla_oracle.cuh"

// Decays: f~ = mean + spread normal; `steps`: the mean falls by channel from 12 to -30; `resets`: one token
// in 50 has f~ = -70
struct Decays {
    const char* name;
    double mean, spread;
    bool steps, resets;
};
static const Decays decays[] = {{"f 0.5", 0, 1, false, false},
                                {"f 0.997", 6, 1, false, false},
                                {"f e^-30", -30, 1, false, false},
                                {"f by channel", 0, 1, true, false},
                                {"resets", 5, 1, false, true}};

// The tensors of a case on the device: rows of the projection and of its gradient [B T, 3 d]
struct Case {
    Shape s;
    Inputs in;
    Buffer<bf16> proj, dproj, o, dout;
    Buffer<float> bound, dbound, state;
    Buffer<char> saved, scratch;

    static vector<bf16> draw_gates(const Shape& s, const Decays& x) {
        vector<bf16> f = draw<bf16>((size_t)(s.rows() * s.d()), x.spread, x.mean);
        for (int64_t i = 0; i < (int64_t)f.size(); i++) {
            if (x.steps) f[(size_t)i] = (bf16)((float)f[(size_t)i] + 12 - 42 * (float)(i % K) / (K - 1));
            if (x.resets && random_normal(2, seed, (uint64_t)(i / K)) > 2) f[(size_t)i] = (bf16)-70.0f;
        }
        return f;
    }
    GlaShape shape() const { return shape_of(s); }
    static GlaShape shape_of(const Shape& s) {
        return {s.B, s.T, s.NH, 3 * s.d(), (float)(1 / sqrt((double)K))};
    }
    static size_t saved_bytes(const Shape& s) {
        GlaShape shape = shape_of(s);
        return gla_saved_bytes(&shape);
    }
    static size_t scratch_bytes(const Shape& s) {
        GlaShape shape = shape_of(s);
        return gla_scratch_bytes(&shape, true);
    }

    Case(const Shape& shape, const Decays& x, bool with_state)
        : s(shape), proj((size_t)(s.rows() * 3 * s.d())), dproj(proj.n), o(proj.n / 3), dout(o.n),
          bound((size_t)s.d()), dbound(bound.n), state(with_state ? (size_t)(s.B * s.NH * K * K) : 0),
          saved(saved_bytes(s)), scratch(scratch_bytes(s)) {
        size_t n = o.n, d = (size_t)s.d();
        vector<bf16> q = draw<bf16>(n, 1), f = draw_gates(s, x), v = draw<bf16>(n, 1), g = draw<bf16>(n, 1),
                     rows(3 * n);
        vector<float> low(d), first = draw<float>(state.n, 0.5);
        for (size_t i = 0; i < n; i++) {
            bf16* row = &rows[i / d * 3 * d + i % d];
            row[0] = q[i], row[d] = f[i], row[2 * d] = v[i];
        }
        for (size_t i = 0; i < d; i++) low[i] = (float)(i % 7 + 1) / 8;
        in = {doubles(q), doubles(f), doubles(v), doubles(g), doubles(low), doubles(first)};
        proj = rows, dout = g, bound = low;
        if (state.n) state = first;
        snprintf(test_case, sizeof test_case, "B %lld, T %lld, NH %lld, %s%s", (long long)s.B, (long long)s.T,
                 (long long)s.NH, x.name, s.bound ? ", bound" : "");
    }

    Gla gla() const {
        const bf16* q = proj;
        return {q,     q + s.d(), q + 2 * s.d(), s.bound ? bound.p : NULL, state.n ? state.p : NULL,
                saved, scratch};
    }
    void forward(cudaStream_t stream = 0) {
        Gla x = gla();
        GlaShape shape_ = shape();
        gla_forward(o, &x, &shape_, stream);
    }
    void backward(cudaStream_t stream = 0, bool recomputes = false) {
        Gla x = gla();
        GlaShape shape_ = shape();
        GlaBackward g = {dproj, dproj + s.d(), dproj + 2 * s.d(), s.bound ? dbound.p : NULL,
                         dout,  recomputes};
        gla_backward(&g, &x, &shape_, stream);
    }
    // Columns of dproj: 0 of q, 1 of f, 2 of v
    vector<double> gradient(int part) const {
        vector<bf16> all = dproj.host();
        vector<double> x(o.n);
        size_t d = (size_t)s.d();
        for (size_t i = 0; i < x.size(); i++) x[i] = value(all[i / d * 3 * d + part * d + i % d]);
        return x;
    }
};

// Twice the plain error, three times that of few values, of which one decides; and what fp32 loses where
// terms cancel
static void check_tensor(const char* name, const vector<double>& got, const vector<double>& want,
                         const vector<double>& plain_values, const vector<double>* terms = NULL) {
    double error = relative_error(got, want), plain_error = relative_error(plain_values, want), floor = 0;
    if (terms) {
        double a = 0, b = 1e-300;
        for (size_t i = 0; i < want.size(); i++) a += (*terms)[i] * (*terms)[i], b += want[i] * want[i];
        floor = FP32_LIMIT * sqrt(a / b);
    }
    double times = want.size() < 1000 ? 3 : 2, limit = times * plain_error + floor;
    CHECK(error <= limit, "%s, %s: relative error %.3g, plain bf16's %.3g", test_case, name, error,
          plain_error);
    char kind[64];
    static vector<char*> kinds; // noted() keeps the pointer
    snprintf(kind, sizeof kind, "%s over plain", name);
    for (char* k : kinds)
        if (strcmp(k, kind) == 0) return (void)noted(k, error / limit * 2, 2);
    kinds.push_back(strdup(kind));
    noted(kinds.back(), error / limit * 2, 2);
}

static void test_scan(const Shape& s, const Decays& x) {
    Case c(s, x, false);
    c.forward();
    c.backward();
    Results want = expected(s, c.in, true), base = plain(s, c.in);
    check_tensor("o", doubles(c.o.host()), want.o, base.o);
    check_tensor("dv", c.gradient(2), want.dv, base.dv);
    check_tensor("dq", c.gradient(0), want.dq, base.dq);
    check_tensor("df", c.gradient(1), want.df, base.df, &want.terms);
    if (s.bound) check_tensor("dbound", doubles(c.dbound.host()), want.dbound, base.dbound, &want.dbound);
    if (s.T == 1) return;

    // The same bits in a second run, from a CUDA graph
    vector<bf16> o = c.o.host(), dproj = c.dproj.host();
    c.o.poison(), c.dproj.poison(), c.saved.poison(), c.scratch.poison();
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    c.forward(stream), c.backward(stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaGraphLaunch(executable, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CHECK(same_bits(o, c.o.host()), "%s: o differs in a second run", test_case);
    CHECK(same_bits(dproj, c.dproj.host()), "%s: gradients differ in a second run", test_case);
    c.dproj.poison(), c.saved.poison(), c.scratch.poison();
    CUDA_CHECK(cudaDeviceSynchronize());
    c.backward(stream, true);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CHECK(same_bits(dproj, c.dproj.host()), "%s: gradients differ without what was saved", test_case);
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaStreamDestroy(stream));
}

// Packed documents, the last one from `wall` on and before it as many of `length` tokens as fit, are what
// each of them is alone.
static void test_documents(const Shape& s, const Decays& x, int64_t length, int64_t wall) {
    Case c(s, x, false), alone(s, x, false);
    vector<int32_t> starts;
    for (int64_t i = 0; i < s.rows(); i++) {
        int64_t t = i % s.T;
        starts.push_back((int32_t)(t >= wall ? wall : t / length * length));
    }
    Buffer<int32_t> doc_start(starts);
    Gla packed = c.gla();
    GlaShape shape = c.shape();
    int64_t d = s.d();
    auto backward = [&](Case& of, const Gla& in, const GlaShape& size, int64_t row) {
        bf16* to = of.dproj + row * 3 * d;
        GlaBackward g = {to, to + d, to + 2 * d, NULL, c.dout + row * d, false};
        gla_backward(&g, &in, &size, 0);
    };
    packed.doc_start = doc_start;
    gla_forward(c.o, &packed, &shape, 0);
    backward(c, packed, shape, 0);
    for (int64_t begin = 0, end; begin < s.rows(); begin = end) {
        for (end = begin + 1; end < s.rows() && starts[(size_t)end] != end % s.T;) end++;
        Gla one = c.gla();
        GlaShape size = {1, end - begin, s.NH, 3 * d, shape.scale};
        one.q += begin * 3 * d, one.f += begin * 3 * d, one.v += begin * 3 * d;
        one.saved = alone.saved, one.scratch = alone.scratch;
        gla_forward(alone.o + begin * d, &one, &size, 0);
        backward(alone, one, size, begin);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    snprintf(test_case, sizeof test_case, "T %lld, %s%s, documents of %lld, then from %lld", (long long)s.T,
             x.name, s.bound ? ", bound" : "", (long long)length, (long long)wall);
    const double limit = 1.5e-2; // bf16 operands, of tokens that are assigned otherwise to chunks
    check_close("packed o", doubles(alone.o.host()), doubles(c.o.host()), limit);
    const char* const names[] = {"packed dq", "packed df", "packed dv"};
    for (int part = 0; part < 3; part++) {
        if (part == 1 && x.mean < -20) continue; // df is 0 but for rounding
        check_close(names[part], alone.gradient(part), c.gradient(part), limit);
    }
}

// Passes over fewer or shorter sequences fit into the memory of larger ones.
static void test_memory(void) {
    for (bool backward : {false, true})
        for (int64_t B = 2; B < 48; B++)
            for (int64_t T = 128; T < 4096; T += 64) {
                GlaShape shape = {B, T, 12, 3 * 12 * K, 1}, fewer = shape, shorter = shape;
                fewer.B--, shorter.T -= 64;
                for (const GlaShape* s : {&fewer, &shorter})
                    CHECK(gla_saved_bytes(s) <= gla_saved_bytes(&shape) &&
                              gla_scratch_bytes(s, backward) <= gla_scratch_bytes(&shape, backward),
                          "%lld sequences of %lld tokens need more memory than %lld of %lld", (long long)s->B,
                          (long long)s->T, (long long)B, (long long)T);
            }
}

typedef struct {
    int begin, end, slot, position;
} Rows;

// Sequences that begin with a state, which is updated; then one token of each by gla_step.
static void test_state(const Shape& s, const Decays& x) {
    Case c(s, x, true);
    c.forward();
    Results want = expected(s, c.in, false);
    double limit = 6e-3; // q, state and scores as bf16 operands, and o
    check_close("o from a state", want.o, doubles(c.o.host()), limit);
    check_close("state", want.state, c.state, limit);

    // Slots in reverse order; of the last sequence the state is not read, as it begins here; the sequence
    // with two rows is left alone
    int64_t size = s.NH * K * K;
    Shape one = {s.B, 1, s.NH, s.bound};
    Case next(one, x, false);
    next.in.state = doubles(c.state.host());
    std::fill_n(&next.in.state[(size_t)((s.B - 1) * size)], size, 0);
    vector<Rows> sequences = {{0, 2, (int)s.B, 5}};
    vector<float> states((size_t)((s.B + 1) * size), 0.25f);
    for (int64_t b = 0; b < s.B; b++) {
        sequences.push_back({(int)b, (int)b + 1, (int)(s.B - 1 - b), b + 1 < s.B});
        for (int64_t i = 0; i < size; i++)
            states[(size_t)((s.B - 1 - b) * size + i)] =
                b + 1 < s.B ? (float)next.in.state[(size_t)(b * size + i)] : NAN;
    }
    Buffer<float> device(states);
    Buffer<Rows> device_sequences(sequences);
    Gla in = next.gla();
    GlaStep step = {in.q, in.f, in.v, in.bound, device, 3 * s.d(), (int)s.NH, next.shape().scale};
    gla_step(next.o, &step, device_sequences.p, s.B + 1, 0);
    want = expected(one, next.in, false);
    check_bf16("o of a step", want.o, doubles(next.o.host()));
    states = device.host();
    vector<double> got;
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t i = 0; i < size; i++) got.push_back(states[(size_t)((s.B - 1 - b) * size + i)]);
    check_close("state of a step", want.state, got, FP32_LIMIT);
    bool untouched = true;
    for (int64_t i = 0; i < size; i++) untouched &= states[(size_t)(s.B * size + i)] == 0.25f;
    CHECK(untouched, "%s: a step of a sequence with two rows", test_case);
}

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    test_memory();
    for (int64_t T : {1, 2, 15, 16, 17, 64, 65, 130})
        for (const Decays& x : decays) {
            if (quick && T != 17 && T != 130) continue;
            test_scan({1, T, 1, false}, x);
            if (T == 130) test_scan({2, T, 3, true}, x);
        }
    for (const Decays& x : decays)
        for (int64_t length : {1, 7, 16, 40, 64, 100})
            for (int64_t wall : {1, 63, 64, 65, 150}) {
                if (quick && (length != 40 || wall != 65)) continue;
                test_documents({2, 200, 2, length == 40}, x, length, wall);
            }
    for (const Decays& x : decays) test_state({3, quick ? 70 : 700, 2, x.steps}, x);
    if (!quick) {
        for (const Decays& x : decays) test_scan({2, 1000, 3, false}, x);
        test_scan({1, 4097, 12, true}, decays[3]);
        test_scan({1, 65536, 1, false}, decays[1]);
        test_scan({1, 65536, 1, false}, decays[3]);
        test_state({1, 1, 1, false}, decays[0]);
        test_state({40, 63, 1, true}, decays[4]);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
