/*
Command lines: parser, defaults and --help of a program, all from one table.

A program keeps its options in a struct with one field per option, and describes them in an array of CliRow:

    --name value    --name=value    a text, a choice of names, a count, a real number; a list gains an item
    --name                          a flag; -h is --help
    --name    --name word           a switch: one of its words, or alone the word that it means then

Called by options.h (both trainers) and by the programs in data/. Counts take suffixes: 2.5Gi, 16Ki, 1e9. An
error names the option that caused it.
*/
#pragma once

#include "../../base/common.h"
#include "../../base/nearest.h"
#include "../../base/numbers.h"

#ifndef CODE_VERSION // the Makefile defines it from git
#define CODE_VERSION "unknown"
#endif

// Where the repository has GPT-2's vocabulary, as help and errors of --vocab name it
#define GPT2_VOCAB "dev/test/fixtures/gpt2/vocab.bpe"

#define CLI_UNSET    (-1) // default of a number or choice that the program makes itself unless it is given
#define CLI_MAX_LIST 64

typedef struct {
    const char* items[CLI_MAX_LIST];
    int count;
} CliList;

// A group is a title in --help. A choice or switch is stored as the index of the name given.
typedef enum { CLI_GROUP, CLI_TEXT, CLI_CHOICE, CLI_SWITCH, CLI_COUNT, CLI_REAL, CLI_FLAG, CLI_LIST } CliType;

// The field of each type in the program's struct.
typedef const char* CLI_TEXT_FIELD;
typedef int64_t CLI_CHOICE_FIELD, CLI_SWITCH_FIELD, CLI_COUNT_FIELD;
typedef double CLI_REAL_FIELD;
typedef bool CLI_FLAG_FIELD;
typedef CliList CLI_LIST_FIELD;

typedef struct {
    CliType type;
    const char* name; // without the dashes; the title of a group
    // as --help prints it: of a choice or switch all names, as in "none|all"; "" of a flag
    const char* value_name;
    size_t offset; // of the field in the program's struct
    // default, and range of a number, |count| <= 2^62; of a switch `least` is the index of the word that it
    // means alone
    double preset, least, most;
    const char* help; // a default that is not a plain number is named in [brackets]
} CliRow;

static inline void* cli_field(const CliRow* row, void* options) { return (char*)options + row->offset; }

// Copies name i of a choice, counted from 0, to `text`; false if the choice has no such name, as for
// CLI_UNSET.
static inline bool cli_choice_name(char text[32], const CliRow* row, int64_t i) {
    const char* name = row->value_name;
    if (i < 0) return false;
    for (; i > 0; i--) {
        name += strcspn(name, "|");
        if (*name++ == '\0') return false;
    }
    snprintf(text, 32, "%.*s", (int)strcspn(name, "|"), name);
    return true;
}

// ----------------------------------------------------------------------------
// parsing

// Fills every field with its default; texts are NULL, flags false and lists empty.
static inline void cli_defaults(const CliRow* rows, int num_rows, void* options) {
    for (const CliRow* row = rows; row < rows + num_rows; row++) {
        void* field = cli_field(row, options);
        switch (row->type) {
        case CLI_GROUP: break;
        case CLI_TEXT: *(const char**)field = NULL; break;
        case CLI_CHOICE:
        case CLI_SWITCH:
        case CLI_COUNT: *(int64_t*)field = (int64_t)row->preset; break;
        case CLI_REAL: *(double*)field = row->preset; break;
        case CLI_FLAG: *(bool*)field = false; break;
        case CLI_LIST: ((CliList*)field)->count = 0; break;
        }
    }
}

// Sets an option to the value `text`, which must outlive the options; a flag becomes true whatever the text.
// On error the field keeps its value.
static inline bool cli_set(const CliRow* row, void* options, const char* text, Error* err) {
    void* field = cli_field(row, options);
    CliList* list = (CliList*)field;
    char name[32];
    double number;
    int64_t whole;
    switch (row->type) {
    case CLI_GROUP: break;
    case CLI_TEXT: // a path that is empty would be that of the root folder, or of none
        if (*text == '\0' && strcmp(row->value_name, "TEXT") != 0)
            return fail(err, "--%s: is empty: give %s", row->name, row->value_name);
        *(const char**)field = text;
        break;
    case CLI_CHOICE:
    case CLI_SWITCH:
        for (int64_t i = 0; cli_choice_name(name, row, i); i++) {
            if (strcmp(text, name) != 0) continue;
            *(int64_t*)field = i;
            return true;
        }
        return fail(err, "--%s %s: not one of %s", row->name, text, row->value_name);
    case CLI_COUNT:
        if (!parse_whole_within(text, (int64_t)row->least, (int64_t)row->most, &whole))
            return fail(err, "--%s %s: not a whole number from %.0f to %.0f (suffixes: k M G Ki Mi Gi)",
                        row->name, text, row->least, row->most);
        *(int64_t*)field = whole;
        break;
    case CLI_REAL:
        if (!parse_number(text, &number) || number < row->least || number > row->most)
            return fail(err, "--%s %s: not a number from %g to %g", row->name, text, row->least, row->most);
        *(double*)field = number;
        break;
    case CLI_FLAG: *(bool*)field = true; break;
    case CLI_LIST:
        if (list->count == CLI_MAX_LIST)
            return fail(err, "--%s: given more than %d times", row->name, CLI_MAX_LIST);
        list->items[list->count++] = text;
    }
    return true;
}

// The row of the option whose name is the first n characters of `name`, or NULL.
static inline const CliRow* cli_find(const CliRow* rows, int num_rows, const char* name, size_t n) {
    for (int i = 0; i < num_rows; i++)
        if (rows[i].type != CLI_GROUP && strlen(rows[i].name) == n && strncmp(rows[i].name, name, n) == 0)
            return &rows[i];
    return NULL;
}

// Fails for an option that there is not.
static inline bool cli_fail_unknown(const CliRow* rows, int num_rows, const char* name, size_t n,
                                    Error* err) {
    char hint[2 * NEAREST_BYTES];
    Nearest near = nearest_to(name, n);
    for (int i = 0; i < num_rows; i++)
        if (rows[i].type != CLI_GROUP) nearest_try(&near, rows[i].name);
    return fail(err, "--%.*s: no such option%s; --help lists them", (int)n, name,
                nearest_hint(&near, hint, "--"));
}

// Fails for argument i of a program that takes none, which may be a file that the shell put behind a GLOB.
static inline bool cli_fail_argument(const CliRow* rows, int num_rows, char** argv, int i, Error* err) {
    const char* name = i > 2 && strncmp(argv[i - 2], "--", 2) == 0 ? argv[i - 2] + 2 : "";
    const CliRow* row = cli_find(rows, num_rows, name, strlen(name));
    if (row && strcmp(row->value_name, "GLOB") == 0 && access(argv[i], F_OK) == 0)
        return fail(err, "%s: not an option: the shell replaced the pattern of --%s by file names; quote it",
                    argv[i], row->name);
    return fail(err, "%s: not an option; --help lists them", argv[i]);
}

// Parses a command line into *options, which is first filled with the defaults. Texts point into argv.
//
// If an option is given twice the last value counts, so that a script can append its arguments to its
// own options. given: NULL, or array of num_rows flags, set for the options that were given.
//
// num_arguments: arguments that are not options, such as file names, are moved to argv[1 .. *num_arguments]
// in order, and everything after `--` counts as one. With num_arguments NULL the program takes none, and one
// is an error.
//
// Not inlined: gcc would see that no list fits into the struct of a program without lists, and warn.
__attribute__((noinline, unused)) static bool cli_parse(const CliRow* rows, int num_rows, void* options,
                                                        bool* given, int argc, char** argv,
                                                        int* num_arguments, Error* err) {
    bool only_arguments = false;
    char alone[32];
    cli_defaults(rows, num_rows, options);
    if (given) memset(given, 0, (size_t)num_rows * sizeof *given);
    if (num_arguments) *num_arguments = 0;
    for (int i = 1; i < argc; i++) {
        const char* word = strcmp(argv[i], "-h") == 0 && !only_arguments ? "--help" : argv[i];
        bool dashes = strncmp(word, "--", 2) == 0;
        if (!dashes && !num_arguments) return cli_fail_argument(rows, num_rows, argv, i, err);
        if (!dashes || only_arguments) {
            argv[++*num_arguments] = argv[i];
            continue;
        }
        const char* name = word + 2;
        if (*name == '\0' && num_arguments) {
            only_arguments = true;
            continue;
        }
        size_t n = strcspn(name, "=");
        const CliRow* row = cli_find(rows, num_rows, name, n);
        if (!row) return cli_fail_unknown(rows, num_rows, name, n, err);
        const char* value = name[n] == '=' ? name + n + 1 : NULL;
        if (row->type == CLI_FLAG && value) return fail(err, "--%s takes no value", row->name);
        if (row->type == CLI_SWITCH && !value) {
            const bool has_word = i + 1 < argc && argv[i + 1][0] != '-';
            value = has_word ? argv[++i] : alone;
            cli_choice_name(alone, row, (int64_t)row->least);
        }
        if (row->type != CLI_FLAG && !value) {
            if (i + 1 == argc) return fail(err, "--%s: its %s is missing", row->name, row->value_name);
            value = argv[++i];
            // as in `--out $OUT --resume` without OUT
            if (strncmp(value, "--", 2) == 0 && cli_find(rows, num_rows, value + 2, strcspn(value + 2, "=")))
                return fail(err, "--%s: its %s is missing before %s; --%s=%s means this text", row->name,
                            row->value_name, value, row->name, value);
        }
        if (!cli_set(row, options, value, err)) return false;
        if (given) given[row - rows] = true;
    }
    return true;
}

// ----------------------------------------------------------------------------
// version and help

// Prints name and commit of the program, and its compiler.
static inline void cli_print_version(const char* program) {
    const char* slash = strrchr(program, '/');
    printf("%s %s\ncompiler %s\n", slash ? slash + 1 : program, CODE_VERSION, __VERSION__);
}

// Prints all options with their help texts and defaults, wrapped to 110 columns.
static inline void cli_print_help(FILE* f, const CliRow* rows, int num_rows) {
    const int indent = 28, width = 110;
    for (const CliRow* row = rows; row < rows + num_rows; row++) {
        char preset[32] = "", text[1024];
        if (row->type == CLI_GROUP) {
            fprintf(f, "\n%s\n", row->name);
            continue;
        }
        if ((row->type == CLI_COUNT || row->type == CLI_REAL) && row->preset != CLI_UNSET &&
            !strchr(row->help, '['))
            snprintf(preset, sizeof preset, " [%.15g]", row->preset);
        snprintf(text, sizeof text, "%s%s", row->help, preset);
        const bool may_be_alone = row->type == CLI_SWITCH;
        int column = fprintf(f, may_be_alone ? "  --%s [%s]" : "  --%s %s", row->name, row->value_name);
        if (column > indent) column = fprintf(f, "\n") - 1;
        for (const char* word = text; *word; word += strspn(word, " ")) {
            int n = (int)strcspn(word, " ");
            if (column < indent)
                column += fprintf(f, "%*s", indent - column, "");
            else if (column + 1 + n > width)
                column = fprintf(f, "\n%*s", indent, "") - 1;
            else
                column += fprintf(f, " ");
            column += fprintf(f, "%.*s", n, word);
            word += n;
        }
        fprintf(f, "\n");
    }
}
