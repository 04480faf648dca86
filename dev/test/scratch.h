// Files in the scratch folder of a test. main sets it: strcpy(scratch_folder, test_scratch("NAME")).
#pragma once

#include "check.h"

static char scratch_folder[PATH_LENGTH];

// The path of a file in the scratch folder; the last eight results are valid.
static inline const char* in_folder(const char* name) {
    static char paths[8][PATH_LENGTH];
    static int next;
    char* path = paths[next++ % 8];
    path_join(path, scratch_folder, name);
    return path;
}

static inline void write_bytes(const char* path, const void* bytes, size_t n) {
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0)
        die("%s: cannot write: %s", path, strerror(errno));
}

static inline bool exists(const char* path) { return access(path, F_OK) == 0; }
