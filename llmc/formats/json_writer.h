/*
A JSON writer into a growable buffer, for config.json, trainer.json, log.jsonl, answers and safetensors
headers. What it writes, json.h parses. `key` is NULL in an array and at the root:

    JsonWriter w = json_writer(0);
    json_begin_object(&w, NULL);
    json_put_int(&w, "step", 7);
    json_end(&w);                    // w.text is {"step":7}

Names that end in an underscore are private.
*/
#pragma once

#include "json.h"

typedef struct {
    char* text; // zero-terminated; NULL before the first write
    size_t length, capacity;
    int indent; // spaces per level; 0 writes everything on one line
    int depth;
    bool has_items; // the innermost open array or object is not empty: the next item needs a comma
    char closing[JSON_MAX_DEPTH]; // closing brackets of the open arrays and objects
} JsonWriter;

// An empty writer.
static inline JsonWriter json_writer(int indent) {
    JsonWriter w = {.indent = indent};
    return w;
}

static inline void json_writer_free(JsonWriter* w) {
    free(w->text);
    *w = json_writer(w->indent);
}

// Empties the text but keeps its memory, for the next line of a log.
static inline void json_writer_clear(JsonWriter* w) {
    w->length = 0;
    w->depth = 0;
    w->has_items = false;
}

static inline void json_append_(JsonWriter* w, const char* s, size_t n) {
    w->text = (char*)xgrow(w->text, w->length + n, &w->capacity, 1);
    memcpy(w->text + w->length, s, n);
    w->text[w->length += n] = '\0';
}

static inline void json_newline_(JsonWriter* w) {
    if (w->indent == 0) return;
    json_append_(w, "\n", 1);
    for (int i = 0; i < w->depth * w->indent; i++) json_append_(w, " ", 1);
}

// Appends a quoted, escaped string of n bytes. Invalid UTF-8, possible in a file name, becomes U+FFFD, since
// JSON must be UTF-8.
static inline void json_append_quoted_(JsonWriter* w, const char* s, size_t n) {
    json_append_(w, "\"", 1);
    for (size_t length; n > 0; s += length, n -= length) {
        uint32_t c = utf8_decode((const uint8_t*)s, n, &length);
        if (c == UTF8_INVALID) length = utf8_invalid_length((const uint8_t*)s, n);
        if (c == '"' || c == '\\') json_append_(w, "\\", 1);
        if (c < ' ' || c == UTF8_INVALID) {
            char escape[12];
            snprintf(escape, sizeof escape, "\\u%04x", c == UTF8_INVALID ? 0xfffdu : c);
            json_append_(w, escape, 6);
        } else {
            json_append_(w, s, length);
        }
    }
    json_append_(w, "\"", 1);
}

// Appends what precedes a value: comma, line break, key. Asserts that a key is given exactly in objects.
static inline void json_begin_item_(JsonWriter* w, const char* key) {
    assert(w->depth > 0 ? (w->closing[w->depth - 1] == '}') == (key != NULL) : w->length == 0 && !key);
    if (w->has_items) json_append_(w, ",", 1);
    if (w->depth > 0) json_newline_(w);
    w->has_items = true;
    if (!key) return;
    json_append_quoted_(w, key, strlen(key));
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

// Writes a value that needs no quotes: a literal or a number.
static inline void json_put_word(JsonWriter* w, const char* key, const char* word) {
    json_begin_item_(w, key);
    json_append_(w, word, strlen(word));
}

// Writes a value that another writer of the same indentation has composed.
static inline void json_put_json(JsonWriter* w, const char* key, const char* text) {
    json_begin_item_(w, key);
    for (; *text; text++)
        if (*text == '\n')
            json_newline_(w);
        else
            json_append_(w, text, 1);
}

static inline void json_put_null(JsonWriter* w, const char* key) { json_put_word(w, key, "null"); }

static inline void json_put_bool(JsonWriter* w, const char* key, bool value) {
    json_put_word(w, key, value ? "true" : "false");
}

// A text of n bytes, which may be zeros.
static inline void json_put_text(JsonWriter* w, const char* key, const char* text, size_t n) {
    json_begin_item_(w, key);
    json_append_quoted_(w, text, n);
}

// A NULL value is written as null.
static inline void json_put_string(JsonWriter* w, const char* key, const char* value) {
    if (value)
        json_put_text(w, key, value, strlen(value));
    else
        json_put_word(w, key, "null");
}

static inline void json_put_int(JsonWriter* w, const char* key, int64_t value) {
    char digits[32];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    json_put_word(w, key, digits);
}

// Writes the fewest of 15 to 17 digits that parse to the same double; null for NaN and infinities.
static inline void json_put_double(JsonWriter* w, const char* key, double value) {
    char digits[32] = "null";
    for (int precision = 15; precision <= 17 && isfinite(value); precision++) {
        number_to_text(digits, precision, value);
        if (number_from_text(digits, NULL) == value) break;
    }
    json_put_word(w, key, digits);
}

// Writes the complete text and a final line break. What closes the stream reports errors.
static inline void json_writer_print(const JsonWriter* w, FILE* f) {
    assert(w->depth == 0 && w->length > 0);
    fwrite(w->text, 1, w->length, f);
    fputc('\n', f);
}

// The same to a file, through to the disk.
static inline bool json_writer_save(const JsonWriter* w, const char* path, Error* err) {
    FILE* f = fopen(path, "wb");
    if (!f) return fail(err, "%s: cannot create: %s", path, strerror(errno));
    json_writer_print(w, f);
    return flush_and_close(f, path, err);
}
