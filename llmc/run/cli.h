/*
A program's command line, from one table: parser, defaults and --help.

A program keeps its options in a struct, a field each, and describes them in an array of CliRow:

    --name value    --name=value    a text, a count or a real number; a list takes one more item each time
    --name          a flag

Counts take suffixes (2.5Gi, 16Ki, 1e9). What is wrong with an option is an error that names it.
*/
#ifndef LLMC_CLI_H
#define LLMC_CLI_H

#include "../base/common.h"
#include "../base/numbers.h"

#define CLI_UNSET    (-1) // default of a number that the program chooses if nobody gives it
#define CLI_MAX_LIST 64

typedef struct {
    const char* items[CLI_MAX_LIST];
    int count;
} CliList;

// A group is a title in --help. The fields of the others: const char*, int64_t, double, bool, CliList.
typedef enum { CLI_GROUP, CLI_TEXT, CLI_COUNT, CLI_REAL, CLI_FLAG, CLI_LIST } CliType;

typedef struct {
    CliType type;
    const char* name;           // without the dashes; the title of a group
    const char* value_name;     // "" where it takes no value
    size_t offset;              // of the field in the program's struct
    double preset, least, most; // of a number: default, and range
    const char* help;           // says in [brackets] a default that is no plain number
} CliRow;

static inline void* cli_field(const CliRow* row, void* options) { return (char*)options + row->offset; }

// ----------------------------------------------------------------------------
// parsing

// Fills every field with its default; texts are NULL, flags false and lists empty.
static inline void cli_defaults(const CliRow* rows, int num_rows, void* options) {
    for (int i = 0; i < num_rows; i++) {
        void* field = cli_field(&rows[i], options);
        switch (rows[i].type) {
        case CLI_GROUP: break;
        case CLI_TEXT: *(const char**)field = NULL; break;
        case CLI_COUNT: *(int64_t*)field = (int64_t)rows[i].preset; break;
        case CLI_REAL: *(double*)field = rows[i].preset; break;
        case CLI_FLAG: *(bool*)field = false; break;
        case CLI_LIST: ((CliList*)field)->count = 0; break;
        }
    }
}

// Gives an option the value `text`, which must outlive the options; a flag is set whatever it says.
static inline bool cli_set(const CliRow* row, void* options, const char* text, Error* err) {
    void* field = cli_field(row, options);
    double number;
    switch (row->type) {
    case CLI_GROUP: break;
    case CLI_TEXT: *(const char**)field = text; break;
    case CLI_COUNT:
        if (!parse_count(text, &number) || number != floor(number) || number < row->least ||
            number > row->most)
            return fail(err, "--%s %s: not a whole number from %.0f to %.0f (suffixes: k M G Ki Mi Gi)",
                        row->name, text, row->least, row->most);
        *(int64_t*)field = (int64_t)number;
        break;
    case CLI_REAL:
        if (!parse_number(text, &number) || number < row->least || number > row->most)
            return fail(err, "--%s %s: not a number from %g to %g", row->name, text, row->least, row->most);
        *(double*)field = number;
        break;
    case CLI_FLAG: *(bool*)field = true; break;
    case CLI_LIST: {
        CliList* list = (CliList*)field;
        if (list->count == CLI_MAX_LIST)
            return fail(err, "--%s: given more than %d times", row->name, CLI_MAX_LIST);
        list->items[list->count++] = text;
        break;
    }
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

// Parses a command line into *options, which starts from the defaults; texts point into argv.
//
// given[i] tells whether row i was on the command line, and an option that is there twice is an error. With
// given NULL the last value counts, so that a script can append to its options.
//
// What is no option, a file's name say, is moved to argv[1 .. *num_arguments], in order; after `--` nothing
// is an option. With num_arguments NULL the program takes no such arguments, and they are an error.
//
// Not inlined: gcc would see that no list fits into the struct of a program that has none, and warn.
__attribute__((noinline, unused)) static bool cli_parse(const CliRow* rows, int num_rows, void* options,
                                                        bool* given, int argc, char** argv,
                                                        int* num_arguments, Error* err) {
    bool only_arguments = false;
    cli_defaults(rows, num_rows, options);
    if (given) memset(given, 0, (size_t)num_rows * sizeof *given);
    if (num_arguments) *num_arguments = 0;
    for (int i = 1; i < argc; i++) {
        bool dashes = strncmp(argv[i], "--", 2) == 0;
        if (!dashes && !num_arguments) return fail(err, "%s: not an option; --help lists them", argv[i]);
        if (!dashes || only_arguments) {
            argv[++*num_arguments] = argv[i];
            continue;
        }
        const char* name = argv[i] + 2;
        if (*name == '\0' && num_arguments) {
            only_arguments = true;
            continue;
        }
        size_t n = strcspn(name, "=");
        const CliRow* row = cli_find(rows, num_rows, name, n);
        if (!row) return fail(err, "--%.*s: no such option; --help lists them", (int)n, name);
        const char* value = name[n] == '=' ? name + n + 1 : NULL;
        if (row->type == CLI_FLAG && value) return fail(err, "--%s takes no value", row->name);
        if (row->type != CLI_FLAG && !value) {
            if (i + 1 == argc) return fail(err, "--%s: its %s is missing", row->name, row->value_name);
            value = argv[++i];
        }
        if (given && given[row - rows] && row->type != CLI_LIST)
            return fail(err, "--%s: given twice", row->name);
        if (!cli_set(row, options, value, err)) return false;
        if (given) given[row - rows] = true;
    }
    return true;
}

// ----------------------------------------------------------------------------
// help

// Prints n characters of a word, where help texts stand or behind what the line has; returns the column after
// it.
static inline int cli_print_word(FILE* f, int column, const char* word, int n) {
    const int indent = 28, width = 110;
    if (column < indent)
        column += fprintf(f, "%*s", indent - column, "");
    else if (column + 1 + n > width)
        column = fprintf(f, "\n%*s", indent, "") - 1;
    else
        column += fprintf(f, " ");
    return column + fprintf(f, "%.*s", n, word);
}

// Prints all options with their help texts and defaults, wrapped to 110 columns.
static inline void cli_print_help(FILE* f, const CliRow* rows, int num_rows) {
    for (const CliRow* row = rows; row < rows + num_rows; row++) {
        if (row->type == CLI_GROUP) {
            fprintf(f, "\n%s\n", row->name);
            continue;
        }
        int column = fprintf(f, "  --%s %s", row->name, row->value_name);
        for (const char* word = row->help; *word; word += strspn(word, " ")) {
            int n = (int)strcspn(word, " ");
            column = cli_print_word(f, column, word, n);
            word += n;
        }
        bool number = row->type == CLI_COUNT || row->type == CLI_REAL;
        if (number && row->preset != CLI_UNSET && !strchr(row->help, '[')) {
            char preset[32];
            cli_print_word(f, column, preset, snprintf(preset, sizeof preset, "[%.15g]", row->preset));
        }
        fprintf(f, "\n");
    }
}

#endif // LLMC_CLI_H
