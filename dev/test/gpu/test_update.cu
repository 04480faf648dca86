/*
The kernels around the model, against double on the CPU: the loss, the gradient norm, AdamW. Also the table of
GPUs and the profiling ranges.

    test_update [quick] [SEED]     quick: no buffers of more than 2^31 elements, for compute-sanitizer
*/
#include <algorithm>
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/cuda/device.cuh"
#include "../../../llmc/layers/adamw.cuh"
#include "../../../llmc/layers/classifier.cuh"
#include "buffers.cuh"

// An H100 showed 4e-8 and 1.1e-7.
static const double LOSS_LIMIT = 1e-6, UPDATE_LIMIT = 3e-7;

// ----------------------------------------------------------------------------
// device

static void test_device_errors() { // in forked children, before this process uses the GPU
    CHECK_DIES("there is no GPU 1000", device_open(1000));
    CHECK_DIES("there is no GPU -1", device_open(-1));
    CHECK_DIES("CUDA_VISIBLE_DEVICES=''", (setenv("CUDA_VISIBLE_DEVICES", "", 1), device_open(0)));
}

static void test_peak_flops() {
    static const struct {
        const char* name;
        double tflops;
    } cases[] = {
        {"NVIDIA H100 80GB HBM3", 989.4},
        {"NVIDIA H100 PCIe", 756},
        {"NVIDIA H100 NVL", 835},
        {"NVIDIA H200", 989.4},
        {"NVIDIA A100-SXM4-80GB", 312},
        {"NVIDIA A100 80GB PCIe", 312},
        {"NVIDIA A10", 125},
        {"NVIDIA A10G", 0},
        {"NVIDIA L40S", 362},
        {"NVIDIA L4", 121},
        {"NVIDIA GeForce RTX 4090", 165.2},
        {"NVIDIA GeForce RTX 4090 D", 0},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", 0},
        {"NVIDIA B200", 2250},
        {"NVIDIA GB200", 2500},
        {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0},
        {"Some GPU", 0},
        {"", 0},
    };
    for (auto& c : cases) CHECK((gpu_find(c.name) ? gpu_find(c.name)->tflops : 0) == c.tflops, "%s", c.name);
}

// ----------------------------------------------------------------------------
// profiling ranges

// A RangeLog has the outermost ranges, between start and stop alone, by name and pass.
static void test_ranges() {
    static RangeLog log;
    Buffer<float> x(1 << 20);
    auto run = [&](const char* name, RangePass pass) {
        Range outer(name, pass, 0);
        Range inner("inner", RANGE_FORWARD, 0);
        CUDA_CHECK(cudaMemsetAsync(x, 0, x.n * sizeof(float)));
    };
    double forward = 0; // of "b" after the first round
    for (int round = 0; round < 2; round++) {
        run("before", RANGE_FORWARD);
        range_log_start(&log);
        run("b", RANGE_FORWARD);
        run("a", RANGE_BACKWARD);
        run("b", RANGE_FORWARD);
        range_log_stop();
        CHECK(log.count == 3 && log.num_names == 2, "%d ranges, %d names", log.count, log.num_names);
        CHECK(!strcmp(log.sums[0].name, "b") && !strcmp(log.sums[1].name, "a"), "not in order of appearance");
        CHECK(log.sums[0].ms[RANGE_FORWARD] > forward && log.sums[0].ms[RANGE_BACKWARD] == 0, "times of b");
        CHECK(log.sums[1].ms[RANGE_FORWARD] == 0 && log.sums[1].ms[RANGE_BACKWARD] > 0, "times of a");
        forward = log.sums[0].ms[RANGE_FORWARD];
    }
    range_log_free(&log);
    CHECK(log.num_names == 0 && !log.ranges[0].begin, "freed");
}

// ----------------------------------------------------------------------------
// classifier

// Is the target the likeliest token of a row of V logits, the first one of several?
static bool is_likeliest(const bf16* x, int64_t V, int target) {
    bool likeliest = target != TARGET_NONE;
    for (int64_t i = 0; i < V && likeliest; i++)
        likeliest = value(x[i]) < value(x[target]) || (i >= target && value(x[i]) == value(x[target]));
    return likeliest;
}

// Loss and gradient of one row of V logits.
static double loss_of_row(const bf16* x, int64_t V, int target, double dloss, double* dx) {
    if (target == TARGET_NONE) dloss = 0;
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < V; i++) max = fmax(max, value(x[i]));
    for (int64_t i = 0; i < V; i++) sum += exp(value(x[i]) - max);
    for (int64_t i = 0; i < V; i++) dx[i] = dloss * (exp(value(x[i]) - max) / sum - (i == target));
    return target == TARGET_NONE ? 0 : log(sum) + max - value(x[target]);
}

static void test_classifier(int64_t rows, int64_t V, int64_t stride) {
    const float dloss = 1.0f / 524288;
    snprintf(test_case, sizeof test_case, "classifier %lld x %lld", (long long)rows, (long long)V);
    vector<bf16> x = draw<bf16>(rows * stride, 3);
    vector<int32_t> targets(rows);
    for (int64_t t = 0; t < rows; t++) {
        int64_t target = (int64_t)(random_uniform(2, seed, (uint64_t)t) * (double)V);
        targets[t] = (int32_t)(t == 0 ? V - 1 : t == 1 ? 0 : target);
        if (t % 7 == 5) targets[t] = TARGET_NONE;
        bf16* row = &x[t * stride];
        for (int64_t i = 0; i < V && t % 4 == 2; i++) row[i] = rounded<bf16>(50 * value(row[i])); // sharp
        if (t % 4 == 3) row[target] = rounded<bf16>(40);                   // nearly certain
        if (t % 8 == 7 && target > 0) row[target - 1] = rounded<bf16>(40); // and one before it as likely
        for (int64_t i = V; i < stride; i++) row[i] = rounded<bf16>(i % 2 ? NAN : INFINITY);
    }
    Buffer<bf16> logits(x);
    Buffer<float> losses(rows);
    Buffer<int32_t> d_targets(targets);
    LogitShape shape = {rows, V, stride};

    classifier(losses, logits, d_targets, &shape, dloss, false, 0);
    vector<float> loss = losses.host();
    CHECK(same_bits(logits.host(), x), "evaluation changed the logits");
    for (int64_t t = 0; t < rows; t++) {
        CHECK(signbit(loss[t]) == is_likeliest(&x[t * stride], V, targets[t]),
              "sign of the loss of row %d of %d x %d", (int)t, (int)rows, (int)V);
        loss[t] = fabsf(loss[t]);
    }
    losses.poison();
    classifier(losses, logits, d_targets, &shape, dloss, true, 0);
    vector<bf16> dx = logits.host();
    CHECK(same_bits(loss, losses.host()), "training and evaluation differ in the loss");

    vector<double> want_loss(rows), want(V);
    for (int64_t t = 0; t < rows; t++) {
        want_loss[t] = loss_of_row(&x[t * stride], V, targets[t], dloss, want.data());
        vector<bf16> row(dx.begin() + t * stride, dx.begin() + t * stride + V);
        double error = relative_error(row, want), size = 0; // of the gradient, relative to dloss
        for (double g : want) size += g * g / dloss / dloss;
        size = sqrt(size);
        if (size > 0.01) noted("dlogits", error);
        CHECK(error * size < 4e-3 * size + 1e-6, "dlogits of row %d of %d x %d: %g", (int)t, (int)rows,
              (int)V, error);
        int bad = 0;
        for (int64_t i = 0; i < V; i++) {
            double limit = 0.0045 * fabs(want[i]) + 1e-36;
            if (i == targets[t]) limit += 1e-6 * dloss; // p - 1 has the absolute error of p
            bad += !(fabs(value(row[i]) - want[i]) <= limit);
        }
        for (int64_t i = V; i < stride; i++) bad += value(dx[t * stride + i]) != 0;
        CHECK(bad == 0, "row %d of %d x %d: %d wrong elements", (int)t, (int)rows, (int)V, bad);
    }
    double error = noted("losses", relative_error(loss, want_loss));
    CHECK(V == 1 ? loss[0] == 0 : error < LOSS_LIMIT, "losses of %d x %d: %g", (int)rows, (int)V, error);
    logits = x;
    classifier(losses, logits, d_targets, &shape, dloss, true, 0);
    CHECK(same_bits(dx, logits.host()), "two runs differ");
}

// Which losses are finite: NaN, an infinite logit or an invalid target must not pass, logits of -inf must.
static void test_classifier_not_finite() {
    const int64_t V = 1000, stride = 1008;
    enum { NORMAL, ALL_MINUS_INF, TARGET_LOW, TARGET_HIGH, A_NAN, AN_INF, A_MINUS_INF, NO_TARGET, ROWS };
    vector<bf16> x = draw<bf16>(ROWS * stride, 1);
    for (int64_t i = 0; i < V; i++) x[ALL_MINUS_INF * stride + i] = rounded<bf16>(-INFINITY);
    x[A_NAN * stride + 500] = rounded<bf16>(NAN);
    x[AN_INF * stride + 999] = rounded<bf16>(INFINITY);
    for (int64_t i = 0; i < V; i++)
        if (i % 3) x[A_MINUS_INF * stride + i] = rounded<bf16>(-INFINITY);
    Buffer<bf16> logits(x);
    Buffer<float> losses(ROWS);
    Buffer<int32_t> targets(vector<int32_t>{3, 3, -2, (int32_t)V, 3, 3, 3, TARGET_NONE});
    LogitShape shape = {ROWS, V, stride};
    classifier(losses, logits, targets, &shape, 1, true, 0);
    vector<float> loss = losses.host();
    vector<bf16> dx = logits.host();
    CHECK(isfinite(loss[NORMAL]), "%g", loss[NORMAL]);
    for (int t : {ALL_MINUS_INF, TARGET_LOW, TARGET_HIGH, A_NAN, AN_INF})
        CHECK(!isfinite(loss[t]), "row %d: %g", t, loss[t]);
    CHECK(isfinite(loss[A_MINUS_INF]), "%g", loss[A_MINUS_INF]);
    CHECK(loss[NO_TARGET] == 0 && !signbit(loss[NO_TARGET]), "without a target: %g", loss[NO_TARGET]);
    CHECK(value(dx[A_MINUS_INF * stride + 1]) == 0, "an impossible token has a gradient");
    shape.rows = 0;
    classifier(losses, logits, targets, &shape, 1, true, 0); // no launch
}

// Element i of a large buffer.
__host__ __device__ static inline float element(int64_t i) {
    uint32_t x = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 32) * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(x >> 8) * (4.0f / 16777216) - 2;
}

template <class T> __global__ static void fill_kernel(T* x, int64_t n, float scale, float shift) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < n; i += step) x[i] = (T)(scale * element(i) + shift);
}

template <class T> static void fill(const Buffer<T>& x, float scale, float shift) {
    fill_kernel<<<4096, 256>>>(x.p, (int64_t)x.n, scale, shift);
    CUDA_CHECK_LAUNCH();
}

static void test_classifier_big() {
    const int64_t V = 50257, stride = 50264, rows = 43000; // 2^31 is in row 42723
    const float dloss = 1e-5f;
    Buffer<bf16> logits(rows * stride);
    Buffer<float> losses(rows);
    vector<int32_t> targets(rows);
    for (int64_t t = 0; t < rows; t++) targets[t] = (int32_t)(t * 7919 % V);
    Buffer<int32_t> d_targets(targets);
    LogitShape shape = {rows, V, stride};
    fill(logits, 2, 0);
    vector<vector<bf16>> before;
    const int64_t samples[] = {0, 21362, 42723, 42724, rows - 1};
    for (int64_t t : samples) before.push_back(logits.host(t * stride, V));
    classifier(losses, logits, d_targets, &shape, dloss, true, 0);
    vector<float> loss = losses.host();
    vector<double> want(V);
    for (size_t i = 0; i < before.size(); i++) {
        int64_t t = samples[i];
        double want_loss = loss_of_row(before[i].data(), V, targets[t], dloss, want.data());
        double error = relative_error(logits.host(t * stride, V), want);
        CHECK(error < bf16_limit(V), "row %d: %g", (int)t, error);
        CHECK(fabs(loss[t] - want_loss) < LOSS_LIMIT * want_loss, "row %d: %g, not %g", (int)t, loss[t],
              want_loss);
    }
    int bad = 0;
    for (float l : loss) bad += !(l > 5 && l < 20);
    CHECK(bad == 0, "%d losses are not near ln V", bad);
}

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
        double error = noted("norm", fabs(stats.norm / norm - 1));
        CHECK(error < 1e-7, "norm %.9g, not %.9g", stats.norm, norm);
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
    a.params.spike_norm = a.stats.host()[0].norm * 1e-6;
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
    double norm = a.stats.host()[0].norm;
    a.w = w, a.g = bad_g, a.m = m, a.v = v, a.copy = copy;
    a.step(1e-3, 5);
    CHECK(same_bits(a.w.host(), first) && a.stats.host()[0].norm == norm, "two runs differ");
    // of a step whose targets do not count the gradient may be 0: decay and momentum go on
    a.g = vector<float>(n, 0.0f), a.m = m, a.v = v, a.w = w, a.votes.tokens = 64;
    a.step(1e-3, 5);
    CHECK(a.stats.host()[0].finite == 1 && a.stats.host()[0].norm == 0 && !same_bits(a.w.host(), w),
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
    double norm = a.stats.host()[0].norm;
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
    if (!quick) test_device_errors();
    test_peak_flops();
    Device device = device_open(0);
    printf("%s, compute capability %d, %d multiprocessors, %.1f GiB, peak %.1f TFLOP/s\n", device.name,
           device.compute_capability, device.multiprocessors, (double)device.memory / (1 << 30),
           1e-12 * device.peak_flops);

    const int64_t logits[][3] = {
        {1, 1, 8},           {3, 7, 8},           {5, 8, 8},          {4, 9, 16},         {17, 257, 264},
        {33, 1000, 1000},    {8, 8191, 8256},     {8, 8193, 8200},    {16, 50257, 50264}, {16, 50257, 50304},
        {1, 131072, 131072}, {4, 262143, 262144}, {4, 262144, 262144}};
    for (auto& s : logits)
        if (!quick || s[0] * s[1] < 140000) test_classifier(s[0], s[1], s[2]);
    test_classifier_not_finite();
    if (!quick) test_classifier_big();

    test_ranges();
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
