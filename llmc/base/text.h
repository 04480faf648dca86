/*
Text: a growable byte buffer, a hash of strings, UTF-8, and JSON-escaped text.

JSON-escaped text is what Python's json.dumps writes between the quotes: a newline is `\n`, a non-ASCII
character is `\uXXXX`, and a character above U+FFFF is a surrogate pair of two such escapes. LongCrawl64's
documents were escaped like this before they were tokenized, so text for a model trained on them must be
escaped too (--json-escape), and its samples unescaped. The JSON parser (formats/json.h) shares UTF-8 and the
table of escapes.
*/
#pragma once

#include "common.h"

// A growable array of bytes. Initialize to zeros, release with free(data).
typedef struct {
    char* data;
    size_t count, capacity;
} ByteBuffer;

// Ensures room for `more` bytes after the current ones and returns a pointer to it; the caller adds to count.
static inline char* byte_buffer_reserve(ByteBuffer* b, size_t more) {
    b->data = (char*)xgrow(b->data, b->count + more, &b->capacity, 1);
    return b->data + b->count;
}

// Is text[n] white space alone, as an empty line is?
static inline bool text_is_blank(const char* text, size_t n) {
    size_t i = 0;
    while (i < n && (text[i] == ' ' || text[i] == '\t' || text[i] == '\r' || text[i] == '\n')) i++;
    return i == n;
}

static inline void byte_buffer_append(ByteBuffer* b, const char* bytes, size_t n) {
    memcpy(byte_buffer_reserve(b, n + 1), bytes, n);
    b->count += n;
    b->data[b->count] = '\0';
}

// The 64-bit FNV-1a hash of a string. `hash` is FNV1A_BASIS or the hash of preceding data.
static const uint64_t FNV1A_BASIS = 0xcbf29ce484222325u;

static inline uint64_t fnv1a(uint64_t hash, const char* s) {
    for (; *s; s++) hash = (hash ^ (unsigned char)*s) * 0x100000001b3u;
    return hash;
}

// ----------------------------------------------------------------------------
// UTF-8

static const uint32_t UTF8_INVALID = UINT32_MAX;

// Decodes the first character of s[n], n >= 1; *length is its number of bytes. If s does not start with a
// valid character, returns UTF8_INVALID and *length is 1.
static inline uint32_t utf8_decode(const uint8_t* s, size_t n, size_t* length) {
    // by length; a smaller character is an overlong encoding
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t len = s[0] < 0x80 ? 1 : s[0] < 0xc0 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf8 ? 4 : 0;
    *length = 1;
    if (len == 1) return s[0];
    if (len == 0 || len > n) return UTF8_INVALID;
    uint32_t c = s[0] & (0x7fu >> len);
    for (size_t i = 1; i < len; i++) {
        if ((s[i] & 0xc0) != 0x80) return UTF8_INVALID;
        c = c << 6 | (s[i] & 0x3f);
    }
    if (c < smallest[len] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return UTF8_INVALID;
    *length = len;
    return c;
}

// Where s[n] does not start with a valid character: the bytes that one U+FFFD replaces, the longest beginning
// of a character or else one, as Unicode recommends, and Python and Rust do.
static inline size_t utf8_invalid_length(const uint8_t* s, size_t n) {
    if (s[0] < 0xc2 || s[0] > 0xf4) return 1;
    uint8_t least = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t most = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    const size_t whole = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    size_t length = 1;
    while (length < n && length < whole && s[length] >= least && s[length] <= most) {
        length++;
        least = 0x80;
        most = 0xbf;
    }
    return length;
}

// Writes a code point as UTF-8 to out[4]; returns the number of bytes.
static inline size_t utf8_encode(uint32_t c, char* out) {
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t len = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = len - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)((0xf00u >> len & 0xf0) | c);
    return len;
}

// ----------------------------------------------------------------------------
// JSON-escaped text

// The letters of two-character escapes and the characters they stand for. '/' is never written escaped.
static const char json_escape_letters[] = "\"\\bfnrt/", json_escape_characters[] = "\"\\\b\f\n\r\t/";

// Writes \uXXXX for a 16-bit code unit, and a terminating zero; returns the end of it.
static inline char* json_put_unit(char* out, uint32_t unit) { return out + sprintf(out, "\\u%04x", unit); }

// Appends the escaped form of text[bytes] to *out. An invalid UTF-8 byte becomes \udc80 .. \udcff, as with
// Python's surrogateescape, so json_unescape restores any text exactly.
static inline void json_escape(const char* text, size_t bytes, ByteBuffer* out) {
    const uint8_t* s = (const uint8_t*)text;
    size_t length;
    for (size_t i = 0; i < bytes; i += length) {
        char* o = byte_buffer_reserve(out, 13);
        uint32_t c = utf8_decode(s + i, bytes - i, &length);
        const char* short_form = c > 0 && c < 128 && c != '/' ? strchr(json_escape_characters, (int)c) : NULL;
        if (short_form) {
            *o++ = '\\';
            *o++ = json_escape_letters[short_form - json_escape_characters];
        } else if (c >= ' ' && c <= '~') {
            *o++ = (char)c;
        } else if (c == UTF8_INVALID) {
            o = json_put_unit(o, 0xdc00u + s[i]);
        } else if (c < 0x10000) {
            o = json_put_unit(o, c);
        } else { // a surrogate pair: the upper and the lower 10 bits of c - 0x10000
            o = json_put_unit(o, 0xd800 + ((c - 0x10000) >> 10));
            o = json_put_unit(o, 0xdc00 + (c & 0x3ff));
        }
        out->count = (size_t)(o - out->data);
    }
}

// The value of a hexadecimal digit; -1 for any other character.
static inline int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 0x20; // lower case
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

enum { JSON_BROKEN = -1, JSON_UNFINISHED = -2 };

// The code unit of the \uXXXX at the start of s[n], or JSON_BROKEN, or JSON_UNFINISHED if s is too short.
static inline int32_t json_unit(const char* s, size_t n) {
    int32_t unit = 0;
    for (size_t i = 0; i < 6; i++) {
        if (i == n) return JSON_UNFINISHED;
        int digit = i >= 2 ? hex_digit(s[i]) : s[i] == "\\u"[i] ? 0 : -1;
        if (digit < 0) return JSON_BROKEN;
        unit = unit << 4 | digit;
    }
    return unit;
}

// Decodes the escape at the start of s[n], where s[0] is a backslash, to out[*out_bytes], at most 4 bytes.
// Returns the number of bytes read, or JSON_BROKEN, or JSON_UNFINISHED if s is a prefix of a valid escape.
static inline int json_escape_at(const char* s, size_t n, char* out, size_t* out_bytes) {
    if (n == 1) return JSON_UNFINISHED;
    const char* letter = s[1] ? strchr(json_escape_letters, s[1]) : NULL;
    *out_bytes = 1;
    if (letter) {
        out[0] = json_escape_characters[letter - json_escape_letters];
        return 2;
    }
    int32_t c = json_unit(s, n);
    if (c < 0) return c;
    if (c >= 0xd800 && c < 0xdc00) {
        int32_t low = json_unit(s + 6, n - 6);
        if (low == JSON_UNFINISHED) return low;
        if (low < 0xdc00 || low > 0xdfff) return JSON_BROKEN;
        *out_bytes = utf8_encode((uint32_t)(0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00)), out);
        return 12;
    }
    if (c >= 0xdc80 && c <= 0xdcff) { // an invalid UTF-8 byte
        out[0] = (char)(c - 0xdc00);
        return 6;
    }
    if (c >= 0xdc00 && c < 0xe000) return JSON_BROKEN;
    *out_bytes = utf8_encode((uint32_t)c, out);
    return 6;
}

// The inverse of json_escape. Accepts any text, since a model may generate invalid escapes: these are copied
// unchanged, as are unpaired surrogates other than \udc80 .. \udcff. Writes to out[bytes] and sets
// *out_bytes; out may be text itself. Returns the number of bytes read. This is all of text if `last` is set;
// otherwise an incomplete escape at the end is left unread, and the caller passes it again at the start of
// the next part.
static inline size_t json_unescape(const char* text, size_t bytes, bool last, char* out, size_t* out_bytes) {
    size_t at = 0, count = 0;
    while (at < bytes) {
        char decoded[4];
        size_t n;
        int length = text[at] == '\\' ? json_escape_at(text + at, bytes - at, decoded, &n) : JSON_BROKEN;
        if (length == JSON_UNFINISHED && !last) break;
        if (length < 0) { // no escape: copied unchanged
            out[count++] = text[at++];
            continue;
        }
        memcpy(out + count, decoded, n);
        count += n;
        at += (size_t)length;
    }
    *out_bytes = count;
    return at;
}
