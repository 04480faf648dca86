/*
Tests of llmc/tokens/fingerprint.h: what changes a fingerprint, and what does not.
*/
#include "datasets.h"
#include "../../../llmc/tokens/fingerprint.h"

enum { T = 16, V = 257 };

static void open_shards(Dataset* set, const char* pattern, int64_t seq_len) {
    Error err = {""};
    memset(set, 0, sizeof *set);
    set->seq_len = seq_len, set->vocab_size = V;
    if (!dataset_open(set, in_folder(pattern), &err)) die("%s", err.msg);
}

// The fingerprint of a dataset in sequences of seq_len tokens.
static uint64_t print_of(const char* pattern, int64_t seq_len) {
    Dataset set;
    Error err = {""};
    uint64_t hash = 0, again = 0;
    open_shards(&set, pattern, seq_len);
    CHECK_OK(dataset_fingerprint(&set, &hash, &err));
    CHECK_OK(dataset_fingerprint(&set, &again, &err));
    CHECK(hash == again && hash != 0, "%llx and %llx", (unsigned long long)hash, (unsigned long long)again);
    dataset_free(&set);
    return hash;
}

// Changes a byte of a file by 1.
static void change(const char* name, int64_t byte, int by) {
    unsigned char c = 0;
    int fd = open(in_folder(name), O_RDWR);
    bool ok = fd >= 0 && pread(fd, &c, 1, (off_t)byte) == 1;
    c = (unsigned char)(c + by);
    if (!ok || pwrite(fd, &c, 1, (off_t)byte) != 1 || close(fd) != 0) die("%s: cannot write", name);
}

// The checksums of a shard are part of the fingerprint: they cover what the samples do not.
static void test_checksums(void) {
    write_set("summed", V, 0, 1000, 3000);
    const uint64_t print = print_of("summed_train_*.bin", T);
    strip_checks("summed_train_000001.bin");
    CHECK(print_of("summed_train_*.bin", T) != print, "the checksums do not count");
}

// A mask changes the fingerprint of the same ids, even one that masks nothing.
static void test_mask(void) {
    write_file("ids.bin", 20240520, 2, 2 * T + 1, 0, 0, 2 * T + 1);
    write_file("masked.bin", 20240520, 3, 2 * T + 1, 0, 0, 2 * T + 1);
    CHECK(print_of("masked.bin", T) != print_of("ids.bin", T), "the mask does not count");
}

// A small dataset, of three shards without checksums, is covered completely.
static void test_small(void) {
    write_set("small", V, 4 * T, 10 * 4 * T, 25 * 4 * T);
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "small_train_%06d.bin", i);
        strip_checks(name);
    }
    const uint64_t print = print_of("small_train_*.bin", T);
    const int64_t bytes = 2 * 10 * 4 * T;
    for (int64_t at = 0; at < bytes; at += at % 2 ? 7 : 10) {
        change("small_train_000001.bin", SHARD_HEADER_BYTES + at, 1);
        CHECK(print_of("small_train_*.bin", T) != print, "byte %lld does not count", (long long)at);
        change("small_train_000001.bin", SHARD_HEADER_BYTES + at, -1);
    }
    CHECK(print_of("small_train_*.bin", T) == print, "not a function of the data");
    CHECK(print_of("small_train_*.bin", 2 * T) != print, "the number of sequences does not count");
    CHECK(print_of("small_train_00000[01].bin", T) != print, "a missing shard does not count");

    // a header field that changes neither the tokens nor the number of sequences: the vocabulary, to unknown
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "small_train_%06d.bin", i);
        change(name, 4 * 4, -1), change(name, 4 * 4 + 1, -1); // 257 becomes 0
    }
    CHECK(print_of("small_train_*.bin", T) != print, "the header does not count");
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "small_train_%06d.bin", i);
        change(name, 4 * 4, 1), change(name, 4 * 4 + 1, 1);
    }

    // a moved folder with other names in the same order; then in another order
    if (mkdir(in_folder("moved"), 0777) != 0) die("mkdir: %s", strerror(errno));
    static const char* const names[][2] = {{"small_train_000000.bin", "moved/a.bin"},
                                           {"small_train_000001.bin", "moved/b.bin"},
                                           {"small_train_000002.bin", "moved/c.bin"}};
    for (int i = 0; i < 3; i++) CHECK(rename(in_folder(names[i][0]), in_folder(names[i][1])) == 0, "rename");
    CHECK(print_of("moved/*.bin", T) == print, "the names count");
    CHECK(rename(in_folder("moved/a.bin"), in_folder("moved/bb.bin")) == 0, "rename");
    CHECK(print_of("moved/*.bin", T) != print, "the order does not count");
}

// A large dataset is sampled. A block is read across the borders of shards, and counts to its last byte.
static void test_large(void) {
    enum { shard_bytes = 2 * 70000, shards = 5, total = shard_bytes * shards };
    static const int64_t last = total - FINGERPRINT_BLOCK;
    write_set("large", V, 0, shard_bytes / 2, total / 2);
    const uint64_t print = print_of("large_train_*.bin", T);
    for (int64_t i = 0; i < FINGERPRINT_SAMPLES; i++) {
        for (int end = 0; end < 2; end++) { // first and last byte of sample i
            const int64_t at = last * i / (FINGERPRINT_SAMPLES - 1) + (end ? FINGERPRINT_BLOCK - 1 : 0);
            char name[64];
            snprintf(name, sizeof name, "large_train_%06d.bin", (int)(at / shard_bytes));
            change(name, SHARD_HEADER_BYTES + at % shard_bytes, 1);
            CHECK(print_of("large_train_*.bin", T) != print, "sample %lld, %s byte", (long long)i,
                  end ? "last" : "first");
            change(name, SHARD_HEADER_BYTES + at % shard_bytes, -1);
        }
    }
    change("large_train_000000.bin", SHARD_HEADER_BYTES + FINGERPRINT_BLOCK, 1); // between two samples
    CHECK(print_of("large_train_*.bin", T) == print, "more than the samples is read");
}

static void test_errors(void) {
    Dataset set;
    Error err = {""};
    uint64_t hash;
    write_set("gone", V, 0, 1000, 3000);
    open_shards(&set, "gone_train_*.bin", T);
    CHECK(truncate(in_folder("gone_train_000002.bin"), SHARD_HEADER_BYTES + 10) == 0, "truncate");
    CHECK_FAILS("gone_train_000002.bin: ends at byte", dataset_fingerprint(&set, &hash, &err));
    CHECK(remove(in_folder("gone_train_000002.bin")) == 0, "remove");
    CHECK_FAILS("gone_train_000002.bin: cannot open", dataset_fingerprint(&set, &hash, &err));
    dataset_free(&set);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("fingerprint"));
    test_checksums();
    test_mask();
    test_small();
    test_large();
    test_errors();
    return test_report();
}
