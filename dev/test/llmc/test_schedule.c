/*
Tests of llmc/run/schedule.h: edge cases, closed forms, and that no step of a run has rate 0.
*/
#include "../check.h"
#include "../../../llmc/run/schedule.h"

#define SQRT3 1.7320508075688772935

static bool close_to(double a, double b) { return fabs(a - b) <= 1e-15; }

// The cosine's rate of a step.
static double cosine_lr(double peak, int64_t warmup, int64_t max, int64_t tokens, int64_t step_tokens) {
    Options o;
    options_defaults(&o);
    o.lr = peak;
    o.warmup_tokens = warmup;
    o.max_tokens = max;
    o.lr_end = 0;
    schedule_check(&o);
    return schedule_lr(&o, tokens, step_tokens);
}

// The other schedules, 200 tokens of warm-up and 800 in all, at points where their formulas are simple.
static void test_kinds(void) {
    static const struct {
        ScheduleKind kind;
        double end;
        double rates[6]; // of 100, 200, 350, 500, 650 and 700 tokens
    } rows[] = {{SCHEDULE_COSINE,
                 0.5,
                 {0.5, 1, 0.75 + 0.25 * M_SQRT1_2, 0.75, 0.75 - 0.25 * M_SQRT1_2, 0.75 - 0.125 * SQRT3}},
                {SCHEDULE_LINEAR, 0, {0.5, 1, 0.75, 0.5, 0.25, 1.0 / 6}},
                {SCHEDULE_LINEAR, 0.1, {0.5, 1, 0.775, 0.55, 0.325, 0.25}},
                {SCHEDULE_CONSTANT, 0, {0.5, 1, 1, 1, 1, 1}},
                {SCHEDULE_WSD, 0, {0.5, 1, 1, 1, 0.75, 0.5}},
                {SCHEDULE_WSD, 0.2, {0.5, 1, 1, 1, 0.8, 0.6}},
                {SCHEDULE_WSD_SQRT, 0, {0.5, 1, 1, 1, 0.5, 1 - M_SQRT1_2}},
                {SCHEDULE_WSD_SQRT, 0.2, {0.5, 1, 1, 1, 0.6, 1 - 0.8 * M_SQRT1_2}}};
    static const int64_t tokens[] = {100, 200, 350, 500, 650, 700};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        Options o;
        options_defaults(&o);
        o.lr = 2;
        o.warmup_tokens = 200;
        o.max_tokens = 800;
        o.lr_schedule = rows[r].kind;
        o.lr_end = rows[r].end;
        if (options_cools_down(&o)) o.cooldown_tokens = 200;
        schedule_check(&o);
        for (int i = 0; i < 6; i++) {
            double rate = schedule_lr(&o, tokens[i], 0), want = 2 * rows[r].rates[i];
            CHECK(fabs(rate - want) <= 1e-15, "%s to %g, %lld tokens: %.17g, not %.17g",
                  option_schedule_names[rows[r].kind], o.lr_end, (long long)tokens[i], rate, want);
        }
        CHECK(schedule_lr(&o, 800, 100) == 0, "%s: past the end", option_schedule_names[rows[r].kind]);
    }
}

static void test_refused(void) {
    Options o;
    options_defaults(&o);
    o.warmup_tokens = 200;
    o.max_tokens = 800;
    o.lr_end = 0;
    o.cooldown_tokens = 100;
    CHECK_DIES("--cooldown-tokens: only --lr-schedule wsd and wsd-sqrt have a cool-down", schedule_check(&o));
    o.lr_schedule = SCHEDULE_WSD;
    schedule_check(&o);
    o.lr_schedule = SCHEDULE_WSD_SQRT;
    schedule_check(&o);
    o.cooldown_tokens = 601;
    CHECK_DIES("--cooldown-tokens 601 and --warmup-tokens 200: more than --max-tokens 800; lower one of them",
               schedule_check(&o));
    o.warmup_tokens = 900; // alone, too
    CHECK_DIES("--cooldown-tokens 601 and --warmup-tokens 900: more than --max-tokens 800",
               schedule_check(&o));
    o.lr_schedule = SCHEDULE_CONSTANT;
    o.cooldown_tokens = OPTION_UNSET;
    o.lr_end = 0.1;
    CHECK_DIES("--lr-end: the learning rate of --lr-schedule constant does not fall", schedule_check(&o));
}

// Warm-up and cosine at points where the formula is simple. Steps of 0 tokens evaluate the curve at a point.
static void test_shape(void) {
    static const struct {
        int64_t tokens;
        double rate;
    } points[] = {
        {0, 0},      {50, 0.25}, {100, 0.5}, {200, 1},    {400, 0.75},          {500, 0.5},
        {600, 0.25}, {800, 0},   {801, 0},   {100000, 0}, {INT64_MAX / 2, 0.0},
    };
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        double rate = cosine_lr(3, 200, 800, points[i].tokens, 0);
        CHECK(close_to(rate, 3 * points[i].rate), "%lld tokens: %.17g", (long long)points[i].tokens, rate);
    }
}

static void test_middle_of_the_step(void) {
    CHECK(close_to(cosine_lr(1, 200, 800, 0, 100), 0.25), "the first step");
    CHECK(close_to(cosine_lr(1, 200, 800, 350, 100), 0.75), "a step on the cosine");
    CHECK(close_to(cosine_lr(1, 200, 800, 700, 100), cosine_lr(1, 200, 800, 750, 0)), "the last step");
    // of a last step that exceeds max_tokens, only the tokens before it count
    CHECK(close_to(cosine_lr(1, 200, 800, 790, 1000), cosine_lr(1, 200, 800, 795, 0)), "over the end");
    CHECK(cosine_lr(1, 200, 800, 799, 1000) > 0, "the last token");
    CHECK(cosine_lr(1, 200, 800, 800, 1000) == 0, "past the end");
}

static void test_edges(void) {
    CHECK(close_to(cosine_lr(1, 0, 800, 0, 0), 1), "no warm-up starts at the peak");
    CHECK(close_to(cosine_lr(1, 0, 800, 400, 0), 0.5), "no warm-up");
    CHECK(close_to(cosine_lr(1, 800, 800, 400, 0), 0.5), "all warm-up");
    CHECK(close_to(cosine_lr(1, 1600, 800, 700, 100), 750.0 / 1600), "warm-up longer than the training");
    CHECK(cosine_lr(1, 1600, 800, 800, 100) == 0, "past the end of a training that was all warm-up");
    CHECK(cosine_lr(1, 0, 0, 0, 100) == 0, "no training at all");
    CHECK(cosine_lr(0, 200, 800, 400, 100) == 0, "rate 0");
    const int64_t huge = (int64_t)1 << 60;
    CHECK(close_to(cosine_lr(1, 0, huge, huge / 2, 0), 0.5), "2^60 tokens");
    CHECK(cosine_lr(1, huge, huge, 0, (int64_t)1 << 40) > 0, "2^60 tokens of warm-up");
}

// The paper's recipe at 125m: every step has a positive rate, rising through the warm-up and falling
// afterwards, and over the whole run the rates' sum is the area under the curve.
static void test_recipe(void) {
    const int64_t step = 524288, warmup = 268435456, max = 2684354560;
    const double peak = 2e-3;
    double sum = 0, before = 0;
    for (int64_t tokens = 0; tokens < max; tokens += step) {
        double rate = cosine_lr(peak, warmup, max, tokens, step);
        bool rises = tokens + step <= warmup;
        CHECK(rate > 0 && rate <= peak, "%lld tokens: %g", (long long)tokens, rate);
        CHECK(tokens == 0 || tokens == warmup || (rate > before) == rises, "%lld tokens: %g after %g",
              (long long)tokens, rate, before);
        before = rate;
        sum += rate * (double)step;
    }
    CHECK(fabs(sum / (peak * (double)max / 2) - 1) < 1e-12, "the area is %.17g", sum);
}

int main(void) {
    test_shape();
    test_middle_of_the_step();
    test_edges();
    test_recipe();
    test_kinds();
    test_refused();
    return test_report();
}
