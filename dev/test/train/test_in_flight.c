/*
Tests of the training loop (llmc/train/train.h) with a step in flight, as the GPU trainer has it. Their
trainer computes nothing and needs no GPU.
*/
#include <sched.h>
#include "../tokens/datasets.h"
#include "../../../llmc/train/main.h"

// Steps in flight, and what a test waits for
struct Model {
    StepVotes votes[2];        // of step i in [i % 2]
    int64_t queued, finished;  // numbers of the steps queued and finished last
    int64_t awaits_checkpoint; // the step that begins only when the checkpoint in the making has its name
};
static Model model;

static Model* open_model(Run* run) {
    (void)run;
    model.queued = model.finished = 0;
    return &model;
}
static void close_model(Model* m) { (void)m; }
static void* host_alloc(size_t bytes) { return xcalloc(1, bytes); }
static void download(Model* m, const CheckpointTensors* to) {
    (void)m, (void)to; // it holds the first weights still
}
static void upload(Model* m, const CheckpointTensors* from) { (void)m, (void)from; }
static void load_batch(Model* m, DataLoader* data) { (void)m, (void)data; }
static void begin_step(Model* m) {
    while (m->queued + 1 == m->awaits_checkpoint && being_written() > 0) (void)sched_yield();
}
static void add_gradients(Model* m, int64_t step_tokens, bool last) {
    (void)m, (void)step_tokens, (void)last;
}
static void update(Model* m, const AdamWParams* adamw, double grad_clip, const StepVotes* votes) {
    (void)adamw, (void)grad_clip;
    m->votes[++m->queued % 2] = *votes;
}
static void finish_step(Model* m, LogStep* line) {
    line->loss = line->grad_norm = 1;
    line->own_finite = true;
    line->votes = m->votes[++m->finished % 2];
    line->ranks = 1;
}

static const Trainer trainer = {.summary = "Computes nothing.",
                                .built_with = "nothing",
                                .suggested_tokens = 16,
                                .pass_tokens = 16,
                                .pass_steps = 1,
                                .element_bytes = sizeof(float),
                                .weight_bytes = sizeof(float),
                                .steps_in_flight = 1,
                                .open = open_model,
                                .close = close_model,
                                .host_alloc = host_alloc,
                                .host_free = free,
                                .download = download,
                                .upload = upload,
                                .load_batch = load_batch,
                                .begin_step = begin_step,
                                .add_gradients = add_gradients,
                                .update = update,
                                .finish_step = finish_step};

// Six steps, with a checkpoint after every second one. Returns the text of log.jsonl, to be freed.
static char* train_six_steps(void) {
    static char out[PATH_LENGTH], data[PATH_LENGTH];
    strcpy(out, in_folder("run"));
    strcpy(data, in_folder("data_train_*.bin"));
    char log[PATH_LENGTH + 16];
    char options[] = "--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 "
                     "--set intermediate_size=32 --seq-len 16 --batch-tokens 16 --max-tokens 96 "
                     "--warmup-tokens 16 --save-every 2 --data";
    char* arguments[32] = {"test_in_flight"};
    int count = 1;
    for (char* word = strtok(options, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    arguments[count++] = data, arguments[count++] = "--out", arguments[count++] = out;
    const int code = run_main(count, arguments, &trainer);
    CHECK(code == EXIT_SUCCESS, "exit code %d", code);
    CHECK(model.finished == 6, "%lld steps", (long long)model.finished);
    Error err;
    size_t bytes;
    snprintf(log, sizeof log, "%s/log.jsonl", out);
    char* text = read_file(log, &bytes, &err);
    if (!text) die("%s", err.msg);
    return text;
}

// Where the line of an event begins; -1: there is none.
static long place(const char* text, const char* event, int step) {
    char begin[64];
    snprintf(begin, sizeof begin, "{\"event\":\"%s\",\"step\":%d,", event, step);
    const char* line = strstr(text, begin);
    return line ? (long)(line - text) : -1;
}

// The votes of step 4 say that the checkpoint of step 2 has its name. They say nothing of that of step 4,
// which begins when these votes are known: step 5, queued next, must not make training wait for it.
static void test_votes_of_the_checkpoint_before(void) {
    model.awaits_checkpoint = 4;
    char* log = train_six_steps();
    for (int step = 2; step <= 6; step += 2)
        CHECK(place(log, "checkpoint", step) > place(log, "step", step), "no checkpoint of step %d", step);
    CHECK(place(log, "checkpoint", 2) < place(log, "step", 5), "the checkpoint of step 2 is logged late");
    CHECK(place(log, "checkpoint", 4) > place(log, "step", 5),
          "training has waited for the checkpoint of step 4");
    free(log);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("in_flight"));
    write_set("data", 257, 0, 4096, 4096);
    test_votes_of_the_checkpoint_before();
    return test_report();
}
