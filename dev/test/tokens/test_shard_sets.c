/*
Tests of llmc/tokens/dataset.h through a loader: which shards of a conversion are accepted together.
*/
#include "loaders.h"

// Writes `shards` train shards of 4 T tokens, which differ by `first`, as a conversion of its own.
static void publish_set(const char* prefix, int64_t first, int64_t shards) {
    ShardWriter train, val;
    Error err = {""};
    char path[PATH_LENGTH];
    strcpy(path, in_folder(prefix));
    bool ok = shard_writer_open(&train, path, "train", V, T, 4 * T, &err) &&
              shard_writer_open(&val, path, "val", V, T, 4 * T, &err);
    train.hold = val.hold = true;
    for (int64_t i = 0; ok && i < shards * 4 * T; i++) {
        uint32_t id = token(first + i, V);
        ok = shard_write(&train, &id, 1, &err);
    }
    CHECK_OK(ok && shard_writer_close(&train, &err) && shard_writer_close(&val, &err) &&
             shard_set_publish(&train, &val, &err));
}

// The shards of a conversion are accepted together or, while all of them exist, in part.
static void test_sets(void) {
    DataLoader l;
    char list[2 * PATH_LENGTH + 2];
    publish_set("set", 0, 4);
    open_set(&l, "set_train_*.bin", 1, 0, 1, false);
    CHECK(dataloader_sequences(&l) == 16, "%d sequences", (int)l.set.sequences);
    dataloader_close(&l);
    open_set(&l, "set_train_00000[13].bin", 1, 0, 1, false);
    CHECK(dataloader_sequences(&l) == 8, "%d sequences", (int)l.set.sequences);
    dataloader_close(&l);
    publish_set("two/set", 1000, 2);
    snprintf(list, sizeof list, "%s,%s", in_folder("set_train_*.bin"), in_folder("two/set_train_*.bin"));
    DataOptions options = {T, 1, data_share(1, 1, 0, 1), V, EOT, false, 99, 0};
    Error err = {""};
    CHECK_OK(dataloader_open(&l, list, &options, &err));
    CHECK(dataloader_sequences(&l) == 24, "%d sequences of two conversions", (int)l.set.sequences);
    dataloader_close(&l);

    // one of the shards is missing, is of another conversion, is an older version, has another name
    char second[PATH_LENGTH], aside[PATH_LENGTH], foreign[PATH_LENGTH];
    strcpy(second, in_folder("set_train_000001.bin"));
    strcpy(aside, in_folder("aside.bin"));
    strcpy(foreign, in_folder("two/set_train_000001.bin"));
    if (rename(second, aside) != 0) die("rename");
    check_open_fails(in_folder("set_train_*.bin"), V, "set_train_000000.bin: is one of 4 shards", "number 1");
    check_open_fails(in_folder("set_train_00000[23].bin"), V, "set_train_000002.bin",
                     "number 1 is missing or of another one: put it back, or convert the data again");
    if (rename(foreign, second) != 0) die("rename");
    check_open_fails(in_folder("set_train_*.bin"), V, "set_train_000000.bin", "of another one");
    check_open_fails(in_folder("two/set_train_*.bin"), V, "two/set_train_000000.bin", "number 1 is missing");
    if (rename(second, foreign) != 0) die("rename");
    snprintf(list, sizeof list, "%s,%s", in_folder("set_train_*.bin"), in_folder("aside.bin"));
    CHECK_OK(dataloader_open(&l, list, &options, &err));
    dataloader_close(&l);
    if (rename(aside, second) != 0) die("rename");
    publish_set("set", 5000, 3); // replaces all four
    CHECK(!exists(in_folder("set_train_000003.bin")), "an old shard remains");
    open_set(&l, "set_train_*.bin", 1, 0, 1, false);
    CHECK(dataloader_sequences(&l) == 12, "%d sequences", (int)l.set.sequences);
    dataloader_close(&l);

    // replaced by a set of the same shape while in use
    int32_t inputs[T], targets[T];
    open_set(&l, "set_train_*.bin", 1, 0, 1, false);
    publish_set("set", 9000, 3);
    CHECK_FAILS("set_train_000000.bin: was replaced", dataloader_next(&l, inputs, targets, &err));
    dataloader_close(&l);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("shard_sets"));
    test_sets();
    return test_report();
}
