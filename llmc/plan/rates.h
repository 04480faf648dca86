/*
How fast a model trains on a GPU that is not here: its model FLOPs over the GPU's peak speed times an MFU.
That is --mfu, or what was measured of the model that is nearest (dev/SPEED.md, "Rates that --dry-run plans
with"), or, of GPUs without any measurement, RATE_ASSUMED_MFU. Called by plan.h.
*/
#pragma once

#include <math.h>
#include "../base/gpus.h"
#include "../run/run.h"

// Pruning of attention decides the speed of models with a forget gate, so there are three rates.
typedef enum { RATE_UNPRUNED, RATE_SPREAD, RATE_INITIAL, NUM_RATES } RateKind;

typedef struct {
    const char *gpu, *model; // names in gpus.h and presets.h
    int64_t seq_len;
    Recompute recompute;
    double tokens[NUM_RATES]; // a second: nothing pruned; gates spread over all lengths, which prunes half of
                              // attention; gates as they begin. 0: not measured
} MeasuredRate;

static const MeasuredRate measured_rates[] = {
    {"H100", "fox-pro-125m", 16384, RECOMPUTE_NONE, {259297, 350928, 554118}},
    {"H100", "fox-pro-760m", 16384, RECOMPUTE_NONE, {58448, 76562, 110961}},
    {"H100", "fox-pro-125m", 65536, RECOMPUTE_QKV, {98965, 177476, 590244}},
    {"H100", "fox-pro-760m", 65536, RECOMPUTE_BLOCK, {18343, 32742, 0}},
    {"H100", "transformer-llama-760m", 16384, RECOMPUTE_NONE, {63158, 0, 0}},
    {"H100", "gated-deltanet-760m", 16384, RECOMPUTE_NONE, {100200, 0, 0}},
    {"H200", "fox-pro-125m", 2048, RECOMPUTE_NONE, {513000, 546000, 559201}},
    {"H200", "fox-pro-125m", 8192, RECOMPUTE_NONE, {357000, 438000, 0}},
    {"H200", "fox-pro-125m", 16384, RECOMPUTE_NONE, {268052, 374243, 575521}},
    {"H200", "fox-pro-125m", 32768, RECOMPUTE_NONE, {166000, 268000, 0}},
    {"H200", "fox-pro-125m", 65536, RECOMPUTE_NONE, {97000, 180000, 0}},
    {"H200", "fox-pro-760m", 16384, RECOMPUTE_NONE, {58749, 79156, 113144}},
    {"H200", "transformer-pro-125m", 2048, RECOMPUTE_NONE, {519000, 0, 0}},
    {"H200", "transformer-pro-125m", 8192, RECOMPUTE_NONE, {361000, 0, 0}},
    {"H200", "transformer-pro-125m", 32768, RECOMPUTE_NONE, {167000, 0, 0}},
    {"H200", "transformer-pro-125m", 65536, RECOMPUTE_NONE, {97000, 0, 0}},
    {"H200", "transformer-llama-760m", 16384, RECOMPUTE_NONE, {66262, 0, 0}},
    {"H200", "mamba2-760m", 16384, RECOMPUTE_NONE, {93735, 0, 0}},
    {"H200", "hgrn2-125m", 16384, RECOMPUTE_NONE, {597476, 0, 0}},
    {"H200", "hgrn2-760m", 16384, RECOMPUTE_NONE, {113002, 0, 0}},
    {"H200", "deltanet-125m", 16384, RECOMPUTE_NONE, {501843, 0, 0}},
    {"H200", "deltanet-760m", 16384, RECOMPUTE_NONE, {106271, 0, 0}},
    {"H200", "gated-deltanet-760m", 16384, RECOMPUTE_NONE, {104164, 0, 0}},
};
enum { NUM_MEASURED_RATES = sizeof measured_rates / sizeof measured_rates[0] };

#define RATE_ASSUMED_MFU 40.0     // percent
#define RATE_OF_LINEAR   0.98     // N GPUs in place of one, measured with two and four: 0.986 to 1.001
#define RATE_BLOCK       (3 / 4.) // of --recompute block, which runs the forward pass twice
#define RATE_LONG        65536    // tokens from which attention has most FLOPs, and the MFU stays as it is
#define RATE_FAR         2.5      // rate_distance from which a measurement tells nothing

// Speed relative to linear scaling where GPUs share each sequence: two GPUs (dev/SPEED.md: 0.987 unpruned,
// 0.956 spread, 0.972 and 0.982 with initial gates), and more, of which four were measured with initial gates
// alone, before halos: 0.758.
static const double rate_shared[2][NUM_RATES] = {{0.98, 0.95, 0.97}, {0.98, 0.95, 0.76}};

// Tokens a second of one GPU; 0: not known.
typedef struct {
    double tokens[NUM_RATES];
    const MeasuredRate* measured; // NULL: --mfu, or assumed
} PlannedRate;

// The length by which measurements are compared: those beyond RATE_LONG are alike.
static inline double rate_length(int64_t T) { return (double)(T < RATE_LONG ? T : RATE_LONG); }

// A preset's config and model FLOPs a token, forward and backward, and its parameters.
static inline double rate_preset_flops(const MeasuredRate* row, Config* c, double* parameters) {
    Error err;
    Recipe recipe;
    if (!config_preset(c, &recipe, row->model, &err)) die("%s", err.msg);
    ParamTable table = params_build(c);
    const double flops = 6.0 * (double)table.non_embedding + config_mixer_flops(c, row->seq_len, 0);
    *parameters = (double)table.non_embedding;
    params_free(&table);
    return flops;
}

// How little a measurement tells about the run: logarithms of the ratios of parameters and lengths, and more
// for another kind of block or another GPU. Infinite for another mixer or generation of GPUs.
static inline double rate_distance(const MeasuredRate* row, const Run* run, const Gpu* gpu) {
    Config c;
    double parameters;
    const Gpu* of_row = gpu_find(row->gpu);
    rate_preset_flops(row, &c, &parameters);
    if (config_layers_of(&run->config, c.mixer) < run->config.num_hidden_layers ||
        of_row->compute_capability != gpu->compute_capability)
        return INFINITY;
    return fabs(log((double)run->table.non_embedding / parameters)) +
           fabs(log(rate_length(run->options.seq_len) / rate_length(row->seq_len))) +
           (of_row == gpu ? 0 : 0.7) + (c.use_output_gate == run->config.use_output_gate ? 0 : 0.5) +
           (config_has_gate(&c) == config_has_gate(&run->config) ? 0 : 1);
}

// The rates of the run on a GPU, with a level of recomputation.
static inline PlannedRate rate_plan(const Run* run, const Gpu* gpu, Recompute recompute) {
    PlannedRate rate = {{0, 0, 0}, NULL};
    const double flops = run_flops_per_token(run), peak = 1e12 * gpu->tflops, mfu = run->options.mfu;
    const double block = recompute == RECOMPUTE_BLOCK ? RATE_BLOCK : 1;
    double nearest = INFINITY;
    for (int i = 0; i < NUM_MEASURED_RATES && mfu == OPTION_UNSET; i++) {
        const double distance = rate_distance(&measured_rates[i], run, gpu);
        if (distance < nearest) nearest = distance, rate.measured = &measured_rates[i];
    }
    if (rate.measured && nearest >= RATE_FAR) return rate;
    if (!rate.measured) {
        rate.tokens[RATE_UNPRUNED] =
            (mfu == OPTION_UNSET ? RATE_ASSUMED_MFU * block : mfu) / 100 * peak / flops;
        return rate;
    }
    const MeasuredRate* row = rate.measured;
    Config c;
    double parameters;
    const double row_flops = rate_preset_flops(row, &c, &parameters);
    const double faster = peak / (1e12 * gpu_find(row->gpu)->tflops) * block /
                          (row->recompute == RECOMPUTE_BLOCK ? RATE_BLOCK : 1);
    // gates as they begin leave next to nothing of attention, at any length
    const double less[NUM_RATES] = {row_flops / flops, row_flops / flops,
                                    parameters / (double)run->table.non_embedding};
    for (int kind = 0; kind < (config_prunes(&run->config) ? NUM_RATES : 1); kind++)
        rate.tokens[kind] = row->tokens[kind] * faster * less[kind];
    return rate;
}
