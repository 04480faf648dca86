/*
llmc/formats/json.h and json_writer.h. Accepted text is valid by the grammar of RFC 8259, written out below a
second time, and valid text is accepted, apart from what json.h says it refuses. What was parsed survives
writing and parsing again.
*/
#include <ctype.h>
#include "fuzz.h"
#include "../../llmc/formats/json_writer.h"

// ----------------------------------------------------------------------------
// the grammar: each function returns the end of what it matches at s, or NULL

typedef const uint8_t* Text; // ends with a zero byte, which matches nothing

static Text skip_space(Text s) {
    while (*s == ' ' || *s == '\t' || *s == '\n' || *s == '\r') s++;
    return s;
}

// RFC 3629's table of byte sequences
static Text match_utf8(Text s) {
    static const uint8_t rows[][5] = {
        // first byte from, to; second byte from, to; bytes
        {0x20, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const uint8_t* r = rows[i];
        if (s[0] < r[0] || s[0] > r[1]) continue;
        if (r[4] > 1 && (s[1] < r[2] || s[1] > r[3])) return NULL;
        for (int k = 2; k < r[4]; k++)
            if (s[k] < 0x80 || s[k] > 0xbf) return NULL;
        return s + r[4];
    }
    return NULL;
}

static Text match_string(Text s) {
    if (*s++ != '"') return NULL;
    while (*s != '"') {
        if (*s != '\\') {
            s = match_utf8(s);
            if (!s) return NULL;
        } else if (s[1] == 'u') {
            for (int i = 2; i < 6; i++)
                if (!isxdigit(s[i])) return NULL;
            s += 6;
        } else {
            if (!s[1] || !strchr("\"\\/bfnrt", s[1])) return NULL;
            s += 2;
        }
    }
    return s + 1;
}

static Text match_number(Text s) {
    s += *s == '-';
    if (!isdigit(*s)) return NULL;
    if (*s == '0')
        s++;
    else
        while (isdigit(*s)) s++;
    if (*s == '.') {
        if (!isdigit(*++s)) return NULL;
        while (isdigit(*s)) s++;
    }
    if (*s == 'e' || *s == 'E') {
        s++;
        s += *s == '+' || *s == '-';
        if (!isdigit(*s)) return NULL;
        while (isdigit(*s)) s++;
    }
    return s;
}

static Text match_value(Text s, int depth) {
    s = skip_space(s);
    if (*s == '"') return match_string(s);
    if (*s == '-' || isdigit(*s)) return match_number(s);
    if (strncmp((const char*)s, "null", 4) == 0 || strncmp((const char*)s, "true", 4) == 0) return s + 4;
    if (strncmp((const char*)s, "false", 5) == 0) return s + 5;
    if ((*s != '{' && *s != '[') || depth > 4096) return NULL;
    const uint8_t closing = *s == '{' ? '}' : ']';
    s = skip_space(s + 1);
    if (*s == closing) return s + 1;
    for (;;) {
        if (closing == '}') {
            s = match_string(skip_space(s));
            if (!s) return NULL;
            s = skip_space(s);
            if (*s++ != ':') return NULL;
        }
        s = match_value(s, depth + 1);
        if (!s) return NULL;
        s = skip_space(s);
        if (*s == closing) return s + 1;
        if (*s++ != ',') return NULL;
    }
}

static bool is_valid(Text text, size_t bytes) {
    Text end = match_value(text, 0);
    return end && skip_space(end) == text + bytes;
}

// Does the message name one of the restrictions that json.h adds to the grammar?
static bool is_restriction(const char* message) {
    static const char* const restrictions[] = {"duplicate key", "number too large", "\\u0000 in a string",
                                               "nested too deeply", "unpaired surrogate"};
    for (size_t i = 0; i < sizeof restrictions / sizeof restrictions[0]; i++)
        if (strstr(message, restrictions[i])) return true;
    return false;
}

// ----------------------------------------------------------------------------
// writing and comparing trees

static void put(JsonWriter* w, const Json* j, int node) {
    const char* key = json_key(j, node);
    const JsonNode* n = &j->nodes[node];
    switch (n->type) {
    case JSON_NULL: json_put_null(w, key); break;
    case JSON_BOOL: json_put_bool(w, key, n->boolean); break;
    case JSON_STRING: json_put_string(w, key, json_string(j, node)); break;
    case JSON_NUMBER:
        if (n->is_int)
            json_put_int(w, key, n->integer);
        else
            json_put_double(w, key, n->number);
        break;
    case JSON_ARRAY:
    case JSON_OBJECT:
        (n->type == JSON_ARRAY ? json_begin_array : json_begin_object)(w, key);
        for (int child = json_first(j, node); child >= 0; child = json_next(j, child)) put(w, j, child);
        json_end(w);
    }
}

static void require_same(const Json* a, int x, const Json* b, int y) {
    const JsonNode *p = &a->nodes[x], *q = &b->nodes[y];
    REQUIRE(p->type == q->type && p->count == q->count && p->boolean == q->boolean, "node %d", x);
    REQUIRE(p->number == q->number && (!p->is_int || (q->is_int && p->integer == q->integer)), "node %d: %g",
            x, p->number);
    if (p->type == JSON_STRING) REQUIRE(strcmp(json_string(a, x), json_string(b, y)) == 0, "node %d", x);
    int children = 0, d = json_first(b, y);
    for (int c = json_first(a, x); c >= 0; c = json_next(a, c), d = json_next(b, d), children++) {
        const char* key = json_key(a, c);
        REQUIRE((key != NULL) == (p->type == JSON_OBJECT), "node %d: a key outside an object", c);
        REQUIRE(!key || (json_get(a, x, key) == c && json_get(b, y, key) == d), "key '%s' is lost", key);
        require_same(a, c, b, d);
    }
    REQUIRE(children == p->count, "%d children, count %d", children, p->count);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    Json j, again;
    Error err = {""};
    uint8_t* text = (uint8_t*)memcpy(xcalloc(bytes + 1, 1), data, bytes);
    bool valid = is_valid(text, bytes), accepted = json_parse(&j, "input", (const char*)data, bytes, &err);
    free(text);
    REQUIRE(accepted || !valid || is_restriction(err.msg), "valid JSON is refused: %s", err.msg);
    REQUIRE(!accepted || valid, "invalid JSON is accepted");
    if (!accepted) {
        require_message(&err, "input: bad JSON at byte ");
        return 0;
    }
    for (int indent = 0; indent <= 2; indent += 2) {
        JsonWriter w = json_writer(indent);
        put(&w, &j, 0);
        REQUIRE(json_parse(&again, "output", w.text, w.length, &err), "%s", err.msg);
        require_same(&j, 0, &again, 0);
        json_free(&again);
        json_writer_free(&w);
    }
    json_free(&j);
    return 0;
}
