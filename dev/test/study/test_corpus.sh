#!/usr/bin/env bash
# dev/study/corpus/corpus.py and corpus.sh: which files and documents of packages become the corpus, what is removed as
# near-duplicate, and a copy in parts
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/study_corpus
. dev/test/check.sh
python=${PYTHON:-python3}
export PYTHONHASHSEED=0

check "corpus" $python dev/test/study/corpus_fixture.py $scratch/a
read -r name brief < <(tail -n 1 $scratch/stdout)
check "the same again" $python dev/test/study/corpus_fixture.py $scratch/b
equals "$name $brief" "$(tail -n 1 $scratch/stdout)"

check "parts" env PART=4k dev/study/corpus/corpus.sh --pack $scratch/a/tiny $scratch/parts
check "from parts" dev/study/corpus/corpus.sh --unpack $scratch/parts $scratch/copy/other
said "corpus $name: $scratch/copy/other"
check "shards" cmp $scratch/a/tiny_train_000000.bin $scratch/copy/other_train_000000.bin
check "parts of a stream" env PART=4k dev/study/corpus/corpus.sh --pack $scratch/a/brief $scratch/brief_parts
check "from parts" dev/study/corpus/corpus.sh --unpack $scratch/brief_parts $scratch/copy/one_intact
said "corpus $brief: $scratch/copy/one_intact"
check "documents" cmp $scratch/a/brief_intact_train_000000.bin $scratch/copy/one_intact_intact_train_000000.bin
printf 'x' | dd of=$scratch/a/tiny_train_000000.bin bs=1 seek=2000 conv=notrunc 2>/dev/null
check "damaged parts" env PART=4k dev/study/corpus/corpus.sh --pack $scratch/a/tiny $scratch/damaged
dev/study/corpus/corpus.sh --unpack $scratch/damaged $scratch/copy/damaged >$scratch/stdout 2>$scratch/stderr &&
    fail "damaged shards"
said "error: $scratch/copy/damaged: damaged" stderr

# a package with another checksum than packages.txt has
mkdir -p $scratch/tree/dev/study/corpus $scratch/tree/data $scratch/tree/scripts $scratch/c/get
cp -r scripts/shell $scratch/tree/scripts
cp dev/study/corpus/corpus.sh $scratch/a/packages.txt $scratch/tree/dev/study/corpus
cp $scratch/a/get/* $scratch/c/get
echo >>$scratch/c/get/one_1.0.orig.tar.gz
cp data/text_to_shards data/ids_to_shards $scratch/tree/data
$scratch/tree/dev/study/corpus/corpus.sh $scratch/c $scratch/c/out >$scratch/stdout 2>$scratch/stderr &&
    fail "another checksum"
said "one_1.0.orig.tar.gz: has another checksum than in packages.txt" stderr
report
