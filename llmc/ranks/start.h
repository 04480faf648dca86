/*
How this process was started: alone, or as one rank of many by mpirun, torchrun or srun. Nothing is connected.

    mpirun     OMPI_COMM_WORLD_SIZE > 1; needs USE_MPI       rank 0's address comes over MPI (mpirun.h)
    torchrun   RANK, WORLD_SIZE > 1, LOCAL_RANK,             rank 0 listens on MASTER_PORT + 1, for torchrun's
               LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT    agent listens on MASTER_PORT
    srun       SLURM_PROCID, SLURM_STEP_NUM_TASKS > 1, ...   rank 0 is on the first host of the step, or where
                                                             srun runs; the job's number gives its port

SLURM_NTASKS is not read: it is also set in the shell of a batch script, where a plain start is alone.
*/
#pragma once

#include "../base/text.h"
#include "link.h"

typedef struct {
    int rank, size, local_rank, local_size;
    bool mpi;            // by mpirun
    const char* unbound; // how the launcher is told not to bind ranks to cores
    LinkAddress address; // of rank 0; count 0 with MPI
} Start;

// Reads a whole number from the environment.
static inline bool start_number(const char* name, long low, long high, int* value, Error* err) {
    const char* text = getenv(name);
    char* end = NULL;
    if (!text)
        return fail(err,
                    "%s is not set, but other variables say that this is one rank of several; set it, or "
                    "unset WORLD_SIZE and RANK for one process alone",
                    name);
    errno = 0;
    long number = strtol(text, &end, 10);
    if (end == text || *end || errno != 0 || *text == ' ' || number < low || number > high)
        return fail(err, "%s is '%.64s', not a whole number from %ld to %ld; the launcher sets it", name,
                    text, low, high);
    *value = (int)number;
    return true;
}

// Adds text to a token.
static inline void start_hash(uint64_t* token, const char* text) {
    *token = fnv1a(fnv1a(*token, text ? text : ""), "\xff"); // which ends the text
}

// Adds a host name or address.
static inline bool start_add_name(LinkAddress* a, const char* variable, const char* name, size_t length,
                                  Error* err) {
    if (length == 0 || length >= sizeof a->names[0])
        return fail(err, "%s is '%.64s', not a host name or address", variable, name);
    memcpy(a->names[a->count], name, length);
    a->names[a->count++][length] = '\0';
    return true;
}

// Reads torchrun's variables. rank stays 0 until the variables that differ between ranks are read: errors in
// these are printed by every rank.
static inline bool start_torchrun(Start* s, Error* err) {
    int rank = 0, port = 0;
    const char* host = getenv("MASTER_ADDR");
    if (!start_number("WORLD_SIZE", 1, INT32_MAX, &s->size, err) ||
        !start_number("RANK", 0, s->size - 1, &rank, err) ||
        !start_number("LOCAL_WORLD_SIZE", 1, s->size, &s->local_size, err) ||
        !start_number("LOCAL_RANK", 0, s->local_size - 1, &s->local_rank, err))
        return false;
    s->rank = rank;
    if (!start_number("MASTER_PORT", 1, 65534, &port, err)) return false;
    if (!host) return fail(err, "MASTER_ADDR is not set; set it to the host of rank 0");
    s->address.port = port + 1;
    s->unbound = "do not start it under taskset or numactl";
    start_hash(&s->address.token, getenv("TORCHELASTIC_RUN_ID"));
    start_hash(&s->address.token, getenv("MASTER_PORT"));
    return start_add_name(&s->address, "MASTER_ADDR", host, strlen(host), err);
}

// The entry of node `node` in Slurm's list of tasks per node, such as 2(x3),1. 0: the list is malformed.
static inline int start_slurm_tasks(const char* list, int node) {
    while (list && *list) {
        char* end;
        long tasks = strtol(list, &end, 10), repeat = 1;
        if (end == list || tasks < 1) return 0;
        if (end[0] == '(' && end[1] == 'x') repeat = strtol(end + 2, &end, 10), end += *end == ')';
        if (node < repeat) return (int)tasks;
        if (repeat < 1 || *end != ',') return 0;
        node -= (int)repeat;
        list = end + 1;
    }
    return 0;
}

// Writes the first host of a list such as gpu-[07-09,12],login or a,b to name. Returns its length; 0: too
// long.
static inline size_t start_slurm_first(const char* list, char name[256]) {
    size_t plain = strcspn(list, ",["), digits = list[plain] == '[' ? strcspn(list + plain + 1, ",-]") : 0;
    if (plain + digits > 255) return 0;
    memcpy(name, list, plain);
    if (digits > 0) memcpy(name + plain, list + plain + 1, digits);
    name[plain + digits] = '\0';
    return plain + digits;
}

// Reads the variables that srun sets in a step's tasks; errors as in start_torchrun.
static inline bool start_slurm(Start* s, Error* err) {
    int rank = 0, node = 0, step = 0, job = 0;
    const char *launcher = getenv("SLURM_LAUNCH_NODE_IPADDR"), *hosts = getenv("SLURM_STEP_NODELIST");
    char first[256];
    if (!start_number("SLURM_STEP_NUM_TASKS", 1, INT32_MAX, &s->size, err) ||
        !start_number("SLURM_PROCID", 0, s->size - 1, &rank, err) ||
        !start_number("SLURM_NODEID", 0, INT32_MAX, &node, err))
        return false;
    s->local_size = start_slurm_tasks(getenv("SLURM_STEP_TASKS_PER_NODE"), node);
    if (s->local_size == 0)
        return fail(err, "SLURM_STEP_TASKS_PER_NODE is missing or malformed; srun sets it");
    if (!start_number("SLURM_LOCALID", 0, s->local_size - 1, &s->local_rank, err)) return false;
    s->rank = rank;
    if (!start_number("SLURM_JOB_ID", 0, INT32_MAX, &job, err) ||
        !start_number("SLURM_STEP_ID", 0, INT32_MAX, &step, err))
        return false;
    s->address.port =
        20000 + (job % 12000 * 7 + step % 12000) % 12000; // below the ports of outgoing connections
    s->unbound = "start srun with --cpu-bind=none, or give each task more with --cpus-per-task";
    start_hash(&s->address.token, getenv("SLURM_JOB_ID"));
    start_hash(&s->address.token, getenv("SLURM_STEP_ID"));
    if (hosts &&
        !start_add_name(&s->address, "SLURM_STEP_NODELIST", first, start_slurm_first(hosts, first), err))
        return false;
    if (launcher && !start_add_name(&s->address, "SLURM_LAUNCH_NODE_IPADDR", launcher, strlen(launcher), err))
        return false;
    return s->address.count > 0
               ? true
               : fail(err, "neither SLURM_STEP_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is set");
}

// Reads the variables that Open MPI's mpirun sets. Fails in a build without MPI: every process would train
// alone.
static inline bool start_mpirun(Start* s, Error* err) {
    int rank = 0;
    if (!start_number("OMPI_COMM_WORLD_SIZE", 1, INT32_MAX, &s->size, err) ||
        !start_number("OMPI_COMM_WORLD_RANK", 0, s->size - 1, &rank, err))
        return false;
    s->rank = rank;
#ifdef USE_MPI
    s->mpi = true;
    s->unbound = "start mpirun with --bind-to none";
    return start_number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, s->size, &s->local_size, err) &&
           start_number("OMPI_COMM_WORLD_LOCAL_RANK", 0, s->local_size - 1, &s->local_rank, err);
#else
    return fail(err,
                "started as rank %d of %d by mpirun, but this build has no MPI: install OpenMPI's headers "
                "and rebuild "
                "(USE_MPI=1)",
                s->rank, s->size);
#endif
}

// Finds out how this process was started, and its rank. Alone: rank 0 of 1, and nothing has been touched. On
// error rank is 0 where it is not known, so that a message is printed.
static inline bool start_identify(Start* s, Error* err) {
    const char *mpirun = getenv("OMPI_COMM_WORLD_SIZE"), *size = getenv("WORLD_SIZE"),
               *tasks = getenv("SLURM_STEP_NUM_TASKS");
    memset(s, 0, sizeof *s);
    s->size = s->local_size = 1;
    s->address.token = FNV1A_BASIS;
    if (mpirun && strcmp(mpirun, "1") != 0) return start_mpirun(s, err);
    if (size && strcmp(size, "1") != 0) return start_torchrun(s, err);
    if (getenv("SLURM_PROCID") && tasks && strcmp(tasks, "1") != 0) return start_slurm(s, err);
    return true;
}
