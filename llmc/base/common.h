/*
What every other file stands on: errors, memory, files, time.

Two ways to fail, chosen by who can still do something about it:
  fail()  fills an Error and returns false. For functions whose caller may recover: a damaged checkpoint, say,
          is named and the one before it is used. They return bool, and document what they leave behind.
  die()   prints one line and exits with code 1. For programs, at the top, where nothing is left to try.
A message says what was wrong, with which file or option, and where it helps, what to do. One line, no
newline.

Valid as C11 and as C++17, like every header in llmc/.
*/
#ifndef LLMC_COMMON_H
#define LLMC_COMMON_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PATH_LENGTH 4096 // longest path we build, with its terminating zero

#define FALLTHROUGH __attribute__((fallthrough)) // of a case into the next one, meant

#define PRINTF_LIKE(format_index, first_arg) __attribute__((format(printf, format_index, first_arg)))

// ----------------------------------------------------------------------------
// errors

typedef struct {
    char msg[1024];
} Error;

// Fills err with the formatted message. Control characters, which a quoted name from a damaged file may hold,
// become '?', so that one message stays one line.
static inline void set_message(Error* err, const char* format, va_list args) {
    vsnprintf(err->msg, sizeof err->msg, format, args);
    for (char* c = err->msg; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
}

// Fills err and returns false, so that a check reads `return fail(err, ...)`.
PRINTF_LIKE(2, 3)
static inline bool fail(Error* err, const char* format, ...) {
    va_list args;
    va_start(args, format);
    set_message(err, format, args);
    va_end(args);
    return false;
}

// Prints `label: message` on stderr as one line.
static inline void print_message(const char* label, const char* format, va_list args) {
    Error err;
    set_message(&err, format, args);
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", label, err.msg);
}

// Prints `error: message` on stderr as one line and exits with code 1.
PRINTF_LIKE(1, 2)
__attribute__((noreturn)) static inline void die(const char* format, ...) {
    va_list args;
    va_start(args, format);
    print_message("error", format, args);
    va_end(args);
    exit(EXIT_FAILURE);
}

// Prints `warning: message` on stderr: something the user should know, which does not stop the work.
PRINTF_LIKE(1, 2)
static inline void warn(const char* format, ...) {
    va_list args;
    va_start(args, format);
    print_message("warning", format, args);
    va_end(args);
}

// ----------------------------------------------------------------------------
// memory: zeroed, aligned to a cache line so that vector loads never straddle one; dies when there is none

// Allocates count elements of size bytes each, all zero; free with free(). Never returns NULL, also for count
// 0.
static inline void* xcalloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - 64)
        die("out of memory: %zu elements of %zu bytes overflow the address space", count, size);
    void* p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1) != 0)
        die("out of memory: could not allocate %.1f MiB; lower --micro-batch or --seq-len",
            bytes / 1048576.0);
    memset(p, 0, bytes);
    return p;
}

// Grows or shrinks a block from malloc, xrealloc or xcalloc (whose alignment it does not keep); dies on
// failure.
static inline void* xrealloc(void* p, size_t bytes) {
    void* q = realloc(p, bytes ? bytes : 1);
    if (!q) die("out of memory: could not allocate %.1f MiB", bytes / 1048576.0);
    return q;
}

static inline char* xstrdup(const char* s) {
    size_t n = strlen(s) + 1;
    return (char*)memcpy(xrealloc(NULL, n), s, n);
}

// ----------------------------------------------------------------------------
// files

// Joins folder and name with a slash into out[PATH_LENGTH]; dies when the path would be too long.
static inline void path_join(char* out, const char* folder, const char* name) {
    int n = snprintf(out, PATH_LENGTH, "%s/%s", folder, name);
    if (n < 0 || n >= PATH_LENGTH) die("%s/%s: path is longer than %d bytes", folder, name, PATH_LENGTH - 1);
}

// Makes a folder and its missing parents, like mkdir -p.
static inline bool make_folders(const char* path, Error* err) {
    char part[PATH_LENGTH];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part) return fail(err, "'%s': not a usable folder name", path);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return fail(err, "%s: cannot make this folder: %s", part, strerror(errno));
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) return fail(err, "%s: exists and is no folder", path);
    return true;
}

// Reads a whole file into memory, with a zero byte behind it; free with free(). NULL on error.
static inline char* read_file(const char* path, size_t* bytes, Error* err) {
    FILE* f = fopen(path, "rb");
    if (!f) {
        fail(err, "%s: cannot open: %s", path, strerror(errno));
        return NULL;
    }
    char* data = NULL;
    size_t n = 0, capacity = 0;
    for (;;) {
        if (n + 1 >= capacity) data = (char*)xrealloc(data, capacity = capacity ? 2 * capacity : 65536);
        size_t got = fread(data + n, 1, capacity - n - 1, f);
        n += got;
        if (got == 0) break;
    }
    bool bad = ferror(f);
    fclose(f);
    if (bad) {
        free(data);
        fail(err, "%s: cannot read: %s", path, strerror(errno));
        return NULL;
    }
    data[n] = '\0';
    *bytes = n;
    return data;
}

// Flushes a file to the disk, not only to the kernel, and closes it. The file is closed on error too. A full
// disk often shows only here, so a writer that skips this check can lose what it reported as written.
static inline bool flush_and_close(FILE* f, const char* path, Error* err) {
    bool ok = !ferror(f) && fflush(f) == 0 && fsync(fileno(f)) == 0;
    int why = errno;
    if (fclose(f) != 0 && ok) ok = false, why = errno;
    return ok ? true : fail(err, "%s: cannot write: %s", path, strerror(why));
}

// Flushes a folder, so that the names made or renamed in it survive a power cut.
static inline bool flush_folder(const char* path, Error* err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY);
    bool ok = fd >= 0 && fsync(fd) == 0;
    int why = errno;
    if (fd >= 0) close(fd);
    return ok ? true : fail(err, "%s: cannot flush this folder: %s", path, strerror(why));
}

// Locks a file, made if need be, against other processes. Returns its descriptor, which holds the lock until
// it is closed or the process ends, in whatever way. On error -1, with errno EWOULDBLOCK if another process
// has the lock.
static inline int lock_file(const char* path) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

// Makes what happens to stdout and stderr harmless to the files of a run. Where one of the three standard descriptors is
// closed, the next file opened would take its number and get what is printed: it becomes /dev/null instead. Writing to a
// pipe whose reader is gone fails from now on, and no longer kills the process.
static inline void guard_standard_streams(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            _exit(EXIT_FAILURE); // no message can be printed
    signal(SIGPIPE, SIG_IGN);
}

// ----------------------------------------------------------------------------
// time

// Seconds on a clock that only moves forward.
static inline double seconds_now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

#endif // LLMC_COMMON_H
