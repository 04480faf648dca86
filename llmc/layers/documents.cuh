/*
Packed documents on the GPU (llmc/model/documents.h says what they are): doc_start [B, T] from the tokens of a
pass, once for all layers.

The trainer calls it before the embedding. One thread block a sequence scans for the latest end-of-text, 8,192
tokens at a time: a few microseconds beside a pass of milliseconds.
*/
#pragma once

#include "../cuda/range.cuh"

enum { DOCUMENTS_THREADS = 1024, DOCUMENTS_TOKENS = 8 }; // of a thread block; of a thread

__global__ static void __launch_bounds__(DOCUMENTS_THREADS)
    documents_kernel(int32_t* __restrict__ doc_start, const int32_t* __restrict__ inputs, int T,
                     int32_t end_of_text) {
    constexpr int WARPS = DOCUMENTS_THREADS / 32, TOKENS = DOCUMENTS_TOKENS;
    __shared__ int latest_of[WARPS];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    inputs += (int64_t)blockIdx.x * T;
    doc_start += (int64_t)blockIdx.x * T;
    int before = 0; // the start of the document in which the tokens before `first` end
    for (int first = 0; first < T; first += DOCUMENTS_THREADS * TOKENS) {
        int t = first + (int)threadIdx.x * TOKENS, start[TOKENS], latest = 0;
        for (int i = 0; i < TOKENS; i++) {
            if (t + i < T && inputs[t + i] == end_of_text) latest = t + i;
            start[i] = latest;
        }
        for (int step = 1; step < 32; step *= 2) { // up to the thread's own tokens
            int other = __shfl_up_sync(~0u, latest, step);
            if (lane >= step) latest = max(latest, other);
        }
        if (lane == 31) latest_of[warp] = latest;
        int earlier = __shfl_up_sync(~0u, latest, 1);
        earlier = max(lane > 0 ? earlier : 0, before);
        __syncthreads();
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) earlier = max(earlier, latest_of[i]);
            before = max(before, latest_of[i]);
        }
        for (int i = 0; i < TOKENS; i++)
            if (t + i < T) doc_start[t + i] = max(start[i], earlier);
        __syncthreads(); // latest_of has been read
    }
}

// Writes doc_start [B, T], find_documents on the device; NULL: documents are not told apart.
static inline void documents_forward(int32_t* doc_start, const int32_t* inputs, int64_t B, int64_t T,
                                     int64_t end_of_text, cudaStream_t stream) {
    if (!doc_start) return;
    Range range("documents", RANGE_FORWARD, stream);
    CUDA_LAUNCH(documents_kernel, B, DOCUMENTS_THREADS, stream, doc_start, inputs, (int)T,
                (int32_t)end_of_text);
}
