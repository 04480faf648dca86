/*
Runs a fuzz target where clang's libFuzzer is missing. It takes the options of libFuzzer that run.sh and
test_fuzz.sh pass, and the folders of the seeds:

    build/fuzz/NAME [-runs=N] [-seed=S] [-max_total_time=SECONDS] [-artifact_prefix=PREFIX] FOLDER...

Runs every file of the folders, then random mutations of them. An input that reaches code that none before it
has reached joins the seeds; gcc's -fsanitize-coverage=trace-pc reports that code. The same seed runs the same
inputs. A crash, or an input that takes a minute, leaves the input in PREFIXcrash and ends the process.
*/
#include <dirent.h>
#include "fuzz.h"
#include "../../llmc/base/random.h"

enum { MAX_INPUTS = 1 << 14, MAX_BYTES = 1 << 13, DEADLINE = 60 };

typedef struct {
    uint8_t* data;
    size_t bytes;
} Input;

static Input inputs[MAX_INPUTS];
static int num_inputs;
static uint8_t current[MAX_BYTES]; // the input that runs
static size_t current_bytes;
static char artifact[PATH_LENGTH];
static uint64_t random_seed, draws;

// ----------------------------------------------------------------------------
// coverage and crashes

// Attributes of functions that the sanitizers call, some of them before they are ready
#define NOT_INSTRUMENTED                                                                                     \
    __attribute__((no_sanitize_coverage, no_sanitize("address"), no_sanitize("undefined")))

static uint8_t reached[1 << 16]; // by a hash of the address
static bool reached_more;

void __sanitizer_cov_trace_pc(void);

NOT_INSTRUMENTED void __sanitizer_cov_trace_pc(void) {
    size_t slot = (size_t)((uintptr_t)__builtin_return_address(0) * 0x9e3779b97f4a7c15u >> 48);
    reached_more |= !reached[slot];
    reached[slot] = 1;
}

// Sanitizers raise SIGABRT, as REQUIRE does. Memory that is not freed is found at the end.
const char* __asan_default_options(void);
const char* __ubsan_default_options(void);
__attribute__((weak)) void __lsan_do_leak_check(void);

NOT_INSTRUMENTED const char* __asan_default_options(void) { return "abort_on_error=1"; }
NOT_INSTRUMENTED const char* __ubsan_default_options(void) { return "abort_on_error=1:print_stacktrace=1"; }

// Keeps the input that runs. Called on SIGABRT and SIGALRM.
static void keep_input(int signal_number) {
    int fd = open(artifact, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    ssize_t written = fd < 0 ? -1 : write(fd, current, current_bytes);
    dprintf(STDERR_FILENO, "signal %d; the input of %zd bytes is in %s\n", signal_number, written, artifact);
    _exit(77);
}

static void exit_is_a_crash(void) { keep_input(0); } // a parser must not end the process

// ----------------------------------------------------------------------------
// inputs

static size_t draw(size_t below) { return (size_t)(random_u64(random_seed, 0, draws++) % below); }

static void add_input(const void* data, size_t bytes) {
    if (num_inputs == MAX_INPUTS) return;
    Input* input = &inputs[num_inputs++];
    input->data = (uint8_t*)memcpy(xcalloc(bytes, 1), data, bytes);
    input->bytes = bytes;
}

static int compare_names(const struct dirent** a, const struct dirent** b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static void add_folder(const char* folder) {
    struct dirent** entries;
    int n = scandir(folder, &entries, NULL, compare_names);
    if (n < 0) die("%s: cannot read: %s", folder, strerror(errno));
    for (int i = 0; i < n; free(entries[i++])) {
        char path[PATH_LENGTH];
        size_t bytes;
        Error err;
        if (entries[i]->d_name[0] == '.') continue;
        path_join(path, folder, entries[i]->d_name);
        char* data = read_file(path, &bytes, &err);
        if (!data) die("%s", err.msg);
        add_input(data, bytes < MAX_BYTES ? bytes : MAX_BYTES);
        free(data);
    }
    free(entries);
}

// Replaces n bytes at `at` of the current input by from[m], as far as there is room.
static void replace(size_t at, size_t n, const uint8_t* from, size_t m) {
    if (current_bytes - n + m > MAX_BYTES) return;
    memmove(current + at + m, current + at + n, current_bytes - at - n);
    memmove(current + at, from, m);
    current_bytes += m - n;
}

// Changes the current input in one random way.
static void mutate(void) {
    static const int32_t edges[] = {0, 1, -1, INT32_MAX, INT32_MIN, 255, 256, 65535};
    static const char letters[] = "0123456789-+.eE{}[]\",: \n\\u=";
    uint8_t piece[256];
    const Input* other = &inputs[draw((size_t)num_inputs)];
    size_t at = draw(current_bytes + 1), left = current_bytes - at;
    size_t n = draw((left < 16 ? left : 16) + 1), from = draw(other->bytes + 1);
    size_t m = draw((other->bytes - from < sizeof piece ? other->bytes - from : sizeof piece) + 1);
    switch (draw(8)) {
    case 0: // a bit
        if (left) current[at] ^= (uint8_t)(1 << draw(8));
        break;
    case 1: // a byte
        if (left) current[at] = (uint8_t)draw(256);
        break;
    case 2: // a character of JSON and numbers
        piece[0] = (uint8_t)letters[draw(sizeof letters - 1)];
        replace(at, n < 2 ? n : 0, piece, 1);
        break;
    case 3: // an integer at the edge of its range
        if (left >= 4) memcpy(current + at, &edges[draw(sizeof edges / sizeof edges[0])], 4);
        break;
    case 4: replace(at, n, piece, 0); break;
    case 5: // a piece of this input, again
        memcpy(piece, current + at, n);
        replace(draw(current_bytes + 1), 0, piece, n);
        break;
    case 6: replace(at, n, other->data + from, m); break;
    case 7: // cut
        if (draw(8) == 0) current_bytes = at;
    }
}

static void run_current(void) {
    reached_more = false;
    alarm(DEADLINE);
    uint8_t* copy =
        (uint8_t*)xrealloc(NULL, current_bytes); // of exactly its size, so that reads past it are seen
    memcpy(copy, current, current_bytes);
    LLVMFuzzerTestOneInput(copy, current_bytes);
    free(copy);
    alarm(0);
}

int main(int argc, char** argv) {
    const char* prefix = "";
    double deadline = INFINITY;
    int64_t runs = INT64_MAX, done = 0;
    for (int i = 1; i < argc; i++) {
        const char* value = strchr(argv[i], '=');
        if (argv[i][0] != '-') add_folder(argv[i]);
        if (strncmp(argv[i], "-runs=", 6) == 0) runs = atoll(value + 1);
        if (strncmp(argv[i], "-seed=", 6) == 0) random_seed = strtoull(value + 1, NULL, 10);
        if (strncmp(argv[i], "-artifact_prefix=", 17) == 0) prefix = value + 1;
        if (strncmp(argv[i], "-max_total_time=", 16) == 0) deadline = seconds_now() + atof(value + 1);
    }
    if (num_inputs == 0) die("no seeds: give their folder");
    snprintf(artifact, sizeof artifact, "%scrash", prefix);
    signal(SIGABRT, keep_input);
    signal(SIGALRM, keep_input);
    atexit(exit_is_a_crash);
    for (const int seeds = num_inputs; done < runs && seconds_now() < deadline; done++) {
        const Input* input = &inputs[done < seeds ? (size_t)done : draw((size_t)num_inputs)];
        memcpy(current, input->data, current_bytes = input->bytes);
        for (size_t n = done < seeds ? 0 : 1 + draw(4); n > 0; n--) mutate();
        run_current();
        if (done >= seeds && reached_more) add_input(current, current_bytes);
    }
    int slots = 0;
    for (size_t i = 0; i < sizeof reached; i++) slots += reached[i];
    fprintf(stderr, "#%lld DONE cov: %d corp: %d\nstat::number_of_executed_units: %lld\n", (long long)done,
            slots, num_inputs, (long long)done);
    if (__lsan_do_leak_check) __lsan_do_leak_check(); // prints and exits
    _exit(EXIT_SUCCESS);                              // not through exit_is_a_crash
}
