/*
Tests of llmc/cpu/threads.h and memory.h: the CPU quota and the memory limit of cgroups of both versions, the
number of threads that follows from the one and the memory that is left from the other; of core_time.h: when
busy cores are told of. A scratch folder stands for the root of the file system.
*/
#include "../../../llmc/cpu/core_time.h"
#include "../../../llmc/cpu/memory.h"
#include "../../../llmc/cpu/threads.h"
#include "../check.h"

static const char* root;

// Writes a file below the root, and the folders that it is in.
static void put(const char* name, const char* text) {
    char path[PATH_LENGTH], folder[PATH_LENGTH];
    Error err;
    path_join(path, root, name);
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
    if (!make_folders(folder, &err)) die("%s", err.msg);
    FILE* f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) die("%s: cannot write", path);
}

static void test_version_2(void) {
    root = test_scratch("threads");
    CHECK(threads_quota(root) == 0, "no /proc");
    put("proc/self/cgroup", "0::/a/b\n");
    CHECK(threads_quota(root) == 0, "no cgroup");
    put("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    CHECK(threads_quota(root) == 0, "no quota");
    put("sys/fs/cgroup/a/b/cpu.max", "150000 100000\n");
    CHECK(threads_quota(root) == 1.5, "a quota");
    put("sys/fs/cgroup/a/cpu.max", "50000 100000\n");
    CHECK(threads_quota(root) == 0.5, "a smaller one above it");
    put("sys/fs/cgroup/a/cpu.max", "400000 100000\n");
    CHECK(threads_quota(root) == 1.5, "a larger one above it");
    put("sys/fs/cgroup/a/b/cpu.max", "");
    CHECK(threads_quota(root) == 4, "an empty file");
    put("sys/fs/cgroup/a/cpu.max", "-1 0\n");
    CHECK(threads_quota(root) == 0, "no time at all");
}

// A container sees the quota at the top, and can have a path from outside.
static void test_container(void) {
    root = test_scratch("threads");
    put("sys/fs/cgroup/cpu.max", "200000 100000\n");
    put("proc/self/cgroup", "0::/\n");
    CHECK(threads_quota(root) == 2, "its own path");
    put("proc/self/cgroup", "0::/system.slice/docker-0123.scope\n");
    CHECK(threads_quota(root) == 2, "a path from outside");
    put("proc/self/cgroup", "0::/../x\nnonsense\n1:\n\n");
    CHECK(threads_quota(root) == 2, "other lines");
    char text[PATH_LENGTH]; // of a cgroup whose folder has the longest path, longer with the name of a file
    const int length = (int)(PATH_LENGTH - 2 - strlen(root) - strlen("/sys/fs/cgroup"));
    snprintf(text, sizeof text, "0::/%0*d\n", length, 0);
    put("proc/self/cgroup", text);
    CHECK(threads_quota(root) == 2, "the longest path");
}

static void test_version_1(void) {
    root = test_scratch("threads");
    put("proc/self/cgroup", "9:cpuset:/x\n4:cpuacct,cpu:/docker/1\n0::/\n");
    put("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "1000\n");
    put("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n");
    CHECK(threads_quota(root) == 0, "of another controller");
    put("sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "100000\n");
    CHECK(threads_quota(root) == 0, "no quota");
    put("sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "250000\n");
    CHECK(threads_quota(root) == 2.5, "a quota");
    put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n");
    put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(threads_quota(root) == 1, "at the top");
}

static void test_number(void) {
    CHECK(threads_choose(64, 0) == 64, "no quota");
    CHECK(threads_choose(64, 2) == 2, "two cores");
    CHECK(threads_choose(64, 2.5) == 3, "two and a half");
    CHECK(threads_choose(64, 0.05) == 1, "a part of one");
    CHECK(threads_choose(2, 2) == 2 && threads_choose(2, 1.5) == 2 && threads_choose(2, 500) == 2,
          "few cores");
}

static void test_memory(void) {
    const double page = (double)sysconf(_SC_PAGESIZE), machine = page * (double)sysconf(_SC_PHYS_PAGES);
    root = test_scratch("threads");
    CHECK(memory_left(root) == machine, "no limit");
    put("proc/self/cgroup", "7:memory:/docker/1\n0::/a\n");
    put("sys/fs/cgroup/a/memory.max", "max\n");
    CHECK(memory_left(root) == machine, "max");
    put("sys/fs/cgroup/a/memory.max", "8388608\n");
    CHECK(memory_left(root) == 8388608, "a limit");
    put("sys/fs/cgroup/memory.max", "4194304\n");
    CHECK(memory_left(root) == 4194304, "a smaller one above it");
    put("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "1048576\n");
    CHECK(memory_left(root) == 1048576, "of version 1");
    put("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "9223372036854771712\n");
    CHECK(memory_left(root) == 4194304, "none in version 1");
    put("proc/self/statm", "500 2 1 1 0 9 0\n");
    CHECK(memory_left(root) == 4194304 - 2 * page, "less what the process holds");
    put("proc/self/statm", "5000000 4000000 1 1 0 9 0\n");
    CHECK(memory_left(root) == 0, "nothing is left");
}

// Steps of `clock` seconds in which the threads ran for `cpu` seconds, until one tells of busy cores; at most
// 100. Returns how many there were; 100: none did.
static int steps_until_told(CoreWatch* w, double clock, double cpu, int threads, double* share) {
    for (int i = 1; i <= 100; i++) {
        const CoreTime begin = {1000, 10}, end = {1000 + clock / 2, 10 + cpu / 2};
        core_watch_add(w, begin, end);
        core_watch_add(w, begin, end);
        if (core_watch_step(w, threads, share)) return i;
    }
    return 100;
}

static void test_busy_cores(void) {
    double share = 0;
    CoreWatch w = {0};
    CHECK(steps_until_told(&w, 10, 19, 2, &share) == 100, "idle cores");
    CHECK(steps_until_told(&w, 10, 12, 2, &share) == 100, "a little busy");
    CHECK(steps_until_told(&w, 10, 5, 2, &share) < 10 && share > 0.2 && share < 0.4, "busy later: %g", share);
    CHECK(steps_until_told(&w, 10, 5, 2, &share) == 100, "is told once");

    w = (CoreWatch){0};
    CHECK(steps_until_told(&w, 10, 2.5, 2, &share) == 1 + CORE_WATCH_STEPS, "the first step does not count");
    CHECK(fabs(share - 0.125) < 1e-9, "an eighth, and not %g", share);
    w = (CoreWatch){0};
    CHECK(steps_until_told(&w, 10, 2.5, 1, &share) == 1 + CORE_WATCH_STEPS, "one thread");
    w = (CoreWatch){0};
    CHECK(steps_until_told(&w, 10, 6, 1, &share) == 100, "one thread on half a core");
    w = (CoreWatch){0};
    CHECK(steps_until_told(&w, 0.125, 0.0625 / 2, 1, &share) == 1 + 40, "short steps: five seconds of them");

    // one long pause, as after Ctrl-Z, is no busy core
    w = (CoreWatch){0};
    for (int i = 0; i < 1000; i++) {
        const CoreTime begin = {0, 0}, end = {i == 20 ? 1e6 : 1, 2};
        core_watch_add(&w, begin, end);
        CHECK(!core_watch_step(&w, 2, &share), "a pause");
    }

    const CoreTime begin = core_time_now();
    CoreTime now = begin;
    while (now.cpu <= begin.cpu) now = core_time_now();
    CHECK(now.clock > begin.clock, "both times advance");
}

int main(void) {
    test_version_2();
    test_container();
    test_version_1();
    test_number();
    test_memory();
    test_busy_cores();
    return test_report();
}
