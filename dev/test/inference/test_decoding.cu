/*
The GPU trainer's passes over a cache against its forward pass, from 1 to 65,536 tokens: a prompt in chunks
that are multiples of nothing, then decoding token by token beside a second sequence, as a CUDA graph, with
what the gates forget dropped.

The error of logits is ||extended - forward|| / ||forward||: both are the same function in bf16, rounded in
another order.

    test_decoding [T | quick]     all lengths, or one; quick: up to 63, for compute-sanitizer
*/
#include "../trainer/trainers.cuh"

#include <numeric>
#include <vector>
#include "../check.h"

// 7.6e-3 were measured on an H200, of fox-pro with RoPE at 1,000 tokens.
#define LOGITS_LIMIT 9e-3

typedef std::vector<float> Floats;

static double worst;
static char worst_where[160];

enum { DECODED = 41, BESIDE = 63 }; // tokens at the end that are decoded; prompt of the second sequence
enum { REUSED = 70 }; // tokens of a sequence that is decoded in a used slot, from its first one on

// ----------------------------------------------------------------------------
// the forward pass

static Model model_of(const cpu::Model& start, int64_t T) {
    Model model = model_new(&start.config, false, true, 0, 1);
    model_allocate_weights(&model, false);
    Floats params(start.params, start.params + start.table.count);
    model_upload(&model, params.data(), NULL, NULL);
    model_allocate_activations(&model, 1, T, FORWARD_ONLY);
    return model;
}

// Logits [T, V] of tokens [T].
static Floats forward_logits(Model* model, const int32_t* tokens) {
    Floats logits((size_t)(model->T * model->config.vocab_size));
    size_t bytes = (size_t)model->T * sizeof *tokens;
    model_begin_step(model);
    CUDA_CHECK(cudaMemcpy(model->acts.inputs, tokens, bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(model->acts.targets, tokens, bytes, cudaMemcpyHostToDevice));
    model_forward(model);
    model_loss(model, 0, false, logits.data());
    CUDA_CHECK(cudaStreamSynchronize(model->stream));
    return logits;
}

// ----------------------------------------------------------------------------
// passes over a cache

// Two sequences of the same tokens, and the logits of rows of theirs.
struct Decoder {
    Model* model;
    const int32_t* tokens;
    CacheSizes sizes;
    Cache* cache;
    PageTable pages;
    std::vector<int64_t> lengths = {0, 0};
    Floats got, want;

    Decoder(Model* of, const int32_t* text, int64_t T, bool drops) : model(of), tokens(text) {
        int64_t heads = engine_heads(&model->config), rows = std::min<int64_t>(T, 4001) + 1;
        sizes = {2, T, 0, rows, 16, drops};
        sizes.pages = 2 * heads * cache_table_width(&sizes);
        cache = cache_new(model, &sizes);
        CHECK(cache, "a cache of %lld tokens", (long long)T);
        pages = page_table_new(&sizes, heads);
    }
    ~Decoder() {
        cache_free(cache);
        page_table_free(&pages);
    }

    // Extends sequence s by counts[s] tokens, 0: not at all. The last up to 8 rows of each have logits, which
    // are kept beside those of `expected`.
    void pass(const int64_t (&counts)[2], const Floats& expected) {
        int64_t V = model->config.vocab_size;
        std::vector<int32_t> rows, slots, copies((size_t)(2 * pages.heads)), targets;
        std::vector<int64_t> begins = {0}, held, outputs, positions;
        for (int s = 0; s < 2; s++) {
            if (counts[s] == 0) continue;
            int64_t length = lengths[(size_t)s];
            page_table_append(&pages, s, length, counts[s], copies.data());
            rows.insert(rows.end(), tokens + length, tokens + length + counts[s]);
            slots.push_back(s), held.push_back(length), begins.push_back((int64_t)rows.size());
            for (int64_t i = std::max<int64_t>(0, counts[s] - 8); i < counts[s]; i++)
                outputs.push_back(begins.back() - counts[s] + i), positions.push_back(length + i);
            lengths[(size_t)s] += counts[s];
        }
        targets.resize(outputs.size(), -1);
        std::vector<RowScore> scores(outputs.size());
        Floats logits(outputs.size() * (size_t)V);
        Extension e = {(int64_t)rows.size(), (int64_t)slots.size(), rows.data(), slots.data(),
                       begins.data(),        held.data(),           pages.table, (int64_t)outputs.size(),
                       outputs.data(),       targets.data(),        NULL,        1};
        // Read afterwards: a pass that downloads its logits is no graph.
        cache_extend(cache, &e, scores.data(), NULL);
        size_t row = (size_t)V * sizeof(float), row_stride = (size_t)matmul_padded(V) * sizeof(float);
        CUDA_CHECK(cudaMemcpy2DAsync(logits.data(), row, cache->acts.logits, row_stride, row,
                                     (size_t)e.outputs, cudaMemcpyDeviceToHost, model->stream));
        CUDA_CHECK(cudaStreamSynchronize(model->stream));
        got.insert(got.end(), logits.begin(), logits.end());
        for (int64_t position : positions)
            want.insert(want.end(), expected.begin() + position * V, expected.begin() + (position + 1) * V);
        forget();
    }
    // The first sequence's prompt in chunks; the second one joins in the third pass.
    void read(int64_t prompt, const Floats& expected) {
        static const int64_t chunks[] = {4001, 37, 300, 1};
        for (int i = 0; lengths[0] < prompt; i++)
            pass({std::min(chunks[i % 4], prompt - lengths[0]),
                  i == 2 ? std::min<int64_t>(prompt, BESIDE) : 0},
                 expected);
    }
    // As the engine does between passes
    void forget() {
        std::vector<int32_t> first((size_t)(2 * pages.heads));
        if (!sizes.drops) return;
        cache_forgotten(cache, first.data());
        for (int s = 0; s < 2; s++)
            if (lengths[(size_t)s] > 0) page_table_forget(&pages, s, &first[(size_t)(s * pages.heads)]);
    }
    // Ends both sequences: their slots may be used again.
    void end() {
        for (int s = 0; s < 2; s++) page_table_release(&pages, s, lengths[(size_t)s]);
        lengths = {0, 0}, got.clear(), want.clear();
    }
    bool is_graph() const { return cache->graphs[cache_graph(cache)] != NULL; } // the last pass
    double error() const {
        double squares = 0, norm = 0;
        for (size_t i = 0; i < got.size(); i++)
            squares += pow((double)got[i] - (double)want[i], 2), norm += pow((double)want[i], 2);
        return sqrt(squares / norm);
    }
};

// The first sequence's tokens behind the prompt again, in steps of its own: the bits of `both`, which has
// decoded them beside the second sequence.
static void check_alone(const Decoder* both, int64_t T, int64_t prompt, const Floats& expected,
                        const char* where) {
    size_t V = (size_t)both->model->config.vocab_size, steps = (size_t)(T - prompt), different = 0;
    Decoder alone(both->model, both->tokens, T, both->sizes.drops);
    alone.read(prompt, expected);
    while (alone.lengths[0] < T) alone.pass({1, 0}, expected);
    for (size_t i = 1; i <= steps; i++) {
        const float *a = &alone.got[alone.got.size() - i * V], *b = &both->got[both->got.size() - 2 * i * V];
        different += memcmp(a, b, V * sizeof *a) != 0;
    }
    CHECK(different == 0, "%s: %zu of %zu tokens decoded alone have other logits", where, different, steps);
    CHECK(T <= 4 || both->model->sequential || alone.is_graph(), "%s: decoding alone is not a graph", where);
}

// Sequences without a prompt in the slots of longer ones, which have ended: alone, and then two together. The
// bits of slots that were never used.
static void check_reused(Decoder* used, int64_t T, const Floats& expected, const char* where) {
    Decoder fresh(used->model, used->tokens, T, used->sizes.drops);
    used->end();
    for (int64_t n = 0; n < std::min<int64_t>(T, REUSED); n++)
        for (Decoder* d : {used, &fresh}) d->pass({1, n >= REUSED / 2}, expected);
    CHECK(memcmp(used->got.data(), fresh.got.data(), fresh.got.size() * sizeof(float)) == 0,
          "%s: other logits in a slot that was used before", where);
}

// dropped: the least share of pages that are given back.
static void check_decoding(const char* spec, int64_t T, bool drops, double dropped) {
    cpu::Model start = cpu::variant_model(spec, 1, 1);
    int32_t* tokens = cpu::random_tokens(&start, T, 0);
    Model model = model_of(start, T);
    Floats expected = forward_logits(&model, tokens);
    Decoder d(&model, tokens, T, drops);
    int64_t prompt = T > DECODED ? T - DECODED : 0;
    d.read(prompt, expected);
    while (d.lengths[0] < T) d.pass({1, 1}, expected);
    char where[160];
    snprintf(where, sizeof where, "%s, %lld tokens%s", spec, (long long)T, drops ? ", dropping" : "");
    check_alone(&d, T, prompt, expected, where);
    double error = d.error(), share = (double)d.pages.forgotten / (double)d.pages.most_held;
    CHECK(error <= LOGITS_LIMIT, "%s: logits are off by %.2e", where, error);
    CHECK(T <= 4 || model.sequential || d.is_graph(), "%s: decoding is not a graph", where);
    CHECK((T < 1000 || share >= dropped) && (dropped > 0 || share == 0), "%s: %.2f of the pages dropped",
          where, share);
    if (error > worst) {
        worst = error;
        snprintf(worst_where, sizeof worst_where, "%s", where);
    }
    printf("%s: error %.2e, %lld pages dropped, at most %lld held\n", where, error,
           (long long)d.pages.forgotten, (long long)d.pages.most_held);
    check_reused(&d, T, expected, where);
    free(tokens);
    model_free(&model);
    cpu::model_free(&start);
}

// ----------------------------------------------------------------------------
// what --maps reads of the layers

typedef struct {
    int64_t T, d, NH, KVH;
    bool doubles;
    std::vector<double> values, limits; // q, k and cum_logf of all layers
    std::vector<double> largest;        // |q k| / sqrt(dh) of all heads
} Visited;

static void keep_layer(void* context, int64_t, const LayerHeads* layer) {
    Visited* v = (Visited*)context;
    const int64_t kd = v->d / v->NH * v->KVH;
    for (const void* x : {layer->q, layer->k})
        for (int64_t i = 0; i < v->T * (x == layer->q ? v->d : kd); i++)
            v->values.push_back(v->doubles ? ((const double*)x)[i] : (double)((const float*)x)[i]);
    if (layer->cum_logf) v->values.insert(v->values.end(), layer->cum_logf, layer->cum_logf + v->NH * v->T);
    v->limits.insert(v->limits.end(), layer->limits, layer->limits + v->NH);
    const int64_t dh = v->d / v->NH;
    for (int64_t h = 0; h < v->NH && v->doubles; h++) {
        double most = 0;
        for (int64_t i = 0; i < v->T * v->T; i++) {
            const double *q = (const double*)layer->q + i / v->T * v->d + h * dh,
                         *k = (const double*)layer->k + i % v->T * kd + h * v->KVH / v->NH * dh;
            most = fmax(most, fabs(std::inner_product(q, q + dh, k, 0.0)));
        }
        v->largest.push_back(most / sqrt((double)dh));
    }
}

// The CPU trainer's, in double, and the GPU's.
static void check_visit(const char* spec, int64_t T) {
    cpu::Model start = cpu::variant_model(spec, 1, T);
    for (int64_t i = 0; i < start.table.count; i++)
        start.params[i] = (double)__bfloat162float(__float2bfloat16((float)start.params[i]));
    int32_t* tokens = cpu::random_tokens(&start, T, 0);
    Model model = model_of(start, T);
    const Config* c = &start.config;
    Visited want = {T, c->hidden_size, c->num_heads, config_key_heads(c), true, {}, {}, {}}, got = want;
    got.doubles = false;
    cpu::visit_heads(&start, tokens, keep_layer, &want);
    visit_heads(&model, tokens, keep_layer, &got);
    double squares = 0, norm = 0;
    for (size_t i = 0; i < want.values.size(); i++)
        squares += pow(got.values[i] - want.values[i], 2), norm += pow(want.values[i], 2);
    CHECK(got.values.size() == want.values.size() && squares <= 4e-4 * norm, "%s: heads are off by %.2e",
          spec, sqrt(squares / norm));
    for (size_t i = 0; i < want.limits.size();
         i++) // the GPU's allows for rounding, and knows the norms of q and k
        CHECK(isnan(want.limits[i]) ||
                  (got.limits[i] >= want.largest[i] && got.limits[i] <= 1.01 * want.limits[i]),
              "%s: the limit of head %zu is %g, not %g to %g", spec, i, got.limits[i], want.largest[i],
              want.limits[i]);
    free(tokens);
    model_free(&model);
    cpu::model_free(&start);
}

// A pass without gradients has scratch for its own kernels alone: bounds of 8192 blocks of 24 heads, 3 MB,
// and not the backward pass's float sums of dq, 6.4 GB.
static void check_scratch(void) {
    Config c;
    Recipe recipe;
    Error err;
    if (!config_preset(&c, &recipe, "fox-pro-760m", &err)) die("%s", err.msg);
    Model model = model_new(&c, false, true, 0, 1);
    const size_t bytes = model_scratch_bytes(&model, 1, 1 << 20, FORWARD_ONLY);
    CHECK(bytes <= 4 << 20, "%zu bytes", bytes);
    params_free(&model.table);
}

int main(int argc, char** argv) {
    static const int64_t lengths[] = {1, 63, 1000, 4097, DECODE_UNEVEN_TOKENS + 13, 16385, 65536};
    bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    device_open(0);
    check_scratch();
    for (int64_t T : lengths) {
        if (argc > 1 && (quick ? T > 63 : atoll(argv[1]) != T)) continue;
        check_decoding("fox-pro hidden_size=128 intermediate_size=72", T, true, 0.2);
        check_decoding("fox-pro hidden_size=256 intermediate_size=72", T, false, 0);
        check_decoding("fox-pro hidden_size=128 intermediate_size=72 use_rope=true", T, true, 0.2);
        check_decoding("fox-llama hidden_size=128 intermediate_size=72", T, true, 0);
        check_decoding("fox-llama hidden_size=256 intermediate_size=72", T, true, 0);
        check_decoding("transformer-llama hidden_size=128 intermediate_size=72", T, true, 0);
        check_decoding("transformer-pro hidden_size=256 intermediate_size=72", T, true, 0);
        // a page goes when the last of its four heads has forgotten it
        check_decoding("fox-pro hidden_size=512 num_heads=8 num_kv_heads=2 intermediate_size=72", T, true,
                       0.1);
        check_decoding("fox-llama hidden_size=384 num_heads=3 num_kv_heads=1 intermediate_size=72", T, true,
                       0);
    }
    if (argc < 2 || atoll(argv[1]) == 1000) // a block has two splits of a head
        check_decoding("fox-pro hidden_size=1152 num_heads=18 intermediate_size=72", 1000, true, 0.1);
    check_visit("fox-pro hidden_size=128 intermediate_size=72", 300);
    check_visit("transformer-llama hidden_size=256 intermediate_size=72", 129);
    check_visit("fox-pro hidden_size=256 num_heads=4 num_kv_heads=2 intermediate_size=72", 300);
    check_visit("fox-pro layer_types=deltanet,attention:window=20 hidden_size=256 intermediate_size=72", 300);
    printf("worst error of logits: %.2e, limit %.2e: %s\n", worst, LOGITS_LIMIT, worst_where);
    return test_report();
}
