/*
Tests the parameter table (llmc/model/params.h) and the parts of it that ranks own: its buckets and parts of
buckets (llmc/model/shard.h).
*/
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/model/shard.h"
#include "../check.h"
#include "models.h"

// ----------------------------------------------------------------------------
// the table

// Tensors are consecutive and aligned, names are unique, and the rows of the fused projection are contiguous.
static void check_consecutive(const Config* c, const char* name) {
    ParamTable t = params_build(c);
    int64_t end = 0, parameters = 0;
    for (int r = 0; r < t.num_rows; r++) {
        const Param* p = &t.rows[r];
        bool fused = p->column > 0 || p->kind == P_DELTANET_K_CONV || p->kind == P_DELTANET_V_CONV ||
                     p->kind == P_UP_PROJ;
        const MixerKind kinds_of = c->mixer == MIXER_GATED_DELTANET ? MIXER_DELTANET : c->mixer;
        CHECK(p->offset >= end && p->offset - end < PARAM_ALIGN && (fused || p->offset % PARAM_ALIGN == 0),
              "%s: %s starts at %lld", name, p->name, (long long)p->offset);
        int64_t count = 1;
        for (int i = 0; i < p->ndim; i++) count *= p->shape[i];
        CHECK(p->count == count && count > 0 && p->ndim <= 3, "%s: %s", name, p->name);
        CHECK(p->kind < NUM_SHARED_KINDS || (p->kind - NUM_SHARED_KINDS) / MIXER_KINDS == (int)kinds_of,
              "%s: %s has kind %d, another mixer's", name, p->name, p->kind);
        for (int q = 0; q < r; q++)
            CHECK(strcmp(t.rows[q].name, p->name) != 0, "%s: two tensors are named %s", name, p->name);
        bool bound = p->kind == P_HGRN2_LOWER_BOUNDS,
             of = p->kind == P_MAMBA2_A_LOG || p->kind == P_MAMBA2_D || p->kind == P_DELTANET_A_LOG;
        CHECK(p->decays == !(strstr(p->name, "norm") || strstr(p->name, "bias") || bound || of),
              "%s: weight decay of %s", name, p->name);
        CHECK(p->trainable == !((c->fgate_type == GATE_FIXED && p->kind == P_FGATE_BIAS) ||
                                (bound && !c->use_lower_bound)),
              "%s: trainable flag of %s", name, p->name);
        end = p->offset + p->count;
        parameters += p->count;
    }
    CHECK(end == t.count && parameters == t.parameters, "%s: %lld parameters", name, (long long)parameters);
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const Param* first = params_find(&t, t.by_layer[l].proj.first, l);
        int64_t rows = 0;
        for (const Param* p = first; p->column >= 0; p++) { // the rows of the fused projection
            CHECK(p->column == rows && p->offset == first->offset + rows * c->hidden_size &&
                      params_column(&t, p->kind, l) == rows,
                  "%s: %s is not at row %lld of the projection", name, p->name, (long long)rows);
            rows += p->shape[0];
        }
        CHECK(first[-1].kind == P_MIXER_NORM && rows == t.by_layer[l].proj.rows, "%s: rows of the projection",
              name);
    }
    params_free(&t);
}

static void check_params(void) {
    Config c = preset("fox-pro-nano");
    check_consecutive(&c, "fox-pro");
    CHECK(has_param(&c, "model.layers.3.attn.k_proj.linear.weight") &&
              has_param(&c, "model.layers.3.attn.k_proj.shift_proj.weight") &&
              has_param(&c, "model.layers.0.attn.fgate_proj.bias") &&
              !has_param(&c, "model.layers.0.attn.k_proj.weight") &&
              !has_param(&c, "model.layers.4.attn_norm.weight"),
          "names of fox-pro");
    c.qk_norm_share = true;
    c.fgate_type = GATE_FIXED;
    check_consecutive(&c, "fox-pro, fixed gate");
    CHECK(has_param(&c, "model.layers.0.attn.fgate_bias") &&
              !has_param(&c, "model.layers.0.attn.fgate_proj.bias") &&
              !has_param(&c, "model.layers.0.attn.fgate_proj.weight"),
          "names of a fixed gate");
    ParamTable t = params_build(&c);
    CHECK(params_find(&t, P_Q_NORM, 2)->count == config_head_size(&c), "a shared QK norm has dh elements");
    params_free(&t);
    c = preset("transformer-llama-nano");
    check_consecutive(&c, "transformer-llama");
    CHECK(has_param(&c, "model.layers.0.attn.k_proj.weight"), "names of transformer-llama");
    CHECK(!has_param(&c, "model.layers.0.attn.fgate_bias"), "transformer-llama has a gate");
    c = preset("deltanet-nano");
    check_consecutive(&c, "deltanet");
    CHECK(has_param(&c, "model.layers.3.attn.v_conv1d.weight") &&
              has_param(&c, "model.layers.0.attn.b_proj.weight") &&
              !has_param(&c, "model.layers.0.attn.fgate_bias"),
          "names of deltanet");
    c = preset("hgrn2-nano");
    check_consecutive(&c, "hgrn2");
    c.use_lower_bound = true;
    check_consecutive(&c, "hgrn2 with lower bounds");
    CHECK(has_param(&c, "model.lower_bounds") && has_param(&c, "model.layers.3.attn.i_proj.weight") &&
              has_param(&c, "model.layers.0.attn.g_norm.weight") &&
              !has_param(&c, "model.layers.0.attn.q_conv1d.weight"),
          "names of hgrn2");
    c = preset("mamba2-nano");
    check_consecutive(&c, "mamba2");
    CHECK(has_param(&c, "backbone.layers.7.mixer.conv1d.bias") && has_param(&c, "backbone.norm_f.weight") &&
              has_param(&c, "backbone.layers.0.norm.weight") &&
              !has_param(&c, "backbone.layers.0.mlp_norm.weight"),
          "names of mamba2");
    CHECK(fabs(log1p(exp(initial_dt_bias(&c, 0, 0))) / 1e-3 - 1) < 1e-9 &&
              fabs(log1p(exp(initial_dt_bias(&c, 0, 1))) / 0.1 - 1) < 1e-12,
          "the time steps of mamba2 do not start from time_step_min to time_step_max");
    c.time_step_floor = 0.05;
    CHECK(fabs(log1p(exp(initial_dt_bias(&c, 0, 0))) / 0.05 - 1) < 1e-12, "time_step_floor");

    c = preset("gated-deltanet-nano");
    check_consecutive(&c, "gated-deltanet");
    CHECK(has_param(&c, "model.layers.2.attn.g_proj.weight") && has_param(&c, "model.layers.0.attn.A_log") &&
              has_param(&c, "model.layers.0.mlp.up_proj.weight"),
          "names of gated-deltanet");

    c = preset("transformer-llama-nano");
    c.num_heads = 1;
    c.fgate_type = GATE_BIAS_ONLY;
    c.fgate_bias_init = true;
    CHECK(fabs(config_long_gate_bias(&c, 0) + log(expm1(0.5))) < 1e-15,
          "the decay time of a single head is decay_time_min");
    // the shortest times, where exp(1 / T) overflows: b = -1/T to the last bit
    c.num_heads = 3, c.decay_time_min = 1e-3, c.decay_time_max = 2.5e-3;
    CHECK(config_long_gate_bias(&c, 0) == -1000 && fabs(config_long_gate_bias(&c, 2) + 400) < 1e-12,
          "biases %g and %g", config_long_gate_bias(&c, 0), config_long_gate_bias(&c, 2));
    const double middle = 1 / sqrt(1e-3 * 2.5e-3);
    CHECK(fabs(config_long_gate_bias(&c, 1) / middle + 1) < 1e-14, "%g", config_long_gate_bias(&c, 1));
}

// A tied lm_head is the embedding's row, with room behind it for the rows that GEMMs pad it to.
static void check_tied(void) {
    static const char* const presets[] = {"fox-pro-nano", "hgrn2-nano", "mamba2-nano"};
    for (int i = 0; i < 3; i++) {
        Config c = preset(presets[i]);
        c.vocab_size = 65;
        ParamTable plain = params_build_for(&c, 2);
        c.tie_word_embeddings = true;
        ParamTable tied = params_build_for(&c, 2);
        const Param* embeddings = params_find(&tied, P_EMBEDDINGS, 0);
        CHECK(params_find(&tied, P_LM_HEAD, 0) == embeddings &&
                  params_find(&plain, P_LM_HEAD, 0) != embeddings,
              "%s: the head's row", presets[i]);
        CHECK(embeddings[1].offset >= embeddings->offset + 128 * c.hidden_size, "%s: no padding", presets[i]);
        CHECK(tied.num_rows == plain.num_rows - 1 && tied.num_buckets == plain.num_buckets &&
                  tied.parameters == plain.parameters - 65 * c.hidden_size &&
                  tied.non_embedding == plain.non_embedding,
              "%s: %lld parameters, %lld of them multiply", presets[i], (long long)tied.parameters,
              (long long)tied.non_embedding);
        CHECK(embeddings->init == INIT_NORMAL && embeddings->decays, "%s: the embedding's start", presets[i]);
        params_free(&plain);
        params_free(&tied);
    }
}

// ----------------------------------------------------------------------------
// parts

// Every bucket has equal, aligned parts; every element of the flat buffer is one rank's, in one place of its
// shard.
static void check_parts(const ParamTable* t, int ranks) {
    int* owners = (int*)xcalloc((size_t)t->count, sizeof *owners);
    for (int rank = 0; rank < ranks; rank++) {
        const Shard s = params_shard(t, rank, ranks);
        int64_t next = 0;
        for (int b = 0; b < s.num_buckets; b++) {
            ShardPart part = shard_part(&s, b);
            CHECK(part.local == next, "rank %d: bucket %d begins at %d of the shard", rank, b,
                  (int)part.local);
            CHECK(ranks == 1 || (part.begin | part.count) % PARAM_ALIGN == 0, "part of bucket %d not aligned",
                  b);
            CHECK((part.begin - part.local) % 4 == 0, "bucket %d: 16-byte groups are cut", b);
            for (int64_t i = part.begin; i < part.begin + part.count; i++) owners[i]++;
            next += part.count;
        }
        CHECK(next == shard_count(&s), "the shard of rank %d has %d elements", rank, (int)next);
    }
    int64_t wrong = 0;
    for (int64_t i = 0; i < t->count; i++) wrong += owners[i] != 1;
    CHECK(wrong == 0, "%d ranks: %d elements have no owner, or several", ranks, (int)wrong);
    free(owners);
}

// The ranges of all ranks make up each tensor, in order.
static void check_tensors(const ParamTable* t, int ranks) {
    for (int r = 0; r < t->num_rows; r++) {
        int64_t next = 0;
        for (int rank = 0; rank < ranks; rank++) {
            const Shard s = params_shard(t, rank, ranks);
            TensorRange range = tensor_range(&t->rows[r], &s);
            if (range.count == 0) continue;
            CHECK(range.first == next, "%s: rank %d begins at %d, not %d", t->rows[r].name, rank,
                  (int)range.first, (int)next);
            CHECK(range.local >= 0 && range.local + range.count <= shard_count(&s), "%s: outside the shard",
                  t->rows[r].name);
            next += range.count;
        }
        CHECK(next == t->rows[r].count, "%s: %d of %d elements", t->rows[r].name, (int)next,
              (int)t->rows[r].count);
    }
}

// A bucket holds whole layers: tensors do not cross its end, and the same ones are in it for any number of
// ranks.
static void check_buckets(const ParamTable* t, const ParamTable* alone) {
    int bucket = 0;
    CHECK(t->num_buckets == alone->num_buckets && t->buckets[t->num_buckets] == t->count, "buckets");
    for (int r = 0; r < t->num_rows; r++) {
        const Param *p = &t->rows[r], *a = &alone->rows[r];
        while (p->offset >= t->buckets[bucket + 1]) bucket++;
        CHECK(p->offset + p->count <= t->buckets[bucket + 1], "%s crosses the end of its bucket", p->name);
        CHECK(a->offset >= alone->buckets[bucket] && a->offset < alone->buckets[bucket + 1],
              "%s is in another bucket", p->name);
        CHECK(p->fp32 == a->fp32, "%s has another place in fp32", p->name);
    }
}

static int test_parts(void) {
    check_params();
    check_tied();
    const char* const models[] = {"fox-pro-nano", "transformer-llama-nano"};
    for (int m = 0; m < 2; m++) {
        Config c = preset(models[m]);
        c.vocab_size = 263; // parts of all sizes
        ParamTable alone = params_build(&c);
        CHECK(alone.num_buckets == c.num_hidden_layers + 2, "%d buckets", alone.num_buckets);
        CHECK(alone.count == alone.rows[alone.num_rows - 1].offset + alone.rows[alone.num_rows - 1].count,
              "padding behind the last tensor of one rank alone");
        for (int ranks = 1; ranks <= 9; ranks++) {
            ParamTable t = params_build_for(&c, ranks);
            check_parts(&t, ranks);
            check_tensors(&t, ranks);
            check_buckets(&t, &alone);
            params_free(&t);
        }
        params_free(&alone);
    }
    return test_report();
}
