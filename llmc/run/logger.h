/*
The log of a run: one line per step on the terminal, for people, and more detail in OUT/log.jsonl, for
programs.

log.jsonl has one JSON object per line, with a key "event": "run", "step", "validation", or the name of
another event. Numbers that are not finite are null there and nan on the terminal. A "run" line comes first,
and again wherever a process resumes the run: what is trained, by which program, on what, since when.

Called by llmc/train, report.h and llmc/eval. Each line is written with a single call to a file opened for
appending, so that a crash can truncate only the last line; opening the file again terminates such a line. A
log that cannot be written, as on a full disk, causes one warning and never stops training. After a run
resumed from an earlier step the file contains some steps twice, with the "run" and "resume" events between
them: the later line counts.
*/
#pragma once

#include <math.h>
#include "../base/common.h"
#include "../base/octaves.h"
#include "../formats/json_writer.h"
#include "../model/shapes.h"
#include "../tokens/mixture.h"
#include "command/options.h"

#define LOG_LN2 0.69314718055994530942 // nats per bit

typedef struct {
    // set by the caller after logger_open
    int64_t num_steps;      // last step of the run
    int64_t log_every;      // steps between lines on the terminal
    double flops_per_token; // model FLOPs, forward and backward; 0: not printed
    double attention_flops; // the part of them that attention takes
    double peak_flops;      // of all devices, per second; 0: not known, no MFU
    int64_t measure_tokens; // of a measure of the held-out loss
    double measure_seconds; // that the last one took; 0: there was none

    int fd; // of log.jsonl; -1: terminal only
    char path[PATH_LENGTH];
    JsonWriter line;
    bool warned;
    int64_t steps;                        // logged by this process
    double recent_tokens, recent_seconds; // decayed sums over its steps
} Logger;

// One optimizer step.
typedef struct {
    int64_t step;        // counts from 1
    int64_t tokens;      // trained on so far, this step included
    int64_t step_tokens; // of this step
    double loss, grad_norm, lr;
    double spike_norm;     // as AdamWParams
    double seconds;        // duration of the step
    bool masked;           // the data says which targets count
    bool own_finite;       // this rank's part of loss and gradient
    StepVotes votes;       // of all ranks
    int ranks;             // of the run
    const RankTime* times; // [ranks]; not set where there is one rank
    int sequence_ranks;    // that share a sequence; 1: each has its own
    int64_t measures_left; // of the held-out loss, from this step on

    // Fraction of attention's FLOPs within documents that were pruned, per layer that has it, and of all these;
    // num_layers 0: the model does not prune.
    int num_layers;
    const double* pruned;
    double pruned_of_all;

    // inputs and gradients with values out of FP8's range; NULL: GEMMs are in bf16
    const int32_t* fp8_saturated;
} LogStep;

// ----------------------------------------------------------------------------
// validation: the loss by octave of the position in the context

typedef struct {
    double loss_sum[MAX_OCTAVES];
    int64_t tokens[MAX_OCTAVES];
    int64_t seq_len;  // largest position added, plus 1
    bool byte_tokens; // tokens are bytes: also log bits per byte
    bool masked;      // not all targets count: also log the accuracy
    double accuracy;
    double seconds;       // duration of the validation
    const Mixture* parts; // whose losses are known, too, where there are several; NULL: none
    double part_sums[MIXTURE_PARTS], part_targets[MIXTURE_PARTS];
} LogValidation;

// Adds the losses, in sum, of `tokens` tokens at position t = 0 .. T-1 of their sequences, to a struct that
// starts as all zeros.
static inline void log_validation_add(LogValidation* v, int64_t t, double loss_sum, int64_t tokens) {
    v->loss_sum[octave_of(t)] += loss_sum;
    v->tokens[octave_of(t)] += tokens;
    if (t >= v->seq_len) v->seq_len = t + 1;
}

// Returns the number of tokens added so far, and in *loss their mean loss: NaN if there are none.
static inline int64_t log_validation_total(const LogValidation* v, double* loss) {
    double sum = 0;
    int64_t tokens = 0;
    for (int i = 0; i < MAX_OCTAVES; i++) sum += v->loss_sum[i], tokens += v->tokens[i];
    *loss = tokens ? sum / (double)tokens : NAN;
    return tokens;
}

// ----------------------------------------------------------------------------
// numbers on the terminal

// Formats a number in 9 columns: with four decimals, or with an exponent if it is too large.
static inline const char* log_number(char text[32], double x) {
    if (!isfinite(x))
        snprintf(text, 32, "%9s", "nan");
    else
        snprintf(text, 32, fabs(x) < 9999.99995 ? "%9.4f" : "%9.2e", x);
    return text;
}

// Formats a duration as 7s, 3m10s, 1h02m, 2d03h or 46y; "?" if it is not known.
static inline const char* log_duration(char text[32], double seconds) {
    if (!(seconds >= 0 && seconds < 1e15)) {
        snprintf(text, 32, "?");
        return text;
    }
    long long s = llround(seconds);
    if (s >= 730LL * 86400)
        snprintf(text, 32, "%lldy", s / 31556952);
    else if (s >= 86400)
        snprintf(text, 32, "%lldd%02lldh", s / 86400, s / 3600 % 24);
    else if (s >= 3600)
        snprintf(text, 32, "%lldh%02lldm", s / 3600, s / 60 % 60);
    else if (s >= 60)
        snprintf(text, 32, "%lldm%02llds", s / 60, s % 60);
    else
        snprintf(text, 32, "%llds", s);
    return text;
}

// Prints the beginning of a line: the step, padded to the width of the last step.
static inline void logger_print_step(const Logger* l, int64_t step) {
    int width = snprintf(NULL, 0, "%lld", (long long)l->num_steps);
    printf("step %*lld/%lld  ", width, (long long)step, (long long)l->num_steps);
}

// ----------------------------------------------------------------------------
// the file

// Warns once that lines are missing from the file; why: an errno.
static inline void logger_warn(Logger* l, int why) {
    if (!l->warned)
        warn("%s: cannot write: %s; training continues, with lines missing from the log", l->path,
             strerror(why));
    l->warned = true;
}

// Opens OUT/log.jsonl for appending, and creates folder and file if they do not exist; out NULL: terminal
// only. The caller then sets the first six fields. It calls logger_close also on error.
static inline bool logger_open(Logger* l, const char* out, Error* err) {
    memset(l, 0, sizeof *l);
    l->fd = -1;
    l->log_every = 1;
    l->line = json_writer(0);
    if (!out) return true;
    if (!make_folders(out, err)) return false;
    path_join(l->path, out, "log.jsonl");
    struct stat st;
    l->fd = open(l->path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    if (l->fd < 0) return fail(err, "%s: cannot open: %s", l->path, strerror(errno));
    if (fstat(l->fd, &st) != 0 || !S_ISREG(st.st_mode)) // a full pipe would block training
        return fail(err, "%s: is not a regular file; move it away", l->path);
    char last = '\n';
    off_t bytes = lseek(l->fd, 0, SEEK_END);
    if (bytes > 0 && pread(l->fd, &last, 1, bytes - 1) != 1)
        return fail(err, "%s: cannot read: %s", l->path, strerror(errno));
    if (last != '\n' && write(l->fd, "\n", 1) != 1) logger_warn(l, errno);
    return true;
}

static inline void logger_close(Logger* l) {
    if (l->fd >= 0 && close(l->fd) != 0) logger_warn(l, errno);
    json_writer_free(&l->line);
    l->fd = -1;
}

// Begins a line of the file.
static inline JsonWriter* logger_begin_line(Logger* l, const char* event, int64_t step) {
    json_writer_clear(&l->line);
    json_begin_object(&l->line, NULL);
    json_put_string(&l->line, "event", event);
    json_put_int(&l->line, "step", step);
    return &l->line;
}

// Ends the line and writes it. A line that a full disk cut short is removed again.
static inline void logger_end_line(Logger* l) {
    json_end(&l->line);
    if (l->fd < 0) return;
    json_append_(&l->line, "\n", 1);
    ssize_t written = write(l->fd, l->line.text, l->line.length);
    if (written == (ssize_t)l->line.length) return;
    int why = written < 0 ? errno : ENOSPC;
    if (written > 0 && ftruncate(l->fd, lseek(l->fd, 0, SEEK_CUR) - written) != 0) why = errno;
    logger_warn(l, why);
}

// Whether the file has a line of the event at the step, with the beginning that logger_begin_line writes.
static inline bool logger_has(const Logger* l, const char* event, int64_t step) {
    char begin[64], *line = NULL;
    const int length =
        snprintf(begin, sizeof begin, "{\"event\":\"%s\",\"step\":%lld,", event, (long long)step);
    size_t room = 0;
    bool found = false;
    FILE* file = l->fd >= 0 ? fopen(l->path, "r") : NULL;
    while (file && !found && getline(&line, &room, file) > 0)
        found = strncmp(line, begin, (size_t)length) == 0;
    free(line);
    if (file) fclose(file);
    return found;
}

// ----------------------------------------------------------------------------
// events

// The largest share of attention's blocks that one of the ranks has which share sequences: 1 / sequence_ranks
// where pruning leaves all of them the same work. 0: sequences are not shared, or blocks not counted.
static inline double logger_attention_share(const LogStep* s) {
    double largest = 0;
    for (int first = 0; s->sequence_ranks > 1 && first + s->sequence_ranks <= s->ranks;
         first += s->sequence_ranks) {
        double sum = 0, most = 0;
        for (int r = first; r < first + s->sequence_ranks; r++) {
            sum += s->times[r].attention;
            if (s->times[r].attention > most) most = s->times[r].attention;
        }
        if (sum > 0 && most / sum > largest) largest = most / sum;
    }
    return largest;
}

// How the ranks spent a step: tokens per second of one, the rank that computed longest with its share of the
// step's time, and the longest time that a rank waited for others' gradients and weights, in ms.
static inline void logger_put_ranks(JsonWriter* w, const LogStep* s, double tokens_per_s) {
    int slowest = 0;
    double waiting = 0;
    for (int r = 0; r < s->ranks; r++) {
        if (s->times[r].computing > s->times[slowest].computing) slowest = r;
        if (s->times[r].waiting > waiting) waiting = s->times[r].waiting;
    }
    json_put_int(w, "ranks", s->ranks);
    json_put_double(w, "tokens_per_s_per_rank", tokens_per_s / s->ranks);
    json_put_int(w, "slowest_rank", slowest);
    json_put_double(w, "slowest_share", s->times[slowest].computing / s->seconds);
    json_put_double(w, "waiting_ms", 1000 * waiting);
    const double share = logger_attention_share(s);
    if (share > 0) json_put_double(w, "attention_share", share);
}

// Logs an optimizer step. The terminal shows the first and the last step of the process and every
// log_every-th.
//
// Tokens per second are a moving average: the ratio of two sums with exponentially decaying weights, which
// needs no bias correction. The first step of the process, which includes warm-up, is not part of it.
static inline void logger_step(Logger* l, const LogStep* s) {
    const double decay = 0.95;
    double tokens_per_s = (double)s->step_tokens / s->seconds;
    if (l->steps++ > 0) {
        l->recent_tokens = decay * l->recent_tokens + (double)s->step_tokens;
        l->recent_seconds = decay * l->recent_seconds + s->seconds;
        tokens_per_s = l->recent_tokens / l->recent_seconds;
    }
    const DocumentCount* documents = &s->votes.documents;
    double hidden = documents_hidden(documents), attention = (1 - hidden) * l->attention_flops;
    double flops = (l->flops_per_token - hidden * l->attention_flops) * tokens_per_s;
    const double pruned = s->pruned_of_all;
    double executed = flops - pruned * attention * tokens_per_s;
    const double measure = l->measure_seconds > 0
                               ? l->measure_seconds
                               : OPTIONS_FORWARD_SHARE * (double)l->measure_tokens / tokens_per_s;
    double seconds_left = (double)(l->num_steps - s->step) * (double)s->step_tokens / tokens_per_s +
                          (double)s->measures_left * measure;

    JsonWriter* w = logger_begin_line(l, "step", s->step);
    json_put_int(w, "tokens", s->tokens);
    if (s->masked) json_put_int(w, "targets", (int64_t)s->votes.targets);
    json_put_double(w, "loss", s->loss);
    json_put_double(w, "grad_norm", s->grad_norm);
    if (norm_is_spike(s->grad_norm, s->spike_norm)) json_put_bool(w, "skipped", true);
    json_put_double(w, "lr", s->lr);
    json_put_double(w, "ms", 1000 * s->seconds);
    json_put_double(w, "tokens_per_s", tokens_per_s);
    if (s->ranks > 1) logger_put_ranks(w, s, tokens_per_s);
    if (documents->sequences > 0)
        json_put_double(w, "documents_per_sequence", documents->documents / documents->sequences);
    if (documents->pairs > 0) json_put_double(w, "attention_in_other_documents", hidden);
    if (l->flops_per_token > 0) json_put_double(w, "model_flops_per_s", flops);
    if (l->flops_per_token > 0 && l->peak_flops > 0) json_put_double(w, "mfu", flops / l->peak_flops);
    if (s->num_layers > 0) {
        json_put_double(w, "executed_flops_per_s", executed);
        if (l->peak_flops > 0) json_put_double(w, "executed_mfu", executed / l->peak_flops);
        json_put_double(w, "pruned", pruned);
        json_begin_array(w, "pruned_by_layer");
        for (int i = 0; i < s->num_layers; i++) json_put_double(w, NULL, s->pruned[i]);
        json_end(w);
    }
    if (s->fp8_saturated) {
        json_put_int(w, "fp8_saturated_inputs", s->fp8_saturated[0]);
        json_put_int(w, "fp8_saturated_gradients", s->fp8_saturated[1]);
    }
    json_put_double(w, "eta_s", seconds_left);
    logger_end_line(l);

    if (l->steps > 1 && s->step < l->num_steps && s->step % l->log_every != 0) return;
    char loss[32], norm[32], time_left[32];
    logger_print_step(l, s->step);
    printf("loss %s  norm %s  lr %.3e  ", log_number(loss, s->loss), log_number(norm, s->grad_norm), s->lr);
    printf("%9.*f tok/s", tokens_per_s < 100 ? 1 : 0, tokens_per_s);
    if (l->flops_per_token > 0 && l->peak_flops > 0)
        printf("  %4.1f%% MFU", 100 * flops / l->peak_flops);
    else if (l->flops_per_token > 0)
        printf("  %7.1f GFLOP/s", 1e-9 * flops);
    const int digits = pruned > 0.99 ? 2 : 0; // what is left may still be a large part of the work
    if (s->num_layers > 0 && l->peak_flops > 0)
        printf(" (%4.1f%% executed, %2.*f%% pruned)", 100 * executed / l->peak_flops, digits, 100 * pruned);
    else if (s->num_layers > 0)
        printf(" (%2.*f%% pruned)", digits, 100 * pruned);
    printf("  %6s left\n", log_duration(time_left, seconds_left));
    fflush(stdout); // stdout may be a pipe
}

// Writes the mean loss of each part of a mixture, from sums of losses and of targets; of one part alone, or
// NULL, nothing.
static inline void log_parts_put(JsonWriter* w, const char* key, const Mixture* m, const double* sums,
                                 const double* targets) {
    if (!m || m->count < 2) return;
    json_begin_object(w, key);
    for (int k = 0; k < m->count; k++) json_put_double(w, m->parts[k].pattern, sums[k] / targets[k]);
    json_end(w);
}

// Writes the members of a validation.
static inline void log_validation_put(JsonWriter* w, const LogValidation* v) {
    double loss;
    json_put_int(w, "val_tokens", log_validation_total(v, &loss));
    json_put_double(w, "val_loss", loss);
    json_put_double(w, "perplexity", exp(loss));
    if (v->masked) json_put_double(w, "accuracy", v->accuracy);
    if (v->byte_tokens) json_put_double(w, "bits_per_byte", loss / LOG_LN2);
    json_put_double(w, "ms", 1000 * v->seconds);
    json_begin_array(w, "by_position");
    for (int i = 0; i < MAX_OCTAVES; i++) {
        if (v->tokens[i] == 0) continue;
        json_begin_object(w, NULL);
        json_put_int(w, "from", octave_begin(i, v->seq_len));
        json_put_int(w, "to", octave_begin(i + 1, v->seq_len));
        json_put_int(w, "tokens", v->tokens[i]);
        json_put_double(w, "loss", v->loss_sum[i] / (double)v->tokens[i]);
        json_end(w);
    }
    json_end(w);
    log_parts_put(w, "val_loss_of", v->parts, v->part_sums, v->part_targets);
}

// Logs the mean loss on held-out tokens after `step` steps; the file also has it by position in the context.
static inline void logger_validation(Logger* l, int64_t step, const LogValidation* v) {
    double loss;
    char text[3][32];
    log_validation_put(logger_begin_line(l, "validation", step), v);
    logger_end_line(l);
    log_validation_total(v, &loss);
    logger_print_step(l, step);
    printf("validation loss %s  perplexity %s", log_number(text[0], loss), log_number(text[1], exp(loss)));
    if (v->byte_tokens) printf("  bits per byte %s", log_number(text[2], loss / LOG_LN2));
    if (v->masked && isfinite(v->accuracy)) printf("  accuracy %.2f%%", 100 * v->accuracy);
    for (int k = 0; v->parts && v->parts->count > 1 && k < v->parts->count; k++)
        printf("  %s %s", v->parts->parts[k].pattern,
               log_number(text[0], v->part_sums[k] / v->part_targets[k]));
    printf("\n");
    fflush(stdout);
}

// Prints another event. Control characters in the text, as a sample may contain, become '?'.
static inline void logger_print_event(Logger* l, int64_t step, const char* name, const char* text) {
    logger_print_step(l, step);
    printf("%s: ", name);
    for (const char* c = text; *c; c++) {
        bool control = ((unsigned char)*c < ' ' && *c != '\n' && *c != '\t') || *c == 127;
        putchar(control ? '?' : *c);
    }
    printf("\n");
    fflush(stdout);
}

// Logs another event: a resume, a sample.
static inline void logger_event(Logger* l, int64_t step, const char* name, const char* text) {
    json_put_string(logger_begin_line(l, name, step), "text", text);
    logger_end_line(l);
    logger_print_event(l, step, name, text);
}

// Warns on stderr, and logs it.
static inline void logger_warning(Logger* l, int64_t step, const char* text) {
    json_put_string(logger_begin_line(l, "warning", step), "text", text);
    logger_end_line(l);
    warn("%s", text);
}

// Logs a checkpoint, and for how many seconds training waited for it.
static inline void logger_checkpoint(Logger* l, int64_t step, const char* folder, double waited) {
    JsonWriter* w = logger_begin_line(l, "checkpoint", step);
    json_put_string(w, "text", folder);
    json_put_double(w, "waited_ms", 1000 * waited);
    logger_end_line(l);
    logger_print_event(l, step, "checkpoint", folder);
}
