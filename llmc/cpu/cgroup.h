/*
Limits of this process's cgroups, and of those above them, in versions 1 and 2.

In a container the folders of its own cgroup can be missing, and the topmost one has its limit. Called by
threads.h and memory.h, whose tests have a folder in place of /.
*/
#pragma once

#include "../base/common.h"

// Reads the first numbers of a cgroup's file; returns how many there are, at most 2; 0 or less where there is
// no such file.
static inline int cgroup_read(const char* folder, const char* name, double* first, double* second) {
    char path[PATH_LENGTH];
    const bool fits = snprintf(path, sizeof path, "%s/%s", folder, name) < PATH_LENGTH;
    FILE* f = fits ? fopen(path, "r") : NULL;
    int count = f ? fscanf(f, "%lf %lf", first, second) : 0; // "max" is no number
    if (f) fclose(f);
    return count;
}

// Is a controller one of those in a list such as cpu,cpuacct?
static inline bool cgroup_lists(const char* controllers, const char* controller) {
    for (const char* name = controllers;; name++) {
        size_t n = strcspn(name, ",");
        if (n == strlen(controller) && strncmp(name, controller, n) == 0) return true;
        name += n;
        if (*name == '\0') return false;
    }
}

// The smallest limit of a controller; 0: there is none. of_group returns that of the cgroup with this folder;
// 0: it has none, or there is no such cgroup.
static inline double cgroup_least(const char* root, const char* controller,
                                  double (*of_group)(const char* folder)) {
    char path[PATH_LENGTH], line[PATH_LENGTH], folder[PATH_LENGTH];
    double least = 0;
    path_join(path, root, "proc/self/cgroup");
    FILE* f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) { // NUMBER:CONTROLLERS:PATH, without controllers in cgroup v2
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        bool v2 = controllers[1] == '\0';
        if (!v2 && !cgroup_lists(controllers + 1, controller)) continue;
        for (char* end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = '\0';
            int n = snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s%s%s", root, v2 ? "" : "/",
                             v2 ? "" : controller, group);
            double limit = n < PATH_LENGTH ? of_group(folder) : 0;
            if (limit > 0 && (least == 0 || limit < least)) least = limit;
        }
    }
    if (f) fclose(f);
    return least;
}
