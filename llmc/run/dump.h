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
    SafetensorsDtype dtype = d->element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    const int64_t shape[3] = {d->B, d->T, d->V};
    SafeTensor* tensors = (SafeTensor*)xcalloc((size_t)table->num_rows + 2, sizeof *tensors);
    int count = 0;
    tensors[count++] = safetensors_tensor("loss", dtype, 2, shape, d->losses);
    if (d->logits) tensors[count++] = safetensors_tensor("logits", dtype, 3, shape, d->logits);
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        const char* grad = (const char*)d->grads + p->offset * d->element_bytes;
        if (p->trainable) tensors[count++] = safetensors_tensor(p->name, dtype, p->ndim, p->shape, grad);
    }
    bool ok = safetensors_write(path, tensors, count, err);
    free(tensors);
    return ok;
}

#endif // LLMC_DUMP_H
