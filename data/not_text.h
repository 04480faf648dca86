/*
Files that are not text: compressed, of another format, UTF-16, or with zero bytes. Called by
text_to_shards.c, which refuses them or leaves them out.
*/
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>
#include "../llmc/base/common.h"

// For the error message: the kind of file that starts with bytes[n] and is not text, or NULL.
static inline const char* other_kind(const char* bytes, size_t n) {
    static const struct {
        size_t at;
        const char *magic, *kind;
    } kinds[] = {
        {0, "\x1f\x8b", "compressed by gzip; decompress it (gunzip), or use scripts/make_shards.py"},
        {0, "\x28\xb5\x2f\xfd", "compressed by zstd; decompress it (unzstd), or use scripts/make_shards.py"},
        {1, "7zXZ", "compressed by xz; decompress it (unxz)"},
        {4, "1AY&SY", "compressed by bzip2; decompress it (bunzip2)"},
        {0, "\x04\x22\x4d\x18", "compressed by lz4; decompress it (unlz4)"},
        {0, "PK\x03\x04", "a zip archive; unpack it (unzip)"},
        {257, "ustar", "a tar archive; unpack it (tar -xf)"},
        {0, "PAR1", "a Parquet file; use scripts/make_shards.py"},
        {0, "%PDF-", "a PDF document; convert it to text"},
        {0, "\x88\xd8\x34\x01", "a data shard"},
        {0, "\xff\xfe", "UTF-16 text; convert it to UTF-8 (iconv)"},
        {0, "\xfe\xff", "UTF-16 text; convert it to UTF-8 (iconv)"},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const size_t at = kinds[i].at, length = strlen(kinds[i].magic);
        if (n >= at + length && memcmp(bytes + at, kinds[i].magic, length) == 0) return kinds[i].kind;
    }
    return memchr(bytes, '\0', n)
               ? "binary: it has a zero byte; remove it from the input, leave it out with --skip-binary, or "
                 "encode its bytes as they are with --binary"
               : NULL;
}

// Sets *kind to what a file is that is not text, by its start and, if it is to be read `whole`, by its zero
// bytes; NULL: it is text.
static inline bool file_other_kind(const char** kind, const char* path, bool whole, Error* err) {
    enum { START = 4096, PIECE = 1 << 16 };
    *kind = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(err, "%s: cannot open: %s", path, strerror(errno));
    char* bytes = (char*)xrealloc(NULL, PIECE);
    ssize_t n = read(fd, bytes, whole ? PIECE : START);
    if (n > 0) *kind = other_kind(bytes, (size_t)n);
    while (whole && n > 0 && !*kind && (n = read(fd, bytes, PIECE)) > 0)
        if (memchr(bytes, '\0', (size_t)n)) *kind = other_kind("", 1);
    const int why = errno;
    free(bytes);
    close(fd);
    return n >= 0 || fail(err, "%s: cannot read: %s", path, strerror(why));
}
