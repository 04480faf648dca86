/*
Packed documents (document_reset): losses and gradients of sequences of several documents are those of the
documents one by one, in every family, with every switch.

Built in float and in double. The documents one by one are sequences of a model without document_reset.
*/
#include <float.h>
#include "../trainer/trainer.h"
#include "../reals.h"
#include "../trainer/variants.h"

#define LIMIT                                                                                                \
    PICK(5e-4, 1e-9) // the largest errors measured: below 1e-4, 1.5e-10; and of gates behind walls as below

static char test_case[256]; // names the failed check
static double error_limit;  // of its errors

// Losses [B,T] of a forward pass, and the gradients of sum(losses) / mean_over, added to grads.
static void run_once(const char* name, const int32_t* inputs, const int32_t* targets, int64_t B, int64_t T,
                     int64_t mean_over, real* losses, double* grads) {
    Model model = variant_model(name, B, T);
    model_forward(&model, inputs);
    model_loss(&model, targets, (real)(1 / (double)mean_over), true, NULL);
    model_backward(&model, inputs);
    model_freeze(&model);
    memcpy(losses, model.acts.losses, (size_t)(B * T) * sizeof(real));
    for (int64_t i = 0; i < model.table.count; i++) grads[i] += (double)model.grads[i];
    model_free(&model);
}

static void compare_gradients(const ParamTable* table, const double* packed, const double* alone) {
    double whole = 0;
    for (int64_t i = 0; i < table->count; i++) whole += alone[i] * alone[i];
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        double difference = 0, norm = 0;
        for (int64_t i = p->offset; i < p->offset + p->count; i++) {
            difference += (packed[i] - alone[i]) * (packed[i] - alone[i]);
            norm += alone[i] * alone[i];
        }
        // a tensor that matters to nothing, such as queries' where every document has one token
        const double error = sqrt(difference / (norm > 1e-6 * whole ? norm : whole));
        CHECK(error <= error_limit, "%s: %s is off by %.2e", test_case, p->name, error);
    }
}

// Compares sequences [B, T] whose tokens at `walls`, positions in B T that ascend and end with B T, are end
// of text. `name` says which model, `ends` its keys of end of text, whose id is `end`.
static void check_packed(const char* name, const char* ends, int32_t end, const int64_t* walls, int64_t B,
                         int64_t T) {
    char packed_name[256], alone_name[224];
    snprintf(test_case, sizeof test_case, "%s%s, B %lld, T %lld, first wall %lld", name, ends, (long long)B,
             (long long)T, (long long)walls[0]);
    snprintf(alone_name, sizeof alone_name, "%s%s", name, ends);
    snprintf(packed_name, sizeof packed_name, "%s document_reset=true", alone_name);
    Model model = variant_model(name, 1, 1);
    int32_t *inputs = random_tokens(&model, B * T, 0), *targets = random_tokens(&model, B * T, 1);
    real *packed_losses = new_reals(B * T), *losses = new_reals(B * T);
    double *packed = (double*)xcalloc((size_t)model.table.count, sizeof *packed),
           *alone = (double*)xcalloc((size_t)model.table.count, sizeof *alone);
    for (int64_t i = 0; i < B * T; i++) inputs[i] = inputs[i] == end ? end - 1 : inputs[i];
    for (int64_t i = 1; i < B * T; i += 3) targets[i] = TARGET_NONE;
    error_limit = LIMIT;
    for (const int64_t* wall = walls; *wall < B * T; wall++) {
        inputs[*wall] = end;
        // a step of cum_logf, a double, grows with the walls before; five of them were measured
        if (config_has_gate(&model.config)) error_limit -= 10 * WALL_LOGF * DBL_EPSILON;
    }
    run_once(packed_name, inputs, targets, B, T, B * T, packed_losses, packed);
    for (int64_t i = 0, last; i < B * T; i = last) {
        for (last = i + 1; last % T != 0 && inputs[last] != end;) last++;
        run_once(alone_name, inputs + i, targets + i, 1, last - i, B * T, losses + i, alone);
    }
    CHECK(relative_error(packed_losses, losses, B * T) <= error_limit, "%s: losses are off by %.2e",
          test_case, relative_error(packed_losses, losses, B * T));
    compare_gradients(&model.table, packed, alone);
    free(inputs), free(targets), free(packed_losses), free(losses), free(packed), free(alone);
    model_free(&model);
}

// Every switch that reads tokens before its own. 300 tokens are three attention tiles and five segments.
static const char* const models[] = {
    "fox-pro",
    "fox-llama",
    "transformer-pro",
    "transformer-llama",
    "fox-pro fgate_type=bias_only",
    "fox-pro fgate_type=fixed",
    "fox-llama fgate_type=none",
    "fox-llama use_rope=true qk_norm=true",
    "fox-llama use_k_shift=true",
    "fox-llama use_v_shift=true",
    "transformer-swa window_size=5",
    "transformer-llama window_size=130",
    "fox-pro window_size=100 fgate_bias_init=true",
    "deltanet",
    "deltanet num_heads=1 hidden_size=70 num_hidden_layers=1",
    "gated-deltanet",
    "gated-deltanet num_heads=1 head_dim=35 num_hidden_layers=1",
    "hgrn2",
    "hgrn2 use_lower_bound=true num_hidden_layers=3",
    "mamba2 state_size=6",
    "fox-pro layer_types=mamba2,attention:window=100:rope,deltanet,hgrn2,gated_deltanet num_hidden_layers=5 "
    "mamba2_state_size=6 gated_deltanet_head_dim=6",
};
enum { NUM_MODELS = (int)(sizeof models / sizeof models[0]) };

// Walls anywhere: at a sequence's first token, at tiles' and segments' borders, next to one another.
static void check_anywhere(void) {
    const int64_t few[] = {0,   3,   4,   5,   7,   64,      127,       128, 129,
                           192, 255, 256, 257, 299, 300 + 1, 300 + 130, 600};
    const int64_t late[] = {298, 300}, none[] = {9, 9};
    for (int i = 0; i < NUM_MODELS; i++) {
        check_packed(models[i], "", 22, few, 2, 300);
        check_packed(models[i], "", 22, late, 1, 300);
        check_packed(models[i], "", 22, none, 1, 9);
    }
}

// Documents of one token: 200 in a row; all of them.
static void check_short(void) {
    int64_t row[201], all[10];
    for (int64_t i = 0; i < 200; i++) row[i] = 40 + i;
    row[200] = 300;
    for (int64_t i = 0; i < 10; i++) all[i] = i;
    all[9] = 9;
    for (int i = 0; i < NUM_MODELS; i++) {
        check_packed(models[i], "", 22, row, 1, 300);
        check_packed(models[i], "", 22, all, 1, 9);
    }
}

// end of text is eos_token_id, whatever bos_token_id is
static void check_ids(void) {
    const int64_t walls[] = {4, 9, 18};
    check_packed("fox-pro", " eos_token_id=7", 7, walls, 2, 9);
    check_packed("fox-pro", " bos_token_id=3", 22, walls, 2, 9);
    check_packed("mamba2 state_size=6", " bos_token_id=3 eos_token_id=22", 22, walls, 2, 9);
}

// Where documents begin, and without document_reset that no memory is taken for it.
static void check_starts(void) {
    const int32_t inputs[] = {7, 1, 7, 7, 2, 3, 1, 2, 3, 7, 1, 1},
                  want[] = {0, 0, 2, 3, 3, 3, 0, 0, 0, 3, 3, 3};
    int32_t doc_start[12];
    find_documents(doc_start, inputs, 2, 6, 7);
    CHECK(memcmp(doc_start, want, sizeof want) == 0, "doc_start differs");
    Model model = variant_model("fox-pro", 1, 9), reset = variant_model("fox-pro document_reset=true", 1, 9);
    CHECK(!model.acts.doc_start && reset.acts.doc_start, "doc_start without document_reset");
    CHECK(pass_bytes(&reset.pass, 2) - pass_bytes(&model.pass, 2) == 9 * (int64_t)sizeof(int32_t),
          "memory of document_reset");
    model_free(&model), model_free(&reset);
}

// The forget gate: WALL_LOGF at a document's first token, whose gate gets no gradient; none crosses it,
// exactly.
static void check_gate(void) {
    enum { T = 12, WALL = 5 };
    const HeadShape s = {.B = 1,
                         .T = T,
                         .NH = 1,
                         .row_stride = 1,
                         .doc_start = (const int32_t[]){0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5}};
    real *z = random_reals(T, 1), dz[T], other[T], bias = 1, dbias = 0, sum = 0, partial;
    double cum_logf[T], dcum_logf[T];
    for (int t = 0; t < T; t++) dcum_logf[t] = 1 + t;
    forget_gate_forward(cum_logf, z, &bias, &s);
    CHECK(cum_logf[0] == WALL_LOGF && fabs(cum_logf[WALL] - cum_logf[WALL - 1] - WALL_LOGF) < 1e-9,
          "log f of a wall");
    forget_gate_backward(dz, &dbias, dcum_logf, z, &bias, &partial, &s);
    for (int t = 0; t < T; t++) sum += dz[t];
    CHECK(dz[0] == 0 && dz[WALL] == 0 && dz[1] != 0 && dz[T - 1] != 0, "gradients of walls' gates");
    CHECK(fabs((double)(dbias - sum)) < 1e-4, "the bias' gradient: %g is not %g", (double)dbias, (double)sum);
    for (int t = WALL; t < T; t++) dcum_logf[t] *= 3;
    forget_gate_backward(other, &dbias, dcum_logf, z, &bias, &partial, &s);
    CHECK(same_bits(dz, other, WALL), "a gradient crosses a wall");
    free(z);
}

// Behind 2,000 walls cum_logf still tells the gates of a document as a sum of them alone does, in double; and
// a key behind one wall has no weight though its score be 90,000 above the row's own, which expf gives as 0.
static void check_walls(void) {
    enum { T = 8000, LENGTH = 4 };
    int32_t* starts = (int32_t*)xcalloc(T, sizeof *starts);
    double *cum_logf = (double*)xcalloc(T, sizeof *cum_logf), own = 0, worst = 0;
    real *z = random_reals(T, 1), bias = 1;
    for (int t = 0; t < T; t++) starts[t] = t / LENGTH * LENGTH;
    const HeadShape s = {.B = 1, .T = T, .NH = 1, .row_stride = 1, .doc_start = starts};
    forget_gate_forward(cum_logf, z, &bias, &s);
    for (int t = 0; t < T; t++) {
        own = t == starts[t] ? 0 : own + (double)log_sigmoid(z[t] + bias);
        worst = fmax(worst, fabs(cum_logf[t] - cum_logf[starts[t]] - own));
    }
    CHECK(worst <= 2e-7, "gates behind %d walls are off by %.2e", T / LENGTH, worst);
    CHECK(expf((float)(90000 + WALL_LOGF)) == 0, "a key behind a wall has weight");
    free(starts), free(cum_logf), free(z);
}

static int test_documents(void) {
    omp_set_num_threads(1); // these models are too small for threads to pay
    check_starts();
    check_gate();
    check_walls();
    check_ids();
    check_anywhere();
    check_short();
    return test_report();
}
