/*
Initial values: a function of the seed, the layer and the kind of a tensor (llmc/model/params.h), so that
models which differ by switches start alike where they are alike.
*/
#include "../../../llmc/baselines/mixers.h"
#include "../check.h"
#include "models.h"

// Elements of a tensor whose initial values are compared.
enum { DRAWN = 40 };

// The first DRAWN initial values of a tensor, of seed 3. False where the model has none.
static bool drawn(const Config* c, const char* name, double values[DRAWN]) {
    ParamTable t = params_build(c);
    int found = -1;
    for (int r = 0; r < t.num_rows; r++)
        if (strcmp(t.rows[r].name, name) == 0) found = r;
    for (int64_t i = 0; found >= 0 && i < DRAWN; i++) values[i] = params_initial_value(&t, c, found, i, 3);
    params_free(&t);
    return found >= 0;
}

// All tensors of two models with the same name start at the same values; so does the other's k_proj with a
// shift, whose name says it.
static void check_common(const Config* a, const Config* b, const char* what, int expected) {
    ParamTable t = params_build(a);
    int common = 0;
    for (int r = 0; r < t.num_rows; r++) {
        double x[DRAWN], y[DRAWN];
        char name[sizeof t.rows[r].name];
        snprintf(name, sizeof name, "%s", t.rows[r].name);
        char* shifted = strstr(name, ".linear.weight");
        bool found = drawn(b, name, y);
        if (!found && shifted) strcpy(shifted, ".weight"), found = drawn(b, name, y);
        if (!found) continue;
        if (t.rows[r].count < DRAWN) continue; // norms of one head and biases, which start as constants
        drawn(a, t.rows[r].name, x);
        CHECK(memcmp(x, y, sizeof x) == 0, "%s: %s starts otherwise", what, t.rows[r].name);
        common++;
    }
    CHECK(common == expected, "%s: %d tensors in common", what, common);
    params_free(&t);
}

// Initial values depend on the seed, the layer and the kind of tensor alone.
static void check_initial_values(void) {
    const Config fox = preset("fox-pro-nano"), transformer = preset("transformer-pro-nano");
    Config other = preset("fox-llama-nano");
    check_common(&fox, &transformer, "fox-pro, transformer-pro", 59);
    check_common(&fox, &other, "fox-pro, fox-llama", 39);
    other = fox;
    other.use_output_gate = other.use_v_shift = other.qk_norm = false;
    other.vocab_size += 7; // rows at the end
    check_common(&fox, &other, "switches off, a larger vocabulary", 47);
    other = fox;
    other.num_hidden_layers += 2;
    check_common(&fox, &other, "more layers", 63);

    // No two of a model's drawn tensors start alike.
    static const char* const names[] = {"fox-pro-nano", "deltanet-nano", "hgrn2-nano", "mamba2-nano",
                                        "gated-deltanet-nano"};
    for (int n = 0; n < 5; n++) {
        const Config c = preset(names[n]);
        ParamTable t = params_build(&c);
        for (int r = 0; r < t.num_rows; r++)
            for (int q = 0; q < r; q++) {
                const Param *a = &t.rows[q], *b = &t.rows[r];
                if (a->init != b->init || (a->init != INIT_NORMAL && a->init != INIT_UNIFORM)) continue;
                CHECK(params_initial_value(&t, &c, q, 0, 3) / a->scale !=
                          params_initial_value(&t, &c, r, 0, 3) / b->scale,
                      "%s: %s starts as %s", names[n], b->name, a->name);
            }
        params_free(&t);
    }

    // The key of a tensor must never change: a seed's weights are those of its runs.
    static const double expected[] = {0.0041442823836723387, 0.01667851268797782,   -0.000567278532064766,
                                      0.062084065161362889,  -0.022103342714562151, 0.042156785690598608,
                                      -3.0882400329897286};
    static const struct {
        const char *model, *name;
    } tensors[] = {{"fox-pro-nano", "model.embeddings.weight"},
                   {"fox-pro-nano", "model.layers.1.attn.q_proj.weight"},
                   {"fox-llama-nano", "model.layers.3.mlp.down_proj.weight"},
                   {"deltanet-nano", "model.layers.0.attn.v_conv1d.weight"},
                   {"hgrn2-nano", "model.layers.0.attn.o_proj.weight"},
                   {"mamba2-nano", "backbone.layers.7.mixer.in_proj.weight"},
                   {"mamba2-nano", "backbone.layers.7.mixer.dt_bias"}};
    for (int i = 0; i < 7; i++) {
        double x[DRAWN];
        const Config c = preset(tensors[i].model);
        CHECK(drawn(&c, tensors[i].name, x) && fabs(x[3] / expected[i] - 1) < 1e-12, "%s: %s starts at %.17g",
              tensors[i].model, tensors[i].name, x[3]);
    }
}

static int test_initial_values(void) {
    check_initial_values();
    return test_report();
}
