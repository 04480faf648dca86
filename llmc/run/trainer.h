/*
What a trainer supplies to the run skeleton (train.h): a few facts and the functions of its model.

Order of the calls:

    print_plan                                                    --dry-run
    open -> host_open -> host_close (weights) -> ... -> close     else, where ... is one of

    training    per step: begin_step, (load_batch, add_gradients) x grad_accum_steps, update, and finish_step
                of the oldest step in flight. Where due: host_open and host_close to save, (load_batch,
                evaluate) x n to validate, and as --generate to sample
    --dump      load_batch, evaluate
    --bench     bench
    --generate  decode_open, decode for every token, decode_close

B is run->micro_batch and T is --seq-len. With steps_in_flight N > 0 the work of a step is queued, and
finish_step waits for it when N more steps are queued: the device never waits for the host.
*/
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include "../base/random.h"
#include "../model/shapes.h"
#include "dump.h"
#include "logger.h"
#include "run.h"

// Defined by the trainer: a model with everything that the run's mode needs, and the state of generation.
typedef struct Engine Engine;
typedef struct DecodeState DecodeState;

typedef struct {
    char text[512]; // printed before training and --bench: device and implementation in use; empty: nothing
    double peak_flops; // per second, for MFU; 0: not known
} DeviceInfo;

typedef struct {
    const char* summary;      // of the program, for --help
    int64_t suggested_tokens; // of a micro-batch, without --micro-batch
    int element_bytes;        // of numbers on the host: 4 for float, 8 for double
    int steps_in_flight;      // at most TRAINER_STEPS_IN_FLIGHT

    // Both die where the trainer does not support the run. print_plan calls run_print_plan with the memory
    // plan. open is called with *info zeroed.
    void (*print_plan)(const Run* run);
    Engine* (*open)(const Run* run, DeviceInfo* info);
    void (*close)(Engine* engine);

    // Weights and moments on the host. host_open allocates buffers and, if `read`, copies the model's values
    // to them. host_close, if `write`, copies the buffers' values to the model, and frees them. The CPU
    // trainer uses the model's own buffers.
    CheckpointTensors (*host_open)(Engine* engine, bool read);
    void (*host_close)(Engine* engine, CheckpointTensors* tensors, bool write);

    void (*load_batch)(Engine* engine, DataLoader* data); // next micro-batch [B,T]
    void (*begin_step)(Engine* engine);                   // loss and gradients are zero
    // Adds the loaded batch's loss and gradients, as its share of the mean over step_tokens.
    void (*add_gradients)(Engine* engine, int64_t step_tokens);
    // Gradient norm, clipping to grad_clip (0: none), AdamW; no update where loss or norm is not finite.
    void (*update)(Engine* engine, const AdamWParams* adamw, double grad_clip);
    // Waits for the oldest step in flight and fills the line's loss, grad_norm, num_layers and pruned, which
    // is valid until the next call; step_tokens is filled already. Returns whether loss and norm are finite.
    bool (*finish_step)(Engine* engine, LogStep* line);
    // Name of the first tensor whose gradient, or weight, is not finite; NULL: none.
    const char* (*first_not_finite)(Engine* engine, bool gradients);
    // Forward pass over the loaded batch, and backward pass if out->grads. Fills the buffers that are not
    // NULL.
    void (*evaluate)(Engine* engine, const PassResults* out);

    void (*bench)(Engine* engine, const Run* run); // times and prints --bench steps

    // Generation: a sequence of up to `capacity` tokens. decode appends a token and writes the logits [V] of
    // the next one, unless logits is NULL.
    DecodeState* (*decode_open)(Engine* engine, int64_t capacity);
    void (*decode)(Engine* engine, DecodeState* state, int32_t token, float* logits);
    void (*decode_close)(DecodeState* state);
} Trainer;

enum { TRAINER_STEPS_IN_FLIGHT = 1 };

// For load_batch: reads the next `count` = B T tokens of the data into inputs and targets. Without data
// (NULL) the tokens are random ones of a vocabulary of V.
static inline void batch_read(int32_t* inputs, int32_t* targets, DataLoader* data, int64_t count, int64_t V) {
    Error err;
    if (data) {
        if (!dataloader_next(data, inputs, targets, &err)) die("%s", err.msg);
        return;
    }
    for (int64_t t = 0; t < count; t++) {
        inputs[t] = (int32_t)(random_uniform(0, 0, (uint64_t)t) * (double)V);
        targets[t] = (int32_t)(random_uniform(0, 1, (uint64_t)t) * (double)V);
    }
}

#endif // LLMC_TRAINER_H
