// Tests of llmc/base/numbers.h and common.h: valid and invalid numbers and counts, the length of messages.
#include "../check.h"
#include "../../../llmc/base/numbers.h"

static void test_good(const char* text, double want, bool plain) {
    double count = -1, number = -1;
    CHECK(parse_count(text, &count) && count == want, "'%s' is %g, not %g", text, count, want);
    CHECK(parse_number(text, &number) == plain && (!plain || number == want),
          "'%s' as a number without a suffix", text);
}

static void test_whole(void) {
    static const struct {
        const char* text;
        int64_t value;
    } good[] = {{"0", 0},          {"007", 7},
                {"-3", -3},        {"9007199254740993", 9007199254740993},
                {"16Ki", 16384},   {"9223372036854775807", INT64_MAX},
                {"2.5e3", 2500},   {"1e18", 1000000000000000000},
                {"1.5Mi", 1572864}};
    static const char* const bad[] = {"",   "-",  "1.5", "9223372036854775808", "1e19", "8388608Ti",
                                      "1x", "1 ", "0x1"};
    int64_t value = 0;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        CHECK(parse_whole(good[i].text, &value) && value == good[i].value, "'%s' is %lld", good[i].text,
              (long long)value);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK(!parse_whole(bad[i], &value), "'%s' is accepted as a whole number", bad[i]);
}

// A path of any length hides neither the cause behind it nor where it begins.
static void test_long_message(void) {
    char path[PATH_LENGTH];
    Error err;
    for (size_t n = 900; n < sizeof path; n += n < 1100 ? 1 : 333) {
        memset(path, 'x', n);
        memcpy(path, "/data/", 6);
        path[n] = '\0';
        fail(&err, "%s: cannot open: No such file or directory", path);
        const size_t length = strlen(err.msg), whole = n + strlen(": cannot open: No such file or directory");
        CHECK(length == (whole < sizeof err.msg ? whole : sizeof err.msg - 1), "%zu bytes of %zu", length,
              whole);
        CHECK(strncmp(err.msg, "/data/xxx", 9) == 0 &&
                  strstr(err.msg, "xx: cannot open: No such file or directory"),
              "%zu bytes: %s", n, err.msg);
        CHECK(!strstr(err.msg, "x...x") == (whole < sizeof err.msg), "%zu bytes: %s", n, err.msg);
    }
}

int main(void) {
    test_long_message();
    static const char* const bad[] = {"",      " ",      " 1",   "1 ",   "k",     "1kk",   "1KB",  "1ki",
                                      "1m",    "1i",     "1kiB", "0x10", "inf",   "nan",   "-inf", "1e",
                                      "1e999", ".",      "-",    "--1",  "1,000", "1.2.3", "+ 1",  "e5",
                                      "1_0",   "1e308k", "-0x1", "1Kii", "1\n",   "١"};
    double value;
    test_good("0", 0, true);
    test_good("42", 42, true);
    test_good("-3", -3, true);
    test_good("+3", 3, true);
    test_good("1.5e3", 1500, true);
    test_good(".5", 0.5, true);
    test_good("5.", 5, true);
    test_good("1e9", 1e9, true);
    test_good("9007199254740993", 9007199254740992, true); // rounded: doubles are exact up to 2^53
    test_good("1k", 1e3, false);
    test_good("1K", 1e3, false);
    test_good("2.5M", 2.5e6, false);
    test_good("3G", 3e9, false);
    test_good("1T", 1e12, false);
    test_good("16Ki", 16384, false);
    test_good("1.5Mi", 1572864, false);
    test_good("2.5Gi", 2684354560, false);
    test_good("1Ti", 1099511627776, false);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(!parse_count(bad[i], &value), "'%s' is accepted as a count", bad[i]);
        CHECK(!parse_number(bad[i], &value), "'%s' is accepted as a number", bad[i]);
    }
    test_whole();
    return test_report();
}
