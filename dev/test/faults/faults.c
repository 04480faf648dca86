/*
A preloaded library that makes one chosen call of a program fail, or kills the program at that call.

    FAULT=write:7:ENOSPC LD_PRELOAD=build/test/faults.so ./train_fox ...

FAULT is CLASS:N:ACTION: what happens to call N = 1, 2, ... of a class, or, with N+, to call N and all after
it. The action is the name of an error, `short` (a read or write does half of its bytes), `kill` (SIGKILL
before the call) or `torn` (half of the bytes, then SIGKILL). FAULT_COUNTS names a file of the size of Counts,
where the library counts calls and faults and lists the files that a power cut would damage. It counts from
the start of main on and in all threads, but not calls on standard streams.

System calls are intercepted at the kernel, not at libc's functions: a seccomp filter turns those of the
classes into SIGSYS, whose handler makes the call in their place. So calls within libc, as by fwrite and
scandir, count too. Allocations and the start of threads are libc's functions, overridden by name.

A program with this library cannot exec another: the filter stays and the handler does not.
*/
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define CLASSES(ROW)                                                                                         \
    ROW(OPEN, "open")                                                                                        \
    ROW(READ, "read")                                                                                        \
    ROW(WRITE, "write")                                                                                      \
    ROW(SIZE, "size") /* ftruncate, fallocate */                                                             \
    ROW(SYNC, "sync")                                                                                        \
    ROW(CLOSE, "close")                                                                                      \
    ROW(MKDIR, "mkdir")                                                                                      \
    ROW(RENAME, "rename")                                                                                    \
    ROW(REMOVE, "remove")                                                                                    \
    ROW(LIST, "list") /* the entries of a folder */                                                          \
    ROW(STAT, "stat")                                                                                        \
    ROW(LOCK, "lock")                                                                                        \
    ROW(ALLOC, "alloc")                                                                                      \
    ROW(THREAD, "thread")
#define ROW_ID(id, name)   id,
#define ROW_NAME(id, name) name,
enum { CLASSES(ROW_ID) NUM_CLASSES };
static const char* const class_names[NUM_CLASSES] = {CLASSES(ROW_NAME)};
#undef ROW_ID
#undef ROW_NAME

enum { MAX_DIRTY = 64 };

typedef struct {
    uint32_t calls[NUM_CLASSES], faults;
    uint32_t lost;             // files that MAX_DIRTY was too small for
    uint64_t dirty[MAX_DIRTY]; // inodes of files written and not flushed since; 0: none
} Counts;

typedef struct {
    long number;
    int class, descriptor; // descriptor: the argument that must not be a standard stream; -1: none
} Trapped;

static const Trapped trapped[] = {
    {SYS_openat, OPEN, -1},     {SYS_read, READ, 0},        {SYS_pread64, READ, 0},
    {SYS_readv, READ, 0},       {SYS_write, WRITE, 0},      {SYS_pwrite64, WRITE, 0},
    {SYS_writev, WRITE, 0},     {SYS_ftruncate, SIZE, 0},   {SYS_fallocate, SIZE, 0},
    {SYS_fsync, SYNC, 0},       {SYS_fdatasync, SYNC, 0},   {SYS_close, CLOSE, 0},
    {SYS_mkdirat, MKDIR, -1},   {SYS_renameat, RENAME, -1}, {SYS_renameat2, RENAME, -1},
    {SYS_unlinkat, REMOVE, -1}, {SYS_getdents64, LIST, 0},  {SYS_newfstatat, STAT, -1},
    {SYS_statx, STAT, -1},      {SYS_fstat, STAT, -1},      {SYS_faccessat, STAT, -1},
    {SYS_flock, LOCK, 0},
#ifdef __x86_64__ // calls that newer architectures do not have
    {SYS_open, OPEN, -1},       {SYS_mkdir, MKDIR, -1},     {SYS_rename, RENAME, -1},
    {SYS_unlink, REMOVE, -1},   {SYS_rmdir, REMOVE, -1},    {SYS_stat, STAT, -1},
    {SYS_lstat, STAT, -1},      {SYS_access, STAT, -1},
#endif
};
enum { NUM_TRAPPED = sizeof trapped / sizeof trapped[0] };

static const struct {
    const char* name;
    int value;
} errors[] = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EINTR", EINTR},  {"EMFILE", EMFILE},
              {"EACCES", EACCES}, {"ENOMEM", ENOMEM}, {"EAGAIN", EAGAIN}};

static int fault_class = -1, fault_error; // error 0: short, kill or torn
static uint32_t fault_call;
static int fault_stays, fault_short, fault_kills;
static Counts private_counts, *counts = &private_counts;
static int dirty_lock;
static int armed; // from the start of main on

// Counts a call; is it one that fails?
static int strikes(int class) {
    uint32_t call = __atomic_add_fetch(&counts->calls[class], 1, __ATOMIC_RELAXED);
    int hit = class == fault_class && (call == fault_call || (fault_stays && call > fault_call));
    if (hit) __atomic_add_fetch(&counts->faults, 1, __ATOMIC_RELAXED);
    return hit;
}

// ----------------------------------------------------------------------------
// system calls

// The filter lets the calls of libc's function syscall() through, by their address.
enum { SYSCALL_BYTES = 64 };

static long real_call(long number, const long a[6]) {
    long result = syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return result < 0 ? -errno : result;
}

// Makes the call. A file that it has written to enters the list of dirty ones, one that it has flushed leaves
// the list.
static long tracked_call(int class, long number, const long a[6]) {
    long result = real_call(number, a);
    struct stat st;
    if (result < 0 || (class != WRITE && class != SIZE && class != SYNC)) return result;
    if (syscall(SYS_fstat, a[0], &st) != 0 || !S_ISREG(st.st_mode)) return result;
    while (__atomic_exchange_n(&dirty_lock, 1, __ATOMIC_ACQUIRE)) {}
    int i = 0, hole = -1;
    for (; i < MAX_DIRTY && counts->dirty[i] != st.st_ino; i++)
        if (!counts->dirty[i] && hole < 0) hole = i;
    if (class == SYNC && i < MAX_DIRTY) counts->dirty[i] = 0;
    if (class != SYNC && i == MAX_DIRTY) hole < 0 ? counts->lost++ : (counts->dirty[hole] = st.st_ino);
    __atomic_store_n(&dirty_lock, 0, __ATOMIC_RELEASE);
    return result;
}

// Makes the call, or its fault. Returns what the kernel returns.
static long faulty_call(long number, long a[6]) {
    const Trapped* t = trapped;
    while (t->number != number) t++;
    if (t->descriptor >= 0 && a[t->descriptor] <= STDERR_FILENO) return real_call(number, a);
    if (!strikes(t->class)) return tracked_call(t->class, number, a);
    if (fault_kills && !fault_short) raise(SIGKILL);
    if (fault_short) {
        int whole = number == SYS_readv || number == SYS_writev; // they are not cut
        if (!whole && a[2] > 1) a[2] /= 2;
        long result = tracked_call(t->class, number, a);
        if (fault_kills) raise(SIGKILL);
        return result;
    }
    if (t->class == CLOSE) real_call(number, a); // a failed close closes, too
    return -fault_error;
}

#if defined(__x86_64__)
enum { ARCH = AUDIT_ARCH_X86_64 };
static const int argument_registers[6] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9};
#define ARGUMENT(context, i) ((context)->uc_mcontext.gregs[argument_registers[i]])
#define RESULT(context)      ((context)->uc_mcontext.gregs[REG_RAX])
#elif defined(__aarch64__)
enum { ARCH = AUDIT_ARCH_AARCH64 };
#define ARGUMENT(context, i) ((context)->uc_mcontext.regs[i])
#define RESULT(context)      ((context)->uc_mcontext.regs[0])
#endif

static void on_trap(int signal_number, siginfo_t* info, void* user) {
    ucontext_t* context = user;
    long a[6];
    int saved = errno;
    (void)signal_number;
    for (int i = 0; i < 6; i++) a[i] = (long)ARGUMENT(context, i);
    RESULT(context) = faulty_call(info->si_syscall, a);
    errno = saved;
}

// Turns the calls of `trapped` into SIGSYS.
static int install_filter(void) {
    const uint64_t free_from = (uintptr_t)syscall;
    const uint32_t low = (uint32_t)free_from, high = (uint32_t)(free_from >> 32);
    struct sock_filter code[8 + 2 * NUM_TRAPPED];
    unsigned n = 0;
    const uint32_t address = offsetof(struct seccomp_data, instruction_pointer);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, address + 4);
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, high, 0, 4);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, address);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_SUB | BPF_K, low);
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, SYSCALL_BYTES, 1, 0);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned i = 0; i < NUM_TRAPPED; i++) {
        code[n++] =
            (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)trapped[i].number, 0, 1);
        code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    }
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    const struct sock_fprog program = {(unsigned short)n, code};
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    return sigaction(SIGSYS, &action, NULL) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// ----------------------------------------------------------------------------
// libc's functions

extern void *__libc_malloc(size_t bytes), *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void*p, size_t bytes), *__libc_memalign(size_t alignment, size_t bytes);

static __thread int in_library;

// Is there no memory? Then errno says so.
static int no_memory(void) {
    if (!armed || in_library || !strikes(ALLOC)) return 0;
    errno = ENOMEM;
    return 1;
}

void* malloc(size_t bytes) { return no_memory() ? NULL : __libc_malloc(bytes); }
void* calloc(size_t count, size_t size) { return no_memory() ? NULL : __libc_calloc(count, size); }
void* realloc(void* p, size_t bytes) { return no_memory() ? NULL : __libc_realloc(p, bytes); }
void* aligned_alloc(size_t alignment, size_t bytes) {
    return no_memory() ? NULL : __libc_memalign(alignment, bytes);
}
int posix_memalign(void** p, size_t alignment, size_t bytes) {
    void* q = no_memory() ? NULL : __libc_memalign(alignment, bytes);
    if (!q) return ENOMEM;
    *p = q;
    return 0;
}

// The next definition of a libc or library function of this name.
static void* next_function(const char* name) { return dlsym(RTLD_NEXT, name); }

// A call of one of these counts as one allocation: out of memory, glibc's glob (2.36) frees twice, and blosc
// (1.21) writes to NULL.
int glob(const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found) {
    int (*next)(const char*, int, int (*)(const char*, int), glob_t*);
    *(void**)&next = next_function("glob");
    if (no_memory()) return GLOB_NOSPACE;
    in_library = 1;
    int result = next(pattern, flags, on_error, found);
    in_library = 0;
    return result;
}

int blosc_decompress_ctx(const void* from, void* to, size_t bytes, int threads) {
    int (*next)(const void*, void*, size_t, int);
    *(void**)&next = next_function("blosc_decompress_ctx");
    if (no_memory()) return -1;
    in_library = 1;
    int result = next(from, to, bytes, threads);
    in_library = 0;
    return result;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
    int (*next)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    *(void**)&next = next_function("pthread_create");
    return armed && strikes(THREAD) ? EAGAIN : next(thread, attributes, start, argument);
}

// ----------------------------------------------------------------------------

// Parses FAULT. A name that is not known is an error.
static int parse_fault(const char* text) {
    char class[16], action[16];
    int used = 0;
    if (sscanf(text, "%15[a-z]:%u%n", class, &fault_call, &used) != 2) return 0;
    fault_stays = text[used] == '+';
    if (sscanf(text + used + fault_stays, ":%15s", action) != 1) return 0;
    for (int i = 0; i < NUM_CLASSES; i++)
        if (strcmp(class, class_names[i]) == 0) fault_class = i;
    fault_kills = strcmp(action, "kill") == 0 || strcmp(action, "torn") == 0;
    fault_short = strcmp(action, "short") == 0 || strcmp(action, "torn") == 0;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (strcmp(action, errors[i].name) == 0) fault_error = errors[i].value;
    return fault_class >= 0 && (fault_kills || fault_short || fault_error);
}

__attribute__((constructor)) static void begin(void) {
    const char *fault = getenv("FAULT"), *path = getenv("FAULT_COUNTS");
    if (path) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void* shared = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd < 0 || shared == MAP_FAILED || close(fd) != 0) _exit(99);
        counts = shared;
    }
    if ((fault && !parse_fault(fault)) || !install_filter()) {
        dprintf(STDERR_FILENO, "faults: cannot begin with FAULT=%s\n", fault ? fault : "");
        _exit(99);
    }
    armed = 1;
}
