#!/bin/sh
# The corpus of the quick start: text that is on the machine already, the C headers it compiles with.
#
#     data/corpus.sh PREFIX        writes PREFIX_train_000000.bin and PREFIX_val_000000.bin, one token a byte
#
# Up to 16 MB: first what lies closest to the top of the include folders, in the order of the names. A file in
# twenty is for validation. Licence texts are left in; they are real text.
set -eu

fail() {
    echo "error: $1" >&2
    exit 1
}

[ $# -eq 1 ] || fail "usage: data/corpus.sh PREFIX"
encoder=$(dirname "$0")/text_to_shards
[ -x "$encoder" ] || fail "$encoder: not there yet; build it with: make data/text_to_shards"

# gcc's own headers, if there is a gcc
own=$(gcc -print-file-name=include 2>/dev/null || true)
case $own in /*) ;; *) own= ;; esac
[ -d /usr/include ] || fail "/usr/include: no such folder; install libc6-dev or glibc-devel"

files=$(mktemp)
trap 'rm -f "$files"' EXIT
trap 'exit 1' HUP INT TERM

# wc prints "SIZE PATH", and for each batch a total, which has no slash; the first sort key is the depth
find -H ${own:+"$own"} /usr/include -type f -name '*.h' -exec wc -c {} + |
    awk 'index($0, "/") { size = $1; sub(/^ *[0-9]+ /, ""); print gsub("/", "/"), size, $0 }' |
    LC_ALL=C sort -k1,1n -k3 |
    awk '{ total += $2; if (total > 16000000) exit; sub(/^[0-9]+ [0-9]+ /, ""); print }' >"$files"
[ -s "$files" ] || fail "/usr/include: no headers; install libc6-dev or glibc-devel"

"$encoder" --tokenizer byte --val-fraction 0.05 --list "$files" --out "$1"
