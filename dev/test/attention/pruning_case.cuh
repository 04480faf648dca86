/*
A case of the pruning bounds: random inputs, and the bounds of both passes on the device. For test_pruning.
*/
#pragma once

#include "../../../llmc/attention/pruning.cuh"
#include "../../../llmc/model/documents.h"
#include "../gpu/buffers.cuh"

#define LOG_TOLERANCE (-10.0)

// WALLS: packed documents as document_reset has them, some shorter than a block, and scores of up to
// 100,000s, so that the rule alone skips next to nothing; from T = 1000 on also documents of several blocks.
typedef enum { OPEN, DEAD, SPREAD, FAST, DOCUMENTS, WALLS } Gates;
static const char* const gates_names[] = {"open", "dead", "spread", "fast", "documents", "walls"};

typedef enum { NORM_PER_HEAD, NORM_SHARED, NO_NORM } QKNorm;
static const char* const norm_names[] = {"norm per head", "norm shared", "no norm"};

struct Shape {
    int64_t B, T, NH, dh;
    int64_t window = 0; // as in HeadShape
    int64_t heads() const { return B * NH; }
    int64_t tokens() const { return B * NH * T; }
    int64_t blocks() const { return ceil_div<int64_t>(T, ATTENTION_BLOCK); }
    size_t size() const { return (size_t)(tokens() * dh); }
    HeadShape head_shape(int64_t weight_stride) const {
        return {B, T, NH, dh, NH * dh, NH * dh, weight_stride, window, NULL};
    }
    int64_t first_key(int64_t i) const { return window && i >= window ? i - window + 1 : 0; }
    // Does the window let any query of block m see any key of block n <= m?
    bool sees(int64_t m, int64_t n) const {
        return !window || m * ATTENTION_BLOCK - (n + 1) * ATTENTION_BLOCK + 1 < window;
    }
};

// doc_start [B, T] of WALLS: other documents in every sequence
static vector<int32_t> make_walls(const Shape& s) {
    vector<int32_t> starts;
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t t = 0; t < s.T; t++) {
            int64_t length = t / 640 % 2 ? 37 + b : 640; // four or five blocks, or part of one
            starts.push_back((int32_t)(t / 640 * 640 + t % 640 / length * length));
        }
    return starts;
}

// cum_logf [B, NH, T]. A head's weights decay by 1/e in 2 to T tokens where gates are spread, in up to 64
// where they are fast. A single head decays in 1065 of 70000 tokens: then blocks further back than
// PRUNING_BLOCKS matter.
static vector<double> make_gates(Gates kind, const Shape& s) {
    vector<double> cum_logf((size_t)s.tokens());
    vector<float> noise = draw<float>(cum_logf.size(), 1);
    vector<int32_t> walls = make_walls(s);
    for (int64_t head = 0; head < s.heads(); head++) {
        double range = kind == FAST ? 32 : fmax((double)s.T / 2, 1), sum = 0;
        double decay_time = 2 * pow(range, s.heads() > 1 ? (double)head / (double)(s.heads() - 1) : 0.6);
        for (int64_t t = 0; t < s.T; t++) {
            size_t at = (size_t)(head * s.T + t);
            double logf = -exp(0.5 * noise[at]) / decay_time;
            if (kind == OPEN) logf = 0;
            if (kind == DEAD) logf = -1000;
            if (kind == DOCUMENTS) logf = t % 300 == 299 ? -1000 : -1e-4;
            if (kind == WALLS) logf = walls[(size_t)(head / s.NH * s.T + t)] == t ? WALL_LOGF : -1e-4;
            cum_logf[at] = sum += logf;
        }
    }
    return cum_logf;
}

// Half of the cases have the norms that qkv_forward measures.
struct Inputs {
    Shape s;
    QKNorm norm;
    bool measured;
    vector<bf16> q, k, q_weight, k_weight; // the weights are drawn even without a norm
    vector<double> cum_logf;
    vector<int32_t> doc_start; // of WALLS, else empty

    Inputs(const Shape& shape, QKNorm norm, Gates gates)
        : s(shape), norm(norm), measured(gates % 2), q(draw<bf16>(s.size(), 1)), k(draw<bf16>(s.size(), 1)),
          q_weight(draw_weights()), k_weight(draw_weights()), cum_logf(make_gates(gates, s)) {
        if (gates == WALLS) doc_start = make_walls(s);
        if (gates == WALLS)
            for (bf16& x : norm == NO_NORM ? q : q_weight) x = rounded<bf16>(1e4 * value(x));
        if (norm == NO_NORM) return;
        apply_norm(q, q_weight);
        apply_norm(k, k_weight);
    }
    int64_t weight_stride() const { return norm == NORM_SHARED ? 0 : s.dh; }
    vector<bf16> draw_weights() const {
        vector<float> noise = draw<float>((size_t)(s.NH * s.dh), 0.3);
        vector<bf16> weights;
        for (float x : noise) weights.push_back(rounded<bf16>(1 + (double)x));
        return weights;
    }
    void apply_norm(vector<bf16>& x, const vector<bf16>& weight) const {
        for (size_t row = 0; row < x.size(); row += (size_t)s.dh) {
            int64_t head = (int64_t)row / s.dh % s.NH;
            double sum = 0;
            for (int64_t i = 0; i < s.dh; i++) sum += pow(value(x[row + (size_t)i]), 2);
            for (int64_t i = 0; i < s.dh; i++) {
                bf16& y = x[row + (size_t)i];
                y = rounded<bf16>(value(y) / sqrt(sum / (double)s.dh) *
                                  value(weight[(size_t)(head * weight_stride() + i)]));
            }
        }
    }

    int64_t document(int64_t head, int64_t t) const {
        return doc_start.empty() ? 0 : doc_start[(size_t)(head / s.NH * s.T + t)];
    }
    int64_t first_key(int64_t head, int64_t i) const { return std::max(s.first_key(i), document(head, i)); }
    // Do window and documents let any query of block m see any key of block n <= m?
    bool sees(int64_t head, int64_t m, int64_t n) const {
        return s.sees(m, n) && document(head, m * ATTENTION_BLOCK) < (n + 1) * ATTENTION_BLOCK;
    }
    // The largest square of a row of x, of head h and tokens first, .., end - 1 of [B, T]
    double largest_square(const vector<bf16>& x, int64_t h, int64_t first, int64_t end) const {
        double largest = 0;
        for (int64_t t = first; t < std::min(end, s.B * s.T); t++) {
            double sum = 0;
            for (int64_t i = 0; i < s.dh; i++) sum += pow(value(x[(size_t)((t * s.NH + h) * s.dh + i)]), 2);
            largest = fmax(largest, sum);
        }
        return largest;
    }
    // What qkv_forward gives of them
    vector<float> squares() const {
        vector<float> groups;
        for (const vector<bf16>* x : {&q, &k})
            for (int64_t h = 0; h < s.NH; h++)
                for (int64_t t = 0; t < s.B * s.T; t += NORM_TOKENS)
                    groups.push_back((float)largest_square(*x, h, t, t + NORM_TOKENS));
        return groups;
    }
    // U of the head
    double score_limit(int64_t head, bool acp = false) const {
        int64_t b = head / s.NH, h = head % s.NH, group = measured ? NORM_TOKENS : 1;
        int64_t first = b * s.T / group * group, end = ceil_div<int64_t>((b + 1) * s.T, group) * group;
        double q_max = 0, k_max = 0, product = 0; // of weights
        for (int64_t i = h * weight_stride(); i < h * weight_stride() + s.dh; i++) {
            double x = fabs(value(q_weight[(size_t)i])), y = fabs(value(k_weight[(size_t)i]));
            q_max = fmax(q_max, x), k_max = fmax(k_max, y), product = fmax(product, x * y);
        }
        double limit = norm == NO_NORM ? INFINITY : (acp ? q_max * k_max : product) * sqrt((double)s.dh);
        if (norm == NO_NORM || (measured && !acp))
            limit = fmin(limit, sqrt(largest_square(q, h, first, end) * largest_square(k, h, first, end) /
                                     (double)s.dh));
        return limit * (1 + 1.0 / 128);
    }
};

// The bounds of a case, on the device
struct Bounds {
    HeadShape shape;
    Buffer<bf16> q, k, q_weight, k_weight;
    Buffer<double> cum_logf, score_limits;
    Buffer<int> first_key_block, last_query_block, head_order;
    Buffer<PruningCount> count;
    Buffer<unsigned long long> head_kept;
    Buffer<char> scratch;
    Buffer<int32_t> doc_start;
    Buffer<float> squares;
    Pruning pruning = {};

    // prunes: else the bounds are those of documents alone
    explicit Bounds(const Inputs& in, bool acp = false, bool prunes = true)
        : shape(in.s.head_shape(in.weight_stride())), q(in.q), k(in.k), q_weight(in.q_weight),
          k_weight(in.k_weight), cum_logf(in.cum_logf), score_limits((size_t)in.s.heads()),
          first_key_block((size_t)(in.s.heads() * in.s.blocks())), last_query_block(first_key_block.n),
          head_order((size_t)in.s.heads() + 1), count(1), head_kept((size_t)in.s.NH),
          scratch(pruning_scratch_bytes(&shape)), doc_start(in.doc_start),
          squares(in.measured ? in.squares() : vector<float>()) {
        bool norm = in.norm != NO_NORM;
        pruning.bounds = {first_key_block, last_query_block, head_order};
        if (!in.doc_start.empty()) shape.doc_start = doc_start;
        pruning.score_limits = prunes ? score_limits.p : NULL, pruning.count = count,
        pruning.head_kept = head_kept, pruning.cum_logf = cum_logf;
        pruning.log_tolerance = LOG_TOLERANCE, pruning.scratch = scratch;
        pruning.acp = acp;
        if (norm) pruning.q_weight = q_weight, pruning.k_weight = k_weight;
        if (in.measured) pruning.squares = squares;
        if (!norm && !in.measured) pruning.q = q, pruning.k = k;
        CUDA_CHECK(cudaMemset(count, 0, sizeof(PruningCount)));
        CUDA_CHECK(cudaMemset(head_kept, 0, head_kept.n * sizeof(unsigned long long)));
        for (int run = 0; run < 2; run++) // twice: counts are added to, everything else is written
            pruning_bounds(&pruning, &shape, 0);
        check_ends();
    }
    void check_ends() {
        CUDA_CHECK(cudaDeviceSynchronize());
        CHECK(first_key_block.end_untouched() && last_query_block.end_untouched() &&
                  head_order.end_untouched() && count.end_untouched() && head_kept.end_untouched() &&
                  score_limits.end_untouched() && scratch.end_untouched(),
              "wrote past the end");
    }
    // Replaces the bounds by those of the backward pass.
    void become_backward(const float* lse) {
        pruning.lse = lse;
        pruning_backward_bounds(&pruning, &shape, 0);
        check_ends();
    }
};
