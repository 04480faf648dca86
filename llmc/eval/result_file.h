/*
The file of a run's results, of --eval, --maps or --dump:

    result_open       before hours are spent on the results: dies where they could not be written
    result_put_...    writes them

A regular file, or a link to one, is replaced as a whole: results are written under a name that no other file
has, in the same folder, through to the disk, and renamed. So it is complete at every moment, and of several
runs that write the same one, the last counts. A pipe, a terminal, a device, and whatever standard output or
error goes to (/dev/stdout), are written straight. Anything else is refused.

Errors end the program; messages name the option.
*/
#pragma once

#include "../formats/safetensors.h"

enum { RESULT_READER_MS = 5000 }; // how long a pipe's reader may take to open it

typedef struct {
    const char *option, *name;   // as given
    char path[PATH_LENGTH];      // the file, behind all links
    char temporary[PATH_LENGTH]; // its name while it is written
    int fd;                      // of what is written straight; else -1
} ResultFile;

// Dies with errno's message.
__attribute__((noreturn)) static inline void result_die_(const ResultFile* r, const char* what) {
    die("--%s %s: cannot %s: %s", r->option, r->name, what, strerror(errno));
}

// Creates the temporary file, with the permissions of the file that it replaces.
static inline int result_create_(ResultFile* r) {
    const char* slash = strrchr(r->path, '/');
    struct stat st;
    int fd = -1;
    for (int i = 0; fd < 0; i++) {
        const int n = snprintf(r->temporary, PATH_LENGTH, "%.*s.result-%ld-%d.tmp",
                               slash ? (int)(slash - r->path + 1) : 0, r->path, (long)getpid(), i);
        if (n >= PATH_LENGTH) die("--%s: the file's name is too long", r->option);
        fd = open(r->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0 && errno != EEXIST) result_die_(r, "create");
    }
    if (stat(r->path, &st) == 0) fchmod(fd, st.st_mode & 0777);
    return fd;
}

// Opens what is written straight.
static inline int result_open_straight_(const ResultFile* r) {
    const struct timespec pause = {0, 10 * 1000000};
    int fd = -1;
    for (int ms = 0; fd < 0 && ms <= RESULT_READER_MS; ms += 10) {
        fd = open(r->path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); // a pipe would wait for its reader
        if (fd < 0 && errno != ENXIO) result_die_(r, "open");
        if (fd < 0) nanosleep(&pause, NULL);
    }
    if (fd < 0) die("--%s %s: no program reads this pipe: start its reader first", r->option, r->name);
    fcntl(fd, F_SETFL, O_WRONLY);
    return fd;
}

// Dies unless results can be written to `path`. `option` is the name that messages give.
static inline void result_open(ResultFile* r, const char* option, const char* path) {
    struct stat st, standard;
    r->option = option;
    r->name = path;
    r->fd = -1;
    if (snprintf(r->path, PATH_LENGTH, "%s", path) >= PATH_LENGTH)
        die("--%s: the file's name is too long", option);
    const bool exists = stat(path, &st) == 0;
    if (!exists && lstat(path, &standard) == 0)
        die("--%s %s: is a link to a file that cannot be found: remove it, or make the file", option, path);
    for (int fd = STDOUT_FILENO; exists && r->fd < 0 && fd <= STDERR_FILENO; fd++)
        if (fstat(fd, &standard) == 0 && standard.st_dev == st.st_dev && standard.st_ino == st.st_ino)
            r->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (r->fd >= 0) return;
    if (exists && (S_ISFIFO(st.st_mode) || S_ISCHR(st.st_mode))) {
        r->fd = result_open_straight_(r);
        return;
    }
    if (exists && !S_ISREG(st.st_mode)) die("--%s %s: exists and is not a regular file", option, path);
    if (exists && access(path, W_OK) != 0) result_die_(r, "write");
    char* behind = exists ? realpath(path, NULL) : NULL;
    if (behind) snprintf(r->path, PATH_LENGTH, "%s", behind);
    free(behind);
    close(result_create_(r));
    unlink(r->temporary);
}

// The stream that result_end_ closes.
static inline FILE* result_begin_(ResultFile* r) {
    fflush(stdout); // r may be the same file
    FILE* f = fdopen(r->fd >= 0 ? r->fd : result_create_(r), "wb");
    if (!f) result_die_(r, "write");
    return f;
}

// Closes the stream; the results are in the file from then on.
static inline void result_end_(ResultFile* r, FILE* f) {
    const bool renames = r->fd < 0;
    const char* slash = strrchr(r->path, '/');
    char folder[PATH_LENGTH];
    Error err;
    bool ok = !ferror(f) && fflush(f) == 0 && (!renames || fsync(fileno(f)) == 0);
    int why = errno;
    if (fclose(f) != 0 && ok) ok = false, why = errno;
    if (ok && renames && rename(r->temporary, r->path) != 0) ok = false, why = errno;
    if (!ok && renames) unlink(r->temporary);
    errno = why;
    if (!ok) result_die_(r, "write");
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - r->path + 1) : 1, slash ? r->path : ".");
    if (renames && !flush_folder(folder, &err)) die("%s", err.msg);
}

// Writes the text, and a line break.
static inline void result_put_json(ResultFile* r, const JsonWriter* w) {
    FILE* f = result_begin_(r);
    json_writer_print(w, f);
    result_end_(r, f);
}

// Writes a safetensors file. metadata: as safetensors_header's.
static inline void result_put_tensors(ResultFile* r, SafeTensor* tensors, int count,
                                      const char* const* metadata) {
    Error err;
    size_t header_bytes = 0;
    char* header = safetensors_header(r->path, tensors, count, metadata, &header_bytes, &err);
    if (!header) die("%s", err.msg);
    FILE* f = result_begin_(r);
    safetensors_print(header, header_bytes, tensors, count, f);
    result_end_(r, f);
    free(header);
}
