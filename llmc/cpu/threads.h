/*
The threads of the CPU trainer: how many there are, and how they wait for one another. Called by its main, and
by llmc/inference/cpu/extend.h before it takes memory.

**Waiting.** A step has hundreds of parallel regions, each as long as its slowest thread takes. libgomp's
threads spin for some 10 ms before they sleep. Where another program runs on the cores, they spin in the time
of the very thread that they wait for, and a step takes up to 60 times as long. To sleep at once
(OMP_WAIT_POLICY=passive) makes a step of a small model a third slower on idle cores, as a thread takes longer
to wake than a region to run. A spin of half a millisecond is as good as the better of both (dev/SPEED.md).
libgomp reads its length as it is loaded, so the program starts itself again with it in the environment.

**Number.** OpenMP takes a thread for every core that the process may run on, and knows nothing of the CPU
quota of a container: the threads of a process that has used its quota stand still until the next period.

**Memory.** They share one heap. One of its own for each takes 64 MiB of addresses, or under a limit of these
a page for every small block.
*/
#pragma once

#include <malloc.h>
#include <math.h>
#include <omp.h>
#include "cgroup.h"

#define THREADS_SPIN_COUNT "10000" // of libgomp's spin loop, about 0.5 ms

// The cores that one cgroup grants; 0: it has no quota, or there is no such cgroup.
static inline double threads_group_quota(const char* folder) {
    double quota = 0, period = 0, unused;
    if (cgroup_read(folder, "cpu.max", &quota, &period) == 2 || // cgroup v2
        (cgroup_read(folder, "cpu.cfs_quota_us", &quota, &unused) == 1 &&
         cgroup_read(folder, "cpu.cfs_period_us", &period, &unused) == 1))
        return quota > 0 && period > 0 ? quota / period : 0;
    return 0;
}

// The smallest quota, in cores; 0: there is none. root: "", or the folder that stands for / in a test.
static inline double threads_quota(const char* root) {
    return cgroup_least(root, "cpu", threads_group_quota);
}

// Threads for a process that may run on `cores` cores with a quota of `quota` cores, 0 being none. A part of
// a core gets a thread: all threads then stand still together for the rest of a period.
static inline int threads_choose(int cores, double quota) {
    return quota > 0 && quota < cores ? (int)ceil(quota) : cores;
}

// To be called before anything else in main. Starts the program again unless the environment says already how
// long threads spin, which it then does: so it starts again only once. Where that fails, as without /proc,
// threads spin as long as usual. Then sets the number of threads, unless OMP_NUM_THREADS does.
static inline void threads_start(char** argv) {
    if (!getenv("GOMP_SPINCOUNT") && !getenv("OMP_WAIT_POLICY") &&
        setenv("GOMP_SPINCOUNT", THREADS_SPIN_COUNT, 1) == 0)
        (void)execv("/proc/self/exe", argv);
    mallopt(M_ARENA_MAX, 1);
    if (!getenv("OMP_NUM_THREADS"))
        omp_set_num_threads(threads_choose(omp_get_num_procs(), threads_quota("")));
}

// Starts the threads of later parallel regions. Called before much memory is taken: each needs a stack.
static inline void threads_create(void) {
#pragma omp parallel // gcc removes an empty region
    {
#pragma omp barrier
    }
}
