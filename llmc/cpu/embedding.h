/*
The embedding, x_t = E[token_t], of the CPU trainer, as llmc/layers/embedding.cuh of the GPU trainer.

    x, dx [rows, d]    tokens [rows]    embeddings, dembeddings [V, d]

Called by train_fox.c.
*/
#pragma once

#include "layer.h"

static inline void embedding_forward(real* x, const int32_t* tokens, const real* embeddings, int64_t rows,
                                     int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
        memcpy(x + t * d, embeddings + tokens[t] * d, (size_t)d * sizeof(real));
}

// Each piece is a range of channels: one thread adds all rows of equal tokens, in their order.
static inline void embedding_backward(real* dembeddings, const real* dx, const int32_t* tokens, int64_t rows,
                                      int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES; piece++) {
        int64_t first = d * piece / NUM_PIECES, last = d * (piece + 1) / NUM_PIECES;
        for (int64_t t = 0; t < rows; t++)
            for (int64_t c = first; c < last; c++) dembeddings[tokens[t] * d + c] += dx[t * d + c];
    }
}
