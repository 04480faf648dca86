/*
Verified downloads over HTTP, many at once: one Downloader a thread, one Stop for them all.

A download is good when the server answered 200, as many bytes came as it announced, they have the size and
the SHA-256 that Hugging Face gives for large files (X-Linked-Size and X-Linked-Etag, on the redirect to its
store), and the caller's own check accepts them. What may pass (timeouts, resets, 5xx, damaged bytes) is tried
again after a growing pause; what will not (404 and the like) fails at once.
*/
#ifndef DATA_DOWNLOAD_H
#define DATA_DOWNLOAD_H

#include <curl/curl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <strings.h>

#include "../llmc/base/common.h"

// ----------------------------------------------------------------------------
// stopping: any thread may end the work of all, and every wait in this program ends with it

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed; // signalled on a stop; the owner may signal changes of its own state with it
    bool stopped;
    Error reason; // the first one given
} Stop;

static inline void stop_init(Stop* s) {
    pthread_condattr_t monotonic; // a clock set back must not lengthen a wait
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    s->stopped = false;
}

// Stops everything for this reason, unless there is one already.
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

// Waits that long, or until the stop.
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
// one download

#define DOWNLOAD_FIRST_PAUSE 0.25 // seconds before the second try; twice as long before each further one
#define DOWNLOAD_MAX_PAUSE   300  // also for a server's Retry-After

// Whether these bytes are what was asked for; on false, err says why without naming the source.
typedef bool DownloadCheck(const void* data, size_t bytes, void* context, Error* err);

typedef struct {
    CURL* curl; // kept from one download to the next, with its connections
    Stop* stop;
    int tries;
    int timeout; // seconds to connect, and seconds without progress, after which a try is given up
    char* data;  // the answer to the last request
    size_t bytes, capacity, max_bytes;
    long status;            // HTTP's, of the last answer; 0 if there was none
    int64_t linked_size;    // -1: not given
    char linked_sha256[65]; // empty: not given
    char problem[CURL_ERROR_SIZE];
} Downloader;

static inline size_t download_receive(char* data, size_t size, size_t count, void* user) {
    Downloader* d = (Downloader*)user;
    size_t n = size * count;
    if (n > d->max_bytes - d->bytes) {
        snprintf(d->problem, sizeof d->problem, "more than the %zu bytes that it can have", d->max_bytes);
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

// If line is this header, copies its value without quotes and space into out[size], cut to fit.
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
    // the first answer of a chain of redirects is the one that speaks for the file
    if (d->linked_size < 0 && download_header_is(line, n, "x-linked-size", value, sizeof value))
        d->linked_size = strtoll(value, NULL, 10);
    // a small file outside the large-file store has a Git hash here, of 40 digits
    if (!d->linked_sha256[0] && download_header_is(line, n, "x-linked-etag", value, sizeof value))
        if (strspn(value, "0123456789abcdefABCDEF") == 64 && value[64] == '\0')
            memcpy(d->linked_sha256, value, sizeof d->linked_sha256);
    return n;
}

static inline int download_go_on(void* user, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t e) {
    (void)a, (void)b, (void)c, (void)e;
    return stop_asked(((Downloader*)user)->stop); // not 0: give up
}

// Dies if libcurl cannot start. curl_global_init comes first, once, in the program.
static inline void downloader_init(Downloader* d, Stop* stop, int tries, int timeout) {
    memset(d, 0, sizeof *d);
    d->stop = stop;
    d->tries = tries;
    d->timeout = timeout;
    d->curl = curl_easy_init();
    if (!d->curl) die("libcurl does not start");
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
    curl_easy_setopt(d->curl, CURLOPT_XFERINFOFUNCTION, download_go_on);
    curl_easy_setopt(d->curl, CURLOPT_XFERINFODATA, d);
}

static inline void downloader_free(Downloader* d) {
    curl_easy_cleanup(d->curl);
    free(d->data);
}

// Checks size and hash of a complete answer against what the server told of the file.
static inline bool download_verify(const Downloader* d, Error* err) {
    curl_off_t announced = -1;
    curl_easy_getinfo(d->curl, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &announced);
    if (announced >= 0 && (size_t)announced != d->bytes)
        return fail(err, "%zu bytes came of %lld", d->bytes, (long long)announced);
    if (d->linked_size >= 0 && (size_t)d->linked_size != d->bytes)
        return fail(err, "%zu bytes came, the file has %lld", d->bytes, (long long)d->linked_size);
    if (!d->linked_sha256[0]) return true;
    unsigned char hash[EVP_MAX_MD_SIZE];
    char hex[65];
    if (!EVP_Digest(d->data, d->bytes, hash, NULL, EVP_sha256(), NULL))
        return fail(err, "cannot compute its SHA-256");
    for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", hash[i]);
    if (strcasecmp(hex, d->linked_sha256) == 0) return true;
    return fail(err, "the bytes that came have SHA-256 %s, the file has %s", hex, d->linked_sha256);
}

typedef enum { DOWNLOAD_GOOD, DOWNLOAD_TRY_AGAIN, DOWNLOAD_GIVE_UP } DownloadResult;

// One try. On failure err says what happened, without the address.
static inline DownloadResult download_once(Downloader* d, const char* url, DownloadCheck* check,
                                           void* context, Error* err) {
    d->bytes = 0;
    d->linked_size = -1;
    d->linked_sha256[0] = d->problem[0] = '\0';
    curl_easy_setopt(d->curl, CURLOPT_URL, url);
    CURLcode code = curl_easy_perform(d->curl);
    curl_easy_getinfo(d->curl, CURLINFO_RESPONSE_CODE, &d->status);
    if (code == CURLE_HTTP_RETURNED_ERROR || (code == CURLE_OK && d->status != 200)) {
        fail(err, "the server answered HTTP %ld%s", d->status, d->status == 404 ? " (no such file)" : "");
        bool lasting = d->status < 500 && d->status != 408 && d->status != 429;
        return lasting ? DOWNLOAD_GIVE_UP : DOWNLOAD_TRY_AGAIN;
    }
    if (code != CURLE_OK) {
        fail(err, "%s", d->problem[0] ? d->problem : curl_easy_strerror(code));
        bool lasting = code == CURLE_ABORTED_BY_CALLBACK || code == CURLE_URL_MALFORMAT ||
                       code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_TOO_MANY_REDIRECTS ||
                       code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE;
        return lasting ? DOWNLOAD_GIVE_UP : DOWNLOAD_TRY_AGAIN;
    }
    bool good = download_verify(d, err) && check(d->data, d->bytes, context, err);
    return good ? DOWNLOAD_GOOD : DOWNLOAD_TRY_AGAIN;
}

// Downloads url, of at most max_bytes, into d->data[d->bytes]. On failure or a stop, err names url and what
// the last try met.
static inline bool download(Downloader* d, const char* url, size_t max_bytes, DownloadCheck* check,
                            void* context, Error* err) {
    Error why;
    d->max_bytes = max_bytes;
    double pause = DOWNLOAD_FIRST_PAUSE;
    for (int tried = 1;; tried++, pause *= 2) {
        DownloadResult result = download_once(d, url, check, context, &why);
        if (result == DOWNLOAD_GOOD) return true;
        if (result == DOWNLOAD_GIVE_UP) return fail(err, "%.500s: %.400s", url, why.msg);
        if (tried >= d->tries || stop_asked(d->stop))
            return fail(err, "%.500s: %.400s (tries: %d)", url, why.msg, tried);
        curl_off_t asked = 0;
        curl_easy_getinfo(d->curl, CURLINFO_RETRY_AFTER, &asked);
        double wait = (double)asked > pause ? (double)asked : pause;
        stop_pause(d->stop, wait < DOWNLOAD_MAX_PAUSE ? wait : DOWNLOAD_MAX_PAUSE);
    }
}

#endif // DATA_DOWNLOAD_H
