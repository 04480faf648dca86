/*
The tests of llmc/config and llmc/model, one program: their headers take longer to compile than each test.
*/
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/config/config_file.h"
#include "../../../llmc/config/presets.h"
#include "../../../llmc/eval/documents.h"
#include "../../../llmc/model/fp8.h"
#include "../../../llmc/model/rotation.h"
#include "../../../llmc/model/shard.h"
#include "../../../llmc/run/shares.h"
#include "../../../llmc/sequence/split.h"
#include "test_config.c"
#include "test_fp8.c"
#include "test_initial_values.c"
#include "test_layer_types.c"
#include "test_llama_config.c"
#include "test_parts.c"
#include "test_rotation.c"
#include "test_sequence.c"
#include "../trainer/named_tests.h"

int main(int count, char** arguments) {
    static const NamedTest tests[] = {{"test_config", test_config},
                                      {"test_fp8", test_fp8},
                                      {"test_initial_values", test_initial_values},
                                      {"test_layer_types", test_layer_types},
                                      {"test_llama_config", test_llama_config},
                                      {"test_parts", test_parts},
                                      {"test_rotation", test_rotation},
                                      {"test_sequence", test_sequence}};
    return run_named_test(count > 0 ? arguments[0] : "", tests, sizeof tests / sizeof *tests);
}
