/*
Tests of saving checkpoints (llmc/checkpoint/write.h): what is saved is read back bit by bit in both
precisions and by any number of ranks, and no failure while saving, such as a full disk or a crash, costs an
older checkpoint.
*/
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include "../../../llmc/model/fp8.h"
#include "../scratch.h"
#include "../checkpoint_fixture.h"

// fsync of the C library, but that the flush of a folder fails after so many; -1: none fails
static int folders_flushed = -1;

int fsync(int fd) {
    struct stat st;
    bool fails = folders_flushed >= 0 && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) && folders_flushed-- == 0;
    if (!fails) return (int)syscall(SYS_fsync, fd);
    errno = EIO;
    return -1;
}

// ----------------------------------------------------------------------------
// round trips

static void round_trip(int written, int read) {
    Buffers a = filled_buffers(written, 1), b = filled_buffers(read, 2), old = filled_buffers(read, 2);
    TrainerState state, saved = state_at(1000);
    Json record;
    Config c;
    CHECK_OK(save(1000, &a, 0));
    const char* folder = folder_of(1000);
    CHECK_OK(load_weights(folder, &b));
    CHECK_OK(load_optimizer(folder, &b));
    CHECK_OK(load_state(folder, &state, &record));
    CHECK_OK(config_read(&c, folder, &err));
    CHECK(memcmp(&state, &saved, sizeof state) == 0, "the state");
    CHECK(c.hidden_size == PARAM_ALIGN && c.fgate_type == GATE_FIXED && c.use_k_shift, "the config");
    for (int r = 0; r < table.num_rows; r++) {
        const Param* p = &table.rows[r];
        int64_t differ = 0;
        for (int64_t i = p->offset; i < p->offset + p->count; i++) {
            double w = get(&a, a.w, i), m = get(&a, a.m, i), v = get(&a, a.v, i);
            if (!p->trainable) m = get(&old, old.m, i), v = get(&old, old.v, i); // not in the file
            if (read == 4) w = (float)w, m = (float)m, v = (float)v;
            differ += get(&b, b.w, i) != w || get(&b, b.m, i) != m || get(&b, b.v, i) != v;
        }
        CHECK(differ == 0, "%s, %d to %d bytes: %d elements differ", p->name, written, read, (int)differ);
    }

    const char* precision = json_string(&record, json_get(&record, 0, "precision"));
    CHECK(precision && strcmp(precision, written == 8 ? "float64" : "float32") == 0, "%s", precision);
    CHECK(json_string(&record, json_get(&record, 0, "code_version")), "the code's version");
    Options restored;
    bool given[NUM_OPTION_ROWS] = {false};
    options_defaults(&restored);
    CHECK_OK(options_restore(&restored, given, folder, &record, json_get(&record, 0, "options"), &err));
    CHECK(restored.weight_decay == 0.3 && strcmp(restored.model, "fox-pro-nano") == 0, "the options");
    json_free(&record);
    free_buffers(&a);
    free_buffers(&b);
    free_buffers(&old);
}

static void test_round_trips(void) {
    for (int bytes = 4; bytes <= 8; bytes += 4) {
        round_trip(bytes, bytes);
        round_trip(bytes, 12 - bytes); // a checkpoint of the double build in the float build, and vice versa
    }
}

// ----------------------------------------------------------------------------
// shards

// Whether two files have the same bytes.
static bool same_bytes(const char* one, const char* other) {
    size_t n = 0, m = 0;
    char *a = read_file(one, &n, &err), *b = read_file(other, &m, &err);
    bool same = a && b && n == m && memcmp(a, b, n) == 0;
    free(a);
    free(b);
    return same;
}

// Any number of ranks writes the same files, which are those of safetensors_write.
static void test_shards_write(void) {
    static const char* const names[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                        "trainer.json"};
    for (int bytes = 4; bytes <= 8; bytes += 4) {
        Buffers b = filled_buffers(bytes, 5);
        SafeTensor tensors[64];
        for (int r = 0; r < table.num_rows; r++) {
            const Param* p = &table.rows[r];
            tensors[r] = safetensors_tensor(p->name, bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32, p->ndim,
                                            p->shape, (const char*)b.w + p->offset * bytes);
        }
        CHECK_OK(safetensors_write(in_out("expected"), tensors, table.num_rows, &err));
        const char* alone = bytes == 8 ? "alone64" : "alone32";
        CHECK_OK(save(7, &b, 0));
        CHECK(rename(folder_of(7), in_out("%s", alone)) == 0, "rename");
        for (int ranks = 1; ranks <= 5; ranks++) {
            CHECK_OK(save_by(ranks, 7, &b, 0));
            CHECK(same_bytes(in_out("expected"), in_out("step_00000007/model.safetensors")), "%d ranks",
                  ranks);
            CHECK(loads(folder_of(7)), "%s", err.msg); // also verifies the checksums
            for (int i = 0; i < 4; i++)
                CHECK(same_bytes(in_out("%s/%s", alone, names[i]), in_out("step_00000007/%s", names[i])),
                      "%s differs with %d ranks", names[i], ranks);
        }
        free_buffers(&b);
    }
}

// A number of ranks reads what another number has written. Only tensors are touched, in the shards too.
static void test_shards_read(void) {
    Buffers a = filled_buffers(4, 6);
    for (int writers = 1; writers <= 5; writers += 2) {
        CHECK_OK(save_by(writers, 7, &a, 0));
        for (int readers = 1; readers <= 5; readers++) {
            Buffers b = filled_buffers(4, 6); // moments of what is not trained stay
            ParamTable other = params_build_for(&config, readers);
            int64_t touched = 0, padding = 0;
            memset(b.w, 0, (size_t)table.count * 4);
            for (int rank = 0; rank < readers; rank++) {
                const Shard shard = params_shard(&other, rank, readers);
                CheckpointTensors t = shard_tensors(&shard, 4);
                copy_shard(&other, &shard, &t, &b, true);
                const CheckpointPart part = {&other, &shard, &t, NULL};
                CHECK_OK(checkpoint_read_file(folder_of(7), CHECKPOINT_MODEL, &part, &err));
                CHECK_OK(checkpoint_read_file(folder_of(7), CHECKPOINT_OPTIMIZER, &part, &err));
                copy_shard(&other, &shard, &t, &b, false);
                for (int64_t i = 0; i < shard_count(&shard); i++) touched += !isnan(((float*)t.w)[i]);
                padding += shard_count(&shard);
                free_tensors(&t);
            }
            CHECK(touched == table.parameters && padding == other.count, "%lld numbers of %lld",
                  (long long)touched, (long long)table.parameters);
            size_t bytes = (size_t)table.count * 4;
            CHECK(memcmp(a.w, b.w, bytes) == 0 && memcmp(a.m, b.m, bytes) == 0 &&
                      memcmp(a.v, b.v, bytes) == 0,
                  "written by %d, read by %d ranks", writers, readers);
            params_free(&other);
            free_buffers(&b);
        }
    }
    free_buffers(&a);
}

// Only the rank that owns an element finds it, and the message names its tensor.
static void test_finite(void) {
    static const char* const names[] = {"'model.norm.weight' has", "'exp_avg.model.norm.weight' has",
                                        "'exp_avg_sq.model.norm.weight' has"};
    for (int k = 0; k < 3; k++) {
        Buffers b = filled_buffers(4, 6);
        void* const buffers_of[] = {b.w, b.m, b.v};
        ParamTable other = params_build_for(&config, 3);
        const Param* p = params_find(&table, P_NORM, 0);
        int found = 0;
        put(&b, buffers_of[k], p->offset + p->count - 1, k == 1 ? INFINITY : NAN);
        for (int rank = 0; rank < 3; rank++) {
            const Shard shard = params_shard(&other, rank, 3);
            CheckpointTensors t = shard_tensors(&shard, 4); // NaN in the padding does not count
            copy_shard(&other, &shard, &t, &b, true);
            const CheckpointPart part = {&other, &shard, &t, NULL};
            if (!checkpoint_check_finite(&part, &err)) {
                found++;
                CHECK(strstr(err.msg, names[k]), "%s", err.msg);
            }
            free_tensors(&t);
        }
        CHECK(found == 1, "%d ranks found it", found);
        params_free(&other);
        free_buffers(&b);
    }
}

// ----------------------------------------------------------------------------
// listing and keeping

static void test_list(void) {
    static const char* const not_ours[] = {
        "step_7",         "step_000000012",         "step_0000001x",  "step_-0000001", "step_",
        "xstep_00000001", ".tmp-step_00000009.bak", "step_00000009 ", "evaluation"};
    for (size_t i = 0; i < sizeof not_ours / sizeof not_ours[0]; i++)
        CHECK_OK(make_folders(in_out("%s", not_ours[i]), &err));
    FILE* f = fopen(in_out("step_00000077"), "wb"); // no folder
    if (f) fclose(f);
    CHECK_LISTED("");
    CHECK_OK(make_folders(in_out("step_123456789"), &err));
    CHECK_OK(save_filled(20, 0));
    CHECK_OK(save_filled(0, 0));
    CHECK_OK(save_filled(100, 0));
    CHECK_LISTED("123456789 100 20 0");

    int64_t* steps;
    CHECK(checkpoint_list(in_out("nowhere"), &steps, &err) == 0 && !steps, "no folder, no checkpoints");
    CHECK(checkpoint_list(in_out("step_00000077"), &steps, &err) == -1, "a file is not an empty folder");
    CHECK(strstr(err.msg, "step_00000077: cannot read this folder"), "%s", err.msg);
}

static void test_keep(void) {
    const char* strangers[] = {"step_1", "other", "step_00000002.bak"};
    for (int i = 0; i < 3; i++) CHECK_OK(make_folders(in_out("%s/x", strangers[i]), &err));
    for (int64_t step = 10; step <= 50; step += 10) CHECK_OK(save_filled(step, 0));
    CHECK_LISTED("50 40 30 20 10");
    CHECK_OK(save_filled(60, 3));
    CHECK_LISTED("60 50 40");
    CHECK_OK(save_filled(70, 1));
    CHECK_LISTED("70");
    CHECK_OK(save_filled(80, 2));
    CHECK_LISTED("80 70");
    // resumed from before 70 and 80: the checkpoint just saved must stay
    CHECK_OK(save_filled(65, 1));
    CHECK_LISTED("80 70 65");
    CHECK_OK(save_filled(66, 1));
    CHECK_LISTED("80 70 66");
    CHECK_OK(save_filled(70, 1));
    CHECK_LISTED("80 70");
    CHECK(loads(folder_of(70)), "%s", err.msg);
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
    for (int i = 0; i < 3; i++) CHECK(rmdir(in_out("%s/x", strangers[i])) == 0, "%s", strangers[i]);

    // a symbolic link is removed, its target is not
    CHECK(rename(folder_of(70), in_out("elsewhere")) == 0, "rename");
    CHECK(symlink("elsewhere", folder_of(70)) == 0, "symlink");
    CHECK_OK(save_filled(80, 1));
    CHECK_LISTED("80");
    CHECK(loads(in_out("elsewhere")), "%s", err.msg);
}

// What is not a checkpoint's is never removed with it, nor replaced.
static void test_more_than_a_checkpoint(void) {
    CHECK_OK(save_filled(10, 0));
    CHECK_OK(save_filled(20, 0));
    CHECK_OK(make_folders(in_out("step_00000010/finetuned/step_00000003"), &err));
    CHECK_OK(save_filled(30, 1));
    CHECK_LISTED("30 10");
    CHECK_OK(save_filled(40, 1));
    CHECK_LISTED("40 10");
    CHECK(exists(in_out("step_00000010/finetuned/step_00000003")) && loads(folder_of(10)), "%s", err.msg);
    CHECK_OK(save_filled(10, 0)); // as of a run that resumed from an older one
    CHECK(loads(folder_of(10)) && !exists(in_out("step_00000010/finetuned")), "%s", err.msg);
    CHECK(exists(in_out("step_00000010.other/finetuned/step_00000003")), "the other run is gone");
    FILE* f = fopen(in_out("step_00000050"), "wb");
    if (f) fclose(f);
    CHECK_OK(save_filled(50, 0));
    CHECK(loads(folder_of(50)) && exists(in_out("step_00000050.other")), "%s", err.msg);
    CHECK_OK(make_folders(in_out("step_00000050/notes"), &err));
    CHECK(!save_filled(50, 0) && strstr(err.msg, "step_00000050.other: move it away"), "%s", err.msg);
    CHECK(loads(folder_of(50)) && exists(in_out("step_00000050/notes")), "%s", err.msg);
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
}

static void test_same_step_again(void) {
    Buffers b = buffers(4), expected = filled_buffers(4, 8);
    CHECK_OK(save_filled(7, 2));
    CHECK(truncate(in_out("step_00000007/model.safetensors"), 100) == 0, "truncate");
    CHECK(!loads(folder_of(7)), "a damaged checkpoint loads");
    CHECK_OK(save(7, &expected, 2));
    CHECK_OK(load_weights(folder_of(7), &b));
    CHECK(memcmp(b.w, expected.w, (size_t)table.count * 4) == 0, "the damaged one is still there");
    CHECK_LISTED("7");
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
    free_buffers(&b);
    free_buffers(&expected);
}

// ----------------------------------------------------------------------------
// what goes wrong while saving

// Leftovers of a crash, at any point, do not count as checkpoints and are removed by the next save.
static void test_crash(void) {
    CHECK_OK(save_filled(10, 0));
    CHECK_OK(save_filled(20, 0));
    CHECK(rename(folder_of(20), in_out(".tmp-step_00000020")) == 0, "rename");
    CHECK_OK(make_folders(in_out(".tmp-step_00000030"), &err)); // the step to be saved now
    CHECK_OK(make_folders(in_out(".tmp-step_00000005.old/deep/er"), &err));
    FILE* f = fopen(in_out(".tmp-step_00000030/model.safetensors"), "wb");
    if (f) fclose(f);
    CHECK_LISTED("10");
    CHECK(leftovers() == 3, "%d leftovers", leftovers());
    CHECK_OK(save_filled(30, 0));
    CHECK_LISTED("30 10");
    CHECK(loads(folder_of(30)), "%s", err.msg);
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
}

// A process killed at any time while it saves again and again, keeping one, leaves at least one whole
// checkpoint.
static void test_killed(void) {
    CHECK_OK(save_filled(1, 1));
    for (int round = 0; round < 20; round++) {
        int pipe_ends[2];
        pid_t child = test_fork(pipe_ends);
        if (child == 0) {
            for (int64_t step = 2;; step++)
                if (!save_filled(step, 1) || write(STDERR_FILENO, "x", 1) != 1) _exit(1);
        }
        check_killed(child, pipe_ends, round);
    }
}

// A file size limit stands for a full disk. It decreases, so that each file fails in turn.
static void test_full_disk(void) {
    static const int limits[] = {2000000, 400000, 200000, 1000, 100, 0};
    struct rlimit old, small;
    int failures = 0;
    CHECK_OK(save_filled(10, 1));
    CHECK_OK(save_filled(20, 2));
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        small.rlim_cur = (rlim_t)limits[i];
        setrlimit(RLIMIT_FSIZE, &small);
        bool ok = save_filled(20, 1); // would replace one checkpoint and remove the other
        setrlimit(RLIMIT_FSIZE, &old);
        failures += !ok;
        if (ok && save_filled(10, 1)) continue;
        CHECK(strstr(err.msg, out) && strstr(err.msg, ": cannot write: File too large"), "%s", err.msg);
        CHECK_LISTED("20 10");
        CHECK(loads(folder_of(10)) && loads(folder_of(20)), "%s", err.msg);
        CHECK(leftovers() == 0, "%d leftovers", leftovers());
    }
    CHECK(failures == 5, "%d failures", failures);
}

// A disk that fills up, or a folder that goes away, after the files were created.
static void test_write_fails(void) {
    const Shard whole = params_shard(&table, 0, 1);
    const TrainerState state = state_at(20);
    const CheckpointRecord record = record_of(&table, &state, NULL);
    Buffers b = filled_buffers(4, 1);
    const CheckpointTensors t = tensors_of(&b);
    const CheckpointPart part = {&table, &whole, &t, NULL};
    struct rlimit old, small;
    CHECK_OK(save_filled(10, 1));
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0, "getrlimit");
    for (int i = 0; i < 2; i++) {
        CheckpointWriter w;
        CHECK_OK(checkpoint_writer_open(&w, out, 20, &table, 4, &err));
        CHECK_OK(checkpoint_create(&w, &record, &err));
        CHECK(leftovers() == 1, "%d leftovers", leftovers());
        small = old, small.rlim_cur = 100000;
        if (i == 0) setrlimit(RLIMIT_FSIZE, &small);
        if (i == 1) CHECK(rename(w.files[1].path, in_out("elsewhere")) == 0, "rename");
        bool ok = checkpoint_write_shard(&w, &part, &err);
        setrlimit(RLIMIT_FSIZE, &old);
        CHECK(!ok && strstr(err.msg, i == 0 ? "model.safetensors: cannot write: File too large"
                                            : "optimizer.safetensors: cannot open: No such file"),
              "%s", err.msg);
        checkpoint_sweep(out);
        checkpoint_writer_close(&w);
        CHECK_LISTED("10");
        CHECK(loads(folder_of(10)) && leftovers() == 0, "%s", err.msg);
    }
    free_buffers(&b);
}

// A folder that cannot be flushed. Before the checkpoint has its name there is no new one; afterwards there
// is, the message does not deny it, and what it replaces stays.
static void test_flush_fails(void) {
    const Shard whole = params_shard(&table, 0, 1);
    Buffers b = filled_buffers(4, 20);
    const CheckpointTensors t = tensors_of(&b);
    const CheckpointPart part = {&table, &whole, &t, NULL};
    CHECK_OK(save_filled(10, 1));
    for (int64_t step = 20; step <= 40; step += 10) {
        const TrainerState state = state_at(step == 40 ? 30 : step);
        const CheckpointRecord record = record_of(&table, &state, NULL);
        CheckpointWriter w;
        CHECK_OK(checkpoint_writer_open(&w, out, state.step, &table, 4, &err));
        CHECK_OK(checkpoint_create(&w, &record, &err) && checkpoint_write_shard(&w, &part, &err));
        folders_flushed = step > 20; // the temporary folder, then OUT
        CHECK_FAILS(": cannot flush this folder: Input/output error", checkpoint_finish(&w, 1, &err));
        CHECK(folders_flushed == -1, "no folder was flushed");
        CHECK(w.published == (step > 20), "published %d", w.published);
        checkpoint_writer_close(&w);
        if (step == 20) CHECK_LISTED("10");
        if (step > 20) CHECK_LISTED("30 10");
        if (step > 20) CHECK(loads(folder_of(30)), "%s", err.msg);
        CHECK(leftovers() == (step == 40), "%d leftovers", leftovers()); // the 30 that was replaced
        CHECK(loads(folder_of(10)), "%s", err.msg);
    }
    CHECK_OK(save_filled(50, 1));
    CHECK_LISTED("50");
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
    free_buffers(&b);
}

static void test_unwritable(void) {
    FILE* f = fopen(in_out("file"), "wb");
    if (f) fclose(f);
    char saved[PATH_LENGTH];
    strcpy(saved, out);
    strcpy(out, in_out("file"));
    CHECK_FAILS("file", save_filled(1, 1));
    strcpy(out, saved);
    if (geteuid() == 0) {
        SKIP("an unwritable folder: root may write anywhere");
        return;
    }
    CHECK_OK(save_filled(1, 1));
    chmod(out, 0555);
    CHECK_FAILS(".tmp-step_00000002: cannot make", save_filled(2, 1));
    chmod(out, 0777);
    CHECK_LISTED("1");
}

// ----------------------------------------------------------------------------
// the lock

static void test_lock(void) {
    char run[PATH_LENGTH];
    strcpy(run, in_out("runs/first"));
    int fd = -1, second = -1;
    CHECK_OK(out_lock(run, &fd, &err));
    CHECK_FAILS("runs/first: another process is training here", out_lock(run, &second, &err));
    CHECK_DIES("another process is training", if (!out_lock(run, &second, &err)) die("%s", err.msg));
    CHECK_OK(out_lock(in_out("runs/second"), &second, &err));
    close(second);
    close(fd);
    // the lock ends with the process, however it ends
    int pipe_ends[2];
    char byte;
    pid_t child = test_fork(pipe_ends);
    if (child == 0) {
        bool ok = out_lock(run, &fd, &err);
        if (write(STDERR_FILENO, ok ? "y" : "n", 1) == 1) pause();
        _exit(1);
    }
    CHECK(read(pipe_ends[0], &byte, 1) == 1 && byte == 'y', "the child could not lock");
    CHECK_FAILS("another process", out_lock(run, &fd, &err));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(pipe_ends[0]);
    CHECK_OK(out_lock(run, &fd, &err));
    close(fd);
}

// A folder that was moved or removed, or lost its lock file, is no longer the run's, and one that was made in
// its place is another's; under another name it still is.
static void test_lock_held(void) {
    char run[PATH_LENGTH], lock[PATH_LENGTH], moved[PATH_LENGTH];
    const char* const lost = "runs/held: is no longer the folder of this run";
    strcpy(run, in_out("runs/held"));
    strcpy(moved, in_out("moved"));
    path_join(lock, run, "lock");
    int fd = -1, second = -1;
    CHECK_OK(out_lock(run, &fd, &err));
    CHECK_OK(out_lock_held(run, fd, &err));
    CHECK_OK(out_lock_held(in_out("nowhere"), -1, &err)); // no lock is held
    CHECK(rename(run, moved) == 0, "rename");
    CHECK_FAILS(lost, out_lock_held(run, fd, &err));
    CHECK_FAILS("another process is training here", out_lock(moved, &second, &err));
    CHECK(symlink("../moved", run) == 0, "symlink");
    CHECK_OK(out_lock_held(run, fd, &err));
    CHECK(remove(run) == 0, "remove");
    CHECK_OK(out_lock(run, &second, &err));
    CHECK_FAILS(lost, out_lock_held(run, fd, &err));
    CHECK_OK(out_lock_held(run, second, &err) && out_lock_held(moved, fd, &err));
    close(fd);
    CHECK(remove(lock) == 0, "remove");
    CHECK_FAILS(lost, out_lock_held(run, second, &err));
    CHECK_OK(out_lock(run, &fd, &err));
    CHECK_FAILS(lost, out_lock_held(run, second, &err));
    CHECK_OK(out_lock_held(run, fd, &err));
    close(fd);
    close(second);
}

// The longest name of OUT that can be locked has room for every name of a save; one byte more is refused,
// before any folder is made.
static void test_long_out(void) {
    char saved[PATH_LENGTH], name[251];
    int fd = -1;
    strcpy(saved, out);
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    while (strlen(out) < PATH_LENGTH - 300) {
        char parent[PATH_LENGTH];
        strcpy(parent, out);
        path_join(out, parent, name);
    }
    strcat(out, "/y");
    for (;; strcat(out, "y")) {
        struct stat st;
        bool is_new = stat(out, &st) != 0;
        if (out_lock(out, &fd, &err)) {
            close(fd);
            continue;
        }
        CHECK(strstr(err.msg, ": too long: names of checkpoints in it would exceed 4095 bytes"), "%s",
              err.msg);
        CHECK(is_new && stat(out, &st) != 0, "%zu bytes are too long, but the folder is made", strlen(out));
        break;
    }
    out[strlen(out) - 1] = '\0';
    CHECK_OK(save_filled(INT64_MAX / 100, 1)); // state_at must not overflow
    CHECK_OK(save_filled(INT64_MAX / 100, 1));
    CHECK(leftovers() == 0, "%d leftovers", leftovers());
    strcpy(out, saved);
}

// What trainer.json cannot hold is refused.
static void test_bad_options(void) {
    Options o = options;
    CHECK_OK(options_check(&o, &err));
    o.data = "gr\xc3\xb6\xc3\x9f"
             "er/\xe2\x82\xac*.bin"; // UTF-8
    CHECK_OK(options_check(&o, &err));
    o.data = "gr\xf6\xdf"
             "er/*.bin"; // Latin-1
    CHECK_FAILS("--data: is not valid UTF-8", options_check(&o, &err));
    o.data = NULL, o.prompt = "cut \xe2\x82";
    CHECK_FAILS("--prompt: is not valid UTF-8", options_check(&o, &err));
    o.prompt = NULL, o.stop.items[0] = "fine", o.stop.items[1] = "cut \xe2\x82", o.stop.count = 2;
    CHECK_FAILS("--stop: is not valid UTF-8", options_check(&o, &err));
    o.stop.count = 1;
    o.prompt = NULL, o.out = o.dump = "\xff"; // not recorded
    CHECK_OK(options_check(&o, &err));
}

// The scales of --fp8 are a member of trainer.json, which a run without it does not have.
static void test_scales(void) {
    TrainerState state;
    Json record;
    uint16_t history[3];
    CHECK_OK(save_filled(1, 0));
    scales = "00003f807f7f";
    CHECK_OK(save_filled(2, 0));
    scales = NULL;
    for (int step = 1; step <= 2; step++) {
        CHECK(loads(folder_of(step)), "%s", err.msg);
        CHECK_OK(load_state(folder_of(step), &state, &record));
        CHECK(fp8_history_read(history, 3, &record) == (step == 2), "step %d: scales", step);
        json_free(&record);
    }
    CHECK(history[0] == 0 && history[1] == 0x3f80 && history[2] == 0x7f7f, "the scales that were saved");
}

static int test_checkpoint(void) {
    static void (*const tests[])(void) = {test_round_trips,
                                          test_shards_write,
                                          test_shards_read,
                                          test_finite,
                                          test_list,
                                          test_keep,
                                          test_more_than_a_checkpoint,
                                          test_same_step_again,
                                          test_crash,
                                          test_killed,
                                          test_full_disk,
                                          test_write_fails,
                                          test_flush_fails,
                                          test_unwritable,
                                          test_lock,
                                          test_lock_held,
                                          test_long_out,
                                          test_bad_options,
                                          test_scales};
    return run_checkpoint_tests(tests, sizeof tests / sizeof tests[0], "checkpoint");
}
