/*
The file that --dump writes: losses, logits and gradients of one micro-batch, for comparison with another
implementation. It is a safetensors file:

    loss    [B, T]       of every token
    logits  [B, T, V]    unless larger than DUMP_LOGITS_BYTES
    NAME                 gradient of the mean loss, of every trainable tensor

Elements are floats or doubles, like the trainer's numbers. Called by train.h.
*/
#ifndef LLMC_DUMP_H
#define LLMC_DUMP_H

#include "../formats/safetensors.h"
#include "../model/params.h"

#define DUMP_LOGITS_BYTES ((int64_t)64 << 20)

// What a forward and a backward pass over a micro-batch compute, on the host.
typedef struct {
    int64_t B, T, V;
    int element_bytes; // 4: float, 8: double
    void* losses;      // [B,T]
    void* logits;      // [B,T,V]; NULL: not wanted
    void* grads;       // of the mean loss, laid out by the parameter table; NULL: no backward pass
} PassResults;

static inline bool dump_write(const char* path, const ParamTable* table, const PassResults* d, Error* err) {
    SafetensorsWriter w;
    SafetensorsDtype dtype = d->element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    const int64_t shape[3] = {d->B, d->T, d->V}, loss_bytes = d->B * d->T * d->element_bytes;
    safetensors_writer_open(&w, path, err); // errors of all calls are reported by close
    safetensors_writer_metadata(&w, "format", "pt");
    safetensors_writer_declare(&w, "loss", dtype, 2, shape);
    if (d->logits) safetensors_writer_declare(&w, "logits", dtype, 3, shape);
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        if (p->trainable) safetensors_writer_declare(&w, p->name, dtype, p->ndim, p->shape);
    }
    safetensors_writer_begin(&w, err);
    safetensors_writer_write(&w, d->losses, (size_t)loss_bytes, err);
    if (d->logits) safetensors_writer_write(&w, d->logits, (size_t)(loss_bytes * d->V), err);
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        const char* grad = (const char*)d->grads + p->offset * d->element_bytes;
        if (p->trainable) safetensors_writer_write(&w, grad, (size_t)(p->count * d->element_bytes), err);
    }
    return safetensors_writer_close(&w, err);
}

#endif // LLMC_DUMP_H
