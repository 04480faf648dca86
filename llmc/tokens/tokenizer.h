/*
Tokenizers: text to token ids and back, by bytes or by GPT-2's byte-pair encoding (BPE). Used by
data/text_to_shards and by the trainers' samples.

Bytes: the id of a byte is its value; 256 is the end-of-text token.

GPT-2: text is split into words by the regular expression
    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
The symbols of a word are first its bytes. While two adjacent symbols form a pair in vocab.bpe, the pair on
the earliest line (its leftmost occurrence) is merged into one symbol. Ids: the 256 bytes, printable ones
first; one per line of vocab.bpe, in order; 50256, the end-of-text token. The pair with the lowest merged id
is therefore merged first.

Any byte string can be encoded and decodes to itself. A byte that is not part of valid UTF-8 (RFC 3629: no
surrogates, no overlong encodings) is treated as a character that is neither letter, number nor white space.
The text "<|endoftext|>" is encoded as ordinary text; callers add the end-of-text token themselves.
*/
#pragma once

#include <ctype.h>
#include "../base/heap.h"
#include "../base/text.h"
#include "../base/unicode.h"

enum {
    GPT2_MERGES = 50000,
    GPT2_TOKEN_BYTES = 1024 // limit for the tokens of a vocab.bpe; GPT-2's longest has 128
};
static const uint32_t TOKEN_NONE = UINT32_MAX;

// A growable array of token ids. Initialize to zeros, release with free(data).
typedef struct {
    uint32_t* data;
    int64_t count;
    size_t capacity;
} TokenBuffer;

// Constant once made, so threads may share it.
typedef struct {
    int64_t vocab_size;
    uint32_t end_of_text;
    ByteBuffer text;  // the bytes of all tokens, concatenated
    uint32_t* start;  // [vocab_size + 1] offset of each token's bytes
    uint8_t* classes; // [UNICODE_POINTS] of unicode.h; this and the tables are NULL for the byte tokenizer
    uint64_t* words;  // hash table: bytes of a token -> id
    uint64_t* merges; // hash table: pair of ids -> id
    uint32_t of_byte[256];   // id of each single byte
    uint32_t symbol_of[256]; // of gpt2_symbols
} Tokenizer;

// Ensures room for `more` ids after the current ones and returns a pointer to it; the caller adds to count.
static inline uint32_t* token_buffer_reserve(TokenBuffer* b, int64_t more) {
    b->data = (uint32_t*)xgrow(b->data, (size_t)(b->count + more), &b->capacity, sizeof *b->data);
    return b->data + b->count;
}

static inline void token_buffer_add(TokenBuffer* b, uint32_t id) {
    *token_buffer_reserve(b, 1) = id;
    b->count++;
}

// Appends n ids.
static inline void token_buffer_append(TokenBuffer* b, const uint32_t* ids, int64_t n) {
    memcpy(token_buffer_reserve(b, n), ids, (size_t)n * sizeof *ids);
    b->count += n;
}

// ----------------------------------------------------------------------------
// GPT-2: splitting text into words

// The class (of unicode.h) of the character at s[at], and its length in bytes.
static inline int gpt2_class(const Tokenizer* t, const uint8_t* s, size_t at, size_t n, size_t* length) {
    *length = 1;
    return s[at] < 128 ? t->classes[s[at]] : unicode_class(t->classes, utf8_decode(s + at, n - at, length));
}

// The end of the run of characters of one class that starts at s[at].
static inline size_t gpt2_run_end(const Tokenizer* t, const uint8_t* s, size_t at, size_t n, int of_class) {
    size_t length;
    while (at < n && gpt2_class(t, s, at, n, &length) == of_class) at += length;
    return at;
}

// The end of the word that starts at s[at], at < n.
static inline size_t gpt2_word_end(const Tokenizer* t, const uint8_t* s, size_t at, size_t n) {
    size_t length;
    if (s[at] == '\'' && at + 1 < n) {
        uint8_t a = s[at + 1], b = at + 2 < n ? s[at + 2] : 0;
        if (a == 's' || a == 't' || a == 'm' || a == 'd') return at + 2;
        if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return at + 3;
    }
    size_t first = at + (s[at] == ' ' && at + 1 < n); // a word may start with one space
    int of_class = gpt2_class(t, s, first, n, &length);
    if (of_class != UNICODE_SPACE) return gpt2_run_end(t, s, first, n, of_class);
    // white space is one word up to the end of the text; elsewhere its last character starts the next word
    size_t end = at, last = at;
    while (end < n && gpt2_class(t, s, end, n, &length) == UNICODE_SPACE) last = end, end += length;
    return end == n || last == at ? end : last;
}

// Whether a word ends before s[at], 0 < at < n, whatever text follows s[n], in the text and in its
// JSON-escaped form. There a non-ASCII character ends with a letter or digit and starts with a backslash.
static inline bool gpt2_ends(const Tokenizer* t, const uint8_t* s, size_t at, size_t n) {
    if (s[at] < 128 && s[at - 1] < 128) return isalpha(s[at - 1]) && !isalpha(s[at]);
    size_t from = at - 1, length, ignored;
    while (from > 0 && at - from < 4 && (s[from] & 0xc0) == 0x80) from--;
    // both sides must be whole characters, which an invalid byte is not for certain
    if (utf8_decode(s + from, at - from, &length) == UTF8_INVALID || from + length != at) return false;
    if (utf8_decode(s + at, n - at, &ignored) == UTF8_INVALID) return false;
    if (isalnum(s[at])) return false;
    const int before = gpt2_class(t, s, from, at, &ignored), after = gpt2_class(t, s, at, n, &ignored);
    if (before == UNICODE_LETTER || before == UNICODE_NUMBER) return after != before;
    return length > 1 && before == UNICODE_OTHER && after == UNICODE_SPACE;
}

// For texts that are encoded in pieces: the last position in (after, bytes) at which text can be cut, or 0.
// The two parts encode to the same tokens as the whole text, both JSON-escaped or not, whatever text follows.
static inline size_t tokenizer_cut(const Tokenizer* t, const char* text, size_t after, size_t bytes) {
    const uint8_t* s = (const uint8_t*)text;
    for (size_t i = bytes; i-- > after + 1;) {
        if (t->words) {
            if (gpt2_ends(t, s, i, bytes)) return i;
        } else if ((s[i] & 0xc0) != 0x80) {
            return i;
        } else if (bytes - i == 4) {
            return bytes - 1; // after three continuation bytes no character goes on
        }
    }
    return 0;
}

// ----------------------------------------------------------------------------
// hash tables: open addressing with linear probing; a slot is key << 32 | id; load at most 40%

enum { BPE_HASH_BITS = 17, BPE_HASH_SLOTS = 1 << BPE_HASH_BITS };
static const uint64_t BPE_HASH_EMPTY = UINT64_MAX;

static inline uint64_t* bpe_hash_new(void) {
    size_t bytes = BPE_HASH_SLOTS * sizeof(uint64_t);
    return (uint64_t*)memset(xrealloc(NULL, bytes), 0xff, bytes); // BPE_HASH_EMPTY
}

static inline size_t bpe_hash_slot(uint64_t hash) { return (size_t)(hash >> (64 - BPE_HASH_BITS)); }

static inline void bpe_hash_insert(uint64_t* slots, uint64_t hash, uint32_t key, uint32_t id) {
    size_t i = bpe_hash_slot(hash);
    while (slots[i] != BPE_HASH_EMPTY) i = (i + 1) % BPE_HASH_SLOTS;
    slots[i] = (uint64_t)key << 32 | id;
}

// The key of a pair of ids, both below 65536, is the pair itself.
static inline uint32_t bpe_pair_key(uint32_t left, uint32_t right) { return left << 16 | right; }
static inline uint64_t bpe_pair_hash(uint32_t key) { return key * 0x9e3779b97f4a7c15u; }

// The id that a pair of symbols is merged to, or TOKEN_NONE.
static inline uint32_t bpe_merged(const Tokenizer* t, uint32_t left, uint32_t right) {
    uint32_t key = bpe_pair_key(left, right);
    for (size_t i = bpe_hash_slot(bpe_pair_hash(key)); t->merges[i] != BPE_HASH_EMPTY;
         i = (i + 1) % BPE_HASH_SLOTS)
        if (t->merges[i] >> 32 == key) return (uint32_t)t->merges[i];
    return TOKEN_NONE;
}

// Keys of words are below 2^31, so a removed word (id TOKEN_NONE) differs from BPE_HASH_EMPTY and does not
// end a search.
static inline uint32_t bpe_word_key(uint64_t hash) { return (uint32_t)hash >> 1; }

static inline uint64_t bpe_word_hash(const uint8_t* s, size_t n) {
    uint64_t h = n * 0xff51afd7ed558ccdu;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t part = 0;
        if (n - i >= 8)
            memcpy(&part, s + i, 8);
        else
            for (size_t k = i; k < n; k++) part = part << 8 | s[k];
        h = (h ^ part) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return h * 0xc4ceb9fe1a85ec53u;
}

// The slot of the token with these bytes; NULL if there is none.
static inline uint64_t* bpe_word_slot(const Tokenizer* t, const uint8_t* s, size_t n) {
    uint64_t hash = bpe_word_hash(s, n);
    for (size_t i = bpe_hash_slot(hash); t->words[i] != BPE_HASH_EMPTY; i = (i + 1) % BPE_HASH_SLOTS) {
        uint32_t id = (uint32_t)t->words[i];
        if (t->words[i] >> 32 != bpe_word_key(hash) || id == TOKEN_NONE) continue;
        if (t->start[id + 1] - t->start[id] == n && memcmp(t->text.data + t->start[id], s, n) == 0)
            return &t->words[i];
    }
    return NULL;
}

// ----------------------------------------------------------------------------
// GPT-2: encoding one word

enum { BPE_SHORT = 32 }; // bytes; up to this length linear search for the next pair is faster than a heap

// Encodes s[n], 1 <= n <= BPE_SHORT, into out[n]; returns the number of tokens. O(n^2).
static inline int64_t bpe_short(const Tokenizer* t, const uint8_t* s, int n, uint32_t* out) {
    uint32_t merged[BPE_SHORT]; // [i]: id of the pair of symbols i and i + 1, or TOKEN_NONE
    for (int i = 0; i < n; i++) out[i] = t->of_byte[s[i]];
    for (int i = 0; i + 1 < n; i++) merged[i] = bpe_merged(t, out[i], out[i + 1]);
    while (n > 1) {
        int best = 0;
        for (int i = 1; i + 1 < n; i++)
            if (merged[i] < merged[best]) best = i;
        if (merged[best] == TOKEN_NONE) break;
        out[best] = merged[best];
        n--;
        for (int i = best + 1; i < n; i++) out[i] = out[i + 1], merged[i - 1] = merged[i];
        if (best > 0) merged[best - 1] = bpe_merged(t, out[best - 1], out[best]);
        if (best + 1 < n) merged[best] = bpe_merged(t, out[best], out[best + 1]);
    }
    return n;
}

// The same for a word of any length, in O(n log n). The symbols are a linked list; the pairs that can be
// merged are in a heap as merged id << BPE_AT_BITS | index of the left symbol. A heap entry whose pair has
// changed since is skipped.
enum { BPE_AT_BITS = 40 };

typedef struct {
    int64_t previous, next; // -1: none
    uint32_t id;
    uint32_t merged; // id of the pair with the next symbol; TOKEN_NONE also once this symbol is merged away
} BpeSymbol;

// Updates symbols[at].merged and adds the pair to the heap if it can be merged.
static inline void bpe_push_pair(const Tokenizer* t, BpeSymbol* symbols, int64_t at, uint64_t* heap,
                                 int64_t* count) {
    BpeSymbol* a = &symbols[at];
    a->merged = a->next < 0 ? TOKEN_NONE : bpe_merged(t, a->id, symbols[a->next].id);
    if (a->merged != TOKEN_NONE) heap_push(heap, count, (uint64_t)a->merged << BPE_AT_BITS | (uint64_t)at);
}

static inline int64_t bpe_long(const Tokenizer* t, const uint8_t* s, int64_t n, uint32_t* out) {
    if (n >= (int64_t)1 << BPE_AT_BITS) die("a word of %s is too long to encode", counted(n, "byte").text);
    BpeSymbol* symbols = (BpeSymbol*)xrealloc(NULL, (size_t)n * sizeof *symbols);
    // there are n - 1 initial pairs; each of up to n - 1 merges removes one entry and adds at most two
    uint64_t* heap = (uint64_t*)xrealloc(NULL, 2 * (size_t)n * sizeof *heap);
    int64_t count = 0, tokens = 0;
    for (int64_t i = 0; i < n; i++) {
        symbols[i].id = t->of_byte[s[i]];
        symbols[i].previous = i - 1;
        symbols[i].next = i + 1 < n ? i + 1 : -1;
    }
    for (int64_t i = 0; i < n; i++) bpe_push_pair(t, symbols, i, heap, &count);
    while (count > 0) {
        uint64_t top = heap_pop(heap, &count);
        int64_t at = (int64_t)(top & (((uint64_t)1 << BPE_AT_BITS) - 1));
        BpeSymbol *a = &symbols[at], *b = &symbols[a->next < 0 ? at : a->next];
        if (a->merged != top >> BPE_AT_BITS) continue;
        a->id = a->merged;
        a->next = b->next;
        b->merged = TOKEN_NONE;
        if (a->next >= 0) symbols[a->next].previous = at;
        if (a->previous >= 0) bpe_push_pair(t, symbols, a->previous, heap, &count);
        bpe_push_pair(t, symbols, at, heap, &count);
    }
    for (int64_t i = 0; i >= 0; i = symbols[i].next) out[tokens++] = symbols[i].id;
    free(heap);
    free(symbols);
    return tokens;
}

static inline int64_t bpe_encode(const Tokenizer* t, const uint8_t* s, size_t n, uint32_t* out) {
    return n <= BPE_SHORT ? bpe_short(t, s, (int)n, out) : bpe_long(t, s, (int64_t)n, out);
}

// ----------------------------------------------------------------------------
// creating a tokenizer

// Frees a tokenizer; may be called on one that is all zeros.
static inline void tokenizer_free(Tokenizer* t) {
    free(t->text.data);
    free(t->start);
    free(t->classes);
    free(t->words);
    free(t->merges);
    memset(t, 0, sizeof *t);
}

// vocab.bpe represents bytes by characters: the printable ones of Latin-1 by themselves, the other 68 by
// U+0100 and following, in order. The first 256 ids are in the order of these characters.
enum { GPT2_SYMBOLS = 256 + 68 };

static inline bool gpt2_printable(uint32_t c) {
    return (c >= '!' && c <= '~') || (c >= 0xa1 && c <= 0xff && c != 0xad);
}

// The character that stands for each byte.
static inline void gpt2_symbols(uint32_t symbol_of[256]) {
    for (uint32_t c = 0, next = 256; c < 256; c++) symbol_of[c] = gpt2_printable(c) ? c : next++;
}

// Initializes an empty tokenizer with room for `capacity` ids.
static inline void tokenizer_begin(Tokenizer* t, int64_t capacity) {
    memset(t, 0, sizeof *t);
    t->start = (uint32_t*)xcalloc((size_t)capacity + 1, sizeof *t->start);
    gpt2_symbols(t->symbol_of);
}

// Adds the next token.
static inline void tokenizer_add(Tokenizer* t, const void* bytes, size_t n) {
    uint32_t id = (uint32_t)t->vocab_size++;
    byte_buffer_append(&t->text, (const char*)bytes, n);
    t->start[id + 1] = (uint32_t)t->text.count;
    if (n == 1) t->of_byte[*(const uint8_t*)bytes] = id;
    if (t->words) {
        uint64_t hash = bpe_word_hash((const uint8_t*)bytes, n);
        bpe_hash_insert(t->words, hash, bpe_word_key(hash), id);
    }
}

// Adds the end-of-text token, the last one. No text encodes to it, because gpt2_word_end splits its name.
static inline void tokenizer_end(Tokenizer* t) {
    static const char name[] = "<|endoftext|>";
    t->end_of_text = (uint32_t)t->vocab_size;
    tokenizer_add(t, name, sizeof name - 1);
}

// Creates the byte tokenizer. Free with tokenizer_free.
static inline void tokenizer_bytes(Tokenizer* t) {
    tokenizer_begin(t, 257);
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        tokenizer_add(t, &byte, 1);
    }
    tokenizer_end(t);
}

// Decodes a symbol of vocab.bpe to bytes[GPT2_TOKEN_BYTES] and returns its length; 0 if it is invalid.
static inline size_t gpt2_symbol(const char* text, size_t n, const uint8_t* byte_of, uint8_t* bytes) {
    size_t count = 0, length;
    for (size_t i = 0; i < n; i += length) {
        uint32_t c = utf8_decode((const uint8_t*)text + i, n - i, &length);
        if (c >= GPT2_SYMBOLS || (c < 256 && !gpt2_printable(c)) || count == GPT2_TOKEN_BYTES) return 0;
        bytes[count++] = byte_of[c];
    }
    return count;
}

// Adds the token of a line of vocab.bpe: two symbols separated by a space.
static inline bool gpt2_add_merge(Tokenizer* t, const uint8_t* byte_of, const char* line, size_t n,
                                  int line_number, const char* path, Error* err) {
    uint8_t bytes[2 * GPT2_TOKEN_BYTES];
    uint32_t id[2];
    size_t count = 0;
    const char* space = (const char*)memchr(line, ' ', n);
    if (!space) return fail(err, "%s: line %d is not two symbols separated by a space", path, line_number);
    for (int side = 0; side < 2; side++) {
        const char* symbol = side ? space + 1 : line;
        size_t length = (size_t)((side ? line + n : space) - symbol);
        size_t got = gpt2_symbol(symbol, length, byte_of, bytes + count);
        uint64_t* slot = got ? bpe_word_slot(t, bytes + count, got) : NULL;
        if (!slot)
            return fail(err,
                        "%s: the %s symbol of line %d is neither a byte nor the result of an earlier line",
                        path, side ? "second" : "first", line_number);
        id[side] = (uint32_t)*slot;
        count += got;
    }
    if (count > GPT2_TOKEN_BYTES)
        return fail(err, "%s: line %d makes a token of more than %d bytes", path, line_number,
                    GPT2_TOKEN_BYTES);
    if (bpe_word_slot(t, bytes, count))
        return fail(err, "%s: line %d makes the same token as an earlier line", path, line_number);
    uint32_t key = bpe_pair_key(id[0], id[1]);
    bpe_hash_insert(t->merges, bpe_pair_hash(key), key, (uint32_t)t->vocab_size);
    tokenizer_add(t, bytes, count);
    return true;
}

// Adds the tokens of all lines of text[bytes], a vocab.bpe with this number of merges.
static inline bool gpt2_add_merges(Tokenizer* t, const uint8_t* byte_of, const char* path, const char* text,
                                   size_t bytes, int64_t merges, Error* err) {
    const char *line = text, *end = text + bytes;
    if (bytes < 9 || memcmp(text, "#version:", 9) != 0)
        return fail(err, "%s: does not start with '#version:': not GPT-2's vocab.bpe", path);
    for (int number = 1; line < end; number++) {
        const char* newline = (const char*)memchr(line, '\n', (size_t)(end - line));
        if (!newline) return fail(err, "%s: is truncated: ends in the middle of line %d", path, number);
        if (number > merges + 1)
            return fail(err, "%s: has more than the %s of GPT-2", path, counted(merges, "merge").text);
        if (number > 1 && !gpt2_add_merge(t, byte_of, line, (size_t)(newline - line), number, path, err))
            return false;
        line = newline + 1;
    }
    if (t->vocab_size != 256 + merges)
        return fail(err, "%s: has %s, GPT-2 has %lld: is it truncated?", path,
                    counted(t->vocab_size - 256, "merge").text, (long long)merges);
    return true;
}

// Creates a tokenizer from the text of a vocab.bpe, whose path messages name: a line that starts with
// `#version:`, then so many merges, at most GPT2_MERGES. Free with tokenizer_free. On error there is nothing
// to free.
static inline bool gpt2_parse(Tokenizer* t, const char* path, const char* text, size_t bytes, int64_t merges,
                              Error* err) {
    uint8_t byte_of[GPT2_SYMBOLS];
    uint32_t ids[GPT2_TOKEN_BYTES];
    tokenizer_begin(t, 256 + merges + 1);
    t->classes = (uint8_t*)xcalloc(UNICODE_POINTS, 1);
    unicode_expand(t->classes);
    t->words = bpe_hash_new();
    t->merges = bpe_hash_new();
    for (int printable = 1; printable >= 0; printable--)
        for (uint32_t c = 0; c < 256; c++) {
            if (gpt2_printable(c) != printable) continue;
            uint8_t byte = (uint8_t)c;
            byte_of[t->symbol_of[c]] = byte;
            tokenizer_add(t, &byte, 1);
        }
    if (!gpt2_add_merges(t, byte_of, path, text, bytes, merges, err)) {
        tokenizer_free(t);
        return false;
    }
    // tokenizer_encode looks up whole words first: remove tokens that the merges do not produce from their
    // bytes
    for (int64_t id = 256; id < t->vocab_size; id++) {
        const uint8_t* s = (const uint8_t*)t->text.data + t->start[id];
        size_t n = t->start[id + 1] - t->start[id];
        if (bpe_encode(t, s, n, ids) != 1) *bpe_word_slot(t, s, n) |= TOKEN_NONE;
    }
    tokenizer_end(t);
    return true;
}

// Creates the GPT-2 tokenizer from the file vocab.bpe, as gpt2_parse.
static inline bool tokenizer_gpt2(Tokenizer* t, const char* path, Error* err) {
    size_t bytes;
    memset(t, 0, sizeof *t);
    char* text = read_file(path, &bytes, err);
    bool ok = text && gpt2_parse(t, path, text, bytes, GPT2_MERGES, err);
    free(text);
    return ok;
}

// ----------------------------------------------------------------------------
// encoding and decoding

// Appends the ids of text[bytes] to *out, without an end-of-text token. Cannot fail.
static inline void tokenizer_encode(const Tokenizer* t, const char* text, size_t bytes, TokenBuffer* out) {
    const uint8_t* s = (const uint8_t*)text;
    if (!t->words) {
        uint32_t* ids = token_buffer_reserve(out, (int64_t)bytes);
        for (size_t i = 0; i < bytes; i++) ids[i] = t->of_byte[s[i]];
        out->count += (int64_t)bytes;
        return;
    }
    for (size_t at = 0, end; at < bytes; at = end) {
        end = gpt2_word_end(t, s, at, bytes);
        uint32_t* ids = token_buffer_reserve(out, (int64_t)(end - at));
        uint64_t* slot = end - at <= GPT2_TOKEN_BYTES ? bpe_word_slot(t, s + at, end - at) : NULL;
        if (slot)
            ids[0] = (uint32_t)*slot, out->count++;
        else
            out->count += bpe_encode(t, s + at, end - at, ids);
    }
}

// The bytes of a token, *bytes of them without a terminating zero, valid as long as the tokenizer. The
// end-of-text token decodes to "<|endoftext|>". For an id not below vocab_size, returns NULL and *bytes is 0.
static inline const char* tokenizer_decode(const Tokenizer* t, uint32_t id, size_t* bytes) {
    *bytes = 0;
    if (id >= t->vocab_size) return NULL;
    *bytes = t->start[id + 1] - t->start[id];
    return t->text.data + t->start[id];
}

enum { TOKENIZER_NAME_BYTES = 2 * GPT2_TOKEN_BYTES + 1 }; // a symbol has at most two

// Writes a token's name as Hugging Face's tokenizer.json has it, also of a byte tokenizer: one character for
// each of its bytes, that of vocab.bpe. Returns its length.
static inline size_t tokenizer_name(const Tokenizer* t, uint32_t id, char name[TOKENIZER_NAME_BYTES]) {
    size_t bytes, length = 0;
    const char* token = tokenizer_decode(t, id, &bytes);
    for (size_t i = 0; i < bytes; i++) length += utf8_encode(t->symbol_of[(uint8_t)token[i]], name + length);
    name[length] = '\0';
    return length;
}
