/*
llmc/tokens/shard.h. An accepted shard has exactly the tokens that its header claims, and they are read as
they are in the file, from any position.
*/
#include "fuzz.h"
#include "../../llmc/tokens/shard.h"

// Token i of the file, decoded a second way.
static int32_t token_at(const uint8_t* file, int bytes_per_token, int64_t i) {
    const uint8_t* at = file + 1024 + i * bytes_per_token;
    uint32_t id = 0;
    for (int k = bytes_per_token; k-- > 0;) id = id << 8 | at[k];
    return (int32_t)id;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    ShardHeader h;
    Error err = {""};
    int fd;
    uint8_t* repaired = (uint8_t*)memcpy(xcalloc(bytes + 1, 1), data, bytes);
    if (bytes >= SHARD_HEADER_BYTES &&
        data[1023] != 255) { // the last byte chooses: a right checksum, or that of the input
        int32_t header[SHARD_HEADER_INTS];
        memcpy(header, data, sizeof header);
        header[SHARD_HEADER_INTS - 1] = (int32_t)shard_header_checksum(header);
        memcpy(repaired, header, sizeof header);
    }
    const char* path = file_in_memory(0, repaired, bytes);
    free(repaired);
    if (!shard_open(path, &fd, &err)) die("%s", err.msg);
    if (!shard_read_header_fd(fd, path, &h, &err)) {
        require_message(&err, path);
        close(fd);
        return 0;
    }
    REQUIRE(h.tokens > 0 && h.doc_len >= 0 && h.vocab_size >= 0, "a negative field");
    const int32_t version = token_at(data - 1020, 4, 0);
    REQUIRE(h.bytes_per_token == (version == 1 ? 2 : 4) && h.masked == (version == 3), "version %d", version);
    REQUIRE(bytes == 1024 + (size_t)h.tokens * (size_t)h.bytes_per_token, "%lld tokens in %zu bytes",
            (long long)h.tokens, bytes);
    REQUIRE(h.doc_len == 0 || h.tokens % h.doc_len == 0, "a part of a document");
    for (int64_t first = 0, n = h.tokens; n > 0; first += 1 + first / 2, n = h.tokens - first) {
        int32_t* tokens = (int32_t*)xcalloc((size_t)n, sizeof *tokens);
        REQUIRE(shard_read_tokens(fd, path, &h, first, n, tokens, &err), "%s", err.msg);
        for (int64_t i = 0; i < n; i++)
            REQUIRE(tokens[i] == token_at(data, h.bytes_per_token, first + i), "token %lld",
                    (long long)(first + i));
        free(tokens);
    }
    REQUIRE(h.set_shards == 0 || (h.set_index >= 0 && h.set_index < h.set_shards), "shard %lld of %lld",
            (long long)h.set_index, (long long)h.set_shards);
    REQUIRE(shard_blocks(&h) >= 0 && shard_blocks(&h) <= SHARD_MAX_BLOCKS, "%lld blocks",
            (long long)shard_blocks(&h));
    for (int64_t block = 0; block < shard_blocks(&h); block++) {
        int64_t n = h.block_tokens * h.bytes_per_token, at = block * n, all = h.tokens * h.bytes_per_token;
        if (n > all - at) n = all - at;
        bool same = (uint32_t)(checksum(data + 1024 + at, (size_t)n, at) >> 32) == h.checksums[block];
        REQUIRE(shard_verify_block(fd, path, &h, block, &err) == same, "block %lld", (long long)block);
        if (!same) require_message(&err, path);
    }
    int32_t past;
    REQUIRE(!shard_read_tokens(fd, path, &h, h.tokens, 1, &past, &err), "a token after the last");
    close(fd);
    return 0;
}
