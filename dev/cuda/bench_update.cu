/*
Benchmarks the memory-bound kernels of loss and update: gradient norm, AdamW and the bf16 copy of the weights
with the parameters of fox-pro-760m, and the classifier. GB/s count the bytes that must be read and written
once, relative to a device-to-device copy in the same run.

    bench_update
*/
#include "../../llmc/layers/adamw.cuh"
#include "../../llmc/layers/classifier.cuh"
#include "../../llmc/cuda/device.cuh"
#include "../../llmc/baselines/mixers.h"
#include "../../llmc/config/presets.h"
#include "bench.cuh"

static double copy_rate; // bytes per second, read and written

template <class Prepare, class Run>
static void report(const char* what, double bytes, const Prepare& prepare, const Run& run) {
    double ms = milliseconds(1, 15, prepare, [&](int) { run(); })[0], rate = bytes / ms * 1e3;
    if (copy_rate == 0) copy_rate = rate;
    printf("%-44s %9.3f ms %8.0f GB/s %6.1f%% of a copy\n", what, ms, 1e-9 * rate, 100 * rate / copy_rate);
}

static void bench_optimizer(const ParamTable* table) {
    int64_t n = table->count;
    const Shard shard = {0, 1, table->num_buckets, table->buckets};
    ParamChunks chunks = param_chunks_upload(table, &shard);
    AdamWTensors t = {device_array<bf16>(n),         device_array<float>(table->fp32_count),
                      random_array<float>(n, 1e-4f), random_array<float>(n, 0.02f),
                      random_array<float>(n, 1e-4f), device_array<float>(n)};
    double* partial = device_array<double>(chunks.count);
    StepStats* stats = device_array<StepStats>(1);
    AdamWParams params = {1e-3, 0.9, 0.95, 1e-8, 0.1, 0};
    auto nothing = [] {};
    size_t bytes = (size_t)n * sizeof(float);

    report("device-to-device copy", 8.0 * (double)n, nothing,
           [&] { CUDA_CHECK(cudaMemcpyAsync(t.v, t.m, bytes, cudaMemcpyDeviceToDevice, 0)); });
    CUDA_CHECK(cudaMemset(t.v, 0, bytes));
    CUDA_CHECK(cudaMemset(stats, 0, sizeof *stats));
    report("global norm, 4 bytes per parameter", 4.0 * (double)n, nothing, [&] {
        add_and_square(partial, t.grads, &chunks, NULL, 0);
        global_norm(stats, partial, chunks.count, 0);
        global_norm_finish(stats, 1, 0, true, 0);
    });
    report("AdamW, 34 bytes", 34.0 * (double)n, nothing, [&] {
        params.step++;
        adamw_update(&t, &chunks, stats, &params, 0);
    });
    report("copy of the weights, 6 bytes", 6.0 * (double)n, nothing, [&] { weights_copy(&t, &chunks, 0); });
    StepStats host;
    CUDA_CHECK(cudaMemcpy(&host, stats, sizeof host, cudaMemcpyDeviceToHost));
    if (!host.finite) die("the gradients are not finite: AdamW skipped the update that was timed");
    void* const arrays[] = {t.weights, t.weights_fp32, t.params, t.grads, t.m, t.v, partial, stats};
    for (void* p : arrays) CUDA_CHECK(cudaFree(p));
    param_chunks_free(&chunks);
}

static void bench_classifier(int64_t rows, int64_t V) {
    int64_t stride = ceil_div<int64_t>(V, 64) * 64;
    bf16* logits = device_array<bf16>(rows * stride);
    float* losses = device_array<float>(rows);
    int32_t* targets = device_array<int32_t>(rows);
    LogitShape shape = {rows, V, stride};
    CUDA_CHECK(cudaMemset(targets, 0, (size_t)rows * sizeof(int32_t)));
    for (int train = 1; train >= 0; train--) {
        char what[96];
        snprintf(what, sizeof what, "classifier %lld x %lld, %s", (long long)rows, (long long)V,
                 train ? "training, 4 bytes" : "evaluation, 2 bytes");
        report(
            what, (train ? 4.0 : 2.0) * (double)(rows * V),
            // the previous run overwrote the logits with their gradient
            [&] { fill(logits, rows * stride, 3.0f); },
            [&] { classifier(losses, logits, targets, &shape, 1e-6f, train, 0); });
    }
    void* const arrays[] = {logits, losses, targets};
    for (void* p : arrays) CUDA_CHECK(cudaFree(p));
}

int main(void) {
    Error err;
    Config config = config_defaults();
    Recipe recipe;
    if (!config_preset(&config, &recipe, "fox-pro-760m", &err)) die("%s", err.msg);
    ParamTable table = params_build(&config);
    Device device = device_open(0);
    printf("%s, %lld parameters\n", device.name, (long long)table.count);
    bench_optimizer(&table);
    bench_classifier(2048, 50257);
    bench_classifier(16384, 50257);
    bench_classifier(2048, 100277);
    bench_classifier(2048, 131072);
    bench_classifier(1024, 262144);
    bench_classifier(65536, 257);
    params_free(&table);
    return 0;
}
