/*
Tests of llmc/tokens/shard.h and llmc/tokens/dataloader.h: what is written is read back, every sequence in every order is
compared with a plain enumeration, a run resumes at any position and on any number of ranks, and every kind of
bad file is reported where it belongs.
*/
#include <sys/resource.h>
#include "../check.h"
#include "../../../llmc/tokens/dataloader.h"

// Checks that a call that reports through `err` succeeds, or fails with `expected` in its message.
#define CHECK_OK(call)              CHECK(call, "%s", err.msg)
#define CHECK_FAILS(expected, call) CHECK(!(call) && strstr(err.msg, expected), "%s", err.msg)

static char folder[PATH_LENGTH]; // the test's scratch folder

// Token number i of every test data set; ids reach vocab_size - 1.
static uint32_t token(int64_t i, int64_t vocab_size) {
    return (uint32_t)(random_u64(123, 0, (uint64_t)i) % (uint64_t)vocab_size);
}

// The path of a file in the scratch folder; the last eight stay valid.
static const char* in_folder(const char* name) {
    static char paths[8][PATH_LENGTH];
    static int next;
    char* path = paths[next++ % 8];
    path_join(path, folder, name);
    return path;
}

static bool exists(const char* name) { return access(in_folder(name), F_OK) == 0; }

// Writes tokens [0, count) with the writer, in pieces of odd sizes.
static void write_set(const char* prefix, int64_t vocab_size, int64_t doc_len, int64_t shard_tokens,
                      int64_t count) {
    ShardWriter w;
    Error err = {""};
    uint32_t piece[97];
    bool ok = shard_writer_open(&w, in_folder(prefix), "train", vocab_size, doc_len, shard_tokens, &err);
    for (int64_t i = 0; ok && i < count;) {
        int64_t n = 1 + (i * 7) % 97;
        if (n > count - i) n = count - i;
        for (int64_t j = 0; j < n; j++) piece[j] = token(i + j, vocab_size);
        ok = shard_write(&w, piece, n, &err);
        i += n;
    }
    ok = ok && shard_writer_close(&w, &err);
    CHECK_OK(ok);
}

// Writes a file by hand: five fields of header, and `count` tokens of 2 bytes, or of 4 in version 2.
static void write_file(const char* name, int magic, int version, int tokens, int doc_len, int vocab_size,
                       int count) {
    int32_t header[256] = {magic, version, tokens, doc_len, vocab_size};
    FILE* f = fopen(in_folder(name), "wb");
    bool ok = f && fwrite(header, sizeof header, 1, f) == 1;
    for (int i = 0; ok && i < count; i++) {
        uint32_t id = token(i, 50257);
        ok = fwrite(&id, version == 2 ? 4 : 2, 1, f) == 1;
    }
    if (!ok || fclose(f) != 0) die("%s: cannot write", name);
}

// Overwrites one 2-byte token of a shard.
static void corrupt(const char* name, int64_t index, uint16_t id) {
    int fd = open(in_folder(name), O_WRONLY);
    bool ok = fd >= 0 && pwrite(fd, &id, 2, SHARD_HEADER_BYTES + 2 * index) == 2;
    if (!ok || close(fd) != 0) die("%s: cannot write", name);
}

// ----------------------------------------------------------------------------
// shards

static void test_writer(void) {
    static const struct {
        int64_t vocab_size, doc_len, shard_tokens, count, shards, capacity;
    } cases[] = {
        {257, 0, 1000, 2500, 3, 1000},        {65536, 0, 1000, 2000, 2, 1000},
        {65537, 0, 100000, 30000, 1, 100000}, {50257, 64, 1000, 1920, 2, 960},
        {100000, 64, 64, 192, 3, 64},         {1, 0, 1, 3, 3, 1},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char prefix[32], name[64];
        snprintf(prefix, sizeof prefix, "writer%d/set", (int)c); // in a folder that the writer makes
        write_set(prefix, cases[c].vocab_size, cases[c].doc_len, cases[c].shard_tokens, cases[c].count);
        int64_t at = 0, wrong = 0;
        for (int64_t s = 0; s < cases[c].shards; s++) {
            snprintf(name, sizeof name, "%s_train_%06d.bin", prefix, (int)s);
            const char* path = in_folder(name);
            Error err = {""};
            ShardHeader h = {0, 0, 0, 0};
            int64_t left = cases[c].count - at, capacity = cases[c].capacity;
            int64_t expected = left < capacity ? left : capacity;
            int fd = shard_open(path, &err);
            bool ok = fd >= 0 && shard_read_header_fd(fd, path, &h, &err);
            CHECK_OK(ok);
            if (!ok) continue;
            CHECK(h.tokens == expected, "%s: %lld tokens", name, (long long)h.tokens);
            CHECK(h.doc_len == cases[c].doc_len, "%s", name);
            CHECK(h.vocab_size == cases[c].vocab_size, "%s", name);
            CHECK(h.bytes_per_token == (h.vocab_size <= 65536 ? 2 : 4), "%s", name);
            int32_t* ids = (int32_t*)xcalloc((size_t)h.tokens, sizeof *ids);
            CHECK_OK(shard_read_tokens(fd, path, &h, 0, h.tokens, ids, &err));
            for (int64_t i = 0; i < h.tokens; i++)
                wrong += (uint32_t)ids[i] != token(at + i, cases[c].vocab_size);
            at += h.tokens;
            free(ids);
            close(fd);
        }
        CHECK(at == cases[c].count && wrong == 0, "case %d: %d tokens, %d wrong", (int)c, (int)at,
              (int)wrong);
        snprintf(name, sizeof name, "%s_train_%06d.bin", prefix, (int)cases[c].shards);
        CHECK(!exists(name), "%s: one shard too many", name);
        snprintf(name, sizeof name, "%s_train_%06d.bin.tmp", prefix, (int)cases[c].shards - 1);
        CHECK(!exists(name), "%s: left behind", name);
    }

    // the bytes themselves, as any other program would read them
    write_set("bytes", 50257, 2, 4, 4);
    Error err = {""};
    size_t size = 0;
    unsigned char* data = (unsigned char*)read_file(in_folder("bytes_train_000000.bin"), &size, &err);
    CHECK(data && size == 1024 + 8, "%zu bytes", size);
    if (data && size == 1024 + 8) {
        static const unsigned char head[20] = {0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0,    4,
                                               0,    0,    0,    2,    0, 0, 0, 0x51, 0xc4};
        int nonzero = 0;
        for (int i = 20; i < 1024; i++) nonzero += data[i] != 0;
        CHECK(memcmp(data, head, 20) == 0 && nonzero == 0, "header differs");
        for (int i = 0; i < 4; i++)
            CHECK(data[1024 + 2 * i] + 256u * data[1025 + 2 * i] == token(i, 50257), "token %d differs", i);
    }
    free(data);
}

static void test_writer_resumes_and_gives_up(void) {
    ShardWriter w;
    Error err = {""};
    uint32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 10};

    CHECK_OK(shard_writer_open(&w, in_folder("skip"), "val", 10, 0, 4, &err));
    CHECK(!shard_writer_skip_to(&w, -1) && !shard_writer_skip_to(&w, 1000000), "a number out of range");
    CHECK(shard_writer_skip_to(&w, 5), "cannot skip");
    CHECK_OK(shard_write(&w, ids, 6, &err));
    CHECK(!shard_writer_skip_to(&w, 9), "skips in the middle of a shard");
    CHECK(!exists("skip_val_000006.bin") && exists("skip_val_000006.bin.tmp"), "not under a temporary name");
    CHECK_OK(shard_writer_close(&w, &err));
    CHECK(!exists("skip_val_000004.bin") && exists("skip_val_000005.bin") && exists("skip_val_000006.bin"),
          "names");

    CHECK_OK(shard_writer_open(&w, in_folder("none"), "val", 10, 0, 4, &err));
    CHECK(shard_writer_close(&w, &err) && !exists("none_val_000000.bin"), "an empty shard");

    CHECK_OK(shard_writer_open(&w, in_folder("abort"), "val", 10, 0, 4, &err));
    CHECK_OK(shard_write(&w, ids, 6, &err));
    shard_writer_abort(&w);
    shard_writer_abort(&w);
    CHECK(exists("abort_val_000000.bin") && !exists("abort_val_000001.bin.tmp"),
          "complete stays, begun goes");

    CHECK_OK(shard_writer_open(&w, in_folder("bad"), "val", 10, 0, 4, &err));
    CHECK_OK(shard_write(&w, ids, 2, &err));
    CHECK_FAILS("bad: token 9 has id 10", shard_write(&w, ids, 8, &err));
    CHECK(!exists("bad_val_000000.bin") && !exists("bad_val_000000.bin.tmp"), "left behind");

    CHECK_OK(shard_writer_open(&w, in_folder("part"), "val", 10, 4, 8, &err));
    CHECK_OK(shard_write(&w, ids, 6, &err));
    CHECK_FAILS("only 2 of 4", shard_writer_close(&w, &err));
    CHECK(!exists("part_val_000000.bin") && !exists("part_val_000000.bin.tmp"), "left behind");

    const char* prefix = in_folder("x");
    CHECK_FAILS("cannot hold", shard_writer_open(&w, prefix, "val", 10, 8, 4, &err));
    CHECK_FAILS("vocabulary", shard_writer_open(&w, prefix, "val", 0, 0, 4, &err));
    CHECK_FAILS("document", shard_writer_open(&w, prefix, "val", 9, -1, 4, &err));
    CHECK_FAILS("a shard", shard_writer_open(&w, prefix, "val", 9, 0, 1ll << 31, &err));
    CHECK_FAILS("abort_val_000000.bin",
                shard_writer_open(&w, in_folder("abort_val_000000.bin/x"), "val", 9, 0, 4, &err));
    CHECK_OK(shard_writer_open(&w, in_folder("taken"), "val", 10, 0, 4, &err));
    if (!make_folders(in_folder("taken_val_000000.bin.tmp"), &err)) die("%s", err.msg);
    CHECK_FAILS("taken_val_000000.bin.tmp: cannot create", shard_write(&w, ids, 6, &err));
}

// A shorter data set over a longer one: the old shards behind it must not go unnoticed. Exits 1 if it closes.
static void write_over_longer(void) {
    ShardWriter w;
    Error err = {""};
    uint32_t ids[2] = {1, 2};
    bool ok = shard_writer_open(&w, in_folder("over"), "train", 257, 0, 1000, &err);
    _exit(ok && shard_write(&w, ids, 2, &err) && shard_writer_close(&w, &err) ? 1 : 0);
}

static void test_headers(void) {
    static const struct {
        const char* name;
        int magic, version, tokens, doc_len, vocab_size, count;
        const char* expected; // NULL: good
    } cases[] = {
        {"good.bin", 20240520, 1, 100, 0, 0, 100, NULL},
        {"good2.bin", 20240520, 2, 100, 50, 50257, 100, NULL},
        {"short.bin", 20240520, 1, 100, 0, 0, 99, "promises 100 tokens of 2 bytes, 99 follow"},
        {"short2.bin", 20240520, 2, 100, 0, 0, 99, "promises 100 tokens of 4 bytes, 99 follow"},
        {"long.bin", 20240520, 1, 100, 0, 0, 101, "is too long"},
        {"magic.bin", 12345, 1, 100, 0, 0, 100, "starts with 12345, not 20240520"},
        {"llama.bin", 20240801, 7, 100, 0, 0, 100, "Llama 3"},
        {"eval.bin", 20240522, 1, 100, 0, 0, 100, "evaluation set"},
        {"version.bin", 20240520, 3, 100, 0, 0, 100, "version 3"},
        {"none.bin", 20240520, 1, 0, 0, 0, 0, "holds no tokens"},
        {"negative.bin", 20240520, 1, -100, 0, 0, 100, "damaged header"},
        {"doc.bin", 20240520, 1, 100, -1, 0, 100, "damaged header"},
        {"vocab.bin", 20240520, 1, 100, 0, -1, 100, "damaged header"},
        {"divide.bin", 20240520, 1, 100, 30, 0, 100, "no whole number of documents of 30"},
    };
    ShardHeader h;
    Error err = {""};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const char *name = cases[c].name, *expected = cases[c].expected;
        write_file(name, cases[c].magic, cases[c].version, cases[c].tokens, cases[c].doc_len,
                   cases[c].vocab_size, cases[c].count);
        strcpy(err.msg, "");
        bool ok = shard_read_header(in_folder(name), &h, &err);
        CHECK(ok == !expected, "%s: %s", name, err.msg);
        CHECK(!expected || (strstr(err.msg, name) && strstr(err.msg, expected)), "%s: %s", name, err.msg);
    }
    CHECK_FAILS("nowhere.bin: cannot open", shard_read_header(in_folder("nowhere.bin"), &h, &err));
    if (truncate(in_folder("long.bin"), 1000) != 0 || truncate(in_folder("short.bin"), 0) != 0)
        die("truncate");
    CHECK_FAILS("1000 bytes", shard_read_header(in_folder("long.bin"), &h, &err));
    CHECK_FAILS("is empty", shard_read_header(in_folder("short.bin"), &h, &err));
    CHECK_FAILS("no regular file", shard_read_header(folder, &h, &err));
    if (mkfifo(in_folder("pipe.bin"), 0666) != 0) die("mkfifo");
    CHECK_FAILS("no regular file", shard_read_header(in_folder("pipe.bin"), &h, &err));
}

// ----------------------------------------------------------------------------
// sequences

enum { T = 16, EOT = 256, V = 257, MAX_ROWS = 4096 };

// A data set's sequences in order, enumerated the plain way.
typedef struct {
    int64_t n;
    int32_t rows[MAX_ROWS][T + 1];
} Expected;

// Of what write_set has written with a vocabulary of V.
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

// Reads `steps` batches and compares each row with the expected one. Returns the number of wrong rows; an
// error is one.
static int64_t wrong_rows(DataLoader* l, const Expected* e, int64_t steps) {
    int32_t inputs[8 * T], targets[8 * T];
    int64_t wrong = 0;
    Error err = {""};
    for (int64_t s = 0; s < steps; s++) {
        int64_t position = dataloader_position(l);
        bool ok = dataloader_next(l, inputs, targets, &err);
        CHECK_OK(ok);
        if (!ok) return wrong + 1;
        CHECK(dataloader_position(l) == position + l->B * l->world, "position %lld", (long long)l->position);
        for (int64_t b = 0; b < l->B; b++) {
            int64_t sequence = position + l->rank * l->B + b, i = sequence % e->n;
            if (l->shuffle) i = random_permute(l->seed, (uint64_t)(sequence / e->n), e->n, i);
            wrong += memcmp(inputs + b * T, e->rows[i], T * sizeof(int32_t)) != 0 ||
                     memcmp(targets + b * T, e->rows[i] + 1, T * sizeof(int32_t)) != 0;
        }
    }
    return wrong;
}

// Opens a set for one rank of one, unless said otherwise; dies if that fails.
static void open_set(DataLoader* l, const char* pattern, int64_t B, int64_t rank, int64_t world,
                     bool shuffle) {
    Error err = {""};
    if (!dataloader_open(l, in_folder(pattern), T, B, V, EOT, rank, world, shuffle, 99, &err))
        die("%s", err.msg);
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
            CHECK(dataloader_sequences(&l) == e.n, "%s: %d sequences", sets[s].prefix, (int)l.sequences);
            CHECK(dataloader_position(&l) == 0, "position");
            int64_t wrong = wrong_rows(&l, &e, e.n); // three epochs
            CHECK(wrong == 0, "%s, shuffle %d: %lld wrong rows", sets[s].prefix, shuffle, (long long)wrong);
            for (int64_t p = 0; p < 3 * e.n; p += 1 + p / 5) { // and from anywhere
                dataloader_seek(&l, p);
                CHECK(dataloader_position(&l) == p, "position");
                wrong = wrong_rows(&l, &e, p % 7);
                CHECK(wrong == 0, "%s, shuffle %d, from %lld: %lld wrong rows", sets[s].prefix, shuffle,
                      (long long)p, (long long)wrong);
            }
            dataloader_close(&l);
        }
    }
}

// A shuffled epoch has every sequence once, and two epochs differ.
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
        CHECK(once == e.n, "epoch %d: %lld sequences come once", epoch, (long long)once);
    }
    for (int64_t s = 0; s < e.n; s++) same += order[0][s] == order[1][s];
    CHECK(same < e.n / 2, "%lld sequences at the same place in both epochs", (long long)same);
    dataloader_close(&l);
}

// Ranks share each global batch out between them, and a run goes on unchanged on other numbers of ranks.
static void test_ranks(void) {
    static Expected e;
    enumerate(&e, sets[0].doc_len, sets[0].shard_tokens, sets[0].count);
    static const int worlds[] = {1, 2, 3, 6};
    int64_t position = 0;
    for (int w = 0; w < 4; w++) {
        int64_t world = worlds[w], B = 6 / world, after = 0;
        for (int64_t rank = 0; rank < world; rank++) {
            DataLoader l;
            open_set(&l, sets[0].pattern, B, rank, world, true);
            dataloader_seek(&l, position);
            int64_t wrong = wrong_rows(&l, &e, 20);
            CHECK(wrong == 0, "rank %d of %d: %d wrong rows", (int)rank, (int)world, (int)wrong);
            after = dataloader_position(&l);
            dataloader_close(&l);
        }
        CHECK(after == position + 20 * 6, "the position depends on the number of ranks");
        position = after;
    }
}

// llm.c's own files: no document length and no vocabulary; and tokens of 4 bytes.
static void test_versions(void) {
    for (int version = 1; version <= 2; version++) {
        char name[32];
        snprintf(name, sizeof name, "v%d.bin", version);
        write_file(name, 20240520, version, 100, 0, 0, 100);
        DataLoader l;
        Error err = {""};
        bool ok = dataloader_open(&l, in_folder(name), 33, 1, 50257, 50256, 0, 1, false, 0, &err);
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

// A data set of more shards than the process may have open files is read in any order.
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

// Closing waits for nothing, whatever the thread is doing.
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
    CHECK_DIES("-1 is no position", dataloader_seek(&l, -1));
    CHECK_DIES("9223372036854775807 is no position", dataloader_seek(&l, INT64_MAX));
    dataloader_close(&l);
}

// ----------------------------------------------------------------------------
// bad data

static void check_open_fails(const char* patterns, int64_t vocab_size, const char* expected,
                             const char* expected2) {
    DataLoader l;
    Error err = {""};
    bool ok = dataloader_open(&l, patterns, T, 2, vocab_size, 0, 0, 1, false, 0, &err);
    CHECK(!ok && strstr(err.msg, expected) && strstr(err.msg, expected2), "%s: %s", patterns, err.msg);
    if (ok) dataloader_close(&l);
}

static void test_open(void) {
    char list[2 * PATH_LENGTH + 2];
    check_open_fails(in_folder("nothing_*.bin"), V, "nothing_*.bin", "no file matches");
    check_open_fails("", V, "''", "file patterns");
    check_open_fails(in_folder("docs_train_*.bin,"), V, "docs_train_*.bin,'", "file patterns");
    check_open_fails(folder, V, folder, "no regular file");
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

    // two patterns are one data set, sorted by name
    DataLoader l;
    Error err = {""};
    static Expected e;
    enumerate(&e, sets[0].doc_len, sets[0].shard_tokens, sets[0].count);
    snprintf(list, sizeof list, "%s,%s", in_folder("docs_train_000003.bin"),
             in_folder("docs_train_00000[0-2].bin"));
    bool ok = dataloader_open(&l, list, T, 4, V, EOT, 0, 1, false, 0, &err);
    CHECK_OK(ok);
    if (ok) {
        CHECK(wrong_rows(&l, &e, e.n / 4) == 0, "other sequences");
        dataloader_close(&l);
    }

    const char* good = in_folder("docs_train_*.bin");
    CHECK(!dataloader_open(&l, good, 0, 1, V, 0, 0, 1, false, 0, &err), "T = 0");
    CHECK(!dataloader_open(&l, good, T, 0, V, 0, 0, 1, false, 0, &err), "B = 0");
    CHECK_FAILS("end-of-text", dataloader_open(&l, good, T, 1, V, V, 0, 1, false, 0, &err));
    CHECK_FAILS("rank 2 of 2", dataloader_open(&l, good, T, 1, V, 0, 2, 2, false, 0, &err));
}

// Exits 1 if the data set opens and has n sequences; the warning is for CHECK_DIES to see.
static void open_and_exit(const char* pattern, int64_t rank, int64_t n) {
    DataLoader l;
    open_set(&l, pattern, 1, rank, 2, false);
    _exit(dataloader_sequences(&l) == n);
}

static void test_warnings(void) {
    write_set("tail", V, 0, 4 * T + 1,
              2 * (4 * T + 1) + T); // the last shard is one token short of a sequence
    CHECK_DIES("1 of 3 shards, such as build/test/dataloader/tail_train_000002.bin, are shorter than a "
               "sequence and its last target, 17 tokens",
               open_and_exit("tail_train_*.bin", 0, 8));
    write_set("rest", V, 2 * T + 3, 4 * (2 * T + 3), 8 * (2 * T + 3));
    CHECK_DIES("the last 3 of the 35 tokens of a document are never used",
               open_and_exit("rest_train_*.bin", 0, 16));
    static Expected e;
    DataLoader l;
    enumerate(&e, 2 * T + 3, 4 * (2 * T + 3), 8 * (2 * T + 3));
    open_set(&l, "rest_train_*.bin", 2, 1, 2, false); // rank 1 does not repeat the warning
    CHECK(wrong_rows(&l, &e, 10) == 0, "other sequences");
    dataloader_close(&l);
    write_set("over", V, 0, 2, 6);
    CHECK_DIES("over_train_000001.bin: is left from an earlier data set", write_over_longer());
}

// What goes wrong while reading is reported at its batch and not before, again and again, until a seek away.
static void check_fails_at(DataLoader* l, const Expected* e, int64_t good, const char* expected) {
    int32_t inputs[8 * T], targets[8 * T];
    int64_t wrong = wrong_rows(l, e, good), position = dataloader_position(l);
    CHECK(wrong == 0, "%lld wrong rows before the bad batch", (long long)wrong);
    for (int again = 0; again < 3; again++) {
        Error err = {""};
        CHECK(!dataloader_next(l, inputs, targets, &err) && strstr(err.msg, expected), "%s: %s", expected,
              err.msg);
        CHECK(dataloader_position(l) == position, "the position moves over an error");
    }
    dataloader_seek(l, 0);
    CHECK(wrong_rows(l, e, 2) == 0, "not good again after a seek");
}

static void test_bad_while_reading(void) {
    static Expected e;
    DataLoader l;
    write_set("broken", V, 0, 30 * T + 1, 60 * T + 2); // 2 shards of 30 sequences
    enumerate(&e, 0, 30 * T + 1, 60 * T + 2);

    // in the middle of sequence 45, and at its very end, which is also the start of sequence 46
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
        if (i == 0) CHECK(wrong_rows(&l, &e, 30) == 0, "an error that belongs to another rank");
        if (i == 1) check_fails_at(&l, &e, 23, expected);
        dataloader_close(&l);
        corrupt("broken_train_000001.bin", places[i], (uint16_t)token(30 * T + 1 + places[i], V));
    }

    // Cut short while in use, at token 20 T: when the loader has the shard open, and before it opens it.
    const char* second = in_folder("broken_train_000001.bin");
    open_set(&l, "broken_train_*.bin", 1, 0, 1, false);
    CHECK(wrong_rows(&l, &e, 31) == 0, "other sequences");
    if (truncate(second, SHARD_HEADER_BYTES + 2 * 20 * T) != 0) die("truncate");
    check_fails_at(&l, &e, 19 - 1, "broken_train_000001.bin: ends at byte 1664");
    dataloader_close(&l);

    write_set("broken", V, 0, 30 * T + 1, 60 * T + 2);
    open_set(&l, "broken_train_*.bin", 1, 0, 1, false);
    CHECK(wrong_rows(&l, &e, 20) == 0, "other sequences");
    if (truncate(second, SHARD_HEADER_BYTES + 2 * 20 * T) != 0) die("truncate");
    check_fails_at(&l, &e, 10, "broken_train_000001.bin: is truncated");
    if (remove(second) != 0) die("remove");
    dataloader_seek(&l, 20);
    check_fails_at(&l, &e, 10, "broken_train_000001.bin: cannot open");
    dataloader_close(&l);

    write_set("broken", V, 0, 30 * T + 1, 60 * T + 2);
    open_set(&l, "broken_train_*.bin", 1, 0, 1, false);
    if (rename(in_folder("docs_train_000000.bin"), second) != 0) die("rename");
    dataloader_seek(&l, 20);
    check_fails_at(&l, &e, 10, "broken_train_000001.bin: was replaced");
    dataloader_close(&l);
}

int main(void) {
    strcpy(folder, test_scratch("dataloader"));
    test_writer();
    test_writer_resumes_and_gives_up();
    test_headers();
    test_order();
    test_shuffle();
    test_ranks();
    test_versions();
    test_many_shards();
    test_close();
    test_open();
    test_warnings();
    test_bad_while_reading();
    return test_report();
}
