/*
--dump: losses, logits and gradients of the first micro-batch as a safetensors file, for comparison with another
implementation:

    loss    [B, T]       of every token
    logits  [B, T, V]    unless larger than DUMP_LOGITS_BYTES
    NAME                 gradient of the mean loss, of every trainable tensor

Elements are floats or doubles, like the trainer's numbers. Called by train.h.
*/
#ifndef LLMC_DUMP_H
#define LLMC_DUMP_H

#include "../formats/safetensors.h"
#include "trainer.h"

#define DUMP_LOGITS_BYTES ((int64_t)64 << 20)

// Number i of a buffer that evaluate filled.
static inline double host_number(const Trainer* trainer, const void* buffer, int64_t i) {
    return trainer->element_bytes == 8 ? ((const double*)buffer)[i] : (double)((const float*)buffer)[i];
}

static inline void dump(const Trainer* trainer, Model* model, const Run* run) {
    Error err;
    DataLoader data;
    SafetensorsWriter w;
    const char* path = run->options.dump;
    const int64_t element_bytes = trainer->element_bytes, B = run->micro_batch, T = run->options.seq_len;
    const int64_t BT = B * T, V = run->config.vocab_size, shape[3] = {B, T, V};
    const SafetensorsDtype dtype = element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    const ParamTable* table = &run->table;
    void* losses = xcalloc((size_t)BT, (size_t)element_bytes);
    void* grads = xcalloc((size_t)table->count, (size_t)element_bytes);
    void* logits =
        BT * V * element_bytes <= DUMP_LOGITS_BYTES ? xcalloc((size_t)(BT * V), (size_t)element_bytes) : NULL;
    run_open_data(run, &data, run->options.data, run->options.shuffle);
    trainer->load_batch(model, &data);
    trainer->evaluate(model, losses, logits, grads);
    dataloader_close(&data);

    safetensors_writer_open(&w, path, &err); // errors of all calls are reported by close
    safetensors_writer_metadata(&w, "format", "pt");
    safetensors_writer_declare(&w, "loss", dtype, 2, shape);
    if (logits) safetensors_writer_declare(&w, "logits", dtype, 3, shape);
    for (const Param* p = table->rows; p < table->rows + table->num_rows; p++)
        if (p->trainable) safetensors_writer_declare(&w, p->name, dtype, p->ndim, p->shape);
    safetensors_writer_begin(&w, &err);
    safetensors_writer_write(&w, losses, (size_t)(BT * element_bytes), &err);
    if (logits) safetensors_writer_write(&w, logits, (size_t)(BT * V * element_bytes), &err);
    for (const Param* p = table->rows; p < table->rows + table->num_rows; p++) {
        const char* grad = (const char*)grads + p->offset * element_bytes;
        if (p->trainable) safetensors_writer_write(&w, grad, (size_t)(p->count * element_bytes), &err);
    }
    if (!safetensors_writer_close(&w, &err)) die("%s", err.msg);

    double loss = 0;
    for (int64_t t = 0; t < BT; t++) loss += host_number(trainer, losses, t);
    printf("%s: mean loss %.6f of %lld x %lld tokens\n", path, loss / (double)BT, (long long)B, (long long)T);
    free(losses);
    free(logits);
    free(grads);
}

#endif // LLMC_DUMP_H
