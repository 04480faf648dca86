/*
Benchmarks a step of decoding (llmc/inference/cuda/layers.cuh) with random weights: n sequences behind T
cached tokens. Every head remembers all of them, or one head in four does and the others remember the last
1,024. Beside it stands what reading the weights and the remembered tokens would take at the bandwidth of a
device-to-device copy in the same run. Times are medians of CUDA graphs of one step.

    bench_decode [MODEL [n T ONE_IN [KVH]]]     all cases, or one, in which one head in ONE_IN remembers all, and
                                                the model has KVH heads of keys
*/
#include "../../llmc/cuda/device.cuh"
#include "../../llmc/layers/embedding.cuh"
#include "../../llmc/inference/cuda/layers.cuh"
#include "../../llmc/baselines/mixers.h"
#include "../../llmc/config/config_check.h"
#include "../../llmc/config/presets.h"
#include "bench.cuh"

static cudaStream_t stream;
static double copy_rate; // bytes per second, read and written

enum { REMEMBERED = 1024 }; // tokens of heads that forget

struct DecodeBench {
    Config config;
    ParamTable table;
    Matmul matmul;
    Cache cache;
    bf16* weights;
    float* weights_fp32;
    int64_t n, T, one_in, held; // one head in so many remembers all; tokens that all heads remember

    DecodeBench(const char* preset, int64_t sequences, int64_t tokens, int64_t heads_to_one,
                int64_t num_kv_heads = 0)
        : matmul(), cache(), n(sequences), T(tokens), one_in(heads_to_one), held(0) {
        Error err;
        Recipe recipe;
        config = config_defaults();
        if (!config_preset(&config, &recipe, preset, &err)) die("%s", err.msg);
        config.num_kv_heads = num_kv_heads;
        if (!config_check(&config, "bench_decode", &err)) die("%s", err.msg);
        cache.config = &config;
        table = params_build(&config);
        int64_t padding = 64 * config.hidden_size; // rows that lm_head's GEMM reads behind it
        weights = random_array<bf16>(table.count + padding, 0.02f);
        weights_fp32 = random_array<float>(table.count, 1);
        matmul_init(&matmul, true, stream);
        CacheModel of = attention_cache_model(&config);
        int64_t width = ceil_div<int64_t>(T, PAGE_TOKENS), heads = of.layers * config_key_heads(&config);
        CacheSizes sizes = {n, T, n * heads * width, n, n, false};
        if (!device_cache_new(&cache.device, &of, &sizes)) die("no memory for the cache");
        cache.table = extend_activations(&config, &table, &sizes);
        activations_allocate(&cache.table, 1, device_bytes);
        cache.acts = extend_acts(&cache.table);
        const Pages* p = &cache.device.pages;
        fill(p->k, sizes.pages * PAGE_TOKENS * of.dh, 1.0f);
        fill(p->v, sizes.pages * PAGE_TOKENS * of.dh, 1.0f);
        if (of.gate)
            CUDA_CHECK(
                cudaMemset(p->cum_logf, 0, (size_t)(sizes.pages * p->group * PAGE_TOKENS) * sizeof(double)));
        for (int64_t l = 0; l < of.layers; l++) {
            Layer layer = layer_of(l);
            attention_cache_init(&layer, &cache.device);
        }
        std::vector<int32_t> pages((size_t)sizes.pages), row((size_t)n), slots;
        std::vector<int64_t> begins = {0}, lengths((size_t)n, T - 1), outputs;
        for (int64_t i = 0; i < sizes.pages; i++) pages[(size_t)i] = (int32_t)(i * 7919 % sizes.pages);
        if (sizes.pages % 7919 == 0) die("pages of the benchmark collide");
        for (int64_t i = 0; i < n; i++)
            slots.push_back((int32_t)i), outputs.push_back(i), begins.push_back(i + 1),
                cache.device.stale[i] = true;
        std::vector<int32_t> targets((size_t)n, -1);
        Extension e = {n,
                       n,
                       row.data(),
                       slots.data(),
                       begins.data(),
                       lengths.data(),
                       pages.data(),
                       n,
                       outputs.data(),
                       targets.data(),
                       NULL,
                       1};
        std::vector<int32_t> forgotten;
        int64_t most = std::max<int64_t>(0, width - REMEMBERED / PAGE_TOKENS);
        for (int64_t i = 0; i < n * heads; i++) {
            bool remembers = i * 7919 % 64 * one_in < 64; // scattered over layers and sequences
            forgotten.push_back(remembers ? 0 : (int32_t)most);
            held += (width - forgotten.back()) * PAGE_TOKENS;
        }
        CUDA_CHECK(cudaMemcpy(p->forgotten, forgotten.data(), forgotten.size() * sizeof(int32_t),
                              cudaMemcpyHostToDevice));
        device_cache_fill(&cache.device, &e, stream);
        device_cache_copy(&cache.device, stream);
        cache.device.pass.is_uneven = one_in > 1 && T > DECODE_UNEVEN_TOKENS; // as if the cache dropped pages
    }
    ~DecodeBench() {
        for (int i = 0; i < cache.table.count; i++) device_free(cache.table.rows[i].data);
        device_cache_free(&cache.device);
        matmul_free(&matmul);
        CUDA_CHECK(cudaFree(weights));
        CUDA_CHECK(cudaFree(weights_fp32));
        params_free(&table);
    }

    Layer layer_of(int64_t l) {
        Layer layer = {};
        layer.table = &table, layer.B = 1, layer.T = n;
        layer_move(&layer, l);
        layer.weights = weights, layer.weights_fp32 = weights_fp32;
        layer.matmul = &matmul, layer.stream = stream;
        return layer;
    }
    Linear lm_head() const {
        int64_t Vs = matmul_padded(config.vocab_size), d = config.hidden_size;
        return {weights + params_find(&table, P_LM_HEAD, 0)->offset, NULL, n, Vs, d, Vs, d};
    }

    void scores() {
        Scores of = cache.device.scores; // the step is repeated: rows do not move on
        of.outputs.advances = false;
        LogitShape shape = {n, config.vocab_size, matmul_padded(config.vocab_size)};
        row_scores(&of, cache.acts.logits, 0, &shape, stream);
    }
    // As in the trainer
    void step() {
        const ExtendActs* a = &cache.acts;
        Layer layer = layer_of(0);
        Linear head = lm_head();
        MatvecInput normed = extend_normed(&layer, a, a->x_last, P_NORM);
        attention_begin_extend(&layer, &cache);
        embedding_forward(a->x, cache.device.pass.tokens, layer_param(&layer, layer.weights, P_EMBEDDINGS), n,
                          config.hidden_size, stream);
        for (int64_t l = 0; l < config.num_hidden_layers; l++) {
            layer = layer_of(l);
            attention_mixer_extend(&layer, &cache, a->x_mid, a->x);
            mlp_extend(&layer, &cache, a->x, a->x_mid);
        }
        embedding_forward(a->x_last, cache.device.output_rows, a->x, n, config.hidden_size, stream);
        linear_rows(a->logits, &normed, NULL, &head, &matmul);
        scores();
    }

    // Microseconds of a graph of the step
    double time() {
        cudaGraph_t calls;
        cudaGraphExec_t graph;
        step();
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        step();
        CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
        CUDA_CHECK(cudaGraphInstantiate(&graph, calls, 0));
        double us = 1e3 / 8 *
                    milliseconds(
                        1, 30, [] {},
                        [&](int) {
                            for (int i = 0; i < 8; i++) CUDA_CHECK(cudaGraphLaunch(graph, stream));
                        })[0];
        CUDA_CHECK(cudaGraphExecDestroy(graph));
        CUDA_CHECK(cudaGraphDestroy(calls));
        return us;
    }

    void run(const char* preset) {
        const CacheModel& m = cache.device.model;
        double read = 2.0 * (double)(table.count - config.vocab_size * config.hidden_size) +
                      (double)held * (double)(4 * m.dh + (m.gate ? 8 * cache.device.pages.group : 0));
        double least = read / copy_rate * 1e6, us = time();
        printf("%s, %2lld x 1 token behind %5lld in 1 of %lld heads: %7.1f us, %.0f%% of the bandwidth\n",
               preset, (long long)n, (long long)T, (long long)one_in, us, 100 * least / us);
    }
};

int main(int argc, char** argv) {
    Device device = device_open(0);
    printf("%s, %d SMs\n", device.name, device.sms);
    CUDA_CHECK(cudaStreamCreate(&stream));
    copy_rate = bench_copy();
    const int64_t cases[][3] = {{1, 1024, 1},  {2, 1024, 1},  {4, 1024, 1},  {8, 1024, 1},
                                {1, 16384, 1}, {1, 65536, 1}, {4, 16384, 1}, {64, 1024, 1},
                                {1, 16384, 4}, {1, 65536, 4}, {8, 16384, 4}, {8, 65536, 4}};
    if (argc == 5 || argc == 6) {
        const int64_t KVH = argc == 6 ? atoll(argv[5]) : 0;
        DecodeBench(argv[1], atoll(argv[2]), atoll(argv[3]), atoll(argv[4]), KVH).run(argv[1]);
        return EXIT_SUCCESS;
    }
    for (const char* preset : {"fox-pro-125m", "fox-pro-760m"})
        for (const auto& size : cases)
            if (argc < 2 || strcmp(argv[1], preset) == 0)
                DecodeBench(preset, size[0], size[1], size[2]).run(preset);
    return EXIT_SUCCESS;
}
