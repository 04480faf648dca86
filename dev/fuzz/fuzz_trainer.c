/*
llmc/checkpoint and llmc/run/command/options.h: trainer.json. An accepted record has a state within its
ranges, options that survive writing and reading, and checksums that two small files match or not.
*/
#include "fuzz.h"
#include "../../llmc/checkpoint/read.h"
#include "../../llmc/run/command/options.h"

static Error err;

// Has a file of 9 bytes and one of 4 under the names of a checkpoint's tensors.
static const char folder[] = "dev/fuzz/files";

static void require_count(int64_t value, const char* name) {
    REQUIRE(value >= 0 && value <= (int64_t)1 << 60, "%s is %lld", name, (long long)value);
}

// Restores the options, writes and restores them again.
static void restore_options(const Json* record) {
    static const bool given[NUM_OPTION_ROWS];
    Options options, again;
    Json j;
    options_defaults(&options);
    options_defaults(&again);
    if (!options_restore(&options, given, "input", record, json_get(record, 0, "options"), &err)) {
        require_message(&err, "input");
        return;
    }
    JsonWriter first = json_writer(2), second = json_writer(2);
    options_put(&options, &first, NULL);
    REQUIRE(json_parse(&j, "output", first.text, first.length, &err), "%s", err.msg);
    REQUIRE(options_restore(&again, given, "output", &j, 0, &err), "%s", err.msg);
    options_put(&again, &second, NULL);
    REQUIRE(strcmp(first.text, second.text) == 0, "%s became %s", first.text, second.text);
    json_writer_free(&first);
    json_writer_free(&second);
    json_free(&j);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    Json record;
    TrainerState s;
    if (!checkpoint_parse_state("input", (const char*)data, bytes, &s, &record, &err)) {
        require_message(&err, "input");
        REQUIRE(!record.nodes && !record.pool, "not empty after an error");
        return 0;
    }
    require_count(s.step, "step");
    require_count(s.tokens, "tokens");
    require_count(s.seed, "seed");
    require_count(s.warmup_tokens, "warmup_tokens");
    require_count(s.max_tokens, "max_tokens");
    require_count(s.position, "position");
    require_count(s.sequences, "sequences");
    REQUIRE(isfinite(s.lr), "lr is %g", s.lr);
    for (int i = 0; i < NORMS_KEPT; i++)
        REQUIRE(isfinite(s.norms.values[i]) && s.norms.values[i] >= 0, "a norm is %g", s.norms.values[i]);
    restore_options(&record);
    if (!checkpoint_verify(folder, &record, 0, 1, NULL, &err)) require_message(&err, folder);
    json_free(&record);
    return 0;
}
