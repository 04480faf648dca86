/*
What the Hopper kernels of forgetting attention share: tiles, stages and registers for each head size, how the
work is laid out, how a kernel is launched. How they run stands in attention_sm90_forward.cuh and
attention_sm90_backward.cuh.
*/
#ifndef LLMC_ATTENTION_SM90_CUH
#define LLMC_ATTENTION_SM90_CUH

#include "attention_shape.cuh"
#include "mma_sm90.cuh"

// ----------------------------------------------------------------------------
// what to run

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

// One thread block for each multiprocessor, or for each piece of work where those are fewer.
template <class Shared, class... Parameters, class... Arguments>
static inline void sm90_launch(void (*kernel)(Parameters...), int64_t works, int threads, cudaStream_t stream,
                               Arguments... arguments) {
    static_assert(sizeof(Shared) <= 227 << 10, "what sm_90 has for a thread block");
    int device, processors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    kernel<<<(unsigned)(works < processors ? works : processors), threads, sizeof(Shared), stream>>>(
        arguments...);
    CUDA_CHECK_LAUNCH();
}

#endif // LLMC_ATTENTION_SM90_CUH
