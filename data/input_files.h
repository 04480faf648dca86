/*
The input of text_to_shards.c: which files the paths of the command line stand for, in which order, which of
them are in the validation split, and which are not text: compressed, of another format, UTF-16, or with zero
bytes. What cannot be read ends the program, with a message.
*/
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../llmc/base/common.h"
#include "../llmc/base/random.h"
#include "shard_writer.h"

typedef struct {
    char** paths; // files and folders
    int num_paths;
    const char* list;    // a file of more paths; "-": standard input; NULL: none
    bool folders;        // a folder among the paths is one document
    bool skip_binary;    // leave out files that are not text
    int64_t seed;        // of the validation split
    double val_fraction; // of the documents, those of the validation split
} InputSelection;

typedef struct {
    char* path;
    dev_t device;
    ino_t inode;
    int64_t bytes;
    struct timespec modified;
    double draw;      // uniform in [0, 1), from the seed and the document's name
    int64_t index;    // position in the order of the output
    int64_t document; // index of the document's first file
    size_t name;      // where in path the name starts that is written before the file; 0: none is
    bool val;
} InputFile;

typedef struct {
    InputFile* data;
    size_t capacity;
    int64_t count, bytes;
    int64_t empty, hidden, special, repeated, shards, binary; // skipped
    uint64_t seed;
    bool in_folder;       // the files of the present PATH are one document
    int64_t folder_start; // its first file
    double folder_draw;
    uint64_t* names; // hashes of the names of such PATHs so far
    size_t folders, names_capacity;
} InputFiles;

// What a document is made of, for messages.
static inline const char* input_unit(const InputSelection* o) { return o->folders ? "folder" : "file"; }

// ----------------------------------------------------------------------------
// files that are not text

// For the error message: the kind of file that starts with bytes[n] and is not text, or NULL.
static inline const char* other_kind(const char* bytes, size_t n) {
    static const struct {
        size_t at;
        const char *magic, *kind;
    } kinds[] = {
        {0, "\x1f\x8b", "compressed by gzip; decompress it (gunzip), or use scripts/make_shards.py"},
        {0, "\x28\xb5\x2f\xfd", "compressed by zstd; decompress it (unzstd), or use scripts/make_shards.py"},
        {1, "7zXZ", "compressed by xz; decompress it (unxz)"},
        {4, "1AY&SY", "compressed by bzip2; decompress it (bunzip2)"},
        {0, "\x04\x22\x4d\x18", "compressed by lz4; decompress it (unlz4)"},
        {0, "PK\x03\x04", "a zip archive; unpack it (unzip)"},
        {257, "ustar", "a tar archive; unpack it (tar -xf)"},
        {0, "PAR1", "a Parquet file; use scripts/make_shards.py"},
        {0, "%PDF-", "a PDF document; convert it to text"},
        {0, "\x88\xd8\x34\x01", "a data shard"},
        {0, "\xff\xfe", "UTF-16 text; convert it to UTF-8 (iconv)"},
        {0, "\xfe\xff", "UTF-16 text; convert it to UTF-8 (iconv)"},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const size_t at = kinds[i].at, length = strlen(kinds[i].magic);
        if (n >= at + length && memcmp(bytes + at, kinds[i].magic, length) == 0) return kinds[i].kind;
    }
    return memchr(bytes, '\0', n)
               ? "binary: it has a zero byte; remove it from the input, leave it out with --skip-binary, or "
                 "encode its bytes as they are with --binary"
               : NULL;
}

// Sets *kind to what a file is that is not text, by its start and, if it is to be read `whole`, by its zero
// bytes; NULL: it is text.
static inline bool file_other_kind(const char** kind, const char* path, bool whole, Error* err) {
    enum { START = 4096, PIECE = 1 << 16 };
    *kind = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(err, "%s: cannot open: %s", path, strerror(errno));
    char* bytes = (char*)xrealloc(NULL, PIECE);
    ssize_t n = read(fd, bytes, whole ? PIECE : START);
    if (n > 0) *kind = other_kind(bytes, (size_t)n);
    while (whole && n > 0 && !*kind && (n = read(fd, bytes, PIECE)) > 0)
        if (memchr(bytes, '\0', (size_t)n)) *kind = other_kind("", 1);
    const int why = errno;
    free(bytes);
    close(fd);
    return n >= 0 || fail(err, "%s: cannot read: %s", path, strerror(why));
}

// ----------------------------------------------------------------------------
// the files of paths

// Adds a file. `name`: its path within the folder on the command line. Its draw is of it, or of that folder.
static inline void add_file(InputFiles* files, const char* path, const char* name, const struct stat* st) {
    if (st->st_size == 0) {
        files->empty++;
        return;
    }
    files->data = xgrow(files->data, (size_t)files->count, &files->capacity, sizeof *files->data);
    files->data[files->count] =
        (InputFile){.path = xstrdup(path),
                    .device = st->st_dev,
                    .inode = st->st_ino,
                    .bytes = st->st_size,
                    .modified = st->st_mtim,
                    .draw = files->in_folder ? files->folder_draw
                                             : random_uniform(files->seed, fnv1a(FNV1A_BASIS, name), 0),
                    .index = files->count,
                    .document = files->in_folder ? files->folder_start : files->count,
                    .name = files->in_folder ? (size_t)(name - path) : 0};
    files->count++;
}

static inline int by_name(const struct dirent** a, const struct dirent** b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

// Adds the files of the folder path[PATH_LENGTH] and its subfolders; entry names are appended to path in
// place. Symbolic links are not followed, so there are no cycles.
static inline void add_folder(InputFiles* files, char* path, const char* name) {
    struct dirent** entries;
    // scandir reads the whole folder before the recursion, so only one folder is open at a time
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
                files->hidden++;
            else if (lstat(path, &st) != 0)
                die("%s: cannot stat: %s", path, strerror(errno));
            else if (S_ISDIR(st.st_mode))
                add_folder(files, path, name);
            else if (S_ISREG(st.st_mode) && shard_name(entry))
                files->shards++;
            else if (S_ISREG(st.st_mode))
                add_file(files, path, name, &st);
            else
                files->special++;
            path[length] = '\0';
        }
        free(entries[i]);
    }
    free(entries);
}

// Begins a folder that is one document. Its draw is of its name, however its PATH is written, and of how many
// of this name came before.
static inline void begin_folder(InputFiles* files, const char* given) {
    uint64_t same = 0;
    char* path = realpath(given, NULL);
    if (!path) die("%s: cannot resolve: %s", given, strerror(errno));
    const uint64_t name = fnv1a(FNV1A_BASIS, strrchr(path, '/') + 1);
    for (size_t i = 0; i < files->folders; i++) same += files->names[i] == name;
    files->names = xgrow(files->names, files->folders, &files->names_capacity, sizeof name);
    files->names[files->folders++] = name;
    files->folder_draw = random_uniform(files->seed, name, same);
    files->folder_start = files->count;
    files->in_folder = true;
    free(path);
}

// Adds what the user has named: a file or a folder, or a symbolic link to one.
static inline void add_path(InputFiles* files, const char* given, bool folders) {
    char path[PATH_LENGTH];
    struct stat st;
    if (stat(given, &st) != 0) die("%s: cannot read: %s", given, strerror(errno));
    if (S_ISREG(st.st_mode)) {
        add_file(files, given, given, &st);
    } else if (S_ISDIR(st.st_mode)) {
        size_t n = strlen(given);
        if (n >= sizeof path) die("%s: path is too long", given);
        memcpy(path, given, n + 1);
        if (folders) begin_folder(files, given);
        add_folder(files, path, path + n + (given[n - 1] != '/'));
        files->in_folder = false;
    } else {
        die("%s: neither a file nor a folder", given);
    }
}

static inline void add_list(InputFiles* files, const char* list, bool folders) {
    bool standard_input = strcmp(list, "-") == 0;
    FILE* f = standard_input ? stdin : fopen(list, "r");
    if (!f) die("--list %s: cannot open: %s", list, strerror(errno));
    char* text = NULL;
    size_t capacity = 0;
    bool zeros = false; // paths end with zero bytes, not with lines
    for (ssize_t n; (n = getdelim(&text, &capacity, '\0', f)) > 0;) {
        zeros = zeros || text[n - 1] == '\0';
        if (zeros && *text) add_path(files, text, folders);
        for (char *rest = text, *path; !zeros && (path = strsep(&rest, "\n")) != NULL;)
            if (*path) add_path(files, path, folders);
    }
    if (ferror(f)) die("--list %s: cannot read: %s", list, strerror(errno));
    free(text);
    if (!standard_input) fclose(f);
}

static inline int by_index(const void* a, const void* b) {
    const InputFile *x = a, *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

static inline int by_inode(const void* a, const void* b) {
    const InputFile *x = a, *y = b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    if (x->inode != y->inode) return x->inode < y->inode ? -1 : 1;
    return by_index(a, b);
}

// Keeps only the first of several paths of one file, so that no text is in both splits.
static inline void drop_repeated(InputFiles* files) {
    int64_t kept = 0;
    qsort(files->data, (size_t)files->count, sizeof *files->data, by_inode);
    for (int64_t i = 0; i < files->count; i++) {
        const InputFile* last = kept ? &files->data[kept - 1] : NULL;
        if (last && last->device == files->data[i].device && last->inode == files->data[i].inode)
            free(files->data[i].path);
        else
            files->data[kept++] = files->data[i];
    }
    files->repeated = files->count - kept;
    files->count = kept;
    qsort(files->data, (size_t)files->count, sizeof *files->data, by_index);
}

// Leaves out the files that are not text, all of which are read for that.
static inline void drop_binary(InputFiles* files) {
    Error err;
    const char* kind;
    int64_t kept = 0;
    for (int64_t i = 0; i < files->count; i++) {
        if (!file_other_kind(&kind, files->data[i].path, true, &err)) die("%s", err.msg);
        if (kind)
            free(files->data[i].path);
        else
            files->data[kept++] = files->data[i];
    }
    files->binary = files->count - kept;
    files->count = kept;
    if (kept == 0) die("no input: found only files that are not text: %lld", (long long)files->binary);
}

// Selects the documents of the validation split: those with a draw below the fraction. The lowest draw is
// always in it, the highest never.
static inline void choose_split(InputFiles* files, const InputSelection* o) {
    if (o->val_fraction <= 0) return;
    InputFile *lowest = files->data, *highest = files->data;
    for (InputFile* f = files->data; f < files->data + files->count; f++) {
        if (f->draw < lowest->draw) lowest = f;
        if (f->draw >= highest->draw) highest = f; // >=: never the same document as lowest, if there are two
    }
    if (lowest->document == highest->document)
        die("--val-fraction: there is only one %s, and a %s cannot be in both splits; divide it or omit this "
            "option",
            input_unit(o), input_unit(o));
    const int64_t first = lowest->document, last = highest->document; // draws of several may be equal
    for (InputFile* f = files->data; f < files->data + files->count; f++)
        f->val = f->document == first || (f->document != last && f->draw < o->val_fraction);
}

// Warns of files of JSON lines, whose names and quotes become text.
static inline void warn_of_lines(const InputFiles* files) {
    const char* first = NULL;
    int64_t others = -1;
    for (int64_t i = 0; i < files->count; i++) {
        const char *path = files->data[i].path, *end = strrchr(path, '.');
        if (!end || (strcmp(end, ".jsonl") != 0 && strcmp(end, ".ndjson") != 0)) continue;
        if (others++ < 0) first = path;
    }
    if (first)
        warn("%s%s: encoded as it is, with member names and quotes; scripts/make_shards.py takes the text of "
             "each line",
             first, others > 0 ? " and others" : "");
}

// Finds the files to read, in the order of the output, and gives each a split. Without skip_binary some may
// not be text, which check_kinds tells.
static inline InputFiles find_files(const InputSelection* o) {
    InputFiles files = {.seed = (uint64_t)o->seed};
    for (int i = 0; i < o->num_paths; i++) add_path(&files, o->paths[i], o->folders);
    if (o->list) add_list(&files, o->list, o->folders);
    if (files.count == 0)
        die("no input: found only %lld empty, %lld hidden and %s", (long long)files.empty,
            (long long)files.hidden, counted(files.special, "special file").text);
    drop_repeated(&files);
    if (o->skip_binary) drop_binary(&files);
    warn_of_lines(&files);
    choose_split(&files, o);
    for (int64_t i = 0; i < files.count; i++) files.bytes += files.data[i].bytes;
    return files;
}

// Checks the start of every file before the first is encoded. The error names the first file that is not
// text.
static inline bool check_kinds(const InputFiles* files, Error* err) {
    const char *first = NULL, *first_kind = NULL, *kind;
    int64_t others = 0;
    for (int64_t i = 0; i < files->count; i++) {
        if (!file_other_kind(&kind, files->data[i].path, false, err)) return false;
        if (kind && others++ == 0) first = files->data[i].path, first_kind = kind;
    }
    if (!others) return true;
    if (others == 1) return fail(err, "%s: is not text but %s", first, first_kind);
    return fail(err, "%s: is not text but %s; also not text: %s", first, first_kind,
                counted(others - 1, "other file").text);
}
