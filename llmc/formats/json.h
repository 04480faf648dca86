/*
A strict JSON parser, for config.json, trainer.json, requests, tokenizers, safetensors headers and .zarray.
json_writer.h writes JSON.

The parser builds a flat array of nodes. Node 0 is the root; parent, children and siblings are linked by
index. Strings are unescaped into one pool, so the text can be freed after parsing. The keys of all objects
are in one hash table, which detects duplicates and makes json_get take constant time. All getters accept node
-1 as "absent", so lookups can be nested without checks in between:

    int64_t width;
    if (!json_int64(&j, json_get(&j, 0, "hidden_size"), &width)) return fail(err, "...");

RFC 8259 is accepted without extensions (no comments, trailing commas or NaN). Duplicate keys and invalid
UTF-8 are rejected, and \u0000, which a C string cannot contain; but a tokenizer may name a token so
(json_parse_tokenizer). Names that end in an underscore are private.
*/
#pragma once

#include <math.h>
#include "../base/common.h"
#include "../base/numbers.h"
#include "../base/text.h"

enum {
    JSON_MAX_DEPTH = 64,     // of nesting, parsed and written; bounds the recursion
    JSON_MAX_BYTES = 1 << 30 // of text, since nodes and strings are indexed by int
};

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct {
    JsonType type;
    int parent, next, first_child; // node indices, -1 for none
    int count;                     // number of children
    int key, string;               // offsets in the pool of the key and of a string's value, -1 for none
    size_t begin, end;             // of the value in the parsed text
    bool boolean;
    bool is_int; // the number equals `integer`
    double number;
    int64_t integer;
} JsonNode;

typedef struct {
    JsonNode* nodes;
    int count;
    size_t capacity;
    char* pool;          // zero-terminated strings
    int* members;        // open-addressing hash table of the nodes that have a key; 0 marks a free slot
    size_t member_slots; // size of it, a power of two
    int member_count;
} Json;

// ----------------------------------------------------------------------------
// parser

typedef struct {
    Json* j;
    const char *source, *text;
    size_t n, at;     // length of the text; current position, which errors report
    size_t pool_used; // never exceeds n: a string is at most as long as its quoted form
    int depth;
    bool zeros; // \u0000 is accepted
    Error* err;
} JsonParser;

static const char json_zero[] = "\xc0\x80"; // stands for \u0000 there: no UTF-8 has it

static inline bool json_error_(JsonParser* p, const char* what) {
    const char* end = p->at >= p->n ? ", but the text ends here" : "";
    return fail(p->err, "%s: bad JSON at byte %zu: %s%s", p->source, p->at, what, end);
}

// The current byte; 0 at the end of the text, which matches no token.
static inline char json_peek_(const JsonParser* p) { return p->text[p->at]; }

static inline bool json_accept_(JsonParser* p, char c) {
    if (json_peek_(p) != c) return false;
    p->at++;
    return true;
}

static inline void json_skip_space_(JsonParser* p) { p->at += strspn(p->text + p->at, " \n\r\t"); }

static inline bool json_skip_digits_(JsonParser* p) {
    size_t digits = strspn(p->text + p->at, "0123456789");
    p->at += digits;
    return digits > 0;
}

// Parses the four hex digits of a \u escape.
static inline bool json_parse_hex_(JsonParser* p, unsigned* code) {
    *code = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        int digit = hex_digit(json_peek_(p));
        if (digit < 0) return json_error_(p, "expected four hex digits after \\u");
        *code = *code << 4 | (unsigned)digit;
    }
    return true;
}

// Parses an escape after its backslash and appends the character to *out.
static inline bool json_parse_escape_(JsonParser* p, char** out) {
    char c = json_peek_(p);
    const char* letter = c ? strchr(json_escape_letters, c) : NULL;
    if (letter) {
        p->at++;
        *(*out)++ = json_escape_characters[letter - json_escape_letters];
        return true;
    }
    unsigned code, low;
    if (!json_accept_(p, 'u')) return json_error_(p, "unknown escape in a string");
    if (!json_parse_hex_(p, &code)) return false;
    if (code == 0) {
        if (!p->zeros) return json_error_(p, "\\u0000 in a string is not supported");
        *(*out)++ = json_zero[0];
        *(*out)++ = json_zero[1];
        return true;
    }
    if (code >= 0xd800 && code <= 0xdfff) { // must be a high surrogate, followed by a low one
        bool pair = code < 0xdc00 && json_accept_(p, '\\') && json_accept_(p, 'u');
        if (pair && !json_parse_hex_(p, &low)) return false;
        if (!pair || low < 0xdc00 || low > 0xdfff) return json_error_(p, "unpaired surrogate in a string");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    *out += utf8_encode(code, *out);
    return true;
}

// Parses a string, from its opening quote, into the pool; *start is its offset there.
static inline bool json_parse_string_(JsonParser* p, int* start) {
    char* out = p->j->pool + p->pool_used;
    *start = (int)p->pool_used;
    p->at++;
    while (!json_accept_(p, '"')) {
        if (p->at >= p->n) return json_error_(p, "expected the closing quote of a string");
        if ((unsigned char)p->text[p->at] < ' ')
            return json_error_(p, "control character in a string; escape it");
        if (json_accept_(p, '\\')) {
            if (!json_parse_escape_(p, &out)) return false;
            continue;
        }
        size_t length;
        if (utf8_decode((const uint8_t*)p->text + p->at, p->n - p->at, &length) == UTF8_INVALID)
            return json_error_(p, "invalid UTF-8 in a string");
        while (length-- > 0) *out++ = p->text[p->at++];
    }
    *out++ = '\0';
    p->pool_used = (size_t)(out - p->j->pool);
    return true;
}

static inline bool json_parse_number_(JsonParser* p, JsonNode* node) {
    const double exact = 9007199254740992.0; // 2^53; a double represents every integer up to it
    size_t start = p->at;
    json_accept_(p, '-');
    bool good = json_accept_(p, '0') || json_skip_digits_(p), plain = true;
    if (good && json_accept_(p, '.')) plain = false, good = json_skip_digits_(p);
    if (good && (json_accept_(p, 'e') || json_accept_(p, 'E'))) {
        if (!json_accept_(p, '-')) json_accept_(p, '+');
        plain = false, good = json_skip_digits_(p);
    }
    if (!good) return json_error_(p, "expected a digit");
    node->number = number_from_text(p->text + start, NULL);
    if (!isfinite(node->number)) {
        p->at = start;
        return json_error_(p, "number too large for a double");
    }
    errno = 0;
    if (plain)
        node->integer = strtoll(p->text + start, NULL, 10), node->is_int = errno == 0;
    else if (node->number >= -exact && node->number <= exact) {
        node->integer = (int64_t)node->number;
        node->is_int = (double)node->integer == node->number;
    }
    return true;
}

// The hash slot of an object's member with this key, or the free slot to insert it at.
static inline size_t json_slot_(const Json* j, int object, const char* key) {
    uint64_t hash = fnv1a(FNV1A_BASIS ^ (uint64_t)object, key);
    size_t slot = (size_t)(hash ^ hash >> 32);
    for (;; slot++) {
        slot &= j->member_slots - 1;
        const JsonNode* node = &j->nodes[j->members[slot]];
        if (!j->members[slot] || (node->parent == object && strcmp(j->pool + node->key, key) == 0))
            return slot;
    }
}

static inline void json_grow_members_(Json* j) {
    free(j->members);
    j->member_slots = j->member_slots ? 2 * j->member_slots : 64;
    j->members = (int*)xcalloc(j->member_slots, sizeof *j->members);
    for (int i = 1; i < j->count; i++)
        if (j->nodes[i].key >= 0)
            j->members[json_slot_(j, j->nodes[i].parent, j->pool + j->nodes[i].key)] = i;
}

// Appends an empty node and returns its index. May move the array of nodes.
static inline int json_add_node_(Json* j, int parent) {
    j->nodes = (JsonNode*)xgrow(j->nodes, (size_t)j->count, &j->capacity, sizeof *j->nodes);
    JsonNode* node = &j->nodes[j->count];
    memset(node, 0, sizeof *node);
    node->parent = parent;
    node->next = node->first_child = node->key = node->string = -1;
    return j->count++;
}

// Parses a key and its colon, and stores the key in the node and the hash table.
static inline bool json_parse_key_(JsonParser* p, int node) {
    Json* j = p->j;
    size_t start = p->at;
    int key;
    if (json_peek_(p) != '"') return json_error_(p, "expected a key in double quotes");
    if (!json_parse_string_(p, &key)) return false;
    if (2 * (size_t)j->member_count >= j->member_slots) json_grow_members_(j);
    size_t slot = json_slot_(j, j->nodes[node].parent, j->pool + key);
    if (j->members[slot]) {
        char what[128];
        snprintf(what, sizeof what, "duplicate key '%.80s'", j->pool + key);
        p->at = start;
        return json_error_(p, what);
    }
    j->nodes[node].key = key;
    j->members[slot] = node;
    j->member_count++;
    json_skip_space_(p);
    return json_accept_(p, ':') ? true : json_error_(p, "expected ':' after a key");
}

static inline bool json_parse_value_(JsonParser* p, int node);

// Parses an array or object from its opening bracket.
static inline bool json_parse_children_(JsonParser* p, int node) {
    Json* j = p->j;
    bool object = j->nodes[node].type == JSON_OBJECT;
    char closing = object ? '}' : ']';
    if (++p->depth > JSON_MAX_DEPTH) return json_error_(p, "nested too deeply");
    p->at++;
    json_skip_space_(p);
    if (!json_accept_(p, closing)) {
        int last = -1;
        do {
            json_skip_space_(p);
            int child = json_add_node_(j, node);
            *(last < 0 ? &j->nodes[node].first_child : &j->nodes[last].next) = child;
            j->nodes[node].count++;
            last = child;
            if (object && !json_parse_key_(p, child)) return false;
            if (!json_parse_value_(p, child)) return false;
            json_skip_space_(p);
        } while (json_accept_(p, ','));
        if (!json_accept_(p, closing))
            return json_error_(p, object ? "expected ',' or '}'" : "expected ',' or ']'");
    }
    p->depth--;
    return true;
}

static inline bool json_parse_unspaced_(JsonParser* p, int index) {
    static const char* const words[] = {"null", "false", "true"};
    JsonNode* node = &p->j->nodes[index]; // invalid once a child is added
    char c = json_peek_(p);
    if (c == '{' || c == '[') {
        node->type = c == '{' ? JSON_OBJECT : JSON_ARRAY;
        return json_parse_children_(p, index);
    }
    if (c == '"') {
        node->type = JSON_STRING;
        return json_parse_string_(p, &node->string);
    }
    if (c == '-' || (c >= '0' && c <= '9')) {
        node->type = JSON_NUMBER;
        return json_parse_number_(p, node);
    }
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(words[i]);
        if (strncmp(p->text + p->at, words[i], length) != 0) continue;
        node->type = i == 0 ? JSON_NULL : JSON_BOOL;
        node->boolean = i == 2;
        p->at += length;
        return true;
    }
    return json_error_(p, "expected a value");
}

static inline bool json_parse_value_(JsonParser* p, int index) {
    json_skip_space_(p);
    size_t begin = p->at;
    if (!json_parse_unspaced_(p, index)) return false;
    p->j->nodes[index].begin = begin, p->j->nodes[index].end = p->at;
    return true;
}

// Frees a Json. May be called on one that is empty or already freed.
static inline void json_free(Json* j) {
    free(j->nodes);
    free(j->pool);
    free(j->members);
    memset(j, 0, sizeof *j);
}

static inline bool json_parse_text_(Json* j, const char* source, const char* text, size_t n, bool zeros,
                                    Error* err) {
    memset(j, 0, sizeof *j);
    if (n > JSON_MAX_BYTES)
        return fail(err, "%s: JSON of %s; the limit is %d", source, counted((int64_t)n, "byte").text,
                    JSON_MAX_BYTES);
    char* copy = (char*)memcpy(xrealloc(NULL, n + 1), text, n);
    copy[n] = '\0';
    JsonParser p = {.j = j, .source = source, .text = copy, .n = n, .zeros = zeros, .err = err};
    j->pool = (char*)xrealloc(NULL, n + 1);
    bool ok = json_parse_value_(&p, json_add_node_(j, -1));
    json_skip_space_(&p);
    if (ok && p.at < n) ok = json_error_(&p, "expected the end of the text");
    if (!ok) json_free(j);
    free(copy);
    return ok;
}

// Parses text[n], which needs no terminating zero and may be freed afterwards. On error j is empty, and the
// message contains `source` (such as the file's path) and the offset in bytes. Requires the C locale.
static inline bool json_parse(Json* j, const char* source, const char* text, size_t n, Error* err) {
    return json_parse_text_(j, source, text, n, false, err);
}

// The same for a tokenizer.json, in which \u0000 may be a token, or of one: json_zero in its name.
static inline bool json_parse_tokenizer(Json* j, const char* source, const char* text, size_t n, Error* err) {
    return json_parse_text_(j, source, text, n, true, err);
}

// json_parse for a file.
static inline bool json_parse_file(Json* j, const char* path, Error* err) {
    size_t n;
    memset(j, 0, sizeof *j);
    char* text = read_file(path, &n, err);
    if (!text) return false;
    bool ok = json_parse(j, path, text, n, err);
    free(text);
    return ok;
}

// ----------------------------------------------------------------------------
// access to a parsed text; node -1 means absent

// Whether the node is present and of this type.
static inline bool json_is(const Json* j, int node, JsonType type) {
    return node >= 0 && j->nodes[node].type == type;
}

static inline bool json_is_null(const Json* j, int node) { return json_is(j, node, JSON_NULL); }

// The member of an object with this key; -1 if there is none or the node is not an object.
static inline int json_get(const Json* j, int object, const char* key) {
    if (!json_is(j, object, JSON_OBJECT) || j->member_count == 0) return -1;
    int node = j->members[json_slot_(j, object, key)];
    return node ? node : -1;
}

// Iteration over children in text order: for (int c = json_first(j, node); c >= 0; c = json_next(j, c))
static inline int json_first(const Json* j, int node) { return node < 0 ? -1 : j->nodes[node].first_child; }
static inline int json_next(const Json* j, int node) { return node < 0 ? -1 : j->nodes[node].next; }

// Number of children.
static inline int json_count(const Json* j, int node) { return node < 0 ? 0 : j->nodes[node].count; }

// The key of an object's member; NULL for any other node. Valid until json_free.
static inline const char* json_key(const Json* j, int node) {
    return node < 0 || j->nodes[node].key < 0 ? NULL : j->pool + j->nodes[node].key;
}

// The value of a string; NULL for any other node. Valid until json_free.
static inline const char* json_string(const Json* j, int node) {
    return json_is(j, node, JSON_STRING) ? j->pool + j->nodes[node].string : NULL;
}

// The getters below set *value and return true. For a node of another type they return false and keep *value.

// An integer: any int64 without fraction and exponent; with them (5e5), any up to 2^53.
static inline bool json_int64(const Json* j, int node, int64_t* value) {
    if (!json_is(j, node, JSON_NUMBER) || !j->nodes[node].is_int) return false;
    *value = j->nodes[node].integer;
    return true;
}

// Any number, as the nearest double.
static inline bool json_double(const Json* j, int node, double* value) {
    if (!json_is(j, node, JSON_NUMBER)) return false;
    *value = j->nodes[node].number;
    return true;
}

static inline bool json_bool(const Json* j, int node, bool* value) {
    if (!json_is(j, node, JSON_BOOL)) return false;
    *value = j->nodes[node].boolean;
    return true;
}
