// Tests of llmc/base/numbers.h and common.h: valid and invalid numbers and counts, counts and durations in
// messages, and how long these are.
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

static void test_counted(void) {
    static const struct {
        int64_t n;
        const char *noun, *text;
    } counts[] = {{1, "token", "1 token"},
                  {0, "token", "0 tokens"},
                  {2, "token", "2 tokens"},
                  {-1, "token", "-1 tokens"},
                  {INT64_MAX, "token", "9223372036854775807 tokens"},
                  {1, "micro-batch", "1 micro-batch"},
                  {2, "micro-batch", "2 micro-batches"},
                  {2, "pass", "2 passes"},
                  {2, "index", "2 indexes"},
                  {1, "entry", "1 entry"},
                  {2, "entry", "2 entries"},
                  {2, "key", "2 keys"},
                  {2, "month", "2 months"},
                  {1, "training sequence", "1 training sequence"},
                  {2, "training sequence", "2 training sequences"}};
    char line[512];
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        const Counted c = counted(counts[i].n, counts[i].noun);
        CHECK(strcmp(c.text, counts[i].text) == 0, "%s, not %s", c.text, counts[i].text);
    }
    snprintf(line, sizeof line, "%s, %s, %s; %lld %s; %s, %s", counted(1, "step").text,
             counted(2, "step").text, counted(3, "rank").text, 1LL, plural(1, "answer").text,
             counted_range(2, 2, "batch").text, counted_range(0, 1, "batch").text);
    CHECK(strcmp(line, "1 step, 2 steps, 3 ranks; 1 answer; 2 batches, 0 to 1 batch") == 0, "%s", line);
    const Counted longest = counted_range(INT64_MIN, INT64_MAX, "training sequence");
    CHECK(strcmp(longest.text, "-9223372036854775808 to 9223372036854775807 training sequences") == 0, "%s",
          longest.text);
}

static void test_duration(void) {
    static const struct {
        double seconds;
        const char* text;
    } durations[] = {
        {1, "1 s"},           {150, "2.5 minutes"}, {3600, "1 hour"},      {3601, "1 hour"},
        {3636, "1.01 hours"}, {86400, "24 hours"},  {86400 * 4, "4 days"}, {86400 * 731, "2 years"}};
    char text[32];
    for (size_t i = 0; i < sizeof durations / sizeof durations[0]; i++) {
        duration_text(text, durations[i].seconds);
        CHECK(strcmp(text, durations[i].text) == 0, "%s, not %s", text, durations[i].text);
    }
}

int main(void) {
    test_counted();
    test_duration();
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
