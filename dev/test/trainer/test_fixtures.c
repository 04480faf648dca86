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
#include "../tensor_files.h"

#ifdef REAL_IS_DOUBLE
#define FIXTURE_LIMIT(float32_error) 1e-9 // the worst measured is 2e-14
#define MEAN_LIMIT                   1.0
#else
#define FIXTURE_LIMIT(float32_error) (4 * (float32_error))
#define MEAN_LIMIT                   0.5 // of FIXTURE_LIMIT: 2 times float32_error; the worst measured is 0.29
#endif

static const double LR = 1e-3, MAX_NORM = 1;

typedef struct {
    const char* folder;
    Safetensors expected;
    double squares;       // sum of (error / limit)^2 over the compared tensors
    int tensors;          // their number
    double worst;         // largest error / limit
    char worst_name[160]; // the tensor that has it
} Fixture;

// The fp64 values of a tensor of the fixture, freed by the caller; NULL if the fixture does not have it.
static double* fixture_values(const Fixture* f, const char* prefix, const char* name) {
    Error err;
    char full[192];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const SafeTensor* t = safetensors_find(&f->expected, full);
    if (!t) return NULL;
    double* values = (double*)xcalloc((size_t)t->count, sizeof(double));
    if (!safetensors_read(t, values, 8, &err)) die("%s", err.msg);
    return values;
}

// The limit of a tensor's relative error.
static double fixture_limit(const Fixture* f, const char* full_name) {
    double *float32_error = fixture_values(f, "float32_error.", full_name),
           limit = FIXTURE_LIMIT(float32_error ? *float32_error : 1e-6);
    free(float32_error);
    return limit;
}

// Checks that ||got - expected|| / ||expected|| <= limit; where there is a slack, element i may differ by
// slack[i] besides.
static void compare(Fixture* f, const char* prefix, const char* name, const real* got, int64_t n,
                    const double* slack) {
    char full[160];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    double* expected = fixture_values(f, prefix, name);
    CHECK(expected, "%s: %s is missing", f->folder, full);
    if (!expected) return;
    double squares = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double difference = fabs((double)got[i] - expected[i]) - (slack ? slack[i] : 0);
        if (!(difference <= 0)) squares += difference * difference; // NaN counts
        norm += expected[i] * expected[i];
    }
    double error = sqrt(squares / norm), limit = fixture_limit(f, full);
    CHECK(error <= limit, "%s: %s is off by %.2e, more than %.2e", f->folder, full, error, limit);
    f->squares += error / limit * (error / limit);
    f->tensors++;
    if (error / limit > f->worst) {
        f->worst = error / limit;
        snprintf(f->worst_name, sizeof f->worst_name, "%s", full);
    }
    free(expected);
}

// How much AdamW's first step, LR g / (|g| + eps), changes at most within the limit of the error of the
// clipped gradient g: of each element, freed by the caller.
static double* first_step_slack(const Fixture* f, const Param* p, double clip, double eps) {
    char full[160];
    snprintf(full, sizeof full, "grad.%s", p->name);
    double *slack = fixture_values(f, "", full), squares = 0;
    if (!slack) return NULL;
    for (int64_t i = 0; i < p->count; i++) squares += slack[i] * slack[i];
    double error = fixture_limit(f, full) * sqrt(squares / (double)p->count) * clip;
    for (int64_t i = 0; i < p->count; i++) {
        double g = fabs(slack[i]) * clip, more = g + error, less = g - error;
        slack[i] = LR * (more / (more + eps) - less / (fabs(less) + eps));
    }
    return slack;
}

static int32_t* fixture_tokens(const Fixture* f, const char* name, int64_t shape[2]) {
    const SafeTensor* t = safetensors_find(&f->expected, name);
    if (!t || t->dtype != SAFETENSORS_I32 || t->ndim != 2)
        die("%s: has no int32 tensor '%s' of two axes", f->folder, name);
    memcpy(shape, t->shape, 2 * sizeof shape[0]);
    Error err;
    int32_t* tokens = (int32_t*)safetensors_bytes(t, &err);
    if (!tokens) die("%s", err.msg);
    return tokens;
}

static void check_fixture(const char* folder) {
    Error err;
    Config config;
    Fixture f;
    char path[PATH_LENGTH];
    int64_t shape[2];
    memset(&f, 0, sizeof f);
    f.folder = strrchr(folder, '/') + 1;
    path_join(path, folder, "expected.safetensors");
    if (!config_read(&config, folder, &err) || !safetensors_open(&f.expected, path, &err)) die("%s", err.msg);
    int32_t* tokens = fixture_tokens(&f, "tokens", shape);
    int32_t* targets = fixture_tokens(&f, "targets", shape);
    int64_t BT = shape[0] * shape[1], V = config.vocab_size;

    Model model = model_new(&config, true, 0, 1);
    const CheckpointTensors weights = {model.params, NULL, NULL, sizeof(real)};
    const CheckpointPart part = {&model.table, &model.shard, &weights, NULL};
    if (!checkpoint_read_file(folder, CHECKPOINT_MODEL, &part, &err)) die("%s", err.msg);
    model_allocate_activations(&model, shape[0], shape[1]);
    real* logits = (real*)xcalloc((size_t)(BT * V), sizeof(real));

    Options options;
    options_defaults(&options);
    double* losses = fixture_values(&f, "", "losses");
    double* norms = fixture_values(&f, "", "grad_norms");
    for (int step = 0; step < (losses ? 4 : 1); step++) {
        memset(model.grads, 0, (size_t)model.table.count * sizeof(real));
        model_forward(&model, tokens);
        double loss = model_loss(&model, targets, (real)(1 / (double)BT), true, logits) / (double)BT;
        model_backward(&model, tokens);
        model_freeze(&model);
        double norm = sqrt(global_squares(model.grads, model.table.count));
        if (step == 0) {
            compare(&f, "", "loss", model.acts.losses, BT, NULL);
            compare(&f, "", "logits", logits, BT * V, NULL);
            for (int r = 0; r < model.table.num_rows; r++) {
                const Param* p = &model.table.rows[r];
                if (p->trainable) compare(&f, "grad.", p->name, model.grads + p->offset, p->count, NULL);
            }
        }
        if (!losses) break;
        double limit = FIXTURE_LIMIT(1e-6); // the worst measured: 2.9e-7 in float, 7e-16 in double
        CHECK(fabs(loss / losses[step] - 1) <= limit, "%s: loss of step %d is %.12g", f.folder, step, loss);
        if (step == 3) break;
        CHECK(fabs(norm / norms[step] - 1) <= limit, "%s: gradient norm of step %d is %.12g", f.folder, step,
              norm);
        AdamWParams adamw = options_adamw(&options, LR, step + 1);
        model_update(&model, &adamw, clip_scale(norm, MAX_NORM));
    }
    for (int r = 0; losses && r < model.table.num_rows; r++) {
        const Param* p = &model.table.rows[r];
        double* slack = first_step_slack(&f, p, clip_scale(norms[0], MAX_NORM), options.adam_eps);
        compare(&f, "step3.", p->name, model.params + p->offset, p->count, slack);
        free(slack);
    }
    double mean = sqrt(f.squares / f.tensors);
    CHECK(mean <= MEAN_LIMIT, "%s: the RMS of error / limit is %.3f", f.folder, mean);
    printf("%-34s error / limit: RMS %5.3f, worst %5.3f, %s\n", f.folder, mean, f.worst, f.worst_name);
    free(losses);
    free(norms);
    free(logits);
    free(tokens);
    free(targets);
    model_free(&model);
    safetensors_close(&f.expected);
}

static int test_fixtures(void) {
    glob_t found;
    if (glob("dev/test/fixtures/model/*", 0, NULL, &found) != 0)
        die("no fixtures in dev/test/fixtures/model");
    for (size_t i = 0; i < found.gl_pathc; i++) check_fixture(found.gl_pathv[i]);
    globfree(&found);
    return test_report();
}
