/*
Text: a growing buffer of bytes, UTF-8, and the JSON-escaped form in which LongCrawl64 was encoded.

The escaped form is what Python's json.dumps writes between the quotes: a newline is a backslash and an n, and
what is not ASCII is \uXXXX, two of them in a row (a surrogate pair) for what has more than 16 bits.
*/
#ifndef LLMC_TEXT_H
#define LLMC_TEXT_H

#include "common.h"

// Starts from all zeros, and ends with free(data).
typedef struct {
    char* data;
    size_t count, capacity;
} ByteBuffer;

// Makes room for `more` further bytes; returns where they go.
static inline char* byte_buffer_reserve(ByteBuffer* b, size_t more) {
    if (b->count + more >= b->capacity) { // >=: an empty buffer gets memory too, so that data is never NULL
        b->capacity = 2 * b->capacity > b->count + more ? 2 * b->capacity : b->count + more + 1;
        b->data = (char*)xrealloc(b->data, b->capacity);
    }
    return b->data + b->count;
}

// ----------------------------------------------------------------------------
// UTF-8

#define UTF8_INVALID UINT32_MAX

// Decodes the character at the front of s[n], n >= 1; *length is its number of bytes. A byte that does not
// start a valid character gives UTF8_INVALID and length 1.
static inline uint32_t utf8_decode(const uint8_t* s, size_t n, size_t* length) {
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000}; // anything below is an overlong form
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

static const char json_hex[] = "0123456789abcdefABCDEF";

static inline char* json_put_unit(char* out, uint32_t unit) {
    *out++ = '\\';
    *out++ = 'u';
    for (int shift = 12; shift >= 0; shift -= 4) *out++ = json_hex[unit >> shift & 15];
    return out;
}

// Appends the escaped form of text[bytes] to *out: what Python's json.dumps writes between the quotes. A byte
// that is no valid UTF-8 becomes \udc80 .. \udcff, as with Python's surrogateescape, so that nothing is lost.
static inline void json_escape(const char* text, size_t bytes, ByteBuffer* out) {
    static const char plain[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const uint8_t* s = (const uint8_t*)text;
    size_t length;
    for (size_t i = 0; i < bytes; i += length) {
        char* o = byte_buffer_reserve(out, 12);
        uint32_t c = utf8_decode(s + i, bytes - i, &length);
        const char* short_form = c > 0 && c < 128 ? strchr(plain, (int)c) : NULL;
        if (short_form) {
            *o++ = '\\';
            *o++ = letters[short_form - plain];
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

enum { JSON_BROKEN = -1, JSON_UNFINISHED = -2 };

// The 16 bits of the \uXXXX at the front of s[n].
static inline int32_t json_unit(const char* s, size_t n) {
    int32_t unit = 0;
    for (size_t i = 0; i < 6; i++) {
        if (i == n) return JSON_UNFINISHED;
        if (i < 2) {
            if (s[i] != "\\u"[i]) return JSON_BROKEN;
            continue;
        }
        const char* digit = s[i] ? strchr(json_hex, s[i]) : NULL;
        if (!digit) return JSON_BROKEN;
        int32_t value = (int32_t)(digit - json_hex);
        unit = unit << 4 | (value < 16 ? value : value - 6); // A as a
    }
    return unit;
}

// Decodes the escape at the front of s[n], s[0] a backslash, to out[*out_bytes], at most 4 bytes. Returns its
// length, or JSON_BROKEN, or JSON_UNFINISHED if what comes after s may still make it good.
static inline int json_escape_at(const char* s, size_t n, char* out, size_t* out_bytes) {
    static const char letters[] = "\"\\/bfnrt", plain[] = "\"\\/\b\f\n\r\t";
    if (n == 1) return JSON_UNFINISHED;
    const char* letter = s[1] ? strchr(letters, s[1]) : NULL;
    *out_bytes = 1;
    if (letter) {
        out[0] = plain[letter - letters];
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
    if (c >= 0xdc80 && c <= 0xdcff) { // a byte that was no valid UTF-8
        out[0] = (char)(c - 0xdc00);
        return 6;
    }
    if (c >= 0xdc00 && c < 0xe000) return JSON_BROKEN;
    *out_bytes = utf8_encode((uint32_t)c, out);
    return 6;
}

// The inverse of json_escape, for text that may be generated and so broken: a backslash that starts no valid
// escape stays as it is, as half of a surrogate pair does, unless it stands for a byte as above. Writes to
// out[bytes], which may be text itself; sets *out_bytes. Returns how much of text was used: all of it if it
// is the `last` part, else all but an escape at its end that may go on, which the caller then gives again at
// the front of the next part.
static inline size_t json_unescape(const char* text, size_t bytes, bool last, char* out, size_t* out_bytes) {
    size_t at = 0, count = 0;
    while (at < bytes) {
        char decoded[4];
        size_t n;
        int length = text[at] == '\\' ? json_escape_at(text + at, bytes - at, decoded, &n) : JSON_BROKEN;
        if (length == JSON_UNFINISHED && !last) break;
        if (length < 0) { // an ordinary character, or a backslash that is one
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

#endif // LLMC_TEXT_H
