/*
Embedding, RMSNorm, qkv, output gate and SwiGLU, forward and backward, against the same in fp64.

Inputs are drawn anew in every run, from the seed that is printed (give it as an argument to repeat a run),
and rounded to what the device holds, so that only the kernels' own arithmetic and the rounding of their
outputs count. The measure is ||out - expected|| / ||expected||; outputs are poisoned before. `quick` leaves
out what is slow under compute-sanitizer.
*/
#include <math.h>
#include <string>
#include <vector>
#include "../../../llmc/cuda/embedding.cuh"
#include "../../../llmc/attention/output_gate.cuh"
#include "../../../llmc/attention/qkv.cuh"
#include "../../../llmc/base/random.h"
#include "../../../llmc/cuda/rmsnorm.cuh"
#include "../../../llmc/cuda/swiglu.cuh"
#include "../check.h"

typedef std::vector<double> Values;

// One rounding to bf16 makes an error of 1.7e-3 over many elements and up to 3.9e-3 in one. Sums in fp32
// leave 4e-7.
#define LIMIT_BF16     2e-3
#define LIMIT_BF16_FEW 4e-3
#define LIMIT_FP32     2e-6

static uint64_t seed, draws;
static char shape[256]; // of the case under test, for messages
static std::vector<void*> allocated;

// ----------------------------------------------------------------------------
// arrays on both sides

static double as_held(double x, const bf16*) { return __bfloat162float(__float2bfloat16((float)x)); }
static double as_held(double x, const float*) { return (float)x; }
static void put(bf16* to, double x) { *to = __float2bfloat16((float)x); }
static void put(float* to, double x) { *to = (float)x; }
static double get(bf16 x) { return __bfloat162float(x); }
static double get(float x) { return x; }

template <class T> static T* poisoned(int64_t n) {
    T* p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)(n ? n : 1) * sizeof(T)));
    CUDA_CHECK(cudaMemset(p, 0xFF, (size_t)n * sizeof(T)));
    allocated.push_back(p);
    return p;
}

static void free_all(void) {
    for (void* p : allocated) CUDA_CHECK(cudaFree(p));
    allocated.clear();
}

template <class T> static T* upload(const Values& host) {
    std::vector<T> values(host.size());
    for (size_t i = 0; i < host.size(); i++) put(&values[i], host[i]);
    T* p = poisoned<T>((int64_t)host.size());
    CUDA_CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

template <class T> static Values fetch(const T* p, int64_t n) {
    std::vector<T> values((size_t)n);
    CUDA_CHECK(cudaMemcpy(values.data(), p, (size_t)n * sizeof(T), cudaMemcpyDeviceToHost));
    Values host((size_t)n);
    for (size_t i = 0; i < host.size(); i++) host[i] = get(values[i]);
    return host;
}

// n normal numbers of this mean and scale, in *host and on the device.
template <class T> static T* draw(Values* host, int64_t n, double mean, double scale) {
    host->resize((size_t)n);
    draws++;
    for (int64_t i = 0; i < n; i++)
        (*host)[(size_t)i] = as_held(mean + scale * random_normal(seed, draws, (uint64_t)i), (const T*)NULL);
    return upload<T>(*host);
}

static int64_t draw_below(int64_t n, int64_t i) {
    return (int64_t)(random_u64(seed, draws, (uint64_t)i) % (uint64_t)n);
}

// ----------------------------------------------------------------------------
// comparison

struct Worst {
    std::string tensor;
    double error, limit;
};
static std::vector<Worst> worst;

// `terms`, where a value is a sum whose terms may cancel, are the sums of their sizes: what fp32 loses goes
// by these.
static void check_close(const char* tensor, const Values& expected, const Values& got, double limit,
                        const Values* terms = NULL) {
    double difference = 0, norm = 0, lost = terms ? LIMIT_FP32 / limit : 0;
    for (size_t i = 0; i < expected.size(); i++) {
        difference += (got[i] - expected[i]) * (got[i] - expected[i]);
        norm += expected[i] * expected[i];
        if (terms) norm += lost * lost * (*terms)[i] * (*terms)[i];
    }
    double error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
    CHECK(error <= limit, "%s, %s: relative error %.3g, limit %.3g", shape, tensor, error, limit);
    std::string name = limit == LIMIT_BF16_FEW ? std::string(tensor) + ", few" : tensor;
    for (Worst& w : worst)
        if (w.tensor == name) {
            if (!(error <= w.error)) w.error = error;
            return;
        }
    worst.push_back({name, error, limit});
}

static double limit_bf16(size_t n) { return n < 4096 ? LIMIT_BF16_FEW : LIMIT_BF16; }

template <class T>
static void check_close(const char* tensor, const Values& expected, const T* got, double limit,
                        const Values* terms = NULL) {
    check_close(tensor, expected, fetch(got, (int64_t)expected.size()), limit, terms);
}

template <class T> static void check_same_bits(const char* tensor, const T* a, const T* b, int64_t n) {
    std::vector<T> x((size_t)n), y((size_t)n);
    CUDA_CHECK(cudaMemcpy(x.data(), a, (size_t)n * sizeof(T), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(y.data(), b, (size_t)n * sizeof(T), cudaMemcpyDeviceToHost));
    CHECK(memcmp(x.data(), y.data(), (size_t)n * sizeof(T)) == 0, "%s: %s differs", shape, tensor);
}

static float* norm_scratch(void) { return poisoned<float>((int64_t)(norm_partial_bytes() / sizeof(float))); }

// ----------------------------------------------------------------------------

static void test_embedding(int64_t rows, int64_t d, int64_t V, const char* kind) {
    snprintf(shape, sizeof shape, "embedding rows %lld d %lld V %lld %s", (long long)rows, (long long)d,
             (long long)V, kind);
    std::vector<int32_t> tokens((size_t)rows);
    draws++;
    for (int64_t i = 0; i < rows; i++) {
        int64_t token = draw_below(V, i);
        if (!strcmp(kind, "equal")) token = V - 1;
        if (!strcmp(kind, "frequent")) token = draw_below(V, rows + i) % 3 ? token % 5 : token;
        if (!strcmp(kind, "falling")) token = (rows - i) * (V - 1) / rows;
        tokens[(size_t)i] = (int32_t)token;
    }
    int32_t* tokens_gpu = poisoned<int32_t>(rows);
    CUDA_CHECK(
        cudaMemcpy(tokens_gpu, tokens.data(), tokens.size() * sizeof(int32_t), cudaMemcpyHostToDevice));

    Values embeddings, dx, expected((size_t)(rows * d));
    bf16 *e = draw<bf16>(&embeddings, V * d, 0, 1), *x = poisoned<bf16>(rows * d);
    for (int64_t i = 0; i < rows * d; i++)
        expected[(size_t)i] = embeddings[(size_t)(tokens[(size_t)(i / d)] * d + i % d)];
    embedding_forward(x, e, tokens_gpu, rows, d, 0);
    check_close("embedding x", expected, x, 0);

    Values de;
    float* de_gpu = draw<float>(&de, V * d, 0, 1);
    float* again = upload<float>(de);
    bf16* dx_gpu = draw<bf16>(&dx, rows * d, 0, 1);
    for (int64_t i = 0; i < rows * d; i++) de[(size_t)(tokens[(size_t)(i / d)] * d + i % d)] += dx[(size_t)i];
    void* scratch = poisoned<char>((int64_t)embedding_scratch_bytes(rows, d));
    embedding_backward(de_gpu, dx_gpu, tokens_gpu, scratch, rows, d, V, 0);
    check_close("embedding dE", de, de_gpu, LIMIT_FP32);
    embedding_backward(again, dx_gpu, tokens_gpu, scratch, rows, d, V, 0);
    check_same_bits("dE of a second run", de_gpu, again, V * d);
    free_all();
}

// ----------------------------------------------------------------------------

static void test_rmsnorm(int64_t rows, int64_t d, bool residual) {
    snprintf(shape, sizeof shape, "rmsnorm rows %lld d %lld residual %d", (long long)rows, (long long)d,
             residual);
    const double eps = 1e-6;
    Values x, branch, weight, dy, res, dweight, y((size_t)(rows * d)), rstd((size_t)rows),
        dx((size_t)(rows * d));
    bf16 *x_gpu = draw<bf16>(&x, rows * d, 0.5, 3), *branch_gpu = draw<bf16>(&branch, rows * d, 0, 1);
    bf16 *weight_gpu = draw<bf16>(&weight, d, 1, 0.3), *dy_gpu = draw<bf16>(&dy, rows * d, 0, 1);
    bf16 *res_gpu = draw<bf16>(&res, rows * d, 0, 1), *y_gpu = poisoned<bf16>(rows * d);
    float *rstd_gpu = poisoned<float>(rows), *dweight_gpu = draw<float>(&dweight, d, 0, 1);
    float *again_dweight = upload<float>(dweight), *partial = norm_scratch();

    if (residual) // in place
        for (size_t i = 0; i < x.size(); i++) x[i] = as_held(x[i] + branch[i], (const bf16*)NULL);
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0, gx = 0, *xr = &x[(size_t)(r * d)], *dyr = &dy[(size_t)(r * d)];
        for (int64_t c = 0; c < d; c++) squares += xr[c] * xr[c];
        double s = rstd[(size_t)r] = 1 / sqrt(squares / (double)d + eps);
        for (int64_t c = 0; c < d; c++) {
            y[(size_t)(r * d + c)] = xr[c] * s * weight[(size_t)c];
            dweight[(size_t)c] += dyr[c] * xr[c] * s;
            gx += dyr[c] * weight[(size_t)c] * xr[c];
        }
        for (int64_t c = 0; c < d; c++)
            dx[(size_t)(r * d + c)] = (residual ? res[(size_t)(r * d + c)] : 0) +
                                      s * (dyr[c] * weight[(size_t)c] - xr[c] * s * s * gx / (double)d);
    }
    rmsnorm_forward(y_gpu, rstd_gpu, residual ? x_gpu : NULL, x_gpu, residual ? branch_gpu : NULL, weight_gpu,
                    rows, d, eps, 0);
    check_close("rmsnorm x + branch", x, x_gpu, 0);
    check_close("rmsnorm y", y, y_gpu, limit_bf16(y.size()));
    check_close("rmsnorm rstd", rstd, rstd_gpu, LIMIT_FP32);

    bf16* again_dx = poisoned<bf16>(rows * d);
    rmsnorm_backward(again_dx, again_dweight, NULL, residual ? res_gpu : NULL, dy_gpu, x_gpu, weight_gpu,
                     rstd_gpu, partial, rows, d, 0);
    bf16* dx_gpu = residual ? res_gpu : poisoned<bf16>(rows * d); // in place
    bf16* again_y = poisoned<bf16>(rows * d);
    rmsnorm_backward(dx_gpu, dweight_gpu, again_y, residual ? res_gpu : NULL, dy_gpu, x_gpu, weight_gpu,
                     rstd_gpu, partial, rows, d, 0);
    check_same_bits("y made in passing", y_gpu, again_y, rows * d);
    check_close("rmsnorm dx", dx, dx_gpu, limit_bf16(dx.size()));
    check_close("rmsnorm dweight", dweight, dweight_gpu, LIMIT_FP32);
    check_same_bits("dx of a second run", dx_gpu, again_dx, rows * d);
    check_same_bits("dweight of a second run", dweight_gpu, again_dweight, d);
    free_all();
}

// ----------------------------------------------------------------------------
// heads

struct Shape {
    int64_t B, T, NH, dh;
};

static void head_norm_oracle(double* y, double* rstd, const double* x, const double* weight, int64_t n,
                             double eps) {
    double squares = 0;
    for (int64_t c = 0; c < n; c++) squares += x[c] * x[c];
    *rstd = 1 / sqrt(squares / (double)n + eps);
    for (int64_t c = 0; c < n; c++) y[c] = x[c] * *rstd * weight[c];
}

// dx is dy before
static void head_norm_backward_oracle(double* dx, double* dweight, const double* x, const double* weight,
                                      double rstd, int64_t n) {
    double gx = 0;
    for (int64_t c = 0; c < n; c++) gx += dx[c] * weight[c] * x[c];
    for (int64_t c = 0; c < n; c++) {
        dweight[c] += dx[c] * x[c] * rstd;
        dx[c] = rstd * (dx[c] * weight[c] - x[c] * rstd * rstd * gx / (double)n);
    }
}

struct PathTest {
    int64_t column, shift;
    bool norm, rope;
    Values weight, dweight, dout, out, rstd;
    Values dalpha_terms; // [B,T,NH] sizes of the terms of the shift gate's gradient
};

static void rotate_oracle(double* x, int64_t t, int64_t dh, double base, double direction) {
    for (int64_t i = 0; i < dh / 2; i++) {
        double angle = (double)t * pow(base, -2.0 * (double)i / (double)dh);
        double cosine = cos(angle), sine = direction * sin(angle), first = x[i], second = x[i + dh / 2];
        x[i] = first * cosine - second * sine;
        x[i + dh / 2] = first * sine + second * cosine;
    }
}

static void path_oracle(PathTest* p, Values* dproj, const Values& proj, Shape s, int64_t stride,
                        int64_t weight_step, double base) {
    int64_t dh = s.dh;
    Values g((size_t)dh), x((size_t)dh), ones((size_t)dh, 1.0);
    p->out.assign((size_t)(s.B * s.T * s.NH * dh), 0);
    p->rstd.assign((size_t)(s.B * s.T * s.NH), 0);
    p->dalpha_terms.assign((size_t)(s.B * s.T * s.NH), 0);
    for (int64_t bt = 0; bt < s.B * s.T; bt++)
        for (int64_t h = 0; h < s.NH; h++) {
            int64_t t = bt % s.T, i = bt * s.NH + h;
            auto in = [&](int64_t token, int64_t c) {
                return proj[(size_t)(token * stride + p->column + h * dh + c)];
            };
            double alpha = 0;
            if (p->shift >= 0) alpha = 1 / (1 + exp(-proj[(size_t)(bt * stride + p->shift + h)]));
            for (int64_t c = 0; c < dh; c++)
                x[(size_t)c] = (1 - alpha) * in(bt, c) + (t ? alpha * in(bt - 1, c) : 0);
            double* out = &p->out[(size_t)(i * dh)];
            const double* weight = p->norm ? &p->weight[(size_t)(h * weight_step)] : NULL;
            memcpy(out, x.data(), (size_t)dh * sizeof(double));
            if (p->norm) head_norm_oracle(out, &p->rstd[(size_t)i], x.data(), weight, dh, QK_NORM_EPS);
            if (p->rope) rotate_oracle(out, t, dh, base, 1);

            memcpy(g.data(), &p->dout[(size_t)(i * dh)], (size_t)dh * sizeof(double));
            if (p->rope) rotate_oracle(g.data(), t, dh, base, -1);
            if (p->norm)
                head_norm_backward_oracle(g.data(), &p->dweight[(size_t)(h * weight_step)], x.data(), weight,
                                          p->rstd[(size_t)i], dh);
            double dalpha = 0;
            for (int64_t c = 0; c < dh; c++) {
                double* to = &(*dproj)[(size_t)(bt * stride + p->column + h * dh + c)];
                to[0] += (1 - alpha) * g[(size_t)c];
                if (t) to[-stride] += alpha * g[(size_t)c];
                double term = g[(size_t)c] * ((t ? in(bt - 1, c) : 0) - in(bt, c));
                dalpha += term;
                p->dalpha_terms[(size_t)i] += fabs(term) * alpha * (1 - alpha);
            }
            if (p->shift >= 0) (*dproj)[(size_t)(bt * stride + p->shift + h)] = dalpha * alpha * (1 - alpha);
        }
}

// Part of each row of a [rows, stride] tensor.
static Values columns(const Values& x, int64_t stride, int64_t first, int64_t count) {
    Values out;
    for (size_t at = (size_t)first; at < x.size(); at += (size_t)stride)
        out.insert(out.end(), x.begin() + (int64_t)at, x.begin() + (int64_t)at + count);
    return out;
}

// switches: 1 key shift, 2 value shift, 4 QK norm, 8 its weights shared, 16 RoPE
static void test_qkv(Shape s, int switches) {
    snprintf(shape, sizeof shape, "qkv B %lld T %lld NH %lld dh %lld switches %d", (long long)s.B,
             (long long)s.T, (long long)s.NH, (long long)s.dh, switches);
    const double base = 10000;
    int64_t d = s.NH * s.dh, R = 4 * d + 3 * s.NH, stride = ceil_div<int64_t>(R, 8) * 8, tokens = s.B * s.T;
    int64_t weight_step = switches & 8 ? 0 : s.dh, weights = switches & 8 ? s.dh : d;
    Values proj, dproj((size_t)(tokens * stride), 0.0);
    bf16 *proj_gpu = draw<bf16>(&proj, tokens * stride, 0, 1), *dproj_gpu = poisoned<bf16>(tokens * stride);
    bf16* again_dproj = poisoned<bf16>(tokens * stride);
    float *angles = poisoned<float>(s.T * s.dh), *partial = norm_scratch();
    if (switches & 16) rope_angles(angles, s.T, s.dh, base, 0);

    PathTest tests[3];
    HeadPath paths[3], again_paths[3];
    for (int i = 0; i < 3; i++) {
        PathTest* p = &tests[i];
        p->column = i * d;
        p->shift = i == 1 && switches & 1 ? 4 * d + s.NH : i == 2 && switches & 2 ? 4 * d + 2 * s.NH : -1;
        p->norm = i < 2 && switches & 4;
        p->rope = i < 2 && switches & 16;
        paths[i].column = p->column, paths[i].shift = p->shift, paths[i].rope = p->rope;
        paths[i].weight = NULL, paths[i].dweight = NULL;
        paths[i].out = poisoned<bf16>(tokens * d);
        paths[i].rstd = poisoned<float>(tokens * s.NH);
        paths[i].dout = draw<bf16>(&p->dout, tokens * d, 0, 1);
        if (p->norm) {
            paths[i].weight = draw<bf16>(&p->weight, weights, 1, 0.3);
            paths[i].dweight = draw<float>(&p->dweight, weights, 0, 1);
        }
        again_paths[i] = paths[i];
        if (p->norm) again_paths[i].dweight = upload<float>(p->dweight);
        path_oracle(p, &dproj, proj, s, stride, weight_step, base);
    }
    qkv_forward(paths, proj_gpu, angles, s.B, s.T, s.NH, s.dh, R, stride, weight_step, 0);
    qkv_backward(paths, dproj_gpu, proj_gpu, angles, partial, s.B, s.T, s.NH, s.dh, R, stride, weight_step,
                 0);
    qkv_backward(again_paths, again_dproj, proj_gpu, angles, partial, s.B, s.T, s.NH, s.dh, R, stride,
                 weight_step, 0);
    check_same_bits("dproj of a second run", dproj_gpu, again_dproj, tokens * stride);

    static const char* const names[3][5] = {{"q", "q_rstd", "dproj q", "", "q_norm dweight"},
                                            {"k", "k_rstd", "dproj k", "dproj k_shift", "k_norm dweight"},
                                            {"v", "v_rstd", "dproj v", "dproj v_shift", ""}};
    Values got = fetch(dproj_gpu, tokens * stride);
    for (int i = 0; i < 3; i++) {
        PathTest* p = &tests[i];
        check_close(names[i][0], p->out, paths[i].out, limit_bf16(p->out.size()));
        if (p->norm) check_close(names[i][1], p->rstd, paths[i].rstd, LIMIT_FP32);
        check_close(names[i][2], columns(dproj, stride, p->column, d), columns(got, stride, p->column, d),
                    limit_bf16(p->out.size()));
        if (p->shift >= 0)
            check_close(names[i][3], columns(dproj, stride, p->shift, s.NH),
                        columns(got, stride, p->shift, s.NH), limit_bf16(p->dalpha_terms.size()),
                        &p->dalpha_terms);
        if (!p->norm) continue;
        check_close(names[i][4], p->dweight, paths[i].dweight, LIMIT_FP32);
        check_same_bits("dweight of a second run", paths[i].dweight, again_paths[i].dweight, weights);
    }
    int64_t touched = 0, not_zero = 0; // other layers' columns stay as they were, the padding is zeroed
    for (double x : columns(got, stride, 3 * d, d + s.NH)) touched += !isnan(x);
    for (double x : columns(got, stride, R, stride - R)) not_zero += x != 0;
    CHECK(touched == 0 && not_zero == 0, "%s: %lld wrong writes, %lld paddings", shape, (long long)touched,
          (long long)not_zero);
    free_all();
}

static void test_rope_angles(void) {
    snprintf(shape, sizeof shape, "rope_angles");
    const int64_t T = 65536, dh = 64;
    float* angles = poisoned<float>(T * dh);
    rope_angles(angles, T, dh, 500000, 0);
    Values expected((size_t)(T * dh));
    for (int64_t i = 0; i < T * dh / 2; i++) {
        double angle = (double)(i / (dh / 2)) * pow(500000, -2.0 * (double)(i % (dh / 2)) / (double)dh);
        expected[(size_t)(2 * i)] = cos(angle);
        expected[(size_t)(2 * i + 1)] = sin(angle);
    }
    check_close("angles", expected, angles, 1e-7);
    free_all();
}

static void test_output_gate(Shape s, bool norm, bool gate, bool with_delta) {
    snprintf(shape, sizeof shape, "output_gate B %lld T %lld NH %lld dh %lld norm %d gate %d delta %d",
             (long long)s.B, (long long)s.T, (long long)s.NH, (long long)s.dh, norm, gate, with_delta);
    const double eps = 1e-6;
    int64_t dh = s.dh, d = s.NH * dh, stride = d + 24, column = 16, heads = s.B * s.T * s.NH, n = heads * dh;
    Values o, logits, weight, dweight, dy, y((size_t)n), rstd((size_t)heads), dout((size_t)n),
        dgate((size_t)n);
    bf16 *o_gpu = draw<bf16>(&o, n, 0, 0.5), *proj = draw<bf16>(&logits, s.B * s.T * stride, 0, 2);
    bf16 *weight_gpu = draw<bf16>(&weight, d, 1, 0.3), *dy_gpu = draw<bf16>(&dy, n, 0, 1);
    bf16 *y_gpu = poisoned<bf16>(n), *dout_gpu = poisoned<bf16>(n),
         *dproj = poisoned<bf16>(s.B * s.T * stride);
    float *dweight_gpu = draw<float>(&dweight, d, 0, 1), *again_dweight = upload<float>(dweight);
    float *rstd_gpu = poisoned<float>(heads), *delta_gpu = poisoned<float>(heads), *partial = norm_scratch();
    logits = columns(logits, stride, column, d);

    for (int64_t i = 0; i < heads; i++) {
        double *w = &weight[(size_t)(i % s.NH * dh)], *out = &y[(size_t)(i * dh)],
               *g = &dout[(size_t)(i * dh)];
        memcpy(out, &o[(size_t)(i * dh)], (size_t)dh * sizeof(double));
        memcpy(g, &dy[(size_t)(i * dh)], (size_t)dh * sizeof(double));
        if (norm) head_norm_oracle(out, &rstd[(size_t)i], &o[(size_t)(i * dh)], w, dh, eps);
        if (gate)
            for (int64_t c = 0; c < dh; c++) {
                double open = 1 / (1 + exp(-logits[(size_t)(i * dh + c)]));
                dgate[(size_t)(i * dh + c)] = g[c] * out[c] * open * (1 - open);
                g[c] *= open;
                out[c] *= open;
            }
        if (norm)
            head_norm_backward_oracle(g, &dweight[(size_t)(i % s.NH * dh)], &o[(size_t)(i * dh)], w,
                                      rstd[(size_t)i], dh);
    }
    bf16 *w = norm ? weight_gpu : NULL, *gate_in = gate ? proj + column : NULL,
         *gate_out = gate ? dproj + column : NULL;
    float* delta = with_delta ? delta_gpu : NULL;
    output_gate_forward(y_gpu, rstd_gpu, o_gpu, w, gate_in, s.B, s.T, s.NH, dh, stride, eps, 0);
    bf16* again_y = poisoned<bf16>(n);
    output_gate_backward(dout_gpu, dweight_gpu, gate_out, delta, again_y, dy_gpu, o_gpu, w, rstd_gpu, gate_in,
                         partial, s.B, s.T, s.NH, dh, stride, 0);
    check_same_bits("y made in passing", y_gpu, again_y, n);
    check_close("output_gate y", y, y_gpu, limit_bf16(y.size()));
    check_close("output_gate dout", dout, dout_gpu, limit_bf16(dout.size()));
    if (norm) check_close("output_gate rstd", rstd, rstd_gpu, LIMIT_FP32);
    if (norm) check_close("output_gate dweight", dweight, dweight_gpu, LIMIT_FP32);
    Values dproj_got = fetch(dproj, s.B * s.T * stride);
    if (gate)
        check_close("output_gate dgate", dgate, columns(dproj_got, stride, column, d),
                    limit_bf16(dgate.size()));
    int64_t touched = 0;
    for (double x : columns(dproj_got, stride, 0, column)) touched += !isnan(x);
    for (double x : columns(dproj_got, stride, column + d, stride - column - d)) touched += !isnan(x);
    CHECK(touched == 0, "%s: %lld writes to other columns of dproj", shape, (long long)touched);
    if (with_delta) {
        Values expected((size_t)heads), terms((size_t)heads), held = fetch(dout_gpu, n);
        for (int64_t i = 0; i < n; i++) {
            int64_t bt = i / d, h = i / dh % s.NH, b = bt / s.T, t = bt % s.T;
            size_t at = (size_t)((b * s.NH + h) * s.T + t);
            expected[at] += held[(size_t)i] * o[(size_t)i];
            terms[at] += fabs(held[(size_t)i] * o[(size_t)i]);
        }
        check_close("output_gate delta", expected, delta_gpu, LIMIT_FP32, &terms);
    }
    // again, in place
    output_gate_backward(dy_gpu, again_dweight, gate_out, NULL, again_y, dy_gpu, o_gpu, w, rstd_gpu, gate_in,
                         partial, s.B, s.T, s.NH, dh, stride, 0);
    check_same_bits("dout of a second run", dout_gpu, dy_gpu, n);
    check_same_bits("dweight of a second run", dweight_gpu, again_dweight, d);
    free_all();
}

// ----------------------------------------------------------------------------

static void test_swiglu(int64_t rows, int64_t I) {
    snprintf(shape, sizeof shape, "swiglu rows %lld I %lld", (long long)rows, (long long)I);
    Values gu, ds, s((size_t)(rows * I)), dgu((size_t)(2 * rows * I));
    bf16 *gu_gpu = draw<bf16>(&gu, 2 * rows * I, 0, 4), *ds_gpu = draw<bf16>(&ds, rows * I, 0, 1);
    bf16 *s_gpu = poisoned<bf16>(rows * I), *dgu_gpu = poisoned<bf16>(2 * rows * I);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < I; i++) {
            size_t at_g = (size_t)(2 * r * I + i), at_u = at_g + (size_t)I, at = (size_t)(r * I + i);
            double g = gu[at_g], u = gu[at_u], open = 1 / (1 + exp(-g));
            s[at] = g * open * u;
            dgu[at_g] = ds[at] * u * open * (1 + g * (1 - open));
            dgu[at_u] = ds[at] * g * open;
        }
    swiglu_forward(s_gpu, gu_gpu, rows, I, 0);
    swiglu_backward(dgu_gpu, ds_gpu, ds_gpu, gu_gpu, rows, I, 0);
    check_same_bits("s made in passing", s_gpu, ds_gpu, rows * I);
    check_close("swiglu s", s, s_gpu, limit_bf16(s.size()));
    check_close("swiglu dgu", dgu, dgu_gpu, limit_bf16(dgu.size()));
    free_all();
}

// ----------------------------------------------------------------------------
// Tensors above 2^31 elements: what lies at their end must come out as it does alone. The rest is zeros.

// A tensor of n elements whose last ones are `tail`'s.
template <class T> static T* with_tail(int64_t n, const T* tail, int64_t tail_n) {
    T* p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(T)));
    allocated.push_back(p);
    CUDA_CHECK(cudaMemset(p, 0, (size_t)n * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(p + n - tail_n, tail, (size_t)tail_n * sizeof(T), cudaMemcpyDeviceToDevice));
    return p;
}

static void test_large(void) {
    snprintf(shape, sizeof shape, "above 2^31 elements");
    Values unused;
    const int64_t few = 16;
    { // swiglu, rmsnorm
        const int64_t d = 8192, rows = ((int64_t)1 << 31) / d + 2 * few, n = rows * d, m = few * d;
        bf16 *gu = draw<bf16>(&unused, m, 0, 1), *ds = draw<bf16>(&unused, m / 2, 0, 1),
             *w = draw<bf16>(&unused, d, 1, 1);
        bf16 *s = poisoned<bf16>(m / 2), *dgu = poisoned<bf16>(m), *big_s = poisoned<bf16>(n / 2);
        bf16 *big_gu = with_tail(n, gu, m), *big_ds = with_tail(n / 2, ds, m / 2),
             *big_out = poisoned<bf16>(n);
        swiglu_forward(s, gu, few, d / 2, 0);
        swiglu_forward(big_s, big_gu, rows, d / 2, 0);
        check_same_bits("swiglu s", s, big_s + (n - m) / 2, m / 2);
        swiglu_backward(dgu, s, ds, gu, few, d / 2, 0);
        swiglu_backward(big_out, big_s, big_ds, big_gu, rows, d / 2, 0);
        check_same_bits("swiglu dgu", dgu, big_out + n - m, m);
        check_same_bits("swiglu s in passing", s, big_s + (n - m) / 2, m / 2);

        float *rstd = poisoned<float>(few), *big_rstd = poisoned<float>(rows), *partial = norm_scratch();
        float *dw = with_tail<float>(d, NULL, 0), *big_dw = with_tail<float>(d, NULL, 0);
        bf16 *dy = draw<bf16>(&unused, m, 0, 1), *big_dy = with_tail(n, dy, m);
        rmsnorm_forward(dgu, rstd, NULL, gu, NULL, w, few, d, 1e-6, 0);
        rmsnorm_forward(big_out, big_rstd, NULL, big_gu, NULL, w, rows, d, 1e-6, 0);
        check_same_bits("rmsnorm y", dgu, big_out + n - m, m);
        rmsnorm_backward(dgu, dw, NULL, NULL, dy, gu, w, rstd, partial, few, d, 0);
        rmsnorm_backward(big_out, big_dw, NULL, NULL, big_dy, big_gu, w, big_rstd, partial, rows, d, 0);
        check_same_bits("rmsnorm dx", dgu, big_out + n - m, m);
        check_close("dweight at 2^31", fetch(dw, d), big_dw, LIMIT_FP32);
        free_all();
    }
    { // qkv, output gate: the last sequence
        const int64_t NH = 16, dh = 64, d = NH * dh, T = few, R = 4 * d + 3 * NH, stride = R;
        const int64_t B = ((int64_t)1 << 31) / (T * d) + 2, n = B * T * d, m = T * d;
        bf16 *proj = draw<bf16>(&unused, T * stride, 0, 1),
             *big_proj = with_tail(B * T * stride, proj, T * stride);
        bf16 *dproj = poisoned<bf16>(T * stride), *big_dproj = poisoned<bf16>(B * T * stride);
        float *partial = norm_scratch(), *angles = poisoned<float>(T * dh);
        rope_angles(angles, T, dh, 10000, 0);
        HeadPath paths[3], big_paths[3];
        bf16 *dout = draw<bf16>(&unused, m, 0, 1), *big_dout = with_tail(n, dout, m);
        bf16* w = draw<bf16>(&unused, d, 1, 1);
        for (int i = 0; i < 3; i++) {
            HeadPath* p = &paths[i];
            p->column = i * d, p->shift = i ? 4 * d + i * NH : -1, p->rope = i < 2;
            p->weight = i < 2 ? w : NULL, p->dweight = with_tail<float>(d, NULL, 0);
            p->out = poisoned<bf16>(m), p->rstd = poisoned<float>(T * NH), p->dout = dout;
            big_paths[i] = *p;
            big_paths[i].out = poisoned<bf16>(n), big_paths[i].rstd = poisoned<float>(B * T * NH);
            big_paths[i].dout = big_dout, big_paths[i].dweight = with_tail<float>(d, NULL, 0);
        }
        qkv_forward(paths, proj, angles, 1, T, NH, dh, R, stride, dh, 0);
        qkv_forward(big_paths, big_proj, angles, B, T, NH, dh, R, stride, dh, 0);
        for (int i = 0; i < 3; i++) check_same_bits("q, k or v", paths[i].out, big_paths[i].out + n - m, m);
        qkv_backward(paths, dproj, proj, angles, partial, 1, T, NH, dh, R, stride, dh, 0);
        qkv_backward(big_paths, big_dproj, big_proj, angles, partial, B, T, NH, dh, R, stride, dh, 0);
        for (int64_t t = 0; t < T; t++) {
            bf16 *row = dproj + t * stride, *big_row = big_dproj + ((B - 1) * T + t) * stride;
            check_same_bits("dproj", row, big_row, 3 * d);
            check_same_bits("dproj shifts", row + 4 * d + NH, big_row + 4 * d + NH, 2 * NH);
        }
        check_close("dweight at 2^31", fetch(paths[0].dweight, d), big_paths[0].dweight, LIMIT_FP32);

        bf16 *y = poisoned<bf16>(m), *dy = draw<bf16>(&unused, m, 0, 1), *big_dy = with_tail(n, dy, m);
        float *rstd = poisoned<float>(T * NH), *delta = poisoned<float>(T * NH),
              *big_delta = poisoned<float>(B * T * NH);
        float *dw = with_tail<float>(d, NULL, 0), *big_dw = with_tail<float>(d, NULL, 0);
        output_gate_forward(y, rstd, dout, w, proj + 3 * d, 1, T, NH, dh, stride, 1e-6, 0);
        output_gate_forward(big_paths[0].out, big_paths[0].rstd, big_dout, w, big_proj + 3 * d, B, T, NH, dh,
                            stride, 1e-6, 0);
        check_same_bits("output_gate y", y, big_paths[0].out + n - m, m);
        bf16 *y_again = poisoned<bf16>(m), *big_y_again = big_paths[1].out;
        output_gate_backward(y, dw, dproj + 3 * d, delta, y_again, dy, dout, w, rstd, proj + 3 * d, partial,
                             1, T, NH, dh, stride, 0);
        output_gate_backward(big_paths[0].out, big_dw, big_dproj + 3 * d, big_delta, big_y_again, big_dy,
                             big_dout, w, big_paths[0].rstd, big_proj + 3 * d, partial, B, T, NH, dh, stride,
                             0);
        check_same_bits("output_gate dout", y, big_paths[0].out + n - m, m);
        check_same_bits("output_gate y in passing", y_again, big_y_again + n - m, m);
        check_same_bits("output_gate delta", delta, big_delta + (B - 1) * T * NH, T * NH);
        check_close("dweight at 2^31", fetch(dw, d), big_dw, LIMIT_FP32);
        free_all();
    }
    { // embedding: the last rows are of the last ids, the others all of id 0
        const int64_t d = 8192, rows = ((int64_t)1 << 31) / d + few, V = rows, n = rows * d, m = few * d;
        bf16 *rows_in = draw<bf16>(&unused, m, 0, 1), *big_dx = with_tail(n, rows_in, m),
             *x = poisoned<bf16>(n);
        std::vector<int32_t> ids((size_t)rows, 0);
        for (int64_t i = 0; i < few; i++) ids[(size_t)(rows - few + i)] = (int32_t)(V - few + i);
        int32_t* tokens = poisoned<int32_t>(rows);
        CUDA_CHECK(cudaMemcpy(tokens, ids.data(), ids.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
        embedding_forward(x, big_dx, tokens, rows, d, 0);
        check_same_bits("embedding x", rows_in, x + n - m, m);
        float* de = with_tail<float>(n, NULL, 0);
        embedding_backward(de, big_dx, tokens, poisoned<char>((int64_t)embedding_scratch_bytes(rows, d)),
                           rows, d, V, 0);
        check_close("embedding dE at 2^31", fetch(rows_in, m), de + n - m, 0);
        free_all();
    }
}

// ----------------------------------------------------------------------------

int main(int argc, char** argv) {
    bool quick = false;
    seed = (uint64_t)(seconds_now() * 1e6);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "quick"))
            quick = true;
        else
            seed = strtoull(argv[i], NULL, 10);
    }
    printf("seed %llu\n", (unsigned long long)seed);

    static const char* const kinds[] = {"random", "equal", "frequent", "falling"};
    for (int kind = 0; kind < 4; kind++) {
        test_embedding(1, 8, 2, kinds[kind]);
        test_embedding(7, 64, 3, kinds[kind]);
        test_embedding(33, 72, 256, kinds[kind]);
        test_embedding(1000, 72, 257, kinds[kind]);
        if (quick) continue;
        test_embedding(4097, 768, 5000, kinds[kind]);
        test_embedding(20000, 64, 70000, kinds[kind]);
    }
    for (int residual = 0; residual < 2; residual++) {
        test_rmsnorm(1, 64, residual);
        test_rmsnorm(3, 72, residual);
        test_rmsnorm(37, 768, residual);
        test_rmsnorm(2, 8192, residual);
        if (quick) continue;
        test_rmsnorm(1000, 1000, residual);
        test_rmsnorm(1501, 1536, residual);
        test_rmsnorm(9000, 64, residual);
    }
    const Shape small_shapes[] = {{1, 1, 1, 64},  {2, 17, 3, 64}, {1, 65, 2, 128}, {2, 9, 2, 8},
                                  {1, 21, 3, 24}, {1, 19, 3, 48}, {2, 5, 1, 256},  {3, 7, 5, 16}};
    const Shape shapes[] = {
        {1, 300, 24, 64}, {2, 150, 12, 64}, {1, 150, 12, 128}, {2, 101, 40, 32}, {3, 2000, 1, 64}};
    auto test_heads = [](Shape s) {
        for (int switches = 0; switches < 32; switches++)
            if ((switches & 12) != 8) test_qkv(s, switches);
        for (int i = 0; i < 8; i++) test_output_gate(s, i & 1, i & 2, i & 4);
    };
    for (Shape s : small_shapes) test_heads(s);
    test_swiglu(1, 8);
    test_swiglu(5, 72);
    test_swiglu(33, 256);
    if (!quick) {
        for (Shape s : shapes) test_heads(s);
        test_qkv({2, 1000, 12, 64}, 7);
        test_qkv({2, 1000, 12, 64}, 23);
        test_rope_angles();
        test_swiglu(7, 3584);
        test_swiglu(300, 5000);
        test_large();
    }
    CUDA_CHECK(cudaDeviceSynchronize());

    printf("%-24s %10s %10s\n", "worst relative error of", "is", "limit");
    for (const Worst& w : worst) printf("%-24s %10.2e %10.2e\n", w.tensor.c_str(), w.error, w.limit);
    return test_report();
}
