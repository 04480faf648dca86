/*
Tests of llmc/tokens/dataloader.h: all sequences in all orders against a plain enumeration, resuming at any
position and with any number of ranks, and errors with the batch that they affect.
*/
#include <sys/resource.h>
#include "loaders.h"

// Overwrites one 2-byte token of a shard.
static void corrupt(const char* name, int64_t index, uint16_t id) {
    int fd = open(in_folder(name), O_WRONLY);
    bool ok = fd >= 0 && pwrite(fd, &id, 2, SHARD_HEADER_BYTES + 2 * index) == 2;
    if (!ok || close(fd) != 0) die("%s: cannot write", name);
}

// Copies a shard over another one in place: onto its inode.
static void copy_over(const char* name, const char* from) {
    char bytes[8192];
    ssize_t n;
    int in = open(in_folder(from), O_RDONLY), out = open(in_folder(name), O_WRONLY | O_TRUNC);
    bool ok = in >= 0 && out >= 0;
    while (ok && (n = read(in, bytes, sizeof bytes)) > 0) ok = write(out, bytes, (size_t)n) == n;
    if (!ok || close(in) != 0 || close(out) != 0) die("%s: cannot write", name);
}

enum { MAX_ROWS = 4096 };

// The sequences of a dataset in order.
typedef struct {
    int64_t n;
    int32_t rows[MAX_ROWS][T + 1];
} Expected;

// Enumerates the sequences of a dataset that write_set wrote with vocabulary size V.
static void enumerate(Expected* e, int64_t doc_len, int64_t shard_tokens, int64_t count) {
    e->n = 0;
    if (doc_len > 0) {
        for (int64_t start = 0; start + T <= doc_len; start += T)
            for (int64_t document = 0; document < count; document += doc_len) {
                int32_t* row = e->rows[e->n++];
                row[0] = EOT;
                for (int t = 0; t < T; t++) row[t + 1] = (int32_t)token(document + start + t, V);
            }
    } else {
        for (int64_t shard = 0; shard < count; shard += shard_tokens) {
            int64_t end = shard + shard_tokens < count ? shard + shard_tokens : count;
            for (int64_t p = shard; p + T + 1 <= end; p += T) {
                int32_t* row = e->rows[e->n++];
                for (int t = 0; t <= T; t++) row[t] = (int32_t)token(p + t, V);
            }
        }
    }
}

// Reads `steps` batches and returns the number of rows that differ from the expected ones, plus 1 on error.
static int64_t wrong_rows(DataLoader* l, const Expected* e, int64_t steps) {
    const DataOptions* o = &l->options;
    int32_t inputs[8 * T], targets[8 * T];
    int64_t wrong = 0;
    Error err = {""};
    for (int64_t s = 0; s < steps; s++) {
        int64_t position = dataloader_position(l), taken = l->taken;
        bool ok = dataloader_next(l, inputs, targets, &err);
        CHECK_OK(ok);
        if (!ok) return wrong + 1;
        bool last = taken + o->batch == o->share.count;
        CHECK(dataloader_position(l) == position + (last ? o->share.stride : 0), "position %lld",
              (long long)l->position);
        for (int64_t b = 0; b < o->batch; b++) {
            int64_t sequence = position + o->share.first + taken + b, i = sequence % e->n;
            if (o->shuffle) i = random_permute(o->seed, (uint64_t)(sequence / e->n), e->n, i);
            wrong += memcmp(inputs + b * T, e->rows[i], T * sizeof(int32_t)) != 0 ||
                     memcmp(targets + b * T, e->rows[i] + 1, T * sizeof(int32_t)) != 0;
        }
    }
    return wrong;
}

static const struct {
    const char *prefix, *pattern;
    int64_t doc_len, shard_tokens, count;
} sets[] = {
    {"docs", "docs_train_*.bin", 4 * T, 10 * 4 * T, 37 * 4 * T},
    {"column", "column_train_*.bin", T, 7 * T, 40 * T},
    {"stream", "stream_train_*.bin", 0, 10 * T + 5, 37 * T},
    {"exact", "exact_train_*.bin", 0, 4 * T + 1, 3 * (4 * T + 1)},
    {"many", "many_train_*.bin", 2 * T, 2 * T, 200 * 2 * T},
    {"name1", "name1_train_*.bin", 0, 100 * T, 20 * T},
    {"name[1]", "name[1]_train_000000.bin", 0, 100 * T, 37 * T}, // a name that as a pattern matches name1
};
enum { NUM_SETS = sizeof sets / sizeof *sets };

static void test_order(void) {
    static Expected e;
    DataLoader l;
    for (int s = 0; s < NUM_SETS; s++) {
        write_set(sets[s].prefix, V, sets[s].doc_len, sets[s].shard_tokens, sets[s].count);
        enumerate(&e, sets[s].doc_len, sets[s].shard_tokens, sets[s].count);
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            open_set(&l, sets[s].pattern, 3, 0, 1, shuffle);
            CHECK(dataloader_sequences(&l) == e.n, "%s: %d sequences", sets[s].prefix, (int)l.set.sequences);
            CHECK(dataloader_position(&l) == 0, "position %lld after open", (long long)l.position);
            int64_t wrong = wrong_rows(&l, &e, e.n); // three epochs
            CHECK(wrong == 0, "%s, shuffle %d: %lld wrong rows", sets[s].prefix, shuffle, (long long)wrong);
            for (int64_t p = 0; p < 3 * e.n; p += 1 + p / 5) { // and after a seek
                dataloader_seek(&l, p);
                CHECK(dataloader_position(&l) == p, "position %lld after a seek", (long long)l.position);
                wrong = wrong_rows(&l, &e, p % 7);
                CHECK(wrong == 0, "%s, shuffle %d, from %lld: %lld wrong rows", sets[s].prefix, shuffle,
                      (long long)p, (long long)wrong);
            }
            dataloader_close(&l);
        }
    }
}

// A shuffled epoch has every sequence exactly once, and two epochs have different orders.
static void test_shuffle(void) {
    static Expected e;
    static int64_t order[2][MAX_ROWS];
    DataLoader l;
    Error err = {""};
    enumerate(&e, sets[2].doc_len, sets[2].shard_tokens, sets[2].count);
    open_set(&l, sets[2].pattern, 1, 0, 1, true);
    int64_t same = 0;
    for (int epoch = 0; epoch < 2; epoch++) {
        int64_t seen[MAX_ROWS] = {0}, once = 0;
        for (int64_t s = 0; s < e.n; s++) {
            int32_t inputs[T], targets[T];
            CHECK_OK(dataloader_next(&l, inputs, targets, &err));
            int64_t i = 0;
            while (i < e.n && memcmp(inputs, e.rows[i], sizeof inputs) != 0) i++;
            if (i < e.n) seen[i]++;
            order[epoch][s] = i;
        }
        for (int64_t i = 0; i < e.n; i++) once += seen[i] == 1;
        CHECK(once == e.n, "epoch %d: %lld sequences occur once", epoch, (long long)once);
    }
    for (int64_t s = 0; s < e.n; s++) same += order[0][s] == order[1][s];
    CHECK(same < e.n / 2, "%lld sequences at the same position in both epochs", (long long)same);
    dataloader_close(&l);
}

// The ranks' shares make up a stride, whether their number divides it or not, and a run resumes unchanged
// with another number of ranks.
static void test_ranks(void) {
    static Expected e;
    enumerate(&e, sets[0].doc_len, sets[0].shard_tokens, sets[0].count);
    int64_t position = 0, strides = 20;
    for (int world = 1; world <= 12; world++) {
        int64_t after = 0, B = world % 6 == 0 ? 2 : 1, next = 0;
        for (int rank = 0; rank < world; rank++) {
            DataLoader l;
            Error err = {""};
            DataOptions options = {T, B, data_share(12 / B, B, rank, world), V, EOT, true, 99, 0};
            CHECK(options.share.stride == 12 && options.share.first == next, "rank %d of %d: a gap", rank,
                  world);
            next += options.share.count;
            if (options.share.count == 0) continue; // 12 ranks for 6 batches
            if (!dataloader_open(&l, in_folder(sets[0].pattern), &options, &err)) die("%s", err.msg);
            dataloader_seek(&l, position);
            int64_t wrong = wrong_rows(&l, &e, strides * options.share.count / B);
            CHECK(wrong == 0, "rank %d of %d: %d wrong rows", rank, world, (int)wrong);
            after = dataloader_position(&l);
            dataloader_close(&l);
        }
        CHECK(next == 12, "%d ranks read %d of 12 sequences", world, (int)next);
        CHECK(after == position + strides * 12, "the position depends on the number of ranks");
        position = after;
    }
}

// llm.c's own files, without document length and vocabulary size, of both versions.
static void test_versions(void) {
    for (int version = 1; version <= 2; version++) {
        char name[32];
        snprintf(name, sizeof name, "v%d.bin", version);
        write_file(name, 20240520, version, 100, 0, 0, 100);
        DataLoader l;
        Error err = {""};
        DataOptions options = {33, 1, data_share(1, 1, 0, 1), 50257, 50256, false, 0, 0};
        bool ok = dataloader_open(&l, in_folder(name), &options, &err);
        CHECK(ok && dataloader_sequences(&l) == 3, "%s", err.msg);
        if (!ok) continue;
        for (int s = 0; s < 3; s++) {
            int32_t inputs[33], targets[33], wrong = 0;
            CHECK_OK(dataloader_next(&l, inputs, targets, &err));
            for (int t = 0; t < 33; t++)
                wrong += (uint32_t)inputs[t] != token(33 * s + t, 50257) ||
                         (uint32_t)targets[t] != token(33 * s + t + 1, 50257);
            CHECK(wrong == 0, "%s, sequence %d: %d wrong tokens", name, s, wrong);
        }
        dataloader_close(&l);
    }
}

// A shuffled dataset with more shards than the process may have open files.
static void test_many_shards(void) {
    static Expected e;
    struct rlimit limit, low;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) die("getrlimit");
    low = limit;
    low.rlim_cur = DATALOADER_OPEN_FILES + 16;
    if (setrlimit(RLIMIT_NOFILE, &low) != 0) die("setrlimit");
    enumerate(&e, sets[4].doc_len, sets[4].shard_tokens, sets[4].count);
    DataLoader l;
    open_set(&l, sets[4].pattern, 8, 0, 1, true);
    CHECK(wrong_rows(&l, &e, 100) == 0, "other sequences");
    dataloader_close(&l);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) die("setrlimit");
}

// close does not block, whatever the reading thread is doing.
static void test_close(void) {
    int32_t inputs[8 * T], targets[8 * T];
    Error err = {""};
    DataLoader l;
    for (int i = 0; i < 200; i++) {
        open_set(&l, sets[0].pattern, 8, 0, 1, false);
        if (i % 4 > 0) CHECK_OK(dataloader_next(&l, inputs, targets, &err));
        for (int seeks = 1; seeks < i % 4; seeks++) dataloader_seek(&l, i);
        dataloader_close(&l);
    }
    open_set(&l, sets[0].pattern, 8, 0, 1, false);
    CHECK_DIES("-1 is not a position", dataloader_seek(&l, -1));
    CHECK_DIES("9223372036854775807 is not a position", dataloader_seek(&l, INT64_MAX));
    dataloader_close(&l);
}

// ----------------------------------------------------------------------------
// invalid datasets

static void test_open(void) {
    char list[2 * PATH_LENGTH + 2];
    check_open_fails(in_folder("nothing_*.bin"), V, "nothing_*.bin", "no file matches");
    check_open_fails("", V, "''", "list of file patterns");
    check_open_fails(in_folder("docs_train_*.bin,"), V, "docs_train_*.bin,'", "list of file patterns");
    check_open_fails(scratch_folder, V, scratch_folder, "not a regular file");
    write_file("magic.bin", 12345, 1, 100, 0, 0, 100);
    check_open_fails(in_folder("magic.bin"), V, "magic.bin", "starts with 12345");
    check_open_fails(in_folder("docs_train_*.bin"), 256, "vocabulary of 257", "model's 256");

    snprintf(list, sizeof list, "%s,%s", in_folder("docs_train_*.bin"), in_folder("docs_train_000001.bin"));
    check_open_fails(list, V, "docs_train_000001.bin", "twice");
    snprintf(list, sizeof list, "%s,%s", in_folder("docs_train_*.bin"), in_folder("stream_train_*.bin"));
    check_open_fails(list, V, "stream_train_000000.bin has documents", "docs_train_000000.bin");
    write_file("mix1.bin", 20240520, 1, 100, 0, 256, 100);
    write_file("mix2.bin", 20240520, 1, 100, 0, 257, 100);
    check_open_fails(in_folder("mix[12].bin"), V, "mix2.bin has a vocabulary of 257", "mix1.bin of 256");
    write_file("mix3.bin", 20240520, 2, 100, 0, 257, 100);
    check_open_fails(in_folder("mix[23].bin"), V, "mix3.bin has tokens of 4 bytes", "mix2.bin of 2");
    write_file("mix4.bin", 20240520, 1, T, 0, 0, T);
    check_open_fails(in_folder("mix4.bin"), V, "mix4.bin", "no shard has the 17 tokens");
    write_file("mix5.bin", 20240520, 1, 4 * (T - 1), T - 1, 0, 4 * (T - 1));
    check_open_fails(in_folder("mix5.bin"), V, "mix5.bin", "15 tokens are shorter");

    // two patterns are one dataset, sorted by name
    DataLoader l;
    Error err = {""};
    DataOptions options = {T, 4, data_share(1, 4, 0, 1), V, EOT, false, 0, 0};
    static Expected e;
    enumerate(&e, sets[0].doc_len, sets[0].shard_tokens, sets[0].count);
    snprintf(list, sizeof list, "%s,%s", in_folder("docs_train_000003.bin"),
             in_folder("docs_train_00000[0-2].bin"));
    bool ok = dataloader_open(&l, list, &options, &err);
    CHECK_OK(ok);
    if (ok) {
        CHECK(wrong_rows(&l, &e, e.n / 4) == 0, "other sequences");
        dataloader_close(&l);
    }

    static const struct {
        DataOptions options;
        const char* expected;
    } invalid[] = {{{0, 1, {1, 0, 1}, V, 0, false, 0, 0}, "1 sequence of 0 tokens"},
                   {{T, 0, {1, 0, 1}, V, 0, false, 0, 0}, "batch of 0 sequences"},
                   {{T, 1, {1, 0, 1}, V, V, false, 0, 0}, "end-of-text"},
                   {{T, 1, {2, 1, 2}, V, 0, false, 0, 0}, "sequences 1 to 3 of 2"},
                   {{T, 2, {4, 0, 3}, V, 0, false, 0, 0}, "not batches of 2"}};
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++)
        CHECK_FAILS(invalid[i].expected,
                    dataloader_open(&l, in_folder("docs_train_*.bin"), &invalid[i].options, &err));
}

// Exits with 1 if the dataset opens and has n sequences; CHECK_DIES checks the warning.
static void open_and_exit(const char* pattern, int64_t n) {
    DataLoader l;
    open_set(&l, pattern, 1, 0, 2, false);
    _exit(dataloader_sequences(&l) == n);
}

static void test_warnings(void) {
    // the last shard is one token shorter than a sequence and its last target
    write_set("tail", V, 0, 4 * T + 1, 2 * (4 * T + 1) + T);
    CHECK_DIES("not used: 1 of 3 shards, for example " TEST_FOLDER
               "/dataloader/tail_train_000002.bin: shorter than "
               "the 17 tokens of a sequence and its last target",
               open_and_exit("tail_train_*.bin", 8));
    write_set("rest", V, 2 * T + 3, 4 * (2 * T + 3), 8 * (2 * T + 3));
    CHECK_DIES("not used with sequences of 16: the last 3 of the 35 tokens of each document",
               open_and_exit("rest_train_*.bin", 16));
    static Expected e;
    DataLoader l;
    enumerate(&e, 2 * T + 3, 4 * (2 * T + 3), 8 * (2 * T + 3));
    open_set(&l, "rest_train_*.bin", 2, 1, 2, false);
    CHECK(wrong_rows(&l, &e, 10) == 0, "other sequences");
    dataloader_close(&l);
}

// An error while reading is reported with the affected batch, not before, and repeated until a seek.
static void check_fails_at(DataLoader* l, const Expected* e, int64_t good, const char* expected) {
    int32_t inputs[8 * T], targets[8 * T];
    int64_t wrong = wrong_rows(l, e, good), position = dataloader_position(l);
    CHECK(wrong == 0, "%lld wrong rows before the batch with the error", (long long)wrong);
    for (int again = 0; again < 3; again++) {
        Error err = {""};
        CHECK(!dataloader_next(l, inputs, targets, &err) && strstr(err.msg, expected), "%s: %s", expected,
              err.msg);
        CHECK(dataloader_position(l) == position, "an error advances the position");
    }
    dataloader_seek(l, 0);
    CHECK(wrong_rows(l, e, 2) == 0, "the error remains after a seek");
}

static void test_errors_while_reading(void) {
    static Expected e;
    DataLoader l;
    write_set("broken", V, 0, 30 * T + 1, 60 * T + 2); // 2 shards of 30 sequences
    strip_checks("broken_train_000001.bin");
    enumerate(&e, 0, 30 * T + 1, 60 * T + 2);

    // in the middle of sequence 45, and its last target, which is also the first input of sequence 46
    static const int64_t places[] = {15 * T + 3, 16 * T};
    for (int i = 0; i < 2; i++) {
        char expected[128];
        snprintf(expected, sizeof expected, "broken_train_000001.bin: token %d has id 257", (int)places[i]);
        corrupt("broken_train_000001.bin", places[i], V);
        open_set(&l, "broken_train_*.bin", 2, 0, 1, false);
        check_fails_at(&l, &e, 22, expected);
        dataloader_close(&l);
        open_set(&l, "broken_train_*.bin", 1, 1, 2, false); // the odd sequences, 45 among them
        check_fails_at(&l, &e, 22, expected);
        dataloader_close(&l);
        open_set(&l, "broken_train_*.bin", 1, 0, 2, false); // the even ones
        if (i == 0) CHECK(wrong_rows(&l, &e, 30) == 0, "an error that affects another rank only");
        if (i == 1) check_fails_at(&l, &e, 23, expected);
        dataloader_close(&l);
        corrupt("broken_train_000001.bin", places[i], (uint16_t)token(30 * T + 1 + places[i], V));
    }

    // truncated to 20 T tokens while in use: after and before the loader opens the shard; then removed
    const char* second = "broken_train_000001.bin";
    open_set(&l, "broken_train_*.bin", 1, 0, 1, false);
    CHECK(wrong_rows(&l, &e, 31) == 0, "other sequences");
    if (truncate(in_folder(second), SHARD_HEADER_BYTES + 2 * 20 * T) != 0) die("truncate");
    dataloader_seek(&l, 31); // without the batches that were read before
    check_fails_at(&l, &e, 0, "broken_train_000001.bin: is truncated");
    dataloader_close(&l);

    write_set("broken", V, 0, 30 * T + 1, 60 * T + 2);
    open_set(&l, "broken_train_*.bin", 1, 0, 1, false);
    CHECK(wrong_rows(&l, &e, 20) == 0, "other sequences");
    if (truncate(in_folder(second), SHARD_HEADER_BYTES + 2 * 20 * T) != 0) die("truncate");
    check_fails_at(&l, &e, 10, "broken_train_000001.bin: is truncated");
    dataloader_close(&l);

    write_set("broken", V, 0, 30 * T + 1, 60 * T + 2);
    open_set(&l, "broken_train_*.bin", 1, 0, 1, false);
    if (remove(in_folder(second)) != 0) die("remove");
    dataloader_seek(&l, 20);
    check_fails_at(&l, &e, 10, "broken_train_000001.bin: cannot open");
    dataloader_close(&l);

    write_set("broken", V, 0, 30 * T + 1, 60 * T + 2);
    open_set(&l, "broken_train_*.bin", 1, 0, 1, false);
    if (rename(in_folder("docs_train_000000.bin"), in_folder(second)) != 0) die("rename"); // other documents
    dataloader_seek(&l, 20);
    check_fails_at(&l, &e, 10, "broken_train_000001.bin: was replaced");
    dataloader_close(&l);
}

// Sets a shard's times to so many seconds and nanoseconds after 1970.
static void set_time(const char* name, int seconds, int nanoseconds) {
    const struct timespec times[2] = {{seconds, nanoseconds}, {seconds, nanoseconds}};
    if (utimensat(AT_FDCWD, in_folder(name), times, 0) != 0) die("utimensat");
}

// A shard that was read and verified is written in place: with checksums, one without a change is read on.
static void test_written_in_place(void) {
    static Expected e;
    enum { n = 30 }; // sequences, in one block
    const char* name = "place_train_000000.bin";
    for (int checksums = 0; checksums < 2; checksums++) {
        DataLoader l;
        write_set("place", V, 0, n * T + 1, n * T + 1);
        if (!checksums) strip_checks(name);
        set_time(name, 1000, 500); // the clock of a file system has ticks
        enumerate(&e, 0, n * T + 1, n * T + 1);
        open_set(&l, name, 1, 0, 1, false);
        CHECK(wrong_rows(&l, &e, n + 2) == 0, "other sequences");
        corrupt(name, 7, (uint16_t)token(7, V)); // as it was
        if (!checksums) set_time(name, 1000, 501);
        dataloader_seek(&l, n);
        Error err = {""};
        int32_t inputs[T], targets[T];
        if (checksums) {
            CHECK(wrong_rows(&l, &e, n + 2) == 0, "not read on");
            set_time(name, 2000, 0);
            dataloader_seek(&l, 2 * n);
            CHECK(wrong_rows(&l, &e, n + 2) == 0, "not read on");
            set_time(name, 3000, 0);
            corrupt(name, 7, (uint16_t)(token(7, V) ^ 1));
            dataloader_seek(&l, 3 * n + 9); // another sequence of the block
            CHECK_FAILS("place_train_000000.bin: damaged", dataloader_next(&l, inputs, targets, &err));
        } else {
            CHECK_FAILS("place_train_000000.bin: was written while in use",
                        dataloader_next(&l, inputs, targets, &err));
        }
        // another shard of the same length is copied over it
        write_set("over", V, n * T + 1, n * T + 1, n * T + 1);
        if (!checksums) strip_checks("over_train_000000.bin");
        copy_over(name, "over_train_000000.bin");
        dataloader_seek(&l, 4 * n);
        CHECK_FAILS("place_train_000000.bin: was replaced by another shard while in use",
                    dataloader_next(&l, inputs, targets, &err));
        dataloader_close(&l);
    }
}

// The same tokens twice, by a link or as a copy, with checksums or without.
static void test_repeated(void) {
    const char *second = "twice_train_000001.bin", *third = "twice_train_000002.bin";
    for (int checksums = 0; checksums < 2; checksums++) {
        remove(in_folder(third));
        write_set("twice", V, 0, 8000 * T, 16000 * T);
        if (!checksums) strip_checks("twice_train_000000.bin");
        if (!checksums) strip_checks(second);
        for (int kind = 0; kind < 3; kind++) {
            remove(in_folder(third));
            if (kind == 0 && symlink(second, in_folder(third)) != 0) die("symlink");
            if (kind == 1 && link(in_folder(second), in_folder(third)) != 0) die("link");
            if (kind == 2) {
                write_bytes(in_folder(third), "", 0);
                copy_over(third, second);
            }
            check_open_fails(in_folder("twice_train_*.bin"), V, "twice_train_000001.bin and as build/",
                             third);
        }
    }
}

// Shards of a dataset in another one: a copy in place of one, until its last token differs.
static void test_shared(void) {
    DataLoader l, other;
    Error err = {""};
    int64_t shared;
    write_set("train", V, 0, 8000 * T, 16000 * T);
    write_set("val", V, 0, 100 * T, 200 * T);
    for (int i = 0; i < 3; i++) {
        if (i == 1) copy_over("val_train_000001.bin", "train_train_000001.bin");
        if (i == 2) corrupt("val_train_000001.bin", 8000 * T - 1, 300);
        const char* example = "";
        open_set(&l, "train_train_*.bin", 1, 0, 1, false);
        open_set(&other, "val_train_*.bin", 1, 0, 1, false);
        CHECK(dataset_shared(&other.set, &l.set, &shared, &example, &err) && shared == (i == 1),
              "%lld, %s, %s", (long long)shared, example, err.msg);
        CHECK(strstr(example, i == 1 ? "val_train_000001.bin" : ""), "%s", example);
        dataloader_close(&other);
        dataloader_close(&l);
    }
}

// A changed bit in a block of tokens is an error with the first batch that has a token of it.
static void test_damage(void) {
    enum { tokens = 3 * SHARD_MIN_BLOCK + 1 }; // 4 blocks, 2048 sequences in each of the first three
    static Expected e;
    DataLoader l;
    write_set("bit", V, 0, tokens, tokens);
    enumerate(&e, 0, 256 * T + 1, 256 * T + 1); // the first of them
    corrupt("bit_train_000000.bin", SHARD_MIN_BLOCK + 5, (uint16_t)(token(SHARD_MIN_BLOCK + 5, V) ^ 1));
    open_set(&l, "bit_train_*.bin", 1, 0, 1, false);
    int32_t inputs[T], targets[T];
    Error err = {""};
    CHECK(wrong_rows(&l, &e, 256) == 0, "other sequences");
    dataloader_seek(&l, SHARD_MIN_BLOCK / T - 2);
    CHECK_OK(dataloader_next(&l, inputs, targets, &err));
    // the last target of this sequence is the first token of the damaged block
    CHECK_FAILS("bit_train_000000.bin: damaged: the block of tokens from 32768 on",
                dataloader_next(&l, inputs, targets, &err));
    dataloader_close(&l);
    // the same change without checksums is not noticed
    strip_checks("bit_train_000000.bin");
    open_set(&l, "bit_train_*.bin", 1, 0, 1, false);
    dataloader_seek(&l, SHARD_MIN_BLOCK / T);
    CHECK_OK(dataloader_next(&l, inputs, targets, &err));
    CHECK(targets[4] == (int32_t)(token(SHARD_MIN_BLOCK + 5, V) ^ 1), "another token");
    dataloader_close(&l);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("dataloader"));
    test_order();
    test_shuffle();
    test_ranks();
    test_versions();
    test_many_shards();
    test_close();
    test_open();
    test_warnings();
    test_errors_while_reading();
    test_written_in_place();
    test_repeated();
    test_shared();
    test_damage();
    return test_report();
}
