/*
Tests of llmc/base/checksum.h: any changed bit, moved word or lost part changes a checksum; parts are summed
in any order.
*/
#include "../../../llmc/base/checksum.h"
#include "../../../llmc/base/random.h"
#include "../check.h"

enum { BYTES = 4096, BLOCK = CHECKSUM_BLOCK_BYTES };

static char data[BYTES];

static void test_bits(void) {
    for (int64_t offset = 0; offset <= (int64_t)1 << 40; offset = offset ? 64 * offset : 4096) {
        const uint64_t sum = checksum(data, BYTES, offset);
        int same = 0;
        for (int bit = 0; bit < 8 * BYTES; bit++) {
            data[bit / 8] ^= (char)(1 << bit % 8);
            same += checksum(data, BYTES, offset) == sum;
            data[bit / 8] ^= (char)(1 << bit % 8);
        }
        CHECK(same == 0, "offset %lld: %d bits do not count", (long long)offset, same);
        CHECK(checksum(data, BYTES, offset) == sum, "not a function of the data");
    }
}

// The same two words, changed in two places, swapped, and the same bits in both.
static void test_words(void) {
    const uint64_t sum = checksum(data, BYTES, 0);
    uint32_t words[BYTES / 4];
    memcpy(words, data, BYTES);
    int same = 0;
    for (int k = 1; k < BYTES / 4; k++) {
        uint32_t first = words[0], other = words[k];
        words[0] = other, words[k] = first;
        same += checksum(words, BYTES, 0) == sum;
        words[0] = first ^ 1, words[k] = other ^ 1;
        same += checksum(words, BYTES, 0) == sum;
        words[0] = first + 1, words[k] = other - 1;
        same += checksum(words, BYTES, 0) == sum;
        words[0] = first, words[k] = other;
    }
    CHECK(same == 0, "%d changes do not count", same);
    memset(words, 0, sizeof words);
    for (size_t n = 0; n < BYTES; n += 4)
        same += checksum(words, n, 0) == checksum(words, n + 4, 0) ||
                checksum(words, n + 4, 0) == checksum(words, n + 4, 4);
    CHECK(same == 0, "%d: zeros do not count", same);
}

// Words of bytes 0, 1, 2, ... have a value that stays the same between versions.
static void test_values(void) {
    unsigned char bytes[13];
    uint64_t expected = 0;
    for (int i = 0; i < 13; i++) bytes[i] = (unsigned char)i;
    const uint64_t words[] = {0x03020100, 0x07060504, 0x0b0a0908, 0x0c};
    for (uint64_t i = 0; i < 4; i++) expected += mix64(words[i] + (11 + i) * 0x9e3779b97f4a7c15u);
    CHECK(checksum(bytes, 13, 40) == expected, "%#llx", (unsigned long long)expected);
    CHECK(mix64(0) == 0 && mix64(0x9e3779b97f4a7c15u) == 0xe220a8397b1dcdafu,
          "splitmix64's first number is %#llx", (unsigned long long)mix64(0x9e3779b97f4a7c15u));
    char hex[17];
    uint64_t value = 0;
    CHECK(strcmp(hex64(hex, 0x0123456789abcdefu), "0123456789abcdef") == 0, "%s", hex);
    CHECK(hex64_parse(hex, &value) && value == 0x0123456789abcdefu, "%#llx", (unsigned long long)value);
    static const char* const bad[] = {"",
                                      "0",
                                      "0123456789abcde",
                                      "0123456789abcdef0",
                                      "0123456789ABCDEF",
                                      " 123456789abcdef",
                                      "-123456789abcdef",
                                      "0x23456789abcdef"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(!hex64_parse(bad[i], &value), "'%s'", bad[i]);
    CHECK(!hex64_parse(NULL, &value), "NULL");
}

// Parts of any sizes, added in any order and across the border of two blocks, give the sums of whole blocks.
static void test_parts(void) {
    for (int trial = 0; trial < 200; trial++) {
        const int64_t before = 4 * (int64_t)(random_u64(1, 0, (uint64_t)trial) % (BYTES / 4 + 1));
        const int64_t offset = BLOCK - before;
        uint64_t whole[2] = {0, 0}, parts[2] = {0, 0};
        whole[0] = checksum(data, (size_t)before, offset);
        whole[1] = checksum(data + before, (size_t)(BYTES - before), BLOCK);
        int64_t cuts[5] = {0, 0, 0, 0, BYTES};
        for (int i = 1; i < 4; i++)
            cuts[i] = cuts[i - 1] + 4 * (int64_t)(random_u64(2, (uint64_t)i, (uint64_t)trial) %
                                                  (uint64_t)((BYTES - cuts[i - 1]) / 4 + 1));
        for (int i = 4; i-- > 0;)
            checksum_add(parts, data + cuts[i], (size_t)(cuts[i + 1] - cuts[i]), offset + cuts[i]);
        CHECK(parts[0] == whole[0] && parts[1] == whole[1], "trial %d, border at %lld", trial,
              (long long)before);
    }
    CHECK(checksum_blocks(0, BLOCK) == 0 && checksum_blocks(1, BLOCK) == 1 &&
              checksum_blocks(BLOCK, BLOCK) == 1 && checksum_blocks((int64_t)BLOCK + 1, BLOCK) == 2,
          "number of blocks");
}

static void test_hash(void) {
    const uint64_t all = hash64(0, data, 100);
    CHECK(hash64(1, data, 100) != all && hash64(0, data, 99) != all && hash64(0, data + 1, 100) != all,
          "equal");
    CHECK(hash64(0, "", 0) != 0 && hash64(0, "\0", 1) != hash64(0, "\0\0", 2), "the length does not count");
    CHECK(hash64(hash64(0, "a", 1), "b", 1) != hash64(hash64(0, "b", 1), "a", 1), "the order does not count");
    for (int bit = 0; bit < 800; bit++) {
        data[bit / 8] ^= (char)(1 << bit % 8);
        CHECK(hash64(0, data, 100) != all, "bit %d does not count", bit);
        data[bit / 8] ^= (char)(1 << bit % 8);
    }
}

int main(void) {
    for (int i = 0; i < BYTES; i++) data[i] = (char)random_u64(7, 0, (uint64_t)i);
    test_bits();
    test_words();
    test_values();
    test_parts();
    test_hash();
    return test_report();
}
