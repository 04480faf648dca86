/*
Benchmarks the memory-bound layers: bandwidth, as the bytes that must be read and written once over the time,
relative to a device-to-device copy in the same run.

Calls alternate between two sets of random inputs that are larger than the caches. A time is the median of 40
calls.

    bench_layers [PART]     only benchmarks whose name contains PART
*/
#include <set>
#include "../../llmc/baselines/mixers.h"
#include "../../llmc/cuda/device.cuh"
#include "../../llmc/layers/fp8_state.cuh"
#include "../../llmc/layers/embedding.cuh"
#include "../../llmc/layers/output_gate.cuh"
#include "../../llmc/layers/qkv.cuh"
#include "../../llmc/base/random.h"
#include "../../llmc/layers/rmsnorm.cuh"
#include "../../llmc/layers/swiglu.cuh"
#include "../../llmc/config/presets.h"
#include "bench.cuh"

enum { CALLS = 40, SETS = 2 };
static double copy_rate; // bytes per second, read and written
static const char* part = "";

// What a kernel writes in FP8, the same for both sets: those of bf16 do not fit into the caches.
struct Written {
    Fp8Scale* scale;
    Fp8Tensor tensor;
    explicit Written(int64_t n, int64_t stride, bool alone) : scale(device_array<Fp8Scale>(1)) {
        const Fp8Scale one = {1, 1};
        CUDA_CHECK(cudaMemcpy(scale, &one, sizeof one, cudaMemcpyHostToDevice));
        tensor = {device_array<fp8>(n), stride, scale, device_array<uint32_t>(FP8_LANES * FP8_LANE_STRIDE),
                  alone};
    }
    Written(const Written&) = delete;
    ~Written() {
        CUDA_CHECK(cudaFree(tensor.data));
        CUDA_CHECK(cudaFree(tensor.amax));
        CUDA_CHECK(cudaFree(scale));
    }
};

// A tensor of n random elements for each set.
template <class T> struct Tensor {
    T* at[SETS];
    explicit Tensor(int64_t n) {
        for (T*& p : at) p = random_array<T>(n, 1);
    }
    Tensor(const Tensor&) = delete;
    ~Tensor() {
        for (T* p : at) CUDA_CHECK(cudaFree(p));
    }
    T* operator[](int set) const { return at[set]; }
};

// Median microseconds of call(set). All calls are queued before the first one ends, which excludes launch
// latency.
template <class Call> static double time_call(const Call& call) {
    std::vector<cudaEvent_t> events(CALLS + 1);
    for (cudaEvent_t& e : events) CUDA_CHECK(cudaEventCreate(&e));
    for (int i = 0; i < 4; i++) call(i % SETS);
    CUDA_CHECK(cudaEventRecord(events[0]));
    for (int i = 0; i < CALLS; i++) {
        call(i % SETS);
        CUDA_CHECK(cudaEventRecord(events[i + 1]));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<double> times;
    for (int i = 0; i < CALLS; i++) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
        times.push_back(1e3 * ms);
    }
    for (cudaEvent_t e : events) CUDA_CHECK(cudaEventDestroy(e));
    std::nth_element(times.begin(), times.begin() + CALLS / 2, times.end());
    return times[CALLS / 2];
}

template <class Call> static void bench(const char* name, double bytes, const Call& call) {
    if (!strstr(name, part)) return;
    double us = time_call(call), rate = bytes / us * 1e6;
    printf("%-41s %8.1f MB %8.1f us, %8.1f us at copy speed %7.0f GB/s %6.1f%% of a copy\n", name,
           bytes / 1e6, us, bytes / copy_rate * 1e6, rate / 1e9, 100 * rate / copy_rate);
}

// ----------------------------------------------------------------------------

static void bench_copies(void) {
    for (int64_t bytes : {(int64_t)50 << 20, (int64_t)100 << 20, (int64_t)1 << 30}) {
        Tensor<float> from(bytes / 4), to(bytes / 4);
        double us = time_call(
            [&](int s) { CUDA_CHECK(cudaMemcpyAsync(to[s], from[s], bytes, cudaMemcpyDeviceToDevice)); });
        copy_rate = 2 * (double)bytes / us * 1e6;
        printf("copy of %5lld MiB: %8.1f us, %5.0f GB/s read and written\n", (long long)(bytes >> 20), us,
               copy_rate / 1e9);
    }
}

static void bench_rmsnorm(int64_t rows, int64_t d) {
    Tensor<bf16> a(rows * d), b(rows * d), c(rows * d), y(rows * d), weight(d);
    Tensor<float> rstd(rows), dweight(d), partial((int64_t)(norm_partial_bytes() / sizeof(float)));
    double row_bytes = 2 * (double)(rows * d);
    auto norm = [&](int s) { return Norm{weight[s], dweight[s], rstd[s], rows, d, 1e-6}; };
    bench("rmsnorm_forward", 2 * row_bytes, [&](int s) {
        Norm n = norm(s);
        rmsnorm_forward(a[s], b[s], &n, 0);
    });
    bench("rmsnorm_backward", 3 * row_bytes, [&](int s) {
        Norm n = norm(s);
        rmsnorm_backward(a[s], NULL, b[s], c[s], false, &n, {partial[0]}, 0);
    });
    bench("rmsnorm_backward, add", 4 * row_bytes, [&](int s) {
        Norm n = norm(s);
        rmsnorm_backward(a[s], NULL, b[s], c[s], true, &n, {partial[0]}, 0);
    });
    bench("rmsnorm_backward, add, y", 5 * row_bytes, [&](int s) {
        Norm n = norm(s);
        rmsnorm_backward(a[s], y[s], b[s], c[s], true, &n, {partial[0]}, 0);
    });
    Written beside(rows * d, d, false), alone(rows * d, d, true);
    bench("rmsnorm_forward, FP8 alone", 1.5 * row_bytes, [&](int s) {
        Norm n = norm(s);
        n.y8 = alone.tensor;
        rmsnorm_forward(NULL, b[s], &n, 0);
    });
    bench("rmsnorm_forward, FP8 too", 2.5 * row_bytes, [&](int s) {
        Norm n = norm(s);
        n.y8 = beside.tensor;
        rmsnorm_forward(a[s], b[s], &n, 0);
    });
    bench("rmsnorm_backward, add, y, FP8 too", 5.5 * row_bytes, [&](int s) {
        Norm n = norm(s);
        n.dx8 = beside.tensor;
        rmsnorm_backward(a[s], y[s], b[s], c[s], true, &n, {partial[0]}, 0);
    });
}

// The tensors of all kernels that work on heads; x0 to x5 are [B, T, NH, dh].
struct HeadTensors {
    HeadShape shape;
    Tensor<bf16> x0, x1, x2, x3, x4, x5, weight, proj, dproj;
    Tensor<float> rstd0, rstd1, dweight, delta, angles, partial;
    explicit HeadTensors(const HeadShape& s)
        : shape(s), x0(size()), x1(size()), x2(size()), x3(size()), x4(size()), x5(size()),
          weight(s.NH * s.dh), proj(s.B * s.T * s.row_stride), dproj(s.B * s.T * s.row_stride),
          rstd0(heads()), rstd1(heads()), dweight(s.NH * s.dh), delta(heads()), angles(s.T * s.dh),
          partial((int64_t)(norm_partial_bytes() / sizeof(float))) {
        for (int set = 0; set < SETS; set++) rope_angles(angles[set], s.T, s.dh, rotation_plain(500000), 0);
    }
    int64_t heads() const { return shape.B * shape.T * shape.NH; }
    int64_t size() const { return heads() * shape.dh; }
};

static void bench_output_gate(const HeadTensors& t) {
    double bytes = 2 * (double)t.size(),
           head_bytes = 4 * (double)t.heads(); // of [B, T, d] in bf16, [B, T, NH] in fp32
    int64_t column = 3 * t.shape.NH * t.shape.dh;
    auto gate = [&](int s) {
        return OutputGate{t.weight[s],         t.dweight[s], t.rstd0[s], t.proj[s] + column,
                          t.dproj[s] + column, t.delta[s],   1e-6,       false};
    };
    bench("output_gate_forward, norm, gate", 3 * bytes + head_bytes, [&](int s) {
        OutputGate g = gate(s);
        output_gate_forward(t.x0[s], t.x1[s], &g, &t.shape, 0);
    });
    bench("output_gate_backward, norm, gate, delta", 5 * bytes + 2 * head_bytes, [&](int s) {
        OutputGate g = gate(s);
        output_gate_backward(t.x0[s], NULL, t.x1[s], t.x2[s], &g, {t.partial[0]}, &t.shape, 0);
    });
    bench("output_gate_backward, norm, gate, delta, y", 6 * bytes + 2 * head_bytes, [&](int s) {
        OutputGate g = gate(s);
        output_gate_backward(t.x0[s], t.x3[s], t.x1[s], t.x2[s], &g, {t.partial[0]}, &t.shape, 0);
    });
    const int64_t d = t.shape.NH * t.shape.dh;
    Written y8(t.size(), d, true), dproj8(4 * t.size(), 4 * d, false);
    bench("output_gate_forward, FP8 alone", 2.5 * bytes + head_bytes, [&](int s) {
        OutputGate g = gate(s);
        g.y8 = y8.tensor;
        output_gate_forward(NULL, t.x1[s], &g, &t.shape, 0);
    });
    bench("output_gate_backward, FP8 too", 6.5 * bytes + 2 * head_bytes, [&](int s) {
        OutputGate g = gate(s);
        g.dgate8 = dproj8.tensor;
        output_gate_backward(t.x0[s], t.x3[s], t.x1[s], t.x2[s], &g, {t.partial[0]}, &t.shape, 0);
    });
}

// measured: finds the largest norms of q and k as well
static void bench_qkv(const HeadTensors& t, const char* name, bool shift, bool norm, bool rope,
                      bool measured = false) {
    int64_t NH = t.shape.NH, d = NH * t.shape.dh;
    double bytes = 2 * (double)t.size(), head_bytes = 4 * (double)t.heads();
    double extra = (shift + 2 * norm) * head_bytes; // two bf16 shift logits per head; two rstds
    // how many of q, k, v the backward pass recomputes from proj
    double recomputed = norm ? (shift ? 3 : 2) : shift ? 2 : 0;
    const Tensor<bf16>*outs[3] = {&t.x0, &t.x1, &t.x2}, *douts[3] = {&t.x3, &t.x4, &t.x5};
    const Tensor<float>* rstds[2] = {&t.rstd0, &t.rstd1};
    HeadPath paths[SETS][3];
    memset(paths, 0, sizeof paths);
    for (int s = 0; s < SETS; s++)
        for (int i = 0; i < 3; i++) {
            HeadPath* p = &paths[s][i];
            p->column = i * d, p->shift = shift && i ? 4 * d + i * NH : -1;
            p->out = (*outs[i])[s], p->dout = (*douts[i])[s];
            if (i == 2) continue;
            p->weight = norm ? t.weight[s] : NULL, p->dweight = t.dweight[s], p->eps = 1e-5f, p->rope = rope;
            p->rstd = (*rstds[i])[s];
        }
    char title[96];
    Tensor<float> squares(2 * NH * head_norm_groups(&t.shape));
    snprintf(title, sizeof title, "qkv_forward, %s", name);
    bench(title, 6 * bytes + extra + measured * head_bytes / 2, [&](int s) {
        qkv_forward(paths[s], measured ? squares[s] : NULL, t.proj[s], t.angles[s], &t.shape, 0);
    });
    if (measured) return;
    snprintf(title, sizeof title, "qkv_backward, %s", name);
    bench(title, (6 + recomputed) * bytes + extra + shift * head_bytes, [&](int s) {
        qkv_backward(paths[s], t.dproj[s], t.proj[s], t.angles[s], {t.partial[0]}, &t.shape, Fp8Tensor(), 0);
    });
    Written dproj8(4 * t.size(), 4 * d, false);
    snprintf(title, sizeof title, "qkv_backward, %s, FP8 too", name);
    bench(title, (7.5 + recomputed) * bytes + extra + shift * head_bytes, [&](int s) {
        qkv_backward(paths[s], t.dproj[s], t.proj[s], t.angles[s], {t.partial[0]}, &t.shape, dproj8.tensor,
                     0);
    });
}

static void bench_swiglu(int64_t rows, int64_t I) {
    Tensor<bf16> gate_up(2 * rows * I), act(rows * I), dgate_up(2 * rows * I);
    bench("swiglu_forward", 6 * (double)(rows * I),
          [&](int s) { swiglu_forward(act[s], gate_up[s], rows, I, 0); });
    bench("swiglu_backward", 10 * (double)(rows * I),
          [&](int s) { swiglu_backward(dgate_up[s], NULL, act[s], gate_up[s], rows, I, 0); });
    bench("swiglu_backward, act", 12 * (double)(rows * I),
          [&](int s) { swiglu_backward(dgate_up[s], act[s], act[s], gate_up[s], rows, I, 0); });
    Written act8(rows * I, I, true), dgate_up8(2 * rows * I, 2 * I, true);
    Fp8Tensor act_kept = act8.tensor, dgate_up_kept = dgate_up8.tensor;
    act_kept.transposed = device_array<fp8>(rows * I);
    dgate_up_kept.transposed = device_array<fp8>(2 * rows * I);
    bench("swiglu_forward, FP8", 5 * (double)(rows * I),
          [&](int s) { swiglu_forward_fp8(act8.tensor, gate_up[s], rows, I, 0); });
    bench("swiglu_forward, FP8, transposed", 6 * (double)(rows * I),
          [&](int s) { swiglu_forward_fp8(act_kept, gate_up[s], rows, I, 0); });
    bench("swiglu_backward, FP8, transposed", 10 * (double)(rows * I),
          [&](int s) { swiglu_backward_fp8(dgate_up_kept, act8.tensor, act[s], gate_up[s], rows, I, 0); });
    bench("swiglu_backward, act, FP8, transposed", 11 * (double)(rows * I),
          [&](int s) { swiglu_backward_fp8(dgate_up_kept, act_kept, act[s], gate_up[s], rows, I, 0); });
    CUDA_CHECK(cudaFree(act_kept.transposed));
    CUDA_CHECK(cudaFree(dgate_up_kept.transposed));
}

// Both copies of a layer's weights: bf16 is read twice.
static void bench_fp8_weights(const char* model) {
    Error err;
    Config c;
    Recipe recipe;
    if (!config_preset(&c, &recipe, model, &err)) die("%s", err.msg);
    ParamTable table = params_build(&c);
    Fp8State* state = fp8_open(&c, &table);
    bf16* weights = random_array<bf16>(table.count, 0.02f);
    bench("weights in FP8, of a layer", 3 * (double)fp8_block_bytes(state->shapes), [&](int l) {
        const bf16* w[FP8_LINEARS];
        for (int i = 0; i < FP8_LINEARS; i++)
            w[i] = weights + params_find(&table, state->shapes[i].kind, l)->offset;
        fp8_weights(state, l, w, 0);
    });
    CUDA_CHECK(cudaFree(weights));
    fp8_close(state);
    params_free(&table);
}

static void bench_embedding(int64_t rows, int64_t d, int64_t V) {
    Tensor<bf16> x(rows * d), embeddings(V * d);
    Tensor<float> dembeddings(V * d);
    Tensor<uint8_t> scratch((int64_t)embedding_scratch_bytes(rows, d));
    Tensor<int32_t> tokens(rows);
    double bytes = 2 * (double)(rows * d);
    for (const char* kind : {"as text", "uniform", "all equal"}) {
        double distinct = 0;
        for (int set = 0; set < SETS; set++) {
            std::vector<int32_t> host(rows);
            for (int64_t i = 0; i < rows; i++) { // as text: frequency is proportional to 1 / rank
                double u = random_uniform(2, (uint64_t)set, (uint64_t)i);
                bool text = !strcmp(kind, "as text"), uniform = !strcmp(kind, "uniform");
                host[i] = (int32_t)(text ? pow((double)V, u) - 1 : uniform ? u * (double)V : 7);
            }
            distinct = (double)std::set<int32_t>(host.begin(), host.end()).size();
            CUDA_CHECK(cudaMemcpy(tokens[set], host.data(), rows * sizeof(int32_t), cudaMemcpyHostToDevice));
        }
        char title[96];
        snprintf(title, sizeof title, "embedding_forward, %s", kind);
        bench(title, bytes + 2 * distinct * (double)d,
              [&](int s) { embedding_forward(x[s], tokens[s], embeddings[s], rows, d, 0); });
        snprintf(title, sizeof title, "embedding_backward, %s", kind);
        bench(title, bytes + 8 * distinct * (double)d,
              [&](int s) { embedding_backward(dembeddings[s], x[s], tokens[s], scratch[s], rows, d, V, 0); });
    }
}

// The layers of one model, on B sequences of T tokens.
static void bench_model(const char* name, int64_t B, int64_t T, int64_t NH, int64_t dh, int64_t I,
                        int64_t V) {
    int64_t d = NH * dh, columns = 4 * d + 3 * NH;
    printf("\n%s: B %lld, T %lld, NH %lld, dh %lld, I %lld\n", name, (long long)B, (long long)T,
           (long long)NH, (long long)dh, (long long)I);
    bench_rmsnorm(B * T, d);
    {
        HeadTensors heads({B, T, NH, dh, columns, ceil_div<int64_t>(columns, 8) * 8, dh});
        bench_output_gate(heads);
        bench_qkv(heads, "shift, norm", true, true, false);
        bench_qkv(heads, "shift, norm, largest norms", true, true, false, true);
        bench_qkv(heads, "shift, norm, rope", true, true, true);
        bench_qkv(heads, "rope", false, false, true);
        bench_qkv(heads, "none", false, false, false);
        bench_qkv(heads, "none, largest norms", false, false, false, true);
    }
    bench_swiglu(B * T, I);
    bench_fp8_weights(name);
    bench_embedding(B * T, d, V);
}

int main(int argc, char** argv) {
    if (argc > 1) part = argv[1];
    Device device = device_open(0);
    printf("%s, %d SMs\n", device.name, device.sms);
    bench_copies();
    bench_model("fox-pro-760m", 1, 16384, 24, 64, 3584, 50257);
    bench_model("fox-pro-125m", 2, 16384, 12, 64, 1792, 50257);
    bench_model("transformer-pro-760m", 1, 16384, 12, 128, 3584, 50257);
    return EXIT_SUCCESS;
}
