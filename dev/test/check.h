/*
The test harness: a few macros, no framework.

    int main(void) {
        CHECK(2 + 2 == 4, "arithmetic is off by %d", 2 + 2 - 4);
        CHECK_DIES("unknown option", options_parse(...));
        return test_report();
    }
*/
#pragma once

#include <ftw.h>
#include <math.h>
#include <sys/wait.h>
#include "../../llmc/base/common.h"

// The folder of test_scratch. Builds of one test with other flags run at the same time, each with its own
// (Makefile).
#ifndef TEST_FOLDER
#define TEST_FOLDER "build/test"
#endif

static int tests_passed, tests_failed;

// The larger of two errors; NaN if one of them is, which fmax would drop.
static inline double worse(double a, double b) { return isnan(a) || a > b ? a : b; }

// Counts one check. A failed check prints its location and message; the test continues.
#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        if (condition) {                                                                                     \
            tests_passed++;                                                                                  \
        } else {                                                                                             \
            tests_failed++;                                                                                  \
            printf("FAILED %s:%d: %s: ", __FILE__, __LINE__, #condition);                                    \
            printf(__VA_ARGS__);                                                                             \
            printf("\n");                                                                                    \
        }                                                                                                    \
    } while (0)

// Runs the statement in a child process. The check passes if the child exits with a nonzero code (not by a
// signal) and prints exactly one line to stderr, which contains `expected`. A sanitizer report fails it: the
// report has more than one line.
#define CHECK_DIES(expected, statement)                                                                      \
    do {                                                                                                     \
        int dies_pipe_[2];                                                                                   \
        pid_t dies_child_ = test_fork(dies_pipe_);                                                           \
        if (dies_child_ == 0) {                                                                              \
            statement;                                                                                       \
            _exit(0);                                                                                        \
        }                                                                                                    \
        test_child_died(dies_child_, dies_pipe_, expected, #statement, __FILE__, __LINE__);                  \
    } while (0)

// Says what a test leaves out on this machine; run.sh reports it.
#define SKIP(why) printf("skipped: %s\n", why)

static inline pid_t test_fork(int pipe_ends[2]) {
    fflush(stdout);
    if (pipe(pipe_ends) != 0) die("pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    if (child == 0) {
        dup2(pipe_ends[1], STDERR_FILENO);
        close(pipe_ends[0]);
        close(pipe_ends[1]);
        if (!freopen("/dev/null", "w", stdout)) _exit(99);
    } else {
        close(pipe_ends[1]);
    }
    return child;
}

static inline void test_child_died(pid_t child, int pipe_ends[2], const char* expected, const char* what,
                                   const char* file, int line) {
    char text[8192];
    size_t n = 0;
    for (ssize_t got; (got = read(pipe_ends[0], text + n, sizeof text - 1 - n)) > 0;) n += (size_t)got;
    text[n] = '\0';
    close(pipe_ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    size_t lines = 0;
    for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
    bool died = WIFEXITED(status) && WEXITSTATUS(status) != 0;
    if (died && lines == 1 && strstr(text, expected)) {
        tests_passed++;
        return;
    }
    tests_failed++;
    printf("FAILED %s:%d: %s: expected one line with '%s' and a non-zero exit, got status %#x and: %s\n",
           file, line, what, expected, (unsigned)status, n ? text : "(nothing)");
}

static inline int test_remove_entry_(const char* path, const struct stat* st, int type, struct FTW* ftw) {
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

// Makes an empty folder TEST_FOLDER/NAME, replacing an old one. Returns its path, valid until the next call.
static inline const char* test_scratch(const char* name) {
    static char path[PATH_LENGTH];
    Error err;
    path_join(path, TEST_FOLDER, name);
    nftw(path, test_remove_entry_, 16, FTW_DEPTH | FTW_PHYS);
    if (!make_folders(path, &err)) die("%s", err.msg);
    return path;
}

// Prints the summary line that run.sh sums; returns main's exit code.
static inline int test_report(void) {
    printf("%d passed, %d failed\n", tests_passed, tests_failed);
    return tests_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
