/*
Tests plan_fit of llmc/plan/plan.h without gradients: a pass fits where its activations do, and where the
fp32 weights do, which are in their place while a checkpoint is read.
*/
#include "../../../llmc/plan/plan.h"
#include "../check.h"

// Fills p with the plan of --eval on a GPU with `free_bytes` free, of one sequence of T tokens.
static void plan_of(GpuPlan* p, Run* run, int64_t free_bytes, int64_t T) {
    run->options.seq_len = T;
    *p = (GpuPlan){.run = run, .free_bytes = free_bytes, .pass_bytes = plan_estimated_bytes};
    plan_fit(p);
}

int main(void) {
    static World world;
    static Run run;
    GpuPlan p;
    Recipe recipe;
    Error err;
    world.size = 1;
    run.mode = RUN_EVAL;
    run.world = &world;
    run.micro_batch = 1;
    run.group = sequence_group(0, 1);
    options_defaults(&run.options);
    run.options.sequence_ranks = 1;
    CHECK(config_preset_recipe(&run.config, &recipe, "fox-pro-125m", RECIPE_OWN, &err), "%s", err.msg);
    run.table = params_build_for(&run.config, 1);
    run.shard = params_shard(&run.table, 0, 1);

    const int64_t masters = 4 * shard_count(&run.shard), few = 128, many = 65536;
    plan_of(&p, &run, 0, few);
    const int64_t besides = p.besides;
    CHECK(plan_pass_bytes(&p, 1, FORWARD_ONLY) < masters, "a short pass is larger than the masters");
    plan_of(&p, &run, besides + masters - 1, few);
    CHECK(p.recompute == -1, "a byte too few for the masters");
    CHECK(strstr(plan_advice(&p), "fp32"), "%s", plan_advice(&p));
    plan_of(&p, &run, besides + masters, few);
    CHECK(p.recompute == FORWARD_ONLY, "the masters fit");

    plan_of(&p, &run, besides, many);
    const int64_t activations = plan_pass_bytes(&p, 1, FORWARD_ONLY);
    CHECK(activations > masters, "a long pass is smaller than the masters");
    plan_of(&p, &run, besides + activations - 1, many);
    CHECK(p.recompute == -1 && strstr(plan_advice(&p), "--seq-len"), "%s", plan_advice(&p));
    plan_of(&p, &run, besides + activations, many); // the masters are gone when there are activations
    CHECK(p.recompute == FORWARD_ONLY, "the activations fit");
    params_free(&run.table);
    return test_report();
}
