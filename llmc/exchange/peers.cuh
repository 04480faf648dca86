/*
Messages between the GPUs of one host by copy engines: gradients among all ranks, and rows of sequences within
a group that shares them (sequence.cuh). NCCL's reduce-scatter takes SMs from the concurrent GEMMs, 4 ms of a
step of 150 ms; copy engines take none.

Each rank allocates, in memory that all ranks map, for each other rank an inbox of one message and two message
counters:

    sender      wait until read >= n - 1  ->  copy into the inbox at the receiver  ->  arrived = n
    receiver                                  wait until arrived >= n  ->  kernel  ->  read = n

Ranks may also share tensors (peers_share, peers_at). A sender then writes to the receiver's tensor, not to an
inbox:

    sender      wait until read >= n - 1  ->  copies, or a kernel that stores there  ->  arrived = n
    receiver                                        wait until arrived >= n          ->  read = n

Here `read = n` also says that the tensors which message n + 1 fills are free. A message may come in parts,
each with its own number; the sender waits once, before the first part.

Copies, waits and counters are stream operations (cuStreamWaitValue32): no kernel spins, and the host only
queues. Invariants of message n, each with the line that keeps it:

 1. An inbox or tensor is overwritten after message        wait for PEERS_READ in peers_send, peers_await_readers
    n - 1 was read.
 2. It is read after message n is in it.                   wait for PEERS_ARRIVED in peers_await; stream order
                                                           puts what was written before the write of `arrived`
 3. `read` becomes n after the kernels that read, and      stream order: peers_read is behind them; sequence.cuh
    after the last use of the next message's tensors.      and halo.cuh tell which these are
 4. A counter has one writer; its reader polls own memory. peers_counter: `arrived` is the receiver's memory,
                                                           `read` the sender's
 5. No cycle of waits: sending n needs only that           peers_send sends to all, then waits for all
    n - 1 was read, receiving n that it was sent.
 6. Memory is freed when no rank has it mapped.            world_barrier in peers_close

Called by exchange.cuh with peers of its own, and by sequence.cuh with those of the group. Ranks are numbers
in the group. An error of CUDA ends the program; where the GPUs do not reach one another, peers_open returns
false. A message that never comes is ended by the watch (llmc/ranks/watch.h).
*/
#pragma once

#include <cudaTypedefs.h>
#include "../ranks/world.h"
#include "../cuda/cuda_common.cuh"

typedef enum { PEERS_ARRIVED, PEERS_READ } PeersCounter;

// What a rank sends: `bytes` bytes at from + r rank_bytes to each rank r
typedef struct {
    const void* from;
    int64_t rank_bytes, bytes;
} PeersMessage;

// A tensor that each rank has and the other ranks write to
typedef struct {
    char** mapped; // [size] each rank's tensor, as mapped here
    int64_t bytes;
} PeersTensor;

enum { PEERS_TENSORS = 32 };

typedef struct {
    int first, rank, size; // the group: its first rank among all, this rank's number in it, number of ranks
    int64_t capacity;      // bytes of an inbox, a multiple of 16
    uint32_t messages;     // number of messages so far, the same to and from each peer
    char** memory;         // [size] each rank's memory: counters [2][size], then inboxes [size - 1][capacity]
    PeersTensor tensors[PEERS_TENSORS];
    int num_tensors;
    PFN_cuStreamWaitValue32_v11070 wait;
    PFN_cuStreamWriteValue32_v11070 write;
} Peers;

static inline size_t peers_header_bytes(int size) {
    return (size_t)ceil_div<int64_t>(2 * size * (int64_t)sizeof(uint32_t), 256) * 256;
}

// Bytes of Peers.memory of one rank
static inline size_t peers_bytes(int size, int64_t capacity) {
    return peers_header_bytes(size) + (size_t)(size - 1) * (size_t)capacity;
}

// Address of a counter in the memory of rank `at`, for its messages with rank `with`
static inline CUdeviceptr peers_counter(const Peers* p, int at, PeersCounter counter, int with) {
    return (CUdeviceptr)((uint32_t*)p->memory[at] + counter * p->size + with);
}

// The inbox in the memory of rank `at` that rank `from` writes
static inline char* peers_inbox(const Peers* p, int at, int from) {
    const int64_t inbox = (from - at + p->size - 1) % p->size;
    return p->memory[at] + peers_header_bytes(p->size) + inbox * p->capacity;
}

// Address on rank r of what this rank has at `own` in a shared tensor. Ends the program if `own` is in none.
template <class T> static inline T* peers_at(const Peers* p, int r, T* own) {
    for (int i = 0; i < p->num_tensors; i++) {
        const PeersTensor* t = &p->tensors[i];
        const int64_t at = (const char*)own - t->mapped[p->rank];
        if (at >= 0 && at < t->bytes) return (T*)(t->mapped[r] + at);
    }
    die("the tensor is not shared with the other ranks");
}

static inline void peers_check(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS)
        die("%s failed with error %d; NCCL_P2P_DISABLE=1 avoids it, without --sequence-ranks", call,
            (int)result);
}

// Collective: unmaps and frees the memory.
static inline void peers_close(Peers* p, World* world) {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int r = 0; r < p->size; r++) {
        if (r == p->rank) continue;
        if (p->memory[r]) CUDA_CHECK(cudaIpcCloseMemHandle(p->memory[r]));
        for (int i = 0; i < p->num_tensors; i++) CUDA_CHECK(cudaIpcCloseMemHandle(p->tensors[i].mapped[r]));
    }
    world_barrier(world); // none has it mapped
    CUDA_CHECK(cudaFree(p->memory[p->rank]));
    for (int i = 0; i < p->num_tensors; i++) free(p->tensors[i].mapped);
    free(p->memory);
    memset(p, 0, sizeof *p);
}

// Collective: whether all ranks of this rank's group are on one host
static inline bool peers_on_one_host(const Peers* p, World* world) {
    bool same = true;
    char* hosts = (char*)xcalloc((size_t)world->size, sizeof world->host);
    world_allgather(world, hosts, world->host, sizeof world->host);
    for (int r = p->first; r < p->first + p->size; r++)
        same = same && memcmp(hosts + (size_t)r * sizeof world->host, world->host, sizeof world->host) == 0;
    free(hosts);
    return same;
}

// Returns Peers of `size` ranks, this one number `rank`, and allocates this rank's memory of `bytes`.
static inline Peers peers_new(int first, int rank, int size, int64_t capacity, size_t bytes) {
    Peers p = {.first = first, .rank = rank, .size = size, .capacity = capacity};
    assert(capacity % 16 == 0);
    p.memory = (char**)xcalloc((size_t)size, sizeof *p.memory);
    p.wait = (PFN_cuStreamWaitValue32_v11070)driver_function("cuStreamWaitValue32", 11070);
    p.write = (PFN_cuStreamWriteValue32_v11070)driver_function("cuStreamWriteValue32", 11070);
    CUDA_CHECK(cudaMalloc((void**)&p.memory[rank], bytes));
    CUDA_CHECK(
        cudaMemset(p.memory[rank], 0, bytes < peers_header_bytes(size) ? bytes : peers_header_bytes(size)));
    CUDA_CHECK(cudaDeviceSynchronize());
    return p;
}

// Collective: opens peers in each group of `size` consecutive ranks, with inboxes of `capacity` bytes.
// Returns false, with *p zeroed, unless each group is on one host and its GPUs reach one another;
// NCCL_P2P_DISABLE=1 forbids it.
static inline bool peers_open(Peers* p, World* world, int size, int64_t capacity) {
    const char* disabled = getenv("NCCL_P2P_DISABLE");
    cudaIpcMemHandle_t mine, *handles = (cudaIpcMemHandle_t*)xcalloc((size_t)world->size, sizeof *handles);
    int rank = world->rank % size, first = world->rank - rank;
    Peers group = {.first = first, .rank = rank, .size = size};
    bool may = size < world->size ? peers_on_one_host(&group, world) : world->local_size == size;
    may = may && !(disabled && atoi(disabled) != 0);
    // where peer access is impossible a byte, so that peers_close frees it like the rest
    *p = peers_new(first, rank, size, capacity, may ? peers_bytes(size, capacity) : 1);
    memset(&mine, 0, sizeof mine);
    may = may && cudaIpcGetMemHandle(&mine, p->memory[rank]) == cudaSuccess;
    world_allgather(world, handles, &mine, sizeof mine);
    for (int r = 0; r < size; r++)
        if (may && r != rank)
            may = cudaIpcOpenMemHandle((void**)&p->memory[r], handles[first + r],
                                       cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    (void)cudaGetLastError(); // clears the error of a refused call
    free(handles);
    double refusals = may ? 0 : 1;
    world_sum(world, &refusals, 1);
    if (refusals > 0) peers_close(p, world);
    return refusals == 0;
}

// Adds a tensor of `bytes` that this rank has at `own`; the caller sets the other ranks' addresses.
static inline PeersTensor* peers_add(Peers* p, void* own, int64_t bytes) {
    if (p->num_tensors == PEERS_TENSORS) die("more than %d tensors that ranks share", PEERS_TENSORS);
    PeersTensor* t = &p->tensors[p->num_tensors++];
    t->mapped = (char**)xcalloc((size_t)p->size, sizeof *t->mapped);
    t->mapped[p->rank] = (char*)own;
    t->bytes = bytes;
    return t;
}

// Collective: shares a tensor of `bytes` from cudaMalloc, to which the group's other ranks may then write
// (peers_at).
static inline void peers_share(Peers* p, World* world, void* own, int64_t bytes) {
    PeersTensor* t = peers_add(p, own, bytes);
    cudaIpcMemHandle_t mine, *handles = (cudaIpcMemHandle_t*)xcalloc((size_t)world->size, sizeof *handles);
    CUDA_CHECK(cudaIpcGetMemHandle(&mine, own));
    world_allgather(world, handles, &mine, sizeof mine);
    for (int r = 0; r < p->size; r++)
        if (r != p->rank)
            CUDA_CHECK(cudaIpcOpenMemHandle((void**)&t->mapped[r], handles[p->first + r],
                                            cudaIpcMemLazyEnablePeerAccess));
    free(handles);
}

// Queues a copy of rows between memories of GPUs; strides in bytes.
static inline void copy_rows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                             int64_t row_bytes, int64_t rows, cudaStream_t stream) {
    const int64_t most_pitch = INT32_MAX; // of a 2D copy
    const bool contiguous = to_stride == row_bytes && from_stride == row_bytes;
    if (contiguous) row_bytes *= rows, rows = 1;
    if (rows > 1 && to_stride <= most_pitch && from_stride <= most_pitch) {
        CUDA_CHECK(cudaMemcpy2DAsync(to, (size_t)to_stride, from, (size_t)from_stride, (size_t)row_bytes,
                                     (size_t)rows, cudaMemcpyDefault, stream));
        return;
    }
    for (int64_t i = 0; i < rows; i++)
        CUDA_CHECK(cudaMemcpyAsync((char*)to + i * to_stride, (const char*)from + i * from_stride,
                                   (size_t)row_bytes, cudaMemcpyDefault, stream));
}

// Queues a wait until rank `to` has read the messages so far.
static inline void peers_await_reader(const Peers* p, int to, cudaStream_t stream) {
    peers_check(
        p->wait(stream, peers_counter(p, p->rank, PEERS_READ, to), p->messages, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

// Queues `arrived = n` at rank `to`, behind what was written there.
static inline void peers_tell(const Peers* p, int to, uint32_t n, cudaStream_t stream) {
    peers_check(
        p->write(stream, peers_counter(p, to, PEERS_ARRIVED, p->rank), n, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue32");
}

// Queues a wait for the other ranks' last message.
static inline void peers_await(const Peers* p, cudaStream_t stream) {
    for (int i = 1; i < p->size; i++)
        peers_check(p->wait(stream, peers_counter(p, p->rank, PEERS_ARRIVED, (p->rank + i) % p->size),
                            p->messages, CU_STREAM_WAIT_VALUE_GEQ),
                    "cuStreamWaitValue32");
}

// Queues copies of this rank's message to each other rank's inbox, and a wait for theirs.
static inline void peers_send(Peers* p, const PeersMessage* m, cudaStream_t stream) {
    assert(m->bytes <= p->capacity);
    for (int i = 1; i < p->size; i++) {
        int to = (p->rank + i) % p->size; // each rank starts with a different one
        peers_await_reader(p, to, stream);
        CUDA_CHECK(cudaMemcpyAsync(peers_inbox(p, to, p->rank), (const char*)m->from + to * m->rank_bytes,
                                   (size_t)m->bytes, cudaMemcpyDefault, stream));
        peers_tell(p, to, p->messages + 1, stream);
    }
    p->messages++;
    peers_await(p, stream);
}

// Queues `read`, behind the kernels that read the last message: the next one may overwrite it.
static inline void peers_read(const Peers* p, cudaStream_t stream) {
    for (int r = 0; r < p->size; r++)
        if (r != p->rank)
            peers_check(p->write(stream, peers_counter(p, r, PEERS_READ, p->rank), p->messages,
                                 CU_STREAM_WRITE_VALUE_DEFAULT),
                        "cuStreamWriteValue32");
}

// Queues a wait until the other ranks have read the messages so far: this rank may then write to their
// tensors.
static inline void peers_await_readers(const Peers* p, cudaStream_t stream) {
    for (int i = 1; i < p->size; i++) peers_await_reader(p, (p->rank + i) % p->size, stream);
}

// Queues `arrived` at all others, behind what this rank wrote to their tensors: the next message is complete.
static inline void peers_written(Peers* p, cudaStream_t stream) {
    p->messages++;
    for (int i = 1; i < p->size; i++) peers_tell(p, (p->rank + i) % p->size, p->messages, stream);
}
