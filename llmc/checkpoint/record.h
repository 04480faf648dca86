/*
trainer.json, a checkpoint's record of the run, and the checksums in it.

Checksums at its end cover the files of tensors, config.json and trainer.json itself, so that any flipped bit
is found:

    "checksums": {"block_bytes": 67108864, "model.safetensors": ["0123456789abcdef", ...],
                  "optimizer.safetensors": [...], "config.json": "0123456789abcdef", "trainer.json": "..."}

The last one is of trainer.json itself, up to the comma before it. A record from which "checksums" was taken,
to edit a checkpoint by hand, is read unchecked.

Called by write.h, and to load by resume.h, which parses the record of a checkpoint, and by read.h.
*/
#pragma once

#include "../base/checksum.h"
#include "../formats/json_writer.h"
#include "../model/grad_norms.h"

typedef struct {
    int64_t step;         // optimizer steps done
    int64_t tokens;       // trained on so far
    int64_t position;     // sequences consumed from the training data
    int64_t sequences;    // in an epoch of the training data; 0: not recorded
    uint64_t fingerprint; // of the training data (tokens/fingerprint.h); 0: not recorded
    int64_t seed;
    double lr; // peak learning rate of the schedule
    int64_t warmup_tokens, max_tokens;
    GradNorms norms; // with --skip-spikes; else all 0
} TrainerState;

// Writes a state as the first members of trainer.json.
static inline void checkpoint_put_state(JsonWriter* w, const TrainerState* s) {
    char hex[17];
    json_put_int(w, "step", s->step);
    json_put_int(w, "tokens", s->tokens);
    json_put_int(w, "seed", s->seed);
    json_begin_object(w, "schedule");
    json_put_double(w, "lr", s->lr);
    json_put_int(w, "warmup_tokens", s->warmup_tokens);
    json_put_int(w, "max_tokens", s->max_tokens);
    json_end(w);
    json_begin_object(w, "data");
    json_put_int(w, "position", s->position);
    if (s->sequences) json_put_int(w, "sequences", s->sequences);
    if (s->fingerprint) json_put_string(w, "fingerprint", hex64(hex, s->fingerprint));
    json_end(w);
    int64_t first = s->step - NORMS_KEPT + 1; // grad_norms: of the steps up to this one
    while (first <= s->step && (first < 1 || s->norms.values[first % NORMS_KEPT] == 0)) first++;
    if (first > s->step) return;
    json_begin_array(w, "grad_norms");
    for (; first <= s->step; first++) json_put_double(w, NULL, s->norms.values[first % NORMS_KEPT]);
    json_end(w);
}

// The end of trainer.json from its own checksum on, of which %s is the value.
#define CHECKPOINT_RECORD_END ",\n    \"trainer.json\": \"%s\"\n  }\n}\n"

// Fails unless the text of a trainer.json matches the checksum at its end. One that names neither of the two
// last checksums has none, and is not checked: one flipped bit cannot hide both.
static inline bool checkpoint_check_record(const char* path, const char* text, size_t bytes, Error* err) {
    static const char own[] = "\"trainer.json\": \"", config[] = "\"config.json\": \"";
    char end[64], hex[17];
    if (!memmem(text, bytes, own, sizeof own - 1) && !memmem(text, bytes, config, sizeof config - 1))
        return true;
    const size_t n = (size_t)snprintf(end, sizeof end, CHECKPOINT_RECORD_END, hex64(hex, 0));
    if (bytes > n) {
        snprintf(end, sizeof end, CHECKPOINT_RECORD_END, hex64(hex, checksum(text, bytes - n, 0)));
        if (memcmp(text + bytes - n, end, n) == 0) return true;
    }
    return fail(err, "%s: is damaged: does not match the checksum at its end", path);
}

// Fails unless the text of a config.json matches its checksum in trainer.json, `record`, if that has one.
static inline bool checkpoint_check_config(const char* path, const char* text, size_t bytes,
                                           const Json* record, Error* err) {
    const int node = json_get(record, json_get(record, 0, "checksums"), "config.json");
    uint64_t want;
    if (node < 0) return true;
    if (hex64_parse(json_string(record, node), &want) && checksum(text, bytes, 0) == want) return true;
    return fail(err, "%s: is damaged: does not match its checksum in trainer.json", path);
}

// Reads an integer of trainer.json. If it is not valid and *bad is NULL, sets *bad to its key.
static inline void checkpoint_read_count(const Json* j, int object, const char* key, int64_t* value,
                                         const char** bad) {
    bool ok = json_int64(j, json_get(j, object, key), value) && *value >= 0 &&
              *value <= (int64_t)1 << 60; // sums must not overflow
    if (!ok && !*bad) *bad = key;
}

// Reads grad_norms. Fails where they are not norms of the steps up to state->step.
static inline bool checkpoint_read_norms(const Json* j, TrainerState* state) {
    const int array = json_get(j, 0, "grad_norms"), count = json_count(j, array);
    int64_t step = state->step - count;
    memset(&state->norms, 0, sizeof state->norms);
    if (array >= 0 && (!json_is(j, array, JSON_ARRAY) || count > NORMS_KEPT || step < 0)) return false;
    for (int node = json_first(j, array); node >= 0; node = json_next(j, node)) {
        double* norm = &state->norms.values[++step % NORMS_KEPT];
        if (!json_double(j, node, norm) || !(*norm >= 0 && isfinite(*norm))) return false;
    }
    return true;
}

// Parses the text of a trainer.json, whose path messages name: the state, and all of it as *record, which the
// caller frees with json_free and whose member "options" options_restore reads. Fails also where the text
// does not match its checksum. On error record is empty and *state undefined.
static inline bool checkpoint_parse_state(const char* path, const char* text, size_t bytes,
                                          TrainerState* state, Json* record, Error* err) {
    if (!json_parse(record, path, text, bytes, err)) return false;
    int schedule = json_get(record, 0, "schedule"), data = json_get(record, 0, "data");
    int fingerprint = json_get(record, data, "fingerprint");
    const char* bad = NULL; // the first key whose value is not valid
    checkpoint_read_count(record, 0, "step", &state->step, &bad);
    checkpoint_read_count(record, 0, "tokens", &state->tokens, &bad);
    checkpoint_read_count(record, schedule, "warmup_tokens", &state->warmup_tokens, &bad);
    checkpoint_read_count(record, schedule, "max_tokens", &state->max_tokens, &bad);
    checkpoint_read_count(record, data, "position", &state->position, &bad);
    state->sequences = 0;
    if (json_get(record, data, "sequences") >= 0)
        checkpoint_read_count(record, data, "sequences", &state->sequences, &bad);
    if (!bad && (!json_int64(record, json_get(record, 0, "seed"), &state->seed) || state->seed < 0))
        bad = "seed";
    state->fingerprint = 0;
    if (!bad && fingerprint >= 0 && !hex64_parse(json_string(record, fingerprint), &state->fingerprint))
        bad = "fingerprint";
    if (!bad && !json_double(record, json_get(record, schedule, "lr"), &state->lr)) bad = "lr";
    if (!bad && !json_is(record, json_get(record, 0, "options"), JSON_OBJECT)) bad = "options";
    if (!bad && !checkpoint_read_norms(record, state)) bad = "grad_norms";
    if (!bad && checkpoint_check_record(path, text, bytes, err)) return true;
    json_free(record);
    return bad ? fail(err, "%s: '%s' is missing or not valid", path, bad) : false;
}
