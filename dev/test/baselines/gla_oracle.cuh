/*
The references of test_gla, on the host.

    expected    the recurrence of the CPU trainer (llmc/baselines/shared/scan.h) in double, and the functions
                around it
    plain       a plain bf16 implementation: q and k rounded to bf16, chunks of 64 in sub-blocks of 16
                relative to their borders, every operand of a matrix multiplication and every result rounded
                to bf16, what is subtracted in the gate's gradient rounded to float; everything else is exact
*/
#pragma once

#include <algorithm>
#include <omp.h>
#include "../../../llmc/model/activations.h"
#include "../../../llmc/model/extension.h"
#include "../../../llmc/model/params.h"
#include "../gpu/buffers.cuh"

#define REAL_IS_DOUBLE
namespace cpu {
#include "../../../llmc/baselines/shared/scan.h"
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
    cpu::ScanShape shape = {s.B, s.T, s.NH, K, K, d, K, K, d, 1 / sqrt((double)K)};
    vector<double> checkpoints(backward ? (size_t)(s.B * s.NH * cpu::scan_segments(s.T) * K * K) : 0);
    Results r;
    r.o.resize(n), r.state = in.state;
    cpu::Scan scan = {gates.q.data(),
                      gates.k.data(),
                      in.v.data(),
                      gates.f.data(),
                      NULL,
                      backward ? checkpoints.data() : NULL,
                      r.state.empty() ? NULL : r.state.data()};
    cpu::scan_forward(r.o.data(), &scan, &shape);
    if (!backward) return r;
    int64_t pieces = cpu::scan_pieces(K);
    vector<double> parts(3 * n * (size_t)pieces), dq(n), df(n);
    r.dq.resize(n), r.df.resize(n), r.dv.resize(n), r.terms.resize(n);
    cpu::ScanBackward gradients = {
        parts.data(),  parts.data() + n * pieces, parts.data() + 2 * n * pieces, NULL, r.dv.data(),
        in.dout.data()};
    cpu::scan_backward(&gradients, &scan, &shape);
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

static double to_bf16(double x) { // to nearest even; x is finite
    float y = (float)x;
    uint32_t bits;
    memcpy(&bits, &y, sizeof y);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&y, &bits, sizeof y);
    return y;
}

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
        for (int c = 0; c < K; c++) {
            double weights[C], *row = S + c * K;
            for (int t = 0; t < count; t++)
                weights[t] = to_bf16(backward ? q[t][c] * decay(t, -1, c)
                                              : k[t][c] * (t < last ? decay(last, t, c) : 1));
            for (int x = 0; x < K; x++) row[x] *= decay(last, -1, c);
            for (int t = 0; t < count; t++)
                for (int x = 0; x < K; x++) row[x] += weights[t] * (backward ? dout[t][x] : v[t][x]);
            for (int x = 0; x < K; x++) row[x] = (float)row[x];
        }
    }

    // Adds the pairs i >= j of the chunk to o and the gradients.
    void pairs() {
        for (int j = 0; j < count; j++)
            for (int i = j; i < count; i++) {
                int r = border(j);
                bool near = i <= r;
                double a = 0, g = 0, x[K], y[K], up[K], down[K]; // operands, and their decays
                for (int c = 0; c < K; c++) {
                    up[c] = i == j ? 1 : decay(i, near ? j : r, c);
                    down[c] = near || r == j ? 1 : decay(r, j, c);
                    x[c] = near ? q[i][c] * up[c] : to_bf16(q[i][c] * up[c]);
                    y[c] = near ? k[j][c] : to_bf16(k[j][c] * down[c]);
                    a += x[c] * y[c], g += dout[i][c] * v[j][c];
                }
                a = to_bf16(a), g = to_bf16(g);
                for (int c = 0; c < K; c++) {
                    o[i][c] += a * v[j][c], dv[j][c] += a * dout[i][c];
                    dq[i][c] += g * y[c] * up[c], dk[j][c] += g * x[c] * down[c];
                }
            }
    }

    // From the states at the chunk's start and the gradient at its end
    void compute(const double* S, const double* dS) {
        int last = count - 1;
        vector<double> state(K * K), dstate(K * K);
        for (int i = 0; i < K * K; i++) state[i] = to_bf16(S[i]), dstate[i] = to_bf16(dS[i]);
        for (int t = 0; t < count; t++) {
            double start[K], end[K];
            for (int c = 0; c < K; c++) {
                start[c] = decay(t, -1, c), end[c] = t < last ? decay(last, t, c) : 1;
                double x = to_bf16(q[t][c] * start[c]), y = to_bf16(k[t][c] * end[c]), gq = 0, gk = 0;
                for (int i = 0; i < K; i++) {
                    o[t][i] = (c ? o[t][i] : 0) + x * state[c * K + i];
                    dv[t][i] = (c ? dv[t][i] : 0) + y * dstate[c * K + i];
                    gq += dout[t][i] * state[c * K + i], gk += v[t][i] * dstate[c * K + i];
                }
                dq[t][c] = gq * start[c], dk[t][c] = inter[t][c] = gk * end[c];
            }
        }
        for (int c = 0; c < K; c++) {
            later[c] = 0;
            for (int x = 0; x < K; x++) later[c] += state[c * K + x] * dstate[c * K + x] * decay(last, -1, c);
            for (int t = 0; t < count; t++) later[c] += (double)((float)k[t][c] * (float)inter[t][c]);
        }
        pairs();
        for (int t = 0; t < count; t++)
            for (int c = 0; c < K; c++) {
                o[t][c] = to_bf16(o[t][c]), dv[t][c] = to_bf16(dv[t][c]);
                dq[t][c] = (float)dq[t][c], dk[t][c] = (float)dk[t][c];
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
