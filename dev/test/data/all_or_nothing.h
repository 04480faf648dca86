/*
Part of test_text_to_shards.c: a conversion replaces a dataset as a whole or not at all, wherever it is killed
or fails.
*/
#pragma once

enum { KILL_OLD, KILL_NEW, KILL_DATASETS };

// Writes the input of a dataset: 12 files whose texts begin with its letter.
static void make_dataset(const char* folder, char letter, int bytes) {
    Error err;
    if (!make_folders(folder, &err)) die("%s", err.msg);
    for (int i = 0; i < 12; i++) {
        char path[PATH_LENGTH], text[64];
        snprintf(path, sizeof path, "%s/file%d", folder, i);
        memset(text, letter, sizeof text);
        text[1] = (char)('a' + i);
        write_bytes(path, text, (size_t)bytes);
    }
}

// What the loader accepts of a split, as text: "" if nothing.
static void accepted(char* text, size_t size, const char* split) {
    char pattern[PATH_LENGTH];
    DataLoader l;
    Error err;
    DataOptions options = {1, 1, {1, 0, 1}, 257, 256, false, 0, 0};
    size_t n = 0;
    snprintf(pattern, sizeof pattern, DIR_ "kill/s_%s_*.bin", split);
    if (dataloader_open(&l, pattern, &options, &err)) {
        const int64_t count = dataloader_sequences(&l);
        for (int64_t i = 0; i < count && n + 1 < size; i++) {
            int32_t input, target;
            if (!dataloader_next(&l, &input, &target, &err)) die("%s", err.msg);
            text[n++] = (char)target;
        }
        dataloader_close(&l);
    }
    text[n] = '\0';
}

// Runs the program in a child process, which is killed at call number kill_at, if that is not 0. Returns its
// status, and its use of resources if `used` is not NULL.
static int run_child(const char* arguments, int kill_at, struct rusage* used) {
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stdout)) _exit(99);
        calls_to_kill = kill_at;
        exit(run_program(arguments));
    }
    wait4(child, &status, 0, used);
    return status;
}

// A conversion that is killed before any of its renames, removals and flushes leaves the old dataset, the new
// one, or a training split that the loader refuses; the next one leaves the new dataset and no other file.
static void check_kills(const char* old_options, const char* new_options) {
    enum { SIZE = 1024 };
    char want[KILL_DATASETS][2][SIZE], got[2][SIZE];
    const char* const options[KILL_DATASETS] = {old_options, new_options};
    int seen[KILL_DATASETS] = {0}, refused = 0;
    for (int d = 0; d < KILL_DATASETS; d++) {
        CHECK(run_child(options[d], 0, NULL) == 0, "%s failed", options[d]);
        for (int split = 0; split < 2; split++) accepted(want[d][split], SIZE, shard_splits[split]);
        CHECK(want[d][SHARD_TRAIN][0], "no training split");
    }
    for (int call = 1;; call++) {
        run_child(old_options, 0, NULL);
        bool killed = WIFSIGNALED(run_child(new_options, call, NULL));
        for (int split = 0; split < 2; split++) accepted(got[split], SIZE, shard_splits[split]);
        int which = -1;
        for (int d = 0; d < KILL_DATASETS; d++)
            if (strcmp(got[SHARD_TRAIN], want[d][SHARD_TRAIN]) == 0 &&
                strcmp(got[SHARD_VAL], want[d][SHARD_VAL]) == 0)
                which = d;
        CHECK(which >= 0 || !got[SHARD_TRAIN][0], "killed at call %d: the loader accepts '%s' and '%s'", call,
              got[SHARD_TRAIN], got[SHARD_VAL]);
        CHECK(!got[SHARD_TRAIN][0] || exists(DIR_ "kill/s_tokenizer.json"), "call %d: no tokenizer", call);
        if (which >= 0) seen[which]++;
        refused += !got[SHARD_TRAIN][0];
        run_child(new_options, 0, NULL);
        for (int split = 0; split < 2; split++) {
            accepted(got[split], SIZE, shard_splits[split]);
            CHECK(strcmp(got[split], want[KILL_NEW][split]) == 0, "after call %d: another %s split", call,
                  shard_splits[split]);
        }
        glob_t left;
        CHECK(glob(DIR_ "kill/*.tmp", 0, NULL, &left) == GLOB_NOMATCH, "call %d: temporary files remain",
              call);
        globfree(&left);
        if (!killed) break;
    }
    CHECK(seen[KILL_OLD] > 5 && seen[KILL_NEW] > 0 && refused > 0, "old %d, new %d, refused %d times",
          seen[KILL_OLD], seen[KILL_NEW], refused);
}

#define KILL_RUN "--tokenizer byte --doc-len 1 --shard-tokens 40 --out " DIR_ "kill/s "

static void test_kills(void) {
    make_dataset(DIR_ "kill_a", 'A', 20);
    make_dataset(DIR_ "kill_b", 'B', 10);
    check_kills(KILL_RUN "--val-fraction 0.4 " DIR_ "kill_a", KILL_RUN "--val-fraction 0.4 " DIR_ "kill_b");
    check_kills(KILL_RUN "--val-fraction 0.4 " DIR_ "kill_b", KILL_RUN "--val-fraction 0.4 " DIR_ "kill_a");
    check_kills(KILL_RUN "--val-fraction 0.4 " DIR_ "kill_a", KILL_RUN DIR_ "kill_b");
    check_kills(KILL_RUN "--val-fraction 0.9 " DIR_ "kill_b", // one training shard
                KILL_RUN "--val-fraction 0.9 --seed 1 " DIR_ "kill_a");
}

// An error keeps the old shards, and two runs do not mix.
static void test_old_shards(void) {
    run_ok("--tokenizer byte --out " DIR_ "old/s " DIR_ "in/a", "1 document");
    DIES(DIR_ "nope: cannot read", "--tokenizer byte --out " DIR_ "old/s " DIR_ "nope");
    DIES("none of its files has 100 tokens", "--tokenizer byte --doc-len 100 --out " DIR_ "old/s " DIR_ "in");
    check_text(DIR_ "old/s", "train", "\1first");
    int lock = lock_file(DIR_ "old/s_val.lock");
    CHECK(lock >= 0, "lock: %s", strerror(errno));
    DIES("old/s: another process writes these shards", "--tokenizer byte --out " DIR_ "old/s " DIR_ "in");
    close(lock);
    check_text(DIR_ "old/s", "train", "\1first");
    // data shards of any prefix, and unfinished ones, are not input
    write_text(DIR_ "old/s_val_000000.bin.tmp", "left");
    write_text(DIR_ "old/t_train_000012.bin.tmp", "left");
    write_text(DIR_ "old/t_train_000012.bin", "left");
    write_text(DIR_ "old/t_train_12.bin", "text");
    write_text(DIR_ "old/t_train_tokenizer.json.tmp", "left"); // and old/s_tokenizer.json
    write_text(DIR_ "old/s_val_tokenizer.json.tmp", "left");
    run_ok("--tokenizer byte --out " DIR_ "old/s " DIR_ "old", "skipped 7 files: data shards or tokenizers");
    check_text(DIR_ "old/s", "train", "\1text");
    CHECK(!exists(DIR_ "old/s_val_000000.bin.tmp"), "a temporary file of the prefix remains");
    CHECK(!exists(DIR_ "old/s_val_tokenizer.json.tmp"), "a temporary file of the prefix remains");
    CHECK(exists(DIR_ "old/t_train_000012.bin.tmp") && exists(DIR_ "old/t_train_tokenizer.json.tmp"),
          "removed a temporary file of another prefix");
}
