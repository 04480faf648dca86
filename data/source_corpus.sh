#!/bin/sh
# Writes the corpus of scripts/gpu_quickstart.sh: long documents of real text, the largest C files of the
# Linux kernel, from the source package of Debian or Ubuntu. Needs apt, network access and 1 GB of disk, but
# not root.
#
#     data/source_corpus.sh PREFIX [VOCAB]
#
# writes GPT-2 tokens: PREFIX_train_000000.bin, some 60 million in documents of 16384, and
# PREFIX_val_000000.bin, some 3.6 million in documents of 32768. VOCAB is GPT-2's vocab.bpe, by default the
# copy in dev/test/fixtures. The package is kept in the folder PREFIX.source for the next run; the folder may
# be deleted.
#
# Files of one folder are similar, so whole folders are held out, one in sixteen. The documents of a file are
# adjacent in the shard: train with --shuffle. The text depends on the version of the package.
. "$(dirname "$0")/../scripts/shell/help.sh"
set -eu
export LC_ALL=C
unset CDPATH # cd would print a folder

fail() {
    echo "error: $1" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null || fail "$1: not found; $2"
}

# Runs a command; prints only the last line of its output, and only if it fails.
quietly() {
    "$@" >log 2>&1 || fail "$1 failed: $(sed -n 's/^[A-Z]: //; /./h; ${ g; p; }' log)"
}

{ [ $# -ge 1 ] && [ $# -le 2 ]; } || fail "usage: data/source_corpus.sh PREFIX [VOCAB]"
case $1 in '' | -* | */) fail "PREFIX '$1': must end with the start of a file name, and not start with -" ;; esac
data=$(cd "$(dirname "$0")" && pwd)
encoder=$data/text_to_shards
[ -x "$encoder" ] || fail "$encoder: not built; run: make data/text_to_shards"
vocab=${2:-$data/../dev/test/fixtures/gpt2/vocab.bpe}
{ [ -f "$vocab" ] && [ -r "$vocab" ]; } || fail "$vocab: cannot read; VOCAB is GPT-2's vocab.bpe, see data/README.md"
vocab=$(cd "$(dirname "$vocab")" && pwd)/$(basename "$vocab")
for tool in apt-get apt-cache dpkg-deb; do
    need $tool "this corpus requires Debian or Ubuntu; data/README.md lists others"
done
mkdir -p "$1.source" 2>/dev/null || fail "$1.source: cannot create this folder"
prefix=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$prefix.source"
rm -rf package tree
trap 'cd "$prefix.source" && rm -rf package tree log ./*.list held_*.bin' EXIT
trap 'exit 1' HUP INT TERM

# ----------------------------------------------------------------------------
# the package: linux-source depends on the newest linux-source-VERSION, which contains a compressed tar
# archive

package=$(apt-cache depends linux-source 2>/dev/null | sed -n 's/^ *Depends: \(linux-source-\)/\1/p' | head -n 1)
[ -n "$package" ] || fail "linux-source: apt does not know this package; run: apt-get update"
echo "$package: downloading 140 MB or more, unless it is in $1.source"
quietly apt-get download "$package"
# shellcheck disable=SC2012 # package file names contain no special characters
quietly dpkg-deb -x "$(ls -t "$package"_*.deb | head -n 1)" package
archive=$(find package/usr/src -type f -name 'linux-source-*.tar.*')
case $archive in
    *.xz) need xz "run: apt-get install xz-utils" ;;
    *.bz2) need bzip2 "run: apt-get install bzip2" ;;
    *) fail "$package: contains no linux-source-*.tar.xz or .tar.bz2" ;;
esac
mkdir tree
quietly tar -xf "$archive" -C tree --strip-components=1 --wildcards '*.c'

# ----------------------------------------------------------------------------
# the files: large ones that are not mainly tables of numbers, ordered by checksum to mix the subsystems

cd tree
find . -type f -name '*.c' -size +40000c |
    xargs awk '
        function judge() { if (numbers < bytes / 100) print file }
        FNR == 1 { judge(); file = FILENAME; bytes = numbers = 0 }
        { bytes += length($0) + 1; numbers += gsub(/0x/, "") }
        END { judge() }' |
    xargs cksum | sort -n |
    awk '
        {
            n = split($3, part, "/") # up to 4 folders, so that drivers/net/ethernet/VENDOR is one group
            folder = ""
            for (i = 2; i < n && i <= 5; i++) folder = folder "/" part[i]
            if (!(folder in number)) number[folder] = ++folders
            if (number[folder] % 16 == 0) print $3 >"../held.list"
            else if ((bytes += $2) <= 160000000) print $3 >"../train.list"
        }'
{ [ -s ../train.list ] && [ -s ../held.list ]; } || fail "$package: too few long C files"

# Without --val-fraction, text_to_shards writes only a train split and removes all shards of the prefix. The
# held-out shard is therefore written under another prefix and renamed.
encode() {
    "$encoder" --tokenizer gpt2 --vocab "$vocab" --doc-len "$1" --list "$2" --out "$3"
}
summary=$(encode 32768 ../held.list ../held)
encode 16384 ../train.list "$prefix"
mv ../held_train_000000.bin "${prefix}_val_000000.bin"
echo "$summary" | sed 's/; train: /; val: /'
