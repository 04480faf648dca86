/*
The tests that include train_fox.c, one program: it is compiled once a build, which takes longer than the
tests. The program runs the test whose name it is started by: build/test/test_cache_float is a link to it
(Makefile).
*/
#include "../cpu/test_documents.c"
#include "../eval/test_cache.c"
#include "../eval/test_engine.c"
#include "../eval/test_maps.c"
#include "test_fixtures.c"
#include "test_layers.c"
#include "test_model.c"

int main(int count, char** arguments) {
    static const struct {
        const char* name;
        int (*run)(void);
    } tests[] = {{"test_cache", test_cache},   {"test_documents", test_documents},
                 {"test_engine", test_engine}, {"test_fixtures", test_fixtures},
                 {"test_layers", test_layers}, {"test_maps", test_maps},
                 {"test_model", test_model}};
    const char* slash = count > 0 ? strrchr(arguments[0], '/') : NULL;
    for (size_t i = 0; slash && i < sizeof tests / sizeof *tests; i++)
        if (strncmp(slash + 1, tests[i].name, strlen(tests[i].name)) == 0) return tests[i].run();
    die("this program is started by the name of a test, as build/test/test_cache_float");
}
