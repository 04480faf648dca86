/*
Errors, memory, files and time. Included by every other file of llmc/, data/ and the trainers.

There are two ways to report an error:
  fail()  fills an Error and returns false. Used by functions whose caller may recover, for example by loading
          an older checkpoint when the newest one is damaged. They document their outputs on error.
  die()   prints one line and exits with code 1. Used by programs when no recovery is possible.
A message is one line, without a newline. It names the file or option, the problem and, if there is one, the
remedy. In a program of several ranks message_hooks decides which rank prints.

Valid as C11 and as C++17, like every header in llmc/.
*/
#pragma once

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
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

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian, read without conversion");

enum { PATH_LENGTH = 4096 }; // size of a path buffer, including the terminating zero

enum { THREAD_STACK_BYTES = 2 << 20 }; // at least, of every thread

enum { TARGET_NONE = -1 }; // in place of a target that does not count: it has no loss and no gradient

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

#define PRINTF_LIKE(format_index, first_arg) __attribute__((format(printf, format_index, first_arg)))

// ----------------------------------------------------------------------------
// errors

typedef struct {
    char msg[1024];
} Error;

// Fills err with the formatted message. Control characters become '?', so that the message stays one line
// even when it quotes a name from a damaged file. A message that is too long loses its middle: the cause
// stands behind a path.
static inline void set_message(Error* err, const char* format, va_list args) {
    enum { BYTES = sizeof err->msg, TAIL = BYTES / 2 };
    va_list again;
    va_copy(again, args);
    const int length = vsnprintf(err->msg, BYTES, format, args);
    char* whole = length >= BYTES ? (char*)malloc((size_t)length + 1) : NULL;
    if (whole) {
        vsnprintf(whole, (size_t)length + 1, format, again);
        memcpy(err->msg + BYTES - TAIL - 3, "...", 3);
        memcpy(err->msg + BYTES - TAIL, whole + length + 1 - TAIL, TAIL);
    }
    free(whole);
    va_end(again);
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

// How a program of several ranks (llmc/ranks/world.h) prints a message once, and ends all ranks after an
// error. All zero: one process, which prints everything.
typedef struct {
    void (*clean)(void);           // at an error: removes what only a run that succeeds should leave
    char prefix[128];              // "rank 3 (node07): ", printed after "error: "
    bool (*may_print)(bool fatal); // false: another rank prints this message, or the one that ends the run
    void (*leave)(bool printed);   // after an error, instead of exit(); does not return
    int64_t (*writing)(void); // 0, or a number that rises while another thread writes what is to be whole
} MessageHooks;

static MessageHooks message_hooks;

// While another thread writes what is to be whole: a number that rises as it does. 0: none does.
static inline int64_t being_written(void) { return message_hooks.writing ? message_hooks.writing() : 0; }

// Prints `label: prefix message` on stderr as one line.
static inline void print_message(const char* label, const char* prefix, const char* format, va_list args) {
    Error err;
    set_message(&err, format, args);
    fflush(stdout);
    fprintf(stderr, "%s: %s%s\n", label, prefix, err.msg);
}

// Prints `error: message` on stderr as one line and exits with code 1, when what another thread writes is
// whole. Among several threads, and among several ranks, the first to call it prints, and all exit.
PRINTF_LIKE(1, 2)
__attribute__((noreturn)) static inline void die(const char* format, ...) {
    static bool dying;
    if (message_hooks.clean) message_hooks.clean();
    bool print = message_hooks.may_print ? message_hooks.may_print(true)
                                         : !__atomic_test_and_set(&dying, __ATOMIC_RELAXED);
    if (print) {
        va_list args;
        va_start(args, format);
        print_message("error", message_hooks.prefix, format, args);
        va_end(args);
    }
    if (message_hooks.leave) message_hooks.leave(print);
    while (being_written() > 0) (void)usleep(10000);
    exit(EXIT_FAILURE);
}

// The exit code of a program whose result is what it has printed: EXIT_SUCCESS. Dies where that could not be
// written, as to a full disk. The reader of a pipe may stop when it has enough.
static inline int check_printed(void) {
    struct stat file;
    const bool written = fflush(stdout) == 0 && !ferror(stdout);
    if (!written && (fstat(STDOUT_FILENO, &file) != 0 || !S_ISFIFO(file.st_mode)))
        die("cannot write everything to standard output: is its disk full, or is it closed?");
    return EXIT_SUCCESS;
}

// Prints `warning: message` on stderr as one line and returns. Among several ranks only rank 0 prints.
PRINTF_LIKE(1, 2)
static inline void warn(const char* format, ...) {
    if (message_hooks.may_print && !message_hooks.may_print(false)) return;
    va_list args;
    va_start(args, format);
    print_message("warning", "", format, args);
    va_end(args);
}

// ----------------------------------------------------------------------------
// counts in messages: printf("%s", counted(n, "token").text) prints 1 token, 2 tokens

typedef struct {
    char text[64]; // lives as long as the call whose argument it is
} Counted;

// The noun behind a count of n, of at least two letters: for another count than one its last word in the
// plural.
static inline Counted plural(int64_t n, const char* noun) {
    const size_t length = strlen(noun);
    const char before = noun[length - 2], last = noun[length - 1];
    const bool y = last == 'y' && !strchr("aeiou", before);
    const bool sibilant = last == 's' || last == 'x' || (last == 'h' && strchr("cs", before));
    Counted c;
    snprintf(c.text, sizeof c.text, "%.*s%s", (int)length - (n != 1 && y), noun,
             n == 1     ? ""
             : y        ? "ies"
             : sibilant ? "es"
                        : "s");
    return c;
}

// 1 sequence, 2 sequences
static inline Counted counted(int64_t n, const char* noun) {
    Counted c;
    snprintf(c.text, sizeof c.text, "%lld %.40s", (long long)n, plural(n, noun).text);
    return c;
}

// 2 ranks, 1 to 2 ranks
static inline Counted counted_range(int64_t least, int64_t most, const char* noun) {
    const Counted all = counted(most, noun);
    if (least == most) return all;
    Counted c;
    snprintf(c.text, sizeof c.text, "%lld to %.39s", (long long)least, all.text);
    return c;
}

// ----------------------------------------------------------------------------
// memory; every allocation dies on failure

// Allocates count elements of size bytes each, zeroed and aligned to 64 bytes, so that no aligned vector load
// crosses a cache line. Never returns NULL, not even for count 0. Free with free().
static inline void* xcalloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - 64)
        die("out of memory: %zu x %zu B overflow the address space", count, size);
    void* p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1) != 0)
        die("out of memory: could not allocate %.1f MiB; lower --micro-batch or --seq-len",
            bytes / 1048576.0);
    memset(p, 0, bytes);
    return p;
}

// Resizes a block from malloc, xrealloc or xcalloc; NULL allocates one. Does not keep 64-byte alignment.
static inline void* xrealloc(void* p, size_t bytes) {
    void* q = realloc(p, bytes ? bytes : 1);
    if (!q) die("out of memory: could not allocate %.1f MiB", bytes / 1048576.0);
    return q;
}

// Grows an array with elements of `size` bytes, if necessary, so that *capacity exceeds `count`, at least
// doubling it. data may be NULL with *capacity 0. Returns the array, which may have moved.
static inline void* xgrow(void* data, size_t count, size_t* capacity, size_t size) {
    if (count < *capacity) return data;
    *capacity = 2 * *capacity > count ? 2 * *capacity : count + 1;
    return xrealloc(data, *capacity * size);
}

static inline char* xstrdup(const char* s) {
    size_t n = strlen(s) + 1;
    return (char*)memcpy(xrealloc(NULL, n), s, n);
}

// ----------------------------------------------------------------------------
// files

// Writes "folder/name" to out[PATH_LENGTH]; dies if the path is too long.
static inline void path_join(char* out, const char* folder, const char* name) {
    const size_t length = strlen(folder);
    const char* slash = length > 0 && folder[length - 1] == '/' ? "" : "/";
    int n = snprintf(out, PATH_LENGTH, "%s%s%s", folder, slash, name);
    if (n < 0 || n >= PATH_LENGTH) die("%s/%s: path is longer than %d bytes", folder, name, PATH_LENGTH - 1);
}

// Creates a folder and its missing parents, like mkdir -p.
static inline bool make_folders(const char* path, Error* err) {
    char part[PATH_LENGTH];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part) return fail(err, "'%s': not a usable folder name", path);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return fail(err, "%s: cannot create this folder: %s", part, strerror(errno));
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return fail(err, "%s: exists and is not a folder", path);
    return true;
}

// Reads a whole regular file and appends a zero byte, which *bytes does not count. Free with free(). NULL on
// error.
static inline char* read_file(const char* path, size_t* bytes, Error* err) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO would wait for its writer
    FILE* f = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (!f) {
        fail(err, "%s: cannot open: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return NULL;
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        fclose(f);
        fail(err, "%s: is not a regular file", path);
        return NULL;
    }
    char* data = NULL;
    size_t n = 0, capacity = 0, got;
    do {
        data = (char*)xgrow(data, n + 65536, &capacity, 1);
        n += got = fread(data + n, 1, capacity - n - 1, f);
    } while (got > 0);
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

// Writes a file through to the disk (fsync) and closes it, on error too. A full disk is often reported only
// here, so every writer must check the result.
static inline bool flush_and_close(FILE* f, const char* path, Error* err) {
    bool ok = !ferror(f) && fflush(f) == 0 && fsync(fileno(f)) == 0;
    int why = errno;
    if (fclose(f) != 0 && ok) ok = false, why = errno;
    return ok ? true : fail(err, "%s: cannot write: %s", path, strerror(why));
}

// Writes a text file through to the disk.
static inline bool write_text_file(const char* path, const char* text, Error* err) {
    FILE* f = fopen(path, "wb");
    if (!f) return fail(err, "%s: cannot create: %s", path, strerror(errno));
    fputs(text, f); // flush_and_close reports errors
    return flush_and_close(f, path, err);
}

// Writes a file through to the disk, closes it and renames it from temporary to path. On error removes it.
static inline bool close_and_rename(FILE* f, const char* temporary, const char* path, Error* err) {
    bool ok = flush_and_close(f, temporary, err);
    if (ok && rename(temporary, path) != 0)
        ok = fail(err, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    if (!ok) unlink(temporary);
    return ok;
}

// Writes a folder's entries through to the disk, so that files created or renamed in it survive a power cut.
static inline bool flush_folder(const char* path, Error* err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY);
    bool ok = fd >= 0 && fsync(fd) == 0;
    int why = errno;
    if (fd >= 0) close(fd);
    return ok ? true : fail(err, "%s: cannot flush this folder: %s", path, strerror(why));
}

// Reads bytes [offset, offset + bytes) of an open file. Returns how many it has read; where these are fewer,
// errno tells why, 0 at the end of the file.
static inline size_t read_at(int fd, void* out, size_t bytes, int64_t offset) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t got = pread(fd, (char*)out + done, bytes - done, (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = 0;
        if (got <= 0) break;
        done += (size_t)got;
    }
    return done;
}

// Takes an exclusive lock on a file, which is created if missing. Returns its descriptor, which holds the
// lock until it is closed or the process ends. On error returns -1; errno is EWOULDBLOCK if another process
// holds the lock.
static inline int lock_file(const char* path) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

// Is the open file fd still the one at `path`? Also true where that cannot be found out, as after an error of
// the disk. Opens the file, because an NFS client answers stat from its cache.
static inline bool file_is_at(int fd, const char* path) {
    struct stat ours, there;
    int at = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (at < 0) return errno != ENOENT && errno != ENOTDIR && errno != ESTALE;
    bool known = fstat(at, &there) == 0;
    close(at);
    if (fstat(fd, &ours) != 0) return errno != ESTALE;
    return !known || (ours.st_dev == there.st_dev && ours.st_ino == there.st_ino);
}

// Protects files from closed standard streams; called once at the start of a program. If descriptor 0, 1 or 2
// is closed, the next opened file would get its number and receive printed text. So /dev/null is opened there,
// for writing as 0 and for reading as 1 and 2: using these stays an error. SIGPIPE is
// ignored: writing to a pipe without a reader is an error, and does not end the process. Threads, also those
// of OpenMP, would have a stack as small as `ulimit -s`: they get THREAD_STACK_BYTES at least, of which
// unused pages take no memory.
static inline void guard_process(void) {
    pthread_attr_t threads;
    size_t stack = 0;
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd)
            _exit(EXIT_FAILURE); // no message can be printed
    signal(SIGPIPE, SIG_IGN);
    if (pthread_getattr_default_np(&threads) != 0) return;
    if (pthread_attr_getstacksize(&threads, &stack) == 0 && stack < THREAD_STACK_BYTES &&
        pthread_attr_setstacksize(&threads, THREAD_STACK_BYTES) == 0)
        pthread_setattr_default_np(&threads);
    pthread_attr_destroy(&threads);
}

// ----------------------------------------------------------------------------
// time

// Seconds of the monotonic clock.
static inline double seconds_now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}
