/*
Times of the scan kernels of DeltaNet, Gated DeltaNet and Mamba-2 at the shapes of the 760m models, each phase
beside its floor: the larger of its bytes at 4.0 TB/s and its GEMMs' operations at 700 TFLOP/s. Bytes: each
input read once, each output written once, also where that is a tensor between the kernels. Operations: those
that the formulas need; what is computed above a diagonal is left out.

    bench_scan [T]     16384
*/
#include "../../llmc/cuda/device.cuh"
#include "../test/baselines/scans.cuh"
#include "bench.cuh"

typedef struct {
    const char* name;
    double bytes, flops;
    void (*run)(void);
} Phase;

static Scan scan;
static ScanBackward gradients;
static ScanShape shape;
static SsdWork decay;
static DeltaWork delta;
static bf16* out;

static void print_phases(const char* title, const std::vector<Phase>& phases) {
    std::vector<double> ms =
        milliseconds((int)phases.size(), 15, [] {}, [&](int i) { phases[(size_t)i].run(); });
    double time = 0, least = 0;
    printf("\n%s: B %lld, T %lld, NH %d, %d x %d\n", title, (long long)shape.B, (long long)shape.T, shape.NH,
           shape.K, shape.V);
    for (size_t i = 0; i < phases.size(); i++) {
        double bytes = phases[i].bytes / 4.0e9, flops = phases[i].flops / 700e9,
               floor = std::max(bytes, flops);
        bool whole = phases[i].bytes == 0;
        if (!whole) time += ms[i], least += floor;
        printf("  %-28s %7.3f ms", phases[i].name, ms[i]);
        if (!whole)
            printf("   floor %6.3f (%s), bytes %6.3f, FLOPs %6.3f", floor, bytes > flops ? "bytes" : "FLOPs",
                   bytes, flops);
        printf("\n");
    }
    printf("  %-28s %7.3f ms   floor %6.3f\n", "sum of the phases", time, least);
}

// Inputs of a layer: rows of the mixers' projections, as the models have them
static void set_inputs(int64_t B, int64_t T, int NH, int V, bool decays = false) {
    bool is_delta = V >= DELTA_D;
    int64_t d = (int64_t)NH * V, row = is_delta ? (int64_t)NH * DELTA_D : d + 256, n = B * T;
    shape = {
        B, T, NH, 128, V, row, is_delta ? 128 : 0, is_delta ? 2 * row + d : d, is_delta ? 0.0884f : 1.0f};
    shape.decays = decays;
    bf16* keys = random_array<bf16>(2 * n * row, 0.0884f);
    scan = {};
    scan.q = keys, scan.k = keys + n * row, scan.v = random_array<bf16>(n * shape.value_row, 1);
    float* gate = random_array<float>(n * NH, 1);
    fill_kernel<<<2048, 256>>>(gate, n * NH, 7, is_delta ? 0.5f : 0.05f);
    std::vector<float> host((size_t)(n * NH));
    CUDA_CHECK(cudaMemcpy(host.data(), gate, host.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (float& x : host) x = is_delta ? fabsf(x) : -fabsf(x);
    CUDA_CHECK(cudaMemcpy(gate, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
    (is_delta ? scan.beta : scan.log_decay) = gate;
    if (decays) {
        for (float& x : host) x *= -0.1f;
        float* log_decay = random_array<float>(n * NH, 1);
        CUDA_CHECK(cudaMemcpy(log_decay, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
        scan.log_decay = log_decay;
    }
    if (!is_delta) scan.skip = random_array<float>(n * NH, 100);
    scan.saved = device_array<char>((int64_t)scan_saved_bytes(&shape));
    scan.scratch = device_array<char>((int64_t)scan_scratch_bytes(&shape, true));
    gradients = {device_array<bf16>(n * row),
                 device_array<bf16>(n * row),
                 device_array<bf16>(n * shape.value_row),
                 device_array<float>(n * NH),
                 device_array<float>(n * NH),
                 random_array<bf16>(n * d, 1),
                 false};
    out = device_array<bf16>(n * d);
    ScanMemory memory = scan_memory(&scan);
    if (is_delta)
        delta = delta_rule_work(&memory, &shape, true);
    else
        decay = ssd_work(&memory, &shape, true);
}

static void free_inputs(void) {
    void* all[] = {(void*)scan.q,    (void*)scan.v,         scan.saved,   scan.scratch,
                   gradients.dq,     gradients.dk,          gradients.dv, gradients.dlog_decay,
                   gradients.dbeta,  (void*)gradients.dout, out,          (void*)scan.log_decay,
                   (void*)scan.beta, (void*)scan.skip};
    for (void* p : all) CUDA_CHECK(cudaFree(p));
}

static void backward(bool recomputes) {
    gradients.recomputes = recomputes;
    scan_backward(&gradients, &scan, &shape, 0);
}

static void bench_decay(int64_t B, int64_t T, int NH) {
    set_inputs(B, T, NH, SSD_V);
    double n = (double)(B * T), v = n * NH * SSD_V * 2, k = n * SSD_K * 2, gate = n * NH * 4;
    double states = n / SSD_CHUNK * NH * SSD_STATE * 2;
    double state_gemm = 2 * n * NH * SSD_STATE, pair_gemm = n * NH * SSD_CHUNK * SSD_V;
    print_phases("Mamba-2",
                 {
                     {"cum", 4 * gate, 0, [] { ssd_cum(&decay, &scan, &shape, 0); }},
                     {"states", k + v + gate + states, state_gemm,
                      [] { ssd_states(&decay, &scan, NULL, SCAN_FORWARD, &shape, 0); }},
                     {"output", 2 * k + 2 * v + 2 * gate + states, state_gemm + pair_gemm,
                      [] { ssd_output(out, &decay, &scan, &shape, 0); }},
                     {"dstates", k + v + gate + states, state_gemm,
                      [] { ssd_states(&decay, &scan, gradients.dout, SCAN_BACKWARD, &shape, 0); }},
                     {"dq", 2 * k + 2 * v + 2 * gate + states + 4 * k, 2 * state_gemm + pair_gemm,
                      [] { ssd_dq(&decay, &gradients, &scan, &shape, 0); }},
                     {"dk, dv", 2 * k + 3 * v + 3 * gate + 2 * states + 2 * k, 2 * state_gemm + pair_gemm,
                      [] { ssd_dkv(&decay, &gradients, &scan, &shape, 0); }},
                     {"sums", 8 * k + 4 * gate, 0, [] { ssd_sums(&decay, &gradients, &shape, 0); }},
                     {"forward", 0, 0, [] { scan_forward(out, &scan, &shape, 0); }},
                     {"backward", 0, 0, [] { backward(false); }},
                     {"backward, recomputed", 0, 0, [] { backward(true); }},
                 });
    free_inputs();
}

static void bench_delta(int64_t B, int64_t T, int NH, int slices, bool decays) {
    set_inputs(B, T, NH, slices * DELTA_D, decays);
    // x: bytes of keys, v of values; a pair_gemm has one of either width
    double n = (double)(B * T), x = n * NH * DELTA_D * 2, v = slices * x, t = x / 2;
    double states = slices * n / DELTA_CHUNK * NH * DELTA_STATE * 2,
           state_gemm = slices * 2 * n * NH * DELTA_STATE;
    double pair_gemm = n * NH * DELTA_CHUNK * DELTA_D, v_gemm = slices * pair_gemm;
    print_phases(
        decays ? "Gated DeltaNet" : "DeltaNet",
        {
            {"prepare", 2 * x + 2 * v + t, 2 * pair_gemm + v_gemm,
             [] { delta_rule_prepare(&delta, &scan, &shape, 0); }},
            {"states", 2 * x + 2 * v + states, 2 * state_gemm,
             [] { delta_rule_states(&delta, &scan, NULL, SCAN_FORWARD, &shape, 0); }},
            {"output", 2 * x + 2 * v + states, state_gemm + pair_gemm + v_gemm,
             [] { delta_rule_output(out, &delta, &scan, &shape, 0); }},
            {"P^T dO", 2 * x + 2 * v, pair_gemm + v_gemm,
             [] { delta_rule_y(&delta, &scan, gradients.dout, &shape, 0); }},
            {"dstates", 3 * x + 3 * v + states, 3 * state_gemm,
             [] { delta_rule_states(&delta, &scan, gradients.dout, SCAN_BACKWARD, &shape, 0); }},
            {"gradients", 4 * x + 5 * v + t + 2 * states, 3 * state_gemm + 4 * pair_gemm + 3 * v_gemm,
             [] { delta_rule_gradients(&delta, &gradients, &scan, &shape, 0); }},
            {"forward", 0, 0, [] { scan_forward(out, &scan, &shape, 0); }},
            {"backward", 0, 0, [] { backward(false); }},
            {"backward, recomputed", 0, 0, [] { backward(true); }},
        });
    free_inputs();
}

int main(int argc, char** argv) {
    int64_t T = argc > 1 ? atoll(argv[1]) : 16384;
    Device device = device_open(0);
    printf("%s, %d SMs\n", device.name, device.sms);
    bench_decay(1, T, 48);
    bench_delta(1, T, 12, 1, false);
    bench_delta(1, T, 9, 2, true);
    return EXIT_SUCCESS;
}
