/*
What the Hopper kernels of forgetting attention run with, for each head size: tiles, stages, registers. How
they run stands in attention_sm90_forward.cuh and attention_sm90_backward.cuh.
*/
#ifndef LLMC_ATTENTION_SM90_CUH
#define LLMC_ATTENTION_SM90_CUH

#include "shape.cuh"
#include "../cuda/mma_sm90.cuh"

// Forward: consumer warpgroups take 64 queries each and share tiles of keys. 192 queries read a tile of keys
// a third less often than 128; at dh 128 their registers would not do.
template <int DH> struct Sm90ForwardTiles;
template <> struct Sm90ForwardTiles<64> {
    static constexpr int CONSUMERS = 3, KEYS = 128, STAGES = 4;
    static constexpr bool IN_TURN = false;
    static constexpr int CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 32;
};
template <> struct Sm90ForwardTiles<128> {
    static constexpr int CONSUMERS = 2, KEYS = 128, STAGES = 2;
    static constexpr bool IN_TURN = true;
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
};

// Backward: two warpgroups take 64 keys each and share tiles of queries. Registers that hold keys and
// values spare shared memory a read, and dv's product starts before ds is made rather than behind it: 128
// columns leave no room for either.
template <int DH> struct Sm90BackwardTiles;
template <> struct Sm90BackwardTiles<64> {
    static constexpr int QUERIES = 128, STAGES = 3;
    static constexpr bool KEYS_IN_REGISTERS = true, EARLY_DV = true;
    static constexpr int MATRIX_REGISTERS = 232, OTHER_REGISTERS = 40;
};
template <> struct Sm90BackwardTiles<128> {
    static constexpr int QUERIES = 64, STAGES = 3;
    static constexpr bool KEYS_IN_REGISTERS = false, EARLY_DV = false;
    static constexpr int MATRIX_REGISTERS = 240, OTHER_REGISTERS = 24;
};

#define SM90_SHARED_KIB 227 // what sm_90 has for a thread block

#endif // LLMC_ATTENTION_SM90_CUH
