/*
Ranks that share sequences, for test_sequence.cu: models of several ranks in one process, which write to one
another's buffers, what they compute of one batch, and how far that is from what one rank computes.

The work of ranks in one process is queued rank after rank before the host waits for any of it. So nothing may
wait between: a first pass, in which messages do not wait, loads the kernels, and each stream has a hardware
queue of its own.
*/
#pragma once

#include "../ranks.h"

#include "../trainer/trainers.cuh"

#include <vector>

typedef std::vector<float> Floats;

// Limits of ||shared - alone|| / ||alone||, for losses and for a tensor's gradient: both compute the same
// function in bf16, rounded in another order. A gradient's error is relative to at least 1% of the whole
// model's norm.
#define LOSS_LIMIT     8e-3
#define GRADIENT_LIMIT 5e-2

enum { RANKS_MOST = 4, SECONDS_MOST = 900 };

static int64_t always_halo; // of the models to come: SequenceHalos.always

static double worst[2];
static char worst_where[2][256];

// ----------------------------------------------------------------------------
// models

// What ranks compute of one batch: losses of whole sequences, the sum of gradients, and of the counts of
// blocks.
struct Result {
    Floats losses;
    std::vector<double> grads;
    unsigned long long all, kept;
};

// A model of one of the ranks of `group`, which is not connected.
static Model rank_model(const Config* c, const double* params, int64_t B, int64_t T, SequenceGroup group,
                        Recompute recompute) {
    Model model = model_new(c, false, true, 0, 1);
    Floats host(params, params + model.table.count), zeros((size_t)model.table.count);
    model.sequence = sequence_new(c, &model.table, &group, &attention_functions);
    model.sequence.halos.always = always_halo;
    if (group.size > 1) sequence_allocate(&model.sequence);
    model_allocate_weights(&model, true);
    model_upload(&model, host.data(), zeros.data(), zeros.data());
    model_allocate_activations(&model, B, T / group.size, recompute);
    return model;
}

// Queues the copy of a pass's tokens.
static void feed_tokens(Model* model, const int32_t* inputs, const int32_t* targets) {
    const SequenceGroup* g = &model->sequence.heads.group;
    const int64_t all = model->B * model->T * g->size;
    sequence_upload(model->acts.inputs, inputs, g, model->B, model->T, model->stream);
    sequence_upload(model->acts.targets, targets, g, model->B, model->T, model->stream);
    if (model->acts.all_inputs)
        CUDA_CHECK(cudaMemcpyAsync(model->acts.all_inputs, inputs, (size_t)all * sizeof(int32_t),
                                   cudaMemcpyHostToDevice, model->stream));
}

// Begins a step with its first pass's tokens.
static void feed(Model* model, const int32_t* inputs, const int32_t* targets) {
    feed_tokens(model, inputs, targets);
    CUDA_CHECK(cudaMemsetAsync(model->grads, 0, (size_t)model->table.count * sizeof(float), model->stream));
    model_begin_step(model);
    CUDA_CHECK(cudaStreamSynchronize(model->stream));
}

// Queues a pass; losses, pinned, get those of whole sequences.
static void queue_pass(Model* model, float* losses) {
    const int64_t tokens = model->B * model->T * model->sequence.heads.group.size;
    model_forward(model);
    model_loss(model, (float)(1 / (double)tokens), true, NULL);
    model_backward(model);
    sequence_download_losses(losses, model->acts.losses, &model->sequence, model->B, model->T, model->stream);
}

// Adds what a rank has to the result.
static void collect(Result* r, Model* model, const float* losses) {
    const int64_t count = model->table.count, L = model->config.num_hidden_layers;
    CUDA_CHECK(cudaDeviceSynchronize());
    Floats grads((size_t)count);
    device_download(grads.data(), model->grads, count * (int64_t)sizeof(float));
    r->losses.assign(losses, losses + model->B * model->T * model->sequence.heads.group.size);
    r->grads.resize((size_t)count);
    for (size_t i = 0; i < grads.size(); i++) r->grads[i] += (double)grads[i];
    std::vector<PruningCount> counts((size_t)L);
    if (!model_pruning(model)) return;
    device_download(counts.data(), model_pruning(model), L * (int64_t)sizeof(PruningCount));
    for (const PruningCount& n : counts) r->all += n.all, r->kept += n.kept;
}

static Result run_ranks(Model* models, int ranks, const int32_t* inputs, const int32_t* targets) {
    Result result = {};
    float* losses[RANKS_MOST];
    for (int r = 0; r < ranks; r++) {
        feed(&models[r], inputs, targets);
        losses[r] = (float*)device_host_alloc((size_t)(models[r].B * models[r].T * ranks) * sizeof(float));
    }
    for (int r = 0; r < ranks; r++) queue_pass(&models[r], losses[r]);
    for (int r = 0; r < ranks; r++) {
        collect(&result, &models[r], losses[r]);
        CHECK(memcmp(losses[r], losses[0], result.losses.size() * sizeof(float)) == 0,
              "rank %d has other losses", r);
    }
    for (int r = 0; r < ranks; r++) device_host_free(losses[r]);
    return result;
}

// ----------------------------------------------------------------------------
// ranks of one process

// A pass of every rank alone, in which no message waits for another rank, as if all had arrived and was read:
// it loads the kernels. A pass lowers the counters that it reaches to its messages' numbers, so they are set
// before each one of these, and to 0 behind it.
static void load_kernels(Model* models, int ranks, const int32_t* tokens) {
    float* losses = (float*)device_host_alloc((size_t)(models[0].B * models[0].T * ranks) * sizeof(float));
    auto set_counters = [&](int byte) {
        CUDA_CHECK(cudaDeviceSynchronize());
        for (int r = 0; r < ranks; r++) {
            Peers* peers = &models[r].sequence.exchange.peers;
            CUDA_CHECK(cudaMemset(peers->memory[r], byte, peers_header_bytes(ranks)));
            peers->messages = 0;
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    };
    set_counters(0x3F);
    for (int r = 0; r < ranks; r++) {
        feed(&models[r], tokens, tokens);
        queue_pass(&models[r], losses);
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    set_counters(0);
    device_host_free(losses);
}

// Connects models: each has the others' memory, which is on the same GPU.
static void connect(Model* models, int ranks, const int32_t* tokens) {
    const int64_t B = models[0].B, T = models[0].T;
    const int64_t bytes = sequence_message_bytes(B, T);
    for (int r = 0; r < ranks; r++) {
        SequenceExchange* e = &models[r].sequence.exchange;
        e->chunks = B == 1 && T >= 4 * SEQUENCE_CHUNK_ALIGN ? 3 : 1; // more than so few tokens have
        e->peers = peers_new(0, r, ranks, bytes, peers_bytes(ranks, bytes));
        CUDA_CHECK(cudaMemset(e->peers.memory[r], 0, peers_bytes(ranks, bytes)));
    }
    const Activations* table = &models[0].pass.tables[PASS_MIXER];
    for (int r = 0; r < ranks; r++) {
        Peers* peers = &models[r].sequence.exchange.peers;
        for (int other = 0; other < ranks; other++)
            peers->memory[other] = models[other].sequence.exchange.peers.memory[other];
        for (int i = 0; i < table->count; i++) {
            if (!table->rows[i].data) continue;
            PeersTensor* t = peers_add(peers, models[r].pass.tables[PASS_MIXER].rows[i].data,
                                       activations_row_bytes(table, i, models[r].config.num_hidden_layers));
            for (int other = 0; other < ranks; other++)
                t->mapped[other] = (char*)models[other].pass.tables[PASS_MIXER].rows[i].data;
        }
    }
    load_kernels(models, ranks, tokens);
}

static void free_models(Model* models, int ranks) {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int r = 0; r < ranks; r++) {
        if (models[r].sequence.heads.group.size > 1) {
            Peers* peers = &models[r].sequence.exchange.peers;
            CUDA_CHECK(cudaFree(peers->memory[r]));
            for (int i = 0; i < peers->num_tensors; i++) free(peers->tensors[i].mapped);
            free(peers->memory);
        }
        model_free(&models[r]);
    }
}

static double difference(const double* a, const double* b, int64_t n, double least) {
    double squares = 0, norm = norm_of(b, n);
    for (int64_t i = 0; i < n; i++) squares += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(squares) / (norm > least ? norm : least);
}

static void check_near(int which, double error, const char* model, int ranks, const char* tensor) {
    const double limit = which ? GRADIENT_LIMIT : LOSS_LIMIT;
    CHECK(error <= limit, "%s, %d ranks: %s is off by %.2e, more than %.2e", model, ranks, tensor, error,
          limit);
    if (error <= worst[which]) return;
    worst[which] = error;
    snprintf(worst_where[which], sizeof worst_where[which], "%s of %s, %d ranks", tensor, model, ranks);
}

static void compare_losses(const char* name, int ranks, const Floats& got, const Floats& alone) {
    std::vector<double> a(got.begin(), got.end()), b(alone.begin(), alone.end());
    for (double& x : a) x = fabs(x); // their signs are marks
    for (double& x : b) x = fabs(x);
    check_near(0, difference(a.data(), b.data(), (int64_t)a.size(), 0), name, ranks, "the loss");
}

static void compare_results(const char* name, const Model* model, int ranks, const Result* got,
                            const Result* alone) {
    compare_losses(name, ranks, got->losses, alone->losses);
    const double least = 1e-2 * norm_of(alone->grads.data(), model->table.count);
    for (int r = 0; r < model->table.num_rows; r++) {
        const Param* p = &model->table.rows[r];
        check_near(
            1, difference(&got->grads[(size_t)p->offset], &alone->grads[(size_t)p->offset], p->count, least),
            name, ranks, p->name);
    }
    const double kept = alone->kept > 0 ? (double)got->kept / (double)alone->kept : 1;
    CHECK(got->all == alone->all && kept > 0.95 && kept < 1.05,
          "%s, %d ranks: %llu of %llu blocks were computed, by one rank %llu of %llu", name, ranks, got->kept,
          got->all, alone->kept, alone->all);
}

// A batch of random tokens.
struct Batch {
    cpu::Model start;
    int32_t *inputs, *targets;
    Batch(const char* name, int64_t B, int64_t T) : start(cpu::variant_model(name, 1, 1)) {
        inputs = cpu::random_tokens(&start, B * T, 0), targets = cpu::random_tokens(&start, B * T, 1);
    }
    ~Batch() {
        free(inputs);
        free(targets);
        cpu::model_free(&start);
    }
};

// The batch's model with other inputs
static Result run_inputs_alone(const Batch* batch, const int32_t* inputs, int64_t B, int64_t T) {
    Model alone =
        rank_model(&batch->start.config, batch->start.params, B, T, sequence_group(0, 1), RECOMPUTE_NONE);
    Result result = run_ranks(&alone, 1, inputs, batch->targets);
    free_models(&alone, 1);
    return result;
}

static Result run_alone(const Batch* batch, int64_t B, int64_t T) {
    return run_inputs_alone(batch, batch->inputs, B, T);
}
