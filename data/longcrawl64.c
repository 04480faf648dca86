/*
Converts LongCrawl64 to data shards. LongCrawl64 is a Zarr array with one document of 65536 tokens per row
(zarr.h), in a local folder or on a server.

    data/longcrawl64 --split train --tokens 2.5Gi --out data/longcrawl64

Training at context T uses the first T tokens of each document, in the order of the array. The output for N
tokens is therefore the first N/T documents, truncated to T tokens (--columns); only the chunks that contain
them are downloaded. For evaluation at longer contexts, T may be up to 65536.

A pool of threads downloads chunks to a cache. The main thread reads them in order, one row of chunks at a
time, and writes shards. Chunks and shards get their final names when they are verified and complete, so after
an interruption the same command continues with the files that exist. A local source is read in the same way,
without threads and cache.

Every chunk is compared with its SHA-256: from a list (--sha256sums), else from the server's headers. If there
is none, the program says so at the end. Two chunks with the same bytes are an error: a server gave one for
the other.

With GPT-2's vocab.bpe (--vocab) the tokenizer is written beside the shards, as PREFIX_tokenizer.json, which
the trainers copy into checkpoints.
*/
#include "../llmc/run/command/cli.h"
#include "../llmc/base/common.h"
#include "../llmc/base/progress.h"
#include "cache.h"
#include "download.h"
#include "mirror.h"
#include "roll.h"
#include "shard_writer.h"
#include "tokenizer_file.h"
#include "verify.h"
#include "zarr.h"

enum {
    VOCAB_SIZE = 50257, // GPT-2's
    MAX_JOBS = 64,
    ZARRAY_MAX = 65536,   // bytes; a .zarray has a few hundred
    SUMS_MAX = 64 << 20,  // bytes; all of LongCrawl64 takes 9 MB
    ROW_MAX = 1 << 27,    // tokens of a row of chunks, in memory: LongCrawl64's
    CHUNKS_MAX = 16 << 20 // all of LongCrawl64 has 104,000
};
static const char SUMS_NAME[] = "SHA256SUMS";

// ----------------------------------------------------------------------------
// options

typedef struct {
    const char *source, *split, *out, *cache, *sums, *vocab;
    int64_t tokens, columns, roll, shard_tokens, jobs, tries, timeout;
    bool at_most, keep_cache, dry_run, version, help;
} Options;

static const CliRow option_rows[] = {
    {CLI_TEXT, "source", "DIR|URL", offsetof(Options, source), 0, 0, 0,
     "folder or URL that contains heldout.zarr and train.zarr [the copy on Hugging Face]"},
    {CLI_TEXT, "split", "NAME", offsetof(Options, split), 0, 0, 0,
     "train or heldout; shards of heldout are named PREFIX_val_*.bin"},
    {CLI_COUNT, "tokens", "N", offsetof(Options, tokens), CLI_UNSET, 1, 1LL << 62,
     "tokens to write, rounded up to whole documents"},
    {CLI_FLAG, "at-most", "", offsetof(Options, at_most), 0, 0, 0,
     "write what the default source has of train, where that is less than --tokens"},
    {CLI_TEXT, "out", "PREFIX", offsetof(Options, out), 0, 0, 0,
     "path prefix of the shards: PREFIX_train_000000.bin and so on"},
    {CLI_TEXT, "vocab", "FILE", offsetof(Options, vocab), 0, 0, 0,
     "GPT-2's vocab.bpe: also write PREFIX_tokenizer.json, for the trainer's checkpoints"},
    {CLI_COUNT, "columns", "D", offsetof(Options, columns), 16384, 1, INT32_MAX,
     "tokens of each document, from its start"},
    {CLI_COUNT, "roll", "SEED", offsetof(Options, roll), -1, 0, 1LL << 62,
     "rotate what is written of each document by an offset drawn from the seed, as --eval --roll does"},
    {CLI_COUNT, "shard-tokens", "N", offsetof(Options, shard_tokens), 256 << 20, 1, INT32_MAX,
     "tokens per shard, rounded down to whole rows of chunks [256Mi]"},
    {CLI_TEXT, "sha256sums", "FILE", offsetof(Options, sums), 0, 0, 0,
     "SHA-256 of all chunks, as sha256sum prints them in the folder of a --source [SHA256SUMS in the "
     "--source, if it has one]"},
    {CLI_COUNT, "jobs", "N", offsetof(Options, jobs), 8, 1, MAX_JOBS, "number of parallel downloads"},
    {CLI_TEXT, "cache", "DIR", offsetof(Options, cache), 0, 0, 0,
     "folder that holds chunks until their shard is complete, with the layout of a --source [PREFIX.cache]"},
    {CLI_FLAG, "keep-cache", "", offsetof(Options, keep_cache), 0, 0, 0, "do not delete the cached chunks"},
    {CLI_COUNT, "tries", "N", offsetof(Options, tries), 10, 1, 100,
     "maximum number of attempts per download"},
    {CLI_COUNT, "timeout", "SECONDS", offsetof(Options, timeout), 60, 1, 3600,
     "time without progress after which an attempt fails"},
    {CLI_FLAG, "dry-run", "", offsetof(Options, dry_run), 0, 0, 0,
     "print documents, tokens and bytes to write, and exit; asks no server"},
    {CLI_FLAG, "version", "", offsetof(Options, version), 0, 0, 0, "print the program's version and exit"},
    {CLI_FLAG, "help", "", offsetof(Options, help), 0, 0, 0, "print this text and exit"},
};
enum { NUM_OPTION_ROWS = sizeof option_rows / sizeof option_rows[0] };

static Options parse_options(int argc, char** argv) {
    Options o;
    Error err;
    if (!cli_parse(option_rows, NUM_OPTION_ROWS, &o, NULL, argc, argv, NULL, &err)) die("%s", err.msg);
    if (o.version) {
        cli_print_version(argv[0]);
        exit(check_printed());
    }
    if (o.help) {
        printf("usage: data/longcrawl64 --split train|heldout --tokens N --out PREFIX\n"
               "Converts LongCrawl64 to data shards. After an interruption, run the same command again.\n\n");
        cli_print_help(stdout, option_rows, NUM_OPTION_ROWS);
        exit(check_printed());
    }
    if (!o.source) o.source = MIRROR;
    if (!o.split) die("--split is missing: train or heldout");
    if (strcmp(o.split, "train") != 0 && strcmp(o.split, "heldout") != 0)
        die("--split %s: must be train or heldout", o.split);
    if (o.tokens == CLI_UNSET) die("--tokens is missing: the number of tokens to write");
    if (!o.out) die("--out is missing: the path prefix of the shards");
    if (o.source == MIRROR && strcmp(o.split, "train") == 0)
        o.tokens = mirror_tokens(o.tokens, o.columns, o.at_most);
    return o;
}

// ----------------------------------------------------------------------------
// source, cache and plan

typedef struct {
    const Options* options;
    bool remote;
    char array_name[32];            // heldout.zarr or train.zarr
    char array_url[PATH_LENGTH];    // of heldout.zarr or train.zarr, if remote
    char array_folder[PATH_LENGTH]; // local: in the source or the cache
    ZarrArray array;
    Sums sums; // empty: no list
    Stop stop;

    int64_t documents;  // of all shards
    int64_t missing;    // tokens of the shards that are not complete yet
    int64_t chunk_cols; // number of chunk columns that contain columns 0 to D-1
    int64_t shard_rows; // rows of chunks in a full shard
    int64_t shards;
    const char* shard_split; // split in the shards' names: train or val
    bool* complete;          // [shards] already complete at the start

    // the download queue: job i is chunk (rows[i / chunk_cols], i % chunk_cols)
    int64_t* rows; // rows of chunks to download, in order
    int64_t jobs, next_job;
    int64_t job_limit;  // jobs from here on must wait for the main thread
    bool* fetched;      // [jobs]
    int64_t unverified; // chunks read without a known SHA-256
    pthread_t threads[MAX_JOBS];
    int num_threads;
} Work;

// Stops all threads and dies with the reason of the first stop: this error or an earlier signal or error.
static void stop_and_die(Work* w, const Error* why) {
    stop_now(&w->stop, why);
    for (int i = 0; i < w->num_threads; i++) pthread_join(w->threads[i], NULL);
    die("%s", w->stop.reason.msg);
}

// The zarr library would read a missing chunk as zeros; here it is an error.
static bool fail_missing(const char* chunk, Error* err) {
    return fail(err, "%s: this chunk is missing; lower --tokens or complete the source", chunk);
}

static bool check_zarray(const void* data, size_t bytes, void* context, Error* err) {
    ZarrArray ignored;
    (void)context;
    return zarr_parse(&ignored, "its content", (const char*)data, bytes, err);
}

// Downloads .zarray to the cache. A different one in the cache is an error: its chunks are of another array.
static bool download_zarray(Work* w, Error* err) {
    char url[PATH_LENGTH], path[PATH_LENGTH];
    Downloader d;
    join_name(url, w->array_url, ".zarray");
    join_name(path, w->array_folder, ".zarray");
    if (!make_folders(w->array_folder, err) || !cache_lock(w->array_folder, err)) return false;
    downloader_init(&d, &w->stop, (int)w->options->tries, (int)w->options->timeout);
    bool ok = download(&d, url, ZARRAY_MAX, check_zarray, NULL, err);
    if (ok && access(path, F_OK) == 0) {
        size_t bytes;
        char* cached = read_file(path, &bytes, err);
        ok = cached != NULL;
        if (ok && (bytes != d.bytes || memcmp(cached, d.data, bytes) != 0))
            ok =
                fail(err, "%s: differs from %s; remove this cache or choose another with --cache", path, url);
        free(cached);
    } else if (ok) {
        ok = cache_write(path, d.data, d.bytes, err);
    }
    downloader_free(&d);
    return ok;
}

// Loads the list of SHA-256, from the option or from the source, if it has one.
static bool load_sums(Work* w, Error* err) {
    const Options* o = w->options;
    char path[PATH_LENGTH];
    char* text;
    size_t bytes;
    join_name(path, o->source, SUMS_NAME);
    if (!o->sums && w->remote) {
        Downloader d;
        downloader_init(&d, &w->stop, (int)o->tries, (int)o->timeout);
        bool ok = download(&d, path, SUMS_MAX, NULL, NULL, err);
        const bool none = !ok && d.status == 404;
        text = ok ? strndup(d.data ? d.data : "", d.bytes) : NULL;
        downloader_free(&d);
        if (!text) return none;
    } else {
        if (!o->sums && access(path, F_OK) != 0) return true;
        text = read_file(o->sums ? o->sums : path, &bytes, err);
        if (!text) return false;
    }
    w->sums.complete = o->sums != NULL;
    return sums_parse(&w->sums, o->sums ? o->sums : path, text, err);
}

// Locates the array and parses its .zarray.
static bool open_source(Work* w, Error* err) {
    const Options* o = w->options;
    const char* name = w->array_name;
    char path[PATH_LENGTH], cache[PATH_LENGTH];
    snprintf(w->array_name, sizeof w->array_name, "%s.zarr", o->split);
    w->remote = strstr(o->source, "://") != NULL;
    if (w->remote) {
        if (strncmp(o->source, "https://", 8) != 0 && strncmp(o->source, "http://", 7) != 0)
            return fail(err, "--source %s: must be a folder or start with https:// or http://", o->source);
        if (o->dry_run) { // asks no server: at most all of LongCrawl64 is there
            w->array = (ZarrArray){longcrawl64_documents(o->split), LONGCRAWL64_COLUMNS, 0, 0};
            return true;
        }
        snprintf(cache, sizeof cache, "%s.cache", o->out);
        join_name(w->array_url, o->source, name);
        join_name(w->array_folder, o->cache ? o->cache : cache, name);
        if (!download_zarray(w, err)) return false;
    } else {
        join_name(w->array_folder, o->source, name);
    }
    join_name(path, w->array_folder, ".zarray");
    size_t bytes;
    char* text = read_file(path, &bytes, err);
    bool ok = text && zarr_parse(&w->array, path, text, bytes, err) && load_sums(w, err), known;
    Error why;
    if (ok && w->sums.count && !sums_check(&w->sums, w->array_name, ".zarray", text, bytes, &known, &why))
        ok = fail(err, "%s: %s", path, why.msg);
    free(text);
    return ok;
}

// Sets the number of documents, if the array has as many.
static bool count_documents(Work* w, Error* err) {
    const Options* o = w->options;
    const int64_t D = o->columns, rows = w->array.rows;
    if (D > w->array.columns)
        return fail(err, "--columns %lld: a document of %s.zarr has %s", (long long)D, o->split,
                    counted(w->array.columns, "token").text);
    w->documents = (o->tokens - 1) / D + 1;
    if (w->documents <= rows) return true;
    return fail(err, "--tokens %lld: requires %s of %lld, but %s.zarr has %lld (%s)", (long long)o->tokens,
                counted(w->documents, "document").text, (long long)D, o->split, (long long)rows,
                counted(rows * D, "token").text);
}

static int print_plan(Work* w) {
    Error err;
    const int64_t D = w->options->columns;
    if (!open_source(w, &err) || !count_documents(w, &err)) die("%s", err.msg);
    printf("%s: %s of %s, %s, %.1f GB\n", w->options->split, counted(w->documents, "document").text,
           counted(D, "token").text, counted(w->documents * D, "token").text,
           2e-9 * (double)(w->documents * D));
    return check_printed();
}

// Shard s consists of the rows of chunks [first_row, end_row).
static int64_t first_row(const Work* w, int64_t s) { return s * w->shard_rows; }
static int64_t end_row(const Work* w, int64_t s) {
    int64_t end = (s + 1) * w->shard_rows, all = (w->documents - 1) / w->array.chunk_rows + 1;
    return end < all ? end : all;
}

// Number of documents in the rows of chunks [0, row).
static int64_t documents_before(const Work* w, int64_t row) {
    int64_t n = row * w->array.chunk_rows;
    return n < w->documents ? n : w->documents;
}

static int64_t shard_documents(const Work* w, int64_t s) {
    return documents_before(w, end_row(w, s)) - documents_before(w, first_row(w, s));
}

// Sets complete[s] if the file of shard s exists. A file with other content is an error, because training
// would read it.
static bool find_shard(Work* w, int64_t s, Error* err) {
    char path[PATH_LENGTH];
    ShardHeader h = {0};
    Error why;
    if (!shard_path(path, w->options->out, w->shard_split, s, err)) return false;
    if (access(path, F_OK) != 0) return true;
    if (!shard_read_header(path, &h, &why))
        return fail(err, "%s; remove this file or choose another --out", why.msg);
    if (h.masked)
        return fail(err, "%s: has a mask, unlike LongCrawl64; remove this file or choose another --out",
                    path);
    const int64_t D = w->options->columns, n = shard_documents(w, s) * D;
    if (h.doc_len != D || h.tokens != n || h.vocab_size != VOCAB_SIZE)
        return fail(err,
                    "%s: has %s in documents of %lld, but this command writes %lld in documents of %lld; "
                    "remove this file or choose another --out",
                    path, counted(h.tokens, "token").text, (long long)h.doc_len, (long long)n, (long long)D);
    w->complete[s] = true;
    return true;
}

// Determines the shards to write and the chunks to download.
static bool make_plan(Work* w, Error* err) {
    const Options* o = w->options;
    const ZarrArray* a = &w->array;
    int64_t D = o->columns;
    if (!count_documents(w, err)) return false;
    w->chunk_cols = (D - 1) / a->chunk_columns + 1;
    // shards consist of whole rows of chunks: chunks are deleted with their shard and must not be needed by
    // the next
    w->shard_rows = o->shard_tokens / (a->chunk_rows * D);
    if (w->shard_rows < 1) w->shard_rows = 1;
    w->shards = (w->documents - 1) / (w->shard_rows * a->chunk_rows) + 1;
    if (a->chunk_rows > ROW_MAX / D || w->shards * w->shard_rows > CHUNKS_MAX / w->chunk_cols)
        return fail(err, "%s.zarr: not an array of LongCrawl64: its chunks have %s of %s", o->split,
                    counted(a->chunk_rows, "row").text, counted(a->chunk_columns, "token").text);
    w->complete = (bool*)xcalloc((size_t)w->shards, sizeof *w->complete);
    w->rows = (int64_t*)xcalloc((size_t)(w->shards * w->shard_rows), sizeof *w->rows);
    int64_t n = 0;
    for (int64_t s = 0; s < w->shards; s++) {
        if (!find_shard(w, s, err)) return false;
        if (w->complete[s]) continue;
        for (int64_t row = first_row(w, s); row < end_row(w, s); row++) w->rows[n++] = row;
        w->missing += shard_documents(w, s) * D;
    }
    w->jobs = n * w->chunk_cols;
    w->fetched = (bool*)xcalloc((size_t)w->jobs, sizeof *w->fetched);
    const bool begun = w->missing < w->documents * D;
    return roll_record(o->out, w->shard_split, o->roll, begun, err);
}

// ----------------------------------------------------------------------------
// downloading

typedef struct {
    Work* work;
    Downloader downloader;
    uint16_t* chunk; // buffer for the check
    char name[64];   // of the chunk
    bool known;      // the list has its SHA-256
} Fetcher;

static bool check_chunk(const void* data, size_t bytes, void* context, Error* err) {
    Fetcher* f = (Fetcher*)context;
    return zarr_decode(&f->work->array, data, bytes, f->chunk, err) &&
           sums_check(&f->work->sums, f->work->array_name, f->name, data, bytes, &f->known, err);
}

static void count_unverified(Work* w) {
    pthread_mutex_lock(&w->stop.mutex);
    w->unverified++;
    pthread_mutex_unlock(&w->stop.mutex);
}

// Downloads a chunk to the cache, unless an undamaged one exists from an earlier run.
static bool fetch_chunk(Fetcher* f, int64_t row, int64_t column, Error* err) {
    Work* w = f->work;
    char url[PATH_LENGTH], path[PATH_LENGTH];
    chunk_name(url, w->array_url, row, column);
    chunk_name(path, w->array_folder, row, column);
    snprintf(f->name, sizeof f->name, "%lld.%lld", (long long)row, (long long)column);
    if (access(path, F_OK) == 0) {
        size_t bytes;
        char* cached = cache_read(path, zarr_chunk_max_file(&w->array), &bytes, err);
        bool good = cached && check_chunk(cached, bytes, f, err);
        free(cached);
        if (good && !f->known) count_unverified(w);
        if (good) return true;
        warn("%s: damaged in the cache (%s); downloading it again", path, err->msg);
    }
    Downloader* d = &f->downloader;
    if (!download(d, url, zarr_chunk_max_file(&w->array), check_chunk, f, err))
        return d->status == 404 ? fail_missing(url, err) : false;
    if (!f->known && !d->linked_sha256[0]) count_unverified(w);
    return cache_write(path, d->data, d->bytes, err);
}

// The next job, once it is below job_limit; -1 if there is none or on a stop.
static int64_t take_job(Work* w) {
    pthread_mutex_lock(&w->stop.mutex);
    while (!w->stop.stopped && w->next_job < w->jobs && w->next_job >= w->job_limit)
        pthread_cond_wait(&w->stop.changed, &w->stop.mutex);
    int64_t job = w->stop.stopped || w->next_job == w->jobs ? -1 : w->next_job++;
    pthread_mutex_unlock(&w->stop.mutex);
    return job;
}

static void* fetcher_main(void* user) {
    Work* w = (Work*)user;
    Fetcher f = {.work = w};
    Error err;
    downloader_init(&f.downloader, &w->stop, (int)w->options->tries, (int)w->options->timeout);
    f.chunk = (uint16_t*)xcalloc(1, zarr_chunk_bytes(&w->array));
    for (int64_t job; (job = take_job(w)) >= 0;) {
        if (!fetch_chunk(&f, w->rows[job / w->chunk_cols], job % w->chunk_cols, &err)) {
            stop_now(&w->stop, &err);
            break;
        }
        pthread_mutex_lock(&w->stop.mutex);
        w->fetched[job] = true;
        pthread_cond_broadcast(&w->stop.changed);
        pthread_mutex_unlock(&w->stop.mutex);
    }
    free(f.chunk);
    downloader_free(&f.downloader);
    return NULL;
}

// Waits until the chunk of this job is in the cache; false on a stop.
static bool wait_for_job(Work* w, int64_t job) {
    pthread_mutex_lock(&w->stop.mutex);
    // two rows of chunks ahead: downloads continue while a row is written, and the size of the cache is
    // bounded
    w->job_limit = job + 2 * w->chunk_cols + w->options->jobs;
    pthread_cond_broadcast(&w->stop.changed);
    while (!w->stop.stopped && !w->fetched[job]) pthread_cond_wait(&w->stop.changed, &w->stop.mutex);
    bool ok = !w->stop.stopped;
    pthread_mutex_unlock(&w->stop.mutex);
    return ok;
}

static void start_fetchers(Work* w) {
    int64_t n = w->options->jobs < w->jobs ? w->options->jobs : w->jobs;
    for (int64_t i = 0; i < n; i++, w->num_threads++) {
        int why = pthread_create(&w->threads[i], NULL, fetcher_main, w);
        if (why == 0) continue;
        Error err;
        fail(&err, "cannot start a thread: %s", strerror(why));
        stop_and_die(w, &err);
    }
}

// ----------------------------------------------------------------------------
// writing

typedef struct {
    ShardWriter writer;
    Progress progress;
    uint16_t* chunk;  // [chunk_rows][chunk_columns]
    uint16_t* row;    // [chunk_rows][D] the documents of a row of chunks
    uint32_t* tokens; // [D] one document, for the shard writer
    Seen seen;        // the chunks of this run
} Output;

// Refuses a chunk with the same bytes as an earlier one of this run. Either may be the wrong one: both are
// removed from the cache.
static bool check_different(const Work* w, Output* out, const char* path, const void* data, size_t bytes,
                            Error* err) {
    char other[PATH_LENGTH];
    const char* same = seen_before(&out->seen, strrchr(path, '/') + 1, data, bytes);
    if (!same) return true;
    join_name(other, w->array_folder, same);
    if (w->remote) unlink(path), unlink(other);
    return fail(err, "%s: has the same bytes as chunk %s: the source has one for the other", path, same);
}

// Reads chunk (row, column) and copies its part of the row's first `documents` documents to out->row.
static bool read_chunk(Work* w, Output* out, int64_t row, int64_t column, int64_t documents, Error* err) {
    const ZarrArray* a = &w->array;
    char path[PATH_LENGTH];
    Error why;
    size_t bytes;
    chunk_name(path, w->array_folder, row, column);
    if (access(path, F_OK) != 0 && errno == ENOENT) return fail_missing(path, err);
    char* data = cache_read(path, zarr_chunk_max_file(&w->array), &bytes, err);
    if (!data) return false;
    bool known, ok = zarr_decode(a, data, bytes, out->chunk, &why) &&
                     sums_check(&w->sums, w->array_name, strrchr(path, '/') + 1, data, bytes, &known, &why);
    if (!ok) fail(err, "%s: damaged: %s", path, why.msg);
    ok = ok && check_different(w, out, path, data, bytes, err);
    free(data);
    if (!ok) return false;
    if (!w->remote && !known) count_unverified(w);
    int64_t D = w->options->columns, start = column * a->chunk_columns;
    int64_t n = D - start < a->chunk_columns ? D - start : a->chunk_columns;
    for (int64_t r = 0; r < documents; r++) {
        const uint16_t* from = out->chunk + r * a->chunk_columns;
        for (int64_t k = 0; k < n; k++)
            if (from[k] >= VOCAB_SIZE)
                return fail(err, "%s: token %lld of row %lld is %d, outside GPT-2's vocabulary of %d", path,
                            (long long)k, (long long)r, from[k], VOCAB_SIZE);
        memcpy(out->row + r * D + start, from, (size_t)n * sizeof *from);
    }
    return true;
}

// Writes the documents of a row of chunks, whose first download is `job`.
static bool write_row(Work* w, Output* out, int64_t row, int64_t job, Error* err) {
    int64_t D = w->options->columns, documents = documents_before(w, row + 1) - documents_before(w, row);
    for (int64_t column = 0; column < w->chunk_cols; column++) {
        if (stop_asked(&w->stop) || (w->remote && !wait_for_job(w, job + column)))
            return fail(err, "%s", w->stop.reason.msg);
        if (!read_chunk(w, out, row, column, documents, err)) return false;
        int64_t end = (column + 1) * w->array.chunk_columns;
        progress_update(&out->progress, (double)(out->writer.total + documents * (end < D ? end : D)));
    }
    for (int64_t r = 0; r < documents; r++) {
        for (int64_t k = 0; k < D; k++) out->tokens[k] = out->row[r * D + k];
        if (w->options->roll >= 0)
            roll_document(out->tokens, D, 0, documents_before(w, row) + r, w->options->roll);
        if (!shard_write(&out->writer, out->tokens, D, err)) return false;
    }
    return true;
}

// Deletes the cached chunks of a complete shard.
static void delete_chunks(Work* w, int64_t s) {
    char path[PATH_LENGTH];
    if (!w->remote || w->options->keep_cache) return;
    for (int64_t row = first_row(w, s); row < end_row(w, s); row++)
        for (int64_t column = 0; column < w->chunk_cols; column++) {
            chunk_name(path, w->array_folder, row, column);
            unlink(path);
        }
}

// Writes all shards that are not complete, and then removes the mark.
static bool write_shards(Work* w, Error* err) {
    const Options* o = w->options;
    const ZarrArray* a = &w->array;
    int64_t D = o->columns, job = 0;
    Output out;
    if (!shard_writer_open(&out.writer, o->out, w->shard_split, VOCAB_SIZE, D,
                           w->shard_rows * a->chunk_rows * D, err))
        return false;
    memset(&out.seen, 0, sizeof out.seen);
    out.chunk = (uint16_t*)xcalloc(1, zarr_chunk_bytes(a));
    out.row = (uint16_t*)xcalloc((size_t)(a->chunk_rows * D), sizeof *out.row);
    out.tokens = (uint32_t*)xcalloc((size_t)D, sizeof *out.tokens);
    progress_start(&out.progress, o->split, (double)w->missing, "M tokens", 1e6);
    bool ok = true;
    for (int64_t s = 0; ok && s < w->shards; s++) {
        ok = shard_writer_skip_to(&out.writer, w->complete[s] ? s + 1 : s) ||
             fail(err, "%s: too many shards", o->out);
        if (!w->complete[s])
            for (int64_t row = first_row(w, s); ok && row < end_row(w, s); row++, job += w->chunk_cols)
                ok = write_row(w, &out, row, job, err);
        // the writer completes full shards itself; the last one may be shorter
        if (ok && s == w->shards - 1) ok = shard_writer_close(&out.writer, err);
        if (ok) delete_chunks(w, s);
    }
    progress_end(&out.progress);
    if (!ok) shard_writer_abort(&out.writer);
    seen_free(&out.seen);
    free(out.chunk);
    free(out.row);
    free(out.tokens);
    return ok && shard_set_mark(o->out, w->shard_split, false, err);
}

// Deletes the cache's .zarray and its folders, except folders that contain other files.
static void delete_cache(Work* w) {
    char path[PATH_LENGTH];
    if (!w->remote || w->options->keep_cache) return;
    join_name(path, w->array_folder, ".zarray");
    unlink(path);
    cache_lock_name(path, w->array_folder);
    unlink(path);
    if (rmdir(w->array_folder) != 0) return;
    *strrchr(w->array_folder, '/') = '\0';
    rmdir(w->array_folder);
}

int main(int argc, char** argv) {
    guard_process();
    Options options = parse_options(argc, argv);
    static Work work;
    Error err;
    work.options = &options;
    work.shard_split = strcmp(options.split, "train") == 0 ? "train" : "val";
    if (options.dry_run) return print_plan(&work);
    if (!shard_set_lock(options.out, work.shard_split, &err)) die("--out %s", err.msg);
    stop_on_signals(&work.stop);
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) die("cannot initialize libcurl");
    if (!open_source(&work, &err) || !make_plan(&work, &err) ||
        (options.vocab && !tokenizer_file_gpt2(options.out, work.shard_split, options.vocab, &err)))
        stop_and_die(&work, &err);
    if (!shard_set_mark(options.out, work.shard_split, true, &err)) stop_and_die(&work, &err);
    if (work.remote) start_fetchers(&work);
    if (!write_shards(&work, &err)) stop_and_die(&work, &err);
    for (int i = 0; i < work.num_threads; i++) pthread_join(work.threads[i], NULL);
    delete_cache(&work);
    if (work.unverified)
        warn("NOT VERIFIED: %lld of %s: neither a list nor the server gave their SHA-256, or they were in "
             "the cache; give a list with --sha256sums",
             (long long)work.unverified, counted(work.jobs, "chunk").text);
    int64_t kept = 0;
    for (int64_t s = 0; s < work.shards; s++) kept += work.complete[s];
    printf("%s_%s: %s, %s in %s (%lld already complete)\n", options.out, work.shard_split,
           counted(work.documents, "document").text, counted(work.documents * options.columns, "token").text,
           counted(work.shards, "shard").text, (long long)kept);
    tokenizer_file_report(options.out);
    free(work.complete);
    free(work.rows);
    free(work.fetched);
    sums_free(&work.sums);
    curl_global_cleanup();
    return check_printed();
}
