/*
Attention for inference (extend.cuh) against the same in double on the host: softmax attention with forget
gates over the state of n sequences of different lengths.

Inputs are rounded to what the kernels read, so that only their arithmetic shows: in o the rounding to bf16
(1.7e-3 over many elements, 3.9e-3 in one) and fp32 sums far below it; in cum_logf, which is double, the float
logit.

    test_extend [quick] [SEED]     quick: without what is slow under compute-sanitizer
*/
#include <algorithm>
#include "../../../llmc/attention/extend.cuh"
#include "buffers.cuh"

typedef enum { NO_GATE, GATE, GATE_BIAS_ONLY } Gate;

// cum_logf is exact but for the logit z + bias in float, relative 6e-8 of a term, and two functions in
// double.
static const double CUM_LOGF_LIMIT = 1e-6;
static const double ANGLES_LIMIT = 1e-7; // of cos and sin rounded to float: 3e-8

static int64_t sum(const vector<int64_t>& x) {
    int64_t total = 0;
    for (int64_t i : x) total += i;
    return total;
}

// n sequences of `lengths` tokens, on both sides. The host's are the expected values.
struct State {
    HeadShape s; // T tokens more
    int64_t rows, d, capacity, fgate_column;
    vector<int64_t> lengths;
    Gate gate;
    Drawn<bf16> proj, new_k, new_v, q;
    Drawn<float> bias;
    Drawn<bf16> k, v;
    Buffer<double> cum_logf;
    vector<double> want_cum_logf;
    Buffer<int64_t> d_lengths;

    State(const vector<int64_t>& held, int64_t T, int64_t NH, int64_t dh, Gate kind)
        : s({(int64_t)held.size(), T, NH, dh, 3 * NH * dh + NH, 3 * NH * dh + ceil_div<int64_t>(NH, 8) * 8,
             dh}),
          rows(s.B * (1 + T)), d(NH * dh), capacity(*std::max_element(held.begin(), held.end()) + T + 3),
          fgate_column(3 * d), lengths(held), gate(kind), proj(rows * s.row_stride), new_k(rows * d),
          new_v(rows * d), q(rows * d), bias(NH), k(s.B * capacity * d), v(s.B * capacity * d),
          cum_logf(s.B * capacity * NH), want_cum_logf(cum_logf.n), d_lengths(held) {
        vector<double> noise = doubles(draw<float>(cum_logf.n, 0.1));
        for (int64_t i = 0; i < (int64_t)cum_logf.n;
             i++) { // the sequences so far: they forget in about 12 tokens
            double before = i / NH % capacity ? want_cum_logf[i - NH] : 0;
            want_cum_logf[i] = before - fabs(noise[i]);
        }
        cum_logf = want_cum_logf;
    }
    AttentionState device() const {
        return {k, v, gate == NO_GATE ? NULL : cum_logf.p, proj, d_lengths, capacity};
    }
    const bf16* z() const { return gate == GATE ? proj + s.row_stride + fgate_column : NULL; }
    int64_t row(int64_t sequence, int64_t t) const {
        return sequence * (1 + s.T) + 1 + t;
    }                                                                                 // of q, new_k, proj
    int64_t at(int64_t sequence, int64_t t) const { return sequence * capacity + t; } // of k, v, cum_logf

    // What attention_append should do.
    void append() {
        for (int64_t i = 0; i < s.B; i++)
            for (int64_t t = 0; t < s.T; t++) {
                int64_t to = at(i, lengths[i] + t);
                std::copy_n(&new_k.values[row(i, t) * d], d, &k.values[to * d]);
                std::copy_n(&new_v.values[row(i, t) * d], d, &v.values[to * d]);
                for (int64_t h = 0; h < s.NH && gate != NO_GATE; h++) {
                    double logit =
                        bias[h] + (gate == GATE ? proj[row(i, t) * s.row_stride + fgate_column + h] : 0);
                    double before = lengths[i] + t ? want_cum_logf[(to - 1) * s.NH + h] : 0;
                    want_cum_logf[to * s.NH + h] = before - log1p(exp(-logit));
                }
            }
    }

    // softmax over the first lengths + t + 1 keys of q.k / sqrt(dh) + cum_logf_i - cum_logf_j, times v
    vector<double> attention() const {
        vector<double> o(s.B * s.T * d);
        for (int64_t i = 0; i < s.B; i++)
            for (int64_t t = 0; t < s.T; t++)
                for (int64_t h = 0; h < s.NH; h++) attention_row(&o[(i * s.T + t) * d + h * s.dh], i, t, h);
        return o;
    }
    void attention_row(double* o, int64_t sequence, int64_t t, int64_t h) const {
        int64_t keys = lengths[sequence] + t + 1;
        const double *query = &q.values[row(sequence, t) * d + h * s.dh],
                     *c = &want_cum_logf[at(sequence, 0) * s.NH + h];
        vector<double> p(keys);
        double row_max = -INFINITY, row_sum = 0;
        for (int64_t j = 0; j < keys; j++) {
            const double* key = &k.values[at(sequence, j) * d + h * s.dh];
            for (int64_t x = 0; x < s.dh; x++) p[j] += query[x] * key[x];
            p[j] = p[j] / sqrt((double)s.dh) + (gate == NO_GATE ? 0 : c[(keys - 1) * s.NH] - c[j * s.NH]);
            row_max = fmax(row_max, p[j]);
        }
        for (double& x : p) row_sum += x = exp(x - row_max);
        for (int64_t j = 0; j < keys; j++)
            for (int64_t x = 0; x < s.dh; x++) o[x] += p[j] / row_sum * v[at(sequence, j) * d + h * s.dh + x];
    }
};

// ----------------------------------------------------------------------------

static void test_extend(const vector<int64_t>& lengths, int64_t T, int64_t NH, int64_t dh, Gate gate) {
    snprintf(test_case, sizeof test_case, "n %zu, %lld tokens held, t %lld, NH %lld, dh %lld, gate %d",
             lengths.size(), (long long)sum(lengths), (long long)T, (long long)NH, (long long)dh, gate);
    State in(lengths, T, NH, dh, gate);
    AttentionState state = in.device();
    int64_t n = in.s.B, d = in.d;
    Buffer<bf16> o(n * T * d), o_again(o.n);
    in.append();
    attention_append(&state, in.new_k, in.new_v, in.bias, in.z(), &in.s, 0);
    CHECK(doubles(in.k.host()) == in.k.values && doubles(in.v.host()) == in.v.values,
          "%s: appended keys and values", test_case);
    check_close("cum_logf", in.want_cum_logf, in.cum_logf, CUM_LOGF_LIMIT);

    attention_extend(o, in.q, &state, &in.s, 0);
    check_bf16("o", in.attention(), o);
    attention_extend(o_again, in.q, &state, &in.s, 0);
    check_same_bits("o of a second run", o, o_again);

    // each token by itself: as one sequence of length lengths + t, extended by one
    for (int64_t i = 0; i < n; i++)
        for (int64_t t = 0; t < T; t++) {
            HeadShape one = in.s;
            one.B = one.T = 1;
            Buffer<int64_t> length(vector<int64_t>{lengths[i] + t});
            Buffer<bf16> o_one(d);
            AttentionState part = {state.k + in.at(i, 0) * d,
                                   state.v + in.at(i, 0) * d,
                                   state.cum_logf ? state.cum_logf + in.at(i, 0) * NH : NULL,
                                   NULL,
                                   length,
                                   in.capacity};
            attention_extend(o_one, in.q + (in.row(i, t) - 1) * d, &part, &one, 0); // q's row 0 is not read
            check_same_bits("o of one token", o_one.p, o + (i * T + t) * d, d);
        }

    vector<bf16> want_proj = in.proj.host();
    for (int64_t i = 0; i < n; i++)
        std::copy_n(&want_proj[in.row(i, T - 1) * in.s.row_stride], in.s.row_stride,
                    &want_proj[(in.row(i, 0) - 1) * in.s.row_stride]);
    attention_keep_last(&state, &in.s, 0);
    CHECK(same_bits(in.proj.host(), want_proj), "%s: proj after attention_keep_last", test_case);
}

// angles of the positions lengths - 1 + i; those of position -1 are finite.
static void test_angles(const vector<int64_t>& lengths, int64_t T, int64_t dh) {
    snprintf(test_case, sizeof test_case, "angles of n %zu, t %lld, dh %lld", lengths.size(), (long long)T,
             (long long)dh);
    const double base = 500000;
    State in(lengths, T, 1, dh, NO_GATE);
    AttentionState state = in.device();
    Buffer<float> angles(in.rows * dh);
    vector<double> want(angles.n);
    for (int64_t i = 0; i < (int64_t)want.size() / 2; i++) {
        int64_t row = i / (dh / 2), position = lengths[row / (1 + T)] - 1 + row % (1 + T);
        double angle = (double)position * pow(base, -2.0 * (double)(i % (dh / 2)) / (double)dh);
        want[2 * i] = cos(angle);
        want[2 * i + 1] = sin(angle);
    }
    rope_angles_extend(angles, &state, base, &in.s, 0);
    check_close("angles", want, angles, ANGLES_LIMIT);
}

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    CHECK_DIES("head sizes 64 and 128", ({
                   AttentionState state = {};
                   HeadShape shape = {1, 1, 1, 32, 0, 0, 0};
                   attention_extend(NULL, NULL, &state, &shape, 0);
               }));
    for (int64_t dh : {64, 128})
        for (Gate gate : {NO_GATE, GATE, GATE_BIAS_ONLY}) {
            test_extend({0}, 1, 2, dh, gate);
            test_extend({5}, 1, 3, dh, gate);
            test_extend({0, 7, 1}, 1, 2, dh, gate);
            test_extend({0, 3, 17}, 5, 2, dh, gate);
            if (quick) continue;
            test_extend({1000}, 1, 12, dh, gate);
            test_extend({0}, 130, 3, dh, gate);
            test_extend({0, 1, 8, 9, 64, 300, 1023}, 3, 5, dh, gate);
            test_extend({100, 0, 31}, 33, 2, dh, gate);
        }
    test_angles({0, 1, 77}, 1, 64);
    test_angles({5, 0}, 9, 128);
    test_angles({65536, 3}, 2, 64);
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
