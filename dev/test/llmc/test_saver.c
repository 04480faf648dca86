/*
Tests of llmc/checkpoint/saver.h, send.h and load.h: one and several ranks save and load, whether
they see rank 0's folder or not. Any failure is reported on all ranks and costs no older checkpoint, and no
rank waits for ever.
*/
#include <sys/resource.h>
#include "../ranks.h"
#include "../../../llmc/checkpoint/load.h"
#include "../../../llmc/checkpoint/saver.h"
#include "../checkpoint_fixture.h"

// A rank's table, shard and buffers, and its folder for --out: rank 0's, or another one.
typedef struct {
    World* world;
    ParamTable table;
    Shard shard;
    CheckpointTensors tensors;
    char out[PATH_LENGTH];
} Rank;

static unsigned blind; // bit r: rank r sees another folder

static Rank rank_open(World* world, uint64_t seed) {
    Rank r;
    Buffers b = filled_buffers(4, seed);
    r.world = world;
    r.table = params_build_for(&config, world->size);
    r.shard = params_shard(&r.table, world->rank, world->size);
    r.tensors = shard_tensors(&r.shard, 4);
    copy_shard(&r.table, &r.shard, &r.tensors, &b, true);
    strcpy(r.out, blind >> world->rank & 1 ? in_out("elsewhere") : out);
    free_buffers(&b);
    return r;
}

static void rank_close(Rank* r) {
    free_tensors(&r->tensors);
    params_free(&r->table);
}

static bool start(Saver* s, const Rank* r, int64_t step) {
    const TrainerState state = state_at(step);
    const CheckpointRecord record = record_of(&r->table, &state, NULL);
    return saver_start(s, &record, &r->tensors, &err);
}

// Waits, at most as long as ranks_run allows, for this rank's thread.
static SaverState wait_for(const Saver* s) {
    while (saver_state(s) == SAVER_WRITING) sched_yield();
    return saver_state(s);
}

// Whether this rank's numbers in a step's checkpoint are those of a seed. Collective.
static bool holds(Rank* r, int64_t step, uint64_t seed) {
    char folder[PATH_LENGTH];
    TrainerState state;
    Json record;
    Rank expected = rank_open(r->world, seed), found = rank_open(r->world, 999);
    const size_t bytes = (size_t)shard_count(&r->shard) * 4;
    checkpoint_path(folder, r->out, step);
    bool sees = load_state(folder, &state, &record);
    // elements that are not in the files
    for (int k = 0; k < r->table.num_rows; k++) {
        const Param* p = &r->table.rows[k];
        const TensorRange range = tensor_range(p, &r->shard);
        if (p->trainable) continue;
        memset((char*)expected.tensors.m + range.local * 4, 0, (size_t)range.count * 4);
        memset((char*)expected.tensors.v + range.local * 4, 0, (size_t)range.count * 4);
        memset((char*)found.tensors.m + range.local * 4, 0, (size_t)range.count * 4);
        memset((char*)found.tensors.v + range.local * 4, 0, (size_t)range.count * 4);
    }
    const CheckpointPart part = {&r->table, &r->shard, &found.tensors, r->world};
    bool ok = checkpoint_load(folder, sees ? &record : NULL, &part, &err);
    if (ok && memcmp(found.tensors.w, expected.tensors.w, bytes) != 0) ok = fail(&err, "weights differ");
    if (ok && memcmp(found.tensors.m, expected.tensors.m, bytes) != 0) ok = fail(&err, "moments differ");
    if (ok && memcmp(found.tensors.v, expected.tensors.v, bytes) != 0)
        ok = fail(&err, "second moments differ");
    if (sees) json_free(&record);
    rank_close(&expected);
    rank_close(&found);
    return ok;
}

// ----------------------------------------------------------------------------
// saving

// Saves two steps; each has its name before saver_finish, and the second removes the first.
static void save_twice(World* world) {
    Rank r = rank_open(world, 1);
    Saver s;
    bool mine = true;
    char fifo[PATH_LENGTH];
    path_join(fifo, r.out, ".ranks");
    CHECK_OK(make_folders(r.out, &err));
    if (world->rank == 0 || blind >> world->rank & 1) // nobody waits for it
        CHECK(mkfifo(fifo, 0600) == 0 || errno == EEXIST, "%s: %s", fifo, strerror(errno));
    CHECK_OK(saver_open(&s, world, &r.table, r.out, -1, 1, &err));
    for (int rank = 0; rank < world->size; rank++)
        CHECK(s.sees[rank] == !(blind >> rank & 1), "rank %d", rank);
    if (world->rank == 0) CHECK(access(in_out(".ranks"), F_OK) != 0, "the token is left");
    CHECK(saver_state(&s) == SAVER_IDLE && saver_finish(&s, &mine, &err) && !mine, "idle");
    for (int64_t step = 10; step <= 20; step += 10) {
        CHECK_OK(start(&s, &r, step));
        CHECK(wait_for(&s) == SAVER_WRITTEN, "%s", s.err.msg);
        if (world->rank == 0) CHECK_LISTED(step == 10 ? "10" : "20");
        CHECK_OK(saver_finish(&s, &mine, &err));
        CHECK(saver_state(&s) == SAVER_IDLE && !mine, "not idle");
        if (world->rank == 0) CHECK_LISTED(step == 10 ? "10" : "20");
        if (world->rank == 0) CHECK(leftovers() == 0, "%d leftovers", leftovers());
        CHECK_OK(holds(&r, step, 1));
    }
    saver_close(&s);
    rank_close(&r);
}

// Whether a checkpoint has the bytes that one rank alone writes, including the checksums.
static void check_as_alone(int64_t step) {
    static const char* const names[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                        "trainer.json"};
    char saved[PATH_LENGTH];
    strcpy(saved, out);
    CHECK_OK(make_folders(in_out("alone"), &err));
    strcpy(out, in_out("alone"));
    Buffers b = filled_buffers(4, 1);
    CHECK_OK(save(step, &b, 1));
    free_buffers(&b);
    strcpy(out, saved);
    for (int i = 0; i < 4; i++) {
        size_t n = 0, m = 0;
        char* one = read_file(in_out("step_%08d/%s", (int)step, names[i]), &n, &err);
        char* other = read_file(in_out("alone/step_%08d/%s", (int)step, names[i]), &m, &err);
        CHECK(one && other && n == m && memcmp(one, other, n) == 0, "%s differs", names[i]);
        free(one);
        free(other);
    }
}

static void test_save(void) {
    static const unsigned who[] = {0, 2, 12, 30}; // nobody, rank 1, ranks 2 and 3, all but rank 0
    for (int size = 1; size <= 5; size++) {
        for (size_t i = 0; i < sizeof who / sizeof *who; i++) {
            blind = who[i] & ((1u << size) - 1);
            if (blind == 0 && i > 0) continue;
            strcpy(out, test_scratch("saver"));
            CHECK_OK(make_folders(in_out("elsewhere"), &err));
            ranks_run(size, save_twice);
            check_as_alone(20);
        }
    }
    blind = 0;
}

// ----------------------------------------------------------------------------
// failures

static int failing; // this rank's numbers, or disk, fail

// A number that is not finite in one rank's shard: all ranks learn its tensor.
static void save_nan(World* world) {
    Rank r = rank_open(world, 1);
    Saver s;
    bool mine;
    CHECK_OK(saver_open(&s, world, &r.table, r.out, -1, 1, &err));
    CHECK_OK(start(&s, &r, 10));
    CHECK_OK(saver_finish(&s, NULL, &err));
    if (world->rank == failing) {
        const Param* p = params_find(&r.table, P_LM_HEAD, 0);
        const TensorRange range = tensor_range(p, &r.shard);
        CHECK(range.count > 0, "rank %d owns nothing of lm_head", failing);
        ((float*)r.tensors.v)[range.local + range.count - 1] = NAN;
    }
    CHECK_OK(start(&s, &r, 20));
    CHECK(wait_for(&s) == (world->rank == failing || world->rank == 0 ? SAVER_FAILED : SAVER_WRITTEN),
          "state %d", (int)saver_state(&s));
    CHECK_FAILS("'exp_avg_sq.lm_head.weight' has become infinite or not a number",
                saver_finish(&s, &mine, &err));
    CHECK(mine == (world->rank == failing), "mine %d", mine);
    if (world->rank == 0) CHECK_LISTED("10");
    if (world->rank == 0) CHECK(leftovers() == 0, "%d leftovers", leftovers());
    // the saver can be used again
    if (world->rank == failing) memset(r.tensors.v, 0, (size_t)shard_count(&r.shard) * 4);
    CHECK_OK(start(&s, &r, 30));
    CHECK_OK(saver_finish(&s, &mine, &err));
    if (world->rank == 0) CHECK_LISTED("30");
    saver_close(&s);
    rank_close(&r);
}

static void test_nan(void) {
    for (int size = 1; size <= 4; size += 3) {
        for (failing = 0; failing < size; failing += 3) {
            for (unsigned i = 0; i < 2; i++) {
                blind = i && failing ? 1u << failing : 0;
                strcpy(out, test_scratch("saver"));
                CHECK_OK(make_folders(in_out("elsewhere"), &err));
                ranks_run(size, save_nan);
            }
        }
    }
    blind = 0;
}

// A full disk, when rank 0 creates the files and later, when a rank writes. A file size limit stands for it.
static void save_full(World* world) {
    Rank r = rank_open(world, 1);
    Saver s;
    bool mine = false;
    struct rlimit old, small;
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0, "getrlimit");
    signal(SIGXFSZ, SIG_IGN);
    CHECK_OK(saver_open(&s, world, &r.table, r.out, -1, 1, &err));
    CHECK_OK(start(&s, &r, 10));
    CHECK_OK(saver_finish(&s, NULL, &err));
    small = old, small.rlim_cur = 300000;
    if (world->rank == 0) setrlimit(RLIMIT_FSIZE, &small);
    CHECK_FAILS("optimizer.safetensors: cannot write: File too large", start(&s, &r, 20)); // on all ranks
    CHECK(saver_state(&s) == SAVER_IDLE, "a save has started");
    setrlimit(RLIMIT_FSIZE, &old);
    if (world->rank == 0) CHECK_LISTED("10");
    if (world->rank == 0) CHECK(leftovers() == 0, "%d leftovers", leftovers());

    // rank 0 writes the numbers of a blind rank, so it must be one that writes itself
    small.rlim_cur = 2000;
    if (world->rank == failing) setrlimit(RLIMIT_FSIZE, &small);
    if (failing > 0) { // at rank 0 the limit would be noticed by saver_start
        CHECK_OK(start(&s, &r, 20));
        CHECK_FAILS("model.safetensors: cannot write: File too large", saver_finish(&s, &mine, &err));
        CHECK(mine == (world->rank == failing), "mine %d", mine);
    }
    setrlimit(RLIMIT_FSIZE, &old);
    if (world->rank == 0) CHECK_LISTED("10");
    if (world->rank == 0) CHECK(leftovers() == 0, "%d leftovers", leftovers());
    CHECK_OK(holds(&r, 10, 1));
    saver_close(&s);
    rank_close(&r);
}

static void test_full_disk(void) {
    for (failing = 0; failing < 3; failing++) {
        strcpy(out, test_scratch("saver"));
        ranks_run(failing ? 3 : 1, save_full);
    }
}

// Begins the checkpoint of step 10, in a folder that only rank 0 sees.
static const bool only_rank_0_sees[] = {true, false, false};
static void remote_begin(CheckpointWriter* w, const Rank* r, const World* world) {
    const TrainerState state = state_at(10);
    const CheckpointRecord record = record_of(&r->table, &state, NULL);
    CHECK_OK(checkpoint_writer_open(w, r->out, 10, &r->table, 4, &err));
    if (world->rank == 0) CHECK_OK(checkpoint_create(w, &record, &err));
}

// Rank 0 cannot write what the others send: it hears them to the end, and all are told.
static void save_unheard(World* world) {
    Rank r = rank_open(world, 1);
    const CheckpointPart part = {&r.table, &r.shard, &r.tensors, world};
    CheckpointWriter w;
    remote_begin(&w, &r, world);
    bool ok = true;
    if (world->rank == 0) {
        CHECK(remove(w.files[failing].path) == 0, "remove");
        ok = checkpoint_receive_shards(&w, only_rank_0_sees, world, true, &err);
        CHECK(!ok, "nothing failed");
        checkpoint_sweep(out);
    } else {
        ok = checkpoint_send_shard(&w, &part, true, &err);
        CHECK_OK(ok);
    }
    CHECK_FAILS("safetensors: cannot open", checkpoint_vote(world, ok, &err));
    checkpoint_writer_close(&w);
    rank_close(&r);
}

// A rank ends while it sends: rank 0 does not wait for it.
static void save_lost(World* world) {
    Rank r = rank_open(world, 1);
    const CheckpointPart part = {&r.table, &r.shard, &r.tensors, world};
    CheckpointWriter w;
    remote_begin(&w, &r, world);
    if (world->rank == 0) {
        CHECK_FAILS("the connection to rank 1 is lost",
                    checkpoint_receive_shards(&w, only_rank_0_sees, world, true, &err));
        checkpoint_sweep(out);
    } else if (world->rank == 1) {
        const CheckpointFrame frame = {0, 1000, 4096};
        CHECK(world_send(world, 0, &frame, sizeof frame) && world_send(world, 0, "half", 4), "send");
    } else {
        CHECK_OK(checkpoint_send_shard(&w, &part, true, &err));
    }
    checkpoint_writer_close(&w);
    rank_close(&r);
}

static void test_remote_failures(void) {
    strcpy(out, test_scratch("saver"));
    for (failing = 0; failing < 2; failing++) ranks_run(3, save_unheard);
    ranks_run(3, save_lost);
}

// Where a save is when OUT is moved away and another run begins in its place.
enum { BEFORE_START, BEFORE_WRITING, BEFORE_FINISH, MOMENTS };
static int moment;

// The files of the other run: a checkpoint, one in the making, one that it removes. Each has a file.
static const char* const others[] = {"step_00000005", ".tmp-step_00000020", ".tmp-step_00000001.old"};

// Rank 0 moves OUT away, with the run's lock, and makes another run's folder of its name.
static void displace(World* world) {
    bool ok = true;
    char path[PATH_LENGTH], moved[PATH_LENGTH + 8];
    world_barrier(world); // what the others did before, they did in OUT
    if (world->rank == 0) {
        int fd;
        snprintf(moved, sizeof moved, "%s.moved", out);
        ok = rename(out, moved) == 0 && out_lock(out, &fd, &err);
        for (size_t i = 0; ok && i < sizeof others / sizeof *others; i++) {
            strcpy(path, in_out("%s/model.safetensors", others[i]));
            FILE* f = make_folders(in_out("%s", others[i]), &err) ? fopen(path, "wb") : NULL;
            ok = f && fputs("of the other run", f) >= 0 && fclose(f) == 0;
        }
    }
    world_broadcast(world, &ok, sizeof ok);
    CHECK(ok, "cannot make another folder: %s", err.msg);
}

// All ranks fail with the reason, and nothing of the other run changes.
static void save_displaced(World* world) {
    const char* const lost = "is no longer the folder of this run";
    Rank r = rank_open(world, 1);
    Saver s;
    int lock = -1;
    if (world->rank == 0) CHECK_OK(out_lock(r.out, &lock, &err));
    CHECK_OK(saver_open(&s, world, &r.table, r.out, lock, 1, &err));
    CHECK_OK(start(&s, &r, 10));
    CHECK_OK(saver_finish(&s, NULL, &err));
    if (moment == BEFORE_START) {
        displace(world);
        CHECK_FAILS(lost, start(&s, &r, 20)); // on all ranks
    } else {                                  // as a rank's thread does, which may be late
        const CheckpointPart part = {&r.table, &r.shard, &r.tensors, world};
        CheckpointWriter w;
        CHECK_OK(checkpoint_writer_open(&w, r.out, 20, &r.table, 4, &err));
        w.lock = s.lock;
        CHECK((w.lock >= 0) == s.sees[world->rank], "the lock of rank %d", world->rank);
        if (moment == BEFORE_FINISH && world->rank == 0) {
            const TrainerState state = state_at(20);
            const CheckpointRecord record = record_of(&r.table, &state, NULL);
            CHECK_OK(checkpoint_create(&w, &record, &err));
        }
        displace(world);
        if (moment == BEFORE_WRITING && s.sees[world->rank])
            CHECK_FAILS(lost, checkpoint_write_shard(&w, &part, &err));
        if (moment == BEFORE_FINISH && world->rank == 0) CHECK_FAILS(lost, checkpoint_finish(&w, 1, &err));
        CHECK(!w.published, "published");
        checkpoint_writer_close(&w);
    }
    saver_close(&s);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        size_t bytes;
        char* text = read_file(in_out("%s/model.safetensors", others[i]), &bytes, &err);
        CHECK(text && strcmp(text, "of the other run") == 0, "%s: %s", others[i], text ? text : err.msg);
        free(text);
    }
    CHECK_LISTED("5");
    rank_close(&r);
}

static void test_displaced(void) {
    for (moment = 0; moment < MOMENTS; moment++) {
        for (unsigned i = 0; i < 3; i++) {
            blind = i == 2 ? 4 : 0; // rank 2 of three
            strcpy(out, in_out("%d.%u", moment, i));
            CHECK_OK(make_folders(in_out("elsewhere"), &err));
            ranks_run(i == 0 ? 1 : 3, save_displaced);
            strcpy(out, test_scratch("saver"));
        }
    }
    blind = 0;
}

// Rank 0 cannot make OUT: all ranks are told.
static void open_nowhere(World* world) {
    Rank r = rank_open(world, 1);
    Saver s;
    CHECK_FAILS("exists and is not a folder", saver_open(&s, world, &r.table, in_out("file"), -1, 1, &err));
    rank_close(&r);
}

static void test_nowhere(void) {
    FILE* f = fopen(in_out("file"), "wb");
    CHECK(f && fclose(f) == 0, "fopen");
    ranks_run(1, open_nowhere);
    ranks_run(3, open_nowhere);
}

// A process killed while it saves again and again, keeping one, leaves at least one whole checkpoint.
static void test_killed(void) {
    CHECK_OK(save_filled(1, 1));
    for (int round = 0; round < 10; round++) {
        int pipe_ends[2];
        pid_t child = test_fork(pipe_ends);
        if (child == 0) {
            World world;
            Saver s;
            memset(&world, 0, sizeof world);
            world.size = 1;
            Rank r = rank_open(&world, 1);
            if (!saver_open(&s, &world, &r.table, out, -1, 1, &err)) _exit(1);
            for (int64_t step = 2;; step++) {
                bool ok = start(&s, &r, step) && write(STDERR_FILENO, "x", 1) == 1;
                if (!ok || !saver_finish(&s, NULL, &err)) _exit(1);
            }
        }
        check_killed(child, pipe_ends, round);
    }
}

// ----------------------------------------------------------------------------
// loading

static int damage; // 0: the weights, 1: the moments, 2: their header

// All ranks fail with one message; the checkpoint before it loads.
static void load_damaged(World* world) {
    Rank r = rank_open(world, 1);
    CHECK(!holds(&r, 20, 1), "a damaged checkpoint loads");
    CHECK(strstr(err.msg,
                 damage == 0 ? "step_00000020/model.safetensors" : "step_00000020/optimizer.safetensors"),
          "%s", err.msg);
    CHECK_OK(holds(&r, 10, 1));
    rank_close(&r);
}

static void test_load_damaged(void) {
    for (damage = 0; damage < 3; damage++) {
        strcpy(out, test_scratch("saver"));
        Buffers b = filled_buffers(4, 1);
        CHECK_OK(save_by(3, 10, &b, 0));
        CHECK_OK(save_by(2, 20, &b, 0));
        free_buffers(&b);
        int fd = open(in_out("step_00000020/%s.safetensors", checkpoint_file_names[damage > 0]), O_WRONLY);
        CHECK(pwrite(fd, "x", 1, damage == 2 ? 100 : 50001) == 1 && close(fd) == 0, "pwrite");
        for (blind = 0; blind <= 6; blind += 2) ranks_run(3, load_damaged);
        ranks_run(1, load_damaged);
    }
    blind = 0;
}

// Weights alone, of --init, from a folder that only rank 0 sees; checksums do not matter to a folder without
// them.
static void load_init(World* world) {
    Rank r = rank_open(world, 7), expected = rank_open(world, 1);
    const CheckpointTensors t = {r.tensors.w, NULL, NULL, 4};
    const CheckpointPart part = {&r.table, &r.shard, &t, world};
    char folder[PATH_LENGTH];
    for (int64_t step = 10; step <= 30; step += 10) {
        checkpoint_path(folder, r.out, step);
        bool ok = checkpoint_load(folder, NULL, &part, &err);
        CHECK(ok == (step < 30), "%s", err.msg);
        if (!ok) CHECK(strstr(err.msg, "step_00000030: holds neither model.safetensors"), "%s", err.msg);
        CHECK(memcmp(t.w, expected.tensors.w, (size_t)shard_count(&r.shard) * 4) == 0, "step %d", (int)step);
    }
    rank_close(&r);
    rank_close(&expected);
}

static void test_load_init(void) {
    strcpy(out, test_scratch("saver"));
    Buffers b = filled_buffers(4, 1);
    CHECK_OK(save_by(3, 10, &b, 0));
    CHECK_OK(save_by(1, 20, &b, 0));
    CHECK(remove(in_out("step_00000020/trainer.json")) == 0, "remove");
    CHECK(remove(in_out("step_00000020/optimizer.safetensors")) == 0, "remove");
    free_buffers(&b);
    ranks_run(1, load_init);
    ranks_run(3, load_init);
    blind = 6;
    ranks_run(3, load_init);
    blind = 0;
}

int main(void) {
    static void (*const tests[])(void) = {test_save,      test_nan,     test_full_disk, test_remote_failures,
                                          test_displaced, test_nowhere, test_killed,    test_load_damaged,
                                          test_load_init};
    return run_checkpoint_tests(tests, sizeof tests / sizeof tests[0], "saver");
}
