/*
Safetensors files: reading by memory map, writing as a stream.

A file is: the header's length n (uint64, little-endian), n bytes of JSON, then the data of all tensors,
row-major. The JSON maps each name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from
the start of the data, and "__metadata__" to an object of strings. Tensors must cover the data without overlap
or hole.

Reading checks all of this against the file's size when it opens, so that afterwards every pointer is good.
The one thing it cannot catch is somebody truncating the file while it is mapped: touching the lost pages ends
in SIGBUS. So never write a file in place; write under another name and rename. Data may be unaligned: read it
with memcpy or the safetensors_read functions.

Writing takes declarations of all tensors, then their data in the same order in pieces of any size, so that no
file needs to fit in memory. Equal calls make equal bytes. Names that end in an underscore are private.
*/
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include <sys/mman.h>
#include "json.h"

#define SAFETENSORS_MAX_DIMS   8
#define SAFETENSORS_MAX_HEADER (100 << 20) // bytes
#define SAFETENSORS_ALIGNMENT  64          // of the data we write; the format asks for 8

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian and used as they are");
static_assert(sizeof(size_t) == 8, "files may be larger than 4 GiB");

// ----------------------------------------------------------------------------
// tensors

typedef enum {
    SAFETENSORS_F64,
    SAFETENSORS_F32,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_I64,
    SAFETENSORS_I32,
    SAFETENSORS_I16,
    SAFETENSORS_I8,
    SAFETENSORS_U64,
    SAFETENSORS_U32,
    SAFETENSORS_U16,
    SAFETENSORS_U8,
    SAFETENSORS_BOOL,
    SAFETENSORS_DTYPES
} SafetensorsDtype;

typedef struct {
    const char *name, *path; // path: the file it lives in
    SafetensorsDtype dtype;
    int ndim; // 0 for a scalar, whose count is 1
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t count; // elements
    size_t bytes;  // count times the element's size
    size_t begin;  // offset in the file's data
    const void* data;
} SafeTensor;

// The type's name in a header ("F32").
static inline const char* safetensors_dtype_name(SafetensorsDtype dtype) {
    static const char* const names[SAFETENSORS_DTYPES] = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16",
                                                          "I8",  "U64", "U32", "U16",  "U8",  "BOOL"};
    return names[dtype];
}

// Bytes of one element.
static inline size_t safetensors_dtype_size(SafetensorsDtype dtype) {
    static const size_t sizes[SAFETENSORS_DTYPES] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1};
    return sizes[dtype];
}

PRINTF_LIKE(3, 4)
static inline bool safetensors_fail_(const SafeTensor* t, Error* err, const char* format, ...) {
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return fail(err, "%s: tensor '%.200s': %s", t->path, t->name, what);
}

// Fills in count and bytes from dtype and shape.
static inline bool safetensors_measure_(SafeTensor* t, Error* err) {
    int64_t bytes;
    t->count = 1;
    bool fits = true;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0) return safetensors_fail_(t, err, "its shape has a negative size");
        fits = fits && !__builtin_mul_overflow(t->count, t->shape[i], &t->count);
    }
    fits = fits && !__builtin_mul_overflow(t->count, (int64_t)safetensors_dtype_size(t->dtype), &bytes);
    if (!fits) return safetensors_fail_(t, err, "its shape is too large");
    t->bytes = (size_t)bytes;
    return true;
}

// ----------------------------------------------------------------------------
// conversion

// The double that a 16-bit IEEE float stands for.
static inline double safetensors_f16_(uint16_t half) {
    int exponent = half >> 10 & 31;
    uint64_t sign = (uint64_t)(half >> 15) << 63, mantissa = half & 1023;
    if (exponent == 0)
        return (sign ? -1.0 : 1.0) * (double)mantissa / 16777216; // zero, subnormal: units of 2^-24
    uint64_t wide = exponent == 31 ? 2047 : (uint64_t)(exponent - 15 + 1023);
    uint64_t bits = sign | wide << 52 | mantissa << 42;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Element i of a tensor of floating point, as a double, which holds each of them exactly.
static inline double safetensors_element_(const SafeTensor* t, int64_t i) {
    const char* source = (const char*)t->data + (size_t)i * safetensors_dtype_size(t->dtype);
    double f64;
    float f32;
    uint32_t bits;
    uint16_t half;
    switch (t->dtype) {
    case SAFETENSORS_F64: memcpy(&f64, source, sizeof f64); return f64;
    case SAFETENSORS_F16: memcpy(&half, source, sizeof half); return safetensors_f16_(half);
    case SAFETENSORS_BF16: // the upper half of a float
        memcpy(&half, source, sizeof half);
        bits = (uint32_t)half << 16;
        memcpy(&f32, &bits, sizeof f32);
        return f32;
    default: memcpy(&f32, source, sizeof f32); return f32;
    }
}

static inline bool safetensors_is_float_(const SafeTensor* t, Error* err) {
    if (t->dtype <= SAFETENSORS_BF16) return true;
    return safetensors_fail_(t, err, "has type %s; expected F64, F32, F16 or BF16",
                             safetensors_dtype_name(t->dtype));
}

// Converts all t->count elements of a floating-point tensor to float: exact but for F64, which is rounded. An
// error, and out untouched, if the tensor holds integers.
static inline bool safetensors_read_f32(const SafeTensor* t, float* out, Error* err) {
    if (!safetensors_is_float_(t, err)) return false;
    if (t->dtype == SAFETENSORS_F32)
        memcpy(out, t->data, t->bytes);
    else
        for (int64_t i = 0; i < t->count; i++) out[i] = (float)safetensors_element_(t, i);
    return true;
}

// The same to double, always exact.
static inline bool safetensors_read_f64(const SafeTensor* t, double* out, Error* err) {
    if (!safetensors_is_float_(t, err)) return false;
    if (t->dtype == SAFETENSORS_F64)
        memcpy(out, t->data, t->bytes);
    else
        for (int64_t i = 0; i < t->count; i++) out[i] = safetensors_element_(t, i);
    return true;
}

// ----------------------------------------------------------------------------
// reading one file

typedef struct {
    char* path;
    void* map;
    size_t map_bytes;
    Json header;
    SafeTensor* tensors; // in the order of their data in the file
    int count;
    const SafeTensor** of_node; // the tensor that a node of the header describes
} Safetensors;

// Reads the description of a tensor, whose name and path are filled in already.
static inline bool safetensors_parse_tensor_(const Json* h, int node, size_t data_bytes, SafeTensor* t,
                                             Error* err) {
    int shape = json_get(h, node, "shape"), offsets = json_get(h, node, "data_offsets");
    const char* dtype = json_string(h, json_get(h, node, "dtype"));
    int64_t begin, end;

    if (!json_is(h, node, JSON_OBJECT)) return safetensors_fail_(t, err, "its description is no JSON object");
    if (!dtype) return safetensors_fail_(t, err, "'dtype' is missing or no string");
    int type = 0;
    while (type < SAFETENSORS_DTYPES && strcmp(dtype, safetensors_dtype_name((SafetensorsDtype)type)) != 0)
        type++;
    if (type == SAFETENSORS_DTYPES) return safetensors_fail_(t, err, "type '%.40s' is not supported", dtype);
    t->dtype = (SafetensorsDtype)type;

    if (!json_is(h, shape, JSON_ARRAY)) return safetensors_fail_(t, err, "'shape' is missing or no array");
    if (json_count(h, shape) > SAFETENSORS_MAX_DIMS)
        return safetensors_fail_(t, err, "has more than %d dimensions", SAFETENSORS_MAX_DIMS);
    for (int size = json_first(h, shape); size >= 0; size = json_next(h, size))
        if (!json_int64(h, size, &t->shape[t->ndim++]))
            return safetensors_fail_(t, err, "its shape is not integers");
    if (!safetensors_measure_(t, err)) return false;

    int first = json_first(h, offsets);
    if (!json_is(h, offsets, JSON_ARRAY) || json_count(h, offsets) != 2 || !json_int64(h, first, &begin) ||
        !json_int64(h, json_next(h, first), &end) || begin < 0 || end < begin)
        return safetensors_fail_(t, err,
                                 "'data_offsets' is missing or not [begin, end] with 0 <= begin <= end");
    if ((size_t)(end - begin) != t->bytes)
        return safetensors_fail_(t, err, "its type and shape need %zu bytes, but its data_offsets span %lld",
                                 t->bytes, (long long)(end - begin));
    if ((size_t)end > data_bytes)
        return safetensors_fail_(t, err,
                                 "ends at byte %lld of the data, of which the file has %zu: it was cut short",
                                 (long long)end, data_bytes);
    t->begin = (size_t)begin;
    return true;
}

static inline int safetensors_compare_(const void* a, const void* b) {
    const SafeTensor *s = (const SafeTensor*)a, *t = (const SafeTensor*)b;
    if (s->begin != t->begin) return s->begin < t->begin ? -1 : 1;
    if (s->bytes != t->bytes) return s->bytes < t->bytes ? -1 : 1; // an empty tensor lies before a full one
    return strcmp(s->name, t->name);
}

// Reads the header, n bytes of text, of a file with so much data into an st of which only the path is set.
// Tensors get their place in the data, but no pointer to it.
static inline bool safetensors_parse_(Safetensors* st, const char* text, size_t n, size_t data_bytes,
                                      Error* err) {
    char source[512];
    snprintf(source, sizeof source, "%.400s, header", st->path);
    Json* h = &st->header;
    if (!json_parse(h, source, text, n, err)) return false;
    // the format wants the bracket first, so that no other format can be taken for this one
    if (text[0] != '{') return fail(err, "%s: does not begin with '{'", source);

    int metadata = json_get(h, 0, "__metadata__");
    if (metadata >= 0 && !json_is(h, metadata, JSON_OBJECT))
        return fail(err, "%s: '__metadata__' is no object", source);
    for (int item = json_first(h, metadata); item >= 0; item = json_next(h, item))
        if (!json_is(h, item, JSON_STRING))
            return fail(err, "%s: '__metadata__' holds something not a string", source);

    st->tensors = (SafeTensor*)xcalloc((size_t)json_count(h, 0), sizeof *st->tensors);
    for (int node = json_first(h, 0); node >= 0; node = json_next(h, node)) {
        if (node == metadata) continue;
        SafeTensor* t = &st->tensors[st->count++];
        t->name = json_key(h, node);
        t->path = st->path;
        if (!safetensors_parse_tensor_(h, node, data_bytes, t, err)) return false;
    }

    size_t covered = 0;
    qsort(st->tensors, (size_t)st->count, sizeof *st->tensors, safetensors_compare_);
    st->of_node = (const SafeTensor**)xcalloc((size_t)h->count, sizeof *st->of_node);
    for (int i = 0; i < st->count; i++) {
        const SafeTensor* t = &st->tensors[i];
        if (t->begin != covered)
            return safetensors_fail_(t, err, "begins at byte %zu of the data: %s", t->begin,
                                     t->begin < covered ? "overlaps the tensor before"
                                                        : "leaves a hole before it");
        covered += t->bytes;
        st->of_node[json_get(h, 0, t->name)] = t;
    }
    if (covered < data_bytes)
        return fail(err, "%s: %zu bytes at the end of the file belong to no tensor", st->path,
                    data_bytes - covered);
    return true;
}

// Finds the header in the mapped file, reads it, and points every tensor to its data.
static inline bool safetensors_parse_map_(Safetensors* st, Error* err) {
    const char* file = (const char*)st->map;
    uint64_t header;
    memcpy(&header, file, sizeof header);
    size_t rest = st->map_bytes - sizeof header;
    if (header > SAFETENSORS_MAX_HEADER || header > rest)
        return fail(err,
                    "%s: its header claims %llu bytes, the file has %zu: cut short, or no safetensors file",
                    st->path, (unsigned long long)header, st->map_bytes);
    const char* data = file + sizeof header + header;
    if (!safetensors_parse_(st, file + sizeof header, header, rest - header, err)) return false;
    for (int i = 0; i < st->count; i++) st->tensors[i].data = data + st->tensors[i].begin;
    return true;
}

// Unmaps the file, with which all its tensors go; harmless on one that is empty or was closed.
static inline void safetensors_close(Safetensors* st) {
    if (st->map) munmap(st->map, st->map_bytes);
    json_free(&st->header);
    free(st->tensors);
    free(st->of_node);
    free(st->path);
    memset(st, 0, sizeof *st);
}

// Maps a file and checks its header. Walk st->tensors[0 .. st->count-1] for all of it. On error st is empty.
static inline bool safetensors_open(Safetensors* st, const char* path, Error* err) {
    struct stat info;
    memset(st, 0, sizeof *st);
    int fd = open(path, O_RDONLY);
    if (fd < 0) return fail(err, "%s: cannot open: %s", path, strerror(errno));
    bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    size_t bytes = regular ? (size_t)info.st_size : 0;
    void* map = bytes >= 8 ? mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    int why = errno;
    close(fd);
    if (!regular) return fail(err, "%s: is no regular file", path);
    if (bytes < 8) return fail(err, "%s: %zu bytes are too few for a safetensors file", path, bytes);
    if (map == MAP_FAILED) return fail(err, "%s: cannot map into memory: %s", path, strerror(why));
    st->path = xstrdup(path);
    st->map = map;
    st->map_bytes = bytes;
    bool ok = safetensors_parse_map_(st, err);
    if (!ok) safetensors_close(st);
    return ok;
}

// The tensor of this name, or NULL. Valid until the file is closed.
static inline const SafeTensor* safetensors_find(const Safetensors* st, const char* name) {
    int node = json_get(&st->header, 0, name);
    return node < 0 ? NULL : st->of_node[node];
}

// The metadata under this key, or NULL. Valid until the file is closed.
static inline const char* safetensors_metadata(const Safetensors* st, const char* key) {
    return json_string(&st->header, json_get(&st->header, json_get(&st->header, 0, "__metadata__"), key));
}

// ----------------------------------------------------------------------------
// reading the weights of a Hugging Face folder: model.safetensors, or several shards that an index lists

typedef struct {
    Safetensors* files;
    int count;
} SafetensorsSet;

// Closes all files; harmless on a set that is empty or was closed.
static inline void safetensors_set_close(SafetensorsSet* set) {
    for (int i = 0; i < set->count; i++) safetensors_close(&set->files[i]);
    free(set->files);
    memset(set, 0, sizeof *set);
}

// The open file of this path, which is opened if it is not yet; NULL on error.
static inline const Safetensors* safetensors_set_file_(SafetensorsSet* set, const char* path, Error* err) {
    for (int i = 0; i < set->count; i++)
        if (strcmp(set->files[i].path, path) == 0) return &set->files[i];
    set->files = (Safetensors*)xrealloc(set->files, (size_t)(set->count + 1) * sizeof *set->files);
    if (!safetensors_open(&set->files[set->count], path, err)) return NULL;
    return &set->files[set->count++];
}

// Opens the shards that the index names. Index and shards must agree on which tensor is where.
static inline bool safetensors_set_open_shards_(SafetensorsSet* set, const char* folder,
                                                const char* index_path, const Json* index, Error* err) {
    int map = json_get(index, 0, "weight_map"), tensors = 0;
    if (!json_is(index, map, JSON_OBJECT))
        return fail(err, "%s: 'weight_map' is missing or no object", index_path);
    for (int item = json_first(index, map); item >= 0; item = json_next(index, item)) {
        char path[PATH_LENGTH];
        const char *name = json_key(index, item), *shard = json_string(index, item);
        bool plain = shard && shard[0] && !strchr(shard, '/'); // nothing outside of the folder
        if (!plain)
            return fail(err, "%s: '%.200s' is not mapped to the name of a file in this folder", index_path,
                        name);
        path_join(path, folder, shard);
        const Safetensors* file = safetensors_set_file_(set, path, err);
        if (!file) return false;
        if (!safetensors_find(file, name))
            return fail(err, "%s: should hold '%.200s', as the index beside it says, but does not", path,
                        name);
    }
    for (int i = 0; i < set->count; i++) tensors += set->files[i].count;
    if (tensors != json_count(index, map))
        return fail(err, "%s: lists %d tensors, but the shards hold %d", index_path, json_count(index, map),
                    tensors);
    return true;
}

// Opens FOLDER/model.safetensors, or else the shards of FOLDER/model.safetensors.index.json. Walk set->files
// and their tensors for all of it. On error the set is empty.
static inline bool safetensors_set_open(SafetensorsSet* set, const char* folder, Error* err) {
    char single[PATH_LENGTH], index_path[PATH_LENGTH];
    Json index;
    memset(set, 0, sizeof *set);
    path_join(single, folder, "model.safetensors");
    path_join(index_path, folder, "model.safetensors.index.json");
    bool ok;
    if (access(single, F_OK) == 0) {
        ok = safetensors_set_file_(set, single, err) != NULL;
    } else if (access(index_path, F_OK) == 0) {
        if (!json_parse_file(&index, index_path, err)) return false;
        ok = safetensors_set_open_shards_(set, folder, index_path, &index, err);
        json_free(&index);
    } else {
        ok = fail(err, "%s: holds neither model.safetensors nor model.safetensors.index.json", folder);
    }
    if (!ok) safetensors_set_close(set);
    return ok;
}

// The tensor of this name in any file of the set, or NULL. Valid until the set is closed.
static inline const SafeTensor* safetensors_set_find(const SafetensorsSet* set, const char* name) {
    const SafeTensor* t = NULL;
    for (int i = 0; i < set->count && !t; i++) t = safetensors_find(&set->files[i], name);
    return t;
}

// ----------------------------------------------------------------------------
// writing: open, metadata and declare in any order, begin, write, close. After a failure all later calls do
// nothing and fail with the same message, so checking the answer of close is enough. Always close: it frees.

typedef struct {
    char* path;
    FILE* file;
    SafeTensor* tensors; // as declared, names our own
    int count;
    char** metadata; // key, value, key, value ...
    int metadata_count;
    bool begun;
    int current; // the tensor being written
    size_t left; // bytes that are still to come of it
    Error error; // the first failure; empty while there is none
} SafetensorsWriter;

// Whether nothing has failed so far; fills err if something has.
static inline bool safetensors_writer_ok_(const SafetensorsWriter* w, Error* err) {
    if (w->error.msg[0] == '\0') return true;
    *err = w->error;
    return false;
}

// Creates the file, or empties it. In place a crash would cost the old content: give a temporary name, and
// rename the file after close.
static inline bool safetensors_writer_open(SafetensorsWriter* w, const char* path, Error* err) {
    memset(w, 0, sizeof *w);
    w->path = xstrdup(path);
    w->file = fopen(path, "wb");
    if (!w->file) fail(&w->error, "%s: cannot create: %s", path, strerror(errno));
    return safetensors_writer_ok_(w, err);
}

// Adds an entry to "__metadata__". {"format": "pt"} is what transformers insists on.
static inline void safetensors_writer_metadata(SafetensorsWriter* w, const char* key, const char* value) {
    assert(!w->begun);
    w->metadata = (char**)xrealloc(w->metadata, (size_t)(w->metadata_count + 1) * 2 * sizeof *w->metadata);
    w->metadata[2 * w->metadata_count] = xstrdup(key);
    w->metadata[2 * w->metadata_count + 1] = xstrdup(value);
    w->metadata_count++;
}

// Adds a tensor behind those declared so far; shape has ndim sizes. What is wrong with it, begin reports.
static inline void safetensors_writer_declare(SafetensorsWriter* w, const char* name, SafetensorsDtype dtype,
                                              int ndim, const int64_t* shape) {
    assert(!w->begun && ndim >= 0 && ndim <= SAFETENSORS_MAX_DIMS);
    w->tensors = (SafeTensor*)xrealloc(w->tensors, (size_t)(w->count + 1) * sizeof *w->tensors);
    SafeTensor* t = &w->tensors[w->count++];
    memset(t, 0, sizeof *t);
    t->name = xstrdup(name);
    t->path = w->path;
    t->dtype = dtype;
    t->ndim = ndim;
    for (int i = 0; i < ndim; i++) t->shape[i] = shape[i];
}

// Makes the header's text and checks it with the reader's eyes: what we write, we can read.
static inline bool safetensors_writer_header_(SafetensorsWriter* w, JsonWriter* header) {
    size_t bytes = 0;
    json_begin_object(header, NULL);
    if (w->metadata_count > 0) {
        json_begin_object(header, "__metadata__");
        for (int i = 0; i < w->metadata_count; i++)
            json_put_string(header, w->metadata[2 * i], w->metadata[2 * i + 1]);
        json_end(header);
    }
    for (int i = 0; i < w->count; i++) {
        SafeTensor* t = &w->tensors[i];
        if (!safetensors_measure_(t, &w->error)) return false;
        json_begin_object(header, t->name);
        json_put_string(header, "dtype", safetensors_dtype_name(t->dtype));
        json_begin_array(header, "shape");
        for (int k = 0; k < t->ndim; k++) json_put_int(header, NULL, t->shape[k]);
        json_end(header);
        json_begin_array(header, "data_offsets");
        json_put_int(header, NULL, (int64_t)bytes);
        json_put_int(header, NULL, (int64_t)(bytes += t->bytes));
        json_end(header);
        json_end(header);
    }
    json_end(header);
    while ((sizeof(uint64_t) + header->length) % SAFETENSORS_ALIGNMENT != 0) json_append_(header, " ", 1);
    if (header->length > SAFETENSORS_MAX_HEADER)
        return fail(&w->error, "%s: its header would be larger than %d bytes", w->path,
                    SAFETENSORS_MAX_HEADER);

    Safetensors st;
    memset(&st, 0, sizeof st);
    st.path = xstrdup(w->path);
    bool ok = safetensors_parse_(&st, header->text, header->length, bytes, &w->error);
    safetensors_close(&st);
    return ok;
}

static inline bool safetensors_writer_put_(SafetensorsWriter* w, const void* data, size_t bytes) {
    if (bytes == 0 || fwrite(data, 1, bytes, w->file) == bytes) return true;
    return fail(&w->error, "%s: cannot write: %s", w->path, strerror(errno));
}

// Ends the declarations and writes the header. An error if a declaration is bad or two tensors have one name.
static inline bool safetensors_writer_begin(SafetensorsWriter* w, Error* err) {
    assert(!w->begun);
    w->begun = true;
    if (!safetensors_writer_ok_(w, err)) return false;
    JsonWriter header = json_writer(0);
    if (safetensors_writer_header_(w, &header)) {
        uint64_t length = header.length;
        if (safetensors_writer_put_(w, &length, sizeof length))
            safetensors_writer_put_(w, header.text, header.length);
        w->left = w->count ? w->tensors[0].bytes : 0;
    }
    json_writer_free(&header);
    return safetensors_writer_ok_(w, err);
}

// Steps over the tensors of which nothing is left to write.
static inline void safetensors_writer_advance_(SafetensorsWriter* w) {
    while (w->left == 0 && w->current < w->count)
        w->left = ++w->current < w->count ? w->tensors[w->current].bytes : 0;
}

// Writes the next bytes of the current tensor, all of it or a piece. A piece that reaches beyond the tensor's
// end is an error: one was written short or long, or the order is not that of the declarations.
static inline bool safetensors_writer_write(SafetensorsWriter* w, const void* data, size_t bytes,
                                            Error* err) {
    assert(w->begun);
    if (!safetensors_writer_ok_(w, err)) return false;
    safetensors_writer_advance_(w);
    if (bytes <= w->left) {
        if (safetensors_writer_put_(w, data, bytes)) w->left -= bytes;
    } else if (w->current < w->count) {
        safetensors_fail_(&w->tensors[w->current], &w->error, "got %zu bytes, but only %zu are left to write",
                          bytes, w->left);
    } else {
        fail(&w->error, "%s: got %zu bytes more than all its tensors have", w->path, bytes);
    }
    return safetensors_writer_ok_(w, err);
}

// Flushes the file to the disk, closes it, and frees the writer. An error if any call failed before, or data
// is missing: the file is then useless, and for the caller to remove.
static inline bool safetensors_writer_close(SafetensorsWriter* w, Error* err) {
    if (safetensors_writer_ok_(w, err)) {
        safetensors_writer_advance_(w);
        if (!w->begun)
            fail(&w->error, "%s: closed before anything was written", w->path);
        else if (w->left > 0)
            safetensors_fail_(&w->tensors[w->current], &w->error,
                              "the last %zu of its %zu bytes were not written", w->left,
                              w->tensors[w->current].bytes);
    }
    if (w->file && !safetensors_writer_ok_(w, err))
        fclose(w->file);
    else if (w->file)
        flush_and_close(w->file, w->path, &w->error);
    bool ok = safetensors_writer_ok_(w, err);
    for (int i = 0; i < w->count; i++) free((void*)w->tensors[i].name);
    for (int i = 0; i < 2 * w->metadata_count; i++) free(w->metadata[i]);
    free(w->tensors);
    free(w->metadata);
    free(w->path);
    memset(w, 0, sizeof *w);
    return ok;
}

#endif // LLMC_SAFETENSORS_H
