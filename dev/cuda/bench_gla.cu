/*
Benchmarks llmc/baselines/hgrn2/gla.cuh at the shape of a layer of hgrn2-760m: T 16384, 12 heads. For each
kernel and pass: milliseconds, and beside it the floor, the larger of its bytes at 4.0 TB/s and its FLOPs at
700 TFLOP/s.

    bench_gla [B [T [NH]]]
*/
#include "../../llmc/baselines/hgrn2/gla.cuh"
#include "bench.cuh"

// Bytes and FLOPs of a phase; bytes count tensors of [B,T,NH,128] bf16, and states of bf16.
struct Phase {
    const char* name;
    double tensors, states; // read or written
    double squares, scores; // GEMMs a chunk of 64 x 128 x 128, and of 64 x 64 x 128
};

int main(int argc, char** argv) {
    int64_t B = argc > 1 ? atoll(argv[1]) : 1, T = argc > 2 ? atoll(argv[2]) : 16384,
            NH = argc > 3 ? atoll(argv[3]) : 12, d = NH * GLA_HEAD, n = B * T * d, heads = B * NH;
    GlaShape shape = {B, T, NH, 3 * d, 0.088388f};
    bf16 *proj = random_array<bf16>(3 * n, 1), *dproj = device_array<bf16>(3 * n), *o = device_array<bf16>(n),
         *dout = random_array<bf16>(n, 1);
    char *saved = device_array<char>((int64_t)gla_saved_bytes(&shape)),
         *scratch = device_array<char>((int64_t)gla_scratch_bytes(&shape, true));
    Gla x = {proj, proj + d, proj + 2 * d, NULL, NULL, saved, scratch};
    GlaBackward g = {dproj, dproj + d, dproj + 2 * d, NULL, dout, false};
    GlaWork forward, backward;
    gla_plan(&forward, &shape, &x, false);
    gla_plan(&backward, &shape, &x, true);
    forward.o = o;
    backward.dout = dout, backward.dq = dproj, backward.df = dproj + d, backward.dv = dproj + 2 * d;
    backward.dbound_partial = NULL;
    dim3 grid((unsigned)forward.chunks, (unsigned)heads);
    const Phase phases[] = {
        {"forward: states", 2, 1, 1, 0}, {"forward: output", 4, 1, 1, 2}, {"backward: states", 3, 1, 1, 0},
        {"  recomputed", 4, 2, 2, 0},    {"backward: dv", 4, 1, 1, 2},    {"backward: dq, df", 6, 2, 2, 3},
        {"forward", 4, 0, 2, 2},         {"backward", 7, 0, 4, 5},        {"  recomputed", 7, 0, 5, 5}};
    std::vector<double> ms = milliseconds(
        9, 15, [] {},
        [&](int i) {
            g.recomputes = i == 8;
            if (i == 0) gla_states<false>(&forward, heads, SCAN_FORWARD, 0);
            if (i == 1) gla_launch<GlaOutputShared>(gla_output_kernel<false, false>, grid, 0, forward);
            if (i == 2) gla_states<false>(&backward, heads, SCAN_BACKWARD, 0);
            if (i == 3) gla_states<false>(&backward, heads, SCAN_BOTH, 0);
            if (i == 4) gla_launch<GlaOutputShared>(gla_output_kernel<true, false>, grid, 0, backward);
            if (i == 5)
                gla_launch<GlaDqDfShared>(gla_dq_df_kernel<false>, dim3(2 * grid.x, grid.y), 0, backward);
            if (i == 6) gla_forward(o, &x, &shape, 0);
            if (i >= 7) gla_backward(&g, &x, &shape, 0);
        });
    printf("B %lld, T %lld, %lld heads; segments of %d chunks\n", (long long)B, (long long)T, (long long)NH,
           forward.segment_chunks);
    printf("%-20s %8s %8s %8s\n", "", "ms", "floor", "share");
    for (int i = 0; i < 9; i++) {
        const Phase& p = phases[i];
        double chunks = (double)(forward.chunks * heads),
               bytes = p.tensors * 2 * (double)n + p.states * chunks * 2 * GLA_STATE,
               flops = chunks * 2 * 64 * 128 * (128 * p.squares + 64 * p.scores);
        double floor = 1e3 * std::max(bytes / 4.0e12, flops / 700e12);
        printf("%-20s %8.3f %8.3f %7.0f%%\n", p.name, ms[(size_t)i], floor, 100 * floor / ms[(size_t)i]);
    }
    return 0;
}
