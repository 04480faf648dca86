/*
MPI_Init under mpirun, with a timeout. MPI_Init returns when all ranks have called it: it would wait for ever
if one is another program or has ended. So a thread ends this process after the timeout, and names the missing
ranks.

A rank shows the others of its host that it has come by a datagram socket in the abstract namespace, which
needs no file and goes with the process.

Signals wait until MPI is initialized: a rank that ends while it connects to Open MPI 4.1's mpirun leaves the
others waiting in MPI_Init.

Called by world.h.
*/
#pragma once

#ifdef USE_MPI
#define OMPI_SKIP_MPICXX  1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <pthread.h>
#include <sys/un.h>
#include "start.h"

typedef struct {
    int rank, size;
    bool one_host; // has all ranks
    double timeout;
    pthread_t thread;
    sigset_t signals; // to catch again afterwards
    int ends[2];      // a pipe: the thread ends when the other end is closed
} Mpirun;

// The socket of a rank of this run.
static inline int mpirun_socket(struct sockaddr_un* address, socklen_t* bytes, int rank) {
    const char* run = getenv("PMIX_NAMESPACE");
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    const int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "train_fox %.64s %d",
                           run ? run : "", rank);
    *bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
}

static inline bool mpirun_has_come(int rank) {
    struct sockaddr_un address;
    socklen_t bytes;
    const int fd = mpirun_socket(&address, &bytes, rank);
    const bool here = fd >= 0 && connect(fd, (struct sockaddr*)&address, bytes) == 0;
    if (fd >= 0) close(fd);
    return here;
}

// The thread. The lowest of the ranks that have come prints the message and ends. A rank that began later
// would no longer find it at its own limit, so each looks every second which lower ones have come; then it
// gives mpirun 10 s to end it without a second message.
static inline void* mpirun_limit(void* argument) {
    const Mpirun* m = (Mpirun*)argument;
    const double deadline = seconds_now() + m->timeout;
    RankList missing = {"", 0};
    int lowest = m->rank;
    for (double now = deadline - m->timeout; now < deadline; now = seconds_now()) {
        for (int r = 0; r < lowest; r++)
            if (mpirun_has_come(r)) lowest = r;
        if (link_wait(m->ends[0], POLLIN, now + 1 < deadline ? now + 1 : deadline)) return NULL;
    }
    for (int r = 0; r < m->size; r++)
        if (r != m->rank && !mpirun_has_come(r)) rank_list_add(&missing, r);
    if (lowest < m->rank) (void)poll(NULL, 0, 10000);
    if (!m->one_host || missing.count == 0)
        die("not all of the %s have initialized MPI within %.0f s; start the same program on all, open the "
            "ports between their hosts, or raise --timeout",
            counted(m->size, "rank").text, m->timeout);
    die("%s %s of %d did not initialize MPI within %.0f s; start the same program on all ranks, "
        "or raise --timeout",
        plural(missing.count, "rank").text, missing.text, m->size, m->timeout);
}

// Begins the time in which all ranks are to come, and holds signals back.
static inline bool mpirun_begin(Mpirun* m, Error* err) {
    struct sockaddr_un address;
    socklen_t bytes;
    sigset_t all;
    const int fd = mpirun_socket(&address, &bytes, m->rank); // stays open
    if (fd >= 0) (void)bind(fd, (struct sockaddr*)&address, bytes);
    if (pipe2(m->ends, O_CLOEXEC) != 0) return fail(err, "cannot make a pipe: %s", strerror(errno));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &m->signals);
    const int rc = pthread_create(&m->thread, NULL, mpirun_limit, m);
    return rc == 0 || fail(err, "cannot start a thread: %s", strerror(rc));
}

static inline void mpirun_end(Mpirun* m) {
    close(m->ends[1]);
    pthread_join(m->thread, NULL);
    close(m->ends[0]);
    pthread_sigmask(SIG_SETMASK, &m->signals, NULL);
}

// Initializes MPI, whose ranks are to be those of the environment.
static inline bool mpirun_init(const Mpirun* m, Error* err) {
    int provided, rank, size;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return fail(err, "MPI_Init_thread has failed");
    if (MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN) != MPI_SUCCESS)
        return fail(err, "MPI cannot return errors");
    if (MPI_Comm_rank(MPI_COMM_WORLD, &rank) != MPI_SUCCESS ||
        MPI_Comm_size(MPI_COMM_WORLD, &size) != MPI_SUCCESS || rank != m->rank || size != m->size)
        return fail(err, "MPI has other ranks than mpirun's environment");
    if (provided < MPI_THREAD_FUNNELED)
        return fail(err, "this MPI does not allow threads (MPI_THREAD_FUNNELED); install another");
    return true;
}

// Collective: initializes MPI and tells all ranks rank 0's address. Dies after `timeout` seconds without a
// rank.
static inline bool mpirun_connect(LinkAddress* address, int rank, int size, bool one_host, double timeout,
                                  Error* err) {
    Mpirun m = {.rank = rank, .size = size, .one_host = one_host, .timeout = timeout};
    if (!mpirun_begin(&m, err)) return false;
    bool ok = mpirun_init(&m, err);
    if (ok && MPI_Bcast(address, (int)sizeof *address, MPI_BYTE, 0, MPI_COMM_WORLD) != MPI_SUCCESS)
        ok = fail(err, "MPI_Bcast has failed");
    mpirun_end(&m);
    return ok;
}
#endif
