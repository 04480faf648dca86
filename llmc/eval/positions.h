/*
Loss by position in the context, of held-out sequences of T tokens:

    L(i) = mean over sequences of -log p(token i | the tokens before it)    i = 1 .. T
    P(l) = exp(mean of L(1) .. L(l))                                        perplexity of the first l tokens
    E(i) = standard error of the mean of L over the POSITIONS_WINDOW positions around i, fewer at the ends of
           the sequence, from the spread of that mean over sequences. Positions of one sequence depend on each
           other, so errors of single positions would not give it
    accuracy = share of the targets that are the likeliest token

With a mask in the data all means are over the targets that count, whose number differs from position to
position; E is then not known.

Sums are doubles, over micro-batches and then over ranks, so results do not depend on the number of ranks but
for the rounding of doubles. Used by validation during training (train.h) and by --eval (evaluation.h).
*/
#pragma once

#include "../base/progress.h"
#include "documents.h"

enum { POSITIONS_WINDOW = 101 }; // odd; scripts/eval/positions.py smooths L(i) by the same window

typedef struct {
    int64_t seq_len;           // T
    int64_t sequences;         // added so far
    double* sums;              // [T] of the losses at each position
    double* counts;            // [T] of the targets there that count
    double matched;            // of these, the likeliest tokens
    double* window_squares;    // [T] sums over sequences of the squared sum of losses around each position
    double squares[3];         // sums over sequences, of a sequence's loss l and its targets n: l^2, l n, n^2
    DocumentLosses* documents; // losses of single documents; NULL: not kept
    const Mixture* parts;      // of the data
    double part_sums[MIXTURE_PARTS], part_targets[MIXTURE_PARTS]; // losses and targets that count, of each
    double started, first_finished;    // in seconds_now(): of this rank's measurement, and of its first batch
    const volatile sig_atomic_t* stop; // not 0: no further batch is begun; NULL: never
} Positions;

static inline Positions positions_new(int64_t seq_len) {
    Positions p = {.seq_len = seq_len};
    p.sums = (double*)xcalloc((size_t)seq_len, sizeof(double));
    p.counts = (double*)xcalloc((size_t)seq_len, sizeof(double));
    p.window_squares = (double*)xcalloc((size_t)seq_len, sizeof(double));
    return p;
}

static inline void positions_free(Positions* p) {
    free(p->sums);
    free(p->counts);
    free(p->window_squares);
}

// Adds the squared sums of windows of a sequence, losses[first .. first + T - 1].
static inline void positions_add_windows(Positions* p, const Trainer* trainer, const void* losses,
                                         int64_t first) {
    const int64_t T = p->seq_len, half = POSITIONS_WINDOW / 2;
    double sum = 0;
    for (int64_t t = 0; t < half && t < T; t++) sum += host_number(trainer, losses, first + t);
    for (int64_t t = 0; t < T; t++) {
        if (t + half < T) sum += host_number(trainer, losses, first + t + half);
        if (t > half) sum -= host_number(trainer, losses, first + t - half - 1);
        p->window_squares[t] += sum * sum;
    }
}

// Takes the mark off a loss of finish_losses, its sign (llmc/layers/classifier.cuh): returns whether the
// target counts, and in *matched whether it is the likeliest token.
static inline bool positions_unmark(const Trainer* trainer, void* losses, int64_t i, bool* matched) {
    const double loss = host_number(trainer, losses, i);
    *matched = signbit(loss) && !isnan(loss);
    if (trainer->element_bytes == 8)
        ((double*)losses)[i] = fabs(loss);
    else
        ((float*)losses)[i] = (float)fabs(loss);
    return *matched || loss != 0;
}

// Adds losses [sequences, T] of finish_losses, of sequences from number `first` on, and takes the marks off
// them: 0 is left where a target does not count. Returns the index of the first one that is not finite; -1:
// all are finite.
static inline int64_t positions_add(Positions* p, const Trainer* trainer, void* losses, int64_t first,
                                    int64_t sequences) {
    int64_t not_finite = -1, number;
    for (int64_t b = 0; b < sequences; b++) {
        double sum = 0, targets = 0;
        for (int64_t t = 0; t < p->seq_len; t++) {
            bool matched, counts = positions_unmark(trainer, losses, b * p->seq_len + t, &matched);
            double loss = host_number(trainer, losses, b * p->seq_len + t);
            if (not_finite < 0 && !isfinite(loss)) not_finite = b * p->seq_len + t;
            p->sums[t] += loss;
            p->counts[t] += counts;
            p->matched += matched;
            sum += loss;
            targets += counts;
        }
        p->squares[0] += sum * sum;
        p->squares[1] += sum * targets;
        p->squares[2] += targets * targets;
        const int part = mixture_part(p->parts, first + b, &number);
        p->part_sums[part] += sum;
        p->part_targets[part] += targets;
        positions_add_windows(p, trainer, losses, b * p->seq_len);
    }
    p->sequences += sequences;
    return not_finite;
}

// Collective: sums over all ranks.
static inline void positions_reduce(Positions* p, World* world) {
    double totals[] = {p->squares[0], p->squares[1], p->squares[2], p->matched, (double)p->sequences};
    world_sum(world, totals, 5);
    world_sum(world, p->sums, (int)p->seq_len);
    world_sum(world, p->counts, (int)p->seq_len);
    world_sum(world, p->window_squares, (int)p->seq_len);
    if (p->parts->count > 1) {
        world_sum(world, p->part_sums, p->parts->count);
        world_sum(world, p->part_targets, p->parts->count);
    }
    memcpy(p->squares, totals, sizeof p->squares);
    p->matched = totals[3];
    p->sequences = (int64_t)totals[4];
    watch_progress(world);
}

// The targets at the first l positions that count.
static inline double positions_targets(const Positions* p, int64_t l) {
    double sum = 0;
    for (int64_t t = 0; t < l; t++) sum += p->counts[t];
    return sum;
}

// L(i), i = 1 .. T; NaN where no target counts.
static inline double positions_loss(const Positions* p, int64_t i) {
    return p->sums[i - 1] / p->counts[i - 1];
}

// The mean loss of the targets at the first l positions; NaN where none counts.
static inline double positions_mean(const Positions* p, int64_t l) {
    double sum = 0;
    for (int64_t t = 0; t < l; t++) sum += p->sums[t];
    return sum / positions_targets(p, l);
}

static inline double positions_accuracy(const Positions* p) {
    return p->matched / positions_targets(p, p->seq_len);
}

// Standard error of the mean of n numbers, by their sum and the sum of their squares; NaN of one alone.
static inline double positions_error_of_mean(double n, double sum, double squares) {
    double variance = (squares - sum * sum / n) / (n - 1);
    return n < 2 ? NAN : sqrt(variance > 0 ? variance / n : 0);
}

// Standard error of the mean loss m, from the spread of l - m n over sequences; NaN of one sequence alone.
static inline double positions_standard_error(const Positions* p) {
    const double n = (double)p->sequences, m = positions_mean(p, p->seq_len);
    const double spread = p->squares[0] - 2 * m * p->squares[1] + m * m * p->squares[2];
    return positions_error_of_mean(n, 0, spread) * n / positions_targets(p, p->seq_len);
}

// E(i), i = 1 .. T.
static inline double positions_loss_error(const Positions* p, int64_t i) {
    const int64_t half = POSITIONS_WINDOW / 2;
    int64_t begin = i - 1 < half ? 0 : i - 1 - half, end = i + half < p->seq_len ? i + half : p->seq_len;
    double sum = 0;
    for (int64_t t = begin; t < end; t++) sum += p->sums[t];
    return positions_error_of_mean((double)p->sequences, sum, p->window_squares[i - 1]) /
           (double)(end - begin);
}

// The number of sequences that --val-tokens wants, at most `present`. Gives each rank its share of their
// batches; the last batch is filled up with sequences that do not count. Before anything is read. Warns where
// a part of the data has none.
static inline int64_t positions_share(const Run* run, DataLoader* data, int64_t present) {
    const int64_t T = run->options.seq_len, B = run->micro_batch;
    int64_t wanted = (run->options.val_tokens + T - 1) / T, sequences = wanted < present ? wanted : present;
    const MixturePart* part = mixture_without(&data->set.mixture, sequences);
    data->options.share = run_share(run, (sequences + B - 1) / B);
    if (part && run->world->rank == 0)
        warn("--val-tokens %lld: none of %s is of %s, whose loss stays unknown; give more",
             (long long)run->options.val_tokens, counted(sequences, "sequence").text, part->pattern);
    return sequences;
}

// Collective where ranks share sequences, which begin a batch together or not at all: is no further one
// begun?
static inline bool positions_stops(const Positions* p, const Run* run) {
    double stop = p->stop && *p->stop ? 1 : 0;
    if (p->stop && run->group.size > 1) world_sum(run->world, &stop, 1);
    return stop > 0;
}

// Adds the losses of this rank's share of the first `sequences` of the data. Ranks that share a sequence all
// get its losses; the first of them adds them. The host adds a batch while the device computes the next one.
// With --eval a loss that is not finite ends the run. progress: NULL, or open, in tokens of all ranks.
static inline void positions_measure(Positions* p, const Trainer* trainer, Model* model, const Run* run,
                                     DataLoader* data, int64_t sequences, Progress* progress) {
    const double first_batch_seconds = 600; // kernels are loaded, GEMM algorithms chosen
    const DataShare* share = &data->options.share;
    const int64_t B = run->micro_batch, T = p->seq_len, groups = run_groups(run);
    int64_t mine = share->count / B;
    const int64_t most = (share->stride / B + groups - 1) / groups;
    const int64_t in_flight = trainer->steps_in_flight;
    p->started = seconds_now();
    p->parts = &data->set.mixture;
    dataloader_seek(data, 0);
    for (int64_t i = 0; i < most + in_flight; i++) {
        watch_progress(run->world); // as often on all ranks, though one may have a batch less
        if (i == 0) watch_allow(run->world, first_batch_seconds);
        if (positions_stops(p, run) && i < mine) mine = i;
        if (i < mine) {
            trainer->load_batch(model, data);
            trainer->queue_losses(model);
        }
        int64_t done = i - in_flight, first = share->first + done * B; // the batch that is added now
        if (done < 0 || done >= mine) continue;
        int64_t count = sequences - first < B ? sequences - first : B;
        void* losses = trainer->finish_losses(model);
        if (done == 0) p->first_finished = seconds_now();
        if (run->group.rank > 0) continue;
        for (int64_t b = 0; p->documents && b < count; b++) // before positions_add takes the marks off
            documents_add(p->documents, first + b, trainer, losses, b * T);
        int64_t bad = positions_add(p, trainer, losses, first, count);
        if (bad >= 0 && run->mode == RUN_EVAL)
            die("--init %s: the loss of sequence %lld is not finite at position %lld: the weights are too "
                "large or damaged",
                run->options.init, (long long)(first + bad / T + 1), (long long)(bad % T + 1));
        int64_t all = p->sequences * groups < sequences ? p->sequences * groups : sequences;
        if (progress) progress_update(progress, (double)(all * T));
    }
}
