/*
What a trainer supplies to the run skeleton (main.h, train.h): a few facts and the functions of its model.

Order of the calls:

    print_plan                                                    --dry-run
    open -> upload (weights) -> ... -> close                      else, where ... is one of

    training    per step: begin_step, (load_batch, add_gradients) x n, update, and finish_step of the oldest
                step in flight. Where due: download to save, as --eval to validate, as
                --requests to evaluate, and as --generate to sample
    --eval      (load_batch, queue_losses) x n, and finish_losses of the oldest batch in flight;
                pruning_counts
    --dump      load_batch, evaluate
    --bench     as training, with mark and elapsed; bench_print; as --eval; on one rank also as --generate
    --maps      visit_heads
    --generate, --requests  cache_new, extend for every pass, cache_free (llmc/serve/engine.h)

With several ranks open, upload and update are collective: every rank calls them, in the same order. n, the
rank's micro-batches of a step, may differ from rank to rank; a step ends with the sums over all ranks.

B is run->micro_batch and T is --seq-len. With steps_in_flight N > 0 the work of a step, or of a batch of
--eval, is queued, and finish_step or finish_losses waits for it when N more are queued: the device never
waits for the host.
*/
#pragma once

#include "../base/random.h"
#include "../model/extension.h"
#include "../model/shapes.h"
#include "../checkpoint/format.h"
#include "logger.h"
#include "shares.h"

// Defined by the trainer: a model with everything that the run's mode needs.
typedef struct Model Model;

// Does no target of a step count? Its gradient is then 0, as it should be.
static inline bool step_is_empty(const StepVotes* votes) { return votes->targets == 0 && votes->tokens > 0; }

// The factor from sums that are weighted by 1 / tokens to the mean over the targets that count: 1 if all do.
static inline double step_scale(const StepVotes* votes) {
    if (votes->targets == votes->tokens) return 1;
    return step_is_empty(votes) ? 0 : votes->tokens / votes->targets;
}

// May a step of this loss and gradient norm change the weights? Both trainers answer alike. A norm of 0 means
// that the weights do not matter to the loss: nothing would be learnt, and no later step would notice. The
// square of a gradient above STEP_MAX_NORM overflows in a second moment, which is a float.
#define STEP_MAX_NORM 1e19
static inline bool step_is_valid(double loss, double norm, const StepVotes* votes) {
    return isfinite(loss) && (norm > 0 || step_is_empty(votes)) && norm < STEP_MAX_NORM;
}

// What an optimizer step counts of the documents of its batches: no pairs where the model has no attention.
static inline DocumentCount run_documents(const Run* run, const DocumentCount* batches) {
    DocumentCount count = *batches;
    if (!config_has_attention(&run->config)) count.pairs = count.seen = 0;
    return count;
}

// What a finished step pruned of all layers, from what it pruned of each.
static inline void step_pruned(LogStep* line, const Run* run) {
    if (line->num_layers > 0)
        line->pruned_of_all = config_pruned(&run->config, run->options.seq_len, line->pruned);
}

// A layer's tensors on the host, of one sequence of T tokens.
typedef struct {
    const void *q, *k;      // [T, NH dh] and [T, KVH dh] of the host's numbers, as attention reads them
    const double* cum_logf; // [NH, T]; NULL: no gate
    int64_t window;         // keys that a query sees; 0: all
    const double* limits;   // [NH] U >= |q k| / sqrt(dh), by which it is pruned; NAN: not known
} LayerHeads;

// Gets layer l of those with attention, whose tensors are valid during the call.
typedef void (*HeadVisitor)(void* context, int64_t l, const LayerHeads* layer);

// Marks of --bench: the first timed step's begin; a step's begin, end of its passes and end, for steps of
// even and of odd number.
enum { MARK_FIRST, MARK_STEP, MARK_PASSES, MARK_END, MARKS_A_STEP = 3, NUM_MARKS = 1 + 2 * MARKS_A_STEP };

typedef struct {
    const char* summary;      // of the program, for --help
    const char* built_with;   // libraries, and processors that it has code for, for --version
    int64_t suggested_tokens; // of a micro-batch, without --micro-batch
    int64_t pass_tokens;      // of a pass of inference, at most
    int64_t pass_steps;       // of an extension, at most
    int element_bytes;        // of numbers on the host: 4 for float, 8 for double
    int weight_bytes;         // of a weight that inference reads
    int steps_in_flight;      // 0 or 1
    int (*threads)(void);     // that a rank computes with; NULL: a rank is a GPU

    // Both die where the trainer does not support the run. print_plan prints by llmc/plan/plan.h. open fills
    // run->device, peak_flops and planned_seconds.
    void (*print_plan)(const Run* run);
    Model* (*open)(Run* run);
    void (*close)(Model* model);

    // Host memory that is copied to and from the device at full speed; dies where there is none.
    void* (*host_alloc)(size_t bytes);
    void (*host_free)(void* memory);
    // The rank's shard of weights and moments: from the model to the host, and back, where all ranks then get
    // the weights. m and v are NULL without training.
    void (*download)(Model* model, const CheckpointTensors* to);
    void (*upload)(Model* model, const CheckpointTensors* from);
    // What trainer.json records of the model as "fp8", to be freed; NULL: nothing. May itself be NULL.
    char* (*fp8_record)(Model* model);

    // Loads the next micro-batch [B,T], where T is the data's length of sequences, at most --seq-len. Without
    // data (NULL): random tokens, T as before.
    void (*load_batch)(Model* model, DataLoader* data);
    void (*begin_step)(Model* model); // loss and gradients are zero
    // Adds the loaded batch's loss and gradients, as its share of the mean over step_tokens. `last`: of this
    // rank's in the step.
    void (*add_gradients)(Model* model, int64_t step_tokens, bool last);
    // Gradient norm, clipping to grad_clip (0: none), AdamW; no update unless step_is_valid, nor where
    // norm_is_spike. The votes of all ranks are summed; loss and gradient become those of the mean over the
    // targets that count.
    void (*update)(Model* model, const AdamWParams* adamw, double grad_clip, const StepVotes* votes);
    // Waits for the oldest step in flight and fills the line's loss, grad_norm, own_finite, votes,
    // num_layers, pruned and, with several ranks, times, which are valid until the next call; step_tokens is
    // filled already.
    void (*finish_step)(Model* model, LogStep* line);
    // Name of the first tensor whose gradient, or weight, is not finite on this rank; NULL: none.
    const char* (*first_not_finite)(Model* model, bool gradients);
    // Forward pass without gradients over the loaded batch. finish_losses waits for the oldest one in flight
    // and returns its losses [B,T], of the host's numbers, which are valid until the next queue_losses; until
    // then the caller may change them. Their signs are marks: positions_add takes them off.
    void (*queue_losses)(Model* model);
    void* (*finish_losses)(Model* model);
    // Fills counts [layers with attention, 2] with the pairs of attention blocks in all, and those computed,
    // of all forward passes of --eval. False: nothing is pruned. NULL: the trainer does not prune.
    bool (*pruning_counts)(Model* model, double* counts);
    // For --dump. Forward pass over the loaded batch: losses [B,T] and logits [B,T,V]. Then, unless grads is
    // NULL, the backward pass: gradients of the mean loss, laid out by the parameter table. In the host's
    // numbers, float or double; logits may be NULL. Targets that do not count are part of the mean, with 0.
    void (*evaluate)(Model* model, void* losses, void* logits, void* grads);

    // Forward pass over one sequence of T tokens, where B is 1: calls visit for every layer with attention,
    // in order.
    void (*visit_heads)(Model* model, const int32_t* tokens, HeadVisitor visit, void* context);

    // --bench: mark notes the time when all work so far has ended; elapsed waits for mark `to` and returns
    // the milliseconds from `from` to it. bench_print prints what only the trainer knows, after the timed
    // steps, of which `last` is the last; NULL: nothing.
    void (*mark)(Model* model, int mark);
    double (*elapsed)(Model* model, int from, int to);
    void (*bench_print)(Model* model, const Run* run, const LogStep* last);

    // Inference: a cache of sequences and passes over it, as llmc/model/extension.h says. cache_new
    // returns NULL where the device has no memory for it. extend writes scores [steps, outputs] and, unless
    // that is NULL, logits [outputs, V] of one step. cache_fork copies a slot's state of fixed size to
    // another slot, which then has the same tokens. cache_forgotten fills first [slots, heads], the pages at
    // the beginning of each head that no later row needs. A recurrent mixer has no pages: cache_fork copies
    // all of a slot.
    int64_t (*page_bytes)(const Config* config); // of one page
    Cache* (*cache_new)(Model* model, const CacheSizes* sizes);
    void (*extend)(Cache* cache, const Extension* e, RowScore* scores, float* logits);
    void (*cache_fork)(Cache* cache, int64_t from, int64_t to);
    void (*cache_copy_page)(Cache* cache, int32_t from, int32_t to);
    void (*cache_forgotten)(Cache* cache, int32_t* first);
    void (*cache_free)(Cache* cache);
} Trainer;

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
