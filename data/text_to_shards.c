/*
Converts text files to data shards.

    data/text_to_shards --tokenizer byte --val-fraction 0.05 --out data/books books/

Without --doc-len the shards are a token stream: each file is a document, preceded by an end-of-text token.
With --doc-len D each file is divided into documents of exactly D tokens, and the rest is dropped. With --pack
T documents are packed into rows of T tokens (splits.h). With --document folder this holds for each PATH that
is a folder in place of each file: its files follow one another, each behind a line with its name, as head(1)
prints them. The output depends only on the options and on the names and contents of the files.

A file is read and encoded in pieces, cut where no token can cross the cut, so memory use is bounded.

Beside the shards is PREFIX_tokenizer.json, which the trainers copy into checkpoints.

The shards of a prefix are replaced as a whole, at the end (shard_writer.h). Until then, and after an error,
the old ones remain. Files that are not text are errors, unless --skip-binary leaves them out (input_files.h);
so are files that change while they are read.
*/
#include <signal.h>
#include "../llmc/run/command/cli.h"
#include "../llmc/base/progress.h"
#include "../llmc/tokens/tokenizer_json.h"
#include "../llmc/tokens/vocab_hash.h"
#include "input_files.h"
#include "splits.h"

// ----------------------------------------------------------------------------
// options

typedef struct {
    const char *tokenizer, *vocab, *document;
    bool json_escape, binary, version, help;
    InputSelection input;
    SplitOptions splits;
} Options;

static const CliRow option_rows[] = {
    {CLI_TEXT, "tokenizer", "byte|gpt2", offsetof(Options, tokenizer), 0, 0, 0,
     "byte: 257 ids; gpt2: 50257 ids, needs --vocab"},
    {CLI_TEXT, "vocab", "FILE", offsetof(Options, vocab), 0, 0, 0,
     "GPT-2's merges, vocab.bpe, in the repository " GPT2_VOCAB},
    {CLI_FLAG, "json-escape", "", offsetof(Options, json_escape), 0, 0, 0,
     "JSON-escape the text before encoding it, as LongCrawl64's was"},
    {CLI_FLAG, "binary", "", offsetof(Options, binary), 0, 0, 0,
     "accept files that are not text: compressed ones, and files with zero bytes"},
    {CLI_FLAG, "skip-binary", "", offsetof(Options, input.skip_binary), 0, 0, 0,
     "leave such files out, as of source trees, and count them at the end"},
    {CLI_COUNT, "doc-len", "D", offsetof(Options, splits.doc_len), 0, 0, INT32_MAX,
     "divide each file into documents of exactly D tokens and drop the rest; 0: a token stream, each file "
     "preceded by an end-of-text token"},
    {CLI_COUNT, "roll", "SEED", offsetof(Options, splits.roll), CLI_UNSET, 0, 1LL << 62,
     "with --doc-len: rotate each document by an offset drawn from the seed"},
    {CLI_COUNT, "pack", "T", offsetof(Options, splits.pack), 0, 0, INT32_MAX,
     "pack documents into rows of T tokens, each of which begins with a document; 0: no"},
    {CLI_TEXT, "document", "file|folder", offsetof(Options, document), 0, 0, 0,
     "folder: all files of a PATH that is a folder are one text, in place of one each, for --doc-len, "
     "end-of-text tokens and --val-fraction; a line '==> NAME <==' is before each, after an empty one "
     "[file]"},
    {CLI_REAL, "val-fraction", "F", offsetof(Options, input.val_fraction), 0, 0, 1,
     "fraction of the files in the validation split, at least one; selected by a hash of the seed and the "
     "file's name, or its folder's with --document, so adding or removing others does not move one"},
    {CLI_COUNT, "seed", "N", offsetof(Options, input.seed), 0, 0, INT32_MAX, "seed of the validation split"},
    {CLI_COUNT, "shard-tokens", "N", offsetof(Options, splits.shard_tokens), 256 << 20, 1, INT32_MAX,
     "maximum number of tokens per shard [256Mi]"},
    {CLI_TEXT, "list", "FILE", offsetof(Options, input.list), 0, 0, 0,
     "read further paths from FILE, one per line or, as find -print0 writes them, each ended by a zero byte; "
     "-: standard input"},
    {CLI_TEXT, "out", "PREFIX", offsetof(Options, splits.out), 0, 0, 0,
     "path prefix of the shards: PREFIX_train_000000.bin ..., PREFIX_val_000000.bin ..., and of "
     "PREFIX_tokenizer.json; when all are written they replace existing ones with this prefix"},
    {CLI_FLAG, "version", "", offsetof(Options, version), 0, 0, 0, "print the program's version and exit"},
    {CLI_FLAG, "help", "", offsetof(Options, help), 0, 0, 0, "print this text and exit"},
};
enum { NUM_OPTION_ROWS = sizeof option_rows / sizeof option_rows[0] };

static void print_help(void) {
    printf(
        "usage: data/text_to_shards --tokenizer byte|gpt2 --out PREFIX [options] PATH...\n\n"
        "Encodes text files as data shards for the trainer. A PATH is a file or a folder. The files of a\n"
        "folder and its subfolders are read in the order of their names. Skipped, and counted at the end:\n"
        "empty files; in folders, hidden entries (.git), entries that are not regular files (symbolic\n"
        "links), data shards and their tokenizers, also unfinished ones; files already read under another\n"
        "name.\n\n");
    cli_print_help(stdout, option_rows, NUM_OPTION_ROWS);
    printf("\nCounts take suffixes: 16Ki, 2.5M, 1e9.\n");
}

static Options parse_options(int argc, char** argv) {
    Options o;
    Error err;
    if (!cli_parse(option_rows, NUM_OPTION_ROWS, &o, NULL, argc, argv, &o.input.num_paths, &err))
        die("%s", err.msg);
    o.input.paths = argv + 1;
    if (o.version) {
        cli_print_version(argv[0]);
        exit(check_printed());
    }
    if (o.help) {
        print_help();
        exit(check_printed());
    }
    if (!o.tokenizer) die("--tokenizer is missing: byte or gpt2");
    bool gpt2 = strcmp(o.tokenizer, "gpt2") == 0;
    if (!gpt2 && strcmp(o.tokenizer, "byte") != 0) die("--tokenizer %s: must be byte or gpt2", o.tokenizer);
    if (gpt2 && !o.vocab) die("--vocab FILE is missing: GPT-2's vocab.bpe, in the repository " GPT2_VOCAB);
    if (!gpt2 && o.vocab) die("--vocab requires --tokenizer gpt2");
    o.input.folders = o.document && strcmp(o.document, "folder") == 0;
    if (o.document && !o.input.folders && strcmp(o.document, "file") != 0)
        die("--document %s: must be file or folder", o.document);
    splits_check_options(&o.splits);
    if (o.binary && o.input.skip_binary) die("--binary and --skip-binary: only one of them");
    if (o.input.val_fraction == 1) die("--val-fraction 1: not below 1; the training split needs files too");
    if (!o.splits.out) die("--out is missing: the path prefix of the shards");
    if (o.input.num_paths == 0 && !o.input.list) die("no input: name files or folders, or use --list");
    return o;
}

// ----------------------------------------------------------------------------
// encoding

enum {
    PIECE = 4 << 20,    // bytes per read
    LONGEST = 2 * PIECE // bytes without a place to cut
};

typedef struct {
    const Options* options;
    Tokenizer tokenizer;
    Splits splits;
    ByteBuffer text, escaped; // bytes read but not encoded yet; the JSON-escaped form of a piece
    Progress progress;
    int64_t bytes, encoded;    // read, and encoded, so far
    const InputFile* previous; // the file before; NULL: none
} Job;

// Encodes job->text[0 .. bytes-1] and writes the tokens; of rows, only complete ones.
static bool encode_piece(Job* job, size_t bytes, Error* err) {
    const char* text = job->text.data;
    size_t n = bytes;
    if (job->options->json_escape) {
        job->escaped.count = 0;
        json_escape(text, n, &job->escaped);
        text = job->escaped.data, n = job->escaped.count;
    }
    tokenizer_encode(&job->tokenizer, text, n, &job->splits.tokens);
    if (!splits_write(&job->splits, err)) return false;
    job->text.count -= bytes;
    memmove(job->text.data, job->text.data + bytes, job->text.count);
    job->encoded += (int64_t)bytes;
    return true;
}

// Whether the open file is still the one that find_files saw, and `bytes`, read from it, are all of it.
static bool check_unchanged(int fd, const InputFile* file, int64_t bytes, Error* err) {
    struct stat st;
    if (fstat(fd, &st) != 0) return fail(err, "%s: cannot stat: %s", file->path, strerror(errno));
    if (bytes == file->bytes && st.st_size == bytes && st.st_ino == file->inode &&
        st.st_mtim.tv_sec == file->modified.tv_sec && st.st_mtim.tv_nsec == file->modified.tv_nsec)
        return true;
    return fail(err, "%s: changed while it was read (%s before, %lld read); run again when nothing writes it",
                file->path, counted(file->bytes, "byte").text, (long long)bytes);
}

// Begins a document if this file does. The file's name goes to job->text.
static bool start_file(Job* job, const InputFile* file, Error* err) {
    const bool starts = !job->previous || job->previous->document != file->document;
    if (starts && !splits_begin(&job->splits, file->val, err)) return false;
    job->previous = file;
    job->text.count = 0;
    if (file->name) {
        char line[PATH_LENGTH + 16];
        const int n =
            snprintf(line, sizeof line, "%s==> %s <==\n", starts ? "" : "\n", file->path + file->name);
        byte_buffer_append(&job->text, line, (size_t)n);
    }
    return true;
}

static bool encode_file(Job* job, int fd, const InputFile* file, Error* err) {
    int64_t bytes = 0;
    if (!start_file(job, file, err)) return false;
    for (;;) {
        size_t before = job->text.count;
        ssize_t got = read(fd, byte_buffer_reserve(&job->text, PIECE), PIECE);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail(err, "%s: cannot read: %s", file->path, strerror(errno));
        if (!job->options->binary && memchr(job->text.data + before, '\0', (size_t)got))
            return fail(err, "%s: is not text but %s", file->path, other_kind("", 1));
        job->text.count += (size_t)got;
        job->bytes += got;
        bytes += got;
        progress_update(&job->progress, (double)job->bytes);
        size_t after = before ? before - 1 : 0; // earlier positions were searched after the previous read
        size_t all = job->text.count;
        size_t cut = got ? tokenizer_cut(&job->tokenizer, job->text.data, after, all) : all;
        if (!cut && all > LONGEST)
            return fail(
                err,
                "%s: has a word of more than %d MiB at byte %lld, which must be encoded as a whole: is "
                "it text? divide it, or use --tokenizer byte",
                file->path, LONGEST >> 20, (long long)(bytes > (int64_t)all ? bytes - (int64_t)all : 0));
        if ((cut || !got) && !encode_piece(job, cut, err)) return false;
        if (!got) break;
    }
    return check_unchanged(fd, file, bytes, err);
}

static bool encode_all(Job* job, const InputFiles* files, Error* err) {
    for (int64_t i = 0; i < files->count; i++) {
        int fd = open(files->data[i].path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return fail(err, "%s: cannot open: %s", files->data[i].path, strerror(errno));
        bool ok = encode_file(job, fd, &files->data[i], err);
        close(fd);
        if (!ok) return false;
    }
    ByteBuffer json = {NULL, 0, 0};
    tokenizer_json(&job->tokenizer, &json);
    const bool ok = splits_publish(&job->splits, input_unit(&job->options->input), json.data, err);
    free(json.data);
    return ok;
}

// ----------------------------------------------------------------------------
// main

static void print_summary(const Job* job, const InputFiles* files) {
    const Splits* s = &job->splits;
    const bool packs = job->options->splits.pack > 0;
    const int64_t tokens = s->writers[0].total + s->writers[1].total;
    int64_t dropped = s->dropped, ends = s->row ? 0 : s->documents[0] + s->documents[1]; // end-of-text tokens
    if (packs) {
        ends = s->packers[0].ends + s->packers[1].ends;
        dropped = s->packers[0].cropped + s->packers[1].cropped;
    }
    printf("%s of %s, %.3f bytes/token", counted(tokens, "token").text, counted(job->encoded, "byte").text,
           (double)job->encoded / (double)(tokens + dropped - ends));
    splits_print(s, "; ", "");
    if (dropped && !packs)
        printf("; dropped %s (%.1f%%) at the ends of %ss", counted(dropped, "token").text,
               100.0 * (double)dropped / (double)(tokens + dropped), input_unit(&job->options->input));
    if (files->empty + files->hidden + files->special + files->repeated)
        printf("; skipped: %lld empty, %lld hidden, %lld special, %lld repeated", (long long)files->empty,
               (long long)files->hidden, (long long)files->special, (long long)files->repeated);
    if (files->shards) printf("; skipped %s: data shards or tokenizers", counted(files->shards, "file").text);
    if (files->binary) printf("; skipped %s", counted(files->binary, "binary file").text);
    printf("\n");
    if (packs) pack_print(s->packers);
}

// The program; main except for its name, under which the test calls it.
static int text_to_shards(int argc, char** argv) {
    Options options = parse_options(argc, argv);
    Job job = {.options = &options};
    Error err;
    signal(SIGXFSZ, SIG_IGN); // exceeding a file size limit becomes a write error
    if (!options.vocab)
        tokenizer_bytes(&job.tokenizer);
    else if (!tokenizer_gpt2(&job.tokenizer, options.vocab, &err))
        die("--vocab %s", err.msg);
    InputFiles files = find_files(&options.input);
    if (!options.binary && !check_kinds(&files, &err)) die("%s", err.msg);
    splits_open(&job.splits, &options.splits, job.tokenizer.vocab_size, vocab_hash(&job.tokenizer),
                job.tokenizer.end_of_text);
    progress_start(&job.progress, "encoding", (double)files.bytes, "MB", 1e6);
    bool ok = encode_all(&job, &files, &err);
    progress_end(&job.progress);
    if (!ok) {
        splits_abort(&job.splits);
        die("%s", err.msg);
    }
    print_summary(&job, &files);
    for (int64_t i = 0; i < files.count; i++) free(files.data[i].path);
    free(files.data);
    free(files.names);
    free(job.text.data);
    free(job.escaped.data);
    tokenizer_free(&job.tokenizer);
    return check_printed();
}

#ifndef TESTING
int main(int argc, char** argv) {
    guard_process();
    return text_to_shards(argc, argv);
}
#endif
