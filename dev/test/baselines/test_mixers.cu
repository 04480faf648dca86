/*
The kernels around the recurrences of DeltaNet and Mamba-2 (convolution, l2 norm a head, time steps, gated
RMSNorm, beta) and the step of a recurrence, against the same in double.

    test_mixers [quick] [SEED]     quick: fewer and smaller shapes

Outputs in bf16 may differ by their rounding alone, and sums in fp32 by FP32_LIMIT of their terms.
*/
#include "../../../llmc/baselines/deltanet/deltanet.cuh"
#include "../../../llmc/baselines/mamba2/mamba2.cuh"
#include "../gpu/buffers.cuh"

static double sigmoid_of(double x) { return 1 / (1 + exp(-x)); }

struct NormScratch : Buffer<float> {
    NormScratch() : Buffer<float>(norm_partial_bytes() / sizeof(float)) {}
};

// The least error that counts, beside the terms of sums: fp32 arithmetic of some operations, and the
// hardware's 2^x.
static const double STEP_LIMIT = 4e-6;

// ----------------------------------------------------------------------------
// convolution

static bool packed; // documents of five tokens in the mean, told apart

// A convolution over C channels of a row of `stride` elements, from `column` on, and all that its kernels
// read and write.
struct ConvTest {
    int64_t B, T, C, stride, column, dh, normed, NH; // NH: heads with time steps
    bool biased;
    Drawn<bf16> proj, weight, bias, dy, dout;
    Drawn<float> log_steps, dt_bias, A_log, D, dlog_decay;
    vector<double> steps;   // [B, T, NH]
    vector<int32_t> starts; // [B, T] of documents, as doc_start
    Buffer<int32_t> doc_start;
    Buffer<float> steps_on_device, log_decay, skip;
    Conv conv;
    vector<double> y, dx, dweight, dbias, ddt, dheads[3], weight_terms, bias_terms, head_terms[3];

    ConvTest(int64_t B_, int64_t T_, int64_t C_, int64_t dh_, int64_t normed_, int64_t NH_,
             bool biased_ = true)
        : B(B_), T(T_), C(C_), stride(C_ + 24 + (NH_ + 7) / 8 * 8), column(16), dh(dh_), normed(normed_),
          NH(NH_), biased(biased_), proj((size_t)(B_ * T_ * stride)), weight((size_t)(4 * C_), 0.5),
          bias((size_t)C_, 0.5), dy((size_t)(B_ * T_ * C_)), dout((size_t)(B_ * T_ * (NH_ * dh_ + 8))),
          log_steps((size_t)(B_ * T_ * NH_ + 1)), dt_bias((size_t)NH_ + 1), A_log((size_t)NH_ + 1, 0.5),
          D((size_t)NH_ + 1), dlog_decay((size_t)(B_ * T_ * NH_ + 1)), steps((size_t)(B_ * T_ * NH_)),
          starts((size_t)(B_ * T_)), doc_start(starts.size()), steps_on_device((size_t)(B_ * T_ * NH_ + 1)),
          log_decay((size_t)(B_ * T_ * NH_ + 1)), skip(log_decay.n) {
        for (int64_t i = 0; i < B * T; i++) {
            bool begins = i % T == 0 || (packed && random_u64(4, seed, (uint64_t)i) % 5 == 0);
            starts[i] = begins ? (int32_t)(i % T) : starts[i - 1];
        }
        doc_start = starts;
        memset(&conv, 0, sizeof conv);
        conv.doc_start = packed ? (const int32_t*)doc_start : NULL;
        conv.B = B, conv.T = T, conv.C = C, conv.row_stride = stride, conv.dh = dh, conv.normed = normed;
        conv.weight = weight, conv.bias = biased ? (const bf16*)bias : NULL;
        HeadSteps* h = &conv.steps;
        h->NH = NH;
        if (NH == 0) return;
        h->dt = proj + column + C, h->steps = steps_on_device, h->log_decay = log_decay, h->skip = skip,
        h->dlog_decay = dlog_decay;
        h->dt_bias = dt_bias, h->A_log = A_log, h->D = D, h->dout = dout;
    }
    bool is_wall(int64_t bt) const { return packed && starts[bt] == bt % T; }
    // as token `of` sees it
    double x(int64_t b, int64_t of, int64_t t, int64_t c) const {
        return t < starts[b * T + of] ? 0 : proj[(b * T + t) * stride + column + c];
    }
    double dt(int64_t bt, int64_t h) const { return proj[bt * stride + column + C + h] + dt_bias[h]; }
    double z(int64_t b, int64_t t, int64_t c) const {
        double sum = biased ? bias[c] : 0;
        for (int64_t tap = 0; tap < CONV_WIDTH; tap++)
            sum += weight[c * CONV_WIDTH + tap] * x(b, t, t - 3 + tap, c);
        return sum;
    }

    void compute_steps() {
        for (int64_t i = 0; i < B * T * NH; i++) {
            double dt_of = dt(i / NH, i % NH);
            steps[i] = dt_of > 30 ? dt_of : log1p(exp(dt_of));
        }
    }

    // Everything of one head, or of one channel outside heads: channels first .. first + n of token (b, t).
    void compute(int64_t b, int64_t t, int64_t first, int64_t n, vector<double>* dz) {
        int64_t bt = b * T + t, head = first / dh;
        bool is_normed = first < normed, stepped = head < NH;
        double squares = L2_NORM_EPS, along = 0, x_dv = 0, x_dout = 0, x_dv_terms = 0, x_dout_terms = 0;
        vector<double> s(n), g(n);
        for (int64_t i = 0; i < n; i++) {
            double in = z(b, t, first + i);
            s[i] = in * sigmoid_of(in), g[i] = dy[bt * C + first + i];
            squares += s[i] * s[i], along += s[i] * g[i];
            double d = stepped ? dout[bt * NH * dh + first + i] : 0;
            x_dv += s[i] * g[i], x_dout += s[i] * d;
            x_dv_terms += fabs(s[i] * g[i]), x_dout_terms += fabs(s[i] * d);
        }
        for (int64_t i = 0; i < n; i++) {
            double scale = is_normed ? 1 / sqrt(squares) : stepped ? steps[bt * NH + head] : 1;
            y[bt * C + first + i] = scale * s[i];
            g[i] *= scale;
            if (is_normed) g[i] -= s[i] * along * scale / squares;
            if (stepped) g[i] += D[head] * dout[bt * NH * dh + first + i];
            double in = z(b, t, first + i), open = sigmoid_of(in);
            (*dz)[bt * C + first + i] = g[i] * open * (1 + in * (1 - open));
        }
        if (!stepped) return;
        double rate = exp(A_log[head]), dlog = is_wall(bt) ? 0 : dlog_decay[bt * NH + head],
               step = steps[bt * NH + head];
        double slope = sigmoid_of(dt(bt, head)), gradient = (x_dv - dlog * rate) * slope;
        ddt[bt * NH + head] = gradient;
        dheads[0][head] += gradient, dheads[1][head] -= dlog * step * rate, dheads[2][head] += x_dout;
        head_terms[0][head] += (x_dv_terms + fabs(dlog) * rate) * slope;
        head_terms[1][head] += fabs(dlog) * step * rate, head_terms[2][head] += x_dout_terms;
    }

    void compute() {
        vector<double> dz((size_t)(B * T * C));
        y.assign(dz.size(), 0), dx.assign(dz.size(), 0), ddt.assign(steps.size(), 0);
        dweight.assign((size_t)(4 * C), 0), dbias.assign((size_t)C, 0);
        weight_terms = dweight, bias_terms = dbias;
        for (int i = 0; i < 3; i++) dheads[i].assign((size_t)NH, 0), head_terms[i] = dheads[i];
        compute_steps();
        int64_t of_heads = std::max(normed, NH * dh);
        for (int64_t bt = 0; bt < B * T; bt++) {
            for (int64_t c = 0; c < of_heads; c += dh) compute(bt / T, bt % T, c, dh, &dz);
            for (int64_t c = of_heads; c < C; c++) compute(bt / T, bt % T, c, 1, &dz);
        }
        for (int64_t bt = 0; bt < B * T; bt++)
            for (int64_t c = 0; c < C; c++) {
                double g = dz[bt * C + c];
                dbias[c] += g, bias_terms[c] += fabs(g);
                for (int64_t tap = 0; tap < CONV_WIDTH; tap++) {
                    int64_t t = bt % T - 3 + tap;
                    dweight[c * CONV_WIDTH + tap] += g * x(bt / T, bt % T, t, c);
                    weight_terms[c * CONV_WIDTH + tap] += fabs(g * x(bt / T, bt % T, t, c));
                    if (t >= starts[bt]) dx[(bt - 3 + tap) * C + c] += g * weight[c * CONV_WIDTH + tap];
                }
            }
    }
};

// Columns [first, first + count) of rows of `stride` elements.
template <class T>
static vector<T> columns_of(const vector<T>& x, int64_t stride, int64_t first, int64_t count) {
    vector<T> out;
    for (size_t at = (size_t)first; at < x.size(); at += (size_t)stride)
        out.insert(out.end(), x.begin() + (long)at, x.begin() + (long)at + count);
    return out;
}

static void test_conv(int64_t B, int64_t T, int64_t C, int64_t dh, int64_t normed, int64_t NH,
                      bool biased = true) {
    snprintf(test_case, sizeof test_case, "conv B %lld T %lld C %lld dh %lld normed %lld NH %lld%s",
             (long long)B, (long long)T, (long long)C, (long long)dh, (long long)normed, (long long)NH,
             biased   ? packed ? " bias packed" : " bias"
             : packed ? " packed"
                      : "");
    ConvTest want(B, T, C, dh, normed, NH, biased);
    want.compute();
    Conv conv = want.conv;
    Buffer<bf16> y((size_t)(B * T * C)), dproj(want.proj.n), dproj_again(want.proj.n);
    vector<float> ones((size_t)(5 * C + 3 * NH), 1.0f);
    Buffer<float> grads(ones), grads_again(ones);
    NormScratch partial;
    const bf16* x = want.proj + want.column;
    if (NH) head_steps_forward(&conv, 0);
    if (NH) {
        vector<double> want_decay, want_skip;
        for (size_t i = 0; i < want.steps.size(); i++) {
            int64_t h = (int64_t)i % NH;
            want_decay.push_back(want.is_wall((int64_t)i / NH) ? (double)MAMBA2_WALL
                                                               : -want.steps[i] * exp(want.A_log[h])),
                want_skip.push_back(want.D[h] / want.steps[i]);
        }
        check_close("steps", want.steps, want.steps_on_device, STEP_LIMIT);
        check_close("log decay", want_decay, want.log_decay, STEP_LIMIT);
        check_close("skip", want_skip, want.skip, STEP_LIMIT);
    }
    conv_forward(y, x, &conv, 0);
    check_bf16("conv y", want.y, y);

    auto backward = [&](bf16* to, float* sums) {
        conv.dweight = sums, conv.dbias = sums + 4 * C;
        conv.steps.ddt_bias = sums + 5 * C, conv.steps.dA_log = sums + 5 * C + NH,
        conv.steps.dD = sums + 5 * C + 2 * NH;
        conv.steps.ddt = to + want.column + C;
        conv_backward(to + want.column, want.dy, x, &conv, partial, 0);
    };
    backward(dproj, grads), backward(dproj_again, grads_again);
    check_same_bits("dproj of a second run", dproj, dproj_again);
    check_same_bits("gradients of a second run", grads, grads_again);
    vector<double> got = doubles(dproj.host());
    check_bf16("conv dx", want.dx, columns_of(got, want.stride, want.column, C));
    if (NH) check_bf16("conv ddt", want.ddt, columns_of(got, want.stride, want.column + C, NH));
    int64_t written = 0, used = C + NH;
    for (double v : columns_of(got, want.stride, 0, want.column)) written += !isnan(v);
    for (double v : columns_of(got, want.stride, want.column + used, want.stride - want.column - used))
        written += !isnan(v);
    CHECK(written == 0, "%s: %lld writes to other columns", test_case, (long long)written);

    vector<double> sums = doubles(grads.host());
    for (double& sum : sums) sum -= 1; // they are added
    auto part = [&](int64_t first, int64_t n) {
        return vector<double>(sums.begin() + first, sums.begin() + first + n);
    };
    auto with_one = [](vector<double> terms) { // and rounded beside the 1
        for (double& term : terms) term += 1;
        return terms;
    };
    vector<double> terms = with_one(want.weight_terms);
    check_close("conv dweight", want.dweight, part(0, 4 * C), STEP_LIMIT, &terms);
    terms = with_one(want.bias_terms);
    if (biased) check_close("conv dbias", want.dbias, part(4 * C, C), STEP_LIMIT, &terms);
    for (double sum : part(4 * C, biased ? 0 : C)) CHECK(sum == 0, "%s: a gradient without bias", test_case);
    for (int i = 0; i < 3 && NH; i++) {
        terms = with_one(want.head_terms[i]);
        check_close("dt_bias, A_log, D", want.dheads[i], part(5 * C + i * NH, NH), STEP_LIMIT, &terms);
    }
}

// A sequence in two parts, the second from the history that the first leaves, has the bits of the whole.
static void test_conv_history(int64_t C, int64_t first, int64_t T) {
    snprintf(test_case, sizeof test_case, "conv history C %lld, %lld of %lld", (long long)C, (long long)first,
             (long long)T);
    ConvTest test(1, T, C, 64, 64, 0);
    Conv conv = test.conv;
    Buffer<bf16> whole((size_t)(T * C)), parts((size_t)(T * C)), history((size_t)(3 * C));
    const bf16* x = test.proj + test.column;
    conv_forward(whole, x, &conv, 0);
    history.zero();
    conv.history = history, conv.T = first;
    conv_forward(parts, x, &conv, 0);
    conv_history(history, x, &conv, 0);
    conv.T = T - first;
    conv_forward(parts + first * C, x + first * conv.row_stride, &conv, 0);
    check_same_bits("y", whole, parts);
}

// ----------------------------------------------------------------------------
// gated RMSNorm

static void test_gated_norm(int64_t rows, int64_t di) {
    snprintf(test_case, sizeof test_case, "gated norm rows %lld di %lld", (long long)rows, (long long)di);
    const double EPS = 1e-5;
    int64_t stride = di + 40, padding = 24;
    Drawn<bf16> o((size_t)(rows * di)), proj((size_t)(rows * stride), 2), weight((size_t)di, 0.3, 1),
        dy((size_t)(rows * di));
    Buffer<float> rstd((size_t)rows), dweight(vector<float>((size_t)di, 1.0f)),
        dweight_again(vector<float>((size_t)di, 1.0f));
    Buffer<bf16> y((size_t)(rows * di)), y_again((size_t)(rows * di)), dout((size_t)(rows * di)),
        dproj(proj.n), in_place(dy.host());
    NormScratch partial;
    GatedNorm p = {};
    p.o = o, p.z = proj, p.dz = dproj;
    p.row_stride = stride, p.padding = padding, p.end = dproj + di;
    p.norm = {weight, dweight, rstd, rows, di, EPS};
    gated_norm_forward(y, &p, 0);
    gated_norm_backward(dout, y_again, dy, &p, partial, 0);
    check_same_bits("recomputed y", y, y_again);
    p.norm.dweight = dweight_again;
    gated_norm_backward(in_place, NULL, in_place, &p, partial, 0);
    check_same_bits("dout in place of dy", dout, in_place);
    check_same_bits("dweight of a second run", dweight, dweight_again);

    vector<double> want_y(y.n), want_dout(y.n), want_dz(y.n), want_dweight((size_t)di),
        terms((size_t)di, 1.0);
    for (int64_t r = 0; r < rows; r++) {
        vector<double> g((size_t)di);
        double squares = 0, along = 0;
        for (int64_t c = 0; c < di; c++) {
            double z = proj[r * stride + c];
            g[c] = o[r * di + c] * z * sigmoid_of(z);
            squares += g[c] * g[c];
        }
        double factor = 1 / sqrt(squares / (double)di + EPS);
        for (int64_t c = 0; c < di; c++) along += dy[r * di + c] * weight[c] * g[c];
        for (int64_t c = 0; c < di; c++) {
            double z = proj[r * stride + c], open = sigmoid_of(z), d = dy[r * di + c];
            double dg = factor * (d * weight[c] - g[c] * along * factor * factor / (double)di);
            want_y[r * di + c] = g[c] * factor * weight[c];
            want_dout[r * di + c] = dg * z * open,
                               want_dz[r * di + c] = dg * o[r * di + c] * open * (1 + z * (1 - open));
            want_dweight[c] += d * g[c] * factor, terms[c] += fabs(d * g[c] * factor);
        }
    }
    check_bf16("gated norm y", want_y, y);
    check_bf16("gated norm dout", want_dout, dout);
    vector<double> got = doubles(dproj.host()), sums = doubles(dweight.host());
    check_bf16("gated norm dz", want_dz, columns_of(got, stride, 0, di));
    for (double x : columns_of(got, stride, di, padding)) CHECK(x == 0, "%s: padding of %g", test_case, x);
    for (double x : columns_of(got, stride, di + padding, stride - di - padding))
        CHECK(isnan(x), "%s: a write behind the padding", test_case);
    for (double& sum : sums) sum -= 1;
    check_close("gated norm dweight", want_dweight, sums, STEP_LIMIT, &terms);
}

// ----------------------------------------------------------------------------
// beta

static void test_beta(int64_t rows, int64_t NH) {
    snprintf(test_case, sizeof test_case, "beta rows %lld NH %lld", (long long)rows, (long long)NH);
    int64_t stride = NH + 29, columns = NH + 21, first = 8;
    Drawn<bf16> proj((size_t)(rows * stride), 2);
    Drawn<float> dbeta((size_t)(rows * NH));
    Buffer<float> beta((size_t)(rows * NH));
    Buffer<bf16> dproj(proj.n);
    vector<double> want_beta(beta.n), want((size_t)(rows * columns));
    HeadShape shape = {1, rows, NH, 0, 0, stride, 0, 0, NULL};
    beta_forward(beta, proj + first, rows, NH, stride, 0);
    beta_backward(dproj + first, dbeta, beta, &shape, columns, 0);
    for (int64_t i = 0; i < rows * NH; i++) {
        double open = sigmoid_of(proj[i / NH * stride + first + i % NH]);
        want_beta[i] = open, want[i / NH * columns + i % NH] = dbeta[i] * open * (1 - open);
    }
    check_close("beta", want_beta, beta, STEP_LIMIT);
    vector<double> got = doubles(dproj.host());
    check_bf16("beta dlogits", want, columns_of(got, stride, first, columns));
    for (double x : columns_of(got, stride, 0, first))
        CHECK(isnan(x), "%s: a write before its columns", test_case);
}

// Gated DeltaNet's decays: column 8 of proj on
static void test_decays(int64_t rows, int64_t NH) {
    snprintf(test_case, sizeof test_case, "decays rows %lld NH %lld", (long long)rows, (long long)NH);
    const int64_t stride = NH + 29, first = 8;
    Drawn<bf16> proj((size_t)(rows * stride), 3);
    Drawn<float> dlog_decay((size_t)(rows * NH)), A_log((size_t)NH), dt_bias((size_t)NH);
    Buffer<float> log_decay(dlog_decay.n), dA_log(A_log.n), ddt_bias(A_log.n);
    Buffer<bf16> dproj(proj.n);
    NormScratch partial;
    dA_log.zero(), ddt_bias.zero();
    DeltaDecays d = {rows,          NH,         stride, proj + first, A_log, dt_bias, log_decay,
                     dproj + first, dlog_decay, dA_log, ddt_bias};
    delta_decays_forward(&d, 0);
    delta_decays_backward(&d, partial, 0);
    vector<double> want_decay(log_decay.n), want(log_decay.n), of_rate((size_t)NH), of_bias((size_t)NH),
        rate_terms((size_t)NH), bias_terms((size_t)NH);
    for (int64_t i = 0; i < rows * NH; i++) {
        const size_t h = (size_t)(i % NH);
        const double logit = proj[i / NH * stride + first + i % NH] + dt_bias[i % NH],
                     rate = exp(A_log[i % NH]);
        const double x = -log1p(exp(logit)) * rate, dlogit = -dlog_decay[i] * rate * sigmoid_of(logit);
        want_decay[(size_t)i] = std::max(x, -104.0), want[(size_t)i] = dlogit;
        of_rate[h] += dlog_decay[i] * x, of_bias[h] += dlogit;
        rate_terms[h] += fabs(dlog_decay[i] * x), bias_terms[h] += fabs(dlogit);
    }
    check_close("log decay", want_decay, log_decay, STEP_LIMIT);
    check_bf16("decays dlogits", want, columns_of(doubles(dproj.host()), stride, first, NH));
    check_close("dA_log", of_rate, doubles(dA_log.host()), STEP_LIMIT, &rate_terms);
    check_close("ddt_bias", of_bias, doubles(ddt_bias.host()), STEP_LIMIT, &bias_terms);
}

// ----------------------------------------------------------------------------
// steps of a recurrence and of the convolution before it

static const int SLOTS = 5;

// Sequences of a pass with one row each in some slots, but for one with two rows, which the steps leave
// alone.
static vector<PassRows> step_sequences(void) {
    return {{0, 1, 3, 9}, {1, 3, 0, 4}, {3, 4, 4, 0}, {4, 5, 1, 1}};
}

static void test_scan_step(int NH, int V, bool delta) {
    snprintf(test_case, sizeof test_case, "scan step NH %d V %d delta %d", NH, V, delta);
    const int K = 128, rows = 5;
    vector<PassRows> sequences = step_sequences();
    ScanShape s = {1, rows, NH, K, V, delta ? 3 * NH * K : 2 * K + NH * V, delta ? K : 0, 0, 0.3f};
    s.value_row = s.key_row;
    Drawn<bf16> in((size_t)(rows * s.key_row), 0.3);
    Drawn<float> states((size_t)(SLOTS * NH * K * V)), numbers((size_t)(rows * NH)), skip(numbers.n);
    vector<float> of_rows(numbers.n);
    for (size_t i = 0; i < of_rows.size(); i++)
        of_rows[i] = (float)(delta ? sigmoid_of(numbers.values[i]) : -exp(numbers.values[i]));
    Drawn<float> number(of_rows); // beta, or log decay
    Buffer<bf16> o((size_t)(rows * NH * V));
    int64_t k_column = delta ? (int64_t)NH * K : (int64_t)NH * V, q_column = delta ? 0 : k_column + K;
    int64_t v_column = delta ? 2 * (int64_t)NH * K : 0;
    Scan scan = {in + q_column,
                 in + k_column,
                 in + v_column,
                 delta ? NULL : number.p,
                 delta ? number.p : NULL,
                 delta ? NULL : skip.p,
                 NULL,
                 NULL,
                 NULL};
    Buffer<PassRows> on_device(sequences);
    PassArrays pass = {};
    pass.sequences = on_device, pass.num_sequences = (int)sequences.size();
    ScanStep step = {o, states, scan, s, on_device};
    scan_step(&step, &pass, 0);

    vector<double> want_states = states.values, want_o, got_o, all_o = doubles(o.host());
    for (const PassRows& sequence : sequences)
        for (int h = 0; h < NH && sequence.end == sequence.begin + 1; h++) {
            int64_t row = sequence.begin, at = row * s.key_row + h * s.key_head;
            double* S = &want_states[(size_t)((sequence.slot * NH + h) * K * V)];
            double decay = delta ? 1 : exp(number[row * NH + h]), beta = delta ? number[row * NH + h] : 1;
            for (int j = 0; j < V; j++) {
                double v = in[row * s.value_row + v_column + h * V + j], u = v, out = 0;
                for (int c = 0; c < K; c++) {
                    S[c * V + j] = sequence.position ? decay * S[c * V + j] : 0;
                    if (delta) u -= in[at + k_column + c] * S[c * V + j];
                }
                for (int c = 0; c < K; c++) {
                    S[c * V + j] += in[at + k_column + c] * beta * u;
                    out += in[at + q_column + c] * S[c * V + j];
                }
                want_o.push_back((double)s.scale * out + (delta ? 0 : skip[row * NH + h] * v)),
                    got_o.push_back(all_o[(size_t)((row * NH + h) * V + j)]);
            }
        }
    check_bf16("scan step o", want_o, got_o);
    check_close("scan step states", want_states, states.host(), STEP_LIMIT);
    for (int64_t i = NH * V; i < 3 * NH * V; i++)
        CHECK(isnan(all_o[(size_t)i]), "%s: wrote a row of a longer sequence", test_case);
}

// The step gives what conv_forward gives from the same history, and moves it on by one token.
static void test_conv_step(int64_t C, int64_t NH) {
    snprintf(test_case, sizeof test_case, "conv step C %lld NH %lld", (long long)C, (long long)NH);
    const int rows = 5;
    vector<PassRows> sequences = step_sequences();
    ConvTest test(1, rows, C, 64, NH ? 0 : 128, NH);
    Conv conv = test.conv, one = test.conv;
    Drawn<bf16> histories((size_t)(SLOTS * 3 * C));
    vector<bf16> before = histories.host();
    Buffer<bf16> y((size_t)(rows * C)), alone((size_t)C), history((size_t)(3 * C));
    Buffer<PassRows> on_device(sequences);
    Cache cache = {};
    cache.device.host.sequences = sequences.data(), cache.device.pass.sequences = on_device;
    cache.device.host.num_sequences = cache.device.pass.num_sequences = (int)sequences.size();
    if (NH) head_steps_forward(&conv, 0);
    const bf16* x = test.proj + test.column;
    conv_extend(y, x, histories, &conv, &cache, 0);
    for (const PassRows& sequence : sequences) {
        auto first = before.begin() + sequence.slot * 3 * C;
        if (sequence.position > 0)
            history = vector<bf16>(first, first + 3 * C);
        else
            history.zero();
        one.history = history;
        for (int row = sequence.begin; row < sequence.end; row++) {
            one.T = 1;
            if (NH) one.steps.steps = conv.steps.steps + row * NH;
            conv_forward(alone, x + row * conv.row_stride, &one, 0);
            conv_history(history, x + row * conv.row_stride, &one, 0);
            check_same_bits("y", alone.p, y + row * C, (size_t)C);
        }
        check_same_bits("history", history.p, histories + sequence.slot * 3 * C, (size_t)(3 * C));
    }
    vector<bf16> after = histories.host();
    CHECK(memcmp(&after[(size_t)(2 * 3 * C)], &before[(size_t)(2 * 3 * C)], (size_t)(3 * C) * sizeof(bf16)) ==
              0,
          "%s: the history of another slot changed", test_case);
}

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    static const int64_t lengths[] = {1, 2, 3, 4, 7, 8, 9, 33};
    for (packed = true; packed; packed = false) {
        for (int64_t T : {1, 4, 5, 33}) {
            test_conv(2, T, 3 * 128, 128, 2 * 128, 0, false);
            test_conv(2, T, 3 * 128, 128, 2 * 128, 0);
            test_conv(2, T, 2 * 64 + 256, 64, 0, 2);
        }
        test_conv(1, 5, 200, 128, 128, 0, false);
        test_conv(3, quick ? 70 : 700, 3 * 384, 128, 2 * 384, 0, false);
        test_conv(1, quick ? 70 : 1300, 10 * 64 + 256, 64, 0, 10);
    }
    for (int64_t T : lengths) {
        test_conv(2, T, 3 * 128, 128, 2 * 128, 0, false); // DeltaNet
        test_conv(2, T, 3 * 128, 128, 2 * 128, 0);
        test_conv(2, T, 2 * 64 + 256, 64, 0, 2); // Mamba-2
    }
    test_conv(1, 5, 40, 8, 16, 0); // lanes of a warp that are idle
    test_conv(1, 5, 200, 128, 128, 0, false);
    test_conv(2, 21, 64 + 136, 64, 0, 1);
    test_conv(3, quick ? 70 : 700, 3 * 384, 128, 2 * 384, 0, false);
    test_conv(3, quick ? 70 : 700, 3 * 384, 128, 2 * 384, 0);
    test_conv(1, quick ? 70 : 1300, 10 * 64 + 256, 64, 0, 10);
    test_conv(quick ? 20 : 2500, 2, 128, 64, 0, 1); // more sequences than the GPU runs at once
    for (int64_t first : {1, 2, 3, 4, 8, 20}) test_conv_history(192, first, 21);
    test_gated_norm(3, 8);
    test_gated_norm(17, 256);
    test_gated_norm(quick ? 20 : 900, 640);
    test_gated_norm(quick ? 3 : 300, 3072);
    test_beta(3, 1);
    test_beta(101, 12);
    test_decays(3, 1);
    test_decays(300, 9);
    test_scan_step(4, 64, false);
    test_scan_step(3, 128, true);
    test_conv_step(3 * 128, 0);
    test_conv_step(2 * 64 + 256, 2);
    print_noted();
    return test_report();
}
