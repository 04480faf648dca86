/*
Tests invariants of train_fox.c: results are the same bits on any number of threads, gradients accumulate,
attention is causal, memory is linear in T. Extension: dev/test/eval/test_cache.c. Also tests the
initial weights.

Built in float and in double. A limit that is no bound on rounding errors has the measured errors (float,
double) in a comment.
*/
#include "trainer.h"
#include "../reals.h"
#include "variants.h"

// ----------------------------------------------------------------------------
// the whole model

// One forward and backward pass of the mean loss over `mean_over` tokens. Adds to the gradients; returns the
// sum of losses.
static double run_pass(Model* model, const int32_t* inputs, const int32_t* targets, int64_t mean_over,
                       real* logits) {
    model_forward(model, inputs);
    double loss = model_loss(model, targets, (real)(1 / (double)mean_over), true, logits);
    model_backward(model, inputs);
    return loss;
}

// Sizes that need several blocks in every GEMM and several attention tiles, and are no multiples of them.
static const char wide[] = "fox-pro hidden_size=78 num_heads=3 vocab_size=401 intermediate_size=301";

static void check_threads(const char* name) {
    const int64_t B = 2, T = 139;
    Options o;
    options_defaults(&o);
    real* weights[4] = {NULL};
    real* grads[4] = {NULL};
    double losses[4];
    int64_t count = 0;
    const int usual = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        Model model = variant_model(name, B, T);
        int32_t *inputs = random_tokens(&model, B * T, 0), *targets = random_tokens(&model, B * T, 1);
        count = model.table.count;
        for (int step = 1; step <= 2; step++) {
            memset(model.grads, 0, (size_t)count * sizeof(real));
            losses[threads] = run_pass(&model, inputs, targets, B * T, NULL);
            double norm = sqrt(global_squares(model.grads, count));
            AdamWParams adamw = options_adamw(&o, 1e-3, step);
            model_update(&model, &adamw, 1 / norm);
        }
        weights[threads] = copy_reals(model.params, count);
        grads[threads] = copy_reals(model.grads, count);
        free(inputs), free(targets);
        model_free(&model);
    }
    omp_set_num_threads(usual);
    for (int threads = 2; threads <= 3; threads++) {
        CHECK(memcmp(&losses[1], &losses[threads], sizeof(double)) == 0, "%s: loss on %d threads", name,
              threads);
        CHECK(same_bits(grads[1], grads[threads], count), "%s: gradients on %d threads", name, threads);
        CHECK(same_bits(weights[1], weights[threads], count), "%s: weights on %d threads", name, threads);
    }
    for (int threads = 1; threads <= 3; threads++) free(weights[threads]), free(grads[threads]);
}

// Changing later tokens of a sequence, or another sequence, changes no bit of earlier logits.
static void check_causality(const char* name) {
    const int64_t T = TILE + 22, B = 2, first_changed = TILE + 3;
    Model model = variant_model(name, B, T);
    int64_t V = model.config.vocab_size;
    int32_t* tokens = random_tokens(&model, B * T, 0);
    real *before = new_reals(B * T * V), *after = new_reals(B * T * V);
    model_forward(&model, tokens);
    model_loss(&model, tokens, 0, false, before);
    for (int64_t t = first_changed; t < B * T; t++) tokens[t] = (int32_t)((tokens[t] + 1) % V);
    model_forward(&model, tokens);
    model_loss(&model, tokens, 0, false, after);
    CHECK(same_bits(before, after, first_changed * V), "%s: a later token changes earlier logits", name);
    for (int64_t t = first_changed; t < B * T; t++)
        CHECK(!same_bits(before + t * V, after + t * V, V), "%s: the logits of token %lld must differ", name,
              (long long)t);
    free(tokens), free(before), free(after);
    model_free(&model);
}

// In one layer with a window of W, a token changes its own logits and those of the W - 1 tokens after it.
static void check_window(const char* name, int64_t W) {
    const int64_t T = 2 * TILE + 22;
    Model model = variant_model(name, 1, T);
    int64_t V = model.config.vocab_size;
    int32_t* tokens = random_tokens(&model, T, 0);
    real *before = new_reals(T * V), *after = new_reals(T * V);
    CHECK(model.config.window_size == W, "%s: a window of %lld", name, (long long)model.config.window_size);
    model_forward(&model, tokens);
    model_loss(&model, tokens, 0, false, before);
    for (int64_t changed = 0; changed < T; changed += 41) {
        int32_t kept = tokens[changed];
        tokens[changed] = (int32_t)((kept + 1) % V);
        model_forward(&model, tokens);
        model_loss(&model, tokens, 0, false, after);
        tokens[changed] = kept;
        int64_t wrong = 0;
        for (int64_t t = 0; t < T; t++)
            wrong += same_bits(before + t * V, after + t * V, V) == (t >= changed && t < changed + W);
        CHECK(wrong == 0, "%s: token %lld changes others than its window's, or not all: %lld", name,
              (long long)changed, (long long)wrong);
    }
    free(tokens), free(before), free(after);
    model_free(&model);
}

// The sum of the gradients of two passes over one sequence each is the gradient of one pass over both.
static void check_accumulation(const char* name, int64_t T) {
    Model both = variant_model(name, 2, T), one = variant_model(name, 1, T);
    int32_t *inputs = random_tokens(&both, 2 * T, 0), *targets = random_tokens(&both, 2 * T, 1);
    double loss = run_pass(&both, inputs, targets, 2 * T, NULL);
    double halves =
        run_pass(&one, inputs, targets, 2 * T, NULL) + run_pass(&one, inputs + T, targets + T, 2 * T, NULL);
    CHECK(fabs(halves / loss - 1) <= 4 * EPSILON, "losses are %.17g and %.17g", halves, loss);
    for (int r = 0; r < both.table.num_rows; r++) {
        const Param* p = &both.table.rows[r];
        double error = relative_error(one.grads + p->offset, both.grads + p->offset, p->count);
        CHECK(error <= PICK(3e-6, 3e-15), "%s is off by %.2e", p->name, error); // 7e-7, 8e-16
    }
    free(inputs), free(targets);
    model_free(&both);
    model_free(&one);
}

// Activation memory is linear in T, and a long sequence has finite loss and gradients.
static void check_linear_memory(void) {
    Config c = variant_config("fox-pro hidden_size=4");
    ParamTable table = params_build(&c);
    int64_t bytes[3];
    for (int i = 0; i < 3; i++) {
        Pass plan = pass_plan(&c, &table, 1, (int64_t)4096 << i);
        bytes[i] = pass_bytes(&plan, c.num_hidden_layers);
    }
    CHECK(bytes[2] - bytes[1] == 2 * (bytes[1] - bytes[0]), "activation memory is not linear in T");
    CHECK(bytes[1] <= 2 * bytes[0], "%lld bytes at T 4096, %lld at 8192", (long long)bytes[0],
          (long long)bytes[1]);
    params_free(&table);

    const int64_t T = 8192;
    Model model = variant_model("fox-pro hidden_size=4 num_heads=1 num_hidden_layers=1", 1, T);
    int32_t *inputs = random_tokens(&model, T, 0), *targets = random_tokens(&model, T, 1);
    double loss = run_pass(&model, inputs, targets, T, NULL);
    const Shard whole = params_shard(&model.table, 0, 1);
    CHECK(isfinite(loss) && !shard_first_not_finite(&model.table, &whole, model.grads, sizeof(real)),
          "the loss or a gradient of a long sequence is not finite");
    free(inputs), free(targets);
    model_free(&model);
}

// ----------------------------------------------------------------------------
// grouped heads of keys and values

// Elements of the part that each head of keys has in a tensor; 0: it has no such parts.
static int64_t key_part(const Model* model, const Param* p) {
    const Config* c = &model->config;
    const bool grouped = p->kind == P_K_PROJ || p->kind == P_V_PROJ || p->kind == P_K_SHIFT ||
                         p->kind == P_V_SHIFT || (p->kind == P_K_NORM && !c->qk_norm_share);
    return grouped ? p->count / config_key_heads(c) : 0;
}

// A model whose heads of queries share heads of keys has the loss of the one where each head has a copy of
// them, and the sums of the copies' gradients.
static void check_grouped(const char* name, int64_t T) {
    Model grouped = variant_model(name, 2, T), whole;
    Config c = grouped.config;
    const int64_t NH = c.num_heads, group = NH / config_key_heads(&c);
    c.num_kv_heads = 0;
    whole = model_new(&c, true, 0, 1);
    model_allocate_activations(&whole, 2, T);
    for (int r = 0; r < grouped.table.num_rows; r++) {
        const Param *from = &grouped.table.rows[r], *to = &whole.table.rows[r];
        const int64_t part = key_part(&grouped, from) ? key_part(&grouped, from) : from->count;
        CHECK(strcmp(from->name, to->name) == 0 && to->count % part == 0, "%s", from->name);
        for (int64_t i = 0; i < to->count / part; i++)
            memcpy(whole.params + to->offset + i * part,
                   grouped.params + from->offset + (to->count > part ? i / group : i) * part,
                   (size_t)part * sizeof(real));
    }
    int32_t *inputs = random_tokens(&whole, 2 * T, 0), *targets = random_tokens(&whole, 2 * T, 1);
    double loss = run_pass(&grouped, inputs, targets, 2 * T, NULL),
           want = run_pass(&whole, inputs, targets, 2 * T, NULL), worst = 0;
    CHECK(fabs(loss / want - 1) <= 8 * EPSILON, "%s: losses are %.17g and %.17g", name, loss, want);
    for (int r = 0; r < grouped.table.num_rows; r++) {
        const Param *p = &grouped.table.rows[r], *of = &whole.table.rows[r];
        const int64_t part = key_part(&grouped, p) ? key_part(&grouped, p) : p->count;
        real* sums = new_reals(p->count);
        for (int64_t i = 0; i < of->count; i++)
            sums[(of->count > part ? i / part / group * part : 0) + i % part] += whole.grads[of->offset + i];
        double error = relative_error(grouped.grads + p->offset, sums, p->count);
        CHECK(error <= PICK(1e-5, 1e-13), "%s: %s is off by %.2e", name, p->name, error);
        worst = fmax(worst, error);
        free(sums);
    }
    printf("%s: gradients of copies of the keys, summed: off by %.1e\n", name, worst);
    free(inputs), free(targets);
    model_free(&grouped), model_free(&whole);
}

// ----------------------------------------------------------------------------
// initial weights

// The matrix's numbers have mean 0 and this deviation.
static void check_initial_matrix(const Model* model, const Param* p, double sigma) {
    const real* w = model->params + p->offset;
    double sum = 0, squares = 0, n = (double)p->count;
    for (int64_t i = 0; i < p->count; i++) sum += (double)w[i], squares += (double)w[i] * (double)w[i];
    double mean = sum / n, deviation = sqrt(squares / n);
    CHECK(fabs(mean) <= 5 * sigma / sqrt(n), "%s has mean %g", p->name, mean);
    CHECK(fabs(deviation - sigma) <= 5 * sigma / sqrt(2 * n), "%s has deviation %g", p->name, deviation);
}

static void check_initial_weights(void) {
    Config c = variant_config(wide);
    c.fgate_bias_init = true;
    Model a = model_new(&c, false, 0, 1), b = model_new(&c, false, 0, 1), other = model_new(&c, false, 0, 1);
    int64_t count = a.table.count;
    draw_weights(a.params, sizeof(real), &a.table, &a.shard, &a.config, 1);
    draw_weights(b.params, sizeof(real), &b.table, &b.shard, &b.config, 1);
    draw_weights(other.params, sizeof(real), &other.table, &other.shard, &other.config, 2);
    CHECK(same_bits(a.params, b.params, count), "the same seed must give the same weights");
    for (int r = 0; r < a.table.num_rows; r++) {
        const Param *p = &a.table.rows[r], *next = r + 1 < a.table.num_rows ? p + 1 : p - 1;
        const real* w = a.params + p->offset;
        if (p->init == INIT_NORMAL) {
            check_initial_matrix(&a, p, c.initializer_range);
            CHECK(!same_bits(w, other.params + p->offset, p->count), "%s is the same for seed 2", p->name);
            CHECK(!same_bits(w, a.params + next->offset, min64(p->count, next->count)), "%s and %s are equal",
                  p->name, next->name);
        }
        for (int64_t i = 0; p->init == INIT_ONE && i < p->count; i++) CHECK(w[i] == 1, "%s", p->name);
        for (int64_t i = 0; p->kind == P_FGATE_BIAS && i < p->count; i++) {
            double T_i = i == 0 ? 2 : i == 1 ? sqrt(2.0 * 256) : 256; // of three heads
            CHECK(fabs((double)log_sigmoid(w[i]) * T_i + 1) <= 8 * EPSILON,
                  "head %lld has a decay time of %g tokens", (long long)i, -1 / (double)log_sigmoid(w[i]));
        }
    }
    model_free(&a), model_free(&b), model_free(&other);

    c.fgate_bias_init = false;
    a = model_new(&c, false, 0, 1);
    draw_weights(a.params, sizeof(real), &a.table, &a.shard, &a.config, 1);
    CHECK(all_zero(a.params + params_find(&a.table, P_FGATE_BIAS, 1)->offset, c.num_heads),
          "gate biases start at 0");
    model_free(&a);
}

// The recurrent mixers' matrices start as in the paper's code, given here as standard deviations.
static double recurrent_deviation(const Config* c, const Param* p) {
    double rows = (double)p->shape[0], cols = (double)(p->count / p->shape[0]);
    if (c->mixer == MIXER_MAMBA2 && p->kind == P_LM_HEAD) return 1 / sqrt(3 * cols);
    if (c->mixer == MIXER_GATED_DELTANET) return 0.02; // as in flash-linear-attention
    switch (p->kind) {
    case P_DELTANET_Q_PROJ:
    case P_DELTANET_K_PROJ:
    case P_DELTANET_V_PROJ:
    case P_DELTANET_B_PROJ:
    case P_DELTANET_O_PROJ:
    case P_HGRN2_Q_PROJ:
    case P_HGRN2_F_PROJ:
    case P_HGRN2_I_PROJ:
    case P_HGRN2_O_PROJ: return sqrt(2 / (rows + cols)) / sqrt(32); // Xavier with gain 2^-2.5
    case P_MAMBA2_OUT_PROJ: return 1 / sqrt(3 * cols * (double)c->num_hidden_layers);
    case P_MAMBA2_IN_PROJ:
    case P_MAMBA2_CONV:
    case P_DELTANET_Q_CONV:
    case P_DELTANET_K_CONV:
    case P_DELTANET_V_CONV: return 1 / sqrt(3 * cols); // uniform, +-1 / sqrt(fan in)
    case P_MAMBA2_CONV_BIAS: return 1 / sqrt(12.0);    // of 4 taps
    case P_DOWN_PROJ: return 0.02 / sqrt(2 * (double)c->num_hidden_layers);
    default: return 0.02;
    }
}

static void check_recurrent_weights(const char* name) {
    Config c = variant_config(name);
    Model model = model_new(&c, false, 0, 1);
    draw_weights(model.params, sizeof(real), &model.table, &model.shard, &model.config, 1);
    for (int r = 0; r < model.table.num_rows; r++) {
        const Param* p = &model.table.rows[r];
        if (p->init == INIT_NORMAL || p->init == INIT_UNIFORM)
            check_initial_matrix(&model, p, recurrent_deviation(&c, p));
        for (int64_t i = 0; p->init == INIT_ONE && i < p->count; i++)
            CHECK(model.params[p->offset + i] == 1, "%s", p->name);
        for (int64_t i = 0; p->kind == P_MAMBA2_A_LOG && i < p->count; i++)
            CHECK(model.params[p->offset + i] == (real)log((double)(i + 1)), "%s", p->name);
        for (int64_t i = 0; p->kind == P_DELTANET_A_LOG && i < p->count; i++)
            CHECK(model.params[p->offset + i] < (real)2.7727 && model.params[p->offset + i] > -9, "%s",
                  p->name);
        const bool steps = p->kind == P_MAMBA2_DT_BIAS || p->kind == P_DELTANET_DT_BIAS;
        for (int64_t i = 0; steps && i < p->count; i++) {
            double step = log1p(exp((double)model.params[p->offset + i]));
            CHECK(step > 0.999e-3 && step < 0.1001, "%s: a time step of %g", p->name, step);
        }
    }
    model_free(&model);
}

static int test_model(void) {
    check_threads(wide);
    check_threads("fox-pro hidden_size=78 num_heads=6 num_kv_heads=2");
    // fewer heads than threads: attention's backward pass computes tiles of queries and keys apart
    check_threads("fox-pro hidden_size=78 num_heads=1 window_size=100");
    check_threads("transformer-llama hidden_size=78 num_heads=1 document_reset=true");
    check_threads("deltanet hidden_size=78 num_heads=3");
    check_threads("gated-deltanet hidden_size=78 num_heads=3 head_dim=20");
    check_threads("mamba2 hidden_size=78 num_heads=3 state_size=20");
    check_threads("hgrn2 use_lower_bound=true hidden_size=78 num_heads=3");
    check_threads("fox-pro layer_types=mamba2,attention hidden_size=78 num_heads=3 mamba2_state_size=20");
    omp_set_num_threads(1); // the models below are too small for threads to pay
    check_causality("fox-pro");
    check_causality("transformer-llama");
    check_window("transformer-swa window_size=4 num_hidden_layers=1", 4);
    check_window("transformer-llama window_size=140 num_hidden_layers=1", 140);
    check_causality("deltanet");
    check_causality("gated-deltanet");
    check_causality("hgrn2");
    check_causality("mamba2 state_size=6");
    check_causality("fox-pro layer_types=hgrn2,attention:window=100 num_hidden_layers=3");
    check_window("transformer-swa layer_types=attention:window=3,attention:window=2 window_size=4", 4);
    check_accumulation("fox-pro", 150);
    check_accumulation("deltanet", 70);
    check_accumulation("gated-deltanet", 70);
    check_accumulation("hgrn2 use_lower_bound=true", 70);
    check_accumulation("mamba2 state_size=6", 70);
    check_accumulation("fox-pro layer_types=hgrn2,deltanet,attention num_hidden_layers=3", 70);
    check_accumulation("fox-llama vocab_size=70000 hidden_size=4", 50); // logits in two chunks against one
    check_linear_memory();
    check_grouped("fox-pro hidden_size=24 num_heads=6 num_kv_heads=2", 150);
    check_grouped("fox-pro hidden_size=24 num_heads=6 num_kv_heads=1 qk_norm_share_param_across_head=true",
                  9);
    check_grouped("fox-llama hidden_size=24 num_heads=4 num_kv_heads=2 fgate_type=bias_only use_v_shift=true",
                  40);
    check_grouped("transformer-llama hidden_size=24 num_heads=4 num_kv_heads=2 window_size=20", 150);
    check_grouped("fox-pro document_reset=true vocab_size=5 num_heads=4 num_kv_heads=2", 60);
    check_initial_weights();
    check_recurrent_weights("deltanet hidden_size=72 num_heads=2 num_hidden_layers=3 intermediate_size=100");
    check_recurrent_weights(
        "gated-deltanet hidden_size=72 num_heads=16 num_hidden_layers=3 intermediate_size=100");
    check_recurrent_weights("hgrn2 hidden_size=72 num_heads=2 num_hidden_layers=3 intermediate_size=100");
    check_recurrent_weights("mamba2 hidden_size=72 num_heads=24 num_hidden_layers=3");
    return test_report();
}
