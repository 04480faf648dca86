/*
Tests llmc/run/logger.h: every line of log.jsonl is parsed as JSON, terminal output is compared as text, and a
log that cannot be written causes one warning and no incomplete line.
*/
#include <signal.h>
#include <sys/resource.h>
#include "../check.h"
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/run/report.h"

static char folder[PATH_LENGTH], log_path[PATH_LENGTH];
static Error err;

// ----------------------------------------------------------------------------
// reading back what was written

// Runs the statement with stdout (fd 1) or stderr (fd 2) redirected to a file, and reads the file into
// `captured`.
static char* captured;
#define CAPTURE(fd, statement)                                                                               \
    do {                                                                                                     \
        int saved_ = capture_begin(fd);                                                                      \
        statement;                                                                                           \
        capture_end(fd, saved_);                                                                             \
    } while (0)

static int capture_begin(int fd) {
    char path[PATH_LENGTH];
    path_join(path, folder, "captured");
    fflush(stdout);
    int saved = dup(fd), file = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0666);
    if (saved < 0 || file < 0 || dup2(file, fd) < 0) die("%s: cannot capture", path);
    close(file);
    return saved;
}

static void capture_end(int fd, int saved) {
    char path[PATH_LENGTH];
    size_t bytes;
    path_join(path, folder, "captured");
    fflush(stdout);
    dup2(saved, fd);
    close(saved);
    free(captured);
    captured = read_file(path, &bytes, &err);
    if (!captured) die("%s", err.msg);
}

// Parses the lines of the log, at most 64, into lines[]; returns their number. Checks that each ends in a
// line break.
static Json lines[64];
static int read_log(void) {
    size_t bytes;
    int count = 0;
    for (int i = 0; i < 64; i++) json_free(&lines[i]);
    char* text = read_file(log_path, &bytes, &err);
    if (!text) die("%s", err.msg);
    for (char *line = text, *end; count < 64 && *line; line = end + 1) {
        end = strchr(line, '\n');
        CHECK(end, "an unfinished line: %s", line);
        if (!end) break;
        CHECK(json_parse(&lines[count], "log", line, (size_t)(end - line), &err), "%s", err.msg);
        count++;
    }
    free(text);
    return count;
}

// The node of a key of a line; -1 if the key or the line does not exist, or the line is not JSON.
static int member(int line, const char* key) {
    return lines[line].count ? json_get(&lines[line], 0, key) : -1;
}

static double number(int line, const char* key) {
    double value = -12345; // not expected by any test
    json_double(&lines[line], member(line, key), &value);
    return value;
}

static bool has(int line, const char* key) { return member(line, key) >= 0; }

static bool text_is(int line, const char* key, const char* expected) {
    const char* text = json_string(&lines[line], member(line, key));
    return text && strcmp(text, expected) == 0;
}

static void open_log(Logger* l) {
    if (!logger_open(l, folder, &err)) die("%s", err.msg);
    l->num_steps = 1000;
}

static LogStep a_step(int64_t step, double seconds) {
    LogStep s;
    memset(&s, 0, sizeof s);
    s.step = step, s.step_tokens = 4096, s.tokens = 4096 * step;
    s.loss = 5.5, s.grad_norm = 0.25, s.lr = 1e-3;
    s.seconds = seconds;
    return s;
}

// ----------------------------------------------------------------------------

static void test_numbers(void) {
    static const struct {
        double x;
        const char* text;
    } numbers[] = {{0, "   0.0000"},          {10.82494, "  10.8249"},  {9999.9999, "9999.9999"},
                   {9999.99999, " 1.00e+04"}, {123456, " 1.23e+05"},    {1e300, "1.00e+300"},
                   {NAN, "      nan"},        {-INFINITY, "      nan"}, {INFINITY, "      nan"}};
    static const struct {
        double seconds;
        const char* text;
    } durations[] = {{0, "0s"},        {7.4, "7s"},       {59.4, "59s"},   {59.6, "1m00s"},
                     {190, "3m10s"},   {3599.7, "1h00m"}, {3725, "1h02m"}, {86399, "23h59m"},
                     {86400, "1d00h"}, {270000, "3d03h"}, {1.46e9, "46y"}, {NAN, "?"},
                     {INFINITY, "?"},  {-1, "?"}};
    char text[32];
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        CHECK(strcmp(log_number(text, numbers[i].x), numbers[i].text) == 0, "%g is printed as '%s'",
              numbers[i].x, text);
    for (size_t i = 0; i < sizeof durations / sizeof durations[0]; i++)
        CHECK(strcmp(log_duration(text, durations[i].seconds), durations[i].text) == 0,
              "%g is printed as '%s'", durations[i].seconds, text);
}

static void test_run(void) {
    Logger l;
    Options o;
    Config c;
    Recipe recipe;
    options_defaults(&o);
    if (!config_preset(&c, &recipe, "fox-pro-nano", &err)) die("%s", err.msg);
    // keys that are left out where they are the default
    c.pruning_rule = PRUNING_ACP, c.document_reset = true, c.rope_scaling.type = ROPE_LINEAR;
    o.model = "fox-pro-nano", o.lr = 0.25, o.seed = 7, o.max_steps = 3;
    ParamTable table = params_build(&c);
    World world = {.size = 4};
    Run run = {.world = &world, .options = o, .config = c, .table = table, .micro_batch = 16};
    run.state.step = 40, run.state.fingerprint = 0xabc;
    strcpy(run.device, "A GPU: its kernels\n");
    open_log(&l);
    l.flops_per_token = 1e6, l.attention_flops = 0.25e6, l.peak_flops = 2e10;
    const time_t before = time(NULL);
    run.options.max_tokens = 150, run.options.seq_len = 1;
    DataLoader data = {.set = {.sequences = 100, .mixture = {.count = 1}}};
    CAPTURE(1, run_log(&run, &l, "two\nlines", "iclr, changed: lr 1 (0.002)", &data));
    CHECK(captured[0] == '\0', "the terminal: %s", captured);
    run.device[0] = '\0', run.state.step = 0;
    data.set.mixture = (Mixture){.parts = {{.pattern = "a", .share = 0.75, .sequences = 225},
                                           {.pattern = "b", .share = 0.25, .sequences = 25}},
                                 .count = 2};
    run_log(&run, &l, "two\nlines", NULL, &data);
    const time_t after = time(NULL);
    logger_close(&l);

    CHECK(read_log() == 2, "lines");
    CHECK(text_is(0, "event", "run") && number(0, "step") == 40 && number(1, "step") == 0, "the event");
    CHECK(text_is(0, "device", "A GPU: its kernels") && text_is(1, "device", "CPU"), "devices");
    CHECK(number(0, "ranks") == 4 && number(0, "seed") == 7 && number(0, "micro_batch") == 16, "line 0");
    CHECK(text_is(0, "data_fingerprint", "0000000000000abc") && number(0, "epochs") == 1.5, "the data");
    double epochs = 0;
    const int part = json_next(&lines[1], json_first(&lines[1], member(1, "mixture")));
    CHECK(!has(0, "mixture") && json_double(&lines[1], json_get(&lines[1], part, "epochs"), &epochs),
          "parts");
    CHECK(epochs == 1.5 && strcmp(json_string(&lines[1], json_get(&lines[1], part, "data")), "b") == 0,
          "b: %g", epochs);
    CHECK(text_is(0, "recipe", "iclr, changed: lr 1 (0.002)"), "the recipe");
    CHECK(text_is(0, "version", CODE_VERSION) && text_is(0, "built_with", "two\nlines"), "the program");
    CHECK(number(0, "num_steps") == 1000 && number(0, "parameters") == (double)table.parameters, "line 0");
    CHECK(number(0, "flops_per_token") == 1e6 && number(0, "attention_flops_per_token") == 0.25e6 &&
              number(0, "peak_flops_per_s") == 2e10 &&
              number(0, "non_embedding") == (double)table.non_embedding,
          "FLOPs");
    const Json* j = &lines[0];
    double lr = 0, width = 0;
    int keys = 0;
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) { // without what stacks of layers have
        const ConfigKey* key = &config_keys[i];
        keys += config_has_key(&c, key) && key->type != KEY_LAYERS && !config_key_of_kind(key);
    }
    int options = member(0, "options"), config = member(0, "config");
    json_double(j, json_get(j, options, "lr"), &lr);
    json_double(j, json_get(j, config, "hidden_size"), &width);
    CHECK(lr == 0.25 && json_get(j, options, "max-steps") < 0, "the recorded options");
    CHECK(width == (double)c.hidden_size && json_count(j, config) == keys, "the config");
    struct tm utc;
    memset(&utc, 0, sizeof utc);
    const char* started = json_string(j, member(0, "started"));
    const char* rest = started ? strptime(started, "%Y-%m-%dT%H:%M:%SZ", &utc) : NULL;
    CHECK(rest && *rest == '\0' && timegm(&utc) >= before && timegm(&utc) <= after, "started: %s", started);
    CHECK(member(0, "host") >= 0, "no host");
    params_free(&table);
}

static void test_steps(void) {
    Logger l;
    open_log(&l);
    l.flops_per_token = 1e6, l.peak_flops = 2e10;
    LogStep first = a_step(1, 8), second = a_step(2, 1), third = a_step(3, 3), last = a_step(1000, 0.5);
    second.loss = NAN, second.grad_norm = INFINITY;
    CAPTURE(1, logger_step(&l, &first));
    CHECK(strcmp(captured, "step    1/1000  loss    5.5000  norm    0.2500  lr 1.000e-03        512 tok/s   "
                           "2.6% MFU   2h13m left\n") == 0,
          "%s", captured);
    CAPTURE(1, logger_step(&l, &second));
    CHECK(strcmp(captured, "step    2/1000  loss       nan  norm       nan  lr 1.000e-03       4096 tok/s  "
                           "20.5% MFU  16m38s left\n") == 0,
          "%s", captured);
    CAPTURE(1, logger_step(&l, &third));
    l.peak_flops = 0;
    CAPTURE(1, logger_step(&l, &last));
    CHECK(strstr(captured, "GFLOP/s      0s left\n") && !strstr(captured, "MFU"), "%s", captured);
    logger_close(&l);

    CHECK(read_log() == 4, "lines");
    CHECK(text_is(0, "event", "step") && number(0, "step") == 1 && number(0, "tokens") == 4096, "line 0");
    CHECK(number(0, "loss") == 5.5 && number(0, "grad_norm") == 0.25 && number(0, "lr") == 1e-3, "line 0");
    CHECK(number(0, "ms") == 8000 && number(0, "tokens_per_s") == 512, "the rate of the first step");
    CHECK(number(0, "eta_s") == 999 * 8 && number(0, "mfu") == 512e6 / 2e10, "line 0");
    CHECK(number(0, "model_flops_per_s") == 512e6, "line 0");
    CHECK(json_is_null(&lines[1], member(1, "loss")), "NaN is not null");
    CHECK(json_is_null(&lines[1], member(1, "grad_norm")), "infinity is not null");
    CHECK(number(1, "tokens_per_s") == 4096, "the average rate includes the first step");
    // bias-corrected moving average of 1 and 3 seconds with decay 0.95: (0.95 * 1 + 3) / (0.95 + 1)
    CHECK(fabs(number(2, "tokens_per_s") - 4096 / (3.95 / 1.95)) < 1e-9, "%.17g", number(2, "tokens_per_s"));
    CHECK(has(3, "model_flops_per_s") && !has(3, "mfu"), "MFU without a known peak");
    CHECK(number(3, "eta_s") == 0, "time left after the last step");
}

// The time left has the measures of held-out loss that are due, by the rate of training until one was
// measured.
static void test_measures(void) {
    Logger l;
    open_log(&l);
    l.measure_tokens = 8192;
    LogStep first = a_step(998, 2), second = a_step(999, 2), last = a_step(1000, 2);
    first.measures_left = 2, second.measures_left = 2, last.measures_left = 1;
    CAPTURE(1, logger_step(&l, &first));
    l.measure_seconds = 30;
    CAPTURE(1, logger_step(&l, &second));
    CAPTURE(1, logger_step(&l, &last));
    CHECK(strstr(captured, " 30s left\n"), "a validation is left: %s", captured);
    logger_close(&l);
    CHECK(read_log() == 3, "lines");
    CHECK(fabs(number(0, "eta_s") - (2 * 2 + 2 * OPTIONS_FORWARD_SHARE * 2 * 2)) < 1e-9, "%g",
          number(0, "eta_s"));
    CHECK(number(1, "eta_s") == 2 + 2 * 30 && number(2, "eta_s") == 30, "%g %g", number(1, "eta_s"),
          number(2, "eta_s"));
}

static void test_pruned(void) {
    Logger l;
    open_log(&l);
    l.flops_per_token = 1e6, l.attention_flops = 0.5e6, l.peak_flops = 2e10;
    const double pruned[] = {0, 0.5, 1};
    LogStep s = a_step(1, 1);
    s.num_layers = 3, s.pruned = pruned, s.pruned_of_all = 0.5;
    CAPTURE(1, logger_step(&l, &s));
    CHECK(strstr(captured, "20.5% MFU (15.4% executed, 50% pruned)  "), "%s", captured);
    l.peak_flops = 0;
    s.step = 1000;
    CAPTURE(1, logger_step(&l, &s));
    CHECK(strstr(captured, "GFLOP/s (50% pruned)  "), "%s", captured);
    const double nearly[] = {0.9995};
    s.step = 2000, s.num_layers = 1, s.pruned = nearly, s.pruned_of_all = nearly[0];
    s.fp8_saturated = (const int32_t[]){2, 7};
    CAPTURE(1, logger_step(&l, &s));
    CHECK(strstr(captured, "GFLOP/s (99.95% pruned)  "), "%s", captured);
    logger_close(&l);
    CHECK(read_log() == 3, "lines");
    CHECK(!has(1, "fp8_saturated_inputs") && number(2, "fp8_saturated_inputs") == 2 &&
              number(2, "fp8_saturated_gradients") == 7,
          "FP8 saturation");
    CHECK(number(0, "pruned") == 0.5 && number(0, "executed_flops_per_s") == 0.75 * 4096e6, "line 0");
    CHECK(number(0, "executed_mfu") == 0.75 * 4096e6 / 2e10 && !has(1, "executed_mfu"), "executed MFU");
    int layer = json_first(&lines[0], member(0, "pruned_by_layer"));
    for (int i = 0; i < 3; i++, layer = json_next(&lines[0], layer)) {
        double share = -1;
        CHECK(json_double(&lines[0], layer, &share) && share == pruned[i], "layer %d: %g", i, share);
    }
    CHECK(layer < 0, "too many layers");
}

// What packed documents hide is outside model FLOPs, and outside what pruning is a share of.
static void test_hidden(void) {
    Logger l;
    open_log(&l);
    l.flops_per_token = 1e6, l.attention_flops = 0.5e6, l.peak_flops = 2e10;
    const double pruned[] = {0.5};
    LogStep s = a_step(1, 1);
    s.votes.documents = (DocumentCount){4, 10, 64, 16};
    CAPTURE(1, logger_step(&l, &s));
    s.step = 1000, s.num_layers = 1, s.pruned = pruned, s.pruned_of_all = 0.5;
    CAPTURE(1, logger_step(&l, &s));
    s.votes.documents = (DocumentCount){4, 10, 0, 0}, s.num_layers = 0; // without attention
    CAPTURE(1, logger_step(&l, &s));
    s.votes.documents = (DocumentCount){4, 4, 64, 64}; // one a sequence
    CAPTURE(1, logger_step(&l, &s));
    s.votes.documents = (DocumentCount){0, 0, 0, 0};
    CAPTURE(1, logger_step(&l, &s));
    logger_close(&l);
    CHECK(read_log() == 5, "lines");
    CHECK(number(0, "documents_per_sequence") == 2.5 && number(0, "attention_in_other_documents") == 0.75 &&
              number(0, "model_flops_per_s") == 0.625e6 * 4096,
          "hidden alone");
    CHECK(number(1, "model_flops_per_s") == 0.625e6 * 4096 && number(1, "mfu") == 0.625e6 * 4096 / 2e10 &&
              number(1, "executed_flops_per_s") == 0.5625e6 * 4096,
          "hidden and pruned");
    CHECK(number(2, "documents_per_sequence") == 2.5 && !has(2, "attention_in_other_documents") &&
              number(2, "model_flops_per_s") == 1e6 * 4096,
          "without attention");
    CHECK(number(3, "documents_per_sequence") == 1 && number(3, "attention_in_other_documents") == 0 &&
              number(3, "model_flops_per_s") == 1e6 * 4096,
          "one document a sequence");
    CHECK(!has(4, "documents_per_sequence") && !has(4, "attention_in_other_documents"),
          "without document_reset");
}

static void test_ranks(void) {
    Logger l;
    open_log(&l);
    const RankTime times[] = {{1.5, 0.25, 0}, {1.75, 0.125, 0}, {1.625, 0.5, 0}};
    const RankTime shared[] = {{1, 1, 60}, {1, 1, 40}, {1, 1, 25}, {1, 1, 75}};
    LogStep s = a_step(1, 2), alone = a_step(2, 2);
    s.ranks = 3, s.times = times;
    CAPTURE(1, logger_step(&l, &s));
    CAPTURE(1, logger_step(&l, &alone));
    s.ranks = 4, s.times = shared, s.sequence_ranks = 2;
    CAPTURE(1, logger_step(&l, &s));
    s.sequence_ranks = 4;
    CAPTURE(1, logger_step(&l, &s));
    logger_close(&l);
    CHECK(read_log() == 4, "lines");
    CHECK(number(2, "attention_share") == 0.75 && number(3, "attention_share") == 0.375,
          "share of attention");
    CHECK(!has(0, "attention_share"), "no sequences are shared");
    CHECK(number(0, "tokens_per_s") == 2048 && number(0, "tokens_per_s_per_rank") == 2048 / 3.0, "tokens/s");
    CHECK(number(0, "ranks") == 3 && number(0, "slowest_rank") == 1, "the slowest rank");
    CHECK(number(0, "slowest_share") == 0.875 && number(0, "waiting_ms") == 500, "its share, and the wait");
    CHECK(!has(1, "ranks") && !has(1, "waiting_ms"), "one rank alone");
}

static void test_log_every(void) {
    static const int64_t printed[] = {41, 45, 50, 52}; // the first, every fifth, the last
    size_t next = 0;
    Logger l;
    open_log(&l);
    l.num_steps = 52, l.log_every = 5;
    for (int64_t step = 41; step <= 52; step++) {
        LogStep s = a_step(step, 1);
        CAPTURE(1, logger_step(&l, &s));
        bool expected = printed[next] == step;
        CHECK((captured[0] != '\0') == expected, "step %d: '%s'", (int)step, captured);
        next += expected;
    }
    logger_close(&l);
    CHECK(read_log() == 12, "the file lacks steps");
}

static void test_validation(void) {
    Logger l;
    LogValidation v;
    memset(&v, 0, sizeof v);
    v.byte_tokens = true, v.seconds = 2;
    for (int sequence = 0; sequence < 2; sequence++)
        for (int64_t t = 0; t < 6; t++) log_validation_add(&v, t, (double)(8 - t), 1);
    open_log(&l);
    CAPTURE(1, logger_validation(&l, 20, &v));
    CHECK(strcmp(captured, "step   20/1000  validation loss    5.5000  perplexity  244.6919  "
                           "bits per byte    7.9348\n") == 0,
          "%s", captured);
    v.byte_tokens = false;
    v.loss_sum[2] = NAN;
    CAPTURE(1, logger_validation(&l, 21, &v));
    CHECK(strcmp(captured, "step   21/1000  validation loss       nan  perplexity       nan\n") == 0, "%s",
          captured);
    memset(&v, 0, sizeof v);
    CAPTURE(1, logger_validation(&l, 22, &v));
    v.masked = true, v.accuracy = NAN; // no target counts
    CAPTURE(1, logger_validation(&l, 23, &v));
    CHECK(strcmp(captured, "step   23/1000  validation loss       nan  perplexity       nan\n") == 0, "%s",
          captured);
    log_validation_add(&v, 0, 2, 1);
    v.accuracy = 0.25;
    CAPTURE(1, logger_validation(&l, 24, &v));
    CHECK(strstr(captured, "perplexity    7.3891  accuracy 25.00%\n"), "%s", captured);
    const Mixture parts = {.parts = {{.pattern = "x/a*.bin"}, {.pattern = "b"}}, .count = 2};
    v.parts = &parts, v.part_sums[0] = 3, v.part_targets[0] = 2, v.part_sums[1] = 1, v.part_targets[1] = 4;
    CAPTURE(1, logger_validation(&l, 25, &v));
    CHECK(strstr(captured, "accuracy 25.00%  x/a*.bin    1.5000  b    0.2500\n"), "%s", captured);
    logger_close(&l);

    CHECK(read_log() == 6 && !has(4, "val_loss_of"), "lines");
    double loss = 0;
    CHECK(json_double(&lines[5], json_get(&lines[5], member(5, "val_loss_of"), "x/a*.bin"), &loss) &&
              loss == 1.5,
          "the loss of a part is %g", loss);
    CHECK(text_is(0, "event", "validation") && number(0, "step") == 20 && number(0, "val_tokens") == 12,
          "line 0");
    CHECK(number(0, "val_loss") == 5.5 && fabs(number(0, "perplexity") - exp(5.5)) < 1e-9, "line 0");
    CHECK(fabs(number(0, "bits_per_byte") - log2(exp(5.5))) < 1e-12 && !has(1, "bits_per_byte"),
          "bits per byte");
    static const double expected[4][4] = {{0, 1, 2, 8}, {1, 2, 2, 7}, {2, 4, 4, 5.5}, {4, 6, 4, 3.5}};
    static const char* const keys[4] = {"from", "to", "tokens", "loss"};
    int table = member(0, "by_position"), i = 0;
    CHECK(json_count(&lines[0], table) == 4, "%d buckets", json_count(&lines[0], table));
    for (int row = json_first(&lines[0], table); row >= 0; row = json_next(&lines[0], row), i++) {
        for (int k = 0; k < 4; k++) {
            double value = -1;
            json_double(&lines[0], json_get(&lines[0], row, keys[k]), &value);
            CHECK(value == expected[i][k], "bucket %d, %s: %g", i, keys[k], value);
        }
    }
    CHECK(json_is_null(&lines[1], member(1, "val_loss")), "NaN is null");
    CHECK(json_is_null(&lines[2], member(2, "val_loss")), "the loss of no tokens is not null");
    CHECK(json_is_null(&lines[3], member(3, "accuracy")) && number(4, "accuracy") == 0.25, "accuracy");
}

static void test_buckets(void) {
    static const int64_t positions[] = {0, 1, 2, 3, 4, 7, 8, 65535, 65536, ((int64_t)1 << 24) - 1};
    static const int buckets[] = {0, 1, 2, 2, 3, 3, 4, 16, 17, 24};
    for (size_t i = 0; i < sizeof buckets / sizeof buckets[0]; i++) {
        LogValidation v;
        memset(&v, 0, sizeof v);
        log_validation_add(&v, positions[i], 1, 1);
        CHECK(v.tokens[buckets[i]] == 1, "position %lld", (long long)positions[i]);
    }
}

static void test_events(void) {
    Logger l;
    open_log(&l);
    CAPTURE(1, logger_event(&l, 7, "sample", "two\nlines, \"quotes\", \x1b[31m and \xff"));
    CHECK(strcmp(captured, "step    7/1000  sample: two\nlines, \"quotes\", ?[31m and \xff\n") == 0, "%s",
          captured);
    logger_close(&l);
    CHECK(read_log() == 1 && text_is(0, "event", "sample") && number(0, "step") == 7, "the event");
    CHECK(text_is(0, "text", "two\nlines, \"quotes\", \x1b[31m and \xef\xbf\xbd"), "its text");
}

static void test_checkpoint(void) {
    Logger l;
    open_log(&l);
    CAPTURE(1, logger_checkpoint(&l, 8, "out/step_00000008", 0.25));
    CHECK(strcmp(captured, "step    8/1000  checkpoint: out/step_00000008\n") == 0, "%s", captured);
    logger_close(&l);
    CHECK(read_log() == 1 && text_is(0, "event", "checkpoint") && number(0, "step") == 8, "the event");
    CHECK(text_is(0, "text", "out/step_00000008") && number(0, "waited_ms") == 250, "its folder and wait");
}

static void test_terminal_only(void) {
    Logger l;
    CHECK(logger_open(&l, NULL, &err), "%s", err.msg);
    l.num_steps = 3;
    LogStep s = a_step(1, 1);
    CAPTURE(1, logger_step(&l, &s));
    CHECK(strstr(captured, "step 1/3  ") == captured, "%s", captured);
    logger_close(&l);
}

// ----------------------------------------------------------------------------
// errors

// logger_open terminates an incomplete line left by a crash, so that later lines are complete.
static void test_unfinished_line(void) {
    Logger l;
    FILE* f = fopen(log_path, "wb");
    if (!f || fputs("{\"event\":\"step\"}\n{\"event\":\"st", f) < 0 || fclose(f) != 0) die("%s", log_path);
    open_log(&l);
    CAPTURE(1, logger_event(&l, 3, "resume", "again"));
    logger_close(&l);
    size_t bytes;
    char* text = read_file(log_path, &bytes, &err);
    const char* expected =
        "{\"event\":\"step\"}\n{\"event\":\"st\n{\"event\":\"resume\",\"step\":3,\"text\":\"again\"}\n";
    CHECK(text && strcmp(text, expected) == 0, "%s", text);
    free(text);
    open_log(&l); // the last line is complete: nothing is added
    logger_close(&l);
    text = read_file(log_path, &bytes, &err);
    CHECK(text && strcmp(text, expected) == 0, "%s", text);
    free(text);
}

static void log_steps(Logger* l, int64_t from, int64_t to) {
    for (int64_t step = from; step <= to; step++) {
        LogStep s = a_step(step, 1);
        logger_step(l, &s);
    }
}

// A file size limit simulates a full disk: one write is cut short, the next ones fail.
static void test_full_disk(void) {
    Logger l;
    struct rlimit old, small;
    open_log(&l);
    CAPTURE(1, log_steps(&l, 1, 2));
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = (rlim_t)lseek(l.fd, 0, SEEK_END) + 20;
    l.log_every = 1000;
    CAPTURE(2, {
        setrlimit(RLIMIT_FSIZE, &small);
        log_steps(&l, 3, 6);
        setrlimit(RLIMIT_FSIZE, &old);
    });
    const char* line_break = strchr(captured, '\n');
    CHECK(strstr(captured, "warning: ") == captured && strstr(captured, "log.jsonl: cannot write"), "%s",
          captured);
    CHECK(line_break && line_break[1] == '\0', "one line, not: %s", captured);
    CAPTURE(2, log_steps(&l, 7, 8)); // without the limit
    CHECK(captured[0] == '\0', "%s", captured);
    logger_close(&l);
    CHECK(read_log() == 4, "lines");
    CHECK(number(1, "step") == 2 && number(2, "step") == 7 && number(3, "step") == 8,
          "logging does not continue after the failed writes");
}

static void test_cannot_open(void) {
    Logger l;
    char path[PATH_LENGTH];
    CHECK(!logger_open(&l, log_path, &err) && strstr(err.msg, "log.jsonl"),
          "a file in place of the folder: %s", err.msg);
    logger_close(&l);
    path_join(path, folder, "blocked/log.jsonl");
    if (!make_folders(path, &err)) die("%s", err.msg);
    path_join(path, folder, "blocked");
    CHECK(!logger_open(&l, path, &err) && strstr(err.msg, "cannot open"), "a folder in place of the file: %s",
          err.msg);
    logger_close(&l);
    path_join(path, folder, "log.jsonl"); // its reader may stop reading, or never come
    if (remove(path) != 0 || mkfifo(path, 0666) != 0) die("%s", path);
    CHECK(!logger_open(&l, folder, &err) && strstr(err.msg, "log.jsonl: is not a regular file"), "a pipe: %s",
          err.msg);
    logger_close(&l);
}

int main(void) {
    static void (*const tests[])(void) = {
        test_numbers,    test_run,      test_ranks,         test_checkpoint,      test_buckets,
        test_steps,      test_measures, test_pruned,        test_hidden,          test_log_every,
        test_validation, test_events,   test_terminal_only, test_unfinished_line, test_full_disk};
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        path_join(log_path, strcpy(folder, test_scratch("logger")), "log.jsonl");
        tests[i]();
    }
    test_cannot_open();
    for (int i = 0; i < 64; i++) json_free(&lines[i]);
    free(captured);
    return test_report();
}
