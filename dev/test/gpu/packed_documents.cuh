/*
The part `documents` of test_foxcu: packed documents (document_reset) on the GPU, against the CPU trainer, and
losses that do not depend on the document before.

Included by test_fox.cu behind check_variant.
*/
#pragma once

// Other tokens before the document that begins at `wall` change no loss in it. A bit may change where tokens
// of both share a tile of attention: online softmax then rescales at other times.
static void check_wall(const char* spec, int64_t T, int64_t wall) {
    cpu::Model reference = cpu::variant_model(spec, 2, T);
    const int64_t V = reference.config.vocab_size, end_of_text = config_end_of_text(&reference.config);
    Model model = new_model(&reference.config, reference.params, 2, T, RECOMPUTE_NONE, false);
    std::vector<int32_t> inputs((size_t)(2 * T));
    PassResult passes[2];
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < 2 * T; i++) {
            bool other = pass && i % T < wall;
            inputs[(size_t)i] = (int32_t)((i * 7 + i / 5 + (other ? 1 : 0)) % V);
            if (i % T > wall && inputs[(size_t)i] == end_of_text) inputs[(size_t)i] = 0;
            if (i % T == wall) inputs[(size_t)i] = (int32_t)end_of_text;
        }
        passes[pass] = run_pass(&model, inputs.data(), inputs.data());
    }
    double most = 0;
    int64_t changed_before = 0;
    for (int64_t i = 0; i < 2 * T; i++) {
        double by =
            fabs(fabs((double)passes[0].losses[(size_t)i]) - fabs((double)passes[1].losses[(size_t)i]));
        if (i % T >= wall) most = worse(most, by);
        changed_before += i % T < wall && by > 0;
    }
    CHECK(changed_before > 0, "%s: the case tests nothing", spec);
    // Sums of log gates of all tokens before round otherwise, and without QK norm pruning depends on all
    // tokens.
    const bool exact = wall % ATTENTION_FIRST_QUERY == 0 && !config_has_gate(&model.config);
    // Each layer passes on what rounds otherwise: an H200 has up to 2.0e-2 with two layers and 5.5e-2 with six;
    // without walls 1.8 to 3.0.
    const double limit = exact ? 0 : 2e-2 * (double)model.config.num_hidden_layers;
    CHECK(most <= limit, "%s, T %lld: losses behind the wall at %lld change by up to %g, more than %g", spec,
          (long long)T, (long long)wall, most, limit);
    model_free(&model);
    cpu::model_free(&reference);
}

// A sequence of one token is a document as it is: the same bits with and without document_reset.
static void check_one_token(const char* spec) {
    char name[256];
    PassResult passes[2];
    for (int resets = 0; resets < 2; resets++) {
        snprintf(name, sizeof name, "%s document_reset=%s", spec, resets ? "true" : "false");
        cpu::Model reference = cpu::variant_model(name, 1, 1);
        Model model = new_model(&reference.config, reference.params, 1, 1, RECOMPUTE_NONE, false);
        const int32_t token = 2;
        passes[resets] = run_pass(&model, &token, &token);
        model_free(&model);
        cpu::model_free(&reference);
    }
    CHECK(same_bits(passes[0].losses, passes[1].losses) && same_bits(passes[0].grads, passes[1].grads),
          "%s: one token differs", name);
}

static void test_documents(void) {
    // tokens are random: a document has as many tokens as the vocabulary in the mean
    static const char* const specs[] = {"fox-pro hidden_size=128",
                                        "fox-llama hidden_size=256",
                                        "transformer-pro hidden_size=128",
                                        "transformer-llama hidden_size=256",
                                        "transformer-swa window_size=70 hidden_size=128",
                                        "fox-pro window_size=70 hidden_size=256",
                                        "fox-pro num_heads=4 num_kv_heads=2 hidden_size=256",
                                        "fox-llama fgate_type=bias_only hidden_size=128",
                                        "fox-llama fgate_type=fixed hidden_size=128",
                                        "fox-pro log_pruning_tolerance=null hidden_size=128",
                                        "transformer-pro use_k_shift=false qk_norm=false hidden_size=256"};
    for (const char* spec : specs) {
        char name[256];
        for (int V : {23, 120}) {
            snprintf(name, sizeof name, "%s intermediate_size=72 document_reset=true vocab_size=%d", spec, V);
            check_variant(name, 2, 300);
        }
        check_variant(name, 1, 1000);
        for (int64_t wall : {1, 100, 383, 384, 385, 450}) check_wall(name, 500, wall);
        snprintf(name, sizeof name, "%s intermediate_size=72", spec);
        check_one_token(name);
    }
    for (const char* spec :
         {"mamba2 state_size=128 hidden_size=64", "deltanet hidden_size=256 intermediate_size=72",
          "gated-deltanet head_dim=128 hidden_size=256 intermediate_size=72",
          "hgrn2 use_lower_bound=true hidden_size=256 intermediate_size=72"})
        for (int V : {3, 8, 23, 120}) {
            char name[256];
            snprintf(name, sizeof name, "%s vocab_size=%d", spec, V);
            check_one_token(name);
            snprintf(name, sizeof name, "%s document_reset=true vocab_size=%d", spec, V);
            // In documents of 3 tokens gradients of convolutions nearly cancel: weights that change by 2^-8
            // change them by 8% (DeltaNet) and 14% (Mamba-2), in documents of 8 tokens and without walls by 2
            // to 3%.
            if (V > 3) check_variant(name, 2, 300);
            for (int64_t wall : {1, 64, 127, 128, 129, 200}) check_wall(name, 300, wall);
        }
    char name[256];
    check_one_token(STACK);
    snprintf(name, sizeof name, "%s document_reset=true vocab_size=120", STACK);
    check_variant(name, 2, 300); // gradients of shorter documents are less certain
    for (int64_t wall : {1, 64, 129, 200}) check_wall(name, 300, wall);
}
