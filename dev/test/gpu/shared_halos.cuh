/*
The part of test_sequence.cu that tests halos (llmc/sequence/halo.cuh).
*/
#pragma once

#include "shared_ranks.cuh"

// ----------------------------------------------------------------------------
// halos

enum { HALO = 128 };

// Makes all gates of each `every`-th layer, from layer 0 on, forget alike: a log gate is some
// logsigmoid(bias).
static void set_gates(Batch* batch, int64_t every, double bias) {
    const ParamTable* table = &batch->start.table;
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        const bool chosen = p->kind == P_FGATE_BIAS && p->layer % every == 0;
        for (int64_t i = 0; i < p->count && chosen; i++) batch->start.params[p->offset + i] = bias;
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
    set_gates(&batch, 1, 3);
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
        CUDA_LAUNCH(halo_answer_kernel, 1, HALO_THREADS, 0, suffices, dz, db, keys, rule, shape);
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
                              "fox-pro num_heads=4 hidden_size=256 layer_types=attention,attention:rope",
                              "fox-llama num_heads=4 hidden_size=256 qk_norm=true fgate_type=bias_only"})
        for (int ranks : {2, 4}) {
            snprintf(name, sizeof name, "%s intermediate_size=72", model);
            check_halos(name, ranks * HALO, ranks); // all of the rank before is the halo
            check_halos(name, ranks * 3 * HALO, ranks);
        }
}
