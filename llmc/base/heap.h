/*
A binary min-heap of 64-bit keys. Used by the tokenizer (pairs to merge) and the sampler (most likely tokens).
*/
#pragma once

#include <stdint.h>

// Adds a key to heap[count]; the caller provides the memory.
static inline void heap_push(uint64_t* heap, int64_t* count, uint64_t key) {
    int64_t i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > key; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = key;
}

// Removes the smallest key and returns it.
static inline uint64_t heap_pop(uint64_t* heap, int64_t* count) {
    uint64_t top = heap[0], key = heap[--*count];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < *count; i = child) {
        if (child + 1 < *count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[i] = heap[child];
    }
    heap[i] = key;
    return top;
}
