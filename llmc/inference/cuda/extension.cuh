/*
Extension on the GPU (llmc/model/extension.h): one pass, or several steps of one, over rows of sequences
in a cache,

    x = E[tokens];   every layer: x = extend(x) of its mixer,  x += mlp(norm(x));   scores of lm_head(norm(x))

A row's logits are those of the model's forward pass for the same tokens, but for rounding and what is
forgotten. The model is seen through a Layer and Mixers, one of each kind.

    cache_allocate  an empty cache
    cache_extend    a pass

Called by train_fox.cu.
*/
#pragma once

#include <algorithm>
#include "../../layers/embedding.cuh"
#include "layers.cuh"

// ----------------------------------------------------------------------------
// the cache

// The states of a cache's slots, and scratch, and the layers of each mixer.
static inline void cache_states(Activations states[NUM_MIXERS], int64_t layers[NUM_MIXERS], const Config* c,
                                const ParamTable* params, const Mixer* const* mixers,
                                const CacheSizes* sizes) {
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        Layer layer = {};
        layer.table = params;
        layer_move(&layer, l);
        layer.B = 1;
        layer.T = sizes->rows;
        layer.cache = sizes;
        const MixerKind kind = layer.config->mixer;
        if (layers[kind]++ > 0 || !mixers[kind]->recurrent) continue;
        mixers[kind]->activations(&states[kind], &layer, FORWARD_ONLY);
        activations_of_slots(&states[kind], sizes->slots);
    }
}

// Dies where the kernels of inference lack the model's head size: cuDNN trains others, too.
static inline void cache_check_model(const CacheModel* model) {
    if (model->layers && model->dh != 64 && model->dh != 128)
        die("generation on the GPU has kernels for head sizes 64 and 128, not %lld", (long long)model->dh);
}

// Bytes of a cache on the device. Dies as cache_check_model.
static inline int64_t cache_bytes(const Config* c, const ParamTable* params, const Mixer* const* mixers,
                                  const CacheSizes* sizes) {
    CacheModel model = attention_cache_model(c);
    cache_check_model(&model);
    Activations table = extend_activations(c, params, sizes), states[NUM_MIXERS] = {};
    int64_t layers[NUM_MIXERS] = {};
    cache_states(states, layers, c, params, mixers, sizes);
    int64_t bytes =
        device_cache_bytes(&model, sizes) + activations_bytes(&table, 1) + (int64_t)MATMUL_WORKSPACE;
    for (int m = 0; m < NUM_MIXERS; m++) bytes += activations_bytes(&states[m], layers[m]);
    return bytes;
}

// Bytes of a page: of one head of keys, PAGE_TOKENS tokens.
static inline int64_t page_bytes(const Config* c) {
    int64_t gate = config_has_gate(c) * c->num_heads / config_key_heads(c), dh = config_head_size(c);
    return PAGE_TOKENS * (2 * dh * (int64_t)sizeof(bf16) + gate * (int64_t)sizeof(double)) +
           c->qk_norm * gate * (int64_t)sizeof(double);
}

// Allocates a table of a cache; false where there is too little memory.
static inline bool cache_allocate_table(Activations* table, int64_t layers) {
    bool all = true;
    activations_allocate(table, layers, device_bytes_if_any);
    for (int i = 0; i < table->count; i++) all = all && (table->rows[i].data || !table->rows[i].bytes);
    return all;
}

static inline void cache_free(Cache* cache) {
    for (int i = 0; i < cache->table.count; i++) device_free(cache->table.rows[i].data);
    for (Activations& states : cache->states)
        for (int i = 0; i < states.count; i++) device_free(states.rows[i].data);
    for (int64_t n = 0; cache->graphs && n < cache_graphs(&cache->device.sizes); n++)
        if (cache->graphs[n]) CUDA_CHECK(cudaGraphExecDestroy(cache->graphs[n]));
    if (cache->matmul.workspace) matmul_free(&cache->matmul);
    CUDA_CHECK(cudaFreeHost(cache->scores));
    device_cache_free(&cache->device);
    free(cache->graphs);
    free(cache->warm);
    free(cache);
}

// A layer of the cache's pass, of so many rows.
static inline Layer cache_layer(const Cache* cache, int64_t l, int64_t rows) {
    Layer layer = cache->layer;
    layer_move(&layer, l);
    layer.mixer = &cache->states[layer.config->mixer];
    layer.T = rows;
    return layer;
}

// An empty cache for a model without gradients, whose layer 0 is `layer`. NULL where the device has no memory
// for it.
static inline Cache* cache_allocate(const Config* c, const Layer* layer, const Mixer* const* mixers,
                                    const CacheSizes* sizes) {
    CacheModel model = attention_cache_model(c);
    cache_check_model(&model);
    Cache* cache = (Cache*)xcalloc(1, sizeof *cache);
    bool all = device_cache_new(&cache->device, &model, sizes);
    if (all) {
        cache->table = extend_activations(c, layer->table, sizes);
        cache_states(cache->states, cache->layers, c, layer->table, mixers, sizes);
        all = cache_allocate_table(&cache->table, 1);
        for (int m = 0; m < NUM_MIXERS; m++)
            all = all && cache_allocate_table(&cache->states[m], cache->layers[m]);
    }
    if (!all) cache_free(cache);
    if (!all) return NULL;
    cache->acts = extend_acts(&cache->table);
    matmul_init(&cache->matmul, !layer->deterministic, layer->stream);
    cache->config = c;
    cache->layer = *layer;
    cache->mixers = mixers;
    cache->layer.B = 1;
    cache->layer.cache = &cache->device.sizes;
    cache->layer.mlp = NULL;
    cache->layer.matmul = &cache->matmul;
    size_t scores = (size_t)(sizes->outputs + sizes->slots * EXTEND_STEPS),
           graphs = (size_t)cache_graphs(sizes);
    CUDA_CHECK(cudaMallocHost(&cache->scores, scores * sizeof(RowScore)));
    cache->graphs = (cudaGraphExec_t*)xcalloc(graphs, sizeof(cudaGraphExec_t));
    cache->warm = (bool*)xcalloc(graphs, sizeof(bool));
    int32_t windows[LAYERS_MOST];
    attention_windows(c, windows);
    if (model.own_windows) device_cache_windows(&cache->device, windows);
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        Layer of_cache = cache_layer(cache, l, 1);
        if (of_cache.config->mixer == MIXER_ATTENTION) attention_cache_init(&of_cache, &cache->device);
    }
    return cache;
}

// ----------------------------------------------------------------------------
// a pass

// Queues lm_head, scores and draws of outputs first .. first + count.
static inline void extend_outputs(Cache* cache, int64_t first, int64_t count) {
    const ExtendActs* a = &cache->acts;
    Layer layer = cache_layer(cache, 0, count);
    int64_t V = layer.config->vocab_size, d = layer.config->hidden_size, Vs = matmul_padded(V);
    MatvecInput normed = extend_normed(&layer, a, a->x_last + first * d, P_NORM);
    Linear lm_head = layer_linear(&layer, P_LM_HEAD);
    lm_head.N = lm_head.out_stride = Vs; // its padding rows are in memory, too
    LogitShape shape = {count, V, Vs};
    linear_rows(a->logits, &normed, NULL, &lm_head, layer.matmul);
    row_scores(&cache->device.scores, a->logits, first, &shape, layer.stream);
    if (cache->device.scores.outputs.draws)
        row_draws(&cache->device.scores.outputs, a->logits, first, &shape, layer.stream);
}

// Queues the layers of a filled pass; acts.x_last gets the rows with outputs.
static inline void extend_rows(Cache* cache, int64_t outputs) {
    const ExtendActs* a = &cache->acts;
    const int64_t rows = cache->device.pass.num_rows;
    Layer layer = cache_layer(cache, 0, rows);
    const int64_t L = layer.config->num_hidden_layers, d = layer.config->hidden_size;
    bf16 *x = a->x, *other = a->x_mid;
    if (cache->device.model.layers > 0) attention_begin_extend(&layer, cache);
    embedding_forward(x, cache->device.pass.tokens, layer_param(&layer, layer.weights, P_EMBEDDINGS), rows, d,
                      layer.stream);
    for (int64_t l = 0; l < L; l++) {
        layer = cache_layer(cache, l, rows);
        cache->mixers[layer.config->mixer]->extend(&layer, cache, other, x);
        std::swap(x, other);
        if (!layer_param(&layer, layer.weights, P_GATE_PROJ)) continue;
        mlp_extend(&layer, cache, other, x);
        std::swap(x, other);
    }
    embedding_forward(a->x_last, cache->device.output_rows, x, outputs, d, layer.stream);
}

// Queues one step of a filled pass: layers, and outputs in chunks. logits [outputs, V] as in cache_extend.
static inline void extend_step(Cache* cache, int64_t outputs, float* logits) {
    int64_t V = cache->layer.config->vocab_size, chunk = extend_logit_rows(cache->device.sizes.outputs);
    size_t row = (size_t)V * sizeof(float), row_stride = (size_t)matmul_padded(V) * sizeof(float);
    extend_rows(cache, outputs);
    for (int64_t i = 0; i < outputs; i += chunk) {
        int64_t count = std::min(chunk, outputs - i);
        extend_outputs(cache, i, count);
        if (logits)
            CUDA_CHECK(cudaMemcpy2DAsync(logits + i * V, row, cache->acts.logits, row_stride, row,
                                         (size_t)count, cudaMemcpyDeviceToHost, cache->layer.stream));
    }
}

// Extends sequences by the rows of a pass, in one or several steps, and waits for it: scores [steps,
// outputs], and unless that is NULL logits [outputs, V] of one step. A step that extends n sequences by one
// token each is one CUDA graph from its second time on.
static inline void cache_extend(Cache* cache, const Extension* e, RowScore* scores, float* logits) {
    DeviceCache* c = &cache->device;
    cudaStream_t stream = cache->layer.stream;
    bool decodes = extension_decodes(e) && e->outputs <= extend_logit_rows(c->sizes.outputs) &&
                   !cache->layer.sequential && !logits;
    size_t results = (size_t)(e->steps * e->outputs) * sizeof(RowScore);
    device_cache_fill(c, e, stream);
    device_cache_copy(c, stream);
    int64_t graph = cache_graph(cache);
    for (int64_t step = 0; step < e->steps; step++) {
        if (!decodes || !cache->warm[graph]) {
            extend_step(cache, e->outputs, logits);
            if (decodes) cache->warm[graph] = true;
            continue;
        }
        if (!cache->graphs[graph]) {
            cudaGraph_t calls;
            CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            extend_step(cache, e->outputs, NULL);
            CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
            CUDA_CHECK(cudaGraphInstantiate(&cache->graphs[graph], calls, 0));
            CUDA_CHECK(cudaGraphDestroy(calls));
        }
        CUDA_CHECK(cudaGraphLaunch(cache->graphs[graph], stream));
    }
    CUDA_CHECK(
        cudaMemcpyAsync(cache->scores, c->scores.outputs.scores, results, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    memcpy(scores, cache->scores, results);
}

// ----------------------------------------------------------------------------
// what the engine asks of a cache (llmc/run/trainer.h)

// Slot `to` gets what slot `from` has besides pages: of a recurrent mixer all.
static inline void cache_fork(Cache* cache, int64_t from, int64_t to) {
    const Layer* layer = &cache->layer;
    device_cache_fork(&cache->device, from, to, layer->stream);
    for (int m = 0; m < NUM_MIXERS; m++)
        for (int i = 0; i < cache->states[m].count; i++) {
            const auto* row = &cache->states[m].rows[i];
            size_t all = (size_t)row->bytes, slot = all / (size_t)cache->device.sizes.slots;
            char* data = (char*)row->data;
            if (row->of_slots)
                CUDA_CHECK(cudaMemcpy2DAsync(data + (size_t)to * slot, all, data + (size_t)from * slot, all,
                                             slot, (size_t)cache->layers[m], cudaMemcpyDeviceToDevice,
                                             layer->stream));
        }
}

static inline void cache_copy_page(Cache* cache, int32_t from, int32_t to) {
    device_cache_copy_page(&cache->device, from, to, cache->layer.stream);
}

// first [slots, heads]: pages at the beginning of each head that no later row needs.
static inline void cache_forgotten(Cache* cache, int32_t* first) {
    device_cache_forgotten(&cache->device, first, cache->layer.stream);
}
