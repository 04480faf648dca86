/*
Times of the convolution and the gated RMSNorm of the recurrent mixers, at the shapes of the 760m models, each
beside its floor: the bytes of each input read once and each output written once, at the rate of a copy in the
same run. As in training the GPU is busy while the host launches.

    bench_conv [T]     16384
*/
#include "../../llmc/cuda/device.cuh"
#include "../../llmc/baselines/shared/conv_backward.cuh"
#include "../../llmc/baselines/mamba2/gated_norm.cuh"
#include "bench.cuh"

enum { D = 1536, STATE = 128, SETS = 2 }; // hidden_size; Mamba-2's state_size; sets larger than the caches

static double copy_rate; // bytes per second
static char* busy;       // written before a run: 60 us in which the host launches it
enum { BUSY_BYTES = 1 << 28 };

// Prints the median time of run(set), which moves `bytes`.
template <class Run> static void bench(const char* name, double bytes, const Run& run) {
    int set = 0;
    double ms = milliseconds(
               1, 20, [] { CUDA_CHECK(cudaMemsetAsync(busy, 0, BUSY_BYTES, 0)); },
               [&](int) { run(set ^= 1); })[0],
           floor = bytes / copy_rate * 1e3;
    printf("  %-28s %7.1f us   floor %6.1f, ratio %.2f\n", name, 1e3 * ms, 1e3 * floor, ms / floor);
}

static float* random_floats(int64_t n, float scale) { return random_array<float>(n, scale); }

// The inputs and outputs of one set
typedef struct {
    bf16 *proj, *y, *dy, *dproj;
    bf16 *o, *dout; // Mamba-2's
    float *steps, *log_decay, *dlog_decay, *rstd;
} Set;

static Set random_set(int64_t T, int64_t S, int64_t C, int64_t NH) {
    Set set = {};
    set.proj = random_array<bf16>(T * S, 1), set.dproj = device_array<bf16>(T * S);
    set.y = random_array<bf16>(T * C, 1), set.dy = random_array<bf16>(T * C, 1);
    if (NH == 0) return set;
    set.o = random_array<bf16>(T * 2 * D, 1), set.dout = random_array<bf16>(T * 2 * D, 1);
    set.steps = random_floats(T * NH, 0.1f), set.log_decay = random_floats(T * NH, 0.1f);
    set.dlog_decay = random_floats(T * NH, 1), set.rstd = random_floats(T, 1);
    return set;
}

// NH: Mamba-2's heads, 0 for DeltaNet
static void bench_mixer(const char* name, int64_t T, int64_t C, int64_t NH) {
    int64_t di = 2 * D, S = NH ? matmul_padded(di + C + NH) : C;
    Set sets[SETS] = {random_set(T, S, C, NH), random_set(T, S, C, NH)};
    Conv conv = {};
    conv.B = 1, conv.T = T, conv.C = C, conv.row_stride = S;
    conv.weight = random_array<bf16>(C * CONV_WIDTH, 0.5f), conv.dweight = random_floats(C * CONV_WIDTH, 1);
    float* partial = device_array<float>((int64_t)(norm_partial_bytes() / sizeof(float)));
    conv.dh = 128, conv.normed = NH ? 0 : 2 * D;
    HeadSteps heads = {};
    if (NH) {
        conv.dh = 64, conv.bias = random_array<bf16>(C, 0.5f), conv.dbias = random_floats(C, 1);
        heads.NH = NH, heads.dt_bias = random_floats(NH, 1), heads.A_log = random_floats(NH, 1);
        heads.D = random_floats(NH, 1), heads.ddt_bias = random_floats(NH, 1);
        heads.dA_log = random_floats(NH, 1), heads.dD = random_floats(NH, 1);
    }
    auto conv_of = [&](const Set& set) {
        Conv c = conv;
        c.steps = heads;
        c.steps.steps = set.steps, c.steps.log_decay = set.log_decay, c.steps.dlog_decay = set.dlog_decay;
        c.steps.dout = set.dout, c.steps.dt = set.proj + di + C, c.steps.ddt = set.dproj + di + C;
        return c;
    };
    int64_t column = NH ? di : 0; // of x in proj
    double bf16s = 2.0 * (double)T, per_head = 4.0 * (double)T * (double)NH;
    printf("%s: T %lld, C %lld\n", name, (long long)T, (long long)C);
    bench("convolution, forward", bf16s * 2 * C + per_head, [&](int i) {
        Conv c = conv_of(sets[i]);
        conv_forward(sets[i].y, sets[i].proj + column, &c, 0);
    });
    bench("convolution, backward", bf16s * (3 * C + (NH ? di + 2 * NH : 0)) + 2 * per_head, [&](int i) {
        Conv c = conv_of(sets[i]);
        conv_backward(sets[i].dproj + column, sets[i].dy, sets[i].proj + column, &c, partial, 0);
    });
    if (NH == 0) return;
    bf16* weight = random_array<bf16>(di, 1);
    float* dweight = random_floats(di, 1);
    auto gate_of = [&](const Set& set) {
        GatedNorm p = {};
        p.o = set.o, p.z = set.proj;
        p.row_stride = S;
        p.norm = {weight, dweight, set.rstd, T, di, 1e-5};
        p.dz = set.dproj, p.end = set.dproj + di + C + NH, p.padding = S - di - C - NH;
        return p;
    };
    bench("gated RMSNorm, forward", bf16s * 3 * di, [&](int i) {
        GatedNorm p = gate_of(sets[i]);
        gated_norm_forward(sets[i].dout, &p, 0);
    });
    bench("gated RMSNorm, backward", bf16s * 6 * di, [&](int i) {
        GatedNorm p = gate_of(sets[i]);
        gated_norm_backward(sets[i].dout, sets[i].dy, sets[i].dout, &p, partial, 0);
    });
}

int main(int argc, char** argv) {
    int64_t T = argc > 1 ? atoll(argv[1]) : 16384;
    Device device = device_open(0);
    printf("%s, %d SMs\n", device.name, device.sms);
    copy_rate = bench_copy();
    busy = device_array<char>(BUSY_BYTES);
    bench_mixer("Mamba-2", T, 2 * D + 2 * STATE, 2 * D / 64);
    bench_mixer("DeltaNet", T, 3 * D, 0);
}
