/*
Resuming: a run's state, configuration and options from its checkpoint, and what may differ from them on the
command line. Another run's checkpoint (--resume-from) begins a branch, under the same rules.

Called by configure.h and, for messages, by data.h, in all ranks. Options that may not change end the program;
a damaged checkpoint is an error, after which configure.h's caller tries the one before it.
*/
#pragma once

#include "../config/config_file.h"
#include "chosen_model.h"
#include "recipe.h"
#include "run.h"

// ----------------------------------------------------------------------------
// reading a checkpoint

// Collective: all ranks get rank 0's text of a file of the checkpoint, to be freed; NULL if it cannot be
// read.
static inline char* run_read_text(const Run* run, const char* name, size_t* bytes, Error* err) {
    char path[PATH_LENGTH], *text = NULL;
    path_join(path, run->checkpoint, name);
    *bytes = 0;
    err->msg[0] = '\0';
    if (run->world->rank == 0) text = read_file(path, bytes, err);
    world_broadcast_text(run->world, &text, bytes);
    world_broadcast(run->world, err, sizeof *err);
    return text;
}

// Parses a checkpoint's trainer.json and then its config.json, and checks that they belong together.
static inline bool run_parse_checkpoint(Run* run, const char* trainer, size_t trainer_bytes,
                                        const char* config, size_t config_bytes, Error* err) {
    char path[PATH_LENGTH], trainer_path[PATH_LENGTH];
    path_join(trainer_path, run->checkpoint, "trainer.json");
    if (!checkpoint_parse_state(trainer_path, trainer, trainer_bytes, &run->state, &run->record, err))
        return false;
    const int64_t step = checkpoint_step(strrchr(run->checkpoint, '/') + 1);
    if (run->state.step != step)
        return fail(err, "%s: is of step %lld, not of this folder's", trainer_path,
                    (long long)run->state.step);
    path_join(path, run->checkpoint, "config.json");
    return checkpoint_check_config(path, config, config_bytes, &run->record, err) &&
           config_parse(&run->config, path, config, config_bytes, err) &&
           config_restore_initialization(&run->config, trainer_path, &run->record,
                                         json_get(&run->record, 0, "initialization"), err);
}

// Reads a checkpoint's config and trainer.json, and restores the options that were not given.
static inline bool run_read_checkpoint(Run* run, const CommandLine* line, Error* err) {
    size_t trainer_bytes, config_bytes;
    run->options = line->options;
    char* trainer = run_read_text(run, "trainer.json", &trainer_bytes, err);
    char* config = trainer ? run_read_text(run, "config.json", &config_bytes, err) : NULL;
    bool ok = config && run_parse_checkpoint(run, trainer, trainer_bytes, config, config_bytes, err);
    free(trainer);
    free(config);
    if (!ok) return false;
    const bool none[NUM_OPTION_ROWS] = {false};
    const int options = json_get(&run->record, 0, "options");
    options_defaults(&run->before);
    return options_restore(&run->before, none, run->checkpoint, &run->record, options, err) &&
           options_restore(&run->options, line->given, run->checkpoint, &run->record, options, err);
}

// ----------------------------------------------------------------------------
// what a resumed run may change

// What messages call the run that the checkpoint is of.
static inline const char* resume_name(const Run* run) {
    return run->branched ? run->checkpoint : run->options.out;
}

// Dies where the data position, a number of sequences, would mean other sequences than in the recorded run,
// or where the recipe is another.
static inline void resume_check_data_order(const Run* run) {
    const Options *o = &run->options, *before = &run->before;
    const struct {
        const char* name;
        int64_t value, recorded;
    } sizes[] = {{"seq-len", o->seq_len, before->seq_len}, {"seed", o->seed, before->seed}};
    for (int i = 0; i < 2; i++)
        if (sizes[i].recorded != OPTION_UNSET && sizes[i].recorded != sizes[i].value)
            die("--%s %lld: the run in %s has %lld, which cannot change when it resumes", sizes[i].name,
                (long long)sizes[i].value, resume_name(run), (long long)sizes[i].recorded);
    if (before->shuffle != o->shuffle)
        die("--shuffle: the run in %s reads its data %s, which cannot change when it resumes",
            resume_name(run), shuffle_text(before->shuffle));
    if (o->recipe != before->recipe)
        die("--recipe %s: the run in %s has %s, which cannot change when it resumes",
            recipe_name((RecipeName)o->recipe), resume_name(run),
            before->recipe == OPTION_UNSET ? "none" : recipe_name((RecipeName)before->recipe));
}

// The factor of an item rope_scaling=ntk:FACTOR of --set; 0: another item, or a malformed one.
static inline double resume_ntk_factor(const char* item) {
    static const char key[] = "rope_scaling=";
    RopeScaling r = {ROPE_PLAIN, 1, 0};
    Error ignored;
    const bool ok =
        strncmp(item, key, strlen(key)) == 0 && rope_scaling_parse(&r, "--set", item + strlen(key), &ignored);
    return ok && r.type == ROPE_NTK ? r.factor : 0;
}

// Dies where --set gives another rope_scaling=ntk than the run began with. The checkpoint has the rope_base
// that ntk led to, not its factor; with --model that rope_base is computed again and compared.
static inline void resume_check_ntk(const Run* run, const Options* o) {
    const Options* before = &run->before;
    for (int i = 0; i < o->set.count; i++) {
        const char* item = o->set.items[i];
        const double factor = resume_ntk_factor(item);
        bool recorded = factor == 0 || o->model;
        for (int k = 0; k < before->set.count; k++)
            recorded |= resume_ntk_factor(before->set.items[k]) == factor;
        if (!recorded) die("--set %s: the run in %s began without it; leave it out", item, resume_name(run));
    }
}

// The checkpoint has the model, and --init is not read again. But a model named on the command line must be
// the same, or the user means another run. What names it stays as recorded: the same model can be described
// in several ways, and the folder of --init may have a newer checkpoint by now. --set alone is compared with
// the checkpoint's own model.
static inline void resume_check_model(Run* run, const CommandLine* line) {
    const Options *o = &line->options, *before = &run->before;
    if (!o->model && !o->init && o->set.count == 0) return;
    if (o->init && (before->init || before->model) && !init_is(o->init, before->init))
        die("--init %s: the run in %s started from %s, which cannot change when it resumes; leave it out",
            o->init, resume_name(run), before->init ? before->init : before->model);
    if (o->model && before->init)
        die("--model %s: the run in %s started from %s, which cannot change when it resumes; leave it out",
            o->model, resume_name(run), before->init);
    resume_check_ntk(run, o);
    Recipe recipe;
    Options described = run->options;
    if (!o->model && !o->init) {
        described.model = NULL;
        described.init = run->checkpoint;
        described.recipe = OPTION_UNSET;
    }
    const Config c = model_choose(&described, &run->config, &recipe);
    JsonWriter ours = json_writer(0), theirs = json_writer(0);
    json_begin_object(&ours, NULL), json_begin_object(&theirs, NULL);
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) { // as texts: padding bytes of the structs may differ
        config_put(&c, i, &ours), config_put(&run->config, i, &theirs);
        if (strcmp(ours.text, theirs.text) != 0)
            die(run->branched
                    ? "--resume-from %s: is of a model with another %s than the command line's; leave it out"
                    : "--out %s: its checkpoints are of a model with another %s than the command line's; "
                      "leave --model, --init and --set out, or choose another folder",
                resume_name(run), config_keys[i].name);
    }
    json_writer_free(&ours), json_writer_free(&theirs);
    run->options.model = before->model, run->options.init = before->init;
    run->options.set = before->set;
}

// Names the checkpoint of --resume-from, RUN/step_N.
static inline void resume_branch(Run* run, const char* from) {
    size_t n = strlen(from);
    while (n > 1 && from[n - 1] == '/') n--;
    if (n >= PATH_LENGTH - 2) die("--resume-from %.100s...: is longer than a path", from);
    snprintf(run->checkpoint, sizeof run->checkpoint, "%s%.*s", strchr(from, '/') ? "" : "./", (int)n, from);
    if (checkpoint_step(strrchr(run->checkpoint, '/') + 1) < 0)
        die("--resume-from %s: not a checkpoint of a run, as in out/RUN/step_00001000", from);
    run->branched = true;
}

// Dies where --resume-from names another checkpoint than the one that the resumed run began at, whose name in
// the record stays.
static inline void resume_check_parent(Run* run, const CommandLine* line) {
    const char *given = line->options.resume_from, *parent = run->before.resume_from;
    if (!given || run->branched) return;
    if (!parent)
        die("--resume-from %s: the run in %s began without it; leave it out", given, resume_name(run));
    if (!init_is(given, parent))
        die("--resume-from %s: the run in %s began at %s, which cannot change when it resumes; leave it out",
            given, resume_name(run), parent);
    run->options.resume_from = parent;
}

// Dies where a branch begins inside a cool-down: its learning rate would rise again.
static inline void resume_check_branch(const Run* run) {
    const Options* before = &run->before;
    if (!run->branched || !options_cools_down(before)) return;
    if (run->state.tokens > before->max_tokens - before->cooldown_tokens)
        die("--resume-from %s: lies in the cool-down of its run, which began at %s; take a checkpoint before "
            "that",
            run->checkpoint, counted(before->max_tokens - before->cooldown_tokens, "token").text);
}

// Dies where nothing is left to train with an option that the run has had another value of: its log and its
// checkpoints would tell of a training that never was.
static inline void resume_check_end(const Run* run) {
    const Options* o = &run->options;
    char at[RUN_PROGRESS_BYTES];
    if (run->state.step < run->last_step) return;
    for (const CliRow* row = option_rows; row < option_rows + NUM_OPTION_ROWS; row++) {
        const char* change = option_has(row, TRAINS) ? option_change(o, &run->before, row) : NULL;
        if (change)
            die("--%s: the run in %s is at %s, where nothing is left to train with it; leave it out, or "
                "choose another --out",
                change, resume_name(run), run_progress(at, run));
    }
}
