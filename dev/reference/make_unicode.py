"""Writes llmc/base/unicode.h: which code points are letters, numbers and white space.

    python3 dev/reference/make_unicode.py > llmc/base/unicode.h

The Unicode version is that of the unicodedata2 package if it is installed, else that of the interpreter. The
checked-in header is of Unicode 16.0 (unicodedata2 16.0.0 or Python 3.14), the version of tiktoken 0.14.
"""

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

OTHER, LETTER, NUMBER, SPACE = range(4)


def char_class(c):
    category = unicodedata.category(chr(c))
    if category[0] == "L":
        return LETTER
    if category[0] == "N":
        return NUMBER
    # the property White_Space: the separators, and the six control characters that act as such
    if category[0] == "Z" or 0x09 <= c <= 0x0D or c == 0x85:
        return SPACE
    return OTHER


def rows(items, width):
    line = "   "
    for item in items:
        if len(line) + len(item) + 2 > width:
            yield line
            line = "   "
        line += " " + item + ","
    yield line


classes = [char_class(c) for c in range(0x110000)]
runs = [4 * c + k for c, k in enumerate(classes) if c == 0 or k != classes[c - 1]]
ascii_rows = "\n".join("    " + " ".join(f"{k}," for k in classes[c : c + 32]) for c in range(0, 128, 32))
run_rows = "\n".join(rows((hex(r) for r in runs), 110))

print(f"""/*
The classes of characters that GPT-2's splitting of text into words asks for: \\p{{L}}, \\p{{N}} and \\s, of
Unicode {unicodedata.unidata_version}.

Written by dev/reference/make_unicode.py: change it there.
*/
#ifndef LLMC_UNICODE_H
#define LLMC_UNICODE_H

#include <stdint.h>

enum {{ UNICODE_OTHER, UNICODE_LETTER, UNICODE_NUMBER, UNICODE_SPACE }};

// clang-format off
static const uint8_t unicode_ascii_classes[128] = {{
{ascii_rows}
}};

// Runs of code points of one class, sorted: 4 * the first code point + the class. A run ends where the next
// one begins.
static const uint32_t unicode_runs[{len(runs)}] = {{
{run_rows}
}};
// clang-format on

// The class of a code point; one above 0x10ffff is UNICODE_OTHER.
static inline int unicode_class(uint32_t code_point) {{
    if (code_point < 128) return unicode_ascii_classes[code_point];
    if (code_point > 0x10ffff) return UNICODE_OTHER;
    // the last run that starts at or before the code point lies in [low, high)
    int low = 0, high = (int)(sizeof unicode_runs / sizeof unicode_runs[0]);
    while (high - low > 1) {{
        int middle = (low + high) / 2;
        if (unicode_runs[middle] >> 2 <= code_point) low = middle;
        else high = middle;
    }}
    return (int)(unicode_runs[low] & 3);
}}

#endif // LLMC_UNICODE_H""")
