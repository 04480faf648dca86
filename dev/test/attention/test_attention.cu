/*
llmc/attention/attention.cuh and llmc/layers/forget_gate.cuh against the formulas in double.

A kernel passes if its root mean square error is at most twice that of a plain bf16 implementation, in every
tensor and every head. On Hopper this is checked for the sm_90 and the sm_80 kernels. Inputs are random, new
in every run unless a seed is given.

    test_attention                     everything: about 35 seconds and 36 GB on an H100
    test_attention LONGEST [SEED]      sequences up to that length
    test_attention quick [SEED]        a few short ones, for compute-sanitizer
*/
#include "../../../llmc/layers/forget_gate.cuh"
#include "attention_case.cuh"
#include "attention_grouped.cuh"
#include "attention_million.cuh"
// ----------------------------------------------------------------------------
// invariants

// The oracle's gate gradient against central differences of the loss sum(o dout).
static void test_oracle(int64_t dh) {
    Shape s = {1, 37, 2, dh};
    Inputs in(s, true);
    vector<double> cum_logf = make_gates(RANDOM, 0.3, s);
    in.cum_logf = cum_logf;
    Oracle oracle(s);
    oracle.compute(s, in.tensors());
    vector<double> dlogf = oracle.dcum_logf.host();
    for (int64_t h = 0; h < s.NH; h++)
        for (int64_t t = s.T - 2; t >= 0; t--)
            dlogf[(size_t)(h * s.T + t)] += dlogf[(size_t)(h * s.T + t + 1)];
    vector<bf16> dout = in.dout.host();
    const double step = 1e-4;
    for (int64_t h = 0; h < s.NH; h++)
        for (int64_t t = 0; t < s.T; t++) {
            double loss[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                vector<double> shifted = cum_logf;
                for (int64_t i = t; i < s.T; i++) shifted[(size_t)(h * s.T + i)] += side ? step : -step;
                in.cum_logf = shifted;
                oracle.forward(s, in.tensors());
                vector<double> o = oracle.o.host();
                for (size_t i = 0; i < o.size(); i++) loss[side] += o[i] * (double)(float)dout[i];
            }
            double expected = (loss[1] - loss[0]) / (2 * step), got = dlogf[(size_t)(h * s.T + t)];
            CHECK(fabs(got - expected) <= 1e-6 * (1 + fabs(expected)),
                  "oracle: dlogf[%lld][%lld] is %.9g, by differences %.9g", (long long)h, (long long)t, got,
                  expected);
        }
}

// Attention depends on differences of cum_logf only.
static void test_constant_added(int64_t T, int64_t dh) {
    Shape s = {2, T, 2, dh};
    Inputs in(s, true);
    vector<double> cum_logf = make_gates(RANDOM, 0.3, s);
    Results a(s), b(s);
    in.cum_logf = cum_logf;
    a.compute(in, NULL);
    for (double& x : cum_logf) x -= 123456.75;
    in.cum_logf = cum_logf;
    b.compute(in, NULL);
    CHECK(same_results(a, b), "T %lld, dh %lld: a constant added to cum_logf changes the results",
          (long long)T, (long long)dh);
}

// Where a new document starts at token t, no gradient crosses it. by: of q and k. With 30 many scores of the
// document before are above a row's own by more than 1,000.
static void test_document_reset(int64_t T, int64_t t, int64_t dh, double by) {
    Shape s = {1, T, 2, dh};
    Inputs in(s, true);
    vector<double> cum_logf((size_t)s.tokens());
    for (int64_t i = 0; i < s.tokens(); i++)
        cum_logf[(size_t)i] = -0.25 * (double)(i % T) + (i % T >= t ? WALL_LOGF : 0);
    for (Buffer<bf16>* x : {&in.q, &in.k}) {
        vector<bf16> scaled = x->host();
        for (bf16& y : scaled) y = rounded<bf16>(by * value(y));
        *x = scaled;
    }
    in.cum_logf = cum_logf;
    vector<bf16> dout = in.dout.host();
    for (int before = 0; before < 2; before++) { // the loss depends on one document only
        vector<bf16> masked = dout;
        size_t cut = (size_t)(t * s.NH * dh), all = (size_t)s.size();
        for (size_t i = before ? cut : 0; i < (before ? all : cut); i++) masked[i] = (bf16)0.0f;
        in.dout = masked;
        Results a(s);
        a.compute(in, NULL);
        size_t from = before ? cut : 0, to = before ? all : cut;
        CHECK(all_zero(a.dq.host(), from, to) && all_zero(a.dk.host(), from, to) &&
                  all_zero(a.dv.host(), from, to),
              "T %lld, reset at %lld, dh %lld: gradients cross the reset", (long long)T, (long long)t,
              (long long)dh);
        vector<float> dcum_logf = a.dcum_logf.host();
        for (int64_t h = 0; h < s.NH; h++)
            CHECK(all_zero(dcum_logf, (size_t)(h * T + (before ? t : 0)), (size_t)(h * T + (before ? T : t))),
                  "T %lld, reset at %lld, dh %lld: dcum_logf crosses the reset", (long long)T, (long long)t,
                  (long long)dh);
    }
}

// Blocks whose keys all have log gates of -200 or less to the queries have weight 0: pruning them changes no
// bit, with and without a window.
static void test_pruning(int64_t T, int64_t dh, int64_t window) {
    Shape s = {1, T, 2, dh, window};
    Inputs in(s, true);
    vector<double> cum_logf = make_gates(RANDOM, 0.3, s);
    in.cum_logf = cum_logf;
    int64_t blocks = ceil_div<int64_t>(T, ATTENTION_BLOCK), skipped = 0;
    vector<int> first((size_t)(s.heads() * blocks)), last(first.size());
    for (int64_t h = 0; h < s.heads(); h++) {
        const double* head = cum_logf.data() + h * T;
        int *head_first = first.data() + h * blocks, *head_last = last.data() + h * blocks;
        for (int64_t m = 0; m < blocks; m++)
            for (int64_t n = 0; n <= m; n++) {
                bool kept =
                    head[m * ATTENTION_BLOCK] - head[std::min(T, (n + 1) * ATTENTION_BLOCK) - 1] > -200;
                if (n == 0) head_first[m] = -1;
                if (kept && head_first[m] < 0) head_first[m] = (int)n;
                if (kept) head_last[n] = (int)m;
                skipped += !kept;
            }
    }
    CHECK(skipped > 0, "T %lld: nothing to prune", (long long)T);
    Buffer<int> first_key_block(first), last_query_block(last);
    Results a(s), b(s);
    a.compute(in, NULL);
    AttentionBounds bounds = {first_key_block, last_query_block, NULL};
    b.compute(in, &bounds);
    CHECK(same_results(a, b), "T %lld, dh %lld: pruning blocks without weight changes the results",
          (long long)T, (long long)dh);
}

// Band heads, of which other kernels compute all tensors, beside others. Without them, with all of these
// and with fewer, which the tiled kernels compute as well. As all that a band leaves out weighs nothing,
// bounds leave out nothing. Where all are band heads, the backward pass has the same bits in every run.
static void test_bands(int64_t B, int64_t T, int64_t NH) {
    const Shape s = {B, T, NH, 64};
    const int heads = (int)s.heads(), blocks = (int)ceil_div<int64_t>(T, ATTENTION_BLOCK);
    Inputs in(s, true);
    in.cum_logf = make_gates(BANDS, 0.3, s);
    vector<int> others, bands;
    for (int head = heads - 1; head >= 0; head--) (head % 4 == 3 ? others : bands).push_back(head);
    Buffer<int> first_key_block(vector<int>((size_t)(heads * blocks), 0)),
        last_query_block(vector<int>((size_t)(heads * blocks), blocks - 1));
    for (size_t left : {bands.size(), bands.size() / 2, (size_t)0}) { // left to the band kernels
        vector<int> order = others;
        order.insert(order.end(), bands.begin(), bands.end());
        order.push_back((int)(order.size() - left));
        Buffer<int> head_order(order);
        AttentionBounds bounds = {first_key_block, last_query_block, head_order};
        char name[128];
        snprintf(name, sizeof name, "%lldx%lld T %lld, %d band heads", (long long)B, (long long)NH,
                 (long long)T, (int)left);
        Results a(s), b(s);
        deterministic = false;
        a.compute(in, &bounds);
        for (int run = 0; run < 10; run++) {
            b.compute(in, &bounds);
            CHECK(same_bits(a.o, b.o) && same_bits(a.lse, b.lse), "%s: forward run %d differs", name, run);
            CHECK((int)left < heads || same_results(a, b), "%s: run %d differs", name, run);
        }
        deterministic = true;
        check_results(name, s, in.tensors(), HostResults(a, 0, 0));
        Results c(s), d(s);
        c.compute(in, &bounds), d.compute(in, &bounds);
        CHECK(same_results(c, d), "%s: deterministic runs differ", name);
        check_results("  deterministic", s, in.tensors(), HostResults(c, 0, 0));
    }
}

// Windows shorter than a block, at the borders of tiles, and of several blocks; then one that is as long as
// the sequence, which is none: the same bits.
static void test_windows(int64_t longest, int64_t dh) {
    static const int64_t shapes[][2] = {{2, 1},      {130, 1},    {300, 2},     {300, 63},   {300, 64},
                                        {300, 65},   {450, 127},  {450, 128},   {450, 129},  {450, 130},
                                        {1000, 191}, {1000, 192}, {1000, 193},  {1000, 255}, {1000, 257},
                                        {1000, 500}, {1000, 999}, {4097, 2048}, {4097, 300}};
    for (auto& shape : shapes) {
        if (shape[0] > longest) continue;
        int64_t B = shape[0] < 64 ? 32 : 2;
        check_case("no gate", NO_GATE, 0, {B, shape[0], 3, dh, shape[1]});
        check_case("gates 0.3", RANDOM, 0.3, {B, shape[0], 3, dh, shape[1]});
    }
    int64_t T = std::min<int64_t>(longest, 1500);
    check_case("open gates", OPEN, 0, {1, T, 32, dh, 200});
    check_case("alternating", ALTERNATING, 0, {1, T, 2, dh, 100});
    check_case("scores far below 0, no gate", NO_GATE, 0, {1, T, 2, dh, 70}, 1.5f);
    for (int64_t window : {T, T + 1, (int64_t)1 << 24}) {
        Inputs in({1, T, 2, dh}, true);
        in.cum_logf = make_gates(RANDOM, 0.3, in.s);
        Results a(in.s), b(in.s);
        a.compute(in, NULL);
        in.s.window = window;
        b.compute(in, NULL);
        CHECK(same_results(a, b), "T %lld, dh %lld: a window of %lld changes the results", (long long)T,
              (long long)dh, (long long)window);
    }
}

// Tensors of more than 2^31 elements: the last sequence is correct.
static void test_large(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    Shape s = {B, T, NH, dh}, one = {1, T, NH, dh};
    Inputs in(s, true);
    vector<double> gates = make_gates(RANDOM, 0.3, one);
    for (int64_t b = 0; b < B; b++)
        CUDA_CHECK(cudaMemcpy(in.cum_logf.p + b * NH * T, gates.data(), gates.size() * sizeof(double),
                              cudaMemcpyHostToDevice));
    Results a(s);
    a.compute(in, NULL);
    int64_t at = s.size() - one.size(), at_token = s.tokens() - one.tokens();
    OracleTensors last = {in.dout + at,           in.q + at, in.k + at, in.v + at, NULL, NULL,
                          in.cum_logf + at_token, false};
    check_results("more than 2^31 elements", one, last, HostResults(a, (size_t)at, (size_t)at_token));
}

// ----------------------------------------------------------------------------
// the forget gate

// every: tokens of a packed document in the mean; 0: they are not told apart
static void test_forget_gate(int64_t B, int64_t T, int64_t NH, double mean, bool with_z, int64_t every = 0) {
    int64_t stride = NH + 5;
    HeadShape shape = {};
    shape.B = B, shape.T = T, shape.NH = NH, shape.row_stride = stride;
    vector<bf16> z((size_t)(B * T * stride));
    vector<float> bias((size_t)NH), dcum_logf((size_t)(B * NH * T)), dbias_before((size_t)NH);
    uint64_t key = hash64(seed ^ (uint64_t)(T * 7 + NH));
    vector<int32_t> starts((size_t)(B * T));
    for (int64_t i = 0; i < B * T; i++) {
        bool begins = i % T == 0 || (every && hash64(key + 3 + (uint64_t)i) % (uint64_t)every == 0);
        starts[(size_t)i] = begins ? (int32_t)(i % T) : starts[(size_t)i - 1];
    }
    Buffer<int32_t> doc_start(starts);
    if (every) shape.doc_start = doc_start;
    auto wall = [&](int64_t b, int64_t t) { return every && t < T && starts[(size_t)(b * T + t)] == t; };
    for (size_t i = 0; i < z.size(); i++) z[i] = (bf16)(float)(mean + 2 * normal(key, i));
    if (T > 10) z[3 * (size_t)stride] = (bf16)-3e4f, z[7 * (size_t)stride] = (bf16)3e4f;
    for (size_t i = 0; i < bias.size(); i++) bias[i] = (float)normal(key + 1, i), dbias_before[i] = (float)i;
    for (size_t i = 0; i < dcum_logf.size(); i++) dcum_logf[i] = (float)normal(key + 2, i);
    Buffer<bf16> device_z(z), dz(z.size()), dz_again(z.size());
    Buffer<float> device_bias(bias), device_dcum_logf(dcum_logf), dbias(dbias_before),
        dbias_again(dbias_before);
    Buffer<double> cum_logf(dcum_logf.size());
    Buffer<char> scratch(forget_gate_scratch_bytes(&shape));
    const bf16* zp = with_z ? device_z.p : NULL;
    auto backward = [&](bf16* to_dz, float* to_dbias) {
        forget_gate_backward(with_z ? to_dz : NULL, to_dbias, device_dcum_logf, zp, device_bias, scratch,
                             &shape, 0);
    };
    forget_gate_forward(cum_logf, zp, device_bias, scratch, &shape, 0);
    backward(dz, dbias);
    backward(dz_again, dbias_again);
    CUDA_CHECK(cudaDeviceSynchronize());
    CHECK(same_bits(dz, dz_again) && same_bits(dbias, dbias_again), "forget gate: two runs differ");

    vector<double> got_cum_logf = cum_logf.host(), dbias_sum((size_t)NH);
    vector<bf16> got_dz = dz.host();
    vector<float> got_dbias = dbias.host();
    double cum_logf_error = 0, own_error = 0, dz_error = 0, dz_size = 0, dbias_size = 0;
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            double sum = 0, own = 0, dlogf = 0; // own: of the document, without its wall
            size_t head = (size_t)((b * NH + h) * T);
            auto at = [&](int64_t t) { return (size_t)((b * T + t) * stride + h); };
            auto logit = [&](int64_t t) {
                return (double)((with_z ? (float)z[at(t)] : 0.0f) + bias[(size_t)h]);
            };
            for (int64_t t = 0; t < T; t++) {
                const double logf = fmin(logit(t), 0) - log1p(exp(-fabs(logit(t))));
                const int64_t start = every ? starts[(size_t)(b * T + t)] : 0;
                sum += wall(b, t) ? WALL_LOGF : logf;
                own = t == start ? 0 : own + logf;
                const double passed = got_cum_logf[head + (size_t)t] - got_cum_logf[head + (size_t)start];
                own_error = worse(own_error, fabs(passed - own) / (fabs(own) + 1));
                double error = fabs(got_cum_logf[head + (size_t)t] - sum) / (fabs(sum) + 1e-6);
                cum_logf_error = worse(cum_logf_error, error);
            }
            for (int64_t t = T - 1; t >= 0; t--) {
                dlogf = (wall(b, t + 1) ? 0 : dlogf) + dcum_logf[head + (size_t)t];
                double d = wall(b, t) ? 0 : dlogf / (1 + exp(logit(t)));
                if (with_z && wall(b, t))
                    CHECK((float)got_dz[at(t)] == 0, "forget gate, T %lld: dz at a wall", (long long)T);
                dbias_sum[(size_t)h] += d, dbias_size += d * d;
                double e = (double)(float)got_dz[at(t)] - d;
                dz_error += e * e, dz_size += d * d;
            }
        }
    CHECK(cum_logf_error <= 1e-6, "forget gate, T %lld: cum_logf is off by %.3g", (long long)T,
          cum_logf_error);
    // of floats that are summed in double, also behind thousands of walls
    CHECK(own_error <= 1e-6, "forget gate, T %lld: cum_logf within documents is off by %.3g", (long long)T,
          own_error);
    if (with_z && dz_size > 0)
        // one rounding to bf16: 2^-8 at most, 1.7e-3 in the mean over many
        CHECK(sqrt(dz_error / dz_size) <= (T < 32 ? 0x1p-8 : 3e-3), "forget gate, T %lld: dz is off by %.3g",
              (long long)T, sqrt(dz_error / dz_size));
    for (size_t h = 0; h < (size_t)NH; h++)
        CHECK(fabs(got_dbias[h] - dbias_before[h] - dbias_sum[h]) <=
                  1e-5 * (fabs(dbias_sum[h]) + sqrt(dbias_size)),
              "forget gate, T %lld: dbias is %.9g, not %.9g", (long long)T, got_dbias[h],
              dbias_before[h] + dbias_sum[h]);
    uint16_t untouched = 0;
    for (size_t i = 0; i < got_dz.size(); i++) {
        memcpy(&untouched, &got_dz[i], sizeof untouched);
        if ((!with_z || (int64_t)i % stride >= NH) && untouched != 0xffff) break;
    }
    CHECK(!with_z || NH == stride || untouched == 0xffff, "forget gate: wrote outside its columns");
}

// Without a gate: walls, and nothing between them.
static void test_walls_alone(int64_t B, int64_t T, int64_t NH) {
    HeadShape shape = {};
    shape.B = B, shape.T = T, shape.NH = NH;
    vector<int32_t> starts((size_t)(B * T));
    for (int64_t i = 0; i < B * T; i++) starts[(size_t)i] = (int32_t)(i % T / (70 + i / T) * (70 + i / T));
    Buffer<int32_t> doc_start(starts);
    Buffer<double> cum_logf((size_t)(B * NH * T));
    Buffer<char> scratch(forget_gate_scratch_bytes(&shape));
    shape.doc_start = doc_start;
    forget_gate_forward(cum_logf, NULL, NULL, scratch, &shape, 0);
    vector<double> got = cum_logf.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < B * NH * T; i++) {
        int64_t b = i / (NH * T), t = i % T;
        wrong += got[(size_t)i] != WALL_LOGF * (double)(1 + t / (70 + b));
    }
    CHECK(wrong == 0, "walls alone: %lld of %lld wrong", (long long)wrong, (long long)(B * NH * T));
}

// ----------------------------------------------------------------------------

// A few short ones, for compute-sanitizer
static void test_quick(void) {
    test_forget_gate(1, 300, 2, 0.3, true);
    test_forget_gate(2, 600, 2, 0.3, true, 100);
    test_walls_alone(1, 300, 2);
    for (int64_t dh : {64, 128}) {
        check_case("gates 0.3", RANDOM, 0.3, {1, 450, 1, dh});
        check_case("no gate", NO_GATE, 0, {1, 193, 1, dh});
        check_case("gates 0.3", RANDOM, 0.3, {1, 450, 1, dh, 200});
    }
    test_bands(1, 600, 4);
    test_grouped(300);
}

static void test_attention(int64_t longest) {
    printf("%s\n", on_sm80 ? "mma.sync kernels (sm_80)" : attention_path());
    printf("relative error of each tensor's worst head, and its ratio to that of plain bf16\n");
    printf("%-34s  o              dq             dk             dv             dlogf          lse\n", "");
    for (int64_t dh : {64, 128}) {
        test_oracle(dh);
        for (int64_t T : {1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 4097})
            if (T <= longest) {
                int64_t B = T < 64 ? 32 : 2;
                check_case("gates 0.3", RANDOM, 0.3, {B, T, 3, dh});
                check_case("no gate", NO_GATE, 0, {B, T, 3, dh});
            }
        int64_t T = std::min<int64_t>(longest, 1500);
        check_case("open gates", OPEN, 0, {1, T, 32, dh});
        check_case("one cut", ONE_CUT, 4, {1, T, 2, dh});
        check_case("all cut", ALL_CUT, 0, {1, T, 2, dh});
        check_case("alternating", ALTERNATING, 0, {1, T, 2, dh});
        check_case("dead head", DEAD_HEAD, 2, {1, T, 2, dh});
        check_case("scores far below 0", RANDOM, 2, {1, T, 2, dh}, 1.5f);
        check_case("scores far below 0, no gate", NO_GATE, 0, {1, T, 2, dh}, 1.5f);
        test_constant_added(T, dh);
        for (int64_t t : {1, 63, 64, 128, 200})
            for (double by : {1.0, 30.0})
                if (t < T) test_document_reset(T, t, dh, by);
        for (int64_t window : {0, 100, 700})
            if (longest >= 700) test_pruning(std::min<int64_t>(longest, 3000), dh, window);
        test_windows(longest, dh);
    }
    // Borders of blocks, and of strips of eight. In few tokens half of the heads have one or two independent
    // values of dlogf each: there are more heads, taken together.
    for (int64_t T : {1, 63, 64, 65, 128, 129, 191, 512, 513, 575, 577, 640, 1000, 1025, 4097})
        if (T <= longest) test_bands(2, T, T < 512 ? 16 : 2);
    test_bands(1, std::min<int64_t>(longest, 3000), 3);
    test_grouped(longest);
    for (int64_t T : {1, 2, 255, 256, 257, 1000, 5000})
        for (int64_t every : {1, 3, 100, 2000})
            if (T <= longest) test_forget_gate(2, T, 3, 0.3, T != 1000, every);
    test_walls_alone(2, 1000, 3);
    for (double mean : {4.0, 0.3, -1.0}) {
        char what[32];
        snprintf(what, sizeof what, "gates %g", mean);
        for (int64_t T : {8192, 32768})
            if (T <= longest) check_case(what, RANDOM, mean, {1, T, 2, 64});
        if (longest >= 8192) check_case(what, RANDOM, mean, {1, 8192, 1, 128});
    }
    if (longest >= 65536) {
        check_case("gates 8", RANDOM, 8, {1, 65536, 1, 64});
        check_case("gates 0.3", RANDOM, 0.3, {1, 65536, 1, 128});
        check_case("no gate", NO_GATE, 0, {1, 65536, 1, 64});
        test_large(8200, 257, 16, 64);
    }
    for (int64_t dh : {64, 128})
        if (longest >= 1 << 20) test_million(dh, 6e-3);
}

// The same bits in a hundred runs, with all kinds of gates: looks for races.
static void test_races(int64_t T, int64_t dh, int64_t window) {
    Shape s = {1, T, 4, dh, window};
    Inputs in(s, true);
    const GateKind kinds[] = {RANDOM, OPEN, ONE_CUT, ALTERNATING, DEAD_HEAD};
    for (GateKind kind : kinds) {
        in.cum_logf = make_gates(kind, 2, s);
        Results a(s), b(s);
        a.compute(in, NULL);
        for (int run = 0; run < 20; run++) {
            b.compute(in, NULL);
            CHECK(same_results(a, b), "T %lld, dh %lld, gates %d: run %d differs", (long long)T,
                  (long long)dh, (int)kind, run);
        }
    }
}

// ----------------------------------------------------------------------------
// beside a kernel that holds SMs, as NCCL's kernels do

// A thread block holds an SM, whose shared memory it takes, until flags[0] is set, or for
// `least` + blockIdx.x `step` nanoseconds. flags[1 + blockIdx.x] is 1 once it runs, 2 if its time ran out.
__global__ void occupy_kernel(volatile int* flags, uint64_t least, uint64_t step) {
    auto now = [] {
        uint64_t nanoseconds;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
        return nanoseconds;
    };
    uint64_t end = now() + least + blockIdx.x * step;
    flags[1 + blockIdx.x] = 1;
    while (!flags[0] && now() < end) __nanosleep(1000);
    if (!flags[0]) flags[1 + blockIdx.x] = 2;
}

// The same bits where only `left` SMs are free, so that most thread blocks start late: the others
// are held until attention has finished, or given back one by one while it runs. Nothing here waits for ever:
// the SMs are given back after 20 seconds, and the program ends after 60.
static void test_occupied(int64_t T, int64_t dh, int left, bool given_back) {
    Shape s = {1, T, 4, dh};
    Inputs in(s, true);
    in.cum_logf = make_gates(RANDOM, 2, s);
    Results a(s), b(s);
    a.compute(in, NULL); // also loads the kernels' code, which may wait for kernels that run

    int held = device_attribute(cudaDevAttrMultiProcessorCount) - left;
    int shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    int* mapped;
    cudaStream_t stream; // does not synchronize with stream 0
    CUDA_CHECK(cudaHostAlloc(&mapped, (size_t)(1 + held) * sizeof(int), cudaHostAllocMapped));
    memset(mapped, 0, (size_t)(1 + held) * sizeof(int));
    volatile int* flags = mapped;
    auto none = [&](int flag) {
        for (int i = 1; i <= held; i++)
            if (flags[i] == flag) return false;
        return true;
    };
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    double deadline = seconds_now() + 60;
    occupy_kernel<<<(unsigned)held, 32, (size_t)shared, stream>>>(mapped, given_back ? 1000000 : 20000000000,
                                                                  given_back ? 20000 : 0);
    CUDA_CHECK_LAUNCH();
    while (!none(0) && seconds_now() < deadline) {}
    bool started = none(0);
    b.queue(in, NULL);
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady && seconds_now() < deadline) state = cudaStreamQuery(0);
    if (state == cudaErrorNotReady) die("test_occupied: attention hangs where %d SMs are free", left);
    CUDA_CHECK(state);
    bool still_held = none(2);
    flags[0] = 1;
    CUDA_CHECK(cudaDeviceSynchronize());
    CHECK(started, "T %lld, dh %lld: could not hold %d SMs", (long long)T, (long long)dh, held);
    CHECK(given_back || still_held, "T %lld, dh %lld: attention waits for more than %d SMs", (long long)T,
          (long long)dh, left);
    CHECK(same_results(a, b), "T %lld, dh %lld: other results on %d SMs", (long long)T, (long long)dh, left);
    CUDA_CHECK(cudaStreamDestroy(stream));
    CUDA_CHECK(cudaFreeHost(mapped));
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
        if (longest >= 4096) {
            test_races(4096, dh, 0);
            test_races(4096, dh, 1000);
            test_occupied(4096, dh, 1, false);
            test_occupied(4096, dh, 7, false);
            test_occupied(4096, dh, 3, true);
        }
    if (attention_runs_sm90()) {
        on_sm80 = true;
        test_attention(longest);
    }
    return test_report();
}
