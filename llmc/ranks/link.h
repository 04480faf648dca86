/*
TCP connections between rank 0 and every other rank: a star, because the ranks of a run say little outside a
step.

    rank 0  <== WATCH, CONTROL, BULK ==>  rank 1      WATCH    heartbeats; owned by the watch thread (watch.h)
            <== WATCH, CONTROL, BULK ==>  rank 2      CONTROL  collectives of the main threads (world.h)
            ...                                       BULK     large data of any one thread (world.h)

Rank 0 listens. The others know its addresses, its port and a token of the run, and try every address until a
deadline. A connection begins with a LinkHello in each direction. Rank 0 closes the connection of a stranger,
whose token differs, and continues; another rank closes that of a program that does not answer as rank 0 of
its run.
*/
#pragma once

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include "../base/common.h"

enum { LINK_WATCH, LINK_CONTROL, LINK_BULK, LINK_CHANNELS };
enum { LINK_ADDRESSES = 16 };

// Where rank 0 listens. Plain bytes, which MPI can broadcast.
typedef struct {
    uint64_t token;                  // of this run, the same on all ranks
    int32_t port, count;             // port 0: rank 0 takes a free one
    char names[LINK_ADDRESSES][256]; // host names or addresses
} LinkAddress;

typedef struct {
    int fd
        [LINK_CHANNELS]; // -1: not connected. Set last: the watch thread reads it while rank 0 accepts others
    int32_t pid;
    char host[64];
} LinkPeer;

typedef struct {
    int rank, size;
    char host[64]; // of this rank
    LinkAddress address;
    int listener;    // on rank 0 until all have connected, otherwise -1
    int reached;     // index of the address that answered last
    LinkPeer* peers; // [size]; only rank 0 is connected to all, the others are connected to peers[0]
} Link;

// The first message in each direction of a connection.
typedef struct {
    char magic[8];
    uint64_t token;
    int32_t rank, size, channel, pid;
    char host[64];
} LinkHello;

// ----------------------------------------------------------------------------
// bytes

// Milliseconds until the deadline, for poll(): at least 0, at most 10 s.
static inline int link_milliseconds(double deadline) {
    double left = deadline - seconds_now();
    return left <= 0 ? 0 : left > 10 ? 10000 : (int)(left * 1000) + 1;
}

// Waits until fd is ready for `events` or has failed. False: the deadline has passed.
static inline bool link_wait(int fd, short events, double deadline) {
    for (;;) {
        struct pollfd p = {fd, events, 0};
        int ready = poll(&p, 1, link_milliseconds(deadline));
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return false;
        if (seconds_now() >= deadline) return false;
    }
}

// Writes all bytes; blocks. False: the connection is lost.
static inline bool link_write(int fd, const void* data, size_t bytes) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        ssize_t n = send(fd, p, bytes, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        p += n, bytes -= (size_t)n;
    }
    return true;
}

// Reads exactly `bytes`; blocks. False: the connection is lost, and the data is undefined.
static inline bool link_read(int fd, void* data, size_t bytes) {
    char* p = (char*)data;
    while (bytes > 0) {
        ssize_t n = recv(fd, p, bytes, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        p += n, bytes -= (size_t)n;
    }
    return true;
}

// ----------------------------------------------------------------------------
// the handshake

// The hello of this rank.
static inline LinkHello link_hello(const Link* link, int channel) {
    LinkHello hello = {.magic = {'F', 'O', 'X', 'L', 'I', 'N', 'K', '1'},
                       .token = link->address.token,
                       .rank = link->rank,
                       .size = link->size,
                       .channel = channel,
                       .pid = (int32_t)getpid()};
    memcpy(hello.host, link->host, sizeof hello.host);
    return hello;
}

// Receives the hello of a member of this run. False: it is a stranger, or says nothing until the deadline.
static inline bool link_receive_hello(const Link* link, int fd, LinkHello* hello, double deadline) {
    LinkHello ours = link_hello(link, 0);
    size_t got = 0;
    while (got < sizeof *hello) {
        if (!link_wait(fd, POLLIN, deadline)) return false;
        ssize_t n = recv(fd, (char*)hello + got, sizeof *hello - got, MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return false;
        got += (size_t)n;
    }
    hello->host[sizeof hello->host - 1] = '\0';
    return memcmp(hello->magic, ours.magic, sizeof ours.magic) == 0 && hello->token == ours.token &&
           hello->size == link->size && hello->rank >= 0 && hello->rank < link->size && hello->channel >= 0 &&
           hello->channel < LINK_CHANNELS;
}

// Sends small messages at once, and lets no firewall forget a silent connection. A failure costs time,
// nothing else.
static inline void link_tune(int fd) {
    int on = 1, idle = 60;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
}

// Enters a rank that has said hello, and the connection to it.
static inline void link_set_peer(Link* link, const LinkHello* hello, int fd) {
    LinkPeer* peer = &link->peers[hello->rank];
    memcpy(peer->host, hello->host, sizeof peer->host);
    peer->pid = hello->pid;
    __atomic_store_n(&peer->fd[hello->channel], fd, __ATOMIC_RELEASE);
}

// ----------------------------------------------------------------------------
// rank 0

// Opens a listening socket on all interfaces of one family (AF_INET6 takes IPv4 too). Returns -1 and errno.
static inline int link_bind(int family, int port) {
    int on = 1, off = 0, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    struct sockaddr_in6 six;
    struct sockaddr_in four;
    memset(&six, 0, sizeof six);
    memset(&four, 0, sizeof four);
    six.sin6_family = AF_INET6, four.sin_family = AF_INET;
    six.sin6_port = four.sin_port = htons((uint16_t)port);
    const struct sockaddr* address = family == AF_INET6 ? (struct sockaddr*)&six : (struct sockaddr*)&four;
    socklen_t bytes = family == AF_INET6 ? sizeof six : sizeof four;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        (family != AF_INET6 || setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
        bind(fd, address, bytes) == 0 && listen(fd, SOMAXCONN) == 0)
        return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

// Opens the listener on address.port; port 0 becomes the free port that was taken. A port in use is tried
// again for 5 s: a rank that connects too early may hold it for a moment.
static inline bool link_listen(Link* link, Error* err) {
    double deadline = seconds_now() + 5;
    int port = link->address.port;
    for (;;) {
        link->listener = link_bind(AF_INET6, port);
        if (link->listener < 0 && errno != EADDRINUSE) link->listener = link_bind(AF_INET, port);
        if (link->listener >= 0) break;
        if (errno != EADDRINUSE || port == 0 || seconds_now() > deadline)
            return fail(err, "cannot listen on port %d for the other ranks: %s%s", port, strerror(errno),
                        errno == EADDRINUSE ? "; choose another MASTER_PORT" : "");
        (void)poll(NULL, 0, 100);
    }
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    if (getsockname(link->listener, (struct sockaddr*)&bound, &bytes) != 0)
        return fail(err, "cannot listen for the other ranks: %s", strerror(errno));
    link->address.port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6*)&bound)->sin6_port
                                                           : ((struct sockaddr_in*)&bound)->sin_port);
    return true;
}

// Lists the addresses of this host in `address`, loopback last. Link-local IPv6 addresses are left out: they
// mean nothing without an interface.
static inline bool link_own_addresses(LinkAddress* address, Error* err) {
    struct ifaddrs* list;
    if (getifaddrs(&list) != 0) return fail(err, "cannot list this host's addresses: %s", strerror(errno));
    address->count = 0;
    for (unsigned loopback = 0; loopback <= IFF_LOOPBACK; loopback += IFF_LOOPBACK) {
        for (struct ifaddrs* i = list; i && address->count < LINK_ADDRESSES; i = i->ifa_next) {
            if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK) != loopback)
                continue;
            int family = i->ifa_addr->sa_family;
            const struct sockaddr_in6* six = (const struct sockaddr_in6*)i->ifa_addr;
            const struct sockaddr_in* four = (const struct sockaddr_in*)i->ifa_addr;
            if (family == AF_INET6 ? IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr) : family != AF_INET) continue;
            const void* number =
                family == AF_INET6 ? (const void*)&six->sin6_addr : (const void*)&four->sin_addr;
            char* name = address->names[address->count];
            if (inet_ntop(family, number, name, sizeof address->names[0])) address->count++;
        }
    }
    freeifaddrs(list);
    return address->count > 0 ? true : fail(err, "this host has no network address, not even 127.0.0.1");
}

// Ranks that are missing, for messages: the first 16 of them.
typedef struct {
    char text[256];
    int count;
} RankList;

static inline void rank_list_add(RankList* list, int rank) {
    const size_t n = strlen(list->text);
    if (list->count < 16) snprintf(list->text + n, sizeof list->text - n, "%s%d", n ? ", " : "", rank);
    if (list->count++ == 16) strcat(list->text, ", ...");
}

// Fails and names the ranks that are not connected.
static inline bool link_fail_missing(const Link* link, double seconds, Error* err) {
    RankList missing = {"", 0};
    for (int r = 1; r < link->size; r++) {
        const LinkPeer* peer = &link->peers[r];
        bool here = true;
        for (int c = 0; c < LINK_CHANNELS; c++) here = here && peer->fd[c] >= 0;
        if (!here) rank_list_add(&missing, r);
    }
    return fail(err,
                "%s %s of %d did not connect to port %d of %s within %.0f s; start all ranks, open the "
                "port between the hosts, or raise --timeout",
                plural(missing.count, "rank").text, missing.text, link->size, link->address.port, link->host,
                seconds);
}

// Accepts all channels of all other ranks. A connection has 1 s to say who it is.
static inline bool link_accept(Link* link, double timeout, Error* err) {
    double deadline = seconds_now() + timeout;
    for (int missing = LINK_CHANNELS * (link->size - 1); missing > 0;) {
        if (!link_wait(link->listener, POLLIN, deadline)) return link_fail_missing(link, timeout, err);
        int fd = accept4(link->listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) continue; // it has gone again; if not, the deadline ends this loop
        LinkHello hello, ours;
        if (!link_receive_hello(link, fd, &hello, seconds_now() + 1) || hello.rank == 0) {
            close(fd);
            continue;
        }
        const LinkPeer* peer = &link->peers[hello.rank];
        if (peer->pid != 0 && (peer->pid != hello.pid || strcmp(peer->host, hello.host) != 0)) {
            close(fd);
            return fail(err, "two processes say that they are rank %d: process %d on %s and process %d on %s",
                        hello.rank, peer->pid, peer->host, hello.pid, hello.host);
        }
        ours = link_hello(link, hello.channel);
        link_tune(fd);
        if (peer->fd[hello.channel] >= 0 || !link_write(fd, &ours, sizeof ours)) {
            close(fd);
            continue;
        }
        link_set_peer(link, &hello, fd);
        missing--;
    }
    close(link->listener);
    link->listener = -1;
    return true;
}

// ----------------------------------------------------------------------------
// the other ranks

// Connects to one address before the time `limit`. Returns the socket, which blocks, or -1 and *why.
static inline int link_dial(const struct addrinfo* to, double limit, int* why) {
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), failed = 0;
    socklen_t bytes = sizeof failed;
    if (fd < 0) {
        *why = errno;
        return -1;
    }
    if (connect(fd, to->ai_addr, to->ai_addrlen) != 0) {
        failed = errno;
        if (failed == EINPROGRESS)
            failed = !link_wait(fd, POLLOUT, limit)                               ? ETIMEDOUT
                     : getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &bytes) != 0 ? errno
                                                                                  : failed;
    }
    int flags = failed ? 0 : fcntl(fd, F_GETFL);
    if (!failed && (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) != 0)) failed = errno;
    if (!failed) return fd;
    close(fd);
    *why = failed;
    return -1;
}

// Says hello on a new connection. False: rank 0 of this run does not answer there.
static inline bool link_greet(Link* link, int fd, int channel, double deadline) {
    LinkHello hello = link_hello(link, channel);
    double limit = seconds_now() + 10 < deadline ? seconds_now() + 10 : deadline;
    link_tune(fd);
    if (!link_write(fd, &hello, sizeof hello) || !link_receive_hello(link, fd, &hello, limit) ||
        hello.rank != 0 || hello.channel != channel)
        return false;
    link_set_peer(link, &hello, fd);
    return true;
}

// Connects a channel to rank 0: tries every address again and again until the deadline, each time with more
// patience: an interface that leads nowhere is not to use up the time of those after it.
static inline bool link_connect(Link* link, int channel, double timeout, Error* err) {
    double deadline = seconds_now() + timeout;
    const LinkAddress* a = &link->address;
    char port[16], why[256] = "no time was left";
    double patience = 0.25; // seconds, of 3 at most
    snprintf(port, sizeof port, "%d", a->port);
    do {
        for (int i = 0; i < a->count; i++) {
            int name = (link->reached + i) % a->count, failed = 0;
            struct addrinfo hints, *found = NULL;
            memset(&hints, 0, sizeof hints);
            hints.ai_socktype = SOCK_STREAM;
            int rc = getaddrinfo(a->names[name], port, &hints, &found);
            if (rc != 0) snprintf(why, sizeof why, "%s", gai_strerror(rc));
            for (struct addrinfo* to = rc == 0 ? found : NULL; to; to = to->ai_next) {
                const double limit = seconds_now() + patience;
                int fd = link_dial(to, limit < deadline ? limit : deadline, &failed);
                if (fd >= 0 && link_greet(link, fd, channel, deadline)) {
                    freeaddrinfo(found);
                    link->reached = name;
                    return true;
                }
                snprintf(why, sizeof why, "%s",
                         fd < 0 ? strerror(failed) : "what listens there is not rank 0 of this run");
                if (fd >= 0) close(fd);
            }
            if (rc == 0) freeaddrinfo(found);
        }
        (void)poll(NULL, 0, 50);
        patience = patience < 1.5 ? 2 * patience : 3;
    } while (seconds_now() < deadline);
    return fail(
        err,
        "cannot reach rank 0 at %s%s, port %d, within %.0f s: %s; is rank 0 running, is the port open, "
        "or raise --timeout",
        a->names[0], a->count > 1 ? " or its other addresses" : "", a->port, timeout, why);
}

// ----------------------------------------------------------------------------

// Draws the token of a run whose start has none.
static inline bool link_random_token(LinkAddress* address, Error* err) {
    ssize_t n = getrandom(&address->token, sizeof address->token, 0);
    return n == (ssize_t)sizeof address->token
               ? true
               : fail(err, "cannot draw a random number: %s", strerror(errno));
}

// Prepares the link of a rank; nothing is connected.
static inline void link_init(Link* link, int rank, int size, const char host[64],
                             const LinkAddress* address) {
    memset(link, 0, sizeof *link);
    link->rank = rank;
    link->size = size;
    memcpy(link->host, host, sizeof link->host);
    link->address = *address;
    link->listener = -1;
    link->peers = (LinkPeer*)xcalloc((size_t)size, sizeof *link->peers);
    for (int r = 0; r < size; r++)
        for (int c = 0; c < LINK_CHANNELS; c++) link->peers[r].fd[c] = -1;
    memcpy(link->peers[rank].host, link->host, sizeof link->host); // for messages
    link->peers[rank].pid = (int32_t)getpid();
}

// Closes all connections.
static inline void link_close(Link* link) {
    if (link->listener >= 0) close(link->listener);
    for (int r = 0; r < link->size; r++)
        for (int c = 0; c < LINK_CHANNELS; c++)
            if (link->peers[r].fd[c] >= 0) close(link->peers[r].fd[c]);
    free(link->peers);
    link->peers = NULL;
}
