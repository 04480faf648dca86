/*
Verified HTTP downloads for data/longcrawl64.c, in several threads: one Downloader per thread, one Stop for
all.

A download succeeds if the status is 200, the body has the announced length, and the caller's check accepts
it. For large files Hugging Face also gives size and SHA-256, which must agree (headers X-Linked-Size and
X-Linked-Etag of the redirect to its storage). Temporary errors (timeouts, resets, HTTP 5xx, damaged data) are
retried with exponential backoff; permanent ones (such as HTTP 404) fail at once. A redirect from https to
another protocol is not followed, nor one from http to anything but http and https.
*/
#pragma once

#include <curl/curl.h>
#include <pthread.h>
#include <signal.h>
#include <strings.h>

#include "../llmc/base/common.h"
#include "verify.h"

// ----------------------------------------------------------------------------
// stopping: any thread can stop all threads; every wait in the program ends on a stop

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed; // signalled on a stop, and by the owner for changes of its own state
    bool stopped;
    Error reason; // of the first stop
} Stop;

static inline void stop_init(Stop* s) {
    pthread_condattr_t monotonic; // so that a change of the system time does not affect waits
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    s->stopped = false;
}

// Stops all threads; keeps the reason of an earlier stop.
static inline void stop_now(Stop* s, const Error* reason) {
    pthread_mutex_lock(&s->mutex);
    if (!s->stopped) s->reason = *reason;
    s->stopped = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
}

static inline bool stop_asked(Stop* s) {
    pthread_mutex_lock(&s->mutex);
    bool stopped = s->stopped;
    pthread_mutex_unlock(&s->mutex);
    return stopped;
}

// Waits for this time or until a stop.
static inline void stop_pause(Stop* s, double seconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t nanoseconds = until.tv_nsec + (int64_t)(seconds * 1e9);
    until.tv_sec += (time_t)(nanoseconds / 1000000000);
    until.tv_nsec = (long)(nanoseconds % 1000000000);
    pthread_mutex_lock(&s->mutex);
    while (!s->stopped && pthread_cond_timedwait(&s->changed, &s->mutex, &until) != ETIMEDOUT) {}
    pthread_mutex_unlock(&s->mutex);
}

// ----------------------------------------------------------------------------
// signals that stop the program: handled by a thread, because a signal handler cannot take the lock

static inline sigset_t caught_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        struct sigaction action;
        // a signal that is ignored at the start, for example by nohup, stays ignored
        if (sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&set, numbers[i]);
    }
    return set;
}

static inline void* stop_signal_main(void* user) {
    Stop* s = (Stop*)user;
    sigset_t set = caught_signals();
    int number;
    Error err;
    if (sigwait(&set, &number) != 0) return NULL;
    fail(&err, "interrupted; run the same command again to continue");
    stop_now(s, &err);
    sigwait(&set, &number); // the second signal ends the program at once
    _exit(EXIT_FAILURE);
}

// Makes a Stop that a signal sets which asks the program to end. To be called before other threads are
// started. SIGPIPE is ignored (guard_process): a connection closed by the server is an ordinary error.
static inline void stop_on_signals(Stop* s) {
    sigset_t set = caught_signals();
    pthread_t thread;
    stop_init(s);
    pthread_sigmask(SIG_BLOCK, &set, NULL); // inherited by all threads
    if (pthread_create(&thread, NULL, stop_signal_main, s) != 0) die("cannot start a thread");
    pthread_detach(thread);
}

// ----------------------------------------------------------------------------
// one download

static const double DOWNLOAD_FIRST_PAUSE =
    0.25; // seconds before the second attempt; doubled before each further one
static const double DOWNLOAD_MAX_PAUSE = 300; // seconds; also limits a server's Retry-After

static int download_slow; // Has one of the threads said that downloads fail?

// Checks the content of a download. On false, err contains the reason without the source.
typedef bool DownloadCheck(const void* data, size_t bytes, void* context, Error* err);

typedef struct {
    CURL* curl; // reused for all downloads, together with its connections
    Stop* stop;
    int tries;
    char* data; // body of the last response
    size_t bytes, capacity, max_bytes;
    long status;            // HTTP status of the last response; 0 if there was none
    int64_t linked_size;    // -1: not given
    char linked_sha256[65]; // empty: not given
    char problem[CURL_ERROR_SIZE];
} Downloader;

static inline size_t download_receive(char* data, size_t size, size_t count, void* user) {
    Downloader* d = (Downloader*)user;
    size_t n = size * count;
    if (n > d->max_bytes - d->bytes) {
        snprintf(d->problem, sizeof d->problem, "larger than the limit of %s",
                 counted((int64_t)d->max_bytes, "byte").text);
        return 0;
    }
    if (d->bytes + n > d->capacity) {
        d->capacity = 2 * (d->bytes + n) < d->max_bytes ? 2 * (d->bytes + n) : d->max_bytes;
        d->data = (char*)xrealloc(d->data, d->capacity);
    }
    memcpy(d->data + d->bytes, data, n);
    d->bytes += n;
    return n;
}

// If line is the header `name`, copies its value, without quotes and white space, to out[size]; may truncate.
static inline bool download_header_is(const char* line, size_t n, const char* name, char* out, size_t size) {
    size_t length = strlen(name), used = 0;
    if (n <= length || strncasecmp(line, name, length) != 0 || line[length] != ':') return false;
    for (size_t i = length + 1; i < n && used + 1 < size; i++)
        if (!strchr("\" \t\r\n", line[i])) out[used++] = line[i];
    out[used] = '\0';
    return true;
}

static inline size_t download_header(char* line, size_t size, size_t count, void* user) {
    Downloader* d = (Downloader*)user;
    size_t n = size * count;
    char value[80];
    // in a chain of redirects, the first response describes the file
    if (d->linked_size < 0 && download_header_is(line, n, "x-linked-size", value, sizeof value))
        d->linked_size = strtoll(value, NULL, 10);
    // for a small file, not in large-file storage, the value is a Git hash of 40 digits
    if (!d->linked_sha256[0] && download_header_is(line, n, "x-linked-etag", value, sizeof value))
        if (strspn(value, "0123456789abcdefABCDEF") == 64 && value[64] == '\0')
            memcpy(d->linked_sha256, value, sizeof d->linked_sha256);
    return n;
}

static inline int download_progress(void* user, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t e) {
    (void)a, (void)b, (void)c, (void)e;
    return stop_asked(((Downloader*)user)->stop); // not 0: abort
}

// `timeout` is in seconds: to connect, and without progress. An attempt that exceeds it fails. Dies if
// libcurl cannot be initialized; the program must have called curl_global_init.
static inline void downloader_init(Downloader* d, Stop* stop, int tries, int timeout) {
    memset(d, 0, sizeof *d);
    d->stop = stop;
    d->tries = tries;
    d->curl = curl_easy_init();
    if (!d->curl) die("cannot initialize libcurl");
    curl_easy_setopt(d->curl, CURLOPT_USERAGENT, "longcrawl64/1");
    curl_easy_setopt(d->curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(d->curl, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(d->curl, CURLOPT_MAXREDIRS, 10L);
    curl_easy_setopt(d->curl, CURLOPT_FAILONERROR, 1L);
    curl_easy_setopt(d->curl, CURLOPT_CONNECTTIMEOUT, (long)timeout);
    curl_easy_setopt(d->curl, CURLOPT_LOW_SPEED_LIMIT, 1000L); // bytes a second
    curl_easy_setopt(d->curl, CURLOPT_LOW_SPEED_TIME, (long)timeout);
    curl_easy_setopt(d->curl, CURLOPT_ERRORBUFFER, d->problem);
    curl_easy_setopt(d->curl, CURLOPT_WRITEFUNCTION, download_receive);
    curl_easy_setopt(d->curl, CURLOPT_WRITEDATA, d);
    curl_easy_setopt(d->curl, CURLOPT_HEADERFUNCTION, download_header);
    curl_easy_setopt(d->curl, CURLOPT_HEADERDATA, d);
    curl_easy_setopt(d->curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(d->curl, CURLOPT_XFERINFOFUNCTION, download_progress);
    curl_easy_setopt(d->curl, CURLOPT_XFERINFODATA, d);
}

static inline void downloader_free(Downloader* d) {
    curl_easy_cleanup(d->curl);
    free(d->data);
}

// Checks size and SHA-256 of a complete response against its headers.
static inline bool download_verify(const Downloader* d, Error* err) {
    curl_off_t announced = -1;
    curl_easy_getinfo(d->curl, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &announced);
    if (announced >= 0 && (size_t)announced != d->bytes)
        return fail(err, "received %zu of %s", d->bytes, counted(announced, "byte").text);
    if (d->linked_size >= 0 && (size_t)d->linked_size != d->bytes)
        return fail(err, "received %s, the file has %lld", counted((int64_t)d->bytes, "byte").text,
                    (long long)d->linked_size);
    if (!d->linked_sha256[0]) return true;
    return sha256_check(d->data, d->bytes, d->linked_sha256, "the file has", err);
}

// Sets url as the next download, and the protocols that a redirect from it may lead to.
static inline void download_set_url(CURL* curl, const char* url) {
    const bool https = strncasecmp(url, "https://", 8) == 0;
    curl_easy_setopt(curl, CURLOPT_URL, url);
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR, https ? "https" : "http,https");
#else
    const long any = CURLPROTO_HTTP | CURLPROTO_HTTPS, secure = CURLPROTO_HTTPS;
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS, any);
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS, https ? secure : any);
#endif
}

typedef enum { DOWNLOAD_GOOD, DOWNLOAD_TRY_AGAIN, DOWNLOAD_GIVE_UP } DownloadResult;

// One attempt. On failure err contains the reason without the URL.
static inline DownloadResult download_once(Downloader* d, const char* url, DownloadCheck* check,
                                           void* context, Error* err) {
    d->bytes = 0;
    d->linked_size = -1;
    d->linked_sha256[0] = d->problem[0] = '\0';
    download_set_url(d->curl, url);
    CURLcode code = curl_easy_perform(d->curl);
    curl_easy_getinfo(d->curl, CURLINFO_RESPONSE_CODE, &d->status);
    if (code == CURLE_HTTP_RETURNED_ERROR || (code == CURLE_OK && d->status != 200)) {
        fail(err, "the server answered HTTP %ld%s", d->status, d->status == 404 ? " (no such file)" : "");
        bool permanent = d->status < 500 && d->status != 408 && d->status != 429;
        return permanent ? DOWNLOAD_GIVE_UP : DOWNLOAD_TRY_AGAIN;
    }
    if (code == CURLE_UNSUPPORTED_PROTOCOL) {
        fail(err, "is redirected to an address that is not followed from here: %s", d->problem);
        return DOWNLOAD_GIVE_UP;
    }
    if (code != CURLE_OK) {
        fail(err, "%s", d->problem[0] ? d->problem : curl_easy_strerror(code));
        bool permanent = code == CURLE_ABORTED_BY_CALLBACK || code == CURLE_URL_MALFORMAT ||
                         code == CURLE_TOO_MANY_REDIRECTS || code == CURLE_PEER_FAILED_VERIFICATION ||
                         code == CURLE_SSL_CACERT_BADFILE;
        return permanent ? DOWNLOAD_GIVE_UP : DOWNLOAD_TRY_AGAIN;
    }
    bool good = download_verify(d, err) && (!check || check(d->data, d->bytes, context, err));
    return good ? DOWNLOAD_GOOD : DOWNLOAD_TRY_AGAIN;
}

// Downloads at most max_bytes from url to d->data[d->bytes]. `check` may be NULL. On failure or a stop, err
// contains url and the error of the last attempt.
static inline bool download(Downloader* d, const char* url, size_t max_bytes, DownloadCheck* check,
                            void* context, Error* err) {
    Error why;
    d->max_bytes = max_bytes;
    double pause = DOWNLOAD_FIRST_PAUSE;
    for (int tried = 1;; tried++, pause *= 2) {
        DownloadResult result = download_once(d, url, check, context, &why);
        if (result == DOWNLOAD_GOOD) return true;
        if (result == DOWNLOAD_GIVE_UP) return fail(err, "%s: %s", url, why.msg);
        if (tried >= d->tries || stop_asked(d->stop))
            return fail(err, "%s: %s (tries: %d)", url, why.msg, tried);
        if (tried == 2 && __sync_bool_compare_and_swap(&download_slow, 0, 1))
            warn("%s: %s; a download is tried up to %s, with pauses of up to %.0f s", url, why.msg,
                 counted(d->tries, "time").text, DOWNLOAD_MAX_PAUSE);
        curl_off_t asked = 0;
        curl_easy_getinfo(d->curl, CURLINFO_RETRY_AFTER, &asked);
        double wait = (double)asked > pause ? (double)asked : pause;
        stop_pause(d->stop, wait < DOWNLOAD_MAX_PAUSE ? wait : DOWNLOAD_MAX_PAUSE);
    }
}
