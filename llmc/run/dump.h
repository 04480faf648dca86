/*
What --dump writes: loss, logits and gradients of one batch, for comparison with another implementation.
*/
#ifndef LLMC_DUMP_H
#define LLMC_DUMP_H

#include "../model/params.h"
#include "../formats/safetensors.h"

#define DUMP_LOGITS_BYTES ((int64_t)64 << 20) // logits are left out where they take more

// Writes a safetensors file: `loss` [B,T], `logits` [B,T,V] unless NULL, and the gradient of every trained
// tensor under its name. Elements are floats or doubles, as element_bytes (4 or 8) says; grads is laid out by
// the table.
static inline bool dump_write(const char* path, const ParamTable* table, int64_t B, int64_t T, int64_t V,
                              const void* losses, const void* logits, const void* grads, int element_bytes,
                              Error* err) {
    SafetensorsWriter w;
    SafetensorsDtype dtype = element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    int64_t shape[3] = {B, T, V};
    safetensors_writer_open(&w, path, err); // an error sticks until the close
    safetensors_writer_metadata(&w, "format", "pt");
    safetensors_writer_declare(&w, "loss", dtype, 2, shape);
    if (logits) safetensors_writer_declare(&w, "logits", dtype, 3, shape);
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        if (p->trainable) safetensors_writer_declare(&w, p->name, dtype, p->ndim, p->shape);
    }
    safetensors_writer_begin(&w, err);
    safetensors_writer_write(&w, losses, (size_t)(B * T * element_bytes), err);
    if (logits) safetensors_writer_write(&w, logits, (size_t)(B * T * V * element_bytes), err);
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        const char* grad = (const char*)grads + p->offset * element_bytes;
        if (p->trainable) safetensors_writer_write(&w, grad, (size_t)(p->count * element_bytes), err);
    }
    return safetensors_writer_close(&w, err);
}

#endif // LLMC_DUMP_H
