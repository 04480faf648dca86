/*
Tests of llmc/model/sequence.h and llmc/sequence/split.h: the tokens and heads of ranks that share sequences,
heads by their work, columns of heads, what is refused; of their shares of the data (llmc/run/shares.h); and
of the shorter contexts that they measure (llmc/eval/documents.h).
*/
#include "../../../llmc/eval/documents.h"
#include "../../../llmc/run/shares.h"
#include "../../../llmc/sequence/split.h"
#include "../check.h"
#include "models.h"

// Every token is one rank's, and every head, of which neighbours are on different ranks.
static void check_shares(int64_t T, int heads, int ranks) {
    int64_t next = 0;
    int* owners = (int*)xcalloc((size_t)heads, sizeof *owners);
    for (int rank = 0; rank < ranks; rank++) {
        const SequenceGroup g = sequence_group(5 * ranks + rank, ranks); // of the sixth group
        CHECK(g.rank == rank && g.size == ranks, "rank %d of %d", g.rank, g.size);
        next += sequence_tokens(&g, T);
        for (int i = 0; i < heads / ranks; i++) owners[sequence_head(rank, ranks, i)] += 1 + rank;
    }
    CHECK(next == T, "%d of %d tokens", (int)next, (int)T);
    for (int h = 0; h < heads; h++)
        CHECK(owners[h] == 1 + h % ranks, "head %d of %d, %d ranks: %d", h, heads, ranks, owners[h]);
    free(owners);
}

// Every head is one rank's, in rising order within a rank. owners [ranks * heads], the ranks of heads, is
// written.
static void check_assignment(const int* assignment, int* owners, int ranks, int heads) {
    for (int h = 0; h < ranks * heads; h++) owners[h] = -1;
    for (int at = 0; at < ranks * heads; at++) {
        const int head = (int)sequence_assigned_head(assignment, at / heads, ranks, heads, at % heads);
        CHECK(head >= 0 && head < ranks * heads && owners[head] < 0, "head %d of %d at %d", head,
              ranks * heads, at);
        CHECK(at % heads == 0 || assignment[at - 1] < head, "head %d is not in order", head);
        owners[head] = at / heads;
    }
}

// The largest share of the work that one rank has; ranks by owners, NULL: by sequence_head.
static double largest_share(const unsigned long long* work, const int* owners, int ranks, int n) {
    double sums[SEQUENCE_MAX_RANKS] = {0}, all = 0, largest = 0;
    for (int h = 0; h < n; h++)
        sums[owners ? owners[h] : h % ranks] += (double)work[h], all += (double)work[h];
    for (int r = 0; r < ranks; r++) largest = sums[r] > largest ? sums[r] : largest;
    return largest / all;
}

enum { ASSIGNED_MOST = 64 };

// Work that falls by the factor `ratio` from head to head, from 10^12 on: no worse than without a table. The
// same work of the heads in another order is shared by ranks in the same way.
static void check_balance(int ranks, int heads, double ratio) {
    unsigned long long work[ASSIGNED_MOST], moved[ASSIGNED_MOST];
    int assignment[ASSIGNED_MOST], owners[ASSIGNED_MOST], moved_owners[ASSIGNED_MOST], n = ranks * heads;
    double next = 1e12;
    for (int h = 0; h < n; h++, next *= ratio) work[h] = (unsigned long long)next, assignment[h] = -1;
    sequence_assign_heads(assignment, work, ranks, heads);
    check_assignment(assignment, owners, ranks, heads);
    const double share = largest_share(work, owners, ranks, n), before = largest_share(work, NULL, ranks, n);
    CHECK(share <= before, "%d heads of %d ranks: %.3f, without a table %.3f", n, ranks, share, before);
    const int step = n % 5 ? 5 : 7; // has no factor in common with n
    CHECK(n % step, "%d heads", n);
    for (int h = 0; h < n; h++) moved[h * step % n] = work[h];
    sequence_assign_heads(assignment, moved, ranks, heads); // over the other row
    check_assignment(assignment, moved_owners, ranks, heads);
    for (int h = 0; h < n && ratio < 1 && work[h] > 10; h++) // without ties
        CHECK(moved_owners[h * step % n] == owners[h], "head %d of %d, moved to %d", h, n, h * step % n);
}

static void test_assignment(void) {
    static const unsigned long long work[] = {1000, 1000, 1000, 950, 700, 300, 120, 50, 20, 8, 3, 1};
    int assignment[12], owners[12];
    sequence_assign_heads(assignment, work, 2, 6);
    check_assignment(assignment, owners, 2, 6);
    const double share = largest_share(work, owners, 2, 12), before = largest_share(work, NULL, 2, 12);
    CHECK(share < 0.525 && before > 0.55, "share %.4f, without a table %.4f", share, before);
    static const int shapes[][2] = {{2, 6},  {3, 4}, {4, 3},  {6, 2}, {12, 1},
                                    {2, 12}, {8, 3}, {4, 16}, {2, 32}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int tenths = 5; tenths <= 10; tenths++) check_balance(shapes[i][0], shapes[i][1], 0.1 * tenths);
    // without work the row stays; with the same work everywhere it is that without a table
    const unsigned long long none[12] = {0}, same[12] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
    int row[12], wrong = 0;
    memcpy(row, assignment, sizeof row);
    sequence_assign_heads(row, none, 2, 6);
    CHECK(memcmp(row, assignment, sizeof row) == 0, "a row without work has changed");
    sequence_assign_heads(row, same, 3, 4);
    for (int i = 0; i < 12; i++) wrong += row[i] != sequence_assigned_head(NULL, i / 4, 3, 4, i % 4);
    CHECK(wrong == 0, "%d of 12 heads", wrong);
}

// Columns that heads' ranks have of a row: each of the tensors' once, in order of heads, and no other.
// assignment: a row of the table, or NULL.
static void check_columns(const HeadColumns* h, const int* assignment, int64_t row, const int64_t* begins,
                          const int64_t* widths, int n) {
    int* seen = (int*)xcalloc((size_t)row, sizeof *seen);
    for (int rank = 0; rank < h->ranks; rank++)
        for (int local = 0; local < h->stride; local++) {
            const int whole = head_columns_whole(h, assignment, rank, local);
            CHECK((whole < 0) == (local >= h->columns) && whole < row, "column %d of rank %d is %d", local,
                  rank, whole);
            if (whole >= 0) seen[whole]++;
            // a group of eight is never of two heads where these have 64 channels, nor cut
            if (whole >= 0 && local % 8 && local < h->wide)
                CHECK(whole == head_columns_whole(h, assignment, rank, local - 1) + 1, "column %d of rank %d",
                      local, rank);
        }
    int64_t expected = 0, wrong = 0, found = 0;
    for (int64_t column = 0; column < row; column++) {
        int of = 0;
        for (int i = 0; i < n; i++)
            of += column >= begins[i] && column < begins[i] + widths[i] * h->ranks * h->heads;
        expected += of, found += seen[column], wrong += seen[column] != of;
    }
    CHECK(wrong == 0 && expected == found && found == (int64_t)h->ranks * h->columns,
          "%d columns of %d, %d wrong", (int)found, (int)expected, (int)wrong);
    CHECK(h->stride % HEAD_COLUMNS_ALIGN == 0 && h->stride - h->columns < HEAD_COLUMNS_ALIGN,
          "%d columns, stride %d", h->columns, h->stride);
    const int64_t first = sequence_assigned_head(assignment, 1, h->ranks, h->heads, 0);
    for (int i = 0; i < n; i++)
        CHECK(head_columns_whole(h, assignment, 1, (int)head_columns_local(h, begins[i])) ==
                  begins[i] + first * widths[i],
              "head %d is the first of rank 1", (int)first);
    CHECK(head_columns_local(h, row) == -1, "no such column");
    free(seen);
}

// Chunks follow one another from the first token to the last.
static void test_chunks(void) {
    CHECK(sequence_chunks(2, 1 << 20) == 1, "several sequences are one chunk");
    CHECK(sequence_chunks(1, 100) == 1 && sequence_chunks(1, 2 * SEQUENCE_CHUNK_TOKENS - 1) == 1,
          "few tokens");
    CHECK(sequence_chunks(1, 2 * SEQUENCE_CHUNK_TOKENS) == 2, "two chunks");
    CHECK(sequence_chunks(1, 1 << 20) == SEQUENCE_CHUNKS, "a million tokens");
    static const int64_t tokens[] = {48, 100, 32768, 65552, 99999, 524288};
    for (int i = 0; i < 6; i++)
        for (int chunks = 1; chunks <= (tokens[i] < 1000 ? 3 : SEQUENCE_CHUNKS); chunks++) {
            int64_t next = 0;
            for (int n = 0; n < chunks; n++) {
                const SequenceChunk chunk = sequence_chunk(tokens[i], chunks, n);
                CHECK(chunk.first == next && chunk.tokens > 0 && chunk.first % SEQUENCE_CHUNK_ALIGN == 0,
                      "chunk %d of %d of %d tokens begins at %d", n, chunks, (int)tokens[i],
                      (int)chunk.first);
                next += chunk.tokens;
            }
            CHECK(next == tokens[i], "%d of %d tokens", (int)next, (int)tokens[i]);
        }
}

// A halo is whole blocks of attention, no longer than the tokens, and of one sequence alone.
static void test_halo(void) {
    static const int64_t tokens[][2] = {{8192, 128},     {32768, 128},    {65536, 256}, {131072, 512},
                                        {1 << 18, 1024}, {1 << 20, 1024}, {8064, 0},    {65536 + 64, 0}};
    for (int i = 0; i < 8; i++) {
        CHECK(sequence_halo(1, tokens[i][0]) == tokens[i][1], "%d tokens: %d", (int)tokens[i][0],
              (int)sequence_halo(1, tokens[i][0]));
        CHECK(sequence_halo(2, tokens[i][0]) == 0, "of two sequences of %d tokens", (int)tokens[i][0]);
    }
    int64_t last = 0; // shorter contexts fit into the memory of longer ones
    for (int64_t T = 128; T < 1 << 19; T += 128) {
        CHECK(sequence_halo(1, T) >= last && sequence_halo(1, T) <= T, "%d tokens", (int)T);
        last = sequence_halo(1, T);
    }
    static const struct {
        const char* name;
        bool may;
    } models[] = {{"fox-pro-125m", true}, {"fox-llama-125m", false}, {"transformer-pro-125m", false}};
    for (int i = 0; i < 3; i++) {
        Config c = preset(models[i].name);
        CHECK(sequence_may_halo(&c) == models[i].may, "%s", models[i].name);
        c.document_reset = true;
        CHECK(!sequence_may_halo(&c), "%s with walls", models[i].name);
    }
    // all layers' tensors are as long as layer 0's, with its halo or without
    static const struct {
        const char* layers;
        bool may;
    } stacks[] = {{"attention:window=64,attention", false},
                  {"attention,attention:window=64", false},
                  {"attention:norope,attention:rope", true}};
    for (int i = 0; i < 3; i++) {
        Error error;
        Config c = preset("fox-pro-125m");
        CHECK(config_set(&c, "", "layer_types", stacks[i].layers, &error), "%s", error.msg);
        CHECK(sequence_may_halo(&c) == stacks[i].may, "%s", stacks[i].layers);
        for (int64_t l = 0; l < c.num_hidden_layers; l++) {
            const Config layer = config_layer(&c, l);
            CHECK(sequence_may_halo(&layer) == stacks[i].may, "%s, layer %d", stacks[i].layers, (int)l);
        }
    }
}

// A span is the own tokens behind whole blocks of the rank before's; rank 0's has no halo.
static void test_spans(void) {
    static const int64_t tokens[] = {8192, 65536, 1 << 18};
    for (int i = 0; i < 3; i++)
        for (int ranks = 2; ranks <= SEQUENCE_MAX_RANKS; ranks++)
            for (int r = 0; r < ranks; r++) {
                const int64_t halo = sequence_halo(1, tokens[i]);
                const SequenceGroup g = {r, ranks};
                const SequenceSpan span = sequence_span(&g, tokens[i], halo);
                CHECK(span.halo == (r ? halo : 0) && span.before + span.halo == r * tokens[i],
                      "rank %d of %d: %d tokens, halo %d", r, ranks, (int)span.before, (int)span.halo);
                CHECK(span.before >= 0 && span.before % SEQUENCE_HALO_ALIGN == 0, "rank %d: %d tokens", r,
                      (int)span.before);
            }
}

// A layer has halos on all ranks of a group, or on none.
static void test_agreement(void) {
    int32_t answers[SEQUENCE_MAX_RANKS + 1];
    for (int ranks = 2; ranks <= SEQUENCE_MAX_RANKS; ranks++)
        for (int refuses = 0; refuses <= ranks; refuses++) { // `ranks`: none of the group
            for (int r = 0; r <= ranks; r++) answers[r] = r != refuses;
            CHECK(sequence_halos_suffice(answers, ranks) == (refuses == ranks), "%d ranks, %d refuses", ranks,
                  refuses);
        }
}

static void test_columns(void) {
    static const ParamKind kinds[] = {P_Q_PROJ, P_K_PROJ, P_V_PROJ, P_FGATE_PROJ, P_K_SHIFT, P_V_SHIFT};
    static const struct {
        const char* name;
        int64_t num_kv_heads;
    } models[] = {{"fox-pro-125m", 0},           {"fox-llama-125m", 0}, {"transformer-pro-125m", 0},
                  {"transformer-llama-125m", 0}, {"fox-pro-125m", 4},   {"transformer-llama-125m", 6}};
    for (int m = 0; m < 6; m++) {
        Config c = preset(models[m].name);
        c.num_kv_heads = models[m].num_kv_heads;
        const int64_t heads = config_key_heads(&c);
        ParamTable table = params_build(&c);
        int64_t begins[7], widths[7], n = 0;
        for (int k = 0; k < 6; k++) {
            const Param* p = params_find(&table, kinds[k], 0);
            if (p) begins[n] = p->column, widths[n++] = p->shape[0] / heads;
        }
        for (int ranks = 2; ranks <= 12; ranks++) {
            if (heads % ranks != 0) continue;
            const HeadColumns proj = head_columns_of_proj(&table, &c, ranks),
                              o = head_columns_of_o(&c, ranks);
            const int64_t begin = 0, width = c.hidden_size / heads;
            int last_first[ASSIGNED_MOST]; // another row of the table
            for (int h = 0; h < heads; h++) last_first[h] = (int)heads - 1 - h;
            for (int assigned = 0; assigned < 2; assigned++) {
                const int* assignment = assigned ? last_first : NULL;
                check_columns(&proj, assignment, table.by_layer[0].proj.rows, begins, widths, (int)n);
                check_columns(&o, assignment, c.hidden_size, &begin, &width, 1);
            }
            CHECK(o.stride == c.hidden_size / ranks, "o has no padding");
            CHECK(sequence_message_bytes(2, 50000) >= 400000, "a message holds its losses");
        }
        params_free(&table);
    }
}

static void check_refused(const char* says, const char* model, int64_t N, int ranks, int64_t T) {
    Error error = {""};
    const Config c = preset(model);
    const bool ok = sequence_check(&c, N, ranks, T, &error);
    CHECK(ok == !says && (!says || strstr(error.msg, says)), "%s, %d of %d ranks: %s", model, (int)N, ranks,
          error.msg);
}

static void test_refused(void) {
    check_refused(NULL, "fox-pro-125m", 4, 8, 1 << 20);
    check_refused(NULL, "mamba2-125m", 1, 3, 100);
    check_refused("--sequence-ranks 5: does not divide the 12 heads", "fox-pro-125m", 5, 5, 1000);
    check_refused("--sequence-ranks 4: does not divide the 1002 tokens", "fox-pro-125m", 4, 4, 1002);
    check_refused("--sequence-ranks 4: 6 ranks cannot be groups", "fox-pro-125m", 4, 6, 1024);
    check_refused("--sequence-ranks 2: 1 rank cannot be groups", "fox-pro-125m", 2, 1, 1024);
    check_refused("--sequence-ranks 2: this model has no attention", "mamba2-125m", 2, 2, 1024);
    check_refused(NULL, "fox-pro-local-125m", 4, 8, 1 << 20);
    check_refused("--sequence-ranks 2: this model has recurrent layers", "fox-gdn-125m", 2, 2, 1024);
    Error error;
    Config grouped = preset("fox-pro-125m");
    grouped.num_kv_heads = 4;
    CHECK(sequence_check(&grouped, 4, 4, 1024, &error), "4 ranks of 4 key heads: %s", error.msg);
    CHECK(!sequence_check(&grouped, 6, 6, 1536, &error) &&
              strstr(error.msg, "does not divide the 4 key heads"),
          "6 ranks of 4 key heads: %s", error.msg);
}

// --eval of documents: whatever is not refused has contexts whose sequences N ranks share evenly.
static void test_contexts(void) {
    const int64_t lengths[] = {1, 2048, 3000, 3072, 3073, 6144, 7000, 65536, 1 << 20};
    for (int i = 0; i < (int)(sizeof lengths / sizeof lengths[0]); i++)
        for (int N = 1; N <= SEQUENCE_MAX_RANKS; N++)
            for (int masked = 0; masked < 2; masked++) {
                Error error = {""};
                DocumentLosses d = documents_new(1, lengths[i], masked);
                const SequenceGroup g = {0, N};
                const bool ok = documents_check(lengths[i], masked, N, &error);
                for (int k = 0; ok && k < d.contexts - 1; k++) // asserts
                    CHECK(sequence_tokens(&g, d.context[k] + DOCUMENTS_LAST) > 0, "context %d", k);
                const bool refused = d.contexts > 1 && 3072 % N != 0; // all others are multiples of it
                CHECK(ok == !refused, "T %d, %d ranks: %s", (int)lengths[i], N, error.msg);
                CHECK(ok || strstr(error.msg, "measures sequences of 3072 tokens"), "%s", error.msg);
                documents_free(&d);
            }
}

// Ranks of a group have the same sequences; groups have all of them, and each one once.
static void test_data(void) {
    for (int N = 1; N <= 4; N++)
        for (int groups = 1; groups <= 3; groups++)
            for (int64_t batches = groups; batches < 8; batches++) {
                World world;
                Run run;
                int64_t next = 0;
                memset(&world, 0, sizeof world), memset(&run, 0, sizeof run);
                world.size = N * groups;
                run.world = &world, run.micro_batch = 3, run.options.sequence_ranks = N;
                run.micro_batches = batches;
                CHECK(run_groups(&run) == groups, "%d groups", run_groups(&run));
                for (world.rank = 0; world.rank < world.size; world.rank++) {
                    run.group = sequence_group(world.rank, N);
                    const DataShare s = run_share(&run, batches);
                    CHECK(s.stride == 3 * batches && s.first == next, "rank %d of %d", world.rank,
                          world.size);
                    CHECK(s.count <= 3 * run_rank_batches(&run), "more than the busiest rank's");
                    if (run.group.rank == N - 1) next += s.count;
                }
                CHECK(next == 3 * batches, "%d of %d sequences", (int)next, (int)(3 * batches));
            }
}

static int test_sequence(void) {
    check_shares(1 << 20, 12, 2);
    check_shares(1 << 20, 24, 8);
    check_shares(96, 12, 12);
    test_chunks();
    test_halo();
    test_spans();
    test_agreement();
    test_assignment();
    test_columns();
    test_refused();
    test_contexts();
    test_data();
    return test_report();
}
