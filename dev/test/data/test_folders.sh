#!/usr/bin/env bash
# data/text_to_shards --document folder: a folder's files are one document, each behind a line with its name
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/folders
. dev/test/check.sh
mkdir -p $scratch/in/b/deep $scratch/two/a $scratch/two/b
in=$scratch/in
printf first >$in/a
printf 'third\n' >$in/c
printf capital >$in/b/B
printf deep >$in/b/deep/x
printf hidden >$in/.hidden
printf named >$scratch/own
folders() { data/text_to_shards --tokenizer byte --document folder --out $scratch/f "$@"; }

# holds TEXT: of the train split, in which @ stands for the end-of-text token
holds() {
    equals "$1" "$(tail -c +1025 $scratch/f_train_000000.bin | python3 -c '
import struct, sys
data = sys.stdin.buffer.read()
print("".join("@" if id == 256 else chr(id) for id in struct.unpack(f"<{len(data) // 2}H", data)))')"
}

# files that are named, and links of files that were read already, are as ever
check "streams" folders $in/b/ $in $scratch/own
said "train: 3 documents, 77 tokens"
said "2 repeated"
holds "$(printf '@==> B <==\ncapital\n==> deep/x <==\ndeep@==> a <==\nfirst\n==> c <==\nthird\n@named')"
check "by --list" folders --list <(printf '%s\n' $in/b) $in/c
holds "$(printf '@third\n@==> B <==\ncapital\n==> deep/x <==\ndeep')"

# a document of --doc-len extends over files; the rest of each folder is dropped
check "documents" folders --doc-len 15 $in/b $in/c $in
said "train: 3 documents, 45 tokens, 1 shard; dropped 13 tokens (22.4%) at the ends of folders"
holds "$(printf '==> B <==\ncapital\n==> deep/x <==> a <==\nfirst')"

# a split has whole folders
for i in 1 2 3 4 5; do
    for folder in a b; do printf '%s' $folder$folder$folder >$scratch/two/$folder/$i; done
done
check "splits" folders --val-fraction 0.5 $scratch/two/a $scratch/two/b
said "train: 1 document, 70 tokens, 1 shard; val: 1 document, 70 tokens, 1 shard"

# and the same ones, however their paths are written. Folders of one name are drawn apart
for i in 1 2 3 4 5 6 7 8; do
    mkdir -p $scratch/many/p$i $scratch/equal/$i/src
    printf '%s' $i$i$i | tee $scratch/many/p$i/text >$scratch/equal/$i/src/text
done
split() { # FILE FOLDER...: writes the documents held out to FILE
    check "a split" folders --val-fraction 0.4 "${@:2}"
    tail -c +1025 $scratch/f_val_000000.bin >$scratch/$1
}
as_before() {
    split again "$@"
    same $scratch/again $scratch/first
}
split first "$PWD"/$scratch/many/p*
as_before $scratch/many/p*
as_before ./$scratch/many/p*/
as_before $scratch/many/p1/../p1 $scratch/many/./p[2-8]//
as_before --list <(printf '%s\n' $scratch/many/p*/)
held() { sed -n 's/.*val: \([0-9]*\) document.*/\1/p' $scratch/stdout; }
check "equal names" folders --val-fraction 0.4 $scratch/equal/*/src
if [ "$(held)" -gt 1 ] && [ "$(held)" -lt 7 ]; then pass; else fail "$(held) of 8 folders of one name are held out"; fi
check "files" data/text_to_shards --tokenizer byte --document file --out $scratch/f $scratch/two/a
said "5 documents"
# of a source tree the files that are not text, by their start or by a zero byte far behind it, may be left out
mkdir -p $scratch/tree/deep
printf text >$scratch/tree/b
printf code >$scratch/tree/deep/c
gzip -c $scratch/tree/b >$scratch/tree/a.gz
{ head -c 200000 /dev/zero | tr '\0' x; printf '\0'; } >$scratch/tree/deep/late
dies "a.gz: is not text but compressed by gzip" folders $scratch/tree
check "without them" folders --skip-binary $scratch/tree
said "skipped 2 binary files"
holds "$(printf '@==> b <==\ntext\n==> deep/c <==\ncode')"
# JSON lines are text, but hardly meant
for name in a.jsonl b.ndjson; do echo '{"text": "x"}' >$scratch/$name; done
check "JSON lines" data/text_to_shards --tokenizer byte --out $scratch/lines $scratch/a.jsonl $scratch/b.ndjson $scratch/tree/b
equals "warning: $scratch/a.jsonl and others: encoded as it is, with member names and quotes; scripts/make_shards.py takes the text of each line" \
    "$(cat $scratch/stderr)"
# also where a folder's first file is one of them
mkdir $scratch/other
printf text >$scratch/other/b
cp $scratch/tree/a.gz $scratch/other
check "splits without them" folders --skip-binary --val-fraction 0.5 $scratch/tree $scratch/other
said "train: 1 document"
said "val: 1 document"
said "skipped 3 binary files"
dies "no input: found only files that are not text: 1" folders --skip-binary $scratch/tree/a.gz
dies "--binary and --skip-binary: only one of them" folders --binary --skip-binary $scratch/tree

dies "there is only one folder" folders --val-fraction 0.5 $scratch/two/a
dies "none of its folders has 1000 tokens" folders --doc-len 1000 $scratch/two/a
dies "--document tree: must be file or folder" data/text_to_shards --tokenizer byte --document tree --out $scratch/f $in
report
