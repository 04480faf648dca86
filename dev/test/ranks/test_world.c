/*
Test of the ranks of a run (llmc/ranks): processes with torchrun's variables on 127.0.0.1, without MPI. Groups
of 2 to 5 ranks compute, are killed, stopped, or fail, and the messages and exit codes of all of them are
checked.
*/
#include "../check.h"

// The wall clock is set an hour forward after each look at it: no wait depends on it.
static int late_clock(clockid_t clock, struct timespec* ts) {
    int rc = clock_gettime(clock, ts);
    if (clock == CLOCK_REALTIME) ts->tv_sec -= 3600;
    return rc;
}
#define clock_gettime late_clock

#include "../../../llmc/ranks/world.h"
#include "variables.h"

enum { MAX_RANKS = 5 };

static char host[64]; // of this machine, in messages

// What a rank does once it is connected. victim: the rank that fails.
typedef void Scenario(World* world, int victim);

typedef struct {
    int size, victim;
    double timeout;
    const char* advice;
    Scenario* scenario;
    int port;                  // of torchrun's agent
    int holds;                 // a socket that holds the next port for rank 0
    pid_t pids[MAX_RANKS];     // 0: not started, or ended
    int statuses[MAX_RANKS];   // of those that have ended
    int messages, marks;       // pipes to read: stderr of all ranks; a byte from each rank that has connected
    int message_end, mark_end; // and to write
    char text[8192];           // the messages
    size_t length;
} Group;

// ----------------------------------------------------------------------------
// groups of ranks

// Binds a socket that does not listen: rank 0 may still listen on its port, which no connection of another
// program gets. Returns the port before it.
static int hold_port(int* fd) {
    struct sockaddr_in address;
    socklen_t bytes = sizeof address;
    int on = 1;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd < 0 || setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(*fd, (struct sockaddr*)&address, bytes) != 0 ||
        getsockname(*fd, (struct sockaddr*)&address, &bytes) != 0)
        die("no port: %s", strerror(errno));
    return ntohs(address.sin_port) - 1;
}

static Group group_new(int size, double timeout, Scenario* scenario, int victim) {
    Group g;
    int messages[2], marks[2];
    memset(&g, 0, sizeof g);
    if (pipe2(messages, O_CLOEXEC) != 0 || pipe2(marks, O_CLOEXEC) != 0) die("pipe: %s", strerror(errno));
    g.size = size, g.timeout = timeout, g.scenario = scenario, g.victim = victim;
    g.port = hold_port(&g.holds);
    g.messages = messages[0], g.message_end = messages[1];
    g.marks = marks[0], g.mark_end = marks[1];
    return g;
}

// Starts one process of the group.
static void group_start(Group* g, int slot, int rank) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid < 0) die("fork: %s", strerror(errno));
    g->pids[slot] = pid;
    if (pid > 0) return;
    if (dup2(g->message_end, STDERR_FILENO) < 0 || !freopen("/dev/null", "w", stdout)) _exit(99);
    set_torchrun(rank, g->size, g->port);
    if (g->victim < 0 && rank == -g->victim) setenv("TORCHELASTIC_RUN_ID", "another run", 1);
    World* world = world_identify();
    world->advice = g->advice;
    world_connect(world, g->timeout);
    if (write(g->mark_end, "c", 1) != 1) _exit(98);
    g->scenario(world, g->victim);
    exit(EXIT_SUCCESS);
}

static void group_start_all(Group* g) {
    for (int r = 0; r < g->size; r++) group_start(g, r, r);
}

// Waits until n ranks have connected. False: not within 60 s.
static bool group_connected(Group* g, int n) {
    double deadline = seconds_now() + 60;
    char mark;
    while (n > 0 && link_wait(g->marks, POLLIN, deadline))
        if (read(g->marks, &mark, 1) == 1) n--;
    return n == 0;
}

// Collects messages and exit codes until all ranks but `except` (-1: none) have ended. False: not within
// `seconds`.
static bool group_wait(Group* g, double seconds, int except) {
    double deadline = seconds_now() + seconds;
    for (;;) {
        int alive = 0;
        for (int i = 0; i < MAX_RANKS; i++) {
            if (g->pids[i] > 0 && waitpid(g->pids[i], &g->statuses[i], WNOHANG) == g->pids[i]) g->pids[i] = 0;
            alive += g->pids[i] > 0 && i != except;
        }
        while (g->length < sizeof g->text - 1 &&
               link_wait(g->messages, POLLIN, seconds_now() + (alive ? 0.01 : 0))) {
            ssize_t n = read(g->messages, g->text + g->length, sizeof g->text - 1 - g->length);
            if (n <= 0) break;
            g->length += (size_t)n;
        }
        g->text[g->length] = '\0';
        if (alive == 0) return true;
        if (seconds_now() > deadline) return false;
    }
}

// Ends what remains.
static void group_free(Group* g) {
    for (int i = 0; i < MAX_RANKS; i++)
        if (g->pids[i] > 0 && kill(g->pids[i], SIGKILL) == 0) waitpid(g->pids[i], NULL, 0);
    close(g->messages), close(g->message_end), close(g->marks), close(g->mark_end), close(g->holds);
}

static int group_lines(const Group* g) {
    int lines = 0;
    for (const char* c = g->text; *c; c++) lines += *c == '\n';
    return lines;
}

// Ranks that have ended with exit code 0.
static int group_successes(const Group* g) {
    int n = 0;
    for (int r = 0; r < g->size; r++)
        n += g->pids[r] == 0 && WIFEXITED(g->statuses[r]) && WEXITSTATUS(g->statuses[r]) == 0;
    return n;
}

// Checks that nobody has succeeded and that the only line begins with "error: " and names rank and problem.
static void check_failure(const Group* g, const char* name, const char* problem, int line) {
    bool one = group_lines(g) == 1 && strncmp(g->text, "error: ", 7) == 0;
    CHECK(one && strstr(g->text, name) && strstr(g->text, problem) && group_successes(g) == 0,
          "line %d: %d ranks: expected one line with '%s' and '%s', %d succeeded, got: %s", line, g->size,
          name, problem, group_successes(g), g->text);
}

// In a rank: a message of its own makes the group fail.
#define EXPECT(condition)                                                                                    \
    do {                                                                                                     \
        if (!(condition)) die("%s:%d: %s", __FILE__, __LINE__, #condition);                                  \
    } while (0)

// ----------------------------------------------------------------------------
// orderly runs

static void exchange_bulk(World* w) {
    size_t bytes = 5 << 20;
    unsigned char* data = (unsigned char*)xcalloc(bytes, 1);
    for (int peer = w->rank ? w->rank : 1; peer < (w->rank ? w->rank + 1 : w->size); peer++) {
        int other = w->rank ? 0 : peer;
        if (w->rank == 0) {
            for (size_t i = 0; i < bytes; i++) data[i] = (unsigned char)(i * 7 + (size_t)peer);
            EXPECT(world_send(w, other, data, bytes));
            memset(data, 0, bytes);
        }
        EXPECT(world_receive(w, other, data, bytes));
        size_t wrong = 0;
        for (size_t i = 0; i < bytes; i++) wrong += data[i] != (unsigned char)(i * 7 + (size_t)peer);
        EXPECT(wrong == 0);
        if (w->rank != 0) EXPECT(world_send(w, other, data, bytes)); // as it came
    }
    EXPECT(!world_send(w, w->rank, data, 1));
    free(data);
}

static void* exchange_bulk_thread(void* world) {
    exchange_bulk((World*)world);
    return NULL;
}

static void compute(World* w, int victim) {
    (void)victim;
    int64_t mine[2] = {w->rank, 100 - w->rank}, all[2 * MAX_RANKS];
    world_allgather(w, all, mine, sizeof mine);
    for (int r = 0; r < w->size; r++) EXPECT(all[2 * r] == r && all[2 * r + 1] == 100 - r);

    double x[3], sum[3] = {0}, sums[3 * MAX_RANKS]; // the order of these sums is seen in their bits
    for (int r = 0; r < w->size; r++)
        for (int i = 0; i < 3; i++) {
            double term = (i == 0 ? 1e16 : 0.1 * i) / (1 + 3.0 * r) * (r % 2 ? -1 : 1);
            sum[i] = r ? sum[i] + term : term;
            if (r == w->rank) x[i] = term;
        }
    world_sum(w, x, 3);
    EXPECT(memcmp(x, sum, sizeof x) == 0);
    float y[3], float_sum[3];
    for (int i = 0; i < 3; i++) {
        float_sum[i] = 0;
        for (int r = 0; r < w->size; r++) {
            const float term = 1.f / (float)(1 + i + r);
            float_sum[i] = r ? float_sum[i] + term : term;
            if (r == w->rank) y[i] = term;
        }
    }
    world_sum_reals(w, y, 3, sizeof *y);
    EXPECT(memcmp(y, float_sum, sizeof y) == 0);
    world_allgather(w, sums, x, sizeof x);
    for (int r = 0; r < w->size; r++) EXPECT(memcmp(sums + 3 * r, x, sizeof x) == 0);

    int number = w->rank == 0 ? 77 : 0;
    world_broadcast(w, &number, sizeof number);
    EXPECT(number == 77);

    for (int length = -1; length <= 1000000; length = length < 0 ? 0 : length * 1000 + 1) {
        char* text = w->rank == 0 && length >= 0 ? (char*)xcalloc((size_t)length + 1, 1) : NULL;
        size_t bytes = w->rank == 0 && length >= 0 ? (size_t)length : 12345;
        if (text) memset(text, 'x', (size_t)length);
        world_broadcast_text(w, &text, &bytes);
        EXPECT(length < 0 ? !text : strlen(text) == (size_t)length && bytes == (size_t)length);
        if (length > 0) EXPECT(text[length - 1] == 'x');
        free(text);
    }

    pthread_t thread; // bulk data does not disturb collectives
    EXPECT(pthread_create(&thread, NULL, exchange_bulk_thread, w) == 0);
    for (int i = 0; i < 200; i++) world_barrier(w);
    pthread_join(thread, NULL);
    if (w->rank != 0) warn("only rank 0 prints warnings");
    watch_allow(w, 100);
    watch_progress(w);
    world_close(w);
}

static void test_orderly(void) {
    for (int size = 2; size <= MAX_RANKS; size++) {
        Group g = group_new(size, 20, compute, 0);
        group_start_all(&g);
        bool ended = group_wait(&g, 60, -1);
        CHECK(ended && group_successes(&g) == size && g.length == 0, "%d ranks: %d succeeded, printed: %s",
              size, group_successes(&g), g.text);
        group_free(&g);
    }
}

// One rank ends long before the others have left world_close: no failure. And one may die after it.
static void close_and_die(World* w, int victim) {
    world_close(w);
    if (w->rank == victim) raise(SIGKILL);
}

static void test_close(void) {
    for (int victim = 0; victim < 4; victim++) {
        Group g = group_new(4, 20, close_and_die, victim);
        group_start_all(&g);
        CHECK(group_wait(&g, 60, -1) && group_successes(&g) == 3 && g.length == 0,
              "%d succeeded, printed: %s", group_successes(&g), g.text);
        group_free(&g);
    }
}

// ----------------------------------------------------------------------------
// failures

// Works until something ends it.
static void work(World* w, int victim) {
    (void)victim;
    char block[4096] = {0}, all[MAX_RANKS * sizeof block];
    for (;;) {
        watch_progress(w);
        world_allgather(w, all, block, sizeof block);
        for (int peer = 1; peer < w->size; peer++) {
            if (w->rank == 0 && !world_send(w, peer, all, sizeof block)) pause();
            if (w->rank == peer && !world_receive(w, 0, all, sizeof block)) pause();
        }
    }
}

static void test_killed(void) {
    for (int trial = 0; trial < 20; trial++) {
        int size = 2 + trial % 4, victim = trial / 4 % size;
        Group g = group_new(size, 30, work, victim);
        if (trial % 2) g.advice = "continue with --resume";
        group_start_all(&g);
        CHECK(group_connected(&g, size), "%d ranks do not connect", size);
        (void)poll(NULL, 0, rand() % 30); // anywhere in its work
        char name[128];
        snprintf(name, sizeof name, "rank %d (%s, process %d)", victim, host, (int)g.pids[victim]);
        kill(g.pids[victim], SIGKILL);
        double begin = seconds_now();
        CHECK(group_wait(&g, 60, -1), "%d ranks: not all have ended %.0f s after rank %d was killed", size,
              seconds_now() - begin, victim);
        check_failure(&g, name,
                      trial % 2 ? "ended without a message: killed or crashed; continue with --resume\n"
                                : "ended without a message: killed or crashed\n",
                      __LINE__);
        group_free(&g);
    }
}

// Three groups at a time, because they mostly wait.
static void test_stopped(void) {
    Group groups[3];
    for (int victim = 0; victim < 3; victim++) {
        groups[victim] = group_new(3, 8, work, victim);
        group_start_all(&groups[victim]);
        CHECK(group_connected(&groups[victim], 3), "3 ranks do not connect");
        kill(groups[victim].pids[victim], SIGSTOP);
    }
    for (int victim = 0; victim < 3; victim++) {
        Group* g = &groups[victim];
        char name[32];
        snprintf(name, sizeof name, "rank %d (", victim);
        CHECK(group_wait(g, 60, victim), "not all have ended after rank %d was stopped", victim);
        check_failure(g, name, "has been stopped or is unreachable for", __LINE__);
        kill(g->pids[victim], SIGCONT); // leaves without a second message
        CHECK(group_wait(g, 60, -1), "rank %d goes on after it was stopped", victim);
        check_failure(g, name, "has been stopped or is unreachable for", __LINE__);
        group_free(g);
    }
}

static void hang(World* w, int victim) {
    for (int step = 0;; step++) {
        if (w->rank == victim && step == 50) pause();
        watch_progress(w);
        world_barrier(w);
    }
}

static void* progress_thread(void* world) {
    for (int i = 0; i < 1000; i++) watch_alive((World*)world);
    return NULL;
}

// The rank whose other threads report progress is as stuck as without them.
static void hang_busy(World* w, int victim) {
    pthread_t thread;
    if (w->rank != victim) world_barrier(w);
    EXPECT(pthread_create(&thread, NULL, progress_thread, w) == 0);
    pthread_join(thread, NULL);
    pause();
}

// Rank 0 works alone, for longer than the timeout but not than its allowance, while the others wait.
static void save(World* w, int victim) {
    (void)victim;
    watch_allow(w, 100);
    if (w->rank == 0) (void)poll(NULL, 0, 8000);
    world_barrier(w);
    world_close(w);
}

static void test_stuck(void) {
    static const char text[] = "is stuck: no progress for ";
    Group groups[3], saves = group_new(3, 6, save, 0);
    group_start_all(&saves);
    for (int victim = 0; victim < 3; victim++) {
        groups[victim] = group_new(3, 6, victim == 1 ? hang_busy : hang, victim);
        group_start_all(&groups[victim]);
    }
    for (int victim = 0; victim < 3; victim++) {
        Group* g = &groups[victim];
        char name[32];
        snprintf(name, sizeof name, "rank %d (", victim);
        CHECK(group_wait(g, 60, -1), "not all have ended while rank %d is stuck", victim);
        check_failure(g, name, text, __LINE__);
        const char* seconds = strstr(g->text, text);
        CHECK(seconds && atoi(seconds + strlen(text)) >= 6, "is named early: %s", g->text);
        CHECK(!strstr(g->text, "other"), "names others: %s", g->text);
        group_free(g);
    }
    CHECK(group_wait(&saves, 60, -1) && group_successes(&saves) == 3 && saves.length == 0,
          "%d succeeded, printed: %s", group_successes(&saves), saves.text);
    group_free(&saves);
}

static void fail_alone(World* w, int victim) {
    if (w->rank == victim) die("data.bin: cannot open");
    work(w, victim);
}

static void fail_all(World* w, int victim) {
    (void)victim;
    world_barrier(w);
    die("data.bin: cannot open, on rank %d", w->rank);
}

// Ranks that are not where the others are.
static void diverge(World* w, int victim) {
    int all[MAX_RANKS];
    if (w->rank == victim) world_allgather(w, all, &w->rank, sizeof w->rank);
    world_barrier(w);
    world_barrier(w);
}

static void* die_thread(void* unused) {
    (void)unused;
    die("data.bin: cannot read");
}

static void fail_threads(World* w, int victim) {
    pthread_t threads[3];
    if (w->rank == victim)
        for (int i = 0; i < 3; i++) EXPECT(pthread_create(&threads[i], NULL, die_thread, NULL) == 0);
    work(w, victim);
}

static void test_died(void) {
    static Scenario* const scenarios[] = {fail_alone, fail_all, fail_threads};
    for (int i = 0; i < 12; i++) {
        int size = 2 + i % 4, victim = i % size;
        char name[128];
        Group g = group_new(size, 30, scenarios[i / 4], victim);
        group_start_all(&g);
        CHECK(group_wait(&g, 60, -1), "%d ranks: not all have ended after die()", size);
        snprintf(name, sizeof name, "error: rank %d (%s): data.bin", victim, host);
        check_failure(&g, i / 4 == 1 ? "error: rank " : name, "data.bin: cannot ", __LINE__);
        group_free(&g);
    }
    Group g = group_new(3, 30, diverge, 2);
    group_start_all(&g);
    CHECK(group_wait(&g, 60, -1), "ranks that diverge go on");
    check_failure(&g, "error: rank ", "is in another collective: ", __LINE__);
    group_free(&g);
}

static int writing;    // of this rank, as the hook has it
static int whole_file; // a pipe

static int64_t being_written_here(void) { return __atomic_load_n(&writing, __ATOMIC_ACQUIRE); }

// Writes what is not whole before rank 2 is in die() and its own thread has sent a byte after that.
static void* write_whole(void* world) {
    World* w = (World*)world;
    char byte = 'w';
    for (bool dying = w->rank != 2; !dying; sched_yield()) {
        pthread_mutex_lock(&w->watch.lock);
        dying = w->watch.dying;
        pthread_mutex_unlock(&w->watch.lock);
    }
    const bool ok = w->rank == 0 ? world_receive(w, 2, &byte, 1) : world_send(w, 0, &byte, 1);
    if (ok && w->rank == 0 && write(whole_file, &byte, 1) != 1) _exit(97);
    __atomic_store_n(&writing, 0, __ATOMIC_RELEASE);
    return NULL;
}

// While ranks 0 and 2 write, rank 2 fails, with victim 0 all do; with victim 1 it is killed, and never sends.
static void fail_writing(World* w, int victim) {
    pthread_t thread;
    message_hooks.writing = being_written_here;
    writing = w->rank != 1;
    world_barrier(w);
    if (w->rank != 1) EXPECT(pthread_create(&thread, NULL, write_whole, w) == 0);
    if (w->rank == 2 && victim == 1) raise(SIGKILL);
    if (w->rank == 2 || victim == 0) die("data.bin: cannot read");
    for (;;) world_barrier(w);
}

// What is being written when a rank fails becomes whole before the ranks leave.
static void test_written(void) {
    for (int victim = 0; victim < 3; victim++) {
        Group g = group_new(3, 30, fail_writing, victim);
        int ends[2];
        char byte = 0;
        if (pipe2(ends, O_CLOEXEC) != 0) die("pipe: %s", strerror(errno));
        whole_file = ends[1];
        group_start_all(&g);
        close(ends[1]);
        CHECK(group_wait(&g, 60, -1), "not all have ended after die()");
        check_failure(&g, "error: rank ", victim == 1 ? "ended without a message" : "data.bin: cannot read",
                      __LINE__);
        CHECK((read(ends[0], &byte, 1) == 1) == (victim != 1), "victim %d: whole: %d", victim, byte == 'w');
        close(ends[0]);
        group_free(&g);
    }
}

// A launcher that is killed takes its ranks with it.
static void test_launcher_killed(void) {
    Group g = group_new(2, 30, work, 0);
    fflush(stdout);
    pid_t launcher = fork();
    if (launcher < 0) die("fork: %s", strerror(errno));
    if (launcher == 0) {
        group_start_all(&g);
        for (;;) pause();
    }
    CHECK(group_connected(&g, 2), "2 ranks do not connect");
    kill(launcher, SIGKILL);
    waitpid(launcher, NULL, 0);
    close(g.mark_end);
    g.mark_end = -1;
    char mark;
    CHECK(link_wait(g.marks, POLLIN, seconds_now() + 60) && read(g.marks, &mark, 1) == 0,
          "ranks have survived");
    group_free(&g);
}

// ----------------------------------------------------------------------------
// connecting

// Connects to the port of the group's rank 0, which may not listen yet. -1: not within 60 s.
static int stranger(const Group* g) {
    struct sockaddr_in to;
    memset(&to, 0, sizeof to);
    to.sin_family = AF_INET;
    to.sin_port = htons((uint16_t)(g->port + 1));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (double deadline = seconds_now() + 60; seconds_now() < deadline; (void)poll(NULL, 0, 10)) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && connect(fd, (struct sockaddr*)&to, sizeof to) == 0) return fd;
        if (fd >= 0) close(fd);
    }
    return -1;
}

static void test_strangers(void) {
    Group g = group_new(2, 20, compute, 0);
    Link link;
    LinkAddress address;
    memset(&address, 0, sizeof address);
    address.token = 1234;
    link_init(&link, 1, 2, host, &address);
    LinkHello hello = link_hello(&link, LINK_CONTROL);
    group_start(&g, 0, 0);
    int silent = stranger(&g), garbage = stranger(&g), token = stranger(&g), brief = stranger(&g);
    CHECK(silent >= 0 && garbage >= 0 && token >= 0 && brief >= 0, "rank 0 does not listen");
    CHECK(link_write(garbage, "GET / HTTP/1.1\r\n\r\n", 18) && link_write(token, &hello, sizeof hello) &&
              link_write(brief, &hello, 10),
          "rank 0 takes no bytes");
    close(brief);
    group_start(&g, 1, 1);
    CHECK(group_wait(&g, 60, -1) && group_successes(&g) == 2 && g.length == 0, "%d succeeded, printed: %s",
          group_successes(&g), g.text);
    char byte;
    CHECK(!link_read(token, &byte, 1), "rank 0 answers to a stranger");
    close(silent), close(garbage), close(token);
    link_close(&link);
    group_free(&g);
}

static void test_missing(void) {
    Group none = group_new(3, 8, compute, 0), first = group_new(2, 8, compute, 0),
          strange = group_new(2, 8, compute, -1), twice = group_new(3, 8, compute, 0);
    group_start(&none, 0, 0), group_start(&none, 1, 1);                              // no rank 2
    group_start(&first, 1, 1);                                                       // no rank 0
    group_start_all(&strange);                                                       // rank 1 of another run
    group_start(&twice, 0, 0), group_start(&twice, 1, 1), group_start(&twice, 2, 1); // two are rank 1

    CHECK(group_wait(&none, 60, -1), "ranks wait for a missing one");
    none.statuses[2] = 1 << 8;
    check_failure(&none, "rank 2 of 3 did not connect to port ", "within 8 s", __LINE__);
    group_free(&none);

    CHECK(group_wait(&first, 60, -1), "ranks wait for a missing one");
    first.statuses[0] = 1 << 8;
    check_failure(&first, "cannot reach rank 0 at 127.0.0.1, port ", "within 8 s: Connection refused",
                  __LINE__);
    group_free(&first);

    CHECK(group_wait(&strange, 60, -1) && group_successes(&strange) == 0, "two runs have mixed");
    CHECK(group_lines(&strange) == 2 && strstr(strange.text, "rank 1 of 2 did not connect") &&
              (strstr(strange.text, "not rank 0 of this run") || strstr(strange.text, "Connection refused")),
          "two runs: %s", strange.text);
    group_free(&strange);

    CHECK(group_wait(&twice, 60, -1) && group_successes(&twice) == 0, "two ranks have the same number");
    CHECK(strstr(twice.text, "two processes say that they are rank 1: "), "the same rank twice: %s",
          twice.text);
    group_free(&twice);
}

int main(void) {
    if (gethostname(host, sizeof host - 1) != 0) die("gethostname: %s", strerror(errno));
    test_orderly();
    test_close();
    test_strangers();
    test_missing();
    test_died();
    test_written();
    test_killed();
    test_stopped();
    test_stuck();
    test_launcher_killed();
    return test_report();
}
