/*
The references of test_channel_scan, on the host.

    expected    the recurrence of the CPU trainer (llmc/mixers/recurrence.h) in double, and the functions around it
    plain       a plain bf16 implementation: q and k rounded to bf16, chunks of 64 in sub-blocks of 16 relative to
                their borders, every operand of a matrix multiplication and every result rounded to bf16, what is
                subtracted in the gate's gradient rounded to float; everything else is exact
*/
#pragma once

#include <algorithm>
#include <omp.h>
#include "../../../llmc/model/activations.h"
#include "../../../llmc/model/extension.h"
#include "../../../llmc/model/params.h"
#include "buffers.cuh"

#define REAL_IS_DOUBLE
#define _Thread_local thread_local
namespace cpu {
#include "../../../llmc/mixers/recurrence.h"
}

enum { K = 128 }; // channels of a head

struct Shape {
    int64_t B, T, NH;
    bool bound;
    int64_t d() const { return NH * K; }
    int64_t rows() const { return B * T; }
};

// Tensors [B,T,NH,K], dbound [NH,K], state [B,NH,K,K]
struct Results {
    vector<double> o, dq, df, dv, dbound, state;
    vector<double> terms; // q dq, the size of what cancels in df
};

// Inputs [B,T,NH,K] as the kernels read them; state: at the beginning, empty: none
struct Inputs {
    vector<double> q, f, v, dout, bound, state;
};

// Gates and queries from the inputs, in double
struct Gates {
    vector<double> q, k, f, open; // q without scale; open = sigmoid of the input
    Gates(const Shape& s, const Inputs& in) : q(in.q.size()), k(q.size()), f(q.size()), open(q.size()) {
        int64_t d = s.d();
        for (int64_t i = 0; i < (int64_t)q.size(); i++) {
            double low = s.bound ? in.bound[(size_t)(i % d)] : 0, x = in.q[i];
            q[i] = x / (1 + exp(-x));
            open[i] = 1 / (1 + exp(-in.f[i]));
            f[i] = low + (1 - low) * open[i];
            k[i] = (1 - low) / (1 + exp(in.f[i]));
        }
    }
    // From the gradients of q and of f, k a function of f
    void gradients(Results* r, const Shape& s, const Inputs& in, const vector<double>& dq,
                   const vector<double>& df) const {
        int64_t d = s.d();
        r->dbound.assign((size_t)d, 0);
        for (int64_t i = 0; i < (int64_t)q.size(); i++) {
            double low = s.bound ? in.bound[(size_t)(i % d)] : 0, x = in.q[i], a = 1 / (1 + exp(-x)),
                   shut = 1 / (1 + exp(in.f[i]));
            r->dq[i] = dq[i] * a * (1 + x * (1 - a));
            r->df[i] = df[i] * (1 - low) * open[i] * shut;
            r->dbound[(size_t)(i % d)] += df[i] * shut;
        }
    }
};

static Results expected(const Shape& s, const Inputs& in, bool backward) {
    Gates gates(s, in);
    int64_t d = s.d();
    size_t n = in.q.size();
    cpu::RecurrenceShape shape = {s.B, s.T, s.NH, K, K, d, K, K, d, 1 / sqrt((double)K)};
    vector<double> checkpoints(
        backward ? (size_t)(s.B * s.NH * cpu::recurrence_segments(s.T) * K * K) : 0);
    Results r;
    r.o.resize(n), r.state = in.state;
    cpu::Recurrence recurrence = {gates.q.data(), gates.k.data(),
                                  in.v.data(),    gates.f.data(),
                                  NULL,           backward ? checkpoints.data() : NULL,
                                  r.state.empty() ? NULL : r.state.data()};
    cpu::recurrence_forward(r.o.data(), &recurrence, &shape);
    if (!backward) return r;
    int64_t pieces = cpu::recurrence_pieces(K);
    vector<double> parts(3 * n * (size_t)pieces), dq(n), df(n);
    r.dq.resize(n), r.df.resize(n), r.dv.resize(n), r.terms.resize(n);
    cpu::RecurrenceBackward gradients = {parts.data(),
                                         parts.data() + n * pieces,
                                         parts.data() + 2 * n * pieces,
                                         NULL,
                                         r.dv.data(),
                                         in.dout.data()};
    cpu::recurrence_backward(&gradients, &recurrence, &shape);
    for (size_t row = 0; row < n / K; row++)
        for (size_t c = 0; c < K; c++) {
            double sums[3] = {};
            for (size_t i = 0; i < 3; i++)
                for (size_t p = 0; p < (size_t)pieces; p++)
                    sums[i] += parts[i * n * pieces + (row * pieces + p) * K + c];
            dq[row * K + c] = sums[0];
            df[row * K + c] = sums[2] - sums[1];
            r.terms[row * K + c] = fabs(gates.q[row * K + c] * sums[0]);
        }
    gates.gradients(&r, s, in, dq, df);
    return r;
}

// ----------------------------------------------------------------------------
// plain bf16

static double to_bf16(double x) { return (double)(float)(bf16)(float)x; }

// A chunk of a head; [64][K] each
struct PlainChunk {
    enum { C = 64, SUB = 16 };
    int count;
    double q[C][K], k[C][K], v[C][K], dout[C][K], f[C][K], b[C][K]; // b: cumulative log f in the chunk
    double o[C][K], dq[C][K], dk[C][K], dv[C][K], inter[C][K];      // inter: of dk
    double later[K];                                                // dlogf of the chunk's last token

    double decay(int i, int j, int c) const { return exp(b[i][c] - (j < 0 ? 0 : b[j][c])); } // j < i
    static int border(int j) { return j / SUB * SUB + SUB - 1; }

    // S = diag(decay) S + K^T V, and backward dS = diag(decay) (dS + Q^T dO)
    void advance(double* S, bool backward) const {
        int last = count - 1;
#pragma omp parallel for
        for (int c = 0; c < K; c++)
            for (int x = 0; x < K; x++) {
                double sum = S[c * K + x] * decay(last, -1, c);
                for (int t = 0; t < count; t++)
                    sum += backward ? to_bf16(q[t][c] * decay(t, -1, c)) * dout[t][x]
                                    : to_bf16(k[t][c] * decay(last, t, c)) * v[t][x];
                S[c * K + x] = (float)sum;
            }
    }

    // From the states at the chunk's start and the gradient at its end
    void compute(const double* S, const double* dS) {
        static const int LAST = C - 1;
        int last = count - 1;
        vector<double> A(C * C), dA(C * C);
        auto operands = [&](int i, int j, int c, double* x, double* y) { // of pair i >= j: q and k
            int r = border(j);
            bool near = i <= r;
            *x = near ? q[i][c] : to_bf16(q[i][c] * decay(i, r, c));
            *y = near ? k[j][c] * (i == j ? 1 : decay(i, j, c)) : to_bf16(k[j][c] * decay(r, j, c));
        };
        (void)LAST;
        for (int i = 0; i < count; i++)
            for (int j = 0; j <= i; j++) {
                double a = 0, g = 0, x, y;
                for (int c = 0; c < K; c++) {
                    operands(i, j, c, &x, &y);
                    a += x * y;
                    g += dout[i][c] * v[j][c];
                }
                A[i * C + j] = to_bf16(a), dA[i * C + j] = to_bf16(g);
            }
        for (int t = 0; t < count; t++)
            for (int c = 0; c < K; c++) {
                double out = 0, gv = 0, gq = 0, gk = 0;
                for (int x = 0; x < K; x++) {
                    out += to_bf16(q[t][x] * decay(t, -1, x)) * to_bf16(S[x * K + c]);
                    gv += to_bf16(k[t][x] * decay(last, t, x)) * to_bf16(dS[x * K + c]);
                    gq += dout[t][x] * to_bf16(S[c * K + x]);
                    gk += v[t][x] * to_bf16(dS[c * K + x]);
                }
                gq *= decay(t, -1, c), gk *= decay(last, t, c);
                inter[t][c] = (float)gk;
                for (int j = 0; j <= t; j++) {
                    double x, y;
                    operands(t, j, c, &x, &y);
                    out += A[t * C + j] * v[j][c];
                    gq += dA[t * C + j] * y * (t > border(j) ? decay(t, border(j), c) : 1);
                }
                for (int i = t; i < count; i++) {
                    double x, y;
                    operands(i, t, c, &x, &y);
                    gv += A[i * C + t] * dout[i][c];
                    gk += dA[i * C + t] * (i > border(t) ? x * decay(border(t), t, c)
                                                         : x * (i == t ? 1 : decay(i, t, c)));
                }
                o[t][c] = to_bf16(out), dv[t][c] = to_bf16(gv);
                dq[t][c] = (float)gq, dk[t][c] = (float)gk;
            }
        for (int c = 0; c < K; c++) {
            later[c] = 0;
            for (int x = 0; x < K; x++)
                later[c] += to_bf16(S[c * K + x]) * to_bf16(dS[c * K + x]) * decay(last, -1, c);
            for (int t = 0; t < count; t++) later[c] += (double)((float)k[t][c] * (float)inter[t][c]);
        }
    }
};

// o and the gradients of q, f, v
static Results plain(const Shape& s, const Inputs& in) {
    Gates gates(s, in);
    size_t n = in.q.size();
    int64_t d = s.d(), chunks = ceil_div<int64_t>(s.T, PlainChunk::C);
    Results r;
    r.o.resize(n), r.dq.resize(n), r.df.resize(n), r.dv.resize(n);
    vector<double> dq(n), df(n);
    double scale = 1 / sqrt((double)K);
    for (int64_t head = 0; head < s.B * s.NH; head++) {
        size_t base = (size_t)(head / s.NH * s.T * d + head % s.NH * K);
        vector<PlainChunk> all((size_t)chunks);
        vector<double> states((size_t)(2 * (chunks + 1) * K * K)); // forward, then backward
#pragma omp parallel for
        for (int64_t i = 0; i < chunks; i++) {
            PlainChunk& x = all[(size_t)i];
            x.count = (int)std::min<int64_t>(PlainChunk::C, s.T - i * PlainChunk::C);
            for (int t = 0; t < x.count; t++)
                for (int c = 0; c < K; c++) {
                    size_t at = base + (size_t)((i * PlainChunk::C + t) * d + c);
                    x.q[t][c] = to_bf16(to_bf16(gates.q[at]) * scale), x.k[t][c] = to_bf16(gates.k[at]);
                    x.v[t][c] = in.v[at], x.dout[t][c] = in.dout[at], x.f[t][c] = gates.f[at];
                    x.b[t][c] = (t ? x.b[t - 1][c] : 0) + log(fmax(gates.f[at], 1e-300));
                }
        }
        double *S = states.data(), *dS = S + (chunks + 1) * K * K;
        for (int64_t i = 0; i < chunks; i++) {
            std::copy_n(S + i * K * K, K * K, S + (i + 1) * K * K);
            all[(size_t)i].advance(S + (i + 1) * K * K, false);
        }
        for (int64_t i = chunks - 1; i > 0; i--) {
            std::copy_n(dS + i * K * K, K * K, dS + (i - 1) * K * K);
            all[(size_t)i].advance(dS + (i - 1) * K * K, true);
        }
#pragma omp parallel for
        for (int64_t i = 0; i < chunks; i++) {
            PlainChunk& x = all[(size_t)i];
            x.compute(S + i * K * K, dS + i * K * K);
            for (int c = 0; c < K; c++) {
                double dlogf = x.later[c];
                for (int t = x.count - 1; t >= 0; t--) {
                    size_t at = base + (size_t)((i * PlainChunk::C + t) * d + c);
                    dlogf += (double)((float)x.q[t][c] * (float)x.dq[t][c]) -
                             (double)((float)x.k[t][c] * (float)x.dk[t][c]);
                    dq[at] = scale * x.dq[t][c];
                    df[at] = dlogf / x.f[t][c] - x.dk[t][c];
                    r.o[at] = x.o[t][c], r.dv[at] = x.dv[t][c];
                }
            }
        }
    }
    gates.gradients(&r, s, in, dq, df);
    for (size_t i = 0; i < n; i++) r.dq[i] = to_bf16(r.dq[i]), r.df[i] = to_bf16(r.df[i]);
    return r;
}
