/*
Parts of test_sequence.cu: halos (llmc/sequence/halo.cuh), and shared sequences with --fp8.
*/
#pragma once

#include "shared_ranks.cuh"

// ----------------------------------------------------------------------------
// halos

enum { HALO = 128 };

// Makes all of a model's gates forget alike: a log gate is some logsigmoid(bias).
static void set_gates(Batch* batch, double bias) {
    const ParamTable* table = &batch->start.table;
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        for (int64_t i = 0; i < p->count && p->kind == P_FGATE_BIAS; i++)
            batch->start.params[p->offset + i] = bias;
    }
}

// The largest error of a tensor's gradient, as compare_results has it
static double largest_error(const ParamTable* table, const Result* got, const Result* alone) {
    const double least = 1e-2 * norm_of(alone->grads.data(), table->count);
    double worst_error = 0;
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        const double error =
            difference(&got->grads[(size_t)p->offset], &alone->grads[(size_t)p->offset], p->count, least);
        worst_error = std::max(worst_error, error);
    }
    return worst_error;
}

// A rank's tokens forget what is before their halo, but need much of the halo. Then so near to one rank's
// results are those with it, and far those of the ranks' tokens as sequences of their own.
static void check_halos(const char* name, int64_t T, int ranks) {
    char label[300];
    Batch batch(name, 1, T);
    set_gates(&batch, 3);
    snprintf(label, sizeof label, "%s, halos", name);
    Result alone = run_alone(&batch, 1, T), first = {};
    const Result apart = run_alone(&batch, ranks, T / ranks);
    const double missing = largest_error(&batch.start.table, &apart, &alone);
    CHECK(missing > 2 * GRADIENT_LIMIT, "%s, %d ranks: without halos off by only %.2e", name, ranks, missing);
    always_halo = HALO;
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        Model models[RANKS_MOST];
        for (int r = 0; r < ranks; r++)
            models[r] = rank_model(&batch.start.config, batch.start.params, 1, T, sequence_group(r, ranks),
                                   (Recompute)recompute);
        connect(models, ranks, batch.inputs);
        for (int again = 0; again < 3; again++) {
            const Result result = run_ranks(models, ranks, batch.inputs, batch.targets);
            if (first.grads.empty()) {
                CHECK((double)result.kept <= 1.05 * (double)alone.kept,
                      "%s, %d ranks: %llu blocks, alone %llu", label, ranks, result.kept, alone.kept);
                alone.kept = result.kept; // those before the halo are not pruned, but not there
                compare_results(label, &models[0], ranks, &result, &alone);
                first = result;
            }
            CHECK(result.grads == first.grads && result.losses == first.losses,
                  "%s, %d ranks, --recompute %s, pass %d: other bits", label, ranks,
                  option_recompute_names[recompute], again);
        }
        free_models(models, ranks);
    }
    always_halo = 0;
}

// What a rank answers for its last tokens, against the rule in double. Gates of `bias` and the model's
// weights, so that U is 8 where these are 1; keys: as the kernel's.
static void check_suffices(double bias, double keys, bool expected) {
    const int heads = 40, stride = 48, dh = 64; // more than warps
    const HeadShape shape = {
        .B = 1, .T = HALO, .NH = heads, .dh = dh, .row_stride = stride, .weight_stride = dh};
    const double logf = -log1p(exp(-bias)), U = 8 * PRUNING_ROUNDING;
    CHECK((2 * U + log(keys) + (HALO - 1) * logf < -10) == expected, "the case of bias %g is another", bias);
    for (int far = -1; far < heads; far += 13) { // a head that remembers everything: none, or one of them
        std::vector<bf16> z((size_t)(HALO * stride)), w((size_t)(heads * dh), __float2bfloat16(1));
        Floats biases((size_t)heads, (float)bias);
        if (far >= 0) biases[(size_t)far] = 20;
        for (int h = 0; h < stride; h++)
            z[(size_t)h] = __float2bfloat16(-60); // the first token does not count
        int32_t answer = -1, *suffices = (int32_t*)device_bytes(sizeof answer);
        bf16 *dz = (bf16*)device_bytes(z.size() * 2), *dw = (bf16*)device_bytes(w.size() * 2);
        float* db = (float*)device_bytes(biases.size() * 4);
        CUDA_CHECK(cudaMemcpy(dz, z.data(), z.size() * 2, cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemcpy(dw, w.data(), w.size() * 2, cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemcpy(db, biases.data(), biases.size() * 4, cudaMemcpyHostToDevice));
        const Pruning rule = {.q_weight = dw, .k_weight = dw, .log_tolerance = -10};
        CUDA_LAUNCH(halo_suffices_kernel, 1, HALO_THREADS, 0, suffices, dz, db, keys, rule, shape);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(&answer, suffices, sizeof answer, cudaMemcpyDeviceToHost));
        CHECK(answer == (expected && far < 0), "bias %g, %g keys, head %d remembers: %d", bias, keys, far,
              answer);
        for (void* p : {(void*)suffices, (void*)dz, (void*)dw, (void*)db}) device_free(p);
    }
}

static void test_halos(void) {
    check_suffices(0, 1e6, true);    // 16.1 + 13.8 - 88.0
    check_suffices(0.98, 1e6, true); // 16.1 + 13.8 - 40.5: by 0.5
    check_suffices(0.98, 1e7, false);
    check_suffices(1.1, 1e6, false);
    check_suffices(3, 1, false);
    char name[256];
    for (const char* model : {"fox-pro num_heads=4 hidden_size=256", "fox-pro num_heads=4 hidden_size=512",
                              "fox-pro num_heads=8 num_kv_heads=4 hidden_size=512",
                              "fox-pro num_heads=4 hidden_size=256 qk_norm_share_param_across_head=true",
                              "fox-llama num_heads=4 hidden_size=256 qk_norm=true use_rope=true",
                              "fox-llama num_heads=4 hidden_size=256 qk_norm=true fgate_type=bias_only"})
        for (int ranks : {2, 4}) {
            snprintf(name, sizeof name, "%s intermediate_size=72", model);
            check_halos(name, ranks * HALO, ranks); // all of the rank before is the halo
            check_halos(name, ranks * 3 * HALO, ranks);
        }
}

// ----------------------------------------------------------------------------
// --fp8

// The end of a first step, in bf16: scales from the largest amax of all ranks, as model_update has them.
// Weights are copied to FP8 by the next pass.
static void take_scales(Model* models, int ranks, bool keep) {
    const int64_t n = fp8_delayed_tensors(models[0].fp8);
    std::vector<uint32_t> own((size_t)n), most((size_t)n);
    for (int r = 0; r < ranks; r++) {
        fp8_collect_amax(models[r].fp8, models[r].stream); // and zeroes what the kernels add to
        CUDA_CHECK(cudaStreamSynchronize(models[r].stream));
        device_download(own.data(), models[r].fp8->amax, n * (int64_t)sizeof own[0]);
        for (size_t i = 0; i < own.size(); i++) most[i] = std::max(most[i], own[i]);
    }
    const int32_t one = 1;
    int32_t* finite = (int32_t*)device_bytes((1 + FP8_DELAYED) * sizeof one);
    CUDA_CHECK(cudaMemset(finite, 0, (1 + FP8_DELAYED) * sizeof one));
    CUDA_CHECK(cudaMemcpy(finite, &one, sizeof one, cudaMemcpyHostToDevice));
    for (int r = 0; r < ranks && keep; r++) {
        CUDA_CHECK(
            cudaMemcpy(models[r].fp8->amax, most.data(), (size_t)n * sizeof most[0], cudaMemcpyHostToDevice));
        fp8_update(models[r].fp8, 1, finite, finite + 1, models[r].stream);
        CUDA_CHECK(cudaStreamSynchronize(models[r].stream));
        models[r].weights_in_flight = true;
    }
    device_free(finite);
}

// The gradients of a step in FP8, after one in bf16. Passes that load kernels measure what they read; it does
// not count.
static Result run_fp8(Model* models, int ranks, const Batch* batch) {
    take_scales(models, ranks, false);
    (void)run_ranks(models, ranks, batch->inputs, batch->targets);
    take_scales(models, ranks, true);
    if (ranks > 1) load_kernels(models, ranks, batch->inputs); // makes the weights' copies, too
    return run_ranks(models, ranks, batch->inputs, batch->targets);
}

// Both compute the same with the same scales, but for the rounding of bf16 before it is rounded to FP8: an
// element at the border of two numbers of FP8 may then become the other one, which is off by up to 2^-3 of it
// (E4M3) or 2^-2 (E5M2). One of bf16 is off by up to 2^-8, so some 2^-8 / 2^-3 = 3% of the elements are, in
// norm by 0.03^(1/2) 2^-4 = 1.1% of a tensor, twice as much in E5M2, a layer; sums of GEMMs hide most.
#define FP8_SHARED_LIMIT 1e-1

static void check_fp8(const char* name, int64_t B, int64_t T, int ranks) {
    Batch batch(name, B, T);
    const Config* c = &batch.start.config;
    with_fp8 = true;
    Model alone = rank_model(c, batch.start.params, B, T, sequence_group(0, 1), RECOMPUTE_NONE);
    const Result expected = run_fp8(&alone, 1, &batch);
    CHECK(alone.fp8->scaled, "%s: not in FP8", name);
    free_models(&alone, 1);
    for (int recompute : {RECOMPUTE_NONE, RECOMPUTE_BLOCK}) {
        Model models[RANKS_MOST];
        for (int r = 0; r < ranks; r++)
            models[r] =
                rank_model(c, batch.start.params, B, T, sequence_group(r, ranks), (Recompute)recompute);
        connect(models, ranks, batch.inputs);
        const Result got = run_fp8(models, ranks, &batch);
        const double error = largest_error(&models[0].table, &got, &expected);
        CHECK(error <= FP8_SHARED_LIMIT, "%s, %d ranks, --fp8: a gradient is off by %.2e, more than %.0e",
              name, ranks, error, FP8_SHARED_LIMIT);
        printf("%s, %d ranks, --fp8, --recompute %s: gradients off by up to %.1e, limit %.0e\n", name, ranks,
               option_recompute_names[recompute], error, FP8_SHARED_LIMIT);
        free_models(models, ranks);
    }
    with_fp8 = false;
}

static void test_shared_fp8(void) {
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
            device_attribute(cudaDevAttrComputeCapabilityMinor) <
        89) {
        SKIP("--fp8, which this GPU does not have");
        return;
    }
    const char* model = "fox-pro num_heads=4 hidden_size=256 intermediate_size=704 vocab_size=257";
    check_fp8(model, 1, 512, 2);
    check_fp8(model, 2, 256, 2);
    check_fp8(model, 1, 1024, 4);
}
