/*
The plan of a training on a GPU, as --dry-run prints it, for the GPU of this machine or the one of --gpu and
--gpu-memory: what each level of recomputation needs, the largest micro-batches, hours and GPU-hours. The GPU
trainer plans with its own tables, plan_fit and plan_print. The CPU trainer calls plan_print_cpu, which
estimates for --gpu, and else prints the CPU trainer's own memory.
*/
#pragma once

#include "../model/fp8.h"
#include "../model/gpu_models.h"
#include "../run/report.h"
#include "memory.h"
#include "rates.h"

#define PLAN_GIVE(value, name) "give --recompute " name,

// A CPU needs weeks for a larger model: its plan says so.
enum { PLAN_CPU_PARAMETERS = 50000000 };
#define PLAN_CPU_FLOPS 45e9 // a second and core: fox-pro-nano runs at 28 to 67 (dev/SPEED.md)

// The GPU that a plan is for.
typedef struct {
    const char* name;
    const Gpu* known;       // NULL: its speed is not known
    int64_t memory;         // bytes; 0: not known
    int compute_capability; // 90 for 9.0; 0: not known
} PlanGpu;

// Is the plan for a GPU of another machine?
static inline bool plan_for_gpu(const Options* o) {
    return o->gpu || o->gpu_memory != OPTION_UNSET || o->mfu != OPTION_UNSET;
}

// The GPU of --gpu and --gpu-memory; of memory 0 where neither is given. Dies where its name is not known.
static inline PlanGpu plan_gpu_given(const Options* o) {
    PlanGpu gpu = {"a GPU", NULL, 0, 0};
    if (o->gpu) {
        char names[1024];
        gpu_names(names, sizeof names);
        gpu.known = gpu_find(o->gpu);
        if (!gpu.known) die("--gpu %s: not one of %s; of another GPU give --gpu-memory GIB", o->gpu, names);
        gpu.name = gpu.known->name;
        gpu.compute_capability = gpu.known->compute_capability;
        gpu.memory = (int64_t)(gpu.known->gib * (double)(1 << 30));
    }
    if (o->gpu_memory != OPTION_UNSET) gpu.memory = (int64_t)(o->gpu_memory * (double)(1 << 30));
    return gpu;
}

typedef struct GpuPlan {
    const Run* run;
    PlanGpu gpu;         // this machine's, or with --dry-run the one that is planned for
    int64_t free_bytes;  // on it
    int64_t cache_bytes; // of the largest cache of a sample or --eval-requests while training
    int64_t besides;     // bytes that everything but activations needs
    int64_t room;        // bytes for activations, where the GPU's memory is known
    int recompute;       // the level that plan_fit has chosen
    bool estimated;      // by the CPU trainer: attention's scratch is that of Hopper, and no cache
    // Bytes of activations and scratch of a pass over [B,T] tokens, of T of a sequence on this rank, with the
    // buffers of --fp8 and --sequence-ranks
    int64_t (*pass_bytes)(const struct GpuPlan* plan, int64_t B, int64_t T, Recompute recompute);
    void* model; // the GPU trainer's, for pass_bytes
} GpuPlan;

static inline int64_t plan_pass_bytes(const GpuPlan* p, int64_t B, Recompute recompute) {
    return p->pass_bytes(p, B, sequence_tokens(&p->run->group, p->run->options.seq_len), recompute);
}

// Does it train with GEMMs in FP8? --dump shows the gradients of bf16.
static inline bool plan_fp8(const Run* run) {
    return run->options.fp8 && run_has_gradients(run) && run->mode != RUN_DUMP;
}

// Bytes of weights and gradients, and of the weights in FP8.
static inline int64_t plan_weights_bytes(const Run* run, bool train) {
    return gpu_weights_bytes(&run->config, &run->table, train) +
           (plan_fp8(run) ? fp8_weight_bytes(&run->config, &run->table) : 0);
}

// Dies where --fp8 is not supported.
static inline void plan_check_fp8(const Run* run, const PlanGpu* gpu) {
    if (!plan_fp8(run)) return;
    fp8_check(&run->config, sequence_tokens(&run->group, run->options.seq_len));
    if (gpu->compute_capability > 0 && gpu->compute_capability < 89)
        die("--fp8: %s has compute capability %d.%d, and FP8 begins with 8.9 (Ada, Hopper): leave it out",
            gpu->name, gpu->compute_capability / 10, gpu->compute_capability % 10);
}

// The level that a training is planned for: --recompute, or the first that fits; -1: none fits.
static inline int plan_recompute(const GpuPlan* p) {
    const int64_t wanted = p->run->options.recompute;
    if (p->gpu.memory == 0) return wanted == OPTION_UNSET ? RECOMPUTE_NONE : (int)wanted;
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++)
        if ((wanted == OPTION_UNSET || wanted == level) &&
            plan_pass_bytes(p, p->run->micro_batch, (Recompute)level) <= p->room)
            return level;
    return -1;
}

// Bytes of the rank's masters. Without gradients they are freed before activations are allocated (upload in
// train_fox.cu).
static inline int64_t plan_masters_bytes(const Run* run) { return gpu_shard_bytes(&run->shard) / 3; }

// What makes a pass smaller.
static inline const char* plan_lower(const Run* run) {
    return run->micro_batch > 1 ? "lower --micro-batch or --seq-len" : "lower --seq-len";
}

// What to do about a training that does not fit: the first level above that of --recompute that does, or less
// work.
static inline const char* plan_advice(const GpuPlan* p) {
    static const char* const levels[] = {RECOMPUTE_CHOICES(PLAN_GIVE)};
    const int64_t wanted = p->run->options.recompute;
    const bool train = run_has_gradients(p->run), chosen = train && wanted != OPTION_UNSET;
    for (int64_t level = wanted + 1; chosen && level <= RECOMPUTE_BLOCK; level++)
        if (plan_pass_bytes(p, p->run->micro_batch, (Recompute)level) <= p->room) return levels[level];
    if (!train && plan_masters_bytes(p->run) > p->room)
        return "take a larger GPU, or several: the weights are read in fp32";
    return plan_lower(p->run);
}

// Collective: the cheapest level that fits on all ranks' GPUs; -1 where it fits nowhere on one of them.
static inline int plan_agree(World* world, int mine) {
    int agreed = mine;
    int* all = (int*)xcalloc((size_t)world->size, sizeof(int));
    world_allgather(world, all, &mine, sizeof mine);
    for (int r = 0; r < world->size; r++)
        agreed = all[r] < 0 || agreed < 0 ? -1 : all[r] > agreed ? all[r] : agreed;
    free(all);
    return agreed;
}

// Collective: fills besides, room and recompute: --recompute, or the first level whose activations fit; -1:
// none fits. Without gradients FORWARD_ONLY or -1.
static inline void plan_fit(GpuPlan* p) {
    const Run* run = p->run;
    const bool train = run_has_gradients(run);
    plan_check_fp8(run, &p->gpu);
    p->besides = plan_weights_bytes(run, train) + (train ? gpu_shard_bytes(&run->shard) : 0) +
                 GPU_WORKSPACE_BYTES + gpu_overhead_bytes(&run->shard) + p->cache_bytes + GPU_SPARE_BYTES;
    p->room = p->free_bytes - p->besides;
    int fits = -1;
    if (train)
        fits = plan_recompute(p);
    else if (plan_masters_bytes(run) <= p->room &&
             plan_pass_bytes(p, run->micro_batch, FORWARD_ONLY) <= p->room)
        fits = FORWARD_ONLY;
    p->recompute = plan_agree(run->world, fits);
}

// Prints what each level of recomputation needs, or the largest micro-batch that fits with it. `planned` is
// the run's level; does it fit?
static inline void plan_print_levels(const GpuPlan* p, Recompute planned, bool fits) {
    const Run* run = p->run;
    const char* level_name = option_recompute_names[planned];
    if (p->gpu.memory > 0)
        printf("%s: %.1f GiB; recompute %s%s%s\n", p->gpu.name, (double)p->gpu.memory / (1 << 30), level_name,
               fits ? "" : " is not enough: ", fits ? "" : plan_advice(p));
    else
        printf("no GPU or no driver was found here: what fits is not known; planned for recompute %s\n"
               "(--gpu NAME or --gpu-memory GIB plans for another machine's)\n",
               level_name);
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        int64_t B = 0;
        if (p->gpu.memory == 0) {
            const int64_t bytes = p->besides + plan_pass_bytes(p, run->micro_batch, (Recompute)level);
            printf("  --recompute %-6s needs a GPU with %.1f GiB free\n", option_recompute_names[level],
                   (double)bytes / (1 << 30));
            continue;
        }
        while (B < run->batch_sequences && plan_pass_bytes(p, B + 1, (Recompute)level) <= p->room) B++;
        printf("  --recompute %-6s largest micro-batch that fits: %s\n", option_recompute_names[level],
               counted(B, "sequence").text);
    }
}

// Prints where a rate comes from.
static inline void plan_print_source(const PlannedRate* rate, const Run* run) {
    const MeasuredRate* row = rate->measured;
    if (row)
        printf("  the MFU measured with %s at %s on an %s%s\n", row->model,
               counted(row->seq_len, "token").text, row->gpu,
               rate->tokens[RATE_SPREAD] > 0 ? ", nothing pruned" : "");
    else if (run->options.mfu != OPTION_UNSET)
        printf("  an MFU of %g%%, as --mfu says\n", run->options.mfu);
    else
        printf("  an MFU of %g%%, assumed, nothing pruned: no such model was measured on such a GPU; --mfu "
               "sets another\n",
               RATE_ASSUMED_MFU);
}

// Tokens that the training's time is planned for: what it reads without gradients, to measure the held-out
// loss, counts as a part of them.
static inline double plan_measured_tokens(const Run* run) {
    const int64_t measures = run_measures_left(run, run->options.val_data != NULL, 0);
    const int64_t tokens = run->options.val_data ? run->options.val_tokens : 0;
    return OPTIONS_FORWARD_SHARE * (double)measures * (double)tokens;
}
static inline double plan_tokens(const Run* run) {
    return (double)run->options.max_tokens + plan_measured_tokens(run);
}

// Prints how much of the time measures of the held-out loss take.
static inline void plan_print_measures(const Run* run) {
    const double tokens = plan_measured_tokens(run);
    if (tokens > 0)
        printf("  of which %.2g%% measures the held-out loss, at most --val-tokens %lld each time\n",
               100 * tokens / plan_tokens(run), (long long)run->options.val_tokens);
}

// Tokens a second of the training on run_ranks GPUs.
static inline double plan_rate(const Run* run, const PlannedRate* rate, RateKind kind) {
    const double busiest = (double)run_rank_batches(run) / (double)run->micro_batches;
    const double of_shared = rate_shared[run->group.size > 2][kind];
    const double of_linear = run_ranks(run) == 1 ? 1 : run->group.size > 1 ? of_shared : RATE_OF_LINEAR;
    return rate->tokens[kind] * of_linear * run->group.size / busiest;
}

// Prints the time of the training on run_ranks GPUs.
static inline void plan_print_time(const Run* run, const Gpu* gpu, Recompute recompute) {
    if (!gpu) {
        printf("time                 not known without the GPU's speed%s\n",
               run->options.gpu_memory != OPTION_UNSET ? ": --gpu names it" : "");
        return;
    }
    const PlannedRate rate = rate_plan(run, gpu, recompute);
    if (rate.tokens[RATE_UNPRUNED] == 0) {
        printf("time                 not known: no model near this one was measured; --mfu plans without\n");
        return;
    }
    const int ranks = run_ranks(run);
    const bool shares = run->group.size > 1;
    const double* of_shared = rate_shared[run->group.size > 2];
    double tokens[NUM_RATES], seconds[NUM_RATES];
    char text[32];
    for (int kind = 0; kind < NUM_RATES; kind++) {
        tokens[kind] = plan_rate(run, &rate, (RateKind)kind);
        seconds[kind] = plan_tokens(run) / tokens[kind];
    }
    printf("time               %15s on %s, %.4g GPU-hours: %.0f tokens/s\n",
           duration_text(text, seconds[RATE_UNPRUNED]), counted(ranks, "GPU").text,
           seconds[RATE_UNPRUNED] / 3600 * ranks, tokens[RATE_UNPRUNED]);
    plan_print_measures(run);
    plan_print_source(&rate, run);
    if (plan_fp8(run) && rate.measured) printf("  measured without --fp8\n");
    if (ranks > 1 && !shares)
        printf("  %.0f%% of linear, as measured with up to four GPUs of one host\n", 100 * RATE_OF_LINEAR);
    if (shares) {
        printf("  %.0f%% of linear, as measured with two GPUs", 100 * of_shared[RATE_UNPRUNED]);
        if (rate.tokens[RATE_SPREAD] > 0)
            printf("; with gates as below %.0f%%, and %.0f%%%s", 100 * of_shared[RATE_SPREAD],
                   100 * of_shared[RATE_INITIAL], run->group.size > 2 ? " as measured with four" : "");
        printf("\n");
    }
    if (rate.tokens[RATE_SPREAD] == 0) return;
    printf("  half of attention pruned, as with gates spread over all lengths: %s (%.0f tokens/s)\n",
           duration_text(text, seconds[RATE_SPREAD]), tokens[RATE_SPREAD]);
    if (rate.tokens[RATE_INITIAL] > 0)
        printf("  while gates are as they begin: %s (%.0f tokens/s)\n",
               duration_text(text, seconds[RATE_INITIAL]), tokens[RATE_INITIAL]);
}

// Prints the whole plan, after plan_fit.
static inline void plan_print(const GpuPlan* p) {
    const Run* run = p->run;
    const int64_t wanted = run->options.recompute;
    const Recompute level = p->recompute >= 0        ? (Recompute)p->recompute
                            : wanted == OPTION_UNSET ? RECOMPUTE_BLOCK
                                                     : (Recompute)wanted;
    const MemoryRow rows[] = {
        {"weights, gradients", plan_weights_bytes(run, true)},
        {"masters, moments", gpu_shard_bytes(&run->shard)},
        {p->estimated ? "activations, about" : "activations", plan_pass_bytes(p, run->micro_batch, level)},
        {"cuBLAS workspaces", GPU_WORKSPACE_BYTES},
        {"driver, exchange", gpu_overhead_bytes(&run->shard)},
        {"samples, requests", p->cache_bytes}};
    run_print_memory(rows, (int)(sizeof rows / sizeof rows[0]) - p->estimated);
    plan_print_levels(p, level, p->recompute >= 0);
    plan_print_time(run, p->gpu.known, level);
    run_print_plan(run);
}

// The line on device and implementation of a run that computes losses, after plan_fit. attention: by what
// kernels; NULL: the model has none. gradients: what moves them between GPUs; NULL: nothing does.
static inline void plan_describe(char* text, size_t size, const GpuPlan* p, const char* attention,
                                 const char* gradients) {
    const Run* run = p->run;
    char held[96];
    if (run_has_gradients(run))
        snprintf(held, sizeof held, "recompute %s", option_recompute_names[p->recompute]);
    else
        snprintf(held, sizeof held, "%.2f GiB of weights and %.2f GiB of activations",
                 (double)gpu_weights_bytes(&run->config, &run->table, false) / (1 << 30),
                 (double)plan_pass_bytes(p, run->micro_batch, FORWARD_ONLY) / (1 << 30));
    snprintf(text, size, "%s, compute capability %d.%d: %s%s%s%s%s%s%s%s\n", p->gpu.name,
             p->gpu.compute_capability / 10, p->gpu.compute_capability % 10, attention ? "attention by " : "",
             attention ? attention : "", attention ? ", " : "", plan_fp8(run) ? "GEMMs in FP8, " : "",
             gradients ? "gradients by " : "", gradients ? gradients : "", gradients ? ", " : "", held);
}

// ----------------------------------------------------------------------------
// by the CPU trainer

static inline int64_t plan_estimated_bytes(const GpuPlan* plan, int64_t B, int64_t T, Recompute recompute) {
    const Run* run = plan->run;
    return gpu_pass_bytes(&run->config, &run->table, B, T, run->group.size, plan_fp8(run), recompute);
}

// Prints the plan for the GPU that --gpu or --gpu-memory names. Dies where only the GPU trainer can plan.
static inline void plan_print_estimate(const Run* run) {
    GpuPlan p = {.run = run,
                 .gpu = plan_gpu_given(&run->options),
                 .estimated = true,
                 .pass_bytes = plan_estimated_bytes};
    if (p.gpu.memory == 0) die("--mfu: of which GPU? give --gpu NAME");
    if (!config_all_attention(&run->config))
        die("--gpu: the memory of %s is planned by ./train_foxcu alone: give it the same options, it needs "
            "no GPU",
            config_class(&run->config)->architecture);
    gpu_check_model(&run->config, run->options.attention == ATTENTION_CUDNN, run->options.sequence_ranks);
    const int64_t dh = config_head_size(&run->config);
    if (dh != 64 && dh != 128)
        die("--gpu: attention on the GPU has kernels for head sizes 64 and 128, not %lld", (long long)dh);
    p.free_bytes = p.gpu.memory;
    plan_fit(&p);
    plan_print(&p);
    if (run->options.sample_every > 0 || run->eval_tokens > 0)
        printf("without the cache of --sample-every and --eval-requests, which ./train_foxcu --dry-run plans "
               "too\n");
}

// What the CPU trainer plans with
typedef struct {
    const Run* run;
    int64_t activations; // bytes
    int64_t cache;       // bytes of samples and requests
    double limit;        // bytes that the ranks of this host share
    int element_bytes, threads;
} CpuPlan;

enum { PLAN_CPU_ROWS = 6 };

// Writes the plan's rows, the cache's last, and returns the bytes without it: samples are left out where it
// has no room later. Several ranks exchange gradients bucket by bucket: rank 0 then holds a second bucket,
// that of another rank (world_sum_reals).
static inline double plan_cpu_memory(MemoryRow rows[PLAN_CPU_ROWS], const CpuPlan* p) {
    const int64_t weights = p->run->table.count * p->element_bytes, ranks = run_ranks(p->run);
    const Shard whole = params_shard(&p->run->table, 0, 1);
    const int64_t bucket = shard_largest_part(&whole) * p->element_bytes;
    rows[0] = (MemoryRow){"weights", weights};
    rows[1] =
        ranks > 1 ? (MemoryRow){"gradients, exchange", weights + bucket} : (MemoryRow){"gradients", weights};
    rows[2] = (MemoryRow){"AdamW's moments", 2 * weights / ranks};
    rows[3] = (MemoryRow){"checkpoint being made", 3 * weights / ranks};
    rows[4] = (MemoryRow){"activations", p->activations};
    rows[5] = (MemoryRow){"samples, requests", p->cache};
    double bytes = 0;
    for (int i = 0; i < PLAN_CPU_ROWS - 1; i++) bytes += (double)rows[i].bytes;
    return bytes;
}

// Fails where a training takes more memory than there is: the kernel would grant it, and kill the process
// once it is touched.
static inline bool plan_fits_cpu(const CpuPlan* p, Error* err) {
    MemoryRow rows[PLAN_CPU_ROWS];
    const int ranks = p->run->world->local_size;
    const double bytes = plan_cpu_memory(rows, p), limit = p->limit / ranks;
    if (bytes <= limit) return true;
    char takes[32], has[32];
    return fail(err, "this training takes %s%s, and this machine or its cgroup has %s; %s",
                memory_text(takes, bytes), ranks > 1 ? " a rank" : "", memory_text(has, limit),
                bytes - (double)p->activations > limit ? "take a smaller model" : plan_lower(p->run));
}

// The seconds of the training on this machine's CPUs, of `threads` a rank.
static inline double plan_cpu_seconds(const Run* run, int threads) {
    return run_flops_per_token(run) * plan_tokens(run) / (PLAN_CPU_FLOPS * threads * run_ranks(run));
}

static inline void plan_print_for_gpu(const Run* run) {
    if (run->table.non_embedding >= PLAN_CPU_PARAMETERS)
        printf("This model is for a GPU: train it with ./train_foxcu (make train_foxcu). --dry-run --gpu "
               "H100, or another\nname, plans its memory and hours there.\n");
}

// Dies where the training does not fit. Returns its seconds.
static inline double plan_check_cpu(CpuPlan p) {
    Error err;
    if (!plan_fits_cpu(&p, &err)) die("out of memory: %s", err.msg);
    return plan_cpu_seconds(p.run, p.threads);
}

// The plan of the CPU trainer: for --gpu, or the memory and the time of a training on this machine's CPU, and
// of a model for GPUs what to run instead.
static inline void plan_print_cpu(CpuPlan p) {
    const Run* run = p.run;
    const int threads = p.threads * run_ranks(run);
    MemoryRow rows[PLAN_CPU_ROWS];
    char text[32];
    Error err;
    if (plan_for_gpu(&run->options)) {
        plan_print_estimate(run);
        return;
    }
    plan_cpu_memory(rows, &p);
    run_print_memory(rows, p.cache > 0 ? PLAN_CPU_ROWS : PLAN_CPU_ROWS - 1);
    if (!plan_fits_cpu(&p, &err)) printf("note: %s\n", err.msg);
    printf("time               %15s on %s at %g GFLOP/s each\n",
           duration_text(text, plan_cpu_seconds(run, p.threads)), counted(threads, "thread").text,
           PLAN_CPU_FLOPS * 1e-9);
    plan_print_measures(run);
    plan_print_for_gpu(run);
    run_print_plan(run);
}

// ----------------------------------------------------------------------------
// before a training

// Leaves the run what the GPU trainer knows of its time, after plan_fit.
static inline void plan_set_rates(Run* run, const GpuPlan* p, double peak_flops) {
    run->peak_flops = peak_flops;
    if (!p->gpu.known || !run_has_gradients(run) || p->recompute < 0) return;
    const PlannedRate rate = rate_plan(run, p->gpu.known, (Recompute)p->recompute);
    if (rate.tokens[RATE_UNPRUNED] > 0)
        run->planned_seconds = plan_tokens(run) / plan_rate(run, &rate, RATE_UNPRUNED);
}

// Prints the time of the steps that a training has before it, as far as it is planned.
static inline void plan_print_start(const Run* run, bool on_cpu) {
    char text[32];
    const Options* o = &run->options;
    const int64_t steps = run->last_step - run->state.step;
    if (steps <= 0 || run->planned_seconds == 0) return;
    const double share = (double)steps * (double)o->batch_tokens / (double)o->max_tokens;
    printf("planned to step %lld: %s%s, as --dry-run has it\n", (long long)run->last_step,
           duration_text(text, share * run->planned_seconds),
           config_prunes(&run->config) && !on_cpu ? " with nothing pruned" : "");
    if (on_cpu) plan_print_for_gpu(run);
}
