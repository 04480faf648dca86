/*
Draws the next tokens on the device, by the same rules and random numbers as the CPU's sampler
(llmc/inference/sampler.h): temperature, top-k, top-p, min-p.

    in    logits [rows, row_stride] float; draws [outputs]; scores with the most likely token of each output
    out   RowScore.drawn; the pass's next tokens and positions (pass_advance)

One thread block a row. Tokens are ordered by sampler_key. Cuts are found by bisection over the keys: each
iteration sums a measure (count or weight) over all tokens up to a key. Measures are integers, so no sum
depends on an order.

Called after row_scores.
*/
#pragma once

#include "scores.cuh"

enum { DRAW_THREADS = 1024 };

// Sum over the thread block, returned to all threads
__device__ static inline uint64_t draw_sum(uint64_t x) {
    __shared__ uint64_t warp_sums[DRAW_THREADS / 32];
    auto lane_sum = [](uint64_t y) {
        for (int step = 16; step > 0; step /= 2) y += __shfl_xor_sync(~0u, y, step);
        return y;
    };
    x = lane_sum(x);
    __syncthreads(); // the sums of an earlier call have been read
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    return lane_sum(warp_sums[threadIdx.x % 32]);
}

struct DrawRow {
    const float* logits;
    int V;
    float best;
    SamplerSettings settings;

    __device__ uint64_t key(int i) const { return sampler_key(logits[i], i); }
    __device__ uint64_t weight(int i) const { return sampler_weight(logits[i], best, settings.temperature); }

    // Sum of measure(i) over the tokens whose key is at most `last`
    template <class Measure> __device__ uint64_t sum(uint64_t last, const Measure& measure) const {
        uint64_t mine = 0;
        for (int i = (int)threadIdx.x; i < V; i += DRAW_THREADS)
            if (key(i) <= last) mine += measure(i);
        return draw_sum(mine);
    }

    // Smallest key whose sum is `enough`; the sum over all tokens is.
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

    // Key of the last token within top-k and top-p, as sampler_cut
    __device__ uint64_t cut() const {
        auto one = [](int) { return (uint64_t)1; };
        auto weight_of = [this](int i) { return weight(i); };
        uint64_t last = UINT64_MAX;
        if (settings.top_k > 0 && settings.top_k < V)
            last = select(one, [this](uint64_t n) { return n >= (uint64_t)settings.top_k; });
        if (settings.top_p < 1) {
            double threshold = settings.top_p * (double)sum(last, weight_of);
            // at least one token is kept
            last = min(last, select(weight_of, [&](uint64_t n) { return n > 0 && (double)n >= threshold; }));
        }
        return last;
    }

    // Can a token be drawn?
    __device__ bool kept(int i, uint64_t last) const {
        return key(i) <= last && (double)weight(i) >= settings.min_p * SAMPLER_ONE;
    }

    // Inverse of the cumulative weight at the target; a thread has `share` adjacent tokens.
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
            for (int i = begin; i < end; i++) {
                if (!kept(i, last)) continue;
                before += weight(i);
                if (before > target) {
                    token = i;
                    break;
                }
            }
        __syncthreads();
        return token;
    }
};

// One thread block an output
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
    __syncthreads(); // pass_advance and the stores below overwrite what all threads have now read
    if (threadIdx.x > 0) return;
    score->drawn = token;
    o.draws[output].counter++;
    pass_advance(o, output, token);
}

// Draws the tokens of outputs first, first + 1, .. from rows 0, 1, .. of logits.
static inline void row_draws(const PassOutputs* outputs, const float* logits, int64_t first,
                             const LogitShape* shape, cudaStream_t stream) {
    Range range("lm_head and loss", RANGE_FORWARD, stream);
    launch_after(draw_kernel, dim3((unsigned)shape->rows), DRAW_THREADS, 0, stream, *outputs, logits,
                 (int)first, (int)shape->V, shape->row_stride);
}
