/*
Exchange of gradients and weights between the CPU trainer's ranks, as exchange.cuh between GPUs, bucket by
bucket (shard.h), but after the passes, not overlapped with them: through MPI where mpirun has started the
ranks, else through their connections (world.h), over rank 0.

    grads, params    float or double [table.count] (element_bytes 4 or 8), flat buffers

All functions are collective and give the same bits in every run with the same number of ranks and the same
start; those of two ranks are the same either way. An error of MPI ends the program with a message. Called by
the CPU trainer.
*/
#pragma once

#include <limits.h>
#include "../model/shard.h"
#include "../ranks/world.h"

#ifdef USE_MPI
static inline void mpi_check(int result, const char* file, int line) {
    char text[MPI_MAX_ERROR_STRING];
    int length;
    if (result == MPI_SUCCESS) return;
    MPI_Error_string(result, text, &length);
    die("%s:%d: MPI: %s", file, line, text);
}
#define MPI_CHECK(call) mpi_check(call, __FILE__, __LINE__)
#endif

// x[n] becomes its sum over ranks.
static inline void exchange_sum(World* world, double* x, int n) {
#ifdef USE_MPI
    if (world->mpi) {
        MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
        return;
    }
#endif
    world_sum(world, x, n);
}

// Sums all ranks' gradients of a bucket; this rank gets its part of the sums, in place. scratch: through MPI
// room for a part.
static inline void exchange_reduce_scatter(World* world, void* grads, void* scratch, const Shard* shard,
                                           int bucket, int element_bytes) {
    const ShardPart part = shard_part(shard, bucket);
    char* first = (char*)grads + shard->buckets[bucket] * element_bytes;
#ifdef USE_MPI
    if (world->mpi) {
        if (part.count > INT_MAX)
            die("a bucket of %s is more than MPI counts", counted(part.count, "gradient").text);
        // With MPI_IN_PLACE the result would be at the front of the bucket.
        const MPI_Datatype type = element_bytes == 8 ? MPI_DOUBLE : MPI_FLOAT;
        MPI_CHECK(MPI_Reduce_scatter_block(first, scratch, (int)part.count, type, MPI_SUM, MPI_COMM_WORLD));
        memcpy((char*)grads + part.begin * element_bytes, scratch, (size_t)(part.count * element_bytes));
        return;
    }
#endif
    (void)scratch;
    world_sum_reals(world, first, (size_t)(part.count * shard->size), (size_t)element_bytes);
}

// Gathers the parts of a bucket's weights from all ranks, in place.
static inline void exchange_all_gather(World* world, void* params, const Shard* shard, int bucket,
                                       int element_bytes) {
    const ShardPart part = shard_part(shard, bucket);
    char* first = (char*)params + shard->buckets[bucket] * element_bytes;
#ifdef USE_MPI
    if (world->mpi) {
        const MPI_Datatype type = element_bytes == 8 ? MPI_DOUBLE : MPI_FLOAT;
        MPI_CHECK(
            MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, first, (int)part.count, type, MPI_COMM_WORLD));
        return;
    }
#endif
    world_allgather(world, first, (char*)params + part.begin * element_bytes,
                    (size_t)(part.count * element_bytes));
}
