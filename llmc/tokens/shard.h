/*
Data shards: the token files that the trainers read (dataloader.h) and data/shard_writer.h writes.

A shard has llm.c's format: a header of 256 little-endian int32, then the tokens as little-endian uint16
(version 1) or uint32 (version 2). Version 3 has a mask: of a uint32, bit 31 says that the token counts as a
target, the others are its id. Fields of the header:
  [0] magic number 20240520    [1] version    [2] number of tokens
  [3] document length: the shard consists of documents of exactly this many tokens; 0: it is one token stream
  [4] vocabulary size, above every token id; 0: unknown
  [5] number of shards in the set; 0: unknown    [6] index in the set    [7, 8] id of the set, a hash of its tokens
  [9] tokens per block, even; 0: no checksums    [10 .. 249] checksums of the blocks
  [250, 251] hash of the vocabulary (vocab_hash.h); 0: unknown
  [255] checksum of the fields before it; 0 if all of [5 .. 254] are 0
The other fields are 0. llm.c's own files have 0 in [3] and all following, and are valid shards.

A set is the shards that one conversion wrote for one split. The loader refuses a set that is not complete. A
checksum covers the bytes of a block of tokens; the loader verifies a block before it uses a token of it.

A shard with its final name is complete: the writer renames it after it is written through to the disk.
*/
#pragma once

#include "../base/checksum.h"
#include "../base/common.h"

enum {
    SHARD_MAGIC = 20240520,
    SHARD_HEADER_INTS = 256,
    SHARD_HEADER_BYTES = SHARD_HEADER_INTS * 4,
    SHARD_PIECE_BYTES = 65536, // read at a time, to check or compare
    SHARD_MAX_INDEX = 999999,  // six digits in the name, so that shards sort by index
    SHARD_MAX_BLOCKS = 240
};

static const uint32_t SHARD_COUNTS = 1u << 31; // version 3: this token counts as a target

typedef struct {
    int64_t tokens;
    int64_t doc_len;    // 0: one token stream
    int64_t vocab_size; // 0: unknown
    int bytes_per_token;
    bool masked;                   // version 3: tokens have SHARD_COUNTS, or count for nothing
    int64_t set_shards, set_index; // shards in the set, 0: unknown; index of this one
    uint64_t set_id;
    int64_t block_tokens; // 0: no checksums
    uint32_t checksums[SHARD_MAX_BLOCKS];
    uint64_t vocab_hash; // 0: unknown
} ShardHeader;

// The number of blocks with a checksum.
static inline int64_t shard_blocks(const ShardHeader* h) {
    return h->block_tokens ? (h->tokens - 1) / h->block_tokens + 1 : 0;
}

// Whether two shards have the same set, and thus belong to one conversion.
static inline bool shard_same_set(const ShardHeader* a, const ShardHeader* b) {
    return a->set_shards > 0 && a->set_shards == b->set_shards && a->set_id == b->set_id;
}

// Whether two headers describe the same tokens, as far as they tell.
static inline bool shard_same_tokens(const ShardHeader* a, const ShardHeader* b) {
    return a->tokens == b->tokens && a->doc_len == b->doc_len && a->bytes_per_token == b->bytes_per_token &&
           a->masked == b->masked && a->block_tokens == b->block_tokens &&
           memcmp(a->checksums, b->checksums, (size_t)shard_blocks(a) * sizeof *a->checksums) == 0;
}

// The checksum of the first 255 fields; 0 if those from the fifth on are 0, as in a file of llm.c.
static inline uint32_t shard_header_checksum(const int32_t* header) {
    for (int i = 5; i < SHARD_HEADER_INTS - 1; i++)
        if (header[i]) return (uint32_t)(checksum(header, SHARD_HEADER_BYTES - 4, 0) >> 32);
    return 0;
}

// ----------------------------------------------------------------------------
// reading

// Ends messages about files that are no shards: the user may have given the text itself.
static const char shards_how[] = "; data/README.md tells how to make shards";

// Opens a shard for reading. Rejects anything but a regular file: opening a pipe would block until it has a
// writer.
static inline bool shard_open(const char* path, int* fd, Error* err) {
    struct stat st;
    bool there = stat(path, &st) == 0;
    if (there && !S_ISREG(st.st_mode)) return fail(err, "%s: is not a regular file%s", path, shards_how);
    *fd = there ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    return *fd >= 0 ? true : fail(err, "%s: cannot open: %s", path, strerror(errno));
}

// Reads `bytes` bytes at `offset`. A file that ends before was truncated after its header was checked; this
// is an error.
static inline bool shard_pread(int fd, const char* path, void* out, size_t bytes, int64_t offset,
                               Error* err) {
    const size_t got = read_at(fd, out, bytes, offset);
    if (got == bytes) return true;
    if (errno != 0) return fail(err, "%s: cannot read: %s", path, strerror(errno));
    return fail(err, "%s: ends at byte %lld, before the last token; was it truncated while in use?", path,
                (long long)offset + (long long)got);
}

// For the error message: the kind of llm.c file that has this magic number, or how shards are made.
static inline const char* shard_other_magic(int32_t magic) {
    switch (magic) {
    case 20240801: return " (a Llama 3 token file of llm.c; convert it to a version 2 shard)";
    case 20240522: return " (an evaluation set of llm.c)";
    case 20240326: return " (a model of llm.c)";
    case 20240328: return " (a tokenizer of llm.c)";
    default: return shards_how;
    }
}

// Takes the fields of the set, of the checksums and of the vocabulary from a header whose other fields are in
// *h.
static inline bool shard_unpack_checks(ShardHeader* h, const int32_t* header, const char* path, Error* err) {
    h->set_shards = header[5];
    h->set_index = header[6];
    memcpy(&h->set_id, header + 7, sizeof h->set_id);
    h->block_tokens = header[9];
    memcpy(h->checksums, header + 10, sizeof h->checksums);
    memcpy(&h->vocab_hash, header + 250, sizeof h->vocab_hash);
    if ((uint32_t)header[SHARD_HEADER_INTS - 1] != shard_header_checksum(header))
        return fail(err, "%s: damaged header: its checksum is wrong", path);
    bool set = h->set_shards == 0 || (h->set_index >= 0 && h->set_index < h->set_shards);
    bool blocks = h->block_tokens >= 0 && h->block_tokens % 2 == 0 && shard_blocks(h) <= SHARD_MAX_BLOCKS;
    return set && blocks ? true : fail(err, "%s: damaged header: invalid set or blocks", path);
}

// Reads the header of the open shard `path` and checks its consistency, also with the size of the file. On
// error *h is undefined.
static inline bool shard_read_header_fd(int fd, const char* path, ShardHeader* h, Error* err) {
    struct stat st;
    int32_t header[SHARD_HEADER_INTS];
    if (fstat(fd, &st) != 0) return fail(err, "%s: cannot stat: %s", path, strerror(errno));
    if (st.st_size == 0) return fail(err, "%s: is empty", path);
    if (st.st_size < SHARD_HEADER_BYTES)
        return fail(err, "%s: has %s, which is less than the header of a data shard (%d)%s", path,
                    counted(st.st_size, "byte").text, SHARD_HEADER_BYTES, shards_how);
    if (!shard_pread(fd, path, header, sizeof header, 0, err)) return false;
    if (header[0] != SHARD_MAGIC)
        return fail(err, "%s: is not a data shard: starts with %d, not %d%s", path, header[0], SHARD_MAGIC,
                    shard_other_magic(header[0]));
    if (header[1] < 1 || header[1] > 3)
        return fail(err,
                    "%s: is a data shard of version %d; supported are 1 (uint16), 2 (uint32) and 3 (uint32 "
                    "with a mask)",
                    path, header[1]);
    h->bytes_per_token = header[1] == 1 ? 2 : 4;
    h->masked = header[1] == 3;
    h->tokens = header[2];
    h->doc_len = header[3];
    h->vocab_size = header[4];
    if (h->tokens < 0 || h->doc_len < 0 || h->vocab_size < 0)
        return fail(err, "%s: damaged header: %s, document length %lld, vocabulary size %lld", path,
                    counted(h->tokens, "token").text, (long long)h->doc_len, (long long)h->vocab_size);
    if (h->tokens == 0) return fail(err, "%s: contains no tokens", path);
    int64_t body = (int64_t)st.st_size - SHARD_HEADER_BYTES, expected = h->tokens * h->bytes_per_token;
    if (body != expected)
        return fail(err, "%s: is %s: its header claims %s of %s, %lld follow (%s)", path,
                    body < expected ? "truncated" : "too long", counted(h->tokens, "token").text,
                    counted(h->bytes_per_token, "byte").text, (long long)(body / h->bytes_per_token),
                    counted(body, "byte").text);
    if (h->doc_len > 0 && h->tokens % h->doc_len != 0)
        return fail(err, "%s: damaged header: %s, not a whole number of documents of %lld", path,
                    counted(h->tokens, "token").text, (long long)h->doc_len);
    return shard_unpack_checks(h, header, path, err);
}

// The same for a path.
static inline bool shard_read_header(const char* path, ShardHeader* h, Error* err) {
    int fd = -1;
    memset(h, 0, sizeof *h);
    if (!shard_open(path, &fd, err)) return false;
    bool ok = shard_read_header_fd(fd, path, h, err);
    close(fd);
    return ok;
}

// Reads tokens [first, first + n) of an open shard into out[n]; the range must be within h->tokens. The ids
// are not checked: a uint32 above INT32_MAX, as one that counts in a shard with a mask, becomes negative.
static inline bool shard_read_tokens(int fd, const char* path, const ShardHeader* h, int64_t first, int64_t n,
                                     int32_t* out, Error* err) {
    // uint16 tokens are read into the second half of out and widened in place from the front. Writing out[i]
    // ends at byte 4 (i + 1); the next unread token starts at byte 2 n + 2 (i + 1), which is not before it
    // for i < n.
    size_t bytes = (size_t)n * (size_t)h->bytes_per_token;
    char* raw = (char*)(out + n) - bytes;
    int64_t offset = SHARD_HEADER_BYTES + first * h->bytes_per_token;
    if (!shard_pread(fd, path, raw, bytes, offset, err)) return false;
    if (h->bytes_per_token == 4) return true;
    for (int64_t i = 0; i < n; i++) {
        uint16_t id;
        memcpy(&id, raw + 2 * i, sizeof id);
        out[i] = id;
    }
    return true;
}

// Computes the checksum of a block of an open shard, from the file.
static inline bool shard_block_checksum(int fd, const char* path, const ShardHeader* h, int64_t block,
                                        uint32_t* sum, Error* err) {
    char* piece = (char*)xrealloc(NULL, SHARD_PIECE_BYTES);
    int64_t at = block * h->block_tokens * h->bytes_per_token,
            end = at + h->block_tokens * h->bytes_per_token;
    const int64_t all = h->tokens * h->bytes_per_token;
    uint64_t total = 0;
    bool ok = true;
    if (end > all) end = all;
    while (ok && at < end) {
        const size_t n = end - at < SHARD_PIECE_BYTES ? (size_t)(end - at) : (size_t)SHARD_PIECE_BYTES;
        ok = shard_pread(fd, path, piece, n, SHARD_HEADER_BYTES + at, err);
        if (ok) total += checksum(piece, n, at);
        at += (int64_t)n;
    }
    free(piece);
    *sum = (uint32_t)(total >> 32);
    return ok;
}

// Compares a block of an open shard with its checksum in the header.
static inline bool shard_verify_block(int fd, const char* path, const ShardHeader* h, int64_t block,
                                      Error* err) {
    uint32_t sum;
    if (!shard_block_checksum(fd, path, h, block, &sum, err)) return false;
    if (sum == h->checksums[block]) return true;
    return fail(err,
                "%s: damaged: the block of tokens from %lld on does not have the checksum in the header; "
                "write this data again or restore the file",
                path, (long long)(block * h->block_tokens));
}

// Sets *same to whether two shards with the header *h have the same tokens, from the files.
static inline bool shard_same_content(const char* path, const char* other, const ShardHeader* h, bool* same,
                                      Error* err) {
    char *piece = (char*)xrealloc(NULL, 2 * SHARD_PIECE_BYTES), *other_piece = piece + SHARD_PIECE_BYTES;
    int fd = -1, other_fd = -1;
    const int64_t end = SHARD_HEADER_BYTES + h->tokens * h->bytes_per_token;
    *same = true;
    bool ok = shard_open(path, &fd, err) && shard_open(other, &other_fd, err);
    for (int64_t at = SHARD_HEADER_BYTES; ok && *same && at < end; at += SHARD_PIECE_BYTES) {
        const size_t n = end - at < SHARD_PIECE_BYTES ? (size_t)(end - at) : (size_t)SHARD_PIECE_BYTES;
        ok =
            shard_pread(fd, path, piece, n, at, err) && shard_pread(other_fd, other, other_piece, n, at, err);
        *same = ok && memcmp(piece, other_piece, n) == 0;
    }
    free(piece);
    if (fd >= 0) close(fd);
    if (other_fd >= 0) close(other_fd);
    return ok;
}

// ----------------------------------------------------------------------------
// names of what stands beside a shard

// Writes to out[PATH_LENGTH] the name that shard `index` has beside the shard `path`. False if `path` does
// not end with six digits and .bin.
static inline bool shard_sibling(char* out, const char* path, int64_t index) {
    size_t n = strlen(path);
    if (n < 10 || n >= PATH_LENGTH || index > SHARD_MAX_INDEX) return false;
    const char* number = path + n - 10;
    if (strspn(number, "0123456789") != 6 || strcmp(number + 6, ".bin") != 0) return false;
    memcpy(out, path, n - 10);
    snprintf(out + n - 10, PATH_LENGTH - (n - 10), "%06lld.bin", (long long)index);
    return true;
}

// Writes the path of the tokenizer that belongs to the shard `path` to out[PATH_LENGTH]. False if `path` is
// not a name that shard_path makes.
static inline bool shard_tokenizer_beside(char* out, const char* path) {
    static const char* const ends[2] = {"_train_000000.bin", "_val_000000.bin"};
    if (!shard_sibling(out, path, 0)) return false;
    const size_t n = strlen(out);
    for (int split = 0; split < 2; split++) {
        const size_t end = strlen(ends[split]);
        if (n <= end || strcmp(out + n - end, ends[split]) != 0) continue;
        strcpy(out + n - end, "_tokenizer.json"); // not longer
        return true;
    }
    return false;
}
