/*
The tests that include train_fox.c, one program: it is compiled once a build, which takes longer than the
tests.
*/
#include "../cpu/test_documents.c"
#include "../eval/test_cache.c"
#include "../eval/test_engine.c"
#include "../eval/test_maps.c"
#include "test_fixtures.c"
#include "test_layers.c"
#include "test_model.c"
#include "named_tests.h"

int main(int count, char** arguments) {
    static const NamedTest tests[] = {{"test_cache", test_cache},   {"test_documents", test_documents},
                                      {"test_engine", test_engine}, {"test_fixtures", test_fixtures},
                                      {"test_layers", test_layers}, {"test_maps", test_maps},
                                      {"test_model", test_model}};
    return run_named_test(count > 0 ? arguments[0] : "", tests, sizeof tests / sizeof *tests);
}
