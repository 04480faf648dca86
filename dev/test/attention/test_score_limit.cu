/*
U, the bound of |q k| / sqrt(dh) by which attention is pruned (pruning.cuh), for queries and keys that
qkv_forward makes: no score of a head is above it, it is as defined, and where a query and a key are made to
reach it they do.

    test_score_limit [SEED]
*/
#include "../../../llmc/attention/pruning.cuh"
#include "../../../llmc/layers/qkv.cuh"
#include "../gpu/buffers.cuh"

// Weights of QK norm: near 1; of both signs; one of q and one of k far larger, in channels that RoPE turns
// into one another (0 and dh/2); the same for q and k.
typedef enum { PLAIN, SIGNS, HUGE_PAIR, EQUAL, NO_NORM, NUM_KINDS } Kind;

static const int64_t APART = 11; // RoPE turns the first pair by 11 radians, 7 quarter turns nearly
static const double ROUNDING = 1 + 1.0 / 128; // of q and k, in U

struct Case {
    HeadShape s;
    Kind kind;
    bool rope,
        aligned; // aligned: each sequence has a query and a key in the channels with the largest product
    double gain; // YaRN's, with RoPE
    vector<double> weights[2]; // of q, k
    Buffer<bf16> q, k, v, device_weights[2];
    Buffer<float> squares;

    Case(const HeadShape& shape, Kind kind, bool rope, bool aligned, double gain)
        : s(shape), kind(kind), rope(rope), aligned(aligned), gain(rope ? gain : 1), q(size()), k(size()),
          v(size()), device_weights{Buffer<bf16>(draw_weights(0)), Buffer<bf16>(draw_weights(1))},
          squares(2 * s.NH * head_norm_groups(&s)) {
        Buffer<bf16> proj(projection());
        Buffer<float> angles(s.T * s.dh), rstd(s.B * s.T * s.NH);
        Rotation rotation = rotation_plain(500000);
        rotation.gain = gain;
        rope_angles(angles, s.T, s.dh, rotation, 0);
        HeadPath paths[3] = {};
        bf16* const out[] = {q, k, v};
        for (int p = 0; p < 3; p++) {
            paths[p].column = p * s.NH * s.dh, paths[p].shift = -1, paths[p].eps = 1e-5f;
            paths[p].out = out[p], paths[p].rstd = rstd, paths[p].rope = p < 2 && rope;
            paths[p].weight = p < 2 && kind != NO_NORM ? device_weights[p].p : NULL;
        }
        qkv_forward(paths, squares, proj, angles, &s, 0);
    }
    size_t size() const { return (size_t)(s.B * s.T * s.NH * s.dh); }
    int64_t key_head(int64_t h) const { return h / head_group(&s); }

    vector<bf16> draw_weights(int of) {
        vector<bf16> w = draw<bf16>((size_t)(s.weight_stride ? s.NH * s.dh : s.dh), 0.3, 1);
        for (size_t i = 0; i < w.size(); i++) {
            if (kind == SIGNS && i % 3 == 0) w[i] = rounded<bf16>(-value(w[i]));
            if (kind == HUGE_PAIR && (int64_t)i % s.dh == of * s.dh / 2) w[i] = rounded<bf16>(30);
            if (kind == EQUAL && of) w[i] = rounded<bf16>(weights[0][i]);
        }
        weights[of] = doubles(w);
        return w;
    }
    // The largest product of a weight of q and one of k, and their channels: the same channel, with RoPE of
    // the same pair, with `any` any two.
    double product(int64_t h, bool any, int64_t channels[2]) const {
        double most = -1;
        for (int64_t i = 0; i < s.dh; i++)
            for (int64_t j = 0; j < s.dh; j++) {
                double x = fabs(weights[0][(size_t)(h * s.weight_stride + i)] *
                                weights[1][(size_t)(key_head(h) * s.weight_stride + j)]);
                bool meet = any || i == j || (rope && (i - j) % (s.dh / 2) == 0);
                if (meet && x > most) most = x, channels[0] = i, channels[1] = j;
            }
        return most;
    }
    // Rows [B T, 3 d]; with `aligned` a query at APART and a key at 0 of each head have one channel each.
    vector<bf16> projection() const {
        vector<bf16> proj = draw<bf16>(3 * size(), 1);
        for (int64_t head = 0; aligned && head < s.B * s.NH; head++) {
            int64_t b = head / s.NH, h = head % s.NH, channels[2] = {};
            if (kind != NO_NORM) product(h, false, channels);
            for (int of = 0; of < 2; of++) {
                size_t row = (size_t)(b * s.T + (of ? 0 : APART));
                bf16* x = &proj[row * (size_t)s.row_stride + (size_t)((of * s.NH + h) * s.dh)];
                std::fill(x, x + s.dh, rounded<bf16>(0));
                x[channels[of]] = rounded<bf16>(of ? -40 : 30);
            }
        }
        return proj;
    }

    vector<double> limits(bool measured, bool acp) const {
        size_t heads = (size_t)(s.B * s.NH);
        Buffer<double> cum_logf(heads * (size_t)s.T), limits(heads);
        Buffer<int> first(heads * (size_t)ceil_div<int64_t>(s.T, ATTENTION_BLOCK)), last(first.n),
            order(heads + 1);
        Buffer<char> scratch(pruning_scratch_bytes(&s));
        Pruning p = {};
        cum_logf.zero();
        p.bounds = {first, last, order};
        p.score_limits = limits, p.cum_logf = cum_logf, p.q = q, p.k = k, p.scratch = scratch;
        p.log_tolerance = -10, p.rope_gain = rope ? gain * gain : 0, p.acp = acp;
        if (measured) p.squares = squares;
        if (kind != NO_NORM) p.q_weight = device_weights[0], p.k_weight = device_weights[1];
        pruning_bounds(&p, &s, 0);
        CUDA_CHECK(cudaDeviceSynchronize());
        return limits.host();
    }
};

// Product of the largest norms, and largest score, of head h over tokens first, .., end - 1 of [B, T]
struct Scores {
    double norms, largest = 0; // over sqrt(dh)
    Scores(const Case& c, const vector<double>& q, const vector<double>& k, int64_t h, int64_t first,
           int64_t end) {
        double most[2] = {};
        auto dot = [&](const double* x, const double* y) {
            double sum = 0;
            for (int64_t n = 0; n < c.s.dh; n++) sum += x[n] * y[n];
            return sum;
        };
        auto query = [&](int64_t i) { return &q[(size_t)((i * c.s.NH + h) * c.s.dh)]; };
        auto key = [&](int64_t j) { return &k[(size_t)((j * key_heads(&c.s) + c.key_head(h)) * c.s.dh)]; };
        for (int64_t i = first; i < end; i++) {
            most[0] = fmax(most[0], dot(query(i), query(i))), most[1] = fmax(most[1], dot(key(i), key(i)));
            for (int64_t j = first; j < end; j++) largest = fmax(largest, fabs(dot(query(i), key(j))));
        }
        norms = sqrt(most[0] * most[1] / (double)c.s.dh), largest /= sqrt((double)c.s.dh);
    }
};

static void test_case_of(const HeadShape& s, Kind kind, bool rope, bool aligned, double gain) {
    Case c(s, kind, rope, aligned, gain);
    vector<double> q = doubles(c.q.host()), k = doubles(c.k.host());
    for (int i = 0; i < 4; i++) {
        const bool measured = i & 1, acp = i & 2;
        vector<double> limits = c.limits(measured, acp);
        for (int64_t head = 0; head < s.B * s.NH; head++) {
            int64_t b = head / s.NH, h = head % s.NH, ignored[2], first = b * s.T, end = first + s.T;
            Scores own(c, q, k, h, first, end);
            if (measured) // groups of tokens have neighbours in other sequences
                first -= first % NORM_TOKENS,
                    end = std::min(ceil_div<int64_t>(end, NORM_TOKENS) * NORM_TOKENS, s.B * s.T);
            double got = limits[(size_t)head] / ROUNDING, norms = Scores(c, q, k, h, first, end).norms,
                   want = kind == NO_NORM ? norms
                                          : c.product(h, acp, ignored) * c.gain * c.gain * sqrt((double)s.dh);
            if (measured && !acp) want = fmin(want, norms);
            snprintf(test_case, sizeof test_case,
                     "kind %d, rope %d, aligned %d, dh %lld, shared %d, measured %d, acp %d, head %lld", kind,
                     rope, aligned, (long long)s.dh, !s.weight_stride, measured, acp, (long long)head);
            CHECK(got * ROUNDING >= own.largest, "%s: U %.6g is below a score of %.6g", test_case,
                  got * ROUNDING, own.largest);
            CHECK(fabs(got - want) <= 1e-6 * want, "%s: U is %.8g times %g, not %.8g", test_case, got,
                  ROUNDING, want);
            // HUGE_PAIR's channels are the first pair's, another pair may be turned by less
            if (aligned && !acp && (!rope || kind == HUGE_PAIR) && !(rope && kind == NO_NORM))
                CHECK(own.largest >= got / ROUNDING, "%s: no score is above %.6g of U %.6g", test_case,
                      own.largest, got);
        }
    }
}

int main(int argc, char** argv) {
    test_begin(argc, argv);
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int i = 0; i < 16; i++) {
            int64_t dh = i & 1 ? 128 : 64, T = i & 2 ? 37 : 64; // 37: groups of tokens cross sequences
            test_case_of({3, T, 2, dh, 6 * dh, 6 * dh, i & 4 ? 0 : dh}, (Kind)kind, i & 8, true,
                         i & 4 ? 1 : 1.25);
            test_case_of({3, T, 2, dh, 6 * dh, 6 * dh, i & 4 ? 0 : dh}, (Kind)kind, i & 8, false,
                         i & 4 ? 1 : 1.25);
        }
    test_case_of({1, 2301, 1, 64, 192, 192, 64}, EQUAL, false, false, 1); // more groups than threads
    test_case_of({1, 2301, 1, 64, 192, 192, 64}, NO_NORM, false, false, 1);
    for (int kind = 0; kind < NUM_KINDS; kind++) // two and four query heads on a head of keys
        for (int64_t KVH : {1, 2})
            test_case_of({2, 37, 4, 64, 12 * 64, 12 * 64, 64, 0, NULL, KVH}, (Kind)kind, KVH == 1, false, 1);
    return test_report();
}
