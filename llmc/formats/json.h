/*
A small strict JSON reader and writer: config.json, trainer.json, the log's lines, safetensors headers.

Reading turns a text into one flat array of nodes; node 0 is the root, and children are chained by index.
Strings are unescaped into one pool, so the text may be freed at once. Every key of every object goes into one
hash table, which finds duplicates while parsing and answers json_get in constant time afterwards. A getter
given node -1 finds nothing, so that a lookup needs no check of its own:

    int64_t width;
    if (!json_int64(&j, json_get(&j, 0, "hidden_size"), &width)) return fail(err, "...");

Strict means RFC 8259 and nothing more (no comments, trailing commas, NaN), and besides: no duplicate keys, no
bytes that are not UTF-8, and no \u0000, which a C string cannot hold. Names that end in an underscore are
private.
*/
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "../base/common.h"
#include "../base/text.h"

#define JSON_MAX_DEPTH 64        // nesting, read and written: bounds the recursion
#define JSON_MAX_BYTES (1 << 30) // longest text: nodes and strings are indexed by int

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct {
    JsonType type;
    int parent, next, first_child; // node indices, -1 for none
    int count;                     // number of children
    int key, string;               // where the key and the value of a string start in the pool, -1 for none
    bool boolean;
    bool is_int; // the number is exactly `integer`
    double number;
    int64_t integer;
} JsonNode;

typedef struct {
    JsonNode* nodes;
    int count, capacity;
    char* pool;          // zero-terminated strings
    int* members;        // open-addressing hash table of all nodes that have a key; 0 is a free slot
    size_t member_slots; // a power of two
    int member_count;
} Json;

// ----------------------------------------------------------------------------
// reader

typedef struct {
    Json* j;
    const char *source, *text;
    size_t n, at;     // length of the text; the byte looked at, which errors name
    size_t pool_used; // the pool never overflows: no string is longer than its quoted form in the text
    int depth;
    Error* err;
} JsonParser;

static inline bool json_error_(JsonParser* p, const char* what) {
    const char* end = p->at >= p->n ? ", but the text ends here" : "";
    return fail(p->err, "%s: bad JSON at byte %zu: %s%s", p->source, p->at, what, end);
}

// The byte looked at, or 0 at the end: a zero byte in the text is no token either.
static inline char json_peek_(const JsonParser* p) { return p->at < p->n ? p->text[p->at] : '\0'; }

static inline bool json_accept_(JsonParser* p, char c) {
    if (json_peek_(p) != c) return false;
    p->at++;
    return true;
}

static inline void json_skip_space_(JsonParser* p) {
    for (char c = json_peek_(p); c == ' ' || c == '\n' || c == '\r' || c == '\t'; c = json_peek_(p)) p->at++;
}

static inline bool json_skip_digits_(JsonParser* p) {
    size_t start = p->at;
    for (char c = json_peek_(p); c >= '0' && c <= '9'; c = json_peek_(p)) p->at++;
    return p->at > start;
}

// Reads the four hex digits of a \u escape.
static inline bool json_parse_hex_(JsonParser* p, unsigned* code) {
    *code = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        char c = json_peek_(p), lower = (char)(c | 0x20);
        bool digit = c >= '0' && c <= '9';
        if (!digit && !(lower >= 'a' && lower <= 'f'))
            return json_error_(p, "expected four hex digits after \\u");
        *code = *code * 16 + (unsigned)(digit ? c - '0' : lower - 'a' + 10);
    }
    return true;
}

// Reads an escape, its backslash already behind us, and appends the character to *out.
static inline bool json_parse_escape_(JsonParser* p, char** out) {
    static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    char c = json_peek_(p);
    const char* name = c ? strchr(names, c) : NULL;
    if (name) {
        p->at++;
        *(*out)++ = meanings[name - names];
        return true;
    }
    unsigned code, low;
    if (!json_accept_(p, 'u')) return json_error_(p, "unknown escape in a string");
    if (!json_parse_hex_(p, &code)) return false;
    if (code == 0) return json_error_(p, "\\u0000 in a string is not supported");
    if (code >= 0xd800 && code <= 0xdfff) { // beyond 16 bits: a high and a low surrogate
        bool pair = code < 0xdc00 && json_accept_(p, '\\') && json_accept_(p, 'u');
        if (pair && !json_parse_hex_(p, &low)) return false;
        if (!pair || low < 0xdc00 || low > 0xdfff)
            return json_error_(p, "half of a surrogate pair in a string");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    *out += utf8_encode(code, *out);
    return true;
}

// Reads the string whose opening quote we are at into the pool; *start is its place there.
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
            return json_error_(p, "bytes in a string that are not UTF-8");
        while (length-- > 0) *out++ = p->text[p->at++];
    }
    *out++ = '\0';
    p->pool_used = (size_t)(out - p->j->pool);
    return true;
}

static inline bool json_parse_number_(JsonParser* p, JsonNode* node) {
    const double exact = 9007199254740992.0; // 2^53: every integer up to here is a double
    size_t start = p->at;
    json_accept_(p, '-');
    bool good = json_accept_(p, '0') || json_skip_digits_(p), plain = true;
    if (good && json_accept_(p, '.')) plain = false, good = json_skip_digits_(p);
    if (good && (json_accept_(p, 'e') || json_accept_(p, 'E'))) {
        if (!json_accept_(p, '-')) json_accept_(p, '+');
        plain = false, good = json_skip_digits_(p);
    }
    if (!good) return json_error_(p, "expected a digit");
    // strtod wants a terminated copy, for which the unused end of the pool has room
    char* digits = p->j->pool + p->pool_used;
    memcpy(digits, p->text + start, p->at - start);
    digits[p->at - start] = '\0';
    node->number = strtod(digits, NULL);
    if (node->number - node->number != 0) { // infinite
        p->at = start;
        return json_error_(p, "number too large for a double");
    }
    errno = 0;
    if (plain)
        node->integer = strtoll(digits, NULL, 10), node->is_int = errno == 0;
    else if (node->number >= -exact && node->number <= exact) {
        node->integer = (int64_t)node->number;
        node->is_int = (double)node->integer == node->number;
    }
    return true;
}

// The hash slot that holds the member of this object with this key, or the free slot where it belongs.
static inline size_t json_slot_(const Json* j, int object, const char* key) {
    uint64_t hash = 14695981039346656037u ^ (uint64_t)object; // FNV-1a
    for (const char* c = key; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
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

// Appends an empty node to the array, which may move.
static inline int json_add_node_(Json* j, int parent) {
    if (j->count == j->capacity) {
        j->capacity = j->capacity ? 2 * j->capacity : 64;
        j->nodes = (JsonNode*)xrealloc(j->nodes, (size_t)j->capacity * sizeof *j->nodes);
    }
    JsonNode* node = &j->nodes[j->count];
    memset(node, 0, sizeof *node);
    node->parent = parent;
    node->next = node->first_child = node->key = node->string = -1;
    return j->count++;
}

// Reads a key, its colon and what is between, and gives the key to the node.
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

// Reads the array or object whose opening bracket we are at.
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

static inline bool json_parse_value_(JsonParser* p, int index) {
    static const char* const words[] = {"null", "false", "true"};
    json_skip_space_(p);
    JsonNode* node = &p->j->nodes[index]; // until a child moves the array
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
        if (p->n - p->at < length || memcmp(p->text + p->at, words[i], length) != 0) continue;
        node->type = i == 0 ? JSON_NULL : JSON_BOOL;
        node->boolean = i == 2;
        p->at += length;
        return true;
    }
    return json_error_(p, "expected a value");
}

// Frees what json_parse made; harmless on a Json that is empty or was freed.
static inline void json_free(Json* j) {
    free(j->nodes);
    free(j->pool);
    free(j->members);
    memset(j, 0, sizeof *j);
}

// Parses n bytes of text, which need no zero at the end and may be freed afterwards. On error j is empty, and
// err names the source (a file's name, say) and the byte of the text, counted from 0. Numbers are read with
// strtod and need the C locale, which every program starts in.
static inline bool json_parse(Json* j, const char* source, const char* text, size_t n, Error* err) {
    memset(j, 0, sizeof *j);
    if (n > JSON_MAX_BYTES)
        return fail(err, "%s: JSON of %zu bytes; the limit is %d", source, n, JSON_MAX_BYTES);
    JsonParser p = {j, source, text, n, 0, 0, 0, err};
    j->pool = (char*)xrealloc(NULL, n + 1);
    bool ok = json_parse_value_(&p, json_add_node_(j, -1));
    json_skip_space_(&p);
    if (ok && p.at < n) ok = json_error_(&p, "expected nothing more");
    if (!ok) json_free(j);
    return ok;
}

// Parses a whole file; as json_parse.
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
// what was read; each of these takes node -1 too, as something absent

// Whether the node is there and of this type.
static inline bool json_is(const Json* j, int node, JsonType type) {
    return node >= 0 && j->nodes[node].type == type;
}

static inline bool json_is_null(const Json* j, int node) { return json_is(j, node, JSON_NULL); }

// The member of an object with this key; -1 if there is none, or the node is no object.
static inline int json_get(const Json* j, int object, const char* key) {
    if (!json_is(j, object, JSON_OBJECT) || j->member_count == 0) return -1;
    int node = j->members[json_slot_(j, object, key)];
    return node ? node : -1;
}

// Children in the order of the text: for (int c = json_first(j, node); c >= 0; c = json_next(j, c))
static inline int json_first(const Json* j, int node) { return node < 0 ? -1 : j->nodes[node].first_child; }
static inline int json_next(const Json* j, int node) { return node < 0 ? -1 : j->nodes[node].next; }

// Number of children.
static inline int json_count(const Json* j, int node) { return node < 0 ? 0 : j->nodes[node].count; }

// The key of an object's member; NULL for any other node. Lives as long as j.
static inline const char* json_key(const Json* j, int node) {
    return node < 0 || j->nodes[node].key < 0 ? NULL : j->pool + j->nodes[node].key;
}

// The value of a string; NULL if the node is none. Lives as long as j.
static inline const char* json_string(const Json* j, int node) {
    return json_is(j, node, JSON_STRING) ? j->pool + j->nodes[node].string : NULL;
}

// The getters below fill *value and return true; for a node of another type they leave it and return false.

// A number that is an integer: any int64 written plainly, up to 2^53 also with fraction or exponent (5e5).
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

// ----------------------------------------------------------------------------
// writer: into a growing buffer. `key` is NULL in an array and at the root.
//
//     JsonWriter w = json_writer(0);
//     json_begin_object(&w, NULL);
//     json_put_int(&w, "step", 7);
//     json_end(&w);                    // w.text is {"step":7}

typedef struct {
    char* text; // zero-terminated once something was written
    size_t length, capacity;
    int indent; // spaces a level; 0 writes everything on one line
    int depth;
    bool has_items;               // of the innermost open array or object: the next item needs a comma
    char closing[JSON_MAX_DEPTH]; // the brackets to come
} JsonWriter;

// An empty writer. indent 2 suits files that people read, 0 gives one line.
static inline JsonWriter json_writer(int indent) {
    JsonWriter w;
    memset(&w, 0, sizeof w);
    w.indent = indent;
    return w;
}

static inline void json_writer_free(JsonWriter* w) {
    free(w->text);
    *w = json_writer(w->indent);
}

// Empties the text and keeps its memory, for the next line of a log.
static inline void json_writer_clear(JsonWriter* w) {
    w->length = 0;
    w->depth = 0;
    w->has_items = false;
}

static inline void json_append_(JsonWriter* w, const char* s, size_t n) {
    if (w->length + n + 1 > w->capacity)
        w->text = (char*)xrealloc(w->text, w->capacity = 2 * (w->length + n + 1));
    memcpy(w->text + w->length, s, n);
    w->text[w->length += n] = '\0';
}

static inline void json_newline_(JsonWriter* w) {
    if (w->indent == 0) return;
    json_append_(w, "\n", 1);
    for (int i = 0; i < w->depth * w->indent; i++) json_append_(w, " ", 1);
}

// Quotes and escapes. What is not UTF-8 (a file's name can be anything) becomes U+FFFD, to stay valid JSON.
static inline void json_append_quoted_(JsonWriter* w, const char* s) {
    json_append_(w, "\"", 1);
    size_t length;
    for (size_t n = strlen(s); n > 0; s += length, n -= length) {
        uint32_t c = utf8_decode((const uint8_t*)s, n, &length);
        if (c == '"' || c == '\\') json_append_(w, "\\", 1);
        bool invalid = c == UTF8_INVALID;
        if (c < ' ' || invalid) {
            char escape[12];
            snprintf(escape, sizeof escape, "\\u%04x", invalid ? 0xfffdu : (unsigned)c);
            json_append_(w, escape, 6);
        } else {
            json_append_(w, s, length);
        }
    }
    json_append_(w, "\"", 1);
}

// What comes before every value: comma, line break, key. Misplaced values are mistakes of the calling code.
static inline void json_begin_item_(JsonWriter* w, const char* key) {
    assert(w->depth > 0 ? (w->closing[w->depth - 1] == '}') == (key != NULL) : w->length == 0 && !key);
    if (w->has_items) json_append_(w, ",", 1);
    if (w->depth > 0) json_newline_(w);
    w->has_items = true;
    if (!key) return;
    json_append_quoted_(w, key);
    json_append_(w, ": ", w->indent ? 2 : 1);
}

static inline void json_begin_(JsonWriter* w, const char* key, char opening, char closing) {
    json_begin_item_(w, key);
    assert(w->depth < JSON_MAX_DEPTH);
    json_append_(w, &opening, 1);
    w->closing[w->depth++] = closing;
    w->has_items = false;
}

static inline void json_begin_object(JsonWriter* w, const char* key) { json_begin_(w, key, '{', '}'); }
static inline void json_begin_array(JsonWriter* w, const char* key) { json_begin_(w, key, '[', ']'); }

// Closes the innermost open array or object.
static inline void json_end(JsonWriter* w) {
    assert(w->depth > 0);
    w->depth--;
    if (w->has_items) json_newline_(w);
    json_append_(w, &w->closing[w->depth], 1);
    w->has_items = true;
}

static inline void json_put_null(JsonWriter* w, const char* key) {
    json_begin_item_(w, key);
    json_append_(w, "null", 4);
}

// A NULL value is written as null.
static inline void json_put_string(JsonWriter* w, const char* key, const char* value) {
    if (!value) {
        json_put_null(w, key);
        return;
    }
    json_begin_item_(w, key);
    json_append_quoted_(w, value);
}

static inline void json_put_bool(JsonWriter* w, const char* key, bool value) {
    json_begin_item_(w, key);
    json_append_(w, value ? "true" : "false", value ? 4 : 5);
}

static inline void json_put_int(JsonWriter* w, const char* key, int64_t value) {
    char digits[32];
    json_begin_item_(w, key);
    json_append_(w, digits, (size_t)snprintf(digits, sizeof digits, "%lld", (long long)value));
}

// The shortest of 15 to 17 digits that reads back as the same double; null for NaN and infinities, which JSON
// lacks.
static inline void json_put_double(JsonWriter* w, const char* key, double value) {
    char digits[32];
    if (value - value != 0) {
        json_put_null(w, key);
        return;
    }
    int n = 0;
    for (int precision = 15; precision <= 17; precision++) {
        n = snprintf(digits, sizeof digits, "%.*g", precision, value);
        if (strtod(digits, NULL) == value) break;
    }
    json_begin_item_(w, key);
    json_append_(w, digits, (size_t)n);
}

// Writes the finished text and a line break to a file, flushed to the disk.
static inline bool json_writer_save(const JsonWriter* w, const char* path, Error* err) {
    assert(w->depth == 0 && w->length > 0);
    FILE* f = fopen(path, "wb");
    if (!f) return fail(err, "%s: cannot create: %s", path, strerror(errno));
    fwrite(w->text, 1, w->length, f); // flush_and_close reports what fails here
    fputc('\n', f);
    return flush_and_close(f, path, err);
}

#endif // LLMC_JSON_H
