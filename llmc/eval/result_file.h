/*
The file of results that a run writes at its end, --eval's or --maps's: under a temporary name, through to the
disk, then renamed, so that a file of that name is complete. Errors end the program; `option` names the option
in messages.
*/
#pragma once

#include "../base/common.h"

// The temporary name of a file.
static inline void result_temporary(char temporary[PATH_LENGTH], const char* option, const char* path) {
    if (snprintf(temporary, PATH_LENGTH, "%s.tmp", path) >= PATH_LENGTH)
        die("--%s: the file's name is too long", option);
}

// Dies where the file could not be written, before hours are spent on what is to be in it.
static inline void result_check(const char* option, const char* path) {
    char temporary[PATH_LENGTH];
    struct stat st;
    result_temporary(temporary, option, path);
    if (*path == '\0') die("--%s: its FILE is empty", option);
    if (lstat(path, &st) == 0 && !S_ISREG(st.st_mode)) // a link would be replaced, also /dev/stdout
        die("--%s %s: exists and is not a regular file", option, path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) die("--%s %s: cannot create: %s", option, path, strerror(errno));
    close(fd);
    unlink(temporary);
}

// Renames the temporary file. `written`: it is complete; otherwise it is removed, and *err is the message.
static inline void result_publish(const char* option, const char* path, bool written, Error* err) {
    char temporary[PATH_LENGTH], folder[PATH_LENGTH];
    const char* slash = strrchr(path, '/');
    result_temporary(temporary, option, path);
    if (written && rename(temporary, path) != 0)
        written = fail(err, "%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    if (!written) {
        unlink(temporary);
        die("%s", err->msg);
    }
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : ".");
    if (!flush_folder(folder, err)) die("%s", err->msg);
}
