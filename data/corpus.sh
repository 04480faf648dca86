#!/bin/sh
# Writes the corpus of scripts/quickstart.sh from text that every machine with a C compiler has: the C
# headers.
#
#     data/corpus.sh PREFIX        writes PREFIX_train_000000.bin and PREFIX_val_000000.bin, one token per byte
#
# The corpus is up to 16 MB of files, sorted by depth below the include folders, then by name. One file in
# twenty is in the validation split. Licence texts are not removed.
. "$(dirname "$0")/../scripts/shell/help.sh"
set -eu

fail() {
    echo "error: $1" >&2
    exit 1
}

[ $# -eq 1 ] || fail "usage: data/corpus.sh PREFIX"
encoder=$(dirname "$0")/text_to_shards
[ -x "$encoder" ] || fail "$encoder: not built; run: make data/text_to_shards"

# gcc's own headers, if gcc is installed
own=$(gcc -print-file-name=include 2>/dev/null || true)
case $own in /*) ;; *) own= ;; esac
[ -d /usr/include ] || fail "/usr/include: no such folder; install libc6-dev or glibc-devel"

files=$(mktemp)
trap 'rm -f "$files"' EXIT
trap 'exit 1' HUP INT TERM

# wc prints "SIZE PATH" and, for each batch, a total without a slash; the first sort key is the depth
find -H ${own:+"$own"} /usr/include -type f -name '*.h' -exec wc -c {} + |
    awk 'index($0, "/") { size = $1; sub(/^ *[0-9]+ /, ""); print gsub("/", "/"), size, $0 }' |
    LC_ALL=C sort -k1,1n -k3 |
    awk '(total += $2) <= 16000000 { sub(/^[0-9]+ [0-9]+ /, ""); print }' >"$files"
[ -s "$files" ] || fail "/usr/include: no headers; install libc6-dev or glibc-devel"

"$encoder" --tokenizer byte --val-fraction 0.05 --list "$files" --out "$1"
