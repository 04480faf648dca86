// One program of several tests, which takes less time to compile than each alone: it runs the test whose name
// it is started by. build/test/test_checkpoint_sanitized is a link to it (Makefile).
#pragma once

#include "../../../llmc/base/common.h"

typedef struct {
    const char* name;
    int (*run)(void);
} NamedTest;

// A test's name may begin with another's: the longest counts.
static inline int run_named_test(const char* program, const NamedTest* tests, size_t count) {
    const char* slash = strrchr(program, '/');
    const NamedTest* found = NULL;
    for (size_t i = 0; slash && i < count; i++)
        if (strncmp(slash + 1, tests[i].name, strlen(tests[i].name)) == 0 &&
            (!found || strlen(tests[i].name) > strlen(found->name)))
            found = &tests[i];
    if (!found) die("this program is started by the name of a test, as build/test/%s", tests[0].name);
    return found->run();
}
