/*
Training of whole models, for test_fox.cu: the same bits in every run, at every --recompute, saved and
resumed; on concurrent streams and as a graph. With --fp8 also: against bf16, evaluation in bf16; what is not
finite blocks the update.
*/
#pragma once

// Takes the scales that fp8_record has written, to be freed; NULL: none.
static void restore_scales(Model* model, char* scales) {
    Error err;
    Json record;
    JsonWriter w = json_writer(0);
    if (!scales) return;
    json_begin_object(&w, NULL);
    json_put_string(&w, "fp8", scales);
    json_end(&w);
    if (!json_parse(&record, "a record", w.text, w.length, &err)) die("%s", err.msg);
    fp8_restore(model->fp8, &record, model->stream);
    json_free(&record), json_writer_free(&w), free(scales);
}

static void check_bits(const char* spec, int64_t T) {
    const int64_t B = 3, STEPS = 5, SAVED = 3;
    const float dloss = 1 / (float)(B * T);
    cpu::Model start = cpu::variant_model(spec, 1, 1);
    const Config* c = &start.config;
    State first;
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++)
        for (int again = 0; again < 2; again++) {
            Model model = new_model(c, start.params, B, T, (Recompute)recompute, false);
            take_steps(&model, 1, STEPS, dloss);
            State state = fetch_state(&model);
            if (first.params.empty()) first = state;
            CHECK(read_stats(&model).finite, "%s: the loss of step 5 is not finite", spec);
            CHECK(same_state(state, first), "%s, --recompute %s, run %d: other bits", spec,
                  option_recompute_names[recompute], again);
            model_free(&model);
        }
    Model before = new_model(c, start.params, B, T, RECOMPUTE_NONE, false);
    take_steps(&before, 1, SAVED, dloss);
    State saved = fetch_state(&before);
    char* scales = fp8_record(before.fp8); // NULL without --fp8
    CHECK(!same_state(saved, first), "%s: two steps changed nothing", spec);
    model_free(&before);
    Model after = new_model(c, start.params, B, T, RECOMPUTE_NONE, false);
    model_upload(&after, saved.params.data(), saved.m.data(), saved.v.data());
    CHECK(same_state(fetch_state(&after), saved), "%s: the bf16 weights of a resumed run are others", spec);
    restore_scales(&after, scales);
    take_steps(&after, SAVED + 1, STEPS, dloss);
    CHECK(same_state(fetch_state(&after), first), "%s, saved and resumed: other bits", spec);
    model_free(&after);
    cpu::model_free(&start);
}

static void test_bits(void) {
    check_bits(SMALL_MODEL, 129);
    check_bits(STACK, 129);
    for (const char* spec : RECURRENT_MODELS) check_bits(spec, 129);
}

// Concurrent streams and the graph compute the bits of one kernel after another, at a size at which kernels
// do overlap.
static void check_streams(const char* spec) {
    const int64_t B = 2, T = 2048, CALLS = 20; // many, as a kernel that does not wait may still be lucky
    std::vector<int32_t> tokens((size_t)(B * T + 1));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = (int32_t)(random_u64(6, 0, i) % 257);
    cpu::Model start = cpu::variant_model(spec, 1, 1);
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        Floats grads[2]; // in sequence, as in training
        for (int training = 0; training < 2; training++) {
            Model model = new_model(&start.config, start.params, B, T, (Recompute)recompute, false);
            model_set_sequential(&model, !training);
            if (model.fp8) take_steps(&model, 1, 1, 1 / (float)(B * T)); // a first step has no scales
            feed(&model, tokens.data(), tokens.data() + 1);
            // at once, captured, replayed many times, captured for another dloss
            for (int64_t call = 0; call < CALLS; call++) {
                model_add_gradients(&model, (call + 1 < CALLS ? 1 : 3) / (float)(B * T), true);
                if (call > 0) continue;
                model_forward(&model); // of a validation between
                model_loss(&model, 0, false, NULL);
            }
            grads[training] = fetch(model.grads, model.table.count);
            model_free(&model);
        }
        CHECK(same_bits(grads[0], grads[1]), "%s%s, --recompute %s: other gradients than in sequence", spec,
              with_fp8 ? ", --fp8" : "", option_recompute_names[recompute]);
    }
    cpu::model_free(&start);
}

static void test_streams(void) {
    for (const char* spec :
         {"fox-pro hidden_size=512 num_heads=8 intermediate_size=1408 vocab_size=257 num_hidden_layers=3",
          "fox-pro num_kv_heads=2 hidden_size=512 num_heads=8 intermediate_size=1408 vocab_size=257 "
          "num_hidden_layers=3",
          "fox-llama hidden_size=512 num_heads=8 intermediate_size=1408 vocab_size=257 num_hidden_layers=3",
          "fox-llama fgate_type=bias_only document_reset=true mlp=none hidden_size=512 num_heads=8 "
          "vocab_size=257 num_hidden_layers=3",
          "transformer-pro document_reset=true qk_norm_share_param_across_head=true hidden_size=512 "
          "num_heads=4 intermediate_size=1408 vocab_size=257 num_hidden_layers=3",
          "deltanet hidden_size=512 num_heads=4 intermediate_size=1408 vocab_size=257 num_hidden_layers=3",
          "gated-deltanet head_dim=128 hidden_size=512 num_heads=3 intermediate_size=1408 vocab_size=257 "
          "num_hidden_layers=3",
          "hgrn2 hidden_size=512 num_heads=4 intermediate_size=1408 vocab_size=257 num_hidden_layers=3",
          "mamba2 state_size=128 hidden_size=512 num_heads=16 vocab_size=257 num_hidden_layers=3"})
        check_streams(spec);
}

// ----------------------------------------------------------------------------
// --fp8

// Relative errors of a pass in FP8 against bf16, of initial weights: rounding to 3 and 4 bits leaves 2.5 to
// 5% in each product. Emulated in PyTorch with such models 6e-4 and 0.15 at most; a run prints its own.
#define FP8_LOSS_LIMIT     2e-3
#define FP8_GRADIENT_LIMIT 0.25

static const char* const FP8_MODELS[] = {
    "fox-pro hidden_size=128 intermediate_size=80 vocab_size=257",
    "fox-pro hidden_size=256 intermediate_size=272 vocab_size=257",
    "fox-pro num_heads=4 num_kv_heads=2 hidden_size=256 intermediate_size=80 vocab_size=257",
    "fox-pro tie_word_embeddings=true hidden_size=128 intermediate_size=80 vocab_size=257",
    "fox-llama hidden_size=128 intermediate_size=80 vocab_size=257",
    "transformer-llama hidden_size=128 intermediate_size=80 vocab_size=257"};

// Other switches, of which bits alone are compared: output norm without gate and the reverse, windows, packed
// documents, heads of 128 channels, gates without logits or gradients
static const char* const FP8_SWITCHES[] = {
    "fox-pro use_output_gate=false document_reset=true hidden_size=128 intermediate_size=80 vocab_size=257",
    "fox-llama use_output_gate=true use_rope=true window_size=70 hidden_size=256 intermediate_size=80 "
    "vocab_size=257",
    "fox-pro qk_norm=false use_output_norm=false hidden_size=256 intermediate_size=80 vocab_size=257",
    "fox-llama fgate_type=bias_only document_reset=true hidden_size=128 intermediate_size=80 vocab_size=257",
    "fox-pro fgate_type=fixed qk_norm_share_param_across_head=true hidden_size=128 intermediate_size=80 "
    "vocab_size=257",
    "transformer-pro document_reset=true hidden_size=128 intermediate_size=80 vocab_size=257"};

// A step of which no target counts
static void take_empty_step(Model* model, const int32_t* tokens, float dloss) {
    const int64_t BT = model->B * model->T;
    const std::vector<int32_t> none((size_t)BT, TARGET_NONE);
    const StepVotes votes = {.tokens = (double)BT, .targets = 0};
    Options o;
    options_defaults(&o);
    const AdamWParams adamw = options_adamw(&o, 1e-2, 1);
    feed(model, tokens, none.data());
    CUDA_CHECK(cudaMemset(model->stats, 0, sizeof(StepStats)));
    CUDA_CHECK(cudaMemcpy(&model->stats->own.votes, &votes, sizeof votes, cudaMemcpyHostToDevice));
    model_add_gradients(model, dloss, true);
    model_update(model, &adamw, o.grad_clip);
    CHECK(read_stats(model).finite, "a step without targets is not valid");
}

// The gradient of a batch, as training computes it, and its loss.
static Floats training_gradient(Model* model, const int32_t* tokens, float dloss, double* loss) {
    const int64_t BT = model->B * model->T;
    feed(model, tokens, tokens + 1);
    CUDA_CHECK(cudaMemset(model->stats, 0, sizeof(StepStats)));
    CUDA_CHECK(cudaMemset(model->grads, 0, (size_t)model->table.count * sizeof(float)));
    model_add_gradients(model, dloss, true);
    *loss = read_stats(model).own.loss / (double)BT;
    return fetch(model->grads, model->table.count);
}

// A first step has the bits of bf16. Then the loss and each gradient are near those of bf16, and differ.
// empty: no target of the first step counts, so that the scales of gradients are not measured; they are as
// small as in steps of 65,536 tokens. With a scale of 1 all of them would become 0, an error of 1.
static void check_fp8_errors(const char* spec, bool empty) {
    const int64_t B = 2, T = 128;
    const float dloss = empty ? 1 / 65536.0f : 1 / (float)(B * T);
    cpu::Model start = cpu::variant_model(spec, 1, 1);
    draw_weights(start.params, sizeof(double), &start.table, &start.shard, &start.config, 1);
    std::vector<int32_t> tokens((size_t)(B * T + 1));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = (int32_t)(random_u64(7, 0, i) % 257);
    Floats grads[2];
    State states[2];
    PassResult passes[2];
    double loss[2], worst = 0;
    const char* where = "";
    for (int in_fp8 = 0; in_fp8 < 2; in_fp8++) {
        with_fp8 = in_fp8;
        Model model = new_model(&start.config, start.params, B, T, RECOMPUTE_QKV, false);
        if (empty)
            take_empty_step(&model, tokens.data(), dloss);
        else
            take_steps(&model, 1, 1, dloss);
        states[in_fp8] = fetch_state(&model);
        for (int again = 0; again < 3; again++) { // at once, captured, replayed
            Floats got = training_gradient(&model, tokens.data(), dloss, &loss[in_fp8]);
            CHECK(again == 0 || same_bits(got, grads[in_fp8]), "%s: gradients of call %d", spec, again);
            grads[in_fp8] = got;
        }
        passes[in_fp8] = run_pass(&model, tokens.data(), tokens.data() + 1);
        model_free(&model);
    }
    with_fp8 = false;
    CHECK(same_state(states[0], states[1]), "%s: the first step with --fp8 is not that of bf16", spec);
    CHECK(same_bits(passes[0].losses, passes[1].losses), "%s: evaluation is not in bf16", spec);
    CHECK(fabs(loss[1] / loss[0] - 1) < FP8_LOSS_LIMIT && loss[0] != loss[1], "%s: loss %g, in bf16 %g", spec,
          loss[1], loss[0]);
    std::vector<double> want(grads[0].begin(), grads[0].end());
    const double least = 1e-2 * norm_of(want.data(), (int64_t)want.size());
    ParamTable table = params_build(&start.config);
    for (int r = 0; r < table.num_rows; r++) {
        const Param* p = &table.rows[r];
        double difference = 0;
        for (int64_t i = p->offset; i < p->offset + p->count; i++)
            difference += pow((double)grads[1][(size_t)i] - want[(size_t)i], 2);
        const double error = sqrt(difference) / std::max(least, norm_of(want.data() + p->offset, p->count));
        CHECK(error < FP8_GRADIENT_LIMIT, "%s: the gradient of %s is off by %.3f", spec, p->name, error);
        if (error > worst) worst = error, where = p->name;
    }
    printf("%s%s: loss off by %.1e, limit %.0e; gradients by up to %.3f (%s), limit %g\n", spec,
           empty ? ", after a step without targets" : "", fabs(loss[1] / loss[0] - 1), FP8_LOSS_LIMIT, worst,
           where, FP8_GRADIENT_LIMIT);
    params_free(&table);
    cpu::model_free(&start);
}

// After a first step, with a weight of a layer that is not finite, or a gradient that overflows.
static void check_fp8_nan(const char* spec) {
    cpu::Model start = cpu::variant_model(spec, 1, 1);
    for (const int kind :
         {(int)P_Q_PROJ, (int)P_O_PROJ, (int)P_GATE_PROJ, (int)P_DOWN_PROJ, (int)P_MIXER_NORM}) {
        for (int value = 0; value < 3; value++) {
            Model model = new_model(&start.config, start.params, 2, 64, RECOMPUTE_NONE, false);
            take_steps(&model, 1, 2, 1 / 128.0f);
            State state = fetch_state(&model);
            const Param* p = params_find(&model.table, kind, 1);
            if (value < 2) state.params[(size_t)(p->offset + p->count / 2)] = value ? INFINITY : NAN;
            model_upload(&model, state.params.data(), state.m.data(), state.v.data());
            const State before = fetch_state(&model);
            take_steps(&model, 3, 3, value < 2 ? 1 / 128.0f : 1e30f);
            const StepStats stats = read_stats(&model);
            CHECK(!stats.finite, "%s: case %d of kind %d: loss %g and norm %g count as finite", spec, value,
                  kind, stats.own.loss, stats.grad_norm);
            CHECK(same_state(fetch_state(&model), before), "%s: case %d of kind %d changed the weights", spec,
                  value, kind);
            model_free(&model);
        }
    }
    cpu::model_free(&start);
}

static void test_fp8(void) {
    const Device device = device_open(0);
    if (device.compute_capability < 89) {
        SKIP("--fp8, which this GPU does not have");
        return;
    }
    for (const char* spec : FP8_MODELS) check_fp8_errors(spec, false);
    check_fp8_errors(FP8_MODELS[0], true);
    with_fp8 = true;
    for (const char* spec : FP8_MODELS) check_bits(spec, 128);
    for (const char* spec : FP8_SWITCHES) check_bits(spec, 128);
    check_streams(
        "fox-pro hidden_size=512 num_heads=8 intermediate_size=1408 vocab_size=257 num_hidden_layers=3");
    check_streams("transformer-llama window_size=300 document_reset=true hidden_size=512 num_heads=4 "
                  "intermediate_size=1408 vocab_size=257 num_hidden_layers=3");
    check_fp8_nan(FP8_MODELS[0]);
    with_fp8 = false;
}
