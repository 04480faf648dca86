/*
Tests of the data loader on shards with a mask of the targets that count: inputs are the ids, and a target
that does not count is TARGET_NONE. Such shards are no dataset together with others.
*/
#include "datasets.h"
#include "../../../llmc/tokens/dataloader.h"

enum { T = 16, EOT = 256, V = 257, MAX_ROWS = 200 };

static bool open_pattern(DataLoader* l, const char* pattern, int64_t vocab_size, Error* err) {
    const DataOptions options = {.seq_len = T,
                                 .batch = 1,
                                 .share = data_share(1, 1, 0, 1),
                                 .vocab_size = vocab_size,
                                 .end_of_text = EOT < vocab_size ? EOT : 0,
                                 .seed = 7};
    return dataloader_open(l, pattern, &options, err);
}

// The index, among all tokens of a dataset, of each sequence's first target. Returns the number of sequences.
static int64_t first_targets(int64_t* first, int64_t D, int64_t shard_tokens, int64_t count) {
    int64_t rows = 0;
    for (int64_t start = 0; D > 0 && start + T <= D; start += T)
        for (int64_t document = 0; document < count; document += D) first[rows++] = document + start;
    for (int64_t shard = 0; D == 0 && shard < count; shard += shard_tokens)
        for (int64_t p = shard; p + T + 1 <= shard + shard_tokens && p + T + 1 <= count; p += T)
            first[rows++] = p + 1;
    return rows;
}

// Documents of one column and of several, and streams.
static void test_targets(void) {
    static const struct {
        const char* name;
        int64_t doc_len, shard_tokens, count;
    } sets[] = {{"docs", 4 * T, 10 * 4 * T, 37 * 4 * T},
                {"column", T, 7 * T, 40 * T},
                {"stream", 0, 10 * T + 5, 37 * T}};
    for (int s = 0; s < 3; s++) {
        const int64_t D = sets[s].doc_len;
        int64_t first[MAX_ROWS], rows = first_targets(first, D, sets[s].shard_tokens, sets[s].count);
        for (int masked = 0; masked < 2; masked++) {
            DataLoader l;
            Error err = {""};
            char name[64];
            int64_t wrong = 0, uncounted = 0;
            snprintf(name, sizeof name, "%s%d", sets[s].name, masked);
            write_set_masked(name, V, D, sets[s].shard_tokens, sets[s].count, masked);
            strcat(name, "_train_*.bin");
            if (!open_pattern(&l, in_folder(name), V, &err)) die("%s", err.msg);
            CHECK(l.set.masked == masked && dataloader_sequences(&l) == rows, "%s: mask %d, %lld sequences",
                  name, l.set.masked, (long long)l.set.sequences);
            for (int64_t i = 0; i < rows; i++) {
                int32_t inputs[T], targets[T];
                CHECK_OK(dataloader_next(&l, inputs, targets, &err));
                for (int64_t t = 0; t < T; t++) {
                    const int64_t at = first[i] + t;
                    const bool counts = !masked || token_counts(at), start = D > 0 && t == 0;
                    wrong += inputs[t] != (start ? EOT : (int32_t)token(at - 1, V));
                    wrong += targets[t] != (counts ? (int32_t)token(at, V) : TARGET_NONE);
                    uncounted += !counts;
                }
            }
            CHECK(wrong == 0 && (uncounted > 0) == masked, "%s: %lld wrong tokens", name, (long long)wrong);
            CHECK(l.uncounted == uncounted, "%s: %lld targets do not count", name, (long long)l.uncounted);
            dataloader_close(&l);
        }
    }
}

static void check_open_fails(const char* pattern, int64_t vocab_size, const char* a, const char* b) {
    DataLoader l;
    Error err = {""};
    const bool ok = open_pattern(&l, pattern, vocab_size, &err);
    CHECK(!ok && strstr(err.msg, a) && strstr(err.msg, b), "%s", err.msg);
    if (ok) dataloader_close(&l);
}

static void test_refused(void) {
    char list[2 * PATH_LENGTH + 2];
    snprintf(list, sizeof list, "%s,%s", in_folder("docs0_train_*.bin"), in_folder("docs1_train_*.bin"));
    check_open_fails(list, V, "docs1_train_000000.bin has a mask", "docs0_train_000000.bin has none");
    write_file("mix1.bin", 20240520, 3, 100, 0, V, 100);
    write_file("mix2.bin", 20240520, 2, 100, 0, V, 100);
    check_open_fails(in_folder("mix[12].bin"), V, "mix2.bin has no mask", "mix1.bin has one");
    check_open_fails(in_folder("docs1_train_*.bin"), V - 1, "vocabulary of 257", "model's 256");
}

// An id outside the vocabulary is refused, whether it counts or not, and is named without its mask.
static void test_ids(void) {
    for (int counts = 0; counts < 2; counts++) {
        DataLoader l;
        Error err = {""};
        int32_t inputs[T], targets[T];
        const uint32_t id = V | (counts ? SHARD_COUNTS : 0);
        write_file("ids.bin", 20240520, 3, 0, 0, 0, 0);
        FILE* f = fopen(in_folder("ids.bin"), "r+b");
        const int32_t header[3] = {20240520, 3, T + 1};
        bool ok =
            f && fwrite(header, sizeof header, 1, f) == 1 && fseek(f, SHARD_HEADER_BYTES, SEEK_SET) == 0;
        for (int t = 0; ok && t <= T; t++) ok = fwrite(&id, sizeof id, 1, f) == 1;
        if (!ok || fclose(f) != 0) die("ids.bin: cannot write");
        CHECK_OK(open_pattern(&l, in_folder("ids.bin"), V, &err));
        CHECK_FAILS("token 0 has id 257, outside", dataloader_next(&l, inputs, targets, &err));
        dataloader_close(&l);
    }
}

int main(void) {
    strcpy(scratch_folder, test_scratch("mask"));
    test_targets();
    test_refused();
    test_ids();
    return test_report();
}
