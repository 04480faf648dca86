/*
llmc/formats/safetensors.h. An accepted file obeys the rules of the format: its tensors have the bytes that
type and shape need, in order, without gap or overlap, up to the last byte of the file. It keeps them when it
is written again.
*/
#include "fuzz.h"
#include "../test/tensor_files.h"

static Error err;

// Requires the rules of the format of a file of these bytes. Reads all data.
static void require_rules(const Safetensors* st, const uint8_t* file, size_t bytes) {
    uint64_t header;
    memcpy(&header, file, sizeof header);
    REQUIRE(header <= bytes - 8 && file[8] == '{', "a header of %llu bytes", (unsigned long long)header);
    size_t at = 8 + header;
    for (int i = 0; i < st->count; i++) {
        const SafeTensor* t = &st->tensors[i];
        __int128 size = (__int128)safetensors_dtypes[t->dtype].size;
        REQUIRE(t->ndim >= 0 && t->ndim <= SAFETENSORS_MAX_DIMS, "%d dimensions", t->ndim);
        for (int k = 0; k < t->ndim; k++) {
            REQUIRE(t->shape[k] >= 0, "a negative size");
            size *= t->shape[k];
        }
        REQUIRE(size == (__int128)t->bytes && t->bytes <= bytes - at, "%zu bytes", t->bytes);
        REQUIRE(t->at == (int64_t)at, "tensor %d is not at byte %zu", i, at);
        void* data = safetensors_bytes(t, &err);
        REQUIRE(data && memcmp(data, file + at, t->bytes) == 0, "tensor %d has other data", i);
        free(data);
        REQUIRE(safetensors_find(st, t->name) == t, "two tensors are called '%s'", t->name);
        at += t->bytes;
    }
    REQUIRE(at == bytes, "%zu bytes belong to no tensor", bytes - at);
}

// Reads a tensor as floats and as doubles: both have the same values.
static void read_values(const SafeTensor* t) {
    float* floats = (float*)xcalloc((size_t)t->count, sizeof(float));
    double* doubles = (double*)xcalloc((size_t)t->count, sizeof(double));
    bool real = t->dtype <= SAFETENSORS_BF16, ok = safetensors_read(t, floats, 4, &err);
    REQUIRE(ok == real && safetensors_read(t, doubles, 8, &err) == real, "%s", err.msg);
    for (int64_t i = 0; i < t->count; i++)
        REQUIRE((float)doubles[i] == floats[i] || doubles[i] != doubles[i], "%g became %g", doubles[i],
                (double)floats[i]);
    free(floats);
    free(doubles);
}

// Writes the tensors and compares what is read back.
static void write_again(const Safetensors* st) {
    const char* path = file_in_memory(1, "", 0);
    Safetensors again;
    SafeTensor* tensors = (SafeTensor*)xcalloc((size_t)st->count, sizeof *tensors);
    for (int i = 0; i < st->count; i++) {
        tensors[i] = st->tensors[i];
        tensors[i].data = safetensors_bytes(&tensors[i], &err);
        REQUIRE(tensors[i].data, "%s", err.msg);
    }
    REQUIRE(safetensors_write(path, tensors, st->count, &err) && safetensors_open(&again, path, &err), "%s",
            err.msg);
    REQUIRE(again.count == st->count, "%d tensors became %d", st->count, again.count);
    for (int i = 0; i < st->count; i++) {
        const SafeTensor *s = &st->tensors[i], *t = &again.tensors[i];
        REQUIRE(strcmp(s->name, t->name) == 0 && s->dtype == t->dtype && s->ndim == t->ndim, "tensor %d", i);
        REQUIRE(memcmp(s->shape, t->shape, sizeof s->shape) == 0 && s->bytes == t->bytes, "tensor %d", i);
        void *before = safetensors_bytes(s, &err), *after = safetensors_bytes(t, &err);
        REQUIRE(before && after && memcmp(before, after, s->bytes) == 0, "the data of tensor %d", i);
        free(before);
        free(after);
        free((void*)(uintptr_t)tensors[i].data);
    }
    safetensors_close(&again);
    free(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    Safetensors st;
    const char* path = file_in_memory(0, data, bytes);
    if (!safetensors_open(&st, path, &err)) {
        require_message(&err, path);
        REQUIRE(!st.tensors && !st.path && st.count == 0, "not empty after an error");
        return 0;
    }
    require_rules(&st, data, bytes);
    for (int i = 0; i < st.count; i++)
        if (st.tensors[i].count <= 1 << 16) read_values(&st.tensors[i]);
    write_again(&st);
    safetensors_close(&st);
    return 0;
}
