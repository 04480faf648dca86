/*
What the fuzz targets share. A target is a file fuzz_NAME.c with the function that libFuzzer, or driver.c
where clang is missing, calls for every input:

    int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

It passes the input to one of the project's parsers. Sanitizers find invalid memory accesses; REQUIRE finds
what they cannot: input that is accepted although its format forbids it, an object that differs after it was
written and read again, a refusal without a message.
*/
#pragma once

#include <sys/mman.h>
#include "../../llmc/base/common.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

// Ends the process with a message if the condition is false; the fuzzer keeps the input.
#define REQUIRE(condition, ...)                                                                              \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: not so: %s: ", __FILE__, __LINE__, #condition);                          \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fprintf(stderr, "\n");                                                                           \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

// Requires of a refusal that its message is not empty, is one line, and names the source.
__attribute__((unused)) static void require_message(const Error* err, const char* source) {
    REQUIRE(memchr(err->msg, '\0', sizeof err->msg), "the message has no end");
    REQUIRE(strstr(err->msg, source) && !strchr(err->msg, '\n'), "'%s' does not name %s", err->msg, source);
}

// The path of a file in memory with this content, for parsers that take a path. There are two, slots 0 and 1:
// the next call for a slot replaces its content.
__attribute__((unused)) static const char* file_in_memory(int slot, const void* data, size_t bytes) {
    static struct {
        int fd;
        char path[64];
    } files[2];
    int fd = files[slot].fd;
    if (!files[slot].path[0]) {
        files[slot].fd = fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(files[slot].path, sizeof files[slot].path, "/proc/self/fd/%d", fd);
    }
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, bytes, 0) != (ssize_t)bytes)
        die("a file of %zu bytes in memory: %s", bytes, strerror(errno));
    return files[slot].path;
}

// A copy of data[bytes] that ends where the memory ends, so that code without sanitizers (a library's) cannot
// read or write past it. data NULL: zeros. There are two, as above.
__attribute__((unused)) static void* guarded_copy(int slot, const void* data, size_t bytes) {
    enum { ROOM = 1 << 21, PAGE = 4096 };
    static char* rooms[2];
    if (bytes > ROOM) die("%zu bytes do not fit into a guarded copy", bytes);
    if (!rooms[slot]) {
        void* p = mmap(NULL, ROOM + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect((char*)p + ROOM, PAGE, PROT_NONE) != 0)
            die("guarded memory: %s", strerror(errno));
        rooms[slot] = (char*)p;
    }
    char* copy = rooms[slot] + ROOM - bytes;
    if (data && bytes > 0) memcpy(copy, data, bytes);
    if (!data) memset(copy, 0, bytes);
    return copy;
}
