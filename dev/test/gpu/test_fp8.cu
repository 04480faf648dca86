/*
FP8: what kernels write in it, byte by byte against the formats' definition (dev/test/fp8_reference.h); the
weights' copies; scales over the steps. For the GEMMs see test_fp8_gemm.

    test_fp8 [quick] [SEED]     quick: small shapes, for compute-sanitizer
*/
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/config/presets.h"
#include "../../../llmc/layers/fp8_state.cuh"
#include "../../../llmc/layers/classifier.cuh"
#include "../../../llmc/layers/output_gate.cuh"
#include "../../../llmc/layers/swiglu.cuh"
#include "fp8_written.cuh"

struct NormScratch : Buffer<float> {
    NormScratch() : Buffer<float>(norm_partial_bytes() / sizeof(float)) {}
};

// A scale at which a share of the values saturates, or most are denormal.
static const float SCALES[] = {1, 256, 1.0f / 64};

// All numbers of bf16 but NaN and infinity, then these among others.
static void test_conversion() {
    snprintf(test_case, sizeof test_case, "conversion");
    vector<bf16> all;
    for (uint32_t bits = 0; bits < 0x10000; bits++)
        if ((bits & 0x7fff) < FP8_NOT_FINITE) all.push_back(bf16_of(bits));
    for (uint32_t bits : {0x7f80u, 0xff80u, 0x7fc0u, 0xffffu})
        for (int place = 0; place < 8; place++)
            for (int i = 0; i < 8; i++) all.push_back(bf16_of(i == place ? bits : 0x3f80u + (uint32_t)i));
    const Buffer<bf16> x(all);
    const int64_t n = (int64_t)all.size();
    for (float scale : SCALES) {
        Written e4m3(FP8_E4M3, 1, n, n, scale), e5m2(FP8_E5M2, 1, n, n, scale);
        fp8_convert<FP8_E4M3>(&e4m3.tensor, x, 1, n, n, 0);
        fp8_convert<FP8_E5M2>(&e5m2.tensor, x, 1, n, n, 0);
        e4m3.check("E4M3", all);
        e5m2.check("E5M2", all);
    }
}

// Transposed copies of a part of the columns, from bf16 and from FP8, are those of the rows.
static void test_transpose(int64_t rows, int64_t columns, int64_t stride) {
    snprintf(test_case, sizeof test_case, "transpose %lld x %lld of %lld", (long long)rows,
             (long long)columns, (long long)stride);
    vector<bf16> x = draw<bf16>(rows * stride, 1);
    x[rows / 2 * stride + columns / 2] = bf16_of(0x7fc0); // NaN, with its seven neighbours
    const Buffer<bf16> d_x(x);
    Written by_rows(FP8_E5M2, rows, columns, stride, 16);
    Buffer<uint8_t> transposed((size_t)(rows * columns)), again((size_t)(rows * columns));
    fp8_convert<FP8_E5M2>(&by_rows.tensor, d_x, rows, columns, stride, 0);
    fp8_transpose<FP8_E5M2>(transposed.p, d_x.p, stride, rows, columns, by_rows.scale.p, 0);
    fp8_transpose<FP8_E5M2>(again.p, by_rows.bytes.p, stride, rows, columns, by_rows.scale.p, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    const vector<uint8_t> want = by_rows.bytes.host(), got = transposed.host(), got_again = again.host();
    int64_t wrong = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++)
            wrong +=
                got[c * rows + r] != want[r * stride + c] || got_again[c * rows + r] != want[r * stride + c];
    CHECK(wrong == 0, "%s: %lld of %lld bytes are wrong", test_case, (long long)wrong,
          (long long)(rows * columns));
}

static void test_scale() {
    int wrong = 0;
    for (uint32_t bits = 1; bits < FP8_NOT_FINITE; bits++)
        for (Fp8Format format : {FP8_E4M3, FP8_E5M2}) {
            const Fp8Scale s = fp8_scale(bits, format);
            const double amax = value(bf16_of(bits)), most = format == FP8_E4M3 ? 448 : 57344;
            int exponent;
            const bool power = frexp(s.scale, &exponent) == 0.5 && s.inverse == 1 / s.scale;
            wrong += !power || amax * s.scale > most || (2 * amax * s.scale <= most && exponent - 1 < 100);
        }
    CHECK(wrong == 0, "%d scales are wrong", wrong);
    for (uint32_t bits : {0u, (uint32_t)FP8_NOT_FINITE, 0x7fffu})
        CHECK(fp8_scale(bits, FP8_E4M3).scale == 1, "the scale of amax %x", bits);
    const Fp8Scale unknown = fp8_scale(0, FP8_E5M2);
    CHECK(unknown.scale == 1 << 24 && unknown.inverse == 1 / unknown.scale, "the scale of no gradient");
}

// ----------------------------------------------------------------------------
// the kernels of layers

// transposed [columns, rows] has the bytes of `by_rows` [rows, columns].
static void check_transposed(const char* name, const Buffer<uint8_t>& transposed,
                             const vector<uint8_t>& by_rows, int64_t rows, int64_t columns) {
    const vector<uint8_t> got = transposed.host();
    int64_t wrong = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) wrong += got[c * rows + r] != by_rows[r * columns + c];
    CHECK(wrong == 0, "%s, %s: %lld of %lld transposed bytes are wrong", test_case, name, (long long)wrong,
          (long long)(rows * columns));
}

static void test_rmsnorm(int64_t rows, int64_t d, float scale) {
    snprintf(test_case, sizeof test_case, "rmsnorm rows %lld d %lld scale %g", (long long)rows, (long long)d,
             scale);
    Drawn<bf16> x(rows * d, 3), weight(d, 0.3, 1), dy(rows * d), residual(rows * d);
    Buffer<bf16> y(rows * d), y_beside(rows * d), y_none(rows * d), dx(residual.host()),
        dx_beside(residual.host()), again(rows * d), again_beside(rows * d);
    Buffer<float> rstd(rows), dweight(d), dweight_beside(d);
    NormScratch partial;
    Written y8(FP8_E4M3, rows, d, d, scale), y8_alone(FP8_E4M3, rows, d, d, scale, true),
        dx8(FP8_E5M2, rows, d, d, scale);
    Norm norm = {.weight = weight, .dweight = dweight, .rstd = rstd, .rows = rows, .d = d, .eps = 1e-6};
    Norm beside = norm, alone = norm;
    beside.dweight = dweight_beside;
    beside.y8 = y8.tensor, beside.dx8 = dx8.tensor;
    alone.y8 = y8_alone.tensor;
    Buffer<uint8_t> transposed(rows * d);
    if (rows % 4 == 0) alone.y8.transposed = transposed;
    dweight.zero(), dweight_beside.zero();
    rmsnorm_forward(y, x, &norm, 0);
    rmsnorm_forward(y_beside, x, &beside, 0);
    rmsnorm_forward(y_none, x, &alone, 0);
    rmsnorm_backward(dx, again, dy, x, true, &norm, {partial}, 0);
    rmsnorm_backward(dx_beside, again_beside, dy, x, true, &beside, {partial}, 0);
    check_same_bits("y", y, y_beside);
    check_same_bits("dx", dx, dx_beside);
    check_same_bits("recomputed y", again, again_beside);
    check_same_bits("dweight", dweight, dweight_beside);
    y8.check("y8", y.host());
    y8_alone.check("y8 alone", y.host());
    if (rows % 4 == 0) check_transposed("y8", transposed, y8_alone.bytes.host(), rows, d);
    dx8.check("dx8", dx.host());
    for (bf16 element : y_none.host())
        if (bf16_bits(element) != 0xFFFF) {
            CHECK(false, "%s: y is written though it is not read", test_case);
            break;
        }
}

static void test_swiglu(int64_t rows, int64_t I, float scale) {
    snprintf(test_case, sizeof test_case, "swiglu rows %lld I %lld scale %g", (long long)rows, (long long)I,
             scale);
    Drawn<bf16> gate_up(2 * rows * I, 4), dact(rows * I);
    Buffer<bf16> act(rows * I), dgate_up(2 * rows * I);
    Buffer<uint8_t> act_kept(rows * I), act_recomputed(rows * I), dgate_up_transposed(2 * rows * I);
    Written act8(FP8_E4M3, rows, I, I, scale), dgate_up8(FP8_E5M2, rows, 2 * I, 2 * I, scale),
        unkept(FP8_E4M3, rows, I, I, scale);
    swiglu_forward(act, gate_up, rows, I, 0);
    swiglu_backward(dgate_up, NULL, dact, gate_up, rows, I, 0);
    swiglu_forward_fp8(unkept.tensor, gate_up, rows, I, 0);
    unkept.check("act8 alone", act.host());
    act8.tensor.transposed = act_kept;
    swiglu_forward_fp8(act8.tensor, gate_up, rows, I, 0);
    act8.check("act8", act.host());
    check_transposed("act8", act_kept, act8.bytes.host(), rows, I);
    dgate_up8.tensor.transposed = dgate_up_transposed;
    for (bool recomputes : {false, true}) {
        Fp8Tensor again = act8.tensor;
        again.transposed = recomputes ? act_recomputed.p : NULL;
        dgate_up8.bytes.poison(), dgate_up_transposed.poison();
        swiglu_backward_fp8(dgate_up8.tensor, again, dact, gate_up, rows, I, 0);
        dgate_up8.check("dgate_up8", dgate_up.host());
        check_transposed("dgate_up8", dgate_up_transposed, dgate_up8.bytes.host(), rows, 2 * I);
    }
    check_transposed("act8 recomputed", act_recomputed, act8.bytes.host(), rows, I);
}

// Columns [first, first + count) of the rows of x.
static vector<bf16> columns(const vector<bf16>& x, int64_t row_stride, int64_t first, int64_t count) {
    vector<bf16> out;
    for (size_t at = first; at < x.size(); at += row_stride)
        out.insert(out.end(), x.begin() + at, x.begin() + at + count);
    return out;
}

static void check_unwritten(const char* name, const vector<bf16>& x) {
    int64_t written = 0;
    for (bf16 element : x) written += bf16_bits(element) != 0xFFFF;
    CHECK(written == 0, "%s, %s: %lld elements are written though they are not read", test_case, name,
          (long long)written);
}

static HeadShape fused_shape(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    const int64_t used = 4 * NH * dh + 3 * NH;
    return {.B = B,
            .T = T,
            .NH = NH,
            .dh = dh,
            .columns = used,
            .row_stride = matmul_padded(used),
            .weight_stride = dh};
}

static void test_output_gate(const HeadShape& s, float scale) {
    const int64_t tokens = s.B * s.T, d = s.NH * s.dh, S = s.row_stride;
    snprintf(test_case, sizeof test_case, "output gate T %lld NH %lld dh %lld", (long long)s.T,
             (long long)s.NH, (long long)s.dh);
    Drawn<bf16> o(tokens * d), proj(tokens * S), dy(tokens * d), weight(d, 0.3, 1);
    Buffer<bf16> y(tokens * d), y_none(tokens * d), dout(tokens * d), dout_beside(tokens * d),
        y_again(tokens * d), dproj(tokens * S), dproj_beside(tokens * S);
    Buffer<float> rstd(tokens * s.NH), delta(tokens * s.NH), dweight(d), dweight_beside(d);
    NormScratch partial;
    Written y8(FP8_E4M3, tokens, d, d, scale, true), plain(FP8_E4M3, tokens, d, d, scale, true),
        dproj8(FP8_E5M2, tokens, d, 4 * d, scale);
    OutputGate gate = {.weight = weight,
                       .dweight = dweight,
                       .rstd = rstd,
                       .gate = proj + 3 * d,
                       .dgate = dproj + 3 * d,
                       .delta = delta,
                       .eps = 1e-6};
    OutputGate beside = gate, none = {.y8 = plain.tensor};
    beside.dweight = dweight_beside, beside.dgate = dproj_beside + 3 * d;
    beside.y8 = y8.tensor, beside.dgate8 = dproj8.tensor;
    beside.dgate8.data += 3 * d;
    Buffer<uint8_t> transposed(tokens * d);
    if (tokens % 4 == 0) beside.y8.transposed = transposed;
    dweight.zero(), dweight_beside.zero();
    output_gate_forward(y, o, &gate, &s, 0);
    output_gate_forward(y_none, o, &beside, &s, 0);
    output_gate_forward(NULL, o, &none, &s, 0); // neither norm nor gate
    y8.check("y8", y.host());
    if (tokens % 4 == 0) check_transposed("y8", transposed, y8.bytes.host(), tokens, d);
    plain.check("o", o.host());
    CHECK(bf16_bits(y_none.host()[0]) == 0xFFFF, "%s: y is written though it is not read", test_case);
    output_gate_backward(dout, y_again, dy, o, &gate, {partial}, &s, 0);
    output_gate_backward(dout_beside, y_again, dy, o, &beside, {partial}, &s, 0);
    check_same_bits("dout", dout, dout_beside);
    check_same_bits("dproj", dproj, dproj_beside);
    check_same_bits("dweight", dweight, dweight_beside);
    dproj8.check("dgate8", columns(dproj.host(), S, 3 * d, d), 3 * d);
    beside.dgate8.alone = true;
    dproj_beside.poison(), dproj8.bytes.poison();
    output_gate_backward(dout_beside, y_again, dy, o, &beside, {partial}, &s, 0);
    check_same_bits("dout, FP8 alone", dout, dout_beside);
    dproj8.check("dgate8 alone", columns(dproj.host(), S, 3 * d, d), 3 * d);
    check_unwritten("dproj", dproj_beside.host());
}

// The first `columns` columns of each row are those of `dense`, where rows are `stride` bytes apart. Sparse
// memory of as much as a large pass has.
static void check_far_rows(const Written& dense, const Buffer<uint8_t>& far, int64_t stride) {
    int64_t wrong = 0;
    for (int64_t row = 0; row < dense.rows; row++)
        wrong += far.host((size_t)(row * stride), (size_t)dense.columns) !=
                 dense.bytes.host((size_t)(row * dense.stride), (size_t)dense.columns);
    CHECK(wrong == 0, "%s, rows up to byte %lld: %lld of %lld are wrong", test_case,
          (long long)(dense.rows * stride), (long long)wrong, (long long)dense.rows);
}

// documents: packed ones, with RoPE. far: also with rows of FP8 behind 2^34 bytes, where the GPU has the
// memory
static void test_qkv(HeadShape s, float scale, bool documents, bool far = false) {
    const int64_t tokens = s.B * s.T, d = s.NH * s.dh, S = s.row_stride;
    snprintf(test_case, sizeof test_case, "qkv T %lld NH %lld dh %lld%s", (long long)s.T, (long long)s.NH,
             (long long)s.dh, documents ? ", documents" : "");
    vector<int32_t> starts;
    for (int64_t i = 0; i < tokens; i++) starts.push_back((int32_t)(i % s.T / 7 * 7));
    const Buffer<int32_t> doc_start(starts);
    Buffer<float> angles(s.T * s.dh);
    rope_angles(angles, s.T, s.dh, rotation_plain(500000), 0);
    if (documents) s.doc_start = doc_start;
    Drawn<bf16> proj(tokens * S), dout(tokens * d), weight(d, 0.3, 1);
    Drawn<float> rstd(tokens * s.NH, 0.1, 1);
    Buffer<bf16> dproj(tokens * S), dproj_beside(tokens * S);
    Buffer<float> dweight(d), dweight_beside(d);
    NormScratch partial;
    Written dproj8(FP8_E5M2, tokens, 3 * d, 4 * d, scale);
    HeadPath paths[3];
    memset(paths, 0, sizeof paths);
    for (int p = 0; p < 3; p++) {
        paths[p].column = p * d, paths[p].shift = p == 0 ? -1 : 4 * d + p * s.NH;
        paths[p].eps = 1e-5f, paths[p].dout = dout, paths[p].rstd = rstd;
        paths[p].weight = p < 2 ? weight.p : NULL, paths[p].dweight = p < 2 ? dweight.p : NULL;
        paths[p].rope = documents && p < 2;
    }
    dweight.zero(), dweight_beside.zero();
    qkv_backward(paths, dproj, proj, angles, {partial}, &s, Fp8Tensor(), 0);
    for (int p = 0; p < 2; p++) paths[p].dweight = dweight_beside;
    qkv_backward(paths, dproj_beside, proj, angles, {partial}, &s, dproj8.tensor, 0);
    check_same_bits("dproj", dproj, dproj_beside);
    check_same_bits("dweight", dweight, dweight_beside);
    dproj8.check("dproj8", columns(dproj.host(), S, 0, 3 * d));
    Fp8Tensor alone = dproj8.tensor;
    alone.alone = true;
    dproj_beside.poison(), dproj8.bytes.poison();
    qkv_backward(paths, dproj_beside, proj, angles, {partial}, &s, alone, 0);
    dproj8.check("dproj8 alone", columns(dproj.host(), S, 0, 3 * d));
    check_unwritten("q, k, v of dproj", columns(dproj_beside.host(), S, 0, 3 * d));
    CHECK(same_bits(columns(dproj_beside.host(), S, 4 * d + s.NH, 2 * s.NH),
                    columns(dproj.host(), S, 4 * d + s.NH, 2 * s.NH)),
          "%s: the shift gates' columns", test_case);
    if (!far) return;
    const int64_t stride = ((int64_t)1 << 34) / (tokens - 1) / 16 * 16 + 16, all = tokens * stride;
    size_t free_bytes, all_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (free_bytes < (size_t)all + (1 << 30)) {
        SKIP("rows of FP8 behind 2^34 bytes: 17 GiB of GPU memory");
        return;
    }
    Buffer<uint8_t> bytes((size_t)all);
    const Fp8Tensor tensor = {bytes, stride, dproj8.scale, dproj8.lanes, false};
    qkv_backward(paths, dproj_beside, proj, angles, {partial}, &s, tensor, 0);
    check_far_rows(dproj8, bytes, stride);
}

// ----------------------------------------------------------------------------
// a model's state

static Config small_config() {
    Error err;
    Config c;
    Recipe recipe;
    if (!config_preset(&c, &recipe, "fox-pro-nano", &err)) die("%s", err.msg);
    c.num_hidden_layers = 2, c.num_heads = 2, c.hidden_size = 208,
    c.intermediate_size = 272; // 16 times 13, 17
    return c;
}

static void test_weights() {
    snprintf(test_case, sizeof test_case, "weights");
    const Config c = small_config();
    ParamTable table = params_build(&c);
    Fp8State* s = fp8_open(&c, &table);
    vector<bf16> host = draw<bf16>(table.count, 0.02);
    for (int i = 0; i < 4; i++)
        host[params_find(&table, s->shapes[i].kind, 1)->offset + 77] = (bf16)(float)(i + 1);
    Buffer<bf16> weights(host);
    const auto quantize = [&](int64_t l) {
        const bf16* w[FP8_LINEARS];
        for (int i = 0; i < FP8_LINEARS; i++)
            w[i] = weights + params_find(&table, s->shapes[i].kind, l)->offset;
        fp8_weights(s, l, w, 0);
    };
    for (int64_t l = 0; l < 2; l++) quantize(l);
    quantize(1); // again, as after a step
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int64_t l = 0; l < 2; l++)
        for (int i = 0; i < FP8_LINEARS; i++) {
            const int64_t N = s->shapes[i].N, K = s->shapes[i].K;
            const bf16* w = host.data() + params_find(&table, s->shapes[i].kind, l)->offset;
            vector<uint8_t> q(2 * N * K);
            Fp8Scale scale;
            CUDA_CHECK(cudaMemcpy(q.data(), fp8_weights_of(s, l, i), q.size(), cudaMemcpyDeviceToHost));
            CUDA_CHECK(
                cudaMemcpy(&scale, fp8_scale_of(s, l, i, FP8_WEIGHT), sizeof scale, cudaMemcpyDeviceToHost));
            uint32_t most = 0;
            int64_t wrong = 0, moved = 0;
            for (int64_t k = 0; k < N * K; k++) most = std::max(most, bf16_bits(w[k]) & 0x7fff);
            const Fp8Scale want = fp8_scale(most, FP8_E4M3);
            for (int64_t k = 0; k < N * K; k++) {
                const uint8_t code = fp8_nearest(value(w[k]) * want.scale, 3);
                wrong += q[k] != code && (q[k] | code) != 0x80;
                moved += q[N * K + k % K * N + k / K] != q[k];
            }
            CHECK(scale.scale == want.scale && scale.inverse == want.inverse,
                  "layer %lld, %d: scale %g instead of %g", (long long)l, i, scale.scale, want.scale);
            CHECK(wrong == 0 && moved == 0, "layer %lld, %d: %lld are wrong, %lld transposed", (long long)l,
                  i, (long long)wrong, (long long)moved);
        }
    fp8_close(s);
    params_free(&table);
}

// The gradient of logits in FP8 is that in bf16, converted; V is not a multiple of 8. A row has no target.
static void test_classifier(int64_t rows, int64_t V, int64_t Vs) {
    snprintf(test_case, sizeof test_case, "classifier %lld x %lld", (long long)rows, (long long)V);
    const float dloss = 1.0f / 65536, scale = fp8_scale(fp8_bits_above(dloss), FP8_E5M2).scale;
    const vector<bf16> x = draw<bf16>(rows * Vs, 3);
    const LogitShape shape = {rows, V, Vs};
    vector<int32_t> targets((size_t)rows);
    for (int64_t r = 0; r < rows; r++) targets[r] = (int32_t)(r * 977 % V);
    targets[rows / 2] = TARGET_NONE, targets[rows - 1] = (int32_t)(V - 1);
    Buffer<int32_t> d_targets(targets);
    Buffer<bf16> logits(x), logits_kept(x);
    Buffer<float> losses(rows), losses_again(rows);
    Written want(FP8_E5M2, rows, Vs, Vs, scale), got(FP8_E5M2, rows, Vs, Vs, scale);
    CHECK(dloss * scale <= 57344 && 2 * dloss * scale > 57344, "%s: the scale %g", test_case, scale);
    classifier(losses, logits, d_targets, &shape, dloss, true, 0);
    fp8_convert<FP8_E5M2>(&want.tensor, logits, rows, Vs, Vs, 0);
    classifier(losses_again, logits_kept, d_targets, &shape, dloss, true, 0, got.tensor);
    check_same_bits("losses", losses, losses_again);
    CHECK(same_bits(logits_kept.host(), x), "%s: logits are overwritten", test_case);
    check_same_bits("gradient", got.bytes, want.bytes);
}

// lm_head's weights and scales. A norm's output stays below the range.
static void test_head() {
    snprintf(test_case, sizeof test_case, "lm_head");
    const Config c = small_config();
    ParamTable table = params_build(&c);
    Fp8State* s = fp8_open(&c, &table);
    const int64_t Vs = s->Vs, d = s->d;
    const Buffer<bf16> w(draw<bf16>(Vs * d, 0.02)), norm(draw<bf16>(d, 0.5, 1));
    uint32_t most[2] = {0, 0};
    for (bf16 element : w.host()) most[0] = std::max(most[0], bf16_bits(element) & 0x7fff);
    for (bf16 element : norm.host()) most[1] = std::max(most[1], bf16_bits(element) & 0x7fff);
    fp8_head_input_scale(s, norm, 0); // nothing yet
    CHECK(!fp8_head(s, 0, NULL, NULL).w && !fp8_head_input(s).data, "%s: in FP8 before a first step",
          test_case);
    s->scaled = true;
    for (int again = 0; again < 2; again++) fp8_head_weights(s, w, 0);
    fp8_head_input_scale(s, norm, 0);
    fp8_head_gradient_scale(s, 1.0f / 65536, 0);
    Written want(FP8_E4M3, Vs, d, d, fp8_scale(most[0], FP8_E4M3).scale);
    fp8_convert<FP8_E4M3>(&want.tensor, w, Vs, d, d, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    vector<uint8_t> q((size_t)(2 * Vs * d));
    Fp8Scale scales[FP8_TENSORS];
    const Fp8Linear head = fp8_head(s, 0, NULL, NULL);
    CUDA_CHECK(cudaMemcpy(q.data(), head.w, q.size(), cudaMemcpyDeviceToHost));
    const Fp8Scale* const of[FP8_TENSORS] = {head.x.scale, head.dout.scale, head.w_scale};
    for (int i = 0; i < FP8_TENSORS; i++)
        CUDA_CHECK(cudaMemcpy(&scales[i], of[i], sizeof scales[i], cudaMemcpyDeviceToHost));
    int64_t moved = 0;
    for (int64_t i = 0; i < Vs * d; i++) moved += q[Vs * d + i % d * Vs + i / d] != q[i];
    q.resize((size_t)(Vs * d));
    CHECK(q == want.bytes.host() && moved == 0, "%s: the weights, or %lld transposed", test_case,
          (long long)moved);
    const double bound = sqrt((double)d) * value(bf16_of(most[1])) * scales[FP8_INPUT].scale;
    CHECK(bound <= 448 && 2 * bound > 440, "%s: an input of up to %g", test_case, bound);
    CHECK(scales[FP8_GRADIENT].scale == fp8_scale(0x3780, FP8_E5M2).scale, "%s: a gradient's scale",
          test_case);
    CHECK(scales[FP8_WEIGHT].scale == want.scale.host()[0].scale, "%s: the weights' scale", test_case);
    fp8_close(s);
    params_free(&table);
}

// What a step leaves of one tensor: amax in all others is 1.
static void measure(const Fp8State* s, int64_t layer, int linear, int tensor, float amax) {
    Buffer<bf16> one(vector<bf16>(64, (bf16)1.0f)), x(vector<bf16>(64, (bf16)(-amax)));
    for (int64_t l = 0; l < s->layers; l++)
        for (int i = 0; i < FP8_LINEARS; i++)
            for (int t = 0; t < FP8_DELAYED; t++) {
                const bool chosen = l == layer && i == linear && t == tensor;
                Fp8Tensor to = {.data = NULL, .amax = fp8_lanes_of(s, l, i, t)};
                fp8_measure(&to, chosen ? x : one, 8, 8, 8, 0);
            }
    CUDA_CHECK(cudaDeviceSynchronize());
}

static float scale_of(const Fp8State* s, int64_t layer, int linear, int tensor) {
    Fp8Scale scale;
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(
        cudaMemcpy(&scale, fp8_scale_of(s, layer, linear, tensor), sizeof scale, cudaMemcpyDeviceToHost));
    CHECK(scale.inverse == 1 / scale.scale, "the inverse of %g is %g", scale.scale, scale.inverse);
    return scale.scale;
}

// A large amax counts for FP8_HISTORY steps; an invalid step changes nothing; a record restores all.
static void test_history() {
    snprintf(test_case, sizeof test_case, "history");
    const Config c = small_config();
    ParamTable table = params_build(&c);
    Fp8State *s = fp8_open(&c, &table), *resumed = fp8_open(&c, &table);
    Buffer<int32_t> valid(vector<int32_t>{1, 0}), saturated(FP8_DELAYED);
    CHECK(!s->scaled && !fp8_record(s) && !fp8_record(NULL), "scales before the first step");
    for (int64_t step = 1; step <= 40; step++) {
        measure(s, 1, FP8_GATE_PROJ, FP8_GRADIENT, step == 20 ? 1000 : 10);
        saturated.zero();
        fp8_collect_amax(s, 0);
        fp8_update(s, step, valid, saturated, 0);
        CHECK(saturated.host() == vector<int32_t>({0, step == 20}), "step %lld: what saturated",
              (long long)step);
        const float want = step >= 20 && step < 20 + FP8_HISTORY ? 32 : 4096; // 57344 / 1000, 57344 / 10
        CHECK(scale_of(s, 1, FP8_GATE_PROJ, FP8_GRADIENT) == want, "step %lld: a gradient's scale",
              (long long)step);
        CHECK(scale_of(s, 1, FP8_GATE_PROJ, FP8_INPUT) == 256 &&
                  scale_of(s, 0, FP8_IN_PROJ, FP8_GRADIENT) == 32768,
              "step %lld: other scales", (long long)step);
        if (step % 10 == 5) {
            measure(s, 0, FP8_O_PROJ, FP8_INPUT, 1e6f);
            fp8_collect_amax(s, 0);
            fp8_update(s, step + 1, valid + 1, saturated, 0);
            CHECK(saturated.host()[FP8_INPUT] == 0, "an invalid step saturates");
            CHECK(scale_of(s, 0, FP8_O_PROJ, FP8_INPUT) == 256, "an invalid step changed a scale");
        }
        if (step != 25) continue;
        Error err;
        Json record;
        char *text = fp8_record(s), *json = (char*)xcalloc(strlen(text) + 100, 1);
        sprintf(json, "{\"fp8\": \"%s\"}", text);
        if (!json_parse(&record, "a record", json, strlen(json), &err)) die("%s", err.msg);
        fp8_restore(resumed, &record, 0);
        char* again = fp8_record(resumed);
        CHECK(resumed->scaled && strcmp(text, again) == 0, "the record of what was restored");
        CHECK(scale_of(resumed, 1, FP8_GATE_PROJ, FP8_GRADIENT) == 32 &&
                  scale_of(resumed, 1, FP8_GATE_PROJ, FP8_INPUT) == 256,
              "restored scales");
        json_free(&record);
        free(text), free(json), free(again);
    }
    fp8_close(s), fp8_close(resumed);
    params_free(&table);
}

int main(int argc, char** argv) {
    const bool quick = test_begin(argc, argv);
    test_scale();
    const int capability = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
                           device_attribute(cudaDevAttrComputeCapabilityMinor);
    if (capability >= 89) {
        test_conversion();
        test_transpose(16, 16, 24);
        test_transpose(144, 208, 208);
        if (!quick) test_transpose(1008, 1536, 6272);
        for (float scale : SCALES) {
            test_rmsnorm(5, 72, scale);
            test_rmsnorm(16, 72, scale);
            test_swiglu(16, 48, scale);
            test_swiglu(144, 208, scale);
            if (!quick) test_rmsnorm(1000, 1536, scale);
            if (!quick) test_swiglu(1008, 3584, scale);
        }
        for (const HeadShape& s :
             {fused_shape(1, 33, 2, 64), fused_shape(2, 50, 3, 128), fused_shape(1, 9, 1, 48)}) {
            test_output_gate(s, 16);
            for (bool documents : {false, true}) test_qkv(s, 16, documents);
        }
        for (bool documents : {false, true})
            if (!quick) test_qkv(fused_shape(1, 33, 2, 64), 16, documents, true);
        if (!quick) test_output_gate(fused_shape(2, 700, 24, 64), 64);
        for (bool documents : {false, true})
            if (!quick) test_qkv(fused_shape(2, 700, 24, 64), 64, documents);
        test_classifier(16, 257, 320);
        if (!quick) test_classifier(48, 50257, 50304);
        test_head();
        test_weights();
        test_history();
    } else
        SKIP("FP8, which this GPU does not have");
    return test_report();
}
