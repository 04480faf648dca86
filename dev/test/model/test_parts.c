/*
Test of the parts of the model that ranks own: buckets of the parameter table (llmc/model/params.h) and parts
of buckets (llmc/model/shard.h).
*/
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/config/presets.h"
#include "../../../llmc/model/shard.h"
#include "../check.h"

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

int main(void) {
    Error err;
    Config c;
    Recipe recipe;
    const char* const models[] = {"fox-pro-nano", "transformer-llama-nano"};
    for (int m = 0; m < 2; m++) {
        if (!config_preset(&c, &recipe, models[m], &err)) die("%s", err.msg);
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
