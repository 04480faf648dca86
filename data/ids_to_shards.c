/*
Writes token ids, which another program makes, as data shards. Called by scripts/make_shards.py.

Standard input is a sequence of records of little-endian uint32: kind, n, and n ids.

    kind 0, 1   a piece of a document of the training, of the validation split
    kind 2, 3   the same, the first piece of its document
    kind 4      the end, n = 0
    kind 5      the other program failed and has said why, n = 0

With --masked bit 31 of an id says that the token counts as a target; those without it do not.

As in text_to_shards, the end-of-text token precedes each document; with --doc-len D each is divided into
documents of exactly D tokens, and the rest is dropped; with --pack T documents are packed into rows (pack.h).
The shards of a prefix are replaced as a whole, at the end (shard_writer.h). If the input ends without kind 4,
the old shards remain.
*/
#include <signal.h>
#include "../llmc/run/command/cli.h"
#include "../llmc/tokens/vocab_check.h"
#include "pack.h"
#include "roll.h"
#include "shard_writer.h"

typedef struct {
    const char *out, *tokenizer;
    int64_t vocab_size, end_of_text, doc_len, roll, pack, shard_tokens;
    bool masked, version, help;
} Options;

static const CliRow option_rows[] = {
    {CLI_TEXT, "out", "PREFIX", offsetof(Options, out), 0, 0, 0, "path prefix of the shards"},
    {CLI_TEXT, "tokenizer", "FILE", offsetof(Options, tokenizer), 0, 0, 0,
     "the tokenizer.json that made the ids: its copy is PREFIX_tokenizer.json"},
    {CLI_COUNT, "vocab-size", "V", offsetof(Options, vocab_size), 0, 1, INT32_MAX, "all ids are below it"},
    {CLI_COUNT, "end-of-text", "ID", offsetof(Options, end_of_text), 0, 0, INT32_MAX,
     "the end-of-text token"},
    {CLI_COUNT, "doc-len", "D", offsetof(Options, doc_len), 0, 0, INT32_MAX,
     "divide each document into documents of exactly D tokens; 0: a token stream"},
    {CLI_COUNT, "roll", "SEED", offsetof(Options, roll), CLI_UNSET, 0, 1LL << 62,
     "with --doc-len: rotate each document by an offset drawn from the seed"},
    {CLI_COUNT, "pack", "T", offsetof(Options, pack), 0, 0, INT32_MAX,
     "pack documents into rows of T tokens, each of which begins with a document; 0: no"},
    {CLI_COUNT, "shard-tokens", "N", offsetof(Options, shard_tokens), 256 << 20, 1, INT32_MAX,
     "maximum number of tokens per shard [256Mi]"},
    {CLI_FLAG, "masked", "", offsetof(Options, masked), 0, 0, 0,
     "bit 31 of an id: this token counts as a target, others do not"},
    {CLI_FLAG, "version", "", offsetof(Options, version), 0, 0, 0, "print the program's version and exit"},
    {CLI_FLAG, "help", "", offsetof(Options, help), 0, 0, 0, "print this text and exit"},
};
enum { NUM_OPTION_ROWS = sizeof option_rows / sizeof option_rows[0], MAX_RECORD = 1 << 28 };

typedef struct {
    const Options* options;
    ShardWriter writers[2];
    Packer packers[2]; // with --pack
    int64_t row;       // tokens of what is written at a time: D or T; 0: any number
    int64_t documents[2], dropped;
    int split;     // of the document in progress
    uint32_t* ids; // of it, not written yet
    size_t capacity;
    int64_t count;
    bool abandoned;  // by kind 5
    char* tokenizer; // the text of its file, read once: the shards have a hash of it; NULL: none
} Job;

// Writes what is complete of the document in progress.
static bool write_ready(Job* job, Error* err) {
    const int64_t ready = job->row ? job->count / job->row * job->row : job->count;
    if (job->options->roll != CLI_UNSET)
        roll_documents(job->ids, ready, &job->writers[job->split], job->options->roll);
    if (!shard_write(&job->writers[job->split], job->ids, ready, err)) return false;
    job->count -= ready;
    memmove(job->ids, job->ids + ready, (size_t)job->count * sizeof *job->ids);
    return true;
}

// Packs or drops what remains of the document in progress.
static bool end_document(Job* job, Error* err) {
    const int64_t count = job->count;
    job->count = 0;
    if (job->options->pack) return pack_add(&job->packers[job->split], job->ids, count, err);
    job->dropped += count;
    return true;
}

// Reads and writes all records.
static bool read_records(Job* job, Error* err) {
    uint32_t record[2];
    for (;;) {
        if (fread(record, sizeof record, 1, stdin) != 1) return fail(err, "the token ids end too early");
        const uint32_t kind = record[0], n = record[1];
        if (kind == 4 && n == 0) return true;
        job->abandoned = kind == 5 && n == 0;
        if (job->abandoned) return false;
        if (kind > 3 || n > MAX_RECORD) return fail(err, "the token ids are not a sequence of records");
        if (kind & 2) {
            if (!end_document(job, err)) return false;
            job->documents[kind & 1]++;
        }
        job->split = kind & 1;
        const bool separate = kind & 2 && !job->row;
        job->ids = (uint32_t*)xgrow(job->ids, (size_t)(job->count + n + 1), &job->capacity, sizeof *job->ids);
        if (separate) job->ids[job->count++] = (uint32_t)job->options->end_of_text;
        if (n && fread(job->ids + job->count, sizeof *job->ids, n, stdin) != n)
            return fail(err, "the token ids end too early");
        job->count += n;
        if (!write_ready(job, err)) return false;
    }
}

static bool convert(Job* job, Error* err) {
    const Options* o = job->options;
    if (!read_records(job, err) || !end_document(job, err)) return false;
    for (int split = 0; split < 2; split++) {
        if (o->pack && !pack_end(&job->packers[split], err)) return false;
        if (!shard_writer_close(&job->writers[split], err)) return false;
        if (job->documents[split] > 0 && job->writers[split].total == 0)
            return fail(err, "the %s split has no %s of %s; lower %s", shard_splits[split],
                        o->pack ? "row" : "document", counted(job->row, "token").text,
                        o->pack ? "--pack" : "--doc-len");
    }
    if (job->writers[SHARD_TRAIN].total == 0) return fail(err, "the training split has no document");
    if (job->tokenizer && !shard_tokenizer_write(o->out, shard_splits[SHARD_TRAIN], job->tokenizer, err))
        return false;
    return shard_set_publish(&job->writers[SHARD_TRAIN], &job->writers[SHARD_VAL], err);
}

int main(int argc, char** argv) {
    Options o;
    Error err;
    guard_process();
    signal(SIGXFSZ, SIG_IGN); // exceeding a file size limit becomes a write error
    signal(SIGINT, SIG_IGN);  // ends what makes the ids, and so the input
    if (!cli_parse(option_rows, NUM_OPTION_ROWS, &o, NULL, argc, argv, NULL, &err)) die("%s", err.msg);
    if (o.version) {
        cli_print_version(argv[0]);
        return check_printed();
    }
    if (o.help) {
        printf("usage: data/ids_to_shards --out PREFIX --vocab-size V --end-of-text ID [options] <IDS\n\n");
        cli_print_help(stdout, option_rows, NUM_OPTION_ROWS);
        return check_printed();
    }
    if (!o.out || !o.vocab_size) die("--out and --vocab-size are needed");
    if (o.pack && o.doc_len) die("--pack and --doc-len: only one of them");
    if (o.roll != CLI_UNSET && !o.doc_len) die("--roll: only documents of --doc-len can be rolled");
    Job job = {.options = &o, .row = o.pack ? o.pack : o.doc_len};
    size_t bytes = 0;
    if (o.tokenizer && !(job.tokenizer = read_file(o.tokenizer, &bytes, &err))) die("%s", err.msg);
    const uint64_t hash = job.tokenizer ? vocab_hash_of_text(job.tokenizer, bytes) : 0;
    for (int split = 0; split < 2; split++) {
        if (!shard_writer_open(&job.writers[split], o.out, shard_splits[split], o.vocab_size, job.row,
                               o.shard_tokens, &err) ||
            !shard_set_lock(o.out, shard_splits[split], &err))
            die("--out %s", err.msg);
        job.writers[split].hold = true;
        job.writers[split].header.vocab_hash = hash;
        if (o.masked) shard_writer_mask(&job.writers[split]);
        job.packers[split] = pack_open(&job.writers[split], o.pack, (uint32_t)o.end_of_text);
    }
    shard_set_sweep(o.out);
    if (!convert(&job, &err)) {
        for (int split = 0; split < 2; split++) shard_writer_abort(&job.writers[split]);
        shard_set_sweep(o.out);
        if (job.abandoned) {
            shard_remove_made();
            return EXIT_SUCCESS;
        }
        die("%s", err.msg);
    }
    for (int split = 0; split < 2; split++) {
        const int64_t tokens = job.writers[split].total, shards = job.writers[split].index;
        const int64_t documents = o.doc_len ? tokens / o.doc_len : job.documents[split];
        if (documents)
            printf("%s: %s, %s, %s\n", shard_splits[split], counted(documents, "document").text,
                   counted(tokens, "token").text, counted(shards, "shard").text);
    }
    if (o.pack) pack_print(job.packers);
    if (job.dropped) printf("dropped %s at the ends of documents\n", counted(job.dropped, "token").text);
    free(job.ids);
    free(job.tokenizer);
    return check_printed();
}
