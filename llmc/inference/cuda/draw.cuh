/*
Draws the next tokens on the device, by the same rules and random numbers as the CPU's sampler
(llmc/inference/sampler.h).

A thread block has a row of logits. The cuts are found by bisection over the tokens' keys: each step adds up
what all tokens up to a key have in all. Sums are those of integers, so that they do not depend on an order.

Called by scores.cuh's caller, after row_scores.
*/
#pragma once

#include "scores.cuh"

enum { DRAW_THREADS = 1024 };

// The sum over the thread block, in every thread.
__device__ static inline uint64_t draw_sum(uint64_t x) {
    __shared__ uint64_t of_warp[DRAW_THREADS / 32];
    auto of_lanes = [](uint64_t y) {
        for (int step = 16; step > 0; step /= 2) y += __shfl_xor_sync(~0u, y, step);
        return y;
    };
    x = of_lanes(x);
    __syncthreads(); // those of a call before have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    return of_lanes(of_warp[threadIdx.x % 32]);
}

struct DrawRow {
    const float* logits;
    int V;
    float best;
    SamplerSettings settings;

    __device__ uint64_t key(int i) const { return sampler_key(logits[i], i); }
    __device__ uint64_t weight(int i) const { return sampler_weight(logits[i], best, settings.temperature); }

    // The sum of measure(i) over the tokens whose key is at most `last`.
    template <class Measure> __device__ uint64_t sum(uint64_t last, const Measure& measure) const {
        uint64_t mine = 0;
        for (int i = (int)threadIdx.x; i < V; i += DRAW_THREADS)
            if (key(i) <= last) mine += measure(i);
        return draw_sum(mine);
    }

    // The smallest key up to which the sum is enough. That of all tokens is.
    template <class Measure, class Enough>
    __device__ uint64_t select(const Measure& measure, const Enough& enough) const {
        uint64_t logit = search_first(
            0u, UINT32_MAX, [&](uint32_t x) { return enough(sum((uint64_t)x << 32 | UINT32_MAX, measure)); });
        uint64_t end = logit << 32 | UINT32_MAX;
        if (sum(end, [&](int i) { return (uint64_t)(key(i) >> 32 == logit); }) == 1) return end;
        return logit << 32 | search_first(0u, UINT32_MAX >> __clz(V), [&](uint32_t x) { // of equal logits
                   return enough(sum(logit << 32 | x, measure));
               });
    }

    // The key of the last token that the cuts keep, as sampler_cut.
    __device__ uint64_t cut() const {
        auto one = [](int) { return (uint64_t)1; };
        auto own = [this](int i) { return weight(i); };
        uint64_t last = UINT64_MAX;
        if (settings.top_k > 0 && settings.top_k < V)
            last = select(one, [this](uint64_t n) { return n >= (uint64_t)settings.top_k; });
        if (settings.top_p < 1) {
            double least = settings.top_p * (double)sum(last, own);
            // at least one token is kept
            last = min(last, select(own, [&](uint64_t n) { return n > 0 && (double)n >= least; }));
        }
        return last;
    }

    // Is a token drawn from?
    __device__ bool kept(int i, uint64_t last) const {
        return key(i) <= last && (double)weight(i) >= settings.min_p * SAMPLER_ONE;
    }

    // The token within whose weight the target falls: each thread has adjacent tokens.
    __device__ int draw(uint64_t counter) const {
        __shared__ uint64_t sums[DRAW_THREADS];
        __shared__ int token;
        uint64_t last = cut(), mine = 0, before = 0, total;
        int share = (V + DRAW_THREADS - 1) / DRAW_THREADS, begin = (int)threadIdx.x * share;
        int end = min(begin + share, V);
        for (int i = begin; i < end; i++) mine += kept(i, last) ? weight(i) : 0;
        sums[threadIdx.x] = mine;
        total = draw_sum(mine);
        uint64_t target = sampler_target(&settings, counter, total);
        for (int i = 0; i < (int)threadIdx.x; i++) before += sums[i];
        if (before <= target && target < before + mine)
            for (int i = begin; i < end; i++)
                if (kept(i, last) && (before += weight(i)) > target) {
                    token = i;
                    break;
                }
        __syncthreads();
        return token;
    }
};

// Block: an output, whose score has been computed
__global__ static void __launch_bounds__(DRAW_THREADS)
    draw_kernel(const __grid_constant__ PassOutputs o, const float* logits, int first, int V,
                int64_t row_stride) {
    kernel_wait();
    int output = first + (int)blockIdx.x;
    RowScore* score = pass_score(o, output);
    Draw draw = o.draws[output];
    int token = score->best;
    DrawRow row = {logits + blockIdx.x * row_stride, V, 0, draw.settings};
    if (token >= 0 && draw.settings.temperature != 0) {
        row.best = row.logits[token];
        token = row.draw(draw.counter);
    }
    __syncthreads(); // all have read the step, the score and the draw
    if (threadIdx.x > 0) return;
    score->drawn = token;
    o.draws[output].counter++;
    pass_advance(o, output, token);
}

// The tokens of outputs first, first + 1, .. from their rows of logits, after row_scores.
static inline void row_draws(const PassOutputs* outputs, const float* logits, int64_t first,
                             const LogitShape* shape, cudaStream_t stream) {
    Range range("lm_head and loss", RANGE_FORWARD, stream);
    launch_after(draw_kernel, dim3((unsigned)shape->rows), DRAW_THREADS, 0, stream, *outputs, logits,
                 (int)first, (int)shape->V, shape->row_stride);
}
