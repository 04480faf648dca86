/*
Profiling: scoped ranges, one line at the top of every launch function.

    Range range("matmul", RANGE_BACKWARD, stream);

Every range is an NVTX range, for Nsight Systems. While a RangeLog records, the outermost range is also timed
by two CUDA events on its stream; ranges inside it count as part of it. Recording changes neither what is
queued nor on which stream. --bench sums the times by name and pass.
*/
#pragma once

#include <nvtx3/nvToolsExt.h>
#include "cuda_common.cuh"

// A recomputed forward pass is forward.
typedef enum { RANGE_FORWARD, RANGE_BACKWARD, NUM_RANGE_PASSES } RangePass;

enum { RANGE_LOG_MAX = 65536, RANGE_LOG_NAMES = 32 };

// Zeroed before its first use; range_log_free frees its events. 1.6 MB: static or on the heap.
typedef struct {
    int count; // of ranges recorded since range_log_start
    struct {
        cudaEvent_t begin, end; // created at the first use of the entry
        int name;               // index in sums
        RangePass pass;
    } ranges[RANGE_LOG_MAX];
    int num_names;
    struct {
        const char* name;
        double ms[NUM_RANGE_PASSES]; // sum over all ranges between range_log_start and range_log_stop
    } sums[RANGE_LOG_NAMES];         // in order of first appearance
} RangeLog;

static struct {
    RangeLog* log; // NULL while nothing records
    int depth;     // of open ranges
} range_state;

// Records every range from here on. Not during stream capture.
static inline void range_log_start(RangeLog* log) {
    log->count = 0;
    range_state.log = log;
}

// Stops recording, waits for the recorded ranges, and adds their times to the log's sums.
static inline void range_log_stop(void) {
    RangeLog* log = range_state.log;
    range_state.log = NULL;
    for (int i = 0; i < log->count; i++) {
        float ms;
        CUDA_CHECK(cudaEventSynchronize(log->ranges[i].end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, log->ranges[i].begin, log->ranges[i].end));
        log->sums[log->ranges[i].name].ms[log->ranges[i].pass] += ms;
    }
}

// Prints the mean times of `steps` steps.
static inline void range_log_print(const RangeLog* log, double steps) {
    double total = 0;
    for (int i = 0; i < log->num_names; i++) total += (log->sums[i].ms[0] + log->sums[i].ms[1]) / steps;
    printf("  %-28s %10s %10s\n", "milliseconds, in sequence", "forward", "backward");
    for (int i = 0; i < log->num_names; i++) {
        double forward = log->sums[i].ms[RANGE_FORWARD] / steps,
               backward = log->sums[i].ms[RANGE_BACKWARD] / steps;
        printf("  %-28s %10.2f %10.2f  %5.1f%%\n", log->sums[i].name, forward, backward,
               100 * (forward + backward) / total);
    }
    printf("  %-28s %10.2f ms\n", "sum", total);
}

static inline void range_log_free(RangeLog* log) {
    for (int i = 0; i < RANGE_LOG_MAX && log->ranges[i].begin; i++) {
        cudaEventDestroy(log->ranges[i].begin);
        cudaEventDestroy(log->ranges[i].end);
    }
    memset(log, 0, sizeof *log);
}

// Appends a range to the log and records its begin event; returns the event for its end.
static inline cudaEvent_t range_log_begin(RangeLog* log, const char* name, RangePass pass,
                                          cudaStream_t stream) {
    int i = log->count++, n = 0;
    while (n < log->num_names && strcmp(log->sums[n].name, name) != 0) n++;
    if (i == RANGE_LOG_MAX || n == RANGE_LOG_NAMES)
        die("more than %d profiling ranges, or %d names of them", RANGE_LOG_MAX, RANGE_LOG_NAMES);
    if (n == log->num_names) log->sums[log->num_names++].name = name;
    auto& range = log->ranges[i];
    if (!range.begin) {
        CUDA_CHECK(cudaEventCreate(&range.begin));
        CUDA_CHECK(cudaEventCreate(&range.end));
    }
    range.name = n;
    range.pass = pass;
    CUDA_CHECK(cudaEventRecord(range.begin, stream));
    return range.end;
}

struct Range {
    cudaStream_t on;
    cudaEvent_t end; // NULL: not timed

    Range(const char* name, RangePass pass, cudaStream_t stream) : on(stream), end(NULL) {
        nvtxRangePushA(name);
        if (range_state.depth++ == 0 && range_state.log)
            end = range_log_begin(range_state.log, name, pass, stream);
    }
    Range(const Range&) = delete;
    ~Range() {
        if (end) CUDA_CHECK(cudaEventRecord(end, on));
        range_state.depth--;
        nvtxRangePop();
    }
};
