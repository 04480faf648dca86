/*
Compares train_fox.c with the PyTorch fixtures (dev/reference/), for the families and every switch: loss of
every token, logits, every gradient, and the weights after three AdamW steps.

Built in double and in float. In double the relative error of every tensor is at most 1e-9. In float the limit
is a multiple of PyTorch's own float32 error, which the fixture stores for each tensor: 4 times for a single
tensor, and 2 times for the RMS over all tensors of a fixture. A single tensor needs the larger limit because
both errors are samples of rounding noise: of further float32 runs of PyTorch itself, one tensor in a thousand
exceeds 2.5 times (dev/reference/README.md). After AdamW's steps an element may also differ by what the limit
of its first gradient's error can change in the first step. That is much only where the gradient itself is as
small as rounding errors, in about one element of a million.
*/
#include "trainer.h"
#include <glob.h>
#include "../check.h"
#include "fixtures.h"

#ifdef REAL_IS_DOUBLE
#define FIXTURE_LIMIT(float32_error) 1e-9 // the worst measured is 2e-14
#define MEAN_LIMIT                   1.0
#else
#define FIXTURE_LIMIT(float32_error) (4 * (float32_error))
#define MEAN_LIMIT                   0.5 // of FIXTURE_LIMIT: 2 times float32_error; the worst measured is 0.29
#endif

static const double LR = 1e-3, MAX_NORM = 1;

// The errors of the tensors that were compared.
typedef struct {
    double squares;       // sum of (error / limit)^2
    int tensors;          // their number
    double worst;         // largest error / limit
    char worst_name[160]; // the tensor that has it
} Errors;

// The limit of a tensor's relative error.
static double fixture_limit(const Fixture* f, const char* full_name) {
    double float32_error = 1e-6;
    fixture_values(f, "float32_error.", full_name, &float32_error, 1);
    return FIXTURE_LIMIT(float32_error);
}

// Checks that ||got - expected|| / ||expected|| <= limit; where there is a slack, element i may differ by
// slack[i] besides.
static void compare(const Fixture* f, Errors* errors, const char* prefix, const char* name, const real* got,
                    int64_t n, const double* slack) {
    char full[160];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    double* expected = (double*)xcalloc((size_t)n, sizeof(double));
    CHECK(fixture_values(f, prefix, name, expected, n), "%s: %s is missing", f->name, full);
    double squares = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double difference = fabs((double)got[i] - expected[i]) - (slack ? slack[i] : 0);
        if (!(difference <= 0)) squares += difference * difference; // NaN counts
        norm += expected[i] * expected[i];
    }
    double error = sqrt(squares / norm), limit = fixture_limit(f, full);
    CHECK(error <= limit, "%s: %s is off by %.2e, more than %.2e", f->name, full, error, limit);
    errors->squares += error / limit * (error / limit);
    errors->tensors++;
    if (error / limit > errors->worst) {
        errors->worst = error / limit;
        snprintf(errors->worst_name, sizeof errors->worst_name, "%s", full);
    }
    free(expected);
}

// How much AdamW's first step, LR g / (|g| + eps), changes at most within the limit of the error of the
// clipped gradient g: of each element, freed by the caller.
static double* first_step_slack(const Fixture* f, const Param* p, double clip, double eps) {
    char full[160];
    snprintf(full, sizeof full, "grad.%s", p->name);
    double *slack = (double*)xcalloc((size_t)p->count, sizeof(double)), squares = 0;
    fixture_values(f, "", full, slack, p->count); // 0 where it is not trained
    for (int64_t i = 0; i < p->count; i++) squares += slack[i] * slack[i];
    double error = fixture_limit(f, full) * sqrt(squares / (double)p->count) * clip;
    for (int64_t i = 0; i < p->count; i++) {
        double g = fabs(slack[i]) * clip, more = g + error, less = g - error;
        slack[i] = LR * (more / (more + eps) - less / (fabs(less) + eps));
    }
    return slack;
}

static void check_fixture(const char* name) {
    Fixture f = fixture_open(name);
    Errors errors;
    memset(&errors, 0, sizeof errors);
    int64_t BT = f.B * f.T, V = f.config.vocab_size;
    Model model = model_new(&f.config, true, 0, 1);
    fixture_weights(&f, &model.table, &model.shard, model.params, sizeof(real));
    model_allocate_activations(&model, f.B, f.T);
    real* logits = (real*)xcalloc((size_t)(BT * V), sizeof(real));

    Options options;
    options_defaults(&options);
    double losses[4], norms[3];
    bool trained =
        fixture_values(&f, "", "losses", losses, 4) && fixture_values(&f, "", "grad_norms", norms, 3);
    for (int step = 0; step < (trained ? 4 : 1); step++) {
        memset(model.grads, 0, (size_t)model.table.count * sizeof(real));
        model_forward(&model, f.tokens);
        double loss = model_loss(&model, f.targets, (real)(1 / (double)BT), true, logits) / (double)BT;
        model_backward(&model, f.tokens);
        model_freeze(&model);
        double norm = sqrt(global_squares(model.grads, model.table.count));
        if (step == 0) {
            compare(&f, &errors, "", "loss", model.acts.losses, BT, NULL);
            compare(&f, &errors, "", "logits", logits, BT * V, NULL);
            for (int r = 0; r < model.table.num_rows; r++) {
                const Param* p = &model.table.rows[r];
                if (p->trainable)
                    compare(&f, &errors, "grad.", p->name, model.grads + p->offset, p->count, NULL);
            }
        }
        if (!trained) break;
        double limit = FIXTURE_LIMIT(1e-6); // the worst measured: 2.9e-7 in float, 7e-16 in double
        CHECK(fabs(loss / losses[step] - 1) <= limit, "%s: loss of step %d is %.12g", name, step, loss);
        if (step == 3) break;
        CHECK(fabs(norm / norms[step] - 1) <= limit, "%s: gradient norm of step %d is %.12g", name, step,
              norm);
        AdamWParams adamw = options_adamw(&options, LR, step + 1);
        model_update(&model, &adamw, clip_scale(norm, MAX_NORM));
    }
    for (int r = 0; trained && r < model.table.num_rows; r++) {
        const Param* p = &model.table.rows[r];
        double* slack = first_step_slack(&f, p, clip_scale(norms[0], MAX_NORM), options.adam_eps);
        compare(&f, &errors, "step3.", p->name, model.params + p->offset, p->count, slack);
        free(slack);
    }
    double mean = sqrt(errors.squares / errors.tensors);
    CHECK(mean <= MEAN_LIMIT, "%s: the RMS of error / limit is %.3f", name, mean);
    printf("%-34s error / limit: RMS %5.3f, worst %5.3f, %s\n", name, mean, errors.worst, errors.worst_name);
    free(logits);
    model_free(&model);
    fixture_close(&f);
}

static int test_fixtures(void) {
    glob_t found;
    if (glob("dev/test/fixtures/model/*", 0, NULL, &found) != 0)
        die("no fixtures in dev/test/fixtures/model");
    for (size_t i = 0; i < found.gl_pathc; i++) check_fixture(strrchr(found.gl_pathv[i], '/') + 1);
    globfree(&found);
    return test_report();
}
