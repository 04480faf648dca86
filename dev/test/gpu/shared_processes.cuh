/*
The part of test_sequence.cu whose ranks are processes, connected as GPUs are (peers.cuh), with time slices of one
GPU. So each rank's host decides by itself, from the answers of all, whether a layer has a halo
(llmc/sequence/halo.cuh): ranks that disagree wait for messages that never come, until ranks_run ends them.

    process_body    two ranks: heads exchanged, halos, both in one model
    answers_body    four ranks in one group, and in two: answers that change from pass to pass
    lengths_body    two ranks: passes over shorter sequences than the model has memory for, as --eval of documents
                    has them: with a shorter halo, and without one
*/
#pragma once

#include "shared_halos.cuh"

#define PROCESS_MODEL "fox-pro num_heads=4 hidden_size=256 intermediate_size=72"
enum { PROCESS_PASSES = 3 };

// This process's rank of a group of `ranks`, connected to the others of its group
static Model process_model(World* world, const Batch* batch, int64_t B, int64_t T, int ranks,
                           Recompute recompute) {
    const SequenceGroup group = sequence_group(world->rank, ranks);
    Model model = model_new(&batch->start.config, false, true, 0, 1);
    Floats host(batch->start.params, batch->start.params + model.table.count), zeros(host.size());
    model.sequence = sequence_new(&model.config, &model.table, &group, &attention_functions);
    sequence_open(&model.sequence, world, B, T / ranks, NULL);
    model_allocate_weights(&model, true);
    model_upload(&model, host.data(), zeros.data(), zeros.data());
    model_allocate_activations(&model, B, T / ranks, recompute);
    return model;
}

// Adds to rank 0's result what the others have.
static void sum_results(World* world, Result* result) {
    const size_t bytes = result->grads.size() * sizeof(double);
    double counts[2] = {(double)result->all, (double)result->kept};
    ranks_sum(world, counts, 2);
    result->all = (unsigned long long)counts[0], result->kept = (unsigned long long)counts[1];
    if (world->rank > 0) CHECK(ranks_send(world, 0, result->grads.data(), bytes), "cannot send");
    std::vector<double> others(result->grads.size());
    for (int r = 1; r < world->size && world->rank == 0; r++) {
        CHECK(ranks_receive(world, r, others.data(), bytes), "cannot receive");
        for (size_t i = 0; i < others.size(); i++) result->grads[i] += others[i];
    }
}

// Whether the last pass of a layer had a halo is what all ranks should have answered.
static void check_taken(const char* label, const World* world, Model* model, int64_t l, bool expected) {
    const Layer layer = model_layer(model, &model->pass, l);
    CHECK(halo_taken(&layer) == expected, "%s, rank %d, layer %lld: a halo is %s", label, world->rank,
          (long long)l, expected ? "missing" : "there");
}

// Rank 0 compares the sums of both with what one rank computes. Each `halos`-th layer, from layer 0 on, is to
// have a halo, as its gates forget at once; 0: none. In the other layers a head remembers.
static void check_process(World* world, const char* name, int64_t B, int64_t T, int64_t halos,
                          Recompute recompute) {
    char label[300];
    Batch batch(name, B, T);
    snprintf(label, sizeof label, "%s, --recompute %s, two processes", name,
             option_recompute_names[recompute]);
    if (halos) set_gates(&batch, halos, -3);
    Result alone = {}, first = {};
    if (world->rank == 0) alone = run_alone(&batch, B, T);
    Model model = process_model(world, &batch, B, T, world->size, recompute);
    float* losses = (float*)device_host_alloc((size_t)(B * T) * sizeof(float));
    for (int pass = 0; pass < PROCESS_PASSES; pass++) {
        Result result = {};
        feed(&model, batch.inputs, batch.targets);
        const double begin = seconds_now();
        queue_pass(&model, losses);
        collect(&result, &model, losses);
        if (world->rank == 0) printf("pass %d: %.0f ms\n", pass, 1e3 * (seconds_now() - begin));
        sum_results(world, &result);
        if (world->rank > 0) continue;
        if (pass == 0) compare_results(label, &model, 2, &result, &alone), first = result;
        CHECK(result.grads == first.grads && result.losses == first.losses, "%s, pass %d: other bits", label,
              pass);
    }
    for (int64_t l = 0; l < model.config.num_hidden_layers; l++)
        check_taken(label, world, &model, l, halos && l % halos == 0);
    device_host_free(losses);
    model_free(&model);
}

static void process_body(World* world) {
    device_open(0);
    const int64_t T = 4 * SEQUENCE_CHUNK_TOKENS; // two chunks on each
    check_process(world, PROCESS_MODEL, 2, 512, 0, RECOMPUTE_BLOCK);
    check_process(world, PROCESS_MODEL, 1, T, 0, RECOMPUTE_BLOCK);
    check_process(world, PROCESS_MODEL, 1, T, 1, RECOMPUTE_BLOCK);
    // layers with a halo and without one use the same tensors in turn
    for (Recompute recompute : {RECOMPUTE_NONE, RECOMPUTE_BLOCK})
        check_process(world, PROCESS_MODEL " num_hidden_layers=3", 1, T, 2, recompute);
}

// ----------------------------------------------------------------------------
// answers that change

// Where HALO tokens of a sequence remember: at the end of a rank's tokens, nowhere, or before the halo of
// rank 1
enum { BEFORE_HALO = -2, NOWHERE = -1, PLACES = 6 };

// Makes a head of layer 0 remember at the last token of the vocabulary, and forget at the others, as all other
// gates do everywhere.
static void set_remembering(Batch* batch) {
    const Config* c = &batch->start.config;
    const ParamTable* table = &batch->start.table;
    set_gates(batch, 1, -3);
    for (int r = 0; r < table->num_rows; r++) {
        const Param* p = &table->rows[r];
        double* w = batch->start.params + p->offset;
        const int64_t last = p->count - c->hidden_size; // the last head's, or token's, row
        if (p->kind == P_FGATE_PROJ) // logits of some 32 there; elsewhere of a deviation of 2
            for (int64_t i = 0; i < p->count; i++) w[i] = p->layer == 0 && i >= last ? 0.125 : 0;
        if (p->kind == P_EMBEDDINGS) std::fill(w + last, w + p->count, 1);
    }
}

// The batch's inputs, of which those at `place` remember and no other
static std::vector<int32_t> inputs_of(const Batch* batch, int64_t T, int ranks, int place) {
    const int32_t remembers = (int32_t)batch->start.config.vocab_size - 1;
    const int64_t end = place == BEFORE_HALO ? T / ranks - HALO : (place + 1) * (T / ranks);
    std::vector<int32_t> inputs(batch->inputs, batch->inputs + T);
    std::replace(inputs.begin(), inputs.end(), remembers, 0);
    if (place != NOWHERE) std::fill(inputs.begin() + (end - HALO), inputs.begin() + end, remembers);
    return inputs;
}

// The losses of a pass without gradients, as a validation has it; pinned: on the host
static Floats run_validation(Model* model, const int32_t* inputs, const int32_t* targets, float* pinned) {
    feed_tokens(model, inputs, targets);
    model_forward(model);
    model_loss(model, 0, false, NULL);
    sequence_download_losses(pinned, model->acts.losses, &model->sequence, model->B, model->T, model->stream);
    CUDA_CHECK(cudaDeviceSynchronize());
    return Floats(pinned, pinned + model->B * model->T * model->sequence.heads.group.size);
}

// The passes of a step, by where their tokens remember. Group 0 has these, other groups forget everywhere.
struct AnswersStep {
    int passes, places[2];
};

static const AnswersStep answers_steps[] = {
    {1, {NOWHERE}},                                  // all layers have a halo
    {1, {0}},          {1, {1}},           {1, {2}}, // in layer 0 a rank's tokens do not suffice
    {1, {3}},          {1, {BEFORE_HALO}},           // which tokens nobody has as a halo
    {2, {NOWHERE, 0}}, {2, {0, NOWHERE}},            // two micro-batches
    {1, {NOWHERE}},
};

// A batch, and on rank 0 what one rank computes of it, by place; first: the bits of the shared first step
struct Answers {
    Batch batch;
    int64_t T;
    Result alone[PLACES], first;
    Answers(const World* world, int ranks)
        : batch(PROCESS_MODEL, 1, (int64_t)ranks * SEQUENCE_HALO_LEAST_TOKENS),
          T((int64_t)ranks * SEQUENCE_HALO_LEAST_TOKENS), alone(), first() {
        set_remembering(&batch);
        for (int place = BEFORE_HALO; place < ranks && world->rank == 0; place++)
            alone[place - BEFORE_HALO] =
                run_inputs_alone(&batch, inputs_of(&batch, T, ranks, place).data(), 1, T);
    }
};

// The sums of a step over all groups, by one rank's results. The losses are group 0's last.
static Result step_alone(const Answers* a, const AnswersStep* step, int groups) {
    Result sum = {};
    for (int i = 0; i < step->passes; i++)
        for (int g = groups - 1; g >= 0; g--) {
            const Result* r = &a->alone[(g ? NOWHERE : step->places[i]) - BEFORE_HALO];
            sum.losses = r->losses;
            sum.grads.resize(r->grads.size());
            for (size_t k = 0; k < r->grads.size(); k++) sum.grads[k] += r->grads[k];
            sum.all += r->all, sum.kept += r->kept;
        }
    return sum;
}

// This rank's part of a step: its gradients, and the losses of its last pass
static Result run_step(World* world, Model* model, const Batch* batch, const AnswersStep* step,
                       float* pinned) {
    const int ranks = model->sequence.heads.group.size;
    Result result = {};
    for (int i = 0; i < step->passes; i++) {
        const std::vector<int32_t> inputs =
            inputs_of(batch, model->T * ranks, ranks, world->rank < ranks ? step->places[i] : NOWHERE);
        (i ? feed_tokens : feed)(model, inputs.data(), batch->targets);
        queue_pass(model, pinned);
        CUDA_CHECK(cudaStreamSynchronize(model->stream)); // `inputs` and `pinned` are used again
    }
    collect(&result, model, pinned);
    return result;
}

// Steps whose answers differ from pass to pass, in groups of `ranks`: losses, gradients and blocks are those of
// one rank, and halos are where all ranks of the group say so. Between steps is a validation with other
// answers: it changes no bit, nor does the level of recomputation.
static void check_answers(World* world, Answers* a, int ranks, Recompute recompute) {
    char label[300];
    Model model = process_model(world, &a->batch, 1, a->T, ranks, recompute);
    float* pinned = (float*)device_host_alloc((size_t)a->T * sizeof(float));
    for (const AnswersStep& step : answers_steps) {
        const int first = step.places[0], last = step.places[step.passes - 1],
                  place = world->rank < ranks ? last : NOWHERE, other = place == 0 ? NOWHERE : 0;
        if (first >= ranks) continue;
        snprintf(label, sizeof label, "%d passes, %d to %d, groups of %d, --recompute %s", step.passes, first,
                 last, ranks, option_recompute_names[recompute]);
        Result result = run_step(world, &model, &a->batch, &step, pinned);
        check_taken(label, world, &model, 0, place < 0 || place == ranks - 1);
        check_taken(label, world, &model, 1, true);
        sum_results(world, &result);
        if (world->rank == 0) {
            const Result expected = step_alone(a, &step, world->size / ranks);
            compare_results(label, &model, ranks, &result, &expected);
            if (a->first.grads.empty()) a->first = result;
            const bool same = result.grads == a->first.grads && result.losses == a->first.losses;
            CHECK(same || step.passes > 1 || first != NOWHERE, "%s: other bits", label);
        }
        const std::vector<int32_t> inputs = inputs_of(&a->batch, a->T, ranks, other);
        const Floats losses = run_validation(&model, inputs.data(), a->batch.targets, pinned);
        check_taken(label, world, &model, 0, other == NOWHERE);
        if (world->rank == 0) compare_losses(label, ranks, losses, a->alone[other - BEFORE_HALO].losses);
    }
    device_host_free(pinned);
    model_free(&model);
}

static void answers_body(World* world) {
    device_open(0);
    for (int ranks : {4, 2}) { // one group, and two
        Answers answers(world, ranks);
        for (Recompute recompute : {RECOMPUTE_NONE, RECOMPUTE_BLOCK})
            check_answers(world, &answers, ranks, recompute);
    }
}

// ----------------------------------------------------------------------------
// shorter sequences

static void lengths_body(World* world) {
    device_open(0);
    const int ranks = world->size;
    const int64_t longest = ranks * 512 * HALO; // has a halo of 256 tokens
    const struct {
        int64_t T, halo;
    } shorter[] = {{ranks * SEQUENCE_HALO_LEAST_TOKENS, HALO}, {ranks * SEQUENCE_HALO_LEAST_TOKENS / 2, 0}};
    Batch batch(PROCESS_MODEL, 1, longest);
    set_gates(&batch, 1, -3);
    Result alone[3] = {}, first = {};
    if (world->rank == 0) alone[2] = run_alone(&batch, 1, longest);
    for (int i = 0; i < 2 && world->rank == 0; i++) alone[i] = run_alone(&batch, 1, shorter[i].T);
    Model model = process_model(world, &batch, 1, longest, ranks, RECOMPUTE_NONE);
    const Layer layer = model_layer(&model, &model.pass, 0);
    CHECK(layer_halo(&layer) == 2 * HALO, "a halo of %lld tokens", (long long)layer_halo(&layer));
    float* pinned = (float*)device_host_alloc((size_t)longest * sizeof(float));
    for (int i = -1; i < 2; i++) {
        Result result = {};
        char label[64];
        model.T = model.pass.T = longest / ranks;
        feed(&model, batch.inputs, batch.targets);
        queue_pass(&model, pinned);
        collect(&result, &model, pinned);
        check_taken("the longest", world, &model, 1, true);
        sum_results(world, &result);
        if (world->rank == 0 && i < 0) {
            compare_results("the longest", &model, ranks, &result, &alone[2]);
            first = result;
        }
        CHECK(world->rank > 0 || (result.grads == first.grads && result.losses == first.losses),
              "the longest, pass %d: other bits", i + 2);
        if (i < 0) continue;
        snprintf(label, sizeof label, "%lld tokens", (long long)shorter[i].T);
        model.T = model.pass.T = shorter[i].T / ranks;
        const Floats losses = run_validation(&model, batch.inputs, batch.targets, pinned);
        check_taken(label, world, &model, 1, shorter[i].halo > 0);
        if (world->rank == 0) compare_losses(label, ranks, losses, alone[i].losses);
    }
    device_host_free(pinned);
    model_free(&model);
}
