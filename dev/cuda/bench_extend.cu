/*
Benchmarks inference (llmc/inference): bandwidth, as the bytes that must be read once over the time, relative
to a device-to-device copy in the same run.

    attention   one layer's kernels of a decoding pass over a paged cache, at full length, nothing forgotten
    append      q, k, v and gates of the same rows
    matvec      the linear layers of a decoding step, beside cuBLAS

Times are medians of CUDA graphs of 16 calls, of which each has a layer or a weight of its own, larger than
the caches together: launches count as they do in a decoding step.

    bench_extend [PART]     only benchmarks whose name contains PART
*/
#include "../../llmc/cuda/device.cuh"
#include "../../llmc/inference/cuda/cache.cuh"
#include "../../llmc/inference/cuda/matvec.cuh"
#include "../../llmc/inference/cuda/scores.cuh"
#include "bench.cuh"

enum { CALLS = 16 };
static double copy_rate; // bytes per second, read and written
static const char* part = "";
static cudaStream_t stream;

// Microseconds of call(i), the median of graphs of CALLS calls.
template <class Call> static double time_call(const Call& call) {
    cudaGraph_t calls;
    cudaGraphExec_t graph;
    for (int i = 0; i < CALLS; i++) call(i);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < CALLS; i++) call(i);
    CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
    CUDA_CHECK(cudaGraphInstantiate(&graph, calls, 0));
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int round = -3; round < 20; round++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(start, stream));
        CUDA_CHECK(cudaGraphLaunch(graph, stream));
        CUDA_CHECK(cudaEventRecord(stop, stream));
        CUDA_CHECK(cudaEventSynchronize(stop));
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (round >= 0) times.push_back(ms);
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaGraphExecDestroy(graph));
    CUDA_CHECK(cudaGraphDestroy(calls));
    std::sort(times.begin(), times.end());
    return 1e3 * times[times.size() / 2] / CALLS;
}

template <class Call> static void bench(const char* name, double bytes, const Call& call) {
    if (!strstr(name, part)) return;
    double us = time_call(call), rate = bytes / us * 1e6;
    printf("  %-44s %8.2f MB %8.2f us %7.0f GB/s %6.1f%% of a copy\n", name, bytes / 1e6, us, rate / 1e9,
           100 * rate / copy_rate);
}

// ----------------------------------------------------------------------------
// attention: n sequences of T tokens, each extended by t rows

static void bench_attention(int64_t n, int64_t T, int64_t t, int64_t NH, int64_t dh, bool gate) {
    char name[96];
    const CacheModel model = {CALLS, NH, dh, gate, true, false, true, -10, 0};
    int64_t width = ceil_div<int64_t>(T, PAGE_TOKENS), d = NH * dh, S = 4 * d + 64;
    const CacheSizes sizes = {n, T, n * CALLS * NH * width, n * t, n, false};
    DeviceCache cache;
    if (!device_cache_new(&cache, &model, &sizes)) {
        printf("  n %lld, T %lld: no memory\n", (long long)n, (long long)T);
        return;
    }
    const Pages* p = &cache.pages;
    fill(p->k, sizes.pages * PAGE_TOKENS * dh, 1.0f), fill(p->v, sizes.pages * PAGE_TOKENS * dh, 1.0f);
    if (gate) CUDA_CHECK(cudaMemset(p->cum_logf, 0, (size_t)(sizes.pages * PAGE_TOKENS) * sizeof(double)));
    bf16 *proj = random_array<bf16>(n * t * S, 1), *weight = random_array<bf16>(d, 1),
         *y = device_array<bf16>(n * t * d);
    float* bias = random_array<float>(NH, 1);
    std::vector<int32_t> table((size_t)sizes.pages), tokens((size_t)(n * t)), slots;
    std::vector<int64_t> begins = {0}, lengths;
    for (int64_t i = 0; i < sizes.pages; i++) table[(size_t)i] = (int32_t)(i * 7919 % sizes.pages);
    if (sizes.pages % 7919 == 0) die("pages of the benchmark collide");
    for (int64_t i = 0; i < n; i++)
        slots.push_back((int32_t)i), begins.push_back((i + 1) * t), lengths.push_back(T - t);
    Extension e = {n * t,        n, tokens.data(), slots.data(), begins.data(), lengths.data(),
                   table.data(), 0, NULL,          NULL,         NULL,          1};
    for (int64_t i = 0; i < n; i++) cache.stale[i] = true;
    device_cache_fill(&cache, &e, stream);
    device_cache_copy(&cache, stream);
    extend_plan(&cache.work, p, &cache.pass, stream);
    ExtendOutput output = {y, cache.o, {weight, NULL, NULL, proj + 3 * d, NULL, NULL, 1e-6, false}, S};
    KvAppend a = {};
    for (int i = 0; i < 3; i++) {
        a.paths[i].column = i * d, a.paths[i].shift = i ? 4 * d + i * NH : -1;
        a.paths[i].weight = i < 2 ? weight : NULL, a.paths[i].eps = 1e-5f;
    }
    a.paths[0].out = cache.q, a.proj = proj, a.bias = bias, a.cum_logf = cache.cum_logf;
    a.gate = proj + 4 * d, a.row_stride = (int)S, a.weight_stride = (int)dh;
    double page_bytes = (double)(PAGE_TOKENS * dh * 4 + (gate ? PAGE_TOKENS * 8 : 0));
    snprintf(name, sizeof name, "attention n %lld, T %lld, t %lld, NH %lld, dh %lld%s", (long long)n,
             (long long)T, (long long)t, (long long)NH, (long long)dh, gate ? ", gate" : "");
    bench(name, page_bytes * (double)(n * NH * width), [&](int l) {
        ExtendLayer layer = device_cache_layer(&cache, l);
        a.layer = l;
        decode_attention(&output, &a, &layer, stream); // with the append, where it runs
        extend_attention(&output, cache.q, gate ? cache.cum_logf : NULL, &layer, stream);
    });
    if (cache.pass.num_decoded == 0)
        bench("append", (double)(n * t * d * 12), [&](int l) {
            a.layer = l;
            kv_append(p, &a, &cache.pass, stream);
        });
    bench("plan of all layers", 0, [&](int) { extend_plan(&cache.work, p, &cache.pass, stream); });
    device_cache_free(&cache);
    for (void* x : {(void*)proj, (void*)weight, (void*)bias, (void*)y}) CUDA_CHECK(cudaFree(x));
}

// ----------------------------------------------------------------------------
// linear layers

template <class T> static void bench_linear(const char* what, int64_t N, int64_t K, bool norm, bool swiglu) {
    char name[96];
    static Matmul mm;
    if (!mm.workspace) matmul_init(&mm, true, stream);
    int64_t copies = ceil_div<int64_t>((int64_t)256 << 20, N * K * 2);
    bf16* w = random_array<bf16>(copies * N * K, 0.02f);
    bf16 *x = random_array<bf16>(64 * 2 * K, 1), *weight = random_array<bf16>(K, 1),
         *y = device_array<bf16>(64 * K);
    T* out = random_array<T>(64 * N, 1);
    const bf16* residual = std::is_same<T, bf16>::value && !norm ? (const bf16*)out : NULL;
    auto linear = [&](int64_t rows, int i) { return Linear{w + i % copies * N * K, NULL, rows, N, K, N, K}; };
    MatvecInput in = {x, norm ? weight : NULL, 1e-6, swiglu, NULL, NULL};
    for (int64_t rows : {1, 4, 8, 16})
        for (int tiles : {0, 1, 2, 4}) {
            if (tiles && rows != 1) continue;
            snprintf(name, sizeof name, "matvec %s, %lld x %lld, %lld rows, tiles %d", what, (long long)N,
                     (long long)K, (long long)rows, tiles);
            bench(name, (double)(N * K * 2), [&](int i) {
                Linear l = linear(rows, i);
                matvec(out, &in, residual, &l, tiles, stream);
            });
        }
    for (int64_t rows : {1, 8, 16, 64}) {
        snprintf(name, sizeof name, "matvec %s, cuBLAS alone, %lld rows", what, (long long)rows);
        bench(name, (double)(N * K * 2), [&](int i) {
            Linear l = linear(rows, i);
            linear_forward(out, y, NULL, &l, &mm);
        });
    }
    for (void* p : {(void*)w, (void*)x, (void*)weight, (void*)y, (void*)out}) CUDA_CHECK(cudaFree(p));
}

static void bench_scores(int64_t rows, int64_t V) {
    int64_t Vs = matmul_padded(V);
    float* logits = random_array<float>(rows * Vs, 3);
    int32_t* targets = device_array<int32_t>(rows);
    Scores scores = {};
    scores.outputs.scores = device_array<RowScore>(rows), scores.outputs.step = device_array<int>(rows);
    scores.outputs.outputs = (int)rows, scores.targets = targets;
    scores.partials = device_array<ScorePartial>(rows * SCORE_PARTITIONS);
    scores.num_done = device_array<unsigned>(rows);
    CUDA_CHECK(cudaMemset(targets, 0, (size_t)rows * sizeof *targets));
    CUDA_CHECK(cudaMemset(scores.outputs.step, 0, (size_t)rows * sizeof(int)));
    CUDA_CHECK(cudaMemset(scores.num_done, 0, (size_t)rows * sizeof(unsigned)));
    LogitShape shape = {rows, V, Vs};
    char name[96];
    snprintf(name, sizeof name, "scores of %lld rows", (long long)rows);
    bench(name, (double)(rows * Vs * 4), [&](int) { row_scores(&scores, logits, 0, &shape, stream); });
    for (void* p : {(void*)logits, (void*)targets, (void*)scores.outputs.scores, (void*)scores.outputs.step,
                    (void*)scores.partials, (void*)scores.num_done})
        CUDA_CHECK(cudaFree(p));
}

static void bench_model(const char* name, int64_t d, int64_t NH, int64_t I) {
    printf("%s\n", name);
    bench_linear<bf16>("in_proj, norm", matmul_padded(4 * d + 3 * NH), d, true, false);
    bench_linear<bf16>("o_proj", d, d, false, false);
    bench_linear<bf16>("gate_proj, norm", 2 * I, d, true, false);
    bench_linear<bf16>("down_proj, SwiGLU", d, I, false, true);
    bench_linear<float>("lm_head, norm", matmul_padded(50257), d, true, false);
}

int main(int argc, char** argv) {
    if (argc > 1) part = argv[1];
    Device device = device_open(0);
    printf("%s, %d SMs\n", device.name, device.sms);
    CUDA_CHECK(cudaStreamCreate(&stream));
    copy_rate = bench_copy();
    const int64_t shapes[][2] = {{12, 64}, {24, 64}, {12, 128}};
    for (auto& shape : shapes) {
        printf("NH %lld, dh %lld\n", (long long)shape[0], (long long)shape[1]);
        bench_attention(1, 1024, 1, shape[0], shape[1], true);
        bench_attention(1, 65536, 1, shape[0], shape[1], true);
        bench_attention(1, 65536, 1, shape[0], shape[1], false);
        bench_attention(64, 1024, 1, shape[0], shape[1], true);
        bench_attention(1, 4096, 64, shape[0], shape[1], true);
    }
    bench_model("fox-pro-125m", 768, 12, 1792);
    bench_model("fox-pro-760m", 1536, 24, 3584);
    bench_scores(1, 50257);
    bench_scores(64, 50257);
    return EXIT_SUCCESS;
}
