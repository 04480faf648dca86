/*
Tests of llmc/serve/lockstep.h: engines of ranks that share the heads of sequences, in processes, with a
model that only remembers tokens. It has too little memory on rank 1, forgets other pages on each rank, and computes
scores and tokens on rank 0 alone: elsewhere they are nonsense. All ranks give the answers that one rank gives.
*/
#include "../ranks.h"

#include "../../../llmc/serve/requests.h"
#include "../scratch.h"

enum { SLOTS = 4, CAPACITY = 512, REQUESTS = 40 };

struct Model {
    int rank, ranks;
};

struct Cache {
    const Model* model;
    CacheSizes sizes;
    int32_t* tokens;  // [slots, capacity]
    int64_t* lengths; // [slots]
};

static bool no_memory;             // on any rank
static MixerKind mixer;            // of the model
static uint64_t trace;             // of all passes of this process
static int64_t passes, most_pages; // of them; of a cache, as it was opened
static char requests_path[PATH_LENGTH];

// ----------------------------------------------------------------------------
// the trainer

static int64_t heads_of(const CacheSizes* s) {
    Config c = config_defaults();
    c.num_hidden_layers = 2, c.num_heads = 6;
    return engine_heads(&c) / s->ranks;
}

// One rank has memory for short sequences alone, another for the pages of one sequence.
static Cache* remembering_new(Model* model, const CacheSizes* sizes) {
    const int64_t capacity = model->rank == 0 ? CAPACITY : 4 * CAPACITY,
                  least = heads_of(sizes) * cache_table_width(sizes);
    if (no_memory || sizes->capacity > capacity || (model->rank == model->ranks - 1 && sizes->pages > least))
        return NULL;
    Cache* cache = (Cache*)xcalloc(1, sizeof *cache);
    cache->model = model;
    cache->sizes = *sizes;
    cache->tokens = (int32_t*)xcalloc((size_t)(sizes->slots * sizes->capacity), sizeof(int32_t));
    cache->lengths = (int64_t*)xcalloc((size_t)sizes->slots, sizeof(int64_t));
    most_pages = sizes->pages;
    return cache;
}

static void remembering_free(Cache* cache) {
    free(cache->tokens);
    free(cache->lengths);
    free(cache);
}

static void traced(const void* bytes, size_t n) {
    for (size_t i = 0; i < n; i++) trace = (trace ^ ((const uint8_t*)bytes)[i]) * 0x100000001b3u;
}

// A score of the tokens of a slot: rank 0's. The others' is nonsense.
static RowScore remembered_score(const Cache* cache, int64_t slot, int64_t length, int32_t target) {
    uint64_t hash = 7;
    for (int64_t i = 0; i < length; i++)
        hash = random_u64(hash, 1, (uint64_t)cache->tokens[slot * cache->sizes.capacity + i]);
    const int32_t next = (int32_t)(hash % 96 + 32);
    RowScore score = {target < 0 ? 0 : -1 - (double)((hash ^ (uint64_t)target) % 1000) / 100, next, next};
    if (cache->model->rank > 0) score.logprob = 100, score.best = score.drawn = 31;
    return score;
}

static void remembering_extend(Cache* cache, const Extension* e, RowScore* scores, float* logits) {
    const CacheSizes* s = &cache->sizes;
    const int64_t heads = heads_of(s), width = cache_table_width(s);
    int64_t output = 0, lost = 0;
    CHECK(!logits && (e->steps == 1 || s->ranks == 1), "%lld steps", (long long)e->steps);
    traced(e->tokens, (size_t)e->rows * sizeof *e->tokens);
    traced(e->slots, (size_t)e->sequences * sizeof *e->slots);
    traced(e->begins, (size_t)(e->sequences + 1) * sizeof *e->begins);
    traced(e->lengths, (size_t)e->sequences * sizeof *e->lengths);
    traced(e->output_rows, (size_t)e->outputs * sizeof *e->output_rows);
    passes++;
    for (int64_t i = 0; i < e->sequences; i++) {
        const int64_t slot = e->slots[i];
        int64_t length = e->lengths[i];
        CHECK(length == 0 || length == cache->lengths[slot], "slot %lld has %lld tokens, not %lld",
              (long long)slot, (long long)cache->lengths[slot], (long long)length);
        for (int64_t row = e->begins[i]; row < e->begins[i + 1]; row++) {
            cache->tokens[slot * s->capacity + length++] = e->tokens[row];
            for (; output < e->outputs && e->output_rows[output] == row; output++)
                scores[output] = remembered_score(cache, slot, length, e->targets[output]);
        }
        cache->lengths[slot] = length;
        for (int64_t h = 0; h < heads; h++)
            lost += e->pages[(slot * heads + h) * width + (length - 1) / PAGE_TOKENS] < 0;
        for (int64_t step = 1; step < e->steps; step++) { // the token drawn is the next row's
            cache->tokens[slot * s->capacity + length++] = scores[(step - 1) * e->outputs + i].drawn;
            scores[step * e->outputs + i] = remembered_score(cache, slot, length, -1);
            cache->lengths[slot] = length;
        }
    }
    CHECK(lost == 0, "%lld heads have no page for a new token", (long long)lost);
}

static void remembering_fork(Cache* cache, int64_t from, int64_t to) {
    const int64_t capacity = cache->sizes.capacity;
    memcpy(cache->tokens + to * capacity, cache->tokens + from * capacity,
           (size_t)capacity * sizeof(int32_t));
    cache->lengths[to] = cache->lengths[from];
}

static void remembering_copy_page(Cache* cache, int32_t from, int32_t to) {
    CHECK(from != to && from >= 0 && from < cache->sizes.pages && to >= 0 && to < cache->sizes.pages,
          "pages");
}

// Rank r forgets full pages of its first 2 r heads, all but the last.
static void remembering_forgotten(Cache* cache, int32_t* first) {
    const int64_t heads = heads_of(&cache->sizes);
    for (int64_t slot = 0; slot < cache->sizes.slots; slot++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t full = cache->lengths[slot] / PAGE_TOKENS;
            first[slot * heads + h] = h < 2 * cache->model->rank && full > 0 ? (int32_t)full - 1 : 0;
        }
}

static int64_t remembering_page_bytes(const Config* c) { return (void)c, 1 << 24; }

static const Trainer remembering = {.suggested_tokens = 64 * SLOTS,
                                    .pass_tokens = 48,
                                    .pass_steps = 4,
                                    .page_bytes = remembering_page_bytes,
                                    .cache_new = remembering_new,
                                    .extend = remembering_extend,
                                    .cache_fork = remembering_fork,
                                    .cache_copy_page = remembering_copy_page,
                                    .cache_forgotten = remembering_forgotten,
                                    .cache_free = remembering_free};

// ----------------------------------------------------------------------------
// runs

// Scores, generations and a mistake, which share beginnings; of up to 450 tokens.
static void write_requests(void) {
    ByteBuffer text = {NULL, 0, 0};
    char line[1024], letters[512];
    for (int i = 0; i < REQUESTS; i++) {
        const int n = 10 + (int)(random_uniform(1, 2, (uint64_t)i) * 420);
        for (int t = 0; t < n; t++)
            letters[t] = (char)('a' + random_u64(1, (uint64_t)(t < 150 ? i % 3 : i), (uint64_t)t) % 26);
        letters[n] = '\0';
        if (i % 3 == 0)
            snprintf(line, sizeof line,
                     "{\"id\": %d, \"type\": \"generate\", \"prompt\": \"%s\", "
                     "\"max_tokens\": %d}\n",
                     i, letters, 1 + i);
        else if (i == 20)
            snprintf(line, sizeof line, "{\"id\": 20, \"type\": \"score\"}\n");
        else
            snprintf(line, sizeof line,
                     "{\"id\": %d, \"type\": \"score\", \"context\": \"%.*s\", "
                     "\"continuation\": \"%s\"}\n",
                     i, n / 2, letters, letters + n / 2);
        byte_buffer_append(&text, line, strlen(line));
    }
    write_bytes(requests_path, text.data, text.count);
    free(text.data);
}

// The run of --requests PATH on the ranks of a world; stdout gets the answers.
static void run_requests(World* world, const char* path) {
    char* arguments[] = {
        "test", "--init", "none", "--temperature", "0", "--requests", (char*)(uintptr_t)path};
    const CommandLine line = command_line_parse(7, arguments);
    Model model = {world->rank, world->size};
    Run* run = (Run*)xcalloc(1, sizeof *run);
    run->mode = line.mode;
    run->options = line.options;
    run->options.seq_len = CAPACITY;
    run->options.init = NULL; // the model reads bytes
    run->config = config_defaults();
    run->config.mixer = mixer;
    run->config.vocab_size = 257, run->config.num_hidden_layers = 2, run->config.num_heads = 6;
    run->config.bos_token_id = run->config.eos_token_id = -1;
    run->world = world;
    run->group = sequence_group(world->rank, world->size);
    trace = 0, passes = 0;
    answer_requests(run, &remembering, &model);
    fflush(stdout);
    free(run);
}

// Standard output goes to the file of a name; NULL: to where it went at first.
static void write_to(const char* name) {
    static int console = -1;
    fflush(stdout);
    if (console < 0) console = dup(STDOUT_FILENO);
    const int file = name ? open(in_folder(name), O_WRONLY | O_CREAT | O_TRUNC, 0600) : console;
    if (file < 0 || dup2(file, STDOUT_FILENO) < 0) die("%s: %s", name ? name : "dup", strerror(errno));
    if (name) close(file);
}

static char* answers_of(const char* name, size_t* bytes) {
    Error err;
    char* text = read_file(in_folder(name), bytes, &err);
    if (!text) die("%s", err.msg);
    return text;
}

// Are the lines of one text those of another, in any order? They have the same lengths.
static bool same_lines(const char* a, const char* b) {
    for (const char* line = a; *line; line = strchr(line, '\n') + 1) {
        const size_t n = (size_t)(strchr(line, '\n') - line) + 1;
        const char* at = memmem(b, strlen(b), line, n);
        if (!at || (at > b && at[-1] != '\n')) return false;
    }
    return strlen(a) == strlen(b);
}

// Writes to a pipe when the watch has been told that its reader, which has nothing to do, works.
static void* write_late(void* pipe) {
    static const char text[] =
        "{\"id\": 1, \"type\": \"score\", \"context\": \"a\", \"continuation\": \"b\"}\n";
    while (__atomic_load_n(&ranks_progress_calls, __ATOMIC_RELAXED) == 0) sched_yield();
    if (write(*(int*)pipe, text, sizeof text - 1) < 0) die("write: %s", strerror(errno));
    close(*(int*)pipe);
    return NULL;
}

// Rank 0's standard input is a pipe that is written when it is waited for; the others' has other requests.
static void open_late_pipe(const World* world, int ends[2], pthread_t* writer) {
    if (world->rank > 0 && !freopen(requests_path, "r", stdin)) die("%s: %s", requests_path, strerror(errno));
    if (world->rank > 0) return;
    if (pipe(ends) != 0 || dup2(ends[0], STDIN_FILENO) < 0) die("pipe: %s", strerror(errno));
    close(ends[0]);
    ranks_progress_calls = 0;
    if (pthread_create(writer, NULL, write_late, &ends[1]) != 0) die("no thread");
}

static void check_input(World* world) {
    int ends[2];
    pthread_t writer;
    size_t bytes;
    char name[32];
    snprintf(name, sizeof name, "late.%d", world->rank);
    open_late_pipe(world, ends, &writer);
    write_to(name);
    run_requests(world, "-");
    write_to(NULL);
    char* answer = answers_of(name, &bytes);
    CHECK(strncmp(answer, "{\"id\":1,\"logprob\":", 18) == 0, "rank %d answers a late request by %s",
          world->rank, answer);
    free(answer);
    if (world->rank > 0) return;
    pthread_join(writer, NULL);
}

static void check_lines(World* world) {
    static const char text[] = "one\n\nand three";
    const Lockstep l = lockstep_new(world);
    int ends[2];
    char* line = NULL;
    size_t capacity = 0;
    if (world->rank == 0) {
        if (pipe(ends) != 0 || dup2(ends[0], STDIN_FILENO) < 0) die("pipe: %s", strerror(errno));
        if (write(ends[1], text, sizeof text - 1) < 0) die("write: %s", strerror(errno));
        close(ends[0]);
        close(ends[1]);
    }
    for (const char* expected = text; *expected;) {
        const char* end = strchr(expected, '\n');
        const size_t n = end ? (size_t)(end - expected) + 1 : strlen(expected);
        const ssize_t got = lockstep_line(&l, &line, &capacity);
        CHECK(got == (ssize_t)n && memcmp(line, expected, n) == 0 && line[n] == '\0', "rank %d: a line of %d",
              world->rank, (int)got);
        expected += n;
    }
    CHECK(lockstep_line(&l, &line, &capacity) == -1, "rank %d: a line behind the last", world->rank);
    free(line);
}

static void rank_body(World* world) {
    enum { MOST = 4 };
    size_t bytes, expected_bytes;
    char name[32];
    uint64_t traces[MOST];
    snprintf(name, sizeof name, "answers.%d.%d", world->size, world->rank);
    write_to(name);
    run_requests(world, requests_path);
    world_allgather(world, traces, &trace, sizeof trace);
    for (int r = 0; r < world->size; r++)
        CHECK(traces[r] == traces[0], "rank %d has done other passes than rank 0", r);
    CHECK(passes > 10 && most_pages == 8 * 12 / world->size, "%lld passes, %lld pages", (long long)passes,
          (long long)most_pages);
    write_to(NULL);
    char *mine = answers_of(name, &bytes), *alone = answers_of("answers.1.0", &expected_bytes);
    CHECK(expected_bytes > 2000 && same_lines(mine, alone),
          "rank %d of %d gives other answers than one alone", world->rank, world->size);
    free(mine);
    free(alone);
    if (world->size == 1) return;
    check_input(world);
    check_lines(world);
}

static void check_no_memory(void) {
    World alone = {.size = 1};
    no_memory = true;
    CHECK_DIES(
        "a sequence of 512 tokens, a cache of 1.50 GiB; lower --seq-len, or let more GPUs share its heads",
        run_requests(&alone, requests_path));
    mixer = MIXER_MAMBA2; // which has no heads to share
    CHECK_DIES("GiB; lower --seq-len\n", run_requests(&alone, requests_path));
    mixer = MIXER_ATTENTION, no_memory = false;
}

int main(void) {
    strcpy(scratch_folder, test_scratch("lockstep"));
    strcpy(requests_path, in_folder("requests"));
    write_requests();
    for (int size = 1; size <= 3; size++) ranks_run(size, rank_body);
    check_no_memory();
    return test_report();
}
