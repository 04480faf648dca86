/*
Configuration of the Hopper kernels of forgetting attention (sm90_forward.cuh, sm90_backward.cuh): tiles,
stages and registers for each head size.
*/
#pragma once

#include "shape.cuh"
#include "../cuda/mma_sm90.cuh"

// Forward: each consumer warpgroup has 64 queries, and all of them share the tiles of keys. 192 queries load
// each tile of keys a third less often than 128; at dh 128 there are not enough registers for them.
template <int DH> struct Sm90ForwardTiles;
template <> struct Sm90ForwardTiles<64> {
    static constexpr int CONSUMERS = 3, KEYS = 128, STAGES = 4;
    static constexpr bool PINGPONG = false;
    static constexpr int CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 32;
};
template <> struct Sm90ForwardTiles<128> {
    static constexpr int CONSUMERS = 2, KEYS = 128, STAGES = 2;
    static constexpr bool PINGPONG = true;
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
};

// Backward: each of two consumer warpgroups has 64 keys, and both share the tiles of queries. K and V as
// register operands save reads of shared memory, and an early dV starts its wgmma before ds is computed
// instead of after it: at dh 128 there are not enough registers for either.
template <int DH> struct Sm90BackwardTiles;
template <> struct Sm90BackwardTiles<64> {
    static constexpr int QUERIES = 128, STAGES = 3;
    static constexpr bool KEYS_IN_REGISTERS = true, EARLY_DV = true;
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
};
template <> struct Sm90BackwardTiles<128> {
    static constexpr int QUERIES = 64, STAGES = 3;
    static constexpr bool KEYS_IN_REGISTERS = false, EARLY_DV = false;
    static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
};

#define SM90_SHARED_KIB 227 // shared memory of a thread block on sm_90
