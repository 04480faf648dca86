/*
Tests of llmc/base/document_count.h, of the data loader's counts and of llmc/run/plan_data.h: documents and
pairs of attention against a count of every pair.
*/
#include "datasets.h"
#include "../../../llmc/run/plan_data.h"

enum { T = 16, EOT = 15, VOCAB = 16, ROWS = 6 * 1024, STREAM = ROWS * T + 1 };

// Adds a sequence by the definition: a pair is of one document if none begins behind the key, up to the
// query.
static void count_all_pairs(DocumentCount* count, const int32_t* inputs, int64_t n, int64_t W) {
    count->sequences++;
    for (int64_t i = 0; i < n; i++) {
        bool apart = false;
        count->documents += i == 0 || inputs[i] == EOT;
        for (int64_t j = i; j >= 0 && (W == 0 || i - j < W); j--) {
            count->pairs++;
            count->seen += !apart;
            apart = apart || inputs[j] == EOT;
        }
    }
}

static void check_counts(const char* name, const DocumentCount* got, const DocumentCount* want) {
    CHECK(got->sequences == want->sequences && got->documents == want->documents &&
              got->pairs == want->pairs && got->seen == want->seen,
          "%s: %.0f sequences, %.0f documents, %.0f of %.0f pairs, not %.0f, %.0f, %.0f of %.0f", name,
          got->sequences, got->documents, got->seen, got->pairs, want->sequences, want->documents, want->seen,
          want->pairs);
}

// Sequences of every length and of few and many documents, in windows from one key to more than there are.
static void test_pairs(void) {
    static const int64_t windows[] = {0, 1, 2, 7, 39, 40, 41, 1000};
    for (int w = 0; w < 8; w++) {
        const AttentionWindows one = {1, {{windows[w], 1}}};
        DocumentCount got = {0, 0, 0, 0}, want = got;
        char name[64];
        for (int64_t n = 1; n <= 40; n++)
            for (int every = 1; every <= 81; every += 16) {
                int32_t inputs[40];
                for (int64_t t = 0; t < n; t++)
                    inputs[t] = random_u64((uint64_t)every, (uint64_t)n, (uint64_t)t) % (uint64_t)every == 0
                                    ? EOT
                                    : 0;
                count_documents(&got, inputs, n, EOT, &one);
                count_all_pairs(&want, inputs, n, windows[w]);
            }
        snprintf(name, sizeof name, "window %lld", (long long)windows[w]);
        check_counts(name, &got, &want);
    }
    const DocumentCount none = {0, 0, 0, 0};
    CHECK(documents_hidden(&none) == 0, "of no pairs %g are hidden", documents_hidden(&none));
    CHECK(attention_pairs(1 << 24, 0) == 140737496743936.0, "%.0f", attention_pairs(1 << 24, 0));
}

// The loader's counts of an epoch, by one rank and by three; those of shards with a mask are the same.
static void test_loader(void) {
    for (int set = 0; set < 4; set++) {
        const bool masked = set % 2, stream = set < 2;
        const int64_t W = masked ? 5 : 0, rows = 36;
        char name[64];
        snprintf(name, sizeof name, "%s%s", stream ? "stream" : "docs", masked ? "_masked" : "");
        write_set_masked(name, VOCAB, stream ? 0 : 2 * T, 20 * T, rows * T + stream, masked);
        strcat(name, "_train_*.bin");
        for (int world = 1; world <= 3; world += 2) {
            DocumentCount got = {0, 0, 0, 0}, want = got, unasked = got;
            for (int rank = 0; rank < world; rank++) {
                DataLoader l;
                Error err = {""};
                const DataOptions options = {.seq_len = T,
                                             .batch = 2,
                                             .share = data_share(world, 2, rank, world),
                                             .vocab_size = VOCAB,
                                             .end_of_text = EOT};
                if (!dataloader_open(&l, in_folder(name), &options, &err)) die("%s", err.msg);
                const int64_t batches = dataloader_sequences(&l) / (2 * world);
                l.counts_documents = true;
                l.windows = (AttentionWindows){1, {{W, 1}}};
                for (int64_t i = 0; i < batches; i++) {
                    int32_t inputs[2 * T], targets[2 * T];
                    CHECK_OK(dataloader_next(&l, inputs, targets, &err));
                    for (int b = 0; b < 2; b++) count_all_pairs(&want, inputs + b * T, T, W);
                }
                got.sequences += l.documents.sequences, got.documents += l.documents.documents;
                got.pairs += l.documents.pairs, got.seen += l.documents.seen;
                l.documents = unasked;
                l.counts_documents = false;
                int32_t inputs[2 * T], targets[2 * T];
                CHECK_OK(dataloader_next(&l, inputs, targets, &err));
                check_counts("unasked", &l.documents, &unasked);
                dataloader_close(&l);
            }
            check_counts(name, &got, &want);
            CHECK(got.seen < got.pairs && got.documents > got.sequences, "%s: one document", name);
        }
    }
}

// ----------------------------------------------------------------------------
// the data of a plan

static PlanData* plan(const char* pattern, int64_t seq_len, int64_t window) {
    PlanData* data = (PlanData*)xcalloc(1, sizeof *data);
    Options o;
    Config c;
    memset(&o, 0, sizeof o), memset(&c, 0, sizeof c);
    o.data = pattern, o.seq_len = seq_len;
    c.mixer = MIXER_ATTENTION, c.document_reset = true;
    c.vocab_size = VOCAB, c.eos_token_id = -1, c.window_size = window;
    plan_data_open(data, &o, &c);
    return data;
}

static void plan_free(PlanData* data) {
    plan_data_close(data);
    free(data);
}

// Adds sequence i of the stream of write_set.
static void count_window(DocumentCount* count, int64_t i, int64_t seq_len, int64_t W) {
    int32_t inputs[64];
    for (int64_t t = 0; t < seq_len; t++) inputs[t] = (int32_t)token(i * seq_len + t, VOCAB);
    count_all_pairs(count, inputs, seq_len, W);
}

// All sequences of a small data set; of a large one as many as may be read, drawn evenly from first to last.
static void test_plan(void) {
    char pattern[PATH_LENGTH];
    write_set("plan", VOCAB, 0, STREAM, STREAM);
    snprintf(pattern, sizeof pattern, "%s", in_folder("plan_train_*.bin"));
    for (int64_t W = 0; W <= 9; W += 9) {
        DocumentCount want = {0, 0, 0, 0}, evenly = want;
        PlanData* data = plan(pattern, 4 * T, W);
        for (int64_t i = 0; i < ROWS / 4; i++) count_window(&want, i, 4 * T, W);
        CHECK(data->opened && data->counted, "%s", data->err.msg);
        check_counts("all", &data->documents, &want);
        plan_free(data);

        data = plan(pattern, T, W);
        CHECK(data->loader.set.sequences == ROWS, "%lld sequences", (long long)data->loader.set.sequences);
        for (int64_t i = 0; i < PLAN_SEQUENCES; i++) // of 3 sequences the first and the last but for rounding
            count_window(&evenly, (int64_t)(((double)i + 0.5) * ROWS / PLAN_SEQUENCES), T, W);
        check_counts("drawn", &data->documents, &evenly);
        CHECK(data->documents.sequences == PLAN_SEQUENCES, "%.0f read", data->documents.sequences);
        plan_free(data);
    }
    // long sequences: as many as PLAN_TOKENS has, at least one
    write_file("long.bin", 20240520, 1, 40000001, 0, 0, 0);
    snprintf(pattern, sizeof pattern, "%s", in_folder("long.bin"));
    CHECK(truncate(pattern, SHARD_HEADER_BYTES + 2 * 40000001) == 0, "%s", strerror(errno)); // of zeros
    static const int64_t lengths[3][2] = {{PLAN_TOKENS / 8, 8}, {4000000, 4}, {20000000, 1}};
    for (int i = 0; i < 3; i++) {
        PlanData* data = plan(pattern, lengths[i][0], 0);
        CHECK(data->counted && data->documents.sequences == (double)lengths[i][1], "%.0f read of %lld tokens",
              data->documents.sequences, (long long)lengths[i][0]);
        plan_free(data);
    }
}

// A mask is no part of the ids. Data that cannot be used, or read, is told.
static void test_refused(void) {
    char pattern[PATH_LENGTH];
    snprintf(pattern, sizeof pattern, "%s", in_folder("stream_masked_train_*.bin"));
    PlanData* data = plan(pattern, T, 0);
    snprintf(pattern, sizeof pattern, "%s", in_folder("stream_train_*.bin"));
    PlanData* same = plan(pattern, T, 0);
    check_counts("with a mask", &data->documents, &same->documents);
    CHECK(data->loader.set.masked && !same->loader.set.masked && same->counted, "%s", same->err.msg);
    plan_free(data), plan_free(same);

    data = plan(NULL, T, 0);
    CHECK(!data->opened && !data->counted, "no data was opened");
    plan_free(data);
    data = plan("no such file", T, 0);
    CHECK(!data->opened && strstr(data->err.msg, "no such file"), "%s", data->err.msg);
    plan_free(data);
    write_file("bad.bin", 20240520, 1, 100, 0, 0, 100); // ids up to 50256
    snprintf(pattern, sizeof pattern, "%s", in_folder("bad.bin"));
    data = plan(pattern, T, 0);
    CHECK(data->opened && !data->counted && strstr(data->err.msg, "outside the vocabulary"), "%s",
          data->err.msg);
    plan_free(data);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("document_count"));
    test_pairs();
    test_loader();
    test_plan();
    test_refused();
    return test_report();
}
