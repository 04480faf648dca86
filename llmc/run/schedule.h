/*
The learning rate: linear warm-up from 0, then a cosine down to 0 at the last token, as in the paper. It is a
function of the tokens seen, so that a run with another batch size follows the same curve.
*/
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include <math.h>
#include <stdint.h>

// The rate of a step that takes the training from tokens_before to tokens_before + step_tokens.
//
// The curve is read in the middle of the step's tokens: at their start the first step would have rate 0, at
// their end the last one, and its whole batch would be wasted. Tokens beyond max_tokens do not count, so that
// this holds too for a last step that reaches over the end. From max_tokens on the rate is 0. Where the
// warm-up is as long as the training, or longer, the rate just rises, to peak * max_tokens / warmup_tokens.
static inline double schedule_lr(double peak, int64_t warmup_tokens, int64_t max_tokens,
                                 int64_t tokens_before, int64_t step_tokens) {
    if (tokens_before >= max_tokens) return 0;
    int64_t left = max_tokens - tokens_before;
    double x = (double)tokens_before + 0.5 * (double)(step_tokens < left ? step_tokens : left);
    if (x < (double)warmup_tokens) return peak * x / (double)warmup_tokens;
    double progress = (x - (double)warmup_tokens) / (double)(max_tokens - warmup_tokens);
    return peak * 0.5 * (1 + cos(3.14159265358979323846 * progress));
}

#endif // LLMC_SCHEDULE_H
