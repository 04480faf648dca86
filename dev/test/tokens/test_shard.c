/*
Tests of llmc/tokens/shard.h: round trips, the exact bytes, states and errors of the writer, and rejection of
invalid headers.
*/
#include "datasets.h"

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
        snprintf(prefix, sizeof prefix, "writer%d/set", (int)c); // in a folder that the writer creates
        write_set(prefix, cases[c].vocab_size, cases[c].doc_len, cases[c].shard_tokens, cases[c].count);
        int64_t at = 0, wrong = 0;
        for (int64_t s = 0; s < cases[c].shards; s++) {
            snprintf(name, sizeof name, "%s_train_%06d.bin", prefix, (int)s);
            const char* path = in_folder(name);
            Error err = {""};
            ShardHeader h = {0};
            int64_t left = cases[c].count - at, capacity = cases[c].capacity;
            int64_t expected = left < capacity ? left : capacity;
            int fd = -1;
            CHECK_OK(shard_open(path, &fd, &err));
            bool ok = fd >= 0 && shard_read_header_fd(fd, path, &h, &err);
            CHECK_OK(ok);
            if (!ok) continue;
            CHECK(h.tokens == expected, "%s: %lld tokens", name, (long long)h.tokens);
            CHECK(h.doc_len == cases[c].doc_len, "%s: document length %d", name, (int)h.doc_len);
            CHECK(h.vocab_size == cases[c].vocab_size, "%s: vocabulary size %d", name, (int)h.vocab_size);
            CHECK(h.bytes_per_token == (h.vocab_size <= 65536 ? 2 : 4), "%s: %d bytes per token", name,
                  h.bytes_per_token);
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
        CHECK(!exists(in_folder(name)), "%s: one shard too many", name);
        snprintf(name, sizeof name, "%s_train_%06d.bin.tmp", prefix, (int)cases[c].shards - 1);
        CHECK(!exists(in_folder(name)), "%s: left behind", name);
    }

    // the exact bytes
    write_set("bytes", 50257, 2, 4, 4);
    Error err = {""};
    size_t size = 0;
    unsigned char* data = (unsigned char*)read_file(in_folder("bytes_train_000000.bin"), &size, &err);
    CHECK(data && size == 1024 + 8, "%zu bytes", size);
    if (data && size == 1024 + 8) {
        // the checksums are computed by another program
        static const unsigned char head[20] = {0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0,    4,
                                               0,    0,    0,    2,    0, 0, 0, 0x51, 0xc4};
        static const uint32_t block_tokens = 32768, block = 0x117d355c, header = 0x47cdb3f7;
        int nonzero = 0;
        for (int i = 20; i < 1020; i++) nonzero += data[i] != 0 && (i < 36 || i >= 44);
        CHECK(memcmp(data, head, 20) == 0 && nonzero == 0, "header differs");
        CHECK(memcmp(data + 36, &block_tokens, 4) == 0 && memcmp(data + 40, &block, 4) == 0 &&
                  memcmp(data + 1020, &header, 4) == 0,
              "checksums differ");
        for (int i = 0; i < 4; i++)
            CHECK(data[1024 + 2 * i] + 256u * data[1025 + 2 * i] == token(i, 50257), "token %d differs", i);
    }
    free(data);
}

// Inverts a bit of a file.
static void flip(const char* name, int64_t bit) {
    unsigned char byte = 0;
    int fd = open(in_folder(name), O_RDWR);
    bool ok = fd >= 0 && pread(fd, &byte, 1, (off_t)(bit / 8)) == 1;
    byte ^= (unsigned char)(1 << bit % 8);
    if (!ok || pwrite(fd, &byte, 1, (off_t)(bit / 8)) != 1 || close(fd) != 0) die("%s: cannot write", name);
}

// A changed bit of the header is an error, and one of the tokens an error of its block only.
static void test_damage(void) {
    static const struct {
        int64_t vocab_size, count, block_tokens;
    } cases[] = {{50257, 1000, 32768}, {50257, 100001, 32768}, {100000, 240 * 32768 + 1, 65536}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        ShardHeader h;
        Error err = {""};
        char name[64], prefix[32];
        int fd = -1, accepted = 0, wrong = 0;
        snprintf(name, sizeof name, "damage%d_train_000000.bin", (int)c);
        snprintf(prefix, sizeof prefix, "damage%d", (int)c);
        write_set(prefix, cases[c].vocab_size, 0, 10000000, cases[c].count);
        CHECK_OK(shard_read_header(in_folder(name), &h, &err));
        CHECK(h.tokens == cases[c].count && h.block_tokens == cases[c].block_tokens, "blocks of %lld tokens",
              (long long)h.block_tokens);
        for (int64_t bit = 0; c == 0 && bit < 8 * SHARD_HEADER_BYTES; bit++) {
            flip(name, bit);
            accepted += shard_read_header(in_folder(name), &h, &err);
            flip(name, bit);
        }
        CHECK(accepted == 0, "%d of %d headers with a changed bit are accepted", accepted,
              8 * SHARD_HEADER_BYTES);
        CHECK_OK(shard_open(in_folder(name), &fd, &err));
        CHECK_OK(shard_read_header_fd(fd, in_folder(name), &h, &err));
        const int64_t bits = 8 * h.tokens * h.bytes_per_token;
        for (int i = 0; i < 40; i++) {
            const int64_t bit = i == 0   ? 0
                                : i == 1 ? bits - 1
                                         : (int64_t)(random_u64(5, 0, (uint64_t)i) % (uint64_t)bits);
            const int64_t damaged = bit / (8 * h.bytes_per_token) / h.block_tokens;
            flip(name, 8 * SHARD_HEADER_BYTES + bit);
            for (int64_t b = 0; b < shard_blocks(&h); b++)
                if (c < 2 || b == damaged || b == 0)
                    wrong += shard_verify_block(fd, in_folder(name), &h, b, &err) != (b != damaged);
            flip(name, 8 * SHARD_HEADER_BYTES + bit);
        }
        CHECK(wrong == 0, "%s: %d verdicts on blocks are wrong", name, wrong);
        close(fd);
    }
}

static void test_writer_states_and_errors(void) {
    ShardWriter w;
    Error err = {""};
    uint32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 10};

    CHECK_OK(shard_writer_open(&w, in_folder("skip"), "val", 10, 0, 4, &err));
    CHECK(!shard_writer_skip_to(&w, -1) && !shard_writer_skip_to(&w, 1000000), "index out of range accepted");
    CHECK(shard_writer_skip_to(&w, 5), "cannot skip");
    CHECK_OK(shard_write(&w, ids, 6, &err));
    CHECK(!shard_writer_skip_to(&w, 9), "skips in the middle of a shard");
    CHECK(!exists(in_folder("skip_val_000006.bin")) && exists(in_folder("skip_val_000006.bin.tmp")),
          "no temporary name");
    CHECK_OK(shard_writer_close(&w, &err));
    CHECK(!exists(in_folder("skip_val_000004.bin")) && exists(in_folder("skip_val_000005.bin")) &&
              exists(in_folder("skip_val_000006.bin")),
          "wrong shard names");

    CHECK_OK(shard_writer_open(&w, in_folder("none"), "val", 10, 0, 4, &err));
    CHECK(shard_writer_close(&w, &err) && !exists(in_folder("none_val_000000.bin")),
          "an empty shard was written");

    CHECK_OK(shard_writer_open(&w, in_folder("abort"), "val", 10, 0, 4, &err));
    CHECK_OK(shard_write(&w, ids, 6, &err));
    shard_writer_abort(&w);
    shard_writer_abort(&w);
    CHECK(exists(in_folder("abort_val_000000.bin")) && !exists(in_folder("abort_val_000001.bin.tmp")),
          "abort must keep complete shards and remove the incomplete one");

    CHECK_OK(shard_writer_open(&w, in_folder("bad"), "val", 10, 0, 4, &err));
    CHECK_OK(shard_write(&w, ids, 2, &err));
    CHECK_FAILS("bad: token 9 has id 10", shard_write(&w, ids, 8, &err));
    CHECK(!exists(in_folder("bad_val_000000.bin")) && !exists(in_folder("bad_val_000000.bin.tmp")),
          "left behind");

    CHECK_OK(shard_writer_open(&w, in_folder("part"), "val", 10, 4, 8, &err));
    CHECK_OK(shard_write(&w, ids, 6, &err));
    CHECK_FAILS("only 2 of 4", shard_writer_close(&w, &err));
    CHECK(!exists(in_folder("part_val_000000.bin")) && !exists(in_folder("part_val_000000.bin.tmp")),
          "left behind");

    const char* prefix = in_folder("x");
    CHECK_FAILS("cannot hold", shard_writer_open(&w, prefix, "val", 10, 8, 4, &err));
    CHECK_FAILS("vocabulary", shard_writer_open(&w, prefix, "val", 0, 0, 4, &err));
    CHECK_FAILS("document", shard_writer_open(&w, prefix, "val", 9, -1, 4, &err));
    CHECK_FAILS("per shard", shard_writer_open(&w, prefix, "val", 9, 0, 1ll << 31, &err));
    CHECK_FAILS("abort_val_000000.bin",
                shard_writer_open(&w, in_folder("abort_val_000000.bin/x"), "val", 9, 0, 4, &err));
    CHECK_OK(shard_writer_open(&w, in_folder("taken"), "val", 10, 0, 4, &err));
    if (!make_folders(in_folder("taken_val_000000.bin.tmp"), &err)) die("%s", err.msg);
    CHECK_FAILS("taken_val_000000.bin.tmp: cannot create", shard_write(&w, ids, 6, &err));
}

// Overwrites a dataset by a shorter one; close must warn of the remaining shards. Exits with 1 on success.
static void write_over_longer(void) {
    ShardWriter w;
    Error err = {""};
    uint32_t ids[2] = {1, 2};
    bool ok = shard_writer_open(&w, in_folder("over"), "train", 257, 0, 1000, &err);
    _exit(ok && shard_write(&w, ids, 2, &err) && shard_writer_close(&w, &err) ? 1 : 0);
}

// A mask is kept beside ids of any size, and is no part of an id.
static void test_mask(void) {
    static const int64_t vocabs[] = {257, 100000, INT32_MAX};
    for (int v = 0; v < 3; v++) {
        int32_t ids[300];
        int fd = -1;
        int64_t wrong = 0;
        ShardHeader h = {0};
        ShardWriter w;
        Error err = {""};
        write_set_masked("mask", vocabs[v], 100, 300, 300, true);
        CHECK_OK(shard_open(in_folder("mask_train_000000.bin"), &fd, &err) &&
                 shard_read_header_fd(fd, "mask", &h, &err));
        CHECK(h.masked && h.bytes_per_token == 4 && h.tokens == 300 && h.doc_len == 100, "another header");
        CHECK_OK(shard_read_tokens(fd, "mask", &h, 0, 300, ids, &err));
        for (int64_t i = 0; i < 300; i++) {
            wrong += (ids[i] & INT32_MAX) != (int32_t)token(i, vocabs[v]);
            wrong += (ids[i] < 0) != token_counts(i);
        }
        CHECK(wrong == 0, "vocabulary %lld: %lld tokens differ", (long long)vocabs[v], (long long)wrong);
        close(fd);
        if (vocabs[v] == INT32_MAX) continue;
        const uint32_t id = (uint32_t)vocabs[v] | SHARD_COUNTS;
        CHECK_OK(shard_writer_open(&w, in_folder("mask"), "train", vocabs[v], 0, 300, &err));
        CHECK_FAILS("outside the vocabulary", shard_write(&w, &id, 1, &err)); // without a mask, and with one
        shard_writer_mask(&w);
        CHECK_FAILS("token 0 has id", shard_write(&w, &id, 1, &err));
        char said[64];
        snprintf(said, sizeof said, "has id %lld, outside", (long long)vocabs[v]);
        CHECK(strstr(err.msg, said), "%s", err.msg);
    }
}

static void test_shorter_dataset(void) {
    write_set("over", 257, 0, 2, 6);
    CHECK_DIES("over_train_000001.bin: is left from an earlier dataset", write_over_longer());
}

static void test_headers(void) {
    static const struct {
        const char* name;
        int magic, version, tokens, doc_len, vocab_size, count;
        const char* expected; // NULL: good
    } cases[] = {
        {"good.bin", 20240520, 1, 100, 0, 0, 100, NULL},
        {"good2.bin", 20240520, 2, 100, 50, 50257, 100, NULL},
        {"good3.bin", 20240520, 3, 100, 0, 257, 100, NULL},
        {"short.bin", 20240520, 1, 100, 0, 0, 99, "claims 100 tokens of 2 bytes, 99 follow"},
        {"short2.bin", 20240520, 2, 100, 0, 0, 99, "claims 100 tokens of 4 bytes, 99 follow"},
        {"long.bin", 20240520, 1, 100, 0, 0, 101, "is too long"},
        {"magic.bin", 12345, 1, 100, 0, 0, 100, "starts with 12345, not 20240520"},
        {"llama.bin", 20240801, 7, 100, 0, 0, 100, "Llama 3"},
        {"eval.bin", 20240522, 1, 100, 0, 0, 100, "evaluation set"},
        {"short3.bin", 20240520, 3, 100, 0, 0, 50, "claims 100 tokens of 4 bytes, 50 follow"},
        {"version.bin", 20240520, 4, 100, 0, 0, 100, "version 4"},
        {"version0.bin", 20240520, 0, 100, 0, 0, 100, "version 0"},
        {"none.bin", 20240520, 1, 0, 0, 0, 0, "contains no tokens"},
        {"negative.bin", 20240520, 1, -100, 0, 0, 100, "damaged header"},
        {"doc.bin", 20240520, 1, 100, -1, 0, 100, "damaged header"},
        {"vocab.bin", 20240520, 1, 100, 0, -1, 100, "damaged header"},
        {"divide.bin", 20240520, 1, 100, 30, 0, 100, "not a whole number of documents of 30"},
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
    CHECK_FAILS("not a regular file", shard_read_header(scratch_folder, &h, &err));
    if (mkfifo(in_folder("pipe.bin"), 0666) != 0) die("mkfifo");
    CHECK_FAILS("not a regular file", shard_read_header(in_folder("pipe.bin"), &h, &err));
}

int main(void) {
    strcpy(scratch_folder, test_scratch("shard"));
    test_writer();
    test_damage();
    test_writer_states_and_errors();
    test_mask();
    test_shorter_dataset();
    test_headers();
    return test_report();
}
