/*
Compares the backward pass with finite differences, in double: every tensor of every variant, and of packed
documents.

Every third target does not count. The numeric gradient of the mean loss L with respect to a weight w is the
fourth-order central difference
  (8 (L(w+h) - L(w-h)) - (L(w+2h) - L(w-2h))) / 12h.
Its truncation error is of order h^4, its rounding error of order 1e-16 / h.

A tensor's error is ||analytic - numeric|| / ||numeric|| over all of its elements, without TEST_ALL over at
most FEW of them. For T >= LONG it is taken over SUBSET, without TEST_ALL over half as many. Elements are
drawn without replacement from a fixed seed. If the numeric gradient is exactly zero (queries at T = 1), the
error is relative to the norm of the whole model's gradient.
*/
#ifndef REAL_IS_DOUBLE
#define REAL_IS_DOUBLE
#endif
#define WALL_LOGF                                                                                            \
    (-1e3) // behind 30 walls of -1e5, steps of cum_logf make differences of losses wrong by 1e-5
#include "trainer.h"
#include "../check.h"
#include "variants.h"

#define STEP   2e-4 // h; the worst error measured is 5e-9, with 1e-3 it is 2e-7
#define LIMIT  1e-6
#define LONG   100 // from this T on, a subset of the elements is checked
#define SUBSET 8
#define FEW    24

typedef struct {
    Model model;
    int32_t *inputs, *targets;
} Setup;

// The loss with other weights of layer `from`; what layers before it compute is still there.
static double mean_loss(Setup* s, int64_t from) {
    Model* model = &s->model;
    const Norm norm = model_final_norm(model, &model->pass);
    if (from == 0) model_embed(model, s->inputs);
    for (int64_t l = from; l < model->config.num_hidden_layers; l++) block_forward(model, l);
    rmsnorm_forward(model->acts.lm_head_in, model->acts.x_last, &norm);
    return model_loss(&s->model, s->targets, 0, false, NULL) / (double)(s->model.B * s->model.T);
}

static double mean_loss_at(Setup* s, int64_t from, real* weight, double value) {
    double before = *weight;
    *weight = value;
    double loss = mean_loss(s, from);
    *weight = before;
    return loss;
}

static double numeric_gradient(Setup* s, int64_t from, real* weight) {
    double w = *weight, h = STEP;
    double near = mean_loss_at(s, from, weight, w + h) - mean_loss_at(s, from, weight, w - h);
    double far = mean_loss_at(s, from, weight, w + 2 * h) - mean_loss_at(s, from, weight, w - 2 * h);
    return (8 * near - far) / (12 * h);
}

static void analytic_gradient(Setup* s) {
    Model* model = &s->model;
    memset(model->grads, 0, (size_t)model->table.count * sizeof(real));
    model_forward(model, s->inputs);
    model_loss(model, s->targets, 1 / (double)(model->B * model->T), true, NULL);
    model_backward(model, s->inputs);
    model_freeze(model);
}

// Returns the error of tensor p; adds the number of checked elements to *elements.
static double tensor_error(Setup* s, const Param* p, double model_norm, int64_t* elements) {
    Model* model = &s->model;
    const bool all = getenv("TEST_ALL") != NULL;
    const int64_t n =
        min64(model->T >= LONG ? (all ? SUBSET : SUBSET / 2) : (all ? p->count : FEW), p->count);
    const bool last = p->kind == P_NORM || p->kind == P_LM_HEAD;
    const int64_t from = last ? model->config.num_hidden_layers : p->layer < 0 ? 0 : p->layer;
    double difference = 0, norm = 0;
    model_forward(model, s->inputs);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = p->offset + random_permute(17, (uint64_t)p->offset, p->count, i);
        double numeric = numeric_gradient(s, from, &model->params[at]);
        difference += (model->grads[at] - numeric) * (model->grads[at] - numeric);
        norm += numeric * numeric;
    }
    *elements += n;
    return sqrt(difference) / (norm > 0 ? sqrt(norm) : model_norm);
}

// A frozen tensor has a zero gradient, and an update does not change it even if its gradient is nonzero.
static void check_frozen(Model* model, const Param* p) {
    Options options;
    options_defaults(&options);
    const AdamWParams adamw = options_adamw(&options, 1e-3, 1);
    real *w = model->params + p->offset, *g = model->grads + p->offset;
    real* before = (real*)xcalloc((size_t)p->count, sizeof(real));
    memcpy(before, w, (size_t)p->count * sizeof(real));
    for (int64_t i = 0; i < p->count; i++) CHECK(g[i] == 0, "%s has a gradient of %g", p->name, g[i]);
    for (int64_t i = 0; i < p->count; i++) g[i] = 1;
    model_update(model, &adamw, 1);
    CHECK(memcmp(before, w, (size_t)p->count * sizeof(real)) == 0, "%s was updated", p->name);
    variant_weights(model); // undo the update
    free(before);
}

static double check_variant(const Variant* variant) {
    Setup s;
    s.model = variant_model(variant->name, variant->B, variant->T);
    s.inputs = random_tokens(&s.model, variant->B * variant->T, 0);
    s.targets = random_tokens(&s.model, variant->B * variant->T, 1);
    for (int64_t t = 1; t < variant->B * variant->T; t += 3) s.targets[t] = TARGET_NONE;
    analytic_gradient(&s);
    double model_norm = sqrt(global_squares(s.model.grads, s.model.table.count)), worst = 0;
    const char* worst_name = "";
    int64_t elements = 0;
    for (int r = 0; r < s.model.table.num_rows; r++) {
        const Param* p = &s.model.table.rows[r];
        if (!p->trainable) {
            check_frozen(&s.model, p);
            continue;
        }
        double error = tensor_error(&s, p, model_norm, &elements);
        CHECK(error <= LIMIT, "%s: %s is off by %.2e", variant->name, p->name, error);
        if (error > worst) worst = error, worst_name = p->name;
    }
    printf("%-62s %2lld x %-4lld %6lld  %-46s %.1e\n", variant->name, (long long)variant->B,
           (long long)variant->T, (long long)elements, worst_name, worst);
    free(s.inputs);
    free(s.targets);
    model_free(&s.model);
    return worst;
}

// Packed documents of about five tokens. Not among variants.h's: inference is without walls.
static const Variant packed[] = {
    {"fox-pro document_reset=true vocab_size=5", 2, 9},
    {"fox-pro document_reset=true vocab_size=5 fgate_bias_init=true", 1, 150},
    {"fox-llama document_reset=true vocab_size=5 use_rope=true", 2, 9},
    {"fox-llama document_reset=true vocab_size=5 fgate_type=bias_only", 2, 9},
    {"fox-pro document_reset=true vocab_size=5 hidden_size=24 num_heads=4 num_kv_heads=2", 2, 9},
    {"transformer-pro document_reset=true vocab_size=5 window_size=3", 2, 9},
    {"deltanet document_reset=true vocab_size=6", 2, 9},
    {"gated-deltanet document_reset=true vocab_size=6", 2, 9},
    {"hgrn2 document_reset=true vocab_size=5 use_lower_bound=true", 2, 9},
    {"mamba2 document_reset=true vocab_size=5 state_size=6", 2, 9},
    {"fox-pro document_reset=true vocab_size=5 layer_types=deltanet,attention:window=3:rope", 2, 9},
    {"fox-pro document_reset=true vocab_size=5 layer_types=mamba2,hgrn2,gated_deltanet num_hidden_layers=3 "
     "mamba2_state_size=6 gated_deltanet_head_dim=6",
     1, 9},
};
enum { NUM_PACKED = (int)(sizeof packed / sizeof packed[0]) };

int main(void) {
    omp_set_num_threads(1); // these models are too small for threads to pay
    double worst = 0;
    printf("%-62s %9s %6s  %-46s %s\n", "variant", "B x T", "checked", "worst tensor", "error");
    for (int i = 0; i < NUM_VARIANTS + NUM_PACKED; i++) {
        double error = check_variant(i < NUM_VARIANTS ? &variants[i] : &packed[i - NUM_VARIANTS]);
        worst = error > worst ? error : worst;
    }
    printf("worst relative error %.1e, limit %.0e\n", worst, LIMIT);
    return test_report();
}
