/*
Files of a Zarr array in a folder, the cache or a local source; called by data/longcrawl64.c. A file in the
cache has its name only when it is complete.
*/
#pragma once

#include "../llmc/base/common.h"

// Writes "base/name" to out[PATH_LENGTH], with room for a suffix of 7 bytes; dies if it is too long.
static inline void join_name(char* out, const char* base, const char* name) {
    size_t n = strlen(base);
    while (n > 1 && base[n - 1] == '/') n--;
    int length = snprintf(out, PATH_LENGTH, "%.*s/%s", (int)n, base, name);
    if (length < 0 || length >= PATH_LENGTH - 8) die("%s: this path is too long", base); // 8: for ".part"
}

// Writes the path of chunk (row, column) in the folder or URL `base` to out[PATH_LENGTH].
static inline void chunk_name(char* out, const char* base, int64_t row, int64_t column) {
    char name[64];
    snprintf(name, sizeof name, "%lld.%lld", (long long)row, (long long)column);
    join_name(out, base, name);
}

// Writes the path of the lock of the array in `folder`, a path of join_name, to out[PATH_LENGTH].
static inline void cache_lock_name(char* out, const char* folder) { strcat(strcpy(out, folder), ".lock"); }

// Locks the cached array in `folder` against other processes until this one ends or removes the lock's file.
static inline bool cache_lock(const char* folder, Error* err) {
    char path[PATH_LENGTH];
    struct stat ours, there;
    cache_lock_name(path, folder);
    int fd = lock_file(path);
    if (fd < 0 && errno != EWOULDBLOCK) return fail(err, "%s: cannot lock: %s", path, strerror(errno));
    // the process that held it may have removed it
    if (fd >= 0 && fstat(fd, &ours) == 0 && stat(path, &there) == 0 && ours.st_ino == there.st_ino)
        return true;
    return fail(err, "%s: another process uses this cache; wait for it or choose another with --cache",
                folder);
}

// Writes a file under a temporary name, then renames it.
static inline bool cache_write(const char* path, const void* data, size_t bytes, Error* err) {
    char part[PATH_LENGTH];
    strcat(strcpy(part, path), ".part"); // join_name left room
    FILE* f = fopen(part, "wb");
    if (!f) return fail(err, "%s: cannot create: %s", part, strerror(errno));
    fwrite(data, 1, bytes, f); // close_and_rename reports errors
    return close_and_rename(f, part, path, err);
}

// Reads a file of at most max_bytes. Free with free(). NULL on error.
static inline char* cache_read(const char* path, size_t max_bytes, size_t* bytes, Error* err) {
    struct stat st;
    if (stat(path, &st) == 0 && (size_t)st.st_size > max_bytes) {
        fail(err, "%s: has %s, a chunk at most %zu", path, counted(st.st_size, "byte").text, max_bytes);
        return NULL;
    }
    return read_file(path, bytes, err);
}
