/*
Where longcrawl64.c reads its Zarr array: a local folder with heldout.zarr and train.zarr, or a server that
has the same, whose files come through a cache. The chunks of a server are downloaded by fetch.h. A file in
the cache has its name only when it is complete.

Every file is compared with its SHA-256 in a list, where there is one.
*/
#pragma once

#include "../llmc/base/common.h"
#include "download.h"
#include "verify.h"
#include "zarr.h"

// ----------------------------------------------------------------------------
// files of an array, which is in the cache or local

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
    cache_lock_name(path, folder);
    int fd = lock_file(path);
    if (fd < 0 && errno != EWOULDBLOCK) return fail(err, "%s: cannot lock: %s", path, strerror(errno));
    if (fd >= 0 && file_is_at(fd, path)) return true; // the process that held it may have removed it
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

// Deletes the cache's .zarray and lock, and its folders, but for folders with other files.
static inline void cache_remove(const char* folder) {
    char path[PATH_LENGTH];
    join_name(path, folder, ".zarray");
    unlink(path);
    cache_lock_name(path, folder);
    unlink(path);
    if (rmdir(folder) != 0) return;
    strcpy(path, folder);
    *strrchr(path, '/') = '\0';
    rmdir(path);
}

// ----------------------------------------------------------------------------
// the source

enum {
    ZARRAY_MAX = 65536, // bytes; a .zarray has a few hundred
    SUMS_MAX = 64 << 20 // bytes; all of LongCrawl64 takes 9 MB
};
static const char SUMS_NAME[] = "SHA256SUMS";

typedef struct {
    // set by the caller
    const char *base, *split; // --source, a folder or a URL; heldout or train
    const char* cache;        // folder with the layout of a source
    const char* list;         // of SHA-256; NULL: the source's, if it has one
    int tries, timeout;       // of a download
    Stop stop;

    bool remote;
    char name[32];            // heldout.zarr or train.zarr
    char url[PATH_LENGTH];    // of heldout.zarr or train.zarr, if remote
    char folder[PATH_LENGTH]; // local: in the source or the cache
    ZarrArray array;
    Sums sums;          // empty: no list
    int64_t unverified; // chunks read without a known SHA-256
} Source;

// The zarr library would read a missing chunk as zeros; here it is an error.
static inline bool fail_missing(const char* chunk, Error* err) {
    return fail(err, "%s: this chunk is missing; lower --tokens or complete the source", chunk);
}

static inline void count_unverified(Source* s) {
    pthread_mutex_lock(&s->stop.mutex);
    s->unverified++;
    pthread_mutex_unlock(&s->stop.mutex);
}

static inline bool check_zarray(const void* data, size_t bytes, void* context, Error* err) {
    ZarrArray ignored;
    (void)context;
    return zarr_parse(&ignored, "its content", (const char*)data, bytes, err);
}

// Downloads .zarray to the cache. A different one in the cache is an error: its chunks are of another array.
static inline bool download_zarray(Source* s, Error* err) {
    char url[PATH_LENGTH], path[PATH_LENGTH];
    Downloader d;
    join_name(url, s->url, ".zarray");
    join_name(path, s->folder, ".zarray");
    if (!make_folders(s->folder, err) || !cache_lock(s->folder, err)) return false;
    downloader_init(&d, &s->stop, s->tries, s->timeout);
    bool ok = download(&d, url, ZARRAY_MAX, check_zarray, NULL, err);
    const bool cached_before = access(path, F_OK) == 0;
    if (!ok && !cached_before) cache_remove(s->folder);
    if (ok && cached_before) {
        size_t bytes;
        char* cached = read_file(path, &bytes, err);
        ok = cached != NULL;
        if (ok && (bytes != d.bytes || memcmp(cached, d.data, bytes) != 0))
            ok =
                fail(err, "%s: differs from %s; remove this cache or choose another with --cache", path, url);
        free(cached);
    } else if (ok) {
        ok = cache_write(path, d.data, d.bytes, err);
    }
    downloader_free(&d);
    return ok;
}

// Loads the list of SHA-256, from the option or from the source, if it has one.
static inline bool load_sums(Source* s, Error* err) {
    char path[PATH_LENGTH];
    char* text;
    size_t bytes;
    join_name(path, s->base, SUMS_NAME);
    if (!s->list && s->remote) {
        Downloader d;
        downloader_init(&d, &s->stop, s->tries, s->timeout);
        bool ok = download(&d, path, SUMS_MAX, NULL, NULL, err);
        const bool none = !ok && d.status == 404;
        text = ok ? strndup(d.data ? d.data : "", d.bytes) : NULL;
        downloader_free(&d);
        if (!text) return none;
    } else {
        if (!s->list && access(path, F_OK) != 0) return true;
        text = read_file(s->list ? s->list : path, &bytes, err);
        if (!text) return false;
    }
    s->sums.complete = s->list != NULL;
    return sums_parse(&s->sums, s->list ? s->list : path, text, err);
}

// Names the array. Asks no server.
static inline bool source_locate(Source* s, Error* err) {
    snprintf(s->name, sizeof s->name, "%s.zarr", s->split);
    s->remote = strstr(s->base, "://") != NULL;
    if (s->remote && strncmp(s->base, "https://", 8) != 0 && strncmp(s->base, "http://", 7) != 0)
        return fail(err, "--source %s: must be a folder or start with https:// or http://", s->base);
    if (s->remote) join_name(s->url, s->base, s->name);
    join_name(s->folder, s->remote ? s->cache : s->base, s->name);
    return true;
}

// Parses the .zarray of the array that source_locate has named, and loads the list of SHA-256.
static inline bool source_open(Source* s, Error* err) {
    char path[PATH_LENGTH];
    size_t bytes;
    if (s->remote && !download_zarray(s, err)) return false;
    join_name(path, s->folder, ".zarray");
    char* text = read_file(path, &bytes, err);
    bool ok = text && zarr_parse(&s->array, path, text, bytes, err) && load_sums(s, err), known;
    Error why;
    if (ok && s->sums.count && !sums_check(&s->sums, s->name, ".zarray", text, bytes, &known, &why))
        ok = fail(err, "%s: %s", path, why.msg);
    free(text);
    return ok;
}
