/*
How much memory the CPU trainer may take. The kernel grants more than there is, and kills the process that
touches it. So the plan of a training is compared with what is left before anything is allocated, and a cache
of sequences, which is touched page by page as they grow, before it is opened.

Called by train_fox.c and llmc/inference/cpu/extend.h.
*/
#pragma once

#include "cgroup.h"

// The memory that one cgroup grants, bytes; 0: no limit, or there is no such cgroup.
static inline double memory_group_limit(const char* folder) {
    double limit = 0, unused;
    return cgroup_read(folder, "memory.max", &limit, &unused) >= 1 || // cgroup v2
                   cgroup_read(folder, "memory.limit_in_bytes", &limit, &unused) >= 1
               ? limit
               : 0;
}

// Bytes of the machine's memory, or of what cgroups grant, that this process does not hold yet. root: "", or
// the folder that stands for / in a test.
static inline double memory_left(const char* root) {
    const double page = (double)sysconf(_SC_PAGESIZE),
                 limit = cgroup_least(root, "memory", memory_group_limit);
    double left = page * (double)sysconf(_SC_PHYS_PAGES), size, resident = 0;
    char folder[PATH_LENGTH];
    path_join(folder, root, "proc/self");
    if (limit > 0 && limit < left) left = limit;
    if (cgroup_read(folder, "statm", &size, &resident) == 2) left -= page * resident;
    return left > 0 ? left : 0;
}

// Memory that is touched when it is used. NULL where there is none.
static inline void* allocate_if_any(size_t bytes) {
    void* p = NULL;
    return posix_memalign(&p, 64, bytes) == 0 ? p : NULL;
}
