/*
The weights that a process begins with: those of the checkpoint to resume, of --init, or drawn from the seed.
Called by main.h.
*/
#pragma once

#include "../checkpoint/load.h"
#include "../run/trainer.h"

enum { LOAD_TELLS = 1 << 28 }; // bytes of weights that take a while to read

// Host memory for a rank's shard of weights, and with `moments` of AdamW's.
static inline CheckpointTensors host_tensors_new(const Trainer* trainer, const Run* run, bool moments) {
    const size_t bytes = (size_t)shard_count(&run->shard) * (size_t)trainer->element_bytes;
    char* memory = (char*)trainer->host_alloc((moments ? 3 : 1) * bytes);
    CheckpointTensors t = {memory, moments ? memory + bytes : NULL, moments ? memory + 2 * bytes : NULL,
                           trainer->element_bytes};
    return t;
}

// Collective: fills t with the weights and moments of the checkpoint to resume, with the weights of --init,
// or with weights drawn from the seed; moments are then zero. Fails if the checkpoint is damaged.
static inline bool load_weights(const CheckpointTensors* t, const Run* run, Error* err) {
    const char* init = run->options.init;
    const bool moments = t->m != NULL;
    const CheckpointTensors weights = {t->w, NULL, NULL, t->element_bytes};
    const CheckpointPart part = {&run->table, &run->shard, run_resumed(run) ? t : &weights, run->world};
    const size_t bytes = (size_t)(shard_count(&run->shard) * t->element_bytes);
    memset(t->w, 0, (moments ? 3 : 1) * bytes); // a checkpoint has no moments of what is not trained
    const char* folder = run_resumed(run) ? run->checkpoint : init;
    if (run->mode == RUN_TRAIN && folder && bytes > LOAD_TELLS) printf("reading %s\n", folder);
    if (run_resumed(run)) return checkpoint_load(run->checkpoint, &run->record, &part, err);
    if (!init)
        draw_weights(t->w, t->element_bytes, &run->table, &run->shard, &run->config,
                     (uint64_t)run->options.seed);
    else if (!checkpoint_load(init, NULL, &part, err))
        die("%s", err->msg);
    return true;
}
