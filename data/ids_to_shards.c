/*
Writes token ids, which another program makes, as data shards. Called by scripts/make_shards.py.

Standard input is a sequence of records of little-endian uint32: kind, n, and n ids.

    kind 0, 1   a piece of a document of the training, of the validation split
    kind 2, 3   the same, the first piece of its document
    kind 4      the end, n = 0
    kind 5      the other program failed and has said why, n = 0

With --masked bit 31 of an id says that the token counts as a target; those without it do not.

As in text_to_shards, the end-of-text token precedes each document; with --doc-len D each is divided into
documents of exactly D tokens, and the rest is dropped; with --pack T documents are packed into rows
(splits.h). The shards of a prefix are replaced as a whole, at the end (shard_writer.h). If the input ends
without kind 4, the old shards remain.
*/
#include <signal.h>
#include "../llmc/run/command/cli.h"
#include "../llmc/tokens/vocab_check.h"
#include "splits.h"

typedef struct {
    const char* tokenizer;
    int64_t vocab_size, end_of_text;
    bool masked, version, help;
    SplitOptions splits;
} Options;

static const CliRow option_rows[] = {
    {CLI_TEXT, "out", "PREFIX", offsetof(Options, splits.out), 0, 0, 0, "path prefix of the shards"},
    {CLI_TEXT, "tokenizer", "FILE", offsetof(Options, tokenizer), 0, 0, 0,
     "the tokenizer.json that made the ids: its copy is PREFIX_tokenizer.json"},
    {CLI_COUNT, "vocab-size", "V", offsetof(Options, vocab_size), 0, 1, INT32_MAX, "all ids are below it"},
    {CLI_COUNT, "end-of-text", "ID", offsetof(Options, end_of_text), 0, 0, INT32_MAX,
     "the end-of-text token"},
    {CLI_COUNT, "doc-len", "D", offsetof(Options, splits.doc_len), 0, 0, INT32_MAX,
     "divide each document into documents of exactly D tokens; 0: a token stream"},
    {CLI_COUNT, "roll", "SEED", offsetof(Options, splits.roll), CLI_UNSET, 0, 1LL << 62,
     "with --doc-len: rotate each document by an offset drawn from the seed"},
    {CLI_COUNT, "pack", "T", offsetof(Options, splits.pack), 0, 0, INT32_MAX,
     "pack documents into rows of T tokens, each of which begins with a document; 0: no"},
    {CLI_COUNT, "shard-tokens", "N", offsetof(Options, splits.shard_tokens), 256 << 20, 1, INT32_MAX,
     "maximum number of tokens per shard [256Mi]"},
    {CLI_FLAG, "masked", "", offsetof(Options, masked), 0, 0, 0,
     "bit 31 of an id: this token counts as a target, others do not"},
    {CLI_FLAG, "version", "", offsetof(Options, version), 0, 0, 0, "print the program's version and exit"},
    {CLI_FLAG, "help", "", offsetof(Options, help), 0, 0, 0, "print this text and exit"},
};
enum { NUM_OPTION_ROWS = sizeof option_rows / sizeof option_rows[0], MAX_RECORD = 1 << 28 };

// Reads and writes all records. Fails with *abandoned at kind 5.
static bool read_records(Splits* s, bool* abandoned, Error* err) {
    uint32_t record[2];
    for (;;) {
        if (fread(record, sizeof record, 1, stdin) != 1) return fail(err, "the token ids end too early");
        const uint32_t kind = record[0], n = record[1];
        if (kind == 4 && n == 0) return true;
        *abandoned = kind == 5 && n == 0;
        if (*abandoned) return false;
        if (kind > 3 || n > MAX_RECORD) return fail(err, "the token ids are not a sequence of records");
        if (kind & 2 && !splits_begin(s, kind & 1, err)) return false;
        s->split = kind & 1;
        uint32_t* ids = token_buffer_reserve(&s->tokens, n);
        if (n && fread(ids, sizeof *ids, n, stdin) != n) return fail(err, "the token ids end too early");
        s->tokens.count += n;
        if (!splits_write(s, err)) return false;
    }
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
    if (!o.splits.out || !o.vocab_size) die("--out and --vocab-size are needed");
    splits_check_options(&o.splits);
    Splits splits;
    size_t bytes = 0;
    char* tokenizer = NULL; // the text of its file, read once: the shards have a hash of it
    bool abandoned = false; // by kind 5
    if (o.tokenizer && !(tokenizer = read_file(o.tokenizer, &bytes, &err))) die("%s", err.msg);
    const uint64_t hash = tokenizer ? vocab_hash_of_text(tokenizer, bytes) : 0;
    splits_open(&splits, &o.splits, o.vocab_size, hash, (uint32_t)o.end_of_text);
    for (int split = 0; split < 2 && o.masked; split++) shard_writer_mask(&splits.writers[split]);
    if (!read_records(&splits, &abandoned, &err) || !splits_publish(&splits, NULL, tokenizer, &err)) {
        splits_abort(&splits);
        if (!abandoned) die("%s", err.msg);
        shard_remove_made();
        return EXIT_SUCCESS;
    }
    splits_print(&splits, "", "\n");
    if (o.splits.pack) pack_print(splits.packers);
    if (splits.dropped)
        printf("dropped %s at the ends of documents\n", counted(splits.dropped, "token").text);
    free(tokenizer);
    return check_printed();
}
