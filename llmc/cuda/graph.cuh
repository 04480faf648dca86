/*
Work of a pass as a CUDA graph: captured once, launched from then on. Its kernels follow one another with less
delay than on a stream.

Called by the GPU trainer.
*/
#pragma once

#include "cuda_common.cuh"

typedef struct {
    cudaGraphExec_t exec; // NULL until captured
    float dloss;          // that it was captured with
} PassGraph;

static inline void pass_graph_free(PassGraph* graph) {
    if (graph->exec) CUDA_CHECK(cudaGraphExecDestroy(graph->exec));
    graph->exec = NULL;
}

// Runs work(), which queues on `stream`, as a graph. Another dloss captures another one. *capturing: during
// the capture.
template <class Work>
static inline void pass_graph_run(PassGraph* graph, float dloss, bool* capturing, cudaStream_t stream,
                                  const Work& work) {
    if (!graph->exec || graph->dloss != dloss) {
        cudaGraph_t calls;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        *capturing = true;
        work();
        *capturing = false;
        CUDA_CHECK(cudaStreamEndCapture(stream, &calls));
        pass_graph_free(graph);
        CUDA_CHECK(cudaGraphInstantiate(&graph->exec, calls, 0));
        CUDA_CHECK(cudaGraphDestroy(calls));
        graph->dloss = dloss;
    }
    CUDA_CHECK(cudaGraphLaunch(graph->exec, stream));
}
