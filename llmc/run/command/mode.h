/*
The mode of a process, which its command line chooses: train, or do one thing and exit; and the options that a
mode needs, or refuses because it has no use for them.

Called by main.h and configure.h. Functions die() on error.
*/
#pragma once

#include <signal.h>

#include "options.h"

typedef struct {
    Options options; // numbers and choices that were not given are OPTION_UNSET
    bool given[NUM_OPTION_ROWS];
    RunMode mode;
} CommandLine;

// What messages call a mode that takes a model as it is; NULL: the mode trains, or shows what a training
// would do.
static inline const char* mode_option(const CommandLine* line) {
    switch (line->mode) {
    case RUN_GENERATE: return line->options.generate != OPTION_UNSET ? "generate" : "prompt";
    case RUN_REQUESTS: return "requests";
    case RUN_EVAL: return "eval";
    case RUN_MAPS: return "maps";
    default: return NULL;
    }
}

// ----------------------------------------------------------------------------
// options of another mode

// Does it read one sequence at a time, of up to the trained length?
static inline bool mode_reads_sequences(RunMode mode) { return (GENERATES | ANSWERS | MAPS) >> mode & 1; }

// What to give in place of an option that the mode has no use for; NULL: nothing.
static inline const char* mode_meant(RunMode mode, size_t field) {
    static const struct {
        unsigned modes;
        size_t field;
        const char* meant;
    } meant[] = {
        {GENERATES | ANSWERS, offsetof(Options, max_tokens), "give --generate N, the number of tokens"},
        {ANSWERS, offsetof(Options, prompt), "a request has a \"prompt\" of its own"},
        {ANSWERS, offsetof(Options, stop), "a request has an \"until\" of its own"},
        {ANSWERS, offsetof(Options, samples), "a request is one sample, with a \"seed\" of its own"},
        {EVALUATES | MAPS, offsetof(Options, data), "give --val-data GLOB, the text to measure"},
        {EVALUATES, offsetof(Options, max_tokens), "give --val-tokens N, how much of the text to read"},
        {EVALUATES, offsetof(Options, batch_tokens), "give --micro-batch B, sequences computed at once"},
        {MAPS, offsetof(Options, max_tokens), "give --seq-len T, how much of the text to read"},
        {MAPS, offsetof(Options, val_tokens), "give --seq-len T, how much of the text to read"},
        {EVALUATES | MAPS, offsetof(Options, out), "its FILE is all that is written"},
        {GENERATES | ANSWERS, offsetof(Options, out), "text goes to standard output"},
    };
    for (size_t i = 0; i < sizeof meant / sizeof meant[0]; i++)
        if (meant[i].field == field && meant[i].modes >> mode & 1) return meant[i].meant;
    return NULL;
}

// Dies where an option on the command line is of another mode, or the mode lacks one.
static inline void mode_check_options(const CommandLine* line) {
    const Options* o = &line->options;
    const char* mode = mode_option(line);
    for (int i = 0; mode && i < NUM_OPTION_ROWS; i++) {
        const CliRow* row = &option_rows[i];
        if (!line->given[i] || option_has(row, 1u << line->mode)) continue;
        const char* meant = mode_meant(line->mode, row->offset);
        die("--%s: of no use with --%s: %s", row->name, mode, meant ? meant : "leave it out");
    }
    if (line->mode != RUN_EVAL && o->roll != OPTION_UNSET)
        die("--roll: only --eval rolls documents; data/text_to_shards --roll makes shards of rolled ones");
    if (line->mode == RUN_EVAL && !o->init) die("--eval: with which model? give --init DIR, a checkpoint");
    if (line->mode == RUN_EVAL && !o->val_data)
        die("--eval: on which text? give --val-data GLOB, held-out shards");
    if (o->sequence_ranks > 1 && (mode_reads_sequences(line->mode) || line->mode == RUN_DUMP))
        die("--sequence-ranks %lld: --generate, --requests, --maps and --dump run on one GPU: leave it out",
            (long long)o->sequence_ranks);
}

// Parses the command line.
static inline CommandLine command_line_parse(int argc, char** argv) {
    Error err;
    CommandLine line;
    signal(SIGXFSZ, SIG_IGN); // a file size limit then makes write fail, which is reported
    line.mode = RUN_TRAIN;
    if (!options_parse(&line.options, line.given, argc, argv, &err)) die("%s", err.msg);
    const Options* o = &line.options;
    if (o->help || o->version) return line; // whatever else was given
    bool dry = o->dry_run != OPTION_UNSET, bench = o->bench != OPTION_UNSET, dump = o->dump != NULL,
         eval = o->eval != NULL;
    bool requests = o->requests != NULL, maps = o->maps != NULL;
    // with --data, also that of a run that goes on, --generate is the length of samples while training
    bool generate = o->generate != OPTION_UNSET && !o->data && !o->resume && !o->resume_from && !requests;
    if (dry + bench + dump + eval + generate + requests + maps > 1)
        die("--dry-run, --bench, --dump, --eval, --generate, --requests and --maps each do one thing and "
            "exit: give one of them");
    if (o->resume_from && (bench || dump || eval || generate || requests || maps))
        die("--resume-from: only a training begins where a checkpoint ends");
    if (!dry && (o->gpu || o->gpu_memory != OPTION_UNSET || o->mfu != OPTION_UNSET))
        die("--gpu, --gpu-memory and --mfu plan for another machine: give them with --dry-run");
    if (!dry && o->ranks != OPTION_UNSET)
        die("--ranks %lld: plans for so many: give it with --dry-run; mpirun, torchrun or srun starts ranks",
            (long long)o->ranks);
    line.mode = dry        ? RUN_DRY
                : bench    ? RUN_BENCH
                : dump     ? RUN_DUMP
                : eval     ? RUN_EVAL
                : requests ? RUN_REQUESTS
                : maps     ? RUN_MAPS
                : generate ? RUN_GENERATE
                           : RUN_TRAIN;
    // without anything that could train
    const bool prompts = o->init && o->prompt && !o->data && !o->resume && !o->resume_from;
    if (line.mode == RUN_TRAIN && prompts) line.mode = RUN_GENERATE;
    mode_check_options(&line);
    return line;
}

// Dies where an option on the command line is of samples, and the run makes none. o: the run's options, which
// a checkpoint may have completed.
static inline void mode_check_samples(const CommandLine* line, const Options* o) {
    static const struct {
        size_t field;
        bool requests; // the default of --eval-requests too
    } of_samples[] = {
        {offsetof(Options, prompt), false},  {offsetof(Options, stop), false},
        {offsetof(Options, generate), true}, {offsetof(Options, temperature), true},
        {offsetof(Options, top_k), true},    {offsetof(Options, top_p), true},
        {offsetof(Options, min_p), true},
    };
    if (options_give(line->given, offsetof(Options, samples)))
        die("--samples: a training prints one sample at a time: leave it out");
    for (size_t i = 0; i < sizeof of_samples / sizeof of_samples[0]; i++)
        if (!o->sample_every && !(of_samples[i].requests && o->eval_requests) &&
            options_give(line->given, of_samples[i].field))
            die("--%s: of samples, which a training prints with --sample-every STEPS: give both, or none",
                option_rows[option_index(of_samples[i].field)].name);
}

// Dies where a training without held-out data is told how to measure the loss on it.
static inline void mode_check_validation(const CommandLine* line) {
    const bool every = options_give(line->given, offsetof(Options, val_every)) && line->options.val_every > 0;
    if (every || options_give(line->given, offsetof(Options, val_tokens)))
        die("--val-%s: the loss on which text? give --val-data GLOB, held-out shards",
            every ? "every" : "tokens");
}

// Dies where the mode lacks an option, or does not go with one or with several ranks. o: the run's options,
// which a checkpoint, the mode and a recipe have completed.
static inline void mode_check_completed(const CommandLine* line, const Options* o, int ranks) {
    Error err;
    const RunMode mode = line->mode;
    if (ranks > 1 && mode != RUN_TRAIN && mode != RUN_BENCH && mode != RUN_EVAL)
        die("only training, --bench and --eval run on %s: start one process alone",
            counted(ranks, "rank").text);
    if (mode_reads_sequences(mode) && !o->init)
        die("--%s: with which model? give --init DIR, a checkpoint", mode_option(line));
    if ((mode == RUN_TRAIN || mode == RUN_DUMP) && !o->data)
        die("--data GLOB is missing: the shards to train on; data/README.md tells how to make them, and "
            "`make quickstart` makes some");
    const bool samples = o->sample_every && (mode == RUN_TRAIN || mode == RUN_DRY);
    if (samples && o->prompt && strcmp(o->prompt, "-") == 0)
        die("--prompt -: a sample while training has one text, and no standard input: give --prompt TEXT");
    if (mode == RUN_TRAIN && !o->val_data) mode_check_validation(line);
    if (!mode_option(line)) mode_check_samples(line, o);
    if (mode == RUN_TRAIN && o->out && !options_check(o, &err)) die("%s", err.msg);
}
