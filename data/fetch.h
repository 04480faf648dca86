/*
Downloads the chunks of a source (source.h) to its cache, by a pool of threads ahead of the main thread, which
reads the chunks in their order. Called by longcrawl64.c.
*/
#pragma once

#include "source.h"

enum { MAX_JOBS = 64 }; // threads

// Job i is chunk (rows[i / chunk_cols], i % chunk_cols).
typedef struct {
    Source* source;
    int64_t* rows; // of chunks to download, in order
    int64_t chunk_cols, jobs;

    int64_t next_job;
    int64_t job_limit; // jobs from here on must wait for the main thread
    bool* fetched;     // [jobs]
    pthread_t threads[MAX_JOBS];
    int num_threads;
} Fetch;

typedef struct {
    Fetch* fetch;
    Downloader downloader;
    uint16_t* chunk; // buffer for the check
    char name[64];   // of the chunk
    bool known;      // the list has its SHA-256
} Fetcher;

static inline bool check_chunk(const void* data, size_t bytes, void* context, Error* err) {
    Fetcher* f = (Fetcher*)context;
    const Source* s = f->fetch->source;
    return zarr_decode(&s->array, data, bytes, f->chunk, err) &&
           sums_check(&s->sums, s->name, f->name, data, bytes, &f->known, err);
}

// Downloads a chunk to the cache, unless an undamaged one exists from an earlier run.
static inline bool fetch_chunk(Fetcher* f, int64_t row, int64_t column, Error* err) {
    Source* s = f->fetch->source;
    char url[PATH_LENGTH], path[PATH_LENGTH];
    chunk_name(url, s->url, row, column);
    chunk_name(path, s->folder, row, column);
    snprintf(f->name, sizeof f->name, "%lld.%lld", (long long)row, (long long)column);
    if (access(path, F_OK) == 0) {
        size_t bytes;
        char* cached = cache_read(path, zarr_chunk_max_file(&s->array), &bytes, err);
        bool good = cached && check_chunk(cached, bytes, f, err);
        free(cached);
        if (good && !f->known) count_unverified(s);
        if (good) return true;
        warn("%s: damaged in the cache (%s); downloading it again", path, err->msg);
    }
    Downloader* d = &f->downloader;
    if (!download(d, url, zarr_chunk_max_file(&s->array), check_chunk, f, err))
        return d->status == 404 ? fail_missing(url, err) : false;
    if (!f->known && !d->linked_sha256[0]) count_unverified(s);
    return cache_write(path, d->data, d->bytes, err);
}

// The next job, once it is below job_limit; -1 if there is none or on a stop.
static inline int64_t take_job(Fetch* fetch) {
    Stop* stop = &fetch->source->stop;
    pthread_mutex_lock(&stop->mutex);
    while (!stop->stopped && fetch->next_job < fetch->jobs && fetch->next_job >= fetch->job_limit)
        pthread_cond_wait(&stop->changed, &stop->mutex);
    int64_t job = stop->stopped || fetch->next_job == fetch->jobs ? -1 : fetch->next_job++;
    pthread_mutex_unlock(&stop->mutex);
    return job;
}

static inline void* fetcher_main(void* user) {
    Fetch* fetch = (Fetch*)user;
    Source* s = fetch->source;
    Fetcher f = {.fetch = fetch};
    Error err;
    downloader_init(&f.downloader, &s->stop, s->tries, s->timeout);
    f.chunk = (uint16_t*)xcalloc(1, zarr_chunk_bytes(&s->array));
    for (int64_t job; (job = take_job(fetch)) >= 0;) {
        if (!fetch_chunk(&f, fetch->rows[job / fetch->chunk_cols], job % fetch->chunk_cols, &err)) {
            stop_now(&s->stop, &err);
            break;
        }
        pthread_mutex_lock(&s->stop.mutex);
        fetch->fetched[job] = true;
        pthread_cond_broadcast(&s->stop.changed);
        pthread_mutex_unlock(&s->stop.mutex);
    }
    free(f.chunk);
    downloader_free(&f.downloader);
    return NULL;
}

// Waits until the chunk of this job is in the cache; false on a stop.
static inline bool fetch_wait(Fetch* fetch, int64_t job) {
    Stop* stop = &fetch->source->stop;
    pthread_mutex_lock(&stop->mutex);
    // two rows of chunks ahead: downloads continue while a row is written, and the size of the cache is
    // bounded
    fetch->job_limit = job + 2 * fetch->chunk_cols + fetch->num_threads;
    pthread_cond_broadcast(&stop->changed);
    while (!stop->stopped && !fetch->fetched[job]) pthread_cond_wait(&stop->changed, &stop->mutex);
    bool ok = !stop->stopped;
    pthread_mutex_unlock(&stop->mutex);
    return ok;
}

// Waits until all threads have ended.
static inline void fetch_join(Fetch* fetch) {
    for (int i = 0; i < fetch->num_threads; i++) pthread_join(fetch->threads[i], NULL);
}

// Starts as many threads, fewer where there are fewer jobs.
static inline bool fetch_start(Fetch* fetch, int64_t threads, Error* err) {
    int64_t n = threads < fetch->jobs ? threads : fetch->jobs;
    for (int64_t i = 0; i < n; i++, fetch->num_threads++) {
        int why = pthread_create(&fetch->threads[i], NULL, fetcher_main, fetch);
        if (why != 0) return fail(err, "cannot start a thread: %s", strerror(why));
    }
    return true;
}
