/*
--dump FILE: losses, logits and gradients of the first micro-batch in a safetensors file, for comparison with
another implementation. Elements are floats or doubles, like the trainer's numbers:

    loss    [B, T]       of every token; 0 of a target that does not count
    logits  [B, T, V]    unless larger than DUMP_LOGITS_BYTES
    NAME                 gradient of the mean loss, of every trainable tensor

Called by main.h. Errors end the program.
*/
#pragma once

#include "positions.h"
#include "result_file.h"

#define DUMP_LOGITS_BYTES ((int64_t)64 << 20)

// Multiplies n of the trainer's numbers.
static inline void host_scale(const Trainer* trainer, void* numbers, int64_t n, double scale) {
    for (int64_t i = 0; i < n; i++)
        if (trainer->element_bytes == 8)
            ((double*)numbers)[i] *= scale;
        else
            ((float*)numbers)[i] *= (float)scale;
}

typedef struct {
    ResultFile file;
    DataLoader data;
} Dump;

// Before a model is made: checks FILE and opens the data. Free with dump_run.
static inline Dump* dump_open(const Run* run) {
    Dump* d = (Dump*)xcalloc(1, sizeof *d);
    result_open(&d->file, "dump", run->options.dump);
    run_open_data(run, &d->data, run->options.data, 1);
    d->data.options.shuffle = run->options.shuffle == SHUFFLE_TRUE; // before anything is read
    return d;
}

// Computes and writes the file.
static inline void dump_run(Dump* d, const Trainer* trainer, Model* model, const Run* run) {
    const int64_t element_bytes = trainer->element_bytes, B = run->micro_batch, T = run->options.seq_len;
    const int64_t BT = B * T, V = run->config.vocab_size, shape[3] = {B, T, V};
    const SafetensorsDtype dtype = element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    const ParamTable* table = &run->table;
    void* losses = xcalloc((size_t)BT, (size_t)element_bytes);
    void* grads = xcalloc((size_t)table->count, (size_t)element_bytes);
    void* logits =
        BT * V * element_bytes <= DUMP_LOGITS_BYTES ? xcalloc((size_t)(BT * V), (size_t)element_bytes) : NULL;
    trainer->load_batch(model, &d->data);
    trainer->evaluate(model, losses, logits, grads);
    const int64_t targets = BT - d->data.uncounted;
    if (targets == 0) die("--dump: none of the %s of the first batch counts", counted(BT, "target").text);
    if (targets < BT) host_scale(trainer, grads, table->count, (double)BT / (double)targets);
    dataloader_close(&d->data);

    SafeTensor* tensors = (SafeTensor*)xcalloc((size_t)table->num_rows + 2, sizeof *tensors);
    int count = 0;
    tensors[count++] = safetensors_tensor("loss", dtype, 2, shape, losses);
    if (logits) tensors[count++] = safetensors_tensor("logits", dtype, 3, shape, logits);
    for (const Param* p = table->rows; p < table->rows + table->num_rows; p++) {
        const char* grad = (const char*)grads + p->offset * element_bytes;
        if (p->trainable) tensors[count++] = safetensors_tensor(p->name, dtype, p->ndim, p->shape, grad);
    }
    result_put_tensors(&d->file, tensors, count, NULL);

    double loss = 0;
    for (int64_t t = 0; t < BT; t++) loss += host_number(trainer, losses, t);
    printf("%s: mean loss %.6f of %lld x %s\n", run->options.dump, loss / (double)targets, (long long)B,
           counted(T, "token").text);
    free(tensors);
    free(losses);
    free(logits);
    free(grads);
    free(d);
}
