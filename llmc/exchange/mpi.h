/*
Exchange of gradients and weights between the CPU trainer's ranks, through MPI: as exchange.cuh between GPUs,
bucket by bucket (shard.h), but after the passes, not overlapped with them.

    grads, params    float or double [num_params] (element_bytes 4 or 8), flat buffers

All functions are collective and give the same bits in every run with the same number of ranks. An error of
MPI ends the program with a message. Called by the CPU trainer.
*/
#pragma once

#include <limits.h>
#include "../model/shard.h"
#include "../ranks/world.h"
#ifdef USE_MPI
#include <mpi.h>
#endif

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

// Ends the program with a message if there are several ranks and MPI has not been started.
static inline void mpi_require(const World* world) {
    int started = 0;
#ifdef USE_MPI
    MPI_CHECK(MPI_Initialized(&started));
#endif
    if (world->size > 1 && !started)
        die("several ranks of the CPU trainer need MPI: build with USE_MPI=1 and start them with mpirun");
}

// x[n] becomes its sum over ranks.
static inline void mpi_sum(double* x, int n) {
#ifdef USE_MPI
    MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
#else
    (void)x, (void)n;
#endif
}

// Sums all ranks' gradients of a bucket; this rank gets its part of the sums, in place. scratch: room for a
// part.
static inline void mpi_reduce_scatter(void* grads, void* scratch, const Shard* shard, int bucket,
                                      int element_bytes) {
    ShardPart part = shard_part(shard, bucket);
    char* bytes = (char*)grads;
    if (part.count > INT_MAX)
        die("a bucket of %s is more than MPI counts", counted(part.count, "gradient").text);
#ifdef USE_MPI
    // With MPI_IN_PLACE the result would be at the front of the bucket.
    MPI_Datatype type = element_bytes == 8 ? MPI_DOUBLE : MPI_FLOAT;
    MPI_CHECK(MPI_Reduce_scatter_block(bytes + shard->buckets[bucket] * element_bytes, scratch,
                                       (int)part.count, type, MPI_SUM, MPI_COMM_WORLD));
#endif
    memcpy(bytes + part.begin * element_bytes, scratch, (size_t)(part.count * element_bytes));
}

// Gathers the parts of a bucket's weights from all ranks, in place.
static inline void mpi_all_gather(void* params, const Shard* shard, int bucket, int element_bytes) {
#ifdef USE_MPI
    MPI_Datatype type = element_bytes == 8 ? MPI_DOUBLE : MPI_FLOAT;
    char* bytes = (char*)params + shard->buckets[bucket] * element_bytes;
    int count = (int)shard_part(shard, bucket).count;
    MPI_CHECK(MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, bytes, count, type, MPI_COMM_WORLD));
#else
    (void)params, (void)shard, (void)bucket, (void)element_bytes;
#endif
}
