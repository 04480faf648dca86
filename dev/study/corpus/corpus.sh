#!/bin/sh
# Makes the corpus of the study (STUDY.md): long real documents, each 65,536 GPT-2 tokens of the files of a source
# package in their order.
#
#     make data/text_to_shards data/ids_to_shards
#     dev/study/corpus/corpus.sh FOLDER PREFIX        about 2 GB of downloads, 4 GB of disk, 3 GB of memory, half an hour
#
# writes PREFIX_train_*.bin, 4,096 documents, and PREFIX_val_*.bin, 256 of packages that training never sees;
# PREFIX.json, of which package each held-out document is and how many bytes it has, and what was removed as
# near-duplicate; PREFIX.sha256, the shards' checksums. Their hash is the corpus's name, which must be that of
# dev/study/corpus/corpus.json.
#
#     dev/study/corpus/corpus.sh --short FOLDER PREFIX
#
# makes the corpus of short documents out of short_packages.txt, Debian's packages of documentation: token streams
# PREFIX_train_*.bin and PREFIX_val_*.bin, and PREFIX_intact_train_*.bin, held-out documents each in a row of its own.
# Its name is that of dev/study/corpus/short_corpus.json.
#
# The packages are Debian's by version and sha256 (packages.txt), from the archive while it has these versions,
# then from snapshot.debian.org. What is in FOLDER/get already is not downloaded again; FOLDER may be deleted
# afterwards. corpus.py says how files are chosen. A copy of the corpus for a machine without a network:
#
#     dev/study/corpus/corpus.sh --pack PREFIX PARTS      PARTS/part_000.xz ..., of at most PART=40M
#     dev/study/corpus/corpus.sh --unpack PARTS PREFIX    from all of them
. "$(dirname "$0")/../../../scripts/shell/help.sh"
set -eu
export LC_ALL=C
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../../..
archive=https://deb.debian.org/debian
snapshot=https://snapshot.debian.org/archive/debian/20261123T000000Z

# fetch PATH SHA256: one file of the archive into the present folder
fetch() {
    file=${1##*/}
    for url in "$archive/$1" "$snapshot/$1"; do
        [ -f "$file" ] || curl -fsSL --retry 3 -o "$file.part" "$url" || continue
        [ ! -f "$file.part" ] || mv "$file.part" "$file"
        echo "$2  $file" | sha256sum -c --quiet - || die "$file: has another checksum than in $list.txt; delete it"
        return
    done
    die "$1: neither $archive nor $snapshot has it"
}

# decompress: xz -dc, also where there is only Python
decompress() {
    if command -v xz >/dev/null; then
        xz -dc
    else
        python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer, 1 << 20)'
    fi
}

# check PREFIX: are these the shards that dev/study/corpus/corpus.json names?
check() {
    (cd "$(dirname "$1")" && sha256sum -c --quiet "${1##*/}.sha256") || die "$1: damaged"
    name=$(sed -n 's/^ *"name": "\(.*\)",$/\1/p' "$1.json")
    known=$(cat "$here/corpus.json" "$here/short_corpus.json" 2>/dev/null | sed -n 's/^ *"name": "\(.*\)",$/\1/p')
    echo "${known:-$name}" | grep -qx "$name" || echo "warning: this corpus is $name; the study's are" $known >&2
    echo "corpus $name: ${1}_{train,val}_*.bin"
}

case ${1:-} in
--pack)
    [ $# -eq 3 ] || die "usage: corpus.sh --pack PREFIX PARTS"
    mkdir -p "$3"
    parts=$(cd "$3" && pwd)
    cd "$(dirname "$2")"
    prefix=${2##*/}
    # the names without the prefix's own, so that it may be another one elsewhere
    tar -cf - --sort=name --owner=0 --group=0 --mtime=@0 --transform "s/^$prefix/corpus/" \
        "${prefix}"_*_[0-9]*.bin "$prefix.json" "$prefix.sha256" "${prefix}_tokenizer.json" |
        xz --lzma2=preset=1,dict=64MiB,lc=0,lp=1,pb=1 -T 2 |
        split -b "${PART:-40M}" -d -a 3 --additional-suffix=.xz - "$parts/part_"
    ;;
--unpack)
    [ $# -eq 3 ] || die "usage: corpus.sh --unpack PARTS PREFIX"
    mkdir -p "$(dirname "$3")"
    prefix=${3##*/}
    cat "$2"/part_*.xz | decompress | tar -xf - -C "$(dirname "$3")" --transform "s/^corpus/$prefix/"
    packed=$(sed -n 's/^[^ ]*  \(.*\)_val_[0-9]*\.bin$/\1/p' "$3.sha256" | head -n 1)
    sed -i "s/  ${packed}_/  ${prefix}_/" "$3.sha256"
    check "$3"
    ;;
*)
    list=packages
    [ "${1:-}" != --short ] || { list=short_packages; shift; }
    [ $# -eq 2 ] || die "usage: corpus.sh [--short] FOLDER PREFIX"
    for program in text_to_shards ids_to_shards; do
        [ -x "$root/data/$program" ] || die "data/$program: not built; run: make data/$program"
    done
    mkdir -p "$1/get" "$(dirname "$2")"
    folder=$(cd "$1" && pwd)
    prefix=$(cd "$(dirname "$2")" && pwd)/${2##*/}
    cd "$folder/get"
    grep -v '^#' "$here/$list.txt" | while read -r _ name _ _ path sha256; do
        [ -f "${path##*/}" ] || echo "fetching $name"
        fetch "$path" "$sha256"
    done
    python3 "$here/corpus.py" select "$here/$list.txt" "$folder"
    python3 "$here/corpus.py" shards "$here/$list.txt" "$folder" "$prefix"
    check "$prefix"
    ;;
esac
