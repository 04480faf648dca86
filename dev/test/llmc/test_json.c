/*
Tests of llmc/formats/json.h and json_writer.h: parsed values, errors and their positions, written text, and
that damaged texts never cause an invalid memory access.
*/
#include <math.h>
#include "../../../llmc/formats/json_writer.h"
#include "../../../llmc/base/random.h"
#include "../check.h"

// Parses a copy in a block of exactly n bytes, so that the sanitizer detects reads past the end.
static bool parse(Json* j, const char* text, size_t n, Error* err) {
    char* copy = (char*)malloc(n ? n : 1);
    memcpy(copy, text, n);
    bool ok = json_parse(j, "file.json", copy, n, err);
    free(copy);
    return ok;
}

// ----------------------------------------------------------------------------

static void test_parsing(void) {
    const char* text = " {\"name\": \"a\\\"\\\\\\/\\b\\f\\n\\r\\tz\", \"n\" "
                       ":7,\r\n\t\"list\":[1,[],{},\"x\",null,true,false], "
                       "\"deep\": {\"name\": -2.5e1}, \"\": 0} ";
    Json j;
    Error err;
    bool ok = parse(&j, text, strlen(text), &err);
    CHECK(ok, "%s", err.msg);
    if (!ok) return;
    int64_t n = 0;
    double x = 0;
    bool b = false;
    CHECK(json_count(&j, 0) == 5, "%d", json_count(&j, 0));
    const char* name = json_string(&j, json_get(&j, 0, "name"));
    CHECK(name && strcmp(name, "a\"\\/\b\f\n\r\tz") == 0, "%s", name);
    CHECK(json_int64(&j, json_get(&j, 0, "n"), &n) && n == 7, "%lld", (long long)n);
    CHECK(json_double(&j, json_get(&j, 0, "n"), &x) && x == 7, "%g", x);
    CHECK(json_int64(&j, json_get(&j, 0, ""), &n) && n == 0, "%lld", (long long)n);
    CHECK(json_double(&j, json_get(&j, json_get(&j, 0, "deep"), "name"), &x) && x == -25, "%g", x);

    int list = json_get(&j, 0, "list"), i = 0;
    static const JsonType types[] = {JSON_NUMBER, JSON_ARRAY, JSON_OBJECT, JSON_STRING,
                                     JSON_NULL,   JSON_BOOL,  JSON_BOOL};
    for (int c = json_first(&j, list); c >= 0; c = json_next(&j, c), i++) {
        CHECK(i < 7 && json_is(&j, c, types[i]), "item %d has another type", i);
        CHECK(json_key(&j, c) == NULL, "item %d has a key", i);
        if (i == 4) CHECK(json_is_null(&j, c), "item 4 is not null");
        if (i >= 5) CHECK(json_bool(&j, c, &b) && b == (i == 5), "item %d has another value", i);
    }
    CHECK(i == 7 && json_count(&j, list) == 7, "%d of %d items", i, json_count(&j, list));
    i = 0;
    static const char* const keys[] = {"name", "n", "list", "deep", ""};
    for (int c = json_first(&j, 0); c >= 0; c = json_next(&j, c), i++)
        CHECK(i < 5 && strcmp(json_key(&j, c), keys[i]) == 0, "key %d: %s", i, json_key(&j, c));

    // absent nodes and nodes of another type
    CHECK(json_get(&j, 0, "nam") == -1 && json_get(&j, list, "name") == -1 && json_get(&j, -1, "name") == -1,
          "found an absent member");
    CHECK(json_get(&j, json_get(&j, 0, "deep"), "n") == -1, "found in the wrong object");
    n = 5, x = 5, b = true;
    CHECK(!json_int64(&j, list, &n) && !json_int64(&j, -1, &n) && n == 5, "%lld", (long long)n);
    CHECK(!json_double(&j, list, &x) && !json_double(&j, -1, &x) && x == 5, "%g", x);
    CHECK(!json_bool(&j, list, &b) && !json_bool(&j, -1, &b) && b, "value changed");
    CHECK(!json_string(&j, list) && !json_string(&j, -1) && !json_key(&j, -1) && !json_key(&j, 0),
          "found an absent string or key");
    CHECK(json_first(&j, -1) == -1 && json_next(&j, -1) == -1 && json_count(&j, -1) == 0,
          "found an absent child");
    CHECK(!json_is_null(&j, -1) && !json_is_null(&j, 0), "an absent node or an object is null");
    json_free(&j);
    json_free(&j);
    CHECK(json_get(&j, -1, "n") == -1, "found a member after json_free");
}

static void test_numbers(void) {
    static const struct {
        const char* text;
        double number;
        bool is_int;
        int64_t integer;
    } rows[] = {
        {"0", 0, true, 0},
        {"-0", -0.0, true, 0},
        {"9223372036854775807", 9223372036854775807.0, true, INT64_MAX},
        {"-9223372036854775808", -9223372036854775808.0, true, INT64_MIN},
        {"9223372036854775808", 9223372036854775808.0, false, 0},
        {"9007199254740993", 9007199254740992.0, true, 9007199254740993},
        {"9007199254740993.0", 9007199254740992.0, true, 9007199254740992},
        {"1e16", 1e16, false, 0},
        {"16.0", 16, true, 16},
        {"5e5", 5e5, true, 500000},
        {"-25E-1", -2.5, false, 0},
        {"1E+2", 100, true, 100},
        {"0.1", 0.1, false, 0},
        {"5e-324", 5e-324, false, 0},
        {"1e-400", 0, true, 0},
        {"1.7976931348623157e308", 1.7976931348623157e308, false, 0},
        {"0.1000000000000000055511151231257827021181583404541015625000000000000000000000000001", 0.1, false,
         0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Json j;
        Error err;
        double x = 1;
        int64_t n = 0;
        bool ok = parse(&j, rows[i].text, strlen(rows[i].text), &err);
        CHECK(ok, "%s: %s", rows[i].text, err.msg);
        if (!ok) continue;
        CHECK(json_double(&j, 0, &x) && memcmp(&x, &rows[i].number, sizeof x) == 0, "%s: %.17g", rows[i].text,
              x);
        CHECK(json_int64(&j, 0, &n) == rows[i].is_int && n == rows[i].integer, "%s: %lld", rows[i].text,
              (long long)n);
        json_free(&j);
    }
}

static void test_unicode(void) {
    static const struct {
        const char *text, *value;
    } rows[] = {
        {"\"\\u0041\\u00e9\\u20AC\\ud83d\\ude00\"", "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        {"\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        {"\"\\u007f\\u0080\\u07ff\\u0800\\uffff\"", "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf"},
        {"\"\\ud800\\udc00\\uDBFF\\uDFFF\"", "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Json j;
        Error err;
        bool ok = parse(&j, rows[i].text, strlen(rows[i].text), &err);
        CHECK(ok, "%s: %s", rows[i].text, err.msg);
        if (!ok) continue;
        CHECK(strcmp(json_string(&j, 0), rows[i].value) == 0, "%s became %s", rows[i].text,
              json_string(&j, 0));
        json_free(&j);
    }
}

// Each text is rejected at the given byte with the given message.
static void test_rejected_texts(void) {
    static const struct {
        const char* text;
        int at;
        const char* why;
    } rows[] = {
        {"", 0, "expected a value, but the text ends here"},
        {"  ", 2, "expected a value, but the text ends here"},
        {"nul", 0, "expected a value"},
        {"nulll", 4, "expected the end of the text"},
        {"NaN", 0, "expected a value"},
        {"Infinity", 0, "expected a value"},
        {"-Infinity", 1, "expected a digit"},
        {"True", 0, "expected a value"},
        {"'a'", 0, "expected a value"},
        {"\xef\xbb\xbf{}", 0, "expected a value"},
        {"{} {}", 3, "expected the end of the text"},
        {"1 // one", 2, "expected the end of the text"},
        {"01", 1, "expected the end of the text"},
        {"+1", 0, "expected a value"},
        {".5", 0, "expected a value"},
        {"-", 1, "expected a digit, but the text ends here"},
        {"1.", 2, "expected a digit"},
        {"1.e5", 2, "expected a digit"},
        {"1e", 2, "expected a digit"},
        {"1e+", 3, "expected a digit"},
        {"0x10", 1, "expected the end of the text"},
        {"[1e999]", 1, "number too large"},
        {"[-1e999]", 1, "number too large"},
        {"[", 1, "expected a value, but the text ends here"},
        {"[1", 2, "expected ',' or ']', but the text ends here"},
        {"[1,", 3, "expected a value"},
        {"[1,]", 3, "expected a value"},
        {"[,1]", 1, "expected a value"},
        {"[1 2]", 3, "expected ',' or ']'"},
        {"[1}", 2, "expected ',' or ']'"},
        {"]", 0, "expected a value"},
        {"{", 1, "expected a key"},
        {"{1:2}", 1, "expected a key"},
        {"{a:2}", 1, "expected a key"},
        {"{\"a\"}", 4, "expected ':'"},
        {"{\"a\":}", 5, "expected a value"},
        {"{\"a\":1,}", 7, "expected a key"},
        {"{\"a\":1]", 6, "expected ',' or '}'"},
        {"{\"a\":1 \"b\":2}", 7, "expected ',' or '}'"},
        {"{\"a\":1,\"b\":2,\"a\":3}", 13, "duplicate key 'a'"},
        {"{\"a\":{\"b\":1,\"\\u0062\":3}}", 12, "duplicate key 'b'"},
        {"{\"a\\nb\":1,\"a\\nb\":3}", 10, "duplicate key 'a?b'"},
        {"\"", 1, "expected the closing quote"},
        {"\"abc", 4, "expected the closing quote"},
        {"\"a\nb\"", 2, "control character"},
        {"\"a\tb\"", 2, "control character"},
        {"\"\\", 2, "unknown escape"},
        {"\"\\x41\"", 2, "unknown escape"},
        {"\"\\u12\"", 5, "four hex digits"},
        {"\"\\u12g4\"", 5, "four hex digits"},
        {"\"\\u0000\"", 7, "\\u0000"},
        {"\"\\ud800\"", 7, "surrogate"},
        {"\"\\ud800x\"", 7, "surrogate"},
        {"\"\\ud800\\n\"", 8, "surrogate"},
        {"\"\\ud800\\u0041\"", 13, "surrogate"},
        {"\"\\udc00\\ud800\"", 7, "surrogate"},
        {"\"\x80\"", 1, "invalid UTF-8"},
        {"\"\xc3\"", 1, "invalid UTF-8"},
        {"\"\xc0\xaf\"", 1, "invalid UTF-8"},
        {"\"\xc1\xbf\"", 1, "invalid UTF-8"},
        {"\"\xe0\x9f\xbf\"", 1, "invalid UTF-8"},
        {"\"\xed\xa0\x80\"", 1, "invalid UTF-8"},
        {"\"\xf0\x8f\xbf\xbf\"", 1, "invalid UTF-8"},
        {"\"\xf4\x90\x80\x80\"", 1, "invalid UTF-8"},
        {"\"\xf5\x80\x80\x80\"", 1, "invalid UTF-8"},
        {"\"\xe2\x82", 1, "invalid UTF-8"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Json j;
        Error err;
        char expected[256];
        snprintf(expected, sizeof expected, "file.json: bad JSON at byte %d: ", rows[i].at);
        bool ok = parse(&j, rows[i].text, strlen(rows[i].text), &err);
        CHECK(!ok, "'%s' was accepted", rows[i].text);
        if (!ok)
            CHECK(strncmp(err.msg, expected, strlen(expected)) == 0 && strstr(err.msg, rows[i].why) &&
                      !strchr(err.msg, '\n'),
                  "'%s' at %d: %s", rows[i].text, rows[i].at, err.msg);
        json_free(&j); // for a wrongly accepted text; must also be valid after an error
    }
    Json j;
    Error err;
    CHECK(!parse(&j, "[1]\0", 4, &err) && strstr(err.msg, "byte 3"), "%s", err.msg);
    CHECK(!parse(&j, "\"a\0b\"", 5, &err) && strstr(err.msg, "byte 2: control"), "%s", err.msg);
    CHECK(!json_parse(&j, "big", "", (size_t)JSON_MAX_BYTES + 1, &err) && strstr(err.msg, "big: JSON of"),
          "%s", err.msg);
    CHECK(!json_parse_file(&j, "build/no such file", &err) && strstr(err.msg, "build/no such file"), "%s",
          err.msg);
}

static void test_zeros_of_tokenizers(void) {
    Json j;
    Error err;
    CHECK(json_parse_tokenizer(&j, "tokenizer.json", "{\"a\\u0000\":\"\\u0000\"}", 20, &err), "%s", err.msg);
    CHECK(strcmp(json_string(&j, json_get(&j, 0, "a\xc0\x80")), json_zero) == 0, "a name with a zero");
    json_free(&j);
    CHECK(!json_parse_tokenizer(&j, "tokenizer.json", "\"\xc0\x80\"", 4, &err) &&
              strstr(err.msg, "invalid UTF-8"),
          "%s", err.msg);
}

static void test_depth(void) {
    char text[2 * JSON_MAX_DEPTH + 2];
    for (int depth = JSON_MAX_DEPTH; depth <= JSON_MAX_DEPTH + 1; depth++) {
        Json j;
        Error err;
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        bool ok = parse(&j, text, 2 * (size_t)depth, &err);
        CHECK(ok == (depth == JSON_MAX_DEPTH), "%d levels", depth);
        if (!ok) CHECK(strstr(err.msg, "byte 64: nested too deeply"), "%s", err.msg);
        json_free(&j);
    }
    // a million open brackets must not exhaust the stack
    size_t n = 1 << 20;
    char* brackets = (char*)malloc(n);
    Json j;
    Error err;
    memset(brackets, '[', n);
    CHECK(!parse(&j, brackets, n, &err), "accepted");
    free(brackets);
}

// Lookup and duplicate detection are correct and fast in an object that makes the hash table grow many times.
static void test_large_object(void) {
    enum { members = 50000 };
    char key[64];
    JsonWriter w = json_writer(0);
    json_begin_object(&w, NULL);
    for (int i = 0; i < members; i++) {
        snprintf(key, sizeof key, "model.layers.%d.weight", i);
        json_begin_object(&w, key);
        json_put_int(&w, "index", i);
        json_end(&w);
    }
    json_end(&w);
    Json j;
    Error err;
    bool ok = parse(&j, w.text, w.length, &err);
    CHECK(ok, "%s", err.msg);
    int wrong = 0;
    for (int i = 0; ok && i < members; i++) {
        int64_t index = -1;
        snprintf(key, sizeof key, "model.layers.%d.weight", i);
        wrong += !json_int64(&j, json_get(&j, json_get(&j, 0, key), "index"), &index) || index != i;
    }
    CHECK(wrong == 0, "%d of %d members are wrong", wrong, members);
    CHECK(ok && json_get(&j, 0, "index") == -1 && json_get(&j, 0, "model.layers.50000.weight") == -1,
          "found an absent member");
    json_free(&j);

    w.text[w.length - 1] = ',';
    const char* again = "\"model.layers.31.weight\":0}";
    char* text = (char*)malloc(w.length + strlen(again));
    memcpy(text, w.text, w.length);
    memcpy(text + w.length, again, strlen(again));
    ok = parse(&j, text, w.length + strlen(again), &err);
    CHECK(!ok && strstr(err.msg, "duplicate key 'model.layers.31.weight'"), "%s", err.msg);
    json_free(&j);
    free(text);
    json_writer_free(&w);
}

// ----------------------------------------------------------------------------

static void write_sample(JsonWriter* w) {
    json_begin_object(w, NULL);
    json_put_int(w, "step", 7);
    json_put_double(w, "loss", 2.5);
    json_put_string(w, "run \"a\"", "tab\t, quote\", slash\\, \xc3\xa9");
    json_begin_array(w, "betas");
    json_put_double(w, NULL, 0.9);
    json_put_double(w, NULL, NAN);
    json_put_bool(w, NULL, true);
    json_end(w);
    json_begin_object(w, "nothing");
    json_end(w);
    json_begin_array(w, "none");
    json_end(w);
    json_put_null(w, "window_size");
    json_put_string(w, "unset", NULL);
    json_put_bool(w, "off", false);
    json_end(w);
}

// Text of another writer gets the indentation of its place; a line break in a string is escaped, so never
// one.
static void test_put_json(void) {
    for (int indent = 0; indent <= 2; indent += 2) {
        JsonWriter w = json_writer(indent), inner = json_writer(indent), expected = json_writer(indent);
        json_begin_object(&w, NULL);
        json_begin_object(&expected, NULL);
        for (int i = 0; i < 2; i++) {
            JsonWriter* to = i ? &expected : &inner;
            json_begin_object(to, i ? "member" : NULL);
            json_put_string(to, "text", "two\nlines");
            json_begin_array(to, "list");
            json_put_int(to, NULL, 1);
            json_end(to);
            json_end(to);
        }
        json_put_json(&w, "member", inner.text);
        json_put_int(&w, "next", 2);
        json_put_int(&expected, "next", 2);
        json_end(&w);
        json_end(&expected);
        CHECK(strcmp(w.text, expected.text) == 0, "%s\n%s", w.text, expected.text);
        json_writer_free(&w);
        json_writer_free(&inner);
        json_writer_free(&expected);
    }
}

static void test_writing(void) {
    static const char line[] =
        "{\"step\":7,\"loss\":2.5,\"run \\\"a\\\"\":\"tab\\u0009, quote\\\", slash\\\\, \xc3\xa9\","
        "\"betas\":[0.9,null,true],\"nothing\":{},\"none\":[],\"window_size\":null,\"unset\":null,"
        "\"off\":false}";
    static const char page[] =
        "{\n  \"step\": 7,\n  \"loss\": 2.5,\n"
        "  \"run \\\"a\\\"\": \"tab\\u0009, quote\\\", slash\\\\, \xc3\xa9\",\n"
        "  \"betas\": [\n    0.9,\n    null,\n    true\n  ],\n  \"nothing\": {},\n  \"none\": [],\n"
        "  \"window_size\": null,\n  \"unset\": null,\n  \"off\": false\n}";
    JsonWriter w = json_writer(0);
    for (int round = 0; round < 2; round++) { // the second round reuses the memory of the first
        json_writer_clear(&w);
        write_sample(&w);
        CHECK(strcmp(w.text, line) == 0 && w.length == strlen(line), "%s", w.text);
    }
    json_writer_free(&w);

    w = json_writer(2);
    write_sample(&w);
    CHECK(strcmp(w.text, page) == 0, "%s", w.text);
    Error err;
    Json j;
    char path[PATH_LENGTH];
    path_join(path, test_scratch("json"), "sample.json");
    CHECK(json_writer_save(&w, path, &err), "%s", err.msg);
    bool ok = json_parse_file(&j, path, &err);
    CHECK(ok, "%s", err.msg);
    if (ok) {
        const char* s = json_string(&j, json_get(&j, 0, "run \"a\""));
        CHECK(s && strcmp(s, "tab\t, quote\", slash\\, \xc3\xa9") == 0, "%s", s);
        CHECK(json_count(&j, json_get(&j, 0, "betas")) == 3, "betas has not 3 items");
        json_free(&j);
    }
    size_t n = 0;
    char* saved = read_file(path, &n, &err);
    CHECK(saved && n == strlen(page) + 1 && saved[n - 1] == '\n', "%zu bytes", n);
    free(saved);

    CHECK(!json_writer_save(&w, "build/no such folder/x.json", &err) &&
              strstr(err.msg, "no such folder/x.json"),
          "%s", err.msg);
    if (access("/dev/full", W_OK) == 0)
        CHECK(!json_writer_save(&w, "/dev/full", &err) && strstr(err.msg, "/dev/full: cannot write"), "%s",
              err.msg);
    json_writer_free(&w);

    // a string with invalid UTF-8 and every control character
    w = json_writer(0);
    char odd[40] = "a\xff\xe2\x82z";
    for (int c = 1; c < 32; c++) odd[4 + c] = (char)c;
    json_put_string(&w, NULL, odd);
    ok = parse(&j, w.text, w.length, &err);
    CHECK(ok, "%s: %s", w.text, err.msg);
    if (ok) {
        const char* s = json_string(&j, 0);
        CHECK(strncmp(s, "a\xef\xbf\xbd\xef\xbf\xbd", 7) == 0, "%s", s);
        CHECK(strcmp(s + 7, odd + 4) == 0, "%s", s);
        json_free(&j);
    }
    json_writer_free(&w);
}

// One U+FFFD for each longest beginning of a character, as bytes.decode(errors="replace") in Python.
static void test_replaced_bytes(void) {
    static const struct {
        const char *bytes, *text;
    } rows[] = {{"\xe2\x80"
                 "9",
                 "\"\\ufffd9\""},
                {"\xe2"
                 "9",
                 "\"\\ufffd9\""},
                {"\x80\x80", "\"\\ufffd\\ufffd\""},
                {"\xe0\x80", "\"\\ufffd\\ufffd\""},
                {"\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\""},
                {"\xf0\x9f\x92"
                 "a",
                 "\"\\ufffd"
                 "a\""},
                {"\xf0\x8f", "\"\\ufffd\\ufffd\""},
                {"\xf4\x8f\xbf"
                 "a",
                 "\"\\ufffd"
                 "a\""},
                {"\xf4\x90", "\"\\ufffd\\ufffd\""},
                {"\xc1\xbf", "\"\\ufffd\\ufffd\""}};
    JsonWriter w = json_writer(0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        json_writer_clear(&w);
        json_put_string(&w, NULL, rows[i].bytes);
        CHECK(strcmp(w.text, rows[i].text) == 0, "row %zu: %s", i, w.text);
    }
    json_writer_free(&w);
}

static void test_written_numbers(void) {
    static const struct {
        double value;
        const char* text;
    } rows[] = {{0.1, "0.1"},       {1e-6, "1e-06"},
                {500000, "500000"}, {1.0 / 3, "0.3333333333333333"},
                {-0.0, "-0"},       {INFINITY, "null"},
                {-NAN, "null"},     {5e-324, "4.94065645841247e-324"},
                {2e-3, "0.002"},    {123456789012345678.0, "1.2345678901234568e+17"}};
    JsonWriter w = json_writer(0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        json_writer_clear(&w);
        json_put_double(&w, NULL, rows[i].value);
        CHECK(strcmp(w.text, rows[i].text) == 0, "%.17g became %s", rows[i].value, w.text);
    }
    int wrong = 0;
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = random_u64(1, 0, (uint64_t)i);
        double value, back = 0;
        int64_t integer = 0;
        Json j;
        Error err;
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value)) continue;
        json_writer_clear(&w);
        json_begin_array(&w, NULL);
        json_put_double(&w, NULL, value);
        json_put_int(&w, NULL, (int64_t)bits);
        json_end(&w);
        bool ok = parse(&j, w.text, w.length, &err) && json_double(&j, json_first(&j, 0), &back) &&
                  json_int64(&j, json_next(&j, json_first(&j, 0)), &integer);
        wrong += !ok || memcmp(&back, &value, sizeof value) != 0 || integer != (int64_t)bits;
        json_free(&j);
    }
    CHECK(wrong == 0, "%d numbers are not parsed as they were written", wrong);
    json_writer_free(&w);
}

// Reads all nodes of a subtree, so that the sanitizer detects an invalid index; returns their number.
static int visit(const Json* j, int node) {
    int n = 1;
    size_t length = json_string(j, node) ? strlen(json_string(j, node)) : 0;
    if (length > 1000) n += 1000;
    for (int c = json_first(j, node); c >= 0; c = json_next(j, c)) {
        if (json_key(j, c) && json_get(j, node, json_key(j, c)) != c) return -1000000;
        n += visit(j, c);
    }
    return n;
}

// Damaged texts: every prefix is rejected; a text with a few changed bytes may be accepted or rejected,
// without an invalid memory access.
static void test_damage(void) {
    static const char text[] =
        "{\"a\":[1,-2.5e-3,true,null,\"x\\u00e9\\ud83d\\ude00\\n\xe2\x82\xac\"],\"b\":{\"c\":{},"
        "\"d\":[[],[0]],\"long key of some length\":12345678901234567890},\"e\":\"\"}";
    static const char likely[] = "{}[]\",:\\u0e-+.tfn \xe2\x82\xf0";
    size_t n = sizeof text - 1;
    Json j;
    Error err;
    for (size_t cut = 0; cut < n; cut++) CHECK(!parse(&j, text, cut, &err), "%zu bytes were accepted", cut);
    int accepted = 0, wrong = 0;
    for (int round = 0; round < 20000; round++) {
        char damaged[sizeof text];
        memcpy(damaged, text, sizeof text);
        for (int k = 0; k <= round % 3; k++) {
            uint64_t r = random_u64(1, (uint64_t)k, (uint64_t)round);
            char c = r & 1 ? (char)(r >> 1) : likely[(r >> 1) % (sizeof likely - 1)];
            damaged[(r >> 12) % n] = c;
        }
        bool ok = parse(&j, damaged, n, &err);
        accepted += ok;
        wrong +=
            ok ? visit(&j, 0) != j.count : (strchr(err.msg, '\n') != NULL || !strstr(err.msg, "file.json: "));
        json_free(&j);
    }
    CHECK(wrong == 0, "%d texts have wrong nodes or messages", wrong);
    CHECK(accepted > 0 && accepted < 20000, "%d of 20000 accepted: the test covers one case only", accepted);
}

// A library of the process may set a locale with a decimal comma. localedef makes one that has nothing else.
static void test_decimal_comma(void) {
    const char* make =
        "cd build/test && printf 'LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \".\"\n"
        "grouping 3\nEND LC_NUMERIC\n' >json_comma.source && localedef --no-archive -c --quiet "
        "-i json_comma.source -f ANSI_X3.4-1968 ./json_comma >/dev/null 2>&1";
    char comma[8], *name = NULL;
    setenv("LOCPATH", "build/test", 1);
    if (system(make) >= 0) name = setlocale(LC_ALL, "json_comma");
    snprintf(comma, sizeof comma, "%.1f", 0.5);
    if (!name || strcmp(comma, "0,5") != 0) {
        SKIP("numbers in a locale with a decimal comma: localedef (package locales) makes none");
        return;
    }
    Json j;
    Error err;
    JsonWriter w = json_writer(0);
    double number = 0;
    json_put_double(&w, NULL, -0.125);
    CHECK(strcmp(w.text, "-0.125") == 0, "-0.125 became %s", w.text);
    json_writer_free(&w);
    CHECK(parse(&j, "[1234.5]", 8, &err), "%s", err.msg);
    CHECK(json_double(&j, json_first(&j, 0), &number) && number == 1234.5, "1234.5 became %g", number);
    json_free(&j);
    CHECK(parse_number("2.5e-3", &number) && number == 0.0025, "2.5e-3 became %g", number);
    CHECK(parse_count("2.5k", &number) && number == 2500, "2.5k became %g", number);
    snprintf(comma, sizeof comma, "%.1f", 0.5);
    CHECK(strcmp(comma, "0,5") == 0, "the library's locale has changed: %s", comma);
    setlocale(LC_ALL, "C");
}

// Looks at the bytes of a line alone: a file of empty lines takes linear time.
static void test_blank(void) {
    for (size_t n = 0; n <= 6; n++) {
        char* text = (char*)xrealloc(NULL, n); // what is behind it may not be read
        memcpy(text, " \t\r\n ", n > 5 ? 5 : n);
        if (n > 5) text[5] = '{';
        CHECK(text_is_blank(text, n) == (n <= 5), "%zu bytes", n);
        free(text);
    }
}

int main(void) {
    test_decimal_comma();
    test_parsing();
    test_numbers();
    test_unicode();
    test_rejected_texts();
    test_zeros_of_tokenizers();
    test_depth();
    test_large_object();
    test_writing();
    test_put_json();
    test_replaced_bytes();
    test_written_numbers();
    test_damage();
    test_blank();
    return test_report();
}
