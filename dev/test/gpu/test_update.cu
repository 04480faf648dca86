/*
What ends a step, against double on the CPU: the gradient norm, AdamW.

    test_update [quick] [SEED]     quick: no buffers of more than 2^31 elements, for compute-sanitizer
*/
#include <algorithm>
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/cuda/device.cuh"
#include "../../../llmc/layers/adamw.cuh"
#include "buffers.cuh"

static const double UPDATE_LIMIT = 3e-7; // an H100 showed 1.1e-7

// ----------------------------------------------------------------------------
// norm and update

// A table of tensors of these lengths: negative for a frozen one, even for a matrix. Offsets are multiples of
// align.
static ParamTable table_of(const vector<int64_t>& lengths, int64_t align = 1, int ranks = 1) {
    ParamTable t;
    memset(&t, 0, sizeof t);
    t.rows = (Param*)xcalloc(lengths.size(), sizeof(Param));
    t.buckets = (int64_t*)xcalloc(lengths.size() + 1, sizeof(int64_t));
    for (int64_t n : lengths) {
        Param* p = &t.rows[t.num_rows++];
        if (ranks > 1) params_begin_bucket(&t, PARAM_ALIGN * ranks);
        p->trainable = n > 0;
        p->count = n < 0 ? -n : n;
        p->decays = p->count % 2 == 0;
        p->offset = ceil_div(t.count, align) * align;
        t.count = p->offset + p->count;
        p->fp32 = p->count < 16 ? t.fp32_count : -1;
        if (p->fp32 >= 0) t.fp32_count += p->count;
    }
    if (ranks == 1) t.num_buckets = 1;
    params_begin_bucket(&t, ranks > 1 ? PARAM_ALIGN * ranks : 1);
    t.num_buckets--;
    return t;
}

// The chunks of a rank's parts of all buckets.
static vector<ParamChunk> chunks_of(const ParamTable* t, int rank = 0, int ranks = 1) {
    const Shard shard = {rank, ranks, t->num_buckets, t->buckets};
    vector<ParamChunk> chunks;
    for (int b = 0; b < t->num_buckets; b++) {
        vector<ParamChunk> more(param_chunks(NULL, t, &shard, b));
        CHECK(param_chunks(more.data(), t, &shard, b) == (int64_t)more.size(),
              "two counts of the chunks differ");
        chunks.insert(chunks.end(), more.begin(), more.end());
    }
    return chunks;
}

// Every element of every tensor is in one chunk of one rank, whose shard holds them without overlaps.
static void test_chunks(int ranks) {
    ParamTable t = table_of({5, 40000, -12, 1, 3, 16384, 100002, -7, 2}, 1, ranks);
    vector<int> seen(t.count);
    for (int rank = 0; rank < ranks; rank++) {
        const Shard shard = {rank, ranks, t.num_buckets, t.buckets};
        vector<int> local(shard_count(&shard));
        for (const ParamChunk& c : chunks_of(&t, rank, ranks)) {
            int r = 0;
            while (c.begin >= t.rows[r].offset + t.rows[r].count) r++;
            const Param* p = &t.rows[r];
            CHECK(c.count > 0 && c.count <= CHUNK_SIZE, "chunk at %d of %d", (int)c.begin, c.count);
            CHECK(c.begin >= p->offset && c.begin + c.count <= p->offset + p->count, "chunk of two tensors");
            CHECK(c.trainable == p->trainable && c.decays == p->decays, "flags of tensor %d", r);
            CHECK(c.fp32 == (p->fp32 < 0 ? -1 : p->fp32 + c.begin - p->offset), "fp32 copy of tensor %d", r);
            CHECK((c.local - c.begin) % 4 == 0 && (ranks > 1 || c.local == c.begin), "place in the shard");
            for (int i = 0; i < c.count; i++) seen[c.begin + i]++, local[c.local + i]++;
        }
        CHECK(*std::max_element(local.begin(), local.end()) == 1, "parts of a shard overlap");
        ParamChunks uploaded = param_chunks_upload(&t, &shard);
        vector<ParamChunk> host(uploaded.count);
        CUDA_CHECK(
            cudaMemcpy(host.data(), uploaded.chunks, host.size() * sizeof host[0], cudaMemcpyDeviceToHost));
        CHECK(same_bits(host, chunks_of(&t, rank, ranks)), "uploaded chunks differ");
        CHECK(uploaded.first[t.num_buckets] == uploaded.count, "chunks outside the buckets");
        param_chunks_free(&uploaded);
    }
    for (int r = 0; r < t.num_rows; r++)
        for (int64_t i = t.rows[r].offset; i < t.rows[r].offset + t.rows[r].count; i++)
            CHECK(seen[i] == 1, "element %d of tensor %d is in %d chunks", (int)i, r, seen[i]);
    params_free(&t);
}

// All buffers of an optimizer, its stats and scratch.
struct Optimizer {
    ParamTable table;
    vector<ParamChunk> chunks;
    Buffer<ParamChunk> d_chunks;
    Buffer<StepStats> stats;
    Buffer<double> partial;
    Buffer<float> w, g, m, v, losses, fp32;
    Buffer<bf16> copy;
    AdamWParams params = {0, 0.9, 0.95, 1e-8, 0.1, 0}; // but for lr and step
    StepVotes votes = {};
    double clip = 1;

    explicit Optimizer(const ParamTable& t)
        : table(t), chunks(chunks_of(&t)), d_chunks(chunks), stats(1), partial(chunks.size()), w(t.count),
          g(w.n), m(w.n), v(w.n), losses(1000), fp32(t.fp32_count + 1), copy(w.n) {}
    AdamWTensors tensors() { return {copy, fp32, g, w, m, v}; }
    ParamChunks list() { return {d_chunks, (int64_t)chunks.size(), NULL}; }
    // The whole end of a step, queued without a wait in between.
    void step(double lr, int64_t number) {
        ParamChunks all = list();
        AdamWTensors t = tensors();
        params.lr = lr, params.step = number;
        CUDA_CHECK(cudaMemsetAsync(stats, 0, sizeof(StepStats)));
        CUDA_CHECK(cudaMemcpy(&stats.p->own.votes, &votes, sizeof votes, cudaMemcpyHostToDevice));
        loss_add(stats, losses, (int64_t)losses.n, 0);
        add_and_square(partial, g, &all, NULL, 0);
        global_norm(stats, partial, all.count, 0);
        global_norm_finish(stats, clip, params.spike_norm, true, 0);
        adamw_update(&t, &all, stats, &params, 0);
    }
};

// The weights' copies in bf16, and of short tensors in fp32.
static void check_copies(Optimizer& a, const vector<float>& w) {
    vector<bf16> copy = a.copy.host();
    vector<float> fp32 = a.fp32.host();
    int bad = 0;
    for (int r = 0; r < a.table.num_rows; r++)
        for (int64_t i = 0; i < a.table.rows[r].count; i++) {
            int64_t k = a.table.rows[r].offset + i, at = a.table.rows[r].fp32;
            bad += value(copy[k]) != value(rounded<bf16>(w[k])) || (at >= 0 && fp32[at + i] != w[k]);
        }
    CHECK(bad == 0, "%d of the copies' elements are wrong", bad);
}

static void test_adamw(const vector<int64_t>& lengths, int64_t align) {
    snprintf(test_case, sizeof test_case, "AdamW, %zu tensors at multiples of %d", lengths.size(),
             (int)align);
    Optimizer a(table_of(lengths, align));
    const AdamWParams& p = a.params;
    size_t n = a.w.n;
    vector<float> w0 = draw<float>(n, 0.02), losses = draw<float>(a.losses.n, 4);
    a.w = w0;
    a.losses = losses;
    a.m.zero(), a.v.zero();
    ParamChunks all = a.list();
    AdamWTensors tensors = a.tensors();
    weights_copy(&tensors, &all, 0);
    check_copies(a, w0);

    vector<double> w(w0.begin(), w0.end()), m(n), v(n);
    for (int64_t step = 1; step <= 4; step++) {
        double lr = 2e-3 / (double)step, squares = 0, loss = 0;
        vector<float> g = draw<float>(n, step == 3 ? 1e-6 : 0.01 * (double)step); // step 3 is not clipped
        a.g = g;
        const double of_mean = step == 2 ? 4096 / 37.0 : 1; // 37 of 4096 targets count
        a.votes.tokens = step == 2 ? 4096 : 37, a.votes.targets = 37;
        a.step(lr, step);
        for (float l : losses) loss += l;
        for (const ParamChunk& c : a.chunks)
            for (int64_t i = c.begin; i < c.begin + c.count && c.trainable; i++)
                squares += (double)g[i] * g[i];
        double norm = of_mean * sqrt(squares), scale = of_mean * (norm > a.clip ? a.clip / norm : 1);
        for (const ParamChunk& c : a.chunks)
            for (int64_t i = c.begin; i < c.begin + c.count && c.trainable; i++) {
                double gradient = g[i] * scale;
                m[i] = p.beta1 * m[i] + (1 - p.beta1) * gradient;
                v[i] = p.beta2 * v[i] + (1 - p.beta2) * gradient * gradient;
                double mhat = m[i] / (1 - pow(p.beta1, (double)step));
                double vhat = v[i] / (1 - pow(p.beta2, (double)step));
                w[i] -= lr * (mhat / (sqrt(vhat) + p.eps) + (c.decays ? p.weight_decay : 0) * w[i]);
            }

        StepStats stats = a.stats.host()[0];
        CHECK(stats.finite == 1, "a finite step counts as not finite");
        double error = noted("norm", fabs(stats.grad_norm / norm - 1));
        CHECK(error < 1e-7, "norm %.9g, not %.9g", stats.grad_norm, norm);
        CHECK(fabs(stats.own.loss - loss) < 1e-9 * fabs(loss), "loss %.12g, not %.12g", stats.own.loss, loss);
        CHECK(fabs(stats.grad_scale - scale) < 1e-6 * scale, "scale %g, not %g", stats.grad_scale, scale);
        double ew = noted("w", relative_error(a.w.host(), w)), em = noted("m", relative_error(a.m.host(), m));
        double ev = noted("v", relative_error(a.v.host(), v));
        CHECK(ew < UPDATE_LIMIT && em < UPDATE_LIMIT && ev < UPDATE_LIMIT, "step %d: w %g, m %g, v %g",
              (int)step, ew, em, ev);

        vector<float> new_w = a.w.host(), new_g = a.g.host();
        vector<bf16> copy = a.copy.host();
        int bad = 0;
        for (const ParamChunk& c : a.chunks)
            for (int64_t i = c.begin; i < c.begin + c.count; i++) {
                bad += value(copy[i]) != value(rounded<bf16>(new_w[i]));
                bad += new_g[i] != (c.trainable ? 0 : g[i]);
                bad += !c.trainable && new_w[i] != w0[i];
            }
        CHECK(bad == 0, "%d wrong elements in the copy, the gradient or frozen weights", bad);
    }

    // of a spike gradients are zeroed, and nothing else changes
    const vector<float> w4 = a.w.host(), m4 = a.m.host(), v4 = a.v.host();
    a.g = draw<float>(n, 0.01);
    a.params.spike_norm = a.stats.host()[0].grad_norm * 1e-6;
    a.step(2e-3, 5);
    const vector<float> g = a.g.host();
    int left = 0;
    for (const ParamChunk& c : a.chunks)
        for (int64_t i = c.begin; i < c.begin + c.count && c.trainable; i++) left += g[i] != 0;
    CHECK(a.stats.host()[0].skipped == 1 && left == 0, "a spike: %d gradients are left", left);
    CHECK(same_bits(a.w.host(), w4) && same_bits(a.m.host(), m4) && same_bits(a.v.host(), v4), "a spike");
    check_copies(a, w4);
    params_free(&a.table);
}

// With a gradient element or a loss that is not finite, or a gradient of 0, nothing at all may change. In a
// frozen tensor it is ignored.
static void test_no_update() {
    Optimizer a(table_of({40000, 5, -100, 30001}));
    size_t n = a.w.n;
    vector<float> w = draw<float>(n, 0.02), g = draw<float>(n, 0.1), m = draw<float>(n, 0.1), v(n, 0.01f);
    vector<bf16> copy = draw<bf16>(n, 0.02);
    const float bads[] = {NAN, INFINITY, -INFINITY, 3e38f};
    const size_t places[] = {0, 39999, 40001, 40004, 40105, n - 1}, frozen = 40050;
    for (float bad : bads)
        for (size_t place : places)
            for (int in_loss = 0; in_loss < 2; in_loss++) {
                vector<float> bad_g = g, losses = draw<float>(a.losses.n, 1);
                if (in_loss && bad == 3e38f) continue;
                (in_loss ? losses[place % losses.size()] : bad_g[place]) = bad;
                a.w = w, a.g = bad_g, a.m = m, a.v = v, a.copy = copy, a.losses = losses;
                a.step(1e-3, 5);
                CHECK(a.stats.host()[0].finite == 0, "%g at %zu counts as finite", bad, place);
                CHECK(same_bits(a.w.host(), w) && same_bits(a.g.host(), bad_g) && same_bits(a.m.host(), m) &&
                          same_bits(a.v.host(), v) && same_bits(a.copy.host(), copy),
                      "%g at %zu changed something", bad, place);
            }
    for (double size : {0.0, 1e18, -1.5e19}) { // a norm of 0, 1e18, and one above STEP_MAX_NORM
        vector<float> other(n, 0.0f);
        other[40001] = (float)size;
        a.w = w, a.g = other, a.m = m, a.v = v, a.copy = copy, a.losses = draw<float>(a.losses.n, 1);
        a.step(1e-3, 5);
        bool valid = size == 1e18;
        CHECK(a.stats.host()[0].finite == valid && same_bits(a.w.host(), w) == !valid &&
                  same_bits(a.v.host(), v) == !valid,
              "a gradient of norm %g: finite %d", fabs(size), a.stats.host()[0].finite);
    }
    vector<float> bad_g = g;
    bad_g[frozen] = NAN;
    a.losses = draw<float>(a.losses.n, 1);
    a.w = w, a.g = bad_g, a.m = m, a.v = v, a.copy = copy;
    a.step(1e-3, 5);
    CHECK(a.stats.host()[0].finite == 1 && !same_bits(a.w.host(), w), "a frozen tensor stopped the update");

    // twice the same from the same start
    vector<float> first = a.w.host();
    double norm = a.stats.host()[0].grad_norm;
    a.w = w, a.g = bad_g, a.m = m, a.v = v, a.copy = copy;
    a.step(1e-3, 5);
    CHECK(same_bits(a.w.host(), first) && a.stats.host()[0].grad_norm == norm, "two runs differ");
    // of a step whose targets do not count the gradient may be 0: decay and momentum go on
    a.g = vector<float>(n, 0.0f), a.m = m, a.v = v, a.w = w, a.votes.tokens = 64;
    a.step(1e-3, 5);
    CHECK(a.stats.host()[0].finite == 1 && a.stats.host()[0].grad_norm == 0 && !same_bits(a.w.host(), w),
          "empty step");
    params_free(&a.table);
}

// Shards: each rank has masters and moments of its parts alone.
static void test_shards(int ranks) {
    snprintf(test_case, sizeof test_case, "AdamW in %d shards", ranks);
    ParamTable t = table_of({40001, 7, 30000, -9, 20006}, 1, ranks);
    Optimizer whole(t);
    size_t n = whole.w.n;
    vector<float> w = draw<float>(n, 0.02), g = draw<float>(n, 0.1), zero(n, 0.0f);
    whole.w = w, whole.g = g, whole.m = zero, whole.v = zero;
    whole.losses = vector<float>(whole.losses.n, 1.0f);
    whole.step(1e-3, 1);
    Buffer<float> grads(g), fp32(whole.fp32.n);
    Buffer<bf16> copy(n);
    vector<float> w1 = whole.w.host(), m1 = whole.m.host();
    double squares = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const Shard shard = {rank, ranks, t.num_buckets, t.buckets};
        size_t count = (size_t)shard_count(&shard);
        vector<ParamChunk> chunks = chunks_of(&t, rank, ranks);
        vector<float> own(count);
        for (const ParamChunk& c : chunks)
            for (int i = 0; i < c.count; i++) own[c.local + i] = w[c.begin + i];
        Buffer<ParamChunk> d_chunks(chunks);
        Buffer<StepStats> stats(1);
        Buffer<double> partial(chunks.size());
        Buffer<float> part(own), m(count), v(count);
        m.zero(), v.zero();
        ParamChunks list = {d_chunks, (int64_t)chunks.size(), NULL};
        AdamWTensors tensors = {copy, fp32, grads, part, m, v};
        stats.zero();
        add_and_square(partial, grads, &list, NULL, 0);
        global_norm(stats, partial, list.count, 0);
        squares += stats.host()[0].own.squares;
        adamw_update(&tensors, &list, whole.stats, &whole.params, 0);
        vector<float> w2 = part.host(), m2 = m.host();
        int bad = 0;
        for (const ParamChunk& c : chunks)
            for (int i = 0; i < c.count; i++)
                bad += w2[c.local + i] != w1[c.begin + i] || m2[c.local + i] != m1[c.begin + i];
        CHECK(bad == 0, "rank %d computes %d other weights or moments than one rank alone", rank, bad);
    }
    vector<float> grads1 = whole.g.host(), grads2 = grads.host(), fp1 = whole.fp32.host(), fp2 = fp32.host();
    vector<bf16> copy1 = whole.copy.host(), copy2 = copy.host();
    int bad = 0;
    for (const ParamChunk& c : whole.chunks)
        for (int64_t i = c.begin; i < c.begin + c.count; i++) {
            int64_t at = c.fp32 + i - c.begin;
            bad += grads1[i] != grads2[i] || value(copy1[i]) != value(copy2[i]);
            bad += c.fp32 >= 0 && fp1[at] != fp2[at];
        }
    CHECK(bad == 0, "shards leave %d other gradients or copies than the whole", bad);
    CHECK(fabs(squares / whole.stats.host()[0].own.squares - 1) < 1e-12, "shards compute another norm");
    params_free(&t);
}

static void test_adamw_big() {
    const int64_t first = 2147483000, second = 4099 + 2 * CHUNK_SIZE; // 2^31 is early in the second
    Optimizer a(table_of({first, second}));
    int64_t n = a.table.count;
    fill(a.w, 0.01f, 0);
    fill(a.g, 0.001f, 0.0001f);
    fill(a.m, 0.001f, 0);
    fill(a.v, 1e-7f, 3e-7f);
    a.losses = vector<float>(a.losses.n, 1.0f);
    a.clip = 0;
    a.step(1e-3, 100);
    double squares = 0;
#pragma omp parallel for reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) {
        double g = 0.001f * element(i) + 0.0001f;
        squares += g * g;
    }
    double norm = a.stats.host()[0].grad_norm;
    CHECK(fabs(norm / sqrt(squares) - 1) < 1e-7, "norm %.10g, not %.10g", norm, sqrt(squares));
    const int64_t around[] = {0, 1073741824, first - 500, 2147483648LL - 500, n - 1000};
    for (int64_t from : around) {
        vector<float> w = a.w.host(from, 1000), g = a.g.host(from, 1000);
        vector<bf16> copy = a.copy.host(from, 1000);
        vector<double> want(1000);
        int bad = 0;
        for (int64_t j = 0; j < 1000; j++) {
            int64_t i = from + j;
            double m = 0.9 * (0.001f * element(i)) + 0.1 * (0.001f * element(i) + 0.0001f);
            double gradient = 0.001f * element(i) + 0.0001f;
            double v = 0.95 * (1e-7f * element(i) + 3e-7f) + 0.05 * gradient * gradient;
            bool decays = i < first ? first % 2 == 0 : second % 2 == 0;
            double mhat = m / (1 - pow(0.9, 100)), vhat = v / (1 - pow(0.95, 100)), w0 = 0.01f * element(i);
            want[j] = w0 - 1e-3 * (mhat / (sqrt(vhat) + 1e-8) + (decays ? 0.1 : 0) * w0);
            bad += g[j] != 0 || value(copy[j]) != value(rounded<bf16>(w[j]));
        }
        double error = noted("w", relative_error(w, want));
        CHECK(error < UPDATE_LIMIT && bad == 0, "weights from %lld on: %g, %d bad", (long long)from, error,
              bad);
    }
    params_free(&a.table);
}

// ----------------------------------------------------------------------------

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    Device device = device_open(0);
    printf("%s\n", device.name);
    for (int ranks : {1, 2, 3, 5}) test_chunks(ranks);
    test_adamw({3, -2, 12, 1, 5, 16384, 4, -7, 50000, 33, 40001, 2}, 1);
    test_adamw({3, -2, 12, 1, 5, 16384, 4, -7, 50000, 33, 40001, 2}, 8);
    if (!quick) test_adamw({1000000, 12, 768, -12, 2000001, 3072 * 768, 5}, 1);
    test_no_update();
    for (int ranks : {2, 3, 8}) test_shards(ranks);
    if (!quick) test_adamw_big();
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
