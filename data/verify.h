/*
SHA-256 of downloaded files, lists of them, and files that are the same; called by data/longcrawl64.c and
download.h.

A list has the format of sha256sum: a line `HASH  NAME` for each file, the name relative to the folder of the
array, for example `train.zarr/0.0`. Empty lines and lines that start with # are skipped.
*/
#pragma once

#include <openssl/evp.h>
#include <strings.h>

#include "../llmc/base/checksum.h"
#include "../llmc/base/common.h"

enum { SHA256_HEX = 64 };

// Compares the SHA-256 of data[bytes] with hex[64], of which `whose` is the source.
static inline bool sha256_check(const void* data, size_t bytes, const char* hex, const char* whose,
                                Error* err) {
    unsigned char hash[EVP_MAX_MD_SIZE];
    char own[SHA256_HEX + 1];
    if (!EVP_Digest(data, bytes, hash, NULL, EVP_sha256(), NULL))
        return fail(err, "cannot compute its SHA-256");
    for (int i = 0; i < SHA256_HEX / 2; i++) snprintf(own + 2 * i, 3, "%02x", hash[i]);
    if (strncasecmp(own, hex, SHA256_HEX) == 0) return true;
    return fail(err, "received data has SHA-256 %s, %s %.64s", own, whose, hex);
}

typedef struct {
    const char *hex, *name;
} Sum;

// Initialize to zeros, release with sums_free.
typedef struct {
    char* text;
    Sum* sums; // [count], sorted by name
    size_t count, capacity;
    bool complete; // a file that is not in the list is an error
} Sums;

static inline void sums_free(Sums* s) {
    free(s->text);
    free(s->sums);
    memset(s, 0, sizeof *s);
}

static inline int sum_compare(const void* a, const void* b) {
    return strcmp(((const Sum*)a)->name, ((const Sum*)b)->name);
}

// Parses a list, with a zero at its end, of which it becomes the owner, on error too. `source` names it in
// the error.
static inline bool sums_parse(Sums* s, const char* source, char* text, Error* err) {
    char* rest = s->text = text;
    int64_t number = 0;
    for (char* line; (line = strsep(&rest, "\n"));) {
        const size_t n = strlen(line);
        number++;
        if (n > 0 && line[n - 1] == '\r') line[n - 1] = '\0';
        if (*line == '\0' || *line == '#') continue;
        const bool hex = strspn(line, "0123456789abcdefABCDEF") == SHA256_HEX;
        if (!hex || line[SHA256_HEX] != ' ' || !strchr(" *", line[SHA256_HEX + 1]) || n < SHA256_HEX + 3)
            return fail(err, "%s: line %lld is not a SHA-256 and a name, as sha256sum prints them", source,
                        (long long)number);
        const char* name = line + SHA256_HEX + 2;
        Sum sum = {line, strncmp(name, "./", 2) == 0 ? name + 2 : name};
        s->sums = (Sum*)xgrow(s->sums, s->count, &s->capacity, sizeof *s->sums);
        s->sums[s->count++] = sum;
    }
    if (s->count == 0) return fail(err, "%s: lists no file", source);
    qsort(s->sums, s->count, sizeof *s->sums, sum_compare);
    return true;
}

// The 64 digits of a file's SHA-256; NULL if it is not in the list.
static inline const char* sums_find(const Sums* s, const char* name) {
    const Sum wanted = {NULL, name};
    const Sum* found =
        s->count ? (const Sum*)bsearch(&wanted, s->sums, s->count, sizeof *s->sums, sum_compare) : NULL;
    return found ? found->hex : NULL;
}

// Compares data[bytes], the file `name` of `folder`, with its SHA-256 in the list. *known is false if it has
// none.
static inline bool sums_check(const Sums* s, const char* folder, const char* name, const void* data,
                              size_t bytes, bool* known, Error* err) {
    char full[PATH_LENGTH];
    path_join(full, folder, name);
    const char* hex = sums_find(s, full);
    *known = hex != NULL;
    if (hex) return sha256_check(data, bytes, hex, "the list has", err);
    return s->complete ? fail(err, "the list of SHA-256 does not have %s", full) : true;
}

// ----------------------------------------------------------------------------
// files with the same bytes

typedef struct {
    uint64_t hash;
    char name[32];
} SeenFile;

// Initialize to zeros, release with seen_free.
typedef struct {
    SeenFile* files;
    size_t count, capacity;
} Seen;

static inline void seen_free(Seen* s) { free(s->files); }

// The name of an earlier file with the same bytes; otherwise NULL, and the file is added. A name has at most
// 31 characters.
static inline const char* seen_before(Seen* s, const char* name, const void* data, size_t bytes) {
    const uint64_t hash = hash64(0, data, bytes);
    for (size_t i = 0; i < s->count; i++)
        if (s->files[i].hash == hash) return s->files[i].name;
    s->files = (SeenFile*)xgrow(s->files, s->count, &s->capacity, sizeof *s->files);
    s->files[s->count].hash = hash;
    snprintf(s->files[s->count++].name, sizeof s->files->name, "%s", name);
    return NULL;
}
