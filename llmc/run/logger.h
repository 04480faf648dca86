/*
What a run tells while it trains: one line a step on the terminal, for people, and the same and more in
OUT/log.jsonl, one JSON object a line, for programs.

Every line of the file goes out in a single write to a file opened for appending, so that a crash can cut at
most the last one; opening the file again ends such a line. A log that cannot be written (a full disk) is
worth one warning, never the training. Numbers that are not finite are null in the file and nan on the
terminal.

A line has a key "event": "step", "validation", or the name of an event. After a run went back to a checkpoint
the file holds the steps since then twice, with the "resume" event between them: the later line counts.
*/
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include <math.h>
#include <sys/uio.h>
#include "../base/common.h"
#include "../formats/json.h"

typedef struct {
    // the caller sets these after logger_open
    int64_t num_steps;      // the run ends there
    int64_t log_every;      // steps between lines on the terminal; the file gets them all
    double flops_per_token; // model FLOPs of forward and backward; 0: not shown
    double attention_flops; // those of them that are attention's
    double peak_flops;      // what the machine could do in a second; 0: not known, no MFU

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
    double seconds; // the step took

    // Of each of num_layers, the share of attention's FLOPs that were skipped; 0 layers: nothing is pruned.
    int num_layers;
    const double* pruned;
} LogStep;

// ----------------------------------------------------------------------------
// validation: the loss by position in the context. Bucket 0 is position 0, bucket k positions [2^(k-1), 2^k):
// what a model gains from a longer context shows from bucket to bucket.

#define LOG_BUCKETS 32

typedef struct {
    double loss_sum[LOG_BUCKETS];
    int64_t tokens[LOG_BUCKETS];
    int64_t seq_len;  // T, known from the positions added
    bool byte_tokens; // a token is a byte, so that bits per byte can be told
    double seconds;   // the validation took
} LogValidation;

// Adds the loss of the token at position t = 0 .. T-1 of its sequence. Start from all zeros; ranks add up
// theirs.
static inline void log_validation_add(LogValidation* v, int64_t t, double loss) {
    int bucket = t == 0 ? 0 : 64 - __builtin_clzll((unsigned long long)t);
    v->loss_sum[bucket] += loss;
    v->tokens[bucket]++;
    if (t >= v->seq_len) v->seq_len = t + 1;
}

// The number of tokens added so far, and through *loss their mean loss, NaN if there are none.
static inline int64_t log_validation_total(const LogValidation* v, double* loss) {
    double sum = 0;
    int64_t tokens = 0;
    for (int i = 0; i < LOG_BUCKETS; i++) sum += v->loss_sum[i], tokens += v->tokens[i];
    *loss = tokens ? sum / (double)tokens : NAN;
    return tokens;
}

// ----------------------------------------------------------------------------
// numbers for people

// A number in 9 columns: four decimals, or an exponent where it is too large for them.
static inline const char* log_number(char text[32], double x) {
    if (!isfinite(x))
        snprintf(text, 32, "%9s", "nan");
    else
        snprintf(text, 32, fabs(x) < 9999.99995 ? "%9.4f" : "%9.2e", x);
    return text;
}

// A time as 1h02m, 3m10s, 7s or 2d03h; "?" if it is not known.
static inline const char* log_duration(char text[32], double seconds) {
    if (!(seconds >= 0 && seconds < 1e10)) {
        snprintf(text, 32, "?");
        return text;
    }
    long long s = llround(seconds);
    if (s >= 86400)
        snprintf(text, 32, "%lldd%02lldh", s / 86400, s / 3600 % 24);
    else if (s >= 3600)
        snprintf(text, 32, "%lldh%02lldm", s / 3600, s / 60 % 60);
    else if (s >= 60)
        snprintf(text, 32, "%lldm%02llds", s / 60, s % 60);
    else
        snprintf(text, 32, "%llds", s);
    return text;
}

// How every line on the terminal begins: the step, as wide as the last one's.
static inline void logger_print_step(const Logger* l, int64_t step) {
    int width = snprintf(NULL, 0, "%lld", (long long)l->num_steps);
    printf("step %*lld/%lld  ", width, (long long)step, (long long)l->num_steps);
}

// ----------------------------------------------------------------------------
// the file

// Says once why (an errno) the file lacks lines.
static inline void logger_warn(Logger* l, int why) {
    if (!l->warned)
        warn("%s: cannot write: %s; training goes on, the log will lack lines", l->path, strerror(why));
    l->warned = true;
}

// Opens OUT/log.jsonl for appending, making both if need be; terminal only if out is NULL. The caller then
// sets the first five fields, and closes the logger in any case.
static inline bool logger_open(Logger* l, const char* out, Error* err) {
    memset(l, 0, sizeof *l);
    l->fd = -1;
    l->log_every = 1;
    l->line = json_writer(0);
    if (!out) return true;
    if (!make_folders(out, err)) return false;
    path_join(l->path, out, "log.jsonl");
    l->fd = open(l->path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (l->fd < 0) return fail(err, "%s: cannot open: %s", l->path, strerror(errno));
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

// Ends the line and writes it. What a full disk took only in part is cut off again.
static inline void logger_end_line(Logger* l) {
    char line_break = '\n';
    struct iovec parts[2];
    json_end(&l->line);
    if (l->fd < 0) return;
    parts[0].iov_base = l->line.text, parts[0].iov_len = l->line.length;
    parts[1].iov_base = &line_break, parts[1].iov_len = 1;
    ssize_t written = writev(l->fd, parts, 2);
    if (written == (ssize_t)l->line.length + 1) return;
    int why = written < 0 ? errno : ENOSPC;
    if (written > 0 && ftruncate(l->fd, lseek(l->fd, 0, SEEK_CUR) - written) != 0) why = errno;
    logger_warn(l, why);
}

// ----------------------------------------------------------------------------
// what is logged

// Logs an optimizer step. The terminal gets the first and the last step of the process and every
// log_every-th.
//
// Tokens a second are a moving average: the ratio of two sums in which a step's weight decays alike, and so
// without the bias of an average that starts from 0. The process's first step warms caches up and is left out
// of it.
static inline void logger_step(Logger* l, const LogStep* s) {
    const double decay = 0.95;
    double tokens_per_s = (double)s->step_tokens / s->seconds;
    if (l->steps++ > 0) {
        l->recent_tokens = decay * l->recent_tokens + (double)s->step_tokens;
        l->recent_seconds = decay * l->recent_seconds + s->seconds;
        tokens_per_s = l->recent_tokens / l->recent_seconds;
    }
    double flops = l->flops_per_token * tokens_per_s, pruned = 0;
    for (int i = 0; i < s->num_layers; i++) pruned += s->pruned[i] / s->num_layers;
    double executed = flops - pruned * l->attention_flops * tokens_per_s;
    double left = (double)(l->num_steps - s->step) * (double)s->step_tokens / tokens_per_s;

    JsonWriter* w = logger_begin_line(l, "step", s->step);
    json_put_int(w, "tokens", s->tokens);
    json_put_double(w, "loss", s->loss);
    json_put_double(w, "grad_norm", s->grad_norm);
    json_put_double(w, "lr", s->lr);
    json_put_double(w, "ms", 1000 * s->seconds);
    json_put_double(w, "tokens_per_s", tokens_per_s);
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
    json_put_double(w, "eta_s", left);
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
    if (s->num_layers > 0 && l->peak_flops > 0)
        printf(" (%4.1f%% executed, %2.0f%% pruned)", 100 * executed / l->peak_flops, 100 * pruned);
    else if (s->num_layers > 0)
        printf(" (%2.0f%% pruned)", 100 * pruned);
    printf("  %6s left\n", log_duration(time_left, left));
    fflush(stdout); // a person may watch through a pipe
}

// Logs the mean loss on held-out tokens after `step` steps; the file also gets it by position in the context.
static inline void logger_validation(Logger* l, int64_t step, const LogValidation* v) {
    double loss;
    int64_t tokens = log_validation_total(v, &loss);
    double bits = loss / 0.69314718055994530942;

    JsonWriter* w = logger_begin_line(l, "validation", step);
    json_put_int(w, "val_tokens", tokens);
    json_put_double(w, "val_loss", loss);
    json_put_double(w, "perplexity", exp(loss));
    if (v->byte_tokens) json_put_double(w, "bits_per_byte", bits);
    json_put_double(w, "ms", 1000 * v->seconds);
    json_begin_array(w, "by_position");
    for (int i = 0; i < LOG_BUCKETS; i++) {
        if (v->tokens[i] == 0) continue;
        json_begin_object(w, NULL);
        json_put_int(w, "from", i == 0 ? 0 : (int64_t)1 << (i - 1));
        json_put_int(w, "to", (int64_t)1 << i < v->seq_len ? (int64_t)1 << i : v->seq_len);
        json_put_int(w, "tokens", v->tokens[i]);
        json_put_double(w, "loss", v->loss_sum[i] / (double)v->tokens[i]);
        json_end(w);
    }
    json_end(w);
    logger_end_line(l);

    char text[3][32];
    logger_print_step(l, step);
    printf("validation loss %s  perplexity %s", log_number(text[0], loss), log_number(text[1], exp(loss)));
    if (v->byte_tokens) printf("  bits per byte %s", log_number(text[2], bits));
    printf("\n");
    fflush(stdout);
}

// Logs anything else worth knowing later: a resume, a checkpoint, a sample. On the terminal a control
// character in the text, which a sample may hold, becomes '?'.
static inline void logger_event(Logger* l, int64_t step, const char* name, const char* text) {
    json_put_string(logger_begin_line(l, name, step), "text", text);
    logger_end_line(l);
    logger_print_step(l, step);
    printf("%s: ", name);
    for (const char* c = text; *c; c++) {
        bool control = ((unsigned char)*c < ' ' && *c != '\n' && *c != '\t') || *c == 127;
        putchar(control ? '?' : *c);
    }
    printf("\n");
    fflush(stdout);
}

#endif // LLMC_LOGGER_H
