/*
The learning rate: linear warm-up from 0, then a cosine to 0 at the last token, the shape of the paper's
schedule (arXiv 2503.02130). It is a function of the tokens seen, not of the steps, so that runs with
different batch sizes follow the same curve.

Called by train.h.
*/
#pragma once

#include <math.h>
#include <stdint.h>

// Learning rate of a step that trains on tokens [tokens_before, tokens_before + step_tokens).
//
// The curve is evaluated in the middle of the step's tokens before max_tokens: at their start the first step
// would have rate 0, and at their end the last step would. From max_tokens on the rate is 0. If the warm-up
// is at least as long as the training, the rate only rises, to peak * max_tokens / warmup_tokens.
static inline double schedule_lr(double peak, int64_t warmup_tokens, int64_t max_tokens,
                                 int64_t tokens_before, int64_t step_tokens) {
    if (tokens_before >= max_tokens) return 0;
    int64_t left = max_tokens - tokens_before;
    double x = (double)tokens_before + 0.5 * (double)(step_tokens < left ? step_tokens : left);
    if (x < (double)warmup_tokens) return peak * x / (double)warmup_tokens;
    double progress = (x - (double)warmup_tokens) / (double)(max_tokens - warmup_tokens);
    return peak * 0.5 * (1 + cos(3.14159265358979323846 * progress));
}
