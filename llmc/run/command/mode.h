/*
The mode of a process, which its command line chooses: train, or do one thing and exit; and the options that a
mode refuses because it has no use for them.

Called by run.h. Functions die() on error.
*/
#pragma once

#include <signal.h>

#include "options.h"

// What a process does: train, or one thing and exit.
typedef enum {
    RUN_TRAIN,
    RUN_GENERATE,
    RUN_REQUESTS,
    RUN_DUMP,
    RUN_BENCH,
    RUN_DRY,
    RUN_EVAL,
    RUN_MAPS
} RunMode;

typedef struct {
    Options options; // numbers and choices that were not given are OPTION_UNSET
    bool given[NUM_OPTION_ROWS];
    RunMode mode;
} CommandLine;

// Parses the command line.
static inline CommandLine command_line_parse(int argc, char** argv) {
    Error err;
    CommandLine line;
    signal(SIGXFSZ, SIG_IGN); // a file size limit then makes write fail, which is reported
    if (!options_parse(&line.options, line.given, argc, argv, &err)) die("%s", err.msg);
    const Options* o = &line.options;
    bool dry = o->dry_run, bench = o->bench != OPTION_UNSET, dump = o->dump != NULL, eval = o->eval != NULL;
    bool requests = o->requests != NULL, maps = o->maps != NULL;
    // with --data, also that of a run that goes on, --generate is the length of samples while training
    bool generate = o->generate != OPTION_UNSET && !o->data && !o->resume && !o->resume_from && !requests;
    if (dry + bench + dump + eval + generate + requests + maps > 1)
        die("--dry-run, --bench, --dump, --eval, --generate, --requests and --maps each do one thing and "
            "exit: give one of them");
    if (o->resume_from && (dry || bench || dump || eval || generate || requests || maps))
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
    const bool prompts = o->init && o->prompt && !o->data && !o->out; // and nothing that could train
    if (line.mode == RUN_TRAIN && prompts) line.mode = RUN_GENERATE;
    return line;
}

// Was the option on the command line? field: its offset in Options.
static inline bool command_line_gives(const CommandLine* line, size_t field) {
    return options_give(line->given, field);
}

// Dies where a training without held-out data is told how to measure the loss on it.
static inline void run_check_validation(const CommandLine* line) {
    const bool every = command_line_gives(line, offsetof(Options, val_every)) && line->options.val_every > 0;
    if (every || command_line_gives(line, offsetof(Options, val_tokens)))
        die("--val-%s: the loss on which text? give --val-data GLOB, held-out shards",
            every ? "every" : "tokens");
}
