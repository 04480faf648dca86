/*
A cache of one layer that test_extend.cu fills pass by pass, and its page table.
*/
#pragma once

#include <algorithm>
#include "../../../llmc/inference/cuda/cache.cuh"
#include "../gpu/buffers.cuh"

typedef enum { NO_GATE, GATE, GATE_BIAS_ONLY } Gate;

// cum_logf: the logit z + bias and its log gate in float, 2^-36 of rounding a token.
static const double CUM_LOGF_LIMIT = 1e-6;
static const double LOG_TOLERANCE = -10; // ln eps of forgotten pages

static const float EPS = 1e-5f;
static const double ROPE_BASE = 500000;

struct Model {
    int64_t NH, dh;
    Gate gate;
    bool pro, rope;     // pro: shifts and QK norm
    double bias;        // mean of the forget gate's; it grows by 4 from head to head
    int64_t window = 0; // as in HeadShape
    int64_t d() const { return NH * dh; }
    int64_t gate_column() const { return 3 * d(); }
    int64_t columns() const { return 3 * d() + 3 * NH; }
    int64_t row_stride() const { return ceil_div<int64_t>(columns(), 8) * 8; }
    const char* name() const {
        static char text[120];
        snprintf(text, sizeof text, "NH %lld, dh %lld, gate %d, bias %g, W %lld%s%s", (long long)NH,
                 (long long)dh, gate, bias, (long long)window, pro ? ", pro" : "", rope ? ", rope" : "");
        return text;
    }
};

static int64_t sum(const vector<int64_t>& x) {
    int64_t total = 0;
    for (int64_t i : x) total += i;
    return total;
}
static int64_t largest(const vector<int64_t>& x) { return *std::max_element(x.begin(), x.end()); }

// ----------------------------------------------------------------------------
// one cache and its page table, with pages in random order

struct Cache {
    const Model& m;
    DeviceCache c;
    CacheSizes sizes;
    int64_t heads, width;
    vector<int32_t> free_pages, table;
    vector<int64_t> lengths;
    Drawn<bf16> q_weight, k_weight;
    Drawn<float> bias;

    Cache(const Model& model, int64_t slots, int64_t capacity, int64_t rows, bool drops,
          uint64_t weights_seed)
        : m(model), heads(model.NH), width(ceil_div<int64_t>(capacity, PAGE_TOKENS)),
          table((size_t)(slots * heads * width), -1), lengths((size_t)slots),
          q_weight(weights(model.d(), 0.1, 1, weights_seed)),
          k_weight(weights(model.d(), 0.1, 1, weights_seed + 1)), bias(biases(model)) {
        sizes = {slots, capacity, slots * heads * width, rows, slots, drops};
        CacheModel sizes_of = {
            1, m.NH, m.dh, m.gate != NO_GATE, m.pro, m.pro, m.rope ? 1.0 : 0.0, LOG_TOLERANCE, m.window};
        CHECK(device_cache_new(&c, &sizes_of, &sizes), "%s: no memory", test_case);
        if (m.pro) pages_limits(&c.pages, 0, q_weight, k_weight, m.dh, m.rope, 0);
        CUDA_CHECK(cudaMemset(c.pages.k, 0xFF, (size_t)(sizes.pages * PAGE_TOKENS * m.dh) * sizeof(bf16)));
        CUDA_CHECK(cudaMemset(c.pages.v, 0xFF, (size_t)(sizes.pages * PAGE_TOKENS * m.dh) * sizeof(bf16)));
        for (bf16* x : {c.space.keys.k, c.space.keys.v}) // what is not gathered is not read
            CUDA_CHECK(cudaMemset(x, 0xFF, (size_t)(capacity * m.d()) * sizeof(bf16)));
        if (c.pages.cum_logf) {
            size_t pages = (size_t)sizes.pages;
            CUDA_CHECK(cudaMemset(c.pages.cum_logf, 0xFF, pages * PAGE_TOKENS * sizeof(double)));
            if (c.pages.page_logsum)
                CUDA_CHECK(cudaMemset(c.pages.page_logsum, 0xFF, pages * sizeof(double)));
        }
        for (int64_t i = 0; i < sizes.pages; i++) free_pages.push_back((int32_t)(i * 7919 % sizes.pages));
        std::sort(free_pages.begin(), free_pages.end());
        for (size_t i = free_pages.size(); i > 1; i--)
            std::swap(free_pages[i - 1], free_pages[(size_t)(random_u64(3, 0, i) % i)]);
    }
    Cache(const Cache&) = delete;
    ~Cache() { device_cache_free(&c); }

    static vector<bf16> weights(int64_t n, double scale, double mean, uint64_t own_seed) {
        vector<bf16> x((size_t)n);
        for (int64_t i = 0; i < n; i++)
            x[(size_t)i] = rounded<bf16>(mean + scale * random_normal(1, own_seed, (uint64_t)i));
        return x;
    }
    static vector<float> biases(const Model& m) {
        vector<float> x;
        for (int64_t h = 0; h < m.NH; h++) x.push_back((float)(m.bias + 4.0 * (double)h));
        return x;
    }
    int32_t& entry(int64_t slot, int64_t h, int64_t column) {
        return table[(size_t)((slot * heads + h) * width + column)];
    }
    void allocate(int64_t slot, int64_t end) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t column = ceil_div<int64_t>(lengths[(size_t)slot], PAGE_TOKENS);
                 column < ceil_div<int64_t>(end, PAGE_TOKENS); column++) {
                entry(slot, h, column) = free_pages.back();
                free_pages.pop_back();
            }
    }

    // Extends slots[i] by t[i] rows of proj and computes y [rows, d], without output norm and gate.
    vector<bf16> pass(const vector<int32_t>& slots, const vector<int64_t>& t, const Buffer<bf16>& proj,
                      bool attention = true) {
        vector<int64_t> begins = {0}, held;
        for (size_t i = 0; i < slots.size(); i++) {
            begins.push_back(begins.back() + t[i]);
            held.push_back(lengths[(size_t)slots[i]]);
            allocate(slots[i], held.back() + t[i]);
        }
        vector<int32_t> tokens((size_t)begins.back());
        Extension e = {begins.back(), (int64_t)slots.size(),
                       tokens.data(), slots.data(),
                       begins.data(), held.data(),
                       table.data(),  0,
                       NULL,          NULL,
                       NULL,          1};
        device_cache_fill(&c, &e, 0);
        device_cache_copy(&c, 0);
        extend_plan(&c.work, &c.pages, &c.pass, 0);
        if (m.rope) pages_angles(c.angles, &c.pass, m.dh, rotation_plain(ROPE_BASE), 0);
        KvAppend a = append_args(proj);
        kv_append(&c.pages, &a, &c.pass, 0);
        ExtendLayer layer = device_cache_layer(&c, 0);
        Buffer<bf16> y((size_t)(begins.back() * m.d()));
        ExtendOutput out = {y, c.o, {}, 0};
        decode_attention(&out, &a, &layer, 0);
        if (attention) {
            device_cache_prefill(&c, &layer, a.paths[0].weight, a.paths[1].weight, m.dh, 0);
            extend_attention(&out, c.q, m.gate == NO_GATE ? NULL : c.cum_logf, &layer, 0);
        }
        CUDA_CHECK(cudaDeviceSynchronize());
        for (size_t i = 0; i < slots.size(); i++) lengths[(size_t)slots[i]] += t[i];
        return y.host();
    }
    KvAppend append_args(const Buffer<bf16>& proj) const {
        KvAppend a = {};
        for (int i = 0; i < 3; i++) {
            a.paths[i].column = i * m.d();
            a.paths[i].shift = m.pro && i ? m.gate_column() + i * m.NH : -1;
            if (m.pro && i < 2) a.paths[i].weight = i ? k_weight.p : q_weight.p;
            a.paths[i].rope = m.rope && i < 2;
            a.paths[i].eps = EPS;
        }
        a.paths[0].out = c.q;
        a.proj = proj, a.angles = c.angles, a.bias = bias, a.cum_logf = c.cum_logf;
        a.gate = m.gate == GATE ? proj.p + m.gate_column() : NULL;
        a.row_stride = (int)m.row_stride(), a.weight_stride = (int)m.dh;
        return a;
    }

    // Tokens [0, length) of a slot's head from its pages, [length, dh]
    vector<double> tokens_of(const vector<bf16>& pool, int64_t slot, int64_t h) {
        vector<double> x((size_t)(lengths[(size_t)slot] * m.dh));
        for (int64_t j = 0; j < lengths[(size_t)slot]; j++)
            for (int64_t i = 0; i < m.dh; i++) {
                int64_t token = j % PAGE_TOKENS, at = entry(slot, h, j / PAGE_TOKENS) * PAGE_TOKENS + token;
                x[(size_t)(j * m.dh + i)] =
                    value(pool[(size_t)(at * m.dh + ((i / 8) ^ (token & 7)) * 8 + i % 8)]);
            }
        return x;
    }
};

// The pools after a pass, and its q and y, on the host
struct Pools {
    vector<bf16> k, v, q, y;
    vector<double> cum_logf;
    explicit Pools(const Cache& cache, const vector<bf16>& of_pass = {}) : q(of_pass.size()), y(of_pass) {
        CUDA_CHECK(cudaMemcpy(q.data(), cache.c.q, q.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
        int64_t tokens = cache.sizes.pages * PAGE_TOKENS;
        k.resize((size_t)(tokens * cache.m.dh)), v.resize(k.size());
        CUDA_CHECK(cudaMemcpy(k.data(), cache.c.pages.k, k.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(v.data(), cache.c.pages.v, v.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
        if (!cache.c.pages.cum_logf) return;
        cum_logf.resize((size_t)tokens);
        CUDA_CHECK(cudaMemcpy(cum_logf.data(), cache.c.pages.cum_logf, cum_logf.size() * sizeof(double),
                              cudaMemcpyDeviceToHost));
    }
};
