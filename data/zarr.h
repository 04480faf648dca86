/*
Reader for the subset of Zarr that LongCrawl64 uses; called by data/longcrawl64.c.

A folder holds one version 2 array: two dimensions, little-endian uint16, row-major, described by the JSON
file .zarray. The array is divided into chunks of equal shape. Chunk (r, c) is the file `r.c`, compressed with
blosc (LZ4 with byte shuffle). Chunks at the edge are full-size; their elements outside the array are
undefined.
*/
#pragma once

#include <blosc.h>

#include "../llmc/base/common.h"
#include "../llmc/formats/json.h"

typedef struct {
    int64_t rows, columns;             // of the array
    int64_t chunk_rows, chunk_columns; // of a chunk
} ZarrArray;

enum { ZARR_MAX_CHUNK = 16 << 20 }; // bytes; LongCrawl64's have half of it. Several threads hold one

static inline size_t zarr_chunk_bytes(const ZarrArray* a) {
    return (size_t)(a->chunk_rows * a->chunk_columns) * sizeof(uint16_t);
}

// The maximum size of a chunk's file: blosc stores incompressible data uncompressed.
static inline size_t zarr_chunk_max_file(const ZarrArray* a) {
    return zarr_chunk_bytes(a) + BLOSC_MAX_OVERHEAD;
}

// ----------------------------------------------------------------------------
// .zarray

static inline bool zarr_get_size(const Json* j, int node, int64_t* size) {
    return json_int64(j, node, size) && *size > 0 && *size <= INT32_MAX;
}

// Parses the two sizes of "shape" or "chunks".
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

// Parses the text of a .zarray. An array outside of the supported subset is an error that names the key.
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
    else if (zarr_chunk_bytes(a) > ZARR_MAX_CHUNK)
        wrong = "chunks must be at most 16 MiB";
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
    return wrong ? fail(err, "%s: not an array of LongCrawl64: %s", source, wrong) : true;
}

// ----------------------------------------------------------------------------
// chunks

// Decompresses the content file[n] of a chunk's file to out[chunk_rows][chunk_columns]. Fails if blosc
// detects damage; err does not name the file. Thread-safe.
static inline bool zarr_decode(const ZarrArray* a, const void* file, size_t n, uint16_t* out, Error* err) {
    size_t expected = zarr_chunk_bytes(a), plain, compressed, block;
    if (n < BLOSC_MIN_HEADER_LENGTH)
        return fail(err, "has %s, too few for a blosc chunk", counted((int64_t)n, "byte").text);
    blosc_cbuffer_sizes(file, &plain, &compressed, &block);
    if (compressed != n)
        return fail(err, "its blosc header claims %s, the file has %zu",
                    counted((int64_t)compressed, "byte").text, n);
    if (plain != expected)
        return fail(err, "its blosc header claims %s uncompressed, a chunk has %zu",
                    counted((int64_t)plain, "byte").text, expected);
    if (blosc_cbuffer_validate(file, n, &plain) != 0) return fail(err, "its blosc header is damaged");
    int got = blosc_decompress_ctx(file, out, expected, 1);
    if (got < 0 || (size_t)got != expected)
        return fail(err, "blosc cannot decompress it: the data is damaged");
    return true;
}
