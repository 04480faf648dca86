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
#include "../llmc/tokens/tokenizer_json.h"
#include "fetch.h"
#include "mirror.h"
#include "roll.h"
#include "shard_writer.h"

enum {
    VOCAB_SIZE = 50257,   // GPT-2's
    ROW_MAX = 1 << 27,    // tokens of a row of chunks, in memory: LongCrawl64's
    CHUNKS_MAX = 16 << 20 // all of LongCrawl64 has 104,000
};

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
// plan

typedef struct {
    const Options* options;
    Source source;
    Fetch fetch;

    int64_t documents;  // of all shards
    int64_t missing;    // tokens of the shards that are not complete yet
    int64_t shard_rows; // rows of chunks in a full shard
    int64_t shards;
    const char* shard_split; // split in the shards' names: train or val
    bool* complete;          // [shards] already complete at the start
} Work;

// Stops all threads and dies with the reason of the first stop: this error or an earlier signal or error.
static void stop_and_die(Work* w, const Error* why) {
    stop_now(&w->source.stop, why);
    fetch_join(&w->fetch);
    die("%s", w->source.stop.reason.msg);
}

// Sets the number of documents, if the array has as many.
static bool count_documents(Work* w, Error* err) {
    const Options* o = w->options;
    const int64_t D = o->columns, rows = w->source.array.rows;
    if (D > w->source.array.columns)
        return fail(err, "--columns %lld: a document of %s.zarr has %s", (long long)D, o->split,
                    counted(w->source.array.columns, "token").text);
    w->documents = (o->tokens - 1) / D + 1;
    if (w->documents <= rows) return true;
    return fail(err, "--tokens %lld: requires %s of %lld, but %s.zarr has %lld (%s)", (long long)o->tokens,
                counted(w->documents, "document").text, (long long)D, o->split, (long long)rows,
                counted(rows * D, "token").text);
}

static int print_plan(Work* w) {
    Error err;
    const int64_t D = w->options->columns;
    if (!source_locate(&w->source, &err)) die("%s", err.msg);
    if (w->source.remote) // asks no server: at most all of LongCrawl64 is there
        w->source.array = (ZarrArray){longcrawl64_documents(w->options->split), LONGCRAWL64_COLUMNS, 0, 0};
    else if (!source_open(&w->source, &err))
        die("%s", err.msg);
    if (!count_documents(w, &err)) die("%s", err.msg);
    printf("%s: %s of %s, %s, %.1f GB\n", w->options->split, counted(w->documents, "document").text,
           counted(D, "token").text, counted(w->documents * D, "token").text,
           2e-9 * (double)(w->documents * D));
    return check_printed();
}

// Shard s consists of the rows of chunks [first_row, end_row).
static int64_t first_row(const Work* w, int64_t s) { return s * w->shard_rows; }
static int64_t end_row(const Work* w, int64_t s) {
    int64_t end = (s + 1) * w->shard_rows, all = (w->documents - 1) / w->source.array.chunk_rows + 1;
    return end < all ? end : all;
}

// Number of documents in the rows of chunks [0, row).
static int64_t documents_before(const Work* w, int64_t row) {
    int64_t n = row * w->source.array.chunk_rows;
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
    const ZarrArray* a = &w->source.array;
    int64_t D = o->columns;
    if (!count_documents(w, err)) return false;
    w->fetch.chunk_cols = (D - 1) / a->chunk_columns + 1;
    // shards consist of whole rows of chunks: chunks are deleted with their shard and must not be needed by
    // the next
    w->shard_rows = o->shard_tokens / (a->chunk_rows * D);
    if (w->shard_rows < 1) w->shard_rows = 1;
    w->shards = (w->documents - 1) / (w->shard_rows * a->chunk_rows) + 1;
    if (a->chunk_rows > ROW_MAX / D || w->shards * w->shard_rows > CHUNKS_MAX / w->fetch.chunk_cols)
        return fail(err, "%s.zarr: not an array of LongCrawl64: its chunks have %s of %s", o->split,
                    counted(a->chunk_rows, "row").text, counted(a->chunk_columns, "token").text);
    w->complete = (bool*)xcalloc((size_t)w->shards, sizeof *w->complete);
    w->fetch.rows = (int64_t*)xcalloc((size_t)(w->shards * w->shard_rows), sizeof *w->fetch.rows);
    int64_t n = 0;
    for (int64_t s = 0; s < w->shards; s++) {
        if (!find_shard(w, s, err)) return false;
        if (w->complete[s]) continue;
        for (int64_t row = first_row(w, s); row < end_row(w, s); row++) w->fetch.rows[n++] = row;
        w->missing += shard_documents(w, s) * D;
    }
    w->fetch.jobs = n * w->fetch.chunk_cols;
    w->fetch.fetched = (bool*)xcalloc((size_t)w->fetch.jobs, sizeof *w->fetch.fetched);
    const bool begun = w->missing < w->documents * D;
    return roll_record(o->out, w->shard_split, o->roll, begun, err);
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
    join_name(other, w->source.folder, same);
    if (w->source.remote) unlink(path), unlink(other);
    return fail(err, "%s: has the same bytes as chunk %s: the source has one for the other", path, same);
}

// Reads chunk (row, column) and copies its part of the row's first `documents` documents to out->row.
static bool read_chunk(Work* w, Output* out, int64_t row, int64_t column, int64_t documents, Error* err) {
    const ZarrArray* a = &w->source.array;
    char path[PATH_LENGTH];
    Error why;
    size_t bytes;
    chunk_name(path, w->source.folder, row, column);
    if (access(path, F_OK) != 0 && errno == ENOENT) return fail_missing(path, err);
    char* data = cache_read(path, zarr_chunk_max_file(&w->source.array), &bytes, err);
    if (!data) return false;
    bool known,
        ok = zarr_decode(a, data, bytes, out->chunk, &why) &&
             sums_check(&w->source.sums, w->source.name, strrchr(path, '/') + 1, data, bytes, &known, &why);
    if (!ok) fail(err, "%s: damaged: %s", path, why.msg);
    ok = ok && check_different(w, out, path, data, bytes, err);
    free(data);
    if (!ok) return false;
    if (!w->source.remote && !known) count_unverified(&w->source);
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
    for (int64_t column = 0; column < w->fetch.chunk_cols; column++) {
        if (stop_asked(&w->source.stop) || (w->source.remote && !fetch_wait(&w->fetch, job + column)))
            return fail(err, "%s", w->source.stop.reason.msg);
        if (!read_chunk(w, out, row, column, documents, err)) return false;
        int64_t end = (column + 1) * w->source.array.chunk_columns;
        progress_update(&out->progress, (double)(out->writer.total + documents * (end < D ? end : D)));
    }
    for (int64_t r = 0; r < documents; r++) {
        for (int64_t k = 0; k < D; k++) out->tokens[k] = out->row[r * D + k];
        if (w->options->roll >= 0)
            roll_document(out->tokens, D, documents_before(w, row) + r, w->options->roll);
        if (!shard_write(&out->writer, out->tokens, D, err)) return false;
    }
    return true;
}

// Deletes the cached chunks of a complete shard.
static void delete_chunks(Work* w, int64_t s) {
    char path[PATH_LENGTH];
    if (!w->source.remote || w->options->keep_cache) return;
    for (int64_t row = first_row(w, s); row < end_row(w, s); row++)
        for (int64_t column = 0; column < w->fetch.chunk_cols; column++) {
            chunk_name(path, w->source.folder, row, column);
            unlink(path);
        }
}

// Writes all shards that are not complete, and then removes the mark.
static bool write_shards(Work* w, Error* err) {
    const Options* o = w->options;
    const ZarrArray* a = &w->source.array;
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
            for (int64_t row = first_row(w, s); ok && row < end_row(w, s); row++, job += w->fetch.chunk_cols)
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

// ----------------------------------------------------------------------------
// the tokenizer

// Writes PREFIX_tokenizer.json from GPT-2's vocab.bpe.
static bool write_tokenizer(const Work* w, Error* err) {
    const char* prefix = w->options->out;
    char folder[PATH_LENGTH];
    ByteBuffer json = {NULL, 0, 0};
    Tokenizer t;
    if (!tokenizer_gpt2(&t, w->options->vocab, err)) return false;
    tokenizer_json(&t, &json);
    shard_folder(folder, prefix);
    const bool ok = shard_tokenizer_write(prefix, w->shard_split, json.data, err) &&
                    shard_tokenizer_rename(prefix, w->shard_split, err) && flush_folder(folder, err);
    free(json.data);
    tokenizer_free(&t);
    return ok;
}

// Says so where the shards have no tokenizer.
static void report_tokenizer(const Work* w) {
    char path[PATH_LENGTH];
    shard_tokenizer_path(path, w->options->out);
    if (access(path, F_OK) == 0) return;
    printf("no %s: checkpoints of models trained on these shards will have no tokenizer; run again with "
           "--vocab vocab.bpe\n",
           path);
}

int main(int argc, char** argv) {
    guard_process();
    Options options = parse_options(argc, argv);
    static Work work;
    Error err;
    char cache[PATH_LENGTH];
    snprintf(cache, sizeof cache, "%s.cache", options.out);
    work.options = &options;
    work.source.base = options.source;
    work.source.split = options.split;
    work.source.cache = options.cache ? options.cache : cache;
    work.source.list = options.sums;
    work.source.tries = (int)options.tries;
    work.source.timeout = (int)options.timeout;
    work.fetch.source = &work.source;
    work.shard_split = strcmp(options.split, "train") == 0 ? "train" : "val";
    if (options.dry_run) return print_plan(&work);
    if (!shard_set_lock(options.out, work.shard_split, &err)) die("--out %s", err.msg);
    stop_on_signals(&work.source.stop);
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) die("cannot initialize libcurl");
    if (!source_locate(&work.source, &err) || !source_open(&work.source, &err) || !make_plan(&work, &err) ||
        (options.vocab && !write_tokenizer(&work, &err)))
        stop_and_die(&work, &err);
    if (!shard_set_mark(options.out, work.shard_split, true, &err)) stop_and_die(&work, &err);
    if (work.source.remote && !fetch_start(&work.fetch, options.jobs, &err)) stop_and_die(&work, &err);
    if (!write_shards(&work, &err)) stop_and_die(&work, &err);
    fetch_join(&work.fetch);
    if (work.source.remote && !options.keep_cache) cache_remove(work.source.folder);
    if (work.source.unverified)
        warn("NOT VERIFIED: %lld of %s: neither a list nor the server gave their SHA-256, or they were in "
             "the cache; give a list with --sha256sums",
             (long long)work.source.unverified, counted(work.fetch.jobs, "chunk").text);
    int64_t kept = 0;
    for (int64_t s = 0; s < work.shards; s++) kept += work.complete[s];
    printf("%s_%s: %s, %s in %s (%lld already complete)\n", options.out, work.shard_split,
           counted(work.documents, "document").text, counted(work.documents * options.columns, "token").text,
           counted(work.shards, "shard").text, (long long)kept);
    report_tokenizer(&work);
    free(work.complete);
    free(work.fetch.rows);
    free(work.fetch.fetched);
    sums_free(&work.source.sums);
    curl_global_cleanup();
    return check_printed();
}
