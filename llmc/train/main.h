/*
The program of both trainers: parses the command line, connects the ranks, makes a run of it, and does what
its mode asks for: a training (train.h), or one of --dry-run, --bench, --dump, --eval, --maps, --generate and
--requests.

A checkpoint that proves damaged is passed over for the one before it, with a warning. Called by main of the
trainers, and only there.
*/
#pragma once

#include "../eval/dump.h"
#include "../eval/evaluation.h"
#include "../eval/maps.h"
#include "../plan/plan.h"
#include "../run/configure.h"
#include "bench.h"
#include "initial_weights.h"
#include "train.h"

#define RUN_DAMAGED (-1) // not an exit code: the next older checkpoint is tried

// Does what the run's mode asks for. Returns the exit code, or RUN_DAMAGED if the checkpoint's weights cannot
// be read.
static inline int run_work(const Trainer* trainer, Run* run, Error* err) {
    int exit_code = EXIT_SUCCESS;
    if (trainer->threads && run->group.size > 1 && !plan_for_gpu(&run->options))
        die("--sequence-ranks %d: GPUs share sequences, and this is the CPU trainer: take ./train_foxcu",
            run->group.size);
    Requests* requests = eval_requests_open(run);
    if (run->mode == RUN_DRY) {
        PlanData data;
        plan_data_open(&data, &run->options, &run->config);
        if (data.opened) {
            run_warn_vocabulary(run, &data.loader, run->options.data);
            run_warn_end_of_text(run, &data.loader, run->options.data);
            run_choose_order(run, &data.loader);
        }
        run->plan_data = &data;
        trainer->print_plan(run);
        run->plan_data = NULL;
        plan_data_close(&data);
        eval_requests_close(requests);
        return exit_code;
    }
    Evaluation* evaluation = run->mode == RUN_EVAL ? evaluation_open(run) : NULL;
    Maps* maps = run->mode == RUN_MAPS ? maps_open(run) : NULL;
    Dump* dumped = run->mode == RUN_DUMP ? dump_open(run) : NULL;
    ranks_compare_model(run);
    if (run->mode == RUN_TRAIN) run_print_model(run);
    Model* model = trainer->open(run);
    // The data is checked before the weights, which may take minutes to draw. A resumed run checks it after
    // them: a damaged checkpoint, whose trainer.json says which data it was, is found when they are read.
    Training* training = NULL;
    if (run->mode == RUN_TRAIN && !run_resumed(run)) training = training_new(trainer, run, requests);
    if (run->mode == RUN_TRAIN) plan_print_start(run, trainer->threads != NULL);
    CheckpointTensors host = host_tensors_new(trainer, run, run->mode == RUN_TRAIN);
    bool loaded = load_weights(&host, run, err);
    if (loaded) trainer->upload(model, &host);
    if (run->mode != RUN_TRAIN || !run->options.out) trainer->host_free(host.w), host.w = NULL;
    if (!loaded)
        exit_code = RUN_DAMAGED;
    else if (run->mode == RUN_TRAIN) {
        if (!training) training = training_new(trainer, run, requests);
        exit_code = train(training, model, &host);
    } else if (run->mode == RUN_DUMP)
        dump_run(dumped, trainer, model, run);
    else if (run->mode == RUN_GENERATE)
        generate(run, trainer, model);
    else if (run->mode == RUN_REQUESTS)
        answer_requests(run, trainer, model);
    else if (run->mode == RUN_EVAL)
        evaluation_run(evaluation, trainer, model, run);
    else if (run->mode == RUN_MAPS)
        maps_run(maps, trainer, model, run);
    else {
        printf("%s", run->device);
        bench_training(trainer, model, run);
        if (run->world->size == 1) bench_inference(run, trainer, model);
    }
    if (host.w) trainer->host_free(host.w);
    trainer->close(model);
    if (training) training_free(training);
    eval_requests_close(requests);
    return exit_code;
}

// Parses the command line. Prints help or version if asked to, and exits.
static inline CommandLine run_parse(int argc, char** argv, const Trainer* trainer) {
    const CommandLine line = command_line_parse(argc, argv);
    if (!line.options.help && !line.options.version) return line;
    if (line.options.help)
        options_print_help(stdout, argv[0], trainer->summary);
    else
        run_print_version(argv[0], trainer->built_with);
    exit(check_printed());
}

// The program: returns the exit code of main.
static inline int run_main(int argc, char** argv, const Trainer* trainer) {
    guard_process();
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); // in a pipe or file too, lines are seen as they are printed
    World* world = world_identify();
    const CommandLine line = run_parse(argc, argv, trainer);
    if (line.mode == RUN_TRAIN && line.options.out) world->advice = "continue with --resume";
    if (line.mode == RUN_TRAIN && world->size > 1)
        run_catch_signals(world); // one that ends a rank here ends all
    world_connect(world, (double)line.options.timeout);
    ranks_compare_start(world, argc, argv, trainer->element_bytes);
    RunFolder folder = run_folder_open(&line, world);
    int exit_code = RUN_DAMAGED;
    for (int candidate = 0; exit_code == RUN_DAMAGED; candidate++) {
        Error err;
        Run run;
        if (candidate > 0 && candidate == folder.count) {
            ranks_wait_turn(world, false); // behind the warnings, which rank 0 prints
            die("%s: has %s, and none can be read; move them away to start anew", line.options.out,
                counted(folder.count, "checkpoint").text);
        }
        if (run_configure(&run, &line, world, &folder, candidate, trainer->suggested_tokens, &err))
            exit_code = run_work(trainer, &run, &err);
        if (exit_code == RUN_DAMAGED && run.branched) die("%s", err.msg);
        if (exit_code == RUN_DAMAGED)
            warn("%s%s", err.msg,
                 candidate + 1 < folder.count ? "; going back to the checkpoint before it" : "");
        run_free(&run);
    }
    free(folder.steps);
    if (folder.lock >= 0) close(folder.lock);
    if (line.mode != RUN_TRAIN || !line.options.out)
        check_printed(); // of others log.jsonl has what was printed
    world_close(world);
    return exit_code;
}
