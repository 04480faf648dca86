/*
The learning rate as a function of the tokens seen, not of the steps, so that runs with different batch sizes
follow the same curve: linear warm-up from 0 to --lr over --warmup-tokens, then by --lr-schedule, with F =
--lr-end and p rising from 0 behind the warm-up to 1 at --max-tokens,

    cosine      F + (1 - F) (1 + cos(pi p)) / 2     the paper's (arXiv 2503.02130) with F = 0, the default
    linear      1 - (1 - F) p
    constant    1
    wsd         1, and over the last --cooldown-tokens 1 - (1 - F) q, with q rising from 0 to 1
    wsd-sqrt    the same, 1 - (1 - F) sqrt(q)           the official code's cool-down beside wsd's

Called by configure.h, train.h and report.h.
*/
#pragma once

#include <math.h>
#include "command/options.h"

// Dies where the options of the schedule contradict one another. They are complete.
static inline void schedule_check(const Options* o) {
    const bool cools_down = options_cools_down(o);
    if (!cools_down && o->cooldown_tokens != OPTION_UNSET)
        die("--cooldown-tokens: only --lr-schedule wsd and wsd-sqrt have a cool-down");
    if (o->lr_schedule == SCHEDULE_CONSTANT && o->lr_end != 0)
        die("--lr-end: the learning rate of --lr-schedule constant does not fall");
    if (cools_down && o->cooldown_tokens > o->max_tokens - o->warmup_tokens)
        die("--cooldown-tokens %lld and --warmup-tokens %lld: more than --max-tokens %lld; lower one of them",
            (long long)o->cooldown_tokens, (long long)o->warmup_tokens, (long long)o->max_tokens);
}

// The share of the peak at token x, behind the warm-up.
static inline double schedule_share(const Options* o, double x) {
    const double max = (double)o->max_tokens, fall = 1 - o->lr_end;
    const double cooldown = options_cools_down(o) ? (double)o->cooldown_tokens : 0, begin = max - cooldown;
    const double progress = (x - (double)o->warmup_tokens) / (max - (double)o->warmup_tokens);
    switch ((ScheduleKind)o->lr_schedule) {
    case SCHEDULE_COSINE: return o->lr_end + fall * (0.5 * (1 + cos(3.14159265358979323846 * progress)));
    case SCHEDULE_LINEAR: return 1 - fall * progress;
    case SCHEDULE_CONSTANT: return 1;
    case SCHEDULE_WSD: return x <= begin ? 1 : 1 - fall * (x - begin) / cooldown;
    case SCHEDULE_WSD_SQRT: return x <= begin ? 1 : 1 - fall * sqrt((x - begin) / cooldown);
    }
    return 0;
}

// Learning rate of a step that trains on tokens [tokens_before, tokens_before + step_tokens).
//
// The curve is evaluated in the middle of the step's tokens before max_tokens: at their start the first step
// would have rate 0, and at their end the last step would. From max_tokens on the rate is 0. If the warm-up
// is at least as long as the training, the rate only rises, to peak * max_tokens / warmup_tokens.
static inline double schedule_lr(const Options* o, int64_t tokens_before, int64_t step_tokens) {
    if (tokens_before >= o->max_tokens) return 0;
    const int64_t left = o->max_tokens - tokens_before;
    const double x = (double)tokens_before + 0.5 * (double)(step_tokens < left ? step_tokens : left);
    if (x < (double)o->warmup_tokens) return o->lr * x / (double)o->warmup_tokens;
    return o->lr * schedule_share(o, x);
}
