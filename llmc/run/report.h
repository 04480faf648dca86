/*
What a run prints beside the log: --version, the plan of --dry-run, the opening lines, and the held-out loss
by position in the context. Called by main.h and train.h, and for plans by llmc/plan/plan.h.
*/
#pragma once

#include "../base/checksum.h"
#include "logger.h"
#include "recipe.h"
#include "run.h"
#include "schedule.h"

// Prints --version: name and commit of the program, its compiler, MPI, and the trainer's own lines.
static inline void run_print_version(const char* program, const char* built_with) {
    char mpi[8192] = "no MPI"; // longer than any MPI_MAX_LIBRARY_VERSION_STRING
#ifdef USE_MPI
    int length;
    if (MPI_Get_library_version(mpi, &length) != MPI_SUCCESS) strcpy(mpi, "MPI of unknown version");
#endif
    cli_print_version(program);
    printf("%.*s\n%s\n", (int)strcspn(mpi, ",\n"), mpi, built_with);
}

// Warns where the warm-up takes the whole training, so that the learning rate never falls.
static inline void run_check_warmup(const Options* o) {
    if (o->warmup_tokens >= o->max_tokens && o->max_tokens > 0)
        warn("--warmup-tokens %lld: not below the %s to train on (--max-tokens): the learning rate only "
             "rises, to %.3g, and never falls",
             (long long)o->warmup_tokens, counted(o->max_tokens, "token").text,
             o->lr * ((double)o->max_tokens / (double)o->warmup_tokens));
}

// Warns where a branch begins inside its own cool-down: a run from scratch would have cooled down earlier.
static inline void run_check_cooldown(const Run* run) {
    const Options* o = &run->options;
    const int64_t begin = o->max_tokens - o->cooldown_tokens;
    if (run->branched && options_cools_down(o) && run->state.tokens > begin)
        warn("--resume-from %s: at %s, in a cool-down from %lld on: its learning rate falls at once; lower "
             "--cooldown-tokens to %lld",
             o->resume_from, counted(run->state.tokens, "token").text, (long long)begin,
             (long long)(o->max_tokens - run->state.tokens));
}

// Warns, in the log too, where a resumed run's learning rate, as a share of --lr, rises again: at once, or
// after it has fallen into a longer warm-up. A warm-up that ends in the second half of the last step is no
// reason: that step's rate was still rising.
static inline void run_check_rise(const Run* run, Logger* l) {
    const Options *o = &run->options, *before = &run->before;
    Options is = *o, was = *before;
    is.lr = was.lr = 1; // shares of --lr, which may be 0
    const int64_t tokens = run->state.tokens, step = before->batch_tokens;
    const bool warming = tokens < o->warmup_tokens;
    char text[256];
    if (tokens < step || (!warming && tokens - step / 2 < before->warmup_tokens)) return;
    const double last = schedule_lr(&was, tokens - step, step);
    const double next = schedule_lr(&is, tokens, o->batch_tokens);
    const bool falls = warming && next < 0.95 * last, peaked = tokens >= before->warmup_tokens;
    const bool rises = warming ? peaked && last < 0.95 : next > 1.05 * last;
    if (!falls && !rises) return;
    if (falls)
        snprintf(text, sizeof text,
                 "at %s the learning rate falls, from %.3g to %.3g of --lr, and rises again up to %lld: "
                 "--warmup-tokens was %lld until here",
                 counted(tokens, "token").text, last, next, (long long)o->warmup_tokens,
                 (long long)before->warmup_tokens);
    else if (warming)
        snprintf(text, sizeof text,
                 "at %s the learning rate rises again, from %.3g of --lr, up to %lld: --warmup-tokens was "
                 "%lld until here",
                 counted(tokens, "token").text, last, (long long)o->warmup_tokens,
                 (long long)before->warmup_tokens);
    else
        snprintf(text, sizeof text,
                 "at %s the learning rate rises again, from %.3g to %.3g of --lr: until here it fell by "
                 "another schedule",
                 counted(tokens, "token").text, last, next);
    logger_warning(l, run->state.step, text);
}

typedef struct {
    const char* what;
    int64_t bytes;
} MemoryRow;

// Prints what packed documents leave of the data's sequences.
static inline void run_print_documents(const PlanData* data, const Config* c) {
    const DocumentCount* count = &data->documents;
    const int64_t n = data->opened ? dataloader_sequences(&data->loader) : 0;
    if (!data->opened)
        printf("documents          %15s without --data\n", "not known");
    else if (!data->counted)
        printf("documents          cannot be counted: %s\n", data->err.msg);
    if (!data->counted) return;
    printf("documents          %15.4g a sequence (a cut one counts in each of its sequences); counted in ",
           count->documents / count->sequences);
    if (count->sequences < (double)n)
        printf("%.0f of %lld, drawn evenly\n", count->sequences, (long long)n);
    else
        printf("all\n");
    printf("other documents    %15.4g%% of the causal pairs of tokens%s%s\n", 100 * documents_hidden(count),
           config_has_window(c) ? " in the window" : "",
           config_has_attention(c) ? ": attention leaves them out" : "");
}

// Prints the parts of a mixture, and how often each is read.
static inline void run_print_mixture(const Options* o, const DataLoader* data) {
    const Mixture* m = &data->set.mixture;
    for (int k = 0; k < m->count && m->count > 1; k++)
        printf("  %5.2f%% of the sequences from the %s of %s, read %.4g times\n", 100 * m->parts[k].share,
               counted(m->parts[k].sequences * o->seq_len, "token").text, m->parts[k].pattern,
               recipe_part_epochs(o, &m->parts[k]));
}

// Prints how much data there is, and how often it is read.
static inline void run_print_data(const Options* o, const DataLoader* data) {
    const double epochs = data->set.mixture.count > 1 ? 1 : recipe_epochs(o, data);
    int64_t sequences = 0;
    for (int k = 0; k < data->set.mixture.count; k++) sequences += data->set.mixture.parts[k].sequences;
    printf("data               %15lld %s in %s, %s", (long long)(sequences * o->seq_len),
           plural(sequences * o->seq_len, "token").text, counted(sequences, "sequence").text,
           shuffle_text(o->shuffle));
    if (epochs > 1) printf(": the training reads them %.4g times", epochs);
    printf("\n");
    run_print_mixture(o, data);
}

// Prints how much held-out data there is.
static inline void run_print_held_out(const Options* o, const PlanData* data) {
    const int64_t n = data->held_out_opened ? dataloader_sequences(&data->held_out) : 0;
    if (data->held_out_opened)
        printf("held-out data      %15lld %s in %s\n", (long long)(n * o->seq_len),
               plural(n * o->seq_len, "token").text, counted(n, "sequence").text);
    else if (o->val_data)
        printf("held-out data      cannot be used: %s\n", data->held_out_err.msg);
}

// Prints recipe and data of a plan.
static inline void run_print_recipe(const Run* run) {
    const Options* o = &run->options;
    const PlanData* data = run->plan_data;
    char* recipe = recipe_text(o, &run->config, data->opened ? &data->loader : NULL);
    if (recipe) printf("recipe             %s\n", recipe);
    if (data->opened)
        run_print_data(o, &data->loader);
    else if (o->data)
        printf("data               cannot be used: %s\n", data->err.msg);
    run_print_held_out(o, data);
    if (run->config.document_reset && (data->opened || !o->data)) run_print_documents(data, &run->config);
    free(recipe);
}

// Prints what a plan says first: the sum of the trainer's rows of memory, and each of them.
static inline void run_print_memory(const MemoryRow* rows, int num_rows) {
    char text[32];
    int64_t total = 0;
    for (int i = 0; i < num_rows; i++) total += rows[i].bytes;
    printf("%-18s %15s\n", "memory", memory_text(text, (double)total));
    for (int i = 0; i < num_rows; i++)
        printf("  %-21s %10s\n", rows[i].what, memory_text(text, (double)rows[i].bytes));
}

// Prints the layers of a stack: their kinds in turn, and of each mixer how many there are and their heads.
static inline void run_print_layers(const Config* c) {
    char text[256];
    if (!config_is_stack(c)) return;
    layer_types_text(text, sizeof text, &c->layer_types);
    printf("layer types        %s\n", text);
    for (int m = 0; m < NUM_MIXERS; m++) {
        const int64_t layers = config_layers_of(c, (MixerKind)m),
                      heads = m == MIXER_ATTENTION ? c->num_heads : c->kind_heads[m];
        if (layers)
            printf("  %-16s %15s of %s\n", mixer_names[m], counted(layers, "layer").text,
                   counted(heads, "head").text);
    }
}

// Prints the rest of a plan: checkpoints, parameter counts, steps, recipe and data, and with --dry-run config
// the keys of config.json.
static inline void run_print_plan(const Run* run) {
    const Options* o = &run->options;
    char text[32];
    run_check_warmup(o);
    printf("%-18s %15s on disk", "checkpoint", memory_text(text, (double)run->table.parameters * 12));
    if (o->keep > 0) printf(", the newest %lld are kept", (long long)o->keep);
    printf("\n\n");
    printf("parameters         %15lld\n", (long long)run->table.parameters);
    printf("  non-embedding    %15lld\n", (long long)run->table.non_embedding);
    printf("MLP width          %15lld\n", (long long)config_mlp_size(&run->config));
    printf("head size          %15lld\n", (long long)config_head_size(&run->config));
    run_print_layers(&run->config);
    if (run->config.num_kv_heads)
        printf("key heads          %15lld for %s\n", (long long)run->config.num_kv_heads,
               counted(run->config.num_heads, "head").text);
    printf("sequence           %15lld %s\n", (long long)o->seq_len, plural(o->seq_len, "token").text);
    printf("step               %15lld %s: %s of %s", (long long)o->batch_tokens,
           plural(o->batch_tokens, "token").text, counted(run->micro_batches, "micro-batch").text,
           counted(run->micro_batch, "sequence").text);
    if (run->group.size > 1)
        printf(", %lld at most on each of %s of %s", (long long)run_rank_batches(run),
               counted(run_groups(run), "group").text, counted(run->group.size, "rank").text);
    else if (run_ranks(run) > 1)
        printf(", %lld at most on each of %s", (long long)run_rank_batches(run),
               counted(run_ranks(run), "rank").text);
    printf("\n");
    printf("training           %15lld %s: %s, peak learning rate %g, %s of warm-up\n",
           (long long)o->max_tokens, plural(o->max_tokens, "token").text,
           counted(run->num_steps, "step").text, o->lr, counted(o->warmup_tokens, "token").text);
    if (run_resumed(run))
        printf("from step          %15lld of %s: %s to train\n", (long long)run->state.step, run->checkpoint,
               counted(run->num_steps - run->state.step, "step").text);
    if (options_cools_down(o))
        printf("schedule           %15s: %s to %g of the peak over the last %s\n",
               option_schedule_names[o->lr_schedule],
               o->lr_schedule == SCHEDULE_WSD ? "linear" : "as 1 - sqrt", o->lr_end,
               counted(o->cooldown_tokens, "token").text);
    else if (o->lr_schedule != SCHEDULE_COSINE || o->lr_end != 0)
        printf("schedule           %15s to %g of the peak\n", option_schedule_names[o->lr_schedule],
               o->lr_schedule == SCHEDULE_CONSTANT ? 1 : o->lr_end);
    run_print_recipe(run);
    printf("model FLOPs        %15.4g per token, %.4g in all\n", run_flops_per_token(run),
           run_flops_per_token(run) * (double)o->max_tokens);
    if (o->dry_run != DRY_RUN_CONFIG) return;
    JsonWriter w = json_writer(2);
    config_put_all(&run->config, &w);
    printf("\n%s\n", w.text);
    json_writer_free(&w);
}

// Prints what is trained: the first line of a run, before its weights, which may take a while.
static inline void run_print_model(const Run* run) {
    const Options* o = &run->options;
    char without[64] = "tied embedding";
    if (!run->config.tie_word_embeddings)
        snprintf(without, sizeof without, "%lld without the embedding", (long long)run->table.non_embedding);
    printf("%s: %s (%s), V %lld, L %lld, d %lld, heads %lld\n", o->model ? o->model : o->init,
           counted(run->table.parameters, "parameter").text, without, (long long)run->config.vocab_size,
           (long long)run->config.num_hidden_layers, (long long)run->config.hidden_size,
           (long long)run->config.num_heads);
}

// Prints model, recipe, steps and data sizes before training. val_sequences: to validate on.
static inline void run_print_start(const Run* run, const DataLoader* data, int64_t val_sequences) {
    const Options* o = &run->options;
    int64_t sequences = 0;
    for (int k = 0; k < data->set.mixture.count; k++) sequences += data->set.mixture.parts[k].sequences;
    printf("%s of %lld x %s, micro-batches of %lld; %s (%s), %lld held out\n",
           counted(run->num_steps, "step").text, (long long)run->batch_sequences,
           counted(o->seq_len, "token").text, (long long)run->micro_batch,
           counted(sequences, "training sequence").text, shuffle_text(o->shuffle), (long long)val_sequences);
    char* recipe = recipe_text(o, &run->config, data);
    const double epochs = recipe_epochs(o, data);
    if (recipe) printf("recipe: %s\n", recipe);
    run_print_mixture(o, data);
    if (epochs > 1 && data->set.mixture.count == 1)
        printf("the data has %s, which this training reads %.4g times\n",
               counted(sequences * o->seq_len, "token").text, epochs);
    free(recipe);
    if (run->world->size > 1) {
        const int64_t heads = run->config.num_heads / run->group.size, most = run_rank_batches(run);
        printf("%s", counted(run->world->size, "rank").text);
        if (run->group.size > 1)
            printf(" in groups of %d, which share sequences: %s and %s a rank; groups", run->group.size,
                   counted(sequence_tokens(&run->group, o->seq_len), "token").text,
                   counted(heads, "head").text);
        printf(" with %s a step\n",
               counted_range(run->micro_batches / run_groups(run), most, "micro-batch").text);
    }
    if (run->state.step < run->last_step) run_check_warmup(o);
    run_check_cooldown(run);
    if (!o->out && run->state.step < run->last_step) warn("without --out DIR nothing of this run is kept");
}

// Logs the run itself, in the file only, with how often the training reads the data, and each part of a
// mixture. "started" is UTC; "host" is rank 0's. recipe: as recipe_text has it; NULL: none.
static inline void run_log(const Run* run, Logger* l, const char* built_with, const char* recipe,
                           const DataLoader* data) {
    char host[256] = "", started[32];
    const time_t now = time(NULL);
    struct tm utc;
    gethostname(host, sizeof host - 1);
    strftime(started, sizeof started, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));

    char hex[17];
    JsonWriter* w = logger_begin_line(l, "run", run->state.step);
    char* device = xstrdup(*run->device ? run->device : "CPU");
    device[strcspn(device, "\n")] = '\0';
    json_put_string(w, "started", started);
    json_put_string(w, "host", host);
    json_put_string(w, "device", device);
    json_put_int(w, "ranks", run->world->size);
    json_put_string(w, "version", CODE_VERSION);
    json_put_string(w, "compiler", __VERSION__);
    json_put_string(w, "built_with", built_with);
    json_put_int(w, "seed", run->options.seed);
    json_put_int(w, "num_steps", l->num_steps);
    json_put_int(w, "micro_batch", run->micro_batch);
    json_put_string(w, "recipe", recipe);
    json_put_double(w, "epochs", recipe_epochs(&run->options, data));
    if (data->set.mixture.count > 1) json_begin_array(w, "mixture");
    for (int k = 0; k < data->set.mixture.count && data->set.mixture.count > 1; k++) {
        const MixturePart* part = &data->set.mixture.parts[k];
        json_begin_object(w, NULL);
        json_put_string(w, "data", part->pattern);
        json_put_double(w, "share", part->share);
        json_put_int(w, "sequences", part->sequences);
        json_put_double(w, "epochs", recipe_part_epochs(&run->options, part));
        json_end(w);
    }
    if (data->set.mixture.count > 1) json_end(w);
    json_put_string(w, "data_fingerprint", hex64(hex, run->state.fingerprint));
    json_put_int(w, "parameters", run->table.parameters);
    json_put_int(w, "non_embedding", run->table.non_embedding);
    json_put_double(w, "flops_per_token", l->flops_per_token);
    json_put_double(w, "attention_flops_per_token", l->attention_flops);
    json_put_double(w, "peak_flops_per_s", l->peak_flops); // of all ranks; 0: not known
    json_begin_object(w, "config");
    for (int i = 0; i < NUM_CONFIG_KEYS; i++) config_put(&run->config, i, w);
    json_end(w);
    options_put(&run->options, w, "options");
    logger_end_line(l);
    free(device);
}

// Tells where a run resumes, and what of its options is not as the checkpoint records it, a line each; with
// `logged` in the file too.
static inline void run_log_resume(const Run* run, Logger* l, bool logged) {
    void (*const put)(Logger*, int64_t, const char*, const char*) =
        logged ? logger_event : logger_print_event;
    char text[96];
    snprintf(text, sizeof text, "at %s", counted(run->state.tokens, "token").text);
    put(l, run->state.step, "resume", text);
    for (const CliRow* row = option_rows; row < option_rows + NUM_OPTION_ROWS; row++) {
        char* change = option_change(&run->options, &run->before, row);
        if (change) put(l, run->state.step, "resume", change);
        free(change);
    }
    if (run->data_changed) put(l, run->state.step, "resume", "other data than before (--data-changed)");
    if (run->state.step < run->last_step) run_check_rise(run, l);
}

// Prints the held-out loss by position in the context.
static inline void run_print_by_position(const LogValidation* v) {
    printf("\nheld-out loss by position in the context\n  %17s %10s %8s%s\n", "positions", "tokens", "loss",
           v->byte_tokens ? "  bits per byte" : "");
    for (int i = 0; i < MAX_OCTAVES; i++) {
        if (v->tokens[i] == 0) continue;
        double loss = v->loss_sum[i] / (double)v->tokens[i];
        printf("  %7d .. %6lld %10lld %8.4f", (int)octave_begin(i, INT64_MAX),
               (long long)octave_begin(i + 1, INT64_MAX) - 1, (long long)v->tokens[i], loss);
        if (v->byte_tokens) printf("  %13.4f", loss / LOG_LN2);
        printf("\n");
    }
    printf("\n");
}
