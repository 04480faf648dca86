/*
Benchmarks llmc/attention/attention.cuh: forward and backward with and without the gate, then with pruning,
then windows, then the gate and bounds kernels, then scores far below zero. Prints the rate of a cuBLAS GEMM
in the same run for comparison.

TFLOP/s count the nominal FLOPs of causal attention, 2 B NH T^2 dh forward and 2.5 times as many backward,
whatever the kernels execute.

    bench_attention [DH [T]]      only this head size and sequence length
    bench_attention window        only windows
    bench_attention band          only gates as they begin: kernels of band heads (pruning.cuh)
                                  beside those of all others
    bench_attention tiles         only the backward pass of sm_80, dh 64, by the tokens of a tile and the
                                  shared memory of an SM: as it is, and 100 KiB as on sm_86, 89 and 120
*/
#include "../../llmc/config/config.h"
#include "../../llmc/layers/forget_gate.cuh"
#include "../../llmc/cuda/matmul.cuh"
#include "../../llmc/attention/pruning.cuh"
#include "bench.cuh"

// Median milliseconds of one call.
template <class Call> static double milliseconds(const Call& call) {
    return milliseconds(
        1, 15, [] {}, [&](int) { call(); })[0];
}

// TFLOP/s of an n x n x n GEMM.
static double cublas_rate(int64_t n) {
    bf16 *a = random_array<bf16>(n * n, 1), *b = random_array<bf16>(n * n, 1), *c = device_array<bf16>(n * n);
    Matmul mm;
    Linear linear = {b, NULL, n, n, n, n, n};
    matmul_init(&mm, true, 0);
    double ms = milliseconds([&] { linear_forward(c, a, NULL, &linear, &mm); });
    matmul_free(&mm);
    for (void* p : {(void*)a, (void*)b, (void*)c}) CUDA_CHECK(cudaFree(p));
    return 2e-9 * (double)(n * n * n) / ms;
}

// Median microseconds of call(stream). A CUDA graph of many calls is timed, which excludes launch overhead.
template <class Call> static double microseconds_queued(Call call) {
    const int calls = 50;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < calls; i++) call(stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    double ms = milliseconds([&] { CUDA_CHECK(cudaGraphLaunch(executable, 0)); });
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return 1e3 * ms / calls;
}

// The tensors of attention on the device. Gates have only a bias: decay times are 2 to 16384 tokens,
// log-spaced over the heads.
struct Case {
    HeadShape shape;
    int64_t n, tokens;
    bf16 *q, *k, *v, *dout, *o, *dq, *dk, *dv, *proj, *dproj;
    float *lse, *dcum_logf, *bias;
    double* cum_logf;
    char *scratch, *gate_scratch;

    Case(int64_t B, int64_t T, int64_t NH, int64_t dh)
        : shape{B, T, NH, dh, 4 * NH * dh + 3 * NH, ceil_div<int64_t>(4 * NH * dh + 3 * NH, 64) * 64, dh, 0},
          n(B * T * NH * dh), tokens(B * T * NH) {
        for (bf16** p : {&q, &k, &v, &dout}) *p = random_array<bf16>(n, 1);
        for (bf16** p : {&o, &dq, &dk, &dv}) *p = device_array<bf16>(n);
        proj = random_array<bf16>(B * T * shape.row_stride, 1),
        dproj = device_array<bf16>(B * T * shape.row_stride);
        lse = device_array<float>(tokens), dcum_logf = device_array<float>(tokens),
        bias = device_array<float>(NH);
        cum_logf = device_array<double>(tokens);
        scratch = device_array<char>((int64_t)attention_scratch_bytes(&shape, true));
        gate_scratch = device_array<char>((int64_t)forget_gate_scratch_bytes(&shape));
        Config config = config_defaults();
        config.num_heads = NH, config.decay_time_min = 2, config.decay_time_max = 16384;
        std::vector<float> biases;
        for (int64_t h = 0; h < NH; h++) biases.push_back((float)config_long_gate_bias(&config, h));
        CUDA_CHECK(cudaMemcpy(bias, biases.data(), biases.size() * sizeof(float), cudaMemcpyHostToDevice));
        gate_forward(NULL, 0);
    }
    ~Case() {
        for (void* p : {(void*)q, (void*)k, (void*)v, (void*)dout, (void*)o, (void*)dq, (void*)dk, (void*)dv,
                        (void*)proj, (void*)dproj, (void*)lse, (void*)dcum_logf, (void*)bias, (void*)cum_logf,
                        (void*)scratch, (void*)gate_scratch})
            CUDA_CHECK(cudaFree(p));
    }
    double flops() const {
        return 2e-9 * (double)n * (double)shape.T; // GFLOP of the forward pass
    }

    AttentionForward forward_of(bool gate, const AttentionBounds* bounds) const {
        return {o, lse, q, k, v, gate ? cum_logf : NULL, bounds, scratch};
    }
    AttentionBackward backward_of(bool gate, const AttentionBounds* bounds, bool deterministic) const {
        AttentionBackward a = {};
        a.dq = dq, a.dk = dk, a.dv = dv, a.dcum_logf = gate ? dcum_logf : NULL;
        a.dout = dout, a.q = q, a.k = k, a.v = v, a.o = o, a.lse = lse, a.cum_logf = gate ? cum_logf : NULL;
        a.bounds = bounds, a.deterministic = deterministic, a.scratch = scratch;
        return a;
    }
    double forward(bool gate, const AttentionBounds* bounds) const {
        AttentionForward a = forward_of(gate, bounds);
        return milliseconds([&] { attention_forward(&a, &shape, 0); });
    }
    double backward(bool gate, const AttentionBounds* bounds, bool deterministic) const {
        AttentionBackward a = backward_of(gate, bounds, deterministic);
        return milliseconds([&] { attention_backward(&a, &shape, 0); });
    }
    void gate_forward(const bf16* z, cudaStream_t stream) const {
        forget_gate_forward(cum_logf, z, bias, gate_scratch, &shape, stream);
    }
    void gate_backward(cudaStream_t stream) const {
        forget_gate_backward(dproj, bias, dcum_logf, proj, bias, gate_scratch, &shape, stream);
    }
};

static void bench(int64_t B, int64_t T, int64_t NH, int64_t dh, bool gate) {
    Case x(B, T, NH, dh);
    double forward = x.forward(gate, NULL), backward = x.backward(gate, NULL, false),
           deterministic = x.backward(gate, NULL, true);
    printf("%4lld %4lld %6lld  %-4s  %8.3f %6.0f  %8.3f %6.0f  %8.3f %6.0f\n", (long long)dh,
           (long long)(B * NH), (long long)T, gate ? "yes" : "no", forward, x.flops() / forward, backward,
           2.5 * x.flops() / backward, deterministic, 2.5 * x.flops() / deterministic);
}

// Forward and backward in windows: milliseconds, and as a share of the time without one, beside the share of
// blocks that is left.
static void bench_windows(int64_t T, int64_t NH, int64_t dh, bool gate) {
    Case x(1, T, NH, dh);
    double whole[3] = {};
    int64_t blocks = ceil_div<int64_t>(T, ATTENTION_BLOCK), all = blocks * (blocks + 1) / 2;
    for (int64_t window : {(int64_t)0, T / 2, T / 4, T / 8, T / 16}) {
        x.shape.window = window;
        int64_t span = pruning_span(x.shape, (int)blocks), kept = span * (2 * blocks - span + 1) / 2;
        double ms[3] = {x.forward(gate, NULL), x.backward(gate, NULL, false), x.backward(gate, NULL, true)};
        printf("%4lld %4lld %6lld  %-4s %6lld  %5.1f%%", (long long)dh, (long long)NH, (long long)T,
               gate ? "yes" : "no", (long long)window, 100 * (double)kept / (double)all);
        for (int i = 0; i < 3; i++) {
            if (window == 0) whole[i] = ms[i];
            printf("  %8.3f %5.1f%%", ms[i], 100 * ms[i] / whole[i]);
        }
        printf("\n");
    }
}

static void bench_all_windows(void) {
    printf("\nwindows: share of blocks; milliseconds and share of the time without one\n"
           "  dh heads    T  gate window  blocks  forward          backward         deterministic\n");
    for (int64_t dh : {64, 128})
        for (int gate = 1; gate >= 0; gate--) bench_windows(16384, dh == 64 ? 24 : 12, dh, gate);
}

// Forward with all scores far below zero, as a multiple of the time with all far above: the softmax must not
// rescale in every step.
static void bench_far_scores(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    Case x(B, T, NH, dh);
    double ms[2];
    for (int below = 0; below < 2; below++) {
        const float values[] = {2, below ? -2.0f : 2.0f};
        bf16* const tensors[] = {x.q, x.k};
        for (int i = 0; i < 2; i++) {
            std::vector<bf16> all((size_t)x.n, (bf16)values[i]);
            CUDA_CHECK(cudaMemcpy(tensors[i], all.data(), all.size() * sizeof(bf16), cudaMemcpyHostToDevice));
        }
        ms[below] = x.forward(true, NULL);
    }
    printf("%4lld %4lld %6lld  %5.2f\n", (long long)dh, (long long)(B * NH), (long long)T, ms[1] / ms[0]);
}

// The bounds of a case, as if QK norm had weights of 1
struct Bounds {
    Pruning pruning = {};
    bf16* weight;

    explicit Bounds(const Case& x) : weight(device_array<bf16>(x.shape.NH * x.shape.dh)) {
        int64_t heads = x.shape.B * x.shape.NH,
                blocks = heads * ceil_div<int64_t>(x.shape.T, ATTENTION_BLOCK);
        std::vector<bf16> ones((size_t)(x.shape.NH * x.shape.dh), (bf16)1.0f);
        CUDA_CHECK(cudaMemcpy(weight, ones.data(), ones.size() * sizeof(bf16), cudaMemcpyHostToDevice));
        pruning.bounds = {device_array<int>(blocks), device_array<int>(blocks), device_array<int>(heads + 1)};
        pruning.score_limits = device_array<double>(heads), pruning.count = device_array<PruningCount>(1);
        pruning.cum_logf = x.cum_logf, pruning.q = x.q, pruning.k = x.k, pruning.lse = x.lse;
        pruning.q_weight = pruning.k_weight = weight, pruning.log_tolerance = -10;
        pruning.scratch = device_array<char>((int64_t)pruning_scratch_bytes(&x.shape));
    }
    ~Bounds() {
        for (void* p : {(void*)pruning.bounds.first_key_block, (void*)pruning.bounds.last_query_block,
                        (void*)pruning.bounds.head_order, (void*)pruning.count, (void*)pruning.score_limits,
                        pruning.scratch, (void*)weight})
            CUDA_CHECK(cudaFree(p));
    }
};

static void bench_pruning(int64_t B, int64_t T, int64_t NH, int64_t dh) {
    Case x(B, T, NH, dh);
    Bounds bounds(x);
    Pruning& pruning = bounds.pruning;
    Pruning no_norm = pruning;
    no_norm.q_weight = no_norm.k_weight = NULL;
    double without_norm =
        microseconds_queued([&](cudaStream_t stream) { pruning_bounds(&no_norm, &x.shape, stream); });
    double with_norm =
        microseconds_queued([&](cudaStream_t stream) { pruning_bounds(&pruning, &x.shape, stream); });
    auto kept_share = [&](auto find) {
        PruningCount counted;
        CUDA_CHECK(cudaMemset(pruning.count, 0, sizeof counted));
        find();
        CUDA_CHECK(cudaMemcpy(&counted, pruning.count, sizeof counted, cudaMemcpyDeviceToHost));
        return 1 - pruning_share(&counted);
    };
    double forward = x.forward(true, NULL), backward = x.backward(true, NULL, false);
    double kept_forward = kept_share([&] { pruning_bounds(&pruning, &x.shape, 0); });
    double pruned_forward = x.forward(true, &pruning.bounds);
    double kept_backward = kept_share([&] { pruning_backward_bounds(&pruning, &x.shape, 0); });
    double pruned_backward = x.backward(true, &pruning.bounds, false);
    double backward_bounds = microseconds_queued(
        [&](cudaStream_t stream) { pruning_backward_bounds(&pruning, &x.shape, stream); });
    double gate_forward = microseconds_queued([&](cudaStream_t stream) { x.gate_forward(x.proj, stream); });
    double gate_backward = microseconds_queued([&](cudaStream_t stream) { x.gate_backward(stream); });
    printf(
        "%4lld %4lld %6lld  %3.0f%% %7.3f %5.2f %7.2f  %3.0f%% %7.3f %5.2f %7.2f  %5.2f  %5.1f %6.1f %7.1f "
        "%8.1f %8.1f\n",
        (long long)dh, (long long)(B * NH), (long long)T, 100 * (1 - kept_forward), pruned_forward,
        forward / pruned_forward, kept_forward * forward / pruned_forward, 100 * (1 - kept_backward),
        pruned_backward, backward / pruned_backward, kept_backward * backward / pruned_backward,
        (forward + backward) / (pruned_forward + pruned_backward), gate_forward, with_norm, without_norm,
        backward_bounds, gate_backward);
}

// Gates as they begin: microseconds of a layer with bounds, where the tiled kernels compute all heads and
// where they leave band heads to those of sm90_band.cuh, in turns; and those that the bytes of q, k, v, o,
// dout and the gradients would take at the speed of a copy.
static void bench_band(int64_t T, int64_t NH) {
    Case x(1, T, NH, 64);
    CUDA_CHECK(cudaMemset(x.bias, 0, (size_t)NH * sizeof(float)));
    x.gate_forward(NULL, 0);
    Bounds bounds(x);
    AttentionBounds ways[2] = {bounds.pruning.bounds, bounds.pruning.bounds};
    ways[0].head_order = NULL;
    char *from = device_array<char>(1 << 30), *to = device_array<char>(1 << 30);
    double per_byte =
        1e3 *
        milliseconds([&] { CUDA_CHECK(cudaMemcpyAsync(to, from, 1 << 30, cudaMemcpyDeviceToDevice, 0)); }) /
        (double)((int64_t)2 << 30);
    double tensor = per_byte * (double)x.n * sizeof(bf16);
    float* delta = device_array<float>(x.tokens); // in a training the output gate's kernel writes it
    pruning_bounds(&bounds.pruning, &x.shape, 0);
    x.forward(true, &ways[0]);
    attention_delta(delta, x.dout, x.o, &x.shape, 0);
    printf("%5lld %6lld", (long long)NH, (long long)T);
    for (int pass = 0; pass < 2; pass++) {
        int others;
        if (pass) pruning_backward_bounds(&bounds.pruning, &x.shape, 0);
        CUDA_CHECK(cudaMemcpy(&others, ways[1].head_order + NH, sizeof others, cudaMemcpyDeviceToHost));
        printf("  %4lld ", (long long)NH - others);
        for (int turn = 0; turn < 4; turn++) {
            const AttentionBounds* way = &ways[turn % 2];
            AttentionForward forward = x.forward_of(true, way);
            AttentionBackward backward = x.backward_of(true, way, false);
            backward.delta = delta;
            printf(" %6.1f", microseconds_queued([&](cudaStream_t stream) {
                       if (pass)
                           attention_backward(&backward, &x.shape, stream);
                       else
                           attention_forward(&forward, &x.shape, stream);
                   }));
        }
        printf(" %6.1f", (pass ? 7 : 4) * tensor);
    }
    printf("\n");
    for (void* p : {(void*)from, (void*)to, (void*)delta}) CUDA_CHECK(cudaFree(p));
}

static void bench_bands(void) {
    printf(
        "\ngates as they begin, dh 64: band heads; microseconds tiled, band, tiled, band, of a copy's speed\n"
        "heads     T  forward                                    backward\n");
    for (int64_t NH : {12, 24}) bench_band(16384, NH);
}

// Thread blocks of a kernel on an SM, where that has `percent` of its shared memory; -1: all
template <class F, class... Parameters>
static int resident_blocks(void (*kernel)(Parameters...), int percent) {
    int blocks;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)sizeof(typename F::Shared)));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, F::THREADS,
                                                             sizeof(typename F::Shared)));
    return blocks;
}

template <int TILE> static void bench_tile(const Case& x, int percent) {
    AttentionBackward a = {};
    a.dq = x.dq, a.dk = x.dk, a.dv = x.dv, a.dcum_logf = x.dcum_logf, a.dout = x.dout, a.q = x.q, a.k = x.k;
    a.v = x.v, a.o = x.o, a.lse = x.lse, a.cum_logf = x.cum_logf, a.delta = (float*)x.scratch;
    int dq = resident_blocks<Sm80Dq<64, TILE>>(sm80_dq_kernel<64, TILE, true, false>, percent),
        dkv = resident_blocks<Sm80Dkv<64, TILE>>(sm80_dkv_kernel<64, TILE, true, false>, percent);
    double ms = milliseconds([&] { sm80_backward<64, TILE, true, false>(&a, &x.shape, 0); });
    printf("%6d %9s %9zu %9zu  %3d %3d  %8.3f %6.0f\n", TILE, percent < 0 ? "as it is" : "100 KiB",
           sizeof(typename Sm80Dq<64, TILE>::Shared), sizeof(typename Sm80Dkv<64, TILE>::Shared), dq, dkv, ms,
           2.5 * x.flops() / ms);
}

static void bench_tiles(int64_t T, int64_t NH) {
    Case x(1, T, NH, 64);
    x.forward(true, NULL);
    attention_delta((float*)x.scratch, x.dout, x.o, &x.shape, 0);
    int all = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    printf("\nT %lld, %lld heads: tokens of a tile, shared memory of an SM, of a thread block of dq and dkv, "
           "their\nthread blocks an SM, milliseconds, TFLOP/s\n",
           (long long)T, (long long)NH);
    for (int percent : {-1, (100 << 10) * 100 / all}) bench_tile<64>(x, percent), bench_tile<32>(x, percent);
}

int main(int argc, char** argv) {
    int64_t only_dh = argc > 1 ? strtoll(argv[1], NULL, 10) : 0,
            only_T = argc > 2 ? strtoll(argv[2], NULL, 10) : 0;
    auto each_shape = [&](auto run) {
        for (int64_t dh : {64, 128})
            for (int64_t T : {2048, 4096, 16384, 65536})
                if ((!only_dh || dh == only_dh) && (!only_T || T == only_T))
                    run(T, (dh == 64 ? 24 : 12) / (T == 65536 ? 4 : 1), dh);
    };
    if (argc > 1 && strcmp(argv[1], "window") == 0) {
        bench_all_windows();
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "band") == 0) {
        bench_bands();
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "tiles") == 0) {
        bench_tiles(4096, 24);
        bench_tiles(16384, 24);
        return 0;
    }
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    printf("%s; cuBLAS bf16 8192 x 8192 x 8192: %.0f TFLOP/s\n", device.name, cublas_rate(8192));
    printf("  dh heads    T  gate   forward ms TFLOP/s  backward ms TFLOP/s  deterministic\n");
    each_shape([](int64_t T, int64_t NH, int64_t dh) {
        for (int gate = 1; gate >= 0; gate--) bench(1, T, NH, dh, gate);
    });
    printf(
        "\nwith pruning: share of blocks skipped, speedup, and speedup over that of the executed FLOPs;\n"
        "microseconds of the gate and bounds kernels\n"
        "                   forward                      backward                      both   gate bounds "
        "without  backward     gate\n"
        "  dh heads    T         ms times of FLOPs           ms times of FLOPs times             QK norm   "
        "bounds backward\n");
    each_shape([](int64_t T, int64_t NH, int64_t dh) { bench_pruning(1, T, NH, dh); });
    if (!only_dh) bench_all_windows(), bench_bands();
    printf("\nforward, scores far below zero: times of far above\n");
    each_shape([](int64_t T, int64_t NH, int64_t dh) { bench_far_scores(1, T, NH, dh); });
    return 0;
}
