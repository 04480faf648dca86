/*
Safetensors files: reader and writer, for checkpoints, --dump and --maps. safetensors_set.h reads folders.

Layout of a file: the header's length n (uint64, little-endian), n bytes of JSON, the data of all tensors,
row-major. The JSON maps each tensor's name to {"dtype", "shape", "data_offsets": [begin, end]}, with offsets
relative to the start of the data, and "__metadata__" to an object of strings. The tensors must cover the data
without overlaps or gaps.

The reader checks all of this against the file's size on opening. It reads data with pread instead of mmap,
where a file that is truncated meanwhile, or an I/O error, would be a signal.

A file begins with safetensors_header, after which every tensor's place in it is known: several ranks write it
in parts (checkpoints), or safetensors_print all tensors in memory. The same tensors write the same bytes.
Names that end in an underscore are private.
*/
#pragma once

#include "json_writer.h"

enum {
    SAFETENSORS_MAX_DIMS = 8,
    SAFETENSORS_MAX_HEADER = 100 << 20, // bytes
    SAFETENSORS_PIECE = 1 << 16,        // elements converted at a time
    SAFETENSORS_ALIGNMENT = 64          // bytes, of the data written; the format requires 8
};

static_assert(sizeof(size_t) == 8, "files may be larger than 4 GiB");

// ----------------------------------------------------------------------------
// tensors

// ROW(name in a header, bytes of an element); floating-point types first
// clang-format off
#define SAFETENSORS_DTYPE_TABLE(ROW)                                                                         \
    ROW(F64, 8) ROW(F32, 4) ROW(F16, 2) ROW(BF16, 2) ROW(I64, 8) ROW(I32, 4) ROW(I16, 2) ROW(I8, 1)          \
    ROW(U64, 8) ROW(U32, 4) ROW(U16, 2) ROW(U8, 1) ROW(BOOL, 1)
#define DTYPE_ENUM(name, size) SAFETENSORS_##name,
#define DTYPE_ROW(name, size)  {#name, size},

typedef enum { SAFETENSORS_DTYPE_TABLE(DTYPE_ENUM) SAFETENSORS_DTYPES } SafetensorsDtype;

static const struct {
    const char* name; // in a header
    size_t size;      // bytes of an element
} safetensors_dtypes[] = {SAFETENSORS_DTYPE_TABLE(DTYPE_ROW)};
// clang-format on

#undef SAFETENSORS_DTYPE_TABLE
#undef DTYPE_ENUM
#undef DTYPE_ROW

typedef struct {
    const char *name, *path; // path of its file
    SafetensorsDtype dtype;
    int ndim; // 0 for a scalar, whose count is 1
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t count;    // elements
    size_t bytes;     // count times the element's size
    size_t begin;     // offset from the start of the file's data
    const void* data; // of one to write; NULL: bytes [at, at + bytes) of the open file fd
    int fd;
    int64_t at;
} SafeTensor;

// fail(), with the tensor's file and name before the message.
#define TENSOR_FAIL(t, err, format, ...)                                                                     \
    fail(err, "%s: tensor '%.200s': " format, (t)->path, (t)->name, ##__VA_ARGS__)

// Computes count and bytes from dtype and shape.
static inline bool safetensors_measure_(SafeTensor* t, Error* err) {
    int64_t bytes = 0;
    t->count = 1;
    bool fits = true;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0) return TENSOR_FAIL(t, err, "its shape has a negative size");
        fits = fits && !__builtin_mul_overflow(t->count, t->shape[i], &t->count);
    }
    fits = fits && !__builtin_mul_overflow(t->count, (int64_t)safetensors_dtypes[t->dtype].size, &bytes);
    if (!fits) return TENSOR_FAIL(t, err, "its shape is too large");
    t->bytes = (size_t)bytes;
    return true;
}

// ----------------------------------------------------------------------------
// conversion

// The value of an IEEE half-precision float. Its bits, moved to those of a float, are 2^-112 times the value,
// unless that is infinite or not a number. No branch, so that loops vectorise.
static inline float safetensors_f16_(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    bits |= ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) | (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The value of a bfloat16: the upper half of a float.
static inline float safetensors_bf16_(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Element i of `from`, floating-point, converted exactly to double.
static inline double safetensors_element_(SafetensorsDtype dtype, const void* from, int64_t i) {
    size_t size = safetensors_dtypes[dtype].size;
    uint64_t bits = 0;
    double f64;
    float f32;
    memcpy(&bits, (const char*)from + (size_t)i * size, size);
    if (dtype == SAFETENSORS_F16) return (double)safetensors_f16_((uint16_t)bits);
    if (dtype == SAFETENSORS_BF16) return (double)safetensors_bf16_((uint16_t)bits);
    memcpy(&f64, &bits, sizeof f64);
    memcpy(&f32, &bits, sizeof f32);
    return dtype == SAFETENSORS_F64 ? f64 : (double)f32;
}

// Converts from[n] of F16 or BF16 to out[n].
static inline void safetensors_widen_(bool is_bf16, const void* from, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, (const char*)from + 2 * i, sizeof half);
        out[i] = is_bf16 ? safetensors_bf16_(half) : safetensors_f16_(half);
    }
}

// Converts from[n] of a floating-point type to out[n], floats (element_bytes 4) or doubles (8).
static inline void safetensors_convert_(SafetensorsDtype dtype, const void* from, int64_t n, void* out,
                                        int element_bytes) {
    if (element_bytes == 4 && safetensors_dtypes[dtype].size == 2) {
        safetensors_widen_(dtype == SAFETENSORS_BF16, from, n, (float*)out);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        double value = safetensors_element_(dtype, from, i);
        if (element_bytes == 8)
            ((double*)out)[i] = value;
        else
            ((float*)out)[i] = (float)value;
    }
}

// Copies n bytes of a tensor's data from byte `first` on.
static inline bool safetensors_read_bytes(const SafeTensor* t, size_t first, size_t n, void* out,
                                          Error* err) {
    if (t->data && n > 0) memcpy(out, (const char*)t->data + first, n);
    if (t->data || read_at(t->fd, out, n, t->at + (int64_t)first) == n) return true;
    if (errno != 0) return TENSOR_FAIL(t, err, "cannot read: %s", strerror(errno));
    return TENSOR_FAIL(t, err, "the file was truncated while it was read");
}

// Converts elements [first, first + n) of a floating-point tensor to out[n], floats (element_bytes 4) or
// doubles (8). Exact except from F64 to float, which is rounded. For a tensor of another type, fails and
// leaves out unchanged. The caller checks the range.
static inline bool safetensors_read_range(const SafeTensor* t, int64_t first, int64_t n, void* out,
                                          int element_bytes, Error* err) {
    assert(first >= 0 && n >= 0 && first <= t->count - n);
    if (t->dtype > SAFETENSORS_BF16)
        return TENSOR_FAIL(t, err, "has type %s; expected F64, F32, F16 or BF16",
                           safetensors_dtypes[t->dtype].name);
    const size_t size = safetensors_dtypes[t->dtype].size;
    if (t->dtype == (element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32))
        return safetensors_read_bytes(t, (size_t)first * size, (size_t)n * size, out, err);
    void* piece = xrealloc(NULL, SAFETENSORS_PIECE * size);
    bool ok = true;
    for (int64_t i = 0; ok && i < n; i += SAFETENSORS_PIECE) {
        const int64_t count = n - i < SAFETENSORS_PIECE ? n - i : (int64_t)SAFETENSORS_PIECE;
        ok = safetensors_read_bytes(t, (size_t)(first + i) * size, (size_t)count * size, piece, err);
        if (ok) safetensors_convert_(t->dtype, piece, count, (char*)out + i * element_bytes, element_bytes);
    }
    free(piece);
    return ok;
}

// The bytes of a tensor of any type. Free with free(). NULL on error.
static inline void* safetensors_bytes(const SafeTensor* t, Error* err) {
    void* bytes = xrealloc(NULL, t->bytes);
    if (safetensors_read_bytes(t, 0, t->bytes, bytes, err)) return bytes;
    free(bytes);
    return NULL;
}

// ----------------------------------------------------------------------------
// reading one file

typedef struct {
    char* path; // NULL: not open
    int fd;
    int64_t data; // where it begins in the file
    Json header;
    SafeTensor* tensors; // in the order of their data
    int count;
} Safetensors;

// Parses the description of a tensor whose name and path are set.
static inline bool safetensors_parse_tensor_(const Json* h, int node, size_t data_bytes, SafeTensor* t,
                                             Error* err) {
    int shape = json_get(h, node, "shape"), offsets = json_get(h, node, "data_offsets");
    const char* dtype = json_string(h, json_get(h, node, "dtype"));
    int64_t begin = -1, end = -1;

    if (!json_is(h, node, JSON_OBJECT)) return TENSOR_FAIL(t, err, "its description is not an object");
    if (!dtype) return TENSOR_FAIL(t, err, "'dtype' is missing or not a string");
    int type = 0;
    while (type < SAFETENSORS_DTYPES && strcmp(dtype, safetensors_dtypes[type].name) != 0) type++;
    if (type == SAFETENSORS_DTYPES) return TENSOR_FAIL(t, err, "type '%.40s' is not supported", dtype);
    t->dtype = (SafetensorsDtype)type;

    if (!json_is(h, shape, JSON_ARRAY)) return TENSOR_FAIL(t, err, "'shape' is missing or not an array");
    if (json_count(h, shape) > SAFETENSORS_MAX_DIMS)
        return TENSOR_FAIL(t, err, "has more than %d dimensions", SAFETENSORS_MAX_DIMS);
    for (int size = json_first(h, shape); size >= 0; size = json_next(h, size))
        if (!json_int64(h, size, &t->shape[t->ndim++]))
            return TENSOR_FAIL(t, err, "its shape has a size that is not an integer");
    if (!safetensors_measure_(t, err)) return false;

    int first = json_first(h, offsets);
    if (!json_is(h, offsets, JSON_ARRAY) || json_count(h, offsets) != 2 || !json_int64(h, first, &begin) ||
        !json_int64(h, json_next(h, first), &end) || begin < 0 || end < begin)
        return TENSOR_FAIL(t, err, "'data_offsets' is missing or not [begin, end] with 0 <= begin <= end");
    if ((size_t)(end - begin) != t->bytes)
        return TENSOR_FAIL(t, err, "its data_offsets span %s, but its type and shape need %zu",
                           counted(end - begin, "byte").text, t->bytes);
    if ((size_t)end > data_bytes)
        return TENSOR_FAIL(t, err,
                           "ends at byte %lld of the data, but the file has only %zu: it is truncated",
                           (long long)end, data_bytes);
    t->begin = (size_t)begin;
    return true;
}

static inline int safetensors_compare_(const void* a, const void* b) {
    const SafeTensor *s = (const SafeTensor*)a, *t = (const SafeTensor*)b;
    if (s->begin != t->begin) return s->begin < t->begin ? -1 : 1;
    if (s->bytes != t->bytes) return s->bytes < t->bytes ? -1 : 1; // an empty tensor precedes a non-empty one
    return strcmp(s->name, t->name);
}

// Parses the header text[n] of a file with data_bytes of data into st, of which path, fd and data are set.
static inline bool safetensors_parse_(Safetensors* st, const char* text, size_t n, size_t data_bytes,
                                      Error* err) {
    char source[512];
    snprintf(source, sizeof source, "%.400s, header", st->path);
    Json* h = &st->header;
    if (!json_parse(h, source, text, n, err)) return false;
    // JSON allows white space before the brace, safetensors does not
    if (text[0] != '{') return fail(err, "%s: does not begin with '{'", source);

    int metadata = json_get(h, 0, "__metadata__");
    if (metadata >= 0 && !json_is(h, metadata, JSON_OBJECT))
        return fail(err, "%s: '__metadata__' is not an object", source);
    for (int item = json_first(h, metadata); item >= 0; item = json_next(h, item))
        if (!json_is(h, item, JSON_STRING))
            return fail(err, "%s: '__metadata__' has a value that is not a string", source);

    st->tensors = (SafeTensor*)xcalloc((size_t)json_count(h, 0), sizeof *st->tensors);
    for (int node = json_first(h, 0); node >= 0; node = json_next(h, node)) {
        if (node == metadata) continue;
        SafeTensor* t = &st->tensors[st->count++];
        t->name = json_key(h, node);
        t->path = st->path;
        t->fd = st->fd;
        if (!safetensors_parse_tensor_(h, node, data_bytes, t, err)) return false;
        t->at = st->data + (int64_t)t->begin;
    }

    size_t covered = 0;
    qsort(st->tensors, (size_t)st->count, sizeof *st->tensors, safetensors_compare_);
    for (int i = 0; i < st->count; i++) {
        const SafeTensor* t = &st->tensors[i];
        if (t->begin != covered)
            return TENSOR_FAIL(t, err, "begins at byte %zu of the data: %s", t->begin,
                               t->begin < covered ? "overlaps the previous tensor"
                                                  : "leaves a gap after the previous tensor");
        covered += t->bytes;
    }
    if (covered < data_bytes)
        return fail(err, "%s: no tensor has the %s at the end of the file", st->path,
                    counted((int64_t)(data_bytes - covered), "byte").text);
    return true;
}

// Closes the file, which invalidates its tensors. May be called on one that is empty or already closed.
static inline void safetensors_close(Safetensors* st) {
    if (st->path && st->fd >= 0) close(st->fd);
    json_free(&st->header);
    free(st->tensors);
    free(st->path);
    memset(st, 0, sizeof *st);
}

// Reads and checks the header of an open file of this size.
static inline bool safetensors_read_header_(Safetensors* st, size_t bytes, Error* err) {
    uint64_t header;
    SafeTensor text = {.name = "header", .path = st->path, .fd = st->fd};
    if (!safetensors_read_bytes(&text, 0, sizeof header, &header, err)) return false;
    const size_t rest = bytes - sizeof header;
    if (header > SAFETENSORS_MAX_HEADER || header > rest)
        return fail(
            err,
            "%s: its header claims a length of %zu, the file has %s: truncated or not a safetensors file",
            st->path, (size_t)header, counted((int64_t)bytes, "byte").text);
    st->data = (int64_t)(sizeof header + header);
    text.at = sizeof header, text.bytes = header;
    char* json = (char*)safetensors_bytes(&text, err);
    const bool ok = json && safetensors_parse_(st, json, header, rest - header, err);
    free(json);
    return ok;
}

// Opens a file and checks its header. All tensors are in st->tensors[0 .. st->count-1]. On error st is empty.
static inline bool safetensors_open(Safetensors* st, const char* path, Error* err) {
    struct stat info;
    memset(st, 0, sizeof *st);
    st->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO would wait for its writer
    if (st->fd < 0) return fail(err, "%s: cannot open: %s", path, strerror(errno));
    st->path = xstrdup(path);
    const bool regular = fstat(st->fd, &info) == 0 && S_ISREG(info.st_mode);
    const size_t bytes = regular ? (size_t)info.st_size : 0;
    bool ok = regular || fail(err, "%s: is not a regular file", path);
    if (ok && bytes < 8)
        ok = fail(err, "%s: has %s, too few for a safetensors file", path,
                  counted((int64_t)bytes, "byte").text);
    ok = ok && safetensors_read_header_(st, bytes, err);
    if (!ok) safetensors_close(st);
    return ok;
}

// The tensor of this name, or NULL. Valid until the file is closed.
static inline const SafeTensor* safetensors_find(const Safetensors* st, const char* name) {
    for (int i = 0; i < st->count; i++)
        if (strcmp(st->tensors[i].name, name) == 0) return &st->tensors[i];
    return NULL;
}

// ----------------------------------------------------------------------------
// writing

// Composes the header's JSON and parses it with the reader, so that every file written can be read. Sets
// path, count, bytes and begin of the tensors.
static inline bool safetensors_put_header_(const char* path, SafeTensor* tensors, int count,
                                           const char* const* metadata, JsonWriter* w, Error* err) {
    size_t bytes = 0;
    json_begin_object(w, NULL);
    json_begin_object(w, "__metadata__");
    json_put_string(w, "format", "pt");
    for (; metadata && *metadata; metadata += 2) json_put_string(w, metadata[0], metadata[1]);
    json_end(w);
    for (int i = 0; i < count; i++) {
        SafeTensor* t = &tensors[i];
        t->path = path;
        if (!safetensors_measure_(t, err)) return false;
        json_begin_object(w, t->name);
        json_put_string(w, "dtype", safetensors_dtypes[t->dtype].name);
        json_begin_array(w, "shape");
        for (int k = 0; k < t->ndim; k++) json_put_int(w, NULL, t->shape[k]);
        json_end(w);
        json_begin_array(w, "data_offsets");
        t->begin = bytes;
        json_put_int(w, NULL, (int64_t)bytes);
        json_put_int(w, NULL, (int64_t)(bytes += t->bytes));
        json_end(w);
        json_end(w);
    }
    json_end(w);
    while ((sizeof(uint64_t) + w->length) % SAFETENSORS_ALIGNMENT != 0) json_append_(w, " ", 1);
    if (w->length > SAFETENSORS_MAX_HEADER)
        return fail(err, "%s: its header would be larger than %d bytes", path, SAFETENSORS_MAX_HEADER);

    Safetensors st = {.path = xstrdup(path), .fd = -1}; // there is no file yet
    bool ok = safetensors_parse_(&st, w->text, w->length, bytes, err);
    safetensors_close(&st);
    return ok;
}

// A tensor to be written, of shape[ndim]. Name and data belong to the caller.
static inline SafeTensor safetensors_tensor(const char* name, SafetensorsDtype dtype, int ndim,
                                            const int64_t* shape, const void* data) {
    SafeTensor t = {.name = name, .dtype = dtype, .ndim = ndim, .data = data};
    assert(ndim >= 0 && ndim <= SAFETENSORS_MAX_DIMS);
    for (int i = 0; i < ndim; i++) t.shape[i] = shape[i];
    return t;
}

// The first *bytes bytes of a file of these tensors, in this order: the header with its length. Tensor i
// follows at byte *bytes + tensors[i].begin of the file. Sets path, count, bytes and begin of the tensors.
// "__metadata__" has "format": "pt", which Hugging Face transformers requires, and what `metadata` lists: a
// key, its value, and so on to a NULL. NULL: nothing.
//
// Free with free(). NULL on error: a shape is invalid or a name occurs twice.
static inline char* safetensors_header(const char* path, SafeTensor* tensors, int count,
                                       const char* const* metadata, size_t* bytes, Error* err) {
    JsonWriter w = json_writer(0);
    char* header = NULL;
    if (safetensors_put_header_(path, tensors, count, metadata, &w, err)) {
        uint64_t length = w.length;
        *bytes = sizeof length + w.length;
        header = (char*)xrealloc(NULL, *bytes);
        memcpy(header, &length, sizeof length);
        memcpy(header + sizeof length, w.text, w.length);
    }
    json_writer_free(&w);
    return header;
}

// Writes a header and the data of its tensors. What closes the stream reports errors.
static inline void safetensors_print(const char* header, size_t header_bytes, const SafeTensor* tensors,
                                     int count, FILE* f) {
    fwrite(header, 1, header_bytes, f);
    for (int i = 0; i < count && !ferror(f); i++)
        if (tensors[i].bytes > 0) fwrite(tensors[i].data, 1, tensors[i].bytes, f);
}

#undef TENSOR_FAIL
