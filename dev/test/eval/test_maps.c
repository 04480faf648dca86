/*
Tests of llmc/eval/maps.h on the CPU trainer's model: every number of the file against attention computed here
row by row, for a text whose rows are all computed, for one of which some are, and for pruned heads.

Built in float and in double.
*/
#include "../trainer/trainer.h"
#include "../reals.h"
#include "../trainer/variants.h"

static const Trainer maps_trainer = {.element_bytes = sizeof(real), .visit_heads = visit_heads};

// The key that head h reads of token t.
static const real* key_of(const AttentionActs* acts, const HeadShape* s, int64_t h, int64_t t) {
    return acts->k + (t * s->KVH + h * s->KVH / s->NH) * s->dh;
}

static double attention_of(double* a, const AttentionActs* acts, const HeadShape* s, int64_t h, int64_t i) {
    double sum = 0;
    for (int64_t j = 0; j <= i; j++) {
        double score = 0;
        for (int64_t x = 0; x < s->dh; x++)
            score += (double)acts->q[(i * s->NH + h) * s->dh + x] * (double)key_of(acts, s, h, j)[x];
        const double* logf = acts->cum_logf ? acts->cum_logf + h * s->T : NULL;
        a[j] = exp(score / sqrt((double)s->dh) + (logf ? logf[i] - logf[j] : 0));
        if ((s->doc_start && j < s->doc_start[i]) || j < head_first_key(s, i)) a[j] = 0;
        sum += a[j];
    }
    return sum;
}

// The rows of head h of layer l. Returns the mean window.
static double check_rows(const char* name, const Maps* m, const AttentionActs* acts, const HeadShape* s,
                         int64_t l, int64_t h) {
    const int64_t at = l * m->NH + h, T = m->T;
    double *a = (double*)xcalloc((size_t)T, sizeof *a), windows = 0;
    for (int64_t r = 0; r < m->Q; r++) {
        const int64_t i = m->queries[r], key = m->key[at * m->Q + r];
        double sum = attention_of(a, acts, s, h, i), near = 0, largest = 0;
        int64_t w = 0;
        while (near < MAPS_WINDOW_SHARE * sum - 1e-9) near += a[i - w++];
        windows += (double)w;
        for (int64_t j = 0; j <= i; j++) largest = fmax(largest, a[j]);
        CHECK(key <= i && fabs(a[key] - largest) <= 1e-6 * sum &&
                  fabs(largest / sum - (double)m->largest[at * m->Q + r]) <= 1e-6,
              "%s: head %lld.%lld: key %lld with %g is the largest of row %lld, not %g", name, (long long)l,
              (long long)h, (long long)key, (double)m->largest[at * m->Q + r], (long long)i, largest / sum);
        for (int k = 0; k < 2; k++)
            for (int64_t j = 0; m->matrices[k] && m->shown[k] == at && j < T; j++) {
                double want = j <= i ? a[j] / sum : 0, got = (double)m->matrices[k][r * T + j];
                CHECK(fabs(got - want) <= 1e-6, "%s: head %lld.%lld: attention %g, not %g", name,
                      (long long)l, (long long)h, got, want);
            }
    }
    free(a);
    return windows / (double)m->Q;
}

// The pruned share by its definition: each block that holds less than eps of each query's weight, if scores
// are as far apart as U allows; of the blocks where a query's document has a key.
static double share_of(const double* c, int64_t T, double limit, const Config* config,
                       const int32_t* doc_start) {
    const double log_tolerance = config->log_pruning_tolerance;
    int64_t blocks = (T + MAPS_BLOCK - 1) / MAPS_BLOCK, skipped = 0, seen = blocks;
    for (int64_t m = 0; m < blocks; m++)
        for (int64_t n = 0; n < m; n++) {
            double worst = 0;
            bool sees = !doc_start;
            for (int64_t i = m * MAPS_BLOCK; i < T && i < (m + 1) * MAPS_BLOCK && !sees; i++)
                sees = doc_start[i] < (n + 1) * MAPS_BLOCK;
            if (!sees) continue;
            seen++;
            for (int64_t i = m * MAPS_BLOCK; i < T && i < (m + 1) * MAPS_BLOCK; i++) {
                double before = 0, all = 0;
                for (int64_t j = 0; j <= i; j++)
                    *(j < (n + 1) * MAPS_BLOCK ? &before : &all) += exp(c[i] - c[j]);
                worst = fmax(worst, before / (before + all));
            }
            const double nearest = c[m * MAPS_BLOCK] - c[(n + 1) * MAPS_BLOCK - 1]; // the largest c_i - c_j
            skipped += config->pruning_rule == PRUNING_ACP
                           ? nearest < -(2 * limit + log((double)T)) + log_tolerance
                           : worst * exp(2 * limit) < exp(log_tolerance);
        }
    return (double)skipped / (double)seen;
}

// U by its definition: from the norms of the text, unless the weights of QK norm have a lower bound; ACP's is
// from these weights' largest.
static double limit_of(const AttentionActs* acts, const HeadPath* paths, const HeadShape* s, int64_t h,
                       const Config* c) {
    const bool acp = c->pruning_rule == PRUNING_ACP;
    double norms[2] = {0, 0}, weights = paths[0].weight ? 0 : INFINITY;
    for (int64_t i = 0; i < s->T; i++) {
        const real *q = acts->q + (i * s->NH + h) * s->dh, *k = key_of(acts, s, h, i);
        norms[0] = fmax(norms[0], (double)dot(q, q, s->dh)),
        norms[1] = fmax(norms[1], (double)dot(k, k, s->dh));
    }
    for (int64_t i = 0; i < s->dh && paths[0].weight; i++)
        for (int64_t j = 0; j < s->dh; j++)
            if (acp || i == j || (c->use_rope && (i + s->dh / 2) % s->dh == j))
                weights =
                    fmax(weights, fabs((double)paths[0].weight[h * s->weight_stride + i] *
                                       (double)paths[1].weight[h * s->KVH / s->NH * s->weight_stride + j]));
    weights *= sqrt((double)s->dh);
    return acp && paths[0].weight ? weights : fmin(weights, sqrt(norms[0] * norms[1] / (double)s->dh));
}

typedef struct {
    const Maps* m;
    Model* model;
} LimitCheck;

// Layer l of those with attention.
static Layer attention_layer(const Model* model, int64_t l) {
    int64_t at = 0;
    while (model->table.by_layer[at].config.mixer != MIXER_ATTENTION || model->table.by_layer[at].number < l)
        at++;
    return model_layer(model, &model->pass, at);
}

// A HeadVisitor: U of the heads of layer l.
static void check_limits(void* context, int64_t l, const LayerHeads* heads) {
    const LimitCheck* check = (const LimitCheck*)context;
    const Layer layer = attention_layer(check->model, l);
    const AttentionActs acts = attention_acts(&layer);
    const HeadShape s = attention_shape_of(&layer);
    HeadPath paths[3];
    attention_paths(&layer, &acts, paths);
    for (int64_t h = 0; h < s.NH; h++) {
        const double got = maps_score_limit(check->m, heads, h),
                     want = limit_of(&acts, paths, &s, h, layer.config);
        CHECK(fabs(got - want) <= 1e-6 * want, "head %lld.%lld: U %.10g, not %.10g", (long long)l,
              (long long)h, got, want);
    }
}

// gate: bias of the first head's forget gate, of the others 8. Returns the sum of all heads' pruned shares.
static double check_maps(const char* name, int64_t T, real gate) {
    Model model = variant_model(name, 1, T);
    const Config* c = &model.config;
    Maps* m = (Maps*)xcalloc(1, sizeof *m);
    double shares = 0;
    for (int64_t l = 0; l < c->num_hidden_layers && config_has_gate(c); l++)
        for (int64_t h = 0; h < c->num_heads; h++)
            if (model.table.by_layer[l].config.mixer == MIXER_ATTENTION)
                model.params[params_find(&model.table, P_FGATE_BIAS, l)->offset + h] = h ? 8 : gate;
    m->config = c, m->T = T, m->tokens = random_tokens(&model, T, 0);
    maps_measure(m, &maps_trainer, &model);
    LimitCheck limits = {m, &model};
    visit_heads(&model, m->tokens, check_limits, &limits);
    CHECK(m->Q == (T < MAPS_ROWS ? T : MAPS_ROWS) && m->queries[m->Q - 1] == T - 1, "%s: the rows", name);
    CHECK(!m->matrices[0] == (T > MAPS_ROWS), "%s: %lld tokens, matrices of heads %lld and %lld", name,
          (long long)T, (long long)m->shown[0], (long long)m->shown[1]);
    for (int64_t l = 0; l < m->L; l++) {
        const Layer layer = attention_layer(&model, l);
        const AttentionActs acts = attention_acts(&layer);
        const HeadShape s = attention_shape_of(&layer);
        HeadPath paths[3];
        attention_paths(&layer, &acts, paths);
        for (int64_t h = 0; h < m->NH; h++) {
            const int64_t at = l * m->NH + h;
            const double* cum_logf = m->cum_logf + at * T;
            double limit = 0, window = check_rows(name, m, &acts, &s, l, h), life = INFINITY, share = 0;
            for (int64_t t = 0; t < T; t++)
                CHECK(cum_logf[t] == (acts.cum_logf ? acts.cum_logf[h * T + t] : 0), "%s: cum_logf", name);
            double sum = 0, tokens = 0;
            for (int64_t t = 0; t < T; t++)
                if (!is_wall(s.doc_start, t, T)) sum += cum_logf[t] - (t ? cum_logf[t - 1] : 0), tokens++;
            if (acts.cum_logf) life = -log(2) / (sum / tokens);
            // each of the T sums is rounded to a step of cum_logf, which walls make large
            const double steps = (double)T * DBL_EPSILON * fabs(cum_logf[T - 1] / sum);
            if (config_prunes(c)) limit = limit_of(&acts, paths, &s, h, layer.config);
            if (config_prunes(c)) share = share_of(cum_logf, T, limit, c, s.doc_start);
            shares += share;
            CHECK(m->half_life[at] == life || fabs(m->half_life[at] / life - 1) < 1e-11 + steps,
                  "%s: half-life %g, not %g", name, m->half_life[at], life);
            CHECK(fabs(m->effective_window[at] - window) <= 1e-2, "%s: window %g, not %g", name,
                  m->effective_window[at], window);
            CHECK(m->pruned_share[at] == share, "%s: head %lld.%lld: pruned share %g, not %g", name,
                  (long long)l, (long long)h, m->pruned_share[at], share);
        }
    }
    CHECK((gate > 0 ? shares == 0 : shares > 0) || c->document_reset, "%s: pruned shares of %g in all", name,
          shares);
    maps_free(m);
    model_free(&model);
    return shares;
}

static int test_maps(void) {
    omp_set_num_threads(2);
    check_maps("fox-pro", 37, 4);
    check_maps("fox-pro", 700, -1);
    check_maps("fox-pro use_rope=true qk_norm_share_param_across_head=true", 300, -1);
    check_maps("fox-llama fgate_type=bias_only num_heads=3", 500, -2);
    check_maps("fox-pro num_heads=4 num_kv_heads=2", 700, -1);
    check_maps("transformer-llama", 131, 4);
    check_maps("fox-pro num_hidden_layers=1 num_heads=1", 1, 4);
    check_maps("fox-pro num_hidden_layers=1", 2050, 8);
    double ours = check_maps("fox-pro log_pruning_tolerance=-116", 700, -1);
    double acp = check_maps("fox-pro log_pruning_tolerance=-116 pruning_rule=acp", 700, -1);
    check_maps("fox-pro document_reset=true", 700, -1);
    check_maps("fox-pro document_reset=true log_pruning_tolerance=-116 vocab_size=300", 900, -1);
    check_maps("transformer-pro document_reset=true", 300, 4);
    check_maps("fox-pro layer_types=hgrn2,attention:window=150:rope,deltanet,attention num_hidden_layers=4",
               700, -1);
    CHECK(acp < ours, "ACP's rule prunes %g, ours %g", acp, ours);
    return test_report();
}
