/*
The loss, against double on the CPU. Also the table of GPUs and the profiling ranges.

    test_classifier [quick] [SEED]     quick: no buffers of more than 2^31 elements, for compute-sanitizer
*/
#include "../../../llmc/cuda/device.cuh"
#include "../../../llmc/layers/classifier.cuh"
#include "buffers.cuh"

static const double LOSS_LIMIT = 1e-6; // an H100 showed 4e-8

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

int main(int argc, char** argv) {
    bool quick = test_begin(argc, argv);
    if (!quick) test_device_errors();
    test_peak_flops();
    Device device = device_open(0);
    printf("%s, compute capability %d, %d SMs, %.1f GiB, peak %.1f TFLOP/s\n", device.name,
           device.compute_capability, device.sms, (double)device.memory / (1 << 30),
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
    CUDA_CHECK(cudaDeviceSynchronize());
    print_noted();
    return test_report();
}
