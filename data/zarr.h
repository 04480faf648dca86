/*
Zarr, as much of it as LongCrawl64 is: a folder with one version 2 array of little-endian uint16 in two
dimensions, described by .zarray and cut into chunks of equal shape. Chunk (r, c) is the file `r.c`, packed
with blosc (lz4 after a byte shuffle); a chunk at the edge is a full one, whose surplus means nothing.
*/
#ifndef DATA_ZARR_H
#define DATA_ZARR_H

#include <blosc.h>

#include "../llmc/base/common.h"
#include "../llmc/formats/json.h"

typedef struct {
    int64_t rows, columns;             // of the array
    int64_t chunk_rows, chunk_columns; // of a chunk
} ZarrArray;

static inline size_t zarr_chunk_bytes(const ZarrArray* a) {
    return (size_t)(a->chunk_rows * a->chunk_columns) * sizeof(uint16_t);
}

// The longest that a chunk's file can be: blosc stores what it cannot compress.
static inline size_t zarr_chunk_max_file(const ZarrArray* a) {
    return zarr_chunk_bytes(a) + BLOSC_MAX_OVERHEAD;
}

// ----------------------------------------------------------------------------
// .zarray

static inline bool zarr_get_size(const Json* j, int node, int64_t* size) {
    return json_int64(j, node, size) && *size > 0 && *size <= INT32_MAX;
}

// Reads the two sizes of "shape" or "chunks".
static inline bool zarr_get_sizes(const Json* j, const char* key, int64_t* first, int64_t* second) {
    int list = json_get(j, 0, key), item = json_first(j, list);
    return json_is(j, list, JSON_ARRAY) && json_count(j, list) == 2 && zarr_get_size(j, item, first) &&
           zarr_get_size(j, json_next(j, item), second);
}

static inline bool zarr_is_int(const Json* j, int node, int64_t expected) {
    int64_t value;
    return json_int64(j, node, &value) && value == expected;
}

static inline bool zarr_is_string(const Json* j, int node, const char* expected) {
    const char* value = json_string(j, node);
    return value && strcmp(value, expected) == 0;
}

// Reads the text of a .zarray. What we could not read, or would read wrongly, is an error that names the key.
static inline bool zarr_parse(ZarrArray* a, const char* source, const char* text, size_t n, Error* err) {
    Json j;
    if (!json_parse(&j, source, text, n, err)) return false;
    int filters = json_get(&j, 0, "filters"), separator = json_get(&j, 0, "dimension_separator");
    int compressor = json_get(&j, 0, "compressor");
    const char* wrong = NULL;
    memset(a, 0, sizeof *a);
    if (!zarr_is_int(&j, json_get(&j, 0, "zarr_format"), 2))
        wrong = "zarr_format must be 2";
    else if (!zarr_get_sizes(&j, "shape", &a->rows, &a->columns))
        wrong = "shape must be two sizes";
    else if (!zarr_get_sizes(&j, "chunks", &a->chunk_rows, &a->chunk_columns))
        wrong = "chunks must be two sizes";
    else if (a->chunk_rows > BLOSC_MAX_BUFFERSIZE / 2 / a->chunk_columns)
        wrong = "chunks must be below 2 GiB";
    else if (!zarr_is_string(&j, json_get(&j, 0, "dtype"), "<u2"))
        wrong = "dtype must be \"<u2\"";
    else if (!zarr_is_string(&j, json_get(&j, 0, "order"), "C"))
        wrong = "order must be \"C\"";
    else if (filters >= 0 && !json_is_null(&j, filters))
        wrong = "filters must be null";
    else if (separator >= 0 && !zarr_is_string(&j, separator, "."))
        wrong = "dimension_separator must be \".\"";
    else if (!zarr_is_string(&j, json_get(&j, compressor, "id"), "blosc"))
        wrong = "compressor must have id \"blosc\"";
    else if (!zarr_is_string(&j, json_get(&j, compressor, "cname"), "lz4"))
        wrong = "compressor must have cname \"lz4\"";
    else if (!zarr_is_int(&j, json_get(&j, compressor, "shuffle"), 1))
        wrong = "compressor must have shuffle 1";
    json_free(&j);
    return wrong ? fail(err, "%s: unlike LongCrawl64: %s", source, wrong) : true;
}

// ----------------------------------------------------------------------------
// chunks

// Unpacks the chunk in a file's n bytes into out[chunk_rows][chunk_columns]. What is wrong with the bytes, as
// far as blosc can tell, is an error, and err does not name the file. Many threads may call this at once.
static inline bool zarr_decode(const ZarrArray* a, const void* file, size_t n, uint16_t* out, Error* err) {
    size_t expected = zarr_chunk_bytes(a), plain, packed, block;
    if (n < BLOSC_MIN_HEADER_LENGTH) return fail(err, "%zu bytes are no blosc chunk", n);
    blosc_cbuffer_sizes(file, &plain, &packed, &block);
    if (packed != n) return fail(err, "its blosc header says %zu bytes, the file has %zu", packed, n);
    if (plain != expected)
        return fail(err, "its blosc header says %zu bytes unpacked, a chunk has %zu", plain, expected);
    if (blosc_cbuffer_validate(file, n, &plain) != 0) return fail(err, "its blosc header is damaged");
    int got = blosc_decompress_ctx(file, out, expected, 1);
    if (got < 0 || (size_t)got != expected) return fail(err, "blosc cannot unpack it: the data is damaged");
    return true;
}

#endif // DATA_ZARR_H
