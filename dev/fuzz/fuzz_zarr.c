/*
data/zarr.h: a .zarray, in an input that begins with a brace, or the file of a chunk of 16 x 32 tokens.
Decoding reads and writes within its buffers, and fills all of the chunk or fails.
*/
#include "fuzz.h"
#include "../../data/zarr.h"

static const ZarrArray array = {64, 64, 16, 32};

static void parse_array(const uint8_t* data, size_t bytes) {
    ZarrArray a;
    Error err = {""};
    if (!zarr_parse(&a, "input", (const char*)data, bytes, &err)) {
        require_message(&err, "input");
        return;
    }
    REQUIRE(a.rows > 0 && a.columns > 0 && a.chunk_rows > 0 && a.chunk_columns > 0, "an empty array");
    __int128 chunk = (__int128)a.chunk_rows * a.chunk_columns * 2;
    REQUIRE(chunk == (__int128)zarr_chunk_bytes(&a) && chunk <= BLOSC_MAX_BUFFERSIZE, "%zu bytes",
            zarr_chunk_bytes(&a));
    REQUIRE(zarr_chunk_max_file(&a) <= INT32_MAX, "%zu bytes", zarr_chunk_max_file(&a));
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    enum { CHUNK_BYTES = 16 * 32 * 2 };
    if (bytes > 0 && data[0] == '{') {
        parse_array(data, bytes);
        return 0;
    }
    if (bytes > zarr_chunk_max_file(&array)) return 0; // refused before by its size
    uint8_t chunks[2][CHUNK_BYTES];
    bool ok[2];
    for (int i = 0; i < 2; i++) { // into memory of zeros and of ones: what is left of it would differ
        Error err = {""};
        const void* file = guarded_copy(0, data, bytes);
        void* out = memset(guarded_copy(1, NULL, CHUNK_BYTES), i ? 255 : 0, CHUNK_BYTES);
        ok[i] = zarr_decode(&array, file, bytes, (uint16_t*)out, &err);
        memcpy(chunks[i], out, CHUNK_BYTES);
        REQUIRE(ok[i] == (err.msg[0] == '\0'), "'%s'", err.msg);
    }
    REQUIRE(ok[0] == ok[1] && (!ok[0] || memcmp(chunks[0], chunks[1], CHUNK_BYTES) == 0),
            "a part of the chunk was not decoded");
    return 0;
}
