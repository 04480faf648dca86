/*
Tests of llmc/checkpoint, one program: its headers take longer to compile than each test. test_saver.c is
another, whose ranks are those of dev/test/ranks.h.
*/
#include "../../../llmc/checkpoint/load.h"
#include "../../../llmc/model/fp8.h"
#include "test_checkpoint.c"
#include "test_checkpoint_load.c"
#include "../hf/test_checkpoint_init.c"
#include "../hf/test_hf_folder.c"
#include "../trainer/named_tests.h"

int main(int count, char** arguments) {
    static const NamedTest tests[] = {{"test_checkpoint", test_checkpoint},
                                      {"test_checkpoint_init", test_checkpoint_init},
                                      {"test_checkpoint_load", test_checkpoint_load},
                                      {"test_hf_folder", test_hf_folder}};
    return run_named_test(count > 0 ? arguments[0] : "", tests, sizeof tests / sizeof *tests);
}
