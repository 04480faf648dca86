/*
A plain bf16 implementation of the recurrences of llmc/baselines on the host, in chunks of 64 tokens, in the
formulas as they are usually written: operands of GEMMs rounded to bf16, sums and all else in float. Its
error is the yardstick of test_scan.cu.
*/
#pragma once

#include "../gpu/buffers.cuh"

// A matrix [rows, columns] in float
struct Matrix {
    int64_t rows, columns;
    vector<float> x;
    Matrix(int64_t r, int64_t c) : rows(r), columns(c), x((size_t)(r * c)) {}
    float& at(int64_t i, int64_t j) { return x[(size_t)(i * columns + j)]; }
    float at(int64_t i, int64_t j) const { return x[(size_t)(i * columns + j)]; }
    Matrix transposed() const {
        Matrix m(columns, rows);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) m.at(j, i) = at(i, j);
        return m;
    }
    template <class F> Matrix map(F f) const { // f(value, row, column)
        Matrix m = *this;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) m.at(i, j) = f(at(i, j), i, j);
        return m;
    }
    Matrix times(float a) const {
        return map([&](float v, int64_t, int64_t) { return a * v; });
    }
    Matrix rows_times(const vector<float>& a) const {
        return map([&](float v, int64_t i, int64_t) { return a[(size_t)i] * v; });
    }
    // Elements below the diagonal, and from it on where `diagonal`
    Matrix lower(bool diagonal) const {
        return map([&](float v, int64_t i, int64_t j) { return i > j || (diagonal && i == j) ? v : 0; });
    }
    Matrix bf16s() const {
        return map([](float v, int64_t, int64_t) { return (float)(bf16)v; });
    }
};

static inline Matrix sum(const Matrix& a, const Matrix& b) {
    return a.map([&](float v, int64_t i, int64_t j) { return v + b.at(i, j); });
}
static inline Matrix difference(const Matrix& a, const Matrix& b) { return sum(a, b.times(-1)); }
static inline Matrix elementwise(const Matrix& a, const Matrix& b) {
    return a.map([&](float v, int64_t i, int64_t j) { return v * b.at(i, j); });
}
static inline vector<float> row_sums(const Matrix& a) {
    vector<float> s((size_t)a.rows);
    for (int64_t i = 0; i < a.rows; i++)
        for (int64_t j = 0; j < a.columns; j++) s[(size_t)i] += a.at(i, j);
    return s;
}
// A B as tensor cores compute it
static inline Matrix gemm(const Matrix& left, const Matrix& right) {
    Matrix a = left.bf16s(), b = right.bf16s(), c(a.rows, b.columns);
    for (int64_t i = 0; i < a.rows; i++)
        for (int64_t k = 0; k < a.columns; k++)
            for (int64_t j = 0; j < b.columns; j++) c.at(i, j) += a.at(i, k) * b.at(k, j);
    return c;
}

// One head of a sequence: inputs and outputs of the plain implementation, [T, ..] each. split > 0: it is run
// in two parts, of which the first has `split` tokens, and without the backward pass.
struct PlainHead {
    int64_t T, K, V, split;
    float scale;
    vector<int64_t> begins; // of the chunks, and T
    Matrix q, k, v, dout, o, dq, dk, dv, state;
    vector<float> log_decay, beta, skip, dlog_decay, dbeta; // log_decay or beta may be empty
    PlainHead(int64_t t, int64_t K_, int64_t V_, float s, int64_t split_)
        : T(t), K(K_), V(V_), split(split_), scale(s), q(t, K_), k(t, K_), v(t, V_), dout(t, V_), o(t, V_),
          dq(t, K_), dk(t, K_), dv(t, V_), state(K_, V_), dlog_decay((size_t)t), dbeta((size_t)t) {
        for (int64_t at = 0; at < T; at = std::min(at + CHUNK, at < split ? split : T)) begins.push_back(at);
        begins.push_back(T);
    }

    static constexpr int64_t CHUNK = 64;
    int64_t chunks() const { return (int64_t)begins.size() - 1; }
    int64_t begin(int64_t c) const { return begins[(size_t)c]; }
    Matrix part(const Matrix& x, int64_t c) const {
        Matrix m(begin(c + 1) - begin(c), x.columns);
        std::copy_n(x.x.begin() + begin(c) * x.columns, m.x.size(), m.x.begin());
        return m;
    }
    vector<float> part(const vector<float>& x, int64_t c) const {
        return {x.begin() + begin(c), x.begin() + begin(c + 1)};
    }
    void set(Matrix& x, int64_t c, const Matrix& part) const {
        std::copy(part.x.begin(), part.x.end(), x.x.begin() + begin(c) * x.columns);
    }
    void run() {
        if (beta.empty())
            run_decay();
        else
            run_delta();
    }

    // Decay factors of a chunk
    struct Decays {
        vector<float> from_start, to_end; // e^b, e^(b_C - b)
        float all;
        Matrix between; // e^(b_i - b_j) for j <= i
    };
    Decays decays(int64_t c, int64_t n) const {
        vector<float> b((size_t)n);
        float total = 0;
        for (int64_t i = 0; i < n; i++)
            b[(size_t)i] = total += log_decay.empty() ? 0 : log_decay[(size_t)(begin(c) + i)];
        Decays d = {b, b, expf(total), Matrix(n, n)};
        for (float& x : d.from_start) x = expf(x);
        for (float& x : d.to_end) x = expf(total - x);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j <= i; j++) d.between.at(i, j) = expf(b[(size_t)i] - b[(size_t)j]);
        return d;
    }
    void run_decay() {
        vector<Matrix> states;
        Matrix S(K, V), dS(K, V);
        for (int64_t c = 0; c < chunks(); c++) {
            Matrix Q = part(q, c), K_ = part(k, c), V_ = part(v, c);
            Decays d = decays(c, Q.rows);
            states.push_back(S);
            Matrix P = elementwise(gemm(Q, K_.transposed()), d.between);
            Matrix through = sum(gemm(Q.rows_times(d.from_start), S), gemm(P, V_)).times(scale);
            set(o, c, sum(through, V_.rows_times(part(skip, c))).bf16s());
            S = sum(S.times(d.all), gemm(K_.rows_times(d.to_end).transposed(), V_));
        }
        state = S;
        if (split) return;
        for (int64_t c = chunks() - 1; c >= 0; c--) {
            Matrix Q = part(q, c), K_ = part(k, c), V_ = part(v, c), dO = part(dout, c);
            Decays d = decays(c, Q.rows);
            const Matrix& S0 = states[(size_t)c];
            Matrix P = elementwise(gemm(Q, K_.transposed()), d.between).bf16s(),
                   pairs = gemm(dO, V_.transposed());
            Matrix W = elementwise(pairs, d.between), later = gemm(K_, dS).rows_times(d.to_end);
            Matrix inter = gemm(Q.rows_times(d.from_start), S0);
            set(dq, c, sum(gemm(dO.rows_times(d.from_start), S0.transposed()), gemm(W, K_)).times(scale));
            set(dk, c,
                sum(gemm(V_.rows_times(d.to_end), dS.transposed()), gemm(W.transposed(), Q)).times(scale));
            set(dv, c, sum(later, gemm(P.transposed(), dO)).times(scale).bf16s());
            decay_gradient(c, elementwise(P, pairs), row_sums(elementwise(inter, dO)),
                           row_sums(elementwise(later, V_)), elementwise(S0.bf16s(), dS.bf16s()), d.all);
            dS = sum(dS.times(d.all), gemm(Q.rows_times(d.from_start).transposed(), dO));
        }
    }
    void decay_gradient(int64_t c, const Matrix& pairs, const vector<float>& inter,
                        const vector<float>& later, const Matrix& states, float all) {
        vector<float> rows = row_sums(pairs), columns = row_sums(pairs.transposed());
        float both = 0, sum = 0;
        for (float x : states.x) both += x;
        for (int64_t t = pairs.rows - 1; t >= 0; t--) {
            sum += rows[(size_t)t] - columns[(size_t)t] + inter[(size_t)t];
            dlog_decay[(size_t)(begin(c) + t)] = sum + both * all;
        }
        sum = 0;
        for (int64_t t = 0; t < pairs.rows; t++) {
            float& x = dlog_decay[(size_t)(begin(c) + t)];
            x = scale * (x + sum);
            sum += later[(size_t)t];
        }
    }

    // A and T of a chunk
    static Matrix inverse(const Matrix& A) {
        Matrix X(A.rows, A.rows);
        for (int64_t c = 0; c < A.rows; c++)
            for (int64_t i = 0; i < A.rows; i++) {
                float x = i == c;
                for (int64_t j = 0; j < i; j++) x -= A.at(i, j) * X.at(j, c);
                X.at(i, c) = x;
            }
        return X;
    }
    struct DeltaChunk {
        Matrix Q, K, V, P, A, T, W, U;  // A: strictly lower, with decays as P
        vector<float> beta, beta_since; // the second times e^b
        Decays d;
        static DeltaChunk of(const PlainHead& h, int64_t c) {
            Matrix Q = h.part(h.q, c), K = h.part(h.k, c), V = h.part(h.v, c);
            vector<float> beta(h.beta.begin() + h.begin(c), h.beta.begin() + h.begin(c + 1));
            Decays d = h.decays(c, Q.rows);
            vector<float> since = beta;
            for (size_t i = 0; i < beta.size(); i++) since[i] *= d.from_start[i];
            Matrix A = elementwise(gemm(K, K.transposed()).lower(false), d.between).rows_times(beta),
                   T = inverse(A);
            return {Q,
                    K,
                    V,
                    elementwise(gemm(Q, K.transposed()), d.between),
                    A,
                    T,
                    gemm(T, K.rows_times(since)),
                    gemm(T, V.rows_times(beta)),
                    beta,
                    since,
                    d};
        }
    };
    void run_delta() {
        vector<Matrix> states;
        Matrix S(K, V), dS(K, V);
        for (int64_t c = 0; c < chunks(); c++) {
            DeltaChunk x = DeltaChunk::of(*this, c);
            states.push_back(S);
            Matrix values = difference(x.U.bf16s(), gemm(x.W, S));
            set(o, c, sum(gemm(x.Q, S).rows_times(x.d.from_start), gemm(x.P, values)).times(scale).bf16s());
            S = sum(S.times(x.d.all), gemm(x.K.rows_times(x.d.to_end).transposed(), values));
        }
        state = S;
        if (split) return;
        for (int64_t c = chunks() - 1; c >= 0; c--) {
            DeltaChunk x = DeltaChunk::of(*this, c);
            const Matrix& S0 = states[(size_t)c];
            Matrix dO = part(dout, c), values = difference(x.U.bf16s(), gemm(x.W, S0));
            Matrix dvalues = sum(gemm(x.P.transposed(), dO), gemm(x.K, dS).rows_times(x.d.to_end));
            Matrix pairs = gemm(dO, values.transposed()), dP = elementwise(pairs, x.d.between),
                   dW = gemm(dvalues, S0.transposed()).times(-1);
            Matrix dT = sum(gemm(dvalues, x.V.rows_times(x.beta).transposed()),
                            gemm(dW, x.K.rows_times(x.beta_since).transposed()));
            Matrix dA = gemm(gemm(x.T.transposed(), dT), x.T.transposed()).lower(false).times(-1);
            Matrix dbeta_k = gemm(x.T.transposed(), dW), dbeta_v = gemm(x.T.transposed(), dvalues);
            Matrix dB = elementwise(dA, x.d.between).rows_times(x.beta);
            Matrix read = gemm(dO, S0.transposed()).rows_times(x.d.from_start);
            set(dq, c, sum(read, gemm(dP, x.K)).times(scale).bf16s());
            set(dv, c, dbeta_v.rows_times(x.beta).times(scale).bf16s());
            Matrix later = gemm(values, dS.transposed()).rows_times(x.d.to_end);
            Matrix own = sum(gemm(dP.transposed(), x.Q), later), through_w = dbeta_k.rows_times(x.beta_since);
            Matrix through_a = sum(gemm(dB, x.K), gemm(dB.transposed(), x.K));
            set(dk, c, sum(sum(own, through_a), through_w).times(scale).bf16s());
            Matrix dAA = elementwise(dA, x.A);
            vector<float> a = row_sums(elementwise(dbeta_v, x.V)),
                          b = row_sums(elementwise(dbeta_k, x.K.rows_times(x.d.from_start))),
                          e = row_sums(dAA);
            for (size_t i = 0; i < a.size(); i++)
                dbeta[(size_t)begin(c) + i] = scale * (a[i] + b[i] + (x.beta[i] > 0 ? e[i] / x.beta[i] : 0));
            decay_gradient(c, sum(elementwise(x.P.bf16s(), pairs), dAA),
                           row_sums(sum(elementwise(read, x.Q), elementwise(through_w, x.K))),
                           row_sums(elementwise(later, x.K)), elementwise(S0.bf16s(), dS.bf16s()), x.d.all);
            dS = difference(sum(dS.times(x.d.all), gemm(x.Q.rows_times(x.d.from_start).transposed(), dO)),
                            gemm(x.W.transposed(), dvalues));
        }
    }
};
