/*
Text files to data shards.

    data/text_to_shards --tokenizer byte --val-fraction 0.05 --out data/books books/

A document is a file. Without --doc-len the shards are one running stream, each document with end of text
before it; with it they are documents of exactly that many tokens. The output is a function of the files'
contents and names and of the options: not of time, order on the disk, or machine.

Memory stays small for long files too: a file is read and encoded in pieces, cut where a word ends anyway.
*/
#include <dirent.h>
#include <signal.h>
#include "../llmc/run/cli.h"
#include "../llmc/base/progress.h"
#include "../llmc/base/random.h"
#include "../llmc/tokens/shard.h"
#include "../llmc/tokens/tokenizer.h"

// ----------------------------------------------------------------------------
// options

typedef struct {
    const char *tokenizer, *vocab, *out, *list;
    int64_t doc_len, seed, shard_tokens;
    double val_fraction;
    bool json_escape, help;
    char** paths;
    int num_paths;
} Options;

static const CliRow option_rows[] = {
    {CLI_TEXT, "tokenizer", "byte|gpt2", offsetof(Options, tokenizer), 0, 0, 0,
     "byte: 257 ids; gpt2: 50257 ids, needs --vocab"},
    {CLI_TEXT, "vocab", "FILE", offsetof(Options, vocab), 0, 0, 0, "GPT-2's merges, vocab.bpe"},
    {CLI_FLAG, "json-escape", "", offsetof(Options, json_escape), 0, 0, 0,
     "escape the text as in a JSON string first, as LongCrawl64 did"},
    {CLI_COUNT, "doc-len", "D", offsetof(Options, doc_len), 0, 0, INT32_MAX,
     "cut each file into documents of exactly D tokens and drop what is left at its end; 0: one running "
     "stream, each file with end of text before it"},
    {CLI_REAL, "val-fraction", "F", offsetof(Options, val_fraction), 0, 0, 1,
     "the part of the files that goes to PREFIX_val, at least one; chosen by a hash of the seed and the "
     "file's name, so a file stays where it is when others come or go"},
    {CLI_COUNT, "seed", "N", offsetof(Options, seed), 0, 0, INT32_MAX, "another choice of these files"},
    {CLI_COUNT, "shard-tokens", "N", offsetof(Options, shard_tokens), 256 << 20, 1, INT32_MAX,
     "the most tokens in a shard [256Mi]"},
    {CLI_TEXT, "list", "FILE", offsetof(Options, list), 0, 0, 0,
     "read further paths from FILE, one a line; - is standard input"},
    {CLI_TEXT, "out", "PREFIX", offsetof(Options, out), 0, 0, 0,
     "write PREFIX_train_000000.bin ..., PREFIX_val_000000.bin ...; those that an earlier run has left under "
     "this prefix are removed first"},
    {CLI_FLAG, "help", "", offsetof(Options, help), 0, 0, 0, "print this text, and leave"},
};
#define NUM_OPTION_ROWS ((int)(sizeof option_rows / sizeof option_rows[0]))

static void print_help(void) {
    printf("usage: data/text_to_shards --tokenizer byte|gpt2 --out PREFIX [options] PATH...\n\n"
           "Encodes text files as data shards for the trainer. A PATH is a file or a folder; of a folder,\n"
           "all files are taken, in its folders too, in the order of their names. Left out and counted at\n"
           "the end: empty files; in a folder, what is hidden (.git) or no regular file (symbolic links);\n"
           "a file met before under another name.\n\n");
    cli_print_help(stdout, option_rows, NUM_OPTION_ROWS);
    printf("\nCounts take suffixes: 16Ki, 2.5M, 1e9.\n");
}

static Options parse_options(int argc, char** argv) {
    Options o;
    Error err;
    if (!cli_parse(option_rows, NUM_OPTION_ROWS, &o, NULL, argc, argv, &o.num_paths, &err))
        die("%s", err.msg);
    o.paths = argv + 1;
    if (o.help) {
        print_help();
        exit(EXIT_SUCCESS);
    }
    if (!o.tokenizer) die("--tokenizer is missing: byte or gpt2; --help explains");
    bool gpt2 = strcmp(o.tokenizer, "gpt2") == 0;
    if (!gpt2 && strcmp(o.tokenizer, "byte") != 0) die("--tokenizer %s: must be byte or gpt2", o.tokenizer);
    if (gpt2 && !o.vocab) die("--vocab is missing: --tokenizer gpt2 needs GPT-2's vocab.bpe");
    if (!gpt2 && o.vocab) die("--vocab goes with --tokenizer gpt2");
    if (o.val_fraction == 1) die("--val-fraction 1: not below 1; some files must be left to train on");
    if (!o.out) die("--out is missing: the prefix of the shards' names");
    size_t n = strlen(o.out);
    if (n == 0 || o.out[n - 1] == '/') die("--out %s: must end in the beginning of a file name", o.out);
    if (o.num_paths == 0 && !o.list) die("no input: name files or folders, or use --list");
    return o;
}

// ----------------------------------------------------------------------------
// which files

typedef struct {
    char* path;
    dev_t device;
    ino_t inode;
    int64_t bytes;
    double draw;   // uniform in [0, 1), from the seed and the name
    int64_t index; // place in the order of the output
    bool val;
} Document;

typedef struct {
    Document* data;
    int64_t count, capacity, bytes;
    int64_t empty, hidden, special, again; // left out
    uint64_t seed;
} Documents;

// Adds a file. `name` is what of its path decides on the split: the part below the folder that was asked for.
static void add_file(Documents* docs, const char* path, const char* name, const struct stat* st) {
    if (st->st_size == 0) {
        docs->empty++;
        return;
    }
    uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
    for (const char* s = name; *s; s++) hash = (hash ^ (uint8_t)*s) * 0x100000001b3u;
    if (docs->count == docs->capacity) {
        docs->capacity = docs->capacity ? 2 * docs->capacity : 64;
        docs->data = xrealloc(docs->data, (size_t)docs->capacity * sizeof *docs->data);
    }
    docs->data[docs->count] = (Document){.path = xstrdup(path),
                                         .device = st->st_dev,
                                         .inode = st->st_ino,
                                         .bytes = st->st_size,
                                         .draw = random_uniform(docs->seed, hash, 0),
                                         .index = docs->count};
    docs->count++;
}

static int by_name(const struct dirent** a, const struct dirent** b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

// Adds the files of path[PATH_LENGTH], a folder; names in it are appended in place. Symbolic links are not
// followed, so there are no loops.
static void add_folder(Documents* docs, char* path, const char* name) {
    struct dirent** entries;
    // read to its end before we go deeper: one open folder at a time
    int count = scandir(path, &entries, NULL, by_name);
    if (count < 0) die("%s: cannot read this folder: %s", path, strerror(errno));
    size_t length = strlen(path);
    for (int i = 0; i < count; i++) {
        const char* entry = entries[i]->d_name;
        struct stat st;
        if (strcmp(entry, ".") != 0 && strcmp(entry, "..") != 0) {
            bool slash = path[length - 1] != '/';
            int n = snprintf(path + length, PATH_LENGTH - length, "%s%s", slash ? "/" : "", entry);
            if (n < 0 || (size_t)n >= PATH_LENGTH - length) die("%s: path is too long", path);
            if (entry[0] == '.')
                docs->hidden++;
            else if (lstat(path, &st) != 0)
                die("%s: cannot stat: %s", path, strerror(errno));
            else if (S_ISDIR(st.st_mode))
                add_folder(docs, path, name);
            else if (S_ISREG(st.st_mode))
                add_file(docs, path, name, &st);
            else
                docs->special++;
            path[length] = '\0';
        }
        free(entries[i]);
    }
    free(entries);
}

// Adds what the user has named: a file or a folder, or a symbolic link to one.
static void add_path(Documents* docs, const char* given) {
    char path[PATH_LENGTH];
    struct stat st;
    if (stat(given, &st) != 0) die("%s: cannot read: %s", given, strerror(errno));
    if (S_ISREG(st.st_mode)) {
        add_file(docs, given, given, &st);
    } else if (S_ISDIR(st.st_mode)) {
        size_t n = strlen(given);
        if (n >= sizeof path) die("%s: path is too long", given);
        memcpy(path, given, n + 1);
        add_folder(docs, path, path + n + (given[n - 1] != '/'));
    } else {
        die("%s: neither a file nor a folder", given);
    }
}

static void add_list(Documents* docs, const char* list) {
    bool standard_input = strcmp(list, "-") == 0;
    FILE* f = standard_input ? stdin : fopen(list, "r");
    if (!f) die("--list %s: cannot open: %s", list, strerror(errno));
    char* line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, f) > 0) {
        line[strcspn(line, "\n")] = '\0';
        if (*line) add_path(docs, line);
    }
    if (ferror(f)) die("--list %s: cannot read: %s", list, strerror(errno));
    free(line);
    if (!standard_input) fclose(f);
}

static int by_inode(const void* a, const void* b) {
    const Document *x = a, *y = b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    if (x->inode != y->inode) return x->inode < y->inode ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int by_index(const void* a, const void* b) {
    const Document *x = a, *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

// Keeps only the first of several ways to one file, so that no text is in both splits.
static void drop_repeated(Documents* docs) {
    int64_t kept = 0;
    qsort(docs->data, (size_t)docs->count, sizeof *docs->data, by_inode);
    for (int64_t i = 0; i < docs->count; i++) {
        const Document* last = kept ? &docs->data[kept - 1] : NULL;
        if (last && last->device == docs->data[i].device && last->inode == docs->data[i].inode)
            free(docs->data[i].path);
        else
            docs->data[kept++] = docs->data[i];
    }
    docs->again = docs->count - kept;
    docs->count = kept;
    qsort(docs->data, (size_t)docs->count, sizeof *docs->data, by_index);
}

// Chooses the files of the validation split: those that drew less than the fraction, and at least one, of the
// lowest draw; at least one also stays for training.
static void choose_split(Documents* docs, double fraction) {
    if (fraction <= 0) return;
    if (docs->count < 2)
        die("--val-fraction: a file goes to one split only, and there is only one file; split it, or leave "
            "this out");
    int64_t lowest = 0, highest = 0;
    for (int64_t i = 0; i < docs->count; i++) {
        docs->data[i].val = docs->data[i].draw < fraction;
        if (docs->data[i].draw < docs->data[lowest].draw) lowest = i;
        if (docs->data[i].draw >= docs->data[highest].draw) highest = i; // the last one, so never the lowest
    }
    docs->data[highest].val = false;
    docs->data[lowest].val = true;
}

static Documents find_documents(const Options* o) {
    Documents docs = {.seed = (uint64_t)o->seed};
    for (int i = 0; i < o->num_paths; i++) add_path(&docs, o->paths[i]);
    if (o->list) add_list(&docs, o->list);
    if (docs.count == 0)
        die("no input: %lld empty, %lld hidden and %lld special files, and no other", (long long)docs.empty,
            (long long)docs.hidden, (long long)docs.special);
    drop_repeated(&docs);
    choose_split(&docs, o->val_fraction);
    for (int64_t i = 0; i < docs.count; i++) docs.bytes += docs.data[i].bytes;
    return docs;
}

// ----------------------------------------------------------------------------
// encoding

#define PIECE (4 << 20) // bytes read at a time

enum { TRAIN, VAL };
static const char* const split_names[2] = {"train", "val"};

typedef struct {
    int64_t files, bytes, tokens, dropped;
} Counts;

typedef struct {
    const Options* options;
    Tokenizer tokenizer;
    ShardWriter writers[2];
    Counts counts[2];
    ByteBuffer text, escaped; // read but not encoded yet; a piece of it, escaped
    TokenBuffer tokens;       // encoded but not written yet
    Progress progress;
    int64_t bytes; // read so far
} Job;

// Encodes the first `bytes` of job->text and writes the tokens; with a document length, as many documents as
// are complete.
static bool encode_piece(Job* job, size_t bytes, int split, Error* err) {
    const char* text = job->text.data;
    size_t n = bytes;
    if (job->options->json_escape) {
        job->escaped.count = 0;
        json_escape(text, n, &job->escaped);
        text = job->escaped.data, n = job->escaped.count;
    }
    TokenBuffer* tokens = &job->tokens;
    tokenizer_encode(&job->tokenizer, text, n, tokens);
    int64_t D = job->options->doc_len, ready = D ? tokens->count / D * D : tokens->count;
    if (!shard_write(&job->writers[split], tokens->data, ready, err)) return false;
    tokens->count -= ready;
    memmove(tokens->data, tokens->data + ready, (size_t)tokens->count * sizeof *tokens->data);
    job->text.count -= bytes;
    memmove(job->text.data, job->text.data + bytes, job->text.count);
    job->counts[split].bytes += (int64_t)bytes;
    return true;
}

static bool encode_file(Job* job, int fd, const Document* doc, Error* err) {
    Counts* counts = &job->counts[doc->val];
    job->text.count = 0;
    job->tokens.count = 0;
    if (!job->options->doc_len) {
        *token_buffer_reserve(&job->tokens, 1) = job->tokenizer.end_of_text;
        job->tokens.count = 1;
    }
    for (;;) {
        size_t before = job->text.count;
        ssize_t got = read(fd, byte_buffer_reserve(&job->text, PIECE), PIECE);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail(err, "%s: cannot read: %s", doc->path, strerror(errno));
        job->text.count += (size_t)got;
        job->bytes += got;
        progress_update(&job->progress, (double)job->bytes);
        size_t after = before ? before - 1 : 0; // what lies before it was searched the last time
        size_t cut = got ? tokenizer_cut(job->text.data, after, job->text.count) : job->text.count;
        if ((cut || !got) && !encode_piece(job, cut, doc->val, err)) return false;
        if (!got) break;
    }
    counts->files++;
    counts->dropped += job->tokens.count;
    return true;
}

static bool encode_all(Job* job, const Documents* docs, Error* err) {
    for (int64_t i = 0; i < docs->count; i++) {
        int fd = open(docs->data[i].path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return fail(err, "%s: cannot open: %s", docs->data[i].path, strerror(errno));
        bool ok = encode_file(job, fd, &docs->data[i], err);
        close(fd);
        if (!ok) return false;
    }
    for (int split = 0; split < 2; split++) {
        if (!shard_writer_close(&job->writers[split], err)) return false;
        job->counts[split].tokens = job->writers[split].total;
        if (job->counts[split].files > 0 && job->counts[split].tokens == 0)
            return fail(err, "no document in %s: no file of it has %lld tokens; choose a smaller --doc-len",
                        split_names[split], (long long)job->options->doc_len);
    }
    return true;
}

// Removes all shards under this prefix: those of an earlier run, of which there may be more than this one
// writes, and whose files may have changed their split; and after a failure what this run has done.
static void remove_shards(const char* prefix) {
    char folder[PATH_LENGTH], path[PATH_LENGTH];
    Error err;
    if (!shard_path(path, prefix, split_names[VAL], 0, &err)) die("--out %s", err.msg);
    shard_folder(folder, prefix);
    DIR* d = opendir(folder);
    if (!d) return; // a missing folder holds none; any other reason comes up when the shards are written
    for (struct dirent* entry; (entry = readdir(d));) {
        const char* number = strrchr(entry->d_name, '_');
        if (!number) continue;
        for (int split = 0; split < 2; split++) {
            if (!shard_path(path, prefix, split_names[split], strtoll(number + 1, NULL, 10), &err))
                die("--out %s", err.msg);
            const char* slash = strrchr(path, '/');
            if (strcmp(entry->d_name, slash ? slash + 1 : path) == 0 && unlink(path) != 0)
                die("%s: cannot remove this old shard: %s", path, strerror(errno));
        }
    }
    closedir(d);
}

// ----------------------------------------------------------------------------
// main

static void print_summary(const Job* job, const Documents* docs) {
    const Counts *train = &job->counts[TRAIN], *val = &job->counts[VAL];
    int64_t dropped = train->dropped + val->dropped, bytes = train->bytes + val->bytes;
    int64_t tokens = train->tokens + val->tokens, D = job->options->doc_len;
    int64_t ends = D ? 0 : train->files + val->files; // tokens of a stream that stand for no text
    printf("%lld tokens of %lld bytes, %.3f bytes/token", (long long)tokens, (long long)bytes,
           (double)bytes / (double)(tokens + dropped - ends));
    for (int split = 0; split < 2; split++) {
        const Counts* c = &job->counts[split];
        int64_t documents = D ? c->tokens / D : c->files, shards = job->writers[split].index;
        if (split == VAL && documents == 0) continue;
        printf("; %s: %lld document%s, %lld tokens, %lld shard%s", split_names[split], (long long)documents,
               documents == 1 ? "" : "s", (long long)c->tokens, (long long)shards, shards == 1 ? "" : "s");
    }
    if (dropped)
        printf("; dropped %lld tokens (%.1f%%) at the ends of files", (long long)dropped,
               100.0 * (double)dropped / (double)(tokens + dropped));
    if (docs->empty + docs->hidden + docs->special + docs->again)
        printf("; left out: %lld empty, %lld hidden, %lld special, %lld met before", (long long)docs->empty,
               (long long)docs->hidden, (long long)docs->special, (long long)docs->again);
    printf("\n");
}

int main(int argc, char** argv) {
    Options options = parse_options(argc, argv);
    Job job = {.options = &options};
    Error err;
    signal(SIGXFSZ, SIG_IGN); // a file size limit then shows as a failed write, which is reported
    if (!options.vocab)
        tokenizer_bytes(&job.tokenizer);
    else if (!tokenizer_gpt2(&job.tokenizer, options.vocab, &err))
        die("--vocab %s", err.msg);
    for (int split = 0; split < 2; split++)
        if (!shard_writer_open(&job.writers[split], options.out, split_names[split], job.tokenizer.vocab_size,
                               options.doc_len, options.shard_tokens, &err))
            die("--out %s", err.msg);
    remove_shards(options.out); // before we look for files: the prefix may lie in a folder to be read
    Documents docs = find_documents(&options);
    progress_start(&job.progress, "encoding", (double)docs.bytes, "MB", 1e6);
    bool ok = encode_all(&job, &docs, &err);
    progress_end(&job.progress);
    if (!ok) {
        for (int split = 0; split < 2; split++) shard_writer_abort(&job.writers[split]);
        remove_shards(options.out); // a part of the data must not pass for all of it
        die("%s", err.msg);
    }
    print_summary(&job, &docs);
    for (int64_t i = 0; i < docs.count; i++) free(docs.data[i].path);
    free(docs.data);
    free(job.text.data);
    free(job.escaped.data);
    free(job.tokens.data);
    tokenizer_free(&job.tokenizer);
    return EXIT_SUCCESS;
}
