/*
Tests of llmc/formats/safetensors.h: round trips, conversions, Hugging Face folders, and rejection of invalid
files.
*/
#include <math.h>
#include "../../../llmc/base/random.h"
#include "../../../llmc/formats/safetensors_set.h"
#include "../scratch.h"
#include "../tensor_files.h"

// The metadata value of this key, or NULL.
static const char* metadata(const Safetensors* st, const char* key) {
    return json_string(&st->header, json_get(&st->header, json_get(&st->header, 0, "__metadata__"), key));
}

// Writes a file with this header, valid or not, and data_bytes zero bytes of data.
static void write_raw(const char* path, const char* header, size_t data_bytes) {
    char file[4096];
    uint64_t length = strlen(header);
    memset(file, 0, sizeof file);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, length);
    write_bytes(path, file, 8 + length + data_bytes);
}

// Are the first n bytes of a tensor's data these?
static bool begins_with(const SafeTensor* t, const char* bytes, size_t n) {
    Error err;
    char* data = (char*)safetensors_bytes(t, &err);
    const bool same = data && memcmp(data, bytes, n) == 0;
    if (!data) printf("%s\n", err.msg);
    free(data);
    return same;
}

// Checks that opening a file fails with a one-line message that starts with its path and contains `why`.
static void check_rejected(const char* path, const char* why, const char* what) {
    Safetensors st;
    Error err;
    bool ok = safetensors_open(&st, path, &err);
    CHECK(!ok, "accepted: %s", what);
    if (!ok)
        CHECK(strstr(err.msg, why) && strncmp(err.msg, path, strlen(path)) == 0 && !strchr(err.msg, '\n'),
              "expected '%s' for %s, got: %s", why, what, err.msg);
    safetensors_close(&st);
}

// Writes a file with a tensor of each element type, an empty one, a scalar and one of 8 dimensions.
static void write_sample(const char* path) {
    static const int64_t shape[] = {3, 1}, empty[] = {4, 0}, deep[] = {1, 2, 1, 1, 2, 1, 1, 2};
    static const uint8_t data[64] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    SafeTensor tensors[SAFETENSORS_DTYPES + 3];
    Error err;
    int n = 0;
    for (; n < SAFETENSORS_DTYPES; n++) {
        SafetensorsDtype dtype = (SafetensorsDtype)n;
        tensors[n] = safetensors_tensor(safetensors_dtypes[dtype].name, dtype, 2, shape, data);
    }
    tensors[n++] = safetensors_tensor("empty", SAFETENSORS_F32, 2, empty, NULL);
    tensors[n++] = safetensors_tensor("scalar", SAFETENSORS_F64, 0, NULL, data);
    tensors[n++] = safetensors_tensor("deep", SAFETENSORS_U8, 8, deep, data);
    CHECK(safetensors_write(path, tensors, n, &err), "%s", err.msg);
}

static void test_round_trip(void) {
    static const size_t sizes[SAFETENSORS_DTYPES] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1};
    const char* path = in_folder("sample.safetensors");
    Safetensors st;
    Error err;
    write_sample(path);
    bool ok = safetensors_open(&st, path, &err);
    CHECK(ok, "%s", err.msg);
    if (!ok) return;
    CHECK(st.count == SAFETENSORS_DTYPES + 3, "%d tensors", st.count);
    for (int i = 0; i < SAFETENSORS_DTYPES; i++) { // in the order of the file
        const SafeTensor* t = &st.tensors[i];
        CHECK(t == safetensors_find(&st, safetensors_dtypes[i].name), "%s: out of order", t->name);
        CHECK((int)t->dtype == i && t->ndim == 2 && t->shape[0] == 3 && t->shape[1] == 1 && t->count == 3,
              "%s: another type or shape", t->name);
        CHECK(t->bytes == 3 * sizes[i] && begins_with(t, "\1\2\3\4\5", t->bytes < 5 ? t->bytes : 5),
              "%s: other data", t->name);
        CHECK(strcmp(t->path, path) == 0, "%s", t->path);
    }
    const SafeTensor *empty = safetensors_find(&st, "empty"), *scalar = safetensors_find(&st, "scalar"),
                     *deep = safetensors_find(&st, "deep");
    CHECK(empty && empty->count == 0 && empty->bytes == 0 && empty->ndim == 2 && empty->shape[0] == 4,
          "the empty tensor differs");
    CHECK(scalar && scalar->count == 1 && scalar->ndim == 0 && begins_with(scalar, "\1\2\3\4\5\6\7\10", 8),
          "the scalar differs");
    CHECK(deep && deep->count == 8 && deep->ndim == 8 && deep->shape[7] == 2,
          "the tensor of 8 dimensions differs");
    CHECK(!safetensors_find(&st, "F31") && !safetensors_find(&st, "__metadata__") &&
              !safetensors_find(&st, "dtype"),
          "found an absent tensor");
    const char* format = metadata(&st, "format");
    CHECK(format && strcmp(format, "pt") == 0, "%s", format);
    CHECK(!metadata(&st, "F32") && !metadata(&st, "forma"), "found an absent metadata key");
    CHECK(st.data % SAFETENSORS_ALIGNMENT == 0 && st.tensors[0].at == st.data, "data starts at byte %lld",
          (long long)st.data);
    safetensors_close(&st);
    safetensors_close(&st);

    // the same tensors write the same bytes
    size_t n = 0, m = 0;
    char* first = read_file(path, &n, &err);
    write_sample(in_folder("again.safetensors"));
    char* second = read_file(in_folder("again.safetensors"), &m, &err);
    CHECK(first && second && n == m && memcmp(first, second, n) == 0, "%zu and %zu bytes", n, m);
    free(first);
    free(second);
}

// The exact bytes of a small file, and files of other programs.
static void test_bytes(void) {
    static const char expected[] =
        "\x78\0\0\0\0\0\0\0"
        "{\"__metadata__\":{\"format\":\"pt\"},\"w\":{\"dtype\":\"F32\",\"shape\":[1,2],"
        "\"data_offsets\":[0,8]}}                                 "
        "\0\0\x80\x3f\0\0\0\xc0";
    static const int64_t shape[] = {1, 2};
    static const float values[] = {1, -2};
    const char* path = in_folder("bytes.safetensors");
    Error err;
    size_t n = 0;
    SafeTensor tensor = safetensors_tensor("w", SAFETENSORS_F32, 2, shape, values);
    CHECK(safetensors_write(path, &tensor, 1, &err), "%s", err.msg);
    char* file = read_file(path, &n, &err);
    CHECK(file && n == sizeof expected - 1 && memcmp(file, expected, n) == 0, "%zu bytes", n);
    free(file);

    // valid: no tensors; other white space, order of tensors and extra fields
    Safetensors st;
    write_raw(path, "{}", 0);
    CHECK(safetensors_open(&st, path, &err) && st.count == 0 && !safetensors_find(&st, "w"), "%s", err.msg);
    safetensors_close(&st);
    write_raw(path,
              "{ \"b\" : {\"shape\":[ ], \"data_offsets\":[1, 9], \"dtype\":\"F64\", \"more\":0},\n"
              "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
              "\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]} }  ",
              9);
    bool ok = safetensors_open(&st, path, &err);
    CHECK(ok, "%s", err.msg);
    if (!ok) return;
    CHECK(st.count == 3 && st.tensors[0].name[0] == 'a' && st.tensors[1].name[0] == 'z' &&
              st.tensors[2].name[0] == 'b',
          "not in the order of the file");
    double x = 1; // at an odd address
    CHECK(safetensors_read(&st.tensors[2], &x, 8, &err) && x == 0, "%g", x);
    CHECK(!metadata(&st, "format"), "found an absent metadata key");
    safetensors_close(&st);
}

// All numbers of 16 bits, against a conversion by ldexp.
static void test_all_halves(void) {
    enum { N = 1 << 16 };
    static uint16_t halves[N];
    static float read[N];
    const int64_t n = N;
    Error err;
    int wrong = 0;
    for (int i = 0; i < N; i++) halves[i] = (uint16_t)i;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        SafeTensor t = safetensors_tensor("x", bf16 ? SAFETENSORS_BF16 : SAFETENSORS_F16, 1, &n, halves);
        const int bits = bf16 ? 7 : 10, bias = bf16 ? 127 : 15;
        t.count = n;
        CHECK(safetensors_read(&t, read, 4, &err), "%s", err.msg);
        for (int i = 0; i < N; i++) {
            const int exponent = (i & 0x7fff) >> bits, mantissa = i & ((1 << bits) - 1);
            double want = exponent == 2 * bias + 1 ? (mantissa ? NAN : INFINITY)
                          : exponent               ? ldexp((1 << bits) + mantissa, exponent - bias - bits)
                                                   : ldexp(mantissa, 1 - bias - bits);
            if (i >> 15) want = -want;
            wrong += !(read[i] == (float)want && !signbit(read[i]) == !signbit(want)) &&
                     !(isnan(want) && isnan(read[i]));
        }
    }
    CHECK(wrong == 0, "%d wrong", wrong);
}

static void test_conversion(void) {
    static const struct {
        uint16_t half;
        double value;
    } halves[] = {{0x0000, 0},           {0x8000, -0.0},    {0x3c00, 1},        {0xc000, -2},
                  {0x3555, 0x1.554p-2},  {0x7bff, 65504},   {0x0001, 0x1p-24},  {0x8001, -0x1p-24},
                  {0x03ff, 0x1.ff8p-15}, {0x0400, 0x1p-14}, {0x7c00, INFINITY}, {0xfc00, -INFINITY}},
      brains[] = {{0x0000, 0},        {0x8000, -0.0},       {0x3f80, 1},        {0xc049, -3.140625},
                  {0x0001, 0x1p-133}, {0x7f7f, 0x1.fep127}, {0x7f80, INFINITY}, {0xff80, -INFINITY}};
    enum { n_half = sizeof halves / sizeof *halves, n_brain = sizeof brains / sizeof *brains, n_wide = 6 };
    static const double f64[n_wide] = {0, -0.0, 0.1, 1e300, -1e-300, 16777217};
    static const float f32[n_wide] = {0, -0.0f, 0.1f, 1e38f, 1e-45f, -INFINITY};
    static const int64_t size_half = n_half, size_brain = n_brain, size_wide = n_wide, size_nan = 1;
    static const uint16_t nan_half = 0x7e00;
    const char* path = in_folder("conversion.safetensors");
    Safetensors st;
    Error err;
    uint16_t half[n_half], brain[n_brain];
    for (int i = 0; i < n_half; i++) half[i] = halves[i].half;
    for (int i = 0; i < n_brain; i++) brain[i] = brains[i].half;
    SafeTensor tensors[] = {
        safetensors_tensor("odd", SAFETENSORS_U8, 1, &size_nan, "x"), // the following tensors are unaligned
        safetensors_tensor("f16", SAFETENSORS_F16, 1, &size_half, half),
        safetensors_tensor("bf16", SAFETENSORS_BF16, 1, &size_brain, brain),
        safetensors_tensor("f32", SAFETENSORS_F32, 1, &size_wide, f32),
        safetensors_tensor("f64", SAFETENSORS_F64, 1, &size_wide, f64),
        safetensors_tensor("nan", SAFETENSORS_F16, 1, &size_nan, &nan_half),
    };
    CHECK(safetensors_write(path, tensors, sizeof tensors / sizeof *tensors, &err), "%s", err.msg);

    bool ok = safetensors_open(&st, path, &err);
    CHECK(ok, "%s", err.msg);
    if (!ok) return;
    static const char* const names[] = {"f16", "bf16", "f32", "f64"};
    static const int counts[] = {n_half, n_brain, n_wide, n_wide};
    for (int k = 0; k < 4; k++) {
        float narrow[16];
        double wide[16];
        const SafeTensor* t = safetensors_find(&st, names[k]);
        CHECK(safetensors_read(t, narrow, 4, &err) && safetensors_read(t, wide, 8, &err), "%s", err.msg);
        for (int i = 0; i < counts[k]; i++) {
            double want = k == 0   ? halves[i].value
                          : k == 1 ? brains[i].value
                          : k == 2 ? (double)f32[i]
                                   : f64[i];
            float want_narrow = (float)want;
            CHECK(memcmp(&wide[i], &want, sizeof want) == 0, "%s[%d] is %a, not %a", names[k], i, wide[i],
                  want);
            CHECK(memcmp(&narrow[i], &want_narrow, sizeof want_narrow) == 0, "%s[%d] is %a, not %a", names[k],
                  i, (double)narrow[i], (double)want_narrow);
        }
    }
    float f = 5;
    double d = 5;
    CHECK(safetensors_read(safetensors_find(&st, "nan"), &f, 4, &err) && isnan(f), "%g", (double)f);
    CHECK(safetensors_read(safetensors_find(&st, "nan"), &d, 8, &err) && isnan(d), "%g", d);
    const SafeTensor* odd = safetensors_find(&st, "odd");
    f = 5, d = 5;
    CHECK(!safetensors_read(odd, &f, 4, &err) && f == 5 && strstr(err.msg, "'odd': has type U8"), "%s",
          err.msg);
    CHECK(!safetensors_read(odd, &d, 8, &err) && d == 5 && strstr(err.msg, path), "%s", err.msg);
    safetensors_close(&st);
}

// ----------------------------------------------------------------------------
// invalid files

// A header of one tensor "a", and of two tensors "a" and "b".
#define ONE(dtype, shape, offsets)                                                                           \
    "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define TWO(first, second)                                                                                   \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" first                                         \
    "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" second "}}"

static void test_bad_headers(void) {
    static const struct {
        const char* header;
        size_t data_bytes;
        const char* why;
    } rows[] = {
        {"", 0, "header: bad JSON at byte 0"},
        {"{\"a\":", 0, "header: bad JSON at byte 5"},
        {"{} x", 0, "header: bad JSON at byte 3"},
        {" {}", 0, "does not begin with '{'"},
        {"[]", 0, "does not begin with '{'"},
        {"null", 0, "does not begin with '{'"},
        {"{\"a\":1}", 0, "'a': its description is not an object"},
        {"{\"a\":[]}", 0, "'a': its description is not an object"},
        {"{\"a\\nb\":null}", 0, "'a?b': its description"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "'dtype' is missing"},
        {ONE("4", "[1]", "[0,4]"), 4, "'dtype' is missing or not a string"},
        {ONE("\"F8_E4M3\"", "[4]", "[0,4]"), 4, "type 'F8_E4M3' is not supported"},
        {ONE("\"f32\"", "[1]", "[0,4]"), 4, "type 'f32' is not supported"},
        {ONE("\"\"", "[1]", "[0,4]"), 4, "type '' is not supported"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "'shape' is missing"},
        {ONE("\"F32\"", "1", "[0,4]"), 4, "'shape' is missing or not an array"},
        {ONE("\"F32\"", "{}", "[0,4]"), 4, "'shape' is missing or not an array"},
        {ONE("\"F32\"", "[1.5]", "[0,6]"), 6, "its shape has a size that is not an integer"},
        {ONE("\"F32\"", "[\"1\"]", "[0,4]"), 4, "its shape has a size that is not an integer"},
        {ONE("\"F32\"", "[null]", "[0,4]"), 4, "its shape has a size that is not an integer"},
        {ONE("\"F32\"", "[9223372036854775808]", "[0,4]"), 4, "its shape has a size that is not an integer"},
        {ONE("\"F32\"", "[-1]", "[0,4]"), 4, "negative size"},
        {ONE("\"F32\"", "[-1,-1]", "[0,4]"), 4, "negative size"},
        {ONE("\"F32\"", "[0,-1]", "[0,0]"), 0, "negative size"},
        {ONE("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 dimensions"},
        {ONE("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0, "its shape is too large"},
        {ONE("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "its shape is too large"},
        {ONE("\"F32\"", "[4294967296,2147483648,2,1]", "[0,4]"), 4, "its shape is too large"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "'data_offsets' is missing"},
        {ONE("\"F32\"", "[1]", "4"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "{\"b\":0,\"e\":4}"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[]"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[4]"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[0,4,4]"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[0,\"4\"]"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[0.5,4.5]"), 5, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[4,0]"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[-4,0]"), 4, "'data_offsets' is missing or not"},
        {ONE("\"F32\"", "[1]", "[0,3]"), 4, "data_offsets span 3 bytes, but its type and shape need 4"},
        {ONE("\"F32\"", "[2]", "[0,4]"), 4, "data_offsets span 4 bytes, but its type and shape need 8"},
        {ONE("\"F32\"", "[0]", "[0,4]"), 4, "data_offsets span 4 bytes, but its type and shape need 0"},
        {ONE("\"F32\"", "[]", "[0,8]"), 8, "data_offsets span 8 bytes, but its type and shape need 4"},
        {ONE("\"F32\"", "[1]", "[0,9223372036854775807]"), 4, "span 9223372036854775807"},
        {ONE("\"F32\"", "[1]", "[9223372036854775800,9223372036854775804]"), 4, "it is truncated"},
        {ONE("\"F32\"", "[1]", "[0,4]"), 3,
         "ends at byte 4 of the data, but the file has only 3: it is truncated"},
        {ONE("\"F32\"", "[1]", "[0,4]"), 0, "it is truncated"},
        {ONE("\"F32\"", "[1]", "[0,4]"), 5, "no tensor has the 1 byte at the end of the file"},
        {ONE("\"F32\"", "[1]", "[1,5]"), 5, "'a': begins at byte 1 of the data: leaves a gap"},
        {"{}", 1, "no tensor has the 1 byte at the end of the file"},
        {TWO("[0,4]", "[5,9]"), 9, "'b': begins at byte 5 of the data: leaves a gap"},
        {TWO("[5,9]", "[0,4]"), 9, "'a': begins at byte 5 of the data: leaves a gap"},
        {TWO("[0,4]", "[3,7]"), 7, "'b': begins at byte 3 of the data: overlaps"},
        {TWO("[0,4]", "[0,4]"), 4, "'b': begins at byte 0 of the data: overlaps"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]}}",
         4, "'z': begins at byte 2 of the data: overlaps"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
         2, "duplicate key 'a'"},
        {"{\"__metadata__\":\"pt\"}", 0, "'__metadata__' is not an object"},
        {"{\"__metadata__\":{\"format\":1}}", 0, "'__metadata__' has a value that is not a string"},
        {"{\"__metadata__\":{\"x\":\"\",\"x\":\"\"}}", 0, "duplicate key 'x'"},
    };
    const char* path = in_folder("bad.safetensors");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        write_raw(path, rows[i].header, rows[i].data_bytes);
        check_rejected(path, rows[i].why, rows[i].header);
    }
}

#undef ONE
#undef TWO

static void test_bad_files(void) {
    const char* path = in_folder("bad.safetensors");
    char file[64] = {0};
    static const uint64_t lengths[] = {3, 57, (100 << 20) + 1, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63};
    check_rejected(in_folder("missing.safetensors"), "cannot open", "a missing file");
    check_rejected(scratch_folder, "is not a regular file", "a folder");
    check_rejected("/dev/null", "is not a regular file", "a device");
    path = in_folder("bad.safetensors");
    write_bytes(path, file, 0);
    check_rejected(path, "has 0 bytes, too few", "an empty file");
    write_bytes(path, file, 7);
    check_rejected(path, "has 7 bytes, too few", "a file of 7 bytes");
    write_bytes(path, file, 8);
    check_rejected(path, "header: bad JSON at byte 0: expected a value, but the text ends here",
                   "a header of 0 bytes");
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memcpy(file, &lengths[i], 8);
        write_bytes(path, file, lengths[i] == 3 ? 10 : sizeof file);
        check_rejected(path, "its header claims", "a header that is too long");
    }
    // a header above the limit that fits into the file; the file is sparse and takes no disk space
    memcpy(file, &lengths[2], 8);
    write_bytes(path, file, 8);
    if (truncate(path, 128 << 20) == 0)
        check_rejected(path, "its header claims a length of 104857601, the file has 134217728 bytes",
                       "a header above the limit");
    remove(path);
}

// Truncates a valid file to every length, then changes random bytes. A truncated file is rejected. A changed
// one may be accepted; then all its data must be readable.
static void test_damage(void) {
    const char* path = in_folder("sample.safetensors");
    Safetensors st;
    Error err;
    size_t n = 0, header = 0;
    write_sample(path);
    char* file = read_file(path, &n, &err);
    if (!file) die("%s", err.msg);
    memcpy(&header, file, 8);
    path = in_folder("damaged.safetensors");
    write_bytes(path, file, n);
    for (size_t cut = n; cut-- > 0;) {
        if (truncate(path, (off_t)cut) != 0) die("%s: %s", path, strerror(errno));
        bool ok = safetensors_open(&st, path, &err);
        CHECK(!ok, "%zu of %zu bytes were accepted", cut, n);
        safetensors_close(&st);
    }
    enum { rounds = 5000 };
    int accepted = 0, wrong = 0;
    char* damaged = (char*)malloc(n);
    int fd = open(path, O_WRONLY); // overwriting one file is much faster than creating 5000
    for (int round = 0; round < rounds; round++) {
        memcpy(damaged, file, n);
        for (int k = 0; k <= round % 2; k++) {
            uint64_t r = random_u64(1, (uint64_t)k, (uint64_t)round);
            // mostly in the header; half of the new bytes are digits and punctuation
            size_t at = r % 16 ? 8 + (r >> 4) % header : (r >> 4) % n;
            damaged[at] = r >> 40 & 1 ? "0123456789[]{}\",:-"[(r >> 41) % 18] : (char)(r >> 48);
        }
        if (pwrite(fd, damaged, n, 0) != (ssize_t)n) die("%s: %s", path, strerror(errno));
        bool ok = safetensors_open(&st, path, &err);
        accepted += ok;
        if (!ok) wrong += strchr(err.msg, '\n') || strncmp(err.msg, path, strlen(path)) != 0;
        double values[64];
        for (int i = 0; i < st.count; i++) {
            const SafeTensor* t = &st.tensors[i];
            wrong += safetensors_find(&st, t->name) != t || t->count > 64;
            if (t->count <= 64) safetensors_read(t, values, 8, &err);
            free(safetensors_bytes(t, &err));
        }
        safetensors_close(&st);
    }
    CHECK(wrong == 0, "%d files have wrong tensors or messages", wrong);
    CHECK(accepted > 0 && accepted < rounds, "%d of %d accepted: the test covers one case only", accepted,
          rounds);
    close(fd);
    free(damaged);
    free(file);
}

// ----------------------------------------------------------------------------
// errors of the writer

static void test_writer_errors(void) {
    static const int64_t four = 4, minus = -1, huge[] = {(int64_t)1 << 40, (int64_t)1 << 40},
                         big = (int64_t)1 << 62;
    const char* path = in_folder("writer.safetensors");
    static const char data[16] = {0};
    Error err;
    // Each case expects `why` in the message for two tensors, and no file.
#define U8(name, ndim, shape) safetensors_tensor(name, SAFETENSORS_U8, ndim, shape, data)
#define CASE(why, first, second)                                                                             \
    do {                                                                                                     \
        SafeTensor tensors[] = {first, second};                                                              \
        bool ok = safetensors_write(path, tensors, 2, &err);                                                 \
        CHECK(!ok && strstr(err.msg, why) && strstr(err.msg, path) && !exists(path),                         \
              "expected '%s', got: %s", why, err.msg);                                                       \
    } while (0)
    CASE("duplicate key 'a'", U8("a", 1, &four), U8("a", 1, &four));
    CASE("duplicate key '__metadata__'", U8("a", 1, &four), U8("__metadata__", 1, &four));
    CASE("negative size", U8("a", 1, &four), U8("b", 1, &minus));
    CASE("too large", U8("a", 1, &four), U8("b", 2, huge));
    CASE("data_offsets", U8("a", 1, &big), U8("b", 1, &big)); // the sum of the sizes overflows
#undef CASE
#undef U8

    // a path where no file can be created
    const char* nowhere = in_folder("no such folder/x.safetensors");
    SafeTensor tensor = safetensors_tensor("a", SAFETENSORS_U8, 1, &four, data);
    CHECK(!safetensors_write(nowhere, &tensor, 1, &err) && strstr(err.msg, nowhere) &&
              strstr(err.msg, "cannot create"),
          "%s", err.msg);

    // a full disk, detected when writing a large tensor and when flushing a small one
    if (access("/dev/full", W_OK) != 0) return;
    for (int64_t bytes = 16; bytes <= 1 << 20; bytes <<= 16) {
        char* block = (char*)xcalloc((size_t)bytes, 1);
        tensor = safetensors_tensor("a", SAFETENSORS_U8, 1, &bytes, block);
        CHECK(!safetensors_write("/dev/full", &tensor, 1, &err) &&
                  strstr(err.msg, "/dev/full: cannot write: "),
              "%s", err.msg);
        free(block);
    }
}

// ----------------------------------------------------------------------------
// Hugging Face folders

// Writes a file with a tensor for each letter of `names`: four bytes of that letter.
static void write_letters(const char* file, const char* names) {
    static const int64_t four = 4;
    SafeTensor tensors[4];
    char text[4][5], name[4][2] = {{0}};
    Error err;
    int n = 0;
    for (; names[n]; n++) {
        memset(text[n], names[n], 4);
        name[n][0] = names[n];
        tensors[n] = safetensors_tensor(name[n], SAFETENSORS_U8, 1, &four, text[n]);
    }
    if (!safetensors_write(in_folder(file), tensors, n, &err)) die("%s", err.msg);
}

static void check_letters(const SafetensorsSet* set, const char* names) {
    for (const char* c = names; *c; c++) {
        const char name[] = {*c, '\0'};
        const SafeTensor* t = safetensors_set_find(set, name);
        CHECK(t && strcmp(t->name, name) == 0 && begins_with(t, c, 1), "'%s'", name);
    }
    CHECK(!safetensors_set_find(set, "?") && !safetensors_set_find(set, "__metadata__"),
          "found an absent tensor");
}

static void test_sets(void) {
    static const struct {
        const char *index, *why;
    } rows[] = {
        {"[]", "index.json: 'weight_map' is missing, empty or not an object"},
        {"{\"weight_map\":[]}", "index.json: 'weight_map' is missing, empty or not an object"},
        {"{\"weight_map\":{}}", "index.json: 'weight_map' is missing, empty or not an object"},
        {"{\"weight_map\":", "index.json: bad JSON at byte 14"},
        {"{\"weight_map\":{\"a\":1}}", "tensor 'a' is not mapped to the name of a file"},
        {"{\"weight_map\":{\"a\":\"\"}}", "tensor 'a' is not mapped to the name of a file"},
        {"{\"weight_map\":{\"a\":\"../s1\"}}", "tensor 'a' is not mapped to the name of a file"},
        {"{\"weight_map\":{\"a\":\"..\"}}", "tensor 'a' is not mapped to the name of a file"},
        {"{\"weight_map\":{\"a\":\".\"}}", "is not a regular file"},
        {"{\"weight_map\":{\"a\":\"pipe\"}}", "pipe: is not a regular file"},
        {"{\"weight_map\":{\"a\":\"s3\"}}", "s3: cannot open"},
        {"{\"weight_map\":{\"a\":\"s1\",\"b\":\"s1\",\"c\":\"s1\",\"d\":\"s2\"}}",
         "s1: tensor 'c' is missing"},
        {"{\"weight_map\":{\"a\":\"s1\",\"b\":\"s1\",\"c\":\"s2\"}}", "s2: tensor 'd': "},
        {"{\"weight_map\":{\"a\":\"s1\",\"b\":\"s1\",\"c\":\"s2\",\"d\":\"s2\",\"e\":\"s5\"}}",
         "s5: tensor 'a': is also in s1, as "},
        {"{\"weight_map\":{\"a\":\"s1\",\"a\":\"s1\",\"c\":\"s2\"}}", "duplicate key 'a'"},
    };
    static const char good[] = "{\"metadata\":{\"total_size\":16},"
                               "\"weight_map\":{\"a\":\"s1\",\"c\":\"s2\",\"b\":\"s1\",\"d\":\"s2\"}}";
    SafetensorsSet set;
    Error err;
    CHECK(!safetensors_set_open(&set, scratch_folder, "model", &err) &&
              strstr(err.msg, "holds neither model.safetensors nor"),
          "%s", err.msg);
    write_letters("s1", "ab");
    write_letters("s2", "cd");
    write_letters("s5", "ae");
    CHECK(mkfifo(in_folder("pipe"), 0600) == 0,
          "mkfifo"); // to open it waits for a writer, but for O_NONBLOCK
    alarm(60);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        write_bytes(in_folder("model.safetensors.index.json"), rows[i].index, strlen(rows[i].index));
        bool ok = safetensors_set_open(&set, scratch_folder, "model", &err);
        CHECK(!ok, "accepted: %s", rows[i].index);
        if (!ok)
            CHECK(strstr(err.msg, rows[i].why) && strstr(err.msg, scratch_folder), "%s: %s", rows[i].index,
                  err.msg);
        CHECK(set.count == 0 && !set.files, "the set is not empty after an error");
        safetensors_set_close(&set);
    }
    alarm(0);
    char long_name[PATH_LENGTH + 64];
    snprintf(long_name, sizeof long_name, "{\"weight_map\":{\"a\":\"%0*d\"}}", PATH_LENGTH, 1);
    write_bytes(in_folder("model.safetensors.index.json"), long_name, strlen(long_name));
    CHECK(!safetensors_set_open(&set, scratch_folder, "model", &err) && strstr(err.msg, "'a' is not mapped"),
          "%s", err.msg);
    write_bytes(in_folder("model.safetensors.index.json"), good, strlen(good));
    bool ok = safetensors_set_open(&set, scratch_folder, "model", &err);
    CHECK(ok && set.count == 2, "%s", err.msg);
    check_letters(&set, "abcd");
    safetensors_set_close(&set);

    write_letters("model.safetensors", "xy"); // preferred to the index, as in Hugging Face transformers
    ok = safetensors_set_open(&set, scratch_folder, "model", &err);
    CHECK(ok && set.count == 1, "%s", err.msg);
    check_letters(&set, "xy");
    safetensors_set_close(&set);

    write_raw(in_folder("model.safetensors"), "{}", 1);
    CHECK(!safetensors_set_open(&set, scratch_folder, "model", &err) &&
              strstr(err.msg, "no tensor has the 1 byte"),
          "%s", err.msg);
}

// A file that becomes shorter while it is open is an error, of each way to read it.
static void test_truncated(void) {
    static float numbers[70000];
    const int64_t count = 70000;
    const int before = fcntl(STDIN_FILENO, F_GETFD);
    const char* path = in_folder("truncated.safetensors");
    SafeTensor tensors[] = {safetensors_tensor("a", SAFETENSORS_F32, 1, &count, numbers),
                            safetensors_tensor("b", SAFETENSORS_BF16, 1, &count, numbers)};
    Safetensors st;
    Error err;
    if (!safetensors_write(path, tensors, 2, &err) || !safetensors_open(&st, path, &err)) die("%s", err.msg);
    CHECK(fcntl(STDIN_FILENO, F_GETFD) == before, "writing has closed standard input");
    for (int i = 1; i >= 0; i--) {
        const SafeTensor* t = &st.tensors[i];
        CHECK(safetensors_read(t, numbers, 4, &err), "%s", err.msg);
        if (truncate(path, (off_t)t->at + 5000) != 0) die("truncate");
        CHECK(!safetensors_read(t, numbers, 4, &err) && strstr(err.msg, "was truncated while it was read"),
              "%s", err.msg);
        CHECK(!safetensors_bytes(t, &err) && strncmp(err.msg, path, strlen(path)) == 0, "%s", err.msg);
    }
    safetensors_close(&st);
}

int main(void) {
    strcpy(scratch_folder, test_scratch("safetensors"));
    test_round_trip();
    test_bytes();
    test_conversion();
    test_all_halves();
    test_bad_headers();
    test_bad_files();
    test_damage();
    test_truncated();
    test_writer_errors();
    test_sets();
    return test_report();
}
