/*
Test of how a process finds its rank (llmc/ranks/start.h): alone, and by the variables of torchrun, srun and
mpirun.
*/
#include <dirent.h>
#include "../../../llmc/ranks/world.h"
#include "../check.h"
#include "variables.h"

static int count_entries(const char* path) {
    int n = 0;
    DIR* folder = opendir(path);
    if (!folder) return -1;
    while (readdir(folder)) n++;
    closedir(folder);
    return n;
}

static void test_alone(void) {
    int files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    clear_environment();
    setenv("WORLD_SIZE", "1", 1);
    setenv("SLURM_PROCID", "0", 1);
    setenv("SLURM_NTASKS", "8", 1);
    World* w = world_identify();
    world_connect(w, 10);
    int mine = 5, all = 0;
    double x = 0.5;
    char *text = NULL, hello[] = "hello", *same = hello;
    size_t bytes = 5;
    world_allgather(w, &all, &mine, sizeof mine);
    world_broadcast(w, &mine, sizeof mine);
    world_barrier(w);
    world_sum(w, &x, 1);
    world_broadcast_text(w, &same, &bytes);
    world_broadcast_text(w, &text, &bytes);
    watch_progress(w), watch_allow(w, 5);
    CHECK(w->rank == 0 && w->size == 1 && w->local_rank == 0 && w->local_size == 1 && !w->mpi, "not alone");
    CHECK(w->host[0], "no host name");
    CHECK(all == 5 && mine == 5 && x == 0.5 && !text && same == hello, "collectives of one rank change data");
    CHECK(!world_send(w, 1, &mine, 1) && !world_receive(w, 0, &mine, 1), "bulk data to nobody");
    CHECK(!message_hooks.may_print && !message_hooks.leave && !message_hooks.prefix[0],
          "hooks of one process");
    CHECK(count_entries("/proc/self/fd") == files && count_entries("/proc/self/task") == threads,
          "one process has opened files or started threads");
    world_close(w);
    unsetenv("SLURM_NTASKS");
}

// Identifies with one variable changed; NULL removes it.
static void identify_with(const char* name, const char* value) {
    set_torchrun(0, 4, 12345);
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
    world_identify();
}

static void test_variables(void) {
    CHECK_DIES("RANK is 'x', not a whole number from 0 to 3", identify_with("RANK", "x"));
    CHECK_DIES("RANK is '4', not a whole number from 0 to 3", identify_with("RANK", "4"));
    CHECK_DIES("RANK is '-1'", identify_with("RANK", "-1"));
    CHECK_DIES("RANK is ''", identify_with("RANK", ""));
    CHECK_DIES("RANK is not set", identify_with("RANK", NULL));
    CHECK_DIES("WORLD_SIZE is '4 ranks'", identify_with("WORLD_SIZE", "4 ranks"));
    CHECK_DIES("WORLD_SIZE is '99999999999999999999'", identify_with("WORLD_SIZE", "99999999999999999999"));
    CHECK_DIES("LOCAL_RANK is '4'", identify_with("LOCAL_RANK", "4"));
    CHECK_DIES("LOCAL_WORLD_SIZE is not set", identify_with("LOCAL_WORLD_SIZE", NULL));
    CHECK_DIES("MASTER_PORT is '65535', not a whole number from 1 to 65534",
               identify_with("MASTER_PORT", "65535"));
    CHECK_DIES("MASTER_ADDR is not set", identify_with("MASTER_ADDR", NULL));
    CHECK_DIES("MASTER_ADDR is ''", identify_with("MASTER_ADDR", ""));
#ifndef USE_MPI
    clear_environment();
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    CHECK_DIES("started as rank 0 of 4 by mpirun, but this build has no MPI", world_identify());
#endif
}

static void test_slurm(void) {
    char name[256];
    CHECK(start_slurm_tasks("2(x3),1", 0) == 2 && start_slurm_tasks("2(x3),1", 2) == 2, "first nodes");
    CHECK(start_slurm_tasks("2(x3),1", 3) == 1 && start_slurm_tasks("8", 0) == 8, "last nodes");
    CHECK(start_slurm_tasks("2(x3),1", 4) == 0 && start_slurm_tasks("", 0) == 0 &&
              start_slurm_tasks("x", 0) == 0 && start_slurm_tasks("2(x", 1) == 0 &&
              start_slurm_tasks(NULL, 0) == 0,
          "malformed lists");
    CHECK(start_slurm_first("gpu-[07-09,12],login", name) == 6 && strcmp(name, "gpu-07") == 0, "%s", name);
    CHECK(start_slurm_first("a-1,b", name) == 3 && strcmp(name, "a-1") == 0, "%s", name);
    CHECK(start_slurm_first("node", name) == 4 && strcmp(name, "node") == 0, "%s", name);

    int ends[2];
    pid_t child = test_fork(ends); // identifying changes a process
    if (child == 0) {
        clear_environment();
        set_number("SLURM_PROCID", 5), set_number("SLURM_STEP_NUM_TASKS", 7), set_number("SLURM_NODEID", 2);
        set_number("SLURM_LOCALID", 1), set_number("SLURM_JOB_ID", 4242), set_number("SLURM_STEP_ID", 3);
        setenv("SLURM_STEP_TASKS_PER_NODE", "2(x3),1", 1);
        setenv("SLURM_STEP_NODELIST", "n[1-4]", 1);
        setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9", 1);
        World* w = world_identify();
        bool good = w->rank == 5 && w->size == 7 && w->local_rank == 1 && w->local_size == 2 &&
                    w->address.count == 2 && strcmp(w->address.names[0], "n1") == 0 &&
                    strcmp(w->address.names[1], "10.0.0.9") == 0 && w->address.port >= 20000 &&
                    w->address.port < 32000;
        _exit(good ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    close(ends[0]);
    CHECK(status == 0, "rank 5 of a Slurm step: status %#x", (unsigned)status);
}

int main(void) {
    test_alone();
    test_variables();
    test_slurm();
    return test_report();
}
