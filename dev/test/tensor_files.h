// Whole tensors and files of them, which the programs read and write in parts.
#pragma once

#include "../../llmc/formats/safetensors.h"

// safetensors_read_range of the whole tensor: out[t->count].
static inline bool safetensors_read(const SafeTensor* t, void* out, int element_bytes, Error* err) {
    return safetensors_read_range(t, 0, t->count, out, element_bytes, err);
}

// Writes a file of these tensors, in this order, through to the disk.
//
// Fails before it creates the file if a shape is invalid or a name occurs twice. On another error the caller
// removes the file. To replace a file safely, write a temporary name and rename it.
static inline bool safetensors_write(const char* path, SafeTensor* tensors, int count, Error* err) {
    size_t header_bytes = 0;
    char* header = safetensors_header(path, tensors, count, NULL, &header_bytes, err);
    if (!header) return false;
    FILE* f = fopen(path, "wb");
    bool ok = f || fail(err, "%s: cannot create: %s", path, strerror(errno));
    if (f) safetensors_print(header, header_bytes, tensors, count, f);
    if (f) ok = flush_and_close(f, path, err);
    free(header);
    return ok;
}
