/*
A fixture of dev/reference/ (dev/test/fixtures/model): a model's config, weights and tokens, and what PyTorch computed from
them in float64. Include after a trainer, at global scope.
*/
#pragma once

#include "../tensor_files.h"

typedef struct {
    const char* name;
    char folder[PATH_LENGTH];
    Config config;
    Safetensors expected;
    int64_t B, T;
    int32_t *tokens, *targets;
} Fixture;

static int32_t* fixture_tokens(Fixture* f, const char* name) {
    Error err;
    const SafeTensor* t = safetensors_find(&f->expected, name);
    if (!t || t->dtype != SAFETENSORS_I32 || t->ndim != 2)
        die("%s: has no int32 tensor '%s' of two axes", f->name, name);
    int32_t* tokens = (int32_t*)safetensors_bytes(t, &err);
    if (!tokens) die("%s", err.msg);
    f->B = t->shape[0];
    f->T = t->shape[1];
    return tokens;
}

static Fixture fixture_open(const char* name) {
    Error err;
    Fixture f;
    char path[PATH_LENGTH];
    f.name = name;
    path_join(f.folder, "dev/test/fixtures/model", name);
    path_join(path, f.folder, "expected.safetensors");
    if (!config_read(&f.config, f.folder, &err) || !safetensors_open(&f.expected, path, &err))
        die("%s", err.msg);
    f.tokens = fixture_tokens(&f, "tokens");
    f.targets = fixture_tokens(&f, "targets");
    return f;
}

// Reads the weights of a shard as elements of 4 or 8 bytes.
static void fixture_weights(const Fixture* f, const ParamTable* table, const Shard* shard, void* params,
                            int bytes) {
    Error err;
    const CheckpointTensors weights = {params, NULL, NULL, bytes};
    const CheckpointPart part = {table, shard, &weights, NULL};
    if (!checkpoint_read_file(f->folder, CHECKPOINT_MODEL, &part, &err)) die("%s", err.msg);
}

// Reads the n values of an expected tensor; false if the fixture does not have it.
static bool fixture_values(const Fixture* f, const char* prefix, const char* name, double* out, int64_t n) {
    Error err;
    char full[192];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const SafeTensor* t = safetensors_find(&f->expected, full);
    if (!t) return false;
    if (t->count != n) die("%s: '%s' does not have %lld elements", f->name, full, (long long)n);
    if (!safetensors_read(t, out, 8, &err)) die("%s", err.msg);
    return true;
}

static void fixture_close(Fixture* f) {
    free(f->tokens);
    free(f->targets);
    safetensors_close(&f->expected);
}
