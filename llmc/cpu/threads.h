/*
The threads of the CPU trainer: how many there are, and how they wait for one another. Called by its main.

**Waiting.** A step has hundreds of parallel regions, each as long as its slowest thread takes. libgomp's
threads spin for some 10 ms before they sleep. Where another program runs on the cores, they spin in the time
of the very thread that they wait for, and a step takes up to 60 times as long. To sleep at once
(OMP_WAIT_POLICY=passive) makes a step of a small model a third slower on idle cores, as a thread takes longer
to wake than a region to run. A spin of half a millisecond is as good as the better of both (dev/SPEED.md).
libgomp reads its length as it is loaded, so the program starts itself once more with it in the environment.

**Number.** OpenMP takes a thread for every core that the process may run on, and knows nothing of the CPU
quota of a container: the threads of a process that has used its quota stand still until the next period.
*/
#pragma once

#include <math.h>
#include <omp.h>
#include "../base/common.h"

#define THREADS_SPIN_COUNT "10000" // of libgomp's spin loop, about 0.5 ms

// Reads the first numbers of a cgroup's file; returns how many there are, at most 2.
static inline int threads_read_limit(const char* folder, const char* name, double* first, double* second) {
    char path[PATH_LENGTH];
    path_join(path, folder, name);
    FILE* f = fopen(path, "r");
    int count = f ? fscanf(f, "%lf %lf", first, second) : 0; // "max" is no number
    if (f) fclose(f);
    return count;
}

// The cores that one cgroup grants; 0: it has no quota, or there is no such cgroup.
static inline double threads_group_quota(const char* folder) {
    double quota = 0, period = 0, unused;
    if (threads_read_limit(folder, "cpu.max", &quota, &period) == 2 || // cgroup v2
        (threads_read_limit(folder, "cpu.cfs_quota_us", &quota, &unused) == 1 &&
         threads_read_limit(folder, "cpu.cfs_period_us", &period, &unused) == 1))
        return quota > 0 && period > 0 ? quota / period : 0;
    return 0;
}

// Is "cpu" one of the controllers in a list such as cpu,cpuacct?
static inline bool threads_is_cpu_group(const char* controllers) {
    for (const char* name = controllers;; name++) {
        size_t n = strcspn(name, ",");
        if (n == 3 && strncmp(name, "cpu", 3) == 0) return true;
        name += n;
        if (*name == '\0') return false;
    }
}

// The smallest quota, in cores, of this process's cgroups and those above them; 0: there is none. In a
// container the folders of its own cgroup can be missing, and the topmost one has its quota. root: "", or the
// folder that stands for / in a test.
static inline double threads_quota(const char* root) {
    char path[PATH_LENGTH], line[PATH_LENGTH], folder[PATH_LENGTH];
    double cores = 0;
    path_join(path, root, "proc/self/cgroup");
    FILE* f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) { // NUMBER:CONTROLLERS:PATH, without controllers in cgroup v2
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        bool v2 = controllers[1] == '\0';
        if (!v2 && !threads_is_cpu_group(controllers + 1)) continue;
        for (char* end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = '\0';
            int n = snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s%s", root, v2 ? "" : "/cpu", group);
            double quota = n < PATH_LENGTH ? threads_group_quota(folder) : 0;
            if (quota > 0 && (cores == 0 || quota < cores)) cores = quota;
        }
    }
    if (f) fclose(f);
    return cores;
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
    if (!getenv("OMP_NUM_THREADS"))
        omp_set_num_threads(threads_choose(omp_get_num_procs(), threads_quota("")));
}
