/*
Which models the GPU's kernels take, without CUDA: for the GPU trainer, and for plans of train_fox for a GPU.
What depends on the kernels of one mixer is in its own check (Mixer in llmc/layers/layer.cuh).
*/
#pragma once

#include "../config/config.h"
#include "shapes.h"

// Dies where cuDNN's attention does not know the model, or ranks share its sequences.
static inline void gpu_check_cudnn(const Config* c, int64_t sequence_ranks) {
    if (!config_has_attention(c))
        die("--attention cudnn: %s has no attention", config_class(c)->architecture);
    if (config_is_stack(c)) die("--attention cudnn: is for models without layer_types: use --attention fox");
    if (config_has_gate(c))
        die("--attention cudnn: cuDNN has no forget gate: use --attention fox, or a transformer- model");
    if (c->window_size > 0)
        die("--attention cudnn: these kernels have no window: use --attention fox, or --set window_size=0");
    if (c->document_reset)
        die("--attention cudnn: these kernels have no document_reset: use --attention fox");
    if (sequence_ranks > 1)
        die("--attention cudnn: these kernels have no --sequence-ranks: use --attention fox");
}

// Dies where the kernels do not take the model's widths, or cuDNN's attention, if `cudnn`, the model.
static inline void gpu_check_model(const Config* c, bool cudnn, int64_t sequence_ranks) {
    if (c->hidden_size > GPU_MAX_CHANNELS || c->hidden_size % 8 != 0 || config_mlp_size(c) % 8 != 0)
        die("on the GPU hidden_size, at most %d, and intermediate_size are multiples of 8, not %lld and %lld",
            GPU_MAX_CHANNELS, (long long)c->hidden_size, (long long)config_mlp_size(c));
    if (cudnn) gpu_check_cudnn(c, sequence_ranks);
}
