/*
Tests of data/text_to_shards.c: contents of the shards, choice of the splits, and error messages. The
program's main is compiled into this test and called in child processes, so that the sanitizers cover it.
*/
#include <stdint.h>
#include <stdio.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

// Counts down calls and kills the process at the last one, before it does anything. 0: does nothing.
static int calls_to_kill;

static int strike(void) {
    if (calls_to_kill > 0 && --calls_to_kill == 0) raise(SIGKILL);
    return 0;
}

// After a read of that many bytes the file changing_path, if it is set, is truncated to changed_size.
static const char* changing_path;
static off_t changed_size;
static ssize_t changing_read(int fd, void* out, size_t n) {
    ssize_t got = read(fd, out, n);
    if (changing_path && n == 4 << 20 && truncate(changing_path, changed_size) != 0) _exit(99);
    return got;
}

#define rename(from, to) (strike(), rename(from, to))
#define unlink(path)     (strike(), unlink(path))
#define fsync(fd)        (strike(), (void)(fd), 0) // a kill loses nothing that was written
#define read(fd, out, n) changing_read(fd, out, n)

#include "../scratch.h"
#define TESTING
#include "../../../data/text_to_shards.c"
#include "../../../llmc/tokens/dataloader.h"

#define DIR_  TEST_FOLDER "/text_to_shards/"
#define VOCAB "dev/test/fixtures/gpt2/vocab.bpe"

// ----------------------------------------------------------------------------
// running the program

// Runs the program with these arguments, separated by spaces; returns its exit code.
static int run_program(const char* arguments) {
    char* words[64] = {(char*)"text_to_shards"};
    int count = 1;
    char* copy = xstrdup(arguments);
    for (char* word = strtok(copy, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    int code = text_to_shards(count, words);
    free(copy);
    return code;
}

// Runs the program in a child process, which must succeed; its output must contain `summary`.
static void run_ok(const char* arguments, const char* summary) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(DIR_ "stdout", "w", stdout)) _exit(99);
        exit(run_program(arguments));
    }
    int status;
    size_t n;
    Error err;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %#x", arguments, (unsigned)status);
    char* output = read_file(DIR_ "stdout", &n, &err);
    if (!output) die("%s", err.msg);
    CHECK(strstr(output, summary), "%s: '%s' is not in: %s", arguments, summary, output);
    free(output);
}

#define DIES(expected, arguments) CHECK_DIES(expected, _exit(run_program(arguments)))

// ----------------------------------------------------------------------------
// files

static void write_text(const char* path, const char* text) { write_bytes(path, text, strlen(text)); }

// The contents of all shards of a prefix and split.
typedef struct {
    uint32_t* tokens;
    int64_t count, shards, doc_len, vocab_size, longest;
} Shards;

static Shards read_shards(const char* prefix, const char* split) {
    Shards s = {0};
    char path[PATH_LENGTH];
    for (;; s.shards++) {
        Error err;
        size_t n;
        snprintf(path, sizeof path, "%s_%s_%06d.bin", prefix, split, (int)s.shards);
        if (!exists(path)) return s;
        char* file = read_file(path, &n, &err);
        if (!file) die("%s", err.msg);
        int32_t header[256];
        memcpy(header, file, sizeof header);
        CHECK(header[0] == 20240520 && header[1] == 1 && n == 1024 + 2 * (size_t)header[2],
              "%s: invalid header", path);
        s.tokens = xrealloc(s.tokens, (size_t)(s.count + header[2]) * sizeof *s.tokens);
        for (int i = 0; i < header[2]; i++) {
            uint16_t id;
            memcpy(&id, file + 1024 + 2 * i, 2);
            s.tokens[s.count++] = id;
        }
        if (header[2] > s.longest) s.longest = header[2];
        s.doc_len = header[3];
        s.vocab_size = header[4];
        free(file);
    }
}

// Compares byte tokens with text, in which \1 stands for the end-of-text token.
static void check_text(const char* prefix, const char* split, const char* text) {
    Shards s = read_shards(prefix, split);
    bool same = s.count == (int64_t)strlen(text);
    for (int64_t i = 0; i < s.count && same; i++)
        same = s.tokens[i] == (text[i] == '\1' ? 256u : (uint8_t)text[i]);
    CHECK(same, "%s_%s: other tokens than '%s'", prefix, split, text);
    CHECK(s.vocab_size == 257, "%s_%s: vocabulary size %lld", prefix, split, (long long)s.vocab_size);
    free(s.tokens);
}

#include "all_or_nothing.h"

// ----------------------------------------------------------------------------
// tests

static void test_stream(void) {
    Error err;
    if (!make_folders(DIR_ "in/b/deep", &err) || !make_folders(DIR_ "in/.git", &err)) die("%s", err.msg);
    write_text(DIR_ "in/c", "third\n");
    write_text(DIR_ "in/a", "first");
    write_text(DIR_ "in/b/deep/x", "deep");
    write_text(DIR_ "in/b/B", "capital");
    write_text(DIR_ "in/b/empty", "");
    write_text(DIR_ "in/.git/config", "hidden");
    if (symlink("..", DIR_ "in/b/loop") != 0 || symlink("a", DIR_ "in/link") != 0) die("symlink");
    run_ok("--tokenizer byte --out " DIR_ "s " DIR_ "in",
           "26 tokens of 22 bytes, 1.000 bytes/token; train: 4 documents, 26 tokens, 1 shard; "
           "skipped: 1 empty, 1 hidden, 2 special, 0 repeated\n");
    check_text(DIR_ "s", "train", "\1first\1capital\1deep\1third\n");
    CHECK(!exists(DIR_ "s_val_000000.bin"), "wrote a validation split without --val-fraction");
    // a slash at the end, the same file twice, a symbolic link, several paths
    run_ok("--tokenizer=byte --out=" DIR_ "s " DIR_ "in/c " DIR_ "in/ " DIR_ "in/link", "2 repeated");
    check_text(DIR_ "s", "train", "\1third\n\1first\1capital\1deep");
    // a list, from a file and from standard input
    write_text(DIR_ "list", DIR_ "in/c\n\n" DIR_ "in/a");
    run_ok("--tokenizer byte --out " DIR_ "s --list " DIR_ "list -- " DIR_ "in/b", "4 documents");
    check_text(DIR_ "s", "train", "\1capital\1deep\1third\n\1first");
    if (!freopen(DIR_ "list", "r", stdin)) die("stdin");
    run_ok("--tokenizer byte --out " DIR_ "s --list -", "2 documents");
    check_text(DIR_ "s", "train", "\1third\n\1first");
    // as find -print0 writes them, the last with and without its zero byte
    static const char zeros[] = DIR_ "in/c\0\0" DIR_ "two\nlines\0" DIR_ "in/a";
    write_text(DIR_ "two\nlines", "two");
    for (size_t n = sizeof zeros - 1; n <= sizeof zeros; n++) {
        write_bytes(DIR_ "list", zeros, n);
        run_ok("--tokenizer byte --out " DIR_ "s --list " DIR_ "list", "3 documents");
        check_text(DIR_ "s", "train", "\1third\n\1two\1first");
    }
}

static void test_shards(void) {
    run_ok("--tokenizer byte --out " DIR_ "n/ew/s --shard-tokens 5 " DIR_ "in",
           "train: 4 documents, 26 tokens, 6 shards");
    check_text(DIR_ "n/ew/s", "train", "\1first\1capital\1deep\1third\n");
    Shards s = read_shards(DIR_ "n/ew/s", "train");
    CHECK(s.shards == 6 && s.longest == 5 && s.doc_len == 0, "%lld shards", (long long)s.shards);
    free(s.tokens);
    // a run replaces the shards of its prefix and no other files
    write_text(DIR_ "n/ew/s_val_000000.bin", "");
    write_text(DIR_ "n/ew/s_train_7.bin", "");
    write_text(DIR_ "n/ew/s2_train_000000.bin", "");
    write_text(DIR_ "n/ew/s_train_000000.binary", "");
    run_ok("--tokenizer byte --out " DIR_ "n/ew/s " DIR_ "in", "1 shard;");
    CHECK(!exists(DIR_ "n/ew/s_train_000001.bin") && !exists(DIR_ "n/ew/s_val_000000.bin"),
          "old shards remain");
    CHECK(exists(DIR_ "n/ew/s_train_7.bin") && exists(DIR_ "n/ew/s2_train_000000.bin") &&
              exists(DIR_ "n/ew/s_train_000000.binary"),
          "removed another file");
    // the output is in an input folder
    run_ok("--tokenizer byte --out " DIR_ "in/b/out " DIR_ "in", "4 documents");
    run_ok("--tokenizer byte --out " DIR_ "in/b/out " DIR_ "in", "4 documents");
    unlink(DIR_ "in/b/out_train_000000.bin");
}

static void test_documents(void) {
    run_ok("--tokenizer byte --out " DIR_ "d --doc-len 3 " DIR_ "in",
           "18 tokens of 22 bytes, 1.000 bytes/token; train: 6 documents, 18 tokens, 1 shard; "
           "dropped 4 tokens (18.2%) at the ends of files");
    check_text(DIR_ "d", "train", "fircapitadeethird\n");
    run_ok("--tokenizer byte --out " DIR_ "d --doc-len 3 --shard-tokens 8 " DIR_ "in", "3 shards");
    Shards s = read_shards(DIR_ "d", "train");
    CHECK(s.shards == 3 && s.longest == 6 && s.doc_len == 3, "shards of %lld tokens", (long long)s.longest);
    free(s.tokens);
}

// Each document is rotated, by offsets that all occur; the same ones with the same seed.
static void test_rolled(void) {
    enum { D = 4, COUNT = 400 };
    char text[D * COUNT + 1] = "";
    for (int i = 0; i < COUNT; i++) snprintf(text + D * i, D + 1, "%c%c%c%c", 'a' + i % 23, 'A', 'B', 'C');
    write_text(DIR_ "roll", text);
    int64_t offsets[D] = {0}, differ = 0;
    uint32_t first[D * COUNT];
    for (int run = 0; run < 3; run++) {
        run_ok(run < 2 ? "--tokenizer byte --doc-len 4 --shard-tokens 100 --roll 7 --out " DIR_ "rolled " DIR_
                         "roll"
                       : "--tokenizer byte --doc-len 4 --roll 8 --out " DIR_ "rolled " DIR_ "roll",
               "train: 400 documents, 1600 tokens");
        Shards s = read_shards(DIR_ "rolled", "train");
        for (int64_t i = 0; i < COUNT; i++) {
            int o = 0;
            while (o < D && s.tokens[D * i + (D - o) % D] != (uint8_t)text[D * i]) o++;
            offsets[o % D]++;
            for (int t = 0; t < D; t++)
                CHECK(s.tokens[D * i + t] == (uint8_t)text[D * i + (t + o) % D], "document %lld",
                      (long long)i);
        }
        if (run == 0) memcpy(first, s.tokens, sizeof first);
        if (run > 0) differ += (memcmp(first, s.tokens, sizeof first) != 0) == (run == 1);
        free(s.tokens);
    }
    CHECK(differ == 0, "the seed does not decide");
    for (int o = 0; o < D; o++)
        CHECK(offsets[o] > 240 && offsets[o] < 360, "offset %d: %lld", o, (long long)offsets[o]);
    DIES("--roll: only documents of --doc-len can be rolled",
         "--tokenizer byte --roll 1 --out " DIR_ "x " DIR_ "roll");
}

// Each file of make_letters repeats a letter of its own. Returns the set of letters, and thus of files, in a
// split.
static uint64_t letters_of(const char* prefix, const char* split) {
    Shards s = read_shards(prefix, split);
    uint64_t letters = 0;
    for (int64_t i = 0; i < s.count; i++)
        if (s.tokens[i] < 256) letters |= (uint64_t)1 << (s.tokens[i] - '0');
    free(s.tokens);
    return letters;
}

static void make_letters(const char* folder, int count) {
    char path[PATH_LENGTH];
    Error err;
    if (!make_folders(folder, &err)) die("%s", err.msg);
    for (int i = 0; i < count; i++) {
        char text[20];
        memset(text, '0' + i, sizeof text);
        snprintf(path, sizeof path, "%s/file%d", folder, i);
        write_bytes(path, text, sizeof text);
    }
}

static void test_split(void) {
    uint64_t all = (1ull << 40) - 1;
    make_letters(DIR_ "forty", 40);
    run_ok("--tokenizer byte --out " DIR_ "v --val-fraction 0.25 " DIR_ "forty", "val:");
    uint64_t train = letters_of(DIR_ "v", "train"), val = letters_of(DIR_ "v", "val");
    int count = __builtin_popcountll(val);
    CHECK((train & val) == 0 && (train | val) == all, "splits %llx %llx", (unsigned long long)train,
          (unsigned long long)val);
    CHECK(count >= 4 && count <= 16, "%d of 40 files for validation", count);
    // the split is the same in another folder and with more files; it differs with another seed
    make_letters(DIR_ "else/where", 60);
    run_ok("--tokenizer byte --out " DIR_ "v2 --val-fraction 0.25 " DIR_ "else/where/", "val:");
    CHECK((letters_of(DIR_ "v2", "val") & all) == val, "further files change the split of a file");
    run_ok("--tokenizer byte --out " DIR_ "v2 --val-fraction .25 --seed 1 " DIR_ "forty", "val:");
    CHECK(letters_of(DIR_ "v2", "val") != val, "the seed has no effect");
    // at least one file in each split
    run_ok("--tokenizer byte --out " DIR_ "v2 --val-fraction 1e-9 " DIR_ "forty",
           "val: 1 document, 21 tokens, 1 shard");
    CHECK((letters_of(DIR_ "v2", "val") & ~val) == 0, "a smaller fraction selects other files");
    run_ok("--tokenizer byte --out " DIR_ "v2 --val-fraction 0.999999999 " DIR_ "forty",
           "train: 1 document,");
    run_ok("--tokenizer byte --out " DIR_ "v2 --val-fraction 0 " DIR_ "forty", "40 documents");
    // names with equal draws
    make_letters(DIR_ "one/a", 1);
    make_letters(DIR_ "one/b", 1);
    run_ok("--tokenizer byte --out " DIR_ "v2 --val-fraction 0.9 " DIR_ "one/a " DIR_ "one/b",
           "train: 1 document,");
}

// A file that is read in several pieces is encoded to the same tokens as in one piece.
static void test_pieces(void) {
    static const char* const words[] = {"the ", "don't", " \n\n ", "x = 3.14;", "\xc3\xa9t\xc3\xa9 ",
                                        "\t\t", "\"\\",  "\xff",   "\n"};
    Tokenizer t;
    Error err;
    ByteBuffer text = {0}, escaped = {0};
    TokenBuffer want = {0};
    for (uint64_t i = 0; text.count < PIECE + PIECE / 4; i++) {
        const char* word = words[random_u64(7, 0, i) % (sizeof words / sizeof words[0])];
        memcpy(byte_buffer_reserve(&text, strlen(word)), word, strlen(word));
        text.count += strlen(word);
    }
    memset(text.data + PIECE - 5000, 'z', 10000); // no position to cut near the end of the first piece
    write_bytes(DIR_ "long", text.data, text.count);
    if (!tokenizer_gpt2(&t, VOCAB, &err)) die("%s", err.msg);
    json_escape(text.data, text.count, &escaped);
    token_buffer_add(&want, t.end_of_text);
    tokenizer_encode(&t, escaped.data, escaped.count, &want);
    run_ok("--tokenizer gpt2 --vocab " VOCAB " --json-escape --out " DIR_ "p " DIR_ "long", "1 document");
    Shards s = read_shards(DIR_ "p", "train");
    CHECK(s.vocab_size == 50257, "vocabulary size %lld", (long long)s.vocab_size);
    CHECK(s.count == want.count && memcmp(s.tokens, want.data, (size_t)s.count * sizeof *s.tokens) == 0,
          "%lld tokens differ from the %lld of one piece", (long long)s.count, (long long)want.count);
    free(s.tokens);
    // documents extend over pieces
    run_ok("--tokenizer byte --doc-len 1000 --out " DIR_ "p " DIR_ "long", "documents");
    s = read_shards(DIR_ "p", "train");
    bool same = s.count == (int64_t)text.count / 1000 * 1000;
    for (int64_t i = 0; i < s.count && same; i++) same = s.tokens[i] == (uint8_t)text.data[i];
    CHECK(same, "documents differ");
    free(s.tokens);
    free(text.data);
    free(escaped.data);
    free(want.data);
    tokenizer_free(&t);
}

static int run_with_file_size_limit(void) {
    struct rlimit limit = {100000, 100000};
    setrlimit(RLIMIT_FSIZE, &limit);
    return run_program("--tokenizer byte --out " DIR_ "full " DIR_ "long");
}

static void test_errors(void) {
    DIES("--tokenizer is missing", "--out " DIR_ "e " DIR_ "in");
    DIES("--tokenizer word: must be byte or gpt2", "--tokenizer word --out " DIR_ "e " DIR_ "in");
    DIES("--vocab FILE is missing: GPT-2's vocab.bpe, in the repository " VOCAB,
         "--tokenizer gpt2 --out " DIR_ "e " DIR_ "in");
    DIES("--vocab requires", "--tokenizer byte --vocab " VOCAB " --out " DIR_ "e " DIR_ "in");
    DIES(DIR_ "in/a: does not start with",
         "--tokenizer gpt2 --vocab " DIR_ "in/a --out " DIR_ "e " DIR_ "in");
    DIES("--out is missing", "--tokenizer byte " DIR_ "in");
    DIES("--out: its PREFIX is missing", "--tokenizer byte " DIR_ "in --out");
    DIES("must end with the start of a file name", "--tokenizer byte --out " DIR_ " " DIR_ "in");
    DIES("no input", "--tokenizer byte --out " DIR_ "e");
    DIES("no input: found only 1 empty", "--tokenizer byte --out " DIR_ "e " DIR_ "in/b/empty");
    DIES(DIR_ "nope", "--tokenizer byte --out " DIR_ "e " DIR_ "nope");
    DIES("--list " DIR_ "nope", "--tokenizer byte --out " DIR_ "e --list " DIR_ "nope");
    DIES("/dev/null: neither a file nor a folder", "--tokenizer byte --out " DIR_ "e /dev/null");
    DIES("--shards: no such option", "--tokenizer byte --shards 3 --out " DIR_ "e " DIR_ "in");
    DIES("--json-escape takes no value", "--tokenizer byte --json-escape=yes --out " DIR_ "e " DIR_ "in");
    DIES("--doc-len 1.5: not a whole number", "--tokenizer byte --doc-len 1.5 --out " DIR_ "e " DIR_ "in");
    DIES("--doc-len 64KB: not a whole number", "--tokenizer byte --doc-len 64KB --out " DIR_ "e " DIR_ "in");
    DIES("--shard-tokens 0: not", "--tokenizer byte --shard-tokens 0 --out " DIR_ "e " DIR_ "in");
    DIES("--val-fraction 1: not", "--tokenizer byte --val-fraction 1 --out " DIR_ "e " DIR_ "in");
    DIES("--val-fraction nan: not", "--tokenizer byte --val-fraction nan --out " DIR_ "e " DIR_ "in");
    DIES("only one file", "--tokenizer byte --val-fraction 0.5 --out " DIR_ "e " DIR_ "in/a");
    DIES("none of its files has 100 tokens", "--tokenizer byte --doc-len 100 --out " DIR_ "e " DIR_ "in");
    DIES("cannot hold one document",
         "--tokenizer byte --doc-len 100 --shard-tokens 99 --out " DIR_ "e " DIR_ "in");
    DIES(DIR_ "in/a", "--tokenizer byte --out " DIR_ "in/a/e " DIR_ "in");
    CHECK_DIES("full_train: cannot write", _exit(run_with_file_size_limit()));
    CHECK(!exists(DIR_ "full_train_000000.bin") && !exists(DIR_ "full_train_000000.bin.tmp"),
          "an incomplete shard remains");
    // if the second shard cannot be written, the first must be removed too: it is not the whole dataset
    Error err;
    if (!make_folders(DIR_ "half_train_000001.bin.tmp", &err)) die("%s", err.msg);
    DIES("cannot create", "--tokenizer byte --shard-tokens 5 --out " DIR_ "half " DIR_ "in");
    CHECK(!exists(DIR_ "half_train_000000.bin"), "an incomplete dataset remains");
    if (geteuid() == 0) {
        SKIP("unreadable files: root may read them");
    } else {
        chmod(DIR_ "in/b/B", 0);
        DIES(DIR_ "in/b/B: cannot open", "--tokenizer byte --out " DIR_ "e " DIR_ "in");
        chmod(DIR_ "in/b/B", 0644);
        chmod(DIR_ "in/b/deep", 0);
        DIES(DIR_ "in/b/deep: cannot read this folder", "--tokenizer byte --out " DIR_ "e " DIR_ "in");
        chmod(DIR_ "in/b/deep", 0755);
    }
}

// ----------------------------------------------------------------------------
// bad input

static void write_start(const char* path, const char* start, size_t n) {
    char text[1000];
    memset(text, 'x', sizeof text);
    memcpy(text, start, n);
    write_bytes(path, text, sizeof text);
}

static void test_not_text(void) {
    static const struct {
        const char *start, *expected;
        size_t n;
    } kinds[] = {
        {"\x1f\x8b\x08",
         "is not text but compressed by gzip; decompress it (gunzip), or use scripts/make_shards", 3},
        {"\x28\xb5\x2f\xfd",
         "is not text but compressed by zstd; decompress it (unzstd), or use scripts/make_shards", 4},
        {"\xfd\x37zXZ\0", "is not text but compressed by xz", 6},
        {"PAR1\x15\x04", "is not text but a Parquet file; use scripts/make_shards.py", 6},
        {"BZh91AY&SY", "is not text but compressed by bzip2", 10},
        {"PK\3\4", "is not text but a zip archive", 4},
        {"%PDF-1.7", "is not text but a PDF document", 8},
        {"\xff\xfe"
         "a\0",
         "is not text but UTF-16 text", 4},
        {"ELF\0", "is not text but binary: it has a zero byte", 4},
    };
    Error err;
    if (!make_folders(DIR_ "kinds", &err)) die("%s", err.msg);
    write_text(DIR_ "kinds/a", "text");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char expected[PATH_LENGTH];
        write_start(DIR_ "kinds/b", kinds[i].start, kinds[i].n);
        snprintf(expected, sizeof expected, DIR_ "kinds/b: %s", kinds[i].expected);
        DIES(expected, "--tokenizer byte --out " DIR_ "e " DIR_ "kinds");
        DIES(expected, "--tokenizer gpt2 --vocab " VOCAB " --out " DIR_ "e " DIR_ "kinds/b");
    }
    write_start(DIR_ "kinds/c", "\x1f\x8b", 2);
    DIES("kinds/b: is not text but binary: it has a zero byte; remove it from the input",
         "--tokenizer byte --out " DIR_ "e " DIR_ "kinds");
    DIES("; also not text: 1 other file", "--tokenizer byte --out " DIR_ "e " DIR_ "kinds");
    DIES(DIR_ "s_train_000000.bin: is not text but a data shard",
         "--tokenizer byte --out " DIR_ "e " DIR_ "s_train_000000.bin");
    CHECK(!exists(DIR_ "e_train_000000.bin"), "wrote shards of input that is not text");
    run_ok("--tokenizer byte --binary --out " DIR_ "e " DIR_ "kinds", "2007 tokens of 2004 bytes");
    // a zero byte far behind the start
    char* text = (char*)xcalloc(2 * PIECE, 1);
    memset(text, 'x', 2 * PIECE);
    text[2 * PIECE - 1] = '\0';
    write_bytes(DIR_ "kinds/a", text, 2 * PIECE);
    DIES("kinds/a: is not text but binary", "--tokenizer byte --out " DIR_ "z " DIR_ "kinds/a");
    CHECK(!exists(DIR_ "z_train_000000.bin") && !exists(DIR_ "z_train_000000.bin.tmp"), "left behind");
    free(text);
}

static int run_while_changing(off_t size) {
    changing_path = DIR_ "changing";
    changed_size = size;
    return run_program("--tokenizer byte --binary --out " DIR_ "c " DIR_ "changing");
}

static void test_changing(void) {
    char* text = (char*)xcalloc(2 * PIECE, 1);
    memset(text, ' ', 2 * PIECE);
    write_bytes(DIR_ "changing", text, 2 * PIECE);
    CHECK_DIES("changing: changed while it was read (8388608 bytes before, 4194304 read)",
               _exit(run_while_changing(PIECE)));
    write_bytes(DIR_ "changing", text, 2 * PIECE);
    CHECK_DIES("changing: changed while it was read (8388608 bytes before, 8388609 read)",
               _exit(run_while_changing(2 * PIECE + 1)));
    free(text);
    CHECK(!exists(DIR_ "c_train_000000.bin"), "a file that changed was encoded");
}

// Text without ASCII letters, JSON-escaped or not, is encoded in pieces: memory is bounded. A word without
// end is an error.
static void test_memory(void) {
    static const char chinese[] = "\xe4\xb8\xad\xe6\x96\x87\xef\xbc\x8c\xe4\xb8\xad\xe3\x80\x82";
#ifdef __SANITIZE_ADDRESS__ // which keeps freed memory: its bound is tested without
    enum { COUNT = 900000 };
#else
    enum { COUNT = 2000000 };
#endif
    enum { LENGTH = sizeof chinese - 1 };
    char* text = (char*)xcalloc(COUNT, LENGTH);
    for (int i = 0; i < COUNT; i++) memcpy(text + (size_t)i * LENGTH, chinese, LENGTH);
    write_bytes(DIR_ "chinese", text, (size_t)COUNT * LENGTH);
    memset(text, 'z', LONGEST + PIECE);
    write_bytes(DIR_ "word", text, LONGEST + PIECE);
    free(text);
    static const char* const runs[] = {
        "--tokenizer gpt2 --vocab " VOCAB " --out " DIR_ "m " DIR_ "chinese",
        "--tokenizer gpt2 --vocab " VOCAB " --json-escape --out " DIR_ "m " DIR_ "chinese",
        "--tokenizer byte --out " DIR_ "m " DIR_ "chinese", "--tokenizer byte --out " DIR_ "m " DIR_ "word"};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        struct rusage used;
        CHECK(run_child(runs[i], 0, &used) == 0, "%s failed", runs[i]);
#ifndef __SANITIZE_ADDRESS__
        CHECK(used.ru_maxrss < 96 << 10, "%s: %ld KiB of memory", runs[i], used.ru_maxrss);
#endif
    }
    DIES("word: has a word of more than 8 MiB at byte 0",
         "--tokenizer gpt2 --vocab " VOCAB " --out " DIR_ "m " DIR_ "word");
}

int main(void) {
    test_scratch("text_to_shards");
    test_kills(); // first: it forks often, which takes longer the more memory there is
    test_stream();
    test_shards();
    test_documents();
    test_rolled();
    test_split();
    test_pieces();
    test_errors();
    test_old_shards();
    test_not_text();
    test_changing();
    test_memory();
    return test_report();
}
