/*
Counter-based random numbers: every value is a pure function of (seed, stream, counter).

The generator is Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011). The seed is its 64-bit key; counter and stream are the low and high half of its 128-bit counter.
Streams of one seed are independent, so every use has its own.

Used for weight initialization, data order and sampling, on the CPU and in CUDA kernels. There is no generator
state: values can be computed in any order on any device, and a resumed run needs no saved state to continue.
*/
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define RANDOM_FUNCTION __host__ __device__ static inline
#else
#define RANDOM_FUNCTION static inline
#endif

// The stream of the keys of permutations: the last one, since other uses number theirs from 0.
static const uint64_t RANDOM_STREAM_PERMUTE = UINT64_MAX;

// ----------------------------------------------------------------------------
// bits

// Philox with ten rounds, in place, on the counter x[4] with the key (key0, key1).
RANDOM_FUNCTION void random_philox4x32(uint32_t x[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * x[0];
        uint64_t b = (uint64_t)0xCD9E8D57u * x[2];
        x[0] = (uint32_t)(b >> 32) ^ x[1] ^ key0;
        x[1] = (uint32_t)b;
        x[2] = (uint32_t)(a >> 32) ^ x[3] ^ key1;
        x[3] = (uint32_t)a;
        key0 += 0x9E3779B9u; // the golden ratio
        key1 += 0xBB67AE85u; // sqrt(3) - 1
    }
}

// 128 random bits in out[2].
RANDOM_FUNCTION void random_bits(uint64_t seed, uint64_t stream, uint64_t counter, uint64_t out[2]) {
    uint32_t x[4];
    x[0] = (uint32_t)counter, x[1] = (uint32_t)(counter >> 32);
    x[2] = (uint32_t)stream, x[3] = (uint32_t)(stream >> 32);
    random_philox4x32(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    out[0] = (uint64_t)x[1] << 32 | x[0];
    out[1] = (uint64_t)x[3] << 32 | x[2];
}

// 64 random bits.
RANDOM_FUNCTION uint64_t random_u64(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint64_t bits[2];
    random_bits(seed, stream, counter, bits);
    return bits[0];
}

// ----------------------------------------------------------------------------
// distributions

// Uniform in [0, 1), a multiple of 2^-53.
RANDOM_FUNCTION double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return (double)(random_u64(seed, stream, counter) >> 11) * 0x1p-53;
}

// Standard normal, by the Box-Muller transform in double. Values on two machines may differ by the rounding
// of log and cos.
RANDOM_FUNCTION double random_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint64_t bits[2];
    random_bits(seed, stream, counter, bits);
    double radius = (double)((bits[0] >> 11) + 1) * 0x1p-53; // in (0, 1], so that its logarithm is finite
    double angle = (double)(bits[1] >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(radius)) * cos(6.283185307179586 * angle);
}

// ----------------------------------------------------------------------------
// permutations

// The image of i under a random permutation of [0, n) chosen by (seed, epoch). Requires 0 <= i < n <= 2^62.
//
// A Feistel network with any round function permutes [0, 4^h); h is the smallest with 4^h >= n. If the result
// is not below n, the network is applied again ("cycle walking"). This ends, because i itself is on the cycle
// and below n. As 4^h < 4n, it takes fewer than 4 applications on average.
RANDOM_FUNCTION int64_t random_permute(uint64_t seed, uint64_t epoch, int64_t n, int64_t i) {
    int half = 0;
    while (((uint64_t)1 << 2 * half) < (uint64_t)n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t key = random_u64(seed, RANDOM_STREAM_PERMUTE, epoch);
    uint64_t x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t mixed = left ^ (random_u64(key, round, right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
