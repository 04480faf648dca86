/*
Exchange of gradients and weights between GPUs (ZeRO stage 1), bucket by bucket, on a stream of its own that
overlaps the passes. Each rank has one part of every bucket (shard.h).

    passes of a step     forward 0 .. n, loss, backward n .. 0, and the next step's forward 0 .. n
                            bucket b complete |                    ^ wait for bucket b
    this stream                               reduce-scatter b  all-gather b
    update                                         norm, AdamW of the rank's part of b

    buckets      0: embedding; 1 to L: layers; n = L + 1: final norm and lm_head
    gradients    fp32 [table.count]   reduced in place: the rank's part of a bucket becomes the sum over ranks
    weights      bf16 [table.count]   gathered in place, with those that kernels also read in fp32

Invariants, each with the line that keeps it:

 1. A bucket is reduced after its gradient is complete.        event `ready` in exchange_reduce
 2. It is complete only as a whole layer: the padded GEMM of   params_begin_bucket (mixers.h): a layer is a
    the fused projection's weight gradient reads and rewrites  bucket
    gradients behind it, in the same layer.
 3. The update reads the sums of all buckets.                  event `reduced` in exchange_finish_reduce
 4. The next step adds to gradients that are 0.                AdamW zeroes the rank's part, the memsets in
                                                               exchange_reduce the others, before `reduced`
 5. A bucket is gathered after its AdamW.                      event `updated` in exchange_gather
 6. The next forward pass reads a bucket after its all-gather. event `gathered` in exchange_await
 7. A captured forward pass waits at every launch.             cudaEventWaitExternal in exchange_await
 8. All ranks issue the same collectives in the same order.    the trainer's step depends on options and votes
                                                               alone (StepVotes)

Performance: NCCL's kernels take SMs from GEMMs, which then need a second wave; copy engines take none. On one
host copy engines move the gradients (peers.cuh), and the kernel that squares them for the norm sums the
ranks' parts; NCCL moves the weights by copy engines too, in memory that it has allocated (exchange_alloc). A
backward pass that reduces is several CUDA graphs with the reduce-scatters between them: one graph would block
this stream's hardware queue for 80 ms.

Called by the GPU trainer with several ranks. An error of CUDA or NCCL ends the program with a message, as
does exchange_open in a build without USE_NCCL. A rank that never comes is found by the watch
(llmc/ranks/watch.h).
*/
#pragma once

#include "../cuda/device.cuh"
#include "../layers/global_norm.cuh"
#include "../model/shard.h"
#include "../ranks/world.h"
#include "peers.cuh"
#ifdef USE_NCCL
#include <nccl.h>
#else
typedef void* ncclComm_t;
#endif

// Clock of a step's main stream, on the device, in ns: begun: start of the step; since: start of the present
// wait; waited: sum of the waits for other ranks
typedef struct {
    unsigned long long begun, since, waited;
} StepClock;

// Events of a bucket in the timeline.
enum {
    BUCKET_READY,     // the gradient is complete
    BUCKET_REDUCING,  // the reduce-scatter begins
    BUCKET_REDUCED,   // and ends
    BUCKET_UPDATED,   // AdamW has written the rank's part of the weights
    BUCKET_GATHERING, // the all-gather begins
    BUCKET_GATHERED,  // and ends
    BUCKET_NEEDED,    // the forward pass begins to wait for the weights
    NUM_BUCKET_TIMES
};

typedef struct {
    cudaEvent_t ready, updated, gathered;
    cudaEvent_t times[NUM_BUCKET_TIMES]; // of the last step, if Exchange.timeline
} BucketEvents;

typedef struct {
    World* world;
    Shard shard;
    const int64_t* fp32_begin; // [num_buckets + 1] first element of each bucket's weights in fp32
    ncclComm_t comm;
    Peers peers; // size 0: NCCL reduces the gradients
    cudaStream_t stream;
    cudaEvent_t reduced; // all buckets are reduced
    BucketEvents* buckets;
    StepClock* clock; // on the device
    RankTime* times;  // [size] on the device, each rank's, after exchange_sums
    bool timeline;    // record the buckets' times
} Exchange;

// ----------------------------------------------------------------------------
// NCCL

#ifdef USE_NCCL
static inline void nccl_check(ncclResult_t result, const char* call, const char* file, int line) {
    if (result != ncclSuccess)
        die("%s:%d: %s: %s: %s; NCCL_DEBUG=INFO tells more", file, line, call, ncclGetErrorString(result),
            ncclGetLastError(NULL));
}
#define NCCL_CHECK(call) nccl_check(call, #call, __FILE__, __LINE__)

// Connects the ranks' GPUs.
static inline ncclComm_t nccl_open(World* world) {
    ncclUniqueId id;
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (world->rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    world_broadcast(world, &id, sizeof id);
    watch_allow(world, 120);
#ifdef NCCL_CTA_POLICY_ZERO // since 2.28
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
    NCCL_CHECK(ncclCommInitRankConfig(&comm, world->size, id, world->rank, &config));
    return comm;
}

static inline void nccl_close(ncclComm_t comm) { NCCL_CHECK(ncclCommDestroy(comm)); }

// Allocates memory that the GPUs of a host can map, where they support it.
static inline void* nccl_alloc(ncclComm_t comm, size_t bytes) {
    void* memory;
    NCCL_CHECK(ncclMemAlloc(&memory, bytes));
#ifdef NCCL_WIN_COLL_SYMMETRIC // since 2.27
    ncclWindow_t window;       // goes with the communicator
    NCCL_CHECK(ncclCommWindowRegister(comm, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
#else
    (void)comm;
#endif
    return memory;
}
static inline void nccl_free(void* memory) { NCCL_CHECK(ncclMemFree(memory)); }

// Ends the program if the network or a rank has failed; the watch then names the rank.
static inline void nccl_check_network(ncclComm_t comm, World* world) {
    ncclResult_t state;
    NCCL_CHECK(ncclCommGetAsyncError(comm, &state));
    if (state == ncclSuccess || state == ncclInProgress) return;
    world_await_reason(world);
    nccl_check(state, "the communicator", __FILE__, __LINE__);
}

// Operations between nccl_group_begin and nccl_group_end are issued as one.
static inline void nccl_group_begin(void) { NCCL_CHECK(ncclGroupStart()); }
static inline void nccl_group_end(void) { NCCL_CHECK(ncclGroupEnd()); }

// out[count] = this rank's part of the sum over ranks of in[ranks * count].
static inline void nccl_reduce_scatter(const Exchange* e, float* out, const float* in, int64_t count) {
    NCCL_CHECK(ncclReduceScatter(in, out, (size_t)count, ncclFloat, ncclSum, e->comm, e->stream));
}

// out[ranks * count] = all ranks' in[count].
static inline void nccl_all_gather(const Exchange* e, bf16* out, const bf16* in, int64_t count) {
    NCCL_CHECK(ncclAllGather(in, out, (size_t)count, ncclBfloat16, e->comm, e->stream));
}

// out[count] = sum over ranks of in[count].
static inline void nccl_sum(const Exchange* e, double* out, const double* in, int64_t n,
                            cudaStream_t stream) {
    NCCL_CHECK(ncclAllReduce(in, out, (size_t)n, ncclDouble, ncclSum, e->comm, stream));
}
static inline void nccl_sum(const Exchange* e, float* out, const float* in, int64_t n, cudaStream_t stream) {
    NCCL_CHECK(ncclAllReduce(in, out, (size_t)n, ncclFloat, ncclSum, e->comm, stream));
}
static inline void nccl_sum(const Exchange* e, unsigned long long* out, const unsigned long long* in,
                            int64_t n, cudaStream_t stream) {
    NCCL_CHECK(ncclAllReduce(in, out, (size_t)n, ncclUint64, ncclSum, e->comm, stream));
}
static inline void nccl_max(const Exchange* e, uint32_t* x, int64_t n, cudaStream_t stream) {
    NCCL_CHECK(ncclAllReduce(x, x, (size_t)n, ncclUint32, ncclMax, e->comm, stream));
}
#else
static inline ncclComm_t nccl_open(World* world) {
    die("started as rank %d of %d, but this build has no NCCL: install it and rebuild (USE_NCCL=1)",
        world->rank, world->size);
}
// Not reached: nccl_open died.
static inline void nccl_close(ncclComm_t) {}
static inline void* nccl_alloc(ncclComm_t, size_t) { return NULL; }
static inline void nccl_free(void*) {}
static inline void nccl_check_network(ncclComm_t, World*) {}
static inline void nccl_group_begin(void) {}
static inline void nccl_group_end(void) {}
static inline void nccl_reduce_scatter(const Exchange*, float*, const float*, int64_t) {}
static inline void nccl_all_gather(const Exchange*, bf16*, const bf16*, int64_t) {}
template <class T> static inline void nccl_sum(const Exchange*, T*, const T*, int64_t, cudaStream_t) {}
static inline void nccl_max(const Exchange*, uint32_t*, int64_t, cudaStream_t) {}
#endif

// ----------------------------------------------------------------------------
// the clock of the main stream

__global__ static void clock_begin_kernel(StepClock* clock) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(clock->begun));
    clock->waited = 0;
}

// Reads the clock before the stream waits for an event, and after it (over).
__global__ static void clock_wait_kernel(StepClock* clock, bool over) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (over)
        clock->waited += now - clock->since;
    else
        clock->since = now;
}

// Writes times[rank] of the step up to now. attention: sum of the odd-numbered counters of n, the blocks
// kept.
__global__ static void clock_end_kernel(RankTime* times, int rank, const StepClock* clock,
                                        const unsigned long long* counters, int64_t n) {
    unsigned long long now, kept = 0;
    for (int64_t i = 1; i < n; i += 2) kept += counters[i];
    times[rank].attention = (double)kept;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    times[rank].waiting = 1e-9 * (double)clock->waited;
    times[rank].computing = 1e-9 * (double)(now - clock->begun - clock->waited);
}

// Makes the main stream wait for the event, and the clock count the wait. flags: cudaStreamWaitEvent's.
static inline void exchange_wait(const Exchange* e, cudaEvent_t event, unsigned flags, cudaStream_t main) {
    CUDA_LAUNCH(clock_wait_kernel, 1, 1, main, e->clock, false);
    CUDA_CHECK(cudaStreamWaitEvent(main, event, flags));
    CUDA_LAUNCH(clock_wait_kernel, 1, 1, main, e->clock, true);
}

// Records a time of a bucket for the timeline.
static inline void exchange_time(const Exchange* e, int bucket, int what, bool capturing,
                                 cudaStream_t stream) {
    unsigned flags = capturing ? cudaEventRecordExternal : cudaEventRecordDefault;
    if (e->timeline) CUDA_CHECK(cudaEventRecordWithFlags(e->buckets[bucket].times[what], stream, flags));
}

// ----------------------------------------------------------------------------
// opening

// Collective: connects the ranks' GPUs. fp32_begin is not copied: the caller keeps it until exchange_close.
static inline Exchange exchange_open(World* world, const Shard* shard, const int64_t* fp32_begin) {
    Exchange e = {.world = world, .shard = *shard, .fp32_begin = fp32_begin, .comm = nccl_open(world)};
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&e.stream, cudaStreamNonBlocking, greatest));
    e.buckets = (BucketEvents*)xcalloc((size_t)shard->num_buckets, sizeof *e.buckets);
    CUDA_CHECK(cudaEventCreateWithFlags(&e.reduced, cudaEventDisableTiming));
    for (int b = 0; b < shard->num_buckets; b++) {
        BucketEvents* t = &e.buckets[b];
        cudaEvent_t* const events[] = {&t->ready, &t->updated, &t->gathered};
        for (cudaEvent_t* event : events) CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
        for (cudaEvent_t& event : t->times) CUDA_CHECK(cudaEventCreate(&event));
    }
    CUDA_CHECK(cudaMalloc((void**)&e.clock, sizeof *e.clock));
    CUDA_CHECK(cudaMemset(e.clock, 0, sizeof *e.clock));
    peers_open(&e.peers, world, world->size, shard_largest_part(shard) * (int64_t)sizeof(float));
    CUDA_CHECK(cudaMalloc((void**)&e.times, (size_t)shard->size * sizeof *e.times));
    return e;
}

// What moves gradients between the ranks' GPUs, for messages
static inline const char* exchange_path(const Exchange* e) {
    return e->peers.size > 0 ? "copy engines" : "NCCL";
}

static inline void exchange_close(Exchange* e) {
    CUDA_CHECK(cudaEventDestroy(e->reduced));
    for (int b = 0; b < e->shard.num_buckets; b++) {
        const BucketEvents* t = &e->buckets[b];
        const cudaEvent_t events[] = {t->ready, t->updated, t->gathered};
        for (cudaEvent_t event : events) CUDA_CHECK(cudaEventDestroy(event));
        for (cudaEvent_t event : t->times) CUDA_CHECK(cudaEventDestroy(event));
    }
    if (e->peers.size > 0) peers_close(&e->peers, e->world);
    nccl_close(e->comm);
    free(e->buckets);
    CUDA_CHECK(cudaFree(e->clock));
    CUDA_CHECK(cudaFree(e->times));
    CUDA_CHECK(cudaStreamDestroy(e->stream));
    memset(e, 0, sizeof *e);
}

// Collective: allocates a flat buffer of gradients or weights, zeroed. Free with nccl_free after
// exchange_close. A rank alone (e is NULL) gets device memory.
static inline void* exchange_alloc(const Exchange* e, size_t bytes) {
    if (!e) return device_zeros(bytes);
    void* memory = nccl_alloc(e->comm, bytes);
    CUDA_CHECK(cudaMemset(memory, 0, bytes));
    return memory;
}

// ----------------------------------------------------------------------------
// a step, in the order of the calls; `main` is the stream of the passes

static inline void exchange_begin_step(Exchange* e, cudaStream_t main) {
    CUDA_CHECK(cudaMemsetAsync(e->times, 0, (size_t)e->shard.size * sizeof *e->times, main));
    CUDA_LAUNCH(clock_begin_kernel, 1, 1, main, e->clock);
}

// Called in the step's first forward pass, before a bucket's weights are read: waits for their all-gather.
static inline void exchange_await(Exchange* e, int bucket, bool capturing, cudaStream_t main) {
    exchange_time(e, bucket, BUCKET_NEEDED, capturing, main);
    exchange_wait(e, e->buckets[bucket].gathered, capturing ? cudaEventWaitExternal : cudaEventWaitDefault,
                  main);
}

// Called in the step's last backward pass, when a bucket's gradient is queued on the main stream: queues its
// sum over all ranks. chunks: the rank's part of the bucket; squares: sums of its squares, as in
// add_and_square.
static inline void exchange_reduce(Exchange* e, int bucket, float* grads, double* squares,
                                   const ParamChunks* chunks, cudaStream_t main) {
    const Shard* s = &e->shard;
    ShardPart part = shard_part(s, bucket);
    int64_t begin = s->buckets[bucket], end = s->buckets[bucket + 1], part_end = part.begin + part.count;
    exchange_time(e, bucket, BUCKET_READY, false, main);
    CUDA_CHECK(cudaEventRecord(e->buckets[bucket].ready, main));
    CUDA_CHECK(cudaStreamWaitEvent(e->stream, e->buckets[bucket].ready, 0));
    exchange_time(e, bucket, BUCKET_REDUCING, false, e->stream);
    if (e->peers.size > 0) {
        const float* inbox =
            (const float*)peers_inbox(&e->peers, s->rank, (s->rank + 1) % s->size); // the first
        const int64_t inbox_floats = e->peers.capacity / (int64_t)sizeof(float), bytes = part.count * 4;
        OtherGradients others = {inbox, part.begin, inbox_floats, s->size - 1};
        PeersMessage gradients = {grads + begin, bytes, bytes};
        peers_send(&e->peers, &gradients, e->stream);
        add_and_square(squares, grads, chunks, &others, e->stream);
        peers_read(&e->peers, e->stream);
    } else {
        nccl_reduce_scatter(e, grads + part.begin, grads + begin, part.count);
        add_and_square(squares, grads, chunks, NULL, e->stream);
    }
    CUDA_CHECK(cudaMemsetAsync(grads + begin, 0, (size_t)(part.begin - begin) * sizeof(float), e->stream));
    CUDA_CHECK(cudaMemsetAsync(grads + part_end, 0, (size_t)(end - part_end) * sizeof(float), e->stream));
    exchange_time(e, bucket, BUCKET_REDUCED, false, e->stream);
}

// Called at the end of that pass: the main stream waits for all reduce-scatters.
static inline void exchange_finish_reduce(const Exchange* e, cudaStream_t main) {
    CUDA_CHECK(cudaEventRecord(e->reduced, e->stream));
    exchange_wait(e, e->reduced, 0, main);
}

// Queues the sums over all ranks: stats->all, the times, and n counters.
static inline void exchange_sums(Exchange* e, StepStats* stats, unsigned long long* counters, int64_t n,
                                 cudaStream_t main) {
    const int64_t sums = sizeof(StepSums) / sizeof(double), times = RANK_TIMES * e->shard.size;
    CUDA_LAUNCH(clock_end_kernel, 1, 1, main, e->times, e->shard.rank, e->clock, counters, n);
    nccl_group_begin();
    nccl_sum(e, &stats->all.loss, &stats->own.loss, sums, main);
    nccl_sum(e, &e->times->computing, &e->times->computing, times, main);
    if (n > 0) nccl_sum(e, counters, counters, n, main);
    nccl_group_end();
}

// Called before AdamW: zeroes the weights in fp32, so that a sum over ranks gathers them. AdamW writes them
// again, except in a step that is not valid: then they stay 0, and the run ends.
static inline void exchange_begin_update(const Exchange* e, float* weights_fp32, cudaStream_t main) {
    size_t count = (size_t)e->fp32_begin[e->shard.num_buckets];
    CUDA_CHECK(cudaMemsetAsync(weights_fp32, 0, count * sizeof(float), main));
}

// Queues the all-gather of a bucket's weights behind its AdamW.
static inline void exchange_gather(Exchange* e, int bucket, bf16* weights, float* weights_fp32,
                                   cudaStream_t main) {
    BucketEvents* t = &e->buckets[bucket];
    ShardPart part = shard_part(&e->shard, bucket);
    int64_t begin = e->fp32_begin[bucket], count = e->fp32_begin[bucket + 1] - begin;
    exchange_time(e, bucket, BUCKET_UPDATED, false, main);
    CUDA_CHECK(cudaEventRecord(t->updated, main));
    CUDA_CHECK(cudaStreamWaitEvent(e->stream, t->updated, 0));
    exchange_time(e, bucket, BUCKET_GATHERING, false, e->stream);
    nccl_all_gather(e, weights + e->shard.buckets[bucket], weights + part.begin, part.count);
    if (count > 0) nccl_sum(e, weights_fp32 + begin, weights_fp32 + begin, count, e->stream);
    CUDA_CHECK(cudaEventRecord(t->gathered, e->stream));
    exchange_time(e, bucket, BUCKET_GATHERED, false, e->stream);
}

// ----------------------------------------------------------------------------

// Waits for an event of the device. With other ranks (e is not NULL) it polls, and dies where one has failed:
// the event would never come.
static inline void exchange_synchronize(const Exchange* e, cudaEvent_t done) {
    const struct timespec pause = {0, 50000};
    while (e && cudaEventQuery(done) == cudaErrorNotReady) {
        nccl_check_network(e->comm, e->world);
        nanosleep(&pause, NULL);
    }
    CUDA_CHECK(cudaEventSynchronize(done));
}

// Prints when the buckets of the last step, and of the forward pass after it, were exchanged, in ms since
// `begin`.
static inline void exchange_print(const Exchange* e, cudaEvent_t begin) {
    printf(
        "  ms from the step's begin: bucket, its gradient ready, reduce-scatter, update, all-gather, weights "
        "needed\n");
    for (int b = e->shard.num_buckets - 1; b >= 0; b--) {
        float ms[NUM_BUCKET_TIMES];
        for (int i = 0; i < NUM_BUCKET_TIMES; i++) {
            CUDA_CHECK(cudaEventSynchronize(e->buckets[b].times[i]));
            CUDA_CHECK(cudaEventElapsedTime(&ms[i], begin, e->buckets[b].times[i]));
        }
        printf("  %6d %9.2f %9.2f to %7.2f %9.2f %9.2f to %7.2f %9.2f\n", b, ms[BUCKET_READY],
               ms[BUCKET_REDUCING], ms[BUCKET_REDUCED], ms[BUCKET_UPDATED], ms[BUCKET_GATHERING],
               ms[BUCKET_GATHERED], ms[BUCKET_NEEDED]);
    }
}
